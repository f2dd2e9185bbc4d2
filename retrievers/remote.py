"""A retriever on another machine: queries go out over HTTP, passages come back, so that a
21M-passage index can run where the memory is. serve.py is the other end.

    POST /retrieve  {"queries": [text, ...], "topk": k, "return_scores": true}
                 -> {"result": [[{"document": {"id", "contents": "\\"Title\\"\\ntext"}, "score"},
                                 ...], ...]}

Traps. One query that a server cannot take fails its whole batch: then each is asked alone, once. If
the server refuses one for what it is (HTTP 400, 413, 414, 422), that query was rejected, and its
search has not failed: training leaves out what failed, and a policy must not ask for that. A common
server fails where "return_scores" is false. One that drops a list would give all queries
behind it another's passages: lists are counted. Left out: encryption, passwords.
"""

import contextlib
import hashlib
import json
import time
from functools import partial

from data import Document
from errors import InputError
from formats.layouts import titled
from retrievers.net import (
    MAX_BACKOFF,
    Fault,
    RejectedRequest,
    fetch_json,
    host_of,
    left,
    retrying,
    shown,
)

BATCH = 256  # queries per request
RETRIES, BACKOFF = 1, 0.5  # of a batch; seconds


class HttpRetriever:
    """`timeout`: seconds per try of a batch, and for all of its queries one by one."""

    def __init__(self, url: str, timeout: float = 60.0):
        host_of(url, "--retriever_url (of a check, --url) http://host:port")
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self.timeout = timeout
        try:
            self.ask(["Is anybody there?"], 1, timeout)
        except Fault as fault:
            why = f"no retriever answers ({fault})"
            raise InputError(f"{self.url}: {why}: start it, or correct the address") from None

    def seconds(self, queries: int, k: int) -> float:
        """How long a call with so many queries may take, whatever the server does."""
        batches = -(-queries // BATCH)
        return batches * ((RETRIES + 2) * self.timeout + RETRIES * MAX_BACKOFF)

    def search(self, queries: list[str], k: int) -> list[list[Document] | bool | None]:
        """At most k documents each; False for one that the server rejects, None for one that
        failed, also alone; a Fault if all failed.
        """
        found, fault, distinct = {}, None, list(dict.fromkeys(queries))
        for start in range(0, len(distinct), BATCH):
            batch = distinct[start : start + BATCH]
            try:
                answered = retrying(partial(self.ask, batch, k, self.timeout), RETRIES, BACKOFF)
            except Fault as error:
                fault, answered = error, self.ask_one_by_one(batch, k, error)
            if not answered:  # the next batch would fare no better
                break
            found |= answered
        if fault and not found:
            raise fault
        return [found.get(query) for query in queries]

    def ask_one_by_one(self, batch: list[str], k: int, fault: Fault) -> dict:
        """`timeout` seconds for all, of which one query that hangs takes a quarter at most. A batch
        of one is asked again only if the server is well.
        """
        found, deadline = {}, time.monotonic() + self.timeout
        with contextlib.suppress(TimeoutError):
            for query in batch if len(batch) > 1 or not fault.down else ():
                try:
                    found |= self.ask([query], k, min(left(deadline), self.timeout / 4))
                except RejectedRequest:
                    found[query] = False
                except Fault:
                    continue
        return found

    def ask(self, queries: list[str], k: int, timeout: float) -> dict[str, list[Document]]:
        """One try of one batch. A reply of another shape is a Fault that may be tried again."""
        payload = {"queries": queries, "topk": k, "return_scores": True}
        reply = fetch_json(self.url, payload, timeout)
        lists = reply.get("result") if isinstance(reply, dict) else None
        if not isinstance(lists, list) or not all(isinstance(items, list) for items in lists):
            raise Fault(f"wrong shape: no list of lists under 'result': {shown(json.dumps(reply))}")
        if len(lists) != len(queries):
            raise Fault(f"wrong shape: {len(lists)} lists for {len(queries)} queries")
        documents = [list(filter(None, map(read_document, items)))[:k] for items in lists]
        return dict(zip(queries, documents, strict=True))


def read_document(item: object) -> Document | None:
    """One passage, with its contents or with title and text; None for an empty slot.

    >>> read_document({"document": {"id": 7, "contents": '"Varen"\\nBy the Ost.'}, "score": 1.5})
    Document(id='7', title='Varen', text='By the Ost.')
    """
    record = item.get("document", item) if isinstance(item, dict) else item
    if record is None:
        return None
    names = ["contents", "title", "text"]
    fields = [record.get(name) or "" for name in names] if isinstance(record, dict) else [None]
    if not all(isinstance(value, str) for value in fields) or not record.keys() & {*names}:
        raise Fault(f"wrong shape: no passage: {shown(json.dumps(item))}")
    contents, title, text = fields
    title, text = titled(contents) if contents else (title, text)
    title, text = title.strip(), text.strip()
    # Without an id by the text: the same passage has the same id in every search.
    own = hashlib.sha256(f"{title}\n{text}".encode(errors="replace")).hexdigest()[:16]
    found = own if record.get("id") in (None, "") else str(record["id"])
    return Document(found, title, text) if title or text else None
