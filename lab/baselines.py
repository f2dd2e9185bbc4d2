"""The methods that the papers compare with, on the retriever, limits and metrics of all else here.

    direct        answer                                                               no search
    cot           think, answer                                            Wei 2022    no search
    rag           search the question, read, answer                        Lewis 2020          1
    sure          search, sum up for each of two answers, compare          Kim 2024            1
    ircot         search, one sentence, search that sentence, ...          Trivedi 2023  up to 8
    iter_retgen   search question + last answer, answer again, T times     Shao 2023       T = 2
    self_ask      follow-up question, its answer by search, ... or rag     Press 2023   up to 10
    rat           draft, then revise paragraph by paragraph                Wang 2024     up to 8
    search_o1     search inside the reasoning, insert digested notes       Li 2025      up to 10

A method is a generator: it yields a `Write` (the model writes on) or a query, is sent the reply,
and returns its answer. `run_method` drives many questions: one search call, one batch for all.

    python -m lab.baselines --model SPEC --data FILE --corpus FILE          all methods
    python -m lab.baselines --method rag,ircot --recipe r_search --decoding paper ...
    python -m lab.baselines --method direct,rag,sure,self_ask --recipe arena --retriever given ...
                                                   SPEC: a HF model, or http://host:port/v1#model

--recipe names the paper in whose table they stand. It decides how many tokens a reply has (UR²
app. C.4: 3,072 for math, 1,536 for choice, else 512), how --decoding paper samples, which
punctuation is scored, and what a judge sees. Thinking in <think> ... </think> is not scored; it
shares the limit of its reply, or has --thinking N tokens of its own. `thinking` counts its tokens
and `unfinished` the thoughts that the limit cut off.

The prompts are ours, for chat models. As in FlashRAG, an open question is answered from passages in
a few words (rag); mathematics and choices are reasoned through, as in UR² app. D.4. Pages come
without tags and labels, for a model in this process without special tokens too. The same command
asks again where no reply came. A search finds 5 passages, as in UR² app. C.4 for Qwen and Llama;
its 4.3 and 4.4 have 10. --retriever given shows all references of the record, as in ARENA 4.3.
Left out: the papers' few-shot examples but Self-Ask's, where ours stand in their place.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from data import Question, SearchResult, strip_tags
from errors import InputError, run_main, setting
from eval import Evaluation, Options, evaluate, parse
from lab import names_in
from metrics import last_boxed
from other_models.llm import LLM, Request, load_llm
from other_models.reader import read_answer
from papers import record_of
from plumbing.build import build_judge, build_protocol, build_search
from plumbing.report import summarise, table
from policy import best_device, weights_version
from prompts import PROTOCOLS, Protocol, last_block, parse_query, question_text, tag_pair
from rollout import Environment, encode
from settings import Settings
from trajectory import Segment, Trajectory
from trajectory_metrics import split_thought

BASELINE = Protocol("baseline", *map(tag_pair, ("search", "information", "answer")), "", "")
LABELS = FOLLOW_UP, TOLD, FINAL = "Follow up:", "Intermediate answer:", "So the final answer is:"
NO_REPLY = "no reply"  # why a trajectory ended whose model could not be reached
GO_ON = "This is your reply so far. Go on where it ends, and repeat nothing:"


@dataclass(frozen=True)
class Write:
    """The model reads passages, question and notes, in this order, and goes on behind `so_far`."""

    instruction: str
    found: Sequence[str] = ()  # lines, the latest search's first; a short context drops the last
    notes: str = ""  # more to read; where even that does not fit, cut from the front
    so_far: str = ""  # the beginning of the model's own reply
    question: str = ""  # by default the one that was asked

    def as_request(self, question: str, how: tuple) -> Request:
        """Passages, each once and without its number; question, notes, reply."""
        lines = dict.fromkeys(re.sub(r"^\(\d+\) ", "", line) for line in self.found)
        passages = "\n".join(["Passages:", *lines]) if lines else ""
        so_far = f"{GO_ON}\n{self.so_far}" if self.so_far else ""
        parts = passages, f"Question: {question}", self.notes, so_far
        return Request(self.instruction, "\n\n".join(filter(None, parts)), *how)

    def shortened(self) -> Write:
        if self.found:
            return replace(self, found=self.found[:-1])
        notes, so_far = (text[len(text) // 8 + 1 :] for text in (self.notes, self.so_far))
        return replace(self, notes=notes, so_far=so_far)


# Handed to a method: for a `Write` the text, for a query the lines that a policy would read.
Steps = Generator[Write | str, "str | list[str]", "str | None"]

SHORT = "in as few words as possible: a name, a date, a number, yes or no, or an option's letter"
BOX = "<answer> your answer </answer>"
DIRECT = f"Answer the question {SHORT}. Reply with nothing but {BOX}."
READ = "Use the passages; where they do not help, use what you know. "
ANSWER = f"Then answer the question {SHORT}, as {BOX}."
BY_STEP = f"Think step by step. {ANSWER}"
BY_OPTION = (
    "Think step by step, option by option: for each option say what it means and whether it is"
    " right or wrong, and why. Drop the wrong ones, compare those that are left and choose the"
    f" best. {ANSWER}"
)
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
SELF_ASK = """\
Split the question into simpler ones, as in these examples. While a fact is missing, write
"Follow up:" and one question that can be understood by itself, and stop; "Intermediate answer:"
then tells its answer. When nothing is missing, write "So the final answer is:" and the answer in
as few words as possible: a name, a date, a number, yes or no, or an option's letter.

Question: Which of the two metals melts first when both are heated slowly, tin or zinc?
Are follow up questions needed here: Yes.
Follow up: At which temperature does tin melt?
Intermediate answer: Tin melts at 232 degrees Celsius.
Follow up: At which temperature does zinc melt?
Intermediate answer: Zinc melts at 420 degrees Celsius.
So the final answer is: tin

Question: What is the capital of the country in which Mount Fuji stands?
Are follow up questions needed here: Yes.
Follow up: In which country does Mount Fuji stand?
Intermediate answer: Mount Fuji stands in Japan.
Follow up: What is the capital of Japan?
Intermediate answer: The capital of Japan is Tokyo.
So the final answer is: Tokyo

Question: Into which sea does the longest river of Europe flow?
Are follow up questions needed here: Yes.
Follow up: What is the longest river of Europe?
Intermediate answer: The longest river of Europe is the Volga.
Follow up: Into which sea does the Volga flow?
Intermediate answer: The Volga flows into the Caspian Sea.
So the final answer is: the Caspian Sea"""
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
    return any_answer((yield Write(DIRECT)))


def cot(question: Question, limit: int = 0) -> Steps:
    """Chain of thought (Wei 2022): reasoning before the answer, without a search."""
    return reasoned(Write(by_step(question)))


def rag(question: Question, limit: int = 1) -> Steps:
    """Retrieval-augmented generation (Lewis 2020): passages for the question, one generation."""
    found = yield question.question
    if question.task != "qa":
        return (yield from reasoned(Write(READ + by_step(question), found)))
    return any_answer((yield Write(READ + DIRECT, found)))


_LISTED = re.compile(r"^[ \t]*(?:(?:\d[.):]|[-*])[ \t]+)?(\S.*?)[ \t]*$", re.MULTILINE)  # no "1. "


def sure(question: Question, limit: int = 1) -> Steps:
    """SuRe (Kim 2024): two answers, each with a summary of the passages in its favour. An answer's
    score is 1 if its summary holds + ½ for each comparison won; of two equal ones the first wins.
    """
    found = yield question.question
    names = _LISTED.findall(plain((yield Write(CANDIDATES, found))))
    candidates = list(dict.fromkeys(names))[:2]
    if len(candidates) < 2:
        return any_answer("".join(candidates))
    scores, summaries = Counter(), {}
    for name in candidates:
        suggested = f"Suggested answer: {name}"
        summary = plain((yield Write(SUPPORT, found, suggested)))
        summaries[name] = f"{suggested}\nSummary: {summary}"
        holds = yield Write(HOLDS, notes=summaries[name])
        scores[name] = bool(re.match(r"\W*yes\b", holds, re.IGNORECASE))
    for a, b in (candidates, candidates[::-1]):  # a model may like what it reads first
        better = yield Write(BETTER, notes=f"A. {summaries[a]}\n\nB. {summaries[b]}")
        if letter := re.search(r"\b[AB]\b", better):
            scores[a if letter.group() == "A" else b] += 0.5
    return max(candidates, key=scores.get)


def ircot(question: Question, limit: int = 8) -> Steps:
    """IRCoT (Trivedi 2023): each new sentence is the next query, and passages pile up."""
    found, chain, query = [], "", question.question
    for _ in range(limit):
        found = (yield query) + found
        request = Write(ONE_SENTENCE, found, so_far=chain)
        query = first_sentence((yield request))
        if not query or said_answer(query):
            return (yield from conclude(request, query))
        chain = f"{chain} {query}".strip()
    return (yield from conclude(replace(request, so_far=chain), ""))


def iter_retgen(question: Question, limit: int = 2) -> Steps:
    """Iter-RetGen (Shao 2023): y_t = answer(question, passages for question + y_{t−1})."""
    reply = ""
    for _ in range(limit):
        request = Write(READ + by_step(question), (yield f"{question.question} {reply}"))
        reply = yield request
    return (yield from conclude(request, reply))


def self_ask(question: Question, limit: int = 10) -> Steps:
    """Self-Ask (Press 2023): the answer to a simpler question is read out of passages. It is RAG
    (UR² app. C.4) if it asks no question and says no answer, or asks `limit` of them in vain.
    """
    chain = ""
    for _ in range(limit):
        reply = yield Write(SELF_ASK, so_far=chain)
        if not (follow_up := next_question(reply)):
            break
        request = Write(READ + BY_STEP, (yield follow_up), question=follow_up)
        read = yield from reasoned(request)
        chain += f"{FOLLOW_UP} {follow_up}\n{TOLD} {read or 'unknown'}\n"
    return said_answer(reply) or (yield from rag(question))


_PARAGRAPH = re.compile(r"\S.*?(?=\s*\n\s*\n|\s*\Z)", re.DOTALL)


def rat(question: Question, limit: int = 8) -> Steps:
    """RAT (Wang 2024): the draft's first `limit` paragraphs are looked up and revised in turn."""
    draft = _PARAGRAPH.findall((yield Write(DRAFT)))
    for i, paragraph in enumerate(draft[:limit]):
        notes = "\n\n".join(draft[: i + 1])  # those before it are revised
        line = plain((yield Write(TO_QUERY, notes=notes)))
        found = yield line.partition("\n")[0].strip(" \"'") or paragraph
        draft[i] = (yield Write(REVISE, found, notes)).strip() or paragraph
    *before, last = draft or [""]
    return (yield from conclude(Write(DRAFT, so_far="\n\n".join([*before, ""])), last))


def search_o1(question: Question, limit: int = 10) -> Steps:
    """Search-o1 (Li 2025): another call of the model reads the pages; only its notes go in."""
    chain = ""
    for searches in range(limit + 1):
        request = Write(SEARCH_INSIDE, so_far=chain)
        reply = yield request
        query = parse_query(BASELINE, reply)
        if not query or searches == limit:
            break
        chain += reply
        asked = f"Reasoning so far:\n{chain}\n\nQuery: {query}"
        notes = plain((yield Write(DIGEST, (yield query), asked)))
        chain += f"\n\n<information>\n{notes}\n</information>\n\n"
    return (yield from conclude(request, reply))


ALL = (direct, cot, rag, sure, ircot, iter_retgen, self_ask, rat, search_o1)
METHODS = {method.__name__: method for method in ALL}


# -------------------------------------------------------------------------------- what a reply says
def by_step(question: Question) -> str:
    """UR² app. D.4: step by step, and a choice option by option."""
    return BY_OPTION if question.task == "choice" else BY_STEP


def plain(text: str) -> str:
    return strip_tags(text, BASELINE.tags).strip()


def reasoned(request: Write) -> Steps:
    return (yield from conclude(request, (yield request)))


def conclude(request: Write, reply: str) -> Steps:
    """The answer that the reply says; where it says none, the model has to complete FINAL."""
    if answer := said_answer(reply):
        return answer
    parts = [request.so_far.strip(), plain(reply), FINAL]
    return any_answer((yield replace(request, so_far="\n".join(filter(None, parts)))))


# Possessive `\s*+`: blanks without end behind "is" must not cost the square of their number.
_SAID = re.compile(r"answer is\s*+:?\s*+([^\n]*\w[^\n]*)", re.IGNORECASE)


def said_answer(reply: str) -> str:
    """The last <answer> box, the last \\boxed{...}, or what stands behind the last "answer is".

    >>> said_answer("He was born in St. Ives. So the answer is: St. Ives. That is all.")
    'St. Ives'
    """
    said = _SAID.findall(plain(reply)) or [""]
    boxed = last_block(reply, BASELINE.answer_tags) or last_boxed(reply)
    return boxed or first_sentence(said[-1]).rstrip(" .")


def any_answer(reply: str) -> str:
    """What the reply says, or its first sentence: for replies that should be the answer alone."""
    return said_answer(reply) or first_sentence(plain(read_answer(reply)))


# A full stop behind one capital letter, one digit (of a numbered list) or a title ends no sentence.
_END = r"(?<!\b[A-Z\d])(?<!\b[DMS]r)(?<!\bSt)(?<!\bMrs)(?<!\bvs)[.!?][\"')\]]*(?=\s|$)"


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence, or of its first line."""
    return re.match(f".*?{_END}|.*", text.strip()).group().strip()


_FOLLOW_UP = re.compile(rf"follow[- ]?up(?: question)?\s*+:(.*?)(?:{TOLD}|\n|\Z)", re.IGNORECASE)


def next_question(reply: str) -> str:
    """Self-Ask's next question; "" if the reply asks none before it says an answer."""
    return (_FOLLOW_UP.findall(_SAID.split(reply)[0]) or [""])[0].strip()


# ----------------------------------------------------------------------- many questions in lockstep
# A model that does not stop where the environment goes on is cut there.
_TURN = re.compile(rf".*?(?:</search>|</answer>|{TOLD}|\Z)", re.DOTALL)


class Row:
    """One question under way: its method, halted at `request` (None: ended), and its trajectory."""

    def __init__(self, trajectory: Trajectory, steps: Steps):
        self.trajectory, self.steps = trajectory, steps
        self.go_on(None)

    def go_on(self, reply: str | list[str] | None) -> None:
        """Hands the method what it asked for; it runs on to its next request, or to its end."""
        try:
            self.request = self.steps.send(reply)
        except StopIteration as end:  # one answer box, so that it is graded like everybody else's
            answer = plain(end.value or "")
            self.request, self.trajectory.stop_reason = None, "answer" if answer else "eos"
            if answer:
                self.trajectory.append_model([], [], f"<answer> {answer} </answer>")

    def search(self) -> tuple[Trajectory, str]:
        """(trajectory, query) of a method that asked for a search."""
        query = " ".join(plain(self.request).split())
        self.trajectory.append_environment([], f"<search> {query} </search>", "notice")
        return self.trajectory, query

    def asked(self, llm: LLM, environment: Environment) -> Request:
        """What the model is asked, so short that its reply still fits."""
        write, settings = self.request, environment.settings
        most = environment.turn_tokens_left(self.trajectory)
        room = (settings.max_context or llm.positions) - most
        question = write.question or question_text(self.trajectory.question)
        how = settings.temperature, settings.top_p, most
        while len(llm.prompt(request := write.as_request(question, how))) > room:
            if not (write.found or write.notes or write.so_far):
                said = f"its prompt does not fit into {room} tokens: raise --max_context"
                raise InputError(f"{question[:60]!r}: {said}")
            write = write.shortened()
        if len(write.found) < len(self.request.found):
            self.trajectory.searches[-1].cut = True
        return request

    def read(self, reply: str | None, tokenizer) -> None:
        """What the model wrote; None where no reply came."""
        if reply is None:
            self.trajectory.stop_reason, self.request = NO_REPLY, None
            return
        ids, (thought, text, _) = encode(tokenizer, reply), split_thought(reply)
        if thought:
            self.trajectory.segments.append(Segment("thought", strip_tags(thought, BASELINE.tags)))
        text = _TURN.match(text.strip().removeprefix(self.request.so_far.strip())).group()
        # In a transcript tags mean a search that was made, or the answer.
        self.trajectory.append_model(ids, [], f"{plain(text)}\n\n")
        self.go_on(text)


def run_method(name: str, questions: list, llm: LLM, search, settings: Settings) -> list:
    """A trajectory for each question; its ids are there to be counted. max_searches 0: the paper's
    own bound.
    """
    limit = [settings.max_searches] if settings.max_searches else []
    paper = recipe_protocol(settings)
    protocol = replace(BASELINE, name=f"baseline_{paper.name}", judge_sees=paper.judge_sees)
    context = 2**31  # it writes a log and no context
    environment = Environment(llm.tokenizer, protocol, search, settings, context)
    environment.forbidden += LABELS
    # To a method a query that a server rejects has found nothing.
    environment.reject = lambda row, its, _: environment.append_result(
        row, its.query, SearchResult()
    )
    rows = [Row(Trajectory(q, protocol), METHODS[name](q, *limit)) for q in questions]
    while any(row.request for row in rows):
        # All searches in one call, under the rollout's own rules of retries and budgets.
        if asking := [row for row in rows if isinstance(row.request, str)]:
            environment.execute([row.search() for row in asking])
        for row in asking:
            row.go_on(row.trajectory.searches[-1].text.split("\n"))
        writing = [row for row in rows if isinstance(row.request, Write)]
        replies = llm.ask_whole([row.asked(llm, environment) for row in writing])
        for row, reply in zip(writing, replies, strict=True):
            row.read(reply, llm.tokenizer)
    return [row.trajectory for row in rows]


# --------------------------------------------------------------------------------- the command line
@dataclass(frozen=True)
class BaselineOptions(Options):
    """The methods that papers compare with."""

    inside = "/x"
    method: str = setting("all", f"all, or some of {','.join(METHODS)}")
    decoding: str = setting("greedy", "paper: as the paper does", one_of=("greedy", "paper"))


def recipe_protocol(settings: Settings) -> Protocol:
    """The protocol of the paper in whose table the methods stand."""
    return PROTOCOLS[record_of(settings.recipe).protocols[0]]


class Baselines(Evaluation):
    """An evaluation of one `method` after the other."""

    method = ""

    @cached_property
    def parts(self) -> tuple:
        settings, device = self.settings, best_device()
        llm = load_llm(settings.model, settings, max_tokens=settings.max_turn_tokens, device=device)
        llm.at_once = settings.max_num_seqs or llm.at_once
        protocol = build_protocol(settings)
        if not recipe_protocol(settings).fallback_text:  # no query is turned away in that paper
            protocol = replace(protocol, fallback_text="")
        return llm, build_search(settings, self.documents, device, protocol=protocol)

    def load(self) -> tuple[Callable, str]:
        self.tokenizer = self.parts[0].tokenizer

        def generate(some: list[Question], _, progress) -> list[Trajectory]:
            rows = run_method(self.method, some, *self.parts, self.settings)
            progress(len(rows))
            return [row for row in rows if row.stop_reason != NO_REPLY]

        return generate, weights_version(self.settings.model)


def parse_baselines(arguments: list[str]) -> tuple[list[str], Settings, Options]:
    """(methods, settings, options). The recipe gives the paper's limits, but of searches none."""
    own = ["--protocol=ur2", "--max_searches=0", "--documents_per_search=5"]  # any that searches
    settings, options = parse([*own, *arguments], BaselineOptions, "lab.baselines")
    methods = names_in("method", options.method.removeprefix("all"), METHODS)
    if not settings.data:
        raise InputError("--data is missing: baselines are for a model and questions of your own")
    if options.samples > 1 or options.against or options.json:
        raise InputError("--samples, --against, --json: a table of methods does not read them")
    return methods, settings, options


def main(arguments: list[str] | None = None) -> None:
    methods, settings, options = parse_baselines(sys.argv[1:] if arguments is None else arguments)
    sees = options.judge_sees or recipe_protocol(settings).judge_sees
    judge = build_judge(settings, best_device(), sees)
    whole, rows = Baselines(settings, options), {}
    folder = whole.out if options.out else whole.out.with_suffix("")
    for name in methods:
        whole.method, whole.out = name, folder / f"{name}.jsonl"
        if records := evaluate(whole, None, judge):
            rows[name] = summarise(records)["all"]
    print(table(rows, options.markdown, "method"))
    print(f"predictions: {folder}/METHOD.jsonl")


if __name__ == "__main__":
    run_main(main)
