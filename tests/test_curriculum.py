"""curriculum.py: fixed shares per kind, every question once per epoch, and the same again after a resume."""

from collections import Counter

import pytest

import curriculum
from curriculum import QuestionStream, exact_counts, parse_mix
from data import InputError, Question


def pool(**counts):
    return [Question(f"{kind}{i}", "?", ["!"], source=kind) for kind, count in counts.items() for i in range(count)]


def ids(questions):
    return [question.id for question in questions]


@pytest.mark.parametrize("total, weights, expected", [
    (16, {"a": 3, "b": 4, "c": 1}, {"a": 6, "b": 8, "c": 2}),
    (10, {"a": 7, "b": 2, "c": 1}, {"a": 7, "b": 2, "c": 1}),
    (2, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 0}),  # 2/3 each: nothing for sure, ties go to the first
    (4, {"a": 1, "b": 2}, {"a": 1, "b": 3}),  # 1.33 and 2.67: the larger remainder gets the fourth
    (3, {"a": 0, "b": 1}, {"a": 0, "b": 3}),
    (10, {"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 7, "b": 2, "c": 1}),  # 10 · 0.7 / 1.0 is not exactly 7 in floating point
])  # fmt: skip
def test_counts_by_largest_remainder(total, weights, expected):
    assert exact_counts(total, weights) == expected


@pytest.mark.parametrize("total", range(1, 40))
def test_counts_always_add_up(total):
    assert sum(exact_counts(total, {"a": 3, "b": 4, "c": 1, "d": 2.5}).values()) == total


def test_a_mix_is_read_with_blanks_and_decimals():
    assert parse_mix(" one_hop=3, two_hop = 0.5,") == {"one_hop": 3.0, "two_hop": 0.5}
    assert parse_mix("") == {}


@pytest.mark.parametrize("mix", ["one_hop", "one_hop=x", "a=1=2", "a=-1", "a=0,b=0", "a=nan", "a=inf"])
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
    # 2 questions, 3 attempts: attempt a of step s holds numbers (3s + a)·2 and the next, so two steps hold 0 .. 11
    stream = QuestionStream(pool(a=12), 2, attempts=3)
    dealt = [ids(stream.take(step, attempt)) for step in range(2) for attempt in range(3)]
    assert sorted(sum(dealt, [])) == sorted(f"a{i}" for i in range(12))
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


def test_python_curriculum_prints_the_counts(capsys):
    curriculum.main()
    assert "{'hard': 7, 'medium': 2, 'easy': 1}" in capsys.readouterr().out
