"""Splits a text file, or all texts in a folder, into documents of about 100 words with titles.

    file -> sections (Markdown: one per heading) -> passages

A passage ends with the first sentence or paragraph that brings it to 100 words, at the latest after
150 words, or with its section. The title is the file's name, and in Markdown also the heading:
"guide > Install". A link in Markdown loses its target.
Left out: HTML, front matter and underlined headings (they stay as text); code blocks, in which a
line that begins with "# " is taken for a heading; languages without blanks between words.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from errors import InputError
from formats.records import read_whole

GOAL = 100  # words of a passage
MOST = 150
HEADING = re.compile(r"^ {0,3}#{1,6} +(.+)$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\[\]]*)\]\([^()]*\)")
ENDS = re.compile(r"""[.!?…]["'”’)\]]*\s+$|\n\s*\n$""")  # at the end of a sentence or a paragraph


def sections(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Yields (title, section) of a Markdown text."""
    first, *parts = HEADING.split(LINK.sub(r"\1", text))
    yield name, first
    for heading, section in zip(parts[::2], parts[1::2], strict=True):
        yield f"{name} > {heading.strip(' #')}", section


def passages(section: str) -> Iterator[str]:
    start = words = 0
    for word in re.finditer(r"\S+\s*", section):
        words += 1
        if words == MOST or (words >= GOAL and ENDS.search(word[0])):
            yield section[start : word.end()].strip()
            start, words = word.end(), 0
    if words:
        yield section[start:].strip()


def is_text(path: Path) -> bool:
    return path.suffix in (".txt", ".md") or path.is_dir()


def text_files(path: Path) -> list[Path]:
    """Returns the .txt and .md files in a folder in order, without hidden files and folders."""
    found = sorted(file for file in path.rglob("*.*") if is_text(file) and file.is_file())
    return [file for file in found if "/." not in f"/{file.relative_to(path).as_posix()}"]


def read_texts(path: Path) -> list[tuple[str, str, str]]:
    """Returns (id, title, passage) of a text file, or of all in a folder. An id is "file#2"."""
    root, files = (path, text_files(path)) if path.is_dir() else (path.parent, [path])
    documents = []
    for file in files:
        text = read_whole(file)
        parts = sections(text, file.stem) if file.suffix == ".md" else [(file.stem, text)]
        found = [(title, passage) for title, section in parts for passage in passages(section)]
        name = file.relative_to(root).as_posix()
        documents += [(f"{name}#{n}", *pair) for n, pair in enumerate(found, 1)]
    if not documents:
        raise InputError(f"{path}: no words in a .txt or .md file: name a folder of texts")
    return documents
