"""Tests sft.py: supervised training on the tokens that the model should write."""

import pytest
import torch

import sft
from policy import Policy
from rollout import decode, encode
from sft import (
    Example,
    SFTSettings,
    collate_examples,
    example_of,
    sft_loss,
    train_sft,
)
from world.toy import make_model

EXAMPLES = [
    # The prompt, a model token, a document, and a model token.
    Example([5, 6, 7, 8, 9, 10], [0, 0, 1, 0, 0, 1]),
    Example([5, 6, 11], [0, 1, 1]),
    Example([5, 12, 13, 14], [0, 0, 0, 1]),
]


@pytest.fixture
def policy():
    return Policy(make_model(30, seed=0))


def train(policy, examples=EXAMPLES, steps=1, **changes):
    settings = SFTSettings(**{"steps": steps, "lr": 1e-2} | changes)
    return train_sft(policy, lambda step: examples, settings)


def test_the_loss_is_the_mean_over_the_tokens_to_imitate():
    # The log-probs are −1, −3 and −9, and the mask selects the first two: (1 + 3) / 2 = 2.
    def fixed_logprobs(tokens, mask):
        return torch.tensor([[-1.0, -3.0, -9.0]])

    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert sft_loss(fixed_logprobs, tokens, torch.tensor([[1.0, 1.0, 0.0]])).item() == 2.0


def test_an_example_without_a_token_to_imitate_has_loss_zero_and_not_nan(policy):
    loss = sft_loss(policy, *collate_examples([Example([5, 6], [0, 0])]))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


def test_the_micro_batches_change_neither_the_step_nor_the_loss():
    results = []
    for budget in (1, 6, 10_000):  # single rows, unequal parts, all at once
        policy = Policy(make_model(30, seed=0))
        results += train(policy, steps=3, lr=1e-3, tokens_per_micro_batch=budget)
    assert results == pytest.approx(results[:3] * 3, abs=1e-4)


def test_training_learns_the_imitated_tokens_and_not_the_masked_ones(policy):
    # "5 -> 6 -> 7" is imitated; "7 -> 8" is a document and stays unlikely.
    example = Example([5, 6, 7, 8], [0, 1, 1, 0])
    losses = train(policy, [example], steps=30)
    assert losses[-1] < 0.1 < losses[0]
    tokens, _ = collate_examples([example])
    with torch.no_grad():
        probabilities = policy(tokens)[0].exp()
    assert (probabilities[:2] > 0.9).all() and probabilities[2] < 0.1


def test_a_step_uses_the_learning_rate_of_that_step(policy):
    """Adam's first step has the size of the rate, and in a warm-up of 4 steps a quarter of it."""
    before = [p.detach().clone() for p in policy.parameters()]
    train(policy, lr=1e-3, warmup_steps=4)
    moved = max((p - q).abs().max() for p, q in zip(policy.parameters(), before, strict=True))
    assert moved.item() == pytest.approx(1e-3 / 4, rel=1e-2)


def test_muon_takes_the_same_steps_as_torch_s(monkeypatch):
    # Torch's always computes in bf16, where a batched product may be rounded differently from
    # single products.
    ours = sft.orthogonalize
    monkeypatch.setattr(sft, "orthogonalize", lambda matrices: ours(matrices.bfloat16()))
    shapes = [(6, 4), (4, 6), (6, 4)]
    our_weights, torch_weights = ([torch.ones(shape) for shape in shapes] for _ in range(2))
    optimizers = [
        sft.Muon(our_weights, {"lr": 0.0}),
        torch.optim.Muon(torch_weights, weight_decay=0.0),
    ]
    for _ in range(3):
        for weight, torch_weight in zip(our_weights, torch_weights, strict=True):
            weight.grad = torch_weight.grad = torch.randn(weight.shape)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.step()
    torch.testing.assert_close(our_weights, torch_weights, rtol=0, atol=2e-3)


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest(policy):
    muon = sft.optimizers_of(policy, SFTSettings(1, lr=1e-3, muon_lr=0.02))
    adamw, muon = ([*optimizer.param_groups[0]["params"]] for optimizer in muon)
    layers = [p for p in policy.language_model.base_model.layers.parameters() if p.ndim == 2]
    assert [*map(id, muon)] == [*map(id, layers)]
    assert len(adamw) + len(muon) == len([*policy.parameters()])


# --------------------------------------------------------------------------------- text -> example


def test_an_example_ends_in_one_eos_and_the_mask_marks_the_imitated_pieces(bpe):
    pieces = [("I look it up.", True), ("\n\nfound\n\n", False), ("Norland", True)]
    prompt = encode(bpe, "Where?")
    example = example_of(prompt, pieces, bpe)
    assert example.ids[: len(prompt)] == prompt and not any(example.mask[: len(prompt)])
    imitated = [i for i, mask in zip(example.ids, example.mask, strict=True) if mask]
    assert decode(bpe, imitated) == "I look it up.Norland<|im_end|>"
    assert example_of(prompt, [*pieces, ("<|im_end|>", True)], bpe) == example
    # Even if the prompt ends in EOS, the example gets its own.
    assert example_of([bpe.eos_token_id], [], bpe).ids == [bpe.eos_token_id] * 2
