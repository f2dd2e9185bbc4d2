"""Tests dapo.py: informative groups, token weights, and the four departures from GRPO."""

from types import SimpleNamespace

import torch

import dapo
from policy import Batch

# Two questions with two answers each. Row 0 has a document in the middle, row 2 is long, row 3 has
# one token.
MASK = torch.tensor([[1.0, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])


CHOSEN = SimpleNamespace(
    clip_low=0.2, clip_high=0.28, kl_coef=0.0, kl_estimator="k2", loss_aggregation="token"
)


def make_batch(overlong=(False,) * 4, **changes) -> Batch:
    tokens, rewards = torch.zeros(4, 5, dtype=torch.long), torch.tensor([1.0, 0.0, 0.0, 2.0])
    old = -torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) - 0.1
    batch = Batch(tokens, MASK.clone(), old, rewards, 2, **changes)
    batch.overlong = torch.tensor(overlong)
    return batch


# --------------------------------------------------------------------------------- dynamic sampling


def test_only_a_group_with_right_and_wrong_answers_is_informative():
    correct = torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0, 0])
    assert dapo.informative_groups(correct, 3).tolist() == [True] * 3 + [False] * 6
    # An unknown answer does not differ from any other.
    assert not dapo.informative_groups(torch.tensor([1.0, float("nan")]), 2).any()
    # Every row of a group counts: in one group only the last row differs, in the other only the
    # first.
    assert dapo.informative_groups(torch.tensor([0.0, 0, 0, 1, 0, 1, 1, 1]), 4).all()


# ----------------------------------------------------------------------------- weights and overlong


def loss_and_gradient(batch):
    """Returns (Σ weight · loss, gradient over the log-probs) of a first update."""
    batch.advantages = dapo.compute_advantages(batch, CHOSEN)
    logprobs = batch.old_logprobs.clone().requires_grad_()
    loss, _ = dapo.compute_loss(logprobs, batch, CHOSEN)
    total = (dapo.compute_token_weights(batch, CHOSEN) * loss).sum()
    total.backward()
    return total.item(), logprobs.grad


def test_an_overlong_trajectory_has_no_gradient_but_the_rest_of_its_group_has():
    _, gradient = loss_and_gradient(make_batch(overlong=(False, False, True, False)))
    # In the first update each counted model token has −A / 5; groups [1, 0] and [0, 2] have
    # ±0.7071, because the overlong row counts in its group's mean.
    expected = torch.tensor([-0.14142, 0.14142, 0.0, -0.14142])[:, None] * MASK
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=0)
    total, gradient = loss_and_gradient(make_batch(overlong=(True,) * 4))
    assert total == 0 and gradient.eq(0).all()  # not NaN


def test_by_question_all_groups_have_equal_weight_and_overlong_rows_none():
    # The groups have 2 + 2 and 4 + 1 tokens; the 4 of row 2 are overlong: 1/4/2 and 1/1/2 per
    # token.
    batch = make_batch(overlong=(False, False, True, False), questions=torch.tensor([0, 0, 1, 1]))
    weights = dapo.compute_token_weights(batch, SimpleNamespace(loss_aggregation="question"))
    torch.testing.assert_close(weights, torch.tensor([[1 / 8], [1 / 8], [0], [1 / 2]]) * MASK)
    # By trajectory the three that are left weigh 1/3 each, and their 2, 2 and 1 tokens share it.
    weights = dapo.compute_token_weights(batch, SimpleNamespace(loss_aggregation="sequence"))
    torch.testing.assert_close(weights, torch.tensor([[1 / 6], [1 / 6], [0], [1 / 3]]) * MASK)


def test_clip_higher_by_hand():
    # The ratio 1.35 of a good token is clipped to 1.28, and 0.75 of a bad one to 0.8.
    batch = make_batch()
    batch.old_logprobs = torch.zeros(4, 4)
    batch.advantages = torch.tensor([1.0, -1, 1, -1])[:, None].expand(4, 4)
    ratio = torch.tensor([1.35, 0.75, 1.25, 1.25])[:, None].expand(4, 4)
    loss, _ = dapo.compute_loss(ratio.log(), batch, CHOSEN)
    expected = torch.tensor([-1.28, 0.8, -1.25, 1.25])[:, None] * MASK
    torch.testing.assert_close(loss, expected)
