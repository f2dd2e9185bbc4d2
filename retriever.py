"""Query -> documents. Every retriever has `search(queries, k)`, and all rows' queries of a moment
come in one call: a list of documents for each, or None for a query whose search failed by itself.

BM25 as rank-bm25's BM25Okapi defines it, over N documents; f = count of term t in document d,
|d| = its words:

    score(q, d) = Σ_{t in q} idf(t) · f · (k1 + 1) / (f + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln((N − n_t + 0.5) / (n_t + 0.5)),   n_t documents hold t;
                  a negative idf (t in more than half of them) becomes epsilon · mean idf, or
                  where that is not above 0 either (two documents, say) a small number

No summand depends on the query. So the index holds the finished summand of every (term, document)
pair, sorted by term: a query adds up a few slices instead of visiting N documents per word.

Controls for experiments: `random`, `empty`, `oracle` (the question's own gold passages). Behind the
door: retrievers/dense.py (an encoder) and retrievers/remote.py (another machine's retriever).

    python retriever.py "a query" --corpus FILE              search
    python retriever.py serve --corpus FILE                  offer a corpus to other machines
    python retriever.py check --corpus FILE or --url URL     does a retriever answer sensibly?

Left out: stemming, stop words, an index on disk.
"""

import random
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from data import Document, Question, harmless, load_corpus
from errors import FlagParser, InputError, run_main, setting
from metrics import tokenize

SHOW_PROGRESS_FROM = 20_000  # documents: below this the index is built before a bar could be read
RETRIEVERS = ("bm25", "dense", "http", "random", "empty", "oracle")
Array = np.ndarray
SMALL_IDF = 0.05  # where epsilon · mean idf is none
Lists = list[list[Document]]  # one per query, best first


@dataclass(frozen=True)
class RetrieverSettings:
    retriever: str = setting(
        "bm25", "bm25, dense: of the corpus; http: elsewhere; others: controls", one_of=RETRIEVERS
    )
    retriever_url: str = setting("", "http: the server's address, http://host:port")
    encoder: str = setting("", "dense: an encoder such as intfloat/e5-base-v2, or its directory")
    title_boost: int = setting(1, "how often BM25 counts a passage's title", least=0, only="papers")
    documents_per_search: int = setting(5, "passages per query", least=1)


def make_retriever(
    documents: list[Document], settings: RetrieverSettings, seed=0, timeout=60.0, device=""
):
    """The retriever that the settings name, over these documents (http, empty, oracle need none).

    timeout   http: seconds per try; device: of dense, "" is a free GPU
    """
    name = settings.retriever
    if name == "bm25":
        return BM25(documents, title_boost=settings.title_boost)
    if name == "random":
        return RandomRetriever(documents, seed)
    if name == "empty":
        return EmptyRetriever()
    if name == "oracle":
        return OracleRetriever()
    if name == "http":
        from retrievers.remote import HttpRetriever  # a door: BM25 needs no network

        return HttpRetriever(settings.retriever_url, timeout)
    if name == "dense":
        from retrievers.dense import DenseRetriever  # a door: BM25 loads no torch

        return DenseRetriever(documents, settings.encoder, device)
    raise InputError(f"unknown retriever {name!r}: one of {', '.join(RETRIEVERS)}")


# --------------------------------------------------------------------------------------------- BM25
class BM25:
    """An inverted index: `postings[start[t] : start[t + 1]]` are the documents of term t,
    `weights` their summands.
    """

    def __init__(
        self,
        documents: list[Document],
        k1: float = 1.5,
        b: float = 0.75,
        epsilon: float = 0.25,
        title_boost: int = 1,
    ):
        """`title_boost`: how often the title's words stand in the indexed text."""
        if not documents:
            raise InputError("the corpus is empty: BM25 needs a --corpus with at least one passage")
        self.documents = documents
        n = len(documents)
        texts = (f"{d.title} " * title_boost + d.text for d in documents)
        texts = tqdm(texts, "BM25 index", n, unit=" passages", disable=n < SHOW_PROGRESS_FROM)
        self.vocabulary, tokens, lengths = count_words(texts)
        terms, self.postings, frequencies = invert(tokens, lengths)
        document_counts = np.bincount(terms, minlength=len(self.vocabulary))  # [terms], n_t
        self.start = np.concatenate([[0], np.cumsum(document_counts)])
        self.idf = inverse_document_frequencies(document_counts, n, epsilon)
        mean = max(lengths.mean(), 1e-12)  # a corpus may have no word at all
        norm = k1 * (1 - b + b * lengths / mean)  # [N]
        # fp64: in fp32 the seventh digit would differ from the reference, and so order ties.
        gain = frequencies * (k1 + 1) / (frequencies + norm[self.postings])  # [pairs]
        self.weights = self.idf[terms] * gain

    def scores(self, query: str) -> Array:
        """The score of every document.  # [N]"""
        scores = np.zeros(len(self.documents))
        counts = Counter(tokenize(query))  # a word that is asked twice counts twice
        for word, count in counts.items():
            term = self.vocabulary.get(word)
            if term is not None:
                chosen = slice(self.start[term], self.start[term + 1])
                # No document stands twice in a slice: += is safe.
                scores[self.postings[chosen]] += count * self.weights[chosen]
        return scores

    def search(self, queries: list[str], k: int) -> Lists:
        """min(k, N) documents each, best first. As in the reference, documents that share no word
        with the query (score 0) fill up the list.
        """
        return [self.best(query, k) for query in queries]

    def best(self, query: str, k: int) -> list[Document]:
        return [self.documents[i] for i in top(self.scores(query), k)]


def count_words(texts: Iterable[str]) -> tuple[dict[str, int], Array, Array]:
    """(word -> term number, all term numbers in reading order, words per document)."""
    vocabulary = defaultdict()
    vocabulary.default_factory = vocabulary.__len__  # a new word gets the next number
    tokens, lengths = array("i"), array("i")
    for text in texts:
        words = tokenize(text)
        tokens.extend([vocabulary[word] for word in words])
        lengths.append(len(words))
    # A plain dict: a query's unknown word must not become a new term.
    return dict(vocabulary), np.array(tokens, np.int64), np.array(lengths, np.int64)


def invert(tokens: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """(term, document, frequency) of every pair that occurs, sorted by term, then by document."""
    n = len(lengths)
    # One number per word: sorting it sorts by (term, document).
    pairs = tokens * n + np.repeat(np.arange(n), lengths)
    pairs, frequencies = np.unique(pairs, return_counts=True)
    return (pairs // n).astype(np.int32), (pairs % n).astype(np.int32), frequencies


def inverse_document_frequencies(document_counts: Array, n: int, epsilon: float) -> Array:
    without = n - document_counts
    idf = np.log(without + 0.5) - np.log(document_counts + 0.5)  # [terms]
    floor = epsilon * idf.mean() if len(idf) else 0.0
    if floor > 0:
        return np.where(idf < 0, floor, idf)
    # The mean counts the negative ones too. In a tiny corpus the reference's "floor" is negative,
    # and passages that hold a word of the query would rank last.
    return np.maximum(idf, SMALL_IDF)


def top(scores: Array, k: int) -> Array:
    """The indices of the k largest scores, best first, ties in document order."""
    k = min(k, len(scores))
    if k <= 0:
        return np.zeros(0, int)
    # Trap: with most of 100,000 scores 0, np.partition(scores, -k) takes 13 ms; this end takes 1.
    best_first = np.partition(-scores, k - 1)
    threshold = -best_first[k - 1]
    # `argpartition` would keep any of those that tie at the threshold; here the first fill up.
    above = np.flatnonzero(scores > threshold)
    ties = np.flatnonzero(scores == threshold)[: k - len(above)]
    return np.concatenate([above[np.argsort(-scores[above], kind="stable")], ties])


# ----------------------------------------------------------------------------------------- controls
class RandomRetriever:
    """Documents that have nothing to do with the query: what is a search worth that finds noise?"""

    def __init__(self, documents: list[Document], seed: int = 0):
        if not documents:
            raise InputError("the corpus is empty: there is nothing to draw from")
        self.documents, self.seed = documents, seed

    def search(self, queries: list[str], k: int) -> Lists:
        return [self.draw(query, min(k, len(self.documents))) for query in queries]

    def draw(self, query: str, k: int) -> list[Document]:
        # Seeded by the text, not by hash(), which differs between processes.
        return random.Random(f"{self.seed}\n{query}").sample(self.documents, k)


class EmptyRetriever:
    """Finds nothing: what does the policy know by heart?"""

    def search(self, queries: list[str], k: int) -> Lists:
        return [[] for _ in queries]


class OracleRetriever:
    """The question's gold passages, if it names any: what would a perfect search be worth?"""

    needs_questions = True

    def search(self, queries: list[str], k: int, questions: list[Question]) -> Lists:
        assert len(queries) == len(questions)
        return [gold_passages(question)[:k] for question in questions]


def gold_passages(question: Question) -> list[Document]:
    return [question.references[number - 1] for number in question.supporting]  # they count from 1


# ------------------------------------------------------------------------------ python retriever.py
INVENTED = [
    Document("1", "Ana Bell", "Ana Bell was born in Kelmouth and draws maps of the coast."),
    Document("2", "Kelmouth", "Kelmouth is a harbour city in the north of Norland."),
    Document("3", "Norland", "Norland is a country of three islands. Its capital is Varen."),
    Document("4", "Tidewerk", "Tidewerk is a company in Kelmouth that builds lanterns."),
    Document("5", "Ivo Marr", "Ivo Marr founded Tidewerk in the year of the great storm."),
    Document("6", "Varen", "Varen lies on the river Ost and is known for its bells."),
]


def show_search(bm25: BM25, query: str, k: int) -> None:
    words = bm25.vocabulary.keys() & tokenize(query)
    print(f"{len(bm25.documents):,} passages, {len(bm25.vocabulary):,} words")
    if not words:
        print("no passage shares a word with the query")
    scores = bm25.scores(query)
    for rank, i in enumerate(top(scores, k), 1):
        one = bm25.documents[i]
        # Not `score != 0`: the idf of a common word may be 0.
        if words.intersection(tokenize(f"{one.title} {one.text}")):
            print(harmless(f"{rank}. {scores[i]:7.3f}  [{one.id}] {one.title}: {one.text}"))


def main() -> None:
    if sys.argv[1:2] in (["serve"], ["check"]):
        from retrievers.serve import command  # a door: a search needs no server

        return command(sys.argv[1:], BM25)
    parser = FlagParser(
        description="Search a corpus with BM25.",
        epilog="`serve` or `check` is a command with its own --help; Serve is a word to look for.",
    )
    parser.add_argument("query", nargs="?", default="where was Ana Bell born")
    parser.add_argument("--corpus", help="a corpus file; without it, six invented passages")
    parser.add_argument("-k", type=int, default=3, help="how many passages")
    parser.add_argument("--skip_bad", action="store_true", help="leave out malformed records")
    args = parser.parse_args()
    if args.k < 1:
        raise InputError(f"-k {args.k}: ask for at least one passage")
    bm25 = BM25(load_corpus(args.corpus, args.skip_bad) if args.corpus else INVENTED)
    show_search(bm25, args.query, args.k)


if __name__ == "__main__":
    run_main(main)
