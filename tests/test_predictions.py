"""predictions.py: every layout, the join with questions, the published numbers, and bad files in
one line.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data import Question
from errors import InputError
from plumbing import predictions
from plumbing.predictions import read_predictions, score_file, score_files
from plumbing.report import summarise

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
OWN = {
    "id": "1",
    "kind": "qa",
    "question": "Where ?",
    "golds": ["Kelmouth"],
    "prediction": "Kelmouth",
    "metrics": {"em": 1.0},
}
R1 = {
    "question": "Where ?",
    "answer": "Kelmouth",
    "pred_ans": " kelmouth. ",
    "gpt4o_output": "True",
    "n_search": 2,
}
FLASHRAG = {
    "id": "test_0",
    "question": "Where ?",
    "golden_answers": ["Kelmouth", "Varen"],
    "output": {"pred": "Varen", "x": 1},
}


@pytest.fixture
def write(tmp_path):
    def write(*records, name="p.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


# ------------------------------------------------------------------------------------------ layouts


def test_a_file_of_r1_searcher_keeps_its_verdicts_and_searches(write):
    record = score_file(
        write(R1, {**R1, "gpt4o_output": "False", "n_search": 0}, {**R1, "gpt4o_output": "maybe"})
    )
    assert record[0]["metrics"] == {
        "em": 1,
        "f1": 1,
        "cem": 1,
        "judged": 1,
        "searches": 2,
        "searched": 1,
    }
    assert [r["metrics"]["judged"] for r in record] == [1, 0, None] and record[1]["metrics"][
        "searched"
    ] == 0
    assert [r["id"] for r in record] == ["1", "2", "3"]


def test_searches_are_counted_in_a_transcript_where_no_number_is_given(write):
    block = (
        "<|begin_of_query|> a <|end_of_query|>\n\n<|begin_of_documents|>\n(1)"
        " b\n<|end_of_documents|>\n\n"
    )
    record = {k: v for k, v in R1.items() if k != "n_search"} | {"gen_text_store": block * 3}
    assert score_file(write(record))[0]["metrics"]["searches"] == 3


def test_a_file_of_flashrag_has_its_prediction_inside_output(write):
    assert score_file(write(FLASHRAG))[0]["metrics"] == {"em": 1, "f1": 1, "cem": 1}


def test_a_file_of_ours_keeps_every_number_that_was_stored(write):
    stored = {**OWN, "metrics": {"em": 0.25, "format": 1.0}, "transcript": "t"}
    (record,) = score_file(write(stored))
    assert record == {**stored, "task": "qa", "dataset": "p"}


def test_ours_is_scored_anew_when_another_punctuation_is_asked_for(write):
    path = write(
        {
            **OWN,
            "golds": ["Spider-Man"],
            "prediction": "spiderman",
            "metrics": {"em": 0.0, "format": 1.0},
        }
    )
    assert score_file(path, punctuation="delete")[0]["metrics"] == {
        "em": 1,
        "f1": 1,
        "cem": 1,
        "format": 1,
    }
    assert score_file(path, punctuation="space")[0]["metrics"]["em"] == 0


def test_choices_math_and_summaries_are_scored_as_such(write):
    choice = {
        "id": "1",
        "question": "?",
        "task": "choice",
        "golds": ["B"],
        "prediction": "The correct answer is (B).",
    }
    math = {
        "id": "2",
        "question": "?",
        "task": "math",
        "golds": ["0.5"],
        "prediction": r"\frac{1}{2}",
    }
    summary = {
        "id": "3",
        "question": "?",
        "task": "summary",
        "golds": ["the cat lay down"],
        "prediction": "the cat sat down",
    }
    records = score_file(write(choice, math, summary))
    assert [r["metrics"].get("em") for r in records] == [1, 1, None]
    # words ¾, pairs ⅓, sequence ¾: mean 0.6111
    assert records[2]["metrics"]["rouge"] == pytest.approx(0.6111, abs=1e-4)


QUESTIONS = {
    "q": [
        Question("a", "Where ?", ["Kelmouth"]),
        Question("b", "Who ?", ["Ana Bell"]),
        Question("c", "?", ["B"]),
    ]
}


@pytest.mark.parametrize(
    "content", [{"answer": {"a": "Kelmouth", "b": "Ivo"}, "sp": {}}, {"a": "Kelmouth", "b": "Ivo"}]
)
def test_one_object_of_ids_is_hotpotqas_own_layout(content, tmp_path, capsys):
    path = tmp_path / "pred.json"
    path.write_text(json.dumps(content, indent=1))
    records = score_file(path, QUESTIONS)
    assert [(r["id"], r["metrics"]["em"]) for r in records] == [("a", 1), ("b", 0)]
    assert (
        capsys.readouterr().err.strip()
        == f"{path}: predictions for 2 of 3 questions: 1 are missing and are left out; 0"
        " predictions are of no question in --data"
    )


# ---------------------------------------------------------------------------- joined with questions


def test_a_prediction_finds_its_question_by_id_else_by_text_and_others_are_told(write, capsys):
    path = write(
        {"id": "b", "prediction": "Ana Bell"},
        {"question": "Where  ?", "prediction": "Kelmouth"},
        {"id": "z", "prediction": "?"},
    )
    records = score_file(path, QUESTIONS)
    assert [(r["id"], r["golds"], r["metrics"]["em"]) for r in records] == [
        ("b", ["Ana Bell"], 1),
        ("a", ["Kelmouth"], 1),
    ]
    assert (
        "2 of 3 questions: 1 are missing and are left out; 1 predictions are of no"
        in capsys.readouterr().err
    )


def test_an_id_that_only_counts_lines_does_not_take_another_question(write):
    questions = {
        "q": [Question("1", "Who ?", ["Ana Bell"]), Question("2", "Where ?", ["Kelmouth"])]
    }
    assert score_file(write(R1), questions)[0]["id"] == "2"  # it is the file's line 1


def test_missing_predictions_count_as_wrong_only_if_asked(write, capsys):
    path = write({"id": "a", "prediction": "Kelmouth"})
    assert summarise(score_file(path, QUESTIONS))["all"]["em"][0] == 1
    counted = summarise(score_file(path, QUESTIONS, count_missing=True))["all"]
    assert counted["questions"] == 3 and counted["em"][0] == pytest.approx(1 / 3)
    assert "2 are missing and count as wrong" in capsys.readouterr().err


def test_another_data_sets_questions_are_not_missing(write, tmp_path, capsys):
    for name, question in (("nq", "Who ?"), ("wiki", "Where ?")):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"id": 1, "question": question, "answers": ["Kelmouth"]}) + "\n"
        )
    one = write({"question": "Who ?", "prediction": "Kelmouth"}, name="one.jsonl")
    two = write({"question": "Where ?", "prediction": "Varen"}, name="two.jsonl")
    data = f"{tmp_path / 'nq.jsonl'},{tmp_path / 'wiki.jsonl'}"
    records = score_files([str(one), str(two)], data)
    assert {r["dataset"]: r["metrics"]["em"] for r in records} == {
        "nq": 1,
        "wiki": 0,
    } and capsys.readouterr().err == ""


def test_files_that_both_count_lines_stay_apart(write):
    records = score_files(
        [str(write(R1, name="x.jsonl")), str(write({**R1, "pred_ans": "no"}, name="y.jsonl"))]
    )
    assert [r["id"] for r in records] == ["x:1", "y:1"] and summarise(records)["all"]["em"][
        0
    ] == 0.5


def test_missing_questions_of_one_file_stay_in_its_data_set(write):
    records = score_file(
        write({"id": "a", "prediction": "Kelmouth"}), QUESTIONS, count_missing=True
    )
    assert {r["dataset"] for r in records} == {"p"} and set(summarise(records)) == {"qa", "all"}


def test_files_of_one_name_are_told_apart_by_their_folders(write, tmp_path):
    for folder, answer in (("x", " Kelmouth "), ("y", "no")):
        (tmp_path / folder).mkdir()
        write({**R1, "pred_ans": answer}, name=f"{folder}/nq.jsonl")
    records = score_files([str(tmp_path / "x" / "nq.jsonl"), str(tmp_path / "y" / "nq.jsonl")])
    assert {r["dataset"]: r["metrics"]["em"] for r in records} == {"x/nq": 1, "y/nq": 0}
    assert len({r["id"] for r in records}) == 2


def test_two_predictions_for_one_question_are_an_error_also_when_its_text_is_what_they_share(write):
    with pytest.raises(InputError, match="two predictions for id 'a'"):
        score_file(
            write(
                {"question": "Where ?", "prediction": "x"},
                {"question": "Where  ?", "prediction": "y"},
            ),
            QUESTIONS,
        )


def test_samples_and_options_of_anybodys_file_are_read(write):
    answers = [
        {**FLASHRAG, "sample": i, "output": {"pred": text}}
        for i, text in enumerate(("Varen", "no"))
    ]
    assert summarise(score_file(write(*answers)))["all"]["em"][0] == 0.5
    choice = {
        "id": 1,
        "question": "?",
        "task": "choice",
        "golds": ["oak"],
        "prediction": "\\boxed{B}",
    }
    for options in (["elm", "oak"], {"A": "elm", "B": "oak"}):
        assert score_file(write({**choice, "options": options}))[0]["metrics"]["em"] == 1


def test_a_record_says_how_its_punctuation_was_treated(write):
    record = {**OWN, "golds": ["Spider-Man"], "prediction": "spiderman", "punctuation": "delete"}
    questions = {"q": [Question("1", "Where ?", ["Spider-Man"])]}
    assert (
        score_file(write(record), questions)[0]["metrics"]["em"] == 1
    )  # scored anew, as it was scored before


def test_a_data_set_without_a_prediction_is_told(write, tmp_path, capsys):
    for name, question in (("nq", "Who ?"), ("wiki", "Where ?")):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"id": name, "question": question, "answers": ["a"]}) + "\n"
        )
    score_files(
        [str(write({"id": "nq", "prediction": "a"}))],
        f"{tmp_path / 'nq.jsonl'},{tmp_path / 'wiki.jsonl'}",
    )
    assert (
        capsys.readouterr().err.strip()
        == "wiki: no prediction for any of its 1 questions: it has no row"
    )


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "no such file"),
        ("", "the file is empty"),
        ("[1]\n", "record 1: expected an object"),
        ("{\n{}\n", "not valid JSON"),
        ('{"id": "1"}\n', "line 1: no prediction in it: it has the fields"),
        (json.dumps({**OWN, "golds": "a"}) + "\n", "line 1: field 'golds': expected a list"),
        (
            json.dumps({**OWN, "prediction": ["a"]}) + "\n",
            "line 1: field 'prediction': expected a string",
        ),
        (json.dumps({**OWN, "metrics": None}) + "\n", "line 1: field 'metrics'"),
        ('{"prediction": "a"}\n', "field 'id' and field 'question' are both missing"),
        ('{"id": "1", "prediction": {"text": "a"}}\n', "field 'prediction': expected a string"),
        (
            '{"id": "1", "prediction": "a"}\n{"id": "1", "prediction": "b"}\n',
            "two predictions for id '1'",
        ),
        (
            '{"id": "1", "prediction": "a"}\n',
            "1 of 1 predictions have no gold answer .* give --data",
        ),
        ('{"id": "1", "question": 5, "prediction": "a", "answer": {"b": 1}}\n', "field 'answer'"),
        (
            '{"id": "1", "prediction": "a", "golds": [null, "b"]}\n',
            "field 'golds' holds an empty answer",
        ),
        (
            '{"id": "1", "prediction": "a", "golds": [{"a": 1}]}\n',
            "field 'golds': expected a string",
        ),
        (
            '{"id": "1", "prediction": "a", "golds": ["a"], "task": "cohice"}\n',
            "field 'task': 'cohice' is none of qa",
        ),
        (
            '{"id": "1", "prediction": "a", "golds": ["a"], "sample": []}\n',
            "field 'sample': expected a whole number",
        ),
        (json.dumps({**OWN, "golds": [1]}) + "\n", "field 'golds', item 1: expected a string"),
        (json.dumps({**OWN, "dataset": True}) + "\n", "field 'dataset'"),
        (json.dumps({**OWN, "options": [1]}) + "\n", "field 'options', item 1"),
        (
            json.dumps({**OWN, "metrics": {"em": "x"}}) + "\n",
            "field 'metrics', em: expected a number, found 'x'",
        ),
        (
            json.dumps({k: v for k, v in OWN.items() if k != "prediction"}) + "\n",
            "field 'prediction' is missing",
        ),
    ],
)
def test_a_bad_predictions_file_is_one_line(content, said, tmp_path):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=said) as error:
        score_file(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_bad_records_are_skipped_and_counted(write, capsys):
    path = write(R1, {**R1, "pred_ans": ["a"]}, R1)
    assert len(score_file(path, skip_bad=True)) == 2
    assert (
        f"{path}: 1 of 3 records skipped; the first: {path}, line 2: field 'pred_ans'"
        in capsys.readouterr().err
    )


def test_no_prediction_is_wrong_and_not_an_error(write):
    assert [
        r["metrics"]["em"]
        for r in score_file(write({**R1, "pred_ans": None}, {**R1, "pred_ans": ""}))
    ] == [0, 0]


def test_predictions_of_nothing_that_was_asked_are_one_line(write):
    with pytest.raises(InputError, match="none of its 1 predictions is of a question in --data"):
        score_file(write({"id": "z", "prediction": "a"}), QUESTIONS)


def test_predictions_of_an_interrupted_evaluation_are_read_up_to_the_half_written_line(tmp_path):
    whole = json.dumps(OWN)
    (tmp_path / "p.jsonl").write_text(whole + "\n" + whole[:40])
    assert read_predictions(tmp_path / "p.jsonl") == [{**OWN, "task": "qa"}]
    assert (tmp_path / "p.jsonl").read_text().endswith(whole[:40])  # that run may still be at it


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
    name, data, published
):
    path = SHARED / "predictions" / f"r1_searcher_{name}_qwen_scores.jsonl"
    if not path.exists():
        pytest.skip("the published predictions are not there")
    for questions in (
        "",
        str(SHARED / "qa_eval" / f"{data}.jsonl"),
    ):  # its own golds, or the question file's
        row = summarise(score_files([str(path)], questions))["all"]
        assert tuple(round(100 * row[c][0], 1) for c in ("em", "cem", "f1", "judged")) == published
        assert row["questions"] == (125 if name == "bamboogle" else 500)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--against", "{p}"], "name a predictions file first"),
        (["--data", "{p}"], "name a predictions file first"),
        (["{p}", "--agianst", "x"], "unknown flag --agianst (did you mean --against?)"),
        (["{p}", "--json", "{p}/x.json"], "x.json: cannot be written there"),
        (["{p}", "--json", "{folder}"], "that is a folder: name a file"),
        (["{folder}"], "a folder: name the files in it"),
        (["{p}", "--count_missing"], "known only with --data"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, said, write, tmp_path, monkeypatch):
    path = write(R1)
    monkeypatch.setattr(
        sys, "argv", ["predictions.py", *(a.format(p=path, folder=tmp_path) for a in arguments)]
    )
    with pytest.raises(InputError) as error:
        predictions.main()
    assert said in str(error.value) and "\n" not in str(error.value)


def test_scoring_loads_no_torch():
    """That is what makes it start in half a second."""
    code = "import sys, predictions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_python_predictions_prints_table_comparison_and_json(write, tmp_path, monkeypatch, capsys):
    path = write(R1, {**R1, "question": "Who ?"})
    other = write(R1, {**R1, "question": "Who ?", "pred_ans": "no"}, name="o.jsonl")
    out = tmp_path / "t.json"
    monkeypatch.setattr(
        sys, "argv", ["predictions.py", str(path), "--against", str(other), "--json", str(out)]
    )
    predictions.main()
    shown = capsys.readouterr().out
    assert "1.000 [1.00, 1.00]" in shown and "paired: 2 questions of both runs" in shown
    whole = json.loads(out.read_text())
    assert (
        whole["all"]["em"] == [1, 1, 1] and whole["comparison"]["all"]["em"]["difference"][0] == 0.5
    )
