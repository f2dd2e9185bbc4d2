"""The retrieval server under odd requests, slow clients, and many clients at once."""

import contextlib
import json
import resource
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import of_fault
from test_remote import TOWNS, exchange, served

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


def send(url: str, raw: bytes, seconds: float = 25) -> bytes:
    """Sends these bytes and returns the bytes that come back until the server closes."""
    reply = b""
    with socket.create_connection(address(url), timeout=seconds) as connection:
        with contextlib.suppress(OSError):  # the server may close before all is sent
            connection.sendall(raw)
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                reply += piece
    return reply


def post(body, **headers) -> bytes:
    """Returns a request; a header whose value is None is left out."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "x", "Content_Length": len(raw)} | headers
    head = "".join(
        f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items() if value
    )
    return f"POST /retrieve HTTP/1.1\r\n{head}\r\n".encode() + raw


def ask(**fields) -> bytes:
    """Returns a valid request whose JSON has these fields as well."""
    return post({"queries": ["ana"]} | fields)


ODD = [
    (164, post(b'{"queries": ["a"'), 500),
    (166, post(b"[" * 200_000), 500),
    (168, ask(topk="many"), 500),
    (178, b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    (186, post(b"2\r\n{}\r\n0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked"), 500),
]


@pytest.mark.parametrize("raw, code", [of_fault(*row) for row in ODD])
def test_an_odd_request_is_answered_and_the_server_lives(raw, code, url, capfd):
    head, _, body = send(url, raw).partition(b"\r\n\r\n")
    assert head.split()[1] == str(code).encode() and (code != 500 or b'{"error": "' in body)
    assert exchange(url, {"queries": ["ana"], "topk": 1})[0] == 200
    assert "Traceback" not in capfd.readouterr().err


@fault(191)
@pytest.mark.parametrize("raw", [post(b"{", Content_Length=50), b"", b"POST /retri"])
def test_half_a_request_is_closed_after_the_timeout(raw, url, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        patch.setattr(serve.Handler, "timeout", 0.2)
        send(url, raw)  # by default the server waits longer than this client
    assert exchange(url, {"queries": ["ana"]})[0] == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
def many_files():
    """Allows 4096 open files: clients and server are in this process, so a connection takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))


@fault(194)
@pytest.mark.usefixtures("many_files")
def test_two_hundred_clients_at_once_are_all_answered(url):
    with ThreadPoolExecutor(200) as pool:
        codes = list(
            pool.map(lambda _: exchange(url, {"queries": ["ana"], "topk": 1})[0], range(400))
        )
    assert codes == [200] * 400
