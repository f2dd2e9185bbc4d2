r"""What a trajectory is worth: one function per reward formula. Each returns named components, and
the reward is their sum. A docstring has its formula, and these letters:

    n   valid searches: executed by the environment, for a query with a word in it, under UR² of at
        most 20; one that failed (`Search.error`) was not executed, and no reward pays or charges
        for it
    f   searches that came back as the fallback ("this query asks for no fact")
    v   format violations

Training exploits a reward that breaks one of these rules:
  1. only the model's own text is scored, not what stands in a document or in the prompt;
  2. searches are counted in the environment's log: a tag can be written without a search;
  3. the last answer is scored; two answers are a fault.

Left out: what looks at several trajectories (an advantage), and asking a judge or a reader: what
they say is an argument here (plumbing/build.py hands them in).
"""

import contextlib
import pickle
import re
import runpy
import sys
import threading
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from data import Document, Question
from errors import InputError, run_main, setting
from metrics import exact_match, f1_score, normalize_answer, score_answer, tokenize
from prompts import (
    PROTOCOLS,
    Protocol,
    Tags,
    as_protocol,
    find_answers,
    find_blocks,
    number_documents,
    section_letters,
)
from trajectory import Trajectory, trajectory_from_text

RewardTerms = dict[str, float]  # the named components of a reward
Embedder = Callable[[list[str]], np.ndarray]  # n texts -> [n, d]
Judge = Callable[[Question, str], float]

LARGEST = 1e15  # of one's own term: its square is a number in fp32, too
SLOW = 60.0  # seconds after which a line says what the run is waiting for

REWARDS: dict[
    str, Callable
] = {}  # name -> (trajectory, settings, step, extras) -> RewardTerms; below
# UR²'s backbone -> what n = 0, 1, ≥ 2 searches earn in stage 1
UR2_RETRIEVAL = {"qwen_7b": (0, 3, 4), "qwen_3b": (0, 5, 7), "llama_8b": (0, 3, 3)}


@dataclass(frozen=True)
class RewardSettings:
    reward: str = setting(
        "ur2_stage1", "or your own, FILE.py:FUNCTION; _code and _llama: as released", one_of=REWARDS
    )
    reward_variant: str = setting("qwen_7b", "UR²'s", one_of=UR2_RETRIEVAL, only="papers")
    answer_metric: str = setting("f1", "of the answer reward", one_of=("f1", "em", "cem"))
    fallback_penalty: float = setting(0.5, "UR²: per search answered by the fallback", least=0)
    partly: float = setting(0.0, "UR²: of math judged partly right", least=0, only="papers")
    format_check: str = setting("strict", "UR²: loose asks for the end", one_of=("strict", "loose"))
    evidence_reward: bool = setting(
        True, "R-Search: False pays the answer and the format only", only="papers"
    )
    whole_reply: bool = setting(False, "R-Search: all of the reader's, as eq. 4", only="papers")
    beta: float = setting(0.3, "When to Search: price of a search", least=0)
    left_out: str = setting("", "a term, as in When to Search's Table 4", only="papers")
    relevance_reward: bool = setting(True, "ARENA: is relevance paid?", only="papers")
    bonus: float = setting(10.0, "ARENA: for all three right", only="papers", least=0)


@dataclass(frozen=True)
class Extras:
    """What a reward takes from outside its trajectory."""

    correct: bool | None = None  # a verdict on the answer; None: the metrics decide
    reader_answer: str = ""  # R-Search: what another model answers from the evidence
    embed: Embedder | None = None  # When to Search: queries -> vectors
    grade: Judge | None = None  # UR²: 2, 1 or 0 for a math answer that is not plainly equal


@dataclass
class OtherModels:
    """Whom the rewards of a step ask. Each is called once with all trajectories, so that a model is
    asked in one batch; by default nobody is asked.
    """

    verdicts: Callable = lambda rows: [None] * len(rows)  # each is an Extras.correct
    readings: Callable = lambda rows: [""] * len(rows)  # each is an Extras.reader_answer
    embedder: Callable = lambda rows: None  # an Extras.embed
    grader: Callable = lambda rows: None  # an Extras.grade
    stats: dict[str, Callable] = field(default_factory=dict)  # name -> what is logged of them


# --------------------------------------------------------------------------- what all formats share
MAX_QUERY_WORDS = 20
MAX_ANSWER_WORDS = 10
has_word = re.compile(r"\w").search  # a full stop is no query


def count_valid_searches(trajectory: Trajectory, most_words: float = MAX_QUERY_WORDS) -> int:
    """n. The environment runs any query; only one with a word in it, and not too many, earns."""
    queries = [search.query for search in trajectory.executed if has_word(search.query)]
    return sum(len(query.split()) <= most_words for query in queries)


def is_long(question: Question, answer: str) -> bool:
    """Over 10 words, and longer than every gold."""
    return count_words(answer) > max([MAX_ANSWER_WORDS, *map(count_words, question.answers)])


def count_words(text: str) -> int:
    """The pieces between blanks, or the words and numbers of two signs or more, whichever are more:
    "Ana/Bo/1900" is 3, however guesses are joined, and the terms of "3x^9+2x^8+x" are 1.
    """
    words = re.findall(r"[^\W\d_]{2,}|(?<![^\W_])\d{2,}(?![^\W_])", text)
    return max(len(text.split()), len(words))


def scripts(text: str) -> set[str]:
    """The scripts of its letters: "π r², 巴黎" -> GREEK, LATIN, CJK. NFKC turns ℝ into R, and would
    turn the ℵ of mathematics into a Hebrew letter.
    """
    letters = set(unicodedata.normalize("NFKC", re.sub("[ℵ-ℸ]", "", text)))
    letters = [one for one in letters if unicodedata.category(one) in ("Lu", "Ll", "Lt", "Lo")]
    return {unicodedata.name(one, "UNKNOWN").split()[0] for one in letters}


def is_garbled(trajectory: Trajectory) -> bool:
    """U+FFFD, private use, or a script that is in no text shown and is neither Latin nor Greek."""
    question, text = trajectory.question, trajectory.model_text
    if "\ufffd" in text or "Co" in map(unicodedata.category, text):
        return True
    shown = [question.question, *question.options, *number_documents(question.references)]
    shown += [segment.text for segment in trajectory.segments if segment.writer != "model"]
    return not scripts(text) <= scripts(" ".join(shown)) | {"LATIN", "GREEK"}


def without_eos(text: str) -> str:
    """The text without the EOS token that closes it: it is decoded with the rest."""
    return re.sub(r"(?:<\|[^|<>]*\|>|</s>|<eos>)\s*$", "", text)


def own_format_faults(trajectory: Trajectory) -> list[str]:
    """Faults that UR² and R1-Searcher name alike: an entry for each query tag without its partner,
    each block of documents that it opened or closed (the environment's are not in this text), and
    each answer with a tag in it.
    """
    text, protocol, faults = trajectory.model_text, trajectory.protocol, []
    if protocol.query_tags:
        faults += ["unpaired_query_tags"] * stray_tags(text, protocol.query_tags)
        faults += ["written_documents"] * max(map(text.count, protocol.documents_tags))
    if is_garbled(trajectory):
        faults.append("garbled_text")
    for answer in trajectory.answers:
        faults += ["tag_in_answer"] * any(tag in answer for tag in protocol.tags)
    return faults


def stray_tags(text: str, tags: Tags) -> int:
    """How many have no partner: "<a> 1 </a> <a>" has one <a>."""
    return sum(map(text.count, tags)) - 2 * len(find_blocks(text, *tags))


# ---------------------------------------------------------------------------------------------- UR²
UR2_CHOICE_STEPS = {"qwen_7b": 10, "qwen_3b": 15, "llama_8b": 10}  # steps 0 .. 9 (14) pay it

# Not <|im_end|> or <|eot_id|>: a response that ends well ends in this EOS token.
_HEADER = r"^(?:user|assistant)(?=:?[ \t]*$)"  # of a chat turn: alone on its line
_ILLEGAL = rf"(?m){_HEADER}|<\|im_start\|>|<tool_call>|<\|(?:start|end)_header_id\|>"


def ur2_violations(
    trajectory: Trajectory, search_required: bool = False, format_check: str = "strict"
) -> list[str]:
    """The names of all format violations; v is their number (UR² eq. 1, appendix C.7).

    Each counts: an answer more than one, a stray tag, a block of documents, a query that is too
    long, without a word, beyond the limit or on a question that may not search. Only garbled text
    counts once, and an illegal token once for its kind, or a loop would cost without end.
    `search_required`: stage 1. format_check="loose": does the text end in an answer? (ablation)
    >>> ur2_violations(example("ur2", answer="a b c d e f g h i j k"))     # 11 words
    ['long_answer']
    """
    if format_check == "loose":
        text = without_eos(trajectory.model_text)
        answers = find_answers(trajectory.protocol, text, trajectory.question.task)
        ends = answers and not has_word(text[answers[-1].end :])
        return [] if ends else ["no_answer_at_end"]
    asked = [search.query for search in trajectory.executed]
    asked += [
        rejected.query for rejected in trajectory.rejected_queries if rejected.reason != "malformed"
    ]
    faults = _ur2_answer_faults(trajectory) + own_format_faults(trajectory)
    faults += ["long_query" for query in asked if len(query.split()) > MAX_QUERY_WORDS]
    faults += ["wordless_query" for query in asked if not has_word(query)]
    if not trajectory.question.may_search:
        faults += ["searched_directly"] * len(asked)
    limit = trajectory.protocol.search_limit(trajectory.question.task)
    faults += ["too_many_queries"] * (len(asked) - limit)
    # A turn of the model begins a line: the newline before it is the environment's.
    turns = [segment.text for segment in trajectory.segments if segment.writer == "model"]
    illegal = set(re.findall(_ILLEGAL, "\n".join(turns)))
    faults += [f"illegal {kind}" for kind in sorted(illegal)]
    if search_required and not trajectory.searches:  # one that failed was asked for
        faults.append("missing_retrieval")
    return faults


def _ur2_answer_faults(trajectory: Trajectory) -> list[str]:
    """Of the last answer, which is scored, and one for each answer before it."""
    answers, question = trajectory.answers, trajectory.question
    faults = ["several_answers"] * (len(answers) - 1)
    if not any(answers):
        faults.append("no_answer")
    elif question.task == "choice":
        # "B.<|im_end|>": the line's end is the response's end.
        bare = re.sub(r"<\|[^|]*\|>|</s>|\\[a-z]+", "", answers[-1])
        if not re.fullmatch(r"[\W_]*[A-Za-z][\W_]*", bare):
            faults.append("not_a_letter")
    elif is_long(question, answers[-1]):
        faults.append("long_answer")
    return faults


def ur2_stage1(
    trajectory: Trajectory,
    variant: str = "qwen_7b",
    fallback_penalty: float = 0.5,
    format_check: str = "strict",
) -> RewardTerms:
    """R = format + retrieval − fallback: learn to search (UR² eq. 1, appendix C.7).

        format      +1 if v = 0, else −v; no search is a violation where there may be one
        retrieval   0, 3, 4 for n = 0, 1, ≥ 2 (3B: 0, 5, 7; Llama: 0, 3, 3)
        fallback    −0.5 f; f is the summariser's own flag, not the wording of a message
    A question that may not search pays the format alone: +1, or −2 for two queries written there.
    >>> ur2_stage1(example("ur2"))     # v = 0, n = 2, f = 1: 1 + 4 − 0.5 = 4.5
    {'format': 1.0, 'retrieval': 4.0, 'fallback': -0.5}
    """
    may_search = trajectory.question.may_search
    v = len(ur2_violations(trajectory, may_search, format_check))
    n = count_valid_searches(trajectory) if may_search else 0
    return {
        "format": -float(v) if v else 1.0,
        "retrieval": float(UR2_RETRIEVAL[variant][min(n, 2)]),
        "fallback": _ur2_fallback(trajectory, fallback_penalty),
    }


def ur2_stage2(
    trajectory: Trajectory,
    answer_metric: str = "f1",
    judge: Judge | None = None,
    fallback_penalty: float = 0.5,
    format_check: str = "strict",
    partly: float = 0.0,
) -> RewardTerms:
    """R = 2 · score(answer) + [v = 0] − 0.5 f: learn to be right (UR² eq. 2, section 3.4).

    score: the letter (choice), math equality (math), `answer_metric` (open QA: the paper names
    none, its code pays F1). `judge` grades a math answer that is not plainly equal: 2, 1 or 0. A 1,
    partly right, earns `partly`: nothing by eq. 2, 1 in its code.
    >>> ur2_stage2(example("ur2", answer="Kelmouth, Norland"))     # F1 = 2/3, v = 0, f = 1
    {'answer': 1.3333333333333333, 'format': 1.0, 'fallback': -0.5}
    """
    return {
        "answer": _ur2_answer(trajectory, answer_metric, judge, partly),
        "format": float(not ur2_violations(trajectory, format_check=format_check)),
        "fallback": _ur2_fallback(trajectory, fallback_penalty),
    }


def _ur2_answer(trajectory: Trajectory, metric: str, judge: Judge | None, partly: float) -> float:
    question, answer = trajectory.question, trajectory.answer
    scores = score_answer(answer, question.answers, question.task, question.options)
    unequal = question.task == "math" and not scores["em"]
    if judge and answer and unequal:
        grade = judge(question, answer)
        return partly if grade == 1 else float(grade)
    return 2.0 * scores[metric]


def _ur2_fallback(trajectory: Trajectory, penalty: float) -> float:
    return 0.0 - penalty * sum(search.fallback for search in trajectory.searches)


def ur2_choice(
    trajectory: Trajectory, step: int, variant: str = "qwen_7b", terms: RewardTerms | None = None
) -> RewardTerms:
    """Stage 2 and a search bonus that ends: 0.5 for n = 1, 1 for n ≥ 2, in steps 0 to 9 (3B: 14).
    The "weak" stage 1 of multiple choice, where the model mostly knows (UR² appendix C.7); with
    reward ur2_weak, of any task. `terms`: stage 2's, if not its defaults. The 3B model's format is
    −1 in these steps if it never searched, whatever else is wrong: the paper's "non-accumulative".
    >>> ur2_choice(example("ur2"), step=0)     # right, v = 0, f = 1, n = 2: 2 + 1 − 0.5 + 1 = 3.5
    {'answer': 2.0, 'format': 1.0, 'fallback': -0.5, 'retrieval': 1.0}
    """
    terms = terms or ur2_stage2(trajectory)
    if step >= UR2_CHOICE_STEPS[variant] or not trajectory.question.may_search:
        return terms | {"retrieval": 0.0}
    searched = [search for search in trajectory.searches if has_word(search.query)]
    if variant == "qwen_3b" and not searched:
        terms = terms | {"format": -1.0}
    return terms | {"retrieval": (0.0, 0.5, 1.0)[min(count_valid_searches(trajectory), 2)]}


# -------------------------------------------------------------------------------------- R1-Searcher
def r1_searcher_format(trajectory: Trajectory) -> list[str]:
    """The names of all format faults (R1-Searcher section 2.2.1). Good is: thinking and searches,
    one </think>, <answer> a short answer </answer>: of 10 words (ours), or as long as a gold. The
    <think> before them stands in the prompt.
    >>> r1_searcher_format(example("r1_searcher", answer="Norland </answer> <answer> Norland"))
    ['several_answers']
    """
    text, answers, protocol = trajectory.model_text, trajectory.answers, trajectory.protocol
    begin, end = tags = protocol.section_tags("answer")
    thinking, _, rest = text.partition("</think>")
    faults = own_format_faults(trajectory)
    if text.count("</think>") != 1 or "<think>" in text:
        faults.append("thinking_not_closed_once")
    elif begin in thinking or end in thinking:
        faults.append("answer_in_thinking")
    elif len(answers) > 1:
        faults.append("several_answers")
    elif not any(answers):
        faults.append("no_answer")
    elif section_letters(without_eos(rest), {"A": tags}) != "A":
        faults.append("text_beside_answer")
    if answers and is_long(trajectory.question, answers[-1]):
        faults.append("long_answer")
    return faults


def r1_searcher_stage1(trajectory: Trajectory, answer_metric: str = "none") -> RewardTerms:
    """R = 0.5 [n ≥ 1] + 0.5 [format]: learn to search, whatever the answer (R1-Searcher eq. 1, 2).
    answer_metric="cem" is the released code: it adds +1 or −1 by cover-EM; a list covers nothing.
    >>> r1_searcher_stage1(example("r1_searcher", answer="Sudria"), answer_metric="cem")
    {'retrieval': 0.5, 'format': 0.5, 'answer': -1.0}
    """
    searched = count_valid_searches(trajectory, np.inf) >= 1
    terms = {"retrieval": 0.5 * searched, "format": 0.5 * (not r1_searcher_format(trajectory))}
    if answer_metric != "none":
        listed = is_long(trajectory.question, trajectory.answer or "")
        terms["answer"] = -1.0 if listed else _r1_answer(trajectory, answer_metric)
    return terms


def r1_searcher_stage2(
    trajectory: Trajectory, answer_metric: str = "f1", format_penalty: float = 2.0
) -> RewardTerms:
    """R = F1(answer, gold) + (0 if format else −2): learn to be right (R1-Searcher eq. 3, 4).
    answer_metric="em" or "cem" pays +1 or −1 (eq. 5, table 5); format_penalty=1: its Llama code.
    >>> r1_searcher_stage2(example("r1_searcher", answer="<think> Norland"))     # F1 = 2/3, less 2
    {'answer': 0.6666666666666666, 'format': -2.0}
    """
    penalty = -format_penalty if r1_searcher_format(trajectory) else 0.0
    return {"answer": _r1_answer(trajectory, answer_metric), "format": penalty}


def _r1_answer(trajectory: Trajectory, answer_metric: str) -> float:
    golds = trajectory.question.answers
    score = score_answer(trajectory.answer, golds, punctuation="plain")[answer_metric]
    return score if answer_metric == "f1" else 2.0 * score - 1.0


# ------------------------------------------------------------------------------ R-Search, Search-R1
GAMMA_EVIDENCE, GAMMA_ANSWER = 0.2, 0.2  # γ_e and γ_α


def r_search(
    trajectory: Trajectory, reader_answer: str = "", evidence_reward: bool = True
) -> RewardTerms:
    """R = F1(answer) + F1(the reader's answer) + r_f (R-Search eq. 3 to 8).

        A, E       one answer box, one evidence box, and something in it
        format     r_f = 0.2 + 0.2 A without a search;   0.2 E + 0.2 A with one
        evidence   F1 of what the reader, a frozen model of another family, answers from question
                   and evidence alone; 0 without a search, without evidence, or switched off
    Switched off in a protocol without an evidence box: r_f = 0.2 A (its section 5.2, table 3).
    >>> r_search(example("r_search", answer="Kelmouth, Norland"), "Norland")     # 2/3 + 1 + 0.4
    {'answer': 0.6666666666666666, 'evidence': 1.0, 'format': 0.4}
    """
    golds, searched = trajectory.question.answers, trajectory.executed
    form = GAMMA_ANSWER * has_one_box(trajectory, "answer")
    if evidence_reward or trajectory.protocol.evidence_tags:
        e = has_one_box(trajectory, "evidence")
        form += GAMMA_EVIDENCE * (e if searched else 1)
    paid = evidence_reward and searched and trajectory.evidence
    return {
        "answer": f1_score(trajectory.answer, golds, "delete"),
        "evidence": f1_score(reader_answer, golds, "delete") if paid else 0.0,
        "format": form,
    }


def has_one_box(trajectory: Trajectory, name: str) -> bool:
    """Exactly one box, something in it, and no further tag of it."""
    text, tags = trajectory.model_text, trajectory.protocol.section_tags(name)
    boxes = find_blocks(text, *tags)
    return len(boxes) == 1 and bool(boxes[0].content) and not stray_tags(text, tags)


def r_search_format(trajectory: Trajectory) -> bool:
    """All that r_f pays for: one answer box and, if it searched, one of the protocol's evidence."""
    boxed = trajectory.executed and trajectory.protocol.evidence_tags
    return has_one_box(trajectory, "answer") and (not boxed or has_one_box(trajectory, "evidence"))


def evidence_support(trajectory: Trajectory) -> float:
    """The share of the evidence's words that stand in the documents. To report, not to reward."""
    documents = " ".join(search.text for search in trajectory.searches)
    read = normalize_answer(documents, "delete").split()
    words = normalize_answer(trajectory.evidence or "", "delete").split()
    return sum(word in read for word in words) / max(1, len(words))


def search_r1(trajectory: Trajectory) -> RewardTerms:
    """R = EM(answer, gold), nothing for format or searches (Search-R1, arXiv 2503.09516, eq. 4).
    >>> search_r1(example("search_r1", answer="Kelmouth, Norland"))
    {'answer': 0.0}
    """
    return {"answer": exact_match(trajectory.answer, trajectory.question.answers, "delete")}


# ----------------------------------------------------------------------------------- When to Search
QUESTION_WORDS_IN_FRONT = False  # True: as a query of Table 7, against section 3.3 and the prompt
_OPENERS = """
    who whom whose what which when where why how am is are was were be been being do does did has
    have had can could will would shall should may might must
""".split()
_STOPWORDS = """
    a about after all also an and any as at because before between both but by each for from he her
    here him his i if in into it its me more most my no nor not of on once only or other our over
    own s same she so some such t than that the their them then there these they this those through
    to too under until up us very we while with you your
""".split()


def when_to_search_stage1(
    trajectory: Trajectory, correct: bool | None = None, embed: Embedder | None = None, beta=0.3
) -> RewardTerms:
    """R = r_f + r_s + r_a: a search softens a wrong answer (When to Search eq. 6 to 12).

        format      +1 in the order of the protocol, else −1
        retrieval   RC ≤ 1: 0 if the query is concise, else −1
                    RC > 1: −avg_sim, the queries' mean cosine by pairs
        answer      right 1, wrong −1 + β RC;   RC: all executed searches, long queries too
    `correct` is a judge's verdict; None asks exact match.
    >>> when_to_search_stage1(example("when_to_search", answer="Sudria"))     # RC = 2: −1 + 0.6
    {'format': 1.0, 'retrieval': 0.0, 'answer': -0.4}
    """
    softened = -1.0 + beta * len(trajectory.executed)
    answer = 1.0 if is_right(trajectory, correct) else softened
    return _when_to_search(trajectory, embed) | {"answer": answer}


def when_to_search_stage2(
    trajectory: Trajectory, correct: bool | None = None, embed: Embedder | None = None, beta=0.3
) -> RewardTerms:
    """As stage 1, but a search costs a right answer β: learn when not to. Right 1 − β RC, wrong −1.
    >>> when_to_search_stage2(example("when_to_search"))     # right with RC = 2: 1 − 0.6
    {'format': 1.0, 'retrieval': 0.0, 'answer': 0.4}
    """
    priced = 1.0 - beta * len(trajectory.executed)
    answer = priced if is_right(trajectory, correct) else -1.0
    return _when_to_search(trajectory, embed) | {"answer": answer}


def when_to_search_unified(
    trajectory: Trajectory, correct: bool | None = None, *more
) -> RewardTerms:
    """Right as stage 2, wrong as stage 1: our reading of Table 2. From RC 4 wrong beats right.
    >>> when_to_search_unified(example("when_to_search", answer="Sudria"))     # −1 + 0.6
    {'format': 1.0, 'retrieval': 0.0, 'answer': -0.4}
    """
    right = is_right(trajectory, correct)
    return (when_to_search_stage2 if right else when_to_search_stage1)(trajectory, right, *more)


def _when_to_search(trajectory: Trajectory, embed: Embedder | None) -> RewardTerms:
    """r_f and r_s, the same in both stages."""
    queries = [search.query for search in trajectory.executed]
    retrieval = 0.0 if all(map(is_concise, queries)) else -1.0
    if len(queries) > 1:
        retrieval = 0.0 - mean_similarity(queries, embed or tfidf_embedder())
    in_order = when_to_search_format(trajectory)
    return {"format": 1.0 if in_order else -1.0, "retrieval": retrieval}


def when_to_search_format(trajectory: Trajectory) -> bool:
    """Think reflect answer, or think, searches and answer? A search is: search information reflect;
    a think may be between two (section 3.3, Table 9). Information is what the environment wrote.
    """
    tags_of, order, opened = trajectory.protocol.section_tags, "", trajectory.opened
    tags = {
        "T": tags_of("think"),
        "S": tags_of("query"),
        "R": tags_of("reflect"),
        "A": tags_of("answer"),
        "x": tags_of("documents"),  # written by the model
    }
    for segment in trajectory.segments:
        if segment.writer == "documents":
            order += "I"
        elif segment.writer == "model":
            order += section_letters(opened + without_eos(segment.text), tags)
            opened = ""
    return bool(re.fullmatch("T(R|SIR(T?SIR)*)A", order))


def is_right(trajectory: Trajectory, correct: bool | None) -> bool:
    """The judge's verdict, else `matches`; no answer is right by no verdict."""
    if not trajectory.answer:
        return False
    return matches(trajectory.question, trajectory.answer) if correct is None else correct


def matches(question: Question, answer: str | None) -> bool:
    """Math equality, the letter, or exact match. Not cover-EM: "yes no" covers a gold, too."""
    scores = score_answer(answer, question.answers, question.task, question.options, "delete")
    return scores["em"] == 1.0


def is_concise(query: str) -> bool:
    """Key words, as "Ana Bell birthplace": at most 12 words and 40 % stopwords, no "?", no question
    word or auxiliary in front. Our rule: the paper gives none.
    """
    words = re.findall(r"\w+", query)
    if not words or len(query.split()) > 12 or re.search("[?？]", query):
        return False
    # Will Smith asks nothing.
    named = words[0] in ("Will", "May") and "".join(words[1:2]).istitle()
    if words[0].lower() in _OPENERS and not named and not QUESTION_WORDS_IN_FRONT:
        return False
    stopwords = [word for word in words if word.lower() in _STOPWORDS + _OPENERS]
    return len(stopwords) <= 0.4 * len(words)


def mean_similarity(queries: list[str], embed: Embedder) -> float:
    """The mean cosine over the unordered pairs of queries. ana bell, ana bell, ana town: 2/3.
    Two zero vectors are alike (1), or a misspelled query could be repeated; a zero vector is like
    nothing else (0). Eq. 8 as printed divides by N(N−1): half of this.
    """
    vectors = embed(queries)  # [n, d]
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)  # [n, 1]
    zero = norms == 0  # [n, 1]
    unit = vectors / np.where(zero, 1, norms)  # [n, d]
    cosines = unit @ unit.T + zero * zero.T  # [n, n]
    pairs = cosines[np.triu_indices(len(queries), k=1)].tolist()
    return sum(pairs) / len(pairs)


def tfidf_embedder(documents: Sequence[Document] = ()) -> Embedder:
    """w(t) = count of t in the text · idf(t),  idf(t) = ln((1 + N) / (1 + n_t)) + 1.

    N documents, n_t of them hold t; without documents every idf is 1. A word that none holds does
    not count, or a query could be repeated with another invented word each time.
    >>> embed = tfidf_embedder([Document("1", "Ana", "town"), Document("2", "Bo", "town")])
    >>> embed(["Ana town"]).round(4).tolist()     # idf(ana) = ln(3/2) + 1, idf(town) = ln(3/3) + 1
    [[1.4055, 1.0]]
    """
    holders = Counter()  # t -> n_t
    for document in documents:
        holders.update(set(tokenize(f"{document.title} {document.text}")))

    def embed(texts: list[str]) -> np.ndarray:
        counts = [Counter(tokenize(text)) for text in texts]
        words = sorted(set().union(*counts))  # all that matter to these texts' cosines
        vectors = np.zeros((len(texts), len(words)))  # [n, d]
        for column, word in enumerate(words):
            n_t = holders[word]
            if n_t or not documents:
                idf = np.log((1 + len(documents)) / (1 + n_t)) + 1
                vectors[:, column] = [count[word] * idf for count in counts]
        return vectors

    return embed


# -------------------------------------------------------------------------------------------- ARENA
# Mean ROUGE from which a summary earns the bonus: what ARENA's own model has (table 9: 19.6). Its
# appendix H.2 names no answer term for summaries and no bonus: both are our reading.
GOOD_SUMMARY = 0.2


def arena(
    trajectory: Trajectory,
    answer_metric: str = "em",
    correct: bool | None = None,
    bonus: float = 10.0,
    relevance_reward: bool = True,
    punctuation: str = "underscore",
) -> RewardTerms:
    """R = format + answer + relevance, and 10 more if all three are 1 (ARENA section 3.3).

        format      1 if the text is <relevance> <analysis> <answer>, each once and not empty; under
                    protocol arena_thinking behind a <think> of the model's own
        answer      exact match, in any format; its ablations (5.3): F1, or a judge's verdict
                    `correct`; a summary: its mean ROUGE, which is enough from 0.2 on
        relevance   the cited numbers and the gold ones: the same set 1, some in common 0.5, else 0
    So R is 0, 0.5, ..., 3, or 13. Without `relevance_reward` the bonus asks for the other two.
    >>> arena(example("arena", searches=1))     # cites 1 of the gold numbers 1 and 3: 1 + 1 + 0.5
    {'format': 1.0, 'answer': 1.0, 'relevance': 0.5, 'bonus': 0.0}
    """
    answer, q = trajectory.answer, trajectory.question
    scores = score_answer(answer, q.answers, q.task, q.options, punctuation)
    terms = {
        "format": float(arena_format(trajectory)),
        "answer": scores[answer_metric] if correct is None else float(correct),
    }
    if relevance_reward:
        terms["relevance"] = _relevance(cited(trajectory), set(q.supporting))
    enough = {"answer": GOOD_SUMMARY} if q.task == "summary" else {}
    perfect = all(value >= enough.get(name, 1.0) for name, value in terms.items())
    return terms | {"bonus": bonus if perfect else 0.0}


def _relevance(numbers: set[int], gold: set[int]) -> float:
    if not numbers & gold:
        return 0.0
    return 1.0 if numbers == gold else 0.5


def arena_format(trajectory: Trajectory) -> bool:
    tags_of = trajectory.protocol.section_tags
    tags = {"1": tags_of("relevance"), "2": tags_of("analysis"), "3": tags_of("answer")}
    text = without_eos(trajectory.model_text)
    thinks = trajectory.protocol.thinking_apart and text.lstrip().startswith("<think>")
    if trajectory.opened or thinks:  # by the chat template, or by the model itself
        text = text.partition("</think>")[2]
    return section_letters(text, tags) == "123"


def cited(trajectory: Trajectory) -> set[int]:
    """The numbers in the last <relevance> section; none if it is not a list such as [1, 4]."""
    boxes = find_blocks(trajectory.model_text, *trajectory.protocol.section_tags("relevance"))
    content = boxes[-1].content if boxes else ""
    # [0-9]{1,6}: Python refuses to read a number of 5000 digits, and a model can write one.
    if not re.fullmatch(r"\[\s*[0-9]{1,6}(?:\s*,\s*[0-9]{1,6})*\s*\]", content):
        return set()
    return {int(number) for number in re.findall("[0-9]+", content)}


def arena_scores(trajectory: Trajectory) -> RewardTerms:
    """What an evaluation reports. set_f1 = 2 |cited ∩ gold| / (|cited| + |gold|).
    >>> arena_scores(example("arena", searches=1))     # cited {1}, gold {1, 3}: 2 · 1 / (1 + 2)
    {'relevance': 0.5, 'exact_set': 0.0, 'set_f1': 0.6666666666666666}
    """
    numbers = cited(trajectory)
    gold = set(trajectory.question.supporting)
    relevance = _relevance(numbers, gold)
    f1 = 2 * len(numbers & gold) / max(1, len(numbers) + len(gold))
    return {"relevance": relevance, "exact_set": float(relevance == 1.0), "set_f1": f1}


# ------------------------------------------------------------------------------------------ by name
def _less_left_out(reward: Callable) -> Callable:
    """By the settings, without the term of Table 4's "w/o r_s" or "w/o r_a"."""

    def paid(t: Trajectory, s, step: int, e: Extras) -> RewardTerms:
        price = [] if s.left_out == "answer" else [s.beta]
        return _left(reward(t, e.correct, e.embed, *price), s)

    return paid


def _left(terms: RewardTerms, s) -> RewardTerms:
    return {name: term for name, term in terms.items() if name != s.left_out}


REWARDS |= {
    "ur2_stage1": lambda t, s, step, e: ur2_stage1(
        t, s.reward_variant, s.fallback_penalty, s.format_check
    ),
    "ur2_stage2": lambda t, s, step, e: ur2_stage2(
        t, s.answer_metric, e.grade, s.fallback_penalty, s.format_check, s.partly
    ),
    # left_out retrieval: C.7's −1 without the bonus
    "ur2_choice": lambda t, s, step, e: _left(
        ur2_choice(t, step, s.reward_variant, REWARDS["ur2_stage2"](t, s, step, e)), s
    ),
    "r1_searcher_stage1": lambda t, s, step, e: r1_searcher_stage1(t),
    "r1_searcher_stage2": lambda t, s, step, e: r1_searcher_stage2(t, s.answer_metric),
    "r1_searcher_stage1_code": lambda t, s, step, e: r1_searcher_stage1(t, "cem"),
    "r1_searcher_stage2_llama": lambda t, s, step, e: r1_searcher_stage2(t, s.answer_metric, 1.0),
    "r_search": lambda t, s, step, e: r_search(t, e.reader_answer, s.evidence_reward),
    "search_r1": lambda t, s, step, e: search_r1(t),
    "when_to_search_stage1": _less_left_out(when_to_search_stage1),
    "when_to_search_stage2": _less_left_out(when_to_search_stage2),
    "when_to_search_unified": _less_left_out(when_to_search_unified),
    "arena": lambda t, s, step, e: arena(
        t, s.answer_metric, e.correct, s.bonus, s.relevance_reward
    ),
    "arena_code": lambda t, s, step, e: arena(
        t, s.answer_metric, e.correct, s.bonus, s.relevance_reward, "space"
    ),
}
REWARDS["ur2_weak"] = REWARDS["ur2_choice"]  # of any task
# Of other models: a judge's grade or verdict, a reader, an embedder. Of questions: options,
# supporting references, open answers, that one may search. Of settings: a price of a search that is
# not too high.
NEEDS = {
    "ur2_stage1": {"searching"},
    "ur2_stage2": {"grade"},
    "ur2_choice": {"options"},
    "ur2_weak": {"grade"},
    "r_search": {"reader", "open"},
    "search_r1": {"open"},
    "when_to_search_stage1": {"verdict", "embedder", "open", "price"},
    "when_to_search_stage2": {"verdict", "embedder", "open", "price"},
    "when_to_search_unified": {"verdict", "embedder", "open"},
    "arena": {"verdict", "supporting"},
    "arena_code": {"verdict", "supporting"},
}
# The settings that it reads; without its answer term When to Search's does not read beta.
READS = {
    "ur2_stage1": "reward_variant fallback_penalty format_check",
    "ur2_stage2": "answer_metric fallback_penalty format_check partly",
    "ur2_choice": "answer_metric fallback_penalty format_check partly reward_variant left_out",
    "ur2_weak": "answer_metric fallback_penalty format_check partly reward_variant left_out",
    "r1_searcher_stage2": "answer_metric",
    "r1_searcher_stage2_llama": "answer_metric",
    "r_search": "evidence_reward",
    "when_to_search_stage1": "beta left_out",
    "when_to_search_stage2": "beta left_out",
    "when_to_search_unified": "beta left_out",
    "arena": "answer_metric bonus relevance_reward",
    "arena_code": "answer_metric bonus relevance_reward",
}


def compute_rewards(
    trajectories: list[Trajectory], settings, step: int, others: OtherModels
) -> tuple[list[RewardTerms], list[bool]]:
    """Returns the terms of each trajectory's reward, and whether each answer is right."""
    reward, terms, correct = REWARDS[settings.reward], [], []
    verdicts, readings = others.verdicts(trajectories), others.readings(trajectories)
    embed, grade = others.embedder(trajectories), others.grader(trajectories)
    for t, verdict, reading in zip(trajectories, verdicts, readings, strict=True):
        terms.append(reward(t, settings, step, Extras(verdict, reading, embed, grade)))
        correct.append(is_right(t, verdict))
    return terms, correct


def needs(settings) -> set[str]:
    """What must be at hand for the reward of these settings."""
    needed = set(NEEDS.get(settings.reward, ()))
    if not settings.evidence_reward:
        needed.discard("reader")
    if not settings.relevance_reward:
        needed.discard("supporting")
    left_out = {"answer": {"verdict", "price"}, "retrieval": {"embedder"}}
    return needed - left_out.get(settings.left_out, set())


def check_reward(settings) -> RewardTerms:
    """Does the reward find in the protocol what it reads, and can its terms keep their order?
    Returns what it pays for an example.
    """
    price = settings.beta * settings.max_searches
    if "price" in needs(settings) and price >= 2:  # wrong, −1 + β RC, outranks right, 1
        raise InputError(
            f"--beta {settings.beta} times --max_searches {settings.max_searches} is {price:g}: it"
            " must stay below 2, or a wrong answer after many searches outranks a right one"
        )
    if own := ":" in settings.reward:
        REWARDS[settings.reward] = own_reward(settings.reward)
    try:
        return REWARDS[settings.reward](example(settings.protocol), settings, 0, Extras())
    except InputError as error:
        if own:
            raise
        pair = f"--reward {settings.reward} and protocol {settings.protocol}"
        raise InputError(f"{pair} do not go together: {error}") from None


def own_reward(name: str) -> Callable:
    """The function of FILE.py:FUNCTION: of a Trajectory, it returns named numbers, whose sum is the
    reward. Every trajectory has the same names.
    """
    file, _, function = name.rpartition(":")
    with own_code(f"--reward {name}", file):
        defined = runpy.run_path(file)
    if function not in defined:
        raise InputError(f"--reward {name}: there is no {function} in {file}")
    reward, names = defined[function], []

    def paid(t: Trajectory, settings, step: int, extras: Extras) -> RewardTerms:
        with own_code(f"--reward {name}, question {t.question.id}", file):
            # A copy, since the tokens and the mask are trained on: 0.4 ms for 4,000 tokens, where
            # copy.deepcopy takes 1.7 ms.
            terms = reward(pickle.loads(pickle.dumps(t)))
            check_terms(terms)
            if not names:
                names.extend(terms)
            if set(names) != set(terms):
                told = f"{', '.join(terms)}, and before {', '.join(names)}"
                raise InputError(f"its terms are {told}: return all of them, 0 for none")
        return {its: float(terms[its]) for its in names}

    return paid


@contextlib.contextmanager
def own_code(where: str, file: str) -> Iterator[None]:
    """Runs code of the user's file. An error in it, or sys.exit, is an InputError that names the
    line; code that takes long is reported, since only Ctrl-C or SIGTERM can end it.
    """
    line = f"\n{where}: it has been computing for a minute; Ctrl-C ends the run"
    slow = threading.Timer(SLOW, print, [line], {"file": sys.stderr})
    slow.start()
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"{where}: {located(error, file)}") from None
    finally:
        slow.cancel()


def check_terms(terms: object) -> None:
    """Raises an InputError for what is not a reward. A name is printed and written to files."""
    good = isinstance(terms, dict) and terms
    for name, value in terms.items() if good else ():
        good = good and isinstance(name, str) and name.isprintable()
        good = good and isinstance(value, int | float) and abs(value) <= LARGEST
    if not good:
        how = "return named numbers, such as {'answer': 1.0}"
        raise InputError(f"{terms!r:.300} is no reward: {how}")


def located(error: BaseException, file: str) -> str:
    """A line of the user's own file, and what is wrong: "line 3: KeyError: 'x'"."""
    line = getattr(error, "lineno", None)  # of a SyntaxError
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file:
            line = frame.lineno
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    told = " ".join(f"{kind}{error}".split())  # on one line
    return f"line {line}: {told}" if line else told


def check_questions(questions: list[Question], settings) -> list[Question]:
    """The questions, or an InputError that names the first one without what is read of it."""
    needed = needs(settings)
    searching = [question for question in questions if question.may_search]
    if "searching" in needed and not searching:
        raise InputError(
            f"--reward {settings.reward} pays for searches, and no question may search: take other"
            " --data, or stage 2"
        )
    for question in questions:
        lacks = ""
        if "supporting" in needed and not question.supporting:
            lacks = "names no supporting reference: add `supporting`, or --variant no_relevance"
        elif "options" in needed and not question.options:
            lacks = "has no options, which the --reward is for: use --reward ur2_weak"
        elif "open" in needed and question.task == "choice":
            lacks = "is multiple choice, and the --reward compares texts"
        if lacks:
            raise InputError(f"question {question.id} {lacks}")
    return questions


# ------------------------------------------------------------------------------------------- a look
_QUESTION = Question("demo", "In which country was Ana Bell born?", ["Norland"], supporting=(1, 3))
_BORN = "Ana Bell was born in Kelmouth."
_TOWN = "Kelmouth is a town in Norland."


def example(protocol: Protocol | str, answer: str = "Norland", searches: int = 2) -> Trajectory:
    """Up to 2 searches, the second comes back as the fallback. ARENA cites where others search."""
    protocol = as_protocol(protocol)
    tags = {pair[0].strip("<>"): pair for pair in protocol.other_tags}
    tags |= {
        "query": protocol.query_tags,
        "documents": protocol.documents_tags,
        "evidence": protocol.evidence_tags,
        "answer": protocol.answer_tags or ("The answer is \\boxed{", "}."),
    }
    if protocol.prompt_suffix:  # it opens <think>, which ends where the answer begins
        begin, end = tags["answer"]
        tags["think"], tags["answer"] = ("", ""), ("</think>" + begin, end)
    why = "Her birthplace decides."
    pieces = [("relevance", [1, 3][:searches]), ("analysis", why), ("think", why)]
    for query, found in (("Ana Bell birthplace", _BORN), ("Kelmouth country", _TOWN))[:searches]:
        pieces += [("query", query), ("documents", found), ("reflect", "It helps.")]
    if not searches:
        pieces.append(("reflect", "It is known."))
    pieces += [("evidence", f"{_BORN} {_TOWN}"), ("answer", answer)]
    text = ""
    for name, content in pieces:
        if pair := tags.get(name):
            text += f"{pair[0]} {content} {pair[1]}"
    return trajectory_from_text(_QUESTION, text, protocol, fallbacks=[1])


def main() -> None:
    print(f"{_QUESTION.question} Gold: Norland, from references 1 and 3.")
    print("Norland after 0, 1 and 2 searches, the second a fallback; then Sudria after as many.\n")
    extras = Extras(reader_answer="Norland")
    for name, protocol in product(REWARDS, PROTOCOLS):
        if name.startswith(protocol):
            print(f"{name:24}", end="")
            for answer, searches in product(("Norland", "Sudria"), range(3)):
                trajectory = example(protocol, answer, searches)
                terms = REWARDS[name](trajectory, RewardSettings(), 0, extras)
                print(f"{sum(terms.values()):>+8.2f}", end="")
            print()


if __name__ == "__main__":
    run_main(main)
