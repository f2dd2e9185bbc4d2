"""Tests dense.py: the nearest passages equal a full sort, and vectors are encoded once."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import message, model_of, small
from tokenizers.processors import TemplateProcessing

from data import Document
from retrievers import dense
from retrievers.dense import DenseRetriever, Encoder, passage_vectors

WORDS = "ana bell born in kelmouth norland varen tidewerk ivo marr lantern storm coast".split()


def invented(n):
    """Returns n passages of four to eleven words."""
    draw = np.random.default_rng(0)
    return [
        Document(str(i), f"Title {i % 7}", " ".join(draw.choice(WORDS, draw.integers(4, 12))))
        for i in range(n)
    ]


class Hashed:
    """An encoder that draws each text's vector with the text as the seed, and records the passages
    that it encodes.
    """

    version = b"1"

    def __init__(self):
        self.encoded = []

    def __call__(self, texts, kind="query"):
        if kind == "passage":
            self.encoded += texts
        rows = [np.random.default_rng([*text.encode(), 0]).standard_normal(16) for text in texts]
        return (np.array(rows) / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch, tmp_path):
    """Limits a shard to ten passages, and runs each test in a folder of its own."""
    monkeypatch.setattr(dense, "SHARD", 10)
    monkeypatch.chdir(tmp_path)


def texts_of(documents):
    return [f"{d.title} {d.text}".strip() for d in documents]


def encoded_at_once(documents):
    """Returns the vectors of all passages without the files."""
    return Hashed()(texts_of(documents)).astype(np.float16)


@pytest.mark.parametrize("k", [1, 5, 80])
def test_a_search_in_shards_equals_a_sort_of_all_scores(k):
    documents, queries = invented(47), ["ana", "bell of varen"]
    scores = Hashed()(queries) @ encoded_at_once(documents).astype(np.float32).T
    best = np.argsort(-scores, axis=1)[:, :k]
    lists = DenseRetriever(documents, Hashed(), "cpu").search(queries, k)
    assert lists == [[documents[row] for row in rows] for rows in best]


def test_an_interrupted_run_continues_at_the_unfinished_shard(monkeypatch):
    documents, save, first, second = invented(37), np.save, Hashed(), Hashed()

    def stops(path, vectors):
        save(path, vectors[:9])  # a part of a shard
        if len(first.encoded) > 20:
            raise KeyboardInterrupt
        save(path, vectors)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "save", stops)
        DenseRetriever(documents, first, runs="mine")
    found = DenseRetriever(documents, second, "cpu", "mine").search(["ana"], 5)
    assert second.encoded == texts_of(documents)[20:]  # the complete shards are used again
    assert found == DenseRetriever(documents, Hashed(), "cpu").search(["ana"], 5)
    shards = [np.load(path) for path in Path("mine/vectors").glob("*[0-9a-f].npy")]
    assert sorted(map(len, shards)) == [7, 10, 10, 10] and shards[0].dtype == np.float16


@pytest.mark.parametrize("version, encoded", [(b"1", 10), (b"2", 20)])
def test_changed_texts_or_weights_are_encoded_again(version, encoded):
    corpus, encoder = invented(20), Hashed()
    passage_vectors(corpus, Hashed())
    encoder.version = version
    corpus[3] = Document("3", "", "changed")
    vectors = torch.cat(passage_vectors(corpus, encoder)).numpy()
    assert np.array_equal(vectors, encoded_at_once(corpus))
    assert len(encoder.encoded) == encoded and "changed" in encoder.encoded


# ------------------------------------------------- encoders of sentence-transformers (extra: dense)

TEXTS = ["Ana Bell", "Kelmouth is a harbour town in the north", "a town", "Ana Bell draws maps"]


@pytest.fixture
def make(tmp_path, bpe):
    """Returns a function that saves a random BERT by a name; each text begins with one token."""
    pytest.importorskip("sentence_transformers", reason="the extra dense is not installed")
    from transformers import BertConfig, BertModel

    tokenizer = copy.deepcopy(bpe)
    tokenizer.chat_template = None
    first = TemplateProcessing("a $0", special_tokens=[("a", 1)])
    tokenizer.backend_tokenizer.post_processor = first

    def make(name="tiny-bert", seed=0):
        tokenizer.save_pretrained(tmp_path / name)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        more = {"intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.1}
        torch.manual_seed(seed)
        config = BertConfig(vocab_size=len(tokenizer), **sizes, **more)
        BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize("causal", [False, True])
def test_a_vector_is_the_mean_or_in_a_causal_encoder_the_last_token(make, causal):
    path = make("qwen3-embedding" if causal else "tiny-bert")
    if causal:
        sizes = small(head_dim=8, max_position_embeddings=64)
        model_of("qwen3", vocab_size=1000, **sizes).save_pretrained(path)
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
TASK = "Given a web search query, retrieve relevant passages that answer the query"
E5_INSTRUCT = (f"Instruct: {TASK}\nQuery: ", "")


@pytest.mark.parametrize(
    "prompts, prefixes",
    [
        ({"sts_query": "sts: ", "web_search_query": "ask: "}, ("ask: ", "")),
        ({"query": "q: ", "document": "d: ", "Clustering": "c: "}, ("q: ", "d: ")),
        ({"query": "", "document": ""}, E5),  # empty ones are sentence-transformers' own
        ({"sts_query": "sts: "}, E5),
    ],
)
def test_the_models_own_prompts_come_before_its_name(prompts, prefixes):
    assert dense.prefixes("intfloat/e5-base-v2", prompts) == prefixes


@pytest.mark.parametrize(
    "name, prefixes",
    [
        ("bge-base-en", ("Represent this sentence for searching relevant passages: ", "")),
        ("e5s/tiny-bert", (None, None)),
        ("models/bge-large-en/e5-base-v2/", E5),  # the last part counts
        ("intfloat/e5-mistral-7b-instruct", E5_INSTRUCT),
        ("BAAI/bge-large-zh-v1.5", ("为这个句子生成表示以用于检索相关文章：", "")),
        ("BAAI/bge-multilingual-gemma2", (f"<instruct>{TASK}.\n<query>", "")),
        ("BAAI/bge-large-zh-noinstruct", ("", "")),
    ],
)
def test_the_name_of_the_encoder_decides_about_the_prefixes(name, prefixes):
    assert dense.prefixes(name) == prefixes


def test_a_prefix_comes_from_the_model_or_from_its_name(make, capsys):
    path, bare = make(), Encoder(make("plain"), "cpu")
    other = Encoder(path, "cpu")
    other.model.prompts = {"query": "query: ", "document": "passage: "}
    other.model.save(path)
    for encoder in (Encoder(path, "cpu"), Encoder(make("e5-base"), "cpu")):
        assert np.allclose(encoder(["Ana Bell"]), bare(["query: Ana Bell"]), atol=1e-6)
        assert np.allclose(encoder(["Ana"], "passage"), bare(["passage: Ana"]), atol=1e-6)
    assert capsys.readouterr().err.count("query 'query: ', of a passage 'passage: '") == 2


def test_texts_without_words_and_broken_texts_are_encoded(make):
    encoder = Encoder(make(), "cpu")
    lengths = np.linalg.norm(encoder(["", "??", "half \ud800 a pair", "ana " * 500]), axis=1)
    assert np.allclose(lengths, 1, atol=1e-5)


def test_the_version_changes_with_the_weights_and_weights_that_give_nan_are_an_error(make):
    versions = [Encoder(make(seed=seed), "cpu").version for seed in (0, 0, 1)]
    assert versions[0] == versions[1] != versions[2]
    encoder = Encoder(make(), "cpu")
    encoder.model[0].auto_model.embeddings.LayerNorm.weight.data[0] = float("nan")
    assert "vectors are not finite" in message(encoder, ["a"])
