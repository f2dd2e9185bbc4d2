"""The copy to sample with: the policy's weights, rounded, and nothing else of it changed."""

import gc
import weakref

import pytest
import torch
from test_lora import needs_peft
from test_train import (
    model,
    recipe_for,
    rows_of,
)
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import train
from errors import InputError
from policy import Policy
from scale.lora import add_lora, merged_state
from scale.sampling import copy_of, sampling_copy
from tests.conftest import small
from train import Trainer


def make_policy(tied=False) -> Policy:
    torch.manual_seed(0)
    kind = (Qwen2Config, Qwen2ForCausalLM) if tied else (LlamaConfig, LlamaForCausalLM)
    return Policy(kind[1](kind[0](vocab_size=60, **small(tie_word_embeddings=tied))))


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_has_the_rounded_weights_and_its_own_memory(tied):
    policy = make_policy(tied)
    with sampling_copy(policy) as copy:
        theirs = dict(copy.named_parameters())
        assert theirs.keys() == dict(policy.named_parameters()).keys()
        for name, weight in policy.named_parameters():
            assert theirs[name].dtype == torch.bfloat16 and not theirs[name].requires_grad
            assert (
                torch.equal(theirs[name], weight.bfloat16())
                and theirs[name].data_ptr() != weight.data_ptr()
            )
        ends = (
            copy.language_model.get_input_embeddings().weight,
            copy.language_model.get_output_embeddings().weight,
        )
        assert (ends[0] is ends[1]) == tied


@pytest.mark.parametrize("tied", [False, True])
def test_in_fp32_the_copy_is_the_policy_to_the_bit(tied):
    # Also what is no weight: rotary frequencies, which are made anew, and in bf16 would move every
    # position.
    policy, tokens = make_policy(tied).eval(), torch.randint(0, 60, (2, 30))
    with torch.no_grad(), sampling_copy(policy, torch.float32) as copy:
        assert torch.equal(copy(tokens), policy(tokens))
    with torch.no_grad(), sampling_copy(policy) as copy:
        buffers = [
            name
            for name, b in copy.named_buffers()
            if b.is_floating_point() and b.dtype != torch.float32
        ]
        gap = (copy(tokens) - policy(tokens)).abs()
    assert not buffers and 0 < gap.mean() < 0.3  # large random weights: logits of 10 and more


def test_the_copy_s_memory_is_free_behind_the_block():
    with sampling_copy(make_policy()) as copy:
        held = weakref.ref(copy)
    del copy
    gc.collect()
    assert held() is None


@needs_peft
def test_under_lora_the_copy_is_merged():
    policy = make_policy()
    add_lora(policy.language_model, 4)
    for name, parameter in policy.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    merged = merged_state(policy.language_model)
    own = copy_of(policy.language_model, torch.float32).state_dict()
    assert own.keys() == merged.keys() and all(
        torch.allclose(own[name], merged[name], atol=1e-6) for name in own
    )
    tokens = torch.randint(0, 60, (2, 12))
    with torch.no_grad(), sampling_copy(policy, torch.float32) as copy:
        torch.testing.assert_close(copy(tokens), policy(tokens), atol=1e-5, rtol=1e-5)


def test_a_run_that_samples_from_the_copy_scores_again_and_reports_the_gap(model, tmp_path):
    more = ("--steps", "2", "--trajectories_per_update", "2")
    plain = rows_of(train.train(recipe_for(model, tmp_path / "a", *more)))
    copied = rows_of(
        train.train(recipe_for(model, tmp_path / "b", *more, "--sampling_copy", "bf16"))
    )
    for row in plain:
        assert row["logprob_gap"] <= row["logprob_gap_max"] < 1e-4
    for row in copied:
        assert 1e-4 < row["logprob_gap"] <= row["logprob_gap_max"] < 0.2


def test_the_gap_is_the_mean_over_the_first_update_s_tokens(model, tmp_path, monkeypatch):
    # Sampling is told to be wrong by 0.5 at every token: the rollout's log-probs are not what the
    # policy says.
    trainer = Trainer(
        recipe_for(model, tmp_path, "--trajectories_per_update", "2", "--sampling_copy", "none")
    )
    roll_out = trainer.roll_out

    def wrong(step, draw=0):
        rows = roll_out(step, draw)
        for t in rows:
            t.logprobs = [p - 0.5 * m for p, m in zip(t.logprobs, t.response_mask, strict=True)]
        return rows

    trainer.roll_out = wrong
    record = trainer.step(0)[0]
    assert record["logprob_gap"] == pytest.approx(0.5, abs=1e-4) and record[
        "logprob_gap_max"
    ] == pytest.approx(0.5, abs=1e-3)


def test_where_documents_are_trained_on_there_is_no_gap_to_report(model, tmp_path):
    record = Trainer(recipe_for(model, tmp_path, "--mask_documents", "false")).step(0)[0]
    assert "logprob_gap" not in record


def test_a_copy_of_int8_weights_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(InputError, match="the copy would take the memory that 8 bits saved"):
        recipe_for(
            "nowhere", tmp_path, "--lora_rank", "4", "--base_in_8bit", "--sampling_copy", "bf16"
        )


def test_recorded_steps_of_plain_generate_are_refused(tmp_path):
    with pytest.raises(InputError, match="use --engine slots"):
        recipe_for("nowhere", tmp_path, "--engine", "hf", "--cuda_graphs")
