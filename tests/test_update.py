"""update.py: one gradient however the batch is cut, nothing learned from documents."""

import copy
import dataclasses
import math

import pytest
import torch
from accelerate import Accelerator
from conftest import model_of, same, small

import ppo
import update as update_file
from data import Question
from policy import Batch, Policy, collate
from prompts import PROTOCOLS
from scale import packing
from settings import Settings
from train import compute_old_logprobs, mean, sampler_stats, set_lr, shuffled_updates
from trajectory import Trajectory
from update import (
    ALGORITHMS,
    TrainState,
    compute_logprobs,
    merge_records,
    rows_that_teach,
    update,
    update_critic,
)

with torch.random.fork_rng(devices=[]):
    torch.manual_seed(3)
    TINY = model_of("qwen2", **small(vocab_size=40, initializer_range=0.2))


def trajectory(generator, length, document=None, vocabulary=40) -> Trajectory:
    """Random tokens; `document` = (start, end) of what the environment wrote."""
    t = Trajectory(Question("q", "?", ["!"]), PROTOCOLS["ur2"], prompt_ids=[1, 2, 3])
    ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
    start, end = document or (length, length)
    t.append_model(ids[:start], [-1.0] * start, "a")
    t.append_environment(ids[start:end], "b", "documents")
    t.append_model(ids[end:], [-1.0] * (length - end), "c")
    return t


class Recorder(torch.optim.SGD):
    """Keeps the gradient instead of taking the step."""

    def step(self):
        self.gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]


def make_parts(settings: Settings) -> TrainState:
    """A policy and a critic of its own shape; their optimizers only keep the gradients."""
    policy = Policy(copy.deepcopy(TINY))
    critic = ppo.Critic(copy.deepcopy(TINY.base_model))
    # Not 0, so that a gradient reaches every layer.
    torch.nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    state = TrainState(
        settings, Accelerator(), policy, policy, Recorder(policy.parameters()), recompute=False
    )
    if settings.algorithm == "ppo":
        state.critic = state.critic_model = critic
        state.critic_optimizer = Recorder(critic.parameters())
    return state


def unequal_batch(settings: Settings) -> Batch:
    """Eight trajectories of 1 to 20 tokens, one all masked; π_old and π_ref a little off π."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(20, (3, 12)), (2, None), (9, None), (14, (1, 13))]
    shapes += [(1, None), (5, (0, 5)), (17, None), (4, (1, 2))]
    rewards = [1.0, 0.0, 0.5, 2.0, -1.0, 1.0, 0.3, 0.3]
    batch = collate([trajectory(draw, *shape) for shape in shapes], rewards, 2)
    state = make_parts(settings)
    logprobs = compute_logprobs(state, state.policy, batch)  # [B, T]
    batch.old_logprobs = logprobs + 0.3 * torch.randn(logprobs.shape, generator=draw)
    batch.ref_logprobs = logprobs + 0.3 * torch.randn(logprobs.shape, generator=draw)
    batch.values = torch.randn(logprobs.shape, generator=draw)
    batch.sampled_logprobs = None
    batch.overlong = torch.arange(8) == 3  # only DAPO looks at it
    batch.advantages = ALGORITHMS[settings.algorithm].compute_advantages(batch, settings)
    return batch


def gradient_of(batch: Batch, settings: Settings, step=update) -> tuple[list, dict]:
    state = make_parts(settings)
    totals = step(state, copy.deepcopy(batch))
    optimizer = state.optimizer if step is update else state.critic_optimizer
    return optimizer.gradients, totals


def largest_difference(one, other) -> float:
    """Relative to the largest entry of the gradient."""
    largest = max(g.abs().max() for g in one)
    return (max((a - b).abs().max() for a, b in zip(one, other, strict=True)) / largest).item()


@pytest.fixture
def unclipped(monkeypatch):
    monkeypatch.setattr(update_file, "MAX_GRAD_NORM", 1e9)


# ----------------------------------------------------------- the gradient, however the batch is cut

KL = {"kl_coef": 0.1, "kl_estimator": "k2"}
CASES = [
    Settings(algorithm=algorithm, loss_aggregation=aggregation, group_size=2, **kl)
    for algorithm in ("reinforce_pp", "reinforce_pp_baseline", "dapo", "ppo", "grpo")
    for aggregation in (("token", "question") if algorithm == "dapo" else ("sequence", "token"))
    for kl in ({}, KL | {"kl_estimator": "k1"} if algorithm == "reinforce_pp" else KL)
]
GRPO = CASES[-1]
PPO = Settings(algorithm="ppo", group_size=2, gae_lambda=0.9)


def name_of(settings):
    return f"{settings.algorithm}-{settings.loss_aggregation}{'-kl' if settings.kl_coef else ''}"


@pytest.mark.parametrize("settings", CASES, ids=name_of)
def test_the_gradient_is_the_same_however_the_batch_is_cut(settings, unclipped):
    steps = [update, update_critic] if settings.algorithm == "ppo" else [update]
    batch = unequal_batch(settings)
    for step in steps:
        whole, totals = gradient_of(batch, settings, step)
        assert max(g.abs().max() for g in whole) > 1e-3
        for budget in (1, 25, 44):  # every row alone; two ragged cuts
            small_cuts = dataclasses.replace(settings, tokens_per_micro_batch=budget)
            cut, cut_totals = gradient_of(batch, small_cuts, step)
            assert largest_difference(whole, cut) < 1e-5
            assert cut_totals == pytest.approx(totals, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("settings, step", [(GRPO, update), (PPO, update_critic)])
def test_a_prompt_that_rows_share_changes_neither_gradient_nor_figures(
    settings, step, unclipped, monkeypatch
):
    batch = unequal_batch(settings)
    whole, totals = gradient_of(batch, settings, step)
    monkeypatch.setattr(packing, "LEAST", 3)  # all eight rows have this prompt
    shared, shared_totals = gradient_of(batch, settings, step)
    assert 0 < largest_difference(whole, shared) < 1e-5
    assert shared_totals == pytest.approx(totals, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("settings, step", [(GRPO, update), (PPO, update_critic)])
def test_documents_and_prompts_weigh_nothing(settings, step):
    # A document is read; whatever log-probs, advantages and values stand on it change nothing.
    batch = unequal_batch(settings)
    loud = unequal_batch(settings)
    for name in ("old_logprobs", "ref_logprobs", "advantages", "values", "returns"):
        if (tensor := getattr(loud, name)) is not None:
            tensor[loud.response_mask == 0] = float("inf")
    assert same(*(gradient_of(one, settings, step)[0] for one in (batch, loud)))


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_the_loss_is_the_sum_of_weight_times_loss_token_by_token(aggregation):
    settings = Settings(algorithm="grpo", loss_aggregation=aggregation, clip_low=0.2, clip_high=0.3)
    batch = unequal_batch(settings)
    with torch.no_grad():
        logprobs = Policy(TINY)(batch.tokens)  # [B, T]
    loss = 0.0
    for row, t in batch.response_mask.nonzero().tolist():
        # 45 sampled tokens in 7 trajectories
        weight = 1 / 45 if aggregation == "token" else 1 / batch.response_mask[row].sum() / 7
        ratio = math.exp(logprobs[row, t] - batch.old_logprobs[row, t])
        held = min(max(ratio, 0.8), 1.3)
        advantage = batch.advantages[row, t]
        loss -= float(weight * min(ratio * advantage, held * advantage))
    assert gradient_of(batch, settings)[1]["loss"] == pytest.approx(loss, abs=1e-5)


# ------------------------------------------------------------------------ rows that teach nothing


def half_equal(settings: Settings) -> Batch:
    """unequal_batch without a KL; rows 2, 3 and 6, 7 have equal rewards, row 0 is overlong."""
    batch = unequal_batch(settings)
    batch.ref_logprobs = batch.values = None
    batch.rewards[3], batch.overlong = batch.rewards[2], torch.arange(8) == 0
    batch.advantages = ALGORITHMS[settings.algorithm].compute_advantages(batch, settings)
    batch.returns = None
    return batch


@pytest.mark.parametrize("settings", [s for s in CASES if s.algorithm != "ppo"], ids=name_of)
def test_rows_that_teach_nothing_are_not_computed_and_the_gradient_is_that_of_all(
    settings, unclipped, monkeypatch
):
    settings = dataclasses.replace(settings, kl_coef=0.0)
    batch = half_equal(settings)
    computed = []
    whole_forward = Policy.forward

    def forward(policy, tokens, *rest):
        computed.append(len(tokens))
        return whole_forward(policy, tokens, *rest)

    monkeypatch.setattr(Policy, "forward", forward)
    some, totals = gradient_of(batch, settings)
    # Row 5 has no model token. What is plain is whitened: there an equal group teaches, too.
    expected = {"reinforce_pp": 7, "dapo": 2}.get(settings.algorithm, 3)
    assert sum(computed) == expected
    monkeypatch.setattr(update_file, "rows_that_teach", lambda _: torch.arange(8))
    whole, whole_totals = gradient_of(batch, settings)
    assert sum(computed) == expected + 8
    # Floats are summed in another order. The norm is between 1 and 8.
    near = 5e-6 * max(1.0, whole_totals["grad_norm"])
    assert largest_difference(whole, some) < near
    for name in ("loss", "grad_norm"):
        assert totals[name] == pytest.approx(whole_totals[name], abs=near)


def test_numbers_of_an_update_are_means_over_the_rows_that_teach_and_entropy_over_all():
    settings = dataclasses.replace(GRPO, kl_coef=0.0)
    state = make_parts(settings)
    batch = half_equal(settings)
    totals = update(state, batch)
    taught = [0, 1, 4]
    mask = batch.response_mask.bool()
    logprobs = compute_logprobs(
        state, state.policy, batch
    )  # the optimizer only looks: π is what it was
    change = logprobs - batch.old_logprobs
    # k3 of the way from π_old: exp(x) − 1 − x, x = log π − log π_old
    drift = (torch.expm1(change) - change)[taught][mask[taught]]
    assert totals["approx_kl"] == pytest.approx(drift.mean().item(), abs=1e-5)
    own = batch.old_logprobs.clone()  # as they were sampled
    own[taught] = logprobs[taught]
    torch.testing.assert_close(batch.logprobs, own, atol=1e-5, rtol=0)
    assert totals["entropy_mc"] == pytest.approx(-own[mask].mean().item(), abs=1e-5)


def test_an_update_in_which_no_row_teaches_makes_no_step_and_says_so():
    settings = dataclasses.replace(GRPO, kl_coef=0.0)
    state = make_parts(settings)
    batch = half_equal(settings)
    equal = batch.rows(torch.tensor([2, 3, 6, 7]))
    entropy = -equal.old_logprobs[equal.response_mask.bool()].mean().item()
    expected = pytest.approx(entropy, abs=1e-5)
    figures = {"skipped": 1, "loss": 0, "grad_norm": 0, "entropy_mc": expected}
    assert update(state, equal) == figures
    assert not hasattr(state.optimizer, "gradients") and state.version == 0
    # A KL in the loss, or a critic, learns from these rows, too.
    for name in ("ref_logprobs", "values"):
        other = dataclasses.replace(equal, **{name: equal.old_logprobs})
        assert rows_that_teach(other).tolist() == [0, 1, 2, 3]


UNMASKED = {"sampled_logprobs": None}  # as with --mask_documents false


def test_scoring_again_leaves_out_rows_that_teach_nothing_unless_something_reads_them():
    settings = dataclasses.replace(GRPO, kl_coef=0.0)
    state = make_parts(settings)
    batch = half_equal(settings)
    sampled = batch.sampled_logprobs = batch.old_logprobs
    logprobs = compute_logprobs(state, state.policy, batch)
    expected = logprobs.clone()
    rest = [2, 3, 5, 6, 7]  # dapo's overlong rows are known to an update alone
    expected[rest] = sampled[rest]
    torch.testing.assert_close(compute_old_logprobs(state, batch), expected, atol=1e-5, rtol=0)
    for mismatch, names in (("mask", {}), ("none", {"ref_logprobs": sampled}), ("none", UNMASKED)):
        state.mismatch = mismatch
        read = dataclasses.replace(batch, **names)
        torch.testing.assert_close(compute_old_logprobs(state, read), logprobs, atol=1e-5, rtol=0)


def test_scoring_and_updating_change_nothing_in_the_batch():
    batch = unequal_batch(GRPO)
    before = copy.deepcopy(batch)
    state = make_parts(GRPO)
    compute_logprobs(state, state.policy, batch)
    update(state, batch)
    batch.token_weights = batch.logprobs = None  # an update adds these
    torch.testing.assert_close(vars(batch), vars(before), rtol=0, atol=0)


# ------------------------------------------------------------------------ which rows, at which rate


def test_fewer_rows_make_fewer_updates_and_the_learning_rate_goes_on_by_step():
    sizes = {"questions_per_step": 4, "group_size": 2, "trajectories_per_update": 3, "steps": 4}
    settings = Settings(**sizes, lr=1.2e-5, lr_schedule="linear")
    state = make_parts(settings)
    rates = []
    for step, updates in enumerate([[3, 3, 2], [2], [2, 2]]):
        dealt = shuffled_updates(step, torch.zeros(sum(updates)), settings)
        assert [len(one) for one in dealt] == updates
        assert sorted(torch.cat(dealt).tolist()) == list(range(sum(updates)))
        rates += [set_lr(state, step, number) for number in range(len(dealt))]
        assert state.optimizer.param_groups[0]["lr"] == rates[-1]
    # 4 steps of 3 updates: numbers 0, 1, 2; 3; 6, 7 of 12, and 1e-6 less each
    assert rates == pytest.approx([1.2e-5, 1.1e-5, 1e-5, 9e-6, 6e-6, 5e-6])
    # The critic's own warm-up: a third of 12 updates are 4, then it stays.
    state = make_parts(
        Settings(**sizes, algorithm="ppo", critic_lr=4e-6, critic_warmup_ratio=1 / 3)
    )
    for step, number, rate in ((0, 0, 1e-6), (0, 2, 3e-6), (2, 0, 4e-6), (3, 2, 4e-6)):
        set_lr(state, step, number)
        assert state.critic_optimizer.param_groups[0]["lr"] == pytest.approx(rate)


# ----------------------------------------------------------------------------------- what is logged


def test_the_gap_to_the_sampler_is_a_mean_over_the_tokens_of_the_first_update():
    state = make_parts(GRPO)
    batch = unequal_batch(GRPO)
    update(state, batch)
    everyone = torch.arange(8)
    assert sampler_stats(batch, everyone, "none") == {}  # documents that are trained on
    batch.sampled_logprobs = batch.logprobs - 0.5 * batch.response_mask
    batch.sampled_logprobs[2] -= 1.0  # 9 of the 45 tokens are off by 1.5: (36 · 0.5 + 9 · 1.5) / 45
    result = sampler_stats(batch, everyone, "none")
    assert result == pytest.approx({"logprob_gap": 0.7, "logprob_gap_max": 1.5}, abs=1e-5)
    # Rows 0, 1, 6 and 7 of 11, 2, 17 and 3 tokens; the rewards of 6 and 7 are equal: not scored.
    batch.ref_logprobs = batch.values = None
    batch.sampled_logprobs[1] -= 0.5
    result = sampler_stats(batch, torch.tensor([0, 1, 6, 7]), "none")
    assert result["logprob_gap"] == pytest.approx((11 * 0.5 + 2 * 1.0) / 13, abs=1e-5)


def test_records_become_one_and_extremes_stay_extremes():
    one = {"loss": 0.25, "grad_norm": 3.0, "ratio_min": 0.5, "ratio_max": 1.5, "logprob_gap": 0.5}
    two = {"loss": -1.0, "grad_norm": 1.0, "ratio_min": 0.75, "ratio_max": 2.0}
    expected = one | {"ratio_max": 2.0}  # a step's first update alone has the gap
    assert merge_records([one, two], sum) == expected | {"loss": -0.75}
    assert merge_records([one, two], mean) == expected | {"loss": -0.375}
    # Nothing in the first update taught: what the second says is kept.
    assert merge_records([{"loss": 0.0, "grad_norm": 0.0}, one], mean) == one | {"loss": 0.125}
