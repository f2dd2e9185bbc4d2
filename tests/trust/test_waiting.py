"""Processes that wait for each other, for a locked file, for other models or for searches."""

import os
import runpy
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, flags, message
from processes import in_two_processes, wait_for

import train
from engines.slots import pick
from errors import LOST, InputError, run_main
from plumbing import build
from plumbing.files import checkpoints
from settings import Settings
from summarizer import SUMMARY_LOG

fault = pytest.mark.fault


# --------------------------------------------------------------------------- waiting for a process


def trains_until_one_stops(folder: Path, arguments: list[str], stopped: int) -> None:
    """Trains. Process `stopped` stops when it should sample step 3, and the other one then sends
    itself SIGTERM.
    """
    build.PATIENCE, build.set_threads = 1, lambda: None
    pid_file, real = folder / "process", train.sample_draw

    def stops(state, step, draw):
        if step == 3:
            pid_file.write_text(f"{os.getpid()} stops")
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        return real(state, step, draw)

    def end_when_the_other_stops() -> None:
        wait_for(pid_file, "stops")
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == str(stopped):
        train.sample_draw = stops
    else:
        threading.Thread(target=end_when_the_other_stops, daemon=True).start()
    try:
        with pytest.raises(SystemExit) as ended:
            train.main(arguments)
    finally:
        os.kill(int(pid_file.read_text().split()[0]), signal.SIGCONT)
    os._exit(ended.value.code != 143)


@fault(307)
@pytest.mark.parametrize("stopped, saved", [(0, []), (1, ["checkpoint-000003"])])
def test_sigterm_ends_the_wait_for_a_stopped_process_and_the_first_one_saves(
    stopped, saved, model, tmp_path
):
    arguments = flags(model, tmp_path, "--steps 5000 --save_every 5000")
    in_two_processes(trains_until_one_stops, tmp_path, arguments, stopped)
    assert [path.name for path in checkpoints(tmp_path / "t" / "stage1")] == saved


@fault(308)
def test_the_wait_between_processes_grows_with_turns_and_timeout(monkeypatch):
    handlers = []
    monkeypatch.setattr(
        build, "Accelerator", lambda kwargs_handlers, **_: handlers.extend(kwargs_handlers)
    )
    build.make_accelerator(Settings(max_searches=3, timeout=10.0, max_turn_tokens=90))
    assert handlers[0].timeout == timedelta(minutes=30 + 4 * (10 + 1.5))


# ------------------------------------------------------------------------- errors of a lost process


def lines_of(error: Exception) -> list[str]:
    """Returns what `run_main` prints about an error that it knows."""

    def fails():
        raise error

    printed = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("builtins.print", lambda *lines, **_: printed.extend(lines))
        run_main(fails)
    return printed


GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:1"


@fault(309)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("Gloo connectFullMesh failed with [../gloo/gloo/x.cc:1] no error"),
        torch.distributed.DistBackendError("NCCL error in ..."),
        torch.distributed.DistNetworkError("the client socket has failed"),
        torch.distributed.DistStoreError("wait timeout after 1ms"),
    ],
)
def test_a_lost_process_is_recognised_by_the_type_of_the_error(error):
    assert lines_of(error) == [f"error: {LOST}"]


@fault(309)
@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file", "/data/gloo/x.jsonl"),
        RuntimeError("PytorchStreamReader failed reading /models/gloo/trainer.pt:1"),
    ],
)
def test_an_error_about_a_path_named_gloo_is_not_taken_for_a_lost_process(error):
    def fails():
        raise error

    with pytest.raises(type(error)):
        run_main(fails)


# ------------------------------------------------------------------------- one evaluation at a time


@fault(310)
def test_an_evaluation_under_a_launcher_of_several_processes_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["eval.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
    output = capsys.readouterr()
    assert ended.value.code == 2 and output.out == ""
    assert output.err == "error: eval.py works in one process: start it as `python eval.py`\n"


# ------------------------------------------------------------------------ other models and searches


@fault(315)
def test_stored_vectors_lie_in_the_output_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(output_dir="mine", retriever="dense", encoder="e5", model="m")
    folders = []
    monkeypatch.setattr(
        "retrievers.dense.DenseRetriever", lambda *arguments: folders.append(arguments[-1])
    )
    build.build_search(settings, [])
    assert folders == ["mine"]

    def raise_log_path(_, documents, device, log):
        raise InputError(log)

    monkeypatch.setattr(build, "build_search", raise_log_path)
    monkeypatch.setattr(build, "starting_model", lambda _: ("", ""))
    assert message(build.build_state, settings) == str(Path("mine", SUMMARY_LOG))
    assert not [*tmp_path.iterdir()]


@fault(316)
def test_every_device_but_the_cpu_samples_without_float64(monkeypatch):
    on_mps, calls = SimpleNamespace(device=torch.device("mps")), []
    monkeypatch.setattr(
        torch, "multinomial", lambda *arguments: calls.append(arguments) or "tokens"
    )
    assert pick(on_mps) == "tokens" and calls == [(on_mps, 1)]
