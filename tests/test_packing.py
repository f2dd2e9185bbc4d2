"""Packed is padded: the same hidden states and gradients, of every family, nothing computed for the
padding, and a prompt of several rows once.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from policy import Policy, checkpoint_activations
from ppo import Critic
from scale import packing
from scale.lora import add_lora
from scale.packing import hidden_states, lengths_of, micro_batches, pack, prompts_of
from tests.conftest import model_of, small
from tests.test_lora import needs_peft

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
    return logprobs.detach(), [p.grad.clone() for p in policy.parameters() if p.requires_grad]


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


# ------------------------------------------------------------------------- a prompt of several rows

# Ten rows by their prompt; D is C without its last token, F is E but for its last.
GROUPS = "A B A C A B D E F A".split()
PROMPTS = {"A": 70, "B": 64, "C": 90, "D": 89, "E": 63, "F": 80}  # tokens
RESPONSES = [9, 4, 10, 6, 1, 15, 5, 7, 3, 20]
SHARED = {"A": 69, "B": 63}  # all but the last, of several rows with 64 at least


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def prompted(groups=GROUPS, prompts=PROMPTS, responses=RESPONSES, seed=0):
    """tokens [B, L] and mask [B, T]: responses with a document in their middle."""
    texts = {name: draw(ord(name) + seed, n) for name, n in prompts.items()}
    if "D" in texts:
        texts["D"] = texts["C"][:-1]
        texts["F"][: PROMPTS["E"]] = texts["E"]
    longest = max(prompts[name] + n for name, n in zip(groups, responses, strict=True))
    tokens, mask = draw(seed, len(groups), longest), torch.zeros(len(groups), longest - 1)
    for row, (name, length) in enumerate(zip(groups, responses, strict=True)):
        begin = prompts[name]
        tokens[row, :begin] = texts[name]
        mask[row, begin - 1 : begin - 1 + length] = 1
        mask[row, begin + 2 : begin + length - 2] = 0
    return tokens, mask


def both_ways(policy, tokens, mask, monkeypatch):
    """(log-probs, gradients) with shared prompts and with whole rows."""
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
    shared = with_gradients(policy, tokens, mask, weights)
    monkeypatch.setattr(packing, "LEAST", math.inf)
    return shared, with_gradients(policy, tokens, mask, weights)


def agree(shared, whole) -> None:
    """To 1e-5; gradients of the largest, whose own is 1 to 30 here."""
    torch.testing.assert_close(shared[0], whole[0], atol=1e-5, rtol=1e-5)
    largest = max(gradient.abs().max().item() for gradient in whole[1])
    torch.testing.assert_close(shared[1], whole[1], atol=1e-5 * largest, rtol=0)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_rows_with_a_shared_prompt_are_the_whole_rows(family, checkpointed, monkeypatch):
    policy, (tokens, mask) = make(family), prompted()
    if checkpointed:
        checkpoint_activations(policy.language_model)
    agree(*both_ways(policy, tokens, mask, monkeypatch))
    padded = model_of(family, **SHAPE).eval()
    padded.load_state_dict(policy.language_model.state_dict())
    expected = padded(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    expected = expected.gather(2, tokens[:, 1:, None])[..., 0] * mask
    monkeypatch.undo()
    torch.testing.assert_close(policy(tokens, mask=mask), expected, atol=1e-5, rtol=1e-5)


@needs_peft
def test_lora_s_gradients_are_those_of_whole_rows(monkeypatch):
    policy = make().requires_grad_(False)
    add_lora(policy.language_model, 2, seed=0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:  # 0 at first, and A's gradient with it
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(1))
    shared, whole = both_ways(policy, *prompted(), monkeypatch)
    assert len(whole[1]) == 2 * 7 * 2
    agree(shared, whole)


def test_the_critic_s_values_and_gradients_are_those_of_whole_rows(monkeypatch):
    critic = Critic(make().language_model.base_model)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    agree(*both_ways(critic, *prompted(), monkeypatch))


@pytest.mark.parametrize("seed", range(11))
def test_groups_drawn_at_random_are_the_whole_rows(seed, monkeypatch):
    monkeypatch.setattr(packing, "LEAST", 4)
    sizes = draw(seed, 20).tolist()
    prompts = {name: 1 + n % 9 for name, n in zip("ABCG", sizes, strict=False)}
    groups = ["ABCG"[n % 4] for n in sizes[4:12]]
    responses = [1 + n % 7 for n in sizes[12:]]
    agree(*both_ways(make(), *prompted(groups, prompts, responses, seed), monkeypatch))


def test_a_prompt_is_shared_by_its_ids_and_not_by_a_part_of_them():
    tokens, mask = prompted()
    found = [len(prompt) for prompt in prompts_of(tokens, mask)]
    assert found == [SHARED.get(name, 0) for name in GROUPS]
    tokens[2, 68] = (tokens[2, 68] + 1) % 50  # not A's any more
    found = [len(prompt) for prompt in prompts_of(tokens, mask)]
    assert found == [69, 63, 0, 0, 69, 63, 0, 0, 0, 69]
    assert prompts_of(tokens, torch.zeros_like(mask)) == [()] * 10
    assert prompts_of(tokens, torch.ones_like(mask)) == [()] * 10


def test_a_shared_prompt_is_computed_once(monkeypatch):
    (tokens, mask), policy, seen = prompted(), make(), []
    layer = policy.language_model.model.layers[0]
    layer.mlp.up_proj.register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape[1])
    )
    whole = [PROMPTS[n] + k - 1 for n, k in zip(GROUPS, RESPONSES, strict=True)]
    monkeypatch.setattr(packing.pack, "__defaults__", (0,))
    policy(tokens, mask=mask)
    assert seen == [sum(whole) - 3 * 69 - 63]  # of four rows and of two


def test_positions_go_on_behind_the_prompt_and_its_rows_know_where_it_is():
    tokens = torch.tensor([[1, 2, 3, 4], [7, 8, 9, 6], [1, 2, 5, 6]])
    ids, positions, groups, starts = pack(tokens, [3, 2, 4], [(1, 2), (), (1, 2)], 0)
    assert ids.tolist() == [[7, 8, 1, 2, 5, 6, 3]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 3, 2]]
    assert groups == [(1, 2, None), (1, 2, None), (1, 2, 1), (1, 1, 1)]
    assert (starts + 2).tolist() == [6, 2, 4]  # where what stands in column 2 is, or would be


def test_a_response_reaches_no_other_and_a_prompt_only_its_own():
    (tokens, mask), policy = prompted(), make()

    def reached(row: list[int] | int, column: int) -> list[int]:
        changed = tokens.clone()
        changed[row, column] = (changed[row, column] + 7) % 50
        with torch.no_grad():
            apart = (policy(tokens, mask=mask) - policy(changed, mask=mask)).abs().amax(1)
        return (apart > 1e-3).nonzero()[:, 0].tolist()

    assert reached(2, 72) == [2]
    assert reached([0, 2, 4, 9], 30) == [0, 2, 4, 9]
    assert reached(2, 30) == [2]  # alone with this prompt now


def tokens_computed(tokens, mask, cuts) -> int:
    parts = [(tokens[rows], mask[rows].bool()) for rows in cuts]
    return sum(pack(t, lengths_of(m), prompts_of(t, m))[0].numel() for t, m in parts)


def test_the_operations_of_a_batch_are_those_of_its_tokens_pairs_and_logits(monkeypatch):
    """H = 32, 2 layers, K = 16, F = 64, V = 50. Matrices of a layer: 2048 + 1024 + 6144
    = 9216, 6144 of them its feed-forward part; logits 50·32 = 1600; queries of 32. A prompt of 4,
    responses of 2 and 1. Shared: 3 tokens, and 2 and 1 behind them, that see 1 + 2 + 3, 4 + 5 and
    4; whole: 5 and 4, that see 15 and 10.
    """
    monkeypatch.setattr(packing, "LEAST", 4)
    tokens, mask = torch.arange(6).repeat(2, 1), torch.zeros(2, 5).bool()
    mask[0, 3:5] = mask[1, 3] = True
    monkeypatch.setattr(packing.pack, "__defaults__", (0,))
    for tokens_, pairs in ((6, 19), (9, 25)):
        expected = 6 * (tokens_ * 2 * 9216 - (tokens_ - 3) * 6144) + 8 * 3 * 1600
        found = packing.operations(make().language_model, tokens, mask)
        assert found == expected + 12 * 2 * 32 * pairs
        monkeypatch.setattr(packing, "LEAST", math.inf)


@pytest.mark.parametrize("processes", [1, 2])
def test_micro_batches_put_rows_of_one_prompt_together_within_the_same_budget(processes):
    groups, responses = list("AABB" * 4), [10 + 5 * n for n in (draw(4, 16) % 9).tolist()]
    tokens, mask = prompted(groups, {"A": 90, "B": 100}, responses)
    for rank in range(processes):
        before = micro_batches(mask, 600, processes, rank)
        cuts = micro_batches(mask, 600, processes, rank, tokens)
        assert sorted(torch.cat(cuts).tolist()) == sorted(torch.cat(before).tolist())
        assert all(len(cut) * max(lengths_of(mask[cut])) <= 600 for cut in cuts)
        assert all((cut % processes == rank).all() for cut in cuts)
        few, many = (tokens_computed(tokens, mask, some) for some in (cuts, before))
        assert few < 0.75 * many


def test_micro_batches_of_short_prompts_are_what_they_were():
    tokens, mask = prompted(list("AB" * 8), {"A": 63, "B": 20}, list(range(5, 21)))
    for budget in (1, 100, 300, 10_000):
        cuts = (micro_batches(mask, budget, 2, 1, some) for some in (None, tokens))
        plain, asked = ([cut.tolist() for cut in some] for some in cuts)
        assert plain == asked


def test_a_padded_family_keeps_rows_of_like_length_together():
    tokens = prompted()[0]
    assert make().sharing(tokens) is tokens and make("gpt2").sharing(tokens) is None
