"""Reads the records of a file, and appends records to the files of a run.

    file -> records   JSON lines or a JSON list, also gzipped (.gz); parquet (with pyarrow);
                      tab-separated passages

A record that cannot be read is yielded as an InputError, which the caller raises or counts. Lines
are read one by one, so a corpus needs no more memory than its documents.
Traps: U+2028 does not end a line of JSON; a byte-order mark is not part of the first field's name.
Left out: other compressions, CSV, fields over several lines.
"""

import contextlib
import csv
import gzip
import itertools
import json
import os
import re
import reprlib
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from errors import InputError

LONGEST_LINE = 64_000_000  # bytes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def check_regular(path: Path) -> None:
    """Raises an InputError for a pipe or a device, because reading it may never end."""
    if path.is_fifo() or path.is_char_device():
        raise InputError(f"{path}: a pipe or a device: save its content to a file first")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns a missing, unreadable or damaged file into an InputError."""
    try:
        check_regular(path)
        yield
    except InputError:
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise InputError(f"{path}: {reason}: check the path and the file") from None


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line) for lines that are not blank. A line longer than LONGEST_LINE comes in
    pieces of that size.
    """
    with reading(path), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield number, line


def read_whole(path: Path) -> str:
    with reading(path):
        return path.read_text(encoding="utf-8-sig")


def read_records(path: Path) -> Iterator[tuple[int, str, object]]:
    """Yields (number, "line 3" or "record 3", record or InputError)."""
    place = "record"
    if path.suffix == ".parquet":
        values = enumerate(read_parquet(path), 1)
    elif next(lines_of(path), (0, b""))[1].lstrip().startswith(b"["):  # the file is one list
        with reading(path):
            values = enumerate(json.loads(b"".join(line for _, line in lines_of(path))), 1)
    else:
        place = "line"
        values = ((number, loads(line)) for number, line in lines_of(path))
    for number, value in values:
        yield number, f"{place} {number}", as_record(value)


def read_parquet(path: Path) -> Iterator[dict]:
    from pyarrow.parquet import ParquetFile  # optional: the extra "data"

    for batch in ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def read_table(path: Path) -> Iterator[tuple[int, str, dict]]:
    """Yields the passages of a tab-separated file like `read_records`. The columns are id, text and
    title, with a header as in DPR's file, or id and a passage that begins with its title.
    """
    csv.field_size_limit(LONGEST_LINE)
    for number, line in lines_of(path):
        # Each line is parsed alone, or a quote that is never closed would swallow later lines.
        (columns,) = csv.reader([line.decode(errors="replace")], delimiter="\t")
        if columns[0].lower() == "id":
            continue
        record = dict(zip(("id", "text", "title"), columns, strict=False))
        if len(columns) == 2:  # R1-Searcher: "Title: Ana Text: Born." or "Ana   Born."
            passage = columns[1].removeprefix("Title:")
            mark = "   " if passage == columns[1] else " Text:"
            record["title"], record["text"] = titled(passage, mark)
        yield number, f"line {number}", record


def titled(passage: str, mark: str = "\n") -> tuple[str, str]:
    """Returns (title, text): '"Ana"\\nborn' -> ("Ana", "born"); without a mark all is text."""
    title, separator, text = passage.partition(mark)
    if not separator:
        return "", passage
    return re.sub(r'^"(.*)"$', r"\1", title.strip()), text  # the title itself may contain quotes


def loads(text: str | bytes) -> object:
    """Returns the value, or an InputError that says what is wrong with the text."""
    if len(text) == LONGEST_LINE:
        return InputError("longer than 64 MB: end each record with a line break")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return InputError(f"not valid JSON ({error})")


def as_record(value: object) -> object:
    if isinstance(value, dict | InputError):
        return value
    return InputError(f"expected an object {{...}}, found {short(value)}")


def short(value: object) -> str:
    """Returns at most 60 characters of a value, which may be long or nested, for a message."""
    return reprlib.repr(value)[:60]


def convert_records(
    path: Path, records: Iterable[tuple], convert: Callable, skip_bad: bool
) -> Iterator:
    """Yields convert(record, number, place) for each (number, place, record) in `records`. Raises
    an InputError at a bad record; with `skip_bad` bad records are skipped, and a line on stderr
    says how many. If there is no good record, it always raises an InputError.
    """
    good = bad = 0
    first = ""
    for number, place, record in records:
        try:
            if isinstance(record, InputError):
                raise record
            converted = convert(record, number, place)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f"field {error} is missing" if isinstance(error, KeyError) else error
            problem = f"{path}, {place}: {reason}"
            if not skip_bad:
                advice = "correct or delete it, or leave it out with --skip_bad"
                raise InputError(f"{problem}: {advice}") from None
            bad += 1
            first = first or f"; the first: {problem}"
        else:
            good += 1
            yield converted
    if not good:
        raise InputError(f"{path}: no record to use: name another file{first}")
    if bad:
        print(f"{path}: {bad} of {bad + good} records skipped{first}", file=sys.stderr)


# ------------------------------------------------------------ files of a run
def has_number(record: object, name: str) -> bool:
    """Returns whether this is a record whose field `name` holds a whole number, such as a step."""
    return isinstance(record, dict) and type(record.get(name)) is int


def finished_records(path: str | Path, cut: bool = True, needs: str = "") -> list[dict]:
    """Reads a JSONL file to which a run appends; a file that does not exist yet has no records. An
    incomplete last line is ignored, and with `cut` also removed from the file. Other broken lines,
    and records without a whole number in the field `needs`, are left out and counted on stderr.
    """
    path = Path(path)
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    records = [as_record(loads(line)) for line in lines]
    if lines and isinstance(records[-1], InputError) and not lines[-1].endswith(b"\n"):
        records.pop()
        if cut:
            os.truncate(path, sum(map(len, lines[:-1])))
    good = [r for r in records if (has_number(r, needs) if needs else isinstance(r, dict))]
    if len(good) < len(records):
        print(f"{path}: {len(records) - len(good)} bad lines are left out", file=sys.stderr)
    return good


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
    """Appends a JSON line per record. Without records it tests that the file is writable, and makes
    it if it is missing.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(json_lines(records).encode())


def write_records(path: Path, records: list[dict]) -> None:
    """Writes all records as JSON lines; replaces the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json_lines(records))


def free_name(path: Path) -> Path:
    """Returns the first of PATH.old1, PATH.old2, ... that is free, so that no file is replaced."""
    names = (path.with_name(f"{path.name}.old{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def keep_old(path: Path) -> None:
    """Renames a file that is there and not empty, before another is written in its place."""
    if path.is_file() and path.stat().st_size:
        print(f"the file that was {path} is kept as {path.rename(free_name(path)).name}")
