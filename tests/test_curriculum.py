"""curriculum.py: shares per kind and difficulty, who may search, and the same after a resume."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from conftest import message

import curriculum
from curriculum import (
    QuestionStream,
    bucket,
    draw_choices,
    exact_counts,
    may_search,
    parse_shares,
    read_difficulty,
)
from data import Question
from lab.difficulty import bucket_of_first_success
from papers import RECIPES
from settings import Settings, resolve

SEVEN_TWO_ONE = "hard=7,medium=2,easy=1"
MEDIUM = ("medium0", "medium1", "medium2")


def pool(**counts):
    """Questions of these kinds: a0, a1, ..."""
    return [
        Question(f"{kind}{i}", "?", ["!"], source=kind)
        for kind, count in counts.items()
        for i in range(count)
    ]


def levelled(task="qa", **counts):
    """Questions of one task that bring their level, the bucket that they are named after."""
    return [
        Question(f"{task} {name}{i}", "?", ["!"], task, level=name.replace("dropped", "very_hard"))
        for name, count in counts.items()
        for i in range(count)
    ]


def stream(questions, count, mix="", attempts=1, **given):
    settings = Settings(questions_per_step=count, mix=mix, **given)
    return QuestionStream(questions, settings, attempts)


def by_level(questions, count, **given):
    return stream(questions, count, difficulty="level", **given)


def ids(questions):
    return [question.id for question in questions]


def buckets_of(questions):
    return Counter(question.level.replace("very_hard", "dropped") for question in questions)


def epoch_of(dealer, steps):
    """What some steps deal: id -> may it search?"""
    return {q.id: q.may_search for step in range(steps) for q in dealer.take(step)}


# ------------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize(
    "total, weights, expected",
    [
        (16, {"a": 3, "b": 4, "c": 1}, {"a": 6, "b": 8, "c": 2}),
        (10, {"a": 7, "b": 2, "c": 1}, {"a": 7, "b": 2, "c": 1}),
        # 2/3 each: nothing for sure, ties go to the first
        (2, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 0}),
        # 1.33 and 2.67: the larger remainder gets the fourth
        (4, {"a": 1, "b": 2}, {"a": 1, "b": 3}),
        (3, {"a": 0, "b": 1}, {"a": 0, "b": 3}),
        # 10 · 0.7 / 1.0 is not exactly 7 in floating point
        (10, {"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 7, "b": 2, "c": 1}),
    ],
)
def test_counts_by_largest_remainder(total, weights, expected):
    assert exact_counts(total, weights) == expected


def test_shares_are_read_with_blanks_and_decimals():
    shares = parse_shares(" one_hop=3, two_hop = 0.5,", "--mix")
    assert shares == {"one_hop": 3.0, "two_hop": 0.5} and parse_shares("", "--mix") == {}


@pytest.mark.parametrize(
    "mix", ["one_hop", "one_hop=x", "a=1=2", "a=-1", "a=0,b=0", "a=nan", "a=inf"]
)
def test_shares_that_make_no_sense_are_one_line(mix):
    assert f"--mix '{mix}'" in message(parse_shares, mix, "--mix")


def test_a_kind_that_the_data_lacks_is_named_beside_those_it_has_unless_its_weight_is_zero():
    text = message(stream, pool(one_hop=2, two_hop=2), 4, "one_hop=1,three_hop=1")
    assert "of three_hop, and the data has 0 (there are one_hop, two_hop)" in text
    assert stream(pool(a=2), 2, "a=1,b=0").counts == {"a": 2, "b": 0}


# ------------------------------------------------------------------------------------------ dealing


def test_no_questions_is_an_input_error_and_no_division_by_zero():
    assert "no questions" in message(stream, [], 4)


def test_every_step_has_the_shares_of_the_mix():
    dealer = stream(pool(a=5, b=9, c=2), 8, "a=3,b=4,c=1")
    for step in range(10):
        assert Counter(q.kind for q in dealer.take(step)) == {"a": 3, "b": 4, "c": 1}


def test_an_epoch_deals_every_question_once_in_another_order_each_time():
    def epochs(seed):  # of five questions, in steps of two: the first ends inside a step
        dealer = stream(pool(a=5), 2, seed=seed)
        dealt = [name for step in range(5) for name in ids(dealer.take(step))]
        return dealt[:5], dealt[5:]

    first, second = epochs(seed=0)
    assert sorted(first) == sorted(second) == [f"a{i}" for i in range(5)]
    assert first != second and first != epochs(seed=1)[0]


def test_a_resumed_run_sees_what_the_unbroken_one_would_have_seen():
    straight, resumed = (stream(pool(a=5, b=4), 4, "a=1,b=1", seed=3) for _ in "12")
    expected = [ids(straight.take(step)) for step in range(8)]
    for step in (5, 6, 7, 0):  # going back is no different
        assert ids(resumed.take(step)) == expected[step]


def test_attempts_of_a_step_and_the_steps_share_one_numbering():
    # 2 questions, 3 attempts: attempt a of step s has the numbers (3s + a)·2 and the next
    dealer = stream(pool(a=12), 2, attempts=3)
    dealt = [ids(dealer.take(step, attempt)) for step in range(2) for attempt in range(3)]
    assert Counter(name for names in dealt for name in names) == {f"a{i}": 1 for i in range(12)}
    assert dealt == [ids(stream(pool(a=12), 2).take(turn)) for turn in range(6)]


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
    [(1, "easy"), (9, "easy"), (10, "medium"), (20, "medium"), (21, "hard"), (26, "hard")],
)
def test_r1_searcher_counts_rollouts_until_the_first_success(first, expected):
    # 0.5 is not a success; 26: never
    scores = [1.0 if number == first else 0.5 for number in range(1, 26)]
    assert bucket_of_first_success(scores) == expected


def test_every_step_holds_hard_medium_and_easy_as_seven_to_two_to_one():
    questions = levelled(hard=23, medium=9, easy=5, dropped=30)
    dealer = by_level(questions, 20, buckets=SEVEN_TWO_ONE)
    for step in range(12):
        assert buckets_of(dealer.take(step)) == {"hard": 14, "medium": 4, "easy": 2}


def test_dropped_questions_are_left_out_and_counted_unless_they_are_asked_for(capsys):
    questions = levelled(hard=5, dropped=7)
    dealer = by_level(questions, 5)
    assert {name.rstrip("0123456789") for name in epoch_of(dealer, 9)} == {"qa hard"}
    assert "7 of 12 questions are in the bucket dropped" in capsys.readouterr().err
    stage1 = by_level(questions, 7, buckets="dropped=1")  # UR²'s stage 1 for math
    assert buckets_of(stage1.take(0)) == {"dropped": 7} and not capsys.readouterr().err


@pytest.mark.parametrize(
    "given, fragment",
    [
        (
            {"buckets": "tough=1"},
            "10 questions of tough, and the data has 0 (there are hard, easy)",
        ),
        ({"buckets": "hard=9,easy=1"}, "9 questions of hard, and the data has 5"),
        ({"buckets": "hard=1,easy=99"}, "a step takes 0 questions of hard"),
        ({"buckets": "hard"}, "buckets 'hard'"),
        ({"buckets": "hard=1", "difficulty": ""}, "--task_mixing of math, need --difficulty"),
        ({"buckets": "math:hard=1"}, "none of these shares names a part of the data: hard, easy"),
        ({"buckets": "maths:hard=1,hard=1"}, "maths is not a task or kind of the data"),
        ({"buckets": "qa:hard=0,math:easy=1"}, "none of these shares names a part of the data"),
        ({"buckets": "hard=1", "mix": "qa=1"}, "questions of qa:hard, and the data has 5"),
        ({"buckets": "hard=1", "mix": "math=1"}, "of math, and the data has 0 (there are qa:hard"),
        ({"buckets": "math:hard=1", "mix": "qa=1"}, "of qa, and the data has 0 (there are qa:hard"),
    ],
)
def test_buckets_that_cannot_be_are_one_line(given, fragment):
    given = {"difficulty": "level"} | given
    assert fragment in message(stream, levelled(hard=5, easy=20), 10, **given)


def counts_of(questions, count, **given):
    return by_level(questions, count, **given).counts


def test_a_task_with_buckets_of_its_own_weighs_as_many_questions_as_it_has():
    # a third of 90 is math's, by 1 : 1 : 1 (appendix C.5); 60 are the others', by 7 : 2 : 1
    shares = resolve("ur2", 2, False, {"difficulty": "level"}).buckets
    math = levelled("math", hard=10, medium=10, easy=10)
    others = levelled(hard=42, medium=12) + levelled("choice", easy=6)
    thirds = {"math:hard": 10, "math:medium": 10, "math:easy": 10}
    rest = {"hard": 42, "medium": 12, "easy": 6}
    assert counts_of(math + others, 90, buckets=shares) == thirds | rest
    assert counts_of(others, 60, buckets=shares) == rest  # math's shares are left out
    # 64 questions of 3,000 and 3,000: 32 / 3 = 10.67 twice up; 22.4, 6.4 and 3.2 down
    halves = levelled("math", hard=20, medium=20, easy=20) + levelled(hard=40, medium=15, easy=5)
    assert list(counts_of(halves, 64, buckets=shares).values()) == [11, 11, 11, 22, 6, 3]


def test_the_discarded_math_questions_are_stage_1_s_and_no_others():
    # appendix C.7: math below 0.2; open questions below it are dealt by nobody
    data = levelled("math", dropped=6, easy=4) + levelled(dropped=9, hard=9)
    buckets = resolve("ur2", 1, False, {"difficulty": "level"}).buckets
    dealt = by_level(data, 6, buckets=buckets).take(0)
    assert {q.task for q in dealt} == {"math"} and buckets_of(dealt) == {"dropped": 6}


def test_one_split_of_buckets_is_for_all_kinds():
    data = [
        replace(question, source=kind, id=f"{kind} {question.id}")
        for kind in ("hotpotqa", "2wiki")
        for question in levelled(medium=9, hard=9)
    ]
    # 1 : 3 of each half of 16
    counts = counts_of(data, 16, mix="hotpotqa=1,2wiki=1", buckets="medium=1,hard=3")
    expected = {"hotpotqa:medium": 2, "hotpotqa:hard": 6, "2wiki:medium": 2, "2wiki:hard": 6}
    assert counts == expected


@pytest.mark.parametrize(
    "stage, expected",
    [
        # 64 · 200 / 350 = 36.6
        (1, {"hotpotqa:medium": 37, "2wiki:medium": 27}),
        # 64 · 2561 / 8148 = 20.1, then 15.7, 8.5 and 19.6: the two largest remainders round up
        (2, {"hotpotqa:medium": 20, "hotpotqa:hard": 16, "2wiki:medium": 8, "2wiki:hard": 20}),
    ],
)
def test_r1_searchers_table_1(stage, expected):
    kinds = ("hotpotqa_bridge", "hotpotqa_comparison", "2wiki_inference")
    data = [
        replace(question, source=kind, id=f"{kind} {question.id}")
        for kind in kinds
        for question in levelled(easy=40, medium=40, hard=40)
    ]
    settings = resolve("r1_searcher", stage, False, {"difficulty": "level"})
    dealer = by_level(data, 64, mix=settings.mix, buckets=settings.buckets)
    dealt = Counter(f"{q.kind.split('_')[0]}:{q.level}" for q in dealer.take(0))
    assert dealt == dealer.counts == expected
    assert resolve("r1_searcher", stage, False).mix == ""  # without --difficulty as they come


def test_a_whole_kind_wins_over_its_beginning():
    data = pool(hotpotqa_bridge=9, hotpotqa_comparison=9)
    dealt = stream(data, 6, "hotpotqa=2,hotpotqa_bridge=1").take(0)
    assert Counter(q.kind for q in dealt) == {"hotpotqa_bridge": 2, "hotpotqa_comparison": 4}


def test_the_papers_buckets_want_a_difficulty_and_then_replace_the_tiny_mix():
    measured = {"difficulty": "d"}
    for tiny, shares in ((False, RECIPES["ur2"][2]["buckets"]), (True, SEVEN_TWO_ONE)):
        settings = resolve("ur2", 2, tiny, measured)
        assert settings.buckets == shares and not (tiny and settings.mix)
    shares = parse_shares(resolve("r1_searcher", 2, True, measured).buckets, "")
    assert shares == {"medium": 2561 + 1087, "hard": 2000 + 2500}
    assert resolve("ur2", 1, True, measured).mix == resolve("ur2", 1, True).mix != ""
    assert resolve("ur2", 2, False).buckets == "" != resolve("r_search", 1, True).mix
    assert resolve("ur2", 2, True, {"buckets": "hard=1", "mix": "unit=1"}).mix == "unit=1"


def test_dropped_questions_alone_are_an_error_that_says_what_to_do():
    assert "dropped: ask easier ones, or measure" in message(by_level, levelled(dropped=5), 2)


# -------------------------------------------------------------------------------------- task mixing


@pytest.mark.parametrize(
    "task, name, expected",
    [
        ("qa", "easy", True),
        ("math", "easy", False),
        ("math", "medium", False),
        ("math", "hard", True),
        ("math", "dropped", True),
        ("choice", "hard", False),  # only if drawn
    ],
)
def test_open_questions_always_search_and_math_only_if_hard(task, name, expected):
    question = Question("1", "?", ["!"], task, level=name)
    hard = {"hard": 1, "dropped": 1}
    assert may_search(question, frozenset(), hard) == expected
    assert may_search(question, frozenset({"1"}), hard) == (expected or task == "choice")


def test_half_of_llamas_easy_math_searches():
    # C.5: easy : medium 2 : 1, as hard math is not there. A third of 3,000 searches, all easy
    llama = resolve("ur2", 2, False, {"variant": "llama_8b", "difficulty": "level"})
    given = {"buckets": llama.buckets.split(",hard")[0], "math_searches": llama.math_searches}
    dealer = by_level(levelled("math", medium=1000, easy=2000), 3, task_mixing=True, **given)
    assert dealer.counts == {"math:medium": 1, "math:easy": 2}
    allowed = epoch_of(dealer, 1000)  # every question once
    # by lot: 2,000 · 0.5 · 0.5 = 500, and its root is 22
    assert len(allowed) == 3000 and abs(sum(allowed.values()) - 1000) < 70
    assert all("easy" in name for name, may in allowed.items() if may)


def test_half_of_the_choices_that_are_dealt_may_search_and_all_of_those_are_hard():
    # Dealt at 8 : 2, half of a step's 10 are 5 of its 8 hard ones: 5/8 of the 40 hard questions.
    questions = levelled("choice", hard=40, easy=10)
    dealer = by_level(questions, 10, buckets="hard=8,easy=2", task_mixing=True)
    allowed = epoch_of(dealer, 5)  # every question once
    assert len(allowed) == 50 and sum(allowed.values()) == 25
    assert all("hard" in name for name, may in allowed.items() if may)


def test_too_few_hard_choices_all_search_and_then_the_next_hardest_up_to_half():
    questions = levelled("choice", hard=2, easy=5, medium=3)
    allowed = epoch_of(by_level(questions, 5, task_mixing=True), 2)
    names = {name for name, may in allowed.items() if may}
    assert names == {f"choice {name}" for name in ("hard0", "hard1", *MEDIUM)}


def test_without_difficulties_half_of_the_choices_search_by_lot_and_math_is_refused(capsys):
    choices = pool(choice=10, qa=4)
    choices = [replace(q, task="choice" if q.kind == "choice" else "qa") for q in choices]
    allowed = epoch_of(stream(choices, 7, task_mixing=True), 2)
    assert sum(may for name, may in allowed.items() if "choice" in name) == 5
    assert all(may for name, may in allowed.items() if "qa" in name)
    assert "no --difficulty: half of the multiple choice" in capsys.readouterr().err
    output = message(stream, levelled("math", hard=4), 2, task_mixing=True)
    assert "--task_mixing of math, need --difficulty FILE (--task_mixing false: all may" in output


def test_half_of_the_choices_are_counted_as_often_as_a_step_deals_them():
    # A step takes 3 of a's 10 and 1 of b's 10: half of 4 is 2. 6 and 2 of them, or any others that
    # come to 2 a step: an a counts 0.3, a b 0.1
    both = [replace(q, task="choice") for q in pool(a=10, b=10)]
    allowed = epoch_of(stream(both, 4, "a=3,b=1", task_mixing=True), 10)
    searching = Counter(name[0] for name, may in allowed.items() if may)
    assert 0.3 * searching["a"] + 0.1 * searching["b"] == pytest.approx(2, abs=0.15)


def test_who_may_search_is_drawn_per_question_and_not_by_the_order_of_reading():
    questions = levelled("choice", hard=31)

    def drawn(some, seed):
        return draw_choices({"": some}, {"": 5}, seed)

    half = drawn(questions[:30], 1)
    assert drawn(questions[29::-1], 1) == half and len(half) == 15
    assert drawn(questions[:30], 2) != half != set(ids(questions[:15]))
    assert half <= drawn(questions, 1)  # 15.5 rounds up: one more, no other


def test_without_task_mixing_all_may_search_but_those_that_may_not_by_themselves():
    assert set(epoch_of(by_level(levelled("math", easy=3), 3), 1).values()) == {True}
    silent = [Question("1", "?", ["!"], level="hard", may_search=False)]
    assert epoch_of(by_level(silent, 1, task_mixing=True), 1) == {"1": False}


# --------------------------------------------------------------------------------- difficulty files

FOUR = [Question(f"q{i}", "?", ["!"]) for i in range(4)]


def test_a_file_gives_its_buckets_and_a_line_without_one_is_read_by_its_mean(tmp_path):
    path = tmp_path / "d.jsonl"
    lines = [{"id": "q0", "scores": [1, 0]}, {"id": "q1", "scores": [1], "bucket": "hard"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_difficulty(path, FOUR[:2]) == {"q0": "medium", "q1": "hard"}
    assert "2 questions have none, the first is q2" in message(read_difficulty, path, FOUR)


NONE = """
215 {"id": "q0", "scores": [1], "bucket": "hardest"}
216 {"id": "q0", "scores": [1], "bucket": ["hard"]}
217 {"id": "q0", "score": 0.5}
217 {"id": "q0", "scores": []}
218 {"id": "q0", "scores": ["1", "0"]}
219 {"id": "q0", "scores": [NaN], "bucket": "hard"}
220 {"id": "q0", "scores": [0, 1e9]}
221 {"scores": [1.0], "bucket": "hard"}
222 {"id": "q0", "scores": [1.
223 \x00\xff
""".strip().splitlines()
NONE = [pytest.param(line[4:], marks=pytest.mark.fault(int(line[:3]))) for line in NONE]


@pytest.mark.parametrize("line", NONE)
def test_a_file_that_is_none_is_one_line(line, tmp_path):
    path = tmp_path / "d.jsonl"
    assert "no such file: `python -m lab.difficulty" in message(read_difficulty, path, FOUR)
    path.write_bytes(line.encode("latin-1") + b"\n")
    error = message(read_difficulty, path, FOUR)
    assert re.search("d.jsonl, (record|line) 1: .*(difficulty again|correct)", error)


def test_level_takes_the_levels_that_the_records_bring():
    questions = levelled(easy=1, medium=1, hard=1, dropped=1)
    levels = read_difficulty("level", questions)
    assert list(levels.values()) == ["easy", "medium", "hard", "dropped"]
    other = Question("5", "?", ["!"], level="5")
    assert "the first is 5" in message(read_difficulty, "level", [other])


def test_python_curriculum_prints_buckets_counts_and_who_may_search(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["curriculum.py"])
    curriculum.main()
    shown = capsys.readouterr().out
    assert "{'hard': 45, 'medium': 13, 'easy': 6}" in shown and "no: asked directly" in shown
    assert "0.80   easy       no" in shown and "0.10   dropped    yes" in shown
