"""Query -> web pages -> passages: UR² appendix C.4, behind the address of a search API.

    query -> search API (one GET, 3k results wanted) -> up to 3k candidate addresses, each once, in
    the API's order
          -> up to three rounds: the next k candidates of every query that has fewer than k pages
          yet, all in parallel -> HTML -> text -> the window of ~150 words that holds most of the
          query's words -> Document(id = address, title, passage), at most k, in the API's order

C.4's "up to three rounds of parallel fetches of 3k candidates with a time limit each" can also be
read as all 3k at once, and again what failed. Taken here is 3 rounds · k = 3k: nobody's server is
asked for a page that is not needed, a page that failed is not asked again a second later, and the
worst case is the same three time limits.

What goes wrong is an empty slot (a list shorter than k) and a number in `counts`, never an
exception. If a page cannot be had, the API's own snippet fills its slot. Only the search API itself
is more: InputError at construction if it does not answer; later None in place of the list of a
query that it fails, and a `fetch.Fault` if it fails all that are asked and nothing is kept for any
other of the call. A query that the API refuses by itself (HTTP 400) just finds nothing.

Each request may cost money, so what one brought is kept as soon as it is there, and there is one
call at a time: a call that was given up and the next try of it do not ask the API for the same
twice.

A call with Q distinct queries that are not kept from before ends, whatever any server does, within

    Q / rate  +  ⌈Q / threads⌉ · api_seconds  +  3 · round_seconds  +  5 ms · Q · k    (to choose
    the windows)

behind the call before it, e.g. 64 queries by the defaults and k = 5: 64 / 5 + 2 · 8 + 3 · 8 + 1.6 =
54.4 s; `seconds(64, 5)` says so. HTML is read by one core for all threads: with a server that
answers at once, 64 queries and k = 5 take 2 s if pages have 20 kB, and 18 s if 200 kB; and
`trafilatura` is ten times slower. A text that is late for its round is an empty slot, but kept.

A search leads to addresses that a stranger chose, from inside your network. So: http and https
only; only `ports`; every address a host has must be a public one (neither private, loopback,
link-local, multicast nor reserved, however it is written), unless `allow_private`. The name is
looked up once, and the connection goes to the very address that was checked: a name that is public
when it is checked and private when it is connected to (DNS rebinding) gains nothing. Each redirect
is checked the same way. For pages no http proxy is used: it would look the name up itself. The
search API is the user's own choice: it may be local, and a proxy of the environment is used for it.
Traps: the end of a page may never come (cut at `max_bytes`, and what was read is used), a gzip of 1
MB may hold 1 GB (unpacked under the same limit), and the texts depend on whether `trafilatura` is
installed (`report` says which). Left out: JavaScript, PDF, cookies, robots.txt, a second page of
results, remembering which servers failed.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import ipaddress
import json
import math
import os
import queue
import socket
import ssl
import threading
import time
import urllib.parse
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from typing import NamedTuple

from data import Document
from errors import FlagParser, InputError, run_main
from metrics import tokenize
from retrievers.net import LRU, Fault, TimedResponse, fetch_json, host_of, left, shown
from retrievers.page import SILENT, decode, html_to_text, lines, one_line, parse_html

ROUNDS = 3
# characters of a query that the API gets: many refuse more, and the policy may write anything
MAX_QUERY = 400
API_BYTES = 4 * 2**20
EXAMPLE = "http://host/search?format=json&q={query}"
PROBE = "encyclopedia"
HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; search-rl/0.1)",
    "Accept": "text/html,text/plain;q=0.9",
    "Accept-Encoding": "gzip",
    "Connection": "close",
}
HTML = ("text/html", "application/xhtml+xml")
REDIRECTS = (301, 302, 303, 307, 308)


class Skip(Exception):
    """Why a slot stays empty; the text is a counter's name."""


class Page(NamedTuple):
    title: str
    text: str
    cut: bool = False


class Hit(NamedTuple):
    """One result of the search API."""

    url: str
    title: str
    snippet: str


# ------------------------------------------------------------------------ where a connection may go


def resolve(host: str, port: int) -> list[tuple[int, tuple]]:
    """All addresses of a host: (family, socket address). The system also takes 2130706433 and
    0x7f.1 for 127.0.0.1: so it is never the name that is judged, always what it stands for.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


# What a Python release may not count among the private ones yet: protocol assignments, and a
# documentation range (RFC 9637).
_NOT_PUBLIC = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("3fff::/20"))
_NO_NAME = frozenset(
    "%。．｡"
)  # a network card or an escape, and dots that some look-ups take for one and others do not


def is_public(address: str) -> bool:
    """May a page lie there?

    >>> [is_public(a) for a in ("93.184.216.34", "10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1", "2606:4700::1111")]
    [True, False, False, False, True]
    """
    ip = ipaddress.ip_address(address.partition("%")[0])  # behind the %: the network card
    if ip.version == 6 and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    if ip.version == 6 and (
        ip.sixtofour or ip.is_site_local
    ):  # 6to4 wraps an IPv4 address, which may be a private one
        return False
    newer = any(ip in network for network in _NOT_PUBLIC)
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_private or newer)


def checked(
    url: str, allow_private: bool, ports: tuple[int, ...]
) -> tuple[urllib.parse.SplitResult, int, list]:
    """(parts, port, socket addresses) of a page that may be visited; else Skip("refused_hosts")."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        allowed = (
            parts.hostname and not _NO_NAME & {*parts.hostname} and (not ports or port in ports)
        )
        addresses = resolve(parts.hostname, port) if allowed else []
    except (ValueError, KeyError):  # no port, no such scheme, no name (UnicodeError)
        raise Skip("refused_hosts") from None
    # All of them: a name with a public and a private address is somebody's trick.
    if not addresses or not (
        allow_private or all(is_public(address[0]) for _, address in addresses)
    ):
        raise Skip("refused_hosts")
    return parts, port, addresses


def dial(addresses: list[tuple[int, tuple]], deadline: float) -> socket.socket:
    """A connection to the first of these addresses that answers; each has its share of the time
    that is left.
    """
    for more, (family, address) in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(left(deadline) / (more + 1))
            sock.connect(address)
            return sock
        except OSError:
            sock.close()
            if not more:
                raise
    raise AssertionError("unreachable")


class Pinned(http.client.HTTPConnection):
    """A connection to addresses that were checked. `Host` and, with `tls`, the certificate are
    still those of the name.
    """

    def __init__(
        self, host: str, port: int, addresses: list, deadline: float, tls: ssl.SSLContext | None
    ):
        super().__init__(host, port)
        self.addresses, self.deadline, self.tls = addresses, deadline, tls
        self.default_port = 443 if tls else 80
        self.response_class = partial(TimedResponse, deadline=deadline)

    def connect(self) -> None:
        self.sock = dial(self.addresses, self.deadline)
        self.sock.settimeout(left(self.deadline))
        if self.tls:
            self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.host)


# ------------------------------------------------------------------------------- bytes -> a passage


def body_of(response: http.client.HTTPResponse, max_bytes: int) -> tuple[bytes, bool]:
    """(the body, unpacked, at most `max_bytes` of it; was it cut off?)"""
    body = bytearray()
    while len(body) <= max_bytes and (piece := response.read1(65536)):
        body += piece
    if (
        response.length and len(body) <= max_bytes
    ):  # Trap: a connection that broke off looks like the end
        raise Skip("connection_errors")
    packing = (response.headers.get("Content-Encoding") or "identity").strip().lower()
    if packing in ("gzip", "x-gzip"):
        try:
            body = zlib.decompressobj(31).decompress(
                bytes(body), max_bytes + 1
            )  # 31: a gzip header and no other
        except zlib.error:
            raise Skip("wrong_type") from None
    elif packing != "identity":
        raise Skip("wrong_type")
    return bytes(body[:max_bytes]), len(body) > max_bytes


def passage(text: str, query: str, words: int = 150) -> str:
    """The window of `words` words with most distinct words of the query, the first of several.
    Windows start every words / 5; up to five in a row hold the same spot, and the middle one of
    them has something on both sides of it.

    >>> passage("a b c d e Ana Bell was born here x y z", "where was Ana Bell born", words=5)
    'Ana Bell was born here'
    """
    found, wanted, step = text.split(), set(tokenize(query)), max(words // 5, 1)
    blocks = [
        wanted & set(tokenize(" ".join(found[start : start + step])))
        for start in range(0, len(found), step)
    ]
    scores = [
        len(set().union(*blocks[i : i + 5])) for i in range(max(len(blocks) - 4, 1))
    ]  # a window is five blocks
    first = scores.index(max(scores))
    ties = list(
        takewhile(lambda score: score == scores[first] > 0, scores[first : first + 5])
    )  # none found: the beginning
    start = min((first + len(ties) // 2) * step, max(len(found) - words, 0))
    return " ".join(found[start : start + words])[
        : 10 * words
    ]  # a script without spaces is one word to us


# ----------------------------------------------------------------------------------- the search API


def address(template: str, query: str, count: int) -> str:
    """The template filled in.

    >>> address("http://host/search?q={query}&n={count}", "Ana & {count}", 9)
    'http://host/search?q=Ana%20%26%20%7Bcount%7D&n=9'
    """
    query = urllib.parse.quote(one_line(query)[:MAX_QUERY], safe="", errors="replace")
    return template.replace("{count}", str(count)).replace("{query}", query)


def hits_of(reply: object) -> list[Hit]:
    """The results in an API's reply, each address once: SearXNG {"results": [...]}, {"organic":
    [...]}, {"webPages": {"value": [...]}}, {"web": {"results": [...]}}, or else the outermost list
    of objects with a url or a link. Fields: url or link; title or name; content, snippet or
    description. No such list: no results; but an "error" is a Fault.
    """
    hits: dict[str, Hit] = {}
    for hit in filter(None, map(_hit, _results(reply))):
        hits.setdefault(hit.url, hit)
    error = (
        reply.get("error") or reply.get("errors")
        if isinstance(reply, dict)
        else not isinstance(reply, list)
    )
    if error and not hits:
        raise Fault(f"a reply without results: {shown(json.dumps(reply))}")
    return list(hits.values())


def _results(reply: object) -> list:
    for path in (
        ["results"],
        ["organic"],
        ["webPages", "value"],
        ["web", "results"],
    ):  # elsewhere: pictures, news
        value = reply
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, list):
            return value
    level = [reply]
    while level:  # from outside in
        for value in level:
            if isinstance(value, list) and any(map(_hit, value)):
                return value
        inner = [
            value.values() if isinstance(value, dict) else value
            for value in level
            if isinstance(value, (dict, list))
        ]
        level = [value for values in inner for value in values]
    return []


def _hit(result: object) -> Hit | None:
    def field(*names: str) -> str:
        given = (result.get(name) for name in names)
        text = next((value for value in given if isinstance(value, str) and value.strip()), "")
        return (
            text.strip().encode(errors="replace").decode()
        )  # JSON may hold half a character ("\ud800")

    if not isinstance(result, dict) or not (url := field("url", "link")):
        return None
    snippet = field("content", "snippet", "description")
    snippet = (
        parse_html(snippet, SILENT)[1] if "<" in snippet else snippet
    )  # some APIs print what was found in bold
    return Hit(
        url.partition("#")[0], one_line(field("title", "name"))[:200], one_line(snippet)[:1000]
    )


# ----------------------------------------------------------------- kept, paced and done in parallel


class Pace:
    """At most `rate` calls per second, evenly spaced, over all threads; 0 is no limit."""

    def __init__(self, rate: float):
        self.interval, self.next, self.lock = 1 / rate if rate else 0.0, 0.0, threading.Lock()

    def wait(self) -> None:
        with self.lock:
            now = time.monotonic()
            turn = max(now, self.next)
            self.next = turn + self.interval
        time.sleep(turn - now)


def in_parallel(work: Callable, jobs: list, threads: int, seconds: float) -> dict:
    """{job: work(job, deadline)} of all jobs that are done within `seconds`; an exception stands
    for itself.

    Daemon threads and not a pool's: Python would wait for those at exit. A thread that is late ends
    by itself, since every wait it does has the deadline; only the look-up of a name has the
    system's own limit.
    """
    todo, done, stop = queue.SimpleQueue(), queue.SimpleQueue(), threading.Event()
    deadline = time.monotonic() + seconds
    for job in jobs:
        todo.put(job)
    for _ in range(min(threads, len(jobs))):
        threading.Thread(target=_work, args=(work, deadline, todo, done, stop), daemon=True).start()
    results = {}
    try:
        with contextlib.suppress(queue.Empty, TimeoutError):
            while len(results) < len(jobs):
                job, result = done.get(timeout=left(deadline))
                results[job] = result
    finally:
        stop.set()
    return results


def _work(
    work: Callable,
    deadline: float,
    todo: queue.SimpleQueue,
    done: queue.SimpleQueue,
    stop: threading.Event,
) -> None:
    with contextlib.suppress(queue.Empty):
        while not stop.is_set():
            job = todo.get_nowait()
            try:
                done.put((job, work(job, deadline)))
            except Exception as error:  # whatever it is, somebody waits for a word
                done.put((job, error))


# ------------------------------------------------------------------------------------ the retriever


class WebRetriever:
    """Search the web through a search API.

    template         its address, with {query} and, if the API takes one, {count}: 3k is put there
                     (one that refuses so many wants a fixed number instead). SearXNG needs `json`
                     among the formats of its settings.yml
    SEARCH_API_KEY   of the environment is sent as `Authorization: Bearer KEY`, as `X-API-KEY: KEY`
                     and as `X-Subscription-Token: KEY`: each API reads one of them
    words            of a passage
    rate             requests per second to the search API, over all threads and calls; 0: no limit
    threads          requests under way at once, per call of `search`
    api_seconds      per request to the search API
    page_seconds     per page, redirects included; round_seconds: per round, all pages of all
                     queries together
    max_bytes        of a page, both as sent and unpacked
    redirects        hops to follow
    ports            where a page may lie; () is anywhere
    allow_private    also read pages of this machine and its network
    kept_pages, kept_queries    how many are remembered, in memory; 0 remembers none
    """

    needs_questions = False

    def __init__(
        self,
        template: str,
        *,
        words: int = 150,
        rate: float = 5.0,
        threads: int = 32,
        api_seconds: float = 8.0,
        page_seconds: float = 5.0,
        round_seconds: float = 8.0,
        max_bytes: int = 2**20,
        redirects: int = 4,
        ports: tuple[int, ...] = (80, 443),
        allow_private: bool = False,
        kept_pages: int = 1000,
        kept_queries: int = 10_000,
    ):
        if "{query}" not in template or "{" in host_of(
            template, EXAMPLE
        ):  # the policy must not choose the host
            raise InputError(f"{template}: no place for the query: give {EXAMPLE}")
        if not rate >= 0:
            raise InputError(
                f"--web_rate {rate:g}: requests per second to the search API: give 0 (no limit) or"
                " more"
            )
        self.template, self.words, self.rate, self.threads = template, words, rate, threads
        self.api_seconds, self.page_seconds, self.round_seconds = (
            api_seconds,
            page_seconds,
            round_seconds,
        )
        self.max_bytes, self.redirects, self.ports, self.allow_private = (
            max_bytes,
            redirects,
            tuple(ports),
            allow_private,
        )
        key = os.environ.get("SEARCH_API_KEY", "").strip()
        keys = (
            {"Authorization": f"Bearer {key}", "X-API-KEY": key, "X-Subscription-Token": key}
            if key
            else {}
        )
        self.headers = {"User-Agent": HEADERS["User-Agent"], "Accept": "application/json", **keys}
        self.tls, self.pace = ssl.create_default_context(), Pace(rate)
        self.pages, self.queries, self.hits = LRU(kept_pages), LRU(kept_queries), LRU(kept_queries)
        self.counts, self.lock = (
            Counter(),
            threading.Lock(),
        )  # threads of a search that has ended may still be running
        self.one_call = threading.Lock()
        self.probe()

    def probe(self) -> None:
        """One request: is there a search API?"""
        try:
            self.ask(PROBE, 1, time.monotonic() + self.api_seconds + 1)
        except Fault as fault:  # the part behind the ? may hold a key
            raise InputError(
                f"{self.template.partition('?')[0]}: no search results ({fault}): start the search"
                f" API, correct the address ({EXAMPLE}), or set SEARCH_API_KEY"
            ) from None

    def seconds(self, queries: int, k: int) -> float:
        """How long a call with so many queries may take: the bound above."""
        return self.api_bound(queries) + ROUNDS * self.round_seconds + 0.005 * queries * k

    def api_bound(self, queries: int) -> float:
        return queries * self.pace.interval + math.ceil(queries / self.threads) * self.api_seconds

    def search(self, queries: list[str], k: int) -> list[list[Document] | None]:
        """At most k documents each, in the API's order; None for a query that the API failed.
        Raises fetch.Fault if none of the call was answered, now or before.
        """
        if k <= 0:
            return [[] for _ in queries]
        with self.one_call:
            return self.search_now(queries, k)

    def search_now(self, queries: list[str], k: int) -> list[list[Document] | None]:
        found = {query: self.queries.get((query, k)) for query in queries}
        missing = [
            query for query, documents in found.items() if documents is None and query.strip()
        ]
        self.count(
            queries=len(found),
            cached_queries=sum(documents is not None for documents in found.values()),
        )
        hits, fault = self.ask_all(missing, k)
        pages = self.read_all(hits, k)
        for query in hits:
            found[query] = self.documents(query, hits[query], pages, k)
            if found[query]:  # nothing found may be an API's bad day
                self.queries.put((query, k), found[query])
        if fault and all(documents is None for documents in found.values()):
            raise fault
        found |= {query: [] for query in found if not query.strip()}
        return [None if found[query] is None else list(found[query]) for query in queries]

    # the search API

    def ask(self, query: str, k: int, deadline: float) -> list[Hit]:
        """One request. Its hits are kept even if they come too late for this call."""
        self.pace.wait()
        seconds = min(self.api_seconds, left(deadline))
        url = address(self.template, query, ROUNDS * k)
        hits = hits_of(fetch_json(url, timeout=seconds, max_bytes=API_BYTES, headers=self.headers))[
            : ROUNDS * k
        ]
        if hits:
            self.hits.put((query, k), hits)
        return hits

    def ask_all(self, queries: list[str], k: int) -> tuple[dict[str, list[Hit]], Fault | None]:
        """(the hits of every query that was answered, now or before; the fault of one that was
        not)
        """
        kept = {query: self.hits.get((query, k)) for query in queries}
        asked = [query for query in queries if kept[query] is None]
        work, fault = lambda query, deadline: self.ask(query, k, deadline), None
        replies = in_parallel(work, asked, self.threads, self.api_bound(len(asked)))
        hits = {query: found for query, found in kept.items() if found is not None}
        for query in asked:
            reply = replies.get(query, TimeoutError())
            if isinstance(reply, Exception):
                reply = (
                    reply
                    if isinstance(reply, Fault)
                    else Fault(f"no answer in time ({type(reply).__name__})")
                )
                fault = fault or (
                    reply if reply.retry or reply.down else None
                )  # else it is this query's own
            if not isinstance(reply, Fault) or not (reply.retry or reply.down):
                hits[query] = [] if isinstance(reply, Fault) else reply
            self.count(api_calls=1, api_faults=isinstance(reply, Fault), no_results=reply == [])
        return hits, fault

    # pages

    def read_all(self, hits: dict[str, list[Hit]], k: int) -> dict[str, Page | None]:
        """{address: page, or None}, in up to three rounds of k per query."""
        pages: dict[str, Page | None] = {}
        for first in range(0, ROUNDS * k, k):
            short = [
                found
                for found in hits.values()
                if sum(pages.get(hit.url) is not None for hit in found) < k
            ]
            # The best result of every query before the second best of any: the round may end early.
            urls = [
                found[rank].url
                for rank in range(first, first + k)
                for found in short
                if rank < len(found)
            ]
            pages |= self.read_round([url for url in dict.fromkeys(urls) if url not in pages])
        return pages

    def read_round(self, urls: list[str]) -> dict[str, Page | None]:
        """These pages, kept ones or fetched."""
        pages = {url: self.pages.get(url) for url in urls}
        missing = [url for url in urls if pages[url] is None]
        self.count(cached=len(urls) - len(missing))
        outcomes = in_parallel(self.read, missing, self.threads, self.round_seconds)
        for url in missing:
            outcome = outcomes.get(url, TimeoutError())
            self.count(**{reason_of(outcome): 1})
            if isinstance(outcome, Page):
                self.count(too_large=outcome.cut)
                pages[url] = outcome
        return pages

    def read(self, url: str, deadline: float) -> Page:
        """One page over the network. It is kept even if it comes too late for this round."""
        page = self.fetch_page(url, min(deadline, time.monotonic() + self.page_seconds))
        self.pages.put(url, page)
        return page

    def fetch_page(self, url: str, deadline: float) -> Page:
        for _ in range(self.redirects + 1):
            parts, port, addresses = checked(url, self.allow_private, self.ports)
            tls = self.tls if parts.scheme == "https" else None
            with contextlib.closing(
                Pinned(parts.hostname, port, addresses, deadline, tls)
            ) as connection:
                connection.request("GET", selector(parts), headers=HEADERS)
                with connection.getresponse() as response:
                    if response.status not in REDIRECTS or not (
                        onward := response.headers.get("Location")
                    ):
                        return page_of(response, self.max_bytes)
            url = urllib.parse.urljoin(url, onward)
        raise Skip("redirects")

    def documents(
        self, query: str, hits: list[Hit], pages: dict[str, Page | None], k: int
    ) -> list[Document]:
        """The first k pages that were read, then snippets for what is missing; in the order of the
        hits.
        """
        read = [hit for hit in hits if pages.get(hit.url)][:k]
        told = [hit for hit in hits if not pages.get(hit.url) and hit.snippet][: k - len(read)]
        self.count(
            documents=len(read) + len(told),
            snippets=len(told),
            empty_slots=k - len(read) - len(told),
        )
        chosen = {*read, *told}
        return [self.document(query, hit, pages.get(hit.url)) for hit in hits if hit in chosen]

    def document(self, query: str, hit: Hit, page: Page | None) -> Document:
        title, text = (page.title, page.text) if page else (hit.title, hit.snippet)
        return Document(hit.url, title or hit.title, passage(text, query, self.words))

    # what happened

    def count(self, **more: int) -> None:
        with self.lock:
            for name, number in more.items():
                self.counts[name] += number

    def report(self) -> str:
        """One line for a log: what was asked, what was read, and why slots are empty."""
        by = "trafilatura" if importlib.util.find_spec("trafilatura") else "html.parser"
        counts = ", ".join(
            f"{name} {number}" for name, number in sorted(self.counts.items()) if number
        )
        return f"web (text by {by}): {counts or 'nothing asked'}"


def selector(parts: urllib.parse.SplitResult) -> str:
    """What a GET asks for: path and query, with everything quoted that is not yet."""
    quoted = [
        urllib.parse.quote(part, safe="%/:=&?~+!$,;'@()*[]")
        for part in (parts.path or "/", parts.query)
    ]
    return "?".join(quoted) if parts.query else quoted[0]


def page_of(response: http.client.HTTPResponse, max_bytes: int) -> Page:
    """What a server sent, as a page with text; else Skip."""
    kind = (
        response.headers.get_content_type() if response.headers.get("Content-Type") else "unknown"
    )
    if response.status != 200:
        raise Skip("http_errors")
    if kind not in (*HTML, "text/plain"):
        raise Skip("wrong_type")
    body, cut = body_of(response, max_bytes)
    text = decode(body, response.headers.get_content_charset())
    title, text = html_to_text(text) if kind in HTML else ("", lines(text))
    if not text:
        raise Skip("empty")
    return Page(title, text, cut)


def reason_of(outcome: object) -> str:
    """The counter of what a visit led to."""
    if isinstance(outcome, Page):
        return "fetched"
    if isinstance(outcome, Skip):
        return str(outcome)
    if isinstance(outcome, TimeoutError):
        return "timeouts"
    if isinstance(outcome, (OSError, http.client.HTTPException)):
        return "connection_errors"
    return "refused_hosts" if isinstance(outcome, ValueError) else "unexpected"


# ------------------------------------------------------------------------------------ on one screen

_PAGES = {
    "/ana": (
        "<title>Ana Bell</title><nav>Home | Maps</nav><p>Ana Bell was born in Kelmouth.<p>She draws"
        " maps of the coast."
    ),
    "/kelmouth": (
        "<title>Kelmouth</title><h1>The town</h1><p>Kelmouth is a harbour city in the north of"
        " Norland."
    ),
}
_PATHS = ("/ana", "/slow", "/missing", "/loop", "/huge", "/kelmouth", "/ana")


class _Site(BaseHTTPRequestHandler):
    """A search API and a small site for the demonstration; most of its pages fail, each in its own
    way.
    """

    def do_GET(self):
        with contextlib.suppress(OSError):
            self.answer(self.path.partition("?")[0])

    def answer(self, path: str):
        if path == "/slow":
            time.sleep(1.5)
        if path == "/loop":
            return self.send(302, "", Location="/loop")
        if path == "/search":
            base = f"http://{self.headers['Host']}"
            results = [
                {"url": base + p, "title": p[1:], "content": f"What the API says of {p[1:]}."}
                for p in _PATHS
            ]
            return self.send(200, json.dumps({"results": results}), "application/json")
        if path == "/huge":
            self.send(200, "<title>Tidewerk</title><p>" + "Tidewerk builds lanterns. " * 1000)
            while True:
                self.wfile.write(b"On and on. " * 1000)
        self.send(200 if path in _PAGES else 404, _PAGES.get(path, "no such page"))

    def send(self, status: int, text: str, kind: str = "text/html", **headers: str):
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def main() -> None:
    parser = FlagParser(description="Search the web; without --api, a site of this file's own.")
    parser.add_argument("query", nargs="?", default="where was ana bell born")
    parser.add_argument("--api", default="", help=f"address of a search API, e.g. '{EXAMPLE}'")
    parser.add_argument("-k", type=int, default=3, help="how many documents")
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = {
        "allow_private": True,
        "ports": (),
        "page_seconds": 0.5,
        "round_seconds": 1.0,
        "words": 20,
    }
    template = args.api or f"http://127.0.0.1:{server.server_port}/search?format=json&q={{query}}"
    web = WebRetriever(template, **{} if args.api else own)
    for turn in ("first", "again"):
        start = time.perf_counter()
        documents = web.search([args.query], args.k)[0]
        print(f"{turn}: {len(documents)} documents in {time.perf_counter() - start:.3f} s")
    for document in documents:
        print(f"    [{document.id}] {document.title}: {document.text}")
    print(web.report())
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    run_main(main)
