"""Splits a text file, or all texts in a folder, into documents of 100 words, as DPR's Wikipedia is
(in scripts without blanks, such as Chinese, of 200 characters).

The title of a document is the name of its file, in Markdown also the heading: "guide > Install".
Left out: HTML and links (they stay as text); sentences, which a cut may divide; code blocks, in
which a line that begins with "# " is taken for a heading.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from errors import InputError
from metrics import stretches

WORDS = 100
HEADING = re.compile(r"^ {0,3}#{1,6} +(.+)$", re.MULTILINE)


def is_text(path: Path) -> bool:
    return path.suffix.lower() in (".txt", ".md") or path.is_dir()


def passages_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yields (title, passage) of a file. In Markdown every second part is a heading."""
    title = file.stem
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: {error}: save it as UTF-8") from None
    for number, part in enumerate(HEADING.split(text) if file.suffix.lower() == ".md" else [text]):
        if number % 2:
            title = f"{file.stem} > {part.strip(' #')}"
            continue
        for passage in stretches(part, WORDS, WORDS):
            yield title, passage


def read_texts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (id, title, passage) of a text file, or of all in a folder. An id is "file#2"."""
    for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
        name = file.relative_to(path if path.is_dir() else path.parent).as_posix()
        # Hidden folders are left out, such as .git, or the packages of an environment.
        if is_text(file) and file.is_file() and "/." not in f"/{name}":
            for number, passage in enumerate(passages_of(file), 1):
                yield f"{name}#{number}", *passage
