"""Tests lab.plan: the formulas by hand; tests/test_ghost.py compares them with simulated steps."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

import policy as policy_file
from errors import InputError
from flags import resolve
from lab import plan
from lab.plan import GIB, MOMENTS, Case, Shape, config_of, frozen_bytes
from policy import Policy, make_optimizer
from settings import Settings

SEVEN = Shape(config_of("7B"))
PLAIN = Settings(tokens_per_micro_batch=1032, max_context=129, kl_coef=0.0, algorithm="grpo")


def test_the_number_of_weights_of_the_known_models_is_exact():
    """The expected numbers are those of the model cards and files."""
    weights = [Shape(config_of(name)).weights for name in plan.SHAPES]
    assert weights == [3_821_312, 494_032_768, 3_085_938_688, 7_615_616_512]


def gib(x: float) -> float:
    return round(x / GIB, 1)


def test_the_worked_numbers_of_7b():
    weights, update = 4 * SEVEN.weights, plan.update_parts(Case(SEVEN, PLAIN))
    assert (gib(weights), gib(frozen_bytes(SEVEN, False))) == (28.4, 14.2)
    assert gib(frozen_bytes(SEVEN, True)) == 8.1
    assert [gib(each * SEVEN.weights) for each in MOMENTS.values()] == [56.7, 14.4, 0.0]
    assert gib(update["update: bf16 copy of the weights"]) == 13.2
    by_hand = 26 * 3584 + 2 * (3 * 3584 + 2 * 512 + 4 * 18944) + 8 + 4 * 28
    assert plan.activation_bytes(SEVEN) == by_hand == 268_408 and round(by_hand / 1024) == 262
    # The head processes 2²⁷ // V = 882 rows of logits at once, of 1,032 tokens.
    head = 12 * 3584 * 1032 + 10 * 882 * 152064 + 6 * 152064 * 3584
    assert update["update: head, or one layer again"] == head and gib(head) == 4.3
    # Under LoRA norms are frozen and all is bf16, which saves 14 bytes per width; A x of 7 matrices
    # is added.
    assert plan.activation_bytes(SEVEN, 16) == by_hand - 14 * 3584 + 7 * 2 * 16 == 218_456
    one_slot = plan.rollout_parts(Case(SEVEN, PLAIN), 1)
    assert one_slot["rollout: keys and values"] == 129 * 2 * 28 * 512 * 2 == 129 * 56 * 1024


def test_lora_s_weights_by_hand():
    """A matrix has r · (in + out) weights: in + out is 7168 for q and o, 4096 for k and v, 22528
    for the three of the MLP. There are 28 layers, and r = 16.
    """
    lora, eight = (Case(SEVEN, replace(PLAIN, lora_rank=16, in_8bit=x)) for x in ("", "base"))
    assert lora.trained == 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528) == 40_370_176
    assert [gib(plan.standing(case)["weights"]) for case in (lora, eight)] == [14.3, 8.3]


def test_several_gpus_share_weights_moments_and_gradients_by_hand():
    weights = 4 * SEVEN.weights
    case = Case(SEVEN, PLAIN, 8, 8)
    update = plan.update_parts(case)
    assert plan.standing(case) == {"weights": weights / 8, "moments": weights / 4}
    # Each GPU keeps a part of all gradients. Gathered are embedding, head, two layers, and the
    # gradients of one layer.
    assert update["update: gradients"] == weights / 8
    gathered = 4 * (2 * 152064 * 3584 + (2 + 1) * SEVEN.in_layers / 28)
    assert update["update: weights, gathered"] == gathered
    assert plan.rollout_parts(case, 8)["rollout: copy of the weights"] == weights / 2
    for unsharded in ({"lora_rank": 8}, {"optimizer": "adamw8bit"}):
        assert Case(SEVEN, replace(PLAIN, **unsharded), 8, 8).share == 1


def test_under_ddp_the_gradients_stay_in_memory_during_a_rollout():
    cases = [Case(SEVEN, PLAIN), Case(SEVEN, PLAIN, 8), Case(SEVEN, PLAIN, 8, 8)]
    buckets = [plan.rollout_parts(x, 8)["rollout: gradients, in DDP's buckets"] for x in cases]
    assert buckets == [0, plan.update_parts(cases[1])["update: gradients"], 0]
    assert buckets[1] == 4 * SEVEN.weights
    critic = plan.standing(Case(SEVEN, replace(PLAIN, algorithm="ppo"), 8))["critic, its moments"]
    assert critic == 16 * SEVEN.weights


def test_ppo_has_a_critic_with_moments_and_a_kl_a_reference():
    parts = plan.standing(Case(SEVEN, replace(PLAIN, algorithm="ppo", kl_coef=0.1)))
    assert parts["critic, its moments"] == parts["weights"] + parts["moments"] == 12 * SEVEN.weights
    assert parts["reference"] == 2 * SEVEN.weights
    assert "reference" not in plan.standing(Case(SEVEN, replace(PLAIN, kl_coef=1.0, lora_rank=8)))


def test_the_rows_and_tokens_of_a_recipe():
    """A row has a prompt of 1024 tokens, five turns of 3072 (the limit of math, the largest), and
    four blocks of documents of 1536. There are 64 · 16 rows on two GPUs, 100 at once.
    """
    case = Case(SEVEN, resolve("ur2", 1, False, {"max_num_seqs": 100}), 2)
    assert (case.row_tokens, case.rows) == (1024 + 5 * 3072 + 4 * 1536, 100)
    # A row this long is a micro-batch. A row that no setting limits has as many tokens as the model
    # has positions.
    assert case.tokens == case.row_tokens == 22528
    for limit, tokens in ((18432, 18432), (0, 32768)):
        long = Case(SEVEN, resolve("when_to_search", 1, False, {"max_context": limit}))
        assert long.row_tokens == long.tokens == tokens
    short = Case(SEVEN, resolve("ur2", 1, False, {"max_turn_tokens": 512}))
    assert (short.row_tokens, short.tokens) == (1024 + 5 * 512 + 4 * 1536, 16384)


def test_the_rollout_takes_the_remaining_memory_but_not_more_slots_than_rows():
    small_steps = {"optimizer": "adamw8bit", "gradient_checkpointing": True}
    case = Case(Shape(config_of("3B")), resolve("ur2", 1, False, small_steps))
    parts, slots = plan.plan(case, 74 * GIB)
    assert parts["peak"] <= 74 * GIB and plan.FEW < slots < case.rows
    without_slots, with_one_more = (
        sum(plan.rollout_parts(case, n).values()) for n in (0, slots + 1)
    )
    # engines.slots takes 0.8 of the free memory
    assert with_one_more - without_slots > 0.8 * (
        74 * GIB - sum(plan.standing(case).values()) - without_slots
    )
    assert plan.plan(case, 10_000 * GIB)[1] == case.rows


# ------------------------------------------------------------------------ compared with real models


def small(config=Qwen2Config, **changes):
    torch.manual_seed(0)
    sizes = dict(zip(plan.FIELDS, (256, 4, 4, 2, 704, 2000, 32768, False), strict=True))
    return AutoModelForCausalLM.from_config(config(**sizes | changes))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_planned_weights_and_moments_equal_those_of_a_real_optimizer(optimizer):
    policy = Policy(small(intermediate_size=768))
    policy(torch.arange(9)[None]).sum().backward()
    real = make_optimizer(policy, optimizer, 1e-3)
    real.step()
    tensors = [v for state in real.state.values() for v in state.values() if torch.is_tensor(v)]
    actual = sum(v.nbytes for v in tensors if v.numel() > 256)
    parts = plan.standing(Case(Shape(policy.config), replace(PLAIN, optimizer=optimizer)))
    assert parts["weights"] == sum(p.nbytes for p in policy.parameters())
    assert parts["moments"] == pytest.approx(actual, rel=0.02)


def test_a_planned_int8_model_and_its_keys_and_values_equal_loaded_ones(tmp_path):
    model = small(num_hidden_layers=2).bfloat16()
    model.save_pretrained(tmp_path)
    case, options = Case(Shape(model.config), PLAIN), policy_file.frozen_options("cpu", True)
    eight = AutoModelForCausalLM.from_pretrained(tmp_path, **options | {"dtype": torch.bfloat16})
    tensors = [v for k, v in eight.state_dict().items() if "weight_format" not in k]
    assert frozen_bytes(case.shape, True) == sum(v.nbytes for v in tensors)
    cache = model(torch.zeros(3, 129, dtype=torch.long), use_cache=True).past_key_values
    cached_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cached_bytes == plan.rollout_parts(case, 3)["rollout: keys and values"]


def test_a_shape_can_be_named_by_size_by_hub_name_and_by_directory(tmp_path):
    assert config_of("7b").hidden_size == config_of("Qwen/Qwen2.5-7B-Instruct").hidden_size == 3584
    model = small(LlamaConfig, max_position_embeddings=77, head_dim=32)
    model.config.save_pretrained(tmp_path)
    shape = Shape(config_of(str(tmp_path)))
    assert shape.weights == sum(p.numel() for p in model.parameters())
    assert (shape.positions, shape.q) == (77, 128)


def test_a_model_that_is_not_on_this_disk_is_not_downloaded(monkeypatch):
    def load(name: str, local_files_only: bool, trust_remote_code: bool):
        assert local_files_only and not trust_remote_code
        raise OSError("many lines\nof advice")

    monkeypatch.setattr(AutoConfig, "from_pretrained", load)
    error = (
        r"--model owner/nothing: neither a size \(.*, 7B\) nor a model on this disk that "
        r"transformers knows: [^\n]*$"
    )
    with pytest.raises(InputError, match=error):
        config_of("owner/nothing")


def test_a_model_of_another_architecture_is_one_line(tmp_path):
    GPT2Config(n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="gpt2 is not built as Llama is"):
        plan.main(["--model", str(tmp_path)])


def test_the_table_the_verdict_the_advice_and_the_command(capsys):
    plan.main(["--model", "7B", "--gpus", "1", "--gpu_memory", "20"])
    output = capsys.readouterr().out
    assert "does not fit in 18.4 GiB" in output
    for part in ("weights  ", "moments", "update: gradients", "rollout: keys and values", "peak"):
        assert part in output
    (eight_bit,) = [line for line in output.splitlines() if "--in_8bit base" in line]
    # Weights, moments and gradients; for each of 22528 tokens 28 · 2 · 3584 bytes, and 301,400 for
    # a layer that is computed again.
    assert float(eight_bit.split()[2]) == pytest.approx(8.26 + 0.30 + 0.15 + 4.21 + 6.32, abs=0.1)
    assert output.endswith("more GPUs: --gpus 2\n")
    plan.main(["--gpus", "8", "--gradient_checkpointing"])
    output = capsys.readouterr().out
    assert "weights in 8 parts" in output and "\nfits in 73.6 GiB" in output
    assert output.count("--gradient_checkpointing") == 1
    # The process that writes a checkpoint holds 12 bytes for each of 7,615,616,512 weights.
    assert float(output.partition("process 0")[2].split()[0]) == 85.1


def test_the_command_repeats_the_given_flags_and_adds_the_first_advice_that_fits(capsys, tmp_path):
    def last_line(flags: str) -> str:
        plan.main(flags.split())
        return capsys.readouterr().out.splitlines()[-1]

    launch = "accelerate launch --config_file configs/{}.yaml --num_processes 8 train.py"
    files = "--data q.jsonl --corpus p.jsonl"
    options = "--model DIR --stage 2 --gradient_checkpointing True"
    assert last_line("--gpus 8 --stage 2") == f"{launch.format('fsdp2')} {files} {options}"
    config_of("3B").save_pretrained(tmp_path)  # 3B fits whole on each GPU, which is faster
    options = f"--data own.jsonl --corpus p.jsonl --model {tmp_path} --gradient_checkpointing"
    assert last_line(f"--gpus 8 {options}") == f"{launch.format('ddp')} {options} True"
    assert "GPUs: --gpus 16" in last_line("--gpus 8 --gpu_memory 12")
    # For one GPU of 40 GiB the advice is LoRA, with another learning rate.
    command = last_line("--model 7B --gpu_memory 40 --max_context 8192")
    assert command.startswith(f"accelerate launch train.py {files} --model DIR --max_context 8192 ")
    assert command.endswith(" --optimizer adamw --lora_rank 16 --lr 2e-05")


@pytest.mark.parametrize(
    "flags, line",
    [
        ("--gpus 0", "--gpus 0: must be at least 1"),
        ("--gpu_memory 0", "--gpu_memory 0.0: must be above 0"),
        ("--gpu_memory nan", "--gpu_memory nan: must be a finite number"),
    ],
)
def test_flags_about_gpus_that_make_no_sense_are_one_line(flags, line):
    with pytest.raises(InputError, match=line):
        plan.main(flags.split())
