r"""What a trajectory is worth: one function per reward formula, each a dict of named components
whose sum is the reward.

    n   valid searches: executed by the environment, for a query of at most 20 words
    f   searches that came back as the fallback ("this query asks for no fact")
    v   number of format violations

    UR²             stage 1   R = (1 if v = 0 else −v) + (0, 3 or 4 by n) − 0.5 f
                    stage 2   R = 2 · score(answer) + [v = 0] − 0.5 f
                    choice    stage 2 plus 0.5 (n = 1) or 1 (n ≥ 2) in the first steps
    R1-Searcher     stage 1   R = 0.5 [n ≥ 1] + 0.5 [format]
                    stage 2   R = F1(answer) + (0 if format else −2)
    R-Search                  R = F1(answer) + F1(a reader's, from the evidence) + 0.2 [E] + 0.2 [A]
    When to Search            R = (format ±1) − similarity of the queries + answer        β = 0.3
                    stage 1   answer = 1 if right else −1 + β · searches
                    stage 2   answer = 1 − β · searches if right else −1
    ARENA                     R = format + answer + relevance (1, 0.5, 0) + 10 if all three are 1

Three rules hold everywhere here, because training exploits it where they are broken:
  1. only the model's own text is scored, not what stands in a document or in the prompt;
  2. searches are counted in the environment's log: a tag can be written without a search;
  3. the answer is the last one, by position. Two answers are a fault; the last is still scored.

A sixth paper's reward is a function and a row of REWARDS.
Left out: anything that looks at more than one trajectory (that is an advantage). Judges and other
models answer before the reward is computed: their verdicts and answers are arguments here.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from data import Document, Question
from errors import InputError, run_main, setting
from metrics import (
    cover_exact_match,
    exact_match,
    f1_score,
    math_equal,
    mean_rouge,
    normalize_answer,
    same_choice,
    tokenize,
)
from prompts import Protocol, Tags, as_protocol, find_answers, find_blocks
from trajectory import Trajectory, trajectory_from_text

Terms = dict[str, float]  # the named components of a reward
Embedder = Callable[[list[str]], np.ndarray]  # n texts -> [n, d]
Judge = Callable[[Question, str], float]

REWARDS: dict[str, Callable] = {}  # name -> (trajectory, settings, step, extras) -> Terms; below
ANSWER_METRICS = {"f1": f1_score, "em": exact_match, "cem": cover_exact_match}
# UR²'s backbone -> what n = 0, 1, ≥ 2 searches earn in stage 1
UR2_RETRIEVAL = {"qwen_7b": (0, 3, 4), "qwen_3b": (0, 5, 7), "llama_8b": (0, 3, 3)}


@dataclass(frozen=True)
class RewardSettings:
    reward: str = setting("ur2_stage1", "_code and _llama: as released", one_of=REWARDS)
    reward_variant: str = setting("qwen_7b", "of UR²'s reward: the backbone", one_of=UR2_RETRIEVAL)
    answer_metric: str = setting("f1", "of the answer reward", one_of=ANSWER_METRICS)
    fallback_penalty: float = setting(0.5, "UR²: per search answered by the fallback", least=0)
    format_check: str = setting(
        "strict", "UR²: loose asks for an answer at the end only", one_of=("strict", "loose")
    )
    evidence_reward: bool = setting(True, "R-Search: False pays the answer and the format only")
    beta: float = setting(0.3, "When to Search: price of a search", least=0)
    relevance_reward: bool = setting(True, "ARENA: False leaves the relevance term out")
    bonus: float = setting(10.0, "ARENA: for a trajectory that is right in all three", least=0)


@dataclass(frozen=True)
class Extras:
    """What a reward takes from outside its trajectory."""

    correct: bool | None = None  # is the answer right? None: the metrics decide
    reader_answer: str = ""  # R-Search: what another model answers from the evidence
    embed: Embedder | None = None  # When to Search: queries -> vectors
    grade: Judge | None = None  # UR²: 2, 1 or 0 for a math answer that is not plainly equal


# --------------------------------------------------------------------------- what all formats share

MAX_QUERY_WORDS = 20
MAX_ANSWER_WORDS = 10
MAX_QUERIES = 4


def _pick(table: dict, name: str, what: str):
    if name not in table:
        raise InputError(f"unknown {what} {name!r}: one of {', '.join(table)}")
    return table[name]


def _read(tags: Tags | None, what: str, protocol: Protocol) -> Tags:
    """The tags that a reward reads, or an InputError where the protocol has none."""
    if not tags:
        raise InputError(f"the reward reads {what}, which protocol {protocol.name} does not have")
    return tags


def count_valid_searches(trajectory: Trajectory) -> int:
    """n. The environment runs a longer query too; only short ones earn anything."""
    return sum(len(search.query.split()) <= MAX_QUERY_WORDS for search in trajectory.searches)


def count_fallbacks(trajectory: Trajectory) -> int:
    """f, from the summariser's own flag: the wording of a message is no evidence."""
    return sum(search.fallback for search in trajectory.searches)


def word_limit(question: Question) -> int:
    """Words that an answer may have: 10, or as many as the longest gold."""
    return max([MAX_ANSWER_WORDS, *(len(gold.split()) for gold in question.answers)])


def tags_pair(text: str, tags: Tags) -> bool:
    """Is every begin tag closed before the next one opens?"""
    either = "|".join(map(re.escape, tags))
    order = re.findall(either, text)
    return order == [*tags] * (len(order) // 2)


def scripts(text: str) -> set[str]:
    """The scripts of its letters: "π r², 巴黎" -> GREEK, LATIN, CJK. NFKC turns ℝ into R."""
    kinds = ("Lu", "Ll", "Lt", "Lo")  # of letters
    letters = [c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) in kinds]
    return {unicodedata.name(c, "UNKNOWN").split()[0] for c in letters}


def is_garbled(trajectory: Trajectory) -> bool:
    """U+FFFD, private use, or letters of a script that neither question nor document uses, nor
    Latin or Greek. Trap: a Chinese question is no garbled text.
    """
    question, text = trajectory.question, trajectory.model_text
    shown = [question.question, *question.options]
    shown += [f"{document.title} {document.text}" for document in question.references]
    shown += [segment.text for segment in trajectory.segments if segment.writer != "model"]
    if any(c == "\ufffd" or unicodedata.category(c) == "Co" for c in text):
        return True
    return not scripts(text) <= scripts(" ".join(shown)) | {"LATIN", "GREEK"}


def without_eos(text: str) -> str:
    """The text without the EOS token that closes it: it is decoded with the rest."""
    return re.sub(r"(?:<\|[^|<>]*\|>|</s>|<eos>)\s*$", "", text)


def read_sections(text: str, pairs: Sequence[Tags]) -> list[tuple[int, str]] | None:
    """The text as sections (which of `pairs`, content), with only white space between; else None.
    >>> read_sections("<a> 1 < 2 </a> <b>x</b>", [("<a>", "</a>"), ("<b>", "</b>")])
    [(0, '1 < 2'), (1, 'x')]
    """
    tags = "|".join(re.escape(tag) for pair in pairs for tag in pair)
    pieces = re.split(f"({tags})", text)  # between, begin, content, end, between, begin, ...
    if len(pieces) % 4 != 1 or "".join(pieces[::4]).strip():
        return None
    sections = []
    for begin, content, end in zip(pieces[1::4], pieces[2::4], pieces[3::4], strict=True):
        if (begin, end) not in pairs:
            return None
        sections.append((pairs.index((begin, end)), content.strip()))
    return sections


def own_format_faults(trajectory: Trajectory) -> list[str]:
    """Faults that UR² and R1-Searcher name alike, one entry each."""
    text, protocol = trajectory.model_text, trajectory.protocol
    answers = " ".join(trajectory.answers)
    faults = {
        "unpaired_query_tags": protocol.query_tags and not tags_pair(text, protocol.query_tags),
        # What the environment writes is not in model_text.
        "written_documents": any(tag in text for tag in protocol.documents_tags or ()),
        "garbled_text": is_garbled(trajectory),
        "tag_in_answer": any(tag in answers for tag in protocol.tags),
    }
    return [name for name, found in faults.items() if found]


# ---------------------------------------------------------------------------------------------- UR²

UR2_CHOICE_BONUS = (0.0, 0.5, 1.0)  # for n = 0, 1, ≥ 2
UR2_CHOICE_STEPS = {"qwen_7b": 10, "qwen_3b": 15, "llama_8b": 10}  # steps 0 .. 9 (14) pay it

# Traps: no <|im_end|> or <|eot_id|> here: they are EOS tokens, and a response that ends well ends
# in one. A line begins where a turn of the model begins too: the newline before it is the
# environment's.
_ILLEGAL = {
    "user_turn": r"(?m)^user\b",
    "assistant_turn": r"(?m)^assistant\b",
    "im_start": r"<\|im_start\|>",
    "tool_call": r"<tool_call>",
    "start_header": r"<\|start_header_id\|>",
    "end_header": r"<\|end_header_id\|>",
}


def ur2_violations(
    trajectory: Trajectory, search_required: bool = False, format_check: str = "strict"
) -> list[str]:
    """The names of all format violations; v is their number (UR² appendix C.7).

    Long queries count each; an illegal token counts once for its kind, so that one loop of the
    policy cannot write an unbounded penalty. `search_required` adds stage 1's "missing retrieval".
    format_check="loose", an ablation, asks only whether the text ends in an answer.
    >>> ur2_violations(example("ur2", answer="a b c d e f g h i j k"))     # 11 words
    ['long_answer']
    """
    if _pick({"strict": False, "loose": True}, format_check, "format check"):
        return [] if _ends_in_answer(trajectory) else ["no_answer_at_end"]
    asked = [search.query for search in trajectory.searches]
    asked += [refusal.query for refusal in trajectory.refusals if refusal.reason == "limit"]
    faults = _ur2_answer_faults(trajectory) + own_format_faults(trajectory)
    faults += ["long_query" for query in asked if len(query.split()) > MAX_QUERY_WORDS]
    if len(asked) > MAX_QUERIES:
        faults.append("too_many_queries")
    turns = [segment.text for segment in trajectory.segments if segment.writer == "model"]
    lines = "\n".join(turns)
    faults += [f"illegal_{name}" for name, kind in _ILLEGAL.items() if re.search(kind, lines)]
    if search_required and not trajectory.searches:
        faults.append("missing_retrieval")
    return faults


def _ur2_answer_faults(trajectory: Trajectory) -> list[str]:
    answers, question = trajectory.answers, trajectory.question
    if len(answers) > 1:
        return ["several_answers"]
    if not answers or not answers[0]:
        return ["no_answer"]
    if question.task == "choice":
        # "B.<|im_end|>": the line's end is the response's end.
        bare = re.sub(r"<\|[^|]*\|>|</s>|\\(?:boxed|text)\b", "", answers[0])
        one_letter = re.fullmatch(r"[\W_]*[A-Za-z][\W_]*", bare)
        return [] if one_letter else ["not_a_letter"]
    return ["long_answer"] if len(answers[0].split()) > word_limit(question) else []


def _ends_in_answer(trajectory: Trajectory) -> bool:
    """ "\boxed{5}." does."""
    text = without_eos(trajectory.model_text)
    answers = find_answers(trajectory.protocol, text, trajectory.question.task)
    return bool(answers) and not re.search(r"\w", text[answers[-1].end :])


def ur2_stage1(
    trajectory: Trajectory,
    variant: str = "qwen_7b",
    retrieval: bool = True,
    fallback_penalty: float = 0.5,
    format_check: str = "strict",
) -> Terms:
    """R = format + retrieval − fallback: learn to search (UR² eq. 1, appendix C.7).

        format      +1 if v = 0, else −v
        retrieval   0, 3, 4 for n = 0, 1, ≥ 2 (3B: 0, 5, 7; Llama: 0, 3, 3)
        fallback    −0.5 f (`fallback_penalty` is the 0.5)

    Without retrieval (`retrieval`, or the question's `may_search`) the format alone: +1 or 0.
    >>> ur2_stage1(example("ur2"))     # v = 0, n = 2, f = 1: 1 + 4 − 0.5 = 4.5
    {'format': 1.0, 'retrieval': 4.0, 'fallback': -0.5}
    """
    earned = _pick(UR2_RETRIEVAL, variant, "variant")
    if not (retrieval and trajectory.question.may_search):
        faults = ur2_violations(trajectory, format_check=format_check)
        return {"format": float(not faults), "retrieval": 0.0, "fallback": 0.0}
    v = len(ur2_violations(trajectory, search_required=True, format_check=format_check))
    n, f = count_valid_searches(trajectory), count_fallbacks(trajectory)
    return {
        "format": -float(v) if v else 1.0,
        "retrieval": float(earned[min(n, 2)]),
        "fallback": 0.0 - fallback_penalty * f,
    }


def ur2_stage2(
    trajectory: Trajectory,
    answer_metric: str = "f1",
    judge: Judge | None = None,
    fallback_penalty: float = 0.5,
    format_check: str = "strict",
) -> Terms:
    """R = answer + format − fallback: learn to be right (UR² eq. 2, appendix C.7).

        answer      2 · score: the letter (choice), math equality (math), `answer_metric` (open QA)
        format      +1 if v = 0, else 0
        fallback    −0.5 f

    The paper gives +2 / 0 for open QA without naming a metric; F1 is what its code pays. `judge`
    grades math answers that are not plainly equal: 2, 1 or 0 for correct, partly, wrong.
    >>> ur2_stage2(example("ur2", answer="Kelmouth, Norland"))     # F1 = 2/3, v = 0, f = 1
    {'answer': 1.3333333333333333, 'format': 1.0, 'fallback': -0.5}
    """
    metric = _pick(ANSWER_METRICS, answer_metric, "answer metric")
    return {
        "answer": _ur2_answer(trajectory, metric, judge),
        "format": float(not ur2_violations(trajectory, format_check=format_check)),
        "fallback": 0.0 - fallback_penalty * count_fallbacks(trajectory),
    }


def _ur2_answer(trajectory: Trajectory, metric: Callable, judge: Judge | None) -> float:
    question, answer = trajectory.question, trajectory.answer
    if not answer:
        return 0.0
    if question.task == "choice":
        return 2.0 * same_choice(answer, question.answers, question.options)
    if question.task != "math":
        return 2.0 * metric(answer, question.answers)
    if math_equal(answer, question.answers):
        return 2.0
    return float(judge(question, answer)) if judge else 0.0


def ur2_choice(
    trajectory: Trajectory,
    step: int,
    variant: str = "qwen_7b",
    answer_metric: str = "f1",
    judge: Judge | None = None,
    fallback_penalty: float = 0.5,
    format_check: str = "strict",
) -> Terms:
    """Stage 2 and a search bonus that ends: 0.5 for n = 1, 1 for n ≥ 2, in steps 0 to 9 (3B: 14).
    The "weak" stage 1 of multiple choice, where the model mostly knows (UR² appendix C.7).
    >>> ur2_choice(example("ur2"), step=0)     # right, v = 0, f = 1, n = 2: 2 + 1 − 0.5 + 1 = 3.5
    {'answer': 2.0, 'format': 1.0, 'fallback': -0.5, 'retrieval': 1.0}
    """
    paid = step < _pick(UR2_CHOICE_STEPS, variant, "variant")
    bonus = UR2_CHOICE_BONUS[min(count_valid_searches(trajectory), 2)] if paid else 0.0
    terms = ur2_stage2(trajectory, answer_metric, judge, fallback_penalty, format_check)
    return terms | {"retrieval": bonus}


# -------------------------------------------------------------------------------------- R1-Searcher


def r1_searcher_format(trajectory: Trajectory) -> list[str]:
    """The names of all format faults (R1-Searcher section 3.2): thinking, </think>, <answer> at
    most 10 words </answer>, and nothing else. The prompt ends inside <think>, so the response holds
    one </think> and no <think>; searches belong to the thinking.
    >>> r1_searcher_format(example("r1_searcher", answer="Norland </answer> <answer> Norland"))
    ['several_answers']
    """
    text, answers = trajectory.model_text, trajectory.answers
    protocol, faults = trajectory.protocol, own_format_faults(trajectory)
    begin, end = tags = _read(protocol.answer_tags, "an answer between tags", protocol)
    thinking, _, rest = text.partition("</think>")
    beside = rest.partition(begin)[0] + rest.partition(end)[2]
    if text.count("</think>") != 1 or "<think>" in text:
        faults.append("thinking_not_closed_once")
    elif begin in thinking:
        faults.append("answer_in_thinking")
    if len(answers) != 1 or not answers[0] or not tags_pair(text, tags):
        faults.append("several_answers" if len(answers) > 1 else "no_answer")
    elif without_eos(beside).strip():
        faults.append("text_beside_answer")
    if answers and len(answers[-1].split()) > MAX_ANSWER_WORDS:
        faults.append("long_answer")
    return faults


def r1_searcher_stage1(trajectory: Trajectory, answer_metric: str = "none") -> Terms:
    """R = 0.5 [n ≥ 1] + 0.5 [format]: learn to search, whatever the answer (R1-Searcher eq. 1, 2).

    answer_metric="cem" is the released code: it adds +1 or −1 by cover-EM.
    >>> r1_searcher_stage1(example("r1_searcher", answer="Sudria"), answer_metric="cem")
    {'retrieval': 0.5, 'format': 0.5, 'answer': -1.0}
    """
    searched = count_valid_searches(trajectory) >= 1
    terms = {"retrieval": 0.5 * searched, "format": 0.5 * (not r1_searcher_format(trajectory))}
    if answer_metric != "none":
        terms["answer"] = _r1_answer(trajectory, answer_metric)
    return terms


def r1_searcher_stage2(
    trajectory: Trajectory, answer_metric: str = "f1", format_penalty: float = 2.0
) -> Terms:
    """R = F1(answer, gold) + (0 if format else −2): learn to be right (R1-Searcher eq. 3, 4).

    answer_metric="em" or "cem" pays +1 or −1 instead of F1 (its table 5). format_penalty=1 is the
    released Llama code.
    >>> r1_searcher_stage2(example("r1_searcher", answer="<think> Norland"))     # F1 = 2/3, less 2
    {'answer': 0.6666666666666666, 'format': -2.0}
    """
    penalty = float(-format_penalty) if r1_searcher_format(trajectory) else 0.0
    return {"answer": _r1_answer(trajectory, answer_metric), "format": penalty}


def _r1_answer(trajectory: Trajectory, answer_metric: str) -> float:
    metric = _pick(ANSWER_METRICS, answer_metric, "answer metric")
    score = metric(trajectory.answer, trajectory.question.answers)
    return score if answer_metric == "f1" else 2.0 * score - 1.0


# ----------------------------------------------------------------------------------------- R-Search

GAMMA_EVIDENCE, GAMMA_ANSWER = 0.2, 0.2  # γ_e and γ_α


def r_search(
    trajectory: Trajectory, reader_answer: str = "", evidence_reward: bool = True
) -> Terms:
    """R = F1(answer) + F1(the reader's answer) + r_f (R-Search eq. 3 to 8).

        A, E       exactly one answer box, exactly one evidence box, and something in it
        format     r_f = 0.2 + 0.2 A without a search;   0.2 E + 0.2 A with one
        evidence   F1 of what the reader, a frozen model of another family, answers from question
                   and evidence alone; 0 without a search, without evidence, or switched off

    So the most is 1.4 without a search and 2.4 with one.
    >>> r_search(example("r_search", answer="Kelmouth, Norland"), "Norland")     # 2/3 + 1 + 0.4
    {'answer': 0.6666666666666666, 'evidence': 1.0, 'format': 0.4}
    """
    e, a = _r_search_boxes(trajectory)
    golds, searched = trajectory.question.answers, trajectory.searches
    paid = evidence_reward and searched and trajectory.evidence
    return {
        "answer": f1_score(trajectory.answer, golds, "delete"),
        "evidence": f1_score(reader_answer, golds, "delete") if paid else 0.0,
        "format": GAMMA_EVIDENCE * (e if searched else 1) + GAMMA_ANSWER * a,
    }


def _r_search_boxes(trajectory: Trajectory) -> tuple[bool, bool]:
    """(E, A)."""
    text, protocol = trajectory.model_text, trajectory.protocol
    evidence = _read(protocol.evidence_tags, "an evidence box", protocol)
    answer = _read(protocol.answer_tags, "an answer box", protocol)
    return has_one_box(text, evidence), has_one_box(text, answer)


def has_one_box(text: str, tags: Tags) -> bool:
    """Exactly one box, and something in it."""
    return [bool(box.content) for box in find_blocks(text, *tags)] == [True]


def r_search_format(trajectory: Trajectory) -> bool:
    """One answer box and, if it searched, one evidence box: all that r_f pays for."""
    e, a = _r_search_boxes(trajectory)
    return a and (e or not trajectory.searches)


def evidence_support(trajectory: Trajectory) -> float:
    """The share of the evidence's words that stand in the documents. To report, not to reward."""
    documents = " ".join(search.text for search in trajectory.searches)
    read = normalize_answer(documents, "delete").split()
    words = normalize_answer(trajectory.evidence or "", "delete").split()
    supported = [word for word in words if word in read]
    return len(supported) / max(1, len(words))


# ----------------------------------------------------------------------------------- When to Search

MAX_CONCISE_WORDS = 12
MAX_STOPWORDS = 0.4
# Eq. 8 as printed ("literal") divides by N(N−1), twice the number of pairs.
SIMILARITIES = {"mean": 1.0, "literal": 0.5}
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
# think (search information reflect [think])* [reflect] answer
_WHEN_ORDER = re.compile("T(?:SIRT?)*R?A")


def when_to_search_stage1(
    trajectory: Trajectory,
    correct: bool | None = None,
    embed: Embedder | None = None,
    beta: float = 0.3,
    similarity: str = "mean",
) -> Terms:
    """R = r_f + r_s + r_a: a search softens a wrong answer (When to Search eq. 6 to 12).

        format      +1 in the order of the protocol, else −1
        retrieval   RC ≤ 1: 0 if the query is concise, else −1
                    RC > 1: −avg_sim, the queries' mean cosine by pairs
        answer      right 1, wrong −1 + β RC

    `correct` is a judge's verdict; None asks cover-EM. RC counts every search that was executed.
    >>> when_to_search_stage1(example("when_to_search", answer="Sudria"))     # RC = 2: −1 + 0.6
    {'format': 1.0, 'retrieval': 0.0, 'answer': -0.4}
    """
    rc, right = len(trajectory.searches), is_right(trajectory, correct)
    check_beta(beta, rc)
    answer = 1.0 if right else -1.0 + beta * rc
    return _when_to_search(trajectory, embed, similarity) | {"answer": answer}


def when_to_search_stage2(
    trajectory: Trajectory,
    correct: bool | None = None,
    embed: Embedder | None = None,
    beta: float = 0.3,
    similarity: str = "mean",
) -> Terms:
    """As stage 1, but a search costs a right answer β: learn when not to. Right 1 − β RC, wrong −1.
    >>> when_to_search_stage2(example("when_to_search"))     # right with RC = 2: 1 − 0.6
    {'format': 1.0, 'retrieval': 0.0, 'answer': 0.4}
    """
    rc, right = len(trajectory.searches), is_right(trajectory, correct)
    check_beta(beta, rc)
    answer = 1.0 - beta * rc if right else -1.0
    return _when_to_search(trajectory, embed, similarity) | {"answer": answer}


def check_beta(beta: float, max_searches: int) -> None:
    """β · searches < 2, or a wrong answer of stage 1 (−1 + β RC) would outrank a right one (1)."""
    if not beta * max_searches < 2:
        raise InputError(
            f"--beta {beta} times --max_searches {max_searches} is {beta * max_searches:g}: it must"
            " stay below 2, or a wrong answer after many searches is worth as much as a right one;"
            " lower one of them"
        )


def _when_to_search(trajectory: Trajectory, embed: Embedder | None, similarity: str) -> Terms:
    """r_f and r_s, the same in both stages."""
    share = _pick(SIMILARITIES, similarity, "similarity")
    queries = [search.query for search in trajectory.searches]
    retrieval = 0.0 if all(map(is_concise, queries)) else -1.0
    if len(queries) > 1:
        retrieval = 0.0 - share * mean_similarity(queries, embed or tfidf_embedder())
    in_order = when_to_search_format(trajectory)
    return {"format": 1.0 if in_order else -1.0, "retrieval": retrieval}


def when_to_search_format(trajectory: Trajectory) -> bool:
    """Are the sections in one of the orders that the paper allows?"""
    return _WHEN_ORDER.fullmatch(section_order(trajectory)) is not None


def is_right(trajectory: Trajectory, correct: bool | None) -> bool:
    """The judge's verdict, else `matches`; not of a long answer, which could list everything."""
    question, answer = trajectory.question, trajectory.answer
    if not answer:
        return False
    if correct is not None:
        return bool(correct)
    short = len(answer.split()) <= word_limit(question)
    return (short or question.task in ("math", "choice")) and matches(question, answer)


def matches(question: Question, answer: str | None) -> bool:
    """Math equality, the letter, or cover-EM with punctuation deleted, as the paper's scorer."""
    if question.task == "math":
        return math_equal(answer, question.answers)
    if question.task == "choice":
        return same_choice(answer, question.answers, question.options)
    return bool(cover_exact_match(answer, question.answers, "delete"))


def section_order(trajectory: Trajectory) -> str:
    """The sections by their letters, as TSIRSIRA: Think, Search, Information, Reflect, Answer.

    I is what the environment wrote, so a search that was not run has none. "x" is no section: text
    outside, a tag inside a section, an empty section, documents by the model's own hand.
    """
    protocol, segments = trajectory.protocol, trajectory.segments
    pairs = [
        protocol.section_tags("think"),
        _read(protocol.query_tags, "queries between tags", protocol),
        protocol.section_tags("reflect"),
        _read(protocol.answer_tags, "an answer between tags", protocol),
        protocol.documents_tags,
    ]
    order = ""
    for segment in segments:
        if segment.writer == "documents":
            order += "I"
        elif segment.writer == "model":
            text = without_eos(segment.text) if segment is segments[-1] else segment.text
            sections = read_sections(text, pairs)
            for which, content in [(4, "")] if sections is None else sections:
                order += "TSRAx"[which] if content else "x"
    return order


def is_concise(query: str) -> bool:
    """Key words, as "Ana Bell birthplace": at most 12 words and 40 % stopwords, no "?", no question
    word or auxiliary in front. Our rule: the paper gives none.
    """
    words = re.findall(r"\w+", query)
    if not words or len(query.split()) > MAX_CONCISE_WORDS or re.search("[?？]", query):
        return False
    # Will Smith asks nothing.
    named = words[0] in ("Will", "May") and "".join(words[1:2]).istitle()
    if words[0].lower() in _OPENERS and not named:
        return False
    stopwords = [word for word in words if word.lower() in _STOPWORDS + _OPENERS]
    return len(stopwords) <= MAX_STOPWORDS * len(words)


def mean_similarity(queries: list[str], embed: Embedder) -> float:
    """The mean cosine over the unordered pairs of queries. ana bell, ana bell, ana town: 2/3."""
    similarity = cosine(embed(queries))  # [n, n]
    pairs = combinations(range(len(queries)), 2)
    found = [float(similarity[pair]) for pair in pairs]
    return sum(found) / len(found)


def tfidf_embedder(documents: Sequence[Document] = ()) -> Embedder:
    """w(t) = count of t in the text · idf(t),  idf(t) = ln((1 + N) / (1 + n_t)) + 1.

    N documents, n_t of them hold t; without documents every idf is 1. Trap: a word that none holds
    must not count, or a query could be repeated with another invented word each time.
    >>> embed = tfidf_embedder([Document("1", "Ana", "town"), Document("2", "Bo", "town")])
    >>> embed(["Ana town"]).round(4).tolist()     # idf(ana) = ln(3/2) + 1, idf(town) = ln(3/3) + 1
    [[1.4055, 1.0]]
    """
    texts = [f"{document.title} {document.text}" for document in documents]
    holders = Counter(word for text in texts for word in set(tokenize(text)))  # n_t

    def idf(word: str) -> float:
        return np.log((1 + len(documents)) / (1 + holders[word])) + 1

    def embed(texts: list[str]) -> np.ndarray:
        counts = [Counter(tokenize(text)) for text in texts]
        words = sorted(set().union(*counts))  # all that matter to these texts' cosines
        if documents:
            words = [word for word in words if word in holders]
        vectors = np.zeros((len(texts), len(words)))  # [n, d]
        for column, word in enumerate(words):
            vectors[:, column] = [count[word] * idf(word) for count in counts]
        return vectors

    return embed


def cosine(vectors: np.ndarray) -> np.ndarray:
    """All cosines, [n, d] -> [n, n]. Two zero vectors are alike (1), or a misspelled query could be
    repeated; a zero vector is like nothing else (0).
    >>> cosine(np.array([[3.0, 4.0], [3.0, 0.0], [0.0, 0.0]])).tolist()     # 3 · 3 / (5 · 3) = 0.6
    [[1.0, 0.6, 0.0], [0.6, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)  # [n, 1]
    unit = vectors / np.where(norms > 0, norms, 1)  # [n, d]
    return unit @ unit.T + (norms == 0) * (norms == 0).T


# -------------------------------------------------------------------------------------------- ARENA


def arena(trajectory: Trajectory, bonus: float = 10.0, relevance_reward: bool = True) -> Terms:
    """R = format + answer + relevance, and 10 more if all three are 1 (ARENA section 3.3).

        format      1 if the text is <relevance> <analysis> <answer>, each once and not empty
        answer      exact match, in any format; a summary: its mean ROUGE (our reading)
        relevance   the cited numbers and the gold ones: the same set 1, some in common 0.5, else 0

    So R is 0, 0.5, ..., 3, or 13. relevance_reward=False leaves the term out, and the bonus asks
    for the other two. Citing everything earns 0.5: `arena_scores` shows how exact the set is.
    >>> arena(example("arena"))     # cites 1 of the gold numbers 1 and 3: 1 + 1 + 0.5
    {'format': 1.0, 'answer': 1.0, 'relevance': 0.5, 'bonus': 0.0}
    """
    question = trajectory.question
    metric = mean_rouge if question.task == "summary" else exact_match
    answer = metric(trajectory.answer, question.answers)
    terms = {"format": float(arena_format(trajectory)), "answer": answer}
    if relevance_reward:
        terms["relevance"] = _relevance(cited(trajectory), set(question.supporting))
    perfect = set(terms.values()) == {1.0}
    return terms | {"bonus": bonus if perfect else 0.0}


def _relevance(numbers: set[int], gold: set[int]) -> float:
    if not numbers & gold:
        return 0.0
    return 1.0 if numbers == gold else 0.5


def arena_format(trajectory: Trajectory) -> bool:
    protocol = trajectory.protocol
    pairs = [protocol.section_tags("relevance"), protocol.section_tags("analysis")]
    pairs.append(_read(protocol.answer_tags, "an answer between tags", protocol))
    sections = read_sections(without_eos(trajectory.model_text), pairs) or []
    order = [which for which, _ in sections]
    return order == [0, 1, 2] and all(content for _, content in sections)


def cited(trajectory: Trajectory) -> set[int]:
    """The numbers in the last <relevance> section; none if it is not a list such as [1, 4]."""
    boxes = find_blocks(trajectory.model_text, *trajectory.protocol.section_tags("relevance"))
    content = boxes[-1].content if boxes else ""
    # [0-9]{1,6}: Python refuses to read a number of 5000 digits, and a model can write one.
    if not re.fullmatch(r"\[\s*[0-9]{1,6}(?:\s*,\s*[0-9]{1,6})*\s*\]", content):
        return set()
    return {int(number) for number in re.findall("[0-9]+", content)}


def arena_scores(trajectory: Trajectory) -> Terms:
    """What an evaluation reports. set_f1 = 2 |cited ∩ gold| / (|cited| + |gold|).
    >>> arena_scores(example("arena"))     # cited {1}, gold {1, 3}: 2 · 1 / (1 + 2)
    {'format': 1.0, 'relevance': 0.5, 'exact_set': 0.0, 'set_f1': 0.6666666666666666}
    """
    numbers, gold = cited(trajectory), set(trajectory.question.supporting)
    relevance = _relevance(numbers, gold)
    return {
        "format": float(arena_format(trajectory)),
        "relevance": relevance,
        "exact_set": float(relevance == 1.0),
        "set_f1": 2 * len(numbers & gold) / max(1, len(numbers) + len(gold)),
    }


# ------------------------------------------------------------------------------------------ by name

REWARDS |= {
    "ur2_stage1": lambda t, s, step, e: ur2_stage1(
        t, s.reward_variant, True, s.fallback_penalty, s.format_check
    ),
    "ur2_stage2": lambda t, s, step, e: ur2_stage2(
        t, s.answer_metric, e.grade, s.fallback_penalty, s.format_check
    ),
    "ur2_choice": lambda t, s, step, e: ur2_choice(
        t, step, s.reward_variant, s.answer_metric, e.grade, s.fallback_penalty, s.format_check
    ),
    "r1_searcher_stage1": lambda t, s, step, e: r1_searcher_stage1(t),
    "r1_searcher_stage2": lambda t, s, step, e: r1_searcher_stage2(t, s.answer_metric),
    "r1_searcher_stage1_code": lambda t, s, step, e: r1_searcher_stage1(t, "cem"),
    "r1_searcher_stage2_llama": lambda t, s, step, e: r1_searcher_stage2(t, s.answer_metric, 1.0),
    "r_search": lambda t, s, step, e: r_search(t, e.reader_answer, s.evidence_reward),
    "when_to_search_stage1": lambda t, s, step, e: when_to_search_stage1(
        t, e.correct, e.embed, s.beta
    ),
    "when_to_search_stage2": lambda t, s, step, e: when_to_search_stage2(
        t, e.correct, e.embed, s.beta
    ),
    "arena": lambda t, s, step, e: arena(t, s.bonus, s.relevance_reward),
}
_WHEN_NEEDS = ("verdict", "embedder", "open", "price")
# Other models: a judge's grade or verdict, a reader, an embedder. Questions: options, supporting
# references, open answers. Settings: a price of a search that is not too high.
NEEDS = {
    "ur2_stage2": ("grade",),
    "ur2_choice": ("grade", "options"),
    "r_search": ("reader", "open"),
    "when_to_search_stage1": _WHEN_NEEDS,
    "when_to_search_stage2": _WHEN_NEEDS,
    "arena": ("supporting",),
}
SWITCHES = {"reader": "evidence_reward", "supporting": "relevance_reward"}  # need -> its setting


def needs(settings) -> set[str]:
    """What must be at hand for the reward of these settings."""
    off = {need for need, switch in SWITCHES.items() if not getattr(settings, switch)}
    return set(NEEDS.get(settings.reward, ())) - off


def check_reward(settings) -> None:
    """Does the reward find in the protocol what it reads, and can its terms keep their order?"""
    if "price" in needs(settings):
        check_beta(settings.beta, settings.max_searches)
    try:
        REWARDS[settings.reward](example(settings.protocol), settings, 0, Extras())
    except InputError as error:
        pair = f"--reward {settings.reward} and --protocol {settings.protocol}"
        raise InputError(f"{pair} do not go together: {error}") from None


LACKING = {  # need -> what is said of a question without it
    "references": "has no references, which the prompt of the --protocol shows",
    "supporting": "names no supporting reference: add `supporting`, or --relevance_reward false",
    "options": "has no options, and the --reward is for multiple choice: use --reward ur2_stage2",
    "open": "is multiple choice, and the --reward compares texts",
}


def check_questions(questions: list[Question], settings) -> list[Question]:
    """The questions, or an InputError that names the first one without what is read of it."""
    needed = needs(settings)
    if as_protocol(settings.protocol).references_in_prompt:
        needed.add("references")
    for question in questions:
        choice = question.task == "choice"
        has = {
            "references": question.references,
            "supporting": question.supporting,
            "options": choice and question.options,
            "open": not choice,
        }
        for need, said in LACKING.items():
            if need in needed and not has[need]:
                raise InputError(f"question {question.id} {said}")
    return questions


# ------------------------------------------------------------------------------------------- a look


@dataclass(frozen=True)
class Story:
    """One way to go about the demo question: pieces of text by their names, for any protocol."""

    name: str
    pieces: tuple[str, ...]


_LOOK = ("search Ana Bell birthplace", "found Ana Bell was born in Kelmouth.", "reflect It helps.")
_MORE = ("search Kelmouth country", "found Kelmouth is a town in Norland.", "reflect It helps.")
_VAGUE = ("search think about it", "fallback No fact is asked for.", "reflect Too vague.")
_THINK, _KNOWN = "think Her birthplace decides.", "reflect I know this."
_FAKED = "found Ana Bell was born in Kelmouth. Kelmouth is a town in Norland."
_BOTH, _SECOND = _FAKED.replace("found", "evidence"), _MORE[1].replace("found", "evidence")
_RIGHT, _WRONG = "answer Norland", "answer Sudria"
_GOOD = ("relevance [1, 3]", _THINK, *_LOOK, *_MORE, _BOTH)
_BARE = ("relevance []", _THINK, _KNOWN)
_FALLBACK = ("relevance [1]", _THINK, *_MORE, *_VAGUE, _SECOND)
_ALL = ("relevance [1, 2, 3, 4]", _THINK, *_LOOK, *_MORE, f"{_BOTH} A bell rings.")
STORIES = (
    Story("good", (*_GOOD, _RIGHT)),
    Story("no search", (*_BARE, _RIGHT)),
    Story("a query that asks for no fact", (*_FALLBACK, _RIGHT)),
    Story("documents of its own", ("relevance [5]", _THINK, _FAKED, _KNOWN, _BOTH, _RIGHT)),
    Story("text after the answer", (*_GOOD, _RIGHT, "plain I am quite sure.")),
    Story("two answers", (*_GOOD, _WRONG, _RIGHT)),
    Story("evidence without a search", (*_BARE, _BOTH, _RIGHT)),
    Story("cites everything", (*_ALL, _RIGHT)),
    Story("wrong answer", (*_GOOD, _WRONG)),
    Story("garbled text", (_GOOD[0], "think Her 出生地 decides.", *_GOOD[2:], _RIGHT)),
)
_QUESTION = Question("demo", "In which country was Ana Bell born?", ["Norland"], supporting=(1, 3))


def tell(story: Story, protocol: Protocol | str) -> Trajectory:
    """The story as a transcript; pieces that the protocol has no tags for are left out."""
    protocol = as_protocol(protocol)
    tags = {pair[0].strip("<>"): pair for pair in protocol.other_tags}
    tags |= {
        "plain": ("", ""),
        "think": tags.get("think") or tags.get("analysis") or ("", ""),
        "search": protocol.query_tags,
        "found": protocol.documents_tags,
        "fallback": protocol.documents_tags,
        "evidence": protocol.evidence_tags,
        "answer": protocol.answer_tags or ("The answer is \\boxed{", "}."),
    }
    closing = ""
    if protocol.prompt_suffix:  # "<think>": opened by the prompt, so the model closes it only
        closing, tags["think"] = tags["think"][1], ("", "")
    text, fallbacks = "", []
    for piece in story.pieces:
        name, _, content = piece.partition(" ")
        if name in ("found", "fallback"):
            fallbacks.append(name == "fallback")
        if name == "answer":
            text, closing = text + closing, ""
        if pair := tags.get(name):
            text += f"{pair[0]} {content} {pair[1]}"
    return trajectory_from_text(_QUESTION, text, protocol, fallbacks)


def example(protocol: Protocol | str, answer: str = "Norland") -> Trajectory:
    """The third story: a search, a search that comes back as the fallback, an answer."""
    return tell(Story("", (*_FALLBACK, f"answer {answer}")), protocol)


COLUMNS = {  # heading -> (protocol, reward)
    "UR² 1": ("ur2", "ur2_stage1"),
    "UR² 2": ("ur2", "ur2_stage2"),
    "R1-S. 1": ("r1_searcher", "r1_searcher_stage1"),
    "R1-S. 2": ("r1_searcher", "r1_searcher_stage2"),
    "R-Search": ("r_search", "r_search"),
    "When 1": ("when_to_search", "when_to_search_stage1"),
    "When 2": ("when_to_search", "when_to_search_stage2"),
    "ARENA": ("arena", "arena"),
}


def main() -> None:
    print(f"{_QUESTION.question} Gold: Norland, from references 1 and 3.")
    print("The same story in each protocol's tags; ARENA cites where the others search.\n")
    print(f"{'transcript':<32}" + "".join(f"{name:>10}" for name in COLUMNS))
    extras = Extras(reader_answer="Norland")  # what all the evidence here says
    for story in STORIES:
        line = f"{story.name:<32}"
        for protocol, reward in COLUMNS.values():
            terms = REWARDS[reward](tell(story, protocol), RewardSettings(), 0, extras)
            line += f"{sum(terms.values()):>+10.2f}"
        print(line)


if __name__ == "__main__":
    run_main(main)
