"""lab.plan: the formulas by hand; tests/test_ghost.py has them beside simulated steps."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

import policy as policy_file
from errors import InputError
from lab import plan
from lab.plan import GIB, MOMENTS, Case, Shape, config_of, frozen_bytes
from policy import Policy, make_optimizer
from settings import Settings, resolve

SEVEN = Shape(config_of("7B"))
PLAIN = Settings(tokens_per_micro_batch=1032, max_context=129, kl_coef=0.0, algorithm="grpo")


def test_the_weights_of_the_known_models_are_counted_to_the_last():
    """As their model cards and files have it."""
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
    # 2²⁷ // V = 882 rows of logits; 1,032 tokens
    head = 12 * 3584 * 1032 + 10 * 882 * 152064 + 6 * 152064 * 3584
    assert update["update: head, or one layer again"] == head and gib(head) == 4.3
    # under LoRA norms are frozen and all is bf16: 14 bytes per width less, A x of 7 matrices more
    assert plan.activation_bytes(SEVEN, 16) == by_hand - 14 * 3584 + 7 * 2 * 16 == 218_456
    one_slot = plan.rollout_parts(Case(SEVEN, PLAIN), 1)
    assert one_slot["rollout: keys and values"] == 129 * 2 * 28 * 512 * 2 == 129 * 56 * 1024


def test_lora_s_weights_by_hand():
    """r · (in + out): q and o 2 · 7168, k and v 2 · 4096, three of 22528; 28 layers, r = 16."""
    thin, eight = (Case(SEVEN, replace(PLAIN, lora_rank=16, in_8bit=of)) for of in ("", "base"))
    assert thin.trained == 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528) == 40_370_176
    assert [gib(plan.standing(case)["weights"]) for case in (thin, eight)] == [14.3, 8.3]


def test_several_gpus_share_weights_moments_and_gradients_by_hand():
    weights = 4 * SEVEN.weights
    case = Case(SEVEN, PLAIN, 8, 8)
    update = plan.update_parts(case)
    assert plan.standing(case) == {"weights": weights / 8, "moments": weights / 4}
    # a part of all gradients, and for a moment the whole ones of a layer
    assert update["update: gradients"] == weights / 8
    gathered = 4 * (2 * 152064 * 3584 + (2 + 1) * SEVEN.in_layers / 28)
    assert update["update: weights, gathered"] == gathered
    assert plan.rollout_parts(case, 8)["rollout: copy of the weights"] == weights / 2
    for whole in ({"lora_rank": 8}, {"optimizer": "adamw8bit"}):
        assert Case(SEVEN, replace(PLAIN, **whole), 8, 8).share == 1


def test_under_ddp_the_gradients_stand_in_a_rollout_too():
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


def test_a_recipe_s_rows_and_tokens():
    """A prompt of 1024, five turns of 3072 (math: the most that a task has), four blocks of
    documents of 1536; 64 · 16 rows on two GPUs, 100 at once.
    """
    case = Case(SEVEN, resolve("ur2", 1, False, {"max_num_seqs": 100}), 2)
    assert (case.row_tokens, case.rows) == (1024 + 5 * 3072 + 4 * 1536, 100)
    # one row is a micro-batch of its own; one that no setting bounds has the model's positions
    assert case.tokens == case.row_tokens == 22528
    for most, tokens in ((18432, 18432), (0, 32768)):
        long = Case(SEVEN, resolve("when_to_search", 1, False, {"max_context": most}))
        assert long.row_tokens == long.tokens == tokens
    given = Case(SEVEN, resolve("ur2", 1, False, {"max_turn_tokens": 512}))
    assert (given.row_tokens, given.tokens) == (1024 + 5 * 512 + 4 * 1536, 16384)


def test_the_rollout_takes_what_is_left_and_no_more_than_there_are_rows():
    small_steps = {"optimizer": "adamw8bit", "gradient_checkpointing": True}
    case = Case(Shape(config_of("3B")), resolve("ur2", 1, False, small_steps))
    made, slots = plan.plan(case, 74 * GIB)
    assert made["peak"] <= 74 * GIB and plan.FEW < slots < case.rows
    none, more = (sum(plan.rollout_parts(case, n).values()) for n in (0, slots + 1))
    # engines.slots takes 0.8 of what is free
    assert more - none > 0.8 * (74 * GIB - sum(plan.standing(case).values()) - none)
    assert plan.plan(case, 10_000 * GIB)[1] == case.rows


# ----------------------------------------------------------------------------- against what happens


def small(config=Qwen2Config, **changes):
    torch.manual_seed(0)
    sizes = dict(zip(plan.FIELDS, (256, 4, 4, 2, 704, 2000, 32768, False), strict=True))
    return AutoModelForCausalLM.from_config(config(**sizes | changes))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_weights_and_moments_are_what_the_optimizer_holds(optimizer):
    policy = Policy(small(intermediate_size=768))
    policy(torch.arange(9)[None]).sum().backward()
    made = make_optimizer(policy, optimizer, 1e-3)
    made.step()
    tensors = [v for state in made.state.values() for v in state.values() if torch.is_tensor(v)]
    held = sum(v.nbytes for v in tensors if v.numel() > 256)
    parts = plan.standing(Case(Shape(policy.config), replace(PLAIN, optimizer=optimizer)))
    assert parts["weights"] == sum(p.nbytes for p in policy.parameters())
    assert parts["moments"] == pytest.approx(held, rel=0.02)


def test_an_int8_model_and_its_keys_and_values_are_what_is_loaded(tmp_path):
    model = small(num_hidden_layers=2).bfloat16()
    model.save_pretrained(tmp_path)
    case, options = Case(Shape(model.config), PLAIN), policy_file.frozen_options("cpu", True)
    eight = AutoModelForCausalLM.from_pretrained(tmp_path, **options | {"dtype": torch.bfloat16})
    tensors = [v for k, v in eight.state_dict().items() if "weight_format" not in k]
    assert frozen_bytes(case.shape, True) == sum(v.nbytes for v in tensors)
    cache = model(torch.zeros(3, 129, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == plan.rollout_parts(case, 3)["rollout: keys and values"]


def test_a_shape_is_found_by_size_by_hub_name_and_from_a_directory(tmp_path):
    assert config_of("7b").hidden_size == config_of("Qwen/Qwen2.5-7B-Instruct").hidden_size == 3584
    model = small(LlamaConfig, max_position_embeddings=77, head_dim=32)
    model.config.save_pretrained(tmp_path)
    shape = Shape(config_of(str(tmp_path)))
    assert shape.weights == sum(p.numel() for p in model.parameters())
    assert (shape.positions, shape.q) == (77, 128)


def test_what_is_not_on_this_disk_is_not_downloaded(monkeypatch):
    def load(name: str, local_files_only: bool, trust_remote_code: bool):
        assert local_files_only and not trust_remote_code
        raise OSError("many lines\nof advice")

    monkeypatch.setattr(AutoConfig, "from_pretrained", load)
    said = r"--model owner/nothing: neither a Qwen2.5 of .*, 7B nor a model on this disk: [^\n]*$"
    with pytest.raises(InputError, match=said):
        config_of("owner/nothing")


def test_a_model_of_another_build_is_one_line(tmp_path):
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
    # Weights, moments, gradients; 22528 tokens: 28 · 2 · 3584 bytes, and a layer again 301,400.
    assert float(eight_bit.split()[2]) == pytest.approx(8.26 + 0.30 + 0.15 + 4.21 + 6.32, abs=0.1)
    assert output.endswith("more GPUs: --gpus 2\n")
    plan.main(["--gpus", "8", "--gradient_checkpointing"])
    output = capsys.readouterr().out
    assert "weights in 8 parts" in output and "\nfits in 73.6 GiB" in output
    assert output.count("--gradient_checkpointing") == 1
    # 12 bytes of each of 7,615,616,512 weights, in the process that writes them
    assert float(output.partition("process 0")[2].split()[0]) == 85.1


def test_the_command_has_what_was_given_and_the_first_advice_that_fits(capsys, tmp_path):
    def last(flags: str) -> str:
        plan.main(flags.split())
        return capsys.readouterr().out.splitlines()[-1]

    launch = "accelerate launch --config_file configs/{}.yaml --num_processes 8 train.py"
    files = "--data q.jsonl --corpus p.jsonl"
    ours = "--model DIR --stage 2 --gradient_checkpointing True"
    assert last("--gpus 8 --stage 2") == f"{launch.format('fsdp2')} {files} {ours}"
    config_of("3B").save_pretrained(tmp_path)  # whole on each GPU, which is faster
    ours = f"--data own.jsonl --corpus p.jsonl --model {tmp_path} --gradient_checkpointing"
    assert last(f"--gpus 8 {ours}") == f"{launch.format('ddp')} {ours} True"
    assert "GPUs: --gpus 16" in last("--gpus 8 --gpu_memory 12")
    # One GPU of 40 GiB: what is learned is in thin matrices, with another learning rate.
    command = last("--model 7B --gpu_memory 40 --max_context 8192")
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
def test_no_gpu_is_one_line(flags, line):
    with pytest.raises(InputError, match=line):
        plan.main(flags.split())
