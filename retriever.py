"""Query -> documents. Every retriever has `search(queries, k)`, and all rows' queries of a moment
come in one call: a list of documents for each, or None for a query whose search failed by itself
(http, web). Those two also say how long a call may take: `seconds(queries, k)`.

BM25 as rank-bm25's BM25Okapi defines it, over N documents; f = count of term t in document d, |d| =
its words:

    score(q, d) = Σ_{t in q} idf(t) · f · (k1 + 1) / (f + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln((N − n_t + 0.5) / (n_t + 0.5)),   n_t documents hold t;
                  a negative idf (t in more than half of them) becomes epsilon · mean idf

A term adds nothing to a document that lacks it, and nothing in its summand depends on the query. So
the index holds the finished summand of every (term, document) pair, sorted by term: a query adds up
a few slices instead of visiting N documents per word. The scores are the same numbers.

Controls for experiments: `random`, `empty`, `oracle` (the question's own gold passages). Elsewhere:
dense.py (an encoder), remote.py (another machine's retriever), web.py (a search API);
`make_retriever` knows them all by name.

    python retriever.py "a query" --corpus FILE              search
    python retriever.py serve --corpus FILE                  offer a corpus to other machines
    python retriever.py check --corpus FILE or --url URL     does a retriever answer sensibly?

Left out: stemming, stop words, an index on disk.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data import Document, Question, load_corpus
from errors import FlagParser, InputError, run_main
from metrics import tokenize

SHOW_PROGRESS_FROM = 20_000  # documents: below this the index is built before a bar could be read


class BM25:
    """An inverted index: `postings[start[t] : start[t + 1]]` are the documents of term t, `weights`
    their summands.
    """

    needs_questions = False

    def __init__(
        self,
        documents: list[Document],
        k1: float = 1.5,
        b: float = 0.75,
        epsilon: float = 0.25,
        title_boost: int = 1,
        tokenize: Callable[[str], list[str]] = tokenize,
    ):
        """`title_boost`: how often the title's words stand in the indexed text."""
        if title_boost < 0:
            raise InputError(
                f"--title_boost {title_boost}: how often the title counts: give 0 or more"
            )
        if not documents:
            raise InputError(
                "the corpus is empty: BM25 needs at least one passage: give a --corpus that holds"
                " some"
            )
        self.documents, self.tokenize = documents, tokenize
        texts = (f"{d.title} " * title_boost + d.text for d in documents)
        quick = len(documents) < SHOW_PROGRESS_FROM
        texts = tqdm(
            texts, "BM25 index", len(documents), unit=" passages", dynamic_ncols=True, disable=quick
        )
        self.vocabulary, tokens, lengths = count_words(texts, tokenize)
        terms, self.postings, frequencies = invert(tokens, lengths, len(self.vocabulary))
        document_counts = np.bincount(terms, minlength=len(self.vocabulary))  # n_t
        self.start = np.concatenate([[0], np.cumsum(document_counts)])
        self.idf = inverse_document_frequencies(document_counts, len(documents), epsilon)
        norm = k1 * (
            1 - b + b * lengths / max(lengths.mean(), 1e-12)
        )  # [N]; the guard: a corpus without a single word
        # fp64: fp32 would already differ from the reference in the seventh digit, and so order ties
        # differently.
        self.weights = (
            self.idf[terms] * frequencies * (k1 + 1) / (frequencies + norm[self.postings])
        )

    def scores(self, query: str) -> np.ndarray:
        """The score of every document.  # [N]"""
        scores = np.zeros(len(self.documents))
        for word in self.tokenize(
            query
        ):  # a word that is asked twice counts twice, as in the reference
            term = self.vocabulary.get(word)
            if term is not None:
                chosen = slice(self.start[term], self.start[term + 1])
                scores[self.postings[chosen]] += self.weights[
                    chosen
                ]  # no document stands twice in a slice: += is safe
        return scores

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """min(k, N) documents each, best first. As in the reference, documents that share no word
        with the query (score 0) fill up the list.
        """
        return [[document for document, _ in found] for found in self.search_scored(queries, k)]

    def search_scored(self, queries: list[str], k: int) -> list[list[tuple[Document, float]]]:
        """`search`, each document with its score."""
        return [self.best(self.scores(query), k) for query in queries]

    def best(self, scores: np.ndarray, k: int) -> list[tuple[Document, float]]:
        return [(self.documents[i], float(scores[i])) for i in top(scores, k)]


def count_words(
    texts: Iterable[str], tokenize: Callable
) -> tuple[dict[str, int], np.ndarray, np.ndarray]:
    """(word -> term number, all term numbers in reading order, words per document)."""
    vocabulary: defaultdict[str, int] = defaultdict()
    vocabulary.default_factory = vocabulary.__len__  # a new word gets the next number
    tokens, lengths = array("i"), array("i")
    for text in texts:
        words = tokenize(text)
        tokens.extend([vocabulary[word] for word in words])
        lengths.append(len(words))
    # A plain dict from here on: a query's unknown word must not become a new term.
    return dict(vocabulary), np.array(tokens, dtype=np.int64), np.array(lengths, dtype=np.int64)


def invert(
    tokens: np.ndarray, lengths: np.ndarray, terms: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(term, document, frequency) of every pair that occurs, sorted by term, then by document."""
    n = len(lengths)
    pairs = tokens * n + np.repeat(
        np.arange(n), lengths
    )  # one number per word: sorting it sorts by (term, document)
    pairs, frequencies = np.unique(pairs, return_counts=True)
    return (pairs // n).astype(np.int32), (pairs % n).astype(np.int32), frequencies


def inverse_document_frequencies(document_counts: np.ndarray, n: int, epsilon: float) -> np.ndarray:
    idf = np.log(n - document_counts + 0.5) - np.log(document_counts + 0.5)  # [terms]
    # The mean includes the negative ones; in a tiny corpus it is negative itself, and then so is
    # the "floor".
    return np.where(idf < 0, epsilon * idf.mean(), idf) if len(idf) else idf


def top(scores: np.ndarray, k: int) -> np.ndarray:
    """The indices of the k largest scores, best first, ties in document order."""
    k = min(k, len(scores))
    if k <= 0:
        return np.zeros(0, dtype=np.int64)
    # Trap: np.partition(scores, -k) takes 13 ms where nearly all of 100,000 scores are 0; from the
    # other end it takes 1 ms.
    threshold = -np.partition(-scores, k - 1)[k - 1]
    # `argpartition` would keep any of the documents that tie at the threshold. Those above it are
    # fewer than k, and sorted; of those at it the first fill up, unsorted, for they may be all that
    # share no word with the query.
    above = np.flatnonzero(scores > threshold)
    ties = np.flatnonzero(scores == threshold)[: k - len(above)]
    return np.concatenate([above[np.argsort(-scores[above], kind="stable")], ties])


# ----------------------------------------------------------------------------------------- controls


class RandomRetriever:
    """Documents that have nothing to do with the query: what is a search worth if it finds
    noise?
    """

    needs_questions = False

    def __init__(self, documents: list[Document], seed: int = 0):
        if not documents:
            raise InputError("the corpus is empty: there is nothing to draw from")
        self.documents, self.seed = documents, seed

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        return [self.draw(query, k) for query in queries]

    def draw(self, query: str, k: int) -> list[Document]:
        # Seeded by the text, not by hash(): Python's hash of a string is another one in every
        # process.
        return random.Random(f"{self.seed}\n{query}").sample(
            self.documents, min(k, len(self.documents))
        )


class EmptyRetriever:
    """Finds nothing: what does the policy know by heart?"""

    needs_questions = False

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        return [[] for _ in queries]


class OracleRetriever:
    """The gold passages of the question, whatever the query: what would a perfect search be
    worth?
    """

    needs_questions = True

    def search(self, queries: list[str], k: int, questions: list[Question]) -> list[list[Document]]:
        """A question that names no gold passage gets none."""
        return [
            [
                question.references[number - 1] for number in question.supporting[:k]
            ]  # supporting counts from 1
            for _, question in zip(queries, questions, strict=True)
        ]


# ------------------------------------------------------------------------------- retrievers by name


class Options(NamedTuple):
    """What one retriever or another wants to know."""

    seed: int  # random
    title_boost: int  # bm25
    url: str  # http, web
    encoder: str  # dense: a HF directory or a hub name
    folder: str  # dense: where vectors are kept
    index_file: str  # dense: a FAISS index of these passages
    pooling: str  # dense: auto, mean or cls
    device: str  # dense
    timeout: float  # http: seconds per try; web: of the search API, 8 at most
    retries: int  # http
    cache_size: int  # http, web: results that are remembered
    allow_private: bool  # web: may pages come from this network?
    rate: float  # web: requests per second to the search API


def make_dense(documents: list[Document], chosen: Options):
    if not chosen.encoder:
        raise InputError(
            "retriever dense needs an encoder: give --encoder with a HF directory or a hub name"
        )
    from retrievers.dense import DenseRetriever  # here and not above: BM25 loads no torch

    return DenseRetriever(
        documents,
        chosen.encoder,
        folder=chosen.folder,
        device=chosen.device,
        pooling=chosen.pooling,
        index_file=chosen.index_file,
    )


def make_http(documents: list[Document], chosen: Options):
    if not chosen.url:
        raise InputError("retriever http needs a server: give --retriever_url http://host:port")
    from retrievers.remote import HttpRetriever

    return HttpRetriever(
        chosen.url, timeout=chosen.timeout, retries=chosen.retries, cache_size=chosen.cache_size
    )


def make_web(documents: list[Document], chosen: Options):
    if not chosen.url:
        raise InputError("retriever web needs a search API: give its address with --retriever_url")
    from retrievers.web import WebRetriever

    ports = (
        () if chosen.allow_private else (80, 443)
    )  # what runs on this network seldom has port 80
    return WebRetriever(
        chosen.url,
        allow_private=chosen.allow_private,
        ports=ports,
        rate=chosen.rate,
        api_seconds=min(8.0, chosen.timeout),
        kept_queries=chosen.cache_size,
        kept_pages=min(1000, chosen.cache_size),
    )


RETRIEVERS: dict[str, Callable] = {
    "bm25": lambda documents, chosen: BM25(documents, title_boost=chosen.title_boost),
    "dense": make_dense,
    "http": make_http,
    "web": make_web,
    "random": lambda documents, chosen: RandomRetriever(documents, chosen.seed),
    "empty": lambda documents, chosen: EmptyRetriever(),
    "oracle": lambda documents, chosen: OracleRetriever(),
}


def make_retriever(
    name: str,
    documents: list[Document],
    seed: int = 0,
    title_boost: int = 1,
    *,
    url: str = "",
    encoder: str = "",
    folder: str = "",
    index_file: str = "",
    pooling: str = "auto",
    device: str = "cpu",
    timeout: float = 60.0,
    retries: int = 2,
    cache_size: int = 10_000,
    allow_private: bool = False,
    rate: float = 5.0,
):
    """The retriever of that name over these documents (http, web, empty and oracle need none).
    `Options` says which of them wants which setting. Raises InputError for a name or a setting that
    is missing, and where a server does not answer.
    """
    if name not in RETRIEVERS:
        raise InputError(f"unknown retriever {name!r}: one of {', '.join(RETRIEVERS)}")
    chosen = Options(
        seed,
        title_boost,
        url,
        encoder,
        folder,
        index_file,
        pooling,
        device,
        timeout,
        retries,
        cache_size,
        allow_private,
        rate,
    )
    return RETRIEVERS[name](documents, chosen)


# ---------------------------------------------------------------- does a retriever answer sensibly?

ODD_QUERIES = (
    "zxqvkj",
    "",
    "?!",
    "\n",
    "kelmouth " * 1000,
)  # a word that nothing holds, no word at all, far too many
COMMON_WORDS = (
    "history",
    "city",
    "film",
    "born",
    "river",
    "music",
    "science",
    "war",
    "company",
    "language",
)


class Finding(NamedTuple):
    """One line of the check. level: "ok", "WARNING" or "WRONG"."""

    level: str
    name: str
    text: str


def check(
    retriever, passages: list[Document], k: int = 5, samples: int = 20, seed: int = 0
) -> list[Finding]:
    """What goes wrong with retrievers and is not seen in training, where each query has some
    answer: an index of another corpus, lists in another order than the queries, one list for
    everything, an odd query that ends the server.

    passages   which the retriever should have; `samples` of them are looked for
    """
    drawn = random.Random(seed).sample(passages, min(samples, len(passages)))
    wanted = {
        query_for(passage): passage for passage in drawn
    }  # two passages of one title are one query
    queries = list(wanted)
    try:
        alone, single = ask_each(retriever, [[query] for query in queries], k)
        again, _ = ask_each(retriever, [[query] for query in queries], k)
        together, batched = ask_each(retriever, [queries] * 5, k)
    except Exception as error:  # a retriever may raise anything, and to say so is what this is for
        return [Finding("WRONG", "answers", f"{type(error).__name__}: {error}")]
    lists, n = [found for (found,) in alone], len(queries)
    return [
        check_hits(list(wanted.values()), lists, k),
        check_distinct(lists),
        check_alike(
            "repeatable", lists, [found for (found,) in again], "when they are asked again"
        ),
        check_alike("batch", lists, together[0], "when all are asked at once"),
        check_counts(lists, k),
        check_odd(retriever, k),
        Finding("ok", "one query", milliseconds(single)),
        Finding(
            "ok",
            f"{n} at once",
            f"{milliseconds(batched)}; {np.median(batched) / n * 1000:.2f} ms a query",
        ),
    ]


def query_for(passage: Document) -> str:
    return passage.title or " ".join(passage.text.split()[:12])


def is_same(passage: Document, found: Document) -> bool:
    """By title, which several passages of one page share, and any of them will do; without one by
    the beginning. Not by id: another server may count otherwise.
    """
    return query_for(passage).lower().split() == query_for(found).lower().split()


def ask_each(
    retriever, calls: list[list[str]], k: int
) -> tuple[list[list[list[Document]]], list[float]]:
    """(what each call found, seconds of each call)."""
    results, seconds = [], []
    for queries in calls:
        start = time.perf_counter()
        results.append(retriever.search(queries, k))
        seconds.append(time.perf_counter() - start)
        if len(results[-1]) != len(queries):
            raise ValueError(f"{len(results[-1])} lists for {len(queries)} queries")
        if failed := [
            query for query, found in zip(queries, results[-1], strict=True) if found is None
        ]:
            raise ValueError(
                f"the search failed for {len(failed)} of {len(queries)} queries, such as"
                f" {failed[0][:50]!r}"
            )
    return results, seconds


def level(good: int, of: int, enough: float) -> str:
    return "ok" if good >= enough * of else "WARNING" if good >= of / 2 else "WRONG"


def check_hits(passages: list[Document], lists: list[list[Document]], k: int) -> Finding:
    hits, n = (
        sum(any(is_same(p, d) for d in found) for p, found in zip(passages, lists, strict=True)),
        len(lists),
    )
    return Finding(
        level(hits, n, 0.9),
        "finds itself",
        f"{hits} of {n} are among the {k} found for their title or beginning",
    )


def check_distinct(lists: list[list[Document]]) -> Finding:
    different, n = (
        len({tuple(found) for found in lists}),
        len(lists),
    )  # in a small corpus some lists are rightly the same
    return Finding(
        level(different, n, 0.8), "distinct", f"{different} different lists for {n} queries"
    )


def check_alike(name: str, lists: list, others: list, when: str) -> Finding:
    alike, n = sum(one == other for one, other in zip(lists, others, strict=True)), len(lists)
    return Finding(level(alike, n, 1.0), name, f"{alike} of {n} queries find the same {when}")


def check_counts(lists: list[list[Document]], k: int) -> Finding:
    counts = sorted({len(found) for found in lists})
    text = (
        f"{counts[0]} to {counts[-1]} passages"
        if len(counts) > 1
        else f"{counts[0]} passages each time"
    )
    return Finding(
        "ok" if counts == [k] else "WARNING" if counts[-1] else "WRONG",
        "number",
        f"{text}, asked for {k}",
    )


def check_odd(retriever, k: int) -> Finding:
    try:
        ask_each(retriever, [[query] for query in ODD_QUERIES], k)
    except Exception as error:
        return Finding("WRONG", "odd queries", f"{type(error).__name__}: {error}")
    return Finding(
        "ok", "odd queries", "an unknown word, no word, a thousand words: each is answered"
    )


def milliseconds(seconds: list[float]) -> str:
    median, high = np.percentile(seconds, [50, 95]) * 1000
    return f"median {median:.2f} ms, 95 % within {high:.2f} ms"


def some_passages(retriever, k: int) -> list[Document]:
    """Passages of a retriever whose corpus is not at hand: what it finds for common words."""
    found = [
        document
        for one in retriever.search(list(COMMON_WORDS), max(k, 5))
        for document in one or ()
    ]
    if not found:
        raise InputError(
            f"nothing was found for any of {', '.join(COMMON_WORDS)}: give its --corpus, or correct"
            " the address"
        )
    return list(dict.fromkeys(found))


# ------------------------------------------------------------------------------ python retriever.py

INVENTED = [
    Document("1", "Ana Bell", "Ana Bell was born in Kelmouth and draws maps of the coast."),
    Document("2", "Kelmouth", "Kelmouth is a harbour city in the north of Norland."),
    Document("3", "Norland", "Norland is a country of three islands. Its capital is Varen."),
    Document("4", "Tidewerk", "Tidewerk is a company in Kelmouth that builds lanterns."),
    Document("5", "Ivo Marr", "Ivo Marr founded Tidewerk in the year of the great storm."),
    Document("6", "Varen", "Varen lies on the river Ost and is known for its bells."),
]


def search_command(arguments: list[str]) -> None:
    parser = FlagParser(
        description="Search a corpus with BM25.",
        epilog=(
            "A first word `serve` or `check` is a command, see `serve --help` and `check --help`."
            " Capitals do not matter to a search: to look for that very word, write Serve or Check."
        ),
    )
    parser.add_argument("query", nargs="?", default="where was Ana Bell born")
    parser.add_argument("--corpus", help="a corpus file; without it, six invented passages")
    parser.add_argument("-k", type=int, default=3, help="how many passages")
    add_skip_bad(parser)
    args = parser.parse_args(arguments)
    check_k(args.k)
    bm25 = BM25(load_corpus(Path(args.corpus), args.skip_bad) if args.corpus else INVENTED)
    words = bm25.vocabulary.keys() & tokenize(args.query)
    print(
        f"{len(bm25.documents):,} passages, {len(bm25.vocabulary):,} words, {len(bm25.postings):,}"
        " postings"
    )
    if not words:
        print("no passage shares a word with the query")
    for rank, (document, score) in enumerate(bm25.best(bm25.scores(args.query), args.k), 1):
        # Not `score != 0`: the idf of a word that half of the passages hold is ln 1 = 0.
        if words & {*tokenize(f"{document.title} {document.text}")}:
            print(f"{rank}. {score:7.3f}  [{document.id}] {document.title}: {document.text}")


def serve_command(arguments: list[str]) -> None:
    from retrievers.remote import serve

    parser = FlagParser(
        "retriever.py serve", description="Offer a corpus to other machines: POST /retrieve."
    )
    parser.add_argument("--corpus", required=True, help="a corpus file")
    parser.add_argument("--retriever", choices=["bm25", "dense"], default="bm25")
    add_options(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="0.0.0.0 lets other machines in, all of them: there is no password",
    )
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(arguments)
    serve(
        made(args, load_corpus(Path(args.corpus), args.skip_bad)),
        args.host,
        args.port,
        args.retriever,
    )


def check_command(arguments: list[str]) -> None:
    parser = FlagParser(
        "retriever.py check", description="Does a retriever answer sensibly? Exit code 1 if not."
    )
    parser.add_argument(
        "--corpus", help="a corpus file; without it and without a url, six invented passages"
    )
    parser.add_argument(
        "--url",
        "--retriever_url",
        default="",
        help="a server's address; with --corpus, it should know those",
    )
    parser.add_argument(
        "--retriever",
        choices=[name for name in RETRIEVERS if name != "oracle"],
        help="default: http with a url, else bm25",
    )
    add_options(parser)
    parser.add_argument("-k", type=int, default=5, help="how many passages")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="http: seconds per try; web: per request, 8 at most",
    )
    parser.add_argument(
        "--allow_private",
        action="store_true",
        help="web: pages may come from this machine and its network",
    )
    parser.add_argument(
        "--web_rate",
        type=float,
        default=5.0,
        help="web: requests per second to the search API; 0: no limit",
    )
    args = parser.parse_args(arguments)
    check_k(args.k)
    if not args.timeout > 0:  # nor is "nan" a time
        raise InputError(f"--timeout {args.timeout:g}: give more than 0 seconds")
    args.retriever = args.retriever or ("http" if args.url else "bm25")
    documents = (
        load_corpus(Path(args.corpus), args.skip_bad)
        if args.corpus
        else []
        if args.url
        else INVENTED
    )
    retriever = made(
        args,
        documents,
        url=args.url,
        timeout=args.timeout,
        retries=0,
        cache_size=0,
        allow_private=args.allow_private,
        rate=args.web_rate,
    )
    findings = check(
        retriever, documents or some_passages(retriever, args.k), args.k, seed=args.seed
    )
    print(f"{args.retriever} {args.url or args.corpus or 'over six invented passages'}")
    for finding in findings:
        print(f"{finding.level:8} {finding.name:14} {finding.text}")
    if any(finding.level == "WRONG" for finding in findings):
        sys.exit(1)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--title_boost", type=int, default=1, help="bm25: how often the title counts"
    )
    parser.add_argument("--encoder", default="", help="dense: a HF directory or a hub name")
    parser.add_argument(
        "--pooling",
        choices=["auto", "mean", "cls"],
        default="auto",
        help="dense: how the encoder pools",
    )
    parser.add_argument(
        "--vectors",
        default="runs/vectors",
        help="dense: folder where the passages' vectors are kept",
    )
    parser.add_argument(
        "--index_file", default="", help="dense: a FAISS index whose row i is passage i"
    )
    parser.add_argument("--device", default="cpu", help="dense")
    parser.add_argument("--seed", type=int, default=0)
    add_skip_bad(parser)


def add_skip_bad(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip_bad", action="store_true", help="count malformed records of the corpus and go on"
    )


def check_k(k: int) -> None:
    if k < 1:
        raise InputError(f"-k {k}: ask for at least one passage")


def made(args: argparse.Namespace, documents: list[Document], **more):
    return make_retriever(
        args.retriever,
        documents,
        args.seed,
        args.title_boost,
        encoder=args.encoder,
        folder=args.vectors,
        index_file=args.index_file,
        pooling=args.pooling,
        device=args.device,
        **more,
    )


def main() -> None:
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in ("serve", "check"):
        (serve_command if first == "serve" else check_command)(sys.argv[2:])
    else:
        search_command(sys.argv[1:])


if __name__ == "__main__":
    run_main(main)
