"""Query -> web pages -> passages: UR² appendix C.4, behind the address of a search API. Only
`python retriever.py serve --retriever web` comes here: the trainer asks that server.

    query -> search API (one GET) -> addresses, in the API's order
          -> pages: HTML -> text; where one cannot be read, the API's own snippet
          -> the window of ~150 words that holds most of the query's words; or, for a model that
             summarises, the whole page (of a long one the best 2,000 words)
          -> Document(id = address, title in the API's reply, text)

A stranger chose these addresses, and they are visited from inside your network. So: http and https
only, on their usual ports; every address of a host must be public, unless `allow_private`. A name
is looked up once, and the connection goes to the very address that was checked, since the next
answer may be private (DNS rebinding). So with redirects. No proxy, which would look it up itself.
Left out: JavaScript, PDF, cookies, robots.txt, compressed pages, a second page of results.
"""

import contextlib
import ipaddress
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from urllib.parse import quote, urljoin, urlsplit

from data import Document
from errors import InputError
from metrics import tokenize
from retrievers.net import PORTS, Fault, exchange, fetch_json, host_of

CANDIDATES = 3  # addresses for each page that is wanted
THREADS, REDIRECTS = 32, 4
PAUSE = 0.2  # seconds between two calls of the API: faster, many refuse
API_SECONDS, QUERY_SECONDS, PAGE_SECONDS, PARSE_SECONDS = 8.0, 15.0, 5.0, 1.0
MAX_PAGE, MAX_TEXT = 2**20, 100_000  # bytes of a page that are read, characters that are kept
WINDOW, WHOLE = 150, 2000  # words of a page; 10 whole pages are about 27,000 tokens at most
MAX_QUERY = 400  # characters that the API gets: many refuse more, and a policy may write anything
# Trap: Python also knows codecs that no page is written in, some of them very slow.
CHARSETS = "iso-8859-1 windows-1251 windows-1252 shift_jis euc-jp euc-kr gbk gb18030 big5".split()
SILENT = {*"title script style noscript svg template iframe select nav header footer aside".split()}
EXAMPLE = "http://host/search?format=json&q={query}"
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; search-rl/0.1)"}


class WebRetriever:
    """`template`: the API's address with {query}, perhaps {count}; `words`: of a page, at most."""

    def __init__(self, template: str, allow_private=False, words=WINDOW):
        # The policy must not choose the host.
        if "{query}" not in template or "{" in host_of(template, EXAMPLE):
            why = "no place for the query"
            raise InputError(f"--retriever_url {template!r}: {why}: give {EXAMPLE}")
        self.template, self.allow_private, self.words = template, allow_private, words
        self.lock = threading.Lock()
        key = os.environ.get("SEARCH_API_KEY", "").strip()
        self.headers = HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
        self.answer = lru_cache(4096)(self.answer)  # if one fails, a client asks for all again
        try:
            self.ask("encyclopedia", 1)
        except Fault as fault:  # the part behind the ? may hold a key
            said = f"{template.partition('?')[0]}: no search results ({fault})"
            how = "start the search API, correct the address, or set SEARCH_API_KEY"
            raise InputError(f"{said}: {how}") from None

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """At most k documents each; a Fault if the API fails a query."""
        with ThreadPoolExecutor(THREADS) as pool:  # leaving it waits for all
            return list(pool.map(lambda query: self.answer(query, k), queries))

    def answer(self, query: str, k: int) -> list[Document]:
        found, until = [], time.monotonic() + QUERY_SECONDS
        for hit in self.ask(query, k) if query.strip() else []:
            text = ""
            if time.monotonic() < until:
                with contextlib.suppress(OSError, ValueError, HTTPException):
                    text = fetch_page(hit.id, self.allow_private)
            text = window(text, query, self.words)
            if text or hit.text:
                found.append(Document(hit.id, hit.title, text or hit.text))
            if len(found) == k:
                break
        return found

    def ask(self, query: str, k: int) -> list[Document]:
        with self.lock:
            time.sleep(PAUSE)
        query = quote(one_line(query)[:MAX_QUERY], safe="", errors="replace")
        url = self.template.replace("{count}", str(CANDIDATES * k)).replace("{query}", query)
        return hits_of(fetch_json(url, None, API_SECONDS, self.headers))[: CANDIDATES * k]


def hits_of(reply: object) -> list[Document]:
    """Of SearXNG's {"results": [{"url", "title", "content"}, ...]}, each address once."""
    results = reply.get("results") if isinstance(reply, dict) else None
    if not isinstance(results, list):
        raise Fault("a reply without results")
    hits = {}
    for result in (result for result in results if isinstance(result, dict)):
        given = [result.get(name) for name in ("url", "title", "content")]
        url, title, text = (one_line(str(value or "")) for value in given)
        url = url.partition("#")[0]
        hits.setdefault(url, Document(url, title[:200], text[:1000]))
    hits.pop("", None)
    return list(hits.values())


def is_public(address: str) -> bool:
    """May a page lie at this IP address?"""
    ip = ipaddress.ip_address(address.partition("%")[0])  # behind the %: the network card
    if ip.version == 6 and (ip.sixtofour or ip.is_site_local):  # 6to4 wraps an IPv4 address
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    # Older Pythons do not count all of the protocol assignments among the private ones.
    reserved = ip.is_reserved or ip.is_private or ip in ipaddress.ip_network("192.0.0.0/24")
    return ip.is_global and not (ip.is_multicast or reserved)


def checked(url: str, allow_private: bool) -> tuple[str, int]:
    """The socket address of a page that may be visited; else ValueError."""
    parts = urlsplit(url)
    port = parts.port or PORTS.get(parts.scheme, 0)
    usual = port in (80, 443) or allow_private  # what runs on this network seldom has port 80
    if parts.scheme not in PORTS or not parts.hostname or not usual:
        raise ValueError("refused")
    # Never the name is judged: the system also takes 2130706433 and 0x7f.1 for 127.0.0.1.
    found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    # All of them: a name with a public and a private address is somebody's trick.
    if not allow_private and not all(is_public(address[0]) for *_, address in found):
        raise ValueError("refused")
    return found[0][-1][:2]


def fetch_page(url: str, allow_private: bool) -> str:
    """The text of a page; ValueError or what the network raises if it cannot be had."""
    deadline = time.monotonic() + PAGE_SECONDS
    for _ in range(REDIRECTS + 1):
        with exchange(url, deadline, None, HEADERS, checked(url, allow_private)) as response:
            onward = response.headers.get("Location")
            if response.status // 100 != 3 or not onward:
                return text_of(response)
        url = urljoin(url, onward)
    raise ValueError("too many redirects")


def text_of(response: HTTPResponse) -> str:
    """What a server sent, cut at MAX_PAGE; ValueError if that is no text."""
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    packed = response.headers.get("Content-Encoding", "identity") != "identity"
    if response.status != 200 or kind not in ("text/html", "text/plain") or packed:
        raise ValueError("no page of text")
    charset = response.headers.get_content_charset()
    text = response.read(MAX_PAGE).decode(charset if charset in CHARSETS else "utf-8", "replace")
    return html_to_text(text) if kind == "text/html" else text[:MAX_TEXT].strip()


class Reader(HTMLParser):
    """Its `pieces` are the text outside of scripts and menus."""

    def __init__(self):
        super().__init__()
        self.pieces, self.silent, self.until = [], "", time.thread_time() + PARSE_SECONDS

    def handle_starttag(self, tag, attrs):
        self.silent = self.silent or (tag if tag in SILENT else "")
        self.pieces.append(" ")

    def handle_endtag(self, tag):
        self.silent = "" if tag == self.silent else self.silent

    def handle_data(self, data):
        self.pieces.append("" if self.silent else data)
        # Trap: "<a <a <a ..." makes html.parser quadratic; each of its steps passes here.
        if time.thread_time() > self.until:
            raise ValueError("enough")


def html_to_text(page: str) -> str:
    """On one line, by `trafilatura` where it is installed. Never raises."""
    text, reader = "", Reader()
    with contextlib.suppress(Exception):  # not installed; or a page that it stumbles over
        import trafilatura  # optional extra

        text = trafilatura.extract(page, include_comments=False)
    with contextlib.suppress(AssertionError, ValueError):  # it asserts things
        reader.feed("" if text else page)
        reader.close()
    return one_line(text or "".join(reader.pieces))[:MAX_TEXT]


def one_line(text: str) -> str:
    return " ".join(text.split())


def window(text: str, query: str, words: int = WINDOW) -> str:
    """The window of `words` words with most distinct words of the query, the first of several."""
    found, wanted, step = text.split(), {*tokenize(query)}, max(words // 5, 1)
    windows = [found[start : start + words] for start in range(0, len(found), step)]
    best = max(windows, key=lambda some: len(wanted & {*tokenize(" ".join(some))}), default=[])
    return " ".join(best)[: 10 * words]  # a script without spaces is one word to us
