"""The retrieval server under odd requests, slow clients, and many clients at once."""

import contextlib
import json
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import of_fault
from test_remote import TOWNS, exchange, served

from data import Document
from retriever import BM25
from retrievers import serve

fault = pytest.mark.fault


@pytest.fixture(scope="module")
def url():
    with served(BM25(TOWNS)) as url:
        yield url


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def sent(url: str, raw: bytes, seconds: float = 25) -> bytes:
    """Returns the bytes that come back until the server closes."""
    found = b""
    with socket.create_connection(address(url), timeout=seconds) as connection:
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
    (164, post(b'{"queries": ["a"'), "400 not JSON"),
    (165, post(["ana"]), "400 'queries' must"),
    (166, post(b"[" * 200_000), "400 not JSON"),
    (167, post(b'{"queries": ["a"], "topk": ' + b"9" * 6000 + b"}"), 400),
    (168, asked(topk=1.5), "400 'topk' must"),
    (168, asked(topk=True), "400 'topk' must"),
    (169, post(b'{"queries": ["a"], "topk": NaN}'), 400),
    (170, asked(topk=1001), "400 'topk' must"),
    (171, asked(topk=0), "400 'topk' must be a whole number from 1 to 1000"),
    (172, post(b'{"queries": ["half \\ud83d of one"]}'), 200),
    (173, post(b'{"queries": ["a\\u0000b"]}'), 200),
    (174, post(b"", Content_Length=2**24 + 1), "413 send at most 16,777,216 bytes, and their"),
    (175, asked(queries=["a", None]), "400 'queries' must"),
    (176, asked(queries=["a"] * 10_001), "400 'queries' must be a list of at most 10,000 strings"),
    (177, post(b'{"queries": ["\xff\xfe"]}'), 400),
    (178, get("/retrieve"), 405),
    (179, get("/retrieve", "PUT"), 501),
    (180, get("/retrieve", "DELETE"), 501),
    (181, get("/../../etc/passwd"), 404),
    (181, get("/%2e%2e/%2e%2e/etc/passwd"), 404),
    (182, get("/a%0d%0aX-Injected:%20yes"), 404),
    (183, b"POST /\x1b[2J HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (183, get("/search", "POST"), "404 this server has POST /retrieve and GET /health"),
    (184, post(b"", Content_Length=-5), 413),
    (184, post(b"", Content_Length="ten"), 413),
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


@pytest.mark.parametrize("raw, code", [of_fault(*row) for row in ODD])
def test_an_odd_request_is_answered_and_the_server_lives(raw, code, url, capfd):
    reply, (code, _, told) = sent(url, raw), str(code).partition(" ")
    head, _, body = reply.partition(b"\r\n\r\n")
    said = reply.split()[1] if reply.startswith(b"HTTP") else reply.partition(b"code: ")[2][:3]
    assert said == code.encode() and b"X-Injected" not in head and b"\x1b" not in reply
    assert told.encode() in body
    assert code != "400" or b"\n" not in body or b"DOCTYPE" in body
    assert exchange(url, {"queries": ["ana"], "topk": 1})[0] == 200
    assert capfd.readouterr().err == ""


@fault(191, 192)
@pytest.mark.parametrize(
    "raw", [post(b"{", Content_Length=50), b"GET /health\r\n", b"", b"POST /retri"]
)
def test_half_a_request_and_an_old_protocol_end(raw, url, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(serve.Handler, "timeout", 0.2)
        sent(url, raw)  # by default the server waits longer than this client
    assert exchange(url, {"queries": ["ana"]})[0] == 200


@fault(193)
def test_a_query_of_megabytes_holds_up_nobody(url):
    bm25 = BM25([Document(str(n), "", f"kelmouth town {n}") for n in range(2000)])
    with served(bm25) as many:
        for size, code in ((10_000_000, 400), (serve.MAX_QUERY, 200)):
            start = time.process_time()  # the server is a thread of this process
            query = ("kelmouth " * (size // 9 + 1))[:size]
            status, _ = exchange(many, {"queries": [query], "topk": 1})
            assert status == code and time.process_time() - start < 2


@pytest.fixture
def many_files():
    """Allows 4096 open files: each client has one, and the server one for it, in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))


@fault(194)
@pytest.mark.usefixtures("many_files")
def test_two_hundred_clients_at_once_are_all_answered(url):
    with ThreadPoolExecutor(200) as pool:
        found = list(
            pool.map(lambda _: exchange(url, {"queries": ["ana"], "topk": 1})[0], range(400))
        )
    assert found == [200] * 400


@fault(195)
def test_six_hundred_clients_that_drip_hold_up_nobody(url, many_files, monkeypatch):
    monkeypatch.setattr(serve.Handler, "timeout", 600)
    with contextlib.ExitStack() as stack:
        drips = [
            stack.enter_context(socket.create_connection(address(url), timeout=60))
            for _ in range(600)
        ]
        for drip in drips:
            drip.sendall(b"POST /retrieve HTTP/1.1\r\n")
        assert exchange(url, {"queries": ["ana"]})[0] == 200
        drips[0].setblocking(False)
        with pytest.raises(BlockingIOError):  # the server still waits for it
            drips[0].recv(1)
