"""Reads and writes trajectories.jsonl.gz, which has one line of JSON per saved trajectory.

    step, group, row         step, question within the step, sample of that question
    id question golds kind   fields of the question; also `may_search`
    prompt, tokens           the text of each token; the ids are `prompt_ids` and `ids`
    mask                     1: the policy sampled the token; 0: the environment wrote it
    writers                  for each part that the environment wrote: "documents" or "notice"
    answer, stop_reason      the answer, and why the response ended
    rewards, correct         the terms, whose sum is the reward; whether the answer is right
    searches                 query, documents, text that was read, fallback, error, cut, seconds
    rejected_queries         reason and query

Each field below has a number per token of the response, or one number if it is the same for all
sampled tokens. All are missing if DAPO did not use the group, or if a search failed in most
trajectories of the step. `ref` is also missing without π_ref, and `sampled` if documents are
trained on.

    sampled old new ref      log-probs of the token: at sampling, by π_old, in the update, by π_ref
    advantages, weights      Σ weights over an update is 1

Each step is a separate gzip member, so a killed run loses at most the step that it was writing.
"""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from errors import InputError
from formats.records import check_regular, free_name, has_number, loads, tell, writing

NAME = "trajectories.jsonl.gz"


def append_trajectories(folder: Path, records: Iterable[dict], name: str = NAME) -> None:
    lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in records]
    if lines:
        text = "\n".join([*lines, ""]).encode(errors="replace")
        with writing(folder / name), open(folder / name, "ab") as file:
            file.write(gzip.compress(text, 5))  # all records in one write


def read_trajectories(folder: Path, say=tell) -> Iterator[dict]:
    """Yields the records in the order of the file, up to the first damage. `say` is called with a
    message about damage, and about lines that are not records of a step. If the file ends within a
    step, there is no message: a run may be writing it.
    """
    path, lost = folder / NAME, 0
    check_regular(path)
    if not path.is_file():
        raise InputError(
            f"{folder}: no {NAME} there: name a stage's folder, or train with --groups_kept above 0"
        )
    try:
        with gzip.open(path) as file:
            for line in file:
                record = loads(line.decode(errors="replace"))
                if has_number(record, "step"):
                    yield record
                else:
                    lost += 1
    except EOFError:
        pass
    except (OSError, zlib.error) as error:
        say(f"{path}: damaged, and read only up to the damage ({error})")
    if lost:
        say(f"{path}: left out lines that are not records of a step: {lost}")


def cut_trajectories(folder: Path, first_step: int) -> None:
    """Keeps the steps before `first_step`; a resumed run writes the others again. If
    `read_trajectories` reports a problem, the whole old file is kept under another name, and
    training goes on.
    """
    path, aside, lost = folder / NAME, folder / f"{NAME}.partial", []
    if not path.exists():
        return
    with writing(path):
        aside.write_bytes(b"")
        try:
            for step, some in itertools.groupby(
                read_trajectories(folder, lost.append), itemgetter("step")
            ):
                append_trajectories(folder, some if step < first_step else (), aside.name)
        except InputError as error:
            lost.append(error)
        if lost:
            renamed = path.rename(free_name(path))
            tell(f"{lost[0]}; the old file is kept as {renamed.name}")
        aside.replace(path)
