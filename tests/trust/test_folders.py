"""The folder of a run: a second start, signals, and files that differ from what the run wrote."""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import shutil
import signal
import sys
import termios
import threading

import pytest
import torch
from conftest import command_line, flags, message, of_fault, rows_of, settings_for
from processes import command, exit_code, heed_signals
from safetensors.torch import load_file, save_file
from test_checkpoints import FOUR, RUN, run, whole

import policy
import train
from plumbing import checkpoint, files
from plumbing.files import checkpoints, taken, unreadable
from policy import load_policy

fault = pytest.mark.fault
LONG = "--steps 4 --save_every 1000"


@pytest.fixture(autouse=True)
def signals_are_heeded():
    """Gives each test the default handlers of SIGINT and SIGHUP, and restores the former ones."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGHUP)]
    heed_signals()
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def resumed(run, model, tmp_path):
    """Returns a function that resumes the run after the 4 steps and trains until there are 6."""
    return lambda: train.train(settings_for(model, tmp_path, f"{RUN} 6 --resume"))


# --------------------------------------------------------------------------- two runs in one folder
@fault(236)
@pytest.mark.parametrize("stages", ["1", "1,2"])
def test_a_start_does_not_move_a_stage_that_another_run_writes(
    stages, run, model, tmp_path, capsys
):
    second = run.with_name("stage2")
    second.mkdir()
    with taken(run.parent):
        error_line = command_line(train.main, flags(model, tmp_path, f"--stage {stages}"), capsys)
    assert f"{run.parent}: another process trains there" in error_line
    assert {path.name for path in run.parent.glob("stage*")} == {"stage1", "stage2"}


# ---------------------------------------------------------------------------------------- signals
def raising(real, call: int, *numbers: int):
    """Returns a wrapper of `real` that raises these signals in the call of this number."""
    calls = []

    def called(*arguments):
        calls.append(real)
        for number in numbers if len(calls) == call else ():
            signal.raise_signal(number)
        return real(*arguments)

    return called


def ends_with(code: int, arguments: list[str]) -> None:
    """Asserts that training exits with this code and leaves the signal handlers as they were."""
    before = [*map(signal.getsignal, checkpoint.SIGNALS)]
    with pytest.raises(SystemExit, match=str(code)):
        train.main(arguments)
    assert [*map(signal.getsignal, checkpoint.SIGNALS)] == before


@fault(21)
@pytest.mark.parametrize(
    "number, where, saved",
    [
        (signal.SIGTERM, "collect", "2"),
        (signal.SIGTERM, "prepare", "3"),
        (signal.SIGINT, "prepare", "3"),
    ],
)
def test_a_signal_saves_what_was_learned(number, where, saved, model, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(train, where, raising(getattr(train, where), 3, number))
    ends_with(128 + number, flags(model, tmp_path, LONG))
    (path,), (out, err) = checkpoints(tmp_path / "t" / "stage1"), capfd.readouterr()
    assert path.name[-1] == saved and not unreadable(path)
    assert (
        out.splitlines()[-1]
        == f"ended by {number.name}; last checkpoint: {path} (go on with --resume)"
    )
    assert err.count("Ctrl-C again ends at once") == (number == signal.SIGINT)


@fault(242)
def test_a_signal_that_nohup_ignores_stays_ignored(model, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with checkpoint.as_command(settings_for(model, tmp_path)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


@fault(243)
def test_no_step_is_lost_if_ctrl_c_also_ends_the_tee_that_reads_the_output(
    model, tmp_path, monkeypatch
):
    def closed(bar, *_):
        if not bar.disable:  # bars within a step are shown only on a terminal
            raise BrokenPipeError

    monkeypatch.setattr(files.tqdm, "write", closed)
    monkeypatch.setattr(files.tqdm, "update", closed)
    monkeypatch.setattr(train, "prepare", raising(train.prepare, 3, signal.SIGINT))
    ends_with(130, flags(model, tmp_path, LONG))
    assert checkpoints(tmp_path / "t" / "stage1")


@pytest.mark.parametrize(
    "first, code, saved",
    [
        of_fault(244, "SIGTERM", 143, 1),
        of_fault(244, "SIGHUP", 129, 1),
        of_fault(245, "SIGINT", 130, 0),
    ],
)
def test_only_a_second_ctrl_c_ends_the_saving(first, code, saved, model, tmp_path, monkeypatch):
    more = [signal.SIGTERM, signal.SIGINT]
    monkeypatch.setattr(policy, "save_merged", raising(policy.save_merged, 1, *more))
    monkeypatch.setattr(train, "collect", raising(train.collect, 3, getattr(signal, first)))
    ends_with(code, flags(model, tmp_path, LONG))
    assert len([*(tmp_path / "t" / "stage1").glob("checkpoint*")]) == saved


@fault(21)
def test_a_signal_during_a_save_ends_the_run_before_another_step(model, tmp_path, monkeypatch):
    save = raising(policy.save_merged, 1, signal.SIGTERM)
    monkeypatch.setattr(policy, "save_merged", save)
    ends_with(143, flags(model, tmp_path, "--steps 4 --save_every 2"))
    assert len(rows_of(tmp_path / "t" / "stage1")) == 2


@fault(261)
@pytest.mark.parametrize("where", ["collect", "prepare"])
def test_a_dry_run_that_a_signal_ends_leaves_no_files(where, model, tmp_path, monkeypatch):
    monkeypatch.setattr(train, where, raising(getattr(train, where), 1, signal.SIGTERM))
    ends_with(143, flags(model, tmp_path, "--dry_run"))
    assert not (tmp_path / "t").exists()


# ----------------------------------------------------------------------------- the files of a run
@fault(249)
def test_another_optimizer_at_resume_is_a_one_line_error(run, resumed):
    settings = json.loads((run / FOUR / "settings.json").read_text())
    (run / FOUR / "settings.json").write_text(json.dumps(settings | {"optimizer": "adamw8bit"}))
    assert "was made with --optimizer adamw8bit: do the same, or leave" in message(resumed)


# ---------------------------------------------------------------------------- weights in the files
def change(path, part: str, changed) -> None:
    """Applies `changed` to the weights whose names contain `part`; None removes a weight."""
    weights = load_file(path / "model.safetensors")
    weights |= {name: changed(weight) for name, weight in weights.items() if part in name}
    remaining = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(remaining, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "part, changed, count, first",
    [of_fault(246, "layers.1.", lambda _: None, 12, "model.layers.1.input_layernorm")],
)
def test_a_model_that_lacks_weights_or_has_integers_is_not_loaded(
    part, changed, count, first, model, tmp_path
):
    path = shutil.copytree(model, tmp_path / "model")
    change(path, part, changed)
    error_line = message(load_policy, str(path))
    assert f"{count} weights are missing, or not floating point: {first}" in error_line
