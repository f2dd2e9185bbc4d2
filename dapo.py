"""DAPO: GRPO adapted to long answers, of which only few are right.

DAPO has GRPO's advantage, A_i = (r_i − mean_group) / (std_group + 1e-6), and departs from GRPO in:

    1  clip-higher        ε_low 0.2 < ε_high 0.28: the probability of an unlikely token can grow
                          more than with one ε of 0.2
    2  dynamic sampling   groups with only right or only wrong answers are dropped, and more
                          questions are drawn
    3  token mean         each model token weighs 1 / (model tokens of the batch). With
                          --loss_aggregation question: the mean over each question's tokens, then
                          over questions
    4  overlong           a trajectory that was truncated before it answered gets no gradient,
                          because nobody knows whether its answer would have been wrong

By default (`filter_by`) departure 2 asks whether the answers of a group are right, not whether its
rewards are equal: a reward of several terms may differ between answers that are all right. Overlong
trajectories count as wrong in departure 2, and their rewards count in the mean and std of their
group. A KL is added where GRPO adds it.
Source: Yu et al. 2025, sections 3.1 to 3.4, in this order.
Left out: the soft penalty for long answers (section 3.4; none of the five papers uses it), and
sampling until the batch is full. A step makes at most `max_resample` extra draws and then trains on
the groups that it has. If it has none, the step is skipped (train.py).
"""

from dataclasses import replace

import torch
from torch import Tensor

import grpo
import ppo
from errors import run_main


def informative_groups(correct: Tensor, group_size: int) -> Tensor:
    """Returns [B] bool: whether the values of `correct` [B] differ within the row's group. The
    values are 1 (right) or 0 (wrong); if `filter_by` is "answer" or "total", they are answer terms
    or rewards. NaN means unknown and is ignored.

    Worked, G = 2: right, wrong | right, right | wrong, NaN -> True, True, then False four times.
    """
    equal = grpo.equal_rewards(correct, group_size)  # [questions, 1]
    return ~equal.repeat_interleave(group_size)  # [B]  departure 2


# ------------------------------------------------------------------------------------ the interface
compute_advantages = grpo.compute_advantages
compute_loss = grpo.compute_loss  # departure 1: clip_low < clip_high


def compute_token_weights(batch, settings) -> Tensor:
    """Returns weights [B, T] for the global batch of one update. Their sum is 1, or 0 if no token
    is left. Departure 3 is --loss_aggregation token, the default under --algorithm dapo.
    """
    mask = ppo.model_only(batch.response_mask, ~batch.overlong[:, None])  # [B, T]  departure 4
    return ppo.compute_token_weights(replace(batch, response_mask=mask), settings)


def main() -> None:
    torch.set_printoptions(precision=3)
    print("1, clip-higher: a probability of 0.01 may grow to 0.0128 instead of 0.0120")
    correct = torch.tensor([1.0, 0, 1, 1, 0, 0])  # [B], G = 2
    print("2, dynamic sampling: correct", correct, "-> kept", informative_groups(correct, 2))
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    print("3, token mean: weight of a token in trajectories of 4 tokens and of 1")
    print("   GRPO", ppo.sequence_weights(mask)[:, 0], "DAPO", ppo.token_weights(mask)[:, 0])
    print("4, if the first is overlong:", ppo.token_weights(mask * torch.tensor([[0], [1]]))[:, 0])


if __name__ == "__main__":
    run_main(main)
