"""Tests of engines/sampling.py: the sampling copy has rounded weights and is otherwise equal."""

import gc
import weakref

import pytest
import torch
from conftest import model_of, same, small
from test_lora import needs_peft

from engines.sampling import copy_of, to_sample_with, wants_copy
from policy import Policy
from scale.lora import add_lora


def make_policy(tied=False) -> Policy:
    torch.manual_seed(0)
    sizes = small(vocab_size=60, tie_word_embeddings=tied)
    return Policy(model_of("qwen2" if tied else "llama", **sizes))


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_has_the_rounded_weights(tied):
    policy = make_policy(tied)
    with to_sample_with(policy, False) as sampler:
        assert sampler is policy
    with to_sample_with(policy, True) as copy:
        copied = dict(copy.named_parameters())
        for name, weight in policy.named_parameters():
            assert copied[name].dtype == torch.bfloat16 and not copied[name].requires_grad
            assert torch.equal(copied[name], weight.bfloat16())
        # Rotary frequencies stay fp32: rounded to bf16 they would change every position.
        assert same(copy.buffers(), policy.buffers())
        model = copy.language_model
        begin, end = model.get_input_embeddings(), model.get_output_embeddings()
        assert (begin.weight is end.weight) == tied


def test_the_copy_is_freed_after_the_block():
    with to_sample_with(make_policy(), True) as copy:
        reference = weakref.ref(copy)
    del copy
    gc.collect()
    assert reference() is None


@needs_peft
def test_the_copy_of_a_lora_policy_is_merged():
    policy = make_policy()
    add_lora(policy.language_model, 4)
    for name, parameter in policy.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    copy = Policy(copy_of(policy.language_model, torch.float32))
    tokens = torch.randint(0, 60, (2, 12))
    torch.testing.assert_close(copy(tokens), policy(tokens), atol=1e-5, rtol=1e-5)


def test_a_gpu_samples_with_a_copy_but_not_of_int8_weights():
    assert wants_copy(torch.device("cuda"), False) and not wants_copy(torch.device("cuda"), True)
    assert not wants_copy(torch.device("cpu"), False)
