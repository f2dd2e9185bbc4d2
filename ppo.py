"""PPO's clipped surrogate, and the weights by which token losses become one number.

    ratio = π(a) / π_old(a)
    loss  = −min(ratio · A, clip(ratio, 1 − ε_low, 1 + ε_high) · A)                   per token
    dual clip, where A < 0:  loss = min(loss, c · |A|)                                 c > 1, usually 3

    total = Σ weight · loss,    Σ weight = 1 over the global batch
    "sequence": weight = 1 / (model tokens of the trajectory) / (trajectories that have any)     GRPO, UR² eq. 3
    "token":    weight = 1 / (model tokens of the whole batch)                                    DAPO

Source: Schulman et al. 2017 eq. 7 (one ε); DAPO (two of them, "clip-higher"); Ye et al. 2020 (dual clip).
Not here yet: the value head, GAE(γ, λ) and the critic's loss. This file is the part of PPO that GRPO and REINFORCE++ use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data import run_main


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """(loss [B, T], stats). clip_low and clip_high are the two ε; dual_clip None or 0 is off. All inputs [B, T], finite.

    Worked, ε 0.2 / 0.3: ratio 1.25, A 1 -> −1.25; ratio 1.35, A 1 -> −1.30; ratio 0.75, A −1 -> 0.8;
    ratio 4, A −1 -> 4.0, and with dual clip 3 -> 3.0.
    """
    # Why is the ratio always 1? In the first update after a rollout π is still π_old. The value then says nothing, but its
    # gradient is ∇log π, so the loss is the plain policy gradient; only later updates on the same rollout leave 1.
    ratio = torch.exp(logprobs - old_logprobs)  # [B, T]
    free = ratio * advantages  # [B, T]
    held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages  # [B, T]
    loss = -torch.minimum(free, held)  # [B, T]
    clipped = held < free  # [B, T]  the minimum took the clipped branch: this token has no gradient
    if dual_clip:
        # For A < 0 the minimum does not bound a growing ratio: one token can then carry the whole batch.
        bound = dual_clip * advantages.abs()  # [B, T]
        over = loss > bound  # [B, T]  so A < 0: only then is the loss positive
        loss, clipped = torch.where(over, bound, loss), clipped | over  # [B, T], [B, T]
    return loss, {"ratio": ratio.detach(), "clipped": clipped}


# -------------------------------------------------------------------------------------------------- aggregation
# Token mean or sequence mean? The recipe says which ("loss_aggregation"): a sequence mean lets a long trajectory's tokens
# count less each, a token mean lets a long trajectory count more as a whole. Either way the weights come from the whole
# update batch before it is cut: averaging the means of unequal micro-batches is a third, accidental, loss.

def sequence_weights(response_mask: Tensor) -> Tensor:
    """Mean over each trajectory's model tokens, then over the trajectories that have any. 0 for those that have none.

    Worked: mask [[1, 1, 0], [1, 0, 0], [0, 0, 0]] -> [[1/4, 1/4, 0], [1/2, 0, 0], [0, 0, 0]].
    """
    mask = response_mask.float()  # [B, T]
    lengths = mask.sum(1, keepdim=True)  # [B, 1]
    trajectories = (lengths > 0).sum()
    # clamp: a row without a model token is 0 / 1 = 0 and not 0 / 0 = NaN.
    return mask / lengths.clamp(min=1) / trajectories.clamp(min=1)  # [B, T]


def token_weights(response_mask: Tensor) -> Tensor:
    """The same weight for each model token. Worked: mask [[1, 1, 0], [1, 0, 0], [0, 0, 0]] -> 1/3 on three tokens, else 0."""
    mask = response_mask.float()  # [B, T]
    return mask / mask.sum().clamp(min=1)  # [B, T]


def aggregate(loss: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · loss, a scalar. Give it rows of the loss with the same rows of the global weights: the sums of the
    micro-batches add up to the loss of the batch, however it was cut, and so do their gradients.

    Worked: loss [[1, 2, 9]], weights [[1/4, 1/4, 0]] -> 0.75.
    """
    return (model_only(loss, weights) * weights).sum()


def model_only(values: Tensor, response_mask: Tensor) -> Tensor:
    """values where the mask is not 0, else 0. Are inserted tokens really masked? Here, before any exp: selected by
    `where`, because 0 · inf is NaN both forward and backward.

    Worked: values [2, inf], mask [1, 0] -> [2, 0].
    """
    return torch.where(response_mask.bool(), values, 0)


def main() -> None:
    ratios = [0.5, 0.75, 1.0, 1.25, 1.35, 4.0]
    print("clip 0.2 / 0.28, dual clip 3: the loss of one token, and by how much a rise of log π would change it\n")
    print(f"{'ratio':>7}{'A = +1':>10}{'gradient':>10}{'A = −1':>10}{'gradient':>10}")
    for ratio in ratios:
        line = f"{ratio:>7.2f}"
        for advantage in (1.0, -1.0):
            logprobs = torch.tensor([[ratio]]).log().requires_grad_()  # [1, 1]
            old, advantages = torch.zeros(1, 1), torch.full((1, 1), advantage)  # [1, 1], [1, 1]
            loss, _ = clipped_surrogate(logprobs, old, advantages, 0.2, 0.28, 3.0)
            loss.sum().backward()
            line += f"{loss.item():>10.2f}{logprobs.grad.item():>10.2f}"
        print(line)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])  # [3, 3]
    print(f"\nresponse_mask  {mask.tolist()}\nsequence       {sequence_weights(mask).tolist()}")
    print(f"token          {[[round(w, 3) for w in row] for row in token_weights(mask).tolist()]}")


if __name__ == "__main__":
    run_main(main)
