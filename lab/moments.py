"""Draws how a run's model behaves at three moments: before RL, after stage 1, after stage 2.

    python -m lab.moments                      draws the run of `make train` into moments.png
    python -m lab.moments --world_seed 20 --seed 20    the run of `make train SEED=20`

The upper row shows the share of held-out questions of each kind that the model searches for, at
temperature 1. The lower row shows the model's response to one question, with the environment's text
in grey. The command needs matplotlib (the extra `plot`).
"""

import sys
import textwrap

from errors import run_main
from eval import Evaluation, parse
from trajectory import Trajectory
from trajectory_metrics import mean, trajectory_metrics

MOMENTS = ("before RL", "after stage 1", "after stage 2")


def moments(arguments: list[str]) -> list[list[Trajectory]]:
    """Asks the same questions of the model before RL and of the last checkpoint of each stage."""
    trajectories = []
    # Stage 0 (before RL) comes last: it may run a warm-up, and a missing checkpoint of another
    # stage should be reported before that.
    for stage in "210":
        evaluation = Evaluation(*parse(["--stage", stage, "--temperature", "1", *arguments]))
        generate = evaluation.load()
        trajectories.append(generate(evaluation.questions, evaluation.settings.seed))
    return trajectories[::-1]


def searched(trajectories: list[Trajectory], kind: str) -> float:
    """Returns the share of questions of this kind for which the model searched."""
    return mean([bool(t.searches) for t in trajectories if t.question.kind == kind])


def shows_most(t: Trajectory) -> bool:
    two_hop = t.question.kind == "two_hop"
    return two_hop and len(t.searches) == 2 and trajectory_metrics(t)["em"] == 1


def write_out(axis, t: Trajectory) -> None:
    axis.axis("off")
    axis.set_title(t.question.question, fontsize=9)
    y = 1.0
    for segment in t.segments:
        lines = textwrap.wrap(segment.text, 46)
        color = "black" if segment.writer == "model" else "0.55"
        axis.text(0, y, "\n".join(lines), va="top", family="monospace", fontsize=8, color=color)
        y -= 0.08 * len(lines)


def main(arguments: list[str] | None = None) -> None:
    from matplotlib import pyplot  # an optional extra

    by_moment = moments(sys.argv[1:] if arguments is None else arguments)
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 6), sharey="row", layout="constrained")
    kinds = sorted({t.question.kind for t in by_moment[0]})
    # The first question for which `shows_most` holds after stage 2; if none, simply the first.
    chosen = max(zip(*by_moment, strict=True), key=lambda three: shows_most(three[2]))
    for column, rows, shown, moment in zip(axes.T, by_moment, chosen, MOMENTS, strict=True):
        column[0].bar(kinds, [searched(rows, kind) for kind in kinds])
        column[0].set_title(f"share of questions searched for, {moment}")
        write_out(column[1], shown)
    figure.savefig("moments.png")
    print("written: moments.png")


if __name__ == "__main__":
    run_main(main)
