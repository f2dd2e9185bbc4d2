"""Tests lab.plan: the formulas by hand; docs/scale.md compares them with simulated steps."""

import pytest
from transformers import Qwen2Config

from lab import plan
from lab.plan import GIB, config_of, estimate
from settings import Settings

SEVEN = config_of("7B")
P = 7_615_616_512  # weights of Qwen2.5-7B, by its card
PLAIN = {"tokens_per_micro_batch": 1032, "max_context": 129, "kl_coef": 0.0, "algorithm": "grpo"}


def gib(x: float) -> float:
    return round(x / GIB, 1)


def parts_of(gpus=1, parts=1, **changes) -> tuple:
    return tuple(estimate(Settings(**PLAIN | changes), SEVEN, gpus, parts).values())


def test_the_worked_numbers_of_7b():
    always, rollout, update = parts_of(kl_coef=0.1)
    assert [gib(x) for x in always.values()] == [28.4, 56.7, 0, 14.2]  # no critic
    assert always["weights"] == pytest.approx(4 * P, rel=1e-4)  # without norms and biases
    assert gib(rollout["copy of the weights"]) == 14.2
    assert rollout["keys and values"] == 8 * 129 * 4 * 28 * 512
    by_hand = 26 * 3584 + 2 * (3 * 3584 + 2 * 512 + 4 * 18944)
    assert update["activations"] == 28 * 1032 * by_hand and round(by_hand / 1024) == 262
    # The head processes 2²⁷ // V = 882 rows of logits at once, of 1,032 tokens.
    head = 12 * 3584 * 1032 + 10 * 882 * 152064 + 6 * 152064 * 3584
    assert update["head, or a layer again"] == head and gib(head) == 4.3


def test_lora_trains_few_weights_and_needs_no_reference():
    """A matrix has r · (in + out) weights: in + out is 7168 for q and o, 4096 for k and v, 22528
    for the three of the MLP. There are 28 layers, and r = 16.
    """
    always, _, update = parts_of(lora_rank=16, kl_coef=0.1)
    trained = 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert trained == 40_370_176 and update["gradients"] == 4 * trained
    assert [gib(x) for x in always.values()] == [14.3, 0.3, 0, 0]
    # What a layer passes on is in bf16, and the frozen head has no gradient.
    _, _, update = parts_of(lora_rank=16, gradient_checkpointing=True)
    assert update["activations"] == 2 * 3584 * 28 * 1032
    layer = 18 * 3584 + 4 * 512 + 8 * 18944 + 4 * 18944 + 2 * 3584
    head = 12 * 3584 * 1032 + 10 * 882 * 152064
    assert update["head, or a layer again"] == max(layer * 1032, head)
    # PPO's critic has a copy of the frozen weights.
    assert gib(parts_of(lora_rank=16, algorithm="ppo")[0]["critic"]) == 14.6


def test_heads_may_be_wider_than_their_share_and_a_row_holds_what_the_summariser_may_write():
    wide = Qwen2Config(**vars(SEVEN) | {"head_dim": 2 * 128})
    keys = [
        estimate(Settings(**PLAIN), c, 1, 1)["rollout"]["keys and values"] for c in (SEVEN, wide)
    ]
    assert keys[1] == 2 * keys[0]
    rows = {"max_turn_tokens": 10, "max_searches": 2, "document_tokens": 100, "max_context": 0}
    row = plan.PROMPT + 4 * 10 + 2 * 100
    assert plan.longest_row(Settings(**rows), SEVEN) == row
    noted = Settings(**rows | {"summarizer": "MODEL"}, summary_sampling={})
    assert plan.longest_row(noted, SEVEN) == row + 2 * (2048 - 100)


def test_sharding_divides_weights_moments_and_gradients_and_ddp_keeps_buckets():
    whole, (always, rollout, update) = parts_of(8, 1), parts_of(8, 8)
    assert [x / 8 for x in whole[0].values()] == [*always.values()]
    assert update["gradients"] == whole[2]["gradients"] / 8
    assert gib(update["gathered weights"]) == 6.7  # embedding, head, three layers
    assert rollout["gradients (DDP's buckets)"] == 0
    assert gib(whole[1]["gradients (DDP's buckets)"]) == 28.4
    assert gib(parts_of(algorithm="ppo")[0]["critic"]) == 85.1  # 12 bytes per weight


def test_the_command_takes_ddp_if_that_fits_and_else_fsdp2(capsys):
    flags = ["--gpus", "8", "--gradient_checkpointing", "--model"]
    plan.main([*flags, "7B"])
    assert "on each of 8 GPUs, weights in 8 parts" in capsys.readouterr().out
    plan.main([*flags, "0.5B"])
    output = capsys.readouterr().out
    assert "weights in 1 parts" in output and ": fits in 73.6" in output
    plan.main(["--gpu_memory", "20"])
    assert ": does not fit in 18.4" in capsys.readouterr().out
