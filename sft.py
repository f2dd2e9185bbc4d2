"""Masked supervised training: imitate the model's part of a transcript, and only that.

    L = − Σ_t m_t log π_θ(y_t | y_<t) / Σ_t m_t        m_t = 1 on tokens to imitate, 0 on the prompt
    and on inserted text

The same mask as in RL: a model trained to write documents learns to invent them. A token may also
be left out of the loss because imitating it would teach a habit: the built-in world masks the
choice between searching and answering, so that reading is practised while the habit of searching
stays rare.

    python sft.py direct      --model DIR --data QUESTIONS --out DIR       ARENA's first baseline:
    the answer alone
    python sft.py reasoning   --model DIR --data QUESTIONS --out DIR       its second: relevance,
    analysis, answer
    python sft.py traces      --model DIR --data PREDICTIONS --out DIR     R1-Searcher's: right
    trajectories of eval.py
    python sft.py summarizer  --model DIR --data LOG --out DIR             a small summariser from a
    large one's log

Every example ends in EOS, so that the model learns to stop. Equal seeds give equal weights on the
same machine. Left out: packing several examples into one row, several processes.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from curriculum import QuestionStream
from data import Question, load_questions
from errors import InputError, run_main
from formats.records import read_records, short
from policy import (
    Policy,
    best_device,
    last_column,
    load_policy,
    lr_factor,
    make_optimizer,
    micro_batches,
    save_policy,
)
from prompts import (
    Protocol,
    as_protocol,
    build_prompt,
    chat_text,
    forbidden_texts,
    number_documents,
    special_texts,
    strip_tags,
)
from rollout import encode
from summarizer import NO_FACT, SummaryPair, read_summary_log, summary_request
from trajectory import Trajectory, trajectory_from_text


@dataclass(frozen=True)
class Example:
    """Token ids and, per token, 1 if it is to be imitated. Same length; mask[0] is never used
    (nothing predicts it).
    """

    ids: list[int]
    mask: list[int]


def collate_examples(
    examples: Sequence[Example], pad_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [B, L], mask [B, T]: column t of the mask is about tokens[:, t + 1]."""
    width = max(len(e.ids) for e in examples)
    tokens = torch.full((len(examples), width), pad_id, dtype=torch.long)  # [B, L]
    mask = torch.zeros(len(examples), width)  # [B, L]
    for row, example in enumerate(examples):
        tokens[row, : len(example.ids)] = torch.tensor(example.ids)
        mask[row, : len(example.mask)] = torch.tensor(example.mask, dtype=torch.float)
    return tokens, mask[:, 1:]


def sft_loss(policy: Policy, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean negative log-prob over the tokens to imitate. Worked number: log-probs −1, −3 with mask
    1, 1 -> 2.
    """
    logprobs = policy(tokens, mask=mask)  # [B, T]
    return -(logprobs * mask).sum() / mask.sum().clamp(min=1)


def sft_lr_factor(step: int, steps: int, warmup: int, decay_start: int) -> float:
    """Linear warm-up, flat, and from `decay_start` on linear to 0.

    Worked: 10 steps, warm-up 2, decay from 6: 1/2 1 1 1 1 1, then 1 3/4 1/2 1/4.
    """
    if step < decay_start:
        return lr_factor(step, decay_start, warmup, "constant")
    return lr_factor(step - decay_start, steps - decay_start, 0, "linear")


def train_sft(
    policy: Policy,
    next_examples: Callable[[int], Sequence[Example]],
    steps: int,
    lr: float,
    warmup: int = 0,
    decay_from: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.98),
    tokens_per_micro_batch: int = 16384,
    description: str = "supervised",
) -> list[float]:
    """`steps` updates; `next_examples(step)` gives each step's batch. Returns the loss of every
    step.

    decay_from: the share of the run after which the learning rate falls linearly to 0.
    Micro-batches add up to the gradient of the whole batch: each is weighted by its share of the
    tokens.
    """
    optimizer = make_optimizer(policy, "adamw", lr, betas)
    start = max(warmup, int(decay_from * steps))  # the decay begins behind the warm-up
    losses = []
    with tqdm(total=steps, desc=description, dynamic_ncols=True) as bar:
        for step in range(steps):
            factor = sft_lr_factor(step, steps, warmup, start)
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            tokens, mask = collate_examples(next_examples(step))
            tokens, mask = tokens.to(policy.device), mask.to(policy.device)
            loss = 0.0
            for rows in micro_batches(mask, tokens_per_micro_batch):
                width = last_column(
                    mask[rows]
                )  # what stands behind the last token to imitate cannot influence it
                share = mask[rows].sum() / mask.sum().clamp(min=1)
                part = share * sft_loss(policy, tokens[rows, : width + 1], mask[rows, :width])
                part.backward()
                loss += part.item()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
    return losses


# --------------------------------------------------------------------------------- text -> examples


def example_of(prompt: list[int], pieces: Sequence[tuple[str, bool]], tokenizer) -> Example:
    """A prompt and the pieces behind it, (text, imitate); EOS ends the text.

    Each piece is encoded by itself, as the rollout does: encoded as one text, a token could span a
    turn's end and the block behind it, and such a token stands in no trajectory.
    """
    ids, mask = list(prompt), [0] * len(prompt)
    for text, imitate in pieces:
        piece = encode(tokenizer, text)
        ids += piece
        mask += [int(imitate)] * len(piece)
    end = tokenizer.eos_token_id
    if end is not None and ids[len(prompt) :][-1:] != [
        end
    ]:  # a transcript that ended in EOS has it already
        ids, mask = [*ids, end], [*mask, 1]
    return Example(ids, mask)


def final_answer(protocol: Protocol, answer: str) -> str:
    """The answer in the protocol's box. Where the prompt ends inside <think>, the thinking is
    closed first.
    """
    if protocol.answer_tags is None:
        return f"\\boxed{{{answer}}}"
    begin, end = protocol.answer_tags
    return f"{'</think>' if protocol.prompt_suffix == '<think>' else ''}{begin} {answer} {end}"


def direct_protocol(protocol: Protocol | str) -> Protocol:
    """The protocol with an instruction that asks for the answer and nothing else: the usual one
    asks for reasoning, and a model that is trained to ignore its instruction is no baseline.
    """
    protocol = as_protocol(protocol)
    source = " from the numbered references that follow it" if protocol.references_in_prompt else ""
    box = final_answer(dataclasses.replace(protocol, prompt_suffix=""), "the answer in a few words")
    text = f"Answer the question{source}. Write nothing but {box}"
    return dataclasses.replace(protocol, instruction=text, direct_instruction=text)


def direct_example(question: Question, protocol: Protocol | str, tokenizer) -> Example:
    """Prompt -> the first gold answer, without a word of reasoning (ARENA's SFT baseline
    "direct").
    """
    protocol = direct_protocol(protocol)
    answer = final_answer(protocol, question.answers[0])
    return example_of(build_prompt(protocol, question, tokenizer), [(answer, True)], tokenizer)


@dataclass(frozen=True)
class Reasoning:
    """What a reasoning trace says: the numbers of the references it needs (from 1), why, and the
    answer.
    """

    relevance: tuple[int, ...]
    analysis: str
    answer: str


def reasoning_example(
    question: Question, reasoning: Reasoning, protocol: Protocol | str, tokenizer
) -> Example:
    """Prompt -> <relevance>[1, 3]</relevance> <analysis>...</analysis> <answer>...</answer>
    (ARENA's "reasoning").
    """
    protocol = as_protocol(protocol)
    (begin, end), (open_, close) = (
        protocol.section_tags("relevance"),
        protocol.section_tags("analysis"),
    )
    analysis = strip_tags(reasoning.analysis, forbidden_texts(protocol, tokenizer)).strip()
    numbers = ", ".join(map(str, reasoning.relevance))
    text = (
        f"{begin}[{numbers}]{end}\n{open_} {analysis}"
        f" {close}\n{final_answer(protocol, reasoning.answer)}"
    )
    return example_of(build_prompt(protocol, question, tokenizer), [(text, True)], tokenizer)


def reasoning_from_support(question: Question) -> Reasoning:
    """A trace without a teacher: of each gold paragraph the sentence that holds the answer, or its
    first one.
    """
    if not question.supporting:
        raise InputError(
            f"question {question.id} names no supporting reference: give its trace with --traces,"
            " or leave it out"
        )
    steps = []
    for number in question.supporting:
        reference = question.references[number - 1]
        sentences = re.split(r"(?<=[.!?])\s+", reference.text.strip())
        holding = [
            s for s in sentences if any(answer.lower() in s.lower() for answer in question.answers)
        ]
        (shown,) = number_documents(
            [dataclasses.replace(reference, text=(holding or sentences)[0])]
        )
        steps.append(shown.replace("(1)", f"({number})", 1))
    answer = question.answers[0]
    return Reasoning(
        tuple(question.supporting), " ".join([*steps, f"So the answer is {answer}."]), answer
    )


def trace_example(trajectory: Trajectory, tokenizer) -> Example:
    """A transcript as it stood in the context: its documents and notices are read and not
    imitated.
    """
    prompt = build_prompt(trajectory.protocol, trajectory.question, tokenizer)
    return example_of(prompt, trace_pieces(trajectory), tokenizer)


def trace_pieces(trajectory: Trajectory) -> list[tuple[str, bool]]:
    """(text, written by the model?) in order, cut where the rollout began a new piece."""
    protocol, pieces = trajectory.protocol, []
    for segment in trajectory.segments:
        if segment.writer == "documents":
            before, block, behind = environment_part(segment.text)
            pieces += [(before, True), (block, False), (behind, True)]
        else:
            pieces += (
                without_notices(segment.text, protocol)
                if segment.writer == "model"
                else [(segment.text, False)]
            )
    merged: list[tuple[str, bool]] = []
    for text, imitate in pieces:
        if text and imitate and merged and merged[-1][1]:  # one turn, one piece
            merged[-1] = (merged[-1][0] + text, True)
        elif text:
            merged.append((text, imitate))
    return merged


def environment_part(block: str) -> tuple[str, str, str]:
    """Blank lines of the model's before a document block, the block as the environment wrote it,
    the model's behind it.

    The environment frames documents in exactly one blank line ("\\n\\n"). What a transcript has
    beyond that was sampled: a turn may end in a token such as ">\\n\\n".
    """
    head, tail = len(block) - len(block.lstrip()), len(block) - len(block.rstrip())
    before = block[: head - 2] if block[:head].endswith("\n\n") else ""
    behind = block[len(block) - tail + 2 :] if block[len(block) - tail :].startswith("\n\n") else ""
    return before, block[len(before) : len(block) - len(behind)], behind


def without_notices(text: str, protocol: Protocol) -> list[tuple[str, bool]]:
    """A transcript does not say who wrote what: the environment's notices are known by their
    wording.
    """
    notices = (protocol.fallback_notice, protocol.malformed_notice, protocol.limit_notice)
    parts = re.split(f"({'|'.join(re.escape(notice) for notice in notices if notice)})", text)
    return [(part, part not in notices) for part in parts]


def summary_example(pair: SummaryPair, tokenizer) -> Example:
    """Instruction, query and numbered documents -> the summary, or NO FACT; the prompt is the one
    that llm.py's local model is asked with.
    """
    instruction, text = summary_request(pair.query, pair.documents)
    prompt = chat_text(tokenizer, instruction, strip_tags(text, special_texts(tokenizer)))
    return example_of(
        encode(tokenizer, prompt), [(NO_FACT if pair.fallback else pair.summary, True)], tokenizer
    )


# -------------------------------------------------------------------------------- files -> examples


def read_reasonings(path: str | Path) -> dict[str, Reasoning]:
    """Question id -> its trace, from JSONL {"id", "relevance": [1, 3], "analysis", "answer"}."""
    reasonings = {}
    for _, place, record in read_records(Path(path)):
        if isinstance(record, InputError):
            raise InputError(f"{path}, {place}: {record}: correct it")
        numbers, texts = (
            record.get("relevance"),
            [record.get(name) for name in ("analysis", "answer")],
        )
        listed = (
            isinstance(numbers, list) and numbers and all(type(number) is int for number in numbers)
        )
        if (
            "id" not in record
            or not listed
            or not all(isinstance(text, str) and text.strip() for text in texts)
        ):
            raise InputError(
                f'{path}, {place}: expected {{"id", "relevance": [1, 3], "analysis", "answer"}},'
                f" found {short(record)}"
            )
        reasonings[str(record["id"])] = Reasoning(tuple(numbers), *texts)
    return reasonings


def check_reasoning(question: Question, reasoning: Reasoning) -> Reasoning:
    wrong = [
        number for number in reasoning.relevance if not 1 <= number <= len(question.references)
    ]
    if wrong:
        last = len(question.references)
        raise InputError(
            f"the trace of question {question.id} cites {wrong[0]}; its references are 1 to {last}:"
            " correct it"
        )
    return reasoning


def read_traces(
    path: str | Path,
    protocol: Protocol | str,
    per_question: int = 1,
    questions: list[Question] | None = None,
) -> list[Trajectory]:
    """The right trajectories of a predictions file of eval.py: format 1 and em 1, the first
    `per_question` of each question.

    A record has the question's text and no more; for options or references give the `questions` it
    was made from.
    """
    known, taken, traces = {question.id: question for question in questions or []}, Counter(), []
    for _, place, record in read_records(Path(path)):
        if isinstance(record, InputError):
            raise InputError(f"{path}, {place}: {record}: correct it")
        metrics = record.get("metrics")
        texts = all(isinstance(record.get(name), str) for name in ("question", "transcript"))
        if (
            not isinstance(metrics, dict)
            or not {"format", "em"} <= set(metrics)
            or not texts
            or "id" not in record
        ):
            raise InputError(
                f"{path}, {place}: expected a line of eval.py with id, question, transcript and"
                " metrics: evaluate with --out FILE and give that file"
            )
        identity = str(record["id"])
        if questions is not None and identity not in known:
            raise InputError(
                f"{path}, {place}: question {identity} is not in --questions: give the file it was"
                " made from"
            )
        if metrics["format"] == metrics["em"] == 1 and taken[identity] < per_question:
            taken[identity] += 1
            question = known.get(identity) or Question(
                identity, record["question"], record.get("golds") or []
            )
            traces.append(trajectory_from_text(question, record["transcript"], protocol))
    return traces


# --------------------------------------------------------------------------------- the command line


def examples_of(options, protocol: Protocol, tokenizer) -> list[Example]:
    """The examples that a method makes of --data."""
    if options.method == "summarizer":
        return [summary_example(pair, tokenizer) for pair in read_summary_log(options.data)]
    if options.method == "traces":
        questions = (
            load_questions(options.questions, options.skip_bad) if options.questions else None
        )
        return [
            trace_example(t, tokenizer)
            for t in read_traces(options.data, protocol, options.per_question, questions)
        ]
    questions = load_questions(options.data, options.skip_bad)
    if options.method == "direct":
        return [direct_example(question, protocol, tokenizer) for question in questions]
    written = read_reasonings(options.traces) if options.traces else None
    if written is None:
        questions = [
            question for question in questions if question.supporting or not options.skip_bad
        ]
        pairs = [(question, reasoning_from_support(question)) for question in questions]
    else:
        pairs = [(q, check_reasoning(q, written[q.id])) for q in questions if q.id in written]
    return [
        reasoning_example(question, reasoning, protocol, tokenizer) for question, reasoning in pairs
    ]


def usable(examples: list[Example], longest: int) -> list[Example]:
    """The examples that fit the context: one that is cut would teach to stop without an answer."""
    fit = [example for example in examples if len(example.ids) <= longest and any(example.mask)]
    if not fit:
        if not examples:
            raise InputError("no example to train on: nothing in --data is of use for this method")
        shortest = min(len(example.ids) for example in examples)
        raise InputError(
            f"no example to train on: the shortest of {len(examples)} has {shortest} tokens, and"
            f" the context is {longest}: shorten them, or choose a model with a longer one"
        )
    if len(fit) < len(examples):
        print(
            f"{len(examples) - len(fit)} of {len(examples)} examples are longer than {longest}"
            " tokens and left out"
        )
    return fit


METHODS = ("direct", "reasoning", "traces", "summarizer")


def parse(arguments: list[str]):
    from recipes import FlagParser, boolean  # below this file: here only

    parser = FlagParser("sft.py", description="Supervised baselines and summariser distillation.")
    parser.add_argument("method", help=f"one of {', '.join(METHODS)}")
    parser.add_argument(
        "--model", default="", help="HF causal LM to start from: a directory or a hub name"
    )
    parser.add_argument(
        "--data",
        default="",
        help="questions; for traces predictions of eval.py, for summarizer its log",
    )
    parser.add_argument("--out", default="", help="directory to save the model in")
    parser.add_argument(
        "--protocol",
        default="",
        help="default: arena for direct and reasoning, r1_searcher for traces",
    )
    parser.add_argument(
        "--traces",
        default="",
        help="reasoning: JSONL of id, relevance, analysis, answer (else built)",
    )
    parser.add_argument(
        "--questions",
        default="",
        help="traces: the question file, where questions have options or references",
    )
    parser.add_argument(
        "--per_question",
        type=int,
        default=1,
        help="traces: at most so many of one question (default 1)",
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="updates; default: as many as --epochs needs"
    )
    parser.add_argument(
        "--epochs", type=float, default=2.0, help="passes over the examples (default 2)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=32, help="examples per update (default 32)"
    )
    parser.add_argument(
        "--lr", type=float, default=1e-5, help="learning rate; falls linearly to 0 (default 1e-5)"
    )
    parser.add_argument("--lr_warmup", type=int, default=0, help="updates of linear warm-up")
    parser.add_argument(
        "--max_context",
        type=int,
        default=0,
        help="longer examples are left out; 0 = the model's limit",
    )
    parser.add_argument(
        "--tokens_per_micro_batch", type=int, default=16384, help="padded tokens per forward pass"
    )
    parser.add_argument(
        "--gradient_checkpointing", type=boolean, nargs="?", const=True, default=False
    )
    parser.add_argument(
        "--skip_bad",
        type=boolean,
        nargs="?",
        const=True,
        default=False,
        help="leave unusable records out",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the examples")
    return check_options(parser.parse_args(arguments))


def check_options(options):
    if options.method not in METHODS:
        raise InputError(f"sft.py {options.method}: unknown; one of {', '.join(METHODS)}")
    for name in ("model", "data", "out"):
        if not getattr(options, name):
            raise InputError(f"sft.py {options.method}: --{name} is missing")
    for name, least in {
        "steps": 0,
        "batch_size": 1,
        "per_question": 1,
        "lr_warmup": 0,
        "max_context": 0,
    }.items():
        if getattr(options, name) < least:
            raise InputError(f"--{name} {getattr(options, name)}: must be at least {least}")
    for name in ("lr", "epochs", "tokens_per_micro_batch"):
        if not 0 < getattr(options, name) < math.inf:
            raise InputError(f"--{name} {getattr(options, name)}: must be a number above 0")
    if Path(options.out).exists():
        raise InputError(
            f"--out {options.out} is there already: name another directory, or remove it"
        )
    options.protocol = options.protocol or {"traces": "r1_searcher"}.get(options.method, "arena")
    return options


def distil(options) -> None:
    """Load, encode, train, save."""
    protocol = as_protocol(options.protocol)
    device = best_device()
    policy, tokenizer = load_policy(options.model, device, options.gradient_checkpointing)
    positions = getattr(policy.config, "max_position_embeddings", None) or 4096
    examples = usable(
        examples_of(options, protocol, tokenizer), min(options.max_context or positions, positions)
    )
    batch_size = min(options.batch_size, len(examples))
    steps = options.steps or math.ceil(options.epochs * len(examples) / batch_size)
    tokens = sum(sum(example.mask) for example in examples)
    print(
        f"{options.method}: {len(examples)} examples, {tokens:,} tokens to imitate, {steps} updates"
    )
    # A stream deals whatever it is given: every example once per epoch, in an order drawn from the
    # seed.
    stream = QuestionStream(examples, batch_size, seed=options.seed)
    losses = train_sft(
        policy,
        stream.take,
        steps,
        options.lr,
        options.lr_warmup,
        betas=(0.9, 0.999),
        tokens_per_micro_batch=options.tokens_per_micro_batch,
        description=options.method,
    )
    if not all(map(math.isfinite, losses)):
        raise InputError(
            f"the loss became {losses[-1]}: nothing was saved; lower --lr {options.lr:g}"
        )
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    save_policy(policy, tokenizer, options.out)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved: {options.out}")
    if options.method == "direct":  # its instruction is not the protocol's: evaluation needs it too
        Path(options.out, "prompt.txt").write_text(
            direct_protocol(protocol).instruction + "\n", encoding="utf-8"
        )
        print(f"evaluate with --protocol {protocol.name} --prompt_file {options.out}/prompt.txt")


def demo() -> None:
    """Whose words are imitated: a transcript with a search, and a reasoning trace built from its
    references.
    """
    from rewards import example

    print("a batch of two examples, tokens and mask:")
    print(
        *collate_examples([Example([5, 6, 7, 8], [0, 0, 1, 1]), Example([5, 9], [0, 1])]), sep="\n"
    )
    print("\na transcript, piece by piece (1 = imitated, 0 = read only):")
    for text, imitate in trace_pieces(example("r1_searcher")):
        print(f"  {int(imitate)}  {text!r}")


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        demo()
        return
    try:
        distil(parse(arguments))
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was saved")
        sys.exit(130)


if __name__ == "__main__":
    run_main(main)
