"""Web search: query -> pages -> documents, through the address of a search API (UR² appendix C.4).
Only the commands of retriever.py use this file; a training run queries a running `serve`.

    query -> search API (one GET) -> addresses, in the API's order
          -> pages: HTML -> text
          -> the window of 150 words with the most words of the query (--page_words; if a model
             summarises the pages, give 2000: most pages then stay whole); if a page cannot be read
             or has no text, the API's own snippet instead
          -> Document(id = address, title in the API's reply, text)

Strangers choose these addresses, and this program visits them from inside your network. So only
http and https over IPv4 are allowed, the port must be 80 or 443, and all IP addresses of the host
must be public. A host name is looked up once, and the connection goes to the IP address that was
checked, because a second look-up may give a private one (DNS rebinding). No redirect is followed,
and there is no proxy, because it would look the name up itself.
Left out: redirects, JavaScript, PDF, plain text, cookies, robots.txt, compressed pages, charsets
other than UTF-8, a second page of results.
"""

import contextlib
import html
import ipaddress
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from http.client import HTTPException
from itertools import islice, repeat
from urllib.parse import quote, urlsplit

from data import Document
from errors import InputError
from metrics import stretches, tokenize
from retrievers.net import PORTS, Fault, exchange, fetch_json

CANDIDATES = 3  # addresses tried per wanted page, at most
THREADS = 32
PAUSE = 0.2  # seconds between two calls of the API; many APIs reject faster calls
API_SECONDS = 8.0
PAGE_SECONDS = 3.0
MAX_PAGE = 2**20  # bytes read of a page
WINDOW = 150  # words shown of a page
SILENT = "title|script|style|noscript|svg|template|iframe|select|nav|header|footer|aside"
# No page takes quadratic time, because a tag ends at the latest before the next "<", and an element
# of SILENT without its end tag reaches to the end of the page.
MARKUP = re.compile(
    rf"<({SILENT})\b[^<>]*(?<!/)>.*?(?:</\1\s*>|\Z)|<!--.*?(?:-->|\Z)|</?[a-z!?][^<>]*>?",
    re.DOTALL | re.IGNORECASE,
)
EXAMPLE = "http://host/search?format=json&q={query}"
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; search-rl/0.1)"}


class WebRetriever:
    """Searches the web.

    template   the API's address, with {query}
    words      limit of words per page
    """

    def __init__(self, template: str, words=WINDOW):
        # {query} must not be in the host, because the policy must not choose the host.
        if "{query}" not in template or "{" in urlsplit(template).netloc:
            raise InputError(f"--retriever_url {template!r}: give {EXAMPLE}")
        self.template, self.words = template, words
        self.lock = threading.Lock()
        # Cached, because a client sends all queries of a batch again if one of them fails.
        self.answer = lru_cache(4096)(self.answer)

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """Returns at most k documents per query; raises a Fault if the API fails for a query."""
        with ThreadPoolExecutor(THREADS) as pool:  # leaving `with` waits for all threads
            return list(pool.map(self.answer, queries, repeat(k)))

    def answer(self, query: str, k: int) -> list[Document]:
        hits = (self.read(hit, query) for hit in self.ask(query)[: CANDIDATES * k])
        return [*islice((hit for hit in hits if hit.text), k)]  # no page is read after the k-th

    def read(self, hit: Document, query: str) -> Document:
        """Returns the hit with the text of its page instead of the snippet, if it can be read."""
        with contextlib.suppress(OSError, ValueError, HTTPException):
            text = window(fetch_page(hit.id), query, self.words) or hit.text
            return Document(hit.id, hit.title, text)
        return hit

    def ask(self, query: str) -> list[Document]:
        """Returns the results for a query in SearXNG's layout, {"results": [{"url", "title",
        "content"}, ...]}. A document's id is its address; an address that occurs again is left out.
        """
        with self.lock:
            time.sleep(PAUSE)
        url = self.template.replace("{query}", quote(one_line(query), safe="", errors="replace"))
        reply, hits = fetch_json(url, None, API_SECONDS, HEADERS), {}
        try:
            for row in reply["results"]:
                address = row["url"].partition("#")[0]
                title, text = (one_line(row.get(name) or "") for name in ("title", "content"))
                hits.setdefault(address, Document(address, title, text))
        except (AttributeError, KeyError, TypeError):
            raise Fault("a reply without results") from None
        return list(hits.values())


def check_address(url: str) -> tuple[str, int]:
    """Returns (IPv4 address, port) of a page. Raises ValueError if the page may not be visited, and
    OSError if the host has no IPv4 address.
    """
    parts = urlsplit(url)
    port = parts.port or PORTS.get(parts.scheme, 0)
    if parts.scheme not in PORTS or not parts.hostname or port not in PORTS.values():
        raise ValueError("refused")
    # The IP address is checked, not the name, because the system also reads 2130706433 and 0x7f.1
    # as 127.0.0.1. IPv6 is left out: it has too many notations for private IPv4 addresses.
    resolved = socket.getaddrinfo(parts.hostname, port, socket.AF_INET, socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(address) for *_, (address, _) in resolved]
    # All addresses must be public: a name that also has a private one may be an attack.
    if not all(ip.is_global and not ip.is_multicast for ip in addresses):
        raise ValueError("refused")
    return str(addresses[0]), port


def fetch_page(url: str) -> str:
    """Returns the text in the first MAX_PAGE bytes of an HTML page; raises ValueError or a network
    error if it cannot be read.
    """
    address, deadline = check_address(url), time.monotonic() + PAGE_SECONDS
    with exchange(url, deadline, None, HEADERS, address) as page:
        if page.status != 200 or page.headers.get_content_type() != "text/html":
            raise ValueError("not a page of text")
        return html_to_text(page.read(MAX_PAGE).decode(errors="replace"))


def html_to_text(page: str) -> str:
    """Returns the text of a page outside scripts, menus and other SILENT elements, on one line."""
    text = MARKUP.sub(lambda tag: "" if tag[0].startswith("</") else " ", page)
    return one_line(html.unescape(text))


def one_line(text: str) -> str:
    return " ".join(text.split())


def window(text: str, query: str, words: int) -> str:
    """Returns the window of `words` words that has the most distinct words of the query; in a tie,
    the first. The windows begin words // 5 words apart.
    """
    wanted, windows = {*tokenize(query)}, stretches(text, words, max(words // 5, 1))
    best = max(windows, key=lambda part: len(wanted & {*tokenize(part)}), default="")
    return best[: 10 * words]  # a "word" may be an address of any length
