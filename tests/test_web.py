"""Tests web.py over real sockets against misbehaving search APIs, pages and host names."""

import json
import socket
import time
import urllib.parse

import pytest
from conftest import ScriptedServer, message

from data import Document
from retrievers import web as module
from retrievers.net import Fault
from retrievers.web import WebRetriever, check_address, fetch_page, html_to_text, window


def reply(text: str, kind="text/html", status="200 OK") -> bytes:
    length = len(body := text.encode())
    head = f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nContent-Type: {kind}\r\n\r\n"
    return head.encode() + body


def redirect(url: str) -> bytes:
    return reply("", status=f"302 Found\r\nLocation: {url}")


def text_page(name: str) -> bytes:
    return reply(f"<title>{name}</title><p>Text of {name}.")


class Site(ScriptedServer):
    """Serves a search API at /search and the `pages`: path -> raw bytes, or a function that yields
    them. `results(query)` returns the API's reply: a list of paths or whole results, or raw bytes.
    """

    def __init__(self):
        self.pages, self.results = {}, lambda query: []
        self.queries, self.visits = [], []
        super().__init__(self.reply_to)
        self.api = self.base + "/search?format=json&q={query}"

    def reply_to(self, path, _):
        if path.startswith("/search?"):
            return self.search(urllib.parse.parse_qs(path)["q"][0])
        self.visits.append(path)
        page = self.pages.get(path, reply("no such page", status="404 Not Found"))
        return page() if callable(page) else page

    def search(self, query: str) -> bytes:
        self.queries.append(query)
        results = self.results(query)
        if isinstance(results, bytes):
            return results
        rows = [{"url": self.base + row} if isinstance(row, str) else row for row in results]
        return reply(json.dumps({"results": rows}), "application/json")


@pytest.fixture
def site(started, monkeypatch):
    """Returns a site that may be visited although its address is private."""
    server = started(Site())
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(module, "check_address", lambda url: ("127.0.0.1", server.server_port))
    return server


def searcher(site, **options) -> WebRetriever:
    return WebRetriever(site.api, **options)


def documents_of(site, page, **options) -> list[Document]:
    """Returns the documents of a search whose only candidate is this page, titled Ana."""
    site.pages["/page"] = page
    site.results = lambda query: [{"url": site.base + "/page", "title": "Ana"}]
    return searcher(site, **options).search(["ana"], 1)[0]


def texts(lists) -> list[list[str]]:
    return [[document.text for document in documents] for documents in lists]


def drip(first=b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"):
    yield first
    for _ in range(100):
        time.sleep(0.05)
        yield b"x"


def drip_head():
    return drip(b"HTTP/1.1 200 OK\r\nX-Long: ")


def test_a_page_that_cannot_be_read_is_replaced_by_its_snippet(site):
    missing = {"url": site.base + "/a", "title": "A", "content": "what a says"}
    site.results = lambda query: [missing]
    expected = Document(site.base + "/a", "A", "what a says")
    assert searcher(site).search(["q"], 2) == [[expected]]


def test_candidates_are_tried_in_order_until_k_are_read_and_at_most_3k(site):
    # k = 2: /0 is read, /1 is missing, /2 is read. The search then has 2 pages and does not visit
    # /3. The same address is visited once.
    site.pages = {path: text_page(path[1:]) for path in ("/0", "/2", "/3")}
    site.results = lambda query: ["/0", "/0#part", "/1", "/2", "/3"]
    assert texts(searcher(site).search(["q"], 2)) == [["Text of 0.", "Text of 2."]]
    assert site.visits == ["/0", "/1", "/2"]
    site.visits.clear()
    site.results = lambda query: [f"/x{i}" for i in range(9)]
    assert searcher(site).search(["x"], 2) == [[]]
    assert site.visits == [f"/x{i}" for i in range(6)]


def test_a_documents_text_is_a_window_of_the_page_or_the_whole_page(site):
    text = " ".join(["filler"] * 400 + "Ana Bell was born".split() + ["filler"] * 400)
    part = documents_of(site, reply(text))[0].text.split()
    assert len(part) == 150 and "Bell" in part
    assert documents_of(site, reply(text), words=2000)[0].text == text


@pytest.mark.parametrize("odd", ["[]", '{"error": "quota"}', '{"results": ["x"]}'])
def test_a_reply_without_results_is_a_fault(site, odd):
    site.results = lambda query: reply(odd, "application/json")
    with pytest.raises(Fault, match="a reply "):
        searcher(site).search(["q"], 1)


def test_the_query_is_quoted_and_cannot_reach_another_field(site):
    searcher(site).search(["where & who?=ü#x {query}", "\ud800/.."], 1)
    assert {*site.queries} == {"where & who?=ü#x {query}", "?/.."}


@pytest.mark.parametrize("template", ["http://h/", "http://h/{Query}", "http://h.{query}.test/"])
def test_an_address_template_needs_a_place_for_the_query_outside_the_host(template):
    assert "give http://host/search?format=json&q={query}" in message(WebRetriever, template)


def test_a_failed_api_request_is_a_fault_and_the_replies_to_other_queries_are_cached(site):
    site.pages, retriever = {"/a": text_page("a")}, searcher(site)
    site.results = lambda query: reply("", status="429 X") if query == "bad" else ["/a"]
    with pytest.raises(Fault):
        retriever.search(["good", "bad"], 1)
    assert texts(retriever.search(["good"], 1)) == [["Text of a."]]
    assert site.queries.count("good") == 1


@pytest.mark.fault(198, 200)
@pytest.mark.parametrize(
    "page",
    [
        redirect("/other"),
        reply("%PDF", "application/pdf"),
        reply("<script>var a = 1;</script><!-- nothing -->"),
        drip,
        drip_head,
    ],
)
def test_a_page_that_fails_or_redirects_is_left_out(site, page, monkeypatch):
    monkeypatch.setattr(module, "PAGE_SECONDS", 0.6)
    site.pages["/other"] = text_page("a")
    assert documents_of(site, page) == [] and site.visits == ["/page"]


@pytest.mark.fault(200)
def test_an_endless_page_is_cut_and_its_beginning_is_used(site):
    pieces = []

    def endless():
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\nAna Bell. "
        while True:
            pieces.append(b"on and on " * 1000)
            yield pieces[-1]

    assert documents_of(site, endless)[0].text.startswith("Ana Bell. on and on")
    assert len(pieces) < 2000  # more than the limit, because the sockets buffer the rest


# -------------------------------------------------------------------- addresses that may be visited

PRIVATE = (
    "127.0.0.1 127.255.255.254 0.0.0.0 10.1.2.3 172.16.0.1 192.168.0.1 169.254.169.254 100.64.0.1"
    " 192.0.0.1 192.0.0.170 198.18.0.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 192.0.2.1"
    " [::1] [::] [fe80::1] [fe80::1%25eth0] [fc00::1] [ff02::1] [::ffff:127.0.0.1]"
    " [64:ff9b::7f00:1] [2002:7f00:1::] [2001:db8::1]"
    " localhost 2130706433 0x7f000001 0177.0.0.1 127.1 user@127.0.0.1 127.0.0.1. 127.0.0.1。"
    " localhost。 127。0。0。1 127.0.0.1%2e h．i"
).split()


@pytest.mark.fault(197)
@pytest.mark.parametrize("host", PRIVATE)
def test_a_private_address_is_refused_however_it_is_written(host):
    with pytest.raises((ValueError, OSError)):
        check_address(f"http://{host}/page")


class Names:
    """Replaces DNS and connections: names have these addresses, every connection is to the site."""

    def __init__(self, site, monkeypatch, **names):
        self.answers = {name.replace("_", "."): list(ips) for name, ips in names.items()}
        self.looked_up, self.dialled, self.site = [], [], site
        monkeypatch.setattr(module, "check_address", check_address)  # the real one
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)
        monkeypatch.setattr(socket, "create_connection", self.dial)

    def look_up(self, host, port, *_):
        self.looked_up.append(host)
        ips = self.answers.get(host, [host])
        answer = ips.pop(0) if len(ips) > 1 else ips[0]  # the next look-up may give another answer
        return [(0, 0, 0, "", (ip, port)) for ip in answer.split()]

    def dial(self, address, timeout):
        self.dialled.append(address)
        connection = socket.socket()
        connection.connect(("127.0.0.1", self.site.server_port))
        return connection


@pytest.mark.fault(199)
def test_a_name_is_looked_up_once_and_sent_as_the_host(site, monkeypatch):
    """A second look-up would return a private address (DNS rebinding)."""
    names = Names(site, monkeypatch, rebind_test=["93.184.216.34", "127.0.0.1"])
    site.pages["/page"] = text_page("a")
    assert fetch_page("http://rebind.test/page") == "Text of a."
    assert names.looked_up == ["rebind.test"] and names.dialled == [("93.184.216.34", 80)]
    assert site.headers[-1]["Host"] == "rebind.test"


@pytest.mark.fault(199)
@pytest.mark.parametrize("answer", ["127.0.0.1", "10.0.0.7", "93.184.216.34 127.0.0.1"])
def test_a_name_with_any_private_address_is_refused(site, monkeypatch, answer):
    names = Names(site, monkeypatch, example_test=[answer])
    with pytest.raises(ValueError, match="refused"):
        fetch_page("http://example.test/page")
    assert names.dialled == []


@pytest.mark.fault(197)
def test_only_ports_80_and_443_and_http_and_https_are_visited(site, monkeypatch):
    Names(site, monkeypatch, h=["93.184.216.34"])
    good = ("http://h/", "https://h/", "https://h:80/x")
    assert [check_address(url)[1] for url in good] == [80, 443, 80]
    for url in "http://h:22/ http://h:8080/ ftp://h/ h/x http:///x".split():
        with pytest.raises(ValueError, match="refused"):
            check_address(url)


def test_an_address_with_blanks_and_foreign_letters_is_quoted_and_injects_no_header(site):
    path = "/a%20b/%C3%BC?x=1%202&y=%20"
    site.pages = {path: text_page("a")}
    site.results = lambda query: ["/a b/ü?x=1 2&y=%20", "/x\r\nX-Evil: 1"]
    assert len(searcher(site).search(["q"], 2)[0]) == 1
    assert path in site.visits and not any("X-Evil" in headers for headers in site.headers)


HEAD, MENU = "<head><title>A</title><style>p {}</style></head>", "<header>top<nav>x</nav></header>"


@pytest.mark.parametrize(
    "page, text",
    [
        (HEAD + "<h1>Ana</h1><p>was <b>born</b>.", "Ana was born."),
        (MENU + "in&nbsp;Kelmouth&#33;<br>Norland", "in Kelmouth! Norland"),
        ('<script>if (a < b) "</p>"</script><li>one<li>two</ul><svg>icon</svg>', "one two"),
        ("a<!-- <p>b -->c<!doctype x>d<svg/>e", "a c d e"),
        ("a < b & c &nosuch; &#0; d", "a < b & c &nosuch; \ufffd d"),
    ],
)
def test_html_becomes_one_line_without_menus_and_scripts(page, text):
    assert html_to_text(page) == text


@pytest.mark.parametrize("piece", ["<!--", "<a ", "</", "<p><form>", "&#x", "<script ", "<nav>"])
def test_hostile_html_is_read_in_linear_time(piece):
    start = time.thread_time()
    html_to_text(piece * (module.MAX_PAGE // len(piece)))
    assert time.thread_time() - start < 5


def test_the_window_has_the_most_words_of_the_query():
    text = "a b c d e Ana Bell was born here x y z"
    assert window(text, "where was Ana Bell born?", words=5) == "e Ana Bell was born"
    assert window(text, "nobody", words=5) == "a b c d e"
    assert window("", "c", 10) == ""
    assert "東京" in window("海" * 5000 + "東京" + "山" * 5000, "東京都", words=150)
    assert len(window("海" * 50_000, "x", words=150)) == 300  # two characters count as a word
    assert len(window("x" * 50_000, "x", words=150)) == 1500  # a word of any length is cut too
