"""One HTTP exchange that cannot hang, grow without end or end in a surprise: what every remote part
stands on.

    body = fetch(url, payload, timeout=..., max_bytes=...)      bytes, or a `Fault` that says
    whether to try again
    result = retrying(lambda: ..., retries=2)                   more tries, with backoff, of what a
    Fault says may go well

The time limit holds for the whole exchange, headers and redirects too: a socket's own limit holds
for one wait, and a server that sends a byte now and then would never reach it. (Only the look-up of
a name has no limit: the system's own holds, often 10 to 30 s.) Nothing is read beyond `max_bytes`.
A redirect to another host or port is a fault: the request may carry a key, and that is for the
server that was asked. (From http to https on the usual ports of one host is followed.) A fault
carries three answers:
    retry    may the same request go well the next time?    (not after a 404, which stays one)
    down     is the server itself not well?                 (not after a 400, which is this
             request's fault)
    reached  was there a connection at all?                 (if not, no other request would fare
             better now)
Left out: cookies, authentication other than a header, connections that are kept open.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from errors import FlagParser, InputError, run_main

MAX_BYTES = 64 * 2**20
MAX_BACKOFF = 8.0  # seconds between two tries
_REQUEST_AT_FAULT = (
    400,
    413,
    414,
    422,
)  # HTTP: this request is not accepted; the server itself is well
_LOCAL = ("localhost", "127.0.0.1", "::1")


class Fault(Exception):
    """Why one try failed. retry: the next may go well. down: the server cannot be reached or is not
    well. reached: there was a connection.
    """

    def __init__(self, text: str, retry: bool = True, down: bool = True, reached: bool = True):
        super().__init__(text)
        self.retry, self.down, self.reached = retry, down, reached


def fetch(
    url: str,
    payload: object = None,
    *,
    timeout: float = 60.0,
    max_bytes: int = MAX_BYTES,
    headers: dict[str, str] | None = None,
    opener: urllib.request.OpenerDirector | None = None,
) -> bytes:
    """The body of one GET, or of a POST of `payload` as JSON. Raises Fault, and nothing else."""
    data = None if payload is None else json.dumps(payload).encode()
    headers = (
        {"Content-Type": "application/json"} | (headers or {})
        if data is not None
        else headers or {}
    )
    deadline, body = time.monotonic() + timeout, bytearray()
    try:
        request = urllib.request.Request(url, data, headers)
        request.deadline = deadline
        with (opener or make_opener(url)).open(request, timeout=timeout) as response:
            while piece := response.read1(65536):
                body += piece
                if time.monotonic() > deadline:
                    raise TimeoutError
                if len(body) > max_bytes:
                    raise Fault(f"more than {max_bytes:,} bytes", retry=False, down=False)
            # Trap: read1 returns b"" on a connection that broke off, and half a body looks whole
            if response.length:
                raise Fault(f"half an answer: {response.length:,} bytes are missing")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise as_fault(error, timeout) from None
    return bytes(body)


def fetch_json(url: str, payload: object = None, **limits) -> object:
    """`fetch`, read as JSON; the limits are those of `fetch`."""
    body = fetch(url, payload, **limits)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Fault(
            f"a reply that is not JSON, or half of one: {shown(body.decode(errors='replace'))}"
        ) from None


class TimedResponse(http.client.HTTPResponse):
    """A response that ends at `deadline` whatever the server does: before every wait the socket
    gets what is left of it.
    """

    def __init__(self, sock: socket.socket, *args, deadline: float, **options):
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(Timed(self.fp.detach(), sock, deadline))


class Timed(io.RawIOBase):
    """What comes from a socket, until `deadline`; then TimeoutError."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float):
        self.raw, self.sock, self.deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int | None:
        self.sock.settimeout(left(self.deadline))
        return self.raw.readinto(buffer)

    def close(self) -> None:
        self.raw.close()
        super().close()


def left(deadline: float) -> float:
    """Seconds until then; TimeoutError if there are none. (A socket takes a limit of 0 for "do not
    wait at all".)
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _timed(kind: type, request: urllib.request.Request) -> Callable:
    """`kind(host, ...)` of a request: its connection has what is left of the time, not all of it
    anew at each redirect.
    """

    def connect(host: str, **options) -> http.client.HTTPConnection:
        connection = kind(host, **options)
        if deadline := getattr(request, "deadline", None):
            connection.timeout = left(deadline)
            connection.response_class = partial(TimedResponse, deadline=deadline)
        return connection

    return connect


class _HTTP(urllib.request.HTTPHandler):
    def http_open(self, request):
        return self.do_open(_timed(http.client.HTTPConnection, request), request)


class _HTTPS(urllib.request.HTTPSHandler):
    def https_open(self, request):
        return self.do_open(
            _timed(http.client.HTTPSConnection, request), request, context=self._context
        )


class _SameServer(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, reply, code, reason, headers, url):
        # Trap: urllib sends all headers on to wherever it is sent, a key included; and another port
        # is another server.
        old, new = origin(request.full_url), origin(url)
        if new != old and (old, new) != (("http", old[1], 80), ("https", old[1], 443)):
            raise Fault(
                f"HTTP {code}, on to {shown(url)}: give that address if it is the right one",
                retry=False,
            )
        again = super().redirect_request(request, reply, code, reason, headers, url)
        again.deadline = getattr(request, "deadline", None)
        reply.close()  # or urllib would read the redirect's own body to its end, however long
        return again


def make_opener(url: str) -> urllib.request.OpenerDirector:
    """Trap: with http_proxy set, a server on this machine would be looked for on the proxy's."""
    direct = [urllib.request.ProxyHandler({})] if host_of(url) in _LOCAL else []
    return urllib.request.build_opener(_HTTP, _HTTPS, _SameServer, *direct)


def origin(url: str) -> tuple[str, str | None, int | None]:
    """
    >>> origin("http://Host/a"), origin("https://h:8080/b")
    (('http', 'host', 80), ('https', 'h', 8080))
    """
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def host_of(url: str, example: str = "http://host:port") -> str:
    """The host of an http(s) address; anything else is an InputError that shows `example`."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        parts.port
        if parts.hostname and parts.scheme in ("http", "https"):
            return parts.hostname
    raise InputError(f"{url}: not an address: give {example}")


def retrying(
    call: Callable[[], object],
    retries: int,
    backoff: float = 0.5,
    wait: Callable[[float], object] = time.sleep,
):
    """`call()`, tried `retries` more times while its Fault says that may help. `backoff` seconds
    before the second try, twice that before the third, at most MAX_BACKOFF. `wait` may return True
    to give up.
    """
    for attempt in range(retries + 1):
        try:
            return call()
        except Fault as fault:
            if (
                not fault.retry
                or attempt == retries
                or wait(min(backoff * 2**attempt, MAX_BACKOFF))
            ):
                raise
    raise AssertionError("unreachable")


def as_fault(error: Exception, timeout: float) -> Fault:
    """What urllib raised, as a Fault."""
    if isinstance(error, urllib.error.HTTPError):
        said = ""
        with (
            contextlib.suppress(OSError, ValueError, http.client.HTTPException),
            error,
        ):  # a loop of redirects comes closed
            said = shown(error.read1(2000).decode(errors="replace"))
        return Fault(
            f"HTTP {error.code} {said}".strip(),
            retry=error.code in (408, 425, 429) or error.code >= 500,
            down=error.code not in _REQUEST_AT_FAULT,
        )
    reason = getattr(error, "reason", error)
    # urllib wraps what happens up to the end of sending; a server that hangs up while we still send
    # was there.
    reached = reason is error or isinstance(reason, (BrokenPipeError, ConnectionResetError))
    if isinstance(reason, TimeoutError):
        return Fault(f"nothing within {timeout:g} s", reached=reached)
    text = getattr(reason, "strerror", None) or f"{type(error).__name__}: {shown(str(reason))}"
    return Fault(text, reached=reached)


def shown(text: str) -> str:
    """The beginning of what a server said, on one line."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        text = json.loads(text)["error"]["message"]
    line = " ".join(str(text).split())
    return line if len(line) <= 120 else line[:120] + " ..."


class LRU:
    """The `size` entries that were used last, for any number of threads; 0 keeps none."""

    def __init__(self, size: int):
        self.size, self.entries, self.lock = size, OrderedDict(), threading.Lock()

    def get(self, key: Hashable):
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)
            return self.entries.get(key)

    def put(self, key: Hashable, value: object) -> None:
        with self.lock:
            self.entries[key] = value
            self.entries.move_to_end(key)
            while len(self.entries) > self.size:
                self.entries.popitem(last=False)


# ------------------------------------------------------------------------------------ on one screen


class _Faulty(BaseHTTPRequestHandler):
    """A server for the demonstration: each path fails in its own way; /second only the first
    time.
    """

    count = 0

    def do_GET(self):
        _Faulty.count += self.path == "/second"
        if self.path == "/slow":
            time.sleep(0.6)
        body = {"/huge": b"x" * 5000, "/prose": b"no JSON"}.get(self.path, b'{"said": "yes"}')
        self.send_response(
            {"/missing": 404, "/ill": 500, "/second": 503 if _Faulty.count < 2 else 200}.get(
                self.path, 200
            )
        )
        self.send_header("Content-Length", str(len(body) + 100 * (self.path == "/half")))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def main() -> None:
    parser = FlagParser(
        description="Fetch an address; without one, a faulty server of this file's own."
    )
    parser.add_argument("url", nargs="*")
    urls = parser.parse_args().url
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Faulty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    paths = ["well", "slow", "huge", "half", "prose", "missing", "ill", "second"]
    for url in urls or [f"http://127.0.0.1:{server.server_port}/{path}" for path in paths]:
        try:
            said = retrying(
                lambda url=url: fetch_json(url, timeout=0.5, max_bytes=1000),
                retries=1,
                backoff=0.01,
            )
            print(f"{url:32} {said}")
        except Fault as fault:
            print(
                f"{url:32} {fault}   (try again: {fault.retry}; the server is down: {fault.down})"
            )
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    run_main(main)
