"""web.py: over real sockets, with everything a search API, a page or a name can do to us."""

import contextlib
import doctest
import gzip
import json
import socket
import sys
import threading
import time
import tracemalloc
import urllib.parse
from collections import Counter

import pytest
from conftest import RawServer

from errors import InputError
from retrievers import web as module
from retrievers.net import LRU, Fault
from retrievers.web import (
    MAX_QUERY,
    Pace,
    Skip,
    WebRetriever,
    address,
    checked,
    hits_of,
    in_parallel,
    is_public,
    passage,
    resolve,
    selector,
)


def reply(
    body: bytes | str, kind: str | None = "text/html", status: str = "200 OK", **headers: str
) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    headers = {
        "Content-Length": str(len(body)),
        **({"Content-Type": kind} if kind else {}),
        **headers,
    }
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    return f"HTTP/1.1 {status}\r\n{''.join(lines)}\r\n".encode() + body


def onward(url: str) -> bytes:
    return reply("", status="302 Found", Location=url)


class Site(RawServer):
    """A search API at /search and whatever lies in `pages`: path -> bytes to send, or script(sock,
    head).

    `results(query)` is what the API replies: a list of paths or of whole results, anything else as
    it is (bytes: raw).
    """

    def __init__(self):
        self.pages, self.results = {}, lambda query: []
        self.queries, self.heads, self.visits, self.connections = [], [], Counter(), 0
        super().__init__(backlog=512)
        self.api = self.base + "/search?format=json&q={query}&n={count}"

    def answer(self, sock):
        self.connections += 1
        with (
            sock,
            contextlib.suppress(OSError, IndexError),
        ):  # a connection without a request, or one that begins with TLS
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
            found = {
                "results": [
                    {"url": self.base + item} if isinstance(item, str) else item for item in found
                ]
            }
        return reply(json.dumps(found), "application/json")


@pytest.fixture
def site():
    server = Site()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def no_key_and_no_extra(monkeypatch):
    monkeypatch.delenv("SEARCH_API_KEY", raising=False)
    monkeypatch.setitem(
        sys.modules, "trafilatura", None
    )  # an import of it fails: these tests are of our own reading


def searcher(site, **options) -> WebRetriever:
    options = {
        "allow_private": True,
        "ports": (),
        "rate": 0,
        "page_seconds": 0.4,
        "round_seconds": 0.6,
        "api_seconds": 1.0,
        **options,
    }
    web = WebRetriever(site.api, **options)
    site.queries.clear(), site.heads.clear()
    site.connections = 0
    return web


def one(site, page, **options):
    """(documents, counts) of a search whose only candidate is this page."""
    site.pages["/page"], site.results = page, lambda query: ["/page"]
    web = searcher(site, **options)
    return web.search(["ana"], 1)[0], {name: count for name, count in web.counts.items() if count}


def told(**counts):
    """The counts of `one` when the slot stays empty."""
    return {"queries": 1, "api_calls": 1, "empty_slots": 1, **counts}


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def text_page(name: str) -> bytes:
    return reply(f"<title>{name} Title</title><p>Text of {name}.")


def drip(sock, head, first=b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"):
    sock.sendall(first)
    for _ in range(100):
        sock.sendall(b"x")
        time.sleep(0.05)


# ------------------------------------------------------------------------------------- it goes well


def test_a_page_becomes_a_document_with_address_title_and_text(site):
    documents, counts = one(site, text_page("Ana"))
    assert [(d.id, d.title, d.text) for d in documents] == [
        (site.base + "/page", "Ana Title", "Text of Ana.")
    ]
    assert counts == {"queries": 1, "api_calls": 1, "fetched": 1, "documents": 1}


def test_queries_keep_their_order_and_pages_that_of_the_results(site):
    def slow(sock, head):
        time.sleep(0.15)
        sock.sendall(text_page("a1"))

    site.pages = {
        "/a1": slow,
        "/a2": text_page("a2"),
        "/b1": text_page("b1"),
        "/b2": text_page("b2"),
    }
    site.results = lambda query: [f"/{query}1", f"/{query}2"]
    found = searcher(site).search(["a", "b", "a"], 2)
    assert [[d.title for d in documents] for documents in found] == [
        ["a1 Title", "a2 Title"],
        ["b1 Title", "b2 Title"],
        ["a1 Title", "a2 Title"],
    ]
    assert sorted(site.queries) == [
        ("a", 6),
        ("b", 6),
    ]  # the query that comes twice is asked once; 3k = 6 results wanted


def test_k_of_zero_no_query_and_a_blank_query_ask_nobody(site):
    web = searcher(site)
    assert (
        web.search(["a", "b"], 0) == [[], []]
        and web.search([], 5) == []
        and web.search([" \n"], 5) == [[]]
    )
    assert site.connections == 0


def test_a_round_takes_the_next_k_candidates_and_none_is_visited_in_vain(site):
    # k = 2. Round 1: /0 is read, /1 is missing. Round 2: /2 and /3 are read. That is enough: /4 and
    # /5 are left alone.
    site.pages = {path: text_page(path[1:]) for path in ("/0", "/2", "/3", "/4", "/5")}
    site.results = lambda query: [f"/{i}" for i in range(6)]
    web = searcher(site)
    assert [d.title for d in web.search(["q"], 2)[0]] == ["0 Title", "2 Title"]
    assert set(site.visits) == {"/0", "/1", "/2", "/3"} and web.counts["fetched"] == 3


def test_the_third_round_is_the_last_and_candidates_beyond_3k_are_not_visited(site):
    site.results = lambda query: [f"/{i}" for i in range(9)]
    web = searcher(site)
    assert web.search(["q"], 2) == [[]]
    assert (
        set(site.visits) == {f"/{i}" for i in range(6)}
        and web.counts["http_errors"] == 6
        and web.counts["empty_slots"] == 2
    )


def test_a_snippet_of_a_result_beyond_3k_is_not_used(site):
    site.results = lambda query: [
        {"url": f"{site.base}/{i}", "content": "s" * (i > 2)} for i in range(9)
    ]
    assert searcher(site).search(["q"], 1) == [[]]


def test_fewer_results_than_wanted_are_no_fault(site):
    site.pages = {"/a": text_page("a")}
    site.results = lambda query: ["/a"]
    web = searcher(site)
    assert len(web.search(["q"], 5)[0]) == 1 and web.counts["empty_slots"] == 4


def test_an_address_that_comes_twice_is_one_candidate_and_the_part_behind_the_hash_makes_no_other(
    site,
):
    site.pages = {"/a": text_page("a"), "/b": text_page("b")}
    site.results = lambda query: ["/a", "/a#part", "/b", "/a"]
    assert [d.title for d in searcher(site).search(["q"], 2)[0]] == ["a Title", "b Title"]
    assert site.visits == {"/a": 1, "/b": 1}


def test_two_queries_with_the_same_page_fetch_it_once(site):
    site.pages, site.results = {"/a": text_page("a")}, lambda query: ["/a"]
    assert [len(found) for found in searcher(site).search(["q", "r"], 1)] == [
        1,
        1,
    ] and site.visits == {"/a": 1}


def test_a_page_that_cannot_be_read_is_replaced_by_the_snippet_at_its_own_place(site):
    site.pages = {"/b": text_page("b")}
    site.results = lambda query: [
        {"url": site.base + "/a", "title": "A", "content": "what <strong>a</strong> says"},
        {"url": site.base + "/b"},
        {"url": site.base + "/c", "title": "C", "content": "not needed"},
    ]
    web = searcher(site)
    assert [(d.title, d.text) for d in web.search(["q"], 2)[0]] == [
        ("A", "what a says"),
        ("b Title", "Text of b."),
    ]
    assert (web.counts["snippets"], web.counts["fetched"], web.counts["empty_slots"]) == (1, 1, 0)


def test_a_page_without_a_title_takes_that_of_the_results(site):
    site.pages = {"/a": reply("just text", "text/plain")}
    site.results = lambda query: [{"url": site.base + "/a", "title": "From the results"}]
    assert searcher(site).search(["q"], 1)[0][0].title == "From the results"


# ----------------------------------------------------------------------------------- the search API


@pytest.mark.parametrize(
    "found",
    [
        {"results": [{"url": "u", "title": "t", "content": "s"}]},
        {
            "searchParameters": {},
            "organic": [{"link": "u", "title": "t", "snippet": "s"}],
            "peopleAlsoAsk": [{"link": "no"}],
        },
        {
            "images": {"value": [{"url": "no"}]},
            "webPages": {"value": [{"url": "u", "name": "t", "snippet": "s"}]},
        },
        {
            "news": {"results": [{"url": "no"}]},
            "web": {"results": [{"url": "u", "title": "t", "description": "s"}]},
        },
        {
            "kind": "x",
            "tags": ["a"],
            "items": [{"link": "u", "title": "t", "snippet": "s", "more": [{"url": "no"}]}],
        },
        [{"url": "u", "title": "t", "content": "s"}],
        {
            "results": [
                {"url": 5},
                {"url": ""},
                "x",
                None,
                {"url": "u", "title": " t\n", "content": None, "snippet": "s"},
            ]
        },
    ],
)
def test_every_common_layout_of_results_is_understood(found):
    assert hits_of(found) == [("u", "t", "s")]


def test_an_empty_list_of_results_is_no_fault_and_pictures_are_not_taken_instead():
    assert hits_of({"results": [], "images": [{"url": "no"}]}) == hits_of({}) == hits_of([]) == []


@pytest.mark.parametrize(
    "found", [None, 3, "x", {"error": "quota"}, {"errors": [{"message": "quota"}], "results": []}]
)
def test_a_reply_that_is_an_error_or_nothing_is_a_fault(found):
    with pytest.raises(Fault, match="a reply without results"):
        hits_of(found)


def test_half_a_character_in_a_result_does_no_harm_later():
    hit = hits_of(
        {"results": [{"url": "http://h/\ud800", "title": "\ud83d", "content": "a\udc00b"}]}
    )[0]
    assert json.dumps(hit, ensure_ascii=False).encode()


def test_a_reply_nested_without_end_is_read():
    deep = [{"url": "u"}]
    for _ in range(5000):
        deep = {"a": deep}
    assert hits_of(deep)[0].url == "u"


def test_the_query_is_quoted_and_cannot_reach_another_field(site):
    site.pages, site.results = {"/a": text_page("a")}, lambda query: ["/a"]
    web = searcher(site)
    web.search(["where & who?=ü#x {count}", "w" * 5000], 1)
    assert {query for query, _ in site.queries} == {"where & who?=ü#x {count}", "w" * MAX_QUERY}
    assert address("http://h/{query}?n={count}", "\ud800/..", 3) == "http://h/%3F%2F..?n=3"


@pytest.mark.parametrize(
    "template",
    ["http://h/search", "http://h/{Query}", "http://{query}/", "http://h.{query}.test/", ""],
)
def test_a_template_without_a_place_for_the_query_or_with_one_in_the_host_is_one_line(template):
    with pytest.raises(
        InputError, match=r"give http://host/search\?format=json&q={query}"
    ) as caught:
        WebRetriever(template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ["ftp://h/{query}", "h/{query}", "http://h:x/{query}"])
def test_a_template_that_is_no_address_is_one_line(template):
    with pytest.raises(InputError, match="not an address"):
        WebRetriever(template)


def test_an_api_that_is_not_there_is_one_line_at_construction_that_shows_no_key():
    with pytest.raises(
        InputError, match=r"/find: no search results .Connection refused.: start the search API"
    ) as caught:
        WebRetriever(f"http://127.0.0.1:{closed_port()}/find?key=secret&q={{query}}")
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [
        reply("<html>"),
        reply("", status="500 X"),
        reply("", status="401 X"),
        reply('{"error": "q"}'),
    ],
)
def test_an_api_that_does_not_answer_with_results_is_one_line_at_construction(site, raw):
    site.results = lambda query: raw
    with pytest.raises(InputError, match="no search results"):
        searcher(site)


@pytest.mark.parametrize(
    "raw",
    [
        reply("<html>", "application/json"),
        reply("{", "application/json"),
        reply("", status="500 X"),
        reply("", status="429 X"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        b"",
    ],
)
def test_a_query_that_the_api_failed_has_no_list_and_the_others_have_theirs(site, raw):
    site.pages = {"/a": text_page("a")}
    web = searcher(site)
    site.results = lambda query: raw if query == "bad" else ["/a"]
    for queries in (["bad"], ["bad", " "]):  # nobody was answered
        with pytest.raises(Fault):
            web.search(queries, 1)
    good, bad = web.search(["good", "bad"], 1)
    assert len(good) == 1 and bad is None and web.counts["documents"] == 1
    assert web.search(["good", "bad"], 1) == [
        good,
        None,
    ]  # "good" is kept, and that is an answer too
    assert web.search(["", "good", "bad"], 1) == [[], good, None]
    site.queries.clear()
    site.results = lambda query: ["/a"]
    assert [len(found) for found in web.search(["good", "bad"], 1)] == [1, 1]
    assert site.queries == [("bad", 3)]


def test_a_query_that_the_api_refuses_finds_nothing_and_stops_no_other(site):
    site.pages = {"/a": text_page("a")}
    web = searcher(site)
    site.results = lambda query: (
        reply("too odd", status="400 Bad Request") if query == "bad" else ["/a"]
    )
    assert [len(found) for found in web.search(["bad", "good"], 1)] == [0, 1] and web.counts[
        "api_faults"
    ] == 1


def test_an_api_that_went_away_is_a_fault(site):
    web = searcher(site)
    site.stop()
    with pytest.raises(Fault, match="refused"):
        web.search(["a", "b"], 1)
    assert web.counts["api_faults"] == 2


def test_a_fault_of_our_own_in_a_thread_is_a_fault_and_not_an_endless_wait(site, monkeypatch):
    web = searcher(site)
    monkeypatch.setattr(web, "ask", lambda query, k, deadline: 1 / 0)
    with pytest.raises(Fault, match="ZeroDivisionError"):
        web.search(["a"], 1)


def test_the_key_of_the_environment_goes_to_the_api_and_to_no_page(site, monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "abc")
    one(site, text_page("a"))
    api, page = site.heads
    for line in ("authorization: bearer abc", "x-api-key: abc", "x-subscription-token: abc"):
        assert line in api.lower().split("\r\n")
    assert "abc" not in page


def test_an_api_that_sends_us_to_another_host_does_not_get_the_key_there(site, monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "abc")
    site.results = lambda query: onward(f"http://localhost:{site.port}/stolen")
    with pytest.raises(InputError, match="HTTP 302, on to"):
        searcher(site)
    assert site.visits == {}


# ---------------------------------------------------------------------------------- pages that fail


def test_a_refused_connection_is_an_empty_slot(site):
    site.results = lambda query: [{"url": f"http://127.0.0.1:{closed_port()}/"}]
    web = searcher(site)
    assert web.search(["q"], 1) == [[]] and web.counts["connection_errors"] == 1


def test_a_name_that_does_not_exist_is_an_empty_slot(site):
    site.results = lambda query: [{"url": "http://no-such-host.invalid/"}]
    web = searcher(site, round_seconds=5.0)
    assert (
        web.search(["q"], 1) == [[]]
        and web.counts["connection_errors"] + web.counts["timeouts"] == 1
    )


@pytest.mark.parametrize(
    "page, reason",
    [
        (reply("gone", status="404 Not Found"), "http_errors"),
        (reply("broken", status="500 Oh"), "http_errors"),
        (reply("", status="302 Found"), "http_errors"),  # a redirect to nowhere
        (reply("", status="204 Nothing"), "http_errors"),
        (onward("/page"), "redirects"),
        (reply("%PDF", "application/pdf"), "wrong_type"),
        (reply("{}", "application/json"), "wrong_type"),
        (reply("text", None), "wrong_type"),
        (reply("text", Content_Encoding="br"), "wrong_type"),
        (reply("no gzip", Content_Encoding="gzip"), "wrong_type"),
        (reply(""), "empty"),
        (reply("<script>var a = 1;</script><!-- nothing -->"), "empty"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 100\r\n\r\nhalf",
            "connection_errors",
        ),
        (
            (
                b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding:"
                b" chunked\r\n\r\n10\r\nhalf"
            ),
            "connection_errors",
        ),
        (b"", "connection_errors"),
        (b"SSH-2.0-nothing of ours\r\n", "connection_errors"),
        (lambda sock, head: time.sleep(0.8), "timeouts"),
        (drip, "timeouts"),
        (lambda sock, head: drip(sock, head, b"HTTP/1.1 200 OK\r\nX-Long: "), "timeouts"),
        (onward("ftp://127.0.0.1/x"), "refused_hosts"),
        (onward("file:///etc/hosts"), "refused_hosts"),
        (onward("http://[::1/"), "refused_hosts"),
        (onward("http://h:99999/"), "refused_hosts"),
    ],
)
def test_a_page_that_fails_is_an_empty_slot_with_its_reason(site, page, reason):
    assert one(site, page) == ([], told(**{reason: 1}))


def test_a_fault_of_our_own_at_a_page_is_an_empty_slot_too(site, monkeypatch):
    monkeypatch.setattr(module, "html_to_text", lambda html: 1 / 0)
    assert one(site, text_page("a")) == ([], told(unexpected=1))


def test_redirects_are_followed_up_to_their_limit(site):
    site.pages = {"/1": onward("/2"), "/2": onward("3"), "/3": text_page("a")}
    assert one(site, onward("/1"), redirects=3)[1]["fetched"] == 1
    assert one(site, onward("/1"), redirects=2)[1]["redirects"] == 1


def test_a_document_keeps_the_address_of_the_results_when_it_was_redirected(site):
    site.pages["/there"] = text_page("a")
    assert one(site, onward("/there"))[0][0].id == site.base + "/page"


def test_a_page_without_end_is_cut_and_what_came_is_used(site):
    sent = []

    def endless(sock, head):
        sock.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<title>Long</title>Ana Bell. "
        )
        while True:
            sent.append(sock.send(b"on and on " * 1000))

    documents, counts = one(site, endless, max_bytes=100_000, page_seconds=2.0, round_seconds=2.0)
    assert documents[0].title == "Long" and documents[0].text.startswith("Ana Bell. on and on")
    assert counts["too_large"] == counts["fetched"] == 1 and sum(sent) < 20_000_000


def test_a_page_of_just_max_bytes_is_whole(site):
    assert "too_large" not in one(site, reply("a" * 1000, "text/plain"), max_bytes=1000)[1]
    assert one(site, reply("a" * 1001, "text/plain"), max_bytes=1000)[1]["too_large"] == 1


def test_gzip_is_unpacked_and_a_gzip_bomb_only_up_to_the_limit(site):
    assert (
        one(site, reply(gzip.compress(b"<p>Ana Bell"), Content_Encoding="gzip"))[0][0].text
        == "Ana Bell"
    )
    bomb = gzip.compress(b"a b " * 2_500_000)  # 10 MB in about 10 kB
    assert len(bomb) < 20_000
    web_page, limit = reply(bomb, "text/plain", Content_Encoding="gzip"), 50_000
    documents, counts = one(site, web_page, max_bytes=limit)
    assert counts["too_large"] == 1 and documents[0].text == " ".join(
        "ab" * 75
    )  # a passage of 150 words
    assert one(site, reply(gzip.compress(b"cut" * 99)[:-9], Content_Encoding="gzip"))[0][
        0
    ].text.startswith("cut")


def test_the_unpacked_bytes_never_exceed_the_limit_not_even_in_passing(site):
    bomb = reply(gzip.compress(b"x" * 20_000_000), "text/plain", Content_Encoding="gzip")
    tracemalloc.start()
    one(site, bomb, max_bytes=5000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


# ----------------------------------------------------------------------------- where a page may lie

PRIVATE = (
    "127.0.0.1 127.255.255.254 0.0.0.0 10.1.2.3 172.16.0.1 192.168.0.1 169.254.169.254 100.64.0.1"
    " 192.0.0.1 198.18.0.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 192.0.2.1 ::1 :: fe80::1"
    " fe80::1%eth0 fc00::1 fd12::1 fec0::1 ff02::1 ff0e::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1"
    " ::ffff:a9fe:a9fe ::127.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: 2001::1 2001:db8::1"
).split()


@pytest.mark.parametrize("ip", PRIVATE)
def test_no_page_lies_at_a_private_or_reserved_address(ip):
    assert not is_public(ip)


@pytest.mark.parametrize(
    "ip", ["8.8.8.8", "93.184.216.34", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8"]
)
def test_a_page_may_lie_at_a_public_address(ip):
    assert is_public(ip)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "user@127.0.0.1",
        "127.0.0.1.",
    ],
)
def test_this_machine_is_refused_however_it_is_written_and_gets_no_connection(site, host):
    site.results = lambda query: [{"url": f"http://{host}:{site.port}/page"}]
    web = searcher(site, allow_private=False)
    assert web.search(["q"], 1) == [[]]
    assert (
        web.counts["refused_hosts"] + web.counts["connection_errors"] == 1 and site.connections == 1
    )  # the API's own


class Names:
    """The world's names and addresses for a test: every dial to a public address ends at the
    site.
    """

    def __init__(self, site, monkeypatch, **names):
        self.answers, self.looked_up, self.dialled = (
            {name.replace("_", "."): list(ips) for name, ips in names.items()},
            [],
            [],
        )
        self.site = site
        monkeypatch.setattr(module, "resolve", self.resolve)
        monkeypatch.setattr(module, "dial", self.dial)

    def resolve(self, host, port):
        self.looked_up.append(host)
        ips = self.answers.get(host, [host])
        answer = (
            ips.pop(0) if len(ips) > 1 else ips[0]
        )  # the next look-up may be answered otherwise
        return [(socket.AF_INET, (ip, port)) for ip in answer.split()]

    def dial(self, addresses, deadline):
        self.dialled.append(addresses[0][1])
        return socket.create_connection(("127.0.0.1", self.site.port), timeout=1)


def test_a_public_page_is_read_with_its_own_name_as_the_host(site, monkeypatch):
    names = Names(site, monkeypatch, example_test=["93.184.216.34"])
    site.pages["/page"], site.results = (
        text_page("a"),
        lambda query: [{"url": "http://example.test/page"}],
    )
    web = searcher(site, allow_private=False, ports=(80, 443))
    assert len(web.search(["q"], 1)[0]) == 1
    assert (
        names.dialled == [("93.184.216.34", 80)] and "\r\nHost: example.test\r\n" in site.heads[-1]
    )


@pytest.mark.parametrize(
    "answer", ["127.0.0.1", "10.0.0.7", "93.184.216.34 127.0.0.1", "169.254.169.254"]
)
def test_a_name_with_any_private_address_is_refused(site, monkeypatch, answer):
    names = Names(site, monkeypatch, example_test=[answer])
    site.results = lambda query: [{"url": "http://example.test/page"}]
    web = searcher(site, allow_private=False)
    assert web.search(["q"], 1) == [[]] and web.counts["refused_hosts"] == 1 and names.dialled == []


def test_a_name_that_is_public_when_checked_and_private_afterwards_is_looked_up_once(
    site, monkeypatch
):
    names = Names(site, monkeypatch, rebind_test=["93.184.216.34", "127.0.0.1"])
    site.pages["/page"], site.results = (
        text_page("a"),
        lambda query: [{"url": "http://rebind.test/page"}],
    )
    assert len(searcher(site, allow_private=False).search(["q"], 1)[0]) == 1
    assert names.looked_up == ["rebind.test"] and names.dialled == [("93.184.216.34", 80)]


def test_a_redirect_to_the_same_name_is_looked_up_and_checked_anew(site, monkeypatch):
    names = Names(site, monkeypatch, rebind_test=["93.184.216.34", "127.0.0.1"])
    site.pages["/page"], site.results = (
        onward("/there"),
        lambda query: [{"url": "http://rebind.test/page"}],
    )
    web = searcher(site, allow_private=False)
    assert web.search(["q"], 1) == [[]] and web.counts["refused_hosts"] == 1
    assert names.dialled == [("93.184.216.34", 80)] and site.visits == {"/page": 1}


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1/x", "http://local.test/x", "//10.0.0.1/x", "http://[::1]/x"]
)
def test_a_redirect_to_a_private_address_is_refused(site, monkeypatch, target):
    names = Names(site, monkeypatch, example_test=["93.184.216.34"], local_test=["127.0.0.1"])
    site.pages["/page"], site.results = (
        onward(target),
        lambda query: [{"url": "http://example.test/page"}],
    )
    web = searcher(site, allow_private=False)
    assert (
        web.search(["q"], 1) == [[]]
        and web.counts["refused_hosts"] == 1
        and len(names.dialled) == 1
    )


def test_only_the_given_ports_and_schemes_are_visited(monkeypatch):
    monkeypatch.setattr(
        module, "resolve", lambda host, port: [(socket.AF_INET, ("93.184.216.34", port))]
    )
    assert [
        checked(url, False, (80, 443))[1] for url in ("http://h/", "https://h/", "https://h:80/x")
    ] == [80, 443, 80]
    for url in (
        "http://h:22/",
        "http://h:8080/",
        "ftp://h/",
        "h/x",
        "javascript:x",
        "http:///x",
        "http://h:x/",
        "",
    ):
        with pytest.raises(Skip, match="refused_hosts"):
            checked(url, True, (80, 443))
    assert checked("http://h:8080/", False, ())[1] == 8080


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1。", "localhost。", "127。0。0。1", "[fe80::1%25eth0]", "127.0.0.1%2e", "h．i"],
)
def test_a_host_that_look_ups_read_in_different_ways_is_refused_unasked(monkeypatch, host):
    monkeypatch.setattr(module, "resolve", lambda host, port: pytest.fail(f"looked up {host}"))
    with pytest.raises(Skip, match="refused_hosts"):
        checked(f"http://{host}/x", True, ())


@pytest.mark.parametrize("ip", ["192.0.0.8", "192.0.0.9", "192.0.0.170", "3fff::1", "3fff:fff::1"])
def test_assignments_and_documentation_are_not_public_whatever_this_python_says(ip):
    assert not is_public(ip)


def test_resolve_gives_every_address_of_a_host_once():
    assert resolve("127.0.0.1", 80) == [(socket.AF_INET, ("127.0.0.1", 80))]


def test_the_second_address_of_a_host_is_tried_when_the_first_refuses(site):
    dead, alive = (
        (socket.AF_INET, ("127.0.0.1", closed_port())),
        (socket.AF_INET, ("127.0.0.1", site.port)),
    )
    with module.dial([dead, alive], time.monotonic() + 1) as sock:
        assert sock.getpeername()[1] == site.port
    with pytest.raises(ConnectionRefusedError):
        module.dial([dead, dead], time.monotonic() + 1)


def test_a_proxy_of_the_environment_is_not_used_for_pages(site, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert one(site, text_page("a"))[1]["fetched"] == 1


def test_a_server_without_a_certificate_is_no_page(site):
    site.results = lambda query: [{"url": f"https://127.0.0.1:{site.port}/page"}]
    web = searcher(site)
    assert web.search(["q"], 1) == [[]] and web.counts["connection_errors"] == 1


def test_an_address_with_spaces_and_foreign_letters_is_quoted_and_cannot_break_the_line(site):
    site.pages = {"/a%20b/%C3%BC": text_page("a")}
    site.results = lambda query: ["/a b/ü?x=1 2&y=%20", "/x\r\nX-Evil: 1"]
    assert len(searcher(site).search(["q"], 2)[0]) == 1
    assert any(head.startswith("GET /a%20b/%C3%BC?x=1%202&y=%20 HTTP") for head in site.heads)
    assert not any("\r\nX-Evil" in head for head in site.heads)
    assert selector(urllib.parse.urlsplit("http://h")) == "/"


# ------------------------------------------------------------------------------- bytes -> a passage


def test_the_charset_of_the_header_counts_over_the_network(site):
    assert (
        one(site, reply("Kelmöuth".encode("latin-1"), "text/plain; charset=ISO-8859-1"))[0][0].text
        == "Kelmöuth"
    )
    assert one(site, reply(b"a\xff", "text/html; charset=nonsense"))[0][0].text == "a\ufffd"


def test_the_passage_is_the_window_with_most_words_of_the_query():
    text = " ".join(["filler"] * 400 + "Ana Bell was born in Kelmouth".split() + ["filler"] * 400)
    found = passage(text, "born Kelmouth Ana?", words=100)
    assert len(found.split()) == 100 and "filler Ana Bell was born in Kelmouth filler" in found


def test_what_was_found_stands_in_the_middle_of_the_passage():
    # 20 words a window, blocks of 4: word 100 is in block 25, hence in the windows that begin at
    # blocks 21 to 25. The middle one is block 23: words 92 to 111.
    text = " ".join("ana" if i == 100 else str(i) for i in range(300))
    assert (
        passage(text, "Ana", words=20).split()[0] == "92"
        and passage(text, "Ana", words=20).split()[-1] == "111"
    )


def test_a_passage_without_a_word_of_the_query_is_the_beginning_and_a_short_text_is_whole():
    text = " ".join(map(str, range(1000)))
    assert passage(text, "ana", words=10) == "0 1 2 3 4 5 6 7 8 9"
    assert passage("a b c", "c", words=10) == "a b c" and passage("", "c") == ""
    assert passage(text, "999", words=10).endswith("999")  # the last window ends with the text


def test_a_text_without_spaces_is_cut_too():
    assert len(passage("海" * 50_000, "海", words=150)) == 1500


def test_without_it_the_report_says_who_read(site):
    web = searcher(site)
    assert web.report().startswith("web (text by ") and web.report().endswith("nothing asked")
    site.results = lambda query: ["/a"]
    web.search(["q"], 1)
    assert "http_errors 1" in web.report() and "\n" not in web.report()


# ------------------------------------------------------------------------- kept, paced, in parallel


def test_a_query_that_was_finished_is_not_asked_again_and_its_list_is_the_caller_s_own(site):
    site.pages, site.results = {"/a": text_page("a")}, lambda query: ["/a"]
    web = searcher(site)
    first = web.search(["q"], 1)
    first[0].clear()
    assert (
        len(web.search(["q"], 1)[0]) == 1
        and len(site.queries) == 1
        and web.counts["cached_queries"] == 1
    )
    web.search(["q"], 2)
    assert len(site.queries) == 2  # another k wants other candidates
    assert site.visits == {"/a": 1} and web.counts["cached"] == 1  # but the page is still there


def test_a_query_that_found_nothing_is_asked_again(site):
    web = searcher(site)
    assert web.search(["q"], 1) == web.search(["q"], 1) == [[]]
    assert len(site.queries) == 2 and web.counts["no_results"] == 2


def test_a_call_that_was_given_up_and_its_next_try_pay_once(site):
    site.pages = {"/a": text_page("a")}
    site.results = lambda query: time.sleep(0.2) or ["/a"]
    web, late = searcher(site, page_seconds=4.0, round_seconds=5.0, api_seconds=5.0), []
    first = threading.Thread(target=lambda: late.append(web.search(["q", "r"], 1)), daemon=True)
    first.start()
    time.sleep(0.05)  # whoever began it does not wait for it any more
    again = web.search(["q", "r"], 1)
    first.join(9)
    assert late == [again] and [len(found) for found in again] == [1, 1]
    assert sorted(query for query, _ in site.queries) == ["q", "r"]


def test_hits_are_kept_as_they_come_even_those_that_come_too_late(site):
    site.pages = {"/a": text_page("a")}
    site.results = lambda query: time.sleep(0.3 * (query == "slow")) or ["/a"]
    web = searcher(site)
    web.api_bound = lambda queries: 0.15  # the call ends before the reply; the request does not
    web.ask_now, web.ask = web.ask, lambda query, k, deadline: web.ask_now(query, k, deadline + 1)
    assert [found and len(found) for found in web.search(["slow", "fast"], 1)] == [None, 1]
    time.sleep(0.4)
    assert len(web.search(["slow"], 1)[0]) == 1
    assert sorted(query for query, _ in site.queries) == ["fast", "slow"]


def test_the_bound_is_what_the_file_says(site):
    web = searcher(site, rate=5, api_seconds=8, round_seconds=8)
    # 64 / 5 + ⌈64 / 32⌉ · 8 + 3 · 8 + 0.005 · 64 · 5 = 12.8 + 16 + 24 + 1.6
    assert web.seconds(64, 5) == pytest.approx(54.4) and web.seconds(0, 5) == 24
    with pytest.raises(InputError, match="--web_rate -1: "):
        searcher(site, rate=-1)


def test_a_page_that_failed_is_fetched_again_by_another_search(site):
    site.results = lambda query: ["/a"]
    web = searcher(site)
    assert web.search(["q"], 1) == [[]]
    site.pages = {"/a": text_page("a")}
    assert len(web.search(["q"], 1)[0]) == 1


def test_the_least_recently_used_entry_is_forgotten():
    kept = LRU(2)
    kept.put("a", 1), kept.put("b", 2), kept.get("a"), kept.put("c", 3)
    assert [kept.get(key) for key in "abc"] == [1, None, 3]
    nothing = LRU(0)
    nothing.put("a", 1)
    assert nothing.get("a") is None


def test_an_lru_survives_many_threads():
    kept = LRU(5)

    def work(job, deadline):
        return [kept.put(i % 9, i) or kept.get(i % 9) for i in range(2000)]

    results = in_parallel(work, list(range(8)), 8, 9)
    assert all(isinstance(result, list) for result in results.values()) and len(kept.entries) == 5


def test_requests_to_the_api_keep_their_distance(site):
    # 6 requests at 20 per second: the first at once, the last after 5 · 0.05 s = 0.25 s
    web = searcher(site, rate=20)
    start = time.perf_counter()
    web.search([f"q{i}" for i in range(6)], 1)
    assert time.perf_counter() - start >= 0.25


def test_the_pace_holds_over_threads_and_zero_is_no_limit():
    times, pace = [], Pace(50)
    in_parallel(
        lambda job, deadline: pace.wait() or times.append(time.monotonic()), list(range(6)), 6, 5
    )
    times.sort()
    assert len(times) == 6 and times[-1] - times[0] >= 5 * 0.02 - 0.005
    start = time.monotonic()
    for _ in range(1000):
        Pace(0).wait()
    assert time.monotonic() - start < 5  # at 50 per second it would be 20


def test_thirty_queries_at_once_all_get_their_own_pages(site):
    site.results = lambda query: [f"/{query}-{i}" for i in range(9)]
    for query in range(30):
        for i in (1, 4, 5, 8):  # the others are missing: every query needs two rounds for k = 3
            site.pages[f"/q{query}-{i}"] = text_page(f"q{query}-{i}")
    web = searcher(site, page_seconds=4.0, round_seconds=5.0, api_seconds=5.0)
    found = web.search([f"q{i}" for i in range(30)], 3)
    assert [[d.title for d in documents] for documents in found] == [
        [f"q{i}-1 Title", f"q{i}-4 Title", f"q{i}-5 Title"] for i in range(30)
    ]
    assert (
        web.counts["fetched"] == 90
        and web.counts["http_errors"] == 90
        and web.counts["documents"] == 90
    )


def test_several_searches_at_once_count_everything(site):
    site.pages, site.results = {"/a": text_page("a")}, lambda query: ["/a", "/b"]
    web = searcher(site, kept_pages=0, api_seconds=5.0, round_seconds=5.0, page_seconds=4.0)
    results = in_parallel(lambda job, deadline: web.search([f"{job}"], 1), list(range(8)), 8, 9)
    assert all(len(result[0]) == 1 for result in results.values())
    assert web.counts["fetched"] == web.counts["documents"] == web.counts["api_calls"] == 8


def test_the_best_result_of_every_query_is_fetched_before_the_second_best_of_any(site):
    order = []

    def page(sock, head):
        order.append(head.split()[1])
        sock.sendall(text_page("a"))

    site.pages = {f"/{q}{i}": page for q in "abc" for i in range(2)}
    site.results = lambda query: [f"/{query}0", f"/{query}1"]
    searcher(site, threads=1).search(["a", "b", "c"], 2)
    assert order == ["/a0", "/b0", "/c0", "/a1", "/b1", "/c1"]


# --------------------------------------------------------------------------- nothing waits for ever


def test_a_search_ends_within_its_bound_when_every_page_hangs(site):
    # Q/rate + ⌈Q/threads⌉ · api_seconds + 3 · round_seconds with an API that answers at once: 3 ·
    # 0.2 s
    site.results = lambda query: [f"/{query}{i}" for i in range(6)]
    hang = threading.Event()
    site.pages = {
        f"/{q}{i}": lambda sock, head: hang.wait(20) for q in "abcdefgh" for i in range(6)
    }
    web = searcher(site, threads=4, page_seconds=9.0, round_seconds=0.2)
    start = time.perf_counter()
    assert web.search(list("abcdefgh"), 2) == [[]] * 8
    assert time.perf_counter() - start < 10  # 3 · 0.2, and a busy machine; without a bound 20
    assert web.counts["timeouts"] == 8 * 6  # those whose turn never came too
    hang.set()


def test_one_slow_page_costs_its_own_limit_and_not_that_of_the_round(site):
    start = time.perf_counter()
    assert one(site, drip, page_seconds=0.2, round_seconds=9.0) == ([], told(timeouts=1))
    assert time.perf_counter() - start < 6


@pytest.mark.parametrize(
    "first", [b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-Long: "]
)
def test_the_thread_of_a_page_that_drips_ends_too(site, first):
    site.pages["/page"] = lambda sock, head: drip(sock, head, first)
    web, start = searcher(site), time.monotonic()
    with pytest.raises(TimeoutError):
        web.read(site.base + "/page", start + 0.2)
    assert time.monotonic() - start < 4


def test_a_search_ends_within_its_bound_when_the_api_hangs(site):
    # 5 queries, 2 threads: 5/50 + ⌈5/2⌉ · 0.2 = 0.7 s, and no page
    web = searcher(site, threads=2, api_seconds=0.2, rate=50)
    hang = threading.Event()
    site.results = lambda query: hang.wait(20) and b""
    start = time.perf_counter()
    with pytest.raises(Fault):
        web.search(list("abcde"), 1)
    assert time.perf_counter() - start < 10 and web.counts["api_faults"] == 5
    hang.set()


def test_a_name_whose_look_up_hangs_is_a_timeout(site, monkeypatch):
    monkeypatch.setattr(module, "resolve", lambda host, port: time.sleep(9) or [])
    site.results = lambda query: [{"url": "http://slow.test/"}]
    web = searcher(site, round_seconds=0.2)
    start = time.perf_counter()
    assert web.search(["q"], 1) == [[]] and web.counts["timeouts"] == 1
    assert time.perf_counter() - start < 6


def test_a_page_that_comes_too_late_is_there_for_the_next_search(site, monkeypatch):
    def slow(sock, head):
        time.sleep(0.3)
        sock.sendall(text_page("a"))

    site.pages, site.results = {"/a": slow}, lambda query: ["/a"]
    web = searcher(site, page_seconds=2.0, round_seconds=2.0)
    real = module.in_parallel

    def impatient(
        work, jobs, threads, seconds
    ):  # the round ends early, but the page's own limit does not
        early = work == web.read
        return real(
            lambda job, deadline: work(job, deadline + 2 * early),
            jobs,
            threads,
            0.1 if early else seconds,
        )

    with monkeypatch.context() as patch:
        patch.setattr(module, "in_parallel", impatient)
        assert web.search(["q"], 1) == [[]]
    time.sleep(0.4)
    assert len(web.search(["q"], 1)[0]) == 1 and site.visits == {"/a": 1}


def test_threads_that_are_given_up_begin_nothing_more():
    begun = []

    def work(job, deadline):
        begun.append(job)
        time.sleep(0.1)

    assert in_parallel(work, list(range(100)), 4, 0.05) == {}
    time.sleep(0.15)
    assert len(begun) == 4


def test_no_more_threads_than_allowed_are_at_work(site):
    busy, most, lock = [0], [0], threading.Lock()

    def work(job, deadline):
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        time.sleep(0.02)
        with lock:
            busy[0] -= 1
        return job

    assert in_parallel(work, list(range(12)), 3, 5) == {i: i for i in range(12)} and most[0] == 3
    assert in_parallel(work, [], 3, 5) == {}


def test_an_interrupt_leaves_at_once(site, monkeypatch):
    site.results = lambda query: ["/slow"]
    site.pages = {"/slow": lambda sock, head: time.sleep(1)}
    web = searcher(site, page_seconds=9.0, round_seconds=9.0)

    real, waits = module.left, []

    def left(
        deadline,
    ):  # Ctrl-C comes while the main thread waits for the second time: for the page
        if threading.current_thread() is threading.main_thread():
            waits.append(deadline)
            if len(waits) == 2:
                raise KeyboardInterrupt
        return real(deadline)

    monkeypatch.setattr(module, "left", left)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        web.search(["q"], 1)
    assert time.perf_counter() - start < 4
    assert all(
        thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()
    )


def test_every_visit_has_one_outcome(site):
    site.pages = {
        "/0": text_page("a"),
        "/1": onward("/1"),
        "/2": reply("x", "image/png"),
        "/3": b"",
        "/4": reply(" "),
    }
    site.results = lambda query: [*(f"/{i}" for i in range(6)), {"url": "ftp://h/"}]
    web = searcher(site)
    web.search(["q"], 3)
    reasons = (
        "fetched http_errors redirects wrong_type connection_errors empty refused_hosts timeouts"
        " unexpected".split()
    )
    assert sum(web.counts[reason] for reason in reasons) == 7


def test_the_worked_examples_are_true():
    result = doctest.testmod(module)
    assert result.attempted >= 3 and result.failed == 0


def test_the_file_shows_documents_and_why_other_slots_were_empty(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["web.py"])
    module.main()
    output = capsys.readouterr().out
    assert "first: 3 documents" in output and "Ana Bell: Ana Bell was born in Kelmouth." in output
    for count in (
        "fetched 3",
        "http_errors 1",
        "redirects 1",
        "timeouts 1",
        "too_large 1",
        "cached_queries 1",
    ):
        assert count in output
