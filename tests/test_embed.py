"""embed.py: similarities worked out by hand, and what must not make two texts unlike."""

import doctest
import math

import numpy as np
import pytest
import torch

import embed
from data import Document, InputError
from embed import cosine, encoder_embedder, make_embedder, tfidf_embedder

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
    assert similarity(tfidf_embedder(), "ana ana town", "ana town") == pytest.approx(3 / math.sqrt(10))


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


@pytest.fixture
def encoder(tmp_path, qwen2, bpe):
    qwen2.language_model.save_pretrained(tmp_path)
    bpe.save_pretrained(tmp_path)
    return str(tmp_path)


def test_an_encoder_is_the_mean_of_its_states_whatever_the_padding(encoder, qwen2, bpe):
    texts = ["Ana Bell", "Kelmouth is a town in Norland, and more"]
    vectors = encoder_embedder(encoder)(texts)
    assert vectors.shape == (2, 32)
    for text, vector in zip(texts, vectors, strict=True):
        with torch.no_grad():
            states = qwen2.language_model.model(torch.tensor([bpe(text)["input_ids"]])).last_hidden_state[0]
        assert np.allclose(vector, states.mean(0).numpy(), atol=1e-4)
    assert np.allclose(encoder_embedder(encoder, batch_size=1)(texts), vectors, atol=1e-4)


def test_an_encoder_is_frozen_and_loaded_once_and_only_when_asked(encoder, monkeypatch):
    loads = []
    load = embed._load_encoder
    monkeypatch.setattr(embed, "_load_encoder", lambda name: loads.append(load(name)) or loads[-1])
    embedder = make_embedder(encoder)
    assert loads == []
    assert isinstance(embedder(["a"]), np.ndarray) and isinstance(embedder(["b"]), np.ndarray)
    ((_, model),) = loads
    assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training


def test_an_encoder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"--embedder .*: cannot be loaded .* give tfidf, a directory or a hub name") as error:
        make_embedder(str(tmp_path / "nothing"))(["a"])
    assert "\n" not in str(error.value)


def test_running_the_file_shows_a_table(capsys):
    embed.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(f"{number}  " in line for number, line in enumerate(lines[1:], 1))
    # on the diagonal every text is like itself
    assert all(line.split()[-4:][i] == "1.000" for i, line in enumerate(lines[1:]))
