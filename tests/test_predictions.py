"""Tests predictions.py: layouts, the join with questions, published numbers, and bad files."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import message

from convert import convert
from errors import InputError
from formats.records import write_records
from plumbing import build
from plumbing.predictions import read_predictions, score_command, score_files
from plumbing.report import summarise

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
ASKED = {"id": "1", "question": "Where ?"}
OWN = ASKED | {"kind": "qa", "golds": ["Kelmouth"], "prediction": "Kelmouth"}
OWN |= {"metrics": {"em": 1.0}}
R1 = {"question": "Where ?", "answer": "Kelmouth", "pred_ans": " kelmouth. "}
R1 |= {"gpt4o_output": "True", "n_search": 2}
FLASHRAG = {"id": "test_0", "question": "Where ?", "golden_answers": ["Kelmouth", "Varen"]}
FLASHRAG |= {"output": {"pred": "Varen", "x": 1}}
QUESTIONS = [
    {"id": "a", "question": "Where ?", "answers": ["Kelmouth"]},
    {"id": "b", "question": "Who ?", "answers": ["Ana Bell"]},
    {"id": "c", "question": "?", "answers": ["B"]},
]


@pytest.fixture
def write(tmp_path):
    def write(*records, name="p.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write


@pytest.fixture
def questions(write):
    return write(*QUESTIONS, name="q.jsonl")


def metrics(path, *options):
    """Returns the metrics of each prediction of the file."""
    return [record["metrics"] for record in score_files([path], *options)]


def em(records):
    """Returns the mean exact match of all records."""
    return summarise(records)["all"]["em"][0]


# ------------------------------------------------------------------ the layouts of prediction files


def test_a_file_of_r1_searcher_keeps_its_verdicts_and_searches(write):
    others = [{**R1, "gpt4o_output": "False", "n_search": 0}, {**R1, "gpt4o_output": "maybe"}]
    records = score_files([write(R1, *others)])
    expected = {"em": 1, "f1": 1, "cem": 1, "judged": 1, "searches": 2, "searched": 1}
    assert records[0]["metrics"] == expected and records[1]["metrics"]["searched"] == 0
    assert [r["metrics"]["judged"] for r in records] == [1, 0, None]
    assert [r["id"] for r in records] == ["1", "2", "3"]
    empty = metrics(write({**R1, "pred_ans": None}, {**R1, "pred_ans": ""}))
    # An empty prediction is wrong, not an error.
    assert [numbers["em"] for numbers in empty] == [0, 0]


def test_flashrags_prediction_is_in_the_field_output_and_our_files_keep_their_metrics(write):
    assert metrics(write(FLASHRAG)) == [{"em": 1, "f1": 1, "cem": 1}]
    stored = {**OWN, "metrics": {"em": 0.25, "format": 1.0}, "transcript": "t", "evidence": None}
    assert score_files([write(stored)]) == [{**stored, "task": "qa", "dataset": "p"}]


def test_our_files_are_scored_again_if_another_punctuation_is_given(write):
    record = {**OWN, "golds": ["Spider-Man"], "prediction": "spiderman"}
    path = write({**record, "metrics": {"em": 0.0, "format": 1.0}})
    assert metrics(path, "", False, "delete") == [{"em": 1, "f1": 1, "cem": 1, "format": 1}]
    assert metrics(path, "", False, "space")[0]["em"] == 0
    questions = write({**ASKED, "answers": ["Spider-Man"]}, name="q.jsonl")
    path = write({**record, "punctuation": "delete"})  # the record says how it was scored
    assert metrics(path, questions)[0]["em"] == 1


def test_choices_math_and_summaries_are_scored_by_their_task(write):
    choice = {"task": "choice", "golds": ["B"], "prediction": "The correct answer is (B)."}
    math = {"task": "math", "golds": ["0.5"], "prediction": r"\frac{1}{2}"}
    summary = {"task": "summary", "golds": ["the cat lay down"], "prediction": "the cat sat down"}
    actual = metrics(write(*({"question": "?"} | record for record in (choice, math, summary))))
    assert [numbers.get("em") for numbers in actual] == [1, 1, None]
    # ROUGE-1 is ¾, ROUGE-2 ⅓ and ROUGE-L ¾: mean 0.6111.
    assert actual[2]["rouge"] == pytest.approx(0.6111, abs=1e-4)


def test_samples_and_options_are_read_from_any_layout(write):
    texts = enumerate(("Varen", "no"))
    answers = [{**FLASHRAG, "sample": i, "output": {"pred": text}} for i, text in texts]
    assert em(score_files([write(*answers)])) == 0.5
    choice = {"id": 1, "task": "choice", "golds": ["oak"], "prediction": "\\boxed{B}"}
    assert metrics(write({**choice, "options": ["elm", "oak"]}))[0]["em"] == 1


# -------------------------------------------------------------------------- the join with questions


def test_a_prediction_is_joined_with_its_question_by_id_or_else_by_text(write, questions, capsys):
    by_text = {"question": "Where  ?", "prediction": "Kelmouth"}
    path = write({"id": "b", "prediction": "Ana Bell"}, by_text, {"id": "z", "prediction": "?"})
    records = score_files([path], questions)
    joined = [(r["id"], *r["golds"], r["metrics"]["em"]) for r in records]
    assert joined == [("b", "Ana Bell", 1), ("a", "Kelmouth", 1)]
    warning = capsys.readouterr().err
    assert (
        "1 of 3 questions have no prediction and are left out; 1 predictions are of no" in warning
    )


def test_an_id_that_is_only_a_line_number_is_not_joined_with_another_question(write):
    who = {"id": "1", "question": "Who ?", "answers": ["Ana Bell"]}
    questions = write(
        who, {"id": "2", "question": "Where ?", "answers": ["Kelmouth"]}, name="q.jsonl"
    )
    # The prediction is on line 1 of its file, but its text is that of question 2.
    assert score_files([write(R1)], questions)[0]["id"] == "2"


def test_missing_predictions_count_as_wrong_only_with_count_missing(write, questions, capsys):
    path = write({"id": "a", "prediction": "Kelmouth"})
    assert em(score_files([path], questions)) == 1
    records = score_files([path], questions, count_missing=True)
    assert {r["dataset"] for r in records} == {"p"} and set(summarise(records)) == {"qa", "all"}
    assert len(records) == 3 and em(records) == pytest.approx(1 / 3)
    assert "2 of 3 questions have no prediction and count as wrong" in capsys.readouterr().err


def test_questions_of_another_data_set_do_not_count_as_missing(write, capsys):
    who, where = ({"id": 1, "question": q, "answers": ["Kelmouth"]} for q in ("Who ?", "Where ?"))
    two_sets = f"{write(who, name='nq.jsonl')},{write(where, name='wiki.jsonl')}"
    one = write({"question": "Who ?", "prediction": "Kelmouth"}, name="one.jsonl")
    two = write({"question": "Where ?", "prediction": "Varen"}, name="two.jsonl")
    records = score_files([f"{one},{two}"], two_sets)
    assert {r["dataset"]: r["metrics"]["em"] for r in records} == {"nq": 1, "wiki": 0}
    assert capsys.readouterr().err == ""


def test_files_with_the_same_name_and_line_numbers_as_ids_stay_two_data_sets(write):
    files = [write({**R1, "pred_ans": "no"}, name="y/nq.jsonl"), write(R1, name="x/nq.jsonl")]
    records = score_files(files)
    assert {r["dataset"]: r["metrics"]["em"] for r in records} == {files[1]: 1, files[0]: 0}
    assert [r["id"] for r in records] == [f"{file}:1" for file in files]


def test_two_predictions_of_a_question_or_no_prediction_of_any_are_an_error(write, questions):
    twice = [{"question": text, "prediction": "x"} for text in ("Where ?", "Where  ?")]
    assert "two predictions for id 'a'" in message(score_files, [write(*twice)], questions)
    unknown = message(score_files, [write({"id": "z", "prediction": "a"})], questions)
    assert "none of its predictions is of a question in --data" in unknown


# ---------------------------------------------------------------------------------------- bad input

A = {"id": "1", "prediction": "a"}


@pytest.mark.parametrize(
    "records, fragment",
    [
        ([], "no record to use"),
        ([[1]], "record 1: expected an object"),
        ([{"id": "1"}], "line 1: no prediction in it: it has the fields"),
        ([{**OWN, "prediction": ["a"]}], "line 1: field 'prediction': expected str"),
        ([{**OWN, "metrics": None}], "line 1: field 'metrics' is missing"),
        ([{"prediction": "a"}], "field 'id' is missing, and field 'question' is missing or empty"),
        ([{**A, "golds": "b"}] * 2, "two predictions for id '1'"),
        ([A], "1 predictions have no gold answer: give --data"),
        ([{**A, "golds": [None, "b"]}], "field 'golds': expected texts"),
        ([{**A, "golds": "a", "task": "cohice"}], "field 'task': 'cohice' is none of qa"),
    ],
)
def test_a_bad_predictions_file_is_a_one_line_error(records, fragment, write):
    path = write(*records)
    line = message(score_files, [path])
    assert fragment in line and path in line


def test_bad_records_are_skipped_and_counted(write, capsys):
    path = write(R1, {**R1, "pred_ans": ["a"]}, R1)
    assert len(score_files([path], skip_bad=True)) == 2
    warning = f"{path}: 1 of 3 records skipped; the first: {path}, line 2: field 'pred_ans'"
    assert warning in capsys.readouterr().err


# ---------------------------------------------------------------------------- the published numbers


@pytest.mark.parametrize(
    ("name", "data", "published"),
    [
        ("hotpotqa", "hotpotqa_500", (58.0, 65.4, 71.9, 75.0)),
        ("2wiki", "2wiki_500", (55.4, 63.6, 63.7, 65.0)),
        ("bamboogle", "bamboogle", (45.6, 52.8, 57.7, 54.4)),
    ],
)
def test_r1_searchers_published_predictions_give_its_papers_numbers_to_the_digit(
    name, data, published, tmp_path
):
    path = SHARED / "predictions" / f"r1_searcher_{name}_qwen_scores.jsonl"
    if not path.exists():
        pytest.skip("the published predictions are missing")
    # The file of questions has the same gold answers as the predictions.
    asked = tmp_path / "q.jsonl"
    write_records(asked, convert("r1_searcher", SHARED / "qa_eval" / f"{data}.jsonl"))
    for questions in ("", str(asked)):
        row = summarise(score_files([str(path)], questions))["all"]
        assert tuple(round(100 * row[c][0], 1) for c in ("em", "cem", "f1", "judged")) == published


# --------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "arguments, fragment",
    [
        ("--against {p}", "required: --predictions"),
        ("--predictions {p} --model m", "unknown flag --model"),
        ("--predictions {p} --json {p}/x.json", "x.json: cannot be written there"),
        ("--predictions {p} --out {folder}", "that is a folder: give another path"),
        ("--predictions {folder}", "is a directory"),
        ("--predictions {p} --count_missing", "--count_missing needs --data"),
        ("--predictions {p} --against none.jsonl", "none.jsonl: no such file"),
        ("--predictions {p} --judge m --timeout 0", "--timeout 0.0: must be above 0"),
        ("--predictions {p} --reader built-in --data {q}", "give --reader http"),
    ],
)
def test_a_wrong_command_is_a_one_line_error(arguments, fragment, write, questions, tmp_path):
    places = {"p": write(R1), "q": questions, "folder": tmp_path}
    assert fragment in message(score_command, arguments.format(**places).split())


def test_a_judge_gets_the_texts_that_the_protocol_names_and_all_files_the_same_ones(
    write, tmp_path, monkeypatch
):
    judged = []
    judge = SimpleNamespace(ask=lambda requests: judged.extend(requests) or ["yes"])
    monkeypatch.setattr(build, "load_llm", lambda *_, **__: judge)
    blind = write({**R1, "pred_ans": "Here.", "judge_sees": "normalized"}, name="b.jsonl")
    out = tmp_path / "out.jsonl"
    inputs = {"question": "Question: Where ?\nAccepted answers: Kelmouth\nGiven answer: Here."}
    inputs["normalized"] = "Accepted answers: kelmouth\nGiven answer: here"
    for flag, expected in (("", "normalized"), ("--judge_sees question", "question")):
        score_command(f"--predictions {blind} --judge J --out {out} {flag}".split())
        assert judged.pop()[1] == inputs[expected] and not judged
        assert read_predictions(out)[0]["judge_sees"] == expected
    command = f"--predictions {blind},{write({**R1, 'judge_sees': 5})} --judge J"
    assert "give --judge_sees for all" in message(score_command, command.split())
    assert not judged


def test_the_command_prints_a_table_and_a_comparison_and_writes_json(write, tmp_path, capsys):
    path = write(R1, {**R1, "question": "Who ?"})
    other = write(R1, {**R1, "question": "Who ?", "pred_ans": "no"}, name="o.jsonl")
    out, json_file = tmp_path / "out.jsonl", tmp_path / "new" / "t.json"
    command = f"--predictions {path} --against {other} --json {json_file} --out {out} --markdown"
    score_command(command.split())
    printed = capsys.readouterr().out
    assert "| qa | 2 | 1.000 [1.00, 1.00] |" in printed
    assert "paired: 2 questions of both runs" in printed
    assert json.loads(json_file.read_text())["comparison"]["all"]["em"]["difference"][0] == 0.5
    assert summarise(read_predictions(out)) == summarise(score_files([path]))
