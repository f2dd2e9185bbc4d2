"""The built-in model, which a first run makes and others take: damage is noticed, two make one."""

import os
import signal

import pytest
from conftest import message, same
from processes import exit_codes, log_of, start_process, wait_for, wait_until
from test_checkpoints import cut, flipped

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
    for damage in (cut, flipped, os.remove):
        damage(folder / "model.safetensors")
        assert same(load(tmp_path), first) and same(load(tmp_path), first)
        said = f"making the built-in {folder.name} anew: what is there is damaged or old"
        assert capsys.readouterr().err == f"{said} (kept in {folder})\n"
    (folder / toy.NOTE).write_text("another\n")
    assert f"{folder} was made with another warm-up: remove it" in message(load, tmp_path)


def at_leisure(runs, log, released) -> None:
    def warm_up(*_):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        wait_until(released.exists)

    toy.warm_up = warm_up
    made(runs)


@pytest.mark.fault(16)
@pytest.mark.parametrize("killed", [False, True])
def test_of_first_runs_at_once_one_makes_the_model_even_if_another_was_killed(killed, tmp_path):
    log, released = tmp_path / "log", tmp_path / "released"
    words = (at_leisure, tmp_path, log, released)
    runs = [start_process(*words, log=tmp_path / "said") for _ in range(3)]
    wait_for(log, "\n")
    if killed:
        os.kill(int(log.read_text()), signal.SIGKILL)
        wait_until(lambda: len(log.read_text().split()) == 2)
    released.touch()
    assert sorted(exit_codes(runs, grace=100)) == [-9 * killed, 0, 0], log_of(tmp_path / "said")
    assert len(log.read_text().split()) == 1 + killed
