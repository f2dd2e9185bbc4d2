"""Tests which of the papers' claims hold in the built-in world; lab/claims.py lists the runs.

    python -m lab.ablate               two worlds, all claims: half an hour on two cores
    python -m lab.ablate --seeds 0     the final runs: as many worlds as each claim names
    python -m lab.ablate --only mask,penalty --seeds 5
    python -m lab.ablate --table       prints the table of two worlds' finished runs; runs nothing
    python -m lab.ablate --curves docs --only stage1,penalty,stage2,two_stages     draws curves

An arm is one training run (lab/claims.py). It is evaluated on all questions of --split: about
held-out entities and units, and about sums and known facts; the last two are asked in training too.
Each question is answered twice, at the temperature of training. Each arm writes its result and its
settings to a result.json in each world. If the command is interrupted, repeating it continues from
these files; a result that was made with other settings ends the command. A result does not say
which version of a warm-up it is from, so after changing a warm-up give another --output_dir. To
choose settings, use the development questions of other worlds: --first_world 40 --split dev. Left
out: several machines.
"""

import multiprocessing
import os
import shutil
import time
import traceback
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from errors import InputError, run_main, setting
from eval import Evaluation, Options
from formats.records import finished_records, write_records
from lab import difficulty, interruptible, names_in, parse_flags
from lab.claims import (
    ARMS,
    CLAIMS,
    Claim,
    Results,
    interval,
    points,
    score,
    values,
    verdict,
    wanted_arms,
)
from lab.distil import DistilSettings, distil
from other_models.reader import add_reader
from papers import paper_of
from plumbing.build import build_reader, end_with_launcher
from plumbing.files import checkpoints
from plumbing.questions import built_in_world
from plumbing.report import format_table
from prompts import PROTOCOLS
from retriever import make_retriever
from settings import Settings, check_settings, resolve, stage_folder
from train import train
from view import draw_panels
from world.toy import toy_path

Jobs = set[tuple[str, int]]  # (arm, world)
SAMPLES = 2  # answers to each question of the evaluation
SFT = {"epochs": 3.0, "lr": 1e-3}  # R1-Searcher section 4.1: three epochs
ROLLOUTS = 4  # answers to each training question, to imitate or to measure difficulty
CURVES = {  # the metrics that a picture shows, one per panel, and the panels' titles
    "reward": "reward",
    "model_tokens": "tokens that the model writes",
    "em/one_hop": "exact match of one-hop questions",
    "em/two_hop": "exact match of two-hop questions",
    "searches/one_hop": "searches per one-hop question",
    "searches/two_hop": "searches per two-hop question",
    "searches/arithmetic": "searches per sum",
    "searches/known": "searches per known fact",
    "fallbacks": "share of searches that ask for no fact",
    "grad_norm": "norm of the gradient",
    "k2": "KL to the reference, by k2",
    "k3": "KL to the reference, by k3",
}


@dataclass(frozen=True)
class AblateSettings:
    """Test the papers' claims in the built-in world."""

    seeds: int = setting(
        2, "worlds per claim, in --table and --curves too; 0: the number in lab/claims.py", least=0
    )
    first_world: int = setting(50, "number of the first world; settings were not tuned on 50 to 57")
    split: str = setting("test", "split of the entities to ask about", one_of=("dev", "test"))
    only: str = setting("", f"claims to test, comma-separated; default: all of {', '.join(CLAIMS)}")
    output_dir: str = setting("runs/ablate", "folder for the runs")
    workers: int = setting(os.cpu_count() or 1, "worlds at a time, one core each", least=1)
    table: bool = setting(False, "run nothing; print the table of finished runs")
    curves: str = setting("", "run nothing; draw the curves of finished runs into this folder")


# -------------------------------------------------------------------------------- an arm's settings
def settings_of(name: str, seed: int, runs: str) -> Settings:
    """Returns an arm's settings in world `seed`. This number also seeds questions and sampling."""
    arm, run_name = ARMS[name], f"{name}-world{seed}"
    changes = {
        "output_dir": runs,
        "run_name": run_name,
        "seed": seed,
        "world_seed": seed,
        "save_every": 10_000,  # no checkpoint is due before the last step
        "keep_checkpoints": 1,
    }
    if "buckets" in arm.changes:
        changes["difficulty"] = str(Path(runs, run_name, "difficulty.jsonl"))
    return check_settings(resolve(arm.recipe, arm.stage, True, changes | arm.changes))


def made_with(name: str, seed: int, split: str) -> dict:
    """Returns the settings that are stored with a result; `read_results` rejects a result of other
    settings. The stored --output_dir is "", so a result stays valid if its folder is moved.
    """
    return vars(settings_of(name, seed, "")) | {"split": split}


def result_path(settings: Settings) -> Path:
    return stage_folder(settings).with_name("result.json")


# --------------------------------------------------------------------------------------- one arm
def run_arm(name: str, seed: int, runs: str, split: str) -> None:
    """Trains and evaluates one arm in one world, and writes its result. The result's `curve` is a
    list of step records: those of the arm that this arm starts from, if any, then its own.
    """
    settings, arm, curve = settings_of(name, seed, runs), ARMS[name], []
    if arm.start:
        before = settings_of(arm.start, seed, runs)
        settings = replace(settings, model=last_checkpoint(before))
        results = read_results({(arm.start, seed)}, runs, split)
        if not results:
            raise InputError(f"arm {arm.start} has no result in world {seed}: repeat the command")
        curve = results[arm.start, seed]["curve"]
    else:
        check_prior(settings, split)
    model, steps = (imitate if arm.imitates else reinforce)(settings)
    result = {"eval": evaluate_arm(settings, model, split), "curve": curve + steps}
    # Written last, so an interrupted arm has no result and is run again.
    write_records(result_path(settings), [result | {"made_with": made_with(name, seed, split)}])


def last_checkpoint(settings: Settings) -> str:
    folder = stage_folder(settings)
    if not (paths := checkpoints(folder)):
        raise InputError(
            f"{folder} has no checkpoint: see log.txt in {folder.parent}, then remove that folder"
            " to train again"
        )
    return str(paths[-1])


def reinforce(settings: Settings) -> tuple:
    """Trains an arm by RL. Returns its checkpoint and the records of its steps."""
    if settings.difficulty:  # measured with the model that the arm starts from
        difficulty.main(
            ["--model", settings.model, "--out", settings.difficulty, "--samples", str(ROLLOUTS)]
        )
    steps = finished_records(train(settings) / "metrics.jsonl")
    for step in steps:
        if not step.get("searches"):  # without a search there is no rate of fallbacks
            step.pop("fallbacks", None)
    return last_checkpoint(settings), steps


def imitate(settings: Settings) -> tuple:
    """Trains the warmed-up model by supervised learning instead of RL (R1-Searcher section 4.1): it
    imitates correct trajectories of settings.model, the last checkpoint of the arm's `start`, on
    training questions. Returns the new checkpoint and an empty list, since there are no RL steps.
    """
    out = stage_folder(settings) / "checkpoint-sft"
    traces, runs = str(out.with_name("traces.jsonl")), settings.output_dir
    student = toy_path(settings.world_seed, settings.protocol, settings.toy_init, runs)
    evaluate(settings, settings.model, "train", ROLLOUTS, traces)
    shutil.rmtree(out, ignore_errors=True)  # left by an interrupted arm
    distil("traces", DistilSettings(str(student), traces, str(out), settings.protocol, **SFT))
    return str(out), []


def evaluate(settings: Settings, model: str, split: str, samples=SAMPLES, out="") -> list:
    """Returns the prediction records of all questions of a split, sampled as in training. `model`
    "" means the warmed-up model.
    """
    options = Options(split=split, questions=0, samples=samples, out=out)
    return Evaluation(replace(settings, model=model), options).run()


def check_prior(settings: Settings, split: str) -> None:
    """Raises an InputError if the warmed-up model makes more searches per look-up question than
    the `prior` of its warm-up (world/tiny.py) allows. Protocols without searches are not checked.
    """
    if PROTOCOLS[settings.protocol].query_tags is None:
        return
    # Each arm has its own file, because another command may be measuring the same model.
    out = str(result_path(settings).with_name("prior.jsonl"))
    prior = score("searches")({"eval": means(evaluate(settings, "", split, out=out))})
    limit = paper_of(settings.protocol).warmed_up(settings.toy_init).prior
    if prior > limit:
        raise InputError(
            f"the warmed-up model (--toy_init '{settings.toy_init}') makes {prior:.3f} searches per"
            f" look-up question before RL, and at most {limit} are allowed: this arm gets no result"
            " in this world"
        )


def evaluate_arm(settings: Settings, model: str, split: str) -> dict:
    """Evaluates an arm and returns {kind of question or "all": {metric: mean}}. If the protocol has
    an evidence box, a reader's answers are scored too: from the evidence, and from the documents
    that a search for the question returns (`add_rag`).
    """
    records = evaluate(settings, model, split)
    for record in records:
        record["metrics"]["words"] = len((record["prediction"] or "").split())
    if PROTOCOLS[settings.protocol].evidence_tags:
        reader = build_reader(settings)
        records = add_rag(add_reader(records, reader), reader, settings)
    return means(records)


def means(records: list) -> dict:
    """Returns {kind or "all": {metric: mean}}. Records without the metric, or with None, do not
    count in its mean.
    """
    values = defaultdict(lambda: defaultdict(list))
    for record in records:
        for number, value in record["metrics"].items():
            for kind in (record["kind"], "all") if value is not None else ():
                values[kind][number].append(value)
    return {
        kind: {number: round(np.mean(column), 4) for number, column in columns.items()}
        for kind, columns in values.items()
    }


def add_rag(records: list, reader, settings: Settings) -> list:
    """Adds the metric `rag_em`: the reader answers from the documents of a search for the question,
    without the policy (R-Search Figure 2: Vanilla).
    """
    retriever = make_retriever(built_in_world(settings).documents, settings, settings.seed)
    results = retriever.search([r["question"] for r in records], settings.documents_per_search)
    texts = [" ".join(d.text for d in documents) for documents in results]
    own = [r | {"evidence": text} for r, text in zip(records, texts, strict=True)]
    for record, answered in zip(records, add_reader(own, reader), strict=True):
        record["metrics"]["rag_em"] = answered["metrics"]["reader_em"]
    return records


# --------------------------------------------------------------------------------------- all arms
def read_results(jobs: Jobs, runs: str, split: str) -> Results:
    """Reads the finished results of these arms and worlds. A result that was made with other
    settings is an error.
    """
    results = {}
    for name, seed in jobs:
        path = result_path(settings_of(name, seed, runs))
        for result in finished_records(path):  # one result, or none yet
            if result["made_with"] != made_with(name, seed, split):
                raise InputError(
                    f"{path} was made with other settings: remove it, or give another --output_dir"
                )
            results[name, seed] = result
    return results


def run_world(names: list[str], seed: int, runs: str, split: str) -> None:
    """Runs the arms of one world one after the other. If an arm fails, its error is printed and the
    next arm runs. Arms that start from a failed arm fail too, because they need its
    checkpoint and its result.
    """
    for name in names:
        log = result_path(settings_of(name, seed, runs)).with_name("log.txt")
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with open(log, "w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
            try:
                run_arm(name, seed, runs, split)
                message = f"{time.perf_counter() - start:.0f} s"
            except Exception as error:
                traceback.print_exc()
                message = f"failed, see {log}: {error}"
        print(f"{name} in world {seed}: {message}", flush=True)


def run_all(jobs: Jobs, runs: str, split: str, workers: int) -> None:
    """Runs several worlds at a time; one process runs all arms of a world. A world is submitted
    only when a worker is free, because a queued world would still run after Ctrl-C.
    """
    running, context = set(), multiprocessing.get_context("spawn")  # torch hangs if it is forked
    worlds = sorted({world for _, world in jobs}, reverse=True)
    with ProcessPoolExecutor(workers, context, end_with_launcher) as pool:
        while worlds or running:
            while worlds and len(running) < workers:
                world = worlds.pop()
                names = [name for name in ARMS if (name, world) in jobs]
                running.add(pool.submit(run_world, names, world, runs, split))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                if error := future.exception():
                    raise InputError(f"{error}: continue with fewer --workers to save memory")


# ----------------------------------------------------------------------------- tables and pictures
HEAD = "claim; place; without it; number; with; without; effect [95 %]; worlds; verdict"
EFFECT = "{:+.2f} [{:+.2f}, {:+.2f}]"  # mean, low, high
NAMES = ("run_name", "recipe", "variant", "stage", "steps", "difficulty")


def difference(claim: Claim) -> str:
    """Describes the settings in which the claim's worse arm differs from its better one."""
    one, other = ARMS[claim.better], ARMS[claim.worse]
    if other.imitates:
        return f"no RL: imitates {other.start}"
    first, second = (vars(settings_of(name, 0, "")) for name in (claim.better, claim.worse))
    parts = [
        f"no {key}" if value == "" else f"{key} {value}"
        for key, value in second.items()
        if value != first[key] and key not in NAMES
    ]
    if one.start and not other.start:
        parts.append("no stage 1")
    return ", ".join(parts) or "nothing"


def rows(claims: dict, results: Results) -> list:
    """Returns the rows of the table: a header, then a row per claim with means over its worlds."""
    lines = [HEAD.split("; ")]
    for claim, worlds in claims.items():
        pairs, cells = values(claim, results, worlds), ["-"] * 3
        differences = [one - other for one, other in pairs]
        if pairs:
            cells = [f"{number:.2f}" for number in np.mean(pairs, axis=0)]
            effect = EFFECT.format(*interval(differences, 90 if claim.margin else 95))
            cells.append(effect + " (90 %)" * bool(claim.margin))
        cells += [str(len(pairs)), verdict(claim, differences)]
        lines.append([claim.says, claim.place, difference(claim), claim.number.name, *cells])
    return lines


def draw(names: list[str], results: Results, folder: Path) -> None:
    """Draws the training curves of both arms of each claim, averaged over worlds. A metric that
    neither arm has, as a KL under a recipe without one, gets no panel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        claim, panels = CLAIMS[name], defaultdict(dict)
        for label, arm in (("with", claim.better), ("without", claim.worse)):
            worlds = [result for (key, _), result in results.items() if key == arm]
            if not worlds:
                raise InputError(f"--curves: no result of {arm}: run --only {name} first")
            for metric, title in CURVES.items():
                means = np.mean([points(result, metric) for result in worlds], 0).ravel()  # [steps]
                if len(steps := np.flatnonzero(~np.isnan(means))):
                    panels[title][label] = steps, means[steps]
        says = f"{claim.says} (without: {difference(claim)})".replace("_", " ")
        draw_panels(panels, [], folder / f"claim_{name}.png", says)


def main(arguments: list[str] | None = None) -> None:
    options, _ = parse_flags("lab.ablate", AblateSettings, arguments)
    names = names_in("only", options.only, CLAIMS)
    runs, split, first, claims = options.output_dir, options.split, options.first_world, {}
    jobs = set()
    for claim in map(CLAIMS.get, names):
        claims[claim] = range(first, first + (options.seeds or claim.worlds))
        jobs |= {*product(wanted_arms(claim), claims[claim])}
    results = read_results(jobs, runs, split)
    if options.curves:
        return draw(names, results, Path(options.curves))
    if not options.table:
        os.environ["OMP_NUM_THREADS"] = "1"  # workers inherit it: each has one thread
        with interruptible("finished runs are kept: repeat the command to continue"):
            run_all(jobs - results.keys(), runs, split, options.workers)
        results = read_results(jobs, runs, split)
    print(format_table(rows(claims, results), True))


if __name__ == "__main__":
    run_main(main)
