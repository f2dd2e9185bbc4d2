"""The law of this house: how large it may be, how dense, and who may import whom. A ratchet.

    figure <= today     nothing grows: the test names the files, the figure and the limit
    figure == today     until the target is reached, an improvement is written into the table

TODAY holds each limit that has not reached its target; one that is not there stands at its target.
Lines are counted after `ruff format` at 100 columns without any `fmt: skip`: long lines save none.

    python tests/test_house.py            every figure beside today's limit and the target
    python tests/test_house.py --lower    writes into TODAY what has improved; raises nothing
    python tests/test_house.py --moved    the same when code has moved between files: takes the
                                          size of each file, larger or not. Sums still only fall

Left out, since no syntax tree tells: who reads a flag, and in how many files a paper stands."""

import ast
import dataclasses
import functools
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

import settings

TODAY = {
    "house lines": 16431,
    "test lines": 23861,
}


def budgets(text: str) -> dict[str, int]:
    words = text.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


# Lines of each file of the reading path, of the ground that it stands on, and of each wing.
PATH = budgets("""
    prompts 350  trajectory 165  rollout 460  retriever 280  summarizer 235  rewards 780  kl 220
    ppo 290  grpo 120  reinforce_pp 115  dapo 90  curriculum 310  update 166  train 335  eval 415
""")
GROUND = budgets("""
    papers 375  settings 314  policy 400  metrics 380  data 330  sft 150  errors 108  ask 303
    view 230
""")
WINGS = budgets("""
    formats 831  retrievers 920  other_models 460  scale 960  world 870  plumbing 1750  lab 2815
""")
# Lowest first: nothing imports a higher one, also not inside a function. A wing is all its files.
FLOORS = """
    errors · metrics kl · formats · data · prompts · trajectory
    · scale.packing scale.lora scale.shards · ppo · grpo · reinforce_pp dapo · curriculum
    · retrievers · retriever · rewards · policy · update · scale.sampling · rollout · scale.engine
    · other_models · summarizer · sft · world · papers · settings · plumbing · eval · train
    · view ask · lab
"""
FLOOR = {name: n for n, names in enumerate(FLOORS.split("·")) for name in names.split()}
# The imports that may stand inside a function, and the only ones by which the path enters a wing.
DOORS = {
    ("retriever", "retrievers"): "BM25 loads neither torch nor a client of the network",
    ("ppo", "scale"): "the critic's body reads packed rows, as the policy's does",
    ("update", "scale"): "gradients of weights in parts are cut and added up there",
    ("data", "formats"): "the layouts of files",
    ("summarizer", "formats"): "summaries are logged as lines of JSON",
    ("train", "plumbing"): "set-up, checkpoints and the run's files",
    ("eval", "plumbing"): "set-up, and predictions files",
    ("eval", "formats"): "predictions are lines of JSON",
    ("plumbing.predictions", "plumbing"): "a predictions file alone is scored without torch",
    ("plumbing.predictions", "policy"): "the same",
    ("plumbing.predictions", "settings"): "the same",
    ("retrievers.serve", "retrievers"): "what is served: BM25 loads no torch",
}
# transformers' own signatures: what its attention takes, and its `generate`
RELAYS = {"packing.py packed_attention", "policy.py generate"}
OWN = "rewards.py:own_reward"  # the one place that runs a user's file: --reward FILE.py:FUNCTION
HIDING = re.compile(r"(__import__|exec|(.*\.)?(import_module|spec_from_file_location|run_path))")

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
RUFF = shutil.which("ruff", path=os.pathsep.join([str(BIN), os.environ.get("PATH", "")]))
pytestmark = pytest.mark.skipif(RUFF is None, reason="without ruff there is no common format")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, eq=False)
class File:
    path: Path  # from the root
    raw: str
    text: str  # in the common format

    @functools.cached_property
    def name(self) -> str:
        """As an import says it: scale/packing.py is scale.packing."""
        return ".".join(part for part in self.path.with_suffix("").parts if part != "__init__")

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """The module first."""
        return list(ast.walk(ast.parse(self.text)))

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def at(self, *kinds: type) -> list:
        return [node for node in self.nodes if isinstance(node, kinds)]


class Limit(NamedTuple):
    name: str
    target: float
    figure: float
    where: list[str]


def counted(name: str, target: int, where: list[str]) -> Limit:
    return Limit(name, target, len(where), where)


def python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if not re.match(r"\.|venv|(runs|build|dist|node_modules)$", path.name):
                yield from python_files(path)
        elif path.suffix == ".py":
            yield path.relative_to(ROOT)


@functools.cache
def house() -> list[File]:
    """Every file, formatted once for all tests."""
    raw = {path: (ROOT / path).read_text(encoding="utf-8") for path in python_files(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        for path, text in raw.items():
            copy = Path(folder, path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(re.sub(r"#\s*fmt:\s*(skip|off|on)[^\n]*", "", text), encoding="utf-8")
        command = [RUFF, "format", "--isolated", "--quiet", "--line-length", "100", folder]
        subprocess.run(command, check=True)
        return [File(p, t, Path(folder, p).read_text(encoding="utf-8")) for p, t in raw.items()]


@functools.cache
def product() -> dict[str, File]:
    return {file.name: file for file in house() if file.path.parts[0] != "tests"}


def own_tests() -> list[File]:
    return [file for file in house() if file.path.parts[0] == "tests"]


def on_path() -> list[File]:
    return [file for name, file in product().items() if name in PATH]


# 1. Imports


def import_statements(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Each with whether it stands inside a function. What only a type checker reads is none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, inside
        elif not isinstance(child, ast.If) or "TYPE_CHECKING" not in ast.unparse(child.test):
            yield from import_statements(child, inside or isinstance(child, FUNCTIONS))


def bound(file: File, statement: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """The names that an import binds -> what they are, in dots."""
    base = ""
    if isinstance(statement, ast.ImportFrom):
        package = file.path.parts[: -statement.level] if statement.level else ()
        base = "".join(f"{part}." for part in (*package, statement.module) if part)
    return {a.asname or a.name: base + a.name for a in statement.names}


def file_of(dotted: str) -> str | None:
    while dotted and dotted not in product():
        dotted = dotted.rpartition(".")[0]
    return dotted or None


@functools.cache
def arrows() -> dict[tuple[str, str], bool]:
    """(file, own file that it imports) -> whether it does so inside functions only."""
    found: dict[tuple[str, str], bool] = {}
    for file in product().values():
        for statement, inside in import_statements(file.nodes[0]):
            for target in map(file_of, bound(file, statement).values()):
                if target and target != file.name:
                    found[file.name, target] = found.get((file.name, target), True) and inside
    return found


def reached(start: str) -> set[str]:
    seen, todo = set(), [start]
    while todo:
        at = todo.pop()
        new = {target for source, target in arrows() if source == at} - seen
        seen |= new
        todo += new
    return seen


def circles() -> list[list[str]]:
    """Groups of files that reach each other."""
    reach = {name: reached(name) for name in product()}
    return sorted({tuple(sorted(b for b in reach[a] if a in reach[b])) for a in reach} - {()})


def floor(name: str) -> int | None:
    """None where the plan does not know the file."""
    return FLOOR.get(name, FLOOR.get(name.split(".")[0]))


def is_door(source: str, target: str) -> bool:
    return any(source == at and f"{target}.".startswith(f"{wing}.") for at, wing in DOORS)


def relays(file: File) -> list[str]:
    """Functions whose **options go on as **options."""
    found = []
    for function in file.at(*FUNCTIONS, ast.Lambda):
        calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and function.args.kwarg]
        handed = [word.value for call in calls for word in call.keywords if word.arg is None]
        if any(re.search(rf"\b{function.args.kwarg.arg}\b", ast.unparse(x)) for x in handed):
            found.append(f"{file.path.name} {getattr(function, 'name', 'lambda')}")
    return [name for name in found if name not in RELAYS]


def hidden_imports(file: File) -> list[str]:
    functions = [f for f in file.at(*FUNCTIONS) if f"{file.path}:{f.name}" == OWN]
    own = {node for function in functions for node in ast.walk(function)}
    calls = [(node.lineno, ast.unparse(node.func)) for node in file.at(ast.Call) if node not in own]
    return [f"{file.path}:{line} {name}" for line, name in calls if HIDING.fullmatch(name)]


def import_limits() -> list[Limit]:
    files, groups = product(), circles()
    higher, late, entered = [], [], []
    for (a, b), inside in arrows().items():
        source, target = files[a].name, files[b].name
        low, high = floor(source), floor(target)
        higher += [f"{a} -> {b}"] * (None not in (low, high) and high > low)
        if not is_door(source, target):
            late += [f"{a} -> {b}"] * inside
            entered += [f"{a} -> {b}"] * (source in PATH and target.split(".")[0] in WINGS)
    return [
        Limit("files in circles", 0, sum(map(len, groups)), [" ".join(group) for group in groups]),
        counted("imports of a higher floor", 0, higher),
        counted("late imports past a door", 0, late),
        counted("wings entered past a door", 0, entered),
        counted("relays of **options", 0, [x for file in files.values() for x in relays(file)]),
        counted("hidden imports", 0, [x for file in files.values() for x in hidden_imports(file)]),
    ]


# 2. Format


def lines_with(pattern: str, files: list[File]) -> list[str]:
    """As they stand."""
    numbered = [(file.path, n, x) for file in files for n, x in enumerate(file.raw.splitlines(), 1)]
    return [f"{path}:{n}" for path, n, line in numbered if re.search(pattern, line)]


def density(file: File) -> float:
    """Expression nodes per line of code: without blank lines, docstrings and lines of comment."""
    dropped = {n for n, line in enumerate(file.text.splitlines(), 1) if not line.strip()}
    for node in file.at(ast.Module, ast.ClassDef, *FUNCTIONS):
        if ast.get_docstring(node) is not None:
            dropped |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            dropped.add(token.start[0])
    return round(len(file.at(ast.expr)) / max(1, file.lines - len(dropped)), 2)


def nested(file: File) -> list[str]:
    """Comprehensions that have another one inside."""
    found = []
    for node in file.at(*COMPREHENSIONS):
        inner = [x for x in ast.walk(node) if isinstance(x, COMPREHENSIONS) and x is not node]
        found += [f"{file.path}:{node.lineno}"] * bool(inner)
    return found


def format_limits() -> list[Limit]:
    path, files = on_path(), list(product().values())
    rest = [file for file in files if file not in path]
    return [
        counted("lines over 100 columns", 0, lines_with(r".{101}", files)),
        counted("lines over 100 columns in tests", 0, lines_with(r".{101}", own_tests())),
        counted("unformatted on the path", 0, lines_with("fmt: (skip|off)", path)),
        counted("unformatted elsewhere", 20, lines_with("fmt: (skip|off)", rest)),
        counted("nested comprehensions on the path", 0, [x for file in path for x in nested(file)]),
        *[Limit(f"nodes per line of {f.path}", 5.5, density(f), [str(f.path)]) for f in path],
    ]


# 3. Functions


def parameters(function: ast.FunctionDef) -> int:
    a = function.args
    return sum(x.arg not in ("self", "cls") for x in (*a.posonlyargs, *a.args, *a.kwonlyargs))


def function_limits() -> list[Limit]:
    long, wide = [], []
    for file in product().values():
        for f in file.at(*FUNCTIONS):
            name, lines, width = f"{file.path} {f.name}", f.end_lineno - f.lineno + 1, parameters(f)
            long += [f"{name} ({lines})"] * (lines > 60)
            wide += [f"{name} ({width})"] * (width > 6)
    return [
        counted("functions over 60 lines", 0, long),
        counted("functions over 6 parameters", 0, wide),
    ]


# 4. Budgets


def size(name: str, target: int, files: list[File]) -> Limit:
    largest = sorted(files, key=lambda file: -file.lines)
    where = [f"{file.path} {file.lines}" for file in largest]
    return Limit(name, target, sum(file.lines for file in files), where)


def flags() -> list[str]:
    """Of train.py: the fields that no other command has for itself."""
    fields = dataclasses.fields(settings.Settings)
    return sorted(f.name for f in fields if f.metadata.get("only", "train") == "train")


def budget_limits() -> list[Limit]:
    """Each file and each wing with 10 % of play, the sums with none."""
    files, planned, limits = list(product().values()), PATH | GROUND, []
    top = [file for file in files if len(file.path.parts) == 1]
    for name, budget in planned.items():
        own = [file for file in top if file.name == name]
        limits.append(size(f"lines of {name}.py", budget * 11 // 10, own))
    for wing, budget in WINGS.items():
        own = [file for file in files if file.name.split(".")[0] == wing]
        limits.append(size(f"lines of {wing}/", budget * 11 // 10, own))
    rooms = {f"{name}.py" for name in planned} | WINGS.keys()
    known = [f for f in files if floor(f.name) is not None or f.path.name == "__init__.py"]
    strange = [f for f in files if f.path.parts[0] not in rooms or f not in known]
    return [
        *limits,
        size("path lines", 4_400, on_path()),
        Limit("path words", 25_100, sum(len(file.text.split()) for file in on_path()), []),
        size("house lines", 14_500, files),
        size("test lines", 20_000, own_tests()),
        counted("files at the top", 25, [str(file.path) for file in top]),
        counted("files not in the plan", 0, [str(file.path) for file in strange]),
        counted("files of the plan missing", 0, [n for n in planned if n not in product()]),
        counted("flags of train.py", 80, flags()),
    ]


# 5. The loop


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Without the bodies of functions that are defined inside: they are calls of their own."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, FUNCTIONS):
            yield child
            yield from own_nodes(child)


def plain_functions() -> dict[str, tuple[File, ast.AST]]:
    """Every function that is no method, by its name in dots."""
    found = {}
    for file in product().values():
        methods = {child for node in file.at(ast.ClassDef) for child in node.body}
        own = [function for function in file.at(*FUNCTIONS) if function not in methods]
        found |= {f"{file.name}.{function.name}": (file, function) for function in own}
    return found


def mentioned(file: File, function: ast.AST) -> set[str]:
    """What a function calls or hands on, by its name in dots."""
    names: dict[str, str] = {}
    for statement in file.at(ast.Import, ast.ImportFrom):
        names |= bound(file, statement)
    used = [n for n in own_nodes(function) if isinstance(n, (ast.Name, ast.Attribute))]
    parts = [ast.unparse(node).partition(".") for node in used]
    return {names.get(head, f"{file.name}.{head}") + dot + rest for head, dot, rest in parts}


def way_to_backward() -> list[str]:
    """The shortest from train() to the policy's backward() by plain functions, if there is one."""
    functions, ways, seen = plain_functions(), [["train.train"]], {"train.train"}
    for way in ways:  # which grows: breadth first
        file, function = functions[way[-1]]
        attributes = {getattr(node, "attr", "") for node in own_nodes(function)}
        if file.name in ("train", "update") and "backward" in attributes:
            return way
        new = mentioned(file, function) & functions.keys() - seen
        seen |= new
        ways += [[*way, name] for name in sorted(new)]
    return []


def loop_limits() -> list[Limit]:
    """99 where no plain calls lead there, as when a trainer's methods do."""
    way = way_to_backward()
    where = [" -> ".join(way) or "train() does not reach it by plain functions"]
    return [Limit("calls from train() to backward()", 3, len(way) - 1 if way else 99, where)]


# The ratchet

LAW = (import_limits, format_limits, function_limits, budget_limits, loop_limits)


def complaints(limits: list[Limit]) -> list[str]:
    found = []
    for name, target, figure, where in limits:
        today = TODAY.get(name, target)
        some = ", ".join(where[:12]) + (f", ... {len(where)} in all" if len(where) > 12 else "")
        if figure > today:
            found.append(f"{name}: {figure}, the limit is {today} (target {target}): {some}")
        elif figure < today and today > target:
            how = "lower the ratchet: python tests/test_house.py --lower"
            found.append(f"{name}: {figure}, better than {today}: {how}")
    return found


def all_limits() -> list[Limit]:
    return [limit for part in LAW for limit in part()]


def lowered(limits: list[Limit], moved: bool) -> dict[str, float]:
    table = {}
    for name, target, figure, _ in limits:
        taken = moved and name.startswith("lines of ")
        table[name] = figure if taken else min(figure, TODAY.get(name, target))
    table = {limit.name: table[limit.name] for limit in limits if table[limit.name] > limit.target}
    if "test lines" in table:  # the rows of the table are among them
        table["test lines"] += len(table) - len(TODAY)
    return table


def write(table: dict[str, float]) -> None:
    rows = "".join(f'\n    "{name}": {today},' for name, today in table.items())
    literal = "TODAY = {" + rows + "\n" * bool(rows) + "}"
    source = Path(__file__).read_text(encoding="utf-8")
    written = re.sub(r"^TODAY = \{.*?\}$", lambda _: literal, source, count=1, flags=re.S | re.M)
    Path(__file__).write_text(written, encoding="utf-8")


def main(arguments: list[str]) -> None:
    limits = all_limits()
    print(f"{'':36}{'figure':>8}{'today':>8}{'target':>8}")
    for name, target, figure, _ in limits:
        print(f"{name:36}{figure:>8}{TODAY.get(name, target):>8}{target:>8}")
    print("\n".join(complaints(limits)))
    if "--lower" in arguments or "--moved" in arguments:
        write(lowered(limits, "--moved" in arguments))


@pytest.mark.parametrize("part", LAW, ids=lambda part: part.__name__)
def test_the_house_keeps_to_its_law(part):
    found = complaints(part())
    assert not found, "\n" + "\n".join(found)


def test_the_table_holds_only_limits_that_are_still_above_their_target():
    targets = {limit.name: limit.target for limit in all_limits()}
    done = [name for name, today in TODAY.items() if today <= targets.get(name, today)]
    assert not done, f"{done}: python tests/test_house.py --lower takes them out"


if __name__ == "__main__":
    main(sys.argv[1:])
