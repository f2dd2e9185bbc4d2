"""retrievers/index.py: BM25's index on disk is the one in memory, or it is refused in one line."""

import fcntl
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import command_line, message
from processes import wait_until

import retriever
from data import Document
from errors import InputError
from formats.manifest import seal
from retriever import BM25, make_retriever
from retrievers import index
from retrievers.serve import command

TEXTS = ["cat sat", "the dog ran", "a bird, a bird", "", "ünï 鐘 cat", "x\ty"]
CORPUS = [Document(str(i), f"t{i % 2}", text) for i, text in enumerate(TEXTS)]


@pytest.fixture
def folder(tmp_path):
    """An index of CORPUS."""
    BM25(CORPUS, index=str(tmp_path / "deep" / "index"))
    return tmp_path / "deep" / "index"


def refused(folder, said, corpus=CORPUS, **parameters):
    told = message(BM25, corpus, index=str(folder), **parameters)
    assert told.startswith(f"--index {folder}: ") and said in told, told


def test_a_second_start_maps_the_index_builds_nothing_and_finds_the_same(folder, monkeypatch):
    monkeypatch.setattr(retriever, "build", None)
    renamed = [Document(f"other {one.id}", one.title, one.text) for one in CORPUS]
    kept = BM25(renamed, index=str(folder))
    monkeypatch.undo()
    memory = BM25(CORPUS)
    assert kept.vocabulary == memory.vocabulary and "鐘" in kept.vocabulary
    for query in ("cat", "a bird t1", "鐘 ünï", "unknown", ""):
        assert kept.scores(query).tolist() == memory.scores(query).tolist()
        assert [d.text for d in kept.best(query, 9)] == [d.text for d in memory.best(query, 9)]
    for array in (kept.start, kept.postings, kept.weights):
        assert isinstance(array.base, np.memmap) and not array.flags.writeable


def test_an_index_of_other_passages_parameters_or_version_is_refused(folder, monkeypatch):
    told = "remove this one so that it is built again"
    refused(folder, "its corpus is 6 passages, sha256 ", CORPUS[::-1])
    refused(folder, "not 5 passages, sha256 ", CORPUS[:5])
    # the same letters, the border between title and text elsewhere
    refused(folder, told, [*CORPUS[:5], Document("5", "t1x", CORPUS[5].text[1:])])
    refused(folder, "its k1, b, epsilon, title_boost is (1.5, 0.75, 0.25, 1)", title_boost=2)
    refused(folder, "not (1.2, 0.75, 0.25, 1)", k1=1.2)
    monkeypatch.setattr(index, "VERSION", 2)
    refused(folder, "its version is 1, Unicode ")
    refused(folder, told)


def test_an_index_that_is_cut_is_refused(folder):
    (folder / "weights.npy").write_bytes(bytes(90))  # test_checkpoints.py has more faults
    refused(folder, "weights.npy has 90 bytes")


def test_what_is_no_index_or_no_place_for_one_is_refused_and_left_alone(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("mine")
    refused(tmp_path / "texts", "it has no manifest.json")
    seal(tmp_path / "texts", 3)  # as a checkpoint is
    refused(tmp_path / "texts", "its version is None, not 1")
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
    assert len(json.loads((folder / "words.json").read_text())) == 13


def test_of_several_that_start_together_one_builds(tmp_path, monkeypatch):
    built, real, came, lock = [], retriever.build, [], fcntl.flock

    def slow(*given):
        built.append(wait_until(lambda: len(came) == 4))
        return real(*given)

    monkeypatch.setattr(fcntl, "flock", lambda *given: came.append(given) or lock(*given))
    monkeypatch.setattr(retriever, "build", slow)
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(BM25, CORPUS, index=str(tmp_path / "index")) for _ in range(4)]
    assert [its.result().best("dog", 1)[0].id for its in made] == ["1"] * 4 and len(built) == 1


def test_the_command_keeps_an_index_and_only_bm25_has_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(vars(one)) + "\n" for one in CORPUS[:3]))
    check = ["check", "--corpus", "c.jsonl", "--index", "kept"]
    with pytest.raises(SystemExit, match="0"):
        command(check, make_retriever)
    assert (tmp_path / "kept" / "manifest.json").exists()

    def told_by(*more):
        return command_line(lambda words: command(words, make_retriever), [*check, *more], capsys)

    told = told_by("--title_boost", 2)
    assert told.startswith("error: --index kept: its k1, b, epsilon, title_boost is (1.5, 0.75, ")
    told = told_by("--retriever", "web")
    assert "--index: only --retriever bm25 has this flag: leave it out" in told
