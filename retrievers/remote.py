"""Asks a retriever on another machine over HTTP, so that an index of 21M documents can be where the
memory is. serve.py is the server.

    POST /retrieve  {"queries": [text, ...], "topk": k, "return_scores": true}
                 -> {"result": [[{"document": {"id", "contents": "\\"Title\\"\\ntext"}, "score"},
                                 ...], ...]}

Traps. One query that a server cannot handle fails its whole batch, so each query of a failed batch
is then sent alone, once, while time is left. A query that the server rejects when it is sent alone
(HTTP 400, 413, 414, 422) counts as rejected, not as a failed search: training leaves out
trajectories with failed searches, and a policy must not be able to cause that by its queries.
"return_scores" is always true, because a common server fails otherwise. The lists in a reply are
counted: if a server dropped one, all later queries would get the documents of another query. Left
out: passwords.
"""

import hashlib
import json
import time
from functools import partial

from data import Document
from errors import InputError
from formats.records import titled
from retrievers.net import (
    Fault,
    RejectedRequest,
    fetch_json,
    host_of,
    left,
    retrying,
    shown,
)

BATCH = 256  # queries per request
RETRIES, BACKOFF = 1, 0.5  # retries of a batch; seconds before the first one


class HttpRetriever:
    """Asks the server at `url`. `timeout` is the limit in seconds for one try of a batch. If the
    batch fails, its queries are sent one by one, and the same limit holds for all of them together.
    """

    def __init__(self, url: str, timeout: float = 60.0):
        host_of(url, "--retriever_url http://host:port (for a check: --url)")
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self.timeout = timeout
        try:
            self.ask(["Is anybody there?"], 1, timeout)
        except Fault as fault:
            raise InputError(
                f"{self.url}: no retriever answers ({fault}): start it, or correct the address"
            ) from None

    def search(self, queries: list[str], k: int) -> list[list[Document] | bool | None]:
        """Returns for each query a list of at most k documents, False if the server rejects it, or
        None if it has no answer. A query has no answer if it failed even when it was sent alone, or
        was no longer sent because earlier ones failed or took too long. Raises a Fault if no query
        was answered or rejected.
        """
        documents, fault = {}, None
        for start in range(0, len(queries), BATCH):
            batch = queries[start : start + BATCH]
            try:
                answered = retrying(partial(self.ask, batch, k, self.timeout), RETRIES, BACKOFF)
            except Fault as error:
                fault, answered = error, self.ask_one_by_one(batch, k)
            if not answered:  # the next batch would fail, too
                break
            documents |= answered
        if fault and not documents:
            raise fault
        return [documents.get(query) for query in queries]

    def ask_one_by_one(self, batch: list[str], k: int) -> dict:
        """Sends each query alone. All queries together may take `timeout` seconds, and each of them
        at most a quarter of this.
        """
        documents, deadline = {}, time.monotonic() + self.timeout
        for query in batch:
            try:
                documents |= self.ask([query], k, min(left(deadline), self.timeout / 4))
            except RejectedRequest:
                documents[query] = False
            except (Fault, TimeoutError):
                pass
        return documents

    def ask(self, queries: list[str], k: int, timeout: float) -> dict[str, list[Document]]:
        """Sends one batch once; returns query -> documents. Raises a Fault if the request fails or
        the reply has an unexpected shape.
        """
        payload = {"queries": queries, "topk": k, "return_scores": True}
        reply = fetch_json(self.url, payload, timeout)
        lists = reply.get("result") if isinstance(reply, dict) else None
        good = isinstance(lists, list) and all(isinstance(items, list) for items in lists)
        if not good or len(lists) != len(queries):
            raise Fault(
                f"wrong shape: 'result' is not a list of {len(queries)} lists: "
                f"{shown(json.dumps(reply))}"
            )
        documents = [list(filter(None, map(read_document, items)))[:k] for items in lists]
        return dict(zip(queries, documents, strict=True))


def read_document(item: object) -> Document | None:
    """Returns the document of one item of a reply; None if the item or its document is null, or if
    title and text are both empty.

    >>> read_document({"document": {"id": 7, "contents": '"Varen"\\nBy the Ost.'}, "score": 1.5})
    Document(id='7', title='Varen', text='By the Ost.')
    """
    record = item.get("document", item) if isinstance(item, dict) else item
    if record is None:
        return None
    try:
        title, text = map(str.strip, titled(record["contents"]))
    except (AttributeError, KeyError, TypeError):
        raise Fault(f"wrong shape: no passage: {shown(json.dumps(item))}") from None
    document_id = record.get("id")
    if document_id in (None, ""):  # a hash of title and text, the same in every search
        document_id = hashlib.sha256(repr((title, text)).encode()).hexdigest()[:20]
    return Document(str(document_id), title, text) if title or text else None
