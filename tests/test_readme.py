"""What the README promises: files that run, functions that exist, flags that are known."""

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

ROOT = Path(__file__).parents[1]
README, PAPERS, RESULTS, SCALE = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", *(f"docs/{n}.md" for n in "papers results scale".split()))
)
NO_SCREEN = {"train", "eval", "update"}  # these train, or evaluate; update is train's step
SCREENS = {*law.PATH, "metrics", "papers", "data"} - NO_SCREEN


def commands_in(text: str) -> list[tuple[str, str]]:
    """`python FILE ARGUMENTS` and `python -m lab.NAME ARGUMENTS`; behind " #" a comment."""
    start = r"(?:python|accelerate launch(?: --\S+ \S+)*) (-m lab\.\w+|\w+\.py)"
    found = re.findall(start + r"((?: (?!#)[^\s`]+)*)", text)
    return [(module.removesuffix(".py").removeprefix("-m "), words) for module, words in found]


COMMANDS = commands_in(README + SCALE)
SUBCOMMANDS = ("direct", "reasoning", "traces", "summarizer", "serve", "check")
SUBCOMMANDS += ("rollout", "update", "step", "retrieval", "growth")


@pytest.mark.parametrize("name", sorted(SCREENS))
def test_every_file_of_the_path_shows_its_idea_on_one_screen(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    query = ["Kelmouth"] * (name == "retriever")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *query])
    ran = runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    for worker in ran.get("_IDLE", ()):  # of this second copy of metrics
        worker.communicate()
    assert 1 <= len(capsys.readouterr().out.splitlines()) <= 80


def test_every_function_of_the_equation_map_exists():
    table = README.split("## Notation")[1].split("## What the logged")[0]
    named = re.findall(r"`(\w+)\.(\w+)`", table)
    assert len(named) > 30
    for module, function in named:
        module = {"reader": "other_models.reader"}.get(module, module)
        assert hasattr(importlib.import_module(module), function), f"{module}.{function}"


def help_text(name, subcommand):
    """What the command prints for --help."""
    text, argv = io.StringIO(), sys.argv
    sys.argv = [name, *([subcommand] if subcommand else []), "--help"]
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


def test_the_readme_has_a_command_for_every_recipe_and_each_is_one_that_can_run():
    given = [arguments.split() for name, arguments in COMMANDS if name == "train"]
    given = [words for words in given if words not in (["..."], ["--help"])]
    trained = [its for words in given for its in settings.parse_stages(words)]
    assert {its.recipe for its in trained} == set(papers.RECIPES)
    assert {its.algorithm for its in trained} >= {"ppo", "grpo", "dapo", "reinforce_pp"}


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
    for subcommand, asked in given.items():
        known = set(re.findall(r"--\w+", help_text(name, subcommand)))
        assert asked <= known, f"{name} {subcommand}: {', '.join(sorted(asked - known))}"


@pytest.mark.parametrize("recipe", papers.RECIPES)
def test_the_line_for_eight_gpus_fits_for_every_recipe_by_our_own_plan(recipe, capsys):
    (line,) = (line for line in README.splitlines() if line.startswith("| 8 GPUs"))
    ((module, words),) = [(name, words) for name, words in commands_in(line) if "plan" in name]
    assert line.count("--gradient_checkpointing") == 2  # it trains as the plan says
    importlib.import_module(module).main(words.replace("NAME", recipe).split())
    assert "\nfits in " in capsys.readouterr().out


def test_every_file_is_in_the_reading_order():
    order = README.split("## Reading order")[1].split("## Notation")[0]
    listed = set(re.findall(r"\b(\w+\.py)\b", order.split("```")[1]))
    assert listed == {path.name for path in ROOT.glob("*.py")}
    wings = set(re.findall(r"^(\w+)/ ", order, re.MULTILINE))
    assert wings == {path.parent.name for path in ROOT.glob("*/__init__.py")}


def test_every_recipe_is_in_the_list_of_papers():
    listed = README.split("Implemented now")[1].split("## Try it")[0]
    assert set(re.findall(r"`(\w+)`", listed)) >= set(papers.RECIPES)


def test_the_pictures_and_the_place_of_the_ablation_table_are_there():
    assert RESULTS.count("<!-- ablate -->") == RESULTS.count("<!-- /ablate -->") == 1
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
