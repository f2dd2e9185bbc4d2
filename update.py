"""One optimizer update: the gradient of Σ weight · loss, on any number of processes.

    weights [B, T] of the whole update (Σ = 1) -> micro-batches -> Σ weight · loss, backward
    -> gradients of all processes added up -> clipped to norm 1 -> one optimizer step

The weights are fixed before the update is split into micro-batches and over processes: the usual
mean of micro-batch means is 21 to 28 % off. All processes know all rows, and each takes its share;
all have the same number of micro-batches, because each backward pass waits for the others.
Also here: scoring a batch before the weights move (π_old, π_ref, the critic's values).
Left out: several epochs over a rollout.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

import dapo
import grpo
import ppo
import reinforce_pp
from errors import setting
from policy import Batch, Policy, deal_micro_batches, evaluating, lr_factor
from scale.lora import without_lora
from scale.shards import cut, full, in_parts

ALGORITHMS = {
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp,
    "grpo": grpo,
    "dapo": dapo,
    "ppo": ppo,
}
MAX_GRAD_NORM = 1.0  # what all five papers' codes have


@dataclass(frozen=True)
class UpdateSettings:
    algorithm: str = setting("reinforce_pp_baseline", "whose advantage it is", one_of=ALGORITHMS)
    steps: int = setting(100, "rollouts; each is followed by its updates", least=1)
    trajectories_per_update: int = setting(256, "0 = all of a step in one update", least=0)
    tokens_per_micro_batch: int = setting(16384, "padded tokens per forward pass", least=1)
    mask_documents: bool = setting(True, "False trains on the documents too (ablation)")


@dataclass
class Parts:
    """What a step works with. `model` is what an update calls: the policy, spread or not."""

    settings: Any  # settings.Settings
    accelerator: Accelerator
    policy: Policy
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    recompute: bool  # are π_old's log-probs scored again? Else they are as sampled
    reference: Policy | None = None
    critic: ppo.Critic | None = None
    critic_model: torch.nn.Module | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    # what samples: a QuestionStream, an Environment, its play, how to get at the weights, a Scorer
    stream: Any = None
    environment: Any = None
    play: Callable | None = None
    sampler: Callable | None = None
    scorer: Callable | None = None

    @property
    def algorithm(self):
        return ALGORITHMS[self.settings.algorithm]


# ------------------------------------------------------------------------ scored before the update


@torch.no_grad()
def score(parts: Parts, module, compute: Callable[[Batch], torch.Tensor], batch: Batch):
    """compute(rows) [b, t] of all rows [B, T]: each process takes its share, all get all."""
    accelerator, scored = parts.accelerator, torch.zeros(batch.response_mask.shape)  # [B, T]
    with evaluating(module):
        for rows in shares(parts, batch):
            result = compute(batch.rows(rows).to(accelerator.device))  # [b, t]
            scored[rows, : result.shape[1]] = result[: len(rows)].float().cpu()
    cut(module)
    if accelerator.num_processes == 1:
        return scored
    return accelerator.reduce(scored.to(accelerator.device), "sum").cpu()


def shares(parts: Parts, batch: Batch) -> list[torch.Tensor]:
    """This process's micro-batches, as row numbers; all processes have the same number of them."""
    accelerator, tokens = parts.accelerator, parts.settings.tokens_per_micro_batch
    rank, processes = accelerator.process_index, accelerator.num_processes
    return deal_micro_batches(batch.response_mask, tokens, processes, rank)


def score_policy(parts: Parts, policy: Policy, batch: Batch) -> torch.Tensor:
    """Log-probs [B, T] of the batch's tokens under `policy`."""

    def logprobs(part: Batch) -> torch.Tensor:
        return policy(part.tokens, parts.settings.temperature, part.response_mask)  # [b, t]

    return score(parts, policy, logprobs, batch)


def score_reference(parts: Parts, batch: Batch) -> torch.Tensor:
    """π_ref's log-probs [B, T]. With LoRA it is the policy without what was learned."""
    if parts.reference is not None:
        return score_policy(parts, parts.reference, batch)
    with without_lora(parts.policy):
        return score_policy(parts, parts.policy, batch)


def score_values(parts: Parts, batch: Batch) -> torch.Tensor:
    """The critic's values [B, T] of the states in which the policy chose a token, 0 elsewhere."""

    def values(part: Batch) -> torch.Tensor:
        return parts.critic(part.tokens, part.response_mask)  # [b, t]

    return score(parts, parts.critic, values, batch)


# -------------------------------------------------------------------------------------- the update


def update(parts: Parts, batch: Batch) -> dict[str, float]:
    """One optimizer step of the policy on these rows, and with PPO one of the critic."""
    settings, algorithm = parts.settings, parts.algorithm
    batch.token_weights = algorithm.compute_token_weights(batch, settings)  # [B, T]

    def loss_of(micro: Batch, totals: dict) -> torch.Tensor:
        logprobs = parts.model(micro.tokens, settings.temperature, micro.response_mask)  # [b, t]
        if micro.sampled_logprobs is not None:
            add_gap(totals, logprobs.detach(), micro)
        if micro.old_logprobs is None:  # π_old is π: nothing has moved since the rollout
            micro.old_logprobs = logprobs.detach()
        loss, stats = algorithm.compute_loss(logprobs, micro, settings)  # [b, t]
        add_stats(totals, logprobs.detach(), stats, micro)
        return (micro.token_weights * loss).sum()

    # What happens when all rewards of a group are equal? Its advantages are 0, so it adds nothing
    # here. If all groups are equal the gradient is 0, and only Adam's momentum moves the weights.
    totals = descend(parts, parts.model, parts.optimizer, batch, loss_of)
    if parts.critic is not None and stepped(totals):
        totals |= update_critic(parts, batch)
    return totals


def stepped(totals: dict[str, float]) -> bool:
    return math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"])


def update_critic(parts: Parts, batch: Batch) -> dict[str, float]:
    """One step of the critic towards batch.returns; every model token weighs the same."""
    batch.token_weights = ppo.token_weights(batch.response_mask)  # [B, T]

    def loss_of(micro: Batch, totals: dict) -> torch.Tensor:
        values = parts.critic_model(micro.tokens, micro.response_mask)  # [b, t]
        loss, stats = ppo.compute_value_loss(values, micro)  # [b, t]
        totals["value_clip_fraction"] += (micro.token_weights * stats["clipped"]).sum().item()
        return (micro.token_weights * loss).sum()

    totals = descend(parts, parts.critic_model, parts.critic_optimizer, batch, loss_of)
    loss, norm = totals.pop("loss"), totals.pop("grad_norm")
    return totals | {"value_loss": loss, "critic_grad_norm": norm}


def descend(
    parts: Parts, model, optimizer, batch: Batch, loss_of: Callable[[Batch, dict], torch.Tensor]
) -> dict[str, float]:
    """Backward passes over the micro-batches, and one optimizer step.

    A loss or a gradient that is not finite changes no weight: the caller looks, and stops.
    """
    accelerator, totals = parts.accelerator, defaultdict(float)
    micro_batches = shares(parts, batch)
    for number, rows in enumerate(micro_batches):
        micro = batch.rows(rows).to(accelerator.device)
        # Gradients meet at the last pass; weights in parts take theirs at every one.
        wait = number + 1 < len(micro_batches) and not in_parts(model)
        with accelerator.no_sync(model) if wait else contextlib.nullcontext():
            loss = loss_of(micro, totals)
            # DDP averages the gradients of its processes; ours are parts of one sum.
            accelerator.backward(loss * accelerator.num_processes)
        totals["loss"] += loss.item()
    totals = over_processes(totals, accelerator)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    totals["grad_norm"] = full(norm).item()
    if stepped(totals):
        optimizer.step()
    optimizer.zero_grad()
    return totals


def shuffled_updates(step: int, count: int, settings) -> tuple[torch.Tensor, ...]:
    """The rows of each of a step's updates. DAPO may keep fewer rows than asked for: then there are
    fewer updates, and not smaller ones.
    """
    generator = torch.Generator().manual_seed(settings.seed * 7_919 + step)
    order = torch.randperm(count, generator=generator)
    return order.tensor_split(math.ceil(count / rows_per_update(settings)))


def rows_per_update(settings) -> int:
    return settings.trajectories_per_update or settings.questions_per_step * settings.group_size


def set_lr(parts: Parts, step: int, number: int) -> float:
    """Of the policy, for update `number` of the step. The critic's stays at critic_lr: a long
    warm-up of the policy is the critic's time to learn.
    """
    settings = parts.settings
    per_step = settings.questions_per_step * settings.group_size
    updates = math.ceil(per_step / rows_per_update(settings))
    done, total = step * updates + number, settings.steps * updates
    lr = settings.lr * lr_factor(done, total, settings.lr_warmup, settings.lr_schedule)
    for group in parts.optimizer.param_groups:
        group["lr"] = lr
    return lr


# ---------------------------------------------------------------------------------- what is logged

EXTREMES = {  # what is no sum and no mean
    "ratio_min": min,
    "ratio_max": max,
    "grad_norm": max,
    "critic_grad_norm": max,
    "logprob_gap_max": max,
}


def add_gap(totals: dict, logprobs: torch.Tensor, micro: Batch) -> None:
    """How far are the log-probs of sampling from those of scoring?"""
    gap = (logprobs - micro.sampled_logprobs).abs() * micro.response_mask  # [b, t]
    totals["logprob_gap"] += (micro.token_weights * gap).sum().item()
    totals["logprob_gap_max"] = max(totals["logprob_gap_max"], gap.max().item())


def add_stats(totals: dict, logprobs: torch.Tensor, stats: dict, micro: Batch) -> None:
    """Weighted sums over the update: with token weights that sum to 1 they are means."""
    ratio = stats.pop("ratio")  # [b, t]  1 on masked tokens
    totals["ratio_min"] = min(totals.get("ratio_min", 1.0), ratio.min().item())
    totals["ratio_max"] = max(totals.get("ratio_max", 1.0), ratio.max().item())
    totals["entropy"] -= (micro.token_weights * logprobs).sum().item()  # Monte-Carlo estimate
    for name, value in stats.items():
        name = "clip_fraction" if name == "clipped" else name
        totals[name] += (micro.token_weights * value).sum().item()


def over_processes(totals: dict[str, float], accelerator: Accelerator) -> dict[str, float]:
    """The totals of all processes: each has summed its own rows."""
    if accelerator.num_processes == 1:
        return dict(totals)
    every = gather_object([dict(totals)])
    totals = {}
    for name in every[0]:
        add = EXTREMES.get(name, sum)
        totals[name] = add(part[name] for part in every)
    return totals


def mean_of(results: list[dict[str, float]]) -> dict[str, float]:
    """The means of a step's updates; of EXTREMES, the extreme."""
    means = {}
    for name in results[0]:
        values = [result[name] for result in results if name in result]
        means[name] = EXTREMES.get(name, lambda v: sum(v) / len(v))(values)
    return means
