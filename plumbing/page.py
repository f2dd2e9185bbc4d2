"""Writes the data of view.py's page as classic scripts, because file:// blocks all others.

    data/index.js             runs(...): settings, metrics and kept steps of each stage
    data/RUN-STAGE-STEP.js    step(key, rows, groups): a line on each trajectory, and of each group
                              its trajectories as one JSON string, parsed when somebody looks

The page itself is viewer/: index.html, page.css, page.js. Left out: what is no trajectory.
A damaged file is shown as far as it can be read, and "missing" says what is not shown.
"""

import itertools
import json
import re
import secrets
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from errors import InputError, check_output
from formats.records import finished_records, write_text, writing
from formats.trajectories import NAME, read_trajectories

VIEWER = Path(__file__).resolve().parent.parent / "viewer"
GENERATOR = b'<meta name="generator" content="search-rl">'  # index.html has it: the file is ours
PAGE = ("index.html", "page.css", "page.js")
FORMULA = ("clip_low", "clip_high", "kl_coef", "kl_estimator")  # a token's loss depends on these
ABOUT = (*FORMULA, *"recipe algorithm model data corpus world_seed".split())
LISTED = ("row", "question", "kind", "answer", "correct", "rewards", "stop_reason")


def check_ours(page: Path) -> None:
    """Raises an InputError if another page, or anything else, has this file's name."""
    if page.exists() and not (page.is_file() and GENERATOR in page.read_bytes()):
        raise InputError(f"{page}: that file is not a saved page, and is kept: name another")


def write_page(runs: list[Path], out: Path) -> None:
    """Writes a folder with a page that opens from disk, without a network."""
    check_ours(out / "index.html")
    stages = [stages_of(run) for run in runs]
    (out / "data").mkdir(parents=True, exist_ok=True)
    for file in VIEWER.iterdir():
        shutil.copy(file, out)
    data = [
        {"name": name, "stages": [write_stage(folder, name, out) for folder in folders]}
        for name, folders in zip(names_of(runs), stages, strict=True)
    ]
    (out / "data" / "index.js").write_text(
        f"runs({dumped(data)},{dumped(metric_sentences())});\n", encoding="utf-8"
    )


def metric_sentences() -> dict[str, str]:
    """Returns the sentence on each metric in docs/metrics.md, which the page shows as a tooltip."""
    page = (VIEWER.parent / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (.*`) \| (.+) \|", page)
    return {name: text for names, text in rows for name in re.findall("`([^`]+)`", names)}


def save_page(records: list[dict], out: Path) -> None:
    """Writes the questions and answers of a session as one file."""
    with writing(out):
        check_output(out, "/save")
        check_ours(out)
        out.parent.mkdir(parents=True, exist_ok=True)
    stage = {
        "key": "asked",
        "name": "asked",
        "settings": {},
        "metrics": [],
        "steps": [0],
        "missing": [],
        "asked": {},
    }
    session = [{"name": "a session", "stages": [stage]}]
    rows, groups = of_step(records)
    data = f"step('asked-0',{dumped(rows)},{dumped(groups)});\nruns({dumped(session)});"
    html, css, code = ((VIEWER / name).read_text(encoding="utf-8") for name in PAGE)
    html = html.replace("NONCE", secrets.token_hex(16))  # no other inline script may run
    html = html.replace('<link rel="stylesheet" href="page.css">', f"<style>\n{css}</style>")
    html = html.replace(' src="page.js">', f">\n{code}")
    write_text(out, html.replace(' src="data/index.js">', f">\n{data}"))


def names_of(runs: list[Path]) -> list[str]:
    """Returns the names of the runs' folders. Where two are alike, each begins with the name of
    its parent folder.
    """
    paths = [run.resolve() for run in runs]
    names = [path.name for path in paths]
    return [p.name if names.count(p.name) == 1 else f"{p.parent.name}-{p.name}" for p in paths]


def stages_of(run: Path) -> list[Path]:
    """Returns the folders of a run's stages, or the one stage that was named."""
    stages = [run] if (run / "metrics.jsonl").exists() else sorted(run.glob("stage?"))
    if not stages:
        raise InputError(f"{run}: no metrics.jsonl there nor in a stage; give a run, runs/NAME")
    return stages


def write_stage(folder: Path, name: str, out: Path) -> dict:
    """Writes the scripts of a stage's steps; returns the stage's part of index.js."""
    key = f"{name}-{folder.name}"
    missing = []
    steps = []
    asked = defaultdict(dict)
    settings = read_settings(folder, missing)
    stage = {
        "key": key,
        "name": folder.name,
        "settings": {name: settings[name] for name in ABOUT if name in settings},
        "metrics": finished_records(folder / "metrics.jsonl", cut=False, needs="step"),
        "steps": steps,
        "missing": missing,
        "asked": asked,
    }
    for step, some in itertools.groupby(readable_records(folder, missing), itemgetter("step")):
        rows, groups = of_step(some)
        (out / "data" / f"{key}-{step}.js").write_text(
            f"step({dumped(f'{key}-{step}')},{dumped(rows)},{dumped(groups)});\n", encoding="utf-8"
        )
        steps.append(step)
        right = defaultdict(list)
        for row in rows:
            right[str(row["question"])].append(bool(row["correct"]))
        for question, answers in right.items():
            asked[question][step] = round(fmean(answers), 2)
    return stage


def read_settings(folder: Path, missing: list[str]) -> dict:
    """Returns the settings of a stage; {} and a line in `missing` if a formula lacks one."""
    try:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        itemgetter(*FORMULA)(settings)
        return settings
    except Exception as error:  # no file, half of one, or a file of something else
        missing.append(f"{folder}/settings.json cannot be read: there are no formulas ({error!r})")
        return {}


def readable_records(folder: Path, missing: list[str]) -> Iterator[dict]:
    """Yields the records that can be shown; at the end `missing` gets a line on the others."""
    problems = Counter()
    try:
        for record in read_trajectories(folder, missing.append):
            try:
                line_on(record)
                slim(record)
            except Exception as error:  # whatever a damaged record raises
                problems[repr(error)] += 1
            else:
                yield record
    except InputError as error:
        missing.append(str(error))
    for problem, count in problems.items():
        missing.append(
            f"{folder / NAME}: {count} trajectories are left out, damaged or written by another"
            f" version: {problem}"
        )


def of_step(records: Iterable[dict]) -> tuple[list[dict], list[str]]:
    """Returns a summary of each trajectory, and each group's trajectories as JSON."""
    rows = []
    groups = []
    for _, some in itertools.groupby(records, itemgetter("group")):
        some = list(some)
        rows += [line_on(record) | {"group": len(groups)} for record in some]
        groups.append(dumped([slim(record) for record in some]))
    return rows, groups


def slim(record: dict) -> dict:
    """Returns a record with only the fields that the page shows."""
    shown = {key: value for key, value in record.items() if key != "prompt_ids"}
    return shown | {"prompt": "".join(record["prompt"])}


def line_on(record: dict) -> dict:
    """Returns the fields of one trajectory that the list of groups and its filters use."""
    searches = record["searches"]
    rewards = record["rewards"]
    queries = [" ".join(search["query"].lower().split()) for search in searches]
    line = {name: record[name] for name in LISTED}
    line |= {"searches": len(queries), "repeated": len(set(queries)) < len(queries)}
    line |= {"reward": round(sum(rewards.values()), 4), "trained": "advantages" in record}
    return line | {
        "golds": " | ".join(record["golds"]),
        "fallback": any(search["fallback"] for search in searches),
        "fault": bool(record["rejected_queries"]) or rewards.get("format", 0) < 0,
    }


def dumped(value: object) -> str:
    """Returns JSON in ASCII that may be in a script: no tag, no line end and no NaN is in it."""
    text = json.dumps(value, separators=(",", ":"))
    if "NaN" in text or "Infinity" in text:  # as strings, which JavaScript still computes with
        text = json.dumps(json.loads(text, parse_constant=str))
    return text.replace("<", "\\u003c")
