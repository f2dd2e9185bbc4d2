"""A predictions file, in any layout, scored without a model: `python eval.py --predictions FILE`.

    file -> records -> as eval.py writes them -> joined with --data -> em, f1, cem -> report.py

A prediction belongs to the question of --data with its id, else to the one with its text. What is
missing is told, and is no part of the mean unless --count_missing says so. What the file brings (a
judge's verdicts, searches) is kept. Trap: R1-Searcher's files score under punctuation that becomes
a blank; other papers delete it (--punctuation delete).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

from data import dataset_names, load_datasets, named_files
from errors import FlagParser, InputError, check_output, check_value
from formats.layouts import TASKS, need, option_texts, optional, wrong
from formats.records import byte_lines, read_records, report_skipped, short, type_name
from metrics import score_answer, summary_scores
from plumbing.report import report
from plumbing.resume import write_records
from prompts import PROTOCOLS

PUNCTUATION = ("space", "delete")
TEXT_FIELDS = ("prediction", "pred", "pred_ans", "predicted_answer", "output", "response")
GOLD_FIELDS = ("golds", "golden_answers", "answers", "answer", "ground_truth")
ID_FIELDS = ("id", "_id", "idx", "question_id", "qid")
VERDICTS = dict.fromkeys(("true", "yes", "1", "1.0"), 1.0)
VERDICTS |= dict.fromkeys(("false", "no", "0", "0.0"), 0.0)
DOCUMENT_TAGS = {p.documents_tags[0] for p in PROTOCOLS.values() if p.documents_tags}

# --------------------------------------------------------------------------------------- one record


def as_written(record: dict) -> dict:
    """A record of eval.py, R1-Searcher, FlashRAG or anybody, with eval.py's names."""
    key = next((name for name in TEXT_FIELDS if name in record), None)
    if key is None:
        known = f"known are {', '.join(TEXT_FIELDS)}, or one JSON object of {{id: prediction}}"
        raise InputError(f"no prediction in it: it has the fields {short(list(record))}; {known}")
    if isinstance(record[key], dict) and "pred" in record[key]:  # FlashRAG: output {pred, ...}
        record = record | {key: record[key]["pred"]}
    texts = [name for name in ("question", "kind", "source", "dataset") if record.get(name)]
    found = {name: text_of(record, name) for name in texts} | {"prediction": text_of(record, key)}
    if key := first_given(record, ID_FIELDS):
        found["id"] = str(record[key])
    elif "question" not in found:
        raise InputError("field 'id' and field 'question' are both missing: what was asked?")
    if key := first_given(record, GOLD_FIELDS):
        golds = record[key] if isinstance(record[key], list) else [record[key]]
        found["golds"] = [text_of({key: gold}, key) for gold in golds]
        if not all(gold and gold.strip() for gold in found["golds"]):
            raise wrong(key, "holds an empty answer: every prediction would cover it")
    found["task"] = optional(record, "task") or "qa"
    if record.get("options"):
        found["options"] = option_texts(record)
    treated = record.get("punctuation", "space")
    for name, value, known in (
        ("task", found["task"], TASKS),
        ("punctuation", treated, PUNCTUATION),
    ):
        if value not in known:
            raise wrong(name, f"{short(value)} is none of {', '.join(known)}")
    if type(record.get("sample", 0)) is not int:
        raise wrong("sample", f"expected a whole number, found {short(record['sample'])}")
    return record | found | {"metrics": stored_numbers(record)}


def first_given(record: dict, names: tuple[str, ...]) -> str:
    return next((name for name in names if record.get(name) not in (None, "", [])), "")


def text_of(record: dict, name: str) -> str | None:
    """A string, or None for no answer; a number is its text."""
    value = record.get(name)
    if type(value) in (int, float):
        return str(value)
    if value is not None and not isinstance(value, str):
        raise wrong(name, f"expected a string, found {type_name(value)} {short(value)}")
    return value


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # NaN is not below anything


def stored_numbers(record: dict) -> dict[str, float | None]:
    """eval.py's metrics; of others a judge's verdict (None: it cannot be read) and the searches."""
    if "metrics" in record:
        for name, value in need(record, "metrics", dict).items():
            if value is not None and not is_number(value):
                raise wrong("metrics", f"{name}: expected a number, found {short(value)}")
        return record["metrics"]
    numbers, searches = {}, record.get("n_search")
    for name in ("gpt4o_output", "judge", "verdict"):
        if name in record:
            numbers["judged"] = VERDICTS.get(str(record[name]).strip(" .").lower())
    for name in ("gen_text_store", "transcript"):
        if not is_number(searches) and isinstance(record.get(name), str):
            searches = sum(record[name].count(tag) for tag in DOCUMENT_TAGS)
    if is_number(searches):
        numbers |= {"searches": float(searches), "searched": float(searches > 0)}
    return numbers


def scored(record: dict, punctuation: str = "") -> dict:
    """The record with em, f1 and cem, unless it has them and no other punctuation is asked for."""
    task = record.get("task", "qa")
    record = {"kind": record.get("source") or task, "task": task, "question": ""} | record
    if "em" in record["metrics"] and not punctuation:
        return record
    prediction, golds, options = record["prediction"], record["golds"], record.get("options") or ()
    if task == "summary":
        scores = summary_scores(prediction, golds)
    else:
        punctuation = punctuation or record.get("punctuation", "space")
        scores = score_answer(prediction, golds, task, options, punctuation)
    return record | {"metrics": record["metrics"] | scores}


# -------------------------------------------------------------------------------------------- files


def records_in(path: Path) -> list[tuple[int, str, object]]:
    """(number, place, record). HotpotQA's own layout is one object: {"answer": {id: prediction}}."""
    records = list(read_records(path))
    place, last = records[-1][1:] if records else ("", {})
    if isinstance(last, InputError) and len(records) > 1 and place.startswith("line"):
        *_, line = byte_lines(path)
        if not line.endswith(b"\n"):  # an interrupt cut it short: the run may still be at it
            records.pop()
    elif len(records) == 1 and not {*TEXT_FIELDS, *ID_FIELDS, "question"} & set(last):
        told = last["answer"] if isinstance(last.get("answer"), dict) else last
        if not any(isinstance(value, list | dict) for value in told.values()):
            pairs = [{"id": key, "prediction": text} for key, text in told.items()]
            return [(i, f"id {short(pair['id'])}", pair) for i, pair in enumerate(pairs, 1)]
    return records


def read_predictions(path: str | Path, skip_bad: bool = False) -> list[dict]:
    path, found, problems = Path(path), [], []
    for number, place, record in records_in(path):
        try:
            if isinstance(record, InputError):
                raise record
            found.append({"id": str(number)} | as_written(record))
        except InputError as error:
            problems.append(f"{path}, {place}: {error}")
            if not skip_bad:
                advice = "correct it, or leave it out with --skip_bad"
                raise InputError(f"{problems[0]}: {advice}") from None
    report_skipped(path, len(found), problems, "record")
    return found


def joined(path: Path, records: list[dict], datasets: dict, count_missing: bool) -> list[dict]:
    """The records of the questions in `datasets`, with golds, task and options; says what is
    missing on either side.
    """
    asked = []
    for name, questions in datasets.items():
        for q in questions:
            item = {"id": q.id, "kind": q.kind, "task": q.task, "question": q.question}
            item |= {"options": list(q.options)} if q.options else {}
            item |= {"dataset": name} if len(datasets) > 1 else {}
            asked.append(item | {"golds": q.answers})
    by_id = {item["id"]: item for item in asked}
    by_text = {tuple(item["question"].split()): item for item in asked}
    found, here = [], set()
    for record in records:
        item, text = by_id.get(record["id"]), tuple(record.get("question", "").split())
        if text and (item is None or tuple(item["question"].split()) != text):
            item = by_text.get(text)  # an id that counts lines says nothing
        if item:  # with other golds, it is scored anew
            numbers = {name: value for name, value in record["metrics"].items() if name != "em"}
            found.append(record | item | {"metrics": numbers})
            here.add(item.get("dataset"))  # another data set's questions are not missing
    if not found:
        what = f"none of its {len(records)} predictions is of a question in --data"
        raise InputError(f"{path}: {what}: give the matching file")
    answered, foreign = {record["id"] for record in found}, len(records) - len(found)
    missing = [q for q in asked if q.get("dataset") in here and q["id"] not in answered]
    if missing or foreign:
        fate = "count as wrong" if count_missing else "are left out"
        print(
            f"{path}: predictions for {len(answered)} of {len(answered) + len(missing)} questions: "
            f"{len(missing)} are missing and {fate}; {foreign} predictions are of no question in "
            "--data",
            file=sys.stderr,
        )
    unanswered = [item | {"prediction": None, "metrics": {}} for item in missing]
    return found + unanswered * count_missing


def score_files(
    paths: list[str], data="", skip_bad=False, punctuation="", count_missing=False
) -> list[dict]:
    """Prediction records with metrics, of the questions in `data` or of all that have gold answers.
    Each file is a data set of its own unless `data` names several; ids are unique over all.

    punctuation    "space" or "delete"; "" is what eval.py scored with, and "space" for all others
    count_missing  a question without a prediction is wrong in em, f1 and cem; else only told of
    """
    if count_missing and not data:
        raise InputError("--count_missing: which questions are missing is known only with --data")
    datasets = load_datasets(data, skip_bad) if data else {}
    files, scores, uses = named_files(paths) if paths else [], [], Counter()
    for path, name in zip(files, dataset_names(files), strict=True):
        records = read_predictions(path, skip_bad)
        if data:
            records = joined(path, records, datasets, count_missing)
        samples = Counter((record["id"], record.get("sample", 0)) for record in records)
        [((again, _), count)] = samples.most_common(1)
        if count > 1:
            raise InputError(f"{path}: two predictions for id {short(again)}: number each `sample`")
        if without := [record["id"] for record in records if not record.get("golds")]:
            what = f"{len(without)} of {len(records)} predictions have no gold answer"
            raise InputError(f"{path}: {what} (the first: id {short(without[0])}): give --data")
        scores += [(name, {"dataset": name} | scored(r, punctuation)) for r in records]
        uses.update({record["id"] for record in records})
    if files and len(datasets) > 1:
        for name in datasets.keys() - {record["dataset"] for _, record in scores}:
            what = f"no prediction for any of its {len(datasets[name])} questions"
            print(f"{name}: {what}: it has no row", file=sys.stderr)
    for name, record in scores:
        record["id"] = f"{name}:{record['id']}" if uses[record["id"]] > 1 else record["id"]
    return [record for _, record in scores]


# --------------------------------------------------------------------------------- the command line


def add_report_flags(parser) -> None:
    """Flags of every command that ends in a table."""
    add = parser.add_argument
    add("--against", nargs="+", default=[], metavar="FILE", help="another run, compared in pairs")
    add("--punctuation", default="", choices=["", *PUNCTUATION], help="becomes a blank, or nothing")
    add("--markdown", action="store_true", help="print Markdown tables")
    add("--json", default="", help="write the numbers to this file too")


def score_command(arguments: list[str] | None = None) -> None:
    parser = FlagParser("eval.py", description="Score predictions without a model.")
    add = parser.add_argument
    add("--predictions", nargs="+", required=True, metavar="FILE,FILE", help="one data set each")
    add("--data", default="", help="question files with the gold answers, comma-separated")
    add("--skip_bad", action="store_true", help="leave malformed records out and count them")
    add("--count_missing", action="store_true", help="a question without a prediction is wrong")
    add("--out", default="", help="write the scored records there")
    for name in ("judge", "reader", "in_8bit", "timeout", "runs", "world_seed"):
        kind = {"timeout": float, "world_seed": int}.get(name, str)
        add(f"--{name}", type=kind, default=argparse.SUPPRESS, help="of another model: see eval.py")
    add_report_flags(parser)
    args, rest = parser.parse_known_args(arguments)
    if rest:
        why = "has no meaning with --predictions, as nothing is rolled out"
        raise InputError(f"{rest[0]} {why}: leave one of them out")
    for name in ("json", "out"):
        if path := getattr(args, name):
            check_output(path, f"--{name}")
    how = (args.data, args.skip_bad, args.punctuation, args.count_missing)
    records, others = score_files(args.predictions, *how), score_files(args.against, *how)
    if "judge" in args or "reader" in args:
        records = told_by_others(records, vars(args))
    if args.out:
        write_records(Path(args.out), records)
        print(f"predictions: {args.out}")
    report(records, others, args.markdown, args.json)


def told_by_others(records: list[dict], given: dict) -> list[dict]:
    """With what --reader answers from their evidence and --judge says of their predictions."""
    # Scoring alone starts without torch: what asks a model is imported only here.
    from plumbing.score import ask_others, build_judge, build_reader
    from policy import best_device
    from settings import Settings

    limits = {f.name: f.metadata for f in fields(Settings) if f.name in given}
    for name in limits:
        check_value(name, given[name], limits[name])
    settings, device = Settings(**{name: given[name] for name in limits}), best_device()
    reader = build_reader(settings, device) if settings.reader else None
    return ask_others(records, reader, build_judge(settings, device))
