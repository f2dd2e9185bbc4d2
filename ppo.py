"""PPO: a clipped surrogate for the policy, and a critic whose value of each state is the baseline.

    ratio = π(a) / π_old(a)
    loss  = −min(ratio · A, clip(ratio, 1 − ε_low, 1 + ε_high) · A)                   per token
    dual clip, where A < 0:  loss = min(loss, c · |A|)                                 c > 1,
    usually 3

    δ_t = r_t + γ V_{t'} − V_t,    A_t = δ_t + γλ A_{t'},    t' the next model token, V = A = 0
    behind the last
    returns = A + V;  the policy gets A whitened over the model tokens of the batch
    value loss = ½ max((V − returns)², (V_old + clip(V − V_old, −c, c) − returns)²)    per token

    total = Σ weight · loss,    Σ weight = 1 over the global batch
    "sequence": weight = 1 / (model tokens of the trajectory) / (trajectories that have any)
    GRPO, UR² eq. 3
    "token":    weight = 1 / (model tokens of the whole batch)
                DAPO; the critic, always

Source: Schulman et al. 2017 eq. 7 (one ε), 2015 for GAE eq. 16; DAPO (two of them, "clip-higher");
Ye et al. 2020 (dual clip). The surrogate, the weights and the loss are those of GRPO, DAPO and
REINFORCE++ too; only the advantage is PPO's own. Documents are no steps: GAE goes from model token
to model token, the critic's loss, the whitening and the weights leave them out. They are part of
the states, which the critic reads. Left out: a body shared by policy and critic, an entropy bonus,
a second epoch over a rollout, stopping early at a KL, and scaling of rewards or returns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import kl
from errors import InputError, run_main
from scale.packing import hidden_states

EPSILON = 1e-6

# ------------------------------------------------------------------------------------ the surrogate


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss [B, T], stats). clip_low and clip_high are the two ε; dual_clip None or 0 is off. All
    inputs [B, T], finite.

    Worked, ε 0.2 / 0.3: ratio 1.25, A 1 -> −1.25; ratio 1.35, A 1 -> −1.30; ratio 0.75, A −1 ->
    0.8; ratio 4, A −1 -> 4.0, and with dual clip 3 -> 3.0.
    """
    # Why is the ratio always 1? In the first update after a rollout π is still π_old. The value
    # then says nothing, but its gradient is ∇log π, so the loss is the plain policy gradient; only
    # later updates on the same rollout leave 1.
    ratio = torch.exp(logprobs - old_logprobs)  # [B, T]
    free = ratio * advantages  # [B, T]
    held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages  # [B, T]
    loss = -torch.minimum(free, held)  # [B, T]
    clipped = held < free  # [B, T]  the minimum took the clipped branch: this token has no gradient
    if dual_clip:
        # For A < 0 the minimum does not bound a growing ratio: one token can then carry the whole
        # batch.
        bound = dual_clip * advantages.abs()  # [B, T]
        over = loss > bound  # [B, T]  so A < 0: only then is the loss positive
        loss, clipped = torch.where(over, bound, loss), clipped | over  # [B, T], [B, T]
    return loss, {"ratio": ratio.detach(), "clipped": clipped}


# -------------------------------------------------------------------------------------- aggregation
# Token mean or sequence mean? The recipe says which ("loss_aggregation"): a sequence mean lets a
# long trajectory's tokens count less each, a token mean lets a long trajectory count more as a
# whole. Either way the weights come from the whole update batch before it is cut: averaging the
# means of unequal micro-batches is a third, accidental, loss.


def sequence_weights(response_mask: Tensor) -> Tensor:
    """Mean over each trajectory's model tokens, then over the trajectories that have any. 0 for
    those that have none.

    Worked: mask [[1, 1, 0], [1, 0, 0], [0, 0, 0]] -> [[1/4, 1/4, 0], [1/2, 0, 0], [0, 0, 0]].
    """
    mask = response_mask.float()  # [B, T]
    lengths = mask.sum(1, keepdim=True)  # [B, 1]
    trajectories = (lengths > 0).sum()
    # clamp: a row without a model token is 0 / 1 = 0 and not 0 / 0 = NaN.
    return mask / lengths.clamp(min=1) / trajectories.clamp(min=1)  # [B, T]


def token_weights(response_mask: Tensor) -> Tensor:
    """The same weight for each model token. Worked: mask [[1, 1, 0], [1, 0, 0], [0, 0, 0]] -> 1/3
    on three tokens, else 0.
    """
    mask = response_mask.float()  # [B, T]
    return mask / mask.sum().clamp(min=1)  # [B, T]


def aggregate(loss: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · loss, a scalar. Give it rows of the loss with the same rows of the global weights:
    the sums of the micro-batches add up to the loss of the batch, however it was cut, and so do
    their gradients.

    Worked: loss [[1, 2, 9]], weights [[1/4, 1/4, 0]] -> 0.75.
    """
    return (model_only(loss, weights) * weights).sum()


def model_only(values: Tensor, response_mask: Tensor) -> Tensor:
    """values where the mask is not 0, else 0. Are inserted tokens really masked? Here, before any
    exp: selected by `where`, because 0 · inf is NaN both forward and backward.

    Worked: values [2, inf], mask [1, 0] -> [2, 0].
    """
    return torch.where(response_mask.bool(), values, 0)


# --------------------------------------------------------------------- rewards, advantages, returns


def token_rewards(batch, recipe) -> Tensor:
    """[B, T]: −kl_coef · k1 on model tokens if the KL is in the reward, and the trajectory's reward
    on its last one.

    Worked: mask [1, 0, 1, 0], reward 2, kl_coef 0.1, k1 0.5 everywhere -> [−0.05, 0, 1.95, 0].
    """
    # Where is the KL? Here, inside the reward, if kl_place is "reward"; if "loss", in compute_loss.
    coefficient = kl.coefficient(recipe, "reward")
    penalty = kl.kl_in_reward(
        batch.old_logprobs, batch.ref_logprobs, batch.response_mask, coefficient
    )  # [B, T]
    return penalty + batch.rewards[:, None] * last_model_token(batch.response_mask)  # [B, T]


def last_model_token(response_mask: Tensor) -> Tensor:
    """[B, T] bool, one True per row that has a model token: the column of T may be padding, or a
    document cut short.

    Worked: [1, 0, 1, 0] -> [0, 0, 1, 0].
    """
    mask = response_mask.bool()  # [B, T]
    following = (
        mask.flip(1).long().cumsum(1).flip(1)
    )  # [B, T]  model tokens from here on, this one included
    return mask & (following == 1)  # [B, T]


def gae(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(advantages [B, T], returns [B, T]), both 0 on masked tokens. λ = 1: returns are the rewards
    to go, whatever V says.

    Worked: rewards [0, 9, 0, 1], values [0.5, 7, 0.6, 0.8], mask [1, 0, 1, 1], γ 1, λ 0.5. From
    behind: 1 − 0.8 = 0.2;
    0.8 − 0.6 + 0.5 · 0.2 = 0.3;  0.6 − 0.5 + 0.5 · 0.3 = 0.25 -> advantages [0.25, 0, 0.3, 0.2],
    returns [0.75, 0, 0.9, 1].
    """
    mask, advantages = response_mask.bool(), torch.zeros_like(values)  # [B, T], [B, T]
    next_value = next_advantage = values.new_zeros(len(values))  # [B]
    for t in reversed(range(values.shape[1])):
        # A document is no step of the policy: a step reaches over it to the next model token,
        # undiscounted.
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]  # [B]
        next_advantage = torch.where(
            mask[:, t], delta + gamma * lam * next_advantage, next_advantage
        )  # [B]
        next_value = torch.where(mask[:, t], values[:, t], next_value)  # [B]
        advantages[:, t] = next_advantage
    advantages = model_only(advantages, mask)  # [B, T]
    return advantages, advantages + model_only(values, mask)  # [B, T], [B, T]


def whiten(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(A − mean) / (std + 1e-6) over the model tokens of the batch, each weighing 1; 0 on masked
    tokens.

    Worked: [2, 99, 4], [6, 0, 0] with mask [1, 0, 1], [1, 0, 0]: mean 4, std (ddof 1) 2 -> [−1, 0,
    0], [1, 0, 0].
    """
    mask = response_mask.bool()  # [B, T]
    steps = advantages[mask]  # [N]
    if (
        len(steps) < 2 or (steps.max() - steps.min()) <= EPSILON
    ):  # nothing to compare: 0, and not rounding errors blown up
        return torch.zeros_like(advantages)  # [B, T]
    return model_only((advantages - steps.mean()) / (steps.std() + EPSILON), mask)  # [B, T]


# --------------------------------------------------------------------------------------- the critic


class Critic(nn.Module):
    """V(s_t), a body of its own with one linear output. Column t is the state before tokens[:, t +
    1] is chosen.

    Give it a copy of the policy's body (without its vocabulary head): a shared one would be pulled
    by two losses. The new output starts at 0, so every value does, and the first step is REINFORCE
    on whitened returns.
    """

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(
            backbone.config.hidden_size, 1, device=next(backbone.parameters()).device
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """tokens [B, L], right-padded -> values [B, L − 1] in fp32; 0 where the mask [B, L − 1]
        is.
        """
        wanted = (
            torch.ones_like(tokens[:, 1:], dtype=torch.bool) if mask is None else mask.bool()
        )  # [B, T]
        # On GPUs the body computes in bf16 as the policy's does; its 8 bits would be too coarse for
        # a value.
        with torch.autocast(
            tokens.device.type, torch.bfloat16, enabled=tokens.device.type != "cpu"
        ):
            hidden = hidden_states(self.backbone, tokens, wanted)  # [N, H]
        values = torch.zeros(wanted.shape, device=tokens.device)  # [B, T]
        return values.masked_scatter(wanted, self.head(hidden.float())[:, 0])


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(loss [B, T], clipped [B, T] bool): ½ of the larger squared error, that of V and that of V
    held within `clip` of V_old.

    clip 0 is off. Worked, clip 0.2, returns 1, V_old 0.5: V 0.6 -> ½ · 0.4² = 0.08; V 0.9 is held
    at 0.7 -> ½ · 0.3² = 0.045, without a gradient; V 0.1 would be held at 0.3, but its own error is
    larger -> ½ · 0.9² = 0.405.
    """
    free = (values - returns).square() / 2  # [B, T]
    if not clip:
        return free, torch.zeros_like(free, dtype=torch.bool)
    held = (old_values + (values - old_values).clamp(-clip, clip) - returns).square() / 2  # [B, T]
    return torch.maximum(free, held), held > free  # [B, T], [B, T]


def compute_value_loss(values: Tensor, batch, recipe) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss [B, T], stats of [B, T]) of a micro-batch, 0 on masked tokens; weigh it with
    `token_weights` of the update.
    """
    values, old_values, returns = (
        model_only(x, batch.response_mask) for x in (values, batch.values, batch.returns)
    )  # [B, T]
    loss, clipped = value_loss(values, old_values, returns, recipe.value_clip)  # [B, T], [B, T]
    return loss, {"clipped": clipped}


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """1 − Var(returns − V) / Var(returns) over model tokens: 1 foresees all, 0 is no better than a
    constant, below is worse.

    Worked: returns 0, 2, V 0, 1: errors 0, 1: 1 − 0.25 / 1 = 0.75. 0 where all returns are equal:
    there is nothing to foresee.
    """
    mask = response_mask.bool()  # [B, T]
    if not mask.any() or returns[mask].var(correction=0) <= EPSILON:
        return 0.0
    return 1 - ((returns - values)[mask].var(correction=0) / returns[mask].var(correction=0)).item()


# ------------------------------------------------------------------------------------ the interface
# The three functions of every algorithm (see grpo.py). The critic has a loss and an optimizer of
# its own besides.


def compute_advantages(batch, recipe) -> Tensor:
    """[B, T], once, on the whole rollout batch. Reads batch.values, and writes batch.returns: what
    the critic shall learn.
    """
    if batch.values is None:
        raise InputError(
            "PPO needs the critic's values of the batch (batch.values) before its advantages"
        )
    rewards = token_rewards(batch, recipe)  # [B, T]
    advantages, batch.returns = gae(
        rewards, batch.values, batch.response_mask, recipe.gamma, recipe.gae_lambda
    )  # [B, T]
    return whiten(advantages, batch.response_mask)  # [B, T]


def compute_token_weights(batch, recipe) -> Tensor:
    """On the global batch of one update. Their sum is 1."""
    if recipe.loss_aggregation == "sequence":
        return sequence_weights(batch.response_mask)  # [B, T]
    if recipe.loss_aggregation == "token":
        return token_weights(batch.response_mask)  # [B, T]
    raise InputError(f"unknown loss_aggregation {recipe.loss_aggregation!r}: sequence or token")


def compute_loss(logprobs: Tensor, batch, recipe) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss [B, T], stats of [B, T]) of a micro-batch, 0 on masked tokens: Σ weight · loss is what
    `backward` is called on.
    """
    logprobs, old_logprobs, advantages = (
        model_only(x, batch.response_mask) for x in (logprobs, batch.old_logprobs, batch.advantages)
    )  # [B, T] each: whatever stands on a document's tokens, inf and NaN too, stops here
    loss, stats = clipped_surrogate(
        logprobs, old_logprobs, advantages, recipe.clip_low, recipe.clip_high, recipe.dual_clip
    )
    stats["kl_old"] = kl.k3(
        old_logprobs, logprobs.detach()
    )  # [B, T]  how far this update has gone from the sampler
    # Where is the KL? Here, if kl_place is "loss"; if "reward", in the advantage; if kl_coef is 0,
    # nowhere.
    if coefficient := kl.coefficient(recipe, "loss"):
        ref_logprobs = model_only(kl.required(batch.ref_logprobs), batch.response_mask)  # [B, T]
        loss = loss + coefficient * kl.kl_in_loss(
            logprobs, ref_logprobs, old_logprobs, recipe.kl_estimator
        )  # [B, T]
    return loss, stats | reference_stats(logprobs.detach(), batch)


def reference_stats(logprobs: Tensor, batch) -> dict[str, Tensor]:
    """Every estimator, for the log, whenever the batch carries the reference: k1 and k3 measure,
    |d| shows drift.
    """
    if batch.ref_logprobs is None:
        return {}
    ref_logprobs = model_only(batch.ref_logprobs, batch.response_mask)  # [B, T]
    return {name: getattr(kl, name)(logprobs, ref_logprobs) for name in ("k1", "k2", "k3", "k_abs")}


def main() -> None:
    ratios = [0.5, 0.75, 1.0, 1.25, 1.35, 4.0]
    print(
        "clip 0.2 / 0.28, dual clip 3: the loss of one token, and by how much a rise of log π would"
        " change it\n"
    )
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
    rewards, values = (
        torch.tensor([[0.0, 9, 0, 1]]),
        torch.tensor([[0.5, 7, 0.6, 0.8]]),
    )  # [1, 4], [1, 4]
    mask = torch.tensor([[1, 0, 1, 1]])  # [1, 4]
    print(
        f"\nGAE, γ 1: rewards {rewards[0].tolist()}, values {[0.5, 7, 0.6, 0.8]}; the second token"
        " is a document"
    )
    for lam in (0.0, 0.5, 1.0):
        advantages, returns = (
            [round(x, 2) for x in row[0].tolist()] for row in gae(rewards, values, mask, 1.0, lam)
        )
        print(f"  λ {lam}: advantages {advantages!s:<24} returns {returns}")
    print("\nthe critic's loss, value_clip 0.2, returns 1, V_old 0.5:")
    for value in (0.6, 0.9, 0.1):
        loss, clipped = value_loss(
            torch.tensor([[value]]), torch.tensor([[0.5]]), torch.ones(1, 1), 0.2
        )
        print(
            f"  V {value} -> {loss.item():.3f}{'  (held: no gradient)' if clipped.item() else ''}"
        )


if __name__ == "__main__":
    run_main(main)
