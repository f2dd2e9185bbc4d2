"""The loop: roll out, score, turn rewards into advantages, update. One stage of one paper per run.

    accelerate launch train.py --stage 1                      the built-in world, UR²
    accelerate launch train.py --stage 2                      goes on from stage 1's last checkpoint
    accelerate launch train.py --stage 1 --model DIR --data FILE --corpus from-data
    python train.py --plan --model 7B --gpus 1                what of it fits, before anything is
    downloaded

    questions -> rollout -> rewards [B] -> advantages [B, T] -> for each update: token weights (sum
    1) -> micro-batches: Σ weight · loss, backward -> clip -> one optimizer step

DAPO draws more questions for groups that teach nothing; PPO has a critic beside the policy, with an
update of its own.

The weights of the loss are fixed over the whole update before it is cut into micro-batches (and
over all processes): the usual mean of micro-batch means is 21 to 28 % off. Each process samples its
own share of the questions; then all know all trajectories, so group and batch statistics are of the
global batch.

Files of a run, under runs/NAME/stageN: settings.json, metrics.jsonl (a line per step), samples.txt,
checkpoint-NNNNNN. Ctrl-C is safe at any moment: a checkpoint is written aside and renamed, a line
of metrics is written whole.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from tqdm import tqdm

import dapo
import grpo
import ppo
import reinforce_pp
from curriculum import QuestionStream, read_difficulty
from errors import InputError, run_main
from lab import plan
from policy import (
    Batch,
    Policy,
    check_model_path,
    collate,
    evaluating,
    lr_factor,
    make_optimizer,
    micro_batches,
    save_policy,
)
from recipes import (
    Recipe,
    Scorer,
    answer_scores,
    build_protocol,
    build_search,
    check_questions,
    checkpoints,
    load_model,
    parse_recipe,
    passages,
    rollout_settings,
    search_seconds,
    shown_settings,
    stage_folder,
    training_questions,
)
from rollout import check_prompts, rollout
from scale.lora import add_lora, check_peft, load_lora, lora_state, without_lora
from scale.sampling import sampling_copy, wants_copy
from scale.shards import (
    asked_for,
    check_shardable,
    cut,
    full,
    in_parts,
    load_moments,
    load_weights,
    passes_behind,
    shard,
    whole,
    whole_moments,
    whole_weights,
)
from trajectory import Trajectory, show

ALGORITHMS = {
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp,
    "grpo": grpo,
    "dapo": dapo,
    "ppo": ppo,
}


# ------------------------------------------------------------------------------------------- set up


def starting_model(recipe: Recipe) -> tuple[str, str]:
    """(where the weights come from, what to say about it): the run's own last checkpoint with
    --resume; else --start_from; else in stage 2 stage 1's last one; else --model; else "", the
    built-in model.
    """
    if recipe.resume:
        found = checkpoints(stage_folder(recipe))
        if not found:
            raise InputError(
                f"--resume: no checkpoint in {stage_folder(recipe)}; leave the flag out to start"
                " anew"
            )
        return str(found[-1]), f"going on from {found[-1]}"
    if recipe.start_from:
        check_model_path(recipe.start_from)
        return recipe.start_from, f"stage {recipe.stage} starts from {recipe.start_from}"
    before = stage_folder(recipe, recipe.stage - 1)
    if recipe.stage > 1 and (found := checkpoints(before)):
        return str(found[-1]), f"stage {recipe.stage} starts from {found[-1]}"
    if recipe.model:
        check_model_path(recipe.model)
    start = f"starts from {recipe.model or 'the built-in model'}"
    missing = (
        f": there is no stage {recipe.stage - 1} checkpoint in {before}" if recipe.stage > 1 else ""
    )
    return recipe.model, f"stage {recipe.stage} {start}{missing}"


# ------------------------------------------------------------------------------- from score to step


def make_batch(
    trajectories: list[Trajectory], rewards: list[float], recipe: Recipe, pad_id: int
) -> Batch:
    """The global batch of one step, without advantages."""
    batch = collate(trajectories, rewards, recipe.group_size, pad_id)
    batch.overlong = torch.tensor(
        [t.stop_reason == "length" and t.answer is None for t in trajectories]
    )  # [B]
    if (
        not recipe.mask_documents
    ):  # the ablation: every token behind the prompt counts as the policy's
        lengths = torch.tensor(
            [[len(t.prompt_ids) - 1, len(t.ids) - 1] for t in trajectories]
        )  # [B, 2]
        columns = torch.arange(batch.response_mask.shape[1])  # [T]
        batch.response_mask = (
            (columns >= lengths[:, :1]) & (columns < lengths[:, 1:])
        ).float()  # [B, T]
        batch.sampled_logprobs = None  # of documents there are none
    return batch


def score_batch(
    policy: Policy, batch: Batch, recipe: Recipe, accelerator: Accelerator
) -> torch.Tensor:
    """Log-probs [B, T] of the batch's tokens under `policy`, on the CPU. Each process scores its
    share; all get all.
    """

    def compute(part: Batch) -> torch.Tensor:
        return policy(part.tokens, recipe.temperature, part.response_mask)  # [b, t]

    return in_shares(policy, compute, batch, recipe, accelerator)


def value_batch(
    critic: ppo.Critic, batch: Batch, recipe: Recipe, accelerator: Accelerator
) -> torch.Tensor:
    """The critic's values [B, T] of the states in which the policy chose a token, 0 elsewhere; on
    the CPU.
    """
    return in_shares(
        critic, lambda part: critic(part.tokens, part.response_mask), batch, recipe, accelerator
    )


@torch.no_grad()
def in_shares(
    model,
    compute: Callable[[Batch], torch.Tensor],
    batch: Batch,
    recipe: Recipe,
    accelerator: Accelerator,
) -> torch.Tensor:
    """compute(rows) [b, t] of all rows [B, T]: each process takes its share, in micro-batches; all
    get all.
    """
    scored = torch.zeros(batch.response_mask.shape)  # [B, T]
    mine = torch.arange(accelerator.process_index, len(batch), accelerator.num_processes)
    cuts = micro_batches(batch.response_mask[mine], recipe.tokens_per_micro_batch)
    behind = passes_behind(len(cuts), model)
    for rows in cuts:
        result = compute(batch.rows(mine[rows]).to(accelerator.device))  # [b, t]
        scored[mine[rows], : result.shape[1]] = result.float().cpu()
    for _ in range(behind):
        compute(batch.rows(torch.zeros(1, dtype=torch.long)).to(accelerator.device))
    cut(model)
    return (
        accelerator.reduce(scored.to(accelerator.device), "sum").cpu()
        if accelerator.num_processes > 1
        else scored
    )


def update(
    model, optimizer, algorithm, part: Batch, recipe: Recipe, accelerator: Accelerator, fresh: bool
) -> dict[str, float]:
    """One optimizer update of the policy on the rows of `part` (all processes hold all of them;
    each takes its share).

    fresh: this is the first update of the step, so π_old is π: its log-probs are taken from the
    forward pass itself.
    """
    part.token_weights = algorithm.compute_token_weights(part, recipe)  # [B, T]

    def loss_of(micro: Batch, totals: dict) -> torch.Tensor:
        logprobs = model(micro.tokens, recipe.temperature, micro.response_mask)  # [b, t]
        if micro.sampled_logprobs is not None:
            gap = (logprobs.detach() - micro.sampled_logprobs).abs() * micro.response_mask  # [b, t]
            totals["logprob_gap"] += (micro.token_weights * gap).sum().item()
            totals["logprob_gap_max"] = max(totals["logprob_gap_max"], gap.max().item())
        if fresh:
            micro.old_logprobs = logprobs.detach()
        loss, stats = algorithm.compute_loss(logprobs, micro, recipe)  # [b, t]
        add_stats(totals, logprobs, stats, micro)
        return (micro.token_weights * loss).sum()

    # What happens when all rewards of a group are equal? Its advantages are 0, so it adds nothing
    # to this gradient; if all groups are equal the gradient is 0, and only the momentum of earlier
    # updates still moves the weights.
    return descend(model, optimizer, part, recipe, accelerator, loss_of)


def update_critic(
    model, optimizer, part: Batch, recipe: Recipe, accelerator: Accelerator
) -> dict[str, float]:
    """One optimizer update of the critic on the same rows: towards part.returns, every model token
    weighing the same.
    """
    part.token_weights = ppo.token_weights(part.response_mask)  # [B, T]

    def loss_of(micro: Batch, totals: dict) -> torch.Tensor:
        loss, stats = ppo.compute_value_loss(
            model(micro.tokens, micro.response_mask), micro, recipe
        )  # [b, t]
        totals["value_clip_fraction"] += (micro.token_weights * stats["clipped"]).sum().item()
        return (micro.token_weights * loss).sum()

    totals = descend(model, optimizer, part, recipe, accelerator, loss_of)
    return {"value_loss": totals.pop("loss"), "critic_grad_norm": totals.pop("grad_norm"), **totals}


def descend(
    model,
    optimizer,
    part: Batch,
    recipe: Recipe,
    accelerator: Accelerator,
    loss_of: Callable[[Batch, dict], torch.Tensor],
) -> dict[str, float]:
    """The gradient of Σ weight · loss over `part`, micro-batch by micro-batch, and one optimizer
    step.

    A loss or a gradient that is not finite changes no weight: the caller looks at the totals and
    stops.
    """
    mine = share_of(part, accelerator)
    cuts = micro_batches(mine.response_mask, recipe.tokens_per_micro_batch)
    totals: dict[str, float] = defaultdict(float)
    extra = [torch.zeros(1, dtype=torch.long)] * passes_behind(len(cuts), model)
    for number, rows in enumerate(cuts + extra):
        micro = mine.rows(rows).to(accelerator.device)
        if number >= len(cuts):  # a pass that only keeps the others company
            micro.token_weights = torch.zeros_like(micro.token_weights)  # [1, t]
        wait = number + 1 < len(cuts) and not in_parts(
            model
        )  # parts take their share of each gradient at once
        with accelerator.no_sync(model) if wait else contextlib.nullcontext():
            loss = loss_of(micro, totals)
            # DDP averages the gradients of its processes; ours are parts of one sum
            accelerator.backward(loss * accelerator.num_processes)
        totals["loss"] += loss.item()
    totals = over_processes(totals, accelerator)
    totals["grad_norm"] = full(
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
    ).item()
    if math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"]):
        optimizer.step()
    optimizer.zero_grad()
    return totals


def share_of(part: Batch, accelerator: Accelerator) -> Batch:
    """This process's rows of an update. One without any takes row 0 at weight 0: the backward pass
    that it left out would keep the others waiting.
    """
    rows = torch.arange(accelerator.process_index, len(part), accelerator.num_processes)
    mine = part.rows(rows if len(rows) else torch.zeros(1, dtype=torch.long))
    if not len(rows):
        mine.token_weights = torch.zeros_like(mine.token_weights)  # [1, T]
    return mine


def add_stats(totals: dict, logprobs: torch.Tensor, stats: dict, micro: Batch) -> None:
    """Weighted sums over the update: with token weights that sum to 1 they are means."""
    ratio = stats.pop("ratio")  # [b, t]  1 on masked tokens
    totals["ratio_min"] = min(totals.get("ratio_min", 1.0), ratio.min().item())
    totals["ratio_max"] = max(totals.get("ratio_max", 1.0), ratio.max().item())
    totals["entropy"] += (
        -(micro.token_weights * logprobs.detach()).sum().item()
    )  # Monte-Carlo estimate
    for name, value in stats.items():
        totals["clip_fraction" if name == "clipped" else name] += (
            (micro.token_weights * value).sum().item()
        )


EXTREMES = {  # what is no sum and no mean
    "ratio_min": min,
    "ratio_max": max,
    "grad_norm": max,
    "critic_grad_norm": max,
    "logprob_gap_max": max,
}


def over_processes(totals: dict[str, float], accelerator: Accelerator) -> dict[str, float]:
    """The totals of all processes: each has summed its own rows."""
    if accelerator.num_processes == 1:
        return dict(totals)
    every = gather_object([dict(totals)])
    return {name: EXTREMES.get(name, sum)([part[name] for part in every]) for name in every[0]}


# ----------------------------------------------------------------------------------- what is logged


def measure(
    trajectories: list[Trajectory], components: list[dict[str, float]], recipe: Recipe
) -> dict[str, float]:
    """The numbers of one step's rollout, of all that was sampled: also of what DAPO then drops. The
    README says what each means.
    """
    count = len(trajectories)
    record = {"reward": sum(sum(c.values()) for c in components) / count}
    for name in components[0]:
        record[f"reward/{name}"] = sum(c[name] for c in components) / count
    em, kinds = [answer_scores(t)["em"] for t in trajectories], defaultdict(list)
    for row, t in enumerate(trajectories):
        kinds[t.question.kind].append(row)
    for kind, rows in sorted(kinds.items()):
        record[f"em/{kind}"] = sum(em[row] for row in rows) / len(rows)
        record[f"searched/{kind}"] = sum(bool(trajectories[row].searches) for row in rows) / len(
            rows
        )
        record[f"searches/{kind}"] = sum(len(trajectories[row].searches) for row in rows) / len(
            rows
        )
    searches = [s for t in trajectories for s in t.searches]
    model_tokens = sum(sum(t.response_mask) for t in trajectories)
    record |= {
        "em": sum(em) / count,
        "searched": sum(bool(t.searches) for t in trajectories) / count,
        "searches": len(searches) / count,
        "fallbacks": sum(s.fallback for s in searches) / max(1, len(searches)),
        "search_errors": sum(s.error is not None for s in searches) / max(1, len(searches)),
        "refused": sum(len(t.refusals) for t in trajectories) / count,
        "answered": sum(t.answer is not None for t in trajectories) / count,
        "cut_off": sum(t.stop_reason in ("length", "refused") for t in trajectories) / count,
        "model_tokens": model_tokens / count,
        "inserted_tokens": (
            sum(len(t.response_mask) for t in trajectories) / count - model_tokens / count
        ),
    }
    rewards = torch.tensor([sum(c.values()) for c in components])
    record["frac_reward_zero_std"] = float(grpo.frac_reward_zero_std(rewards, recipe.group_size))
    return record


def console_line(record: dict) -> str:
    shown = (
        "reward",
        "em",
        "searched",
        "searches",
        "fallbacks",
        "model_tokens",
        "frac_reward_zero_std",
        "grad_norm",
    )
    line = f"step {record['step']:>4}  " + "  ".join(
        f"{name} {record[name]:.2f}" for name in shown if name in record
    )
    if record.get("search_errors"):
        line += f"  search_errors {record['search_errors']:.2f}"
    if record.get("skipped"):
        line += f"  no update: no group had answers that differ, in {1 + record['resampled']} draws"
    return line


PATIENCE = 3  # steps in a row
HINTS = {  # why is my curve flat or dead? cause -> (seen in a step's record, where to look)
    "equal rewards": (
        lambda record, recipe: (
            record["frac_reward_zero_std"] == 1 and recipe.algorithm not in ("reinforce_pp", "ppo")
        ),
        (
            "all rewards of every group were equal, so nothing is learned: is the reward ever"
            " reached (samples.txt), or always? A larger --group_size, or easier questions, gives"
            " differences"
        ),
    ),
    "no informative group": (
        lambda record, recipe: record.get("skipped", 0) == 1,
        (
            "no group had answers that differ, so no update was made: are they too hard or too easy"
            " (samples.txt)? A larger --group_size or --max_resample finds more"
        ),
    ),
    "no search": (
        lambda record, recipe: (
            record["searched"] + record["refused"] == 0
            and recipe.retrieval
            and recipe.max_searches > 0
        ),
        (
            "no trajectory searched: does the model know the query tags (samples.txt)? Stage 1 or"
            " some supervised traces teach it"
        ),
    ),
    "only refused": (
        lambda record, recipe: record["refused"] > 0 and record["searched"] == 0,
        "queries were written but none was run: they are empty or lack the begin tag (samples.txt)",
    ),
    "cut off": (
        lambda record, recipe: record["cut_off"] == 1,
        (
            "every trajectory was cut off before an answer: raise --max_turn_tokens or"
            " --max_context, or look at samples.txt"
        ),
    ),
    "another sampler": (
        lambda record, recipe: record.get("logprob_gap", 0) > 0.1,
        (
            "the log-probs that tokens were sampled and scored with differ by more than 0.1:"
            " something is seen by one of the two only; --engine hf and --sampling_copy none take"
            " out, one by one, what may differ"
        ),
    ),
    "search down": (
        lambda record, recipe: record["search_errors"] >= 0.1,
        (
            "a tenth or more of the searches failed: the retriever is down, slower than"
            " --search_timeout, or refuses queries"
        ),
    ),
}


class Hints:
    """After `PATIENCE` steps of one cause a line that says where to look, once per run and
    cause.
    """

    def __init__(self, recipe: Recipe):
        self.recipe, self.streaks = recipe, Counter()

    def after(self, record: dict) -> list[str]:
        lines = []
        for cause, (seen, advice) in HINTS.items():
            told = self.streaks[cause] >= PATIENCE
            self.streaks[cause] = (
                self.streaks[cause] + 1 if told or seen(record, self.recipe) else 0
            )
            if self.streaks[cause] == PATIENCE:
                lines.append(f"hint: for {PATIENCE} steps {advice}")
        return lines


# ----------------------------------------------------------------------------------------- the loop


def settings_text(recipe: Recipe) -> str:
    return json.dumps(dataclasses.asdict(recipe), indent=1) + "\n"


class Run:
    """The files of one run. Only the main process writes."""

    def __init__(self, recipe: Recipe, main: bool):
        self.folder, self.recipe, self.main = stage_folder(recipe), recipe, main

    def open(self, first_step: int) -> None:
        if not self.main:
            return
        if not self.recipe.resume and self.folder.exists():
            old = next(
                p
                for i in itertools.count(1)
                if not (p := self.folder.with_name(f"{self.folder.name}.old{i}")).exists()
            )
            self.folder.rename(old)
            print(
                f"{self.folder} held an earlier run: moved to {old.name} (--resume goes on with"
                " one)"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():  # of steps behind the checkpoint that is resumed
            kept = [line for line in metrics.read_text().splitlines() if step_of(line) < first_step]
            metrics.write_text("".join(line + "\n" for line in kept))
        (self.folder / "settings.json").write_text(settings_text(self.recipe))

    def log(self, record: dict) -> None:
        if self.main:
            with open(
                self.folder / "metrics.jsonl", "a"
            ) as file:  # opened for each line: what is written stays whole
                file.write(
                    json.dumps(
                        {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
                    )
                    + "\n"
                )

    def show(self, text: str) -> None:
        if self.main:
            with open(self.folder / "samples.txt", "a") as file:
                file.write(text + "\n\n")

    def save(
        self, policy: Policy, tokenizer, trainer: dict, step: int, weights: dict | None = None
    ) -> None:
        """After `step` finished steps; trainer: what else a resumed run needs; weights: the
        policy's, where it has parts.
        """
        path = self.folder / f"checkpoint-{step:06d}"
        if not self.main or path.exists():
            return
        save_policy(
            policy, tokenizer, path, {"step": step, **trainer}, settings_text(self.recipe), weights
        )
        keep = self.recipe.keep_checkpoints
        for old in checkpoints(self.folder)[:-keep] if keep else []:
            shutil.rmtree(old)


def step_of(line: str) -> float:
    """The step of a line of metrics.jsonl; a line that a crash cut short belongs to none."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def set_threads(threads: int) -> None:
    """Trap: `accelerate launch` sets OMP_NUM_THREADS=1, and a CPU run then uses one core of those
    there are.
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    torch.set_num_threads(threads or max(1, cores // local_processes))


@dataclass
class Sampled:
    """What one step sampled: `trajectories` and their reward `components`, and the rows of them
    that are trained on.
    """

    trajectories: list[Trajectory]
    components: list[dict[str, float]]
    correct: torch.Tensor  # [N] bool
    kept: list[int]  # rows; groups stay whole
    draws: int


def check_processes(known: int) -> None:
    """Trap: on CPUs, processes that torchrun started do not find each other by themselves: each
    would train alone, into the same folder.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != known:
        raise InputError(
            f"{started} processes were started and {known} take part: set ACCELERATE_USE_CPU=true,"
            " or start one"
        )


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Processes wait for each other's rollouts: as long as all searches of one may take, and half
    an hour.
    """
    searching = (recipe.max_searches + 1) * (recipe.search_retries + 1) * search_seconds(recipe)
    limit = InitProcessGroupKwargs(timeout=timedelta(minutes=30, seconds=searching))
    # bucket views: without them DDP keeps a second copy of all gradients
    return Accelerator(
        kwargs_handlers=[limit, DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )


class Trainer:
    """Everything one stage needs, set up once; `step` is one turn of the loop."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.accelerator = recipe, make_accelerator(recipe)
        check_processes(self.accelerator.num_processes)
        self.sharding = asked_for() if self.accelerator.num_processes > 1 else "ddp"
        if self.sharding != "ddp":
            check_shardable(recipe.optimizer, recipe.lora_rank)
        self.copies = wants_copy(recipe.sampling_copy, self.accelerator.device, recipe.base_in_8bit)
        set_threads(recipe.threads)
        self.algorithm = ALGORITHMS[recipe.algorithm]
        self.protocol = build_protocol(recipe)
        start, said = starting_model(
            recipe
        )  # first of all: reading a corpus and then missing the model wastes minutes
        if recipe.lora_rank:
            check_peft(recipe.lora_rank)
        questions = check_questions(training_questions(recipe), recipe)
        self.draws = (
            1 + recipe.max_resample if self.algorithm is dapo else 1
        )  # of questions per step, at most
        difficulty = read_difficulty(recipe.difficulty, questions) if recipe.difficulty else None
        self.stream = QuestionStream(
            questions,
            recipe.questions_per_step,
            recipe.mix,
            recipe.seed,
            self.draws,
            difficulty,
            recipe.buckets,
            recipe.task_mixing,
        )
        documents, device = passages(recipe, questions), self.accelerator.device
        self.accelerator.print(said)
        # Not under the barrier below: vectors of a large corpus take hours. (dense.py's own lock
        # lets one process encode.)
        self.search = build_search(recipe, documents, device)
        with (
            self.accelerator.local_main_process_first()
        ):  # one process makes the built-in models, the others read them
            self.policy, self.tokenizer = self.load_trained(start)
            self.scorer = (
                Scorer(recipe, documents, device) if self.accelerator.is_main_process else None
            )
        check_prompts(
            questions, self.protocol, self.tokenizer, self.policy, **rollout_settings(recipe)
        )
        self.reference = self.load_reference() if recipe.kl_coef and not recipe.lora_rank else None
        self.critic = None
        if self.algorithm is ppo:  # also in stage 2 a new one: another reward has other values
            self.critic = ppo.Critic(copy.deepcopy(self.policy.language_model.base_model))
            self.critic_model, self.critic_optimizer = self.spread(self.critic, recipe.critic_lr)
        self.model, self.optimizer = self.spread(self.policy, recipe.lr)
        self.first_step = self.load_trainer(Path(start)) if recipe.resume else 0
        per_step = recipe.questions_per_step * recipe.group_size
        self.per_update = recipe.trajectories_per_update or per_step
        self.updates = math.ceil(per_step / self.per_update)
        if per_step // self.updates < self.accelerator.num_processes:
            raise InputError(
                f"{per_step // self.updates} trajectories per update cannot be shared by "
                f"{self.accelerator.num_processes} processes: raise --trajectories_per_update"
            )

    def spread(self, module, lr: float):
        """(what is called in an update, its optimizer): the module's weights on every process, or
        each with a part of them.
        """
        if self.sharding == "ddp":
            model = self.accelerator.prepare_model(module)
        else:
            model = shard(module, self.sharding, self.accelerator.num_processes)
        recipe = self.recipe
        return model, make_optimizer(
            module, recipe.optimizer, lr, (recipe.beta1, recipe.beta2), recipe.weight_decay
        )

    @property
    def recompute(self) -> bool:
        """Are π_old's log-probs computed again? Under bf16 sampling and scoring round differently,
        and a rollout has none for documents. The step's first update gets them from its own forward
        pass (`fresh`): only the later ones' rows cost a scoring pass, before the weights move.
        """
        recipe = self.recipe
        bf16 = self.accelerator.device.type != "cpu" or self.copies
        return (
            recipe.old_logprobs == "recompute"
            or (recipe.old_logprobs == "auto" and bf16)
            or not recipe.mask_documents
        )

    def load_trained(self, start: str) -> tuple[Policy, object]:
        """(policy, tokenizer). With LoRA the frozen weights are those that the stage began with,
        also in a resumed run: its checkpoint holds the sum, and beside it what was learned.
        """
        recipe, device = self.recipe, self.accelerator.device
        if not recipe.lora_rank:
            return load_model(recipe, start, device)
        policy, tokenizer = load_model(
            recipe, self.first_model(), device, True, recipe.base_in_8bit
        )
        add_lora(
            policy.language_model,
            recipe.lora_rank,
            recipe.lora_alpha,
            recipe.lora_targets,
            recipe.seed,
        )
        return policy, tokenizer

    def first_model(self) -> str:
        """The model this stage began with."""
        return starting_model(dataclasses.replace(self.recipe, resume=False))[0]

    def load_reference(self) -> Policy:
        """π_ref: the model this stage began with, frozen."""
        recipe = self.recipe
        reference, _ = load_model(
            recipe, self.first_model(), self.accelerator.device, True, recipe.reference_in_8bit
        )
        return reference.eval().requires_grad_(False)

    def score_reference(self, batch: Batch) -> torch.Tensor:
        """π_ref's log-probs [B, T]. With LoRA it is the policy without what was learned: no second
        model is loaded.
        """
        if self.reference is not None:
            return self.score(self.reference, batch)
        with without_lora(self.policy):
            return self.score(self.policy, batch)

    def load_trainer(self, path: Path) -> int:
        """Optimizer state and step number of the checkpoint at `path`; of PPO the critic too."""
        # mmap: 8 processes share one copy of the file in memory. Of a 7B model the moments are 57
        # GiB.
        state = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True, mmap=True)
        if bool(self.recipe.lora_rank) != ("lora" in state):
            raise InputError(
                f"--resume: {path} was made {'with' if 'lora' in state else 'without'} --lora_rank;"
                " do the same, or leave --resume out to start anew"
            )
        if self.recipe.lora_rank:
            load_lora(self.policy, state["lora"])
        load_moments(self.policy, self.optimizer, state["optimizer"])
        if self.critic is not None:
            if "critic" not in state:
                raise InputError(
                    f"--resume: {path} was not made by PPO and has no critic; leave --resume out to"
                    " start anew"
                )
            load_weights(self.critic, state["critic"])
            load_moments(self.critic, self.critic_optimizer, state["critic_optimizer"])
        if state["step"] >= self.recipe.steps:
            raise InputError(
                f"--resume: {state['step']} of --steps {self.recipe.steps} steps are done; raise"
                " --steps to go on"
            )
        before = json.loads((path / "settings.json").read_text(encoding="utf-8"))
        now = dataclasses.asdict(self.recipe)
        changed = [
            f"{k}={now[k]} (was {v})"
            for k, v in before.items()
            if k != "resume" and now.get(k, v) != v
        ]
        if changed:
            self.accelerator.print("resumed with other settings: " + ", ".join(changed))
        return state["step"]

    def state(self) -> dict:
        """What a checkpoint holds beside the policy. All processes call it: parts are put
        together.
        """
        state = {"optimizer": whole_moments(self.policy, self.optimizer)}
        if self.recipe.lora_rank:
            state["lora"] = lora_state(self.policy)
        if self.critic is not None:
            moments = whole_moments(self.critic, self.critic_optimizer)
            state |= {"critic": whole_weights(self.critic), "critic_optimizer": moments}
        return state

    def weights(self) -> dict | None:
        """The policy's weights where no process has all of them."""
        return whole_weights(self.policy.language_model) if in_parts(self.policy) else None

    def score(self, policy: Policy, batch: Batch) -> torch.Tensor:
        with evaluating(policy):
            return score_batch(policy, batch, self.recipe, self.accelerator)  # [B, T]

    def roll_out(self, step: int, draw: int = 0) -> list[Trajectory]:
        """This process samples its share of the questions; all processes get all trajectories,
        group by group.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        questions = self.stream.take(step, draw)
        bounds = [len(questions) * r // world for r in range(world + 1)]
        seed = self.recipe.seed * 1_000_003 + (step * self.draws + draw) * 1_009 + rank
        mine = questions[bounds[rank] : bounds[rank + 1]]
        settings = rollout_settings(self.recipe)
        if self.recipe.retrieval:  # task mixing: some questions are asked without
            settings["retrieval"] = self.stream.may_search(mine)
        with self.to_sample_with() as policy:
            mine = rollout(
                policy,
                self.tokenizer,
                mine,
                self.search,
                self.protocol,
                self.recipe.group_size,
                seed=seed,
                **settings,
            )
        return gather_object(mine) if world > 1 else mine

    @contextlib.contextmanager
    def to_sample_with(self):
        """A bf16 copy of the policy, or the policy itself, with all its weights together."""
        if self.copies:
            with sampling_copy(self.policy) as copy:
                yield copy
        else:
            with whole(self.policy, self.sharding):
                yield self.policy

    def judged(
        self, trajectories: list[Trajectory], step: int
    ) -> tuple[list[dict[str, float]], list[bool]]:
        """Reward components and correctness. One process scores for all: a model that judges may
        answer another process otherwise, and processes that go on with different rows wait for each
        other for ever.
        """
        found = [None, None]
        if self.accelerator.is_main_process:
            found = list(self.scorer(trajectories, step))
        components, correct = (
            broadcast_object_list(found) if self.accelerator.num_processes > 1 else found
        )
        return components, correct

    def sample(self, step: int) -> Sampled:
        """The step's trajectories. DAPO's departure 2: draws until there are enough informative
        groups, or no draw is left.

        What is drawn depends on (seed, step, draw) alone, so a resumed run draws what the unbroken
        one did.
        """
        group_size, sampled = (
            self.recipe.group_size,
            Sampled([], [], torch.zeros(0, dtype=torch.bool), [], 0),
        )
        wanted = self.recipe.questions_per_step * group_size
        while sampled.draws < self.draws and len(sampled.kept) < wanted:
            with evaluating(self.policy):
                trajectories = self.roll_out(step, sampled.draws)
            components, correct = self.judged(trajectories, step)
            sampled.trajectories += trajectories
            sampled.components += components
            sampled.correct = torch.cat([sampled.correct, torch.tensor(correct)])  # [N]
            keep = torch.ones(len(sampled.correct), dtype=torch.bool)  # [N]
            if self.algorithm is dapo:
                keep = self.informative(sampled)  # [N]
            sampled.kept = keep.nonzero()[
                :wanted, 0
            ].tolist()  # the first ones: a surplus is cut the same way every time
            sampled.draws += 1
        return sampled

    def informative(self, sampled: Sampled) -> torch.Tensor:
        """[N] bool. Trap: by correctness, a question that all trajectories answer right is dropped,
        and with it every comparison of a right answer with a search and one without: When to
        Search's stage 2 filters by the answer term.
        """
        if self.recipe.filter_by == "correct":
            return dapo.informative_groups(sampled.correct, self.recipe.group_size)
        answers = torch.tensor([terms["answer"] for terms in sampled.components])  # [N]
        return dapo.informative_groups(answers, self.recipe.group_size)

    def step(self, step: int) -> tuple[dict, list[Trajectory], list[dict]]:
        recipe, start = self.recipe, time.perf_counter()
        sampled = self.sample(step)
        rolled = time.perf_counter()
        record = {"step": step, **measure(sampled.trajectories, sampled.components, recipe)}
        if self.scorer is not None:  # the main process; it is the one that logs
            record |= self.scorer.stats()
        if self.algorithm is dapo:
            informative = self.informative(sampled)  # [N]
            record |= {
                "resampled": sampled.draws - 1,
                "informative": informative.float().mean().item(),
                "skipped": int(not sampled.kept),
            }
        if sampled.kept:
            record |= self.learn(step, sampled)
        record |= {
            "rollout_seconds": rolled - start,
            "update_seconds": time.perf_counter() - rolled,
        }
        return record, sampled.trajectories, sampled.components

    def learn(self, step: int, sampled: Sampled) -> dict[str, float]:
        """From the kept trajectories to new weights."""
        recipe, trajectories = self.recipe, [sampled.trajectories[i] for i in sampled.kept]
        rewards = [sum(sampled.components[i].values()) for i in sampled.kept]
        batch = make_batch(trajectories, rewards, recipe, self.tokenizer.pad_token_id or 0)
        batch.correct = sampled.correct[sampled.kept]  # [B]
        cuts = self.cuts(step, batch)
        if self.recompute and recipe.kl_coef and recipe.kl_place == "reward":
            batch.old_logprobs = self.score(self.policy, batch)
        elif self.recompute and len(cuts) > 1:
            later = torch.cat(cuts[1:])
            scored = self.score(self.policy, batch.rows(later))  # [n, t]
            batch.old_logprobs[later, : scored.shape[1]] = scored
        if recipe.kl_coef:
            batch.ref_logprobs = self.score_reference(batch)
        if (
            self.critic is not None
        ):  # once per rollout: advantages, returns and the clip of all its updates start from these
            with evaluating(self.critic):
                batch.values = value_batch(self.critic, batch, recipe, self.accelerator)  # [B, T]
        batch.advantages = self.algorithm.compute_advantages(batch, recipe)
        record = self.update_all(step, batch, trajectories)
        if self.critic is not None:
            record["explained_variance"] = ppo.explained_variance(
                batch.values, batch.returns, batch.response_mask
            )
        return record

    def cuts(self, step: int, batch: Batch) -> tuple[torch.Tensor, ...]:
        """The rows of each of the step's updates, shuffled. DAPO may keep fewer rows than asked
        for: then there are fewer updates, and not smaller ones.
        """
        order = torch.randperm(
            len(batch), generator=torch.Generator().manual_seed(self.recipe.seed * 7_919 + step)
        )
        return order.tensor_split(math.ceil(len(batch) / self.per_update))

    def update_all(
        self, step: int, batch: Batch, trajectories: list[Trajectory]
    ) -> dict[str, float]:
        """The step's updates, each on its rows; returns the means of their statistics (of EXTREMES,
        the extreme).
        """
        recipe, results = self.recipe, []
        for number, rows in enumerate(self.cuts(step, batch)):
            fresh = self.recompute and number == 0
            lr = self.set_lr(step * self.updates + number)
            part, seen = batch.rows(rows), [trajectories[i] for i in rows.tolist()]
            if (
                number
            ):  # the weights have moved: what they say now and what was sampled with may differ
                part.sampled_logprobs = None
            result = update(
                self.model, self.optimizer, self.algorithm, part, recipe, self.accelerator, fresh
            )
            self.check_finite(result, ("loss", "grad_norm"), step, part, seen)
            if self.critic is not None:
                result |= update_critic(
                    self.critic_model, self.critic_optimizer, part, recipe, self.accelerator
                )
                self.check_finite(result, ("value_loss", "critic_grad_norm"), step, part, seen)
            results.append(result | {"lr": lr})
        return {
            k: EXTREMES.get(k, lambda v: sum(v) / len(v))([r[k] for r in results if k in r])
            for k in results[0]
        }

    def set_lr(self, update_number: int) -> float:
        """The policy's. The critic's is critic_lr throughout: a long warm-up of the policy is the
        critic's time to learn.
        """
        recipe, updates = self.recipe, self.recipe.steps * self.updates
        lr = recipe.lr * lr_factor(update_number, updates, recipe.lr_warmup, recipe.lr_schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def check_finite(
        self, result: dict, names: tuple, step: int, part: Batch, trajectories: list[Trajectory]
    ) -> None:
        if all(math.isfinite(result[name]) for name in names):
            return
        path = stage_folder(self.recipe) / f"non_finite_step{step}.pt"
        if self.accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(dataclasses.asdict(part), path)
        ids = ", ".join(dict.fromkeys(t.question.id for t in trajectories))
        raise InputError(
            f"step {step}: {', '.join(f'{name} {result[name]}' for name in names)}; stopped; this"
            f" update was not applied. The batch is in {path}; its questions: {ids}"
        )


def train(recipe: Recipe) -> Path:
    """One stage. Returns the folder of the run."""
    trainer = Trainer(recipe)
    run, hints = Run(recipe, trainer.accelerator.is_main_process), Hints(recipe)
    run.open(trainer.first_step)
    with tqdm(
        total=recipe.steps,
        initial=trainer.first_step,
        desc=f"{recipe.recipe} stage {recipe.stage}",
        dynamic_ncols=True,
        disable=not run.main,
    ) as bar:
        for step in range(trainer.first_step, recipe.steps):
            record, trajectories, components = trainer.step(step)
            last = step + 1 == recipe.steps
            run.log(record)
            bar.update()
            if run.main:
                bar.write("\n".join([console_line(record), *hints.after(record)]))
            if run.main and (last or step % recipe.show_every == 0):
                row = (step * 37) % len(trajectories)
                sample = show(trajectories[row], components[row])
                run.show(f"step {step}\n{sample}")
                bar.write("\n" + sample + "\n")
            if last or (step + 1) % recipe.save_every == 0:
                run.save(
                    trainer.policy, trainer.tokenizer, trainer.state(), step + 1, trainer.weights()
                )
    if run.main and (counted := getattr(trainer.search, "report", None)):
        print(counted())
    # one process saves: the others' folder is not there before
    trainer.accelerator.wait_for_everyone()
    return run.folder


def main(arguments: list[str] | None = None) -> None:
    if "--plan" in (sys.argv[1:] if arguments is None else arguments):
        plan.main(arguments)
        return
    recipe = parse_recipe(arguments)
    # One process speaks for all. Trap: PartialState() first would ignore ACCELERATE_USE_CPU and our
    # time limit.
    say = make_accelerator(recipe).print
    say(shown_settings(recipe) + f"\n  (all of them: {stage_folder(recipe)}/settings.json)")
    try:
        folder = train(recipe)
    except KeyboardInterrupt:
        found = checkpoints(stage_folder(recipe))
        say(
            "\ninterrupted;"
            f" {f'last checkpoint: {found[-1]} (go on with --resume)' if found else 'no checkpoint yet'}"
        )
        sys.exit(130)
    say(f"done: {folder} (python eval.py --model {checkpoints(folder)[-1]})")


if __name__ == "__main__":
    run_main(main)
