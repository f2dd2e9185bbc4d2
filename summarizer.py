"""Documents -> what the policy reads, or the fallback (UR², the section on the LLM summariser).

A summariser makes one short text of ten passages; in training it also decides whether the query
asks for a fact at all. If not, the result is a fallback: the policy is told to ask for a fact, and
the reward charges the search. Only the flag `SearchResult.fallback` says so: a passage may happen
to say what a sentinel says. The documents stay in the result, for the log.
Left out: making a small summariser of a large one's notes (lab/distil.py).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data import Document, Question, SearchRequest, SearchResult
from errors import InputError, nearest, run_main, setting
from formats.records import append_jsonl
from prompts import number_documents, without_thinking

Requests = list[SearchRequest]
Found = list[list[Document]]  # for each request
Results = list[SearchResult]  # one per request, in order
Summarize = Callable[[Requests, Found], Results]

FALLBACK_TEXT = "None"  # not "", which shows the documents
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
        " notes: http://host:port/v1#model, a HF directory or a hub name",
    )
    fallback: bool = setting(
        False, "a model that writes notes turns queries away, as in training", only="eval"
    )
    summary_sampling: str = setting("", "task=temperature/top_p/tokens,...", only="papers")


def show_all(requests: Requests, documents: Found) -> Results:
    """No summariser: the policy reads the documents, and every query counts as a lookup."""
    return [SearchResult(found) for found in documents]


def extract(requests: Requests, documents: Found) -> Results:
    """The best passage if the query names it, else "None"; a fallback if the query is no lookup."""
    results = []
    for request, found in zip(requests, documents, strict=True):
        title = found[0].title if found else ""
        lookup = is_lookup(request.query, title)
        named = lookup and names(request.query, title)
        results.append(SearchResult(found, found[0].text if named else FALLBACK_TEXT, not lookup))
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
SUMMARY_LOG = "summaries.jsonl"  # in --runs: pairs that a small summariser can be distilled from
MAX_REASONING = 4000  # characters: the end of it
GREEDY = (0.0, 1.0, 1024)  # temperature, top_p, tokens of the notes at most
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
    """A model of other_models/llm.py writes notes, or NO_FACT where its instruction asks for that.

    Training keeps a `log`, JSONL of every new pair, and turns queries away. An evaluation, without
    one, does so only with --fallback, or where pages of the web were found: their ids are addresses
    (UR² D.3, C.4). Its notes are sampled if the settings say how.
    """

    def __init__(self, llm, settings: SummarizerSettings, log: str | Path = ""):
        self.llm, self.log = llm, log
        self.turns_away = bool(log) or settings.fallback
        self.sampling = {} if log else sampling_by_task(settings.summary_sampling)
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
            results[i] = as_result(documents[i], instruction, notes, prompt in self.llm.rejected)
            if notes:
                pair = {"instruction": instruction, "text": text, "summary": notes}
                pairs[prompt] = pair | {"fallback": results[i].fallback}
        if self.log:
            append_jsonl(self.log, pairs.values())
        return results

    def prompt(self, request: SearchRequest, documents: list[Document]) -> tuple:
        """What `ask` takes: instruction, text, and how the reply is sampled."""
        task = "math" if request.question.task == "math" else "other"
        online = documents[0].id.startswith(("http://", "https://"))
        own = instruction_for(task, self.turns_away or online)
        how = self.sampling.get(task, GREEDY)
        return self.llm.instruction or own, summary_text(request, documents), *how


def summary_text(request: SearchRequest, documents: list[Document]) -> str:
    """Reasoning, query, passages: the same query after another reasoning is another request."""
    reasoning = request.reasoning.strip()[-MAX_REASONING:]
    lines = [f"Reasoning so far: {reasoning}", f"Query: {request.query}", "Passages:"]
    return "\n".join([*lines, *number_documents(documents)])


def sampling_by_task(text: str) -> dict[str, tuple[float, float, int]]:
    """What `summary_sampling` says, by task: "math=0.3/0.7/8192" is (0.3, 0.7, 8192)."""
    parts = re.findall(r"(\w+)=([\d.]+)/([\d.]+)/(\d+)", text)
    return {task: (float(heat), float(top_p), int(most)) for task, heat, top_p, most in parts}


# Signs around it, and no word more: notes that mention it are notes.
_REFUSED = re.compile(rf"[\W_]*{NO_FACT}[\W_]*", re.IGNORECASE)


def as_result(
    documents: list[Document], instruction: str, notes: str, rejected: bool
) -> SearchResult:
    """`rejected`: if there are no notes, did the summariser refuse to read what it was given?"""
    if not notes:  # an empty text would show the documents themselves
        return SearchResult(documents, error="summariser gave no answer", rejected=rejected)
    if NO_FACT in instruction and _REFUSED.fullmatch(notes):
        return SearchResult(documents, FALLBACK_TEXT, fallback=True)
    return SearchResult(documents, notes)


WITHOUT_MODEL = {"none": show_all, "extractive": extract}


def make_summarizer(settings: SummarizerSettings, llm=None, log: str | Path = "") -> Summarize:
    """A name that is not in WITHOUT_MODEL names a model, which the caller loads and hands in."""
    name = settings.summarizer
    if name in WITHOUT_MODEL:
        return WITHOUT_MODEL[name]
    if llm is None:
        like = nearest(name, WITHOUT_MODEL)
        raise InputError(f"--summarizer {name}: unknown; none, extractive, or a model{like}")
    return LLMSummarizer(llm, settings, log)


SEARCH_FAILED = "search failed"  # of one query, while others of its call were answered


def make_search(retriever, summarize: Summarize = show_all, k: int = 5) -> Callable:
    """What the rollout is given: retrieve for all requests in one call, then summarise for all.
    search.seconds(requests): how long a retriever that asks elsewhere may take for their queries.
    """

    def search(requests: Requests) -> Results:
        found = retrieve(retriever, requests, k) if requests else []
        results = [SearchResult(error=SEARCH_FAILED, rejected=its is False) for its in found]
        answered = [i for i, documents in enumerate(found) if isinstance(documents, list)]
        if answered:
            told = summarize([requests[i] for i in answered], [found[i] for i in answered])
            for i, result in zip(answered, told, strict=True):
                results[i] = result
        return results

    if hasattr(retriever, "seconds"):
        search.seconds = lambda requests: retriever.seconds(len({r.query for r in requests}), k)
    return search


def retrieve(retriever, requests: Requests, k: int) -> list[list[Document] | bool | None]:
    """The documents of every request, None where its search failed, False where the query was
    rejected; each query once.
    """
    oracle = getattr(retriever, "needs_questions", False)
    # For the oracle the question decides: two questions may well ask the same query.
    keys = [(request.query, request.question.id if oracle else "") for request in requests]
    unique = dict(zip(keys, requests, strict=True))
    questions = [[request.question for request in unique.values()]] if oracle else []
    found = retriever.search([query for query, _ in unique], k, *questions)
    # strict: a retriever that drops a query must not shift the others
    documents = dict(zip(unique, found, strict=True))
    answers = [documents[key] for key in keys]
    return [answer if answer in (None, False) else list(answer) for answer in answers]


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
