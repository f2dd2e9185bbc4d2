"""ppo.mismatch_weights, where the sampler μ is not π_old: by hand, by the numbers of verl and of
TRL, by enumeration of a small world, and in a run. Also what a run logs as likelihood_later.
"""

import dataclasses
import itertools
import math
from functools import partial
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from conftest import message, rows_of, settings_for
from test_dapo import CHOSEN, make_batch
from test_update import GRPO, gradient_of, unequal_batch

import dapo
import grpo
import ppo
import train
from plumbing.build import build_parts
from settings import Settings, parse
from train import likelihood_later, prepare, shuffled_updates
from update import score

MODES = list(ppo.MISMATCH)
INF, NAN = float("inf"), float("nan")


def weights(old, sampled, mask, mode) -> torch.Tensor:
    tensors = {"old_logprobs": old, "sampled_logprobs": sampled, "response_mask": mask}
    tensors = {name: torch.as_tensor(value) for name, value in tensors.items()}
    return ppo.mismatch_weights(SimpleNamespace(**tensors), mode)


def of_ratios(ratios: list, mode: str) -> list[float]:
    """The weights of a row with these ρ; None is a masked token, with log-probs that are none."""
    old = [[NAN if ratio is None else math.log(ratio) for ratio in ratios]]
    mask = [[int(ratio is not None) for ratio in ratios]]
    return weights(old, [[0.0] * len(ratios)], mask, mode)[0].tolist()


# ------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", [[0.8, 2.0, 1.0], [0.1, 1.5, 2.0]]),
        ("sequence", [[2.0, 2.0, 1.0], [0.45, 0.45, 0.45]]),  # 3.2; 0.1 · 1.5 · 3 = 0.45
        ("mask", [[0.8, 0.0, 1.0], [0.0, 1.5, 0.0]]),  # below 1/2, and above 2
        ("sequence_mask", [[0.0, 0.0, 1.0], [0.45, 0.45, 0.45]]),  # only above
        ("row", [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),  # roots 1.79 and 0.77
    ],
)
def test_weights_by_hand_and_a_masked_token_weighs_1(mode, expected):
    for ratios, row in zip(([0.8, 4.0, None], [0.1, 1.5, 3.0]), expected, strict=True):
        assert of_ratios(ratios, mode) == pytest.approx(row)
    assert of_ratios([None, None], mode) == [1.0, 1.0]


def test_a_row_is_kept_by_the_mean_of_its_own_tokens():
    # ln ρ of 0.0009 each is a mean within 0.1 %; two thirds of it and a masked token are no third
    assert of_ratios([1.0009, 1.0009, None], "row") == [1, 1, 1]
    assert of_ratios([1.0012, 1.0012, None], "row") == [0, 0, 1]
    assert of_ratios([1.2, 1 / 1.2, None], "row") == [1, 1, 1]  # they make up for each other
    assert of_ratios([0.9985], "row") == [0] and of_ratios([0.9995], "row") == [1]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_impossible_to_the_sampler_is_finite_and_no_gradient_flows(mode):
    old, mask = torch.tensor([[-1.0, 400.0, -400.0, 2.0]], requires_grad=True), torch.ones(1, 4)
    found = weights(old, torch.zeros(1, 4), mask, mode)
    assert torch.isfinite(found).all() and not found.requires_grad
    assert found.max() <= 3
    if mode == "token":  # exp(−400) is 0, and a weight of 0 would be a rejected token
        assert found.min() == pytest.approx(math.exp(-20))


@pytest.mark.parametrize("mode", MODES)
def test_without_a_gap_every_weight_is_one(mode):
    draw = torch.Generator().manual_seed(0)
    logprobs, mask = -torch.rand(4, 6, generator=draw), torch.rand(4, 6, generator=draw) < 0.5
    assert weights(logprobs, logprobs, mask, mode).eq(1).all()


# ------------------------------------------------------------------- the numbers of verl and of TRL

OLD = [[-0.1, -2.3, -0.7, -1.2, -3.0], [-1.0, -0.4, -1.8, -0.9, -0.2]]
OLD += [[-0.5, -0.5, -1.5, -2.5, -0.3], [-0.6, -0.6, -9.0, -9.0, -9.0]]
SAMPLED = [[-0.4, -1.4, -0.7, -9.9, -2.1], [-1.3, -0.9, -2.0, -1.1, -9.9]]
SAMPLED += [[-0.2, -1.4, -9.9, -1.5, -0.3], [-0.6006, -0.6, -1.0, -1.0, -1.0]]
OWN = [[1, 1, 1, 0, 1], [1, 1, 1, 1, 0], [1, 1, 0, 1, 1], [1, 1, 0, 0, 0]]
# Worked out with pencil rules from the two definitions, not with either package: exp(0.3), ...
TOKEN = [[1.3498588, 0.4065697, 1, 0, 0.4065697], [1.3498588, 1.6487213, 1.2214028, 1.2214028, 0]]
TOKEN += [[0.7408182, 2, 0, 0.3678794, 1], [1.0006002, 1, 0, 0, 0]]
MASKED = [[1.3498588, 0, 1, 0, 0], [1.3498588, 1.6487213, 1.2214028, 1.2214028, 0]]
MASKED += [[0.7408182, 0, 0, 0, 1], [1.0006002, 1, 0, 0, 0]]
# The products are exp(−1.5), exp(1.2) = 3.32, exp(−0.4) and exp(0.0006).
PRODUCTS = [0.2231302, 2, 0.67032, 1.0006002], [0.2231302, 0, 0.67032, 1.0006002]
PEERS = {
    # our mode: verl's (level, bound) and (rejection, its bounds, which are on 1 / ρ), or None;
    # TRL's mode, C_min and C_max; the weights on model tokens
    "token": (("token", 2.0), None, ("token_truncate", None, 2.0), TOKEN),
    "sequence": (("sequence", 2.0), None, ("sequence_truncate", None, 2.0), PRODUCTS[0]),
    "mask": (("token", 2.0), ("token_k1", "0.5_2.0"), ("token_mask", 0.5, 2.0), MASKED),
    "sequence_mask": (None, None, ("sequence_mask", None, 3.0), PRODUCTS[1]),
    "row": (None, ("seq_mean_k1", f"{1 / 1.001}_{1 / 0.999}"), None, [0, 0, 0, 1]),
}


def recorded(mode: str) -> torch.Tensor:
    """[4, 5], 0 on masked tokens."""
    numbers = torch.tensor(PEERS[mode][-1])
    return numbers if numbers.ndim == 2 else numbers[:, None] * torch.tensor(OWN)


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_of_verl_and_of_trl(mode):
    mask = torch.tensor(OWN)
    found = weights(OLD, SAMPLED, mask, mode)
    assert (found * mask - recorded(mode)).abs().max() <= 1e-6
    assert found[mask == 0].eq(1).all()


# ---------------------------------------------------------------------------- in the loss's weights


def rejecting(batch, *places):
    """The batch with weights 0.5, and 0 at these (row, column)."""
    batch.mismatch_weights = torch.where(batch.response_mask.bool(), 0.5, 1.0)
    for place in places:
        batch.mismatch_weights[place] = 0.0
    return batch


def test_rejected_tokens_and_rows_leave_the_denominators_where_trl_keeps_them():
    # Rows of 2, 2, 4 and 1 model tokens; of the third one token is rejected, and all of the last.
    batch = rejecting(make_batch(), (2, 1), (3, 0))
    one = Settings(loss_aggregation="token")
    assert ppo.compute_token_weights(batch, one)[2].tolist() == pytest.approx(
        [1 / 7, 0, 1 / 7, 1 / 7]
    )
    rows = grpo.compute_token_weights(batch, Settings(loss_aggregation="sequence"))
    assert rows.sum(1).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert rows[2].tolist() == pytest.approx([1 / 9, 0, 1 / 9, 1 / 9])  # TRL: 1/16 each, 1/4 lost
    batch.overlong = torch.tensor([True, False, False, False])  # DAPO drops two more tokens
    assert dapo.compute_token_weights(batch, CHOSEN)[2, 0].item() == pytest.approx(1 / 5)
    everything = rejecting(make_batch(), *itertools.product(range(4), range(4)))
    assert dapo.compute_token_weights(everything, CHOSEN).eq(0).all()  # and no NaN


def test_the_critic_learns_from_rejected_tokens_too():
    batch = unequal_batch(dataclasses.replace(GRPO, algorithm="ppo"))
    settings = dataclasses.replace(GRPO, algorithm="ppo", kl_coef=0.0)
    plain = gradient_of(batch, settings)[1]
    corrected = gradient_of(rejecting(batch, (0, 2), (6, 5)), settings)[1]
    assert corrected["value_loss"] == plain["value_loss"] and corrected["loss"] != plain["loss"]


def test_the_weight_is_on_the_policy_term_and_not_on_the_kl():
    ratio, ref = torch.tensor([[1.1, 0.9]]), torch.tensor([[-1.0, -2.0]])
    batch = SimpleNamespace(
        response_mask=torch.ones(1, 2),
        old_logprobs=-torch.ones(1, 2),
        ref_logprobs=ref,
        advantages=torch.tensor([[2.0, -1.0]]),
        mismatch_weights=torch.tensor([[0.5, 2.0]]),
    )
    settings = Settings(kl_coef=0.1, kl_estimator="k3")
    loss, _ = ppo.compute_loss(ratio.log() - 1, batch, settings)
    # −0.5 · 1.1 · 2 and 2 · 0.9 · 1; k3 = exp(−d) − 1 + d with d = log π − log π_ref
    d = [math.log(1.1), math.log(0.9) + 1]
    kl = [0.1 * (math.exp(-x) - 1 + x) for x in d]
    assert loss[0].tolist() == pytest.approx([-1.1 + kl[0], 1.8 + kl[1]])


def test_the_gradient_with_weights_is_the_same_however_the_batch_is_cut():
    batch = rejecting(unequal_batch(GRPO), (0, 2), (2, 4), (4, 2))
    whole, totals = gradient_of(batch, GRPO)
    cut, _ = gradient_of(batch, dataclasses.replace(GRPO, tokens_per_micro_batch=25))
    assert max((a - b).abs().max() for a, b in zip(whole, cut, strict=True)) < 1e-5
    assert totals["loss"] != pytest.approx(gradient_of(unequal_batch(GRPO), GRPO)[1]["loss"])


def test_the_logged_shares_are_those_of_the_model_tokens():
    # w 2, 1, 0.5 and a masked token: 3.5² / (3 · 5.25); one of three is cut
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = SimpleNamespace(response_mask=mask)
    batch.mismatch_weights = torch.tensor([[2, 1, 1.0], [0.5, 1, 1]])
    expected = {"mismatch_ess": 12.25 / 15.75, "mismatch_cut": 1 / 3}
    assert ppo.mismatch_stats(batch, "token") == pytest.approx(expected)
    batch.mismatch_weights = torch.tensor([[0, 1, 1.0], [0, 1, 1]])  # two of three are rejected
    expected = {"mismatch_ess": 1 / 3, "mismatch_cut": 2 / 3}
    assert ppo.mismatch_stats(batch, "mask") == pytest.approx(expected)
    batch.mismatch_weights = torch.zeros(2, 3)
    assert ppo.mismatch_stats(batch, "row") == {"mismatch_ess": 0, "mismatch_cut": 1}


# ------------------------------------------------------- a world of three tokens, all its sequences

LENGTH, NEAR = 4, ("none", "token", "sequence")
SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=LENGTH)))  # [81, 4]
BEFORE = torch.cat([torch.full((81, 1), 3), SEQUENCES[:, :-1]], 1)  # [81, 4]  3: the begin


def logits_of(seed: int, around=None, noise: float = 1.0) -> torch.Tensor:
    """[4, 3]: what follows which token, another policy at some distance, or a random one."""
    draw = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw * noise if around is None else around + noise * draw


def scored(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(1)[BEFORE, SEQUENCES]  # [81, 4]


THETA = logits_of(0)  # π_old
WORLDS = range(20)


def expected_gradient(mode: str, seed: int, sampler: torch.Tensor) -> torch.Tensor:
    """Σ over all sequences of μ(sequence) · the gradient of its weighted loss: an expectation."""
    theta = THETA.clone().requires_grad_()
    logprobs, draw = scored(theta), torch.Generator().manual_seed(seed)
    batch = SimpleNamespace(
        response_mask=torch.ones(81, LENGTH),
        old_logprobs=logprobs.detach(),
        sampled_logprobs=sampler,
        ref_logprobs=None,
        advantages=torch.randn(81, 1, generator=draw).expand(81, LENGTH),  # of a sequence
        mismatch_weights=None,
    )
    if mode != "none":
        batch.mismatch_weights = ppo.mismatch_weights(batch, mode)
    loss, _ = ppo.compute_loss(logprobs, batch, Settings(kl_coef=0.0))
    (sampler.sum(1).exp() @ loss.sum(1)).backward()
    return theta.grad  # [4, 3]


def bias(mode: str, seed: int = 0) -> float:
    """How far its expectation is from the gradient under π_old, in the length of that one."""
    sampler = scored(logits_of(100 + seed, THETA, 0.2))
    found = expected_gradient(mode, seed, sampler)
    true = expected_gradient("none", seed, scored(THETA))
    assert sampler.sum(1).exp().sum().item() == pytest.approx(1)  # all sequences, each once
    return ((found - true).norm() / true.norm()).item()


def bounded(monkeypatch, mode: str, bound: float) -> None:
    """Moves the upper bound C of a mode."""
    lowest, _, other = ppo.MISMATCH[mode]
    monkeypatch.setitem(ppo.MISMATCH, mode, (lowest, bound, other and bound))


@pytest.mark.parametrize("mode", ["sequence", "sequence_mask"])
def test_weights_of_whole_rows_are_unbiased_as_their_bound_grows(mode, monkeypatch):
    biases = []
    for bound in (1.2, 1.5, 2.0, 1e9):
        bounded(monkeypatch, mode, bound)
        biases.append(max(map(partial(bias, mode), WORLDS)))
    assert biases == sorted(biases, reverse=True) and biases[0] > 0.1
    assert biases[-1] < 1e-9


def test_weights_of_tokens_are_biased_whatever_their_bound_but_less_than_none(monkeypatch):
    # They correct for the token that was drawn, not for how likely the text around it was.
    none, token, sequence = (fmean(map(partial(bias, m), WORLDS)) for m in NEAR)
    assert none > 1.2 * token and token > 10 * sequence and token > 0.1
    bounded(monkeypatch, "token", 1e9)
    assert fmean(map(partial(bias, "token"), WORLDS)) > 0.1


def test_no_weight_of_a_token_is_above_its_bound_where_that_of_a_row_would_be_thousands():
    far = logits_of(3, THETA, 3.0)
    batch = SimpleNamespace(response_mask=torch.ones(81, LENGTH), old_logprobs=scored(THETA))
    batch.sampled_logprobs = scored(far)
    assert (batch.old_logprobs - batch.sampled_logprobs).sum(1).exp().max() > 1000
    assert ppo.mismatch_weights(batch, "token").max() == 2


# -------------------------------------------------------------------------------------------- a run


def test_a_run_corrects_for_another_sampler_and_only_then(model, tmp_path):
    found = {}
    for flags in ("", "--sampling_copy bf16", "--sampling_copy bf16 --mismatch none"):
        found[flags] = build_parts(settings_for(model, tmp_path, flags)).mismatch
    assert list(found.values()) == ["none", "token", "none"]
    parts = build_parts(
        settings_for(model, tmp_path, "--sampling_copy bf16 --mask_documents false")
    )
    assert parts.recompute and parts.mismatch == "none"  # documents have no ρ
    for word in ("token", "none"):
        told = message(parse, f"--mismatch {word} --mask_documents false".split())
        assert told.startswith("--mismatch: documents were not sampled") and "leave it out" in told


def test_the_weights_of_all_rows_are_there_before_the_first_update(model, tmp_path):
    # Four rows in two updates, and a sampler that was wrong about a token in each row.
    more = "--trajectories_per_update 2 --mismatch mask"
    parts = build_parts(settings_for(model, tmp_path, more))
    parts.recompute = True
    sampled = train.collect(parts, 0)
    for t in sampled.trajectories:
        t.logprobs[0] -= 1.0
    batch = prepare(parts, sampled, 0)
    assert torch.equal(batch.old_logprobs, score(parts, parts.policy, batch))
    wrong = torch.zeros_like(batch.response_mask)
    for row, t in enumerate(sampled.trajectories):
        wrong[row, len(t.prompt_ids) - 1] = 1  # ρ = e there
    assert batch.mismatch_weights[wrong > 0].eq(0).all()
    assert (batch.mismatch_weights[wrong == 0] - 1).abs().max() < 1e-3
    for number, rows in enumerate(shuffled_updates(0, 4, parts.settings)):
        part = train.batch_of_update(parts, batch, rows, number)
        assert (part.old_logprobs is None) == (number == 0)  # the first takes its forward pass's
        token_weights = ppo.compute_token_weights(part, parts.settings)
        assert token_weights[part.mismatch_weights == 0].eq(0).all()
        assert token_weights.sum().item() == pytest.approx(1)


def test_a_run_logs_how_far_its_sampler_is(model, tmp_path):
    rows = {}
    for more in ("", "--sampling_copy bf16"):
        name = tmp_path / (more[-4:] or "fp32")
        settings = settings_for(model, name, f"--trajectories_per_update 2 {more}")
        rows[more] = rows_of(train.train(settings))
    for row in rows["--sampling_copy bf16"]:
        assert 0.9 < row["mismatch_ess"] <= 1 and 0 <= row["mismatch_cut"] < 0.2
        assert row["ratio_min"] <= 1 <= row["ratio_max"]
    assert not any("mismatch_ess" in row for row in rows[""])


# ------------------------------------------------------------------------------- likelihood_later


def test_how_much_likelier_better_answers_became_is_a_mean_over_rows_by_hand():
    # Rows 0 and 4 are in the first update; of the others rows 1 and 3 earn more than their
    # baseline: 0.2 − 0.1 and −0.4 − 0.1.
    change = [[9, 9], [0.2, -0.1], [5, 5], [-0.4, -0.1], [9, 9]]
    batch = SimpleNamespace(
        old_logprobs=-torch.ones(5, 2),
        logprobs=torch.tensor(change) - 1,
        advantages=torch.tensor([[1, 1], [0.5, 0.5], [-1, -1], [2, -1], [1, 1]]),
    )
    first = torch.tensor([0, 4])
    assert likelihood_later(batch, first) == {"likelihood_later": pytest.approx(-0.2)}
    batch.advantages[[1, 3]] = 0.0  # equal rewards
    assert likelihood_later(batch, first) == {}


def test_a_step_of_one_update_has_no_figure_and_the_next_updates_have_one(model, tmp_path):
    found = []
    for rows in (0, 2):
        more = f"--temperature 2 --lr 3e-2 --trajectories_per_update {rows}"
        settings = settings_for(model, tmp_path / str(rows), more)
        found.append(rows_of(train.train(settings)))
    assert not any("likelihood_later" in row for row in found[0])
    assert any(abs(row.get("likelihood_later", 0)) > 1e-3 for row in found[1])
