"""The methods that the papers compare with, on the retriever, limits and metrics of all else here.

    direct        answer                                                               no search
    cot           think, answer                                            Wei 2022    no search
    rag           search the question, read, answer                        Lewis 2020          1
    sure          search, sum up for each of two answers, compare          Kim 2024            1
    ircot         search, one sentence, search that sentence, ...          Trivedi 2023  up to 8
    iter_retgen   search question + last answer, answer anew, T times      Shao 2023       T = 2
    self_ask      follow-up question, its answer by search, ... or rag     Press 2023   up to 10
    rat           draft, then revise paragraph by paragraph                Wang 2024     up to 8
    search_o1     search inside the reasoning, insert digested notes       Li 2025      up to 10

A method is a generator: it yields a `Write` (the model writes on) or a query, is sent the reply,
and returns its answer. `run_method` drives many questions: one search call, one batch for all.

    python -m lab.baselines                        all, on the built-in world with its tiny model
    python -m lab.baselines --method rag,ircot --model SPEC --data FILE --corpus FILE
                                                   SPEC: a HF model, or http://host:port/v1#model

The prompts are ours, for chat models, asked greedily. Pages come without tags and labels, for a
model in this process without special tokens too. The same command asks again where no reply came.
A search of --data finds 5 passages, as in UR² app. C.4 for Qwen and Llama; its 4.3 and 4.4 have 10.
Left out: the papers' few-shot examples, searching inside a reasoning model's <think>.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from data import Question, SearchResult, strip_tags
from errors import InputError, check_output, check_value, run_main, setting
from eval import Evaluation, Options
from lab import interruptible, parse_flags
from metrics import last_boxed
from other_models.llm import LocalLLM, Request, load_llm
from other_models.reader import read_answer
from plumbing.build import build_protocol, build_search, load_model
from plumbing.report import summarise, table
from policy import best_device, weights_version
from prompts import (
    Protocol,
    frame_documents,
    last_block,
    parse_query,
    prompt_text,
    question_text,
    tag_pair,
)
from rollout import Environment, context_of, encode
from settings import RECORDS, Settings, check_settings, resolve
from trajectory import Trajectory

BASELINE = Protocol("baseline", *map(tag_pair, ("search", "information", "answer")), "", "")
LABELS = FOLLOW_UP, TOLD, FINAL = "Follow up:", "Intermediate answer:", "So the final answer is:"
NO_REPLY = "no reply"  # why a trajectory ended whose model could not be reached


@dataclass(frozen=True)
class Write:
    """The model reads passages, question and notes, in this order, and goes on behind `so_far`."""

    instruction: str
    question: str
    found: Sequence[str] = ()  # lines, the latest search's first; a short context drops the last
    notes: str = ""  # more to read; where even that does not fit, cut from the front
    so_far: str = ""  # the beginning of the model's own reply


# Handed to a method: for a `Write` the text, for a query the lines that a policy would read.
Steps = Generator[Write | str, "str | list[str]", "str | None"]

SHORT = "in as few words as possible: a name, a date, a number, yes or no, or an option's letter"
BOX = "<answer> your answer </answer>"
DIRECT = f"Answer the question {SHORT}. Reply with nothing but {BOX}."
READ = f"Answer from the passages or, if they do not help, from what you know. {DIRECT}"
THINK = f"Think step by step, in a few short sentences. Then answer the question {SHORT}, as {BOX}."
READ_AND_THINK = f"Read the passages; where they say nothing, use what you know. {THINK}"
ONE_SENTENCE = (
    "Work towards the answer. Write the next sentence only: one fact from the passages, with full"
    " names. Once nothing is missing, write: So the answer is: the answer, in a few words."
)
CANDIDATES = (
    "Read the passages. Write the two likeliest answers to the question, the likelier first, each"
    f" {SHORT}. Reply with two lines, an answer on each, and nothing else."
)
SUPPORT = (
    "Sum up in a few sentences what the passages say in favour of the suggested answer, and nothing"
    " that is not in them. Where they say nothing in its favour, say that."
)
HOLDS = (
    "Does the summary show that the suggested answer is right? Reply with one word only: yes or no."
)
BETTER = "Which summary answers the question better? Reply with its letter only: A or B."
SELF_ASK = (
    f'Split the question into simpler ones. While a fact is missing, write "{FOLLOW_UP}" and one'
    f' question that can be understood by itself, and stop; "{TOLD}" then tells its answer. When'
    f' nothing is missing, write "{FINAL}" and the answer {SHORT}.'
)
DRAFT = (
    "Write down step by step how the question can be answered, each step a short paragraph with a"
    f' blank line behind it. End with a paragraph "{FINAL}" and the answer {SHORT}.'
)
TO_QUERY = "Write a short search query that checks the last of these paragraphs, and nothing else."
REVISE = (
    "Revise the last of these paragraphs: correct what the passages contradict and add what they"
    " say to the point. Reply with the revised paragraph only."
)
SEARCH_INSIDE = (
    "Reason step by step towards the answer. Whenever a fact is missing or uncertain, write"
    " <search> a short query </search> and stop; notes of what was found are given to you between"
    f" <information> and </information>, and you go on. Finish with the answer {SHORT}, as {BOX}."
)
DIGEST = (
    "Write down, in a few sentences, only what the passages say that helps this reasoning on. If"
    " they say nothing, write: Nothing helpful was found."
)


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
    found = yield question.question
    return any_answer((yield Write(READ, question_text(question), found)))


def sure(question: Question, limit: int = 1) -> Steps:
    """SuRe (Kim 2024): two answers, each with a summary of the passages in its favour. An answer's
    score is 1 if its summary holds + ½ for each comparison won; of two equal ones the first wins.
    """
    found, text = (yield question.question), question_text(question)
    lines = strip_tags((yield Write(CANDIDATES, text, found)), BASELINE.tags).splitlines()
    plain = [re.sub(r"^\s*(?:\d[.):]|[-*])\s+", "", line).strip() for line in lines]  # no "1. "
    candidates = list(dict.fromkeys(filter(None, plain)))[:2]
    if len(candidates) < 2:
        return any_answer("".join(candidates))
    scores, summaries = [], []
    for candidate in candidates:
        suggested = f"Suggested answer: {candidate}"
        summary = yield Write(SUPPORT, text, found, suggested)
        summaries.append(f"{suggested}\nSummary: {strip_tags(summary, BASELINE.tags).strip()}")
        holds = yield Write(HOLDS, text, notes=summaries[-1])
        scores.append(float(re.match(r"\W*yes\b", holds, re.IGNORECASE) is not None))
    for order in ((0, 1), (1, 0)):  # a model may like what it reads first
        a, b = (summaries[i] for i in order)
        better = yield Write(BETTER, text, notes=f"A. {a}\n\nB. {b}")
        if letter := re.search(r"\b[AB]\b", better):
            scores[order["AB".index(letter.group())]] += 0.5
    return candidates[scores.index(max(scores))]


def ircot(question: Question, limit: int = 8) -> Steps:
    """IRCoT (Trivedi 2023): each new sentence is the next query, and passages pile up."""
    found, chain, query = [], "", question.question
    for _ in range(limit):
        found = (yield query) + found
        request = Write(ONE_SENTENCE, question_text(question), found, so_far=chain)
        query = first_sentence((yield request))
        if not query or said_answer(query):
            break
        chain = f"{chain} {query}".strip()
    else:
        request, query = replace(request, so_far=chain), ""
    return (yield from conclude(request, query))


def iter_retgen(question: Question, limit: int = 2) -> Steps:
    """Iter-RetGen (Shao 2023): y_t = answer(question, passages for question + y_{t−1})."""
    reply = ""
    for _ in range(limit):
        found = yield f"{question.question} {reply}"
        request = Write(READ_AND_THINK, question_text(question), found)
        reply = yield request
    return (yield from conclude(request, reply))


def self_ask(question: Question, limit: int = 10) -> Steps:
    """Self-Ask (Press 2023): the answer to a simpler question is read out of passages. It is RAG
    (UR² app. C.4) if it asks no question and says no answer, or asks `limit` of them in vain.
    """
    chain = ""
    for _ in range(limit):
        reply = yield Write(SELF_ASK, question_text(question), so_far=chain)
        if not (follow_up := next_question(reply)):
            break
        found = yield follow_up
        read = any_answer((yield Write(READ, follow_up, found)))
        chain += f"{FOLLOW_UP} {follow_up}\n{TOLD} {read or 'unknown'}\n"
    return said_answer(reply) or (yield from rag(question))


def rat(question: Question, limit: int = 8) -> Steps:
    """RAT (Wang 2024): the draft's first `limit` paragraphs are looked up and revised in turn."""
    text = question_text(question)
    draft = [p.strip() for p in re.split(r"\n\s*\n", (yield Write(DRAFT, text))) if p.strip()]
    revised: list[str] = []
    for paragraph in draft[:limit]:
        notes = "\n\n".join([*revised, paragraph])
        line = strip_tags((yield Write(TO_QUERY, text, notes=notes)), BASELINE.tags).strip()
        found = yield line.split("\n")[0].strip(" \"'") or paragraph
        reply = yield Write(REVISE, text, found, notes)
        revised.append(reply.strip() or paragraph)
    *before, last = [*revised, *draft[limit:]] or [""]
    so_far = "".join(f"{paragraph}\n\n" for paragraph in before)
    return (yield from conclude(Write(DRAFT, text, so_far=so_far), last))


def search_o1(question: Question, limit: int = 10) -> Steps:
    """Search-o1 (Li 2025): another call of the model reads the pages; only its notes go in."""
    text, chain = question_text(question), ""
    for searches in range(limit + 1):
        request = Write(SEARCH_INSIDE, text, so_far=chain)
        reply = yield request
        query = parse_query(BASELINE, reply)
        if not query or searches == limit:
            break
        chain += reply
        found = yield query
        asked = f"Reasoning so far:\n{chain}\n\nQuery: {query}"
        notes = strip_tags((yield Write(DIGEST, text, found, asked)), BASELINE.tags)
        chain += f"\n\n<information>\n{notes.strip()}\n</information>\n\n"
    return (yield from conclude(request, reply))


ALL = (direct, cot, rag, sure, ircot, iter_retgen, self_ask, rat, search_o1)
METHODS: dict[str, Callable[..., Steps]] = {method.__name__: method for method in ALL}


# -------------------------------------------------------------------------------- what a reply says
def conclude(request: Write, reply: str) -> Steps:
    """The answer that the reply says; where it says none, the model has to complete FINAL."""
    if answer := said_answer(reply):
        return answer
    parts = [request.so_far, strip_tags(reply, BASELINE.tags), FINAL]
    so_far = "\n".join(part.strip() for part in parts if part.strip())
    return any_answer((yield replace(request, so_far=so_far)))


# Possessive `\s*+`: blanks without end behind "is" must not cost the square of their number.
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
_END = re.compile(r"(?<!\b[A-Z\d])(?<!\b[DMS]r)(?<!\bSt)(?<!\bMrs)(?<!\bvs)[.!?][\"')\]]*(?=\s|$)")


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence, or of its first line."""
    line = text.strip().partition("\n")[0]
    end = _END.search(line)
    return line[: end.end()] if end else line.strip()


_FOLLOW_UP = re.compile(r"follow[- ]?up(?: question)?\s*+:([^\n]*)", re.IGNORECASE)


def next_question(reply: str) -> str:
    """Self-Ask's next question; "" if the reply asks none before it says an answer."""
    asked = _FOLLOW_UP.search(_SAID.split(reply)[0])
    return asked.group(1).partition(TOLD)[0].strip() if asked else ""


# ----------------------------------------------------------------------- many questions in lockstep
# A model that does not stop where the environment goes on is cut there.
_TURN = re.compile(rf".*?(?:</search>|</answer>|{TOLD}|\Z)", re.DOTALL)


class Row:
    """One question under way: its method, halted at `request` (None: ended), and its trajectory."""

    def __init__(self, question: Question, steps: Steps):
        self.trajectory, self.steps = Trajectory(question, BASELINE), steps
        self.request: Write | str | None = next(steps)

    def search(self) -> tuple[Trajectory, str]:
        """(trajectory, query) of a method that asked for a search."""
        query = " ".join(strip_tags(self.request, BASELINE.tags).split())
        self.trajectory.append_environment([], f"<search> {query} </search>", "notice")
        return self.trajectory, query

    def read(self, reply: str | None) -> None:
        """What the model wrote; None where no reply came."""
        if reply is None:
            self.trajectory.stop_reason, self.request = NO_REPLY, None
            return
        reply = _TURN.match(reply).group()
        # In a transcript tags mean a search that was made, or the answer.
        text = strip_tags(reply, BASELINE.tags).strip()
        self.trajectory.append_model([], [], f"{text}\n\n")
        self.hand(reply)

    def hand(self, reply: str | list[str]) -> None:
        """Hand the method what it asked for; it runs on to its next request, or to its end."""
        try:
            self.request = self.steps.send(reply)
        except StopIteration as end:  # one answer box, so that it is graded like everybody else's
            answer = strip_tags(end.value or "", BASELINE.tags).strip()
            self.request, self.trajectory.stop_reason = None, "answer" if answer else "eos"
            if answer:
                self.trajectory.append_model([], [], f"<answer> {answer} </answer>")


def run_method(name: str, questions: list, writer: Writer, search, settings: Settings) -> list:
    """A trajectory for each question, without token ids. max_searches 0: the paper's own bound."""
    limit = [settings.max_searches] if settings.max_searches else []
    # This environment writes a log and no context; one search takes at most half a prompt.
    most = min(settings.document_tokens, writer.room // 2)
    unbounded = replace(settings, max_context=2**31, document_tokens=most)
    environment = Environment(writer.tokenizer, BASELINE, search, unbounded)
    environment.forbidden += LABELS
    # To a method a query that a server rejects has found nothing.
    environment.refuse = lambda row, its, _: environment.write(row, its.query, SearchResult())
    rows = [Row(question, METHODS[name](question, *limit)) for question in questions]
    while any(row.request for row in rows):
        # All searches in one call, under the rollout's own rules of retries and budgets.
        if asking := [row for row in rows if isinstance(row.request, str)]:
            environment.execute([row.search() for row in asking])
        for row in asking:
            row.hand(row.trajectory.searches[-1].text.split("\n"))
        writing = [row for row in rows if isinstance(row.request, Write)]
        replies = writer([fitted(row.request, writer) for row in writing])
        for row, reply in zip(writing, replies, strict=True):
            row.read(reply)
    return [row.trajectory for row in rows]


def fitted(request: Write, writer: Writer) -> Write:
    """The request, so short that a reply still fits into the context."""
    while (length := writer.length(request)) > writer.room:
        if request.found:
            request = replace(request, found=request.found[:-1])
        elif request.notes or request.so_far:
            notes, so_far = (text[len(text) // 8 + 1 :] for text in (request.notes, request.so_far))
            request = replace(request, notes=notes, so_far=so_far)
        else:
            said = f"a prompt of {length} tokens, and {writer.room} fit: raise --max_context"
            raise InputError(f"{request.question[:60]!r}: {said}")
    return request


def chat_request(write: Write) -> Request:
    """(instruction, text): passages, each once and without its number; question, notes, reply."""
    lines = dict.fromkeys(re.sub(r"^\(\d+\) ", "", line) for line in write.found)
    parts = ["\n".join(["Passages:", *lines])] if lines else []
    parts += [f"Question: {write.question}", write.notes]
    if write.so_far:
        go_on = "This is your reply so far. Go on where it ends, and repeat nothing:"
        parts.append(f"{go_on}\n{write.so_far}")
    return write.instruction, "\n\n".join(filter(None, parts))


def guessed_tokens(text: str, **_) -> dict:
    """Of a model elsewhere: 3 bytes each, which is more tokens than most texts have."""
    return {"input_ids": [0] * -(-len(text.encode()) // 3)}


guessed_tokens.unk_token_id, guessed_tokens.decode = 0, str  # nothing that it knows is a tag


class Writer:
    """A model of other_models/llm.py, asked with `request_of(write)` of at most `room` tokens."""

    def __init__(self, llm, room: int, request_of: Callable[[Write], Request] = chat_request):
        self.llm, self.room, self.request_of = llm, room, request_of
        self.tokenizer = getattr(llm, "tokenizer", guessed_tokens)

    def length(self, write: Write) -> int:
        request = self.request_of(write)
        if isinstance(self.llm, LocalLLM):
            return len(self.llm.prompt(request))
        return len(encode(self.tokenizer, "".join(request)))

    def __call__(self, writes: list[Write]) -> list[str | None]:
        replies = self.llm.ask(list(map(self.request_of, writes)))
        pairs = zip(replies, writes, strict=True)
        return [reply and reply.removeprefix(write.so_far.strip()) for reply, write in pairs]


class Tiny(LocalLLM):
    """The built-in world's model. It is asked with (prompt, opening of the reply)."""

    def prompt(self, request: Request) -> list[int]:
        return encode(self.tokenizer, "".join(request[:2]))

    def replies(self, requests: list[Request]) -> Iterator[tuple[Request, str]]:
        # It goes on behind </answer>, perhaps to another </think>: its turn ends before that.
        for request, reply in super().replies(requests):
            yield request, request[1] + _TURN.match(reply).group()


def tiny_request(write: Write, tokenizer, protocol: Protocol) -> Request:
    """As in its warm-up. To answer without a search, its answer is opened for it."""
    prompt = prompt_text(protocol, Question("", write.question, []), tokenizer)
    if write.found:
        prompt += frame_documents(protocol, "\n".join(write.found))
    if write.instruction != DIRECT:
        return prompt + write.so_far, ""
    box = protocol.answer_tags[0] if protocol.answer_tags else " \\boxed{"
    return prompt, f"</think>\n\n{box}" if protocol.prompt_suffix else box


def load_writer(settings: Settings) -> Writer:
    most, device, request_of = settings.max_turn_tokens, best_device(), chat_request
    if settings.data or settings.model.startswith("http"):
        llm = load_llm(settings.model, settings, max_tokens=most, device=device)
    else:
        policy, tokenizer = load_model(settings, settings.model, device, frozen=True)
        llm, protocol = Tiny(policy, tokenizer, most), build_protocol(settings)
        request_of = partial(tiny_request, tokenizer=tokenizer, protocol=protocol)
    context = settings.max_context or 4096  # a server's is not known
    if isinstance(llm, LocalLLM):
        context = min(settings.max_context or 2**31, context_of(llm.policy))
        llm.at_once = settings.rollout_batch_size or llm.at_once
    return Writer(llm, context - most, request_of)


FILES = ("settings", "data", "rollout", "retriever", "summarizer")  # whose flags count


@dataclass(frozen=True)
class BaselineSettings:
    """The methods that papers compare with."""

    method: str = setting("all", f"all, or some of {','.join(METHODS)}")
    split: str = setting("test", "of the built-in world", one_of=("train", "dev", "test"))
    questions: int = setting(100, "per kind in the built-in world; of a file, 0 = all", least=0)
    out: str = setting("", "folder of METHOD.jsonl, the predictions; else in runs/predictions")


def parse(arguments: list[str] | None) -> tuple[list[str], Settings, BaselineSettings]:
    """(methods, settings, options). The recipe gives the tiny model and all limits but searches."""
    records = [record for record in RECORDS if record.__module__ in FILES]
    options, given = parse_flags("lab.baselines", BaselineSettings, arguments, records)
    named = options.method.replace(" ", "")
    methods = list(METHODS) if named == "all" else named.split(",")
    for name in methods:
        check_value("method", name, {"one_of": METHODS})
    if options.out:
        check_output(f"{options.out}/x", "--out")
    if given.get("max_searches") == 0:
        raise InputError("--max_searches 0: the methods without a search are --method direct,cot")
    if given.get("temperature"):
        raise InputError("--temperature: a baseline is asked greedily; leave it out")
    name, own = given.get("recipe", "ur2"), {"temperature": 0.0, "max_searches": 0}
    if given.get("data"):
        own["documents_per_search"] = 5
    settings = resolve(name, given.get("stage", 1), not given.get("data"), own | given)
    if build_protocol(settings).query_tags is None:
        why = "never searches, so its model and retriever cannot be compared: choose another"
        raise InputError(f"--recipe {name} {why}")
    return methods, check_settings(settings, False, given), options


def main(arguments: list[str] | None = None) -> None:
    methods, settings, options = parse(arguments)
    whole = Evaluation(settings, Options(options.split, options.questions, out=options.out))
    rows: dict[str, dict] = {}  # method -> its means
    folder = whole.out if options.out else whole.out.with_suffix("")
    version = weights_version(settings.model) if settings.model else "built-in"

    @cache
    def load() -> tuple:  # once, and only if something is missing
        return load_writer(settings), build_search(settings, whole.documents, best_device())

    def rows_of(name: str, some: list[Question], start: int, progress) -> list[Trajectory]:
        found = run_method(name, some, *load(), settings)
        progress(len(found))
        return [trajectory for trajectory in found if trajectory.stop_reason != NO_REPLY]

    with interruptible(f"what was finished is in {folder}: the same command goes on"):
        for name in methods:
            out, count = folder / f"{name}.jsonl", len(whole.questions)
            records = whole.collect(out, version, partial(rows_of, name), name)
            if left := count - len(records):
                print(f"{name}: {left} of {count} got no reply; the same command asks again")
            if records:
                rows[name] = summarise(records)["all"]
    print(table(rows, head="method"))
    print(f"predictions: {folder}/METHOD.jsonl")


if __name__ == "__main__":
    run_main(main)
