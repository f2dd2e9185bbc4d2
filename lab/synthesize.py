"""Multiple-choice questions of a language model, checked and sorted by difficulty (UR² C.5).

    questions of --data -> 5 examples -> 10 drafts -> each made harder -> correct? -> difficulty
          ^                                                                               |
          +---- of --out, those found hard: examples of the next round <---- JSONL <------+

    drafts       one question, 4 to 10 options A, B, ... all different, one answer letter
    made harder  more options and steps, and a name for its sub-domain (`source`); examples are
                 drawn from all sub-domains in turn
    correct?     another model, --verifier, judges question, options and answer three times; one
                 "incorrect", or a verdict that cannot be read, discards the question
    difficulty   the mean score of 20 sampled answers of a third, step by step, in the buckets of
                 curriculum.py; below 0.2 it is dropped: its answer is as likely wrong as it is hard

    python -m lab.synthesize --llm URL#model --verifier URL#other --data FILE --out FILE --count 500

The writer is greedy, the others are sampled at temperature 1 (ours). The same command goes on with
the number still missing. Left out: questions about passages.
"""

import itertools
import random
import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from curriculum import bucket
from data import Question, load_questions
from errors import InputError, run_main, setting
from formats.records import append_jsonl, finished_records
from lab import interruptible, parse_flags
from metrics import choice_letter, normalize_answer
from other_models.judge import read_verdict
from other_models.llm import Request, load_llm
from policy import best_device
from prompts import question_text

Questions = list[Question]
OPTIONS = range(4, 11)  # how many
LETTERS = ["ABCDEFGHIJ"[:n] for n in OPTIONS]
SHOTS, DRAFTS = 5, 10  # examples in a request, questions in its reply
VOTES = 3  # of the verifier: all must find the draft correct
FORM = (
    " Of 4 to 10 options exactly one may be right, the others must be plausible. Keep to the form,"
    ' from "Question:" to "Answer: LETTER"'
)
WRITE = (
    f"You write exam questions. Write {DRAFTS} new multiple-choice questions of the same field as"
    f" these, at least as hard, each about another fact or problem.{FORM}; write no more."
)
HARDEN = (
    "You edit exam questions. Make this one harder: add options, and let it take more steps to"
    f' find the right one.{FORM}; then write one more line, "Part: " and the part of its field that'
    " it belongs to, in one to three words."
)
VERIFY = (
    "You check exam questions. You get a question, its options and the answer that its author"
    " gives. It is correct if the question makes sense, the author's answer is right, and no other"
    " option is. Think step by step. End with a line that holds one word only: correct or"
    " incorrect."
)
ANSWER = (
    "Answer the multiple-choice question. Think step by step, option by option. End with this line:"
    " The correct answer is: LETTER"
)


@dataclass(frozen=True)
class SynthesizeSettings:
    """Questions written by a language model."""

    llm: str = setting("", "writes: http://host:port/v1#model, or a HF model", needed=True)
    verifier: str = setting("", "checks each question; default: --llm, but take another")
    answerer: str = setting("", "sets the difficulty; default: --llm")
    data: str = setting("", "multiple-choice questions to write after", needed=True)
    out: str = setting("", "JSONL to append to", needed=True)
    count: int = setting(100, "questions the file shall hold", least=1)
    k: int = setting(20, "answers that set the difficulty", least=1)
    max_tokens: int = setting(4096, "of a reply", least=1)
    seed: int = setting(0, "of the examples and of the order of options")
    timeout: float = setting(60.0, "seconds until a request has failed", above=0, most=86_400)
    in_8bit: ClassVar[str] = ""  # load_llm asks


# --------------------------------------------------------------------------------------- the drafts
def shown(question: Question) -> str:
    """In the form that a draft must have."""
    letter = choice_letter(question.answers[0], question.options)
    return f"Question: {question_text(question)}\nAnswer: {letter}"


def pick_examples(given: Questions, hard: Questions, seed: int, attempt: int) -> Questions:
    """Hard ones of earlier rounds, one of each sub-domain before a second of any; and at least one
    of those given: the form must not drift.
    """
    rng, parts = random.Random(f"{seed} examples {attempt}"), defaultdict(list)
    for question in rng.sample(hard, len(hard)):
        parts[question.source].append(question)
    turns = itertools.chain(*itertools.zip_longest(*parts.values()))
    chosen = list(filter(None, turns))[: SHOTS - 1]
    chosen += rng.sample(given, min(len(given), SHOTS - len(chosen)))
    return rng.sample(chosen, len(chosen))


_FORM = re.compile(
    r"Question: *(?P<question>(?:(?!Question:|Answer:).+\n)+?)(?P<options>(?:[A-Z]\. .+\n)+)"
    r"Answer: (?P<letter>[A-J])(?:\nPart: *(?P<part>.{1,40}))?"
)


def parse_draft(reply: str | None) -> Question | None:
    """The question of a reply in the exact form; else None.

    >>> parse_draft("Question: Which of these is red?\\nA. blood\\nB. ten\\nAnswer: A") is None
    True
    """
    text = re.sub(r"\s*\n\s*", "\n", (reply or "").strip())  # blank lines and indents are no fault
    if not (match := _FORM.fullmatch(text)):
        return None
    question, options, letter, part = match.groups()
    letters, texts = zip(*re.findall(r"(.)\. (.+)\n", options), strict=True)
    different = {normalize_answer(option) or option for option in texts}
    if "".join(letters) not in LETTERS or letter not in letters or len(different) < len(texts):
        return None
    question, part = question.strip().replace("\n", " "), part or "synthetic"
    return Question("", question, [letter], "choice", texts, source=part.strip(" .").lower())


def in_form(texts: list[str | None], asked: set[str], result: Counter) -> Questions:
    """The drafts that keep the form and ask something new; the rest is counted."""
    drafts = {}  # normalised question -> draft
    for text in texts:
        draft = parse_draft(text)
        key = draft and normalize_answer(draft.question)
        if draft and key not in asked | drafts.keys():
            drafts[key] = draft
        else:
            result["asked before" if draft else "another form"] += 1
    return list(drafts.values())


def drafts_in(reply: str | None) -> list[str | None]:
    """The drafts of one reply, each from its "Question:" on; without that word it is one draft."""
    parts = re.split(r"^(?=Question:)", reply or "", flags=re.MULTILINE)
    return [part for part in parts if part.startswith("Question:")][:DRAFTS] or [reply]


def reordered(draft: Question, seed: int) -> Question:
    """The draft with its options in another order: writers have favourite letters.

    Worked: right is B of (w, x, y, z); in the order (z, y, x, w) it is C.
    """
    order = random.Random(f"{seed} {draft.question}").sample(draft.options, len(draft.options))
    place = order.index(draft.options[ord(draft.answers[0]) - 65])
    return replace(draft, answers=[chr(65 + place)], options=tuple(order))


def write_drafts(llm, examples: Questions, asked: set[str], result: Counter) -> Questions:
    """Drafts after these examples, each made harder by a second request."""
    (reply,) = llm.ask([(WRITE, "\n\n".join(map(shown, examples)))])
    drafts = in_form(drafts_in(reply), asked, result)
    return in_form(llm.ask([(HARDEN, shown(draft)) for draft in drafts]), asked, result)


# --------------------------------------------------------------------------------------- the checks
def asked_often(llm, instruction: str, texts: list[str], times: int) -> list[list[str | None]]:
    """So many sampled replies to each text. Equal requests are asked once: each has a number."""
    turns = [f"{text}\n(attempt {turn + 1})" for text in texts for turn in range(times)]
    replies = llm.ask([Request(instruction, text, 1.0) for text in turns])
    return [replies[first : first + times] for first in range(0, len(replies), times)]


def check_drafts(drafts: Questions, verifier, answerer, k: int, result: Counter) -> Questions:
    """The drafts that are always found correct and are not too hard, with their level."""
    verdicts = asked_often(verifier, VERIFY, list(map(shown, drafts)), VOTES)
    correct = [d for d, its in zip(drafts, verdicts, strict=True) if all(map(read_verdict, its))]
    answers = asked_often(answerer, ANSWER, list(map(question_text, correct)), k)
    graded = []
    for draft, replies in zip(correct, answers, strict=True):
        right = sum(choice_letter(reply, draft.options) in draft.answers for reply in replies)
        graded.append(replace(draft, level=bucket(right / k)))
    kept = [draft for draft in graded if draft.level != "dropped"]
    result.update({"incorrect": len(drafts) - len(correct), "too hard": len(correct) - len(kept)})
    return kept


# ------------------------------------------------------------------------------------------ the run
def synthesize(given: Questions, llm, verifier, answerer, settings: SynthesizeSettings) -> Counter:
    """Fills --out. Counts "made", "requests" and each reason to drop a draft."""
    path, seed, result = Path(settings.out), settings.seed, Counter(made=0, requests=0)
    made, first = earlier(path, seed)
    asked = {normalize_answer(question.question) for question in [*given, *made]}
    for number in range(first, first + settings.count):  # one for each question: a run must end
        if len(made) >= settings.count:
            break
        hard = [question for question in made if question.level == "hard"]
        drafts = write_drafts(llm, pick_examples(given, hard, seed, number), asked, result)
        asked |= {normalize_answer(draft.question) for draft in drafts}  # discarded: not again
        drafts = [reordered(draft, seed) for draft in drafts]
        checked = check_drafts(drafts, verifier, answerer, settings.k, result)
        fresh = [
            replace(question, id=f"synthetic-{seed}-{number * DRAFTS + i}")
            for i, question in enumerate(checked[: settings.count - len(made)])
        ]
        append_jsonl(path, map(asdict, fresh))
        made += fresh
        result.update(made=len(fresh), requests=1)
    return result


def examples_among(given: Questions) -> Questions:
    """The multiple-choice questions with one readable answer: only they can be examples."""
    single = [q for q in given if q.task == "choice" and len(q.answers) == 1]
    usable = [q for q in single if choice_letter(q.answers[0], q.options)]
    if not usable:
        why = "new ones are written after such examples: name another file"
        raise InputError(f"--data holds no multiple-choice question with one answer: {why}")
    return usable


def earlier(path: Path, seed: int) -> tuple[Questions, int]:
    """(questions that the file holds already, the number of the first request that is new)."""
    made = load_questions(path) if finished_records(path) else []
    numbers = [re.fullmatch(r"synthetic-(-?\d+)-(\d+)", question.id) for question in made]
    if not all(numbers):
        raise InputError(f"{path} holds other questions than this file writes: name another file")
    return made, max((int(n[2]) // DRAFTS + 1 for n in numbers if int(n[1]) == seed), default=0)


def main(arguments: list[str] | None = None) -> None:
    settings, _ = parse_flags("lab.synthesize", SynthesizeSettings, arguments)
    given = examples_among(load_questions(settings.data, seed=settings.seed))
    earlier(Path(settings.out), settings.seed)  # before a model is loaded: can the file go on?
    how = {"max_tokens": settings.max_tokens, "device": best_device(), "cache": "runs/llm_cache"}
    with interruptible(f"what was made is in {settings.out}: the same command goes on"):
        llm = load_llm(settings.llm, settings, **how)
        specs = settings.verifier, settings.answerer
        others = [load_llm(spec, settings, **how) if spec else llm for spec in specs]
        result = synthesize(given, llm, *others, settings)
    made = earlier(Path(settings.out), settings.seed)[0]
    levels = Counter(question.level for question in made)
    there = f"{settings.out}: {len(made)} of {settings.count} questions"
    for what, counts in ((there, levels), ("this run", result)):
        print(f"{what}: {', '.join(f'{name} {n}' for name, n in counts.items()) or 'none'}")


if __name__ == "__main__":
    run_main(main)
