"""What is built or refused before any model is loaded."""

import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from engines.slots import pick

fault = pytest.mark.fault


@fault(310)
def test_an_evaluation_under_a_launcher_of_several_processes_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["eval.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
    output = capsys.readouterr()
    assert ended.value.code == 2 and output.out == ""
    assert output.err == "error: eval.py works in one process: start it as `python eval.py`\n"


@fault(316)
def test_every_device_but_the_cpu_samples_without_float64(monkeypatch):
    on_mps, calls = SimpleNamespace(device=torch.device("mps")), []
    monkeypatch.setattr(
        torch, "multinomial", lambda *arguments: calls.append(arguments) or "tokens"
    )
    assert pick(on_mps) == "tokens" and calls == [(on_mps, 1)]
