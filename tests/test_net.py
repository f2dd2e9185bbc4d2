"""Tests net.py over real sockets: slow, broken, endless and redirecting servers."""

import shutil
import socket
import time

import pytest
from conftest import ScriptedServer, message
from huggingface_hub import constants

from policy import load_tokenizer
from retrievers import net
from retrievers.net import MAX_BACKOFF, Fault, fetch_json, host_of, retrying, shown

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def serve(started):
    """Returns a function that starts a server of these bytes or of script(path, payload)."""
    return lambda script: started(ScriptedServer(script if callable(script) else lambda *_: script))


def reply(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def fault_of(url: str, timeout=2.0, **options) -> Fault:
    """Returns the fault of a request."""
    with pytest.raises(Fault) as caught:
        fetch_json(url, timeout=timeout, **options)
    return caught.value


def test_a_get_has_no_body_and_a_post_is_json(serve):
    requests = []
    server = serve(lambda *request: requests.append(request) or reply(b'{"a": 1}'))
    assert fetch_json(server.base + "/x?y=1") == {"a": 1}
    fetch_json(server.base, {"q": "ü"}, headers={"X-Key": "k"})
    assert requests == [("/x?y=1", None), ("/", {"q": "ü"})]
    (headers,) = server.headers
    assert headers["X-Key"] == "k" and headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("raw", [CHUNKED + b"3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n", OK + b"\r\n[1, 2]"])
def test_a_body_in_chunks_and_a_body_without_a_length_are_read_completely(serve, raw):
    assert fetch_json(serve(raw).base) == [1, 2]


def test_a_proxy_in_the_environment_is_not_used(serve, monkeypatch):
    proxy, server = serve(reply(b'"proxy"')), serve(reply(b'"server"'))
    monkeypatch.setenv("http_proxy", proxy.base)
    monkeypatch.delenv("no_proxy", raising=False)
    assert fetch_json(server.base) == "server"


DRIPS = {
    "body": OK + b"Content-Length: 1000\r\n\r\n",
    "headers": OK + b"X-Long: ",
    "status line": b"HTTP/1.1 200 ",
    "chunk": CHUNKED + b"ff\r\n",
    "error's body": b"HTTP/1.1 404 No\r\nContent-Length: 1000\r\n\r\n",
}


@pytest.mark.parametrize("where", DRIPS)
def test_a_server_that_sends_byte_by_byte_is_dropped_at_the_time_limit(serve, where):
    # A byte every 50 ms never exceeds a socket's own timeout of 0.3 s; 400 bytes would take 20 s.
    def drip(*_):
        yield DRIPS[where]
        for _ in range(400):
            time.sleep(0.05)
            yield b"x"

    fault = fault_of(serve(drip).base, timeout=0.3)
    assert str(fault) == "nothing within 0.3 s" and fault.retry and fault.down


def test_the_limit_of_bytes_is_the_largest_body_that_is_accepted(serve, monkeypatch):
    server = serve(reply(b'"' + b"x" * 98 + b'"'))
    monkeypatch.setattr(net, "MAX_BYTES", 100)
    assert fetch_json(server.base) == "x" * 98
    monkeypatch.setattr(net, "MAX_BYTES", 99)
    fault = fault_of(server.base)
    assert str(fault) == "more than 99 bytes" and not fault.retry


def test_an_endless_body_is_read_up_to_the_limit(serve, monkeypatch):
    pieces = []

    def endless(*_):
        yield OK + b"\r\n"
        while True:
            pieces.append(b"x" * 65536)
            yield pieces[-1]

    monkeypatch.setattr(net, "MAX_BYTES", 1_000_000)
    assert "more than 1,000,000 bytes" in str(fault_of(serve(endless).base))
    assert len(pieces) < 300  # more than the limit, because the sockets buffer the rest


NOT_JSON = [b'{"a": [1', b"<html>", b"", b"\xff\xfe\x00", b"[" * 100_000]


@pytest.mark.parametrize(
    "raw, fragment",
    [
        *[(reply(body), "not JSON, or half of one") for body in NOT_JSON],
        (reply(b"{", length=200_000), "not JSON, or half of one"),
        (CHUNKED + b"10\r\nabc", "IncompleteRead"),
        (b"", "closed connection"),
        (b"no HTTP at all\r\n\r\n", "BadStatusLine"),
    ],
)
def test_an_incomplete_reply_and_a_reply_that_is_not_json_may_be_retried(serve, raw, fragment):
    fault = fault_of(serve(raw).base)
    assert fragment in str(fault) and fault.retry and fault.down and "\n" not in str(fault)


@pytest.mark.parametrize(
    "codes, retry, down",
    [
        ((400, 413, 414, 422), False, False),  # the request is wrong, not the server
        ((401, 403, 404), False, True),
        ((408, 425, 429, 500, 502, 503), True, True),
    ],
)
def test_the_status_code_decides_about_a_retry_and_whether_the_server_is_down(
    serve, codes, retry, down
):
    for code in codes:
        fault = fault_of(serve(reply(b"so\nit is", f"{code} X")).base)
        assert (str(fault), fault.retry, fault.down) == (f"HTTP {code} so it is", retry, down)


def test_a_refused_connection_and_an_unknown_name_may_be_retried(closed_port):
    fault = fault_of(f"http://127.0.0.1:{closed_port}/")
    assert (str(fault), fault.retry, fault.down) == ("Connection refused", True, True)
    assert fault_of("http://no-such-host.invalid/").down


def test_a_redirect_is_not_followed(serve):
    """A request may contain a key, which another server must not get."""
    requests = []
    other = serve(lambda *request: requests.append(request) or reply(b"stolen"))
    place = f"Location: {other.base}?key=secret"
    redirect = f"HTTP/1.1 302 X\r\n{place}\r\nContent-Length: 0\r\n\r\n".encode()
    fault = fault_of(serve(redirect).base)
    assert str(fault) == f"HTTP 302 {other.base}" and not fault.retry and requests == []


@pytest.mark.parametrize(
    "url",
    ["", "host:80", "ftp://h/", "http://", "http://h:port/", "http://[::1/", "http://h/\r\nX: y"],
)
def test_the_error_of_a_bad_address_shows_a_good_one(url):
    assert "not an address: give http://host/search" in message(host_of, url, "http://host/search")


def test_host_of_returns_the_host_of_an_address():
    urls = ["http://h", "https://A.b:8/x?y", "http://[::1]:80/"]
    assert [host_of(url) for url in urls] == ["h", "a.b", "::1"]


def failing(times, **fault):
    """Returns a function that fails this many times and then returns the number of its calls."""
    calls = []

    def call():
        calls.append(None)
        if len(calls) <= times:
            raise Fault("no", **fault)
        return len(calls)

    return call


def test_each_wait_of_retrying_is_twice_the_last_up_to_the_maximum():
    # 0.5 · 2^n: 0.5, 1, 2, 4, 8, and then MAX_BACKOFF = 8 instead of 16.
    waits = []
    assert retrying(failing(6), retries=6, backoff=0.5, wait=waits.append) == 7
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, MAX_BACKOFF]


@pytest.mark.parametrize(
    "call, stops, expected",
    [
        (failing(9), False, [1, 2]),  # no wait after the last try
        (failing(1, retry=False), False, []),  # a request that cannot succeed is not repeated
        (failing(1), True, [1]),  # `wait` returns True to give up
    ],
)
def test_retrying_ends_after_the_retries_or_when_it_cannot_help(call, stops, expected):
    waits = []
    with pytest.raises(Fault):
        retrying(call, retries=2, backoff=1, wait=lambda seconds: waits.append(seconds) or stops)
    assert waits == expected


def test_a_message_is_shown_as_one_short_line():
    assert shown("a\n  b") == "a b" and shown("x" * 200) == "x" * 160


@pytest.mark.parametrize("hangs", [True, False])
def test_without_a_network_a_hub_name_fails_at_once_and_a_cached_model_is_loaded(
    hangs, model, tmp_path, monkeypatch
):
    cached = tmp_path / "models--some--model"
    shutil.copytree(model, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0" * 40)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        port = hub.getsockname()[1] if hangs else 9
        for name, value in {
            "HF_HUB_CACHE": str(tmp_path),
            "ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        start = time.monotonic()
        assert "no tokenizer could be loaded" in message(load_tokenizer, "no/model")
        assert load_tokenizer("some/model")("who")["input_ids"]
        assert time.monotonic() - start < 10
