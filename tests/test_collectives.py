"""Tests with four and eight processes: all call the same collectives in the same order, even if
some have no question, or no row of an update.
"""

import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import rows_of, settings_for
from processes import in_processes

import train
from settings import Settings

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
# With it torch compares the collectives of all processes, also those called in C++, and raises an
# error if they differ.
COMPARED = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
COLLECTIVE = re.compile(r"(all_|barrier|broadcast|gather|reduce|scatter)")
# With three questions of three samples each, a process has at most one question. PPO has a critic.
FEW = "--questions_per_step 3 --group_size 3 --algorithm ppo --critic_lr 1e-3 --kl_coef 0.05"
FEW += " --eval_every 2 --tokens_per_micro_batch 100"


def recorded(calls: list, name: str, work):
    def call(*arguments, **named):
        sizes = [x.numel() for x in arguments if torch.is_tensor(x)]
        calls.append([name, *sizes])
        return work(*arguments, **named)

    return call


def train_and_record(settings: Settings, folder: Path) -> None:
    """Trains, and saves the name of each collective with the sizes of the tensors passed to it."""
    calls = []
    for name, work in inspect.getmembers(torch.distributed, inspect.isfunction):
        if COLLECTIVE.match(name):
            setattr(torch.distributed, name, recorded(calls, name, work))
    train.train(settings)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(calls))


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("sharding", [FSDP2, {}], ids=["fsdp2", "ddp"])
def test_all_processes_call_the_same_collectives_with_fewer_questions_than_processes(
    count, sharding, model, tmp_path
):
    settings = settings_for(model, tmp_path, FEW, eval_questions=1)
    in_processes(count, train_and_record, settings, tmp_path, environment=COMPARED | sharding)
    sequences = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
    assert all(calls == sequences[0] for calls in sequences)
    names = {name for name, *_ in sequences[0]}
    assert names >= {"all_gather_object", "broadcast_object_list", "all_reduce", "barrier"}
    assert any("reduce_scatter" in name for name in names) == bool(sharding)
    assert len(rows_of(tmp_path / "t" / "stage1")) == 2
