"""A run at three moments: before RL, after stage 1, after stage 2.

    python -m lab.moments                      of `make train`'s run, written to moments.png
    python -m lab.moments --world_seed 20 --seed 20

Above, of each kind of held-out question the share that is searched for, at temperature 1. Below,
one question at each moment; what the environment wrote is grey. Needs the extra `plot`.
"""

import sys
import textwrap
from collections.abc import Sequence

import numpy as np

from errors import run_main
from eval import Evaluation, parse
from trajectory import Trajectory
from trajectory_metrics import trajectory_metrics
from view import load_pyplot

MOMENTS = ("before RL", "after stage 1", "after stage 2")


def moments(arguments: Sequence[str]) -> list[list[Trajectory]]:
    """The same questions, asked of each stage's last checkpoint."""
    found = []
    for stage in "210":  # the last may be missing: the warm-up can wait
        asked = Evaluation(*parse(["--stage", stage, "--temperature", "1", *arguments]))
        found.append(asked.load()[0](asked.questions, asked.settings.seed))
    return found[::-1]


def searched(trajectories: list[Trajectory], kind: str) -> float:
    """Share of a kind's questions."""
    return np.mean([bool(t.searches) for t in trajectories if t.question.kind == kind])


def shows_most(t: Trajectory) -> bool:
    two = t.question.kind == "two_hop" and len(t.searches) == 2
    return two and trajectory_metrics(t)["em"] == 1


def write_out(axis, t: Trajectory) -> None:
    axis.axis("off")
    axis.set_title(t.question.question, fontsize=9)
    y = 1.0
    for segment in t.segments:
        lines = textwrap.wrap(segment.text, 46)
        colour = "black" if segment.writer == "model" else "0.55"
        axis.text(0, y, "\n".join(lines), va="top", family="monospace", fontsize=8, color=colour)
        y -= 0.08 * len(lines)


def main(arguments: list[str] | None = None) -> None:
    pyplot = load_pyplot()
    found = moments(sys.argv[1:] if arguments is None else arguments)
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 6), sharey="row", layout="constrained")
    kinds = sorted({t.question.kind for t in found[0]})
    chosen = max(range(len(found[2])), key=lambda i: shows_most(found[2][i]))  # the first, if any
    for moment, rows, (above, below) in zip(MOMENTS, found, axes.T, strict=True):
        above.bar(kinds, [searched(rows, kind) for kind in kinds])
        above.set_title(f"share that is searched for, {moment}")
        write_out(below, rows[chosen])
    figure.savefig("moments.png")
    print("written: moments.png")


if __name__ == "__main__":
    run_main(main)
