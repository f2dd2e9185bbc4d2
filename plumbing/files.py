"""The files of a run: where they lie, and what is written to them. Only the main process writes.

A run may be ended at any moment: a line of metrics is written whole, a checkpoint is renamed.
Predictions belong to what they were made with (settings, weights, questions), which stands beside
them. What does not belong to it any more, or to a run, is put aside, never overwritten.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import shutil
import signal
import weakref
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import torch
from tqdm import tqdm

from errors import InputError, raise_terminated, slow_step
from formats.manifest import wrong_with
from formats.records import (
    append_jsonl,
    finished_records,
    free_name,
    lock,
    read_whole,
    tell,
    write_records,
    write_text,
    writing,
)
from formats.trajectories import append_trajectories, cut_trajectories
from plumbing.alarms import alarms, report
from plumbing.record import step_records
from policy import Batch, check_model_path
from prompts import NEEDED, OPTIONAL, PROTOCOLS, SECTIONS, gaps_of
from settings import Settings, stage_folder
from summarizer import models_in
from trajectory import Trajectory, show

SHOW_EVERY = 5  # steps between decoded trajectories on the console
TRAINS = "trains in {}: wait for it, end it, or name this run with --run_name"
WRITES = "writes {}: wait for it, or name another with --out"
# The locks of this process, by path. Its number would not tell: in two containers both may be 1.
HELD = weakref.WeakValueDictionary()


def named_by(settings: Settings) -> list[str]:
    """The flags that lead to the same run."""
    names = ("recipe", "variant", "run_name", "output_dir", "seed", "world_seed")
    return [f"--{name}={getattr(settings, name)}" for name in names]


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first. What ends in .partial is half-written."""
    return sorted(path for path in folder.glob("checkpoint-*") if step_of(path) and path.is_dir())


def step_of(path: Path) -> int:
    """0 for what is no checkpoint."""
    found = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(found[1]) if found else 0


def newest_whole(folder: Path) -> Path | None:
    """The last checkpoint that is as it was written; later ones are named."""
    for path in reversed(checkpoints(folder)):
        if not (wrong := wrong_with(path, step_of(path))):
            return path
        tell(f"{path} is passed over: {wrong}")
    if found := checkpoints(folder):
        how = f"--model {found[-1]} takes its weights alone"
        raise InputError(f"{folder}: no whole checkpoint is there: start anew; {how}")
    return None


def best_checkpoint(folder: Path) -> Path:
    """The first with the best held-out answers; without --eval_every the last."""
    rows = finished_records(folder / "metrics.jsonl", cut=False, needs="step")
    scores = {row["step"] + 1: row["eval/em"] for row in rows if "eval/em" in row}
    if not scores:
        return (checkpoints(folder) or [folder])[-1]  # none: another machine has written it
    return folder / f"checkpoint-{max(scores, key=scores.get):06d}"


def prune(folder: Path, keep: int) -> None:
    """Only the last ones stay, and the best; 0 keeps all."""
    best = best_checkpoint(folder)
    for old in checkpoints(folder)[:-keep] if keep else []:
        if old != best:  # renamed first: a kill in between leaves no half checkpoint
            shutil.rmtree(old.rename(old.with_name(old.name + ".partial")))


def starting_model(settings: Settings) -> tuple[str, str]:
    """(where the weights come from, "" for the built-in model; what to say about it)."""
    stage, folder = settings.stage, stage_folder(settings)
    if settings.resume:
        if not (found := newest_whole(folder)):
            how = "leave it out to start anew (of several machines all must see this folder)"
            raise InputError(f"--resume: no checkpoint in {folder}; {how}")
        return str(found), f"going on from {found}"
    before, model = stage_folder(settings, stage - 1), settings.model
    if (model or stage > 1) and (found := newest_whole(Path(model or before))):
        model = str(found)  # the last of a stage's folder
    elif model:
        check_model_path(model)
    said = f"stage {stage} starts from {model or 'the built-in model'}"
    if stage > 1 and not model:
        said += f": there is no stage {stage - 1} checkpoint in {before}"
    return model, said


def prompt_sections(settings: Settings, strict: bool = False) -> dict[str, str]:
    """Section -> text of --prompt_file: a folder of NAME.txt (policy.math.txt is policy:math), or a
    file with a line [NAME] above each text. What stands before the first such line is [policy].
    strict: is a model asked that has a text in it?
    """
    path, texts = Path(settings.prompt_file), {}
    if not settings.prompt_file:
        return texts
    folder = path.is_dir()
    for file in sorted(path.glob("*.txt")) if folder else [path]:
        try:
            before, *rest = re.split(r"^\[([a-z:]+)\][ \t]*$", read_whole(file), flags=re.MULTILINE)
        except InputError as error:
            raise InputError(f"--prompt_file {error}") from None
        first = [(file.stem.replace(".", ":") if folder else "policy", before)]
        pairs = first * bool(before.strip() or not rest)
        for name, text in [*pairs, *zip(rest[::2], rest[1::2], strict=True)]:
            if wrong := wrong_with_prompt(name, text.strip(), settings):
                raise InputError(f"--prompt_file {file}, section {name}: {wrong}")
            texts[name] = text.strip()
    models = {"judge": settings.judge, "reader": settings.reader}
    models["summarizer"] = models_in(settings.summarizer)
    if strict and not any(models.get(name.partition(":")[0], True) for name in texts):
        raise InputError(f"--prompt_file {path}: no model that is asked here has a text in it")
    return texts


def wrong_with_prompt(name: str, text: str, settings: Settings) -> str:
    """Is there such a section? Has its text the gaps, and does it name the tags, that it needs?"""
    if name not in SECTIONS:
        return f"unknown; one of {', '.join(SECTIONS)}"
    if not text:
        return "it is empty"
    protocol, model, gaps = PROTOCOLS[settings.protocol], name.partition(":")[0], gaps_of(text)
    needed, others = NEEDED.get(model, "").split(), OPTIONAL.get(model, "").split()
    if protocol.references_in_prompt and model == "policy":
        needed.append("references")
    if wrong := gaps.difference(needed, others) or (gaps and {*needed} - gaps):
        known = f"of its gaps {needed} are needed, and {others} may be there"
        return f"the gap {{{min(wrong)}}} is unknown or missing: {known}"
    answer = (protocol.answer_tags or ["\\boxed"])[0]
    if not protocol.answer_tags and name.endswith(":choice"):
        answer = "correct answer is"
    searches = protocol.query_tags and settings.retrieval and "direct" not in name
    for tag in (answer, protocol.query_tags[0] if searches else answer):
        if model == "policy" and tag not in text:
            return f"protocol {protocol.name} is read by its tags: say in it how {tag} is written"
    return ""


def settings_text(settings: Settings) -> str:
    return json.dumps(dataclasses.asdict(settings), indent=1) + "\n"


def locked(folder: Path, how: int = fcntl.LOCK_EX, saying: str = TRAINS):
    """Locks a folder until the file that it returns is dropped. There is one writer: the lines of
    two runs would mix, and each would prune the other's checkpoints. The main process looks whether
    a process of another run is left (LOCK_EX); then all processes of this run hold it (LOCK_SH).
    An evaluation locks its predictions file likewise: `saying` is what the holder does there.
    """
    path = folder.with_name(f".{folder.name}.lock")
    if file := HELD.get(path):  # by this command, or by a run of this process that failed
        return file
    with writing(path):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            lock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(f"process {file.read().strip()} {saying.format(folder)}") from None
        if how == fcntl.LOCK_EX:
            file.truncate(0)
            print(os.getpid(), file=file, flush=True)
            lock(file, fcntl.LOCK_SH)
    HELD[path] = file
    return file


class Run:
    """The folder of one stage, and the console."""

    def __init__(self, settings: Settings, accelerator):
        self.folder, self.settings = stage_folder(settings), settings
        self.accelerator, self.main = accelerator, accelerator.is_main_process
        self.records = []  # of all steps so far
        self.at_once, self.ended = True, []  # may a signal end the run here? those that came

    def open(self, first_step: int) -> None:
        """All processes hold the folder until they end. Only the main one writes."""
        if self.settings.dry_run:
            return
        if self.main:
            self.lock = locked(self.folder)
            self.make_folder(first_step)
        self.accelerator.wait_for_everyone()
        if not self.main:
            self.lock = locked(self.folder, fcntl.LOCK_SH)

    def make_folder(self, first_step: int) -> None:
        """An earlier run is moved aside; --resume cuts it to its checkpoint."""
        # A later stage began with what this one is about to replace.
        stages = sorted(self.folder.parent.glob("stage?")) if not self.settings.resume else []
        stages = [stage for stage in stages if stage.name >= self.folder.name]
        _held = list(map(locked, stages))  # before any of them is renamed
        for folder in stages:
            old = free_name(folder)
            folder.rename(old)
            print(f"{folder} held an earlier run: moved to {old.name} (--resume goes on)")
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.settings.resume:
            metrics = self.folder / "metrics.jsonl"
            rows = finished_records(metrics, needs="step")
            self.records = [row for row in rows if row["step"] < first_step]
            write_records(metrics, self.records)
            cut_trajectories(self.folder, first_step)
            for path in self.folder.glob("checkpoint-*"):
                if path.suffix == ".partial":  # what a kill left: it would fill the disk
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                elif step_of(path) > first_step:
                    path.rename(free_name(path))
        write_text(self.folder / "settings.json", settings_text(self.settings))
        if self.settings.report_to:
            name = "-".join(self.folder.parts[-2:])
            self.accelerator.init_trackers(name, dataclasses.asdict(self.settings))

    def bar(self, first_step: int) -> Iterator[int]:
        s, title = self.settings, f"{self.settings.recipe} stage {self.settings.stage}"
        shown = {"desc": title, "dynamic_ncols": True, "disable": not self.main or s.dry_run}
        with tqdm(total=s.steps, initial=first_step, **shown) as self.progress:
            yield from range(first_step, first_step + 1 if s.dry_run else s.steps)
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def log(self, record: dict, rollouts, batch: Batch | None, environment) -> None:
        with contextlib.suppress(OSError):  # a closed terminal, `| tee log` that had a Ctrl-C
            self.progress.update()
        if not self.main:
            return
        if self.settings.dry_run:
            return self.progress.write("\n".join(report(record, rollouts, environment)))
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
        self.records.append(rounded)
        if raised := alarms(self.records, self.settings):
            rounded["alarms"] = raised
        if not self.folder.is_dir():
            raise InputError(f"{self.folder}: this folder was removed or renamed while it trained")
        append_jsonl(self.folder / "metrics.jsonl", [rounded])
        numbers = {name: its for name, its in rounded.items() if name != "alarms"}
        self.accelerator.log(numbers, record["step"])
        said = [f"alarm: {cause} (python view.py shows the steps)" for cause in raised.values()]
        said += filter(None, [slow_step([*map(seconds_of, self.records)])])
        lines, step = [console_line(record), *said], record["step"]
        if step % SHOW_EVERY == 0 or step + 1 == self.settings.steps:
            row = (step * 37) % len(rollouts.trajectories)
            lines += ["", show(rollouts.trajectories[row], rollouts.reward_terms[row]), ""]
        with contextlib.suppress(OSError):
            self.progress.write("\n".join(lines))
        some = step_records(step, rollouts, batch, environment.tokenizer, self.settings)
        append_trajectories(self.folder, some)

    def saves(self, step: int) -> bool:
        done, s = step + 1, self.settings
        return 0 in (done - s.steps, done % s.save_every, done % (s.eval_every or s.steps))

    def terminate(self, number: int, *_) -> None:
        """Handles a signal. It ends the run at once where nothing is half done, otherwise when the
        step is; then what was learned is saved. Only a second Ctrl-C ends it without that.
        """
        self.ended.append(number)
        if self.ended.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self.main and not self.settings.dry_run:
            with contextlib.suppress(OSError):  # not printed: that may be what was interrupted
                os.write(2, b"\nwhat was learned is saved first; Ctrl-C again ends at once\n")
        if self.at_once or self.settings.dry_run:
            self.at_once = False  # another signal must not break the saving
            raise_terminated(number)

    def check_finite(self, result: dict, step: int, part: Batch, rows: list[Trajectory]) -> None:
        names = ("loss", "grad_norm", "value_loss", "critic_grad_norm")
        wrong = [f"{n} {result[n]}" for n in names if not math.isfinite(result.get(n, 0.0))]
        if not wrong:
            return
        path = self.folder / f"non_finite_step{step}.pt"
        where = "" if self.settings.dry_run else f" The batch is in {path};"
        if self.main and where:
            torch.save(dataclasses.asdict(part), path)
        ids = ", ".join(dict.fromkeys(row.question.id for row in rows))
        said = f"stopped; this update was not applied.{where} its questions: {ids}"
        raise InputError(f"step {step}: {', '.join(wrong)}; {said}")


def go_on(out: Path, made_with: dict, expected: list, key, batch: int, fresh: bool) -> list[dict]:
    """The records of `out` that need not be made again, in whole batches, which share a seed; the
    others leave it. `expected`: each one's key, in order; one without a key was spoilt.
    """
    beside = out.with_name(out.name + ".settings.json")
    text = json.dumps(made_with, indent=1)
    same = beside.is_file() and beside.read_text(encoding="utf-8") == text
    records = finished_records(out) if same and not fresh else []
    pairs = zip(map(key, records), expected, strict=False)
    good = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if good < len(expected):
        good -= good % batch
    if out.is_file() and out.stat().st_size and (good < len(records) or not same or fresh):
        kept = free_name(out)
        os.replace(out, kept)
        print(f"the predictions that were in {out} are kept as {kept.name}")
    write_records(out, records[:good])
    beside.write_text(text, encoding="utf-8")
    return records[:good]


def seconds_of(record: dict) -> float:
    """What a step took, without evaluation and saving."""
    parts = ("rollout_seconds", "reward_seconds", "update_seconds")
    return sum(record.get(part, 0.0) for part in parts)


SHOWN = """
reward em eval/em searched searches fallbacks model_tokens frac_reward_zero_std grad_norm
""".split()


def console_line(record: dict) -> str:
    shown = [f"{name} {record[name]:.2f}" for name in SHOWN if name in record]
    line = f"step {record['step']:>4}  " + "  ".join(shown)
    if record.get("search_errors"):
        line += f"  search_errors {record['search_errors']:.2f}"
    if record.get("skipped") == 1:
        line += f"  no update: no group to learn from, in {1 + record.get('resampled', 0)} draws"
    return line
