"""A retriever on another machine: queries go out over HTTP, passages come back, so that a
21M-passage index can run where the memory is. serve.py is the other end; both speak two protocols:

    POST /retrieve  {"queries": [text, ...], "topk": k, "return_scores": true}
                 -> {"result": [[{"document": {"id", "contents": "\\"Title\\"\\ntext"}, "score"},
                                 ...], ...]}
    POST /queries   {"queries": [text, ...], "k": k}   ->   {"answers": [[text, ...], ...]}

Whatever the server does, a call ends: with an InputError at construction if nobody is there; later
with None for a query whose search failed, and a `net.Fault` if there is nothing for any query.

Traps. One query that a server cannot take fails its whole batch: then each is asked alone, once. A
common server fails where "return_scores" is false, so it is always asked for. A server may drop or
double a list: paired by position, all that follow would get another query's passages, so the count
is checked. Left out: encryption, passwords, connections that stay open.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import time
from functools import partial

from data import Document
from errors import InputError
from retrievers.net import MAX_BACKOFF, Fault, fetch_json, host_of, left, remember, retrying, shown

REPLY_FIELD = {"/retrieve": "result", "/queries": "answers"}  # path -> where the lists stand
NUMBER_FIELD = {"/retrieve": "topk", "/queries": "k"}
BATCH = 256  # queries per request
PROBE = "Is anybody there?"


class HttpRetriever:
    """The retriever behind `url`: http://host:port, or that with /retrieve or /queries.

    timeout      seconds per try of a batch, and for all of its queries one by one
    retries      of a batch; the rollout itself tries again where all of a call failed
    cache_size   results (query, k) that are remembered
    """

    needs_questions = False

    def __init__(self, url: str, timeout=60.0, retries=1, cache_size=10_000, backoff=0.5):
        if not url:
            raise InputError("retriever http needs a server: give --retriever_url http://host:port")
        host_of(url)
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.cache, self.cache_size = {}, cache_size
        named = [path for path in REPLY_FIELD if url.rstrip("/").endswith(path)]
        self.base, tried = url.rstrip("/").removesuffix(named[0] if named else ""), []
        for self.path in named or REPLY_FIELD:  # the first protocol that is answered
            try:
                self.ask([PROBE], 1, timeout)
                return
            except Fault as fault:
                tried.append(f"POST {self.base}{self.path}: {fault}")
        raise InputError(
            f"no retriever answers: {'; '.join(tried)}: start the server, or correct its address"
        )

    def seconds(self, queries: int, k: int) -> float:
        """How long a call with so many queries may take, whatever the server does:

        ⌈queries / BATCH⌉ · ((retries + 2) · timeout + Σ backoffs)
        """
        waits = sum(min(self.backoff * 2**attempt, MAX_BACKOFF) for attempt in range(self.retries))
        return math.ceil(queries / BATCH) * ((self.retries + 2) * self.timeout + waits)

    def search(self, queries: list[str], k: int) -> list[list[Document] | None]:
        """At most k documents for each query, as the server ranks them; None for one that failed in
        a batch and alone. What came is remembered: another call need not ask for it again.
        """
        if k < 1:
            return [[] for _ in queries]
        found = {query: self.cache.get((query, k)) for query in queries}  # each distinct one once
        missing = [query for query, documents in found.items() if documents is None]
        fault = None
        for start in range(0, len(missing), BATCH):
            try:
                found |= self.ask_batch(missing[start : start + BATCH], k)
            except Fault as error:
                fault = error
                if error.down:  # so the next batch would fare no better
                    break
        if fault and all(documents is None for documents in found.values()):
            raise fault
        return [None if found[query] is None else list(found[query]) for query in queries]

    def ask_batch(self, batch: list[str], k: int) -> dict[str, list[Document]]:
        """The answers of a batch, or of what of it can be answered; Fault if that is nothing."""
        try:
            return retrying(partial(self.ask, batch, k, self.timeout), self.retries, self.backoff)
        except Fault as fault:
            hopeless = fault.down and not fault.retry  # HTTP 404: each would hear the same
            found = {} if hopeless or len(batch) == 1 else self.ask_one_by_one(batch, k)
            if not found:
                raise
            return found

    def ask_one_by_one(self, batch: list[str], k: int) -> dict[str, list[Document]]:
        """`timeout` seconds for all, of which one query that hangs takes a quarter at most."""
        found, deadline = {}, time.monotonic() + self.timeout
        with contextlib.suppress(TimeoutError):
            for query in batch:
                seconds = min(left(deadline), self.timeout / 4)
                with contextlib.suppress(Fault):
                    found |= self.ask([query], k, seconds)
        return found

    def ask(self, queries: list[str], k: int, timeout: float) -> dict[str, list[Document]]:
        """One try of one batch, remembered."""
        scores = {"return_scores": True} if self.path == "/retrieve" else {}
        payload = {"queries": queries, NUMBER_FIELD[self.path]: k, **scores}
        reply = fetch_json(self.base + self.path, payload, timeout)
        lists = read_reply(reply, REPLY_FIELD[self.path], len(queries), k)
        found = dict(zip(queries, lists, strict=True))
        for query, documents in found.items():
            remember(self.cache, (query, k), documents, self.cache_size)
        return found


def read_reply(reply: object, field: str, count: int, k: int) -> list[list[Document]]:
    """The lists of a reply, one per query. Any other shape is a Fault that may be tried again."""
    lists = reply.get(field) if isinstance(reply, dict) else None
    if not isinstance(lists, list) or not all(isinstance(items, list) for items in lists):
        raise Fault(f"wrong shape: no list of lists under {field!r}: {shown(json.dumps(reply))}")
    if len(lists) != count:
        raise Fault(f"wrong shape: {len(lists)} lists for {count} queries")
    return [[d for d in map(read_document, items) if d is not None][:k] for items in lists]


def read_document(item: object) -> Document | None:
    """One passage in any of the forms that servers have for it; None for an empty slot.

    >>> read_document({"document": {"id": 7, "contents": '"Varen"\\nBy the Ost.'}, "score": 1.5})
    Document(id='7', title='Varen', text='By the Ost.')
    """
    record = item["document"] if isinstance(item, dict) and "document" in item else item
    record = {"contents": record} if isinstance(record, str) else record
    if record is None:
        return None
    names = ["contents", "title", "text"]
    fields = [record.get(name) or "" for name in names] if isinstance(record, dict) else [None]
    if not all(isinstance(value, str) for value in fields) or not record.keys() & {*names}:
        raise Fault(f"wrong shape: no passage: {shown(json.dumps(item))}")
    # A lone surrogate is legal in JSON, and no tokenizer takes it.
    contents, title, text = (value.encode(errors="replace").decode() for value in fields)
    title, text = split_contents(contents) if contents else (title, text)
    title, text, own = title.strip(), text.strip(), record.get("id", record.get("_id"))
    if not title and not text:
        return None
    if isinstance(own, bool) or not isinstance(own, str | int | float) or own == "":
        # The same passage has the same id in every search.
        own = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]
    return Document(str(own), title, text)


def split_contents(contents: str) -> tuple[str, str]:
    """(title, text) of '"Title"\\ntext', of "Title: X Text: Y", or of a text alone."""
    if contents.startswith("Title:") and " Text:" in contents:
        title, _, text = contents.removeprefix("Title:").partition(" Text:")
        return title, text
    title, newline, text = contents.partition("\n")
    quoted = re.fullmatch(r'\s*"(.*)"\s*', title)  # a title may hold quotes itself
    return (quoted[1] if quoted else title, text) if newline else ("", contents)
