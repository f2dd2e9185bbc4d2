"""kl.py against enumeration: expectations are sums over a small categorical, written out here a
second time.
"""

from types import SimpleNamespace

import pytest
import torch

import kl
from errors import InputError

DISTANCES = [0.05, 0.5, 2.0, 4.0]


def pair(epsilon):
    """(logits that require grad, ref log-probs, probabilities of π)."""
    logits, ref = kl.categorical(epsilon)
    return logits.requires_grad_(), ref, logits.softmax(-1).detach()


def exact_gradients(logits, ref):
    """∇KL(π‖ref) and ∇KL(ref‖π) over the logits, in closed form: π (d − KL) and π − ref."""
    logprobs = logits.log_softmax(-1).detach()
    d, probs = logprobs - ref, logprobs.exp()
    return probs * (d - (probs * d).sum()), probs - ref.exp()


def gradient_as_a_loss(logits, probs, estimator, ref):
    """Σ_a p(a) · ∇ estimator(a), with p not differentiated: what averaging over samples
    computes.
    """
    return torch.autograd.grad((probs * estimator(logits.log_softmax(-1), ref)).sum(), logits)[0]


# --------------------------------------------------------------------------------------- the values


def test_estimators_of_a_token_of_probability_half_against_a_quarter():
    # d = ln 0.5 − ln 0.25 = ln 2 = 0.693147; d²/2 = 0.240227; exp(−d) = 0.25 / 0.5 = 0.5, so k3 =
    # 0.5 − 1 + 0.693147
    logprobs, ref = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    assert kl.k1(logprobs, ref).item() == pytest.approx(0.693147, abs=1e-6)
    assert kl.k2(logprobs, ref).item() == pytest.approx(0.240227, abs=1e-6)
    assert kl.k3(logprobs, ref).item() == pytest.approx(0.193147, abs=1e-6)
    assert kl.k_abs(ref, logprobs).item() == pytest.approx(0.693147, abs=1e-6)


def test_k3_has_the_sign_that_the_samples_of_the_policy_ask_for():
    # The mirrored token, d = −ln 2: exp(ln 2) − 1 − ln 2 = 0.306853. With the sign turned round it
    # would be 0.193147.
    logprobs, ref = torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log()
    assert kl.k3(logprobs, ref).item() == pytest.approx(0.306853, abs=1e-6)


@pytest.mark.parametrize("epsilon", DISTANCES)
def test_k1_and_k3_are_unbiased(epsilon):
    logits, ref, probs = pair(epsilon)
    logprobs = logits.log_softmax(-1).detach()
    exact = torch.nn.functional.kl_div(
        ref, logprobs, log_target=True, reduction="sum"
    ).item()  # KL(π‖ref)
    assert (probs * kl.k1(logprobs, ref)).sum().item() == pytest.approx(exact, rel=1e-9)
    assert (probs * kl.k3(logprobs, ref)).sum().item() == pytest.approx(exact, rel=1e-9)


def test_k3_keeps_its_digits_near_the_reference():
    # d = 1e-4 in fp32: d²/2 − d³/6 = 5.0e-9 − 1.7e-13. Computed as exp(−d) − 1 + d, a rounding
    # error of 6e-8 buries it.
    d = torch.tensor([[1e-4]])
    assert kl.k3(d, torch.zeros(1, 1)).item() == pytest.approx(4.99983e-9, rel=1e-2)
    assert (torch.exp(-d) - 1 + d).item() != pytest.approx(4.99983e-9, rel=1e-2)


# ------------------------------------------------------------------------------------ the gradients


@pytest.mark.parametrize("epsilon", DISTANCES)
def test_k2_as_a_loss_has_the_gradient_of_the_kl(epsilon):
    logits, ref, probs = pair(epsilon)
    forward, reverse = exact_gradients(logits, ref)
    gradient = gradient_as_a_loss(logits, probs, kl.k2, ref)
    torch.testing.assert_close(gradient, forward, rtol=1e-9, atol=1e-12)
    assert (gradient - reverse).norm() > 0.01 * reverse.norm()


@pytest.mark.parametrize("epsilon", DISTANCES)
def test_k3_as_a_loss_has_the_gradient_of_the_other_direction(epsilon):
    logits, ref, probs = pair(epsilon)
    forward, reverse = exact_gradients(logits, ref)
    gradient = gradient_as_a_loss(logits, probs, kl.k3, ref)
    torch.testing.assert_close(gradient, reverse, rtol=1e-9, atol=1e-12)
    assert (gradient - forward).norm() > 0.01 * forward.norm()


def test_k1_as_a_loss_has_no_expected_gradient_and_in_the_reward_the_right_one():
    logits, ref, probs = pair(2.0)
    assert gradient_as_a_loss(logits, probs, kl.k1, ref).abs().max().item() < 1e-14
    in_reward = gradient_as_a_loss(
        logits, probs, lambda logprobs, ref: kl.k1(logprobs, ref).detach() * logprobs, ref
    )
    torch.testing.assert_close(in_reward, exact_gradients(logits, ref)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("epsilon", DISTANCES)
def test_the_tables_own_kl_gradient_is_the_closed_form(epsilon):
    logits, ref, _ = pair(epsilon)
    forward, reverse = exact_gradients(logits, ref)
    torch.testing.assert_close(kl.kl_gradient(logits, ref), forward, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        kl.kl_gradient(logits, ref, reverse=True), reverse, rtol=1e-9, atol=1e-12
    )


def test_k3_explodes_on_a_token_that_the_policy_has_left_behind():
    # d = −10: the slope of k3 is 1 − e^10 = −22025.47, of k2 it is −10.
    logprobs, ref = torch.tensor([[-10.0]], requires_grad=True), torch.zeros(1, 1)
    assert torch.autograd.grad(kl.k3(logprobs, ref).sum(), logprobs)[0].item() == pytest.approx(
        -22025.47, rel=1e-5
    )
    assert torch.autograd.grad(kl.k2(logprobs, ref).sum(), logprobs)[0].item() == pytest.approx(
        -10.0
    )


def test_off_policy_k2_needs_the_ratio_as_its_weight():
    logits, ref, _ = pair(2.0)
    old = kl.categorical(0.5)[0].log_softmax(-1)
    target = exact_gradients(logits, ref)[0]
    weighted = gradient_as_a_loss(
        logits, old.exp(), lambda logprobs, ref: kl.k2_off_policy(logprobs, ref, old), ref
    )
    torch.testing.assert_close(weighted, target, rtol=1e-9, atol=1e-12)
    assert (gradient_as_a_loss(logits, old.exp(), kl.k2, ref) - target).norm() > 0.5 * target.norm()


def test_the_ratio_of_off_policy_k2_is_a_weight_and_has_no_gradient():
    # π 0.5, ref 0.25, π_old 0.4: ratio 1.25, value 1.25 · 0.240227 = 0.300283, gradient 1.25 ·
    # 0.693147 = 0.866434. With the ratio differentiated too it would be 0.866434 + 0.300283.
    logprobs = torch.tensor([[0.5]]).log().requires_grad_()
    loss = kl.k2_off_policy(logprobs, torch.tensor([[0.25]]).log(), torch.tensor([[0.4]]).log())
    assert loss.item() == pytest.approx(0.300283, abs=1e-5)
    assert torch.autograd.grad(loss.sum(), logprobs)[0].item() == pytest.approx(0.866434, abs=1e-5)


# --------------------------------------------------------------------------------- where they stand


def test_k1_in_the_loss_is_refused():
    with pytest.raises(InputError, match="zero"):
        kl.kl_in_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), "k1")


def test_an_unknown_estimator_is_refused():
    with pytest.raises(InputError, match="k4"):
        kl.kl_in_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), "k4")


def test_the_reward_pays_k1_on_model_tokens_and_nothing_on_documents():
    # k1 = ln 2 at the first token: −0.1 · 0.693147. The documents hold −inf − (−inf) = NaN, which
    # must not leak.
    old = torch.tensor([[0.5, 0.0, 0.0]]).log()
    ref = torch.tensor([[0.25, 0.0, 0.5]]).log()
    rewards = kl.kl_in_reward(old, ref, torch.tensor([[1.0, 0.0, 0.0]]), 0.1)
    assert rewards.tolist() == [[pytest.approx(-0.0693147, abs=1e-6), 0.0, 0.0]]


def test_a_kl_without_a_reference_is_refused_unless_its_coefficient_is_zero():
    with pytest.raises(InputError, match="ref_logprobs"):
        kl.kl_in_reward(torch.zeros(1, 2), None, torch.ones(1, 2), 0.1)
    assert kl.kl_in_reward(torch.ones(1, 2), None, torch.ones(1, 2), 0.0).tolist() == [[0.0, 0.0]]


def test_the_coefficient_stands_in_one_place_only():
    recipe = SimpleNamespace(kl_coef=0.3, kl_place="loss")
    assert (kl.coefficient(recipe, "loss"), kl.coefficient(recipe, "reward")) == (0.3, 0.0)
    with pytest.raises(InputError, match="rewrd"):
        kl.coefficient(SimpleNamespace(kl_coef=0.3, kl_place="rewrd"), "loss")


# ---------------------------------------------------------------------------------------- the table

# epsilon: KL, bias of k2, error of k3's gradient against ∇KL(π‖ref), its norm ratio
PUBLISHED = {
    0.05: (5.05e-4, 0.0063, 0.012, 1.01),
    0.5: (0.057, 0.109, 0.196, 1.07),
    2.0: (1.5, 0.89, 0.626, 0.60),
    4.0: (3.83, 1.14, 1.48, 2.2),
}


@pytest.mark.parametrize("epsilon", DISTANCES)
def test_the_table_has_the_published_figures(epsilon):
    distance, bias, error, ratio = PUBLISHED[epsilon]
    k1, k2, k3 = (kl.estimator_row(*kl.categorical(epsilon), name) for name in ("k1", "k2", "k3"))
    assert k1.value == pytest.approx(distance, rel=0.02)
    assert k3.value == pytest.approx(k1.value, rel=1e-9)
    assert (k1.bias, k3.bias) == (0.0, 0.0)
    assert k2.bias == pytest.approx(bias, rel=0.06)
    assert max(k1.norm, k2.error, k3.reverse_error) < 1e-9
    assert k3.error == pytest.approx(error, rel=0.01)
    assert k3.norm == pytest.approx(ratio, rel=0.03)


def test_one_collapsed_logit_makes_k3s_gradient_a_thousand_times_too_long():
    row = kl.estimator_row(*kl.collapsed(10.0), "k3")
    assert 1000 < row.norm < 2000
    # By hand: its expected gradient is π − ref, and ref's likeliest token has lost nearly all its
    # probability to the rest.
    logits, ref = kl.collapsed(10.0)
    assert row.norm == pytest.approx(
        ((logits.softmax(-1) - ref.exp()).norm() / kl.kl_gradient(logits, ref).norm()).item()
    )


def test_k2_varies_less_than_k3_far_from_the_reference_and_more_near_it():
    near2, near3 = (kl.estimator_row(*kl.categorical(0.5), name).std for name in ("k2", "k3"))
    far2, far3 = (kl.estimator_row(*kl.categorical(4.0), name).std for name in ("k2", "k3"))
    assert (near2, near3) == (pytest.approx(0.121, abs=5e-4), pytest.approx(0.092, abs=5e-4))
    assert far2 < far3


def test_far_from_the_reference_one_batch_of_k3_outweighs_the_others():
    k2, k3 = (kl.estimator_row(*kl.categorical(4.0), name).spread for name in ("k2", "k3"))
    assert 1.3 <= k2 <= 3.4
    assert 49 <= k3 <= 196


def test_sampling_and_scoring_at_two_temperatures_makes_k2_nine_percent_wrong():
    assert kl.temperature_error(*kl.categorical(0.5), 0.9) == pytest.approx(0.09, abs=0.005)
    assert kl.temperature_error(*kl.categorical(0.5), 1.0) == pytest.approx(0, abs=1e-12)


def test_the_table_fits_one_screen(capsys):
    kl.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 120
    assert any("k3" in line and "147.8%" in line for line in lines)
