"""A run at three moments: before RL, after stage 1, after stage 2.

    python -m lab.moments                      of `make train`'s run, written to moments.png
    python -m lab.moments --world_seed 20 --seed 20 --out docs/moments.png

Above, of each kind of held-out question the share that is searched for, at temperature 1. Below,
one question at each moment; what the environment wrote is grey. Needs the extra `plot`.
"""

import sys
import textwrap
from collections.abc import Sequence

import numpy as np

import eval as evaluation
from errors import check_output, run_main
from trajectory import Trajectory
from view import load_pyplot
from world.world import KINDS

MOMENTS = ("before RL", "after stage 1", "after stage 2")
COLOURS = ("0.75", "#e0913a", "#1a66a0")


def moments(arguments: Sequence[str]) -> list[list[Trajectory]]:
    """The same questions, asked of each stage's last checkpoint."""
    found = []
    for stage in reversed(range(len(MOMENTS))):  # the last may be missing: the warm-up can wait
        given = ["--stage", str(stage), "--temperature", "1", *arguments]
        asked = evaluation.Evaluation(*evaluation.parse(given))
        found.append(asked.load()[0](asked.questions, asked.settings.seed))
    return found[::-1]


def searched(trajectories: list[Trajectory], kind: str) -> float:
    """Share of a kind's questions."""
    return np.mean([bool(t.searches) for t in trajectories if t.question.kind == kind])


def shows_most(t: Trajectory) -> bool:
    return t.question.kind == "two_hop" and len(t.searches) == 2 and evaluation.grade(t)["em"] == 1


def draw_shares(axis, found: list[list[Trajectory]]) -> None:
    kinds = [kind for kind in KINDS if any(t.question.kind == kind for t in found[0])]
    for i, (moment, colour) in enumerate(zip(MOMENTS, COLOURS, strict=True)):
        shares, places = [searched(found[i], kind) for kind in kinds], np.arange(len(kinds))
        bars = axis.bar(places + 0.27 * (i - 1), shares, 0.25, color=colour, label=moment)
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    axis.set_xticks(range(len(kinds)), [kind.replace("_", "-") for kind in kinds])
    axis.set_title("share of held-out questions that are searched for", fontsize=11)
    axis.set_ylim(0, 1.3)
    axis.legend(frameon=False, fontsize=9, ncols=3, loc="upper right")
    axis.spines[["top", "right"]].set_visible(False)


def write_out(axis, moment: str, t: Trajectory) -> None:
    axis.axis("off")
    axis.set_title(f"{moment}: {t.question.question}", fontsize=9, loc="left")
    y = 0.95
    for segment in t.segments:
        for line in textwrap.wrap(segment.text.strip(), 46):
            grey = "0.55" if segment.writer != "model" else "black"
            axis.text(0, y, line, family="monospace", fontsize=8, color=grey, va="top")
            y -= 0.09


def main(arguments: list[str] | None = None) -> None:
    given, out = list(sys.argv[1:] if arguments is None else arguments), "moments.png"
    if "--out" in given[:-1]:
        out = given.pop(given.index("--out") + 1)
        given.remove("--out")
    check_output(out, "--out")
    pyplot = load_pyplot()
    found = moments(given)
    size = {"figsize": (12, 5.6), "constrained_layout": True}
    figure, axes = pyplot.subplot_mosaic("AAA;012", height_ratios=(1.1, 1), **size)
    draw_shares(axes["A"], found)
    chosen = next(i for i, t in enumerate(found[-1]) if shows_most(t))
    for i, moment in enumerate(MOMENTS):
        write_out(axes[str(i)], moment, found[i][chosen])
    figure.savefig(out, dpi=100)
    print(f"written: {out}")


if __name__ == "__main__":
    run_main(main)
