"""Tests remote.py and serve.py, client and server, over real sockets with every failure."""

import contextlib
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import ScriptedServer, message

from data import Document
from retriever import BM25
from retrievers import remote
from retrievers.net import Fault
from retrievers.remote import HttpRetriever
from retrievers.serve import RetrievalServer

TOWNS = [
    Document("1", "Ana Bell", "Ana Bell was born in Kelmouth."),
    Document("2", "Kelmouth", "Kelmouth is a harbour city in Norland."),
    Document("3", 'The "Ost"', "The Ost flows by Varen.\nIt is long."),
    Document("4", "", "A passage without a title, of lanterns."),
    Document("5", "Ödön", "Ödön's bells — 鐘 — ring at \u2028 noon."),
]


def good_reply(path, payload):
    """Replies as a server should: each query finds documents named after it."""
    lists = [
        [{"contents": f'"{query} {i}"\nabout it'} for i in range(payload["topk"])]
        for query in payload["queries"]
    ]
    return with_lists(lists)


def with_lists(lists):
    return 200, json.dumps({"result": lists}).encode()


class Server(ScriptedServer):
    """Answers the client's first request, the probe, well; the script answers all others."""

    def __init__(self, script):
        super().__init__(
            lambda path, payload: (
                good_reply if payload["queries"] == ["Is anybody there?"] else script
            )(path, payload)
        )

    def queries(self):
        """Returns the queries of each request after the probe."""
        return [payload["queries"] for _, payload in self.posts[1:]]


@pytest.fixture
def start(started):
    """Returns a function that starts a Server of a script."""
    return lambda script=good_reply: started(Server(script))


def titles(lists):
    return [[document.title for document in documents] for documents in lists]


@pytest.mark.parametrize("path", ["/", "/retrieve"])
def test_the_address_may_end_with_retrieve_or_not_and_scores_are_always_requested(start, path):
    server = start()
    assert len(HttpRetriever(server.base + path).search(["ana"], 3)[0]) == 3
    request = {"queries": ["ana"], "topk": 3, "return_scores": True}
    assert server.posts[-1] == ("/retrieve", request)


def test_an_address_without_a_retriever_is_a_one_line_error(started, closed_port):
    url = f"http://127.0.0.1:{closed_port}"
    assert f"--retriever_url {url}: no retriever answers (" in message(HttpRetriever, url)
    other = started(ScriptedServer(lambda *_: (200, b"<html>\nWelcome\n</html>")))
    assert "no retriever answers (a reply that is not JSON" in message(HttpRetriever, other.base)
    silent = started(ScriptedServer(lambda *_: None))
    assert "(nothing within 0.1 s" in message(HttpRetriever, silent.base, timeout=0.1)
    assert "(ValueError: not an address" in message(HttpRetriever, "127.0.0.1:8000")


def test_queries_are_sent_in_batches_and_answered_in_order(start, monkeypatch):
    server = start()
    monkeypatch.setattr(remote, "BATCH", 2)
    retriever = HttpRetriever(server.base)
    assert titles(retriever.search(["c", "a", "b"], 1)) == [["c 0"], ["a 0"], ["b 0"]]
    assert server.queries() == [["c", "a"], ["b"]]
    assert retriever.search([], 3) == [] and len(server.queries()) == 2
    # The second batch has no answer: the first one's is kept, and a third is not sent.
    retriever.answers = Mock(side_effect=[{"c": [], "a": []}, Fault("no")])
    assert retriever.search(["c", "a", "b", "d", "e"], 1) == [[], [], None, None, None]


@pytest.mark.parametrize(
    ("reply", "fragment"),
    [
        ((500, b"no memory"), "HTTP 500 no memory"),
        (with_lists([["born"]]), "not 1 lists of documents"),
        (with_lists([[{"document": {"id": "1"}}]]), "not 1 lists of documents"),
    ],
)
def test_a_fault_is_raised_after_a_second_try_if_no_query_is_answered(start, reply, fragment):
    server = start(lambda *_: reply)
    with pytest.raises(Fault, match=fragment):
        HttpRetriever(server.base).search(["a"], 3)
    assert server.queries() == [["a"], ["a"]]


@pytest.mark.parametrize(
    "record", [{"content": "Ana\nBorn."}, {"document": {"title": "Ana", "text": "Born."}}]
)
def test_a_document_of_a_reply_has_a_layout_of_a_corpus_and_may_be_nested(start, record):
    server = start(lambda *_: with_lists([[record]]))
    assert HttpRetriever(server.base).search(["a"], 3) == [[Document("Ana", "Ana", "Born.")]]


def poisoned(*bad, reply=(500, b"")):
    """Returns a script that gives this reply to each request with one of the bad queries."""
    return lambda path, payload: (
        reply if {*bad} & {*payload["queries"]} else good_reply(path, payload)
    )


@pytest.mark.parametrize("reply", [(500, b""), (400, b"odd"), (200, b'{"result": []}')])
def test_a_bad_query_does_not_cost_other_queries_their_documents(start, reply):
    server = start(poisoned("poison", reply=reply))
    ana, poison, *others = HttpRetriever(server.base).search(["ana", "poison", "bo", "cy"], 1)
    assert titles([ana, *others]) == [["ana 0"], ["bo 0"], ["cy 0"]]
    assert poison is (False if reply[0] == 400 else None)
    halves = [["ana", "bo"], ["poison", "cy"], ["poison"], ["cy"]]
    assert server.queries() == [["ana", "poison", "bo", "cy"], *halves]


def test_a_query_that_hangs_leaves_time_for_other_queries(start):
    # The whole batch hangs for 2 s, then each part with this query for a quarter of that.
    server = start(poisoned("hangs", reply=None))
    hangs, *others = HttpRetriever(server.base, timeout=2).search(["hangs", "a", "b", "c"], 1)
    assert hangs is None and titles(others) == [["a 0"], ["b 0"], ["c 0"]]


# ------------------------------------------------------------------------ our own server (serve.py)


@contextlib.contextmanager
def served(retriever):
    """Yields the address of a server of this retriever that answers until the block ends."""
    with RetrievalServer(retriever, port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def towns():
    with served(BM25(TOWNS)) as url:
        yield url


def exchange(url, body):
    """Returns (status, reply read as JSON) of one request."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/retrieve", json.dumps(body).encode())
    response = connection.getresponse()
    with contextlib.closing(connection):
        return response.status, json.loads(response.read())


def test_a_search_over_http_finds_the_same_as_one_in_this_process(towns):
    bm25, queries = BM25(TOWNS), ["where was Ana Bell born", "", "lanterns", "鐘", "unknown"]
    queries += ["x" * 5000, "a \ud800 b", '"\n']
    for k in (1, 3, 9):
        assert HttpRetriever(towns).search(queries, k) == bm25.search(queries, k)


def test_a_reply_has_the_format_of_the_protocol(towns):
    status, reply = exchange(towns, {"queries": ["varen", ""]})
    contents = '"The "Ost""\nThe Ost flows by Varen.\nIt is long.'
    assert status == 200 and [*map(len, reply["result"])] == [5, 5]  # the default
    assert reply["result"][0][0]["document"] == {"id": "3", "contents": contents}


def test_a_rejected_query_stays_rejected_and_a_failed_one_failed_behind_a_server(capsys):
    known = {"good": TOWNS, "bad": False, "lost": None}
    retriever = SimpleNamespace(search=lambda queries, k: [known.get(q, []) for q in queries])
    with served(retriever) as url:
        found = HttpRetriever(url).search(["good", "bad", "lost"], 9)
    assert [*map(bool, found)] == [True, False, False] and found[1:] == [False, None]
    assert "a query was rejected" in capsys.readouterr().err


def test_a_title_of_two_lines_becomes_one_line():
    with served(BM25([Document("1", "Ana\nBell", "born")])) as url:
        assert HttpRetriever(url).search(["born"], 1) == [[Document("1", "Ana Bell", "born")]]


def test_a_retriever_that_raises_is_a_one_line_500_and_the_next_request_succeeds(capsys):
    line = "RuntimeError: no memory left"
    search = Mock(side_effect=[RuntimeError("no memory\nleft"), [TOWNS]])
    with served(Mock(search=search)) as url:
        assert exchange(url, {"queries": ["a"]}) == (500, {"error": line})
        assert exchange(url, {"queries": ["a"]})[0] == 200
    assert capsys.readouterr().err == f"{line}\n"


def test_only_one_thread_at_a_time_calls_the_retriever():
    inside, counts = [], []

    def search(queries, k):
        inside.append(1)
        counts.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return [[] for _ in queries]

    with served(Mock(search=search)) as url, ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda _: exchange(url, {"queries": ["a"]}), range(10)))
    assert counts == [1] * 10
