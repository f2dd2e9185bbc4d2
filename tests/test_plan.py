"""plan.py: the formulas by hand, and against the peaks of small models that really learn."""

import dataclasses
import importlib.util

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import policy as policy_file
import train
from errors import InputError
from lab import plan
from lab.plan import (
    GIB,
    SHAPES,
    Setting,
    activation_bytes,
    changed,
    frozen_bytes,
    head_bytes,
    kv_bytes,
    make_plan,
    moment_bytes,
    multiplied,
    remedies,
    rollout_parts,
    setting_of,
    shape_from,
    shape_of,
    standing,
    update_parts,
)
from policy import Policy, make_optimizer
from recipes import resolve
from scale.lora import add_lora

SEVEN = SHAPES["Qwen2.5-7B"]
PLAIN = Setting("adamw", False, 1032, 0, False, False, False, False, 64, 512)


# ------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize(
    "name, total",
    [  # as their model cards and files have it
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2.5-3B", 3_085_938_688),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Llama-3-8B", 8_030_261_248),
    ],
)
def test_the_weights_of_the_known_models_are_counted_to_the_last(name, total):
    assert SHAPES[name].weights == total


def test_the_worked_numbers_of_7b():
    def gib(x):
        return round(x / GIB, 1)

    assert (
        gib(4 * SEVEN.weights),
        gib(frozen_bytes(SEVEN, False)),
        gib(frozen_bytes(SEVEN, True)),
    ) == (28.4, 14.2, 8.1)
    # r · (in + out): q and o 2 · 7168, k and v 2 · 4096, three of 22528, in 28 layers, r = 16
    assert SEVEN.lora(16) == 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528) == 40_370_176
    assert [
        gib(moment_bytes(SEVEN.weights, n)) for n in ("adamw", "adamw8bit", "paged_adamw8bit")
    ] == [56.7, 14.4, 0.0]
    assert gib(2 * multiplied(SEVEN)) == 13.2
    assert kv_bytes(SEVEN) == 2 * 28 * 512 * 2 == 56 * 1024
    assert (
        activation_bytes(SEVEN)
        == 26 * 3584 + 2 * (2 * 3584 + 2 * 512 + 4 * 18944) + 8 + 4 * 28
        == 261_240
    )
    assert round(261_240 / 1024) == 255 and 4 * 3584 == 14 * 1024
    assert (
        gib(head_bytes(SEVEN, 16384, True)) == 4.3
        and head_bytes(SEVEN, 16384, False) == 10 * 882 * 152064
    )  # 2²⁷ // V = 882
    assert (
        head_bytes(SEVEN, 16384, True, b=4) == 4 * 110 * 152064 + 4 * 152064 * 3584
    )  # 2²⁴ // V = 110
    lora = dataclasses.replace(PLAIN, lora_rank=16)
    assert gib(standing(SEVEN, lora)["weights"]) == 14.3
    assert gib(standing(SEVEN, dataclasses.replace(lora, base_in_8bit=True))["weights"]) == 8.3


def test_several_gpus_share_what_the_sharding_says_by_hand():
    weights = 4 * SEVEN.weights
    ddp, zero2, fsdp2 = (make_plan(SEVEN, PLAIN, 80 * GIB, 8, name) for name in plan.SHARDINGS)
    assert ddp.standing == {
        "weights": weights,
        "moments": 2 * weights,
        "gradients, in buckets": weights,
    }
    assert ddp.update["gradients"] == 0
    for sharded in (zero2, fsdp2):
        assert sharded.standing == {"weights": weights / 8, "moments": weights / 4}
        # a part of all gradients, and for a moment the whole ones of embedding and head
        assert sharded.update["gradients"] == weights / 8 + 2 * 4 * 152064 * 3584
        assert (
            sharded.rollout["bf16 copy to sample with"] == weights / 2
            and not sharded.rollout["all weights, gathered"]
        )
    assert zero2.update["weights gathered"] == weights
    assert fsdp2.update["weights gathered"] == 4 * (2 * 152064 * 3584 + 2 * SEVEN.layer)


def test_ppo_has_a_critic_with_moments_and_a_kl_a_reference():
    s = dataclasses.replace(PLAIN, critic=True, reference=True)
    parts = standing(SEVEN, s)
    assert parts["critic, its moments"] == parts["weights"] + parts["moments"] == 12 * SEVEN.weights
    assert parts["reference"] == 2 * SEVEN.weights


def test_a_recipe_s_rows_tokens_and_flags():
    recipe = resolve(
        "ur2", 1, False, {"kl_coef": 0.1, "rollout_batch_size": 100, "algorithm": "ppo"}
    )
    s = setting_of(recipe, SEVEN, gpus=2)
    # a prompt of 1024, five turns of 512, four blocks of documents of 1024; 64 · 16 rows, on two
    # GPUs, 100 at once
    assert (s.row_tokens, s.rows, s.tokens) == (1024 + 5 * 512 + 4 * 1024, 100, 16384)
    assert s.reference and s.critic
    long = setting_of(resolve("when_to_search", 1, False, {}), SEVEN)
    assert (
        long.row_tokens == long.tokens == 32768
    )  # the model's positions; one row is a micro-batch of its own
    assert not setting_of(dataclasses.replace(recipe, lora_rank=8), SEVEN).reference


# ----------------------------------------------------------------------------- against what happens


def peak_of(work) -> int:
    """The most bytes that were allocated at once during `work`, on top of what there was."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def small(family=Qwen2ForCausalLM, config=Qwen2Config, **changes):
    torch.manual_seed(0)
    return family(
        config(
            **{
                "vocab_size": 2000,
                "hidden_size": 256,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 704,
                "tie_word_embeddings": False,
                **changes,
            }
        )
    )


def measured(model, s: Setting) -> tuple[float, float]:
    """(peak of a micro-batch that is not the first, gradients counted; what the plan says)."""
    if s.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy, shape = Policy(model), shape_from(model.config)
    if s.b == 2:  # what a GPU does
        policy.autocast = lambda keep: torch.autocast("cpu", torch.bfloat16, cache_enabled=keep)
    if s.lora_rank:
        add_lora(model.to(torch.bfloat16 if s.b == 2 else torch.float32), s.lora_rank)
    tokens = torch.randint(
        0, shape.vocab, (s.tokens // 129, 129), generator=torch.Generator().manual_seed(0)
    )  # [B, L]

    def learn():
        policy(tokens).sum().backward()

    learn()
    gradients = sum(p.grad.nbytes for p in policy.parameters() if p.grad is not None)
    return gradients + peak_of(learn), sum(update_parts(shape, s).values())


@pytest.fixture
def chunks_of_a_cpu(monkeypatch):
    """What is measured here under bf16 autocast has a CPU's chunks."""
    monkeypatch.setitem(policy_file.CHUNK_LOGITS, "cuda", policy_file.CHUNK_LOGITS["cpu"])


LARGE_HEAD = {"vocab_size": 20000, "num_hidden_layers": 1}
CASES = {
    "plain": ({}, {}),
    "llama": ({"family": LlamaForCausalLM, "config": LlamaConfig}, {}),
    "many keys": ({"num_key_value_heads": 4, "intermediate_size": 300}, {}),
    "checkpointing": ({"num_hidden_layers": 8}, {"gradient_checkpointing": True}),
    "large head": (LARGE_HEAD, {}),
    "large head, tied": ({**LARGE_HEAD, "tie_word_embeddings": True}, {}),
    "large head, checkpointing": (LARGE_HEAD, {"gradient_checkpointing": True}),
    "few tokens": ({}, {"tokens": 129}),
}


@pytest.mark.usefixtures("chunks_of_a_cpu")
@pytest.mark.parametrize("b", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_update_s_peak_is_the_measured_one_within_a_tenth(case, b):
    model, settings = CASES[case]
    seen, said = measured(small(**model), dataclasses.replace(PLAIN, b=b, **settings))
    assert said == pytest.approx(seen, rel=0.1)


@pytest.mark.usefixtures("chunks_of_a_cpu")
@pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="the extra peft is not installed"
)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("b", [4, 2])
def test_lora_s_peak_is_the_measured_one_within_a_tenth(b, checkpointing):
    s = dataclasses.replace(PLAIN, b=b, lora_rank=8, gradient_checkpointing=checkpointing)
    seen, said = measured(small(), s)
    assert said == pytest.approx(seen, rel=0.1)


def test_the_logits_of_many_chunks_are_those_of_one_chunk(monkeypatch):
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(policy_file.CHUNK_LOGITS, device, 2**18)
    seen, said = measured(small(), PLAIN)
    assert said == pytest.approx(seen, rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_weights_and_moments_are_what_the_optimizer_holds(optimizer):
    model = small(intermediate_size=768)
    shape, policy = shape_from(model.config), Policy(model)
    policy(torch.arange(9)[None]).sum().backward()
    made = make_optimizer(policy, optimizer, 1e-3)
    made.step()
    held = sum(
        v.nbytes
        for state in made.state.values()
        for v in state.values()
        if torch.is_tensor(v) and v.numel() > 256
    )
    parts = standing(shape, dataclasses.replace(PLAIN, optimizer=optimizer))
    assert parts["weights"] == sum(p.nbytes for p in policy.parameters())
    assert parts["moments"] == pytest.approx(held, rel=0.02)


def test_an_int8_model_and_its_keys_and_values_are_what_is_loaded(tmp_path):
    model = small(num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    shape = shape_from(model.config)
    eight = AutoModelForCausalLM.from_pretrained(
        tmp_path, **policy_file.frozen_options("cpu", True)
    )
    tensors = [v for k, v in eight.state_dict().items() if "weight_format" not in k]
    assert frozen_bytes(shape, True, b=4) == sum(v.nbytes for v in tensors)
    cache = model(torch.zeros(3, 50, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 3 * 50 * kv_bytes(shape, b=4)


# ------------------------------------------------------------------------------------- what it says


def test_a_shape_is_found_by_size_by_hub_name_and_from_a_directory(tmp_path, monkeypatch):
    assert shape_of("7B") == shape_of("7b") == shape_of("Qwen/Qwen2.5-7B-Instruct") == SEVEN
    assert shape_of("8B") == shape_of("meta-llama/Llama-3-8B") and shape_of("3B").layers == 36
    model = small(LlamaForCausalLM, LlamaConfig, max_position_embeddings=77, head_dim=32)
    model.config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    assert shape.weights == sum(p.numel() for p in model.parameters()) and (
        shape.positions,
        shape.q,
    ) == (77, 128)
    monkeypatch.setattr(AutoConfig, "from_pretrained", offline(AutoConfig.from_pretrained))
    with pytest.raises(
        InputError, match=r"--model owner/nothing: neither .*, Llama-3-8B nor a model on this disk"
    ) as caught:
        shape_of("owner/nothing")
    assert "\n" not in str(caught.value)


def test_a_model_of_another_build_is_one_line(tmp_path):
    GPT2Config(n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="gpt2 is not built as Llama is"):
        shape_of(str(tmp_path))


def offline(load):
    def asked(*arguments, **options):
        assert options["local_files_only"], "a plan downloads nothing"
        return load(*arguments, **options)

    return asked


def test_the_remedies_make_it_fit_and_none_is_to_spare():
    s = setting_of(resolve("ur2", 1, False, {"kl_coef": 0.1}), SEVEN)
    for memory in (40, 74, 150):
        assert not make_plan(SEVEN, s, memory * GIB).fits
        chosen = remedies(SEVEN, s, memory * GIB)
        assert make_plan(SEVEN, changed(s, chosen), memory * GIB).fits
        for number in chosen:
            assert not make_plan(
                SEVEN, changed(s, [n for n in chosen if n != number]), memory * GIB
            ).fits
    assert remedies(SEVEN, s, 2 * GIB) == []


def test_the_rollout_takes_what_is_left_and_no_more_than_there_are_rows():
    s = setting_of(
        resolve("ur2", 1, False, {"optimizer": "adamw8bit", "gradient_checkpointing": True}),
        SHAPES["Qwen2.5-3B"],
    )
    made = make_plan(SHAPES["Qwen2.5-3B"], s, 74 * GIB)
    assert made.fits and 8 < made.slots < s.rows
    always, one_more = (
        sum(made.standing.values()),
        rollout_parts(SHAPES["Qwen2.5-3B"], s, made.slots + 1),
    )
    assert always + sum(one_more.values()) > 74 * GIB >= made.peak
    assert make_plan(SHAPES["Qwen2.5-3B"], s, 10_000 * GIB).slots == s.rows


def test_train_plan_prints_a_table_and_a_verdict_and_reads_nothing(capsys, monkeypatch):
    monkeypatch.setattr(train, "train", lambda recipe: pytest.fail("it trained"))
    train.main(["--plan", "--model", "7B", "--gpus", "1", "--gpu_memory", "80"])
    output = capsys.readouterr().out
    assert "does not fit in 73.6 GiB" in output and "--gradient_checkpointing" in output
    for part in (
        "weights  ",
        "moments",
        "update: gradients",
        "update: activations",
        "rollout: keys and values",
    ):
        assert part in output
    train.main(["--plan", "--model", "7B", "--gpus", "8", "--gradient_checkpointing"])
    output = capsys.readouterr().out
    assert [name in output for name in plan.SHARDINGS] == [
        True
    ] * 3 and "fsdp2: fits in 73.6 GiB" in output
    assert "ddp: does not fit" in output


@pytest.mark.parametrize("flags", [["--gpus", "0"], ["--gpu_memory", "0"], ["--gpu_memory", "nan"]])
def test_no_gpu_is_one_line(flags):
    with pytest.raises(InputError, match="give at least one GPU"):
        plan.main(["--plan", *flags])
