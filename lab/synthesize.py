"""Multiple-choice questions written by a language model, checked and sorted by difficulty (UR²
appendix C.5).

    questions of --data -> few-shot prompt -> a draft -> strict format? -> votes? -> difficulty
          ^                                                                              |
          +----- of --out, those found hard: examples of the next round <---- JSONL -----+

    format       one question, options A, B, ... each once and all different, one answer letter
    votes        the writer answers its own draft, three times, and must mean the option it named
    difficulty   the mean score of K answers of another model (or the same), in the buckets of
                 curriculum.py; below 0.2 it is dropped: its answer is as likely wrong as it is hard

    python -m lab.synthesize --llm http://host:port/v1#model --data FILE --out FILE --count 500

A model here is greedy: the same request has the same reply. So the order of the options differs
from vote to vote, with the right one at another letter each time: a model that likes the letter B
agrees with itself, and not with the draft. They are stored in an order drawn by lot too. The same
command goes on with the number still missing; what was dropped is counted by its reason.
Left out: checking facts against a corpus; drafts that mean the same in other words.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm import tqdm

from curriculum import bucket
from data import Question, load_questions
from errors import InputError, run_main, setting
from formats.records import append_jsonl, finished_records
from lab import interruptible, parse_flags
from metrics import choice_letter, normalize_answer
from other_models.llm import load_llm
from policy import best_device
from prompts import question_text

QUESTION_WORDS, OPTION_WORDS, OPTIONS = range(4, 201), range(1, 41), range(3, 11)  # how many
WRITE = (
    "You write exam questions. You are shown some multiple-choice questions with their answers."
    " Write one new question of the same field and form, at least as hard as these, about another"
    " fact or problem. Exactly one option may be right, and the others must be plausible. Use the"
    ' form of the examples to the letter: a line "Question: ...", each option on a line of its own,'
    ' a last line "Answer: LETTER". Write nothing else.'
)
ANSWER = (
    "Answer the multiple-choice question. Reply with one line and nothing else: The correct answer"
    " is: LETTER"
)


@dataclass(frozen=True)
class SynthesizeSettings:
    """Questions written by a language model."""

    llm: str = setting("", "writes, votes: http://host:port/v1#model, or a HF model", needed=True)
    answerer: str = setting("", "sets the difficulty; by itself --llm")
    data: str = setting("", "multiple-choice questions to write after", needed=True)
    out: str = setting("", "JSONL to append to", needed=True)
    count: int = setting(100, "questions the file shall hold", least=1)
    shots: int = setting(3, "examples per request", least=1)
    options: int = setting(0, "per question; 0 = 3 to 10, as the writer likes", least=0)
    votes: int = setting(3, "of the writer on its own question", least=1)
    agree: str = setting("all", "votes that must be right", one_of=("all", "majority"))
    k: int = setting(10, "answers that set the difficulty", least=1)
    max_attempts: int = setting(0, "drafts asked for at most; 0 = 10 for each question", least=0)
    max_tokens: int = setting(512, "of a reply", least=1)
    seed: int = setting(0, "of the examples and the orders")
    skip_bad: bool = setting(False, "leave malformed records of --data out")
    timeout: float = setting(60.0, "seconds until a request has failed", above=0)
    in_8bit: str = setting("", "others: a HF model's weights in 8 bits")


class Rejected(ValueError):
    """Why a draft is not used; the message is the name under which it is counted."""


@dataclass(frozen=True)
class Draft:
    """A question as the writer gave it; `right` is the place of the right option, from 0."""

    question: str
    options: tuple[str, ...]
    right: int


# ------------------------------------------------------------------------------------------ writing


def write_request(examples: list[Question]) -> tuple[str, str]:
    """(instruction, text): examples, one under the other, in the form that a draft must have."""
    letters = [choice_letter(q.answers[0], q.options) for q in examples]
    pairs = zip(examples, letters, strict=True)
    shown = [f"Question: {question_text(q)}\nAnswer: {letter}" for q, letter in pairs]
    return WRITE, "\n\n".join(shown)


def pick_examples(
    given: list[Question], hard: list[Question], settings: SynthesizeSettings, attempt: int
) -> list[Question]:
    """Hard questions of earlier rounds first, but always one of those given: the field and the form
    must not drift away.
    """
    rng, shots = random.Random(f"{settings.seed} examples {attempt}"), settings.shots
    chosen = rng.sample(hard, min(len(hard), shots - 1))
    chosen += rng.sample(given, min(len(given), shots - len(chosen)))
    return rng.sample(chosen, len(chosen))


_FORM = re.compile(
    r"Question:\s*(?P<question>.+?)\n(?P<options>(?:[A-Z]\. [^\n]+\n)+)Answer: (?P<letter>[A-Z])",
    re.DOTALL,
)


def parse_draft(reply: str | None, options: int = 0) -> Draft:
    """The draft of a reply in the exact form, or Rejected. options: how many; 0 = 3 to 10.

    >>> parse_draft("Question: Which of these is a colour?\\nA. red\\nB. ten\\nC. dog\\nAnswer: A")
    Draft(question='Which of these is a colour?', options=('red', 'ten', 'dog'), right=0)
    """
    if not reply or not reply.strip():
        raise Rejected("no reply")
    text = re.sub(r"\s*\n\s*", "\n", reply.strip())  # blank lines and indents are no fault
    for label in ("Question:", "Answer:"):
        if len(re.findall(f"^{label}", text, re.MULTILINE)) != 1:
            raise Rejected("not one question and one answer")
    match = _FORM.fullmatch(text)
    if not match:
        raise Rejected("another form")
    lines = match["options"].splitlines()
    letters, texts = "".join(line[0] for line in lines), tuple(line[3:].strip() for line in lines)
    if not "ABCDEFGHIJ".startswith(letters) or len(letters) not in (
        [options] if options else OPTIONS
    ):
        raise Rejected("option letters")
    if match["letter"] not in letters:
        raise Rejected("answer letter")
    if len({normalize_answer(option) or option for option in texts}) < len(texts):
        raise Rejected("options alike")
    question = match["question"].replace("\n", " ")
    long_or_short = len(question.split()) not in QUESTION_WORDS
    if long_or_short or any(len(option.split()) not in OPTION_WORDS for option in texts):
        raise Rejected("length")
    return Draft(question, texts, letters.index(match["letter"]))


# ---------------------------------------------------------------------------------------- answering


def reordered(draft: Draft, turn: int, seed: int) -> Question:
    """The draft with its options in the order of this turn; the right one moves on by a letter.

    Worked: 4 options, begun at B: the right one is B, C, D, A, B, ... in turns 0, 1, 2, 3, 4.
    """
    first = random.Random(f"{seed} {draft.question}").randrange(len(draft.options))
    place = (first + turn) % len(draft.options)
    others = [option for i, option in enumerate(draft.options) if i != draft.right]
    order = random.Random(f"{seed} {draft.question} {turn}").sample(others, len(others))
    options = (*order[:place], draft.options[draft.right], *order[place:])
    return Question("", draft.question, [chr(65 + place)], "choice", options)


def grade_drafts(
    llm, drafts: list[Draft], turns: range, seed: int, result: Counter
) -> list[list[bool]]:
    """For each draft and each turn: did the model mean the right option? A reply that names no
    option is wrong too, and is counted as unreadable.
    """
    questions = [reordered(draft, turn, seed) for draft in drafts for turn in turns]
    requests = [(ANSWER, question_text(question)) for question in questions]
    right = []
    for reply, question in zip(llm.ask(requests) if requests else [], questions, strict=True):
        letter = choice_letter(reply, question.options)
        result["unreadable"] += letter is None
        right.append(letter == question.answers[0])
    return [right[i : i + len(turns)] for i in range(0, len(right), len(turns))]


def agreed(votes: list[bool], agree: str) -> bool:
    return all(votes) if agree == "all" else 2 * sum(votes) > len(votes)


# --------------------------------------------------------------------------------------- the rounds


def synthesize(
    given: list[Question], llm, settings: SynthesizeSettings, answerer=None, at_once: int = 8
) -> Counter:
    """Questions are appended to --out until it holds --count, or --max_attempts drafts were asked
    for. The counts: "made", "attempts", each reason to drop one, and "unreadable" answers.
    """
    path, result = Path(settings.out), Counter(made=0, attempts=0, unreadable=0)
    given, (made, first) = examples_among(given), earlier(path, settings.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {normalize_answer(question.question) for question in [*given, *made]}
    last = first + (settings.max_attempts or 10 * settings.count)
    with tqdm(total=settings.count, initial=min(len(made), settings.count), desc="made") as bar:
        for start in range(first, last, at_once):
            if len(made) >= settings.count:
                break
            hard = [question for question in made if question.level == "hard"]
            attempts = range(start, min(start + at_once, last))
            shown = [pick_examples(given, hard, settings, attempt) for attempt in attempts]
            replies = llm.ask([write_request(examples) for examples in shown])
            drafts = read_drafts(dict(zip(attempts, replies, strict=True)), texts, result, settings)
            fresh = check_drafts(drafts, llm, answerer or llm, result, settings)
            fresh = fresh[: settings.count - len(made)]
            if fresh:
                append_jsonl(path, [asdict(question) for question in fresh])
            made += fresh
            result["made"] += len(fresh)
            bar.update(len(fresh))
    return result


def read_drafts(
    replies: dict[int, str | None], texts: set[str], result: Counter, settings: SynthesizeSettings
) -> dict[int, Draft]:
    """attempt -> draft, of those in the exact form that ask something new."""
    drafts = {}
    for attempt, reply in replies.items():
        result["attempts"] += 1
        try:
            draft = parse_draft(reply, settings.options)
            if normalize_answer(draft.question) in texts:
                raise Rejected("asked before")
        except Rejected as reason:
            result[str(reason)] += 1
        else:
            drafts[attempt] = draft
            texts.add(normalize_answer(draft.question))  # what fails the votes would fail again
    return drafts


def check_drafts(
    drafts: dict[int, Draft], llm, answerer, result: Counter, settings: SynthesizeSettings
) -> list[Question]:
    """The drafts that pass the votes and are not too hard, as questions with their level."""
    votes, k, seed = settings.votes, settings.k, settings.seed
    ballots = grade_drafts(llm, list(drafts.values()), range(votes), seed, result)
    passed = [agreed(ballot, settings.agree) for ballot in ballots]
    elected = [draft for draft, good in zip(drafts.items(), passed, strict=True) if good]
    result["votes"] += passed.count(False)
    # Other orders than the votes': of a writer that answers too, these would be the same requests.
    asked, turns = [draft for _, draft in elected], range(votes, votes + k)
    answers, questions = grade_drafts(answerer, asked, turns, seed, result), []
    for (attempt, draft), right in zip(elected, answers, strict=True):
        level = bucket(sum(right) / k)
        if level == "dropped":
            result["too hard"] += 1
            continue
        name, about = f"synthetic-{seed}-{attempt}", {"source": "synthetic", "level": level}
        questions.append(replace(reordered(draft, 0, seed), id=name, **about))
    return questions


def examples_among(given: list[Question]) -> list[Question]:
    """The multiple-choice questions with one readable answer: only they can be examples."""
    single = [q for q in given if q.task == "choice" and len(q.answers) == 1]
    usable = [q for q in single if choice_letter(q.answers[0], q.options)]
    if not usable:
        raise InputError(
            "--data holds no multiple-choice question with one answer: new ones are written after"
            " such examples"
        )
    return usable


def earlier(path: Path, seed: int) -> tuple[list[Question], int]:
    """(questions that the file holds already, the number of the first attempt that is new)."""
    made = load_questions(path) if finished_records(path) else []
    numbers = [re.fullmatch(r"synthetic-(-?\d+)-(\d+)", question.id) for question in made]
    if not all(numbers):
        raise InputError(f"{path} holds other questions than this file writes: name another file")
    return made, max((int(n[2]) + 1 for n in numbers if int(n[1]) == seed), default=0)


def report(result: Counter, settings: SynthesizeSettings) -> str:
    """How many there are, how hard they are, and why the others are not."""
    held, _ = earlier(Path(settings.out), settings.seed)
    levels, no_reason = Counter(q.level for q in held), ("made", "attempts", "unreadable")
    dropped = [f"{name} {n}" for name, n in result.most_common() if n and name not in no_reason]
    sizes = ", ".join(f"{level} {levels[level]}" for level in ("hard", "medium", "easy"))
    run = f"this run made {result['made']} in {result['attempts']} attempts"
    return (
        f"{len(held)} of {settings.count} questions; {run}\n"
        f"dropped: {', '.join(dropped) or 'none'}\n"
        f"answers that named no option and count as wrong: {result['unreadable']}\n"
        f"{settings.out}: {sizes}"
    )


# --------------------------------------------------------------------------------- the command line


def main(arguments: list[str] | None = None) -> None:
    settings, _ = parse_flags("lab.synthesize", SynthesizeSettings, arguments)
    if settings.options and settings.options not in OPTIONS:
        raise InputError(f"--options {settings.options}: must be from 3 to 10, or 0")
    given = examples_among(load_questions(settings.data, settings.skip_bad))
    # Before a model is loaded: is it a file to go on with?
    made, _ = earlier(Path(settings.out), settings.seed)
    result, how = Counter(), {"max_tokens": settings.max_tokens, "device": best_device()}
    with interruptible(f"what was made is in {settings.out}: the same command goes on"):
        if len(made) < settings.count:
            llm = load_llm(settings.llm, settings, **how)
            other = load_llm(settings.answerer, settings, **how) if settings.answerer else None
            result = synthesize(given, llm, settings, other)
    print(report(result, settings))


if __name__ == "__main__":
    run_main(main)
