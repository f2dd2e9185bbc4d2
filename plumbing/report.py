"""Computes confidence intervals of means, compares two runs question by question, prints tables.

    interval      draws the questions 1,000 times with replacement; the interval contains the middle
                  95 % of the 1,000 means
    comparison    computes the difference a - b for each question that both runs answered, and the
                  interval of its mean. The difference may be chance if the interval contains 0, or
                  if fewer than six questions differ: with five, all in favour of one run, a coin
                  would do the same with probability 2 / 32

Samples of one question are not independent, so a question counts with the mean of its samples. The
intervals of two runs may overlap although their paired difference is clear, because questions
differ more than runs do. Left out: p-values, corrections for many comparisons.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from data import harmless
from errors import InputError
from formats.records import Records

COLUMNS = """
em f1 cem rouge1 rouge2 rougeL rouge judged reader_em reader_f1 searched searches successful queries
rejected failed_rows repeated fallbacks documents_cut format evidence support relevance exact_set
all_correct model_tokens retrieved shown
""".split()
BRIEF = "em judged reader_em rouge searches format".split()  # the columns without --all
COLUMNS_PER_BLOCK = 6
DRAWS = 1000
FEWEST = 6
DIFFERENCE = "{}: {:.3f} here, {:.3f} there, difference {:+.3f} [{:+.3f}, {:+.3f}]: {}"
MEAN_OF_DATASETS = "mean of datasets"  # row in which data sets of any size count the same
Summary = dict[str, dict]  # row -> column -> (mean, low, high); "questions" is their number


# ----------------------------------------------------------------------------------------- one run
def interval(groups: list[np.ndarray]) -> tuple[float, float, float]:
    """Returns (mean, low, high): the mean of the groups' means and its 95 % interval. `groups` has
    one array of values, or one for each data set; each array is resampled separately.
    """
    rng = np.random.default_rng(0)
    draws = [
        values[rng.integers(0, len(values), (DRAWS, len(values)))].mean(1) for values in groups
    ]
    low, high = np.quantile(np.mean(draws, axis=0), [0.025, 0.975]).tolist()
    return float(np.mean([values.mean() for values in groups])), low, high


def summarise(records: Records) -> Summary:
    """Returns a table with a row per data set, or per kind of question if there is only one."""
    several = len({record.get("dataset") for record in records}) > 1
    rows = defaultdict(list)
    for record in records:
        rows[record.get("dataset" if several else "kind") or "-"].append(record)
    groups = {name: [part] for name, part in rows.items()}
    if several:
        groups[MEAN_OF_DATASETS] = [*rows.values()]
    return {name: row_of(parts) for name, parts in (groups | {"all": [records]}).items()}


def row_of(parts: list[Records]) -> dict:
    """Returns a row of a table. A mean needs the metric in every part (data set)."""
    row = {"questions": sum(len({record["id"] for record in part}) for part in parts)}
    for column in COLUMNS:
        values = [np.array([*question_means(part, column).values()]) for part in parts]
        if all(map(len, values)):
            row[column] = interval(values)
    return row


def question_means(
    records: Records, column: str, key: Callable = lambda record: record["id"]
) -> dict[str, float]:
    """Returns {question: mean over its samples that have the metric}; a question without it is left
    out.
    """
    samples = defaultdict(list)
    for record in records:
        value = record["metrics"].get(column)
        if value is not None:
            samples[key(record)].append(value)
    return {question: float(np.mean(values)) for question, values in samples.items()}


# ---------------------------------------------------------------------------------------- two runs
def paired(records: Records, others: Records, column: str) -> np.ndarray:
    """Returns the metric of each question that has it in both runs: [questions, 2]."""
    here, there = (question_means(run, column, same_text) for run in (records, others))
    pairs = [(value, there[question]) for question, value in here.items() if question in there]
    return np.array(pairs).reshape(-1, 2)


def same_text(record: dict) -> str:
    """Returns what identifies a question in files of different programs: its text, or else its id,
    which may be a mere line number.
    """
    return " ".join(record["question"].split()) or record["id"]


def comparison(records: Records, others: Records, columns: Sequence[str]) -> Iterator[str]:
    """Yields a line per metric that both runs have."""
    here, there = ({*map(same_text, run)} for run in (records, others))
    if not here & there:
        raise InputError("the two runs have no question in common: there is nothing to compare")
    yield (
        f"\npaired: {len(here & there)} questions of both runs ({len(here - there)} only here, "
        f"{len(there - here)} only there)"
    )
    for column in columns:
        pairs = paired(records, others, column)
        if len(pairs):
            differences = pairs[:, 0] - pairs[:, 1]
            mean, low, high = interval([differences])
            chance = low <= 0 <= high or np.count_nonzero(differences) < FEWEST
            verdict = "may be chance" if chance else "higher here" if low > 0 else "higher there"
            yield DIFFERENCE.format(column, *pairs.mean(0), mean, low, high, verdict)
            if column == "em":
                yield right_in(pairs)
    # A question without a prediction is wrong, but was neither searched for nor left alone.
    both = {"searched", "em"}  # a summary has no em
    known = [[row for row in run if both <= row["metrics"].keys()] for run in (records, others)]
    searched = paired(*known, "searched")
    if searched[:, 0].any() and not searched[:, 1].any():
        yield decision_f1(searched[:, 0], paired(*known, "em")[:, 1])


def right_in(pairs: np.ndarray) -> str:
    """Counts the questions that are right in both runs, in only one, or in neither (When to Search
    Figure 4). A question is right if at least half of its samples are. pairs: [questions, 2].
    """
    counts = Counter(map(tuple, (pairs >= 0.5).tolist()))
    return (
        f"right in both: {counts[True, True]}, only here: {counts[True, False]}, "
        f"only there: {counts[False, True]}, neither: {counts[False, False]}"
    )


def decision_f1(searched: np.ndarray, right_without: np.ndarray) -> str:
    """Returns the F1 of the decision to search (AdaSearch, arXiv 2512.16883), over questions [q].
    A search is needed if the run without retrieval (best with --samples 4) is wrong in at least
    half of its samples, and was made if at least half of this run's samples searched.
    Worked: of 3 needed searches 2 were made, and 1 that was not: P = R = 2/3, F1 = 2/3.
    """
    made = searched >= 0.5
    needed = right_without <= 0.5
    f1 = 2 * (made & needed).sum() / max(1, made.sum() + needed.sum())
    return f"decision to search: F1 {f1:.3f} ({needed.sum()} needed, {made.sum()} made)"


# ---------------------------------------------------------------------------------------- printing
def report(records: Records, others: Records, options) -> None:
    """Prints the table and, if `others` has the records of another run, the comparison. Reads this
    field of eval.Options: all (every column).
    """
    columns = COLUMNS if options.all else BRIEF
    print(table(summarise(records), columns=columns))
    if unread := sum(record["metrics"].get("judged", 0) is None for record in records):
        print(f"{unread} verdicts are unreadable and left out of `judged`")
    if others:
        print(*comparison(records, others, columns), sep="\n")


def table(summary: Summary, head: str = "kind", columns: Sequence[str] = COLUMNS) -> str:
    """Formats those of the columns that have a value, some at a time, so that a line fits into a
    terminal. With one row, "all" would repeat it.
    """
    rows = {row: summary[row] for row in summary if row != "all" or len(summary) != 2}
    columns = [column for column in columns if any(column in row for row in rows.values())]
    blocks = []
    for start in range(0, len(columns), COLUMNS_PER_BLOCK):
        shown = columns[start : start + COLUMNS_PER_BLOCK]
        lines = [[head, "n", *shown]]
        for name, row in rows.items():
            cells = ["{:.3f} [{:.2f}, {:.2f}]".format(*row[c]) if c in row else "-" for c in shown]
            lines.append([harmless(name), str(row["questions"]), *cells])
        blocks.append(format_table(lines))
    return "\n\n".join(blocks)


def format_table(lines: list[list[str]]) -> str:
    """Formats lines of cells as Markdown with aligned columns; the first line is the header."""
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [lines[0], ["-" * size for size in sizes], *lines[1:]]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, sizes))} |" for line in lines)
