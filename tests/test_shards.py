"""shards.py: two processes with half of the weights each take the step of one and leave whole
checkpoints.
"""

import copy
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from conftest import in_two_processes
from safetensors.torch import load_file

import ppo
from errors import InputError
from policy import (
    Batch,
    Policy,
    PolicySettings,
    load_policy,
    make_optimizer,
    micro_batches,
    save_policy,
)
from scale import shards
from scale.sampling import sampling_copy, to_sample_with
from scale.shards import asked_for, full, in_parts
from tests.conftest import model_of, small

ROOT = Path(__file__).parent.parent
ASKED = {"zero2": "false", "fsdp2": "true"}
VOCABULARY = 810


@pytest.fixture(scope="session")
def start(bpe, tmp_path_factory):
    """A checkpoint to begin with."""
    torch.manual_seed(0)
    policy = Policy(model_of("qwen2", **small(vocab_size=VOCABULARY, initializer_range=0.2)))
    path = tmp_path_factory.mktemp("start") / "model"
    save_policy(policy, bpe, path)
    return str(path)


def in_two(sharding: str, work, *arguments) -> None:
    """In two processes, with what the configuration file puts into the environment."""
    environment = {}
    if sharding in ASKED:
        environment = {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": ASKED[sharding],
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        }
    in_two_processes(work, *arguments, environment=environment)


def uneven_batch() -> Batch:
    """Eight rows of 20 to 0 sampled tokens, with holes as documents leave them."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.zeros(8, 22)  # [B, T]
    for row, length in enumerate((20, 2, 9, 14, 1, 0, 17, 4)):
        mask[row, 2 : 2 + length] = 1
    mask[0, 5:14] = mask[3, 3:12] = 0
    weights = torch.randn(8, 22, generator=draw) * mask / mask.sum()
    tokens = torch.randint(0, VOCABULARY, (8, 23), generator=draw)
    return Batch(tokens, mask, mask, torch.zeros(8), 2, token_weights=weights)


def parts_of_a_run(module) -> tuple[Accelerator, str, torch.nn.Module]:
    """(accelerator, sharding, what an update calls), as a run is set up."""
    torch.set_num_threads(1)
    accelerator = Accelerator()
    sharding = asked_for() if accelerator.num_processes > 1 else "ddp"
    if sharding == "ddp":
        return accelerator, sharding, accelerator.prepare_model(module)
    return accelerator, sharding, shards.shard(module, sharding, accelerator.num_processes)


def dealt(batch: Batch, accelerator) -> list[torch.Tensor]:
    processes, rank = accelerator.num_processes, accelerator.process_index
    return micro_batches(batch.response_mask, 10, processes, rank)


def output(module, part: Batch) -> torch.Tensor:
    """[b, t]: log-probs, or of a critic its values."""
    if isinstance(getattr(module, "module", module), ppo.Critic):
        return module(part.tokens, part.response_mask)
    return module(part.tokens, 1.0, part.response_mask)


@torch.no_grad()
def score(module, batch: Batch, accelerator) -> torch.Tensor:
    scored = torch.zeros(batch.response_mask.shape)  # [B, T]
    for rows in dealt(batch, accelerator):
        result = output(module, batch.rows(rows))  # [b, t]
        scored[rows, : result.shape[1]] = result
    shards.cut(module)
    return accelerator.reduce(scored, "sum") if accelerator.num_processes > 1 else scored


def descend(model, optimizer, batch: Batch, accelerator) -> float:
    """Down the gradient of Σ weight · output. Returns its norm."""
    cuts = dealt(batch, accelerator)
    for rows in cuts:
        part = batch.rows(rows)
        loss = (part.token_weights * output(model, part)).sum()
        accelerator.backward(loss * accelerator.num_processes)
    norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def whole_of(module) -> list[torch.Tensor]:
    return [full(p.detach()).clone() for p in module.parameters()]


def take_step(start: str, kind: str, lora_rank: int, out: Path) -> None:
    """Score a batch, update on rows of it (at last on a single one, so that a process has none),
    and sample.
    """
    policy, _ = load_policy(start, settings=PolicySettings(lora_rank=lora_rank))
    module = policy
    if kind == "critic":
        module = ppo.Critic(copy.deepcopy(policy.language_model.base_model))
        torch.nn.init.constant_(module.head.weight, 0.01)
    before, batch = whole_of(module), uneven_batch()
    accelerator, sharding, model = parts_of_a_run(module)
    # Adam's division would blow rounding errors up.
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    scored, norms = score(module, batch, accelerator), []
    for rows in ([0, 1, 2], [3, 4, 5], [6, 7], [7]):
        norms.append(descend(model, optimizer, batch.rows(torch.tensor(rows)), accelerator))
    moved = [a - b for a, b in zip(whole_of(module), before, strict=True)]
    if kind == "policy":
        with to_sample_with(policy, False, sharding) as sampler, torch.no_grad():
            sampler.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=4)
        with sampling_copy(policy, torch.float32) as copied:  # put together weight by weight
            for weight, theirs in zip(whole_of(copied), whole_of(policy), strict=False):
                assert lora_rank or torch.equal(weight, theirs)
    again = score(module, batch, accelerator)  # sampling left the parts as they were
    held = sum(getattr(p, "_local_tensor", p).numel() for p in module.parameters())
    if accelerator.is_main_process:
        torch.save((moved, [scored, again], norms, held, in_parts(module)), out)


def steps_of_one_and_two(sharding, start, kind, lora_rank, folder) -> list:
    """What one and what two processes have done; both have moved, to the same place."""
    take_step(start, kind, lora_rank, folder / "one.pt")
    in_two(sharding, take_step, start, kind, lora_rank, folder / "two.pt")
    one, two = (torch.load(folder / name) for name in ("one.pt", "two.pt"))
    assert max(m.abs().max() for m in one[0]) > 1e-3
    assert max((a - b).abs().max() for a, b in zip(one[0], two[0], strict=True)) < 1e-6
    torch.testing.assert_close(two[1], one[1], rtol=0, atol=1e-5)
    assert two[2] == pytest.approx(one[2], abs=1e-5, rel=1e-5)
    return [one, two]


@pytest.mark.parametrize(
    "sharding, kind", [("zero2", "policy"), ("fsdp2", "policy"), ("fsdp2", "critic")]
)
def test_two_processes_with_half_of_the_weights_each_take_the_step_of_one(
    sharding, kind, start, tmp_path
):
    one, two = steps_of_one_and_two(sharding, start, kind, 0, tmp_path)
    assert (one[4], two[4]) == (False, True) and two[3] == pytest.approx(one[3] / 2, rel=1e-2)


def test_two_processes_with_all_of_the_weights_take_the_step_of_one(start, tmp_path):
    steps_of_one_and_two("ddp", start, "policy", 0, tmp_path)


def sample_unevenly(start: str) -> None:
    """Rank 0 generates once, rank 1 three times, as in a rollout with more turns."""
    policy, _ = load_policy(start)
    accelerator, sharding, _ = parts_of_a_run(policy)
    with shards.whole(policy, sharding), pytest.MonkeyPatch.context() as patch:
        # Calling it fails: a process that waits would end no test.
        patch.setattr(torch.distributed, "all_reduce", None)
        for _ in range(1 + 2 * accelerator.process_index):
            policy.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=4)
    accelerator.wait_for_everyone()


def test_a_rollout_of_more_turns_than_the_other_s_waits_for_nobody(start):
    in_two("zero2", sample_unevenly, start)


def train(start: str, done: int, steps: int, out: Path) -> None:
    """`steps` steps of AdamW from a checkpoint of which `done` are done; leaves one behind."""
    policy, tokenizer = load_policy(start, settings=PolicySettings(gradient_checkpointing=True))
    accelerator, _, model = parts_of_a_run(policy)
    optimizer = make_optimizer(policy, "adamw", 1e-3)
    if done:
        state = torch.load(f"{start}/trainer.pt")
        shards.load_moments(policy, optimizer, state["optimizer"])
    for _ in range(steps):
        descend(model, optimizer, uneven_batch(), accelerator)
    weights = shards.whole_weights(policy.language_model) if in_parts(policy) else None
    state = {"optimizer": shards.whole_moments(policy, optimizer)}
    if accelerator.is_main_process:
        save_policy(policy, tokenizer, out, state, weights=weights)
    accelerator.wait_for_everyone()


def test_parts_leave_whole_checkpoints_and_go_on_from_them(start, tmp_path):
    straight, half, resumed = (tmp_path / name for name in ("straight", "half", "resumed"))
    in_two("fsdp2", train, start, 0, 3, straight)
    in_two("fsdp2", train, start, 0, 2, half)
    in_two("fsdp2", train, str(half), 2, 1, resumed)
    one, two = (load_file(path / "model.safetensors") for path in (straight, resumed))
    assert one.keys() == load_file(f"{start}/model.safetensors").keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    one, two = (torch.load(p / "trainer.pt")["optimizer"]["state"] for p in (straight, resumed))
    assert all(torch.equal(one[name]["exp_avg"], two[name]["exp_avg"]) for name in one)
    ids = torch.arange(9)[None]
    logprobs = load_policy(str(straight))[0](ids)  # a plain checkpoint
    assert not torch.equal(logprobs, load_policy(start)[0](ids))
    train(start, 0, 3, tmp_path / "alone")
    torch.testing.assert_close(
        logprobs, load_policy(str(tmp_path / "alone"))[0](ids), atol=1e-3, rtol=0
    )
    with pytest.raises(InputError, match="are to be cut in parts, or the other way round"):
        train(str(straight), 3, 1, tmp_path / "never")


@pytest.mark.parametrize(
    "environment, said",
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "use configs/zero2.yaml"),
        ({"ACCELERATE_USE_FSDP": "true"}, "set fsdp_version: 2"),
    ],
)
def test_what_cannot_be_done_in_parts_is_one_line(environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said):
        asked_for()


@pytest.mark.parametrize(
    "optimizer, rank, said",
    [
        ("adamw8bit", 0, "cannot step weights in parts"),
        ("adamw", 8, "frozen weights need no parts"),
    ],
)
def test_8_bit_moments_and_lora_stay_whole(optimizer, rank, said):
    with pytest.raises(InputError, match=said):
        shards.check_shardable(optimizer, rank)


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp2"])
def test_the_configuration_files_ask_for_what_their_names_say(name, monkeypatch):
    config = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(config["distributed_type"] == "FSDP").lower())
    for key, value in config.get("fsdp_config", {}).items():
        monkeypatch.setenv(key.upper(), str(value).lower())
    assert asked_for() == name
