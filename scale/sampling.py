"""The weights to sample with: for one rollout, a copy of the policy in bf16.

    trained, fp32 ──round──► copy, bf16 ──rollout──► tokens, log-probs of the copy
         ▲                   (thrown away)                │
         └──────── update: log-probs of the trained ◄─────┘   logprob_gap: mean |one − the other|

A decoding step reads every weight for every token, so bytes are time: 2 per weight, not 4, and no
rounding at each step, as under autocast. The copy lives for one rollout: the update has its memory.
  * LoRA: the copy is W + (α / r) B A, so no token pays for the thin matrices.
  * Weights in parts (shards.py) are put together one by one: no process holds all in fp32.
  * The samples are the copy's, not quite the policy's: π_old must be scored again.

Left out: int8 weights (a copy of them in bf16 would take what they saved), fp8.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from policy import Policy
from scale.lora import empty_twin, merged_weights
from scale.shards import full, in_parts


def wants_copy(choice: str, device: torch.device, in_8bit: bool) -> bool:
    """`sampling_copy`: "bf16", "none", or "auto": on a GPU, but not of int8 weights."""
    return choice == "bf16" or (choice == "auto" and device.type != "cpu" and not in_8bit)


@contextlib.contextmanager
def to_sample_with(policy: Policy, copies: bool) -> Iterator[Policy]:
    """A copy of the policy (of weights in parts a whole one), or itself. All must enter at once."""
    if copies or in_parts(policy):
        dtype = torch.bfloat16 if copies else torch.float32
        yield Policy(copy_of(policy.language_model, dtype)).eval().requires_grad_(False)
    else:
        yield policy


@torch.no_grad()
def copy_of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    copy = empty_twin(model, dtype).to_empty(device=model.device)
    copy.tie_weights()  # `to_empty` has torn them apart
    own = dict(copy.named_parameters())  # of two that are tied, the first
    for name, weight in merged_weights(model):
        if name in own:
            own.pop(name).copy_(full(weight.to(dtype)))  # parts are rounded before they travel
    if own:
        raise RuntimeError(f"weights that the policy does not have: {', '.join(own)}")
    # Not of `dtype`: rotary frequencies in bf16 would move every position.
    buffers = dict(model.named_buffers())
    for module_name, module in copy.named_modules():
        for name in module._buffers:
            module._buffers[name] = buffers[f"{module_name}.{name}".lstrip(".")].clone()
    return copy
