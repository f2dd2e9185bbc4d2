"""Makes one HTTP exchange with a time limit, a size limit and one kind of error.

    reply  = fetch_json(url, payload, timeout)      or a `Fault`
    result = retrying(lambda: ..., retries=2)       tries again if the Fault allows it

Each wait for the reply has only the time that is left of the limit. A socket's own limit holds for
each single wait, so a server that sends a byte now and then would never reach it. Each step before
the reply may take up to the limit: connecting to each address of the host, TLS, and sending. The
look-up of a host name may take as long as the operating system allows. `fetch_json` follows no
redirect, because the request may carry a key.
Left out: proxies.
"""

import contextlib
import functools
import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from urllib.parse import quote, urlsplit

from data import harmless
from errors import InputError

MAX_BYTES = 64 * 2**20
HUB_SECONDS = 4  # within which the hub of Hugging Face must answer
MAX_BACKOFF = 8.0  # seconds between two tries, at most
PORTS = {"http": 80, "https": 443}
REQUEST_AT_FAULT = (400, 413, 414, 422)  # HTTP status: the request is at fault, the server works


class Fault(Exception):
    """The reason why a request failed.

    retry   whether another try may help (not after a 404)
    down    whether the server itself seems to be broken
    """

    down = True

    def __init__(self, text: str, retry: bool = True):
        super().__init__(text)
        self.retry = retry


class RejectedRequest(Fault):
    """The server works and rejects this request; another request may succeed."""

    down = False


def without_hub(path: str) -> None:
    """Makes this process load hub models from the cache alone if `path` is none on this disk and
    the hub does not answer. Otherwise the hub's client would try again, half a minute for each
    file. The pool's limit counts too: a look-up of the host, or several addresses, may take longer.
    """
    from huggingface_hub import constants, get_session  # slow to import

    if os.path.exists(path) or constants.HF_HUB_OFFLINE:
        return
    try:
        with ThreadPool(1) as pool:
            pool.apply_async(get_session().head, [constants.ENDPOINT]).get(HUB_SECONDS)
    except Exception:
        constants.HF_HUB_OFFLINE = True


def fetch_json(url: str, payload=None, timeout: float = 60.0, headers=None) -> object:
    """Returns the JSON value in the reply to one GET, or to one POST of `payload`. For an address
    that `host_of` accepts it raises only Fault.
    """
    data = None if payload is None else json.dumps(payload).encode()
    headers = {"Content-Type": "application/json"} | (headers or {})
    try:
        with exchange(url, time.monotonic() + timeout, data, headers) as response:
            body = response.read(MAX_BYTES + 1)
    except TimeoutError:
        raise Fault(f"nothing within {timeout:g} s") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Fault(
            getattr(error, "strerror", None) or f"{type(error).__name__}: {shown(str(error))}"
        ) from None
    if len(body) > MAX_BYTES:
        raise Fault(f"more than {MAX_BYTES:,} bytes", retry=False)
    code, text = response.status, body.decode(errors="replace")
    if code < 300:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Fault(f"a reply that is not JSON, or half of one: {shown(text)}") from None
    # Where it redirects to; what follows "?" may have an API key.
    message = shown(response.headers.get("Location", "").partition("?")[0] or text)
    kind = RejectedRequest if code in REQUEST_AT_FAULT else Fault
    raise kind(f"HTTP {code} {message}".strip(), code in (408, 425, 429) or code >= 500)


@contextlib.contextmanager
def exchange(url: str, deadline: float, data, headers: dict, address=None) -> Iterator:
    """Yields the response. If `address` is given, the socket connects to it; the header `Host` and
    the check of the certificate still use the host of the url.
    """
    parts = urlsplit(url)
    port = parts.port or PORTS[parts.scheme]
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, port)) as connection:
        where = address or (parts.hostname, port)
        connection.sock = socket.create_connection(where, left(deadline))
        if parts.scheme == "https":
            connection.default_port = 443
            connection.sock = tls().wrap_socket(connection.sock, server_hostname=parts.hostname)
        path = f"{parts.path or '/'}?{parts.query}".removesuffix("?")
        path = quote(path, safe="%/:=&?~+!$,;'@()*[]")
        method, close = "GET" if data is None else "POST", {"Connection": "close"}
        connection.request(method, path, data, close | headers)
        with http.client.HTTPResponse(connection.sock, method=method) as response:
            stream, sock = response.fp.raw, connection.sock  # the response is read from `stream`
            receive = stream.readinto
            # Before every wait the socket's limit becomes the time left. settimeout returns None,
            # so `or` goes on to `receive`.
            stream.readinto = lambda buffer: sock.settimeout(left(deadline)) or receive(buffer)
            response.begin()
            yield response


tls = functools.cache(ssl.create_default_context)


def left(deadline: float) -> float:
    """Returns the seconds until the deadline; raises TimeoutError if it has passed. (A socket would
    read a limit of 0 as "do not wait".)
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def host_of(url: str, example: str = "http://host:port") -> str:
    """Returns the host of an http(s) address. If `url` is not one, raises an InputError that shows
    `example`.
    """
    with contextlib.suppress(ValueError):  # raised by urlsplit, or by reading an invalid port
        parts = urlsplit(url)
        # Trap: urlsplit removes line breaks and so accepts a url that has one, but the line break
        # would appear in later messages. `isprintable` rejects such a url.
        if url.isprintable() and parts.scheme in PORTS and parts.hostname and parts.port != 0:
            return parts.hostname
    raise InputError(f"{url!r}: not an address: give {example}")


def retrying(call: Callable, retries: int, backoff: float = 0.5, wait: Callable = time.sleep):
    """Returns `call()`. After a Fault that allows another try, waits and tries again, at most
    `retries` times. If `wait(seconds)` returns True, raises the Fault without another try.
    """
    for attempt in range(retries):
        try:
            return call()
        except Fault as fault:
            if not fault.retry or wait(min(backoff * 2**attempt, MAX_BACKOFF)):
                raise
    return call()


def shown(text: str) -> str:
    """Returns the beginning of a text on one line, made safe for a terminal."""
    return harmless(" ".join(text[:160].split()))
