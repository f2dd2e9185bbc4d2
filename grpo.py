"""GRPO: a trajectory's baseline is the mean reward of its group, all trajectories of one question.

    A_i  = (r_i − mean_group) / (std_group + 1e-6)    std with ddof 1; all model tokens of i get A_i
    loss = clipped surrogate(A) + kl_coef · KL        by default (k2) the KL is in the loss
    total = mean over the model tokens of each trajectory, then over trajectories
            (--loss_aggregation sequence)

If a search of a trajectory failed, its reward is unknown and is set to NaN. An unknown reward is
left out of the group's mean and std, and its trajectory has the advantage 0. In a group with fewer
than two known rewards all advantages are 0.

Source: DeepSeekMath (Shao et al. 2024) eq. 3 and section 4.1.2. R-Search uses GRPO; ARENA uses it
with k2 in place of k3. Our departures: a trajectory without model tokens does not count in the mean
over trajectories; k2 is multiplied by the ratio π/π_old.
Left out: process rewards (section 4.1.3), and replacing the reference by the current policy at
intervals (iterative GRPO).

An algorithm is a module with three functions, which the training loop calls in this order:

    compute_advantages(batch, settings)      per rollout, on all of its groups      -> [B, T]
    compute_token_weights(batch, settings)   per update, on all of its rows         -> [B, T]
    compute_loss(logprobs, batch, settings)  per micro-batch, on its rows           -> [b, t], stats
"""

import torch
from torch import Tensor

import kl
import ppo
from errors import run_main
from ppo import EPSILON


def equal_rewards(rewards: Tensor, group_size: int) -> Tensor:
    """Returns [questions, 1] bool: whether all known rewards of a group are equal. A difference of
    EPSILON is tolerated, because different reward terms may have the same sum except for rounding.
    The G rows of a question are adjacent.
    """
    groups = rewards.view(-1, group_size)  # [questions, G]
    unknown = groups.isnan()  # [questions, G]
    highest = groups.masked_fill(unknown, -torch.inf).amax(1, keepdim=True)  # [questions, 1]
    lowest = groups.masked_fill(unknown, torch.inf).amin(1, keepdim=True)  # [questions, 1]
    return highest - lowest <= EPSILON


def group_center(rewards: Tensor, group_size: int) -> Tensor:
    """Returns r − mean of the group, [B]. It is exactly 0 in a group of equal rewards, and where r
    is unknown.

    Worked: [1, 0, 0.1, 0.1] in groups of 2 -> [0.5, −0.5, 0, 0]. As one group, [1, NaN, 0, NaN]
    has the mean 0.5 -> [0.5, 0, −0.5, 0].
    """
    groups = rewards.view(-1, group_size)  # [questions, G]
    centered = groups - groups.nanmean(1, keepdim=True)  # [questions, G]
    # In fp32 the mean of seven rewards of 0.7 is off by 6e-8. If such differences were not set to
    # 0, group_normalize would turn them into advantages of 6e-8 / (6e-8 + 1e-6) ≈ 0.06.
    zero = equal_rewards(rewards, group_size) | groups.isnan()  # [questions, G]
    return torch.where(zero, 0, centered).view(-1)  # [B]


def group_normalize(rewards: Tensor, group_size: int) -> Tensor:
    """Returns (r − mean) / (std + 1e-6), [B], with the group's mean and std (ddof 1). It is exactly
    0 where r is unknown, and in a group of equal rewards or with a single known reward.

    Worked: [1.4, 0.4, 0.2, 2.4, 0.0]: mean 0.88, std √(4.048 / 4) = 1.0060
    -> [0.5169, −0.4771, −0.6760, 1.5110, −0.8748]. [3, NaN, 1]: mean 2, std √(2 / 1) = 1.4142
    -> [0.7071, 0, −0.7071].
    """
    # What happens when all rewards of a group are equal? The advantages are exactly 0, and
    # frac_reward_zero_std counts the group.
    centered = group_center(rewards, group_size).view(-1, group_size)  # [questions, G]
    squares = centered.square().sum(1, keepdim=True)  # [questions, 1]
    unknown = rewards.isnan().view(-1, group_size).sum(1, keepdim=True)  # [questions, 1]
    others = group_size - 1 - unknown  # [questions, 1]
    std = (squares / others.clamp(min=1)).sqrt()  # [questions, 1]  clamp avoids 0 / 0
    return (centered / (std + EPSILON)).view(-1)  # [B]


def frac_reward_zero_std(rewards: Tensor, group_size: int) -> float:
    """Returns the share of groups whose known rewards are equal. GRPO's advantages there are 0;
    with k1 they may differ from 0, because the KL is first subtracted from the rewards.

    Worked, G = 2: [1, 0, 1, 1] -> 0.5. [1, 0, 1, NaN] -> 0.5, because the second group has only one
    known reward.
    """
    return equal_rewards(rewards, group_size).float().mean().item()


def trajectory_rewards(batch, settings) -> Tensor:
    """Returns [B]: each reward, minus kl_coef · KL if the estimator is k1. The KL is summed over
    the model tokens, because all tokens of a trajectory share one advantage.

    Worked: reward 2, kl_coef 0.1, mask [1, 0, 1], k1 [0.5, 9, 0.5] -> 2 − 0.1 · (0.5 + 0.5) = 1.9.
    """
    penalty = kl.kl_in_reward(batch, settings)  # [B, T]
    return batch.rewards + penalty.sum(1)  # [B]


def on_tokens(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Returns [B, T]: the row's advantage on each model token (end tags and EOS too), else 0."""
    return torch.where(response_mask.bool(), advantages[:, None], 0)  # [B, T]


# ------------------------------------------------------------------------------------ the interface
def compute_advantages(batch, settings) -> Tensor:
    """Returns the advantages [B, T] of the whole rollout."""
    rewards = trajectory_rewards(batch, settings)  # [B]
    advantages = group_normalize(rewards, batch.group_size)  # [B]
    return on_tokens(advantages, batch.response_mask)  # [B, T]


# Where is the KL? ppo.compute_loss adds k2 or k3 to the loss; trajectory_rewards subtracts k1.
compute_token_weights = ppo.compute_token_weights
compute_loss = ppo.compute_loss


def main() -> None:
    torch.set_printoptions(precision=4, sci_mode=False)
    rewards = torch.tensor([1.4, 0.4, 0.2, 2.4, 0.0])  # [B], G = 5
    equal = torch.full((5,), 0.1)  # [B]
    both = torch.cat([rewards, equal])  # [2B]
    print("One question, five answers; rewards", rewards)
    print(
        f"minus mean {rewards.mean():.4f}, / std {rewards.std():.4f}:", group_normalize(rewards, 5)
    )
    print("A second question, five equal rewards; advantages", group_normalize(equal, 5))
    print("frac_reward_zero_std of both:", frac_reward_zero_std(both, 5))


if __name__ == "__main__":
    run_main(main)
