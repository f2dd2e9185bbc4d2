"""Multiple-choice questions of a language model, checked and sorted by difficulty (UR² C.5); or
open ones on the passages of a corpus, whose answer stands in its passage alone.

    questions of --data -> 5 examples -> 10 drafts -> each made harder -> votes? -> difficulty
          ^                                                                             |
          +---- of --out, those found hard: examples of the next round <---- JSONL <----+

    drafts       one question, 4 to 10 options A, B, ... all different, one answer letter
    made harder  more options and steps, and a name for its sub-domain (`source`); examples are
                 drawn from all sub-domains in turn
    votes        another model, --verifier, answers three times, and always as the writer said
    difficulty   the mean score of 20 answers of a third, in the buckets of curriculum.py; below
                 0.2 it is dropped: its answer is as likely wrong as it is hard

    python -m lab.synthesize --llm URL#model --verifier URL#other --data FILE --out FILE --count 500
    python -m lab.synthesize --llm URL#model --corpus FOLDER --out FILE --count 500

Models are greedy here: each vote has the options in another order, or all three would be one. The
same command goes on with the number still missing. Left out: questions on several passages.
"""

import random
import re
from collections import Counter
from collections.abc import Container
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from tqdm import tqdm

from curriculum import bucket
from data import Document, Question, load_corpus, load_questions
from errors import InputError, run_main, setting
from formats.records import append_jsonl, finished_records
from lab import interruptible, parse_flags
from metrics import choice_letter, exact_match, normalize_answer
from other_models.llm import load_llm
from other_models.reader import reader_answers
from policy import best_device
from prompts import question_text

Questions = list[Question]
QUESTION_WORDS, OPTION_WORDS, OPTIONS = range(4, 201), range(1, 41), range(4, 11)  # how many
SHOTS, DRAFTS = 5, 10  # examples in a request, questions in its reply
VOTES = 3  # all must agree with the draft
AT_ONCE = 4  # requests of a round; a run has one for each question: it must end
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
ANSWER = "Answer the question. Reply with this one line only: The correct answer is: LETTER"

ABOUT = (
    "You write questions for a quiz. Write one on the passage below. Name whom or what it is about:"
    ' who is asked does not see the passage. Keep to two lines: "Question: ..." and "Answer: " with'
    " a few words as they stand in the passage."
)


@dataclass(frozen=True)
class SynthesizeSettings:
    """Questions written by a language model."""

    llm: str = setting("", "writes: http://host:port/v1#model, or a HF model", needed=True)
    verifier: str = setting(
        "", "votes, or reads the passage; by itself --llm, though it should be another"
    )
    answerer: str = setting("", "sets the difficulty; by itself --llm")
    data: str = setting("", "multiple-choice questions to write after")
    corpus: str = setting("", "in place of --data: passages to ask about, a file or a folder")
    out: str = setting("", "JSONL to append to", needed=True)
    count: int = setting(100, "questions the file shall hold", least=1)
    k: int = setting(20, "answers that set the difficulty", least=1)
    max_tokens: int = setting(4096, "of a reply", least=1)
    seed: int = setting(0, "of the examples and the orders")
    timeout: float = setting(60.0, "seconds until a request has failed", above=0, most=86_400)
    in_8bit: ClassVar[str] = ""  # load_llm asks


def shown(question: Question) -> str:
    """In the form that a draft must have."""
    letter = choice_letter(question.answers[0], question.options)
    return f"Question: {question_text(question)}\nAnswer: {letter}"


def pick_examples(given: Questions, hard: Questions, seed: int, attempt: int) -> Questions:
    """Hard ones of earlier rounds, one of each sub-domain before a second of any; and at least one
    of those given: the form must not drift.
    """
    rng = random.Random(f"{seed} examples {attempt}")
    order, turn, seen = rng.sample(hard, len(hard)), {}, Counter()
    for question in order:
        turn[question.id] = seen[question.source]
        seen[question.source] += 1
    chosen = sorted(order, key=lambda question: turn[question.id])[: SHOTS - 1]
    chosen += rng.sample(given, min(len(given), SHOTS - len(chosen)))
    return rng.sample(chosen, len(chosen))


_FORM = re.compile(
    r"Question:\s*(?P<question>.+?)\n(?P<options>(?:[A-Z]\. [^\n]+\n)+)Answer: (?P<letter>[A-Z])"
    r"(?:\nPart: *(?P<part>[^\n]{1,40}))?",
    re.DOTALL,
)


def parse_draft(reply: str | None, asked: Container = ()) -> Question | str:
    """The question of a reply in the exact form, or why it is dropped. `asked`: normalised texts.

    >>> parse_draft("Question: Which of these is red?\\nA. blood\\nB. ten\\nAnswer: A")
    'option letters'
    """
    text = re.sub(r"\s*\n\s*", "\n", (reply or "").strip())  # blank lines and indents are no fault
    if not text:
        return "no reply"
    match = _FORM.fullmatch(text)
    if not match or len(re.findall("^(?:Question|Answer):", text, re.MULTILINE)) != 2:
        return "another form"
    question, lines = match["question"].replace("\n", " "), match["options"].splitlines()
    letters, texts = "".join(line[0] for line in lines), tuple(line[3:].strip() for line in lines)
    if not "ABCDEFGHIJ".startswith(letters) or len(letters) not in OPTIONS:
        return "option letters"
    if match["letter"] not in letters:
        return "answer letter"
    if len({normalize_answer(option) or option for option in texts}) < len(texts):
        return "options alike"
    fits = [len(option.split()) in OPTION_WORDS for option in texts]
    if len(question.split()) not in QUESTION_WORDS or not all(fits):
        return "length"
    if normalize_answer(question) in asked:
        return "asked before"
    part = (match["part"] or "synthetic").strip(" .").lower()
    return Question("", question, [match["letter"]], "choice", texts, source=part)


def reordered(draft: Question, turn: int, seed: int) -> Question:
    """The draft with its options in the order of this turn; the right one moves on by a letter.

    Worked: 4 options, begun at B: the right one is B, C, D, A, B, ... in turns 0, 1, 2, 3, 4.
    """
    others = list(draft.options)
    right = others.pop(ord(draft.answers[0]) - 65)
    first = random.Random(f"{seed} {draft.question}").randrange(len(draft.options))
    place = (first + turn) % len(draft.options)
    order = random.Random(f"{seed} {draft.question} {turn}").sample(others, len(others))
    order.insert(place, right)
    return replace(draft, answers=[chr(65 + place)], options=tuple(order))


def grade_drafts(llm, drafts: Questions, turns: range, seed: int, result: Counter) -> list[int]:
    """Of each draft: in how many turns the model meant the right option. Unreadable is wrong."""
    questions = [reordered(draft, turn, seed) for draft in drafts for turn in turns]
    replies, right = llm.ask([(ANSWER, question_text(question)) for question in questions]), []
    for reply, question in zip(replies, questions, strict=True):
        letter = choice_letter(reply, question.options)
        result["unreadable"] += letter is None
        right.append(letter == question.answers[0])
    return [sum(right[i : i + len(turns)]) for i in range(0, len(right), len(turns))]


def drafts_in(reply: str | None) -> list[str | None]:
    """The drafts of one reply, each from its "Question:" on; without that word it is one draft."""
    parts = re.split(r"^(?=Question:)", reply or "", flags=re.MULTILINE)
    return [part for part in parts if part.startswith("Question:")][:DRAFTS] or [reply]


def in_form(texts: dict, asked: set[str], result: Counter, parse=parse_draft) -> Questions:
    """The drafts (id -> text) that keep the form and ask something new; the rest is counted."""
    drafts, seen = [], set(asked)
    for name, text in texts.items():
        draft = parse(text, seen)
        if isinstance(draft, str):
            result[draft] += 1
            continue
        seen.add(normalize_answer(draft.question))
        drafts.append(replace(draft, id=name))
    return drafts


def synthesize(given: Questions, llm, verifier, answerer, settings: SynthesizeSettings) -> Counter:
    """Fills --out. Counts "made", "requests", each reason to drop one, "unreadable" answers."""
    path, result = Path(settings.out), Counter(made=0, requests=0)
    made, first = earlier(path, settings.seed)
    asked = {normalize_answer(q.question) for q in [*([] if settings.corpus else given), *made]}
    last = len(given) if settings.corpus else first + settings.count
    with tqdm(total=settings.count, initial=min(len(made), settings.count), desc="made") as bar:
        for start in range(first, last, AT_ONCE):
            if len(made) >= settings.count:
                break
            numbers = range(start, min(start + AT_ONCE, last))
            if settings.corpus:
                ids = {f"synthetic-{settings.seed}-{n * DRAFTS}": given[n] for n in numbers}
                fresh = ask_about(ids, llm, verifier, asked, result)
            else:
                hard = [question for question in made if question.level == "hard"]
                examples = [pick_examples(given, hard, settings.seed, number) for number in numbers]
                requests = [(WRITE, "\n\n".join(map(shown, some))) for some in examples]
                texts = {}
                for number, reply in zip(numbers, llm.ask(requests), strict=True):
                    for i, text in enumerate(drafts_in(reply), number * DRAFTS):
                        texts[f"synthetic-{settings.seed}-{i}"] = text
                drafts = in_form(texts, asked, result)
                harder = llm.ask([(HARDEN, shown(draft)) for draft in drafts])
                texts = {draft.id: text for draft, text in zip(drafts, harder, strict=True)}
                drafts = in_form(texts, asked, result)
                # What fails the votes would fail again.
                asked |= {normalize_answer(draft.question) for draft in drafts}
                fresh = check_drafts(drafts, verifier, answerer, result, settings)
            del fresh[settings.count - len(made) :]
            append_jsonl(path, map(asdict, fresh))
            made += fresh
            result.update(made=len(fresh), requests=len(numbers))
            bar.update(len(fresh))
    return result


def check_drafts(
    drafts: Questions, verifier, answerer, result: Counter, settings: SynthesizeSettings
) -> Questions:
    """The drafts that pass the votes and are not too hard, with their level."""
    votes = grade_drafts(verifier, drafts, range(VOTES), settings.seed, result)
    elected = [draft for draft, n in zip(drafts, votes, strict=True) if n == VOTES]
    result["votes"] += len(drafts) - len(elected)
    # Other orders than the votes': of one model for both, these would be the same requests.
    right = grade_drafts(answerer, elected, range(VOTES, VOTES + settings.k), settings.seed, result)
    graded = []
    for draft, n in zip(elected, right, strict=True):
        graded.append(replace(reordered(draft, 0, settings.seed), level=bucket(n / settings.k)))
    kept = [draft for draft in graded if draft.level != "dropped"]
    result["too hard"] += len(graded) - len(kept)
    return kept


def question_about(given: tuple[Document, str | None], asked: Container = ()) -> Question | str:
    """Of a passage and the reply on it, or why it is dropped. `asked`: normalised texts."""
    passage, reply = given
    match = re.fullmatch(r"Question: *([^\n]+)\n+Answer: *([^\n]+)", (reply or "").strip())
    if not match:
        return "another form"
    question, answer = match.groups()
    if normalize_answer(question) in asked:
        return "asked before"
    texts = [f" {normalize_answer(text)} " for text in (answer, passage.text, question)]
    if texts[0] not in texts[1] or texts[0] in texts[2]:
        return "not in the passage alone"
    return Question("", question, [answer], references=(passage,), supporting=(1,))


def ask_about(passages: dict, llm, verifier, asked: set[str], result: Counter) -> Questions:
    """Questions on these passages, by id, that the verifier answers alike when it reads them."""
    replies = llm.ask(
        [(ABOUT, f"{passage.title}\n{passage.text}") for passage in passages.values()]
    )
    texts = dict(zip(passages, zip(passages.values(), replies, strict=True), strict=True))
    drafts = in_form(texts, asked, result, question_about)
    asked.update(normalize_answer(draft.question) for draft in drafts)
    read = reader_answers(verifier, [(draft, draft.references[0].text) for draft in drafts])
    good = [q for q, its in zip(drafts, read, strict=True) if exact_match(its, q.answers)]
    result["read otherwise"] += len(drafts) - len(good)
    return good


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
    if bool(settings.data) == bool(settings.corpus):
        raise InputError("--data, questions to write after, or --corpus, passages to ask about")
    if settings.corpus and (settings.answerer or settings.k != SynthesizeSettings.k):
        raise InputError("--corpus: no difficulty is measured: leave out --answerer and --k")
    if settings.corpus:
        given = load_corpus(settings.corpus)
        random.Random(settings.seed).shuffle(given)
    else:
        given = examples_among(load_questions(settings.data, seed=settings.seed))
    out = Path(settings.out)
    earlier(out, settings.seed)  # a file to go on with? asked before a model is loaded
    how = {"max_tokens": settings.max_tokens, "device": best_device(), "cache": "runs/llm_cache"}
    with interruptible(f"what was made is in {out}: the same command goes on"):
        llm = load_llm(settings.llm, settings, **how)
        specs = settings.verifier, settings.answerer
        others = [load_llm(spec, settings, **how) if spec else llm for spec in specs]
        result = synthesize(given, llm, *others, settings)
    levels = Counter(question.level or question.task for question in earlier(out, settings.seed)[0])
    there = f"{out}: {levels.total()} of {settings.count} questions"
    for what, counts in ((there, levels), ("this run", result)):
        print(f"{what}: {', '.join(f'{name} {n}' for name, n in counts.items()) or 'none'}")


if __name__ == "__main__":
    run_main(main)
