"""Does a retriever answer sensibly? What goes wrong with retrievers is not seen in training, where
each query has some answer: an index of another corpus, lists in another order than the queries, one
list for everything, an odd query that ends the server.

    python retriever.py check --corpus FILE or --url URL     exit code 1 if something is wrong
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from data import Document, load_corpus
from errors import FlagParser, InputError
from retrievers.remote import HttpRetriever
from retrievers.serve import add_settings, read_settings

SAMPLES = 20  # passages that are looked for
# A word that nothing holds, no word at all, far too many.
ODD_QUERIES = ("zxqvkj", "", "?!", "\n", "kelmouth " * 1000)
COMMON_WORDS = "history city film born river music science war company language".split()


class Finding(NamedTuple):
    level: str  # "ok", "WARNING" or "WRONG"
    name: str
    text: str


def check(retriever, passages: list[Document], k: int = 5) -> list[Finding]:
    """`passages` are those the retriever should have; some of them are looked for."""
    drawn = random.Random(0).sample(passages, min(SAMPLES, len(passages)))
    queries = list(dict.fromkeys(map(query_for, drawn)))  # two of one title are one query
    try:
        lists, alone = ask(retriever, [[query] for query in queries], k)
        again, _ = ask(retriever, [[query] for query in queries], k)
        together, at_once = ask(retriever, [queries], k)
    except Exception as error:  # a retriever may raise anything, and to say so is what this is for
        return [Finding("WRONG", "answers", f"{type(error).__name__}: {error}")]
    n, counts = len(queries), sorted(map(len, lists))
    hits = sum(map(is_among, queries, lists))
    different = len({tuple(found) for found in lists})  # in a small corpus some are rightly alike
    same = sum(map(list.__eq__, lists, again))
    batch = sum(map(list.__eq__, lists, together))
    number = "ok" if counts[0] == counts[-1] == k else "WARNING" if counts[-1] else "WRONG"
    took = f"{alone / n * 1000:.2f} ms a query alone, {at_once / n * 1000:.2f} ms {n} at once"
    return [
        judged("finds itself", hits, n, 0.9, f"are among the {k} for their title or beginning"),
        judged("distinct", different, n, 0.8, "have a list of their own"),
        judged("repeatable", same, n, 1, "find the same when asked again"),
        judged("batch", batch, n, 1, "find the same when asked at once"),
        Finding(number, "number", f"{counts[0]} to {counts[-1]} passages, asked for {k}"),
        check_odd(retriever, k),
        Finding("ok", "time", took),
    ]


def judged(name: str, good: int, of: int, enough: float, text: str) -> Finding:
    level = "ok" if good >= enough * of else "WARNING" if good >= of / 2 else "WRONG"
    return Finding(level, name, f"{good} of {of} {text}")


def check_odd(retriever, k: int) -> Finding:
    try:
        ask(retriever, [[query] for query in ODD_QUERIES], k)
    except Exception as error:
        return Finding("WRONG", "odd queries", f"{type(error).__name__}: {error}")
    return Finding("ok", "odd queries", "an unknown word, no word, a thousand: all are answered")


def query_for(passage: Document) -> str:
    return passage.title or " ".join(passage.text.split()[:12])


def is_among(query: str, found: list[Document]) -> bool:
    """By title, which several passages of one page share, and any of them will do. Not by id:
    another server may count otherwise.
    """
    wanted = query.lower().split()
    return any(query_for(document).lower().split() == wanted for document in found)


def ask(retriever, calls: list[list[str]], k: int) -> tuple[list[list[Document]], float]:
    """(what each query found, seconds of all calls)."""
    lists, start = [], time.perf_counter()
    for queries in calls:
        found = retriever.search(queries, k)
        if len(found) != len(queries):
            raise ValueError(f"{len(found)} lists for {len(queries)} queries")
        if None in found:
            failed = queries[found.index(None)][:50]
            raise ValueError(f"the search failed for {failed!r}")
        lists += found
    return lists, time.perf_counter() - start


def some_passages(retriever, k: int) -> list[Document]:
    """Passages of a retriever whose corpus is not at hand: what it finds for common words."""
    lists = retriever.search(COMMON_WORDS, max(k, 5))
    found = [document for one in lists for document in one or ()]
    if not found:
        tried = ", ".join(COMMON_WORDS)
        raise InputError(f"nothing was found for any of {tried}: give --corpus, or another address")
    return list(dict.fromkeys(found))


def check_command(
    arguments: list[str], record: type, make_retriever: Callable, invented: list[Document]
) -> None:
    """`record` is retriever.RetrieverSettings; without --corpus and --url the invented passages."""
    parser = FlagParser("retriever.py check", description="Does a retriever answer sensibly?")
    parser.add_argument("--corpus", help="a corpus file; with --url, what the server should know")
    parser.add_argument("--url", default="", help="a server's address")
    add_settings(parser, record, ["bm25", "dense", "random", "empty"])
    parser.add_argument("-k", type=int, default=5, help="how many passages")
    args = parser.parse_args(arguments)
    if args.k < 1:
        raise InputError(f"-k {args.k}: ask for at least one passage")
    documents = load_corpus(args.corpus, args.skip_bad) if args.corpus else invented
    if args.url:
        retriever = HttpRetriever(args.url)
        documents = documents if args.corpus else some_passages(retriever, args.k)
    else:
        retriever = make_retriever(documents, read_settings(args, record), device=args.device)
    print(args.url or f"{args.retriever} {args.corpus or 'over invented passages'}")
    findings = check(retriever, documents, args.k)
    for finding in findings:
        print(f"{finding.level:8} {finding.name:14} {finding.text}")
    if any(finding.level == "WRONG" for finding in findings):
        sys.exit(1)
