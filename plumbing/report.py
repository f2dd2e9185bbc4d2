"""How sure is a mean, and which of two runs is better: intervals, paired comparisons, tables.

    mean, interval   questions are drawn with replacement 1,000 times; 2.5 % of the means are cut
                     off at either end
    paired           of the questions that both runs answered: d_i = a_i - b_i; the interval is that
                     of the mean of d, and p = (1 + how many of 10,000 random flips of the signs of
                     d give a mean as far from 0) / 10,001

Several samples of one question count as their mean: they are not independent. A mean is over the
questions that have the number: a verdict that could not be read is None, and not 0. Two runs are
compared question by question because questions differ more than runs do: the interval of the
difference is often a third of what two separate intervals suggest. Left out: corrections for many
comparisons.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from errors import InputError, run_main
from world.world import KINDS

ALL_COLUMNS = (
    "em",
    "f1",
    "cem",
    "rouge1",
    "rouge2",
    "rougeL",
    "rouge",
    "judged",
    "reader_em",
    "reader_f1",
    "searched",
    "searches",
    "fallbacks",
    "format",
    "evidence",
    "support",
    "relevance",
    "exact_set",
    "set_f1",
)
DRAWS, FLIPS = 1000, 10_000
MEAN_OF_DATASETS = (  # each data set counts the same; "all" counts each question the same
    "mean of datasets"
)


# ---------------------------------------------------------------------------------------- intervals


def bootstrap(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> tuple[float, float, float]:
    """(mean, low, high) with a 95 % percentile interval over the values (one per question).

    >>> bootstrap(np.ones(5))
    (1.0, 1.0, 1.0)
    """
    return _interval(values.mean(), resampled_means(values, draws, np.random.default_rng(seed)))


def resampled_means(values: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    # 50 at a time: all 1,000 draws of 200,000 questions would be 3 GB
    blocks = [min(50, draws - start) for start in range(0, draws, 50)]
    return np.concatenate(
        [values[rng.integers(0, len(values), (n, len(values)))].mean(1) for n in blocks]
    )  # [draws]


def _interval(mean: float, means: np.ndarray) -> tuple[float, float, float]:
    low, high = np.quantile(means, [0.025, 0.975])
    return float(mean), float(low), float(high)


def mean_of_means(
    groups: list[np.ndarray], draws: int = DRAWS, seed: int = 0
) -> tuple[float, float, float]:
    """The mean over data sets of their means, each resampled by itself.

    >>> mean_of_means([np.ones(8), np.zeros(2)])
    (0.5, 0.5, 0.5)
    """
    rng = np.random.default_rng(seed)
    return _interval(
        np.mean([g.mean() for g in groups]),
        np.mean([resampled_means(g, draws, rng) for g in groups], axis=0),
    )


def question_means(questions: Iterable[list[dict]], column: str) -> np.ndarray:
    """Each question's mean over its samples that have the number; a question without one is left
    out: None is not 0.

    >>> question_means([[{"judged": 1.0}, {"judged": None}], [{"em": 1.0}]], "judged")
    array([1.])
    """
    values = [[m[column] for m in metrics if m.get(column) is not None] for metrics in questions]
    return np.array([np.mean(v) for v in values if v])


# ------------------------------------------------------------------------------------------ one run


def summarise(records: list[dict]) -> dict[str, dict]:
    """row -> column -> (mean, low, high). A row is a kind of question, or of several data sets each
    of them; "all" is last.
    """
    rows = grouped(records)
    summary = {}
    for name, questions in rows.items():
        columns = {c: question_means(questions.values(), c) for c in ALL_COLUMNS}
        summary[name] = {
            "questions": len(questions),
            **{c: bootstrap(v) for c, v in columns.items() if len(v)},
        }
    return with_mean_of_datasets(summary, rows) if len(datasets(records)) > 1 else summary


def datasets(records: list[dict]) -> set[str]:
    return {record.get("dataset", "") for record in records}


def grouped(records: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """row -> question id -> the metrics of its samples."""
    rows: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    key = "dataset" if len(datasets(records)) > 1 else "kind"
    for record in records:
        for row in (row_name(record.get(key)), "all"):
            rows[row][record["id"]].append(record["metrics"])
    return {row: rows[row] for row in sorted(rows, key=row_order)}


def row_name(name: str | None) -> str:
    """Trap: a file called all.jsonl would be counted into the total twice, and then be taken for
    it.
    """
    return f"{name} (file)" if name in ("all", MEAN_OF_DATASETS, "comparison") else name or "-"


def row_order(row: str) -> tuple:
    return row == "all", KINDS.index(row) if row in KINDS else 99, row


def with_mean_of_datasets(
    summary: dict[str, dict], rows: dict[str, dict[str, list[dict]]]
) -> dict[str, dict]:
    every = summary.pop("all")
    mean: dict = {"questions": every["questions"]}
    for column in [c for c in ALL_COLUMNS if all(c in row for row in summary.values())]:
        mean[column] = mean_of_means(
            [question_means(rows[name].values(), column) for name in summary]
        )
    return {**summary, MEAN_OF_DATASETS: mean, "all": every}


# ----------------------------------------------------------------------------------------- two runs


def compare(records: list[dict], others: list[dict]) -> dict[str, dict]:
    """row -> column -> {"mean", "other", "difference": (mean, low, high), "p", "better", "worse"},
    over the questions of both; `questions` is how many that are, `only_here` and `only_there` how
    many were left out.
    """
    pairs = matched(records, others)
    if not pairs:
        raise InputError(
            "the two runs have no question in common: give predictions for the same questions"
        )
    others_by_id = {there: here for here, there in pairs.items()}
    left = grouped([r for r in records if r["id"] in pairs])
    # the other run's samples stand under this run's ids, and so in this run's rows
    right: dict[str, list[dict]] = defaultdict(list)
    for record in others:
        if record["id"] in others_by_id:
            right[others_by_id[record["id"]]].append(record["metrics"])
    found = {
        name: paired_values(questions, right) for name, questions in left.items()
    }  # row -> column -> [questions, 2]
    summary = {
        name: {
            "questions": len(left[name]),
            **{c: paired(v[:, 0], v[:, 1]) for c, v in columns.items()},
        }
        for name, columns in found.items()
    }
    every = summary.pop("all")
    if len(datasets(records)) > 1:
        summary[MEAN_OF_DATASETS] = {
            "questions": every["questions"],
            **paired_means([found[name] for name in summary]),
        }
    summary["all"] = every
    summary["all"]["only_here"] = len({r["id"] for r in records}) - len(pairs)
    summary["all"]["only_there"] = len({r["id"] for r in others}) - len(pairs)
    return summary


def matched(records: list[dict], others: list[dict]) -> dict[str, str]:
    """id here -> id there: the same question by its text; of several with one text the n-th here is
    the n-th there. Ids count only where there is no text: many files number their lines, and a
    line's number says nothing about another file.
    """

    def places(some: list[dict]) -> dict[tuple[str, int], str]:
        seen, found = Counter(), {}
        for question_id, text in {
            r["id"]: " ".join(r["question"].split()) or f"id {r['id']}" for r in some
        }.items():
            found[text, seen[text]] = question_id
            seen[text] += 1
        return found

    here, there = places(records), places(others)
    return {question_id: there[place] for place, question_id in here.items() if place in there}


def paired_values(
    questions: dict[str, list[dict]], right: dict[str, list[dict]]
) -> dict[str, np.ndarray]:
    """column -> (here, there) of every question that has the number in both runs.  # [questions,
    2]
    """
    found = {}
    for column in ALL_COLUMNS:
        both = [
            (question_means([m], column), question_means([right[i]], column))
            for i, m in questions.items()
        ]
        both = np.array([(a[0], b[0]) for a, b in both if len(a) and len(b)])  # [questions, 2]
        if len(both):
            found[column] = both
    return found


def paired_means(rows: list[dict[str, np.ndarray]]) -> dict[str, dict]:
    """The mean over data sets of their differences, each data set resampled by itself; p flips
    signs as `paired` does, a question of a small data set weighing more.
    """
    found = {}
    for column in [c for c in ALL_COLUMNS if all(c in row for row in rows)]:
        pairs = [row[column] for row in rows]
        differences = [p[:, 0] - p[:, 1] for p in pairs]
        weighted = np.concatenate([d / len(d) for d in differences])
        found[column] = {
            "mean": float(np.mean([p[:, 0].mean() for p in pairs])),
            "other": float(np.mean([p[:, 1].mean() for p in pairs])),
            "difference": mean_of_means(differences),
            "p": sign_flip_p(weighted),
            "better": int((weighted > 0).sum()),
            "worse": int((weighted < 0).sum()),
        }
    return found


def paired(ours: np.ndarray, theirs: np.ndarray, seed: int = 0) -> dict:
    """The difference of two runs, question by question.

    >>> paired(np.ones(4), np.array([1.0, 1.0, 1.0, 0.0]))["difference"][0]
    0.25
    """
    difference = ours - theirs  # [questions]
    return {
        "mean": float(ours.mean()),
        "other": float(theirs.mean()),
        "difference": bootstrap(difference),
        "p": sign_flip_p(difference, seed),
        "better": int((difference > 0).sum()),
        "worse": int((difference < 0).sum()),
    }


def sign_flip_p(difference: np.ndarray, seed: int = 0) -> float:
    """How often chance alone would give a difference this large: if neither run is better, each
    sign is a coin toss.

    >>> sign_flip_p(np.zeros(5))
    1.0
    """
    differing, rng = difference[difference != 0], np.random.default_rng(seed)
    if not len(differing):
        return 1.0
    observed, as_far = abs(differing.sum()) * (1 - 1e-9), 0
    for start in range(0, FLIPS, 500):  # blocks: 10,000 x 100,000 signs would be 8 GB
        signs = rng.integers(0, 2, (min(500, FLIPS - start), len(differing))) * 2 - 1
        as_far += int((abs(signs @ differing) >= observed).sum())
    return (1 + as_far) / (FLIPS + 1)


# ------------------------------------------------------------------------------------------- tables

CELL_WIDTH = 19


def shown_rows(summary: dict[str, dict]) -> dict[str, dict]:
    """Where there is one row only, "all" says it again."""
    return (
        summary
        if len(summary) > 2
        else {name: row for name, row in summary.items() if name != "all"} or summary
    )


def name_width(summary: dict[str, dict]) -> int:
    return max(16, *(len(name) + 1 for name in summary))


def columns_of(summary: dict[str, dict]) -> list[str]:
    return [c for c in ALL_COLUMNS if any(c in row for row in summary.values())]


def cell(row: dict, column: str) -> str:
    return "{:.3f} [{:.2f}, {:.2f}]".format(*row[column]) if column in row else "-"


def table(summary: dict[str, dict], width: int = 0) -> str:
    """A line per row, in blocks of as many columns as fit `width` characters; 0 = the
    terminal's.
    """
    summary = shown_rows(summary)
    columns, first = columns_of(summary), name_width(summary) + 7
    if not columns:
        return "no numbers: none of the records has a metric"
    width = width or shutil.get_terminal_size((160, 24)).columns
    blocks = math.ceil(len(columns) / max(1, (width - first) // CELL_WIDTH))
    size = math.ceil(len(columns) / max(1, blocks))
    return "\n\n".join(
        table_block(summary, columns[i : i + size]) for i in range(0, len(columns), size)
    )


def table_block(summary: dict[str, dict], columns: list[str]) -> str:
    first = name_width(summary)
    lines = [f"{'kind':{first}}{'n':>5}  " + "".join(f"{c:>{CELL_WIDTH}}" for c in columns)]
    for name, row in summary.items():
        cells = "".join(f"{cell(row, c):>{CELL_WIDTH}}" for c in columns)
        lines.append(f"{name:{first}}{row['questions']:>5}  {cells}")
    return "\n".join(lines)


def markdown(summary: dict[str, dict]) -> str:
    """The same numbers as a Markdown table."""
    summary, columns = shown_rows(summary), columns_of(summary)
    lines = [["kind", "n", *columns], ["---"] * (len(columns) + 2)]
    lines += [
        [name, str(row["questions"]), *(cell(row, c) for c in columns)]
        for name, row in summary.items()
    ]
    return as_markdown(lines)


def as_markdown(lines: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def comparison_lines(comparison: dict[str, dict]) -> list[list[str]]:
    """A line per row and column: what both have, the difference with its interval, p, and who is
    better how often. Of the rows above "all" only what differs at all.
    """
    lines = [["kind", "n", "metric", "this", "other", "difference [95 %]", "p", "better", "worse"]]
    for name, row in shown_rows(comparison).items():
        for column in columns_of({name: row}):
            c = row[column]
            if name != "all" and len(comparison) > 2 and not c["better"] + c["worse"]:
                continue
            lines.append(
                [
                    name,
                    str(row["questions"]),
                    column,
                    f"{c['mean']:.3f}",
                    f"{c['other']:.3f}",
                    "{:+.3f} [{:+.3f}, {:+.3f}]".format(*c["difference"]),
                    f"{c['p']:.3g}",
                    str(c["better"]),
                    str(c["worse"]),
                ]
            )
    return lines


def comparison_table(comparison: dict[str, dict]) -> str:
    lines = comparison_lines(comparison)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    every = comparison["all"]
    head = (
        f"paired: {every['questions']} questions of both runs ({every['only_here']} only in this"
        f" one, {every['only_there']} only in the other)"
    )
    return "\n".join(
        [
            head,
            *(
                "  ".join(f"{c:{w}}" for c, w in zip(line, widths, strict=True)).rstrip()
                for line in lines
            ),
        ]
    )


def comparison_markdown(comparison: dict[str, dict]) -> str:
    header, *lines = comparison_lines(comparison)
    return as_markdown([header, ["---"] * len(header), *lines])


def main() -> None:
    """Two invented runs that share their questions: the intervals overlap, the paired difference is
    clear.
    """
    rng = np.random.default_rng(0)
    ease = rng.random(200)  # how easy each question is

    def run(skill: float) -> list[dict]:
        right = (ease + skill > 0.6).astype(float)
        return [
            {
                "id": str(i),
                "question": f"question {i} ?",
                "kind": "one_hop" if i % 2 else "two_hop",
                "metrics": {"em": float(em)},
            }
            for i, em in enumerate(right)
        ]

    ours, theirs = run(0.06), run(0.0)
    print("one run\n" + table(summarise(ours)), "\n\nthe other\n" + table(summarise(theirs)), "\n")
    print(comparison_table(compare(ours, theirs)))


if __name__ == "__main__":
    run_main(main)
