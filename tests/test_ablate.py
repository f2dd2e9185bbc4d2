"""Tests lab/claims.py and lab/ablate.py: interval and verdict by hand, the arms of each claim, and
a run of two arms.
"""

import json
import math
from functools import partial

import pytest
from conftest import message

from lab import ablate
from lab.ablate import settings_of
from lab.claims import ARMS, CLAIMS, NUMBERS, Claim, interval, measure, verdict
from papers import paper_of

UP = Claim("a paper", "with", "without", NUMBERS["EM"], 0.0, "more is more")
LESS, SAME = UP._replace(number=NUMBERS["NEEDLESS"]), UP._replace(margin=0.05)


# ----------------------------------------------------------------------------- interval and verdict


@pytest.mark.parametrize(
    "differences, mean, half",
    [
        ([1.0, 2.0, 3.0], 2, 4.303 / math.sqrt(3)),  # s = 1, t(2) = 4.303
        # s = √(12 · 0.25 / 11) = 0.5222; the table ends at t(9) = 2.262
        ([0.0, 1.0] * 6, 0.5, 2.262 * 0.52223 / math.sqrt(12)),
    ],
)
def test_the_interval_is_that_of_student_s_t(differences, mean, half):
    assert interval(differences) == pytest.approx((mean, mean - half, mean + half), abs=1e-4)


@pytest.mark.parametrize(
    "claim, differences, expected",
    [
        (UP, [0.10, 0.12, 0.11], "shows"),  # s = 0.01: 0.11 ± 0.025
        (UP, [0.020, 0.021, 0.022], "does not show"),  # above 0, but an effect below 0.03
        (UP, [-0.10, -0.12, -0.11], "reversed"),
        (UP, [0.9], "does not show"),  # one world has no interval
        (UP, [math.nan, 0.10, 0.11], "does not show"),
        (LESS, [-0.30, -0.32, -0.31], "shows"),  # the claim is a decrease, of at least 0.1
        # s = 0.02; for 90 % t(2) = 2.920: ± 2.920 · 0.02 / √3 = ± 0.0337
        (SAME, [-0.01, 0.01, 0.03], "equal within 0.05"),
        (SAME, [-0.01, -0.03, -0.05], "does not show"),
    ],
)
def test_a_verdict_needs_an_interval_that_excludes_0_and_an_effect_that_counts(
    claim, differences, expected
):
    assert verdict(claim, differences) == expected


def test_a_number_is_a_mean_over_kinds_and_over_the_steps_that_have_it():
    result = {"eval": {"em/one_hop": 0.8, "em/two_hop": 0.6, "em/known": 0.1}}
    assert measure(NUMBERS["EM"], result) == pytest.approx(0.7)
    # The last 30 steps count; one of them has no search, and so no rate of fallbacks.
    late = [{"fallbacks": 9}] * 20 + [{}] + [{"fallbacks": 1}] * 29
    assert measure(NUMBERS["FALLBACKS"], {"curve": late}) == 1


# ------------------------------------------------------------------------- claims, arms and recipes


def steps_of(name: str) -> int:
    before = ARMS[name].start
    return settings_of(name, 20, "r").steps + (steps_of(before) if before else 0)


EQUAL = "toy_init questions_per_step group_size temperature documents_per_search mix lr".split()


@pytest.mark.parametrize("name", CLAIMS)
def test_the_arms_of_a_claim_have_equal_steps_and_an_equal_start(name):
    arms = CLAIMS[name].better, CLAIMS[name].worse
    one, other = (settings_of(arm, 20, "r") for arm in arms)
    assert paper_of(one.protocol) is paper_of(other.protocol)
    for key in [*EQUAL, "trajectories_per_update"]:
        assert getattr(one, key) == getattr(other, key)
    assert len({*map(steps_of, arms)}) == 1
    for arm, settings in zip(arms, (one, other), strict=True):
        if start := ARMS[arm].start:  # a model of its kind
            before = settings_of(start, 20, "r")
            assert not ARMS[start].start and before.stage == settings.stage - 1
            assert (before.protocol, before.toy_init) == (settings.protocol, settings.toy_init)


# --------------------------------------------------------------------------------- running the arms


def predicted(settings, options, searches: float = 0.02) -> list[dict]:
    """Replaces eval.predict: a model is right if its arm names the mask."""
    right = settings.run_name.startswith("ur2-")
    record = {"metrics": {"em": right, "searches": searches}, "prediction": "a b"}
    return [record | {"kind": kind} for kind in ("one_hop", "two_hop")]


@pytest.fixture
def trained(monkeypatch):
    """Runs arms that only leave a checkpoint; returns (arm, the model that it starts from)."""
    runs = []

    def train(settings):
        folder = ablate.stage_folder(settings)
        (folder / "checkpoint-000001").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 0, "searches": 0, "fallbacks": 0}\n')
        runs.append((settings.run_name, settings.model))
        return folder

    monkeypatch.setattr(ablate, "train", train)
    monkeypatch.setattr(ablate, "last_checkpoint", lambda s: f"end of {s.run_name}")
    monkeypatch.setattr(ablate, "predict", predicted)
    return runs


def test_a_claim_runs_each_arm_once_from_its_start_and_prints_its_row(trained, tmp_path, capsys):
    flags = f"--only mask --first_world 20 --worlds 2 --output_dir {tmp_path}".split()
    for _ in range(2):
        ablate.main(flags)
    runs = [("ur2_stage1", ""), ("ur2", "end of ur2_stage1"), ("ur2_no_mask", "end of ur2_stage1")]
    worlds = ("-world20", "-world21")
    # nothing is run again
    assert trained == [(arm + w, model and model + w) for w in worlds for arm, model in runs]
    row = " ".join(capsys.readouterr().out.splitlines()[-1].split())
    assert "| ur2_no_mask | look-up EM | 1.00 | 0.00 | +1.00 [+1.00, +1.00] (95 %) | 2 |" in row
    result = json.loads((tmp_path / "ur2-world20" / "result.json").read_text())
    assert result["curve"] == [{"step": 0, "searches": 0}]
    assert result["eval"]["words/one_hop"] == 2


def test_a_result_of_other_settings_and_a_model_that_searches_already_are_rejected(
    trained, monkeypatch, tmp_path
):
    ablate.result_of("arena", 20, str(tmp_path))
    monkeypatch.setitem(ARMS, "arena", ARMS["arena_f1"])
    error = message(ablate.result_of, "arena", 20, str(tmp_path))
    assert "arena-world20/result.json has other settings: remove it" in error
    monkeypatch.setattr(ablate, "predict", partial(predicted, searches=0.9))
    error = message(ablate.result_of, "ur2_stage1", 20, str(tmp_path))
    assert "0.900 searches per look-up question before RL" in error
