"""Asks another language model: a judge, a reader of evidence, a summariser.

    request = (instruction, text)        ask(requests) -> one reply per request, or None

"http://host:port/v1#model" is an OpenAI-compatible server; any other name is a Hugging Face causal
LM that runs in this process. Both decode greedily unless the request gives a temperature
(`Request`). `ask` removes <think> ... </think> from a reply.

    the server is down at the start   InputError (PROBE is sent first)
    a request fails                   one more try, then None; `failures` counts these
    GIVE_UP requests in a row find    InputError, which ends the run
    the server down

Left out: streaming, servers that want `max_completion_tokens`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import NamedTuple

from tqdm import tqdm

from data import clean
from errors import InputError
from policy import evaluating, frozen_options, load_tokenizer, load_whole, loading
from prompts import without_control, without_thinking
from retrievers.net import Fault, RejectedRequest, fetch_json, retrying, shown
from rollout import (
    context_of,
    encode,
    end_ids,
    left_padded,
    opened_by,
    plain_generate,
    seeded,
)
from templates import chat_text, messages_of

ADDRESS = "http://host:port/v1#model"
THREADS = 16  # requests sent at the same time
RETRIES, BACKOFF = 1, 2.0  # retries of a failed request; seconds before the first one
GIVE_UP = 64
PROBE = ("You are asked once whether you are there.", "Reply with the word yes.")


class Request(NamedTuple):
    """One request. A shorter tuple, (instruction, text), is also accepted and decoded greedily."""

    instruction: str
    text: str
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 0  # limit of the reply; 0: max_tokens of the LLM


Replies = Iterator[tuple[Request, str | None]]


def load_llm(spec: str, settings, *, max_tokens=256, device="cpu") -> LLM:
    """Loads the model that `spec` names. Each try of a request to a server may take
    `settings.timeout` seconds.
    """
    if spec.startswith(("http://", "https://")):
        return ServerLLM(spec, max_tokens, settings.timeout)
    try:
        tokenizer = load_tokenizer(spec, settings.chat_template)
        # `load_policy` would reject model families that cannot be trained here.
        with loading("causal LM", spec):
            model = load_whole(spec, frozen_options(device, settings.load_in_8bit))
    except InputError as error:
        raise InputError(str(error).removeprefix("--model ")) from None  # --model is not at fault
    return LocalLLM(model.eval().requires_grad_(False), tokenizer, max_tokens, name=spec)


class LLM:
    """The base class. A subclass adds `tokenizer` and `replies(requests)`, which yields pairs of a
    request and its reply.
    """

    instruction = ""  # from --prompt_file; it replaces the judge's or reader's own

    def __init__(self, name: str, max_tokens: int):
        self.name, self.max_tokens = name, max_tokens
        self.failures = 0  # requests without an answer
        self.rejected = set()  # requests that the server rejected, for example for their length

    def ask(self, requests: list[Request]) -> list[str | None]:
        """Returns the replies without the text of their <think> blocks. Equal requests are sent
        once.
        """
        requests = [Request(*request) for request in requests]
        replies = dict.fromkeys(requests)
        if replies:
            title, total = f"asking {self.name[-40:]}", len(replies)
            fresh = self.replies([*replies])
            replies |= tqdm(fresh, title, total, leave=False, delay=3, disable=None)
        self.failures += [*replies.values()].count(None)
        return [reply and without_thinking(reply) for reply in map(replies.get, requests)]


def guessed_tokens(text: str, **_) -> dict:
    """Replaces a server's unknown tokenizer: one token per 3 bytes, more than most texts have."""
    return {"input_ids": [0] * -(-len(text.encode()) // 3)}


guessed_tokens.unk_token_id = 0  # all its ids are <unk>, never a control token
guessed_tokens.decode = str
guessed_tokens.bos_token_id = None


class ServerLLM(LLM):
    """An OpenAI-compatible server. If OPENAI_API_KEY is set, the key is sent."""

    tokenizer = staticmethod(guessed_tokens)
    in_a_row = 0  # requests that found the server down

    def __init__(self, spec: str, max_tokens=256, timeout=60.0):
        super().__init__(spec, max_tokens)
        base, _, self.model = spec.partition("#")
        self.url, self.timeout = f"{base.rstrip('/')}/chat/completions", timeout
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:  # checks at the start that the server works and accepts chat requests
            self.complete(Request(*PROBE))
        except Fault as fault:
            raise InputError(
                f"{spec}: no answer ({fault}): start the server, or correct the address and the"
                f" model ({ADDRESS})"
            ) from None

    def complete(self, request: Request) -> str | None:
        """Sends the request once. The reply is None if it has no text: if the model reached the
        token limit while thinking, some servers send only the thoughts, in another field.
        """
        payload = {
            "model": self.model,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens or self.max_tokens,
            "messages": messages_of(request.instruction or None, request.text),
        }
        reply = fetch_json(self.url, payload, self.timeout, self.headers)
        try:
            content = reply["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            raise Fault(f"a reply without choices: {shown(json.dumps(reply))}") from None
        return clean(content) if isinstance(content, str) else None

    def replies(self, requests: list[Request]) -> Replies:
        # Trap: at exit, Python would wait for threads of concurrent.futures. ThreadPool has daemon
        # threads.
        with ThreadPool(min(THREADS, len(requests))) as pool:
            yield from pool.imap_unordered(self.tried, requests)

    def tried(self, request: Request) -> tuple[Request, str | None]:
        try:
            reply = retrying(partial(self.complete, request), RETRIES, BACKOFF)
        except RejectedRequest:
            reply = None
            self.rejected.add(request)
        except Fault as fault:
            self.in_a_row += 1
            if self.in_a_row >= GIVE_UP:
                raise InputError(
                    f"{self.name}: {GIVE_UP} requests in a row without an answer ({fault}): start"
                    " the server again"
                ) from None
            return request, None
        self.in_a_row = 0
        return request, reply


def prompt_ids(tokenizer, request: Request) -> list[int]:
    # The text may come from a web page or from the policy that is judged, so control tokens are
    # removed: they could begin a new turn.
    text = without_control(request[1], tokenizer)
    return encode(tokenizer, chat_text(tokenizer, request[0], text))


class LocalLLM(LLM):
    """A `Policy` or a plain Hugging Face model in this process."""

    def __init__(self, policy, tokenizer, max_tokens=256, batch_size=16, name="local"):
        super().__init__(name, max_tokens)
        self.policy, self.tokenizer, self.batch_size = policy, tokenizer, batch_size
        self.positions = context_of(policy)

    def replies(self, requests: list[Request]) -> Replies:
        prompts = {request: prompt_ids(self.tokenizer, request) for request in requests}
        # The longest prompts come first: a batch then has prompts of similar length, and running
        # out of memory shows early. A prompt that is too long gets no reply: truncated, it would
        # ask something else.
        fit = [r for r in requests if len(prompts[r]) <= self.positions - self.max_tokens]
        fit.sort(key=lambda r: (r[2:], len(prompts[r])), reverse=True)
        while fit:
            sampling = fit[0][2:]  # the same for a whole batch
            batch = [request for request in fit[: self.batch_size] if request[2:] == sampling]
            fit = fit[len(batch) :]
            texts = self.generate([prompts[request] for request in batch], *sampling)
            for request, text in zip(batch, texts, strict=True):
                yield request, opened_by(prompts[request], self.tokenizer) + text

    def generate(self, prompts: Sequence[list[int]], temperature, top_p, max_tokens):
        ends = end_ids(self.policy, self.tokenizer)
        pad = min(ends, default=0)  # an end token, so that padding adds no text
        tokens, attention = left_padded(prompts, pad, self.policy.device)  # [B, L] each
        # Trap: without `seeded`, a summariser that samples would change which tokens the policy
        # samples. Each batch has its own seed: with one for all, similar requests in two batches
        # would often get the same reply.
        seed = zlib.crc32(tokens.cpu().numpy())
        length = tokens.shape[1]
        most = min(max_tokens or self.max_tokens, self.positions - length)
        inputs = tokens, attention, ends, pad, temperature, top_p
        with evaluating(self.policy), seeded(seed, self.policy.device):
            out = plain_generate(self.policy, *inputs, max_new_tokens=most)
        texts = self.tokenizer.batch_decode(
            out[:, length:], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return list(map(str.strip, texts))
