"""Faults in a user's reward file and flags."""

import copy
import gzip
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, command_line, message, of_fault, rows_of, settings_for
from test_own_reward import own

import data
import eval as evaluation
import retriever
import train
from data import Question, load_questions, named_files
from errors import InputError, Terminated, raise_terminated, rank_of
from plumbing.checkpoint import checkpoints
from rewards import example, own_reward

fault = pytest.mark.fault


def pay(name: str, trajectory=None) -> dict:
    """Returns the reward terms that the named function of a reward file gives."""
    return own_reward(name)(trajectory or example("r_search"))


# ----------------------------------------------------------------------------------- a reward file
@pytest.mark.parametrize(
    "failure, error_type, pattern",
    [
        ("1 / 0", ZeroDivisionError, "division by zero"),
    ],
)
def test_an_error_in_a_reward_at_a_later_step_saves_the_steps_before_it(
    failure, error_type, pattern, own, model, tmp_path
):
    # The check calls the reward twice, and each step 4 times (2 samples of 2 questions), so call 11
    # is the first of the third step.
    text = "import itertools, sys\nCOUNT = itertools.count(1)\ndef mine(t):\n"
    text += f"    next(COUNT) < 11 or {failure}\n    return {{'one': 1.0}}\n"
    more = f"--steps 5 --save_every 5 --reward {own(text)}"
    with pytest.raises(error_type, match=pattern):
        train.train(settings_for(model, tmp_path, more))
    (checkpoint,) = checkpoints(tmp_path / "t" / "stage1")
    assert checkpoint.name == "checkpoint-000002"


CHANGES = """
def mine(t):
    t.response_mask[:] = [1] * len(t.response_mask)
    t.response_ids[:] = t.response_ids[::-1]
    t.prompt_ids.clear()
    t.logprobs.append(0.0)
    t.question.answers[:] = ["Sudria"]
    t.searches[0].query = t.searches[0].documents = None
    t.segments, t.stop_reason = [], "eos"
    return {"one": 1.0}
"""


@fault(282)
def test_a_reward_that_changes_its_trajectory_does_not_change_the_training_data(own):
    row = replace(example("r_search"), question=Question("q", "Where?", ["Norland"]))
    row.prompt_ids, row.response_ids, row.response_mask = [1, 2], [3, 4, 5], [1, 0, 1]
    row.logprobs = [-0.5, 0.0, -0.25]
    before = copy.deepcopy(row)
    assert pay(own(CHANGES), row) == {"one": 1.0} and row == before


def test_sigterm_ends_a_reward_that_does_not_return(own):
    text = "import signal, time\n\ndef mine(t):\n    signal.raise_signal(signal.SIGTERM)\n"
    before = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        with pytest.raises(Terminated):
            pay(own(text + "    for _ in range(3000):\n        time.sleep(0.01)\n"))
    finally:
        signal.signal(signal.SIGTERM, before)


@fault(286)
@pytest.mark.parametrize("inside", [True, False])
def test_a_reward_file_that_switches_gradients_off_does_not_affect_the_update(
    inside, own, model, tmp_path
):
    off = "torch.set_grad_enabled(False)\n"
    reward = "def mine(t):\n    return {'one': len(t.ids)}\n"
    text = reward.replace("    return", f"    {off}    return") if inside else off + reward
    name = own(f"import torch\n{text}")
    try:
        folder = train.train(settings_for(model, tmp_path, f"--steps 1 --reward {name}"))
    finally:
        torch.set_grad_enabled(True)
    assert rows_of(folder)[0]["grad_norm"] > 0


# ------------------------------------------------------------------------------------------- flags
@fault(298)
@pytest.mark.parametrize("text", ["one_hop=1,one_hop=2", "hard=7, easy=1,hard =2"])
def test_a_share_that_is_named_twice_is_a_one_line_error(text, capsys):
    assert "--mix" in command_line(train.main, ["--mix", text], capsys)
