"""Trains by supervision: baselines of two papers, and a small summariser on a large one's log.

    direct      ARENA's first baseline: only the answer (--protocol arena_summary: the gold summary)
    reasoning   ARENA's second: the relevant references, an analysis, the answer
    traces      R1-Searcher's: correct trajectories, from predictions of eval.py, or published ones
    summarizer  instruction, reasoning, query, passages -> notes, from the log of a training run

    python -m lab.distil direct --model DIR --data QUESTIONS --out DIR

UR² trains its summariser at a fixed learning rate (C.1). No paper says how the learning rate of the
other methods changes; here it falls linearly to 0.

An example is a prompt and pieces of text, some of which the model imitates (sft.py). Examples that
are longer than the model's context are dropped, because a truncated one would lack its end: the
answer, or the end of the notes.
The analysis of `reasoning` quotes the gold references. To imitate a teacher's own words instead,
write the teacher's predictions to a FILE with eval.py --recipe arena, and run
`traces --protocol arena --data FILE --questions QUESTIONS`.
"""

import itertools
import math
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from coldstart import final_answer
from data import Question, load_questions
from errors import InputError, check_output, run_main, setting
from eval import settings_of
from flags import PolicySettings
from formats.records import read_records, write_text
from lab import parse_flags
from other_models.llm import prompt_ids
from papers import PAPERS
from plumbing.files import settings_text
from plumbing.predictions import read_predictions
from policy import best_device, load_policy, save_policy
from prompts import (
    PROTOCOLS,
    Protocol,
    build_prompt,
    tag_pair,
)
from rollout import context_of
from sft import Example, SFTSettings, citing, example_of, train_sft
from summarizer import SUMMARY_LOG
from trajectory import Trajectory, trajectory_from_text
from trajectory_metrics import prediction_metrics


@dataclass(frozen=True)
class DistilSettings:
    """Train a baseline (direct, reasoning, traces) or a small summariser by supervision."""

    model: str = setting("", "HF causal LM to start from: a directory or a hub name", needed=True)
    data: str = setting(
        "", f"questions; for traces predictions; {SUMMARY_LOG} for summarizer", needed=True
    )
    out: str = setting("", "directory to save the model in", needed=True)
    protocol: str = setting("", "default: arena; for traces r1_searcher", one_of=("", *PROTOCOLS))
    questions: str = setting(
        "",
        "traces: the file with the predictions' questions; needed if these have options or"
        " references",
    )
    epochs: float = setting(2.0, "passes over the examples", above=0)
    batch_size: int = setting(32, "examples per update", least=1)
    lr: float = setting(1e-5, "learning rate (summarizer: fixed; others: it falls to 0)", above=0)
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory")
    skip_bad: bool = setting(False, "skip malformed records (not for summarizer)")
    seed: int = setting(0, "seed of the examples' order, and of the N questions of --data FILE:N")


def direct_protocol(protocol: Protocol) -> Protocol:
    """Returns the protocol with an instruction that asks for the answer alone, because a model that
    is trained to ignore its instruction would not be a fair baseline.
    """
    task = "Answer the question"
    wanted = "the answer in a few words"
    if protocol.answer_tags == tag_pair("summary"):  # ARENA appendix H.2
        task = "Write the summary that is asked for"
        wanted = "the summary in whole sentences"
    source = " from the numbered references that follow it" if protocol.references_in_prompt else ""
    box = final_answer(replace(protocol, prompt_suffix=""), wanted)
    text = f"{task}{source}. Write nothing but {box}"
    return replace(protocol, instruction=text, direct_instruction=text)


def direct_example(question: Question, protocol: Protocol, tokenizer) -> Example:
    """Builds an example: prompt -> the first gold answer, without reasoning."""
    prompt = build_prompt(direct_protocol(protocol), question, tokenizer)
    return example_of(prompt, [(final_answer(protocol, question.answers[0]), True)], tokenizer)


def reasoning_example(question: Question, protocol: Protocol, tokenizer) -> Example:
    """Builds an example: prompt -> the response that `sft.citing` writes."""
    text = citing(question, protocol, tokenizer)
    return example_of(build_prompt(protocol, question, tokenizer), [(text, True)], tokenizer)


def trace_example(trajectory: Trajectory, tokenizer) -> Example:
    """Builds an example from a trajectory; its documents and notices are not imitated."""
    prompt = build_prompt(trajectory.protocol, trajectory.question, tokenizer)
    return example_of(prompt, trace_pieces(trajectory), tokenizer)


# In a parsed transcript, a documents segment includes all white space around the block. One "\n\n"
# on each side is the environment's. The rest was sampled by the model, for example in a turn's last
# token ">\n\n".
_BLOCK = re.compile(r"((?:\s*(?=\n\n\S))?)(\s*\S.*\S(?:\n\n|\s*))(\s*)", re.DOTALL)


_MARK = "\ud800"  # a lone surrogate, which no valid text contains


def trace_pieces(trajectory: Trajectory) -> list[tuple[str, bool]]:
    """Splits the response wherever the writer changed in the rollout. Returns pairs (text, did the
    model write it?).
    """
    protocol = trajectory.protocol
    marked = ""
    # These trajectories were parsed from transcripts. Documents were recognised by their tags, but
    # notices are still inside the model's segments, so they are recognised by their wording.
    notices = filter(None, (protocol.fallback_notice, *protocol.rejection_notices))
    known = re.compile(f"({'|'.join(map(re.escape, notices))})")
    for segment in trajectory.segments:  # puts marks around the environment's text
        if segment.writer == "documents":
            marked += _BLOCK.sub(rf"\1{_MARK}\2{_MARK}\3", segment.text)
        else:
            marked += known.sub(rf"{_MARK}\1{_MARK}", segment.text)
    return [(part, n % 2 == 0) for n, part in enumerate(marked.split(_MARK)) if part]


def read_traces(records: list[dict], protocol: Protocol, given=()) -> list[Trajectory]:
    """Returns each question's first correct trajectory: format and em, which are computed if the
    record lacks them, must be 1. If there are questions in `given`, every record must be about one
    of them, and options, references and answers come from it.
    """
    known = {question.id: question for question in given}
    traces = {}
    for record in records:
        name = record["id"]
        if (known and name not in known) or "transcript" not in record:
            raise InputError(
                f"question {name} is not in --questions, or has no transcript: give as"
                " --questions the file it is from, and as --data a file that eval.py --out wrote"
            )
        question = known.get(name) or Question(name, record["question"], record.get("golds", []))
        trace = trajectory_from_text(question, record["transcript"], protocol)
        metrics = prediction_metrics(trace) | record["metrics"]
        if metrics["format"] == metrics.get("em") == 1:
            traces.setdefault(name, trace)
    return list(traces.values())


def read_summary_log(path: str) -> dict[tuple[str, str], str]:
    """Returns {(instruction, text): reply}; the last reply to a request replaces earlier ones."""
    replies = {}
    for _, place, record in read_records(Path(path)):
        if isinstance(record, InputError) or not record.keys() >= SUMMARY_FIELDS:
            raise InputError(
                f"{path}, {place}: no summary record: give as --data the {SUMMARY_LOG} in a"
                " training run's --output_dir, or remove the line"
            )
        replies[record["instruction"], record["text"]] = record["summary"]
    return replies


SUMMARY_FIELDS = {"instruction", "text", "summary"}
METHODS = ("direct", "reasoning", "traces", "summarizer")


def examples_of(method: str, settings: DistilSettings, protocol, tokenizer) -> list[Example]:
    if method == "summarizer":
        # The prompt must equal the one that other_models/llm.py gives a local summariser.
        return [
            example_of(prompt_ids(tokenizer, asked), [(reply, True)], tokenizer)
            for asked, reply in read_summary_log(settings.data).items()
        ]
    if method == "traces":
        given = load_questions(settings.questions, settings.skip_bad) if settings.questions else ()
        records = read_predictions(settings.data, settings.skip_bad)
        return [trace_example(t, tokenizer) for t in read_traces(records, protocol, given)]
    questions = load_questions(settings.data, settings.skip_bad, settings.seed)
    if method == "direct":
        return [direct_example(q, protocol, tokenizer) for q in questions]
    usable = [q for q in questions if q.supporting]
    print(f"{len(usable)} of {len(questions)} questions name supporting references")
    return [reasoning_example(q, protocol, tokenizer) for q in usable]


def that_fit(examples: list[Example], longest: int) -> list[Example]:
    fit = [example for example in examples if len(example.ids) <= longest and any(example.mask)]
    message = (
        f"{len(fit)} of {len(examples)} examples fit {longest} tokens and have text to imitate"
    )
    if not fit:
        raise InputError(f"no example to train on: {message}: check --data")
    print(message)
    return fit


def distil(method: str, settings: DistilSettings) -> None:
    """Loads the model, encodes the examples, trains, and saves."""
    protocol = PROTOCOLS[settings.protocol or {"traces": "r1_searcher"}.get(method, "arena")]
    memory = PolicySettings(gradient_checkpointing=settings.gradient_checkpointing)
    policy, tokenizer = load_policy(settings.model, best_device(), memory)  # fp32, for training
    examples = that_fit(examples_of(method, settings, protocol, tokenizer), context_of(policy))
    size = min(settings.batch_size, len(examples))
    steps = math.ceil(settings.epochs * len(examples) / size)
    # decay_from = 1.0 is the end of the run, so a summariser's learning rate stays fixed.
    decay_from = float(method == "summarizer")
    training = SFTSettings(steps, settings.lr, decay_from=decay_from, betas=(0.9, 0.999))
    # Each epoch has every example once.
    stream = (
        example
        for epoch in itertools.count()
        for example in random.Random(f"{settings.seed}  {epoch}").sample(examples, len(examples))
    )
    losses = train_sft(policy, lambda _: list(itertools.islice(stream, size)), training, method)
    if not math.isfinite(sum(losses)):
        raise InputError(f"the loss was not finite: nothing was saved; lower --lr {settings.lr:g}")
    recipe = max(PAPERS, key=protocol.name.startswith)  # a protocol's name begins with its paper's
    saved = {"model": settings.model, "recipe": recipe, "protocol": protocol.name}
    if method == "direct":  # evaluation needs the same changed instruction, without searching
        saved |= {"prompt_file": f"{settings.out}/prompt.txt", "retrieval": False}
    # From these settings eval.py and ask.py know the protocol. A summariser has none.
    save_policy(
        policy,
        tokenizer,
        settings.out,
        settings="" if method == "summarizer" else settings_text(settings_of(saved)),
    )
    print(f"{steps} updates, loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved: {settings.out}")
    if method == "direct":
        write_text(Path(settings.out, "prompt.txt"), direct_protocol(protocol).instruction)


def main(arguments: list[str] | None = None) -> None:
    settings, given = parse_flags("lab.distil", DistilSettings, arguments, methods=METHODS)
    if Path(settings.out).exists():
        raise InputError(f"--out {settings.out} already exists: name another, or remove it")
    check_output(f"{settings.out}/x", "--out")
    distil(given["method"], settings)


if __name__ == "__main__":
    run_main(main)
