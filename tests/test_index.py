"""retrievers/index.py: BM25's index on disk is the one in memory, or it is refused in one line."""

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
    """An index of CORPUS."""
    BM25(CORPUS, index=str(tmp_path / "deep" / "index"))
    return tmp_path / "deep" / "index"


def refused(folder, fragment, corpus=CORPUS, **parameters):
    text = message(BM25, corpus, index=str(folder), **parameters)
    assert text.startswith(f"--index {folder}: ") and fragment in text, text


def test_a_second_start_maps_the_index_builds_nothing_and_finds_the_same(folder, monkeypatch):
    monkeypatch.setattr(retriever, "build", None)
    renamed = [Document(f"other {one.id}", one.title, one.text) for one in CORPUS]
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
        # the same letters, the border between title and text elsewhere
        ([*CORPUS[:5], Document("5", "t1x", CORPUS[5].text[1:])], {}),
        (CORPUS, {"title_boost": 2}),
        (CORPUS, {"k1": 1.2}),
        (CORPUS, None),  # of another version
    ],
)
def test_an_index_of_other_passages_parameters_or_version_is_refused(
    folder, monkeypatch, corpus, parameters
):
    if parameters is None:
        monkeypatch.setattr(index, "VERSION", 0)
    refused(folder, "built from other documents or param", corpus, **parameters or {})
    refused(folder, REBUILD, corpus, **parameters or {})


def test_a_folder_of_something_else_and_a_place_without_room_are_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("mine")
    refused(tmp_path / "texts", "it has no manifest.json")
    seal(tmp_path / "texts", 3)  # as a checkpoint is
    refused(tmp_path / "texts", REBUILD)
    refused(tmp_path / "texts" / "a.txt" / "index", "cannot be written there")
    assert (tmp_path / "texts" / "a.txt").read_text() == "mine"


def test_a_build_that_fails_leaves_no_folder_and_the_next_one_is_whole(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(InputError, match=r"cannot be saved .*No space left.*: make room"):
            BM25(CORPUS, index=str(folder))
    assert [path.name for path in tmp_path.iterdir()] == [".index.lock"]
    assert BM25(CORPUS, index=str(folder)).best("dog", 1)[0].id == "1"


def test_of_several_that_start_together_one_builds(tmp_path, monkeypatch):
    built, real, waiting, lock = [], retriever.build, [], fcntl.flock

    def slow(*given):
        built.append(wait_until(lambda: len(waiting) == 4))
        return real(*given)

    monkeypatch.setattr(fcntl, "flock", lambda *given: waiting.append(given) or lock(*given))
    monkeypatch.setattr(retriever, "build", slow)
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(BM25, CORPUS, index=str(tmp_path / "index")) for _ in range(4)]
    assert [one.result().best("dog", 1)[0].id for one in made] == ["1"] * 4 and len(built) == 1


def test_the_check_stores_the_index_that_it_is_given(tmp_path):
    append_jsonl(tmp_path / "c.jsonl", map(vars, CORPUS[:3]))
    words = ["check", "--corpus", f"{tmp_path}/c.jsonl", "--index", f"{tmp_path}/stored"]
    with pytest.raises(SystemExit):
        command(words, make_retriever)
    assert (tmp_path / "stored" / "manifest.json").exists()
