"""Makes the weights to sample with: on a GPU, a copy of the policy in bf16 for one rollout.

    policy, fp32 ──round──► copy, bf16 ──rollout──► tokens, log-probs of the copy
         ▲                  (thrown away)                │
         └──────── update: log-probs of the policy ◄─────┘   logprob_gap: mean |difference|

A decoding step reads all weights, so its time depends on their bytes: bf16 has 2 per weight, fp32
has 4. Autocast would round the weights only once too, but it also casts activations, in every layer
at every step, which takes time. The copy exists during one rollout; the update can use its memory.
  * LoRA: the copy is W + (α / r) B A, so A and B cost no extra time per token.
  * Sharded weights (shards.py) are always gathered into a copy, in fp32 if no bf16 copy is wanted.
    For a bf16 copy each weight is rounded, then gathered, one by one: no GPU holds all in fp32.
  * The tokens are sampled from the copy, whose distribution differs slightly from the policy's, so
    π_old's log-probs must be computed again.

On a CPU with bf16 arithmetic no copy is made: autocast took 0.88 times as long there.

Left out: fp8, and copies of int8 weights (bf16 would take the memory that int8 saves).
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from policy import Policy
from scale.lora import empty_twin, merged_weights
from scale.shards import full, in_parts


def wants_copy(device: torch.device, in_8bit: bool) -> bool:
    """Tells whether to sample with a bf16 copy: on a GPU, unless weights are int8."""
    return device.type != "cpu" and not in_8bit


@contextlib.contextmanager
def to_sample_with(policy: Policy, copies: bool) -> Iterator[Policy]:
    """Yields a copy of the policy if `copies` is set or the policy is sharded, otherwise the policy
    itself. If the policy is sharded, all processes must enter this context.
    """
    if copies or in_parts(policy):
        dtype = torch.bfloat16 if copies else torch.float32
        yield Policy(copy_of(policy.language_model, dtype)).eval().requires_grad_(False)
    else:
        yield policy


@torch.no_grad()
def copy_of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    copy = empty_twin(model, dtype).to_empty(device=model.device)
    copy.tie_weights()  # `to_empty` has untied the tied weights
    copied = copy.state_dict()  # has the same memory
    for name, weight in merged_weights(model):
        copied[name].copy_(full(weight.to(dtype)))  # rounded before shards are gathered
    # Buffers keep their dtype: rotary frequencies in bf16 would encode wrong positions.
    for buffer, original in zip(copy.buffers(), model.buffers(), strict=True):
        buffer.copy_(original)
    return copy
