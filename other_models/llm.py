"""Ask another language model: a judge, a reader of evidence, a summariser.

    request = (instruction, text)        ask(requests) -> a reply each, None where no answer came

"http://host:port/v1#model" is an OpenAI-compatible server, all else a HF causal LM in this process.
Both are greedy; a longer request says how its reply is sampled (`Request`). A reply is kept on disk
for ever, a sampled one too: the same command reads the same text again, and equal requests are
asked once. What a model thinks aloud in <think> ... </think> is no part of its reply.

    the server is down at the start   InputError (`probe`)
    a request fails                   RETRIES more tries with backoff; then None, in `failures`
    GIVE_UP failures in a row         the rest of the batch is not asked
    DEAD_BATCHES batches in a row     without an answer: InputError, which ends a training run

Left out: streaming, servers that want `max_completion_tokens`.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import json
import os
import re
import threading
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
from flags import frozen_in_8bit
from formats.records import append_jsonl, byte_lines
from policy import evaluating, frozen_options, load_tokenizer, load_whole, loading, weights_version
from prompts import chat_text, gaps_of, without_control, without_thinking
from retrievers.net import Fault, RejectedRequest, fetch_json, host_of, retrying, shown
from rollout import context_of, decode, encode, end_ids, left_padded, plain_generation

# In --output_dir, shared by all runs: a reply does not depend on who asked.
CACHE_FOLDER = "llm_cache"
ADDRESS = "http://host:port/v1#model"
THREADS = 16  # requests under way at once
RETRIES, BACKOFF = 2, 0.5  # more tries of a request; seconds before the first, then twice that
REPLY_TOKEN = 64  # characters per token at most: a reply of megabytes would fill the cache
CONTEXT = 32_768  # tokens that a server holds if it does not say
SPARE = 128  # tokens of a chat template
GIVE_UP = 16  # failures in a row, each after all its tries
DEAD_BATCHES = 3
PROBE = ("You are asked once whether you are there.", "Reply with the word yes.")


class Request(NamedTuple):
    """What a model is asked, and how it answers. A tuple that ends earlier will do: greedy."""

    instruction: str
    text: str
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 0  # of the reply; 0: the model's own limit


def load_llm(spec: str, settings, *, max_tokens=256, device="cpu", cache=None) -> LLM:
    """Loads the model that `spec` names; a try of a server may take `settings.timeout` seconds. Its
    replies are kept in the folder `cache`, by default in that of --output_dir.
    """
    if cache is None:
        cache = Path(settings.output_dir, CACHE_FOLDER)
    if spec.startswith(("http://", "https://")):
        return ServerLLM(spec, max_tokens, settings.timeout, cache)
    if not spec or (":" in spec and not Path(spec).exists()):
        known = f"{ADDRESS}, a HF directory or a hub name"
        raise InputError(f"{spec!r} names no language model: give {known}")
    in_8bit = "others" in frozen_in_8bit(settings)
    try:
        tokenizer = load_tokenizer(spec)
        # Not by `load_policy`, which refuses families that cannot be trained here.
        with loading("causal LM", spec):
            model = load_whole(spec, frozen_options(device, in_8bit))
        model.eval().requires_grad_(False)
    except InputError as error:
        raise InputError(str(error).removeprefix("--model ")) from None  # another model's flag
    name = f"{spec}@{weights_version(spec, model)}{'-8bit' * in_8bit}"
    return LocalLLM(model, tokenizer, max_tokens, name=name, cache=cache)


class Cache:
    """Replies by request, in a JSONL file of `folder`; "" keeps none. A broken line is skipped."""

    def __init__(self, folder: str | Path, name: str, max_tokens: int):
        self.name, self.max_tokens = name, max_tokens
        self.replies: dict[str, str] = {}
        file_name = re.sub(r"[^A-Za-z0-9.]+", "-", name)[-80:].strip("-.")
        self.path = Path(folder, f"{file_name}.jsonl") if folder else None
        if self.path:
            append_jsonl(self.path, [])  # can it be written? better known now than after an hour
            for line in byte_lines(self.path):
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    record = json.loads(line)
                    self.replies[record["key"]] = record["reply"]

    def key(self, request: Request) -> str:
        fields = [self.name, self.max_tokens, *Request(*request)]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    def get(self, request: Request) -> str | None:
        return self.replies.get(self.key(request))

    def put(self, request: Request, reply: str) -> None:
        if self.path:
            key = self.key(request)
            self.replies[key] = reply
            append_jsonl(self.path, [{"key": key, "reply": reply}])


class LLM:
    """What both kinds share. Each adds `replies(requests)`: each request and its reply or None; and
    how much it reads: `positions`, and the `length` of a text.
    """

    instruction = ""  # of --prompt_file: asked in place of each request's own, unless a layout
    at_once = THREADS  # requests under way at a time

    def __init__(self, name: str, max_tokens: int, cache: str | Path = ""):
        self.name, self.max_tokens, self.cache = name, max_tokens, Cache(cache, name, max_tokens)
        self.asked = self.failures = 0  # distinct requests; those without an answer
        self.fault = ""  # the last one
        self.rejected = set()  # requests that were refused for what they are: too long, say
        self.lock = threading.Lock()  # a search that was given up may still be asking

    def ask(self, requests: list[Request], readable=bool) -> list[str | None]:
        """Returns the replies without their thinking."""
        replies = self.ask_whole(requests, readable)
        return [reply and without_thinking(reply) for reply in replies]

    def ask_whole(self, requests: list[Request], readable=bool) -> list[str | None]:
        """Returns the replies with what was thought before them.

        readable: of a reply, is it one that is kept? A server that is ill for a while must not be
        believed for ever.
        """
        if own := self.instruction:  # a layout, which the text is made of, has no instruction
            requests = [("" if gaps_of(own) else own, *rest) for _, *rest in requests]
        requests = [Request(*request) for request in requests]
        with self.lock:
            replies = {request: self.cache.get(request) for request in requests}
            if missing := [request for request, reply in replies.items() if reply is None]:
                self.ask_missing(missing, replies, readable)
        return [*map(replies.get, requests)]

    def tail(self, text: str, rest: str, most: int) -> str:
        """The end of the text: as much as the context holds beside the rest and a reply."""
        left = self.positions - self.length(rest) - SPARE - min(most, self.positions // 4)
        if self.length(text) <= left:
            return text
        places = range(len(text))
        return text[bisect.bisect_left(places, -left, key=lambda i: -self.length(text[i:])) :]

    def length(self, text: str) -> int:
        return len(encode(self.tokenizer, text))

    def ask_missing(self, missing: list[Request], replies: dict, readable) -> None:
        with contextlib.closing(self.replies(missing)) as fresh:
            what = f"asking {self.name[-40:]}"
            bar = tqdm(fresh, what, len(missing), leave=False, delay=3, disable=None)
            for request, reply in bar:
                if reply is not None and readable(reply):
                    self.cache.put(request, reply)  # at once: an interrupt loses none that came
                replies[request] = reply
        self.asked += len(missing)
        self.failures += sum(replies[request] is None for request in missing)


def guessed_tokens(text: str, **_) -> dict:
    """Tokenizes for a model elsewhere: 3 bytes each, which is more tokens than most texts have."""
    return {"input_ids": [0] * -(-len(text.encode()) // 3)}


guessed_tokens.unk_token_id, guessed_tokens.decode = 0, str  # nothing that it knows is a tag


class ServerLLM(LLM):
    """An OpenAI-compatible server; without "#model" its first. OPENAI_API_KEY is sent if set."""

    tokenizer = staticmethod(guessed_tokens)
    dead_batches = 0  # in a row

    def __init__(self, spec: str, max_tokens=256, timeout=60.0, cache: str | Path = ""):
        base, _, self.model = spec.partition("#")
        host_of(spec, ADDRESS)  # an address at all?
        self.base, self.timeout, self.max_tokens = base.rstrip("/"), timeout, max_tokens
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.probe(spec)
        # With the address: two servers may call different models by the same name.
        super().__init__(f"{self.base}#{self.model}", max_tokens, cache)

    def prompt(self, request: Request) -> list[int]:
        return encode(self.tokenizer, request.instruction + request.text)

    def probe(self, spec: str) -> None:
        """One request, tried once: is there a server, and does it take what it will be asked?"""
        try:
            self.model = self.model or self.fetch("models")["data"][0]["id"]
            self.complete(Request(*PROBE))
        except (Fault, LookupError, TypeError) as error:
            why = error if isinstance(error, Fault) else "it lists no model"
            advice = f"start the server, or correct the address and the model ({ADDRESS})"
            raise InputError(f"{spec}: no answer ({why}): {advice}") from None

    def fetch(self, path: str, payload: dict | None = None):
        return fetch_json(f"{self.base}/{path}", payload, self.timeout, self.headers)

    @functools.cached_property
    def positions(self) -> int:
        """Tokens of its context, which some servers tell (vLLM)."""
        with contextlib.suppress(Fault, LookupError, TypeError, StopIteration):
            listed = self.fetch("models")["data"]
            return next(its["max_model_len"] for its in listed if its["id"] == self.model)
        return CONTEXT

    def length(self, text: str) -> int:
        """Tokens at most, of almost any text: the tokenizer is not here."""
        return -(-len(text.encode()) // 2)

    def complete(self, request: Request) -> str | None:
        """One try. None is an answer without text. Some servers give the thinking a field of its
        own: it goes before the text, and without an end where the tokens ran out in it.
        """
        most = request.max_tokens or self.max_tokens
        roles = zip(("system", "user"), request[:2], strict=True)
        payload = {
            "model": self.model,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": most,
            "messages": [{"role": role, "content": text} for role, text in roles if text],
        }
        reply = self.fetch("chat/completions", payload)
        try:
            found = reply["choices"][0]["message"]
            content = found["content"]
            thought = found.get("reasoning_content") or found.get("reasoning")
        except (AttributeError, LookupError, TypeError):
            raise Fault(f"a reply without choices: {shown(json.dumps(reply))}") from None
        if isinstance(thought, str):
            content = f"<think>{thought}" + (f"</think>{content}" if content else "")
        return clean(content[: REPLY_TOKEN * most]) if isinstance(content, str) else None

    def replies(self, requests: list[Request]) -> Iterator[tuple[Request, str | None]]:
        self.dead_batches, in_a_row = self.dead_batches + 1, 0  # until the server proves to be well
        # Trap: at exit Python waits for concurrent.futures' threads; these are daemons.
        with ThreadPool(THREADS) as pool:
            for request, reply, fault in pool.imap_unordered(self.tried, requests):
                self.fault = str(fault or self.fault)
                if isinstance(fault, RejectedRequest):
                    self.rejected.add(request)
                if fault and fault.down:
                    in_a_row += 1
                else:
                    self.dead_batches = in_a_row = 0
                yield request, reply
                if in_a_row >= GIVE_UP:
                    break
        if self.dead_batches >= DEAD_BATCHES:
            why = f"{self.dead_batches} batches in a row without an answer ({self.fault})"
            raise InputError(f"{self.name}: {why}: start it again; the replies so far are kept")

    def tried(self, request: Request) -> tuple[Request, str | None, Fault | None]:
        try:
            return request, retrying(partial(self.complete, request), RETRIES, BACKOFF), None
        except Fault as fault:
            return request, None, fault


def prompt_ids(tokenizer, request: Request) -> list[int]:
    # A text may come from a page, or from the policy that is judged: it must open no turn.
    text = without_control(request[1], tokenizer)
    return encode(tokenizer, chat_text(tokenizer, request[0], text))


def drawn_ahead(temperature: float, top_p: float, device) -> Callable:
    """Returns a logits processor after which the greedy choice is a sample: with e exponential the
    largest p / e is at token t with probability p[t] (the Gumbel trick, as in torch.multinomial).

    Trap: `generate` itself draws from the global generator. A summariser that is late, in a thread
    of its own, would change what the policy samples meanwhile. A reply is kept, so the seed is 0.
    """
    generator = torch.Generator(device).manual_seed(0)

    def process_logits(_, logits):  # [B, V]
        p = TopPLogitsWarper(top_p)(None, logits / temperature).softmax(-1)  # [B, V]
        return p / torch.empty_like(p).exponential_(generator=generator)

    return process_logits


class LocalLLM(LLM):
    """A `Policy` or a plain HF model. `cache` only with a `name` that stands for these weights."""

    def __init__(self, policy, tokenizer, max_tokens=256, batch_size=16, name="local", cache=""):
        super().__init__(name, max_tokens, cache)
        self.policy, self.tokenizer, self.at_once = policy, tokenizer, batch_size
        self.positions = context_of(policy)
        self.longest_prompt = self.positions - max_tokens
        if self.longest_prompt < 1:
            why = f"{max_tokens} new tokens do not fit its {self.positions} positions"
            raise InputError(f"{name}: {why}")

    def prompt(self, request: Request) -> list[int]:
        return prompt_ids(self.tokenizer, request)

    def replies(self, requests: list[Request]) -> Iterator[tuple[Request, str | None]]:
        prompts = {request: self.prompt(request) for request in requests}
        # Rows of like length together, the longest first: if memory runs out, then at once.
        fit = sorted(requests, key=lambda request: -len(prompts[request]))
        while fit and (size := len(prompts[fit[0]])) > self.longest_prompt:
            self.fault = f"a prompt of {size} tokens; {self.longest_prompt} fit"
            yield fit.pop(0), None  # cut, it would be another question
        for sampling in dict.fromkeys(request[2:] for request in fit):
            rows = [request for request in fit if request[2:] == sampling]
            for start in range(0, len(rows), self.at_once):
                some = rows[start : start + self.at_once]
                texts = self.generate([prompts[r] for r in some], *sampling)
                for request, text in zip(some, texts, strict=True):
                    end = decode(self.tokenizer, prompts[request][-16:]).rstrip()
                    yield request, "<think>" * end.endswith("<think>") + text  # as templates do

    def generate(self, prompts: Sequence[list[int]], temperature=0.0, top_p=1.0, max_tokens=0):
        ends = end_ids(self.policy, self.tokenizer)
        pad = min(ends, default=0)  # so that what stands behind an end is no text
        tokens, attention = left_padded(prompts, pad, self.policy.device)  # [B, L] each
        most = min(max_tokens or self.max_tokens, self.positions - tokens.shape[1])
        how = {"max_new_tokens": most, "do_sample": False}
        if temperature:
            how["logits_processor"] = [drawn_ahead(temperature, top_p, self.policy.device)]
        with evaluating(self.policy), plain_generation(self.policy, ends, pad):
            out = self.policy.generate(input_ids=tokens, attention_mask=attention, **how)
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        texts = self.tokenizer.batch_decode(out[:, tokens.shape[1] :], **how)
        return [text.strip() for text in texts]
