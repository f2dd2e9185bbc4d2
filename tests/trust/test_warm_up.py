"""The built-in model, which a first run makes and others take: damage is noticed, two make one."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from conftest import message, same

from papers import paper_of
from policy import Policy
from prompts import PROTOCOLS
from world import toy
from world.toy import load_reader, load_toy, make_model, toy_path

TINY = paper_of("ur2").world


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    """A warm-up of no steps, and a reader of none: what is kept is the same either way."""
    monkeypatch.setattr(toy, "warm_up", lambda *_: None)

    def reader(tokenizer, world_seed):
        return Policy(make_model(len(tokenizer), world_seed))

    monkeypatch.setattr(toy, "train_reader", reader)


def made(runs) -> Policy:
    return load_toy(0, PROTOCOLS["ur2"], TINY, str(runs))[0]


def cut(path: Path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.fault(234)
@pytest.mark.parametrize(
    "load, damage, file",
    [
        (made, cut, "model.safetensors"),
        (made, flip, "model.safetensors"),
        (made, os.remove, "tokenizer.json"),
        (made, flip, "config.json"),
        (lambda runs: load_reader(0, str(runs))[0], cut, "model.safetensors"),
    ],
)
def test_a_damaged_warm_up_cache_is_made_anew_in_two_lines(load, damage, file, tmp_path, capsys):
    first = [p.clone() for p in load(tmp_path).parameters()]  # else they lie in the file
    (folder,) = (tmp_path / "toy").glob("[!.]*")
    assert "making the built-in" in capsys.readouterr().err
    assert same(load(tmp_path).parameters(), first)
    assert capsys.readouterr().err == ""
    damage(folder / file)
    assert same(load(tmp_path).parameters(), first)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"{folder} is damaged, or of an earlier version: it is removed"
    assert said[1].startswith("making the built-in ") and len(said) == 2


@pytest.mark.fault(234)
def test_a_cache_that_was_not_finished_is_made_anew_and_another_warm_up_s_is_not(tmp_path, capsys):
    made(tmp_path)
    note = toy_path(0, "ur2", runs=str(tmp_path)) / toy.NOTE
    note.unlink()  # killed between the two
    made(tmp_path)
    assert "is damaged" in capsys.readouterr().err and note.exists()
    note.write_text(note.read_text().replace("steps=", "steps=1"))
    said = message(made, tmp_path)
    assert f"{note.parent} was made with another warm-up: remove it" in said


def slowly(runs, log) -> None:
    """A first run, whose warm-up takes a moment."""

    def warm_up(*_):
        with open(log, "a") as file:
            print(os.getpid(), file=file, flush=True)
        time.sleep(0.3)

    toy.warm_up = warm_up
    made(runs)


def first_runs(count: int, *arguments) -> list:
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=slowly, args=arguments, daemon=True) for _ in range(count)]
    for run in runs:
        run.start()
    return runs


@pytest.mark.fault(16)
def test_of_first_runs_at_once_one_makes_the_model_and_the_others_wait(tmp_path):
    runs = first_runs(3, tmp_path, tmp_path / "log")
    for run in runs:
        run.join(30)
    assert [run.exitcode for run in runs] == [0, 0, 0]
    assert len((tmp_path / "log").read_text().split()) == 1


@pytest.mark.fault(16)
def test_a_first_run_that_is_killed_holds_up_no_other(tmp_path):
    runs = first_runs(2, tmp_path, tmp_path / "log")
    log = tmp_path / "log"
    while not log.exists() or not log.read_text().endswith("\n"):
        time.sleep(0.01)
    os.kill(int(log.read_text()), signal.SIGKILL)
    for run in runs:
        run.join(30)
    assert sorted(run.exitcode for run in runs) == [-signal.SIGKILL, 0]
    assert len(log.read_text().split()) == 2
