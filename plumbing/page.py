"""Writes view.py's page. Its data are classic scripts, which a browser also loads from file://.

    data/index.js             runs(...): settings, metrics and saved steps of each stage
    data/RUN-STAGE-STEP.js    step(key, rows, groups): `rows` has a summary of each trajectory;
                              `groups` has the whole trajectories of each group as a JSON string,
                              which the page parses when the group is opened

The page itself is viewer/: index.html, page.css, page.js. A damaged file of trajectories is shown
up to the damage, and the list `missing` says which settings and trajectories are not shown.
Left out: checkpoints.
"""

import itertools
import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from errors import InputError
from formats.records import finished_records
from formats.trajectories import NAME, read_trajectories

VIEWER = Path(__file__).resolve().parent.parent / "viewer"
GENERATOR = b'<meta name="generator" content="search-rl">'  # a file with this may be overwritten
FORMULA = ("clip_low", "clip_high", "kl_coef", "kl_estimator")  # a token's loss depends on these
ABOUT = """
clip_low clip_high kl_coef kl_estimator recipe variant algorithm reward model toy_init data
corpus world_seed seed lr questions_per_step group_size retriever documents_per_search
""".split()  # FORMULA, what a run is, and in what compared runs may differ
MOMENT = itemgetter("correct", "searches", "group", "row")  # of a middle trajectory, by reward
LISTED = ("row", "question", "kind", "answer", "correct", "rewards", "stop_reason")


def check_ours(page: Path) -> None:
    """Raises an InputError if `page` exists and is not a page that this program has written."""
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
    """Returns {metric: its meaning in docs/metrics.md}, which the page shows as tooltips."""
    page = (VIEWER.parent / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (.*`) \| (.+) \|", page)
    return {name: text for names, text in rows for name in re.findall("`([^`]+)`", names)}


def names_of(runs: list[Path]) -> list[str]:
    """Returns the names of the runs' folders. A name that several folders share gets the name of
    the parent folder as a prefix.
    """
    paths = [run.resolve() for run in runs]
    names = [path.name for path in paths]
    return [p.name if names.count(p.name) == 1 else f"{p.parent.name}-{p.name}" for p in paths]


def stages_of(run: Path) -> list[Path]:
    """Returns the folders of a run's stages, or only `run` if it is the folder of one stage."""
    stages = [run] if (run / "metrics.jsonl").exists() else sorted(run.glob("stage?"))
    if not stages:
        raise InputError(f"{run}: no metrics.jsonl in it or in a stage: give a run, as runs/NAME")
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
        for _, group in itertools.groupby(rows, itemgetter("group")):
            answers = sorted(group, key=itemgetter("reward"))
            middle = answers[len(answers) // 2]
            asked[str(middle["question"])][step] = MOMENT(middle)
    return stage


def read_settings(folder: Path, missing: list[str]) -> dict:
    """Returns the settings of a stage. If they cannot be read, or a setting that the loss formula
    needs is not among them, adds a line to `missing` and returns {}.
    """
    try:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        itemgetter(*FORMULA)(settings)
        return settings
    except Exception as error:  # there is no file, half of one, or a file with other content
        missing.append(
            f"{folder}/settings.json cannot be read, so no formulas are shown ({error!r})"
        )
        return {}


def readable_records(folder: Path, missing: list[str]) -> Iterator[dict]:
    """Yields the records that can be shown; adds a line to `missing` for each reason why others
    cannot.
    """
    problems = Counter()
    try:
        for record in read_trajectories(folder, missing.append):
            try:
                line_on(record)
                slim(record)
            except Exception as error:  # a damaged record may raise anything
                problems[repr(error)] += 1
            else:
                yield record
    except InputError as error:
        missing.append(str(error))
    for problem, count in problems.items():
        missing.append(
            f"{folder / NAME}: {count} trajectories are left out, because they are damaged or"
            f" written by another version: {problem}"
        )


def of_step(records: Iterable[dict]) -> tuple[list[dict], list[str]]:
    """Returns a summary of each trajectory, and for each group its trajectories as JSON."""
    rows = []
    groups = []
    for _, some in itertools.groupby(records, itemgetter("group")):
        some = list(some)
        rows += [line_on(record) | {"group": len(groups)} for record in some]
        groups.append(dumped([slim(record) for record in some]))
    return rows, groups


def slim(record: dict) -> dict:
    """Returns a record without the prompt's ids, and with the prompt as one text."""
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
    """Returns ASCII JSON that is safe within a script: it contains no tag and no line end. NaN and
    Infinity become strings, which page.js reads as numbers.
    """
    text = json.dumps(value, separators=(",", ":"))
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=str))
    return text.replace("<", "\\u003c")
