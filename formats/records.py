"""Reads the records of a file, and appends records to the files of a run.

    bytes -> lines -> records   JSON lines, a JSON list, tab-separated lines, the same gzipped,
                                parquet (with pyarrow)

A record that cannot be read is yielded as an InputError, which the caller raises or counts.
Traps: U+2028 does not end a line of JSON; a byte-order mark is not part of the first field's name.
Left out: other compressions, comma-separated files, tab-separated fields over several lines.
"""

import contextlib
import csv
import fcntl
import functools
import gzip
import itertools
import json
import os
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from errors import InputError, rank_of

# Columns of tab-separated files without a header.
PASSAGE_COLUMNS = ("id", "passage")
QUESTION_COLUMNS = ("question", "answer")
LONGEST_LINE = 64_000_000  # bytes
BLANK = b" \t\n\r\v\f\xef\xbb\xbf"  # with the bytes of a byte-order mark, which nobody sees


def open_error(path: Path, error: OSError) -> InputError:
    known = {
        FileNotFoundError: "no such file: check the path",
        IsADirectoryError: "a folder: name the files in it",
    }
    return InputError(f"{path}: {known.get(type(error), f'cannot be read ({error.strerror})')}")


def check_regular(path: Path) -> None:
    """Raises an InputError for a pipe or a character device, because reading it may never end, and
    because it cannot be read twice: a file is read first to recognise its format (JSON, TSV,
    parquet), then for its records.
    """
    if path.is_fifo() or path.is_char_device():
        raise InputError(f"{path}: a pipe or a device: save its content to a file first")


def byte_lines(path: Path, most: int = LONGEST_LINE) -> Iterator[bytes]:
    """Yields the lines of a file; a line longer than `most` bytes comes in pieces of that size. A
    gzipped file is unpacked, whatever its name is.
    """
    try:
        check_regular(path)
        with open(path, "rb") as file:
            unpacked = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(b"\x1f\x8b") else file
            yield from iter(lambda: unpacked.readline(most), b"")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: a broken gzip file ({error}): download it again") from None
    except OSError as error:
        raise open_error(path, error) from None


def first_line(path: Path) -> bytes:
    """Returns the beginning of the first line that is not blank, without a byte-order mark."""
    for line in byte_lines(path, most=2**16):  # a JSON list may be one line of 500 MB
        if line := line.strip(BLANK):
            return line
    raise InputError(f"{path}: the file is empty, or has only blank lines: name another file")


def decoded(data: bytes) -> str | InputError:
    try:
        return data.decode("utf-8-sig")  # without a byte-order mark
    except UnicodeDecodeError as error:
        return InputError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8")


def decoded_lines(path: Path) -> Iterator[tuple[int, str | InputError]]:
    """Yields (number, line) for lines that are not blank. A line that is not UTF-8 is yielded as an
    InputError.
    """
    for number, line in enumerate(byte_lines(path), 1):
        if len(line) == LONGEST_LINE:
            raise InputError(
                f"{path}, line {number}: longer than 64 MB: end each record with a line break"
            )
        if line.strip(BLANK):
            yield number, decoded(line.rstrip(b"\r\n"))


def read_whole(path: Path) -> str:
    text = decoded(b"".join(byte_lines(path)))
    if isinstance(text, InputError):
        raise InputError(f"{path}: {text}")
    return text


def read_records(path: Path, columns: tuple[str, ...] = ()) -> Iterator[tuple[int, str, object]]:
    """Yields (number, "line 3" or "record 3", record or InputError). `columns` name the columns of
    a tab-separated file that has no header; without `columns` no file is read as tab-separated.
    """
    first = first_line(path)
    parquet = first.startswith(b"PAR1")
    if columns and not parquet and is_tsv(path):
        yield from tsv_records(path, columns)
    elif path.suffix == ".csv":
        raise InputError(
            f"{path}: a CSV file is not read: save it with tabs (TSV) if it is a question or"
            " corpus file, else as JSON lines"
        )
    elif parquet or first.startswith(b"[") or first == b"{":  # "{": a record over several lines
        for number, record in enumerate(read_parquet(path) if parquet else read_json(path), 1):
            yield number, f"record {number}", as_record(record)
    else:
        for number, line in decoded_lines(path):
            yield number, f"line {number}", as_record(loads(line))


def read_json(path: Path) -> list:
    value = loads(read_whole(path))
    if isinstance(value, InputError):
        raise InputError(f"{path}: {value}: correct the file")
    return value if isinstance(value, list) else [value]


def read_parquet(path: Path) -> list[dict]:
    try:
        from pyarrow import parquet  # optional: the extra "data"

        return parquet.read_table(path).to_pylist()
    except ImportError:
        raise InputError(
            f"{path}: a parquet file needs pyarrow: pip install pyarrow, or convert the file to"
            " JSONL"
        ) from None
    except Exception as error:  # pyarrow may raise any error for a damaged file
        raise InputError(
            f"{path}: not a readable parquet file ({short(str(error))}): get it again"
        ) from None


def loads(text: str | InputError) -> object:
    """Returns the value, or an InputError that says what is wrong with the text."""
    if isinstance(text, InputError):
        return text
    try:
        value = json.loads(text)
        # Trap: JSON may escape half a character ("\ud83d"), which cannot be written or tokenized.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        return InputError(f"not valid JSON ({str(error).replace('line 1 ', '')})")


def as_record(value: object) -> object:
    if isinstance(value, dict | InputError):
        return value
    return InputError(f"expected an object {{...}}, found {short(value)}")


def is_tsv(path: Path) -> bool:
    line = first_line(path)
    return b"\t" in line and not line.startswith((b"{", b"["))


def tsv_records(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, str, object]]:
    csv.field_size_limit(LONGEST_LINE)
    names = ()
    for number, record in decoded_lines(path):
        if isinstance(record, str):
            # Each line is parsed alone, or a quote that is never closed would swallow later lines.
            (values,) = csv.reader([record.replace("\r", " ")], delimiter="\t")
            if not names and (names := header(values)):
                continue
            names = names or columns
            record = dict(zip(names, values, strict=False))
            if len(values) != len(names):
                record = InputError(
                    f"{len(values)} tab-separated columns, expected {len(names)}"
                    f" ({', '.join(names)})"
                )
        yield number, f"line {number}", record


def header(values: list[str]) -> list[str]:
    """Returns the column names if `values` are a header: the first is "id", or one is "question".
    Else returns [].
    """
    names = [value.strip().lower() for value in values]
    return names if names[0] == "id" or "question" in names else []


def short(value: object) -> str:
    """Returns at most 60 characters of a value, which may be long or nested, for a message."""
    return reprlib.repr(value)[:60]


def has_number(record: object, name: str) -> bool:
    """Returns whether this is a record whose field `name` holds a whole number, such as a step."""
    return isinstance(record, dict) and type(record.get(name)) is int


def finished_records(path: str | Path, cut: bool = True, needs: str = "") -> list[dict]:
    """Reads a JSONL file to which a run appends; a file that does not exist yet has no records. An
    incomplete last line is ignored, and with `cut` also removed from the file. If `needs` names a
    field, broken lines and records without a whole number in this field are left out, and a line on
    stderr says how many; otherwise a broken line is an InputError.
    """
    path = Path(path)
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    records = [as_record(loads(line.decode(errors="replace"))) for line in lines]
    if records and isinstance(records[-1], InputError) and not lines[-1].endswith(b"\n"):
        records.pop()
        if cut:
            os.truncate(path, sum(map(len, lines[:-1])))
    if needs:
        good = [record for record in records if has_number(record, needs)]
        if len(good) < len(records):
            print(f"{path}: {len(records) - len(good)} bad lines are left out", file=sys.stderr)
        return good
    for number, record in enumerate(records, 1):
        if isinstance(record, InputError):
            raise InputError(f"{path}, line {number}: {record}: correct the file, or name another")
    return records


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns a full disk, or a place that cannot be written, into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}): make room, or name another place"
        ) from None


def write_text(path: Path, text: str) -> None:
    """Replaces the file atomically: after a kill it holds the old or the new text, never a part."""
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


def json_lines(records: Iterable[dict]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def append_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    """Appends a JSON line per record. Without records it tests that the file is writable, and makes
    it if it is missing.
    """
    lines = json_lines(records).encode()
    with writing(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)  # an incomplete last line gets a line break
                lines = lines if file.read(1) == b"\n" else b"\n" + lines
            file.write(lines)  # in one write: another run may append to the same file


def write_records(path: Path, records: list[dict]) -> None:
    """Writes all records as JSON lines; replaces the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json_lines(records))


@functools.cache
def tell(line: str) -> None:
    """Prints a line to stderr, in process 0 only, and the same line only once."""
    if not rank_of("RANK"):
        print(line, file=sys.stderr)


def lock(file, operation: int) -> None:
    """Locks an open file until the file is closed or this process ends, even if it is killed. If
    another process has the lock, this function waits, or with LOCK_NB raises BlockingIOError; but
    several processes can have the lock if all use LOCK_SH. Some network file systems have no locks;
    then a warning is printed, and the work goes on.
    """
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        raise
    except OSError as error:
        tell(
            f"{file.name}: cannot be locked ({error.strerror}): two processes could write to the"
            " same place at once"
        )


def free_name(path: Path) -> Path:
    """Returns the first of PATH.old1, PATH.old2, ... that is free, so that no file is replaced."""
    names = (path.with_name(f"{path.name}.old{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def keep_old(path: Path) -> None:
    """Renames a file that is there and not empty, before another is written in its place."""
    if path.is_file() and path.stat().st_size:
        print(f"the file that was {path} is kept as {path.rename(free_name(path)).name}")


def convert_records(
    path: Path, records: Iterable[tuple], convert: Callable, skip_bad: bool
) -> Iterator[dict]:
    """Yields convert(record, number, place) for each (number, place, record) in `records`. Raises
    an InputError at a bad record; with `skip_bad` bad records are skipped, and a line on stderr
    says how many. If there is no good record, it always raises an InputError.
    """
    good = 0
    problems = []
    for number, place, record in records:
        try:
            if isinstance(record, InputError):
                raise record
            fields = convert(record, number, place)
        except InputError as error:
            problems.append(f"{path}, {place}: {error}")
            if not skip_bad:
                raise InputError(
                    f"{problems[0]}: correct or delete it, or leave it out with --skip_bad"
                ) from None
        else:
            good += 1
            yield fields
    report_skipped(path, good, problems, "record")


def report_skipped(path: Path, good: int, problems: list[str], noun: str) -> None:
    if not good:
        reason = f"; the first problem: {problems[0]}" if problems else ""
        raise InputError(f"{path}: no {noun} to use: name another file{reason}")
    if problems:
        print(
            f"{path}: {len(problems)} of {len(problems) + good} {noun}s skipped; the first:"
            f" {problems[0]}",
            file=sys.stderr,
        )
