"""Supervised models: two papers' baselines, and a small summariser from a large one's log.

    direct      ARENA's first baseline: the answer alone
    reasoning   ARENA's second: the references it needs, an analysis, the answer
    traces      R1-Searcher's: right trajectories, from a predictions file of eval.py
    summarizer  instruction, reasoning, query and passages -> the notes; from what training logged

    python -m lab.distil direct --model DIR --data QUESTIONS --out DIR

An example is a prompt and pieces of text, of which the model imitates some (sft.py). None is cut:
that would teach to stop without an answer. `reasoning` quotes gold references; for a teacher's own
words: `traces --protocol arena --data FILE --questions QUESTIONS`, FILE of eval.py --recipe arena.
"""

import itertools
import math
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data import Question, load_questions
from errors import InputError, check_output, run_main, setting
from formats.records import read_records
from lab import interruptible, parse_flags
from other_models.llm import prompt_ids
from policy import PolicySettings, best_device, load_policy, save_policy
from prompts import PROTOCOLS, Protocol, build_prompt, number_documents, without_control
from rollout import context_of
from sft import Example, SFTSettings, example_of, train_sft
from summarizer import NO_FACT, SUMMARY_LOG
from trajectory import Trajectory, trajectory_from_text


@dataclass(frozen=True)
class DistilSettings:
    """METHOD: direct, reasoning, traces or summarizer."""

    model: str = setting("", "HF causal LM to start from: a directory or a hub name", needed=True)
    data: str = setting("", f"questions; or predictions; or {SUMMARY_LOG} of --runs", needed=True)
    out: str = setting("", "directory to save the model in", needed=True)
    protocol: str = setting("", "by itself arena, for traces r1_searcher", one_of=("", *PROTOCOLS))
    questions: str = setting("", "traces: the question file, for options and references")
    epochs: float = setting(2.0, "passes over the examples", above=0)
    batch_size: int = setting(32, "examples per update", least=1)
    lr: float = setting(1e-5, "learning rate; falls linearly to 0", above=0)
    max_context: int = setting(0, "longer examples are left out; 0: the model's limit", least=0)
    tokens_per_micro_batch: int = setting(16384, "padded tokens per forward pass", least=1)
    gradient_checkpointing: bool = setting(False, "compute activations again: less memory")
    skip_bad: bool = setting(False, "leave unusable records out")
    seed: int = setting(0, "of the order of the examples")


def final_answer(protocol: Protocol, answer: str) -> str:
    """The answer in its box. Where the prompt ends inside <think>, the thinking is closed first."""
    if protocol.answer_tags is None:
        return f"\\boxed{{{answer}}}"
    begin, end = protocol.answer_tags
    return f"{'</think>' if protocol.prompt_suffix == '<think>' else ''}{begin} {answer} {end}"


def direct_protocol(protocol: Protocol) -> Protocol:
    """It asks for the answer alone: a model trained to ignore its instruction is no baseline."""
    source = " from the numbered references that follow it" if protocol.references_in_prompt else ""
    box = final_answer(replace(protocol, prompt_suffix=""), "the answer in a few words")
    text = f"Answer the question{source}. Write nothing but {box}"
    return replace(protocol, instruction=text, direct_instruction=text)


def direct_example(question: Question, protocol: Protocol, tokenizer) -> Example:
    """Prompt -> the first gold answer, without a word of reasoning."""
    protocol = direct_protocol(protocol)
    text = final_answer(protocol, question.answers[0])
    return example_of(build_prompt(protocol, question, tokenizer), [(text, True)], tokenizer)


def reasoning_example(question: Question, protocol: Protocol, tokenizer) -> Example:
    """Prompt -> <relevance>[1, 3]</relevance> <analysis>...</analysis> <answer>...</answer>"""
    begin, end = protocol.section_tags("relevance")
    opened, closed = protocol.section_tags("analysis")
    analysis = without_control(analysis_of(question), tokenizer, protocol.tags).strip()
    text = f"{begin}{list(question.supporting)}{end}\n{opened} {analysis} {closed}\n"
    text += final_answer(protocol, question.answers[0])
    return example_of(build_prompt(protocol, question, tokenizer), [(text, True)], tokenizer)


def analysis_of(question: Question) -> str:
    """Of each gold reference the sentence with the answer, or the first one; then the answer."""
    if not question.supporting:
        why = "names no supporting reference: leave it out (--skip_bad)"
        raise InputError(f"question {question.id} {why}")
    golds, quotes = [answer.lower() for answer in question.answers], []
    for reference in question.references:
        sentences = re.split(r"(?<=[.!?])\s+", reference.text.strip())
        holding = [s for s in sentences if any(gold in s.lower() for gold in golds)]
        quotes.append(replace(reference, text=(holding or sentences)[0]))
    numbered = number_documents(quotes)
    quoted = [numbered[number - 1] for number in question.supporting]
    return " ".join([*quoted, f"So the answer is {question.answers[0]}."])


def trace_example(trajectory: Trajectory, tokenizer) -> Example:
    """A transcript as it stood in the context: documents and notices are read, not imitated."""
    prompt = build_prompt(trajectory.protocol, trajectory.question, tokenizer)
    return example_of(prompt, trace_pieces(trajectory), tokenizer)


# The environment frames documents in exactly one blank line ("\n\n"). What a transcript has beyond
# that was sampled, and is the model's: a turn may end in a token such as ">\n\n".
_BLOCK = re.compile(r"((?:\s*(?=\n\n\S))?)(\s*\S.*\S(?:\n\n|\s*))(\s*)", re.DOTALL)


def trace_pieces(trajectory: Trajectory) -> list[tuple[str, bool]]:
    """(text, written by the model?) in order, cut where the rollout began a new piece."""
    protocol, pieces = trajectory.protocol, []
    # A transcript does not say who wrote what: notices are known by their wording.
    notices = (protocol.fallback_notice, *protocol.refusal_notices)
    known = f"({'|'.join(re.escape(notice) for notice in notices if notice)})"
    for segment in trajectory.segments:
        if segment.writer == "documents":
            before, block, behind = _BLOCK.fullmatch(segment.text).groups()
            parts = [(before, True), (block, False), (behind, True)]
        else:
            parts = [(part, part not in notices) for part in re.split(known, segment.text)]
        for text, imitate in parts:
            if text and imitate and pieces and pieces[-1][1]:  # one turn, one piece
                pieces[-1] = (pieces[-1][0] + text, True)
            elif text:
                pieces.append((text, imitate))
    return pieces


def read_traces(path: str, protocol: Protocol, given: Sequence[Question] = ()) -> list[Trajectory]:
    """Each question's first right trajectory (format 1, em 1). `given` adds options, references."""
    known, traces = {question.id: question for question in given}, {}
    for _, place, record in read_records(Path(path)):
        if isinstance(record, InputError):
            raise InputError(f"{path}, {place}: {record}: correct it")
        fields = [record.get(field) for field in ("id", "question", "transcript", "metrics")]
        if None in fields:
            how = "with id, question, transcript and metrics: evaluate with --out FILE"
            raise InputError(f"{path}, {place}: expected a line of eval.py {how}")
        name, asked, transcript, metrics = fields
        if known and name not in known:
            why = "is not in --questions: give the file it was made from"
            raise InputError(f"{path}, {place}: question {name} {why}")
        if name not in traces and metrics.get("format") == metrics.get("em") == 1:
            question = known.get(name) or Question(name, asked, record.get("golds") or [])
            traces[name] = trajectory_from_text(question, transcript, protocol)
    return list(traces.values())


def read_summary_log(path: str | Path) -> dict[tuple[str, str], str]:
    """(instruction, text) -> the last reply. A line that an interrupt cut short is left out."""
    replies = {}
    for _, place, record in read_records(Path(path)):
        if isinstance(record, InputError):
            print(f"warning: {path}, {place}: {record}: left out", file=sys.stderr)
            continue
        try:
            reply = NO_FACT if record["fallback"] else record["summary"]
            replies[record["instruction"], record["text"]] = reply
        except (TypeError, KeyError) as error:
            why = f"no summary record ({error!r}): give the {SUMMARY_LOG} of a --runs"
            raise InputError(f"{path}, {place}: {why}") from None
    return replies


def summary_example(asked: tuple[str, str], reply: str, tokenizer) -> Example:
    """The very prompt that other_models/llm.py asks a local model with -> the reply."""
    return example_of(prompt_ids(tokenizer, asked), [(reply, True)], tokenizer)


METHODS = ("direct", "reasoning", "traces", "summarizer")


def examples_of(method: str, settings: DistilSettings, protocol, tokenizer) -> list[Example]:
    if method == "summarizer":
        replies = read_summary_log(settings.data)
        return [summary_example(asked, reply, tokenizer) for asked, reply in replies.items()]
    if method == "traces":
        given = load_questions(settings.questions, settings.skip_bad) if settings.questions else ()
        return [trace_example(t, tokenizer) for t in read_traces(settings.data, protocol, given)]
    questions = load_questions(settings.data, settings.skip_bad, settings.seed)
    if method == "direct":
        return [direct_example(q, protocol, tokenizer) for q in questions]
    usable = [q for q in questions if q.supporting or not settings.skip_bad]
    return [reasoning_example(q, protocol, tokenizer) for q in usable]


def that_fit(examples: list[Example], longest: int) -> list[Example]:
    fit = [example for example in examples if len(example.ids) <= longest and any(example.mask)]
    if not fit:
        why = f"of {len(examples)} examples none has something to imitate in {longest} tokens"
        raise InputError(f"no example to train on: {why}: look at --data, or raise --max_context")
    if left_out := len(examples) - len(fit):
        print(f"{left_out} of {len(examples)} examples are longer than {longest} tokens: left out")
    return fit


def distil(method: str, settings: DistilSettings) -> None:
    """Load, encode, train, save."""
    protocol = PROTOCOLS[settings.protocol or {"traces": "r1_searcher"}.get(method, "arena")]
    how = PolicySettings(gradient_checkpointing=settings.gradient_checkpointing)
    policy, tokenizer = load_policy(settings.model, best_device(), how)  # fp32: it is trained
    longest = min(settings.max_context or 2**31, context_of(policy))
    examples = that_fit(examples_of(method, settings, protocol, tokenizer), longest)
    size = min(settings.batch_size, len(examples))
    steps = math.ceil(settings.epochs * len(examples) / size)
    tokens = sum(sum(example.mask) for example in examples)
    print(f"{method}: {len(examples)} examples, {tokens:,} tokens to imitate, {steps} updates")
    limit = settings.tokens_per_micro_batch
    training = SFTSettings(steps, settings.lr, betas=(0.9, 0.999), tokens_per_micro_batch=limit)
    # Every example once per epoch.
    orders = (random.Random(f"{settings.seed}  {epoch}") for epoch in itertools.count())
    stream = (example for order in orders for example in order.sample(examples, len(examples)))
    losses = train_sft(policy, lambda _: list(itertools.islice(stream, size)), training, method)
    if not all(map(math.isfinite, losses)):
        why = f"nothing was saved; lower --lr {settings.lr:g}"
        raise InputError(f"the loss became {losses[-1]}: {why}")
    save_policy(policy, tokenizer, settings.out)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved: {settings.out}")
    if method == "direct":  # its instruction is not the protocol's: evaluation needs it too
        file = Path(settings.out, "prompt.txt")
        file.write_text(direct_protocol(protocol).instruction + "\n", encoding="utf-8")
        print(f"evaluate with --protocol {protocol.name} --prompt_file {file}")


def main(arguments: list[str] | None = None) -> None:
    settings, given = parse_flags("lab.distil", DistilSettings, arguments, methods=METHODS)
    if Path(settings.out).exists():
        raise InputError(f"--out {settings.out} is there already: name another, or remove it")
    check_output(f"{settings.out}/x", "--out")
    with interruptible("nothing was saved"):
        distil(given["method"], settings)


if __name__ == "__main__":
    run_main(main)
