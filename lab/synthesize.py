"""Multiple-choice questions written by a language model, checked and sorted by difficulty (UR²
appendix C.5).

    given questions -> few-shot prompt -> a draft -> strict format? -> three votes? -> difficulty ->
    our own JSONL
          ^                                                                              |
          +------------------- questions found hard are examples of the next round <-----+

format       one question, options A, B, ... each once and all different, one answer letter, lengths
             within bounds
votes        the writer answers its own draft, three times, and must mean the option it named
difficulty   the mean score of K answers of another model (or the same): easy, medium, hard as in
             curriculum.py; a draft that scores below 0.2 is dropped, as its answer is as likely
             wrong as it is hard

A model here is greedy, so the same request has the same reply. What differs from vote to vote is
the order of the options, with the right one at another letter each time: a model that likes the
letter B agrees with itself, and not with the draft. For the same reason the options are stored in
an order drawn by lot and not as the writer had them. The file is appended to, question by question;
the same command goes on with the number still missing. Attempts are bounded, and what was dropped
is counted by its reason. Left out: checking facts against a corpus; drafts that mean the same in
other words.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from curriculum import bucket
from data import Question, load_questions
from errors import InputError, run_main
from formats.records import append_jsonl, finished_records
from metrics import choice_letter, normalize_answer
from other_models.llm import load_llm
from prompts import question_text

QUESTION_WORDS, OPTION_WORDS, OPTIONS = (4, 200), (1, 40), (3, 10)  # at least and at most
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


class Rejected(ValueError):
    """Why a draft is not used; the message is the name under which it is counted."""


@dataclass(frozen=True)
class Settings:
    """How drafts are asked for and checked. options: how many a draft must have, 0 = 3 to 10;
    agree: "all" or "majority".
    """

    shots: int = 3
    options: int = 0
    votes: int = 3
    agree: str = "all"
    k: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Draft:
    """A question as the writer gave it; `right` is the place of the right option, from 0."""

    question: str
    options: tuple[str, ...]
    right: int


# ------------------------------------------------------------------------------------------ writing


def write_request(examples: Sequence[Question]) -> tuple[str, str]:
    """(instruction, text): the examples, one under the other, in the form that a draft must
    have.
    """
    shown = [
        f"Question: {question_text(question)}\nAnswer: {gold_letter(question)}"
        for question in examples
    ]
    return WRITE, "\n\n".join(shown)


def gold_letter(question: Question) -> str:
    return choice_letter(question.answers[0], question.options) or question.answers[0]


def pick_examples(
    given: list[Question], hard: list[Question], shots: int, seed: int, attempt: int
) -> list[Question]:
    """Hard questions of earlier rounds first, but always one of those given: the field and the form
    must not drift away.
    """
    rng = random.Random(f"{seed} examples {attempt}")
    chosen = rng.sample(hard, min(len(hard), shots - 1))
    chosen += rng.sample(given, min(len(given), shots - len(chosen)))
    return rng.sample(chosen, len(chosen))


_FORM = re.compile(
    r"Question:\s*(?P<question>.+?)\n(?P<options>(?:[A-Z]\. [^\n]+\n)+)Answer: (?P<letter>[A-Z])",
    re.DOTALL,
)


def parse_draft(reply: str | None, options: int = 0) -> Draft:
    """The draft of a reply in the exact form, or Rejected. options: how many there must be; 0 = 3
    to 10.

    >>> parse_draft("Question: Which of these is a colour?\\nA. red\\nB. ten\\nC. dog\\nAnswer: A")
    Draft(question='Which of these is a colour?', options=('red', 'ten', 'dog'), right=0)
    """
    if not reply or not reply.strip():
        raise Rejected("no reply")
    text = re.sub(r"\s*\n\s*", "\n", reply.strip())  # blank lines and indents are no fault
    if (
        len(re.findall(r"^Answer:", text, re.MULTILINE)) != 1
        or len(re.findall(r"^Question:", text, re.MULTILINE)) != 1
    ):
        raise Rejected("not one question and one answer")
    match = _FORM.fullmatch(text)
    if not match:
        raise Rejected("another form")
    lines = match["options"].splitlines()
    letters, texts = [line[0] for line in lines], tuple(line[3:].strip() for line in lines)
    least, most = (options, options) if options else OPTIONS
    if letters != [chr(65 + i) for i in range(len(letters))] or not least <= len(letters) <= most:
        raise Rejected("option letters")
    if match["letter"] not in letters:
        raise Rejected("answer letter")
    if len({normalize_answer(option) or option for option in texts}) < len(texts):
        raise Rejected("options alike")
    question = " ".join(match["question"].split("\n"))
    if not _within(question, QUESTION_WORDS) or not all(
        _within(option, OPTION_WORDS) for option in texts
    ):
        raise Rejected("length")
    return Draft(question, texts, letters.index(match["letter"]))


def _within(text: str, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= len(text.split()) <= bounds[1]


# ---------------------------------------------------------------------------------------- answering


def reordered(draft: Draft, turn: int, seed: int) -> Question:
    """The draft with its options in the order of this turn. The right one moves on by a letter from
    turn to turn.

    Worked: 4 options, begun at B: the right one is B, C, D, A, B, ... in turns 0, 1, 2, 3, 4.
    """
    place = (random.Random(f"{seed} {draft.question}").randrange(len(draft.options)) + turn) % len(
        draft.options
    )
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
    replies = (
        llm.ask([(ANSWER, question_text(question)) for question in questions]) if questions else []
    )
    letters = [choice_letter(reply, q.options) for reply, q in zip(replies, questions, strict=True)]
    result["unreadable"] += letters.count(None)
    right = [
        letter == question.answers[0] for letter, question in zip(letters, questions, strict=True)
    ]
    return [right[i : i + len(turns)] for i in range(0, len(right), len(turns))]


def agreed(votes: list[bool], agree: str) -> bool:
    return all(votes) if agree == "all" else 2 * sum(votes) > len(votes)


# --------------------------------------------------------------------------------------- the rounds


def synthesize(
    given: list[Question],
    llm,
    count: int,
    path: str | Path,
    settings: Settings = Settings(),
    answerer=None,
    max_attempts: int = 0,
    at_once: int = 8,
    quiet: bool = False,
) -> Counter:
    """Questions are appended to `path` until it holds `count`, or `max_attempts` (0: 10 · count)
    drafts were asked for.

    llm writes and votes, `answerer` (default: llm) sets the difficulty. Returns how many were
    "made", asked for in "attempts", dropped under each reason, and how many answers were
    "unreadable".
    """
    given, path = examples_among(given), Path(path)
    made, first = earlier(path, settings.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {normalize_answer(question.question) for question in [*given, *made]}
    result = Counter(made=0, attempts=0, unreadable=0)
    last = first + (max_attempts or 10 * count)
    with tqdm(
        total=count,
        initial=min(len(made), count),
        desc="questions",
        dynamic_ncols=True,
        disable=quiet,
    ) as bar:
        for start in range(first, last, at_once):
            if len(made) >= count:
                break
            attempts = range(start, min(start + at_once, last))
            hard = [question for question in made if question.level == "hard"]
            requests = [
                write_request(pick_examples(given, hard, settings.shots, settings.seed, a))
                for a in attempts
            ]
            drafts = read_drafts(
                dict(zip(attempts, llm.ask(requests), strict=True)), texts, result, settings.options
            )
            fresh = check_drafts(drafts, llm, answerer or llm, result, settings)
            for question in fresh[: count - len(made)]:
                append_jsonl(path, [asdict(question)])
                made.append(question)
                result["made"] += 1
                bar.update()
    return result


def read_drafts(
    replies: dict[int, str | None], texts: set[str], result: Counter, options: int
) -> dict[int, Draft]:
    """attempt -> draft, of those in the exact form that ask something new; the others are
    counted.
    """
    drafts = {}
    for attempt, reply in replies.items():
        result["attempts"] += 1
        try:
            draft = parse_draft(reply, options)
            if normalize_answer(draft.question) in texts:
                raise Rejected("asked before")
        except Rejected as reason:
            result[str(reason)] += 1
        else:
            drafts[attempt] = draft
            texts.add(
                normalize_answer(draft.question)
            )  # a draft that fails the votes would fail them again
    return drafts


def check_drafts(
    drafts: dict[int, Draft], llm, answerer, result: Counter, settings: Settings
) -> list[Question]:
    """The drafts that pass the votes and are not too hard, as questions with their level. All of
    them in two batches.
    """
    votes, seed = settings.votes, settings.seed
    ballots = grade_drafts(llm, list(drafts.values()), range(votes), seed, result)
    elected = {
        a: draft
        for (a, draft), ballot in zip(drafts.items(), ballots, strict=True)
        if agreed(ballot, settings.agree)
    }
    result["votes"] += len(drafts) - len(elected)
    # other orders than the votes': where the answerer is the writer, these would be the same
    # requests
    answers = grade_drafts(
        answerer, list(elected.values()), range(votes, votes + settings.k), seed, result
    )
    questions = []
    for (attempt, draft), right in zip(elected.items(), answers, strict=True):
        level, shown = bucket(sum(right) / settings.k), reordered(draft, 0, seed)
        if level == "dropped":
            result["too hard"] += 1
            continue
        questions.append(
            Question(
                f"synthetic-{seed}-{attempt}",
                shown.question,
                shown.answers,
                "choice",
                shown.options,
                source="synthetic",
                level=level,
            )
        )
    return questions


def examples_among(given: list[Question]) -> list[Question]:
    """The multiple-choice questions with one readable answer: only they can be examples."""
    usable = [
        q
        for q in given
        if q.task == "choice" and len(q.answers) == 1 and choice_letter(q.answers[0], q.options)
    ]
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


def report(result: Counter, count: int, held: int) -> str:
    """How many there are, and why the others are not."""
    no_reason = ("made", "attempts", "unreadable")
    dropped = [
        f"{reason} {number}"
        for reason, number in result.most_common()
        if reason not in no_reason and number
    ]
    lines = [
        (
            f"{held} of {count} questions; this run made {result['made']} in {result['attempts']}"
            " attempts"
        ),
        "dropped: " + (", ".join(dropped) or "none"),
    ]
    unreadable = (
        [f"{result['unreadable']} answers named no option and count as wrong"]
        if result["unreadable"]
        else []
    )
    return "\n".join([*lines, *unreadable])


# --------------------------------------------------------------------------------- the command line

MODELS = ["llm_timeout", "llm_retries", "llm_cache", "load_in_8bit"]


def parse(arguments: list[str]):
    from recipes import FlagParser, Recipe, add_flags  # below this file in the house: here only

    parser = FlagParser(
        "synthesize.py", description="Multiple-choice questions written by a model."
    )
    parser.add_argument(
        "--llm", default="", help="writes and votes: http://host:port/v1#model, or a HF model"
    )
    parser.add_argument("--answerer", default="", help="sets the difficulty; default: --llm")
    parser.add_argument("--data", default="", help="multiple-choice questions to write after")
    parser.add_argument(
        "--out", default="", help="JSONL to append to; the same command goes on with it"
    )
    parser.add_argument(
        "--count", type=int, default=100, help="questions the file shall hold (default 100)"
    )
    parser.add_argument("--shots", type=int, default=3, help="examples per request (default 3)")
    parser.add_argument(
        "--options", type=int, default=0, help="per question; 0 = 3 to 10, as the writer likes"
    )
    parser.add_argument(
        "--votes", type=int, default=3, help="of the writer on its own question (default 3)"
    )
    parser.add_argument(
        "--agree", default="all", help="all votes must be right, or the majority (default all)"
    )
    parser.add_argument(
        "--k", type=int, default=10, help="answers that set the difficulty (default 10)"
    )
    parser.add_argument(
        "--max_attempts",
        type=int,
        default=0,
        help="drafts asked for at most; 0 = 10 for each question",
    )
    parser.add_argument("--max_tokens", type=int, default=512, help="of a reply (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="of the examples and the orders")
    parser.add_argument(
        "--skip_bad", action="store_true", help="leave malformed records of --data out"
    )
    add_flags(parser, MODELS)
    options = parser.parse_args(arguments)
    for name in MODELS:
        setattr(options, name, getattr(options, name, getattr(Recipe(), name)))
    return check_options(options)


def check_options(options):
    for name in ("llm", "data", "out"):
        if not getattr(options, name):
            raise InputError(f"synthesize.py: --{name} is missing")
    for name, least in {
        "count": 1,
        "shots": 1,
        "votes": 1,
        "k": 1,
        "max_attempts": 0,
        "max_tokens": 1,
    }.items():
        if getattr(options, name) < least:
            raise InputError(f"--{name} {getattr(options, name)}: must be at least {least}")
    if options.options and not OPTIONS[0] <= options.options <= OPTIONS[1]:
        raise InputError(
            f"--options {options.options}: must be from {OPTIONS[0]} to {OPTIONS[1]}, or 0"
        )
    if options.agree not in ("all", "majority"):
        raise InputError(f"--agree {options.agree}: unknown; all or majority")
    return options


def load_models(options) -> tuple:
    from policy import best_device

    device = best_device()
    settings = {
        "cache": options.llm_cache,
        "timeout": options.llm_timeout,
        "retries": options.llm_retries,
        "max_tokens": options.max_tokens,
        "load_in_8bit": options.load_in_8bit,
        "device": device,
    }
    writer = load_llm(options.llm, **settings)
    return writer, load_llm(options.answerer, **settings) if options.answerer else writer


class ScriptedWriter:
    """Stands in for a model on this screen: it writes these drafts in turn, and knows the capitals
    but one.
    """

    drafts = (
        "Question: What is the capital of Norland?\nA. Kelmouth\nB. Oldham\nC. Barrow\nAnswer: A",
        # two options alike
        "Question: What is the capital of Sudria?\nA. Brix\nB. Brix\nC. Tarn\nAnswer: C",
        # it votes for Dell itself
        "Question: What is the capital of Estria?\nA. Vale\nB. Morn\nC. Dell\nAnswer: B",
        "Here is a question: what is the capital of Westria?",
    )

    def __init__(self):
        self.written = 0

    def ask(self, requests: list[tuple[str, str]]) -> list[str | None]:
        return [
            self.write() if instruction == WRITE else self.vote(text)
            for instruction, text in requests
        ]

    def write(self) -> str:
        self.written += 1
        return self.drafts[(self.written - 1) % len(self.drafts)]

    def vote(self, text: str) -> str:
        right = "Kelmouth" if "Norland" in text else "Dell"
        return (
            "The correct answer is:"
            f" {next((line[0] for line in text.splitlines() if line.endswith(right)), '?')}"
        )


def demo() -> None:
    import tempfile

    given = [
        Question("1", "What is the capital of Kaldor?", ["B"], "choice", ("Ros", "Fell", "Hart"))
    ]
    print(f"asked for:\n{write_request(given)[1]}\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made.jsonl")
        result = synthesize(
            given, ScriptedWriter(), 4, path, Settings(k=4), max_attempts=4, quiet=True
        )
        for draft in ScriptedWriter.drafts:
            print("draft:  " + " | ".join(draft.splitlines()))
        for question in load_questions(path):
            print(
                f"kept:   {question.question} {question.options} {question.answers[0]},"
                f" {question.level}"
            )
        print(report(result, 4, result["made"]))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        demo()
        return
    options = parse(arguments)
    given = examples_among(load_questions(options.data, options.skip_bad))
    made, _ = earlier(
        Path(options.out), options.seed
    )  # before a model is loaded: is it a file to go on with?
    result = Counter()
    try:
        if len(made) < options.count:
            writer, answerer = load_models(options)
            settings = Settings(
                options.shots,
                options.options,
                options.votes,
                options.agree,
                options.k,
                options.seed,
            )
            result = synthesize(
                given, writer, options.count, options.out, settings, answerer, options.max_attempts
            )
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was made is in {options.out}: the same command goes on")
        sys.exit(130)
    held = earlier(Path(options.out), options.seed)[0]
    print(report(result, options.count, len(held)))
    levels = Counter(question.level for question in held)
    print(
        f"{options.out}: "
        + (", ".join(f"{level} {levels[level]}" for level in ("hard", "medium", "easy")) or "empty")
    )


if __name__ == "__main__":
    run_main(main)
