"""Ask another language model: a judge, a reader of evidence, a summariser. A batch of requests in,
a reply for each out.

    request = (instruction, text)            ask(requests) -> replies in order, None where no answer
    came

    requests -> every distinct one once -> kept on disk already? -> the server, or the local model
    -> keep -> replies

Two kinds, made by `load_llm(spec)`: "http://host:port/v1#model" is a server that speaks POST
{base}/chat/completions, and anything else is a HF causal LM. Both are greedy, so a reply may be
kept for ever. What a reasoning model thinks aloud in <think> ... </think> is no part of its reply.

What goes wrong, and what then happens. Nothing waits for ever, and nothing that was computed is
lost:
    the server is down at the start   InputError, one line (`probe`)
    a request fails                   `retries` more tries with backoff, each under a time limit;
    then None, in `failures`
    GIVE_UP failures in a row         the rest of the batch is not asked: with timeout 60 and 2
    retries a server that hangs
                                      costs a batch of 1,000 requests 3 · 60 s + 1.5 s, and not 60
                                      times that
    DEAD_BATCHES batches in a row     without one answer: InputError that says what is down. A
    training run then ends with
                                      its last checkpoint, and all replies so far are kept for the
                                      next try
Left out: streaming, sampling, images, servers that want `max_completion_tokens` instead of
`max_tokens`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from errors import FlagParser, InputError, run_main
from formats.records import append_jsonl
from policy import evaluating, first_line, frozen_options, load_tokenizer
from prompts import chat_text, special_texts, strip_tags, without_thinking
from retrievers.net import MAX_BACKOFF, Fault, fetch_json, host_of, retrying, shown
from rollout import context_of, end_ids, plain_generation

Request = tuple[str, str]  # (instruction, text)
THREADS = 16  # requests under way at once
GIVE_UP = 16  # failures in a row, each after all its retries
DEAD_BATCHES = 3
PROBE = ("You are asked once whether you are there.", "Reply with the word yes.")


# ------------------------------------------------------------------------------------- kept on disk


class Cache:
    """Replies by request, in a JSONL file of `folder` that all runs share; folder "" keeps nothing.

    Append-only. A line that cannot be read is skipped: a cache may forget, but what it says is
    true. (Half a JSON object with anything behind it is never a whole one, so a torn line cannot be
    taken for another reply.)
    """

    def __init__(self, folder: str | Path, name: str, max_tokens: int):
        self.name, self.max_tokens = name, max_tokens
        self.replies: dict[str, str] = {}
        self.path = (
            Path(folder) / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)[-80:].strip('-.')}.jsonl"
            if folder
            else None
        )
        if self.path:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                append_jsonl(self.path, [])  # is it writable? better known now than after an hour
                self.replies = dict(_read_replies(self.path))
            except OSError as error:
                raise InputError(
                    f"{self.path}: replies cannot be kept there ({error.strerror}): give another"
                    " folder"
                ) from None

    def key(self, request: Request) -> str:
        return hashlib.sha256(
            json.dumps([self.name, *request, self.max_tokens]).encode()
        ).hexdigest()

    def get(self, request: Request) -> str | None:
        return self.replies.get(self.key(request)) if self.path else None

    def put(self, request: Request, reply: str) -> None:
        if self.path is None:
            return
        key = self.key(request)
        self.replies[key] = reply
        try:
            append_jsonl(self.path, [{"key": key, "reply": reply}])
        # a full disk: the reply itself is good, and the run may end before the disk matters
        except OSError as error:
            print(
                f"warning: {self.path}: replies are no longer kept ({error.strerror})",
                file=sys.stderr,
            )
            self.path = None


def _read_replies(path: Path) -> Iterator[tuple[str, str]]:
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                key, reply = record["key"], record["reply"]
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            if isinstance(key, str) and isinstance(reply, str):
                yield key, reply


# ---------------------------------------------------------------------------------------------- ask


class LLM:
    """What both kinds share. A kind adds `replies(requests)`, which yields (request, reply or None)
    as they come.

    asked, failures   distinct requests that were really put to the model, and those of them without
                      an answer
    fault, down       what went wrong last, and whether it says that the model cannot be reached at
                      all
    """

    def __init__(self, name: str, max_tokens: int, cache: str | Path = ""):
        self.name, self.max_tokens, self.cache = name, max_tokens, Cache(cache, name, max_tokens)
        self.asked = self.failures = self.dead_batches = 0
        self.fault, self.down = "", False
        self.lock = (
            threading.Lock()
        )  # a search that was given up for its time limit may still be asking

    def ask(self, requests: list[Request]) -> list[str | None]:
        """One reply per request, in order; None where no answer came."""
        with self.lock:
            replies = {
                tuple(request): self.cache.get(tuple(request)) for request in requests
            }  # the distinct ones
            missing = [request for request, reply in replies.items() if reply is None]
            if missing:
                replies |= self._ask_missing(missing)
        found = [replies[tuple(request)] for request in requests]
        return [None if reply is None else without_thinking(reply) for reply in found]

    def _ask_missing(self, missing: list[Request]) -> dict[Request, str | None]:
        replies: dict[Request, str | None] = dict.fromkeys(missing)
        bar = tqdm(
            total=len(missing),
            desc=f"asking {self.name[-40:]}",
            delay=3,
            leave=False,
            dynamic_ncols=True,
            disable=None,
        )
        with bar, contextlib.closing(self.replies(missing)) as fresh:
            for request, reply in fresh:
                if reply is not None:
                    self.cache.put(
                        request, reply
                    )  # at once: an interrupt loses nothing that has come
                replies[request] = reply
                bar.update()
        self._count(len(missing), sum(reply is None for reply in replies.values()))
        return replies

    def _count(self, asked: int, failed: int) -> None:
        self.asked += asked
        self.failures += failed
        self.dead_batches = self.dead_batches + 1 if failed == asked and self.down else 0
        if self.dead_batches >= DEAD_BATCHES:
            raise InputError(
                f"{self.name}: {self.dead_batches} batches in a row without an answer"
                f" ({self.fault}): start it again and go on from the last checkpoint; the replies"
                " so far are kept"
            )


def load_llm(
    spec: str,
    *,
    cache: str = "",
    timeout: float = 60.0,
    retries: int = 2,
    max_tokens: int = 256,
    load_in_8bit: bool = False,
    device: torch.device | str = "cpu",
) -> LLM:
    """The model that `spec` names, ready to be asked: "http://host:port/v1#model", a HF directory
    or a hub name.

    cache         folder where replies are kept; "" keeps none
    timeout       seconds per try, for a server; load_in_8bit and device are for a local model
    """
    if spec.startswith(("http://", "https://")):
        return ServerLLM(spec, max_tokens, cache, timeout, retries)
    if not spec or (":" in spec and not Path(spec).exists()):
        raise InputError(
            f"{spec!r} names no language model: give http://host:port/v1#model, a HF directory or a"
            " hub name"
        )
    return load_local(spec, max_tokens, cache, load_in_8bit, device)


# ----------------------------------------------------------------------------------------- a server


class ServerLLM(LLM):
    """An OpenAI-compatible server, asked by a few threads at once. The environment's OPENAI_API_KEY
    is sent if it is set.

    Without "#model" in the address the server's first model is taken. `backoff` seconds before the
    second try, twice that before the third, and so on.
    """

    def __init__(
        self,
        spec: str,
        max_tokens: int = 256,
        cache: str | Path = "",
        timeout: float = 60.0,
        retries: int = 2,
        backoff: float = 0.5,
    ):
        self.base, _, model = spec.partition("#")
        self.base, self.timeout, self.retries, self.backoff = (
            self.base.rstrip("/"),
            timeout,
            retries,
            backoff,
        )
        host_of(self.base, "http://host:port/v1#model")  # an address at all?
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = model or self.first_model()
        super().__init__(
            self.model, max_tokens, cache
        )  # the name keys the cache: a server that moves keeps its replies
        self.name = f"{self.base}#{self.model}"
        self.probe()

    def first_model(self) -> str:
        try:
            return str(self.fetch("/models")["data"][0]["id"])
        except (Fault, KeyError, IndexError, TypeError) as error:
            why = error if isinstance(error, Fault) else "it lists none"
            raise InputError(
                f"{self.base}: no model could be found there ({why}): is the server up? "
                "name the model as http://host:port/v1#model"
            ) from None

    def probe(self) -> None:
        """One request, tried once: is there a server, and does it take what it will be asked?"""
        try:
            self.complete(PROBE)
        except Fault as fault:
            if fault.down or fault.retry:
                raise InputError(
                    f"{self.name}: no answer ({fault}): start the server, or correct the address"
                    " and the model (http://host:port/v1#model)"
                ) from None
            if not isinstance(fault, Silent):
                raise InputError(
                    f"{self.name}: the server does not take the request ({fault})"
                ) from None

    def complete(self, request: Request) -> str:
        """One try."""
        instruction, text = request
        messages = [{"role": "system", "content": instruction}, {"role": "user", "content": text}]
        settings = {"model": self.model, "temperature": 0, "max_tokens": self.max_tokens}
        reply = self.fetch("/chat/completions", {**settings, "messages": messages})
        try:
            content = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise Fault(f"a reply without choices: {shown(json.dumps(reply))}") from None
        if not isinstance(
            content, str
        ):  # a reasoning model whose tokens ran out before it had said anything
            raise Silent("a reply without text", retry=False, down=False)
        return content

    def fetch(self, path: str, payload: dict | None = None) -> dict:
        """One exchange of JSON, under the time limit."""
        return fetch_json(self.base + path, payload, timeout=self.timeout, headers=self.headers)

    def replies(self, requests: list[Request]) -> Iterator[tuple[Request, str | None]]:
        # Daemon threads and not a pool's: Python would wait for those at exit, and Ctrl-C could
        # take minutes.
        todo, done, stop = queue.SimpleQueue(), queue.SimpleQueue(), threading.Event()
        for request in requests:
            todo.put(request)
        for _ in range(min(THREADS, len(requests))):
            threading.Thread(target=self._work, args=(todo, done, stop), daemon=True).start()
        try:
            yield from self._collect(len(requests), done)
        finally:
            stop.set()

    def _collect(self, count: int, done: queue.SimpleQueue) -> Iterator[tuple[Request, str | None]]:
        """The replies as they come, until GIVE_UP in a row have failed; what has not come by then
        is None.
        """
        # A try waits at most about 2 · timeout; should a thread be stuck all the same, nobody waits
        # for it.
        longest = (self.retries + 1) * (2 * self.timeout + MAX_BACKOFF) + 10
        self.down, in_a_row = True, 0
        for _ in range(count):
            try:
                request, reply, fault = done.get(timeout=longest)
            except queue.Empty:
                return
            if fault is not None:
                self.fault = str(fault)
            self.down = self.down and fault is not None and fault.down
            in_a_row = in_a_row + 1 if fault is not None and fault.down else 0
            yield request, reply
            if in_a_row >= GIVE_UP:
                return

    def _work(
        self, todo: queue.SimpleQueue, done: queue.SimpleQueue, stop: threading.Event
    ) -> None:
        while not stop.is_set():
            try:
                request = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((request, self._try(request, stop), None))
            except Fault as fault:
                done.put((request, None, fault))
            except Exception as error:  # whatever it is, somebody waits for a word
                done.put((request, None, Fault(f"{type(error).__name__}: {error}")))

    def _try(self, request: Request, stop: threading.Event) -> str:
        return retrying(lambda: self.complete(request), self.retries, self.backoff, stop.wait)


class Silent(Fault):
    """The server is well and answered, but said nothing."""


# ------------------------------------------------------------------------------------ a local model


class LocalLLM(LLM):
    """A causal LM in this process: greedy, `batch_size` requests at once, left-padded.

    policy    a `Policy` or a plain HF model
    cache     only with a `name` that stands for these very weights

    The built-in world's chat template shows the last message only: there a model reads the text,
    not the instruction.
    """

    def __init__(
        self,
        policy,
        tokenizer,
        max_tokens: int = 256,
        batch_size: int = 16,
        name: str = "local model",
        cache: str | Path = "",
    ):
        super().__init__(name, max_tokens, cache)
        self.policy, self.tokenizer, self.batch_size = policy, tokenizer, batch_size
        self.longest_prompt = context_of(policy, None) - max_tokens
        if self.longest_prompt < 1:
            raise InputError(
                f"{name}: {max_tokens} new tokens do not fit the model's {context_of(policy, None)}"
                " positions"
            )
        # A text may come from a page, or from the policy that is being judged: it must not open a
        # turn of its own.
        self.forbidden = special_texts(tokenizer)

    def prompt(self, request: Request) -> list[int]:
        text = chat_text(self.tokenizer, request[0], strip_tags(request[1], self.forbidden))
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def replies(self, requests: list[Request]) -> Iterator[tuple[Request, str | None]]:
        prompts = {request: self.prompt(request) for request in requests}
        for request in requests:
            if len(prompts[request]) > self.longest_prompt:  # cut, it would be another question
                self.fault = (
                    f"a prompt of {len(prompts[request])} tokens; the longest that fits has"
                    f" {self.longest_prompt}"
                )
                yield request, None
        # Rows of like length together, the longest first: if memory runs out, then at once.
        fit = [request for request in requests if len(prompts[request]) <= self.longest_prompt]
        fit.sort(key=lambda request: -len(prompts[request]))
        for start in range(0, len(fit), self.batch_size):
            some = fit[start : start + self.batch_size]
            yield from zip(some, self.generate([prompts[request] for request in some]), strict=True)

    def generate(self, contexts: list[list[int]]) -> list[str]:
        ends = end_ids(self.policy, self.tokenizer)
        pad = (
            self.tokenizer.pad_token_id
            if self.tokenizer.pad_token_id is not None
            else min(ends, default=0)
        )
        width = max(map(len, contexts))
        device = self.policy.device
        tokens = torch.tensor(
            [[pad] * (width - len(c)) + c for c in contexts], device=device
        )  # [B, width]
        attention = torch.tensor(
            [[0] * (width - len(c)) + [1] * len(c) for c in contexts], device=device
        )
        try:
            with evaluating(self.policy), plain_generation(self.policy, ends, pad):
                out = self.policy.generate(
                    input_ids=tokens,
                    attention_mask=attention,
                    max_new_tokens=self.max_tokens,
                    do_sample=False,
                )
        except torch.OutOfMemoryError:
            raise InputError(
                f"{self.name}: out of memory with {len(contexts)} requests of {width} tokens at"
                " once: use 8 bits, a smaller model, or a server"
            ) from None
        return [self.decode(row, ends) for row in out[:, width:].tolist()]

    def decode(self, ids: list[int], ends: set[int]) -> str:
        """Up to the first end of text: behind it `generate` pads, and the pad may be an ordinary
        token.
        """
        length = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        return self.tokenizer.decode(
            ids[:length], skip_special_tokens=True, clean_up_tokenization_spaces=False
        ).strip()


def load_local(
    path: str,
    max_tokens: int = 256,
    cache: str | Path = "",
    load_in_8bit: bool = False,
    device: torch.device | str = "cpu",
) -> LocalLLM:
    """A HF model from a directory or the hub, frozen: bf16 on a GPU (fp32 on CPUs), or 8-bit
    weights.
    """
    options = frozen_options(device, load_in_8bit)
    try:
        tokenizer = load_tokenizer(path)
    except InputError as error:  # it speaks of --model, which is another one
        raise InputError(str(error).removeprefix("--model ")) from None
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **options).eval().requires_grad_(False)
        model = model if load_in_8bit else model.to(device)
    except Exception as error:  # a broken weight file raises whatever its format's reader does
        raise InputError(
            f"{path}: no causal LM could be loaded from there: {first_line(error)}"
        ) from None
    name = f"{path}@{weights_version(path, model)}{'-8bit' * load_in_8bit}"
    return LocalLLM(model, tokenizer, max_tokens, name=name, cache=cache)


def weights_version(path: str, model=None) -> str:
    """Which weights these are. Trap: a directory keeps its name when a run writes other weights
    into it, and a cache by name would then give the old model's replies.
    """
    if not Path(path).is_dir():
        return str(getattr(getattr(model, "config", None), "_commit_hash", None) or "main")[:12]
    files = sorted(
        (f.name, f.stat().st_size, f.stat().st_mtime_ns)
        for f in Path(path).iterdir()
        if f.is_file()
    )
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12]


# ------------------------------------------------------------------------------------ on one screen


class _Echo(BaseHTTPRequestHandler):
    """A server for the demonstration: it fails the second time it is asked, and says a text in
    capitals.
    """

    count = 0

    def do_POST(self):
        _Echo.count += 1
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1][
            "content"
        ]
        body = json.dumps(
            {"choices": [{"message": {"content": f"<think>hm</think>{text.upper()}"}}]}
        ).encode()
        self.send_response(500 if _Echo.count == 2 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main() -> None:
    parser = FlagParser(
        description="Ask a language model; without one, a server of this file's own."
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        help="http://host:port/v1#model, a HF directory or a hub name",
    )
    parser.add_argument(
        "text",
        nargs="*",
        default=["where was ana bell born?", "17 + 25", "where was ana bell born?"],
    )
    arguments = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    spec = arguments.model or f"http://127.0.0.1:{server.server_port}/v1#capitals"
    requests = [("Answer in a few words.", text) for text in arguments.text]
    with tempfile.TemporaryDirectory() as folder:
        for turn in ("first", "again"):
            llm = load_llm(spec, cache=folder)
            replies = llm.ask(requests)
            print(
                f"{turn}: {len(requests)} requests, {llm.asked} asked, {llm.failures} without an"
                " answer"
            )
        for (_, text), reply in zip(requests, replies, strict=True):
            print(f"    {text:28} -> {reply}")
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    run_main(main)
