"""Tests lab/difficulty.py: scores of rollouts, what an interrupt leaves, and wrong flags."""

import json
from collections import Counter

import pytest
from conftest import message

import eval as evaluation
from curriculum import read_difficulty
from data import Question
from formats.records import finished_records
from lab.difficulty import DifficultySettings, main, measure

MANY = [Question(f"q{i}", "?", ["!"]) for i in range(40)]


class Rollouts:
    """Answers question n right in the first n % 10 of 10 rollouts and records the numbers n."""

    def __init__(self, stop_at=None):
        self.numbers, self.stop_at = [], stop_at

    def __call__(self, questions):
        numbers = [int(question.id[1:]) for question in questions]
        if self.stop_at in numbers:
            raise KeyboardInterrupt
        self.numbers += numbers
        return [[float(i < number % 10) for i in range(10)] for number in numbers]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "d.jsonl"


def buckets_of(out, rollouts=None, questions=MANY, scheme="ur2"):
    options = DifficultySettings(out=str(out), samples=10, scheme=scheme)
    return measure(questions, rollouts or Rollouts(), options)


def test_each_question_gets_scores_their_mean_and_a_bucket(out):
    buckets = buckets_of(out, questions=MANY[:10])
    # By right rollouts: 0 and 1 dropped, 2 to 4 hard, 5 to 7 medium, 8 and 9 easy.
    assert Counter(buckets.values()) == {"dropped": 2, "hard": 3, "medium": 3, "easy": 2}
    scores = [1.0] * 3 + [0.0] * 7
    expected = {"id": "q3", "scores": scores, "score": 0.3, "bucket": "hard"}
    assert finished_records(out)[3] == expected
    assert read_difficulty(out, MANY[:10]) == buckets


def test_an_interrupted_measurement_leaves_its_finished_batches(out):
    with pytest.raises(KeyboardInterrupt):
        buckets_of(out, Rollouts(stop_at=35))
    interrupted = finished_records(out)
    assert len(interrupted) == 32  # two batches of 16
    buckets_of(out)
    assert finished_records(out)[:32] == interrupted and out.with_name("d.jsonl.old1").exists()


def test_r1_searchers_scheme_counts_until_the_first_success(out):
    # Question 1 is right in the first rollout and then never; question 0 is never right.
    buckets = buckets_of(out, questions=MANY[:2], scheme="r1_searcher")
    assert buckets == {"q0": "hard", "q1": "easy"} == read_difficulty(out, MANY[:2])


# --------------------------------------------------------------------------------- the command line


def test_published_rollout_answers_become_difficulties(out, tmp_path, capsys):
    # F1 with "Ana Bell" is 1, 2/3 (precision 1, recall 1/2), 0 and 0: mean 5/12 = 0.417, hard. By
    # cover-EM the first answer is right: easy.
    answers = ["Ana Bell", "Ana", "", "Carl"]
    record = {"id": 7, "question": "Who?", "answers": ["Ana Bell"], "predictions": answers}
    (tmp_path / "r.jsonl").write_text(json.dumps(record) + "\n")
    flags = ["--from_rollouts", str(tmp_path / "r.jsonl"), "--out", str(out)]
    main(flags)
    (line,) = finished_records(out)
    assert line["score"] == pytest.approx(5 / 12) and line["bucket"] == "hard"
    assert "hard 1, medium 0" in capsys.readouterr().out
    main([*flags, "--scheme", "r1_searcher"])
    assert finished_records(out)[0]["bucket"] == "easy"


@pytest.fixture
def tiny(monkeypatch, toy_policy, toy_tokenizer, tmp_path, out):
    """Returns flags that measure the untrained tiny model on one question of each kind."""
    monkeypatch.setattr(evaluation, "load_model", lambda *_, **__: (toy_policy, toy_tokenizer))
    flags = {"questions": 1, "samples": 3, "output_dir": tmp_path, "max_turn_tokens": 4, "out": out}
    return [f"--{name}={value}" for name, value in flags.items()]


def test_a_model_is_measured_by_sampling_with_seeds_of_the_questions(out, tiny):
    main(tiny)
    records = finished_records(out)
    assert len(records) == 5 and all(len(record["scores"]) == 3 for record in records)
    main(tiny)
    assert finished_records(out) == records


def test_after_an_interrupt_a_message_says_where_the_scores_are(tiny, out, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "rollout", interrupted)
    with pytest.raises(SystemExit) as end:
        main(tiny)
    assert end.value.code == 130 and f"finished batches are in {out}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("", "--out is missing"),
        ("--out .", "--out .: that is a folder"),
        ("--out x --metric bleu", "--metric bleu"),
        ("--out x --samples 0", "--samples 0: must be at least 1"),
        ("--out x --samples 10 --scheme r1_searcher", "--samples 10"),
        ("--out x --temperature 0", "--temperature 0 is greedy"),
        ("--out x --from_rollouts nowhere.jsonl", "nowhere.jsonl: no such file"),
    ],
)
def test_impossible_flags_are_an_error_of_one_line(arguments, expected):
    assert expected in message(main, arguments.split())
