"""Sharding: each of n processes keeps 1/n of the weights, their gradients and optimizer moments.

    ddp      no shards: every process keeps all weights; gradients are averaged  configs/ddp.yaml
    zero2    weights are gathered for a forward pass, resharded after its backward    zero2.yaml
    fsdp2    weights are gathered layer by layer, resharded after each                fsdp2.yaml

zero2 and fsdp2 are PyTorch's `fully_shard`, which gathers weights inside `forward`; all processes
must take part in this. Sharding has three consequences:
  * A process that makes one more pass than the others would wait in vain, so in training
    `packing.micro_batches` gives all processes the same number of passes.
  * Sampling needs a pass per token, and processes sample texts of different lengths. So each
    process samples with a whole copy of the policy (engines/sampling.py), unless vLLM servers
    sample.
  * A shard is useless alone, so checkpoints hold whole tensors.
Left out: DeepSpeed, weights kept on the CPU, sharded 8-bit moments, sharded LoRA.
"""

import os

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from errors import InputError, rank_of

FULL = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def asked_for() -> str:
    """Returns "ddp", "zero2" or "fsdp2", as the config file of `accelerate launch` says."""
    variables = {name: value.lower() for name, value in os.environ.items()}
    if variables.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise InputError(
            "DeepSpeed is not supported: use configs/zero2.yaml, which shards without it"
        )
    if variables.get("ACCELERATE_USE_FSDP") != "true":
        return "ddp"
    if variables.get("FSDP_VERSION") != "2":
        raise InputError("FSDP 1 is not supported: set fsdp_version: 2, as in configs/fsdp2.yaml")
    # Trap: if this is on, some versions of transformers (5.17, 5.19) load weights in the first
    # process of each machine only; the other processes get zeros.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return "zero2" if variables.get("FSDP_RESHARD_AFTER_FORWARD") == "false" else "fsdp2"


def check_shardable(optimizer: str, lora_rank: int) -> None:
    if optimizer != "adamw":
        raise InputError(
            f"--optimizer {optimizer} cannot update sharded weights: use adamw, or configs/ddp.yaml"
        )
    if lora_rank:
        raise InputError(
            f"--lora_rank {lora_rank}: LoRA cannot be sharded here: use configs/ddp.yaml"
        )


def check_alike(model: nn.Module, checkpoint: str) -> None:
    """Raises an InputError if the processes start from different weights, or resume checkpoints of
    different names: machines without a shared folder may have different files.
    """
    if rank_of("WORLD_SIZE", 1) > 1:
        total = sum(int(p.detach().flatten().view(torch.uint8).sum()) for p in model.parameters())
        if len(set(gather_object([(checkpoint, total)]))) > 1:
            raise InputError(
                "the processes of this run start from different weights: give all machines the "
                "same model, and an --output_dir that all share"
            )


def shard(model: nn.Module, sharding: str, processes: int) -> nn.Module:
    """Shards `model` in place, layer by layer (transformers calls the class of a model's layers
    GradientCheckpointingLayer). The optimizer must be made afterwards.
    """
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (processes,))
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=sharding == "fsdp2")
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    # The module that runs the first forward pass becomes the root. Here that is the whole model;
    # without this pass, a call of an inner module might come first.
    with torch.no_grad():
        tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
        model(tokens, mask=torch.ones(1, 1, device=device))
    cut(model)
    return model


def in_parts(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def cut(model: nn.Module) -> None:
    """Reshards the weights: a forward pass without a backward pass leaves weights gathered."""
    for part in filter(in_parts, model.modules()):
        part.reshard()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns all weights in the main process, and {} in the others. If weights are sharded, all
    processes must call this and the next three functions.
    """
    return states.get_model_state_dict(model, options=FULL)


def load_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    states.set_model_state_dict(model, state, options=FULL)


def whole_moments(model: nn.Module, optimizer) -> dict:
    """Returns Adam's moments, gathered if they are sharded. Gathered moments have the names of
    weights as keys; moments that were not sharded have numbers.
    """
    if in_parts(model):
        return states.get_optimizer_state_dict(model, optimizer, options=FULL)
    return optimizer.state_dict()


def load_moments(model: nn.Module, optimizer, state: dict) -> None:
    if in_parts(model) != any(isinstance(name, str) for name in state["state"]):
        raise InputError(
            "--resume: Adam's moments were saved without sharding and this run is sharded, or the "
            "other way round: use the configuration that saved them, or start a new run with "
            "--model"
        )
    if in_parts(model):
        states.set_optimizer_state_dict(model, optimizer, state, options=FULL)
    else:
        optimizer.load_state_dict(state)


def full(value: Tensor) -> Tensor:
    """Gathers a tensor if it is sharded; all processes must then call this."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
