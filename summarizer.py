"""Documents -> what the policy reads, or the fallback (UR², the section on the LLM summariser).

    SUMMARY CONTRACT   summarize(requests: list[SearchRequest], documents: list[list[Document]]) ->
                       list[SearchResult] one result per request, in order

A summariser stands between retriever and policy and does two things: it makes five passages into
one short text, and it decides whether the query asks for a fact at all. If not, the result is a
fallback: the policy reads nothing that it could use, the reward charges the search, and the rollout
tells the policy to ask for a fact. That decision is the flag `SearchResult.fallback` and nothing
else: comparing the text with a sentinel would take a passage or a summary that happens to say the
same for a fallback. The documents stay in the result, so that a log shows what was found.

`LLMSummarizer` asks a language model, one request per query, all of a moment in one batch. Its
replies can be logged: (query, documents, summary, fallback) is what a small summariser is distilled
from.

Left out: the distillation itself (sft.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data import Document, Question, SearchRequest, SearchResult
from errors import InputError, run_main
from formats.records import append_jsonl, open_error
from prompts import number_documents, without_thinking

Summarize = Callable[[list[SearchRequest], list[list[Document]]], list[SearchResult]]
SearchFunction = Callable[[list[SearchRequest]], list[SearchResult]]

OPERATORS = "+-−*/×÷="  # a hyphen counts as a minus: no name of the built-in world has one
MAX_QUERY_WORDS = 12


class PassThrough:
    """No summariser: the policy reads the documents themselves, and every query counts as a
    lookup.
    """

    def __call__(
        self, requests: list[SearchRequest], documents: list[list[Document]]
    ) -> list[SearchResult]:
        return [SearchResult(documents=found) for _, found in zip(requests, documents, strict=True)]


class ExtractiveSummarizer:
    """The built-in world's summariser, without a model: its passages are a sentence or two, so the
    best one is the summary.

    fallback_text   what stands between the document tags then. With "" the rollout would show the
                    documents themselves, and an ill-posed query would be answered all the same.
    """

    def __init__(self, fallback_text: str = "None"):
        self.fallback_text = fallback_text

    def __call__(
        self, requests: list[SearchRequest], documents: list[list[Document]]
    ) -> list[SearchResult]:
        return [
            self.summarize(request.query, found)
            for request, found in zip(requests, documents, strict=True)
        ]

    def summarize(self, query: str, documents: list[Document]) -> SearchResult:
        if documents and is_lookup(query, documents[0].title):
            return SearchResult(documents=documents, text=documents[0].text)
        return SearchResult(documents=documents, text=self.fallback_text, fallback=True)


def is_lookup(query: str, title: str) -> bool:
    """Does the query ask for a fact about `title`: no arithmetic, not too long, and the title named
    in it?
    """
    arithmetic = any(operator in query for operator in OPERATORS)
    return not arithmetic and len(query.split()) <= MAX_QUERY_WORDS and names(query, title)


def names(query: str, title: str) -> bool:
    """Does `title` stand in the query as whole words? "ana bell" is not in "diana bell" nor in "ana
    bellow".
    """
    words = r"\s+".join(map(re.escape, title.split()))
    return bool(words) and re.search(rf"(?<!\w){words}(?!\w)", query, re.IGNORECASE) is not None


# --------------------------------------------------------------------------------- a language model

NO_FACT = "NO FACT"
MAX_SUMMARY = 2000  # characters; the rollout cuts to its own token budget after that
INSTRUCTION = (
    "You prepare what a search engine found for somebody who works on a larger problem. You get"
    " one search query and the numbered passages that were found for it. If the query asks for a"
    " fact that could be looked up, write short notes: the facts from the passages that answer it,"
    " with full names, numbers and dates, and nothing that is not in the passages; if they do not"
    " answer it, say in one sentence what is missing. If the query asks for no fact at all, but"
    " for a calculation, a piece of reasoning or an opinion, or if it cannot be understood without"
    f" more context, reply with this single line and nothing else: {NO_FACT}"
)


class LLMSummarizer:
    """A language model writes the notes, or says that the query asks for no fact (`NO_FACT`, the
    whole reply).

    llm            anything with `ask`, as llm.py makes it
    fallback_text  what stands between the document tags then
    log            JSONL file to which every new pair is appended; "" logs nothing

    Where nothing was found nobody is asked: a model would make facts up, and the query may have
    been a good one.
    """

    def __init__(self, llm, fallback_text: str = "None", log: str | Path = ""):
        self.llm, self.fallback_text, self.log = llm, fallback_text, Path(log) if log else None
        if self.log:
            _log(self.log, [])  # is it writable? better known before the first search

    def __call__(
        self, requests: list[SearchRequest], documents: list[list[Document]]
    ) -> list[SearchResult]:
        pairs = [(request.query, found) for request, found in zip(requests, documents, strict=True)]
        asked = [i for i, (_, found) in enumerate(pairs) if found]
        replies = self.llm.ask([summary_request(*pairs[i]) for i in asked]) if asked else []
        results = [SearchResult(documents=found) for _, found in pairs]
        summaries: dict[
            str, SummaryPair
        ] = {}  # rows of one group often ask the same: once in the log
        for i, reply in zip(asked, replies, strict=True):
            query, found = pairs[i]
            reply = cut(without_thinking(reply or ""))
            results[i] = self.result(found, reply)
            if reply:
                request = summary_request(query, found)[1]
                summaries[request] = SummaryPair(query, found, reply, results[i].fallback)
        if self.log and summaries:
            _log(self.log, list(summaries.values()))
        return results

    def result(self, documents: list[Document], reply: str) -> SearchResult:
        if not reply:  # an empty text would show the documents themselves
            return SearchResult(documents=documents, error="summariser gave no answer")
        fallback = reply == NO_FACT  # strictly: notes that mention it are notes
        return SearchResult(
            documents=documents, text=self.fallback_text if fallback else reply, fallback=fallback
        )


def summary_request(query: str, documents: list[Document]) -> tuple[str, str]:
    """(instruction, text) for one query: the same when a summariser is asked and when one is
    trained.
    """
    return INSTRUCTION, "\n".join([f"Query: {query}", *number_documents(documents)])


def cut(summary: str) -> str:
    """At most MAX_SUMMARY characters, whole words."""
    if len(summary) <= MAX_SUMMARY:
        return summary
    return re.sub(r"\s+\S*$", "", summary[:MAX_SUMMARY])


class SummaryPair(NamedTuple):
    """One example for a distilled summariser: `summary` is the text to learn, NO_FACT where
    `fallback` holds.
    """

    query: str
    documents: list[Document]
    summary: str
    fallback: bool


def _log(path: Path, pairs: list[SummaryPair]) -> None:
    records = [
        {**pair._asdict(), "documents": [vars(document) for document in pair.documents]}
        for pair in pairs
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_jsonl(path, records)
    except OSError as error:
        raise InputError(
            f"{path}: summaries cannot be logged there ({error.strerror}): give another file"
        ) from None


def read_summary_log(path: str | Path) -> list[SummaryPair]:
    """The pairs of a log, each query with its documents once (the last time it was asked).

    A line that an interrupt cut short is no JSON: it is left out, with a warning. Any other odd
    line is an error.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise open_error(Path(path), error) from None
    pairs = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.strip() else None
        except ValueError:
            print(f"warning: {path}, line {number}: cut short, left out", file=sys.stderr)
            continue
        if record is not None:
            pair = _pair(record, f"{path}, line {number}")
            pairs[pair.query, tuple(pair.documents)] = pair
    return list(pairs.values())


def _pair(record: dict, place: str) -> SummaryPair:
    try:
        documents = [Document(d["id"], d["title"], d["text"]) for d in record["documents"]]
        return SummaryPair(record["query"], documents, record["summary"], bool(record["fallback"]))
    except (TypeError, KeyError) as error:
        raise InputError(
            f"{place}: no summary record ({error!r}): give a log of --summarizer llm"
        ) from None


SUMMARIZERS: dict[str, Callable[..., Summarize]] = {
    "none": PassThrough,
    "extractive": ExtractiveSummarizer,
    "llm": LLMSummarizer,
}


def make_summarizer(name: str, llm=None, log: str | Path = "") -> Summarize:
    """The summariser of that name; `llm` (of llm.py) and `log` are for "llm"."""
    if name not in SUMMARIZERS:
        raise InputError(f"unknown summarizer {name!r}: one of {', '.join(SUMMARIZERS)}")
    if name != "llm":
        return SUMMARIZERS[name]()
    if llm is None:
        raise InputError(
            "--summarizer llm needs a model: give --summarizer_model http://host:port/v1#model, or"
            " a HF model"
        )
    return LLMSummarizer(llm, log=log)


# -------------------------------------------------------------------------- the search of a rollout

SEARCH_FAILED = "search failed"  # of one query, while others of its call were answered


def make_search(retriever, summarizer: Summarize | None = None, k: int = 5) -> SearchFunction:
    """The function the rollout is given: retrieve for all requests in one call, then summarise for
    all. A request whose search failed by itself is an error in its own result; the summariser is
    not asked about it.

    search.report()          what the web retriever counted, for a log
    search.seconds(queries)  how long so many queries may take a retriever that asks elsewhere, the
                             summariser not counted
    Each is there if the retriever has it.
    """
    summarize = summarizer or PassThrough()

    def search(requests: list[SearchRequest]) -> list[SearchResult]:
        found = retrieve(retriever, requests, k) if requests else []
        answered = [i for i, documents in enumerate(found) if documents is not None]
        results = [SearchResult(error=SEARCH_FAILED) for _ in requests]
        told = (
            summarize([requests[i] for i in answered], [found[i] for i in answered])
            if answered
            else []
        )
        for i, result in zip(answered, told, strict=True):
            results[i] = result
        return results

    if hasattr(retriever, "report"):
        search.report = retriever.report
    if hasattr(retriever, "seconds"):
        search.seconds = partial(retriever.seconds, k=k)
    return search


def retrieve(retriever, requests: list[SearchRequest], k: int) -> list[list[Document] | None]:
    """The documents of every request, None where its search failed; rows of one group often ask the
    same, and that is searched once.
    """
    oracle = getattr(retriever, "needs_questions", False)
    # For the oracle the question decides: two questions may well ask the same query.
    keys = [(request.query, request.question.id if oracle else "") for request in requests]
    unique = dict(zip(keys, requests, strict=True))
    queries = [request.query for request in unique.values()]
    if oracle:
        found = retriever.search(queries, k, [request.question for request in unique.values()])
    else:
        found = retriever.search(queries, k)
    documents = dict(
        zip(unique, found, strict=True)
    )  # strict: a retriever that drops a query must not shift the others
    return [None if documents[key] is None else list(documents[key]) for key in keys]


def main() -> None:
    passages = [
        Document("1", "ana bell", "ana bell was born in kelmouth ."),
        Document("2", "kelmouth", "kelmouth lies in norland ."),
        Document("3", "tidewerk", "tidewerk builds lanterns ."),
    ]

    class SharedWords:
        """Most words in common first: enough for three passages."""

        def search(self, queries: list[str], k: int) -> list[list[Document]]:
            return [
                sorted(passages, key=lambda d, q=query: -len({*q.split()} & {*d.text.split()}))[:k]
                for query in queries
            ]

    search = make_search(SharedWords(), make_summarizer("extractive"), k=2)
    question = Question("demo", "in which country was ana bell born ?", ["norland"])
    queries = {
        "a fact": "where was ana bell born",
        "arithmetic": "17 + 25",
        "ill-posed": "in which country was she born",
    }
    results = search([SearchRequest(question, query) for query in queries.values()])
    for (kind, query), result in zip(queries.items(), results, strict=True):
        print(f"{kind:10}  query     {query}")
        print(f"{'':10}  found     {', '.join(document.title for document in result.documents)}")
        print(f"{'':10}  reads     {result.text}")
        print(f"{'':10}  fallback  {result.fallback}\n")


if __name__ == "__main__":
    run_main(main)
