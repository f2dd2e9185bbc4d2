"""Tests errors.py: the preparation of a command before torch, and the line of an error."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, command_line

from errors import SPINS, run_main

REPORT = """
from tqdm import tqdm
bar = tqdm(file=open(os.devnull, "w"))
print(type(tqdm.get_lock()).__module__, tqdm.monitor_interval, bar.mininterval)
print(os.environ.get("GOMP_SPINCOUNT"))
"""


def report(code: str, **environment) -> list[str]:
    """Returns the words that the code and then REPORT print in a new process."""
    # A test that ran before, in this process, may have prepared a command.
    set_by_commands = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "TQDM_MININTERVAL")
    inherited = {k: v for k, v in os.environ.items() if k not in set_by_commands}
    words = [sys.executable, "-c", f"import os, sys\n{code}\n{REPORT}"]
    options = {"cwd": ROOT, "env": inherited | environment, "text": True}
    return subprocess.check_output(words, **options).split()


@pytest.mark.parametrize(
    "environment, spins",
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_errors_sets_tqdm_and_the_spin_count_unless_the_user_set_it(environment, spins):
    assert report("import errors", **environment) == ["_thread", "0", "30.0", spins]


@pytest.mark.parametrize(
    "start, error",
    [
        ("train.py --stpes 3", "error: train.py: unknown flag --stpes (did you mean --steps?)"),
        ("eval.py --splt dev", "error: eval.py: unknown flag --splt (did you mean --split?)"),
        ("train.py --help", ""),
        ("eval.py --predictions={}/p.jsonl", ""),
        ("-m papers", ""),
    ],
)
def test_errors_help_and_scoring_import_neither_torch_nor_transformers(start, error, tmp_path):
    record = {"id": "1", "question": "?", "golds": ["a"], "prediction": "a"}
    (tmp_path / "p.jsonl").write_text(json.dumps(record) + "\n")
    process = run_without(("torch", "transformers"), start.format(tmp_path).split(), tmp_path)
    assert process.stderr.startswith(error) and "imported" not in process.stderr
    assert process.returncode == (2 if error else 0)


def test_the_files_of_formulas_need_only_torch(tmp_path):
    """All run in one process, because importing torch takes longer than the formulas."""
    formulas = "kl.py ppo.py grpo.py dapo.py reinforce_pp.py".split()
    code = f"import runpy; [runpy.run_path(name, run_name='__main__') for name in {formulas}]"
    process = run_without(("transformers", "accelerate"), ["-c", code], tmp_path)
    assert (process.returncode, process.stderr) == (0, "")


def run_without(libraries: tuple, words: list[str], folder) -> subprocess.CompletedProcess:
    """Runs `python WORDS`; importing one of the libraries ends the process with an error."""
    for name in libraries:
        (folder / f"{name}.py").write_text("raise SystemExit('it was imported')")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["train", "eval", "ask", "coldstart", "lab.plan"])
def test_each_long_command_is_prepared_before_torch_is_imported(name):
    without_torch = "import contextlib\nsys.modules['torch'] = None  # to import it is an error"
    stopped = f"with contextlib.suppress(ImportError):\n    import {name}\n    sys.exit(1)"
    assert report(f"{without_torch}\n{stopped}")[3:] == [SPINS]


@pytest.mark.parametrize(
    "error, expected",
    [
        (FileNotFoundError(2, "No such file", "q"), "error: [Errno 2] No such file: 'q'"),
        (KeyError("x"), f"error: KeyError: 'x' ({__file__}, line N; --traceback shows the calls)"),
        (SyntaxError("x", ("own.py", 3, 1, "")), "error: SyntaxError: x (own.py, line 3; --trace"),
    ],
)
def test_an_error_is_one_line_and_other_libraries_errors_have_type_and_place(
    error, expected, capsys, monkeypatch
):
    def fails(_=None):
        raise error

    line = fails.__code__.co_firstlineno + 1
    assert command_line(fails, [], capsys).startswith(expected.replace("line N", f"line {line}"))
    monkeypatch.setattr("sys.argv", ["train.py", "--traceback"])
    with pytest.raises(type(error)):
        run_main(fails)
