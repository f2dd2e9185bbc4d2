"""Asks a retriever on another machine over HTTP, so that an index of 21M documents can be where the
memory is. serve.py is the server.

    POST /retrieve  {"queries": [text, ...], "topk": k, "return_scores": true}
                 -> {"result": [[{"document": {"id", "contents": "\\"Title\\"\\ntext"}, "score"},
                                 ...], ...]}

A document may also have `title` and `text`, or `content`, as in a corpus (data.passage_of).

Traps. One query that a server cannot handle fails its whole batch, so each query of a failed batch
is then sent alone, once, while time is left. A query that the server rejects when it is sent alone
(HTTP 400, 413, 414, 422) counts as rejected, not as a failed search: training leaves out
trajectories with failed searches, and a policy must not be able to cause that by its queries.
"return_scores" is always true, because a common server fails otherwise. The lists in a reply are
counted: if a server dropped one, all later queries would get the documents of another query. Left
out: passwords.
"""

import json
import time
from functools import partial

from data import Document, passage_of
from errors import InputError
from retrievers.net import Fault, RejectedRequest, fetch_json, left, retrying, shown

BATCH = 256  # queries per request
RETRIES, BACKOFF = 1, 0.5  # retries of a batch; seconds before the first one
Answers = dict[str, list[Document] | bool]  # of each query; False if it was rejected


class HttpRetriever:
    """Asks the server at `url`. `timeout` is the limit in seconds for one try of a batch. If the
    batch fails, its queries are sent one by one, and the same limit holds for all of them together.
    """

    def __init__(self, url: str, timeout: float = 60.0):
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self.timeout = timeout
        try:
            self.ask(["Is anybody there?"], 1, timeout)
        except Fault as fault:
            raise InputError(
                f"--retriever_url {url}: no retriever answers ({fault}): start it, or correct the"
                " address"
            ) from None

    def search(self, queries: list[str], k: int) -> list[list[Document] | bool | None]:
        """Returns for each query at most k documents, False if the server rejects it, or None if it
        has no answer even when it is sent alone. After a batch without any answer no other is sent;
        without any answer at all, the Fault is raised.
        """
        answers: Answers = {}
        fault = None
        for start in range(0, len(queries), BATCH):
            batch = queries[start : start + BATCH]
            try:
                answered = retrying(partial(self.ask, batch, k, self.timeout), RETRIES, BACKOFF)
            except Fault as error:
                fault, answered = error, self.ask_one_by_one(batch, k)
            answers |= answered
            if not answered:
                break
        if fault and not answers:
            raise fault
        return [answers.get(query) for query in queries]

    def ask_one_by_one(self, batch: list[str], k: int) -> Answers:
        """Sends each query alone. All queries together may take `timeout` seconds, and each of them
        at most a quarter of this.
        """
        answers, deadline = {}, time.monotonic() + self.timeout
        for query in batch:
            try:
                answers |= self.ask([query], k, min(left(deadline), self.timeout / 4))
            except RejectedRequest:
                answers[query] = False
            except (Fault, TimeoutError):
                pass
        return answers

    def ask(self, queries: list[str], k: int, timeout: float) -> Answers:
        """Sends one batch once. Raises a Fault if the request fails or the reply has another shape
        than it should.
        """
        payload = {"queries": queries, "topk": k, "return_scores": True}
        reply = fetch_json(self.url, payload, timeout)
        try:
            lists = [read_documents(items)[:k] for items in reply["result"]]
            return dict(zip(queries, lists, strict=True))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise Fault(
                f"not {len(queries)} lists of documents: {shown(json.dumps(reply))}"
            ) from None


def read_documents(items: list[dict | None]) -> list[Document]:
    """Reads one list of a reply; null is a place without a document.

    >>> read_documents([{"document": {"id": 7, "contents": '"Varen"\\nBy the Ost.'}}, None])
    [Document(id='7', title='Varen', text='By the Ost.')]
    """
    documents = []
    for item in items:
        if record := item and item.get("document", item):
            if not record.keys() & {"contents", "content", "title", "text"}:
                raise KeyError("contents")
            title, text = passage_of(record)
            documents.append(Document(str(record.get("id") or title or text), title, text))
    return documents
