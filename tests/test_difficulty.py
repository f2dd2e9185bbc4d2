"""lab/difficulty.py: scores of rollouts, kept as they come, and what cannot be measured."""

import json
from collections import Counter

import pytest
from conftest import message

import eval as evaluation
from curriculum import read_difficulty
from data import Question
from errors import InputError
from formats.records import finished_records
from lab import difficulty
from lab.difficulty import DifficultySettings, main, measure

MANY = [Question(f"q{i}", "?", ["!"]) for i in range(40)]


class Rollouts:
    """Question 3 is right in the first 3 of 10 rollouts, 13 too. Keeps what it was asked."""

    def __init__(self, stop_at=None):
        self.asked, self.stop_at = [], stop_at

    def __call__(self, questions):
        numbers = [int(question.id[1:]) for question in questions]
        if self.stop_at in numbers:
            raise KeyboardInterrupt
        self.asked += numbers
        return [[float(i < number % 10) for i in range(10)] for number in numbers]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "d.jsonl"


def measured(out, rollouts=None, questions=MANY, scheme="ur2"):
    options = DifficultySettings(out=str(out), samples=10, scheme=scheme)
    return measure(questions, rollouts or Rollouts(), {}, options)


def test_each_question_gets_its_scores_its_mean_and_its_bucket(out):
    found = measured(out, questions=MANY[:10])
    # 0 1, 2 3 4, 5 6 7, 8 9
    assert Counter(found.values()) == {"dropped": 2, "hard": 3, "medium": 3, "easy": 2}
    scores = [1.0] * 3 + [0.0] * 7
    expected = {"id": "q3", "scores": scores, "score": 0.3, "bucket": "hard"}
    assert finished_records(out)[3] == expected
    assert read_difficulty(out, MANY[:10]) == found


def test_an_interrupted_measurement_goes_on_with_its_last_whole_batch(out, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(out, Rollouts(stop_at=35))
    with open(out, "a") as file:
        file.write('{"id": "q32", "sco')  # cut short in the middle of a line
    rest = Rollouts()
    found = measured(out, rest)
    measured(out, rest)
    assert rest.asked == list(range(32, 40))  # 16 at once, and a finished file asks nothing
    assert found == measured(tmp_path / "whole.jsonl")
    assert out.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_r1_searchers_scheme_counts_until_the_first_success(out):
    # question 1 is right at once, and then never
    found = measured(out, questions=MANY[:2], scheme="r1_searcher")
    assert found == {"q0": "hard", "q1": "easy"} == read_difficulty(out, MANY[:2])


# --------------------------------------------------------------------------------- the command line


def test_published_rollout_answers_become_difficulties(out, tmp_path, capsys):
    # F1 with "Ana Bell": 1, 2/3 (precision 1, recall 1/2), 0, 0: mean 5/12 = 0.417, hard. Cover-EM:
    # the first counts.
    answers = ["Ana Bell", "Ana", "", "Carl"]
    record = {"idx": 7, "question": "Who?", "answer": "Ana Bell", "pred_anses": answers}
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
    """Flags of a short measurement of the untrained tiny model, a question of each kind."""
    monkeypatch.setattr(evaluation, "load_model", lambda *_, **__: (toy_policy, toy_tokenizer))
    flags = {"questions": 1, "samples": 3, "output_dir": tmp_path, "max_turn_tokens": 4, "out": out}
    return [f"--{name}={value}" for name, value in flags.items()]


def test_a_model_is_measured_by_sampling_and_goes_on_after_an_interrupt(out, tiny):
    main(tiny)
    whole = out.read_text()
    records = finished_records(out)
    assert len(records) == 5 and all(len(record["scores"]) == 3 for record in records)
    out.write_text(whole[: len(whole) // 2])
    main(tiny)
    assert out.read_text() == whole


def test_an_interrupt_says_where_the_scores_are(tiny, out, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "rollout", interrupted)
    with pytest.raises(SystemExit) as end:
        main(tiny)
    assert end.value.code == 130 and f"{out}: repeat the command" in capsys.readouterr().out


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
def test_flags_that_cannot_be_are_one_line(arguments, expected):
    assert expected in message(main, arguments.split())
