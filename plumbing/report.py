"""Computes confidence intervals of means, compares two runs question by question, prints tables.

    interval   draws the questions 1,000 times with replacement; the interval contains the middle
               95 % of the 1,000 means
    paired     computes d_i = a_i - b_i for each question that both runs answered, the interval of
               the mean of d, and p. For p, each d_i gets a random sign, 10,000 times; the real
               signs count as one more draw. p is the share of draws whose mean is at least as far
               from 0 as the real mean

Samples of one question are not independent, so a question counts with the mean of its samples. The
intervals of two runs may overlap although their paired difference is clear, because questions
differ more than runs do. Left out: corrections for many comparisons.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from data import harmless
from errors import InputError
from world.world import KINDS

COLUMNS = """
em f1 cem rouge1 rouge2 rougeL rouge judged reader_em reader_f1 searched searches successful queries
rejected failed_rows repeated fallbacks documents_cut format evidence support relevance exact_set
set_f1 all_correct written thinking unfinished retrieved shown compression
""".split()
BRIEF = (
    "em",
    "judged",
    "reader_em",
    "rouge",
    "searches",
    "format",
)  # the columns that are printed without --all
DRAWS, FLIPS = 1000, 10_000
MEAN_OF_DATASETS = "mean of datasets"  # row in which data sets of any size count the same
MEAN = "{:.3f} [{:.2f}, {:.2f}]"
DIFFERENCE = "{mean:.3f} / {other:.3f}: {difference[0]:+.3f} "
DIFFERENCE += "[{difference[1]:+.3f}, {difference[2]:+.3f}] p={p:.3g}"
PAIRED = """
paired: {questions} questions of both runs ({only_here} only here, {only_there} only there)
this run / the other run: difference [95 %] and p of random signs"""
Summary = dict[str, dict]  # row -> column -> cell; the cell "questions" is a number of questions


def interval(groups: list[np.ndarray]) -> tuple[float, float, float]:
    """Returns (mean, low, high): the mean of the groups' means and its 95 % interval. `groups` has
    one array of values, or one for each data set; each array is resampled separately.
    """
    rng, means = np.random.default_rng(0), np.zeros(DRAWS)
    for values in groups:
        for i in range(0, DRAWS, 50):  # all draws of 200,000 questions at once would be 3 GB
            places = rng.integers(0, len(values), (50, len(values)))
            means[i : i + 50] += values[places].mean(1)
    low, high = np.quantile(means / len(groups), [0.025, 0.975])
    return float(np.mean([values.mean() for values in groups])), float(low), float(high)


def paired(groups: list[np.ndarray]) -> dict:
    """Compares two runs on the same questions. `groups` has one array [questions, 2] with the
    values of both runs, or one for each data set.
    """
    differences = [group[:, 0] - group[:, 1] for group in groups]
    # Each group has the same weight, so a question of a small group has more weight.
    weighted = np.concatenate([difference / len(difference) for difference in differences])
    mean, other = (float(np.mean([group[:, run].mean() for group in groups])) for run in (0, 1))
    return {
        "mean": mean,
        "other": other,
        "difference": interval(differences),
        "p": sign_flip_p(weighted),
        "right": four_ways(groups),
    }


def sign_flip_p(difference: np.ndarray) -> float:
    """Returns p, the probability that chance alone gives a mean at least as far from 0 as that of
    `difference`. If no run is better, each difference may as well have the opposite sign, so signs
    are drawn at random.
    """
    differing, rng = difference[difference != 0], np.random.default_rng(0)
    if not len(differing):
        return 1.0
    observed, as_far = abs(differing.sum()) * (1 - 1e-9), 0
    for _ in range(0, FLIPS, 500):  # all flips of 100,000 questions at once would be 8 GB
        signs = rng.integers(0, 2, (500, len(differing))) * 2 - 1
        as_far += int((abs(signs @ differing) >= observed).sum())
    return (1 + as_far) / (FLIPS + 1)


def summarise(records: list[dict]) -> Summary:
    """Returns a table with cells (mean, low, high) and a row per data set, or per kind of question
    if there is only one data set.
    """
    return cells(records, question_means(records), interval)


def four_ways(groups: list[np.ndarray]) -> dict:
    """Counts the questions whose value is at least 0.5 in both runs, in only one, or in neither
    (When to Search Fig. 4). An em of 0.5 means that half of the samples are right.
    """
    here, there = np.concatenate(groups).T >= 0.5  # [questions] each
    ways = {"both": here & there, "only here": here & ~there, "only there": there & ~here}
    return {name: int(way.sum()) for name, way in (ways | {"neither": ~here & ~there}).items()}


def compare(records: list[dict], others: list[dict]) -> Summary:
    """Returns the table of the questions that both runs answered; a cell is a result of `paired`.
    The row "all" also has the numbers of questions that only one run answered.
    """
    here, there, pairs = question_means(records), question_means(others), matched(records, others)
    if not pairs:
        raise InputError("the two runs have no question in common: there is nothing to compare")
    both = {}
    for left, right in pairs.items():
        a, b = here[left], there[right]
        # If the other run has no reader, its em and f1 are also compared with reader_em and
        # reader_f1 of this run. In this way R-Search's reader, which gets the evidence, is compared
        # with a RAG run of the reader's model.
        b = {f"reader_{c}": b[c] for c in b} | b
        both[left] = {column: (a[column], b[column]) for column in a if column in b}
    summary = cells([record for record in records if record["id"] in both], both, paired)
    left_out = {"only_here": len(here) - len(pairs), "only_there": len(there) - len(pairs)}
    return summary | {"all": summary["all"] | left_out}


def matched(records: list[dict], others: list[dict]) -> dict[str, str]:
    """Returns {id in one run: id in the other run} of the questions that both runs have. Questions
    are the same if their texts are equal apart from the amount of white space or, for questions
    without a text, if their ids are equal. Several questions with one text are matched in order.
    """
    here, there = defaultdict(dict), defaultdict(dict)  # text -> ids, in order
    for ids, run in ((here, records), (there, others)):
        for r in run:
            ids[" ".join(r["question"].split()) or f"id {r['id']}"][r["id"]] = True
    return {a: b for text in here for a, b in zip(here[text], there[text], strict=False)}


def question_means(records: list[dict]) -> dict[str, dict[str, float]]:
    samples = defaultdict(lambda: defaultdict(list))
    for record in records:
        numbers = samples[record["id"]]
        for column, value in record["metrics"].items():
            if value is not None:
                numbers[column].append(value)
    return {i: {c: float(np.mean(v)) for c, v in row.items()} for i, row in samples.items()}


def cells(records: list[dict], numbers: dict[str, dict], cell: Callable) -> Summary:
    """Returns a table with cell(values) in each row and column. `values` is a list with one array:
    the column's values for the questions of the row. In the row MEAN_OF_DATASETS the list has one
    array for each data set.
    """
    several = len({record.get("dataset", "") for record in records}) > 1
    rows = defaultdict(dict)
    for record in records:
        row = record.get("dataset" if several else "kind") or "-"
        if row in ("all", MEAN_OF_DATASETS):
            row += " (file)"  # so that a file all.jsonl is not taken for the total, the row "all"
        rows[row][record["id"]] = numbers[record["id"]]
    order = sorted(rows, key=lambda row: (KINDS.index(row) if row in KINDS else 99, row))
    groups = {row: [rows[row].values()] for row in order}
    if several:
        groups[MEAN_OF_DATASETS] = [rows[row].values() for row in order]
    summary = {}
    for row, parts in (groups | {"all": [numbers.values()]}).items():
        summary[row] = {"questions": sum(map(len, parts))}
        for column in COLUMNS:
            values = [np.array([q[column] for q in part if column in q]) for part in parts]
            if all(map(len, values)):
                summary[row][column] = cell(values)
    return summary


def report(
    records: list[dict], others: list[dict], as_markdown: bool, json_file: str, brief: bool = False
) -> None:
    """Prints the tables. If `others` has the records of another run, also prints a comparison, with
    a verdict if both runs have `judged` or `em`. `brief` prints only the columns BRIEF (all
    columns if none of these has a value), and neither the line on compression nor the table by
    hops; the JSON file has all columns.
    """
    whole = summarise(records)
    columns = BRIEF if brief else COLUMNS
    print(table(whole, as_markdown, columns=columns))
    ratios = whole["all"].get("compression")
    if ratios and not brief:
        means = whole["all"]["retrieved"][0] / whole["all"]["shown"][0]
        print(f"compression: {means:.2f} as ratio of means, {ratios[0]:.2f} as mean of ratios")
    if rows := by_hops(records):
        whole["hops"] = summarise(rows)
        if not brief:
            print("\n" + table(whole["hops"], as_markdown, "hops"))
    if unread := sum(record["metrics"].get("judged", 0) is None for record in records):
        print(f"{unread} verdicts are unreadable and left out of `judged`")
    if others:
        whole["comparison"] = compare(records, others)
        every = whole["comparison"]["all"]
        print(
            PAIRED.format(**every)
            + "\n\n"
            + table(whole["comparison"], as_markdown, columns=columns)
        )
        column = "judged" if "judged" in every else "em"
        if column in every:
            ways = ", ".join(f"{way} {count}" for way, count in every[column]["right"].items())
            print(f"\n{column} at least 0.5: {ways}\n{verdict(column, every[column])}")
    if json_file:
        Path(json_file).parent.mkdir(parents=True, exist_ok=True)
        Path(json_file).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def verdict(column: str, cell: dict) -> str:
    """Returns a sentence that says which run is better in this column. A run is better if the 95 %
    interval of the difference does not contain 0 and random signs give p ≤ 0.05.
    """
    difference, low, high = cell["difference"]
    size = f"by {abs(difference):.3f} (95 % of the difference: {low:+.3f} to {high:+.3f})"
    if low <= 0 <= high or cell["p"] > 0.05:
        return f"verdict: in {column} the two runs differ {size}, which may be chance"
    return f"verdict: in {column} this run is {'better' if low > 0 else 'worse'} {size}"


def by_hops(records: list[dict]) -> list[dict]:
    """Returns the records that have ARENA's metric `all_correct` and the number of gold references
    (`hops`). Their kind becomes data set and number, as in "hotpotqa 2 hops". A table of them is
    like ARENA's Table 13.
    """
    rows = []
    for record in records:
        if "all_correct" in record["metrics"] and "hops" in record:
            row = f"{record.get('dataset', '')} {record['hops']} hops".strip()
            rows.append(record | {"kind": row, "dataset": ""})
    return rows


def table(
    summary: Summary,
    as_markdown: bool = False,
    head: str = "kind",
    columns: Sequence[str] = tuple(COLUMNS),
) -> str:
    """Formats a table. If none of `columns` has a value, it shows all columns that have one."""
    rows = {row: summary[row] for row in summary if row != "all" or len(summary) != 2}
    present = [column for column in COLUMNS if any(column in row for row in rows.values())]
    columns = [column for column in present if column in columns] or present
    if not columns:
        return "no numbers: none of the records has a metric"
    lines = [[head, "n", *columns]]
    for name, row in rows.items():
        texts = [shown(row[column]) if column in row else "-" for column in columns]
        lines.append([name, str(row["questions"]), *texts])
    return written(lines, as_markdown, 2)


def shown(cell: tuple | dict) -> str:
    """Formats a mean with its interval, as "0.250 [0.12, 0.38]", or the result of `paired`."""
    return MEAN.format(*cell) if isinstance(cell, tuple) else DIFFERENCE.format(**cell)


def written(lines: list[list[str]], as_markdown: bool, keep: int) -> str:
    """Formats lines of cells as Markdown or for the terminal; the first line is the header. For
    the terminal, a table that is too wide is cut into blocks, which all begin with the first `keep`
    columns.
    """
    lines = [[harmless(cell) for cell in line] for line in lines]
    if as_markdown:
        lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        lines.insert(1, ["---"] * len(lines[0]))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    width, blocks = shutil.get_terminal_size((160, 24)).columns, []
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for i, size in enumerate(sizes[keep:], keep):
        if not blocks or sum(sizes[j] + 2 for j in blocks[-1]) + size > width:
            blocks.append([*range(keep)])
        blocks[-1].append(i)
    for line in lines:
        line[:] = [line[0].ljust(sizes[0]), *map(str.rjust, line[1:], sizes[1:])]
    texts = ["\n".join("  ".join(line[i] for i in block) for line in lines) for block in blocks]
    return "\n\n".join(texts)
