"""page.py: bytes and HTML as strangers send them."""

import doctest
import sys
import time

import pytest

from retrievers import page
from retrievers.page import MAX_TEXT, decode, html_to_text


@pytest.fixture(autouse=True)
def our_own_reading(monkeypatch):
    monkeypatch.setitem(sys.modules, "trafilatura", None)  # an import of it fails


def test_the_worked_examples_are_true():
    result = doctest.testmod(page)
    assert result.attempted >= 2 and result.failed == 0


@pytest.mark.parametrize(
    "body, charset, text",
    [
        ("Kelmöuth".encode("latin-1"), "iso-8859-1", "Kelmöuth"),
        ("<meta charset='windows-1252'>ö".encode("cp1252"), None, "<meta charset='windows-1252'>ö"),
        (
            '<META http-equiv=x content="text/html; charset=Shift_JIS">海'.encode("shift_jis"),
            None,
            '<META http-equiv=x content="text/html; charset=Shift_JIS">海',
        ),
        (
            "<meta charset=latin-1>ü".encode(),
            "utf-8",
            "<meta charset=latin-1>ü",
        ),  # the header is asked first
        (b"\xef\xbb\xbfa", "latin-1", "a"),  # and a mark in the text before it
        ("aü".encode("utf-16"), None, "aü"),
        (b"a\xffb", None, "a\ufffdb"),
        (b"a\xffb", "utf-8", "a\ufffdb"),
        ("ü".encode(), "no-such-charset", "ü"),
        (b"a-", "punycode", "a-"),
        (b"a", "idna", "a"),
        (b"a", "base64", "a"),
        (b"a", "undefined", "a"),
        (b"a", "iso-0-\x00", "a"),
        (b'<meta charset="x-\xff">a', None, '<meta charset="x-\ufffd">a'),
    ],
)
def test_the_charset_is_found_and_a_broken_one_never_raises(body, charset, text):
    assert decode(body, charset) == text


def test_html_becomes_lines_without_menus_and_scripts():
    html = """<!DOCTYPE html><html><head><title> Ana
      Bell &amp; Co </title><style>p {}</style></head><body><header>top<nav>menu</nav></header><h1>Ana</h1>
      <p>was <b>born</b> in&nbsp;Kelmouth&#33;<br>Norland</p><script>if (a < b) "</p>"</script><form>login</form>
      <ul><li>one<li>two</ul><svg><title>icon</title></svg><footer>end</footer></body></html>"""
    assert html_to_text(html) == ("Ana Bell & Co", "Ana\nwas born in Kelmouth!\nNorland\none\ntwo")


@pytest.mark.parametrize(
    "html, title, text",
    [
        ("<form><p>all of it</form>", "", "all of it"),  # whole pages stand in a form
        ("<header>no end<p>all", "", "no end\nall"),
        ("<title>no end<p>text", "no end", "text"),
        ("<title>no end<nav>menu</nav>text", "no end", "text"),
        ("<title>a</title><title>b</title>c", "a", "b\nc"),
        ("a<nav>x<nav>y</nav>z</nav>b", "", "ab"),
        ("</nav></p>a</div>", "", "a"),
        ("a<![foo[ b ]]>c<![CDATA[d]]>e", "", "ace"),
        ("a<!-- <p>b -->c<!doctype x>d", "", "acd"),
        ("a < b & c &nosuch; &#0; &#xD800; d", "", "a < b & c &nosuch; \ufffd \ufffd d"),
        ("", "", ""),
        ("<a href='x>y'>z", "", "z"),
    ],
)
def test_malformed_html_never_raises_and_loses_little(html, title, text):
    assert html_to_text(html) == (title, text)


@pytest.mark.parametrize("piece", ["<!--", "<a ", "</", "<?", "<a b='c", "<![", "<p><form>", "&#x"])
def test_hostile_html_costs_no_more_than_its_share(piece, monkeypatch):
    # "<a " alone: 20 kB take 3.5 s without the limit, and 200 kB about 100 times that
    monkeypatch.setattr(page, "PARSE_SECONDS", 0.05)
    start = time.perf_counter()
    html_to_text(piece * (200_000 // len(piece)))
    assert time.perf_counter() - start < 20  # without the limit: minutes


def test_no_more_text_than_the_limit_is_kept():
    assert len(html_to_text("<p>" + "word " * MAX_TEXT)[1]) <= MAX_TEXT
    assert len(html_to_text("<p>word " * MAX_TEXT)[1]) <= MAX_TEXT


def test_reading_ends_where_enough_text_was_found():
    with pytest.raises(page._Enough):
        page._Reader(frozenset()).feed("<p>word " * MAX_TEXT)


def test_trafilatura_reads_where_it_is_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "trafilatura")
    pytest.importorskip("trafilatura")
    body = "".join(
        f"<p>Ana Bell was born in Kelmouth, a harbour city in the north of Norland: {i}.</p>"
        for i in range(9)
    )
    title, text = html_to_text(
        f"<title>Ana</title><div class=menu><a href=x>a</a></div><article>{body}</article>"
    )
    assert title == "Ana" and "Ana Bell was born in Kelmouth" in text
