"""dapo.py: which groups teach, which tokens weigh, and the four departures at their lines."""

from types import SimpleNamespace

import pytest
import torch

import dapo
import grpo
from policy import Batch

# Two questions, two answers each. Row 0 has a document in the middle, row 2 is long, row 3 has one
# token.
MASK = torch.tensor([[1.0, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])


def choose(**changes):
    chosen = {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "kl_estimator": "k2"}
    chosen["loss_aggregation"] = "token"
    return SimpleNamespace(**(chosen | changes))


CHOSEN = choose()


def make_batch(rewards=(1.0, 0.0, 0.0, 2.0), overlong=(False,) * 4, **changes) -> Batch:
    tokens, rewards = torch.zeros(4, 5, dtype=torch.long), torch.tensor(rewards)
    old = -torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) - 0.1
    batch = Batch(tokens, MASK.clone(), old, rewards, 2, **changes)
    batch.overlong = torch.tensor(overlong)
    return batch


# --------------------------------------------------------------------------------- dynamic sampling


def test_a_group_with_right_and_wrong_answers_is_informative_and_no_other():
    correct = torch.tensor([True, False, False, True, True, True, False, False, False])
    for given in (correct, correct.int(), correct.float()):
        assert dapo.informative_groups(given, 3).tolist() == [True] * 3 + [False] * 6
    # every row of a group decides: only the last differs; only the first differs
    assert dapo.informative_groups(torch.tensor([0, 0, 0, 1, 0, 1, 1, 1]), 4).all()


def test_a_group_of_one_never_teaches():
    assert dapo.informative_groups(torch.tensor([True, False]), 1).tolist() == [False, False]


def test_an_unknown_answer_makes_no_group_informative():
    unknown = float("nan")
    correct = torch.tensor([1.0, unknown, 1.0, 0.0, unknown, 1.0])
    assert dapo.informative_groups(correct, 2).tolist() == [False, False, True, True, False, False]


def test_groups_that_are_all_wrong_teach_where_eq_10_compares_their_searches():
    # When to Search stage 1: wrong after 0, 1, 2 searches earns −1, −0.7, −0.4: mean −0.7, std 0.3
    earned = torch.tensor([-1.0, -0.7, -0.4])
    assert not dapo.informative_groups(torch.zeros(3), 3).any()  # by correctness
    assert dapo.informative_groups(earned, 3).all()  # by the answer term
    assert grpo.group_normalize(earned, 3).tolist() == pytest.approx([-1, 0, 1], abs=1e-4)


# ----------------------------------------------------------------------------- weights and overlong


def test_an_overlong_trajectory_weighs_nothing_and_the_others_share_its_weight():
    # without row 2's four tokens: 5
    expected = MASK / 5
    expected[2] = 0
    batch = make_batch(overlong=(False, False, True, False))
    torch.testing.assert_close(dapo.compute_token_weights(batch, CHOSEN), expected)
    assert torch.equal(batch.response_mask, MASK)  # all tokens are still logged
    batch.overlong = None  # unknown: 9 model tokens
    torch.testing.assert_close(dapo.compute_token_weights(batch, CHOSEN), MASK / 9)


def trained(batch):
    """(Σ weight · loss, its gradient) of a first update."""
    batch.advantages = dapo.compute_advantages(batch, CHOSEN)
    logprobs = batch.old_logprobs.clone().requires_grad_()
    loss, _ = dapo.compute_loss(logprobs, batch, CHOSEN)
    total = (dapo.compute_token_weights(batch, CHOSEN) * loss).sum()
    total.backward()
    return total.item(), logprobs.grad


def test_the_gradient_of_an_overlong_trajectory_is_zero_and_that_of_its_group_is_not():
    _, gradient = trained(make_batch(overlong=(False, False, True, False)))
    # first update: −A / 5 on each counted model token; groups [1, 0] and [0, 2] both give ±0.7071
    expected = torch.tensor([-0.14142, 0.14142, 0.0, -0.14142])[:, None] * MASK
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=0)
    total, gradient = trained(make_batch(overlong=(True,) * 4))
    assert total == 0 and gradient.eq(0).all()  # and not NaN


def test_by_question_a_group_weighs_as_much_as_another_and_its_overlong_rows_nothing():
    # groups of 2 + 2 and 4 + 1 tokens, of whose 5 the 4 of row 2 are overlong: 1/4/2 and 1/1/2
    batch = make_batch(overlong=(False, False, True, False), questions=torch.tensor([0, 0, 1, 1]))
    weights = dapo.compute_token_weights(batch, choose(loss_aggregation="question"))
    torch.testing.assert_close(weights, torch.tensor([[1 / 8], [1 / 8], [0], [1 / 2]]) * MASK)


# ------------------------------------------------------------------------------- advantage and loss


def test_the_advantage_is_grpos_with_overlong_rows_in_the_mean_of_their_group():
    batch = make_batch(overlong=(False, False, True, False))
    # [0, 2]: mean 1, std √2 -> ∓0.7071, though the first of the two gives no gradient
    advantages = dapo.compute_advantages(batch, CHOSEN)
    assert advantages[2:, 0].tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-4)


@pytest.mark.parametrize(
    "ratio, advantage, expected, gradient",
    [
        (1.25, 1.0, -1.25, -1.25),  # above 1.2 and below 1.28: still free
        (1.35, 1.0, -1.28, 0.0),
        (0.75, -1.0, 0.8, 0.0),  # below stays at 0.8
    ],
)
def test_clip_higher_by_hand(ratio, advantage, expected, gradient):
    tokens = torch.zeros(1, 2, dtype=torch.long)
    ones = torch.ones(1, 1)
    batch = Batch(tokens, ones, ones * 0, torch.zeros(1), 1, advantages=ones * advantage)
    logprobs = torch.tensor([[ratio]]).log().requires_grad_()
    loss, _ = dapo.compute_loss(logprobs, batch, CHOSEN)
    loss.sum().backward()
    assert (loss.item(), logprobs.grad.item()) == (pytest.approx(expected), pytest.approx(gradient))


# ----------------------------------------------------------------------------------------- the file


def test_running_the_file_shows_the_four_departures(capsys):
    dapo.main()
    out = capsys.readouterr().out
    assert all(f"departure {number}" in out for number in (1, 2, 3, 4))
    # 8 tokens; 5 without the third trajectory's
    assert "[0.125, 0.125, 0.125]" in out and "[0.200, 0.200, 0.000]" in out
