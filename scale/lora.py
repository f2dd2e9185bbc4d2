"""LoRA: the weights stay as they are, and beside each matrix a product of two thin ones is learned.

    h = W x + (α / r) · B A x
    W [out, in] frozen;  A [r, in] random;  B [out, r] zero, so the first step is at π_0

At 7B and r = 16 that is 40M trained weights in place of 7.6 billion: gradients and Adam's moments
shrink by the same factor. Three things follow:
  * the frozen W may be bf16 or int8, since no small step has to survive in it; A and B are fp32;
  * π_ref is the policy with B A left out: no second model is loaded (`without_lora`);
  * a checkpoint holds W + (α / r) B A, a plain HF model (`merged_state`); a run that goes on needs
    A and B themselves (`lora_state`) and the W it began with: taking B A off the sum again would
    round.

The layers are those of `peft`, put into the model in place: its class, its backbone and its head
stay what they were. Left out: dropout (what is sampled and what is scored must be one model), DoRA,
several adapters, a choice of matrices (all but the output head have A and B).
"""

from __future__ import annotations

import contextlib
import importlib.util

import torch
from torch import nn

from errors import InputError

ALPHA = 16.0  # what is learned is scaled by ALPHA / r
ADAPTER = "default"  # peft's name of the only adapter
MARK = ".lora_"  # stands in the name of every A and B


def check_peft(rank: int) -> None:
    if importlib.util.find_spec("peft") is None:
        raise InputError(
            f"--lora_rank {rank} needs peft: pip install peft, or --lora_rank 0: all weights"
        )


def add_lora(model: nn.Module, rank: int, seed: int = 0) -> None:
    """Freeze `model` and put A and B beside its matrices."""
    check_peft(rank)
    import peft  # an optional extra

    config = peft.LoraConfig(
        r=rank, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", bias="none"
    )
    with torch.random.fork_rng(devices=[]):  # peft draws A on the CPU
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(MARK in name)
        if MARK in name:
            parameter.data = parameter.data.float()


def has_lora(model: nn.Module) -> bool:
    return any(MARK in name for name, _ in model.named_parameters())


def lora_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "base_layer")]


@contextlib.contextmanager
def without_lora(model: nn.Module):
    """The frozen model inside: h = W x."""
    layers = [layer for _, layer in lora_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def lora_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A and B by name."""
    return {name: weight.detach() for name, weight in model.named_parameters() if MARK in name}


def load_lora(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    own = lora_state(model)
    if {name: a.shape for name, a in own.items()} != {name: a.shape for name, a in state.items()}:
        raise InputError("--resume: the checkpoint's LoRA is of another rank; give the same one")
    for name, parameter in own.items():
        parameter.copy_(state[name])


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """W + (α / r) B A in fp32 on the CPU, under the names that a model without LoRA has."""
    state = {}
    for name, weight in model.state_dict().items():
        if MARK not in name and "weight_format" not in name:
            state[name] = weight.cpu()
    # int8: SCB is a row's largest value, which is its 127
    for name in [name for name in state if name.endswith(".SCB")]:
        weight = name.replace(".SCB", ".weight")
        state[weight] = state[weight].float() * state.pop(name)[:, None] / 127  # [out, in]
    for name, layer in lora_layers(model):
        learned = layer.get_delta_weight(ADAPTER).float().cpu()  # [out, in]
        state[f"{name}.base_layer.weight"] = state[f"{name}.base_layer.weight"].float() + learned
    return {name.replace(".base_layer.", "."): w.float() for name, w in state.items()}
