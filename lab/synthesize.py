"""Lets a language model write multiple-choice questions; checks and grades them (UR² C.5).

    questions of --data -> 5 examples -> 10 drafts -> each made harder -> correct? -> difficulty
          ^                                                                               |
          +---- the hard ones in --out: examples of the next round <-------- JSONL <------+

    drafts       one question, 4 to 10 options A, B, ... all different, one answer letter
    made harder  more options and steps, and a name for its sub-domain (`source`)
    correct?     --verifier, by default the writer itself, judges question, options and answer three
                 times; one "incorrect", or a verdict that is missing or unreadable, discards the
                 question
    difficulty   --answerer, by default the writer, samples 20 answers (--k); their mean score
                 decides the bucket (curriculum.py); below 0.2 the question is dropped, since the
                 writer's answer may be wrong

    python -m lab.synthesize --llm URL#model --verifier URL#other --data FILE --out FILE --count 500

The writer decodes greedily, the others sample at temperature 1 (our choice). Finished questions are
in --out after each round. Left out: questions about passages, balance of sub-domains.
"""

import random
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from curriculum import bucket_of_mean
from data import Question, load_questions
from errors import InputError, run_main
from formats.records import append_jsonl
from lab import parse_flags
from metrics import choice_letter, normalize_answer
from other_models.judge import read_verdict
from other_models.llm import Request, load_llm
from policy import best_device
from prompts import question_text
from settings import setting

Questions = list[Question]
OPTIONS = range(4, 11)  # allowed numbers of options
LETTERS = "ABCDEFGHIJ"
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
    out: str = setting("", "JSONL file to write", needed=True)
    count: int = setting(100, "number of questions", least=1)
    k: int = setting(20, "answers per question that set its difficulty", least=1)
    max_tokens: int = setting(4096, "maximum tokens of a reply", least=1)
    seed: int = setting(0, "seed of the choice of examples and the order of options")
    timeout: float = setting(60.0, "seconds that a server may take for one try", above=0)
    load_in_8bit: ClassVar[bool] = False  # load_llm reads this


# --------------------------------------------------------------------------------------- the drafts
def shown(question: Question) -> str:
    """Writes a question in the form that a draft must have."""
    letter = choice_letter(question.answers[0], question.options)
    return f"Question: {question_text(question)}\nAnswer: {letter}"


_FORM = re.compile(
    r"Question: *((?:(?!Question:|Answer:).+\n)+?)((?:[A-Z]\. .+\n)+)"
    r"Answer: ([A-J])(?:\nPart: *(.{1,40}))?"
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
    usable = len(texts) in OPTIONS and len(different) == len(texts) and letter in letters
    if not usable or not LETTERS.startswith("".join(letters)):
        return None
    text = question.strip().replace("\n", " ")
    source = (part or "synthetic").strip(" .").lower()
    return Question("", text, [letter], "choice", texts, source=source)


def drafts_in(reply: str | None) -> list[str]:
    """Splits a reply into drafts at each line that begins with "Question:"."""
    return re.findall(r"(?ms)^Question:.*?(?=^Question:|\Z)", reply or "")[:DRAFTS]


def reordered(draft: Question, draw: random.Random) -> Question:
    """Shuffles the options of a draft, because writers prefer certain letters."""
    right = draft.options[LETTERS.index(draft.answers[0])]
    options = draw.sample(draft.options, len(draft.options))
    return replace(draft, answers=[LETTERS[options.index(right)]], options=tuple(options))


def write_drafts(llm, examples: Questions, asked: set[str]) -> Questions:
    """Requests drafts like these examples, then a harder form of each that was not asked before;
    returns the harder ones.
    """
    (reply,) = llm.ask([(WRITE, "\n\n".join(map(shown, examples)))])
    drafts = filter(None, map(parse_draft, drafts_in(reply)))
    fresh = [draft for draft in drafts if normalize_answer(draft.question) not in asked]
    harder = llm.ask([(HARDEN, shown(draft)) for draft in fresh])
    return [*filter(None, map(parse_draft, harder))]


# --------------------------------------------------------------------------------------- the checks
def asked_often(llm, instruction: str, text: str, times: int) -> list[str | None]:
    """Samples `times` replies. The requests are numbered, because equal ones are sent only once."""
    return llm.ask([Request(instruction, f"{text}\n(attempt {n + 1})", 1.0) for n in range(times)])


def level_of(draft: Question, verifier, answerer, k: int) -> str:
    """Returns the bucket of a draft: "dropped" if it is too hard or a verdict is not "correct"."""
    if not all(map(read_verdict, asked_often(verifier, VERIFY, shown(draft), VOTES))):
        return "dropped"
    replies = asked_often(answerer, ANSWER, question_text(draft), k)
    return bucket_of_mean([choice_letter(r, draft.options) in draft.answers for r in replies])


# ------------------------------------------------------------------------------------------ the run
def synthesize(given: Questions, models: list, s: SynthesizeSettings) -> Questions:
    """Writes questions to --out until there are --count, in at most --count rounds. The first model
    writes, the second checks and the third answers.
    """
    writer, verifier, answerer = models
    asked = {normalize_answer(question.question) for question in given}
    made, draw = [], random.Random(s.seed)
    for _ in range(s.count):
        hard = [question for question in made if question.level == "hard"]
        # At least one example is a given question, so that the form does not drift.
        examples = draw.sample(hard, min(len(hard), SHOTS - 1))
        examples += draw.sample(given, min(len(given), SHOTS - len(examples)))
        for draft in write_drafts(writer, examples, asked):
            key = normalize_answer(draft.question)
            if key in asked or len(made) == s.count:
                continue
            asked.add(key)  # also if the checks discard it, so that no later round accepts it
            draft = replace(reordered(draft, draw), id=f"synthetic-{len(made)}")
            level = level_of(draft, verifier, answerer, s.k)
            if level != "dropped":
                made.append(replace(draft, level=level))
                append_jsonl(Path(s.out), [asdict(made[-1])])
    return made


def main(arguments: list[str] | None = None) -> None:
    s, _ = parse_flags("lab.synthesize", SynthesizeSettings, arguments)
    if Path(s.out).exists():
        raise InputError(f"--out {s.out} already exists: name another, or remove it")
    questions = load_questions(s.data, seed=s.seed)
    given = [q for q in questions if q.task == "choice" and choice_letter(q.answers[0], q.options)]
    if not given:
        raise InputError(f"--data {s.data}: it has no multiple-choice question: name another file")
    names = [s.llm, s.verifier or s.llm, s.answerer or s.llm]
    device = best_device()
    models = {n: load_llm(n, s, max_tokens=s.max_tokens, device=device) for n in {*names}}
    made = synthesize(given, [models[name] for name in names], s)
    print(f"{s.out}: {len(made)} of {s.count} questions: {dict(Counter(q.level for q in made))}")


if __name__ == "__main__":
    run_main(main)
