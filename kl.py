"""Four ways to measure how far the policy has gone from its reference, and where each may stand:
reward or loss.

    d = log π(a) − log π_ref(a),  the token a sampled from π

          value               E_π[value]     as a loss, its expected gradient     so it may stand
    k1 =  d                   KL(π‖ref)      0                                    in the reward
    k2 =  d² / 2              near KL        ∇KL(π‖ref), exact on-policy          in the loss
    k3 =  exp(−d) − 1 + d     KL(π‖ref)      ∇KL(ref‖π), the other direction      in the loss, near
          the reference
    |d|                       -              -                                    in the log

Why. A loss k(d) of a sampled token has the gradient k'(d) ∇log π, because the sampling itself is
not differentiated, and
∇KL(π‖ref) = E_π[d ∇log π].  k1' = 1: E_π[∇log π] = ∇Σπ = 0.  k2' = d: exactly ∇KL.  k3' = 1 −
exp(−d): −E_π[(ref/π) ∇log π] = −E_ref[∇log π] = ∇KL(ref‖π). A good estimator of the value need not
be a good loss. k1 in the reward is multiplied by ∇log π afterwards, which makes E_π[d ∇log π]: the
right gradient again.

Source: Schulman, "Approximating KL divergence" (2020), for the names; DeepSeekMath eq. 4 is k3;
ARENA optimises k2. Left out: the KL over the whole vocabulary, and, for k2 and k3, what a token
does to the KL of the tokens after it (each position counts for itself; k1 in the reward, summed
into the return, carries that too).

`python kl.py` prints the table that these lines claim, enumerated over a categorical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from errors import InputError, run_main

# --------------------------------------------------------------------------------------- estimators


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d. Worked: π 0.5, ref 0.25: ln 2 = 0.6931."""
    return logprobs - ref_logprobs  # [B, T]


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d²/2. Worked: π 0.5, ref 0.25: 0.6931² / 2 = 0.2402."""
    return (logprobs - ref_logprobs).square() / 2  # [B, T]


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(−d) − 1 + d. Worked: π 0.5, ref 0.25: 0.5 − 1 + 0.6931 = 0.1931."""
    # Is k3's sign right? Yes: samples come from π, so the ratio that averages to 1 is ref/π =
    # exp(−d), not exp(d). Its slope 1 − exp(−d) is unbounded where π has left a token behind: d =
    # −10 weighs −22025, in k2 it weighs −10.
    d = logprobs - ref_logprobs  # [B, T]
    return torch.expm1(-d) + d  # [B, T]  expm1: exp(−d) − 1 loses every digit near the reference


def k_abs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|d|, for the log: nothing cancels in it, so it shows drift where k1 averages to 0. Worked: π
    0.25, ref 0.5: 0.6931.
    """
    return (logprobs - ref_logprobs).abs()  # [B, T]


def k2_off_policy(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """k2 of tokens that an older policy sampled, times π/π_old: E_old[π/π_old · d ∇log π] =
    ∇KL(π‖ref) again.

    Worked: π 0.5, ref 0.25, π_old 0.4: 1.25 · 0.2402 = 0.3003.
    """
    ratio = (
        (logprobs - old_logprobs).detach().exp()
    )  # [B, T]  detached: a weight; its own gradient would be a third term
    return ratio * k2(logprobs, ref_logprobs)  # [B, T]


# --------------------------------------------------------------------------------- where they stand


def kl_in_loss(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, estimator: str
) -> Tensor:
    """What is added to the policy loss, before kl_coef. Give it tensors that are finite on masked
    positions too.
    """
    if estimator == "k1":
        raise InputError(
            "k1 as a loss does nothing: its expected gradient is zero. Use kl_estimator k2, or"
            " kl_place reward"
        )
    if estimator == "k2":
        return k2_off_policy(logprobs, ref_logprobs, old_logprobs)  # [B, T]
    if estimator == "k3":
        return k3(logprobs, ref_logprobs)  # [B, T]  unweighted: DeepSeekMath eq. 3 and 4 as printed
    raise InputError(
        f"unknown kl_estimator {estimator!r}: k2 or k3 in the loss (k1 only in the reward)"
    )


def kl_in_reward(
    old_logprobs: Tensor, ref_logprobs: Tensor | None, response_mask: Tensor, kl_coef: float
) -> Tensor:
    """Token rewards −kl_coef · k1, 0 on masked tokens. Always k1: k2 or k3 here would have another
    gradient than ∇KL.

    Worked: kl_coef 0.1, π_old 0.5, ref 0.25: −0.0693.
    """
    if kl_coef == 0:
        return torch.zeros_like(old_logprobs)  # [B, T]
    ref_logprobs = required(ref_logprobs)
    # Where, not times: a document's log-probs may be −inf, and 0 · inf is NaN.
    return torch.where(
        response_mask.bool(), -kl_coef * k1(old_logprobs, ref_logprobs), 0
    ).detach()  # [B, T]


def coefficient(recipe, place: str) -> float:
    """kl_coef if the recipe has its KL at `place` ("loss" or "reward"), else 0."""
    if recipe.kl_place not in ("loss", "reward", "none"):
        raise InputError(f"unknown kl_place {recipe.kl_place!r}: loss, reward or none")
    return recipe.kl_coef if recipe.kl_place == place else 0.0


def required(ref_logprobs: Tensor | None) -> Tensor:
    """The reference's log-probs, which a KL needs."""
    if ref_logprobs is None:
        raise InputError(
            "kl_coef is not 0, but the batch has no ref_logprobs: load the reference model, or set"
            " kl_place none"
        )
    return ref_logprobs


# -------------------------------------------------------- the table: enumeration over a categorical

VOCABULARY = 16
ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def categorical(epsilon: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(logits of π [V], log-probs of ref [V]): seeded normal reference logits, and ε · normal noise
    added to them.
    """
    generator = torch.Generator().manual_seed(seed)
    reference, noise = torch.randn(
        2, VOCABULARY, generator=generator, dtype=torch.float64
    )  # [V], [V]
    return reference + epsilon * noise, reference.log_softmax(-1)


def collapsed(drop: float) -> tuple[Tensor, Tensor]:
    """The reference itself, with the logit of its likeliest token lowered by `drop`: π has
    forgotten one token.
    """
    logits, ref_logprobs = categorical(0.0)  # [V], [V]
    return logits - drop * (ref_logprobs == ref_logprobs.max()), ref_logprobs


def token_gradients(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """[V, V]: row a is the gradient over the logits when token a was sampled. loss: log-probs [V]
    -> [V].
    """
    return torch.autograd.functional.jacobian(lambda x: loss(x.log_softmax(-1)), logits)


def kl_gradient(logits: Tensor, ref_logprobs: Tensor, reverse: bool = False) -> Tensor:
    """∇KL(π‖ref) over the logits [V]; `reverse`: ∇KL(ref‖π). Differentiated whole, with no
    estimator and no sampling.
    """
    logits = logits.detach().requires_grad_()
    logprobs = logits.log_softmax(-1)  # [V]
    kl = (
        ref_logprobs.exp() @ (ref_logprobs - logprobs)
        if reverse
        else logprobs.exp() @ (logprobs - ref_logprobs)
    )
    return torch.autograd.grad(kl, logits)[0]  # [V]


def expected_gradient(
    logits: Tensor, loss: Callable[[Tensor], Tensor], sampler: Tensor | None = None
) -> Tensor:
    """Σ_a p(a) · gradient when a was sampled, [V]. p: π itself, or the probabilities of another
    `sampler`.
    """
    probs = logits.softmax(-1) if sampler is None else sampler  # [V]
    return probs @ token_gradients(logits, loss)


def relative_error(vector: Tensor, target: Tensor) -> float:
    """|vector − target| / |target|. Worked: [3, 4] against [3, 0]: 4/3."""
    return ((vector - target).norm() / target.norm()).item()


def batch_gradient_spread(
    logits: Tensor, loss: Callable[[Tensor], Tensor], batches: int = 1000, tokens: int = 64
) -> float:
    """Largest / median gradient norm of `batches` seeded batches. The one number here that is
    sampled.
    """
    draws = torch.multinomial(
        logits.softmax(-1), batches * tokens, True, generator=torch.Generator().manual_seed(0)
    )
    counts = (
        torch.nn.functional.one_hot(draws, VOCABULARY).view(batches, tokens, VOCABULARY).sum(1)
    )  # [batches, V]
    norms = (counts.double() / tokens @ token_gradients(logits, loss)).norm(dim=1)  # [batches]
    return (norms.max() / norms.median()).item()


@dataclass(frozen=True)
class Row:
    """One estimator at one distance. bias, errors: fractions; norm: |expected gradient| /
    |∇KL(π‖ref)|.
    """

    value: float
    bias: float
    std: float
    error: float
    norm: float
    reverse_error: float
    spread: float


def estimator_row(logits: Tensor, ref_logprobs: Tensor, name: str) -> Row:
    """Value, bias and std of the estimator, and what it does as a loss."""

    def loss(logprobs: Tensor) -> Tensor:
        return ESTIMATORS[name](logprobs, ref_logprobs)

    logprobs = logits.log_softmax(-1)  # [V]
    probs, values = logprobs.exp(), loss(logprobs)  # [V], [V]
    kl, value = probs @ (logprobs - ref_logprobs), probs @ values
    std = (probs @ (values - value).square()).sqrt()
    gradient, target = (
        expected_gradient(logits, loss),
        kl_gradient(logits, ref_logprobs),
    )  # [V], [V]
    return Row(
        value.item(),
        round((value / kl - 1).item(), 9) + 0.0,
        std.item(),
        relative_error(gradient, target),
        (gradient.norm() / target.norm()).item(),
        relative_error(gradient, kl_gradient(logits, ref_logprobs, reverse=True)),
        batch_gradient_spread(logits, loss),
    )


def reward_error(logits: Tensor, ref_logprobs: Tensor) -> float:
    """Error of k1 in the reward: the gradient of k1.detach() · log π against ∇KL(π‖ref). It is
    0.
    """
    gradient = expected_gradient(
        logits, lambda logprobs: k1(logprobs, ref_logprobs).detach() * logprobs
    )  # [V]
    return relative_error(gradient, kl_gradient(logits, ref_logprobs))


def temperature_error(logits: Tensor, ref_logprobs: Tensor, temperature: float) -> float:
    """Error of k2's gradient when the tokens were sampled at `temperature` and both log-probs are
    taken at 1.
    """
    sampler = (logits / temperature).softmax(-1)  # [V]
    gradient = expected_gradient(
        logits, lambda logprobs: k2(logprobs, ref_logprobs), sampler
    )  # [V]
    return relative_error(gradient, kl_gradient(logits, ref_logprobs))


def off_policy_error(
    logits: Tensor, ref_logprobs: Tensor, old_logits: Tensor, weighted: bool
) -> float:
    """Error of k2's gradient when an older policy sampled the tokens, with or without the ratio as
    a weight.
    """

    def loss(logprobs: Tensor) -> Tensor:
        return (
            k2_off_policy(logprobs, ref_logprobs, old_logits.log_softmax(-1))
            if weighted
            else k2(logprobs, ref_logprobs)
        )

    gradient = expected_gradient(logits, loss, old_logits.softmax(-1))  # [V]
    return relative_error(gradient, kl_gradient(logits, ref_logprobs))


DISTANCES = {
    "ε 0.05": (categorical, 0.05),
    "ε 0.5": (categorical, 0.5),
    "ε 2": (categorical, 2.0),
    "ε 4": (categorical, 4.0),
    "one logit −10": (collapsed, 10.0),
}


def table() -> str:
    """The enumeration, one screen. The last columns belong to the estimator used as a loss."""
    lines = [
        f"{'':40}{'as a loss: expected gradient':^46}{'batches of 64':>15}",
        (
            f"{'π is ref with':15}    "
            f" {'value':>8}{'bias':>8}{'std':>9}{'error':>10}{'norm':>10}{'error against':>17}"
            f"{'largest/median':>18}"
        ),
        f"{'':45}{'∇KL(π‖ref)':>10}{'ratio':>10}{'∇KL(ref‖π)':>17}{'gradient':>18}",
    ]
    for name, (make, distance) in DISTANCES.items():
        logits, ref_logprobs = make(distance)  # [V], [V]
        for estimator in ESTIMATORS:
            row = estimator_row(logits, ref_logprobs, estimator)
            label = name if estimator == "k1" else ""
            lines.append(
                f"{label:15}{estimator:>4}"
                f" {row.value:>8.4f}{100 * row.bias:>+7.1f}%{row.std:>9.4f}{100 * row.error:>9.1f}%"
                f"{row.norm:>9.2f}x{100 * row.reverse_error:>16.1f}%{row.spread:>18.1f}"
            )
    return "\n".join(lines)


def main() -> None:
    print(
        f"A categorical over {VOCABULARY} tokens, enumerated (only the last column is sampled). KL"
        " = the value of k1.\n"
    )
    print(table())
    (far, ref_logprobs), (near, _) = categorical(2.0), categorical(0.5)  # [V] each
    plain, weighted = (100 * off_policy_error(far, ref_logprobs, near, w) for w in (False, True))
    print(
        f"""
k1 in the reward, ε 2: error against ∇KL(π‖ref) {100 * reward_error(far, ref_logprobs):.1f}%
k2 on tokens of an older policy (π at ε 2, sampled at ε 0.5): error {plain:.1f}%, weighted by the ratio {weighted:.1f}%
k2 sampled at temperature 0.9 and scored at 1, ε 0.5: error {100 * temperature_error(near, ref_logprobs, 0.9):.1f}%

Value: k1 and k3 are unbiased. Loss: only k2 has the gradient of KL(π‖ref); far from ref k3's explodes.
Std of the values: k2's is the lower one only far from ref (ε 4), so ARENA's "lower variance" is not why to prefer it."""
    )


if __name__ == "__main__":
    run_main(main)
