"""Faults in a user's reward file and flags."""

import copy
from dataclasses import replace

import pytest
from conftest import command_line, settings_for
from test_own_reward import own

import train
from data import Question
from plumbing.checkpoint import checkpoints
from rewards import example, own_reward

fault = pytest.mark.fault


# ----------------------------------------------------------------------------------- a reward file
def test_an_error_in_a_reward_at_a_later_step_saves_the_steps_before_it(own, model, tmp_path):
    # The check calls the reward twice, and each step 4 times (2 samples of 2 questions), so call 11
    # is the first of the third step.
    text = "import itertools, sys\nCOUNT = itertools.count(1)\ndef mine(t):\n"
    text += "    next(COUNT) < 11 or 1 / 0\n    return {'one': 1.0}\n"
    more = f"--steps 5 --save_every 5 --reward {own(text)}"
    with pytest.raises(ZeroDivisionError):
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
    assert own_reward(own(CHANGES))(row) == {"one": 1.0} and row == before


# ------------------------------------------------------------------------------------------- flags
@fault(298)
def test_a_share_that_is_named_twice_is_a_one_line_error(capsys):
    assert "--mix" in command_line(train.main, ["--mix", "hard=7, easy=1,hard =2"], capsys)
