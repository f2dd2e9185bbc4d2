"""How fast, and against what: each part of a training step beside a slow twin that does the same
work in the same run.

    python bench.py                              all parts, small: seconds
    python bench.py rollout [--repeats 5]        six loops that sample
    python bench.py update                       one gradient, at V = 32,000 and 151,936
    python bench.py step [--peer trl]            rollout, advantages and update of a whole GRPO step
    python bench.py retrieval                    BM25
    python bench.py decode --model 7B --device cuda --dtype bfloat16      one step of the engine,
    against the memory's bandwidth

What is compared must be the same work, so the work is written down first: a `Script` says for each
row its prompt, the lengths of its turns and what a search inserts behind each. A turn ends where
its room does. Every loop then samples the same number of tokens at the same places, and every
update sees the same rows.

    seconds       of CPU (on a GPU: of the clock, after a synchronisation); medians. Every run is a
                  process of its own, and all variants take turns, so that what else the machine
                  does meets all of them
    MiB           peak during the run, less what the process held before: no weights, but gradients
                  and moments (on a GPU the whole peak)
    x TWIN        the twin's seconds / ours: above 1 is faster
    MiB of TWIN   ours / the twin's: below 100 % is less

Traps: the first call of anything imports, compiles and allocates, so each process first does a
small piece of the same work. A process that was forked shares its parent's pages: only what grows
is counted, and the parent computes nothing itself. Left out: searches (nothing waits here), several
processes, sampling by a server. Not run: anything on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from rank_bm25 import BM25Okapi
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Qwen2Config,
    StoppingCriteriaList,
)

import grpo
from data import Document, Question
from errors import FlagParser, InputError, check_output, nearest, run_main
from lab.plan import Shape, shape_of
from policy import (
    OPTIMIZERS,
    Batch,
    Policy,
    collate,
    evaluating,
    make_optimizer,
    micro_batches,
    without_dropout,
)
from prompts import as_protocol
from recipes import Recipe
from retriever import BM25, tokenize, top
from rollout import (
    StopRule,
    TurnWatcher,
    end_ids,
    left_padded,
    plain_generation,
    play_by_turns,
    play_in_slots,
    sample_turns,
)
from scale.engine import Engine, obstacle, place_bytes
from scale.lora import add_lora, check_peft
from scale.sampling import sampling_copy, wants_copy
from train import score_batch, update
from trajectory import Trajectory

TINY = Shape(256, 4, 8, 2, 688, 4096, tied=True, positions=4096)  # "4M"
LENGTHS = {
    "prompt": (100, 200),
    "turn": (20, 80),
    "answer": (20, 150),
    "inserted": (100, 200),
}  # tokens
SEARCHES = 3  # of a row, at most
MICRO_BATCH = 4  # rows of the padded twin's
SAME = {"cpu": 1e-5, "cuda": 2e-2}  # how far two gradients may be apart: fp32, and bf16 autocast
MIB, GIB = 2**20, 2**30


# ------------------------------------------------------------------------------------ the same work


@dataclass(frozen=True)
class Script:
    """What one row does, whoever runs it: `inserted[i]` stands behind turn i; there is none behind
    the last.
    """

    prompt: list[int]
    turns: list[int]
    inserted: list[list[int]]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(self.turns) + sum(map(len, self.inserted))


def write_scripts(
    prompts: int, group_size: int, vocab: int, seed: int = 0, shorter: int = 1
) -> list[Script]:
    """Question by question, `group_size` rows each; lengths divided by `shorter`. No token is 0,
    the padding.
    """
    draw, scripts = random.Random(seed), []

    def length(of: str) -> int:
        low, high = LENGTHS[of]
        return draw.randint(low // shorter, high // shorter)

    def text(of: str) -> list[int]:
        return [draw.randrange(1, vocab) for _ in range(length(of))]

    for _ in range(prompts):
        prompt = text("prompt")
        for _ in range(group_size):
            searches = draw.randint(0, SEARCHES)
            turns = [length("turn") for _ in range(searches)] + [length("answer")]
            scripts.append(Script(prompt, turns, [text("inserted") for _ in range(searches)]))
    return scripts


class Scripted:
    """What rollout.py's loops ask of an `Environment`, and of its limits, answered from scripts."""

    def __init__(self, scripts: list[Script], tokenizer):
        self.scripts, self.tokenizer, self.protocol, self.limits = (
            scripts,
            tokenizer,
            as_protocol("ur2"),
            self,
        )
        self.rows = [
            Trajectory(Question(str(i), "", []), self.protocol, s.prompt)
            for i, s in enumerate(scripts)
        ]

    def turn(self, row: Trajectory) -> tuple[Script, int]:
        """(its script, turns that it has had)."""
        return self.scripts[int(row.question.id)], sum(s.writer == "model" for s in row.segments)

    def turn_room(self, row: Trajectory) -> int:
        script, turn = self.turn(row)
        return script.turns[turn]

    def longest(self, prompt: int) -> int:
        return max(script.tokens for script in self.scripts)

    def end_turn(self, row: Trajectory, ids: list[int], logprobs: list[float], reason: str) -> None:
        row.append_model(ids, logprobs, "")
        script, turn = self.turn(row)
        if turn == len(script.turns):
            row.stop_reason = "length"

    def answer(self, asking: list[Trajectory]) -> None:
        for row in asking:
            script, turn = self.turn(row)
            row.append_environment(script.inserted[turn - 1], "", "documents")

    @property
    def sampled(self) -> int:
        return sum(sum(row.response_mask) for row in self.rows)


def played(scripts: list[Script], vocab: int, tokenizer=None, seed: int = 0) -> Scripted:
    """The rows as if a policy had sampled them: random tokens, log-probs 0."""
    draw, environment = random.Random(seed), Scripted(scripts, tokenizer)
    for row, script in zip(environment.rows, scripts, strict=True):
        for turn in script.turns:
            environment.end_turn(
                row, [draw.randrange(1, vocab) for _ in range(turn)], [0.0] * turn, "length"
            )
            if not row.stop_reason:
                environment.answer([row])
    return environment


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Words. One in 128 ends like a tag, so that the check for stop tags has something to look
    at.
    """
    words = {f"w{i}{'>' if i % 128 == 0 else ''}": i for i in range(vocab)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), pad_token="w0>"
    )


def config_of(o: Namespace):
    """--model: "4M", a name that plan.py knows the shape of, or a directory. No weights are read,
    they are random.
    """
    if Path(o.model).is_dir():
        config = without_dropout(AutoConfig.from_pretrained(o.model, local_files_only=True))
        config.eos_token_id = config.bos_token_id = config.pad_token_id = (
            None  # a turn ends where its room does
        )
        config.vocab_size = o.vocab or config.vocab_size
        return config
    s = TINY if o.model == "4M" else shape_of(o.model)
    return (Qwen2Config if s.bias else LlamaConfig)(
        vocab_size=o.vocab or s.vocab,
        hidden_size=s.hidden,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        intermediate_size=s.intermediate,
        tie_word_embeddings=s.tied,
        max_position_embeddings=s.positions,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


def make_model(o: Namespace, dtype: torch.dtype = torch.float32):
    if (
        o.device == "cuda" and not torch.cuda.is_available()
    ):  # asked in the child: who has asked CUDA cannot fork any more
        raise InputError("--device cuda: torch sees no GPU here")
    torch.manual_seed(o.seed)
    with torch.device(o.device):
        return AutoModelForCausalLM.from_config(config_of(o), dtype=dtype)


def make_policy(o: Namespace, plain: bool = False) -> tuple[Policy, PreTrainedTokenizerFast]:
    """All weights trained, in fp32; or frozen (bf16 on a GPU) with two thin matrices beside each.
    plain: for a slow twin, with the attention that transformers would give it.
    """
    frozen = torch.bfloat16 if o.device == "cuda" else torch.float32
    policy = Policy(make_model(o, frozen if o.lora_rank else torch.float32))
    if plain:
        policy.language_model.set_attn_implementation("sdpa")
    if o.lora_rank:
        add_lora(policy.requires_grad_(False).language_model, o.lora_rank)
    if o.gradient_checkpointing:
        policy.language_model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return policy, make_tokenizer(policy.config.vocab_size)


def scripts_of(o: Namespace, vocab: int) -> list[Script]:
    return write_scripts(o.prompts, o.group_size, vocab, o.seed, 10 if o.quick else 1)


def warm_scripts(scripts: list[Script]) -> list[Script]:
    """A small piece of the same work: what is imported, compiled and allocated once has been."""
    return [Script(s.prompt[:20], [2, 2], [s.prompt[:5]]) for s in scripts]


# ------------------------------------------------------------------------------- seconds and memory


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def memory(device: str, reset: bool = False) -> float:
    """Peak MiB since the last reset; with `reset` what is taken now (on a GPU 0: there the whole
    peak is shown).
    """
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return 0.0 if reset else torch.cuda.max_memory_allocated() / MIB
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(status["VmHWM"].split()[0]) / 1024
    except OSError:  # no Linux: the peak of the whole process
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            MIB if sys.platform == "darwin" else 1024
        )


def measured(work: Callable[[], object], device: str) -> tuple[dict, object]:
    """({seconds, mib}, what work() returns)."""
    before, start = memory(device, reset=True), clock(device)
    result = work()
    seconds = clock(device) - start
    return {"seconds": seconds, "mib": memory(device) - before}, result


def alone(work: Callable[[], dict], threads: int) -> dict:
    """work() in a forked process of its own. Its numbers come back; an InputError too."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)

    def run() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
        torch.set_num_threads(threads)
        try:
            there.send(work())
        except InputError as error:
            there.send(error)

    process = fork.Process(target=run, daemon=True)
    process.start()
    there.close()
    try:
        result = here.recv()
    except EOFError:
        process.join()
        raise InputError(
            f"a run ended with code {process.exitcode} (its message is above; -9: memory ran out)"
        ) from None
    finally:
        process.terminate()
        process.join()
    if isinstance(result, InputError):
        raise result
    return result


@dataclass
class Part:
    """One table: what runs, in turns, and against which of them the others are held.

    bases   heading -> names: the fastest of those is the twin of that column
    goals   heading -> (how much faster at least, share of its memory at most); 0 and 1 ask for
            nothing
    """

    what: str
    works: dict[str, Callable[[], dict]]
    bases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    goals: dict[str, tuple[float, float]] = field(default_factory=dict)


def in_turns(part: Part, repeats: int, threads: int) -> tuple[dict[str, list[dict]], bool]:
    """({name: its runs}, did all of them end?): Ctrl-C keeps what there is."""
    runs: dict[str, list[dict]] = {name: [] for name in part.works}
    try:
        with tqdm(total=repeats * len(runs), dynamic_ncols=True, leave=False) as bar:
            for _ in range(repeats):
                for name, work in part.works.items():
                    bar.set_description(f"{part.what.split(':')[0]}: {name}")
                    runs[name].append(alone(work, threads))
                    bar.update()
    except KeyboardInterrupt:
        return runs, False
    return runs, True


def summarize(runs: dict[str, list[dict]], part: Part) -> list[dict]:
    """A row per variant: medians of its runs, and ratios against each twin."""
    rows = {}
    for name, of_name in runs.items():
        if of_name:
            rows[name] = {"name": name} | {
                k: statistics.median(run[k] for run in of_name) for k in of_name[0]
            }
            times = [run["seconds"] for run in of_name]
            rows[name] |= {"low": min(times), "high": max(times), "runs": len(times)}
            if "tokens" in rows[name]:
                rows[name]["tokens_per_s"] = rows[name]["tokens"] / rows[name]["seconds"]
    twins = {
        heading: min(
            (rows[n] for n in names if n in rows), key=lambda row: row["seconds"], default=None
        )
        for heading, names in part.bases.items()
    }
    for row in rows.values():
        row["ratios"] = {h: twin["seconds"] / row["seconds"] for h, twin in twins.items() if twin}
        row["memory"] = {
            h: row["mib"] / twin["mib"] for h, twin in twins.items() if twin and twin["mib"] > 0
        }
        row["ratio"] = next(iter(row["ratios"].values()), None)
        if part.goals and all(twins.get(heading) for heading in part.goals):
            row["meets_goals"] = all(
                row["ratios"][h] >= faster and row["memory"].get(h, 0) <= share
                for h, (faster, share) in part.goals.items()
            )
    return list(rows.values())


COLUMNS = {  # key of a row -> heading, format
    "seconds": ("seconds", "{:.3g}"),
    "low": ("from", "{:.3g}"),
    "high": ("to", "{:.3g}"),
    "rollout_seconds": ("rollout", "{:.3g}"),
    "score_seconds": ("score", "{:.3g}"),
    "update_seconds": ("update", "{:.3g}"),
    "tokens_per_s": ("tokens/s", "{:.0f}"),
    "mib": ("MiB", "{:.0f}"),
    "difference": ("gradient off by", "{:.0e}"),
    "gb_per_s": ("GB/s", "{:.1f}"),
    "floor": ("floor s", "{:.3g}"),
    "share": ("of roofline", "{:.0%}"),
}


def table(part: Part, rows: list[dict]) -> str:
    """Text: a line per row, the columns that any row has, two for each twin."""
    known = [key for key in COLUMNS if any(key in row for row in rows)]
    headings = [h for h in part.bases if any(h in row["ratios"] for row in rows)]
    lines = [
        [
            "",
            *(COLUMNS[key][0] for key in known),
            *(f for h in headings for f in (f"x {h}", f"MiB of {h}")),
        ]
    ]
    for row in rows:
        cells = [
            row["name"],
            *(COLUMNS[key][1].format(row[key]) if key in row else "" for key in known),
        ]
        cells += [
            cell
            for h in headings
            for cell in (f"{row['ratios'][h]:.2f}", f"{row['memory'].get(h, float('nan')):.0%}")
        ]
        lines.append(cells + ["<- all goals"] * row.get("meets_goals", False))
    widths = [
        max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines)))
    ]
    text = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=False))
        )
        for line in lines
    ]
    goals = [
        f"{faster:g}x {h}" * bool(faster) + f" with {share:.0%} of its memory" * (share < 1)
        for h, (faster, share) in part.goals.items()
    ]
    return "\n".join([part.what, *text, *(["goal: " + "; ".join(goals)] if goals else [])])


def machine(o: Namespace) -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": o.threads,
        "torch": torch.__version__,
        "device": o.device,
    }


# -------------------------------------------------------------------------------------- the rollout


def naive(policy: Policy, environment: Scripted, temperature: float = 1.0) -> None:
    """`generate` for the whole batch at every turn, all computed again: a row that has ended says
    one more token, unused.
    """
    rows = environment.rows
    while not all(row.stop_reason for row in rows):
        room = [1 if row.stop_reason else environment.turn_room(row) for row in rows]
        tags = environment.protocol.stop_tags
        turns = sample_turns(
            policy, environment.tokenizer, [row.ids for row in rows], room, tags, temperature, 1.0
        )
        for row, ids, logprobs in zip(rows, turns.ids, turns.logprobs, strict=True):
            if not row.stop_reason:
                environment.end_turn(row, ids, logprobs, "length")
        environment.answer([row for row in rows if not row.stop_reason])


def active(policy: Policy, environment: Scripted, temperature: float = 1.0) -> None:
    """rollout.py's readable loop: the rows that are alive, computed again at each turn."""
    play_by_turns(policy, environment, environment.rows, 0, temperature, 1.0, None)


def kept(policy: Policy, environment: Scripted, temperature: float = 1.0) -> None:
    """`generate` on the active rows with one cache through all turns: columns that are no text of a
    row are masked.
    """
    live, tokenizer = environment.rows, environment.tokenizer
    ids, mask = left_padded([row.ids for row in live], 0, policy.device)
    cache = DynamicCache(config=policy.config)
    rule = StopRule(tokenizer, environment.protocol.stop_tags, end_ids(policy, tokenizer))
    sampling = {"do_sample": True, "top_k": 0} if temperature else {"do_sample": False}
    while True:
        room = [environment.turn_room(row) for row in live]
        watcher = TurnWatcher(rule, room, temperature or 1.0)
        with plain_generation(policy, set(), 0):
            ids = policy.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=max(room),
                **sampling,
                logits_processor=LogitsProcessorList([watcher.process_logits]),
                stopping_criteria=StoppingCriteriaList([watcher.check_stop]),
            )
        for row, new, logprobs in zip(live, watcher.ids, watcher.logprobs, strict=True):
            environment.end_turn(row, new, logprobs, "length")
        asking = [(i, row) for i, row in enumerate(live) if not row.stop_reason]
        if not asking:
            return
        stay, live = (
            torch.tensor([i for i, _ in asking], device=ids.device),
            [row for _, row in asking],
        )
        before = [len(row.ids) for row in live]
        environment.answer(live)
        said = (
            torch.arange(max(room), device=ids.device)
            < torch.tensor(room, device=ids.device)[:, None]
        )  # [B, room]
        new, new_mask = left_padded(
            [row.ids[n:] for row, n in zip(live, before, strict=True)], 0, ids.device
        )
        ids, mask = (
            torch.cat([ids[stay], new], 1),
            torch.cat([mask[stay], said[stay].long(), new_mask], 1),
        )
        cache.batch_select_indices(stay)


@torch.no_grad()
def slots(
    policy: Policy,
    environment: Scripted,
    temperature: float = 1.0,
    share: int = 1,
    graphs: bool = False,
) -> None:
    """engine.py, fed by rollout.py, with a slot for every row or for one in `share`."""
    count = max(1, len(environment.rows) // share)
    if not play_in_slots(
        policy, environment, environment.rows, count, temperature, 1.0, None, graphs
    ):
        raise InputError("the engine cannot be used here (see the warning): nothing to compare")


LOOPS = {
    "naive": naive,
    "HF active rows": active,
    "HF kept caches": kept,
    "slots": slots,
    "half slots": partial(slots, share=2),
    "quarter slots": partial(slots, share=4),
}


def run_rollout(name: str, o: Namespace) -> dict:
    policy, tokenizer = make_policy(o, plain="slots" not in name)
    scripts = scripts_of(o, policy.config.vocab_size)
    policy.eval()
    LOOPS[name](policy, Scripted(warm_scripts(scripts[:2]), tokenizer))
    environment = Scripted(scripts, tokenizer)
    numbers, _ = measured(lambda: LOOPS[name](policy, environment), o.device)
    if (asked := sum(sum(script.turns) for script in scripts)) != environment.sampled:
        raise InputError(
            f"{name} sampled {environment.sampled} tokens of {asked}: not the same work"
        )
    return numbers | {"tokens": environment.sampled}


def rollout_part(o: Namespace) -> list[Part]:
    rows = o.prompts * o.group_size
    return [
        Part(
            f"rollout: {rows} rows, up to {SEARCHES} searches, {o.model}; tokens that the policy"
            " samples per second",
            {name: partial(run_rollout, name, o) for name in LOOPS},
            {"naive": ("naive",), "best HF": ("HF active rows", "HF kept caches")},
            {} if o.quick else {"naive": (5, 1), "best HF": (2, 1 / 3)},
        )
    ]


# --------------------------------------------------------------------------------------- the update


def full_softmax(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[b, T, V], [b, T] -> log-probs [b, T]: all log-probs of every position, of which one is
    taken.
    """
    return logits.float().log_softmax(-1).gather(2, targets[..., None])[..., 0]


def selective(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same number from the taken logit alone; the logits are still all there."""
    return logits.float().gather(2, targets[..., None])[..., 0] - logits.float().logsumexp(-1)


def padded_gradient(
    policy: Policy,
    batch: Batch,
    lengths: torch.Tensor,
    o: Namespace,
    score: Callable = full_softmax,
) -> None:
    """Rows as they come, a few at a time, padded to the longest of all, logits at every
    position.
    """
    weights = batch.token_weights * batch.advantages  # [B, T]
    for rows in torch.arange(len(batch)).split(MICRO_BATCH):
        tokens = batch.tokens[rows].to(policy.device)  # [b, L]
        seen = (
            (torch.arange(tokens.shape[1]) < lengths[rows][:, None]).long().to(policy.device)
        )  # [b, L]
        with policy.autocast():
            logits = policy.language_model(
                input_ids=tokens, attention_mask=seen, use_cache=False
            ).logits[:, :-1]  # [b, T, V]
            logprobs = score(logits, tokens[:, 1:])  # [b, T]
        (-weights[rows].to(policy.device) * logprobs).sum().backward()


def our_gradient(policy: Policy, batch: Batch, lengths: torch.Tensor, o: Namespace) -> None:
    """policy.py: the head only where the policy sampled, in chunks; rows of like length in one
    micro-batch, unpadded.
    """
    budget = (
        o.tokens_per_micro_batch or MICRO_BATCH * batch.tokens.shape[1]
    )  # as many tokens as the padded twin has at once
    for rows in micro_batches(batch.response_mask, budget):
        part = batch.rows(rows).to(policy.device)
        logprobs = policy(part.tokens, 1.0, part.response_mask)  # [b, t]
        (-part.token_weights * part.advantages * logprobs).sum().backward()


UPDATES = {
    "padded log_softmax": padded_gradient,
    "padded gather-logsumexp": partial(padded_gradient, score=selective),
    "ours": our_gradient,
    "ours checkpointed": our_gradient,
}


def make_batch(rows: list[Trajectory], o: Namespace) -> tuple[Batch, torch.Tensor]:
    """(GRPO's batch with rewards of 0 and 1 by turns, lengths [B])."""
    batch, recipe = (
        collate(rows, [float(i % 2) for i in range(len(rows))], o.group_size),
        recipe_of(o),
    )
    batch.advantages = grpo.compute_advantages(batch, recipe)  # [B, T]
    batch.token_weights = grpo.compute_token_weights(batch, recipe)  # [B, T]
    return batch, torch.tensor([len(row.ids) for row in rows])


def recipe_of(o: Namespace) -> Recipe:
    return Recipe(
        algorithm="grpo",
        group_size=o.group_size,
        tokens_per_micro_batch=o.tokens_per_micro_batch or 4096,
        lr=1e-6,
    )


def run_update(name: str, o: Namespace, folder: str) -> dict:
    given = Namespace(**vars(o) | {"gradient_checkpointing": name == "ours checkpointed"})
    policy, _ = make_policy(given, plain=name.startswith("padded"))
    scripts = scripts_of(o, policy.config.vocab_size)
    warm = make_batch(
        played(warm_scripts(scripts[: o.group_size]), policy.config.vocab_size).rows, o
    )
    UPDATES[name](policy, *warm, o)
    policy.zero_grad(set_to_none=True)
    environment = played(scripts, policy.config.vocab_size)
    batch, lengths = make_batch(environment.rows, o)
    numbers, _ = measured(lambda: UPDATES[name](policy, batch, lengths, o), o.device)
    difference = same_gradient(policy, Path(folder, f"{o.vocab}.npy"), o.device)
    return numbers | {"tokens": environment.sampled, "difference": difference}


def same_gradient(policy: Policy, path: Path, device: str = "cpu") -> float:
    """|g - g'| / |g'|, where g' is the gradient of the first run, kept at `path`."""
    flat = torch.cat(
        [p.grad.flatten().float().cpu() for p in policy.parameters() if p.grad is not None]
    ).numpy()
    if not path.exists():
        np.save(path, flat)
        return 0.0
    first = np.load(path)
    difference = float(np.linalg.norm(flat - first) / np.linalg.norm(first))
    if not difference <= SAME[device]:
        raise InputError(
            f"two variants have other gradients, {difference:.1e} apart: not the same work"
        )
    return difference


def update_part(o: Namespace) -> list[Part]:
    parts = []
    for vocab in [o.vocab] if o.vocab else [2_000] if o.quick else [32_000, 151_936]:
        at = Namespace(**vars(o) | {"vocab": vocab})
        parts.append(
            Part(
                f"update: one gradient of {o.prompts * o.group_size} rows, {o.model}, V ="
                f" {vocab:,}",
                {name: partial(run_update, name, at, o.folder) for name in UPDATES},
                {"padded": ("padded log_softmax",)},
                {"padded": (3.5, 1 / 8)} if vocab == 151_936 else {},
            )
        )
    return parts


# ------------------------------------------------------------------------------------- a whole step


def our_step(
    policy: Policy, optimizer, environment: Scripted, accelerator: Accelerator, o: Namespace
) -> dict:
    """As train.py: slots (on a GPU of a copy in bf16), advantages, a scoring pass for what is
    updated second, updates.
    """
    recipe, start = recipe_of(o), clock(o.device)
    copied = wants_copy("auto", policy.device, False)
    with sampling_copy(policy) if copied else contextlib.nullcontext(policy) as sampler:
        slots(sampler, environment, share=o.rows_per_slot, graphs=o.cuda_graphs)
    rolled = clock(o.device)
    batch, _ = make_batch(environment.rows, o)
    cuts = torch.arange(len(batch)).tensor_split(o.updates)
    recompute = o.device == "cuda"  # in bf16 sampling and scoring round differently
    if recompute and o.updates > 1:
        later = torch.cat(cuts[1:])
        with evaluating(policy):
            scored = score_batch(policy, batch.rows(later), recipe, accelerator)  # [n, t]
        batch.old_logprobs[later, : scored.shape[1]] = scored
    ready = clock(o.device)
    for number, rows in enumerate(cuts):
        update(
            policy,
            optimizer,
            grpo,
            batch.rows(rows),
            recipe,
            accelerator,
            recompute and number == 0,
        )
    done = clock(o.device)
    return {
        "rollout_seconds": rolled - start,
        "score_seconds": ready - rolled,
        "update_seconds": done - ready,
    }


def slow_step(
    policy: Policy, optimizer, environment: Scripted, accelerator: Accelerator, o: Namespace
) -> dict:
    """The naive loop, and the padded update with the full softmax."""
    start = clock(o.device)
    naive(policy, environment)
    rolled = clock(o.device)
    padded_gradient(policy, *make_batch(environment.rows, o), o)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), recipe_of(o).max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return {
        "rollout_seconds": rolled - start,
        "score_seconds": 0.0,
        "update_seconds": clock(o.device) - rolled,
    }


def run_step(step: Callable, o: Namespace) -> dict:
    policy, tokenizer = make_policy(o, plain=step is slow_step)
    accelerator, scripts = (
        Accelerator(cpu=o.device == "cpu"),
        scripts_of(o, policy.config.vocab_size),
    )
    make = partial(make_optimizer, policy, o.optimizer, 1e-6)
    step(policy, make(), Scripted(warm_scripts(scripts[: o.group_size]), tokenizer), accelerator, o)
    optimizer, environment = make(), Scripted(scripts, tokenizer)
    numbers, times = measured(
        lambda: step(policy, optimizer, environment, accelerator, o), o.device
    )
    return numbers | times | {"tokens": environment.sampled}


def run_trl(o: Namespace) -> dict:
    """One step of TRL's GRPOTrainer behind a small one, sampled by transformers' `generate`.

    TRL's own loop over tool calls needs a chat template that writes and parses them, so
    `rollout_func` goes through the turns as that loop does: the trainer's single-turn generation on
    the rows that go on, documents appended with mask 0. Where TRL would see an end token a turn is
    cut to its room, which costs the same: `generate` goes on to the longest row of a turn.
    """
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, marks = make_model(o), []
    scripts = scripts_of(o, model.config.vocab_size)
    tokenizer = make_tokenizer(model.config.vocab_size)
    tokenizer.add_special_tokens(
        {"eos_token": "<end>"}
    )  # behind the model's vocabulary: never sampled
    work = [warm_scripts(scripts), scripts]

    def roll_out(prompts: list[str], trainer) -> dict:
        rows = in_order(work.pop(0), prompts, o.group_size)
        before, start = memory(o.device, reset=True), clock(o.device)
        completions, masks = play_with_trl(trainer, rows)
        marks.append((before, start, clock(o.device)))
        return {
            "prompt_ids": [s.prompt for s in rows],
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
        }

    rows = len(scripts)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=2,
            num_generations=o.group_size,
            max_completion_length=max(s.tokens for s in scripts),
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=rows // MICRO_BATCH,
            learning_rate=1e-6,
            gradient_checkpointing=o.gradient_checkpointing,
            use_cpu=o.device == "cpu",
            bf16=o.device == "cuda",
            beta=0.0,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
            seed=o.seed,
        )
        trainer = GRPOTrainer(
            model=model,
            args=settings,
            processing_class=tokenizer,
            rollout_func=roll_out,
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(o.prompts)] * 2),
        )
        trainer.train()
        done = clock(o.device)
    before, start, rolled = marks[-1]
    return {
        "seconds": done - start,
        "mib": memory(o.device) - before,
        "rollout_seconds": rolled - start,
        "score_seconds": 0.0,
        "update_seconds": done - rolled,
        "tokens": sum(sum(s.turns) for s in scripts),
    }


def in_order(scripts: list[Script], prompts: list[str], group_size: int) -> list[Script]:
    """The scripts of these prompts ("0", "1", ...), each of which comes `group_size` times, in the
    trainer's order.
    """
    seen = dict.fromkeys(prompts, 0)
    rows = []
    for prompt in prompts:
        rows.append(scripts[int(prompt) * group_size + seen[prompt]])
        seen[prompt] += 1
    return rows


def play_with_trl(trainer, rows: list[Script]) -> tuple[list[list[int]], list[list[int]]]:
    """(completions, masks) of the rows."""
    contexts, masks = [list(s.prompt) for s in rows], [[] for _ in rows]
    for turn in range(max(len(s.turns) for s in rows)):
        live = [i for i, s in enumerate(rows) if turn < len(s.turns)]
        trainer.generation_config.max_new_tokens = max(rows[i].turns[turn] for i in live)
        drawn, _ = trainer._generate_single_turn([contexts[i] for i in live], None, {}, 1)
        for i, ids in zip(live, drawn, strict=True):
            said = ids[: rows[i].turns[turn]]
            found = rows[i].inserted[turn] if turn < len(rows[i].inserted) else []
            contexts[i] += said + found
            masks[i] += [1] * len(said) + [0] * len(found)
    return [context[len(s.prompt) :] for context, s in zip(contexts, rows, strict=True)], masks


def step_part(o: Namespace) -> list[Part]:
    works = {"slow twin": partial(run_step, slow_step, o), "ours": partial(run_step, our_step, o)}
    if o.peer == "trl":
        missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
        if missing:
            raise InputError(
                f"--peer trl: {' and '.join(missing)} not installed: pip install 'trl==1.16.*'"
            )
        works = {"TRL": partial(run_trl, o), **works}
    if o.updates > 1:  # the twins make one: their loss has no ratio
        works = {"ours": works["ours"]}
    rows = o.prompts * o.group_size
    return [
        Part(
            f"step: GRPO, {o.prompts} prompts x {o.group_size} samples, {rows} rows, {o.model}",
            works,
            {"slow twin": ("slow twin",), "TRL": ("TRL",)},
            {"TRL": (3, 1)} if o.peer and not o.quick else {},
        )
    ]


# ---------------------------------------------------------------------------------------- retrieval


def passages_and_queries(
    count: int, queries: int, seed: int = 0
) -> tuple[list[Document], list[str]]:
    """Passages of 90 words and queries of 12, of which a few words are in most texts and most in
    few.
    """
    draw = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(f"w{int(20_000 ** draw.random())}" for _ in range(words))

    return [Document(str(i), "", text(90)) for i in range(count)], [
        text(12) for _ in range(queries)
    ]


def run_retrieval(name: str, o: Namespace) -> dict:
    documents, queries = passages_and_queries(
        500 if o.quick else 5_000, 20 if o.quick else 100, o.seed
    )
    if name == "ours":
        scores = BM25(documents).scores
    else:
        index = BM25Okapi([tokenize(d.text) for d in documents])
        scores = lambda query: index.get_scores(tokenize(query))
    numbers, found = measured(
        lambda: [top(scores(query), 5).tolist() for query in queries], o.device
    )
    path = Path(o.folder, "found.json")
    if not path.exists():
        path.write_text(json.dumps(found))
    if json.loads(path.read_text()) != found:
        raise InputError("retrieval: the two find other passages: not the same work")
    return numbers | {"seconds": numbers["seconds"] / len(queries)}


def retrieval_part(o: Namespace) -> list[Part]:
    count = 500 if o.quick else 5_000
    return [
        Part(
            f"retrieval: BM25, {count:,} passages of 90 words; per query, the same five found",
            {name: partial(run_retrieval, name, o) for name in ("rank-bm25", "ours")},
            {"rank-bm25": ("rank-bm25",)},
        )
    ]


# ------------------------------------------------------------------------------------------- decode


def bytes_per_step(model, rows: int, tokens: float) -> float:
    """What a decoding step must read: every weight once, but of an embedding that is not the head
    only a few rows; and the keys and values of `rows` texts of `tokens` tokens.
    """
    config, weight = model.config, next(model.parameters())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel() * weight.element_size()
    return weights + rows * tokens * place_bytes(config, weight.element_size())


def bandwidth(device: str) -> float:
    """Bytes per second of the best of ten copies of a large tensor: each byte is read and
    written.
    """
    size = GIB if device == "cuda" else GIB // 4
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(10):
        start = clock(device)
        target.copy_(source)
        times.append(clock(device) - start)
    return 2 * size / min(times)


def roofline(seconds: float, moved: float, per_second: float) -> dict:
    """Worked: 15.2 GB at 4.3 TB/s cannot take less than 3.53 ms; a step of 5 ms is at 71 %."""
    floor = moved / per_second
    return {"floor": floor, "gb_per_s": per_second / 1e9, "share": floor / seconds}


@torch.no_grad()
def run_decode(o: Namespace) -> dict:
    """`--steps` steps of a full engine: rows of one prompt, whose keys and values are copied into
    every slot.
    """
    model = make_model(o, getattr(torch, o.dtype)).eval()
    if problem := obstacle(model):
        raise InputError(f"--model {o.model}: {problem}; the engine cannot drive it")
    warm = 8
    engine = Engine(
        model,
        o.batch,
        o.context + warm + o.steps + 1,
        set(),
        lambda turn, room: "length" if len(turn) >= room else None,
        graphs=o.cuda_graphs,
    )
    prompt = [i % 1000 + 1 for i in range(o.context)]
    for number in range(o.batch):
        engine.add(number, prompt, warm)
    for row in engine.decode():  # reads the prompt; records
        engine.resume(row, row.ids, o.steps)
    numbers, _ = measured(engine.decode, o.device)
    seconds = numbers["seconds"] / o.steps
    moved = bytes_per_step(model, o.batch, o.context + warm + o.steps / 2)
    return {
        "seconds": seconds,
        "mib": numbers["mib"],
        "tokens": o.batch,
        **roofline(seconds, moved, bandwidth(o.device)),
    }


def decode_part(o: Namespace) -> list[Part]:
    what = (
        f"decode: a step of {o.batch} rows behind {o.context} tokens, {o.model} in {o.dtype},"
        f" {o.device}"
    )
    return [Part(f"{what}{', recorded' * o.cuda_graphs}", {"slots": partial(run_decode, o)})]


# ----------------------------------------------------------------------------------------- commands

PARTS = {
    "rollout": rollout_part,
    "update": update_part,
    "step": step_part,
    "retrieval": retrieval_part,
    "decode": decode_part,
}


def parse(arguments: list[str] | None = None) -> Namespace:
    parser = FlagParser(
        "bench.py", description="How fast, against what. Without a part: all of them, small."
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: all, as with --quick")
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of each variant; medians are shown"
    )
    parser.add_argument(
        "--only", default="", help="names of variants, comma-separated, such as ours"
    )
    parser.add_argument("--json", default="", help="file for the same numbers")
    parser.add_argument(
        "--quick", action="store_true", help="small work, one run each; overrides the sizes below"
    )
    parser.add_argument(
        "--prompts", type=int, default=0, help="of a step; default 8, of an update 2"
    )
    parser.add_argument("--group_size", type=int, default=8, help="samples of each")
    parser.add_argument(
        "--model",
        default="4M",
        help="4M, 7B, 3B, ... or a directory: its shape, with random weights",
    )
    parser.add_argument("--vocab", type=int, default=0, help="in place of the shape's own")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="of a process, on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--peer",
        default="",
        choices=("trl",),
        help="step: TRL's trainer too (pip install 'trl==1.16.*')",
    )
    parser.add_argument("--tokens_per_micro_batch", type=int, default=0, help="of our update")
    parser.add_argument(
        "--gradient_checkpointing", action="store_true", help="step: recompute activations"
    )
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS, help="step")
    parser.add_argument(
        "--lora_rank", type=int, default=0, help="step: train thin matrices beside frozen weights"
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=1,
        help="step: optimizer updates of its rows; more than 1 is ours alone",
    )
    parser.add_argument(
        "--rows_per_slot", type=int, default=1, help="step: 2 has half as many slots as rows"
    )
    parser.add_argument("--batch", type=int, default=64, help="decode: rows")
    parser.add_argument(
        "--context", type=int, default=512, help="decode: tokens in front of what is timed"
    )
    parser.add_argument("--steps", type=int, default=64, help="decode: steps that are timed")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="decode: of the weights"
    )
    parser.add_argument(
        "--cuda_graphs",
        action="store_true",
        help="decode, step: record a decoding step and replay it",
    )
    return check(parser.parse_args(arguments))


def check(o: Namespace) -> Namespace:
    if o.part is None or o.quick:
        o.quick, o.repeats, o.prompts, o.group_size, o.batch, o.context, o.steps = (
            True,
            1,
            2,
            4,
            8,
            64,
            16,
        )
    o.prompts = o.prompts or (2 if o.part == "update" else 8)
    for name in (
        "repeats",
        "prompts",
        "group_size",
        "threads",
        "updates",
        "rows_per_slot",
        "batch",
        "context",
        "steps",
    ):
        if getattr(o, name) < 1:
            raise InputError(f"--{name} {getattr(o, name)}: must be at least 1")
    if o.cuda_graphs and o.device != "cuda":
        raise InputError(
            "--cuda_graphs: only a GPU can record a step: add --device cuda, or leave it out"
        )
    if o.lora_rank:
        check_peft(o.lora_rank)
    if o.json:
        check_output(o.json, "--json")
    if o.peer and (o.part != "step" or o.lora_rank or o.optimizer != "adamw"):
        raise InputError(
            "--peer trl is for a step that trains all weights with adamw: python bench.py step"
            " --peer trl"
        )
    if o.updates > o.prompts * o.group_size:
        raise InputError(
            f"--updates {o.updates}: there are {o.prompts * o.group_size} rows to share out among"
            " them"
        )
    if o.vocab == 1 or o.vocab < 0 or o.tokens_per_micro_batch < 0:
        raise InputError(
            "--vocab must be at least 2, and --tokens_per_micro_batch at least 1 (0: what fits the"
            " part)"
        )
    if o.part == "retrieval" and o.device != "cpu":
        raise InputError("retrieval is a CPU's work: leave --device out")
    config_of(o)  # a name that nobody knows is told of before anything runs
    return o


def parts_of(o: Namespace) -> list[Part]:
    """The tables that are asked for, with the variants that are."""
    parts = [part for name in ([o.part] if o.part else PARTS) for part in PARTS[name](o)]
    if not o.only:
        return parts
    known, only = {name for part in parts for name in part.works}, o.only.split(",")
    for name in only:
        if name not in known:
            raise InputError(
                f"--only {name}: no such variant{nearest(name, known)}; there are"
                f" {', '.join(sorted(known))}"
            )
    for part in parts:
        part.works = {name: work for name, work in part.works.items() if name in only}
    return [part for part in parts if part.works]


def main(arguments: list[str] | None = None) -> None:
    o = parse(sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    rows, complete = [], True
    with tempfile.TemporaryDirectory() as o.folder:
        for part in parts_of(o):
            runs, complete = in_turns(part, o.repeats, o.threads)
            found = summarize(runs, part)
            rows += [{"part": part.what, **row} for row in found]
            if found:
                print(table(part, found) + "\n")
            if not complete:
                break
    if o.quick:
        print(
            "small work, one run: what it does, not how fast it is; python bench.py rollout,"
            " update, step, ... measure"
        )
    where = machine(o)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    if o.json:
        Path(o.json).write_text(
            json.dumps({"what": o.part or "all, small", "machine": where, "rows": rows}, indent=1)
            + "\n"
        )
    if not complete:
        raise KeyboardInterrupt


if __name__ == "__main__":
    run_main(main)
