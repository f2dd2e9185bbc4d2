"""Metrics of trajectories, for training and evaluation: answers, searches, tokens.

Training logs the means of some metrics (train.LOGGED). An evaluation writes those in
plumbing.report.COLUMNS beside each prediction, and prints the means of some. No gradient depends on
them.
"""

from collections.abc import Iterable, Sequence
from itertools import compress

from data import Document
from metrics import normalize_answer, score_answer, summary_scores, tokenize
from papers import paper_of
from prompts import find_answers, find_blocks, number_documents
from rewards import cited, good_format, relevance_of
from rollout import encode
from trajectory import Search, Segment, Trajectory


def mean(values: Iterable[float]) -> float:
    """Returns the mean of the values, or 0 if there are none."""
    values = list(values)
    return sum(values) / max(1, len(values))


# ----------------------------------------------------------------------------------- one trajectory
def trajectory_metrics(t: Trajectory) -> dict[str, float]:
    """Returns the metrics that training and evaluation share. A metric that does not apply is
    missing, not 0. In open questions em, f1 and cem treat punctuation as the paper's scorer does;
    in all other tasks the three are equal (`score_answer`).
    """
    question = t.question
    punctuation = paper_of(t.protocol.name).punctuation
    scores = score_answer(t.answer, question.answers, question.task, question.options, punctuation)
    return scores | text_metrics(t) | (search_metrics(t) if t.protocol.query_tags else {})


def paper_metrics(t: Trajectory, em: float) -> dict[str, float]:
    """Returns metrics that only evaluation has: format, evidence, citations, a summary's ROUGE."""
    question = t.question
    protocol = t.protocol
    numbers = {"format": float(good_format(t))}
    if question.task == "summary":
        numbers |= summary_scores(t.answer, question.answers)
    if protocol.evidence_tags:
        numbers["evidence"] = float(bool(t.evidence))
        if t.evidence:
            numbers["support"] = evidence_support(t)
    if protocol.references_in_prompt and question.supporting:
        numbers |= arena_scores(t)
        if question.task != "summary":  # the em of a summary is a ROUGE score, not 0 or 1
            numbers["all_correct"] = em * numbers["exact_set"]  # as in ARENA Table 13
    return numbers


def evidence_support(trajectory: Trajectory) -> float:
    """Returns the share of the evidence's words that occur in the search results (documents or
    summaries), as the model read them.
    """
    documents = " ".join(search.text for search in trajectory.searches)
    document_words = normalize_answer(documents, "delete").split()
    words = normalize_answer(trajectory.evidence or "", "delete").split()
    supported = [word for word in words if word in document_words]
    return len(supported) / max(1, len(words))


def arena_scores(trajectory: Trajectory) -> dict[str, float]:
    """Returns the citation metrics. set_f1 is 2 |cited ∩ gold| / (|cited| + |gold|). Worked: cited
    {1}, gold {1, 3}: relevance 0.5, exact_set 0, set_f1 2 · 1 / (1 + 2).
    """
    numbers, gold = cited(trajectory), set(trajectory.question.supporting)
    score, total = relevance_of(numbers, gold), len(numbers) + len(gold)
    f1 = 2 * len(numbers & gold) / max(1, total)
    return {"relevance": score, "exact_set": float(score == 1.0), "set_f1": f1}


def search_metrics(t: Trajectory) -> dict[str, float]:
    """Returns metrics of searching. `queries` counts the end tags of queries in the model's text,
    `searches` the queries that were run, `rejected` those that the environment or a server
    rejected. `successful` counts the searches that found something (#R in UR² Table 10), `repeated`
    those with the same words as an earlier one. `failed_rows` is 1 if a search failed.
    """
    queries = [tuple(tokenize(search.query)) for search in t.searches]
    numbers = {
        "searched": bool(queries),
        "searches": len(queries),
        "successful": len(successful(t)),
        "rejected": len(t.rejected_queries),
        "failed_rows": t.failed,
    }
    numbers["repeated"] = len(queries) - len({*queries})
    numbers["queries"] = t.model_text.count(t.protocol.query_tags[1])
    numbers["fallbacks"] = sum(search.fallback for search in t.searches)
    if queries:
        numbers["documents_cut"] = mean(search.cut for search in t.searches)
    return {name: float(number) for name, number in numbers.items()}


def successful(t: Trajectory) -> list[Search]:
    """Returns the searches whose result was neither an error nor a fallback nor empty."""
    nothing = ("", t.protocol.empty_text)
    return [s for s in t.searches if not (s.error or s.fallback or s.text in nothing)]


def text_metrics(t: Trajectory) -> dict[str, float]:
    """Returns metrics of the text that the model wrote, and of how it ended. `repetition` is 1 if
    more than half of the 4-grams of its tokens are repeats of earlier ones.
    """
    text = t.model_text
    sampled = list(compress(t.response_ids, t.response_mask))
    blocks = [*find_answers(t.protocol, text, t.question.task)]
    blocks += find_blocks(text, *t.protocol.query_tags) if t.protocol.query_tags else []
    words = len(text.split()) - sum(len(text[b.start : b.end].split()) for b in blocks)
    grams = list(zip(sampled, sampled[1:], sampled[2:], sampled[3:], strict=False))
    counts = [(t.opened + text).count(tag) for tag in t.protocol.tags]  # begin, end, begin, ...
    numbers = {"model_tokens": len(sampled), "tokens": len(t.response_mask)}
    numbers |= {"thinking_words": max(0, words), "answered": t.answer is not None}
    numbers["truncated"] = t.stop_reason in ("length", "rejected")
    numbers["repetition"] = 2 * len(set(grams)) < len(grams)
    return numbers | {"malformed_tags": counts[::2] != counts[1::2]}


def token_metrics(t: Trajectory, tokenizer) -> dict[str, float]:
    """Counts tokens. `written` counts those of the model. Over the successful searches, `retrieved`
    counts those of the documents, and `shown` those that the policy read: documents or a summary.

    `compression` is the mean of retrieved / shown over these searches: if 10 tokens become 5 and 90
    become 10, it is (2 + 9) / 2 = 5.5. The ratio of the means would be 100 / 15 = 6.67; UR²
    appendix B.6 gives such a ratio of means, 11,346 / 761 = 14.91.
    For a thinking model, `thinking` counts the tokens of its thoughts. `written` counts them too,
    except a <think> at the end of the prompt. `unfinished` counts the thoughts without an end tag:
    one in <think>a b</think> <think>c.
    """
    numbers = {"written": float(sum(t.response_mask))}
    ratios = []
    if thoughts := "".join(s.text for s in t.segments if s.writer == "thought"):
        unfinished = ["</think>" not in thought for thought in thoughts.split("<think>")[1:]]
        numbers["thinking"] = float(len(encode(tokenizer, thoughts)))
        numbers["unfinished"] = float(sum(unfinished))
    if t.protocol.query_tags:
        numbers |= {"retrieved": 0.0, "shown": 0.0}
    for search in successful(t):
        retrieved = len(encode(tokenizer, "\n".join(number_documents(search.documents))))
        shown = len(encode(tokenizer, search.text))
        numbers["retrieved"] += retrieved
        numbers["shown"] += shown
        ratios.append(retrieved / shown)
    return numbers | ({"compression": mean(ratios)} if ratios else {})


def split_thought(text: str, inside: bool = False) -> tuple[str, str, bool]:
    """Splits a turn into (thoughts, the rest, whether a thought is still open at the end). All text
    before the last </think> belongs to the thoughts, and so does all text from a later <think> on.

    inside   whether a thought is still open from an earlier turn
    >>> split_thought("<think>Kelmouth?</think> Norland")
    ('<think>Kelmouth?</think>', ' Norland', False)
    """
    thought, end, text = text.rpartition("</think>")
    if inside and not end:
        return text, "", True
    text, begin, unfinished = text.partition("<think>")
    return thought + end + begin + unfinished, text, bool(begin)


def without_thinking(t: Trajectory) -> Trajectory:
    """Moves the thoughts of each turn, which `split_thought` finds, into segments with the writer
    "thought", so that the format check and the answer ignore them (ARENA 4.3, note 2: thinking is
    implicit). It changes `t` and returns it.
    """
    inside = False
    segments = [Segment("model", t.opened), *t.segments]
    t.segments = []
    t.opened = ""
    for segment in segments:
        if segment.writer == "model":
            thought, text, inside = split_thought(segment.text, inside)
            t.segments += [Segment("thought", thought), Segment("model", text)]
        else:
            t.segments.append(segment)
    return t


# --------------------------------------------------------------------------------- a training step
def step_searches(trajectories: Sequence[Trajectory], processes: int) -> dict[str, float]:
    """Returns the metrics of all searches of a step; `processes` processes ran them in parallel."""
    searches = [search for t in trajectories for search in t.searches]
    distinct = sum(len(documents_of(t)) for t in trajectories)
    total = sum(len(search.documents) for search in searches)
    seconds = [search.seconds for search in searches]
    shares = {
        "fallbacks": mean(search.fallback for search in searches),
        "search_errors": mean(search.error is not None for search in searches),
        "documents_cut": mean(search.cut for search in searches),
    }
    return shares | {
        "documents_seen": (total - distinct) / max(1, total),
        "slowest_search_seconds": max(seconds, default=0.0),
        "search_seconds": sum(seconds) / processes,
        **gold_recall(trajectories),
    }


def documents_of(t: Trajectory) -> set[Document]:
    return {document for search in t.searches for document in search.documents}


def gold_recall(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the share of questions for which a retrieved document contains a gold answer other
    than yes or no. The share is over the open questions that have such a gold answer and at least
    one search. Returns {} if there is no such question.
    """
    recalled = {}  # (question id, gold, ...) -> whether a document in any trajectory has a gold
    for t in trajectories:
        golds = {f" {normalize_answer(gold)} " for gold in t.question.answers} - {" yes ", " no "}
        if golds and t.searches and t.question.task == "qa":
            key = (t.question.id, *sorted(golds))
            texts = (f" {normalize_answer(f'{d.title} {d.text}')} " for d in documents_of(t))
            recalled[key] = recalled.get(key) or any(g in text for text in texts for g in golds)
    return {"gold_recall": mean(recalled.values())} if recalled else {}
