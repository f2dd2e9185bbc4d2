"""Query -> web pages -> passages: UR² appendix C.4, behind the address of a search API. Only
`python retriever.py serve --retriever web` comes here: the trainer asks that server.

    query -> search API (one GET) -> up to 3k addresses, in the API's order
          -> up to three rounds: the next k of every query that has fewer than k pages yet, in
             parallel -> HTML -> text -> the window of ~150 words that holds most of the query's
             words, or the whole page (as in C.4) -> Document(id = address, title, text)

A page that cannot be had is replaced by the API's own snippet, or is an empty slot and a number in
`counts`; never an exception. A query that the API fails is None; `net.Fault` if it fails all.

A search leads to addresses that a stranger chose, from inside your network. So: http and https
only, on their usual ports; every address a host has must be a public one, unless `allow_private`.
The name is looked up once, and the connection goes to the very address that was checked: a name
that is public when it is checked and private when it is connected to (DNS rebinding) gains nothing.
Each redirect is checked the same way, and no proxy is used: it would look the name up itself.
Left out: JavaScript, PDF, cookies, robots.txt, compressed pages, a second page of results.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import ipaddress
import os
import re
import socket
import ssl
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from html.parser import HTMLParser
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from data import Document
from errors import InputError
from metrics import tokenize
from retrievers.net import Fault, TimedResponse, fetch_json, host_of, left, remember

ROUNDS, THREADS, REDIRECTS = 3, 32, 4
API_SECONDS, ROUND_SECONDS, PAGE_SECONDS, PARSE_SECONDS = 8.0, 8.0, 5.0, 1.0
MAX_PAGE, MAX_TEXT = 2**20, 100_000  # bytes of a page that are read, characters that are kept
MAX_QUERY = 400  # characters that the API gets: many refuse more, and a policy may write anything
WORDS = 150  # of a window
EXAMPLE = "http://host/search?format=json&q={query}"
AGENT = {"User-Agent": "Mozilla/5.0 (compatible; search-rl/0.1)"}
HEADERS = {**AGENT, "Accept": "text/html,text/plain;q=0.9", "Accept-Encoding": "identity"}


Hit = namedtuple("Hit", "url title snippet")  # of the search API
Page = namedtuple("Page", "title text")


class Skip(Exception):
    """Why a page is not read; the text is a counter's name."""


class WebRetriever:
    """Search the web through a search API, one call at a time (the server sees to that).

    template   its address, with {query} and perhaps {count}
    rate       requests per second to the search API; 0: no limit
    whole      the whole text of a page, not the window with most of the query's words
    SEARCH_API_KEY of the environment is sent in the three headers that APIs read.
    """

    needs_questions = False

    def __init__(self, template: str, allow_private=False, rate=5.0, whole=False):
        # The policy must not choose the host.
        if "{query}" not in template or "{" in host_of(template, EXAMPLE):
            why = "no place for the query"
            raise InputError(f"--retriever_url {template!r}: {why}: give {EXAMPLE}")
        if not rate >= 0:
            raise InputError(f"--web_rate {rate:g}: API calls a second: give 0 (no limit) or more")
        self.template, self.allow_private, self.whole = template, allow_private, whole
        self.interval, self.next_call = 1 / rate if rate else 0.0, 0.0
        key = os.environ.get("SEARCH_API_KEY", "").strip()
        keys = {"Authorization": f"Bearer {key}", "X-API-KEY": key, "X-Subscription-Token": key}
        self.headers = {**AGENT, "Accept": "application/json", **(keys if key else {})}
        self.tls = ssl.create_default_context()
        self.pages, self.found, self.counts = {}, {}, Counter()
        self.lock = threading.Lock()
        try:
            self.ask("encyclopedia", 1)
        except Fault as fault:  # the part behind the ? may hold a key
            raise InputError(
                f"{template.partition('?')[0]}: no search results ({fault}): start the search API,"
                f" correct the address ({EXAMPLE}), or set SEARCH_API_KEY"
            ) from None

    def search(self, queries: list[str], k: int) -> list[list[Document] | None]:
        """At most k documents each, in the API's order; None for a query that the API failed."""
        found = {query: self.found.get((query, k)) for query in queries}
        missing = [query for query in found if found[query] is None and query.strip()]
        self.counts["api_calls"] += len(missing)
        seconds = len(missing) * self.interval + -(-len(missing) // THREADS) * API_SECONDS
        replies = in_parallel(partial(self.ask, k=k), missing, seconds)
        hits = {q: reply for q, reply in replies.items() if not isinstance(reply, Exception)}
        pages = self.read_all(list(hits.values()), k)
        for query, some in hits.items():
            found[query] = self.documents(query, some, pages, k)
            if found[query]:  # nothing found may be an API's bad day
                remember(self.found, (query, k), found[query])
        if missing and all(documents is None for documents in found.values()):
            raise Fault(f"the search API: {replies[missing[0]]}")
        return [found[query] if query.strip() else [] for query in queries]

    def ask(self, query: str, k: int) -> list[Hit]:
        """One request to the search API; those of all threads keep their distance."""
        with self.lock:
            turn = max(time.monotonic(), self.next_call)
            self.next_call = turn + self.interval
        time.sleep(max(0.0, turn - time.monotonic()))
        url = address(self.template, query, ROUNDS * k)
        try:
            return hits_of(fetch_json(url, None, API_SECONDS, self.headers))[: ROUNDS * k]
        except Fault as fault:
            if not fault.retry and not fault.down:  # this query's own: it finds nothing
                return []
            raise

    def read_all(self, hits: list[list[Hit]], k: int) -> dict[str, Page]:
        """{address: page} of what could be read, in up to three rounds of k per query."""
        pages, tried = {}, set()
        for first in range(0, ROUNDS * k, k):
            short = [some for some in hits if sum(hit.url in pages for hit in some) < k]
            # The best of every query before the second best of any: the round may end early.
            ranked = [some[i : i + 1] for i in range(first, first + k) for some in short]
            urls = {hit.url: None for one in ranked for hit in one if hit.url not in tried}
            tried |= urls.keys()
            for url, page in in_parallel(self.read, list(urls), ROUND_SECONDS).items():
                self.counts[str(page) if isinstance(page, Skip) else type(page).__name__] += 1
                pages |= {url: page} if isinstance(page, Page) else {}
        return pages

    def read(self, address: str) -> Page:
        """One page. It is kept even if it comes too late for its round."""
        page = self.pages.get(address)
        if page is None:
            page = self.fetch_page(address)
            remember(self.pages, address, page, 1000)
        return page

    def fetch_page(self, url: str) -> Page:
        deadline = time.monotonic() + PAGE_SECONDS
        for _ in range(REDIRECTS + 1):
            parts, port, addresses = checked(url, self.allow_private)
            tls = self.tls if parts.scheme == "https" else None
            connection = Pinned(parts.hostname, port, addresses, deadline, tls)
            with contextlib.closing(connection):
                path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
                connection.request("GET", quote(path, safe="%/:=&?~+!$,;'@()*[]"), headers=HEADERS)
                response = connection.getresponse()
                onward = response.headers.get("Location")
                if response.status not in (301, 302, 303, 307, 308) or not onward:
                    return page_of(response)
            url = urljoin(url, onward)
        raise Skip("redirects")

    def documents(self, query: str, hits: list[Hit], pages: dict, k: int) -> list[Document]:
        """The first k pages that were read, snippets for what is missing; in the API's order."""
        read = [hit for hit in hits if hit.url in pages][:k]
        told = [hit for hit in hits if hit.url not in pages and hit.snippet][: k - len(read)]
        found = []
        for hit in sorted(read + told, key=hits.index):
            title, text = pages.get(hit.url, hit[1:])
            text = text if self.whole else window(text, query)
            found.append(Document(hit.url, title or hit.title, text))
        return found


def in_parallel(work: Callable, jobs: list, seconds: float) -> dict:
    """{job: work(job)}; an exception stands for itself, TimeoutError for what was not done in
    time. What runs on ends by itself: every wait it does has a limit of its own.
    """
    pool = ThreadPoolExecutor(THREADS)
    tasks = {job: pool.submit(work, job) for job in jobs}
    done, _ = wait(tasks.values(), seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    late = TimeoutError("nothing in time")
    outcomes = [t.exception() or t.result() if t in done else late for t in tasks.values()]
    return dict(zip(tasks, outcomes, strict=True))


# What a Python release may not count among the private ones yet: protocol assignments, and a
# documentation range (RFC 9637).
NOT_PUBLIC = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("3fff::/20"))
NO_NAME = {*"%。．｡"}  # a network card or an escape, and dots that only some look-ups take for one


def resolve(host: str, port: int) -> list[tuple]:
    """All socket addresses of a host. The system also takes 2130706433 and 0x7f.1 for 127.0.0.1:
    so it is never the name that is judged, always what it stands for.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(address[:2] for *_, address in found))


def is_public(address: str) -> bool:
    """May a page lie there?

    >>> [is_public(a) for a in ("93.184.216.34", "10.0.0.1", "169.254.169.254", "2606:4700::1111")]
    [True, False, False, True]
    """
    ip = ipaddress.ip_address(address.partition("%")[0])  # behind the %: the network card
    if ip.version == 6 and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    if ip.version == 6 and (ip.sixtofour or ip.is_site_local):  # 6to4 wraps an IPv4 address
        return False
    newer = any(ip in network for network in NOT_PUBLIC)
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_private or newer)


def checked(url: str, allow_private: bool) -> tuple[SplitResult, int, list[tuple]]:
    """(parts, port, socket addresses) of a page that may be visited; else Skip."""
    with contextlib.suppress(ValueError, KeyError):  # no port, no such scheme, no name
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        usual = port in (80, 443) or allow_private  # what runs on this network seldom has port 80
        if parts.hostname and not NO_NAME & {*parts.hostname} and usual:
            addresses = resolve(parts.hostname, port)
            # All of them: a name with a public and a private address is somebody's trick.
            if addresses and (allow_private or all(is_public(host) for host, _ in addresses)):
                return parts, port, addresses
    raise Skip("refused")


class Pinned(http.client.HTTPConnection):
    """A connection to addresses that were checked. `Host` and, with `tls`, the certificate are
    still those of the name.
    """

    def __init__(self, host: str, port: int, addresses: list, deadline: float, tls):
        super().__init__(host, port)
        self.addresses, self.deadline, self.tls = addresses, deadline, tls
        self.default_port = 443 if tls else 80
        self.response_class = partial(TimedResponse, deadline=deadline)

    def connect(self) -> None:
        for where in self.addresses:
            with contextlib.suppress(OSError):
                self.sock = socket.create_connection(where, left(self.deadline) / 2)
                break
        if self.sock is None:
            raise ConnectionError("no address answers")
        self.sock.settimeout(left(self.deadline))
        if self.tls:
            self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.host)


def address(template: str, query: str, count: int) -> str:
    """The template filled in.

    >>> address("http://host/search?q={query}&n={count}", "Ana & {count}", 9)
    'http://host/search?q=Ana%20%26%20%7Bcount%7D&n=9'
    """
    query = quote(one_line(query)[:MAX_QUERY], safe="", errors="replace")
    return template.replace("{count}", str(count)).replace("{query}", query)


def hits_of(reply: object) -> list[Hit]:
    """The results in an API's reply, each address once: SearXNG {"results": [...]}, Serper
    {"organic": [...]}, Bing {"webPages": {"value": [...]}}, Brave {"web": {"results": [...]}}.
    """
    for path in (["results"], ["organic"], ["webPages", "value"], ["web", "results"]):
        value = reply
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, list):
            hits = [hit_of(result) for result in value if isinstance(result, dict)]
            first = {hit.url: hit for hit in hits[::-1]}  # of one address the first
            return [hit for hit in hits if hit.url and first[hit.url] is hit]
    raise Fault("a reply without results")


def hit_of(result: dict) -> Hit:
    def field(*names: str) -> str:
        given = [result.get(name) for name in names]
        text = next((value for value in given if isinstance(value, str) and value.strip()), "")
        text = text.encode(errors="replace").decode()  # JSON may hold half a character ("\ud800")
        return one_line(html.unescape(re.sub(r"</?\w+>", "", text)))  # some print in bold

    url = field("url", "link").partition("#")[0]
    return Hit(url, field("title", "name")[:200], field("content", "snippet", "description")[:1000])


def page_of(response: http.client.HTTPResponse) -> Page:
    """What a server sent, cut at MAX_PAGE; else Skip."""
    kind = response.headers.get_content_type() if "Content-Type" in response.headers else ""
    packed = response.headers.get("Content-Encoding", "identity").strip().lower() != "identity"
    if response.status != 200:
        raise Skip("http_errors")
    if kind not in ("text/html", "application/xhtml+xml", "text/plain") or packed:
        raise Skip("wrong_type")
    body = bytearray()
    while len(body) < MAX_PAGE and (piece := response.read1(65536)):
        body += piece
    text = decode(bytes(body[:MAX_PAGE]), response.headers.get_content_charset())
    page = Page("", text[:MAX_TEXT]) if kind == "text/plain" else html_to_text(text)
    if not page.text.strip():
        raise Skip("empty")
    return page


def decode(body: bytes, charset: str | None) -> str:
    """By the header's charset, a meta tag's, or else as UTF-8. Never raises."""
    meta = re.search(rb"(?i)<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w-]{1,40})", body[:4096])
    name = charset or (meta[1].decode() if meta else "utf-8")
    # Trap: Python also knows codecs that no page is written in, some of them very slow.
    usual = re.match(r"(?i)utf-?(8|16)|iso|windows|cp\d|koi8|gb|big5|euc|shift|ascii|latin", name)
    with contextlib.suppress(LookupError, ValueError):
        return body.decode(name if usual else "utf-8", errors="replace")
    return body.decode(errors="replace")


SILENT = {*"script style noscript svg template iframe select nav header footer aside".split()}
INLINE = {*"a b i em strong span sup sub small code u".split()}


class Reader(HTMLParser):
    """The title, and the text outside of scripts and menus; a tag not INLINE ends a line."""

    def __init__(self):
        super().__init__()
        self.title, self.pieces, self.tag, self.silent = "", [], "", ""
        self.until = time.thread_time() + PARSE_SECONDS

    def handle_starttag(self, tag, attrs):
        self.silent = self.silent or (tag if tag in SILENT else "")
        self.tag = tag
        self.pieces.append("" if tag in INLINE else "\n")

    def handle_endtag(self, tag):
        self.silent = "" if tag == self.silent else self.silent
        self.tag = ""
        self.pieces.append("" if tag in INLINE else "\n")

    def handle_data(self, data):
        if self.tag == "title" and not self.silent:
            self.title += data
        elif not self.silent:
            self.pieces.append(data)
        # Trap: "<a <a <a ..." makes html.parser quadratic; each of its steps passes here.
        if time.thread_time() > self.until:
            raise ValueError("enough")


def html_to_text(page: str) -> Page:
    """Title and text, by `trafilatura` where it is installed. Never raises.

    >>> html_to_text("<title>Ana</title><nav>menu</nav><p>Ana &amp; Bo<p>left <b>Kel</b>mouth")
    Page(title='Ana', text='Ana & Bo\\nleft Kelmouth')
    """
    reader, main = Reader(), ""
    with contextlib.suppress(AssertionError, ValueError, RecursionError):  # it asserts things
        reader.feed(page)
        reader.close()
    with contextlib.suppress(Exception):  # not installed; or a page that it stumbles over
        import trafilatura  # optional extra

        main = trafilatura.extract(page, include_comments=False) or ""
    lines = map(one_line, (main or "".join(reader.pieces))[:MAX_TEXT].splitlines())
    return Page(one_line(reader.title)[:200], "\n".join(filter(None, lines)))


def one_line(text: str) -> str:
    return " ".join(text.split())


def window(text: str, query: str, words: int = WORDS) -> str:
    """The window of `words` words with most distinct words of the query, the first of several.

    >>> window("a b c d e Ana Bell was born here x y z", "where was Ana Bell born", words=5)
    'e Ana Bell was born'
    """
    found, wanted, step = text.split(), {*tokenize(query)}, max(words // 5, 1)
    best, most = 0, -1
    for start in range(0, max(len(found) - words, 0) + step, step):
        shared = len(wanted & {*tokenize(" ".join(found[start : start + words]))})
        if shared > most:
            best, most = start, shared
    # A script without spaces is one word to us.
    return " ".join(found[best : best + words])[: 10 * words]
