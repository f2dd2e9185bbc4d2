"""PPO: a clipped surrogate for the policy, and a critic whose value of each state is the baseline.

    ratio = π(a) / π_old(a)
    loss  = −min(ratio · A, clip(ratio, 1 − ε_low, 1 + ε_high) · A)                    per token

    δ_t = r_t + γ V_{t'} − V_t,    A_t = δ_t + γλ A_{t'}
    t' is the next model token; after the last one V = A = 0
    returns = A + V, the critic's targets
    the policy is trained on A, whitened over the model tokens of the batch
    value loss = ½ max((V − returns)², (V_old + clip(V − V_old, −c, c) − returns)²)    per token

    total = Σ weight · loss (update.py),    Σ weight = 1 over the global batch of one update
    weight of a model token, by --loss_aggregation:
    "sequence" (GRPO, UR² eq. 3)    1 / (model tokens of the trajectory) / (trajectories)
    "token" (DAPO's code; critic)   1 / (model tokens of the whole batch)
    "question" (DAPO's formula)     1 / (model tokens of the question's group) / (questions)
    trajectories and questions without model tokens are not counted

    If the sampler μ differs from π_old, for example as a bf16 copy or a server (--mismatch):
    ρ = π_old(a) / μ(a),    loss = w(ρ) · loss, see `mismatch_weights`
    the KL loss and the critic's loss are not multiplied by w. But in the policy's weights a token
    with w = 0 is not counted and weighs 0 (`trained_tokens`), so it has no KL loss either

Source: Schulman et al. 2017 eq. 7 (with one ε); Schulman et al. 2015 eq. 16 for GAE; DAPO for two ε
("clip-higher"). GRPO, DAPO and REINFORCE++ use the surrogate, the weights and the loss of this
file, and REINFORCE++ also uses the whitening. GAE goes from each model token to the next one and
skips the documents between them, which the critic still reads as context.
Left out: the dual clip of verl's default (none of the papers has it), a network shared by policy
and critic, an entropy bonus, a second epoch, early stopping, reward scaling; verl's and TRL's other
weights for a sampler (a clipped product, rejected tokens, a geometric mean); and verl's "bypass"
mode, which takes the sampler's μ as π_old and so clips the ratio π/μ.
"""

import torch
from torch import Tensor, nn

import kl
from errors import run_main
from scale.packing import hidden_states

Stats = dict[str, Tensor]  # name -> [B, T]
EPSILON = 1e-6
VALUE_CLIP = 0.2  # values are clipped to ±0.2 around the old value
# --mismatch -> (upper bound C, weight above it): verl's preset, and TRL's default.
MISMATCH = {"token": (2.0, 2.0), "sequence_mask": (3.0, 0.0)}


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Stats]:
    """Returns (loss [B, T], stats). All tensors are [B, T] and must be finite.

    Worked, clip_low 0.2, clip_high 0.3: ratio 1.25, A 1 -> −1.25; ratio 1.35, A 1 -> −1.30;
    ratio 0.75, A −1 -> 0.8; ratio 4, A −1 -> 4.0.
    """
    # Why is the ratio often 1? In the first update after a rollout π is still π_old, so the
    # gradient is A ∇log π, the plain policy gradient. Apart from rounding, the ratio differs from 1
    # only from the second update of a step on.
    ratio = torch.exp(logprobs - old_logprobs)  # [B, T]
    unclipped = ratio * advantages  # [B, T]
    clamped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages  # [B, T]
    loss = -torch.minimum(unclipped, clamped)  # [B, T]
    clipped = clamped < unclipped  # [B, T]  the clipped term is the minimum: no gradient
    return loss, {"ratio": ratio.detach(), "clipped": clipped}


# ------------------------------------------------------------ if the sampler μ differs from π_old
def mismatch_weights(batch, mode: str) -> Tensor:
    """Returns the weight w [B, T] of each token's policy loss, without a gradient. C is the bound
    in MISMATCH, and Π ρ_t is the product over the row's model tokens.

    token           w = min(ρ_t, C)                           biased; its variance is small
    sequence_mask   w = Π ρ_t if Π ρ_t ≤ C, else 0            its bias vanishes as C grows

    A token with response_mask 0 counts as ρ = 1 and has w = 1. The logarithm of what is compared
    with C (ρ_t or the product) is clamped to ±20.
    Worked: a row has two model tokens with ρ 0.8 and 4, and then a token with response_mask 0. The
    product is 3.2. The weights are: token [0.8, 2, 1], sequence_mask [0, 0, 1].
    Source: verl's and TRL's corrections for a rollout by another program.
    """
    (highest, above), mask = MISMATCH[mode], batch.response_mask.bool()
    log_ratio = model_only(batch.old_logprobs - batch.sampled_logprobs, mask)  # [B, T]
    if mode == "sequence_mask":
        log_ratio = log_ratio.sum(1, keepdim=True)  # [B, 1]
    ratio = log_ratio.detach().clamp(-20, 20).exp()  # [B, T] or [B, 1]
    weights = torch.where(ratio > highest, above, ratio)  # [B, T] or [B, 1]
    return torch.where(mask, weights, 1.0)  # [B, T]


def trained_tokens(batch) -> Tensor:
    """Returns response_mask [B, T] without the tokens whose mismatch weight is 0. Such
    tokens do not count in the denominators of the loss means, as in verl; in TRL they count.
    """
    if batch.mismatch_weights is None:
        return batch.response_mask
    return model_only(batch.response_mask, batch.mismatch_weights > 0)


def effective_share(batch) -> float:
    """Returns the effective sample size as a share of the n model tokens, (Σ w)² / (n Σ w²): 1 if
    all weights are equal, but 0 if all are 0.

    Worked: w [2, 1, 0.5] on three model tokens: 3.5² / (3 · 5.25) = 0.7778.
    """
    weights = batch.mismatch_weights[batch.response_mask.bool()]  # [n]
    return (weights.mean().square() / weights.square().mean().clamp(min=EPSILON)).item()


# -------------------------------------------------------------------------------------- aggregation
# Token mean or sequence mean? --loss_aggregation decides. A sequence mean gives each token of a
# long trajectory less weight; a token mean gives the long trajectory more weight in total; a
# question mean gives all groups equal weight, and all tokens of one group equal weight. Weights are
# computed for the whole update, before it is cut into micro-batches: the mean of the means of
# unequal micro-batches would be a fourth kind of mean, which nobody chose.


def question_weights(response_mask: Tensor, questions: Tensor) -> Tensor:
    """Returns the weights of a mean over the model tokens of each question's rows, then over the
    questions that have model tokens. questions [B]: the index of each row's question.

    This is DAPO's objective to the letter: 1 / Σ|o| is inside the mean over questions.
    Worked: the groups of two questions have 2 and 8 model tokens. Each token of the first group
    weighs 1/2/2 = 0.25 and each of the second 1/8/2 = 0.0625; in a token mean all weigh 1/10.
    """
    mask = response_mask.float()  # [B, T]
    tokens = torch.bincount(questions, mask.sum(1))  # [questions]
    # clamp: for a question without model tokens, 0 / 1 = 0 instead of 0 / 0 = NaN.
    per_token = mask / tokens[questions, None].clamp(min=1)  # [B, T]
    return per_token / (tokens > 0).sum().clamp(min=1)  # [B, T]


def sequence_weights(response_mask: Tensor) -> Tensor:
    """Returns the weights of a mean over each trajectory's model tokens, then over the trajectories
    that have model tokens.

    Worked: mask [[1, 1, 0], [1, 0, 0], [0, 0, 0]] -> [[1/4, 1/4, 0], [1/2, 0, 0], [0, 0, 0]].
    """
    # Each row counts as a question of its own.
    rows = torch.arange(len(response_mask), device=response_mask.device)  # [B]
    return question_weights(response_mask, rows)  # [B, T]


def token_weights(response_mask: Tensor) -> Tensor:
    """Returns 1 / (model tokens of the batch) on each model token, else 0.

    Worked: mask [[1, 1, 0], [1, 0, 0]] -> 1/3 on each of the three model tokens.
    """
    mask = response_mask.float()  # [B, T]
    return mask / mask.sum().clamp(min=1)  # [B, T]


def model_only(values: Tensor, response_mask: Tensor) -> Tensor:
    """Returns values, or 0 on masked tokens. Worked: values [2, inf], mask [1, 0] -> [2, 0]."""
    # Are the environment's tokens really masked? Yes (unless `mask_documents` is False): here, and
    # before any exp is taken. `where` is used, because a product with the mask could give
    # 0 · inf = NaN, forward and backward.
    return torch.where(response_mask.bool(), values, 0)


# --------------------------------------------------------------------- rewards, advantages, returns
def token_rewards(batch, settings) -> Tensor:
    """Returns [B, T]: the reward on the last model token, and with estimator k1 also −kl_coef · k1
    (the KL in the reward) on every model token.

    Worked: mask [1, 0, 1, 0], reward 2, kl_coef 0.1, k1 0.5 everywhere -> [−0.05, 0, 1.95, 0].
    """
    # Where is the KL? k1 is here, in the reward; k2 and k3 are in compute_loss.
    penalty = kl.kl_in_reward(batch, settings)  # [B, T]
    last = last_model_token(batch.response_mask)  # [B, T]
    # `where`, not a product: a row with a failed search has the reward NaN and a mask of zeros, and
    # NaN · 0 would be NaN.
    return penalty + torch.where(last, batch.rewards[:, None], 0)  # [B, T]


def last_model_token(response_mask: Tensor) -> Tensor:
    """Returns a mask [B, T], True on the last model token. Worked: [1, 0, 1, 0] -> [0, 0, 1, 0]."""
    mask = response_mask.bool()  # [B, T]
    remaining = mask.flip(1).long().cumsum(1).flip(1)  # [B, T]  model tokens from t on
    return mask & (remaining == 1)  # [B, T]


def gae(
    token_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma=1.0, lam=1.0
) -> tuple[Tensor, Tensor]:
    """Returns (advantages, returns), [B, T] each, 0 on masked tokens. With λ = 1 the return at a
    model token is the sum of the model tokens' rewards from there on (discounted by γ), whatever
    the values are.

    Worked: rewards [0, 9, 0, 1], values [0.5, 7, 0.6, 0.8], mask [1, 0, 1, 1], γ 1, λ 0.5.
    From the end: 1 − 0.8 = 0.2;  0.8 − 0.6 + 0.5 · 0.2 = 0.3;  0.6 − 0.5 + 0.5 · 0.3 = 0.25
    -> advantages [0.25, 0, 0.3, 0.2], returns [0.75, 0, 0.9, 1].
    """
    mask = response_mask.bool()  # [B, T]
    advantages = torch.zeros_like(values)  # [B, T]
    next_value = next_advantage = values.new_zeros(len(values))  # [B]
    for t in reversed(range(values.shape[1])):
        # A masked token, such as a document's, is not a step: the recursion skips it, undiscounted.
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]  # [B]
        advantage = delta + gamma * lam * next_advantage  # [B]
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)  # [B]
        next_value = torch.where(mask[:, t], values[:, t], next_value)  # [B]
        advantages[:, t] = next_advantage
    advantages = model_only(advantages, mask)  # [B, T]
    returns = advantages + model_only(values, mask)  # [B, T]
    return advantages, returns


def whiten(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Returns (A − mean) / (std + 1e-6), with mean and std (ddof 1) over all model tokens of the
    batch; 0 on masked tokens.

    verl divides by √(variance + 1e-8), also with ddof 1; OpenRLHF by the std with ddof 0.
    Worked: [2, 99, 4], [6, 0, 0] with mask [1, 0, 1], [1, 0, 0]: mean 4, std 2
    -> [−1, 0, 0], [1, 0, 0].
    """
    mask = response_mask.bool()  # [B, T]
    steps = advantages[mask]  # [N]
    # If all advantages are equal, the result is 0: dividing would only amplify rounding errors.
    if len(steps) < 2 or steps.max() - steps.min() <= EPSILON:
        return torch.zeros_like(advantages)  # [B, T]
    centered = advantages - steps.mean()  # [B, T]
    white = centered / (steps.std() + EPSILON)  # [B, T]
    return model_only(white, mask)  # [B, T]


class Critic(nn.Module):
    """Computes the values V(s_t), where s_t is the state before tokens[:, t + 1] is chosen.

    The backbone is a copy of the policy's, because in a shared one the losses of policy and critic
    would interfere. The head starts at 0, so all values are 0 in the first step; with λ = 1 the
    advantages of this step are whitened returns, as in REINFORCE++.
    """

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        device = next(backbone.parameters()).device
        self.head = nn.Linear(backbone.config.hidden_size, 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Maps right-padded tokens [B, L] to fp32 values [B, T], 0 where the mask [B, T] is 0."""
        # On GPUs the backbone computes in bf16, as the policy's does, and the head in fp32.
        kind = tokens.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu"):
            hidden = hidden_states(self.backbone, tokens, mask.bool())  # [N, H]
        masked_values = self.head(hidden.float())[:, 0]  # [N]
        values = torch.zeros(mask.shape, device=tokens.device)  # [B, T]
        return values.masked_scatter(mask.bool(), masked_values)  # [B, T]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (loss, clipped), [B, T] each. The loss is half the larger of two squared errors: that
    of V, and that of V clipped to V_old ± 0.2. If the second is larger, `clipped` is True.

    On masked tokens all three are 0, and so is the loss.
    Worked, returns 1, V_old 0.5. V 0.6 -> ½ · 0.4² = 0.08. V 0.9 is clipped to 0.7, whose
    error is larger -> ½ · 0.3² = 0.045. V 0.1 is clipped to 0.3, but the unclipped error is
    larger -> ½ · 0.9² = 0.405.
    """
    error = (values - returns).square() / 2  # [B, T]
    near_old = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)  # [B, T]
    clipped_error = (near_old - returns).square() / 2  # [B, T]
    return torch.maximum(error, clipped_error), clipped_error > error  # [B, T], [B, T]


def explained_variance(batch) -> float:
    """Returns 1 − Var(returns − V) / Var(returns) over model tokens: 1 for a perfect critic, 0 for
    a constant V, for equal returns, or without model tokens.

    Worked: returns [0, 2] have the variance 1. V [0, 1] has the errors [0, 1], whose variance is
    0.25: 1 − 0.25 / 1 = 0.75.
    """
    mask = batch.response_mask.bool()  # [B, T]
    if not mask.any():
        return 0.0
    variance = batch.returns[mask].var(correction=0)
    residual = (batch.returns - batch.values)[mask].var(correction=0)
    return 1 - (residual / variance).item() if variance > EPSILON else 0.0


# ------------------------------------------------------------------------------------ the interface
def compute_advantages(batch, settings) -> Tensor:
    """Returns the advantages [B, T] of the whole rollout, and sets batch.returns [B, T]."""
    rewards = token_rewards(batch, settings)  # [B, T]
    mask = batch.response_mask  # [B, T]
    advantages, batch.returns = gae(rewards, batch.values, mask, lam=settings.gae_lambda)
    return whiten(advantages, mask)  # [B, T]


def compute_token_weights(batch, settings) -> Tensor:
    """Returns the weights [B, T] of a whole update. Their sum is 1, or 0 if no token is trained."""
    mask = trained_tokens(batch)  # [B, T]
    if settings.loss_aggregation == "question":
        return question_weights(mask, batch.questions)  # [B, T]
    weigh = {"sequence": sequence_weights, "token": token_weights}[settings.loss_aggregation]
    return weigh(mask)  # [B, T]


def compute_loss(logprobs: Tensor, batch, settings) -> tuple[Tensor, Stats]:
    """Returns (loss [B, T], stats of [B, T]) of a micro-batch; the loss is 0 on masked tokens."""
    mask = batch.response_mask  # [B, T]
    logprobs = model_only(logprobs, mask)  # [B, T]
    old_logprobs = model_only(batch.old_logprobs, mask)  # [B, T]
    advantages = model_only(batch.advantages, mask)  # [B, T]
    loss, stats = clipped_surrogate(
        logprobs, old_logprobs, advantages, settings.clip_low, settings.clip_high
    )
    if batch.mismatch_weights is not None:
        loss = loss * batch.mismatch_weights  # [B, T]
    stats["approx_kl"] = kl.k3(old_logprobs, logprobs.detach())  # [B, T]  KL(π_old‖π)
    # Where is the KL? k2 and k3 are added here, k1 is in the reward; with kl_coef 0 there is no KL.
    coefficient = kl.coefficient(settings, "loss")
    if batch.ref_logprobs is not None:
        ref_logprobs = model_only(batch.ref_logprobs, mask)  # [B, T]
        now = logprobs.detach()  # [B, T]
        stats |= {name: k(now, ref_logprobs) for name, k in kl.ESTIMATORS.items()}  # logged
        if coefficient:
            penalty = kl.kl_in_loss(logprobs, ref_logprobs, old_logprobs, settings.kl_estimator)
            loss = loss + coefficient * penalty  # [B, T]
    return loss, stats


def main() -> None:
    torch.set_printoptions(precision=2, sci_mode=False)
    ratio = torch.tensor([0.5, 0.75, 1.0, 1.25, 1.35, 4.0])  # [6]
    print("clip 0.2 / 0.28; six tokens with the ratios", ratio)
    for advantage in (1.0, -1.0):
        logprobs = ratio.log().requires_grad_()  # [6]
        advantages = torch.full((6,), advantage)  # [6]
        loss, _ = clipped_surrogate(logprobs, torch.zeros(6), advantages, 0.2, 0.28)
        loss.sum().backward()
        print(f"A = {advantage:+}  loss    ", loss.detach())
        print("          gradient", logprobs.grad)


if __name__ == "__main__":
    run_main(main)
