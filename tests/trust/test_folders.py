"""Signals during a run, and weights that a model's folder lacks."""

import shutil
import signal

import pytest
from conftest import flags, message, of_fault
from processes import heed_signals
from safetensors.torch import load_file, save_file

import policy
import train
from plumbing import checkpoint, files
from plumbing.files import checkpoints, unreadable
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


# ---------------------------------------------------------------------------- weights in the files
@fault(246)
def test_a_model_that_lacks_weights_is_not_loaded(model, tmp_path):
    path = shutil.copytree(model, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    remaining = {name: weight for name, weight in weights.items() if "layers.1." not in name}
    save_file(remaining, path / "model.safetensors", {"format": "pt"})
    error_line = message(load_policy, str(path))
    first = "model.layers.1.input_layernorm"
    assert f"12 weights are missing, or not floating point: {first}" in error_line
