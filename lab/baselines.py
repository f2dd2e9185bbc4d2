"""The methods that the papers compare with, on the same retriever, limits and metrics as everything
else here.

    direct        answer                                                                    no
                  search
    cot           think, answer                                            Wei 2022         no
                  search
    rag           search the question, read, answer                        Lewis 2020       1
    ircot         search, one sentence, search that sentence, ...          Trivedi 2023     up to 8
    iter_retgen   search question + last answer, answer anew, T times      Shao 2023        T = 2
    self_ask      follow-up question, its answer by search, ...            Press 2023       up to 10
    rat           draft, then revise paragraph by paragraph                Wang 2024        a
                  paragraph, up to 8
    search_o1     search inside the reasoning, insert digested notes       Li 2025          up to 10

A method is a Python generator: it yields what it wants next, `Write` (the model writes on) or
`Look` (a search), is handed the reply at that place, and returns its answer. `run_method` drives
the generators of many questions in lockstep: all texts that are wanted at a moment are one batch,
all searches one call.

    python baselines.py                                        all eight on one invented question,
                                                               with a scripted model
    python baselines.py --method all                           on the built-in world, with its tiny
    model
    python baselines.py --method rag,ircot --model SPEC --data FILE --corpus FILE    SPEC: a HF
    model, or URL#model

The prompts are ours and have no examples, as they are for chat models; the papers show a few worked
examples instead. Traps: a page must not steer a method, so tags and labels are taken out of it, and
a method's end is looked for in the model's own words only; a reply that did not come is no wrong
answer: that question is left out, and asked again by the same command. Left out: few-shot examples,
IRCoT's bound of 15 paragraphs (the context is the bound), sampling several chains.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from data import Document, Question
from errors import FlagParser, InputError, check_output, run_main
from eval import SHARED, material, prediction_record, questions_name, signature
from formats.records import append_jsonl, finished_records
from metrics import last_boxed
from other_models.llm import chat_text, load_llm, without_thinking
from other_models.reader import read_answer
from plumbing.report import summarise, table
from policy import best_device, weights_version
from prompts import (
    Protocol,
    frame_documents,
    last_block,
    parse_query,
    prompt_text,
    question_text,
    special_texts,
    strip_tags,
)
from recipes import (
    Recipe,
    add_flags,
    build_protocol,
    build_search,
    check_recipe,
    load_model,
    resolve,
    search_seconds,
)
from retriever import BM25
from rollout import Environment, Limits, SearchFunction, context_of, encode, sample_turns, seeded
from summarizer import make_search
from trajectory import Trajectory

SEARCH, INFORMATION, ANSWER = (
    ("<search>", "</search>"),
    ("<information>", "</information>"),
    ("<answer>", "</answer>"),
)
BASELINE = Protocol("baseline", SEARCH, INFORMATION, ANSWER, instruction="", direct_instruction="")
FINAL = "So the final answer is:"
LABELS = ("Follow up:", "Intermediate answer:", FINAL)  # no page may bring them along
AT_ONCE = 64  # questions under way together


# --------------------------------------------------------------------------- what a method may want


@dataclass(frozen=True)
class Write:
    """The model writes on. It reads the passages, the question and the notes, in this order, and
    goes on behind `so_far`.

    found      lines of passages, one list per search, the oldest first: those are dropped first
               where the context is short
    notes      more to read; cut from the front where even that does not fit
    so_far     the beginning of the model's own reply
    stop       the reply ends behind the first of these
    thinking   keep what a reasoning model thinks aloud (only a local model shows it)
    """

    instruction: str
    question: str = ""
    found: Sequence[Sequence[str]] = ()
    notes: str = ""
    so_far: str = ""
    stop: tuple[str, ...] = (BASELINE.answer_tags[1],)
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
DIRECT = f"Answer the question {_SHORT}. Reply with nothing but {_BOX}."
READ = (
    f"Answer the question from the passages, {_SHORT}. If they do not help, answer from what you"
    f" know. Reply with nothing but {_BOX}."
)
THINK = (
    f"Think about the question step by step, in a few short sentences. Then answer {_SHORT}, as"
    f" {_BOX}."
)
READ_AND_THINK = (
    "Read the passages and think about the question step by step, in a few short sentences. Use"
    f" what you know where the passages say nothing. Then answer {_SHORT}, as {_BOX}."
)
ONE_SENTENCE = (
    "Work towards the answer one sentence at a time: each sentence states one fact from the"
    " passages, with full names, that brings the question further. Write the next sentence only."
    " Once nothing is missing, write as the last sentence: So the answer is: the answer, in as few"
    " words as possible."
)
SELF_ASK = (
    'Split the question into simpler ones. As long as a fact is missing, write one line, "Follow'
    ' up:" and one simple question that can be understood by itself, and stop; its answer is then'
    f' given to you behind "Intermediate answer:". When nothing is missing, write "{FINAL}" and the'
    f" answer {_SHORT}."
)
DRAFT = (
    "Write down step by step how the question can be answered. One step is one short paragraph;"
    " leave a blank line between "
    f'paragraphs. End with a paragraph "{FINAL}" and the answer {_SHORT}.'
)
TO_QUERY = (
    "Somebody answers the question step by step, in paragraphs. Write one short query for a search"
    " engine with which the facts in the last paragraph can be checked. Reply with the query only."
)
REVISE = (
    "Somebody answers the question step by step, in paragraphs. Revise the last paragraph: correct"
    " what the passages contradict and add what they say to the point. Reply with the revised"
    " paragraph only."
)
SEARCH_INSIDE = (
    "Reason step by step towards the answer. Whenever a fact is missing or uncertain, write"
    " <search> a short query </search> and stop; notes of what was found are given to you between"
    f" <information> and </information>, and you go on. Finish with the answer {_SHORT}, as {_BOX}."
)
DIGEST = (
    "Somebody reasons about the question and has just searched. Read the passages and write down,"
    " in a few sentences, only the facts in them that help the reasoning on. If there are none,"
    " write: Nothing helpful was found."
)
INSTRUCTIONS = (
    DIRECT,
    READ,
    THINK,
    READ_AND_THINK,
    ONE_SENTENCE,
    SELF_ASK,
    DRAFT,
    TO_QUERY,
    REVISE,
    SEARCH_INSIDE,
    DIGEST,
)


# -------------------------------------------------------------------------------------- the methods


def direct(question: Question, limit: int) -> Steps:
    """The model's own knowledge: the question, and one short reply."""
    return any_answer((yield Write(DIRECT, question_text(question))))


def chain_of_thought(question: Question, limit: int) -> Steps:
    """Chain of thought (Wei 2022): reasoning before the answer, without a search."""
    request = Write(THINK, question_text(question))
    return (yield from conclude(request, (yield request)))


def rag(question: Question, limit: int) -> Steps:
    """Standard retrieval-augmented generation (Lewis 2020): the top k passages for the question,
    one generation.
    """
    found = yield Look(question.question)
    return any_answer((yield Write(READ, question_text(question), [found])))


def ircot(question: Question, limit: int) -> Steps:
    """IRCoT (Trivedi 2023): retrieval and reasoning take turns, and the last sentence is the next
    query.

    Passages pile up. It ends when a sentence says "answer is", or after `limit` searches; the paper
    then lets a reader answer from all passages, here the chain is only completed where it has not
    said an answer.
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


def iter_retgen(question: Question, limit: int) -> Steps:
    """Iter-RetGen (Shao 2023): y_t = answer(question, passages for question + y_{t−1}), t = 1 ...
    T, with T = `limit`.

    The whole last reply is part of the query, as it often names what the question does not. Each
    turn reads only what it found.
    """
    reply = ""
    for _ in range(limit):
        found = yield Look(f"{question.question} {reply}")
        request = Write(READ_AND_THINK, question_text(question), [found])
        reply = yield request
    return (yield from conclude(request, reply))


def self_ask(question: Question, limit: int) -> Steps:
    """Self-Ask (Press 2023): the model asks itself simpler questions, and a search answers each,
    until it needs no more.

    The paper's search engine gives an answer; ours gives passages, so the model reads the answer
    out of them first.
    """
    chain = ""
    for _ in range(limit):
        request = Write(
            SELF_ASK,
            question_text(question),
            so_far=chain,
            stop=("Intermediate answer:", "</answer>"),
        )
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


def rat(question: Question, limit: int) -> Steps:
    """RAT (Wang 2024): a chain of thought is drafted without a search, then every paragraph is
    looked up and revised.

    What paragraph i is revised with: the paragraphs before it as they are by then, and passages for
    a query the model makes of it. Paragraphs behind the first `limit` stay as they were drafted.
    """
    text = question_text(question)
    draft = paragraphs((yield Write(DRAFT, text)))
    revised: list[str] = []
    for paragraph in draft[:limit]:
        notes = "\n\n".join([*revised, paragraph])
        query = one_line((yield Write(TO_QUERY, text, notes=notes)))
        found = yield Look(query or paragraph)
        reply = yield Write(REVISE, text, [found], notes=notes)
        revised.append(reply.strip() or paragraph)
    *before, last = [*revised, *draft[limit:]] or [""]
    return (
        yield from conclude(Write(DRAFT, text, so_far="".join(f"{p}\n\n" for p in before)), last)
    )


def search_o1(question: Question, limit: int) -> Steps:
    """Search-o1 (Li 2025): the model searches in the midst of its reasoning, and another call of
    the same model reads the passages in its place ("reason in documents"): only the notes are
    inserted, so pages do not tear the reasoning apart.
    """
    text, chain = question_text(question), ""
    for searches in range(limit + 1):
        request = Write(
            SEARCH_INSIDE, text, so_far=chain, stop=("</search>", "</answer>"), thinking=True
        )
        reply = yield request
        query = parse_query(BASELINE, reply)
        if not query or searches == limit:
            break
        chain += reply
        found = yield Look(query)
        notes = yield Write(
            DIGEST, text, [found], notes=f"Reasoning so far:\n{chain}\n\nQuery: {query}"
        )
        chain += (
            f"\n\n<information>\n{strip_tags(notes, BASELINE.tags).strip()}\n</information>\n\n"
        )
    return (yield from conclude(request, reply))


# name -> (the method, its paper's bound on searches; Search-o1's and RAT's are ours)
METHODS: dict[str, tuple[Callable[[Question, int], Steps], int]] = {
    "direct": (direct, 0),
    "cot": (chain_of_thought, 0),
    "rag": (rag, 1),
    "ircot": (ircot, 8),
    "iter_retgen": (iter_retgen, 2),
    "self_ask": (self_ask, 10),
    "rat": (rat, 8),
    "search_o1": (search_o1, 10),
}


# -------------------------------------------------------------------------------- what a reply says


def conclude(request: Write, reply: str) -> Steps:
    """The answer that the reply to `request` says; where it says none, the model has to complete
    "So the final answer is:".
    """
    if answer := said_answer(reply):
        return answer
    parts = [request.so_far, strip_tags(reply, BASELINE.tags), FINAL]
    so_far = "\n".join(part.strip() for part in parts if part.strip())
    return any_answer(
        (yield replace(request, so_far=so_far, stop=(BASELINE.answer_tags[1],), thinking=False))
    )


_SAID = re.compile(r"answer is\s*+:?\s*+([^\n]*\w[^\n]*)", re.IGNORECASE)


def said_answer(reply: str) -> str | None:
    """The last <answer> box, the last \\boxed{...}, or what stands behind the last "answer is";
    None if it says none.

    >>> said_answer("He was born in St. Ives. So the answer is: St. Ives. That is all."), said_answer("I cannot tell.")
    ('St. Ives', None)
    """
    if answer := last_block(reply, BASELINE.answer_tags) or last_boxed(reply):
        return answer
    said = _SAID.findall(strip_tags(reply, BASELINE.answer_tags))
    return first_sentence(said[-1]).rstrip(" .") or None if said else None


def any_answer(reply: str) -> str:
    """What the reply says, or its first sentence: for replies that should be nothing but the
    answer.
    """
    return said_answer(reply) or first_sentence(strip_tags(read_answer(reply), BASELINE.tags))


# A full stop behind one capital letter, one digit (of a numbered list) or a title does not end a
# sentence.
_SENTENCE = re.compile(
    r"[^\n]*?(?:(?<!\b[A-Z\d])(?<!\b[DMS]r)(?<!\bSt)(?<!\bMrs)(?<!\bvs)[.!?][\"')\]]*(?=\s|$)|(?=\n|$))"
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


def paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def one_line(text: str) -> str:
    return strip_tags(text, BASELINE.tags).strip().split("\n")[0].strip(" \"'")


def until(reply: str, stop: Sequence[str]) -> str:
    """The reply up to and with the first of `stop`: a server does not stop there by itself."""
    ends = [place + len(text) for text in stop if (place := reply.find(text)) >= 0]
    return reply[: min(ends)] if ends else reply


# ----------------------------------------------------------------------- many questions in lockstep


class Row:
    """One question under way: its method, halted at `request`, and the trajectory that it leaves.
    `request` None: ended.
    """

    def __init__(self, method: Callable[[Question, int], Steps], question: Question, limit: int):
        self.trajectory, self.steps = Trajectory(question, BASELINE), method(question, limit)
        self.request: Write | Look | None = next(self.steps)

    def hand(self, reply: str | list[str]) -> None:
        """Hand the method what it asked for; it runs on to its next request, or to its end."""
        try:
            self.request = self.steps.send(reply)
        except StopIteration as end:
            self.end(end.value)

    def end(self, answer: str | None) -> None:
        """The answer goes into the one answer box of the transcript, so that it is graded like
        everybody else's.
        """
        self.request, answer = None, strip_tags(answer or "", BASELINE.tags).strip()
        self.trajectory.stop_reason = self.trajectory.stop_reason or ("answer" if answer else "eos")
        if answer:
            self.trajectory.append_model([], [], f"<answer> {answer} </answer>")


def run_method(
    name: str,
    questions: list[Question],
    generate,
    search: SearchFunction,
    limits: Limits,
    max_searches: int = 0,
    retries: int = 2,
    timeout: float = 60.0,
    at_once: int = AT_ONCE,
) -> Iterator[Trajectory]:
    """Trajectories of one method, each as soon as it ends (not in the order of the questions),
    without token ids.

    generate       `Local`, `Asked` or anything like them: generate(requests, stop) -> a reply or
                   None for each, generate.length(request) in tokens, generate.tokenizer
    limits         max_turn_tokens, max_context and document_tokens count
    max_searches   in place of the paper's own bound; 0 = that one. rag always searches once, direct
                   and cot never
    A trajectory with stop_reason "no reply" is one to which the model did not come: it can be asked
    again. Raises InputError, before anything is asked, for a question that does not fit the context
    by itself.
    """
    if name not in METHODS:
        raise InputError(f"--method {name}: unknown; all, or some of {', '.join(METHODS)}")
    for question in questions:
        fitted(
            Write(max(INSTRUCTIONS, key=len), question_text(question)), generate, limits, question
        )
    method, bound = METHODS[name]
    environment = Environment(
        generate.tokenizer, BASELINE, search, document_limits(limits), retries, timeout
    )
    environment.forbidden = [*environment.forbidden, *LABELS]
    waiting, live = iter(questions), []
    while live := live + [
        Row(method, q, max_searches or bound)
        for q in itertools.islice(waiting, at_once - len(live))
    ]:
        look_all([row for row in live if isinstance(row.request, Look)], environment)
        write_all([row for row in live if isinstance(row.request, Write)], generate, limits)
        yield from (row.trajectory for row in live if row.request is None)
        live = [row for row in live if row.request is not None]


def document_limits(limits: Limits) -> Limits:
    """For the environment, which writes a log and no context: one search takes at most half a
    context.
    """
    return replace(
        limits,
        max_context=2**31,
        document_tokens=min(limits.document_tokens, limits.max_context // 2),
    )


def write_all(rows: list[Row], generate, limits: Limits) -> None:
    """One batch for each way of stopping; a method has at most two."""
    for stop in dict.fromkeys(row.request.stop for row in rows):
        some = [row for row in rows if row.request.stop == stop]
        requests = [fitted(row.request, generate, limits, row.trajectory.question) for row in some]
        for row, reply in zip(some, generate(requests, stop), strict=True):
            if reply is None:
                row.trajectory.stop_reason = "no reply"
                row.end(None)
                continue
            reply = until(reply, stop)
            # the transcript holds one answer box, and tags of searches that were made
            row.trajectory.append_model([], [], f"{strip_tags(reply, BASELINE.tags).strip()}\n\n")
            row.hand(reply)
        rows = [row for row in rows if row not in some]


def look_all(rows: list[Row], environment: Environment) -> None:
    """All rows' searches in one call, under the rollout's own rules: retries, time limit, tags
    stripped, cut to the budget.
    """
    asking = [
        (row.trajectory, " ".join(strip_tags(row.request.query, BASELINE.tags).split()))
        for row in rows
    ]
    for trajectory, query in asking:
        trajectory.append_environment([], f"<search> {query} </search>", "notice")
    if asking:
        environment.execute(asking)
    for row in rows:
        row.hand(row.trajectory.searches[-1].text.split("\n"))


def fitted(request: Write, generate, limits: Limits, question: Question) -> Write:
    """The request, so short that a reply still fits into the context: the oldest search's last
    passage goes first, then the front of the notes and of what was written so far.
    """
    room = min(limits.max_turn_tokens, limits.max_context // 4)
    while (length := generate.length(request)) > limits.max_context - room:
        if request.found:
            oldest, *others = request.found
            request = replace(request, found=[oldest[:-1], *others] if len(oldest) > 1 else others)
        elif request.notes or request.so_far:
            notes, so_far = (text[len(text) // 8 + 1 :] for text in (request.notes, request.so_far))
            request = replace(request, notes=notes, so_far=so_far)
        else:
            raise InputError(
                f"question {question.id}: its prompt has {length} tokens and the context is"
                f" {limits.max_context}, of which {room} are kept for the reply: shorten it, or"
                " raise --max_context"
            )
    return request


# --------------------------------------------------------------------------------------- who writes


def user_text(request: Write) -> str:
    """What the model reads: passages (each once, without their numbers), question, notes."""
    lines = dict.fromkeys(
        re.sub(r"^\(\d+\) ", "", line) for found in request.found for line in found
    )
    parts = [
        "Passages:\n" + "\n".join(lines) if lines else "",
        f"Question: {request.question}" if request.question else "",
        request.notes,
    ]
    return "\n\n".join(part for part in parts if part)


class Local:
    """A HF model in this process. `so_far` is put into its mouth: the reply goes on in the model's
    own turn.

    ask   (request) -> (prompt, opening of the reply); default: the chat template, where there is
          one
    """

    def __init__(
        self,
        policy,
        tokenizer,
        limits: Limits,
        temperature: float = 0.0,
        top_p: float = 1.0,
        batch_size: int = 0,
        seed: int = 0,
        ask: Callable[[Write], tuple[str, str]] | None = None,
    ):
        self.policy, self.tokenizer, self.limits, self.batch_size = (
            policy,
            tokenizer,
            limits,
            batch_size,
        )
        self.temperature, self.top_p, self.seed, self.ask = (
            temperature,
            top_p,
            seed,
            ask or self.chat,
        )
        self.special = special_texts(tokenizer)

    def chat(self, request: Write) -> tuple[str, str]:
        # passages and earlier replies must not open a turn of their own
        text, so_far = (
            strip_tags(user_text(request), self.special),
            strip_tags(request.so_far, self.special),
        )
        prompt = chat_text(self.tokenizer, request.instruction, text)
        return prompt + (" " if so_far and not prompt[-1].isspace() else "") + so_far, ""

    def length(self, request: Write) -> int:
        return len(self.ids(request))

    def ids(self, request: Write) -> list[int]:
        return encode(self.tokenizer, "".join(self.ask(request)))

    def __call__(self, requests: list[Write], stop: tuple[str, ...]) -> list[str]:
        size = self.batch_size or len(requests)
        batches = [requests[start : start + size] for start in range(0, len(requests), size)]
        return [reply for some in batches for reply in self.batch(some, stop)]

    def batch(self, requests: list[Write], stop: tuple[str, ...]) -> list[str]:
        contexts = [self.ids(request) for request in requests]
        room = [
            min(self.limits.max_turn_tokens, self.limits.max_context - len(context))
            for context in contexts
        ]
        self.seed += 1  # each batch draws anew
        with seeded(self.seed, self.policy.device):
            turns = sample_turns(
                self.policy, self.tokenizer, contexts, room, stop, self.temperature, self.top_p
            )
        return [self.decode(request, ids) for request, ids in zip(requests, turns.ids, strict=True)]

    def decode(self, request: Write, ids: list[int]) -> str:
        reply = self.ask(request)[1] + self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return reply if request.thinking else without_thinking(reply)


class Estimate:
    """In place of the tokenizer of a model that is elsewhere: 3 characters a token, which is too
    many tokens for English.
    """

    def __call__(self, text: str, **_) -> dict:
        return {"input_ids": [0] * -(-len(text) // 3)}


class Asked:
    """A model behind `llm.ask`, such as a server. It cannot be given the beginning of its reply: it
    is shown it.
    """

    def __init__(self, llm):
        self.llm, self.tokenizer = llm, Estimate()

    def text(self, request: Write) -> str:
        shown = (
            "\n\nThis is your reply so far. Go on where it ends, and repeat"
            f" nothing:\n{request.so_far}"
        )
        return user_text(request) + (shown if request.so_far else "")

    def length(self, request: Write) -> int:
        return len(encode(self.tokenizer, request.instruction + self.text(request)))

    def __call__(self, requests: list[Write], stop: tuple[str, ...]) -> list[str | None]:
        replies = self.llm.ask([(request.instruction, self.text(request)) for request in requests])
        pairs = zip(replies, requests, strict=True)
        return [
            None if reply is None else reply.removeprefix(request.so_far.strip())
            for reply, request in pairs
        ]


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


# --------------------------------------------------------------------------------- the command line

FLAGS = [
    name
    for name in SHARED
    if name not in ("stage", "prompt_file", "name", "protocol", "retrieval", "notices", "engine")
]
OPTIONS = ("method", "split", "questions", "fact_seed", "out", "json")
NOT_KEPT = (  # settings that no prediction depends on
    "runs",
    "vectors",
    "web_rate",
    "resume",
    "skip_bad",
    "rollout_batch_size",
    "search_timeout",
    "search_retries",
    "llm_timeout",
    "llm_retries",
    "llm_cache",
)


def parse(arguments: list[str]) -> tuple[Recipe, dict]:
    parser = FlagParser(
        "baselines.py", description="Score the methods that the papers compare with."
    )
    parser.add_argument("--method", default="", help=f"all, or some of {','.join(METHODS)}")
    add_flags(parser, FLAGS)
    parser.add_argument(
        "--split", default="test", choices=["train", "dev", "test"], help="of the built-in world"
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=100,
        help="per kind in the built-in world; of a file, 0 = all",
    )
    parser.add_argument(
        "--fact_seed", type=int, default=None, help="redraw every fact of the built-in world"
    )
    parser.add_argument(
        "--out",
        default="",
        help="folder of the predictions, METHOD.jsonl each; default: in runs/baselines",
    )
    parser.add_argument(
        "--json", default="", help="write the table, by kind of question too, to this file"
    )
    given = vars(parser.parse_args(arguments))
    options = {k: given.pop(k) for k in OPTIONS}
    options["method"] = chosen_methods(options["method"])
    if options["questions"] < 0:
        raise InputError("--questions must be at least 0 (all)")
    if given.get("max_searches") == 0:
        raise InputError("--max_searches 0: the methods without a search are --method direct,cot")
    options["max_searches"] = given.get("max_searches", 0)
    return recipe_of(given), options


def chosen_methods(names: str) -> list[str]:
    chosen = (
        list(METHODS)
        if names == "all"
        else [name.strip() for name in names.split(",") if name.strip()]
    )
    if wrong := [name for name in chosen if name not in METHODS] or ([] if chosen else [""]):
        raise InputError(
            f"--method {wrong[0]}".rstrip() + f": give all, or some of {','.join(METHODS)}"
        )
    return list(dict.fromkeys(chosen))


def recipe_of(given: dict) -> Recipe:
    """The recipe names the tiny model and gives the limits; greedy unless told otherwise."""
    name = given.get("recipe", "ur2")
    recipe = resolve(name, 1, not given.get("data"), {"temperature": 0.0, "top_p": 1.0, **given})
    if build_protocol(recipe).query_tags is None:
        raise InputError(
            f"--recipe {name} never searches, so its model and retriever cannot be compared: choose"
            " another"
        )
    if is_url(recipe.model) and recipe.temperature:
        raise InputError("--temperature: a server is asked greedily; leave it out")
    return check_recipe(recipe, training=False)


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def load_writer(recipe: Recipe) -> tuple[Local | Asked, Limits]:
    """Who writes, and the limits. A server's context is taken to be 4096 tokens unless
    --max_context says otherwise.
    """
    limits = Limits(
        max_turn_tokens=recipe.max_turn_tokens,
        max_context=recipe.max_context or 4096,
        document_tokens=recipe.document_tokens,
    )
    if is_url(recipe.model):
        cache = recipe.llm_cache or str(Path(recipe.runs) / "llm_cache")
        return (
            Asked(
                load_llm(
                    recipe.model,
                    cache=cache,
                    timeout=recipe.llm_timeout,
                    retries=recipe.llm_retries,
                    max_tokens=recipe.max_turn_tokens,
                )
            ),
            limits,
        )
    policy, tokenizer = load_model(recipe, recipe.model, best_device(), frozen=True)
    limits = replace(limits, max_context=context_of(policy, recipe.max_context or None))
    if limits.max_context > context_of(policy, None):
        raise InputError(
            f"--max_context {limits.max_context}: the model has {context_of(policy, None)}"
            " positions"
        )
    ask = (
        None
        if recipe.data
        else lambda request: tiny_prompt(request, tokenizer, build_protocol(recipe))
    )
    sampling = (recipe.temperature, recipe.top_p, recipe.rollout_batch_size, recipe.seed)
    return Local(policy, tokenizer, limits, *sampling, ask), limits


def default_folder(recipe: Recipe, options: dict) -> Path:
    of = questions_name(recipe, options["split"])
    who = recipe.model or f"warm-{recipe.protocol}"
    return (
        Path(recipe.runs)
        / "baselines"
        / re.sub(r"[^\w.+-]+", "-", f"{who}-{of}-{recipe.retriever}").lstrip("-.")
    )


def check_folder(folder: Path, recipe: Recipe, options: dict, made_with: dict) -> None:
    """One folder holds predictions under one set of settings, of one model's weights, over the same
    passages: a run that goes on with another's would mix them up.
    """
    settings = {
        **{k: v for k, v in dataclasses.asdict(recipe).items() if k in FLAGS and k not in NOT_KEPT},
        **{k: options[k] for k in ("split", "fact_seed", "max_searches")},
        **{k: made_with[k] for k in ("weights", "material")},
    }
    path = folder / "settings.json"
    before = (finished_records(path, cut=False) or [settings])[0]
    if changed := [k for k in settings if before.get(k) != settings[k]]:
        what = {"weights": "other weights", "material": "other passages"}.get(
            changed[0],
            f"--{changed[0]} {before.get(changed[0])}, and now it is {settings[changed[0]]}",
        )
        raise InputError(
            f"--out {folder} holds predictions with {what}: name another folder, or delete this one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings) + "\n", encoding="utf-8")


def record_of(trajectory: Trajectory, method: str, dataset: str) -> dict:
    return {
        **prediction_record(trajectory, 0),
        "method": method,
        **({"dataset": dataset} if dataset else {}),
    }


def collect(
    name: str,
    datasets: dict[str, list[Question]],
    path: Path,
    run: Callable[[list[Question]], Iterator[Trajectory]],
) -> list[dict]:
    """A record for each question, in their order: those that `path` has, and the others, written
    there as they come.
    """
    dataset_of = {
        question.id: name if len(datasets) > 1 else ""
        for name, some in datasets.items()
        for question in some
    }
    records = {record["id"]: record for record in finished_records(path)}
    for question in (
        question for some in datasets.values() for question in some
    ):  # more or fewer of them may be asked now
        kept = records.get(question.id, {"question": question.question, "golds": question.answers})
        if (kept["question"], kept["golds"]) != (question.question, question.answers):
            raise InputError(
                f"{path}: question {question.id} was another one then: name another --out, or"
                " delete this one"
            )
    missing = [
        question for some in datasets.values() for question in some if question.id not in records
    ]
    trajectories = (
        run(missing) if missing else []
    )  # before the bar: a model that cannot be loaded is told of in a line
    with tqdm(
        total=len(dataset_of), initial=len(dataset_of) - len(missing), desc=name, dynamic_ncols=True
    ) as bar:
        for trajectory in trajectories:
            question_id = trajectory.question.id
            if trajectory.stop_reason != "no reply":
                records[question_id] = record_of(trajectory, name, dataset_of[question_id])
                append_jsonl(path, [records[question_id]])
            bar.update()
    return [records[question_id] for question_id in dataset_of if question_id in records]


def tell_faults(name: str, records: list[dict], asked: int) -> None:
    """What went wrong, where something did."""
    if len(records) < asked:
        print(
            f"{name}: {asked - len(records)} of {asked} questions got no reply and are left out;"
            " the same command asks again"
        )
    if failed := sum(bool(search["error"]) for record in records for search in record["searches"]):
        print(f"{name}: {failed} searches failed; the model was told so")


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        demo()
        return
    recipe, options = parse(arguments)
    datasets, documents = material(recipe, options)
    folder = Path(options["out"] or default_folder(recipe, options))
    if options["json"]:
        check_output(options["json"], "--json")
    check_output(folder / "settings.json", "--out")
    version = weights_version(recipe.model) if recipe.model else "built-in"
    check_folder(folder, recipe, options, signature(recipe, 1, version, [], documents))
    loaded: list = []  # only if something is missing

    def run(name: str, missing: list[Question]) -> Iterator[Trajectory]:
        if not loaded:
            loaded.extend([*load_writer(recipe), build_search(recipe, documents, best_device())])
        generate, limits, search = loaded
        return run_method(
            name,
            missing,
            generate,
            search,
            limits,
            options["max_searches"],
            recipe.search_retries,
            search_seconds(recipe),
        )

    summaries = {}
    try:
        for name in options["method"]:
            records = collect(
                name,
                datasets,
                folder / f"{name}.jsonl",
                lambda missing, name=name: run(name, missing),
            )
            tell_faults(name, records, sum(map(len, datasets.values())))
            summaries |= {name: summarise(records)} if records else {}
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; the predictions that were finished are in {folder}: the same command"
            " goes on"
        )
        sys.exit(130)
    print(
        table({name: summary["all"] for name, summary in summaries.items()}).replace(
            "kind  ", "method"
        )
    )
    print(f"predictions: {folder}/METHOD.jsonl")
    if options["json"]:
        Path(options["json"]).parent.mkdir(parents=True, exist_ok=True)
        Path(options["json"]).write_text(json.dumps(summaries, indent=1) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------ on one screen


class Scripted:
    """In place of a model: it says these replies, one after the other, and keeps what it was
    asked.
    """

    def __init__(self, replies: Sequence[str | None]):
        self.replies, self.requests, self.tokenizer = iter(replies), [], Estimate()

    def length(self, request: Write) -> int:
        return len(
            encode(self.tokenizer, request.instruction + user_text(request) + request.so_far)
        )

    def __call__(self, requests: list[Write], stop: tuple[str, ...]) -> list[str | None]:
        self.requests += requests
        return [next(self.replies) for _ in requests]


DEMO_PASSAGES = [
    Document(str(i), title, text)
    for i, (title, text) in enumerate(
        [
            ("Ana Bell", "Ana Bell was born in Kelmouth and draws maps of the coast."),
            ("Kelmouth", "Kelmouth is a harbour city. It lies in Norland."),
            ("Norland", "Norland is a country of three islands. Its capital is Varen."),
            ("Tidewerk", "Tidewerk builds lanterns. It is a company with seat in Varen."),
        ]
    )
]
DEMO_QUESTION = Question("demo", "Which country was Ana Bell born in?", ["Norland"])
DEMO_REPLIES = {
    "direct": ["<answer> Sudria </answer>"],
    "cot": ["Ana Bell sounds like a name from Sudria. <answer> Sudria </answer>"],
    "rag": ["<answer> Kelmouth </answer>"],
    "ircot": [
        "Ana Bell was born in Kelmouth.",
        "Kelmouth lies in Norland.",
        "So the answer is: Norland.",
    ],
    "iter_retgen": [
        "Born in Kelmouth. <answer> Kelmouth </answer>",
        "Kelmouth lies in Norland. <answer> Norland </answer>",
    ],
    "self_ask": [
        "Follow up: Where was Ana Bell born?",
        "Kelmouth",
        "Follow up: Which country does Kelmouth lie in?",
        "Norland",
        "So the final answer is: Norland.",
    ],
    "rat": [
        "Ana Bell was born in Varen.\n\nSo the final answer is: Sudria.",
        "Ana Bell birthplace",
        "Ana Bell was born in Kelmouth.",
        "Kelmouth country",
        "So the final answer is: Norland.",
    ],
    "search_o1": [
        "I need her birthplace. <search> Ana Bell born </search>",
        "Ana Bell was born in Kelmouth.",
        "And its country? <search> Kelmouth lies in </search>",
        "Kelmouth lies in Norland.",
        "So it is Norland. <answer> Norland </answer>",
    ],
}


def demo() -> None:
    search = make_search(BM25(DEMO_PASSAGES), k=2)
    print(
        f"{DEMO_QUESTION.question}  gold: {DEMO_QUESTION.answers[0]}   (a scripted model, BM25 over"
        " four passages)"
    )
    for name, replies in DEMO_REPLIES.items():
        generate = Scripted(replies)
        trajectory = next(run_method(name, [DEMO_QUESTION], generate, search, Limits()))
        print(
            f"\n{name:12} {len(generate.requests)} generations, {len(trajectory.searches)} searches"
        )
        for found in trajectory.searches:
            print(
                f"    search   {found.query:78} ->"
                f" {', '.join(document.title for document in found.documents)}"
            )
        print(f"    answer   {trajectory.answer}")


if __name__ == "__main__":
    run_main(main)
