"""Compares the intervals, paired differences and tables of report.py with numbers by hand."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import message

from plumbing import report
from plumbing.report import COLUMNS, MEAN_OF_DATASETS, compare, interval, sign_flip_p, summarise


def record(question, kind="a", **metrics):
    return {"id": question, "question": f"{question} ?", "kind": kind, "metrics": metrics}


def record_of_dataset(dataset, question, em):
    """Returns a record of a question of a data set."""
    return record(f"{dataset}:{question}", em=em) | {"dataset": dataset}


def record_of_text(question_id, text, em):
    """Returns a record whose question has this text."""
    return record(question_id, em=em) | {"question": text}


def means(row):
    """Returns the row of a summary without the bounds of its intervals."""
    return {c: cell if c == "questions" else cell[0] for c, cell in row.items()}


def test_the_interval_equals_the_one_by_hand():
    # Two questions, 0 and 1: a resample's mean is 0, ½ or 1 with probability ¼, ½, ¼. So the 2.5th
    # percentile is 0 and the 97.5th is 1.
    assert interval([np.array([0.0, 1.0])]) == (0.5, 0.0, 1.0)
    # Each of two data sets is resampled separately: the means 0 and 1 have probability 1/16 each.
    assert interval([np.array([0.0, 1.0])] * 2) == (0.5, 0.0, 1.0)
    assert interval([np.ones(8), np.zeros(2)]) == (0.5, 0.5, 0.5)


def test_the_interval_of_many_questions_is_that_of_the_normal_approximation():
    # 400 questions, half of them right: standard error √(0.25 / 400) = 0.025; ± 1.96 · 0.025 =
    # ± 0.049
    mean, *bounds = interval([np.array([0.0, 1.0] * 200)])
    assert mean == 0.5 and bounds == pytest.approx([0.451, 0.549], abs=0.006)


def test_the_samples_of_a_question_are_averaged_first():
    # Question a: 1, 1, 1, 0 -> 0.75; question b: one sample, 0 -> 0. The mean over questions is
    # 0.375; over samples it would be 0.6. With two questions the interval is 0 to 0.75.
    records = [record("a", em=em) for em in (1.0, 1.0, 1.0, 0.0)] + [record("b", em=0.0)]
    assert summarise(records)["a"] == {"questions": 2, "em": (0.375, 0.0, 0.75)}


def test_a_mean_is_over_the_questions_that_have_the_metric():
    records = [
        record("1", em=1.0, support=0.5),
        record("1", em=0.0),
        record("2", em=0.0, judged=None),
        record("3", "b", rouge=0.25, judged=1.0),
    ]
    summary = summarise(records)
    # Question 1 has em (1 + 0) / 2, and the support of the one sample that has it. Question 3 has
    # no em.
    assert means(summary["a"]) == {"questions": 2, "em": 0.25, "support": 0.5}
    every = {"questions": 3, "em": 0.25, "support": 0.5, "rouge": 0.25, "judged": 1.0}
    assert means(summary["all"]) == every


def test_several_data_sets_get_a_row_each_a_row_of_their_mean_and_a_row_of_all():
    # a: 1, 1, 1 (mean 1); b: 0 (mean 0). The mean is ½ over data sets and ¾ over questions.
    records = [record_of_dataset("a", str(i), 1.0) for i in range(3)] + [
        record_of_dataset("b", "0", 0.0)
    ]
    summary = summarise(records)
    rows = {name: row["em"][0] for name, row in summary.items()}
    assert rows == {"a": 1, "b": 0, MEAN_OF_DATASETS: 0.5, "all": 0.75}
    assert summary[MEAN_OF_DATASETS]["em"] == (0.5, 0.5, 0.5)  # neither data set varies
    records[0]["metrics"]["judged"] = 1.0  # a mean needs the metric in every data set
    assert set(summarise(records)[MEAN_OF_DATASETS]) == {"questions", "em"}


# ---------------------------------------------------------------------- the comparison of two runs


def two_runs(pairs) -> tuple[list, list]:
    """Returns the records of two runs, whose em of question i are pairs[i]."""
    return tuple(
        [record(str(i), em=float(em)) for i, em in enumerate(run)]
        for run in zip(*pairs, strict=True)
    )


def test_the_paired_difference_equals_the_one_by_hand():
    # The differences are 1, 0, 0, -1, 1: mean 0.2.
    cell = compare(*two_runs([(1, 0), (1, 1), (0, 0), (0, 1), (1, 0)]))["em"]
    assert cell["means"] == [0.6, 0.4] and cell["difference"][0] == pytest.approx(0.2)


def test_the_p_value_is_the_share_of_sign_flips_at_least_as_far_from_zero():
    # 5 differences of +1: 2 of the 32 choices of signs (all +, all -) reach |sum| 5: 2/32 = 0.0625.
    assert sign_flip_p(np.array([1.0] * 5 + [0.0] * 20)) == pytest.approx(2 / 32, abs=0.01)
    # +1 +1 -1: every choice of signs has |sum| >= 1.
    assert sign_flip_p(np.array([1.0, 1.0, -1.0])) == sign_flip_p(np.zeros(3)) == 1.0


def test_pairing_detects_a_difference_that_two_overlapping_intervals_hide():
    # The questions differ widely (0 or 1). The runs differ in a tenth of them, and always in the
    # same direction.
    here, there = two_runs([(1, 0)] * 20 + [(0, 0)] * 80 + [(1, 1)] * 100)
    assert summarise(there)["a"]["em"][2] > summarise(here)["a"]["em"][1]  # they overlap
    mean, low, high = compare(here, there)["em"]["difference"]
    assert mean == pytest.approx(0.1) and 0.05 < low < high < 0.15


def test_questions_of_two_runs_are_matched_by_their_texts_not_their_ids():
    here = [record_of_text("1", "Who ?", 1.0), record_of_text("2", "Where ?", 1.0)]
    there = [
        record_of_text("1", "Where  ?", 0.0),
        record_of_text("2", "What ?", 1.0),
        record_of_text("3", "Who ?", 1.0),
    ]
    comparison = compare(here, there)
    assert comparison["em"]["difference"][0] == 0.5
    assert [comparison[name] for name in ("both", "here", "there")] == [2, 0, 1]
    # Questions without a text are matched by id.
    one, other = (record_of_text(name, "", 1.0) for name in "ac")
    assert compare([one], [one])["both"] == 1
    assert "no question in common" in message(compare, [one], [other])


def test_a_metric_that_one_run_lacks_is_not_compared():
    here, there = record("1", em=1.0, judged=1.0), record("1", em=1.0, judged=None)
    assert set(compare([here], [there])) == {"both", "here", "there", "em"}


# ------------------------------------------------------------------------------------------ printed


def test_the_table_has_a_line_per_kind_and_all_at_the_end():
    kinds = {"a": "one_hop", "b": "two_hop", "c": "zebra"}
    records = [record(name, kind, em=float(name != "b")) for name, kind in kinds.items()]
    lines = report.table(summarise(records)).splitlines()
    assert [line.split()[0] for line in lines] == ["kind", "one_hop", "two_hop", "zebra", "all"]
    assert lines[4].split()[1:3] == ["3", "0.667"]
    # With one kind a row "all" would repeat it.
    lines = report.table(summarise(records[:1])).splitlines()
    assert [line.split()[0] for line in lines] == ["kind", "one_hop"]


def test_a_metric_that_a_kind_lacks_is_a_dash_and_many_metrics_are_cut_into_blocks():
    summary = summarise([record("1", em=1.0), record("2", "b", rouge=0.5)])
    lines = report.table(summary).splitlines()
    assert lines[0].split() == ["kind", "n", "em", "rouge"]
    assert lines[1].split() == ["a", "1", "1.000", "[1.00,", "1.00]", "-"]
    text = report.table(summarise([record("1", **dict.fromkeys(COLUMNS, 0.5))]))
    heads = [block.splitlines()[0].split()[2:] for block in text.split("\n\n")]
    assert [column for head in heads for column in head] == COLUMNS
    assert max(map(len, text.splitlines())) < 160


def test_the_markdown_table_has_the_same_cells():
    records = [record("1", em=1.0), record("2", "b", em=0.0)]
    lines = report.table(summarise(records), as_markdown=True).splitlines()
    assert lines[:3] == [
        "| kind | n | em |",
        "| --- | --- | --- |",
        "| a | 1 | 1.000 [1.00, 1.00] |",
    ]
    assert lines[4].startswith("| all | 2 | 0.500 [")


def test_a_report_has_a_comparison_unreadable_verdicts_and_a_file_of_all_numbers(tmp_path, capsys):
    options = SimpleNamespace(all=False, markdown=False, json=str(tmp_path / "new" / "t.json"))
    here, there = two_runs([(1, 0)] * 9 + [(1, 1)])
    here[0]["metrics"]["judged"] = None
    report.report(here, there[1:], options)
    printed = capsys.readouterr().out
    assert "1 verdicts are unreadable and left out" in printed
    assert "paired: 9 questions of both runs (1 only here, 0 only there)" in printed
    # 8 of 9 questions; a resample of equal ones only has probability (1/9)^9.
    line = next(line for line in printed.splitlines() if line.startswith("em: "))
    assert line.startswith("em: 1.000 here, 0.111 there, difference +0.889 [+0.667, +1.000], p=0.0")
    assert line.endswith(": higher here")
    assert json.loads((tmp_path / "new" / "t.json").read_text())["comparison"]["both"] == 9
    report.report(here[:2], there[:2], options)  # of two equal differences p is 1/2
    assert ": may be chance" in capsys.readouterr().out


def test_questions_are_counted_as_right_in_both_runs_in_one_or_in_neither():
    # Right in both, here, here, there, nowhere.
    here, there = two_runs([(1, 1), (1, 0), (1, 0), (0, 1), (0, 0)])
    right = report.compare(here, there)["em"]["right"]
    assert right == {"both": 1, "only here": 2, "only there": 1, "neither": 1}
