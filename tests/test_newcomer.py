"""Tests cases that misled a new user; each now works or prints a message."""

import json
import re

import pytest
from conftest import ROOT, message, settings_for

import eval as evaluation
from eval import Options
from plumbing import build
from plumbing.alarms import ADVICE
from plumbing.report import report


def records_of(values: list[float]) -> list[dict]:
    """Returns a scored prediction with each of these values of exact match."""
    numbers = {"f1": 0.5, "searches": 2.0, "format": 1.0, "thinking": 9.0}
    return [
        {"id": str(i), "question": str(i), "kind": "a", "metrics": numbers | {"em": value}}
        for i, value in enumerate(values)
    ]


def test_a_brief_report_has_only_the_important_columns(capsys):
    for every, columns in ((False, "searches format"), (True, "f1 searches")):
        report(records_of([1.0, 0.0]), [], Options(all=every))
        assert set(columns.split()) <= set(capsys.readouterr().out.split("\n")[0].split())
    report(records_of([1.0, 0.0]), [], Options())
    assert "f1" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ([1.0] * 8, [0.0] * 8, "higher here"),
        ([0.0] * 8, [1.0] * 8, "higher there"),
        ([1.0, 0.0] * 4, [0.0, 1.0] * 4, "may be chance"),
        ([1.0], [0.0], "may be chance"),
    ],
)
def test_a_comparison_says_of_each_metric_which_run_is_higher(here, there, expected, capsys):
    report(records_of(here), records_of(there), Options())
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("em: "))
    assert line.endswith(f": {expected}")


def test_a_model_that_does_not_know_its_protocol_is_sent_to_the_cold_start_and_nowhere_else():
    """lab.distil traces needs right trajectories of a model that searches already."""
    assert set(re.findall(r"python ([\w. -]+\.py|-m \S+)", " ".join(ADVICE.values()))) == {
        "coldstart.py"
    }
    page = (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8")
    for alarm in ("no_search", "malformed_tags"):
        (row,) = re.findall(rf"^\| `{alarm}` .*", page, re.MULTILINE)
        for text in (ADVICE[alarm], row):
            assert "python coldstart.py" in text and "distil" not in text


def test_with_skip_bad_a_run_and_an_evaluation_leave_out_questions_that_are_too_long(
    model, tmp_path
):
    file, out = tmp_path / "q.jsonl", tmp_path / "p.jsonl"
    records = [{"id": str(n), "question": "who ? " * 300**n, "answers": ["A"]} for n in (0, 1)]
    file.write_text("\n".join(map(json.dumps, records)))
    words = f"--data {file} --retriever empty"
    error = message(build.build_state, settings_for(model, tmp_path, words))
    assert error.startswith("question 1: ") and "1 of 2 prompts do not fit" in error
    state = build.build_state(settings_for(model, tmp_path, f"{words} --skip_bad"))
    assert {question.id for question in state.stream.take(0, 0)} == {"0"}
    evaluation.main(f"{words} --skip_bad --model {model} --out {out}".split())
    assert len(out.read_text().splitlines()) == 1
