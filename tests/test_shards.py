"""Tests of scale/shards.py: two processes with half of the weights each sample from whole weights,
and save complete checkpoints. test_train.py compares their steps with those of one process.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, message, rows_of, same, settings_for
from processes import in_two_processes
from safetensors.torch import load_file

import train
from engines.sampling import to_sample_with
from plumbing.build import build_state
from plumbing.files import checkpoints
from scale.shards import asked_for, check_shardable, full, in_parts
from settings import Settings

RESHARD = {"zero2": "false", "fsdp2": "true"}


def in_two(sharding: str, work, *arguments) -> None:
    """Runs `work` in two processes, with the environment that the configuration file sets."""
    environment = {}
    if sharding != "ddp":
        environment = {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": RESHARD[sharding],
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        }
    in_two_processes(work, *arguments, environment=environment)


def sample_from_shards(settings: Settings) -> None:
    """Compares the weights to sample with to those that all processes hold together."""
    policy = build_state(settings).policy
    whole = [full(p.detach()) for p in policy.parameters()]
    assert in_parts(policy)
    for copies, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        with to_sample_with(policy, copies) as sampler:
            assert not in_parts(sampler)  # so it samples without waiting for the other process
            assert same(sampler.parameters(), [weight.to(dtype) for weight in whole])
    # Sampling leaves the shards as they are.
    assert in_parts(policy) and same(whole, [full(p.detach()) for p in policy.parameters()])


def test_sharded_processes_sample_from_whole_weights(model, tmp_path):
    in_two("fsdp2", sample_from_shards, settings_for(model, tmp_path))


def test_sharded_processes_save_complete_checkpoints_and_resume_from_them(model, tmp_path):
    more = "--steps 3 --save_every 2 --gradient_checkpointing"
    in_two("fsdp2", train.train, settings_for(model, tmp_path / "a", more))
    unbroken = tmp_path / "a" / "t" / "stage1"
    resumed = shutil.copytree(unbroken, tmp_path / "b" / "t" / "stage1")
    shutil.rmtree(resumed / "checkpoint-000003")  # as if it had stopped after two steps
    settings = settings_for(model, tmp_path / "b", f"{more} --resume")
    in_two("fsdp2", train.train, settings)
    assert rows_of(unbroken) == rows_of(resumed)
    paths = (Path(model), checkpoints(unbroken)[-1], checkpoints(resumed)[-1])
    begin, one, two = (load_file(path / "model.safetensors") for path in paths)
    assert one.keys() == begin.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], begin[name]) for name in one)
    error = message(train.train, replace(settings, steps=4))
    assert "this run is sharded, or the other way round" in error


DEEPSPEED, FSDP_1 = {"ACCELERATE_USE_DEEPSPEED": "true"}, {"ACCELERATE_USE_FSDP": "true"}


@pytest.mark.parametrize(
    "environment, optimizer, lora_rank, error_line",
    [
        (DEEPSPEED, "adamw", 0, "use configs/zero2.yaml"),
        (FSDP_1, "adamw", 0, "set fsdp_version: 2"),
        ({}, "adamw8bit", 0, "--optimizer adamw8bit cannot update sharded weights"),
        ({}, "adamw", 8, "--lora_rank 8: LoRA cannot be sharded here"),
    ],
)
def test_unsupported_settings_for_shards_are_a_one_line_error(
    environment, optimizer, lora_rank, error_line, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert error_line in message(lambda: asked_for() and check_shardable(optimizer, lora_rank))


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp2"])
def test_each_configuration_file_selects_the_sharding_of_its_name(name, monkeypatch):
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(config["distributed_type"] == "FSDP").lower())
    for key, value in config.get("fsdp_config", {}).items():
        monkeypatch.setenv(key.upper(), str(value).lower())
    assert asked_for() == name
