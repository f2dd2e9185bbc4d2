"""The data of the page that view.py writes: classic scripts, since file:// blocks all others.

    data/index.js             runs(...): settings, metrics and kept steps of each stage
    data/RUN-STAGE-STEP.js    step(key, rows, groups): a line on each trajectory, and of each group
                              its trajectories as one JSON string, parsed when somebody looks

The page itself is viewer/: index.html, page.css, page.js. Left out: what is no trajectory.
"""

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from errors import InputError
from formats.records import finished_records
from formats.trajectories import NAME, read_trajectories

VIEWER = Path(__file__).resolve().parent.parent / "viewer"
SETTINGS = """
recipe variant stage algorithm reward group_size clip_low clip_high kl_coef kl_estimator
loss_aggregation lr temperature model data retriever
""".split()  # that the page shows, or computes with


def write_page(runs: list[Path], out: Path) -> None:
    """A folder that opens from disk, without a network."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    for file in VIEWER.iterdir():
        shutil.copy(file, out)
    told = [told_run(run, name, out) for run, name in zip(runs, names_of(runs), strict=True)]
    (out / "data" / "index.js").write_text(f"runs({dumped(told)});\n", encoding="utf-8")


def save_page(records: list[dict], out: Path) -> None:
    """What was asked in a session, as one file."""
    stage = {"key": "asked", "name": "asked", "settings": {}, "metrics": [], "asked": {}}
    told = [{"name": "a session", "stages": [stage | {"missing": [], "steps": [0]}]}]
    rows, groups = of_step(records)
    data = f"step('asked-0',{dumped(rows)},{dumped(groups)});\nruns({dumped(told)});"
    html = (VIEWER / "index.html").read_text(encoding="utf-8")
    css, code = ((VIEWER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    parts = {
        '<link rel="stylesheet" href="page.css">': f"<style>\n{css}</style>",
        '<script src="page.js"></script>': f"<script>\n{code}</script>",
        '<script src="data/index.js"></script>': f"<script>\n{data}</script>",
    }
    for linked, inline in parts.items():
        html = html.replace(linked, inline)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html, encoding="utf-8")


def names_of(runs: list[Path]) -> list[str]:
    """Their folders' names; of two alike with the folder above."""
    names = [run.resolve().name for run in runs]
    return [
        name if names.count(name) == 1 else f"{run.resolve().parent.name}-{name}"
        for run, name in zip(runs, names, strict=True)
    ]


def stages_of(run: Path) -> list[Path]:
    """A run's stages, or the one that was named."""
    return [run] if (run / "metrics.jsonl").exists() else sorted(run.glob("stage?"))


def told_run(run: Path, name: str, out: Path) -> dict:
    return {"name": name, "stages": [told_stage(f, name, out) for f in stages_of(run)]}


def told_stage(folder: Path, name: str, out: Path) -> dict:
    """What index.js says of it; "missing" is what could not be read."""
    key, settings, missing = f"{name}-{folder.name}", {}, []
    try:
        settings = dict(json.loads((folder / "settings.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        missing.append("settings.json cannot be read: there are no formulas")
    steps, asked = [], defaultdict(list)
    try:
        for step, some in itertools.groupby(records_in(folder), key=lambda row: row["step"]):
            rows = write_step(f"{key}-{step}", some, out / "data")
            steps.append(step)
            for question in {row["question"] for row in rows}:
                asked[question].append(step)
    except InputError as error:
        missing.append(str(error))
    except (KeyError, TypeError, AttributeError) as error:
        missing.append(f"{NAME} was written by another version, or is damaged ({error!r})")
    return {
        "key": key,
        "name": folder.name,
        "settings": {field: settings.get(field) for field in SETTINGS},
        "metrics": finished_records(folder / "metrics.jsonl", cut=False, needs="step"),
        "steps": steps,
        "asked": {question: its for question, its in asked.items() if len(its) > 1},
        "missing": missing,
    }


def records_in(folder: Path) -> Iterable[dict]:
    return read_trajectories(folder) if (folder / NAME).exists() else ()


def write_step(key: str, records: Iterable[dict], out: Path) -> list[dict]:
    """Its script; returns a line on each trajectory."""
    rows, groups = of_step(records)
    script = f"step({dumped(key)},{dumped(rows)},{dumped(groups)});\n"
    (out / f"{key}.js").write_text(script, encoding="utf-8")
    return rows


def of_step(records: Iterable[dict]) -> tuple[list[dict], list[str]]:
    """(a line on each trajectory, of each group its trajectories)."""
    rows, groups = [], []
    for _, some in itertools.groupby(records, key=lambda record: record["group"]):
        some = list(some)
        rows += [line_on(record) | {"group": len(groups)} for record in some]
        groups.append(dumped([slim(record) for record in some]))
    return rows, groups


def slim(record: dict) -> dict:
    """Without what the page does not show, or can tell from the rest."""
    left = {key: value for key, value in record.items() if key != "prompt_ids"}
    if left.get("old") == left.get("sampled"):
        left.pop("old", None)
    return left | {"prompt": "".join(record["prompt"])}


def line_on(record: dict) -> dict:
    """What the list of groups and its filters show of one trajectory."""
    queries = [" ".join(search["query"].lower().split()) for search in record["searches"]]
    return {
        "row": record["row"],
        "question": record["question"],
        "golds": record["golds"],
        "kind": record["kind"],
        "answer": record["answer"],
        "correct": record["correct"],
        "reward": round(sum(record["rewards"].values()), 4),
        "rewards": record["rewards"],
        "searches": len(queries),
        "fallback": any(search["fallback"] for search in record["searches"]),
        "repeated": len(set(queries)) < len(queries),
        "fault": bool(record["refusals"]) or record["rewards"].get("format", 0) < 0,
        "stop": record["stop_reason"],
        "length": sum(record["mask"]),
        "trained": "advantages" in record,
    }


def dumped(value: object) -> str:
    """JSON that may stand in a script: no tag ends it, no line ends in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for odd, escaped in (("<", "\\u003c"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029")):
        text = text.replace(odd, escaped)
    return text.encode(errors="replace").decode()
