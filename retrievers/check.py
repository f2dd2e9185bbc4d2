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

import numpy as np

from data import Document, load_corpus
from errors import FlagParser, InputError
from retrievers.remote import HttpRetriever
from retrievers.serve import add_settings, read_settings

# A word that nothing holds, no word at all, far too many.
ODD_QUERIES = ("zxqvkj", "", "?!", "\n", "kelmouth " * 1000)
COMMON_WORDS = "history city film born river music science war company language".split()


class Finding(NamedTuple):
    level: str  # "ok", "WARNING" or "WRONG"
    name: str
    text: str


def check(
    retriever, passages: list[Document], k: int = 5, samples: int = 20, seed: int = 0
) -> list[Finding]:
    """`passages` are those the retriever should have; `samples` of them are looked for."""
    drawn = random.Random(seed).sample(passages, min(samples, len(passages)))
    wanted = {query_for(passage): passage for passage in drawn}  # two of one title are one query
    queries, n = list(wanted), len(wanted)
    try:
        alone, single = ask_each(retriever, [[query] for query in queries], k)
        again, _ = ask_each(retriever, [[query] for query in queries], k)
        together, batched = ask_each(retriever, [queries] * 5, k)
    except Exception as error:  # a retriever may raise anything, and to say so is what this is for
        return [Finding("WRONG", "answers", f"{type(error).__name__}: {error}")]
    lists = [found for (found,) in alone]
    hits = sum(map(is_among, wanted.values(), lists))
    different = len({tuple(found) for found in lists})  # in a small corpus some are rightly alike
    same = sum(map(list.__eq__, alone, again))
    batch = sum(map(list.__eq__, lists, together[0]))
    found = f"{hits} of {n} are among the {k} found for their title or beginning"
    per_query = f"{np.median(batched) / n * 1000:.2f} ms a query"
    return [
        judged("finds itself", hits, n, 0.9, found),
        judged("distinct", different, n, 0.8, f"{different} different lists for {n} queries"),
        judged("repeatable", same, n, 1, f"{same} of {n} queries find the same when asked again"),
        judged("batch", batch, n, 1, f"{batch} of {n} queries find the same when asked at once"),
        check_counts(sorted({len(found) for found in lists}), k),
        check_odd(retriever, k),
        Finding("ok", "one query", milliseconds(single)),
        Finding("ok", f"{n} at once", f"{milliseconds(batched)}; {per_query}"),
    ]


def judged(name: str, good: int, of: int, enough: float, text: str) -> Finding:
    level = "ok" if good >= enough * of else "WARNING" if good >= of / 2 else "WRONG"
    return Finding(level, name, text)


def query_for(passage: Document) -> str:
    return passage.title or " ".join(passage.text.split()[:12])


def is_among(passage: Document, found: list[Document]) -> bool:
    """By title, which several passages of one page share, and any of them will do; without one by
    the beginning. Not by id: another server may count otherwise.
    """
    wanted = query_for(passage).lower().split()
    return any(query_for(document).lower().split() == wanted for document in found)


def ask_each(retriever, calls: list[list[str]], k: int) -> tuple[list, list[float]]:
    """(what each call found, seconds of each call)."""
    results, seconds = [], []
    for queries in calls:
        start = time.perf_counter()
        found = retriever.search(queries, k)
        seconds.append(time.perf_counter() - start)
        if len(found) != len(queries):
            raise ValueError(f"{len(found)} lists for {len(queries)} queries")
        if None in found:
            first, count = queries[found.index(None)][:50], f"{found.count(None)} of {len(queries)}"
            raise ValueError(f"the search failed for {count} queries, such as {first!r}")
        results.append(found)
    return results, seconds


def check_counts(counts: list[int], k: int) -> Finding:
    level = "ok" if counts == [k] else "WARNING" if counts[-1] else "WRONG"
    found = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return Finding(level, "number", f"{found} passages each time, asked for {k}")


def check_odd(retriever, k: int) -> Finding:
    try:
        ask_each(retriever, [[query] for query in ODD_QUERIES], k)
    except Exception as error:
        return Finding("WRONG", "odd queries", f"{type(error).__name__}: {error}")
    return Finding("ok", "odd queries", "an unknown word, no word, a thousand: all are answered")


def milliseconds(seconds: list[float]) -> str:
    median, high = np.percentile(seconds, [50, 95]) * 1000
    return f"median {median:.2f} ms, 95 % within {high:.2f} ms"


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
    add_settings(parser, record, ["bm25", "dense", "random", "empty", "http"])
    parser.add_argument("-k", type=int, default=5, help="how many passages")
    parser.add_argument("--timeout", type=float, default=60.0, help="of a server: seconds per try")
    args = parser.parse_args(arguments)
    if args.k < 1:
        raise InputError(f"-k {args.k}: ask for at least one passage")
    if not args.timeout > 0:  # nor is "nan" a time
        raise InputError(f"--timeout {args.timeout:g}: give more than 0 seconds")
    url = args.url or args.retriever_url
    documents = load_corpus(args.corpus, args.skip_bad) if args.corpus else invented
    if url or args.retriever == "http":
        retriever = HttpRetriever(url, args.timeout, retries=0, cache_size=0)
        documents = documents if args.corpus else some_passages(retriever, args.k)
    else:
        settings = read_settings(args, record)
        retriever = make_retriever(documents, settings, args.seed, device=args.device)
    findings = check(retriever, documents, args.k, seed=args.seed)
    print(f"http {url}" if url else f"{args.retriever} {args.corpus or 'over invented passages'}")
    for finding in findings:
        print(f"{finding.level:8} {finding.name:14} {finding.text}")
    if any(finding.level == "WRONG" for finding in findings):
        sys.exit(1)
