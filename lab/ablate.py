"""Which of the papers' claims hold in the built-in world? A claim is two arms that differ in one
thing, over several worlds.

    python ablate.py                         the default set: two worlds, all claims but PPO's;
                                             about half an hour on two cores
    python ablate.py --seeds 5               five worlds
    python ablate.py --only evidence,mask    some claims
    python ablate.py --table                 the table and picture of what is there, nothing is run

    arm      a training run: recipe, stage, what it sets otherwise, the arm that it starts from
    claim    a number of one arm against the same number of another, paired by world
    effect   mean over worlds of (with − without), with the 95 % t interval  mean ± t(n − 1) · s /
             √n

Verdict: "shows" if the interval lies beyond 0 on the claimed side and the mean is at least as large
as the claim's own threshold; "reversed" if it lies beyond 0 on the other side; else "does not
show". A claim that does not show is printed as such: with a model this small that is a finding too.
Evaluation is on held-out entities at temperature 1, as in training. Interrupted, it goes on where
it stopped: each finished arm of each world leaves a result.json. Left out: corrections for testing
many claims; arms over the same world with other sampling seeds.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from errors import FlagParser, InputError, run_main

DEFAULT_SEEDS = 2
LONG = ("ppo",)  # run only if named: a critic of the policy's own size doubles the time of a step
FIRST_WORLD = 20  # no setting was chosen on these worlds
EVAL_QUESTIONS = 50  # of a kind
REWARD_QUESTIONS = 128

# Two-sided 95 % points of Student's t for n − 1 = 1, 2, ... degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


# ----------------------------------------------------------------------------------------- the arms


@dataclass(frozen=True)
class Arm:
    """One training run. `start`: the arm whose last checkpoint it goes on from; "" is the warmed-up
    model.
    """

    recipe: str
    stage: int
    changes: dict
    start: str = ""


_SHORT = {"steps": 30}
ARMS: dict[str, Arm] = {
    "ur2_stage1": Arm("ur2", 1, {}),
    "ur2": Arm("ur2", 2, _SHORT, "ur2_stage1"),
    "ur2_stage1_everything": Arm("ur2", 1, {"mix": "one_hop=3,two_hop=4,unit=1,arithmetic=4"}),
    "ur2_no_stage1": Arm("ur2", 2, {"steps": 42}),
    "ur2_no_mask": Arm("ur2", 2, {**_SHORT, "mask_documents": False}, "ur2_stage1"),
    "ur2_no_penalty": Arm("ur2", 2, {**_SHORT, "fallback_penalty": 0.0}, "ur2_stage1"),
    "ur2_no_summary": Arm("ur2", 2, {**_SHORT, "summarizer": "none"}, "ur2_stage1"),
    "ur2_grpo": Arm("ur2", 2, {**_SHORT, "algorithm": "grpo"}, "ur2_stage1"),
    "ur2_loose": Arm("ur2", 2, {**_SHORT, "format_check": "loose"}, "ur2_stage1"),
    "ur2_k2": Arm(
        "ur2", 2, {"steps": 12, "algorithm": "grpo", "lr": 2e-3, "kl_coef": 0.1}, "ur2_stage1"
    ),
    "ur2_k3": Arm(
        "ur2",
        2,
        {"steps": 12, "algorithm": "grpo", "lr": 2e-3, "kl_coef": 0.1, "kl_estimator": "k3"},
        "ur2_stage1",
    ),
    "vanilla_rl": Arm("vanilla_rl", 1, {"steps": 42}),
    "r1_stage1": Arm("r1_searcher", 1, {}),
    "r1": Arm("r1_searcher", 2, _SHORT, "r1_stage1"),
    "r1_em": Arm("r1_searcher", 2, {**_SHORT, "answer_metric": "em"}, "r1_stage1"),
    "r_search": Arm("r_search", 1, {}),
    "r_search_no_evidence": Arm("r_search", 1, {"evidence_reward": False}),
    "r_search_ppo": Arm("r_search", 1, {"algorithm": "ppo", "critic_lr": 1e-3}),
    "when_stage1": Arm("when_to_search", 1, {}),
    "when_stage2": Arm("when_to_search", 2, _SHORT, "when_stage1"),
    "when_stage1_on": Arm(
        "when_to_search", 2, {**_SHORT, "reward": "when_to_search_stage1"}, "when_stage1"
    ),
    "when_unified": Arm("when_to_search_unified", 1, {"steps": 35}),
    "arena": Arm("arena", 1, {}),
    "arena_no_bonus": Arm("arena", 1, {"bonus": 0.0}),
    "arena_no_relevance": Arm("arena", 1, {"relevance_reward": False}),
}


# --------------------------------------------------------------------------------------- the claims


@dataclass(frozen=True)
class Claim:
    """`better` against `worse`: a number of a result, expected larger (sign 1) or smaller (−1) in
    the first arm.

    threshold: the smallest effect that counts, in the number's own unit; smaller ones are noise or
    of no use.
    """

    name: str
    paper: str
    says: str
    arms: tuple[str, str]
    number: str  # how the table names it
    measure: Callable[[dict], float]
    sign: int = 1
    threshold: float = 0.03
    margin: float = 0.0  # "no worse than by so much": granted to the arm that may lose it


def score(kind: str, name: str) -> Callable[[dict], float]:
    """A number of the evaluation: kind "lookups" is the mean of one_hop and two_hop."""
    kinds = ("one_hop", "two_hop") if kind == "lookups" else (kind,)
    return lambda result: float(np.mean([result["eval"][k][name] for k in kinds]))


def logged(name: str, how: Callable = max) -> Callable[[dict], float]:
    return lambda result: float(how(result["curve"][name]))


def log10_largest_gradient(result: dict) -> float:
    return math.log10(max(result["curve"]["grad_norm"]))


CLAIMS = [
    Claim(
        "stage1",
        "UR², R1-Searcher",
        "a first stage that rewards searching helps, at equal steps",
        ("ur2", "ur2_no_stage1"),
        "look-up EM",
        score("lookups", "em"),
    ),
    Claim(
        "mask",
        "all",
        "documents must be masked in the loss",
        ("ur2", "ur2_no_mask"),
        "look-up EM",
        score("lookups", "em"),
    ),
    Claim(
        "penalty",
        "UR²",
        "the fallback penalty stops needless searches",
        ("ur2", "ur2_no_penalty"),
        "arithmetic searches",
        score("arithmetic", "searches"),
        -1,
        0.1,
    ),
    Claim(
        "curriculum",
        "UR²",
        "easy questions kept out of the search prompts: fewer needless searches after stage 1",
        ("ur2_stage1", "ur2_stage1_everything"),
        "arithmetic searches",
        score("arithmetic", "searches"),
        -1,
        0.1,
    ),
    Claim(
        "summary",
        "UR²",
        "summaries read better than the passages themselves",
        ("ur2", "ur2_no_summary"),
        "look-up EM",
        score("lookups", "em"),
    ),
    Claim(
        "fallback",
        "UR²",
        "the summariser's fallback stops needless searches",
        ("ur2", "ur2_no_summary"),
        "arithmetic searches",
        score("arithmetic", "searches"),
        -1,
        0.1,
    ),
    Claim(
        "vanilla",
        "UR²",
        "UR² beats RL without stage 1 and summaries, at equal steps",
        ("ur2", "vanilla_rl"),
        "look-up EM",
        score("lookups", "em"),
    ),
    Claim(
        "f1",
        "R1-Searcher",
        "an F1 reward beats an exact-match reward",
        ("r1", "r1_em"),
        "look-up EM",
        score("lookups", "em"),
    ),
    Claim(
        "reinforce",
        "R1-Searcher, UR²",
        "REINFORCE++ beats GRPO",
        ("ur2", "ur2_grpo"),
        "look-up EM",
        score("lookups", "em"),
    ),
    Claim(
        "k2",
        "ARENA",
        "k2 trains more stably than k3 (lr 2e-3, KL 0.1)",
        ("ur2_k2", "ur2_k3"),
        "log10 of the largest gradient",
        log10_largest_gradient,
        -1,
        0.1,
    ),
    Claim(
        "ppo",
        "R-Search",
        "GRPO beats PPO at equal steps",
        ("r_search", "r_search_ppo"),
        "look-up EM",
        score("lookups", "em"),
    ),
    Claim(
        "evidence",
        "R-Search",
        "the evidence reward makes evidence from which another model can answer",
        ("r_search", "r_search_no_evidence"),
        "reader's EM",
        score("lookups", "reader_em"),
        1,
        0.05,
    ),
    Claim(
        "evidence_answer",
        "R-Search",
        "the evidence reward improves the answers too",
        ("r_search", "r_search_no_evidence"),
        "look-up EM",
        score("lookups", "em"),
    ),
    Claim(
        "stage2",
        "When to Search",
        "stage 2 stops searches for what the model knows",
        ("when_stage2", "when_stage1_on"),
        "searches, known facts",
        score("known", "searches"),
        -1,
        0.1,
    ),
    Claim(
        "stage2_accuracy",
        "When to Search",
        "stage 2 costs no accuracy on look-ups (at most 0.03)",
        ("when_stage2", "when_stage1_on"),
        "look-up EM + 0.03",
        score("lookups", "em"),
        1,
        0.0,
        margin=0.03,
    ),
    Claim(
        "unified",
        "When to Search",
        "two stages beat stage 2's reward from the start, at equal steps",
        ("when_stage2", "when_unified"),
        "look-up EM",
        score("lookups", "em"),
    ),
    Claim(
        "bonus",
        "ARENA",
        "the bonus for being right in all three brings exact citations",
        ("arena", "arena_no_bonus"),
        "exact set",
        score("lookups", "exact_set"),
        1,
        0.05,
    ),
    Claim(
        "relevance",
        "ARENA",
        "the relevance reward brings exact citations",
        ("arena", "arena_no_relevance"),
        "exact set",
        score("lookups", "exact_set"),
        1,
        0.05,
    ),
    Claim(
        "hacked",
        "UR² (format check)",
        "a loose format check is hacked",
        ("ur2", "ur2_loose"),
        "strict format rate",
        score("all", "format"),
    ),
]


def values(
    claim: Claim, results: dict[tuple[str, int], dict], seeds: list[int]
) -> list[tuple[float, float]]:
    """(with, without) of every world for which both arms are there."""
    pairs = [(results.get((claim.arms[0], s)), results.get((claim.arms[1], s))) for s in seeds]
    return [
        (claim.measure(one) + claim.margin, claim.measure(other))
        for one, other in pairs
        if one and other
    ]


def interval(differences: list[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95 % t interval. One world has none: (d, −inf, inf).

    Worked: 1, 2, 3: mean 2, s = 1, t(2) = 4.303: 2 ± 4.303 / √3 = 2 ± 2.484.
    """
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return mean, -math.inf, math.inf
    half = T95[min(n - 2, len(T95) - 1)] * float(np.std(differences, ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def verdict(claim: Claim, differences: list[float]) -> str:
    """shows, does not show, reversed; "not run" without a pair.

    Worked, sign 1, threshold 0.03: 0.10 ± 0.05 shows; 0.02 ± 0.01 does not; 0.10 ± 0.20 does not;
    −0.10 ± 0.05 is reversed.
    """
    if not differences:
        return "not run"
    mean, low, high = interval([claim.sign * d for d in differences])
    if low > 0 and mean >= claim.threshold:
        return "shows"
    return "reversed" if high < 0 and -mean >= claim.threshold else "does not show"


# ------------------------------------------------------------------------------------- one arm, run


def result_path(runs: str, arm: str, seed: int) -> Path:
    return Path(runs) / f"{arm}-world{seed}" / "result.json"


def run_arm(name: str, seed: int, runs: str) -> float:
    """Train and evaluate one arm in one world; its result.json is written last. Returns the seconds
    it took.

    All output goes to a log beside it: many arms run at the same time.
    """
    import recipes
    import train

    arm, path, start = ARMS[name], result_path(runs, name, seed), time.perf_counter()
    given = {
        "runs": runs,
        "name": f"{name}-world{seed}",
        "seed": seed,
        "world_seed": seed,
        "threads": 1,
        "save_every": 10_000,
        "keep_checkpoints": 1,
        "show_every": 1_000,
        **arm.changes,
    }
    if arm.start:
        before = recipes.resolve(
            ARMS[arm.start].recipe,
            ARMS[arm.start].stage,
            True,
            {"runs": runs, "name": f"{arm.start}-world{seed}"},
        )
        given["start_from"] = str(recipes.checkpoints(recipes.stage_folder(before))[-1])
    recipe = recipes.check_recipe(recipes.resolve(arm.recipe, arm.stage, True, given))
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(path.with_name("log.txt"), "w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        folder = train.train(recipe)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curve = {
            key: [line.get(key, 0.0) for line in lines]
            for key in ("reward", "grad_norm", "em", "searches")
        }
        trained = str(recipes.checkpoints(folder)[-1])
        seconds = time.perf_counter() - start
        rewards = [
            held_out_reward(recipe, checkpoint) for checkpoint in (recipe.start_from, trained)
        ]
        result = {
            "arm": name,
            "seed": seed,
            "eval": measure_arm(recipe, trained),
            "reward": rewards,
            "curve": curve,
            "seconds": seconds,
        }
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(result) + "\n")
    aside.rename(path)
    return result["seconds"]


def measure_arm(recipe, checkpoint: Path | str) -> dict[str, dict[str, float]]:
    """kind -> number -> mean on held-out entities, under the strict format check; of R-Search the
    reader's answers too.
    """
    import dataclasses

    import eval as evaluation
    import recipes
    from plumbing.report import summarise
    from world.toy import world_for

    world = world_for(recipe.protocol, recipe.world_seed)
    questions = [
        q
        for kind in recipes.built_in_kinds(recipe)
        for q in world.questions("test", kind, EVAL_QUESTIONS)
    ]
    policy, tokenizer = recipes.load_model(recipe, str(checkpoint))
    recipe, search = (
        dataclasses.replace(recipe, temperature=1.0),
        recipes.build_search(recipe, world.documents),
    )
    records = evaluation.evaluate(policy, tokenizer, questions, search, recipe, quiet=True)
    if recipe.protocol == "r_search":
        records = evaluation.add_reader(records, recipes.build_cross_model(recipe))
    return {
        kind: {name: cell[0] for name, cell in row.items() if isinstance(cell, tuple)}
        for kind, row in summarise(records).items()
    }


def held_out_reward(recipe, checkpoint: str) -> float:
    """The arm's own mean reward on held-out questions of its mix, at its temperature; checkpoint ""
    is the warmed-up model.
    """
    import recipes
    from curriculum import QuestionStream
    from rollout import rollout
    from world.toy import world_for

    world = world_for(recipe.protocol, recipe.world_seed)
    pool = [q for kind in recipes.built_in_kinds(recipe) for q in world.questions("test", kind)]
    questions = QuestionStream(pool, REWARD_QUESTIONS, recipe.mix).take(0)
    policy, tokenizer = recipes.load_model(recipe, checkpoint)
    trajectories = rollout(
        policy,
        tokenizer,
        questions,
        recipes.build_search(recipe, world.documents),
        recipe.protocol,
        seed=recipe.seed,
        **recipes.rollout_settings(recipe),
    )
    components, _ = recipes.Scorer(recipe, world.documents)(trajectories, recipe.steps)
    return float(np.mean([sum(terms.values()) for terms in components]))


def make_models(protocol: str, seed: int, runs: str) -> float:
    """The warmed-up model of one protocol and world, and R-Search's reader."""
    import torch

    from world.toy import load_reader, load_toy

    torch.set_num_threads(1)
    start = time.perf_counter()
    with (
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
        contextlib.redirect_stderr(null),
    ):
        load_toy(seed, protocol, runs)
        if protocol == "r_search":
            load_reader(seed, runs)
    return time.perf_counter() - start


# -------------------------------------------------------------------------------------- all of them


def wanted_arms(claims: list[Claim]) -> list[str]:
    """The arms of the claims, and those that they start from, in the order of ARMS."""
    names = {arm for claim in claims for arm in claim.arms}
    names |= {ARMS[name].start for name in names if ARMS[name].start}
    return [name for name in ARMS if name in names]


def plan(arms: list[str], seeds: list[int], runs: str) -> dict[tuple, tuple]:
    """task -> the task that it waits for (or None). Tasks: ("model", protocol, seed) and ("arm",
    name, seed).
    """
    import recipes

    tasks: dict[tuple, tuple | None] = {}
    for seed in seeds:
        for name in arms:
            if result_path(runs, name, seed).exists():
                continue
            model = "model", recipes.RECIPES[ARMS[name].recipe][ARMS[name].stage]["protocol"], seed
            tasks.setdefault(model, None)
            started = ARMS[name].start
            waits = (
                ("arm", started, seed)
                if started and not result_path(runs, started, seed).exists()
                else model
            )
            tasks["arm", name, seed] = waits
    return tasks


def run_all(arms: list[str], seeds: list[int], runs: str, workers: int) -> None:
    """Every task as soon as what it waits for is done, `workers` at a time. A failed arm is told
    and stops no other.
    """
    waiting, running, failed = plan(arms, seeds, runs), {}, set()
    total = len(waiting)
    if not total:
        return
    context = multiprocessing.get_context("spawn")  # forked threads of torch hang
    with (
        ProcessPoolExecutor(workers, context) as pool,
        tqdm(total=total, desc="arms", dynamic_ncols=True) as bar,
    ):
        done: set[tuple] = set()
        while waiting or running:
            # no more than can run at once: the first world is finished before the last one's models
            # are made
            for task in [t for t, before in waiting.items() if before is None or before in done][
                : workers - len(running)
            ]:
                del waiting[task]
                running[
                    pool.submit(run_arm if task[0] == "arm" else make_models, *task[1:], runs)
                ] = task
            for task in [t for t, before in waiting.items() if before in failed]:
                del waiting[task]
                failed.add(task)
                bar.update()
            if not running:
                continue
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                bar.update()
                if error := future.exception():
                    failed.add(task)
                    bar.write(f"{task[1]} in world {task[2]} failed: {error} (see its log.txt)")
                else:
                    done.add(task)
                    bar.write(f"{task[1]} in world {task[2]}: {future.result():.0f} s")


def read_results(runs: str, seeds: list[int]) -> dict[tuple[str, int], dict]:
    results = {}
    for name in ARMS:
        for seed in seeds:
            if (path := result_path(runs, name, seed)).exists():
                results[name, seed] = json.loads(path.read_text())
    return results


# --------------------------------------------------------------------------- the table, the picture


def rows(claims: list[Claim], results: dict, seeds: list[int]) -> list[list[str]]:
    lines = [["claim", "paper", "number", "with", "without", "effect [95 %]", "worlds", "verdict"]]
    for claim in claims:
        pairs = values(claim, results, seeds)
        differences = [one - other for one, other in pairs]
        if pairs:
            mean, low, high = interval(differences)
            one, other = (f"{np.mean(side):.2f}" for side in zip(*pairs, strict=True))
            effect = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
        else:
            one = other = effect = "-"
        lines.append(
            [
                claim.says,
                claim.paper,
                claim.number,
                one,
                other,
                effect,
                str(len(pairs)),
                verdict(claim, differences),
            ]
        )
    return lines


def reward_rows(results: dict) -> list[list[str]]:
    """Each arm's own reward on held-out questions, world by world: before -> after."""
    lines = [["arm", "held-out reward, before -> after, by world", "rose in", "seconds"]]
    for name in ARMS:
        found = [result for (arm, _), result in results.items() if arm == name]
        if found:
            shown = "   ".join("{:.2f} -> {:.2f}".format(*result["reward"]) for result in found)
            rose = sum(result["reward"][1] > result["reward"][0] for result in found)
            lines.append(
                [
                    name,
                    shown,
                    f"{rose} of {len(found)}",
                    f"{np.mean([result['seconds'] for result in found]):.0f}",
                ]
            )
    return lines


def as_text(lines: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )


def as_markdown(lines: list[list[str]]) -> str:
    header, *rest = lines
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rest]
    )


def draw(claims: list[Claim], results: dict, seeds: list[int], png: Path) -> None:
    """Each claim's effect in units of its threshold, positive on the claimed side, with the
    interval and every world.
    """
    try:
        import matplotlib
    except ImportError:
        print(
            "no picture: matplotlib is missing (pip install matplotlib, the extra `plot`)",
            file=sys.stderr,
        )
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"shows": "tab:green", "does not show": "0.55", "reversed": "tab:red"}
    figure, axis = pyplot.subplots(figsize=(11, 0.5 * len(claims) + 1.2), constrained_layout=True)
    for y, claim in enumerate(reversed(claims)):
        differences = [claim.sign * (one - other) for one, other in values(claim, results, seeds)]
        if not differences:
            continue
        mean, low, high = interval(differences)
        said = verdict(claim, [claim.sign * d for d in differences])
        axis.plot([max(low, -1.5), min(high, 2.5)], [y, y], color=colours[said], linewidth=2)
        axis.plot(differences, [y] * len(differences), "|", color=colours[said], markersize=9)
        axis.plot([mean], [y], "o", color=colours[said])
    axis.axvline(0, color="0.4", linewidth=0.8)
    axis.set_xlim(-1.5, 2.5)
    axis.set_yticks(
        range(len(claims)), [f"{c.says}\n({c.number})" for c in reversed(claims)], fontsize=8
    )
    axis.set_xlabel("effect on the claimed side (each in its own unit), 95 % interval over worlds")
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def chosen(names: str) -> list[Claim]:
    known = {claim.name: claim for claim in CLAIMS}
    if not names:
        return CLAIMS
    for name in (wanted := [name.strip() for name in names.split(",")]):
        if name not in known:
            raise InputError(f"--only {name}: no such claim; they are {', '.join(known)}")
    return [known[name] for name in wanted]


def main(arguments: list[str] | None = None) -> None:
    parser = FlagParser("ablate.py", description="The papers' claims in the built-in world.")
    parser.add_argument("--seeds", type=int, default=DEFAULT_SEEDS, help="worlds per arm")
    parser.add_argument("--first_world", type=int, default=FIRST_WORLD)
    parser.add_argument(
        "--only", default="", help=f"claims, comma-separated: {', '.join(c.name for c in CLAIMS)}"
    )
    parser.add_argument("--runs", default="runs/ablate", help="folder of the arms")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="arms at the same time, one core each",
    )
    parser.add_argument(
        "--table", action="store_true", help="run nothing: the table of what is there"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of docs/results.md"
    )
    parser.add_argument(
        "--rewards",
        action="store_true",
        help="print each arm's own reward on held-out questions too",
    )
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.workers < 1:
        raise InputError("--seeds and --workers must be at least 1")
    claims, seeds = (
        chosen(options.only),
        list(range(options.first_world, options.first_world + options.seeds)),
    )
    try:
        if not options.table:
            run = claims if options.only else [claim for claim in claims if claim.name not in LONG]
            run_all(wanted_arms(run), seeds, options.runs, options.workers)
    except KeyboardInterrupt:
        print("\ninterrupted; finished arms are kept: the same command goes on")
        sys.exit(130)
    results = read_results(options.runs, seeds)
    lines = rows(claims, results, seeds)
    print((as_markdown if options.markdown else as_text)(lines))
    if options.rewards:
        print("\n" + (as_markdown if options.markdown else as_text)(reward_rows(results)))
    if results:
        Path(options.runs).mkdir(parents=True, exist_ok=True)
        draw(claims, results, seeds, Path(options.runs) / "ablate.png")
        print(f"picture: {Path(options.runs) / 'ablate.png'}")


if __name__ == "__main__":
    run_main(main)
