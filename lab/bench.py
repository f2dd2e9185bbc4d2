"""How fast, and against what: the parts of a training step, each beside a slow twin.

    python -m lab.bench rollout      three loops that sample
    python -m lab.bench update       one gradient, at V = 151,936
    python -m lab.bench prompts      one gradient of rows that share prompts, at V = 4,096
    python -m lab.bench step         a whole GRPO step: how much of it each part takes
    python -m lab.bench retrieval    BM25, seconds per query and of the build (bm25s: if installed)

The work is written down first: how many tokens each turn has, and what a search then inserts. The
variants take turns, each run in a process of its own that first does a small piece of the work.

    seconds   of CPU (on a GPU: of the clock, after a synchronisation), median of all runs
    mib       peak, less what the process held before, its weights (on a GPU the whole peak)
    x TWIN    the twin's seconds / ours: above 1 is faster

Left out: searches (nothing waits here), several processes, sampling by a server, other trainers.
"""

import multiprocessing
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from rank_bm25 import BM25Okapi
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import grpo
import rollout
from data import Document, Question
from errors import FlagParser, InputError, run_main, setting
from flags import PolicySettings, RolloutSettings
from lab import names_in
from lab.plan import config_of
from metrics import tokenize
from policy import Policy, checkpoint_activations, collate, make_optimizer, without_dropout
from prompts import PROTOCOLS
from retriever import BM25, top
from scale import packing
from scale.engine import obstacle, play_in_slots
from scale.lora import add_lora
from scale.packing import LEAST, micro_batches
from scale.sampling import to_sample_with, wants_copy
from settings import Settings, add_flags, check_limits
from train import Sampled, prepare, shuffled_updates
from trajectory import Trajectory
from update import Parts, update

PROMPT, TURN, ANSWER, INSERTED = (100, 200), (20, 80), (20, 150), (100, 200)  # tokens
SAME = {"cpu": 1e-5, "cuda": 2e-2}  # how far two gradients may be apart: fp32, and bf16 autocast


@dataclass(frozen=True)
class BenchSettings:
    repeats: int = setting(5, "runs of each variant", least=1)
    only: str = setting("", "names of variants, comma-separated, such as ours")
    model: str = setting("4M", "4M, 7B, 3B, ... or a directory: its shape, with random weights")
    vocab: int = setting(0, "0: the shape's own; of an update 151,936", least=0)
    device: str = setting("cpu", "what computes", one_of=("cpu", "cuda"))
    threads: int = setting(1, "of a process, on a CPU", least=1)
    questions_per_step: int = setting(8, "of update 2, of prompts 4", least=1)
    trajectories_per_update: int = setting(0, "step: 0 makes one update of all", least=0)
    tokens_per_micro_batch: int = setting(4096, "step: padding counted", least=1)
    micro_batch: int = setting(4, "update: rows as long as the longest; of prompts 16", least=1)
    prompt: int = setting(0, "tokens of each prompt; 0: 100 to 200", least=0)
    shorter: int = setting(1, "all lengths are divided by this", least=1, most=20)
    passages: int = setting(5_000, "retrieval: of the corpus", least=20)


DEFAULTS = {"algorithm": "grpo", "kl_coef": 0.0, "group_size": 8, "lr": 1e-6}


@dataclass(frozen=True)
class Bench(BenchSettings, Settings):
    """A run's settings, at the sizes of a benchmark."""


class Scripted:
    """An `Environment` whose rows know the length of each turn, and what is inserted behind it."""

    def __init__(self, vocab: int, o: Bench):
        self.settings, self.protocol, self.rows = o, PROTOCOLS["ur2"], []
        # One word in 128 ends like a tag, so that there is something to look for tags in.
        words = {f"w{i}{'>' if i % 128 == 0 else ''}": i for i in range(vocab)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0>")
        draw = random.Random(o.seed)

        def length(bounds: tuple[int, int]) -> int:
            return draw.randint(bounds[0] // o.shorter, bounds[1] // o.shorter)

        def text(bounds: tuple[int, int]) -> list[int]:
            return [draw.randrange(1, vocab) for _ in range(length(bounds))]

        for _ in range(o.questions_per_step):
            prompt = text((o.prompt, o.prompt) if o.prompt else PROMPT)
            for _ in range(o.group_size):
                searches = draw.randint(0, 3)
                said = [length(TURN) for _ in range(searches)] + [length(ANSWER)]
                found = [text(INSERTED) for _ in range(searches)] + [[]]
                row = Trajectory(Question("", "", []), self.protocol, prompt)
                row.left = list(zip(said, found, strict=True))  # turns to come
                self.rows.append(row)

    def longest(self, row: Trajectory) -> int:
        """Of a row that has not begun."""
        return len(row.prompt_ids) + sum(n + len(ids) for n, ids in row.left)

    def turn_room(self, row: Trajectory) -> int:
        return 1 if row.stop_reason else row.left[0][0]  # `naive` samples of ended rows too

    def end_turn(self, row: Trajectory, ids: list[int], logprobs: list[float], reason: str) -> None:
        row.append_model(ids, logprobs, "")
        row.stop_reason = "" if len(row.left) > 1 else "length"

    def answer(self, asking: list[Trajectory]) -> None:
        for row in asking:
            row.append_environment(row.left.pop(0)[1], "", "documents")

    def play(self, vocab: int) -> None:
        """As if a policy had sampled: random tokens, log-probs 0."""
        draw = random.Random(0)
        for row in self.rows:
            for said, found in row.left:
                row.append_model([draw.randrange(1, vocab) for _ in range(said)], [0.0] * said, "")
                row.append_environment(found, "", "documents")
            row.stop_reason = "length"


def shape_of(o: Bench):
    """--model's config. It names no end of a text: a turn ends where its room does."""
    config = without_dropout(config_of(o.model))
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    config.vocab_size = o.vocab or config.vocab_size
    return config


def make_model(o: Bench, dtype: torch.dtype):
    # Asked in the child: who has asked CUDA cannot fork any more.
    if o.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here")
    torch.manual_seed(o.seed)
    with torch.device(o.device):
        model = AutoModelForCausalLM.from_config(shape_of(o), dtype=dtype)
    if problem := obstacle(model):
        raise InputError(f"--model: {problem}; the engine cannot drive it")
    return model


# ------------------------------------------------------------------------------- seconds and memory
def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def peak_mib(device: str, anew: bool) -> float:
    """Since the last call with `anew`; on a GPU since the process began."""
    if device == "cuda":
        return 0.0 if anew else torch.cuda.max_memory_allocated() / 2**20
    if not Path("/proc/self/clear_refs").exists():
        return 0.0  # no Linux: not counted
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def measured(work: Callable[[], object], device: str) -> tuple[dict, object]:
    """({seconds, mib}, what work() returns)."""
    before, start = peak_mib(device, anew=True), clock(device)
    result = work()
    seconds = clock(device) - start
    return {"seconds": seconds, "mib": peak_mib(device, anew=False) - before}, result


def alone(work: Callable[[], tuple[dict, list]], threads: int) -> tuple[dict, list]:
    """Returns work() of a process of its own, forked from one that has the imports."""
    forks = multiprocessing.get_context("forkserver")  # this process has threads, and holds locks
    forks.set_forkserver_preload(["train"])
    with ProcessPoolExecutor(1, forks, torch.set_num_threads, (threads,)) as pool:
        try:
            return pool.submit(work).result()
        except BrokenProcessPool:
            raise InputError("a run was ended from outside: most often memory ran out") from None


def in_turns(works: dict[str, Callable], o: Bench, runs: dict[str, list[dict]]) -> None:
    """Fills `runs`, each variant in turn. |a − b| / |b| to the first run is SAME at most."""
    first = None
    for name in tqdm([*works] * o.repeats, leave=False, dynamic_ncols=True):
        numbers, did = alone(works[name], o.threads)
        if did is not None:
            did = torch.as_tensor(did, dtype=torch.float64)
            first = did if first is None else first
            numbers["apart"] = float((did - first).norm() / first.norm())
            if not numbers["apart"] <= SAME[o.device]:
                said = f"{name}: {numbers['apart']:.1e} from the first variant"
                raise InputError(f"{said}: not the same work")
        runs.setdefault(name, []).append(numbers)


def show(runs: dict[str, list[dict]]) -> None:
    """A line per variant: medians of its runs, and its speed against each variant above it."""
    medians: dict[str, dict] = {}
    for name, found in runs.items():
        row = {key: statistics.median(run[key] for run in found) for key in found[0]}
        seconds = [run["seconds"] for run in found]
        row |= {"from": min(seconds), "to": max(seconds)}
        if "tokens" in row:
            row["tokens_per_s"] = row["tokens"] / row["seconds"]
        row |= {f"x {twin}": slow["seconds"] / row["seconds"] for twin, slow in medians.items()}
        medians[name] = row
        print(f"{name:16}" + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))


# ----------------------------------------------------------------------------------------- variants
def naive(policy: Policy, environment: Scripted, rows: list[Trajectory]) -> None:
    """`generate` for the whole batch at every turn, all computed again."""
    while not all(row.stop_reason for row in rows):
        turns = rollout.sample_turns(policy, environment, rows)
        for row, turn in zip(rows, turns, strict=True):
            if not row.stop_reason:
                environment.end_turn(row, turn.ids, turn.logprobs, "length")
        environment.answer([row for row in rows if not row.stop_reason])


@torch.no_grad()
def slots(policy: Policy, environment: Scripted, rows: list[Trajectory]) -> None:
    play_in_slots(policy, environment, rows)  # --max_num_seqs: fewer slots than rows


def grpo_batch(rows: list[Trajectory], o: Bench):
    """Rewards are 0 and 1 by turns."""
    batch = collate(rows, [float(i % 2) for i in range(len(rows))], o.group_size)
    batch.advantages = grpo.compute_advantages(batch, o)  # [B, T]
    batch.token_weights = grpo.compute_token_weights(batch, o)  # [B, T]
    return batch


def padded(policy: Policy, environment: Scripted, rows: list[Trajectory]) -> None:
    """The gradient of a few rows at a time, padded to the longest of all, from every log-prob."""
    batch = grpo_batch(rows, environment.settings)
    weights = batch.token_weights * batch.advantages  # [B, T]
    lengths = torch.tensor([[len(row.ids)] for row in rows])  # [B, 1]
    seen = torch.arange(batch.tokens.shape[1]) < lengths  # [B, L]
    for some in torch.arange(len(batch)).split(environment.settings.micro_batch):
        tokens, mask = batch.tokens[some].to(policy.device), seen[some].long().to(policy.device)
        with policy.autocast():
            output = policy.language_model(tokens, attention_mask=mask, use_cache=False)
            every = output.logits[:, :-1].float().log_softmax(-1)  # [b, T, V]
            logprobs = every.gather(2, tokens[:, 1:, None])[..., 0]  # [b, T]
        (-weights[some].to(policy.device) * logprobs).sum().backward()


def packed(policy: Policy, environment: Scripted, rows: list[Trajectory]) -> None:
    """The gradient as policy.py has it, of as many tokens at once as the padded twin has."""
    batch = grpo_batch(rows, environment.settings)
    budget = environment.settings.micro_batch * batch.tokens.shape[1]
    for some in micro_batches(batch.response_mask, budget, tokens=policy.sharing(batch.tokens)):
        part = batch.rows(some).to(policy.device)
        logprobs = policy(part.tokens, 1.0, part.response_mask)  # [b, t]
        (-part.token_weights * part.advantages * logprobs).sum().backward()


def step(policy: Policy, environment: Scripted, rows: list[Trajectory]) -> dict:
    """Each part's share of the time; "score": log-probs before updates (on a GPU), advantages."""
    o = environment.settings
    on_gpu = o.device == "cuda"  # in bf16 sampling and scoring round differently: recompute
    optimizer = make_optimizer(policy, o.optimizer, o.lr)
    accelerator = Accelerator(cpu=not on_gpu)
    parts = Parts(o, accelerator, policy, policy, optimizer, on_gpu, environment=environment)
    times = [clock(o.device)]
    with to_sample_with(policy, wants_copy(o.sampling_copy, policy.device, False)) as sampler:
        slots(sampler, environment, rows)
    times.append(clock(o.device))
    rewards = [{"reward": float(i % 2)} for i in range(len(rows))]
    batch = prepare(parts, Sampled(rows, rewards, [], range(len(rows))), 0)
    times.append(clock(o.device))
    for index in shuffled_updates(0, batch.rewards, o):
        update(parts, batch.rows(index))
    times.append(clock(o.device))
    shares = np.diff(times) / (times[-1] - times[0])
    return dict(zip(("rollout", "score", "update"), shares, strict=True))


def run_scripted(work: Callable, name: str, o: Bench) -> tuple[dict, np.ndarray | list]:
    """(seconds and memory of one variant, what all variants must agree in)."""
    # All weights are trained, in fp32; or LoRA's, and the rest is frozen (bf16 on a GPU).
    frozen = o.lora_rank and o.device == "cuda"
    policy = Policy(make_model(o, torch.bfloat16 if frozen else torch.float32))
    packing.LEAST = float("inf") if name == "whole" else LEAST
    if name not in ("slots", "ours", "whole"):  # a padded twin
        policy.language_model.set_attn_implementation("sdpa")
    if o.lora_rank:
        add_lora(policy.language_model, o.lora_rank)
    if o.gradient_checkpointing:
        checkpoint_activations(policy.language_model)
    vocab, gradient = policy.config.vocab_size, work in (padded, packed)
    warm = replace(o, questions_per_step=1, shorter=20)  # imports, compiles, allocates
    for settings in (warm, o):
        environment = Scripted(vocab, settings)
        if gradient:
            environment.play(vocab)
            policy.zero_grad(set_to_none=True)
        numbers, parts = measured(partial(work, policy, environment, environment.rows), o.device)
    sampled = sum(sum(row.response_mask) for row in environment.rows)
    numbers |= {"tokens": sampled, **(parts or {})}
    if not gradient:
        return numbers, [sampled]
    gradients = [p.grad.flatten().float().cpu() for p in policy.parameters() if p.requires_grad]
    return numbers, torch.cat(gradients).numpy()


def best(scores: np.ndarray) -> np.ndarray:
    """The five largest: which of two documents comes first, a last digit may say."""
    return scores[top(scores, 5)].round(9)


def rank_bm25(documents: list[Document]) -> Callable[[str], np.ndarray]:
    index = BM25Okapi([tokenize(one.text) for one in documents])
    return lambda query: best(index.get_scores(tokenize(query)))


def other_bm25(documents: list[Document]) -> Callable[[str], np.ndarray]:
    """Of the package bm25s: its idf is another, and so are its scores."""
    import bm25s

    index = bm25s.BM25(k1=1.5, b=0.75)
    index.index([tokenize(one.text) for one in documents], show_progress=False)
    return lambda query: index.retrieve([tokenize(query)], k=5, show_progress=False).scores[0]


def own_bm25(documents: list[Document]) -> Callable[[str], np.ndarray]:
    index = BM25(documents)
    return lambda query: best(index.scores(query))


def run_retrieval(work: Callable, name: str, o: Bench) -> tuple[dict, np.ndarray | None]:
    """Passages of 90 words, queries of 3 to 10: a few words are in most texts, most in few."""
    draw = np.random.default_rng(o.seed)

    def text(words: int) -> str:
        return " ".join(f"w{int(word)}" for word in 20_000 ** draw.random(words))

    documents = [Document(str(i), "", text(90)) for i in range(o.passages // o.shorter)]
    queries = [text(draw.integers(3, 11)) for _ in range(100 // o.shorter)]
    built, ask = measured(lambda: work(documents), "cpu")
    asked, found = measured(lambda: np.array([ask(query) for query in queries]), "cpu")
    each = {"seconds": asked["seconds"] / len(queries), "build": built["seconds"]}
    return built | each, None if work is other_bm25 else found


# What runs it, and its variants: ours stands last and is compared with all above it.
BM25S = {"bm25s": other_bm25} if find_spec("bm25s") else {}
LOOPS = {"naive": naive, "HF active rows": rollout.play_by_turns, "slots": slots}
PARTS: dict[str, tuple[Callable, dict]] = {
    "rollout": (run_scripted, LOOPS),
    "update": (run_scripted, {"padded": padded, "ours": packed}),
    "prompts": (run_scripted, {"whole": packed, "ours": packed}),
    "step": (run_scripted, {"ours": step}),
    "retrieval": (run_retrieval, {"rank-bm25": rank_bm25, **BM25S, "ours": own_bm25}),
}


def parse(arguments: list[str] | None = None) -> tuple[str, Bench]:
    """What cannot be is told of before anything runs."""
    parser = FlagParser("python -m lab.bench", description="How fast, against what.")
    parser.add_argument("part", choices=PARTS)
    records = (BenchSettings, RolloutSettings, PolicySettings)
    add_flags(parser, records, Bench(**DEFAULTS), "train")
    given = vars(parser.parse_args(arguments))
    part = given.pop("part")
    own = {"questions_per_step": 2, "vocab": 151_936} if part == "update" else {}
    own |= {"questions_per_step": 4, "vocab": 4096, "micro_batch": 16} if part == "prompts" else {}
    o = Bench(**DEFAULTS | own | given)
    check_limits(o)
    shape_of(o)
    if o.vocab == 1:
        raise InputError("--vocab 1: must be at least 2")
    if part == "retrieval" and o.device != "cpu":
        raise InputError("retrieval is a CPU's work: leave --device out")
    return part, o


def variants(part: str, o: Bench) -> dict[str, Callable]:
    """Those that are asked for."""
    run, works = PARTS[part]
    only = names_in("only", o.only, works)
    return {name: partial(run, works[name], name, o) for name in works if name in only}


def main(arguments: list[str] | None = None) -> None:
    part, o = parse(arguments)
    works, runs = variants(part, o), {}
    vocabulary = f", V = {o.vocab:,}" if o.vocab else ""
    print(f"{part}: {o.model}{vocabulary}, {o.device}; {os.cpu_count()} cores, {o.threads} used")
    try:
        in_turns(works, o, runs)
    finally:  # Ctrl-C keeps what there is
        show(runs)


if __name__ == "__main__":
    run_main(main)
