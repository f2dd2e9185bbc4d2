"""Retrieval: query -> documents. Every retriever has a method `search(queries, k)`. One call takes
the queries of many trajectories and returns for each query a list of documents, None if its search
failed, or False if a server rejected the query because of its content. A call may also raise an
error, for example if no server answers. The controls `oracle` and `given` get the queries'
questions as a third argument.

BM25 as rank-bm25's BM25Okapi defines it, over N documents; f = count of term t in document d,
|d| = the number of words in d:

    score(q, d) = Σ_{t in q} idf(t) · f · (k1 + 1) / (f + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln((N − n_t + 0.5) / (n_t + 0.5)),   n_t documents contain t;
                  a negative idf (t is in more than half of the documents) becomes epsilon · mean
                  idf; if this product is not positive (for example with two documents), every
                  idf below SMALL_IDF becomes SMALL_IDF, unlike in rank-bm25

A summand depends only on term and document, not on the rest of the query. So the index holds the
summand of every (term, document) pair that occurs, sorted by term, and a query adds up the slices
of its terms.

Other retrievers: retrievers/dense.py (an encoder), retrievers/remote.py (another machine's
retriever), retrievers/controls.py (`random`, `empty`, `oracle`, `given`), and, only for `serve` and
`check`, retrievers/web.py (a search API of the web).

    python retriever.py "a query" --corpus FILE                  search
    python retriever.py serve --corpus FILE                      offer a corpus to other machines
    python retriever.py check --corpus FILE, --url URL, or both  does a retriever answer sensibly?

Left out: stemming, stop words, an index on disk (`serve` keeps it in the memory of one process).
"""

import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import numpy as np
from tqdm import tqdm

from data import Document, SearchRequest, SearchResult, harmless, load_corpus
from errors import FlagParser, InputError, run_main
from metrics import tokenize
from settings import RETRIEVERS, Settings

SHOW_PROGRESS_FROM = 20_000  # documents; a smaller index is built in a few seconds
Array = np.ndarray
SMALL_IDF = 0.05  # the smallest idf if epsilon · mean idf is not positive
COMMON = 0.25  # a term in more than this share of the documents gets a dense array of summands
Found = list[list[Document]]  # the documents of each query or request
Requests = list[SearchRequest]
Results = list[SearchResult]  # one per request, in the order of the requests
Summarize = Callable[[Requests, Found], Results]
SEARCH_FAILED = "search failed"  # SearchResult.error if the retriever returns None or False


def make_retriever(
    documents: list[Document],
    settings: Settings,
    seed=0,
    timeout=60.0,
    device="",
    runs="runs",
):
    """Returns the retriever that the settings name. Only bm25, dense and random use `documents`.

    timeout   http: seconds per attempt
    device    dense: "" takes a GPU if there is one
    runs      dense: the folder of all runs, in which the vectors are stored
    """
    name = settings.retriever
    if name == "bm25":
        return BM25(documents, title_boost=settings.title_boost)
    if name == "http":
        from retrievers.remote import HttpRetriever  # only needed here

        return HttpRetriever(settings.retriever_url, timeout)
    if name == "dense":
        from retrievers.dense import DenseRetriever  # here, because it loads torch

        return DenseRetriever(documents, settings.encoder, device, runs)
    if name in RETRIEVERS:
        from retrievers.controls import make_control  # only needed here

        return make_control(name, documents, seed)
    raise InputError(f"unknown retriever {name!r}: one of {', '.join(RETRIEVERS)}")


# ---------------------------------------------------------------------------------- the search
def show_all(requests: Requests, documents: Found) -> Results:
    """Returns results without a summary: the policy reads the documents themselves."""
    return [SearchResult(retrieved) for retrieved in documents]


def make_search(retriever, summarize: Summarize = show_all, k: int = 5) -> Callable:
    """Returns the search function of the rollout. It retrieves the documents of all requests in one
    call, then passes what was found to `summarize`.
    """

    def search(requests: Requests) -> Results:
        answers = retrieve(retriever, requests, k) if requests else []
        results = [SearchResult(error=SEARCH_FAILED, rejected=a is False) for a in answers]
        rows = [i for i, answer in enumerate(answers) if isinstance(answer, list)]
        if rows:
            summaries = summarize([requests[i] for i in rows], [answers[i] for i in rows])
            for i, summary in zip(rows, summaries, strict=True):
                results[i] = summary
        return results

    return search


def retrieve(retriever, requests: Requests, k: int) -> list[list[Document] | bool | None]:
    """Returns for each request its documents, None if its search failed, or False if its query was
    rejected. A query that several requests share is searched once; `oracle` and `given` search it
    once per question.
    """
    oracle = getattr(retriever, "needs_questions", False)
    # `oracle` and `given` find documents by the question, and two questions may share a query.
    keys = [(request.query, request.question.id if oracle else "") for request in requests]
    unique = dict(zip(keys, requests, strict=True))
    questions = [[request.question for request in unique.values()]] if oracle else []
    answers = retriever.search([query for query, _ in unique], k, *questions)
    # strict=True: if a retriever drops a query, the other queries must not get wrong documents
    by_key = dict(zip(unique, answers, strict=True))
    return [by_key[key] if by_key[key] in (None, False) else list(by_key[key]) for key in keys]


# --------------------------------------------------------------------------------------------- BM25
class BM25:
    """Computes BM25 with an inverted index: `postings[start[t] : start[t + 1]]` are the documents
    that contain term t, and the same slice of `weights` has their summands. For a common term t,
    rows[t] has the summands of all documents [N], because adding such an array is faster.
    """

    def __init__(self, documents: list[Document], k1=1.5, b=0.75, epsilon=0.25, title_boost=1):
        """title_boost: how often the title is put before the text."""
        if not documents:
            raise InputError("the corpus is empty: BM25 needs a --corpus with a document in it")
        self.documents = documents
        n = len(documents)
        texts = (f"{d.title} " * title_boost + d.text for d in documents)
        texts = tqdm(texts, "BM25 index", n, unit=" documents", disable=n < SHOW_PROGRESS_FROM)
        self.vocabulary, tokens, lengths = count_words(texts)
        terms, self.postings, frequencies = invert(tokens, lengths)
        document_counts = np.bincount(terms, minlength=len(self.vocabulary))  # n_t of each word
        self.start = np.concatenate([[0], np.cumsum(document_counts)])
        idf = inverse_document_frequencies(document_counts, n, epsilon)
        mean = max(lengths.mean(), 1e-12)  # not 0, even if no document has a word
        norm = k1 * (1 - b + b * lengths / mean)  # [N]
        # In fp64, because in fp32 scores would differ from rank-bm25's in the seventh digit, and
        # documents with nearly equal scores could change places.
        gain = frequencies * (k1 + 1) / (frequencies + norm[self.postings])  # [pairs]
        self.weights = idf[terms] * gain
        common = np.flatnonzero(document_counts > COMMON * n)
        self.rows = {term: self.add(np.zeros(n), term, 1) for term in common}

    def add(self, scores: Array, term: int, count: int) -> Array:
        """Adds `count` times a term's summands to `scores` [N] in place and returns `scores`."""
        pairs = slice(self.start[term], self.start[term + 1])
        # Twice as fast as scores[...] += ..., which first copies the selected scores.
        np.add.at(scores, self.postings[pairs], count * self.weights[pairs])
        return scores

    def scores(self, query: str) -> Array:
        """Returns the score of every document, [N]."""
        scores = np.zeros(len(self.documents))
        counts = Counter(tokenize(query))  # a repeated word counts each time
        for word, count in counts.items():
            term = self.vocabulary.get(word)
            if term in self.rows:
                # A product allocates another array [N], so for count 1 the row itself is added.
                scores += self.rows[term] if count == 1 else count * self.rows[term]
            elif term is not None:
                self.add(scores, term, count)
        return scores

    def search(self, queries: list[str], k: int) -> Found:
        """Returns min(k, N) documents per query, best first. If fewer documents share a word with
        the query, others with score 0 fill up the list, as in rank-bm25.
        """
        return [self.best(query, k) for query in queries]

    def best(self, query: str, k: int) -> list[Document]:
        return [self.documents[i] for i in top(self.scores(query), k)]


def count_words(texts: Iterable[str]) -> tuple[dict[str, int], Array, Array]:
    """Returns (word -> term number, all term numbers in reading order, words per document)."""
    vocabulary = defaultdict()
    vocabulary.default_factory = vocabulary.__len__  # a new word gets the next number
    tokens, lengths = array("i"), array("i")
    for text in texts:
        words = tokenize(text)
        tokens.extend([vocabulary[word] for word in words])
        lengths.append(len(words))
    # A plain dict, because in a defaultdict vocabulary[word] would add an unknown word as a term.
    return dict(vocabulary), np.array(tokens, np.int64), np.array(lengths, np.int64)


def invert(tokens: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Returns arrays (terms, documents, frequencies) with one entry per (term, document) pair that
    occurs, sorted by term, then by document.
    """
    n = len(lengths)
    # Each token becomes term · n + document, so that sorting orders the tokens by term, then by
    # document. `tokens` is changed in place, because it is the largest array.
    tokens *= n
    tokens += np.repeat(np.arange(n), lengths)
    tokens.sort()
    first = np.flatnonzero(np.diff(tokens, prepend=-1))
    frequencies, pairs = np.diff(first, append=len(tokens)), tokens[first]
    return (pairs // n).astype(np.int32), (pairs % n).astype(np.int32), frequencies


def inverse_document_frequencies(document_counts: Array, n: int, epsilon: float) -> Array:
    """Returns the idf of each term, with the replacements that the docstring of this file names."""
    idf = np.log(n - document_counts + 0.5) - np.log(document_counts + 0.5)  # [terms]
    floor = epsilon * idf.mean() if len(idf) else 0.0
    if floor > 0:
        return np.where(idf < 0, floor, idf)
    # The mean includes the negative values, so in a tiny corpus rank-bm25's floor may be negative.
    # With such a floor, a word that is in more than half of the documents would lower the scores of
    # those that contain it.
    return np.maximum(idf, SMALL_IDF)


def top(scores: Array, k: int) -> Array:
    """Returns the indices of the k largest scores, best first, ties in document order."""
    k = min(k, len(scores))
    if k <= 0:
        return np.zeros(0, int)
    # `bound` is the k-th largest of the maxima of groups of scores. So at least k scores are
    # `bound` or more, and the lower ones need not be sorted. For 100,000 scores, sorting the maxima
    # takes 0.03 ms; np.partition of all scores would take 1 ms.
    rows = min(64, len(scores) // k)
    groups = len(scores) // rows
    bound = np.sort(scores[: rows * groups].reshape(rows, groups).max(0))[-k]
    above = np.flatnonzero(scores > bound)
    best = above[np.argsort(-scores[above], kind="stable")][:k]
    # If fewer than k scores are above `bound`, then `bound` is the k-th largest score, and the
    # first documents with exactly this score fill up the list.
    return np.concatenate([best, np.flatnonzero(scores == bound)[: k - len(best)]])


# ------------------------------------------------------------------------------ python retriever.py
INVENTED = [
    Document("1", "Ana Bell", "Ana Bell was born in Kelmouth and draws maps of the coast."),
    Document("2", "Kelmouth", "Kelmouth is a harbour city in the north of Norland."),
    Document("3", "Norland", "Norland is a country of three islands. Its capital is Varen."),
    Document("4", "Tidewerk", "Tidewerk is a company in Kelmouth that builds lanterns."),
    Document("5", "Ivo Marr", "Ivo Marr founded Tidewerk in the year of the great storm."),
    Document("6", "Varen", "Varen lies on the river Ost and is known for its bells."),
]


def main() -> None:
    if sys.argv[1:2] in (["serve"], ["check"]):
        from retrievers.serve import command  # only needed here

        return command(sys.argv[1:], make_retriever)
    parser = FlagParser(
        description="Searches a corpus with BM25.",
        epilog="`serve` and `check` are commands with their own --help, not queries.",
    )
    parser.add_argument("query", nargs="?", default="where was Ana Bell born")
    parser.add_argument("--corpus", help="a corpus file (default: six invented documents)")
    parser.add_argument("-k", type=int, default=3, help="the number of documents to print")
    parser.add_argument("--skip_bad", action="store_true", help="leave out malformed records")
    args = parser.parse_args()
    bm25 = BM25(load_corpus(args.corpus, args.skip_bad) if args.corpus else INVENTED)
    scores = bm25.scores(args.query)
    for rank, i in enumerate(top(scores, args.k), 1):
        document = bm25.documents[i]
        text = f"[{document.id}] {document.title}: {document.text}"
        print(harmless(f"{rank}. {scores[i]:7.3f}  {text}"))


if __name__ == "__main__":
    run_main(main)
