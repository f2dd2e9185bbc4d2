r"""What a trajectory is worth: one function per reward formula, each a dict of named components
whose sum is the reward.

    n   valid searches: executed by the environment, for a query of at most 20 words
    f   searches that came back as the fallback ("this query asks for no fact")
    v   number of format violations

    UR²             stage 1   R = format + retrieval − 0.5 f     format = +1 if v = 0 else −v,
                    retrieval = 0, 3, 4 by n stage 2   R = answer − 0.5 f + format        answer = 2
                    · score,  format = +1 if v = 0 else 0 choice    stage 2 plus 0.5 (n = 1) or 1 (n
                    ≥ 2) in the first steps
    R1-Searcher     stage 1   R = 0.5 [n ≥ 1] + 0.5 [format]
                    stage 2   R = F1(answer, gold) + (0 if format else −2)
    R-Search                  R = F1(answer) + F1(another model's answer from the evidence) + 0.2
                              [E] + 0.2 [A]
    When to Search            R = format ± 1 − similarity of the queries + answer;   RC searches, β
    = 0.3
                    stage 1   answer = 1 if right else −1 + β RC
                    stage 2   answer = 1 − β RC if right else −1
    ARENA                     R = format + answer + relevance (1, 0.5, 0) + 10 if all three are 1

Three rules hold for every function here, because breaking them is what training then exploits:
  1. only the model's own text is scored: what stands in a document or in the prompt is nobody's
     answer and nobody's fault;
  2. searches are counted in the environment's log, never by tags: a tag can be written without a
     search;
  3. the answer is the last one, found by position with balanced braces. Two answers are a fault;
     the last is still scored.

Left out: anything that looks at more than one trajectory (that is an advantage). Judges and other
models answer before the reward is computed: their verdicts and answers are arguments here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from data import Document, Question
from errors import InputError, run_main
from metrics import (
    cover_exact_match,
    exact_match,
    f1_score,
    math_equal,
    mean_rouge,
    normalize_answer,
    same_choice,
)
from prompts import PROTOCOLS, Protocol, find_answers, find_blocks, frame_documents
from retrievers.embed import Embedder, cosine, tfidf_embedder
from trajectory import Trajectory, trajectory_from_text

MAX_QUERY_WORDS = 20
MAX_ANSWER_WORDS = 10
MAX_QUERIES = 4
ANSWER_METRICS = {"f1": f1_score, "em": exact_match, "cem": cover_exact_match}


def _pick(table: dict, name: str, what: str):
    if name not in table:
        raise InputError(f"unknown {what} {name!r}: one of {', '.join(table)}")
    return table[name]


# --------------------------------------------------------------------------- what all formats share


def count_valid_searches(trajectory: Trajectory) -> int:
    """n. The environment runs a longer query too, and refuses an empty one; only short ones earn
    anything.
    """
    return sum(len(search.query.split()) <= MAX_QUERY_WORDS for search in trajectory.searches)


def count_fallbacks(trajectory: Trajectory) -> int:
    """f, from the summariser's own flag: the wording of the message, or a paraphrase of it in a
    document, is no evidence.
    """
    return sum(search.fallback for search in trajectory.searches)


def tags_pair(text: str, begin: str, end: str) -> bool:
    """Does every `begin` have its `end` before the next one opens?"""
    order = re.findall(f"{re.escape(begin)}|{re.escape(end)}", text)
    return order == [begin, end] * (len(order) // 2)


def scripts(text: str) -> set[str]:
    """The scripts of a text's letters, by the first word of their Unicode names: "LATIN", "CJK",
    "CYRILLIC", ...

    >>> sorted(scripts("π r², ℝ, 巴黎"))       # NFKC turns the mathematician's ℝ into R
    ['CJK', 'GREEK', 'LATIN']
    """
    letters = {
        c
        for c in unicodedata.normalize("NFKC", text)
        if unicodedata.category(c) in ("Lu", "Ll", "Lt", "Lo")
    }
    return {unicodedata.name(c, "UNKNOWN").split()[0] for c in letters}


def is_garbled(trajectory: Trajectory) -> bool:
    """Letters of a script that neither the question nor a document uses, U+FFFD, or private-use
    characters.

    Latin and Greek always pass: prompts are English and formulas are Greek. Trap: a Chinese
    question is no garbled text.
    """
    question, text = trajectory.question, trajectory.model_text
    shown = [question.question, *question.options]
    shown += [f"{document.title} {document.text}" for document in question.references]
    shown += [segment.text for segment in trajectory.segments if segment.writer != "model"]
    broken = any(c == "\ufffd" or unicodedata.category(c) == "Co" for c in text)
    return broken or bool(scripts(text) - scripts(" ".join(shown)) - {"LATIN", "GREEK"})


def without_eos(text: str) -> str:
    """The text without the EOS token that closes it: it is decoded with the rest."""
    return re.sub(r"(?:<\|[^|<>]*\|>|</s>|<eos>)\s*$", "", text)


def read_sections(text: str, pairs: Sequence[tuple[str, str]]) -> list[tuple[int, str]] | None:
    """The text as sections, each (which of `pairs`, content), with only white space between them;
    else None.

    >>> read_sections("<a> 1 < 2 </a> <b>x</b>", [("<a>", "</a>"), ("<b>", "</b>")])
    [(0, '1 < 2'), (1, 'x')]
    >>> read_sections("<a> 1 <b>x</b> </a>", [("<a>", "</a>"), ("<b>", "</b>")]) is None
    True
    """
    tags = "|".join(re.escape(tag) for pair in pairs for tag in pair)
    pieces = re.split(f"({tags})", text)  # between, begin, content, end, between, begin, ...
    if len(pieces) % 4 != 1 or any(between.strip() for between in pieces[::4]):
        return None
    found = [(begin, end) for begin, end in zip(pieces[1::4], pieces[3::4], strict=True)]
    if any(pair not in pairs for pair in found):
        return None
    return [
        (pairs.index(pair), content.strip())
        for pair, content in zip(found, pieces[2::4], strict=True)
    ]


def own_format_faults(trajectory: Trajectory) -> list[str]:
    """Faults that UR² and R1-Searcher name alike, one entry each."""
    text, protocol = trajectory.model_text, trajectory.protocol
    faults = []
    if protocol.query_tags and not tags_pair(text, *protocol.query_tags):
        faults.append("unpaired_query_tags")
    if any(
        tag in text for tag in protocol.documents_tags or ()
    ):  # what the environment writes is not in model_text
        faults.append("written_documents")
    if is_garbled(trajectory):
        faults.append("garbled_text")
    if any(tag in answer for tag in protocol.tags for answer in trajectory.answers):
        faults.append("tag_in_answer")
    return faults


# ---------------------------------------------------------------------------------------------- UR²

UR2_RETRIEVAL = {
    "qwen_7b": (0.0, 3.0, 4.0),
    "qwen_3b": (0.0, 5.0, 7.0),
    "llama_8b": (0.0, 3.0, 3.0),
}  # for n = 0, 1, ≥ 2
FORMAT_CHECKS = {"strict": True, "loose": False}  # name -> is all of it looked at?
UR2_CHOICE_BONUS = (0.0, 0.5, 1.0)  # for n = 0, 1, ≥ 2
UR2_CHOICE_STEPS = {"qwen_7b": 10, "qwen_3b": 15, "llama_8b": 10}  # steps 0 .. 9 (14) pay it

# Traps: no <|im_end|> or <|eot_id|> here: they are EOS tokens, and a response that ends well ends
# in one. A line begins where a turn of the model begins too, because the newline before it is the
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
    format_check="loose" asks only whether the text ends in an answer, whatever stands before it: an
    ablation that shows what a model does with the freedom.

    >>> ur2_violations(example("ur2", answer="Norland or rather perhaps the old town of Kelmouth on its coast"))
    ['long_answer']
    """
    if not _pick(FORMAT_CHECKS, format_check, "format check"):
        return [] if _ends_in_answer(trajectory) else ["no_answer_at_end"]
    asked = [search.query for search in trajectory.searches]
    asked += [refusal.query for refusal in trajectory.refusals if refusal.reason == "limit"]
    faults = _ur2_answer_faults(trajectory) + own_format_faults(trajectory)
    faults += ["long_query" for query in asked if len(query.split()) > MAX_QUERY_WORDS]
    if len(asked) > MAX_QUERIES:
        faults.append("too_many_queries")
    turns = [segment.text for segment in trajectory.segments if segment.writer == "model"]
    faults += [
        f"illegal_{name}"
        for name, pattern in _ILLEGAL.items()
        if any(re.search(pattern, turn) for turn in turns)
    ]
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
        return [] if _is_one_letter(answers[0]) else ["not_a_letter"]
    words = len(answers[0].split())
    longest_gold = max((len(gold.split()) for gold in question.answers), default=0)
    return ["long_answer"] if words > max(MAX_ANSWER_WORDS, longest_gold) else []


def _ends_in_answer(trajectory: Trajectory) -> bool:
    text = without_eos(trajectory.model_text)
    answers = find_answers(trajectory.protocol, text, trajectory.question.task)
    return bool(answers) and not re.search(
        r"\w", text[answers[-1].end :]
    )  # "\boxed{5}." ends in its answer


def _is_one_letter(answer: str) -> bool:
    bare = re.sub(
        r"<\|[^|]*\|>|</s>|\\(?:boxed|text)\b", "", answer
    )  # "B.<|im_end|>": the line's end is the response's end
    return re.fullmatch(r"[\W_]*[A-Za-z][\W_]*", bare) is not None


def ur2_stage1(
    trajectory: Trajectory,
    variant: str = "qwen_7b",
    retrieval: bool = True,
    fallback_penalty: float = 0.5,
    format_check: str = "strict",
) -> dict[str, float]:
    """R = format + retrieval − fallback: learn to search (UR² eq. 1, appendix C.7). No answer term.

        format     +1 if v = 0, else −v          retrieval   0, 3, 4 for n = 0, 1, ≥ 2 (3B: 0, 5, 7;
                   Llama: 0, 3, 3)
        fallback   −0.5 f (`fallback_penalty` is the 0.5)

    On a prompt without retrieval (`retrieval`, or the trajectory's own flag) only the format
    counts: +1 or 0.

    >>> ur2_stage1(example("ur2"))             # v = 0, n = 2, f = 1: 1 + 4 − 0.5 = 4.5
    {'format': 1.0, 'retrieval': 4.0, 'fallback': -0.5}
    """
    table = _pick(UR2_RETRIEVAL, variant, "variant")
    if not (retrieval and trajectory.question.may_search):
        faults = ur2_violations(trajectory, format_check=format_check)
        return {"format": float(not faults), "retrieval": 0.0, "fallback": 0.0}
    v = len(ur2_violations(trajectory, search_required=True, format_check=format_check))
    n, f = count_valid_searches(trajectory), count_fallbacks(trajectory)
    return {
        "format": -float(v) if v else 1.0,
        "retrieval": table[min(n, 2)],
        "fallback": 0.0 - fallback_penalty * f,
    }


def ur2_stage2(
    trajectory: Trajectory,
    answer_metric: str = "f1",
    judge: Callable[[Question, str], float] | None = None,
    fallback_penalty: float = 0.5,
    format_check: str = "strict",
) -> dict[str, float]:
    """R = answer + format − fallback: learn to be right (UR² eq. 2, appendix C.7).

        answer     2 · score: the letter (choice), math equality (math), `answer_metric` (open QA;
                   "f1", "em" or "cem")
        format     +1 if v = 0, else 0           fallback    −0.5 f

    The paper gives +2 / 0 for open QA without naming a metric; F1 is what its code pays.
    `judge(question, answer)` grades math answers that are not plainly equal: 2, 1 or 0 for correct,
    partly, wrong.

    >>> ur2_stage2(example("ur2", answer="Kelmouth, Norland"))   # F1 = 2/3, v = 0, f = 1: 1.3333 + 1 − 0.5 = 1.8333
    {'answer': 1.3333333333333333, 'format': 1.0, 'fallback': -0.5}
    """
    metric = _pick(ANSWER_METRICS, answer_metric, "answer metric")
    return {
        "answer": _ur2_answer(trajectory, metric, judge),
        "format": float(not ur2_violations(trajectory, format_check=format_check)),
        "fallback": 0.0 - fallback_penalty * count_fallbacks(trajectory),
    }


def _ur2_answer(trajectory: Trajectory, metric: Callable, judge: Callable | None) -> float:
    question, answer = trajectory.question, trajectory.answer
    if not answer:
        return 0.0
    if question.task == "choice":
        return 2.0 * same_choice(answer, question.answers, question.options)
    if question.task == "math":
        if math_equal(answer, question.answers):
            return 2.0
        return float(judge(question, answer)) if judge else 0.0
    return 2.0 * metric(answer, question.answers)


def ur2_choice(
    trajectory: Trajectory,
    step: int,
    variant: str = "qwen_7b",
    answer_metric: str = "f1",
    judge: Callable[[Question, str], float] | None = None,
    fallback_penalty: float = 0.5,
    format_check: str = "strict",
) -> dict[str, float]:
    """Stage 2 and a search bonus that ends: 0.5 for n = 1, 1 for n ≥ 2, in steps 0 to 9 (3B: 14)
    (UR² appendix C.7).

    This is the "weak" stage 1 of multiple choice and medicine, where the model mostly knows the
    answer.

    >>> ur2_choice(example("ur2"), step=0)     # right, v = 0, f = 1, n = 2: 2 + 1 − 0.5 + 1 = 3.5
    {'answer': 2.0, 'format': 1.0, 'fallback': -0.5, 'retrieval': 1.0}
    >>> ur2_choice(example("ur2"), step=10)["retrieval"]
    0.0
    """
    paid = step < _pick(UR2_CHOICE_STEPS, variant, "variant")
    bonus = UR2_CHOICE_BONUS[min(count_valid_searches(trajectory), 2)] if paid else 0.0
    return ur2_stage2(trajectory, answer_metric, judge, fallback_penalty, format_check) | {
        "retrieval": bonus
    }


# -------------------------------------------------------------------------------------- R1-Searcher


def r1_searcher_format(trajectory: Trajectory) -> list[str]:
    """The names of all format faults; the format is correct if there is none (R1-Searcher section
    3.2).

    thinking </think> <answer> at most 10 words </answer>, and nothing else. The prompt ends inside
    <think>, so the response holds one </think> and no <think>; searches belong to the thinking.

    >>> r1_searcher_format(example("r1_searcher", answer="Norland </answer> <answer> Norland"))
    ['several_answers']
    """
    text, (begin, end) = trajectory.model_text, trajectory.protocol.answer_tags
    answers, faults = trajectory.answers, own_format_faults(trajectory)
    thinking, _, rest = text.partition("</think>")
    if text.count("</think>") != 1 or "<think>" in text:
        faults.append("thinking_not_closed_once")
    elif begin in thinking:
        faults.append("answer_in_thinking")
    if len(answers) != 1 or not answers[0] or not tags_pair(text, begin, end):
        faults.append("several_answers" if len(answers) > 1 else "no_answer")
    elif _outside(rest, begin, end):
        faults.append("text_beside_answer")
    if answers and len(answers[-1].split()) > MAX_ANSWER_WORDS:
        faults.append("long_answer")
    return faults


def _outside(rest: str, begin: str, end: str) -> str:
    """What stands behind </think> but in no answer box; an EOS token is nothing."""
    return without_eos(
        re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", rest, flags=re.DOTALL)
    ).strip()


def r1_searcher_stage1(trajectory: Trajectory, answer_metric: str = "none") -> dict[str, float]:
    """R = 0.5 [n ≥ 1] + 0.5 [format]: learn to search, whatever the answer (R1-Searcher eq. 1 and
    2).

    answer_metric="cem" is the released code: it adds +1 or −1 by cover-EM.

    >>> r1_searcher_stage1(example("r1_searcher"))               # 0.5 + 0.5 = 1
    {'retrieval': 0.5, 'format': 0.5}
    >>> r1_searcher_stage1(example("r1_searcher", answer="Sudria"), answer_metric="cem")
    {'retrieval': 0.5, 'format': 0.5, 'answer': -1.0}
    """
    reward = {
        "retrieval": 0.5 * (count_valid_searches(trajectory) >= 1),
        "format": 0.5 * (not r1_searcher_format(trajectory)),
    }
    return (
        reward
        if answer_metric == "none"
        else reward | {"answer": _r1_answer(trajectory, answer_metric)}
    )


def r1_searcher_stage2(
    trajectory: Trajectory, answer_metric: str = "f1", format_penalty: float = 2.0
) -> dict[str, float]:
    """R = F1(answer, gold) + (0 if format else −2): learn to be right (R1-Searcher eq. 3 and 4).

    answer_metric="em" or "cem" pays +1 or −1 instead of F1 (its table 5). format_penalty=1 is the
    released Llama code.

    >>> r1_searcher_stage2(example("r1_searcher", answer="Kelmouth, Norland"))   # P = 1/2, R = 1: F1 = 2/3
    {'answer': 0.6666666666666666, 'format': 0.0}
    >>> r1_searcher_stage2(example("r1_searcher", answer="<think> Norland"))     # F1 = 2/3 of "think norland", less 2
    {'answer': 0.6666666666666666, 'format': -2.0}
    """
    penalty = float(-format_penalty) if r1_searcher_format(trajectory) else 0.0
    return {"answer": _r1_answer(trajectory, answer_metric), "format": penalty}


def _r1_answer(trajectory: Trajectory, answer_metric: str) -> float:
    score = _pick(ANSWER_METRICS, answer_metric, "answer metric")(
        trajectory.answer, trajectory.question.answers
    )
    return score if answer_metric == "f1" else 2.0 * score - 1.0


# ----------------------------------------------------------------------------------------- R-Search

GAMMA_EVIDENCE, GAMMA_ANSWER = 0.2, 0.2  # γ_e and γ_α


def r_search(
    trajectory: Trajectory, cross_model_answer: str = "", evidence_reward: bool = True
) -> dict[str, float]:
    """R = F1(answer) + F1(cross-model answer) + r_f (R-Search eq. 3 to 8).

        A, E       exactly one answer box, exactly one evidence box, and something in it
        format     r_f = 0.2 + 0.2 A without a search;   0.2 E + 0.2 A with one
        evidence   F1 of what a frozen model of another family answers from the question and the
                   evidence alone; 0 without a search or without evidence (evidence_reward=False:
                   always)

    So the most is 1.4 without a search and 2.4 with: 1 more for evidence from which another model
    can answer.

    >>> r_search(example("r_search", answer="Kelmouth, Norland"), cross_model_answer="Norland")     # 2/3 + 1 + 0.4
    {'answer': 0.6666666666666666, 'evidence': 1.0, 'format': 0.4}
    """
    text, protocol, golds = trajectory.model_text, trajectory.protocol, trajectory.question.answers
    if not protocol.evidence_tags or not protocol.answer_tags:
        raise InputError(
            f"reward r_search reads evidence and answer boxes, which protocol {protocol.name} does"
            " not have"
        )
    searched = bool(trajectory.searches)
    a, e = has_one_box(text, protocol.answer_tags), has_one_box(text, protocol.evidence_tags)
    paid = evidence_reward and searched and trajectory.evidence
    return {
        "answer": f1_score(trajectory.answer, golds, "delete"),
        "evidence": f1_score(cross_model_answer, golds, "delete") if paid else 0.0,
        "format": GAMMA_EVIDENCE * (e if searched else 1) + GAMMA_ANSWER * a,
    }


def has_one_box(text: str, tags: tuple[str, str]) -> bool:
    """Exactly one box, and something in it."""
    return [bool(box.content) for box in find_blocks(text, *tags)] == [True]


def evidence_support(trajectory: Trajectory) -> float:
    """The share of the evidence's words that stand in the documents it was copied from. To report,
    not to reward.

    >>> evidence_support(example("r_search"))     # "Kelmouth is town in Norland": all 5, without the article
    1.0
    """
    words = normalize_answer(trajectory.evidence or "", "delete").split()
    read = {
        word
        for search in trajectory.searches
        for word in normalize_answer(search.text, "delete").split()
    }
    return sum(word in read for word in words) / len(words) if words else 0.0


# ----------------------------------------------------------------------------------- When to Search

MAX_CONCISE_WORDS = 12
MAX_STOPWORDS = 0.4
SIMILARITIES = {
    "mean": 1.0,
    "literal": 0.5,
}  # eq. 8 as printed divides by N(N−1), twice the number of pairs
_QUESTION_WORDS = set("who whom whose what which when where why how".split())
_AUXILIARIES = set(
    """
am is are was were be been being do does did has have had can could will would shall should may might must
""".split()
)
_STOPWORDS = (
    _QUESTION_WORDS
    | _AUXILIARIES
    | set(
        """
a about after all also an and any as at because before between both but by each for from he her here him his i if in into
it its me more most my no nor not of on once only or other our over own s same she so some such t than that the their
them then there these they this those through to too under until up us very we while with you your
""".split()
    )
)
# think (search information reflect [think])* [reflect] answer
_WHEN_ORDER = re.compile("T(?:SIRT?)*R?A")


def check_beta(beta: float, max_searches: int) -> None:
    """β · searches < 2, or a wrong answer of stage 1 (−1 + β RC) would outrank a right one (1)."""
    if not beta * max_searches < 2:
        raise InputError(
            f"--beta {beta} times --max_searches {max_searches} is {beta * max_searches:g}: it must"
            " stay below 2, or a wrong answer after many searches is worth as much as a right one;"
            " lower one of them"
        )


def when_to_search_stage1(
    trajectory: Trajectory,
    correct: bool | None = None,
    embed: Embedder | None = None,
    beta: float = 0.3,
    similarity: str = "mean",
) -> dict[str, float]:
    """R = r_f + r_s + r_a, and a search softens a wrong answer: learn to search (When to Search eq.
    6 to 12).

        format      +1 in the order of the protocol, else −1
        retrieval   RC ≤ 1: 0 if the query is concise, else −1;   RC > 1: −avg_sim, the queries'
                    mean cosine by pairs
        answer      right 1, wrong −1 + β RC

    `correct` is a judge's verdict; None asks cover-EM. RC counts every search that the environment
    executed.

    >>> when_to_search_stage1(example("when_to_search", answer="Sudria"))     # RC = 2, no word in common: −1 + 0.6
    {'format': 1.0, 'retrieval': 0.0, 'answer': -0.4}
    """
    rc, right = len(trajectory.searches), is_right(trajectory, correct)
    check_beta(beta, rc)
    return _when_to_search(trajectory, embed, similarity) | {
        "answer": 1.0 if right else -1.0 + beta * rc
    }


def when_to_search_stage2(
    trajectory: Trajectory,
    correct: bool | None = None,
    embed: Embedder | None = None,
    beta: float = 0.3,
    similarity: str = "mean",
) -> dict[str, float]:
    """As stage 1, but a search costs a right answer β: learn when not to. answer: right 1 − β RC,
    wrong −1.

    >>> when_to_search_stage2(example("when_to_search"))     # right with RC = 2: 1 − 0.6
    {'format': 1.0, 'retrieval': 0.0, 'answer': 0.4}
    """
    rc, right = len(trajectory.searches), is_right(trajectory, correct)
    check_beta(beta, rc)
    return _when_to_search(trajectory, embed, similarity) | {
        "answer": 1.0 - beta * rc if right else -1.0
    }


def _when_to_search(
    trajectory: Trajectory, embed: Embedder | None, similarity: str
) -> dict[str, float]:
    """r_f and r_s, the same in both stages."""
    share = _pick(SIMILARITIES, similarity, "similarity")
    queries = [search.query for search in trajectory.searches]
    if len(queries) > 1:
        retrieval = 0.0 - share * mean_similarity(queries, embed or tfidf_embedder())
    else:
        retrieval = 0.0 if all(map(is_concise, queries)) else -1.0
    return {"format": 1.0 if when_to_search_format(trajectory) else -1.0, "retrieval": retrieval}


def when_to_search_format(trajectory: Trajectory) -> bool:
    """Are the sections in one of the orders that the paper allows?"""
    return _WHEN_ORDER.fullmatch(section_order(trajectory)) is not None


def is_right(trajectory: Trajectory, correct: bool | None) -> bool:
    """The judge's verdict, else `matches`. An answer that lists everything covers every gold: a
    long one is not right.
    """
    question, answer, golds = trajectory.question, trajectory.answer, trajectory.question.answers
    if not answer:
        return False
    if correct is not None:
        return bool(correct)
    short = len(answer.split()) <= max([MAX_ANSWER_WORDS, *(len(gold.split()) for gold in golds)])
    return (short or question.task in ("math", "choice")) and matches(question, answer)


def matches(question: Question, answer: str | None) -> bool:
    """Math equality, the letter, or cover-EM (punctuation deleted, as When to Search's scorer has
    it).
    """
    if question.task == "math":
        return math_equal(answer, question.answers)
    if question.task == "choice":
        return same_choice(answer, question.answers, question.options)
    return bool(cover_exact_match(answer, question.answers, "delete"))


def section_order(trajectory: Trajectory) -> str:
    """The trajectory's sections by their letters: Think, Search, Information, Reflect, Answer.

    I is what the environment wrote, so a search that was not run has none. "x" stands for anything
    that is no section: text outside, a tag inside a section, an empty section, documents by the
    model's own hand.

    >>> section_order(example("when_to_search"))
    'TSIRSIRA'
    """
    protocol = trajectory.protocol
    if not protocol.query_tags or not protocol.answer_tags:
        raise InputError(
            f"reward when_to_search reads <search> and <answer>, which protocol {protocol.name}"
            " does not have"
        )
    pairs = [
        protocol.section_tags("think"),
        protocol.query_tags,
        protocol.section_tags("reflect"),
        protocol.answer_tags,
    ]
    turns = [(segment.writer, segment.text) for segment in trajectory.segments]
    if turns and turns[-1][0] == "model":
        turns[-1] = ("model", without_eos(turns[-1][1]))
    order = ""
    for writer, text in turns:
        if writer == "documents":
            order += "I"
        elif writer == "model":
            sections = read_sections(text, pairs)
            clean = sections is not None and all(
                content and not _holds_tag(content, protocol) for _, content in sections
            )
            order += "".join("TSRA"[which] for which, _ in sections) if clean else "x"
    return order


def _holds_tag(text: str, protocol: Protocol) -> bool:
    return any(tag in text for tag in protocol.tags)


def is_concise(query: str) -> bool:
    """Key words, no question: at most 12 words and 40 % stopwords, no "?", no question word or
    auxiliary in front.

    Our rule: the paper gives none.

    >>> is_concise("Ana Bell birthplace"), is_concise("where was Ana Bell born"), is_concise("the name of the town")
    (True, False, False)
    """
    words = re.findall(r"\w+", query)
    lower = [word.lower() for word in words]
    if not words or len(query.split()) > MAX_CONCISE_WORDS or re.search("[?？]", query):
        return False
    named = (
        words[0] in ("Will", "May") and words[1:2] and words[1].istitle()
    )  # Will Smith asks nothing
    if lower[0] in _QUESTION_WORDS | _AUXILIARIES and not named:
        return False
    return sum(word in _STOPWORDS for word in lower) <= MAX_STOPWORDS * len(lower)


def mean_similarity(queries: list[str], embed: Embedder) -> float:
    """The mean cosine over the unordered pairs of queries.

    >>> round(mean_similarity(["ana bell", "ana bell", "ana town"], tfidf_embedder()), 4)     # (1 + 1/2 + 1/2) / 3
    0.6667
    """
    similarity = cosine(embed(queries))
    pairs = [float(similarity[i, j]) for i, j in combinations(range(len(queries)), 2)]
    return sum(pairs) / len(pairs)


# -------------------------------------------------------------------------------------------- ARENA


def arena(
    trajectory: Trajectory, bonus: float = 10.0, relevance_reward: bool = True
) -> dict[str, float]:
    """R = format + answer + relevance, and 10 more if all three are 1 (ARENA section 3.3).

        format      1 if the text is <relevance> <analysis> <answer>, each once and with something
                    in it, else 0
        answer      exact match, 1 or 0, whether or not the format holds; a summary: its mean ROUGE
                    (our reading)
        relevance   the cited numbers against the gold ones: the same set 1, some in common 0.5,
                    none or unreadable 0

    So R is 0, 0.5, ..., 3, or 13. relevance_reward=False leaves the term out, and the bonus asks
    for the other two. Citing everything earns 0.5: `arena_scores` shows beside it how exact the set
    is.

    >>> arena(example("arena"))     # cites 1 of the gold numbers 1 and 3: 1 + 1 + 0.5
    {'format': 1.0, 'answer': 1.0, 'relevance': 0.5, 'bonus': 0.0}
    """
    terms = {"format": float(arena_format(trajectory)), "answer": _arena_answer(trajectory)}
    if relevance_reward:
        terms["relevance"] = _relevance(cited(trajectory), set(trajectory.question.supporting))
    return terms | {"bonus": bonus if all(term == 1.0 for term in terms.values()) else 0.0}


def arena_scores(trajectory: Trajectory) -> dict[str, float]:
    """What an evaluation reports: the format, the relevance term, and how well the cited set meets
    the gold set.

        set_f1 = 2 |cited ∩ gold| / (|cited| + |gold|)

    >>> arena_scores(example("arena"))     # cited {1}, gold {1, 3}: 2 · 1 / (1 + 2)
    {'format': 1.0, 'relevance': 0.5, 'exact_set': 0.0, 'set_f1': 0.6666666666666666}
    """
    numbers, gold = cited(trajectory), set(trajectory.question.supporting)
    relevance, size = _relevance(numbers, gold), len(numbers) + len(gold)
    f1 = 2 * len(numbers & gold) / size if size else 0.0
    return {
        "format": float(arena_format(trajectory)),
        "relevance": relevance,
        "exact_set": float(relevance == 1.0),
        "set_f1": f1,
    }


def arena_format(trajectory: Trajectory) -> bool:
    protocol = trajectory.protocol
    if not protocol.answer_tags:
        raise InputError(
            f"reward arena reads an answer section, which protocol {protocol.name} does not have"
        )
    pairs = [
        protocol.section_tags("relevance"),
        protocol.section_tags("analysis"),
        protocol.answer_tags,
    ]
    sections = read_sections(without_eos(trajectory.model_text), pairs) or []
    return [which for which, content in sections if content] == [0, 1, 2] and len(sections) == 3


def cited(trajectory: Trajectory) -> set[int]:
    """The numbers in the last <relevance> section; none if it is not a list such as [1, 4].

    >>> cited(tell(STORIES[0], "arena"))
    {1, 3}
    """
    boxes = find_blocks(trajectory.model_text, *trajectory.protocol.section_tags("relevance"))
    # [0-9]{1,6}: Python refuses to read a number of 5000 digits, and a model can write one.
    listed = boxes and re.fullmatch(
        r"\[\s*[0-9]{1,6}(?:\s*,\s*[0-9]{1,6})*\s*\]", boxes[-1].content
    )
    return {int(number) for number in re.findall("[0-9]+", boxes[-1].content)} if listed else set()


def _relevance(numbers: set[int], gold: set[int]) -> float:
    if not numbers & gold:
        return 0.0
    return 1.0 if numbers == gold else 0.5


def _arena_answer(trajectory: Trajectory) -> float:
    question, answer = trajectory.question, trajectory.answer
    return (
        mean_rouge(answer, question.answers)
        if question.task == "summary"
        else exact_match(answer, question.answers)
    )


def check_supporting(questions: list[Question]) -> None:
    """ARENA's relevance term needs gold numbers; without any, all trajectories of a question would
    earn 0 there.
    """
    for question in questions:
        if not question.supporting:
            raise InputError(
                f"question {question.id} names no supporting reference: ARENA's relevance reward"
                " compares with them; add the field `supporting`, or give --relevance_reward false"
            )


# ------------------------------------------------------------------------------------------- a look


@dataclass(frozen=True)
class Story:
    """One way to go about the demo question, to be told in the tags of any protocol."""

    name: str
    searches: tuple[tuple[str, str], ...] = ()  # (query, what is found)
    fallback: bool = False  # the last search comes back as the fallback
    evidence: str = ""
    answers: tuple[str, ...] = ("Norland",)
    cites: tuple[int, ...] = ()  # ARENA has no searching: what is found there is what is cited
    thought: str = "Her birthplace decides."
    faked: str = ""  # documents by the model's own hand
    after: str = ""


_QUESTION = Question(
    "demo",
    "In which country was Ana Bell born?",
    ["Norland"],
    supporting=(1, 3),
    references=tuple(
        Document(str(i), title, text)
        for i, (title, text) in enumerate(
            [
                ("Ana Bell", "Ana Bell was born in Kelmouth."),
                ("Bell", "A bell rings."),
                ("Kelmouth", "Kelmouth is a town in Norland."),
                ("Sudria", "Sudria is a country."),
            ],
            1,
        )
    ),
)
_FIRST = ("Ana Bell birthplace", "Ana Bell was born in Kelmouth.")
_SECOND = ("Kelmouth country", "Kelmouth is a town in Norland.")
_EVIDENCE = "Ana Bell was born in Kelmouth. Kelmouth is a town in Norland."
_GOOD = Story("good", (_FIRST, _SECOND), evidence=_EVIDENCE, cites=(1, 3))
_NO_SEARCH = replace(_GOOD, name="no search", searches=(), evidence="", cites=())
STORIES = (
    _GOOD,
    _NO_SEARCH,
    replace(
        _GOOD,
        name="a query that asks for no fact",
        searches=(_SECOND, ("think about it", "No fact is asked for.")),
        fallback=True,
        evidence=_SECOND[1],
        cites=(1,),
    ),
    replace(
        _NO_SEARCH, name="documents of its own", faked=_EVIDENCE, evidence=_EVIDENCE, cites=(5,)
    ),
    replace(_GOOD, name="text after the answer", after=" I am quite sure."),
    replace(_GOOD, name="two answers", answers=("Sudria", "Norland")),
    replace(_NO_SEARCH, name="evidence without a search", evidence=_EVIDENCE),
    replace(
        _GOOD,
        name="cites everything",
        evidence=f"{_EVIDENCE} A bell rings. Sudria is a country.",
        cites=(1, 2, 3, 4),
    ),
    replace(_GOOD, name="wrong answer", answers=("Sudria",)),
    replace(_GOOD, name="garbled text", thought="Her 出生地 decides."),
)


def tell(story: Story, protocol_name: str) -> Trajectory:
    """The story as a transcript in the tags of a protocol."""
    protocol = PROTOCOLS[protocol_name]
    fallbacks = [len(story.searches) - 1] if story.fallback else []
    return trajectory_from_text(_QUESTION, _transcript(story, protocol), protocol, fallbacks)


def _transcript(story: Story, protocol: Protocol) -> str:
    sections = {pair[0].strip("<>"): pair for pair in protocol.other_tags}

    def write(name: str, text: str) -> str:
        return f"{sections[name][0]} {text} {sections[name][1]}\n" if name in sections else ""

    if protocol.references_in_prompt:
        body = write("relevance", str(list(story.cites))) + write(
            "analysis", f"{story.thought} {story.faked}"
        )
    else:
        body = write("think", story.thought) if "reflect" in sections else story.thought
        for query, found in story.searches:
            body += (
                f"{protocol.query_tags[0]} {query}"
                f" {protocol.query_tags[1]}{frame_documents(protocol, found)}"
            )
            body += write("reflect", "This helps.")
        body += frame_documents(protocol, story.faked) if story.faked else ""
        body += write("reflect", "I know this.") if not story.searches else ""
        body += "</think>" if protocol.prompt_suffix == "<think>" else ""
    if protocol.evidence_tags and story.evidence:
        body += f"\n{protocol.evidence_tags[0]} {story.evidence} {protocol.evidence_tags[1]}\n"
    begin, end = protocol.answer_tags or (" The answer is \\boxed{", "}.")
    space = " " if protocol.answer_tags else ""
    return (
        body
        + "".join(f"{begin}{space}{answer}{space}{end}" for answer in story.answers)
        + story.after
    )


def example(protocol_name: str, answer: str = "Norland") -> Trajectory:
    """The third story: a search, a search that comes back as the fallback, an answer."""
    return tell(replace(STORIES[2], answers=(answer,)), protocol_name)


def read_evidence(trajectory: Trajectory) -> str:
    """Stands in for the frozen model of R-Search: it answers Norland where the evidence says so."""
    return "Norland" if "Norland" in (trajectory.evidence or "") else ""


COLUMNS = {  # column -> (protocol, reward)
    "UR² 1": ("ur2", ur2_stage1),
    "UR² 2": ("ur2", ur2_stage2),
    "R1-S. 1": ("r1_searcher", r1_searcher_stage1),
    "R1-S. 2": ("r1_searcher", r1_searcher_stage2),
    "R-Search": ("r_search", lambda trajectory: r_search(trajectory, read_evidence(trajectory))),
    "When 1": ("when_to_search", when_to_search_stage1),
    "When 2": ("when_to_search", when_to_search_stage2),
    "ARENA": ("arena", arena),
}


def main() -> None:
    good = tell(STORIES[0], "r_search")
    print(
        f"question: {_QUESTION.question}   gold: {_QUESTION.answers[0]}, from references 1 and 3\n"
    )
    print(
        f"the first transcript in R-Search's tags:\n{re.sub(chr(10) + '+', chr(10), good.text)}\n"
    )
    print(f"{'transcript':<32}" + "".join(f"{name:>11}" for name in COLUMNS))
    for story in STORIES:
        rewards = [
            sum(reward(tell(story, protocol)).values()) for protocol, reward in COLUMNS.values()
        ]
        print(f"{story.name:<32}" + "".join(f"{reward:>+11.2f}" for reward in rewards))
    print(
        "\nThe same story in each protocol's own tags; ARENA does not search, there what is found"
        " is what is cited."
    )
    print("components of the first row:")
    for name, (protocol, reward) in COLUMNS.items():
        terms = "  ".join(
            f"{term} {value:+.2f}" for term, value in reward(tell(STORIES[0], protocol)).items()
        )
        print(f"  {name:<10}{terms}")


if __name__ == "__main__":
    run_main(main)
