"""The built-in model, which a first run makes and others take: damage is noticed, two make one."""

import multiprocessing
import os
import signal
import time

import pytest
from conftest import message, same

from papers import paper_of
from policy import Policy
from prompts import PROTOCOLS
from world import toy


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    """What is kept is random weights."""
    monkeypatch.setattr(toy, "warm_up", lambda *_: None)
    monkeypatch.setattr(toy, "train_reader", lambda words, seed: Policy(toy.make_model(len(words))))


def made(runs) -> list:
    policy, _ = toy.load_toy(0, PROTOCOLS["ur2"], paper_of("ur2").world, str(runs))
    return [p.clone() for p in policy.parameters()]  # else they lie in the file


def made_reader(runs) -> list:
    return [p.clone() for p in toy.load_reader(0, str(runs))[0].parameters()]


@pytest.mark.fault(234)
@pytest.mark.parametrize("load", [made, made_reader])
def test_a_damaged_warm_up_cache_is_made_anew_and_another_one_is_left(load, tmp_path, capsys):
    first = load(tmp_path)
    (folder,) = (tmp_path / "toy").glob("[!.]*")
    capsys.readouterr()
    for damage in (cut, flip, os.remove):
        damage(folder / "model.safetensors")
        assert same(load(tmp_path), first) and same(load(tmp_path), first)
        said = f"making the built-in {folder.name} anew: what is there is damaged or old"
        assert capsys.readouterr().err == f"{said} (kept in {folder})\n"
    (folder / toy.NOTE).write_text("another\n")
    assert f"{folder} was made with another warm-up: remove it" in message(load, tmp_path)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def slowly(runs, log) -> None:
    def warm_up(*_):
        log.open("a").write(f"{os.getpid()}\n")
        time.sleep(0.3)

    toy.warm_up = warm_up
    made(runs)


@pytest.mark.fault(16)
@pytest.mark.parametrize("killed", [False, True])
def test_of_first_runs_at_once_one_makes_the_model_even_if_another_was_killed(killed, tmp_path):
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    runs = [context.Process(target=slowly, args=(tmp_path, log), daemon=True) for _ in range(3)]
    for run in runs:
        run.start()
    while not log.exists() or not log.read_text():
        time.sleep(0.01)
    if killed:
        os.kill(int(log.read_text()), signal.SIGKILL)
    for run in runs:
        run.join(30)
    assert sorted(run.exitcode for run in runs) == [-9 * killed, 0, 0]
    assert len(log.read_text().split()) == 1 + killed
