"""DAPO: GRPO for long answers, few of which are right.

GRPO's advantage, A_i = (r_i − mean_group) / (std_group + 1e-6), and four departures from GRPO:

    1  clip-higher        ε_low 0.2 < ε_high 0.28: an unlikely token can become likelier
    2  dynamic sampling   groups all right or all wrong are dropped, and more questions are drawn
    3  token mean         weight = 1 / (model tokens of the batch): all tokens count the same; with
                          --loss_aggregation question the mean over a question's tokens comes first
    4  overlong           truncated before it answered: no gradient, as it was not shown to be wrong

Departure 2 compares correctness, because rewards of several terms are almost never equal in a
group. Overlong trajectories count as wrong there, and count in the mean and std of their group. A
KL is added where GRPO adds it.
Source: Yu et al. 2025, sections 3.1 to 3.4, in this order.
Left out: the soft penalty for long answers (section 3.4; none of the five papers uses it), and
sampling until the batch is full: after `max_resample` more draws the batch stays smaller, and a
step without a group is skipped (train.py).
"""

import torch
from torch import Tensor

import grpo
import ppo
from errors import run_main


def informative_groups(correct: Tensor, group_size: int) -> Tensor:
    """Returns [B] bool: whether correctness, or answer terms, differ in the row's group. NaN is
    unknown. Worked, G = 2: right, wrong | right, right | wrong, NaN -> True twice, then False.
    """
    equal = grpo.equal_rewards(grpo.as_groups(correct, group_size))  # [questions, 1]
    return ~equal.repeat_interleave(group_size)  # [B]  departure 2


# ------------------------------------------------------------------------------------ the interface
compute_advantages = grpo.compute_advantages
compute_loss = grpo.compute_loss  # departure 1: clip_low < clip_high


def compute_token_weights(batch, settings) -> Tensor:
    """Returns weights [B, T] for the global batch of one update; their sum is 1, or 0 if all rows
    are overlong. With a mean per trajectory first it would not be DAPO.
    """
    mask = ppo.trained_tokens(batch)  # [B, T]
    if batch.overlong is not None:
        mask = ppo.model_only(mask, ~batch.overlong[:, None])  # [B, T]  departure 4
    if settings.loss_aggregation == "question":
        return ppo.question_weights(mask, batch.questions)  # [B, T]
    return ppo.token_weights(mask)  # [B, T]  departure 3


def main() -> None:
    print("departure 1, clip-higher: a token of probability 0.01 may become")
    print(f"  ε 0.2: {0.01 * 1.2:.4f}   ε_high 0.28: {0.01 * 1.28:.4f}")
    correct = torch.tensor([1, 0, 0, 1, 1, 1, 0, 0, 0])  # [B], G = 3
    print("departure 2, dynamic sampling: three questions, three answers each (1 = right)")
    print("  correct", correct.tolist())
    print("  kept   ", informative_groups(correct, 3).tolist())
    torch.set_printoptions(precision=3)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]])
    print("departure 3, token mean: what one token weighs in trajectories of 4, 1 and 3 tokens")
    print("  GRPO", ppo.sequence_weights(mask)[:, 0], "  DAPO", ppo.token_weights(mask)[:, 0])
    remaining = ppo.model_only(mask, torch.tensor([[True], [True], [False]]))
    print("departure 4, overlong: without the third, DAPO", ppo.token_weights(remaining)[:, 0])


if __name__ == "__main__":
    run_main(main)
