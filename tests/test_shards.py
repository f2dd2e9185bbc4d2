"""shards.py: two processes with half of the weights each take the step of one and leave whole
checkpoints.
"""

import pytest
import torch
from conftest import in_two_processes
from safetensors.torch import load_file
from test_train import (
    model,
    recipe_for,
    rows_of,
    score_and_update,
    unequal_batch,
    whole_weights_of,
)

import train
from errors import InputError
from policy import load_policy
from recipes import Recipe, checkpoints
from scale import shards
from scale.sampling import sampling_copy
from scale.shards import asked_for, in_parts
from train import Trainer

ASKED = {"zero2": "false", "fsdp2": "true"}


def in_two(sharding: str, work, *arguments) -> None:
    """In two processes, with what the configuration file puts into the environment."""
    in_two_processes(
        work,
        *arguments,
        environment={}
        if sharding not in ASKED
        else {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": ASKED[sharding],
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        },
    )


def take_step(recipe: Recipe, batch, out) -> None:
    """Score a batch that all hold, update on it, and sample."""
    torch.set_num_threads(1)
    trainer = Trainer(recipe)
    trainer.optimizer = torch.optim.SGD(
        trainer.policy.parameters()
    )  # Adam's division would blow rounding errors up
    if trainer.critic is not None:
        torch.nn.init.constant_(trainer.critic.head.weight, 0.01)
        trainer.critic_optimizer = torch.optim.SGD(trainer.critic.parameters(), 0.01)
    scored, totals, moved = score_and_update(trainer, batch)
    sampled = trainer.sample(0)
    with sampling_copy(trainer.policy, torch.float32) as copy:  # put together weight by weight
        moved += whole_weights_of(copy)
    again = trainer.score(trainer.policy, batch)  # sampling left the parts as they were
    held = sum(getattr(p, "_local_tensor", p).numel() for p in trainer.policy.parameters())
    if trainer.accelerator.is_main_process:
        torch.save(
            (
                moved,
                scored,
                totals,
                again,
                held,
                len(sampled.trajectories),
                in_parts(trainer.policy),
            ),
            out,
        )


@pytest.mark.parametrize(
    "sharding, algorithm", [("zero2", "grpo"), ("fsdp2", "grpo"), ("fsdp2", "ppo")]
)
def test_two_processes_with_half_of_the_weights_each_take_the_step_of_one(
    sharding, algorithm, model, tmp_path
):
    # As uneven as in test_train.py: 3, 3 and 2 rows, then a single one, so the processes have
    # unlike numbers of micro-batches.
    recipe = recipe_for(
        model,
        tmp_path,
        "--tokens_per_micro_batch",
        "10",
        "--trajectories_per_update",
        "3",
        "--lr",
        "0.1",
        "--questions_per_step",
        "4",
        "--algorithm",
        algorithm,
        "--max_grad_norm",
        "1e9",
    )
    batch = unequal_batch(recipe)
    take_step(recipe, batch, tmp_path / "one.pt")
    in_two(sharding, take_step, recipe, batch, tmp_path / "two.pt")
    one, two = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")
    assert (
        (one[6], two[6]) == (False, True)
        and two[4] == pytest.approx(one[4] / 2, rel=1e-2)
        and two[5] == one[5] == 8
    )
    assert max(m.abs().max() for m in one[0]) > 1e-3
    assert max((a - b).abs().max() for a, b in zip(one[0], two[0], strict=True)) < 1e-6
    torch.testing.assert_close(two[1], one[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(two[3], one[3], rtol=0, atol=1e-5)
    for ours, theirs in zip(one[2], two[2], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-5, rel=1e-5)


def sample_unevenly(recipe: Recipe) -> None:
    """Rank 0 generates once, rank 1 three times, as in a rollout with more turns."""
    trainer = Trainer(recipe)
    with shards.whole(trainer.policy, trainer.sharding), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.distributed, "all_reduce", None
        )  # calling it fails; a process that waits would end no test
        for _ in range(1 + 2 * trainer.accelerator.process_index):
            trainer.policy.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=4)
    trainer.accelerator.wait_for_everyone()


def test_a_rollout_of_more_turns_than_the_other_s_waits_for_nobody(model, tmp_path):
    in_two("zero2", sample_unevenly, recipe_for(model, tmp_path))


def run(recipe: Recipe, *later: Recipe) -> None:
    for one in (recipe, *later):
        train.train(one)


def test_a_run_in_parts_leaves_whole_checkpoints_and_goes_on_from_them(model, tmp_path):
    more = (
        "--algorithm",
        "grpo",
        "--kl_coef",
        "0.05",
        "--questions_per_step",
        "4",
        "--gradient_checkpointing",
    )
    straight = recipe_for(model, tmp_path / "a", "--steps", "3", *more)
    in_two("fsdp2", run, straight)
    resumed = [
        recipe_for(model, tmp_path / "b", "--steps", n, *flag, *more)
        for n, flag in (("2", ()), ("3", ("--resume",)))
    ]
    in_two("fsdp2", run, resumed[0])
    in_two("fsdp2", run, resumed[1])
    folders = [train.stage_folder(recipe) for recipe in (straight, resumed[1])]
    assert rows_of(folders[0]) == rows_of(folders[1]) and len(rows_of(folders[0])) == 3
    ends, states = (
        [load(checkpoints(folder)[-1] / name) for folder in folders]
        for load, name in ((load_file, "model.safetensors"), (torch.load, "trainer.pt"))
    )
    assert ends[0].keys() == load_file(f"{model}/model.safetensors").keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    moments = [state["optimizer"]["state"] for state in states]
    assert all(
        torch.equal(moments[0][name]["exp_avg"], moments[1][name]["exp_avg"]) for name in moments[0]
    )
    policy, _ = load_policy(str(checkpoints(folders[0])[-1]))  # a plain checkpoint
    start = load_policy(model)[0]
    assert not torch.equal(policy(torch.arange(9)[None]), start(torch.arange(9)[None]))
    with pytest.raises(
        InputError, match="were saved under ddp and are to be cut in parts, or the other way round"
    ):
        train.train(recipe_for(model, tmp_path / "b", "--steps", "4", "--resume", *more))


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


def test_the_configuration_files_ask_for_what_their_names_say(monkeypatch):
    import yaml

    for name in ("ddp", "zero2", "fsdp2"):
        config = yaml.safe_load(
            (train.Path(train.__file__).parent / "configs" / f"{name}.yaml").read_text()
        )
        monkeypatch.setenv("ACCELERATE_USE_FSDP", str(config["distributed_type"] == "FSDP").lower())
        for key, value in config.get("fsdp_config", {}).items():
            monkeypatch.setenv(key.upper(), str(value).lower())
        assert asked_for() == name


def test_the_file_s_two_processes_end_where_one_does(capsys):
    shards.main()
    # the gradients sum to (1, 2, 3, 4, 5): w − 0.1 · sum = 0.9 · w
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last.count(
            "[0.8999999761581421, 1.7999999523162842, 2.700000047683716, 3.5999999046325684, 4.5]"
        )
        == 2
    )
