"""lab/claims.py and lab/ablate.py: the interval and the verdict by hand, what each pair differs in,
which arms run in which order, what is refused, and what the table and the pictures say.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from data import Question
from errors import InputError
from formats.records import write_records
from lab import ablate
from lab.ablate import difference, made_with, settings_of
from lab.claims import (
    ARMS,
    CLAIMS,
    NUMBERS,
    Claim,
    interval,
    values,
    verdict,
    wanted_arms,
)
from papers import paper_of
from rewards import REWARDS, Extras, example, needs

EM, NEEDLESS = NUMBERS["EM"], NUMBERS["NEEDLESS"]
UP = Claim("a paper", "with", "without", EM, 5, 0.0, "more is more")
LESS, SAME = replace(UP, number=NEEDLESS), replace(UP, margin=0.05)


def result(em=0.0, **more) -> dict:
    """one_hop and two_hop differ by 0.2 around `em`: "lookups" is their mean."""
    return {"eval": {"one_hop": {"em": em + 0.1}, "two_hop": {"em": em - 0.1}}, **more}


def write_result(runs, arm: str, seed: int, content: dict | None = None, split="test") -> None:
    made = {"made_with": made_with(arm, split), "eval": {}, "curve": {}}
    write_records(ablate.result_path(runs, arm, seed), [made | (content or {})])


# ----------------------------------------------------------------------------- interval and verdict


def test_the_interval_is_student_s():
    # s = 1, t(2) = 4.303, 4.303 / √3 = 2.4843
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - 2.4843, 2 + 2.4843), abs=1e-3)
    # 0 and 2: s = √2, half = 12.706 · √2 / √2
    assert interval([0.0, 2.0]) == pytest.approx((1, 1 - 12.706, 1 + 12.706))
    assert interval([0.4]) == (0.4, -math.inf, math.inf)
    assert interval([0.5] * 4) == (0.5, 0.5, 0.5)
    # at 90 % t(2) = 2.920: 2.920 / √3 = 1.6859
    assert interval([1.0, 2.0, 3.0], 90)[1] == pytest.approx(2 - 1.6859, abs=1e-3)
    # s = √(12 · 0.25 / 11) = 0.5222; the table ends at 2.262 (t(9))
    mean, low, _ = interval([0.0, 1.0] * 6)
    assert mean - low == pytest.approx(2.262 * 0.52223 / math.sqrt(12), abs=1e-4)


@pytest.mark.parametrize(
    "claim, differences, said",
    [
        (UP, [0.10, 0.12, 0.11], "shows"),  # s = 0.01: 0.11 ± 0.025
        (UP, [0.020, 0.021, 0.022], "does not show"),  # beyond 0, but less than what counts, 0.03
        (UP, [0.30, -0.10, 0.10], "does not show"),  # s = 0.2: 0.1 ± 0.497
        (UP, [-0.10, -0.12, -0.11], "reversed"),
        (UP, [-0.020, -0.021, -0.022], "does not show"),  # too small on the other side too
        (UP, [0.9], "does not show"),  # one world tells nothing
        (UP, [], "not run"),
        (LESS, [-0.30, -0.32, -0.31], "shows"),  # less is claimed, and 0.1 counts
        (LESS, [0.30, 0.32, 0.31], "reversed"),
        (LESS, [-0.05, -0.051, -0.052], "does not show"),
        # s = 0.02, 90 %: 0.01 ± 2.920 · 0.02 / √3 = 0.01 ± 0.0337
        (SAME, [-0.01, 0.01, 0.03], "equal within 0.05"),
        (SAME, [-0.01, -0.03, 0.01], "equal within 0.05"),  # two-sided: −0.01 ± 0.0337
        (SAME, [0.01, 0.03, 0.05], "does not show"),  # 0.03 ± 0.0337
        (SAME, [-0.01, -0.03, -0.05], "does not show"),
        (SAME, [0.0], "does not show"),
        (SAME, [], "not run"),
    ],
)
def test_a_verdict_needs_an_interval_beyond_0_and_an_effect_that_counts(claim, differences, said):
    assert verdict(claim, differences) == said


def test_only_worlds_with_both_arms_are_compared():
    results = {("with", 1): result(0.8), ("without", 1): result(0.5)}
    results |= {("with", 2): result(0.9), ("without", 3): result(0.1)}
    assert values(UP, results, [1, 2, 3]) == [(pytest.approx(0.8), pytest.approx(0.5))]
    assert values(UP, results, [2]) == []


def test_the_reader_is_compared_with_its_own_rag_on_the_same_run():
    claim = CLAIMS["evidence"]
    kinds = {"two_hop": {"reader_em": 0.75, "rag_em": 0.25}}
    assert values(claim, {("r_search", 1): {"eval": kinds}}, [1]) == [(0.75, 0.25)]


def test_the_table_has_a_line_per_claim_also_for_those_that_were_not_run():
    results = {("with", s): result(0.80 + s / 100) for s in (1, 2, 3)}
    results |= {("without", s): result(0.50) for s in (1, 2, 3)}
    up, absent = (replace(UP, better=a, worse=b) for a, b in (("ur2", "ur2_raw"), ("r1", "r1_cem")))
    results = {({"with": "ur2", "without": "ur2_raw"}[a], s): r for (a, s), r in results.items()}
    header, one, two = ablate.rows({up: [1, 2, 3], absent: [1, 2, 3]}, results)
    assert header[-1] == "verdict" and len(header) == len(one) == len(two)
    # 0.31, 0.32, 0.33: 0.32 ± 4.303 · 0.01 / √3 = 0.32 ± 0.0248
    assert one[2:4] == ["summarizer none", "look-up EM"]
    assert one[4:] == ["0.82", "0.50", "+0.32 [+0.30, +0.34]", "3", "shows"]
    assert two[2:] == ["answer_metric cem", "look-up EM", "-", "-", "-", "0", "not run"]
    assert ablate.rows({up: [1, 2]}, results)[1][-2] == "2"  # its own worlds, whatever is there


def test_numbers_of_curves_and_shares_by_hand():
    curve = {"grad_norm": [0.1, 1000.0, None], "k2": [0.0, 0.01], "k3": [0.1, 10.0]}
    assert CLAIMS["k2_gradient"].number.measure({"curve": curve}) == pytest.approx(3)  # log10
    assert CLAIMS["k2"].number.measure({"curve": curve}) == pytest.approx(-2)
    assert CLAIMS["k2"].number.other({"curve": curve}) == pytest.approx(1)
    # steps 16 to 29 of look-ups: 1 and 3 searches
    early = {"searches/one_hop": [9] * 16 + [1] * 14 + [9], "searches/two_hop": [9] * 16 + [3] * 14}
    assert CLAIMS["unified"].number.measure({"curve": early}) == 2
    # five steps in a row at 0.8 are the best, the last five are at 0.2; an unasked kind is left out
    fell = {"em/one_hop": [0.0] * 5 + [0.8] * 5 + [0.2] * 5, "em/two_hop": [None] * 15}
    assert CLAIMS["crash"].number.measure({"curve": fell}) == pytest.approx(0.6)
    assert CLAIMS["mixing_equal"].number.measure(
        {"eval": {"one_hop": {"em": 0.9}, "two_hop": {"em": 0.6}, "arithmetic": {"em": 0.3}}}
    ) == pytest.approx(0.6)
    # the last 30 steps; in one of them no question of that kind was asked
    late = {"searches/arithmetic": [9.0] * 20 + [None] + [1.0] * 29}
    assert CLAIMS["penalty_needless"].number.measure({"curve": late}) == 1


# ------------------------------------------------------------------------- claims, arms and recipes


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_settings_that_can_run(name):
    arm, settings = ARMS[name], settings_of(name, 20, "r")  # it checks them
    assert all(getattr(settings, key) == value for key, value in arm.changes.items())
    assert (settings.seed, settings.world_seed, settings.run_name) == (20, 20, f"{name}-world20")
    if arm.start:  # the same protocol and the stage before, which starts from the warmed-up model
        before = ARMS[arm.start]
        assert not before.start and before.stage == arm.stage - 1
        started = settings_of(arm.start, 20, "r")
        assert (started.protocol, started.toy_init) == (settings.protocol, settings.toy_init)


def steps_of(name: str) -> int:
    start = ARMS[name].start
    return settings_of(name, 20, "r").steps + (steps_of(start) if start else 0)


@pytest.mark.parametrize("name", CLAIMS)
def test_the_arms_of_a_claim_are_alike_but_for_what_the_table_names(name):
    claim = CLAIMS[name]
    assert claim.worlds in (5, 8) and claim.number.sign in (1, -1) and claim.number.counts > 0
    one, other = (settings_of(arm, 20, "r") for arm in (claim.better, claim.worse))
    assert paper_of(one.protocol) is paper_of(other.protocol) and one.toy_init == other.toy_init
    alike = "questions_per_step group_size temperature documents_per_search mix lr"
    for same in [*alike.split(), "trajectories_per_update"]:
        assert getattr(one, same) == getattr(other, same)
    if difference(claim).endswith("no stage 1"):
        assert settings_of(ARMS[claim.better].start, 20, "r").lr == other.lr
    if not ARMS[claim.worse].traces_of:
        assert steps_of(claim.better) == steps_of(claim.worse)
    if claim.better == claim.worse:  # one run, two numbers
        assert claim.number.other and difference(claim) == "nothing"
    else:
        assert ARMS[claim.better] != ARMS[claim.worse] and difference(claim) not in ("", "nothing")


def test_what_a_pair_differs_in_by_hand():
    told = {name: difference(CLAIMS[name]) for name in CLAIMS}
    assert told["mask"] == "mask_documents False" and told["mixing"] == "no direct_tasks"
    assert told["vanilla"] == "direct_tasks math,choice, no stage 1"
    assert told["stage1"] == told["two_stages"] == "no stage 1"
    assert told["unified"] == "reward when_to_search_unified, no stage 1"
    assert told["r_a"] == "left_out answer, filter_by total"
    assert told["naive"] == "relevance_reward False, bonus 0.0, kl_estimator k3"
    assert told["choice"] == "reward ur2_stage2"  # the bonus alone
    assert told["buckets"] == "no buckets" and told["f1_cem"] == "answer_metric cem"
    assert told["crash"].startswith("algorithm grpo, clip_high 0.2")
    assert told["sft"] == "no RL: imitates r1_stage1" and told["evidence"] == "nothing"


def test_the_arm_with_the_3b_model_s_fine_pays_no_bonus():
    def paid(arm: str, searches: int, step: int) -> float:
        settings, t = settings_of(arm, 20, "r"), example("ur2", searches=searches)
        return sum(REWARDS[settings.reward](t, settings, step, Extras()).values())

    # right 2, in format 1 or fined −1; of two searches the second is a fallback, −0.5
    assert [paid("ur2_choice_fined", n, 14) for n in (0, 1, 2)] == [1.0, 3.0, 2.5]
    assert paid("ur2_choice_fined", 0, 15) == 3.0
    assert [paid("ur2_choice", n, 9) for n in (0, 1, 2)] == [3.0, 3.5, 3.5]  # the bonus alone
    assert [paid("ur2_choice_plain", n, 0) for n in (0, 1, 2)] == [3.0, 3.0, 2.5]


def test_every_arm_is_wanted_by_a_claim_and_brings_the_one_that_it_starts_from():
    assert wanted_arms(CLAIMS.values()) == list(ARMS)
    for name in ARMS:  # no question of the built-in world has options
        assert "options" not in needs(settings_of(name, 20, "r"))
    assert wanted_arms([CLAIMS["mask"]]) == ["ur2_stage1", "ur2", "ur2_no_mask"]
    assert wanted_arms([CLAIMS["sft"]]) == ["r1_stage1", "r1", "r1_sft"]


def test_what_a_result_was_made_with_names_settings_start_warm_up_and_split(monkeypatch):
    made = made_with("ur2", "test")
    assert made["start"]["settings"]["steps"] == 25 and made["settings"]["steps"] == 30
    assert json.loads(json.dumps(made)) == made  # as it is read again
    paper = paper_of("ur2")
    monkeypatch.setitem(paper.warm_ups, "weak", replace(paper.warm_ups["weak"], bad_query=0.26))
    assert made_with("ur2", "test") != made != made_with("ur2", "dev")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--only bonus,maks", "--only maks: unknown; one of stage1, .*did you mean mask"),
        ("--seeds -1", "at least 0"),
        ("--split train", "--split train"),
        ("--workers 0", "at least 1"),
        ("--seed 3", "--seeds"),
    ],
)
def test_a_bad_command_line_is_one_line_and_runs_nothing(arguments, said, monkeypatch, tmp_path):
    monkeypatch.setattr(ablate, "run_all", lambda *_: pytest.fail("something was run"))
    with pytest.raises(InputError, match=said) as error:
        ablate.main([*arguments.split(), "--output_dir", str(tmp_path)])
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------ what runs, and when


def test_the_arms_of_a_recipe_run_in_turn_world_by_world():
    jobs = [("ur2_stage1", 20), ("ur2_stage1", 21), ("ur2", 20), ("ur2", 21), ("arena", 20)]
    in_turn = ["ur2_stage1", "ur2"]
    assert ablate.chains(jobs) == [(in_turn, 20), (["arena"], 20), (in_turn, 21)]


def test_a_result_of_other_settings_is_refused_and_one_of_these_is_not_run_again(tmp_path):
    jobs = [("arena", 20), ("arena", 21)]
    write_result(tmp_path, "arena", 21)
    assert list(ablate.read_results(jobs, tmp_path, "test")) == [("arena", 21)]
    write_result(tmp_path, "arena", 20, split="dev")
    with pytest.raises(
        InputError, match=r"arena-world20.*other settings: give another --output_dir"
    ):
        ablate.read_results(jobs, tmp_path, "test")


def test_a_checkpoint_that_is_gone_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"^.+no checkpoint any more: remove .+$"):
        ablate.last_checkpoint("ur2_stage1", 20, str(tmp_path))


def prior_of(monkeypatch, tmp_path, searches: float) -> float:
    record = {"metrics": {"searches": searches}}
    records = [record | {"kind": kind} for kind in ("one_hop", "two_hop")]

    def measure(*_, out):  # not the file in which another arm of this world may write
        assert "/ur2_stage1-world20/" in out
        return records

    monkeypatch.setattr(ablate, "evaluate", measure)
    return ablate.checked_prior("ur2_stage1", 20, str(tmp_path), "dev")


def test_a_prior_that_is_off_stops_the_arm_with_one_line(monkeypatch, tmp_path, capsys):
    assert prior_of(monkeypatch, tmp_path / "a", 0.02) == 0.02
    assert "prior: 0.020 searches per look-up before RL" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"is off: 0\.900 searches") as error:
        prior_of(monkeypatch, tmp_path / "b", 0.9)
    assert "\n" not in str(error.value)


def test_the_reader_s_own_search_is_scored_on_the_same_questions(monkeypatch):
    """The reader answers what follows the first "birthplace" it is shown."""
    settings = settings_of("r_search", 20, "r")
    world = ablate.built_in_world(settings)
    name = world.entities["test"]["person"][0]
    place = world.facts[name]["birthplace"]
    question = f"where was {name} born ?"
    record = {"question": question, "golds": [place], "metrics": {}, "evidence": ""}
    asked = []

    def answers(_, pairs: list[tuple[Question, str]]) -> list[str]:
        asked.extend(pairs)
        return [text.partition("birthplace ")[2].partition(" of")[0] for _, text in pairs]

    monkeypatch.setattr(ablate, "reader_answers", answers)
    (scored,) = ablate.add_rag([record], None, settings)
    assert scored["metrics"]["rag_em"] == 1.0
    ((given, text),) = asked
    assert given.question == question and f"birthplace {place} of {name}" in text


@pytest.fixture
def ran(monkeypatch):
    """Fake arms in threads: which were finished, in that order."""
    ended = []

    def run(name, seed, runs, split):
        if name == "ur2_stage1" and seed == 20:
            raise RuntimeError("no luck")
        ended.append((name, seed))
        return "1 s"

    threads = lambda workers, *_: ThreadPoolExecutor(workers)  # noqa: E731
    monkeypatch.setattr(ablate, "ProcessPoolExecutor", threads)
    monkeypatch.setattr(ablate, "run_arm", run)
    return ended


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failed_arm_takes_along_only_what_starts_from_it(workers, ran, tmp_path, capsys):
    arms = ("ur2_stage1", "ur2", "ur2_no_stage1", "arena")
    jobs = [(name, seed) for name in arms for seed in (20, 21)]
    ablate.run_all(ablate.chains(jobs), tmp_path, "test", workers)
    every = {(name, 21) for name in ("ur2_stage1", "ur2", "ur2_no_stage1", "arena")}
    assert set(ran) == every | {("ur2_no_stage1", 20), ("arena", 20)}
    assert ran.index(("ur2_stage1", 21)) < ran.index(("ur2", 21))
    if workers == 1:  # the first world is finished before the second
        assert [seed for _, seed in ran] == [20] * 2 + [21] * 4
    said = capsys.readouterr().out
    assert "ur2_stage1 in world 20: failed: RuntimeError('no luck') (see its log.txt)" in said
    assert "ur2 in world 20: not run: ur2_stage1 is not there" in said
    assert "arena in world 21: 1 s" in said


def test_a_worker_that_dies_is_one_line(ran, monkeypatch, tmp_path):
    def die(*_):
        raise MemoryError("killed")

    monkeypatch.setattr(ablate, "run_chain", die)
    with pytest.raises(InputError, match="killed: continue with fewer --workers"):
        ablate.run_all([(["arena"], 20)], tmp_path, "test", 1)


def test_the_table_of_what_is_there_runs_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ablate, "run_all", lambda *_: pytest.fail("something was run"))
    for seed, exact in ((20, 0.9), (21, 0.8)):
        for arm, less in (("arena", 0.0), ("arena_no_bonus", 0.5)):
            kinds = {key: {"em": 1.0, "exact_set": exact - less} for key in ("one_hop", "two_hop")}
            write_result(tmp_path, arm, seed, {"eval": kinds})
    out = tmp_path / "scores.json"
    flags = f"--table --only bonus,relevance --output_dir {tmp_path} --json {out}".split()
    ablate.main([*flags, "--first_world", "20"])
    lines = capsys.readouterr().out.splitlines()
    # the difference is 0.5 in both worlds: s = 0
    assert "0.85" in lines[2] and "+0.50 [+0.50, +0.50]" in lines[2] and "shows" in lines[2]
    assert "not run" in lines[3]
    scores = json.loads(out.read_text())
    assert len(scores) == 4 and scores["arena_no_bonus-world20"]["one_hop"]["exact_set"] == 0.4


def test_a_picture_has_both_arms_and_needs_their_results(tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--curves", str(tmp_path / "new"), "--first_world", "20", "--only", "mask"]
    flags += ["--output_dir", str(tmp_path)]
    with pytest.raises(InputError, match="no result of ur2: run --only mask first"):
        ablate.main(flags)
    for arm in ("ur2", "ur2_no_mask"):
        write_result(tmp_path, arm, 20, {"curve": {key: [0.0, None, 1.0] for key in ablate.CURVES}})
    ablate.main(flags)
    assert [path.name for path in tmp_path.glob("new/*")] == ["claim_mask.png"]
