"""The bytes of a web page -> its title and its text, whatever a stranger's server sends.

    bytes -> characters   by the byte-order mark, the header's charset, a meta tag's, or else as
    UTF-8
    HTML -> text          by the optional `trafilatura`, else by html.parser: a line per block,
    without scripts, menus, forms

Nothing here raises, and nothing takes long. Traps: html.parser needs hours for a hostile megabyte
(PARSE_SECONDS ends it), Python knows codecs that no page is written in and some of them are very
slow, whole pages stand inside a <form>, and half the titles of the web are not closed. The text
depends on whether `trafilatura` is installed. Left out: JavaScript, PDF, tables as anything but
lines.
"""

from __future__ import annotations

import contextlib
import re
import time
from html.parser import HTMLParser
from pathlib import Path

from errors import FlagParser, run_main

MAX_TEXT = 100_000  # characters of a page that are kept
PARSE_SECONDS = 1.0  # of one core, for one page


def decode(body: bytes, charset: str | None) -> str:
    """The text: by its byte order mark, the header's charset, a meta tag's, or else UTF-8. Never
    raises.

    >>> decode("Kelmöuth".encode("latin-1"), "iso-8859-1"), decode("Kelmöuth".encode(), "no-such")
    ('Kelmöuth', 'Kelmöuth')
    """
    meta = re.search(
        rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w-]{1,40})", body[:4096], re.IGNORECASE
    )
    name = charset or (meta[1].decode() if meta else "utf-8")
    for mark, marked in (
        (b"\xef\xbb\xbf", "utf-8-sig"),
        (b"\xff\xfe", "utf-16"),
        (b"\xfe\xff", "utf-16"),
    ):
        name = marked if body.startswith(mark) else name
    # Trap: Python also knows codecs ("punycode", "unicode_escape") that no page is written in, some
    # of them very slow.
    if not re.match(
        r"(?i)utf-?(8|16)|iso|windows|cp\d|koi8|gb|big5|euc|shift|ascii|us-ascii|latin", name
    ):
        name = "utf-8"
    try:
        return body.decode(name, errors="replace")
    except (LookupError, ValueError):
        return body.decode(errors="replace")


SILENT = frozenset("script style noscript svg template iframe object select textarea".split())
FRAME = frozenset("nav header footer form aside button".split())
_BLOCKS = frozenset(
    "address article blockquote body br dd details div dl dt figcaption figure h1 h2 h3 h4 h5 h6"
    " head hr html li main ol p pre section summary table tbody td tfoot th thead title tr ul".split()
)


class _Enough(Exception):
    pass


class _Reader(HTMLParser):
    """The title and the text outside of the elements `silent`; a block's end is a line's end."""

    def __init__(self, silent: frozenset[str]):
        super().__init__()
        self.silent, self.title, self.in_title = silent, "", False
        self.within, self.depth = (
            "",
            0,
        )  # the silent element we are in, and how many of its kind are open
        self.pieces: list[str] = []
        self.length, self.until = 0, time.thread_time() + PARSE_SECONDS

    def handle_starttag(self, tag, attrs):
        if self.within:
            self.depth += tag == self.within
        elif tag in self.silent:
            self.within, self.depth, self.in_title = tag, 1, False
        else:
            self.in_title = (
                tag == "title" and not self.title
            )  # any other tag ends a title that was not closed
            self.pieces.append("\n" if tag in _BLOCKS else "")

    def handle_endtag(self, tag):
        if tag == self.within:
            self.depth -= 1
            self.within = self.within if self.depth else ""
        elif not self.within:
            self.in_title = False
            self.pieces.append("\n" if tag in _BLOCKS else "")

    def handle_data(self, data):
        if self.in_title:
            self.title += data
        elif not self.within:
            self.pieces.append(data)
            self.length += len(data)
        # Trap: "<a <a <a ..." makes html.parser quadratic; each of its steps passes here.
        if self.length > MAX_TEXT or time.thread_time() > self.until:
            raise _Enough


def html_to_text(html: str) -> tuple[str, str]:
    """(title, text) of a page, one line per block, by `trafilatura` where it is installed. Never
    raises.

    >>> html_to_text("<title>Ana</title><nav>menu</nav><p>Ana &amp; Bo<p>left <b>Kel</b>mouth")
    ('Ana', 'Ana & Bo\\nleft Kelmouth')
    """
    title, text = parse_html(html, SILENT | FRAME)
    if not text:  # whole pages stand inside a <form>, or behind a <header> that nobody closed
        title, text = parse_html(html, SILENT)
    return title, _main_text(html) or text


def parse_html(html: str, silent: frozenset[str]) -> tuple[str, str]:
    reader = _Reader(silent)
    with contextlib.suppress(
        _Enough, AssertionError, ValueError, RecursionError
    ):  # html.parser asserts things about a page
        reader.feed(html.replace("<![", "<! ["))  # such as that nothing unknown stands behind "<!["
        reader.close()
    return one_line(reader.title)[:200], lines("".join(reader.pieces))


def _main_text(html: str) -> str:
    try:
        import trafilatura

        return lines(trafilatura.extract(html, include_comments=False) or "")
    except Exception:  # not installed; or a page that lxml, or the rules on top of it, stumble over
        return ""


def lines(text: str) -> str:
    return "\n".join(filter(None, map(one_line, text[:MAX_TEXT].splitlines())))


def one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> None:
    parser = FlagParser(
        description="Show the text of an HTML file; without one, of an invented page."
    )
    parser.add_argument("file", nargs="?", default="")
    args = parser.parse_args()
    invented = (
        b"<title>Ana Bell<nav>Home | Maps</nav><script>track()</script><h1>Ana Bell</h1><p>Born in"
        b" Kelm\xf6uth &amp; raised there.<p>She draws <b>maps</b> of the coast.<form>Your"
        b" name</form><footer>All rights</footer>"
    )
    body = Path(args.file).read_bytes() if args.file else invented
    title, text = html_to_text(decode(body, None if args.file else "iso-8859-1"))
    print(
        f"{len(body):,} bytes\ntitle  {title}\n"
        + "\n".join(f"text   {line}" for line in text.splitlines()[:50])
    )


if __name__ == "__main__":
    run_main(main)
