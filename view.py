"""Shows a run: each trajectory token by token, with rewards, advantages and losses.

    python view.py                                  the newest run under runs/
    python view.py runs/ur2-world0-seed0            a page, view/index.html in that folder
    python view.py A B                              both runs, in a folder A-B beside A
    python view.py RUN --text --step 3 --group 1    one group in the terminal
    python view.py RUN --png                        its curves as one picture (extra `plot`)

A sampled token with advantage A and weight w (Σ w = 1 over an update) has the following loss, where
k is the estimate of the KL (0 if the loss has no KL term):

    r = exp(new − old)      loss = w · (kl_coef · k − min(r A, clip(r, 1 − ε_low, 1 + ε_high) A))

Tokens that the environment wrote have no loss; if --mask_documents is False they have one, which is
not shown. In the picture, a pale line shows the measured values, and the strong line of the same
color their running mean over five steps. Left out: the weight that --mismatch puts on the minimum
(ppo.mismatch_weights), and what the optimizer does with the gradient.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from data import harmless
from errors import FlagParser, InputError, check_output, run_main
from formats.records import finished_records
from plumbing.page import names_of, read_settings, readable_records, stages_of, write_page

LEARNING = ("grad_norm", "frac_reward_zero_std", "informative", "clip_fraction", "entropy_mc")
# (title, its metrics); "prefix/" stands for all metrics whose names begin with it
PANELS = (
    ("reward", ("reward", "reward/")),
    ("exact match", ("em/",)),
    ("share of questions searched for", ("searched/",)),
    ("searches per question, fallbacks per search", ("searches", "fallbacks", "rejected")),
    ("tokens per trajectory", ("model_tokens", "inserted_tokens")),
    ("can it learn?", LEARNING),
    ("KL to the reference, by estimator", ("k1", "k2", "k3", "k_abs")),
    ("does the critic foresee the reward?", ("explained_variance", "value_loss")),
)
COLUMNS = 3


def read_run(folder: Path) -> tuple[list[dict], list[tuple[int, str]]]:
    """Returns the records of all steps, and for each stage the pair (x of its first step, name).
    The field "x" of a record counts the steps of all stages from 0. `folder` is the folder of a run
    or of a single stage.
    """
    records = []
    stages = []
    for stage in stages_of(folder):
        stages.append((len(records), stage.name))
        # An incomplete last line stays in the file, because a run may still be writing it.
        for row in finished_records(stage / "metrics.jsonl", cut=False, needs="step"):
            numbers = {
                k: v for k, v in row.items() if isinstance(v, int | float) and abs(v) < 1e300
            }
            records.append(numbers | {"x": len(records)})
    if not records:
        raise InputError(f"{folder}: no step is finished there: wait for the first one")
    return records, stages


def series(records: list[dict], wanted: tuple[str, ...]) -> dict[str, tuple[list, list]]:
    """Returns {label: (x, y)}. A step without the metric has no point: em/two_hop, for example, is
    missing if the step had no such question.
    """
    prefixes = tuple(want for want in wanted if want.endswith("/"))
    curves = {}
    for name in sorted({name for record in records for name in record}):
        if name in wanted or name.startswith(prefixes):
            measured = [record for record in records if name in record]
            curves[name.split("/")[-1]] = [r["x"] for r in measured], [r[name] for r in measured]
    return curves


def filled_panels(records: list[dict]) -> dict[str, dict]:
    """Returns {title: curves} of the panels that have data in this run. The critic's panel, for
    example, has data only under PPO.
    """
    return {title: curves for title, wanted in PANELS if (curves := series(records, wanted))}


def smooth(values: list[float], window: int = 5) -> list[float]:
    """Returns running means of up to `window` values. smooth([0, 1, 2], 2) = [0, 0.5, 1.5]."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def load_pyplot():
    try:
        import matplotlib  # an optional extra
    except ImportError:
        raise InputError("pictures need matplotlib: install the extra `plot`") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # after its backend was chosen

    return pyplot


def draw(folder: Path, png: Path) -> None:
    records, stages = read_run(folder)
    draw_panels(filled_panels(records), stages, png)


def draw_panels(panels: dict[str, dict], stages: list[tuple[int, str]], png: Path, says="") -> None:
    """Draws {title: curves}; `says` is a line above all panels."""
    pyplot = load_pyplot()
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    figure = pyplot.figure(figsize=(16, 3.5 * rows), layout="constrained")
    figure.suptitle(says)
    for place, (title, curves) in enumerate(panels.items(), 1):
        draw_panel(figure.add_subplot(rows, COLUMNS, place), title, curves, stages)
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def draw_panel(axis, title: str, curves: dict, stages: list[tuple[int, str]]) -> None:
    for label, (x, y) in curves.items():
        shown = harmless(label.replace("_", " ")).replace("$", r"\$")
        (line,) = axis.plot(x, smooth(y), label=shown, linewidth=2.4 if label == "reward" else 1.5)
        axis.plot(x, y, color=line.get_color(), alpha=0.2, linewidth=0.8)  # as measured
    above = axis.get_xaxis_transform()
    for x, name in stages:
        axis.axvline(x, color="0.6", linestyle="--", linewidth=0.8)
        axis.text(x, 1.0, f" {name}", fontsize=8, color="0.4", transform=above, va="bottom")
    axis.set_title(title, fontsize=11, pad=14)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


# ---------------------------------------------------------------------------------- in the terminal
def loss_of(record: dict, n: int, settings: dict) -> dict[str, float] | None:
    """Returns the numbers that the table shows for token n; the formula of "loss" is at the top of
    this file. Returns None if the environment wrote the token, or if no update used it. Without
    settings there is no "loss".

    Worked: new −0.5 and old −0.6 give r = e^0.1 = 1.105. With A = 2, w = 0.01, ε = 0.2 and no KL,
    the loss is −0.01 · 1.105 · 2 = −0.0221.
    """
    sampled, old, new, ref, advantage, weight = (
        value_of(record, name, n)
        for name in ("sampled", "old", "new", "ref", "advantages", "weights")
    )
    if None in (old, new, advantage, weight) or not record["mask"][n]:
        return None
    ratio = exp(new - old)
    terms = {
        "sampled": sampled,
        "old": old,
        "new": new,
        "ratio": ratio,
        "advantage": advantage,
        "weight": weight,
    }
    if not settings:
        return terms
    clipped = min(max(ratio, 1 - settings["clip_low"]), 1 + settings["clip_high"])
    surrogate = min(ratio * advantage, clipped * advantage)
    kl = 0.0
    # Only k2 and k3 are in the loss: k1 is in the reward, and with "log" the KL is only logged.
    if ref is not None and settings["kl_coef"] and settings["kl_estimator"] in ("k2", "k3"):
        gap = ref - new
        k2 = ratio * gap * gap / 2  # times r, as in kl.k2_off_policy
        kl = k2 if settings["kl_estimator"] == "k2" else exp(gap) - gap - 1
    return terms | {"loss": weight * (settings["kl_coef"] * kl - surrogate)}


def exp(x: float) -> float:
    """Returns e^x, or infinity if e^x is too large for a float, as torch does."""
    return math.inf if x > 709.78 else math.exp(x)


def value_of(record: dict, name: str, n: int) -> float | None:
    """Returns the value for token n. The record may have a list with a value for each token, or one
    number for all sampled tokens.
    """
    numbers = record.get(name)
    return numbers[n] if isinstance(numbers, list) else numbers


def shown_trajectory(record: dict, settings: dict) -> Iterator[str]:
    """Yields a blank line, the answer with its verdict and reward terms, and a table of tokens."""
    terms = " ".join(f"{name} {value:+.2f}" for name, value in record["rewards"].items())
    verdict = "right" if record["correct"] else "wrong"
    reward = sum(record["rewards"].values())
    yield ""
    yield f"sample {record['row']}: {record['answer']!r} {verdict}, {reward:+.2f} = {terms}"
    columns = ("sampled", "old", "new", "ratio", "advantage", "weight", "loss")
    yield f"{'token':24}mask" + "".join(f"{name:>11}" for name in columns)
    length = max(len(record[name]) for name in ("ids", "tokens", "mask"))
    for mask, run in itertools.groupby(range(length), record["mask"].__getitem__):
        some = list(run)
        if not mask:
            text = "".join(record["tokens"][n] for n in some)
            yield f"   0 · {len(some)} tokens that the environment wrote: {text!r}"
            continue
        for n in some:
            loss = loss_of(record, n, settings) or {}
            cells = [f"{loss[name]:11.4g}" if name in loss else f"{'-':>11}" for name in columns]
            yield f"{record['tokens'][n]!r:24}{mask:4}" + "".join(cells)


def print_group(folder: Path, step: int | None, group: int) -> None:
    """Prints one group of trajectories of a stage. If `step` is None, it is the last saved step."""
    missing = []
    settings = read_settings(folder, missing)
    some = [r for r in readable_records(folder, missing) if step in (None, r["step"])]
    if not some:
        wanted = "no step" if step is None else f"no step {step}"
        raise InputError("; ".join([f"{folder}: {wanted} is saved there", *missing]))
    some = [r for r in some if r["step"] == some[-1]["step"]]
    groups = [list(rows) for _, rows in itertools.groupby(some, itemgetter("group"))]
    if group not in range(len(groups)):
        raise InputError(
            f"{folder}: the step has {len(groups)} saved groups, which --group counts from 0: no "
            f"--group {group}"
        )
    first = groups[group][0]
    lines = [
        *missing,
        f"{folder.name}, step {first['step']}, group {first['group']}: {first['question']}",
        f"gold {' | '.join(first['golds'])}; {len(groups)} groups are saved",
    ]
    for record in groups[group]:
        try:
            lines += shown_trajectory(record, settings)
        except Exception as error:  # the lines before the damage are shown
            lines.append(
                "the rest of this sample is damaged, because tokens, mask and numbers do not fit "
                f"together: {error!r}"
            )
    print(*map(harmless, lines), sep="\n")


# ----------------------------------------------------------------------------------------- the page
def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = FlagParser("view.py", description="Show a run.")
    flag = parser.add_argument
    flag(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="runs/NAME or a stage; default: the newest",
    )
    flag("--out", type=Path, help="folder of the page (of one run: RUN/view), or the file of --png")
    flag("--png", action="store_true", help="draw the curves of one run as a picture")
    flag("--text", action="store_true", help="print one group of trajectories")
    flag("--step", type=int, help="step that --text prints (default: the last)")
    flag("--group", type=int, default=0, help="index of the saved group that --text prints")
    asked = parser.parse_args(arguments)
    if len(asked.runs) > 1 and (asked.png or asked.text):
        raise InputError("--png and --text show one run: the page shows several")
    return asked


def newest_run(folder: Path) -> Path:
    """Returns the run in `folder` whose metrics were written last."""
    files = folder.glob("*/stage?/metrics.jsonl")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if not newest:
        raise InputError(f"{folder}: there is no run: name one, or train one with train.py")
    return newest.parent.parent


def main(arguments: list[str] | None = None) -> None:
    asked = parse(arguments)
    runs = asked.runs or [newest_run(Path("runs"))]
    run = runs[0]
    if asked.text:
        return print_group(stages_of(run)[-1], asked.step, asked.group)
    if asked.png:
        out = file = asked.out or run / "curves.png"
    else:
        several = run.resolve().parent / "-".join(names_of(runs))
        out = asked.out or (run / "view" if len(runs) == 1 else several)
        file = out / "index.html"
    check_output(file, "--out")
    if asked.png:
        draw(run, out)
    else:
        write_page(runs, out)
    print(f"written: {file.resolve()}")
    if not asked.png:
        print(
            "open that file in a browser; if it is on a remote machine, copy the folder, or run "
            "there\n"
            f"  python -m http.server --bind 127.0.0.1 --directory {out.resolve()} 8000\n"
            "and on your machine  ssh -L 8000:127.0.0.1:8000 HOST, then http://127.0.0.1:8000"
        )


if __name__ == "__main__":
    run_main(main)
