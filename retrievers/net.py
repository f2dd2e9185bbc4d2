"""One HTTP exchange that cannot hang, grow without end or end in a surprise.

    reply  = fetch_json(url, payload, timeout)      or a `Fault`
    result = retrying(lambda: ..., retries=2)       again while a Fault says it may help

The time limit holds for the whole exchange: a socket's own holds for one wait, and a server that
sends a byte now and then never reaches it. (The look-up of a name alone has the system's limit.)
A redirect is a fault: the request may carry a key. Left out: proxies.
"""

import contextlib
import functools
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote, urlsplit

from data import harmless
from errors import InputError

MAX_BYTES = 64 * 2**20
MAX_BACKOFF = 8.0  # seconds between two tries
PORTS = {"http": 80, "https": 443}
REQUEST_AT_FAULT = (400, 413, 414, 422)  # HTTP: not this request; the server itself is well


class Fault(Exception):
    """Why a try failed. `retry`: may another help (not after a 404)? `down`: is the server ill?"""

    def __init__(self, text: str, retry: bool = True, down: bool = True):
        super().__init__(text)
        self.retry, self.down = retry, down


class RejectedRequest(Fault):
    """The server refuses this request for what it is, and is itself well: another must be made."""


def fetch_json(url: str, payload=None, timeout: float = 60.0, headers=None) -> object:
    """The reply to one GET, or to a POST of `payload`. Raises Fault, and nothing else."""
    data = None if payload is None else json.dumps(payload).encode()
    headers = {"Content-Type": "application/json"} | (headers or {})
    try:
        with exchange(url, time.monotonic() + timeout, data, headers) as response:
            body = response.read(MAX_BYTES + 1)
    except TimeoutError:
        raise Fault(f"nothing within {timeout:g} s") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        told = getattr(error, "strerror", None)
        raise Fault(told or f"{type(error).__name__}: {shown(str(error))}") from None
    if len(body) > MAX_BYTES:
        raise Fault(f"more than {MAX_BYTES:,} bytes", retry=False, down=False)
    code, text = response.status, body.decode(errors="replace")
    if code < 300:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Fault(f"a reply that is not JSON, or half of one: {shown(text)}") from None
    onward = shown(response.headers.get("Location", ""))
    said = f"it leads on to {onward}: give that address if it is right" if onward else shown(text)
    kind = RejectedRequest if code in REQUEST_AT_FAULT else Fault
    again = code in (408, 425, 429) or code >= 500
    raise kind(f"HTTP {code} {said}".strip(), again, kind is Fault)


@contextlib.contextmanager
def exchange(url: str, deadline: float, data=None, headers=None, address=None) -> Iterator:
    """The response; from the socket `address` if given, with the url's `Host` and certificate."""
    parts = urlsplit(url)
    port = parts.port or PORTS[parts.scheme]
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, port)) as connection:
        connection.response_class = functools.partial(TimedResponse, deadline=deadline)
        where = address or (parts.hostname, port)
        connection.sock = socket.create_connection(where, left(deadline))
        connection.sock.settimeout(left(deadline))
        if parts.scheme == "https":
            connection.default_port = 443
            connection.sock = tls().wrap_socket(connection.sock, server_hostname=parts.hostname)
        path = f"{parts.path or '/'}?{parts.query}".removesuffix("?")
        path = quote(path, safe="%/:=&?~+!$,;'@()*[]")
        method, close = "GET" if data is None else "POST", {"Connection": "close"}
        connection.request(method, path, data, close | (headers or {}))
        yield connection.getresponse()


tls = functools.cache(ssl.create_default_context)


class TimedResponse(http.client.HTTPResponse):
    """A response that ends at `deadline`: before every wait the socket gets what is left of it."""

    def __init__(self, sock, debuglevel=0, method=None, url=None, *, deadline: float):
        super().__init__(sock, debuglevel, method, url)
        receive = self.fp.raw.readinto

        def receive_in_time(buffer):
            sock.settimeout(left(deadline))
            return receive(buffer)

        self.fp.raw.readinto = receive_in_time  # headers and body all come through here


def left(deadline: float) -> float:
    """Seconds until then; TimeoutError if none. (A limit of 0 means "do not wait" to a socket.)"""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def host_of(url: str, example: str = "http://host:port") -> str:
    """Returns the host of an http(s) address. Anything else is an InputError that shows `example`,
    and of the address what comes after a password.
    """
    with contextlib.suppress(ValueError):  # of urlsplit, or of a port that is no number
        parts = urlsplit(url)
        # Trap: urlsplit removes line breaks, and a request is made of the whole text.
        plain = url.isprintable() and "@" not in parts.netloc
        if plain and parts.scheme in PORTS and parts.hostname and parts.port != 0:
            return parts.hostname
    raise InputError(f"{url.rpartition('@')[2]!r}: not an address: give {example}")


def retrying(call: Callable, retries: int, backoff: float = 0.5, wait: Callable = time.sleep):
    """`call()`, again while its Fault says that may help; `wait` may return True to give up."""
    for attempt in range(retries):
        try:
            return call()
        except Fault as fault:
            if not fault.retry or wait(min(backoff * 2**attempt, MAX_BACKOFF)):
                raise
    return call()


def shown(text: str) -> str:
    """The beginning of what a server said, on one line."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        text = json.loads(text)["error"]["message"]
    line = harmless(" ".join(str(text).split()))
    return line if len(line) <= 120 else line[:120] + " ..."
