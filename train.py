"""The loop: roll out, score, turn rewards into advantages, update. One stage of one paper per run.

    accelerate launch train.py --stage 1             the built-in world, UR²
    accelerate launch train.py --stage 2             goes on from stage 1's last, or from --model
    accelerate launch train.py --stage 1,2 --evaluate   both, and what they are worth
    accelerate launch train.py --stage 1 --model DIR --data FILE --corpus from-data
    python train.py --dry_run                        tries one step, says what would fail

    questions -> rollout -> rewards [B] -> advantages [B, T] -> for each update: token weights
    (Σ = 1) -> micro-batches: Σ weight · loss, backward -> clip -> one optimizer step

DAPO draws more questions for groups that teach nothing; PPO's critic has updates of its own. Each
process samples its share of the questions; then all know all: statistics are of the global batch.

Files, in runs/NAME/stageN: settings.json, metrics.jsonl, trajectories.jsonl.gz, checkpoints.
"""

from errors import prepare_command, run_main

if __name__ == "__main__":
    prepare_command()
# isort: split
from settings import Settings, parse_stages

if __name__ == "__main__":
    run_main(parse_stages)  # a flag that is wrong is told before torch is loaded
# isort: split
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object

import dapo
import eval as evaluation
import grpo
import ppo
from plumbing import checkpoint
from plumbing.alarms import MOST_FAILED
from plumbing.build import build_state, make_accelerator, meet
from plumbing.files import Run, named_by
from plumbing.record import keep_numbers
from policy import Batch, collate, evaluating, lr_factor
from rewards import compute_rewards
from rollout import rollout
from trajectory import Trajectory
from trajectory_metrics import mean, step_searches, trajectory_metrics
from update import (
    ALGORITHMS,
    Record,
    TrainState,
    compute_logprobs,
    compute_ref_logprobs,
    compute_values,
    merge_records,
    put,
    rows_that_teach,
    update,
    updates_of,
)

LOGGED = """
em f1 cem searched searches successful repeated queries rejected failed_rows answered truncated
model_tokens tokens thinking_words repetition malformed_tags
""".split()


@dataclass
class Rollouts:
    """What one step sampled, and the rows of it that are trained on."""

    trajectories: list[Trajectory] = field(default_factory=list)  # N, group by group
    reward_terms: list[Record] = field(default_factory=list)  # of each reward
    correct: list[bool] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # rows; groups stay whole, with failed rows
    draws: int = 0
    seconds: float = 0.0  # of sampling and searching
    reward_seconds: float = 0.0

    @property
    def failed(self) -> torch.Tensor:
        """[N] bool: did a search of the row fail?"""
        return torch.tensor([t.failed for t in self.trajectories])

    @property
    def rewards(self) -> torch.Tensor:
        """[N], NaN where a search failed: nobody knows what the row would have earned. A reward
        function that itself gives NaN has to stop the run, so here that is an infinite reward.
        """
        rewards = torch.tensor([float(sum(terms.values())) for terms in self.reward_terms])  # [N]
        rewards[rewards.isnan()] = torch.inf
        return rewards.masked_fill(self.failed, torch.nan)

    def of(self, rows: torch.Tensor) -> list[Trajectory]:
        """The trajectories behind these rows of the batch."""
        return [self.trajectories[self.kept[row]] for row in rows.tolist()]


def train(settings: Settings) -> Path:
    """One stage. Returns the folder of the run."""
    state = build_state(settings)
    run = Run(settings, state.accelerator)
    first_step = checkpoint.begin(run, state)
    for step in run.bar(first_step):
        with checkpoint.kept(run, state, step):
            rollouts = collect(state, step)
        record = {"step": step} | measure(state, rollouts)  # of all that was sampled
        start, batch = time.perf_counter(), None
        if rollouts.kept:
            batch = prepare(state, rollouts, step)  # [B, L]
            results = []
            updates = shuffled_updates(step, batch.rewards, settings)
            for number, rows in enumerate(updates):
                lr = set_lr(state, step, number)
                part = batch.rows(rows)
                result = update(state, part) | {"lr": lr}  # the critic's too
                run.check_finite(result, step, part, rollouts.of(rows))
                results.append(result)
                keep_numbers(batch, rows, part)
            record |= (
                merge_records(results, mean)
                | critic_metrics(batch)
                | likelihood_later(batch, updates[0])
            )
            record |= sampler_stats(batch, updates[0], state.mismatch)
        record["update_seconds"] = time.perf_counter() - start
        try:
            if settings.eval_every and (step + 1) % settings.eval_every == 0:
                with checkpoint.kept(run, state, step + 1):
                    record |= evaluate(state)
        finally:  # an evaluation that fails takes nothing of the step with it
            run.log(record, rollouts, batch, state.environment)
        checkpoint.after(run, state, record)
    state.accelerator.wait_for_everyone()  # the first one saves: the folder is there after it
    return run.folder


# ------------------------------------------------------------------------------------------ sample
def collect(state: TrainState, step: int) -> Rollouts:
    """The step's trajectories and their rewards. DAPO's departure 2: it draws until there are
    enough informative groups, or no draw is left. What is drawn depends on seed, step and draw.
    """
    settings, rollouts = state.settings, Rollouts()
    wanted = settings.questions_per_step * settings.group_size
    for _ in range(state.stream.attempts):
        start = time.perf_counter()
        trajectories = roll_out(state, step, rollouts.draws)
        scored_from = time.perf_counter()
        # One process scores for all: a model that judges might answer each differently, and they
        # would go on with different rows.
        scored = [None, None]
        if state.other_models is not None:
            scored = [*compute_rewards(trajectories, settings, step, state.other_models)]
        meet(state, "still scores the answers")
        reward_terms, correct = broadcast_object_list(scored)
        rollouts.seconds += scored_from - start
        rollouts.reward_seconds += time.perf_counter() - scored_from
        rollouts.trajectories += trajectories
        rollouts.reward_terms += reward_terms
        rollouts.correct += correct
        keep = informative(rollouts, settings)  # [N]
        rollouts.kept = keep.nonzero()[:wanted, 0].tolist()  # the first ones
        rollouts.draws += 1
        if len(rollouts.kept) >= wanted:
            break
    if rollouts.failed.float().mean() > MOST_FAILED:
        rollouts.kept = []  # too few are left to learn from: the run stops after this step
    return rollouts


def roll_out(state: TrainState, step: int, draw: int) -> list[Trajectory]:
    """The trajectories of a draw, group by group."""
    questions = state.stream.take(step, draw)
    seed = state.settings.seed * 1_000_003 + state.accelerator.process_index
    seed += (step * state.stream.attempts + draw) * 1_009
    return shared_rollout(state, state.environment, questions, seed)


def shared_rollout(state: TrainState, environment, questions: list, seed: int) -> list[Trajectory]:
    """This process samples its share of the questions; all get all trajectories."""
    rank = state.accelerator.process_index
    world = state.accelerator.num_processes
    first = len(questions) * rank // world
    end = len(questions) * (rank + 1) // world
    with evaluating(state.policy), state.sampler() as policy:
        own = rollout(policy, environment, questions[first:end], seed, state.generate)
    meet(state, "still samples and searches")
    return gather_object(own)


def evaluate(state: TrainState) -> Record:
    """Every --eval_every steps: greedy answers to the held-out questions. Their checkpoint is saved
    (When to Search, training details), and the best one kept.
    """
    greedy = copy.copy(state.environment)
    greedy.settings = replace(state.settings, temperature=0.0, group_size=1)
    greedy.held_out = True
    trajectories = shared_rollout(state, greedy, state.held_out, 0)
    found = merge_records([logged_metrics(t) for t in trajectories], mean)
    return {f"eval/{name}": number for name, number in found.items()}


def informative(rollouts: Rollouts, settings: Settings) -> torch.Tensor:
    """[N] bool: which rows are trained on. Only DAPO drops groups: those in which all are right or
    wrong, all answer terms are equal, or all rewards. Rows whose search failed are not looked at.

    Trap: by correctness a question that all answer right, or all wrong, is dropped, and with it the
    comparison of answers with and without a search. When to Search filters by the answer term.
    """
    if settings.algorithm != "dapo":
        return torch.ones(len(rollouts.correct), dtype=torch.bool)  # [N]
    found = rollouts.correct
    if settings.filter_by == "answer":
        found = [terms["answer"] for terms in rollouts.reward_terms]
    elif settings.filter_by == "total":
        found = rollouts.rewards.tolist()
    found = torch.tensor(found).float()  # [N]
    return dapo.informative_groups(
        found.masked_fill(rollouts.failed, torch.nan), settings.group_size
    )


# ----------------------------------------------------------------------------------------- prepare
def prepare(state: TrainState, rollouts: Rollouts, step: int) -> Batch:
    """The global batch: rewards [B]; old, reference and critic's log-probs and values [B, T];
    advantages [B, T].
    """
    settings, rows = state.settings, rollouts.kept
    rewards = rollouts.rewards[rows].tolist()
    trajectories = [rollouts.trajectories[row] for row in rows]
    pad_id = state.environment.tokenizer.pad_token_id or 0
    batch = collate(trajectories, rewards, settings.group_size, pad_id)
    overlong = [t.stop_reason == "length" and t.answer is None for t in trajectories]
    batch.overlong = torch.tensor(overlong)  # [B]  cut off before it answered
    if not settings.mask_documents:
        unmask_documents(batch, trajectories)
    batch.response_mask[batch.rewards.isnan()] = 0.0  # a failed row is in no mean and no std
    if settings.kl_coef:
        batch.ref_logprobs = compute_ref_logprobs(state, batch)  # [B, T]
    if state.critic is not None:  # once: advantages, returns and clips all start from these
        batch.values = compute_values(state, batch)  # [B, T]
    if state.recompute:  # under bf16, sampling and scoring round differently
        batch.old_logprobs = compute_old_logprobs(state, batch)  # [B, T]
    if state.mismatch != "none":  # before an update is cut: rejected tokens weigh nothing in it
        batch.mismatch_weights = ppo.mismatch_weights(batch, state.mismatch)  # [B, T]
    algorithm = ALGORITHMS[settings.algorithm]
    batch.advantages = algorithm.compute_advantages(batch, settings)  # [B, T]
    return batch


def compute_old_logprobs(state: TrainState, batch: Batch) -> torch.Tensor:
    """Returns π_old's log-probs [B, T]. Rows that teach nothing keep those of sampling, unless
    something else reads them: a KL, a critic, documents that are trained on, or a correction that
    drops tokens, which counts the tokens that are left.
    """
    drops = state.mismatch != "none" and ppo.MISMATCH[state.mismatch][-1] == 0
    rows = torch.arange(len(batch))  # [n]
    if batch.ref_logprobs is None and batch.values is None and not drops:
        algorithm = ALGORITHMS[state.settings.algorithm]
        batch.advantages = algorithm.compute_advantages(batch, state.settings)  # [B, T]
        rows = rows if batch.sampled_logprobs is None else rows_that_teach(batch)  # [n]
    old_logprobs = batch.old_logprobs.clone()  # [B, T]
    if len(rows):
        put(rows, compute_logprobs(state, state.policy, batch.rows(rows)), into=old_logprobs)
    return old_logprobs


def unmask_documents(batch: Batch, trajectories: Sequence[Trajectory]) -> None:
    """The ablation: every token behind the prompt counts as the policy's."""
    batch.response_mask = torch.zeros_like(batch.response_mask)  # [B, T]
    for row, t in enumerate(trajectories):
        first = len(t.prompt_ids) - 1  # the column of the first response token
        batch.response_mask[row, first : len(t.ids) - 1] = 1.0
    batch.sampled_logprobs = None  # documents have none


def shuffled_updates(step: int, rewards: torch.Tensor, settings: Settings) -> tuple:
    """The rows of each of a step's updates, [n] each; of rewards [B] those that are known. Where
    DAPO keeps fewer rows, or searches failed, there are fewer updates, and not smaller ones.
    """
    rows = (~rewards.isnan()).nonzero()[:, 0]  # [n]
    generator = torch.Generator().manual_seed(settings.seed * 7_919 + step)
    order = rows[torch.randperm(len(rows), generator=generator)]  # [n]
    return order.tensor_split(updates_of(len(rows), settings))


def set_lr(state: TrainState, step: int, number: int) -> float:
    """Returns the policy's, for update `number` of the step. The critic's has a warm-up of its own,
    and then stays: a long warm-up of the policy is the critic's time to learn.
    """
    settings = state.settings
    updates = updates_of(settings.questions_per_step * settings.group_size, settings)
    done = step * updates + number
    total = settings.steps * updates
    lr = settings.lr * lr_factor(done, total, settings.warmup_ratio, settings.lr_schedule)
    critic_lr = settings.critic_lr
    critic_lr *= lr_factor(done, total, settings.critic_warmup_ratio, "constant")
    for optimizer, rate in ((state.optimizer, lr), (state.critic_optimizer, critic_lr)):
        for group in optimizer.param_groups if optimizer else ():
            group["lr"] = rate
    return lr


# ---------------------------------------------------------------------------------- what is logged
def measure(state: TrainState, rollouts: Rollouts) -> Record:
    """The numbers of a step's rollout, also of what DAPO then drops; docs/metrics.md explains each.
    They are means over the trajectories whose searches did not fail, unless all have failed.
    """
    failed, settings = rollouts.failed, state.settings
    rows = (~failed | failed.all()).nonzero()[:, 0].tolist()
    trajectories = [rollouts.trajectories[row] for row in rows]
    reward_terms = [rollouts.reward_terms[row] for row in rows]
    numbers = [logged_metrics(t) for t in trajectories]
    reward = mean(sum(terms.values()) for terms in reward_terms)
    record = {"reward": reward, "rollout_seconds": rollouts.seconds}
    record["reward_seconds"] = rollouts.reward_seconds
    for name in reward_terms[0]:
        record[f"reward/{name}"] = mean(terms[name] for terms in reward_terms)
    kinds = [t.question.kind for t in trajectories]
    for kind in sorted(set(kinds)):
        own = [row for row, its in zip(numbers, kinds, strict=True) if its == kind]
        for name in ("em", "searched", "searches"):
            record[f"{name}/{kind}"] = mean(row[name] for row in own)
    record |= merge_records(numbers, mean)
    record["inserted_tokens"] = record.pop("tokens") - record["model_tokens"]
    record |= step_searches(rollouts.trajectories, state.accelerator.num_processes)
    record["failed_rows"] = failed.float().mean().item()
    record["skipped"] = int(not rollouts.kept)
    zero_std = grpo.frac_reward_zero_std(rollouts.rewards, settings.group_size)
    record["frac_reward_zero_std"] = zero_std
    if state.other_models is not None:  # the main process; it is the one that logs
        record |= {name: count() for name, count in state.other_models.stats.items()}
    if settings.algorithm == "dapo":
        record["resampled"] = rollouts.draws - 1
        kept = informative(rollouts, settings)  # [N]
        record["informative"] = kept.float().mean().item()
    return record


def logged_metrics(t: Trajectory) -> Record:
    """Returns the numbers of a trajectory whose means are logged; 0 for what does not apply."""
    numbers = trajectory_metrics(t)
    return {name: numbers.get(name, 0.0) for name in LOGGED}


def critic_metrics(batch: Batch) -> Record:
    """PPO: how much of the returns the critic foresaw."""
    if batch.values is None:
        return {}
    explained = ppo.explained_variance(batch.values, batch.returns, batch.response_mask)
    return {"explained_variance": explained}


def likelihood_later(batch: Batch, first: torch.Tensor) -> Record:
    """Have answers that earn more than their baseline become likelier by the updates before their
    own? Of rows that are not in the step's first update [n], the mean over those with A > 0 of
    Σ_t (log π − log π_old) over model tokens; A of a row is the sum over its tokens.

    Worked: A [1, 1], [−1, −1], [2, 2]; log π − log π_old [0, 0], [5, 5], [0.2, −0.1]; the first
    update has row 0: 0.1.
    At or below 0 it is the "lazy likelihood displacement" that comes before a collapse (Deng et al.
    2026, arXiv 2512.04220). It is only logged, and no term of a loss.
    """
    change = (batch.logprobs - batch.old_logprobs).sum(1)  # [B]  both are 0 on masked tokens
    better = batch.advantages.sum(1) > 0  # [B]
    better[first] = False  # nothing has moved yet
    return {"likelihood_later": change[better].mean().item()} if better.any() else {}


def sampler_stats(batch: Batch, first: torch.Tensor, mismatch: str) -> Record:
    """How far are the log-probs of sampling from those of scoring? The mean |difference| over the
    model tokens of the step's first update [n], by their weights, and the largest one: nothing has
    moved yet. Rows that teach nothing are not scored, and documents were not sampled.
    """
    part = batch.rows(first)
    part = part.rows(rows_that_teach(part))
    if batch.sampled_logprobs is None or not part.token_weights.any():
        return {}
    gap = (part.logprobs - part.sampled_logprobs).abs() * part.response_mask  # [n, t]
    mean_gap = (part.token_weights * gap).sum() / part.token_weights.sum()
    record = {"logprob_gap": mean_gap.item(), "logprob_gap_max": gap.max().item()}
    if mismatch != "none":
        record |= ppo.mismatch_stats(batch.rows(rows_that_teach(batch)), mismatch)
    return record


def main(arguments: list[str] | None = None) -> None:
    stages = parse_stages(arguments)
    _held = checkpoint.hold(stages)  # until all of them are done
    for settings in stages:
        with checkpoint.as_command(settings):
            train(settings)
    if settings.evaluate and make_accelerator(settings).is_main_process:
        evaluation.main([*named_by(settings), "--decoding", "both"])


if __name__ == "__main__":
    run_main(main)
