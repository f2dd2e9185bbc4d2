"""Makes the weights to sample with: for one rollout, a copy of the policy in bf16.

    policy, fp32 ──round──► copy, bf16 ──rollout──► tokens, log-probs of the copy
         ▲                  (thrown away)                │
         └──────── update: log-probs of the policy ◄─────┘   logprob_gap: mean |difference|

A decoding step reads every weight for every token, so its time depends on bytes: 2 per weight
instead of 4. Autocast would also round the weights again at every step. The copy lives for one
rollout; its memory is free for the update.
  * LoRA: the copy is W + (α / r) B A, so the thin matrices cost nothing per token.
  * Sharded weights (shards.py) are gathered one by one, and no process holds all in fp32.
  * The samples are the copy's, not exactly the policy's: π_old's log-probs must be computed again.

Left out: int8 weights (a copy in bf16 would take the memory that they saved), fp8.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from policy import Policy
from scale.lora import empty_twin, merged_weights
from scale.shards import full, in_parts


def wants_copy(choice: str, device: torch.device, in_8bit: bool) -> bool:
    """Decides by `sampling_copy`: "bf16", "none", or "auto" (on a GPU, unless weights are int8)."""
    return choice == "bf16" or (choice == "auto" and device.type != "cpu" and not in_8bit)


@contextlib.contextmanager
def to_sample_with(policy: Policy, copies: bool) -> Iterator[Policy]:
    """Yields a copy of the policy (gathered, if it is sharded), or the policy. All processes must
    enter together.
    """
    if copies or in_parts(policy):
        dtype = torch.bfloat16 if copies else torch.float32
        yield Policy(copy_of(policy.language_model, dtype)).eval().requires_grad_(False)
    else:
        yield policy


@torch.no_grad()
def copy_of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    copy = empty_twin(model, dtype).to_empty(device=model.device)
    copy.tie_weights()  # `to_empty` has untied them
    parameters = dict(copy.named_parameters())  # the first of two tied ones
    for name, weight in merged_weights(model):
        if name in parameters:
            parameters[name].copy_(full(weight.to(dtype)))  # shards are rounded, then sent
    # Buffers keep their dtype: rotary frequencies in bf16 would move every position.
    buffers = dict(model.named_buffers())
    for module_name, module in copy.named_modules():
        for name in module._buffers:
            module._buffers[name] = buffers[f"{module_name}.{name}".lstrip(".")].clone()
    return copy
