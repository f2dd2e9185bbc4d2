"""Packed is padded: the same hidden states and gradients, of every family, and nothing computed for
the padding.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from policy import Policy, checkpoint_activations
from scale import packing
from scale.packing import hidden_states, lengths_of, pack
from tests.conftest import model_of, small

SHAPE = small(vocab_size=50, initializer_range=0.3)
# What is asked for of each row; with slack 4 the groups are (14), (9, 8), (3, 3, 1).
LENGTHS = [14, 3, 9, 3, 8, 1]
PACKED = 14 + 2 * 9 + 3 * 3


def make(family="qwen2") -> Policy:
    torch.manual_seed(0)
    return Policy(model_of(family, **SHAPE))


def batch():
    """tokens [6, 15] and a mask [6, 14] with holes, whose last 1 is in column LENGTHS[b] − 1."""
    draw = torch.Generator().manual_seed(1)
    tokens, mask = torch.randint(0, 50, (6, 15), generator=draw), torch.zeros(6, 14)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = (torch.rand(length, generator=draw) < 0.6).float()
        mask[row, length - 1] = 1
    return tokens, mask


def with_gradients(policy, tokens, mask, weights):
    policy.zero_grad()
    logprobs = policy(tokens, mask=mask)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), [p.grad.clone() for p in policy.parameters()]


@pytest.mark.parametrize("slack", [0, 1, 4, 100])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_packed_log_probs_and_gradients_are_the_padded_ones(family, slack, monkeypatch):
    monkeypatch.setattr(packing.pack, "__defaults__", (slack,))
    (tokens, mask), policy = batch(), make(family)
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
    assert policy.config._attn_implementation == "packed"
    packed, gradients = with_gradients(policy, tokens, mask, weights)
    policy.config._attn_implementation = "sdpa"
    padded, expected = with_gradients(policy, tokens, mask, weights)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, expected, atol=1e-4, rtol=1e-4)


def test_recomputed_layers_still_know_the_groups():
    # The backward pass of gradient checkpointing calls attention again, behind the forward pass and
    # out of its context.
    (tokens, mask), plain, again = batch(), make(), make()
    checkpoint_activations(again.language_model)
    found = [with_gradients(policy, tokens, mask, mask)[1] for policy in (plain, again)]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_rows_are_grouped_by_length_and_read_up_to_the_last_place_that_is_asked_for():
    tokens = torch.arange(90).view(6, 15)
    none = [()] * 6
    found = [[group[:2] for group in pack(tokens, LENGTHS, none, slack)[2]] for slack in (4, 0)]
    assert found == [[(1, 14), (2, 9), (3, 3)], [(1, 14), (1, 9), (1, 8), (2, 3), (1, 1)]]
    wanted = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert lengths_of(wanted) == [4, 1, 1]
    ids, positions, groups, starts = pack(torch.arange(15).view(3, 5), [4, 1, 1], none, 0)
    assert ids.tolist() == [[0, 1, 2, 3, 5, 10]] and positions.tolist() == [[0, 1, 2, 3, 0, 0]]
    assert groups == [(1, 4, None), (2, 1, None)] and starts.tolist() == [0, 4, 5]


def test_nothing_of_one_text_reaches_another():
    (tokens, mask), policy = batch(), make()
    changed = tokens.clone()
    changed[1] = (changed[1] + 7) % 50  # stands between two others of its group
    with torch.no_grad():
        same = (policy(tokens, mask=mask) == policy(changed, mask=mask)).all(1)
    assert same.tolist() == [True, False, True, True, True, True]


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    "family, more",
    [
        ("gpt2", {}),  # no known family
        ("mistral", {"sliding_window": 4}),
        ("qwen2", WINDOW),  # in some layers
        ("qwen2", {"attn_implementation": "eager"}),
    ],
)
def test_what_cannot_be_packed_goes_through_padded(family, more):
    torch.manual_seed(0)
    model, (tokens, mask) = model_of(family, **SHAPE, **more).eval(), batch()
    with torch.no_grad():
        logprobs = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        expected = logprobs.gather(2, tokens[:, 1:, None])[..., 0] * mask
        policy = Policy(model).eval()  # GPT-2 has dropout
        assert policy.config._attn_implementation != "packed"
        torch.testing.assert_close(policy(tokens, mask=mask), expected, atol=1e-5, rtol=1e-5)


def test_generate_and_a_saved_checkpoint_know_nothing_of_it(tmp_path):
    policy, tokens = make().eval(), torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    attention = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    how = {"attention_mask": attention, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ours = policy.language_model.generate(input_ids=tokens, **how)
    policy.language_model.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa"
    assert ours.tolist() == loaded.generate(input_ids=tokens, **how).tolist()


def test_what_is_computed_is_what_is_asked_for_and_the_model_is_itself_again_afterwards(
    monkeypatch,
):
    (tokens, mask), policy, seen = batch(), make(), []
    layers = policy.language_model.model.layers
    for layer in layers:
        layer.mlp.up_proj.register_forward_hook(
            lambda module, inputs, output: seen.append(output.shape[1])
        )
    policy(tokens, mask=mask)  # padded, it would be 6 * 15 = 90
    assert seen == [PACKED, mask.sum()]  # of the last layer only the wanted places
    assert all("forward" not in vars(layer.mlp) for layer in layers)
    policy.language_model(input_ids=tokens)
    assert seen[2:] == [15, 15]  # whoever calls the model itself gets all of it
    monkeypatch.setattr(packing.pack, "__defaults__", (0,))
    policy(tokens, mask=mask)
    assert seen[4:] == [sum(LENGTHS), mask.sum()]


def test_places_that_nobody_asks_for_cost_nothing_and_break_nothing():
    policy, tokens = make(), torch.randint(0, 50, (2, 6))
    none = torch.zeros(2, 5, dtype=torch.bool)
    assert hidden_states(policy.language_model.base_model, tokens, none).shape == (0, 32)
