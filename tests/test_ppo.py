"""ppo.py: the surrogate token by token, and weights that do not know how a batch is cut."""

import pytest
import torch

import ppo

# Three trajectories of 4, 1 and 0 model tokens; columns with 0 are documents or padding.
MASK = torch.tensor([[1, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])


def surrogate(ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=None):
    """(loss, gradient over log π, clipped) of one token."""
    logprobs = torch.tensor([[ratio]]).log().requires_grad_()
    old, advantages = torch.zeros(1, 1), torch.tensor([[advantage]])
    loss, stats = ppo.clipped_surrogate(logprobs, old, advantages, clip_low, clip_high, dual_clip)
    loss.sum().backward()
    return loss.item(), logprobs.grad.item(), stats["clipped"].item()


# --------------------------------------------------------------------------------------------------- surrogate

@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "gradient", "clipped"),
    [
        (1.25, 1.0, None, -1.25, -1.25, False),  # below 1.3: free
        (1.35, 1.0, None, -1.30, 0.0, True),  # held at 1.3
        (0.75, 1.0, None, -0.75, -0.75, False),  # the minimum takes the free branch: a good token may come back
        (0.75, -1.0, None, 0.8, 0.0, True),  # held at 0.8
        (1.35, -1.0, None, 1.35, 1.35, False),  # a bad token that became likelier is never held
        (4.0, -1.0, None, 4.0, 4.0, False),  # ... and without the dual clip grows without bound
        (4.0, -1.0, 0.0, 4.0, 4.0, False),  # 0 is off
        (4.0, -1.0, 3.0, 3.0, 0.0, True),  # bounded by 3 · |A|
        (2.0, -1.0, 3.0, 2.0, 2.0, False),  # below the bound
        (4.0, 1.0, 3.0, -1.3, 0.0, True),  # the dual clip concerns negative advantages only
        (4.0, -2.0, 3.0, 6.0, 0.0, True),  # 3 · |−2|
    ],
)
def test_a_token_is_clipped_by_hand(ratio, advantage, dual_clip, loss, gradient, clipped):
    found = surrogate(ratio, advantage, dual_clip=dual_clip)
    assert found == (pytest.approx(loss), pytest.approx(gradient), clipped)


def test_the_first_update_is_the_plain_policy_gradient():
    # ratio 1 everywhere: the loss is −A, its gradient over log π is −A, and nothing is clipped.
    logprobs = torch.tensor([[-0.3, -2.0], [-1.0, -7.0]], requires_grad=True)
    advantages = torch.tensor([[0.5, -1.5], [2.0, 0.0]])
    loss, stats = ppo.clipped_surrogate(logprobs, logprobs.detach(), advantages, 0.2, 0.2, 3.0)
    loss.sum().backward()
    assert stats["ratio"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert not stats["clipped"].any()
    torch.testing.assert_close(loss.detach(), -advantages)
    torch.testing.assert_close(logprobs.grad, -advantages)


def test_clipped_marks_exactly_the_tokens_without_a_gradient():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(40, 25, generator=generator).requires_grad_()
    old, advantages = torch.randn(2, 40, 25, generator=generator)
    loss, stats = ppo.clipped_surrogate(logprobs, old, advantages, 0.2, 0.28, 3.0)
    loss.sum().backward()
    assert torch.equal(stats["clipped"], logprobs.grad == 0)
    assert 0.1 < stats["clipped"].float().mean() < 0.9
    assert not stats["ratio"].requires_grad


# ----------------------------------------------------------------------------------------------------- weights

def test_sequence_weights_by_hand():
    # Two trajectories have model tokens: 1/2 each, over 4 tokens and over 1. The third row is 0.
    assert ppo.sequence_weights(MASK).tolist() == [[0.125, 0, 0.125, 0.125, 0.125], [0, 0, 0.5, 0, 0], [0, 0, 0, 0, 0]]


def test_token_weights_by_hand():
    expected = [[0.2, 0, 0.2, 0.2, 0.2], [0, 0, 0.2, 0, 0], [0, 0, 0, 0, 0]]
    torch.testing.assert_close(ppo.token_weights(MASK), torch.tensor(expected))


@pytest.mark.parametrize("weights", [ppo.sequence_weights, ppo.token_weights])
def test_weights_sum_to_one_and_a_mask_of_bools_or_floats_is_the_same(weights):
    assert weights(MASK).sum().item() == pytest.approx(1)
    assert torch.equal(weights(MASK.bool()), weights(MASK.float()))


@pytest.mark.parametrize("weights", [ppo.sequence_weights, ppo.token_weights])
def test_a_batch_without_a_model_token_weighs_zero_and_is_not_nan(weights):
    logprobs = torch.randn(2, 3, requires_grad=True)
    total = ppo.aggregate(logprobs * 2, weights(torch.zeros(2, 3)))
    total.backward()
    assert total.item() == 0
    assert logprobs.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_sequence_mean_and_a_token_mean_are_two_losses():
    # Losses 1 on the four tokens of the first trajectory and 6 on the one of the second:
    # sequence (1 + 6) / 2 = 3.5, token (4 · 1 + 6) / 5 = 2.
    loss = torch.tensor([[1.0, 99, 1, 1, 1], [99, 99, 6, 99, 99], [99, 99, 99, 99, 99]])
    assert ppo.aggregate(loss, ppo.sequence_weights(MASK)).item() == pytest.approx(3.5)
    assert ppo.aggregate(loss, ppo.token_weights(MASK)).item() == pytest.approx(2.0)


@pytest.mark.parametrize("weights", [ppo.sequence_weights, ppo.token_weights])
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 7])
def test_loss_and_gradient_do_not_depend_on_the_cut_into_micro_batches(weights, cut):
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(7, 11, generator=generator) < torch.linspace(0, 0.9, 7)[:, None]).float()  # row 0 is empty
    values = torch.randn(7, 11, generator=generator).requires_grad_()
    assert mask[0].sum() == 0
    whole = ppo.aggregate(values.square(), weights(mask))
    expected = torch.autograd.grad(whole, values)[0]

    global_weights, total = weights(mask), 0.0
    for start in range(0, 7, cut):
        rows = slice(start, start + cut)
        part = ppo.aggregate(values[rows].square(), global_weights[rows])
        part.backward()
        total += part.item()
    assert total == pytest.approx(whole.item(), rel=1e-5)
    torch.testing.assert_close(values.grad, expected)


def test_the_mean_of_micro_batch_means_is_another_number():
    # Rows of 3 tokens with loss 1 and of 1 token with loss 5, a micro-batch each. Global token mean (3 + 5) / 4 = 2;
    # mean of means (1 + 5) / 2 = 3: half as much again.
    mask, loss = torch.tensor([[1.0, 1, 1], [1, 0, 0]]), torch.tensor([[1.0, 1, 1], [5, 0, 0]])
    naive = sum(ppo.aggregate(loss[[i]], ppo.token_weights(mask[[i]])) for i in range(2)) / 2
    global_weights = ppo.token_weights(mask)
    right = sum(ppo.aggregate(loss[[i]], global_weights[[i]]) for i in range(2))
    assert naive.item() == pytest.approx(3)
    assert right.item() == pytest.approx(2)


def test_inf_and_nan_on_masked_tokens_do_not_reach_the_loss():
    loss = torch.tensor([[1.0, float("inf"), 3.0], [float("nan"), float("-inf"), float("nan")]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert ppo.aggregate(loss, ppo.sequence_weights(mask)).item() == pytest.approx(2)  # (1 + 3) / 2, one trajectory


def test_the_mask_is_not_changed():
    mask = MASK.float()
    ppo.sequence_weights(mask), ppo.token_weights(mask), ppo.model_only(torch.ones(3, 5), mask)
    assert torch.equal(mask, MASK.float())


def test_running_the_file_shows_the_dual_clip(capsys):
    ppo.main()
    last = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("4.00"))
    assert last.split() == ["4.00", "-1.28", "0.00", "3.00", "0.00"]
