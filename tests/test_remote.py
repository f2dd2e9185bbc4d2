"""remote.py: both ends over real sockets: what goes over the wire, every way to fail, and fifty
clients at once.
"""

import contextlib
import doctest
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data import Document, load_corpus
from errors import InputError
from retriever import BM25, EmptyRetriever, OracleRetriever, RandomRetriever
from retrievers import remote, serve
from retrievers.net import Fault, remember
from retrievers.remote import HttpRetriever, read_document
from retrievers.serve import DEFAULT_K, RetrievalServer, search_scored

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT.parent / "shared" / "data" / "corpus" / "hipporag_2wiki_1200.jsonl"
TOWNS = [
    Document("1", "Ana Bell", "Ana Bell was born in Kelmouth."),
    Document("2", "Kelmouth", "Kelmouth is a harbour city in Norland."),
    Document("3", 'The "Ost"', "The Ost flows by Varen.\nIt is long."),
    Document("4", "", "A passage without a title, of lanterns."),
    Document("5", "Ödön", "Ödön's bells — 鐘 — ring at \u2028 noon."),
]


# ------------------------------------------------------------------------------ a server that fails


def listed(payload):
    """What a well server answers: each query finds passages named after it."""
    count = payload.get("topk", payload.get("k"))
    names = [[f"{query} {i}" for i in range(count)] for query in payload["queries"]]
    return [[{"document": f'"{name}"\nabout it', "score": 1.0} for name in one] for one in names]


def well(path, payload, number):
    if path == "/retrieve":
        return 200, json.dumps({"result": listed(payload)}).encode()
    return 404, b'{"detail": "Not Found"}'


class Patient(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128


class Server:
    """`script(path, payload, number)` -> (status, body), or bytes to be sent raw, or None to say
    nothing. number counts from 0, the probe at construction included.
    """

    def __init__(self, script=well):
        self.posts, self.script, self.released = [], script, threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.posts.append((self.path, payload))
                reply = outer.script(self.path, payload, len(outer.posts) - 1)
                with contextlib.suppress(OSError):
                    if reply is None:
                        outer.released.wait(5)
                    elif isinstance(reply, bytes):
                        self.wfile.write(reply)
                    else:
                        self.send_response(reply[0])
                        self.send_header("Content-Length", str(len(reply[1])))
                        self.end_headers()
                        self.wfile.write(reply[1])

            def log_message(self, *_):
                pass

        self.http = Patient(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def close(self):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()

    def queries(self):
        """Of every request but the probe."""
        asked = [payload["queries"] for _, payload in self.posts]
        return [queries for queries in asked if queries != [remote.PROBE]]


@pytest.fixture
def start():
    """start(script) -> a Server that is shut down at the end."""
    servers = []

    def start(script=well):
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def after_probe(script):
    """`script`, but the probe is answered well."""

    def answer(path, payload, number):
        first = payload["queries"] == [remote.PROBE]
        return (well if first else script)(path, payload, number)

    return answer


def quick(url, **settings):
    return HttpRetriever(url, **{"timeout": 5, "retries": 0, "backoff": 0.01, **settings})


def test_the_worked_examples_are_true():
    result = doctest.testmod(remote)
    assert result.attempted >= 1 and result.failed == 0


def titles(found):
    return [[document.title for document in one] for one in found]


# ---------------------------------------------------------------------------------------- detection


def test_both_protocols_are_found_under_the_base_and_under_the_full_address(start):
    def queries_only(path, payload, number):
        if path != "/queries":
            return 404, b"{}"
        queries, k = payload["queries"], payload["k"]
        texts = [[f'"{query}"\ntext {i}' for i in range(k)] for query in queries]
        return 200, json.dumps({"answers": texts}).encode()

    for server, path in ((start(), "/retrieve"), (start(queries_only), "/queries")):
        for url in (server.url, server.url + "/", server.url + path, server.url + path + "/"):
            retriever = quick(url)
            assert (retriever.base, retriever.path) == (server.url, path)
            assert len(retriever.search(["ana"], 3)[0]) == 3
    assert titles(quick(server.url).search(["ana"], 2)) == [["ana", "ana"]]


def test_what_is_sent_asks_for_scores_always(start):
    server = start()
    quick(server.url).search(["a", "b"], 7)
    sent = {"queries": ["a", "b"], "topk": 7, "return_scores": True}
    assert server.posts[-1] == ("/retrieve", sent)


def test_nobody_there_or_somebody_else_is_one_line_that_says_what_was_tried(start):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(InputError) as error:
        quick(url)
    refused = f"POST {url}/retrieve: Connection refused; POST {url}/queries: Connection refused"
    advice = "start the server, or correct its address"
    assert str(error.value) == f"no retriever answers: {refused}: {advice}"
    other = start(lambda *_: (200, b"<html>\nWelcome\n</html>"))
    with pytest.raises(InputError, match=r"/retrieve: a reply that is not JSON.*/queries: a reply"):
        quick(other.url)
    with pytest.raises(InputError, match=r"/retrieve: nothing within 0\.1 s") as error:
        quick(start(lambda *_: None).url + "/retrieve", timeout=0.1)
    assert "/queries" not in str(error.value)
    with pytest.raises(InputError, match="not an address: give http://host:port"):
        quick("127.0.0.1:8000")


# -------------------------------------------------------------------------------- shapes of replies


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"document": {"contents": '"Ana "the map" Bell"\nborn'}}, ('Ana "the map" Bell', "born")),
        ({"id": 7, "contents": '"Ana"\nborn'}, ("Ana", "born")),
        ({"document": {"id": 7.0, "title": "Ana", "text": "born"}}, ("Ana", "born")),
        ({"document": '"Ana"\nborn', "score": 1}, ("Ana", "born")),
        ({"id": 7, "title": None, "text": "born"}, ("", "born")),
        ({"contents": "", "title": "Ana", "text": "born"}, ("Ana", "born")),
        ("born in Kelmouth", ("", "born in Kelmouth")),
        ("Title: Ana Text:  born", ("Ana", "born")),
        ({"contents": "half a \ud800 sign"}, ("", "half a ? sign")),
    ],
)
def test_a_passage_is_read_in_any_form(item, expected):
    found = read_document(item)
    assert (found.title, found.text) == expected


def test_ids_are_strings_and_where_there_is_none_the_text_decides():
    def passage(**more):
        return read_document({"contents": '"Ana"\nborn', **more}).id

    assert [passage(id=7), passage(id="x"), passage(_id=8), passage(id=0)] == ["7", "x", "8", "0"]
    same = read_document({"title": "Ana", "text": "born"}).id
    assert passage() == passage(id=None) == passage(id="") == same
    assert passage() != read_document('"Ana"\nborn there').id and len(passage()) == 16


@pytest.mark.parametrize(
    "item",
    [None, "", " ", {"document": None, "score": 0}, {"contents": ""}, {"title": "", "text": None}],
)
def test_an_empty_slot_is_left_out(item):
    assert read_document(item) is None


@pytest.mark.parametrize(
    "item", [7, True, [], ["x"], {}, {"id": "1"}, {"document": [1]}, {"contents": 5}, {"title": 5}]
)
def test_anything_else_is_a_fault_that_may_be_tried_again(item):
    with pytest.raises(Fault, match="wrong shape: no passage") as fault:
        read_document(item)
    assert fault.value.retry and "\n" not in str(fault.value)


def test_too_many_are_cut_too_few_are_kept_and_so_are_duplicates(start):
    one = {"contents": "same"}
    reply = {"result": [[None, one, one, {"contents": "b"}, {"contents": "c"}]]}
    server = start(lambda *_: (200, json.dumps(reply).encode()))
    retriever = quick(server.url)
    assert [d.text for d in retriever.search(["a"], 3)[0]] == ["same", "same", "b"]
    assert len(retriever.search(["a"], 9)[0]) == 4


@pytest.mark.parametrize(
    "reply",
    [
        {"result": [[5]]},
        {"result": [[], [], []]},
        {"result": None},
        {"answers": [[], []]},
        [[], []],
        None,
        {"result": [[], {}]},
        {"error": {"message": "out of memory"}},
    ],
)
def test_a_reply_of_another_shape_is_a_fault_after_all_tries(start, reply):
    server = start(after_probe(lambda *_: (200, json.dumps(reply).encode())))
    with pytest.raises(Fault, match="wrong shape: "):
        quick(server.url, retries=1).search(["a"], 3)
    assert len(server.queries()) == 2


# --------------------------------------------------------------------------- what is sent, and kept


def test_nothing_is_sent_for_no_query_or_for_no_passage(start):
    server = start()
    retriever = quick(server.url)
    assert retriever.search([], 3) == [] and retriever.search(["a", "b"], 0) == [[], []]
    assert server.queries() == []


def test_each_distinct_query_is_sent_once_in_batches_and_answered_in_order(start, monkeypatch):
    server = start()
    monkeypatch.setattr(remote, "BATCH", 2)
    retriever = quick(server.url)
    found = titles(retriever.search(["c", "a", "c", "b", "a"], 1))
    assert found == [["c 0"], ["a 0"], ["c 0"], ["b 0"], ["a 0"]]
    assert server.queries() == [["c", "a"], ["b"]]
    assert titles(retriever.search(["b", "d"], 1)) == [["b 0"], ["d 0"]]
    assert server.queries()[2:] == [["d"]]
    retriever.search(["b"], 2)  # another k is another search
    assert server.queries()[3:] == [["b"]]


def test_what_a_caller_does_with_a_list_does_not_change_what_is_remembered(start):
    retriever = quick(start().url)
    retriever.search(["a"], 2)[0].clear()
    first, second = retriever.search(["a", "a"], 2)
    first.clear()
    assert titles([second, *retriever.search(["a"], 2)]) == [["a 0", "a 1"]] * 2


def test_a_full_cache_forgets_all_and_size_0_remembers_none(start):
    cache = {}
    for number, key in enumerate("abc"):
        remember(cache, key, number, 2)
    assert cache == {"c": 2}
    server = start()
    none, few = quick(server.url, cache_size=0), quick(server.url, cache_size=1)
    twice = none.search(["a", "b", "a"], 1) + none.search(["a"], 1)
    assert titles(twice) == [["a 0"], ["b 0"], ["a 0"], ["a 0"]]
    assert server.queries() == [["a", "b"], ["a"]]
    # more than fit, in one call
    assert titles(few.search(["a", "b", "a"], 1)) == [["a 0"], ["b 0"], ["a 0"]]


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("reply", "said", "tries"),
    [
        ((500, b'{"error": {"message": "no memory"}}'), "HTTP 500 no memory", 3),
        ((404, b"gone"), "HTTP 404 gone", 1),
        ((400, b"no"), "HTTP 400 no", 1),
        ((200, b"<p>"), "not JSON", 3),
        (b"", "closed connection", 3),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{", "half an answer", 3),
    ],
)
def test_a_fault_is_raised_after_all_tries_that_may_help(start, reply, said, tries):
    server = start(after_probe(lambda *_: reply))
    with pytest.raises(Fault, match=said):
        quick(server.url, retries=2).search(["a"], 3)
    assert len(server.queries()) == tries


def test_a_server_slower_than_the_limit_costs_the_tries_and_no_more(start):
    silent = start(after_probe(lambda *_: None))  # waits 5 s; the limit is 0.1
    with pytest.raises(Fault, match=r"nothing within 0\.1 s"):
        quick(silent.url, timeout=0.1, retries=2).search(["a"], 3)
    assert silent.queries() == [["a"]] * 3


def poisoned(*bad, reply=(500, b"")):
    return lambda path, payload, number: (
        reply if {*bad} & {*payload["queries"]} else well(path, payload, number)
    )


@pytest.mark.parametrize(
    "reply", [(500, b""), (400, b"odd"), (200, b"<p>"), (200, b'{"result": []}'), b""]
)
def test_one_bad_query_costs_no_other_its_passages(start, reply):
    server = start(poisoned("poison", reply=reply))
    retriever = quick(server.url)
    ana, bo, poison, kelmouth = retriever.search(["ana", "bo", "poison", "kelmouth"], 1)
    assert titles([ana, bo, kelmouth]) == [["ana 0"], ["bo 0"], ["kelmouth 0"]] and poison is None
    names = ["ana", "bo", "poison", "kelmouth"]
    assert server.queries() == [names, *([name] for name in names)]
    # what is remembered is an answer too
    assert retriever.search(["poison", "ana"], 1) == [None, ana]
    assert server.queries()[5:] == [["poison"]]
    with pytest.raises(Fault):
        retriever.search(["poison"], 1)


def test_bad_queries_among_many_are_found_and_retries_are_for_whole_batches(start):
    names = [f"q{i}" for i in range(100)]
    server = start(poisoned("q0", "q41", "q42", "q99"))
    found = quick(server.url, retries=1).search(names, 1)
    bad = [name for name, one in zip(names, found, strict=True) if one is None]
    assert bad == ["q0", "q41", "q42", "q99"]
    assert [len(queries) for queries in server.queries()] == [100, 100] + [1] * 100


def test_a_server_that_drops_lists_is_asked_for_each_query_alone(start):
    def drops(path, payload, number):
        return 200, json.dumps({"result": listed(payload)[:1]}).encode()

    assert titles(quick(start(drops).url).search(["a", "b", "c"], 1)) == [["a 0"], ["b 0"], ["c 0"]]


def test_a_request_that_is_refused_for_all_says_what_the_server_said(start):
    said = b'{"error": {"message": "\'topk\' must be at most 10"}}'
    server = start(after_probe(lambda *_: (400, said)))
    with pytest.raises(Fault, match="HTTP 400 'topk' must be at most 10"):
        quick(server.url).search(["a", "b", "c"], 99)


def test_a_path_that_is_gone_is_not_asked_for_each_query(start):
    server = start(after_probe(lambda *_: (404, b"gone")))
    with pytest.raises(Fault, match="HTTP 404 gone"):
        quick(server.url).search(["a", "b"], 1)
    assert len(server.queries()) == 1


def test_a_query_that_hangs_leaves_time_for_the_others(start):
    # The whole batch hangs for 1 s; then one second is for all, of which [hangs] takes a quarter.
    server = start(poisoned("hangs", reply=None))
    found = quick(server.url, timeout=1).search(["hangs", "a", "b", "c"], 1)
    assert found[0] is None and titles(found[1:]) == [["a 0"], ["b 0"], ["c 0"]]


def test_a_batch_that_meets_nobody_leaves_the_rows_of_the_batches_before_it(start, monkeypatch):
    monkeypatch.setattr(remote, "BATCH", 2)
    retriever, calls = quick(start().url), []
    ask = retriever.ask

    def gone(*given):
        calls.append(given[0])
        if len(calls) > 1:
            raise Fault("Connection refused")
        return ask(*given)

    retriever.ask = gone
    found = retriever.search(["a", "b", "c", "d", "e", "f"], 1)
    assert titles(found[:2]) == [["a 0"], ["b 0"]] and found[2:] == [None] * 4
    assert calls == [["a", "b"], ["c", "d"], ["c"], ["d"]]  # and not the batch behind it


def test_a_call_ends_within_the_seconds_it_names(start, monkeypatch):
    monkeypatch.setattr(remote, "BATCH", 4)
    server = start(after_probe(lambda *_: None))
    retriever = quick(server.url, timeout=0.2, retries=1, backoff=0.1)
    # three batches of two tries, one wait, and their queries one by one
    assert retriever.seconds(9, 5) == pytest.approx(3 * (3 * 0.2 + 0.1))
    assert retriever.seconds(0, 5) == 0
    with pytest.raises(Fault, match=r"nothing within 0\.2 s"):
        retriever.search(list("abcdefghi"), 5)
    # one batch, twice; of the third 0.2 s each query has 0.05 at most: 4, and no other batch
    assert [len(queries) for queries in server.queries()[:2]] == [4, 4]
    assert len(server.queries()) <= 6


def test_a_fault_on_our_way_is_a_500_so_that_the_client_can_find_the_query(start):
    behind = start(poisoned("poison"))
    with served(HttpRetriever(behind.url, retries=0)) as url:
        found = quick(url).search(["ana", "poison", "bo"], 1)
    assert found[1] is None and titles([found[0], found[2]]) == [["ana 0"], ["bo 0"]]


# ----------------------------------------------------------------------------------- our own server


class Broken:
    """Fails for one query."""

    documents, needs_questions = TOWNS, False

    def search(self, queries, k):
        if "boom" in queries:
            raise RuntimeError("no memory\nleft")
        return [self.documents[:k] for _ in queries]


@contextlib.contextmanager
def served(retriever, **settings):
    with RetrievalServer(retriever, port=0, **settings) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def towns():
    with served(BM25(TOWNS), name="bm25") as url:
        yield url


def exchange(url, path="/retrieve", body=None, method="POST", headers=None):
    """(status, reply read as JSON) of one request."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    body = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    read = response.read()
    connection.close()
    assert len(read) == int(response.headers["Content-Length"])
    return response.status, json.loads(read)


def test_a_search_over_http_finds_what_one_in_this_process_finds(towns):
    bm25, queries = BM25(TOWNS), ["where was Ana Bell born", "", "lanterns", "鐘", "unknown"]
    queries += ["x" * 5000, "a \ud800 b", '"\n']
    for k in (1, 3, 9):
        assert HttpRetriever(towns).search(queries, k) == bm25.search(queries, k)
        plain = [[(d.title, d.text) for d in one] for one in bm25.search(queries, k)]
        over = HttpRetriever(towns + "/queries").search(queries, k)
        assert [[(d.title, d.text) for d in one] for one in over] == plain


def test_scores_come_if_they_are_asked_for_and_null_where_there_are_none(towns):
    asked = {"queries": ["kelmouth city", "varen"], "topk": 2, "return_scores": True}
    status, reply = exchange(towns, body=asked)
    expected = BM25(TOWNS).search_scored(asked["queries"], 2)
    assert status == 200
    found = [[(item["document"]["id"], item["score"]) for item in one] for one in reply["result"]]
    assert found == [[(document.id, score) for document, score in one] for one in expected]
    _, bare = exchange(towns, body={"queries": ["varen"], "topk": 1})
    contents = '"The "Ost""\nThe Ost flows by Varen.\nIt is long.'
    assert bare == {"result": [[{"id": "3", "contents": contents}]]}
    assert search_scored(RandomRetriever(TOWNS), ["a"], 1)[0][0][1] is None
    with served(RandomRetriever(TOWNS)) as url:
        _, reply = exchange(url, body={"queries": ["varen"], "topk": 1, "return_scores": True})
    assert reply["result"][0][0]["score"] is None


def test_a_title_of_two_lines_stays_a_title():
    with served(BM25([Document("1", "Ana\nBell", "born")])) as url:
        assert HttpRetriever(url).search(["born"], 1) == [[Document("1", "Ana Bell", "born")]]


def test_health_names_the_retriever_and_counts_its_passages(towns):
    well = {"status": "ok", "passages": 5, "retriever": "bm25"}
    assert exchange(towns, "/health", method="GET") == (200, well)
    with served(EmptyRetriever()) as url:
        _, said = exchange(url, "/health", method="GET")
    assert said == {"status": "ok", "passages": None, "retriever": "EmptyRetriever"}


def test_no_query_and_an_empty_query_are_in_order_and_so_is_no_number(towns):
    assert exchange(towns, body={"queries": []}) == (200, {"result": []})
    status, reply = exchange(towns, body={"queries": ["", "ana"]})
    assert status == 200 and [len(one) for one in reply["result"]] == [DEFAULT_K] * 2
    answers = {"answers": [['"Ana Bell"\nAna Bell was born in Kelmouth.']]}
    assert exchange(towns, "/queries?x=1", {"queries": ["ana"], "k": 1}) == (200, answers)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "no JSON"),
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ([], "no object"),
        ({}, "'queries' must"),
        ({"queries": ["a", None]}, "'queries' must"),
        ({"queries": ["a"], "topk": 0}, "'topk' must be a whole number from 1 to 1000"),
        ({"queries": ["a"], "topk": True}, "'topk' must"),
        ({"queries": ["a"], "topk": 2.0}, "'topk' must"),
        ({"queries": ["a"], "topk": 1001}, "'topk' must"),
        ({"queries": ["a"] * 10_001}, "10,001 queries: send at most 10,000"),
    ],
)
def test_a_request_that_is_not_in_order_is_told_so(towns, body, said):
    status, reply = exchange(towns, body=body)
    said_of_it = reply["error"]["message"]
    assert status == 400 and said in said_of_it and "\n" not in said_of_it


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/search", 404, "POST /retrieve, POST /queries or GET /health"),
        ("GET", "/", 404, "POST /retrieve"),
        ("GET", "/retrieve", 404, "no GET /retrieve here, but POST /retrieve"),
        ("POST", "/health", 404, "GET /health"),
    ],
)
def test_a_wrong_path_or_method_is_told_the_right_one(towns, method, path, status, said):
    found, reply = exchange(towns, path, {"queries": ["a"]} if method != "GET" else None, method)
    assert found == status and said in reply["error"]["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"", b"411"),
        (b"Transfer-Encoding: chunked\r\n", b"411"),
        (b"Content-Length: ten\r\n", b"411"),
        (b"Content-Length: -1\r\n", b"411"),
        (b"Content-Length: 16777217\r\n", b"413"),
        (b"Content-Length: " + b"9" * 6000 + b"\r\n", b"413"),
    ],
)
def test_a_body_without_a_good_length_is_refused_before_it_is_read(towns, header, status):
    host, port = towns.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
        reply = connection.makefile("rb").read()
    assert reply.split()[1] == status and b'{"error": {"message": ' in reply


def test_a_retriever_that_raises_is_a_500_of_one_line_and_the_next_request_goes_well(capsys):
    with served(Broken()) as url:
        for _ in range(2):
            status, reply = exchange(url, body={"queries": ["a", "boom"]})
            said = "the retriever failed: RuntimeError: no memory left"
            assert (status, reply) == (500, {"error": {"message": said}})
            assert exchange(url, body={"queries": ["a"], "topk": 1})[0] == 200
    assert capsys.readouterr().err == "the retriever failed: RuntimeError: no memory left\n" * 2


def test_a_client_that_says_nothing_is_left_after_a_while_and_the_others_are_served(
    monkeypatch, towns
):
    monkeypatch.setattr(serve.Handler, "timeout", 0.2)
    host, port = towns.removeprefix("http://").split(":")
    for start in (b"", b"POST /retri", b"POST /retrieve HTTP/1.1\r\nContent-Length: 50\r\n\r\n{"):
        with socket.create_connection((host, int(port)), timeout=9) as connection:
            connection.sendall(start)
            assert connection.recv(65536) == b""  # the server closed it
    assert exchange(towns, body={"queries": ["a"]})[0] == 200


def test_a_server_may_listen_at_an_ipv6_address(capsys):
    try:
        server = RetrievalServer(BM25(TOWNS), host="::1", port=0)
    except InputError:
        pytest.skip("no IPv6 here")
    with server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://[::1]:{server.server_port}"
        assert HttpRetriever(url).search(["lanterns"], 1)[0][0].id == "4"
        server.shutdown()


def test_clients_that_go_away_leave_no_traceback(towns, capfd):
    host, port = towns.removeprefix("http://").split(":")
    body = json.dumps({"queries": ["ana"] * 5000, "topk": 5}).encode()
    head = b"POST /retrieve HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    for sent in (b"", b"POST", head + body):
        connection = socket.create_connection((host, int(port)))
        # close at once, with a reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.sendall(sent)
        connection.close()
    assert exchange(towns, body={"queries": ["a"]})[0] == 200
    time.sleep(0.3)
    assert capfd.readouterr().err == ""


def test_the_retriever_is_asked_by_one_thread_at_a_time():
    inside, most = [], []

    class Watched:
        needs_questions = False

        def search(self, queries, k):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()
            return [[] for _ in queries]

    with served(Watched()) as url:
        call = (url, "/retrieve", {"queries": ["a"]})
        asks = [threading.Thread(target=exchange, args=call, daemon=True) for _ in range(10)]
        [thread.start() for thread in asks]
        [thread.join(10) for thread in asks]
    assert most == [1] * 10


def test_a_port_that_is_taken_and_one_that_is_none_are_one_line(towns):
    port = int(towns.rpartition(":")[2])
    with pytest.raises(
        InputError, match=rf"127\.0\.0\.1:{port}: cannot listen there \(Address already in use\)"
    ):
        RetrievalServer(BM25(TOWNS), port=port)
    with pytest.raises(InputError, match="70000: cannot listen there"):
        RetrievalServer(BM25(TOWNS), port=70000)
    with pytest.raises(InputError, match="needs the question, which no request holds"):
        RetrievalServer(OracleRetriever(), port=0)
