"""Tests of scale/packing.py: packed and padded rows have equal log-probs and gradients in every
model family; padding is not computed, and what rows begin with is computed once.
"""

import pytest
import torch
from conftest import model_of, small
from transformers import AutoModelForCausalLM

from policy import Policy, checkpoint_activations
from ppo import Critic
from scale import packing
from scale.packing import micro_batches

SHAPE = small(vocab_size=50, initializer_range=0.3, sliding_window=None)
FAMILIES = pytest.mark.parametrize("family", packing.FAMILIES)


# The prompt of each row. D is C without the last token; F begins with E.
GROUPS = "A B A C A B D E F A G G".split()
PROMPTS = {"A": 70, "B": 64, "C": 90, "D": 89, "E": 63, "F": 80, "G": 70}  # tokens
RESPONSES = [9, 4, 10, 6, 1, 15, 5, 7, 3, 20, 9, 10]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def prompted(groups=GROUPS, responses=RESPONSES):
    """Returns tokens [B, 150] and mask [B, 149]: each response has a document in the middle."""
    texts = {name: draw(ord(name), n) for name, n in PROMPTS.items()}
    texts["D"] = texts["C"][:-1]
    texts["F"][: PROMPTS["E"]] = texts["E"]
    tokens = draw(0, len(groups), 150)
    mask = torch.zeros(len(groups), 149)
    for row, (name, length) in enumerate(zip(groups, responses, strict=False)):
        begin = PROMPTS[name]
        tokens[row, :begin] = texts[name]
        mask[row, begin - 1 : begin - 1 + length] = 1
        mask[row, begin + 2 : begin + length - 2] = 0
    for row, copy, end in ((0, 2, 77), (10, 11, 75)):  # two rows also begin their responses alike
        if len(groups) > copy and groups[row] == groups[copy]:
            tokens[copy, :end] = tokens[row, :end]
    return tokens, mask


def make(family="qwen2") -> Policy:
    torch.manual_seed(0)
    return Policy(model_of(family, **SHAPE))


def with_gradients(policy, tokens, mask, weights):
    policy.zero_grad()
    logprobs = policy(tokens, mask=mask)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), [p.grad.clone() for p in policy.parameters() if p.requires_grad]


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    "family, changes",
    [
        ("gpt2", {}),  # this family is not supported
        ("mistral", {"sliding_window": 4}),
        ("qwen2", WINDOW),
    ],
)
def test_a_model_that_cannot_be_packed_gets_padded_rows(family, changes):
    torch.manual_seed(0)
    model, (tokens, mask) = model_of(family, **SHAPE | changes).eval(), prompted()
    with torch.no_grad():
        logprobs = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        expected = logprobs.gather(2, tokens[:, 1:, None])[..., 0] * mask
        policy = Policy(model).eval()  # GPT-2 has dropout
        assert policy.config._attn_implementation != "packed"
        torch.testing.assert_close(policy(tokens, mask=mask), expected, atol=1e-5, rtol=1e-5)


def test_packing_changes_neither_generate_nor_a_saved_checkpoint(tmp_path):
    policy = make().eval()
    tokens = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    attention = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    args = {"attention_mask": attention, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = policy.language_model.generate(input_ids=tokens, **args)
    policy.language_model.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa"
    assert expected.tolist() == loaded.generate(input_ids=tokens, **args).tolist()


def check_against_padded_rows(module, config) -> None:
    """Asserts that packing rows and sharing what they begin with changes outputs by at most 1e-5,
    and gradients by at most 1e-5 of the largest.
    """
    tokens, mask = prompted()
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
    assert config._attn_implementation == "packed"
    packed, actual = with_gradients(module, tokens, mask, weights)
    config._attn_implementation = "sdpa"
    padded, expected = with_gradients(module, tokens, mask, weights)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    largest = max(gradient.abs().max().item() for gradient in expected)
    torch.testing.assert_close(actual, expected, atol=1e-5 * largest, rtol=0)


@pytest.mark.parametrize("slack", [0, 4, 100])
@pytest.mark.parametrize("least", [3, 64, 10**6])
@FAMILIES
def test_packed_rows_with_shared_beginnings_equal_padded_rows(family, slack, least, monkeypatch):
    monkeypatch.setattr(packing, "SLACK", slack)
    monkeypatch.setattr(packing, "LEAST", least)
    policy = make(family)
    check_against_padded_rows(policy, policy.config)


def test_gradient_checkpointing_and_a_critic_change_nothing_in_packed_rows():
    policy = make()
    checkpoint_activations(policy.language_model)
    check_against_padded_rows(policy, policy.config)
    critic = Critic(make().language_model.base_model)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    check_against_padded_rows(critic, critic.backbone.config)


# With LEAST 3, the 7 tokens after A that two rows share, and E before F, are computed once too.
@pytest.mark.parametrize("least, more", [(64, 0), (3, 7 + 63)])
def test_padding_is_not_computed_and_a_shared_beginning_once(least, more, monkeypatch):
    monkeypatch.setattr(packing, "SLACK", 0)
    monkeypatch.setattr(packing, "LEAST", least)
    policy, seen = make(), []
    layer = policy.language_model.model.layers[0]
    layer.mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    tokens, mask = prompted()
    policy(tokens, mask=mask)
    # Nothing after the last wanted token is computed either. A has four rows; B and G have two. C
    # and D share 89 tokens. Of the rest of a response, equal tokens are computed twice.
    whole = [PROMPTS[n] + k - 1 for n, k in zip(GROUPS, RESPONSES, strict=True)]
    assert seen == [sum(whole) - 3 * 70 - 64 - 75 - 89 - more]


def test_equal_rows_get_the_same_gradients_in_every_run():
    tokens, mask = prompted("A" * 40, [60] * 40)
    tokens[:] = tokens[0]  # each hidden state is wanted by 40 rows
    mask[:, 69:129] = 1
    policy = Policy(model_of("qwen2", **SHAPE | {"hidden_size": 128}))
    weights = torch.randn(mask.shape)
    torch.set_num_threads(2)  # with one thread the order is fixed in any case
    first, *others = (with_gradients(policy, tokens, mask, weights)[1] for _ in range(4))
    assert all(torch.equal(*pair) for again in others for pair in zip(first, again, strict=True))


def test_micro_batches_put_rows_of_one_prompt_together_within_the_budget():
    tokens, mask = prompted("AGAGAG", [10] * 6)
    # Each row counts all of its 79 tokens, although the three rows of a prompt share 69.
    for budget, size in ((3 * 79, 3), (2 * 79, 2)):
        cuts = [rows.tolist() for rows in micro_batches(tokens, mask, budget)]
        assert sorted(row for rows in cuts for row in rows) == [*range(6)]
        assert max(map(len, cuts)) == size
        assert size < 3 or sorted(map(sorted, cuts)) == [[0, 2, 4], [1, 3, 5]]
