"""web.py: over real sockets, with everything a search API, a page or a name can do to us."""

import contextlib
import json
import socket
import sys
import threading
import time
import urllib.parse
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import RawServer, message

from data import Document
from errors import InputError
from retrievers import web as module
from retrievers.net import Fault
from retrievers.web import (
    MAX_QUERY,
    MAX_TEXT,
    WHOLE,
    WebRetriever,
    check_address,
    fetch_page,
    hits_of,
    html_to_text,
    is_public,
    window,
)


def reply(body: bytes | str, kind: str | None = "text/html", status="200 OK", **headers) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    headers = {"Content-Length": len(body), **({"Content-Type": kind} if kind else {}), **headers}
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    return f"HTTP/1.1 {status}\r\n{''.join(lines)}\r\n".encode() + body


def onward(url: str) -> bytes:
    return reply("", status="302 Found", Location=url)


def text_page(name: str) -> bytes:
    return reply(f"<title>{name}</title><p>Text of {name}.")


class Site(RawServer):
    """A search API at /search and whatever lies in `pages`: path -> bytes to send, or script(sock,
    head). `results(query)` is what the API replies: a list of paths or of whole results, anything
    else as it is (bytes: raw).
    """

    def __init__(self):
        self.pages, self.results = {}, lambda query: []
        self.queries, self.heads, self.visits, self.connections = [], [], Counter(), 0
        super().__init__(backlog=512)
        self.api = self.base + "/search?format=json&q={query}&n={count}"

    def answer(self, sock):
        self.connections += 1
        with sock, contextlib.suppress(OSError, IndexError):  # no request, or one that is TLS
            head = sock.recv(65536)
            while b"\r\n\r\n" not in head and head[:1] != b"\x16":
                head += sock.recv(65536) or b"\r\n\r\n"
            head = head.decode("latin-1")
            self.heads.append(head)
            path, _, fields = head.split()[1].partition("?")
            if path == "/search":
                return sock.sendall(self.search(urllib.parse.parse_qs(fields)))
            self.visits[path] += 1
            page = self.pages.get(path, reply("no such page", status="404 Not Found"))
            return page(sock, head) if callable(page) else sock.sendall(page)

    def search(self, fields) -> bytes:
        self.queries.append((fields["q"][0], int(fields["n"][0])))
        found = self.results(fields["q"][0])
        if isinstance(found, bytes):
            return found
        if isinstance(found, list):
            given = [{"url": self.base + it} if isinstance(it, str) else it for it in found]
            found = {"results": given}
        return reply(json.dumps(found), "application/json")


@pytest.fixture
def site(started):
    return started(Site())


@pytest.fixture(autouse=True)
def no_key_no_extra_and_no_pause(monkeypatch):
    monkeypatch.delenv("SEARCH_API_KEY", raising=False)
    # An import of it fails: these tests are of our own reading.
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    monkeypatch.setattr(module, "PAUSE", 0.0)


def searcher(site, allow_private=True, **options) -> WebRetriever:
    web = WebRetriever(site.api, allow_private, **options)
    site.queries.clear(), site.heads.clear()
    site.connections = 0
    return web


def one(site, page, **options):
    """The documents of a search whose only candidate is this page, titled Ana."""
    site.pages["/page"] = page
    site.results = lambda query: [{"url": site.base + "/page", "title": "Ana"}]
    return searcher(site, **options).search(["ana"], 1)[0]


def texts(found):
    return [[document.text for document in documents] for documents in found]


def drip(sock, head, first=b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"):
    sock.sendall(first)
    for _ in range(100):
        sock.sendall(b"x")
        time.sleep(0.05)


def drip_head(sock, head):
    drip(sock, head, b"HTTP/1.1 200 OK\r\nX-Long: ")


def test_a_page_becomes_a_document_with_its_address_and_the_title_of_the_results(site):
    (found,) = one(site, text_page("a"))
    assert (found.id, found.title, found.text) == (site.base + "/page", "Ana", "Text of a.")


def test_queries_keep_their_order_and_pages_that_of_the_results(site):
    def slow(sock, head):
        time.sleep(0.15)
        sock.sendall(text_page("a1"))

    site.pages = {"/a1": slow, **{f"/{name}": text_page(name) for name in ("a2", "b1", "b2")}}
    site.results = lambda query: [f"/{query}1", f"/{query}2"]
    found = searcher(site).search(["a", "b"], 2)
    assert texts(found) == [["Text of a1.", "Text of a2."], ["Text of b1.", "Text of b2."]]
    assert sorted(site.queries) == [("a", 6), ("b", 6)]  # 3k = 6 results wanted


def test_no_query_and_a_blank_query_ask_nobody(site):
    web = searcher(site)
    assert web.search([], 5) == [] and web.search([" \n"], 5) == [[]]
    assert site.connections == 0


def test_candidates_are_tried_in_order_until_k_are_read_and_none_beyond_3k(site):
    # k = 2: /0 is read, /1 is missing, /2 is read. That is enough: the others are left alone.
    site.pages = {path: text_page(path[1:]) for path in ("/0", "/2", "/3")}
    site.results = lambda query: [f"/{i}" for i in range(4)]
    assert texts(searcher(site).search(["q"], 2)) == [["Text of 0.", "Text of 2."]]
    assert set(site.visits) == {"/0", "/1", "/2"}
    site.results = lambda query: [f"/x{i}" for i in range(9)]
    assert searcher(site).search(["x"], 2) == [[]]
    assert site.visits.keys() - {"/0", "/1", "/2"} == {f"/x{i}" for i in range(6)}


def test_an_address_that_comes_twice_is_one_candidate(site):
    site.pages = {"/a": text_page("a"), "/b": text_page("b")}
    site.results = lambda query: ["/a", "/a#part", "/b", "/a"]
    assert texts(searcher(site).search(["q"], 2)) == [["Text of a.", "Text of b."]]
    assert site.visits == {"/a": 1, "/b": 1}


def test_where_a_page_cannot_be_read_the_snippet_stands(site):
    site.pages = {"/b": text_page("b")}
    site.results = lambda query: [
        {"url": site.base + "/a", "title": "A", "content": "what a says"},
        {"url": site.base + "/b"},
        {"url": site.base + "/c", "title": "C", "content": "what c says"},
    ]
    found = searcher(site).search(["q"], 2)
    assert texts(found) == [["what a says", "Text of b."]] and found[0][0].title == "A"


def test_a_page_is_given_by_its_window_or_whole(site):
    text = " ".join(["filler"] * 400 + "Ana Bell was born".split() + ["filler"] * 400)
    assert len(one(site, reply(text, "text/plain"))[0].text.split()) == 150
    assert one(site, reply(text, "text/plain"), words=WHOLE)[0].text == text
    long = " ".join(["filler"] * 5000 + "Ana Bell was born".split() + ["filler"] * 5000)
    whole = one(site, reply(long, "text/plain"), words=WHOLE)[0].text.split()
    assert len(whole) == WHOLE == 2000 and "Bell" in whole


def test_odd_results_are_left_out_and_a_reply_without_results_is_a_fault():
    hit = {"url": "u", "title": " t\n", "content": "s"}
    assert hits_of({"results": [{"url": None}, "x", None, hit]}) == [Document("u", "t", "s")]
    assert hits_of({"results": [], "images": [{"url": "no"}]}) == []
    for found in (None, "x", {}, [], {"error": "quota"}):
        with pytest.raises(Fault, match="a reply without results"):
            hits_of(found)


def test_the_query_is_quoted_and_cannot_reach_another_field(site):
    web = searcher(site)
    web.search(["where & who?=ü#x {count}", "w" * 5000, "\ud800/.."], 1)
    asked = {"where & who?=ü#x {count}", "w" * MAX_QUERY, "?/.."}
    assert {query for query, _ in site.queries} == asked


def test_a_template_without_a_place_for_the_query_or_with_one_in_the_host_is_one_line():
    for template in ("http://h/", "http://h/{Query}", "http://{query}/", "http://h.{query}.test/"):
        with pytest.raises(InputError, match=r"give http://host/search\?format=json&q={query}"):
            WebRetriever(template)


def test_an_api_that_is_not_there_is_one_line_at_construction_that_shows_no_key(
    closed_port,
):
    url = f"http://127.0.0.1:{closed_port}/find?key=secret&q={{query}}"
    said = message(WebRetriever, url)
    assert "/find: no search results (Connection refused" in said and "secret" not in said


def test_an_api_that_does_not_answer_with_results_is_one_line_at_construction(site):
    for raw in (reply("<html>"), reply("", status="401 X"), reply('{"error": 1}')):
        site.results = lambda query, raw=raw: raw
        with pytest.raises(InputError, match="no search results"):
            searcher(site)


@pytest.mark.parametrize("raw", [reply("{", "application/json"), reply("", status="429 X"), b""])
def test_a_query_that_the_api_fails_is_a_fault_and_what_the_others_found_is_kept(site, raw):
    site.pages, web = {"/a": text_page("a")}, searcher(site)
    site.results = lambda query: raw if query == "bad" else ["/a"]
    with pytest.raises(Fault):
        web.search(["good", "bad"], 1)
    site.queries.clear()
    site.results = lambda query: ["/a"]
    assert texts(web.search(["good", "bad"], 1)) == [["Text of a."]] * 2
    assert site.queries == [("bad", 3)]
    web.search(["good"], 2)
    assert len(site.queries) == 2  # another k wants other candidates


def test_the_key_of_the_environment_goes_to_the_api_and_to_no_page(site, monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "abc")
    one(site, text_page("a"))
    api, page = site.heads
    assert "Authorization: Bearer abc" in api.split("\r\n") and "abc" not in page


def test_requests_to_the_api_keep_their_distance(site, monkeypatch):
    # one pause before each request, and none of them while another lasts
    web, pauses = searcher(site), []
    monkeypatch.setattr(module, "PAUSE", 0.05)

    def sleep(seconds):
        pauses.append((seconds, web.lock.locked()))

    monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    web.search([f"q{i}" for i in range(6)], 1)
    assert pauses == [(0.05, True)] * 6 and len(site.queries) == 6


@pytest.mark.fault(200)
@pytest.mark.parametrize(
    "page",
    [
        reply("gone", status="404 Not Found"),
        onward("/page"),
        reply("%PDF", "application/pdf"),
        reply("text", None),
        reply("text", Content_Encoding="gzip"),
        reply(""),
        reply("<script>var a = 1;</script><!-- nothing -->"),
        b"",
        b"SSH-2.0-nothing of ours\r\n",
        drip,
        drip_head,
        onward("ftp://127.0.0.1/x"),
    ],
)
def test_a_page_that_fails_is_left_out(site, page, monkeypatch):
    if page in (drip, drip_head):
        monkeypatch.setattr(module, "PAGE_SECONDS", 0.6)
    assert one(site, page) == [] and site.visits["/page"] in (1, 5)


def test_a_refused_connection_an_unknown_name_and_no_certificate_are_left_out(site, closed_port):
    closed, tls = f"http://127.0.0.1:{closed_port}/", f"https://127.0.0.1:{site.port}/page"
    urls = [closed, "http://no-such-host.invalid/", tls]
    site.results = lambda query: [{"url": url} for url in urls]
    assert searcher(site).search(["q"], 3) == [[]]


def test_redirects_are_followed_up_to_their_limit_and_the_document_keeps_its_address(site):
    site.pages = {"/1": onward("/2"), "/2": onward("3"), "/3": onward("/4"), "/4": text_page("a")}
    assert one(site, onward("/1"))[0].id == site.base + "/page"
    site.pages |= {"/4": onward("/5"), "/5": text_page("a")}
    assert one(site, onward("/1")) == []


@pytest.mark.fault(200)
def test_a_page_without_end_is_cut_and_what_came_is_used(site):
    sent = []

    def endless(sock, head):
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"
        sock.sendall(head + b"Ana Bell. ")
        while True:
            sent.append(sock.send(b"on and on " * 1000))

    assert one(site, endless)[0].text.startswith("Ana Bell. on and on")
    assert sum(sent) < 20_000_000


def test_a_query_ends_when_every_page_hangs(site, monkeypatch):
    monkeypatch.setattr(module, "PAGE_SECONDS", 0.6)
    monkeypatch.setattr(module, "QUERY_SECONDS", 1.1)  # the second page begins within it
    site.results = lambda query: [f"/{query}{i}" for i in range(6)]
    hang = threading.Event()
    site.pages = {f"/{q}{i}": lambda s, h: hang.wait(60) for q in "abc" for i in range(6)}
    assert searcher(site).search(list("abc"), 2) == [[]] * 3
    assert set(site.visits) == {f"/{q}{i}" for q in "abc" for i in range(2)}
    hang.set()


# ----------------------------------------------------------------------------- where a page may lie

PRIVATE = (
    "127.0.0.1 127.255.255.254 0.0.0.0 10.1.2.3 172.16.0.1 192.168.0.1 169.254.169.254 100.64.0.1"
    " 192.0.0.1 192.0.0.8 192.0.0.170 198.18.0.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255"
    " 192.0.2.1 ::1 :: fe80::1 fe80::1%eth0 fc00::1 fd12::1 fec0::1 ff02::1 ff0e::1"
    " ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:a9fe:a9fe ::127.0.0.1 64:ff9b::7f00:1 2002:7f00:1::"
    " 2001::1 2001:db8::1"
).split()


@pytest.mark.fault(197)
def test_no_page_lies_at_a_private_or_reserved_address():
    assert [ip for ip in PRIVATE if is_public(ip)] == []
    public = "8.8.8.8 93.184.216.34 172.32.0.1 2606:4700::1111 ::ffff:8.8.8.8".split()
    assert all(map(is_public, public))


@pytest.mark.fault(197)
@pytest.mark.parametrize(
    "host",
    "127.0.0.1 localhost 2130706433 0x7f000001 0177.0.0.1 127.1 [::1] [::ffff:127.0.0.1]"
    " user@127.0.0.1 127.0.0.1. 127.0.0.1。 localhost。 127。0。0。1 [fe80::1%25eth0] 127.0.0.1%2e"
    " h．i [::]".split(),
)
def test_this_machine_is_refused_however_it_is_written_and_gets_no_connection(site, host):
    site.results = lambda query: [{"url": f"http://{host}/page"}]
    web = searcher(site, allow_private=False)
    assert web.search(["q"], 1) == [[]] and site.connections == 1  # the API's own


class Names:
    """The world's names and addresses for a test: every connection ends at the site."""

    def __init__(self, site, monkeypatch, **names):
        self.answers = {name.replace("_", "."): list(ips) for name, ips in names.items()}
        self.looked_up, self.dialled, self.site = [], [], site
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)
        monkeypatch.setattr(socket, "create_connection", self.dial)

    def look_up(self, host, port, **_):
        self.looked_up.append(host)
        ips = self.answers.get(host, [host])
        answer = ips.pop(0) if len(ips) > 1 else ips[0]  # the next look-up may be another
        return [(0, 0, 0, "", (ip, port)) for ip in answer.split()]

    def dial(self, where, timeout):
        self.dialled.append(where)
        connection = socket.socket()
        connection.connect(("127.0.0.1", self.site.port))
        return connection


def test_a_public_page_is_read_with_its_own_name_as_the_host(site, monkeypatch):
    names = Names(site, monkeypatch, example_test=["93.184.216.34"])
    site.pages["/page"] = text_page("a")
    assert fetch_page("http://example.test/page", False) == "Text of a."
    assert names.dialled == [("93.184.216.34", 80)]
    assert "\r\nHost: example.test\r\n" in site.heads[-1]


@pytest.mark.fault(199)
@pytest.mark.parametrize("answer", ["127.0.0.1", "10.0.0.7", "93.184.216.34 127.0.0.1"])
def test_a_name_with_any_private_address_is_refused(site, monkeypatch, answer):
    names = Names(site, monkeypatch, example_test=[answer])
    with pytest.raises(ValueError, match="refused"):
        fetch_page("http://example.test/page", False)
    assert names.dialled == []


@pytest.mark.fault(199)
def test_a_name_that_turns_private_after_the_check_is_looked_up_once(site, monkeypatch):
    names = Names(site, monkeypatch, rebind_test=["93.184.216.34", "127.0.0.1"])
    site.pages["/page"] = text_page("a")
    assert fetch_page("http://rebind.test/page", False) == "Text of a."
    assert names.looked_up == ["rebind.test"] and names.dialled == [("93.184.216.34", 80)]


@pytest.mark.fault(198)
@pytest.mark.parametrize("target", ["/there", "http://local.test/x", "//10.0.0.1/x", "//[::1]/x"])
def test_a_redirect_is_looked_up_and_checked_anew(site, monkeypatch, target):
    public = ["93.184.216.34", "127.0.0.1"]  # and private when it is asked again
    names = Names(site, monkeypatch, example_test=public, local_test=["127.0.0.1"])
    site.pages["/page"] = onward(target)
    with pytest.raises(ValueError, match="refused"):
        fetch_page("http://example.test/page", False)
    assert names.dialled == [("93.184.216.34", 80)]


@pytest.mark.fault(197)
def test_only_the_usual_ports_and_schemes_are_visited(site, monkeypatch):
    Names(site, monkeypatch, h=["93.184.216.34"])
    usual = ("http://h/", "https://h/", "https://h:80/x")
    assert [check_address(url, False)[1] for url in usual] == [80, 443, 80]
    bad = "http://h:22/ http://h:8080/ ftp://h/ h/x javascript:x http:///x http://h:x/".split()
    for url in [*bad, ""]:
        with pytest.raises(ValueError, match=r"refused|Port could not be cast"):
            check_address(url, False)
    assert check_address("http://h:8080/", True)[1] == 8080


def test_an_address_with_spaces_and_foreign_letters_is_quoted_and_cannot_break_the_line(site):
    site.pages = {"/a%20b/%C3%BC": text_page("a")}
    site.results = lambda query: ["/a b/ü?x=1 2&y=%20", "/x\r\nX-Evil: 1"]
    assert len(searcher(site).search(["q"], 2)[0]) == 1
    assert any(head.startswith("GET /a%20b/%C3%BC?x=1%202&y=%20 HTTP") for head in site.heads)
    assert not any("\r\nX-Evil" in head for head in site.heads)


def test_the_charset_of_the_header_counts_and_a_broken_one_never_raises(site):
    for body, charset, text in (
        ("Kelmöuth".encode("latin-1"), "ISO-8859-1", "Kelmöuth"),
        ("Kelmöuth".encode(), "utf-8", "Kelmöuth"),
        (b"a\xff", "nonsense", "a\ufffd"),
        (b"a-", "punycode", "a-"),  # a codec, and one that takes quadratic time
    ):
        assert one(site, reply(body, f"text/plain; charset={charset}"))[0].text == text


HEAD, MENU = "<head><title>A</title><style>p {}</style></head>", "<header>top<nav>x</nav></header>"


@pytest.mark.parametrize(
    "page, text",
    [
        (HEAD + "<h1>Ana</h1><p>was <b>born", "Ana was born"),
        (MENU + "in&nbsp;Kelmouth&#33;<br>Norland", "in Kelmouth! Norland"),
        ('<script>if (a < b) "</p>"</script><li>one<li>two</ul><svg>icon</svg>', "one two"),
        ("</nav></p>a</div>", "a"),
        ("a<!-- <p>b -->c<!doctype x>d", "acd"),
        ("a < b & c &nosuch; &#0; d", "a < b & c &nosuch; \ufffd d"),
        ("", ""),
        ("<a href='x>y'>z", "z"),
    ],
)
def test_html_becomes_a_line_without_menus_and_scripts_and_never_raises(page, text):
    assert html_to_text(page) == text


@pytest.mark.parametrize("piece", ["<!--", "<a ", "</", "<?", "<a b='c", "<![", "<p><form>", "&#x"])
def test_hostile_html_ends(piece, monkeypatch):
    # "<a " alone: 20 kB take 3.5 s without the limit, and 200 kB about 100 times that
    monkeypatch.setattr(module, "PARSE_SECONDS", 0.05)
    assert isinstance(html_to_text(piece * (200_000 // len(piece))), str)


def test_no_more_text_than_the_limit_is_kept():
    assert len(html_to_text("<p>" + "word " * MAX_TEXT)) <= MAX_TEXT


def test_trafilatura_reads_where_it_is_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "trafilatura")
    pytest.importorskip("trafilatura", reason="the extra web is not here", exc_type=ImportError)
    body = "<p>Ana Bell was born in Kelmouth, a harbour city in the north of Norland.</p>" * 9
    menu = "<div class=menu><a href=x>a</a></div>"
    text = html_to_text(f"<title>Ana</title>{menu}<article>{body}</article>")
    assert "Ana Bell was born in Kelmouth" in text


def test_the_window_is_that_with_most_words_of_the_query():
    text = "a b c d e Ana Bell was born here x y z"
    assert window(text, "where was Ana Bell born?", words=5) == "e Ana Bell was born"
    text = " ".join(map(str, range(1000)))
    assert window(text, "ana", words=10) == "0 1 2 3 4 5 6 7 8 9"
    assert "999" in window(text, "999", words=10).split()
    assert window("a b c", "c", words=10) == "a b c" and window("", "c") == ""
    assert len(window("海" * 50_000, "海", words=150)) == 1500  # no spaces: cut too
