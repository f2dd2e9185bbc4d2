"""dense.py: the nearest passages against a full sort, and a file of vectors that is never half
believed.
"""

import doctest
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from data import Document
from errors import InputError
from retrievers import dense
from retrievers.dense import (
    DenseRetriever,
    make_tiny_encoder,
    nearest,
    passage_text,
    passage_vectors,
)
from retrievers.embed import Encoder

WORDS = (
    "ana bell born in kelmouth norland varen tidewerk ivo marr lantern storm coast river island map"
    " city harbour".split()
)


def invented(n, seed=0):
    """n passages of four to eleven words."""
    draw = np.random.default_rng(seed)
    return [
        Document(str(i), f"Title {i % 7}", " ".join(draw.choice(WORDS, draw.integers(4, 12))))
        for i in range(n)
    ]


class Hashed:
    """An encoder without a model: each text's vector is drawn from a seed that the text gives.
    Counts what it encodes, and stops before the passage with number `stop`.
    """

    name, version = "hashed", "1"

    def __init__(self, dimension=16, stop=None):
        self.dimension, self.stop, self.encoded = dimension, stop, []

    def queries(self, texts):
        rows = [
            np.random.default_rng(list(text.encode())).standard_normal(self.dimension)
            for text in texts
        ]
        return (np.array(rows) / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    def passages(self, texts):
        if self.stop is not None and len(self.encoded) + len(texts) > self.stop:
            raise KeyboardInterrupt
        self.encoded += texts
        return self.queries(texts)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Ten passages between two writes, and products of sixteen rows."""
    monkeypatch.setattr(dense, "BLOCK", 10)
    monkeypatch.setattr(dense, "CPU_ROWS", 16)


@pytest.fixture
def encoder(tmp_path):
    return Encoder(make_tiny_encoder(tmp_path / "tiny-bert", WORDS))


def files(folder):
    return sorted(Path(folder).iterdir())


def test_the_docstring_examples_are_true():
    assert doctest.testmod(dense).failed == 0


# ------------------------------------------------------------------------------------------ nearest


def whole_sort(matrix, queries, k):
    """All scores at once; a stable sort keeps ties in document order."""
    scores = queries @ matrix.astype(np.float32).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


@pytest.mark.parametrize("rows", [16, 32, 1000])
@pytest.mark.parametrize("k", [1, 5, 50, 80])
def test_blocks_find_what_a_sort_of_all_scores_finds(monkeypatch, rows, k):
    monkeypatch.setattr(dense, "CPU_ROWS", rows)
    draw = np.random.default_rng(k)
    matrix, queries = (
        draw.standard_normal((50, 8)).astype(np.float16),
        draw.standard_normal((3, 8)).astype(np.float32),
    )
    expected, best = whole_sort(matrix, queries, k)
    scores, found = nearest(torch.from_numpy(matrix), queries, k)
    assert np.array_equal(found, best) and np.allclose(scores, expected, atol=1e-5)
    assert scores.shape == (3, min(k, 50)) and scores.dtype == np.float32


@pytest.mark.parametrize("rows", [16, 32, 1000])
def test_ties_come_in_document_order_across_blocks(monkeypatch, rows):
    monkeypatch.setattr(dense, "CPU_ROWS", rows)
    # whole numbers, so that equal scores are equal to the bit: only -2, -1, 0, 1 and 2 occur, -0
    # among them
    matrix = np.random.default_rng(0).integers(-1, 2, (60, 2)).astype(np.float16)
    queries = np.array([[1, 1], [-1, 0], [0, 0], [0, -1]], np.float32)
    for k in (1, 10, 60):
        assert np.array_equal(
            nearest(torch.from_numpy(matrix), queries, k)[1], whole_sort(matrix, queries, k)[1]
        )


def test_a_score_comes_back_from_its_number_as_it_was():
    scores = torch.tensor([[-1.0, -0.5, -1e-30, -0.0, 0.0, 1e-30, 0.5, 1.0]])
    keys = dense.as_keys(scores, start=2**32 - 8)  # the last rows there may be
    assert torch.equal(dense.as_scores(keys), scores)
    assert keys[0].argsort().tolist() == [
        0,
        1,
        2,
        4,
        3,
        5,
        6,
        7,
    ]  # -0.0 and 0.0 tie: row 3 is the better of the two
    assert (dense.LAST_ROW - (keys & dense.LAST_ROW)).tolist() == [list(range(2**32 - 8, 2**32))]


def test_many_queries_get_smaller_blocks(monkeypatch):
    monkeypatch.setattr(dense, "CPU_ROWS", 1000)
    monkeypatch.setattr(dense, "SCORES", 700)  # 35 rows for 20 queries, and in sixteens 48
    matrix, queries = np.eye(100, dtype=np.float16), np.eye(100, dtype=np.float32)[:20]
    sizes, as_keys = [], dense.as_keys
    monkeypatch.setattr(
        dense,
        "as_keys",
        lambda scores, start: sizes.append(scores.numel()) or as_keys(scores, start),
    )
    assert nearest(torch.from_numpy(matrix), queries, 1)[1][:, 0].tolist() == list(range(20))
    assert sizes == [20 * 48, 20 * 48, 20 * 4]


def test_half_precision_on_disk_ranks_as_full_precision_within_its_bound():
    draw = np.random.default_rng(0)
    matrix, queries = (
        rows / np.linalg.norm(rows, axis=1, keepdims=True)
        for rows in draw.standard_normal((2, 2000, 64))
    )
    matrix, queries = matrix.astype(np.float32), queries[:20].astype(np.float32)
    exact, best = whole_sort(matrix, queries, 10)
    scores, rows = nearest(torch.from_numpy(matrix.astype(np.float16)), queries, 10)
    # a number is off by at most 2^-11 of itself and Σ |q v| <= 1; besides that, below 2^-14 by a
    # 2^-25 each, 64 times
    bound = 2**-11 + 64 * 2**-25
    assert np.abs(np.take_along_axis(queries @ matrix.T, rows, axis=1) - scores).max() <= bound
    assert np.abs(exact - scores).max() <= bound  # place by place
    changed = exact[
        rows != best
    ]  # two passages may only change places if their scores are that close
    assert (
        len(changed) <= 10
        and np.abs(np.take_along_axis(queries @ matrix.T, rows, axis=1) - exact).max() <= 2 * bound
    )


# ---------------------------------------------------------------------------------------- retriever


def test_a_passage_finds_itself_and_the_best_come_first(encoder):
    documents = invented(40)
    retriever = DenseRetriever(documents, encoder)
    assert retriever.needs_questions is False
    queries = [passage_text(document) for document in documents[:5]]
    found = retriever.search_scored(queries, 40)
    vectors, passages = (
        encoder.queries(queries),
        encoder.passages([passage_text(document) for document in documents]),
    )
    for row, vector, own in zip(found, vectors, documents, strict=False):
        scores = [score for _, score in row]
        assert row[0][0] == own and scores[0] == pytest.approx(1, abs=1e-3)
        assert (
            scores == sorted(scores, reverse=True)
            and len({document.id for document, _ in row}) == 40
        )
        assert all(
            score == pytest.approx(passages[int(document.id)] @ vector, abs=1e-3)
            for document, score in row
        )
    assert retriever.search(queries, 3) == [[document for document, _ in row[:3]] for row in found]


def test_a_passage_is_read_as_title_then_text():
    encoder = Hashed()
    DenseRetriever(
        [Document("1", "Ana Bell", "draws maps."), Document("2", "", "no title")], encoder
    )
    assert encoder.encoded == ["Ana Bell draws maps.", "no title"]


def test_too_few_passages_no_queries_and_no_k():
    encoder = Hashed()
    retriever = DenseRetriever(invented(4), encoder)
    assert [len(found) for found in retriever.search(["a", "b"], 9)] == [4, 4]
    assert retriever.search([], 3) == [] and retriever.search(["a", "b"], 0) == [[], []]


def test_equal_passages_come_in_document_order():
    documents = [
        Document(str(i), "Varen", "a city" if i % 3 == 0 else f"a river {i}") for i in range(30)
    ]
    found = DenseRetriever(documents, Hashed()).search(["Varen a city"], 10)[0]
    assert [document.id for document in found] == [str(i) for i in range(0, 30, 3)]


def test_an_empty_corpus_is_one_line():
    with pytest.raises(
        InputError, match="the corpus is empty: dense retrieval needs at least one passage"
    ):
        DenseRetriever([], Hashed())


def test_all_queries_of_a_call_are_one_batch(monkeypatch):
    retriever, calls, products = DenseRetriever(invented(20), Hashed()), [], []
    queries, as_keys = retriever.encoder.queries, dense.as_keys
    monkeypatch.setattr(
        retriever.encoder, "queries", lambda texts: calls.append(len(texts)) or queries(texts)
    )
    monkeypatch.setattr(
        dense,
        "as_keys",
        lambda scores, start: products.append(tuple(scores.shape)) or as_keys(scores, start),
    )
    assert retriever.search(["a", "b", "c"], 2) == [
        retriever.search([query], 2)[0] for query in "abc"
    ]
    assert calls == [3, 1, 1, 1] and products[:2] == [(3, 16), (3, 4)]


def test_a_search_in_a_thread_keeps_no_graph(encoder, monkeypatch):
    retriever = DenseRetriever(invented(20), encoder)
    expected, found, scores = retriever.search_scored(["ana bell", "storm"], 3), [], []
    retriever.matrix = retriever.matrix.float().requires_grad_(
        True
    )  # the worst that could be handed over
    as_keys = dense.as_keys
    monkeypatch.setattr(
        dense, "as_keys", lambda block, start: scores.append(block) or as_keys(block, start)
    )

    def ask():
        assert torch.is_grad_enabled()  # the caller's no_grad is not this thread's
        found.append(retriever.search_scored(["ana bell", "storm"], 3))

    with torch.no_grad():
        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert found == [expected] * 4
    assert all(block.grad_fn is None for block in scores)


# ------------------------------------------------------------------------------------- kept on disk


def test_the_second_time_nothing_is_encoded(tmp_path):
    documents = invented(37)
    first, second = Hashed(), Hashed()
    one, two = (
        DenseRetriever(documents, encoder, folder=tmp_path / "a" / "b")
        for encoder in (first, second)
    )
    assert len(first.encoded) == 37 and second.encoded == []
    assert one.search_scored(["ana"], 5) == two.search_scored(["ana"], 5)
    assert one.search_scored(["ana"], 5) == DenseRetriever(documents, Hashed()).search_scored(
        ["ana"], 5
    )  # and without a file
    (path,) = files(tmp_path / "a" / "b")
    vectors = np.load(path)  # anybody can read it
    assert vectors.shape == (37, 16) and vectors.dtype == np.float16
    assert path.stat().st_size == 37 * 16 * 2 + 128  # and the header


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DenseRetriever(invented(5), Hashed())
    assert files(tmp_path) == []


def test_the_file_is_mapped_and_not_read(tmp_path):
    assert isinstance(passage_vectors(invented(20), Hashed(), tmp_path), np.memmap)


@pytest.mark.parametrize("stop", [0, 9, 10, 29, 36])
def test_an_interrupted_run_goes_on_at_the_block_it_was_at(tmp_path, stop):
    documents, whole = invented(37), Hashed()
    expected = passage_vectors(documents, whole)
    first, second = Hashed(stop=stop), Hashed()
    with pytest.raises(KeyboardInterrupt):
        passage_vectors(documents, first, tmp_path)
    assert [path.suffix for path in files(tmp_path)] == [".part"]
    assert np.array_equal(passage_vectors(documents, second, tmp_path), expected)
    assert len(first.encoded) == stop // 10 * 10
    assert first.encoded + second.encoded == whole.encoded  # each passage once
    assert [path.suffix for path in files(tmp_path)] == [".npy"]


@pytest.mark.parametrize(
    "damage",
    ["one byte short", "one byte more", "one row more", "zeros", "header", "empty", "other header"],
)
def test_what_is_not_a_whole_block_is_encoded_again(tmp_path, damage):
    documents, whole = invented(37), Hashed()
    expected = passage_vectors(documents, whole)
    with pytest.raises(KeyboardInterrupt):
        passage_vectors(documents, Hashed(stop=29), tmp_path)  # 20 rows are there, of 32 bytes each
    (part,) = files(tmp_path)
    written = part.read_bytes()
    assert len(written) == 128 + 20 * 32
    kept, content = {
        "one byte short": (10, written[:-1]),
        "one byte more": (20, written + b"x"),
        "one row more": (20, written + b"x" * 33),
        "zeros": (
            10,
            written[: 128 + 15 * 32] + bytes(5 * 32),
        ),  # what a power cut leaves of a block
        "header": (0, written[:100]),
        "empty": (0, b""),
        "other header": (0, written.replace(b"(37, 16)", b"(16, 37)")),
    }[damage]
    part.write_bytes(content)
    second = Hashed()
    assert np.array_equal(passage_vectors(documents, second, tmp_path), expected)
    assert second.encoded == whole.encoded[kept:]
    (path,) = files(tmp_path)
    assert np.array_equal(np.load(path), expected)


def test_a_run_that_died_before_the_last_name_encodes_nothing_again(tmp_path):
    documents, encoder = invented(37), Hashed()
    expected = np.array(passage_vectors(documents, Hashed(), tmp_path))
    (path,) = files(tmp_path)
    path.rename(path.with_suffix(".part"))
    assert (
        np.array_equal(passage_vectors(documents, encoder, tmp_path), expected)
        and encoder.encoded == []
    )


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from retrievers import dense
from test_dense import Hashed, invented
dense.BLOCK = 10
class Dies(Hashed):
    def passages(self, texts):
        if len(self.encoded) >= 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().passages(texts)
dense.passage_vectors(invented(37), Dies(), {folder!r})
"""


def test_a_killed_run_goes_on_too(tmp_path):
    here = Path(__file__).parent
    code = KILLED.format(paths=[str(here.parent), str(here)], folder=str(tmp_path / "vectors"))
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode
        == -signal.SIGKILL
    )
    encoder = Hashed()
    vectors = passage_vectors(invented(37), encoder, tmp_path / "vectors")
    assert np.array_equal(vectors, passage_vectors(invented(37), Hashed()))
    assert len(encoder.encoded) == 17  # and the lock of the dead keeps nobody out


def test_two_at_the_same_time_encode_once(tmp_path, capsys):
    documents, first, second, vectors = invented(37), Hashed(), Hashed(), []
    begun, go = threading.Event(), threading.Event()
    passages = first.passages
    first.passages = lambda texts: begun.set() or (go.wait(20) and passages(texts))
    threads = [
        threading.Thread(
            target=lambda e=e: vectors.append(passage_vectors(documents, e, tmp_path)), daemon=True
        )
        for e in (first, second)
    ]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    deadline = time.monotonic() + 20
    while (
        "waiting for the process that encodes" not in capsys.readouterr().err
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(first.encoded) == 37 and second.encoded == [] and np.array_equal(*vectors)
    assert [path.suffix for path in files(tmp_path)] == [".npy"]


@pytest.mark.parametrize(
    "change",
    ["a word", "the order", "one less", "where a passage ends", "the weights", "the dimension"],
)
def test_another_corpus_or_other_weights_are_another_file(tmp_path, change):
    documents, encoder = invented(12), Hashed(8 if change == "the dimension" else 16)
    passage_vectors(documents, Hashed(), tmp_path)
    if change == "the weights":
        encoder.version = "2"
    texts = [passage_text(document) for document in documents]
    documents = {
        "a word": [*documents[:-1], Document("11", "Title 4", "changed")],
        "the order": documents[::-1],
        "one less": documents[:-1],
        # the same letters in a row: one passage's last word is the next one's first
        "where a passage ends": [
            Document("0", "", texts[0] + "T"),
            Document("1", "", texts[1][1:]),
            *documents[2:],
        ],
    }.get(change, documents)
    found = passage_vectors(documents, encoder, tmp_path)
    assert len(encoder.encoded) == len(documents) and len(files(tmp_path)) == 2
    assert np.array_equal(
        found, encoder.queries([passage_text(d) for d in documents]).astype(np.float16)
    )


def test_new_weights_under_an_old_name_are_not_taken_for_the_old_ones(tmp_path):
    path = make_tiny_encoder(tmp_path / "tiny", WORDS)
    old = passage_vectors(invented(12), Encoder(path), tmp_path / "vectors")
    make_tiny_encoder(tmp_path / "tiny", WORDS, seed=1)
    assert not np.allclose(
        old, passage_vectors(invented(12), Encoder(path), tmp_path / "vectors"), atol=0.01
    )
    passage_vectors(invented(12), Encoder(path, pooling="cls"), tmp_path / "vectors")
    assert len(files(tmp_path / "vectors")) == 3
    assert all(file.name.startswith("tiny-") for file in files(tmp_path / "vectors"))


def refused(match, **settings):
    encoder = settings.pop("encoder", Hashed())
    with pytest.raises(InputError, match=match) as error:
        DenseRetriever(invented(20), encoder, **settings)
    assert "\n" not in str(error.value) and getattr(encoder, "encoded", []) == []


def test_a_folder_that_cannot_be_written_is_one_line_before_anything_is_encoded(tmp_path):
    (tmp_path / "file").write_text("")
    refused(
        "vectors cannot be kept there .*: give another folder", folder=tmp_path / "file" / "sub"
    )
    refused("vectors cannot be kept there .*: give another folder", folder="/proc/nothing")


def test_a_full_disk_is_one_line_before_anything_is_encoded(tmp_path, monkeypatch):
    usage = dense.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        dense.shutil, "disk_usage", lambda folder: usage._replace(free=20 * 16 * 2 - 1)
    )
    refused(
        r"20 passages need 0.00 GB more there, and 0.00 GB are free: make room", folder=tmp_path
    )
    monkeypatch.setattr(dense.shutil, "disk_usage", lambda folder: usage._replace(free=20 * 16 * 2))
    DenseRetriever(invented(20), Hashed(), folder=tmp_path)


def test_a_disk_that_fills_up_in_the_middle_loses_nothing(tmp_path, monkeypatch):
    fsync, calls, first, second = os.fsync, [], Hashed(), Hashed()

    def full(number):
        calls.append(number)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        fsync(number)

    monkeypatch.setattr(dense.os, "fsync", full)
    with pytest.raises(
        InputError, match=r"there \(No space left on device\): make room and start again"
    ):
        passage_vectors(invented(37), first, tmp_path)
    vectors = passage_vectors(invented(37), second, tmp_path)
    assert (
        np.array_equal(vectors, passage_vectors(invented(37), Hashed()))
        and len(second.encoded) <= 17
    )


def test_a_damaged_file_is_one_line(tmp_path):
    passage_vectors(invented(20), Hashed(), tmp_path)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for content in (whole[:-1], b"", b"text", whole.replace(b"(20, 16)", b"(10, 16)")):
        path.write_bytes(content)
        refused("this file is damaged: delete it", folder=tmp_path)
    path.unlink()
    DenseRetriever(invented(20), Hashed(), folder=tmp_path)


def test_a_device_or_an_encoder_that_is_not_there_is_one_line(tmp_path):
    refused("--device nowhere: not here", device="nowhere")
    refused("encoder .*: cannot be loaded", encoder=str(tmp_path))


# ------------------------------------------------------------------------------------ faiss (extra)


def test_faiss_asked_for_by_name_and_not_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "faiss", None)
    refused(
        "--index faiss: faiss is not installed: pip install faiss-cpu, or leave --index out",
        index="faiss",
    )
    refused(
        "faiss is not installed: pip install faiss-cpu, or leave --index_file out",
        index_file=tmp_path / "flat.index",
    )
    refused("--index hnsw: one of auto, numpy, faiss", index="hnsw")
    refused(
        "this is read by faiss: leave --index numpy out",
        index="numpy",
        index_file=tmp_path / "flat.index",
    )
    assert DenseRetriever(invented(20), Hashed(), index="auto").search(["ana"], 1)


def test_faiss_finds_the_same():
    pytest.importorskip("faiss", reason="the extra faiss-cpu is not installed")
    documents = invented(200)
    blocks, flat = (
        DenseRetriever(documents, Hashed()),
        DenseRetriever(documents, Hashed(), index="faiss"),
    )
    queries = ["ana", "bell", "storm in varen"]
    assert flat.search(queries, 10) == blocks.search(queries, 10) and flat.search([], 3) == []
    for one, two in zip(
        flat.search_scored(queries, 10), blocks.search_scored(queries, 10), strict=True
    ):
        assert [score for _, score in one] == pytest.approx([score for _, score in two], abs=1e-5)
    assert [len(found) for found in flat.search(["a"], 500)] == [200]


def test_a_prebuilt_index_is_read_and_nothing_encoded(tmp_path):
    faiss = pytest.importorskip("faiss", reason="the extra faiss-cpu is not installed")
    documents, encoder = invented(200), Hashed()
    blocks = DenseRetriever(documents, Hashed())
    flat = faiss.IndexFlatIP(16)
    flat.add(blocks.matrix.float().numpy())
    faiss.write_index(flat, str(tmp_path / "flat.index"))
    retriever = DenseRetriever(documents, encoder, index_file=tmp_path / "flat.index")
    assert encoder.encoded == [] and retriever.search(["ana", "bell"], 5) == blocks.search(
        ["ana", "bell"], 5
    )


def test_an_approximate_index_that_finds_too_few_gives_fewer(tmp_path):
    faiss = pytest.importorskip("faiss", reason="the extra faiss-cpu is not installed")
    documents = invented(40)
    lists = faiss.IndexIVFFlat(faiss.IndexFlatIP(16), 16, 4, faiss.METRIC_INNER_PRODUCT)
    rows = Hashed().queries([passage_text(document) for document in documents])
    lists.train(rows)
    lists.add(rows)
    faiss.write_index(lists, str(tmp_path / "ivf.index"))
    found = DenseRetriever(documents, Hashed(), index_file=tmp_path / "ivf.index").search_scored(
        ["ana"], 40
    )[0]
    assert 0 < len(found) < 40 and len({document.id for document, _ in found}) == len(
        found
    )  # one list of four is looked at


def test_an_index_that_does_not_fit_is_one_line(tmp_path):
    faiss = pytest.importorskip("faiss", reason="the extra faiss-cpu is not installed")
    path = tmp_path / "an.index"

    def written(index, n):
        index.add(np.ones((n, index.d), np.float32))
        faiss.write_index(index, str(path))

    refused("no such file: give a file that faiss.write_index wrote", index_file=path)
    written(faiss.IndexFlatIP(16), 19)
    refused("19 vectors of 16 numbers, where 20 of 16 are needed", index_file=path)
    written(faiss.IndexFlatIP(8), 20)
    refused("20 vectors of 8 numbers, where 20 of 16 are needed", index_file=path)
    written(faiss.IndexFlatL2(16), 20)
    refused("its metric is a distance: build it with METRIC_INNER_PRODUCT", index_file=path)
    path.write_bytes(path.read_bytes()[:100])
    refused("not a faiss index, or half of one", index_file=path)


# ------------------------------------------------------------------------------------- command line


def test_the_command_searches_a_corpus(tmp_path, monkeypatch, capsys):
    (tmp_path / "corpus.jsonl").write_text(
        '{"id": "1", "text": "Varen lies on the river"}\n{"id": "2", "text": "ana bell"}\n'
    )
    encoder = make_tiny_encoder(tmp_path / "tiny", WORDS)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "dense.py",
            "ana bell",
            "--corpus",
            str(tmp_path / "corpus.jsonl"),
            "--encoder",
            encoder,
            "--vectors",
            str(tmp_path / "vectors"),
            "-k",
            "1",
        ],
    )
    dense.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("1.   1.000  [2] ") and len(files(tmp_path / "vectors")) == 1


def test_an_interrupted_command_says_where_its_work_is_if_there_is_any(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "corpus.jsonl").write_text(
        "".join(f'{{"id": "{i}", "text": "ana bell {i}"}}\n' for i in range(25))
    )
    corpus = ["--corpus", str(tmp_path / "corpus.jsonl"), "--encoder", "any"]
    kept = r"20 of 25 passages are kept in .*/v: the same command goes on"
    for options, stop, said in (
        (["--vectors", str(tmp_path / "v")], 0, "no passage was encoded yet"),
        ([], 0, ""),
        (["--vectors", str(tmp_path / "v")], 20, kept),
    ):
        monkeypatch.setattr(dense, "Encoder", lambda *_, stop=stop: Hashed(stop=stop))
        monkeypatch.setattr(sys, "argv", ["dense.py", "ana", *corpus, *options])
        with pytest.raises(KeyboardInterrupt):
            dense.main()
        err = capsys.readouterr().err
        assert re.search(said, err) and ("kept in" in err) == (said == kept)


def test_a_command_takes_at_least_one_passage_and_may_leave_bad_records_out(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "c.jsonl").write_text('{"id": "1", "text": "ana bell"}\nnone\n')
    monkeypatch.setattr(dense, "Encoder", lambda *_: Hashed())
    monkeypatch.setattr(
        sys,
        "argv",
        ["dense.py", "a", "--encoder", "any", "--skip_bad", "--corpus", str(tmp_path / "c.jsonl")],
    )
    dense.main()
    assert "[1]" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "-k", "0"])
    with pytest.raises(InputError, match="-k 0: ask for at least one passage"):
        dense.main()


def test_a_query_without_a_corpus_is_one_line_and_without_a_query_there_is_a_demonstration(
    monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["dense.py", "ana"])
    with pytest.raises(InputError, match="a query needs --corpus FILE and --encoder NAME"):
        dense.main()
    monkeypatch.setattr(sys, "argv", ["dense.py"])
    dense.main()
    lines = capsys.readouterr().out.splitlines()
    assert (
        "encoded 6 passages, and found 0 on the disk" in lines[0]
        and "encoded 0 passages, and found 6" in lines[1]
    )
    assert "Kelmouth" in lines[4] and "same passages: True" in lines[-1] and len(lines) < 12
