"""The training loop of a stage: sample, compute rewards and advantages, update.

    accelerate launch train.py --stage 1             the built-in world, UR²
    accelerate launch train.py --stage 2             from stage 1's last checkpoint, or --model
    accelerate launch train.py --stage 1,2           both stages
    accelerate launch train.py --stage 1 --model DIR --data FILE --corpus from-data
    python train.py --dry_run                        tries a small step and reports problems

    questions -> rollout -> rewards [B] -> advantages [B, T] -> for each update: token weights
    (Σ = 1) -> micro-batches: Σ weight · loss, backward -> clip gradient -> one optimizer step

DAPO drops uninformative groups and draws more questions in their place; PPO also updates a critic.
Each process samples trajectories for its share of the questions. All trajectories are then gathered
on every process, so advantages use the global batch.

Files in runs/NAME/stageN: settings.json, metrics.jsonl, trajectories.jsonl.gz, checkpoints.
"""

from errors import run_main  # before torch

# isort: split
from flags import parse_stages, stage_folder
from settings import Settings

if __name__ == "__main__":
    run_main(parse_stages)  # a wrong flag is reported before torch is loaded
# isort: split
import copy
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

import dapo
import grpo
import ppo
from plumbing import checkpoint
from plumbing.alarms import MOST_FAILED
from plumbing.build import build_state
from plumbing.dry_run import report, try_out
from plumbing.files import Run
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
    compute_old_logprobs,
    compute_ref_logprobs,
    compute_values,
    merge_records,
    old_logprobs_come_first,
    rows_that_teach,
    update,
    updates_of,
)

LOGGED = """
em f1 cem searched searches successful repeated queries rejected failed_rows answered truncated
model_tokens tokens malformed_tags
""".split()


@dataclass
class Rollouts:
    """Holds the trajectories of one step, their rewards, and which of them are in the batch."""

    trajectories: list[Trajectory] = field(default_factory=list)  # N, group by group
    reward_terms: list[Record] = field(default_factory=list)  # N
    correct: list[bool] = field(default_factory=list)  # N
    # Indices in `trajectories` of those that enter the batch. Groups are whole: a trajectory in
    # which a search failed is in the batch too, although it is not trained on.
    kept: list[int] = field(default_factory=list)
    draws: int = 0
    seconds: float = 0.0  # of sampling and searching
    reward_seconds: float = 0.0

    @property
    def failed(self) -> Tensor:
        """[N] bool: True for each trajectory in which a search failed."""
        return torch.tensor([t.failed for t in self.trajectories])

    @property
    def rewards(self) -> Tensor:
        """[N]: the reward of each trajectory; NaN if a search failed, because nobody knows the
        reward that the trajectory would have got without the failure. A NaN from a reward function
        becomes infinite, so that an update on it has no finite loss and the run stops.
        """
        rewards = torch.tensor([float(sum(terms.values())) for terms in self.reward_terms])  # [N]
        rewards[rewards.isnan()] = torch.inf
        return rewards.masked_fill(self.failed, torch.nan)


def train(settings: Settings) -> Path:
    """Trains one stage and returns its folder."""
    state = build_state(settings)
    first_step = checkpoint.resume(state) if settings.resume else 0
    if settings.dry_run:
        try_out(state, shared_rollout)
        rollouts = collect(state, first_step)
        record, _ = learn(state, rollouts, first_step)
        report(state, record, rollouts.trajectories)
        return stage_folder(settings)
    run = Run(settings, state.accelerator)
    run.open(first_step)
    for step in run.steps_to_do(first_step):
        with checkpoint.saved_on_error(run, state, step):
            rollouts = collect(state, step)
        with checkpoint.saved_before_updates(run, state, step):
            record, batch = learn(state, rollouts, step)
        try:
            due = settings.eval_every and (step + 1) % settings.eval_every == 0
            if due and record["failed_rows"] <= MOST_FAILED:  # else the run ends before this step
                with checkpoint.saved_on_error(run, state, step + 1):
                    record |= evaluate(state)
        finally:  # the step is logged even if the evaluation fails
            run.log(record, rollouts, batch, state.environment.tokenizer)
        checkpoint.save_if_due(run, state, record)
    state.accelerator.wait_for_everyone()  # until the main process has saved
    return run.folder


def learn(state: TrainState, rollouts: Rollouts, step: int) -> tuple[Record, Batch | None]:
    """Makes the step's updates. Returns its metrics, and its batch, or None if it has none."""
    # These metrics include the groups that DAPO drops.
    record = {"step": step} | measure(state, rollouts)
    start = time.perf_counter()
    batch = None
    if rollouts.kept:
        batch = prepare(state, rollouts)  # [B, L]
        results = []
        updates = shuffled_updates(step, batch.rewards, state.settings)
        by_update = state.recompute and not old_logprobs_come_first(state)
        if by_update and len(updates) > 1:  # before the first update changes the policy
            compute_old_logprobs(state, batch, torch.cat(updates[1:]))
        for number, rows in enumerate(updates):
            lr = set_lr(state, step, number)
            part = batch.rows(rows)
            result = update(state, part, by_update and not number)  # PPO also updates the critic
            result["lr"] = lr
            results.append(result if number else result | sampler_gap(part))
            keep_numbers(batch, rows, part)
        record |= merge_records(results, mean)
        if batch.values is not None:
            record["explained_variance"] = ppo.explained_variance(batch)
    record["update_seconds"] = time.perf_counter() - start
    return record, batch


# ------------------------------------------------------------------------------------------ sample
def collect(state: TrainState, step: int) -> Rollouts:
    """Samples the step's trajectories and computes their rewards. DAPO (departure 2 in dapo.py)
    draws more questions until there are enough informative groups, or no draw is left. The
    questions of a draw depend only on the seed, the step and the number of the draw.
    """
    settings = state.settings
    rollouts = Rollouts()
    wanted = settings.questions_per_step * settings.group_size
    for _ in range(state.stream.attempts):
        start = time.perf_counter()
        trajectories = sample_draw(state, step, rollouts.draws)
        scored_from = time.perf_counter()
        # Only the main process computes rewards, because a judge might give each process a
        # different verdict, and the processes would then train on different trajectories.
        scored = [None, None]
        if state.other_models is not None:
            scored = [*compute_rewards(trajectories, settings, step, state.other_models)]
        state.accelerator.wait_for_everyone()
        reward_terms, correct = broadcast_object_list(scored)
        rollouts.seconds += scored_from - start
        rollouts.reward_seconds += time.perf_counter() - scored_from
        rollouts.trajectories += trajectories
        rollouts.reward_terms += reward_terms
        rollouts.correct += correct
        kept = rows_to_train_on(rollouts, settings)  # [N]
        rollouts.kept = kept.nonzero()[:wanted, 0].tolist()  # not more than wanted
        rollouts.draws += 1
        if len(rollouts.kept) >= wanted:
            break
    if rollouts.failed.float().mean() > MOST_FAILED:
        rollouts.kept = []  # a search failed in most rows: the run stops after this step
    return rollouts


def sample_draw(state: TrainState, step: int, draw: int) -> list[Trajectory]:
    """Samples the trajectories of one draw; those of the same question follow each other."""
    questions, wanted = state.stream.take(step, draw), state.settings.questions_per_step
    # A dry run wants only some of them, evenly spread, so that several kinds are tried.
    questions = questions[:: len(questions) // wanted][:wanted]
    seed = state.settings.seed * 1_000_003 + state.accelerator.process_index
    seed += (step * state.stream.attempts + draw) * 1_009
    return shared_rollout(state, state.environment, questions, seed)


def shared_rollout(state: TrainState, environment, questions: list, seed: int) -> list[Trajectory]:
    """Samples trajectories for this process's share of the questions. Returns the trajectories of
    all processes.
    """
    rank = state.accelerator.process_index
    processes = state.accelerator.num_processes
    first = len(questions) * rank // processes
    end = len(questions) * (rank + 1) // processes
    with evaluating(state.policy), state.sampler() as policy:
        trajectories = rollout(policy, environment, questions[first:end], seed, state.generate)
    state.accelerator.wait_for_everyone()
    return gather_object(trajectories)


def evaluate(state: TrainState) -> Record:
    """Answers the held-out questions greedily and returns the mean metrics. After each evaluation
    (every --eval_every steps) a checkpoint is saved, and the best checkpoint is never deleted (When
    to Search, training details).
    """
    greedy = copy.copy(state.environment)
    greedy.settings = replace(state.settings, temperature=0.0, group_size=1)
    greedy.held_out = True
    trajectories = shared_rollout(state, greedy, state.held_out, 0)
    metrics = merge_records([logged_metrics(t, lenient=True) for t in trajectories], mean)
    return {f"eval/{name}": number for name, number in metrics.items()}


def rows_to_train_on(rollouts: Rollouts, settings: Settings) -> Tensor:
    """Returns a mask [N] of the trajectories that enter the batch. Only DAPO drops groups. The
    setting `filter_by` says which: those whose answers are all right or all wrong ("correct"),
    whose reward terms `answer` are equal ("answer"), or whose rewards are equal ("total").
    Trajectories with a failed search are ignored in this comparison.

    Trap: "correct" drops every question that is always answered right, or always wrong, although
    its trajectories with a search could still be compared with those without one. When to Search
    therefore filters by "answer": its term `answer` also depends on the number of searches.
    """
    if settings.algorithm != "dapo":
        return torch.ones(len(rollouts.correct), dtype=torch.bool)  # [N]
    scores = rollouts.correct
    if settings.filter_by == "answer":
        scores = [terms["answer"] for terms in rollouts.reward_terms]
    elif settings.filter_by == "total":
        scores = rollouts.rewards.tolist()
    known = torch.tensor(scores).float().masked_fill(rollouts.failed, torch.nan)  # [N]
    return dapo.informative_groups(known, settings.group_size)


# ----------------------------------------------------------------------------------------- prepare
def prepare(state: TrainState, rollouts: Rollouts) -> Batch:
    """Returns the global batch with rewards [B], advantages [B, T] and log-probs [B, T]: π_old's if
    they are recomputed and come first, else those recorded while sampling. With a KL it also has
    π_ref's log-probs, and with PPO the critic's values and the returns.
    """
    settings = state.settings
    rows = rollouts.kept
    rewards = rollouts.rewards[rows].tolist()
    trajectories = [rollouts.trajectories[row] for row in rows]
    if not settings.mask_documents:  # the loss-mask ablation: all tokens after the prompt count
        trajectories = [replace(t, response_mask=[1] * len(t.response_ids)) for t in trajectories]
    batch = collate(trajectories, rewards, settings.group_size)
    overlong = [t.stop_reason == "length" and t.answer is None for t in trajectories]
    batch.overlong = torch.tensor(overlong)  # [B]  truncated before it answered
    if not settings.mask_documents:
        batch.sampled_logprobs = None  # documents were not sampled
    batch.response_mask[batch.rewards.isnan()] = 0.0  # so no mean counts rows with a failed search
    if settings.kl_coef:
        batch.ref_logprobs = compute_ref_logprobs(state, batch)  # [B, T]
    if state.critic is not None:  # once, for the advantages, the returns and value clipping
        batch.values = compute_values(state, batch)  # [B, T]
    if state.recompute and old_logprobs_come_first(state):
        batch.old_logprobs = compute_logprobs(state, state.policy, batch)  # [B, T]
    batch.advantages = ALGORITHMS[settings.algorithm].compute_advantages(batch, settings)  # [B, T]
    return batch


def shuffled_updates(step: int, rewards: Tensor, settings: Settings) -> tuple:
    """Returns the rows [n] of each update of a step. All rows whose reward [B] is not NaN are
    shuffled and divided evenly into the fewest updates of at most `trajectories_per_update` rows
    (0: one update). If DAPO dropped groups or searches failed, a step may have fewer updates than
    other steps.
    """
    rows = (~rewards.isnan()).nonzero()[:, 0]  # [n]
    generator = torch.Generator().manual_seed(settings.seed * 7_919 + step)
    order = rows[torch.randperm(len(rows), generator=generator)]  # [n]
    return order.tensor_split(updates_of(len(rows), settings))


def set_lr(state: TrainState, step: int, number: int) -> float:
    """Sets the learning rates for update `number` of the step and returns the policy's. The
    critic's rate has its own warm-up and then stays constant, so that the critic can learn while
    the policy is still in a long warm-up.
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
    """Returns the metrics of a step's rollout (docs/metrics.md), including the groups that DAPO
    drops. Rewards, `inserted_tokens` and the metrics in LOGGED (except `failed_rows`) are means
    over the trajectories without a failed search, or over all if each has one. The other metrics
    are over all, but where they compare a group's trajectories (`frac_reward_zero_std`,
    `informative`), those with a failed search are ignored.
    """
    failed = rollouts.failed
    settings = state.settings
    rows = []  # the metrics of each trajectory; of `em/KIND`, only its own kind's
    for row in (~failed | failed.all()).nonzero()[:, 0].tolist():
        t, terms = rollouts.trajectories[row], rollouts.reward_terms[row]
        numbers = {"reward": sum(terms.values()), **logged_metrics(t)}
        numbers |= {f"reward/{name}": term for name, term in terms.items()}
        for name in ("em", "searched", "searches"):
            numbers[f"{name}/{t.question.kind}"] = numbers[name]
        rows.append(numbers)
    names = dict.fromkeys(name for numbers in rows for name in numbers)
    record = {name: mean(n[name] for n in rows if name in n) for name in names}
    record["inserted_tokens"] = record.pop("tokens") - record["model_tokens"]
    record |= step_searches(rollouts.trajectories, state.accelerator.num_processes)
    record |= {
        "rollout_seconds": rollouts.seconds,
        "reward_seconds": rollouts.reward_seconds,
        "failed_rows": failed.float().mean().item(),
        "skipped": int(not rollouts.kept),
        "frac_reward_zero_std": grpo.frac_reward_zero_std(rollouts.rewards, settings.group_size),
    }
    if state.other_models is not None:  # only in the main process, which logs
        record |= {name: count() for name, count in state.other_models.stats.items()}
    if settings.algorithm == "dapo":
        share = rows_to_train_on(rollouts, settings).float().mean()
        record |= {"resampled": rollouts.draws - 1, "informative": share.item()}
    return record


def logged_metrics(t: Trajectory, lenient: bool = False) -> Record:
    """Returns the trajectory's metrics that are logged; a metric that does not apply is 0."""
    numbers = trajectory_metrics(t, lenient)
    return {name: numbers.get(name, 0.0) for name in LOGGED}


def sampler_gap(first: Batch) -> Record:
    """Returns the mean (by the token weights) and the largest |log π − log μ| of the step's first
    update, before which the policy has not changed: the difference is the sampler's. The update
    computes no log-probs for rows without a gradient, so they are left out.
    """
    part = first.rows(rows_that_teach(first))
    # Documents, if trained on, were not sampled; and the update may train on no token.
    if part.sampled_logprobs is None or not part.token_weights.any():
        return {}
    gap = (part.logprobs - part.sampled_logprobs).abs() * part.response_mask  # [n, t]
    mean_gap = (part.token_weights * gap).sum() / part.token_weights.sum()
    return {"logprob_gap": mean_gap.item(), "logprob_gap_max": gap.max().item()}


def main(arguments: list[str] | None = None) -> None:
    for settings in parse_stages(arguments):
        with checkpoint.as_command(settings):
            train(settings)


if __name__ == "__main__":
    run_main(main)
