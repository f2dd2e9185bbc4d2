"""train.py: one gradient however the batch is cut, nothing learned from documents, and runs that
survive what happens.
"""

import copy
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import in_two_processes
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

import grpo
import ppo
import recipes
import rewards
import train
from data import Question
from errors import InputError, run_main
from policy import Batch, Policy, load_policy, save_policy
from prompts import PROTOCOLS, build_prompt, frame_documents
from recipes import Recipe, checkpoints, parse_recipe
from rollout import encode
from scale.shards import full
from sft import Example, train_sft
from train import (
    Hints,
    Run,
    Trainer,
    console_line,
    make_batch,
    measure,
    over_processes,
    score_batch,
    starting_model,
    update,
    update_critic,
    value_batch,
)
from trajectory import Trajectory
from world.toy import make_model, make_tokenizer
from world.world import World

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
}


# ----------------------------------------------------------------------------------- small material


def traces(tokenizer, questions, protocol=PROTOCOLS["ur2"], search=True) -> list[Example]:
    """Search for the first paragraph's title, read it, answer: what a model must have seen to
    search at all.
    """
    begin, end = protocol.query_tags
    examples = []
    for question in questions:
        title, text = question.references[0].title, question.references[0].text[:40]
        pieces = [
            (f"{begin} {title}{end}", 1),
            (frame_documents(protocol, text), 0),
            (f"\\boxed{{ {question.answers[0]}}}", 1),
        ]
        ids = build_prompt(protocol, question, tokenizer)
        mask = [0] * len(ids)
        for piece, kind in pieces if search else pieces[2:]:
            ids += (new := encode(tokenizer, piece))
            mask += [kind] * len(new)
        examples.append(Example([*ids, tokenizer.eos_token_id], [*mask, 1]))
    return examples


def plain_model(size: int, seed: int = 0) -> Qwen2ForCausalLM:
    """The built-in model's shape without the heads that it is born with: it learns slower, and its
    gradients are smaller.
    """
    config = make_model(size).config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def save_searching_model(path, seed=0):
    """A tiny model that has seen a few traces for a moment: it searches often, and is wrong in many
    ways.
    """
    tokenizer = make_tokenizer()
    policy = Policy(plain_model(len(tokenizer), seed))
    examples = traces(tokenizer, World(0).questions("train", "one_hop")[:6])
    train_sft(policy, lambda step: examples, 20, 4e-3)
    save_policy(policy, tokenizer, path)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_searching_model(tmp_path_factory.mktemp("start") / "model")


def flags(model, runs, *more) -> list[str]:
    small = {
        "model": model,
        "runs": runs,
        "name": "t",
        "group_size": 2,
        "questions_per_step": 2,
        "steps": 2,
        "lr": 1e-3,
        "max_turn_tokens": 12,
        "max_searches": 2,
        "documents_per_search": 1,
        "document_tokens": 40,
        "title_boost": 4,
        "trajectories_per_update": 0,
        "threads": 1,
    }
    return [*itertools.chain(*((f"--{k}", str(v)) for k, v in small.items())), *more]


def recipe_for(model, runs, *more) -> Recipe:
    return parse_recipe(flags(model, runs, *more))


def rows_of(folder) -> list[dict]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.endswith("_seconds")} for line in lines
    ]


def weights_of(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.parameters()]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ----------------------------------------------------------- the gradient, however the batch is cut

TINY = plain_model(40, seed=3)


def trajectory(generator, length, document=None, vocabulary=40):
    """Random tokens; `document` = (start, end) of what the environment wrote."""
    t = Trajectory(Question("q", "?", ["!"]), PROTOCOLS["ur2"], prompt_ids=[1, 2, 3])
    ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
    start, end = document or (length, length)
    t.append_model(ids[:start], [-1.0] * start, "a")
    t.append_environment(ids[start:end], "b", "documents")
    t.append_model(ids[end:], [-1.0] * (length - end), "c")
    return t


def unequal_batch(recipe: Recipe) -> Batch:
    """Eight trajectories of 0 to 20 tokens, some with documents, one all masked; π_old and π_ref a
    little off π.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (20, (3, 12)),
        (2, None),
        (9, None),
        (14, (1, 13)),
        (1, None),
        (5, (0, 5)),
        (17, None),
        (4, (1, 2)),
    ]
    rewards = [1.0, 0.0, 0.5, 2.0, -1.0, 1.0, 0.3, 0.3]
    batch = make_batch(
        [trajectory(generator, *shape) for shape in shapes], rewards, recipe, pad_id=0
    )
    logprobs = score_batch(Policy(TINY), batch, recipe, Accelerator())
    batch.old_logprobs = logprobs + 0.3 * torch.randn(logprobs.shape, generator=generator)
    batch.ref_logprobs = (
        logprobs + 0.3 * torch.randn(logprobs.shape, generator=generator)
        if recipe.kl_coef
        else None
    )
    batch.values = torch.randn(logprobs.shape, generator=generator)
    batch.overlong[3] = True  # only DAPO looks at it
    batch.advantages = train.ALGORITHMS[recipe.algorithm].compute_advantages(batch, recipe)
    return batch


class Recorder:
    """An optimizer that keeps the gradient instead of taking the step."""

    def __init__(self, policy):
        self.policy, self.gradients = policy, None

    def step(self):
        self.gradients = [p.grad.clone() for p in self.policy.parameters()]

    def zero_grad(self):
        self.policy.zero_grad()


def gradient_of(batch: Batch, recipe: Recipe) -> tuple[list, dict]:
    policy = Policy(copy.deepcopy(TINY))
    recorder = Recorder(policy)
    algorithm = train.ALGORITHMS[recipe.algorithm]
    totals = update(
        policy, recorder, algorithm, copy.deepcopy(batch), recipe, Accelerator(), fresh=False
    )
    return recorder.gradients, totals


def largest_difference(one, other) -> float:
    """Relative to the largest entry of the gradient."""
    scale = max(g.abs().max().item() for g in one)
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True)) / scale


CASES = [
    Recipe(algorithm=algorithm, loss_aggregation=aggregation, group_size=2, max_grad_norm=1e9, **kl)
    for algorithm in ("reinforce_pp", "reinforce_pp_baseline", "dapo", "ppo", "grpo")
    for aggregation in (("token",) if algorithm == "dapo" else ("sequence", "token"))
    for kl in (
        {},
        {
            "kl_coef": 0.1,
            "kl_place": "reward" if algorithm == "reinforce_pp" else "loss",
            "kl_estimator": "k2",
        },
    )
]


def name_of(recipe):
    return f"{recipe.algorithm}-{recipe.loss_aggregation}{'-kl' if recipe.kl_coef else ''}"


@pytest.mark.parametrize("recipe", CASES, ids=name_of)
def test_the_gradient_is_the_same_however_the_batch_is_cut_into_micro_batches(recipe):
    batch = unequal_batch(recipe)
    whole, totals = gradient_of(batch, dataclasses.replace(recipe, tokens_per_micro_batch=10_000))
    assert max(g.abs().max() for g in whole) > 1e-3
    for budget in (1, 25, 44):  # every row alone; two ragged cuts
        cut, cut_totals = gradient_of(
            batch, dataclasses.replace(recipe, tokens_per_micro_batch=budget)
        )
        assert largest_difference(whole, cut) < 1e-6
        assert cut_totals == pytest.approx(totals, abs=1e-5)


def make_critic() -> ppo.Critic:
    """Its output is not 0, so that a gradient reaches every layer."""
    critic = ppo.Critic(copy.deepcopy(TINY.base_model))
    torch.nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return critic


def critic_gradient_of(batch: Batch, recipe: Recipe) -> tuple[list, dict]:
    critic = make_critic()
    recorder = Recorder(critic)
    totals = update_critic(critic, recorder, copy.deepcopy(batch), recipe, Accelerator())
    return recorder.gradients, totals


def test_the_critics_gradient_is_the_same_however_the_batch_is_cut_into_micro_batches():
    recipe = Recipe(
        algorithm="ppo", group_size=2, max_grad_norm=1e9, gae_lambda=0.9, value_clip=0.5
    )
    batch = unequal_batch(recipe)
    whole, totals = critic_gradient_of(batch, recipe)
    assert max(g.abs().max() for g in whole) > 1e-3 and 0 < totals["value_clip_fraction"] < 1
    for budget in (1, 25, 44):
        cut, cut_totals = critic_gradient_of(
            batch, dataclasses.replace(recipe, tokens_per_micro_batch=budget)
        )
        assert largest_difference(whole, cut) < 1e-5
        assert cut_totals == pytest.approx(totals, abs=1e-5)


def test_the_critics_loss_is_the_mean_over_all_model_tokens_and_no_document():
    recipe = Recipe(algorithm="ppo", group_size=2, value_clip=0.0)
    batch, loud = unequal_batch(recipe), unequal_batch(recipe)
    mask = batch.response_mask.bool()
    with torch.no_grad():
        expected = (make_critic()(batch.tokens) - batch.returns)[mask].square().mean() / 2
    gradient, totals = critic_gradient_of(batch, recipe)
    assert totals["value_loss"] == pytest.approx(expected.item(), rel=1e-4)
    for tensor in (loud.values, loud.returns):
        tensor[~mask] = float("inf")
    assert same(gradient, critic_gradient_of(loud, recipe)[0])


def test_the_critic_learns_the_returns_and_its_values_then_explain_them():
    recipe = Recipe(algorithm="ppo", group_size=2, value_clip=0.0)
    batch, critic = unequal_batch(recipe), make_critic()
    batch.tokens[:, 0] = torch.arange(
        3, 11
    )  # prompts that differ: nobody can foresee two rewards from one prompt
    optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3)
    losses = [
        update_critic(critic, optimizer, batch, recipe, Accelerator())["value_loss"]
        for _ in range(40)
    ]
    values = value_batch(critic, batch, recipe, Accelerator())
    assert losses[-1] < 0.1 * losses[0]
    assert ppo.explained_variance(values, batch.returns, batch.response_mask) > 0.8


def test_values_in_micro_batches_are_those_of_the_whole_batch():
    recipe, critic = Recipe(algorithm="ppo", group_size=2), make_critic()
    batch = unequal_batch(recipe)
    with torch.no_grad():
        whole = torch.where(batch.response_mask.bool(), critic(batch.tokens), 0)
    for budget in (1, 25, 10_000):
        values = value_batch(
            critic, batch, dataclasses.replace(recipe, tokens_per_micro_batch=budget), Accelerator()
        )
        torch.testing.assert_close(values, whole, atol=1e-5, rtol=1e-5)


def test_an_overlong_trajectory_is_one_cut_off_by_length_without_an_answer():
    def ended(reason, text):
        t = trajectory(torch.Generator().manual_seed(0), 3)
        t.append_model([5], [-1.0], text)
        t.stop_reason = reason
        return t

    rows = [
        ended("length", "well"),
        ended("length", "\\boxed{elm} and"),
        ended("eos", "well"),
        ended("refused", "well"),
    ]
    assert make_batch(rows, [0.0] * 4, Recipe(group_size=2), 0).overlong.tolist() == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_the_usual_mean_of_micro_batch_means_is_another_gradient(aggregation):
    recipe = Recipe(
        algorithm="grpo",
        loss_aggregation=aggregation,
        group_size=2,
        max_grad_norm=1e9,
        tokens_per_micro_batch=25,
    )
    batch, policy = unequal_batch(recipe), Policy(copy.deepcopy(TINY))
    cuts = train.micro_batches(batch.response_mask, 25)
    for rows in cuts:  # each micro-batch with weights of its own, then the mean over micro-batches
        micro = batch.rows(rows)
        loss, _ = grpo.compute_loss(policy(micro.tokens, mask=micro.response_mask), micro, recipe)
        (loss * grpo.compute_token_weights(micro, recipe)).sum().div(len(cuts)).backward()
    right, _ = gradient_of(batch, recipe)
    assert largest_difference(right, [p.grad for p in policy.parameters()]) > 0.05


def test_documents_and_prompts_weigh_nothing_in_the_update():
    # Other documents of the same tokens' count change what the model reads, but whatever log-probs,
    # advantages and KL terms stand on their columns changes nothing at all.
    recipe = CASES[-1]
    batch, loud = unequal_batch(recipe), unequal_batch(recipe)
    inserted = loud.response_mask == 0
    for tensor in (loud.old_logprobs, loud.ref_logprobs, loud.advantages):
        tensor[inserted] = float("inf")
    assert same(gradient_of(batch, recipe)[0], gradient_of(loud, recipe)[0])


def test_scoring_and_updating_change_nothing_in_the_batch():
    recipe = dataclasses.replace(CASES[-1], tokens_per_micro_batch=25)
    batch = unequal_batch(recipe)
    before, policy = copy.deepcopy(batch), Policy(copy.deepcopy(TINY))
    score_batch(policy, batch, recipe, Accelerator())
    update(
        policy,
        torch.optim.SGD(policy.parameters(), 0.1),
        grpo,
        batch,
        recipe,
        Accelerator(),
        fresh=True,
    )
    for field in dataclasses.fields(Batch):
        old, new = getattr(before, field.name), getattr(batch, field.name)
        if field.name == "token_weights":  # the one thing an update adds
            assert new.sum().item() == pytest.approx(1.0)
        else:
            assert torch.equal(old, new) if torch.is_tensor(old) else old == new, field.name


def test_scoring_in_micro_batches_is_scoring_the_whole_batch():
    recipe = Recipe(group_size=2, kl_coef=0.0)
    batch, policy = unequal_batch(recipe), Policy(TINY)
    with torch.no_grad():
        whole = policy(batch.tokens, mask=batch.response_mask)
    for budget in (1, 25, 10_000):
        scored = score_batch(
            policy, batch, dataclasses.replace(recipe, tokens_per_micro_batch=budget), Accelerator()
        )
        assert torch.allclose(scored, whole, atol=1e-5)


def test_mask_documents_false_takes_in_every_token_behind_the_prompt():
    # prompt 3, then 2 sampled, 2 inserted, 1 sampled: columns 2, 3 and 6; without the mask 2 to 6
    t = trajectory(torch.Generator().manual_seed(0), 5, (2, 4))
    short = trajectory(torch.Generator().manual_seed(1), 2)
    masked = make_batch([t, short], [0.0, 1.0], Recipe(group_size=2), 0).response_mask
    ablated = make_batch(
        [t, short], [0.0, 1.0], Recipe(group_size=2, mask_documents=False), 0
    ).response_mask
    assert masked.tolist() == [[0, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 0]]
    assert ablated.tolist() == [[0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0]]


def test_totals_of_several_processes_add_up_and_extremes_stay_extremes(monkeypatch):
    parts = [
        {"loss": 0.25, "ratio_min": 0.5, "ratio_max": 1.5},
        {"loss": -1.0, "ratio_min": 0.75, "ratio_max": 2.0},
    ]
    monkeypatch.setattr(train, "gather_object", lambda mine: parts)
    two = type("TwoProcesses", (), {"num_processes": 2})()
    assert over_processes(parts[0], two) == {"loss": -0.75, "ratio_min": 0.5, "ratio_max": 2.0}


# ----------------------------------------------------------------------------------- one step, live


@pytest.fixture(scope="module")
def trainer(model, tmp_path_factory):
    return Trainer(recipe_for(model, tmp_path_factory.mktemp("runs"), "--questions_per_step", "6"))


@pytest.fixture(scope="module")
def sampled(trainer):
    trajectories = trainer.roll_out(0)
    assert sum(len(t.searches) for t in trajectories) > 3, "the model of these tests must search"
    return trajectories


def test_the_rollouts_own_logprobs_are_those_of_a_scoring_pass(trainer, sampled):
    batch = make_batch(sampled, [0.0] * len(sampled), trainer.recipe, 0)
    again = trainer.score(trainer.policy, batch)
    assert batch.response_mask.sum() > 50 and batch.old_logprobs.min() < -0.5
    assert (again - batch.old_logprobs).abs().max() < 1e-4


def test_what_is_trained_is_what_was_sampled_and_no_document(trainer, sampled):
    batch = make_batch(sampled, [0.0] * len(sampled), trainer.recipe, 0)
    decode = trainer.tokenizer.decode
    for row, t in enumerate(sampled):
        trained = decode(batch.tokens[row, 1:][batch.response_mask[row].bool()])
        assert trained == t.model_text
        assert "<|begin_of_documents|>" not in trained or "<|begin_of_documents|>" in t.model_text


@pytest.mark.parametrize("more, exactly", [((), False), (("--old_logprobs", "recompute"), True)])
def test_the_first_update_has_ratio_one(model, tmp_path, more, exactly):
    folder = train.train(recipe_for(model, tmp_path, "--steps", "1", *more))
    record = rows_of(folder)[0]
    assert record["clip_fraction"] == 0
    assert (record["ratio_min"], record["ratio_max"]) == (
        (1, 1) if exactly else pytest.approx((1, 1), abs=1e-4)
    )


@pytest.mark.parametrize("more", [(), ("--old_logprobs", "recompute")])
def test_a_second_update_on_the_same_rollout_is_off_policy(model, tmp_path, more):
    # at temperature 2 two samples of a group are never the same text, which a better and a worse
    # reward would not move
    trainer = Trainer(
        recipe_for(model, tmp_path, "--temperature", "2", "--trajectories_per_update", "2", *more)
    )
    pay(trainer, [1.0, 0.0, 0.0, 1.0])
    record = trainer.step(0)[0]
    assert record["ratio_min"] < 0.999 or record["ratio_max"] > 1.001


def test_the_first_update_s_rows_need_no_scoring_pass_and_the_step_is_the_same(
    model, tmp_path, monkeypatch
):
    # Four rows in two updates: π_old of the second one's rows must be known before the first one
    # moves the weights.
    moved, scored = [], []
    for every in (False, True):
        trainer = Trainer(
            recipe_for(
                model,
                tmp_path,
                "--old_logprobs",
                "recompute",
                "--trajectories_per_update",
                "2",
                "--temperature",
                "2",
            )
        )
        pay(trainer, [1.0, 0.0, 0.0, 1.0])
        trainer.optimizer = torch.optim.SGD(
            trainer.policy.parameters(), 0.1
        )  # Adam's division would blow rounding errors up
        before, score = weights_of(trainer.policy), trainer.score
        if (
            every
        ):  # the slow twin: all rows are scored, and no update takes its own forward pass for π_old
            learn = trainer.update_all

            def update_all(step, batch, rows, trainer=trainer, score=score, learn=learn):
                batch.old_logprobs = score(trainer.policy, batch)
                monkeypatch.setattr(Trainer, "recompute", False)
                return learn(step, batch, rows)

            trainer.update_all = update_all
        else:
            trainer.score = lambda policy, batch, score=score: (
                scored.append(len(batch)) or score(policy, batch)
            )
        trainer.step(0)
        moved.append([a - b for a, b in zip(weights_of(trainer.policy), before, strict=True)])
    assert scored == [2]
    assert max(m.abs().max() for m in moved[0]) > 1e-5
    assert max((a - b).abs().max() for a, b in zip(*moved, strict=True)) < 1e-6


def test_a_kl_in_the_reward_uses_recomputed_logprobs_where_the_rollout_has_none(model, tmp_path):
    # Documents that are trained on (the ablation) have no log-prob from the rollout. The reference
    # is the policy itself in step 0, so every k1 is 0; with the rollout's zeros standing in, k1
    # would be −log π_ref, and the advantages wrong.
    more = (
        "--mask_documents",
        "false",
        "--kl_coef",
        "0.1",
        "--kl_place",
        "reward",
        "--kl_estimator",
        "k1",
        "--algorithm",
        "reinforce_pp",
    )
    trainer, seen = Trainer(recipe_for(model, tmp_path, *more)), {}
    trainer.update_all = lambda step, batch, trajectories: seen.update(batch=batch) or {}
    trainer.step(0)
    batch = seen["batch"]
    assert (batch.old_logprobs - batch.ref_logprobs).abs().max() < 1e-4


class Marks:
    """In place of the scorer: mark(trajectories) -> (components, correct)."""

    def __init__(self, mark):
        self.mark = mark

    def __call__(self, trajectories, step):
        return self.mark(trajectories)

    def stats(self):
        return {}


def pay(trainer, amounts: list[float]) -> None:
    """The trainer's trajectories earn these rewards, in their order."""
    trainer.scorer = Marks(
        lambda trajectories: ([{"answer": r} for r in amounts], [r > 0 for r in amounts])
    )


def test_all_rewards_equal_leave_the_weights_as_they_were_and_one_better_answer_moves_them(
    model, tmp_path
):
    for algorithm in ("grpo", "reinforce_pp_baseline"):
        trainer = Trainer(recipe_for(model, tmp_path, "--algorithm", algorithm))
        before = weights_of(trainer.policy)
        pay(trainer, [0.7] * 4)
        record, _, _ = trainer.step(0)
        assert same(before, weights_of(trainer.policy))
        assert record["frac_reward_zero_std"] == 1 and record["grad_norm"] == 0
        pay(trainer, [1.0, 0.0, 0.0, 0.0])
        record, _, _ = trainer.step(1)
        assert (
            not same(before, weights_of(trainer.policy)) and record["frac_reward_zero_std"] == 0.5
        )


def test_a_step_makes_the_rewarded_answer_likelier_than_the_other(model, tmp_path, monkeypatch):
    trainer = Trainer(
        recipe_for(
            model, tmp_path, "--lr", "1e-4", "--algorithm", "grpo", "--questions_per_step", "1"
        )
    )
    trajectories = trainer.roll_out(0)
    monkeypatch.setattr(trainer, "roll_out", lambda step, draw: trajectories)
    pay(trainer, [1.0, 0.0])
    batch = make_batch(trajectories, [0.0, 0.0], trainer.recipe, 0)
    lengths = batch.response_mask.sum(1)  # the loss is a mean over each trajectory's tokens
    before = trainer.score(trainer.policy, batch).sum(1) / lengths
    trainer.step(0)
    after = trainer.score(trainer.policy, batch).sum(1) / lengths
    # by how much, not each for itself: two samples of one question share most of their words
    assert after[0] - after[1] > before[0] - before[1]


def test_a_loss_that_is_not_finite_stops_with_the_step_the_questions_and_the_batch(model, tmp_path):
    recipe = recipe_for(model, tmp_path, "--questions_per_step", "2")
    trainer = Trainer(recipe)
    trainer.step(0)
    before = weights_of(trainer.policy)
    pay(trainer, [float("nan")] * 4)
    with pytest.raises(InputError, match=r"step 1: loss nan") as error:
        trainer.step(1)
    assert same(before, weights_of(trainer.policy))
    assert "\n" not in str(error.value) and all(
        q.id in str(error.value) for q in trainer.stream.take(1)
    )
    saved = torch.load(re.search(r"The batch is in (\S+\.pt)", str(error.value))[1])
    assert saved["tokens"].shape[0] == 4 and saved["rewards"].isnan().all()


# ----------------------------------------------------------------- DAPO: more draws, and fewer rows


def scripted(trainer, rights: list[list[tuple[int, ...]]]) -> list[int]:
    """Each draw's groups are right as written, such as (1, 0); question ids say which draw they are
    of. -> the draws made.
    """
    made = []

    def roll_out(step, draw):
        made.append(draw)
        generator = torch.Generator().manual_seed(100 * step + draw)
        rows = [(g, right) for g, group in enumerate(rights[draw]) for right in group]
        trajectories = [trajectory(generator, 4 + i, vocabulary=30) for i in range(len(rows))]
        for t, (g, right) in zip(trajectories, rows, strict=True):
            t.question = Question(
                f"draw{draw} question{g} {'right' if right else 'wrong'}", "?", ["!"]
            )
        return trajectories

    trainer.roll_out = roll_out

    def mark(trajectories):
        right = [t.question.id.endswith("right") for t in trajectories]
        return [{"answer": float(r)} for r in right], right

    trainer.scorer = Marks(mark)
    return made


def dapo_trainer(model, runs, *more) -> Trainer:
    return Trainer(
        recipe_for(
            model,
            runs,
            "--algorithm",
            "dapo",
            "--questions_per_step",
            "2",
            "--max_resample",
            "2",
            *more,
        )
    )


def groups_of(sampled) -> list[str]:
    """draw and question of each kept group"""
    return [sampled.trajectories[i].question.id.rsplit(" ", 1)[0] for i in sampled.kept[::2]]


FULL, NONE, ALL = (1, 0), (0, 0), (1, 1)  # a group of two: informative, all wrong, all right


@pytest.mark.parametrize(
    "rights, draws, kept",
    [
        (
            [[FULL, FULL]],
            1,
            ["draw0 question0", "draw0 question1"],
        ),  # enough at once: no further draw
        ([[ALL, FULL], [NONE, FULL]], 2, ["draw0 question1", "draw1 question1"]),
        (
            [[ALL, FULL], [FULL, FULL]],
            2,
            ["draw0 question1", "draw1 question0"],
        ),  # the surplus is cut from behind
        (
            [[ALL, NONE], [NONE, NONE], [ALL, FULL]],
            3,
            ["draw2 question1"],
        ),  # no draw is left: fewer than asked
        ([[ALL, NONE], [NONE, ALL], [ALL, ALL]], 3, []),
    ],
)
def test_groups_that_teach_nothing_are_replaced_while_draws_are_left(
    rights, draws, kept, model, tmp_path
):
    trainer = dapo_trainer(model, tmp_path)
    made = scripted(trainer, rights)
    sampled = trainer.sample(0)
    assert made == list(range(draws)) and sampled.draws == draws
    assert groups_of(sampled) == kept
    assert len(sampled.trajectories) == len(sampled.components) == 4 * draws


def test_other_algorithms_draw_once_and_keep_every_group(model, tmp_path):
    trainer = Trainer(recipe_for(model, tmp_path, "--algorithm", "grpo", "--max_resample", "5"))
    made = scripted(trainer, [[ALL, NONE]])
    assert trainer.sample(0).kept == [0, 1, 2, 3] and made == [0]
    assert "resampled" not in trainer.step(1)[0]


def test_without_further_draws_uninformative_groups_are_only_dropped(model, tmp_path):
    trainer = dapo_trainer(model, tmp_path, "--max_resample", "0")
    made = scripted(trainer, [[ALL, FULL]])
    assert groups_of(trainer.sample(0)) == ["draw0 question1"] and made == [0]


def test_the_numbers_of_a_step_are_of_all_that_was_sampled_and_the_update_of_what_was_kept(
    model, tmp_path
):
    trainer, seen = dapo_trainer(model, tmp_path), {}
    scripted(trainer, [[ALL, ALL], [NONE, FULL], [ALL, FULL]])
    learn = trainer.update_all
    trainer.update_all = lambda step, batch, rows: (
        seen.update(batch=batch, rows=rows) or learn(step, batch, rows)
    )
    record, trajectories, _ = trainer.step(0)
    assert (
        record["reward"] == pytest.approx((2 + 2 + 0 + 1 + 2 + 1) / 12) and len(trajectories) == 12
    )
    assert (record["resampled"], record["informative"], record["skipped"]) == (
        2,
        pytest.approx(2 / 6),
        0,
    )
    assert [t.question.id for t in seen["rows"]] == [
        f"draw{d} question1 {end}" for d in (1, 2) for end in ("right", "wrong")
    ]
    assert seen["batch"].rewards.tolist() == [1, 0, 1, 0] and seen["batch"].correct.tolist() == [
        True,
        False,
        True,
        False,
    ]
    assert record["grad_norm"] > 0


def test_a_step_without_an_informative_group_is_skipped_and_said(model, tmp_path):
    trainer = dapo_trainer(model, tmp_path)
    scripted(trainer, [[ALL, NONE]] * 3)
    before, hints = weights_of(trainer.policy), Hints(trainer.recipe)
    records = [trainer.step(step)[0] for step in range(3)]
    assert same(before, weights_of(trainer.policy)) and not trainer.optimizer.state
    assert all(r["skipped"] == 1 and r["informative"] == 0 and "loss" not in r for r in records)
    assert console_line(records[0]).endswith(
        "no update: no group had answers that differ, in 3 draws"
    )
    said = [line for record in records for line in hints.after(record)]
    assert any("no update was made" in line for line in said)


def test_a_run_whose_every_step_is_skipped_ends_with_its_checkpoint(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(rewards, "is_right", lambda trajectory, verdict: True)
    folder = train.train(recipe_for(model, tmp_path, "--algorithm", "dapo", "--max_resample", "1"))
    assert [row["skipped"] for row in rows_of(folder)] == [1, 1] and len(checkpoints(folder)) == 1
    assert capsys.readouterr().out.count("no update: ") == 2


def test_fewer_rows_make_fewer_updates_and_the_learning_rate_goes_on_by_step(
    model, tmp_path, monkeypatch
):
    trainer = dapo_trainer(
        model,
        tmp_path,
        "--questions_per_step",
        "4",
        "--trajectories_per_update",
        "3",
        "--steps",
        "4",
        "--lr_schedule",
        "linear",
        "--lr",
        "1.2e-5",
    )
    sizes, rates = [], []
    plain = train.update

    def noted(model, optimizer, algorithm, part, *rest):
        sizes[-1].append(len(part))
        rates[-1].append(optimizer.param_groups[0]["lr"])
        return plain(model, optimizer, algorithm, part, *rest)

    monkeypatch.setattr(train, "update", noted)
    for step, groups in enumerate(([FULL] * 4, [FULL, ALL, ALL, ALL], [FULL, FULL, NONE, ALL])):
        scripted(trainer, [groups, [ALL] * 4, [NONE] * 4])
        sizes.append([])
        rates.append([])
        trainer.step(step)
    # 8 rows in updates of at most 3: 3, 3, 2; 2 rows: one; 4 rows: 2 and 2
    assert sizes == [[3, 3, 2], [2], [2, 2]]
    # 4 steps of 3 updates: numbers 0, 1, 2; 3; 6, 7 of 12, and 1e-6 less each
    assert rates[0] == pytest.approx([1.2e-5, 1.1e-5, 1e-5])
    assert rates[1] == pytest.approx([9e-6]) and rates[2] == pytest.approx([6e-6, 5e-6])


def test_what_a_step_draws_depends_on_seed_step_and_draw_alone(model, tmp_path):
    def ids(trainer, step, draw):
        trajectories = trainer.roll_out(step, draw)
        return [(t.question.id, t.text) for t in trajectories]

    first, second = dapo_trainer(model, tmp_path), dapo_trainer(model, tmp_path)
    expected = {(step, draw): ids(first, step, draw) for step in (0, 1) for draw in (0, 1, 2)}
    assert (
        ids(second, 1, 2) == expected[1, 2] and ids(second, 0, 1) == expected[0, 1]
    )  # without the draws before it
    asked = [question for drawn in expected.values() for question, _ in drawn[::2]]
    assert len(set(asked)) == 12  # every draw has questions of its own


def test_a_resumed_dapo_run_is_the_unbroken_run(model, tmp_path, monkeypatch):
    # The tiny model is hardly ever right: here every answer of an odd number of tokens is.
    monkeypatch.setattr(
        rewards, "is_right", lambda trajectory, verdict: len(trajectory.response_ids) % 2 == 1
    )
    more = (
        "--algorithm",
        "dapo",
        "--max_resample",
        "1",
        "--clip_high",
        "0.28",
        "--trajectories_per_update",
        "2",
    )
    straight = train.train(recipe_for(model, tmp_path / "a", "--steps", "3", *more))
    train.train(recipe_for(model, tmp_path / "b", "--steps", "1", *more))
    resumed = train.train(recipe_for(model, tmp_path / "b", "--steps", "3", "--resume", *more))
    assert rows_of(resumed) == rows_of(straight)
    assert any(not row["skipped"] for row in rows_of(straight)) and any(
        row["resampled"] for row in rows_of(straight)
    )
    ends = [load_policy(str(checkpoints(folder)[-1]))[0] for folder in (straight, resumed)]
    assert same(*map(weights_of, ends))


def test_right_is_cover_em_or_an_equal_result_in_math_and_choice(trainer):
    def answered(text, **question):
        t = Trajectory(Question("q", "?", **question), PROTOCOLS["ur2"], stop_reason="eos")
        t.append_model([1], [-1.0], text)
        return t

    rows = [
        answered("\\boxed{the old elm}", answers=["elm"]),
        answered("\\boxed{oak}", answers=["elm"]),
        answered("elm", answers=["elm"]),
        answered("\\boxed{0.5}", answers=["\\frac12"], task="math"),
        answered("The correct answer is: A.", answers=["B"], task="choice", options=("elm", "oak")),
    ]
    assert trainer.scorer(rows, 0)[1] == [True, False, False, True, False]


def test_dapo_may_look_at_the_answer_term_where_a_search_and_none_are_both_right(model, tmp_path):
    # When to Search's stage 2: right without a search earns 1, right after one 0.7: nothing to
    # learn by right and wrong, but the very comparison that the stage is about. The first group
    # differs in this way, the second not at all.
    answers = [1.0, 0.7, 1.0, 1.0]
    for by, kept in (("correct", []), ("answer", [0, 1])):
        trainer = dapo_trainer(model, tmp_path, "--filter_by", by, "--max_resample", "0")
        trainer.scorer = Marks(
            lambda trajectories: ([{"format": 1.0, "answer": a} for a in answers], [True] * 4)
        )
        assert trainer.sample(0).kept == kept


def test_with_task_mixing_each_question_of_a_step_has_the_prompt_that_is_its_own(
    model, tmp_path, monkeypatch
):
    # UR² 3.2: of math only hard questions may search. Three of them: one hard, two easy.
    data, levels = tmp_path / "math.jsonl", tmp_path / "difficulty.jsonl"
    records = [
        {"id": f"m{i}", "question": f"what is {i} + 1 ?", "answers": [str(i + 1)], "task": "math"}
        for i in range(3)
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    scores = zip(records, (0.3, 0.9, 0.9), strict=True)  # UR²'s buckets: 0.3 is hard, 0.9 easy
    levels.write_text(
        "".join(json.dumps({"id": r["id"], "scores": [s], "score": s}) + "\n" for r, s in scores)
    )
    more = (
        "--data",
        str(data),
        "--retriever",
        "empty",
        "--difficulty",
        str(levels),
        "--task_mixing",
        "--questions_per_step",
        "3",
    )
    rows = Trainer(recipe_for(model, tmp_path, *more)).roll_out(0)
    assert {t.question.id: t.retrieval for t in rows} == {"m0": True, "m1": False, "m2": False}
    alone = Trainer(recipe_for(model, tmp_path, *more, "--retrieval", "false")).roll_out(0)
    assert not any(t.retrieval for t in alone)  # a run without retrieval stays one


def test_choice_and_math_answers_count_as_right_in_the_metrics():
    def answered(text, **question):
        t = Trajectory(Question("q", "?", **question), PROTOCOLS["ur2"], stop_reason="eos")
        t.append_model([1], [-1.0], text)
        return t

    rows = [
        answered("\\boxed{0.5}", answers=["\\frac12"], task="math"),
        answered("The correct answer is: B.", answers=["B"], task="choice", options=("elm", "oak")),
        answered("\\boxed{elm}", answers=["oak"]),
    ]
    record = measure(rows, [{"r": 1.0}, {"r": 0.0}, {"r": 0.5}], Recipe(group_size=3))
    assert (record["em/math"], record["em/choice"], record["em/qa"]) == (1, 1, 0)
    assert (
        record["em"] == pytest.approx(2 / 3) and record["reward"] == 0.5 and record["searches"] == 0
    )


# ----------------------------------------------------------------------------------- runs and files


def test_a_resumed_run_is_the_unbroken_run(model, tmp_path):
    # With a KL in the loss: the reference must be the stage's first model, not the checkpoint that
    # is resumed.
    more = ("--algorithm", "grpo", "--kl_coef", "0.05", "--beta2", "0.98")
    straight = train.train(recipe_for(model, tmp_path / "a", "--steps", "4", *more))
    train.train(recipe_for(model, tmp_path / "b", "--steps", "2", *more))
    resumed = train.train(recipe_for(model, tmp_path / "b", "--steps", "4", "--resume", *more))
    assert rows_of(resumed) == rows_of(straight) and [row["step"] for row in rows_of(resumed)] == [
        0,
        1,
        2,
        3,
    ]
    assert rows_of(straight)[3]["k2"] > 0
    ends = [load_policy(str(checkpoints(folder)[-1]))[0] for folder in (straight, resumed)]
    assert same(*map(weights_of, ends)) and checkpoints(resumed)[-1].name == "checkpoint-000004"


def test_a_resumed_ppo_run_is_the_unbroken_run_with_its_critic(model, tmp_path):
    more = (
        "--algorithm",
        "ppo",
        "--gae_lambda",
        "0.95",
        "--critic_lr",
        "1e-3",
        "--kl_coef",
        "0.05",
        "--kl_place",
        "reward",
        "--kl_estimator",
        "k1",
        "--trajectories_per_update",
        "2",
    )
    straight = train.train(recipe_for(model, tmp_path / "a", "--steps", "4", *more))
    train.train(recipe_for(model, tmp_path / "b", "--steps", "2", *more))
    resumed = train.train(recipe_for(model, tmp_path / "b", "--steps", "4", "--resume", *more))
    assert rows_of(resumed) == rows_of(straight) and len(rows_of(straight)) == 4
    ends = [load_policy(str(checkpoints(folder)[-1]))[0] for folder in (straight, resumed)]
    states = [torch.load(checkpoints(folder)[-1] / "trainer.pt") for folder in (straight, resumed)]
    assert same(*map(weights_of, ends))
    assert same(*(state["critic"].values() for state in states))
    assert states[0]["critic"]["head.weight"].abs().max() > 0  # it began at 0, and has learned


def test_a_ppo_step_logs_its_critic_and_the_first_one_expects_nothing(model, tmp_path):
    trainer = Trainer(
        recipe_for(
            model, tmp_path, "--algorithm", "ppo", "--critic_lr", "1e-3", "--group_size", "1"
        )
    )
    trainer.scorer = Marks(
        lambda ts: ([{"answer": 1.0 + i} for i in range(len(ts))], [True] * len(ts))
    )
    before, seen, learn = weights_of(trainer.critic), {}, trainer.update_all
    trainer.update_all = lambda step, batch, rows: (
        seen.update(batch=batch) or learn(step, batch, rows)
    )
    record, _, _ = trainer.step(0)
    batch = seen["batch"]
    used = batch.response_mask.bool()
    assert batch.values.eq(0).all() and record["explained_variance"] == pytest.approx(0, abs=1e-6)
    # γ 1, λ 1: each token's return is its trajectory's reward, and V is 0: the loss is ½ of the
    # returns' mean square
    assert batch.returns[0][used[0]].eq(1).all() and batch.returns[1][used[1]].eq(2).all()
    assert record["value_loss"] == pytest.approx(
        batch.returns[used].square().mean().item() / 2, rel=1e-4
    )
    assert record["critic_grad_norm"] > 0 and record["value_clip_fraction"] == 0
    assert not same(before, weights_of(trainer.critic))


def test_a_ppo_step_starts_from_what_the_critic_said_before_it(model, tmp_path):
    trainer, seen = (
        Trainer(
            recipe_for(model, tmp_path, "--algorithm", "ppo", "--trajectories_per_update", "2")
        ),
        {},
    )
    trainer.update_all = lambda step, batch, rows: seen.update(batch=batch) or {}
    torch.nn.init.normal_(
        trainer.critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(0)
    )
    trainer.step(0)
    batch = seen["batch"]
    said = value_batch(trainer.critic, batch, trainer.recipe, trainer.accelerator)
    assert said.abs().max() > 0.1 and torch.equal(batch.values, said)
    errors = (batch.returns - said)[
        batch.response_mask.bool()
    ]  # λ 1: the advantages before whitening
    torch.testing.assert_close(
        batch.advantages[batch.response_mask.bool()], (errors - errors.mean()) / errors.std()
    )


def test_a_checkpoint_of_another_algorithm_has_no_critic_to_go_on_with(model, tmp_path):
    train.train(recipe_for(model, tmp_path, "--steps", "1"))
    with pytest.raises(InputError, match="has no critic"):
        train.train(recipe_for(model, tmp_path, "--steps", "2", "--resume", "--algorithm", "ppo"))


def test_a_critic_whose_loss_is_not_finite_stops_the_run_and_keeps_its_weights(model, tmp_path):
    trainer = Trainer(recipe_for(model, tmp_path, "--algorithm", "ppo"))
    with torch.no_grad():
        trainer.critic.head.bias.fill_(1e30)  # squared: inf; the whitened advantages stay finite
    before = weights_of(trainer.critic)
    with pytest.raises(InputError, match=r"step 0: value_loss inf"):
        trainer.step(0)
    assert same(before, weights_of(trainer.critic))


def test_eight_bit_moments_survive_a_resume(model, tmp_path):
    more = ("--optimizer", "adamw8bit")
    straight = train.train(recipe_for(model, tmp_path / "a", "--steps", "3", *more))
    train.train(recipe_for(model, tmp_path / "b", "--steps", "2", *more))
    resumed = train.train(recipe_for(model, tmp_path / "b", "--steps", "3", "--resume", *more))
    assert rows_of(resumed) == rows_of(straight)


def test_a_resume_forgets_the_steps_behind_its_checkpoint_and_a_line_cut_short(model, tmp_path):
    recipe = recipe_for(model, tmp_path, "--steps", "2")
    folder = train.train(recipe)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward": 1.0}\n{"step": 3, "rew')
    train.train(dataclasses.replace(recipe, steps=3, resume=True))
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2]
    assert "grad_norm" in rows_of(folder)[2]


def test_a_resume_says_which_settings_are_new(model, tmp_path, capsys):
    train.train(recipe_for(model, tmp_path, "--steps", "1"))
    train.train(recipe_for(model, tmp_path, "--steps", "2", "--resume", "--lr", "0.002"))
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed"))
    assert said == "resumed with other settings: steps=2 (was 1), lr=0.002 (was 0.001)"


def test_nothing_to_resume_and_nothing_left_to_do_are_one_line_each(model, tmp_path):
    with pytest.raises(InputError, match="--resume: no checkpoint"):
        train.train(recipe_for(model, tmp_path, "--resume"))
    train.train(recipe_for(model, tmp_path, "--steps", "1"))
    with pytest.raises(InputError, match="1 of --steps 1 steps are done"):
        train.train(recipe_for(model, tmp_path, "--steps", "1", "--resume"))


@pytest.mark.parametrize(
    "keep, left", [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])]
)
def test_older_checkpoints_go_and_zero_keeps_all(keep, left, tmp_path):
    policy, tokenizer = Policy(make_model(40)), make_tokenizer()
    run = Run(Recipe(runs=str(tmp_path), keep_checkpoints=keep), main=True)
    run.open(0)
    for step in (1, 2, 3, 4):
        run.save(policy, tokenizer, {}, step)
    assert [int(path.name[-6:]) for path in checkpoints(run.folder)] == left


def test_an_earlier_run_is_moved_aside_and_not_overwritten(model, tmp_path, capsys):
    recipe = recipe_for(model, tmp_path, "--steps", "1")
    folder = train.train(recipe)
    (folder / "note").write_text("precious")
    for number in (1, 2):
        train.train(recipe)
        assert f"moved to stage1.old{number}" in capsys.readouterr().out
    assert (tmp_path / "t" / "stage1.old1" / "note").read_text() == "precious"
    assert not (folder / "note").exists() and len(rows_of(folder)) == 1


def test_bad_input_leaves_an_earlier_run_where_it_is(model, tmp_path):
    folder = train.train(recipe_for(model, tmp_path, "--steps", "1"))
    with pytest.raises(InputError):
        train.train(recipe_for(model, tmp_path, "--steps", "1", "--mix", "nothing=1"))
    assert folder.exists() and not folder.with_name("stage1.old1").exists()


def test_stage_two_starts_from_stage_ones_last_checkpoint(model, tmp_path, capsys):
    before = train.train(recipe_for(model, tmp_path, "--steps", "2", "--save_every", "1"))
    trainer = Trainer(recipe_for(model, tmp_path, "--stage", "2"))
    assert f"stage 2 starts from {before}/checkpoint-000002" in capsys.readouterr().out
    assert same(
        weights_of(trainer.policy), weights_of(load_policy(str(before / "checkpoint-000002"))[0])
    )
    assert trainer.recipe.reward == "ur2_stage2"


def test_stage_two_says_so_if_there_is_no_stage_one(model, tmp_path):
    path, said = starting_model(recipe_for(model, tmp_path, "--stage", "2"))
    assert path == model
    assert (
        said
        == f"stage 2 starts from {model}: there is no stage 1 checkpoint in {tmp_path}/t/stage1"
    )


def test_without_a_model_the_built_in_one_is_trained(tmp_path, monkeypatch, capsys):
    tokenizer = make_tokenizer()
    asked = []

    def untrained(world_seed, protocol, runs):
        asked.append((world_seed, protocol, runs))
        return Policy(make_model(len(tokenizer))), tokenizer, World(world_seed)

    monkeypatch.setattr(recipes, "load_toy", untrained)
    arguments = [
        "--recipe",
        "r1_searcher",
        "--world_seed",
        "5",
        "--runs",
        str(tmp_path),
        "--group_size",
        "2",
        "--questions_per_step",
        "4",
        "--steps",
        "1",
        "--max_turn_tokens",
        "8",
    ]
    train.main(arguments)
    assert asked == [(5, "r1_searcher", str(tmp_path))]
    assert "stage 1 starts from the built-in model" in capsys.readouterr().out
    assert (
        tmp_path / "r1_searcher-world5-seed0" / "stage1" / "checkpoint-000001" / "config.json"
    ).exists()


def test_a_run_prints_and_saves_its_settings_its_steps_and_a_sample_with_the_documents_marked(
    model, tmp_path, capsys
):
    train.main(flags(model, tmp_path, "--questions_per_step", "4", "--show_every", "1"))
    out, folder = capsys.readouterr().out, tmp_path / "t" / "stage1"
    assert out.startswith("settings: recipe=ur2 stage=1") and f"{folder}/settings.json" in out
    assert Recipe(**json.loads((folder / "settings.json").read_text())) == recipe_for(
        model, tmp_path, "--questions_per_step", "4", "--show_every", "1"
    )
    assert len(re.findall(r"^step +\d+  reward ", out, re.MULTILINE)) == 2
    samples = (folder / "samples.txt").read_text()
    assert samples.count("question: ") == 2 and "; reward " in samples
    assert any(row["searches"] > 0 for row in rows_of(folder))
    assert f"python eval.py --model {folder}/checkpoint-000002" in out


def test_a_checkpoint_loads_with_automodel(model, tmp_path):
    folder = train.train(recipe_for(model, tmp_path, "--steps", "1", "--group_size", "8"))
    again = AutoModelForCausalLM.from_pretrained(checkpoints(folder)[-1])
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert not same(weights_of(Policy(again)), weights_of(load_policy(model)[0]))


# -------------------------------------------------------------------------------------------- hints


def record_with(**changes):
    return {
        "frac_reward_zero_std": 0.5,
        "searched": 0.5,
        "searches": 1.0,
        "refused": 0.0,
        "cut_off": 0.0,
        "search_errors": 0.0,
        **changes,
    }


@pytest.mark.parametrize(
    "changes, settings, said",
    [
        ({"frac_reward_zero_std": 1.0}, {}, "all rewards of every group were equal"),
        ({"frac_reward_zero_std": 1.0}, {"algorithm": "reinforce_pp"}, None),  # has no groups
        ({"searched": 0.0, "searches": 0.0}, {}, "no trajectory searched"),
        ({"searched": 0.0, "searches": 0.0}, {"retrieval": False}, None),  # must not
        ({"searched": 0.0, "searches": 0.0}, {"max_searches": 0}, None),
        ({"searched": 0.0, "searches": 0.0, "refused": 0.5}, {}, "none was run"),
        ({"cut_off": 1.0}, {}, "raise --max_turn_tokens"),
        ({"search_errors": 1.0}, {}, "a tenth or more of the searches failed"),
        ({}, {}, None),
    ],
)
def test_three_steps_of_one_cause_give_one_hint_and_never_again(changes, settings, said):
    hints = Hints(Recipe(**settings))
    lines = [hints.after(record_with(**changes)) for _ in range(6)]
    assert lines[:2] == [[], []] and lines[3:] == [[], [], []]
    assert len(lines[2]) == bool(said) and (not said or said in lines[2][0])


def test_a_single_better_step_starts_the_count_anew():
    hints = Hints(Recipe())
    cut = [True, True, False, True, True, False]
    assert [hints.after(record_with(cut_off=float(c))) for c in cut] == [[]] * 6


# ------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_leaves_the_last_checkpoint_and_metrics_that_read(
    model, tmp_path, monkeypatch, capsys
):
    step = Trainer.step

    def interrupted(self, number):
        if number == 2:
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(SystemExit) as end:
        train.main(flags(model, tmp_path, "--steps", "5", "--save_every", "1"))
    assert end.value.code == 130
    folder = tmp_path / "t" / "stage1"
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"interrupted; last checkpoint: {folder}/checkpoint-000002 (go on with --resume)"
    )
    assert [row["step"] for row in rows_of(folder)] == [0, 1]
    load_policy(str(checkpoints(folder)[-1]))


def test_ctrl_c_before_the_first_checkpoint_says_so(model, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(SystemExit) as end:
        train.main(flags(model, tmp_path))
    assert (
        end.value.code == 130
        and capsys.readouterr().out.splitlines()[-1] == "interrupted; no checkpoint yet"
    )


def test_a_real_sigint_ends_the_process_with_130_and_one_line(model, tmp_path):
    folder = tmp_path / "t" / "stage1"
    command = [
        sys.executable,
        "train.py",
        *flags(model, tmp_path, "--steps", "100000", "--save_every", "1"),
    ]
    # a shell's background job ignores SIGINT, and its children inherit that: the test must not
    # depend on how it was started
    listen = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **listen,
    )
    try:
        for _ in range(600):
            if process.poll() is not None or len(checkpoints(folder)) >= 2:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors[-2000:]
    assert "Traceback" not in errors
    assert out.splitlines()[-1].startswith("interrupted; last checkpoint: ")
    assert [row["step"] for row in rows_of(folder)] == list(range(len(rows_of(folder))))
    load_policy(str(checkpoints(folder)[-1]))


# -------------------------------------------------------------------- bad input, as a user meets it


def command_line(main, arguments, capsys) -> str:
    """What a user sees on stderr: one line, exit code 2, no traceback."""
    with pytest.raises(SystemExit) as end:
        run_main(lambda: main([str(argument) for argument in arguments]))
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


GOOD = json.dumps(
    {
        "id": "1",
        "question": "who ?",
        "answers": ["me"],
        "references": [{"id": "1", "title": "t", "text": "x"}],
    }
)
FILES = {
    "good.jsonl": GOOD,
    "broken.jsonl": GOOD + '\n{"id": "2", "question": ',
    "typed.jsonl": GOOD + '\n{"id": "2", "question": 5, "answers": ["x"]}',
    "answerless.jsonl": GOOD + '\n{"id": "2", "question": "why ?", "answers": []}',
    "long.jsonl": GOOD.replace("who ?", "ada " * 400),
    "bare.jsonl": '{"id": "1", "question": "who ?", "answers": ["me"]}',
    "empty.jsonl": "",
}


@pytest.fixture
def files(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "data, corpus, said",
    [
        ("missing.jsonl", "from-data", "missing.jsonl: no such file"),
        ("good.jsonl", "missing.jsonl", "missing.jsonl: no such file"),
        ("good.jsonl", "empty.jsonl", "empty.jsonl: the file is empty"),
        ("empty.jsonl", "from-data", "empty.jsonl: the file is empty"),
        ("broken.jsonl", "from-data", "broken.jsonl, line 2: not valid JSON"),
        (
            "typed.jsonl",
            "from-data",
            "typed.jsonl, line 2: field 'question': expected a string, found a number 5",
        ),
        ("answerless.jsonl", "from-data", "answerless.jsonl, line 2: question 2 has no answer"),
        ("bare.jsonl", "from-data", "bring no paragraphs"),
        ("long.jsonl", "from-data", "question 1: its prompt has"),
    ],
)
def test_a_bad_file_is_one_line_before_training_starts(data, corpus, said, model, files, capsys):
    arguments = [*flags(model, files), "--data", files / data]
    corpus = corpus if corpus == "from-data" else files / corpus
    error = command_line(train.main, [*arguments, "--corpus", corpus], capsys)
    assert said in error
    assert not (files / "t").exists()  # no run was begun


def test_a_bad_model_is_one_line_before_a_large_corpus_is_read(model, files, capsys, monkeypatch):
    monkeypatch.setattr(train, "passages", lambda *_: pytest.fail("the corpus was read first"))
    assert "no such directory" in command_line(
        train.main, [*flags(files / "no-model", files)], capsys
    )
    assert "no config.json" in command_line(train.main, [*flags(files, files)], capsys)


def test_bad_records_can_be_left_out(model, files, capsys):
    data = ("--data", str(files / "typed.jsonl"), "--corpus", "from-data", "--skip_bad")
    train.main([*flags(model, files), *data, "--steps", "1"])
    assert "1 of 2 records skipped" in capsys.readouterr().err


def test_a_typo_on_the_real_command_line_is_one_line_and_exit_code_2():
    command = [sys.executable, "train.py", "--grup_size", "4"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr
        == "error: train.py: unknown flag --grup_size (did you mean --group_size?); --help lists"
        " them all\n"
    )


# ------------------------------------------------------------------------------------ two processes


def score_and_update(
    trainer: Trainer, batch: Batch
) -> tuple[torch.Tensor, list[dict], list[torch.Tensor]]:
    """(scores before, the totals of two updates, of which the second has one row, how each weight
    moved).
    """
    modules = [m for m in (trainer.policy, trainer.critic) if m is not None]
    before = [whole_weights_of(module) for module in modules]
    scored = trainer.score(trainer.policy, batch)
    if trainer.critic is not None:
        scored = scored + value_batch(trainer.critic, batch, trainer.recipe, trainer.accelerator)
    unnamed = [Trajectory(Question("q", "?", []), PROTOCOLS["ur2"])] * len(batch)
    totals = [
        trainer.update_all(0, part, unnamed) for part in (batch, batch.rows(torch.tensor([3])))
    ]
    after = [whole_weights_of(module) for module in modules]
    return (
        scored,
        totals,
        [
            a - b
            for new, old in zip(after, before, strict=True)
            for a, b in zip(new, old, strict=True)
        ],
    )


def whole_weights_of(module) -> list[torch.Tensor]:
    """Also of weights in parts."""
    return [full(p.detach()).clone() for p in module.parameters()]


def take_step(recipe: Recipe, batch: Batch, out: Path) -> None:
    """What each process does: score a batch that all hold, update on it, and sample its share, for
    DAPO in several draws.
    """
    trainer = Trainer(recipe)
    trainer.optimizer = torch.optim.SGD(
        trainer.policy.parameters()
    )  # Adam's division would blow rounding errors up
    if trainer.critic is not None:
        torch.nn.init.normal_(
            trainer.critic.head.weight, std=0.01, generator=torch.Generator().manual_seed(0)
        )
        trainer.critic_optimizer = torch.optim.SGD(trainer.critic.parameters(), 0.01)
    scored, totals, moved = score_and_update(trainer, batch)
    # Right or wrong by question and place in the group, as each process samples other texts than a
    # single one would.
    if (plain := trainer.scorer) is not None:  # one process scores for all

        def mark(ts):
            return plain(ts, 0)[0], [
                i % 2 == 0 or t.question.id[-1] not in "02468" for i, t in enumerate(ts)
            ]

        trainer.scorer = Marks(mark)
    sampled = trainer.sample(0)
    questions = [
        [sampled.trajectories[i].question.id for i in sampled.kept],
        [t.question.id for t in sampled.trajectories],
    ]
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        torch.save((trainer.accelerator.num_processes, moved, scored, totals, questions), out)


def test_two_processes_are_one_training_from_the_command_line_on(model, tmp_path):
    """Trap: asking accelerate for its state too early left each process alone, and both wrote the
    same files.
    """
    small = [
        word
        for k, v in {
            "group_size": 2,
            "questions_per_step": 2,
            "steps": 2,
            "max_turn_tokens": 8,
        }.items()
        for word in (f"--{k}", str(v))
    ]
    in_two_processes(
        train.main,
        [
            "--model",
            model,
            "--runs",
            str(tmp_path),
            "--name",
            "two",
            *small,
            "--retriever",
            "empty",
        ],
    )
    folder = tmp_path / "two" / "stage1"
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [0, 1]
    assert len(recipes.checkpoints(folder)) == 1


def test_processes_that_did_not_find_each_other_are_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        InputError, match="2 processes were started and 1 take part: set ACCELERATE_USE_CPU=true"
    ):
        train.check_processes(1)
    train.check_processes(2)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "ppo"])
def test_two_processes_take_the_step_of_one(algorithm, model, tmp_path):
    # Uneven on purpose: 8 trajectories in 3 updates of 3, 3 and 2; one rank has two rows, the other
    # one. Then an update of a single row: one rank has none.
    recipe = recipe_for(
        model,
        tmp_path,
        "--tokens_per_micro_batch",
        "10",
        "--trajectories_per_update",
        "3",
        "--lr",
        "0.1",
        "--questions_per_step",
        "4",
        "--algorithm",
        algorithm,
        "--max_grad_norm",
        "1e9",
    )
    batch = unequal_batch(recipe)
    take_step(recipe, batch, tmp_path / "one.pt")
    in_two_processes(take_step, recipe, batch, tmp_path / "two.pt")
    (_, moved, scored, totals, questions), two = (
        torch.load(tmp_path / "one.pt"),
        torch.load(tmp_path / "two.pt"),
    )
    assert two[0] == 2 and two[4] == questions
    assert (
        len(questions[1]) > 8
        if algorithm == "dapo"
        else questions[0] == questions[1] and len(questions[1]) == 8
    )
    assert max(m.abs().max() for m in moved) > 1e-3
    assert max((a - b).abs().max() for a, b in zip(moved, two[1], strict=True)) < 1e-6
    assert torch.allclose(scored, two[2], atol=1e-5)
    for ours, theirs in zip(totals, two[3], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-5, rel=1e-5)


def test_start_from_goes_before_stage_one_s_checkpoint_and_a_wrong_path_is_one_line(tmp_path):
    (tmp_path / "runs" / "n" / "stage1" / "checkpoint-000001").mkdir(parents=True)
    given = tmp_path / "given"
    given.mkdir()
    (given / "config.json").write_text("{}")
    recipe = Recipe(stage=2, name="n", runs=str(tmp_path / "runs"), start_from=str(given))
    assert train.starting_model(recipe)[0] == str(given)
    with pytest.raises(InputError, match="nowhere"):
        train.starting_model(dataclasses.replace(recipe, start_from=str(tmp_path / "nowhere")))
