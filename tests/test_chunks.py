"""chunks.py: what a passage holds and how long it is, what Markdown becomes, and texts that would
make a slow pattern hang.
"""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from formats.text_folder import SENTENCE_END, cut_blocks, passages, plain, read_blocks, runs

ROOT = Path(__file__).resolve().parents[1]


def words(count, first=0):
    """A sentence of so many words, all different."""
    return " ".join(f"w{first + i}" for i in range(count)).capitalize() + "."


def lengths(text, **how):
    return [len(passage.split()) for _, passage in passages(text, "notes", **how)]


def titles(text):
    return [title for title, _ in passages(text, "notes", markdown=True)]


# ---------------------------------------------------------------------------------- where it is cut


def test_a_short_text_is_one_passage_under_its_name():
    assert passages("Ana Bell founded\nKelmouth.", "notes") == [
        ("notes", "Ana Bell founded Kelmouth.")
    ]


def test_a_text_without_words_has_no_passage():
    assert (
        passages(" \n\n\t\n", "notes")
        == passages("# Only a heading\n---\n", "notes", markdown=True)
        == []
    )


def test_cuts_stand_at_paragraph_ends_rather_than_at_sentence_ends():
    # 87 + 113 costs 2 · 13² = 338, less than the 400 of a cut between sentences; 80 + 120 costs 2 ·
    # 20² = 800, more.
    assert lengths(words(87) + "\n\n" + words(13) + " " + words(100)) == [87, 113]
    assert lengths(words(80) + "\n\n" + words(20) + " " + words(100)) == [100, 100]


def test_cuts_stand_at_sentence_ends_rather_than_in_sentences():
    sentences = [words(30, 100 * i) for i in range(10)]
    found = [passage for _, passage in passages(" ".join(sentences), "notes")]
    assert " ".join(found) == " ".join(sentences) and all(
        passage.endswith(".") for passage in found
    )
    assert sorted(len(passage.split()) for passage in found) == [90, 90, 120]


def test_a_sentence_that_is_longer_than_a_passage_is_cut_between_words():
    text = words(1000)
    found = [passage for _, passage in passages(text, "notes")]
    assert " ".join(found) == text and all(50 <= len(passage.split()) <= 150 for passage in found)


def test_every_passage_has_50_to_150_words_whatever_the_text_is_like():
    rng = random.Random(0)
    for _ in range(200):
        parts = [
            words(rng.choice([1, 3, 12, 30, 49, 51, 149, 400]))
            + rng.choice([" ", " ", "\n\n", "\n- ", "\n# H\n"])
            for _ in range(rng.randint(3, 30))
        ]
        text = "".join(parts)
        found = lengths(text, markdown=True)
        assert all(50 <= count <= 150 for count in found) or len(found) == 1, (found, text)


def test_nothing_is_lost_and_nothing_is_said_twice():
    rng = random.Random(1)
    text = "\n\n".join(
        " ".join(words(rng.randint(1, 60), 100 * (5 * p + s)) for s in range(5)) for p in range(20)
    )
    assert " ".join(passage for _, passage in passages(text, "notes")).split() == text.split()


def test_the_cuts_are_the_cheapest_that_there_are():
    rng = random.Random(2)
    for _ in range(20):
        text = "".join(
            words(rng.randint(20, 49)) + rng.choice([" ", "\n\n", "\n# H\n"]) for _ in range(8)
        )
        units = cut_blocks(read_blocks(text, markdown=True))

        def cost(run):
            count = sum(unit.words for unit in run) + sum(
                len(unit.joint.split()) for unit in run[1:]
            )
            crossed = sum(5000 for unit in run[1:] if unit.joint.strip())
            return (
                (count - 100) ** 2
                + crossed
                + run[0].price
                + (count < 50) * 1e9
                + (count > 150 and len(run) > 1) * 1e12
            )

        def every(rest):  # all 2^(n - 1) ways to cut
            return (
                [[]]
                if not rest
                else [
                    [rest[:i], *more] for i in range(1, len(rest) + 1) for more in every(rest[i:])
                ]
            )

        assert sum(map(cost, runs(units))) == min(sum(map(cost, way)) for way in every(units))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Ana came. Bo left.", 2),
        ("Did Ana come? She did!", 2),
        ('"Come." Bo left.', 2),
        ("It rang (twice.) Then not.", 2),
        ("Dr. Orr came.", 1),
        ("J. Orr came.", 1),
        ("The U.S. Mint closed.", 1),
        ("Bells, e.g. Bo's bell, ring.", 1),
        ("It weighs 3.5 tons.", 1),
        ("Well... it rang.", 1),
        ("Mrs. Bell and Mr. Orr.", 1),
    ],
)
def test_where_a_sentence_ends(text, count):
    assert len(SENTENCE_END.split(text)) == count


# ----------------------------------------------------------------------------------------- Markdown


def test_headings_become_the_title_and_the_first_one_is_the_files():
    body = words(80)
    text = (
        f"# Guide\n{body}\n## Install ##\n{body}\n### Linux\n{body}\n##"
        f" Use\n{body}\n\nSecond\n======\n{body}\n---\n"
    )
    # below a short line "---" makes a heading of it, below a paragraph it is a rule
    text += f"Third\n---\n{body}\n"
    assert titles(text) == [
        "Guide",
        "Guide > Install",
        "Guide > Install > Linux",
        "Guide > Use",
        "Guide > Second",
        "Guide > Second > Third",
    ]
    assert titles(body) == ["notes"] and titles(f"{body}\n\n## Late\n{body}") == ["Late", "Late"]


def test_a_heading_inside_of_a_passage_stays_as_a_line():
    text = "# Guide\n" + words(30) + "\n## Install\n### Linux\n" + words(30)
    assert passages(text, "notes", markdown=True) == [
        ("Guide", f"{words(30)}\nInstall > Linux\n{words(30)}")
    ]


def test_front_matter_gives_the_title_and_nothing_else():
    assert passages('---\ntitle: "The bell"\ndate: 1\n---\nIt rang.\n', "notes", markdown=True) == [
        ("The bell", "It rang.")
    ]
    assert passages("---\ndate: 1\n---\nIt rang.", "notes", markdown=True) == [
        ("notes", "It rang.")
    ]
    assert passages("---\nIt rang.\n\n---\nTwice.", "notes", markdown=True) == [
        ("notes", "It rang.\nTwice.")
    ]  # two rules


def test_code_keeps_its_lines_and_its_marks_and_holds_no_heading():
    text = (
        "Run:\n```sh\n# not a heading\n  make *all* [x](y).   Yes\n\n~~~\n```\nDone.\n\n~~~\nopen #"
        " to the end"
    )
    assert passages(text, "notes", markdown=True) == [
        (
            "notes",
            "Run:\n# not a heading\n  make *all* [x](y).   Yes\n~~~\nDone.\nopen # to the end",
        )
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('see [the map](http://x/Bell_(a) "t") now', "see the map now"),
        ("![a bell](bell.png) rings, [so][1]", "a bell rings, so"),
        ("[![build](b.svg)](http://x)", "build"),
        ("**bold**, *it*, __b__, _i_, ***both***", "bold, it, b, i, both"),
        ("`__init__` and snake_case_name, 2 * 3 * 4", "__init__ and snake_case_name, 2 * 3 * 4"),
        ("`<think>` begins <b>it</b><!-- not this -->", "<think> begins it"),
        ("**[Ana](u)** [1] said x < y > z", "Ana [1] said x < y > z"),
    ],
)
def test_inline_marks_go_and_their_words_stay(text, expected):
    assert plain(text) == expected


def test_lists_quotes_and_tables_are_lines_and_link_targets_and_rules_are_gone():
    text = (
        "> A quote\n> goes on.\n\n- one\n  more\n- two\n---\n| a | b |\n|---|:-:|\n| 1 | 2"
        " |\n\n[1]: x.png\n[^1]: a note"
    )
    assert passages(text, "notes", markdown=True)[0][1].split("\n") == [
        "A quote goes on.",
        "- one more",
        "- two",
        "| a | b |",
        "| 1 | 2 |",
        "[^1]: a note",
    ]


def test_plain_text_is_not_read_as_markdown():
    assert passages("# 5 *is* [a](b)\n===\nx", "notes") == [("notes", "# 5 *is* [a](b) === x")]


@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "[a](",
        "*a ",
        "_a",
        "`",
        "<!--",
        "<a ",
        "![a]",
        "[a [b] ",
        "#",
        "> ",
        '("',
        "- ",
        "a. ",
        "[a]: ",
        "# \n",
    ],
)
def test_no_pattern_takes_forever(piece):
    begin = time.perf_counter()
    passages(piece * 20_000, "notes", markdown=True)
    assert time.perf_counter() - begin < 5


def test_the_file_shows_a_text_and_its_passages():
    output = subprocess.run(
        [sys.executable, "chunks.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (
        "#1  Kelmouth  (100 words)" in output
        and "#2  Kelmouth > Tides" in output
        and "https" not in output
    )
