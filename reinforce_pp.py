"""REINFORCE++: PPO's surrogate without a critic; advantages are normalised over the batch.

    plain     r_t = −kl_coef · k1_t  (estimator k1),  + R on the trajectory's last model token
              G_t = r_t + γ G_{t+1}                   over model tokens only, γ = 1
              A_t = (G_t − mean_batch) / (std_batch + 1e-6)
              mean and std over the batch's model tokens (ppo.whiten)
    baseline  A = Norm_batch(Norm_group(R − b)),  b = mean of the group           (UR² eq. 5)
              each trajectory has one advantage, so there is no γ, and a KL in the reward is
              summed over its tokens and subtracted from R first;
              Norm_batch uses the mean and std over the batch's trajectories
              group_std=False: do not divide by the group's std
              whiten_tokens=True: Norm_batch over the model tokens, as in the plain form

Only the advantage differs from GRPO. If all answers to a question get the same reward, above the
batch's mean, the plain form makes them more likely; in GRPO their advantages are 0.
Source: Hu et al. 2025 (REINFORCE++ and REINFORCE++-baseline); UR² eq. 5 and, for the loss, eq. 3.
The code of R1-Searcher and UR² uses the baseline form with group_std=False and whiten_tokens=True,
as OpenRLHF and verl do. By default Norm_batch is over trajectories, which eq. 5 allows: then long
answers do not dominate the mean, and in a group of equal rewards all advantages are 0, as in GRPO.
Over tokens the mean depends on the lengths, so in such a group they are in general not 0.
Left out: reward clipping and running statistics across batches.
"""

import torch
from torch import Tensor

import grpo
import ppo
from errors import run_main
from grpo import EPSILON
from ppo import token_rewards


def baseline_advantages(rewards: Tensor, group_size: int, group_std: bool = True) -> Tensor:
    """Returns Norm_batch(Norm_group(R − b)), [B] (UR² eq. 5); exactly 0 in groups of equal rewards.
    Worked: [1, 0, 1, 1] in groups of 2: Norm_group gives [0.7071, −0.7071, 0, 0], whose squares sum
    to 1; batch std √(1 / (4 − 1)) = 0.5774 -> [1.2247, −1.2247, 0, 0]. [1, 0, 1, NaN] has three
    known rewards: batch std √(1 / (3 − 1)) = 0.7071 -> [1, −1, 0, 0].
    """
    normalize = grpo.group_normalize if group_std else grpo.group_center
    advantages = normalize(rewards, group_size)  # [B]
    # Norm_batch only divides by the std (ddof 1). Every group has the mean 0, so the batch has the
    # mean 0 up to rounding; subtracting it would change advantages that are exactly 0.
    squares = advantages.square().sum()
    known = (~rewards.isnan()).sum()
    std = (squares / (known - 1).clamp(min=1)).sqrt()
    return advantages / (std + EPSILON)  # [B]


def returns_to_go(token_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Returns G_t = r_t + γ G_{t'}, [B, T], 0 on masked tokens; t' is the next model token. These
    are GAE's advantages for V = 0 and λ = 1.

    Worked: rewards [1, 9, 2, 0], mask [1, 0, 1, 0], γ 0.5 -> [1 + 0.5 · 2, 0, 2, 0] = [2, 0, 2, 0].
    """
    # A document's tokens are not actions of the policy: they add no reward and no discount.
    values = torch.zeros_like(token_rewards)  # [B, T]
    return ppo.gae(token_rewards, values, response_mask, gamma)[0]  # [B, T]


# ------------------------------------------------------------------------------------ the interface
def compute_advantages(batch, settings) -> Tensor:
    """Returns the advantages [B, T] of the whole rollout of all processes."""
    mask = batch.response_mask  # [B, T]
    if settings.algorithm == "reinforce_pp":
        returns = returns_to_go(token_rewards(batch, settings), mask)  # [B, T]
        return ppo.whiten(returns, mask)  # [B, T]
    rewards = grpo.trajectory_rewards(batch, settings)  # [B]
    advantages = baseline_advantages(rewards, batch.group_size, settings.group_std)  # [B]
    advantages = grpo.on_tokens(advantages, mask)  # [B, T]
    # Whitening removes the factor 1 / std_batch of baseline_advantages again.
    return ppo.whiten(advantages, mask) if settings.whiten_tokens else advantages  # [B, T]


compute_token_weights = grpo.compute_token_weights
compute_loss = grpo.compute_loss


def main() -> None:
    torch.set_printoptions(precision=4, sci_mode=False)
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])  # [B], G = 2
    print("Two questions, two answers each; rewards", rewards)
    print("baseline (UR² eq. 5)  Norm_group", grpo.group_normalize(rewards, 2))
    print("                      Norm_batch", baseline_advantages(rewards, 2))
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]])
    returns = rewards[:, None] * mask  # [4, 3]
    print("plain: returns, whitened over the batch's tokens\n", ppo.whiten(returns, mask))


if __name__ == "__main__":
    run_main(main)
