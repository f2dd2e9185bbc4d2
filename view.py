"""Shows a run as a page: its curves, one question at three moments, each trajectory token by token.

    python view.py                          the newest run under runs/
    python view.py runs/ur2-world0-seed0    a page, view/index.html in that folder

A sampled token with advantage A and weight w (Σ w = 1 over an update) has the following loss, where
k is the estimate of the KL (0 if the loss has no KL term):

    r = exp(new − old)      loss = w · (kl_coef · k − min(r A, clip(r, 1 − ε_low, 1 + ε_high) A))

viewer/page.js computes it (`lossOf`). Tokens that the environment wrote have no loss; if
`mask_documents` is False they have one, which is not shown. The page opens from disk: its data are
classic scripts, which a browser also loads from file://. To see it from another machine, run
`python -m http.server --bind 127.0.0.1 --directory runs/NAME/view 8000` and forward the port.

    data/index.js             show(...): settings, metrics and saved steps of each stage
    data/stage1-7.js          step(...): the trajectories of step 7, as they are in
                              trajectories.jsonl.gz (formats/trajectories.py)

Left out: the weight that --mismatch puts on the minimum (ppo.mismatch_weights), what the optimizer
does with the gradient, and checkpoints.
"""

import itertools
import json
import os
import shutil
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

from errors import FlagParser, InputError, run_main
from formats.records import finished_records
from formats.trajectories import read_trajectories

VIEWER = Path(__file__).resolve().parent / "viewer"


def write_page(run: Path, out: Path) -> None:
    """Writes a folder with a page that opens from disk, without a network."""
    shutil.copytree(VIEWER, out, dirs_exist_ok=True)
    (out / "data").mkdir(exist_ok=True)
    stages = [write_stage(folder, out) for folder in stages_of(run)]
    write_script(out, "index", "show", {"name": run.resolve().name, "stages": stages})


def write_script(out: Path, name: str, function: str, *arguments) -> None:
    """Writes a script that calls a function of page.js. Python writes NaN and Infinity as
    JavaScript reads them.
    """
    values = ",".join(json.dumps(argument, separators=(",", ":")) for argument in arguments)
    (out / "data" / f"{name}.js").write_text(f"{function}({values});\n", encoding="utf-8")


def stages_of(run: Path) -> list[Path]:
    """Returns the folders of a run's stages, or only `run` if it is the folder of one stage."""
    stages = [run] if (run / "metrics.jsonl").exists() else sorted(run.glob("stage?"))
    if not stages:
        raise InputError(f"{run}: no metrics.jsonl in it or in a stage: give a run, as runs/NAME")
    return stages


# ------------------------------------------------------------------------------------------ a stage
def write_stage(folder: Path, out: Path) -> dict:
    """Writes the scripts of a stage's steps; returns the stage's part of index.js."""
    steps = []
    asked = defaultdict(dict)  # question -> {step: moment}
    for step, records in itertools.groupby(read_trajectories(folder), itemgetter("step")):
        rows = list(records)
        key = f"{folder.name}-{step}"
        write_script(out, key, "step", key, rows)
        steps.append(step)
        for _, group in itertools.groupby(rows, itemgetter("group")):
            question, moment = moment_of(list(group))
            asked[question][step] = moment
    return {
        "name": folder.name,
        "settings": json.loads((folder / "settings.json").read_text(encoding="utf-8")),
        "metrics": finished_records(folder / "metrics.jsonl"),
        "steps": steps,
        "asked": asked,
    }


def moment_of(group: list[dict]) -> tuple[str, list]:
    """Returns the question of a group, and what the page needs to choose one question at three
    moments: whether the middle trajectory by reward is right, its searches, its group and row.
    """
    group.sort(key=lambda record: sum(record["rewards"].values()))
    middle = group[len(group) // 2]
    return middle["question"], [
        middle["correct"],
        len(middle["searches"]),
        middle["group"],
        middle["row"],
    ]


# -------------------------------------------------------------------------------- the command line
def main(arguments: list[str] | None = None) -> None:
    parser = FlagParser("view.py", description="Shows a run as a page.")
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="runs/NAME, or one of its stages; default: the newest run",
    )
    run = parser.parse_args(arguments).run
    if not run:
        files = sorted(Path("runs").glob("*/stage?/metrics.jsonl"), key=os.path.getmtime)
        if not files:
            raise InputError("there is no run in runs/: name one, or train one with train.py")
        run = files[-1].parent.parent
    write_page(run, run / "view")
    print(f"open in a browser: {(run / 'view' / 'index.html').resolve()}")


if __name__ == "__main__":
    run_main(main)
