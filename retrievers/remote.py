"""Asks a retriever on another machine over HTTP, so that an index of 21M documents can be where the
memory is. serve.py is the server.

    POST /retrieve  {"queries": [text, ...], "topk": k, "return_scores": true}
                 -> {"result": [[{"document": {"id", "contents": "\\"Title\\"\\ntext"}, "score"},
                                 ...], ...]}

A document may also have `title` and `text`, or `content`, as in a corpus (data.passage_of).

A batch that fails is sent again in two halves, those that fail are halved too, and a query that was
alone is sent once more. So a query that a server cannot handle costs no other query its documents,
and a server that was too slow gets shorter requests.

Traps. A query that the server rejects when it is sent alone (HTTP 400, 413, 414, 422) counts as
rejected, not as a failed search: training leaves out trajectories with failed searches, and a
policy must not be able to cause that by its queries. "return_scores" is always true, because a
common server fails otherwise. The lists in a reply are counted: if a server dropped one, all later
queries would get the documents of another query. Left out: passwords.
"""

import json
import time

from data import Document, passage_of
from errors import InputError
from retrievers.net import Fault, RejectedRequest, fetch_json, shown

BATCH = 256  # queries per request
Answers = dict[str, list[Document] | bool]  # of each query; False if it was rejected


class HttpRetriever:
    """Asks the server at `url`. `timeout` is the limit in seconds for the first try of a batch, and
    for all further tries together.
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
        has no answer. Raises a Fault if no query has one. After a batch without answers no further
        one is sent.
        """
        answers: Answers = {}
        for start in range(0, len(queries), BATCH):
            try:
                answers |= self.answers(queries[start : start + BATCH], k)
            except Fault:
                if not answers:
                    raise
                break
        return [answers.get(query) for query in queries]

    def answers(self, batch: list[str], k: int) -> Answers:
        answers, fault, parts = {}, None, [batch]
        deadline = time.monotonic() + 2 * self.timeout
        for part in parts:  # this list grows
            # A quarter, so that a query that hangs leaves time for the others.
            seconds = self.timeout / 4 if fault else self.timeout
            try:
                answers |= self.ask(part, k, min(seconds, deadline - time.monotonic()))
            except Fault as error:
                fault = fault or error
                if part is batch or len(part) > 1:
                    parts += filter(None, (part[::2], part[1::2]))
                elif isinstance(error, RejectedRequest):
                    answers[part[0]] = False
        if not answers:
            raise fault
        return answers

    def ask(self, queries: list[str], k: int, timeout: float) -> Answers:
        """Sends one request. Raises a Fault if it fails or the reply has another shape than it
        should.
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
    for record in (item.get("document", item) for item in items if item):
        if not record.keys() & {"contents", "content", "title", "text"}:
            raise KeyError("contents")
        title, text = passage_of(record)
        documents.append(Document(str(record.get("id") or title or text), title, text))
    return documents
