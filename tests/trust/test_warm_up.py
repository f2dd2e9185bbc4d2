"""The built-in model, which the first run makes and later runs load: damage is noticed, and of
several first runs only one makes it.
"""

import os
import shutil
import signal

import pytest
from conftest import same
from processes import exit_codes, log_of, start_process, wait_for, wait_until

from papers import PROTOCOLS, paper_of
from world import toy


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    """Skips the training, so the saved weights are random."""
    monkeypatch.setattr(toy, "train_sft", lambda *_: None)


def load_weights(runs) -> list:
    policy, _ = toy.load_toy(0, PROTOCOLS["ur2"], paper_of("ur2").world, str(runs))
    return [p.clone() for p in policy.parameters()]  # copied: they may be mapped from the file


def load_reader_weights(runs) -> list:
    return [p.clone() for p in toy.load_reader(0, str(runs))[0].parameters()]


@pytest.mark.fault(234)
@pytest.mark.parametrize("load", [load_weights, load_reader_weights])
def test_a_built_in_model_that_is_missing_or_of_other_settings_is_made_again(
    load, tmp_path, capsys
):
    first = load(tmp_path)
    (folder,) = (tmp_path / "toy").glob("[!.]*")
    capsys.readouterr()
    shutil.rmtree(folder)
    assert same(load(tmp_path), first) and same(load(tmp_path), first)
    made = f"making the built-in model {folder.name} (kept in {folder})\n"
    assert capsys.readouterr().err == made
    (folder / toy.NOTE).write_text("another\n")
    assert same(load(tmp_path), first)
    assert "making the built-in" in capsys.readouterr().err


def load_when_released(runs, log, released) -> None:
    """Loads the built-in model. A warm-up writes its process number and waits for `released`."""

    def warm_up(*_):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        wait_until(released.exists)

    toy.warm_up = warm_up
    load_weights(runs)


@pytest.mark.fault(16)
@pytest.mark.parametrize("killed", [False, True])
def test_one_of_several_first_runs_makes_the_model_even_if_another_was_killed(killed, tmp_path):
    log, released = tmp_path / "log", tmp_path / "released"
    work = (load_when_released, tmp_path, log, released)
    runs = [start_process(*work, log=tmp_path / "said") for _ in range(3)]
    wait_for(log, "\n")
    if killed:
        os.kill(int(log.read_text()), signal.SIGKILL)
        wait_until(lambda: len(log.read_text().split()) == 2)
    released.touch()
    assert sorted(exit_codes(runs, grace=100)) == [-9 * killed, 0, 0], log_of(tmp_path / "said")
    assert len(log.read_text().split()) == 1 + killed
