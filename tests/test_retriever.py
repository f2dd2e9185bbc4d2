"""Tests retriever.py: BM25 by hand and against rank-bm25, order, controls and commands."""

import math
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, command_line, message
from processes import heed_signals
from rank_bm25 import BM25Okapi

from data import Document, Question, SearchRequest
from formats.records import append_jsonl
from metrics import tokenize
from retriever import BM25, SMALL_IDF, main, make_retriever, retrieve, top
from retrievers.controls import make_control
from settings import Settings


def asked(*queries):
    return [SearchRequest(Question("1", "?", ["x"]), query) for query in queries]


def documents(*texts):
    return [Document(str(i), "", text) for i, text in enumerate(texts)]


def random_texts(rng, count, words):
    """Returns texts with w0 in most (negative idf) and high numbers in few; some may be empty."""
    chances = 1 / np.arange(1, words + 1)
    return [
        " ".join(f"w{i}" for i in rng.choice(words, rng.integers(0, 30), p=chances / chances.sum()))
        for _ in range(count)
    ]


# ------------------------------------------------------------------------------------------ by hand


def test_two_scores_worked_by_hand():
    bm25 = BM25(documents("cat cat sat", "dog ran off", "a bird sang"))
    # Every document has the mean length 3, so the norm is k1 = 1.5. "cat" is in 1 of 3 documents:
    # idf = ln(2.5 / 1.5) = ln(5/3). It occurs f = 2 times: 2 · 2.5 / (2 + 1.5) = 10/7.
    np.testing.assert_allclose(bm25.scores("cat"), [math.log(5 / 3) * 10 / 7, 0, 0], rtol=1e-12)
    # With f = 1 the factor is 1 · 2.5 / (1 + 1.5) = 1, so the score is the idf.
    np.testing.assert_allclose(bm25.scores("dog"), [0, math.log(5 / 3), 0], rtol=1e-12)


def test_a_negative_idf_becomes_a_quarter_of_the_mean_idf():
    bm25 = BM25(documents("the cat", "the dog", "a bird"))
    # "the" has idf ln(1.5 / 2.5) = -x with x = ln(5/3); cat, dog, a and bird have x each. The mean
    # is 3x / 5, so the floor is 0.25 · 3x / 5 = 0.15 x. All documents have the mean length, so the
    # score for f = 1 is the idf.
    expected = 0.15 * math.log(5 / 3) * np.array([1, 1, 0])
    np.testing.assert_allclose(bm25.scores("the"), expected, rtol=1e-12)


def test_in_a_tiny_corpus_the_smallest_idf_is_positive():
    # Every idf is ln(1.5 / 1.5) = 0 or ln(0.5 / 2.5) < 0, so rank-bm25's floor would be negative.
    bm25 = BM25(documents("a guide", "a pump"))  # both have the mean length
    np.testing.assert_allclose(bm25.scores("a guide"), [2 * SMALL_IDF, SMALL_IDF], rtol=1e-12)
    assert list(BM25(documents("...", "!")).scores("cat")) == [0, 0]  # no document has a word


# -------------------------------------------------------------------------------- against rank-bm25


@pytest.mark.parametrize("parameters", [{}, {"k1": 0.9, "b": 0.4, "epsilon": 0.1}])
@pytest.mark.parametrize("seed", range(4))
def test_scores_equal_those_of_rank_bm25_on_random_corpora(seed, parameters):
    rng = np.random.default_rng(seed)
    texts = random_texts(rng, int(rng.integers(3, 60)), words=40) + ["w0 w1"]
    reference = BM25Okapi([tokenize(text) for text in texts], **parameters)
    bm25 = BM25(documents(*texts), **parameters)
    assert 0 < len(bm25.rows) < len(bm25.vocabulary)  # some words have a row, some have postings
    queries = ["", "unknown", "w0", "w0 w0 w1", "w39 unknown W3", "w2 w2 w2 w17"]
    queries += random_texts(rng, 5, words=50)
    for query in queries:
        expected = reference.get_scores(tokenize(query))
        np.testing.assert_allclose(bm25.scores(query), expected, rtol=0, atol=1e-9)


def test_a_boosted_title_counts_as_if_the_text_repeated_it():
    corpus = [Document("1", "ana bell", "born"), Document("2", "x", "ana"), Document("3", "y", "z")]
    repeated = documents("ana bell ana bell born", "x x ana", "y y z")
    boosted = BM25(corpus, title_boost=2).scores("ana bell")
    assert boosted.tolist() == BM25(repeated).scores("ana bell").tolist()


# ------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("size", [1, 40, 129, 1000])
def test_top_is_a_stable_sort_for_any_scores(size):
    last = np.arange(size) >= size - 1.0  # the best is in the last, partial group
    for scores in (np.random.default_rng(1).integers(-2, 3, size=size), last * 1.0):
        for k in (1, 15, 40, 10_000):
            expected = np.argsort(-scores, kind="stable")[:k]
            assert top(scores, k).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "passages, query",
    [
        (["東京は日本の首都である。", "大阪は日本の都市である。"], "日本の首都はどこ？"),
        (["张伟出生于北京。", "李娜出生于武汉。"], "谁出生于北京"),
        (["สมชายเกิดที่กรุงเทพ", "มานีเกิดที่เชียงใหม่", "ทะเลสีฟ้า"], "ใครเกิดที่กรุงเทพ"),
        (["Jose\u0301 was born in Kelmouth", "Jos is a town"], "Jos\u00e9"),
        (["Jos\u00e9 was born in Kelmouth", "Jos is a town"], "JOSE\u0301"),
    ],
)
def test_scripts_without_blanks_and_accents_in_two_parts_are_found(passages, query):
    first, *others = BM25(documents(*passages, "Ana Bell")).scores(query)
    assert first > max(others)


def test_equal_queries_are_searched_once_and_equal_passages_are_shown_once():
    cats = [Document(name, "", "cat") for name in "abc"] + [Document("d", "Cat", "cat")]
    searched = []

    class Server:
        def search(self, queries, k):
            searched.extend(queries)
            return [cats, None, False]

    found = retrieve(Server(), asked("cat", "x", "cat", "y"), 3)
    assert found == [[cats[0], cats[3]], None, [cats[0], cats[3]], False]
    assert searched == ["cat", "x", "y"]


# ----------------------------------------------------------------------- controls, other retrievers


def test_the_random_control_depends_only_on_the_query_and_the_seed():
    corpus = documents(*map(str, range(99)))
    first, other = retrieve(make_control("random", corpus, 3), asked("q", "r"), 4)
    # The result is the same in every process, since no hash of a string is used.
    assert [document.id for document in first] == ["52", "45", "18", "98"] and other != first
    assert [first] != retrieve(make_control("random", corpus, 4), asked("q"), 4)
    assert "the corpus is empty" in message(make_retriever, [], Settings(retriever="random"))


def test_the_oracle_returns_the_gold_documents_and_counts_them_from_one():
    references = tuple(documents("a", "b", "c", "d"))
    gold = Question("1", "?", ["x"], references=references, supporting=(1, 4))
    requests = [SearchRequest(gold, "q"), SearchRequest(Question("2", "?", ["x"]), "q")]
    found = retrieve(make_control("oracle", [], 0), requests, 5)
    assert found == [[references[0], references[3]], []]


def test_a_retriever_gets_its_settings(monkeypatch):
    arguments, corpus = [], documents("a")
    for name in ("dense.DenseRetriever", "remote.HttpRetriever"):
        monkeypatch.setattr(f"retrievers.{name}", lambda *values: arguments.append(values))
    dense = Settings(retriever="dense", encoder="e5", output_dir="mine")
    make_retriever(corpus, dense, "cuda:1")
    make_retriever([], Settings(retriever="http", retriever_url="http://h", timeout=7.0))
    assert arguments == [(corpus, "e5", "cuda:1", "mine"), ("http://h", 7.0)]
    bm25 = make_retriever([Document("1", "a", "b")], Settings(title_boost=0))
    assert not bm25.scores("a").any()


def test_bm25_and_http_load_no_torch():
    code = (
        "import sys; from retriever import Settings as S, make_retriever as m, INVENTED\n"
        "m(INVENTED, S()).search(['a'], 1)\n"
        "try: m([], S(retriever='http', retriever_url='http://127.0.0.1:9'))\n"
        "except Exception as e: print('torch' in sys.modules, e)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    expected = "False --retriever_url http://127.0.0.1:9: no retriever answers"
    assert result.stdout.startswith(expected), result.stderr


# ------------------------------------------------------------------------------ python retriever.py


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["serve"], "the corpus is empty: give a --corpus"),
        (["cat", "--retriever", "http", "--retriever_url", "h"], "--retriever_url h: no retriever"),
        (["cat", "--retriever", "web"], "--retriever_url '': give http://host/search?"),
        (["cat", "--retriever", "dense"], "--retriever dense needs an --encoder"),
    ],
)
def test_wrong_flags_are_errors_of_one_line(capsys, arguments, fragment):
    assert fragment in command_line(main, arguments, capsys)


def test_a_corpus_is_served_until_ctrl_c_and_the_command_asks_the_server(tmp_path, capsys):
    corpus = tmp_path / "c.jsonl"
    towns = [{"id": str(i), "title": f"Town {i}", "text": "It is old."} for i in range(99)]
    append_jsonl(corpus, towns)
    # A background shell ignores Ctrl-C, and the child process would inherit that.
    words = [sys.executable, "retriever.py", "serve", "--corpus", str(corpus), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=ROOT, preexec_fn=heed_signals, **pipes)
    try:
        line = process.stdout.readline()
        assert line.startswith("bm25 at http://127.0.0.1:")
        url = line.split(" at ")[1].split(";")[0]
        main(["town 8", "--k", "1", "--retriever", "http", "--retriever_url", url])
        assert capsys.readouterr().out == "1. [8] Town 8: It is old.\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (130, "", "\ninterrupted\n")
    finally:
        process.kill()
        process.wait()
