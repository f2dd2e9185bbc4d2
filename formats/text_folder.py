"""Splits a text file, or all texts in a folder, into documents of 100 words, as DPR's Wikipedia is.

The title of a document is the name of its file.
Left out: HTML; headings and links (they stay as text); sentences, which a cut may divide.
"""

from collections.abc import Iterator
from pathlib import Path

WORDS = 100


def is_text(path: Path) -> bool:
    return path.suffix in (".txt", ".md") or path.is_dir()


def read_texts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (id, title, passage) of a text file, or of all in a folder. An id is "file#2"."""
    for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
        if not is_text(file) or not file.is_file():
            continue
        words = file.read_text(encoding="utf-8-sig").split()
        for number, start in enumerate(range(0, len(words), WORDS), 1):
            name = file.relative_to(path if path.is_dir() else path.parent).as_posix()
            yield f"{name}#{number}", file.stem, " ".join(words[start : start + WORDS])
