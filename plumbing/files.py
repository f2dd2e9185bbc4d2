"""Writes the files of a run and its lines on the console. Only the main process writes.

A run may be killed at any moment. So the metrics of a step are written when the step ends, and a
checkpoint gets its final name only when it is complete. Files of an earlier run are renamed, never
overwritten.
"""

import contextlib
import fcntl
import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from safetensors import safe_open
from tqdm import tqdm

from errors import InputError, say_once
from flags import checkpoints, stage_folder
from formats.records import (
    append_jsonl,
    finished_records,
    moved_aside,
    write_records,
    write_text,
)
from formats.trajectories import append_trajectories, cut_trajectories
from papers import PAPERS, PROTOCOLS
from plumbing.alarms import alarms
from plumbing.record import step_records
from policy import Batch, check_model_path
from prompts import JUDGE_GAP, SECTIONS, is_layout
from settings import Settings
from trajectory import show

SHOW_EVERY = 5  # steps between decoded trajectories on the console


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name[-6:])


def newest_whole(folder: Path) -> Path | None:
    """Returns the last checkpoint that can be read, or None if the folder has no checkpoint. Prints
    a line about each later one. Raises an InputError if none can be read.
    """
    paths = checkpoints(folder)
    for path in reversed(paths):
        if not (damage := unreadable(path)):
            return path
        say_once(f"{path} is passed over: {damage}")
    if paths:
        raise InputError(f"{folder}: none of its checkpoints can be read: train that stage again")
    return None


def unreadable(checkpoint: Path) -> str:
    """Returns why a checkpoint cannot be loaded, or "". The headers of large files are read, which
    say how long the files are: this finds files that are missing or cut off, not changed bytes.
    """
    try:
        for name in ("settings.json", "config.json", "tokenizer.json"):
            json.loads((checkpoint / name).read_text(encoding="utf-8"))
        read_state(checkpoint)
        for file in [*checkpoint.glob("model*.safetensors")] or [checkpoint / "model.safetensors"]:
            with safe_open(file, "numpy"):
                pass
    except Exception as error:  # each library has its own
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


def read_state(checkpoint: Path) -> dict:
    """Reads trainer.pt. The moments of a 7B model are 57 GiB; with mmap, the processes of a machine
    share one copy of the file in memory. weights_only is set because a pickle could run any code.
    """
    return torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True, mmap=True)


def best_checkpoint(settings: Settings) -> Path:
    """Returns the first of the stage's checkpoints that are best by the recipe's metric (`best_by`,
    such as UR²'s F1), or the last checkpoint if no step was evaluated.
    """
    folder = stage_folder(settings)
    metric = f"eval/{PAPERS[settings.recipe].best_by}"
    scores = {
        row["step"] + 1: row[metric]
        for row in finished_records(folder / "metrics.jsonl")
        if metric in row
    }
    if not scores:
        # Another machine may have saved the checkpoints: without one here, return the folder.
        return (checkpoints(folder) or [folder])[-1]
    return folder / f"checkpoint-{max(scores, key=scores.get):06d}"


def prune(settings: Settings) -> None:
    """Deletes the stage's checkpoints except the last `keep_checkpoints` (0: all) and the best."""
    best = best_checkpoint(settings)
    keep = settings.keep_checkpoints
    for old in checkpoints(best.parent)[:-keep] if keep else []:
        if old != best:  # renamed first, so that a kill leaves no half checkpoint under this name
            shutil.rmtree(old.rename(old.with_name(old.name + ".partial")))


def starting_model(settings: Settings) -> str:
    """Returns the path of the weights that a stage began with, also if the run was resumed later;
    "" is the built-in model.
    """
    model = settings.model
    before = model or (stage_folder(settings, settings.stage - 1) if settings.stage > 1 else "")
    if before and (path := newest_whole(Path(before))):
        return str(path)  # `before` is a stage's folder
    if model:
        check_model_path(model)
    return model


def checkpoint_to_resume(settings: Settings) -> str:
    folder = stage_folder(settings)
    if path := newest_whole(folder):
        return str(path)
    others = [str(other) for other in folder.parent.glob("stage?") if checkpoints(other)]
    advice = f"give the --stage of {', '.join(others)}" if others else "leave --resume out"
    raise InputError(
        f"--resume: no checkpoint in {folder}; {advice} (all machines of a run must see this "
        "folder)"
    )


def prompt_sections(settings: Settings) -> dict[str, str]:
    """Parses --prompt_file into {section: text}. A line [NAME] is above each text; text before the
    first such line is the section policy.
    """
    if not settings.prompt_file:
        return {}
    whole = Path(settings.prompt_file).read_text(encoding="utf-8-sig")
    before, *rest = re.split(r"^\[([a-z:]+)\][ \t]*$", whole, flags=re.MULTILINE)
    texts = {"policy": before} if before.strip() or not rest else {}
    texts |= zip(rest[::2], rest[1::2], strict=True)
    for name, text in texts.items():
        texts[name] = text.strip()
        if fault := fault_of(name, text, settings):
            raise InputError(f"--prompt_file {settings.prompt_file}, section {name}: {fault}")
    return texts


# The placeholders that a text for a model must have if it has any; under ARENA that for the policy
# also {references}.
NEEDED = {
    "policy": ["{question}"],
    "reader": ["{question}", "{evidence}"],
    "summarizer": ["{query}", "{documents}"],
}


def fault_of(name: str, text: str, settings: Settings) -> str:
    """Returns what is wrong with a section: there is none of this name, a text with placeholders
    lacks one, or a text for the policy does not show a tag although the protocol reads it; else "".
    UR²'s answer has \\boxed, or "correct answer is", in place of a tag.
    """
    if name not in SECTIONS:
        return f"one of {', '.join(SECTIONS)}"
    protocol = PROTOCOLS[settings.protocol]
    model = name.partition(":")[0]
    needed = [*NEEDED.get(model, ())] if is_layout(text) else []
    if model == "judge" and JUDGE_GAP.search(text):
        needed = ["{gold}", "{answer}"]
    if model == "policy":
        if needed and protocol.references_in_prompt:
            needed.append("{references}")
        if protocol.query_tags and settings.retrieval and "direct" not in name:
            needed.append(protocol.query_tags[0])
        boxed = "correct answer is" if name.endswith(":choice") else "\\boxed"
        needed.append(protocol.answer_tags[0] if protocol.answer_tags else boxed)
    return next((f"it lacks {word}" for word in needed if word not in text), "")


def settings_text(settings: Settings) -> str:
    return json.dumps(vars(settings), indent=1) + "\n"


@functools.cache
def take(folder: Path):
    """Locks the folder of all stages of a run against other processes, which would mix their lines
    with ours. The cache keeps the returned file open, and so the lock, until this process ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "lock", "w", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{folder}: another process trains there: give a --run_name") from None
    return file


class Run:
    """Writes the folder of one stage and prints to the console."""

    def __init__(self, settings: Settings, accelerator):
        self.folder = stage_folder(settings)
        self.settings = settings
        self.accelerator = accelerator
        self.writes = accelerator.is_main_process
        self.records = []  # the metrics of all steps so far

    def open(self, first_step: int) -> None:
        """Prepares the folder of this stage, writes settings.json and starts the tracker."""
        if self.writes:
            take(self.folder.parent)
            if self.settings.resume:
                self.cut_back(first_step)
            else:
                self.move_earlier_run()
            write_text(self.folder / "settings.json", settings_text(self.settings))
            if self.settings.report_to:
                self.accelerator.init_trackers(
                    "-".join(self.folder.parts[-2:]), vars(self.settings)
                )
        self.accelerator.wait_for_everyone()

    def move_earlier_run(self) -> None:
        """Renames the folders that an earlier run left of this stage, and of the later stages,
        because they started from it.
        """
        for folder in sorted(self.folder.parent.glob("stage?")):
            if folder.name >= self.folder.name:
                old = moved_aside(folder).name
                print(f"{folder} held an earlier run: moved to {old} (--resume continues one)")
        self.folder.mkdir()

    def cut_back(self, first_step: int) -> None:
        """Removes the steps from `first_step` on from the logs, and renames later checkpoints."""
        metrics = self.folder / "metrics.jsonl"
        self.records = [row for row in finished_records(metrics) if row["step"] < first_step]
        write_records(metrics, self.records)
        cut_trajectories(self.folder, first_step)
        for path in self.folder.glob("checkpoint-*.partial"):  # left by a kill
            shutil.rmtree(path)
        for path in checkpoints(self.folder):
            if step_of(path) > first_step:
                moved_aside(path)

    def steps_to_do(self, first_step: int) -> Iterator[int]:
        s = self.settings
        self.progress = tqdm(
            desc=f"{s.recipe} stage {s.stage}",
            total=s.steps,
            initial=first_step,
            dynamic_ncols=True,
            disable=not self.writes,
        )
        with self.progress:
            yield from range(first_step, s.steps)
        if self.records[1:]:
            print(learned(self.records))
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def log(self, record: dict, rollouts, batch: Batch | None, tokenizer) -> None:
        if not self.writes:
            return
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
        self.records.append(rounded)
        raised = alarms(self.records, self.settings)
        if raised:  # they are in the record, so that no later step raises them again
            rounded["alarms"] = raised
        append_jsonl(self.folder / "metrics.jsonl", [rounded])
        append_trajectories(
            self.folder, step_records(record["step"], rollouts, batch, tokenizer, self.settings)
        )
        self.accelerator.log(record, record["step"])
        with contextlib.suppress(OSError):  # the terminal was closed, or Ctrl-C ended `tee`
            self.progress.update()
            self.progress.write("\n".join(self.lines_of(record, raised, rollouts)))

    def lines_of(self, record: dict, raised: dict, rollouts) -> Iterator[str]:
        """Yields the lines of a step on the console, with a trajectory every SHOW_EVERY steps."""
        step = record["step"]
        yield console_line(record)
        yield from (f"alarm: {cause} (python view.py shows the steps)" for cause in raised.values())
        if step % SHOW_EVERY == 0 or step + 1 == self.settings.steps:
            row = (step * 37) % len(rollouts.trajectories)
            yield from ("", show(rollouts.trajectories[row], rollouts.reward_terms[row]), "")


LEARNED = "searched {:.2f} -> {:.2f}, em {:.2f} -> {:.2f} over {} steps, training questions"
CONSOLE_METRICS = """
reward em eval/em searched searches fallbacks model_tokens frac_reward_zero_std grad_norm
""".split()


def learned(records: list[dict]) -> str:
    """Returns a line with the means of the first and of the last three steps.

    >>> learned([{"searched": step / 10, "em": 1 - step / 10} for step in range(8)])
    'searched 0.10 -> 0.60, em 0.90 -> 0.40 over 8 steps, training questions'
    """
    means = [
        fmean(record[name] for record in ends)
        for name in ("searched", "em")
        for ends in (records[:3], records[-3:])
    ]
    return LEARNED.format(*means, len(records))


def console_line(record: dict) -> str:
    shown = [f"{name} {record[name]:.2f}" for name in CONSOLE_METRICS if name in record]
    line = f"step {record['step']:>4}  " + "  ".join(shown)
    if record.get("search_errors"):
        line += f"  search_errors {record['search_errors']:.2f}"
    if record.get("skipped") == 1:
        line += f"  no update: no group to learn from, in {1 + record.get('resampled', 0)} draws"
    return line
