"""Tests net.py over real sockets: slow, broken, endless and redirecting servers."""

import time

import pytest
from conftest import ScriptedServer

from retrievers import net
from retrievers.net import Fault, RejectedRequest, fetch_json, retrying

OK = b"HTTP/1.1 200 OK\r\n"


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


DRIPS = [OK + b"Content-Length: 1000\r\n\r\n", OK + b"X-Long: "]


@pytest.mark.parametrize("beginning", DRIPS)
def test_a_server_that_sends_byte_by_byte_is_dropped_at_the_time_limit(serve, beginning):
    # A byte every 50 ms never exceeds a socket's own timeout of 0.3 s; 400 bytes would take 20 s.
    def drip(*_):
        yield beginning
        for _ in range(400):
            time.sleep(0.05)
            yield b"x"

    assert str(fault_of(serve(drip).base, timeout=0.3)) == "nothing within 0.3 s"


def test_an_endless_body_is_read_up_to_the_limit(serve, monkeypatch):
    pieces = []

    def endless(*_):
        yield OK + b"\r\n"
        while True:
            pieces.append(b"x" * 65536)
            yield pieces[-1]

    monkeypatch.setattr(net, "MAX_BYTES", 1_000_000)
    assert "not JSON" in str(fault_of(serve(endless).base))
    assert len(pieces) < 300  # more than the limit, because the sockets buffer the rest


@pytest.mark.parametrize(
    "raw, fragment",
    [
        (reply(b"<html>"), "not JSON, or a part of one: <html>"),
        (reply(b"[" * 100_000), "not JSON"),
        (reply(b"{", length=200_000), "not JSON"),
        (b"no HTTP at all\r\n\r\n", "BadStatusLine"),
        (reply(b"so\nit is", "500 X"), "HTTP 500 so it is"),
    ],
)
def test_an_incomplete_or_wrong_reply_is_a_fault_of_one_line(serve, raw, fragment):
    fault = fault_of(serve(raw).base)
    assert fragment in str(fault) and "\n" not in str(fault)
    assert not isinstance(fault, RejectedRequest)


def test_some_status_codes_reject_the_request(serve):
    codes = (400, 413, 414, 422, 401, 404, 429, 503)
    faults = [fault_of(serve(reply(b"", f"{code} X")).base) for code in codes]
    assert [isinstance(fault, RejectedRequest) for fault in faults] == [True] * 4 + [False] * 4


def test_a_refused_connection_an_unknown_name_and_a_text_that_is_no_address_are_faults(closed_port):
    assert "Connection refused" in str(fault_of(f"http://127.0.0.1:{closed_port}/"))
    fault_of("http://no-such-host.invalid/")
    for url in ("", "host:80", "ftp://h/", "http://", "http://h:port/"):
        assert "ValueError: " in str(fault_of(url))


def test_a_redirect_is_not_followed(serve):
    """A request may contain a key, which another server must not get."""
    requests = []
    other = serve(lambda *request: requests.append(request) or reply(b"stolen"))
    place = f"Location: {other.base}?key=secret"
    redirect = f"HTTP/1.1 302 X\r\n{place}\r\nContent-Length: 0\r\n\r\n".encode()
    assert "HTTP 302" in str(fault_of(serve(redirect).base)) and requests == []


@pytest.mark.parametrize("kind, waits", [(Fault, [1, 2]), (RejectedRequest, [])])
def test_retrying_ends_after_the_retries_or_when_it_cannot_help(kind, waits, monkeypatch):
    def fails():
        raise kind("no")

    waited = []
    monkeypatch.setattr("retrievers.net.time.sleep", waited.append)
    with pytest.raises(kind):
        retrying(fails, retries=2, backoff=1)
    assert waited == waits
