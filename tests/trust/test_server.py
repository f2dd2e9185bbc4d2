"""The retrieval server: requests that are none, clients that are slow, and too many of them."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_remote import TOWNS, exchange, served

from data import Document
from retriever import BM25
from retrievers import serve

fault = pytest.mark.fault


@pytest.fixture(scope="module")
def url():
    with served(BM25(TOWNS)) as url:
        yield url


def sent(url: str, raw: bytes, seconds: float = 5) -> bytes:
    """What comes back until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    found = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        with contextlib.suppress(OSError):  # it may close before all is sent
            connection.sendall(raw)
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                found += piece
    return found


def post(body, **headers) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "x", "Content_Length": len(raw)} | headers
    head = "".join(f"{name.replace('_', '-')}: {its}\r\n" for name, its in lines.items() if its)
    return f"POST /retrieve HTTP/1.1\r\n{head}\r\n".encode() + raw


def asked(**fields) -> bytes:
    return post({"queries": ["ana"]} | fields)


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


ODD = [
    (164, post(b'{"queries": ["a"'), 400),
    (165, post(["ana"]), 400),
    (166, post(b"[" * 200_000), 400),
    (167, post(b'{"queries": ["a"], "topk": ' + b"9" * 6000 + b"}"), 400),
    (168, asked(topk=1.5), 400),
    (169, post(b'{"queries": ["a"], "topk": NaN}'), 400),
    (170, asked(topk=100_000), 400),
    (171, asked(topk=0), 400),
    (172, post(b'{"queries": ["half \\ud83d of one"]}'), 200),
    (173, post(b'{"queries": ["a\\u0000b"]}'), 200),
    (174, post(b"", Content_Length=17 * 2**20), 413),
    (175, asked(queries=[7]), 400),
    (176, asked(queries=["a"] * 20_000), 400),
    (177, post(b'{"queries": ["\xff\xfe"]}'), 400),
    (178, get("/retrieve"), 405),
    (179, get("/retrieve", "PUT"), 501),
    (180, get("/retrieve", "DELETE"), 501),
    (181, get("/../../etc/passwd"), 404),
    (181, get("/%2e%2e/%2e%2e/etc/passwd"), 404),
    (182, get("/a%0d%0aX-Injected:%20yes"), 404),
    (183, b"POST /\x1b[2J HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (184, post(b"", Content_Length=-5), 413),
    (185, b"POST /retrieve HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\n{}", 400),
    (186, post(b"2\r\n{}\r\n0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked"), 413),
    (187, post(b"{}", Transfer_Encoding="chunked"), 400),
    (188, bytes(range(1, 256)) + b"\r\n\r\n", 400),
    (189, get("/" + "a" * 100_000), 414),
    (
        190,
        get("/health").replace(b"Host", b"".join(b"X%d: 1\r\n" % n for n in range(500)) + b"Host"),
        431,
    ),
]


@pytest.mark.parametrize("raw, code", [pytest.param(*its, marks=fault(n)) for n, *its in ODD])
def test_an_odd_request_is_answered_and_the_server_lives(raw, code, url, capfd):
    reply = sent(url, raw)
    head, _, body = reply.partition(b"\r\n\r\n")
    said = reply.split()[1] if reply.startswith(b"HTTP") else reply.partition(b"code: ")[2][:3]
    assert int(said) == code and b"X-Injected" not in head and b"\x1b" not in reply
    assert code != 400 or b"\n" not in body or b"DOCTYPE" in body
    assert exchange(url, {"queries": ["ana"], "topk": 1})[0] == 200
    assert capfd.readouterr().err == ""


@fault(191, 192)
@pytest.mark.parametrize("raw", [post(b"{", Content_Length=50), b"GET /health\r\n"])
def test_half_a_body_and_an_old_protocol_end(raw, url, monkeypatch):
    monkeypatch.setattr(serve.Handler, "timeout", 0.2)
    start = time.monotonic()
    sent(url, raw)
    assert time.monotonic() - start < 3
    assert exchange(url, {"queries": ["ana"]})[0] == 200


@fault(193)
def test_a_query_of_megabytes_holds_up_nobody(url):
    bm25 = BM25([Document(str(n), "", f"kelmouth town {n}") for n in range(2000)])
    with served(bm25) as many:
        for size, code in ((10_000_000, 400), (serve.MAX_QUERY, 200)):
            start = time.monotonic()
            query = ("kelmouth " * (size // 9 + 1))[:size]
            status, _ = exchange(many, {"queries": [query], "topk": 1})
            assert status == code and time.monotonic() - start < 2
    assert (
        "at most 10,000 characters: shorten it"
        in exchange(url, {"queries": ["a" * 10_001]})[1]["error"]["message"]
    )


def test_a_word_that_stands_twice_counts_twice():
    bm25 = BM25(TOWNS)
    once, twice = bm25.scores("ana kelmouth"), bm25.scores("kelmouth ana kelmouth")
    assert twice == pytest.approx(once + bm25.scores("kelmouth")) and twice.max() > once.max()


@fault(194)
def test_two_hundred_clients_at_once_are_all_answered(url):
    with ThreadPoolExecutor(200) as pool:
        found = list(
            pool.map(lambda _: exchange(url, {"queries": ["ana"], "topk": 1})[0], range(400))
        )
    assert found == [200] * 400


@fault(195)
def test_six_hundred_clients_that_drip_hold_up_nobody(url, monkeypatch):
    monkeypatch.setattr(serve.Handler, "timeout", 2.0)
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            drip = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            drip.sendall(b"POST /retrieve HTTP/1.1\r\n")
        start = time.monotonic()
        assert exchange(url, {"queries": ["ana"]})[0] == 200
        assert time.monotonic() - start < 2


@fault(196)
@pytest.mark.trust
def test_readers_that_do_not_read_fill_no_memory(monkeypatch):
    monkeypatch.setattr(serve.Handler, "timeout", 2.0)
    monkeypatch.setattr(serve, "MAX_BYTES", 20 * 2**20)
    text = "kelmouth " * 100_000  # 900 kB
    body = post({"queries": ["kelmouth"] * 15, "topk": 1})
    with served(BM25([Document("1", "", text)])) as url, contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        slow = []
        for _ in range(8):  # each would get 13 MB
            slow.append(stack.enter_context(socket.create_connection((host, int(port)))))
            slow[-1].sendall(body)
        time.sleep(1)
        status, reply = exchange(url, {"queries": ["kelmouth"] * 15, "topk": 1})
        assert status == 503 and "bytes are under way, 20,971,520 are the limit" in str(reply)
        assert exchange(url, {"queries": ["kelmouth"], "topk": 1})[0] == 200
        time.sleep(2)  # they are left
        assert exchange(url, {"queries": ["kelmouth"] * 15, "topk": 1})[0] == 200


def test_bodies_that_are_claimed_and_drip_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(serve.Handler, "timeout", 1.0)
    claim = post(b"{", Content_Length=serve.MAX_BODY)
    with served(BM25(TOWNS)) as url, contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        where = host, int(port)
        drips = [stack.enter_context(socket.create_connection(where)) for _ in range(8)]
        for drip in drips:
            drip.sendall(claim)
        time.sleep(0.5)
        assert exchange(url, {"queries": ["ana"]})[0] == 200
        with pytest.raises(OSError):  # though none is ever silent for a second
            for _ in range(30):
                time.sleep(0.1)
                drips[0].sendall(b" ")


def test_a_queue_that_is_full_says_its_limit(monkeypatch):
    monkeypatch.setattr(serve, "MAX_WAITING", 2)
    inside, go = threading.Event(), threading.Event()

    class Slow:
        def search(self, queries, k):
            inside.set()
            go.wait(10)
            return [[] for _ in queries]

    with served(Slow()) as url, ThreadPoolExecutor(2) as pool:
        others = [pool.submit(exchange, url, {"queries": ["a"]}) for _ in range(2)]
        inside.wait(5)
        while serve_health(url)["waiting"] < 2:
            time.sleep(0.01)
        said = "2 requests wait, 2 are the limit: ask later, for less"
        assert exchange(url, {"queries": ["a"]}) == (503, {"error": {"message": said}})
        go.set()
        assert [other.result()[0] for other in others] == [200, 200]
        assert serve_health(url) == {"passages": 0, "served": 2, "waiting": 0}


def serve_health(url: str) -> dict:
    return json.loads(sent(url, get("/health")).partition(b"\r\n\r\n")[2])
