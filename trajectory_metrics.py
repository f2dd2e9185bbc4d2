"""What is counted in trajectories, for training and for evaluation: answers, searches, tokens.

It is none of the path's files: it needs papers.py, for each paper's own punctuation and format, and
no gradient hangs on it. Training logs means of these numbers (train.LOGGED), an evaluation writes
those of each trajectory beside its prediction (plumbing.report.COLUMNS).
"""

from collections.abc import Iterable, Sequence
from itertools import compress

from data import Document
from metrics import normalize_answer, score_answer, summary_scores, tokenize
from papers import paper_of
from prompts import find_answers, find_blocks, number_documents
from rewards import arena_scores, evidence_support
from rollout import encode
from trajectory import Search, Segment, Trajectory


def mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    values = list(values)
    return sum(values) / max(1, len(values))


# ----------------------------------------------------------------------------------- one trajectory
def trajectory_metrics(t: Trajectory) -> dict[str, float]:
    """The numbers of one trajectory, which training logs too. What does not apply to it has no
    entry, not a 0. em, f1 and cem treat punctuation as the paper's own scorer does; of a summary
    each is its ROUGE.
    """
    question, punctuation = t.question, paper_of(t.protocol.name).punctuation
    asked = (question.answers, question.task, question.options)
    numbers = score_answer(t.answer, *asked, punctuation) | text_metrics(t)
    return numbers | (search_metrics(t) if t.protocol.query_tags else {})


def paper_metrics(t: Trajectory, em: float) -> dict[str, float]:
    """What only tables of an evaluation show: format, evidence, citations, a summary's ROUGE."""
    question, protocol = t.question, t.protocol
    numbers = {"format": float(paper_of(protocol.name).good_format(t))}
    if question.task == "summary":
        numbers |= summary_scores(t.answer, question.answers)
    if protocol.evidence_tags:
        numbers["evidence"] = float(bool(t.evidence))
        if t.evidence:
            numbers["support"] = evidence_support(t)
    if protocol.references_in_prompt and question.supporting:
        numbers |= arena_scores(t)
        if question.task != "summary":  # ARENA Table 13
            numbers["all_correct"] = em * numbers["exact_set"]
    return numbers


def search_metrics(t: Trajectory) -> dict[str, float]:
    """`queries` that it wrote, also `rejected` ones; `searches` that were run (UR² Table 10);
    `failed_rows`: did one of them fail?
    """
    asked = [tuple(tokenize(search.query)) for search in t.searches]
    numbers = {"searched": bool(asked), "searches": len(asked), "successful": len(successful(t))}
    numbers |= {"rejected": len(t.rejected_queries), "failed_rows": t.failed}
    numbers["repeated"] = len(asked) - len({*asked})
    numbers["queries"] = t.model_text.count(t.protocol.query_tags[1])
    numbers["fallbacks"] = sum(search.fallback for search in t.searches)
    if asked:
        numbers["documents_cut"] = mean(search.cut for search in t.searches)
    return {name: float(number) for name, number in numbers.items()}


def successful(t: Trajectory) -> list[Search]:
    nothing = ("", t.protocol.empty_text)
    return [s for s in t.searches if not (s.error or s.fallback or s.text in nothing)]


def text_metrics(t: Trajectory) -> dict[str, float]:
    """How it wrote and ended. It repeats itself (`repetition`) if most of its own 4-grams stood in
    it before.
    """
    text, own = t.model_text, list(compress(t.response_ids, t.response_mask))
    blocks = [*find_answers(t.protocol, text, t.question.task)]
    blocks += find_blocks(text, *t.protocol.query_tags) if t.protocol.query_tags else []
    words = len(text.split()) - sum(len(text[b.start : b.end].split()) for b in blocks)
    grams = list(zip(own, own[1:], own[2:], own[3:], strict=False))
    counts = [(t.opened + text).count(tag) for tag in t.protocol.tags]  # begin, end, begin, ...
    numbers = {"model_tokens": len(own), "tokens": len(t.response_mask)}
    numbers |= {"thinking_words": max(0, words), "answered": t.answer is not None}
    numbers["truncated"] = t.stop_reason in ("length", "rejected")
    numbers["repetition"] = 2 * len(set(grams)) < len(grams)
    return numbers | {"malformed_tags": counts[::2] != counts[1::2]}


def token_metrics(t: Trajectory, tokenizer) -> dict[str, float]:
    """Tokens that it wrote; of its successful searches those of the documents, those that it read
    in their place, and the mean of the ratios: of 10 to 5 and 90 to 10 (2 + 9) / 2 = 5.5. The ratio
    of their means is 100 / 15 = 6.67 (UR² appendix B.6: 11,346 / 761 = 14.91).

    Where its thinking was cut off: `thinking` counts its tokens, which are among those written, and
    `unfinished` the thoughts without an end. <think>a b</think> <think>c: one of two.
    """
    numbers, ratios = {"written": float(sum(t.response_mask))}, []
    if thoughts := "".join(s.text for s in t.segments if s.writer == "thought"):
        unfinished = ["</think>" not in thought for thought in thoughts.split("<think>")[1:]]
        numbers["thinking"] = float(len(encode(tokenizer, thoughts)))
        numbers["unfinished"] = float(sum(unfinished))
    if t.protocol.query_tags:
        numbers |= {"retrieved": 0.0, "shown": 0.0}
    for search in successful(t):
        found = len(encode(tokenizer, "\n".join(number_documents(search.documents))))
        shown = len(encode(tokenizer, search.text))
        numbers["retrieved"] += found
        numbers["shown"] += shown
        ratios.append(found / shown)
    return numbers | ({"compression": mean(ratios)} if ratios else {})


def split_thought(text: str, inside: bool = False) -> tuple[str, str, bool]:
    """Splits the thinking off a turn: (thoughts, the rest, does a thought go on behind it?).

    inside   whether the turn begins in a thought: before it, the thought had no end
    >>> split_thought("<think>Kelmouth?</think> Norland")
    ('<think>Kelmouth?</think>', ' Norland', False)
    """
    thought, end, text = text.rpartition("</think>")
    if inside and not end:
        return text, "", True
    text, begin, unfinished = text.partition("<think>")
    return thought + end + begin + unfinished, text, bool(begin)


def without_thinking(t: Trajectory) -> Trajectory:
    """Marks what the model thought in <think> ... </think> as no text of its own, so that neither
    format nor answer is looked for in it (ARENA 4.3, note 2: thinking is implicit).
    """
    inside, before = False, [Segment("model", t.opened), *t.segments]
    t.segments, t.opened = [], ""
    for segment in before:
        if segment.writer == "model":
            thought, text, inside = split_thought(segment.text, inside)
            t.segments += [Segment("thought", thought), Segment("model", text)]
        else:
            t.segments.append(segment)
    return t


# ---------------------------------------------------------------------------------- those of a step
def step_searches(trajectories: Sequence[Trajectory], processes: int) -> dict[str, float]:
    """Of all searches of a step, which this many processes made at once."""
    searches = [search for t in trajectories for search in t.searches]
    known = sum(len(documents_of(t)) for t in trajectories)
    found, seconds = sum(len(s.documents) for s in searches), [s.seconds for s in searches]
    shares = {
        "fallbacks": mean(search.fallback for search in searches),
        "search_errors": mean(search.error is not None for search in searches),
        "documents_cut": mean(search.cut for search in searches),
    }
    return {
        **shares,
        "documents_seen": (found - known) / max(1, found),
        "slowest_search_seconds": max(seconds, default=0.0),
        "search_seconds": sum(seconds) / processes,
        **gold_recall(trajectories),
    }


def documents_of(t: Trajectory) -> set[Document]:
    return {document for search in t.searches for document in search.documents}


def gold_recall(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of open questions that were searched for: to which share does a passage hold an answer?"""
    held = {}  # (id, gold, ...) -> does a passage that one of its samples found hold a gold?
    for t in trajectories:
        golds = {f" {normalize_answer(gold)} " for gold in t.question.answers} - {" yes ", " no "}
        if golds and t.searches and t.question.task == "qa":
            key = (t.question.id, *sorted(golds))
            texts = (f" {normalize_answer(f'{d.title} {d.text}')} " for d in documents_of(t))
            held[key] = held.get(key) or any(gold in text for text in texts for gold in golds)
    return {"gold_recall": mean(held.values())} if held else {}
