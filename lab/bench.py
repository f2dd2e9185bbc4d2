"""Times our parts of a training step against slower variants, and how their cost grows with size.

    python -m lab.bench rollout      ours (slots); plain `generate` on unfinished rows; on all rows
    python -m lab.bench update       one gradient: ours; with rows whose loss has no gradient
                                     (--equal_groups N makes some); without shared prompts; padded
    python -m lab.bench step         a whole GRPO step: seconds of its rollout and of its update
    python -m lab.bench retrieval    BM25: ours, rank-bm25 and, if installed, bm25s; `seconds` are
                                     per query, and `build` those to make the index
    python -m lab.bench growth       ours at several sizes: fits cost ~ size ^ exponent (--png FILE)

The number of tokens of each turn and the documents inserted after it are fixed in advance, so all
variants do the same work. The variants run in turns. Each run has its own process, which (except
for BM25) first warms up on a small piece of the work. Among the medians that the command prints are
    seconds   CPU time (on a GPU: clock time after a synchronisation)
    mib       peak memory, less what was held before the work, such as the weights
    x         seconds, divided by those of the first variant that runs or of the smallest size
    apart     relative distance of the result from the first variant's
Left out: waiting for searches, several processes, sampling by a server, other trainers. `step` also
leaves out rewards, clipping, a KL, and recomputing log-probs after sampling in bf16.
"""

import multiprocessing
import random
import sys
import time
from collections import defaultdict
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from rank_bm25 import BM25Okapi
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import grpo
from data import Document
from engines.sampling import to_sample_with
from engines.slots import generate_in_slots
from errors import InputError, check_output, run_main
from lab import names_in, parse_flags
from lab.plan import config_of
from metrics import tokenize
from papers import PROTOCOLS
from policy import Policy, checkpoint_activations, collate, make_optimizer, without_dropout
from retriever import BM25, top
from rollout import generate_by_turns, sample_turns
from scale import packing
from scale.lora import add_lora
from settings import Settings, check_limits, setting
from trajectory import Trajectory
from update import merge_records, rows_that_teach

SAME = {"cpu": 1e-5, "cuda": 2e-2}  # allowed relative distance of two results (cuda: bf16)


@dataclass(frozen=True)
class BenchSettings:
    """Measure the parts of a training step."""

    repeats: int = setting(5, "runs of each variant", least=1)
    only: str = setting("", "variants to run, or axes of `growth`, comma-separated")
    sizes: int = setting(9, "growth: run this many of the smallest sizes of each axis", least=2)
    png: str = setting("", "growth: draw the curves into this file")
    model: str = setting(
        "4M", "shape of the model (random weights): 4M, 7B, 3B, ... or a directory"
    )
    vocab: int = setting(4096, "size of the vocabulary", least=2)
    device: str = setting("cpu", "device (BM25 always runs on a CPU)", one_of=SAME)
    questions_per_step: int = setting(8, "number of prompts", least=1)
    group_size: int = setting(8, "rows of each prompt", least=1)
    micro_batch: int = setting(4, "token limit of a pass: this many times the longest row", least=1)
    equal_groups: int = setting(0, "number of prompts whose rows earn equal rewards", least=0)
    prompt: int = setting(0, "tokens of each prompt; 0: 100 to 200", least=0)
    context: int = setting(0, "tokens of each row: half prompt, half answer; 0: varied", least=0)
    shorter: int = setting(
        1,
        "divisor of the lengths of prompts, turns and inserted documents and of the passage count",
        least=1,
        most=20,
    )
    passages: int = setting(5_000, "passages of the corpus", least=20)


@dataclass(frozen=True)
class Bench(BenchSettings, Settings):
    max_searches: int = 3


class Scripted:
    """Replaces an `Environment`: each row knows in advance the number of tokens of each turn and
    the documents that are inserted after it.
    """

    def __init__(self, o: Bench):
        self.settings, self.protocol, self.rows = o, PROTOCOLS["ur2"], []
        self.run_searches = lambda asking: None  # `end_turn` has already inserted the documents
        # One word in 128 ends like a tag, so that the stop rule has something to examine.
        words = {f"w{i}" + ">" * (i % 128 == 0): i for i in range(o.vocab)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0>")
        draw = random.Random(o.seed)
        half = o.context // 2

        def length(least, most):
            return max(1, draw.randint(least // o.shorter, most // o.shorter))

        def text(least, most):
            return [draw.randrange(1, o.vocab) for _ in range(length(least, most))]

        for _ in range(o.questions_per_step):
            prompt = text(half or o.prompt or 100, half or o.prompt or 200)
            for _ in range(o.group_size):
                searches = range(0 if half else draw.randint(0, o.max_searches))
                turns = [length(20, 80) for _ in searches] + [length(half or 20, half or 150)]
                row = Trajectory(None, self.protocol, prompt)
                row.left = [*zip(turns, [text(100, 200) for _ in searches] + [[]], strict=True)]
                self.rows.append(row)

    def max_trajectory_tokens(self, row):
        return len(row.ids) + sum(count + len(documents) for count, documents in row.left)

    def turn_tokens_left(self, row):
        return row.left[0][0] if row.left else 1  # `whole_batch` also samples for ended rows

    def end_turn(self, row, ids, logprobs, reason):
        row.append_model(ids, logprobs, "")
        row.append_environment(row.left.pop(0)[1], "", "documents")
        row.stop_reason = "" if row.left else "length"


# ------------------------------------------------------------------------------- seconds and memory
def gauge(device):
    """Returns (seconds, bytes of memory in use, peak bytes). For "cuda" these are wall-clock time
    and the memory of PyTorch's tensors, for "cpu" CPU time and the memory of this process. The
    seconds have no fixed start: only differences count.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        return (
            time.perf_counter(),
            torch.cuda.memory_allocated(),
            torch.cuda.max_memory_allocated(),
        )
    peak = getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return time.process_time(), psutil.Process().memory_info().rss, peak


def measured(work, device):
    """Returns ({seconds, mib}, the result of work())."""
    start, used, _ = gauge(device)
    result = work()
    end, _, peak = gauge(device)
    return {"seconds": end - start, "mib": (peak - used) / 2**20}, result


def alone(work):
    """Returns the result of work() in a new process with one thread, forked from one that has
    imported train.py (and so torch).
    """
    forks = multiprocessing.get_context("forkserver")  # threads and locks here make forking unsafe
    forks.set_forkserver_preload(["train"])
    with ProcessPoolExecutor(1, forks, torch.set_num_threads, (1,)) as pool:
        try:
            return pool.submit(work).result()
        except BrokenExecutor:
            raise InputError("a run was killed: most often memory ran out") from None


def in_turns(works: dict, o: Bench, runs: dict) -> None:
    """Runs the variants in turns and fills `runs` {variant: the numbers of each of its runs}. Each
    result must agree with that of the first run: |result − first| / |first| may be at most SAME.
    The sizes of `growth`, and variants whose result is None, are not compared.
    """
    first = None
    for name in tqdm([*works] * o.repeats, leave=False):
        numbers, result = alone(works[name])
        first = result if first is None else first
        skipped = " " in name or result is None
        apart = 0 if skipped else np.linalg.norm(result - first) / np.linalg.norm(first)
        if not apart <= SAME[o.device]:
            raise InputError(
                f"{name}: result differs from the first run's: relative distance {apart:.1e}"
            )
        runs.setdefault(name, []).append(numbers | {"apart": apart})


def show(runs: dict, png: str) -> None:
    """Prints a line of medians for each variant or size. For sizes it also fits cost ~ size ^
    exponent: the exponent is the slope of a straight line through the logarithms.
    """
    curves, first = defaultdict(list), {}
    for name, repeats in runs.items():
        row = merge_records(repeats, np.median)
        axis, *sizes = name.split()
        row["x"] = row["seconds"] / first.setdefault(axis if sizes else "", row["seconds"])
        print(f"{name:20}", *(f"{key} {value:.4g}" for key, value in row.items()), sep="  ")
        for size in sizes:  # a variant has no size
            for cost in {"seconds", "mib", "build"} & row.keys():
                curves[f"{cost} ~ {axis}"].append((int(size), max(row[cost], 1e-9)))
    if png:
        from matplotlib import pyplot  # an optional extra
    for place, (name, points) in enumerate(sorted(curves.items()), 1):
        sizes, costs = np.transpose(points)
        title = f"{name} ^ {np.polyfit(np.log(sizes), np.log(costs), 1)[0]:.2f}"
        print(title)
        if png:
            panel = pyplot.subplot(3, 4, place, title=title)
            panel.loglog(sizes, costs, "o-")
            panel.minorticks_off()
            panel.tick_params(labelsize=8)
            panel.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
            panel.set_yticks(costs, [f"{cost:.4g}" for cost in costs])
    if png:
        pyplot.savefig(png, dpi=90)


# ----------------------------------------------------------------------------------------- variants
def whole_batch(policy, environment, rows):
    """Calls `generate` at every turn for all rows, even finished ones. Each call computes the whole
    context again.
    """
    while not all(row.stop_reason for row in rows):
        turns = sample_turns(policy, environment, rows)
        for row, turn in zip(rows, turns, strict=True):
            if not row.stop_reason:
                environment.end_turn(row, turn.ids, turn.logprobs, "")


@torch.enable_grad()
def backward(policy, environment, rows, every_row=False, padded=False):
    """Computes the gradient as update.py and policy.py do. `every_row` includes rows whose loss has
    no gradient. `padded` includes them too, pads all rows to the longest (with id 0) and computes
    every log-prob. The token budget of a pass is --micro_batch rows of the longest included row's
    length. A row's reward is its index, but all rows of the first --equal_groups prompts earn the
    same.
    """
    o, draw = environment.settings, random.Random(0)
    for row in rows:  # random ids, because sampling from the model would take far longer
        while row.left:
            ids = draw.choices(range(1, o.vocab), k=row.left[0][0])
            environment.end_turn(row, ids, [0.0] * len(ids), "")
    equal = o.equal_groups * o.group_size
    batch = collate(rows, [max(row, equal) for row in range(len(rows))], o.group_size)
    batch.advantages = grpo.compute_advantages(batch, o)  # [B, T]
    batch.token_weights = grpo.compute_token_weights(batch, o) * batch.advantages  # [B, T]
    if padded:
        batch.response_mask.fill_(1)  # so the budget counts every row at full length
    elif not every_row:
        batch = batch.rows(rows_that_teach(batch))
    budget, shared = o.micro_batch * batch.tokens.shape[1], policy.sharing(batch.tokens)
    for numbers in packing.micro_batches(batch.response_mask, budget, tokens=shared):
        part = batch.rows(numbers).to(policy.device)
        if padded:
            with policy.autocast():
                output = policy.language_model(part.tokens, part.tokens.sign(), use_cache=False)
            logits = output.logits[:, :-1].float()  # [b, t, V]
            logprobs = logits.log_softmax(-1).gather(2, part.tokens[:, 1:, None])[..., 0]  # [b, t]
        else:
            logprobs = policy(part.tokens, 1.0, part.response_mask)  # [b, t]
        (-part.token_weights * logprobs).sum().backward()


def step(policy, environment, rows, every_row=False):
    o = environment.settings
    optimizer = make_optimizer(policy, o.optimizer, o.lr)
    start = gauge(o.device)[0]
    with to_sample_with(policy, o.device == "cuda") as sampler:
        generate_in_slots(sampler, environment, rows)
    middle = gauge(o.device)[0]
    backward(policy, environment, rows, every_row)
    optimizer.step()
    policy.zero_grad()
    return {"rollout": middle - start, "update": gauge(o.device)[0] - middle}


@torch.no_grad()
def run_scripted(work, name, o):
    """Returns (the numbers of one variant, the result in which all variants must agree). The result
    is the gradient or, if none is left after the work, the number of sampled tokens.
    """
    config = without_dropout(config_of(o.model))
    config.eos_token_id = config.pad_token_id = None  # no turn ends early
    config.vocab_size = o.vocab
    # Trained weights are fp32. With LoRA the model's weights are frozen, in bf16 on a GPU.
    dtype = torch.bfloat16 if o.lora_rank and o.device == "cuda" else torch.float32
    torch.manual_seed(o.seed)
    with torch.device(o.device):
        policy = Policy(AutoModelForCausalLM.from_config(config, dtype=dtype))
    if name == "whole":
        packing.LEAST = float("inf")  # no prompt is long enough to be shared
    if o.lora_rank:
        add_lora(policy.language_model, o.lora_rank)
    if o.gradient_checkpointing:
        checkpoint_activations(policy.language_model)
    for settings in (replace(o, questions_per_step=1, shorter=20), o):  # the first warms up
        environment = Scripted(settings)
        policy.zero_grad()
        numbers, parts = measured(partial(work, policy, environment, environment.rows), o.device)
    sampled = sum(sum(row.response_mask) for row in environment.rows)
    numbers |= {"tokens_per_s": sampled / numbers["seconds"], **(parts or {})}
    gradients = [p.grad.flatten().float().cpu() for p in policy.parameters() if p.grad is not None]
    return numbers, torch.cat(gradients or [torch.Tensor([sampled])]).numpy()


def run_retrieval(work, name, o):
    """Searches passages of 90 words with queries of 3 to 10 words. Word frequencies are skewed, as
    in natural text.
    """
    draw = np.random.default_rng(o.seed)

    def text(words):
        return " ".join(f"w{int(word)}" for word in 20_000 ** draw.random(words))

    documents = [Document("", "", text(90)) for _ in range(o.passages // o.shorter)]
    queries = [text(draw.integers(3, 11)) for _ in range(100)]

    def search(query):
        scores = index.scores(query)
        # Rounded, because the last digits differ: variants add up in other orders.
        return scores[top(scores, 5)].round(9)

    built, index = measured(lambda: work(documents), "cpu")
    asked, scores = measured(lambda: np.array([search(query) for query in queries]), "cpu")
    numbers = built | {"build": built["seconds"], "seconds": asked["seconds"] / 100}
    return numbers, None if work is bm25s else scores  # bm25s defines idf differently


def rank_bm25(documents):
    index = BM25Okapi([tokenize(document.text) for document in documents])
    return SimpleNamespace(scores=lambda query: index.get_scores(tokenize(query)))


def bm25s(documents):
    """Wraps the package bm25s; its own code selects the best documents."""
    from bm25s import BM25 as Index

    index = Index(k1=1.5, b=0.75)
    index.index([tokenize(document.text) for document in documents], show_progress=False)

    def best(query):
        return index.retrieve([tokenize(query)], k=5, show_progress=False).scores[0]

    return SimpleNamespace(scores=best)


AXES = {  # setting that grows -> (the function to time, the values of the setting)
    "questions_per_step": (generate_in_slots, (2, 8, 32, 128)),
    "context": (backward, (256, 1024, 4096)),
    "vocab": (backward, (4096, 24_576, 151_936)),
    "max_searches": (generate_in_slots, (1, 3, 8)),
    "passages": (BM25, (5_000, 40_000, 300_000, 1_000_000)),
}
PARTS = {  # in each part but growth, our variant comes first
    "rollout": {
        "slots": generate_in_slots,
        "by_turns": generate_by_turns,
        "whole_batch": whole_batch,
    },
    "update": {
        "ours": backward,
        "every_row": partial(backward, every_row=True),
        "whole": backward,
        "padded": partial(backward, padded=True),
    },
    "step": {"ours": step, "every_row": partial(step, every_row=True)},
    "retrieval": {"ours": BM25, "rank-bm25": rank_bm25},
    "growth": AXES,
}
if find_spec("bm25s"):
    PARTS["retrieval"]["bm25s"] = bm25s


def main(arguments: list[str] | None = None) -> None:
    options, given = parse_flags("lab.bench", BenchSettings, arguments, (Settings, Settings), PARTS)
    part, works, runs = given.pop("method"), {}, {}
    o = Bench(**vars(options) | given, algorithm="grpo")
    check_limits(o)
    if o.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here")
    if o.png:
        check_output(o.png, "--png")
        from matplotlib import pyplot  # an optional extra

        pyplot.figure(figsize=(16, 9), layout="constrained")
    for name in names_in("only", o.only, PARTS[part]):
        work, sizes = AXES.get(name, (PARTS[part][name], [""]))
        run = run_retrieval if work in PARTS["retrieval"].values() else run_scripted
        for size in sizes[: o.sizes]:
            # For `growth` all rows of an update have one fixed length. Random lengths would change
            # with the size of the vocabulary, as lengths and ids come from the same generator.
            changes = {"context": 512 * (work is backward), name: size}
            grown = replace(o, **changes) if size else o
            works[f"{name} {size}".strip()] = partial(run, work, name, grown)
    print(f"{part}: {o.model}, V = {o.vocab:,}, {o.device}")
    try:
        in_turns(works, o, runs)
    finally:  # also after Ctrl-C
        show(runs, o.png)


if __name__ == "__main__":
    run_main(main)
