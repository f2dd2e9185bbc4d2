"""Tests that the model learns the built-in world: warm-up, stage 1 and stage 2 as `make train` runs
them, but in another world.

The bounds are those of the project's reported results. On 40 questions per kind some are looser,
because of sampling noise.
"""

from pathlib import Path
from statistics import fmean

import pytest
from conftest import rows_of

import eval as evaluation
import train
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
            records = evaluation.predict(*evaluation.parse(f"{common} {options}".split()))
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
