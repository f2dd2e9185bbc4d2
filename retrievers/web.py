"""Web search: query -> pages -> documents, through the address of a search API (UR² appendix C.4).
Only `python retriever.py serve --retriever web` uses this file; the trainer asks that server.

    query -> search API (one GET) -> addresses, in the API's order
          -> pages: HTML -> text; the API's own snippet if a page cannot be read
          -> the window of about 150 words with most of the query's words; for a summarising model
             the whole page (the best 2,000 words of a long one)
          -> Document(id = address, title in the API's reply, text)

Strangers choose these addresses, and they are visited from inside your network. So only http and
https on their usual ports are allowed, and every address of a host must be public, unless
`allow_private` is set. A host name is looked up once, and the connection goes to the address that
was checked, since a second look-up may give a private one (DNS rebinding). The same holds for
redirects. There is no proxy, because it would look the name up itself. Left out: JavaScript, PDF,
cookies, robots.txt, compressed pages, a second page of results.
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

CANDIDATES = 3  # addresses requested per wanted page
THREADS, REDIRECTS = 32, 4
PAUSE = 0.2  # seconds between two calls of the API; many APIs reject faster calls
API_SECONDS, QUERY_SECONDS, PAGE_SECONDS, PARSE_SECONDS = 8.0, 15.0, 5.0, 1.0
MAX_PAGE, MAX_TEXT = 2**20, 100_000  # bytes read of a page, characters kept of its text
WINDOW, WHOLE = 150, 2000  # words of a page; 10 whole pages have at most about 27,000 tokens
MAX_QUERY = 400  # characters sent to the API; a policy may write more than it accepts
# Trap: Python also has codecs that no page uses, and some of them are very slow.
CHARSETS = "iso-8859-1 windows-1251 windows-1252 shift_jis euc-jp euc-kr gbk gb18030 big5".split()
SILENT = {*"title script style noscript svg template iframe select nav header footer aside".split()}
EXAMPLE = "http://host/search?format=json&q={query}"
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; search-rl/0.1)"}


class WebRetriever:
    """Searches the web.

    template   the API's address, with {query} and optionally {count}
    words      limit of words per page
    """

    def __init__(self, template: str, allow_private=False, words=WINDOW):
        # The policy must not choose the host.
        if "{query}" not in template or "{" in host_of(template, EXAMPLE):
            problem = f"{template!r} has no place for the query"
            raise InputError(f"--retriever_url {problem}: give {EXAMPLE}")
        self.template, self.allow_private, self.words = template, allow_private, words
        self.lock = threading.Lock()
        key = os.environ.get("SEARCH_API_KEY", "").strip()
        self.headers = HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
        # Cached, because after one failure a client sends all queries again.
        self.answer = lru_cache(4096)(self.answer)
        try:
            self.ask("encyclopedia", 1)
        except Fault as fault:  # the part after the ? may contain a key
            address = template.partition("?")[0]
            advice = "start the search API, correct the address, or set SEARCH_API_KEY"
            raise InputError(f"{address}: no search results ({fault}): {advice}") from None

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """Returns at most k documents per query; raises a Fault if the API fails for a query."""
        with ThreadPoolExecutor(THREADS) as pool:  # its end waits for all threads
            return list(pool.map(lambda query: self.answer(query, k), queries))

    def answer(self, query: str, k: int) -> list[Document]:
        documents, deadline = [], time.monotonic() + QUERY_SECONDS
        for hit in self.ask(query, k) if query.strip() else []:
            text = ""
            if time.monotonic() < deadline:
                with contextlib.suppress(OSError, ValueError, HTTPException):
                    text = fetch_page(hit.id, self.allow_private)
            text = window(text, query, self.words)
            if text or hit.text:
                documents.append(Document(hit.id, hit.title, text or hit.text))
            if len(documents) == k:
                break
        return documents

    def ask(self, query: str, k: int) -> list[Document]:
        with self.lock:
            time.sleep(PAUSE)
        query = quote(one_line(query)[:MAX_QUERY], safe="", errors="replace")
        url = self.template.replace("{count}", str(CANDIDATES * k)).replace("{query}", query)
        return hits_of(fetch_json(url, None, API_SECONDS, self.headers))[: CANDIDATES * k]


def hits_of(reply: object) -> list[Document]:
    """Reads SearXNG's {"results": [{"url", "title", "content"}, ...]}, each address once."""
    results = reply.get("results") if isinstance(reply, dict) else None
    if not isinstance(results, list):
        raise Fault("a reply without results")
    hits = {}
    for result in (result for result in results if isinstance(result, dict)):
        values = [result.get(name) for name in ("url", "title", "content")]
        url, title, text = (one_line(str(value or "")) for value in values)
        url = url.partition("#")[0]
        hits.setdefault(url, Document(url, title[:200], text[:1000]))
    hits.pop("", None)
    return list(hits.values())


def is_public(address: str) -> bool:
    """Returns whether a page at this IP address may be visited."""
    ip = ipaddress.ip_address(address.partition("%")[0])  # after the %: the network interface
    if ip.version == 6 and (ip.sixtofour or ip.is_site_local):  # 6to4 wraps an IPv4 address
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    # Older Python versions do not count every protocol assignment as private.
    reserved = ip.is_reserved or ip.is_private or ip in ipaddress.ip_network("192.0.0.0/24")
    return ip.is_global and not (ip.is_multicast or reserved)


def check_address(url: str, allow_private: bool) -> tuple[str, int]:
    """Returns the socket address of a page that may be visited; raises ValueError otherwise."""
    parts = urlsplit(url)
    port = parts.port or PORTS.get(parts.scheme, 0)
    usual = port in (80, 443) or allow_private  # private services seldom use port 80
    if parts.scheme not in PORTS or not parts.hostname or not usual:
        raise ValueError("refused")
    # The address is checked, not the name: the system also reads 2130706433 and 0x7f.1 as
    # 127.0.0.1.
    addresses = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    # All of them: a name with both a public and a private address is an attack.
    if not allow_private and not all(is_public(address[0]) for *_, address in addresses):
        raise ValueError("refused")
    return addresses[0][-1][:2]


def fetch_page(url: str, allow_private: bool) -> str:
    """Returns the text of a page; raises ValueError or a network error if it cannot be read."""
    deadline = time.monotonic() + PAGE_SECONDS
    for _ in range(REDIRECTS + 1):
        with exchange(url, deadline, None, HEADERS, check_address(url, allow_private)) as response:
            onward = response.headers.get("Location")
            if response.status // 100 != 3 or not onward:
                return text_of(response)
        url = urljoin(url, onward)
    raise ValueError("too many redirects")


def text_of(response: HTTPResponse) -> str:
    """Returns what a server sent, truncated at MAX_PAGE; raises ValueError if it is not text."""
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    packed = response.headers.get("Content-Encoding", "identity") != "identity"
    if response.status != 200 or kind not in ("text/html", "text/plain") or packed:
        raise ValueError("not a page of text")
    charset = response.headers.get_content_charset()
    text = response.read(MAX_PAGE).decode(charset if charset in CHARSETS else "utf-8", "replace")
    return html_to_text(text) if kind == "text/html" else text[:MAX_TEXT].strip()


class Reader(HTMLParser):
    """Collects in `pieces` the text outside of scripts and menus."""

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
        # Trap: "<a <a <a ..." makes html.parser quadratic; and each step calls this method.
        if time.thread_time() > self.until:
            raise ValueError("parsing takes too long")


def html_to_text(page: str) -> str:
    """Returns the text on one line, extracted by `trafilatura` if it is installed. Never raises."""
    text, reader = "", Reader()
    with contextlib.suppress(Exception):  # it is not installed, or fails on this page
        import trafilatura  # optional extra

        text = trafilatura.extract(page, include_comments=False)
    with contextlib.suppress(AssertionError, ValueError):  # html.parser contains assertions
        reader.feed("" if text else page)
        reader.close()
    return one_line(text or "".join(reader.pieces))[:MAX_TEXT]


def one_line(text: str) -> str:
    return " ".join(text.split())


def window(text: str, query: str, words: int = WINDOW) -> str:
    """Returns the first window of `words` words with the most distinct words of the query."""
    page, wanted, step = text.split(), {*tokenize(query)}, max(words // 5, 1)
    windows = [page[start : start + words] for start in range(0, len(page), step)]
    best = max(windows, key=lambda part: len(wanted & {*tokenize(" ".join(part))}), default=[])
    return " ".join(best)[: 10 * words]  # text in a script without spaces counts as one word
