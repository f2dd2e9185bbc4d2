"""reinforce_pp.py: returns, statistics over trajectories, and the baseline form of UR²."""

import copy
from types import SimpleNamespace

import pytest
import torch

import grpo
import reinforce_pp

NAN, INF = float("nan"), float("inf")


def choose(algorithm="reinforce_pp", **changes):
    chosen = {"clip_low": 0.2, "clip_high": 0.2, "loss_aggregation": "sequence", "kl_coef": 0.0}
    chosen |= {"algorithm": algorithm, "kl_estimator": "k1", "group_std": True}
    return SimpleNamespace(**(chosen | changes))


BASELINE = "reinforce_pp_baseline"


def make_batch(rewards, mask, old=None, ref=None, group_size=2):
    mask = torch.tensor(mask, dtype=torch.float)
    return SimpleNamespace(
        response_mask=mask,
        rewards=torch.tensor(rewards),
        group_size=group_size,
        old_logprobs=torch.zeros_like(mask) if old is None else torch.tensor(old),
        ref_logprobs=None if ref is None else torch.tensor(ref),
        mismatch_weights=None,
    )


# ----------------------------------------------------------------------------------------- baseline


@pytest.mark.parametrize("group_std", [True, False])
def test_a_group_of_equal_rewards_is_exactly_zero_beside_others(group_std):
    rewards = torch.tensor([0.7, 0.7, 0.7, 1.3, 0.4, -0.9, 2.1, 0.1, 0.4])
    advantages = reinforce_pp.baseline_advantages(rewards, 3, group_std)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[3:].abs().min() > 0
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.std().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("rewards", "group_size"), [([1.0], 1), ([0.7] * 4, 2), ([1.0, 5.0], 1)])
def test_nothing_to_compare_gives_zero_and_not_nan(rewards, group_size):
    found = reinforce_pp.baseline_advantages(torch.tensor(rewards), group_size)
    assert found.tolist() == [0.0] * len(rewards)


def test_the_length_of_the_answers_does_not_move_an_equal_group():
    # Group [1, 0] with lengths 3 and 1, group [1, 1]. Token statistics would have the mean (3 − 1)
    # · 0.7071 / 6 = 0.2357 and so give the equal group −0.2357 / 0.5270 = −0.447; over trajectories
    # it is 0.
    batch = make_batch([1.0, 0.0, 1.0, 1.0], [[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0]])
    advantages = reinforce_pp.compute_advantages(batch, choose(BASELINE))
    assert advantages[2:].abs().max() == 0
    assert advantages[0].tolist() == pytest.approx([1.22474] * 3, abs=1e-4)
    assert advantages[1].tolist() == pytest.approx([-1.22474, 0, 0], abs=1e-4)
    groups = grpo.group_normalize(batch.rewards, 2)[:, None].expand(4, 3)
    tokens = groups[batch.response_mask.bool()]
    by_tokens = (tokens - tokens.mean()) / tokens.std(correction=0)
    assert by_tokens[-1].item() == pytest.approx(-0.447, abs=1e-3)


def test_the_settings_choose_the_form_and_its_group_std():
    batch = make_batch([1.0, 0.0, 3.0, 0.0], [[1], [1], [1], [1]])
    found = reinforce_pp.compute_advantages(batch, choose(BASELINE, group_std=False))
    assert found[:, 0].tolist() == pytest.approx([0.38730, -0.38730, 1.16190, -1.16190], abs=1e-4)
    # plain: mean 1, squared distances 0 + 1 + 4 + 1 = 6, std √2 -> [0, −0.70711, 1.41421, −0.70711]
    plain = reinforce_pp.compute_advantages(batch, choose())
    assert plain[:, 0].tolist() == pytest.approx([0.0, -0.70711, 1.41421, -0.70711], abs=1e-4)


def test_the_baseline_form_takes_the_kl_of_the_whole_trajectory():
    # kl_coef 0.1, k1 sums to 3 and 5 on model tokens: rewards 0.7, 0.5; group ±0.7071, batch std 1
    batch = make_batch([1.0, 1.0], [[1, 1], [1, 0]], [[1.0, 2.0], [5.0, NAN]], [[0.0, 0.0]] * 2)
    advantages = reinforce_pp.compute_advantages(batch, choose(BASELINE, kl_coef=0.1))
    assert advantages[0].tolist() == pytest.approx([0.70711, 0.70711], abs=1e-4)
    assert advantages[1].tolist() == pytest.approx([-0.70711, 0.0], abs=1e-4)


# ------------------------------------------------------------------------------------------ returns


def test_returns_are_discounted_by_model_tokens_and_skip_documents():
    # γ 0.5, mask [1, 0, 0, 1, 1]: G_4 = 4, G_3 = 2 + 0.5 · 4 = 4, G_0 = 1 + 0.5 · 4 = 3: one step,
    # not three; NaN and infinity on documents are nobody's.
    rewards, mask = torch.tensor([[1.0, NAN, INF, 2, 4]]), torch.tensor([[1, 0, 0, 1, 1]])
    assert reinforce_pp.returns_to_go(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 0.0, 4.0, 4.0]]


# -------------------------------------------------------------------------------------------- plain


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [4, 1, 2, 3], [1, 4, 1, 1]])
def test_the_plain_form_is_whitened_over_trajectories_whatever_their_lengths(lengths):
    # rewards [1, 0, 1, 1]: mean 0.75, std √((3 · 0.0625 + 0.5625) / 3) = 0.5 -> 0.5, −1.5, 0.5,
    # 0.5. Over the tokens of lengths [1, 4, 1, 1] the mean would be 3 / 7.
    mask = [[1] * n + [0] * (4 - n) for n in lengths]
    batch = make_batch([1.0, 0.0, 1.0, 1.0], mask)
    advantages = reinforce_pp.compute_advantages(batch, choose())
    expected = torch.tensor(mask) * torch.tensor([[0.5], [-1.5], [0.5], [0.5]])
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-6)


def test_the_plain_form_with_kl_in_the_reward_by_hand():
    # kl_coef 0.1. Row 0: k1 2 and 4, reward 1: r = −0.2, 0.6; returns 0.4, 0.6. Row 1: k1 1 and 3,
    # reward 0: r = −0.1, −0.3; returns −0.4, −0.3. Mean (0.5 − 0.35) / 2 = 0.075. Mean squares:
    # (0.325² + 0.525²) / 2 = 0.190625, (0.475² + 0.375²) / 2 = 0.183125; their mean 0.186875 · 2 /
    # 1 = 0.37375; std 0.611351.
    mask, old = [[1, 0, 1], [1, 1, 0]], [[2.0, NAN, 4.0], [1.0, 3.0, -INF]]
    batch = make_batch([1.0, 0.0], mask, old=old, ref=[[0.0, 0.0, 0.0], [0.0, 0.0, -INF]])
    advantages = reinforce_pp.compute_advantages(batch, choose(kl_coef=0.1))
    assert advantages[0].tolist() == pytest.approx([0.53161, 0.0, 0.85875], abs=1e-4)
    assert advantages[1].tolist() == pytest.approx([-0.77697, -0.61339, 0.0], abs=1e-4)


def test_a_trajectory_without_a_model_token_does_not_enter_the_statistics():
    # The fourth row has reward 100 and no token: the other three, [1, 0, 1], have mean 2/3 and std
    # √(1/3) = 0.57735.
    batch = make_batch([1.0, 0.0, 1.0, 100.0], [[1, 1], [1, 0], [1, 1], [0, 0]])
    advantages = reinforce_pp.compute_advantages(batch, choose())
    assert advantages[:, 0].tolist() == pytest.approx([0.57735, -1.15470, 0.57735, 0.0], abs=1e-4)
    assert advantages[3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1], [1, 0], [1, 1]],
        [[1, 1], [0, 0], [0, 0]],
        [[0, 0], [0, 0], [0, 0]],
        # 1 / length / 4 does not sum to 1 in fp32: the mean of 0.7 is a rounding error away
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    ],
)
def test_equal_rewards_or_a_single_trajectory_give_exactly_zero(mask):
    batch = make_batch([0.7] * len(mask), mask, group_size=len(mask))
    assert reinforce_pp.compute_advantages(batch, choose()).abs().max() == 0


# ---------------------------------------------------------------------------------------- interface


def test_loss_and_weights_are_those_of_grpo():
    batch = make_batch([1.0, 0.0], [[1, 0, 1], [1, 1, 1]])
    settings = choose(loss_aggregation="token")
    batch.advantages = reinforce_pp.compute_advantages(batch, settings)
    weights = reinforce_pp.compute_token_weights(batch, settings)
    torch.testing.assert_close(weights, batch.response_mask / 5)
    # ratio e^0.1 = 1.10517; A = ±0.70711 (rewards 1 and 0: mean 0.5, std 0.70711)
    loss, _ = reinforce_pp.compute_loss(torch.full((2, 3), 0.1), batch, settings)
    assert loss[0].tolist() == pytest.approx([-0.78147, 0.0, -0.78147], abs=1e-4)
    assert loss[1].tolist() == pytest.approx([0.78147] * 3, abs=1e-4)


@pytest.mark.parametrize("algorithm", ["reinforce_pp", BASELINE])
def test_the_batch_is_not_changed(algorithm):
    old, ref = [[0.1, 0.2], [0.3, 0.4]], [[0.0, 0.0], [0.0, 0.0]]
    batch = make_batch([1.0, 0.0], [[1, 0], [1, 1]], old, ref)
    before = copy.deepcopy(vars(batch))
    reinforce_pp.compute_advantages(batch, choose(algorithm, kl_coef=0.1))
    assert set(vars(batch)) == set(before)
    tensors = {name: value for name, value in before.items() if torch.is_tensor(value)}
    assert all(torch.equal(value, getattr(batch, name)) for name, value in tensors.items())
