"""The summariser: turns retrieved documents into one short text, or rejects the query (UR²).

If the protocol has a fallback sentence, a summariser may reject a query that does not ask for a
fact: `extractive`, which decides by a rule, always; a language model only in training (not in its
evaluations), for web pages, or with --fallback. The result of a rejected query is a fallback:
instead of a summary the policy reads this sentence, and UR²'s reward penalises the search. Rewards
and metrics recognise a fallback by the field `fallback` and never by the text, because a document
could contain the same sentence; only `as_result` decides by a text, that of a model's reply. The
result also holds the documents, for metrics.
Left out: distilling a small summariser from a large one (lab/distil.py).
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data import Document, Question, SearchRequest, SearchResult
from errors import run_main
from formats.records import append_jsonl
from prompts import (
    Protocol,
    fill,
    message_parts,
    number_documents,
    question_values,
    quotes,
    words_of,
)
from retriever import Found, Requests, Results, Summarize, show_all
from settings import WITHOUT_MODEL, Settings, by_task

# What the policy reads if `extract` gives neither a document nor the fallback. It is not "": for a
# result with an empty text the policy is shown the documents. In the built-in world, whose models
# know few words, this is also the fallback text.
FALLBACK_TEXT = "None"
OPERATORS = set("+-−*/×÷=")  # as words of their own: the "-" of Jean-Luc is no minus
MAX_QUERY_WORDS = 12
# In the built-in world a lookup has a name after "of" or "one": "mayor of kelmouth", "one jot in
# kip" (two units). In real text a capital makes "The" part of a name: "director of The Quitter".
_NAMELESS = "a an the he him his she her it its they them their this that".replace(" ", "|")
_OF_A_NAME = re.compile(rf"\b(?i:of|one)\s+(?!(?:{_NAMELESS})\b)[^\W\d]")


def extract(requests: Requests, documents: Found, fallback: str = FALLBACK_TEXT) -> Results:
    """Returns a result for each query. Its text is that of the best document if the query is a
    lookup and contains the document's title. It is `fallback` if the query is no lookup and
    `fallback` is not "". Otherwise it is "None".
    """
    results = []
    for request, retrieved in zip(requests, documents, strict=True):
        title = retrieved[0].title if retrieved else ""
        lookup = is_lookup(request.query, title)
        text = retrieved[0].text if lookup and has_title(request.query, title) else FALLBACK_TEXT
        reject = bool(fallback) and not lookup
        results.append(SearchResult(retrieved, fallback if reject else text, reject))
    return results


def is_lookup(query: str, title: str = "") -> bool:
    """Tells whether a query asks for a fact: it has at most MAX_QUERY_WORDS words, none of which is
    an arithmetic sign, and contains the title or, after "of" or "one", what may be another name.

    >>> is_lookup("country of alma lind"), is_lookup("in which country was she born")
    (True, False)
    """
    words = query.split()
    return (
        len(words) <= MAX_QUERY_WORDS
        and OPERATORS.isdisjoint(words)
        and (has_title(query, title) or _OF_A_NAME.search(query) is not None)
    )


def has_title(query: str, title: str) -> bool:
    """Tells whether a query contains the title as whole words: "diana bell" lacks "ana bell"."""
    words = r"\s+".join(map(re.escape, title.split()))
    return bool(words) and re.search(rf"(?<!\w){words}(?!\w)", query, re.IGNORECASE) is not None


NO_FACT = "NO FACT"
# A file in --output_dir. lab/distil.py can train a small summariser on it.
SUMMARY_LOG = "summaries.jsonl"
# Temperature, top_p, limit of new tokens (thinking included). rollout.NOTE_TOKENS says how many
# tokens of the notes the policy reads.
GREEDY = (0.0, 1.0, 8192)
MAX_REASONING = 16_000  # characters
MAX_REJECTION = 60  # words of a reply whose sentence is the fallback's
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
    """Returns one of four instructions, as in UR² D.3 but in our words: for task "math" or "other",
    with or without the instruction to reject queries that do not ask for a fact.
    """
    return (_GIVEN + (_TURN_AWAY if turns_away else "Please") + _NOTES).format(*TASKS[task])


@dataclass
class LLMSummarizer:
    """Lets a model of other_models/llm.py write notes on the documents or reject the query. It may
    reject a query only if the protocol has a fallback, and only in two cases (UR² D.3, C.4): for
    web pages, or with `settings.fallback` (always on in training) outside the evaluations during
    training (`held_out`).

    log   JSONL file of prompts and summaries, for distillation; evaluations during training are
          left out
    """

    llm: object
    settings: Settings
    protocol: Protocol
    log: str | Path = ""

    def __call__(self, requests: Requests, documents: Found) -> Results:
        results = [SearchResult(retrieved) for retrieved in documents]
        # Without documents the model is not called: it would invent facts.
        rows = [i for i, retrieved in enumerate(documents) if retrieved]
        prompts = [self.prompt(requests[i], documents[i]) for i in rows]
        pairs = {}  # keyed by prompt, so that a prompt is logged once per call
        for i, prompt, reply in zip(rows, prompts, self.llm.ask(prompts), strict=True):
            fallback, rejected = self.fallback_text(requests[i], documents[i]), self.llm.rejected
            results[i] = as_result(documents[i], reply or "", fallback, prompt in rejected)
            if reply and not requests[i].held_out:
                pair = {"instruction": prompt[0], "text": prompt[1], "summary": reply}
                pairs[prompt] = pair | {"fallback": results[i].fallback}
        if self.log:
            append_jsonl(self.log, pairs.values())
        return results

    def fallback_text(self, request: SearchRequest, documents: list[Document]) -> str:
        """Returns what the policy reads if this query is rejected; "" if it may not be rejected."""
        online = documents[0].id.startswith(("http://", "https://"))  # a web page's id is its URL
        may_reject = online or (self.settings.fallback and not request.held_out)
        return self.protocol.fallback_text if may_reject else ""

    def prompt(self, request: SearchRequest, documents: list[Document]) -> tuple:
        """Returns a request for `ask`: instruction, text, temperature, top_p, token limit."""
        task, may_reject = request.question.task, bool(self.fallback_text(request, documents))
        custom = self.protocol.custom_prompt("summarizer", task)
        if may_reject:
            custom = self.protocol.custom_prompt("summarizer:fallback", task) or custom
        sampling = {"other": GREEDY} | self.settings.summary_sampling
        asked = summary_prompt(request, documents, may_reject, custom)
        return *asked, *sampling.get(task, sampling["other"])


def summary_prompt(
    request: SearchRequest, documents: list[Document], may_reject: bool, custom: str = ""
) -> tuple[str, str]:
    """Returns (instruction, text). `custom` is the summariser's section of --prompt_file, or "". Of
    longer reasoning the text has only the end.
    """
    kind = "math" if request.question.task == "math" else "other"
    instruction, layout = message_parts(custom, instruction_for(kind, may_reject), LAYOUT)
    values = question_values(request.question, layout) | {"query": request.query}
    values["reasoning"] = request.reasoning.strip()[-MAX_REASONING:]
    values["documents"] = "\n".join(number_documents(documents))
    return instruction, fill(layout, values)


# UR²'s own prompts ask for this heading before the notes; the text above it is dropped.
_HEADING = re.compile(r"\*\*\s*Final Information\s*:?\s*\*\*:?", re.IGNORECASE)


def as_result(
    documents: list[Document], reply: str, fallback: str, rejected: bool = False
) -> SearchResult:
    """Turns a summariser's reply into a result.

    fallback   text for the policy if the reply says that the query does not ask for a fact; if ""
               is given, such a reply counts as notes
    rejected   whether the server rejected the prompt; only used if there are no notes
    """
    notes = _HEADING.split(reply)[-1].strip()
    if fallback and (rejects(reply, fallback) or rejects(notes, fallback)):
        return SearchResult(documents, fallback, fallback=True)
    if not notes:  # an error: without it the policy would read the documents
        return SearchResult(documents, error="summariser gave no answer", rejected=rejected)
    return SearchResult(documents, notes)


def rejects(reply: str, fallback: str) -> bool:
    """Returns whether a reply of at most MAX_REJECTION words rejects the query: if it has the
    fallback's sentence anywhere, or if a line of it, case and punctuation aside, is NO_FACT or the
    fallback's text (UR² D.3: the query is classified first). Longer notes may quote the sentence;
    the metric `quoted_fallbacks` counts these.
    """
    if len(reply.split()) > MAX_REJECTION:
        return False
    texts = [words_of(NO_FACT), words_of(fallback)]
    return quotes(reply, fallback) or any(words_of(line) in texts for line in reply.splitlines())


def models_in(text: str) -> set[str]:
    """Returns the models that --summarizer names."""
    return {*by_task(text).values()} - {*WITHOUT_MODEL}


def make_summarizer(
    settings: Settings, protocol: Protocol, llms: dict, log: str | Path = ""
) -> Summarize:
    """Returns a function that summarises each request's documents with the summariser of its task.

    llms   name -> loaded model, for each model that --summarizer names (`models_in`)
    """
    names_by_task = by_task(settings.summarizer)
    known = {name: LLMSummarizer(llm, settings, protocol, log) for name, llm in llms.items()}
    known |= {"none": show_all, "extractive": partial(extract, fallback=protocol.fallback_text)}

    def summarize(requests: Requests, documents: Found) -> Results:
        chosen = [names_by_task.get(r.question.task, names_by_task["other"]) for r in requests]
        results = {}
        for name in {*chosen}:
            rows = [i for i, row_name in enumerate(chosen) if row_name == name]
            summaries = known[name]([requests[i] for i in rows], [documents[i] for i in rows])
            results |= zip(rows, summaries, strict=True)
        return [results[i] for i in range(len(requests))]

    return summarize


def main() -> None:
    documents = [Document("1", "ana bell", "ana bell was born in kelmouth .")]
    question = Question("demo", "in which country was ana bell born ?", ["norland"])
    print(f"{'query':32}{'the policy reads':34}fallback")
    born = ("where was ana bell born", "country of alma lind", "in which country was she born")
    for query in (*born, "17 + 25"):
        (result,) = extract([SearchRequest(question, query)], [documents])
        print(f"{query:32}{result.text:34}{result.fallback}")


if __name__ == "__main__":
    run_main(main)
