"""Four estimators of the KL between the policy and its reference, and where each may be used.

    d = log π(a) − log π_ref(a),  the token a sampled from π

          value              E_π[value]    expected gradient as a loss         so it may be used
    k1 =  d                  KL(π‖ref)     0                                   in the reward
    k2 =  d² / 2             ≈ KL near ref ∇KL(π‖ref), exact on-policy         in the loss
    k3 =  exp(−d) − 1 + d    KL(π‖ref)     ∇KL(ref‖π), the other direction     in the loss, near ref
    |d|                      -             -                                   in the log

Sampling is not differentiated, so a loss k(d) of a sampled token has the gradient k'(d) ∇log π.
The exact gradient of the KL is ∇KL(π‖ref) = E_π[d ∇log π]. The expected gradients are therefore:
    k1' = 1            E_π[∇log π] = ∇Σπ = 0
    k2' = d            E_π[d ∇log π] = ∇KL(π‖ref)
    k3' = 1 − exp(−d)  −E_π[(ref/π) ∇log π] = −E_ref[∇log π] = ∇KL(ref‖π)
So k1 estimates the value without bias but is useless as a loss. In the reward, k1 = d is multiplied
by ∇log π, which gives E_π[d ∇log π], the exact gradient.

Source: Schulman, "Approximating KL divergence" (2020). DeepSeekMath eq. 4 is k3. ARENA prefers k2
to k3 for its lower variance, but k2's variance is lower only far from the reference.
Left out: the KL over the whole vocabulary. With k2 and k3, the effect of a token on the KL of later
tokens is left out too; k1 in the reward includes it. `python kl.py` checks the rows of k1 to k3
with exact expectations over a vocabulary of 16 tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from errors import run_main

# Estimator -> where it is used. With "log" the KL is logged and is in no loss.
PLACES = {"k1": "reward", "k2": "loss", "k3": "loss", "log": "log"}


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns d = log π − log π_ref. Worked: π 0.5, ref 0.25: ln(0.5 / 0.25) = 0.6931."""
    return logprobs - ref_logprobs  # [B, T]


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns d² / 2. Worked: π 0.5, ref 0.25: d = 0.6931, and 0.6931² / 2 = 0.2402."""
    return (logprobs - ref_logprobs).square() / 2  # [B, T]


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns exp(−d) − 1 + d. Worked: π 0.5, ref 0.25: d = 0.6931, 0.5 − 1 + 0.6931 = 0.1931."""
    # Is the sign in exp(−d) right? Yes: tokens are sampled from π, so the mean of ref/π = exp(−d)
    # is 1; the mean of exp(d) is not. The slope 1 − exp(−d) explodes for tokens that are far less
    # likely under π than under ref: at d = −10 it is −22025, while the slope of k2 is −10.
    d = logprobs - ref_logprobs  # [B, T]
    return torch.expm1(-d) + d  # [B, T]  expm1(−d) is accurate for small d, exp(−d) − 1 is not


def k_abs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns |d|, which shows drift even if d has the mean 0. Worked: π 0.25, ref 0.5: 0.6931."""
    return (logprobs - ref_logprobs).abs()  # [B, T]


def k2_off_policy(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Returns k2 · π/π_old, for tokens that an older policy π_old sampled.

    The ratio makes the gradient exact: E_old[π/π_old · d ∇log π] = ∇KL(π‖ref). Without it the
    gradient is 85 % off if π is `categorical(2.0)` and π_old is `categorical(0.5)`.
    Worked: π 0.5, ref 0.25, π_old 0.4: the ratio is 1.25, and 1.25 · 0.2402 = 0.3003.
    """
    # The ratio is only a weight: differentiating it would add another term to the gradient.
    ratio = (logprobs - old_logprobs).detach().exp()  # [B, T]
    return ratio * k2(logprobs, ref_logprobs)  # [B, T]


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k_abs": k_abs}


# ------------------------------------------------------------------------------ where they are used
def coefficient(settings, place: str) -> float:
    """Returns kl_coef if the estimator is used at `place` ("loss" or "reward"), else 0."""
    return settings.kl_coef if PLACES[settings.kl_estimator] == place else 0.0


def kl_in_loss(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, estimator: str
) -> Tensor:
    """Returns the KL penalty [B, T], which compute_loss multiplies by kl_coef and adds to the loss.
    All inputs must be finite, on masked tokens too. It is not called for k1 and log, whose
    `coefficient` in the loss is 0.
    """
    if estimator == "k2":
        return k2_off_policy(logprobs, ref_logprobs, old_logprobs)  # [B, T]
    return k3(logprobs, ref_logprobs)  # [B, T]  no ratio π/π_old, as in DeepSeekMath eq. 3, 4


def kl_in_reward(batch, settings) -> Tensor:
    """Returns token rewards −kl_coef · k1 [B, T], which are 0 on masked tokens. If the estimator is
    not k1, they are 0 everywhere.

    Worked: kl_coef 0.1, π_old 0.5, ref 0.25: −0.1 · 0.6931 = −0.0693.
    """
    kl_coef = coefficient(settings, "reward")
    if kl_coef == 0:
        return torch.zeros_like(batch.old_logprobs)  # [B, T]
    penalty = -kl_coef * k1(batch.old_logprobs, batch.ref_logprobs)  # [B, T]
    # `where`, not a product with the mask: if the KL of a masked token were infinite, 0 · inf would
    # be NaN.
    return torch.where(batch.response_mask.bool(), penalty, 0)  # [B, T]


# ----------------------------------------------- the table of main: exact expectations, 16 tokens
def categorical(epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns (logits of π [V], log-probs of ref [V]). The logits of ref are standard normal, and
    those of π are ref's logits plus ε · standard normal noise.
    """
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    reference, noise = draws  # [V], [V]
    return reference + epsilon * noise, reference.log_softmax(-1)


def kl_gradient(logits: Tensor, ref_logprobs: Tensor, reverse: bool = False) -> Tensor:
    """Returns ∇KL(π‖ref) = π (d − KL), or ∇KL(ref‖π) = π − ref if `reverse`, with respect to the
    logits: [V], exact.
    """
    logprobs = logits.detach().log_softmax(-1)  # [V]
    probs = logprobs.exp()  # [V]
    if reverse:
        return probs - ref_logprobs.exp()  # [V]
    d = logprobs - ref_logprobs  # [V]
    return probs * (d - probs @ d)  # [V]


def expected_gradient(logits: Tensor, loss: Callable) -> Tensor:
    """Returns Σ_a π(a) · (gradient if a was sampled), [V]: π(a) is not differentiated. The loss
    maps log-probs [V] to [V].
    """
    logits = logits.detach().requires_grad_()
    logprobs = logits.log_softmax(-1)  # [V]
    return torch.autograd.grad(logprobs.exp().detach() @ loss(logprobs), logits)[0]  # [V]


def relative_error(vector: Tensor, target: Tensor) -> float:
    """Returns |vector − target| / |target|. Worked: [3, 4] and [3, 0]: 4/3."""
    return ((vector - target).norm() / target.norm()).item()


def estimator_row(logits: Tensor, ref_logprobs: Tensor, name: str) -> dict[str, float]:
    """Returns an estimator's mean under π, the mean's bias relative to KL(π‖ref), and the
    estimator's std. Also returns, for its use as a loss, the expected gradient's relative errors
    against ∇KL(π‖ref) and ∇KL(ref‖π).
    """
    loss = partial(ESTIMATORS[name], ref_logprobs=ref_logprobs)
    logprobs = logits.log_softmax(-1)  # [V]
    probs = logprobs.exp()  # [V]
    values = loss(logprobs)  # [V]
    kl = probs @ (logprobs - ref_logprobs)
    value = probs @ values
    std = (probs @ (values - value).square()).sqrt()
    gradient = expected_gradient(logits, loss)  # [V]
    forward = kl_gradient(logits, ref_logprobs)  # [V]
    reverse = kl_gradient(logits, ref_logprobs, reverse=True)  # [V]
    return {
        "value": value.item(),
        "bias": round((value / kl - 1).item(), 9) + 0.0,
        "std": std.item(),
        "error": relative_error(gradient, forward),
        "reverse_error": relative_error(gradient, reverse),
    }


def main() -> None:
    print("π: ref's logits + ε · noise         as a loss, gradient's error against")
    print("                       value    bias       std  ∇KL(π‖ref)  ∇KL(ref‖π)")
    columns = "{value:>8.4f}{bias:>+8.1%}{std:>10.4f}{error:>12.1%}{reverse_error:>12.1%}"
    for epsilon in (0.05, 0.5, 2.0, 4.0):
        for estimator in ("k1", "k2", "k3"):
            row = estimator_row(*categorical(epsilon), estimator)
            print(f"{f'ε {epsilon}':16}{estimator:4}", columns.format(**row))


if __name__ == "__main__":
    run_main(main)
