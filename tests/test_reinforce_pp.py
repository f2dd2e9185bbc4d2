"""Tests reinforce_pp.py: returns, statistics over trajectories, and the baseline form of UR²."""

from types import SimpleNamespace

import pytest
import torch

import reinforce_pp

NAN = float("nan")
INF = float("inf")


def choose(algorithm="reinforce_pp", **changes):
    settings = {"kl_coef": 0.0, "kl_estimator": "k1", "group_std": True, "whiten_tokens": False}
    return SimpleNamespace(**{"algorithm": algorithm} | settings | changes)


BASELINE = "reinforce_pp_baseline"


def make_batch(rewards, mask, old=None, ref=None, group_size=2):
    mask = torch.tensor(mask, dtype=torch.float)
    return SimpleNamespace(
        response_mask=mask,
        rewards=torch.tensor(rewards),
        group_size=group_size,
        old_logprobs=torch.zeros_like(mask) if old is None else old,
        ref_logprobs=ref,
    )


# ----------------------------------------------------------------------------------------- baseline


def test_the_baseline_form_by_hand():
    # The groups are [1, 0] -> ±0.7071 and [1, 1] -> 0. The batch has mean 0 and
    # std √((0.5 + 0.5) / 3) = 0.57735, which gives ±1.22474.
    advantages = reinforce_pp.baseline_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)
    assert advantages.tolist() == pytest.approx([1.22474, -1.22474, 0.0, 0.0], abs=1e-4)


def test_an_unknown_reward_is_not_counted_in_the_std_of_the_batch():
    # The groups are [1, 0] -> ±0.7071 and [1, unknown] -> 0. Three rewards are known, so the std is
    # √((0.5 + 0.5) / 2).
    advantages = reinforce_pp.baseline_advantages(torch.tensor([1.0, 0.0, 1.0, NAN]), 2)
    assert advantages.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-4)


def test_without_the_groups_std_a_group_with_a_larger_spread_keeps_it():
    # The groups [1, 0] and [3, 0] minus their means are ±0.5 and ±1.5; the batch std √(5 / 3) =
    # 1.29099 gives ±0.38730 and ±1.16190. Divided by the groups' std, all are ±0.70711, and the
    # batch std √(2 / 3) = 0.81650 gives ±0.86603.
    batch = make_batch([1.0, 0.0, 3.0, 0.0], [[1], [1], [1], [1]])
    expected = {False: [0.38730, -0.38730, 1.16190, -1.16190], True: [0.86603, -0.86603] * 2}
    for group_std, advantages in expected.items():
        result = reinforce_pp.compute_advantages(batch, choose(BASELINE, group_std=group_std))
        assert result[:, 0].tolist() == pytest.approx(advantages, abs=1e-4)


@pytest.mark.parametrize(("rewards", "group_size"), [([1.0], 1), ([0.7] * 4, 2), ([1.0, 5.0], 1)])
def test_nothing_to_compare_gives_zero_and_not_nan(rewards, group_size):
    result = reinforce_pp.baseline_advantages(torch.tensor(rewards), group_size)
    assert result.tolist() == [0.0] * len(rewards)


# The answers of group [1, 0] have lengths 3 and 1.
LENGTHS = [1.0, 0.0, 1.0, 1.0], [[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0]]


def test_the_answers_lengths_do_not_change_the_zero_advantage_of_an_equal_group():
    # Statistics are over trajectories, so the group [1, 1] has advantage 0.
    advantages = reinforce_pp.compute_advantages(make_batch(*LENGTHS), choose(BASELINE))
    expected = [[1.22474] * 3, [-1.22474, 0, 0], [0, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-4, rtol=0)


def test_the_baseline_form_over_tokens_by_hand():
    # The same batch, whitened as in R1-Searcher's scripts. Minus the group's mean, the six tokens
    # are 0.5 three times, −0.5, 0 and 0: mean 1/6, std √((3/9 + 4/9 + 2/36) / 5) = 0.40825.
    settings = choose(BASELINE, group_std=False, whiten_tokens=True)
    advantages = reinforce_pp.compute_advantages(make_batch(*LENGTHS), settings)
    expected = [[0.81650] * 3, [-1.63299, 0, 0], [-0.40825, 0, 0], [-0.40825, 0, 0]]
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------ returns


def test_returns_are_discounted_by_model_tokens_and_skip_documents():
    # With γ 0.5: G_4 = 4, G_3 = 2 + 0.5 · 4 = 4, G_0 = 1 + 0.5 · 4 = 3. From G_3 to G_0 is one
    # step, not three, and the rewards on the documents are ignored.
    rewards = torch.tensor([[1.0, NAN, INF, 2, 4]])
    mask = torch.tensor([[1, 0, 0, 1, 1]])
    assert reinforce_pp.returns_to_go(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 0.0, 4.0, 4.0]]


# -------------------------------------------------------------------------------------------- plain


@pytest.mark.parametrize(
    ("lengths", "right", "wrong"),
    [
        # The rewards [1, 0, 1, 1] have mean 3/4 and std √((3/16 + 9/16) / 3) = 0.5.
        ([1, 1, 1, 1], 0.5, -1.5),
        # Four of the seven tokens belong to the wrong answer: mean 3/7, std √((48 + 36) / 49 / 6).
        ([1, 4, 1, 1], 1.06904, -0.80178),
    ],
)
def test_the_plain_form_is_whitened_over_tokens_with_equal_weight(lengths, right, wrong):
    mask = [[1] * n + [0] * (4 - n) for n in lengths]
    batch = make_batch([1.0, 0.0, 1.0, 1.0], mask)
    advantages = reinforce_pp.compute_advantages(batch, choose())
    expected = torch.tensor(mask) * torch.tensor([[right], [wrong], [right], [right]])
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-6)


def test_the_plain_form_with_kl_in_the_reward_by_hand():
    # kl_coef is 0.1. Row 0 has k1 2 and 4 and reward 1: r = −0.2, 0.6; returns 0.4, 0.6. Row 1 has
    # k1 1 and 3 and reward 0: r = −0.1, −0.3; returns −0.4, −0.3. The mean of the four is 0.075,
    # the squares are 0.325² + 0.525² + 0.475² + 0.375² = 0.7475, the std is √(0.7475 / 3) =
    # 0.499166.
    mask = [[1, 0, 1], [1, 1, 0]]
    old = torch.tensor([[2.0, NAN, 4.0], [1.0, 3.0, -INF]])
    batch = make_batch([1.0, 0.0], mask, old, torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -INF]]))
    advantages = reinforce_pp.compute_advantages(batch, choose(kl_coef=0.1))
    assert advantages[0].tolist() == pytest.approx([0.65109, 0.0, 1.05175], abs=1e-4)
    assert advantages[1].tolist() == pytest.approx([-0.95159, -0.75125, 0.0], abs=1e-4)
