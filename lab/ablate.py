"""Which of the papers' claims hold in the built-in world?

    python -m lab.ablate               two worlds, all claims but PPO's: half an hour on two cores
    python -m lab.ablate --only evidence,mask --seeds 5
    python -m lab.ablate --table       the table of what is there; runs nothing

    arm      a training run: recipe, stage, what it sets otherwise, the arm that it starts from
    claim    a number of one arm against that of another which differs in one thing, paired by
             world, after the same number of steps
    effect   mean over worlds of (with − without), and its 95 % interval, mean ± t(n − 1) · s / √n
    verdict  "shows": the interval lies beyond 0 on the claimed side, and the mean is at least what
             counts; "reversed": so on the other side; else "does not show", a finding too

Evaluation is on held-out entities at temperature 1, as in training. Each finished arm of each world
leaves a result.json: interrupted, it goes on from there. Left out: corrections for testing many
claims; arms over the same world with other sampling seeds.
"""

import itertools
import json
import math
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from curriculum import QuestionStream
from errors import InputError, check_value, run_main, setting
from eval import Evaluation
from eval import parse as parse_evaluation
from formats.records import write_records
from lab import interruptible, parse_flags
from plumbing.build import build_parts, built_in_questions
from plumbing.files import checkpoints, stage_folder
from plumbing.report import summarise, written
from plumbing.score import add_reader, build_reader
from prompts import PROTOCOLS
from rollout import rollout
from settings import Settings, check_settings, resolve
from train import train

# Student's t, two-sided 95 %, for n − 1 = 1, 2, ... degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Arm:
    """`start`: the arm whose last checkpoint it goes on from; "" is the warmed-up model."""

    recipe: str
    stage: int
    changes: dict = field(default_factory=dict)
    start: str = ""


SHORT = {"steps": 30}
STAGE1_ON = SHORT | {"reward": "when_to_search_stage1"}
UNSTEADY = {"steps": 12, "algorithm": "grpo", "lr": 2e-3, "kl_coef": 0.1}
NO_R_S, NO_R_A = {"variant": "without_r_s"}, {"variant": "without_r_a"}
ARMS: dict[str, Arm] = {
    "ur2_stage1": Arm("ur2", 1),
    "ur2": Arm("ur2", 2, SHORT, "ur2_stage1"),
    "ur2_stage1_easy": Arm("ur2", 1, {"mix": "one_hop=3,two_hop=4,unit=1,arithmetic=4"}),
    "ur2_no_stage1": Arm("ur2", 2, {"steps": 42}),
    "ur2_no_mask": Arm("ur2", 2, SHORT | {"mask_documents": False}, "ur2_stage1"),
    "ur2_no_penalty": Arm("ur2", 2, SHORT | {"fallback_penalty": 0.0}, "ur2_stage1"),
    "ur2_no_summary": Arm("ur2", 2, SHORT | {"summarizer": "none"}, "ur2_stage1"),
    "ur2_grpo": Arm("ur2", 2, SHORT | {"algorithm": "grpo"}, "ur2_stage1"),
    "ur2_loose": Arm("ur2", 2, SHORT | {"format_check": "loose"}, "ur2_stage1"),
    "ur2_k2": Arm("ur2", 2, UNSTEADY, "ur2_stage1"),
    "ur2_k3": Arm("ur2", 2, UNSTEADY | {"kl_estimator": "k3"}, "ur2_stage1"),
    "ur2_choice": Arm("ur2_choice", 1, {"steps": 40}),
    "ur2_choice_plain": Arm("ur2_choice", 1, {"variant": "without_stage1", "steps": 44}),
    "vanilla_rl": Arm("vanilla_rl", 1, {"steps": 42}),
    "r1_stage1": Arm("r1_searcher", 1),
    "r1": Arm("r1_searcher", 2, SHORT, "r1_stage1"),
    "r1_em": Arm("r1_searcher", 2, SHORT | {"variant": "em"}, "r1_stage1"),
    "r_search": Arm("r_search", 1),
    "r_search_plain": Arm("r_search", 1, {"evidence_reward": False}),
    "r_search_without": Arm("r_search", 1, {"variant": "without_evidence"}),
    "r_search_ppo": Arm("r_search", 1, {"algorithm": "ppo", "critic_lr": 1e-3}),
    "when_stage1": Arm("when_to_search", 1),
    "when_stage2": Arm("when_to_search", 2, SHORT, "when_stage1"),
    "when_stage1_on": Arm("when_to_search", 2, STAGE1_ON, "when_stage1"),
    "when_no_stage1": Arm("when_to_search", 1, {"variant": "without_stage_one", "steps": 35}),
    "when_unified": Arm("when_to_search", 1, {"variant": "unified", "steps": 35}),
    "when_no_r_s_stage1": Arm("when_to_search", 1, NO_R_S),
    "when_no_r_s": Arm("when_to_search", 2, SHORT | NO_R_S, "when_no_r_s_stage1"),
    "when_no_r_a_stage1": Arm("when_to_search", 1, NO_R_A),
    "when_no_r_a": Arm("when_to_search", 2, SHORT | NO_R_A, "when_no_r_a_stage1"),
    "arena": Arm("arena", 1),
    "arena_no_bonus": Arm("arena", 1, {"bonus": 0.0}),
    "arena_no_relevance": Arm("arena", 1, {"relevance_reward": False}),
    "arena_naive": Arm("arena", 1, {"variant": "naive_grpo"}),
    "arena_f1": Arm("arena", 1, {"variant": "f1"}),
    "arena_k3": Arm("arena", 1, {"variant": "k3"}),
}


@dataclass(frozen=True)
class Number:
    """What two arms are compared by, as the table names it."""

    name: str
    measure: Callable[[dict], float]
    counts: float = 0.03  # the smallest effect that does, in the number's unit; less is noise
    sign: int = 1  # expected larger in the first arm; −1: smaller
    grant: float = 0.0  # added to the first arm: "no worse than by so much"


def score(kinds: str, name: str) -> Callable[[dict], float]:
    """A number of the evaluation, meaned over kinds of question."""
    return lambda result: float(np.mean([result["eval"][kind][name] for kind in kinds.split()]))


LOOKUPS = "one_hop two_hop"
NUMBERS = {
    "EM": Number("look-up EM", score(LOOKUPS, "em")),
    "NO_WORSE": Number("look-up EM + 0.03", score(LOOKUPS, "em"), counts=0.0, grant=0.03),
    "READER": Number("reader's EM", score(LOOKUPS, "reader_em"), counts=0.05),
    "CITED": Number("exact set", score(LOOKUPS, "exact_set"), counts=0.05),
    "FORMAT": Number("strict format rate", score("all", "format")),
    "NEEDLESS": Number("arithmetic searches", score("arithmetic", "searches"), 0.1, sign=-1),
    "MORE": Number("look-up searches", score(LOOKUPS, "searches"), 0.1),
    "FEWER": Number("look-up searches", score(LOOKUPS, "searches"), 0.1, sign=-1),
    "KNOWN": Number("searches, known facts", score("known", "searches"), 0.1, sign=-1),
    "JUMP": Number(
        "log10 of the largest gradient",
        lambda r: math.log10(max(r["curve"]["grad_norm"])),
        0.1,
        sign=-1,
    ),
}


@dataclass(frozen=True)
class Claim:
    paper: str
    says: str
    better: str  # an arm
    worse: str
    number: Number


# Name; paper; what it says; the better arm; the worse one; the number.
_CLAIMS = """
stage1; UR², R1-Searcher; a first stage that rewards searching helps; ur2; ur2_no_stage1; EM
mask; all; documents must be masked in the loss; ur2; ur2_no_mask; EM
penalty; UR²; the fallback penalty stops needless searches; ur2; ur2_no_penalty; NEEDLESS
curriculum; UR²; easy questions teach needless searches; ur2_stage1; ur2_stage1_easy; NEEDLESS
summary; UR²; summaries read better than the passages themselves; ur2; ur2_no_summary; EM
fallback; UR²; the summary's fallback stops needless searches; ur2; ur2_no_summary; NEEDLESS
weak; UR² (Table 3); a bonus for first searches and its tags help; ur2_choice; ur2_choice_plain; EM
vanilla; UR²; UR² beats RL without stage 1 on the same summaries; ur2; vanilla_rl; EM
f1; R1-Searcher; an F1 reward beats an exact-match reward; r1; r1_em; EM
reinforce; R1-Searcher, UR²; REINFORCE++ beats GRPO; ur2; ur2_grpo; EM
k2; ARENA; k2 trains more stably than k3 (lr 2e-3, KL 0.1); ur2_k2; ur2_k3; JUMP
k2_arena; ARENA; k2 trains more stably than k3 (its own recipe); arena; arena_k3; JUMP
ppo; R-Search; GRPO beats PPO; r_search; r_search_ppo; EM
evidence; R-Search; paid evidence lets another model answer; r_search; r_search_plain; READER
evidence_answer; R-Search; the evidence reward improves answers too; r_search; r_search_plain; EM
without; R-Search; evidence on the way to the answer improves it; r_search; r_search_without; EM
stage2; When to Search; stage 2 stops needless searches; when_stage2; when_stage1_on; KNOWN
stage2_accuracy; When to Search; stage 2 costs no accuracy; when_stage2; when_stage1_on; NO_WORSE
stage_one; When to Search; two stages beat stage 2 alone; when_stage2; when_no_stage1; EM
unified; When to Search; a unified reward searches too little; when_stage2; when_unified; MORE
r_s; When to Search; the query reward r_s saves searches; when_stage2; when_no_r_s; FEWER
r_a; When to Search; without the answer reward r_a answers are worse; when_stage2; when_no_r_a; EM
bonus; ARENA; a bonus for all three brings exact citations; arena; arena_no_bonus; CITED
naive; ARENA; its reward beats format and accuracy alone; arena; arena_naive; EM
em; ARENA; an exact-match reward beats an F1 reward; arena; arena_f1; EM
relevance; ARENA; rewarding relevance brings exact citations; arena; arena_no_relevance; CITED
hacked; UR² (format check); a loose format check is hacked; ur2; ur2_loose; FORMAT
"""
_rows = [line.split("; ") for line in _CLAIMS.strip().splitlines()]
CLAIMS = {name: Claim(*cells, NUMBERS[number]) for name, *cells, number in _rows}

Results = dict[tuple[str, int], dict]  # (arm, world) -> its result.json


def values(claim: Claim, results: Results, seeds: list[int]) -> list[tuple[float, float]]:
    """(with, without) of every world for which both arms are there."""
    number, arms = claim.number, (claim.better, claim.worse)
    found = [[results.get((arm, seed)) for arm in arms] for seed in seeds]
    return [(number.measure(a) + number.grant, number.measure(b)) for a, b in found if a and b]


def interval(differences: list[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95 % t interval. One world has none: (d, −inf, inf).

    Worked: 1, 2, 3: mean 2, s = 1, t(2) = 4.303: 2 ± 4.303 / √3 = 2 ± 2.484.
    """
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return mean, -math.inf, math.inf
    half = T95[min(n - 2, len(T95) - 1)] * float(np.std(differences, ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def verdict(number: Number, differences: list[float]) -> str:
    """shows, does not show, reversed; "not run" without a pair.

    Worked, sign 1, counts 0.03: 0.10 ± 0.05 shows; 0.02 ± 0.01 does not; 0.10 ± 0.20 does not;
    −0.10 ± 0.05 is reversed.
    """
    if not differences:
        return "not run"
    mean, low, high = interval([number.sign * d for d in differences])
    if low > 0 and mean >= number.counts:
        return "shows"
    return "reversed" if high < 0 and -mean >= number.counts else "does not show"


# ------------------------------------------------------------------------------------- what is run
def result_path(runs: str, arm: str, seed: int) -> Path:
    return Path(runs) / f"{arm}-world{seed}" / "result.json"


def settings_of(name: str, seed: int, runs: str) -> Settings:
    """An arm in one world. The world's number is the seed of questions and sampling too."""
    arm = ARMS[name]
    given = {"runs": runs, "name": f"{name}-world{seed}", "seed": seed, "world_seed": seed}
    given |= {"save_every": 10_000, "keep_checkpoints": 1}  # the last step saves by itself
    return check_settings(resolve(arm.recipe, arm.stage, True, given | arm.changes))


def run_arm(name: str, seed: int, runs: str) -> float:
    """Train and evaluate one arm in one world; returns the seconds of the training."""
    settings, path = settings_of(name, seed, runs), result_path(runs, name, seed)
    if ARMS[name].start:
        folder = stage_folder(settings_of(ARMS[name].start, seed, runs))
        settings = replace(settings, start_from=str(checkpoints(folder)[-1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Many arms run at the same time.
    with open(path.with_name("log.txt"), "w") as log, redirect_stdout(log), redirect_stderr(log):
        before = held_out_reward(settings, settings.start_from)  # makes the models, if need be
        start = time.perf_counter()
        folder = train(settings)
        seconds, trained = time.perf_counter() - start, str(checkpoints(folder)[-1])
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        result = {
            "eval": measured(trained),
            "reward": [before, held_out_reward(settings, trained)],
            "curve": {"grad_norm": [line.get("grad_norm", 0.0) for line in lines]},
            "seconds": seconds,
        }
    write_records(path, [result])  # there is no result that is not whole
    return seconds


def measured(checkpoint: str) -> dict[str, dict[str, float]]:
    """kind -> number -> mean on held-out entities; of evidence the reader's answers too."""
    words = ["--questions", "50", "--temperature", "1", "--model", checkpoint]  # as in training
    settings, options = parse_evaluation(words)
    records = Evaluation(settings, options).run()
    if PROTOCOLS[settings.protocol].evidence_tags:
        records = add_reader(records, build_reader(settings))
    means = {}
    for kind, row in summarise(records).items():
        means[kind] = {name: cell[0] for name, cell in row.items() if isinstance(cell, tuple)}
    return means


def held_out_reward(settings: Settings, checkpoint: str) -> float:
    """The arm's own mean reward on held-out questions of its mix; "" is the warmed-up model."""
    pool = built_in_questions(settings, "test")
    questions = QuestionStream(pool, replace(settings, seed=0, questions_per_step=128)).take(0)
    parts = build_parts(replace(settings, start_from=checkpoint, group_size=1))
    rows = rollout(parts.policy, parts.environment, questions, settings.seed, parts.play)
    components, _ = parts.scorer(rows, settings.steps)
    return float(np.mean([sum(terms.values()) for terms in components]))


def wanted_arms(claims: Iterable[Claim]) -> list[str]:
    """The arms of the claims, and those that they start from, in the order of ARMS."""
    names = {arm for claim in claims for arm in (claim.better, claim.worse)}
    names |= {ARMS[name].start for name in names}
    return [name for name in ARMS if name in names]


def chains(arms: list[str], seeds: list[int], runs: str) -> list[tuple[list[str], int]]:
    """(arms, world) of each process to come: arms of one protocol share a warmed-up model."""
    todo = defaultdict(list)
    for seed, name in itertools.product(seeds, arms):
        if not result_path(runs, name, seed).exists():
            todo[settings_of(name, seed, runs).protocol, seed].append(name)
    return [(names, seed) for (_, seed), names in todo.items()]


def run_chain(names: list[str], seed: int, runs: str) -> None:
    """A failed arm is told, and takes along only what starts from it."""
    failed = set()
    for name in names:
        try:
            if ARMS[name].start in failed:
                raise InputError(f"{ARMS[name].start} is not there")
            said = f"{run_arm(name, seed, runs):.0f} s"
        except Exception as error:  # whatever it was, it stops no other arm
            failed.add(name)
            said = f"failed: {error} (see its log.txt)"
        print(f"{name} in world {seed}: {said}", flush=True)


def one_core() -> None:
    """Of a worker, in `train` too: its share as one process of as many as there are cores."""
    os.environ["LOCAL_WORLD_SIZE"] = str(os.cpu_count() or 1)
    torch.set_num_threads(1)


def run_all(arms: list[str], seeds: list[int], runs: str, workers: int) -> None:
    """World by world; no chain waits in the pool, where it would outlive a Ctrl-C."""
    todo, running = chains(arms, seeds, runs), set()
    context = multiprocessing.get_context("spawn")  # forked threads of torch hang
    with ProcessPoolExecutor(workers, context, one_core) as pool:
        while todo or running:
            while todo and len(running) < workers:
                running.add(pool.submit(run_chain, *todo.pop(0), runs))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                if error := future.exception():
                    raise InputError(f"{error}: fewer --workers need less memory; go on with them")


def rows(claims: list[Claim], results: Results, seeds: list[int]) -> list[list[str]]:
    lines = [["claim", "paper", "number", "with", "without", "effect [95 %]", "worlds", "verdict"]]
    for claim in claims:
        pairs, cells = values(claim, results, seeds), ["-", "-", "-"]
        differences = [one - other for one, other in pairs]
        if pairs:
            mean, low, high = interval(differences)
            one, other = np.mean(pairs, axis=0)
            cells = [f"{one:.2f}", f"{other:.2f}", f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"]
        said = verdict(claim.number, differences)
        lines.append([claim.says, claim.paper, claim.number.name, *cells, str(len(pairs)), said])
    return lines


def reward_rows(results: Results) -> list[list[str]]:
    """Each arm's own reward on held-out questions, world by world: before -> after."""
    lines = [["arm", "held-out reward, before -> after, by world", "rose in", "seconds"]]
    for arm, group in itertools.groupby(results, key=lambda key: key[0]):
        found = [results[key] for key in group]
        shown = "   ".join("{:.2f} -> {:.2f}".format(*result["reward"]) for result in found)
        rose = sum(result["reward"][1] > result["reward"][0] for result in found)
        seconds = np.mean([result["seconds"] for result in found])
        lines.append([arm, shown, f"{rose} of {len(found)}", f"{seconds:.0f}"])
    return lines


@dataclass(frozen=True)
class AblateSettings:
    """The papers' claims in the built-in world."""

    seeds: int = setting(2, "worlds per arm", least=1)
    first_world: int = setting(20, "no setting was chosen on worlds from 20 on")
    only: str = setting("", f"claims, comma-separated: {', '.join(CLAIMS)}")
    runs: str = setting("runs/ablate", "folder of the arms")
    workers: int = setting(os.cpu_count() or 1, "arms at a time, one core each", least=1)
    table: bool = setting(False, "run nothing: the table of what is there")
    markdown: bool = setting(False, "print Markdown tables")
    rewards: bool = setting(False, "print each arm's own reward on held-out questions")


def main(arguments: list[str] | None = None) -> None:
    options, _ = parse_flags("lab.ablate", AblateSettings, arguments)
    names = options.only.replace(" ", "").split(",") if options.only else list(CLAIMS)
    for name in names:
        check_value("only", name, {"one_of": CLAIMS})
    claims, runs = [CLAIMS[name] for name in names], options.runs
    seeds = list(range(options.first_world, options.first_world + options.seeds))
    if not options.table:
        # PPO's only if named: a critic of the policy's own size doubles the time of a step.
        run = [CLAIMS[name] for name in names if options.only or name != "ppo"]
        with interruptible("finished arms are kept: the same command goes on"):
            run_all(wanted_arms(run), seeds, runs, options.workers)
    paths = {(name, s): result_path(runs, name, s) for name in ARMS for s in seeds}
    results = {key: json.loads(path.read_text()) for key, path in paths.items() if path.exists()}
    print(written(rows(claims, results, seeds), options.markdown, 1))
    if options.rewards:
        print("\n" + written(reward_rows(results), options.markdown, 1))


if __name__ == "__main__":
    run_main(main)
