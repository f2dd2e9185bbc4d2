"""Tests curriculum.py: shares per kind and difficulty, which questions may search, and resuming."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from conftest import message

from curriculum import QuestionStream, bucket_of_mean, exact_counts, with_buckets
from data import Question
from flags import resolve
from lab.difficulty import bucket_of_first_success
from settings import Settings, pairs

SEVEN_TWO_ONE = "hard=7,medium=2,easy=1"


def pool(**counts):
    """Returns this many questions of each kind, with ids such as a0, a1, ..."""
    return [
        Question(f"{kind}{i}", "?", ["!"], source=kind)
        for kind, count in counts.items()
        for i in range(count)
    ]


def pool_of_levels(task="qa", **counts):
    """Returns questions of one task, whose ids and levels name their bucket."""
    return [
        Question(f"{task} {name}{i}", "?", ["!"], task, level=name.replace("dropped", "very_hard"))
        for name, count in counts.items()
        for i in range(count)
    ]


def stream(questions, count, attempts=1, **options):
    """Returns a stream; shares may be texts such as "hard=7,easy=1"."""
    for name in {"mix", "buckets"} & options.keys():
        if isinstance(options[name], str):
            options[name] = pairs(options[name])
    return QuestionStream(questions, Settings(questions_per_step=count, **options), attempts)


def by_level(questions, count, **options):
    return stream(questions, count, difficulty="level", **options)


def ids(questions):
    return [question.id for question in questions]


def epoch_of(dealer, steps):
    """Returns id -> whether it may search, for all questions that the first steps deal."""
    return {q.id: q.may_search for step in range(steps) for q in dealer.take(step)}


# ------------------------------------------------------------------------------------------ dealing


def test_every_epoch_deals_each_question_once_in_a_new_order():
    dealer = stream(pool(a=5), 2)  # the first epoch ends within a step
    dealt = [name for step in range(5) for name in ids(dealer.take(step))]
    first, second = dealt[:5], dealt[5:]
    assert sorted(first) == sorted(second) == [f"a{i}" for i in range(5)] and first != second


def test_all_attempts_of_all_steps_share_one_numbering():
    # With 2 questions and 3 attempts, attempt a of step s has the questions 2 (3s + a) and
    # 2 (3s + a) + 1.
    dealer = stream(pool(a=12), 2, attempts=3)
    dealt = [ids(dealer.take(step, attempt)) for step in range(2) for attempt in range(3)]
    assert dealt == [ids(stream(pool(a=12), 2).take(turn)) for turn in range(6)]


def test_remainders_are_spread_so_that_one_epoch_asks_each_question_once():
    # R1-Searcher's stage 2: 8,148 questions of Table 1 at 64 a step. The 128th step has only the
    # last 20 of them, so 44 of its questions begin the second epoch. With 20, 16, 8 and 20 in every
    # step 64 questions would never be asked.
    settings = resolve("r1_searcher", 2, False, {"difficulty": "level"})
    data = []
    for name, count in settings.mix.items():
        kind, level = name.split(":")
        data += [Question(f"{name}{i}", "?", ["!"], source=kind, level=level) for i in range(count)]
    dealer = QuestionStream(data, settings)
    uses = Counter(name for step in range(128) for name in ids(dealer.take(step)))
    assert len(uses) == 8148 and Counter(uses.values()) == {1: 8104, 2: 44}


# ------------------------------------------------------------------------------------------ buckets


@pytest.mark.parametrize(
    "score, expected",
    [
        (0.8, "easy"),
        (0.799, "medium"),
        (0.2, "hard"),
        (0.199, "dropped"),
        (sum([0.1] * 8), "easy"),  # 0.7999999999999999
    ],
)
def test_a_bucket_contains_its_lower_edge_despite_rounding_errors(score, expected):
    assert bucket_of_mean([score]) == expected


@pytest.mark.parametrize(
    "first, expected",
    [(9, "easy"), (10, "medium"), (20, "medium"), (21, "hard"), (26, "hard")],
)
def test_r1_searcher_counts_rollouts_until_the_first_success(first, expected):
    # A score of 0.5 is not a success; 26 means never.
    scores = [1.0 if number == first else 0.5 for number in range(1, 26)]
    assert bucket_of_first_success(scores) == expected


def test_every_step_has_hard_medium_and_easy_questions_as_seven_to_two_to_one():
    questions = pool_of_levels(hard=23, medium=9, easy=5, dropped=30)
    dealer = by_level(questions, 20, buckets=SEVEN_TWO_ONE)
    for step in range(12):
        assert Counter(q.level for q in dealer.take(step)) == {"hard": 14, "medium": 4, "easy": 2}


def test_dropped_questions_are_left_out_and_counted_unless_buckets_names_them(capsys):
    questions = pool_of_levels(hard=5, dropped=7)
    dealer = by_level(questions, 5)
    assert {name.rstrip("0123456789") for name in epoch_of(dealer, 9)} == {"qa hard"}
    assert '7 of 12 questions are in the bucket "dropped"' in capsys.readouterr().err
    stage1 = by_level(questions, 7, buckets="dropped=1")  # UR²'s stage 1 for math
    assert (
        Counter(q.level for q in stage1.take(0)) == {"dropped": 7} and not capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "options, fragment",
    [
        ({"buckets": "hard=9,easy=1"}, "9 questions of hard, and the data has 5"),
        ({"buckets": "hard=1,easy=99"}, "a step takes 0 questions of hard"),
        ({"buckets": "math:hard=1"}, "0 questions of the recipe's shares, and the data has 0"),
        ({"mix": "math=1"}, "of math, and the data has 0 (there are qa)"),
    ],
)
def test_impossible_buckets_are_an_error_of_one_line(options, fragment):
    options = {"difficulty": "level"} | options
    assert fragment in message(stream, pool_of_levels(hard=5, easy=20), 10, **options)


def counts_of(dealer) -> dict:
    """Returns how many questions of each pool the first step takes."""
    return exact_counts(dealer.size, dealer.weights)


def test_a_task_with_its_own_buckets_is_weighted_by_its_number_of_questions():
    # A third of 90 are math questions, 1 : 1 : 1 (appendix C.5); the other 60 are 7 : 2 : 1.
    shares = resolve("ur2", 2, False, {"difficulty": "level"}).buckets
    math = pool_of_levels("math", hard=10, medium=10, easy=10)
    others = pool_of_levels(hard=42, medium=12) + pool_of_levels("choice", easy=6)
    thirds = {"math:hard": 10, "math:medium": 10, "math:easy": 10}
    rest = {"hard": 42, "medium": 12, "easy": 6}
    assert counts_of(by_level(math + others, 90, buckets=shares)) == thirds | rest
    assert counts_of(by_level(others, 60, buckets=shares)) == rest  # shares of math are ignored


@pytest.mark.parametrize(
    "variant, stage, expected",
    [
        # 64 · 200 / 350 = 36.6.
        ("", 1, {"hotpotqa:medium": 37, "2wiki:medium": 27}),
        # 64 · 2561 / 8148 = 20.1, then 15.7, 8.5 and 19.6: the two largest remainders are rounded
        # up.
        ("", 2, {"hotpotqa:medium": 20, "hotpotqa:hard": 16, "2wiki:medium": 8, "2wiki:hard": 20}),
        # Table 7, one data set. 64 · 2561 / 4561 = 35.9 and 64 · 1087 / 3587 = 19.4.
        ("hotpotqa_only", 2, {"hotpotqa:medium": 36, "hotpotqa:hard": 28}),
        ("2wiki_only", 2, {"2wiki:medium": 19, "2wiki:hard": 45}),
    ],
)
def test_r1_searchers_tables_1_and_7(variant, stage, expected):
    data = [
        replace(question, source=kind, id=f"{kind} {question.id}")
        for kind in ("hotpotqa_bridge", "hotpotqa_comparison", "2wiki_inference")
        for question in pool_of_levels(easy=70, medium=70, hard=70)
    ]
    settings = resolve("r1_searcher", stage, False, {"variant": variant, "difficulty": "level"})
    dealt = QuestionStream(data, settings).take(0)
    assert Counter(f"{q.kind.split('_')[0]}:{q.level}" for q in dealt) == expected


def test_the_full_name_of_a_kind_has_precedence_over_its_first_part():
    data = pool(hotpotqa_bridge=9, hotpotqa_comparison=9)
    dealt = stream(data, 6, mix="hotpotqa=2,hotpotqa_bridge=1").take(0)
    assert Counter(q.kind for q in dealt) == {"hotpotqa_bridge": 2, "hotpotqa_comparison": 4}


def test_data_of_only_dropped_questions_is_an_error_that_says_what_to_do():
    assert '"dropped": ask easier ones' in message(by_level, pool_of_levels(dropped=5), 2)


# -------------------------------------------------------------------------------------- task mixing


def test_open_questions_always_search_and_math_only_if_hard():
    questions = pool_of_levels("math", easy=3, hard=3, dropped=3) + pool_of_levels(easy=3)
    allowed = epoch_of(
        by_level(questions, 12, buckets="dropped=1,easy=2,hard=1", task_mixing=True), 1
    )
    forbidden = {name for name, may_search in allowed.items() if not may_search}
    assert len(allowed) == 12 and forbidden == {"math easy0", "math easy1", "math easy2"}


def test_half_of_the_easy_math_questions_may_search_under_llama():
    # C.5, without hard math questions: easy : medium is 2 : 1. A third of the 3,000 questions may
    # search, all of them easy.
    llama = resolve("ur2", 2, False, {"variant": "llama_8b", "difficulty": "level"})
    math = pool_of_levels("math", medium=1000, easy=2000)
    dealer = QuestionStream(math, replace(llama, questions_per_step=3))
    assert counts_of(dealer) == {"math:medium": 1, "math:easy": 2}
    allowed = epoch_of(dealer, 1000)  # every question once
    # The variance of 2,000 draws is 2,000 · 0.5 · 0.5 = 500, so the standard deviation is 22.
    assert len(allowed) == 3000 and abs(sum(allowed.values()) - 1000) < 70
    assert all("easy" in name for name, may_search in allowed.items() if may_search)


def test_half_of_the_dealt_choices_may_search_and_all_of_them_are_hard():
    # Hard and easy are dealt at 8 : 2. Half of the 10 questions of a step are 5 of the 8 hard ones,
    # so 5/8 of the 40 hard questions may search.
    questions = pool_of_levels("choice", hard=40, easy=10)
    dealer = by_level(questions, 10, buckets="hard=8,easy=2", task_mixing=True)
    allowed = epoch_of(dealer, 5)  # every question once
    assert len(allowed) == 50 and sum(allowed.values()) == 25
    assert all("hard" in name for name, may in allowed.items() if may)


def test_math_without_difficulties_is_an_error_under_task_mixing():
    output = message(stream, pool_of_levels("math", hard=4), 2, task_mixing=True)
    assert "give --difficulty FILE, or --task_mixing false, which restricts no question" in output


def test_without_task_mixing_all_may_search_except_those_marked_in_the_data():
    assert set(epoch_of(by_level(pool_of_levels("math", easy=3), 3), 1).values()) == {True}
    direct = [Question("1", "?", ["!"], level="hard", may_search=False)]
    assert epoch_of(by_level(direct, 1, task_mixing=True), 1) == {"1": False}


# --------------------------------------------------------------------------------- difficulty files

FOUR = [Question(f"q{i}", "?", ["!"]) for i in range(4)]


def test_a_file_gives_buckets_and_a_line_without_one_is_sorted_by_its_mean_score(tmp_path):
    path = tmp_path / "d.jsonl"
    lines = [{"id": "q0", "scores": [1, 0]}, {"id": "q1", "scores": [1], "bucket": "hard"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    levels = [question.level for question in with_buckets(FOUR[:2], str(path), False)]
    assert levels == ["medium", "hard"]
    error = message(with_buckets, FOUR, str(path), False)
    assert "2 questions have no difficulty, the first is q2" in error


BROKEN = """
215 {"id": "q0", "scores": [1], "bucket": "hardest"}
217 {"id": "q0", "score": 0.5}
217 {"id": "q0", "scores": []}
219 {"id": "q0", "scores": [NaN], "bucket": "hard"}
221 {"scores": [1.0], "bucket": "hard"}
222 {"id": "q0", "scores": [1.
""".strip().splitlines()
BROKEN = [pytest.param(line[4:], marks=pytest.mark.fault(int(line[:3]))) for line in BROKEN]


@pytest.mark.parametrize("line", BROKEN)
def test_a_line_that_is_not_a_difficulty_record_is_an_error_of_one_line(line, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(f"{line}\n")
    assert "d.jsonl, line 1: " in message(with_buckets, FOUR, str(path), False)
