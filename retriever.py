"""Query -> documents. Every retriever has `search(queries, k)`, and all rows' queries of a moment come in one call.

BM25 as rank-bm25's BM25Okapi defines it, over N documents; f = count of term t in document d, |d| = its words:

    score(q, d) = Σ_{t in q} idf(t) · f · (k1 + 1) / (f + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln((N − n_t + 0.5) / (n_t + 0.5)),   n_t documents hold t;
                  a negative idf (t in more than half of them) becomes epsilon · mean idf

A term adds nothing to a document that lacks it, and nothing in its summand depends on the query. So the index holds the
finished summand of every (term, document) pair, sorted by term: a query adds up a few slices instead of visiting N
documents per word. The scores are the same numbers.

Controls for experiments: `random`, `empty`, `oracle` (the question's own gold passages).
Left out: stemming, stop words, an index on disk, dense encoders, remote servers.
"""

from __future__ import annotations

import argparse
import random
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import Document, InputError, Question, load_corpus, run_main

SHOW_PROGRESS_FROM = 20_000  # documents: below this the index is built before a bar could be read


def tokenize(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class BM25:
    """An inverted index: `postings[start[t] : start[t + 1]]` are the documents of term t, `weights` their summands."""

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
        if not documents:
            raise InputError("the corpus is empty: BM25 needs at least one passage")
        self.documents, self.tokenize = documents, tokenize
        texts = (f"{d.title} " * title_boost + d.text for d in documents)
        texts = tqdm(texts, "BM25 index", len(documents), unit=" passages", disable=len(documents) < SHOW_PROGRESS_FROM)
        self.vocabulary, tokens, lengths = count_words(texts, tokenize)
        terms, self.postings, frequencies = invert(tokens, lengths, len(self.vocabulary))
        document_counts = np.bincount(terms, minlength=len(self.vocabulary))  # n_t
        self.start = np.concatenate([[0], np.cumsum(document_counts)])
        self.idf = inverse_document_frequencies(document_counts, len(documents), epsilon)
        norm = k1 * (1 - b + b * lengths / max(lengths.mean(), 1e-12))  # [N]; the guard: a corpus without a single word
        # fp64: fp32 would already differ from the reference in the seventh digit, and so order ties differently.
        self.weights = self.idf[terms] * frequencies * (k1 + 1) / (frequencies + norm[self.postings])

    def scores(self, query: str) -> np.ndarray:
        """The score of every document.  # [N]"""
        scores = np.zeros(len(self.documents))
        for word in self.tokenize(query):  # a word that is asked twice counts twice, as in the reference
            term = self.vocabulary.get(word)
            if term is not None:
                chosen = slice(self.start[term], self.start[term + 1])
                scores[self.postings[chosen]] += self.weights[chosen]  # no document stands twice in a slice: += is safe
        return scores

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """min(k, N) documents each, best first. As in the reference, documents that share no word with the query (score 0)
        fill up the list."""
        return [[self.documents[i] for i in top(self.scores(query), k)] for query in queries]


def count_words(texts: Iterable[str], tokenize: Callable) -> tuple[dict[str, int], np.ndarray, np.ndarray]:
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


def invert(tokens: np.ndarray, lengths: np.ndarray, terms: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(term, document, frequency) of every pair that occurs, sorted by term, then by document."""
    n = len(lengths)
    pairs = tokens * n + np.repeat(np.arange(n), lengths)  # one number per word: sorting it sorts by (term, document)
    pairs, frequencies = np.unique(pairs, return_counts=True)
    return (pairs // n).astype(np.int32), (pairs % n).astype(np.int32), frequencies


def inverse_document_frequencies(document_counts: np.ndarray, n: int, epsilon: float) -> np.ndarray:
    idf = np.log(n - document_counts + 0.5) - np.log(document_counts + 0.5)  # [terms]
    # The mean includes the negative ones; in a tiny corpus it is negative itself, and then so is the "floor".
    return np.where(idf < 0, epsilon * idf.mean(), idf) if len(idf) else idf


def top(scores: np.ndarray, k: int) -> np.ndarray:
    """The indices of the k largest scores, best first, ties in document order."""
    k = min(k, len(scores))
    if k <= 0:
        return np.zeros(0, dtype=np.int64)
    threshold = np.partition(scores, -k)[-k]
    # `argpartition` would keep any of the documents that tie at the threshold: take them all, and sort stably.
    candidates = np.flatnonzero(scores >= threshold)
    return candidates[np.argsort(-scores[candidates], kind="stable")[:k]]


# -------------------------------------------------------------------------------------------------- controls

class RandomRetriever:
    """Documents that have nothing to do with the query: what is a search worth if it finds noise?"""

    needs_questions = False

    def __init__(self, documents: list[Document], seed: int = 0):
        if not documents:
            raise InputError("the corpus is empty: there is nothing to draw from")
        self.documents, self.seed = documents, seed

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        return [self.draw(query, k) for query in queries]

    def draw(self, query: str, k: int) -> list[Document]:
        # Seeded by the text, not by hash(): Python's hash of a string is another one in every process.
        return random.Random(f"{self.seed}\n{query}").sample(self.documents, min(k, len(self.documents)))


class EmptyRetriever:
    """Finds nothing: what does the policy know by heart?"""

    needs_questions = False

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        return [[] for _ in queries]


class OracleRetriever:
    """The gold passages of the question, whatever the query: what would a perfect search be worth?"""

    needs_questions = True

    def search(self, queries: list[str], k: int, questions: list[Question]) -> list[list[Document]]:
        """A question that names no gold passage gets none."""
        return [
            [question.references[number - 1] for number in question.supporting[:k]]  # supporting counts from 1
            for _, question in zip(queries, questions, strict=True)
        ]


RETRIEVERS: dict[str, Callable] = {
    "bm25": lambda documents, seed, title_boost: BM25(documents, title_boost=title_boost),
    "random": lambda documents, seed, title_boost: RandomRetriever(documents, seed),
    "empty": lambda documents, seed, title_boost: EmptyRetriever(),
    "oracle": lambda documents, seed, title_boost: OracleRetriever(),
}


def make_retriever(name: str, documents: list[Document], seed: int = 0, title_boost: int = 1):
    """The retriever of that name; `seed` is for random, `title_boost` for bm25."""
    if name not in RETRIEVERS:
        raise InputError(f"unknown retriever {name!r}: one of {', '.join(RETRIEVERS)}")
    return RETRIEVERS[name](documents, seed, title_boost)


def main() -> None:
    parser = argparse.ArgumentParser(description="Search a corpus with BM25.")
    parser.add_argument("query")
    parser.add_argument("--corpus", help="a corpus file; without it, six invented passages")
    parser.add_argument("-k", type=int, default=3, help="how many passages")
    args = parser.parse_args()
    invented = [
        ("Ana Bell", "Ana Bell was born in Kelmouth and draws maps of the coast."),
        ("Kelmouth", "Kelmouth is a harbour city in the north of Norland."),
        ("Norland", "Norland is a country of three islands. Its capital is Varen."),
        ("Tidewerk", "Tidewerk is a company in Kelmouth that builds lanterns."),
        ("Ivo Marr", "Ivo Marr founded Tidewerk in the year of the great storm."),
        ("Varen", "Varen lies on the river Ost and is known for its bells."),
    ]
    own = [Document(str(i), title, text) for i, (title, text) in enumerate(invented, 1)]
    bm25 = BM25(load_corpus(Path(args.corpus)) if args.corpus else own)
    scores = bm25.scores(args.query)
    print(f"{len(bm25.documents):,} passages, {len(bm25.vocabulary):,} words, {len(bm25.postings):,} postings")
    if not scores.any():
        print("no passage shares a word with the query")
    for rank, i in enumerate(top(scores, args.k), 1):
        if scores[i] != 0:
            document = bm25.documents[i]
            print(f"{rank}. {scores[i]:7.3f}  [{document.id}] {document.title}: {document.text}")


if __name__ == "__main__":
    run_main(main)
