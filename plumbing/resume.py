"""Records that are made in order and kept as they come: the same command goes on behind them.

A file of records belongs to what it was made with (settings, weights, questions), which stands
beside it. What does not belong to it any more is put aside, never overwritten.
"""

import itertools
import json
import os
from pathlib import Path

from formats.records import finished_records


def go_on(out: Path, made_with: dict, expected: list, key, batch: int, fresh: bool) -> list[dict]:
    """The records of `out` that need not be made again, in whole batches, which share a seed. All
    others leave `out`.

    expected   what key(record) is for each record, in order; a record for which key is None was
               spoilt, and is made again with all behind it
    fresh      make all of them anew
    """
    beside = out.with_name(out.name + ".settings.json")
    text = json.dumps(made_with, indent=1)
    same = beside.is_file() and beside.read_text(encoding="utf-8") == text
    records = finished_records(out) if out.is_file() and same and not fresh else []
    good = 0
    for record, wanted in zip(records, expected, strict=False):
        if key(record) != wanted:
            break
        good += 1
    if good < len(expected):
        good -= good % batch
    if out.is_file() and out.stat().st_size and (good < len(records) or not same or fresh):
        kept = free_name(out)
        os.replace(out, kept)
        print(f"the predictions that were in {out} are kept as {kept.name}")
    write_records(out, records[:good])
    beside.write_text(text, encoding="utf-8")
    return records[:good]


def free_name(path: Path) -> Path:
    """The first of PATH.old1, PATH.old2, ... that is not taken: what was computed is kept."""
    names = (path.with_name(f"{path.name}.old{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def write_records(path: Path, records: list[dict]) -> None:
    """All at once: an interrupt leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)
