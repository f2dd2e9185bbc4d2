"""DAPO: GRPO for long answers and few right ones.

GRPO's advantage, A_i = (r_i − mean_group) / (std_group + 1e-6), and four departures from GRPO:

    1  clip-higher        clip(ratio, 1 − ε_low, 1 + ε_high) with ε_low 0.2 < ε_high 0.28: an
       unlikely token has room to grow
    2  dynamic sampling   a group that is all right or all wrong is dropped; more questions are
       drawn, a bounded number of times
    3  token mean         weight = 1 / (model tokens of the whole batch): a long answer's tokens
       count as much as a short one's
    4  overlong           a trajectory cut off by length before it answered gives no gradient: its
       wrongness was never shown

Departure 2 looks at correctness, not at the reward: a reward of several components is almost never
equal in a group. Cut-off trajectories count as wrong in it, and in the mean and std of their group.
There is no KL unless a recipe asks: with kl_coef above 0 it stands where GRPO's does (When to
Search's table has 1e-4). Source: Yu et al. 2025, sections 3.1 to 3.4, in this order; of 3.4 the
filter. Left out: the soft penalty for long answers (section 3.4). Sampling ends after
`max_resample` further draws, where the paper goes on until the batch is full: the batch is then
smaller, and where no group is left, the step is skipped (train.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

import grpo
import ppo
from errors import run_main


def informative_groups(correct: Tensor, group_size: int) -> Tensor:
    """[B] bool: whether the trajectory's group has both right and wrong answers, or answer rewards
    that differ.

    Worked, by twos: right, wrong | right, right | wrong, wrong -> True, True, False, False, False,
    False.
    """
    return ~grpo.equal_rewards(grpo.as_groups(correct, group_size)).repeat_interleave(
        group_size
    )  # [B]  departure 2


def trained_mask(batch) -> Tensor:
    """response_mask [B, T] without the overlong trajectories."""
    if batch.overlong is None:
        return batch.response_mask
    return ppo.model_only(batch.response_mask, ~batch.overlong[:, None])  # [B, T]  departure 4


# ------------------------------------------------------------------------------------ the interface

compute_advantages = (
    grpo.compute_advantages
)  # on the groups that are left; overlong rows are in the mean of theirs


def compute_token_weights(batch, recipe) -> Tensor:
    """On the global batch of one update. Their sum is 1, or 0 where every trajectory is overlong.

    recipe.loss_aggregation is not asked: a mean per trajectory first would not be DAPO.
    """
    return ppo.token_weights(trained_mask(batch))  # [B, T]  departure 3


def compute_loss(logprobs: Tensor, batch, recipe) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss [B, T], stats of [B, T]) of a micro-batch: GRPO's."""
    return grpo.compute_loss(
        logprobs, batch, recipe
    )  # departure 1: recipe.clip_high is larger than recipe.clip_low


def main() -> None:
    print("departure 1, clip-higher: how likely may a token become in one update, for A > 0?")
    for before in (0.01, 0.3, 0.9):
        print(
            f"  from {before:.2f}: ε 0.2 -> {min(1, before * 1.2):.4f}    ε_high 0.28 ->"
            f" {min(1, before * 1.28):.4f}"
        )
    correct = torch.tensor([1, 0, 0, 1, 1, 1, 0, 0, 0])  # [B], G = 3
    kept = informative_groups(correct, 3)[::3].tolist()
    print("\ndeparture 2, dynamic sampling: three questions, three answers each (1 = right)")
    for group, keep in zip(correct.view(-1, 3).tolist(), kept, strict=True):
        print(f"  {group}  {'kept' if keep else 'dropped: more questions are drawn'}")
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]])  # [B, T]
    print("\ndeparture 3, token mean: what one token weighs in trajectories of 4, 1 and 3 tokens")
    print(f"  GRPO  {[round(w, 3) for w in ppo.sequence_weights(mask)[:, 0].tolist()]}")
    print(f"  DAPO  {[round(w, 3) for w in ppo.token_weights(mask)[:, 0].tolist()]}")
    left = ppo.token_weights(
        ppo.model_only(mask, torch.tensor([[True], [True], [False]]))
    )  # [B, T]
    print("\ndeparture 4, overlong: the third was cut off before it answered")
    print(f"  DAPO  {[round(w, 3) for w in left[:, 0].tolist()]}")


if __name__ == "__main__":
    run_main(main)
