"""Which of the papers' claims hold in the built-in world? The pairs of runs stand in lab/claims.py.

    python -m lab.ablate               two worlds, all claims: half an hour on two cores
    python -m lab.ablate --seeds 0     the final set: as many worlds as each claim asks for
    python -m lab.ablate --only mask,penalty --seeds 5
    python -m lab.ablate --table       the table of what is there; runs nothing
    python -m lab.ablate --curves docs --only stage1,penalty,stage2,two_stages     pictures of them

Evaluation: all questions about held-out entities, two samples each, at the temperature of
training. Each finished arm of each world leaves a result.json, with the settings that made it:
interrupted, it goes on from there, and what was made with other settings is refused. Choose with
--first_world 40 --split dev. Left out: more machines.
"""

import json
import multiprocessing
import os
import shutil
import time
import traceback
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from data import Question
from errors import InputError, check_output, run_main, setting
from eval import Evaluation, Options
from formats.records import finished_records, write_records
from lab import difficulty, interruptible, names_in, parse_flags
from lab.claims import ARMS, CLAIMS, LOOKUPS, Claim, Results, interval, values, verdict, wanted_arms
from lab.distil import DistilSettings, distil
from metrics import exact_match
from other_models.reader import add_reader, reader_answers
from papers import paper_of
from plumbing.build import build_reader, end_with_launcher
from plumbing.files import checkpoints
from plumbing.questions import built_in_world
from plumbing.report import written
from prompts import PROTOCOLS
from retriever import make_retriever
from settings import Settings, check_settings, resolve, stage_folder
from train import train
from view import load_pyplot
from world.toy import toy_path

SAMPLES = 2  # of each question
SCORES = {*"em cem words searches format exact_set reader_em rag_em".split()}  # of evaluations
SFT = {"epochs": 3.0, "lr": 1e-3}  # R1-Searcher section 4.1: three epochs
ROLLOUTS = 4  # of each training question, where traces or difficulties are wanted
KEPT = """
reward model_tokens em/one_hop em/two_hop searches/one_hop searches/two_hop searches/arithmetic
searches/known fallbacks grad_norm k2 k3
""".split()  # of metrics.jsonl


@dataclass(frozen=True)
class AblateSettings:
    """The papers' claims in the built-in world."""

    seeds: int = setting(2, "worlds per claim; 0: as many as each asks for", least=0)
    first_world: int = setting(50, "no setting was chosen on worlds from 50 to 57")
    split: str = setting("test", "of the entities that are asked about", one_of=("dev", "test"))
    only: str = setting("", f"claims, comma-separated: {', '.join(CLAIMS)}")
    output_dir: str = setting("runs/ablate", "folder of the arms")
    workers: int = setting(os.cpu_count() or 1, "arms at a time, one core each", least=1)
    table: bool = setting(False, "run nothing: the table of what is there")
    json: str = setting("", "a file for what each arm scored in each world")
    curves: str = setting("", "run nothing: a folder for pictures of what is there")


# -------------------------------------------------------------------------------- an arm's settings
def result_path(runs: str, arm: str, seed: int) -> Path:
    return Path(runs) / f"{arm}-world{seed}" / "result.json"


def settings_of(name: str, seed: int, runs: str) -> Settings:
    """An arm in one world. The world's number is the seed of questions and sampling too."""
    arm = ARMS[name]
    given = {
        "output_dir": runs,
        "run_name": f"{name}-world{seed}",
        "seed": seed,
        "world_seed": seed,
    }
    given |= {"save_every": 10_000, "keep_checkpoints": 1}  # the last step saves by itself
    if "buckets" in arm.changes:
        given["difficulty"] = str(result_path(runs, name, seed).with_name("difficulty.jsonl"))
    return check_settings(resolve(arm.recipe, arm.stage, True, given | arm.changes))


def made_with(name: str, split: str) -> dict:
    """All that an arm's result depends on but its world, and all that its start depends on."""
    settings = settings_of(name, 0, "")
    warm_up = str(paper_of(settings.protocol).warmed_up(settings.toy_init))
    before = ARMS[name].start or ARMS[name].traces_of
    own = {"split": split, "settings": asdict(settings), "warm_up": warm_up}
    return own | {"start": made_with(before, split) if before else {}}


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
    result |= {"prior": prior, "made_with": made_with(name, split)}
    write_records(path, [result])  # there is no result that is not whole
    return f"{time.perf_counter() - start:.0f} s, {prior:.3f} searches per look-up before RL"


def last_of(name: str, seed: int, runs: str) -> str:
    folder = stage_folder(settings_of(name, seed, runs))
    if not (found := checkpoints(folder)):
        raise InputError(f"{folder} has no checkpoint any more: remove {folder.parent}")
    return str(found[-1])


def reinforce(name: str, seed: int, runs: str) -> tuple[str, dict]:
    """(checkpoint, number -> its values by step, those of the arm that it started from first)."""
    settings, curve = settings_of(name, seed, runs), {}
    if before := ARMS[name].start:
        settings = replace(settings, model=last_of(before, seed, runs))
        if settings.difficulty:  # for the model that it starts from
            how = ["--out", settings.difficulty, "--samples", str(ROLLOUTS)]
            difficulty.main(["--model", settings.model, *how])
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
    model = str(toy_path(settings.world_seed, settings.protocol, settings.toy_init, runs))
    traces = str(out.with_name("traces.jsonl"))
    evaluate(teacher, settings, "train", ROLLOUTS, traces)
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
    protocol, warm_up = settings.protocol, settings.toy_init
    if PROTOCOLS[protocol].query_tags is None:
        return 0.0
    file = f"prior-{split}-{settings.documents_per_search}-{settings.summarizer}.json"
    path = toy_path(seed, protocol, warm_up, runs) / file
    if not path.exists():
        # In a file of the arm's own: another worker may measure the same model just now.
        out = str(result_path(runs, name, seed).with_name("prior.jsonl"))
        rows = means(evaluate("", settings, split, out=out))
        own = [rows[kind]["searches"] for kind in LOOKUPS.split()]
        write_records(path, [{"searches": float(np.mean(own))}])
    found, limit = read_result(path)["searches"], paper_of(protocol).warmed_up(warm_up).prior
    why = f"{found:.3f} searches per look-up before RL"
    print(f"prior: {why}")
    if found > limit:
        limits = f"and at most {limit} are allowed: this world is left out"
        raise InputError(f"the prior of --toy_init {warm_up} is off: {why}, {limits}")
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
            for number in SCORES & record["metrics"].keys():
                found[kind][number].append(record["metrics"][number])
    return {k: {n: round(np.mean(own), 4) for n, own in its.items()} for k, its in found.items()}


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


def read_results(jobs: list[tuple[str, int]], runs: str, split: str) -> Results:
    """What is there of these arms and worlds. A result of other settings is never mixed in."""
    found = {}
    for name, seed in jobs:
        path = result_path(runs, name, seed)
        if path.exists():
            found[name, seed] = read_result(path)
            if found[name, seed].get("made_with") != made_with(name, split):
                advice = "give another --output_dir, or remove it"
                raise InputError(f"{path} was made with other settings: {advice}")
    return found


def chains(jobs: list[tuple[str, int]]) -> list[tuple[list[str], int]]:
    """(arms, world) of each process to come, world by world: the arms of one recipe, in turn."""
    found = defaultdict(list)
    for name, seed in sorted(jobs, key=lambda job: job[1]):
        found[ARMS[name].recipe, seed].append(name)
    return [(names, seed) for (_, seed), names in found.items()]


def run_chain(names: list[str], seed: int, runs: str, split: str) -> None:
    """A failed arm is reported, and takes along only what starts from it."""
    failed = set()
    for name in names:
        try:
            if before := {ARMS[name].start, ARMS[name].traces_of} & failed:
                raise InputError(f"{min(before)} is not there")
            message = run_arm(name, seed, runs, split)
        except Exception as error:  # whatever it was, it stops no other arm
            failed.add(name)
            rejected = isinstance(error, InputError)
            message = f"not run: {error}" if rejected else f"failed: {error!r} (see its log.txt)"
        print(f"{name} in world {seed}: {message}", flush=True)


def one_core() -> None:
    """Of a worker, in `train` too: its share as one process of as many as there are cores."""
    os.environ["LOCAL_WORLD_SIZE"] = str(os.cpu_count() or 1)
    torch.set_num_threads(1)
    end_with_launcher()


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


# ----------------------------------------------------------------------------- tables and pictures
NAMES = ("run_name", "recipe", "variant", "stage", "steps", "difficulty")


def difference(claim: Claim) -> str:
    """What the second arm sets otherwise, or lacks."""
    one, other = ARMS[claim.better], ARMS[claim.worse]
    if other.traces_of:
        return f"no RL: imitates {other.traces_of}"
    here, there = (vars(settings_of(name, 0, "")) for name in (claim.better, claim.worse))
    differing = [key for key in there if here[key] != there[key] and key not in NAMES]
    found = [f"{key} {there[key]}" if there[key] != "" else f"no {key}" for key in differing]
    found += ["no stage 1"] if one.start and not other.start else []
    return ", ".join(found) or "nothing"


def rows(claims: dict[Claim, range], results: Results) -> list[list[str]]:
    """A header, and a line for each claim over its worlds."""
    head = "claim; place; without it; number; with; without; effect [95 %]; worlds; verdict"
    lines = [head.split("; ")]
    for claim, worlds in claims.items():
        pairs, cells = values(claim, results, worlds), ["-", "-", "-"]
        differences = [one - other for one, other in pairs]
        if pairs:
            mean, low, high = interval(differences, 90 if claim.margin else 95)
            cells = [f"{number:.2f}" for number in np.mean(pairs, axis=0)]
            note = " (90 %)" if claim.margin else ""
            cells.append(f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]{note}")
        asked = [claim.says, claim.place, difference(claim), claim.number.name]
        lines.append([*asked, *cells, str(len(pairs)), verdict(claim, differences)])
    return lines


def draw(names: list[str], results: Results, folder: Path) -> None:
    """Draws what is kept of training for both arms of each claim, mean over worlds."""
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        figure, axes = pyplot.subplots(3, 4, figsize=(16, 9), layout="constrained")
        for arm in (CLAIMS[name].better, CLAIMS[name].worse):
            curves = [result["curve"] for (own, _), result in results.items() if own == arm]
            if not curves:
                raise InputError(f"--curves: no result of {arm}: run --only {name} first")
            for axis, key in zip(axes.flat, KEPT, strict=True):
                axis.plot(np.mean([np.array(curve[key], float) for curve in curves], 0), label=arm)
                axis.set_title(key)
        axes[0, 0].legend()
        figure.savefig(folder / f"claim_{name}.png")
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    options, _ = parse_flags("lab.ablate", AblateSettings, arguments)
    if options.json:
        check_output(options.json, "--json")
    names = names_in("only", options.only, CLAIMS)
    runs, split, first, claims = options.output_dir, options.split, options.first_world, {}
    for claim in map(CLAIMS.get, names):
        claims[claim] = range(first, first + (options.seeds or claim.worlds))
    needed = {(arm, n) for claim in claims for arm in wanted_arms([claim]) for n in claims[claim]}
    jobs = sorted(needed, key=lambda job: [*ARMS].index(job[0]))
    if not (options.table or options.curves):
        results = read_results(jobs, runs, split)
        with interruptible("finished arms are kept: the same command goes on"):
            todo = chains([job for job in jobs if job not in results])
            run_all(todo, runs, split, options.workers)
    results = read_results(jobs, runs, split)
    if options.curves:
        return draw(names, results, Path(options.curves))
    if options.json:
        scores = {f"{arm}-world{seed}": result["eval"] for (arm, seed), result in results.items()}
        write_records(Path(options.json), [scores])
    print(written(rows(claims, results), True, 1))


if __name__ == "__main__":
    run_main(main)
