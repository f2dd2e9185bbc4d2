"""embed.py: similarities worked out by hand, and what must not make two texts unlike."""

import doctest
import json
import math
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import RobertaConfig, RobertaModel

from data import Document
from errors import InputError
from retrievers import embed
from retrievers.dense import make_tiny_encoder
from retrievers.embed import Encoder, cosine, encoder_embedder, make_embedder, tfidf_embedder

DOCUMENTS = [Document("1", "Ana", "born in town"), Document("2", "Bo", "born in city")]


def similarity(embedder, *texts):
    return cosine(embedder(list(texts)))[0, 1]


def test_the_docstring_examples_are_true():
    assert doctest.testmod(embed).failed == 0


def test_without_a_corpus_every_word_weighs_the_same():
    # (1, 1, 0) and (1, 0, 1): 1 / (√2 · √2)
    assert similarity(tfidf_embedder(), "ana birthplace", "Ana: employer") == pytest.approx(1 / 2)
    assert similarity(tfidf_embedder(), "ana", "bo") == 0.0
    # counts (2, 1) and (1, 1): 3 / (√5 · √2)
    assert similarity(tfidf_embedder(), "ana ana town", "ana town") == pytest.approx(
        3 / math.sqrt(10)
    )


def test_a_rare_word_weighs_more_than_a_common_one():
    embedder = make_embedder("tfidf", DOCUMENTS)
    # N = 2: idf(ana) = ln(3/2) + 1 (one document), idf(born) = ln(3/3) + 1 = 1 (both)
    rare = math.log(1.5) + 1
    assert similarity(embedder, "ana born", "born") == pytest.approx(1 / math.sqrt(rare**2 + 1))
    assert similarity(embedder, "ana born", "ana") == pytest.approx(rare / math.sqrt(rare**2 + 1))


def test_invented_words_do_not_make_a_repeated_query_another_one():
    embedder = make_embedder("tfidf", DOCUMENTS)
    assert similarity(embedder, "ana town qqq", "ana town zzz") == pytest.approx(1.0)
    # nothing but invented words: no vector, and yet not free
    assert similarity(embedder, "qqq", "zzz") == similarity(embedder, "??", "??") == 1.0
    assert similarity(embedder, "qqq", "ana") == 0.0
    assert similarity(tfidf_embedder(), "??", "??") == 1.0


# ------------------------------------------------------------------------------------- a HF encoder

TEXTS = [
    "Ana Bell",
    "Kelmouth is a harbour town in the north of Norland",
    "a town",
    "Ana Bell draws maps",
]


@pytest.fixture
def make(tmp_path):
    """make("some-e5") writes a random BERT with 64 positions into a directory of that name."""
    return lambda name="tiny-bert", **changes: make_tiny_encoder(tmp_path / name, TEXTS, **changes)


@pytest.fixture
def encoder(make):
    return make()


def states_of(encoder, text):
    """The last hidden states of this text alone, by the model itself.  # [L, d]"""
    ids = torch.tensor([encoder.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return encoder.model(ids).last_hidden_state[0]


def unit(vector):
    return (vector / vector.norm()).numpy()


def state(path, **modes):
    """1_Pooling/config.json, as sentence-transformers writes it."""
    folder = Path(path) / "1_Pooling"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))


def spy(encoder, monkeypatch):
    """All texts that its tokenizer is given from now on."""
    seen, tokenizer = [], encoder.tokenizer
    monkeypatch.setattr(
        encoder,
        "tokenizer",
        lambda texts, **limits: seen.extend(texts) or tokenizer(texts, **limits),
    )
    encoder.tokenizer.pad_token_id = tokenizer.pad_token_id
    return seen


def test_mean_pooling_is_the_mean_of_the_states_at_length_one(encoder):
    encoder = Encoder(encoder)
    vectors = encoder.passages(TEXTS)
    assert vectors.shape == (4, 64) and vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    for text, vector in zip(TEXTS, vectors, strict=True):
        states = states_of(encoder, text)
        assert len(states) == len(text.split()) + 2  # [CLS] and [SEP] are part of it
        assert np.allclose(vector, unit(states.sum(0) / len(states)), atol=1e-5)


def test_cls_pooling_is_the_first_state(encoder):
    encoder = Encoder(encoder, pooling="cls")
    for text, vector in zip(TEXTS, encoder.passages(TEXTS), strict=True):
        assert np.allclose(vector, unit(states_of(encoder, text)[0]), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("change", ["right", "left", "no padding token"])
def test_the_same_text_alone_or_in_a_batch_is_the_same_vector(encoder, pooling, change):
    if change == "no padding token":
        edit(encoder, "tokenizer_config.json", pad_token=None)
    else:
        edit(encoder, "tokenizer_config.json", padding_side=change)
    encoder = Encoder(encoder, pooling=pooling)
    assert (encoder.tokenizer.pad_token is None) == (change == "no padding token")
    together, alone = (
        encoder.passages(TEXTS),
        np.concatenate([encoder.passages([text]) for text in TEXTS]),
    )
    assert np.allclose(together, alone, atol=1e-5)
    encoder.batch_size = 2  # batches by length: 10 and 4 tokens, then 2 and 2; the order comes back
    assert np.allclose(encoder.passages(TEXTS), alone, atol=1e-5)


def edit(path, file, **changes):
    file = Path(path) / file
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "query", "passage", "pooling"),
    [
        ("e5-base-v2", "query: Ana Bell", "passage: Ana Bell", "mean"),
        ("Multilingual-E5-small", "query: Ana Bell", "passage: Ana Bell", "mean"),
        (
            "bge-base-en-v1.5",
            "Represent this sentence for searching relevant passages: Ana Bell",
            "Ana Bell",
            "cls",
        ),
        ("bge-m3", "Ana Bell", "Ana Bell", "cls"),  # published as one without an instruction
        ("e5s/tiny-bert", "Ana Bell", "Ana Bell", "mean"),  # a folder above it names nothing
        (
            "models--x--e5-base/snapshots/0bge0",
            "query: Ana Bell",
            "passage: Ana Bell",
            "mean",
        ),  # but the hub's own does
    ],
)
def test_the_name_decides_what_stands_before_the_text(
    make, monkeypatch, name, query, passage, pooling
):
    encoder = Encoder(make(name))
    assert encoder.pooling == pooling
    seen = spy(encoder, monkeypatch)
    encoder.queries(["Ana Bell"])
    encoder.passages(["Ana Bell"])
    assert seen == [query, passage]


def test_the_directory_says_how_it_pools_and_the_flag_overrules_it(make):
    path = make("bge-tiny")
    state(
        path,
        pooling_mode_cls_token=False,
        pooling_mode_mean_tokens=True,
        pooling_mode_max_tokens=False,
    )
    assert Encoder(path).pooling == "mean" and Encoder(path, pooling="cls").pooling == "cls"
    path = make("tiny")
    state(path, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    assert Encoder(path).pooling == "cls"
    state(path, pooling_mode="cls")  # newer files name it
    assert Encoder(path).pooling == "cls"


@pytest.mark.parametrize(
    "modes",
    [
        {"pooling_mode_lasttoken": True},
        {"pooling_mode": "max"},
        {},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
    ],
)
def test_a_pooling_that_is_not_here_is_one_line_unless_the_flag_says_otherwise(encoder, modes):
    state(encoder, **modes)
    one_line(
        encoder,
        "1_Pooling/config.json asks for .*, not mean or cls: give another encoder, or .* --pooling"
        " mean",
    )
    assert Encoder(encoder, pooling="mean").pooling == "mean"


def test_a_text_is_cut_at_the_models_own_limit(encoder):
    cut = Encoder(encoder)
    assert cut.max_length == 64  # its positions, not 512
    # [CLS] + 62 words + [SEP] are the 64
    assert np.allclose(
        cut.passages(["ana " * 500 + "bell"]), cut.passages(["ana " * 62]), atol=1e-6
    )
    assert not np.allclose(
        cut.passages(["ana " * 61]), cut.passages(["ana " * 61 + "bell"]), atol=1e-4
    )
    assert Encoder(encoder, max_length=5).max_length == 5


def test_a_roberta_has_two_positions_less_than_rows(tmp_path, encoder):
    shutil.copytree(encoder, tmp_path / "roberta")
    config = RobertaConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=34,
        pad_token_id=1,
    )
    RobertaModel(config).save_pretrained(tmp_path / "roberta")
    roberta = Encoder(str(tmp_path / "roberta"))
    assert roberta.max_length == 32
    assert np.allclose(
        roberta.passages(["town " * 100]), roberta.passages(["town " * 30]), atol=1e-6
    )


def test_texts_without_words_and_broken_texts_are_texts(encoder):
    encoder = Encoder(encoder)
    assert encoder.queries([]).shape == (0, 64)
    assert np.allclose(
        np.linalg.norm(encoder.queries(["", "??", "half \ud800 a pair"]), axis=1), 1, atol=1e-6
    )


def test_the_version_is_another_for_other_weights_and_the_same_for_a_copy(make, tmp_path):
    path = make()
    version = Encoder(path).version
    shutil.copytree(path, tmp_path / "copy")
    assert Encoder(str(tmp_path / "copy")).version == Encoder(path).version == version
    assert (
        len({version, Encoder(path, pooling="cls").version, Encoder(path, max_length=9).version})
        == 3
    )
    make(seed=1)
    assert Encoder(path).version != version


def test_threads_share_an_encoder_one_at_a_time(encoder, monkeypatch):
    encoder = Encoder(encoder)
    alone, found, inside, forward = encoder.queries(TEXTS), [], [], encoder.model.forward

    def watched(**batch):
        inside.append(1)
        time.sleep(0.005)
        assert len(inside) == 1
        inside.pop()
        return forward(**batch)

    def ask():
        found.append(encoder.queries(TEXTS))

    monkeypatch.setattr(encoder.model, "forward", watched)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8 and all(np.array_equal(vectors, alone) for vectors in found)


def test_no_graph_is_kept_even_where_the_weights_could_be_trained(encoder, monkeypatch):
    encoder = Encoder(encoder)
    assert (
        not any(parameter.requires_grad for parameter in encoder.model.parameters())
        and not encoder.model.training
    )
    encoder.model.requires_grad_(True)
    forward, states = encoder.model.forward, []
    monkeypatch.setattr(
        encoder.model, "forward", lambda **batch: states.append(forward(**batch)) or states[-1]
    )
    with torch.enable_grad():
        encoder.queries(["Ana"])
    assert states[0].last_hidden_state.grad_fn is None


# ------------------------------------------------------------------------ what cannot be an encoder


def one_line(name, match):
    with pytest.raises(InputError, match=match) as error:
        Encoder(str(name))
    assert "\n" not in str(error.value)


def test_an_encoder_that_is_not_there_is_one_line(tmp_path):
    one_line(
        tmp_path / "nothing",
        r"encoder .*nothing: cannot be loaded \(no such directory\): give a directory or a hub"
        r" name",
    )
    one_line(tmp_path, "there is no config.json in this directory")


def test_half_an_encoder_is_one_line(encoder, make):
    weights = Path(encoder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    one_line(encoder, "cannot be loaded")
    weights.unlink()
    one_line(encoder, "cannot be loaded")
    other = make("other")
    (Path(other) / "tokenizer.json").write_text("{")
    one_line(other, "cannot be loaded")


def test_weights_that_lack_a_layer_would_be_random_and_are_one_line(encoder):
    edit(encoder, "config.json", num_hidden_layers=3)
    one_line(
        encoder, "lacks 16 tensors .*encoder.layer.2"
    )  # 6 matrices and biases of 2, and 2 norms of 2


def test_a_tokenizer_of_another_model_is_one_line(make):
    one, other = make("one"), make_tiny_encoder(Path(make("two")), ["only two"])
    shutil.copy(Path(one) / "tokenizer.json", Path(other) / "tokenizer.json")
    one_line(other, r"\d+ tokens in the tokenizer, 6 in the model")  # 4 special ones and two words


def test_a_causal_lm_is_no_encoder(tmp_path, qwen2, bpe):
    qwen2.language_model.save_pretrained(tmp_path)
    bpe.save_pretrained(tmp_path)
    one_line(tmp_path, r"this is a causal LM \(qwen2\): give an encoder")


def test_an_encoder_decoder_is_none_either(encoder):
    edit(encoder, "config.json", model_type="bart", is_encoder_decoder=True)
    one_line(encoder, "this is an encoder-decoder")


def test_a_layer_behind_the_pooling_is_one_line(encoder):
    modules = [
        {"type": f"sentence_transformers.models.{layer}"}
        for layer in ("Transformer", "Pooling", "Normalize")
    ]
    (Path(encoder) / "modules.json").write_text(json.dumps(modules))
    Encoder(encoder)
    (Path(encoder) / "modules.json").write_text(
        json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}])
    )
    one_line(encoder, "modules.json puts a Dense layer")
    (Path(encoder) / "modules.json").write_text("[")
    one_line(encoder, "modules.json is not valid JSON")


def test_damaged_weights_give_no_vectors(encoder):
    encoder = Encoder(encoder)
    encoder.model.embeddings.LayerNorm.weight.data[0] = float("nan")
    with pytest.raises(InputError, match="its vectors are not finite"):
        encoder.passages(["Ana"])
    with pytest.raises(
        RuntimeError, match="its vectors are not finite"
    ):  # an InputError ends the training that searches
        encoder.queries(["Ana"])
    with pytest.raises(
        InputError, match="its vectors are not finite"
    ):  # a reward's vectors: nothing else can be done
        encoder.queries(["Ana"], InputError)


def test_a_device_or_a_pooling_that_is_not_there_is_one_line(encoder):
    for device in ("nowhere", "cuda:99"):
        with pytest.raises(
            InputError, match=f"--device {device}: not here .*: give cpu, cuda or cuda:0$"
        ):
            Encoder(encoder, device=device)
    with pytest.raises(InputError, match="--pooling max: one of auto, mean, cls"):
        Encoder(encoder, pooling="max")


# ------------------------------------------------------------------------------------------ by name


def test_an_embedder_by_name_is_the_encoders_queries_loaded_once_and_only_when_asked(
    make, monkeypatch
):
    path, loads, load = make("tiny-e5"), [], embed._load_encoder
    monkeypatch.setattr(embed, "_load_encoder", lambda name: loads.append(name) or load(name))
    embedder = make_embedder(path)
    assert loads == []
    assert np.array_equal(embedder(["Ana"]), embedder(["Ana"])) and loads == [path]
    assert np.allclose(encoder_embedder(path)(["Ana"]), Encoder(path).queries(["Ana"]), atol=1e-6)
    # cosines of unit vectors are their products
    vectors = embedder(["Ana", "Ana Bell"])
    assert cosine(vectors)[0, 1] == pytest.approx(vectors[0] @ vectors[1], abs=1e-6)


def test_running_the_file_shows_a_table(capsys):
    embed.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(
        f"{number}  " in line for number, line in enumerate(lines[1:], 1)
    )
    # on the diagonal every text is like itself
    assert all(line.split()[-4:][i] == "1.000" for i, line in enumerate(lines[1:]))
