"""Tests that the model learns the built-in world: warm-up, stage 1 and stage 2 as `make train` runs
them, but in another world; stage 1 with a stale sampler, and with too large a learning rate.

The bounds are those of the project's reported results. On 40 questions per kind some are looser,
because of sampling noise.
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
from flags import parse
from formats.records import finished_records
from lab import difficulty
from plumbing import build
from plumbing.build import build_state
from plumbing.files import checkpoints
from plumbing.report import summarise

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return (
        f"--output_dir {tmp_path_factory.mktemp('runs')} --run_name learned --world_seed 7 --seed 7"
    )


@pytest.fixture(scope="module")
def scores(common, tmp_path_factory):
    """Returns {(stage, temperature, kind): {column: mean}} on held-out entities. The temperature
    "direct" means 1 and the prompt without retrieval; "queries" are those that the model wrote.
    """
    out, table = tmp_path_factory.mktemp("out"), {}
    for stage in (0, 1, 2):
        if stage:
            train.main(f"--stage {stage} {common}".split())
        for name in (0.0, 1.0, "direct"):
            sampling = (
                f"--temperature {name}" if name != "direct" else "--temperature 1 --retrieval=false"
            )
            options = (
                f"{sampling} --questions 40 --split dev --stage {stage} --out {out}/{stage}-{name}"
            )
            records = evaluation.Evaluation(*evaluation.parse(f"{common} {options}".split())).run()
            columns = ("em", "searched", "searches")
            for kind, row in summarise(records).items():
                texts = [r["transcript"] for r in records if kind in (r["kind"], "all")]
                queries = "".join(texts).count("<|end_of_query|>") / len(texts)
                table[stage, name, kind] = {c: row[c][0] for c in columns} | {"queries": queries}
    return table


def test_the_warmed_up_model_neither_answers_look_ups_nor_searches(scores):
    one_hop, two_hop = scores[0, 1.0, "one_hop"], scores[0, 1.0, "two_hop"]
    assert one_hop["em"] <= 0.2 and two_hop["em"] <= 0.2
    assert (one_hop["searched"] + two_hop["searched"]) / 2 <= 0.3
    assert scores[0, 0.0, "arithmetic"]["em"] >= 0.9  # it can add


def test_stage_1_teaches_searching_even_where_it_is_needless(scores):
    for kind in ("one_hop", "two_hop"):
        assert scores[1, 1.0, kind]["searched"] >= 0.9
    # Stage 2 unlearns these needless searches; before RL the share is 0.02 on average.
    assert scores[1, 1.0, "arithmetic"]["searched"] >= 0.25


def test_stage_2_teaches_answering_and_unlearns_needless_searches(scores):
    one_hop, two_hop = scores[2, 0.0, "one_hop"], scores[2, 0.0, "two_hop"]
    assert one_hop["em"] >= 0.9 and two_hop["em"] >= 0.85
    assert abs(one_hop["searches"] - 1) < 0.2 and abs(two_hop["searches"] - 2) < 0.3
    # All kinds together: on 40 one-hop questions of this world, noise of the processor's rounding
    # is larger than the gain (0.90 -> 0.85 on one machine, the reverse on another).
    stage_1, stage_2 = (
        fmean(scores[stage, 1.0, kind]["em"] for kind in ("one_hop", "two_hop", "arithmetic"))
        for stage in (1, 2)
    )
    assert stage_2 > stage_1
    sums = scores[2, 1.0, "arithmetic"]
    assert sums["searches"] <= 0.05 and sums["em"] >= 0.75


def test_without_a_reward_for_failed_searches_the_model_does_not_learn_them(
    scores, common, monkeypatch
):
    """In world 0, with a reward for failed searches, the share of rows that have one rose from 0.08
    to 0.98 in 12 steps; with no reward it ended at 0.08.
    """
    down = lambda some: [SearchResult(error="down") for _ in some]  # noqa: E731
    monkeypatch.setattr(build, "build_search", lambda *_: down)
    settings = parse(f"--stage 1 {common.replace('learned', 'down')}".split())
    assert max(row["failed_rows"] for row in rows_of(train.train(settings))) < 0.3


def test_a_run_that_learns_raises_no_alarm(scores, common):
    runs = Path(common.split()[1]) / "learned"
    rows = [*rows_of(runs / "stage1"), *rows_of(runs / "stage2")]
    assert not [row["alarms"] for row in rows if "alarms" in row]


def test_with_the_prompt_for_direct_answers_it_rarely_searches_and_answers_as_before(scores):
    for kind in ("one_hop", "two_hop", "unit", "arithmetic", "known"):
        assert scores[2, "direct", kind]["searches"] == 0.0
        assert scores[2, "direct", kind]["queries"] <= 0.1
        # A guess at one of the two conversions may be right: 8 of 16 questions.
        assert kind in ("arithmetic", "known") or scores[2, "direct", kind]["em"] <= 0.5
    assert scores[2, "direct", "all"]["queries"] <= 0.03
    for kind in ("arithmetic", "known"):
        assert scores[2, "direct", kind]["em"] >= scores[0, "direct", kind]["em"] - 0.1


def test_measured_difficulty_decides_the_shares_of_a_step(scores, common, tmp_path):
    """Measures difficulty after stage 1, because before RL hardly any look-up is answered right and
    nearly all questions would be dropped.
    """
    runs, out = Path(common.split()[1]), tmp_path / "difficulty.jsonl"
    difficulty.main(f"{common} --stage 1 --samples 4 --out {out}".split())
    buckets = Counter(record["bucket"] for record in finished_records(out))
    assert buckets.total() == 1969 and min(buckets.values()) > 10 and len(buckets) == 4
    start = checkpoints(runs / "learned" / "stage1")[-1]
    arguments = f"{common} --stage 2 --run_name mixed --model {start} --steps 3 --task_mixing"
    arguments = [*arguments.split(), "--difficulty", str(out)]
    train.main(arguments)
    assert len(rows_of(runs / "mixed" / "stage2")) == 3
    settings = parse(arguments)
    levels = Counter(question.level for question in build_state(settings).stream.take(0))
    shares = {"hard": 7, "medium": 2, "easy": 1}
    assert levels == exact_counts(settings.questions_per_step, shares)


# ---------------------------------------------------------------------- a stale sampler, a collapse


def stage_1(
    common, monkeypatch, options: str, rollouts_behind: int = 0
) -> tuple[list[dict], float]:
    """Trains stage 1; returns (metrics of the run, mean reward of samples of the final policy).
    The sampler has weights that are this many rollouts old; two updates follow each rollout.
    """
    state = build_state(parse(f"{common} --stage 1 --seed 1 --run_name other {options}".split()))
    current_sampler, policies = state.sampler, deque(maxlen=rollouts_behind + 1)

    @contextlib.contextmanager
    def sampler():
        policies.append(copy.deepcopy(state.policy))
        yield policies[0]

    state.sampler, state.recompute = sampler, rollouts_behind > 0
    monkeypatch.setattr(train, "build_state", lambda _: state)
    rows = rows_of(train.train(state.settings))
    state.sampler = current_sampler
    return rows, fmean(fmean(train.collect(state, step).rewards) for step in range(900, 904))


def test_correcting_for_a_sampler_four_updates_old_restores_most_of_the_reward(common, monkeypatch):
    # World 0 with seed 2 and three times the usual learning rate gave 4.08, 3.55 and 4.10 (seed 1:
    # 4.45, 4.04 and 4.33). Not every world shows this: in world 7 a wider model had 4.3 with both
    # stale samplers and 4.6 with the current one.
    fast = "--world_seed 0 --seed 2 --lr 1e-3 --mismatch"
    _, fresh = stage_1(common, monkeypatch, f"{fast} none")
    rows, plain = stage_1(common, monkeypatch, f"{fast} none", 2)
    _, corrected = stage_1(common, monkeypatch, f"{fast} token", 2)
    lost = fresh - plain
    assert lost > 0.25 and corrected - plain > lost / 2  # the correction restores most of the loss
    assert any("logprob_gap" in row.get("alarms", ()) for row in rows)
