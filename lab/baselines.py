"""Runs the papers' baselines, with the same retriever, token limits and metrics as eval.py.

    method        what it does                                         source          searches
    direct        answer                                                               no search
    cot           think, answer                                            Wei 2022    no search
    rag           search the question, read, answer                        Lewis 2020          1
    sure          search, sum up for each of two answers, compare          Kim 2024            1
    ircot         search, one sentence, search that sentence, ...          Trivedi 2023  up to 8
    iter_retgen   search question + last answer, answer again, T times     Shao 2023       T = 3
    self_ask      follow-up question, its answer by search, ... or rag     Press 2023  up to 10 + 1
    rat           draft, then revise paragraph by paragraph                Wang 2024     up to 8
    search_o1     search inside the reasoning, insert digested notes       Li 2025      up to 10

A method is a generator. It yields a `Write` (a request to the model) or a query, receives the reply
or the passages, and returns its answer. `run_method` runs the generators of many questions in
lockstep: each round makes at most one search call and one batch of requests for all of them.

    python -m lab.baselines --model SPEC --data FILE --corpus FILE          all methods
    python -m lab.baselines --method rag,ircot --recipe r_search --decoding paper ...
    python -m lab.baselines --method direct,rag,sure,self_ask --recipe arena --retriever given ...
                                                   SPEC: a HF model, or http://host:port/v1#model

--recipe names the paper with whose results the methods are compared (default: the recipe that a
checkpoint of train.py was trained with, else ur2). Among other things it decides how many tokens a
reply may have (UR² app. C.4: 3,072 for math, 1,536 for choice, else 512), how --decoding paper
samples, how punctuation is scored, and what a judge sees. Thoughts in <think> ... </think> are not
scored, but they count towards the limit of a reply: give a thinking model --max_turn_tokens.

We wrote the prompts, for chat models. With `rag` the model answers an open question in a few words,
as in FlashRAG, and reasons about mathematics and choices, as in UR² app. D.4. The tags and labels
of the prompts are removed from passages, and for a local model special tokens too. A search returns
5 passages by default, as UR² app. C.4 says for Qwen and Llama; UR² sections 4.3 and 4.4 say 10.
--retriever given returns all references of the question's record, as in ARENA 4.3. Left out: the
papers' few-shot examples; Self-Ask gets examples that we wrote.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data import Question, SearchResult, strip_tags
from errors import InputError, check_output, run_main
from eval import Options, answer_all, default_out, parse
from formats.records import write_records
from lab import names_in
from metrics import last_boxed
from other_models.llm import LLM, Request, load_llm
from other_models.reader import read_answer
from papers import record_of
from plumbing.build import build_judge, build_search
from plumbing.predictions import ask_others
from plumbing.questions import evaluation_questions
from plumbing.report import BRIEF, COLUMNS, summarise, table
from policy import best_device
from prompts import (
    STATED,
    Protocol,
    last_block,
    parse_query,
    question_text,
    stated_choice,
    tag_pair,
)
from rollout import Environment, Progress, encode
from settings import Settings, setting
from trajectory import Trajectory

BASELINE = Protocol("baseline", *map(tag_pair, ("search", "information", "answer")), "", "")
LABELS = FOLLOW_UP, TOLD, FINAL = "Follow up:", "Intermediate answer:", "So the final answer is:"
GO_ON = "This is your reply so far. Go on where it ends, and repeat nothing:"


@dataclass(frozen=True)
class Write:
    """A request: the model reads passages, question and notes, in this order, and continues
    `so_far`.
    """

    instruction: str
    passages: Sequence[str] = ()  # lines, newest search first
    notes: str = ""  # more text to read
    so_far: str = ""  # the beginning of the model's reply
    question: str = ""  # replaces the trajectory's question

    def as_request(self, question: str, decoding: tuple) -> Request:
        """Builds the prompt. A passage that two searches found is in it once, unnumbered."""
        lines = dict.fromkeys(re.sub(r"^\(\d+\) ", "", line) for line in self.passages)
        passages = "\n".join(["Passages:", *lines]) if lines else ""
        so_far = f"{GO_ON}\n{self.so_far}" if self.so_far else ""
        parts = passages, f"Question: {question}", self.notes, so_far
        return Request(self.instruction, "\n\n".join(filter(None, parts)), *decoding)


# After a `Write` a method receives the model's reply; after a query it receives the lines of
# passages that a policy would read.
Steps = Generator[Write | str, "str | list[str]", str]

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
# Each method takes a Question and a limit on searches, and returns the generator `Steps`. The
# default limit is that of the method's paper, for Self-Ask that of UR² app. C.4, and for Search-o1
# and RAT our own. `direct`, `cot`, `rag` and `sure` ignore the limit, because their number of
# searches is fixed.


def direct(question, limit=0):
    """Asks for a short answer from the model's own knowledge."""
    return any_answer((yield Write(DIRECT)))


def cot(question, limit=0):
    """Chain of thought (Wei 2022): the model reasons before it answers, without a search."""
    return reasoned(Write(by_step(question)), question)


def rag(question, limit=1):
    """Retrieval-augmented generation (Lewis 2020): searches the question once, then generates."""
    passages = yield question.question
    if question.task != "qa":
        return (yield from reasoned(Write(READ + by_step(question), passages), question))
    return any_answer((yield reading(question, passages)))


def reading(question: Question, passages: Sequence[str]) -> Write:
    """The request of `rag` about an open question, which lab.distil trains a model to answer."""
    return Write(READ + DIRECT, passages, question=question_text(question))


_LISTED = r"(?m)^[ \t]*(?:(?:\d[.):]|[-*])[ \t]+)?(\S.*?)[ \t]*$"  # a line, without "1. " or "- "


def sure(question, limit=1):
    """SuRe (Kim 2024): writes two answers and, for each, a summary of the passages in its favour.
    An answer scores 1 if the model finds its summary convincing, plus ½ for each comparison that
    it wins. The answer with the higher score is returned, in a tie the first. If the model wrote
    only one answer, it is returned at once.
    """
    passages = yield question.question
    names = re.findall(_LISTED, plain((yield Write(CANDIDATES, passages))))
    candidates = list(dict.fromkeys(names))[:2]
    if len(candidates) < 2:
        return any_answer("".join(candidates))
    scores, summaries = {}, {}
    for name in candidates:
        suggested = f"Suggested answer: {name}"
        summary = plain((yield Write(SUPPORT, passages, suggested)))
        summaries[name] = f"{suggested}\nSummary: {summary}"
        holds = yield Write(HOLDS, notes=summaries[name])
        scores[name] = bool(re.match(r"(?i)\W*yes\b", holds))
    for a, b in (candidates, candidates[::-1]):  # both orders: a model may prefer the first
        better = yield Write(BETTER, notes=f"A. {summaries[a]}\n\nB. {summaries[b]}")
        if letter := re.search(r"\b[AB]\b", better):
            scores[a if letter.group() == "A" else b] += 0.5
    return max(candidates, key=scores.get)


def ircot(question, limit=8):
    """IRCoT (Trivedi 2023): each new sentence is the next query; the newest 15 passages stay shown,
    as there.
    """
    passages, chain, query = [], "", question.question
    for _ in range(limit):
        passages = ((yield query) + passages)[:15]
        request = Write(ONE_SENTENCE, passages, so_far=chain)
        query = first_sentence((yield request))
        if not query or stated_answer(query):
            return (yield from conclude(request, query, question))
        chain = f"{chain} {query}".strip()
    return (yield from conclude(replace(request, so_far=chain), "", question))


def iter_retgen(question, limit=3):
    """Iter-RetGen (Shao 2023): reply y_t = model(question, passages for question + y_{t−1})."""
    reply = ""
    for _ in range(limit):
        request = Write(READ + by_step(question), (yield f"{question.question} {reply}"))
        reply = yield request
    return (yield from conclude(request, reply, question))


def self_ask(question, limit=10):
    """Self-Ask (Press 2023): the model asks simpler questions and answers each from passages. If
    it states no final answer, for example because `limit` questions are not enough, RAG answers
    instead (UR² app. C.4).
    """
    chain = ""
    for _ in range(limit):
        reply = yield Write(SELF_ASK, so_far=chain)
        if not (follow_up := next_question(reply)):
            break
        request = Write(READ + BY_STEP, (yield follow_up), question=follow_up)
        read = yield from reasoned(request)
        chain += f"{FOLLOW_UP} {follow_up}\n{TOLD} {read or 'unknown'}\n"
    return stated_answer(reply) or (yield from rag(question))


_PARAGRAPH = r"(?s)\S.*?(?=\s*\n\s*\n|\s*\Z)"


def rat(question, limit=8):
    """RAT (Wang 2024): revises the draft's first `limit` paragraphs, each after one search."""
    draft = re.findall(_PARAGRAPH, (yield Write(DRAFT)))
    for i, paragraph in enumerate(draft[:limit]):
        notes = "\n\n".join(draft[: i + 1])  # paragraphs before this one are revised already
        line = plain((yield Write(TO_QUERY, notes=notes)))
        passages = yield line.partition("\n")[0].strip(" \"'") or paragraph
        draft[i] = (yield Write(REVISE, passages, notes)).strip() or paragraph
    *before, last = draft or [""]
    request = Write(DRAFT, so_far="\n\n".join([*before, ""]))
    return (yield from conclude(request, last, question))


def search_o1(question, limit=10):
    """Search-o1 (Li 2025): a separate request reads the passages; its notes join the reasoning."""
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
    return (yield from conclude(request, reply, question))


METHODS = {
    method.__name__: method
    for method in (direct, cot, rag, sure, ircot, iter_retgen, self_ask, rat, search_o1)
}


# -------------------------------------------------------------------------------- what a reply says
def by_step(question: Question) -> str:
    """Returns the instruction to reason step by step, and for multiple choice also option by option
    (UR² app. D.4, in our words).
    """
    return BY_OPTION if question.task == "choice" else BY_STEP


def plain(text: str) -> str:
    return strip_tags(text, BASELINE.tags).strip()


def reasoned(request: Write, question: Question | None = None) -> Steps:
    return (yield from conclude(request, (yield request), question))


def conclude(request: Write, reply: str, question: Question | None = None) -> Steps:
    """Returns the answer that the reply states; without one, the model goes on after FINAL. But a
    choice is read as eval.py reads UR²'s, and nothing is asked again.
    """
    if question and question.task == "choice":
        whole = f"{request.so_far}\n{reply}"
        return stated_choice(whole, question.options) or stated_answer(reply)
    if answer := stated_answer(reply):
        return answer
    parts = [request.so_far.strip(), plain(reply), FINAL]
    return any_answer((yield replace(request, so_far="\n".join(filter(None, parts)))))


def stated_answer(reply: str) -> str:
    """Returns the last <answer> box, else the last \\boxed{...}, else the sentence after the words
    "answer is" in the last line that has them, else "".

    >>> stated_answer("He was born in St. Ives. So the answer is: St. Ives. That is all.")
    'St. Ives'
    """
    statements = STATED.findall(plain(reply)) or [""]
    boxed = last_block(reply, BASELINE.answer_tags) or last_boxed(reply)
    return boxed or first_sentence(statements[-1]).rstrip(" .")


def any_answer(reply: str) -> str:
    """Returns the stated answer, else the first sentence: the reply should be only an answer."""
    return stated_answer(reply) or first_sentence(plain(read_answer(reply)))


# A full stop ends no sentence after a single capital letter or digit ("1."), nor after Dr, Mr, Sr,
# St, Mrs and vs.
_END = r"(?<!\b[A-Z\d])(?<!\b[DMS]r)(?<!\bSt)(?<!\bMrs)(?<!\bvs)[.!?][\"')\]]*(?=\s|$)"


def first_sentence(text: str) -> str:
    """Returns the text up to the end of its first sentence or first line."""
    return re.match(f".*?{_END}|.*", text.strip()).group().strip()


_FOLLOW_UP = rf"(?i)follow[- ]?up(?: question)?\s*+:(.*?)(?:{TOLD}|\n|\Z)"


def next_question(reply: str) -> str:
    """Returns Self-Ask's next question; "" if the reply asks none before it states an answer."""
    return (re.findall(_FOLLOW_UP, STATED.split(reply)[0]) or [""])[0].strip()


# ----------------------------------------------------------------------- many questions in lockstep
# A reply is cut after its first </search>, </answer> or TOLD, because the model should have stopped
# there.
_TURN = rf"(?s).*?(?:</search>|</answer>|{TOLD}|\Z)"


def answer(steps: Steps, row: Trajectory, environment: Environment) -> Generator:
    """Runs a method on one question and writes its trajectory. Yields a query that is to be
    searched, or a request, whose reply it receives; at the end None.
    """
    s, tokenizer, received = environment.settings, environment.tokenizer, None
    while True:
        try:
            wanted = steps.send(received)
        except StopIteration as end:
            row.stop_reason = "answer"
            # The metrics look for the answer in these tags.
            row.append_model([], [], f"<answer> {plain(end.value)} </answer>")
            return (yield None)
        if isinstance(wanted, str):
            query = " ".join(plain(wanted).split()) or row.question.question
            row.append_environment([], f"<search> {query} </search>", "notice")
            yield query
            received = row.searches[-1].text.split("\n")
            continue
        question = wanted.question or question_text(row.question)
        decoding = s.temperature, s.top_p, environment.turn_limit(row)
        reply = yield wanted.as_request(question, decoding)
        if reply is None:  # the row keeps no stop reason
            return (yield None)
        # Chat models often repeat the beginning of their reply before they go on.
        received = re.match(_TURN, reply.strip().removeprefix(wanted.so_far.strip())).group()
        # Tags are removed: a transcript has them only around the queries that are searched, around
        # the documents and around the final answer.
        row.append_model(encode(tokenizer, reply), [], f"{plain(received)}\n\n")


def run_method(
    name: str, llm: LLM, environment: Environment, questions: list[Question], progress: Progress
) -> list[Trajectory]:
    """Returns a trajectory for each question to which the model replied; its token ids only serve
    to count tokens. With max_searches 0 each method has its own limit.
    """
    most = environment.settings.max_searches
    limit = [most] if most else []
    rows = [Trajectory(question, environment.protocol) for question in questions]
    runs = [answer(METHODS[name](t.question, *limit), t, environment) for t in rows]
    wanted = [next(run) for run in runs]
    while any(wanted):
        # All searches of a round are one call, and so are all requests.
        asked = [n for n, query in enumerate(wanted) if isinstance(query, str)]
        if asked:
            environment.execute([(rows[n], wanted[n]) for n in asked])
            replies = [None] * len(asked)
        else:
            asked = [n for n, request in enumerate(wanted) if request]
            replies = llm.ask([wanted[n] for n in asked])
        for n, reply in zip(asked, replies, strict=True):
            wanted[n] = runs[n].send(reply)
    progress(len(rows))
    return [row for row in rows if row.stop_reason]


def environment_of(settings: Settings, llm: LLM, search: Callable) -> Environment:
    """Returns what searches and counts tokens. A trajectory here is a log and not the model's
    context, so its length has no limit.
    """
    paper = recipe_protocol(settings)
    protocol = replace(BASELINE, name=f"baseline_{paper.name}", judge_sees=paper.judge_sees)
    environment = Environment(llm.tokenizer, protocol, search, settings, 2**31)
    environment.forbidden += LABELS
    # If a server rejects a query, for example for its length, the method gets an empty result.
    environment.reject = lambda row, query, _: environment.append_result(
        row, query.query, SearchResult()
    )
    return environment


# --------------------------------------------------------------------------------- the command line
@dataclass(frozen=True)
class BaselineOptions(Options):
    """Run the baselines of the papers."""

    method: str = setting("all", f"all, or some of {','.join(METHODS)}")


def recipe_protocol(settings: Settings) -> Protocol:
    """Returns the first protocol of the paper that --recipe names."""
    return next(iter(record_of(settings.recipe).protocols.values()))


def parse_baselines(arguments: list[str]) -> tuple[Settings, BaselineOptions]:
    # The methods have their own prompts; ur2 is set because it searches and has a fallback text.
    arguments = ["--protocol=ur2", "--max_searches=0", "--documents_per_search=5", *arguments]
    return parse(arguments, BaselineOptions, "lab.baselines")


def main(arguments: list[str] | None = None) -> None:
    settings, options = parse_baselines(sys.argv[1:] if arguments is None else arguments)
    methods = names_in("method", options.method.removeprefix("all"), METHODS)
    if options.samples > 1 or options.against or options.decoding == "both":
        raise InputError("--samples, --against, --decoding both: not with a table of methods")
    device = best_device()
    judge = build_judge(settings, device, recipe_protocol(settings).judge_sees)
    folder = Path(options.out or default_out(settings, options).with_suffix(""))
    check_output(folder / "direct.jsonl", "--out")
    datasets, documents = evaluation_questions(settings, options)
    llm = load_llm(settings.model, settings, max_tokens=settings.max_turn_tokens, device=device)
    environment = environment_of(settings, llm, build_search(settings, documents, device))
    settings, rows = replace(settings, group_size=1), {}
    for name in methods:
        out = folder / f"{name}.jsonl"

        def generate(questions: list[Question], _, progress: Progress, name=name) -> list:
            return run_method(name, llm, environment, questions, progress)

        records = answer_all(datasets, generate, llm.tokenizer, settings, out)
        if judge:
            records = ask_others(records, None, judge)
            write_records(out, records)
        if records:
            rows[name] = summarise(records)["all"]
    print(table(rows, "method", COLUMNS if options.all else BRIEF))
    print(f"predictions: {folder}/METHOD.jsonl")


if __name__ == "__main__":
    run_main(main)
