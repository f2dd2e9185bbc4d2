"""One optimizer update: the gradient of Σ weight · loss, on any number of processes.

    weights [B, T] of the whole update (Σ = 1) -> rows with a gradient -> micro-batches
    -> Σ weight · loss, backward -> gradients of all processes added up -> clipped to norm 1
    -> one optimizer step

The weights are computed before the update is cut into micro-batches. The usual method, to average
the means of the micro-batches, gives another loss if they have unequal numbers of tokens.
If the rewards of a group are equal, the advantages of its rows are 0 in most algorithms. Without a
KL or a critic, such a row has a loss and a gradient of 0. It keeps its share of the weights, but
its forward pass is skipped. If no row has a gradient, the update makes no step. This file also
computes log-probs and values before the updates of a step. With a KL, also one that is only logged,
or a critic, all rows are computed.
Left out: several epochs over a rollout.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dapo
import grpo
import kl
import ppo
import reinforce_pp
from errors import InputError, bar
from policy import Batch, Policy, evaluating
from scale.lora import without_lora
from scale.packing import micro_batches
from scale.shards import cut, full, in_parts

ALGORITHMS = {
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp,
    "grpo": grpo,
    "dapo": dapo,
    "ppo": ppo,
}
MAX_GRAD_NORM = 1.0  # ours: no paper gives one; the default of OpenRLHF, verl and TRL
Record = dict[str, float]  # metrics to be logged


@dataclass
class TrainState:
    """Everything a training step needs: models, optimizers, data, environment."""

    settings: Any  # settings.Settings
    accelerator: Accelerator
    policy: Policy
    model: nn.Module  # the policy, or its wrapper for several processes
    optimizer: torch.optim.Optimizer
    recompute: bool  # compute π_old's log-probs; if False, use those recorded while sampling
    mismatch: str = "none"  # --mismatch, but "auto" is replaced by a mode
    reference: Policy | None = None
    critic: ppo.Critic | None = None
    critic_model: nn.Module | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    stream: Any = None  # curriculum.QuestionStream
    held_out: Any = ()  # questions for the evaluations during training
    start: str = ""  # the path of the weights that the policy began with, here or in a resume
    environment: Any = None  # rollout.Environment
    generate: Any = None  # rollout.generate_by_turns, or a function of engines/ in its place
    sampler: Any = None  # returns a context manager that gives the policy to sample with
    other_models: Any = None  # rewards.OtherModels, in the main process only
    version: int = 0  # number of the policy's optimizer steps since this object was made


def compute_logprobs(state: TrainState, policy: Policy, batch: Batch) -> Tensor:
    """Returns a policy's log-probs [B, T] of the tokens in response_mask, 0 elsewhere. Each process
    computes a share.
    """
    return forward_in_shares(state, policy, batch, state.settings.temperature)


def compute_old_logprobs(state: TrainState, batch: Batch, rows: Tensor) -> None:
    """Replaces the sampler's log-probs by π_old's in those of the given rows [n] whose loss has a
    gradient. The other rows of batch.old_logprobs [B, T] keep the sampler's, which are rounded
    differently.
    """
    rows = rows[rows_that_teach(batch.rows(rows))]
    put(rows, compute_logprobs(state, state.policy, batch.rows(rows)), into=batch.old_logprobs)


def compute_values(state: TrainState, batch: Batch) -> Tensor:
    """Returns the critic's values [B, T]; every process computes a share."""
    return forward_in_shares(state, state.critic, batch)


@torch.no_grad()
def forward_in_shares(state: TrainState, module, batch: Batch, *temperature) -> Tensor:
    """Returns the module's outputs [B, T], computed in micro-batches by all processes together."""
    output = torch.zeros_like(batch.response_mask, device=state.accelerator.device)  # [B, T]
    with evaluating(module):
        for rows in bar(shares(state, batch), "micro-batches, scored"):
            micro = batch.rows(rows).to(output.device)
            result = module(micro.tokens, *temperature, micro.response_mask)  # [b, t]
            output[rows, : result.shape[1]] = result[: len(rows)]
    cut(module)
    return state.accelerator.reduce(output, "sum").cpu()


def compute_ref_logprobs(state: TrainState, batch: Batch) -> Tensor:
    """Returns π_ref's log-probs [B, T]. With LoRA, π_ref is the policy without its adapters."""
    with without_lora(state.policy):
        return compute_logprobs(state, state.reference or state.policy, batch)


def shares(state: TrainState, batch: Batch) -> list[Tensor]:
    """Returns this process's micro-batches, each as row indices of the batch. All processes have
    the same number of micro-batches.
    """
    return micro_batches(
        batch.tokens,
        batch.response_mask,
        state.settings.tokens_per_micro_batch,
        state.accelerator.num_processes,
        state.accelerator.process_index,
    )


def old_logprobs_come_first(state: TrainState) -> bool:
    """Returns whether π_old's log-probs of all rows must be known before a step's first update: for
    a KL in the reward, for a mismatch mode that leaves tokens out of the loss, or for documents in
    the loss, which have no log-probs of the sampler. Otherwise the first update, whose policy is
    π_old, takes those of its own forward pass.
    """
    settings = state.settings
    unsampled = not settings.mask_documents
    return state.mismatch == "sequence_mask" or unsampled or kl.coefficient(settings, "reward") != 0


def rows_that_teach(batch: Batch) -> Tensor:
    """Returns the indices [n] of the rows whose loss has a gradient: those with a token whose
    advantage and weight are not 0. With a KL or a critic, returns all rows.

    Worked: advantages [[1, 0], [0, 0], [−1, 0]], and the weights of the third row are 0, because it
    is overlong -> [0].
    """
    if batch.ref_logprobs is not None or batch.values is not None:
        return torch.arange(len(batch))
    teaches = batch.advantages != 0  # [B, T]
    if batch.token_weights is not None:  # before the updates they are not known
        teaches &= batch.token_weights != 0
    return teaches.any(1).nonzero()[:, 0]


def put(rows: Tensor, values: Tensor, into: Tensor) -> None:
    """Writes values [n, t] into the rows [n] of the tensor `into` [B, T], where T ≥ t."""
    into[rows, : values.shape[1]] = values


@torch.enable_grad()  # the user's own reward may have switched gradients off
def update(state: TrainState, batch: Batch, is_old=False) -> Record:
    """Makes one optimizer step of the policy on the batch, and with PPO another of the critic. If
    `is_old`, the policy is π_old: batch.old_logprobs, which are the sampler's, are replaced in the
    rows with a gradient.
    """
    settings = state.settings
    algorithm = ALGORITHMS[settings.algorithm]
    weigh_mismatch(state, batch)
    batch.token_weights = algorithm.compute_token_weights(batch, settings)  # [B, T]
    batch.logprobs = batch.old_logprobs.clone()  # [B, T]  rows without a gradient keep these
    rows = rows_that_teach(batch)  # [n]
    if not len(rows):  # no step, because Adam's momentum would move the weights
        record = {"loss": 0.0, "grad_norm": 0.0, "skipped": 1.0}
        return record | entropy_and_mismatch(state, batch, rows)
    taught = batch.rows(rows)  # [n, t]
    taught.logprobs = torch.zeros_like(taught.response_mask)  # [n, t]
    share = taught.token_weights.sum().item() or 1.0  # so that logged means are over `taught`

    def loss_of(micro: Batch, rows: Tensor):
        logprobs = state.model(micro.tokens, settings.temperature, micro.response_mask)  # [b, t]
        micro.logprobs = logprobs.detach()
        if is_old:
            micro.old_logprobs = micro.logprobs
            weigh_mismatch(state, micro)
        put(rows, micro.logprobs.cpu(), into=taught.logprobs)
        loss, stats = algorithm.compute_loss(logprobs, micro, settings)  # [b, t]
        ratio = stats.pop("ratio")  # [b, t]  1 on masked tokens
        record = {"ratio_min": ratio.min().item(), "ratio_max": ratio.max().item()}
        stats["clip_fraction"] = stats.pop("clipped")
        for name, value in stats.items():  # summed over all micro-batches, these are means
            record[name] = ((micro.token_weights * value).sum() / share).item()
        return (micro.token_weights * loss).sum(), record

    record = accumulate_and_step(state, state.model, state.optimizer, taught, loss_of)
    state.version += 1  # not Tensor._version, which misses a fused optimizer's steps
    computed = state.accelerator.reduce(taught.logprobs.to(state.accelerator.device), "sum")
    put(rows, computed.cpu(), into=batch.logprobs)  # [n, t] into [B, T]
    if is_old:
        put(rows, computed.cpu(), into=batch.old_logprobs)
        weigh_mismatch(state, batch)
    if state.critic is not None:
        record |= update_critic(state, batch)
    return record | {"skipped": 0.0} | entropy_and_mismatch(state, batch, rows)


def weigh_mismatch(state: TrainState, batch: Batch) -> None:
    if state.mismatch != "none":
        batch.mismatch_weights = ppo.mismatch_weights(batch, state.mismatch)  # [B, T]


def entropy_and_mismatch(state: TrainState, batch: Batch, rows: Tensor) -> Record:
    """Returns the Monte-Carlo estimate of the entropy, the weighted mean of −log π, and the
    effective share of the tokens whose mismatch weights are known: those of the rows [n] with a
    gradient, or all if π_old's log-probs came first.
    """
    record = {"entropy_mc": -(batch.token_weights * batch.logprobs).sum().item()}
    known = batch if old_logprobs_come_first(state) else batch.rows(rows)
    if state.mismatch != "none" and known.response_mask.any():
        record["mismatch_ess"] = ppo.effective_share(known)
    return record


def update_critic(state: TrainState, batch: Batch) -> Record:
    """Makes one step of the critic towards batch.returns. All model tokens have equal weights."""
    batch = replace(batch, token_weights=ppo.token_weights(batch.response_mask))  # [B, T]

    def loss_of(micro: Batch, _):
        values = state.critic_model(micro.tokens, micro.response_mask)  # [b, t]
        loss, clipped = ppo.value_loss(values, micro.values, micro.returns)  # [b, t]
        share = (micro.token_weights * clipped).sum().item()
        return (micro.token_weights * loss).sum(), {"value_clip_fraction": share}

    record = accumulate_and_step(state, state.critic_model, state.critic_optimizer, batch, loss_of)
    loss = record.pop("loss")
    norm = record.pop("grad_norm")
    return record | {"value_loss": loss, "critic_grad_norm": norm}


def accumulate_and_step(
    state: TrainState, model, optimizer, batch: Batch, loss_of: Callable
) -> Record:
    """Runs the forward and backward pass of each micro-batch, then makes one optimizer step. Raises
    an InputError, before that step, if the loss or the gradient is not finite.
    """
    accelerator = state.accelerator
    records = []
    cuts = shares(state, batch)
    for number, rows in enumerate(bar(cuts, "micro-batches, trained on"), 1):
        # Processes exchange gradients only in the last backward pass, but with sharded weights in
        # every one.
        wait = number < len(cuts) and not in_parts(model)
        with accelerator.no_sync(model) if wait else contextlib.nullcontext():
            micro = batch.rows(rows).to(accelerator.device)
            loss, record = loss_of(micro, rows)
            # Gradients are averaged over processes, but here they are parts of one sum: multiply.
            accelerator.backward(loss * accelerator.num_processes)
        records.append(record | {"loss": loss.item()})
    total = merge_records(gather_object([merge_records(records, sum)]), sum)  # over all processes
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    total["grad_norm"] = full(norm).item()
    if not math.isfinite(total["loss"] + total["grad_norm"]):
        whose = "critic" if model is state.critic_model else "policy"
        raise InputError(
            f"{whose}: loss {total['loss']}, grad_norm {total['grad_norm']}; stopped; this "
            "gradient was not applied"
        )
    optimizer.step()
    # With DDP, gradients are views of buckets that stay allocated. If they were set to None, the
    # next micro-batch would allocate a second copy. Without DDP, None frees memory for the rollout.
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    return total


def merge_records(records: list[Record], merge: Callable) -> Record:
    """Merges records into one. Each metric becomes merge(its values); if its name ends in _min, it
    becomes the minimum, and if it ends in _max or _norm, the maximum.
    """
    merged = {}
    extremes = {"min": min, "max": max, "norm": max}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if name in record]
        merged[name] = extremes.get(name.rpartition("_")[2], merge)(values)
    return merged


def updates_of(rows: int, settings) -> int:
    """Returns the number of updates in a step with this many trajectories."""
    step = settings.questions_per_step * settings.group_size
    return math.ceil(rows / (settings.trajectories_per_update or step))
