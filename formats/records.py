"""A file -> its records, and the fields of a record.

    bytes -> lines -> records      JSON lines, a JSON list, tab-separated lines, the same gzipped,
    parquet (with pyarrow)
    record -> fields               need(record, name, kind) and its relatives say which field is
    missing or of the wrong type

A record that cannot be read is yielded as its InputError, not raised: whether it ends the run or is
skipped and counted is the caller's choice. Files that a run appends to are read back by
`finished_records`: an interrupt may leave half a line. Traps: U+2028 ends no line of JSON, "NaN" is
no JSON, and a byte-order mark is no part of the first field's name. Left out: other compressions,
CSV fields that run over several lines. What a record means is data.py's matter.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from errors import InputError, run_main

# ---------------------------------------------------------------------------------- file -> records


def open_error(path: Path, error: OSError) -> InputError:
    reasons = {
        FileNotFoundError: "no such file: check the path",
        IsADirectoryError: "a folder: name the files in it",
    }
    return InputError(f"{path}: {reasons.get(type(error)) or f'cannot be read ({error.strerror})'}")


def byte_lines(path: Path, most: int = -1) -> Iterator[bytes]:
    """Lines as they are, or pieces of at most `most` bytes of them; unpacked where the file is
    gzipped, whatever its name.
    """
    try:
        with open(path, "rb") as file:
            unpacked = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(b"\x1f\x8b") else file
            yield from iter(lambda: unpacked.readline(most), b"")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: a broken gzip file ({error}): download or pack it again"
        ) from None
    except OSError as error:
        raise open_error(path, error) from None


def first_line(path: Path) -> bytes:
    """How the first line that is not blank begins, without a byte-order mark. A file without one is
    empty.
    """
    for line in byte_lines(path, most=2**16):  # a JSON list may be one line of 500 MB
        if line := line.removeprefix(b"\xef\xbb\xbf").strip():
            return line
    raise InputError(
        f"{path}: the file is empty: expected one JSON record per line, or a JSON list of records"
    )


def read_records(path: Path, columns: tuple[str, ...] = ()) -> Iterator[tuple[int, str, object]]:
    """Yield (number, "line 3" or "record 3", record). `columns` names those of tab-separated lines
    without a header.

    A record that cannot be read is yielded as its InputError: whether it ends the run or is skipped
    is the caller's choice.
    """
    first = first_line(path)
    if first.startswith(b"PAR1"):
        yield from ((i, f"record {i}", record) for i, record in enumerate(read_parquet(path), 1))
    elif columns and is_tsv(path):
        yield from tsv_records(decoded_lines(path), columns)
    elif first.startswith(b"[") or first == b"{":  # a record over several lines: a list of one
        text = read_whole(path)
        escaped = "\\ud" in text or "\\uD" in text
        yield from (
            (i, f"record {i}", as_record(record, escaped))
            for i, record in enumerate(read_json(path, text), 1)
        )
    else:
        for i, line in decoded_lines(path):
            yield i, f"line {i}", line if isinstance(line, InputError) else parse_json(line)


def decoded_lines(path: Path) -> Iterator[tuple[int, str | InputError]]:
    """Lines as text, blank ones left out. Read as bytes, so that broken UTF-8 has a line number and
    U+2028 ends no line.
    """
    for number, line in enumerate(byte_lines(path), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield number, InputError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8")
            continue
        if text.strip():
            yield number, text


def read_whole(path: Path) -> str:
    data = b"".join(byte_lines(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{path}, line {line}: not UTF-8: save the file as UTF-8") from None


def read_json(path: Path, text: str) -> list:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise InputError(
            f"{path}, line {line}: not valid JSON ({getattr(error, 'msg', error)}): correct the"
            " file"
        ) from None
    return value if isinstance(value, list) else [value]


def read_parquet(path: Path) -> list[dict]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(
            f"{path}: a parquet file needs pyarrow: pip install pyarrow, or convert the file to"
            " JSONL"
        ) from None
    try:
        return parquet.read_table(path).to_pylist()
    except Exception as error:  # a damaged file raises whatever the format's reader does
        raise InputError(
            f"{path}: not a readable parquet file ({short(str(error))}): download it again"
        ) from None


def parse_json(line: str) -> object:
    try:
        return as_record(json.loads(line), "\\ud" in line or "\\uD" in line)
    except (ValueError, RecursionError) as error:
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return InputError(f"not valid JSON ({getattr(error, 'msg', error)}{column})")


def as_record(record: object, escaped: bool = False) -> object:
    """`record`, or what is wrong with it. Trap: JSON may escape half a character ("\\ud83d" alone),
    which nothing can write.
    """
    if not isinstance(record, dict):
        return InputError(f"expected an object {{...}}, found {type_name(record)}")
    try:
        if escaped:
            json.dumps(record, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return InputError(
            "half a character: a \\ud8.. to \\udf.. without its other half, or data nested too deep"
        )
    return record


PASSAGE_COLUMNS, QUESTION_COLUMNS = (
    ("id", "passage"),
    ("question", "answer"),
)  # of tab-separated lines without a header
_ID_COLUMNS = ("id", "_id", "idx", "docid", "doc_id", "pid")


def is_tsv(path: Path) -> bool:
    line = first_line(path)
    return path.name.lower().removesuffix(".gz").endswith(".tsv") or (
        not line.startswith((b"{", b"[")) and b"\t" in line
    )


def header(line: str) -> list[str] | None:
    """The names in a header: it begins with a name for ids, or has a column "question"."""
    names = [unquote(column).strip().lower() for column in line.split("\t")]
    names = [
        "answer" if name in ("answers", "golden_answers") else name for name in names
    ]  # a column is one string
    if names[0] in _ID_COLUMNS:
        names[0] = "id"
    elif "question" not in names:
        return None
    return list(PASSAGE_COLUMNS) if len(names) == 2 and "question" not in names else names


def tsv_records(
    lines: Iterable[tuple[int, str | InputError]], columns: tuple[str, ...]
) -> Iterator[tuple[int, str, object]]:
    """Each line as a record of the header's names, or of `columns` where there is no header."""
    names: list[str] = []
    for number, line in lines:
        where = f"line {number}"
        if isinstance(line, InputError):
            yield number, where, line
        elif not names and (found := header(line)):
            names = found
        else:
            names = names or list(columns)
            values = [unquote(column) for column in line.split("\t")]
            expected = (
                f"{len(values)} tab-separated columns, expected {len(names)} ({', '.join(names)})"
            )
            yield (
                number,
                where,
                (
                    dict(zip(names, values, strict=True))
                    if len(values) == len(names)
                    else InputError(expected)
                ),
            )


def unquote(column: str) -> str:
    """Undo CSV quoting. `csv.reader` would not do: a passage that merely begins with a quoted word
    is no CSV field, and it would lose its quotes or swallow the lines behind it. In a CSV field
    every inner quote is doubled.
    """
    inner = column[1:-1]
    quoted = (
        len(column) >= 2 and column[0] == column[-1] == '"' and '"' not in inner.replace('""', "")
    )
    return inner.replace('""', '"') if quoted else column


# ----------------------------------------------------------------------------- fields of one record


def type_name(value: object) -> str:
    names = {
        str: "a string",
        list: "a list",
        dict: "an object",
        bool: "true/false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")


def short(value: object) -> str:
    """A value for an error message: one line, not the whole passage."""
    try:
        text = repr(value)
    except RecursionError:  # json reads what repr is too deep for
        text = "[[[..."
    return text if len(text) <= 60 else text[:57] + "..."


def need(record: dict, name: str, kind: type):
    """record[name], which must be there and be a str, list or dict."""
    value = record.get(name)
    if value is None:
        raise InputError(f"field {name!r} is missing")
    if not isinstance(value, kind):
        raise InputError(
            f"field {name!r}: expected {type_name(kind())}, found {type_name(value)} {short(value)}"
        )
    if kind is str and not value.strip():
        raise InputError(f"field {name!r} is empty")
    return value


def need_strings(record: dict, name: str) -> list[str]:
    for i, item in enumerate(need(record, name, list), 1):
        if not isinstance(item, str):
            raise InputError(
                f"field {name!r}, item {i}: expected a string, found {type_name(item)}"
                f" {short(item)}"
            )
    return record[name]


def optional_text(record: dict, name: str) -> str:
    """A string field that may be missing, null or ""."""
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise InputError(
            f"field {name!r}: expected a string, found {type_name(value)} {short(value)}"
        )
    return value or ""


def optional_flag(record: dict, name: str) -> bool | None:
    value = record.get(name)
    if value is not None and not isinstance(value, bool):
        raise InputError(
            f"field {name!r}: expected true or false, found {type_name(value)} {short(value)}"
        )
    return value


def level_text(record: dict) -> str:
    """MATH's level is 3, UR²'s is "hard"."""
    value = record.get("level")
    return str(value) if type(value) is int else optional_text(record, "level")


_ID_FIELDS = ("id", "_id", "idx", "question_id", "unique_id")


def id_field(record: dict) -> str:
    """The name under which this record keeps its id."""
    return next((name for name in _ID_FIELDS if name in record), "id")


def id_or_number(record: dict, number: int) -> str:
    """For layouts whose records may have no id: the place in the file."""
    return need_id(record) if id_field(record) in record else str(number)


def need_id(record: dict) -> str:
    name = id_field(record)
    if name not in record:
        raise InputError(f"field 'id' is missing (or {', '.join(map(repr, _ID_FIELDS[1:]))})")
    return as_id(record[name], name)


def as_id(value: object, name: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise InputError(f"field {name!r} is missing or empty")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(
            f"field {name!r}: expected a string or a whole number, found {type_name(value)}"
            f" {short(value)}"
        )
    return str(value)


def need_answers(record: dict, name: str, kind: type, question_id: str) -> list:
    """The gold answers: never none, never "" (an empty gold would be "covered" by every
    prediction).
    """
    if record.get(name) in (None, "", []):
        raise InputError(
            f"question {question_id} has no answer: field {name!r} is missing or empty"
        )
    answers = [need(record, name, str)] if kind is str else need(record, name, list)
    if any(isinstance(answer, str) and not answer.strip() for answer in answers):
        raise InputError(
            f"question {question_id} has no answer: field {name!r} holds an empty string"
        )
    return answers


# ---------------------------------------------------------------------- files that a run appends to


def finished_records(path: str | Path, cut: bool = True) -> list[dict]:
    """The records of a JSONL file that a run appends to; none where there is no file yet. A
    half-written last line, as an interrupt leaves it, is no record, and is cut off: what is
    appended next would stand behind it on one line. A reader says cut=False: the run may still be
    at it.
    """
    path = Path(path)
    if not path.exists():
        return []
    data = path.read_bytes()
    whole, tail = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    if tail.strip() and isinstance(
        parse_json(tail.decode("utf-8", "replace")), dict
    ):  # whole, only its newline is not there
        whole += tail + b"\n"
    if cut and whole != data:
        path.write_bytes(whole)
    records = [
        (number, parse_json(line.decode("utf-8", "replace")))
        for number, line in enumerate(whole.splitlines(), 1)
    ]
    for number, record in records:
        if isinstance(record, InputError):
            raise InputError(f"{path}, line {number}: {record}: correct the file, or name another")
    return [record for _, record in records]


def append_jsonl(path: str | Path, records: Iterable[dict]) -> None:
    """Append a JSON line for each record. A last line that an interrupt cut short is closed first:
    only it is lost.
    """
    lines = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        file.write(lines)  # in one piece: another run may append to the same file


def report_skipped(path: Path, kept: int, problems: list[str], noun: str) -> None:
    if not kept:
        reason = f"; the first problem: {problems[0]}" if problems else ""
        raise InputError(f"{path}: no {noun} to use: name another file{reason}")
    if problems:
        count = f"{len(problems)} of {len(problems) + kept} {noun}s"
        print(f"{path}: {count} skipped; the first: {problems[0]}", file=sys.stderr)


def main() -> None:
    """A file with one fault in each line, as an invented run left it behind."""
    lines = [
        '{"id": 1, "question": "Where?"}',
        '{"id": 2, "question": 5}',
        '{"id": 3}',
        '{"id": 4, "que',
        '["a list"]',
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "questions.jsonl")
        path.write_text("\n".join(lines), encoding="utf-8")
        for _, place, record in read_records(path):
            try:
                said = record if isinstance(record, InputError) else need(record, "question", str)
            except InputError as error:
                said = error
            print(
                f"{place}  {lines[int(place.split()[1]) - 1]:34}"
                f" {'error: ' if isinstance(said, InputError) else ''}{said}"
            )


if __name__ == "__main__":
    run_main(main)
