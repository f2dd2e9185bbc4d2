"""Tests retrievers/index.py: BM25's index on disk equals the one in memory or is rejected."""

import fcntl
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import message
from processes import wait_until

import retriever
from data import Document
from errors import InputError
from formats.manifest import seal
from formats.records import append_jsonl
from retriever import BM25, make_retriever
from retrievers import index
from retrievers.serve import command

TEXTS = ["cat sat", "the dog ran", "a bird, a bird", "", "ünï 鐘 cat", "x\ty"]
CORPUS = [Document(str(i), f"t{i % 2}", text) for i, text in enumerate(TEXTS)]
REBUILD = "remove this one so that it is built again"


@pytest.fixture
def folder(tmp_path):
    """Builds an index of CORPUS and returns the folder."""
    BM25(CORPUS, index=str(tmp_path / "deep" / "index"))
    return tmp_path / "deep" / "index"


def assert_rejected(folder, fragment, corpus=CORPUS, **parameters):
    """Asserts that the index is a one-line error with this fragment."""
    text = message(BM25, corpus, index=str(folder), **parameters)
    assert text.startswith(f"--index {folder}: ") and fragment in text, text


def test_a_second_start_maps_the_index_into_memory_and_finds_the_same(folder, monkeypatch):
    monkeypatch.setattr(retriever, "build", None)
    renamed = [
        Document(f"other {document.id}", document.title, document.text) for document in CORPUS
    ]
    stored = BM25(renamed, index=str(folder))
    monkeypatch.undo()
    memory = BM25(CORPUS)
    assert stored.vocabulary == memory.vocabulary and "鐘" in stored.vocabulary
    for query in ("cat", "a bird t1", "鐘 ünï", "unknown", ""):
        assert stored.scores(query).tolist() == memory.scores(query).tolist()
        assert [d.text for d in stored.best(query, 9)] == [d.text for d in memory.best(query, 9)]
    for array in (stored.start, stored.postings, stored.weights):
        assert isinstance(array.base, np.memmap) and not array.flags.writeable


@pytest.mark.parametrize(
    "corpus, parameters",
    [
        (CORPUS[::-1], {}),
        (CORPUS[:5], {}),
        # The same letters, but the title ends at another place.
        ([*CORPUS[:5], Document("5", "t1x", CORPUS[5].text[1:])], {}),
        (CORPUS, {"title_boost": 2}),
        (CORPUS, {"k1": 1.2}),
        (CORPUS, None),  # None: an index of another version
    ],
)
def test_an_index_of_other_documents_parameters_or_version_is_rejected(
    folder, monkeypatch, corpus, parameters
):
    if parameters is None:
        monkeypatch.setattr(index, "VERSION", 0)
    assert_rejected(folder, "built from other documents or param", corpus, **parameters or {})
    assert_rejected(folder, REBUILD, corpus, **parameters or {})


def test_a_folder_of_other_files_and_a_path_that_cannot_be_written_are_rejected(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("mine")
    assert_rejected(tmp_path / "texts", "it has no manifest.json")
    seal(tmp_path / "texts", 3)  # now it has a manifest, as a checkpoint has
    assert_rejected(tmp_path / "texts", REBUILD)
    assert_rejected(tmp_path / "texts" / "a.txt" / "index", "cannot be written there")
    assert (tmp_path / "texts" / "a.txt").read_text() == "mine"


def test_a_build_that_fails_leaves_no_folder_and_the_next_build_succeeds(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(InputError, match=r"cannot be saved .*No space left.*: make room"):
            BM25(CORPUS, index=str(folder))
    assert [path.name for path in tmp_path.iterdir()] == [".index.lock"]
    assert BM25(CORPUS, index=str(folder)).best("dog", 1)[0].id == "1"


def test_if_several_start_together_only_one_builds_the_index(tmp_path, monkeypatch):
    built, build, waiting, lock = [], retriever.build, [], fcntl.flock

    def slow(*arguments):
        built.append(wait_until(lambda: len(waiting) == 4))
        return build(*arguments)

    monkeypatch.setattr(
        fcntl, "flock", lambda *arguments: waiting.append(arguments) or lock(*arguments)
    )
    monkeypatch.setattr(retriever, "build", slow)
    with ThreadPoolExecutor(4) as pool:
        retrievers = [pool.submit(BM25, CORPUS, index=str(tmp_path / "index")) for _ in range(4)]
    assert [one.result().best("dog", 1)[0].id for one in retrievers] == ["1"] * 4 and len(
        built
    ) == 1


def test_the_command_check_stores_the_index(tmp_path):
    append_jsonl(tmp_path / "c.jsonl", map(vars, CORPUS[:3]))
    words = ["check", "--corpus", f"{tmp_path}/c.jsonl", "--index", f"{tmp_path}/stored"]
    with pytest.raises(SystemExit):
        command(words, make_retriever)
    assert (tmp_path / "stored" / "manifest.json").exists()
