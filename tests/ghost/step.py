"""A training step on a simulated GPU: update, scoring, bf16 copy, rollout in slots.

    PYTHONPATH=. python tests/ghost/step.py SHIM CASE ...

SHIM is the compiled shim.cpp. A CASE is "one", "ddp" or "fsdp2" and flags of `lab.plan`, as in
"ddp --gpus 8 --model 3B".

Prints a line of JSON for each case: the peak number of bytes on the GPU, and that which `lab.plan`
predicts. Of several processes this is the first; the others answer at once. device.py says what the
simulation does not show.
"""

import contextlib
import ctypes
import gc
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch

if "8bit" in str(sys.argv):
    import bitsandbytes  # it looks for a GPU when it is imported
else:
    sys.modules["bitsandbytes"] = None  # peft would import it, which takes long
import torch
import torch.distributed as dist
from device import GPU, Device, install
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

import update
from data import Question
from engines.sampling import to_sample_with, wants_copy
from engines.slots import Engine
from lab import plan
from papers import PROTOCOLS
from plumbing.build import spread_over
from policy import Policy, checkpoint_activations
from scale.lora import add_lora
from train import Rollouts, prepare
from trajectory import Trajectory


def accelerator(processes: int) -> SimpleNamespace:
    """Returns a stand-in for accelerate's Accelerator, with the attributes that a run uses."""
    return SimpleNamespace(
        num_processes=processes,
        process_index=0,
        device=GPU,
        no_sync=lambda model: getattr(model, "no_sync", contextlib.nullcontext)(),
        backward=lambda loss: loss.backward(),
        reduce=lambda x, _: x,
        prepare_model=in_buckets if processes > 1 else lambda policy: policy,
    )


def in_buckets(policy: Policy) -> DistributedDataParallel:
    """Wraps the policy in DDP, whose communication ends at once."""
    model = DistributedDataParallel(policy, device_ids=[0], gradient_as_bucket_view=True)
    # The default hook waits for a future that nobody fulfils, and the logger reads CUDA's clock.
    model.register_comm_hook(None, at_once)
    model.logger = mock.MagicMock()
    return model


def at_once(_, bucket):
    """Returns the finished communication of a bucket of gradients, unchanged."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def case_of(words: str) -> SimpleNamespace:
    """Returns the case that `words` name: a sharding, then flags of `lab.plan`."""
    sharding, *flags = words.split()
    with mock.patch.object(plan, "estimate", side_effect=plan.estimate) as estimate:
        plan.main(flags)
    settings, config, gpus, _ = estimate.call_args.args
    settings = replace(settings, group_size=2)
    share = gpus if sharding == "fsdp2" else 1
    return SimpleNamespace(settings=settings, config=config, gpus=gpus, share=share)


def model_of(case: SimpleNamespace) -> Policy:
    """Returns a policy like that of `load_policy`, but reads no file."""
    s, config = case.settings, case.config
    config._attn_implementation = "sdpa"
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    dtype = torch.bfloat16 if s.lora_rank else torch.float32
    # All weights are made on the GPU, and the `to` that peft calls cannot swap fake tensors.
    with GPU, mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if s.gradient_checkpointing:
            checkpoint_activations(model)
        policy = Policy(model).requires_grad_(not s.lora_rank)
        if s.lora_rank:
            add_lora(model, s.lora_rank)
    return policy


def row_of(size: int) -> Trajectory:
    """Returns a row of `size` tokens: a prompt, a turn, documents, a last turn."""
    row, turn = Trajectory(Question("", "", []), PROTOCOLS["ur2"], [5] * 100), (size - 100) // 4
    row.append_model([6] * turn, [-1.0] * turn, "")
    row.append_environment([7] * turn, "", "documents")
    last = size - len(row.ids)
    row.append_model([8] * last, [-1.0] * last, "")
    return row


def learn(state: update.TrainState, count: int, size: int) -> None:
    """Scores `count` rows of `size` tokens, and learns from them."""
    rewards = [{"reward": float(row % 2)} for row in range(count)]
    batch = prepare(state, Rollouts([row_of(size)] * count, rewards, kept=[*range(count)]))
    update.update(state, batch.rows(torch.arange(count)))


def roll_out(case: SimpleNamespace, policy: Policy) -> None:
    """Decodes plan.ROWS rows of the largest length at once."""
    size = plan.longest_row(case.settings, case.config)
    copies = wants_copy(GPU, False)
    rule = SimpleNamespace(watched=[0], reason=lambda ids, room: "length" * (len(ids) == room))
    with to_sample_with(policy, copies) as sampler, torch.no_grad(), sampler.autocast():
        engine = Engine(sampler.language_model, plan.ROWS, size, rule)
        for _ in range(plan.ROWS):
            engine.add(None, [7] * (size - 1), 1)
        assert all(len(row.ids) == size for row in engine.decode())


def step(device: Device, case: SimpleNamespace) -> dict:
    """Runs two updates, the second with two micro-batches, and a rollout; returns the bytes of the
    second update, when the optimizer's moments exist, and of the rollout.
    """
    s, policy = case.settings, model_of(case)
    state = update.TrainState(s, accelerator(case.gpus), policy, None, None, True, "token")
    state.environment = mock.MagicMock(**{"tokenizer.pad_token_id": 0})
    sharding = "fsdp2" if case.share > 1 else "ddp"
    spread = spread_over(state.accelerator, sharding, s.optimizer, policy, s.lr)
    state.model, state.optimizer = spread
    learn(state, 2 * case.gpus, 200)
    device.peak = device.now
    row = plan.longest_row(s, case.config)
    learn(state, 2 * case.gpus * max(1, s.tokens_per_micro_batch // row), row)
    peaks, device.peak = {"update": device.peak, "always": device.now}, device.now
    roll_out(case, policy)
    return peaks | {"rollout": device.peak}


def planned(case: SimpleNamespace) -> dict:
    """Returns the bytes that `lab.plan` predicts."""
    kinds = plan.estimate(case.settings, case.config, case.gpus, case.share)
    always = sum(kinds["always"].values())
    return {kind: always + sum(kinds[kind].values()) for kind in ("update", "rollout")}


def main(cases: list[str]) -> None:
    device = Device()
    install(device)
    for words in cases:
        case, device.total = case_of(words), 2**40
        if case.gpus > 1:
            dist.init_process_group("fake", rank=0, world_size=case.gpus, store=FakeStore())
        with device:
            ghost = step(device, case)
        if case.gpus > 1:
            dist.destroy_process_group()
        gc.collect()
        record = {"ghost": ghost, "plan": planned(case), "left": device.now}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[2:])
