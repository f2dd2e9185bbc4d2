"""Tests text_folder.py: the length of passages, the reading of Markdown, and the files read."""

import gzip
import os
import random

import pytest
from conftest import message

from data import Document, load_corpus
from formats.text_folder import SENTENCE_END, joined, passages


def words(count, first=0):
    """Returns a sentence of this many words, all different."""
    return " ".join(f"w{first + i}" for i in range(count)).capitalize() + "."


def lengths(text, **options):
    """Returns the number of words of each passage of the text."""
    return [len(passage.split()) for _, passage in passages(text, "notes", **options)]


def markdown(text):
    return passages(text, "notes", markdown=True)


def test_a_short_text_is_one_passage_and_a_text_without_words_is_none():
    text = "Ana Bell founded\nKelmouth."
    assert passages(text, "notes") == [("notes", "Ana Bell founded Kelmouth.")]
    assert passages(" \n\n\t\n", "notes") == markdown("# Only a heading\n") == []


def test_a_passage_takes_paragraphs_until_it_has_100_words_and_never_more_than_150():
    # 60 + 60 reach 100. 90 stays alone because 90 + 70 would be 160. 70 + 50 reach 100, so the last
    # 40 are a passage of their own.
    assert lengths("\n\n".join(map(words, [60, 60, 90, 70, 50, 40]))) == [120, 90, 120, 40]


def test_a_long_paragraph_is_cut_between_sentences_and_a_long_sentence_between_words():
    sentences = [words(30, 100 * i) for i in range(10)]
    cut = [passage for _, passage in passages(" ".join(sentences), "notes")]
    assert [len(passage.split()) for passage in cut] == [120, 120, 60]
    assert all(passage.endswith(".") for passage in cut)
    assert lengths(words(250)) == [100, 100, 50]


def test_every_passage_but_the_last_has_50_to_150_words_in_random_texts():
    rng = random.Random(0)
    for _ in range(200):
        text = ""
        for _ in range(rng.randint(3, 30)):
            text += words(rng.choice([1, 3, 12, 30, 49, 51, 149, 400]))
            text += rng.choice([" ", " ", "\n\n", "\n- "])
        counts = lengths(text, markdown=True)
        assert all(50 <= size <= 150 for size in counts[:-1]) and counts[-1] <= 150, text


def test_no_word_is_lost_or_doubled():
    rng = random.Random(1)
    sentences = [words(rng.randint(1, 120), 200 * i) for i in range(100)]
    text = "".join(sentence + rng.choice([" ", "\n\n"]) for sentence in sentences)
    assert " ".join(passage for _, passage in passages(text, "notes")).split() == text.split()


def test_the_pattern_of_a_sentence_end_ignores_abbreviations_and_decimals():
    two_sentences = [
        "Ana came. Bo left.",
        '"Come." Bo left.',
        "It rang (twice.) Then not.",
        "She did! Did he?",
    ]
    one_sentence = ["Bells, e.g. bells of Bo, ring.", "It weighs 3.5 tons.", "Well... it rang."]
    assert [len(SENTENCE_END.split(text)) for text in two_sentences + one_sentence] == [2] * 4 + [
        1
    ] * 3


def test_headings_become_titles_and_the_first_heading_is_the_title_of_the_file():
    body = words(80)
    text = f"# Guide\n{body}\n## Install ##\n{body}\n### Linux\n{body}\n## Use\n{body}\n"
    titles = ["Guide", "Guide > Install", "Guide > Install > Linux", "Guide > Use"]
    assert [title for title, _ in markdown(text)] == titles
    late = f"{body}\n\n## Late\n{body}"
    assert [title for title, _ in markdown(late)] == ["Late", "Late"]


def test_a_heading_inside_a_passage_stays_as_a_line():
    text = f"# Guide\n{words(30)}\n## Install\n### Linux\n{words(30)}"
    assert markdown(text) == [("Guide", f"{words(30)}\nInstall > Linux\n{words(30)}")]


def test_code_keeps_its_lines_and_is_not_searched_for_headings():
    code = "# no heading\n  make *all* [x](y).   Yes\n\n~~~"
    text = f"Run:\n```sh\n{code}\n```\nDone.\n\n~~~\nopen # to the end"
    expected = "Run:\n# no heading\n  make *all* [x](y).   Yes\n~~~\nDone.\nopen # to the end"
    assert markdown(text) == [("notes", expected)]


def test_a_link_keeps_its_words_and_loses_its_target():
    for text, expected in {
        'see [the map](http://x/Bell_(a) "t") now': "see the map now",
        "![a bell](bell.png) rings [1]": "a bell rings [1]",
        "`a[0][1]` and f(x)": "`a[0][1]` and f(x)",
    }.items():
        assert joined([text], markdown=True) == expected and joined([text], markdown=False) == text


def test_list_items_and_table_rows_become_lines():
    lines = ["- one more", "- two", "| a | b |", "| 1 | 2 |"]
    assert markdown("- one\n  more\n- two\n| a | b |\n| 1 | 2 |")[0][1].split("\n") == lines
    # Plain text is not read as Markdown.
    assert passages("# 5 *is* [a](b)\nx", "notes") == [("notes", "# 5 *is* [a](b) x")]


@pytest.mark.parametrize(
    "piece", '[|[a](|`|![a]|[a [b] |#|> |("|- |a. |[a]: |# \n|[a](b('.split("|")
)
def test_no_pattern_takes_quadratic_time(piece):  # a pattern of quadratic time would take hours
    passages(piece * 50_000, "notes", markdown=True)


# --------------------------------------------------------------------------------- folders of texts


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def ids(*arguments, **options):
    return [document.id for document in load_corpus(*arguments, **options)]


def test_a_folder_of_texts_is_a_corpus_in_the_order_of_the_file_names(write, tmp_path):
    write("b/bell.MD", "# Bells\nThe bell [rings](http://x).")
    write("a notes.txt", b"\xef\xbb\xbfAna came.\r\nShe stayed.\r\n")
    for name in (".hidden.txt", ".git/x.md", "b/table.csv", "README"):
        write(name, "Not this.")
    write("z.md.gz", gzip.compress(b"Packed."))
    assert load_corpus(tmp_path) == [
        Document("a notes.txt#1", "a notes", "Ana came. She stayed."),
        Document("b/bell.MD#1", "Bells", "The bell rings."),
        Document("z.md.gz#1", "z", "Packed."),
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.md", "[Ana](x) came.", Document("a.md#1", "a", "Ana came.")),
        ("a.txt", "[1] Ana came.", Document("a.txt#1", "a", "[1] Ana came.")),
        ("c.txt", '{"id": "7", "title": "A", "text": "x"}', Document("7", "A", "x")),
        ("c.txt", "7\tx", Document("7", "", "x")),
    ],
)
def test_one_text_file_is_a_corpus_and_a_txt_file_may_hold_records(write, name, content, expected):
    assert load_corpus(write(name, content)) == [expected]


def test_texts_without_words_are_left_out_and_counted(write, tmp_path, capsys):
    for name, text in {"a.txt": "Ana came.", "b.txt": "", "c.md": "# Only a heading"}.items():
        write(name, text)
    assert ids(tmp_path) == ["a.txt#1"]
    error = capsys.readouterr().err
    assert "2 of 3 files skipped; the first: " in error and "b.txt: no words in it" in error


def test_a_text_that_is_not_utf8_is_named_and_can_be_skipped(write, tmp_path, capsys):
    path = write("b.txt", b"One.\ncaf\xe9.")
    write("a.txt", "Ana came.")
    text = message(load_corpus, tmp_path)
    assert f"{path}: byte 9 is not UTF-8" in text and text.endswith("with --skip_bad")
    assert ids(tmp_path, skip_bad=True) == ["a.txt#1"]
    assert "1 of 2 files skipped" in capsys.readouterr().err
    (tmp_path / "a.txt").unlink()
    path.rename(tmp_path / "b.rst")
    assert "no file in it ends in .txt or .md" in message(load_corpus, tmp_path)


def test_a_linked_file_is_read_and_a_linked_folder_or_a_pipe_is_not(write, tmp_path):
    write("here/a.txt", "Ana came.")
    there, here = write("there/b.txt", "Bo left."), tmp_path / "here"
    (here / "loop").symlink_to(here)  # following it would never end
    (here / "b.txt").symlink_to(there)
    os.mkfifo(here / "pipe.txt")  # opening it would wait forever
    assert ids(here) == ["a.txt#1", "b.txt#1"]


def test_a_file_name_that_is_not_utf8_gives_an_id_that_can_be_written(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "wb") as file:
        file.write(b"Ana came.")
    (document,) = load_corpus(tmp_path)
    assert document.id.encode() == b"caf?.txt#1" and document.title.encode()
