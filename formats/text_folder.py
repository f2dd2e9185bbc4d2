"""Splits a text file, or all texts in a folder, into documents of 100 words, as DPR's Wikipedia is.

The title of a document is the name of its file, in Markdown also the heading: "guide > Install".
Left out: HTML and links (they stay as text); sentences, which a cut may divide; code blocks, in
which a line that begins with "# " is taken for a heading.
"""

import re
from collections.abc import Iterator
from pathlib import Path

WORDS = 100
HEADING = re.compile(r"^ {0,3}#{1,6} +(.+)$", re.MULTILINE)


def is_text(path: Path) -> bool:
    return path.suffix in (".txt", ".md") or path.is_dir()


def sections(file: Path) -> Iterator[tuple[str, str]]:
    """Yields (title, text) of each section of a Markdown file; another file is one section."""
    text = file.read_text(encoding="utf-8-sig")
    first, *parts = HEADING.split(text) if file.suffix == ".md" else [text]
    yield file.stem, first
    for heading, section in zip(parts[::2], parts[1::2], strict=True):
        yield f"{file.stem} > {heading.strip(' #')}", section


def read_texts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (id, title, passage) of a text file, or of all in a folder. An id is "file#2"."""
    for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
        name = file.relative_to(path if path.is_dir() else path.parent).as_posix()
        hidden = "/." in f"/{name}"  # such as .git, or the packages of an environment
        if hidden or not is_text(file) or not file.is_file():
            continue
        number = 0
        for title, section in sections(file):
            words = section.split()
            for start in range(0, len(words), WORDS):
                number += 1
                yield f"{name}#{number}", title, " ".join(words[start : start + WORDS])
