"""Tests of update.py: micro-batches do not change the gradient; documents are not trained on."""

import copy
import dataclasses

import pytest
import torch
from accelerate import Accelerator
from conftest import model_of, same, small

import ppo
import update as update_file
from data import Question
from papers import PROTOCOLS
from policy import Batch, Policy, collate
from settings import Settings
from train import mean, sampler_gap, set_lr, shuffled_updates
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
    """Returns random tokens; `document` = (start, end) are those that the environment wrote."""
    t = Trajectory(Question("q", "?", ["!"]), PROTOCOLS["ur2"], prompt_ids=[1, 2, 3])
    ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
    start, end = document or (length, length)
    t.append_model(ids[:start], [-1.0] * start, "a")
    t.append_environment(ids[start:end], "b", "documents")
    t.append_model(ids[end:], [-1.0] * (length - end), "c")
    return t


class Recorder(torch.optim.SGD):
    """Keeps the gradients instead of changing the weights."""

    def step(self):
        self.gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]


def make_parts(settings: Settings) -> TrainState:
    """Returns a state with a policy and, for PPO, a critic; the optimizers only keep gradients."""
    policy = Policy(copy.deepcopy(TINY))
    critic = ppo.Critic(copy.deepcopy(TINY.base_model))
    # The head must not be 0, so that a gradient reaches every layer.
    torch.nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    state = TrainState(
        settings, Accelerator(), policy, policy, Recorder(policy.parameters()), recompute=False
    )
    if settings.algorithm == "ppo":
        state.critic = state.critic_model = critic
        state.critic_optimizer = Recorder(critic.parameters())
    return state


def unequal_batch(settings: Settings) -> Batch:
    """Returns 8 trajectories of 1 to 20 tokens, one fully masked; π_old and π_ref differ from π."""
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
    batch.overlong = torch.arange(8) == 3  # only DAPO reads it
    batch.advantages = ALGORITHMS[settings.algorithm].compute_advantages(batch, settings)
    return batch


def gradient_of(batch: Batch, settings: Settings, step=update) -> tuple[list, dict]:
    state = make_parts(settings)
    totals = step(state, copy.deepcopy(batch))
    optimizer = state.optimizer if step is update else state.critic_optimizer
    return optimizer.gradients, totals


def largest_difference(one, other) -> float:
    """Returns the largest difference, relative to the largest entry of the first gradient."""
    largest = max(g.abs().max() for g in one)
    return (max((a - b).abs().max() for a, b in zip(one, other, strict=True)) / largest).item()


@pytest.fixture
def unclipped(monkeypatch):
    monkeypatch.setattr(update_file, "MAX_GRAD_NORM", 1e9)


# ------------------------------------------------------ the gradient does not depend on the cuts

KL = {"kl_coef": 0.1, "kl_estimator": "k2"}
CASES = [
    Settings(algorithm=algorithm, loss_aggregation=aggregation, group_size=2, **kl)
    for algorithm in ("reinforce_pp", "reinforce_pp_baseline", "dapo", "ppo", "grpo")
    for aggregation in (("token", "question") if algorithm == "dapo" else ("sequence", "token"))
    for kl in ({}, KL | {"kl_estimator": "k1"} if algorithm == "reinforce_pp" else KL)
]
GRPO = CASES[-1]


def name_of(settings):
    return f"{settings.algorithm}-{settings.loss_aggregation}{'-kl' if settings.kl_coef else ''}"


@pytest.mark.parametrize("settings", CASES, ids=name_of)
def test_the_gradient_is_independent_of_the_micro_batches(settings, unclipped):
    steps = [update, update_critic] if settings.algorithm == "ppo" else [update]
    batch = unequal_batch(settings)
    for step in steps:
        whole, totals = gradient_of(batch, settings, step)
        assert max(g.abs().max() for g in whole) > 1e-3
        for budget in (1, 25):  # every row alone; uneven micro-batches
            small_cuts = dataclasses.replace(settings, tokens_per_micro_batch=budget)
            cut, cut_totals = gradient_of(batch, small_cuts, step)
            assert largest_difference(whole, cut) < 1e-5
            assert cut_totals == pytest.approx(totals, abs=1e-5, rel=1e-5)


def test_numbers_on_documents_and_prompts_have_no_effect():
    # The model reads documents, but log-probs and advantages on them must have no effect.
    batch, changed = unequal_batch(GRPO), unequal_batch(GRPO)
    for tensor in (changed.old_logprobs, changed.ref_logprobs, changed.advantages):
        tensor[changed.response_mask == 0] = float("inf")
    assert same(*(gradient_of(one, GRPO)[0] for one in (batch, changed)))


# ------------------------------------------------------- rows that teach nothing are not computed


def half_equal(settings: Settings) -> Batch:
    """Returns unequal_batch without KL and critic: rows 2, 3 and 6, 7 have equal rewards, and
    row 0 is overlong.
    """
    batch = unequal_batch(settings)
    batch.ref_logprobs = batch.values = None
    batch.rewards[3], batch.overlong = batch.rewards[2], torch.arange(8) == 0
    batch.advantages = ALGORITHMS[settings.algorithm].compute_advantages(batch, settings)
    batch.returns = None
    return batch


@pytest.mark.parametrize("settings", [s for s in CASES if s.algorithm != "ppo"], ids=name_of)
def test_rows_that_teach_nothing_are_not_computed_and_the_gradient_is_the_same(
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
    # Row 5 has no sampled token. reinforce_pp whitens the advantages over the whole batch, so its
    # groups with equal rewards teach, too.
    expected = {"reinforce_pp": 7, "dapo": 2}.get(settings.algorithm, 3)
    assert sum(computed) == expected
    monkeypatch.setattr(update_file, "rows_that_teach", lambda _: torch.arange(8))
    whole, whole_totals = gradient_of(batch, settings)
    assert sum(computed) == expected + 8
    # Only the order of summation differs. The norm is between 1 and 8.
    near = 5e-6 * max(1.0, whole_totals["grad_norm"])
    assert largest_difference(whole, some) < near
    for name in ("loss", "grad_norm"):
        assert totals[name] == pytest.approx(whole_totals[name], abs=near)


def test_an_update_in_which_no_row_teaches_makes_no_step_and_logs_skipped():
    settings = dataclasses.replace(GRPO, kl_coef=0.0)
    state = make_parts(settings)
    batch = half_equal(settings)
    equal = batch.rows(torch.tensor([2, 3, 6, 7]))
    entropy = -equal.old_logprobs[equal.response_mask.bool()].mean().item()
    expected = pytest.approx(entropy, abs=1e-5)
    figures = {"skipped": 1, "loss": 0, "grad_norm": 0, "entropy_mc": expected}
    assert update(state, equal) == figures
    assert not hasattr(state.optimizer, "gradients") and state.version == 0
    # These rows do teach if the loss has a KL, or if there is a critic.
    for name in ("ref_logprobs", "values"):
        other = dataclasses.replace(equal, **{name: equal.old_logprobs})
        assert rows_that_teach(other).tolist() == [0, 1, 2, 3]


def test_computing_logprobs_and_updating_leave_the_batch_unchanged():
    batch = unequal_batch(GRPO)
    before = copy.deepcopy(batch)
    state = make_parts(GRPO)
    compute_logprobs(state, state.policy, batch)
    update(state, batch)
    batch.token_weights = batch.logprobs = None  # only these are set by an update
    torch.testing.assert_close(vars(batch), vars(before), rtol=0, atol=0)


# ------------------------------------------------------ the rows of an update, the learning rate


def test_fewer_rows_make_fewer_updates_and_the_learning_rate_follows_the_step():
    sizes = {"questions_per_step": 4, "group_size": 2, "trajectories_per_update": 3, "steps": 4}
    settings = Settings(**sizes, lr=1.2e-5, lr_schedule="linear")
    state = make_parts(settings)
    rates = []
    for step, updates in enumerate([[3, 3, 2], [2], [2, 2]]):
        dealt = shuffled_updates(step, torch.zeros(sum(updates)), settings)
        assert [len(rows) for rows in dealt] == updates
        assert sorted(torch.cat(dealt).tolist()) == list(range(sum(updates)))
        rates += [set_lr(state, step, number) for number in range(len(dealt))]
        assert state.optimizer.param_groups[0]["lr"] == rates[-1]
    # The rate falls by 1e-6 at each of 12 updates. Step 0 has numbers 0, 1 and 2, step 1 has 3, and
    # step 2 has 6 and 7.
    assert rates == pytest.approx([1.2e-5, 1.1e-5, 1e-5, 9e-6, 6e-6, 5e-6])
    # The critic has its own warm-up of a third of the 12 updates; then its rate is constant.
    state = make_parts(
        Settings(**sizes, algorithm="ppo", critic_lr=4e-6, critic_warmup_ratio=1 / 3)
    )
    for step, number, rate in ((0, 0, 1e-6), (0, 2, 3e-6), (2, 0, 4e-6), (3, 2, 4e-6)):
        set_lr(state, step, number)
        assert state.critic_optimizer.param_groups[0]["lr"] == pytest.approx(rate)


# ---------------------------------------------------------------------------------- logged metrics


def test_the_logprob_gap_is_a_mean_over_the_tokens_of_the_first_update():
    batch = unequal_batch(GRPO)
    update(make_parts(GRPO), batch)
    assert sampler_gap(batch) == {}  # as with documents in the loss
    batch.sampled_logprobs = batch.logprobs - 0.5 * batch.response_mask
    batch.sampled_logprobs[2] -= 1.0  # 9 of the 45 tokens are off by 1.5: (36 · 0.5 + 9 · 1.5) / 45
    expected = {"logprob_gap": 0.7, "logprob_gap_max": 1.5}
    assert sampler_gap(batch) == pytest.approx(expected, abs=1e-5)
    # Without a KL the last two rows, of 20 tokens, do not count, because their rewards are equal:
    # (16 · 0.5 + 9 · 1.5) / 25.
    batch.ref_logprobs = batch.values = None
    assert sampler_gap(batch)["logprob_gap"] == pytest.approx(0.86, abs=1e-5)


def test_records_are_merged_by_sum_or_mean_and_extremes_by_min_or_max():
    one = {"loss": 0.25, "grad_norm": 3.0, "ratio_min": 0.5, "ratio_max": 1.5, "logprob_gap": 0.5}
    two = {"loss": -1.0, "grad_norm": 1.0, "ratio_min": 0.75, "ratio_max": 2.0}
    expected = one | {"ratio_max": 2.0}  # only a step's first update has the gap
    assert merge_records([one, two], sum) == expected | {"loss": -0.75}
    assert merge_records([one, two], mean) == expected | {"loss": -0.375}
