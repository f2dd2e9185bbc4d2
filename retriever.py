"""Query -> documents. Every retriever has `search(queries, k)`, and all rows' queries of a moment
come in one call: a list of documents for each, None for a query whose search failed by itself, or
False for one that a server refuses for what it is.

BM25 as rank-bm25's BM25Okapi defines it, over N documents; f = count of term t in document d,
|d| = its words:

    score(q, d) = Σ_{t in q} idf(t) · f · (k1 + 1) / (f + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln((N − n_t + 0.5) / (n_t + 0.5)),   n_t documents hold t;
                  a negative idf (t in more than half of them) becomes epsilon · mean idf, or
                  where that is not above 0 either (two documents, say) a small number

No summand depends on the query. So the index holds the finished summand of every (term, document)
pair, sorted by term: a query adds up a few slices. `--index` keeps it (retrievers/index.py).

Behind the door: retrievers/dense.py (an encoder), retrievers/remote.py (another machine's
retriever), retrievers/controls.py (`random`, `empty`, `oracle`, `given`).

    python retriever.py "a query" --corpus FILE              search
    python retriever.py serve --corpus FILE                  offer a corpus to other machines
    python retriever.py check --corpus FILE or --url URL     does a retriever answer sensibly?

Left out: stemming, stop words.
"""

import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from data import Document, SearchRequest, SearchResult, harmless, load_corpus
from errors import FlagParser, InputError, run_main, setting
from metrics import tokenize

SHOW_PROGRESS_FROM = 20_000  # documents: below this the index is built before a bar could be read
RETRIEVERS = ("bm25", "dense", "http", "random", "empty", "oracle", "given")
Array = np.ndarray
SMALL_IDF = 0.05  # where epsilon · mean idf is none
COMMON = 0.25  # share of the documents from which on a term has a row
Found = list[list[Document]]  # one per query or request, best first
Requests = list[SearchRequest]
Results = list[SearchResult]  # one per request, in order
Summarize = Callable[[Requests, Found], Results]
SEARCH_FAILED = "search failed"  # of one query, while others of its call were answered


@dataclass(frozen=True)
class RetrieverSettings:
    retriever: str = setting(
        "bm25", "bm25, dense: of the corpus; http: elsewhere; others: controls", one_of=RETRIEVERS
    )
    retriever_url: str = setting("", "http: the server's address, http://host:port")
    index: str = setting("", "bm25: a folder that keeps its index")
    encoder: str = setting("", "dense: an encoder such as intfloat/e5-base-v2, or its directory")
    title_boost: int = setting(1, "how often BM25 counts a passage's title", least=0, only="papers")
    documents_per_search: int = setting(5, "passages per query", least=1)


def make_retriever(
    documents: list[Document],
    settings: RetrieverSettings,
    seed=0,
    timeout=60.0,
    device="",
    runs="runs",
):
    """The retriever that the settings name, over these documents (http, most controls need none).

    timeout   http: seconds per try; device: of dense, "" is a free GPU
    runs      dense: the folder of all runs, in which the vectors are kept
    """
    name = settings.retriever
    if name == "bm25":
        return BM25(documents, title_boost=settings.title_boost, index=settings.index)
    if name == "http":
        from retrievers.remote import HttpRetriever  # a door: BM25 needs no network

        return HttpRetriever(settings.retriever_url, timeout)
    if name == "dense":
        from retrievers.dense import DenseRetriever  # a door: BM25 loads no torch

        index_file = getattr(settings, "index_file", "")  # of `serve` and `check`
        return DenseRetriever(documents, settings.encoder, device, index_file, runs)
    if name in RETRIEVERS:
        from retrievers.controls import make_control  # a door: BM25 needs no control

        return make_control(name, documents, seed)
    raise InputError(f"unknown retriever {name!r}: one of {', '.join(RETRIEVERS)}")


# ---------------------------------------------------------------------------------- the search
def show_all(requests: Requests, documents: Found) -> Results:
    """No summariser: the policy reads the documents, and every query counts as a lookup."""
    return [SearchResult(found) for found in documents]


def make_search(retriever, summarize: Summarize = show_all, k: int = 5) -> Callable:
    """What the rollout is given: retrieve for all requests in one call, then summarise for all.
    search.seconds(requests): how long a retriever that asks elsewhere may take for their queries.
    """

    def search(requests: Requests) -> Results:
        found = retrieve(retriever, requests, k) if requests else []
        results = [SearchResult(error=SEARCH_FAILED, rejected=its is False) for its in found]
        answered = [i for i, documents in enumerate(found) if isinstance(documents, list)]
        if answered:
            told = summarize([requests[i] for i in answered], [found[i] for i in answered])
            for i, result in zip(answered, told, strict=True):
                results[i] = result
        return results

    if hasattr(retriever, "seconds"):
        search.seconds = lambda requests: retriever.seconds(len({r.query for r in requests}), k)
    return search


def retrieve(retriever, requests: Requests, k: int) -> list[list[Document] | bool | None]:
    """The documents of every request, None where its search failed, False where the query was
    rejected; each query once.
    """
    oracle = getattr(retriever, "needs_questions", False)
    # For the oracle the question decides: two questions may well ask the same query.
    keys = [(request.query, request.question.id if oracle else "") for request in requests]
    unique = dict(zip(keys, requests, strict=True))
    questions = [[request.question for request in unique.values()]] if oracle else []
    found = retriever.search([query for query, _ in unique], k, *questions)
    # strict: a retriever that drops a query must not shift the others
    documents = dict(zip(unique, found, strict=True))
    answers = [documents[key] for key in keys]
    return [answer if answer in (None, False) else list(answer) for answer in answers]


# --------------------------------------------------------------------------------------------- BM25
class BM25:
    """An inverted index: `postings[start[t] : start[t + 1]]` are the documents of term t,
    `weights` their summands. For a common term, adding a whole row [N] is faster.
    """

    def __init__(
        self,
        documents: list[Document],
        k1=1.5,
        b=0.75,
        epsilon=0.25,
        title_boost=1,
        index="",
    ):
        """`title_boost`: how often the title's words stand in the indexed text; `index`: a folder
        that keeps the index, built if it is not there.
        """
        if not documents:
            raise InputError("the corpus is empty: BM25 needs a --corpus with at least one passage")
        self.documents = documents
        parameters = (k1, b, epsilon, title_boost)
        if index:
            from retrievers.index import load_or_build  # a door: in memory none is needed

            found = load_or_build(index, documents, parameters, build)
        else:
            found = build(documents, *parameters)
        self.vocabulary, self.start, self.postings, self.weights = found
        n = len(documents)
        common = np.flatnonzero(np.diff(self.start) > COMMON * n)
        self.rows = {term: self.add(np.zeros(n), term, 1) for term in common}

    def add(self, scores: Array, term: int, count: int) -> Array:
        """`scores` [N], changed."""
        chosen = slice(self.start[term], self.start[term + 1])
        # No document stands twice in a slice: += is safe.
        scores[self.postings[chosen]] += count * self.weights[chosen]
        return scores

    def scores(self, query: str) -> Array:
        """The score of every document.  # [N]"""
        scores = np.zeros(len(self.documents))
        counts = Counter(tokenize(query))  # a word that is asked twice counts twice
        for word, count in counts.items():
            term = self.vocabulary.get(word)
            if term in self.rows:  # a product would be another row of memory: only if it must be
                scores += self.rows[term] if count == 1 else count * self.rows[term]
            elif term is not None:
                self.add(scores, term, count)
        return scores

    def search(self, queries: list[str], k: int) -> Found:
        """min(k, N) documents each, best first. As in the reference, documents that share no word
        with the query (score 0) fill up the list.
        """
        return [self.best(query, k) for query in queries]

    def best(self, query: str, k: int) -> list[Document]:
        return [self.documents[i] for i in top(self.scores(query), k)]


def build(documents: list[Document], k1: float, b: float, epsilon: float, title_boost: int):
    """(vocabulary, start, postings, weights) of BM25."""
    n = len(documents)
    texts = (f"{d.title} " * title_boost + d.text for d in documents)
    texts = tqdm(texts, "BM25 index", n, unit=" passages", disable=n < SHOW_PROGRESS_FROM)
    vocabulary, tokens, lengths = count_words(texts)
    terms, postings, frequencies = invert(tokens, lengths)
    document_counts = np.bincount(terms, minlength=len(vocabulary))  # [terms], n_t
    start = np.concatenate([[0], np.cumsum(document_counts)])
    idf = inverse_document_frequencies(document_counts, n, epsilon)
    mean = max(lengths.mean(), 1e-12)  # a corpus may have no word at all
    norm = k1 * (1 - b + b * lengths / mean)  # [N]
    # fp64: in fp32 the seventh digit would differ from the reference, and so order ties.
    below = frequencies + norm[postings]  # [pairs]
    gain = frequencies * (k1 + 1) / below
    return vocabulary, start, postings, idf[terms] * gain


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
    # One number per word: sorting it sorts by (term, document). In place: nothing is larger.
    tokens *= n
    tokens += np.repeat(np.arange(n), lengths)
    tokens.sort()
    first = np.flatnonzero(np.diff(tokens, prepend=-1))
    frequencies, pairs = np.diff(first, append=len(tokens)), tokens[first]
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
    # If k groups have a maximum of at least `bound`, so many scores reach it. To sort the maxima
    # of 100,000 scores takes 0.03 ms; np.partition of all takes 1.
    rows = min(64, len(scores) // k)
    groups = len(scores) // rows
    maxima = scores[: rows * groups].reshape(rows, groups).max(0)
    bound = np.sort(maxima)[-k]
    above = np.flatnonzero(scores > bound)
    best = above[np.argsort(-scores[above], kind="stable")][:k]
    if len(best) < k:  # then `bound` is the k-th score: the first of those that tie fill up
        ties = np.flatnonzero(scores == bound)
        return np.concatenate([best, ties[: k - len(best)]])
    return best


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
        said = f"{one.title}: {one.text}"
        if words.intersection(tokenize(said)):
            print(harmless(f"{rank}. {scores[i]:7.3f}  [{one.id}] {said}"))


def main() -> None:
    if sys.argv[1:2] in (["serve"], ["check"]):
        from retrievers.serve import command  # a door: a search needs no server

        return command(sys.argv[1:], make_retriever)
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
