"""Tests ppo.py: the surrogate of single tokens, the token weights, GAE, whitening, and a critic
without values on documents.
"""

import copy
from types import SimpleNamespace

import pytest
import torch

import ppo

# Three trajectories with 4, 1 and 0 model tokens; a 0 marks a document or padding.
MASK = torch.tensor([[1, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])


# ---------------------------------------------------------------------------------------- surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.25, 1.0, -1.25, -1.25, False),  # below 1.3: not clipped
        (1.35, 1.0, -1.30, 0.0, True),  # clipped to 1.3
        # The minimum is the unclipped branch: a good token may become likelier again.
        (0.75, 1.0, -0.75, -0.75, False),
        (0.75, -1.0, 0.8, 0.0, True),  # clipped to 0.8
        (1.35, -1.0, 1.35, 1.35, False),  # a bad token that became likelier is never clipped
        (4.0, -2.0, 8.0, 8.0, False),  # so its loss grows without bound
    ],
)
def test_the_clipped_surrogate_of_one_token_by_hand(ratio, advantage, loss, gradient, clipped):
    logprobs = torch.tensor([[ratio]]).log().requires_grad_()
    advantages = torch.tensor([[advantage]])
    result, stats = ppo.clipped_surrogate(logprobs, torch.zeros(1, 1), advantages, 0.2, 0.3)
    result.sum().backward()
    assert result.item() == pytest.approx(loss) and stats["clipped"].item() == clipped
    assert logprobs.grad.item() == pytest.approx(gradient)


# ------------------------------------------------------------------------------------------ weights


def test_sequence_weights_by_hand():
    # Two trajectories have model tokens, so each has weight 1/2, divided among 4 tokens or 1.
    expected = [[0.125, 0, 0.125, 0.125, 0.125], [0, 0, 0.5, 0, 0], [0, 0, 0, 0, 0]]
    assert ppo.sequence_weights(MASK).tolist() == expected


def test_token_weights_by_hand():
    expected = [[0.2, 0, 0.2, 0.2, 0.2], [0, 0, 0.2, 0, 0], [0, 0, 0, 0, 0]]
    torch.testing.assert_close(ppo.token_weights(MASK), torch.tensor(expected))


def test_question_weights_by_hand():
    # In DAPO's objective, 1 / Σ|o| is inside the mean over questions: groups of 2 and 8 model
    # tokens have weight 1/2 each, so 0.25 and 0.0625 per token. Question 2 has no model token.
    mask, questions = torch.ones(5, 4), torch.tensor([5, 1, 5, 1, 2])  # rows are shuffled
    mask[[1, 3], 1:] = mask[4] = 0
    expected = mask * torch.tensor([[0.0625], [0.25], [0.0625], [0.25], [0]])
    batch = SimpleNamespace(response_mask=mask, questions=questions, mismatch_weights=None)
    result = ppo.compute_token_weights(batch, SimpleNamespace(loss_aggregation="question"))
    assert torch.equal(result, expected)


def by_question(mask):
    return ppo.question_weights(mask, torch.arange(len(mask)) // 2)


WEIGHTS = [ppo.sequence_weights, ppo.token_weights, by_question]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_batch_without_a_model_token_has_weight_zero_and_not_nan(weights):
    logprobs = torch.randn(2, 3, requires_grad=True)
    total = (logprobs * 2 * weights(torch.zeros(2, 3))).sum()
    total.backward()
    assert total.item() == 0
    assert logprobs.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


# ---------------------------------------------------------------------------------------------- GAE


def test_gae_by_hand_with_a_document_in_the_middle():
    # With γ 0.5 and λ 0.5, from the end: A = 1 − 0.8 = 0.2; then δ = 0.5 · 0.8 − 0.6 = −0.2 and
    # A = −0.2 + 0.25 · 0.2 = −0.15; then, skipping the document, δ = 0.5 · 0.6 − 0.5 = −0.2 and
    # A = −0.2 + 0.25 · −0.15 = −0.2375. The returns are A + V.
    rewards = torch.tensor([[0.0, 9, 0, 1]])
    values = torch.tensor([[0.5, 7, 0.6, 0.8]])
    advantages, returns = ppo.gae(rewards, values, torch.tensor([[1, 0, 1, 1]]), 0.5, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.2375, 0, -0.15, 0.2]]))
    torch.testing.assert_close(returns, torch.tensor([[0.2625, 0, 0.45, 1.0]]))


# ---------------------------------------------------------------------------------------- whitening


def test_whitening_by_hand_leaves_documents_out():
    # The model tokens 2, 4 and 6 have mean 4 and std (ddof 1) √((4 + 0 + 4) / 2) = 2.
    advantages = torch.tensor([[2.0, 99, 4], [6, float("nan"), float("inf")]])
    result = ppo.whiten(advantages, torch.tensor([[1, 0, 1], [1, 0, 0]]))
    torch.testing.assert_close(result, torch.tensor([[-1.0, 0, 0], [1, 0, 0]]))


@pytest.mark.parametrize("tokens", [7, 1, 0])
def test_equal_advantages_and_a_single_token_are_exactly_zero(tokens):
    mask = torch.arange(8).view(2, 4) < tokens
    assert ppo.whiten(torch.full((2, 4), 0.7), mask).eq(0).all()


# --------------------------------------------------------------------------------------- the critic


@pytest.mark.parametrize(
    ("value", "returns", "loss", "gradient", "clipped"),
    [  # V_old is 0.5, clip 0.2, and the gradient of ½ (V − 1)² is V − 1
        (0.6, 1.0, 0.08, -0.4, False),  # ½ · 0.4²
        (0.9, 1.0, 0.045, 0.0, True),  # moved by more than 0.2: clipped to 0.7, ½ · 0.3²
        (0.1, 1.0, 0.405, -0.9, False),  # moved away: ½ · 0.9² is above the error of 0.3
        (0.1, 0.0, 0.045, 0.0, True),  # moved down, nearer than 0.3: clipped to 0.3
    ],
)
def test_the_value_loss_takes_the_larger_of_the_unclipped_and_the_clipped_error(
    value, returns, loss, gradient, clipped
):
    values = torch.tensor([[value]], requires_grad=True)
    result, was_clipped = ppo.value_loss(values, torch.tensor([[0.5]]), torch.tensor([[returns]]))
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert was_clipped.item() == clipped


def test_a_value_depends_on_the_tokens_before_its_token_but_not_on_that_token(qwen2):
    critic = ppo.Critic(copy.deepcopy(qwen2.language_model.base_model))
    tokens, mask = torch.tensor([[5, 6, 7, 8, 9]]), torch.ones(1, 4)
    assert critic(tokens, mask).eq(0).all()  # at first
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    values = critic(tokens, mask)
    assert values.shape == (1, 4) and values.dtype == torch.float32
    for column in range(4):  # column t: the state before tokens[:, t + 1]
        other = tokens.clone()
        other[0, column + 1] = 11
        changed = (critic(other, mask) - values).abs()[0] > 1e-4
        assert changed.tolist() == [t > column for t in range(4)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 2.0], 1.0),  # a perfect critic
        ([0.0, 1.0], 0.75),  # errors 0 and 1: variance 0.25 of 1
    ],
)
def test_explained_variance_by_hand_on_model_tokens_only(values, expected):
    values, mask = torch.tensor([[values[0], 9, values[1]]]), torch.tensor([[1, 0, 1]])
    batch = SimpleNamespace(values=values, returns=torch.tensor([[0.0, -9, 2]]), response_mask=mask)
    assert ppo.explained_variance(batch) == pytest.approx(expected, abs=1e-6)
    batch.returns *= 0  # equal returns
    assert ppo.explained_variance(batch) == 0
    batch.response_mask *= 0  # no model token
    assert ppo.explained_variance(batch) == 0


# ------------------------------------------------------------------------------------ the interface


def test_advantages_by_hand():
    # With λ 1 the returns are the rewards to go: 2, 2 and 0. Values 1, 2 and 0.5 give A = 1, 0 and
    # −0.5, with mean 1/6 and std √((25 + 1 + 16) / 36 / 2) = 0.763763.
    batch = SimpleNamespace(
        response_mask=torch.tensor([[1.0, 0, 1], [1, 0, 0]]),
        rewards=torch.tensor([2.0, 0.0]),
        old_logprobs=torch.full((2, 3), -1.0),
        values=torch.tensor([[1.0, 7, 2], [0.5, 7, 7]]),
    )
    settings = SimpleNamespace(gae_lambda=1.0, kl_coef=0.0, kl_estimator="k2")
    advantages = ppo.compute_advantages(batch, settings)
    assert batch.returns.tolist() == [[2, 0, 2], [0, 0, 0]]
    expected = torch.tensor([[1.0911, 0, -0.2182], [-0.8729, 0, 0]])
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=0)
