"""Reads and writes trajectories.jsonl.gz, which has one line of JSON per saved trajectory.

    step, group, row         step, question within the step, sample of that question
    id question golds kind   fields of the question; also `may_search`
    prompt                   the text of the prompt
    ids, tokens              of the response: the id and the text of each token
    mask                     1: the policy sampled the token; 0: the environment wrote it
    writers                  for each part that the environment wrote: "documents" or "notice"
    answer, stop_reason      the answer, and why the response ended
    rewards, correct         the terms, whose sum is the reward; whether the answer is right
    format                   whether the response has the paper's format
    searches                 query, documents, text that was read, fallback, error, cut, seconds
    rejected_queries         reason and query

Each field below has a number per token of the response, or one number if it is the same for all
sampled tokens. All are missing if DAPO did not use the group, or if a search failed in most
trajectories of the step. `ref` is also missing without π_ref, and `sampled` if documents are
trained on.

    sampled old new ref      log-probs of the token: at sampling, by π_old, in the update, by π_ref;
                             old and new are those of sampling where the loss has no gradient
    advantages, weights      Σ weights over an update is 1

Each step is a separate gzip member, so a killed run loses at most the step that it was writing.
"""

import contextlib
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from formats.records import json_lines

NAME = "trajectories.jsonl.gz"


def append_trajectories(folder: Path, records: Iterable[dict], name: str = NAME) -> None:
    with open(folder / name, "ab") as file:
        file.write(gzip.compress(json_lines(records).encode(), 5))  # all records in one write


def read_trajectories(folder: Path) -> Iterator[dict]:
    """Yields the records in the order of the file; none if there is no file. A file may end within
    a step, if a run is writing it or was killed.
    """
    path = folder / NAME
    if path.exists():
        with contextlib.suppress(EOFError), gzip.open(path, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)


def cut_trajectories(folder: Path, first_step: int) -> None:
    """Keeps the steps before `first_step`; a resumed run writes the others again."""
    partial = folder / f"{NAME}.partial"
    partial.write_bytes(b"")
    for step, records in itertools.groupby(read_trajectories(folder), itemgetter("step")):
        if step < first_step:
            append_trajectories(folder, records, partial.name)
    partial.replace(folder / NAME)
