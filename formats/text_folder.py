"""A folder of texts -> passages of about 100 words, titled with the headings above them.

    text -> paragraphs (also a list item, a table's row, a line of code) -> passages

Greedy: a passage takes paragraphs until it has 100 words, or the next would make it more than 150.
A heading begins a new one that has 50 words behind it, and is a line of its passage otherwise; so
only a text's last passage is shorter. A paragraph of over 100 words is cut between its sentences.
Markdown: a title is "Guide > Install", front matter may give its first part; a link loses its
target. Trap: "#" in a fence of code is no heading. Left out: headings underlined with === or ---,
HTML, scripts without blanks between words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from errors import InputError
from formats.records import first_line, is_tsv, open_error, read_whole, report_skipped

LEAST, GOAL, MOST = 50, 100, 150  # words in a passage
FRONT_MATTER = re.compile(r"---[ \t]*\n(?=[\w-]+:)(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
FENCE = re.compile(r"\s*(`{3,}|~{3,})")
HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
OWN_LINE = re.compile(r"\s*(?:[-*+•]\s|\d+[.)]\s|\|)")  # a list item, a table's row
RULE_OR_TARGET = re.compile(r"[-*_=|:+\s]*$| {0,3}\[[^\]^]+\]:\s*\S+\s*$")
LINK = re.compile(r"!?\[([^\[\]]*)\]\((?:[^()]|\([^()]*\))*\)")
SENTENCE_END = re.compile(r"""(?:(?<=[.!?…])|(?<=[.!?…]["'”’)\]]))\s+(?![a-z])""")


def passages(text: str, name: str, markdown: bool = False) -> list[tuple[str, str]]:
    """[(title, passage)]. The title begins with the text's own, its first heading, or `name`."""
    title = ""
    if markdown and (matter := FRONT_MATTER.match(text)):
        given = re.search(r"^title:[ \t]*(.*)$", matter[1], re.MULTILINE)
        title, text = given[1].strip(" \t\"'") if given else "", text[matter.end() :]
    found = list(paragraphs(text, markdown))
    title = title or next((headings[0] for headings, _ in found if headings), name)
    packed, size, above = [], 0, ()
    for headings, paragraph in found:
        new = " > ".join(heading for heading in headings if heading not in above)
        joint = f"\n{new}\n" if new else "\n"
        for piece in pieces(paragraph):
            words = len(piece.split())
            if packed and size < (LEAST if new else GOAL) and size + words <= MOST:
                packed[-1] = packed[-1][0], packed[-1][1] + joint + piece
                size += words
            else:
                path = headings if headings[:1] == (title,) else (title, *headings)
                packed.append((" > ".join(path), piece))
                size = words
            new, joint = "", " "
        above = headings
    return packed


def paragraphs(text: str, markdown: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """(the headings above it, a paragraph on one line)"""
    headings: dict[int, str] = {}  # level -> heading
    lines, fence = [], ""  # of this paragraph; the mark that ends the code
    for line in [*text.split("\n"), ""]:
        if fence:
            closed = line.strip().startswith(fence) and not line.strip(f" \t{fence[0]}")
            if line.strip() and not closed:
                yield tuple(headings.values()), line.rstrip()
            fence = "" if closed else fence
            continue
        opened, heading = (FENCE.match(line), HEADING.match(line)) if markdown else (None, None)
        blank = RULE_OR_TARGET.match(line) if markdown else not line.strip()
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
    return LINK.sub(r"\1", LINK.sub(r"\1", text)) if markdown else text  # a picture may be a link


def pieces(paragraph: str) -> list[str]:
    """The paragraph, or its sentences if it is long; a long sentence is cut between words."""
    if len(paragraph.split()) <= GOAL:
        return [paragraph]
    found = []
    for sentence in SENTENCE_END.split(paragraph):
        words = sentence.split()
        found += [" ".join(words[i : i + GOAL]) for i in range(0, len(words), GOAL)]
    return found


# ----------------------------------------------------------------------------------------- folders


def stem(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


def text_ending(path: Path) -> str:
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    return ending if ending in (".txt", ".md") else ""


def is_text(path: Path) -> bool:
    """A folder, a Markdown file, or a .txt file that does not hold records all the same."""
    if path.is_dir() or text_ending(path) != ".txt":
        return path.is_dir() or text_ending(path) == ".md"
    return not is_tsv(path) and not first_line(path).startswith((b"{", b"[{"))


def text_files(folder: Path) -> list[Path]:
    """The texts in a folder and the folders below it, sorted, without hidden ones. What has two
    names is read once: links may go round in circles.
    """

    def fail(error: OSError) -> None:
        raise open_error(Path(error.filename), error)

    found, seen = {}, set()
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        again = os.path.realpath(root) in seen
        seen.add(os.path.realpath(root))
        folders[:] = [name for name in folders if not (again or name.startswith("."))]
        for file in [Path(root, name) for name in names if not (again or name.startswith("."))]:
            if text_ending(file) and (file.is_file() or not file.exists()):  # a pipe would hang
                found.setdefault(os.path.realpath(file), []).append((file.is_symlink(), file))
    if not found:
        advice = "name a folder of texts, or a file"
        raise InputError(f"{folder}: no file in it ends in .txt or .md: {advice}")
    return sorted(min(names)[1] for names in found.values())  # a file's own name before its links


def read_texts(path: Path, skip_bad: bool = False) -> list[dict]:
    """The fields of the passages of a text or of a folder; an id is "file in the folder#number"."""
    files, root = (text_files(path), path) if path.is_dir() else ([path], path.parent)
    found, problems, used = [], [], 0
    for file in tqdm(files, desc="passages", unit="file", leave=False, disable=None):
        # Linux allows names that are no text.
        name = file.relative_to(root).as_posix().encode(errors="replace").decode()
        try:
            text = read_whole(file).replace("\r\n", "\n").replace("\r", "\n")
        except InputError as error:
            if not skip_bad:
                raise InputError(f"{error}, or leave it out with --skip_bad") from None
            problems.append(str(error))
            continue
        packed = passages(text, stem(Path(name)), text_ending(file) == ".md")
        for number, (title, passage) in enumerate(packed, 1):
            found.append({"id": f"{name}#{number}", "title": title, "text": passage})
        used += bool(packed)
        problems += [] if packed else [f"{file}: no words in it"]
    report_skipped(path, used, problems, "file")
    return found
