"""Metrics of trajectories, for training and evaluation: answers, searches, tokens.

Training logs the means of some metrics (train.LOGGED). An evaluation writes all of them beside each
prediction (`prediction_record`), and prints the means of some (plumbing.report.COLUMNS). No
gradient depends on them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from metrics import normalize_answer, score_answer, summary_scores, tokenize
from papers import paper_of
from prompts import number_documents, quotes, stated_choice
from rewards import cited, good_format, relevance_of
from rollout import encode
from trajectory import Search, Trajectory

Metrics = dict[str, float]  # name -> value


def mean(values: Iterable[float]) -> float:
    """Returns the mean of the values, or 0 if there are none."""
    values = list(values)
    return sum(values) / max(1, len(values))


# ----------------------------------------------------------------------------------- one trajectory
def read_answer(t: Trajectory) -> str | None:
    """Returns the answer as evaluations read it. Under UR² a choice may be stated in any of the
    ways of `stated_choice`, as in lab/baselines (D.4); rewards take the form of its prompt only.
    """
    if t.question.task != "choice" or t.protocol.answer_tags:
        return t.answer
    return stated_choice(t.model_text, t.question.options) or t.answer


def trajectory_metrics(t: Trajectory, lenient: bool = False) -> Metrics:
    """Returns the metrics that training and evaluation share; `lenient` reads choices as
    `read_answer` does. A metric that does not apply is missing, not 0. In open questions em, f1 and
    cem treat punctuation as the paper's scorer does; in all other tasks the three are equal
    (`score_answer`).
    """
    question = t.question
    punctuation = paper_of(t.protocol.name).punctuation
    answer = read_answer(t) if lenient else t.answer
    scores = score_answer(answer, question.answers, question.task, question.options, punctuation)
    return scores | text_metrics(t) | (search_metrics(t) if t.protocol.query_tags else {})


def prediction_metrics(t: Trajectory) -> Metrics:
    """Returns the metrics of an evaluation: those of training, and format, evidence and citations.
    For a summary ROUGE replaces em, f1 and cem.
    """
    question = t.question
    protocol = t.protocol
    numbers = trajectory_metrics(t, lenient=True)
    numbers["answered"] = read_answer(t) is not None
    numbers["format"] = float(good_format(t))
    if protocol.evidence_tags:
        numbers["evidence"] = float(bool(t.evidence))
        if t.evidence:
            numbers["support"] = evidence_support(t)
    if protocol.references_in_prompt and question.supporting:
        # Worked: cited {1}, gold {1, 3}: relevance 0.5, exact_set 0.
        numbers["relevance"] = relevance_of(cited(t), {*question.supporting})
        numbers["exact_set"] = float(numbers["relevance"] == 1.0)
        numbers["all_correct"] = numbers["em"] * numbers["exact_set"]  # as in ARENA Table 13
    if question.task == "summary":
        left_out = ("em", "f1", "cem", "all_correct")
        numbers = {name: number for name, number in numbers.items() if name not in left_out}
        numbers |= summary_scores(t.answer, question.answers)
    return numbers


def prediction_record(t: Trajectory, sample: int) -> dict:
    """Returns the record of a trajectory in a predictions file."""
    record = t.question.record | {
        "sample": sample,
        "prediction": read_answer(t),
        "judge_sees": t.protocol.judge_sees,
        "punctuation": paper_of(t.protocol.name).punctuation,
        "transcript": t.text,
        "stop_reason": t.stop_reason,
        "metrics": prediction_metrics(t),
        "searches": [
            {"query": s.query, "fallback": s.fallback, "error": s.error} for s in t.searches
        ],
    }
    if t.protocol.evidence_tags:
        record["evidence"] = t.evidence
    return record


def evidence_support(trajectory: Trajectory) -> float:
    """Returns the share of the evidence's words that occur in the search results (documents or
    summaries), as the model read them.
    """
    documents = " ".join(search.text for search in trajectory.searches)
    found = {*normalize_answer(documents, "delete").split()}
    words = normalize_answer(trajectory.evidence or "", "delete").split()
    return mean(word in found for word in words)


def search_metrics(t: Trajectory) -> Metrics:
    """Returns metrics of searching. `queries` counts the end tags of queries in the model's text,
    `searches` the queries that were run, `rejected` those that the environment or a server
    rejected. `successful` counts the searches that found something (#R in UR² Table 10), `repeated`
    those with the same words as an earlier one, `quoted_fallbacks` the results that have the
    fallback's sentence in them but count as notes. `failed_rows` is 1 if a search failed.
    """
    queries = [tuple(tokenize(search.query)) for search in t.searches]
    notes = [search.text for search in t.searches if not search.fallback]
    numbers = {
        "searched": bool(queries),
        "searches": len(queries),
        "successful": len(successful(t)),
        "repeated": len(queries) - len({*queries}),
        "failed_rows": t.failed,
        "rejected": len(t.rejected_queries),
        "queries": t.model_text.count(t.protocol.query_tags[1]),
        "fallbacks": len(queries) - len(notes),
        "quoted_fallbacks": sum(quotes(text, t.protocol.fallback_text) for text in notes),
    }
    if queries:
        numbers["documents_cut"] = mean(search.cut for search in t.searches)
    return {name: float(number) for name, number in numbers.items()}


def successful(t: Trajectory) -> list[Search]:
    """Returns the searches whose result was neither an error nor a fallback nor empty."""
    nothing = ("", t.protocol.empty_text)
    return [s for s in t.searches if not (s.error or s.fallback or s.text in nothing)]


def text_metrics(t: Trajectory) -> Metrics:
    """Returns metrics of the text that the model wrote, and of how it ended."""
    counts = [(t.opened + t.model_text).count(tag) for tag in t.protocol.tags]  # begin, end, ...
    return {
        "model_tokens": sum(t.response_mask),
        "tokens": len(t.response_mask),
        "answered": t.answer is not None,
        "truncated": t.stop_reason in ("length", "rejected"),
        "malformed_tags": counts[::2] != counts[1::2],
    }


def token_metrics(t: Trajectory, tokenizer) -> Metrics:
    """Counts tokens over the successful searches: `retrieved` of the documents, and `shown` to the
    policy, which may get a summary instead. UR² appendix B.6 gives the ratio of the means of these
    two, 11,346 / 761 = 14.91.
    """
    if not t.protocol.query_tags:
        return {}
    searches = successful(t)
    layouts = t.protocol.document_layouts
    documents = ("\n".join(number_documents(search.documents, layouts)) for search in searches)
    return {
        "retrieved": float(sum(len(encode(tokenizer, text)) for text in documents)),
        "shown": float(sum(len(encode(tokenizer, search.text)) for search in searches)),
    }


# --------------------------------------------------------------------------------- a training step
def step_searches(trajectories: Sequence[Trajectory], processes: int) -> Metrics:
    """Returns the metrics of all searches of a step; `processes` processes ran them in parallel."""
    searches = [search for t in trajectories for search in t.searches]
    return gold_recall(trajectories) | {
        "fallbacks": mean(search.fallback for search in searches),
        "search_errors": mean(search.error is not None for search in searches),
        "documents_cut": mean(search.cut for search in searches),
        "search_seconds": sum(search.seconds for search in searches) / processes,
    }


def gold_recall(trajectories: Sequence[Trajectory]) -> Metrics:
    """Returns the share of questions for which a retrieved document contains a gold answer other
    than yes or no. The share is over the open questions that have such a gold answer and at least
    one search. Returns {} if there is no such question.
    """
    recalled = defaultdict(bool)  # question id -> whether a document in any trajectory has a gold
    for t in trajectories:
        golds = {f" {normalize_answer(gold)} " for gold in t.question.answers} - {" yes ", " no "}
        if golds and t.searches and t.question.task == "qa":
            documents = {document for search in t.searches for document in search.documents}
            texts = (f" {normalize_answer(f'{d.title} {d.text}')} " for d in documents)
            recalled[t.question.id] |= any(gold in text for text in texts for gold in golds)
    return {"gold_recall": mean(recalled.values())} if recalled else {}
