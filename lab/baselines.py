"""The methods that the papers compare with, on the retriever, limits and metrics of all else here.

    direct        answer                                                               no search
    cot           think, answer                                            Wei 2022    no search
    rag           search the question, read, answer                        Lewis 2020          1
    ircot         search, one sentence, search that sentence, ...          Trivedi 2023  up to 8
    iter_retgen   search question + last answer, answer anew, T times      Shao 2023       T = 2
    self_ask      follow-up question, its answer by search, ...            Press 2023   up to 10
    rat           draft, then revise paragraph by paragraph                Wang 2024     up to 8
    search_o1     search inside the reasoning, insert digested notes       Li 2025      up to 10

A method is a Python generator: it yields what it wants next, `Write` (the model writes on) or
`Look` (a search), is handed the reply at that place, and returns its answer. `run_method` drives
many questions in lockstep: all texts that are wanted at a moment are one batch, all searches one
call.

    python -m lab.baselines                        all, on the built-in world with its tiny model
    python -m lab.baselines --method rag,ircot --model SPEC --data FILE --corpus FILE
                                                   SPEC: a HF model, or http://host:port/v1#model

The prompts are ours, without examples, for chat models; the papers show a few. Traps: a page must
not steer a method, so tags and labels are taken out of it, and a method's end is looked for in the
model's own words only; a reply that did not come is no wrong answer: that question is left out, and
the same command makes its batch anew. Left out: IRCoT's bound of 15 paragraphs (the context is the
bound), sampling several chains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

from data import Question
from errors import InputError, check_output, check_value, run_main, setting
from eval import Evaluation
from lab import interruptible, parse_flags
from metrics import last_boxed
from other_models.llm import load_llm
from other_models.reader import read_answer
from plumbing.build import build_protocol, build_search, load_model
from plumbing.report import summarise, table
from policy import best_device, weights_version
from prompts import (
    Protocol,
    chat_text,
    frame_documents,
    last_block,
    parse_query,
    prompt_text,
    question_text,
    special_texts,
    strip_tags,
    tag_pair,
    without_thinking,
)
from rollout import Environment, check_prompt, context_of, encode, sample_turns, seeded
from settings import RECORDS, Settings, check_settings, resolve
from summarizer import SearchFunction
from trajectory import Trajectory

TAGS = tag_pair("search"), tag_pair("information"), tag_pair("answer")
BASELINE = Protocol("baseline", *TAGS, instruction="", direct_instruction="")
ANSWERED = BASELINE.answer_tags[1]
NO_REPLY = "no reply"  # why a trajectory ended whose model did not come
FINAL = "So the final answer is:"
LABELS = ("Follow up:", "Intermediate answer:", FINAL)  # no page may bring them along


# --------------------------------------------------------------------------- what a method may want


@dataclass(frozen=True)
class Write:
    """The model writes on. It reads the passages, the question and the notes, in this order, and
    goes on behind `so_far`.

    found      lines of passages, one list per search, the oldest first: those are dropped first
               where the context is short
    notes      more to read; cut from the front where even that does not fit
    so_far     the beginning of the model's own reply
    stop       the reply ends behind the first of these, one or two
    thinking   keep what a reasoning model thinks aloud (only a local model shows it)
    """

    instruction: str
    question: str = ""
    found: Sequence[Sequence[str]] = ()
    notes: str = ""
    so_far: str = ""
    stop: tuple[str, ...] = (ANSWERED,)
    thinking: bool = False


@dataclass(frozen=True)
class Look:
    """One search. The method is handed the lines of what the policy of a rollout would read."""

    query: str


Steps = Generator[Write | Look, "str | list[str]", "str | None"]

_SHORT = (
    "in as few words as possible: a name, a date, a number, yes or no, or the letter of an option"
)
_BOX = "<answer> your answer </answer>"
INSTRUCTIONS = f"""
- Answer the question {_SHORT}. Reply with nothing but {_BOX}.
- Answer the question from the passages, {_SHORT}. If they do not help, answer from what you know.
  Reply with nothing but {_BOX}.
- Think about the question step by step, in a few short sentences. Then answer {_SHORT}, as {_BOX}.
- Read the passages and think about the question step by step, in a few short sentences. Use what
  you know where the passages say nothing. Then answer {_SHORT}, as {_BOX}.
- Work towards the answer one sentence at a time: each sentence states one fact from the passages,
  with full names, that brings the question further. Write the next sentence only. Once nothing is
  missing, write as the last sentence: So the answer is: the answer, in as few words as possible.
- Split the question into simpler ones. As long as a fact is missing, write one line, "Follow up:"
  and one simple question that can be understood by itself, and stop; its answer is then given to
  you behind "Intermediate answer:". When nothing is missing, write "{FINAL}" and the answer
  {_SHORT}.
- Write down step by step how the question can be answered. One step is one short paragraph; leave a
  blank line between paragraphs. End with a paragraph "{FINAL}" and the answer {_SHORT}.
- Somebody answers the question step by step, in paragraphs. Write one short query for a search
  engine with which the facts in the last paragraph can be checked. Reply with the query only.
- Somebody answers the question step by step, in paragraphs. Revise the last paragraph: correct what
  the passages contradict and add what they say to the point. Reply with the revised paragraph only.
- Reason step by step towards the answer. Whenever a fact is missing or uncertain, write <search> a
  short query </search> and stop; notes of what was found are given to you between <information> and
  </information>, and you go on. Finish with the answer {_SHORT}, as {_BOX}.
- Somebody reasons about the question and has just searched. Read the passages and write down, in a
  few sentences, only the facts in them that help the reasoning on. If there are none, write:
  Nothing helpful was found.
"""
INSTRUCTIONS = [" ".join(text.split()) for text in INSTRUCTIONS.split("\n- ")[1:]]
DIRECT, READ, THINK, READ_AND_THINK, ONE_SENTENCE, SELF_ASK, DRAFT, *_REST = INSTRUCTIONS
TO_QUERY, REVISE, SEARCH_INSIDE, DIGEST = _REST


# -------------------------------------------------------------------------------------- the methods
# limit: its paper's bound on searches (Search-o1's and RAT's are ours)


def direct(question: Question, limit: int = 0) -> Steps:
    """The model's own knowledge: the question, and one short reply."""
    return any_answer((yield Write(DIRECT, question_text(question))))


def cot(question: Question, limit: int = 0) -> Steps:
    """Chain of thought (Wei 2022): reasoning before the answer, without a search."""
    request = Write(THINK, question_text(question))
    return (yield from conclude(request, (yield request)))


def rag(question: Question, limit: int = 1) -> Steps:
    """Retrieval-augmented generation (Lewis 2020): passages for the question, one generation."""
    found = yield Look(question.question)
    return any_answer((yield Write(READ, question_text(question), [found])))


def ircot(question: Question, limit: int = 8) -> Steps:
    """IRCoT (Trivedi 2023): retrieval and reasoning take turns; a sentence is the next query.

    Passages pile up. It ends when a sentence says "answer is", or after `limit` searches. Where the
    paper then lets a reader answer from all passages, the chain is completed.
    """
    found, chain, query = [], "", question.question
    for _ in range(limit):
        found.append((yield Look(query)))
        request = Write(ONE_SENTENCE, question_text(question), found.copy(), so_far=chain)
        query = first_sentence((yield request))
        if not query or said_answer(query):
            break
        chain = f"{chain} {query}".strip()
    else:
        request, query = replace(request, so_far=chain), ""
    return (yield from conclude(request, query))


def iter_retgen(question: Question, limit: int = 2) -> Steps:
    """Iter-RetGen (Shao 2023): y_t = answer(question, passages for question + y_{t−1}).

    The whole last reply is part of the query, as it often names what the question does not. Each
    turn reads only what it found.
    """
    reply = ""
    for _ in range(limit):
        found = yield Look(f"{question.question} {reply}")
        request = Write(READ_AND_THINK, question_text(question), [found])
        reply = yield request
    return (yield from conclude(request, reply))


def self_ask(question: Question, limit: int = 10) -> Steps:
    """Self-Ask (Press 2023): the model asks itself simpler questions, and a search answers each.

    The paper's search engine gives an answer; ours gives passages, so the model reads the answer
    out of them first.
    """
    text, chain, stop = question_text(question), "", ("Intermediate answer:", ANSWERED)
    for _ in range(limit):
        request = Write(SELF_ASK, text, so_far=chain, stop=stop)
        reply = yield request
        follow_up = next_question(reply)
        if not follow_up:
            break
        found = yield Look(follow_up)
        read = yield Write(READ, found=[found], notes=f"Question: {follow_up}")
        chain += f"Follow up: {follow_up}\nIntermediate answer: {any_answer(read) or 'unknown'}\n"
    else:
        request, reply = replace(request, so_far=chain), ""
    return (yield from conclude(request, reply))


def rat(question: Question, limit: int = 8) -> Steps:
    """RAT (Wang 2024): a chain of thought is drafted, then each paragraph looked up and revised.

    What paragraph i is revised with: the paragraphs before it as they are by then, and passages for
    a query the model makes of it. Paragraphs behind the first `limit` stay as they were drafted.
    """
    text = question_text(question)
    draft = [p.strip() for p in re.split(r"\n\s*\n", (yield Write(DRAFT, text))) if p.strip()]
    revised: list[str] = []
    for paragraph in draft[:limit]:
        notes = "\n\n".join([*revised, paragraph])
        line = strip_tags((yield Write(TO_QUERY, text, notes=notes)), BASELINE.tags).strip()
        found = yield Look(line.split("\n")[0].strip(" \"'") or paragraph)
        reply = yield Write(REVISE, text, [found], notes=notes)
        revised.append(reply.strip() or paragraph)
    *before, last = [*revised, *draft[limit:]] or [""]
    so_far = "".join(f"{paragraph}\n\n" for paragraph in before)
    return (yield from conclude(Write(DRAFT, text, so_far=so_far), last))


def search_o1(question: Question, limit: int = 10) -> Steps:
    """Search-o1 (Li 2025): the model searches in the midst of its reasoning.

    Another call of the same model reads the passages in its place, and only its notes are inserted:
    pages would tear the reasoning apart.
    """
    text, chain, stop = question_text(question), "", ("</search>", ANSWERED)
    for searches in range(limit + 1):
        request = Write(SEARCH_INSIDE, text, so_far=chain, stop=stop, thinking=True)
        reply = yield request
        query = parse_query(BASELINE, reply)
        if not query or searches == limit:
            break
        chain += reply
        found = yield Look(query)
        asked = f"Reasoning so far:\n{chain}\n\nQuery: {query}"
        notes = strip_tags((yield Write(DIGEST, text, [found], asked)), BASELINE.tags)
        chain += f"\n\n<information>\n{notes.strip()}\n</information>\n\n"
    return (yield from conclude(request, reply))


_ALL = (direct, cot, rag, ircot, iter_retgen, self_ask, rat, search_o1)
METHODS: dict[str, Callable[..., Steps]] = {method.__name__: method for method in _ALL}


# -------------------------------------------------------------------------------- what a reply says


def conclude(request: Write, reply: str) -> Steps:
    """The answer that the reply says; where it says none, the model has to complete FINAL."""
    if answer := said_answer(reply):
        return answer
    parts = [request.so_far, strip_tags(reply, BASELINE.tags), FINAL]
    so_far = "\n".join(part.strip() for part in parts if part.strip())
    return any_answer((yield replace(request, so_far=so_far, stop=(ANSWERED,), thinking=False)))


_SAID = re.compile(r"answer is\s*+:?\s*+([^\n]*\w[^\n]*)", re.IGNORECASE)


def said_answer(reply: str) -> str | None:
    """The last <answer> box, the last \\boxed{...}, or what stands behind the last "answer is".

    >>> said_answer("He was born in St. Ives. So the answer is: St. Ives. That is all.")
    'St. Ives'
    """
    if answer := last_block(reply, BASELINE.answer_tags) or last_boxed(reply):
        return answer
    said = _SAID.findall(strip_tags(reply, BASELINE.answer_tags))
    return first_sentence(said[-1]).rstrip(" .") or None if said else None


def any_answer(reply: str) -> str:
    """What the reply says, or its first sentence: for replies that should be the answer alone."""
    return said_answer(reply) or first_sentence(strip_tags(read_answer(reply), BASELINE.tags))


# A full stop behind one capital letter, one digit (of a numbered list) or a title ends no sentence.
_SENTENCE = re.compile(
    r"[^\n]*?(?:(?<!\b[A-Z\d])(?<!\b[DMS]r)(?<!\bSt)(?<!\bMrs)(?<!\bvs)"
    r"[.!?][\"')\]]*(?=\s|$)|(?=\n|$))"
)


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence, or of its first line.

    >>> first_sentence("Dr. J. Bell was born in Kelmouth. It is a town.")
    'Dr. J. Bell was born in Kelmouth.'
    """
    return _SENTENCE.match(text.strip()).group().strip()


_FOLLOW_UP = re.compile(r"follow[- ]?up(?: question)?\s*+:([^\n]*)", re.IGNORECASE)


def next_question(reply: str) -> str | None:
    """Self-Ask's next question, if the reply asks one before it says an answer."""
    asked, said = _FOLLOW_UP.search(reply), _SAID.search(reply)
    if not asked or (said and said.start() < asked.start()):
        return None
    return asked.group(1).partition("Intermediate answer:")[0].strip() or None


# ----------------------------------------------------------------------- many questions in lockstep


class Row:
    """One question under way: its method, halted at `request` (None: ended), and its trajectory."""

    def __init__(self, question: Question, steps: Steps):
        self.trajectory, self.steps = Trajectory(question, BASELINE), steps
        self.request: Write | Look | None = next(steps)

    def hand(self, reply: str | list[str] | None) -> None:
        """Hand the method what it asked for; it runs on to its next request, or to its end."""
        if reply is None:
            self.trajectory.stop_reason, self.request = NO_REPLY, None
            return
        try:
            self.request = self.steps.send(reply)
        except StopIteration as end:  # one answer box, so that it is graded like everybody else's
            answer = strip_tags(end.value or "", BASELINE.tags).strip()
            self.request, self.trajectory.stop_reason = None, "answer" if answer else "eos"
            if answer:
                self.trajectory.append_model([], [], f"<answer> {answer} </answer>")


def run_method(
    name: str, questions: list[Question], generate, search: SearchFunction, settings: Settings
) -> list[Trajectory]:
    """A trajectory of one method for each question, without token ids. stop_reason NO_REPLY: the
    model did not come, it can be asked again.

    generate   `Local`, `Asked` or anything like them: generate(requests, stop) -> a reply or None
               for each, generate.shown(request) -> all that it reads, generate.tokenizer
    settings   max_searches 0: the paper's own bound; rollout_batch_size: questions under way, 0 all
    """
    limit = [settings.max_searches] if settings.max_searches else []
    # This environment writes a log and no context; one search takes at most half a context.
    most = min(settings.document_tokens, settings.max_context // 2)
    unbounded = replace(settings, max_context=2**31, document_tokens=most)
    environment = Environment(generate.tokenizer, BASELINE, search, unbounded)
    environment.forbidden = [*environment.forbidden, *LABELS]
    rows = [Row(question, METHODS[name](question, *limit)) for question in questions]
    size = settings.rollout_batch_size or len(rows)
    for start in range(0, len(rows), size):
        live = rows[start : start + size]
        while live:
            look_all([row for row in live if isinstance(row.request, Look)], environment)
            write_all([row for row in live if isinstance(row.request, Write)], generate, settings)
            live = [row for row in live if row.request is not None]
    return [row.trajectory for row in rows]


def look_all(rows: list[Row], environment: Environment) -> None:
    """All rows' searches in one call, under the rollout's own rules of retries and budgets."""
    asking = []
    for row in rows:
        query = " ".join(strip_tags(row.request.query, BASELINE.tags).split())
        row.trajectory.append_environment([], f"<search> {query} </search>", "notice")
        asking.append((row.trajectory, query))
    if asking:
        environment.execute(asking)
    for row in rows:
        row.hand(row.trajectory.searches[-1].text.split("\n"))


def write_all(rows: list[Row], generate, settings: Settings) -> None:
    """One batch for each way of stopping; a method has at most two."""
    for stop in dict.fromkeys(row.request.stop for row in rows):
        some = [row for row in rows if row.request.stop == stop]
        asked = [fitted(row.request, generate, settings) for row in some]
        rows = [row for row in rows if row not in some]
        for row, reply in zip(some, generate(asked, stop), strict=True):
            if reply is not None:
                ends = [reply.find(text) + len(text) for text in stop if text in reply]
                reply = reply[: min(ends)] if ends else reply  # a server does not stop there
                # The transcript holds one answer box, and tags of searches that were made.
                text = strip_tags(reply, BASELINE.tags).strip()
                row.trajectory.append_model([], [], f"{text}\n\n")
            row.hand(reply)


def fitted(request: Write, generate, settings: Settings) -> Write:
    """The request, so short that a reply still fits into the context: the oldest search's last
    passage goes first, then the front of the notes and of what was written so far.
    """
    room = settings.max_context - min(settings.max_turn_tokens, settings.max_context // 4)
    while len(encode(generate.tokenizer, generate.shown(request))) > room:
        if request.found:
            oldest, *others = request.found
            request = replace(request, found=[oldest[:-1], *others] if len(oldest) > 1 else others)
        elif request.notes or request.so_far:
            notes, so_far = (text[len(text) // 8 + 1 :] for text in (request.notes, request.so_far))
            request = replace(request, notes=notes, so_far=so_far)
        else:
            break
    return request


# --------------------------------------------------------------------------------------- who writes


def user_text(request: Write) -> str:
    """What the model reads: passages (each once, without their numbers), question, notes."""
    lines = [re.sub(r"^\(\d+\) ", "", line) for found in request.found for line in found]
    passages = "Passages:\n" + "\n".join(dict.fromkeys(lines)) if lines else ""
    question = f"Question: {request.question}" if request.question else ""
    return "\n\n".join(part for part in (passages, question, request.notes) if part)


class Local:
    """A HF model in this process. `so_far` is put into its mouth: it goes on in its own turn.

    ask   (request) -> (prompt, opening of the reply); by itself the chat template, if it has one
    """

    def __init__(self, policy, tokenizer, settings: Settings, ask: Callable | None = None):
        self.policy, self.tokenizer, self.settings = policy, tokenizer, settings
        self.ask, self.seed = ask or self.chat, settings.seed
        self.special = special_texts(tokenizer)

    def chat(self, request: Write) -> tuple[str, str]:
        # Passages and earlier replies must not open a turn of their own.
        text, so_far = (strip_tags(t, self.special) for t in (user_text(request), request.so_far))
        prompt = chat_text(self.tokenizer, request.instruction, text)
        return prompt + (" " if so_far and not prompt[-1].isspace() else "") + so_far, ""

    def shown(self, request: Write) -> str:
        return "".join(self.ask(request))

    def __call__(self, requests: list[Write], stop: tuple[str, ...]) -> list[str]:
        """A turn of a rollout for each request, which ends behind the texts `stop`."""
        ends = [("", text) for text in stop]
        protocol = replace(BASELINE, query_tags=ends[0], answer_tags=ends[-1])
        environment = Environment(self.tokenizer, protocol, None, self.settings)
        contexts = [encode(self.tokenizer, self.shown(request)) for request in requests]
        rows = [Trajectory(None, protocol, context) for context in contexts]
        self.seed += 1  # each batch draws anew
        with seeded(self.seed, self.policy.device):
            turns = sample_turns(self.policy, environment, rows)
        answered = zip(requests, turns, strict=True)
        return [self.decode(request, turn.ids) for request, turn in answered]

    def decode(self, request: Write, ids: list[int]) -> str:
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        reply = self.ask(request)[1] + self.tokenizer.decode(ids, **how)
        return reply if request.thinking else without_thinking(reply)


class Asked:
    """A model behind `llm.ask`, a server. It cannot be given the beginning of its reply: it is
    shown it.
    """

    def __init__(self, llm):
        self.llm = llm

    def tokenizer(self, text: str, **_) -> dict:
        """3 characters a token, which is too many tokens for English: the model's is elsewhere."""
        return {"input_ids": [0] * -(-len(text) // 3)}

    def text(self, request: Write) -> str:
        go_on = "\n\nThis is your reply so far. Go on where it ends, and repeat nothing:\n"
        return user_text(request) + (go_on + request.so_far if request.so_far else "")

    def shown(self, request: Write) -> str:
        return request.instruction + self.text(request)

    def __call__(self, requests: list[Write], stop: tuple[str, ...]) -> list[str | None]:
        replies = self.llm.ask([(request.instruction, self.text(request)) for request in requests])
        pairs = zip(replies, requests, strict=True)
        return [reply and reply.removeprefix(request.so_far.strip()) for reply, request in pairs]


def tiny_prompt(request: Write, tokenizer, protocol: Protocol) -> tuple[str, str]:
    """How the built-in world's tiny model is asked. It reads no instruction, only what its warm-up
    had: the bare question, and passages in its documents' frame. To answer at once, its answer is
    opened for it: left alone, it would search.
    """
    question = Question("", request.question or request.notes.removeprefix("Question: "), [])
    prompt = prompt_text(protocol, question, tokenizer)
    if lines := [line for found in request.found for line in found]:
        prompt += frame_documents(protocol, "\n".join(lines))
    if request.instruction != DIRECT:
        return prompt + request.so_far, ""
    box = protocol.answer_tags[0] if protocol.answer_tags else " \\boxed{"
    return prompt, f"</think>\n\n{box}" if protocol.prompt_suffix else box


def load_writer(settings: Settings) -> tuple[Local | Asked, Settings]:
    """(who writes, the settings with the context known)."""
    if settings.model.startswith("http"):  # whose context is not known
        llm = load_llm(settings.model, settings, max_tokens=settings.max_turn_tokens)
        return Asked(llm), replace(settings, max_context=settings.max_context or 4096)
    policy, tokenizer = load_model(settings, settings.model, best_device(), frozen=True)
    context, positions = settings.max_context, context_of(policy)
    if context > positions:
        raise InputError(f"--max_context {context}: the model has {positions} positions")
    settings, ask = replace(settings, max_context=context or positions), None
    if not settings.data:
        ask = partial(tiny_prompt, tokenizer=tokenizer, protocol=build_protocol(settings))
    return Local(policy, tokenizer, settings, ask), settings


# --------------------------------------------------------------------------------- the command line

FILES = ("settings", "data", "rollout", "retriever", "summarizer")  # whose flags count


@dataclass(frozen=True)
class BaselineSettings:
    """The methods that papers compare with; an `Evaluation` reads this too."""

    method: str = setting("all", f"all, or some of {','.join(METHODS)}")
    split: str = setting("test", "of the built-in world", one_of=("train", "dev", "test"))
    questions: int = setting(100, "per kind in the built-in world; of a file, 0 = all", least=0)
    out: str = setting("", "folder of METHOD.jsonl, the predictions; else in runs/predictions")
    json: str = setting("", "write the table, by kind of question too, to this file")
    samples: ClassVar[int] = 1
    fresh: ClassVar[bool] = False
    fact_seed: ClassVar[None] = None


def parse(arguments: list[str] | None) -> tuple[Settings, BaselineSettings]:
    records = [record for record in RECORDS if record.__module__ in FILES]
    options, given = parse_flags("lab.baselines", BaselineSettings, arguments, records)
    chosen_methods(options.method)
    for flag, file in (("--out", options.out and f"{options.out}/x"), ("--json", options.json)):
        if file:
            check_output(file, flag)
    return settings_of(given), options


def chosen_methods(names: str) -> list[str]:
    chosen = list(METHODS) if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        check_value("method", name, {"one_of": METHODS})
    return list(dict.fromkeys(chosen))


def settings_of(given: dict) -> Settings:
    """The recipe names the tiny model and gives the limits; greedy, and each method with its own
    bound on searches, unless told otherwise.
    """
    if given.get("max_searches") == 0:
        raise InputError("--max_searches 0: the methods without a search are --method direct,cot")
    name, own = given.get("recipe", "ur2"), {"temperature": 0.0, "max_searches": 0}
    settings = resolve(name, given.get("stage", 1), not given.get("data"), own | given)
    if build_protocol(settings).query_tags is None:
        why = "never searches, so its model and retriever cannot be compared: choose another"
        raise InputError(f"--recipe {name} {why}")
    if settings.model.startswith("http") and settings.temperature:
        raise InputError("--temperature: a server is asked greedily; leave it out")
    return check_settings(settings, training=False)


def check_fit(questions: list[Question], generate, settings: Settings) -> None:
    for question in questions:
        longest = Write(max(INSTRUCTIONS, key=len), question_text(question))
        prompt = encode(generate.tokenizer, generate.shown(longest))
        check_prompt(question, prompt, settings.max_context)


def main(arguments: list[str] | None = None) -> None:
    settings, options = parse(arguments)
    whole, summaries = Evaluation(settings, options), {}
    folder = whole.out if options.out else whole.out.with_suffix("")
    version = weights_version(settings.model) if settings.model else "built-in"

    @cache
    def load() -> tuple:  # once, and only if something is missing
        generate, limits = load_writer(settings)
        check_fit(whole.questions, generate, limits)
        return generate, build_search(limits, whole.documents, best_device()), limits

    def rows_of(name: str, some: list[Question], start: int, progress) -> list[Trajectory]:
        rows = run_method(name, some, *load())
        progress(len(rows))
        return [row for row in rows if row.stop_reason != NO_REPLY]

    with interruptible(f"what was finished is in {folder}: the same command goes on"):
        for name in chosen_methods(options.method):
            out, count = folder / f"{name}.jsonl", len(whole.questions)
            records = whole.collect(out, version, partial(rows_of, name), name)
            if left := count - len(records):
                print(f"{name}: {left} of {count} got no reply; the same command asks again")
            if records:
                summaries[name] = summarise(records)
    rows = {name: summary["all"] for name, summary in summaries.items()}
    print(table(rows).replace("kind  ", "method"))
    print(f"predictions: {folder}/METHOD.jsonl")
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(summaries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
