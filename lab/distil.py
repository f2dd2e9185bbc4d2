"""Trains by supervision: baselines of two papers, and a small summariser on a large one's log.

    direct      ARENA's first baseline: only the answer
    reasoning   ARENA's second: the relevant references, an analysis, the answer
    traces      R1-Searcher's: correct trajectories, from predictions of eval.py, or published ones
    summarizer  instruction, reasoning, query, passages -> notes, from the log of a training run

    python -m lab.distil direct --model DIR --data QUESTIONS --out DIR

UR² trains its summariser at a fixed learning rate (C.1). No paper says how the learning rate of the
other methods changes; here it falls linearly to 0.

An example is a prompt and pieces of text, some of which the model imitates (sft.py). Examples that
are longer than the model's context are dropped, because a truncated one would lack its end: the
answer, or the end of the notes. `direct` answers the prompt of lab.baselines' `rag`, so evaluate it
with `lab.baselines --method rag --retriever given`. The analysis of `reasoning` quotes the
gold references. Left out: a teacher's own words, ARENA's summaries.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data import Question, load_questions
from errors import InputError, check_output, run_main
from eval import settings_of
from formats.records import finished_records
from lab import parse_flags
from lab.baselines import reading
from other_models.llm import prompt_ids
from papers import PAPERS, PROTOCOLS
from plumbing.files import settings_text
from plumbing.predictions import read_predictions
from policy import best_device, load_policy, save_policy
from prompts import Protocol, build_prompt, number_documents
from rollout import context_of
from settings import Settings, setting
from sft import Example, SFTSettings, citing, example_of, train_sft
from summarizer import SUMMARY_LOG
from trajectory import Trajectory, trajectory_from_text
from trajectory_metrics import prediction_metrics

METHODS = ("direct", "reasoning", "traces", "summarizer")
ARENA = PROTOCOLS["arena"]


@dataclass(frozen=True)
class DistilSettings:
    """Train a baseline (direct, reasoning, traces) or a small summariser by supervision."""

    model: str = setting("", "HF causal LM to start from: a directory or a hub name", needed=True)
    data: str = setting(
        "", f"questions; for traces predictions; {SUMMARY_LOG} for summarizer", needed=True
    )
    out: str = setting("", "directory to save the model in", needed=True)
    protocol: str = setting("r1_searcher", "protocol of traces", one_of=PROTOCOLS)
    epochs: int = setting(2, "passes over the examples", least=1)
    batch_size: int = setting(32, "examples per update", least=1)
    lr: float = setting(
        1e-5, "learning rate (summarizer: fixed; others: it falls to 0)", least=1e-9
    )
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory")
    seed: int = setting(0, "seed of the examples' order, and of the N questions of --data FILE:N")


def trace_pieces(trajectory: Trajectory) -> list[tuple[str, bool]]:
    """Returns the response as pairs (text, did the model write it?). In a parsed transcript notices
    are inside the model's segments, so they are recognised by their wording.
    """
    protocol = trajectory.protocol
    notices = filter(None, (protocol.fallback_notice, *protocol.rejection_notices))
    known = re.compile(f"({'|'.join(map(re.escape, notices))})")
    pieces = []
    for segment in trajectory.segments:
        if segment.writer == "documents":
            pieces.append((segment.text, False))
        else:
            pieces += [(part, n % 2 == 0) for n, part in enumerate(known.split(segment.text))]
    return pieces


def read_traces(records: list[dict], protocol: Protocol) -> list[Trajectory]:
    """Returns each question's first correct trajectory: format and em, which are computed if the
    record lacks them, must be 1.
    """
    traces = {}
    for record in records:
        question = Question(record["id"], record["question"], record.get("golds", []))
        trace = trajectory_from_text(question, record["transcript"], protocol)
        metrics = prediction_metrics(trace) | record["metrics"]
        if metrics["format"] == metrics["em"] == 1:
            traces.setdefault(question.id, trace)
    return list(traces.values())


def imitations(method: str, s: DistilSettings, tokenizer) -> Iterator[tuple]:
    """Yields (prompt, pieces of text, see sft.example_of) for each example."""
    if method == "summarizer":
        # The last reply to a request replaces earlier ones.
        log = {(r["instruction"], r["text"]): r["summary"] for r in finished_records(s.data)}
        for asked, reply in log.items():
            # The prompt must equal the one that other_models/llm.py gives a local summariser.
            yield prompt_ids(tokenizer, asked), [(reply, True)]
    elif method == "traces":
        protocol = PROTOCOLS[s.protocol]
        for trace in read_traces(read_predictions(s.data), protocol):
            yield build_prompt(protocol, trace.question, tokenizer), trace_pieces(trace)
    else:
        for question in load_questions(s.data, seed=s.seed):
            if method == "direct":
                asked = reading(question, number_documents(question.references))
                request = asked.as_request(asked.question, ())
                answer = f"<answer> {question.answers[0]} </answer>"
                yield prompt_ids(tokenizer, request), [(answer, True)]
            elif question.supporting:
                text = citing(question, ARENA, tokenizer)
                yield build_prompt(ARENA, question, tokenizer), [(text, True)]


def examples_of(method: str, s: DistilSettings, tokenizer, longest: int) -> list[Example]:
    """Returns the examples that fit into `longest` tokens."""
    pairs = imitations(method, s, tokenizer)
    examples = [example_of(prompt, pieces, tokenizer) for prompt, pieces in pairs]
    fit = [example for example in examples if len(example.ids) <= longest]
    print(f"{len(fit)} of {len(examples)} examples fit {longest} tokens")
    if not fit:
        raise InputError(f"--data {s.data}: it gives no example to train on")
    return fit


def distil(method: str, s: DistilSettings) -> None:
    """Loads the model, encodes the examples, trains, and saves."""
    memory = Settings(gradient_checkpointing=s.gradient_checkpointing)
    policy, tokenizer = load_policy(s.model, best_device(), memory)  # fp32, for training
    examples = examples_of(method, s, tokenizer, context_of(policy))
    draw, batches = random.Random(s.seed), []
    for _ in range(s.epochs):
        draw.shuffle(examples)
        starts = range(0, len(examples), s.batch_size)
        batches += [examples[start : start + s.batch_size] for start in starts]
    # decay_from = 1.0 is the end of the run, so a summariser's learning rate stays fixed.
    decay_from = float(method == "summarizer")
    training = SFTSettings(len(batches), s.lr, decay_from=decay_from, betas=(0.9, 0.999))
    losses = train_sft(policy, batches.__getitem__, training, method)
    saved = ""
    if method != "summarizer":  # from these settings eval.py and ask.py know the protocol
        name = s.protocol if method == "traces" else "arena"
        recipe = next(recipe for recipe in PAPERS if name in PAPERS[recipe].protocols)
        saved = settings_text(settings_of({"model": s.model, "recipe": recipe, "protocol": name}))
    save_policy(policy, tokenizer, s.out, settings=saved)
    print(f"{len(batches)} updates, loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved: {s.out}")


def main(arguments: list[str] | None = None) -> None:
    settings, given = parse_flags("lab.distil", DistilSettings, arguments, methods=METHODS)
    if Path(settings.out).exists():
        raise InputError(f"--out {settings.out} already exists: name another, or remove it")
    check_output(Path(settings.out, "config.json"), "--out")
    distil(given["method"], settings)


if __name__ == "__main__":
    run_main(main)
