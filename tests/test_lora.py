"""lora.py: the first step is at π_0, only A and B move, checkpoints are plain models, and a resumed
run is the unbroken one.
"""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file
from test_shards import in_two, take_step
from test_train import model, recipe_for, rows_of, same, unequal_batch  # noqa: F401
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import train
from errors import InputError
from policy import Policy, frozen_options, load_policy, make_optimizer, save_policy
from recipes import checkpoints
from scale import lora
from scale.lora import add_lora, has_lora, load_lora, lora_state, merged_state, without_lora
from train import Trainer

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="the extra peft is not installed"
)
H, KV, FF, R = (
    32,
    16,
    48,
    4,
)  # hidden size, width of keys and values, of the feed-forward layer; rank


def make_policy(seed=0, **changes) -> Policy:
    torch.manual_seed(seed)
    return Policy(
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=50,
                hidden_size=H,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=FF,
                max_position_embeddings=64,
                initializer_range=0.2,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
                **changes,
            )
        )
    )


def with_lora(policy: Policy, **settings) -> Policy:
    add_lora(policy.language_model, R, 8.0, **settings)
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


@needs_peft
def test_the_first_step_is_at_the_frozen_model_and_only_a_and_b_are_trained():
    plain = make_policy()(tokens())
    policy = with_lora(make_policy())
    assert torch.equal(policy(tokens()), plain)
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 7 * 2 and all(
        ".lora_" in name for name in names
    )  # A and B of 7 matrices in 2 layers, no head
    # A has r · in, B has out · r: q and o 2 · (32 + 32), k and v 2 · (32 + 16), the three of the
    # feed-forward 3 · (32 + 48)
    expected = 2 * R * (2 * (H + H) + 2 * (H + KV) + 3 * (H + FF))
    assert sum(p.numel() for p in policy.parameters() if p.requires_grad) == expected == 3712


@needs_peft
def test_the_gradient_of_b_is_that_of_the_whole_matrix_seen_through_a():
    # h = W x + s B A x, so dL/dB = s (dL/dW) Aᵀ; B = 0 at the start, so dL/dA = 0. s = α / r = 2.
    whole, policy = make_policy(), with_lora(make_policy())
    for one in (whole, policy):
        one(tokens()).sum().backward()
    dense = whole.language_model.model.layers[0].mlp.up_proj.weight.grad  # [out, in]
    layer = policy.language_model.model.layers[0].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(b.grad, 2 * dense @ a.T, rtol=1e-4, atol=1e-4)
    assert a.grad.abs().max() == 0 and layer.base_layer.weight.grad is None


@needs_peft
def test_without_lora_is_the_frozen_model_whatever_was_learned_and_training_goes_on_behind_it():
    plain, policy = make_policy()(tokens()), learn(with_lora(make_policy()))
    assert (policy(tokens()) - plain).abs().max() > 0.1
    with without_lora(policy):
        assert torch.equal(policy(tokens()), plain)
    before = [p.clone() for p in lora_state(policy).values()]
    learn(policy, 1)
    assert not any(
        torch.equal(a, b) for a, b in zip(before, lora_state(policy).values(), strict=True)
    )


@needs_peft
def test_the_merged_matrix_by_hand():
    policy = with_lora(make_policy(), targets="q_proj")
    layer = policy.language_model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_A["default"].weight.zero_()[0, 3] = 3.0
        layer.lora_B["default"].weight.zero_()[5, 0] = 0.5
    merged, plain = merged_state(policy.language_model), make_policy().language_model.state_dict()
    moved = {name: merged[name] - w for name, w in plain.items()}
    assert merged.keys() == plain.keys()
    change = moved.pop("model.layers.0.self_attn.q_proj.weight")
    assert change[5, 3].item() == pytest.approx(3.0, abs=1e-5)  # (α / r) · 0.5 · 3 = 2 · 1.5
    assert change.count_nonzero() == 1 and all(m.eq(0).all() for m in moved.values())


@needs_peft
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_is_a_plain_model_with_the_same_logprobs(tied, tmp_path, bpe):
    policy = make_policy(tie_word_embeddings=tied)
    save_policy(policy, bpe, tmp_path / "plain")
    learn(with_lora(policy))
    save_policy(policy, bpe, tmp_path / "merged")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("plain", "merged")]
    assert files[0].keys() == files[1].keys()
    again = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert not has_lora(again)
    torch.testing.assert_close(again(tokens()), policy(tokens()), rtol=0, atol=1e-4)


@needs_peft
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int8])
def test_a_and_b_are_fp32_beside_frozen_weights_of_any_kind(kind, tmp_path, bpe):
    save_policy(make_policy(), bpe, tmp_path / "plain")
    policy = (
        in_8bit(tmp_path / "plain")
        if kind == torch.int8
        else Policy(make_policy().language_model.to(kind))
    )
    with_lora(policy)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert policy.language_model.model.layers[0].mlp.up_proj.base_layer.weight.dtype == kind


def in_8bit(path) -> Policy:
    return Policy(AutoModelForCausalLM.from_pretrained(path, **frozen_options("cpu", True)))


@needs_peft
def test_over_int8_weights_lora_learns_and_its_checkpoint_is_fp32(tmp_path, bpe):
    save_policy(make_policy(), bpe, tmp_path / "plain")
    policy = learn(with_lora(in_8bit(tmp_path / "plain")))
    save_policy(policy, bpe, tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert again.model.layers[0].mlp.up_proj.weight.dtype == torch.float32 and not hasattr(
        again.config, "quantization_config"
    )
    ours, theirs, untrained = policy(tokens()), Policy(again)(tokens()), make_policy()(tokens())
    # int8 products round their inputs to 1/127 of a row's largest too: they differ by per cents
    # from fp32 ones
    assert (ours - theirs).abs().max() < 0.1 * (ours - untrained).abs().max()


@needs_peft
def test_a_resumed_lora_run_is_the_unbroken_run_and_loads_one_model(model, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        train, "load_model", lambda *a, plain=train.load_model: loaded.append(a[1]) or plain(*a)
    )
    more = ("--algorithm", "grpo", "--kl_coef", "0.05", "--lora_rank", "4", "--lr", "1e-2")
    straight = train.train(recipe_for(model, tmp_path / "a", "--steps", "4", *more))
    assert loaded == [model]  # the reference is the same model without what was learned
    train.train(recipe_for(model, tmp_path / "b", "--steps", "2", *more))
    resumed = train.train(recipe_for(model, tmp_path / "b", "--steps", "4", "--resume", *more))
    assert rows_of(resumed) == rows_of(straight) and len(rows_of(straight)) == 4
    assert rows_of(straight)[0]["k2"] == 0 and rows_of(straight)[3]["k2"] > 0
    ends = [
        load_file(checkpoints(folder)[-1] / "model.safetensors") for folder in (straight, resumed)
    ]
    assert same(ends[0].values(), ends[1].values())
    states = [
        torch.load(checkpoints(folder)[-1] / "trainer.pt")["lora"] for folder in (straight, resumed)
    ]
    assert same(states[0].values(), states[1].values()) and all(
        ".lora_" in name for name in states[0]
    )


@needs_peft
def test_stage_two_starts_from_stage_ones_merged_weights_with_new_matrices(model, tmp_path):
    before = train.train(
        recipe_for(model, tmp_path, "--steps", "2", "--lora_rank", "4", "--lr", "1e-2")
    )
    trainer = Trainer(recipe_for(model, tmp_path, "--stage", "2", "--lora_rank", "4"))
    whole, _ = load_policy(str(checkpoints(before)[-1]))
    batch = torch.arange(2, 20)[None]
    assert torch.equal(trainer.policy(batch), whole(batch))
    assert not torch.allclose(whole(batch), load_policy(model)[0](batch), atol=1e-3)


@needs_peft
def test_ppo_s_critic_has_matrices_of_its_own(model, tmp_path):
    trainer = Trainer(
        recipe_for(model, tmp_path, "--algorithm", "ppo", "--lora_rank", "4", "--critic_lr", "1e-2")
    )
    trained = {name for name, p in trainer.critic.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {
        "head.weight",
        "head.bias",
    } and len(trained) > 2
    trainer.step(0)
    assert trainer.critic.head.weight.abs().max() > 0


@needs_peft
def test_a_resume_with_another_rank_or_without_lora_is_one_line(model, tmp_path):
    train.train(recipe_for(model, tmp_path, "--steps", "1", "--lora_rank", "4"))
    with pytest.raises(InputError, match="of another rank"):
        train.train(recipe_for(model, tmp_path, "--steps", "2", "--resume", "--lora_rank", "2"))
    with pytest.raises(InputError, match="was made with --lora_rank"):
        train.train(recipe_for(model, tmp_path, "--steps", "2", "--resume"))
    with pytest.raises(InputError, match="rank"):
        load_lora(with_lora(make_policy()), {})


@needs_peft
def test_unknown_targets_are_one_line_that_names_the_known_ones():
    with pytest.raises(
        InputError, match=r"--lora_targets query: no such modules; .*q_proj"
    ) as caught:
        add_lora(make_policy().language_model, R, targets="query")
    assert "\n" not in str(caught.value)


@needs_peft
def test_a_is_drawn_from_the_seed_and_the_global_random_state_stays():
    torch.manual_seed(5)
    expected, states = torch.rand(1), []
    for seed in (1, 1, 2):
        policy = make_policy()
        torch.manual_seed(5)
        states.append(list(lora_state(with_lora(policy, seed=seed)).values()))
        assert torch.rand(1) == expected
    assert same(states[0], states[1]) and not same(states[0], states[2])


def test_without_peft_it_is_one_line_that_names_the_extra_before_anything_is_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lora.importlib.util, "find_spec", lambda name: None)
    recipe = recipe_for("owner/model", tmp_path, "--lora_rank", "8")
    monkeypatch.setattr(
        train, "training_questions", lambda recipe: pytest.fail("the questions were read")
    )
    with pytest.raises(InputError, match="--lora_rank 8 needs peft: pip install peft"):
        Trainer(recipe)


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--base_in_8bit",), "int8 weights cannot be trained"),
        (("--reference_in_8bit",), "no reference is loaded"),
        (
            ("--reference_in_8bit", "--kl_coef", "0.1", "--lora_rank", "4"),
            "the reference is the frozen base itself",
        ),
    ],
)
def test_eight_bits_where_they_mean_nothing_are_refused(flags, said, tmp_path):
    with pytest.raises(InputError, match=said):
        recipe_for("owner/model", tmp_path, *flags)


def test_an_eight_bit_reference_scores_as_the_model_does_to_a_few_percent(model, tmp_path):
    more = ("--algorithm", "grpo", "--kl_coef", "0.05")
    plain, eight = (
        Trainer(recipe_for(model, tmp_path, *more, *flag)).reference
        for flag in ((), ("--reference_in_8bit",))
    )
    assert eight.language_model.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        difference = (plain(ids) - eight(ids)).abs().mean() / plain(ids).abs().mean()
    assert 0 < difference < 0.05
    assert not any(p.requires_grad for p in eight.parameters())


def test_the_file_shows_that_merged_weights_give_the_same(capsys):
    lora.main()
    # W x = (3, 4); A x = 11; 2 · B A x = (11, 0): h = (14, 4)
    assert capsys.readouterr().out.count("[14.0, 4.0]") == 2


@needs_peft
def test_two_processes_take_lora_s_step_of_one(model, tmp_path):
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
        "--lora_rank",
        "4",
        "--max_grad_norm",
        "1e9",
    )
    batch = unequal_batch(recipe)
    take_step(recipe, batch, tmp_path / "one.pt")
    in_two("ddp", take_step, recipe, batch, tmp_path / "two.pt")
    one, two = (torch.load(tmp_path / name)[0] for name in ("one.pt", "two.pt"))
    assert max(m.abs().max() for m in one) > 1e-3
    assert max((a - b).abs().max() for a, b in zip(one, two, strict=True)) < 1e-6
