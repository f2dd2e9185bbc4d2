"""Tests text_folder.py: the length of passages, headings as titles, and the files read."""

import random

import pytest
from conftest import message

from data import Document, load_corpus
from formats.text_folder import passages, sections


def words(count, first=0):
    """Returns a sentence of this many words, all different."""
    return " ".join(f"w{first + i}" for i in range(count)).capitalize() + "."


def test_a_passage_ends_with_a_sentence_after_100_words_at_the_latest_after_150():
    def lengths(*counts):
        return [len(passage.split()) for passage in passages(" ".join(map(words, counts)))]

    assert lengths(30, 30, 30, 30, 30) == [120, 30]
    assert lengths(250) == [150, 100]
    assert lengths() == []
    listed = f"{words(99)}\n- one\n\n- {words(40)}"  # a paragraph ends after "one", 101 words
    assert [len(passage.split()) for passage in passages(listed)] == [101, 41]


def test_no_word_is_lost_or_doubled():
    rng = random.Random(1)
    sentences = [words(rng.randint(1, 120), 200 * i) for i in range(100)]
    text = "".join(sentence + rng.choice([" ", "\n\n"]) for sentence in sentences)
    cut = list(passages(text))
    assert " ".join(cut).split() == text.split()
    assert all(100 <= len(passage.split()) <= 150 for passage in cut[:-1])


def test_headings_become_titles_and_links_lose_their_targets():
    text = "See [the map](http://x).\n# Guide\nRead.\n\n## Install ##\n#tag\n5 # 6"
    assert list(sections(text, "notes")) == [
        ("notes", "See the map.\n"),
        ("notes > Guide", "\nRead.\n\n"),
        ("notes > Install", "\n#tag\n5 # 6"),
    ]


@pytest.mark.parametrize("piece", ["[", "[a](", "# ", "# \n", "![a]", ". ", "\n ", '."'])
def test_no_pattern_takes_quadratic_time(piece):  # a pattern of quadratic time would take hours
    for _, section in sections(piece * 50_000, "notes"):
        list(passages(section))


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_a_folder_of_texts_is_a_corpus_in_the_order_of_the_file_names(write, tmp_path):
    write("b/bell.md", "# Bells\nThe bell [rings](http://x).")
    notes = write("a notes.txt", b"\xef\xbb\xbfAna came.\r\nShe stayed.\r\n# 5 [a](b)")
    for name in (".hidden.txt", ".git/x.md", "b/table.csv", "README"):
        write(name, "Not this.")
    write("empty.txt", "")
    text = Document("a notes.txt#1", "a notes", "Ana came.\nShe stayed.\n# 5 [a](b)")
    bells = Document("b/bell.md#1", "bell > Bells", "The bell rings.")
    assert load_corpus(tmp_path) == [text, bells]
    assert load_corpus(notes) == [text]


def test_a_text_that_is_not_utf8_is_named_and_a_folder_without_words_is_an_error(write, tmp_path):
    path = write("b.txt", b"One.\ncaf\xe9.")
    assert f"{path}: 'utf-8' codec" in message(load_corpus, tmp_path)
    path.write_text("")
    assert "no words in a .txt or .md file" in message(load_corpus, tmp_path)
