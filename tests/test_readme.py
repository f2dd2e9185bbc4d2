"""Checks what README and docs promise: files that run, functions that exist, known flags."""

import contextlib
import importlib
import io
import re
import runpy
import sys
from pathlib import Path

import law
import pytest

import papers
import settings
import train
import view
from plumbing import report

ROOT = Path(__file__).parents[1]
README, USE, SCALE, RESULTS, METRICS = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", *(f"docs/{n}.md" for n in "use scale results metrics".split()))
)
NO_SCREEN = {"train", "eval", "update"}  # these train, or evaluate; update is train's step
SCREENS = {*law.PATH, "papers", "data"} - NO_SCREEN


def commands_in(text: str) -> list[tuple[str, str]]:
    """Returns (file or lab.NAME, arguments) of each command; a comment begins with " #"."""
    start = r"(?:python|accelerate launch(?: --\S+ \S+)*) (-m lab\.\w+|\w+\.py)"
    found = re.findall(start + r"((?: (?!#)[^\s`]+)*)", text)
    return [(module.removesuffix(".py").removeprefix("-m "), words) for module, words in found]


COMMANDS = commands_in(README + USE + SCALE)
SUBCOMMANDS = ("direct", "reasoning", "traces", "summarizer", "serve", "check")
SUBCOMMANDS += ("rollout", "update", "step", "retrieval", "growth")


@pytest.mark.parametrize("name", sorted(SCREENS))
def test_every_file_of_the_path_shows_its_idea_on_one_screen(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    query = ["Kelmouth"] * (name == "retriever")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *query])
    runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    assert 1 <= len(capsys.readouterr().out.splitlines()) <= 80


def test_every_function_of_the_equation_map_exists():
    table = METRICS.split("## Where each equation lives")[1].split("## What a run logs")[0]
    named = re.findall(r"`(\w+)\.(\w+)`", table)
    assert len(named) > 20
    for module, function in named:
        assert hasattr(importlib.import_module(module), function), f"{module}.{function}"


def help_text(name, subcommand):
    """Returns what the command prints for --help."""
    text, argv = io.StringIO(), sys.argv
    sys.argv = [name, *([subcommand] if subcommand else []), "--help", "all"]
    try:
        with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as ended:
            if "." in name:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = argv
    assert ended.value.code == 0
    return text.getvalue()


def test_the_docs_have_a_command_for_every_recipe_and_each_is_one_that_can_run(monkeypatch):
    monkeypatch.setattr(settings, "stage_before", lambda _: None)  # as if stage 1 were there
    given = [arguments.split() for name, arguments in COMMANDS if name == "train"]
    given = [words for words in given if words not in (["..."], ["--help"])]
    stages = [stage for words in given for stage in settings.parse_stages(words)]
    assert {stage.recipe for stage in stages} == set(papers.RECIPES)
    assert {stage.algorithm for stage in stages} >= {"ppo", "grpo", "dapo", "reinforce_pp"}


WITH_FLAGS = sorted({name for name, arguments in COMMANDS if "--" in arguments} - {"train"})


@pytest.mark.parametrize("name", WITH_FLAGS)
def test_every_command_has_only_flags_that_its_file_knows(name):
    given: dict[str, set[str]] = {}
    for other, arguments in COMMANDS:
        words = arguments.split()
        if other == name and "--predictions" not in words:
            subcommand = next((word for word in words if word in SUBCOMMANDS), "")
            flags = {word for word in words if word.startswith("--")}
            given.setdefault(subcommand, set()).update(flags)
    for subcommand, flags in given.items():
        known = set(re.findall(r"--\w+", help_text(name, subcommand)))
        assert flags <= known, f"{name} {subcommand}: {', '.join(sorted(flags - known))}"


@pytest.mark.parametrize("recipe", papers.RECIPES)
def test_the_line_for_eight_gpus_fits_for_every_recipe_by_our_own_plan(recipe, capsys):
    (line,) = (line for line in README.splitlines() if line.startswith("| 8 GPUs"))
    ((module, words),) = [(name, words) for name, words in commands_in(line) if "plan" in name]
    assert line.count("--gradient_checkpointing") == 2  # it trains as the plan says
    importlib.import_module(module).main(words.replace("NAME", recipe).split())
    assert "\nfits in " in capsys.readouterr().out


def test_every_file_is_in_the_readme_and_those_of_the_path_first():
    path, others = re.findall(r"```\n(.*?)```", README.split("## The path")[1], re.DOTALL)[:2]
    assert set(re.findall(r"^(\w+)\.py ", path, re.MULTILINE)) == law.PATH
    listed = set(re.findall(r"\b(\w+\.py)\b", path + others))
    assert listed == {file.name for file in ROOT.glob("*.py")}
    folders = set(re.findall(r"^(\w+)/ ", others, re.MULTILINE))
    assert folders == {file.parent.name for file in ROOT.glob("*/__init__.py")}


def test_every_recipe_is_in_the_list_of_papers():
    listed = README.split("## Start")[0]
    assert set(re.findall(r"`(\w+)`", listed)) >= set(papers.RECIPES)


def test_every_number_that_is_logged_or_drawn_has_a_row():
    rows = re.findall(r"^\| (`.*?) \|", METRICS, re.MULTILINE)
    explained = set(re.findall(r"`([\w/]+)`", " ".join(rows)))
    drawn = {name for _, names in view.PANELS for name in names if not name.endswith("/")}
    steps = {f"{name}_seconds" for name in ("rollout", "reward", "update")}
    assert {*train.LOGGED, *report.COLUMNS, *drawn, *steps} - {"tokens"} <= explained


def test_the_pictures_and_the_place_of_the_ablation_table_are_there():
    assert RESULTS.count("<!-- ablate -->") == RESULTS.count("<!-- /ablate -->") == 1
    for folder, text in ((ROOT, README), *((ROOT / "docs", text) for text in (USE, RESULTS))):
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
            assert (folder / picture).read_bytes()[:4] in (b"\x89PNG", b"<svg")
