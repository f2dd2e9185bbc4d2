"""Tests compute_rewards: which models it asks, which answers are right, and the metrics of one
trajectory.
"""

import numpy as np
import pytest
from conftest import ScriptedModel

from data import Document, Question
from errors import InputError
from flags import resolve
from plumbing import build
from rewards import compute_rewards, example
from settings import Settings
from trajectory import RejectedQuery, Search, trajectory_from_text
from trajectory_metrics import (
    prediction_record,
    search_metrics,
    token_metrics,
    trajectory_metrics,
)


def build_models(name: str, documents=(), **changes):
    """Returns the settings of a recipe's first stage and the models that its reward asks."""
    settings = resolve(name, 1, True, changes)
    return settings, build.build_other_models(settings, list(documents), "cpu")


def compute(rows, name: str, documents=(), **changes):
    """Returns the reward terms, whether each answer is right, and the other models' metrics."""
    settings, others = build_models(name, documents, **changes)
    reward_terms, correct = compute_rewards(rows, settings, 0, others)
    return reward_terms, correct, {name: count() for name, count in others.stats.items()}


# --------------------------------------------------------------------- requests to the other models


def test_the_reader_is_asked_once_for_all_trajectories_that_searched(monkeypatch):
    reader = ScriptedModel(lambda text: "Norland" if "Norland" in text.split("\n")[0] else "Sudria")
    monkeypatch.setattr(build, "build_reader", lambda *_: reader)
    rows = [example("r_search"), example("r_search", searches=0), example("r_search", "Sudria")]
    reward_terms, correct, stats = compute(rows, "r_search")
    # Two of the three trajectories searched and have evidence, which names the country.
    assert len(reader.batches) == 1 and len(reader.batches[0]) == 2
    assert all(text.endswith(rows[0].question.question) for _, text in reader.batches[0])
    evidence_and_answer = [(terms["evidence"], terms["answer"]) for terms in reward_terms]
    assert evidence_and_answer == [(1, 1), (0, 1), (1, 0)]  # the answers of two models
    assert correct == [True, True, False] and stats == {"reader_failures": 0}


def test_without_the_evidence_reward_no_reader_is_loaded(monkeypatch):
    monkeypatch.setattr(build, "build_reader", lambda *_: pytest.fail("a reader was loaded"))
    for name in ("r_search", "ur2"):
        _, others = build_models(name, reward_args={"evidence_reward": False})
        assert not others.ask


def test_another_data_set_asks_for_a_reader_of_the_evidence():
    with pytest.raises(InputError, match=r"--reader http.*--variant without_evidence"):
        build.build_reader(Settings(recipe="r_search", data="another.jsonl"))


def compute_with_judge(monkeypatch, reply, rows, name="when_to_search", **changes):
    """Returns the results of `compute` and the judge's batches; the judge gives one reply."""
    judge = ScriptedModel(lambda text: reply)
    monkeypatch.setattr(build, "load_llm", lambda *_, **__: judge)
    return *compute(rows, name, judge="j", **changes), judge.batches


@pytest.mark.parametrize(
    "reply, rewards, correct, unreadable",
    [
        ("yes", [1, 1], [True, True], 0),
        ("I cannot say", [1, -0.4], [True, False], 1),  # the metric decides
    ],
)
def test_the_judge_s_verdict_replaces_the_metric(reply, rewards, correct, unreadable, monkeypatch):
    # Two searches each, β = 0.3. Stage 1: right 1, wrong −1 + 0.6.
    rows = [example("when_to_search", "Norland"), example("when_to_search", "Sudria")]
    reward_terms, right, stats, batches = compute_with_judge(monkeypatch, reply, rows)
    assert [terms["answer"] for terms in reward_terms] == pytest.approx(rewards)
    assert right == correct
    assert stats["judge_unreadable"] == unreadable  # the share of the verdicts that are unreadable
    assert len(batches) == 1 and len(batches[0]) == 2  # one request for all


def test_the_judge_is_asked_only_if_something_reads_its_verdict(monkeypatch):
    rows = [example("ur2", "Sudria")]
    assert compute_with_judge(monkeypatch, "yes", rows, "ur2")[1::2] == ([False], [])
    dynamic = {"reward": "ur2_stage2", "algorithm": "dapo"}
    reward_terms, correct, _, batches = compute_with_judge(
        monkeypatch, "yes", rows, "ur2", **dynamic
    )
    assert correct == [True] and len(batches) == 1  # dynamic sampling reads it
    assert reward_terms[0]["answer"] == 0  # UR²'s reward uses its own metric


def retrieval(second: str, documents=()) -> float:
    """Returns When to Search's term of a trajectory that searches for "ana bell", then `second`."""
    block = "</search><information>ana bell of kelmouth</information><reflect>b</reflect>"
    text = f"<think>t</think><search>ana bell{block}<search>{second}{block}<answer>e</answer>"
    question = Question("q", "Where was Ana born?", ["e"])
    trajectory = trajectory_from_text(question, text, "when_to_search")
    return compute([trajectory], "when_to_search", documents)[0][0]["retrieval"]


def test_the_similarity_of_queries_is_measured_over_the_run_s_corpus():
    # "zzz" is in no document, so it does not make the second query a new one: the cosine is 1 and
    # the retrieval term −1.
    documents = [Document("1", "ana bell", "kelmouth"), Document("2", "ida roth", "norland")]
    assert retrieval("ana bell zzz", documents) == pytest.approx(-1)


def test_without_a_corpus_only_words_of_this_step_s_questions_and_results_count():
    assert retrieval("ana bell zzz") == pytest.approx(-1)
    # The texts are the question and the result. Both have "ana" (idf 1), only the result has "bell"
    # and "kelmouth" (idf ln(3 / 2) + 1).
    assert retrieval("ana kelmouth") == pytest.approx(-1 / (1 + (np.log(3 / 2) + 1) ** 2))


# ------------------------------------------------------------------------------------ right answers


@pytest.mark.parametrize(
    "protocol, same",
    [
        ("r_search", "AnaBell AnaBell"),  # "-" and "_" are deleted
        ("r1_searcher", "Ana Bell Ana Bell"),  # both become a blank
        ("arena", "AnaBell Ana Bell"),  # "-" is deleted, "_" becomes a blank
    ],
)
def test_punctuation_is_treated_as_in_the_paper_s_scorer(protocol, same):
    for gold in ("AnaBell AnaBell", "Ana Bell Ana Bell", "AnaBell Ana Bell"):
        question = Question("q", "?", [gold])
        text = "<answer> Ana-Bell Ana_Bell </answer>"
        trajectory = trajectory_from_text(question, text, protocol)
        assert trajectory_metrics(trajectory)["em"] == (gold == same)


def test_searches_and_their_tokens_are_counted():
    def words(text, **_):
        return {"input_ids": text.split()}

    t = example("ur2", searches=0)
    t.append_model([7] * 4, [0.0] * 4, "<|begin_of_query|> x <|end_of_query|>")
    t.append_environment([8] * 9, "None", "documents")
    t.rejected_queries = [RejectedQuery("direct", "x")]
    # The documents "(1) t: w w ..." have 10 and 90 words, of which 5 and 10 are shown.
    short, long = ([Document("1", "t", "w " * count)] for count in (8, 88))
    t.searches = [
        Search("Ana Bell", short, "w " * 5),
        Search("Roth", long, "w " * 10),
        Search("ana bell?", short, "None", fallback=True),
        Search("z", [], "None"),
        Search("x", [], "Search is unavailable.", error="down"),
    ]
    assert search_metrics(t) == {
        "searched": 1, "searches": 5, "successful": 2, "repeated": 1, "queries": 1, "rejected": 1,
        "failed_rows": 1, "quoted_fallbacks": 0, "fallbacks": 1, "documents_cut": 0,
    }  # fmt: skip
    assert token_metrics(t, words) == {"retrieved": 100, "shown": 15}


def test_a_term_that_is_left_out_asks_no_other_model(monkeypatch):
    """In When to Search's Table 4, w/o r_a needs no verdict and w/o r_s needs no vectors."""
    rows = [example("when_to_search", "Sudria")]
    _, correct, _, batches = compute_with_judge(monkeypatch, "yes", rows, variant="without_r_a")
    assert correct == [False] and not batches
    for variant, embeds in (("without_r_s", False), ("", True)):
        _, others = build_models("when_to_search", variant=variant)
        assert ("embed" in others.ask) is embeds


def test_evaluations_read_a_choice_that_training_does_not():
    """UR² D.4: it is scored as the baselines are."""
    question = Question("c", "?", ["B"], "choice", ("elm", "oak"))
    row = trajectory_from_text(question, "So it is \\boxed{B}.", "ur2")
    assert row.answer is None and trajectory_metrics(row)["em"] == 0
    record = prediction_record(row, 0)
    assert (record["prediction"], record["metrics"]["em"]) == ("B", 1)
