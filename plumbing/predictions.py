"""Scores a predictions file without a policy: `python eval.py --predictions FILE`.

    file -> records -> eval.py's field names -> gold answers of --data -> em, f1, cem -> report.py

The layouts are ours, FlashRAG's and R1-Searcher's. A prediction belongs to the question of --data
with the same id. If no question has this id, or if that question's text differs from the
prediction's field `question`, the question with the text of this field is taken. Verdicts and
counts of searches in R1-Searcher's files are kept. Trap: papers treat punctuation differently
(metrics.py).
"""

import argparse
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

from data import dataset_names, load_datasets, named_files
from errors import FlagParser, InputError, check_output, rank_of
from formats.fields import ID_FIELDS, field, gold_answers, id_of, task_of
from formats.records import convert_records, read_records, short, write_records
from metrics import PUNCTUATION, score_answer, summary_scores
from other_models.judge import Judge, add_verdicts
from other_models.reader import add_reader
from plumbing.report import report
from prompts import JUDGE_SEES

TEXT_FIELDS = ("prediction", "pred_ans", "output")  # ours, R1-Searcher's, FlashRAG's
GOLD_FIELDS = ("golds", "answer", "golden_answers")
VERDICTS = {"true": 1.0, "false": 0.0}


def as_written(record: dict, number: int, place: str) -> dict:
    """Converts a record of eval.py, R1-Searcher or FlashRAG to eval.py's fields."""
    key = next((name for name in TEXT_FIELDS if name in record), None)
    if key is None:
        raise InputError(
            f"no prediction in it: it has the fields {short(list(record))}; a prediction is in one "
            f"of {', '.join(TEXT_FIELDS)}"
        )
    if isinstance(record[key], dict) and "pred" in record[key]:  # FlashRAG: output {pred, ...}
        record = record | {key: record[key]["pred"]}
    task, question = task_of(record), text_of(record, "question") or ""
    if not question and not {*ID_FIELDS} & set(record):
        raise InputError(
            "field 'id' is missing, and field 'question' is missing or empty: what was asked?"
        )
    fields = {
        "id": id_of(record, number),
        "prediction": text_of(record, key),
        "question": question,
        "kind": text_of(record, "kind") or text_of(record, "source") or task,
        "task": task,
        "metrics": stored_numbers(record),
    }
    if key := next((name for name in GOLD_FIELDS if record.get(name)), None):
        fields["golds"] = gold_answers(record, key)
    if "gen_text_store" in record:  # R1-Searcher's name of it
        fields["transcript"] = text_of(record, "gen_text_store")
    if record.get("options"):
        fields["options"] = field(record, "options", list)
    return record | fields


def text_of(record: dict, name: str) -> str | None:
    """Returns the text of a field, or None if it is empty or missing; a number becomes text."""
    value = record.get(name)
    if type(value) in (int, float):
        return str(value)
    return field(record, name, str, "") or None


def stored_numbers(record: dict) -> dict[str, float | None]:
    """Returns the metrics that a record of eval.py has. From a record of R1-Searcher it makes
    `judged` (None if the verdict is unreadable), `searches` and `searched`.
    """
    if {"golds", "metrics"} <= set(record):
        return field(record, "metrics", dict)
    numbers, searches = {}, record.get("n_search")
    if "gpt4o_output" in record:
        numbers["judged"] = VERDICTS.get(str(record["gpt4o_output"]).strip(" .").lower())
    if isinstance(searches, int):
        numbers |= {"searches": float(searches), "searched": float(searches > 0)}
    return numbers


def scored(record: dict, punctuation: str = "") -> dict:
    """Adds em, f1 and cem, or ROUGE for a summary. If the record has em already, the metrics are
    computed again only if `punctuation` is given.
    """
    prediction, golds, task = record["prediction"], record["golds"], record["task"]
    if "em" in record["metrics"] and not punctuation:
        return record
    if task == "summary":
        return record | {"metrics": record["metrics"] | summary_scores(prediction, golds)}
    punctuation = punctuation or record.get("punctuation") or "space"
    scores = score_answer(prediction, golds, task, record.get("options") or (), punctuation)
    return record | {"metrics": record["metrics"] | scores}


def read_predictions(path: str | Path, skip_bad: bool = False) -> list[dict]:
    path = Path(path)
    return list(convert_records(path, read_records(path), as_written, skip_bad))


def joined(path: Path, records: list[dict], datasets: dict, count_missing: bool) -> list[dict]:
    """Adds each question's fields, such as golds and options, to its prediction; leaves out
    predictions that belong to no question. With `count_missing`, adds an empty prediction for each
    question without one, but only in data sets that have a prediction. Prints how many questions
    and predictions had no counterpart.
    """
    asked, names = [], ("id", "kind", "task", "question", "options")
    for dataset, questions in datasets.items():
        own = {"dataset": dataset} if len(datasets) > 1 else {}
        for q in questions:
            asked.append({name: getattr(q, name) for name in names} | {"golds": q.answers} | own)
    by_id = {item["id"]: item for item in asked}
    by_text = {tuple(item["question"].split()): item for item in asked}
    answered, datasets_here = [], set()
    for record in records:
        item, text = by_id.get(record["id"]), tuple(record["question"].split())
        if text and (item is None or tuple(item["question"].split()) != text):
            item = by_text.get(text)  # the id may be a mere line number
        if item:  # em is removed, so that `scored` computes it again: golds may have changed
            numbers = {name: value for name, value in record["metrics"].items() if name != "em"}
            answered.append(record | item | {"metrics": numbers})
            # Questions count as missing only in data sets that have a prediction.
            datasets_here.add(item.get("dataset"))
    if not answered:
        raise InputError(f"{path}: none of its predictions is of a question in --data")
    ids, foreign = {record["id"] for record in answered}, len(records) - len(answered)
    missing = [q for q in asked if q.get("dataset") in datasets_here and q["id"] not in ids]
    if missing or foreign:
        fate = "count as wrong" if count_missing else "are left out"
        print(
            f"{path}: {len(missing)} of {len(missing) + len(ids)} questions have no prediction "
            f"and {fate}; {foreign} predictions are of no question in --data",
            file=sys.stderr,
        )
    return answered + [q | {"prediction": None, "metrics": {}} for q in missing] * count_missing


def score_files(paths, data="", skip_bad=False, punctuation="", count_missing=False, seed=0):
    """Returns the records of all files, each with its metrics. If `data` has several files, a
    record's data set is the file that holds its question. Otherwise it is the record's field
    `dataset`, or without one the name of the predictions file.
    """
    if not paths:
        return []
    datasets = load_datasets(data, skip_bad, seed) if data else {}
    files, scores, uses = named_files(paths), [], Counter()
    for path, name in zip(files, dataset_names(files), strict=True):
        records = read_predictions(path, skip_bad)
        if data:
            records = joined(path, records, datasets, count_missing)
        samples = Counter((record["id"], record.get("sample", 0)) for record in records)
        [((again, _), count)] = samples.most_common(1)
        if count > 1:
            raise InputError(
                f"{path}: two predictions for id {short(again)}: give them different `sample`s"
            )
        if without := sum(not record.get("golds") for record in records):
            raise InputError(f"{path}: {without} predictions have no gold answer: give --data")
        for r in records:
            scores.append((name, scored(r, punctuation) | {"dataset": r.get("dataset") or name}))
        uses.update({record["id"] for record in records})
    for name, record in scores:
        record["id"] = f"{name}:{record['id']}" if uses[record["id"]] > 1 else record["id"]
    return [record for _, record in scores]


def check_alone() -> None:
    """Raises an InputError if there are several processes, because all would write one file."""
    if rank_of("WORLD_SIZE", 1) > 1:
        raise InputError("eval.py works in one process: start it as `python eval.py`")


def score_command(arguments: list[str] | None = None) -> None:
    parser = FlagParser("eval.py", description="Score predictions without a model.")
    add = parser.add_argument
    add(
        "--predictions", nargs="+", required=True, metavar="FILE,FILE", help="one for each data set"
    )
    add("--data", default="", help="question files with the gold answers, comma-separated")
    add("--skip_bad", action="store_true", help="leave malformed records out and count them")
    add(
        "--count_missing", action="store_true", help="count questions without a prediction as wrong"
    )
    add("--out", default="", help="write the scored records to this file")
    for name in ("judge", "reader", "in_8bit", "timeout", "output_dir", "world_seed"):
        kind = {"timeout": float, "world_seed": int}.get(name, str)
        add(f"--{name}", type=kind, default=argparse.SUPPRESS, help="see eval.py --help all")
    add("--judge_sees", default="", choices=["", *JUDGE_SEES], help="see eval.py --help all")
    add(
        "--against",
        default="",
        help="compare with another run: the files of its predictions, comma-separated",
    )
    add("--punctuation", default="", choices=["", *PUNCTUATION], help="see eval.py --help all")
    add("--all", action="store_true", help="print every metric")
    add("--markdown", action="store_true", help="print Markdown tables")
    add("--json", default="", help="write the numbers to this file too")
    args = parser.parse_args(arguments)
    for name in ("json", "out"):
        if path := getattr(args, name):
            check_output(path, f"--{name}")
    if args.count_missing and not args.data:
        raise InputError("--count_missing needs --data, which names the questions: give both")
    options = (args.data, args.skip_bad, args.punctuation, args.count_missing)
    records = score_files(args.predictions, *options)
    others = score_files(args.against, *options)
    if "judge" in args or "reader" in args:
        records = with_other_models(records, vars(args))
    if args.out:
        write_records(Path(args.out), records)
        print(f"predictions: {args.out}")
    report(records, others, args.markdown, args.json, brief=not args.all)


def with_other_models(records: list[dict], given: dict) -> list[dict]:
    """Adds the answers that --reader gives from the records' evidence, and --judge's verdicts."""
    from plumbing.build import build_judge, build_reader
    from policy import best_device  # loads torch, which scoring alone does not need
    from settings import Settings, check_limits

    own = [f.name for f in fields(Settings) if f.name in given]
    settings, device = Settings(**{name: given[name] for name in own}), best_device()
    check_limits(settings)
    reader = build_reader(settings, device) if settings.reader else None
    sees = given["judge_sees"] or one_judge(records) if settings.judge else ""
    return ask_others(records, reader, build_judge(settings, device, sees))


def ask_others(records: list[dict], reader, judge: Judge | None, sampling=()) -> list[dict]:
    """Adds the reader's answers and the judge's verdicts, if there is a reader or a judge.

    sampling   (temperature, top_p) of the reader; () decodes greedily
    """
    if reader:
        records = add_reader(records, reader, sampling)
        if reader.failures:
            print(f"reader: no answer to {reader.failures} of its requests; they count as wrong")
    if judge:
        records = add_verdicts(records, judge)
        if judge.silent:
            print(f"judge: no reply about {judge.silent} answers; run the command again for these")
    return records


def one_judge(records: list[dict]) -> str:
    """Returns what the judge sees of open questions (see JUDGE_SEES): the records' field
    `judge_sees` (default "question"), which must be the same in all records with a prediction. If
    no record has a prediction, returns "".
    """
    seen = sorted({str(r.get("judge_sees", "question")) for r in records if r["prediction"]})
    if len(seen) > 1:
        raise InputError(
            f"--judge: these predictions differ in what a judge sees ({', '.join(seen)}): give "
            "--judge_sees for all of them, or score the files one by one"
        )
    return "".join(seen)
