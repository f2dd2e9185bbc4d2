"""Shows a run as a page: its curves, one question at three moments, each trajectory token by token.

    python view.py                          the newest run under runs/
    python view.py runs/ur2-world0-seed0    a page, view/index.html in that folder
    python view.py runs/A runs/B            both runs compared, in the folder runs/A-B

A sampled token with advantage A and weight w (Σ w = 1 over an update) has the following loss, where
k is the estimate of the KL (0 if the loss has no KL term):

    r = exp(new − old)      loss = w · (kl_coef · k − min(r A, clip(r, 1 − ε_low, 1 + ε_high) A))

viewer/page.js computes it (`lossOf`). Tokens that the environment wrote have no loss; if
`mask_documents` is False they have one, which is not shown. The page opens from disk: its data are
classic scripts, which a browser also loads from file://. To see it from another machine, run
`python -m http.server --bind 127.0.0.1 --directory runs/NAME/view 8000` and forward the port.

    data/index.js             runs(...): settings, metrics and saved steps of each stage
    data/0-stage1-7.js        step(key, rows, groups) of step 7 of run 0: `rows` has a summary of
                              each trajectory, `groups` the whole trajectories of each group as a
                              JSON string, which the page parses when the group is opened

Left out: the weight that --mismatch puts on the minimum (ppo.mismatch_weights), what the optimizer
does with the gradient, and checkpoints.
"""

import itertools
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

from errors import FlagParser, InputError, run_main
from formats.records import finished_records
from formats.trajectories import read_trajectories

VIEWER = Path(__file__).resolve().parent / "viewer"
# The settings that the page shows, and those of the loss formula.
ABOUT = """
clip_low clip_high kl_coef kl_estimator recipe variant algorithm reward model toy_init data
corpus world_seed seed lr questions_per_step group_size retriever documents_per_search
""".split()
LISTED = ("row", "question", "kind", "answer", "correct", "rewards", "stop_reason")
# What the page needs to choose one question at three moments.
MOMENT = itemgetter("correct", "searches", "group", "row")


def write_page(runs: list[Path], out: Path) -> None:
    """Writes a folder with a page that opens from disk, without a network."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    for file in VIEWER.iterdir():
        shutil.copy(file, out)
    data = []
    for number, run in enumerate(runs):  # two runs may have the same name
        stages = [write_stage(folder, f"{number}-{folder.name}", out) for folder in stages_of(run)]
        data.append({"name": run.resolve().name, "stages": stages})
    write_script(out, "index", "runs", data, metric_sentences())


def write_script(out: Path, name: str, function: str, *arguments) -> None:
    """Writes a script that calls a function of page.js."""
    call = f"{function}({','.join(map(dumped, arguments))});\n"
    (out / "data" / f"{name}.js").write_text(call, encoding="utf-8")


def dumped(value: object) -> str:
    """Returns ASCII JSON that is safe within a script: it contains no tag and no line end. NaN and
    Infinity become strings, which page.js reads as numbers.
    """
    text = json.dumps(value, separators=(",", ":"))
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=str))
    return text.replace("<", "\\u003c")


def metric_sentences() -> dict[str, str]:
    """Returns {metric: its meaning in docs/metrics.md}, which the page shows as tooltips."""
    page = (VIEWER.parent / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (.*`) \| (.+) \|", page)
    return {name: text for names, text in rows for name in re.findall("`([^`]+)`", names)}


def stages_of(run: Path) -> list[Path]:
    """Returns the folders of a run's stages, or only `run` if it is the folder of one stage."""
    stages = [run] if (run / "metrics.jsonl").exists() else sorted(run.glob("stage?"))
    if not stages:
        raise InputError(f"{run}: no metrics.jsonl in it or in a stage: give a run, as runs/NAME")
    return stages


# ------------------------------------------------------------------------------------------ a stage
def write_stage(folder: Path, key: str, out: Path) -> dict:
    """Writes the scripts of a stage's steps; returns the stage's part of index.js."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    steps = []
    asked = defaultdict(dict)  # question -> {step: MOMENT}
    for step, records in itertools.groupby(read_trajectories(folder), itemgetter("step")):
        rows, groups = of_step(records)
        write_script(out, f"{key}-{step}", "step", f"{key}-{step}", rows, groups)
        steps.append(step)
        for _, group in itertools.groupby(rows, itemgetter("group")):
            answers = sorted(group, key=itemgetter("reward"))
            middle = answers[len(answers) // 2]
            asked[middle["question"]][step] = MOMENT(middle)
    return {
        "key": key,
        "name": folder.name,
        "settings": {name: settings[name] for name in ABOUT if name in settings},
        "metrics": finished_records(folder / "metrics.jsonl"),
        "steps": steps,
        "asked": asked,
    }


def of_step(records: Iterable[dict]) -> tuple[list[dict], list[str]]:
    """Returns a summary of each trajectory, and for each group its trajectories as JSON."""
    groups = [list(group) for _, group in itertools.groupby(records, itemgetter("group"))]
    rows = [summary(t) | {"group": n} for n, group in enumerate(groups) for t in group]
    return rows, [dumped(group) for group in groups]


def summary(record: dict) -> dict:
    """Returns the fields of one trajectory that the list of groups and its filters use."""
    searches = record["searches"]
    rewards = record["rewards"]
    queries = {" ".join(search["query"].lower().split()) for search in searches}
    row = {name: record[name] for name in LISTED}
    row |= {"searches": len(searches), "repeated": len(queries) < len(searches)}
    row["fallback"] = any(search["fallback"] for search in searches)
    row["fault"] = bool(record["rejected_queries"]) or rewards.get("format", 0) < 0
    return row | {
        "golds": " | ".join(record["golds"]),
        "reward": round(sum(rewards.values()), 4),
        "trained": "advantages" in record,
    }


# -------------------------------------------------------------------------------- the command line
def main(arguments: list[str] | None = None) -> None:
    parser = FlagParser("view.py", description="Shows a run as a page, or compares several runs.")
    text = "runs/NAME, or one of its stages; default: the newest run"
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=text)
    runs = parser.parse_args(arguments).runs
    if not runs:
        files = sorted(Path("runs").glob("*/stage?/metrics.jsonl"), key=os.path.getmtime)
        if not files:
            raise InputError("there is no run in runs/: name one, or train one with train.py")
        runs = [files[-1].parent.parent]
    out = runs[0] / "view"
    if len(runs) > 1:
        out = runs[0].resolve().parent / "-".join(run.resolve().name for run in runs)
    write_page(runs, out)
    print(f"open in a browser: {(out / 'index.html').resolve()}")


if __name__ == "__main__":
    run_main(main)
