"""Tests of scale/shards.py: two processes with half of the weights each take the same step as one
process, and save complete checkpoints.
"""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT, message, model_of, same, small
from processes import in_two_processes
from safetensors.torch import load_file

import ppo
from engines.sampling import to_sample_with
from plumbing.build import make_accelerator, spread_over
from policy import Batch, Policy, load_policy, save_policy
from scale import shards
from scale.shards import asked_for, check_shardable, full, in_parts
from settings import Settings
from update import TrainState, accumulate_and_step, compute_logprobs, compute_values

RESHARD = {"zero2": "false", "fsdp2": "true"}
SETTINGS = SimpleNamespace(tokens_per_micro_batch=10, temperature=1.0, optimizer="adamw")
VOCABULARY = 810


@pytest.fixture(scope="session")
def start(bpe, tmp_path_factory):
    """Saves the checkpoint that the tests start from and returns the path."""
    torch.manual_seed(0)
    policy = Policy(model_of("qwen2", **small(vocab_size=VOCABULARY, initializer_range=0.2)))
    path = tmp_path_factory.mktemp("start") / "model"
    save_policy(policy, bpe, path)
    return str(path)


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


def uneven_batch() -> Batch:
    """Returns eight rows of 0 to 20 sampled tokens; two rows have documents between them."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.zeros(8, 22)  # [B, T]
    for row, length in enumerate((20, 2, 9, 14, 1, 0, 17, 4)):
        mask[row, 2 : 2 + length] = 1
    mask[0, 5:14] = mask[3, 3:12] = 0
    weights = torch.randn(8, 22, generator=draw) * mask / mask.sum()
    tokens = torch.randint(0, VOCABULARY, (8, 23), generator=draw)
    return Batch(tokens, mask, mask, torch.zeros(8), 2, token_weights=weights)


def parts_of_a_run(policy: Policy, critic=None) -> TrainState:
    """Returns the state for updates of the critic if there is one, else of the policy."""
    torch.set_num_threads(1)
    accelerator = make_accelerator(Settings())
    sharding = asked_for() if accelerator.num_processes > 1 else "ddp"
    state = TrainState(SETTINGS, accelerator, policy, None, None, False, critic=critic)
    spread = spread_over(accelerator, sharding, SETTINGS.optimizer, critic or policy, 1e-3)
    state.model, state.optimizer = spread
    return state


def step(state: TrainState, batch: Batch) -> float:
    """Makes one step on the loss Σ weight · output; returns the norm of the gradient."""

    def loss_of(micro: Batch, _) -> tuple[torch.Tensor, dict]:
        output = state.model(micro.tokens, mask=micro.response_mask)  # [b, t]
        return (micro.token_weights * output).sum(), {}

    return accumulate_and_step(state, state.model, state.optimizer, batch, loss_of)["grad_norm"]


def whole_of(module) -> list[torch.Tensor]:
    return [full(p.detach()).clone() for p in module.parameters()]


def take_step(start: str, kind: str, lora_rank: int, out: Path) -> None:
    """Computes log-probs or values of a batch, updates on some of its rows, and samples. The last
    update has a single row, so that one of two processes has no row.
    """
    policy, _ = load_policy(start, settings=Settings(lora_rank=lora_rank))
    critic = ppo.Critic(copy.deepcopy(policy.language_model.base_model))
    torch.nn.init.constant_(critic.head.weight, 0.01)
    module = critic if kind == "critic" else policy
    before, batch = whole_of(module), uneven_batch()
    state = parts_of_a_run(policy, critic if kind == "critic" else None)
    # Adam divides by the gradient's size, which would amplify rounding errors.
    state.optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    compute = partial(compute_logprobs, state, policy, batch)
    if kind == "critic":
        compute = partial(compute_values, state, batch)
    first, updates = compute(), ([0, 1, 2], [3, 4, 5], [6, 7], [7])
    norms = [step(state, batch.rows(torch.tensor(rows))) for rows in updates]
    changes = [a - b for a, b in zip(whole_of(module), before, strict=True)]
    if kind == "policy":
        for copies, dtype in ((False, torch.float32), (True, torch.bfloat16)):
            with to_sample_with(policy, copies) as sampler, torch.no_grad():
                assert not in_parts(sampler)  # so it samples without waiting for the other process
                sampler.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=4)
                rounded = [weight.to(dtype) for weight in whole_of(policy)]
                assert lora_rank or same(whole_of(sampler), rounded)
    last = compute()  # sampling must leave the shards unchanged
    if state.accelerator.is_main_process:
        torch.save((changes, [first, last], norms, in_parts(module)), out)


def steps_of_one_and_two(sharding, start, kind, lora_rank, folder) -> list:
    """Returns the results of one and of two processes; their weights must have changed equally."""
    take_step(start, kind, lora_rank, folder / "one.pt")
    in_two(sharding, take_step, start, kind, lora_rank, folder / "two.pt")
    one, two = (torch.load(folder / name) for name in ("one.pt", "two.pt"))
    assert max(m.abs().max() for m in one[0]) > 1e-3
    assert max((a - b).abs().max() for a, b in zip(one[0], two[0], strict=True)) < 1e-6
    torch.testing.assert_close(two[1], one[1], rtol=0, atol=1e-5)
    assert two[2] == pytest.approx(one[2], abs=1e-5, rel=1e-5)
    assert kind == "critic" or max(one[2]) > 1  # so the gradient was clipped
    return [one, two]


@pytest.mark.parametrize(
    "sharding, kind",
    [("zero2", "policy"), ("fsdp2", "policy"), ("fsdp2", "critic")],
)
def test_two_processes_with_half_of_the_weights_each_take_the_same_step_as_one(
    sharding, kind, start, tmp_path
):
    one, two = steps_of_one_and_two(sharding, start, kind, 0, tmp_path)
    assert (one[3], two[3]) == (False, True)


def train(start: str, done: int, steps: int, out: Path) -> None:
    """Makes `steps` steps of AdamW from the checkpoint of step `done`, and saves a new one."""
    policy, tokenizer = load_policy(start, settings=Settings(gradient_checkpointing=True))
    state = parts_of_a_run(policy)
    if done:
        trainer_state = torch.load(f"{start}/trainer.pt")
        shards.load_moments(policy, state.optimizer, trainer_state["optimizer"])
    for _ in range(steps):
        step(state, uneven_batch())
    weights = shards.whole_weights(policy.language_model) if in_parts(policy) else None
    trainer_state = {"optimizer": shards.whole_moments(policy, state.optimizer)}
    if state.accelerator.is_main_process:
        save_policy(policy, tokenizer, out, trainer_state, weights=weights)
    state.accelerator.wait_for_everyone()


def test_sharded_processes_save_complete_checkpoints_and_resume_from_them(start, tmp_path):
    unbroken, half, resumed = (tmp_path / name for name in ("unbroken", "half", "resumed"))
    in_two("fsdp2", train, start, 0, 3, unbroken)
    in_two("fsdp2", train, start, 0, 2, half)
    in_two("fsdp2", train, str(half), 2, 1, resumed)
    paths = (Path(start), unbroken, resumed)
    begin, one, two = (load_file(path / "model.safetensors") for path in paths)
    assert one.keys() == begin.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], begin[name]) for name in one)
    error = message(train, str(unbroken), 3, 1, tmp_path / "never")
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
