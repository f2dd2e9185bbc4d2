"""Tests text_folder.py: the passages of texts, and the files of a folder."""

from conftest import message

from data import Document, load_corpus


def test_a_folder_of_texts_is_a_corpus_of_passages_of_100_words(tmp_path):
    words = [f"w{number}" for number in range(150)]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bell.md").write_text("On bells.\n# Ringing #\nIt\nrings.")
    (tmp_path / "a notes.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(words).encode())
    (tmp_path / ".git").mkdir()
    (tmp_path / "c.TXT").write_text("Loud.")
    for name in ("b/table.csv", "README", ".git/notes.md", "b/.hidden.txt"):
        (tmp_path / name).write_text("Not this.")
    (tmp_path / "empty.txt").write_text("")
    notes = [
        Document("a notes.txt#1", "a notes", " ".join(words[:100])),
        Document("a notes.txt#2", "a notes", " ".join(words[100:])),
    ]
    bells = [
        Document("b/bell.md#1", "bell", "On bells."),
        Document("b/bell.md#2", "bell > Ringing", "It rings."),
    ]
    assert load_corpus(tmp_path) == [*notes, *bells, Document("c.TXT#1", "c", "Loud.")]
    assert load_corpus(tmp_path / "a notes.txt") == notes
    (tmp_path / "empty").mkdir()
    assert "no text in .txt or .md files" in message(load_corpus, tmp_path / "empty")
    (tmp_path / "old.txt").write_bytes("é".encode("latin-1"))
    told = message(load_corpus, tmp_path)
    assert "old.txt: " in told and told.endswith("save it as UTF-8")


def test_a_text_without_blanks_is_split_after_200_characters(tmp_path):
    (tmp_path / "海.txt").write_text("東京" * 150 + "。", encoding="utf-8")
    texts = [document.text for document in load_corpus(tmp_path)]
    assert texts == ["東京" * 100, "東京" * 50 + "。"]
