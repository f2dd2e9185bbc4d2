"""Tests plumbing/: the files of a run, resuming and starting from checkpoints, and the errors that
come before a model is loaded.
"""

import dataclasses
import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
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
from flags import in_built_in_world, parse, parse_stages, saved_settings
from plumbing import build
from plumbing.build import build_state, check_processes
from plumbing.files import checkpoints, console_line, settings_text
from policy import load_policy


def test_the_console_line_names_errors_and_skipped_updates():
    plain = {"step": 7, "reward": 0.5, "em": 0.25}
    assert console_line(plain) == "step    7  reward 0.50  em 0.25"
    assert console_line(plain | {"search_errors": 0.2}).endswith("search_errors 0.20")
    notice = "no update: no group to learn from, in 3 draws"
    assert console_line(plain | {"skipped": 1, "resampled": 2}).endswith(notice)


# -------------------------------------------------------------- the files of a run, and resuming it


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """Returns the folder of a finished run of one step."""
    return train.train(settings_for(model, tmp_path_factory.mktemp("done"), "--steps 1"))


@pytest.fixture
def copy(finished, tmp_path):
    """Returns a copy of that folder, in which a test continues the run."""
    return shutil.copytree(finished, tmp_path / "t" / "stage1")


def test_an_earlier_run_and_its_later_stages_are_moved_aside(copy, model, tmp_path, capsys):
    (copy / "note").write_text("")
    copy.with_name("stage2").mkdir()
    settings = settings_for(model, tmp_path, "--steps 1")
    train.train(settings)
    assert "moved to stage1.old1" in capsys.readouterr().out
    assert copy.with_name("stage1.old1").joinpath("note").exists()
    assert not (copy / "note").exists() and len(rows_of(copy)) == 1
    assert [*copy.parent.glob("stage2*")] == [copy.with_name("stage2.old1")]
    message(train.train, dataclasses.replace(settings, mix={"nothing": 1}))
    assert copy.exists()  # an error in the settings does not move the run


@pytest.mark.fault(11)
def test_a_resume_cuts_the_metrics_at_its_checkpoint(copy, model, tmp_path):
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "reward": 1.0}\n{"step": 2, "rew')
    train.train(settings_for(model, tmp_path, "--steps 2 --resume"))
    assert [row["step"] for row in rows_of(copy)] == [0, 1] and "loss" in rows_of(copy)[1]


def test_a_resumed_run_keeps_the_settings_that_are_not_given(copy, model, tmp_path):
    words = f"--output_dir {tmp_path} --run_name t --resume --steps 2"
    before, after = saved_settings(str(copy)), parse(words.split())
    assert after == dataclasses.replace(before, output_dir=str(tmp_path), resume=True, steps=2)
    # A flag that is given takes what it implies with it.
    assert parse([*words.split(), "--algorithm", "dapo"]).clip_high == 0.28
    for more in ("--recipe r1_searcher", "--model other/one"):
        with pytest.raises(InputError, match=r"was made with --(recipe ur2|model .*): do"):
            train.train(parse(f"{words} {more}".split()))
    told = message(train.train, parse(f"{words} --stage 2".split()))
    assert f"no checkpoint in {copy.parent}/stage2; give the --stage of {copy} (" in told


def test_stage_two_is_resumed_from_the_model_that_it_started_from(model, tmp_path):
    one, two = parse_stages(flags(model, tmp_path, "--stage 1,2"))
    for settings in (one, two):
        folder = tmp_path / "t" / f"stage{settings.stage}"
        (folder / "checkpoint-000001").mkdir(parents=True)
        (folder / "settings.json").write_text(settings_text(settings))
    bare = f"--output_dir {tmp_path} --run_name t --stage 2 --resume".split()
    assert parse(bare) == dataclasses.replace(two, resume=True)


def test_a_run_can_only_be_resumed_with_its_critic(copy, model, tmp_path):
    with pytest.raises(InputError, match="was made with another --algorithm"):
        train.train(settings_for(model, tmp_path, "--steps 2 --resume --algorithm ppo"))


@needs_peft
def test_a_lora_run_can_only_be_resumed_with_its_rank(copy, model, tmp_path):
    train.train(settings_for(model, tmp_path, "--run_name lora --steps 1 --lora_rank 4"))
    for more, rank in (("--lora_rank 4", 0), ("--run_name lora --lora_rank 2", 4)):
        with pytest.raises(InputError, match=f"was made with --lora_rank {rank}: do the same"):
            train.train(settings_for(model, tmp_path, f"--resume {more}"))


def test_stage_two_starts_from_stage_ones_last_checkpoint(copy, model, tmp_path, capsys):
    state = build_state(settings_for("", tmp_path, "--stage 2 --task_mixing false"))
    last = f"{copy}/checkpoint-000001"
    assert f"stage 2 starts from {last}" in capsys.readouterr().out
    assert same(state.policy.parameters(), load_policy(last)[0].parameters())
    # --model has precedence; with --stage 1,2 it applies to stage 1 only.
    assert build.starting_model(settings_for(model, tmp_path, "--stage 2")) == model
    one, two = parse_stages(flags(model, tmp_path, "--stage 1,2"))
    assert one.model == model and build.starting_model(two) == last


def test_a_run_that_starts_from_the_built_in_model_has_its_settings(tmp_path):
    """A run that starts from a checkpoint of the built-in world has that world's learning rates."""
    first = tmp_path / "t" / "stage1"
    (first / "checkpoint-000001").mkdir(parents=True)
    words = f"--output_dir {tmp_path} --run_name t --stage".split()
    tiny = settings_text(parse([*words, "1"]))
    for text, rates in ((tiny, [3e-4, 5e-4]), (json.dumps({"model": "m"}), [2e-6, 2e-6])):
        (first / "settings.json").write_text(text)
        two = parse([*words, "2"])
        assert two.lr == rates[1] and in_built_in_world(two) == (text == tiny)
        assert [s.lr for s in parse_stages([*words, "1,2", "--model", str(first)])] == rates


# ------------------------------------------------------------------- settings saved in checkpoints


def test_saved_settings_are_read_back_unchanged_and_other_models_have_none(
    finished, model, tmp_path
):
    settings = settings_for(model, finished.parent.parent, "--steps 1")
    assert saved_settings(str(checkpoints(finished)[-1])) == settings
    assert saved_settings(model) is None and saved_settings("") is None
    older = dataclasses.asdict(settings) | {"index": "i"}  # a flag that has gone
    (tmp_path / "settings.json").write_text(json.dumps(older))
    assert saved_settings(str(tmp_path)) == settings


# -------------------------------------------------------------------- errors before training starts


def test_a_prompt_that_is_too_long_is_a_one_line_error_before_training_starts(
    model, tmp_path, capsys
):
    data = tmp_path / "data.jsonl"
    reference = {"id": "1", "title": "t", "text": "x"}
    fields = {"question": "ada " * 400, "answers": ["me"], "references": [reference]}
    data.write_text(json.dumps(fields | {"id": "1"}))
    arguments = flags(model, tmp_path, f"--data {data} --corpus from-data")
    assert "question 1: its prompt has" in command_line(train.main, arguments, capsys)
    assert not (tmp_path / "t").exists()  # no run was started


@pytest.mark.parametrize(
    "path, more, fragment",
    [
        of_fault(257, "no-model", "", "no-model: no such directory"),
        (None, "--mix nothing=1", "questions of nothing, and the data has 0"),
        (None, "--resume", "no checkpoint in"),
        (None, "--prompt_file none.txt", "none.txt"),
        (None, "--output_dir /dev/null/runs", "--output_dir /dev/null/runs"),
    ],
)
def test_errors_that_are_quick_to_find_come_before_the_corpus_is_read(
    path, more, fragment, model, tmp_path, capsys, monkeypatch
):
    reason = "the corpus was read first"
    monkeypatch.setattr(build, "load_documents", lambda *_: pytest.fail(reason))
    start = model if path is None else tmp_path / path
    assert fragment in command_line(train.main, flags(start, tmp_path, more), capsys)


def test_processes_that_are_not_connected_are_a_one_line_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    check_processes(3)
    assert "3 processes were started and 1 take part: set ACC" in message(check_processes, 1)


LIMITED = "250000 100000"  # a container's quota of 2.5 cores


@pytest.mark.parametrize(
    "environment, quota, threads",
    [
        ({}, "max 100000", 8),  # no quota, or not in a container
        ({}, LIMITED, 3),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, "", 4),  # torchrun sets 1
        ({"OMP_NUM_THREADS": "1"}, "", 7),  # the user's value stays
    ],
)
def test_the_cores_of_a_machine_are_shared_by_its_processes(
    environment, quota, threads, monkeypatch, tmp_path
):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "ACCELERATE_DYNAMO_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(build, "QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(quota)
    torch.set_num_threads(7)
    set_threads()
    assert torch.get_num_threads() == threads


# ---------------------------------------------------------------------------------------- trackers
def test_a_tracker_gets_the_settings_and_every_step(model, tmp_path, monkeypatch):
    calls = []
    tracker = Mock(log=lambda values, step, **_: calls.append((step, values["reward"])))

    def init_trackers(accelerator, name, values):
        calls.extend([name, values["recipe"]])
        accelerator.trackers = [tracker]

    monkeypatch.setattr(build, "get_available_trackers", lambda: [LoggerType.TRACKIO])
    monkeypatch.setattr(Accelerator, "init_trackers", init_trackers)
    folder = train.train(settings_for(model, tmp_path, "--steps 2 --report_to trackio"))
    steps = [(row["step"], row["reward"]) for row in rows_of(folder)]
    assert calls == [f"{folder.parent.name}-stage1", "ur2", *steps]
    tracker.finish.assert_called_once()


def test_a_tracker_that_is_not_installed_is_a_one_line_error(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "get_available_trackers", lambda: [])
    error = command_line(train.main, ["--report_to", "wandb", "--output_dir", tmp_path], capsys)
    assert error == "error: --report_to wandb: pip install wandb"
