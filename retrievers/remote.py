"""A retriever on another machine, asked over HTTP, so that an index of 21M documents can run where
the memory is. serve.py is the server.

    POST /retrieve  {"queries": [text, ...], "topk": k, "return_scores": true}
                 -> {"result": [[{"document": {"id", "contents": "\\"Title\\"\\ntext"}, "score"},
                                 ...], ...]}

Traps. One query that a server cannot handle fails its whole batch; then each query is sent alone,
once. If the server rejects a query (HTTP 400, 413, 414, 422), the search is rejected and has not
failed: training leaves failed searches out, and a policy must not be able to cause that. A common
server fails if "return_scores" is false. A server that drops a list would give all later queries
the documents of another query, so lists are counted. Left out: encryption, passwords.
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
RETRIES, BACKOFF = 1, 0.5  # retries of a batch; seconds before the first one


class HttpRetriever:
    """Asks the server at `url`. `timeout` is the limit in seconds for one try of a batch, and also
    for sending all of its queries one by one.
    """

    def __init__(self, url: str, timeout: float = 60.0):
        host_of(url, "--retriever_url (of a check, --url) http://host:port")
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self.timeout = timeout
        try:
            self.ask(["Is anybody there?"], 1, timeout)
        except Fault as fault:
            raise InputError(
                f"{self.url}: no retriever answers ({fault}): start it, or correct the address"
            ) from None

    def seconds(self, queries: int, k: int) -> float:
        """Returns the longest time that a call with this many queries can take."""
        batches = -(-queries // BATCH)
        return batches * ((RETRIES + 2) * self.timeout + RETRIES * MAX_BACKOFF)

    def search(self, queries: list[str], k: int) -> list[list[Document] | bool | None]:
        """Returns at most k documents for each query; False for a query that the server rejects,
        and None for one that failed even when it was sent alone. Raises a Fault if all failed.
        """
        documents, fault, distinct = {}, None, list(dict.fromkeys(queries))
        for start in range(0, len(distinct), BATCH):
            batch = distinct[start : start + BATCH]
            try:
                answered = retrying(partial(self.ask, batch, k, self.timeout), RETRIES, BACKOFF)
            except Fault as error:
                fault, answered = error, self.ask_one_by_one(batch, k, error)
            if not answered:  # the next batch would fail, too
                break
            documents |= answered
        if fault and not documents:
            raise fault
        return [documents.get(query) for query in queries]

    def ask_one_by_one(self, batch: list[str], k: int, fault: Fault) -> dict:
        """Sends each query alone. All of them may take `timeout` seconds, one that hangs at most a
        quarter of that. A batch of one query is sent again only if the server works.
        """
        documents, deadline = {}, time.monotonic() + self.timeout
        with contextlib.suppress(TimeoutError):
            for query in batch if len(batch) > 1 or not fault.down else ():
                try:
                    documents |= self.ask([query], k, min(left(deadline), self.timeout / 4))
                except RejectedRequest:
                    documents[query] = False
                except Fault:
                    continue
        return documents

    def ask(self, queries: list[str], k: int, timeout: float) -> dict[str, list[Document]]:
        """Sends one batch once. A reply of another shape is a Fault that may be tried again."""
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
    """Returns a document from its contents, or from its title and text; None for an empty slot.

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
    # Without an id, a hash of the text is the id, so that it is the same in every search.
    text_id = hashlib.sha256(f"{title}\n{text}".encode(errors="replace")).hexdigest()[:16]
    document_id = text_id if record.get("id") in (None, "") else str(record["id"])
    return Document(document_id, title, text) if title or text else None
