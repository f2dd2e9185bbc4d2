"""Tests predictions.py: layouts, the join with questions, published numbers, and bad files."""

import json
from pathlib import Path

import pytest
from conftest import ScriptedModel, message

import eval as evaluation
from plumbing import build, predictions
from plumbing.predictions import read_predictions
from plumbing.report import summarise
from settings import Settings

SHARED = Path(__file__).parents[2] / "shared" / "data"
ASKED = {"id": "1", "question": "Where ?"}
OWN = ASKED | {"kind": "qa", "golds": ["Kelmouth"], "prediction": "Kelmouth"}
OWN |= {"metrics": {"em": 1.0}}
R1 = {"question": "Where ?", "answer": "Kelmouth", "pred_ans": " kelmouth. "}
R1 |= {"gpt4o_output": "True"}
FLASHRAG = {"id": "test_0", "question": "Where ?", "golden_answers": ["Kelmouth", 42]}
FLASHRAG |= {"output": {"pred": "42", "x": 1}, "data_source": "nq"}
QUESTIONS = [
    {"id": "a", "question": "Where ?", "answers": ["Kelmouth"]},
    {"id": "b", "question": "Who ?", "answers": ["Ana Bell"]},
    {"id": "c", "question": "?", "answers": ["B"]},
]


@pytest.fixture
def write(tmp_path):
    def write(*records, name="p.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write


@pytest.fixture
def questions(write):
    return write(*QUESTIONS, name="q.jsonl")


def score_files(paths, data=""):
    return predictions.score_files(paths, Settings(data=data))


def metrics(path, *options):
    """Returns the metrics of each prediction of the file."""
    return [record["metrics"] for record in score_files(path, *options)]


def score(words: str) -> None:
    """Runs `python eval.py WORDS`, which with --predictions ends before torch is loaded."""
    with pytest.raises(SystemExit):
        evaluation.score_only(words.split())


# ------------------------------------------------------------------ the layouts of prediction files


def test_a_file_of_r1_searcher_keeps_its_verdicts_and_transcripts(write):
    others = [{**R1, "gpt4o_output": "False"}, {**R1, "gpt4o_output": "maybe", "pred_ans": None}]
    records = score_files(write({**R1, "gen_text_store": "text"}, *others))
    assert records[0]["metrics"] == {"em": 1, "f1": 1, "cem": 1, "judged": 1}
    assert records[0]["transcript"] == "text"
    assert [(r["id"], r["metrics"]["judged"]) for r in records] == [("1", 1), ("2", 0), ("3", None)]
    assert records[2]["metrics"]["em"] == 0  # an empty prediction is wrong, not an error


def test_flashrags_prediction_is_in_the_field_output_and_our_files_keep_their_metrics(write):
    (record,) = score_files(write(FLASHRAG))
    assert record["metrics"] == {"em": 1, "f1": 1, "cem": 1}
    assert (record["id"], record["kind"]) == ("nq:test_0", "nq")  # a merged file repeats its ids
    stored = {**OWN, "metrics": {"em": 0.25, "format": 1.0}, "transcript": "t", "evidence": None}
    assert score_files(write(stored)) == [{**stored, "task": "qa", "dataset": "p"}]


def test_our_files_are_scored_again_with_the_golds_of_the_data(write, capsys):
    # The record says how punctuation was treated.
    record = {**OWN, "golds": ["?"], "prediction": "spiderman", "punctuation": "delete"}
    questions = write({**ASKED, "answers": ["Spider-Man"]}, name="q.jsonl")
    assert metrics(write(record), questions)[0]["em"] == 1
    # Released codes treat it differently: --punctuation.
    score(f"--predictions {write(record)} --data {questions} --punctuation space")
    assert "| 1 | 0.000 [" in capsys.readouterr().out


def test_a_prediction_is_scored_by_its_task(write):
    choice = {"task": "choice", "golds": ["oak"], "options": ["elm", "oak"], "prediction": "(B)"}
    assert metrics(write(choice))[0]["em"] == 1


# -------------------------------------------------------------------------- the join with questions


def test_a_prediction_is_joined_with_its_question_by_text_or_else_by_id(write, questions, capsys):
    # The second prediction has only a text; its id "c" is a line number of another program.
    by_text = {"id": "c", "question": "Where  ?", "prediction": "Kelmouth"}
    path = write({"id": "b", "prediction": "Ana Bell"}, by_text, {"id": "z", "prediction": "?"})
    records = score_files(path, questions)
    joined = [(r["id"], *r["golds"], r["metrics"]["em"]) for r in records]
    assert joined == [("b", "Ana Bell", 1), ("a", "Kelmouth", 1), ("c", "B", 0)]
    assert "1 predictions are of no question" in capsys.readouterr().err
    unknown = message(score_files, write({"id": "z", "prediction": "a"}), questions)
    assert "none of its predictions is of a question in --data" in unknown


def test_a_missing_prediction_counts_as_wrong_unless_it_is_skipped(write, questions, capsys):
    path = write(R1, {"id": "b", "prediction": "Ana Bell"})
    for more, row, how in (
        ("", "| qa   | 3 | 0.667 [", "count as wrong (--skip_missing leaves them out)"),
        ("--skip_missing", "| qa   | 2 | 1.000 [", "are left out"),
    ):
        score(f"--predictions {path} --data {questions} {more}")
        out, err = capsys.readouterr()
        assert row in out and f"1 of 3 questions have no prediction and {how}" in err
    # A published verdict is 0 too: a reader of the table must not see a mean over fewer questions.
    assert [r["metrics"].get("judged") for r in score_files(path, questions)] == [1, None, 0]


def test_the_file_of_data_that_holds_a_question_is_its_data_set(write):
    who, where = ({"id": 1, "question": q, "answers": ["Kelmouth"]} for q in ("Who ?", "Where ?"))
    two_sets = f"{write(who, name='nq.jsonl')},{write(where, name='wiki.jsonl')}"
    one = write({"question": "Who ?", "prediction": "Kelmouth"}, name="one.jsonl")
    two = write({"question": "Where ?", "prediction": "Varen"}, name="two.jsonl")
    records = score_files(f"{one},{two}", two_sets)  # no file has all questions
    found = [(r["dataset"], r["id"], r["metrics"]["em"]) for r in records]
    assert found == [("nq", "one:nq:1", 1), ("wiki", "two:wiki:1", 0)]


# ---------------------------------------------------------------------------------------- bad input

A = {"id": "1", "prediction": "a"}


@pytest.mark.parametrize(
    "records, fragment",
    [
        ([], "no record to use"),
        ([{"id": "1"}], "line 1: field 'prediction' is missing"),
        ([A, {**OWN, "prediction": ["a"]}], "line 2: the prediction is ['a']: expected a text"),
        ([A], "1 predictions have no gold answer: give --data"),
    ],
)
def test_a_bad_predictions_file_is_a_one_line_error(records, fragment, write):
    path = write(*records)
    line = message(score_files, path)
    assert fragment in line and path in line


# ---------------------------------------------------------------------------- the published numbers


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("hotpotqa", (58.0, 65.4, 71.9, 75.0)),
        ("2wiki", (55.4, 63.6, 63.7, 65.0)),
        ("bamboogle", (45.6, 52.8, 57.7, 54.4)),
    ],
)
def test_r1_searchers_published_predictions_give_its_papers_numbers_to_the_digit(name, published):
    path = SHARED / "predictions" / f"r1_searcher_{name}_qwen_scores.jsonl"
    if not path.exists():
        pytest.skip("the published predictions are missing")
    row = summarise(score_files(str(path)))["all"]
    assert tuple(round(100 * row[c][0], 1) for c in ("em", "cem", "f1", "judged")) == published


# --------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "sees, text",
    [
        ("question", "Question: Where ?\nAccepted answers: Kelmouth\nGiven answer: Here."),
        ("normalized", "Accepted answers: kelmouth\nGiven answer: here"),
    ],
)
def test_a_judge_gets_the_texts_that_the_protocol_names(sees, text, write, tmp_path, monkeypatch):
    judge = ScriptedModel(lambda text: "yes")
    monkeypatch.setattr(build, "load_llm", lambda *_, **__: judge)
    path, out = write({**R1, "pred_ans": "Here.", "judge_sees": sees}), tmp_path / "out.jsonl"
    score(f"--predictions {path} --judge J --out {out}")
    assert judge.batches[0][0][1] == text and read_predictions(out)[0]["judge_sees"] == sees


def test_the_command_prints_a_table_and_a_comparison_and_writes_the_scores(write, tmp_path, capsys):
    path, out = write(R1), tmp_path / "out.jsonl"
    other = write({**R1, "pred_ans": "no"}, name="o.jsonl")
    score(f"--predictions {path} --against {other} --out {out}")
    printed = capsys.readouterr().out
    assert "| qa   | 1 | 1.000 [1.00, 1.00] |" in printed
    assert "paired: 1 questions of both runs" in printed and "difference +1.000 [" in printed
    assert summarise(read_predictions(out)) == summarise(score_files(path))
