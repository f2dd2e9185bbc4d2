"""What the README promises: files that run, functions that exist, flags that are known, metrics
that are logged.
"""

import contextlib
import importlib
import io
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import recipes
from recipes import Recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
GPU = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
SHOWN = {  # file -> its arguments
    "ablate": "--table --runs nowhere",
    "baselines": "",
    "chunks": "",
    "cross_model": "",
    "curriculum": "",
    "dapo": "",
    "bench": "",
    "lora": "",
    "plan": "",
    "shards": "",
    "dense": "",
    "embed": "",
    "engine": "",
    "packing": "",
    "sampling": "",
    "errors": "",
    "fetch": "",
    "grpo": "",
    "judge": "",
    "kl": "",
    "llm": "",
    "metrics": "",
    "page": "",
    "policy": "",
    "ppo": "",
    "predictions": "",
    "prompts": "",
    "recipes": "",
    "records": "",
    "reinforce_pp": "",
    "remote": "",
    "report": "",
    "retriever": "Kelmouth",
    "rewards": "",
    "sft": "",
    "summarizer": "",
    "synthesize": "",
    "toy": "",
    "web": "",
    "world": "",
}
WITH_A_RUN = {
    "data",
    "eval",
    "rollout",
    "train",
    "view",
}  # these show a file, or a model: their own tests run them

# `python FILE ARGUMENTS`, in a block or in a line; behind " #" a comment
COMMANDS = re.findall(r"(?:python|accelerate launch) (\w+)\.py((?: (?!#)[^\s`]+)*)", README + GPU)
SUBCOMMANDS = ("difficulty", "direct", "reasoning", "traces", "summarizer", "serve", "check")


@pytest.mark.parametrize("name", SHOWN)
def test_every_file_runs_and_shows_its_idea_on_one_screen(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *SHOWN[name].split()])
    runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 60


def test_no_file_is_left_out_of_those_that_are_run():
    assert set(SHOWN) | WITH_A_RUN == {path.stem for path in ROOT.glob("*.py")}


def test_every_function_of_the_equation_map_exists():
    named = re.findall(
        r"`(\w+)\.(\w+)`", README.split("## Notation")[1].split("## What the logged")[0]
    )
    assert len(named) > 30
    for module, function in named:
        assert hasattr(importlib.import_module(module), function), f"{module}.{function}"


def test_every_flag_in_the_readme_is_known_to_some_file():
    flags = set(
        re.findall(r"--([a-z_]\w*)", re.sub(r"hf download.*", "", README) + PAPERS + RESULTS + GPU)
    )
    of_files = {
        f
        for path in ROOT.glob("*.py")
        for f in re.findall(r'add_argument\("--(\w+)"', path.read_text("utf-8"))
    }
    assert (
        flags - {"help", "quiet", "config_file", "num_processes"}
        <= {f.name for f in fields(Recipe)} | of_files
    )


def help_text(name, subcommand):
    """What `python NAME.py [SUBCOMMAND] --help` prints."""
    text, argv = io.StringIO(), sys.argv
    sys.argv = [f"{name}.py", *([subcommand] if subcommand else []), "--help"]
    try:
        with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = argv
    assert ended.value.code == 0
    return text.getvalue()


def training_commands():
    """The arguments of every `train.py` command; "..." alone stands for any."""
    given = [arguments.split() for name, arguments in COMMANDS if name == "train"]
    return [
        words for words in given if words not in (["..."], ["--help"]) and "--plan" not in words
    ]


def test_the_readme_has_a_command_for_every_recipe():
    """Each command is parsed, so its values and combinations are checked too: `parse_recipe`
    refuses what no run can mean.
    """
    trained = [recipes.parse_recipe(words) for words in training_commands()]
    assert {recipe.recipe for recipe in trained} == set(recipes.RECIPES)
    assert {recipe.algorithm for recipe in trained} >= {"ppo", "grpo", "dapo", "reinforce_pp"}


@pytest.mark.parametrize(
    "name", sorted({name for name, arguments in COMMANDS if "--" in arguments and name != "train"})
)
def test_every_command_has_only_flags_that_its_file_knows(name):
    given: dict[str, set[str]] = {}
    for words in [
        arguments.split() for other, arguments in COMMANDS if other == name and "--" in arguments
    ]:
        subcommand = next((word for word in words if word in SUBCOMMANDS), "")
        given.setdefault(subcommand, set()).update(word for word in words if word.startswith("--"))
    for subcommand, asked in given.items():
        known = set(re.findall(r"--\w+", help_text(name, subcommand)))
        assert asked <= known, f"python {name}.py {subcommand}: {', '.join(sorted(asked - known))}"


def test_the_settings_are_those_of_the_recipes():
    shown = PAPERS.split("<!-- recipes -->")[1].split("<!-- /recipes -->")[0].strip()
    assert shown == recipes.markdown_table(), (
        "run `python recipes.py --markdown` and put the table into docs/papers.md"
    )


def test_the_ablation_table_has_its_place():
    assert RESULTS.count("<!-- ablate -->") == RESULTS.count("<!-- /ablate -->") == 1


def test_every_file_of_the_reading_order_exists_and_none_is_left_out():
    listed = set(
        re.findall(r"`(\w+\.py)`", README.split("## Reading order")[1].split("Every file runs")[0])
    )
    assert listed == {path.name for path in ROOT.glob("*.py")}


def test_every_recipe_is_in_the_list_of_papers():
    listed = README.split("Implemented now")[1].split("## Try it")[0]
    assert set(re.findall(r"`(\w+)`", listed)) >= set(recipes.RECIPES)


def test_the_picture_is_in_the_repo():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README) + ["docs/ablate.png"]:
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
