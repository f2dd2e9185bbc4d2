"""A predictions file, in any layout, scored without a model.

    python predictions.py FILE                        its own gold answers
    python predictions.py FILE --data QUESTIONS       the gold answers of a question file; says what
    is missing
    python predictions.py A B C                       several data sets, one table
    python predictions.py FILE --against OTHER        two runs on the same questions, compared in
    pairs

    file -> records -> layout (named by the first record) -> prediction records, as eval.py writes
    them -> report.py

A prediction belongs to the question with its id, or, where the file has no ids, to the one with its
text. What a file misses is told, and is no part of the mean unless --count_missing says so: the
score always stands beside its number of questions. Scores that the file brings (a judge's verdicts,
searches) are kept; em, f1 and cem are computed here. Trap: R1-Searcher's files score under
punctuation that becomes a blank; other papers delete it (--punctuation delete). Left out: asking a
judge or a reader, which needs a model: eval.py --predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data import TASKS, Layout, Question, dataset_names, lettered, load_datasets
from errors import FlagParser, InputError, check_output, run_main
from formats.records import (
    first_line,
    need_strings,
    optional_text,
    read_records,
    read_whole,
    report_skipped,
    short,
    type_name,
)
from metrics import score_answer, summary_scores
from plumbing.report import (
    compare,
    comparison_markdown,
    comparison_table,
    markdown,
    summarise,
    table,
)
from prompts import PROTOCOLS

PUNCTUATION = ("space", "delete")
VERDICTS = {
    "true": 1.0,
    "yes": 1.0,
    "1": 1.0,
    "1.0": 1.0,
    "false": 0.0,
    "no": 0.0,
    "0": 0.0,
    "0.0": 0.0,
}
TEXT_FIELDS = ("prediction", "pred", "pred_ans", "predicted_answer", "output", "response")
GOLD_FIELDS = ("golds", "golden_answers", "answers", "answer", "ground_truth")
ID_FIELDS = ("id", "_id", "idx", "question_id", "qid")
_DOCUMENT_TAGS = {
    protocol.documents_tags[0] for protocol in PROTOCOLS.values() if protocol.documents_tags
}


# ------------------------------------------------------------------------------------------ layouts


def from_eval(record: dict, number: int) -> dict:
    """A record of eval.py, whole."""
    kinds = {"id": str, "kind": str, "question": str, "golds": list, "metrics": dict}
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise InputError(
                f"field {name!r}: expected {type_name(kind())}, found {short(record.get(name))}"
            )
    if "prediction" not in record:
        raise InputError("field 'prediction' is missing (null says that there was no answer)")
    need_strings(record, "golds")
    optional_text(record, "dataset")
    for name, value in record["metrics"].items():
        if value is not None and not is_number(value):
            raise InputError(f"field 'metrics', {name}: expected a number, found {short(value)}")
    return {**record, "prediction": text_of(record, "prediction"), **common(record)}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # NaN is not below anything


def common(record: dict) -> dict:
    """What both layouts may hold: task, options, the number of the sample, how punctuation was
    treated.
    """
    found: dict = {"task": optional_text(record, "task") or "qa"}
    if found["task"] not in TASKS:
        raise InputError(f"field 'task': {short(record['task'])} is none of {', '.join(TASKS)}")
    if record.get("options"):
        options = record["options"]
        found["options"] = (
            lettered(options) if isinstance(options, dict) else need_strings(record, "options")
        )
    if type(record.get("sample", 0)) is not int:
        raise InputError(
            f"field 'sample': expected a whole number, found {short(record['sample'])}"
        )
    if record.get("punctuation", "space") not in PUNCTUATION:
        raise InputError(
            f"field 'punctuation': {short(record['punctuation'])} is none of"
            f" {', '.join(PUNCTUATION)}"
        )
    return found | ({"sample": record["sample"]} if "sample" in record else {})


def from_plain(record: dict, number: int) -> dict:
    """id or question, a prediction and, unless --data has them, the gold answers. R1-Searcher's and
    FlashRAG's results too.
    """
    name = next((name for name in TEXT_FIELDS if name in record), None)
    if name is None:
        raise InputError(
            f"a prediction is missing: it has none of the fields {', '.join(TEXT_FIELDS)}"
        )
    held = record[name]
    if isinstance(held, dict) and "pred" in held:  # FlashRAG: output {pred, ...}
        prediction = text_of(held, "pred")
    else:
        prediction = text_of(record, name)
    found = {"prediction": prediction, "metrics": stored_numbers(record)}
    if (
        key := next((key for key in ID_FIELDS if record.get(key) not in (None, "")), None)
    ) is not None:
        found["id"] = str(record[key])
    for name in ("question", "kind", "source"):
        if record.get(name):
            found[name] = text_of(record, name)
    if "id" not in found and "question" not in found:
        raise InputError(
            "field 'id' and field 'question' are both missing: one of them must say what was asked"
        )
    return {**found, **common(record), **gold_of(record)}


def text_of(record: dict, name: str) -> str | None:
    """A string, or None for no answer; a number is its text."""
    value = record.get(name)
    if type(value) in (int, float):
        return str(value)
    if value is not None and not isinstance(value, str):
        raise InputError(
            f"field {name!r}: expected a string, found {type_name(value)} {short(value)}"
        )
    return value


def gold_of(record: dict) -> dict:
    """{"golds": [...]}, or {} where the record has none."""
    name = next((name for name in GOLD_FIELDS if record.get(name) not in (None, "", [])), None)
    if name is None:
        return {}
    values = record[name] if isinstance(record[name], list) else [record[name]]
    golds = [text_of({name: value}, name) for value in values]
    if not all(gold and gold.strip() for gold in golds):
        raise InputError(f"field {name!r} holds an empty answer: every prediction would cover it")
    return {"golds": golds}


def stored_numbers(record: dict) -> dict[str, float | None]:
    """What the file itself says: a judge's verdict (None if it cannot be read) and how often was
    searched.
    """
    numbers: dict[str, float | None] = {}
    for name in ("gpt4o_output", "judge", "verdict"):
        if name in record:
            numbers["judged"] = VERDICTS.get(str(record[name]).strip(" .").lower())
    transcript = next(
        (
            record[name]
            for name in ("transcript", "gen_text_store")
            if isinstance(record.get(name), str)
        ),
        None,
    )
    if is_number(record.get("n_search")):
        numbers["searches"] = float(record["n_search"])
    elif transcript is not None:
        numbers["searches"] = float(sum(transcript.count(tag) for tag in _DOCUMENT_TAGS))
    return numbers | ({"searched": float(numbers["searches"] > 0)} if "searches" in numbers else {})


LAYOUTS: dict[str, Layout] = {
    "eval": Layout(
        "id, kind, question, golds[], prediction, metrics{}",
        lambda r: {"golds", "metrics"} <= set(r),
        from_eval,
    ),
    "plain": Layout(
        "id or question, prediction[, answers]",
        lambda r: any(name in r for name in TEXT_FIELDS),
        from_plain,
    ),
}


def layout_of(record: dict) -> Layout:
    for layout in LAYOUTS.values():
        if layout.recognise(record):
            return layout
    known = "; ".join(layout.shown for layout in LAYOUTS.values())
    raise InputError(
        f"no prediction in it: it has the fields {short(list(record))}; known are {known}; or one"
        " JSON object of {id: prediction}, as HotpotQA has it"
    )


# ------------------------------------------------------------------------------------------ reading


def read_predictions(path: str | Path, skip_bad: bool = False) -> list[dict]:
    """The records of one file, each with a `prediction` and what else its layout holds. A last line
    that an interrupt cut short is left out: the run may still be at it.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"{path}:"
            f" {'a folder: name the files in it' if path.is_dir() else 'no such file: check the path'}"
        )
    found, problems, layout = [], [], None
    for number, place, record in numbered_records(path):
        try:
            if isinstance(record, InputError):
                raise record
            layout = layout or layout_of(record)
            found.append({"id": str(number), **layout.convert(record, number)})
        except InputError as error:
            problems.append(f"{path}, {place}: {error}")
            if not skip_bad:
                raise InputError(
                    f"{problems[0]}: correct it, or leave it out with --skip_bad"
                ) from None
    report_skipped(path, len(found), problems, "record")
    return check_unique(path, found)


def numbered_records(path: Path) -> Iterator[tuple[int, str, object]]:
    """(number, place, record) of a JSONL file or a JSON list, or of one object {id: prediction}."""
    mapping = id_mapping(path)
    if mapping is not None:
        for i, (key, text) in enumerate(mapping.items(), 1):
            yield i, f"id {short(key)}", {"id": key, "prediction": text}
        return
    data = path.read_bytes()
    last = (
        data.rstrip().count(b"\n") + 1
    )  # of a gzipped file it is no line's number, and nothing is left out
    for number, place, record in read_records(path):
        if isinstance(record, InputError) and number == last > 1 and not data.endswith(b"\n"):
            return
        yield number, place, record


def id_mapping(path: Path) -> dict | None:
    """HotpotQA's own layout: {"answer": {id: text}, ...}, or plainly {id: text}; None for any other
    file.
    """
    try:
        whole = json.loads(read_whole(path)) if first_line(path).startswith(b"{") else None
    except (
        ValueError,
        RecursionError,
    ):  # several lines of JSON are no JSON, and a broken file is told of later
        return None
    if not isinstance(whole, dict) or {*TEXT_FIELDS, *ID_FIELDS, "question"} & set(
        whole
    ):  # one line of JSONL
        return None
    mapping = whole["answer"] if isinstance(whole.get("answer"), dict) else whole
    texts = all(value is None or isinstance(value, str | int | float) for value in mapping.values())
    return mapping if mapping and texts else None


def check_unique(path: Path, records: list[dict]) -> list[dict]:
    """An id stands once for each sample."""
    seen = set()
    for record in records:
        key = record["id"], record.get("sample", 0)
        if key in seen:
            raise InputError(
                f"{path}: two predictions for id {short(record['id'])}: give each its `sample`"
                " number, or leave one out"
            )
        seen.add(key)
    return records


# ------------------------------------------------------------------------------------------ scoring

Datasets = dict[str, list[Question]]  # as data.load_datasets gives them


def score_files(paths: list[str], data: str = "", skip_bad: bool = False, **settings) -> list[dict]:
    """The records of several files, each a data set of its own unless --data names them; ids are
    unique over all.
    """
    if settings.get("count_missing") and not data:
        raise InputError("--count_missing: which questions are missing is known only with --data")
    datasets = load_datasets(data, skip_bad) if data else None
    names = dataset_names([Path(path) for path in paths])
    files = [
        score_file(path, datasets, name=name, skip_bad=skip_bad, **settings)
        for path, name in zip(paths, names, strict=True)
    ]
    if datasets and len(datasets) > 1:
        spoken_of = {record["dataset"] for records in files for record in records}
        for name in [name for name in datasets if name not in spoken_of]:
            print(
                f"{name}: no prediction for any of its {len(datasets[name])} questions: it has"
                " no row",
                file=sys.stderr,
            )
    uses = Counter(question_id for records in files for question_id in {r["id"] for r in records})
    return [
        {**r, "id": f"{name}:{r['id']}"} if uses[r["id"]] > 1 else r
        for name, records in zip(names, files, strict=True)
        for r in records
    ]


def score_file(
    path: str | Path,
    datasets: Datasets | None = None,
    punctuation: str = "",
    skip_bad: bool = False,
    count_missing: bool = False,
    name: str = "",
) -> list[dict]:
    """Prediction records with metrics, of the questions in `datasets` or of all that the file has
    gold answers for.

    punctuation    "space" or "delete"; "" is what eval.py scored with, and "space" for all others
    count_missing  a question without a prediction counts as wrong in em, f1 and cem; else it is
                   only told of
    name           of the data set, where neither the records nor several `datasets` name one;
                   default: the file's stem
    """
    records = read_predictions(path, skip_bad)
    if datasets is not None:
        records = joined(path, records, datasets, count_missing)
    without = [record for record in records if not record.get("golds")]
    if without:
        raise InputError(
            f"{path}: {len(without)} of {len(records)} predictions have no gold answer (the first:"
            f" id {short(without[0]['id'])}): give --data with the questions"
        )
    name = name or Path(path).stem
    return [
        {"dataset": name, **scored(record, punctuation, datasets is not None)} for record in records
    ]


def joined(
    path: str | Path, records: list[dict], datasets: Datasets, count_missing: bool
) -> list[dict]:
    """The records that belong to a question, with its golds, task and options; says what is missing
    on either side.
    """
    by_id = {q.id: (name, q) for name, questions in datasets.items() for q in questions}
    by_text = {plain(q.question): (name, q) for name, q in by_id.values()}
    found = []
    for record in records:
        name, question = by_id.get(record["id"], ("", None))
        if "question" in record and (
            question is None or plain(question.question) != plain(record["question"])
        ):
            name, question = by_text.get(
                plain(record["question"]), ("", None)
            )  # an id that counts lines says nothing
        if question is not None:
            found.append(
                {
                    **record,
                    **question_fields(question),
                    **({"dataset": name} if len(datasets) > 1 else {}),
                }
            )
    if not found:
        raise InputError(
            f"{path}: none of its {len(records)} predictions is of a question in --data: give the"
            " matching file"
        )
    answered = {record["id"] for record in found}
    spoken_of = {
        by_id[question_id][0] for question_id in answered
    }  # another data set's questions are not missing here
    missing = [
        (name, q) for name, q in by_id.values() if name in spoken_of and q.id not in answered
    ]
    say_coverage(path, len(answered), len(missing), len(records) - len(found), count_missing)
    several = len(datasets) > 1
    unanswered = [
        {
            **question_fields(q),
            **({"dataset": name} if several else {}),
            "prediction": None,
            "metrics": {},
        }
        for name, q in missing
    ]
    return check_unique(path, found) + unanswered * count_missing


def say_coverage(
    path: str | Path, answered: int, missing: int, foreign: int, count_missing: bool
) -> None:
    if missing or foreign:
        fate = "count as wrong" if count_missing else "are left out"
        print(
            f"{path}: predictions for {answered} of {answered + missing} questions: {missing} are"
            f" missing and {fate}; {foreign} predictions are of no question in --data",
            file=sys.stderr,
        )


def plain(text: str) -> str:
    return " ".join(text.split())


def question_fields(question: Question) -> dict:
    options = {"options": list(question.options)} if question.options else {}
    return {
        "id": question.id,
        "kind": question.kind,
        "task": question.task,
        "question": question.question,
        **options,
        "golds": question.answers,
    }


def scored(record: dict, punctuation: str = "", anew: bool = False) -> dict:
    """The record with em, f1 and cem, unless it has them and nobody asks for others."""
    task = record.get("task", "qa")
    record = {"kind": record.get("source") or task, "task": task, "question": "", **record}
    if "em" in record["metrics"] and not punctuation and not anew:
        return record
    if task == "summary":
        scores = summary_scores(record["prediction"], record["golds"])
    else:
        punctuation = punctuation or record.get("punctuation", "space")
        scores = score_answer(
            record["prediction"], record["golds"], task, record.get("options") or (), punctuation
        )
    return {
        **record,
        "metrics": {**scores, **{k: v for k, v in record["metrics"].items() if k not in scores}},
    }


# ------------------------------------------------------------------------------------ on the screen


def report(
    records: list[dict],
    others: list[dict] | None = None,
    as_markdown: bool = False,
    json_file: str = "",
) -> None:
    """The table of one run, and of two their comparison; also as JSON."""
    summary = summarise(records)
    print(markdown(summary) if as_markdown else table(summary))
    unread = [r for r in records if "judged" in r["metrics"] and r["metrics"]["judged"] is None]
    if unread:
        print(
            f"{len(unread)} of {len(records)} verdicts are unreadable; the column `judged` is"
            " without them"
        )
    comparison = compare(records, others) if others else None
    if comparison:
        print("\n" + (comparison_markdown if as_markdown else comparison_table)(comparison))
    if json_file:
        whole = {**summary, "comparison": comparison} if comparison else summary
        Path(json_file).parent.mkdir(parents=True, exist_ok=True)
        Path(json_file).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that ends in a table."""
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="FILE",
        help="another run's predictions: compared in pairs",
    )
    parser.add_argument(
        "--punctuation",
        default="",
        choices=["", *PUNCTUATION],
        help="becomes a blank, or is deleted",
    )
    parser.add_argument(
        "--count_missing",
        action="store_true",
        help="a question without a prediction counts as wrong",
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--json", default="", help="write the numbers to this file too")


def main() -> None:
    parser = FlagParser(description="Score predictions files without a model.")
    parser.add_argument(
        "files", nargs="*", help="predictions; several are several data sets, in one table"
    )
    parser.add_argument(
        "--data", default="", help="question files with the gold answers, comma-separated"
    )
    parser.add_argument(
        "--skip_bad", action="store_true", help="leave malformed records out and count them"
    )
    add_report_flags(parser)
    args = parser.parse_args()
    if args.json:
        check_output(args.json, "--json")
    if len(sys.argv) == 1:
        return demo()
    if not args.files:
        raise InputError(
            "predictions.py: name a predictions file first: python predictions.py FILE --against"
            " OTHER"
        )
    settings = {
        name: getattr(args, name) for name in ("data", "punctuation", "skip_bad", "count_missing")
    }
    records = score_files(args.files, **settings)
    report(
        records,
        score_files(args.against, **settings) if args.against else None,
        args.markdown,
        args.json,
    )


def demo() -> None:
    """Two invented runs over four questions."""
    said = [
        ("Who draws maps?", "Ana Bell", "Ana Bell", "ana  bell."),
        ("Where is the harbour?", "Kelmouth", "Kelmouth, Norland", "Varen"),
        ("What is built?", "lanterns", "lanterns", "the lanterns"),
        ("Who founded it?", "Ivo Marr", "Ana Bell", None),
    ]

    def run(column: int) -> list[dict]:
        fields = (
            {"id": q[0], "question": q[0], "golds": [q[1]], "prediction": q[column], "metrics": {}}
            for q in said
        )
        return [scored(record) for record in fields]

    for question, gold, this, other in said:
        print(f"{question:22} gold {gold:10} this {this:18} other {other}")
    print()
    report(run(2), run(3))


if __name__ == "__main__":
    run_main(main)
