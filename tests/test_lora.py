"""Tests of scale/lora.py: the first step is at π_0, only A and B change, checkpoints are plain
models, and a resumed run equals an uninterrupted one.
"""

import importlib.util

import pytest
import torch
from conftest import model_of, same, small
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from policy import Policy, load_policy, make_optimizer, save_policy
from scale.lora import add_lora, lora_state, merged_weights, without_lora
from settings import Settings

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="the extra peft is not installed"
)
pytestmark = needs_peft
R = 4  # the rank: α / r is 16 / 4 = 4


def make_policy(vocab_size=50, tied=False) -> Policy:
    sizes = {"intermediate_size": 48, "tie_word_embeddings": tied, "vocab_size": vocab_size}
    torch.manual_seed(0)
    return Policy(model_of("qwen2", **small(initializer_range=0.2, **sizes)))


def with_lora(policy: Policy, seed=0) -> Policy:
    add_lora(policy.language_model, R, seed)
    return policy


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(1))  # [B, L]


def learn(policy: Policy, steps=3) -> Policy:
    optimizer = make_optimizer(policy, "adamw", 1e-2)
    for _ in range(steps):
        policy(tokens()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy


def test_a_new_lora_model_equals_the_frozen_model_and_trains_only_a_and_b():
    plain, policy = make_policy()(tokens()), with_lora(make_policy())
    assert torch.equal(policy(tokens()), plain)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    # 2 layers have A and B for each of 7 matrices; the head has none
    assert len(trained) == 2 * 7 * 2 and all(".lora_" in name for name in trained)
    # A has r · in weights and B has out · r. The sums in + out of a layer are: q and o
    # 2 · (32 + 32), k and v 2 · (32 + 16), the feed-forward layer 3 · (32 + 48). 2 · 4 · 464 = 3712
    assert sum(p.numel() for p in trained.values()) == 3712


def test_without_lora_gives_the_frozen_model_and_training_continues_after_it():
    plain, policy = make_policy()(tokens()), learn(with_lora(make_policy()))
    assert (policy(tokens()) - plain).abs().max() > 0.1
    with without_lora(policy):
        assert torch.equal(policy(tokens()), plain)
    before = [p.clone() for p in lora_state(policy).values()]
    after = [*lora_state(learn(policy, 1)).values()]
    assert not any(map(torch.equal, before, after))


def test_the_merged_matrix_by_hand():
    policy = with_lora(make_policy())  # B is set below in one matrix and 0 in all others
    layer = policy.language_model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_A["default"].weight.zero_()[0, 3] = 3.0
        layer.lora_B["default"].weight.zero_()[5, 0] = 0.5
    merged = dict(merged_weights(policy.language_model))
    merged["model.layers.0.self_attn.q_proj.weight"][5, 3] -= 6  # (α / r) · 0.5 · 3 = 4 · 1.5
    plain = make_policy().language_model.state_dict()
    torch.testing.assert_close(merged, dict(plain))


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_is_a_plain_model_with_the_same_logprobs(tied, tmp_path, bpe):
    policy = make_policy(tied=tied)
    save_policy(policy, bpe, tmp_path / "plain")
    save_policy(learn(with_lora(policy)), bpe, tmp_path / "merged")
    plain, merged = (load_file(tmp_path / n / "model.safetensors") for n in ("plain", "merged"))
    assert plain.keys() == merged.keys()
    again = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(again(tokens()), policy(tokens()), rtol=0, atol=1e-4)


# --------------------------------------------------- training from a checkpoint, and from a resume


def test_a_and_b_are_fp32_even_if_the_frozen_weights_are_bf16():
    policy = with_lora(Policy(make_policy().language_model.bfloat16()))
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    layer = policy.language_model.model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.dtype == torch.bfloat16 and not layer.weight.requires_grad


def test_lora_learns_with_frozen_int8_weights_and_saves_an_fp32_checkpoint(bpe, tmp_path):
    saved = str(tmp_path / "saved")
    save_policy(make_policy(vocab_size=len(bpe) + 8), bpe, saved)
    policy, _ = load_policy(saved, settings=Settings(lora_rank=R), in_8bit=True)
    assert policy.language_model.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.int8
    save_policy(learn(policy), bpe, tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert again.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert not hasattr(again.config, "quantization_config")
    untrained = load_policy(saved)[0](tokens())
    int8, fp32 = policy(tokens()), Policy(again)(tokens())
    # int8 products also round their inputs, to 1/127 of the largest in a row, so they differ from
    # fp32 products by some percent
    assert (int8 - fp32).abs().max() < 0.1 * (int8 - untrained).abs().max()


def test_the_seed_determines_a_and_the_global_random_state_is_kept():
    torch.manual_seed(5)
    expected, states = torch.rand(1), []
    for seed in (1, 1, 2):
        policy = make_policy()
        torch.manual_seed(5)
        states.append(list(lora_state(with_lora(policy, seed)).values()))
        assert torch.rand(1) == expected
    assert same(states[0], states[1]) and not same(states[0], states[2])
