"""Asks another language model: a judge, a reader of evidence, a summariser.

    request = (instruction, text)        ask(requests) -> one reply per request, or None

"http://host:port/v1#model" is an OpenAI-compatible server; any other name is a Hugging Face causal
LM that runs in this process. Both decode greedily unless the request gives a temperature
(`Request`). `ask` removes <think> ... </think> from a reply.

    the server is down at the start   InputError (PROBE is sent first)
    a request fails                   RETRIES more tries if they may help, then None
    GIVE_UP requests in a row find    the rest of the batch is not sent
    the server down
    DEAD_BATCHES batches in a row     InputError, which ends the run
    find it down at every request

Left out: streaming, servers that want `max_completion_tokens`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import TopPLogitsWarper

from data import clean
from errors import InputError
from policy import evaluating, frozen_options, load_tokenizer, load_whole, loading
from prompts import without_control, without_thinking
from retrievers.net import Fault, RejectedRequest, fetch_json, host_of, retrying, shown
from rollout import context_of, decode, encode, end_ids, left_padded, plain_generation
from templates import chat_text, messages_of

ADDRESS = "http://host:port/v1#model"
THREADS = 16  # requests sent at the same time
RETRIES = 2  # how often a failed request is sent again, at most
BACKOFF = 0.5  # seconds before the first retry, doubled each time
REPLY_TOKEN = 64  # a server's reply is cut to this many characters times its token limit
CONTEXT = 32_768  # context length in tokens if the server does not report it
SPARE = 128  # tokens kept free for the chat template
GIVE_UP = 16  # with the server down for so many requests in a row, the rest of a batch is not sent
DEAD_BATCHES = 3  # a run ends if in so many batches in a row every request found the server down
PROBE = ("You are asked once whether you are there.", "Reply with the word yes.")


class Request(NamedTuple):
    """One request. A shorter tuple, (instruction, text), is also accepted and decoded greedily."""

    instruction: str
    text: str
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 0  # limit of the reply; 0: max_tokens of the LLM


def load_llm(spec: str, settings, *, max_tokens=256, device="cpu") -> LLM:
    """Loads the model that `spec` names. Each try of a request to a server may take
    `settings.timeout` seconds.
    """
    if spec.startswith(("http://", "https://")):
        return ServerLLM(spec, max_tokens, settings.timeout)
    if not spec or (":" in spec and not Path(spec).exists()):
        raise InputError(
            f"{spec!r} names no language model: give {ADDRESS}, a HF directory or a hub name"
        )
    try:
        tokenizer = load_tokenizer(spec, getattr(settings, "chat_template", ""))
        # `load_policy` would reject model families that cannot be trained here.
        with loading("causal LM", spec):
            model = load_whole(spec, frozen_options(device, settings.load_in_8bit))
        model.eval().requires_grad_(False)
    except InputError as error:
        raise InputError(str(error).removeprefix("--model ")) from None  # --model is not at fault
    return LocalLLM(model, tokenizer, max_tokens, name=spec)


class LLM:
    """The base class. A subclass adds `tokenizer`, `positions` (the context length), and
    `replies(requests)`, which yields pairs of a request and its reply or None.
    """

    instruction = ""  # from --prompt_file; it replaces the judge's or reader's own
    at_once = THREADS  # requests sent at the same time

    def __init__(self, name: str, max_tokens: int):
        self.name = name
        self.max_tokens = max_tokens
        self.failures = 0  # requests without an answer
        self.rejected = set()  # requests that the server rejected, for example for their length

    def ask(self, requests: list[Request]) -> list[str | None]:
        """Returns the replies without the text of their <think> blocks."""
        return [reply and without_thinking(reply) for reply in self.ask_whole(requests)]

    def ask_whole(self, requests: list[Request]) -> list[str | None]:
        """Returns the replies with their <think> blocks. Equal requests are sent once."""
        requests = [Request(*request) for request in requests]
        replies = dict.fromkeys(requests)
        fresh = self.replies([*replies]) if replies else ()
        replies |= tqdm(
            fresh, f"asking {self.name[-40:]}", len(replies), leave=False, delay=3, disable=None
        )
        self.failures += [*replies.values()].count(None)
        return list(map(replies.get, requests))

    def prompt(self, request: Request) -> list[int]:
        return prompt_ids(self.tokenizer, request)

    def tail(self, text: str, rest: str, most: int) -> str:
        """Returns as much of the end of `text` as fits into the context beside `rest` and a reply.
        The reply gets `most` tokens, but at most a quarter of the context. A token is counted for
        every two bytes; hardly any text has more tokens than that.
        """
        tokens = self.positions - SPARE - min(most, self.positions // 4)
        data = text.encode()
        start = len(data) + len(rest.encode()) - 2 * tokens
        return data[max(0, start) :].decode(errors="ignore")


def guessed_tokens(text: str, **_) -> dict:
    """Replaces a server's unknown tokenizer: one token per 3 bytes, more than most texts have."""
    return {"input_ids": [0] * -(-len(text.encode()) // 3)}


guessed_tokens.unk_token_id = 0  # all its ids are <unk>, never a control token
guessed_tokens.decode = str
guessed_tokens.bos_token_id = None


class ServerLLM(LLM):
    """An OpenAI-compatible server. Without "#model" the first model that it lists is used. If
    OPENAI_API_KEY is set, the key is sent.
    """

    tokenizer = staticmethod(guessed_tokens)
    dead_batches = 0  # consecutive batches in which every request found the server down
    fault = ""  # the last error message

    def __init__(self, spec: str, max_tokens=256, timeout=60.0):
        base, _, self.model = spec.partition("#")
        host_of(spec, ADDRESS)  # raises an InputError if it is not an address
        self.base = base.rstrip("/")
        self.timeout = timeout
        self.max_tokens = max_tokens
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:  # checks at the start that the server works and accepts chat requests
            self.model = self.model or self.fetch("models")["data"][0]["id"]
            self.complete(Request(*PROBE))
        except (Fault, LookupError, TypeError) as error:
            reason = error if isinstance(error, Fault) else "it lists no model"
            raise InputError(
                f"{spec}: no answer ({reason}): start the server, or correct the address and the"
                f" model ({ADDRESS})"
            ) from None
        super().__init__(f"{self.base}#{self.model}", max_tokens)

    def fetch(self, path: str, payload: dict | None = None):
        return fetch_json(f"{self.base}/{path}", payload, self.timeout, self.headers)

    @functools.cached_property
    def positions(self) -> int:
        """The context length in tokens. Only some servers report it, for example vLLM."""
        with contextlib.suppress(Fault, LookupError, TypeError, StopIteration):
            listed = self.fetch("models")["data"]
            return next(entry["max_model_len"] for entry in listed if entry["id"] == self.model)
        return CONTEXT

    def complete(self, request: Request) -> str | None:
        """Sends the request once. Returns the reply (""/None if it has no text and no thinking).
        Some servers return the thinking in a separate field; it is then put before the text, in
        <think> tags. If the model reached the token limit while thinking, there is no text, and no
        end tag.
        """
        most = request.max_tokens or self.max_tokens
        payload = {
            "model": self.model,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": most,
            "messages": messages_of(*request[:2]),
        }
        reply = self.fetch("chat/completions", payload)
        try:
            message = reply["choices"][0]["message"]
            content = message["content"]
            thought = message.get("reasoning_content") or message.get("reasoning")
        except (AttributeError, LookupError, TypeError):
            raise Fault(f"a reply without choices: {shown(json.dumps(reply))}") from None
        if isinstance(thought, str):
            content = f"<think>{thought}" + (f"</think>{content}" if content else "")
        return clean(content[: REPLY_TOKEN * most]) if isinstance(content, str) else None

    def replies(self, requests: list[Request]) -> Iterator[tuple[Request, str | None]]:
        in_a_row = 0
        working = False
        # Trap: at exit, Python would wait for threads of concurrent.futures. ThreadPool has daemon
        # threads.
        with ThreadPool(min(THREADS, len(requests))) as pool:
            for request, reply, down in pool.imap_unordered(self.tried, requests):
                in_a_row = in_a_row + 1 if down else 0
                working |= not down
                yield request, reply
                if in_a_row >= GIVE_UP:
                    break
        self.dead_batches = 0 if working else self.dead_batches + 1
        if self.dead_batches >= DEAD_BATCHES:
            raise InputError(
                f"{self.name}: {self.dead_batches} batches in a row without an answer"
                f" ({self.fault}): start the server again"
            )

    def tried(self, request: Request) -> tuple[Request, str | None, bool]:
        """Returns the request, its reply, and whether the server seems to be down."""
        try:
            return request, retrying(partial(self.complete, request), RETRIES, BACKOFF), False
        except Fault as fault:
            self.fault = str(fault)
            if isinstance(fault, RejectedRequest):
                self.rejected.add(request)
            return request, None, fault.down


def prompt_ids(tokenizer, request: Request) -> list[int]:
    # The text may come from a web page or from the policy that is judged, so control tokens are
    # removed: they could begin a new turn.
    text = without_control(request[1], tokenizer)
    return encode(tokenizer, chat_text(tokenizer, request[0], text))


def drawn_ahead(temperature: float, top_p: float, prompts) -> Callable:
    """Returns a logits processor that makes greedy decoding sample: with exponential noise e, the
    largest p / e is at token t with probability p[t] (the Gumbel trick, as in torch.multinomial).

    Trap: the sampling of `generate` uses the global random generator, so a summariser that samples
    would change which tokens the policy samples. The seed is made
    from the batch's `prompts` [B, L]: with one seed for all, similar requests in two batches would
    get the same noise and so, often, the same reply.
    """
    generator = torch.Generator(prompts.device).manual_seed(zlib.crc32(prompts.cpu().numpy()))

    def process_logits(_, logits):  # [B, V]
        p = TopPLogitsWarper(top_p)(None, logits / temperature).softmax(-1)  # [B, V]
        return p / torch.empty_like(p).exponential_(generator=generator)

    return process_logits


class LocalLLM(LLM):
    """A `Policy` or a plain Hugging Face model in this process."""

    def __init__(self, policy, tokenizer, max_tokens=256, batch_size=16, name="local"):
        super().__init__(name, max_tokens)
        self.policy = policy
        self.tokenizer = tokenizer
        self.at_once = batch_size
        self.positions = context_of(policy)
        self.longest_prompt = self.positions - max_tokens
        if self.longest_prompt < 1:
            raise InputError(
                f"{name}: {max_tokens} new tokens leave no room for a prompt in its "
                f"{self.positions} positions"
            )

    def replies(self, requests: list[Request]) -> Iterator[tuple[Request, str | None]]:
        prompts = {request: self.prompt(request) for request in requests}
        # Requests with the same sampling form a group, whose longest prompts come first: a batch
        # then has prompts of similar length, and running out of memory shows early.
        rows = sorted(requests, key=lambda r: (r[2:], len(prompts[r])), reverse=True)
        for sampling, group in itertools.groupby(rows, key=lambda r: r[2:]):
            fit = list(group)
            while fit and len(prompts[fit[0]]) > self.longest_prompt:
                yield fit.pop(0), None  # a truncated prompt would ask something else
            for start in range(0, len(fit), self.at_once):
                batch = fit[start : start + self.at_once]
                texts = self.generate([prompts[request] for request in batch], *sampling)
                for request, text in zip(batch, texts, strict=True):
                    end = decode(self.tokenizer, prompts[request][-16:]).rstrip()
                    # Some chat templates end in <think>, so the reply lacks this tag.
                    yield request, "<think>" * end.endswith("<think>") + text

    def generate(self, prompts: Sequence[list[int]], temperature, top_p, max_tokens):
        ends = end_ids(self.policy, self.tokenizer)
        pad = min(ends, default=0)  # an end token, so that padding adds no text
        tokens, attention = left_padded(prompts, pad, self.policy.device)  # [B, L] each
        sampling = [drawn_ahead(temperature, top_p, tokens)] if temperature else []
        with evaluating(self.policy), plain_generation(self.policy, ends, pad):
            out = self.policy.generate(
                input_ids=tokens,
                attention_mask=attention,
                max_new_tokens=min(max_tokens or self.max_tokens, self.positions - tokens.shape[1]),
                do_sample=False,
                logits_processor=sampling,
            )
        texts = self.tokenizer.batch_decode(
            out[:, tokens.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return list(map(str.strip, texts))
