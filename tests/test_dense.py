"""Tests dense.py: nearest passages equal a full sort, and vectors are encoded once."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import message, model_of, of_fault, small

from data import Document
from retrievers import dense
from retrievers.dense import DenseRetriever, Encoder, nearest, passage_text, passage_vectors

WORDS = "ana bell born in kelmouth norland varen tidewerk ivo marr lantern storm coast".split()


def invented(n):
    """Returns n passages of four to eleven words."""
    draw = np.random.default_rng(0)
    return [
        Document(str(i), f"Title {i % 7}", " ".join(draw.choice(WORDS, draw.integers(4, 12))))
        for i in range(n)
    ]


class Hashed:
    """An encoder that draws each text's vector with the text as the seed.

    Records the passages that it encodes and stops before the passage with number `stop`.
    """

    name, version = "some/hashed", "1"

    def __init__(self, stop=1000):
        self.stop, self.encoded = stop, []

    def __call__(self, texts, kind="query"):
        if kind == "passage":
            if len(self.encoded) + len(texts) > self.stop:
                raise KeyboardInterrupt
            self.encoded += texts
        rows = [np.random.default_rng([*text.encode(), 0]).standard_normal(16) for text in texts]
        return (np.array(rows) / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch, tmp_path):
    """Limits a shard to ten passages, and runs each test in a folder of its own."""
    monkeypatch.setattr(dense, "SHARD", 10)
    monkeypatch.chdir(tmp_path)


def shard_files():
    return sorted(Path("runs/vectors").glob("*/*"))


def vectors_of(documents, encoder):
    """Returns the vectors of all passages, with the cache on disk."""
    return torch.cat(passage_vectors(documents, encoder)).numpy()


def texts_of(documents):
    return [passage_text(document) for document in documents]


def encoded_at_once(documents):
    """Returns the vectors of all passages without the cache."""
    return Hashed()(texts_of(documents)).astype(np.float16)


def sort_of_all(matrix, queries, k):
    """Returns the k best rows of all scores; a stable sort keeps ties in document order."""
    scores = queries @ matrix.astype(np.float32).T
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def in_shards(matrix, size):
    return [torch.from_numpy(matrix[i : i + size]) for i in range(0, len(matrix), size)]


@pytest.mark.parametrize("size", [7, 16, 1000])
@pytest.mark.parametrize("k", [1, 5, 50, 80])
def test_a_search_in_shards_equals_a_sort_of_all_scores(size, k):
    draw = np.random.default_rng(k)
    matrix = draw.standard_normal((50, 8)).astype(np.float16)
    queries = draw.standard_normal((3, 8)).astype(np.float32)
    rows = nearest(in_shards(matrix, size), queries, k)
    assert np.array_equal(rows, sort_of_all(matrix, queries, k)) and rows.shape == (3, min(k, 50))


def test_ties_come_in_document_order_across_shards():
    # With integers equal scores are equal to the bit; only -2, -1, 0, 1 and 2 occur.
    matrix = np.random.default_rng(0).integers(-1, 2, (60, 2)).astype(np.float16)
    queries = np.array([[1, 1], [-1, 0], [0, 0], [0, -1]], np.float32)
    rows = nearest(in_shards(matrix, 7), queries, 60)
    assert np.array_equal(rows, sort_of_all(matrix, queries, 60))


def test_a_passage_as_a_query_finds_itself_and_k_may_exceed_the_corpus():
    documents = invented(40)
    retriever = DenseRetriever(documents, Hashed())
    lists = retriever.search(texts_of(documents[:5]), 99)
    assert [row[0] for row in lists] == documents[:5] and {*map(len, lists)} == {40}


def test_a_passage_is_encoded_as_its_title_and_its_text():
    encoder = Hashed()
    DenseRetriever([Document("1", "Ana Bell", "draws."), Document("2", "", "no title")], encoder)
    assert encoder.encoded == ["Ana Bell draws.", "no title"]


@pytest.mark.parametrize("documents, encoder", [([], Hashed()), (invented(1), "")])
def test_an_empty_corpus_and_a_missing_encoder_are_one_line_errors(documents, encoder):
    assert "dense retrieval needs an --encoder" in message(DenseRetriever, documents, encoder)


def test_a_second_retriever_of_the_same_corpus_encodes_nothing():
    documents, first, second = invented(37), Hashed(), Hashed()
    built, read = (DenseRetriever(documents, encoder, runs="mine") for encoder in (first, second))
    assert len(first.encoded) == 37 and second.encoded == []
    assert built.search(["ana"], 5) == read.search(["ana"], 5)
    shards = sorted(Path("mine/vectors").glob("hashed-*/*"))
    assert [path.name for path in shards] == [f"0000{i}.npy" for i in range(4)]
    last = np.load(shards[3])  # an ordinary numpy file
    assert last.shape == (7, 16) and last.dtype == np.float16


@pytest.mark.parametrize("stop", [0, 10, 29])
def test_an_interrupted_run_continues_at_the_unfinished_shard(stop):
    documents = invented(37)
    first, second = Hashed(stop), Hashed()
    with pytest.raises(KeyboardInterrupt):
        vectors_of(documents, first)
    assert np.array_equal(vectors_of(documents, second), encoded_at_once(documents))
    assert len(first.encoded) == stop // 10 * 10
    assert first.encoded + second.encoded == texts_of(documents)  # each passage is encoded once


def test_each_process_of_a_run_begins_at_a_shard_of_its_own(monkeypatch):
    corpus, second, first = invented(40), Hashed(20), Hashed()  # 4 shards
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(KeyboardInterrupt):
        passage_vectors(corpus, second)
    assert second.encoded == texts_of(corpus[20:])
    monkeypatch.setenv("RANK", "0")
    assert (vectors_of(corpus, first) == encoded_at_once(corpus)).all()
    assert first.encoded == texts_of(corpus[:20])


def test_a_run_that_is_stopped_while_writing_leaves_no_incomplete_shard(monkeypatch):
    def dies(path, vectors):
        path.touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "save", dies)
        vectors_of(invented(37), Hashed())
    assert ["part" in path.name for path in shard_files()] == [True]
    assert np.array_equal(vectors_of(invented(37), Hashed()), encoded_at_once(invented(37)))


CORPUS = invented(12)
CHANGED = {
    "a word": [Document("0", "Title 0", "changed"), *CORPUS[1:]],
    "one less": CORPUS[:-1],
    # The corpus has the same letters in the same order, but the title of the second passage is now
    # the end of the first.
    "where a passage ends": [
        Document("0", "", passage_text(CORPUS[0]) + CORPUS[1].title),
        Document("1", "", CORPUS[1].text),
        *CORPUS[2:],
    ],
    "the weights": CORPUS,
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_corpus_or_other_weights_use_another_folder(change):
    documents, encoder = CHANGED[change], Hashed()
    vectors_of(CORPUS, Hashed())
    encoder.version = "2" if change == "the weights" else "1"
    vectors = vectors_of(documents, encoder)
    assert len(encoder.encoded) == len(documents) and len(os.listdir("runs/vectors")) == 2
    assert np.array_equal(vectors, encoded_at_once(documents))


@pytest.mark.parametrize(
    "damage",
    [
        of_fault(208, lambda path: np.save(path, np.array([{"pickled": 1}], dtype=object))),
        of_fault(209, lambda path: os.truncate(path, 400)),
        of_fault(210, lambda path: os.truncate(path, 20)),
        of_fault(211, lambda path: os.truncate(path, 0)),
    ],
)
def test_the_error_of_a_damaged_file_of_vectors_names_its_folder(damage):
    vectors_of(invented(20), Hashed())
    damage(shard_files()[1])
    text = message(passage_vectors, invented(20), Hashed())
    assert "hashed-1-" in text and text.endswith("remove the folder to encode again")


# ------------------------------------------------- encoders of sentence-transformers (extra: dense)

TEXTS = ["Ana Bell", "Kelmouth is a harbour town in the north", "a town", "Ana Bell draws maps"]


def test_a_missing_sentence_transformers_is_a_one_line_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert "pip install sentence-transformers" in message(Encoder, "some/e5")


@pytest.fixture
def make(tmp_path):
    """Returns a function that saves a random BERT and a tokenizer of TEXTS' words by a name."""
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


@pytest.mark.parametrize("causal", [False, True])
def test_a_vector_is_the_mean_or_in_a_causal_encoder_the_last_token(make, causal):
    path = make("qwen3-embedding" if causal else "tiny-bert")
    if causal:
        sizes = small(head_dim=8, max_position_embeddings=64)
        model_of("qwen3", vocab_size=200, **sizes).save_pretrained(path)
    encoder = Encoder(path, "cpu")
    vectors = encoder(TEXTS, "passage")
    assert vectors.shape == (4, 32) and vectors.dtype == np.float32
    for text, vector in zip(TEXTS, vectors, strict=True):  # the texts have different lengths
        ids = torch.tensor([encoder.model.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            states = encoder.model[0].auto_model(ids).last_hidden_state[0]  # [L, d]
        pooled = states[-1] if causal else states.mean(0)
        assert np.allclose(vector, (pooled / pooled.norm()).numpy(), atol=1e-5)


E5 = ("query: ", "passage: ")


@pytest.mark.parametrize(
    "name, prefixes",
    [
        ("intfloat/e5-base-v2", E5),
        ("Multilingual_E5_small", E5),
        ("bge-base-en", ("Represent this sentence for searching relevant passages: ", "")),
        ("bge-m3", ("", "")),  # published as a model without an instruction
        ("e5s/tiny-bert", (None, None)),
        # In the hub's cache the last part of a path is a hash.
        ("models--x--e5-base/snapshots/0bge0", E5),
    ],
)
def test_the_name_of_the_encoder_decides_about_the_prefixes(name, prefixes):
    assert dense.prefixes(name) == prefixes


def test_a_prefix_comes_from_the_model_or_from_its_name(make):
    path, bare = make(), Encoder(make("plain"), "cpu")
    other = Encoder(path, "cpu")
    other.model.prompts = {"query": "query: ", "document": "passage: "}
    other.model.save(path)
    for encoder in (Encoder(path, "cpu"), Encoder(make("e5-base"), "cpu")):
        assert np.allclose(encoder(["Ana Bell"]), bare(["query: Ana Bell"]), atol=1e-6)
        assert np.allclose(encoder(["Ana"], "passage"), bare(["passage: Ana"]), atol=1e-6)


def test_texts_without_words_and_broken_texts_are_encoded(make):
    encoder = Encoder(make(), "cpu")
    lengths = np.linalg.norm(encoder(["", "??", "half \ud800 a pair", "ana " * 500]), axis=1)
    assert np.allclose(lengths, 1, atol=1e-5)


def test_the_version_changes_only_with_the_weights(make):
    path = make()
    version = Encoder(path, "cpu").version
    assert Encoder(path, "cpu").version == version
    make(seed=1)
    assert Encoder(path, "cpu").version != version


def test_a_missing_or_truncated_encoder_is_a_one_line_error(make):
    path = Path(make())
    os.truncate(path / "model.safetensors", 1000)
    for name in ("./nothing", str(path)):
        assert f"encoder {name}: cannot be loaded" in message(Encoder, name)


def test_weights_that_give_nan_are_an_error(make):
    encoder = Encoder(make(), "cpu")
    encoder.model[0].auto_model.embeddings.LayerNorm.weight.data[0] = float("nan")
    assert "its vectors are not finite" in message(encoder, ["a"])
