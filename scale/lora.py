"""LoRA: frozen linear layers get a trained update of low rank, the product of two thin matrices.

    h = W x + (α / r) · B A x
    W [out, in] frozen;  A [r, in] random;  B [out, r] zero, so training starts at h = W x

At 7B and r = 16, A and B have 40M weights; without LoRA 7.6 billion weights would be trained.
  * W may be bf16 or int8, because it is frozen. A and B are fp32, so small steps are not lost.
  * π_ref is the policy without B A (`without_lora`), so no second model is loaded.
  * A checkpoint holds W + (α / r) B A, as a plain HF model. A resumed run needs A and B themselves
    (`lora_state`) and the original W, because W could not be recovered from the sum exactly.

The layers are peft's; they replace the model's own in place. Left out: dropout (sampling and
log-probs must use the same model), DoRA, several adapters, a choice of layers (all linear layers
except the output head get A and B).
"""

import contextlib
import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from errors import InputError

ALPHA = 16.0  # the learned update is scaled by ALPHA / r
ADAPTER = "default"  # peft's name for the only adapter
MARK = ".lora_"  # part of the name of every A and B


def check_peft(rank: int) -> None:
    if importlib.util.find_spec("peft") is None:
        raise InputError(
            f"--lora_rank {rank} needs peft: pip install peft, or train all weights with "
            "--lora_rank 0"
        )


def add_lora(model: nn.Module, rank: int, seed: int = 0) -> None:
    """Freezes `model` and adds A and B to its linear layers, except the output head."""
    import peft  # an optional extra, see `check_peft`

    config = peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):  # peft draws A on the CPU
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(MARK in name)
        if MARK in name:
            parameter.data = parameter.data.float()
    for layer in lora_layers(model).values():
        # Trap: by default peft casts each input to fp32, the type of A, and keeps this copy for the
        # backward pass.
        layer.cast_input_dtype_enabled = False


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns A and B by name."""
    return {name: weight.detach() for name, weight in model.named_parameters() if MARK in name}


def load_lora(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, parameter in lora_state(model).items():
        parameter.copy_(state[name])


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "base_layer")}


@contextlib.contextmanager
def without_lora(model: nn.Module):
    """Makes the model compute h = W x, without its adapters, in this context."""
    layers = lora_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the plain model, weight). The weight of a layer with LoRA is W + (α / r) B A,
    an int8 weight becomes fp32, and others stay as they are.
    """
    state, layers = model.state_dict(), lora_layers(model)
    for name, weight in state.items():
        if MARK in name or name.endswith((".SCB", ".weight_format")):
            continue
        if (largest := state.get(name.removesuffix("weight") + "SCB")) is not None:
            # [out, in]; int8 stores the largest |weight| of each row as ±127
            weight = weight.float() * largest[:, None] / 127
        if (layer := layers.get(name.removesuffix(".base_layer.weight"))) is not None:
            weight = weight.float() + layer.get_delta_weight(ADAPTER).float()
        yield name.replace(".base_layer.", "."), weight


def save_merged(model: nn.Module, path: Path, weights: dict | None = None) -> None:
    """Saves `model` as a plain HF model in the folder `path`. If `model` is sharded, `weights` are
    its gathered weights.
    """
    if weights is None and not lora_state(model):
        model.save_pretrained(path)
        return
    merged = ((name, weight.float().cpu()) for name, weight in merged_weights(model))
    weights, plain = weights or dict(merged), empty_twin(model, torch.float32)
    for name in plain.all_tied_weights_keys:  # such as lm_head, which is saved as the embedding
        weights.pop(name, None)
    plain.save_pretrained(path, state_dict=weights)


def empty_twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns the same network without LoRA and int8. Its weights are not allocated yet."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(config, dtype=dtype)  # buffers stay fp32
    twin.generation_config = model.generation_config
    return twin
