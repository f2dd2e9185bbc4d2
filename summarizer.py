"""Documents -> what the policy reads, or the fallback (UR², the section on the LLM summariser).

    SUMMARY CONTRACT   summarize(requests: list[SearchRequest], documents: list[list[Document]]) -> list[SearchResult]
                       one result per request, in order

A summariser stands between retriever and policy and does two things: it makes five passages into one short text, and it
decides whether the query asks for a fact at all. If not, the result is a fallback: the policy reads nothing that it could
use, the reward charges the search, and the rollout tells the policy to ask for a fact. That decision is the flag
`SearchResult.fallback` and nothing else: comparing the text with a sentinel would take a passage or a summary that
happens to say the same for a fallback. The documents stay in the result, so that a log shows what was found.

Left out: the summariser that is a language model, and its distillation.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from data import Document, InputError, Question, SearchRequest, SearchResult, run_main

Summarize = Callable[[list[SearchRequest], list[list[Document]]], list[SearchResult]]
SearchFunction = Callable[[list[SearchRequest]], list[SearchResult]]

OPERATORS = "+-−*/×÷="  # a hyphen counts as a minus: no name of the built-in world has one
MAX_QUERY_WORDS = 12


class PassThrough:
    """No summariser: the policy reads the documents themselves, and every query counts as a lookup."""

    def __call__(self, requests: list[SearchRequest], documents: list[list[Document]]) -> list[SearchResult]:
        return [SearchResult(documents=found) for _, found in zip(requests, documents, strict=True)]


class ExtractiveSummarizer:
    """The built-in world's summariser, without a model: its passages are a sentence or two, so the best one is the summary.

    fallback_text   what stands between the document tags then. With "" the rollout would show the documents themselves,
                    and an ill-posed query would be answered all the same.
    """

    def __init__(self, fallback_text: str = "None"):
        self.fallback_text = fallback_text

    def __call__(self, requests: list[SearchRequest], documents: list[list[Document]]) -> list[SearchResult]:
        return [self.summarize(request.query, found) for request, found in zip(requests, documents, strict=True)]

    def summarize(self, query: str, documents: list[Document]) -> SearchResult:
        if documents and is_lookup(query, documents[0].title):
            return SearchResult(documents=documents, text=documents[0].text)
        return SearchResult(documents=documents, text=self.fallback_text, fallback=True)


def is_lookup(query: str, title: str) -> bool:
    """Does the query ask for a fact about `title`: no arithmetic, not too long, and the title named in it?"""
    arithmetic = any(operator in query for operator in OPERATORS)
    return not arithmetic and len(query.split()) <= MAX_QUERY_WORDS and names(query, title)


def names(query: str, title: str) -> bool:
    """Does `title` stand in the query as whole words? "ana bell" is not in "diana bell" nor in "ana bellow"."""
    words = r"\s+".join(map(re.escape, title.split()))
    return bool(words) and re.search(rf"(?<!\w){words}(?!\w)", query, re.IGNORECASE) is not None


SUMMARIZERS: dict[str, Callable[[], Summarize]] = {"none": PassThrough, "extractive": ExtractiveSummarizer}


def make_summarizer(name: str) -> Summarize:
    if name not in SUMMARIZERS:
        raise InputError(f"unknown summarizer {name!r}: one of {', '.join(SUMMARIZERS)}")
    return SUMMARIZERS[name]()


def make_search(retriever, summarizer: Summarize | None = None, k: int = 5) -> SearchFunction:
    """The function the rollout is given: retrieve for all requests in one call, then summarise for all."""
    summarize = summarizer or PassThrough()

    def search(requests: list[SearchRequest]) -> list[SearchResult]:
        return summarize(requests, retrieve(retriever, requests, k)) if requests else []

    return search


def retrieve(retriever, requests: list[SearchRequest], k: int) -> list[list[Document]]:
    """The documents of every request; rows of one group often ask the same, and that is searched once."""
    oracle = getattr(retriever, "needs_questions", False)
    # For the oracle the question decides: two questions may well ask the same query.
    keys = [(request.query, request.question.id if oracle else "") for request in requests]
    unique = dict(zip(keys, requests, strict=True))
    queries = [request.query for request in unique.values()]
    if oracle:
        found = retriever.search(queries, k, [request.question for request in unique.values()])
    else:
        found = retriever.search(queries, k)
    documents = dict(zip(unique, found, strict=True))  # strict: a retriever that drops a query must not shift the others
    return [list(documents[key]) for key in keys]


def main() -> None:
    passages = [
        Document("1", "ana bell", "ana bell was born in kelmouth ."),
        Document("2", "kelmouth", "kelmouth lies in norland ."),
        Document("3", "tidewerk", "tidewerk builds lanterns ."),
    ]

    class SharedWords:
        """Most words in common first: enough for three passages."""

        def search(self, queries: list[str], k: int) -> list[list[Document]]:
            return [sorted(passages, key=lambda d, q=query: -len({*q.split()} & {*d.text.split()}))[:k] for query in queries]

    search = make_search(SharedWords(), make_summarizer("extractive"), k=2)
    question = Question("demo", "in which country was ana bell born ?", ["norland"])
    queries = {"a fact": "where was ana bell born", "arithmetic": "17 + 25", "ill-posed": "in which country was she born"}
    results = search([SearchRequest(question, query) for query in queries.values()])
    for (kind, query), result in zip(queries.items(), results, strict=True):
        print(f"{kind:10}  query     {query}")
        print(f"{'':10}  found     {', '.join(document.title for document in result.documents)}")
        print(f"{'':10}  reads     {result.text}")
        print(f"{'':10}  fallback  {result.fallback}\n")


if __name__ == "__main__":
    run_main(main)
