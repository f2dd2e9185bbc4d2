"""Tests of policy.py: log-probs in chunks, fp32 weights, batches, checkpoints, the optimizer."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import message, model_of, small
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

import policy as policy_file
from policy import (
    Policy,
    check_model_path,
    collate,
    fp32_product,
    head_logits,
    load_policy,
    lr_factor,
    make_optimizer,
    save_policy,
    token_logprobs,
)
from scale.packing import micro_batches
from settings import Settings

VOCABULARY = 50
SIZES = small(vocab_size=VOCABULARY, initializer_range=0.2)
FAMILIES = ["qwen2, tied", "qwen2, untied", "llama, tied", "llama, untied"]


def make_policy(family="qwen2, untied") -> Policy:
    kind, tied = family.split(", ")
    torch.manual_seed(0)
    return Policy(model_of(kind, **{**SIZES, "tie_word_embeddings": tied == "tied"}))


def make_tokens(rows=3, length=9, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=draw)  # [B, L]


def full_logprobs(policy: Policy, tokens, temperature=1.0):
    """Computes the log-probs directly: all logits, log_softmax, gather."""
    logits = policy.language_model(input_ids=tokens).logits[:, :-1] / temperature  # [B, T, V]
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]  # [B, T]


def gradients(policy: Policy, loss) -> list:
    policy.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.parameters()]


# ---------------------------------------------------------------------------------------- log-probs


# chunks of 1, 5 (the last is smaller) and all of the 24 log-probs, and a limit above 24
@pytest.mark.parametrize("chunk_rows", [1, 5, 24, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_logprobs_and_gradients_equal_those_of_the_full_softmax(
    family, chunk_rows, monkeypatch
):
    monkeypatch.setattr(policy_file, "chunk_rows", lambda *_: chunk_rows)
    policy = make_policy(family)
    tokens = make_tokens()
    weights = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))  # [B, T]
    chunked, full = policy(tokens, 0.7), full_logprobs(policy, tokens, 0.7)  # [B, T]
    torch.testing.assert_close(chunked, full, atol=1e-5, rtol=0)
    result, expected = (gradients(policy, (weights * x).sum()) for x in (chunked, full))
    for one, other in zip(result, expected, strict=True):
        # CPUs sum in different orders: without AVX-512 the difference was 1.3e-6.
        assert (one - other).abs().max() <= 1e-5 * max(1.0, other.abs().max().item())


def test_logits_are_computed_by_chunk_and_not_at_masked_positions(monkeypatch):
    monkeypatch.setattr(policy_file, "chunk_rows", lambda *_: 4)
    policy = make_policy()
    tokens = make_tokens()
    mask = torch.zeros(3, 8)
    mask[0, 2:7] = mask[2, 7] = 1  # 6 of 24 positions
    sizes = []
    chunks_of_logits = policy_file.chunks_of_logits

    def watched(*arguments):
        for cut, logits in chunks_of_logits(*arguments):
            sizes.append(tuple(logits.shape))
            yield cut, logits

    monkeypatch.setattr(policy_file, "chunks_of_logits", watched)
    policy(tokens, mask=mask).sum().backward()
    # the backward pass computes the same chunks again
    assert sizes == [(4, VOCABULARY), (2, VOCABULARY)] * 2


def test_a_chunk_has_64_mb_of_logits_but_at_least_256_rows():
    assert policy_file.chunk_rows(49_152, "cpu") == 2**24 // 49_152 == 341  # SmolLM2
    assert policy_file.chunk_rows(262_144, "cpu") == 256  # Gemma 3, where 64 MB are 64 rows
    assert policy_file.chunk_rows(262_144, "cuda") == 512


def test_under_bf16_the_gradient_of_the_head_is_exact_over_many_chunks(monkeypatch):
    # Autograd would sum 64 chunks in bf16, with an error of 1.1 %. A product rounded to bf16 has an
    # error of 2⁻⁹ = 0.2 %, and the fp32 sum of the products has no larger one.
    monkeypatch.setattr(policy_file, "chunk_rows", lambda *_: 640 // 64)
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(32, 50, bias=False), torch.randn(640, 32)
    targets, weights = torch.randint(0, 50, (640,)), torch.randn(640)
    result = []
    for enabled in (False, True):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            (token_logprobs(hidden, head, targets) * weights).sum().backward()
        result.append(head.weight.grad.clone())
    assert result[1].dtype == torch.float32
    assert (result[1] - result[0]).norm() < 6e-3 * result[0].norm()


def test_the_logits_of_a_bf16_head_are_not_rounded_to_bf16():
    # From 16 on bf16 has steps of 1/8. The mean error of log-probs would be 0.02 to 0.03.
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 500, bias=False).bfloat16()
    head.weight.data *= 16
    hidden = torch.randn(200, 64).bfloat16()
    targets = torch.randint(0, 500, (200,))

    def logprobs(logits):  # [N, V] -> [N]
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    exact = logprobs(hidden.double() @ head.weight.double().T)
    assert (token_logprobs(hidden, head, targets) - exact).abs().max() < 1e-4
    assert (logprobs(head_logits(head, hidden)) - exact).abs().max() < 1e-4


def test_on_a_gpu_products_of_bf16_matrices_have_fp32_results():
    with FakeTensorMode():  # only a GPU has the kernel
        a, b = (torch.empty(4, 4, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        assert fp32_product(a, b).dtype == torch.float32


@pytest.mark.parametrize(
    "kind, changes",
    [
        # A cap hardly changes the small logits of an untrained model.
        ("gemma2", {"initializer_range": 0.02, "head_dim": 8, "final_logit_softcapping": 30.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("phi", {}),  # its head has a bias
    ],
)
def test_a_model_that_changes_its_logits_after_the_matrix_is_refused_in_one_line(kind, changes):
    model = model_of(kind, **SIZES | changes)
    assert "changes its logits after the output matrix" in message(Policy, model)


def test_on_a_cpu_arithmetic_is_in_bf16_if_asked_for_and_gradients_are_fp32(monkeypatch):
    policy, tokens = make_policy(), make_tokens()
    exact = policy(tokens)
    monkeypatch.setattr(policy_file, "PRECISION", "bf16")
    rounded = policy(tokens)
    assert 1e-4 < (rounded - exact).abs().max() < 0.1
    assert {gradient.dtype for gradient in gradients(policy, rounded.sum())} == {torch.float32}


@pytest.mark.parametrize(
    "precision, processor, refused",
    [
        ("no", "", False),
        ("bf16", "flags: avx2 avx512_bf16", False),
        ("bf16", "flags: avx2", True),
        ("bf16", "", True),  # there is no such file on this system
        ("fp16", "flags: avx512_bf16", True),
    ],
)
def test_a_number_format_that_a_cpu_lacks_is_refused_before_a_model_is_loaded(
    precision, processor, refused, monkeypatch, tmp_path
):
    monkeypatch.setattr(policy_file, "PRECISION", precision)
    monkeypatch.setattr(policy_file, "PROCESSOR", tmp_path / "cpuinfo")
    if processor:
        (tmp_path / "cpuinfo").write_text(processor)
    told = message(load_policy, str(tmp_path / "no model"))
    assert (f"ACCELERATE_MIXED_PRECISION={precision}" in told) == refused


# ------------------------------------------------------------------------------- loading and saving


@pytest.fixture(scope="module")
def saved(bpe, tmp_path_factory):
    """Saves a bf16 checkpoint, as hub models are, and returns the path."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = model_of("qwen2", **{**SIZES, "vocab_size": len(bpe)})
    model.to(torch.bfloat16).save_pretrained(path)
    bpe.save_pretrained(path)
    return path


def test_trainable_weights_are_fp32_and_gradient_checkpointing_is_a_setting(saved):
    policy, _ = load_policy(str(saved), settings=Settings(gradient_checkpointing=True))
    assert all(p.dtype == torch.float32 and p.requires_grad for p in policy.parameters())
    model = policy.language_model
    assert model.model.layers[0].gradient_checkpointing and model.training


def test_a_loaded_model_has_no_dropout(tmp_path, bpe):
    # With GPT-2's dropout of 10 % two passes over one text would differ, and the first ratio would
    # not be 1.
    torch.manual_seed(0)
    model_of("gpt2", **{**SIZES, "vocab_size": len(bpe)}).save_pretrained(tmp_path)
    bpe.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))[0].train()
    assert torch.equal(policy(make_tokens()), policy(make_tokens()))


def test_a_missing_model_is_a_one_line_error():
    for path in ("./nothing", "a/b/nothing"):
        assert "no such directory, or no config.json in it; give a" in message(load_policy, path)
    check_model_path("Qwen/Qwen2.5-3B")  # a model with a hub name may not be downloaded yet


def test_a_saved_policy_reloads_with_automodel_and_equal_logits(tmp_path, saved):
    policy, tokenizer = load_policy(str(saved))
    with torch.no_grad():
        policy.language_model.lm_head.weight.add_(0.01)  # as after training
    save_policy(policy, tokenizer, tmp_path / "a")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(again(make_tokens()).logits, policy.language_model(make_tokens()).logits)


# ---------------------------------------------------------------------------------------- the batch


def written(prompt, response, mask):
    """Returns an object with the fields of a trajectory that `collate` reads."""
    logprobs = [-float(i + 1) * m for i, m in enumerate(mask)]
    ids = {"prompt_ids": prompt, "ids": prompt + response}
    return SimpleNamespace(**ids, response_mask=mask, logprobs=logprobs)


EOS = 0  # also the id of the padding, which is not trained on
# a document in the middle of the response; all tokens sampled; all tokens masked
ROWS = [
    written([5, 6], [7, 8, 9, EOS], [1, 0, 0, 1]),
    written([5], [7, EOS], [1, 1]),
    written([5, 6, 7], [8], [0]),
]


def test_collate_puts_mask_and_logprobs_in_the_column_before_their_token():
    batch = collate(ROWS, [1.0, 0.0, 0.5], group_size=3)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 0], [5, 7, 0, 0, 0, 0], [5, 6, 7, 8, 0, 0]]
    # Column t belongs to token t + 1: the first sampled token of row 0 is token 2, so its column is
    # 1. Prompt tokens have mask 0.
    assert batch.response_mask.tolist() == [[0, 1, 0, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.old_logprobs.tolist() == [[0, -1, 0, 0, -4], [-1, -2, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5]
    assert {batch.tokens.dtype, batch.response_mask.dtype} == {torch.long, torch.float}


def test_rows_cuts_every_tensor_to_the_longest_row():
    batch = collate(ROWS, [1.0, 0.0, 0.5], 3)
    batch.values = torch.arange(15.0).view(3, 5)
    part = batch.rows(torch.tensor([2, 1]))  # the longer of the two rows needs two columns
    assert part.values.tolist() == [[10, 11], [5, 6]] and part.rewards.tolist() == [0.5, 0]
    assert part.tokens.shape == (2, 3) and part.ref_logprobs is None and part.group_size == 3


def test_all_processes_get_the_same_number_of_micro_batches():
    tokens, mask = torch.zeros(5, 10, dtype=torch.long), torch.ones(5, 9)
    dealt = [micro_batches(tokens, mask, 1, processes=2, rank=rank) for rank in (0, 1)]
    rows = [[cut.tolist() for cut in cuts] for cuts in dealt]
    assert rows == [[[0], [2], [4]], [[1], [3], []]]  # at one row each


# ------------------------------------------------------------------------------------ the optimizer


@pytest.mark.parametrize(
    "step, schedule, expected",
    [
        (0, "constant", 0.5),  # the warm-up has two of the ten steps: 1/2, 2/2
        (9, "constant", 1.0),
        (2, "linear", 1.0),
        (9, "linear", 0.125),  # after the warm-up the progress is 0, 1/8, ..., 7/8
        (4, "cosine", 0.5 * (1 + math.sqrt(0.5))),  # at 2/8: cos(π/4) = √½
    ],
)
def test_the_learning_rate_by_hand(step, schedule, expected):
    assert lr_factor(step, 10, 0.2, schedule) == pytest.approx(expected)


def test_a_warm_up_takes_a_share_of_all_updates():
    # R-Search: 0.95 · 195 = 185.25
    rates = [lr_factor(step, 195, 0.95, "constant") for step in range(195)]
    assert rates == pytest.approx([(i + 1) / 185 for i in range(185)] + [1.0] * 10)


def test_a_supervised_rate_warms_up_then_stays_then_falls_to_zero():
    # From 60 % of 10 steps on 1 − k/4. A decay that would begin within the warm-up begins after it.
    rates = [lr_factor(step, 10, 0.2, "linear", 0.6) for step in range(10)]
    assert rates == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert [lr_factor(step, 4, 0.5, "linear", 0.1) for step in range(4)] == [0.5, 1, 1, 0.5]


def test_adamw8bit_has_moments_of_8_bits_on_a_cpu_too():
    layer = torch.nn.Linear(128, 128)  # of fewer than 4096 weights bitsandbytes keeps fp32 moments
    optimizer = make_optimizer(layer, "adamw8bit", 1e-3)
    layer(torch.ones(4, 128)).sum().backward()
    optimizer.step()
    assert optimizer.state[layer.weight]["state1"].dtype == torch.uint8


def test_a_frozen_policy_has_no_gradients_and_can_have_int8_matrices(saved):
    frozen, eight = (
        load_policy(str(saved), frozen=True, in_8bit=flag)[0] for flag in (False, True)
    )
    assert not any(p.requires_grad for policy in (frozen, eight) for p in policy.parameters())
    layers = eight.language_model.model.layers
    assert {p.dtype for p in layers.parameters() if p.ndim == 2} == {torch.int8}
    plain, rounded = frozen(make_tokens()), eight(make_tokens())
    assert 0 < (plain - rounded).abs().mean() < 0.05 * plain.abs().mean()
