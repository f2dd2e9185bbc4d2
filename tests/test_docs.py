"""Compares docs/papers.md, walk.md and trouble.md, and the list of faults, with the code.

A row of papers.md is | element | place in the paper | here | answer |. The answer is "yes",
"differs: REASON" or "left out: REASON".
Text in backticks under "here" has one of these forms:

    file.function              exists; with " = value" it is a constant of this value
    recipe/stage name = value  a value in papers/, or else the default of the setting, or an
                               argument of its reward (reward_args.name)
    recipe:variant/stage ...   the same for a variant
    --flag ...                 a flag of some command; also "python -m lab.file --flag"
"""

import doctest
import re
import runpy
from inspect import signature
from itertools import product
from pathlib import Path
from pkgutil import resolve_name

import pytest
from conftest import injected
from law import python_files

from papers import PAPERS, record_of
from papers.paper import Paper
from plumbing.alarms import ADVICE
from rewards import REWARDS
from settings import Settings

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
HEADER = "| element | in the paper | here | as the paper? |"
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and line != HEADER
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[2])})
SEPARATOR = r", (?=[\w.]+ = )"  # two settings of a stage: `ur2/1 lr = 2e-06, group_size = 16`
SETTING = re.compile(r"(\w+)(?::(\w+))?/([12,]+) (\w+(?:\.\w+)? = .*)")
SOURCES = "\n".join(p.read_text() for p in [*ROOT.glob("*.py"), *ROOT.glob("[!t]*/*.py")])


def is_flag(name: str) -> bool:
    """Returns whether some command has this flag."""
    return bool(re.search(rf'"(--)?{name}"|\n    {name}: ', SOURCES))


def resolve(path: str):
    """Returns the object "file.name" or "folder.file.Class.name"; None for a dataclass field."""
    owner, _, name = path.rpartition(".")
    owner = resolve_name(owner)
    return None if name in getattr(owner, "__dataclass_fields__", ()) else getattr(owner, name)


def value_of(recipe: str, variant: str, stage: int, name: str, key: str = ""):
    """Returns the value of a setting, or of a field of a paper, as ("decoding", "top_p")."""
    record = record_of(recipe, variant or "", stage)
    if name in Paper.__dataclass_fields__:
        return getattr(record, name)[key] if key else getattr(record, name)
    settings = record.stages[stage]
    if name == "reward_args":
        given = settings.get(name, {})
        if key in given:
            return given[key]
        return signature(REWARDS[settings["reward"]]).parameters[key].default
    return settings.get(name, getattr(Settings(), name))


def as_flag(value) -> str:
    """Writes a value as on the command line: {"math": 3, "qa": [1, 2]} as "math=3,qa=1/2"."""
    if isinstance(value, dict):
        return ",".join(f"{key}={as_flag(part)}" for key, part in value.items())
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("name", NAMED)
def test_everything_that_a_row_names_exists_and_has_the_value_in_the_row(name):
    if match := SETTING.fullmatch(name):
        recipe, variant, stages, settings = match.groups()
        for stage, setting in product(stages.split(","), re.split(SEPARATOR, settings)):
            path, _, expected = setting.partition(" = ")
            assert as_flag(value_of(recipe, variant, int(stage), *path.split("."))) == expected
    elif name.startswith(("--", "python ")):
        assert all(map(is_flag, re.findall(r"--(\w+)", name)))
    else:
        path, equals, expected = name.partition(" = ")
        value = resolve(path)
        assert not equals or str(value) == expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_has_four_cells_and_says_whether_it_is_as_in_the_paper(row):
    """A row that says yes gives values, which the test above compares, or ends with the names of
    tests or with "by reading".
    """
    element, place, here, answer = row
    assert element and place and here
    assert re.match(r"(yes\b|differs: |left out: )", answer)
    names = re.findall(r"`([^`]+)`", here)
    compared = names and all(" = " in name for name in names)
    named = names and re.search(r"(\[\w+::\w+\]|by reading)$", answer)
    assert compared or named or not answer.startswith("yes")


def test_docs_papers_has_all_papers_and_rows():
    for paper in ("UR²", "R1-Searcher", "R-Search", "Learning When to Search", "ARENA"):
        assert f"\n## {paper}\n" in TEXT
    assert len(ROWS) >= 242  # without its row, nobody would compare an element


@pytest.mark.parametrize("file, name", re.findall(r"\[(\w+)::(\w+)\]", TEXT.partition("## ")[2]))
def test_a_name_of_a_test_in_a_row_is_the_beginning_of_exactly_one_test(file, name):
    tests = (ROOT / "tests" / f"test_{file}.py").read_text(encoding="utf-8")
    assert tests.count(f"\ndef test_{name}") == 1


def test_every_recipe_and_variant_has_a_row():
    names = " ".join(NAMED)
    for recipe, paper in PAPERS.items():
        for name in (recipe, *(f"{recipe}:{variant}" for variant in paper.variants)):
            assert f"{name}/" in names, f"no row of docs/papers.md names {name}/STAGE SETTING = ..."


# ------------------------------------------------------------------------------------------ walk.md
WALK = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n\$ python (\w+)\.py ?(.*?)\n(.*?)\n```", WALK, re.DOTALL)


@pytest.mark.parametrize("name, block", [(name, text) for name, words, text in BLOCKS if not words])
def test_a_block_of_the_walk_is_the_output_of_its_command(name, block, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    output = iter(capsys.readouterr().out.splitlines())
    for line in block.splitlines():
        assert line == "…" or line in output, line  # `in` continues after the line before


# --------------------------------------------------------------------------------------- trouble.md
TROUBLE = (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8")


def test_the_page_about_trouble_has_one_row_for_each_alarm():
    alarms = TROUBLE.partition("## It stops")[0]
    rows = re.findall(r"^\| (`.*?) \|", alarms, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(ADVICE)


def test_messages_that_end_a_run_are_quoted_from_the_code():
    block = TROUBLE.partition("## It stops")[2].partition("## It is slow")[0]
    quoted = re.findall(r"^\| `([^`]+)`", block, re.MULTILINE)
    plain = re.sub(r"\"\s*f?\"", "", re.sub(r"\{[^}]*\}", "", SOURCES))
    assert len(quoted) == 6
    for words in quoted:
        assert words in plain, words


def test_every_flag_of_the_page_exists():
    assert [flag for flag in re.findall(r"`--(\w+)", TROUBLE) if not is_flag(flag)] == []


def test_every_fault_of_the_table_is_injected_by_a_test(request):
    table = (ROOT / "tests" / "trust" / "faults.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    numbers = list(map(int, cells))
    assert numbers == sorted(set(numbers)) and len(numbers) > 80
    if "tests" not in request.config.args:
        pytest.skip("only some of the tests were collected")
    assert set(numbers) <= injected


def test_the_examples_in_docstrings_are_true():
    for file in python_files(ROOT):
        text = (ROOT / file.path).read_text("utf-8")
        if ">>> " in text and file.path.parts[0] != "tests":
            results = doctest.testmod(resolve_name(file.name))
            assert results.attempted and not results.failed, file.name
