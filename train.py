"""The loop: roll out, score, turn rewards into advantages, update. One stage of one paper per run.

    accelerate launch train.py --stage 1             the built-in world, UR²
    accelerate launch train.py --stage 2             goes on from stage 1's last checkpoint
    accelerate launch train.py --stage 1 --model DIR --data FILE --corpus from-data

    questions -> rollout -> rewards [B] -> advantages [B, T] -> for each update: token weights
    (Σ = 1) -> micro-batches: Σ weight · loss, backward -> clip -> one optimizer step

DAPO draws more questions for groups that teach nothing; PPO has a critic beside the policy, with an
update of its own. Each process samples its own share of the questions; then all know all
trajectories, so that group and batch statistics are of the global batch.

Files of a run, under runs/NAME/stageN: settings.json, metrics.jsonl (a line per step), samples.txt,
checkpoint-NNNNNN. Ctrl-C is safe at any moment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object

import dapo
import grpo
import ppo
from errors import run_main
from plumbing import checkpoint
from plumbing.build import build_parts, make_accelerator
from plumbing.files import Run, checkpoints, stage_folder
from plumbing.score import answer_scores
from policy import Batch, collate, evaluating
from rollout import rollout
from settings import Settings, parse, shown_settings
from trajectory import Trajectory
from update import (
    Parts,
    mean_of,
    score_policy,
    score_reference,
    score_values,
    set_lr,
    shuffled_updates,
    update,
)


@dataclass
class Sampled:
    """What one step sampled, and the rows of it that are trained on."""

    trajectories: list[Trajectory] = field(default_factory=list)  # N, group by group
    components: list[dict[str, float]] = field(default_factory=list)  # of each reward
    correct: list[bool] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # rows; groups stay whole
    draws: int = 0
    seconds: float = 0.0

    def of(self, rows: torch.Tensor) -> list[Trajectory]:
        """The trajectories behind these rows of the batch."""
        return [self.trajectories[self.kept[row]] for row in rows.tolist()]


def train(settings: Settings) -> Path:
    """One stage. Returns the folder of the run."""
    parts = build_parts(settings)
    run = Run(settings, parts.accelerator)
    first_step = checkpoint.resume(run, parts) if settings.resume else 0
    run.open(first_step)
    for step in run.bar(first_step):
        sampled = collect(parts, step)
        record = {"step": step} | measure(parts, sampled)  # of all that was sampled
        start = time.perf_counter()
        if sampled.kept:
            batch = prepare(parts, sampled, step)  # [B, L]
            results = []
            for number, rows in enumerate(shuffled_updates(step, len(batch), settings)):
                lr = set_lr(parts, step, number)
                part = batch_of_update(parts, batch, rows, number)
                results.append(update(parts, part) | {"lr": lr})  # the critic's too
                seen = sampled.of(rows)
                run.check_finite(results[-1], step, part, seen)
            record |= mean_of(results) | foresight(batch)
        record |= {"update_seconds": time.perf_counter() - start}
        run.log(record, sampled)
        if run.saves(step):
            checkpoint.save(run, parts, step + 1)
    run.close()
    return run.folder


# ------------------------------------------------------------------------------------------ sample


def collect(parts: Parts, step: int) -> Sampled:
    """The step's trajectories and their rewards. DAPO's departure 2: it draws until there are
    enough informative groups, or no draw is left.

    What is drawn depends on (seed, step, draw) alone: a resumed run draws what the unbroken one
    did.
    """
    settings, sampled, start = parts.settings, Sampled(), time.perf_counter()
    wanted = settings.questions_per_step * settings.group_size
    for _ in range(parts.stream.attempts):
        trajectories = roll_out(parts, step, sampled.draws)
        components, correct = judged(parts, trajectories, step)
        sampled.trajectories += trajectories
        sampled.components += components
        sampled.correct += correct
        keep = informative(sampled, settings)  # [N]
        # The first ones: a surplus is cut the same way every time.
        sampled.kept = keep.nonzero()[:wanted, 0].tolist()
        sampled.draws += 1
        if len(sampled.kept) >= wanted:
            break
    sampled.seconds = time.perf_counter() - start
    return sampled


def roll_out(parts: Parts, step: int, draw: int) -> list[Trajectory]:
    """This process samples its share of the questions; all get all trajectories, group by group."""
    rank, world = parts.accelerator.process_index, parts.accelerator.num_processes
    questions = parts.stream.take(step, draw)
    first = len(questions) * rank // world
    end = len(questions) * (rank + 1) // world
    seed = parts.settings.seed * 1_000_003 + rank
    seed += (step * parts.stream.attempts + draw) * 1_009
    with evaluating(parts.policy), parts.sampler() as policy:
        mine = questions[first:end]
        sampled = rollout(policy, parts.environment, mine, seed, parts.play)
    return gather_object(sampled) if world > 1 else sampled


def judged(parts: Parts, trajectories: list[Trajectory], step: int) -> tuple[list, list[bool]]:
    """Reward components and correctness. One process scores for all: a model that judges may answer
    another process otherwise, and then the processes would go on with different rows.
    """
    found = [None, None]
    if parts.scorer is not None:
        found = list(parts.scorer(trajectories, step))
    if parts.accelerator.num_processes > 1:
        found = broadcast_object_list(found)
    return found[0], found[1]


def informative(sampled: Sampled, settings: Settings) -> torch.Tensor:
    """[N] bool: which rows are trained on. Only DAPO drops groups.

    Trap: by correctness, a question that all trajectories answer right is dropped, and with it
    every comparison of a right answer with a search and one without. When to Search's stage 2
    filters by the answer term.
    """
    if settings.algorithm != "dapo":
        return torch.ones(len(sampled.correct), dtype=torch.bool)  # [N]
    if settings.filter_by == "correct":
        return dapo.informative_groups(torch.tensor(sampled.correct), settings.group_size)
    answers = [terms["answer"] for terms in sampled.components]
    return dapo.informative_groups(torch.tensor(answers), settings.group_size)


# ----------------------------------------------------------------------------------------- prepare


def prepare(parts: Parts, sampled: Sampled, step: int) -> Batch:
    """The global batch: rewards [B]; old, reference and critic's log-probs and values [B, T];
    advantages [B, T].
    """
    settings, rows = parts.settings, sampled.kept
    rewards = [sum(sampled.components[row].values()) for row in rows]
    trajectories = sampled.of(torch.arange(len(rows)))
    pad_id = parts.environment.tokenizer.pad_token_id or 0
    batch = collate(trajectories, rewards, settings.group_size, pad_id)
    batch.correct = torch.tensor([sampled.correct[row] for row in rows])  # [B]
    batch.overlong = torch.tensor([is_overlong(t) for t in trajectories])  # [B]
    if not settings.mask_documents:
        unmask_documents(batch, trajectories)
    if parts.recompute:
        batch.old_logprobs = old_logprobs(parts, batch, step)  # [B, T]
    if settings.kl_coef:
        batch.ref_logprobs = score_reference(parts, batch)  # [B, T]
    if parts.critic is not None:  # once: advantages, returns and clips all start from these
        batch.values = score_values(parts, batch)  # [B, T]
    batch.advantages = parts.algorithm.compute_advantages(batch, settings)  # [B, T]
    return batch


def is_overlong(trajectory: Trajectory) -> bool:
    """Cut off before it answered: DAPO does not train on it."""
    return trajectory.stop_reason == "length" and trajectory.answer is None


def unmask_documents(batch: Batch, trajectories: Sequence[Trajectory]) -> None:
    """The ablation: every token behind the prompt counts as the policy's."""
    batch.response_mask = torch.zeros_like(batch.response_mask)  # [B, T]
    for row, t in enumerate(trajectories):
        first = len(t.prompt_ids) - 1  # the column of the first response token
        batch.response_mask[row, first : len(t.ids) - 1] = 1.0
    batch.sampled_logprobs = None  # of documents there are none


def old_logprobs(parts: Parts, batch: Batch, step: int) -> torch.Tensor:
    """π_old's log-probs [B, T], scored again: under bf16 sampling and scoring round differently.

    The first update takes them from its own forward pass (`batch_of_update`), so only the later
    ones' rows cost a scoring pass. A KL in the reward needs them all.
    """
    if parts.settings.kl_coef and parts.settings.kl_estimator == "k1":
        return score_policy(parts, parts.policy, batch)  # [B, T]
    _, *later = shuffled_updates(step, len(batch), parts.settings)
    scored = batch.old_logprobs.clone()  # [B, T]
    if later:
        rows = torch.cat(later)  # [n]
        found = score_policy(parts, parts.policy, batch.rows(rows))  # [n, t]
        scored[rows, : found.shape[1]] = found
    return scored


def batch_of_update(parts: Parts, batch: Batch, rows: torch.Tensor, number: int) -> Batch:
    """The rows of one update. Until the first of a step π_old is π: what was sampled with can be
    compared, and log-probs that are scored again come from the update's own forward pass.
    """
    part = batch.rows(rows)
    if number:
        part.sampled_logprobs = None
    elif parts.recompute:
        part.old_logprobs = None
    return part


# ---------------------------------------------------------------------------------- what is logged


def mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    values = list(values)
    return sum(values) / max(1, len(values))


def measure(parts: Parts, sampled: Sampled) -> dict[str, float]:
    """The numbers of one step's rollout, also of what DAPO then drops. The README says what each
    means.
    """
    trajectories, settings = sampled.trajectories, parts.settings
    rewards = [sum(terms.values()) for terms in sampled.components]
    record = {"reward": mean(rewards), "rollout_seconds": sampled.seconds}
    for name in sampled.components[0]:
        record[f"reward/{name}"] = mean(terms[name] for terms in sampled.components)
    em = [answer_scores(t)["em"] for t in trajectories]
    kinds = [t.question.kind for t in trajectories]
    for kind in sorted(set(kinds)):
        rows = [row for row, its in enumerate(kinds) if its == kind]
        record[f"em/{kind}"] = mean(em[row] for row in rows)
        searches = [len(trajectories[row].searches) for row in rows]
        record[f"searched/{kind}"] = mean(map(bool, searches))
        record[f"searches/{kind}"] = mean(searches)
    record |= {"em": mean(em)} | searching(trajectories)
    group_rewards = torch.tensor(rewards)
    zero_std = grpo.frac_reward_zero_std(group_rewards, settings.group_size)
    record["frac_reward_zero_std"] = zero_std
    if parts.scorer is not None:  # the main process; it is the one that logs
        record |= parts.scorer.stats()
    if settings.algorithm == "dapo":
        record["resampled"] = sampled.draws - 1
        kept = informative(sampled, settings)  # [N]
        record["informative"] = kept.float().mean().item()
        record["skipped"] = int(not sampled.kept)
    return record


def searching(trajectories: list[Trajectory]) -> dict[str, float]:
    """How the trajectories searched and ended, per trajectory or per search."""
    searches = [search for t in trajectories for search in t.searches]
    counts = [len(t.searches) for t in trajectories]
    model_tokens = mean(sum(t.response_mask) for t in trajectories)
    tokens = mean(len(t.response_mask) for t in trajectories)
    return {
        "searched": mean(map(bool, counts)),
        "searches": mean(counts),
        "fallbacks": mean(search.fallback for search in searches),
        "search_errors": mean(search.error is not None for search in searches),
        "refused": mean(len(t.refusals) for t in trajectories),
        "answered": mean(t.answer is not None for t in trajectories),
        "cut_off": mean(t.stop_reason in ("length", "refused") for t in trajectories),
        "model_tokens": model_tokens,
        "inserted_tokens": tokens - model_tokens,
    }


def foresight(batch: Batch) -> dict[str, float]:
    """PPO: how much of the returns the critic foresaw."""
    if batch.values is None:
        return {}
    explained = ppo.explained_variance(batch.values, batch.returns, batch.response_mask)
    return {"explained_variance": explained}


def main(arguments: list[str] | None = None) -> None:
    settings = parse(arguments)
    # One process speaks for all. Trap: PartialState() first would ignore ACCELERATE_USE_CPU.
    say, folder = make_accelerator(settings).print, stage_folder(settings)
    say(f"{shown_settings(settings)}\n  (all of them: {folder}/settings.json)")
    try:
        train(settings)
    except KeyboardInterrupt:
        found = checkpoints(folder)
        last = f"last checkpoint: {found[-1]} (go on with --resume)" if found else "no checkpoint"
        say(f"\ninterrupted; {last}")
        sys.exit(130)
    last = checkpoints(folder)[-1]
    say(f"done: {folder} (python eval.py --model {last})")


if __name__ == "__main__":
    run_main(main)
