"""fetch.py: over real sockets, with servers that drip, break off, go on without end and send one
elsewhere.
"""

import contextlib
import io
import socket
import sys
import time
import urllib.request

import pytest
from conftest import RawServer

from errors import InputError
from retrievers.net import (
    MAX_BACKOFF,
    Fault,
    SameServer,
    fetch,
    fetch_json,
    host_of,
    retrying,
    shown,
)

OK = b"HTTP/1.1 200 OK\r\n"


class Raw(RawServer):
    """A server that reads a request's head and body, and then does with the socket what
    `script(sock, head)` says.
    """

    def __init__(self, script):
        self.heads, self.script = [], script
        super().__init__()
        self.url = f"{self.base}/"

    def answer(self, sock):
        with sock, contextlib.suppress(OSError):
            head = sock.recv(65536).decode()
            self.heads.append(head)
            self.script(sock, head)


@pytest.fixture
def serve():
    servers = []

    def start(script):
        servers.append(Raw(script if callable(script) else lambda sock, head: sock.sendall(script)))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def reply(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def fault_of(url: str, **limits) -> Fault:
    with pytest.raises(Fault) as caught:
        fetch(url, **{"timeout": 2.0, **limits})
    return caught.value


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ------------------------------------------------------------------------------------- it goes well


def test_a_get_has_no_body_and_a_post_is_json(serve):
    server = serve(reply(b'{"a": 1}'))
    assert fetch(server.url + "x?y=1", headers={"X-Key": "k"}) == b'{"a": 1}'
    assert fetch_json(server.url, {"q": "ü"}) == {"a": 1}
    assert server.heads[0].startswith("GET /x?y=1 HTTP/1.1") and "X-Key: k" in server.heads[0]
    assert (
        server.heads[1].startswith("POST / ")
        and "Content-Type: application/json" in server.heads[1]
    )


def test_a_body_in_chunks_and_one_that_ends_with_the_connection_are_whole(serve):
    assert (
        fetch(serve(OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n").url)
        == b"abcde"
    )
    assert fetch(serve(OK + b"\r\nabc").url) == b"abc"


# ------------------------------------------------------------------------------------ limit of time

DRIPS = {
    "body": OK + b"Content-Length: 1000\r\n\r\n",
    "headers": OK + b"X-Long: ",
    "status line": b"HTTP/1.1 200 ",
    "chunk": OK + b"Transfer-Encoding: chunked\r\n\r\nff\r\n",
    "error's body": b"HTTP/1.1 404 No\r\nContent-Length: 1000\r\n\r\n",
}


@pytest.mark.parametrize("where", DRIPS)
def test_a_server_that_drips_is_left_at_the_time_limit(serve, where):
    # A byte every 50 ms never reaches a socket's own limit of 0.3 s; 100 of them would take 5 s.
    def drip(sock, head):
        sock.sendall(DRIPS[where])
        for _ in range(400):  # 20 s
            sock.sendall(b"x")
            time.sleep(0.05)

    fault = fault_of(serve(drip).url, timeout=0.3)
    if (
        where == "error's body"
    ):  # what it says of the error need not be whole, and stays a 404: no second try
        assert str(fault).startswith("HTTP 404") and not fault.retry
    else:
        assert str(fault) == "nothing within 0.3 s" and fault.retry and fault.down


def test_the_time_limit_holds_over_all_redirects_together(serve):
    def onward(sock, head):  # ten hops of 0.15 s each would be 1.5 s
        time.sleep(0.15)
        number = int(head.split()[1].strip("/") or 0)
        sock.sendall(
            f"HTTP/1.1 302 Found\r\nLocation: /{number + 1}\r\nContent-Length: 0\r\n\r\n".encode()
        )

    server = serve(onward)
    assert "nothing within 0.4 s" in str(fault_of(server.url, timeout=0.4))
    assert len(server.heads) <= 3


# ----------------------------------------------------------------------------------- limit of bytes


def test_max_bytes_is_the_largest_body_that_is_taken(serve):
    server = serve(reply(b"x" * 100))
    assert fetch(server.url, max_bytes=100) == b"x" * 100
    fault = fault_of(server.url, max_bytes=99)
    assert str(fault) == "more than 99 bytes" and not fault.retry and not fault.down


def test_a_body_without_end_is_read_no_further_than_the_limit(serve):
    sent = []

    def endless(sock, head):
        sock.sendall(OK + b"\r\n")
        while True:
            sent.append(sock.send(b"x" * 65536))

    assert "more than 1,000,000 bytes" in str(fault_of(serve(endless).url, max_bytes=1_000_000))
    assert sum(sent) < 20_000_000  # the rest lies in the buffers of the two sockets


def test_a_redirect_s_own_body_is_not_read(serve):
    def endless(sock, head):
        if head.startswith("GET /there"):
            return sock.sendall(reply(b"here"))
        sock.sendall(b"HTTP/1.1 302 Found\r\nLocation: /there\r\n\r\n")
        while True:
            sock.send(b"x" * 65536)

    assert fetch(serve(endless).url) == b"here"


# ----------------------------------------------------------------------------------- half an answer


@pytest.mark.parametrize(
    "raw",
    [
        reply(b"abc", length=103),
        OK + b"Transfer-Encoding: chunked\r\n\r\n10\r\nabc",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        OK + b"Content-Le",
        b"",
        b"no HTTP at all\r\n\r\n",
    ],
)
def test_half_an_answer_is_a_fault_that_may_be_tried_again(serve, raw):
    if (
        raw == OK + b"Content-Le"
    ):  # half a header ends the headers for http.client: an empty body is what is left
        assert fetch(serve(raw).url) == b""
        return
    fault = fault_of(serve(raw).url)
    assert fault.retry and fault.down and "\n" not in str(fault)


@pytest.mark.parametrize("body", [b'{"a": [1', b"<html>", b"", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_body_that_is_not_json_is_a_fault_and_not_a_crash(serve, body):
    with pytest.raises(Fault, match="not JSON, or half of one"):
        fetch_json(serve(reply(body)).url)


# --------------------------------------------------------------------------------------- HTTP codes


@pytest.mark.parametrize(
    "codes, retry, down",
    [
        ((400, 413, 414, 422), False, False),  # this request's fault
        ((401, 403, 404), False, True),
        ((408, 425, 429, 500, 502, 503), True, True),
    ],
)
def test_a_code_says_whether_to_try_again_and_whether_the_server_is_down(serve, codes, retry, down):
    for code in codes:
        fault = fault_of(serve(reply(b'{"error": {"message": "so\\nit is"}}', f"{code} X")).url)
        assert (str(fault), fault.retry, fault.down) == (f"HTTP {code} so it is", retry, down)


def test_a_refused_connection_may_be_tried_again():
    fault = fault_of(f"http://127.0.0.1:{closed_port()}/")
    assert (str(fault), fault.retry, fault.down) == ("Connection refused", True, True)


def test_a_name_that_does_not_exist_is_a_fault():
    assert fault_of("http://no-such-host.invalid/").down


# ---------------------------------------------------------------------------------------- redirects


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])  # another host, and another port
def test_a_redirect_to_another_server_gets_no_request_and_no_key(serve, host):
    other = serve(reply(b"stolen"))
    there = other.url.replace("127.0.0.1", host)
    server = serve(f"HTTP/1.1 302 Found\r\nLocation: {there}\r\nContent-Length: 0\r\n\r\n".encode())
    fault = fault_of(server.url, headers={"Authorization": "Bearer secret"})
    assert f"HTTP 302, on to {there}" in str(fault) and not fault.retry and other.heads == []


SAME = "http://h/a http://H:80/b, http://h/ https://h/, http://h:8080/ http://h:8080/x"
OTHER = (
    "http://h:8080/ http://h:22/, https://h/ http://h/, http://h/ https://h:444/,"
    " http://h:8080/ https://h:8080/, http://h/ http://i/"
)


def test_a_redirect_is_followed_on_one_server_and_from_http_to_https_on_the_usual_ports():
    def onward(old, new):
        request = urllib.request.Request(old)
        return SameServer().redirect_request(request, io.BytesIO(), 302, "", {}, new)

    for pair in SAME.split(", "):
        assert onward(*pair.split()).full_url == pair.split()[1]
    for pair in OTHER.split(", "):
        with pytest.raises(Fault, match="HTTP 302, on to"):
            onward(*pair.split())


def test_a_redirect_on_the_same_host_is_followed_and_a_loop_is_a_fault(serve):
    def script(sock, head):
        sock.sendall(
            reply(b"yes")
            if head.startswith("GET /there")
            else b"HTTP/1.1 307 X\r\nLocation: there\r\nContent-Length: 0\r\n\r\n"
        )

    assert fetch(serve(script).url) == b"yes"
    assert "HTTP 302" in str(
        fault_of(serve(b"HTTP/1.1 302 X\r\nLocation: /\r\nContent-Length: 0\r\n\r\n").url)
    )


def test_a_redirect_to_a_file_of_this_machine_is_a_fault(serve):
    assert "302" in str(
        fault_of(
            serve(b"HTTP/1.1 302 X\r\nLocation: file:///etc/hosts\r\nContent-Length: 0\r\n\r\n").url
        )
    )


# ---------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "url",
    ["", "host:80", "ftp://h/", "file:///etc/hosts", "http://", "http://h:port/", "http://[::1/"],
)
def test_a_bad_address_is_one_line_that_shows_a_good_one(url):
    with pytest.raises(InputError, match=r"not an address: give http://host/search") as caught:
        host_of(url, "http://host/search")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url, host", [("http://h", "h"), ("https://A.b:8/x?y", "a.b"), ("http://[::1]:80/", "::1")]
)
def test_a_good_address_has_a_host(url, host):
    assert host_of(url) == host


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine_but_for_others(
    serve, monkeypatch
):
    proxy, server = serve(reply(b"proxy")), serve(reply(b"server"))
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    assert fetch(server.url) == b"server"
    assert fetch("http://example.test/x") == b"proxy" and proxy.heads[0].startswith(
        "GET http://example.test/x "
    )


# --------------------------------------------------------------------------------------- more tries


def failing(times, **fault):
    calls = []

    def call():
        calls.append(None)
        if len(calls) <= times:
            raise Fault("no", **fault)
        return len(calls)

    return call


def test_retrying_waits_twice_as_long_each_time_up_to_the_maximum():
    # 0.5 · 2^n: 0.5, 1, 2, 4, 8, and then not 16 but MAX_BACKOFF = 8
    waits = []
    assert retrying(failing(6), retries=6, backoff=0.5, wait=waits.append) == 7
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, MAX_BACKOFF]


def test_retrying_ends_after_its_tries_without_a_last_wait():
    waits = []
    with pytest.raises(Fault):
        retrying(failing(9), retries=2, backoff=1, wait=waits.append)
    assert waits == [1, 2]


def test_retrying_does_not_repeat_what_cannot_help_and_ends_when_wait_says_so():
    waits = []
    with pytest.raises(Fault):
        retrying(failing(1, retry=False), retries=5, wait=waits.append)
    assert waits == []
    with pytest.raises(Fault):
        retrying(failing(1), retries=5, wait=lambda seconds: True)


def test_retrying_leaves_other_errors_alone():
    with pytest.raises(ZeroDivisionError):
        retrying(lambda: 1 / 0, retries=5, wait=lambda seconds: pytest.fail("no wait"))


# -------------------------------------------------------------------------------------------- shown


def test_shown_is_one_short_line():
    assert shown("a\n  b") == "a b" and shown('{"error": {"message": "m"}}') == "m"
    assert shown("x" * 121) == "x" * 120 + " ..." and shown("x" * 120) == "x" * 120
