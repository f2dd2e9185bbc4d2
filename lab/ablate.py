"""Which of the papers' claims hold in the built-in world? The pairs of runs stand in lab/claims.py.

    python -m lab.ablate               two worlds, all claims: half an hour on two cores
    python -m lab.ablate --seeds 0     the final set: as many worlds as each claim asks for
    python -m lab.ablate --only mask,penalty --seeds 5
    python -m lab.ablate --table       the table of what is there; runs nothing
    python -m lab.ablate --curves docs four pictures of what is there

Evaluation: all questions about held-out entities, two samples each, at the temperature of
training. Each finished arm of each world leaves a result.json, with the commit and date that made
it and a hash of its settings: interrupted, it goes on from there, and what was made with other
settings is told, never mixed in. Choose with --first_world 40 --split dev. Left out: more machines.
"""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch

from data import Question
from errors import InputError, run_main, setting
from eval import Evaluation, Options
from formats.records import finished_records, write_records
from lab import interruptible, names_in, parse_flags
from lab.claims import ARMS, CLAIMS, LOOKUPS, Claim, Results, interval, values, verdict, wanted_arms
from lab.distil import DistilSettings, distil
from metrics import exact_match
from other_models.reader import reader_answers
from papers import paper_of
from plumbing.build import built_in_world, end_with_launcher
from plumbing.files import checkpoints, stage_folder
from plumbing.report import written
from plumbing.score import add_reader, build_reader
from prompts import PROTOCOLS
from retriever import make_retriever
from settings import Settings, check_settings, resolve
from train import train
from view import load_pyplot
from world.toy import READER, toy_path

SAMPLES = 2  # of each question
SFT, SFT_SAMPLES = {"epochs": 3.0, "lr": 1e-3}, 4  # R1-Searcher section 4.1: three epochs
KEPT = """
reward em/one_hop em/two_hop searches/one_hop searches/two_hop searches/arithmetic
searches/known fallbacks grad_norm k2 k3
""".split()  # of metrics.jsonl


@dataclass(frozen=True)
class AblateSettings:
    """The papers' claims in the built-in world."""

    seeds: int = setting(2, "worlds per claim; 0: as many as each asks for", least=0)
    first_world: int = setting(22, "no setting was chosen on worlds from 22 to 39")
    split: str = setting("test", "of the entities that are asked about", one_of=("dev", "test"))
    only: str = setting("", f"claims, comma-separated: {', '.join(CLAIMS)}")
    runs: str = setting("runs/ablate", "folder of the arms")
    workers: int = setting(os.cpu_count() or 1, "arms at a time, one core each", least=1)
    table: bool = setting(False, "run nothing: the table of what is there")
    markdown: bool = setting(False, "print Markdown tables")
    arms: bool = setting(False, "print what each arm scored, too")
    curves: str = setting("", "run nothing: a folder for pictures of what is there")


# -------------------------------------------------------------------------------- an arm's settings
def result_path(runs: str, arm: str, seed: int) -> Path:
    return Path(runs) / f"{arm}-world{seed}" / "result.json"


def settings_of(name: str, seed: int, runs: str) -> Settings:
    """An arm in one world. The world's number is the seed of questions and sampling too."""
    arm = ARMS[name]
    given = {"runs": runs, "name": f"{name}-world{seed}", "seed": seed, "world_seed": seed}
    given |= {"save_every": 10_000, "keep_checkpoints": 1}  # the last step saves by itself
    return check_settings(resolve(arm.recipe, arm.stage, True, given | arm.changes))


def made_with(name: str, split: str) -> str:
    """A hash of all that an arm's result hangs on but its world, its start's too."""
    arm, settings = ARMS[name], asdict(settings_of(name, 0, ""))
    tiny = paper_of(settings["protocol"]).warmed_up(settings["warm_up"])
    parts = [settings, asdict(tiny), READER, SFT, SFT_SAMPLES, SAMPLES, split]
    parts += [made_with(before, split) for before in (arm.start, arm.traces_of) if before]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@functools.cache
def commit() -> str:
    """Of the code that runs; "+" behind it where files were changed since."""
    root = Path(__file__).parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# --------------------------------------------------------------------------------------- one arm
def run_arm(name: str, seed: int, runs: str, split: str) -> str:
    """Train and evaluate one arm in one world; says its seconds, and the prior that it had."""
    path, start = result_path(runs, name, seed), time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(path.with_name("log.txt"), "w", encoding="utf-8") as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        try:
            prior = checked_prior(name, seed, runs, split)
            how = imitate if ARMS[name].traces_of else reinforce
            trained, curve = how(name, seed, runs)
            result = {"eval": measured(name, seed, runs, split, trained), "curve": curve}
        except Exception:
            traceback.print_exc()
            raise
    seconds = time.perf_counter() - start
    result |= {"prior": prior, "seconds": seconds, "settings": made_with(name, split)}
    result |= {"commit": commit(), "date": str(date.today())}
    write_records(path, [result])  # there is no result that is not whole
    return f"{seconds:.0f} s, {prior:.3f} searches per look-up before RL"


def last_of(name: str, seed: int, runs: str) -> str:
    folder = stage_folder(settings_of(name, seed, runs))
    if not (found := checkpoints(folder)):
        raise InputError(f"{folder} has no checkpoint any more: remove {folder.parent}")
    return str(found[-1])


def reinforce(name: str, seed: int, runs: str) -> tuple[str, dict]:
    """(checkpoint, number -> its values by step, those of the arm that it started from first)."""
    settings, curve = settings_of(name, seed, runs), {}
    if before := ARMS[name].start:
        settings = replace(settings, start_from=last_of(before, seed, runs))
        curve = read_result(result_path(runs, before, seed))["curve"]
    folder = train(settings)
    lines = finished_records(folder / "metrics.jsonl")
    for line in lines:
        if not line.get("searches"):  # nothing could fall back
            line.pop("fallbacks", None)
    for key in KEPT:
        # a step may have no question of a kind
        own = [round(line[key], 4) if key in line else None for line in lines]
        curve[key] = curve.get(key, []) + own
    return str(checkpoints(folder)[-1]), curve


def imitate(name: str, seed: int, runs: str) -> tuple[str, dict]:
    """As `reinforce`, without RL: three epochs over the right trajectories of training questions
    (R1-Searcher section 4.1).
    """
    settings, teacher = settings_of(name, seed, runs), last_of(ARMS[name].traces_of, seed, runs)
    out = stage_folder(settings) / "checkpoint-sft"
    model = str(toy_path(settings.world_seed, settings.protocol, settings.warm_up, runs))
    traces = str(out.with_name("traces.jsonl"))
    evaluate(teacher, settings, "train", SFT_SAMPLES, traces)
    shutil.rmtree(out, ignore_errors=True)  # an interrupted arm's
    distil("traces", DistilSettings(model, traces, str(out), settings.protocol, **SFT))
    return str(out), {}


def evaluate(model: str, settings: Settings, split: str, samples=SAMPLES, out="") -> list[dict]:
    """Prediction records of all questions, sampled as in training; "" is the warmed-up model. None
    of an interrupted arm are gone on with: its weights are made anew.
    """
    options = Options(split=split, questions=0, samples=samples, fresh=True, out=out)
    return Evaluation(replace(settings, model=model), options).run()


def checked_prior(name: str, seed: int, runs: str, split: str) -> float:
    """Searches per held-out look-up of the warmed-up model, measured once; no more than it says."""
    settings = settings_of(name, seed, runs)
    if PROTOCOLS[settings.protocol].query_tags is None:
        return 0.0
    file = f"prior-{split}-{settings.documents_per_search}-{settings.summarizer}.json"
    path = toy_path(seed, settings.protocol, settings.warm_up, runs) / file
    if not path.exists():
        rows = means(evaluate("", settings, split))
        found = float(np.mean([rows[kind]["searches"] for kind in LOOKUPS.split()]))
        write_records(path, [{"searches": found}])
    found = read_result(path)["searches"]
    print(f"prior: {found:.3f} searches per look-up before RL")
    limit = paper_of(settings.protocol).warmed_up(settings.warm_up).prior
    if found > limit:
        why = f"{found:.3f} searches per look-up before RL, and at most {limit} are allowed"
        what = f"the prior of --warm_up {settings.warm_up} is off"
        raise InputError(f"{what}: {why}: this world is left out")
    return found


def measured(name: str, seed: int, runs: str, split: str, model: str) -> dict[str, dict]:
    """kind -> number -> mean on held-out entities; of evidence the reader's answers too."""
    settings = settings_of(name, seed, runs)
    records = evaluate(model, settings, split)
    for record in records:
        record["metrics"]["words"] = float(len((record["prediction"] or "").split()))
    if PROTOCOLS[settings.protocol].evidence_tags:
        reader = build_reader(settings)
        records = add_rag(add_reader(records, reader), reader, settings)
    return means(records)


def means(records: list[dict]) -> dict[str, dict[str, float]]:
    """kind, and "all" -> number -> mean over the records that have it."""
    found = defaultdict(lambda: defaultdict(list))
    for record in records:
        for kind in (record["kind"], "all"):
            for number, value in record["metrics"].items():
                found[kind][number].append(value)
    return {k: {n: float(np.mean(own)) for n, own in its.items()} for k, its in found.items()}


def add_rag(records: list[dict], reader, settings: Settings) -> list[dict]:
    """What the reader answers from its own search for the question (R-Search Figure 2: Vanilla)."""
    retriever = make_retriever(built_in_world(settings).documents, settings, settings.seed)
    found = retriever.search([r["question"] for r in records], settings.documents_per_search)
    texts = [" ".join(d.text for d in some) for some in found]
    asked = [Question("", record["question"], record["golds"]) for record in records]
    pairs = list(zip(asked, texts, strict=True))
    for record, answer in zip(records, reader_answers(reader, pairs), strict=True):
        record["metrics"]["rag_em"] = exact_match(answer, record["golds"], "delete")
    return records


# --------------------------------------------------------------------------------------- all arms
def read_result(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def chains(arms: dict[str, range], runs: str, split: str) -> list[tuple[list[str], int]]:
    """(arms, world) of each process to come: arms of one warmed-up model. `arms`: the worlds of
    each. A result of other settings is refused: it would be lost.
    """
    results, others = read_results(arms, runs, split)
    if others:
        why = "was made with other settings: give another --runs, or remove it"
        raise InputError(f"{others[0]} {why}")
    todo = defaultdict(list)
    for seed in sorted({seed for worlds in arms.values() for seed in worlds}):
        for name, worlds in arms.items():
            if seed in worlds and (name, seed) not in results:
                settings = settings_of(name, seed, runs)
                todo[seed, settings.protocol, settings.warm_up].append(name)
    return [(names, seed) for (seed, *_), names in todo.items()]


def run_chain(names: list[str], seed: int, runs: str, split: str) -> None:
    """A failed arm is told, and takes along only what starts from it."""
    failed = set()
    for name in names:
        try:
            if before := {ARMS[name].start, ARMS[name].traces_of} & failed:
                raise InputError(f"{min(before)} is not there")
            said = run_arm(name, seed, runs, split)
        except Exception as error:  # whatever it was, it stops no other arm
            failed.add(name)
            refused = isinstance(error, InputError)
            said = f"not run: {error}" if refused else f"failed: {error!r} (see its log.txt)"
        print(f"{name} in world {seed}: {said}", flush=True)


def one_core() -> None:
    """Of a worker, in `train` too: its share as one process of as many as there are cores."""
    os.environ["LOCAL_WORLD_SIZE"] = str(os.cpu_count() or 1)
    torch.set_num_threads(1)
    end_with_launcher()
    commit()  # as it is now, whatever is committed while it runs


def run_all(todo: list, runs: str, split: str, workers: int) -> None:
    """World by world; no chain waits in the pool, where it would outlive a Ctrl-C."""
    running, context = set(), multiprocessing.get_context("spawn")  # forked threads of torch hang
    with ProcessPoolExecutor(workers, context, one_core) as pool:
        while todo or running:
            while todo and len(running) < workers:
                running.add(pool.submit(run_chain, *todo.pop(0), runs, split))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                if error := future.exception():
                    raise InputError(f"{error}: fewer --workers need less memory; go on with them")


def read_results(arms: dict[str, range], runs: str, split: str) -> tuple[Results, list[str]]:
    """(what is there of these arms in their worlds, the files that other settings made)."""
    found, others = {}, []
    for name, worlds in arms.items():
        made = made_with(name, split)
        for seed in worlds:
            path = result_path(runs, name, seed)
            result = read_result(path) if path.exists() else {"settings": ""}
            if result["settings"] == made:
                found[name, seed] = result
            elif path.exists():
                others.append(str(path))
    return found, others


# ----------------------------------------------------------------------------- tables and pictures
def difference(claim: Claim) -> str:
    """What the second arm sets otherwise, or lacks."""
    one, other = ARMS[claim.better], ARMS[claim.worse]
    if other.traces_of:
        return f"no RL: imitates {other.traces_of}"
    here, there = (vars(settings_of(name, 0, "")) for name in (claim.better, claim.worse))
    differing = [key for key in there if here[key] != there[key] and key not in NAMES]
    told = [f"{key} {there[key]}" if there[key] != "" else f"no {key}" for key in differing]
    if one.start and not other.start:
        told.append("no stage 1")
    return ", ".join(told) or "nothing"


NAMES = ("name", "recipe", "variant", "stage", "steps")


def rows(claims: dict[Claim, range], results: Results) -> list[list[str]]:
    """A header, and a line for each claim over its worlds."""
    head = "claim; place; without it; number; with; without; effect [95 %]; worlds; verdict"
    lines = [head.split("; ")]
    for claim, worlds in claims.items():
        pairs, cells = values(claim, results, worlds), ["-", "-", "-"]
        differences = [one - other for one, other in pairs]
        if pairs:
            mean, low, high = interval(differences, 90 if claim.margin else 95)
            one, other = np.mean(pairs, axis=0)
            cells = [f"{one:.2f}", f"{other:.2f}", f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"]
            cells[2] += " (90 %)" if claim.margin else ""
        told = [claim.says, claim.place, difference(claim), claim.number.name]
        lines.append([*told, *cells, str(len(pairs)), verdict(claim, differences)])
    return lines


ARM_CELLS = """
one_hop em; two_hop em; known em; arithmetic em; one_hop searches; two_hop searches; known searches;
arithmetic searches; all format
"""


def arm_rows(results: Results) -> list[list[str]]:
    """Each arm, mean over worlds: searches per look-up before RL, and the evaluation."""
    cells = [cell.split() for cell in ARM_CELLS.split(";")]
    lines = [["arm", "prior", *map(" ".join, cells), "seconds", "worlds"]]
    for arm, group in itertools.groupby(results, key=lambda key: key[0]):
        found = [results[key] for key in group]
        line = [np.mean([result["prior"] for result in found])]
        for kind, name in cells:
            line.append(np.mean([r["eval"].get(kind, {}).get(name, np.nan) for r in found]))
        shown = ["-" if np.isnan(value) else f"{value:.2f}" for value in line]
        seconds = f"{np.mean([result['seconds'] for result in found]):.0f}"
        lines.append([arm, *shown, seconds, str(len(found))])
    return lines


def made_by(results: Results) -> str:
    """Which code made them, and when."""
    commits, days = ({r[key] for r in results.values()} for key in ("commit", "date"))
    hashes = sorted({r["settings"] for r in results.values()})
    whole = hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:12]
    names, when = ", ".join(sorted(commits)), ", ".join(sorted(days))
    return f"{len(results)} runs, commit {names}, settings {whole}, {when}"


PICTURES = {  # claim -> (title, metric) of the panel beside look-up EM
    "stage1": ("searches per look-up", "searches"),
    "penalty": ("searches per sum", "searches/arithmetic"),
    "stage2": ("searches, known facts", "searches/known"),
    "two_stages": ("searches per look-up", "searches"),
}


def curve_of(result: dict, name: str) -> np.ndarray:
    """[steps]; of look-ups the mean of both kinds; a step without a question of its kind is nan."""
    names = [name] if "/" in name else [f"{name}/{kind}" for kind in LOOKUPS.split()]
    return np.mean([np.array(result["curve"][n], float) for n in names], axis=0)


def draw(results: Results, folder: Path) -> None:
    """Of each claim of PICTURES both arms over steps: mean and range over worlds."""
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    for name, panel in PICTURES.items():
        claim, size = CLAIMS[name], {"figsize": (10, 3.4), "constrained_layout": True}
        figure, axes = pyplot.subplots(1, 2, **size)
        for axis, (title, metric) in zip(axes, (panel, ("look-up EM", "em")), strict=True):
            for arm in (claim.better, claim.worse):
                found = [result for (its, _), result in results.items() if its == arm]
                if not found:
                    raise InputError(f"--curves: no result of {arm}: run --only {name} first")
                curves = np.array([curve_of(result, metric) for result in found])  # [worlds, steps]
                steps = np.arange(curves.shape[1])
                axis.plot(steps, curves.mean(0), label=f"{arm} ({len(found)} worlds)")
                axis.fill_between(steps, curves.min(0), curves.max(0), alpha=0.2)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("step")
            axis.grid(alpha=0.25)
        axes[0].legend(fontsize=8, frameon=False)
        figure.suptitle(claim.says, fontsize=11)
        figure.savefig(folder / f"claim_{name}.png", dpi=100)
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    options, _ = parse_flags("lab.ablate", AblateSettings, arguments)
    names = names_in("only", options.only, CLAIMS)
    runs, split, first, claims = options.runs, options.split, options.first_world, {}
    arms = dict.fromkeys(wanted_arms([CLAIMS[name] for name in names]), range(0))
    for claim in map(CLAIMS.get, names):
        claims[claim] = range(first, first + (options.seeds or claim.worlds))
        for name in wanted_arms([claim]):
            arms[name] = max(arms[name], claims[claim], key=len)
    if not (options.table or options.curves):
        todo = chains(arms, runs, split)
        with interruptible("finished arms are kept: the same command goes on"):
            run_all(todo, runs, split, options.workers)
    results, others = read_results(arms, runs, split)
    if others:
        said = f"{len(others)} results were made with other settings, the first {others[0]}"
        print(f"warning: {said}: not counted", file=sys.stderr)
    if options.curves:
        return draw(results, Path(options.curves))
    print(written(rows(claims, results), options.markdown, 1))
    if options.arms:
        print("\n" + written(arm_rows(results), options.markdown, 1))
    if results:
        print("\n" + made_by(results))


if __name__ == "__main__":
    run_main(main)
