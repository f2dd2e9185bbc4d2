"""Compares the intervals, paired differences and tables of report.py with numbers by hand."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import message

from plumbing import report
from plumbing.report import COLUMNS, MEAN_OF_DATASETS, comparison, interval, paired, summarise


def record(question, kind="a", **metrics):
    return {"id": question, "question": f"{question} ?", "kind": kind, "metrics": metrics}


@pytest.mark.parametrize(
    "groups, expected",
    [
        # Two questions, 0 and 1: a resample's mean is 0, ½ or 1 with probability ¼, ½, ¼. So the
        # 2.5th percentile is 0 and the 97.5th is 1.
        ([[0, 1]], (0.5, 0, 1)),
        # Each data set is resampled separately, and neither varies here.
        ([[1] * 8, [0] * 2], (0.5, 0.5, 0.5)),
        # 400 questions, half of them right: standard error √(0.25 / 400) = 0.025; ± 1.96 · 0.025
        ([[0, 1] * 200], (0.5, 0.451, 0.549)),
    ],
)
def test_the_interval_equals_the_one_by_hand(groups, expected):
    result = interval([np.array(values, float) for values in groups])
    assert result == pytest.approx(expected, abs=0.006)


def test_a_mean_is_over_the_questions_that_have_the_metric():
    records = [
        record("1", em=1.0, support=0.5),
        record("1", em=0.0),
        record("2", em=0.0, judged=None),
        record("3", "b", rouge=0.25, judged=1.0),
    ]
    every = summarise(records)["all"]
    # Question 1 has em (1 + 0) / 2, and the support of the one sample that has it. Question 3 has
    # no em.
    assert every.pop("questions") == 3
    means = {column: mean for column, (mean, *_) in every.items()}
    assert means == {"em": 0.25, "support": 0.5, "rouge": 0.25, "judged": 1.0}


def test_several_data_sets_get_a_row_each_a_row_of_their_mean_and_a_row_of_all():
    # a: 1, 1, 1 (mean 1); b: 0 (mean 0). The mean is ½ over data sets and ¾ over questions.
    scores = [("a", 1.0), ("a", 1.0), ("a", 1.0), ("b", 0.0)]
    records = [record(f"{n}", em=em) | {"dataset": name} for n, (name, em) in enumerate(scores)]
    rows = {name: row["em"][0] for name, row in summarise(records).items()}
    assert rows == {"a": 1, "b": 0, MEAN_OF_DATASETS: 0.5, "all": 0.75}
    records[0]["metrics"]["judged"] = 1.0  # a mean needs the metric in every data set
    assert set(summarise(records)[MEAN_OF_DATASETS]) == {"questions", "em"}


# ---------------------------------------------------------------------- the comparison of two runs


def test_questions_of_two_runs_are_matched_by_their_texts_not_their_ids():
    def run(**texts):
        return [
            record(name, em=n) | {"question": text} for n, (name, text) in enumerate(texts.items())
        ]

    here, there = run(a="Who ?", b="Where ?"), run(a="Where  ?", b="What ?", c="Who ?")
    assert paired(here, there, "em").tolist() == [[0, 2], [1, 0]]
    assert next(comparison(here, there, ["em"])).endswith(
        "2 questions of both runs (0 only here, 1 only there)"
    )
    # Questions without a text are matched by id.
    assert len(paired(run(a=""), run(a=""), "em")) == 1
    assert "no question in common" in message(list, comparison(run(a=""), run(c=""), ["em"]))


def test_a_metric_that_one_run_lacks_is_not_compared():
    here, there = record("1", em=1.0, judged=1.0), record("1", em=1.0, judged=None)
    assert "judged" not in "".join(comparison([here], [there], COLUMNS))


# ------------------------------------------------------------------------------------------ printed


def test_the_table_has_a_line_per_kind_and_all_at_the_end():
    # A metric that a kind lacks is a dash.
    records = [record("1", em=1.0), record("2", "b", rouge=0.5)]
    assert report.table(summarise(records)).splitlines() == [
        "| kind | n | em                 | rouge              |",
        "| ---- | - | ------------------ | ------------------ |",
        "| a    | 1 | 1.000 [1.00, 1.00] | -                  |",
        "| b    | 1 | -                  | 0.500 [0.50, 0.50] |",
        "| all  | 2 | 1.000 [1.00, 1.00] | 0.500 [0.50, 0.50] |",
    ]
    # With one kind a row "all" would repeat it.
    assert len(report.table(summarise(records[:1])).splitlines()) == 3


def test_many_metrics_are_cut_into_blocks():
    text = report.table(summarise([record("1", **dict.fromkeys(COLUMNS, 0.5))]))
    heads = [re.findall(r"\w+", block.splitlines()[0])[2:] for block in text.split("\n\n")]
    assert [column for head in heads for column in head] == COLUMNS and len(heads) > 1


def test_a_report_has_a_comparison_and_unreadable_verdicts(capsys):
    # Both are right on question 0, which is the only one that the other run has not answered.
    here, there = ([record(str(n), em=em) for n in range(10)] for em in (1.0, 0.0))
    here[0]["metrics"]["judged"], there[1]["metrics"]["em"] = None, 1.0
    report.report(here, there[1:], SimpleNamespace(all=False))
    printed = capsys.readouterr().out
    assert "1 verdicts are unreadable and left out" in printed
    assert "paired: 9 questions of both runs (1 only here, 0 only there)" in printed
    # 8 of 9 questions; a resample of equal ones only has probability (1/9)^9.
    expected = "em: 1.000 here, 0.111 there, difference +0.889 [+0.667, +1.000]: higher here"
    assert expected in printed.splitlines()
    report.report(here[:6], there[:6], SimpleNamespace(all=False))  # five questions differ
    assert ": may be chance" in capsys.readouterr().out


def test_the_decision_to_search_has_an_f1_if_the_other_run_never_searches():
    """A search is needed if the run without retrieval is wrong in at least half of its samples."""

    def run(searched, samples):
        return [
            record(str(q), em=em, searched=made)
            for q, made in enumerate(searched)
            for em in samples[q]
        ]

    # Needed: 0, 1 (half wrong) and 4; made: 0, 1 and 3. P = R = 2/3.
    without = run([0.0] * 5, [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1] * 4, [0, 0, 0, 1]])
    here = run([1.0, 1.0, 0.0, 1.0, 0.0], [[1]] * 5)
    # A question without a prediction is wrong, but not searched for.
    here.append(record("5", em=0.0))
    without.append(record("5", em=1.0, searched=0.0))
    assert [*report.comparison(here, without, ["em"])][-1] == (
        "decision to search: F1 0.667 (3 needed, 3 made)"
    )
    # Without a run without retrieval nothing is said.
    assert "decision" not in "".join(report.comparison(here, here, ["em"]))


def test_questions_are_counted_as_right_in_both_runs_in_one_or_in_neither():
    # Right in both, here, here, there, nowhere.
    line = report.right_in(np.array([(1, 1), (1, 0), (1, 0), (0, 1), (0, 0)]))
    assert line == "right in both: 1, only here: 2, only there: 1, neither: 1"
