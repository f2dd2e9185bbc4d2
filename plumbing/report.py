"""How sure is a mean, and which of two runs is better: intervals, paired comparisons, tables.

    interval   questions are drawn with replacement 1,000 times; 2.5 % of the means are cut off at
               either end
    paired     over the questions that both runs answered: d_i = a_i - b_i. The interval is that of
               the mean of d, and p = (1 + how many of 10,000 random flips of the signs of d give a
               mean as far from 0) / 10,001

Several samples of one question count as their mean: they are not independent. A mean is over the
questions that have the number: a verdict that could not be read is None, and not 0. Runs are
compared question by question because questions differ more than runs do: the interval of the
difference is often a third of what two separate intervals suggest. Left out: corrections for many
comparisons.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from errors import InputError
from world.world import KINDS

COLUMNS = """
em f1 cem rouge1 rouge2 rougeL rouge judged reader_em reader_f1 searched searches fallbacks format
evidence support relevance exact_set set_f1
""".split()
DRAWS, FLIPS = 1000, 10_000
MEAN_OF_DATASETS = "mean of datasets"  # each counts the same; in "all" each question does


class Mean(NamedTuple):
    """A number with its 95 % interval."""

    mean: float
    low: float
    high: float


# ---------------------------------------------------------------------------------------- intervals


def interval(groups: list[np.ndarray], draws: int = DRAWS) -> Mean:
    """The mean over groups of their means, each group resampled by itself. One group is one data
    set; several are the mean of data sets.

    >>> interval([np.ones(8), np.zeros(2)])
    Mean(mean=0.5, low=0.5, high=0.5)
    """
    rng = np.random.default_rng(0)
    means = np.mean([resampled_means(group, draws, rng) for group in groups], axis=0)  # [draws]
    low, high = np.quantile(means, [0.025, 0.975])
    return Mean(float(np.mean([group.mean() for group in groups])), float(low), float(high))


def resampled_means(values: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    # 50 at a time: all 1,000 draws of 200,000 questions would be 3 GB.
    blocks = [min(50, draws - start) for start in range(0, draws, 50)]
    places = (rng.integers(0, len(values), (block, len(values))) for block in blocks)
    return np.concatenate([values[drawn].mean(1) for drawn in places])  # [draws]


def paired(groups: list[np.ndarray]) -> dict:
    """Two runs on the same questions: each group is [questions, 2].

    >>> paired([np.array([[1.0, 1.0], [1.0, 0.0]])])["difference"].mean
    0.5
    """
    differences = [group[:, 0] - group[:, 1] for group in groups]
    weighted = differences[0]
    if len(groups) > 1:  # a question of a small data set weighs more
        weighted = np.concatenate([difference / len(difference) for difference in differences])
    return {
        "mean": float(np.mean([group[:, 0].mean() for group in groups])),
        "other": float(np.mean([group[:, 1].mean() for group in groups])),
        "difference": interval(differences),
        "p": sign_flip_p(weighted),
        "better": int((weighted > 0).sum()),
        "worse": int((weighted < 0).sum()),
    }


def sign_flip_p(difference: np.ndarray) -> float:
    """How often chance alone would give a difference this large: if neither run is better, each
    sign is a coin toss.

    >>> sign_flip_p(np.zeros(5))
    1.0
    """
    differing, rng = difference[difference != 0], np.random.default_rng(0)
    if not len(differing):
        return 1.0
    observed, as_far = abs(differing.sum()) * (1 - 1e-9), 0
    for start in range(0, FLIPS, 500):  # blocks: 10,000 x 100,000 signs would be 8 GB
        signs = rng.integers(0, 2, (min(500, FLIPS - start), len(differing))) * 2 - 1
        as_far += int((abs(signs @ differing) >= observed).sum())
    return (1 + as_far) / (FLIPS + 1)


# --------------------------------------------------------------------------------------------- runs

Question = list[list[dict]]  # run -> sample -> metrics
Summary = dict[str, dict]  # row -> {"questions": how many, column: a cell}


def summarise(records: list[dict]) -> Summary:
    """row -> column -> Mean. A row is a kind of question, or of several data sets each of them;
    "all" is last.
    """
    return _summary(_grouped(records), lambda groups: interval([group[:, 0] for group in groups]))


def compare(records: list[dict], others: list[dict]) -> Summary:
    """row -> column -> what `paired` gives, over the questions of both runs; "all" also says how
    many were left out.
    """
    pairs = matched(records, others)
    if not pairs:
        raise InputError(
            "the two runs have no question in common: give predictions for the same questions"
        )
    # The other run's samples stand under this run's ids, and so in this run's rows.
    id_here = {there: here for here, there in pairs.items()}
    left = [record for record in records if record["id"] in pairs]
    right = [r | {"id": id_here[r["id"]]} for r in others if r["id"] in id_here]
    summary = _summary(_grouped(left, right), paired)
    summary["all"]["only_here"] = len({record["id"] for record in records}) - len(pairs)
    summary["all"]["only_there"] = len({record["id"] for record in others}) - len(pairs)
    return summary


def matched(records: list[dict], others: list[dict]) -> dict[str, str]:
    """id here -> id there: the same question by its text; of several with one text the n-th here is
    the n-th there. Ids count only where there is no text: a line's number says nothing about
    another file.
    """
    here, there = _places(records), _places(others)
    return {here[place]: there[place] for place in here if place in there}


def _places(records: list[dict]) -> dict[tuple[str, int], str]:
    """(text, how many questions before have it) -> id."""
    seen, found = Counter(), {}
    for question_id, text in {record["id"]: record["question"] for record in records}.items():
        text = " ".join(text.split()) or f"id {question_id}"
        found[text, seen[text]] = question_id
        seen[text] += 1
    return found


def _grouped(*runs: list[dict]) -> dict[str, list[list[Question]]]:
    """row -> groups of questions: one, or for the mean of data sets one for each. Every run stands
    in the rows of the first.
    """
    several = len({record.get("dataset", "") for record in runs[0]}) > 1
    questions: dict[str, Question] = defaultdict(lambda: [[] for _ in runs])
    rows: dict[str, dict[str, Question]] = defaultdict(dict)
    for run, records in enumerate(runs):
        for record in records:
            questions[record["id"]][run].append(record["metrics"])
    for record in runs[0]:
        row = _row_name(record.get("dataset" if several else "kind"))
        rows[row][record["id"]] = questions[record["id"]]
    groups = {row: [list(rows[row].values())] for row in sorted(rows, key=_row_order)}
    if several:
        groups[MEAN_OF_DATASETS] = [group for (group,) in groups.values()]
    return groups | {"all": [list(questions.values())]}


def _row_name(name: str | None) -> str:
    """Trap: a file called all.jsonl would be taken for the total."""
    return f"{name} (file)" if name in ("all", MEAN_OF_DATASETS, "comparison") else name or "-"


def _row_order(row: str) -> tuple[int, str]:
    return KINDS.index(row) if row in KINDS else len(KINDS), row


def _summary(rows: dict[str, list[list[Question]]], cell: Callable) -> Summary:
    """`cell` makes one of the groups' [questions, runs], where every group has the number."""
    summary: Summary = {}
    for row, groups in rows.items():
        summary[row] = {"questions": sum(map(len, groups))}
        for column in COLUMNS:
            values = [question_means(questions, column) for questions in groups]
            if all(map(len, values)):
                summary[row][column] = cell(values)
    return summary


def question_means(questions: list[Question], column: str) -> np.ndarray:
    """Each question's mean over its samples that have the number; a question without one in some
    run is left out.  # [questions, runs]

    >>> question_means([[[{"judged": 1.0}, {"judged": None}]], [[{"em": 1.0}]]], "judged")
    array([[1.]])
    """
    found = []
    for runs in questions:
        values = [[m[column] for m in samples if m.get(column) is not None] for samples in runs]
        if all(values):
            found.append([np.mean(numbers) for numbers in values])
    return np.array(found)


# ------------------------------------------------------------------------------------------- tables


def report(
    records: list[dict],
    others: list[dict] | None = None,
    as_markdown: bool = False,
    json_file: str = "",
) -> None:
    """The table of one run, and of two their comparison; also as JSON."""
    summary = summarise(records)
    print(table(summary, as_markdown))
    unread = sum(r["metrics"].get("judged", 0) is None for r in records)
    if unread:
        print(f"{unread} of {len(records)} verdicts are unreadable: `judged` is without them")
    whole = dict(summary)
    if others:
        whole["comparison"] = compare(records, others)
        print("\n" + comparison_table(whole["comparison"], as_markdown))
    if json_file:
        Path(json_file).parent.mkdir(parents=True, exist_ok=True)
        Path(json_file).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def table(summary: Summary, as_markdown: bool = False, width: int = 0, head: str = "kind") -> str:
    """A line per row: "0.250 [0.12, 0.38]" is a mean with its interval."""
    summary = _shown_rows(summary)
    columns = [c for c in COLUMNS if any(c in row for row in summary.values())]
    if not columns:
        return "no numbers: none of the records has a metric"
    lines = [[head, "n", *columns]]
    for name, row in summary.items():
        cells = ["{:.3f} [{:.2f}, {:.2f}]".format(*row[c]) if c in row else "-" for c in columns]
        lines.append([name, str(row["questions"]), *cells])
    return written(lines, as_markdown, 2, width)


def comparison_table(comparison: Summary, as_markdown: bool = False, width: int = 0) -> str:
    """A line per row and column. Of the rows above "all" only what differs at all."""
    every = comparison["all"]
    lines = [["kind", "n", "metric", "this", "other", "difference [95 %]", "p", "better", "worse"]]
    for name, row in _shown_rows(comparison).items():
        for column in [c for c in COLUMNS if c in row]:
            c = row[column]
            if name == "all" or len(comparison) <= 2 or c["better"] + c["worse"]:
                means = [f"{c['mean']:.3f}", f"{c['other']:.3f}"]
                difference = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*c["difference"])
                test = [f"{c['p']:.3g}", str(c["better"]), str(c["worse"])]
                lines.append([name, str(row["questions"]), column, *means, difference, *test])
    return (
        f"paired: {every['questions']} questions of both runs ({every['only_here']} only in this "
        f"one, {every['only_there']} only in the other)\n\n{written(lines, as_markdown, 3, width)}"
    )


def _shown_rows(summary: Summary) -> Summary:
    """Where there is one row only, "all" says it again."""
    return {name: row for name, row in summary.items() if name != "all" or len(summary) != 2}


def written(lines: list[list[str]], as_markdown: bool, keep: int, width: int = 0) -> str:
    """Lines of cells, a header first, in Markdown or for the screen: there in blocks of as many
    columns as fit `width` (0 = the terminal's), each with the first `keep`.
    """
    if as_markdown:
        lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        lines.insert(1, ["---"] * len(lines[0]))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    width = width or shutil.get_terminal_size((160, 24)).columns
    columns, blocks = [], []
    for cells in zip(*lines, strict=True):
        size = max(map(len, cells))
        columns.append([cell.rjust(size) if columns else cell.ljust(size) for cell in cells])
    for column in columns[keep:]:
        if not blocks or sum(len(c[0]) + 2 for c in [*blocks[-1], column]) - 2 > width:
            blocks.append(columns[:keep])
        blocks[-1].append(column)
    texts = []
    for block in blocks:
        texts.append("\n".join("  ".join(line) for line in zip(*block, strict=True)))
    return "\n\n".join(texts)
