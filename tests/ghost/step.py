"""A training step on a GPU made of nothing: update, scoring, bf16 copy, rollout in slots.

    python tests/ghost/step.py SHIM CASE ...      CASE: "ddp --gpus 8 --model 3B" and other flags

What it cannot see stands in device.py. It prints a line of JSON for each case: the most bytes on
the GPU, and what `lab.plan` says of them. SHIM is shim.cpp, compiled. Of several processes this is
the first; the others answer at once.
"""

import contextlib
import ctypes
import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import bitsandbytes  # it asks at its import whether there is a GPU
import torch
import torch.distributed as dist
from device import GPU, Device, Memory, install
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

import update
from data import Question
from lab import plan
from other_models.llm import frozen_in_8bit
from plumbing.build import spread_over
from policy import Policy, checkpoint_activations, collate
from prompts import PROTOCOLS
from scale.engine import Engine, affordable
from scale.lora import add_lora
from scale.sampling import to_sample_with, wants_copy
from trajectory import Trajectory


def accelerator(processes: int) -> SimpleNamespace:
    """What a run asks of accelerate's."""
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
    model = DistributedDataParallel(policy, device_ids=[0], gradient_as_bucket_view=True)
    # Its own hook waits for a future that nobody fulfils; its logger asks CUDA's clock.
    model.register_comm_hook(None, at_once)
    model.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)
    return model


def at_once(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def case_of(words: str) -> tuple[plan.Case, float]:
    """The case and the memory of the flags of `lab.plan`, behind the way in which GPUs share."""
    sharding, *flags = words.split()
    found = []
    with mock.patch.object(plan, "report", lambda *given: found.extend(given) or [""]):
        plan.main(flags)
    case, memory, _ = found
    share = case.gpus if sharding == "fsdp2" else 1
    return plan.Case(case.shape, case.settings, case.gpus, share), memory


def model_of(case) -> Policy:
    """As `load_policy`, without a file."""
    s, config = case.settings, plan.config_of(case.settings.model)
    config._attn_implementation = "sdpa"
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    with torch.device("cuda"):
        dtype = torch.bfloat16 if s.lora_rank else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if s.gradient_checkpointing:
            checkpoint_activations(model)
        policy = Policy(model).requires_grad_(not s.lora_rank)
        if s.lora_rank:
            # All is made on the GPU, and peft's `to` cannot swap what is not there.
            with mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):
                add_lora(model, s.lora_rank)
    return policy


def batch_of(case, rows: int, size: int):
    """Rows of `size` tokens: a prompt, a turn, documents, a turn."""
    turn = (size - 100) // 4
    made = [Trajectory(Question("", "", []), PROTOCOLS["ur2"], [5] * 100) for _ in range(rows)]
    for row in made:
        row.append_model([6] * turn, [-1.0] * turn, "")
        row.append_environment([7] * turn, "", "documents")
        last = size - len(row.ids)
        row.append_model([8] * last, [-1.0] * last, "")
    batch, s = collate(made, [float(i % 2) for i in range(rows)], rows), case.settings
    batch.advantages = update.ALGORITHMS[s.algorithm].compute_advantages(batch, s)
    return batch


def roll_out(case, policy: Policy) -> int:
    """All slots at once, whose rows are as deep as they may become. Returns how many there were."""
    size, in_8bit = case.row_tokens, "base" in frozen_in_8bit(case.settings)
    copies = wants_copy(case.settings.sampling_copy, GPU, in_8bit)
    rule = SimpleNamespace(watched=[0], reason=lambda ids, room: "length" * (len(ids) == room))
    with to_sample_with(policy, copies) as sampler, torch.no_grad(), sampler.autocast():
        count = min(case.rows, affordable(sampler.language_model, size))
        engine = Engine(sampler.language_model, count, size, rule)
        for _ in range(count):
            engine.add(None, [7] * (size - 20), 2)
        for row in engine.decode():  # two tokens, 16 of documents, two tokens
            engine.resume(row, row.ids + [7] * 16, 2)
        assert all(len(row.ids) == size for row in engine.decode())
    return count


def step(memory: Memory, case) -> dict:
    """The second update of a run, when moments are there, with two micro-batches; a rollout."""
    s, policy = case.settings, model_of(case)
    parts = update.Parts(s, accelerator(case.gpus), policy, None, None, True)
    sharding = "fsdp2" if case.share > 1 else "ddp"
    parts.model, parts.optimizer = spread_over(parts, policy, sharding, s.lr)
    update.update(parts, batch_of(case, case.gpus, 200))
    rows = 2 * case.gpus * (case.tokens // case.row_tokens)
    batch, peaks = batch_of(case, rows, case.row_tokens), {}
    update.score(parts, policy, batch)
    memory.peak = memory.now
    update.update(parts, batch)
    peaks["update"], memory.peak = memory.peak, memory.now
    peaks |= {"standing": memory.now, "slots": roll_out(case, policy)}
    return peaks | {"rollout": memory.peak}


def planned(case, total: float) -> dict:
    """The same by `lab.plan`."""
    _, slots = plan.plan(case, total)
    always = sum(plan.standing(case).values())
    kinds = {"update": plan.update_parts(case), "rollout": plan.rollout_parts(case, slots)}
    peaks = {name: always + sum(found.values()) for name, found in kinds.items()}
    return peaks | {"slots": slots}


def main(cases: list[str]) -> None:
    device = Device()
    install(device)
    update.gather_object = lambda records: records
    for words in cases:
        case, total = case_of(words)
        device.memory.total = total
        if case.gpus > 1:
            dist.init_process_group("fake", rank=0, world_size=case.gpus, store=FakeStore())
        with device:
            ghost = step(device.memory, case)
        if case.gpus > 1:
            dist.destroy_process_group()
        gc.collect()
        record = {"ghost": ghost, "plan": planned(case, total), "left": device.memory.now}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[2:])
