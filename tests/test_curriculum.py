"""curriculum.py: fixed shares per kind and per difficulty, who may search, and the same again after
a resume.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

import curriculum
import recipes
from curriculum import (
    QuestionStream,
    bucket,
    bucket_of_first_success,
    counts_within,
    draw_choices,
    exact_counts,
    measure_difficulty,
    parse_mix,
    read_difficulty,
)
from data import Question
from errors import InputError

SLICES = Path(__file__).resolve().parents[2] / "shared" / "data"
SEVEN_TWO_ONE = "hard=7,medium=2,easy=1"


def pool(**counts):
    return [
        Question(f"{kind}{i}", "?", ["!"], source=kind)
        for kind, count in counts.items()
        for i in range(count)
    ]


def ids(questions):
    return [question.id for question in questions]


def sorted_pool(task="qa", **counts):
    """Questions of one task and their buckets, named after them."""
    questions = [
        Question(f"{name}{i}", "?", ["!"], task)
        for name, count in counts.items()
        for i in range(count)
    ]
    return questions, {question.id: question.id.rstrip("0123456789") for question in questions}


def message(call, *args, **kwargs):
    with pytest.raises(InputError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "total, weights, expected",
    [
        (16, {"a": 3, "b": 4, "c": 1}, {"a": 6, "b": 8, "c": 2}),
        (10, {"a": 7, "b": 2, "c": 1}, {"a": 7, "b": 2, "c": 1}),
        (
            2,
            {"a": 1, "b": 1, "c": 1},
            {"a": 1, "b": 1, "c": 0},
        ),  # 2/3 each: nothing for sure, ties go to the first
        (
            4,
            {"a": 1, "b": 2},
            {"a": 1, "b": 3},
        ),  # 1.33 and 2.67: the larger remainder gets the fourth
        (3, {"a": 0, "b": 1}, {"a": 0, "b": 3}),
        (
            10,
            {"a": 0.7, "b": 0.2, "c": 0.1},
            {"a": 7, "b": 2, "c": 1},
        ),  # 10 · 0.7 / 1.0 is not exactly 7 in floating point
    ],
)
def test_counts_by_largest_remainder(total, weights, expected):
    assert exact_counts(total, weights) == expected


@pytest.mark.parametrize("total", range(1, 40))
def test_counts_always_add_up(total):
    assert sum(exact_counts(total, {"a": 3, "b": 4, "c": 1, "d": 2.5}).values()) == total


def test_a_mix_is_read_with_blanks_and_decimals():
    assert parse_mix(" one_hop=3, two_hop = 0.5,") == {"one_hop": 3.0, "two_hop": 0.5}
    assert parse_mix("") == {}


@pytest.mark.parametrize(
    "mix", ["one_hop", "one_hop=x", "a=1=2", "a=-1", "a=0,b=0", "a=nan", "a=inf"]
)
def test_a_mix_that_makes_no_sense_is_one_line(mix):
    with pytest.raises(InputError, match="--mix") as error:
        parse_mix(mix)
    assert "\n" not in str(error.value)


def test_a_kind_that_the_data_lacks_is_named_beside_those_it_has():
    with pytest.raises(InputError, match=r"no question of kind three_hop; it has one_hop, two_hop"):
        QuestionStream(pool(one_hop=2, two_hop=2), 4, "one_hop=1,three_hop=1")


def test_a_kind_of_weight_zero_need_not_be_there():
    assert QuestionStream(pool(a=2), 2, "a=1,b=0").counts == {"a": 2, "b": 0}


def test_no_questions_is_an_input_error_and_no_division_by_zero():
    with pytest.raises(InputError, match="no questions"):
        QuestionStream([], 4)


def test_every_step_has_the_shares_of_the_mix():
    stream = QuestionStream(pool(a=5, b=9, c=2), 8, "a=3,b=4,c=1")
    for step in range(10):
        assert Counter(q.kind for q in stream.take(step)) == {"a": 3, "b": 4, "c": 1}


def test_an_epoch_deals_every_question_once_in_another_order_each_time():
    stream = QuestionStream(pool(a=6), 3)
    first, second = ids(stream.take(0) + stream.take(1)), ids(stream.take(2) + stream.take(3))
    assert sorted(first) == sorted(second) == [f"a{i}" for i in range(6)]
    assert first != second and first != sorted(first)


def test_an_epoch_may_end_inside_a_step():
    stream = QuestionStream(pool(a=5), 3)
    dealt = [q for step in range(5) for q in ids(stream.take(step))]  # 15 = three epochs of five
    assert Counter(dealt) == {f"a{i}": 3 for i in range(5)}


def test_a_resumed_run_sees_what_the_unbroken_one_would_have_seen():
    questions = pool(a=5, b=4)
    straight = QuestionStream(questions, 4, "a=1,b=1", seed=3)
    expected = [ids(straight.take(step)) for step in range(8)]
    resumed = QuestionStream(questions, 4, "a=1,b=1", seed=3)
    assert [ids(resumed.take(step)) for step in range(5, 8)] == expected[5:]
    assert ids(resumed.take(0)) == expected[0]  # going back is no different


def test_attempts_of_a_step_and_the_steps_share_one_numbering():
    # 2 questions, 3 attempts: attempt a of step s holds numbers (3s + a)·2 and the next, so two
    # steps hold 0 .. 11
    stream = QuestionStream(pool(a=12), 2, attempts=3)
    dealt = [ids(stream.take(step, attempt)) for step in range(2) for attempt in range(3)]
    assert Counter(name for names in dealt for name in names) == {f"a{i}": 1 for i in range(12)}
    assert dealt == [ids(QuestionStream(pool(a=12), 2).take(turn)) for turn in range(6)]


def test_an_attempt_is_the_same_whether_or_not_those_before_it_were_made():
    stream = QuestionStream(pool(a=7, b=5), 4, "a=1,b=1", seed=2, attempts=2)
    late = ids(stream.take(3, 1))
    for step in range(3):
        stream.take(step)
        stream.take(step, 1)
    assert ids(stream.take(3, 1)) == late


def test_an_attempt_beyond_those_agreed_on_is_an_error_and_not_the_next_steps_questions():
    with pytest.raises(InputError, match="attempt 1"):
        QuestionStream(pool(a=4), 2).take(0, 1)


def test_another_seed_deals_another_order():
    orders = {tuple(ids(QuestionStream(pool(a=9), 9, seed=seed).take(0))) for seed in range(5)}
    assert len(orders) == 5


def test_without_a_mix_the_kinds_come_as_they_come():
    stream = QuestionStream(pool(a=3, b=3), 6)
    assert sorted(ids(stream.take(0))) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_large_pool_is_shuffled_once_per_epoch_and_not_once_per_question(monkeypatch):
    shuffles = []
    real = curriculum.random.Random

    def counting(seed):
        shuffles.append(seed)
        return real(seed)

    monkeypatch.setattr(curriculum.random, "Random", counting)
    stream = QuestionStream(pool(a=100), 10)
    for step in range(20):
        stream.take(step)
    assert len(shuffles) == 2  # 200 questions of a pool of 100


# ------------------------------------------------------------------------------------------ buckets


@pytest.mark.parametrize(
    "score, expected",
    [
        (1.0, "easy"),
        (0.8, "easy"),
        (0.799, "medium"),
        (0.5, "medium"),
        (0.499, "hard"),
        (0.2, "hard"),
        (0.199, "dropped"),
        (0.0, "dropped"),
        (sum([0.1] * 8), "easy"),  # 0.7999999999999999
        (1.1 - 0.3, "easy"),  # 0.8000000000000002 from the other side
        (sum([0.1] * 3) - 0.1, "hard"),  # 0.20000000000000004
    ],
)
def test_a_bucket_holds_its_lower_edge_and_rounding_moves_nothing_across(score, expected):
    assert bucket(score) == expected


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan")])
def test_a_score_outside_zero_to_one_is_an_error(score):
    assert "from 0 to 1" in message(bucket, score)


@pytest.mark.parametrize(
    "first, expected",
    [
        (1, "easy"),
        (9, "easy"),
        (10, "medium"),
        (20, "medium"),
        (21, "hard"),
        (0, "hard"),  # 0: never
    ],
)
def test_r1_searcher_counts_rollouts_until_the_first_success(first, expected):
    scores = [0.0] * 25
    if first:
        scores[first - 1] = 1.0
    assert bucket_of_first_success(scores) == expected


def test_half_right_is_no_success():
    assert bucket_of_first_success([0.5] * 9 + [1.0]) == "medium"


@pytest.mark.parametrize(
    "available, expected",
    [
        ({"hard": 50, "medium": 50, "easy": 50}, {"hard": 7, "medium": 2, "easy": 1}),
        (
            {"hard": 4, "medium": 50, "easy": 50},
            {"hard": 4, "medium": 4, "easy": 2},
        ),  # 6 left at 2 : 1
        (
            {"hard": 0, "medium": 50, "easy": 50},
            {"hard": 0, "medium": 7, "easy": 3},
        ),  # 10 at 2 : 1 = 6.67, 3.33
        (
            {"hard": 50, "medium": 1, "easy": 50},
            {"hard": 8, "medium": 1, "easy": 1},
        ),  # 9 at 7 : 1 = 7.875, 1.125
        (
            {"hard": 3, "medium": 3, "easy": 50},
            {"hard": 3, "medium": 3, "easy": 4},
        ),  # 7 at 2 : 1 = 4.67: medium is short then too
    ],
)
def test_a_short_bucket_gives_all_it_has_and_the_rest_keep_their_ratio(available, expected):
    assert counts_within(10, {"hard": 7, "medium": 2, "easy": 1}, available) == expected


def test_fewer_questions_in_all_buckets_than_a_step_needs_is_an_error():
    text = message(
        counts_within, 10, {"hard": 7, "medium": 2, "easy": 0}, {"hard": 4, "medium": 3, "easy": 90}
    )
    assert "7 questions are in hard, medium, fewer than the 10 of a step" in text


def test_every_step_holds_hard_medium_and_easy_as_seven_to_two_to_one():
    questions, difficulty = sorted_pool(hard=23, medium=9, easy=5, dropped=30)
    stream = QuestionStream(questions, 20, difficulty=difficulty, buckets=SEVEN_TWO_ONE)
    for step in range(12):
        assert Counter(difficulty[q.id] for q in stream.take(step)) == {
            "hard": 14,
            "medium": 4,
            "easy": 2,
        }


def test_a_bucket_that_runs_short_is_told_in_one_line_with_both_numbers(capsys):
    questions, difficulty = sorted_pool(hard=3, medium=20, easy=20)
    stream = QuestionStream(questions, 10, difficulty=difficulty, buckets=SEVEN_TWO_ONE)
    assert stream.counts == {"hard": 3, "medium": 5, "easy": 2}  # 7 left at 2 : 1 = 4.67, 2.33
    assert (
        len(stream.notes) == 1
        and "bucket hard runs short: 3 of the 7 questions" in capsys.readouterr().err
    )


def test_a_bucket_that_is_empty_is_told_too():
    questions, difficulty = sorted_pool(medium=20, easy=20)
    stream = QuestionStream(questions, 10, difficulty=difficulty, buckets=SEVEN_TWO_ONE)
    assert Counter(difficulty[q.id] for q in stream.take(0)) == {"medium": 7, "easy": 3}
    assert "bucket hard runs short: 0 of the 7" in stream.notes[0]


def test_a_share_below_one_question_is_told():
    questions, difficulty = sorted_pool(hard=9, medium=9, easy=9)
    stream = QuestionStream(
        questions, 4, difficulty=difficulty, buckets=SEVEN_TWO_ONE
    )  # 2.8, 0.8, 0.4
    assert stream.counts == {"hard": 3, "medium": 1, "easy": 0} and "bucket easy" in stream.notes[0]


def test_dropped_questions_are_left_out_and_counted_unless_they_are_asked_for():
    questions, difficulty = sorted_pool(hard=5, dropped=7)
    stream = QuestionStream(questions, 5, difficulty=difficulty)
    assert {difficulty[q.id] for step in range(9) for q in stream.take(step)} == {"hard"}
    assert "7 of 12 questions score below 0.2" in stream.notes[0]
    stage1 = QuestionStream(
        questions, 7, difficulty=difficulty, buckets="dropped=1"
    )  # UR²'s stage 1 for math
    assert sorted(ids(stage1.take(0))) == [f"dropped{i}" for i in range(7)] and not stage1.notes


def test_buckets_that_cannot_be_are_one_line():
    questions, difficulty = sorted_pool(hard=5)
    dropped = dict.fromkeys(difficulty, "dropped")
    assert "no bucket is called tough" in message(
        QuestionStream, questions, 2, difficulty=difficulty, buckets="tough=1"
    )
    assert "--buckets needs --difficulty" in message(QuestionStream, questions, 2, buckets="hard=1")
    assert "--task_mixing needs --difficulty" in message(
        QuestionStream, questions, 2, task_mixing=True
    )
    assert "give one of them" in message(
        QuestionStream, questions, 2, "qa=1", difficulty=difficulty, buckets="hard=1"
    )
    assert "--buckets dropped=1" in message(QuestionStream, questions, 2, difficulty=dropped)
    assert "--buckets 'hard'" in message(
        QuestionStream, questions, 2, difficulty=difficulty, buckets="hard"
    )


# -------------------------------------------------------------------------------------- task mixing


def test_open_questions_always_search_and_math_only_if_hard():
    open_ones, open_difficulty = sorted_pool("qa", hard=3, easy=3)
    math, math_difficulty = sorted_pool("math", hard=3, medium=3, easy=3, dropped=3)
    math = [Question("m" + q.id, "?", ["!"], "math") for q in math]
    difficulty = open_difficulty | {"m" + name: value for name, value in math_difficulty.items()}
    stream = QuestionStream(
        open_ones + math,
        4,
        difficulty=difficulty,
        buckets="hard=1,easy=1,medium=1,dropped=1",
        task_mixing=True,
    )
    allowed = dict(zip(ids(open_ones + math), stream.may_search(open_ones + math), strict=True))
    assert {name for name, may in allowed.items() if not may} == {
        f"m{b}{i}" for b in ("medium", "easy") for i in range(3)
    }


def test_of_hard_choices_alone_exactly_half_may_search():
    questions, difficulty = sorted_pool("choice", hard=10)
    stream = QuestionStream(questions, 5, difficulty=difficulty, task_mixing=True)
    assert sum(stream.may_search(questions)) == 5


def test_half_of_the_choices_that_are_dealt_may_search_and_all_of_those_are_hard():
    # Dealt at 8 : 2, so half of a step's 10 are 5 of its 8 hard ones: 5/8 of the 40 hard questions
    # = 25.
    questions, difficulty = sorted_pool("choice", hard=40, easy=10)
    stream = QuestionStream(
        questions, 10, difficulty=difficulty, buckets="hard=8,easy=2", task_mixing=True
    )
    assert {difficulty[name] for name in stream.searching} == {"hard"} and len(
        stream.searching
    ) == 25
    epoch = [
        q for step in range(5) for q in stream.take(step)
    ]  # every question once: 40 hard and 10 easy
    assert sum(stream.may_search(epoch)) == 25 == len(epoch) / 2


def test_too_few_hard_choices_all_search_and_that_is_told():
    questions, difficulty = sorted_pool("choice", hard=2, easy=8)
    stream = QuestionStream(questions, 5, difficulty=difficulty, task_mixing=True)
    assert stream.searching == {"hard0", "hard1"} and "too few are hard" in stream.notes[0]


def test_who_may_search_is_drawn_per_question_and_not_by_the_order_of_reading():
    questions, difficulty = sorted_pool("choice", hard=30)
    drawn = draw_choices(questions, difficulty, 0.5, seed=1)
    assert draw_choices(questions[::-1], difficulty, 0.5, seed=1) == drawn and len(drawn) == 15
    assert draw_choices(questions, difficulty, 0.5, seed=2) != drawn
    assert drawn != {f"hard{i}" for i in range(15)}


def test_a_question_more_changes_the_lot_of_at_most_one_other():
    # 30 questions draw 15, 31 draw 16 (15.5 rounds up): the old fifteen stay, or one gives way to
    # the new question.
    questions, difficulty = sorted_pool("choice", hard=31)
    before, after = (
        draw_choices(questions[:30], difficulty, 0.5, seed=0),
        draw_choices(questions, difficulty, 0.5, seed=0),
    )
    assert before <= after


def test_without_task_mixing_all_may_search():
    questions, difficulty = sorted_pool("math", easy=3)
    assert QuestionStream(questions, 2, difficulty=difficulty).may_search(questions) == [True] * 3


# ---------------------------------------------------------------------------------------- measuring


class Rollouts:
    """Scores by question number: q3 is right in the first three rollouts. Counts what it was
    asked.
    """

    def __init__(self, stop_at=None):
        self.asked, self.stop_at = [], stop_at

    def __call__(self, questions, k):
        if self.stop_at in ids(questions):
            raise KeyboardInterrupt
        self.asked += ids(questions)
        return [[float(i < int(question.id[1:])) for i in range(k)] for question in questions]


TEN = [Question(f"q{i}", "?", ["!"]) for i in range(11)]  # 0 to 10 of 10 rollouts are right


def test_each_question_gets_its_scores_its_mean_and_its_bucket(tmp_path):
    found = measure_difficulty(TEN, Rollouts(), 10, tmp_path / "d.jsonl", quiet=True)
    assert Counter(found.values()) == {
        "dropped": 2,
        "hard": 3,
        "medium": 3,
        "easy": 3,
    }  # 0 1, 2 3 4, 5 6 7, 8 9 10
    line = json.loads((tmp_path / "d.jsonl").read_text().splitlines()[3])
    assert line == {"id": "q3", "scores": [1.0] * 3 + [0.0] * 7, "score": 0.3, "bucket": "hard"}
    assert read_difficulty(tmp_path / "d.jsonl", TEN) == found


def test_an_interrupted_measurement_goes_on_where_it_stopped(tmp_path):
    path, whole = tmp_path / "d.jsonl", tmp_path / "whole.jsonl"
    with pytest.raises(KeyboardInterrupt):
        measure_difficulty(TEN, Rollouts(stop_at="q6"), 10, path, at_once=3, quiet=True)
    with open(path, "a") as file:
        file.write('{"id": "q6", "sco')  # cut short in the middle of a line
    rest = Rollouts()
    found = measure_difficulty(TEN, rest, 10, path, at_once=3, quiet=True)
    assert rest.asked == ["q6", "q7", "q8", "q9", "q10"]
    assert found == measure_difficulty(TEN, Rollouts(), 10, whole, at_once=3, quiet=True)
    assert path.read_text() == whole.read_text()


def test_a_finished_measurement_asks_nothing(tmp_path):
    measure_difficulty(TEN, Rollouts(), 10, tmp_path / "d.jsonl", quiet=True)
    again = Rollouts()
    measure_difficulty(TEN, again, 10, tmp_path / "d.jsonl", quiet=True)
    assert again.asked == []


def test_another_models_measurement_or_another_number_of_rollouts_is_not_mixed_in(tmp_path):
    measure_difficulty(TEN[:3], Rollouts(), 10, tmp_path / "d.jsonl", by="a, f1", quiet=True)
    text = message(
        measure_difficulty, TEN, Rollouts(), 10, tmp_path / "d.jsonl", by="b, f1", quiet=True
    )
    assert "10 rollouts by a, f1; now 10 by b, f1" in text
    assert "now 4" in message(
        measure_difficulty, TEN, Rollouts(), 4, tmp_path / "d.jsonl", by="a, f1", quiet=True
    )


def test_r1_searchers_scheme_is_written_beside_the_scores(tmp_path):
    measure_difficulty(TEN[:2], Rollouts(), 20, tmp_path / "d.jsonl", "r1_searcher", quiet=True)
    assert read_difficulty(tmp_path / "d.jsonl", TEN[:2]) == {
        "q0": "hard",
        "q1": "easy",
    }  # q1: right at once, then never


def test_too_few_scores_for_a_question_are_an_error(tmp_path):
    text = message(
        measure_difficulty, TEN[:1], lambda some, k: [[1.0]], 4, tmp_path / "d.jsonl", quiet=True
    )
    assert "question q0: 1 scores came back, 4 were asked for" in text


def test_a_file_that_lacks_questions_or_is_none_is_one_line(tmp_path):
    path = tmp_path / "d.jsonl"
    assert "no such file" in message(read_difficulty, path, TEN)
    measure_difficulty(TEN[:4], Rollouts(), 10, path, quiet=True)
    assert "7 of 11 questions have none, the first is q4" in message(read_difficulty, path, TEN)
    path.write_text('{"id": "q0", "score": 0.5}\n')
    assert "d.jsonl, record 1: expected" in message(read_difficulty, path, TEN)


def test_a_line_without_a_bucket_is_read_by_its_mean(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"id": "q0", "scores": [1, 0], "score": 0.5}\n')
    assert read_difficulty(tmp_path / "d.jsonl", TEN[:1]) == {"q0": "medium"}


def test_level_takes_the_levels_that_the_records_bring():
    questions = [
        Question(level, "?", ["!"], level=level)
        for level in ("easy", "medium", "hard", "very_hard")
    ]
    assert list(read_difficulty("level", questions).values()) == [
        "easy",
        "medium",
        "hard",
        "dropped",
    ]
    assert "the first is 5" in message(
        read_difficulty, "level", [Question("5", "?", ["!"], level="5")]
    )


# --------------------------------------------------------------------------------- the command line


def test_published_rollout_answers_become_difficulties(tmp_path, capsys):
    # F1 with "Ana Bell": 1, 2/3 (precision 1, recall 1/2), 0, 0: mean 5/12 = 0.417, hard. Cover-EM:
    # the first counts.
    data, out = tmp_path / "r.jsonl", tmp_path / "d.jsonl"
    record = {
        "idx": 7,
        "question": "Who?",
        "answer": "Ana Bell",
        "pred_anses": ["Ana Bell", "Ana", "", "Carl"],
    }
    data.write_text(json.dumps(record) + "\n")
    curriculum.main(["difficulty", "--from_rollouts", str(data), "--out", str(out)])
    line = json.loads(out.read_text())
    assert line["score"] == pytest.approx(5 / 12) and line["bucket"] == "hard"
    assert "hard 1, medium 0" in capsys.readouterr().out
    other = tmp_path / "r1.jsonl"
    curriculum.main(
        ["difficulty", "--from_rollouts", str(data), "--out", str(other), "--scheme", "r1_searcher"]
    )
    assert (
        json.loads(other.read_text())["bucket"] == "easy"
        and "only 4 rollouts" in capsys.readouterr().out
    )


def test_r1_searchers_published_rollouts_fall_into_buckets(tmp_path):
    path = SLICES / "train" / "r1_searcher_stage1_80.jsonl"
    if not path.exists():
        pytest.skip(f"the real slice {path} is not here")
    curriculum.main(
        [
            "difficulty",
            "--from_rollouts",
            str(path),
            "--out",
            str(tmp_path / "d.jsonl"),
            "--metric",
            "cem",
        ]
    )
    records = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert len(records) == 80
    # Route 22: of its ten answers only "U.S. Route 22 runs through the major city of Newark, New
    # Jersey." covers the gold.
    assert (
        records[0]["id"] == "37653"
        and sum(records[0]["scores"]) == 1
        and records[0]["bucket"] == "dropped"
    )


def test_a_model_is_measured_by_sampling_and_goes_on_after_an_interrupt(
    tmp_path, monkeypatch, toy_policy, toy_tokenizer
):
    monkeypatch.setattr(recipes, "load_model", lambda *_: (toy_policy, toy_tokenizer))
    flags = ["--questions", "1", "--k", "3", "--runs", str(tmp_path), "--max_turn_tokens", "4"]
    curriculum.main(["difficulty", *flags, "--out", str(tmp_path / "a.jsonl")])
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 5 and all(
        len(json.loads(line)["scores"]) == 3 for line in lines
    )  # one question of each kind
    (tmp_path / "a.jsonl").write_text(lines[0] + lines[1][:20])
    curriculum.main(["difficulty", *flags, "--out", str(tmp_path / "a.jsonl")])
    assert [json.loads(line)["id"] for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [
        json.loads(line)["id"] for line in lines
    ]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["buckets"], "curriculum.py buckets: unknown"),
        (["difficulty"], "--out FILE is missing"),
        (["difficulty", "--out", "x", "--scheme", "ur3"], "--scheme ur3"),
        (["difficulty", "--out", "x", "--metric", "bleu"], "--metric bleu"),
        (["difficulty", "--out", "x", "--k", "0"], "--k must be at least 1"),
        (["difficulty", "--out", "x", "--k", "10", "--scheme", "r1_searcher"], "--k 10"),
        (["difficulty", "--out", "x", "--temperature", "0"], "--temperature 0 is greedy"),
        (["difficulty", "--out", "x", "--kk", "3"], "unknown flag --kk"),
        (
            ["difficulty", "--out", "x", "--from_rollouts", "nowhere.jsonl"],
            "nowhere.jsonl: no such file",
        ),
    ],
)
def test_flags_that_cannot_be_are_one_line(arguments, expected):
    assert expected in message(curriculum.main, arguments)


def test_python_curriculum_prints_buckets_counts_and_who_may_search(capsys):
    curriculum.main([])
    shown = capsys.readouterr().out
    assert "{'hard': 7, 'medium': 2, 'easy': 1}" in shown
    assert (
        "q2   16   0.80   easy" in shown
        and "q10   2   0.10   dropped" in shown
        and "(math, direct)" in shown
    )
