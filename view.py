"""See a run: its curves as one picture.

    python view.py --png runs/ur2-world0-seed0      all stages of a run, one after the other ->
    curves.png in that folder

A panel each, as a running mean over five steps with the values as measured behind it: reward and
its components; exact match by kind of question; share of questions that were searched for, by kind;
searches and fallbacks; tokens; what says whether anything can be learned (gradient norm, groups of
equal reward, DAPO's informative ones); PPO's critic. What a run has no numbers of gets no panel. A
dashed line marks where a stage begins. Needs the extra `plot` (matplotlib). Left out: a page of
trajectories (samples.txt has them as text), live curves.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from errors import FlagParser, InputError, run_main

# Panels: (title, metrics or "prefix/" for all metrics under it)
PANELS = (
    ("reward", ("reward", "reward/")),
    ("exact match", ("em/",)),
    ("share of questions searched for", ("searched/",)),
    ("searches per question, fallbacks per search", ("searches", "fallbacks", "refused")),
    ("tokens per trajectory", ("model_tokens", "inserted_tokens")),
    (
        "can it learn?",
        ("grad_norm", "frac_reward_zero_std", "informative", "clip_fraction", "entropy"),
    ),
    ("does the critic foresee the reward?", ("explained_variance", "value_loss")),
)
COLUMNS = 3


def read_metrics(path: Path) -> list[dict]:
    """The lines of one metrics.jsonl; an unfinished last line (a run that was killed) is left
    out.
    """
    records = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise InputError(f"{path}, line {number}: not JSON; remove the line") from None
    return records


def read_run(folder: Path) -> tuple[list[dict], list[tuple[int, str]]]:
    """(records with a running "x", [(x where a stage begins, its name)]) of a run's folder or of
    one stage's.
    """
    files = (
        [folder / "metrics.jsonl"]
        if (folder / "metrics.jsonl").exists()
        else sorted(folder.glob("stage?/metrics.jsonl"))
    )
    records, stages = [], []
    for file in files:
        stages.append((len(records), file.parent.name))
        records += [
            {**record, "x": len(records) + i} for i, record in enumerate(read_metrics(file))
        ]
    if not records:
        raise InputError(
            f"{folder}: no metrics.jsonl there nor under its stages; give the folder of a run, such"
            " as runs/NAME"
        )
    return records, stages


def series(
    records: list[dict], wanted: tuple[str, ...]
) -> dict[str, tuple[list[int], list[float]]]:
    """label -> (x, y). A metric that some steps lack (a kind that a stage does not train on) has
    gaps, not zeros.
    """
    names = [
        name
        for name in sorted({name for record in records for name in record})
        if any(name == want or (want.endswith("/") and name.startswith(want)) for want in wanted)
    ]
    return {
        name.split("/")[-1] if name.split("/")[0] in ("em", "searched") else name: (
            [r["x"] for r in records if name in r],
            [r[name] for r in records if name in r],
        )
        for name in names
    }


def filled_panels(records: list[dict]) -> dict[str, dict]:
    """title -> curves, of the panels that this run has numbers for: only PPO has a critic."""
    found = {title: series(records, wanted) for title, wanted in PANELS}
    return {title: curves for title, curves in found.items() if curves}


def smooth(values: list[float], window: int = 5) -> list[float]:
    """Mean of the last `window` values: a step has few questions of a kind. smooth([0, 1, 2], 2) =
    [0, 0.5, 1.5].
    """
    return [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i + 1 - window) : i + 1])
    ]


def draw(folder: Path, png: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise InputError(
            "view.py --png needs matplotlib: pip install matplotlib (the extra `plot`)"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records, stages = read_run(folder)
    panels = filled_panels(records)
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    figure, axes = pyplot.subplots(
        rows, COLUMNS, figsize=(16, 3.5 * rows), constrained_layout=True, squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, curves) in zip(
        axes.flat, panels.items(), strict=False
    ):  # more places than panels
        for label, (x, y) in curves.items():
            width = 2.4 if label == "reward" else 1.5
            (line,) = axis.plot(
                x, smooth(y), label=label.replace("reward/", "").replace("_", " "), linewidth=width
            )
            axis.plot(
                x, y, color=line.get_color(), alpha=0.2, linewidth=0.8
            )  # as measured, behind the running mean
        for x, name in stages:
            axis.axvline(x, color="0.6", linestyle="--", linewidth=0.8)
            axis.text(
                x,
                1.0,
                f" {name}",
                transform=axis.get_xaxis_transform(),
                va="bottom",
                fontsize=8,
                color="0.4",
            )
        axis.set_title(title, fontsize=11, pad=14)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = FlagParser(description="Draw a run's curves.")
    parser.add_argument("run", type=Path, help="runs/NAME, or one stage of it")
    parser.add_argument(
        "--png", action="store_true", help="draw one picture (the only view there is)"
    )
    parser.add_argument("--out", type=Path, help="default: curves.png in the run's folder")
    arguments = parser.parse_args()
    png = arguments.out or arguments.run / "curves.png"
    draw(arguments.run, png)
    print(f"written: {png}")


if __name__ == "__main__":
    run_main(main)
