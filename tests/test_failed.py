"""Tests failed searches. The policy is not responsible for a failed search, so no reward counts it
and training leaves the row out. The row of a query that a server rejected stays in the batch. In
world 0, with a reward for failed searches, the share of rows that have one rose from 0.08 to 0.98
in 12 steps; with no reward it ended at 0.08.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import rows_of, settings_for
from test_rollout import ASK, Searcher, play_one, rejections
from test_shards import in_two
from test_update import (
    CASES,
    gradient_of,
    largest_difference,
    make_parts,
    name_of,
    trajectory,
)

import train
import update as update_file
from data import SearchResult
from errors import InputError
from plumbing.files import checkpoints
from rewards import REWARDS, example
from train import Rollouts, prepare
from trajectory import Search

FAILED = Search("x", [], "Search is unavailable.", error="no answer within 60 s")
REST = (0, 2, 3, 4, 6, 7)  # eight rows without the second row of each group of four
ROLL_OUT = train.sample_draw


def sample(rows=range(8), failed=()) -> Rollouts:
    """Returns those of eight trajectories of unequal length whose numbers are in `rows`."""
    draw = torch.Generator().manual_seed(0)
    rollouts = Rollouts()
    for number in range(8):
        t = trajectory(draw, 9 - number, (1, 1 + number % 3))
        t.searches = [FAILED] * (number in failed)
        if number in rows:
            rollouts.trajectories.append(t)
            rollouts.reward_terms.append({"answer": number**2 % 5.0})
    rollouts.kept = list(range(len(rows)))
    return rollouts


UNMASKED = replace(CASES[-1], mask_documents=False, kl_coef=0.0)


@pytest.mark.parametrize("settings", [*CASES, UNMASKED], ids=name_of)
def test_the_gradient_is_that_of_the_batch_without_the_failed_rows(settings, monkeypatch):
    monkeypatch.setattr(update_file, "MAX_GRAD_NORM", 1e9)

    def gradient(group_size, *rows):
        of_size = replace(settings, group_size=group_size)
        state = make_parts(of_size)
        state.environment = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
        state.reference = make_parts(settings).policy
        next(state.reference.parameters()).data.mul_(1.1)
        return gradient_of(prepare(state, sample(*rows)), of_size)

    whole, totals = gradient(4, range(8), (1, 5))
    rest, expected = gradient(3, REST)
    assert max(g.abs().max() for g in rest) > 1e-4
    assert largest_difference(rest, whole) < 1e-6
    # With PPO this has the loss and the gradient's norm of the critic too.
    assert totals == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_query_that_the_server_rejects_is_no_search_and_so_no_failed_one(bpe):
    searcher = Searcher(lambda requests: [SearchResult(error="no answer", rejected=True)])
    t, _ = play_one(bpe, [ASK, ASK], search=searcher)  # the second rejection ends the row
    assert rejections(t) == 2 * [("server", "Ana Bell")] and t.stop_reason == "rejected"
    assert not t.searches and not t.failed


def test_no_reward_counts_a_failed_search():
    def reward(name, answer="Sudria"):
        t = example(name.rpartition("_stage")[0], answer)
        t.searches[1] = FAILED  # one of two searches
        return REWARDS[name](t)

    assert reward("ur2_stage1") == {"format": 1, "retrieval": 3, "fallback": 0}  # one search counts
    assert reward("when_to_search_stage1")["answer"] == pytest.approx(-1 + 0.3)
    assert reward("when_to_search_stage2", "Norland")["answer"] == pytest.approx(1 - 0.3)


def fail_at_step_2(state, step, draw):
    """Replaces `train.sample_draw`: every trajectory of step 2 has a failed search."""
    trajectories = ROLL_OUT(state, step, draw)
    for t in trajectories if step == 2 else ():
        t.searches = [FAILED]
    return trajectories


def train_and_stop(settings) -> None:
    train.sample_draw = fail_at_step_2
    with pytest.raises(InputError, match=r"^step 2: a search failed in 100% of the trajectories: "):
        train.train(settings)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_a_step_of_failed_rows_ends_all_processes_after_a_checkpoint(sharding, model, tmp_path):
    # Step 2 would be evaluated, but it was not made.
    more = "--steps 4 --save_every 9 --eval_every 3"
    in_two(sharding, train_and_stop, settings_for(model, tmp_path, more, eval_questions=1))
    folder = tmp_path / "t" / "stage1"
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-000002"]
    rows = [(row["skipped"], row["failed_rows"], "loss" in row) for row in rows_of(folder)]
    assert rows == [(0, 0, True), (0, 0, True), (1, 1, False)]
    assert not any("eval/em" in row for row in rows_of(folder))


def test_if_the_searches_of_the_first_step_fail_no_checkpoint_is_left(model, tmp_path, monkeypatch):
    monkeypatch.setattr("plumbing.checkpoint.MOST_FAILED", -1)
    with pytest.raises(InputError, match="start again"):
        train.train(settings_for(model, tmp_path))
    assert not any(tmp_path.rglob("checkpoint*"))
