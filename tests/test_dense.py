"""dense.py: the nearest passages against a full sort, and shards that are never half believed."""

import doctest
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from data import Document
from errors import InputError
from retrievers import dense
from retrievers.dense import DenseRetriever, Encoder, nearest, passage_text, passage_vectors

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
    Keeps what it encodes, and stops before the passage with number `stop`.
    """

    name, version = "some/hashed", "1"

    def __init__(self, dimension=16, stop=None):
        self.dimension, self.stop, self.encoded = dimension, stop, []

    def __call__(self, texts, kind="query"):
        if kind == "passage":
            if self.stop is not None and len(self.encoded) + len(texts) > self.stop:
                raise KeyboardInterrupt
            self.encoded += texts
        rows = [
            np.random.default_rng([0, *text.encode()]).standard_normal(self.dimension)
            for text in texts
        ]
        return (np.array(rows) / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch, tmp_path):
    """Ten passages a shard, in a folder of the test's own."""
    monkeypatch.setattr(dense, "SHARD", 10)
    monkeypatch.chdir(tmp_path)


def files(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def vectors_of(documents, encoder, folder="vectors"):
    return torch.cat(passage_vectors(documents, encoder, Path(folder))).numpy()


def test_the_docstring_examples_are_true():
    result = doctest.testmod(dense)
    assert result.attempted >= 4 and result.failed == 0


# ------------------------------------------------------------------------------------------ nearest


def whole_sort(matrix, queries, k):
    """All scores at once; a stable sort keeps ties in document order."""
    scores = queries @ matrix.astype(np.float32).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


def in_shards(matrix, size):
    return [torch.from_numpy(matrix[i : i + size]) for i in range(0, len(matrix), size)]


@pytest.mark.parametrize("size", [7, 16, 1000])
@pytest.mark.parametrize("k", [1, 5, 50, 80])
def test_shards_find_what_a_sort_of_all_scores_finds(size, k):
    draw = np.random.default_rng(k)
    matrix = draw.standard_normal((50, 8)).astype(np.float16)
    queries = draw.standard_normal((3, 8)).astype(np.float32)
    expected, best = whole_sort(matrix, queries, k)
    scores, found = nearest(in_shards(matrix, size), queries, k)
    assert np.array_equal(found, best) and np.allclose(scores, expected, atol=1e-5)
    assert scores.shape == (3, min(k, 50)) and scores.dtype == np.float32


def test_ties_come_in_document_order_across_shards():
    # whole numbers, so that equal scores are equal to the bit: only -2, -1, 0, 1 and 2 occur
    matrix = np.random.default_rng(0).integers(-1, 2, (60, 2)).astype(np.float16)
    queries = np.array([[1, 1], [-1, 0], [0, 0], [0, -1]], np.float32)
    _, found = nearest(in_shards(matrix, 7), queries, 60)
    assert np.array_equal(found, whole_sort(matrix, queries, 60)[1])


def test_half_precision_on_disk_ranks_as_full_precision_within_its_bound():
    draw = np.random.default_rng(0)
    matrix, queries = draw.standard_normal((2, 2000, 64))
    matrix = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)
    queries = (queries / np.linalg.norm(queries, axis=1, keepdims=True)).astype(np.float32)[:20]
    exact, _ = whole_sort(matrix, queries, 10)
    scores, _ = nearest(in_shards(matrix.astype(np.float16), 300), queries, 10)
    # A number is off by at most 2^-11 of itself and Σ |q v| <= 1; besides that, below 2^-14 by a
    # 2^-25 each, 64 times.
    assert np.abs(exact - scores).max() <= 2**-11 + 64 * 2**-25


# ---------------------------------------------------------------------------------------- retriever


def test_a_passage_finds_itself_and_the_best_come_first():
    documents = invented(40)
    retriever = DenseRetriever(documents, Hashed())
    assert retriever.needs_questions is False
    queries = [passage_text(document) for document in documents[:5]]
    found = retriever.search_scored(queries, 40)
    for row, own in zip(found, documents, strict=False):
        scores = [score for _, score in row]
        assert row[0][0] == own and scores[0] == pytest.approx(1, abs=1e-3)
        assert scores == sorted(scores, reverse=True) and len({d.id for d, _ in row}) == 40
    assert retriever.search(queries, 3) == [[document for document, _ in row[:3]] for row in found]


def test_a_passage_is_read_as_title_then_text():
    encoder = Hashed()
    DenseRetriever([Document("1", "Ana Bell", "draws."), Document("2", "", "no title")], encoder)
    assert encoder.encoded == ["Ana Bell draws.", "no title"]


def test_too_few_passages_no_queries_no_k_and_many_queries(monkeypatch):
    retriever = DenseRetriever(invented(14), Hashed())
    assert [len(found) for found in retriever.search(["a", "b"], 99)] == [14, 14]
    assert retriever.search([], 3) == [] and retriever.search(["a", "b"], 0) == [[], []]
    whole = retriever.search(list("abcdefg"), 3)
    monkeypatch.setattr(dense, "QUERIES", 3)
    assert retriever.search(list("abcdefg"), 3) == whole


def test_an_empty_corpus_and_no_encoder_are_one_line():
    with pytest.raises(InputError, match="the corpus is empty: dense retrieval needs at least one"):
        DenseRetriever([], Hashed())
    with pytest.raises(InputError, match="retriever dense needs --encoder"):
        DenseRetriever(invented(1), "")


# ------------------------------------------------------------------------------------- kept on disk


def test_the_second_time_nothing_is_encoded():
    documents, first, second = invented(37), Hashed(), Hashed()
    one, two = (DenseRetriever(documents, encoder, folder="a/b") for encoder in (first, second))
    assert len(first.encoded) == 37 and second.encoded == []
    assert one.search_scored(["ana"], 5) == two.search_scored(["ana"], 5)
    kept = files("a/b")
    assert [path.name for path in kept] == ["00000.npy", "00001.npy", "00002.npy", "00003.npy"]
    assert kept[0].parent.name.startswith("hashed-")
    last = np.load(kept[3])  # anybody can read it
    assert last.shape == (7, 16) and last.dtype == np.float16


@pytest.mark.parametrize("stop", [0, 10, 29])
def test_an_interrupted_run_goes_on_at_the_shard_it_was_at(stop):
    documents, whole = invented(37), Hashed()
    expected = vectors_of(documents, whole, "other")
    first, second = Hashed(stop=stop), Hashed()
    with pytest.raises(KeyboardInterrupt):
        vectors_of(documents, first)
    assert np.array_equal(vectors_of(documents, second), expected)
    assert len(first.encoded) == stop // 10 * 10
    assert first.encoded + second.encoded == whole.encoded  # each passage once


def test_the_processes_of_a_run_begin_at_different_shards(monkeypatch):
    documents, whole, second = invented(37), Hashed(), Hashed()
    expected = vectors_of(documents, whole, "other")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert np.array_equal(vectors_of(documents, second), expected)
    assert second.encoded == whole.encoded[20:] + whole.encoded[:20]


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import numpy as np
from pathlib import Path
from retrievers import dense
from test_dense import Hashed, invented
dense.SHARD = 10
save, calls = np.save, []
def dies(path, vectors):
    calls.append(path)
    if len(calls) == 3:
        path.write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)
    save(path, vectors)
np.save = dies
dense.passage_vectors(invented(37), Hashed(), Path("vectors"))
"""


def test_a_run_that_is_killed_while_it_writes_leaves_no_half_shard():
    here = Path(__file__).parent
    code = KILLED.format(paths=[str(here.parent), str(here)])
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert ["part" in path.name for path in files("vectors")] == [False, False, True]
    encoder = Hashed()
    assert np.array_equal(
        vectors_of(invented(37), encoder), vectors_of(invented(37), Hashed(), "o")
    )
    assert len(encoder.encoded) == 17


@pytest.mark.parametrize(
    "change", ["a word", "the order", "one less", "where a passage ends", "the weights"]
)
def test_another_corpus_or_other_weights_are_another_folder(change):
    documents, encoder = invented(12), Hashed()
    vectors_of(documents, Hashed())
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
    found = vectors_of(documents, encoder)
    assert len(encoder.encoded) == len(documents) and len(os.listdir("vectors")) == 2
    expected = encoder([passage_text(d) for d in documents])
    assert np.array_equal(found, expected.astype(np.float16))


def refused(match, encoder=None, **settings):
    with pytest.raises(InputError, match=match) as error:
        DenseRetriever(invented(20), encoder or Hashed(), **settings)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_one_line(monkeypatch):
    Path("file").write_text("")
    refused("vectors cannot be kept there .*: make room", folder="file/sub")

    def full(file, vectors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dense.np, "save", full)
    refused(r"there \(No space left on device\): make room")


def test_a_damaged_file_is_one_line():
    DenseRetriever(invented(20), Hashed())
    path = files("runs")[0]
    whole = path.read_bytes()
    for content in (whole[:-1], b"", b"text"):
        path.write_bytes(content)
        refused("this file is damaged: delete it")
    path.unlink()
    DenseRetriever(invented(20), Hashed())


# ------------------------------------------------------------------------------------ faiss (extra)


def test_faiss_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    refused("--index_file: faiss is not installed: pip install faiss-cpu", index_file="x")


def test_a_prebuilt_index_is_read_and_nothing_encoded():
    faiss = pytest.importorskip("faiss", reason="the extra faiss-cpu is not installed")
    documents, encoder = invented(200), Hashed()
    shards = DenseRetriever(documents, Hashed())
    flat = faiss.IndexFlatIP(16)
    flat.add(torch.cat(shards.shards).float().numpy())
    faiss.write_index(flat, "flat.index")
    retriever = DenseRetriever(documents, encoder, index_file="flat.index")
    queries = ["ana", "bell", "storm in varen"]
    assert retriever.search(queries, 5) == shards.search(queries, 5) and encoder.encoded == []
    assert [len(found) for found in retriever.search(["a"], 500)] == [200]


def test_an_approximate_index_that_finds_too_few_gives_fewer():
    faiss = pytest.importorskip("faiss", reason="the extra faiss-cpu is not installed")
    documents = invented(40)
    lists = faiss.IndexIVFFlat(faiss.IndexFlatIP(16), 16, 4, faiss.METRIC_INNER_PRODUCT)
    rows = Hashed()([passage_text(document) for document in documents])
    lists.train(rows)
    lists.add(rows)
    faiss.write_index(lists, "ivf.index")
    found = DenseRetriever(documents, Hashed(), index_file="ivf.index").search(["ana"], 40)[0]
    # one list of four is looked at
    assert 0 < len(found) < 40 and len({document.id for document in found}) == len(found)


def test_an_index_that_does_not_fit_is_one_line():
    faiss = pytest.importorskip("faiss", reason="the extra faiss-cpu is not installed")
    path = Path("an.index")

    def written(index, n):
        index.add(np.ones((n, index.d), np.float32))
        faiss.write_index(index, str(path))

    refused("not a file that faiss.write_index wrote", index_file="an.index")
    written(faiss.IndexFlatIP(16), 19)
    refused(r"it holds \(19, 16\) numbers, not \(20, 16\) of METRIC", index_file="an.index")
    written(faiss.IndexFlatIP(8), 20)
    refused(r"it holds \(20, 8\) numbers, not \(20, 16\)", index_file="an.index")
    written(faiss.IndexFlatL2(16), 20)
    refused(r"not \(20, 16\) of METRIC_INNER_PRODUCT: build it of this", index_file="an.index")


# -------------------------------------------------------------------- sentence-transformers (extra)

TEXTS = ["Ana Bell", "Kelmouth is a harbour town in the north", "a town", "Ana Bell draws maps"]


def test_sentence_transformers_that_are_not_there_are_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    refused("encoder some/e5: pip install sentence-transformers", encoder="some/e5")


@pytest.fixture
def make(tmp_path):
    """make("some-e5") writes a random BERT and a tokenizer of TEXTS' words into that directory."""
    pytest.importorskip("sentence_transformers", reason="the extra dense is not installed")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    def make(name="tiny-bert", seed=0):
        names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep")}
        tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordLevelTrainer(special_tokens=[*names.values()], show_progress=False)
        tokenizer.train_from_iterator([*TEXTS, "query: passage: represent this"], trainer)
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
        fast.save_pretrained(tmp_path / name)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        more = {"intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.1}
        torch.manual_seed(seed)
        config = BertConfig(vocab_size=tokenizer.get_vocab_size(), **sizes, **more)
        BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


def states_of(encoder, text):
    """The last hidden states of this text alone, by the model itself.  # [L, d]"""
    model, ids = encoder.model[0].auto_model, encoder.model.tokenizer(text)["input_ids"]
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def test_a_plain_directory_is_pooled_by_the_mean_at_length_one(make):
    encoder = Encoder(make(), "cpu")
    vectors = encoder(TEXTS, "passage")
    assert vectors.shape == (4, 32) and vectors.dtype == np.float32
    for text, vector in zip(TEXTS, vectors, strict=True):
        mean = states_of(encoder, text).mean(0)
        assert np.allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "query", "passage"),
    [
        ("e5-base-v2", "query: Ana Bell", "passage: Ana Bell"),
        ("Multilingual-E5-small", "query: Ana Bell", "passage: Ana Bell"),
        (
            "bge-base-en-v1.5",
            "Represent this sentence for searching relevant passages: Ana Bell",
            "Ana Bell",
        ),
        ("bge-m3", "Ana Bell", "Ana Bell"),  # published as one without an instruction
        ("e5s/tiny-bert", "Ana Bell", "Ana Bell"),  # a folder above it names nothing
        ("models--x--e5-base/snapshots/0bge0", "query: Ana Bell", "passage: Ana Bell"),  # the hub's
    ],
)
def test_the_name_decides_what_stands_before_the_text(make, name, query, passage):
    encoder, bare = Encoder(make(name), "cpu"), Encoder(make("plain"), "cpu")
    assert np.allclose(encoder(["Ana Bell"]), bare([query]), atol=1e-6)
    assert np.allclose(encoder(["Ana Bell"], "passage"), bare([passage], "passage"), atol=1e-6)


def test_a_model_of_another_family_brings_its_own_words(make):
    path = make()
    plain = Encoder(path, "cpu")
    plain.model.prompts = {"query": "query: ", "document": "passage: "}
    plain.model.save(path)
    encoder, bare = Encoder(path, "cpu"), Encoder(make("plain"), "cpu")
    assert np.allclose(encoder(["Ana Bell"]), bare(["query: Ana Bell"]), atol=1e-6)
    assert np.allclose(encoder(["Ana"], "passage"), bare(["passage: Ana"]), atol=1e-6)


def test_texts_without_words_and_broken_texts_are_texts(make):
    encoder = Encoder(make(), "cpu")
    lengths = np.linalg.norm(encoder(["", "??", "half \ud800 a pair", "ana " * 500]), axis=1)
    assert np.allclose(lengths, 1, atol=1e-5)


def test_the_version_is_another_for_other_weights_and_the_same_again(make):
    path = make()
    version = Encoder(path, "cpu").version
    assert Encoder(path, "cpu").version == version
    make(seed=1)
    assert Encoder(path, "cpu").version != version


def test_an_encoder_that_is_not_there_or_only_half_is_one_line(make):
    refused("encoder .*nothing: cannot be loaded .*: give a directory", encoder="./nothing")
    path = Path(make())
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused("encoder .*: cannot be loaded", encoder=str(path))
    (Path(make("other")) / "tokenizer.json").write_text("{")
    refused("encoder .*: cannot be loaded", encoder=make_path(path, "other"))


def make_path(path, name):
    return str(path.parent / name)


def test_damaged_weights_give_no_vectors(make):
    encoder = Encoder(make(), "cpu")
    encoder.model[0].auto_model.embeddings.LayerNorm.weight.data[0] = float("nan")
    refused("its vectors are not finite", encoder)


def test_a_corpus_is_served_by_an_encoder_of_a_directory(make):
    Path("c.jsonl").write_text(
        "".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(TEXTS))
    )
    root = Path(__file__).parents[1]
    command = [sys.executable, str(root / "retriever.py"), "check", "--retriever", "dense"]
    command += ["--corpus", "c.jsonl", "--encoder", make("e5-tiny"), "-k", "2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "ok       finds itself" in result.stdout, result
