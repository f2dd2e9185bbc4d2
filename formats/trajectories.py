"""trajectories.jsonl.gz: what a run wrote, and what it learned from it; a line of JSON each.

    step, group, row         when, of which question, the how manieth sample of it
    id question golds kind   of the question
    prompt, tokens           texts of token ids; the ids are `prompt_ids` and `ids`
    mask                     1: the policy sampled it; what has 0 is outside the loss
    sampled old new ref      log-probs: when it was sampled, of π_old, in the update, of π_ref
    advantages, weights      of each token; Σ weights over an update is 1
    rewards                  the components; the reward is their sum
    searches                 query, documents, what was read, where it stands, fallback, seconds

A step is a gzip member of its own: what a killed run leaves can be read up to its last whole line.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from errors import InputError
from formats.records import as_record, check_regular, loads, writing

NAME = "trajectories.jsonl.gz"


def append_trajectories(folder: Path, records: Iterable[dict]) -> None:
    lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in records]
    if lines:
        text = "\n".join([*lines, ""]).encode(errors="replace")
        with writing(folder / NAME), open(folder / NAME, "ab") as file:  # in one piece
            file.write(gzip.compress(text, 5))


def read_trajectories(folder: Path) -> Iterator[dict]:
    """In the order of steps. Half a last line is ignored; a broken one in between is an error."""
    path, number = folder / NAME, 0
    check_regular(path)
    try:
        with gzip.open(path) as file:
            for number, line in enumerate(file, 1):
                record = as_record(loads(line.decode(errors="replace")))
                if not isinstance(record, InputError):
                    yield record
                elif line.endswith(b"\n"):
                    raise InputError(f"{path}, line {number}: {record}: it is left out")
    except FileNotFoundError:
        raise InputError(f"{folder}: no {NAME} there: --groups_kept keeps some") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return  # a killed run's last step


def cut_trajectories(folder: Path, first_step: int) -> None:
    """Keep the steps before this one: a resumed run makes the others again."""
    path = folder / NAME
    if path.exists():
        aside = path.with_name(path.name + ".partial")
        with writing(path), gzip.open(aside, "wt", 5, encoding="utf-8") as file:
            for record in read_trajectories(folder):
                if record["step"] < first_step:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
        aside.replace(path)
