"""Tests cases that misled a new user; each now works or prints a message."""

import json
import re

import pytest
from conftest import ROOT, settings_for

import eval as evaluation
from eval import Options
from plumbing import build
from plumbing.alarms import ADVICE
from plumbing.report import report


def test_a_brief_report_has_only_the_important_columns(capsys):
    metrics = dict.fromkeys(("em", "f1", "searches", "format", "thinking"), 1.0)
    records = [{"id": "1", "question": "?", "kind": "a", "metrics": metrics}]
    heads = []
    for every in (False, True):
        report(records, [], Options(all=every))
        heads.append(capsys.readouterr().out.split("\n")[0])
    assert "f1" in heads[1] and "f1" not in heads[0] and "format" in heads[0]


@pytest.mark.parametrize("alarm", ["no_search", "malformed_tags"])
def test_a_model_that_does_not_know_its_protocol_is_sent_to_the_cold_start(alarm):
    """lab.distil traces needs right trajectories of a model that searches already."""
    page = (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{alarm}` .*", page, re.MULTILINE)
    for text in (ADVICE[alarm], row):
        assert "python coldstart.py" in text and "distil" not in text


def test_with_skip_bad_a_run_and_an_evaluation_leave_out_questions_that_are_too_long(
    model, tmp_path
):
    file, out = tmp_path / "q.jsonl", tmp_path / "p.jsonl"
    records = [{"id": str(n), "question": "who ? " * 300**n, "answers": ["A"]} for n in (0, 1)]
    file.write_text("\n".join(map(json.dumps, records)))
    words = f"--data {file} --retriever empty --skip_bad"
    state = build.build_state(settings_for(model, tmp_path, words))
    assert {question.id for question in state.stream.take(0, 0)} == {"0"}
    evaluation.main(f"{words} --model {model} --out {out}".split())
    assert len(out.read_text().splitlines()) == 1
