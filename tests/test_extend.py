"""Applies each diff of docs/extend.md to a copy of the tree, runs there all commands that must know
a new paper, and trains a model on a folder of texts with the commands of the page.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT, SMALL, flags, rows_of
from test_readme import commands_in
from transformers import AutoModelForCausalLM

import ask
import eval as evaluation
import train
from flags import parse
from formats.records import append_jsonl
from plumbing.files import checkpoints
from rewards import example, r1_searcher_stage2

TEXT = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
DIFFS = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = commands_in(TEXT)
LEFT_OUT = shutil.ignore_patterns("tests", "runs", "docs", "shared", ".*", "*.gz", "__pycache__")


# One process, because the imports take longer than the commands. Its terminal has only ASCII.
EVERY_COMMAND = """
import ask, eval, rewards, train
from papers import __main__ as papers
from lab import ablate, claims
from errors import run_main

def work():
    for run in RUNS:
        train.main(run)
    rewards.main()
    papers.main()
    small = {"questions_per_step": 4, "group_size": 2, "trajectories_per_update": 4}
    few = [f"--{name}={value}" for name, value in small.items()]
    train.main(["--recipe", "mine", "--steps", "2", *few])
    train.main(["--recipe", "mine", "--steps", "3", "--resume", *few])
    eval.main("--recipe mine --questions 3".split())
    checkpoint = "runs/mine-world0-seed0/stage1/checkpoint-000003"
    eval.main(["--model", checkpoint, "--questions", "3", "--decoding", "paper"])
    ask.main(["--recipe", "mine"])
    claims.ARMS["new"] = claims.Arm("mine", 1, small | {"steps": 1})
    # Fewer questions than an arm asks.
    ablate.Options = lambda questions, **others: eval.Options(questions=3, **others)
    ablate.result_of("new", 0, "runs")
    print("UR\\xb2")

run_main(work)
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Returns a copy of the tree with all diffs; in it the new paper's warm-up has only 3 steps."""
    copy = tmp_path_factory.mktemp("extended") / "tree"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    for diff in DIFFS:
        command = ["git", "apply", "--recount", "-"]
        subprocess.run(command, input=diff, text=True, check=True, cwd=copy)
    source = (copy / "papers" / "mine.py").read_text(encoding="utf-8")
    shorter = source.replace('Tiny("<answer> {answer}</answer>")', 'Tiny("<answer>", steps=3)')
    assert shorter != source
    (copy / "papers" / "mine.py").write_text(shorter, encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def output(tree, model) -> str:
    """Returns the output of the commands: two steps of each run of the page, and the new paper."""
    own_options = "--recipe mine --retriever words --run_name own"
    short_options = "--recipe search_r1 --reward mine.py:short --run_name short"
    small = flags(model, tree / "runs", "--trajectories_per_update 4")
    runs = [[*small, *options.split()] for options in (own_options, short_options)]
    return run_in(tree, "-c", f"RUNS = {runs}{EVERY_COMMAND}")


def run_in(tree, *words) -> str:
    """Returns the output of `python WORDS` in the copy."""
    environment = ENVIRONMENT | ASCII | {"PYTHONPATH": str(tree)}
    options = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    result = subprocess.run([sys.executable, *map(str, words)], cwd=tree, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
def test_rewards_protocols_papers_and_retrievers_are_added_by_their_diffs(tree, output):
    assert len(DIFFS) == 8 and max(len(diff.splitlines()) for diff in DIFFS) <= 24
    for name, terms in (("own", {"answer", "price"}), ("short", {"right", "short"})):
        rows = rows_of(tree / "runs" / name / "stage1")
        assert len(rows) == 2
        assert {k[7:] for row in rows for k in row if k.startswith("reward/")} == terms
    # The line of `rewards.main`: right after 0, 1 and 2 searches, then wrong.
    row = next(line.split() for line in output.splitlines() if line.startswith("mine "))
    assert row[1:] == ["+1.00", "+0.90", "+0.80", "+0.00", "-0.10", "-0.20"]


@pytest.mark.fault(151)
def test_every_command_accepts_the_new_paper(tree, output):
    assert "UR\\xb2" in output and "this page" in output  # papers
    folder = Path("runs/mine-world0-seed0/stage1")
    assert [row["step"] for row in rows_of(tree / folder)] == [0, 1, 2]
    settings = json.loads((tree / folder / "settings.json").read_text())
    assert (settings["protocol"], settings["reward"]) == ("mine", "mine")
    assert output.count(f"{folder}/checkpoint-000003") >= 2  # both evaluations
    assert "model: runs/mine-world0-seed0" in output  # ask
    arm = json.loads((tree / "runs" / "new-world0" / "result.json").read_text())
    assert len(arm["curve"]) == 1 and "em/one_hop" in arm["eval"]


def test_the_server_of_the_page_answers_the_search_command(tree, tmp_path):
    passages = tmp_path / "passages.jsonl"
    names = ("Ana", "Bo", "Cy")
    append_jsonl(passages, [{"title": n, "text": f"{n} was born in {n}town."} for n in names])
    options = {"cwd": tree, "env": ENVIRONMENT | {"PYTHONPATH": str(tree)}, "text": True}
    command = [sys.executable, "my_server.py", str(passages), "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    try:
        url = ["--retriever", "http", "--retriever_url", server.stdout.readline().split()[-1]]
        assert "Bo was born in Botown." in run_in(tree, "retriever.py", "where was Bo born", *url)
    finally:
        server.kill()
        server.communicate()


def test_the_function_for_another_trainer_returns_our_reward():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    given = {"GRPOTrainer": lambda *_, reward_funcs: reward_funcs}
    exec(block.replace(", ...)", ")"), given)
    rows = [example("r1_searcher", answer, 1) for answer in ("Norland", "Sudria", "a </answer> b")]
    columns = {"question": [t.question.question for t in rows], "task": ["qa"] * 3}
    columns["answers"] = [t.question.answers for t in rows]
    (reward,) = given["trainer"]
    rewards = reward(completions=[t.text for t in rows], prompts=None, **columns)
    assert rewards == [sum(r1_searcher_stage2(t).values()) for t in rows] == [1.0, 0.0, -2.0]


# ------------------------------------------------------------------------------------- the commands
def test_every_training_command_of_the_page_is_valid():
    commands = [arguments for name, arguments in COMMANDS if name == "train"]
    for words in commands:
        if "--recipe mine" not in words:  # that recipe is added by a diff
            assert parse(words.replace("--reward mine.py:short", "").split()).steps > 1
    assert len(commands) == 5


def test_a_model_is_trained_and_evaluated_on_a_folder_of_texts(
    model, tmp_path, monkeypatch, capsys
):
    """Runs the commands of the page with fewer questions and a tiny model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in "ABCEFGH":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name}na lives in {name}town. It rains.")
    questions = [
        {"question": f"Where does {name}na live?", "answers": [f"{name}town"]} for name in "ABCEFG"
    ]
    append_jsonl("train.jsonl", questions[:4])
    append_jsonl("held_out.jsonl", questions[4:])
    common = "--recipe search_r1 --corpus texts --output_dir runs --max_turn_tokens 12".split()
    small = f"{SMALL} --run_name mine --trajectories_per_update 4".split()
    train.main([*common, *small, "--model", model, "--data", "train.jsonl", "--group_size", "2"])
    checkpoint = checkpoints(tmp_path / "runs/mine/stage1")[-1]
    evaluation.main([*common, "--data", "held_out.jsonl", "--questions", "0", "--run_name", "mine"])
    ask.main(["which country was jana dorn born in ?", *common, "--model", str(checkpoint)])
    assert "searches: texts (bm25, 7 documents)" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained(checkpoint)  # as a server loads it
