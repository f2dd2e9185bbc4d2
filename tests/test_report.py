"""Compares the intervals, paired differences and tables of report.py with numbers by hand."""

import numpy as np
import pytest

from errors import InputError
from plumbing import report
from plumbing.report import COLUMNS, MEAN_OF_DATASETS, compare, interval, matched, paired, summarise


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
    assert interval([np.array([0.3])]) == (0.3, 0.3, 0.3)
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


def test_the_paired_difference_equals_the_one_by_hand():
    # The differences are 1, 0, 0, -1, 1: mean 0.2.
    comparison = paired([np.array([[1.0, 0], [1, 1], [0, 0], [0, 1], [1, 0]])])
    assert (comparison["mean"], comparison["other"]) == (0.6, 0.4)
    assert comparison["difference"][0] == pytest.approx(0.2)


def test_the_evidence_reader_is_compared_with_the_other_runs_reader_or_answers():
    here = [record("q", em=1.0, reader_em=0.5)]
    comparison = compare(here, [record("q", em=0.25)])["all"]
    assert {c: comparison[c]["other"] for c in ("em", "reader_em")} == {
        "em": 0.25,
        "reader_em": 0.25,
    }
    comparison = compare(here, [record("q", em=0.25, reader_em=0.75)])["all"]
    assert comparison["reader_em"]["other"] == 0.75


def test_the_p_value_is_the_share_of_sign_flips_at_least_as_far_from_zero():
    # 5 differences of +1: 2 of the 32 choices of signs (all +, all -) reach |sum| 5: 2/32 = 0.0625.
    p = report.sign_flip_p
    assert p(np.array([1.0] * 5 + [0.0] * 20)) == pytest.approx(2 / 32, abs=0.01)
    # +1 +1 -1: every choice of signs has |sum| >= 1.
    assert p(np.array([1.0, 1.0, -1.0])) == p(np.zeros(3)) == 1.0


def test_pairing_detects_a_difference_that_two_overlapping_intervals_hide():
    # The questions differ widely (0 or 1). The runs differ in a tenth of them, and always in the
    # same direction.
    other_run = np.array([0.0, 1.0] * 100)
    this_run = other_run.copy()
    this_run[:40:2] = 1.0
    assert interval([other_run])[2] > interval([this_run])[1]  # the intervals overlap
    mean, low, high = paired([np.stack([this_run, other_run], 1)])["difference"]
    assert mean == pytest.approx(0.1) and 0.05 < low < high < 0.15


def test_questions_of_two_runs_are_matched_by_their_texts_not_their_ids():
    here = [record_of_text("1", "Who ?", 1.0), record_of_text("2", "Where ?", 1.0)]
    there = [
        record_of_text("1", "Where  ?", 0.0),
        record_of_text("2", "What ?", 1.0),
        record_of_text("3", "Who ?", 1.0),
    ]
    assert matched(here, there) == {"1": "3", "2": "1"}
    every = compare(here, there)["all"]
    assert every["em"]["difference"][0] == 0.5 and every["questions"] == 2
    assert (every["only_here"], every["only_there"]) == (0, 1)
    # If a text occurs twice, the second here is matched with the second there.
    here, there = ([record_of_text(name, "Who ?", 1.0) for name in names] for names in ("12", "xy"))
    assert matched(here, there) == {"1": "x", "2": "y"}
    # Questions without a text are matched by id.
    assert matched([record_of_text("a", "", 1.0)], [record_of_text("a", "", 1.0)]) == {"a": "a"}
    with pytest.raises(InputError, match="no question in common"):
        compare([record_of_text("a", "", 1.0)], [record_of_text("c", "", 1.0)])


def test_a_metric_or_data_set_that_one_run_lacks_is_not_compared():
    here, there = record("1", em=1.0, judged=1.0), record("1", em=1.0, judged=None)
    assert set(compare([here], [there])["all"]) == {"questions", "em", "only_here", "only_there"}
    datasets = [record_of_dataset("a", "1", 1.0), record_of_dataset("b", "1", 1.0)]
    # A single data set has no mean of data sets.
    assert list(compare(datasets, datasets[:1])) == ["a", "all"]


def test_the_mean_of_data_sets_is_compared_too():
    # The differences are 1, 1, 1, 1 in a and 0 in b: ½ over data sets, 4/5 over questions. No data
    # set varies.
    here = [record_of_dataset("a", f"a{i}", 1.0) for i in range(4)] + [
        record_of_dataset("b", "b0", 1.0)
    ]
    there = [record_of_dataset("a", f"a{i}", 0.0) for i in range(4)] + [
        record_of_dataset("b", "b0", 1.0)
    ]
    comparison = compare(here, there)
    mean = comparison[MEAN_OF_DATASETS]["em"]
    assert (mean["mean"], mean["other"], mean["difference"]) == (1.0, 0.5, (0.5, 0.5, 0.5))
    assert comparison["all"]["em"]["difference"][0] == pytest.approx(0.8)


# ------------------------------------------------------------------------------------------- tables


@pytest.fixture
def table(monkeypatch):
    """Returns a function that formats records as a table for a screen of this width."""

    def table(records, width=160, **options):
        monkeypatch.setenv("COLUMNS", str(width))
        return report.table(summarise(records), **options)

    return table


def test_the_table_has_a_line_per_kind_in_the_worlds_order_and_all_at_the_end(table):
    kinds = {"a": "two_hop", "b": "one_hop", "c": "zebra"}
    records = [record(name, kind, em=float(name != "b")) for name, kind in kinds.items()]
    lines = table(records).splitlines()
    assert [line.split()[0] for line in lines] == ["kind", "one_hop", "two_hop", "zebra", "all"]
    assert lines[4].split()[1:3] == ["3", "0.667"] and len({len(line) for line in lines}) == 1
    # With one kind a row "all" would repeat it.
    assert [line.split()[0] for line in table(records[:1]).splitlines()] == ["kind", "two_hop"]


def test_a_metric_that_a_kind_lacks_is_a_dash(table):
    lines = table([record("1", em=1.0), record("2", "b", rouge=0.5)]).splitlines()
    assert lines[0].split() == ["kind", "n", "em", "rouge"]
    assert lines[1].split() == ["a", "1", "1.000", "[1.00,", "1.00]", "-"]
    assert lines[2].split() == ["b", "1", "-", "0.500", "[0.50,", "0.50]"]
    assert table([record("1")]) == "no numbers: none of the records has a metric"


@pytest.mark.parametrize("width, blocks", [(660, [32]), (156, [7] * 4 + [4]), (10, [1] * 32)])
def test_the_table_is_never_wider_than_the_screen(width, blocks, table):
    # The columns kind and n take 7 characters and a metric takes 20, so 156 hold 7 metrics. At
    # least one metric is always printed.
    text = table([record("1", **dict.fromkeys(COLUMNS, 0.5))], width)
    heads = [block.splitlines()[0].split()[2:] for block in text.split("\n\n")]
    assert [len(head) for head in heads] == blocks
    assert [column for head in heads for column in head] == COLUMNS
    assert max(map(len, text.splitlines())) <= max(width, 27)


def test_the_markdown_table_has_the_same_cells(table):
    records = [record("1", em=1.0), record("2", "b|c", em=0.0)]
    lines = table(records, as_markdown=True).splitlines()
    assert lines[:2] == ["| kind | n | em |", "| --- | --- | --- |"]
    assert lines[2] == "| a | 1 | 1.000 [1.00, 1.00] |" and lines[3].startswith("| b\\|c | 1 | 0.")
    assert lines[4].startswith("| all | 2 | 0.500 [")


def test_the_comparison_prints_the_number_of_paired_questions(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    here, there = (
        [record_of_text("1", "Who ?", 1.0), record_of_text("2", "What ?", 1.0)],
        [record_of_text("1", "Who ?", 0.0)],
    )
    report.report(here, there, False, "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "paired: 1 questions of both runs (1 only here, 0 only there)"
    assert lines[7].split() == "a 1 1.000 / 0.000: +1.000 [+1.000, +1.000] p=1".split()


def test_questions_are_counted_as_right_in_both_runs_in_one_or_in_neither(capsys):
    # Right in both, here, here, there, nowhere. Of question 0 half of the samples here are right.
    marks = [(1, 1), (1, 0), (1, 0), (0, 1), (0, 0)]
    here = [record(str(i), em=float(em)) for i, (em, _) in enumerate(marks)]
    there = [record(str(i), em=float(em)) for i, (_, em) in enumerate(marks)]
    here.append(record("0", em=0.0))
    report.report(here, there, False, "")
    last = capsys.readouterr().out.splitlines()[-2]
    assert last == "em at least 0.5: both 1, only here 2, only there 1, neither 1"
    for one in here + there:  # a judge's verdicts take precedence over exact match
        one["metrics"]["judged"] = 1.0
    report.report(here, there, False, "")
    assert "judged at least 0.5: both 5, only here 0" in capsys.readouterr().out.splitlines()[-2]


def test_compression_is_printed_as_ratio_of_means_and_as_mean_of_ratios(capsys):
    # 10 tokens become 5 and 90 become 10: 100 / 15 = 6.67 and (2 + 9) / 2 = 5.5.
    records = [record("1", retrieved=10.0, shown=5.0, compression=2.0)]
    records.append(record("2", retrieved=90.0, shown=10.0, compression=9.0))
    report.report([*records, record("3", retrieved=0.0, shown=0.0)], [], False, "")
    expected = "compression: 6.67 as ratio of means, 5.50 as mean of ratios"
    assert expected in capsys.readouterr().out.splitlines()


def test_citations_are_summarised_by_data_set_and_hops():
    records = []
    for dataset, hops, right in (("2wiki", 2, 1.0), ("2wiki", 2, 0.0), ("2wiki", 4, 0.0)):
        one = record(str(len(records)), all_correct=right)
        records.append(one | {"dataset": dataset, "hops": hops})
    records += [record("nq", all_correct=1.0), record("uncited", em=1.0) | {"hops": 2}]
    rows = summarise(report.by_hops(records))
    assert list(rows) == ["2wiki 2 hops", "2wiki 4 hops", "all"]
    assert [row["all_correct"][0] for row in rows.values()] == [0.5, 0, pytest.approx(1 / 3)]


def test_a_report_counts_unreadable_verdicts(capsys):
    report.report([record("1", em=1.0, judged=None)], [], False, "")
    assert "1 verdicts are unreadable and left out" in capsys.readouterr().out
