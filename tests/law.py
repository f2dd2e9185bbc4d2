"""Checks the law of this code: who may import whom, and how large it may be.

    python tests/law.py [FOLDER]

It prints every figure beside its limit, then a line for each broken law, and exits with 1 if there
is one. Size is counted in nodes of the syntax tree without docstrings: names and comments are free.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUMS = {"nodes of the product": 100_540, "nodes of the path": 30_810, "nodes of the tests": 126_290}
FLAGS = 60  # of train.py
PATH = "prompts trajectory rollout retriever summarizer rewards kl ppo grpo reinforce_pp dapo"
PATH = {*PATH.split(), "curriculum", "coldstart", "update", "train", "eval"}
# The lowest comes first, and no file imports one of a higher floor. A folder means all its files.
FLOORS = """
    errors · settings · metrics kl templates · formats · data · prompts · world.tiny · papers
    · trajectory
    · scale.packing scale.lora scale.shards · ppo · grpo · reinforce_pp dapo · curriculum
    · retrievers · retriever · rewards · policy · update · engines.sampling · rollout
    · engines.slots engines.server · other_models · summarizer · sft · world · flags
    · trajectory_metrics
    · plumbing · eval · train coldstart · view ask convert · lab
"""
FLOOR = {name: n for n, names in enumerate(FLOORS.split("·")) for name in names.split()}
FLAG = re.compile(r"\w+: .+ = (setting|train_only)\(")
SKIPPED = re.compile(r"\.|venv|(runs|exercises|build|dist|node_modules)$")  # folders
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class File:
    def __init__(self, root: Path, path: Path):
        self.path, text = path.relative_to(root), path.read_text(encoding="utf-8")
        parts = self.path.with_suffix("").parts
        self.name = ".".join(part for part in parts if part != "__init__")  # as imports write it
        self.nodes = list(ast.walk(ast.parse(text)))  # the module first
        owners = self.of(ast.Module, ast.ClassDef, *FUNCTIONS)
        described = [node for node in owners if ast.get_docstring(node, clean=False) is not None]
        self.docstrings = {node.body[0].value for node in described}
        self.size = len(self.nodes) - 2 * len(described)

    def of(self, *kinds: type) -> list:
        return [node for node in self.nodes if isinstance(node, kinds)]


def python_files(root: Path) -> Iterator[File]:
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if not any(SKIPPED.match(folder) for folder in folders):
            yield File(root, path)


class Arrow(NamedTuple):
    source: str
    target: str
    where: str


def arrows(files: dict[str, File]) -> Iterator[Arrow]:
    """Yields every import of one of these files by another."""
    for file in files.values():
        for statement in file.of(ast.Import, ast.ImportFrom):
            level, module = (getattr(statement, key, None) for key in ("level", "module"))
            package = [*(file.path.parts[:-level] if level else ()), *([module] if module else ())]
            for alias in statement.names:
                name = ".".join([*package, alias.name])
                while name and name not in files:
                    name = name.rpartition(".")[0]
                if name and name != file.name:
                    where = f"{file.path}:{statement.lineno} imports {name}"
                    yield Arrow(file.name, name, where)


def folder(name: str) -> str:
    return name.split(".")[0]


def floor(name: str) -> int:
    """Returns a number above all floors for a file that is on none."""
    return FLOOR.get(name, FLOOR.get(folder(name), len(FLOOR)))


def in_circles(pairs: set[tuple[str, str]]) -> list[str]:
    """Returns what is left of a graph without the arrows that lead nowhere or come from nowhere."""
    sources, targets = {a for a, _ in pairs}, {b for _, b in pairs}
    kept = {(a, b) for a, b in pairs if a in targets and b in sources}
    return sorted(sources) if kept == pairs else in_circles(kept)


def broken_rules(files: list[File]) -> Iterator[tuple[str, list[str]]]:
    """Yields each law without a figure and the places that break it."""
    strange = [file for file in files if file.size > 1 and floor(file.name) == len(FLOOR)]
    yield "files on no floor", [str(file.path) for file in strange]
    found = list(arrows({file.name: file for file in files}))
    higher = [arrow.where for arrow in found if floor(arrow.target) > floor(arrow.source)]
    yield "imports of a higher floor", higher
    yield "files in circles", in_circles({(arrow.source, arrow.target) for arrow in found})
    rooms = {file.path.parts[0] for file in files if len(file.path.parts) > 1}
    pairs = {(folder(arrow.source), folder(arrow.target)) for arrow in found}
    yield "folders in circles", in_circles({(a, b) for a, b in pairs if a != b and {a, b} <= rooms})
    long = [
        (file, f) for file in files for f in file.of(*FUNCTIONS) if f.end_lineno - f.lineno > 59
    ]
    yield "functions over 60 lines", [f"{file.path}:{f.lineno}" for file, f in long]


def figures(root: Path) -> Iterator[tuple[str, int, int, list[str]]]:
    """Yields each law with its figure, its limit and the places that count."""
    everything = list(python_files(root))
    tests = [file for file in everything if file.path.parts[0] == "tests"]
    files = [file for file in everything if file not in tests]
    path = [file for file in files if file.name in PATH]
    for law, places in broken_rules(files):
        yield law, len(places), 0, places
    low = [file for file in files if floor(file.name) <= FLOOR["settings"]]
    fields = [(file, node) for file in low for node in file.of(ast.AnnAssign)]
    flags = [f"{file.path}:{n.lineno}" for file, n in fields if FLAG.match(ast.unparse(n))]
    yield "flags of train.py", len(flags), FLAGS, flags
    for law, part in zip(SUMS, (files, path, tests), strict=True):
        largest = [f"{f.path} {f.size:,}" for f in sorted(part, key=lambda file: -file.size)]
        yield law, sum(file.size for file in part), SUMS[law], largest


def main(root: Path) -> None:
    rows = list(figures(root))
    for law, figure, limit, _ in rows:
        print(f"{law:30}{figure:>8,} of at most {limit:,}")
    broken = [row for row in rows if row[1] > row[2]]
    for law, figure, limit, places in broken:
        shown = ", ".join([*places[:12], "..."][: len(places)])
        print(f"error: {law}: {figure:,}, at most {limit:,} are allowed: {shown}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or [Path(__file__).resolve().parent.parent]))
