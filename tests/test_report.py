"""report.py: intervals, paired differences and tables, against numbers worked by hand."""

import doctest

import numpy as np
import pytest

from errors import InputError
from plumbing import report
from plumbing.report import (
    ALL_COLUMNS,
    bootstrap,
    compare,
    comparison_markdown,
    comparison_table,
    markdown,
    matched,
    mean_of_means,
    paired,
    sign_flip_p,
    summarise,
    table,
)


def test_the_docstring_examples_are_true():
    assert doctest.testmod(report).failed == 0


# ------------------------------------------------------------------------------------------ numbers


def test_the_bootstrap_by_hand():
    # Two questions, 0 and 1: a resample's mean is 0, ½ or 1 with probability ¼, ½, ¼. So 2.5 % lies
    # at 0 and 97.5 % at 1.
    assert bootstrap(np.array([0.0, 1.0])) == (0.5, 0.0, 1.0)
    assert bootstrap(np.ones(5)) == (1.0, 1.0, 1.0)
    assert bootstrap(np.array([0.3])) == (0.3, 0.3, 0.3)


def test_the_interval_is_that_of_the_normal_approximation_for_many_questions():
    # 400 questions, half of them right: standard error √(0.25 / 400) = 0.025; ± 1.96 · 0.025 = ±
    # 0.049
    mean, low, high = bootstrap(np.array([0.0, 1.0] * 200))
    assert (mean, low, high) == (
        0.5,
        pytest.approx(0.451, abs=0.006),
        pytest.approx(0.549, abs=0.006),
    )


def graded(question, kind, em):
    metrics = {"em": em, "f1": 0.0, "searches": 0.0}
    return {"id": question, "question": f"{question} ?", "kind": kind, "metrics": metrics}


def test_samples_of_one_question_are_averaged_before_anything_else():
    # Question a: 1, 1, 1, 0 -> 0.75; question b: one sample, 0 -> 0. Over questions 0.375, over
    # samples it would be 0.6.
    summary = summarise(
        [graded("a", "one_hop", em) for em in (1.0, 1.0, 1.0, 0.0)] + [graded("b", "one_hop", 0.0)]
    )
    assert summary["one_hop"]["questions"] == 2
    # two questions: the interval runs from 0 to 0.75, as in the bootstrap by hand
    assert summary["one_hop"]["em"] == (0.375, 0.0, 0.75)


def test_the_table_has_a_line_per_kind_in_the_worlds_order_and_all_at_the_end():
    summary = summarise(
        [graded("a", "two_hop", 1.0), graded("b", "one_hop", 0.0), graded("c", "zebra", 1.0)]
    )
    lines = table(summary, width=160).splitlines()
    assert [line.split()[0] for line in lines] == ["kind", "one_hop", "two_hop", "zebra", "all"]
    assert lines[4].split()[1:3] == ["3", "0.667"] and len({len(line) for line in lines}) == 1


def record(question, kind="a", **metrics):
    return {"id": question, "question": f"{question} ?", "kind": kind, "metrics": metrics}


def test_a_mean_is_over_the_questions_that_have_the_number():
    records = [
        record("1", em=1.0, support=0.5),
        record("1", em=0.0),
        record("2", em=0.0, judged=None),
        record("3", "b", rouge=0.25, judged=1.0),
    ]
    summary = summarise(records)
    # question 1: em (1 + 0) / 2, support of its one sample that has evidence; question 3 has no em
    # at all
    assert {k: v if k == "questions" else v[0] for k, v in summary["a"].items()} == {
        "questions": 2,
        "em": 0.25,
        "support": 0.5,
    }
    assert {k: v if k == "questions" else v[0] for k, v in summary["all"].items()} == {
        "questions": 3,
        "em": 0.25,
        "support": 0.5,
        "rouge": 0.25,
        "judged": 1.0,
    }


def test_a_number_that_a_kind_does_not_have_is_a_dash():
    lines = table(
        summarise([record("1", em=1.0), record("2", "b", rouge=0.5)]), width=160
    ).splitlines()
    assert lines[0].split() == ["kind", "n", "em", "rouge"]
    assert lines[1].split() == ["a", "1", "1.000", "[1.00,", "1.00]", "-"]
    assert lines[2].split() == ["b", "1", "-", "0.500", "[0.50,", "0.50]"]


@pytest.mark.parametrize(
    "width, blocks",
    [
        (400, [19]),
        (156, [7, 7, 5]),
        (118, [5, 5, 5, 4]),
        (80, [3, 3, 3, 3, 3, 3, 1]),
        (10, [1] * 19),
    ],
)
def test_the_table_never_is_wider_than_the_screen(width, blocks):
    # a line is 23 characters and 19 per column: 156 hold 7 columns, 118 hold 5, 80 hold 3; at least
    # one is shown
    text = table(summarise([record("1", **dict.fromkeys(ALL_COLUMNS, 0.5))]), width)
    parts = text.split("\n\n")
    assert [len(part.splitlines()[0].split()) - 2 for part in parts] == blocks
    assert max(map(len, text.splitlines())) <= max(width, 42)
    assert [c for part in parts for c in part.splitlines()[0].split()[2:]] == list(ALL_COLUMNS)


# -------------------------------------------------------------------------------- several data sets


def of(dataset, question, em):
    return {
        "id": f"{dataset}:{question}",
        "question": question,
        "kind": "qa",
        "dataset": dataset,
        "metrics": {"em": em},
    }


def test_several_data_sets_have_a_row_each_their_mean_and_all():
    # a: 1, 1, 1 (mean 1); b: 0 (mean 0). Over data sets ½, over questions ¾.
    records = [of("a", str(i), 1.0) for i in range(3)] + [of("b", "0", 0.0)]
    summary = summarise(records)
    assert {name: row["em"][0] for name, row in summary.items()} == {
        "a": 1,
        "b": 0,
        "mean of datasets": 0.5,
        "all": 0.75,
    }
    assert summary["mean of datasets"]["em"] == (0.5, 0.5, 0.5)  # neither data set varies in itself
    assert summary["all"]["em"][1] < 0.75


def test_the_mean_of_data_sets_has_a_number_only_where_all_have_it():
    records = [of("a", "1", 1.0), of("b", "1", 1.0)]
    records[0]["metrics"]["judged"] = 1.0
    assert set(summarise(records)["mean of datasets"]) == {"questions", "em"}


def test_each_data_set_is_resampled_by_itself():
    # (0, 1) and (0, 1): the mean of two resampled means is 0 or 1 with probability 1/16 each: 2.5 %
    # lie at 0, 97.5 % at 1
    assert mean_of_means([np.array([0.0, 1.0])] * 2) == (0.5, 0.0, 1.0)


def test_one_kind_alone_is_shown_once():
    text = table(summarise([record("1", em=1.0)]), width=160)
    assert [line.split()[0] for line in text.splitlines()] == ["kind", "a"]


def test_the_markdown_table_has_the_same_cells():
    lines = markdown(summarise([record("1", em=1.0), record("2", "b", em=0.0)])).splitlines()
    assert lines[:2] == ["| kind | n | em |", "| --- | --- | --- |"]
    assert lines[2] == "| a | 1 | 1.000 [1.00, 1.00] |" and lines[4].startswith(
        "| all | 2 | 0.500 ["
    )


# ----------------------------------------------------------------------------------------- two runs


def test_the_paired_difference_by_hand():
    # differences 1, 0, 0, -1, 1: mean 0.2; 2 better, 1 worse
    ours, theirs = np.array([1.0, 1, 0, 0, 1]), np.array([0.0, 1, 0, 1, 0])
    found = paired(ours, theirs)
    assert (found["mean"], found["other"], found["better"], found["worse"]) == (0.6, 0.4, 2, 1)
    assert found["difference"][0] == pytest.approx(0.2)


def test_the_p_value_is_the_share_of_sign_flips_that_are_as_far_from_zero():
    # 5 differences of +1: of 32 signings two (all +, all -) give a sum of 5: 2/32 = 0.0625
    assert sign_flip_p(np.array([1.0] * 5 + [0.0] * 20)) == pytest.approx(2 / 32, abs=0.01)
    # +1 +1 -1: every signing has |sum| >= 1
    assert sign_flip_p(np.array([1.0, 1.0, -1.0])) == 1.0
    assert sign_flip_p(np.zeros(3)) == 1.0


def test_the_same_interval_and_p_come_twice():
    values = np.random.default_rng(3).random(40)
    assert paired(values, values[::-1].copy()) == paired(values, values[::-1].copy())


def test_pairing_sees_what_two_intervals_hide():
    # Questions differ much (0 or 1), the runs by one tenth of them, always on the same side.
    theirs = np.array([0.0, 1.0] * 100)
    ours = theirs.copy()
    ours[:40:2] = 1.0
    assert bootstrap(theirs)[2] > bootstrap(ours)[1]  # the intervals overlap
    mean, low, high = paired(ours, theirs)["difference"]
    assert mean == pytest.approx(0.1) and 0.05 < low < high < 0.15


def asked(question_id, text, em, **more):
    return {"id": question_id, "question": text, "kind": "qa", "metrics": {"em": em}, **more}


def test_questions_are_matched_by_their_text_whatever_their_ids():
    here = [asked("1", "Who ?", 1.0), asked("2", "Where ?", 1.0)]
    there = [asked("1", "Where  ?", 0.0), asked("2", "What ?", 1.0), asked("3", "Who ?", 1.0)]
    assert matched(here, there) == {"1": "3", "2": "1"}
    comparison = compare(here, there)
    assert comparison["all"]["em"]["difference"][0] == 0.5 and comparison["all"]["questions"] == 2
    assert (comparison["all"]["only_here"], comparison["all"]["only_there"]) == (0, 1)


def test_of_one_text_twice_the_second_here_is_the_second_there():
    here = [asked("1", "Who ?", 1.0), asked("2", "Who ?", 0.0)]
    there = [asked("x", "Who ?", 1.0), asked("y", "Who ?", 1.0)]
    assert matched(here, there) == {"1": "x", "2": "y"}


def test_samples_of_a_question_are_averaged_on_both_sides():
    here = [asked("1", "Who ?", 1.0, sample=0), asked("1", "Who ?", 0.0, sample=1)]
    there = [asked("9", "Who ?", 0.0, sample=s) for s in range(3)]
    found = compare(here, there)["all"]["em"]
    assert (found["mean"], found["other"], found["better"]) == (0.5, 0.0, 1)


def test_a_number_that_one_run_lacks_is_not_compared():
    here, there = [asked("1", "Who ?", 1.0)], [asked("1", "Who ?", 1.0)]
    here[0]["metrics"]["judged"] = 1.0
    there[0]["metrics"]["judged"] = None
    assert set(compare(here, there)["all"]) == {"questions", "em", "only_here", "only_there"}


def test_runs_without_a_common_question_are_one_line():
    with pytest.raises(InputError, match="no question in common"):
        compare([asked("1", "Who ?", 1.0)], [asked("1", "What ?", 1.0)])


def test_the_comparison_says_over_how_many_questions_it_is():
    here, there = [asked("1", "Who ?", 1.0), asked("2", "What ?", 1.0)], [asked("1", "Who ?", 0.0)]
    text = comparison_table(compare(here, there))
    assert (
        text.splitlines()[0]
        == "paired: 1 questions of both runs (1 only in this one, 0 only in the other)"
    )
    assert text.splitlines()[2].split() == [
        "qa",
        "1",
        "em",
        "1.000",
        "0.000",
        "+1.000",
        "[+1.000,",
        "+1.000]",
        "1",
        "1",
        "0",
    ]
    assert (
        comparison_markdown(compare(here, there))
        .splitlines()[2]
        .startswith("| qa | 1 | em | 1.000 | 0.000 | +1.000 [")
    )


def test_a_data_set_called_all_is_not_taken_for_the_total():
    summary = summarise([of("all", "1", 1.0), of("b", "1", 0.0)])
    assert {name: row["em"][0] for name, row in summary.items()} == {
        "all (file)": 1,
        "b": 0,
        "mean of datasets": 0.5,
        "all": 0.5,
    }


def test_the_mean_of_data_sets_is_compared_too():
    # a: differences 1, 1, 1, 1; b: 0: over data sets ½, over questions 4/5. No data set varies in
    # itself.
    here = [of("a", f"a{i}", 1.0) for i in range(4)] + [of("b", "b0", 1.0)]
    there = [of("a", f"a{i}", 0.0) for i in range(4)] + [of("b", "b0", 1.0)]
    comparison = compare(here, there)
    assert list(comparison) == ["a", "b", "mean of datasets", "all"]
    mean = comparison["mean of datasets"]["em"]
    assert (mean["mean"], mean["other"], mean["difference"]) == (1.0, 0.5, (0.5, 0.5, 0.5))
    assert comparison["all"]["em"]["difference"][0] == pytest.approx(0.8)


def test_without_texts_the_ids_count():
    here = [{**asked("a", "", 1.0)}, {**asked("b", "", 0.0)}]
    assert matched(here, [asked("b", "", 1.0), asked("a", "", 1.0)]) == {"a": "a", "b": "b"}
    with pytest.raises(InputError, match="no question in common"):
        compare(here, [asked("c", "", 1.0)])


def test_many_questions_are_drawn_in_blocks_of_the_very_numbers():
    values = np.random.default_rng(0).random(30)
    rng = np.random.default_rng(7)
    expected = np.concatenate([values[rng.integers(0, 30, (n, 30))].mean(1) for n in (50, 50, 20)])
    assert (report.resampled_means(values, 120, np.random.default_rng(7)) == expected).all()


def test_records_without_a_number_and_a_bar_in_a_name_do_no_harm():
    assert table(summarise([record("1")])) == "no numbers: none of the records has a metric"
    assert "| a\\|b | 1 |" in markdown(summarise([record("1", "a|b", em=1.0)]))
