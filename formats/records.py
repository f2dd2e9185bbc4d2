"""Reads the records of a file, and appends records to the files of a run.

    file -> records   JSON lines or a JSON list, also gzipped (.gz); parquet (with pyarrow)

Lines are read one by one, so a corpus needs no more memory than its documents.
Trap: U+2028 does not end a line of JSON, so lines are split as bytes.
Left out: tables, other compressions. A file that cannot be read at all is its library's own error.
"""

import contextlib
import gzip
import itertools
import json
import os
import reprlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from errors import InputError

Records = list[dict]


def read_records(path: str | Path, convert: Callable, skip_bad: bool = False) -> list:
    """Returns convert(record, number) for each record of a file. `number` counts the lines, blank
    ones too, or the records of a list. Raises an InputError at a bad record; with `skip_bad` bad
    records are skipped, and a line on stderr says how many. If there is no good record, it always
    raises an InputError.
    """
    converted = []
    faults = []
    for number, record in enumerate(rows_of(Path(path)), 1):
        place = f"record {number}"
        try:
            if isinstance(record, bytes):
                if not record.strip():
                    continue
                place = f"line {number}"
                record = json.loads(record)
            if not isinstance(record, dict):
                raise InputError(f"expected an object {{...}}, found {short(record)}")
            converted.append(convert(record, number))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f"field {error} is missing" if isinstance(error, KeyError) else error
            if isinstance(error, json.JSONDecodeError):
                reason = f"no JSON ({error})"
            faults.append(f"{path}, {place}: {reason}")
            if not skip_bad:
                raise InputError(
                    f"{faults[0]}: correct or delete it, or leave it out with --skip_bad"
                ) from None
    first = f"; the first: {faults[0]}" if faults else ""
    if not converted:
        raise InputError(f"{path}: no record to use: name another file{first}")
    if faults:
        total = len(faults) + len(converted)
        print(f"{path}: {len(faults)} of {total} records skipped{first}", file=sys.stderr)
    return converted


def rows_of(path: Path) -> Iterator[bytes | dict]:
    """Yields the lines of a file as bytes, or the records of a JSON list or a parquet file."""
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile  # optional: the extra "data"

        for batch in ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        # "[" begins a file that is one list; utf-8-sig removes a byte-order mark.
        listed = file.peek(1).decode("utf-8-sig", "replace").lstrip().startswith("[")
        yield from json.load(file) if listed else file


def short(value: object) -> str:
    """Returns at most 60 characters of a value, which may be long or nested, for a message."""
    return reprlib.repr(value)[:60]


# ------------------------------------------------------------ files of a run
def finished_records(path: str | Path) -> Records:
    """Reads a JSONL file to which a run appends; a file that does not exist yet has no records. A
    last line without its line break is what a kill left, and is ignored.
    """
    text = Path(path).read_bytes() if Path(path).is_file() else b""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a folder to write into, which gets the name `path` at the end: a folder of this name
    is complete, whatever ended the process. After an error it is removed.
    """
    aside = path.with_name(path.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replaces the file atomically: after a kill it holds the old or the new text, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def json_lines(records: Iterable[dict]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def append_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    """Appends a JSON line per record."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(json_lines(records).encode())


def write_records(path: Path, records: Records) -> None:
    """Writes all records as JSON lines; replaces the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json_lines(records))


def moved_aside(path: Path) -> Path:
    """Renames a file or folder to the first of PATH.old1, PATH.old2, ... that is free. Returns its
    new path.
    """
    names = (path.with_name(f"{path.name}.old{number}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def keep_old(path: Path) -> None:
    """Renames a file that is there and not empty, before another is written in its place."""
    if path.is_file() and path.stat().st_size:
        print(f"the file that was {path} is kept as {moved_aside(path).name}")
