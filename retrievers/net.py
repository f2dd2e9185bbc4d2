"""One HTTP exchange that cannot hang, grow without end or end in a surprise.

    body   = fetch(url, payload, timeout=..., max_bytes=...)   bytes, or a `Fault`
    result = retrying(lambda: ..., retries=2)                  again while a Fault says it may help

The time limit holds for the whole exchange, headers and redirects too: a socket's own limit holds
for one wait, and a server that sends a byte now and then never reaches it. (Only the look-up of a
name has the system's own limit, often 10 to 30 s.) A redirect to another server is a fault: the
request may carry a key. Left out: cookies, connections that are kept open.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

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
    handlers = [TimedHandler(time.monotonic() + timeout), SameServer]
    try:
        # Trap: with http_proxy set, a server on this machine would be looked for on the proxy's.
        if host_of(url) in LOCAL:
            handlers.append(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(url, data, kind | (headers or {}))
        with urllib.request.build_opener(*handlers).open(request) as response:
            body = response.read(max_bytes + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise as_fault(error, timeout) from None
    if len(body) > max_bytes:
        raise Fault(f"more than {max_bytes:,} bytes", retry=False, down=False)
    # Trap: a connection that broke off ends the body too, and half of it looks whole.
    if response.length:
        raise Fault(f"half an answer: {response.length:,} bytes are missing")
    return body


def fetch_json(url: str, payload=None, timeout=60.0, headers=None) -> object:
    body = fetch(url, payload, timeout, headers)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        said = shown(body.decode(errors="replace"))
        raise Fault(f"a reply that is not JSON, or half of one: {said}") from None


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
        receive = self.fp.raw.readinto

        def receive_in_time(buffer):
            sock.settimeout(left(deadline))
            return receive(buffer)

        self.fp.raw.readinto = receive_in_time  # headers and body all come through here


class TimedHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """urllib's connections, each with what is left of the time, a redirect's too."""

    def __init__(self, deadline: float):
        super().__init__()
        self.deadline = deadline

    def do_open(self, kind: type, request, **options):
        def connect(host: str, **more) -> http.client.HTTPConnection:
            connection = kind(host, **{**more, "timeout": left(self.deadline)})
            connection.response_class = partial(TimedResponse, deadline=self.deadline)
            return connection

        return super().do_open(connect, request, **options)


class SameServer(urllib.request.HTTPRedirectHandler):
    """Trap: urllib sends all headers on, a key included; and another port is another server."""

    def redirect_request(self, request, reply, code, reason, headers, url):
        reply.close()  # or urllib would read the redirect's own body to its end, however long
        if urlsplit(url)[:2] != urlsplit(request.full_url)[:2]:
            text = f"HTTP {code}, on to {shown(url)}: give that address if it is the right one"
            raise Fault(text, retry=False)
        return super().redirect_request(request, reply, code, reason, headers, url)


def host_of(url: str, example: str = "http://host:port") -> str:
    """The host of an http(s) address; anything else is an InputError that shows `example`."""
    with contextlib.suppress(ValueError):  # of urlsplit, or of a port that is no number
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts.hostname
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
        said, code = "", error.code
        # What it says of the error need not come whole; and a loop of redirects comes closed.
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException), error:
            said = shown(error.read1(2000).decode(errors="replace"))
        again = code in TRY_AGAIN or code >= 500
        return Fault(f"HTTP {code} {said}".strip(), again, down=code not in REQUEST_AT_FAULT)
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
