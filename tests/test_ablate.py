"""lab/ablate.py: the interval and the verdict by hand, which arms run in which order, and what the
table says.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from errors import InputError
from formats.records import write_records
from lab import ablate
from lab.ablate import ARMS, CLAIMS, NUMBERS, Claim, interval, settings_of, values, verdict
from papers import paper_of

EM, NEEDLESS = NUMBERS["EM"], NUMBERS["NEEDLESS"]
UP = Claim("a paper", "more is more", "with", "without", EM)


def result(em=0.0, **more) -> dict:
    """one_hop and two_hop differ by 0.2 around `em`: "lookups" is their mean."""
    return {"eval": {"one_hop": {"em": em + 0.1}, "two_hop": {"em": em - 0.1}}, **more}


def write_result(runs, arm: str, seed: int, content: dict | None = None) -> None:
    write_records(ablate.result_path(runs, arm, seed), [content or {}])


# ----------------------------------------------------------------------------- interval and verdict


def test_the_interval_is_student_s():
    # s = 1, t(2) = 4.303, 4.303 / √3 = 2.4843
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - 2.4843, 2 + 2.4843), abs=1e-3)
    # 0 and 2: s = √2, half = 12.706 · √2 / √2
    assert interval([0.0, 2.0]) == pytest.approx((1, 1 - 12.706, 1 + 12.706))
    assert interval([0.4]) == (0.4, -math.inf, math.inf)
    assert interval([0.5] * 4) == (0.5, 0.5, 0.5)
    # s = √(12 · 0.25 / 11) = 0.5222; the table ends at 2.262 (t(9))
    mean, low, _ = interval([0.0, 1.0] * 6)
    assert mean - low == pytest.approx(2.262 * 0.52223 / math.sqrt(12), abs=1e-4)


@pytest.mark.parametrize(
    "number, differences, said",
    [
        (EM, [0.10, 0.12, 0.11], "shows"),  # s = 0.01: 0.11 ± 0.025
        (EM, [0.020, 0.021, 0.022], "does not show"),  # beyond 0, but less than what counts, 0.03
        (EM, [0.30, -0.10, 0.10], "does not show"),  # s = 0.2: 0.1 ± 0.497
        (EM, [-0.10, -0.12, -0.11], "reversed"),
        (EM, [-0.020, -0.021, -0.022], "does not show"),  # too small on the other side too
        (EM, [0.9], "does not show"),  # one world tells nothing
        (EM, [], "not run"),
        (NEEDLESS, [-0.30, -0.32, -0.31], "shows"),  # less is claimed, and 0.1 counts
        (NEEDLESS, [0.30, 0.32, 0.31], "reversed"),
        (NEEDLESS, [-0.05, -0.051, -0.052], "does not show"),
    ],
)
def test_a_verdict_needs_an_interval_beyond_0_and_an_effect_that_counts(number, differences, said):
    assert verdict(number, differences) == said


def test_only_worlds_with_both_arms_are_compared():
    results = {("with", 1): result(0.8), ("without", 1): result(0.5)}
    results |= {("with", 2): result(0.9), ("without", 3): result(0.1)}
    assert values(UP, results, [1, 2, 3]) == [(pytest.approx(0.8), pytest.approx(0.5))]
    assert values(UP, results, [2]) == []


def test_no_worse_than_by_0_03_is_a_number_that_grants_0_03():
    claim = Claim("a paper", "costs nothing", "with", "without", NUMBERS["NO_WORSE"])
    results = {("with", 1): result(0.50), ("without", 1): result(0.52)}
    assert values(claim, results, [1]) == [(pytest.approx(0.53), pytest.approx(0.52))]
    assert verdict(claim.number, [0.01, 0.01]) == "shows"


def test_the_table_has_a_line_per_claim_also_for_those_that_were_not_run():
    results = {("with", s): result(0.80 + s / 100) for s in (1, 2, 3)}
    results |= {("without", s): result(0.50) for s in (1, 2, 3)}
    absent = Claim("p", "never run", "no", "nobody", EM)
    header, one, two = ablate.rows([UP, absent], results, [1, 2, 3])
    assert header[-1] == "verdict" and len(header) == len(one) == len(two)
    # 0.31, 0.32, 0.33: 0.32 ± 4.303 · 0.01 / √3 = 0.32 ± 0.0248
    assert one[3:] == ["0.82", "0.50", "+0.32 [+0.30, +0.34]", "3", "shows"]
    assert two[3:] == ["-", "-", "-", "0", "not run"]


def test_the_k2_claim_looks_at_the_largest_gradient():
    curve = {"grad_norm": [0.1, 1000.0, 0.5]}
    assert CLAIMS["k2"].number.measure({"curve": curve}) == pytest.approx(3)  # log10


# ------------------------------------------------------------------------- claims, arms and recipes


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_settings_that_can_run(name):
    arm, settings = ARMS[name], settings_of(name, 20, "r")  # it checks them
    assert all(getattr(settings, key) == value for key, value in arm.changes.items())
    assert (settings.seed, settings.world_seed, settings.name) == (20, 20, f"{name}-world20")
    if arm.start:  # the same protocol and the stage before, which starts from the warmed-up model
        before = ARMS[arm.start]
        assert not before.start and before.stage == arm.stage - 1
        assert settings_of(arm.start, 20, "r").protocol == settings.protocol


def steps_of(name: str) -> int:
    start = ARMS[name].start
    return settings_of(name, 20, "r").steps + (steps_of(start) if start else 0)


def test_the_arms_of_a_claim_differ_and_have_had_the_same_number_of_steps():
    for claim in CLAIMS.values():
        assert ARMS[claim.better] != ARMS[claim.worse]
        assert claim.number.sign in (1, -1) and claim.number.counts >= 0
        one, other = (settings_of(name, 20, "r") for name in (claim.better, claim.worse))
        if claim is CLAIMS["weak"]:  # UR²'s Table 3: other tags, 110 steps for 100 (C.2, Table 15)
            assert (other.protocol, other.steps / one.steps) == ("ur2_search", 1.1)
            continue
        assert paper_of(one.protocol) is paper_of(other.protocol)
        assert steps_of(claim.better) == steps_of(claim.worse)


def test_every_arm_is_wanted_by_a_claim_and_brings_the_one_that_it_starts_from():
    assert ablate.wanted_arms(CLAIMS.values()) == list(ARMS)
    assert ablate.wanted_arms([CLAIMS["mask"]]) == ["ur2_stage1", "ur2", "ur2_no_mask"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--only bonus,maks", "--only maks: unknown; one of stage1, mask"),
        ("--seeds 0", "at least 1"),
        ("--workers 0", "at least 1"),
        ("--seed 3", "--seeds"),
    ],
)
def test_a_bad_command_line_is_one_line_and_runs_nothing(arguments, said, monkeypatch, tmp_path):
    monkeypatch.setattr(ablate, "run_all", lambda *_: pytest.fail("something was run"))
    with pytest.raises(InputError, match=said) as error:
        ablate.main([*arguments.split(), "--runs", str(tmp_path)])
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------ what runs, and when


def test_the_arms_of_a_protocol_run_in_turn_world_by_world(tmp_path):
    in_turn = ["ur2_stage1", "ur2", "vanilla_rl"]
    assert ablate.chains([*in_turn, "arena"], [20, 21], tmp_path) == [
        (in_turn, 20),
        (["arena"], 20),
        (in_turn, 21),
        (["arena"], 21),
    ]


def test_what_has_its_result_is_not_run_again(tmp_path):
    write_result(tmp_path, "ur2_stage1", 20)
    assert ablate.chains(["ur2_stage1", "ur2"], [20], tmp_path) == [(["ur2"], 20)]
    write_result(tmp_path, "ur2", 20)
    assert ablate.chains(["ur2_stage1", "ur2"], [20], tmp_path) == []


@pytest.fixture
def ran(monkeypatch):
    """Fake arms in threads: which were finished, in that order."""
    ended = []

    def run(name, seed, runs):
        if name == "ur2_stage1" and seed == 20:
            raise RuntimeError("no luck")
        ended.append((name, seed))
        return 1.0

    threads = lambda workers, *_: ThreadPoolExecutor(workers)  # noqa: E731
    monkeypatch.setattr(ablate, "ProcessPoolExecutor", threads)
    monkeypatch.setattr(ablate, "run_arm", run)
    return ended


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failed_arm_takes_along_only_what_starts_from_it(workers, ran, tmp_path, capsys):
    ablate.run_all(["ur2_stage1", "ur2", "ur2_no_stage1", "arena"], [20, 21], tmp_path, workers)
    every = {(name, 21) for name in ("ur2_stage1", "ur2", "ur2_no_stage1", "arena")}
    assert set(ran) == every | {("ur2_no_stage1", 20), ("arena", 20)}
    assert ran.index(("ur2_stage1", 21)) < ran.index(("ur2", 21))
    if workers == 1:  # the first world is finished before the second
        assert [seed for _, seed in ran] == [20] * 2 + [21] * 4
    said = capsys.readouterr().out
    assert "ur2_stage1 in world 20: failed: no luck (see its log.txt)" in said
    assert "ur2 in world 20: failed: ur2_stage1 is not there" in said
    assert "arena in world 21: 1 s" in said


def test_a_worker_that_dies_is_one_line(ran, monkeypatch, tmp_path):
    def die(*_):
        raise MemoryError("killed")

    monkeypatch.setattr(ablate, "run_chain", die)
    with pytest.raises(InputError, match="killed: fewer --workers need less memory"):
        ablate.run_all(["arena"], [20], tmp_path, 1)


def test_the_table_of_what_is_there_runs_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ablate, "run_all", lambda *_: pytest.fail("something was run"))
    for seed, exact in ((20, 0.9), (21, 0.8)):
        for arm, less in (("arena", 0.0), ("arena_no_bonus", 0.5)):
            scores = {"em": 1.0, "exact_set": exact - less}
            kinds = dict.fromkeys(("one_hop", "two_hop"), scores)
            reward = [1, 2] if seed == 20 else [1, 0]
            write_result(tmp_path, arm, seed, {"eval": kinds, "reward": reward, "seconds": 3})
    flags = ["--table", "--only", "bonus,relevance", "--runs", str(tmp_path), "--rewards"]
    ablate.main([*flags, "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    # the difference is 0.5 in both worlds: s = 0
    assert "0.85" in lines[2] and "+0.50 [+0.50, +0.50]" in lines[2] and "shows" in lines[2]
    assert "not run" in lines[3]
    (own,) = [line for line in lines if line.startswith("| arena_no_bonus")]
    told = [cell.strip() for cell in own.split("|")[2:5]]
    assert told == ["1.00 -> 2.00   1.00 -> 0.00", "1 of 2", "3"]
