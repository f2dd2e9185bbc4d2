"""Tests lab/difficulty.py: scores of rollouts, buckets, and wrong flags."""

import re

import pytest
from conftest import message

import eval as evaluation
from curriculum import with_buckets
from data import Question
from formats.records import finished_records
from lab import difficulty
from lab.difficulty import main


@pytest.fixture
def out(tmp_path):
    return tmp_path / "d.jsonl"


def test_each_question_gets_scores_their_mean_and_a_bucket(out, monkeypatch, capsys):
    """Question n is right in the first n of 10 rollouts."""
    scores = {f"q{n}": [float(i < n) for i in range(10)] for n in range(10)}
    monkeypatch.setattr(difficulty, "scores_of_model", lambda *_: scores)
    main(["--out", str(out)])
    # By right rollouts: 0 and 1 dropped, 2 to 4 hard, 5 to 7 medium, 8 and 9 easy.
    assert "10 questions: " in (text := capsys.readouterr().out) and "hard 3, medium 3" in text
    expected = {"id": "q3", "scores": [1.0] * 3 + [0.0] * 7, "score": 0.3, "bucket": "hard"}
    assert finished_records(out)[3] == expected
    questions = [Question(name, "?", ["!"]) for name in scores]
    assert [q.level for q in with_buckets(questions, str(out), False)][-1] == "easy"
    # By the first success; what is never right is hard.
    main(["--out", str(out), "--recipe", "r1_searcher"])
    assert "easy 9" in capsys.readouterr().out and out.with_name("d.jsonl.old1").exists()


def test_the_scheme_and_its_metric_follow_the_recipe(out, monkeypatch, capsys):
    # Right once in 20, at the 11th: under R1-Searcher medium; under UR² 0.05, which is dropped.
    asked = []
    scores = {"q0": [0.0] * 10 + [1.0] + [0.0] * 9, "q1": [0.0] * 20}

    def measured(settings, _, metric):
        asked.append((settings.recipe, settings.temperature, metric))
        return scores

    monkeypatch.setattr(difficulty, "scores_of_model", measured)
    for flags in ("--recipe r1_searcher --variant 2wiki_only", "--recipe r_search", ""):
        main(["--out", str(out), *flags.split()])
    assert asked == [("r1_searcher", 1.0, "cem"), ("r_search", 1.0, "f1"), ("ur2", 1.0, "f1")]
    printed = capsys.readouterr().out
    assert re.findall(r"dropped (\d)", printed) == ["0", "2", "2"] and "medium 1" in printed
    assert "trains nothing: no question was right in enough rollouts" in printed
    assert printed.count("use: python train.py --difficulty") == 1


def test_a_model_is_measured_by_sampling_with_seeds_of_the_questions(
    out, monkeypatch, toy_policy, toy_tokenizer
):
    """Measures the untrained tiny model on one question of each kind."""
    monkeypatch.setattr(evaluation, "load_model", lambda *_, **__: (toy_policy, toy_tokenizer))
    flags = f"--questions 1 --samples 3 --max_turn_tokens 4 --output_dir {out.parent} --out {out}"
    main(flags.split())
    records = finished_records(out)
    assert len(records) == 5 and all(len(record["scores"]) == 3 for record in records)
    main(flags.split())
    assert finished_records(out) == records


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("", "--out is missing"),
        ("--out x --samples 19 --recipe r1_searcher", "--samples 19"),
        ("--out x --temperature 0", "--temperature 0 is greedy"),
    ],
)
def test_impossible_flags_are_an_error_of_one_line(arguments, expected):
    assert expected in message(main, arguments.split())
