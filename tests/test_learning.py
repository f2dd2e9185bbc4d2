"""The built-in world is learned: warm-up, stage 1 and stage 2 as `make train` runs them, on a world
of its own. And stage 1 with a sampler that is behind, and with too large a learning rate.

Bounds are those of the project's figures, held on 40 questions a kind: looser where sampling noise
needs it.
"""

import contextlib
import copy
from collections import Counter, deque
from pathlib import Path
from statistics import fmean

import pytest
from conftest import rows_of

import eval as evaluation
import train
from curriculum import exact_counts
from data import SearchResult
from formats.records import finished_records
from lab import difficulty
from plumbing import build
from plumbing.build import build_state
from plumbing.files import checkpoints
from plumbing.report import summarise
from settings import parse

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return (
        f"--output_dir {tmp_path_factory.mktemp('runs')} --run_name learned --world_seed 7 --seed 7"
    )


@pytest.fixture(scope="module")
def scores(common, tmp_path_factory):
    """(stage, temperature, kind) -> column -> mean, on held-out entities. Temperature "direct": 1,
    with the prompt without retrieval; "queries" are those that the model wrote.
    """
    out, table = tmp_path_factory.mktemp("out"), {}
    for stage in (0, 1, 2):
        if stage:
            train.main(f"--stage {stage} {common}".split())
        for name in (0.0, 1.0, "direct"):
            asked = f"--temperature {name}" if name != "direct" else "--temperature 1 --retrieval=0"
            more = f"{asked} --questions 40 --split dev --stage {stage} --out {out}/{stage}-{name}"
            records = evaluation.Evaluation(*evaluation.parse(f"{common} {more}".split())).run()
            columns = ("em", "searched", "searches")
            for kind, row in summarise(records).items():
                texts = [r["transcript"] for r in records if kind in (r["kind"], "all")]
                queries = "".join(texts).count("<|end_of_query|>") / len(texts)
                table[stage, name, kind] = {c: row[c][0] for c in columns} | {"queries": queries}
    return table


def test_the_warm_model_can_neither_answer_nor_does_it_search(scores):
    one_hop, two_hop = scores[0, 1.0, "one_hop"], scores[0, 1.0, "two_hop"]
    assert one_hop["em"] <= 0.2 and two_hop["em"] <= 0.2
    assert (one_hop["searched"] + two_hop["searched"]) / 2 <= 0.3
    assert scores[0, 0.0, "arithmetic"]["em"] >= 0.9  # but it can add


def test_stage_1_teaches_to_search_and_overdoes_it(scores):
    for kind in ("one_hop", "two_hop"):
        assert scores[1, 1.0, kind]["searched"] >= 0.9
    # the over-searching that stage 2 cures; before RL it is 0.02 on average
    assert scores[1, 1.0, "arithmetic"]["searched"] >= 0.25


def test_stage_2_teaches_to_answer_and_to_leave_useless_searches(scores):
    one_hop, two_hop = scores[2, 0.0, "one_hop"], scores[2, 0.0, "two_hop"]
    assert one_hop["em"] >= 0.9 and two_hop["em"] >= 0.85
    assert abs(one_hop["searches"] - 1) < 0.2 and abs(two_hop["searches"] - 2) < 0.3
    assert scores[2, 1.0, "one_hop"]["em"] > scores[1, 1.0, "one_hop"]["em"]
    sums = scores[2, 1.0, "arithmetic"]
    assert sums["searches"] <= 0.05 and sums["em"] >= 0.75


def test_who_is_not_paid_for_failed_searches_does_not_learn_to_make_them(
    scores, common, monkeypatch
):
    """In world 0 from 0.08 of the rows to 0.98 in 12 steps when they were paid, else to 0.08."""
    down = lambda some: [SearchResult(error="down") for _ in some]  # noqa: E731
    monkeypatch.setattr(build, "build_search", lambda *_: down)
    settings = parse(f"--stage 1 {common.replace('learned', 'down')}".split())
    assert max(row["failed_rows"] for row in rows_of(train.train(settings))) < 0.3


def test_a_run_that_learns_raises_no_alarm(scores, common):
    runs = Path(common.split()[1]) / "learned"
    rows = [*rows_of(runs / "stage1"), *rows_of(runs / "stage2")]
    assert not [row["alarms"] for row in rows if "alarms" in row]


def test_where_it_may_not_search_it_hardly_tries_and_reckons_as_before(scores):
    for kind in ("one_hop", "two_hop", "unit", "arithmetic", "known"):
        assert scores[2, "direct", kind]["searches"] == 0.0
        assert scores[2, "direct", kind]["queries"] <= 0.1
        # A guess at one of the two conversions may be right: 8 of 16 questions.
        assert kind in ("arithmetic", "known") or scores[2, "direct", kind]["em"] <= 0.5
    assert scores[2, "direct", "all"]["queries"] <= 0.03
    for kind in ("arithmetic", "known"):
        assert scores[2, "direct", kind]["em"] >= scores[0, "direct", kind]["em"] - 0.1


def test_measured_difficulty_decides_the_shares_of_a_step(scores, common, tmp_path):
    """Measured after stage 1: before RL hardly a look-up is ever right, and nearly all are
    dropped.
    """
    runs, out = Path(common.split()[1]), tmp_path / "difficulty.jsonl"
    difficulty.main(f"{common} --stage 1 --samples 4 --out {out}".split())
    buckets = Counter(record["bucket"] for record in finished_records(out))
    assert sum(buckets.values()) == 1969 and min(buckets.values()) > 50 and len(buckets) == 4
    start = checkpoints(runs / "learned" / "stage1")[-1]
    given = f"{common} --stage 2 --run_name mixed --model {start} --steps 3 --task_mixing"
    given = [*given.split(), "--difficulty", str(out)]
    train.main(given)
    assert len(rows_of(runs / "mixed" / "stage2")) == 3
    settings = parse(given)
    dealt = Counter(question.level for question in build_state(settings).stream.take(0))
    shares = {"hard": 7, "medium": 2, "easy": 1}
    assert dealt == exact_counts(settings.questions_per_step, shares)


# ---------------------------------------------------------- a sampler that is behind, a collapse


def stage_1(common, monkeypatch, more: str, behind: int = 0) -> tuple[list[dict], float]:
    """(records of the run, reward of samples of the policy that it made). The sampler is so many
    rollouts behind, each of which is followed by two updates.
    """
    state = build_state(parse(f"{common} --stage 1 --seed 1 --run_name other {more}".split()))
    fresh, kept = state.sampler, deque(maxlen=behind + 1)

    @contextlib.contextmanager
    def sampler():
        kept.append(copy.deepcopy(state.policy))
        yield kept[0]

    state.sampler, state.recompute = sampler, behind > 0
    monkeypatch.setattr(train, "build_state", lambda _: state)
    rows = rows_of(train.train(state.settings))
    state.sampler = fresh
    return rows, fmean(fmean(train.collect(state, step).rewards) for step in range(900, 904))


def test_a_sampler_four_updates_behind_teaches_as_a_fresh_one_if_it_is_corrected_for(
    common, monkeypatch
):
    # World 0, seed 1, at three times its learning rate: 4.38, 3.63 and 4.37 (4.43, 3.97 and 4.36
    # with seed 2; 4.33, 0.83 and 3.78 on another processor, whose digits differ). It is not so
    # everywhere: in world 7 both that were behind had 4.3, of 4.6.
    fast = "--world_seed 0 --lr 1e-3 --mismatch"
    _, fresh = stage_1(common, monkeypatch, f"{fast} none")
    rows, plain = stage_1(common, monkeypatch, f"{fast} none", 2)
    _, corrected = stage_1(common, monkeypatch, f"{fast} token", 2)
    lost = fresh - plain
    assert lost > 0.25 and corrected - plain > lost / 2  # most of what it costs comes back
    assert any("logprob_gap" in row.get("alarms", ()) for row in rows)


def test_a_run_that_collapses_says_so_by_the_likelihood_of_better_answers(common, monkeypatch):
    rows, _ = stage_1(common, monkeypatch, "--lr 3e-3 --steps 20")  # ten times its own
    assert any("likelihood" in row.get("alarms", ()) for row in rows)
    assert rows[-1]["em"] < max(row["em"] for row in rows) / 2
