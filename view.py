"""See a run: its curves as one picture.

    python view.py --png runs/ur2-world0-seed0      all its stages -> curves.png in that folder

Pale: as measured; in front of it a running mean over five steps; a dashed line: a stage begins.
Needs the extra `plot` (matplotlib). Left out: trajectories (samples.txt has them), live curves.
"""

import math
from pathlib import Path

from errors import FlagParser, InputError, check_output, run_main
from formats.records import finished_records

LEARNING = ("grad_norm", "frac_reward_zero_std", "informative", "clip_fraction", "entropy")
# (title, metrics, or "prefix/" for all metrics under it)
PANELS = (
    ("reward", ("reward", "reward/")),
    ("exact match", ("em/",)),
    ("share of questions searched for", ("searched/",)),
    ("searches per question, fallbacks per search", ("searches", "fallbacks", "refused")),
    ("tokens per trajectory", ("model_tokens", "inserted_tokens")),
    ("can it learn?", LEARNING),
    ("KL to the reference, by estimator", ("k1", "k2", "k3", "k_abs")),
    ("does the critic foresee the reward?", ("explained_variance", "value_loss")),
)
COLUMNS = 3


def read_run(folder: Path) -> tuple[list[dict], list[tuple[int, str]]]:
    """(records with a running "x", [(x where a stage begins, its name)]); of one stage too."""
    own = folder / "metrics.jsonl"
    records, stages = [], []
    for file in [own] if own.exists() else sorted(folder.glob("stage?/metrics.jsonl")):
        stages.append((len(records), file.parent.name))
        rows = finished_records(file, cut=False)  # a run may still be at it
        records += [row | {"x": x} for x, row in enumerate(rows, len(records))]
    if not records:
        raise InputError(f"{folder}: no metrics.jsonl there nor in a stage; give a run, runs/NAME")
    return records, stages


def series(records: list[dict], wanted: tuple[str, ...]) -> dict[str, tuple[list, list]]:
    """label -> (x, y). A step without the metric (a kind not trained on) is a gap and no zero."""
    prefixes = tuple(want for want in wanted if want.endswith("/"))
    curves = {}
    for name in sorted({name for record in records for name in record}):
        if name in wanted or name.startswith(prefixes):
            measured = [record for record in records if name in record]
            curves[name.split("/")[-1]] = [r["x"] for r in measured], [r[name] for r in measured]
    return curves


def filled_panels(records: list[dict]) -> dict[str, dict]:
    """title -> curves, of the panels that this run has numbers for: only PPO has a critic."""
    found = {title: series(records, wanted) for title, wanted in PANELS}
    return {title: curves for title, curves in found.items() if curves}


def smooth(values: list[float], window: int = 5) -> list[float]:
    """Mean of the last `window` values. smooth([0, 1, 2], 2) = [0, 0.5, 1.5]."""
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def load_pyplot():
    try:
        import matplotlib  # an optional extra
    except ImportError:
        raise InputError("pictures need matplotlib: install the extra `plot`") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # only behind the choice of its backend

    return pyplot


def draw(folder: Path, png: Path) -> None:
    pyplot = load_pyplot()
    records, stages = read_run(folder)
    panels = filled_panels(records)
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    size = {"figsize": (16, 3.5 * rows), "constrained_layout": True, "squeeze": False}
    figure, axes = pyplot.subplots(rows, COLUMNS, **size)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, title in zip(axes.flat, panels, strict=False):  # more places than panels
        draw_panel(axis, title, panels[title], stages)
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def draw_panel(axis, title: str, curves: dict, stages: list[tuple[int, str]]) -> None:
    for label, (x, y) in curves.items():
        shown = label.replace("_", " ")
        (line,) = axis.plot(x, smooth(y), label=shown, linewidth=2.4 if label == "reward" else 1.5)
        axis.plot(x, y, color=line.get_color(), alpha=0.2, linewidth=0.8)  # as measured
    above = {"transform": axis.get_xaxis_transform(), "va": "bottom"}
    for x, name in stages:
        axis.axvline(x, color="0.6", linestyle="--", linewidth=0.8)
        axis.text(x, 1.0, f" {name}", fontsize=8, color="0.4", **above)
    axis.set_title(title, fontsize=11, pad=14)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def main() -> None:
    parser = FlagParser(description="Draw a run's curves.")
    parser.add_argument("run", type=Path, help="runs/NAME, or one stage of it")
    parser.add_argument("--png", action="store_true", help="one picture (the only view there is)")
    parser.add_argument("--out", type=Path, help="default: curves.png in the run's folder")
    arguments = parser.parse_args()
    png = arguments.out or arguments.run / "curves.png"
    check_output(png, "--out")
    draw(arguments.run, png)
    print(f"written: {png}")


if __name__ == "__main__":
    run_main(main)
