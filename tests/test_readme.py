"""What the README promises: files that run, functions that exist, flags that are known, metrics that are logged."""

import importlib
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from recipes import Recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = {
    "curriculum": "", "grpo": "", "kl": "", "metrics": "", "policy": "", "ppo": "", "prompts": "", "recipes": "",
    "reinforce_pp": "", "retriever": "Kelmouth", "rewards": "", "sft": "", "summarizer": "", "toy": "",
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_every_file_runs_and_shows_its_idea_on_one_screen(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *filter(None, [SHOWN[name]])])
    runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 60


def test_every_function_of_the_equation_map_exists():
    named = re.findall(r"`(\w+)\.(\w+)`", README.split("## Notation")[1].split("## What the logged")[0])
    assert len(named) > 12
    for module, function in named:
        assert hasattr(importlib.import_module(module), function), f"{module}.{function}"


def test_every_flag_in_the_readme_is_known():
    extra = {"help", "png", "split", "samples", "questions", "fact_seed", "quiet", "config_file", "out", "json"}
    flags = set(re.findall(r"--([a-z_]+)", README))
    assert flags - extra <= {f.name for f in fields(Recipe)}


def test_every_file_of_the_reading_order_exists_and_none_is_left_out():
    listed = set(re.findall(r"`(\w+\.py)`", README.split("## Reading order")[1].split("Every file runs")[0]))
    assert listed == {path.name for path in ROOT.glob("*.py")}


def test_the_picture_is_in_the_repo():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
