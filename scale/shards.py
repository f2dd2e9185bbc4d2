"""Weights in parts: each of n processes keeps 1/n of the weights, their gradients and moments.

    ddp      all of it on every process; gradients are averaged                  configs/ddp.yaml
    zero2    parts; put together for a forward pass, cut again after its backward     zero2.yaml
    fsdp2    parts; put together layer by layer, cut again after each                 fsdp2.yaml

Both are PyTorch's `fully_shard`, which puts weights together inside `forward`, by a call in which
all processes take part:
  * a process with one pass more waits for ever: `packing.micro_batches` gives all as many;
  * texts end where they end, so sampling has a whole copy (sampling.py);
  * a part has no meaning alone: checkpoints are of whole tensors.
Left out: DeepSpeed, weights kept on the CPU, 8-bit moments and LoRA in parts.
"""

import os

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from errors import InputError, rank_of

FULL = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def asked_for() -> str:
    """Which of the three, by what `accelerate launch --config_file` put into the environment."""
    said = {name: value.lower() for name, value in os.environ.items()}
    if said.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise InputError("DeepSpeed makes its own optimizer steps: use configs/zero2.yaml")
    if said.get("ACCELERATE_USE_FSDP") != "true":
        return "ddp"
    if said.get("FSDP_VERSION") != "2":
        raise InputError("FSDP 1 is not supported: set fsdp_version: 2, as in configs/fsdp2.yaml")
    # Trap: with this on, transformers loads weights in process 0 only; the others' stay random.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return "zero2" if said.get("FSDP_RESHARD_AFTER_FORWARD") == "false" else "fsdp2"


def check_shardable(optimizer: str, lora_rank: int) -> None:
    if optimizer != "adamw":
        why = "cannot step weights in parts: use adamw, or configs/ddp.yaml"
        raise InputError(f"--optimizer {optimizer} {why}")
    if lora_rank:
        where = "frozen weights need no parts; use configs/ddp.yaml"
        raise InputError(f"--lora_rank {lora_rank}: {where}")


def check_alike(model: nn.Module, checkpoint: str) -> None:
    """Do all begin with the same? Of machines that share no folder one may have older files."""
    if rank_of("WORLD_SIZE", 1) > 1:
        total = sum(int(p.detach().flatten().view(torch.uint8).sum()) for p in model.parameters())
        if len(set(gather_object([(checkpoint, total)]))) > 1:
            how = "give all machines the same model, and a folder for --output_dir that all share"
            raise InputError(f"the processes of this run start from different weights: {how}")


def shard(model: nn.Module, sharding: str, processes: int) -> nn.Module:
    """Cut `model` in place, layer by layer; an optimizer must be made after this, of the parts."""
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (processes,))
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or []}
    for layer in [m for m in model.modules() if type(m).__name__ in names]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=sharding == "fsdp2")
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    # The first forward pass decides which module is the root: in a rollout it would be a layer.
    with torch.no_grad():
        tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
        model(tokens, mask=torch.ones(1, 1, device=device))
    cut(model)
    return model


def in_parts(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def parts_of(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if in_parts(module)]


def cut(model: nn.Module) -> None:
    """Keep a part only: after a forward pass without backward, weights are left together."""
    for part in parts_of(model):
        part.reshard()


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All must call this and the three below; only the main process gets more than {}."""
    return states.get_model_state_dict(model, options=FULL)


def load_weights(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    states.set_model_state_dict(model, state, options=FULL)


def whole_moments(model: nn.Module, optimizer) -> dict:
    """In parts they are named after their weights, else numbered."""
    if parts_of(model):
        return states.get_optimizer_state_dict(model, optimizer, options=FULL)
    return optimizer.state_dict()


def load_moments(model: nn.Module, optimizer, state: dict) -> None:
    parts = bool(parts_of(model))
    if parts != any(isinstance(name, str) for name in state["state"]):
        raise InputError(
            "--resume: Adam's moments were saved under ddp and are to be cut in parts, or the other"
            " way round: use the former configuration, or start anew with --model"
        )
    if parts:
        states.set_optimizer_state_dict(model, optimizer, state, options=FULL)
    else:
        optimizer.load_state_dict(state)


def full(value: torch.Tensor) -> torch.Tensor:
    """A tensor that may be in parts, together. All must call it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
