"""plumbing/: the files of a run, what it goes on from, and what
is refused before a model is loaded.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from conftest import (
    command_line,
    flags,
    message,
    of_fault,
    rows_of,
    same,
    set_threads,
    settings_for,
)
from test_lora import needs_peft

import train
from errors import InputError
from formats.manifest import seal
from plumbing import build
from plumbing.build import build_state, check_processes
from plumbing.files import checkpoints, console_line, settings_text
from policy import load_policy
from settings import Settings, in_built_in_world, parse, parse_stages, saved_settings


def test_the_console_says_what_is_out_of_the_ordinary():
    plain = {"step": 7, "reward": 0.5, "em": 0.25}
    assert console_line(plain) == "step    7  reward 0.50  em 0.25"
    assert console_line(plain | {"search_errors": 0.2}).endswith("search_errors 0.20")
    said = "no update: no group to learn from, in 3 draws"
    assert console_line(plain | {"skipped": 1, "resampled": 2}).endswith(said)


# ------------------------------------------------------------------------------- the files of a run


@pytest.mark.parametrize("keep, left", [(0, [1, 2, 3]), (2, [2, 3])])
def test_older_checkpoints_go_and_zero_keeps_all(keep, left, model, tmp_path):
    more = f"--steps 3 --save_every 1 --keep_checkpoints {keep}"
    folder = train.train(settings_for(model, tmp_path, more))
    assert [int(path.name[-6:]) for path in checkpoints(folder)] == left


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    """The folder of a finished run of one step."""
    return train.train(settings_for(model, tmp_path_factory.mktemp("done"), "--steps 1"))


@pytest.fixture
def left(done, tmp_path):
    """A copy of it, where a run of this test goes on."""
    return shutil.copytree(done, tmp_path / "t" / "stage1")


def test_an_earlier_run_is_moved_aside_and_not_overwritten(left, model, tmp_path, capsys):
    (left / "note").write_text("")
    settings = settings_for(model, tmp_path, "--steps 1")
    train.train(settings)
    assert "moved to stage1.old1" in capsys.readouterr().out
    assert left.with_name("stage1.old1").joinpath("note").exists()
    assert not (left / "note").exists() and len(rows_of(left)) == 1
    message(train.train, dataclasses.replace(settings, mix="nothing=1"))
    assert left.exists()  # bad input leaves it where it is


def test_stage_1_anew_sets_the_stage_2_aside_that_began_with_the_old_one(left, model, tmp_path):
    second = left.with_name("stage2")
    second.mkdir()
    (second / "metrics.jsonl").write_text("")
    train.train(settings_for(model, tmp_path, "--steps 1"))
    assert second.with_name("stage2.old1").exists() and not second.exists()


def test_a_resume_cuts_the_metrics_to_its_checkpoint_and_says_what_is_new(
    left, model, tmp_path, capsys
):
    saved = json.loads((left / "settings.json").read_text()) | {"output_dir": str(tmp_path)}
    (checkpoints(left)[-1] / "settings.json").write_text(json.dumps(saved))
    seal(checkpoints(left)[-1], 1)
    with open(left / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "reward": 1.0}\n{"step": 2, "rew')
    train.train(settings_for(model, tmp_path, "--steps 2 --resume --lr 0.002"))
    assert [row["step"] for row in rows_of(left)] == [0, 1] and "loss" in rows_of(left)[1]
    out = capsys.readouterr().out
    (said,) = re.findall("^resumed with other settings: (.*)", out, re.MULTILINE)
    assert said.count("=") == 2 and "steps=2 (was 1)" in said and "lr=0.002 (was 0.001)" in said


def test_what_cannot_be_gone_on_with_is_one_line(left, model, tmp_path):
    for more, said in (
        ("--resume --steps 1", "1 of --steps 1 steps are done; raise --steps"),
        ("--resume --algorithm ppo", "was not made by PPO and has no critic"),
        (
            "--resume --run_name nowhere",
            "--resume: no checkpoint in .*nowhere/stage1; leave it out",
        ),
    ):
        with pytest.raises(InputError, match=said):
            train.train(settings_for(model, tmp_path, more))
    assert len(rows_of(left)) == 1  # and nothing was touched


@needs_peft
def test_lora_goes_on_with_its_own_rank_and_not_without_it(left, model, tmp_path):
    train.train(settings_for(model, tmp_path, "--run_name lora --steps 1 --lora_rank 4"))
    for more, rank in (("--lora_rank 4", 0), ("--run_name lora --lora_rank 2", 4)):
        with pytest.raises(InputError, match=f"was made with --lora_rank {rank}: do the same"):
            train.train(settings_for(model, tmp_path, f"--resume {more}"))


def test_stage_two_starts_from_stage_ones_last_checkpoint(left, model, tmp_path, capsys):
    state = build_state(settings_for("", tmp_path, "--stage 2 --task_mixing false"))
    last = f"{left}/checkpoint-000001"
    assert f"stage 2 starts from {last}" in capsys.readouterr().out
    assert same(state.policy.parameters(), load_policy(last)[0].parameters())
    assert state.settings.reward == "ur2_stage2"
    # --model wins, and within --stage 1,2 it is stage 1's alone
    assert build.starting_model(settings_for(model, tmp_path, "--stage 2"))[0] == model
    one, two = parse_stages(flags(model, tmp_path, "--stage 1,2"))
    assert (one.model, two.model) == (model, str(left)) and two.lr == 1e-3
    assert build.starting_model(two)[0] == last
    _, said = build.starting_model(Settings(stage=2, output_dir=str(tmp_path / "nowhere")))
    assert "from the built-in model: there is no stage 1 checkpoint in" in said


def test_what_goes_on_from_the_built_in_model_has_its_numbers(tmp_path):
    """A stage 2, and what is given a checkpoint of it with --model; else those of the paper."""
    first = tmp_path / "t" / "stage1"
    (first / "checkpoint-000001").mkdir(parents=True)
    words = f"--output_dir {tmp_path} --run_name t --stage".split()
    tiny = settings_text(parse([*words, "1"]))
    for text, rates in ((tiny, [3e-4, 5e-4]), (json.dumps({"model": "m"}), [2e-6, 2e-6])):
        (first / "settings.json").write_text(text)
        for more in ([], ["--model", str(first)]):
            two = parse([*words, "2", *more])
            assert two.lr == rates[1] and in_built_in_world(two) == (text == tiny)
        assert [s.lr for s in parse_stages([*words, "1,2", "--model", str(first)])] == rates


# ----------------------------------------------------------------------- settings of checkpoints


def test_settings_of_today_come_back_as_they_are_and_other_models_have_none(done, model, tmp_path):
    settings = settings_for(model, done.parent.parent, "--steps 1")
    assert saved_settings(str(checkpoints(done)[-1])) == settings
    assert saved_settings(model) is None and saved_settings("") is None
    for text in ("{", "[]"):
        (tmp_path / "settings.json").write_text(text)
        assert "not a settings file of train" in message(saved_settings, str(tmp_path))


def test_a_checkpoint_without_its_manifest_is_resumed_by_nobody_and_started_from_by_all(
    left, model, tmp_path
):
    last = checkpoints(left)[-1]
    (last / "manifest.json").unlink()
    with pytest.raises(InputError, match=f"no whole checkpoint.*--model {last} "):
        train.train(settings_for(model, tmp_path, "--resume"))
    state = build_state(settings_for(last, tmp_path))
    assert same(state.policy.parameters(), load_policy(str(last))[0].parameters())


# ---------------------------------------------------------------- what is refused before it begins

GOOD = {"id": "1", "question": "who ?", "answers": ["me"]}
BRINGS = GOOD | {"references": [{"id": "1", "title": "t", "text": "x"}]}


@pytest.mark.parametrize(
    "records, said",
    [
        ([BRINGS, GOOD | {"question": 5}], "line 2: field 'question': expected str, found 5"),
        ([GOOD], "have no references"),
        ([BRINGS | {"question": "ada " * 400}], "question 1: its prompt has"),
        ([], "data.jsonl: the file is empty"),
    ],
)
def test_a_bad_file_is_one_line_before_training_starts(records, said, model, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = flags(model, tmp_path, f"--data {data} --corpus from-data")
    assert said in command_line(train.main, arguments, capsys)
    assert not (tmp_path / "t").exists()  # no run was begun


@pytest.mark.parametrize(
    "path, more, said",
    [
        of_fault(257, "no-model", "", "no-model: no such directory"),
        ("", "", "no config.json"),
        (None, "--mix nothing=1", "questions of nothing, and the data has 0"),
        (None, "--resume", "no checkpoint in"),
        (None, "--eval_every 3", "--eval_every 3: the run has 2 steps: give fewer"),
        (None, "--prompt_file none.txt", "--prompt_file"),
    ],
)
def test_what_is_quick_to_find_wrong_comes_before_a_large_corpus(
    path, more, said, model, tmp_path, capsys, monkeypatch
):
    fail = "the corpus was read first"
    monkeypatch.setattr(build, "load_documents", lambda *_: pytest.fail(fail))
    start = model if path is None else tmp_path / path
    assert said in command_line(train.main, flags(start, tmp_path, more), capsys)


def test_lora_without_peft_is_one_line_before_the_questions(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "training_questions", lambda _: pytest.fail("questions were read"))
    monkeypatch.setattr("scale.lora.importlib.util.find_spec", lambda name: None)
    said = command_line(train.main, flags("owner/model", tmp_path, "--lora_rank 8"), capsys)
    assert "--lora_rank 8 needs peft: pip install peft" in said


def test_processes_that_did_not_find_each_other_or_have_no_rows_are_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="2 processes were started and 1 take part: set ACC"):
        check_processes(1)
    check_processes(2)
    # 3 questions of 2 in updates of 4 rows: two updates of 3 rows
    settings = Settings(questions_per_step=3, group_size=2, trajectories_per_update=4)
    build.check_shares(settings, 3)
    with pytest.raises(InputError, match="3 trajectories per update cannot be shared by 4"):
        build.check_shares(settings, 4)


@pytest.fixture
def eight_cores(monkeypatch, tmp_path):
    """Eight logical and four physical cores, no quota, no launcher. Returns the quota's file."""
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8 if logical else 4)
    quota = tmp_path / "cpu.max"
    quota.write_text("max 100000\n")
    monkeypatch.setattr(build, "QUOTA", quota)
    return quota


def threads_set() -> int:
    torch.set_num_threads(7)  # as it was before
    set_threads()
    return torch.get_num_threads()


@pytest.mark.parametrize(
    "environment, threads",
    [
        ({}, 8),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, 4),  # torchrun's own 1
        ({"LOCAL_WORLD_SIZE": "16", "OMP_NUM_THREADS": "1"}, 1),
        ({"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "4"}, 8),  # accelerate's own 4
        ({"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "3"}, 7),  # the user's: as it is
        ({"OMP_NUM_THREADS": "1"}, 7),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}, 7),
    ],
)
def test_the_cores_of_a_machine_are_shared_by_its_processes(
    environment, threads, eight_cores, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert threads_set() == threads


@pytest.mark.parametrize("quota, threads", [("250000 100000", 3), ("900000 100000", 8)])
def test_a_container_has_no_more_threads_than_its_quota_of_cores(quota, threads, eight_cores):
    eight_cores.write_text(quota)
    assert threads_set() == threads
    eight_cores.unlink()  # not Linux, or no container
    assert threads_set() == 8


# --------------------------------------------------------------------- UR²'s recipes, real records

SLICES = Path(__file__).parents[2] / "shared" / "data"
MATH, STAGE2 = "math/math500_60.jsonl", "train/ur2_stage2_150.jsonl"
LEVELS = "--difficulty level --stage"


@pytest.mark.parametrize(
    "data, more, said",
    [
        (MATH, "--recipe ur2_choice", "has no options, and the --reward is for"),
        (MATH, "--retrieval false", "no question may search: give other --data, or take stage 2"),
        (MATH, "--stage 2", "--task_mixing of math, need --difficulty FILE"),
        (STAGE2, f"{LEVELS} 1", "of math:dropped, and the data has 0 (there are hard, math:hard"),
        (STAGE2, f"{LEVELS} 2", "a step takes 0 questions of medium, and the data has 13"),
    ],
)
def test_what_ur2_cannot_train_on_is_one_line_before_the_model(
    data, more, said, model, tmp_path, capsys, monkeypatch
):
    corpus = SLICES / "corpus" / "flashrag_wiki_sample_500.jsonl"
    if not corpus.exists():
        pytest.skip(f"the real slices are not in {SLICES}")
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    words = flags(model, tmp_path, f"--data {SLICES / data} --corpus {corpus} {more}")
    assert said in command_line(train.main, words, capsys)


def test_ur2_without_a_summarizer_on_own_data_is_warned_of(capsys):
    for data, warned in (("d", 1), ("", 0)):
        build.hint_at_summaries(Settings(data=data))
        assert capsys.readouterr().err.count("--summarizer none: no search can") == warned


# ---------------------------------------------------------------------------------------- trackers
def test_a_tracker_gets_the_settings_and_every_step(model, tmp_path, monkeypatch):
    told = []

    class Fake(GeneralTracker):
        name, requires_logging_directory = "trackio", False

        def __init__(self, run_name, **_):
            told.append(run_name)

        def store_init_configuration(self, values):
            told.append(values["recipe"])

        def log(self, values, step, **_):
            told.append((step, values["reward"]))

        def finish(self):
            told.append("finished")

    for module in (tracking, build):
        monkeypatch.setattr(module, "get_available_trackers", lambda: [LoggerType.TRACKIO])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio", Fake)
    folder = train.train(settings_for(model, tmp_path, "--steps 2 --report_to trackio"))
    steps = [(row["step"], row["reward"]) for row in rows_of(folder)]
    assert told == [f"{folder.parent.name}-stage1", "ur2", *steps, "finished"]


def test_a_tracker_that_is_not_installed_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "get_available_trackers", lambda: [])
    said = command_line(train.main, ["--report_to", "wandb", "--output_dir", tmp_path], capsys)
    assert said == "error: --report_to wandb: pip install wandb"
    said = command_line(train.main, ["--report_to", "wandbb"], capsys)
    assert "did you mean wandb?" in said
