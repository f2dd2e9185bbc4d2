"""Tests plumbing/alarms.py: the cause of each alarm, healthy runs without alarms, --dry_run, and
the metrics of trajectory_metrics.py that the alarms use.
"""

import re
from types import SimpleNamespace

import pytest
from conftest import flags, rows_of, settings_for

import train
from data import Document, Question
from papers import PROTOCOLS
from plumbing import build, dry_run
from plumbing.alarms import ADVICE, PATIENCE, alarms, hint_at_cold_start
from rewards import example
from settings import Settings
from trajectory import Search, Trajectory
from trajectory_metrics import gold_recall, step_searches, text_metrics

HEALTHY = {"frac_reward_zero_std": 0.5, "searched": 0.5, "gold_recall": 0.6, "search_errors": 0.01}
HEALTHY |= {"truncated": 0.1, "malformed_tags": 0.05, "reward": 1.0}
HEALTHY |= {"reward/answer": 0.5, "em": 0.3, "logprob_gap": 0.01, "mismatch_ess": 0.99}


def healthy(steps: int, **changes) -> list[dict]:
    """Returns metrics of this many steps that go up and down by a tenth."""
    rows = []
    for step in range(steps):
        factor = 1 + 0.1 * (-1) ** step
        rows.append({"step": step} | {name: value * factor for name, value in HEALTHY.items()})
        rows[-1] |= changes
    return rows


def raised(rows: list[dict], **settings) -> dict[int, list[str]]:
    """Returns {step: alarms}; as in a run, a step's alarms are in its row at later steps."""
    rows = [dict(row) for row in rows]
    for end in range(1, len(rows) + 1):
        if new_alarms := alarms(rows[:end], Settings(**settings)):
            rows[end - 1]["alarms"] = new_alarms
    return {row["step"]: list(row["alarms"]) for row in rows if "alarms" in row}


CAUSES = {
    "equal_groups": {"frac_reward_zero_std": 1.0},
    "no_search": {"searched": 0.0},
    "gold_recall": {"gold_recall": 0.1},
    "retriever_down": {"search_errors": 0.1},
    "truncated": {"truncated": 0.6},
    "malformed_tags": {"malformed_tags": 0.6},
    "logprob_gap": {"logprob_gap": 0.2},
}


@pytest.mark.parametrize("name", CAUSES)
def test_three_steps_with_one_cause_raise_its_alarm_once_and_never_again(name):
    rows = healthy(11)
    # A single better step starts the count again.
    for step in (0, 1, 3, 4, 5, 6, 8, 9, 10):
        rows[step] |= CAUSES[name]
    assert raised(rows) == {5: [name]} and PATIENCE == 3


@pytest.mark.parametrize(
    "first, later, alarm",
    [(0.01, 0.029, 0), (0.01, 0.031, 1), (1e-5, 9e-4, 0), (0.09, 0.11, 1)],
)
def test_the_limit_of_logprob_gap_is_3_times_step_0_in_bf16_and_0_001_in_fp32(first, later, alarm):
    rows = healthy(5, logprob_gap=later)
    rows[0]["logprob_gap"] = first
    assert len(raised(rows)) == alarm
    for row in rows:
        del row["mismatch_ess"]  # rows of a run in fp32
    assert len(raised(rows)) == (later > 1e-3)


def test_a_reward_that_rises_while_exact_match_falls_is_an_alarm():
    def after_ten_steps(**changes) -> list[dict]:
        return healthy(10) + [row | changes for row in healthy(16)[10:]]

    hacked = after_ten_steps(reward=2.0, em=0.1)
    assert [*raised(hacked).values()] == [["reward_hacked"]]
    for row in hacked:
        del row["reward/answer"]  # stage 1 rewards searching, not answers
    for rows in (hacked, after_ten_steps(reward=2.0), after_ten_steps(em=0.1)):
        assert raised(rows) == {}


def test_every_alarm_is_tested_here_and_a_healthy_run_raises_none():
    assert {*CAUSES, "reward_hacked"} == {*ADVICE} and len(ADVICE) == 8
    assert raised(healthy(40)) == {}
    # Rows of an earlier version, or of a protocol without searches, lack most metrics.
    assert raised([{"step": n, "frac_reward_zero_std": 0, "searched": 1} for n in range(9)]) == {}


def test_a_cause_that_the_settings_make_inevitable_is_not_an_alarm():
    no_search, equal = healthy(4, searched=0.0), healthy(4, **CAUSES["equal_groups"])
    for no_searches in ({"retrieval": False}, {"max_searches": 0}, {"direct_tasks": "math"}):
        assert raised(no_search, **no_searches) == {}
    assert raised(equal, algorithm="reinforce_pp") == {}  # this algorithm has no groups
    assert raised(healthy(4, skipped=1), algorithm="dapo") == {2: ["equal_groups"]}


@pytest.mark.parametrize(
    "text, opened, malformed",
    [
        ("<think> who </think> <search> Ana </search> <answer> elm </answer>", "", False),
        ("<think> a </think> <search> b", "", True),
        ("a </think> <answer> b </answer>", "<think>", False),  # the chat template opened the tag
    ],
)
def test_text_metrics_of_tokens_and_tags(text, opened, malformed):
    t = Trajectory(Question("q", "?", ["elm"]), PROTOCOLS["when_to_search"], opened=opened)
    # No metric counts what the environment wrote.
    t.append_environment([1] * 30, "<search> x", "documents")
    t.append_model([5] * 7, [0.0] * 7, text)
    numbers = text_metrics(t)
    assert (numbers["model_tokens"], numbers["malformed_tags"]) == (7, malformed)


def trajectory_of(*texts: str, **question) -> Trajectory:
    """Returns a trajectory with a search that finds documents of these texts; without
    texts, there is no search.
    """
    t = example("ur2", searches=0)
    t.question = Question(**{"id": "q", "question": "?", "answers": ["New York"]} | question)
    if texts:
        documents = [Document(text, "", text) for text in texts]
        t.searches.append(Search("x", documents, "x", seconds=2.0))
    return t


def test_seconds_of_searches_are_per_process():
    numbers = step_searches([trajectory_of("a"), trajectory_of("b"), trajectory_of()], processes=2)
    assert numbers["search_seconds"] == 2 and numbers["gold_recall"] == 0


def test_gold_recall_counts_questions_and_compares_whole_words():
    found = trajectory_of("in the New-York!", id="a")
    not_found = trajectory_of("New Yorkers", "York New", id="b")
    again = trajectory_of("x", id="a")  # one of two samples of the question found the answer
    assert gold_recall([found, again, not_found]) == {"gold_recall": 0.5}
    # Neither a number that is computed nor "yes" has to be in a document.
    computed = trajectory_of("5", answers=["5"], task="math")
    assert gold_recall([trajectory_of(), computed, trajectory_of("yes", answers=["Yes"])]) == {}


def test_a_run_prints_and_saves_an_alarm_and_a_resumed_run_does_not_repeat_it(
    model, tmp_path, capsys
):
    more = "--max_turn_tokens 2 --save_every 3 --algorithm reinforce_pp"
    folder = train.train(settings_for(model, tmp_path, f"{more} --steps 3"))
    assert f"alarm: {ADVICE['truncated']}" in capsys.readouterr().out
    train.train(settings_for(model, tmp_path, f"{more} --steps 5 --resume"))
    rows = rows_of(folder)
    assert [n for n, row in enumerate(rows) if "truncated" in row.get("alarms", ())] == [2]
    assert len(rows) == 5 and "alarm: most" not in capsys.readouterr().out


def files_of(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_names_each_fault_after_one_step_and_does_not_change_an_existing_run(
    model, tmp_path, capsys, monkeypatch
):
    def down(requests):
        raise ConnectionError("rejected")

    train.train(settings_for(model, tmp_path, "--steps 2"))
    before = files_of(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(build, "build_search", lambda *_: down)
    more = "--dry_run --steps 50 --resume --algorithm grpo --questions_per_step 6"
    train.main(flags(model, tmp_path, f"{more} --temperature 0.01"))
    printed = capsys.readouterr().out
    assert files_of(tmp_path) == before and "settings.json" not in printed
    pattern = r"prompts: \d+ to \d+ tokens; trajectories at most \d+ of \d+ "
    assert re.search(pattern, printed)
    assert ADVICE["retriever_down"] in printed and ADVICE["equal_groups"] in printed
    assert "nothing found" not in printed


def test_the_estimate_comes_before_a_small_step(model, tmp_path, monkeypatch, capsys):
    """Four trajectories with turns of 32 tokens take 3 s. So with the update a trajectory takes 1.5
    s, and a step of 64 · 16 trajectories 1536 s.
    """
    sampled, clock, sample_all = [], iter([0.0, 3.0]), train.shared_rollout

    def watched(state, environment, *arguments):
        rows = sample_all(state, environment, *arguments)
        sampled.append((len(rows), environment.turn_limit(rows[0])))
        return rows

    monkeypatch.setattr(train, "shared_rollout", watched)
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    more = "--dry_run --questions_per_step 64 --group_size 16 --steps 7 --max_turn_tokens 40"
    train.main(flags(model, tmp_path, more))
    assert sampled == [(4, 32), (16, 40)]
    estimate = "about 1536 s (25.6 minutes) for each of the 7 steps, 1.5 s a trajectory"
    assert estimate in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "metrics", "settings", "hint"),
    [
        (None, {"searched": 0.0}, {}, True),
        ("Rome", {"searched": 1.0}, {}, False),
        ("Rome", {"searched": 0.0}, {"retrieval": False}, False),  # it was not allowed to search
        (None, {"searched": 0.0}, {"model": ""}, False),  # the built-in model
    ],
)
def test_an_evaluation_without_a_search_and_answer_ends_with_a_sentence(
    answer, metrics, settings, hint, capsys
):
    given = Settings(**{"model": "m"} | settings)
    hint_at_cold_start([{"prediction": answer, "metrics": metrics}], given)
    assert ("python coldstart.py" in capsys.readouterr().out) == hint
