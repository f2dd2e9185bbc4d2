"""Retrieval: query -> documents. Every retriever has a method `search(queries, k)`. One call takes
the queries of many trajectories and returns for each query a list of documents, None if its search
failed, or False if a server rejected the query because of its content. A call may also raise an
error, for example if no server answers. A control is a plain function of a request and k, because
`oracle` and `given` find documents by the question.

BM25 as rank-bm25's BM25Okapi defines it, over N documents; f = count of term t in document d,
|d| = the number of words in d:

    score(q, d) = Σ_{t in q} idf(t) · f · (k1 + 1) / (f + k1 · (1 − b + b · |d| / mean |d|))
    idf(t)      = ln((N − n_t + 0.5) / (n_t + 0.5)),   n_t documents contain t;
                  a negative idf (t is in more than half of the documents) becomes epsilon · mean
                  idf; if this product is not positive (for example with two documents), every
                  idf below SMALL_IDF becomes SMALL_IDF, unlike in rank-bm25

Terms are words in lower case, and pairs of characters in scripts without blanks (metrics.tokenize).

A summand depends only on term and document, not on the rest of the query. So the index holds the
summand of every (term, document) pair that occurs, sorted by term, and a query adds up the slices
of its terms.

Other retrievers: retrievers/dense.py (an encoder), retrievers/remote.py (another machine's
retriever), retrievers/controls.py (`random`, `empty`, `oracle`, `given`), and, only for the
commands below, retrievers/web.py (a search API of the web).

    python retriever.py "a query" --corpus FILE       search; with --retriever http: ask a server
    python retriever.py serve --corpus FILE           offer a corpus to other machines

Left out: stemming, stop words, an index on disk (`serve` keeps it in the memory of one process).
"""

from array import array
from collections import Counter
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from data import Document, SearchRequest, SearchResult, distinct, harmless, load_corpus
from errors import FlagParser, InputError, run_main
from metrics import tokenize
from settings import Settings

Array = np.ndarray
SMALL_IDF = 0.05  # the smallest idf if epsilon · mean idf is not positive
COMMON = 0.25  # a term in more than this share of the documents gets a dense array of summands
Found = list[list[Document]]  # the documents of each query or request
Requests = list[SearchRequest]
Results = list[SearchResult]  # one per request, in the order of the requests
Summarize = Callable[[Requests, Found], Results]
SEARCH_FAILED = "search failed"  # SearchResult.error if the retriever returns None or False


def make_retriever(documents: list[Document], settings: Settings, device=""):
    """Returns the retriever that the settings name. Only bm25, dense and random use `documents`.
    Dense runs on `device`; "" takes a GPU if there is one.
    """
    name = settings.retriever
    if name in ("bm25", "dense", "random") and not documents:
        raise InputError("the corpus is empty: give a --corpus with a document in it")
    if name == "bm25":
        return BM25(documents, title_boost=settings.title_boost)
    if name == "http":
        from retrievers.remote import HttpRetriever  # only needed here

        return HttpRetriever(settings.retriever_url, settings.timeout)
    if name == "dense":
        from retrievers.dense import DenseRetriever  # here, because it loads torch

        return DenseRetriever(documents, settings.encoder, device, settings.output_dir)
    from retrievers.controls import make_control  # only needed here

    return make_control(name, documents, settings.seed)


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
        rows = [i for i, answer in enumerate(answers) if answer not in (None, False)]
        if rows:
            summaries = summarize([requests[i] for i in rows], [answers[i] for i in rows])
            for i, summary in zip(rows, summaries, strict=True):
                results[i] = summary
        return results

    return search


def retrieve(retriever, requests: Requests, k: int) -> list[list[Document] | bool | None]:
    """Returns for each request its documents, None if its search failed, or False if its query was
    rejected. A query that several requests share, as the rows of a group often do, is searched
    once. Equal passages of a server's corpus are shown once.
    """
    if callable(retriever):
        found = [retriever(request, k) for request in requests]
    else:
        queries = [*dict.fromkeys(request.query for request in requests)]
        # strict=True: if a retriever drops a query, other queries must not get wrong documents
        answers = dict(zip(queries, retriever.search(queries, k), strict=True))
        found = [answers[request.query] for request in requests]
    return [documents and distinct(documents) for documents in found]


# --------------------------------------------------------------------------------------------- BM25
class BM25:
    """Computes BM25 with an inverted index: `postings[start[t] : start[t + 1]]` are the documents
    that contain term t, and the same slice of `weights` has their summands. For a common term t,
    rows[t] has the summands of all documents [N], because adding such an array is faster.
    """

    def __init__(self, documents: list[Document], k1=1.5, b=0.75, epsilon=0.25, title_boost=1):
        """title_boost: how often the title is put before the text."""
        self.documents, self.vocabulary, n = documents, {}, len(documents)
        terms, postings, frequencies, lengths = (array("i") for _ in range(4))
        for number, document in enumerate(tqdm(documents, "BM25 index", delay=2)):
            words = tokenize(f"{document.title} " * title_boost + document.text)
            counts = Counter(words)
            terms.extend([self.vocabulary.setdefault(w, len(self.vocabulary)) for w in counts])
            postings.extend([number] * len(counts))
            frequencies.extend(counts.values())
            lengths.append(len(words))
        order = np.argsort(terms, kind="stable")  # by term, then by document
        terms, frequencies = np.array(terms)[order], np.array(frequencies)[order]
        self.postings, lengths = np.array(postings, np.int64)[order], np.array(lengths)
        document_counts = np.bincount(terms, minlength=len(self.vocabulary))  # n_t of each word
        self.start = np.concatenate([[0], np.cumsum(document_counts)])
        mean = max(lengths.mean(), 1e-12)  # not 0, even if no document has a word
        norm = k1 * (1 - b + b * lengths / mean)  # [N]
        # In fp64, because in fp32 scores would differ from rank-bm25's in the seventh digit, and
        # documents with nearly equal scores could change places.
        gain = frequencies * (k1 + 1) / (frequencies + norm[self.postings])  # [pairs]
        self.weights = inverse_document_frequencies(document_counts, n, epsilon)[terms] * gain
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
        for word, count in Counter(tokenize(query)).items():  # a repeated word counts each time
            term = self.vocabulary.get(word)
            if term in self.rows:
                scores += count * self.rows[term]
            elif term is not None:
                self.add(scores, term, count)
        return scores

    def search(self, queries: list[str], k: int) -> Found:
        """Returns k documents per query, best first, or all of a smaller corpus. If fewer documents
        share a word with the query, others with score 0 fill up the list, as in rank-bm25.
        """
        found = (top(self.scores(query), k) for query in queries)
        return [[self.documents[i] for i in best] for best in found]


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
    # The k-th largest maximum of groups of scores is a bound that at least k scores reach, so only
    # those need sorting. For 100,000 scores np.partition would take ten times as long.
    groups = np.arange(0, len(scores), max(1, min(64, len(scores) // k)))
    bound = np.sort(np.maximum.reduceat(scores, groups))[-k]
    best = np.flatnonzero(scores >= bound)
    return best[np.argsort(-scores[best], kind="stable")][:k]


# ------------------------------------------------------------------------------ python retriever.py
INVENTED = [
    Document("1", "Ana Bell", "Ana Bell was born in Kelmouth and draws maps of the coast."),
    Document("2", "Kelmouth", "Kelmouth is a harbour city in the north of Norland."),
    Document("3", "Norland", "Norland is a country of three islands. Its capital is Varen."),
    Document("4", "Tidewerk", "Tidewerk is a company in Kelmouth that builds lanterns."),
    Document("5", "Ivo Marr", "Ivo Marr founded Tidewerk in the year of the great storm."),
    Document("6", "Varen", "Varen lies on the river Ost and is known for its bells."),
]


FLAGS = {  # name -> (default, help)
    "corpus": ("", "file or folder of documents (default: six invented ones)"),
    "retriever_url": ("", "http: address of the server; web: of the search API, with {query}"),
    "encoder": ("", "dense: hub name or directory of the encoder"),
    "output_dir": ("runs", "dense: the vectors are kept in its subfolder vectors"),
    "page_words": (150, "web: limit of words per page; give 2000 if a model summarises it"),
    "k": (3, "number of documents to print"),
    "host": ("127.0.0.1", "serve: address to listen on; 0.0.0.0 accepts every machine"),
    "port": (8000, "serve: port to listen on; 0 takes a free one"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = FlagParser(description="Searches, or offers a retriever to other machines.")
    parser.add_argument(
        "query", nargs="?", default="where was Ana Bell born", help="a query, or the word serve"
    )
    parser.add_argument("--retriever", default="bm25", choices=["bm25", "dense", "http", "web"])
    for name, (default, text) in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.set_defaults(title_boost=1, timeout=60.0)  # what else make_retriever reads
    flags = parser.parse_args(arguments)
    documents = [] if flags.query == "serve" else INVENTED
    if flags.corpus:
        documents = load_corpus(flags.corpus)
    if flags.retriever == "web":
        from retrievers.web import WebRetriever  # a training run asks a server of it

        retriever = WebRetriever(flags.retriever_url, flags.page_words)
    else:
        retriever = make_retriever(documents, flags)
    if flags.query == "serve":
        from retrievers.serve import RetrievalServer

        with RetrievalServer(retriever, flags.host, flags.port) as server:
            address = f"http://{flags.host}:{server.server_port}"
            print(f"{flags.retriever} at {address}; Ctrl-C ends it", flush=True)
            server.serve_forever()
    for rank, document in enumerate(retriever.search([flags.query], flags.k)[0] or (), 1):
        print(harmless(f"{rank}. [{document.id}] {document.title}: {document.text}"))


if __name__ == "__main__":
    run_main(main)
