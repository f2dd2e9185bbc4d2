"""Computes confidence intervals of means, compares two runs question by question, prints tables.

    interval      draws the questions 1,000 times with replacement; the interval contains the middle
                  95 % of the 1,000 means
    compare       computes d_i = a_i - b_i for each question that both runs answered, the interval
                  of the mean of d, and p (`sign_flip_p`): each d_i gets a random sign, 10,000
                  times; p is the share of draws whose mean is at least as far from 0 as the real
                  one, which counts as one more draw

Samples of one question are not independent, so a question counts with the mean of its samples. The
intervals of two runs may overlap although their paired difference is clear, because questions
differ more than runs do. Left out: corrections for many comparisons.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from data import harmless
from errors import InputError

COLUMNS = """
em f1 cem rouge1 rouge2 rougeL rouge judged reader_em reader_f1 searched searches successful queries
rejected failed_rows repeated fallbacks documents_cut format evidence support relevance exact_set
all_correct written retrieved shown
""".split()
BRIEF = "em judged reader_em rouge searches format".split()  # the columns without --all
COLUMNS_PER_BLOCK = 6  # of a table in a terminal
DRAWS, FLIPS = 1000, 10_000
MEAN_OF_DATASETS = "mean of datasets"  # row in which data sets of any size count the same
Summary = dict[str, dict]  # row -> column -> (mean, low, high); "questions" is their number


# ----------------------------------------------------------------------------------------- one run
def interval(groups: list[np.ndarray]) -> tuple[float, float, float]:
    """Returns (mean, low, high): the mean of the groups' means and its 95 % interval. `groups` has
    one array of values, or one for each data set; each array is resampled separately.
    """
    rng = np.random.default_rng(0)
    means = np.zeros(DRAWS)
    for values in groups:
        places = rng.integers(0, len(values), (DRAWS, len(values)))
        means += values[places].mean(1) / len(groups)
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return float(np.mean([values.mean() for values in groups])), low, high


def summarise(records: list[dict]) -> Summary:
    """Returns a table with a row per data set, or per kind of question if there is only one."""
    several = len({record.get("dataset") for record in records}) > 1
    rows = defaultdict(list)
    for record in records:
        rows[record.get("dataset" if several else "kind") or "-"].append(record)
    groups = {name: [part] for name, part in rows.items()}
    if several:
        groups[MEAN_OF_DATASETS] = [*rows.values()]
    return {name: row_of(parts) for name, parts in (groups | {"all": [records]}).items()}


def row_of(parts: list[list[dict]]) -> dict:
    """Returns a row of a table. A mean needs the metric in every part (data set)."""
    tables = [np.array([*question_means(part).values()]) for part in parts]  # [questions, COLUMNS]
    row = {"questions": sum(map(len, tables))}
    for i, column in enumerate(COLUMNS):
        values = [numbers[~np.isnan(numbers[:, i]), i] for numbers in tables]
        if all(map(len, values)):
            row[column] = interval(values)
    return row


def question_means(
    records: list[dict], key: Callable = lambda record: record["id"]
) -> dict[str, np.ndarray]:
    """Returns {question: metrics [COLUMNS]}, means over its samples, NaN for a missing metric."""
    samples = defaultdict(list)
    for record in records:
        samples[key(record)].append([record["metrics"].get(column) for column in COLUMNS])
    arrays = {question: np.array(rows, float) for question, rows in samples.items()}
    return {q: np.ma.masked_invalid(rows).mean(0).filled(np.nan) for q, rows in arrays.items()}


# ---------------------------------------------------------------------------------------- two runs
def compare(records: list[dict], others: list[dict], columns: Sequence[str] = COLUMNS) -> dict:
    """Returns the numbers of questions, and for each of the columns that both runs have a dict:
    the means of this run and the other, their difference with its interval, and p.
    """
    here, there = question_means(records, same_text), question_means(others, same_text)
    both = [question for question in here if question in there]
    if not both:
        raise InputError("the two runs have no question in common: there is nothing to compare")
    pairs = np.array([[here[question], there[question]] for question in both])
    comparison = {"both": len(both), "here": len(here) - len(both), "there": len(there) - len(both)}
    for column in columns:
        values = pairs[:, :, COLUMNS.index(column)]  # [questions, 2]
        values = values[~np.isnan(values).any(1)]
        if len(values):
            differences = values[:, 0] - values[:, 1]
            comparison[column] = {
                "means": values.mean(0).tolist(),
                "difference": interval([differences]),
                "p": sign_flip_p(differences),
                "right": right_in(values),
            }
    return comparison


def right_in(values: np.ndarray) -> dict[str, int]:
    """Counts the questions that are right in both runs, in only one, or in neither (When to Search
    Figure 4). A question is right if at least half of its samples are. values: [questions, 2].
    """
    here, there = values.T >= 0.5
    ways = {"both": here & there, "only here": here & ~there, "only there": there & ~here}
    ways |= {"neither": ~here & ~there}
    return {way: int(chosen.sum()) for way, chosen in ways.items()}


def same_text(record: dict) -> str:
    """Returns what identifies a question in files of different programs: its text, or else its id,
    which may be a mere line number.
    """
    return " ".join(record["question"].split()) or record["id"]


def sign_flip_p(differences: np.ndarray) -> float:
    """Returns the probability that chance alone gives a mean at least as far from 0. If no run is
    better, each difference may as well have the opposite sign, so signs are drawn at random.
    """
    rng = np.random.default_rng(0)
    observed = abs(differences.sum()) * (1 - 1e-9)
    as_far = 1
    for _ in range(FLIPS):
        signs = rng.integers(0, 2, len(differences)) * 2 - 1
        as_far += int(abs(signs @ differences) >= observed)
    return as_far / (FLIPS + 1)


# ---------------------------------------------------------------------------------------- printing
def report(records: list[dict], others: list[dict], options) -> None:
    """Prints the table and, if `others` has the records of another run, the comparison. Reads these
    fields of eval.Options: all (every column), markdown, json (a file to write all numbers to).
    """
    whole = summarise(records)
    columns = COLUMNS if options.all else BRIEF
    print(table(whole, options.markdown, columns=columns))
    if unread := sum(record["metrics"].get("judged", 0) is None for record in records):
        print(f"{unread} verdicts are unreadable and left out of `judged`")
    if others:
        whole["comparison"] = compare(records, others, columns)
        print(*comparison_lines(whole["comparison"]), sep="\n")
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def comparison_lines(comparison: dict) -> Iterator[str]:
    """Yields a line per metric. It says which run is higher if the 95 % interval of the difference
    does not contain 0 and random signs give p ≤ 0.05.
    """
    counts = "{both} questions of both runs ({here} only here, {there} only there)"
    yield f"\npaired: {counts.format(**comparison)}"
    for column in [column for column in COLUMNS if column in comparison]:
        cell = comparison[column]
        _, low, high = cell["difference"]
        clear = not low <= 0 <= high and cell["p"] <= 0.05
        means = "{:.3f} here, {:.3f} there".format(*cell["means"])
        difference = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*cell["difference"])
        higher = ("higher here" if low > 0 else "higher there") if clear else "may be chance"
        yield f"{column}: {means}, difference {difference}, p={cell['p']:.3g}: {higher}"
        if column == "em":
            yield "right in " + ", ".join(f"{way}: {n}" for way, n in cell["right"].items())


def table(
    summary: Summary,
    as_markdown: bool = False,
    head: str = "kind",
    columns: Sequence[str] = tuple(COLUMNS),
) -> str:
    """Formats those of the columns that have a value. With one row, "all" would repeat it."""
    rows = {row: summary[row] for row in summary if row != "all" or len(summary) != 2}
    columns = [column for column in columns if any(column in row for row in rows.values())]
    width = len(COLUMNS) if as_markdown else COLUMNS_PER_BLOCK
    blocks = []
    for start in range(0, len(columns), width):
        shown = columns[start : start + width]
        lines = [[head, "n", *shown]]
        for name, row in rows.items():
            cells = ["{:.3f} [{:.2f}, {:.2f}]".format(*row[c]) if c in row else "-" for c in shown]
            lines.append([harmless(name), str(row["questions"]), *cells])
        blocks.append(format_table(lines, as_markdown))
    return "\n\n".join(blocks)


def format_table(lines: list[list[str]], as_markdown: bool) -> str:
    """Formats lines of cells as Markdown or for the terminal; the first line is the header."""
    if as_markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, sizes)).rstrip() for line in lines)
