"""Times parts of a training step beside other implementations of the same work.

    python -m lab.bench rollout      ours (slots); plain `generate` on the unfinished rows
    python -m lab.bench update       an optimizer step: ours; with every row padded to the longest
    python -m lab.bench step         a whole step: its rollout with rewards, then its update
    python -m lab.bench retrieval    100 queries to 5,000 passages: our BM25 and rank-bm25

The first three take the flags of train.py and work on the questions of that run's first step;
rollouts are greedy, so that all variants sample the same tokens. The variants take turns. Printed
are medians of five runs, and their ratio to the first variant: CPU time, or on a GPU clock time
after a synchronisation. For one thread set OMP_NUM_THREADS=1. Left out: memory, other trainers.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
import torch
from rank_bm25 import BM25Okapi
from torch import nn

from data import Document
from engines.slots import generate_in_slots
from errors import FlagParser, run_main
from flags import parse
from metrics import tokenize
from plumbing.build import build_state
from retriever import BM25, top
from rollout import generate_by_turns
from train import collect, prepare, shared_rollout
from update import TrainState, update

REPEATS = 5
PASSAGES = 5_000
Variants = dict[str, Callable[[], object]]


def seconds_of(work: Callable[[], object]) -> float:
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start


def compare(variants: Variants) -> None:
    """Runs the variants in turns, and prints the median time of each."""
    rounds = [[seconds_of(work) for work in variants.values()] for _ in range(REPEATS)]
    medians = [median(column) for column in zip(*rounds, strict=True)]
    for name, seconds in zip(variants, medians, strict=True):
        print(f"{name:12} {seconds:9.3g} s {seconds / medians[0]:8.2f} x")


# ---------------------------------------------------------------------------- rollout, update, step
def rollouts(state: TrainState) -> Variants:
    state.environment.settings = replace(state.settings, temperature=0.0)

    def sample(generate: Callable):
        state.generate = generate
        return shared_rollout(state, state.environment, state.stream.take(0), 0)

    ways = {"slots": generate_in_slots, "by_turns": generate_by_turns}
    return {name: partial(sample, way) for name, way in ways.items()}


class Padded(nn.Module):
    """Computes a policy's log-probs as most code does: every row padded to the longest (here with
    id 0), logits of all places, a softmax over all of them.
    """

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, tokens, temperature, mask):
        with self.policy.autocast():
            output = self.policy.language_model(tokens, tokens.sign(), use_cache=False)
        logits = output.logits[:, :-1].float() / temperature  # [b, t, V]
        return logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]  # [b, t]


def updates(state: TrainState) -> Variants:
    batch = prepare(state, collect(state, 0))
    padded = replace(state, model=Padded(state.policy))
    return {"ours": partial(update, state, batch), "padded": partial(update, padded, batch)}


def steps(state: TrainState) -> Variants:
    batch = prepare(state, collect(state, 0))
    return {"rollout": partial(collect, state, 0), "update": partial(update, state, batch)}


# ---------------------------------------------------------------------------------------- retrieval
def searches() -> Variants:
    """Searches passages of 90 words with queries of 3 to 10 words. Word frequencies are skewed, as
    in natural text.
    """
    draw = np.random.default_rng(0)

    def text(words: int) -> str:
        return " ".join(f"w{int(word)}" for word in 20_000 ** draw.random(words))

    texts = [text(90) for _ in range(PASSAGES)]
    ours = BM25([Document("", "", text) for text in texts])
    other = BM25Okapi([*map(tokenize, texts)])
    find = {
        "ours": lambda query: top(ours.scores(query), 5),
        "rank-bm25": lambda query: top(other.get_scores(tokenize(query)), 5),
    }
    queries = [text(draw.integers(3, 11)) for _ in range(100)]
    return {name: lambda one=one: [*map(one, queries)] for name, one in find.items()}


PARTS = {"rollout": rollouts, "update": updates, "step": steps}


def main(arguments: list[str] | None = None) -> None:
    parser = FlagParser("lab.bench", add_help=False)
    parser.add_argument("part", choices=[*PARTS, "retrieval"])
    given, flags = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if given.part == "retrieval":
        if flags:
            parser.error(f"retrieval takes no flags: {flags[0]}")
        compare(searches())
    else:
        compare(PARTS[given.part](build_state(parse([*flags, "--dry_run"]))))


if __name__ == "__main__":
    run_main(main)
