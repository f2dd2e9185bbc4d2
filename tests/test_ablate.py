"""ablate.py: the interval and the verdict by hand, which arms run in which order, and what the
table says.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from errors import InputError
from lab import ablate
from lab.ablate import (
    ARMS,
    CLAIMS,
    Claim,
    as_markdown,
    chosen,
    interval,
    plan,
    reward_rows,
    rows,
    run_all,
    values,
    verdict,
    wanted_arms,
)
from recipes import RECIPES, check_recipe, resolve

BOTH = ("with", "without")
UP = Claim("up", "a paper", "more is more", BOTH, "EM", ablate.score("lookups", "em"))
DOWN = Claim(
    "down",
    "a paper",
    "less is less",
    BOTH,
    "searches",
    ablate.score("arithmetic", "searches"),
    -1,
    0.1,
)


def result(em=0.0, searches=0.0, **more) -> dict:
    """one_hop and two_hop differ by 0.2 around `em`: "lookups" is their mean."""
    kinds = {"one_hop": em + 0.1, "two_hop": em - 0.1}
    return {
        "eval": {
            **{kind: {"em": value} for kind, value in kinds.items()},
            "arithmetic": {"searches": searches},
        },
        **more,
    }


def write_result(runs, arm: str, seed: int, content: dict | None = None) -> None:
    path = ablate.result_path(str(runs), arm, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content or {}))


# ----------------------------------------------------------------------------- interval and verdict


def test_the_interval_of_1_2_3_is_2_plus_or_minus_2_484():
    # s = 1, t(2) = 4.303, 4.303 / √3 = 2.4843
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - 2.4843, 2 + 2.4843), abs=1e-3)


def test_the_interval_of_two_worlds_is_wide_and_of_one_it_has_no_end():
    # 0 and 2: s = √2, half = 12.706 · √2 / √2
    assert interval([0.0, 2.0]) == pytest.approx((1, 1 - 12.706, 1 + 12.706))
    assert interval([0.4]) == (0.4, -math.inf, math.inf)


def test_equal_worlds_leave_no_doubt_and_more_than_ten_have_the_last_point_of_the_table():
    assert interval([0.5] * 4) == (0.5, 0.5, 0.5)
    mean, low, _ = interval(
        [0.0, 1.0] * 6
    )  # s = √(12 · 0.25 / 11) = 0.5222; 2.262 (for 9) is wider than 2.201 (for 11)
    assert mean - low == pytest.approx(2.262 * 0.52223 / math.sqrt(12), abs=1e-4)


@pytest.mark.parametrize(
    "differences, said",
    [
        ([0.10, 0.12, 0.11], "shows"),  # s = 0.01: 0.11 ± 0.025
        ([0.020, 0.021, 0.022], "does not show"),  # beyond 0, but smaller than what counts (0.03)
        ([0.30, -0.10, 0.10], "does not show"),  # s = 0.2: 0.1 ± 0.497
        ([-0.10, -0.12, -0.11], "reversed"),
        ([-0.020, -0.021, -0.022], "does not show"),  # too small on the other side too
        ([0.9], "does not show"),  # one world tells nothing
        ([], "not run"),
    ],
)
def test_a_verdict_needs_an_interval_beyond_0_and_an_effect_that_counts(differences, said):
    assert verdict(UP, differences) == said


def test_a_claim_of_less_is_read_from_the_other_side():
    assert verdict(DOWN, [-0.30, -0.32, -0.31]) == "shows"
    assert verdict(DOWN, [0.30, 0.32, 0.31]) == "reversed"
    assert verdict(DOWN, [-0.05, -0.051, -0.052]) == "does not show"  # its own threshold is 0.1


# --------------------------------------------------------------------------------- what is compared


def test_only_worlds_with_both_arms_are_compared():
    results = {
        ("with", 1): result(0.8),
        ("without", 1): result(0.5),
        ("with", 2): result(0.9),
        ("without", 3): result(0.1),
    }
    assert values(UP, results, [1, 2, 3]) == [(pytest.approx(0.8), pytest.approx(0.5))]
    assert values(UP, results, [2]) == []


def test_no_worse_than_by_0_03_is_a_claim_that_grants_0_03():
    claim = Claim(
        "as good",
        "a paper",
        "costs nothing",
        ("with", "without"),
        "EM + 0.03",
        UP.measure,
        1,
        0.0,
        margin=0.03,
    )
    results = {
        ("with", 1): result(0.50),
        ("without", 1): result(0.52),
        ("with", 2): result(0.50),
        ("without", 2): result(0.52),
    }
    pairs = values(claim, results, [1, 2])
    assert pairs[0] == (pytest.approx(0.53), pytest.approx(0.52))
    assert verdict(claim, [one - other for one, other in pairs]) == "shows"


def test_the_table_has_a_line_per_claim_also_for_those_that_were_not_run():
    results = {("with", s): result(0.80 + s / 100, 0.0) for s in (1, 2, 3)} | {
        ("without", s): result(0.50) for s in (1, 2, 3)
    }
    absent = Claim("absent", "p", "never run", ("no", "nobody"), "EM", ablate.score("known", "em"))
    header, one, two = rows([UP, absent], results, [1, 2, 3])
    assert header[-1] == "verdict" and len(header) == len(one) == len(two)
    # 0.31, 0.32, 0.33: 0.32 ± 4.303 · 0.01 / √3 = 0.32 ± 0.0248
    assert one[3:] == ["0.82", "0.50", "+0.32 [+0.30, +0.34]", "3", "shows"]
    assert two[3:] == ["-", "-", "-", "0", "not run"]
    markdown = as_markdown([header, one, two]).splitlines()
    assert (
        len(markdown) == 4
        and all(line.count("|") == len(header) + 1 for line in markdown)
        and "---" in markdown[1]
    )


def test_the_arms_own_rewards_are_told_before_and_after_world_by_world():
    results = {
        ("arena", 20): result(reward=[1.0, 2.5], seconds=30),
        ("arena", 21): result(reward=[1.5, 1.25], seconds=50),
    }
    _, line = reward_rows(results)
    assert line == ["arena", "1.00 -> 2.50   1.50 -> 1.25", "1 of 2", "40"]


def test_the_k2_claim_looks_at_the_largest_gradient():
    # log10: a gradient of 1000 among small ones is 3
    assert ablate.log10_largest_gradient(
        {"curve": {"grad_norm": [0.1, 1000.0, 0.5]}}
    ) == pytest.approx(3)
    assert ablate.logged("em", min)({"curve": {"em": [0.3, 0.1, 0.2]}}) == 0.1


# ------------------------------------------------------------------------- claims, arms and recipes


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_a_recipe_that_can_run(name):
    arm = ARMS[name]
    recipe = check_recipe(
        resolve(
            arm.recipe, arm.stage, True, {"start_from": "x" if arm.start else "", **arm.changes}
        )
    )
    assert all(getattr(recipe, key) == value for key, value in arm.changes.items())
    if (
        arm.start
    ):  # the same protocol and the stage before; the start itself starts from the warmed-up model
        before = ARMS[arm.start]
        assert not before.start and before.stage == arm.stage - 1
        assert RECIPES[before.recipe][before.stage]["protocol"] == recipe.protocol


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_claim_compares_two_different_arms_that_there_are(claim):
    one, other = (ARMS[name] for name in claim.arms)
    assert one != other and claim.sign in (1, -1) and claim.threshold >= 0
    protocols = {RECIPES[arm.recipe][arm.stage]["protocol"] for arm in (one, other)}
    assert len(protocols) == 1


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_both_arms_of_a_claim_have_had_the_same_number_of_steps(claim):
    def steps(name):
        arm = ARMS[name]
        own = resolve(arm.recipe, arm.stage, True, arm.changes).steps
        return own + (steps(arm.start) if arm.start else 0)

    assert steps(claim.arms[0]) == steps(claim.arms[1])


def test_claims_have_names_of_their_own_and_every_arm_is_wanted_by_one():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert wanted_arms(CLAIMS) == list(ARMS)


def test_the_arms_of_a_claim_bring_those_that_they_start_from():
    by_name = {claim.name: claim for claim in CLAIMS}
    assert wanted_arms([by_name["mask"]]) == ["ur2_stage1", "ur2", "ur2_no_mask"]
    assert chosen("") == CLAIMS and chosen("mask, bonus") == [by_name["mask"], by_name["bonus"]]


def test_an_unknown_claim_is_one_line_with_those_that_there_are():
    with pytest.raises(InputError, match="--only maks: no such claim") as error:
        chosen("bonus,maks")
    assert "mask" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--only nonsense", "no such claim"),
        ("--seeds 0", "at least 1"),
        ("--workers 0", "at least 1"),
        ("--seed 3", "--seeds"),
    ],
)
def test_a_bad_command_line_runs_nothing(arguments, said, monkeypatch, tmp_path):
    monkeypatch.setattr(ablate, "run_all", lambda *_: pytest.fail("something was run"))
    with pytest.raises(InputError, match=said):
        ablate.main([*arguments.split(), "--runs", str(tmp_path)])


# ------------------------------------------------------------------------------ what runs, and when


def test_the_plan_makes_the_model_first_then_the_start_then_what_goes_on_from_it(tmp_path):
    tasks = plan(["ur2_stage1", "ur2", "arena"], [20, 21], str(tmp_path))
    assert tasks == {
        ("model", "ur2", 20): None,
        ("arm", "ur2_stage1", 20): ("model", "ur2", 20),
        ("arm", "ur2", 20): ("arm", "ur2_stage1", 20),
        ("model", "arena", 20): None,
        ("arm", "arena", 20): ("model", "arena", 20),
        ("model", "ur2", 21): None,
        ("arm", "ur2_stage1", 21): ("model", "ur2", 21),
        ("arm", "ur2", 21): ("arm", "ur2_stage1", 21),
        ("model", "arena", 21): None,
        ("arm", "arena", 21): ("model", "arena", 21),
    }
    # world by world, and in each every task behind the one that it waits for
    order = list(tasks)
    assert [task[2] for task in order] == [20] * 5 + [21] * 5
    assert all(
        before is None or order.index(before) < order.index(task) for task, before in tasks.items()
    )


def test_what_has_its_result_is_not_run_again(tmp_path):
    write_result(tmp_path, "ur2_stage1", 20)
    assert plan(["ur2_stage1", "ur2"], [20], str(tmp_path)) == {
        ("model", "ur2", 20): None,
        ("arm", "ur2", 20): ("model", "ur2", 20),
    }
    write_result(tmp_path, "ur2", 20)
    assert plan(["ur2_stage1", "ur2"], [20], str(tmp_path)) == {}
    # a result that was being written when the power went is none
    ablate.result_path(str(tmp_path), "ur2", 20).rename(tmp_path / "ur2-world20" / "result.partial")
    assert ("arm", "ur2", 20) in plan(["ur2_stage1", "ur2"], [20], str(tmp_path))


@pytest.fixture
def ran(monkeypatch):
    """Fake arms in threads: what was begun and ended, in that order."""
    events = []

    def run(name, seed, runs):
        events.append(("begin", name, seed))
        if name == "ur2_stage1" and seed == 20:
            raise RuntimeError("no luck")
        events.append(("end", name, seed))
        return 1.0

    monkeypatch.setattr(
        ablate, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers)
    )
    monkeypatch.setattr(ablate, "run_arm", run)
    monkeypatch.setattr(ablate, "make_models", run)
    return events


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failed_arm_takes_along_only_what_starts_from_it(workers, ran, tmp_path, capsys):
    run_all(["ur2_stage1", "ur2", "ur2_no_stage1", "arena"], [20, 21], str(tmp_path), workers)
    ended = {event[1:] for event in ran if event[0] == "end"}
    assert ended == {
        ("ur2", 20),
        ("ur2_no_stage1", 20),
        ("arena", 20),  # "ur2" and "arena" in world 20: the models alone
        ("ur2_stage1", 21),
        ("ur2", 21),
        ("ur2_no_stage1", 21),
        ("arena", 21),
    }
    # models are named by their protocol: the model "ur2" of world 20 was made, its arm "ur2" was
    # not begun
    assert ran.count(("begin", "ur2", 20)) == 1 and ran.count(("begin", "ur2", 21)) == 2
    said = capsys.readouterr()
    assert "ur2_stage1 in world 20 failed: no luck (see its log.txt)" in said.out + said.err


def test_every_arm_runs_behind_what_it_waits_for(ran, tmp_path):
    run_all(["ur2_stage1", "ur2"], [21, 22], str(tmp_path), 2)
    for seed in (21, 22):
        order = [event[:2] for event in ran if event[2] == seed]
        assert order == [
            ("begin", "ur2"),
            ("end", "ur2"),
            ("begin", "ur2_stage1"),
            ("end", "ur2_stage1"),
            ("begin", "ur2"),
            ("end", "ur2"),
        ]


def test_one_worker_finishes_the_first_world_before_the_second(ran, tmp_path):
    run_all(["ur2_no_stage1", "arena"], [21, 22], str(tmp_path), 1)
    assert [event[2] for event in ran if event[0] == "begin"] == [21] * 4 + [22] * 4


def test_nothing_left_to_do_starts_no_process(monkeypatch, tmp_path):
    monkeypatch.setattr(ablate, "ProcessPoolExecutor", lambda *_: pytest.fail("a pool was made"))
    write_result(tmp_path, "arena", 20)
    run_all(["arena"], [20], str(tmp_path), 2)


def test_the_table_of_what_is_there_runs_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ablate, "run_all", lambda *_: pytest.fail("something was run"))
    for seed, exact in ((20, 0.9), (21, 0.8)):
        for arm, less in (("arena", 0.0), ("arena_no_bonus", 0.5)):
            kinds = {
                kind: {"em": 1.0, "exact_set": exact - less} for kind in ("one_hop", "two_hop")
            }
            write_result(tmp_path, arm, seed, {"eval": kinds, "reward": [1, 2], "seconds": 3})
    ablate.main(["--table", "--only", "bonus,relevance", "--runs", str(tmp_path), "--rewards"])
    lines = capsys.readouterr().out.splitlines()
    # the difference is 0.5 in both worlds: s = 0
    assert "0.85" in lines[1] and "+0.50 [+0.50, +0.50]" in lines[1] and lines[1].endswith("shows")
    assert lines[2].endswith("not run")
    assert any(line.startswith("arena_no_bonus") and "2 of 2" in line for line in lines)
