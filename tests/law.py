"""Checks the law of this code: who may import whom, and how large it may be.

    python tests/law.py [FOLDER]

It prints every figure beside its limit, then a line for each broken law, and exits with 1 if there
is one. Size is counted in nodes of the syntax tree without docstrings: names and comments are free.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUMS = {"nodes of the product": 133_500, "nodes of the path": 34_000, "nodes of the tests": 203_000}
FLAGS = 71  # of train.py
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
# Only these imports may be inside a function, and only by these may the path enter a folder.
DOORS = {
    "retriever": "retrievers",  # BM25 needs neither torch nor a network client
    "ppo": "scale",  # the critic's body reads packed rows, as the policy's does
    "update": "scale",  # it cuts and adds up the gradients of sharded weights
    "data": "formats",  # the records of files
    "summarizer": "formats",  # summaries are logged as lines of JSON
    "train": "plumbing",  # set-up, checkpoints and the files of a run
    "eval": "plumbing formats papers",  # set-up, and predictions as lines of JSON
    "coldstart": "plumbing papers",  # set-up
    **dict.fromkeys(("rewards", "rollout", "trajectory"), "papers"),  # the protocols
    "plumbing.predictions": "plumbing policy settings flags",  # they are scored without torch
    "retrievers.serve": "retrievers",  # a server of BM25 loads no torch
}
RUNNER = "rewards.py own_reward"  # the one function that runs a user's file
# Two signatures of transformers hand **options on: its attention's and `generate`. A reward's
# arguments (--reward_args) are handed on to its function.
RELAYS = {"policy.py attention", "policy.py generate"}
RELAYS |= {"rewards.py reward_terms", "rewards.py compute", "rewards.py ur2_choice"}
HIDING = re.compile(r"(__import__|exec|(.*\.)?(import_module|spec_from_file_location|run_path))")
CODE = re.compile(r"\n\s*(def|class|import|from|return|function|const|let|var) \w")
FLAG = re.compile(r"\w+: .+ = setting\((?!.*\bonly='(?!train'))")
SKIPPED = re.compile(r"\.|venv|(runs|exercises|build|dist|node_modules)$")  # folders
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TABLES = (ast.Assign, ast.AnnAssign, ast.AugAssign)  # of a module


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
    late: bool  # the import is inside a function
    where: str


def arrows(files: dict[str, File]) -> Iterator[Arrow]:
    """Yields every import of one of these files by another."""
    for file in files.values():
        inside = {node for function in file.of(*FUNCTIONS) for node in ast.walk(function)}
        for statement in file.of(ast.Import, ast.ImportFrom):
            level, module = (getattr(statement, key, None) for key in ("level", "module"))
            package = [*(file.path.parts[:-level] if level else ()), *([module] if module else ())]
            for alias in statement.names:
                name = ".".join([*package, alias.name])
                while name and name not in files:
                    name = name.rpartition(".")[0]
                if name and name != file.name:
                    where = f"{file.path}:{statement.lineno} imports {name}"
                    yield Arrow(file.name, name, statement in inside, where)


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


def broken_by_imports(files: list[File]) -> Iterator[tuple[str, list[str]]]:
    """Yields each law of imports and the places that break it."""
    strange = [file for file in files if file.size > 1 and floor(file.name) == len(FLOOR)]
    yield "files on no floor", [str(file.path) for file in strange]
    found = list(arrows({file.name: file for file in files}))
    higher = [arrow.where for arrow in found if floor(arrow.target) > floor(arrow.source)]
    yield "imports of a higher floor", higher
    rooms = {file.path.parts[0] for file in files if len(file.path.parts) > 1}
    open_to = {name: names.split() for name, names in DOORS.items()}
    past = [a for a in found if not {a.target, folder(a.target)} & {*open_to.get(a.source, ())}]
    yield "late imports past a door", [arrow.where for arrow in past if arrow.late]
    entered = [a.where for a in past if a.source in PATH and folder(a.target) in rooms]
    yield "folders entered past a door", entered
    yield "files in circles", in_circles({(arrow.source, arrow.target) for arrow in found})
    pairs = {(folder(arrow.source), folder(arrow.target)) for arrow in found}
    yield "folders in circles", in_circles({(a, b) for a, b in pairs if a != b and {a, b} <= rooms})


def own_size(node: ast.AST) -> int:
    """Counts the nodes of a statement without the statements inside it."""
    parts = [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]
    return 1 + sum(map(own_size, parts))


def broken_in(file: File) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yields each law of a single file of the product and the nodes that break it."""
    functions = file.of(*FUNCTIONS)
    yield "functions over 60 lines", [f for f in functions if f.end_lineno - f.lineno >= 60]
    named = [[*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs] for f in functions]
    counted = [[a for a in arguments if a.arg not in ("self", "cls")] for arguments in named]
    yield "functions over 6 parameters", [arguments[6] for arguments in counted if arguments[6:]]
    statements = set(file.of(ast.stmt)) - set(file.of(ast.ClassDef))
    tables = {node for node in file.nodes[0].body if isinstance(node, TABLES)}
    yield "statements over 60 nodes", [n for n in statements - tables if own_size(n) > 60]
    runners = [f for f in functions if f"{file.path} {f.name}" == RUNNER]
    calls = set(file.of(ast.Call)) - {node for f in runners for node in ast.walk(f)}
    yield "hidden imports", [n for n in calls if HIDING.fullmatch(ast.unparse(n.func))]
    texts = set(file.of(ast.Constant)) - file.docstrings
    code = [text for text in texts if len(CODE.findall(str(text.value))) > 1]
    yield "strings that hold code", code
    taking = [f for f in functions if f.args.kwarg and f"{file.path} {f.name}" not in RELAYS]
    words = [(f.args.kwarg.arg, n) for f in taking for n in ast.walk(f)]
    handed = [(name, n) for name, n in words if isinstance(n, ast.keyword) and n.arg is None]
    relays = [n for name, n in handed if re.search(rf"\b{name}\b", ast.unparse(n.value))]
    yield "relays of **options", relays


def figures(root: Path) -> Iterator[tuple[str, int, int, list[str]]]:
    """Yields each law with its figure, its limit and the places that count."""
    everything = list(python_files(root))
    tests = [file for file in everything if file.path.parts[0] == "tests"]
    files = [file for file in everything if file not in tests]
    path = [file for file in files if file.name in PATH]
    where = defaultdict(list, broken_by_imports(files))
    for file in files:
        for law, nodes in broken_in(file):
            where[law] += [f"{file.path}:{n}" for n in sorted(node.lineno for node in nodes)]
    yield from ((law, len(places), 0, places) for law, places in where.items())
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
