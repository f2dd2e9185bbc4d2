"""The weights to sample with: for one rollout, a copy of the policy in bf16.

    trained, fp32 ──round──► copy, bf16 ──rollout──► tokens, log-probs of the copy
         ▲                   (thrown away)                │
         └──────── update: log-probs of the trained ◄─────┘      logprob_gap = mean |one − the
         other|

A decoding step reads every weight for every token, so bytes are time: 2 per weight in place of 4,
and no rounding of weights and activations at each step, as autocast would. The copy is made when
the rollout begins, so it is of the weights behind the last update, and goes when it ends: the
update has its memory.

  * LoRA: the copy is W + (α / r) B A, so no token pays for the thin matrices.
  * Weights in parts (shards.py): they are put together one by one, so no process ever holds all of
    them in fp32.
  * The samples are the copy's, not quite the policy's: π_old must be scored again (`--old_logprobs
    auto` does so on a GPU).

Left out: int8 weights (a copy of them in bf16 would take what they saved), fp8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from errors import run_main
from policy import Policy, plain_config
from scale.lora import ADAPTER, lora_layers
from scale.shards import full


def wants_copy(choice: str, device: torch.device, in_8bit: bool) -> bool:
    """--sampling_copy: "bf16", "none", or "auto": on a GPU, but not of int8 weights."""
    return choice == "bf16" or (choice == "auto" and device.type != "cpu" and not in_8bit)


@contextlib.contextmanager
def sampling_copy(policy: Policy, dtype: torch.dtype = torch.bfloat16) -> Iterator[Policy]:
    """A policy of the same weights in `dtype`, for as long as the block lasts. All processes must
    enter it together.
    """
    yield Policy(copy_of(policy.language_model, dtype)).eval().requires_grad_(False)


@torch.no_grad()
def copy_of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        copy = type(model)(plain_config(model)).to(dtype)  # takes no memory yet
    copy = copy.to_empty(device=model.device)
    copy.generation_config = model.generation_config
    copy.tie_weights()  # `to_empty` has torn them apart
    own = dict(copy.named_parameters())  # of two that are tied, the first
    for name, weight in plain_weights(model, dtype):
        if name in own:
            own.pop(name).copy_(weight)
    if own:
        raise RuntimeError(f"weights that the policy does not have: {', '.join(own)}")
    buffers = dict(
        model.named_buffers()
    )  # not of `dtype`: rotary frequencies in bf16 would move every position
    for module_name, module in copy.named_modules():
        for name in module._buffers:
            module._buffers[name] = buffers[f"{module_name}.{name}".lstrip(".")].clone()
    return copy


def plain_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole weight) one by one, under the names that a model without LoRA has and with LoRA
    merged; parts are rounded before they travel.
    """
    layers = dict(lora_layers(model))
    for name, weight in model.named_parameters():
        if (owner := name.removesuffix(".base_layer.weight")) != name and owner in layers:
            yield (
                f"{owner}.weight",
                weight.float() + layers[owner].get_delta_weight(ADAPTER).float(),
            )
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), full(weight.to(dtype))


def main() -> None:
    """What is left of a number in 8 bits of mantissa, and what that does to a log-prob."""
    weights = torch.tensor([0.1, 1.001, 1.01])
    print("fp32", weights.tolist(), "-> bf16", [round(w, 6) for w in weights.bfloat16().tolist()])
    from world.toy import make_model

    policy, tokens = (
        Policy(make_model(100)).eval(),
        torch.randint(0, 100, (8, 40), generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad(), sampling_copy(policy) as copy:
        gap = (copy(tokens) - policy(tokens)).abs()
    sizes = [
        sum(p.numel() * p.itemsize for p in model.parameters()) / 2**20 for model in (policy, copy)
    ]
    print(
        f"{sizes[0]:.2f} -> {sizes[1]:.2f} MiB; log-probs differ by {gap.mean():.4f} on average, by"
        f" {gap.max():.4f} at most"
    )


if __name__ == "__main__":
    run_main(main)
