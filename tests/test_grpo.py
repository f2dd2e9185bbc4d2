"""Tests grpo.py: the advantages within a group, and the three functions that training calls."""

from types import SimpleNamespace

import pytest
import torch

import grpo

# --------------------------------------------------------------------------------------- advantages


def test_the_advantages_of_the_worked_group():
    # The mean is 0.88; the squared distances are 0.2704 + 0.2304 + 0.4624 + 2.3104 + 0.7744 =
    # 4.048; the std is √(4.048 / 4) = 1.00598.
    advantages = grpo.group_normalize(torch.tensor([1.4, 0.4, 0.2, 2.4, 0.0]), 5).tolist()
    assert advantages == pytest.approx([0.5169, -0.4771, -0.6760, 1.5110, -0.8748], abs=1e-4)


@pytest.mark.parametrize("size", [2, 5, 7, 16])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1.0, -2.3, 0.0])
def test_equal_rewards_give_exactly_zero(reward, size):
    assert grpo.group_normalize(torch.full((size,), reward), size).tolist() == [0.0] * size


def test_rewards_that_differ_only_by_rounding_are_equal():
    rewards = torch.tensor([0.1 + 0.2 + 0.3, 0.3 + 0.3, 0.6, 0.6 + 1e-16], dtype=torch.float64)
    assert len(set(rewards.tolist())) > 1
    assert grpo.group_normalize(rewards, 4).tolist() == [0.0] * 4


def test_a_group_of_one_has_no_advantage():
    assert grpo.group_normalize(torch.tensor([3.0, -1.0]), 1).tolist() == [0.0, 0.0]


def test_an_unknown_reward_is_in_neither_mean_nor_std():
    # [3, unknown, 1] has mean 2 and std √((1 + 1) / 1) = 1.4142.
    advantages = grpo.group_normalize(torch.tensor([3.0, float("nan"), 1.0]), 3)
    assert advantages.tolist() == pytest.approx([0.7071, 0.0, -0.7071], abs=1e-4)


def test_the_share_of_groups_with_equal_rewards():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.1, 0.1, 0.3, 0.1])
    assert grpo.frac_reward_zero_std(rewards, 2) == 0.5  # the second and the third of four
    assert grpo.frac_reward_zero_std(rewards, 1) == 1.0


def test_kl_in_the_reward_is_summed_over_model_tokens_only():
    # Row 0 has k1 1 + 2 = 3, row 1 has 5 (its second column is a document with k1 NaN). With
    # kl_coef 0.1 the rewards are 1 − 0.3 = 0.7 and 1 − 0.5 = 0.5: they differ now, which gives
    # ±0.7071.
    batch = SimpleNamespace(
        rewards=torch.tensor([1.0, 1.0]),
        group_size=2,
        response_mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        old_logprobs=torch.tensor([[1.0, 2.0], [5.0, float("nan")]]),
        ref_logprobs=torch.zeros(2, 2),
    )
    settings = SimpleNamespace(kl_estimator="k1", kl_coef=0.1)
    advantages = grpo.compute_advantages(batch, settings)
    assert advantages[0].tolist() == pytest.approx([0.7071, 0.7071], abs=1e-4)
    assert advantages[1].tolist() == pytest.approx([-0.7071, 0.0], abs=1e-4)


# --------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize(
    "estimator, value, slope", [("k2", 0.600567, 1.732868), ("k3", 0.386294, 1.0)]
)
def test_kl_in_the_loss_is_added_with_its_coefficient(estimator, value, slope):
    # One token has A 0, π 0.5, π_old 0.4, ref 0.25, kl_coef 2. k2: 2 · 1.25 · 0.240227 = 0.600567,
    # gradient 2 · 1.25 · ln 2 = 1.732868. k3: 2 · 0.193147 = 0.386294, gradient 2 · (1 − 0.5) = 1.
    batch = SimpleNamespace(
        advantages=torch.zeros(2, 1),
        mismatch_weights=None,
        response_mask=torch.ones(2, 1),
        old_logprobs=torch.full((2, 1), 0.4).log(),
        ref_logprobs=torch.full((2, 1), 0.25).log(),
    )
    settings = SimpleNamespace(clip_low=0.2, clip_high=0.28, kl_coef=2.0, kl_estimator=estimator)
    logprobs = torch.full((2, 1), 0.5).log().requires_grad_()
    total = (grpo.compute_loss(logprobs, batch, settings)[0] / 2).sum()
    total.backward()
    assert total.item() == pytest.approx(value, rel=1e-4)
    assert logprobs.grad.sum().item() == pytest.approx(slope, rel=1e-4)
