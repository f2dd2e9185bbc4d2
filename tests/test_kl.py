"""Compares kl.py with enumeration: expectations are sums over a small categorical distribution, and
the formulas are written out here a second time.
"""

from types import SimpleNamespace

import pytest
import torch

import kl


def pair(epsilon):
    """Returns (logits that require grad, ref log-probs, probabilities of π)."""
    logits, ref = kl.categorical(epsilon)
    return logits.requires_grad_(), ref, logits.softmax(-1).detach()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def gradient_as_a_loss(logits, probs, estimator, ref):
    """Returns Σ_a p(a) · ∇ estimator(a), where p is not differentiated: the mean over samples."""
    return torch.autograd.grad((probs * estimator(logits.log_softmax(-1), ref)).sum(), logits)[0]


def one(*probabilities):
    return torch.tensor([probabilities]).log()


# --------------------------------------------------------------------------------------- the values


def test_estimators_of_a_token_of_probability_half_against_a_quarter():
    # d = ln 0.5 − ln 0.25 = ln 2 = 0.693147; d²/2 = 0.240227; exp(−d) = 0.25 / 0.5 = 0.5, so k3
    # is 0.5 − 1 + 0.693147.
    expected = {kl.k1: 0.693147, kl.k2: 0.240227, kl.k3: 0.193147, kl.k_abs: 0.693147}
    for estimator, value in expected.items():
        assert estimator(one(0.5), one(0.25)).item() == pytest.approx(value, abs=1e-6)
    # With both probabilities exchanged, d = −ln 2 and k3 = exp(ln 2) − 1 − ln 2 = 0.306853; with
    # the wrong sign it would be 0.193147.
    assert kl.k_abs(one(0.25), one(0.5)).item() == pytest.approx(0.693147, abs=1e-6)
    assert kl.k3(one(0.25), one(0.5)).item() == pytest.approx(0.306853, abs=1e-6)


def test_k3_keeps_its_digits_near_the_reference():
    # For d = 1e-4, k3 = d²/2 − d³/6 = 5.0e-9 − 1.7e-13. Computed as exp(−d) − 1 + d in fp32, it is
    # lost in a rounding error of 6e-8.
    d = torch.tensor([[1e-4]])
    assert kl.k3(d, torch.zeros(1, 1)).item() == pytest.approx(4.99983e-9, rel=1e-2)


# ------------------------------------------------------------------------------------ the gradients


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_k2_as_a_loss_has_the_gradient_of_the_kl_and_k3_that_of_the_other_direction(epsilon):
    logits, ref, probs = pair(epsilon)
    close(gradient_as_a_loss(logits, probs, kl.k2, ref), kl.kl_gradient(logits, ref))
    close(gradient_as_a_loss(logits, probs, kl.k3, ref), kl.kl_gradient(logits, ref, reverse=True))
    distance = logits.log_softmax(-1).exp() @ (logits.log_softmax(-1) - ref)
    close(kl.kl_gradient(logits, ref), torch.autograd.grad(distance, logits)[0])


def test_k1_has_the_right_expected_gradient_in_the_reward_but_none_in_the_loss():
    logits, ref, probs = pair(2.0)
    assert gradient_as_a_loss(logits, probs, kl.k1, ref).abs().max().item() < 1e-14
    in_reward = lambda logprobs, ref: kl.k1(logprobs, ref).detach() * logprobs  # noqa: E731
    close(gradient_as_a_loss(logits, probs, in_reward, ref), kl.kl_gradient(logits, ref))


def test_off_policy_k2_needs_the_ratio_as_its_weight():
    logits, ref, _ = pair(2.0)
    old = kl.categorical(0.5)[0].log_softmax(-1)
    weighted = lambda logprobs, ref: kl.k2_off_policy(logprobs, ref, old)  # noqa: E731
    close(gradient_as_a_loss(logits, old.exp(), weighted, ref), kl.kl_gradient(logits, ref))


# ------------------------------------------------------------------------ in the loss or the reward


def settings(estimator, kl_coef=0.1):
    return SimpleNamespace(kl_estimator=estimator, kl_coef=kl_coef)


@pytest.mark.parametrize(
    ("estimator", "in_reward", "in_loss"),
    [("k1", 0.3, 0.0), ("k2", 0.0, 0.3), ("k3", 0.0, 0.3), ("log", 0.0, 0.0)],
)
def test_the_estimator_decides_whether_the_kl_is_in_the_reward_or_in_the_loss(
    estimator, in_reward, in_loss
):
    options = settings(estimator, 0.3)
    assert kl.coefficient(options, "reward") == in_reward
    assert kl.coefficient(options, "loss") == in_loss


def test_the_reward_contains_k1_on_model_tokens_and_nothing_on_documents():
    # The first token has k1 = ln 2, so its reward is −0.1 · 0.693147. On the document tokens k1
    # is NaN and −inf, which must not reach the rewards.
    mask = torch.tensor([[1.0, 0.0, 0.0]])
    old = one(0.5, 0.0, 0.0)
    ref = one(0.25, 0.0, 0.5)
    batch = SimpleNamespace(old_logprobs=old, ref_logprobs=ref, response_mask=mask)
    rewards = kl.kl_in_reward(batch, settings("k1"))
    assert rewards.tolist() == [[pytest.approx(-0.0693147, abs=1e-6), 0.0, 0.0]]
    batch.ref_logprobs = None
    for no_reward in (settings("k2"), settings("k1", 0.0)):
        assert kl.kl_in_reward(batch, no_reward).tolist() == [[0.0, 0.0, 0.0]]


# ---------------------------------------------------------------------------------------- the table


def test_the_table_has_the_published_figures():
    k1, k2, k3 = (kl.estimator_row(*kl.categorical(0.5), name) for name in ("k1", "k2", "k3"))
    assert k1["value"] == pytest.approx(0.057, rel=0.02)
    assert (k1["bias"], k3["bias"]) == (0.0, 0.0)
    assert k2["bias"] == pytest.approx(0.109, rel=0.06)
    assert max(k2["error"], k3["reverse_error"]) < 1e-9
    # against the gradient of KL(π‖ref)
    assert [k1["error"], k3["error"]] == pytest.approx([1.0, 0.196], rel=0.01)
    assert k2["std"] > k3["std"]  # far from the reference k3 varies more
