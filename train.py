"""The loop: roll out, score, turn rewards into advantages, update. One stage of one paper per run.

    accelerate launch train.py --stage 1                      the built-in world, UR²
    accelerate launch train.py --stage 2                      goes on from stage 1's last checkpoint
    accelerate launch train.py --stage 1 --model DIR --data FILE --corpus from-data

    questions -> rollout -> rewards [B] -> advantages [B, T] -> for each update: token weights (sum 1) ->
    micro-batches: Σ weight · loss, backward -> clip -> one optimizer step

The weights of the loss are fixed over the whole update before it is cut into micro-batches (and over all processes):
the usual mean of micro-batch means is 21 to 28 % off. Each process samples its own share of the questions; then all
know all trajectories, so group and batch statistics are of the global batch.

Files of a run, under runs/NAME/stageN: settings.json, metrics.jsonl (a line per step), samples.txt, checkpoint-NNNNNN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

import grpo
import reinforce_pp
from curriculum import QuestionStream
from data import InputError, run_main
from metrics import exact_match
from policy import Batch, Policy, collate, evaluating, load_policy, lr_factor, make_optimizer, micro_batches, save_policy
from recipes import Recipe, build_protocol, build_search, parse_recipe, passages, rollout_settings, score, training_questions
from rollout import Trajectory, check_prompts, rollout, show
from toy import load_toy

ALGORITHMS = {"reinforce_pp": reinforce_pp, "reinforce_pp_baseline": reinforce_pp, "grpo": grpo}


# ------------------------------------------------------------------------------------------------------- set up

def stage_folder(recipe: Recipe, stage: int | None = None) -> Path:
    name = recipe.name or "-".join(
        [recipe.recipe, Path(recipe.data.split(",")[0]).stem if recipe.data else f"world{recipe.world_seed}", f"seed{recipe.seed}"]
    )
    return Path(recipe.runs) / name / f"stage{stage or recipe.stage}"


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(p for p in folder.glob("checkpoint-*") if not p.name.endswith(".partial"))


def starting_model(recipe: Recipe) -> str:
    """Where the weights come from: --resume, else --model, else (stage 2) stage 1's last checkpoint; "" = built-in."""
    if recipe.resume:
        found = checkpoints(stage_folder(recipe))
        if not found:
            raise InputError(f"--resume: no checkpoint in {stage_folder(recipe)}; leave the flag out to start anew")
        return str(found[-1])
    if recipe.stage > 1:
        found = checkpoints(stage_folder(recipe, recipe.stage - 1))
        if found:
            return str(found[-1])
        print(f"stage {recipe.stage}: no stage {recipe.stage - 1} checkpoint in {stage_folder(recipe, recipe.stage - 1)}; "
              f"starting from {recipe.model or 'the built-in model'}")  # fmt: skip
    return recipe.model


def load_start(recipe: Recipe, path: str, device) -> tuple[Policy, object]:
    """Policy and tokenizer from `path`, or the built-in ones where it is ""."""
    if path:
        return load_policy(path, device, recipe.gradient_checkpointing)
    policy, tokenizer, _ = load_toy(recipe.world_seed, recipe.protocol, recipe.runs)
    return policy.to(device), tokenizer


# ------------------------------------------------------------------------------------------------ from score to step

def make_batch(trajectories: list[Trajectory], rewards: list[float], recipe: Recipe, pad_id: int) -> Batch:
    """The global batch of one step, without advantages."""
    batch = collate(trajectories, rewards, recipe.group_size, pad_id)
    if not recipe.mask_documents:  # the ablation: every token behind the prompt counts as the policy's
        lengths = torch.tensor([[len(t.prompt_ids) - 1, len(t.ids) - 1] for t in trajectories])  # [B, 2]
        columns = torch.arange(batch.response_mask.shape[1])  # [T]
        batch.response_mask = ((columns >= lengths[:, :1]) & (columns < lengths[:, 1:])).float()  # [B, T]
    return batch


@torch.no_grad()
def score_batch(policy: Policy, batch: Batch, recipe: Recipe) -> torch.Tensor:
    """Log-probs [B, T] of the batch's tokens under `policy`, on the CPU."""
    scored = torch.zeros(batch.response_mask.shape)  # [B, T]
    for rows in micro_batches(batch.response_mask, recipe.tokens_per_micro_batch):
        part = batch.rows(rows).to(policy.device)
        logprobs = policy(part.tokens, recipe.temperature, part.response_mask)  # [b, t]
        scored[rows, : logprobs.shape[1]] = logprobs.cpu()
    return scored


def update(model, optimizer, algorithm, part: Batch, recipe: Recipe, accelerator: Accelerator, fresh: bool) -> dict[str, float]:
    """One optimizer update on the rows of `part` (all processes hold all of them; each takes its share).

    fresh: this is the only update of the step, so π_old is π: its log-probs are taken from the forward pass itself.
    """
    part.token_weights = algorithm.compute_token_weights(part, recipe)  # [B, T]
    mine = part.rows(torch.arange(accelerator.process_index, len(part), accelerator.num_processes))
    cuts = micro_batches(mine.response_mask, recipe.tokens_per_micro_batch)
    totals: dict[str, float] = defaultdict(float)
    for number, rows in enumerate(cuts):
        micro = mine.rows(rows).to(accelerator.device)
        with accelerator.no_sync(model) if number + 1 < len(cuts) else contextlib.nullcontext():
            logprobs = model(micro.tokens, recipe.temperature, micro.response_mask)  # [b, t]
            if fresh:
                micro.old_logprobs = logprobs.detach()
            loss, stats = algorithm.compute_loss(logprobs, micro, recipe)  # [b, t]
            loss = (micro.token_weights * loss).sum()
            # DDP averages the gradients of its processes; ours are parts of one sum
            accelerator.backward(loss * accelerator.num_processes)
        add_stats(totals, loss, logprobs, stats, micro)
    totals["grad_norm"] = float(accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm))
    if math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"]):
        optimizer.step()
    optimizer.zero_grad()
    return totals


def add_stats(totals: dict, loss: torch.Tensor, logprobs: torch.Tensor, stats: dict, micro: Batch) -> None:
    """Weighted sums over the update: with token weights that sum to 1 they are means."""
    totals["loss"] += loss.item()
    totals["entropy"] += -(micro.token_weights * logprobs.detach()).sum().item()  # Monte-Carlo estimate
    totals["ratio_max"] = max(totals["ratio_max"], stats.pop("ratio").max().item())
    for name, value in stats.items():
        totals["clip_fraction" if name == "clipped" else name] += (micro.token_weights * value).sum().item()


# -------------------------------------------------------------------------------------------------- what is logged

def measure(trajectories: list[Trajectory], components: list[dict[str, float]], recipe: Recipe) -> dict[str, float]:
    """The numbers of one step's rollout; the README says what each means."""
    count = len(trajectories)
    record = {"reward": sum(sum(c.values()) for c in components) / count}
    for name in components[0]:
        record[f"reward/{name}"] = sum(c[name] for c in components) / count
    kinds: dict[str, list[Trajectory]] = defaultdict(list)
    for t in trajectories:
        kinds[t.question.kind].append(t)
    for kind, rows in sorted(kinds.items()):
        record[f"em/{kind}"] = sum(exact_match(t.answer, t.question.answers) for t in rows) / len(rows)
        record[f"searched/{kind}"] = sum(bool(t.searches) for t in rows) / len(rows)
        record[f"searches/{kind}"] = sum(len(t.searches) for t in rows) / len(rows)
    searches = [s for t in trajectories for s in t.searches]
    model_tokens = sum(sum(t.response_mask) for t in trajectories)
    record |= {
        "em": sum(exact_match(t.answer, t.question.answers) for t in trajectories) / count,
        "searched": sum(bool(t.searches) for t in trajectories) / count,
        "searches": len(searches) / count,
        "fallbacks": sum(s.fallback for s in searches) / max(1, len(searches)),
        "search_errors": sum(s.error is not None for s in searches),
        "refused": sum(len(t.refusals) for t in trajectories) / count,
        "answered": sum(t.answer is not None for t in trajectories) / count,
        "cut_off": sum(t.stop_reason in ("length", "refused") for t in trajectories) / count,
        "model_tokens": model_tokens / count,
        "inserted_tokens": sum(len(t.response_mask) for t in trajectories) / count - model_tokens / count,
    }
    rewards = torch.tensor([sum(c.values()) for c in components])
    record["frac_reward_zero_std"] = float(grpo.frac_reward_zero_std(rewards, recipe.group_size))
    return record


def console_line(record: dict) -> str:
    shown = ("reward", "em", "searched", "searches", "fallbacks", "model_tokens", "frac_reward_zero_std", "grad_norm")
    return f"step {record['step']:>4}  " + "  ".join(f"{name} {record[name]:.2f}" for name in shown)


# ---------------------------------------------------------------------------------------------------------- the loop

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
            old = next(p for i in itertools.count(1) if not (p := self.folder.with_name(f"{self.folder.name}.old{i}")).exists())
            self.folder.rename(old)
            print(f"{self.folder} held an earlier run: moved to {old.name} (--resume goes on with one)")
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():  # of steps behind the checkpoint that is resumed
            kept = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] < first_step]
            metrics.write_text("".join(line + "\n" for line in kept))
        (self.folder / "settings.json").write_text(settings_text(self.recipe))

    def log(self, record: dict) -> None:
        if self.main:
            with open(self.folder / "metrics.jsonl", "a") as file:  # opened for each line: what is written stays whole
                file.write(json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}) + "\n")

    def show(self, text: str) -> None:
        if self.main:
            with open(self.folder / "samples.txt", "a") as file:
                file.write(text + "\n\n")

    def save(self, policy: Policy, tokenizer, optimizer, step: int) -> None:
        """After `step` finished steps."""
        path = self.folder / f"checkpoint-{step:06d}"
        if not self.main or path.exists():
            return
        trainer = {"step": step, "optimizer": optimizer.state_dict()}
        save_policy(policy, tokenizer, path, trainer, settings_text(self.recipe))
        for old in checkpoints(self.folder)[: -self.recipe.keep_checkpoints or None]:
            shutil.rmtree(old)


class Trainer:
    """Everything one stage needs, set up once; `step` is one turn of the loop."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.accelerator = recipe, Accelerator()
        self.algorithm = ALGORITHMS[recipe.algorithm]
        self.protocol = build_protocol(recipe)
        questions = training_questions(recipe)
        self.stream = QuestionStream(questions, recipe.questions_per_step, recipe.mix, recipe.seed)
        self.search = build_search(recipe, passages(recipe, questions))
        with self.accelerator.local_main_process_first():  # one process makes the built-in model, the others read it
            start = starting_model(recipe)
            self.policy, self.tokenizer = load_start(recipe, start, self.accelerator.device)
        check_prompts(questions, self.protocol, self.tokenizer, self.policy, **rollout_settings(recipe))
        self.reference = self.load_reference(start) if recipe.kl_coef else None
        self.optimizer = make_optimizer(
            self.policy, recipe.optimizer, recipe.lr, (recipe.beta1, recipe.beta2), recipe.weight_decay
        )
        self.model = self.accelerator.prepare_model(self.policy)
        self.first_step = self.load_trainer(start) if recipe.resume else 0
        self.updates = math.ceil(self.trajectories_per_step / (recipe.trajectories_per_update or self.trajectories_per_step))
        self.recompute = recipe.old_logprobs == "recompute" or not recipe.mask_documents or (
            recipe.old_logprobs == "auto" and self.accelerator.device.type != "cpu"
        )  # fmt: skip

    @property
    def trajectories_per_step(self) -> int:
        return self.recipe.questions_per_step * self.recipe.group_size

    def load_reference(self, start: str) -> Policy:
        """π_ref: the model this stage began with, frozen."""
        path = starting_model(dataclasses.replace(self.recipe, resume=False)) if self.recipe.resume else start
        reference, _ = load_start(self.recipe, path, self.accelerator.device)
        return reference.eval().requires_grad_(False)

    def load_trainer(self, path: str) -> int:
        state = torch.load(Path(path) / "trainer.pt", map_location=self.accelerator.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        return state["step"]

    def roll_out(self, step: int) -> list[Trajectory]:
        """This process samples its share of the questions; all processes get all trajectories, group by group."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        questions = self.stream.take(step)
        bounds = [len(questions) * r // world for r in range(world + 1)]
        seed = self.recipe.seed * 1_000_003 + step * 1_009 + rank
        mine = rollout(self.policy, self.tokenizer, questions[bounds[rank] : bounds[rank + 1]], self.search, self.protocol,
                       self.recipe.group_size, seed=seed, **rollout_settings(self.recipe))  # fmt: skip
        return gather_object(mine) if world > 1 else mine

    def step(self, step: int) -> tuple[dict, list[Trajectory], list[dict]]:
        recipe, start = self.recipe, time.perf_counter()
        with evaluating(self.policy):
            trajectories = self.roll_out(step)
        rolled = time.perf_counter()
        components = [score(t, recipe, step) for t in trajectories]
        record = {"step": step, **measure(trajectories, components, recipe)}
        batch = make_batch(trajectories, [sum(c.values()) for c in components], recipe, self.tokenizer.pad_token_id or 0)
        with evaluating(self.policy):
            if self.recompute and self.updates > 1:
                batch.old_logprobs = score_batch(self.policy, batch, recipe)
            if self.reference is not None:
                batch.ref_logprobs = score_batch(self.reference, batch, recipe)
        batch.advantages = self.algorithm.compute_advantages(batch, recipe)
        record |= self.update_all(step, batch, trajectories)
        record |= {"rollout_seconds": rolled - start, "update_seconds": time.perf_counter() - rolled}
        return record, trajectories, components

    def update_all(self, step: int, batch: Batch, trajectories: list[Trajectory]) -> dict[str, float]:
        """The step's updates over shuffled rows; returns the mean of their statistics (maximum of the maxima)."""
        recipe = self.recipe
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(recipe.seed * 7_919 + step))
        results = []
        for number, rows in enumerate(order.tensor_split(self.updates)):
            lr = recipe.lr * lr_factor(step * self.updates + number, recipe.steps * self.updates, recipe.lr_warmup, recipe.lr_schedule)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            part = batch.rows(rows)
            fresh = self.recompute and self.updates == 1
            result = update(self.model, self.optimizer, self.algorithm, part, recipe, self.accelerator, fresh)
            self.check_finite(result, step, part, [trajectories[i] for i in rows.tolist()])
            results.append(result | {"lr": lr})
        merge = {"ratio_max": max, "grad_norm": max}
        return {k: merge.get(k, lambda v: sum(v) / len(v))([r[k] for r in results]) for k in results[0]}

    def check_finite(self, result: dict, step: int, part: Batch, trajectories: list[Trajectory]) -> None:
        if math.isfinite(result["loss"]) and math.isfinite(result["grad_norm"]):
            return
        path = stage_folder(self.recipe) / f"non_finite_step{step}.pt"
        if self.accelerator.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(dataclasses.asdict(part), path)
        ids = ", ".join(dict.fromkeys(t.question.id for t in trajectories))
        raise InputError(
            f"step {step}: loss {result['loss']}, gradient norm {result['grad_norm']}; stopped before the weights were changed. "
            f"The batch is in {path}; its questions: {ids}"
        )


def train(recipe: Recipe) -> Path:
    """One stage. Returns the folder of the run."""
    trainer = Trainer(recipe)
    run = Run(recipe, trainer.accelerator.is_main_process)
    run.open(trainer.first_step)
    with tqdm(total=recipe.steps, initial=trainer.first_step, desc=f"{recipe.recipe} stage {recipe.stage}",
              dynamic_ncols=True, disable=not run.main) as bar:  # fmt: skip
        for step in range(trainer.first_step, recipe.steps):
            record, trajectories, components = trainer.step(step)
            run.log(record)
            bar.update()
            if run.main:
                bar.write(console_line(record))
                if step % recipe.show_every == 0 or step + 1 == recipe.steps:
                    row = (step * 37) % len(trajectories)
                    sample = show(trajectories[row], components[row])
                    run.show(f"step {step}\n{sample}")
                    bar.write("\n" + sample + "\n")
            if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps:
                run.save(trainer.policy, trainer.tokenizer, trainer.optimizer, step + 1)
    return run.folder


def main() -> None:
    recipe = parse_recipe()
    print("settings: " + " ".join(f"{k}={v}" for k, v in dataclasses.asdict(recipe).items() if v != ""))
    try:
        folder = train(recipe)
    except KeyboardInterrupt:
        found = checkpoints(stage_folder(recipe))
        print(f"\ninterrupted; {f'last checkpoint: {found[-1]} (go on with --resume)' if found else 'no checkpoint yet'}")
        sys.exit(130)
    print(f"done: {folder} (python eval.py --model {checkpoints(folder)[-1]})")


if __name__ == "__main__":
    run_main(main)
