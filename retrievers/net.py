"""Makes one HTTP exchange with a time limit, a size limit and one kind of error.

    reply  = fetch_json(url, payload, timeout)      or a `Fault`
    result = retrying(lambda: ..., 2, backoff=1.0)  tries again after a Fault

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
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote, urlsplit

from data import harmless

MAX_BYTES = 64 * 2**20
PORTS = {"http": 80, "https": 443}
REQUEST_AT_FAULT = (400, 413, 414, 422)  # HTTP status: the request is at fault, the server works


class Fault(Exception):
    """The reason why a request failed."""


class RejectedRequest(Fault):
    """The server works and rejects this request; another request may succeed."""


def fetch_json(url: str, payload=None, timeout: float = 60.0, headers=None) -> object:
    """Returns the JSON value in the reply to one GET, or to one POST of `payload`. It raises only
    Fault, also if the address is none.
    """
    data = None if payload is None else json.dumps(payload).encode()
    headers = {"Content-Type": "application/json"} | (headers or {})
    try:
        with exchange(url, time.monotonic() + timeout, data, headers) as response:
            status, body = response.status, response.read(MAX_BYTES)
    except TimeoutError:
        raise Fault(f"nothing within {timeout:g} s") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Fault(shown(f"{type(error).__name__}: {error}")) from None
    text = shown(body[:1000].decode(errors="replace"))
    if status >= 300:
        kind = RejectedRequest if status in REQUEST_AT_FAULT else Fault
        raise kind(f"HTTP {status} {text}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Fault(f"a reply that is not JSON, or a part of one: {text}") from None


@contextlib.contextmanager
def exchange(url: str, deadline: float, data, headers: dict, address=None) -> Iterator:
    """Yields the response. If `address` is given, the socket connects to it; the header `Host` and
    the check of the certificate still use the host of the url.
    """
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError("not an address of the form http://host:port")
    port = parts.port or PORTS[parts.scheme]
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, port)) as connection:
        where = address or (parts.hostname, port)
        connection.sock = socket.create_connection(where, left(deadline))
        if parts.scheme == "https":
            connection.default_port = 443
            connection.sock = tls().wrap_socket(connection.sock, server_hostname=parts.hostname)
        path = quote(f"{parts.path or '/'}?{parts.query}", safe="%/:=&?~+!$,;'@()*[]")
        method, close = "GET" if data is None else "POST", {"Connection": "close"}
        connection.request(method, path.removesuffix("?"), data, close | headers)
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


def retrying(call: Callable, retries: int, backoff: float):
    """Returns `call()`. After a Fault it waits and tries again, at most `retries` times, unless the
    request was rejected.
    """
    for attempt in range(retries):
        try:
            return call()
        except RejectedRequest:
            raise
        except Fault:
            time.sleep(backoff * 2**attempt)
    return call()


def shown(text: str) -> str:
    """Returns the beginning of a text on one line, made safe for a terminal."""
    return harmless(" ".join(text[:160].split()))
