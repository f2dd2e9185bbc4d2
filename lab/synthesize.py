"""Lets a language model write multiple-choice questions; checks and grades them (UR² C.5).

    questions of --data -> 5 examples -> 10 drafts -> each made harder -> correct? -> difficulty
          ^                                                                               |
          +---- the hard ones in --out: examples of the next round <-------- JSONL <------+

    drafts       one question, 4 to 10 options A, B, ... all different, one answer letter
    made harder  more options and steps, and a name for its sub-domain (`source`); the hard examples
                 are drawn from all sub-domains in turn
    correct?     --verifier, by default the writer itself, judges question, options and answer three
                 times; one "incorrect", or a verdict that is missing or unreadable, discards the
                 question
    difficulty   --answerer, by default the writer, samples 20 answers (--k); their mean score
                 decides the bucket (curriculum.py); below 0.2 the question is dropped, since the
                 writer's answer may be wrong

    python -m lab.synthesize --llm URL#model --verifier URL#other --data FILE --out FILE --count 500

The writer decodes greedily, the others sample at temperature 1 (our choice). Repeating the command
adds the questions that are still missing. Left out: questions about passages.
"""

import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from curriculum import bucket_of_mean
from data import Question, load_questions
from errors import InputError, run_main
from formats.records import append_jsonl, finished_records
from lab import interruptible, parse_flags
from metrics import choice_letter, normalize_answer
from other_models.judge import read_verdict
from other_models.llm import Request, load_llm
from policy import best_device
from prompts import question_text
from settings import setting

Questions = list[Question]
OPTIONS = range(4, 11)  # allowed numbers of options
LETTERS = ["ABCDEFGHIJ"[:n] for n in OPTIONS]
SHOTS = 5  # examples in a request
DRAFTS = 10  # questions that a request asks for
VOTES = 3  # verdicts per draft: all must be "correct"
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
    """Write questions with a language model."""

    llm: str = setting("", "writer: http://host:port/v1#model or a HF model", needed=True)
    verifier: str = setting("", "model that checks drafts (default: --llm; another is better)")
    answerer: str = setting("", "model whose answers set the difficulty (default: --llm)")
    data: str = setting("", "file of multiple-choice questions, used as examples", needed=True)
    out: str = setting("", "JSONL file to append to", needed=True)
    count: int = setting(100, "number of questions in --out at the end", least=1)
    k: int = setting(20, "answers per question that set its difficulty", least=1)
    max_tokens: int = setting(4096, "maximum tokens of a reply", least=1)
    seed: int = setting(0, "seed of the choice of examples and the order of options")
    timeout: float = setting(
        60.0, "time limit in seconds of one try of a request to a server", above=0, most=86_400
    )
    load_in_8bit: ClassVar[bool] = False  # load_llm reads this and output_dir
    output_dir: ClassVar[str] = "runs"


# --------------------------------------------------------------------------------------- the drafts
def shown(question: Question) -> str:
    """Writes a question in the form that a draft must have."""
    letter = choice_letter(question.answers[0], question.options)
    return f"Question: {question_text(question)}\nAnswer: {letter}"


def pick_examples(given: Questions, hard: Questions, seed: int, attempt: int) -> Questions:
    """Picks up to SHOTS examples. At least one is a given question, so that the form does not
    drift. The others are hard questions of earlier rounds, one from each sub-domain before a second
    from any. If these are too few, more given questions are picked.
    """
    rng = random.Random(f"{seed} examples {attempt}")
    parts = defaultdict(list)
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
    """Returns the question in a reply, or None if it is no draft (defined at the top of this file).

    >>> parse_draft("Question: Which of these is red?\\nA. blood\\nB. ten\\nAnswer: A") is None
    True
    """
    # Blank lines and indents are allowed.
    if not (match := _FORM.fullmatch(re.sub(r"\s*\n\s*", "\n", (reply or "").strip()))):
        return None
    question, options, letter, part = match.groups()
    letters, texts = zip(*re.findall(r"(.)\. (.+)\n", options), strict=True)
    different = {normalize_answer(option) or option for option in texts}
    if "".join(letters) not in LETTERS or letter not in letters or len(different) < len(texts):
        return None
    question = question.strip().replace("\n", " ")
    part = part or "synthetic"
    return Question("", question, [letter], "choice", texts, source=part.strip(" .").lower())


def in_form(texts: list[str | None], asked: set[str]) -> Questions:
    """Returns the drafts that can be parsed and whose question is not in `asked`, each question
    once.
    """
    drafts = {}  # normalised question -> draft
    for draft in filter(None, map(parse_draft, texts)):
        key = normalize_answer(draft.question)
        if key not in asked:
            drafts.setdefault(key, draft)
    return list(drafts.values())


def drafts_in(reply: str | None) -> list[str]:
    """Splits a reply into drafts at each line that begins with "Question:". Drafts after the first
    DRAFTS are left out.
    """
    return re.findall(r"(?ms)^Question:.*?(?=^Question:|\Z)", reply or "")[:DRAFTS]


def reordered(draft: Question, seed: int) -> Question:
    """Shuffles the options of a draft, because writers prefer certain letters.

    Worked: if B is right in (w, x, y, z), then C is right in the order (z, y, x, w).
    """
    order = random.Random(f"{seed} {draft.question}").sample(draft.options, len(draft.options))
    place = order.index(draft.options[ord(draft.answers[0]) - 65])
    return replace(draft, answers=[chr(65 + place)], options=tuple(order))


def write_drafts(llm, examples: Questions, asked: set[str]) -> Questions:
    """Requests drafts like these examples, then a harder form of each; returns the harder ones."""
    (reply,) = llm.ask([(WRITE, "\n\n".join(map(shown, examples)))])
    drafts = in_form(drafts_in(reply), asked)
    return in_form(llm.ask([(HARDEN, shown(draft)) for draft in drafts]), asked)


# --------------------------------------------------------------------------------------- the checks
def asked_often(llm, instruction: str, texts: Iterable[str], times: int) -> list[list[str | None]]:
    """Samples `times` replies to each text. Requests are numbered, because equal ones would be sent
    only once.
    """
    numbered = [f"{text}\n(attempt {turn + 1})" for text in texts for turn in range(times)]
    replies = llm.ask([Request(instruction, text, 1.0) for text in numbered])
    return [replies[first : first + times] for first in range(0, len(replies), times)]


def check_drafts(drafts: Questions, verifier, answerer, k: int) -> Questions:
    """Returns drafts that are correct by every verdict and not too hard, with their `level` set."""
    verdicts = asked_often(verifier, VERIFY, map(shown, drafts), VOTES)
    good = [all(map(read_verdict, votes)) for votes in verdicts]
    correct = list(itertools.compress(drafts, good))
    answers = asked_often(answerer, ANSWER, map(question_text, correct), k)
    graded = []
    for draft, replies in zip(correct, answers, strict=True):
        right = [choice_letter(reply, draft.options) in draft.answers for reply in replies]
        graded.append(replace(draft, level=bucket_of_mean(right)))
    accepted = [draft for draft in graded if draft.level != "dropped"]
    print(f"{len(drafts)} new drafts: {len(correct)} correct, {len(accepted)} of them not too hard")
    return accepted


# ------------------------------------------------------------------------------------------ the run
def synthesize(given: Questions, models: list, settings: SynthesizeSettings) -> Questions:
    """Adds questions to the file --out until it has --count, in at most --count rounds. Returns all
    questions of the file. The first model writes, the second checks and the third answers.
    """
    writer, verifier, answerer = models
    path = Path(settings.out)
    made = earlier(path)
    asked = {normalize_answer(question.question) for question in [*given, *made]}
    first = len(made)
    # The rounds are limited, so that the loop ends even if all drafts are discarded.
    for number in range(first, first + settings.count):
        if len(made) >= settings.count:
            break
        hard = [question for question in made if question.level == "hard"]
        examples = pick_examples(given, hard, settings.seed, number)
        drafts = [reordered(q, settings.seed) for q in write_drafts(writer, examples, asked)]
        # All are added, even those that the checks discard, so that no later round accepts one.
        asked |= {normalize_answer(draft.question) for draft in drafts}
        accepted = check_drafts(drafts, verifier, answerer, settings.k)
        fresh = [replace(q, id=f"synthetic-{i}") for i, q in enumerate(accepted, len(made))]
        fresh = fresh[: settings.count - len(made)]
        append_jsonl(path, map(asdict, fresh))
        made += fresh
    return made


def examples_among(given: Questions) -> Questions:
    """Returns the questions that can be examples: multiple-choice questions with exactly one
    answer, which names an option. Raises an InputError if there are none.
    """
    single = (q for q in given if q.task == "choice" and len(q.answers) == 1)
    if usable := [q for q in single if choice_letter(q.answers[0], q.options)]:
        return usable
    raise InputError(
        "--data holds no multiple-choice question whose one answer names an option, so the writer"
        " would get no example: name another file"
    )


def earlier(path: Path) -> Questions:
    """Returns the questions that earlier runs wrote to the file. Raises an InputError if the file
    holds other questions.
    """
    made = load_questions(path) if finished_records(path) else []
    if not all(question.id.startswith("synthetic-") for question in made):
        raise InputError(f"{path} holds questions from elsewhere: name another file")
    return made


def main(arguments: list[str] | None = None) -> None:
    settings, _ = parse_flags("lab.synthesize", SynthesizeSettings, arguments)
    given = examples_among(load_questions(settings.data, seed=settings.seed))
    earlier(Path(settings.out))  # checks the file before a model is loaded
    device = best_device()
    names = [settings.llm, settings.verifier or settings.llm, settings.answerer or settings.llm]
    with interruptible(f"finished questions are in {settings.out}: repeat the command to continue"):
        loaded = {
            name: load_llm(name, settings, max_tokens=settings.max_tokens, device=device)
            for name in {*names}
        }
        made = synthesize(given, [loaded[name] for name in names], settings)
    levels = dict(Counter(question.level for question in made))
    print(f"{settings.out}: {len(made)} of {settings.count} questions: {levels}")


if __name__ == "__main__":
    run_main(main)
