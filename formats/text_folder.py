"""A text -> passages of about 100 words, each with the headings that it stands under as its title.

    text -> blocks (a paragraph, a list item, a line of code) -> units (a sentence) -> passages
    (runs of units)

Which runs is one minimisation, solved exactly by dynamic programming:

    Σ over passages of  (words − 100)²  +  the price of the cut before it  +  5000 for each heading
    that it runs across

A cut is free before a paragraph, dear between sentences (400) and dearest inside of one (6400). A
passage has 50 to 150 words; only a text shorter than that gives a shorter one. Passages do not
overlap. Markdown: headings become the title ("Guide > Install"; one that a passage runs across
stays as a line), a link keeps its words and loses its target, code stays as it is, front matter
gives its title. Traps: "#" in a fence of code is no heading, "---" is a heading's underline, a rule
or the edge of front matter, "Dr." and "J." end no sentence, `__init__` is not bold. Left out:
scripts without blanks between words (a run without a blank is one word), HTML files, tables as
anything but rows.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from errors import run_main

GOAL, LEAST, MOST = 100, 50, 150  # words in a passage
# words; a longer sentence is cut: of units of at most 50, passages of 50 to 150 can always be made
PIECE = 50
PARAGRAPH, SENTENCE, INSIDE = (
    0.0,
    400.0,
    6400.0,
)  # prices of a cut; 400 is what a passage pays that is 20 words off
HEADING = 5000.0  # two sections of 50 words cost the same together and apart
TOO_SHORT = 1e9

SENTENCE_END = re.compile(
    r"(?<!\b[A-Z]\.)(?<!\b(?:Mr|Ms|Dr|St|No|Jr|vs|cf)\.)(?<!\b(?:Mrs|etc)\.)(?<!e\.g\.)(?<!i\.e\.)"
    r"""(?:(?<=[.!?…])|(?<=[.!?…]["'”’)\]]))\s+(?![a-z])"""
)
FRONT_MATTER = re.compile(r"---[ \t]*\n(?=[\w-]+:)(.*?\n)(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
FENCE = re.compile(r"\s*(`{3,}|~{3,})")
ATX_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
TARGET = re.compile(r" {0,3}\[[^\]^][^\]]*\]:\s*\S+\s*(?:[\"'(].*)?$")  # [name]: address
OWN_LINE = re.compile(r"\s*(?:[-*+•]\s|\d+[.)]\s|\|)")  # a list item, a table's row
TITLE = re.compile(
    rf"(?!{OWN_LINE.pattern}).{{1,100}}\Z"
)  # what "---" below it makes a heading: one short line
RULED = "-*_=|:+ \t"  # a line of nothing else: blank, a rule, the line below a table's head
INLINE = re.compile(
    r"`+([^`]+)`+|<!--(?:(?!<!--).)*?-->|</?[A-Za-z][^<>]*>"
    r"|!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\](?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\])"
    r"|(?<![\w*])(\*{1,3})(?=\S)([^*]+)(?<=\S)\3|(?<!\w)(_{1,3})(?=\S)([^_]+)(?<=\S)\5(?!\w)",
    re.DOTALL,
)


class Block(NamedTuple):
    headings: tuple[str, ...]
    text: str
    code: bool = False


class Unit(NamedTuple):
    """What is never cut. `price`: of a cut before it. `joint`: what stands before it in a passage
    that it does not begin, the headings that it comes under included.
    """

    headings: tuple[str, ...]
    text: str
    words: int
    price: float
    joint: str


def passages(text: str, name: str, markdown: bool = False) -> list[tuple[str, str]]:
    """[(title, passage)] of a text; none where it has no words. The title is the front matter's, or
    the first heading, or `name`, with the headings of the passage's first words behind it. Line
    ends must be "\\n".
    """
    title = ""
    if markdown and (matter := FRONT_MATTER.match(text)):
        given = re.search(r"^title:[ \t]*(.*)$", matter[1], re.MULTILINE)
        title, text = given[1].strip(" \t\"'") if given else "", text[matter.end() :]
    blocks = read_blocks(text, markdown)
    title = title or next((block.headings[0] for block in blocks if block.headings), name)
    found = []
    for run in runs(cut_blocks(blocks)):
        headings = run[0].headings if run[0].headings[:1] == (title,) else (title, *run[0].headings)
        found.append(
            (
                " > ".join(headings),
                run[0].text + "".join(unit.joint + unit.text for unit in run[1:]),
            )
        )
    return found


def read_blocks(text: str, markdown: bool) -> list[Block]:
    """Paragraphs, list items, table rows and lines of code, each with the headings above it."""
    found: list[Block] = []
    headings: dict[int, str] = {}  # level -> heading
    fence, fresh = "", True  # the mark that ends the code; does the next line begin a block?
    for line in text.split("\n"):
        if fence:
            if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            elif line.strip():
                found.append(Block(tuple(headings.values()), line.rstrip(), code=True))
            continue
        if markdown:
            line = re.sub(r"^\s*(?:>\s?)+", "", line)
            under = (
                not fresh
                and line.strip()
                and not line.strip(" \t=-")
                and TITLE.match(found[-1].text)
            )
            if match := FENCE.match(line):
                fence, fresh = match[1], True
                continue
            if (match := ATX_HEADING.match(line)) or under:
                level, said = (
                    (len(match[1]), match[2] or "")
                    if match
                    else (1 if "=" in line else 2, found.pop().text)
                )
                headings = {above: heading for above, heading in headings.items() if above < level}
                headings |= {level: " ".join(plain(said).split())} if said else {}
                fresh = True
                continue
        if not line.strip(RULED if markdown else None) or (markdown and TARGET.match(line)):
            fresh = True
        elif fresh or OWN_LINE.match(line):
            found.append(Block(tuple(headings.values()), line))
            fresh = False
        else:
            found[-1] = found[-1]._replace(text=f"{found[-1].text}\n{line}")
    return [
        block if block.code or not markdown else block._replace(text=plain(block.text))
        for block in found
    ]


def plain(text: str) -> str:
    """Markdown's inline marks removed: the words of a link or picture, of emphasis and of code
    remain.
    """
    return INLINE.sub(lambda match: match[1] or plain(match[2] or match[4] or match[6] or ""), text)


def cut_blocks(blocks: list[Block]) -> list[Unit]:
    units: list[Unit] = []
    above: tuple[str, ...] = ()
    for block in blocks:
        shared = next(
            (
                i
                for i, pair in enumerate(zip(above, block.headings, strict=False))
                if pair[0] != pair[1]
            ),
            len(above),
        )
        new = " > ".join(block.headings[shared:]) if above != block.headings else ""
        price, joint = (
            SENTENCE if block.code and not new else PARAGRAPH,
            f"\n{new}\n" if new else "\n",
        )
        for sentence in [block.text] if block.code else SENTENCE_END.split(block.text):
            for piece in pieces(sentence, keep=block.code):
                units.append(Unit(block.headings, piece, len(piece.split()), price, joint))
                price, joint = INSIDE, " "
            price = SENTENCE
        above = block.headings
    return units


def pieces(sentence: str, keep: bool) -> list[str]:
    """A sentence on one line, in equal pieces of at most PIECE words; a line of code that is short
    enough as it is.
    """
    words = sentence.split()
    if keep and len(words) <= PIECE:
        return [sentence]
    count = -(-len(words) // PIECE)
    return [
        " ".join(words[len(words) * i // count : len(words) * (i + 1) // count])
        for i in range(count)
    ]


def runs(units: list[Unit]) -> list[list[Unit]]:
    """The cheapest passages. best[n] is the cost of the first n units, begins[n] where their last
    passage begins.
    """
    best, begins = [0.0], [0]
    for end in range(1, len(units) + 1):
        words, crossed, options = 0, 0.0, []
        for begin in range(end - 1, -1, -1):
            unit = units[begin]
            words += unit.words
            if words > MOST and options:
                break
            cost = (words - GOAL) ** 2 + crossed + unit.price + TOO_SHORT * (words < LEAST)
            options.append((best[begin] + cost, begin))
            if heading := unit.joint.split():  # a passage that begins further up runs across it
                words, crossed = words + len(heading), crossed + HEADING
        cost, begin = min(options)
        best.append(cost)
        begins.append(begin)
    found, end = [], len(units)
    while end:
        found.append(units[begins[end] : end])
        end = begins[end]
    return found[::-1]


DEMO = """---
title: Kelmouth
author: nobody
---
# Kelmouth
Kelmouth is a harbour town in [Norland](https://norland.example/places). It was founded by **Ana Bell**, who came with two
ships and a [map](map.png) that Dr. J. Orr had drawn.

## The bell
The bell of the harbour was cast in the year after the great flood. It hangs in the old tower, and is rung when a ship of
the Tidewerk comes in. Visitors may climb the tower on the first day of each month; children need a grown person with them.
The rope is replaced every seven years, and pieces of the old rope are given to the schools of the town.

## Tides
```python
# not a heading: two high waters a day
tide = [3.1, 0.4] * 2
```
- Spring tides reach the market square. The stalls are then set up in Mill Lane, as they were in the days of Ana Bell.
- Neap tides leave the inner harbour dry, and the boats of the fishers lie on their sides until the evening water comes.
"""


def main() -> None:
    for number, (title, text) in enumerate(passages(DEMO, "kelmouth.md", markdown=True), 1):
        print(f"#{number}  {title}  ({len(text.split())} words)\n{text}\n")


if __name__ == "__main__":
    run_main(main)
