"""papers.py: the papers' own numbers, and a sixth paper that is three insertions, nothing else."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import papers
from errors import InputError
from papers import PAPERS, RECIPES, paper_of
from prompts import PROTOCOLS
from rewards import example
from settings import Settings, resolve
from world.world import KINDS

ROOT = Path(__file__).parents[1]
EVERYWHERE = [(name, stage) for name in RECIPES for stage in RECIPES[name]]

# -------------------------------------------------------------------------------------- the numbers

# The papers' tables of hyper-parameters at 7B, written down by hand. What a paper has no number for
# is left out.
NUMBERS = {
    ("ur2", 1): """
        algorithm reinforce_pp_baseline   clip_low 0.2   clip_high 0.2   group_size 16
        questions_per_step 64   trajectories_per_update 256   lr 2e-6   kl_coef 0   temperature 1
        max_searches 4   max_turn_tokens 512   documents_per_search 10   steps 10""",
    # one epoch: ceil(350 / 64) steps
    ("r1_searcher", 1): """
        algorithm reinforce_pp   group_size 16   questions_per_step 64   trajectories_per_update 256
        lr 2e-6   kl_coef 0   kl_estimator k1   temperature 1   max_searches 8   max_turn_tokens 512
        documents_per_search 5   steps 6""",
    # 5 · 256 trajectories; 0.95 · 195 = 185.25
    ("r_search", 1): """
        algorithm grpo   group_size 5   questions_per_step 256   trajectories_per_update 1280
        lr 1e-6   lr_warmup 185   kl_coef 1e-3   temperature 1   max_searches 4
        max_turn_tokens 500   documents_per_search 3   steps 195""",
    # 32 · 32 trajectories; DAPO's own two clips
    ("when_to_search", 1): """
        algorithm dapo   group_size 32   questions_per_step 32   trajectories_per_update 1024
        lr 1e-6   kl_coef 0   temperature 1   top_p 1   max_searches 5   max_turn_tokens 8192
        documents_per_search 5   beta 0.3   clip_low 0.2   clip_high 0.28""",
    # 7 · 256 trajectories
    ("arena", 1): """
        algorithm grpo   kl_estimator k2   group_size 7   questions_per_step 256
        trajectories_per_update 1792   lr 3e-6   kl_coef 0.04   temperature 0.9   max_searches 0
        max_turn_tokens 256   steps 95   bonus 10""",
}
NUMBERS["ur2", 2] = NUMBERS["ur2", 1].removesuffix("steps 10")  # two epochs at most
NUMBERS["vanilla_rl", 1] = NUMBERS["ur2", 2].replace("search 10", "search 5") + " reward ur2_stage2"
# one epoch: ceil(8148 / 64) steps
NUMBERS["r1_searcher", 2] = NUMBERS["r1_searcher", 1].replace("steps 6", "steps 128")
NUMBERS["when_to_search", 2] = NUMBERS["when_to_search", 1]


def same(value, text: str) -> bool:
    return value == text if isinstance(value, str) else value == float(text)


@pytest.mark.parametrize("name, stage", EVERYWHERE)
def test_the_papers_numbers_stand_in_their_records_and_in_the_table(name, stage):
    header, *rows = papers.table()
    row = next(row for row in rows if row[:2] == [name, str(stage)])
    shown, found = dict(zip(header, row, strict=True)), resolve(name, stage, tiny=False)
    words = NUMBERS[name, stage].split()
    for setting, number in zip(words[::2], words[1::2], strict=True):
        value = getattr(found, setting)
        assert same(value, number), setting
        cell = shown.get(setting, "·")  # "·", or a column that is not there: the default
        assert same(value, str(getattr(Settings(), setting)) if cell == "·" else cell), setting


def test_the_two_stages_of_when_to_search_are_its_500_steps():
    one, two = (resolve("when_to_search", stage, tiny=False) for stage in (1, 2))
    assert one.steps + two.steps == 500
    assert (one.reward, two.reward) == ("when_to_search_stage1", "when_to_search_stage2")
    # by right and wrong, a group that is right with and without a search would be dropped: stage 2
    # is about these
    assert (one.filter_by, two.filter_by) == ("correct", "answer")


@pytest.mark.parametrize("name", PAPERS)
def test_a_record_is_whole(name):
    paper, fields = PAPERS[name], {f.name for f in dataclasses.fields(Settings)}
    assert set(paper.tiny) == set(paper.stages) and paper.source
    assert set(paper.decoding) <= fields and paper.punctuation in ("space", "delete")
    assert set(paper.world.kinds) <= set(KINDS)
    for stage in paper.stages:
        small = resolve(name, stage, tiny=True)
        assert small.protocol == paper.protocols[0]
        kinds = {part.split("=")[0] for part in small.mix.split(",")}
        assert kinds <= {*paper.world.kinds, "direct"}
    assert {paper.good_format(example(protocol)) for protocol in paper.protocols} <= {True, False}


def test_every_protocol_is_some_paper_s_and_an_unknown_one_is_one_line():
    assert {paper_of(name).source for name in PROTOCOLS} <= {p.source for p in PAPERS.values()}
    assert paper_of("when_to_search") is PAPERS["when_to_search"]  # not its ablation
    with pytest.raises(InputError, match=r"protocol xml: no record of papers\.py names it"):
        paper_of("xml")


def test_python_papers_prints_the_table_of_the_docs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["papers.py"])
    papers.main()
    docs = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    shown = docs.split("<!-- papers -->")[1].split("<!-- /papers -->")[0].strip()
    printed = capsys.readouterr().out.strip()
    assert shown == printed, "put `python papers.py` into docs/papers.md"
    header, rule, *_ = printed.splitlines()
    assert header.count("|") == rule.count("|") == len(EVERYWHERE) + 2 and set(rule) == set("| -")


# ----------------------------------------------------------------------------------- a sixth paper

WRITES = """
PROTOCOLS["search_r1"] = Protocol(
    "search_r1",
    tag_pair("search"),
    tag_pair("information"),
    tag_pair("answer"),
    "Reason between <think> and </think>. Whenever a fact is missing, write <search> a query"
    " </search> and stop; what is found stands between <information> and </information>. End with"
    " <answer> the answer </answer>.",
    "Reason between <think> and </think>, and end with <answer> the answer </answer>.",
    prompt_suffix="<think>",
    other_tags=(tag_pair("think"),),
)

"""
PAID = '''
def search_r1(trajectory: Trajectory) -> dict[str, float]:
    """R = EM(answer, gold) (Search-R1 eq. 4)."""
    return {"answer": exact_match(trajectory.answer, trajectory.question.answers)}


'''
CHOSE = """
SEARCH_R1 = Paper(
    source="Search-R1 section 5",
    protocols=("search_r1",),
    stages={
        1: {
            "protocol": "search_r1",
            "algorithm": "ppo",
            "reward": "search_r1",
            "questions_per_step": 512,
            "group_size": 1,
            "lr": 1e-6,
            "critic_lr": 1e-5,
            "kl_coef": 1e-3,
            "kl_estimator": "k3",
            "max_searches": 4,
            "documents_per_search": 3,
            "steps": 500,
        }
    },
    tiny={1: EVERYTHING | {"kl_coef": 0.0, "critic_lr": 1e-3, "steps": 20}},
    good_format=lambda trajectory: trajectory.answer is not None,
    world=Tiny(end="{thought}</think>\\n\\n<answer> {answer}</answer>", steps=WARM_UP),
)

"""
SIXTH = {  # file -> what is inserted before which line, and which row into the table there
    "prompts.py": (WRITES, "_ARENA = (\n", ""),
    "rewards.py": (
        PAID,
        "REWARDS |= {\n",
        '    "search_r1": lambda t, s, step, e: search_r1(t),\n',
    ),
    "papers.py": (CHOSE, "PAPERS: dict[str, Paper] = {\n", '    "search_r1": SEARCH_R1,\n'),
}
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("configs/*")]


def copy_with_a_sixth_paper(folder: Path, warm_up: int) -> None:
    """The house with the three insertions, and nothing else in it changed."""
    for path in SOURCES:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for name, (text, line, row) in SIXTH.items():
        source = (folder / name).read_text(encoding="utf-8")
        assert source.count(line) == 1, f"{name}: {line!r} has moved"
        text = text.replace("WARM_UP", str(warm_up))
        (folder / name).write_text(source.replace(line, text + line + row), encoding="utf-8")


def changed(folder: Path) -> set[str]:
    names = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    return {name for name in names if (folder / name).read_bytes() != (ROOT / name).read_bytes()}


def records_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def python(folder: Path, *arguments: str) -> str:
    """What `python ARGUMENTS` prints there, on one core."""
    threads = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(os.cpu_count())}
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | threads,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


# One process, because the imports take longer than the commands.
EVERY_COMMAND = """
import sys
import ask, eval, papers, train
from lab import ablate

sys.argv = ["papers.py"]
papers.main()
few = "--questions_per_step 4 --group_size 2 --trajectories_per_update 4".split()
train.main(["--recipe", "search_r1", "--steps", "2", *few])
train.main(["--recipe", "search_r1", "--steps", "3", "--resume", *few])
eval.main("--recipe search_r1 --questions 3".split())
checkpoint = "runs/search_r1-world0-seed0/stage1/checkpoint-000003"
eval.main(["--model", checkpoint, "--questions", "3", "--decoding", "paper"])
ask.main(["--recipe", "search_r1"])
ablate.main(["--table", "--runs", "nowhere"])
ablate.ARMS["sixth"] = ablate.Arm("search_r1", 1, {"steps": 1})
ablate.run_arm("sixth", 0, "runs")
"""


def test_a_sixth_paper_is_three_insertions_and_every_command_knows_it(tmp_path):
    copy_with_a_sixth_paper(tmp_path, warm_up=3)
    said = python(tmp_path, "-c", EVERY_COMMAND)
    assert changed(tmp_path) == set(SIXTH)
    assert "Search-R1 section 5" in said  # papers
    folder = tmp_path / "runs" / "search_r1-world0-seed0" / "stage1"
    assert [record["step"] for record in records_of(folder / "metrics.jsonl")] == [0, 1, 2]
    settings = json.loads((folder / "settings.json").read_text())
    assert (settings["protocol"], settings["algorithm"]) == ("search_r1", "ppo")
    assert said.count(f"{folder.relative_to(tmp_path)}/checkpoint-000003") >= 2  # both evaluations
    (predictions,) = (tmp_path / "runs" / "predictions").glob("search_r1-*t0-bm25.jsonl")
    assert {record["kind"] for record in records_of(predictions)} == set(KINDS)
    assert "model: runs/search_r1-world0-seed0" in said  # ask
    assert "not run" in said  # lab.ablate's table
    arm = json.loads((tmp_path / "runs" / "sixth-world0" / "result.json").read_text())
    assert len(arm["reward"]) == 2 and set(KINDS) < set(arm["eval"])


@pytest.mark.slow
def test_the_sixth_paper_s_own_reward_rises_on_the_tiny_world(tmp_path):
    copy_with_a_sixth_paper(tmp_path, warm_up=450)
    python(tmp_path, "train.py", "--recipe", "search_r1")
    metrics = tmp_path / "runs" / "search_r1-world0-seed0" / "stage1" / "metrics.jsonl"
    rewards = [record["reward/answer"] for record in records_of(metrics)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert changed(tmp_path) == set(SIXTH)
