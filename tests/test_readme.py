"""Checks README and docs: the files run, the functions exist, the commands have these flags, and
each paper's command on eight GPUs takes a step of a tiny model.
"""

import contextlib
import importlib
import json
import re
import runpy
import sys
from itertools import product
from pathlib import Path

import law
import pytest
from conftest import ScriptedServer
from test_digits import scripted

import flags
import papers
import rollout
import train
from plumbing import report
from policy import save_policy

ROOT = Path(__file__).parents[1]
README, USE, SCALE, EXTEND, METRICS = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", *(f"docs/{n}.md" for n in "use scale extend metrics".split()))
)
NO_SCREEN = {"train", "eval", "update"}  # these files train or evaluate; update is a step of train
SCREENS = {*law.PATH, "data"} - NO_SCREEN


def commands_in(text: str) -> list[tuple[str, str]]:
    """Returns (file or lab.NAME, arguments) for each command; a comment begins with " #"."""
    start = r"(?:python|accelerate launch(?: --\S+ \S+)*) (-m lab\.\w+|\w+\.py)"
    commands = re.findall(start + r"((?: (?!#)[^\s`]+)*)", text)
    return [
        (module.removesuffix(".py").removeprefix("-m "), arguments)
        for module, arguments in commands
    ]


COMMANDS = commands_in(README + USE + SCALE)
ALL_COMMANDS = COMMANDS + commands_in(EXTEND)
SUBCOMMANDS = ("direct", "reasoning", "traces", "summarizer", "serve")
SUBCOMMANDS += ("rollout", "update", "step", "retrieval")


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Returns a function that runs python NAME.py or python -m lab.NAME and returns the output."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with contextlib.suppress(SystemExit):  # --help exits
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", sorted(SCREENS))
def test_every_file_of_the_path_shows_its_idea_on_one_screen(
    name, run_command, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    query = ["Kelmouth"] * (name == "retriever")
    assert 1 <= len(run_command(name, *query).splitlines()) <= 80


def test_every_function_of_the_equation_map_exists():
    table = METRICS.split("## Where each equation lives")[1].split("## What a run logs")[0]
    named = re.findall(r"`(\w+)\.(\w+)`", table)
    assert len(named) > 20
    for module, function in named:
        assert hasattr(importlib.import_module(module), function), f"{module}.{function}"


def test_the_docs_have_a_valid_command_for_every_recipe(monkeypatch):
    monkeypatch.setattr(flags.Path, "glob", lambda *_: ["checkpoint-1"])  # stage 1 is finished
    commands = [arguments.split() for name, arguments in COMMANDS if name == "train"]
    commands = [words for words in commands if words not in (["..."], ["--help"])]
    stages = [stage for words in commands for stage in flags.parse_stages(words)]
    assert {stage.recipe for stage in stages} == set(papers.PAPERS)
    assert {stage.algorithm for stage in stages} >= {"ppo", "grpo", "dapo", "reinforce_pp"}


WITH_FLAGS = sorted({name for name, arguments in ALL_COMMANDS if "--" in arguments} - {"train"})


@pytest.mark.parametrize("name", WITH_FLAGS)
def test_commands_in_the_docs_have_only_flags_that_exist(name, run_command):
    for other, arguments in ALL_COMMANDS:
        words = arguments.split()
        if other == name and "--predictions" not in words:
            subcommand = [word for word in words if word in SUBCOMMANDS][:1]
            known = re.findall(r"--\w+", run_command(name, *subcommand, "--help", "all"))
            assert {word for word in words if word.startswith("--")} <= set(known), arguments


@pytest.mark.parametrize("recipe", papers.PAPERS)
def test_what_is_trained_on_eight_gpus_fits_in_every_recipe(recipe, capsys):
    module, words = commands_in(SCALE)[0]
    importlib.import_module(module).main([*words.split(), "--recipe", recipe])
    assert ": fits in 73.6, without summariser" in capsys.readouterr().out


OF_PAPERS = commands_in(SCALE.partition("## Each paper's command")[2].partition("\n## ")[0])
RECORD = (
    '{"id": "%s", "task": "%s", "source": "%s", "bucket": "%s", "scores": [1], "supporting": [1],'
    ' "question": "Where?", "answers": ["Norland"], "references": [{"text": "It is an island."}]}'
)
LEVELS = 64 * ("hard", "medium", "easy", "dropped")
KINDS = [("math", "math"), ("qa", "hotpotqa"), ("qa", "2wiki")]


def replied(path, payload):
    """Answers as a retriever and as a model."""
    found = [{"document": {"id": "1", "contents": "Norland"}}]
    reply = {"result": [found] * len(payload.get("queries", ()))}
    reply["choices"] = [{"message": {"content": "Norland"}}]
    return 200, json.dumps(reply).encode()


@pytest.mark.parametrize("module, words", OF_PAPERS)
def test_each_papers_command_asks_its_servers_and_takes_a_step(
    module, words, qwen2, bpe, started, tmp_path, monkeypatch
):
    """All data sets are in one file, which is also the file of difficulty."""
    monkeypatch.chdir(tmp_path)
    cells = enumerate(product(KINDS, LEVELS))
    records = [RECORD % (n, *kind, level) for n, (kind, level) in cells]
    Path("all").write_text("\n".join(records))
    save_policy(qwen2, bpe, "tiny")
    monkeypatch.setattr(rollout, "sample_turns", scripted)
    monkeypatch.setattr(rollout.Environment, "order", {}, raising=False)
    server = started(ScriptedServer(replied))
    models = {*re.findall(r"#([^\s,]+)", words)}
    words = re.sub(r"https?://[^/\s]+", server.base, words)
    words = re.sub(r"--model \S+", "--model tiny --engine hf --max_context 512", words)
    words = re.sub(r"--(data|difficulty) \S+", r"--\1 all", words)
    words = re.sub(r"--embedder \S+", "", words)
    for stage in "12" if "1,2" in words else "1":
        last = f"--dry_run --stage {stage}" if module == "train" else "--questions 1"
        importlib.import_module(module).main(f"{words} {last}".split())
    assert {post["model"] for _, post in server.posts if "model" in post} == models
    assert ("Ana Bell birthplace" in str(server.posts)) == ("--retriever" in words)


def test_every_file_is_in_the_readme_and_the_path_comes_first():
    path, others = re.findall(r"```\n(.*?)```", README.split("## The path")[1], re.DOTALL)[:2]
    assert set(re.findall(r"^(\w+)\.py ", path, re.MULTILINE)) == law.PATH
    listed = set(re.findall(r"\b(\w+\.py)\b", path + others))
    assert listed == {file.name for file in ROOT.glob("*.py")}
    folders = set(re.findall(r"^(\w+)/ ", others, re.MULTILINE))
    assert folders == {file.parent.name for file in ROOT.glob("*/__init__.py")}


def test_every_metric_that_is_logged_or_drawn_has_a_row():
    rows = re.findall(r"^\| (`.*?) \|", METRICS, re.MULTILINE)
    explained = set(re.findall(r"`([\w/]+)`", " ".join(rows)))
    page = (ROOT / "viewer/page.js").read_text(encoding="utf-8")
    panels = re.findall(r'^  \["[^"]+", \[(.+)\]\],$', page, re.MULTILINE)
    drawn = {name for names in panels for name in re.findall(r'"(\w+)"', names)}
    assert len(panels) == 15
    steps = {f"{name}_seconds" for name in ("rollout", "reward", "update")}
    assert {*train.LOGGED, *report.COLUMNS, *drawn, *steps} - {"tokens"} <= explained
