"""What is built or refused before any model is loaded."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, message

from engines.slots import pick
from errors import InputError
from plumbing import build
from settings import Settings
from summarizer import SUMMARY_LOG

fault = pytest.mark.fault


@fault(310)
def test_an_evaluation_under_a_launcher_of_several_processes_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["eval.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
    output = capsys.readouterr()
    assert ended.value.code == 2 and output.out == ""
    assert output.err == "error: eval.py works in one process: start it as `python eval.py`\n"


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
    monkeypatch.setattr(build, "starting_model", lambda _: "")
    assert message(build.build_state, settings) == str(Path("mine", SUMMARY_LOG))
    assert not [*tmp_path.iterdir()]


@fault(316)
def test_every_device_but_the_cpu_samples_without_float64(monkeypatch):
    on_mps, calls = SimpleNamespace(device=torch.device("mps")), []
    monkeypatch.setattr(
        torch, "multinomial", lambda *arguments: calls.append(arguments) or "tokens"
    )
    assert pick(on_mps) == "tokens" and calls == [(on_mps, 1)]
