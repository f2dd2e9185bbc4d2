"""Scores predictions files without a policy and without torch: `python eval.py --predictions FILE`.

    file -> records -> our fields -> gold answers of --data -> em, f1, cem -> report.py

There are three layouts:

    ours           {"id", "question", "golds", "prediction", "metrics", ...}, written by eval.py
    FlashRAG's     {"id", "question", "golden_answers", "output": {"pred"}}
    R1-Searcher's  {"question", "answer", "pred_ans", "gen_text_store", "gpt4o_output", "n_search"}

A prediction belongs to the question of --data with the same text; a prediction without the text of
its question, to the one with the same id. Texts come first because many files have line numbers as
ids. A question of --data without a prediction counts as wrong, unless --skip_missing is given.
Trap: papers treat punctuation differently (metrics.py).
"""

import sys
from pathlib import Path

from data import answers_of, id_of, load_datasets, named_files
from errors import InputError, check_output
from formats.records import Records, keep_old, read_records, short, write_records
from metrics import score_answer, summary_scores
from other_models.judge import Judge, add_verdicts
from other_models.reader import add_reader
from papers import record_of
from plumbing.report import report, same_text
from settings import Settings


# -------------------------------------------------------------------------------- the three layouts
def our_record(record: dict, number: int) -> dict:
    """Converts a record of one of the three layouts to our fields; its other fields are kept."""
    if "pred_ans" in record:
        record = r1_searcher_record(record)
    elif "prediction" not in record and "output" in record:
        fields = {"prediction": record["output"]["pred"], "golds": record.get("golden_answers")}
        record = record | fields
    if not isinstance(record["prediction"], str | None):
        raise InputError(f"the prediction is {short(record['prediction'])}: expected a text")
    record = {"question": "", "task": "qa", "metrics": {}} | record
    golds = record.get("golds")
    golds = answers_of(golds if isinstance(golds, list) else [golds])
    names = ("kind", "source", "data_source", "task")
    kind = next((record[name] for name in names if record.get(name)), "")
    return record | {"id": id_of(record, number), "golds": golds, "kind": kind}


def r1_searcher_record(record: dict) -> dict:
    """Keeps the transcript and the published verdict, which is None if it is unreadable."""
    fields = {
        "transcript": record.get("gen_text_store"),
        "prediction": record["pred_ans"],
        "golds": record.get("answer"),
    }
    if "gpt4o_output" in record:
        verdict = str(record["gpt4o_output"]).strip(" .").lower()
        fields["metrics"] = {"judged": {"true": 1.0, "false": 0.0}.get(verdict)}
    return fields | record


def read_predictions(path: str | Path, skip_bad: bool = False) -> Records:
    return read_records(path, our_record, skip_bad)


# ------------------------------------------------------------------------------------------- scores
def scored(record: dict, punctuation: str, again: bool = False) -> dict:
    """Adds em, f1 and cem, or ROUGE for a summary. If the record has em already, the metrics are
    computed again only if `again`, or if `punctuation` is given.
    """
    prediction = record["prediction"]
    golds = record["golds"]
    task = record["task"]
    if "em" in record["metrics"] and not (again or punctuation):
        return record
    if task == "summary":
        scores = summary_scores(prediction, golds)
    else:
        punctuation = punctuation or record.get("punctuation", "space")
        scores = score_answer(prediction, golds, task, record.get("options", ()), punctuation)
    return record | {"metrics": record["metrics"] | scores}


def score_files(
    paths: str, settings: Settings, punctuation: str = "", skip_missing: bool = False
) -> Records:
    """Returns the records of all files, with their metrics. A record's data set is the file of
    --data that holds its question; without --data, its field `dataset` or the predictions file.
    Questions of --data that no file answers get a record too, unless `skip_missing` is True.
    """
    if not paths:
        return []
    files = named_files(paths)
    asked = asked_questions(settings)
    records = []
    for name, path in files.items():
        own = read_predictions(path, settings.skip_bad)
        if asked:
            own = with_questions(path, own, asked)
        if without := sum(not record["golds"] for record in own):
            raise InputError(f"{path}: {without} predictions have no gold answer: give --data")
        for record in own:
            place = {"dataset": record.get("dataset", name)}
            if len(files) > 1:  # two files may count their questions from 1
                place["id"] = f"{name}:{record['id']}"
            records.append(scored(record, punctuation, again=bool(asked)) | place)
    if missing := unanswered(records, asked, punctuation):
        how = "are left out" if skip_missing else "count as wrong (--skip_missing leaves them out)"
        print(
            f"{paths}: {len(missing)} of {len(asked)} questions have no prediction and {how}",
            file=sys.stderr,
        )
    return records if skip_missing else records + missing


def asked_questions(settings: Settings) -> Records:
    """Returns the fields of each question of --data, such as golds and options."""
    if not settings.data:
        return []
    return [
        question.record | {"dataset": dataset}
        for dataset, questions in load_datasets(
            settings.data, settings.skip_bad, settings.seed
        ).items()
        for question in questions
    ]


def with_questions(path: Path, records: Records, asked: Records) -> Records:
    """Adds the fields of its question to each prediction. Prints how many predictions have no
    question: these are left out.
    """
    known = {}
    for fields in asked:
        text = same_text(fields)
        known[fields["id"]] = known[text] = known[fields["id"], text] = fields
    answered = []
    for record in records:
        text = same_text(record)
        # Two questions may have the same text: then the id decides.
        if fields := known.get((record["id"], text)) or known.get(text):
            answered.append(record | fields)
    if not answered:
        raise InputError(f"{path}: none of its predictions is of a question in --data")
    if foreign := len(records) - len(answered):
        print(f"{path}: {foreign} predictions are of no question in --data", file=sys.stderr)
    return answered


def unanswered(records: Records, asked: Records, punctuation: str) -> Records:
    """Returns a record without a prediction for each question that has none. If the predictions
    have verdicts, its verdict is "wrong".
    """
    answered = {*map(same_text, records)}
    judged = {"judged": 0.0} if "judged" in records[0]["metrics"] else {}
    empty = {"prediction": None, "evidence": None, "metrics": judged}
    return [
        scored(empty | fields, punctuation) for fields in asked if same_text(fields) not in answered
    ]


# ------------------------------------------------------------------------------------- other models
def score_predictions(settings: Settings, options) -> None:
    """Runs `eval.py --predictions`; `options` are an eval.Options."""
    if options.out:
        check_output(options.out, "--out")
    how = settings, options.punctuation, options.skip_missing
    records = score_files(options.predictions, *how)
    others = score_files(options.against, *how)
    reader, judge = build_others(settings, records[0].get("judge_sees", "question"))
    whole = "whole_reply" in record_of(settings.recipe, settings.variant).stages[1]
    records = ask_others(records, reader, judge, whole=whole)
    if options.out:
        keep_old(Path(options.out))
        write_records(Path(options.out), records)
        print(f"predictions: {options.out}")
    report(records, others, options)


def build_others(settings: Settings, sees: str = "") -> tuple:
    """Returns (reader, judge), each None if it is not asked for. `sees`: see build_judge."""
    if not (settings.judge or settings.reader):
        return None, None
    from plumbing.build import build_judge, build_reader
    from policy import best_device  # loads torch, which scoring alone does not need

    reader = build_reader(settings, best_device()) if settings.reader else None
    return reader, build_judge(settings, best_device(), sees)


def ask_others(records: Records, reader, judge: Judge | None, sampling=(), whole=False) -> Records:
    """Adds the reader's answers and the judge's verdicts, if there is a reader or a judge.

    sampling   (temperature, top_p) of the reader; () decodes greedily
    whole      whether the reader's whole reply is its answer, as in R-Search's eq. 4
    """
    if reader:
        records = add_reader(records, reader, sampling, whole)
        if reader.failures:
            print(f"reader: no answer to {reader.failures} of its requests; they count as wrong")
    if judge:
        records = add_verdicts(records, judge)
    return records
