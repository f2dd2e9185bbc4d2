"""One HTTP exchange that cannot hang, grow without end or end in a surprise.

    body   = fetch(url, payload, timeout=..., max_bytes=...)   bytes, or a `Fault`
    result = retrying(lambda: ..., retries=2)                  again while a Fault says it may help

The time limit holds for the whole exchange, headers and redirects too: a socket's own limit holds
for one wait, and a server that sends a byte now and then never reaches it. (Only the look-up of a
name has the system's own limit, often 10 to 30 s.) Nothing is read beyond `max_bytes`. A redirect
to another host or port is a fault: the request may carry a key, and that is for the server that
was asked. Left out: cookies, other authentication than a header, connections that are kept open.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial

from errors import InputError

MAX_BYTES = 64 * 2**20
MAX_BACKOFF = 8.0  # seconds between two tries
REQUEST_AT_FAULT = (400, 413, 414, 422)  # HTTP: not this request; the server itself is well
TRY_AGAIN = (408, 425, 429)
LOCAL = ("localhost", "127.0.0.1", "::1")


class Fault(Exception):
    """Why one try failed.

    retry   may the same request go well the next time? (not after a 404, which stays one)
    down    is the server itself not well? (not after a 400, which is this request's fault)
    """

    def __init__(self, text: str, retry: bool = True, down: bool = True):
        super().__init__(text)
        self.retry, self.down = retry, down


def fetch(url: str, payload=None, timeout=60.0, headers=None, max_bytes=MAX_BYTES) -> bytes:
    """The body of one GET, or of a POST of `payload` as JSON. Raises Fault, and nothing else."""
    data = None if payload is None else json.dumps(payload).encode()
    kind = {} if data is None else {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, data, kind | (headers or {}))
        with make_opener(url, time.monotonic() + timeout).open(request) as response:
            return read_body(response, max_bytes)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise as_fault(error, timeout) from None


def fetch_json(url: str, payload=None, timeout=60.0, headers=None, max_bytes=MAX_BYTES) -> object:
    """`fetch`, read as JSON."""
    body = fetch(url, payload, timeout, headers, max_bytes)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        said = shown(body.decode(errors="replace"))
        raise Fault(f"a reply that is not JSON, or half of one: {said}") from None


def read_body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    body = bytearray()
    while piece := response.read1(65536):
        body += piece
        if len(body) > max_bytes:
            raise Fault(f"more than {max_bytes:,} bytes", retry=False, down=False)
    # Trap: read1 returns b"" on a connection that broke off, and half a body looks whole.
    if response.length:
        raise Fault(f"half an answer: {response.length:,} bytes are missing")
    return bytes(body)


def left(deadline: float) -> float:
    """Seconds until then; TimeoutError if none. (A limit of 0 means "do not wait" to a socket.)"""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


class TimedResponse(http.client.HTTPResponse):
    """A response that ends at `deadline`: before every wait the socket gets what is left of it."""

    def __init__(self, sock: socket.socket, *args, deadline: float, **options):
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(TimedSocket(self.fp.detach(), sock, deadline))


class TimedSocket(io.RawIOBase):
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


class TimedHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """urllib's connections, each with what is left of the time, a redirect's too."""

    def __init__(self, deadline: float):
        super().__init__()
        self.deadline = deadline

    def http_open(self, request):
        return self.do_open(partial(self.connect, http.client.HTTPConnection), request)

    def https_open(self, request):
        return self.do_open(partial(self.connect, http.client.HTTPSConnection), request)

    def connect(self, kind: type, host: str, **options) -> http.client.HTTPConnection:
        connection = kind(host, **{**options, "timeout": left(self.deadline)})
        connection.response_class = partial(TimedResponse, deadline=self.deadline)
        return connection


class SameServer(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, reply, code, reason, headers, url):
        # Trap: urllib sends all headers on, a key included; and another port is another server.
        old, new = origin(request.full_url), origin(url)
        secured = (old, new) == (("http", old[1], 80), ("https", old[1], 443))
        if new != old and not secured:
            text = f"HTTP {code}, on to {shown(url)}: give that address if it is the right one"
            raise Fault(text, retry=False)
        reply.close()  # or urllib would read the redirect's own body to its end, however long
        return super().redirect_request(request, reply, code, reason, headers, url)


def make_opener(url: str, deadline: float) -> urllib.request.OpenerDirector:
    """Trap: with http_proxy set, a server on this machine would be looked for on the proxy's."""
    direct = [urllib.request.ProxyHandler({})] if host_of(url) in LOCAL else []
    return urllib.request.build_opener(TimedHandler(deadline), SameServer, *direct)


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
        scheme, host, _ = origin(url)
        if host and scheme in ("http", "https"):
            return host
    raise InputError(f"{url}: not an address: give {example}")


def retrying(call: Callable, retries: int, backoff: float = 0.5, wait: Callable = time.sleep):
    """`call()`, tried `retries` more times while its Fault says that may help. `backoff` seconds
    before the second try, twice that before the third, at most MAX_BACKOFF. `wait` may return True
    to give up.
    """
    for attempt in range(retries):
        try:
            return call()
        except Fault as fault:
            if not fault.retry or wait(min(backoff * 2**attempt, MAX_BACKOFF)):
                raise
    return call()


def as_fault(error: Exception, timeout: float) -> Fault:
    """What urllib raised, as a Fault."""
    if isinstance(error, urllib.error.HTTPError):
        said = ""
        # What it says of the error need not come whole; and a loop of redirects comes closed.
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException), error:
            said = shown(error.read1(2000).decode(errors="replace"))
        retry = error.code in TRY_AGAIN or error.code >= 500
        text = f"HTTP {error.code} {said}".strip()
        return Fault(text, retry, down=error.code not in REQUEST_AT_FAULT)
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return Fault(f"nothing within {timeout:g} s")
    told = getattr(reason, "strerror", None)
    return Fault(told or f"{type(error).__name__}: {shown(str(reason))}")


def shown(text: str) -> str:
    """The beginning of what a server said, on one line."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        text = json.loads(text)["error"]["message"]
    line = " ".join(str(text).split())
    return line if len(line) <= 120 else line[:120] + " ..."


def remember(cache: dict, key: object, value: object, most: int = 10_000) -> None:
    """One more entry. A full cache forgets all: a query comes again soon, or never."""
    if len(cache) >= most:
        cache.clear()
    if most:
        cache[key] = value
