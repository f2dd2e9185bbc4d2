"""Splits a text file, or all texts in a folder, into documents of about 100 words with titles.

    text -> paragraphs -> passages

A list item, a table's row and, in Markdown, a line of a fenced code block are paragraphs too. A
passage takes paragraphs until it has 100 words, or until the next paragraph would make it longer
than 150. A heading ends a passage of 50 or more words; a shorter passage goes on, with the heading
as one of its lines. A paragraph of over 100 words is split between its sentences, and a sentence of
over 100 words after each 100. In Markdown a title is a path of headings ("Guide > Install"), a link
loses its target, and "#" in a code block is not a heading. In a .txt file the title is the file's
name without its ending.
Left out: front matter, horizontal rules, underlined headings and HTML (they stay as text);
languages without blanks between words; symlinks to folders, which are not followed.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from errors import InputError
from formats.records import first_line, is_tsv, open_error, read_whole, report_skipped

# Words in a passage.
LEAST = 50
GOAL = 100
MOST = 150
FENCE = re.compile(r"\s*(`{3,}|~{3,})")
HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
OWN_LINE = re.compile(r"\s*(?:[-*+•]\s|\d+[.)]\s|\|)")  # begins a list item or a table's row
LINK = re.compile(r"!?\[([^\[\]]*)\]\((?:[^()]|\([^()]*\))*\)")
SENTENCE_END = re.compile(r"""(?:(?<=[.!?…])|(?<=[.!?…]["'”’)\]]))\s+(?![a-z])""")


def passages(text: str, name: str, markdown: bool = False) -> list[tuple[str, str]]:
    """Returns [(title, passage)]. A title begins with the text's first heading, or with `name` if
    the text has no heading. A heading without text in its section is left out.
    """
    with_headings = list(paragraphs(text, markdown))
    title = next((headings[0] for headings, _ in with_headings if headings), name)
    packed = []
    size = 0
    above = ()
    for headings, paragraph in with_headings:
        new = " > ".join(heading for heading in headings if heading not in above)
        joint = f"\n{new}\n" if new else "\n"
        for piece in pieces(paragraph):
            words = len(piece.split())
            if packed and size < (LEAST if new else GOAL) and size + words <= MOST:
                packed[-1][1] += joint + piece
                size += words
            else:
                path = headings if headings[:1] == (title,) else (title, *headings)
                packed.append([" > ".join(path), piece])
                size = words
            new = ""
            joint = " "
        above = headings
    return [(title, passage) for title, passage in packed]


def paragraphs(text: str, markdown: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields (the headings above a paragraph, the paragraph on one line)."""
    headings = {}  # level -> heading
    lines = []  # of this paragraph
    fence = ""  # the mark that ends the current code block; "" outside one
    for line in [*text.split("\n"), ""]:
        opened, heading = (FENCE.match(line), HEADING.match(line)) if markdown else (None, None)
        if fence:  # inside code "#" does not begin a heading
            if opened and opened[1] == fence:
                fence = ""
            elif line.strip():
                yield tuple(headings.values()), line.rstrip()
            continue
        blank = not line.strip()
        if lines and (opened or heading or blank or OWN_LINE.match(line)):
            yield tuple(headings.values()), joined(lines, markdown)
            lines = []
        if opened:
            fence = opened[1]
        elif heading:
            headings = {level: h for level, h in headings.items() if level < len(heading[1])}
            headings |= {len(heading[1]): joined([heading[2]], True)} if heading[2] else {}
        elif not blank:
            lines.append(line)


def joined(lines: list[str], markdown: bool) -> str:
    text = " ".join(" ".join(lines).split())
    return LINK.sub(r"\1", text) if markdown else text


def pieces(paragraph: str) -> list[str]:
    if len(paragraph.split()) <= GOAL:
        return [paragraph]
    parts = []
    for sentence in SENTENCE_END.split(paragraph):
        words = sentence.split()
        parts += [" ".join(words[i : i + GOAL]) for i in range(0, len(words), GOAL)]
    return parts


def stem(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


def ending(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def is_text(path: Path) -> bool:
    """Returns whether this is a folder, a Markdown file, or a .txt file without records."""
    if os.path.isdir(path) or ending(path) == ".md":  # Path.is_dir raises if a name is too long
        return True
    if ending(path) != ".txt" or is_tsv(path):
        return False
    return not first_line(path).startswith((b"{", b"[{"))


def text_files(folder: Path) -> list[Path]:
    """Returns the .txt and .md files (also gzipped) in a folder and its subfolders, without hidden
    files and folders. An unreadable folder raises an error; a broken symlink raises one when read.
    """

    def fail(error: OSError) -> None:
        raise open_error(Path(error.filename), error)

    texts = []
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [Path(root, name) for name in names if not name.startswith(".")]
        texts += [f for f in files if ending(f) in (".txt", ".md") and not f.is_fifo()]
    if not texts:
        raise InputError(
            f"{folder}: no file in it ends in .txt or .md: name a folder of texts, or a file"
        )
    return sorted(texts)


def read_texts(path: Path, skip_bad: bool = False) -> list[dict]:
    """Returns a dict of fields for each passage of a text file, or of all texts in a folder. An id
    is "file#number": the file's path in the folder and the passage's number in the file, from 1.
    """
    files, root = (text_files(path), path) if path.is_dir() else ([path], path.parent)
    documents = []
    problems = []
    for file in tqdm(files, desc="passages", unit="file", leave=False, disable=None):
        name = file.relative_to(root).as_posix()
        try:
            text = re.sub("\r\n?", "\n", read_whole(file))
        except InputError as error:
            if not skip_bad:
                raise InputError(f"{error}, or leave it out with --skip_bad") from None
            problems.append(str(error))
            continue
        packed = passages(text, stem(Path(name)), ending(file) == ".md")
        problems += [] if packed else [f"{file}: no words in it"]
        for number, (title, passage) in enumerate(packed, 1):
            documents.append({"id": f"{name}#{number}", "title": title, "text": passage})
    report_skipped(path, len(files) - len(problems), problems, "file")
    return documents
