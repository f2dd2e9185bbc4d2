"""Tests lab/claims.py and lab/ablate.py: interval and verdict by hand, the differences of each pair
of arms, the order of the runs, rejected results and flags, the table and the pictures.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
from conftest import message

from formats.records import write_records
from lab import ablate
from lab.ablate import difference, made_with, settings_of
from lab.claims import ARMS, CLAIMS, NUMBERS, Claim, interval, values, verdict, wanted_arms
from papers import paper_of
from rewards import needs

UP = Claim("a paper", "with", "without", NUMBERS["EM"], 5, 0.0, "more is more")
LESS, SAME = replace(UP, number=NUMBERS["NEEDLESS"]), replace(UP, margin=0.05)


def look_ups(**numbers) -> dict:
    """Returns an evaluation with the same numbers for both kinds of look-up."""
    return {"one_hop": numbers, "two_hop": numbers}


def write_result(runs, arm: str, split="test", **content) -> None:
    """Writes an arm's result in world 20."""
    result = {"made_with": made_with(arm, 20, split), **content}
    write_records(ablate.result_path(settings_of(arm, 20, str(runs))), [result])


# ----------------------------------------------------------------------------- interval and verdict


@pytest.mark.parametrize(
    "differences, mean, half",
    [
        ([1.0, 2.0, 3.0], 2, 4.303 / math.sqrt(3)),  # s = 1, t(2) = 4.303
        ([0.0, 2.0], 1, 12.706),  # s = √2, divided by √2 for two worlds
        ([0.4], 0.4, math.inf),
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
        (UP, [0.30, -0.10, 0.10], "does not show"),  # s = 0.2: 0.1 ± 0.497
        (UP, [-0.10, -0.12, -0.11], "reversed"),
        (UP, [-0.020, -0.021, -0.022], "does not show"),  # too small in the other direction too
        (UP, [0.9], "does not show"),  # one world has no interval
        (UP, [], "not run"),
        (LESS, [-0.30, -0.32, -0.31], "shows"),  # the claim is a decrease, of at least 0.1
        (LESS, [0.30, 0.32, 0.31], "reversed"),
        # s = 0.02; for 90 % t(2) = 2.920: ± 2.920 · 0.02 / √3 = ± 0.0337
        (SAME, [-0.01, 0.01, 0.03], "equal within 0.05"),
        (SAME, [0.01, 0.03, 0.05], "does not show"),  # 0.03 ± 0.0337
        (SAME, [-0.01, -0.03, -0.05], "does not show"),
    ],
)
def test_a_verdict_needs_an_interval_that_excludes_0_and_an_effect_that_counts(
    claim, differences, expected
):
    assert verdict(claim, differences) == expected


def test_only_worlds_with_results_of_both_arms_are_compared():
    arms = {("with", 1): 0.8, ("without", 1): 0.5, ("with", 2): 0.9, ("without", 3): 0.1}
    results = {arm: {"eval": look_ups(em=em)} for arm, em in arms.items()}
    assert values(UP, results, [1, 2, 3]) == [(0.8, 0.5)]


def test_the_reader_s_answers_are_compared_with_its_rag_answers_in_the_same_run():
    result = {"eval": look_ups(reader_em=0.75, rag_em=0.25)}
    assert values(CLAIMS["evidence"], {("r_search", 1): result}, [1]) == [(0.75, 0.25)]


def steps_with(**columns) -> dict:
    """Returns the result of a run whose steps have these metrics; None means a missing metric."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {"curve": [{k: v for k, v in row.items() if v is not None} for row in rows]}


def test_the_numbers_that_claims_take_from_training_by_hand():
    extremes = steps_with(grad_norm=[0.1, 1000.0, None], k2=[0.0, 0.01, 0.0], k3=[0.1, 10.0, 0.0])
    assert CLAIMS["k2_gradient"].number.measure(extremes) == pytest.approx(3)  # log10
    assert CLAIMS["k2"].number.measure(extremes) == pytest.approx(-2)
    assert CLAIMS["k2"].number.other(extremes) == pytest.approx(1)
    # Steps 16 to 29 have one search in one-hop and three in two-hop questions.
    one, two = "searches/one_hop", "searches/two_hop"
    early = steps_with(**{one: [9] * 16 + [1] * 14 + [9], two: [9] * 16 + [3] * 14 + [9]})
    assert CLAIMS["unified"].number.measure(early) == 2
    # The best five steps in a row have 0.8, the last five 0.2; there are no two-hop questions.
    exact = [0.0] * 5 + [0.8] * 5 + [0.2] * 5
    collapsed = steps_with(**{"em/one_hop": exact, "em/two_hop": [None] * 15})
    assert CLAIMS["crash"].number.measure(collapsed) == pytest.approx(0.6)
    # The last 30 steps count; one of them has no question of that kind.
    late = steps_with(**{"searches/arithmetic": [9.0] * 20 + [None] + [1.0] * 29})
    assert CLAIMS["penalty_needless"].number.measure(late) == 1


# ------------------------------------------------------------------------- claims, arms and recipes


def steps_of(name: str) -> int:
    before = ARMS[name].start
    return settings_of(name, 20, "r").steps + (steps_of(before) if before else 0)


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_has_valid_settings_and_starts_from_a_model_of_its_kind(name):
    arm, settings = ARMS[name], settings_of(name, 20, "r")  # settings_of checks them
    assert "options" not in needs(settings)  # no question of the built-in world has options
    if arm.start:
        before = settings_of(arm.start, 20, "r")
        assert not ARMS[arm.start].start and before.stage == arm.stage - 1
        assert (before.protocol, before.toy_init) == (settings.protocol, settings.toy_init)


@pytest.mark.parametrize("name", CLAIMS)
def test_the_arms_of_a_claim_differ_only_in_the_settings_that_the_table_names(name):
    claim = CLAIMS[name]
    one, other = (settings_of(arm, 20, "r") for arm in (claim.better, claim.worse))
    assert paper_of(one.protocol) is paper_of(other.protocol)
    equal_settings = (
        "toy_init questions_per_step group_size temperature documents_per_search mix lr"
    )
    for key in [*equal_settings.split(), "trajectories_per_update"]:
        assert getattr(one, key) == getattr(other, key)
    if not ARMS[claim.worse].imitates:
        assert steps_of(claim.better) == steps_of(claim.worse)
    assert (difference(claim) == "nothing") == (claim.better == claim.worse)


DIFFERENCES = {
    "mask": "mask_documents False",
    "mixing": "no direct_tasks",
    "vanilla": "direct_tasks math,choice, no stage 1",
    "two_stages": "no stage 1",
    "unified": "reward when_to_search_unified, no stage 1",
    "r_a": "left_out answer, filter_by total",
    "naive": "relevance_reward False, bonus 0.0, kl_estimator k3",
    "choice": "reward ur2_stage2",
    "choice_fine": "reward ur2_stage2, reward_variant qwen_7b, no left_out",
    "buckets": "no buckets",
    "sft": "no RL: imitates r1_stage1",
    "evidence": "nothing",
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_differences_of_a_pair_of_arms_by_hand(name):
    assert difference(CLAIMS[name]) == DIFFERENCES[name]


def test_every_arm_belongs_to_a_claim_and_a_claim_also_runs_the_arms_it_starts_from():
    assert set().union(*map(wanted_arms, CLAIMS.values())) == set(ARMS)
    assert wanted_arms(CLAIMS["mask"]) == {"ur2_stage1", "ur2", "ur2_no_mask"}
    assert wanted_arms(CLAIMS["sft"]) == {"r1_stage1", "r1", "r1_sft"}


# --------------------------------------------------------------------------------- running the arms


@pytest.fixture
def runs_nothing(monkeypatch):
    monkeypatch.setattr(ablate, "run_all", lambda *_: pytest.fail("something was run"))


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--only bonus,maks", "--only maks: unknown; one of stage1, "),
        ("--seeds -1", "at least 0"),
        ("--split train", "--split train"),
    ],
)
def test_a_bad_command_line_runs_nothing(flags, expected, runs_nothing, tmp_path):
    flags = [*flags.split(), "--output_dir", str(tmp_path)]
    assert expected in message(ablate.main, flags)


def test_a_result_of_other_settings_is_rejected(tmp_path):
    write_result(tmp_path, "arena", split="dev")
    assert "arena" in str(ablate.read_results({("arena", 20), ("arena", 21)}, tmp_path, "dev"))
    expected = (
        "arena-world20/result.json was made with other settings: remove it, or give another "
        "--output_dir"
    )
    assert expected in message(ablate.read_results, {("arena", 20)}, tmp_path, "test")


@pytest.mark.parametrize("searches", [0.02, 0.9])
def test_an_arm_stops_if_its_warmed_up_model_searches_too_often(searches, monkeypatch, tmp_path):
    records = [{"kind": kind, "metrics": {"searches": searches}} for kind in look_ups()]
    monkeypatch.setattr(ablate, "evaluate", lambda *_, **__: records)
    settings = settings_of("ur2_stage1", 20, str(tmp_path))
    if searches < 0.1:
        ablate.check_prior(settings, "dev")
    else:
        assert "0.900 searches per look-up" in message(ablate.check_prior, settings, "dev")


def test_rag_of_the_reader_is_scored_on_the_same_questions(monkeypatch):
    """The reader answers with the words after the first "birthplace" in its prompt."""

    def answers(_, pairs, **sampling):
        return [text.partition("birthplace ")[2].partition(" of")[0] for _, text in pairs]

    settings = settings_of("r_search", 20, "r")
    world = ablate.built_in_world(settings)
    name = world.entities["test"]["person"][0]
    golds = [world.facts[name]["birthplace"]]
    record = {"question": f"where was {name} born ?", "golds": golds, "metrics": {}}
    monkeypatch.setattr("other_models.reader.reader_answers", answers)
    (scored,) = ablate.add_rag([record], None, settings)
    assert scored["metrics"]["rag_em"] == 1.0


@pytest.fixture
def finished(monkeypatch):
    """Runs arms in threads, and lets one fail; returns the finished arms in order."""
    names = []

    def run_arm(name, seed, runs, split):
        if before := ARMS[name].start:
            ablate.last_checkpoint(settings_of(before, seed, runs))
        if seed == 20 and name == "ur2_stage1":
            raise RuntimeError("no luck")
        folder = ablate.stage_folder(settings_of(name, seed, runs))
        (folder / "checkpoint-000001").mkdir(parents=True)
        names.append((name, seed))

    monkeypatch.setattr(ablate, "ProcessPoolExecutor", lambda n, *_: ThreadPoolExecutor(n))
    monkeypatch.setattr(ablate, "run_arm", run_arm)
    for redirect in ("redirect_stdout", "redirect_stderr"):  # threads share their output
        monkeypatch.setattr(ablate, redirect, nullcontext)
    return names


@pytest.mark.parametrize("workers", [1, 3])
def test_after_a_failed_arm_only_the_arms_that_start_from_it_fail_too(
    workers, finished, tmp_path, capsys
):
    arms = ("ur2_stage1", "ur2", "ur2_no_stage1", "arena")
    jobs = {(name, seed) for name in arms for seed in (20, 21)}
    ablate.run_all(jobs, str(tmp_path), "test", workers)
    assert set(finished) == jobs - {("ur2_stage1", 20), ("ur2", 20)}
    if workers == 1:  # arms run world by world, each after the arm that it starts from
        in_order = [(name, 21) for name in ARMS if name in arms]
        assert finished[2:] == in_order and in_order[0][0] == "ur2_stage1"
        output = capsys.readouterr().out
        assert (
            f"ur2_stage1 in world 20: failed, see {tmp_path}/ur2_stage1-world20/log.txt" in output
        )
        assert "no checkpoint: see log.txt" in output and "arena in world 21: 0 s" in output


def test_a_worker_that_dies_is_one_line(finished, monkeypatch, tmp_path):
    def die(*_):
        raise MemoryError("killed")

    monkeypatch.setattr(ablate, "run_world", die)
    expected = "killed: continue with fewer --workers"
    assert expected in message(ablate.run_all, {("arena", 20)}, tmp_path, "test", 1)


def test_the_table_of_finished_runs_has_a_line_per_claim(runs_nothing, tmp_path, capsys):
    write_result(tmp_path, "arena", eval=look_ups(exact_set=0.9))
    write_result(tmp_path, "arena_no_bonus", eval=look_ups(exact_set=0.4))
    flags = f"--table --only bonus,relevance --output_dir {tmp_path} --first_world 20"
    ablate.main(flags.split())
    header, _, bonus, relevance = capsys.readouterr().out.splitlines()
    assert header.startswith("| claim | place | without it | number | with | without | effect")
    assert bonus.endswith(
        "| bonus 0.0 | exact set | 0.90 | 0.40 | +0.50 [-inf, +inf] | 1 | does not show |"
    )
    assert relevance.endswith("| relevance_reward False | exact set | - | - | - | 0 | not run |")


def test_a_picture_has_both_arms_and_needs_their_results(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    flags = f"--curves {tmp_path}/new --first_world 20 --only mask --output_dir {tmp_path}".split()
    assert "no result of ur2: run --only mask first" in message(ablate.main, flags)
    steps = steps_with(fallbacks=[0.0, None, 1.0], reward=[None] * 3)
    drawn = []
    draw_panels = ablate.draw_panels
    monkeypatch.setattr(ablate, "draw_panels", lambda *a: drawn.extend(a) or draw_panels(*a))
    for arm in ("ur2", "ur2_no_mask"):
        write_result(tmp_path, arm, **steps)
    ablate.main(flags)
    assert [path.name for path in tmp_path.glob("new/*")] == ["claim_mask.png"]
    # Names are plain words, and what was not measured has no panel.
    assert drawn[1].endswith("(ours to show) (without: mask documents False)")
    ((title, curves),) = drawn[0].items()
    assert title == "share of searches that ask for no fact" and [*curves] == ["with", "without"]
    assert [column.tolist() for column in curves["with"]] == [[0, 2], [0.0, 1.0]]
