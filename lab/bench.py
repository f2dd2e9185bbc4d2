"""How fast, and against what: each part of a training step beside a slow twin that does the same
work in the same run.

    python -m lab.bench rollout [--repeats 5]      six loops that sample
    python -m lab.bench update                     one gradient, at V = 32,000 and 151,936
    python -m lab.bench step [--peer trl]          rollout, advantages and update of a GRPO step
    python -m lab.bench retrieval                  BM25, seconds per query
    python -m lab.bench decode --model 7B --device cuda --dtype bfloat16     a step of the engine,
                                                   against the memory's bandwidth

The work is written down first: a `Script` says for each row its prompt, the lengths of its turns
and what a search inserts behind each. A turn ends where its room does. So every loop samples the
same number of tokens at the same places, and every update sees the same rows.

    seconds   of CPU (on a GPU: of the clock, after a synchronisation), median of all runs. A run is
              a process of its own, and all variants take turns: what else the machine does meets
              all of them
    mib       peak, less what the process held before: no weights, but gradients and moments (on a
              GPU the whole peak)
    x TWIN    the twin's seconds / ours: above 1 is faster; memory: ours / the twin's

Traps: the first call of anything imports, compiles and allocates, so each process first does a
small piece of the same work. A forked process shares its parent's pages: only what grows counts.
Left out: searches (nothing waits here), several processes, sampling by a server.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from rank_bm25 import BM25Okapi
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

import grpo
from data import Document, Question
from errors import FlagParser, InputError, check_output, check_value, nearest, run_main, setting
from lab.plan import config_of
from metrics import tokenize
from policy import Batch, Policy, PolicySettings, collate, make_optimizer, micro_batches
from prompts import PROTOCOLS
from retriever import BM25, top
from rollout import (
    RolloutSettings,
    StopRule,
    TurnWatcher,
    left_padded,
    plain_generation,
    play_by_turns,
    sample_turns,
)
from scale.engine import Engine, EngineSettings, obstacle, place_bytes, play_in_slots
from scale.lora import add_lora, check_peft
from scale.sampling import to_sample_with, wants_copy
from settings import Settings, add_flags
from train import Sampled, batch_of_update, prepare
from trajectory import Trajectory
from update import MAX_GRAD_NORM, Parts, shuffled_updates, update

PROMPT, TURN, ANSWER, INSERTED = (100, 200), (20, 80), (20, 150), (100, 200)  # tokens
SEARCHES = 3  # of a row, at most
MICRO_BATCH = 4  # rows of the padded twin's
VOCABS = (32_000, 151_936)  # of an update
SAME = {"cpu": 1e-5, "cuda": 2e-2}  # how far two gradients may be apart: fp32, and bf16 autocast


@dataclass(frozen=True)
class BenchSettings:
    repeats: int = setting(5, "runs of each variant", least=1)
    only: str = setting("", "names of variants, comma-separated, such as ours")
    json: str = setting("", "file for the same numbers")
    peer: str = setting("", "step: trl, for TRL's trainer too", one_of=("", "trl"))
    model: str = setting("4M", "4M, 7B, 3B, ... or a directory: its shape, with random weights")
    vocab: int = setting(0, "in place of the shape's own", least=0)
    device: str = setting("cpu", "what computes", one_of=("cpu", "cuda"))
    threads: int = setting(1, "of a process, on a CPU", least=1)
    seed: int = setting(0, "of scripts, weights and samples", least=0)
    questions_per_step: int = setting(0, "0: 8, of an update 2", least=0)
    trajectories_per_update: int = setting(0, "step: fewer than all are ours alone", least=0)
    tokens_per_micro_batch: int = setting(4096, "step: ours", least=1)
    batch: int = setting(64, "decode: rows", least=1)
    context: int = setting(512, "decode: tokens in front of what is timed", least=1)
    decoded: int = setting(64, "decode: steps that are timed", least=1)
    dtype: str = setting("float32", "decode: of weights", one_of=("float32", "bfloat16"))


FLAGS = (BenchSettings, RolloutSettings, EngineSettings, PolicySettings)


@dataclass(frozen=True)
class Bench(BenchSettings, Settings):
    """A run's settings, at the sizes of a benchmark."""


DEFAULTS = {"algorithm": "grpo", "kl_coef": 0.0, "group_size": 8, "lr": 1e-6}

# ------------------------------------------------------------------------------------ the same work


@dataclass(frozen=True)
class Script:
    """What one row does, whoever runs it: inserted[i] stands behind turn i, none behind the last."""

    prompt: list[int]
    turns: list[int]
    inserted: list[list[int]]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(self.turns) + sum(map(len, self.inserted))


def write_scripts(o: Bench, vocab: int, shorter: int = 1) -> list[Script]:
    """Question by question, `group_size` rows each; lengths divided by `shorter`. No token is 0,
    the padding.
    """
    draw, scripts = random.Random(o.seed), []

    def length(bounds: tuple[int, int]) -> int:
        return draw.randint(bounds[0] // shorter, bounds[1] // shorter)

    def text(bounds: tuple[int, int]) -> list[int]:
        return [draw.randrange(1, vocab) for _ in range(length(bounds))]

    for _ in range(o.questions_per_step):
        prompt = text(PROMPT)
        for _ in range(o.group_size):
            searches = draw.randint(0, SEARCHES)
            turns = [length(TURN) for _ in range(searches)] + [length(ANSWER)]
            scripts.append(Script(prompt, turns, [text(INSERTED) for _ in range(searches)]))
    return scripts


def warm_and_whole(o: Bench, vocab: int, rows: int) -> tuple[list[Script], list[Script]]:
    """A small piece of the work: what is imported, compiled and allocated once has been; and all."""
    scripts = write_scripts(o, vocab)
    return [Script(s.prompt[:20], [2, 2], [s.prompt[:5]]) for s in scripts[:rows]], scripts


class Scripted:
    """What rollout.py's loops ask of an `Environment`, answered from scripts."""

    def __init__(self, scripts: list[Script], vocab: int, o: Bench):
        self.scripts, self.settings, self.protocol = scripts, o, PROTOCOLS["ur2"]
        # One word in 128 ends like a tag, so that there is something to look for tags in.
        words = {f"w{i}{'>' if i % 128 == 0 else ''}": i for i in range(vocab)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0>")
        self.rows = []
        for number, script in enumerate(scripts):
            question = Question(str(number), "", [])
            self.rows.append(Trajectory(question, self.protocol, script.prompt))

    def turn(self, row: Trajectory) -> tuple[Script, int]:
        """(its script, turns that it has had)."""
        return self.scripts[int(row.question.id)], sum(s.writer == "model" for s in row.segments)

    def turn_room(self, row: Trajectory) -> int:
        """`naive` samples a token of rows that have ended too."""
        script, turn = self.turn(row)
        return 1 if row.stop_reason else script.turns[turn]

    def longest(self, prompt: int) -> int:
        return max(script.tokens for script in self.scripts)

    def end_turn(self, row: Trajectory, ids: list[int], logprobs: list[float], reason: str) -> None:
        row.append_model(ids, logprobs, "")
        script, turn = self.turn(row)
        row.stop_reason = "length" if turn == len(script.turns) else ""

    def answer(self, asking: list[Trajectory]) -> None:
        for row in asking:
            script, turn = self.turn(row)
            row.append_environment(script.inserted[turn - 1], "", "documents")

    def played(self, vocab: int) -> Scripted:
        """As if a policy had sampled: random tokens, log-probs 0."""
        draw = random.Random(0)
        for row in self.rows:
            while not row.stop_reason:
                ids = [draw.randrange(1, vocab) for _ in range(self.turn_room(row))]
                self.end_turn(row, ids, [0.0] * len(ids), "length")
                self.answer([] if row.stop_reason else [row])
        return self

    @property
    def sampled(self) -> int:
        return sum(sum(row.response_mask) for row in self.rows)


def shape_of(o: Bench):
    """--model's config. It names no end of a text: a turn ends where its room does."""
    config = config_of(o.model)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    config.vocab_size = o.vocab or config.vocab_size
    return config


def make_model(o: Bench, dtype: torch.dtype = torch.float32):
    # Asked in the child: who has asked CUDA cannot fork any more.
    if o.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here")
    torch.manual_seed(o.seed)
    with torch.device(o.device):
        model = AutoModelForCausalLM.from_config(shape_of(o), dtype=dtype)
    if o.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_policy(o: Bench, plain: bool = False) -> tuple[Policy, int]:
    """(policy, V). All weights trained, in fp32; or frozen (bf16 on a GPU) with thin matrices.

    plain   for a slow twin: with the attention that transformers would give it
    """
    frozen = o.lora_rank and o.device == "cuda"
    policy = Policy(make_model(o, torch.bfloat16 if frozen else torch.float32))
    if plain:
        policy.language_model.set_attn_implementation("sdpa")
    if o.lora_rank:
        add_lora(policy.requires_grad_(False).language_model, o.lora_rank)
    return policy, policy.config.vocab_size


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
        return 0.0 if reset else torch.cuda.max_memory_allocated() / 2**20
    if not Path("/proc/self/clear_refs").exists():
        return 0.0  # no Linux: not counted
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def measured(work: Callable[[], object], device: str) -> tuple[dict, object]:
    """({seconds, mib}, what work() returns)."""
    before, start = memory(device, reset=True), clock(device)
    result = work()
    seconds = clock(device) - start
    return {"seconds": seconds, "mib": memory(device) - before}, result


def alone(work: Callable[[], tuple[dict, list]], threads: int) -> tuple[dict, list]:
    """work() in a forked process of its own."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, torch.set_num_threads, (threads,)) as pool:
        try:
            return pool.submit(work).result()
        except BrokenProcessPool:
            raise InputError("a run was ended from outside: most often memory ran out") from None


def in_turns(works: dict[str, Callable], o: Bench, runs: dict[str, list[dict]]) -> None:
    """Every variant is run, then every one again: fills `runs`. What two of them did must be the
    same: |a − b| / |b| of the numbers that each returns, b the first one's, is SAME at most.
    """
    first = None
    for name in tqdm([*works] * o.repeats, leave=False, dynamic_ncols=True):
        numbers, did = alone(works[name], o.threads)
        first = did if first is None else first
        apart = float(np.linalg.norm(np.subtract(did, first)) / np.linalg.norm(first))
        if not apart <= SAME[o.device]:
            raise InputError(f"{name}: {apart:.1e} from the first variant: not the same work")
        runs.setdefault(name, []).append(numbers | {"apart": apart})


def summarize(runs: dict[str, list[dict]], twins: dict[str, tuple[str, ...]]) -> dict[str, dict]:
    """A row per variant: medians of its runs, and ratios against each twin, the fastest of some."""
    rows = {}
    for name, found in runs.items():
        row = {key: statistics.median(run[key] for run in found) for key in found[0]}
        seconds = [run["seconds"] for run in found]
        rows[name] = row | {"from": min(seconds), "to": max(seconds)}
        if "tokens" in row:
            rows[name]["tokens_per_s"] = row["tokens"] / row["seconds"]
    for heading, names in twins.items():
        there = [rows[name] for name in names if name in rows]
        twin = min(there, key=lambda row: row["seconds"], default=None)
        for row in rows.values() if twin else ():
            row[f"x {heading}"] = twin["seconds"] / row["seconds"]
            row[f"memory of {heading}"] = row["mib"] / twin["mib"] if twin["mib"] else 0.0
    return rows


def line_of(name: str, row: dict) -> str:
    cells = [f"{key} {v:.3g}" if v < 1000 else f"{key} {v:.0f}" for key, v in row.items()]
    return f"{name:24}" + "  ".join(cells)


# -------------------------------------------------------------------------------------- the rollout


def naive(policy: Policy, environment: Scripted) -> None:
    """`generate` for the whole batch at every turn, all computed again."""
    rows = environment.rows
    while not all(row.stop_reason for row in rows):
        turns = sample_turns(policy, environment, rows)
        for row, ids, logprobs in zip(rows, turns.ids, turns.logprobs, strict=True):
            if not row.stop_reason:
                environment.end_turn(row, ids, logprobs, "length")
        environment.answer([row for row in rows if not row.stop_reason])


def active(policy: Policy, environment: Scripted) -> None:
    """rollout.py's readable loop: the rows that are alive, computed again at each turn."""
    play_by_turns(policy, environment, environment.rows)


def kept(policy: Policy, environment: Scripted) -> None:
    """`generate` on the active rows with one cache through all turns: columns that are no text of a
    row are masked.
    """
    live, temperature = environment.rows, environment.settings.temperature
    ids, mask = left_padded([row.ids for row in live], 0, policy.device)  # [B, L]
    cache = DynamicCache(config=policy.config)
    rule = StopRule(environment.tokenizer, environment.protocol.stop_tags, set())
    how = {"do_sample": True, "top_k": 0} if temperature else {"do_sample": False}
    while live:
        room = torch.tensor([environment.turn_room(row) for row in live], device=policy.device)
        watcher = TurnWatcher(rule, room.tolist(), temperature or 1.0)
        how |= {"logits_processor": [watcher.process_logits], "max_new_tokens": int(room.max())}
        how |= {"stopping_criteria": [watcher.check_stop], "past_key_values": cache}
        with plain_generation(policy, set(), 0):
            ids = policy.generate(input_ids=ids, attention_mask=mask, **how)
        for row, new, logprobs in zip(live, watcher.ids, watcher.logprobs, strict=True):
            environment.end_turn(row, new, logprobs, "length")
        stay = [i for i, row in enumerate(live) if not row.stop_reason]
        said = torch.arange(room.max(), device=room.device) < room[:, None]  # [B, room]
        mask = torch.cat([mask, said.long()], 1)[stay]
        live = [live[i] for i in stay]
        if live:
            before = [len(row.ids) for row in live]
            environment.answer(live)
            found = [row.ids[n:] for row, n in zip(live, before, strict=True)]
            new, new_mask = left_padded(found, 0, policy.device)
            ids, mask = torch.cat([ids[stay], new], 1), torch.cat([mask, new_mask], 1)
            cache.batch_select_indices(torch.tensor(stay, device=ids.device))


@torch.no_grad()
def slots(policy: Policy, environment: Scripted, share: int = 1) -> None:
    """scale/engine.py, with a slot for every row or for one in `share`."""
    check_engine(policy.language_model)
    if share > 1:
        size = max(1, len(environment.rows) // share)
        environment.settings = replace(environment.settings, rollout_batch_size=size)
    play_in_slots(policy, environment, environment.rows)


def check_engine(model) -> None:
    if problem := obstacle(model):
        raise InputError(f"--model: {problem}; the engine cannot drive it")


LOOPS = {
    "naive": naive,
    "HF active rows": active,
    "HF kept caches": kept,
    "slots": slots,
    "half slots": partial(slots, share=2),
    "quarter slots": partial(slots, share=4),
}


def run_rollout(name: str, o: Bench) -> tuple[dict, list]:
    policy, vocab = make_policy(o, plain="slots" not in name)
    policy.eval()
    for scripts in warm_and_whole(o, vocab, 2):
        environment = Scripted(scripts, vocab, o)
        numbers, _ = measured(partial(LOOPS[name], policy, environment), o.device)
    return numbers | {"tokens": environment.sampled}, [environment.sampled]


# --------------------------------------------------------------------------------------- the update


def full_softmax(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[b, T, V], [b, T, 1] -> [b, T, 1]: all log-probs of a position, of which one is taken."""
    return logits.log_softmax(-1).gather(2, targets)


def selective(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same number from the taken logit alone; the logits are still all there."""
    return logits.gather(2, targets) - logits.logsumexp(-1, keepdim=True)


def padded_gradient(policy: Policy, batch: Batch, score: Callable = full_softmax) -> None:
    """Rows as they come, a few at a time, padded to the longest of all, logits everywhere."""
    weights = batch.token_weights * batch.advantages  # [B, T]
    for rows in torch.arange(len(batch)).split(MICRO_BATCH):
        tokens = batch.tokens[rows].to(policy.device)  # [b, L]
        seen = (tokens != 0).long()  # [b, L]  no token of a script is 0
        with policy.autocast():
            output = policy.language_model(tokens, attention_mask=seen, use_cache=False)
            logprobs = score(output.logits[:, :-1].float(), tokens[:, 1:, None])[..., 0]  # [b, T]
        (-weights[rows].to(policy.device) * logprobs).sum().backward()


def our_gradient(policy: Policy, batch: Batch) -> None:
    """policy.py: the head only where the policy sampled, in chunks; rows of like length in one
    micro-batch, unpadded; of as many tokens as the padded twin has at once.
    """
    for rows in micro_batches(batch.response_mask, MICRO_BATCH * batch.tokens.shape[1]):
        part = batch.rows(rows).to(policy.device)
        logprobs = policy(part.tokens, 1.0, part.response_mask)  # [b, t]
        (-part.token_weights * part.advantages * logprobs).sum().backward()


UPDATES = {
    "padded log_softmax": padded_gradient,
    "padded gather-logsumexp": partial(padded_gradient, score=selective),
    "ours": our_gradient,
    "ours checkpointed": our_gradient,
}


def batch_of(environment: Scripted) -> Batch:
    """GRPO's, with rewards of 0 and 1 by turns."""
    rows, o = environment.rows, environment.settings
    batch = collate(rows, [float(i % 2) for i in range(len(rows))], o.group_size)
    batch.advantages = grpo.compute_advantages(batch, o)  # [B, T]
    batch.token_weights = grpo.compute_token_weights(batch, o)  # [B, T]
    return batch


def run_update(name: str, o: Bench) -> tuple[dict, np.ndarray]:
    o = replace(o, gradient_checkpointing=name == "ours checkpointed")
    policy, vocab = make_policy(o, plain=name.startswith("padded"))
    for scripts in warm_and_whole(o, vocab, o.group_size):
        policy.zero_grad(set_to_none=True)
        environment = Scripted(scripts, vocab, o).played(vocab)
        numbers, _ = measured(partial(UPDATES[name], policy, batch_of(environment)), o.device)
    return numbers | {"tokens": environment.sampled}, gradient_of(policy)


def gradient_of(policy: Policy) -> np.ndarray:
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    return torch.cat([g.flatten().float().cpu() for g in gradients]).numpy()


# ------------------------------------------------------------------------------------- a whole step


def our_step(policy: Policy, optimizer, environment: Scripted) -> list[float]:
    """As train.py: slots (on a GPU of a copy in bf16), advantages, a scoring pass for what is
    updated second, updates. Returns the clock behind rollout, scoring and update.
    """
    o, rows = environment.settings, environment.rows
    recompute = o.device == "cuda"  # in bf16 sampling and scoring round differently
    parts = Parts(o, Accelerator(cpu=o.device == "cpu"), policy, policy, optimizer, recompute)
    parts.environment = environment
    with to_sample_with(policy, wants_copy(o.sampling_copy, policy.device, False)) as sampler:
        slots(sampler, environment)
    marks = [clock(o.device)]
    rewards = [{"reward": float(i % 2)} for i in range(len(rows))]
    sampled = Sampled(rows, rewards, [False] * len(rows), list(range(len(rows))))
    batch = prepare(parts, sampled, 0)
    marks.append(clock(o.device))
    for number, index in enumerate(shuffled_updates(0, len(batch), o)):
        update(parts, batch_of_update(parts, batch, index, number))
    return [*marks, clock(o.device)]


def slow_step(policy: Policy, optimizer, environment: Scripted) -> list[float]:
    """The naive loop, and the padded update with the full softmax."""
    naive(policy, environment)
    rolled = clock(environment.settings.device)
    padded_gradient(policy, batch_of(environment))
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return [rolled, rolled, clock(environment.settings.device)]


STEPS = {"slow twin": slow_step, "ours": our_step}


def run_step(name: str, o: Bench) -> tuple[dict, list]:
    if name == "TRL":
        return run_trl(o)
    policy, vocab = make_policy(o, plain=name == "slow twin")
    for scripts in warm_and_whole(o, vocab, o.group_size):
        environment = Scripted(scripts, vocab, o)
        optimizer, start = make_optimizer(policy, o.optimizer, o.lr), clock(o.device)
        numbers, marks = measured(partial(STEPS[name], policy, optimizer, environment), o.device)
    return numbers | seconds_of(start, marks) | {"tokens": environment.sampled}, [
        environment.sampled
    ]


def seconds_of(start: float, marks: list[float]) -> dict:
    rolled, scored, updated = marks
    return {"rollout": rolled - start, "score": scored - rolled, "update": updated - scored}


# ---------------------------------------------------------------------------------------- retrieval


def run_retrieval(name: str, o: Bench) -> tuple[dict, list]:
    """Passages of 90 words and queries of 12: a few words are in most texts and most in few."""
    draw = random.Random(o.seed)

    def text(words: int) -> str:
        return " ".join(f"w{int(20_000 ** draw.random())}" for _ in range(words))

    documents = [Document(str(i), "", text(90)) for i in range(5_000)]
    queries = [text(12) for _ in range(100)]
    index = BM25(documents) if name == "ours" else BM25Okapi([tokenize(d.text) for d in documents])

    def search(query: str) -> list[int]:
        scores = index.scores(query) if name == "ours" else index.get_scores(tokenize(query))
        return top(scores, 5).tolist()

    numbers, found = measured(lambda: [search(query) for query in queries], "cpu")
    return numbers | {"seconds": numbers["seconds"] / len(queries)}, found


# ------------------------------------------------------------------------------------------- decode


def bytes_per_step(model, rows: int, tokens: float) -> float:
    """What a decoding step must read: every weight once, but of an embedding that is not the head
    only a few rows; and the keys and values of `rows` texts of `tokens` tokens.
    """
    embedding = model.get_input_embeddings().weight
    weights = sum(p.numel() for p in model.parameters())
    weights -= 0 if model.config.tie_word_embeddings else embedding.numel()
    size = embedding.element_size()
    return weights * size + rows * tokens * place_bytes(model.config, size)


def bandwidth(device: str) -> float:
    """Bytes per second of the best of ten copies of a large tensor: each is read and written."""
    size = 2**30 if device == "cuda" else 2**28
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = [measured(lambda: target.copy_(source), device)[0]["seconds"] for _ in range(10)]
    return 2 * size / min(seconds)


def roofline(seconds: float, moved: float, per_second: float) -> dict:
    """Worked: 15.2 GB at 4.3 TB/s cannot take less than 3.53 ms; a step of 5 ms is at 71 %."""
    floor = moved / per_second
    return {"gb_per_s": per_second / 1e9, "floor": floor, "share of roofline": floor / seconds}


@torch.no_grad()
def run_decode(name: str, o: Bench) -> tuple[dict, list]:
    """`--decoded` steps of a full engine: rows of one prompt, whose keys and values are copied into
    every slot.
    """
    model, warm = make_model(o, getattr(torch, o.dtype)).eval(), 8
    check_engine(model)
    rule = StopRule(Scripted([], 1, o).tokenizer, [], set())
    engine = Engine(model, o.batch, o.context + warm + o.decoded + 1, rule)
    engine.graphs = o.engine == "graphs"
    for number in range(o.batch):
        engine.add(number, [i % 1000 + 1 for i in range(o.context)], warm)
    for row in engine.decode():  # reads the prompt; records
        engine.resume(row, row.ids, o.decoded)
    numbers, rows = measured(engine.decode, o.device)
    numbers |= {"seconds": numbers["seconds"] / o.decoded, "tokens": len(rows)}
    moved = bytes_per_step(model, o.batch, o.context + warm + o.decoded / 2)
    return numbers | roofline(numbers["seconds"], moved, bandwidth(o.device)), [len(rows)]


# ----------------------------------------------------------------------------------------- commands

PARTS: dict[str, tuple[Callable, tuple, dict]] = {  # part -> what runs it, variants, twins
    "rollout": (
        run_rollout,
        (*LOOPS,),
        {"naive": ("naive",), "best HF": ("HF active rows", "HF kept caches")},
    ),
    "update": (run_update, (*UPDATES,), {"padded": ("padded log_softmax",)}),
    "step": (run_step, ("TRL", *STEPS), {"slow twin": ("slow twin",), "TRL": ("TRL",)}),
    "retrieval": (run_retrieval, ("rank-bm25", "ours"), {"rank-bm25": ("rank-bm25",)}),
    "decode": (run_decode, ("slots",), {}),
}


def parse(arguments: list[str] | None = None) -> tuple[str, Bench]:
    parser = FlagParser("python -m lab.bench", description="How fast, against what.")
    parser.add_argument("part", choices=PARTS)
    add_flags(parser, FLAGS, Bench(**DEFAULTS), "train")
    given = vars(parser.parse_args(arguments))
    part = given.pop("part")
    o = Bench(**DEFAULTS | given)
    o = replace(o, questions_per_step=o.questions_per_step or (2 if part == "update" else 8))
    for f in fields(o):
        check_value(f.name, getattr(o, f.name), f.metadata)
    check(part, o)
    return part, o


def check(part: str, o: Bench) -> None:
    if o.engine == "hf" or (o.engine == "graphs" and o.device != "cuda"):
        raise InputError(f"--engine {o.engine}: slots, or with --device cuda graphs")
    if o.lora_rank:
        check_peft(o.lora_rank)
    if o.json:
        check_output(o.json, "--json")
    if o.peer and (part != "step" or o.lora_rank or o.optimizer != "adamw"):
        raise InputError("--peer trl is for a step that trains all weights with adamw")
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if o.peer and missing:
        said = f"{' and '.join(missing)} not installed: pip install 'trl==1.16.*'"
        raise InputError(f"--peer trl: {said}")
    if o.vocab == 1:
        raise InputError("--vocab 1: must be at least 2")
    if part == "retrieval" and o.device != "cpu":
        raise InputError("retrieval is a CPU's work: leave --device out")
    variants(part, o)
    shape_of(o)  # a name that nobody knows is told of before anything runs


def variants(part: str, o: Bench) -> list[str]:
    """The variants that are asked for."""
    names = [name for name in PARTS[part][1] if name != "TRL" or o.peer]
    if part == "step" and 0 < o.trajectories_per_update < o.questions_per_step * o.group_size:
        names = ["ours"]  # the twins make one update: their loss has no ratio
    only = o.only.split(",") if o.only else names
    for name in only:
        if name not in names:
            like = f"{nearest(name, names)}; there are {', '.join(names)}"
            raise InputError(f"--only {name}: no such variant{like}")
    return [name for name in names if name in only]


def main(arguments: list[str] | None = None) -> None:
    part, given = parse(arguments)
    run, _, twins = PARTS[part]
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    where = f"{found[1] if found else os.uname().machine}, {os.cpu_count()} cores, torch"
    written = {"what": part, "machine": f"{where} {torch.__version__}", "rows": []}
    for vocab in VOCABS if part == "update" and not given.vocab else [given.vocab]:
        o, runs = replace(given, vocab=vocab), {}
        what = f"{part}: {o.model} {f'V = {vocab:,}' * bool(vocab)} on {o.device}"
        try:
            works = {name: partial(run, name, o) for name in variants(part, o)}
            in_turns(works, o, runs)
        finally:  # Ctrl-C keeps what there is
            rows = summarize(runs, twins)
            print(what, *(line_of(name, row) for name, row in rows.items()), "", sep="\n")
            written["rows"] += [{"what": what, "name": name, **row} for name, row in rows.items()]
    print(written["machine"])
    if given.json:
        Path(given.json).write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
