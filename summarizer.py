"""Documents -> what the policy reads, or the fallback (UR², the section on the LLM summariser).

A summariser makes one short text of ten passages; in training it also decides whether the query
asks for a fact at all. If not, the result is a fallback: the policy is told to ask for a fact, and
the reward charges the search. Only the flag `SearchResult.fallback` says so: a passage may happen
to say what a sentinel says. The documents stay in the result, for the log.
Left out: making a small summariser of a large one's notes (lab/distil.py).
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data import Document, Question, SearchRequest, SearchResult
from errors import run_main, setting
from formats.records import append_jsonl
from prompts import (
    Protocol,
    fill,
    number_documents,
    question_values,
    without_thinking,
    worded,
)
from retriever import Found, Requests, Results, Summarize, show_all

# Read where no passage names what is asked; not "", which shows the documents. It is also the
# fallback of the built-in world, whose tiny models know no other words.
FALLBACK_TEXT = "None"
OPERATORS = "+-−*/×÷="  # also a hyphen: no name of the built-in world has one
MAX_QUERY_WORDS = 12
# A name stands where the built-in world's queries have one: "mayor of kelmouth", "one borg in fip".
_NAMELESS = "a an the he him his she her it its they them their this that".replace(" ", "|")
_OF_A_NAME = re.compile(rf"\b(?:of|one)\s+(?!(?:{_NAMELESS})\b)[^\W\d]", re.IGNORECASE)


@dataclass(frozen=True)
class SummarizerSettings:
    summarizer: str = setting(
        "none",
        "none: the passages; extractive: the best one, or the fallback; or a model that writes"
        " notes: http://host:port/v1#model, a HF directory or a hub name; or one for each task:"
        " math=http://...,other=http://...",
    )
    fallback: bool = setting(
        False, "a model that writes notes turns queries away, as in training", only="eval"
    )
    summary_sampling: str = setting("", "task=temperature/top_p/tokens,...", only="papers")


def extract(requests: Requests, documents: Found, fallback: str = FALLBACK_TEXT) -> Results:
    """The best passage if the query names it, else "None"; but where the query is no lookup, the
    `fallback`, if the protocol has one.
    """
    results = []
    for request, found in zip(requests, documents, strict=True):
        title = found[0].title if found else ""
        lookup = is_lookup(request.query, title)
        text = found[0].text if lookup and names(request.query, title) else FALLBACK_TEXT
        away = bool(fallback) and not lookup
        results.append(SearchResult(found, fallback if away else text, away))
    return results


def is_lookup(query: str, title: str = "") -> bool:
    """Does it ask for a fact: no arithmetic, not long, `title` or somebody else named?

    >>> is_lookup("country of alma lind"), is_lookup("in which country was she born")
    (True, False)
    """
    arithmetic = any(operator in query for operator in OPERATORS)
    if arithmetic or len(query.split()) > MAX_QUERY_WORDS:
        return False
    return names(query, title) or _OF_A_NAME.search(query) is not None


def names(query: str, title: str) -> bool:
    """Does `title` stand there as words? "ana bell" is not in "diana bell" or "ana bellow"."""
    words = r"\s+".join(map(re.escape, title.split()))
    return bool(words) and re.search(rf"(?<!\w){words}(?!\w)", query, re.IGNORECASE) is not None


NO_FACT = "NO FACT"
# In --output_dir: pairs that a small summariser can be distilled from.
SUMMARY_LOG = "summaries.jsonl"
# Temperature, top_p, tokens. Thoughts are among these; of the notes the policy reads at most
# `document_tokens`.
GREEDY = (0.0, 1.0, 8192)
LAYOUT = "Reasoning so far: {reasoning}\nQuery: {query}\nPassages:\n{documents}"
TASKS = {
    "math": ("solves a mathematical problem", "the definitions, formulas, theorems and values"),
    "other": ("works on a larger problem", "the facts"),
}
_GIVEN = (
    "You prepare what a search engine found for somebody who {0}. You get their reasoning so far,"
    " one search query, and the numbered passages that were found for it. "
)
_TURN_AWAY = (
    "First decide what the query asks for. If it is no fact that could be looked up, but a"
    " calculation, a proof, a piece of reasoning, a choice between options or an opinion, reply"
    f" with this single line and nothing else: {NO_FACT}\nElse"
)
_NOTES = (
    " write short notes: {1} from the passages that answer the query, with full names, numbers and"
    " dates, and nothing that is not in the passages; if they do not answer it, say in one sentence"
    " what is missing. The reasoning tells what the query means. It may be wrong: neither correct"
    " it nor go on with it."
)


def instruction_for(task: str, turns_away: bool) -> str:
    """UR² D.3 has four: for mathematics or another task; with or without queries turned away."""
    text = _GIVEN + (_TURN_AWAY if turns_away else "Please") + _NOTES
    return text.format(*TASKS[task])


class LLMSummarizer:
    """A model of other_models/llm.py writes notes, or turns the query away if the protocol has a
    fallback: in training (there `fallback` is set), never where what is held out is evaluated, and
    always where pages of the web were found: their ids are addresses (UR² D.3, C.4).

    log   JSONL of every new pair of training, and of nothing that is held out
    """

    def __init__(self, llm, settings: SummarizerSettings, protocol: Protocol, log: str | Path = ""):
        self.llm, self.protocol, self.log = llm, protocol, log
        self.fallback = settings.fallback
        self.sampling = sampling_by_task(settings.summary_sampling)
        if log:
            append_jsonl(log, [])  # is it writable? better known before the first search

    def __call__(self, requests: Requests, documents: Found) -> Results:
        results = [SearchResult(found) for found in documents]
        # Where nothing was found nobody is asked: a model would make facts up.
        asked = [i for i, found in enumerate(documents) if found]
        prompts = [self.prompt(requests[i], documents[i]) for i in asked]
        replies = self.llm.ask(prompts) if asked else []
        pairs = {}  # rows of one group may ask the same: once in the log
        for i, prompt, reply in zip(asked, prompts, replies, strict=True):
            instruction, text = prompt[:2]
            notes = without_thinking(reply or "")
            fallback = self.fallback_text(requests[i], documents[i])
            results[i] = as_result(documents[i], notes, fallback, prompt in self.llm.rejected)
            if notes and not requests[i].held_out:
                pair = {"instruction": instruction, "text": text, "summary": notes}
                pairs[prompt] = pair | {"fallback": results[i].fallback}
        if self.log:
            append_jsonl(self.log, pairs.values())
        return results

    def fallback_text(self, request: SearchRequest, documents: list[Document]) -> str:
        """What the policy reads if this query is turned away; "" if it may not be."""
        online = documents[0].id.startswith(("http://", "https://"))
        asked = online or (self.fallback and not request.held_out)
        return self.protocol.fallback_text if asked else ""

    def prompt(self, request: SearchRequest, documents: list[Document]) -> tuple:
        """What `ask` takes: instruction, text, and how the reply is sampled. Of the reasoning it
        has the end, as much as the model's context holds.
        """
        task, away = request.question.task, bool(self.fallback_text(request, documents))
        own = self.protocol.own_prompt("summarizer", task)
        if away:
            own = self.protocol.own_prompt("summarizer:fallback", task) or own
        how = self.sampling.get(task, self.sampling.get("other", GREEDY))
        rest = "".join(summary_prompt(request, documents, "", away, own))
        reasoning = self.llm.tail(request.reasoning.strip(), rest, how[2])
        return *summary_prompt(request, documents, reasoning, away, own), *how


def summary_prompt(
    request: SearchRequest, documents: list[Document], reasoning: str, away: bool, own: str = ""
) -> tuple[str, str]:
    """(instruction, text); `own`: of --prompt_file. The same query after another reasoning is
    another request.
    """
    values = question_values(request.question, own) | {"reasoning": reasoning}
    values |= {"query": request.query, "documents": "\n".join(number_documents(documents))}
    ours = instruction_for("math" if request.question.task == "math" else "other", away)
    return worded(own, ours, fill(LAYOUT, values), values)


def sampling_by_task(text: str) -> dict[str, tuple[float, float, int]]:
    """What `summary_sampling` says, by task: "math=0.3/0.7/8192" is (0.3, 0.7, 8192)."""
    parts = re.findall(r"(\w+)=([\d.]+)/([\d.]+)/(\d+)", text)
    return {task: (float(heat), float(top_p), int(most)) for task, heat, top_p, most in parts}


# UR²'s own prompts ask for this heading; what stands before it is no part of the notes.
_HEADING = re.compile(r"\*\*\s*Final Information\s*:?\s*\*\*:?", re.IGNORECASE)


def as_result(
    documents: list[Document], reply: str, fallback: str, rejected: bool = False
) -> SearchResult:
    """fallback   what the policy reads if the query is turned away; "" if it may not be
    rejected   if there are no notes, did the summariser refuse to read what it was given?
    """
    notes = _HEADING.split(reply)[-1].strip()
    if not notes:  # an empty text would show the documents themselves
        return SearchResult(documents, error="summariser gave no answer", rejected=rejected)
    # Signs around it, and no word more: notes that mention it are notes.
    signs = (NO_FACT, fallback, fallback.partition(".")[0])
    if fallback and words_of(notes) in map(words_of, signs):
        return SearchResult(documents, fallback, fallback=True)
    return SearchResult(documents, notes)


def words_of(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


WITHOUT_MODEL = ("none", "extractive")
SUMMARIZED = {"qa", "math", "choice", "other"}  # tasks that may have a summariser of their own


def by_task(text: str) -> dict[str, str]:
    """Task -> summariser. A single one is for all tasks: that is "other".

    >>> by_task("math=http://a/v1#m,other=none"), by_task("extractive")
    ({'math': 'http://a/v1#m', 'other': 'none'}, {'other': 'extractive'})
    """
    return dict(re.findall(r"(?:^|,)\s*(\w+)=([^,]+)", text)) or {"other": text}


def models_in(text: str) -> set[str]:
    """The models that --summarizer names."""
    return {*by_task(text).values()} - {*WITHOUT_MODEL}


def make_summarizer(
    settings: SummarizerSettings, protocol: Protocol, llms: dict, log: str | Path = ""
) -> Summarize:
    """llms: name -> the model, which the caller has loaded, of all `models_in` --summarizer."""
    own = by_task(settings.summarizer)
    known = {name: LLMSummarizer(llm, settings, protocol, log) for name, llm in llms.items()}
    known |= {"none": show_all, "extractive": partial(extract, fallback=protocol.fallback_text)}

    def summarize(requests: Requests, documents: Found) -> Results:
        named = [own.get(request.question.task, own["other"]) for request in requests]
        results = {}
        for name in {*named}:
            rows = [i for i, its in enumerate(named) if its == name]
            some = known[name]([requests[i] for i in rows], [documents[i] for i in rows])
            results |= zip(rows, some, strict=True)
        return [results[i] for i in range(len(requests))]

    return summarize


def main() -> None:
    passages = [Document("1", "ana bell", "ana bell was born in kelmouth .")]
    question = Question("demo", "in which country was ana bell born ?", ["norland"])
    print(f"{'query':32}{'the policy reads':34}fallback")
    born = ("where was ana bell born", "country of alma lind", "in which country was she born")
    for query in (*born, "17 + 25"):
        (result,) = extract([SearchRequest(question, query)], [passages])
        print(f"{query:32}{result.text:34}{result.fallback}")


if __name__ == "__main__":
    run_main(main)
