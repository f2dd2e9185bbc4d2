"""dense.py: the nearest passages against a full sort, and shards that are never half believed."""

import doctest
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import message, model_of, of_fault, small

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
    """Each text's vector is drawn from a seed that the text gives. Keeps what it encodes, and stops
    before the passage with number `stop`.
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


def vectors_of(documents, encoder):
    return torch.cat(passage_vectors(documents, encoder)).numpy()


def encoded(documents):
    """Their vectors, of one call."""
    rows = Hashed()([passage_text(document) for document in documents], "passage")
    return rows.astype(np.float16)


def test_the_docstring_examples_are_true():
    result = doctest.testmod(dense)
    assert result.attempted >= 2 and result.failed == 0


def whole_sort(matrix, queries, k):
    """All scores at once; a stable sort keeps ties in document order."""
    scores = queries @ matrix.astype(np.float32).T
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def in_shards(matrix, size):
    return [torch.from_numpy(matrix[i : i + size]) for i in range(0, len(matrix), size)]


@pytest.mark.parametrize("size", [7, 16, 1000])
@pytest.mark.parametrize("k", [1, 5, 50, 80])
def test_shards_find_what_a_sort_of_all_scores_finds(size, k):
    draw = np.random.default_rng(k)
    matrix = draw.standard_normal((50, 8)).astype(np.float16)
    queries = draw.standard_normal((3, 8)).astype(np.float32)
    found = nearest(in_shards(matrix, size), queries, k)
    assert np.array_equal(found, whole_sort(matrix, queries, k)) and found.shape == (3, min(k, 50))


def test_ties_come_in_document_order_across_shards():
    # whole numbers, so that equal scores are equal to the bit: only -2, -1, 0, 1 and 2 occur
    matrix = np.random.default_rng(0).integers(-1, 2, (60, 2)).astype(np.float16)
    queries = np.array([[1, 1], [-1, 0], [0, 0], [0, -1]], np.float32)
    assert np.array_equal(
        nearest(in_shards(matrix, 7), queries, 60), whole_sort(matrix, queries, 60)
    )


def test_a_passage_finds_itself_and_the_best_come_first():
    documents = invented(40)
    retriever = DenseRetriever(documents, Hashed())
    queries = [passage_text(document) for document in documents[:5]]
    found = retriever.search(queries, 40)
    best = whole_sort(encoded(documents), Hashed()(queries), 40)
    assert [[int(document.id) for document in row] for row in found] == best.tolist()
    assert [row[0] for row in found] == documents[:5]
    assert [len(row) for row in retriever.search(["a", "b"], 99)] == [40, 40]
    assert retriever.search([], 3) == []


def test_a_passage_is_read_as_title_then_text():
    encoder = Hashed()
    DenseRetriever([Document("1", "Ana Bell", "draws."), Document("2", "", "no title")], encoder)
    assert encoder.encoded == ["Ana Bell draws.", "no title"]


def test_an_empty_corpus_and_no_encoder_are_one_line():
    with pytest.raises(InputError, match="the corpus is empty: dense retrieval needs at least one"):
        DenseRetriever([], Hashed())
    with pytest.raises(InputError, match="retriever dense needs --encoder"):
        DenseRetriever(invented(1), "")


def test_the_second_time_nothing_is_encoded():
    documents, first, second = invented(37), Hashed(), Hashed()
    one, two = (DenseRetriever(documents, encoder) for encoder in (first, second))
    assert len(first.encoded) == 37 and second.encoded == []
    assert one.search(["ana"], 5) == two.search(["ana"], 5)
    kept = files("runs/vectors")
    assert [path.name for path in kept] == ["00000.npy", "00001.npy", "00002.npy", "00003.npy"]
    assert kept[0].parent.name.startswith("hashed-")
    last = np.load(kept[3])  # anybody can read it
    assert last.shape == (7, 16) and last.dtype == np.float16


def test_the_vectors_are_kept_in_the_folder_of_the_runs(tmp_path):
    DenseRetriever(invented(12), Hashed(), runs=tmp_path / "mine")
    assert len(list((tmp_path / "mine" / "vectors").glob("hashed-*/0000?.npy"))) == 2


@pytest.mark.parametrize("stop", [0, 10, 29])
def test_an_interrupted_run_goes_on_at_the_shard_it_was_at(stop):
    documents = invented(37)
    first, second = Hashed(stop=stop), Hashed()
    with pytest.raises(KeyboardInterrupt):
        vectors_of(documents, first)
    assert np.array_equal(vectors_of(documents, second), encoded(documents))
    assert len(first.encoded) == stop // 10 * 10
    assert first.encoded + second.encoded == list(map(passage_text, documents))  # each once


def test_the_processes_of_a_run_begin_at_places_of_their_own(monkeypatch):
    corpus = invented(40)  # 4 shards
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    second, first = Hashed(stop=20), Hashed()
    with pytest.raises(KeyboardInterrupt):
        passage_vectors(corpus, second)
    assert second.encoded == [passage_text(document) for document in corpus[20:]]
    monkeypatch.setenv("RANK", "0")
    assert (vectors_of(corpus, first) == encoded(corpus)).all()
    assert first.encoded == [passage_text(document) for document in corpus[:20]]


def test_a_run_that_ends_while_it_writes_leaves_no_half_shard(monkeypatch):
    def dies(path, whole):
        path.touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_bytes", dies)
        vectors_of(invented(37), Hashed())
    assert ["part" in path.name for path in files("runs")] == [True]
    assert np.array_equal(vectors_of(invented(37), Hashed()), encoded(invented(37)))


@pytest.mark.parametrize("change", ["a word", "one less", "where a passage ends", "the weights"])
def test_another_corpus_or_other_weights_are_another_folder(change):
    documents, encoder = invented(12), Hashed()
    vectors_of(documents, Hashed())
    if change == "the weights":
        encoder.version = "2"
    first, second, *rest = documents
    title, _, text = passage_text(second).partition(" ")
    documents = {
        "a word": [Document("0", "Title 0", "changed"), second, *rest],
        "one less": documents[:-1],
        # the same letters in a row: the first passage's last word is the second one's first
        "where a passage ends": [
            Document("0", "", passage_text(first) + title),
            Document("1", "", text),
            *rest,
        ],
    }.get(change, documents)
    found = vectors_of(documents, encoder)
    assert len(encoder.encoded) == len(documents) and len(os.listdir("runs/vectors")) == 2
    assert np.array_equal(found, encoded(documents))


def refused(match, encoder=None, **settings):
    told = message(DenseRetriever, invented(20), encoder or Hashed(), **settings)
    assert re.search(match, told), told


def test_a_folder_that_cannot_be_written_is_one_line(monkeypatch):
    Path("runs").write_text("")
    refused("vectors cannot be written .*: make room")


def as_numpy_writes(vectors) -> bytes:
    np.save("by_hand.npy", vectors)
    return Path("by_hand.npy").read_bytes()


DAMAGE = [  # what becomes of a whole file, with a checksum that may have been kept
    lambda whole, rows: as_numpy_writes(np.array([{"pickled": 1}], dtype=object)),
    lambda whole, rows: whole[:-40],
    lambda whole, rows: whole[:20],
    lambda whole, rows: b"",
    lambda whole, rows: whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2),
    lambda whole, rows: as_numpy_writes(np.full_like(rows, np.nan)) + whole[-4:],
    lambda whole, rows: as_numpy_writes(np.roll(rows, 1, axis=0)) + whole[-4:],
]
DAMAGE = [of_fault(*row) for row in enumerate(DAMAGE, 208)]


@pytest.mark.parametrize("damage", [*DAMAGE, lambda whole, rows: as_numpy_writes(rows)])
def test_a_damaged_shard_or_an_old_one_is_told_and_encoded_anew_and_no_other(damage, capsys):
    corpus, again = invented(20), Hashed()
    vectors_of(corpus, Hashed())
    path = files("runs")[1]
    path.write_bytes(damage(path.read_bytes(), np.load(path)))
    assert np.array_equal(vectors_of(corpus, again), encoded(corpus))
    assert again.encoded == [passage_text(document) for document in corpus[10:]]
    said = f"{path}: damaged, or of an earlier version: its documents are encoded again"
    assert said in re.split("[\\r\\n]", capsys.readouterr().err)
    vectors_of(corpus, Hashed(stop=0))  # nothing more


def flat_index(rows, kind=b"IxFI"):
    """As faiss writes it: kind, d, n, two old fields, trained, metric 0, n · d, rows."""
    n, d = rows.shape
    head = struct.pack("<4siqqq?iq", kind, d, n, 1 << 20, 1 << 20, True, 0, n * d)
    Path("an.index").write_bytes(head + rows.astype(np.float32).tobytes())
    return "an.index"


def test_a_flat_index_is_read_and_nothing_encoded():
    documents, encoder = invented(200), Hashed()
    path = flat_index(Hashed()([passage_text(document) for document in documents]))
    retriever = DenseRetriever(documents, encoder, index_file=path)
    queries = ["ana", "bell", "storm in varen"]
    found = retriever.search(queries, 5)
    assert found == DenseRetriever(documents, Hashed()).search(queries, 5) and encoder.encoded == []


def test_the_layout_of_the_file_is_faiss_own():
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    rows = np.random.default_rng(0).standard_normal((20, 16)).astype(np.float32)
    index = faiss.IndexFlatIP(16)
    index.add(rows)
    faiss.write_index(index, "faiss.index")
    assert Path("faiss.index").read_bytes() == Path(flat_index(rows)).read_bytes()


def test_an_index_that_does_not_fit_is_one_line():
    said = "--index_file .* is not a flat FAISS index .IndexFlatIP. of 20 documents"
    refused(said, index_file="nowhere.index")
    for rows, kind in ((19, 16), b"IxFI"), ((20, 8), b"IxFI"), ((20, 16), b"IxF2"):
        refused(said, index_file=flat_index(np.ones(rows), kind))
    path = Path(flat_index(np.ones((20, 16))))
    path.write_bytes(path.read_bytes()[:-1])
    refused(said, index_file=str(path))


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


def test_a_causal_encoder_is_pooled_by_its_last_token(make):
    path = make("qwen3-embedding")
    sizes = small(head_dim=8, max_position_embeddings=64)
    model_of("qwen3", vocab_size=200, **sizes).save_pretrained(path)
    encoder = Encoder(path, "cpu")
    for text, vector in zip(TEXTS, encoder(TEXTS, "passage"), strict=True):  # of several lengths
        last = states_of(encoder, text)[-1]
        assert np.allclose(vector, (last / last.norm()).numpy(), atol=1e-5)


def test_the_name_decides_what_stands_before_the_text():
    e5 = ("query: ", "passage: ")
    for name, expected in {
        "intfloat/e5-base-v2": e5,
        "Multilingual-E5-small": e5,
        "bge-base-en": ("Represent this sentence for searching relevant passages: ", ""),
        "bge-m3": ("", ""),  # published as one without an instruction
        "e5s/tiny-bert": (None, None),  # a folder above it names nothing
        "models--x--e5-base/snapshots/0bge0": e5,  # the hub's
    }.items():
        assert dense.prefixes(name) == expected


def test_what_stands_before_a_text_is_the_names_or_the_models_own(make):
    path, bare = make(), Encoder(make("plain"), "cpu")
    other = Encoder(path, "cpu")
    other.model.prompts = {"query": "query: ", "document": "passage: "}
    other.model.save(path)
    for encoder in (Encoder(path, "cpu"), Encoder(make("e5-base"), "cpu")):
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
    other = Path(make("other"))
    (other / "tokenizer.json").write_text("{")
    refused("encoder .*: cannot be loaded", encoder=str(other))


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
    assert "ok    4 of 4 passages are among the 2" in result.stdout, result
