"""The rewards: one function per formula. Each returns named reward terms; their sum is the reward.
The docstrings give the formulas, with these letters:

    n   number of valid searches: those that the environment executed and whose query has a word
        (under UR² also at most 20 words). A search that failed (`Search.error`) does not count as
        executed: no reward pays or charges for it. But it does count where UR² penalises a
        trajectory without a search
    f   number of searches answered by the fallback ("this query asks for no fact")
    v   number of format violations

A policy learns to exploit any reward that breaks one of these rules:
  1. only the model's own text is scored, not the text of documents or of the prompt;
  2. searches are counted in the environment's log, because a tag can be written without a search;
  3. only the last answer is scored, and more than one answer is a format violation (search_r1
     does not check this, nor do UR²'s rewards with format_check="loose").

Left out: comparing several trajectories, which is the task of the advantages; and the judge, the
reader and every embedder but TF-IDF. Their results, or functions that ask them, are arguments here
(`OUTSIDE`, `OtherModels`), and plumbing/build.py supplies them.
"""

import math
import pickle
import re
import runpy
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import signature
from itertools import product
from numbers import Real

import numpy as np

from data import Document, Question
from errors import InputError, run_main
from metrics import SPECIAL_TOKEN, exact_match, f1_score, score_answer, tokenize
from papers import PROTOCOLS, as_protocol
from prompts import (
    Protocol,
    Tags,
    find_answers,
    find_blocks,
    section_letters,
    tag_pair,
)
from settings import check_value
from trajectory import Trajectory, trajectory_from_text

RewardTerms = dict[str, float]  # name -> what it adds to the reward
Embedder = Callable[[list[str]], np.ndarray]  # n texts -> [n, d]
Judge = Callable[[Question, str], float]

# UR²'s backbone -> the retrieval term of stage 1 for n = 0, 1, ≥ 2 valid searches
UR2_RETRIEVAL = {"qwen_7b": (0, 3, 4), "qwen_3b": (0, 5, 7), "llama_8b": (0, 3, 3)}


# ------------------------------------------------------------------- checks that all formats share
MAX_QUERY_WORDS = 20
MAX_ANSWER_WORDS = 10
has_word = re.compile(r"\w").search  # false for punctuation alone, such as a query "."


def count_valid_searches(
    trajectory: Trajectory, max_words: float = MAX_QUERY_WORDS, without_fallbacks: bool = False
) -> int:
    """Returns n, the number of executed searches whose query has a word, and at most `max_words`
    words. (The environment also runs longer queries, and queries without a word.) A search that was
    answered by the fallback counts, except `without_fallbacks`.
    """
    searches = [s for s in trajectory.executed if not (without_fallbacks and s.fallback)]
    queries = [search.query for search in searches if has_word(search.query)]
    return sum(len(query.split()) <= max_words for query in queries)


def is_long(question: Question, answer: str) -> bool:
    """Returns whether the answer has more than 10 words and more words than every gold answer."""
    return count_words(answer) > max([MAX_ANSWER_WORDS, *map(count_words, question.answers)])


def count_words(text: str) -> int:
    """Returns the larger of two counts: the pieces between blanks, and the words and numbers of at
    least two characters. So several guesses count separately even if they are joined: "Ana/Bo/1900"
    has 3 words. The formula "3x^9+2x^8+x" has 1.
    """
    words = re.findall(r"[^\W\d_]{2,}|(?<![^\W_])\d{2,}(?![^\W_])", text)
    return max(len(text.split()), len(words))


def scripts(text: str) -> set[str]:
    """Returns the scripts of the letters in a text: "π r², 巴黎" -> GREEK, LATIN, CJK. NFKC turns ℝ
    into R. It would turn the mathematical symbols ℵ, ℶ, ℷ, ℸ into Hebrew letters, so these four
    are removed before.
    """
    letters = set(unicodedata.normalize("NFKC", re.sub("[ℵ-ℸ]", "", text)))
    letters = [x for x in letters if unicodedata.category(x) in ("Lu", "Ll", "Lt", "Lo")]
    return {unicodedata.name(letter, "UNKNOWN").split()[0] for letter in letters}


def is_garbled(trajectory: Trajectory) -> bool:
    """Returns whether the model wrote U+FFFD, a private-use character, or a letter of a foreign
    script: neither Latin nor Greek nor a script of the question's record (its text, accepted
    answers, options, references), of the environment's texts or of the "thought" segments. These
    segments are not checked themselves.
    """
    text = trajectory.model_text
    if text.isascii():  # quick, because it is the usual case: ASCII has only Latin letters
        return False
    if "\ufffd" in text or "Co" in map(unicodedata.category, text):
        return True
    shown = [repr(trajectory.question)]  # all texts of its record
    shown += [segment.text for segment in trajectory.segments if segment.writer != "model"]
    return not scripts(text) <= scripts(" ".join(shown)) | {"LATIN", "GREEK"}


def without_eos(text: str) -> str:
    """Removes an EOS token (metrics.SPECIAL_TOKEN) at the end of a text, because a decoded response
    includes it.
    """
    return re.sub(rf"(?:{SPECIAL_TOKEN})\s*$", "", text)


def own_format_faults(trajectory: Trajectory) -> list[str]:
    """Returns the format faults that both UR² and R1-Searcher count: one for each query tag without
    a partner, for each document block that the model itself opened or closed, and for each answer
    that contains a tag; and one more if the text is garbled.
    """
    text = trajectory.model_text
    protocol = trajectory.protocol
    faults = []
    if protocol.query_tags:
        faults += ["unpaired_query_tags"] * stray_tags(text, protocol.query_tags)
        faults += ["written_documents"] * max(map(text.count, protocol.documents_tags))
    if is_garbled(trajectory):
        faults.append("garbled_text")
    for answer in trajectory.answers:
        faults += ["tag_in_answer"] * any(tag in answer for tag in protocol.tags)
    return faults


def stray_tags(text: str, tags: Tags) -> int:
    """Counts the tags without a partner: "<a> 1 </a> <a>" has one, the last tag."""
    return sum(map(text.count, tags)) - 2 * len(find_blocks(text, *tags))


# ---------------------------------------------------------------------------------------------- UR²
# Number of steps, from step 0 on, in which ur2_choice pays its search bonus.
UR2_CHOICE_STEPS = {"qwen_7b": 10, "qwen_3b": 15, "llama_8b": 10}

# <|im_end|> and <|eot_id|> are legal, because they are EOS tokens: a complete response ends in one.
_HEADER = r"^(?:user|assistant)(?=:?[ \t]*$)"  # header of a chat turn, alone on its line
_ILLEGAL = rf"(?m){_HEADER}|<\|im_start\|>|<tool_call>|<\|(?:start|end)_header_id\|>"


def ur2_violations(
    trajectory: Trajectory, search_required: bool = False, format_check: str = "strict"
) -> list[str]:
    """Returns the names of all format violations; v is their number (UR² eq. 1, appendix C.7).

    Each of these counts every time: an answer after the first, an answer that contains a tag, a
    query tag without a partner, a document block that the model wrote; a query that is too long, a
    query without a word, a query beyond the search limit, a query where searching is forbidden.
    Each of these counts once: no answer; a last answer that is too long (in multiple choice: not a
    letter); garbled text; each kind of illegal token (`_ILLEGAL`: chat headers, tool calls). A text
    that repeats such tokens would otherwise cost without limit.
    With `search_required` (stage 1) it is also a violation not to search. format_check="loose" only
    checks that the text ends in an answer (ablation).
    >>> ur2_violations(example("ur2", answer="a b c d e f g h i j k"))     # 11 words
    ['long_answer']
    """
    if format_check == "loose":
        text = without_eos(trajectory.model_text)
        answers = find_answers(trajectory.protocol, text, trajectory.question.task)
        if answers and not has_word(text[answers[-1].end :]):
            return []
        return ["no_answer_at_end"]
    queries = [search.query for search in trajectory.executed]
    queries += [
        rejected.query for rejected in trajectory.rejected_queries if rejected.reason != "malformed"
    ]
    faults = _ur2_answer_faults(trajectory) + own_format_faults(trajectory)
    faults += ["long_query" for query in queries if len(query.split()) > MAX_QUERY_WORDS]
    faults += ["wordless_query" for query in queries if not has_word(query)]
    if not trajectory.question.may_search:
        faults += ["searched_directly"] * len(queries)
    limit = trajectory.protocol.search_limit(trajectory.question.task)
    faults += ["too_many_queries"] * (len(queries) - limit)
    # The environment's text ends with a newline, so each turn of the model begins on its own line.
    turns = [segment.text for segment in trajectory.segments if segment.writer == "model"]
    illegal = set(re.findall(_ILLEGAL, "\n".join(turns)))
    faults += [f"illegal {kind}" for kind in sorted(illegal)]
    if search_required and not trajectory.searches:  # failed searches count as searches here
        faults.append("missing_retrieval")
    return faults


def _ur2_answer_faults(trajectory: Trajectory) -> list[str]:
    """Returns the faults of the last answer, which is the scored one, and "several_answers" once
    for each earlier answer.
    """
    answers = trajectory.answers
    question = trajectory.question
    faults = ["several_answers"] * (len(answers) - 1)
    if not any(answers):
        faults.append("no_answer")
    elif question.task == "choice":
        # "B.<|im_end|>": the answer line may end in the EOS token.
        bare = re.sub(rf"{SPECIAL_TOKEN}|\\[a-z]+", "", answers[-1])
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
    fallback_is_invalid: bool = False,
) -> RewardTerms:
    """R = format + retrieval + fallback. It trains the model to search (UR² eq. 1, appendix C.7).

        format      +1 if v = 0, else −v; not searching is a violation if the question may search
                    (except with format_check="loose")
        retrieval   0, 3, 4 for n = 0, 1, ≥ 2 (3B: 0, 5, 7; Llama: 0, 3, 3)
        fallback    −0.5 f; f counts the searches with `fallback` set, whatever text they returned
    If the question may not search, only the format term is paid: +1, or for example −1 if the model
    wrote a query and then answered. With `fallback_is_invalid` the searches of f are not in n
    (the other reading of eq. 1: C.6 calls such a query invalid), so the example has 1 + 3 − 0.5.
    >>> ur2_stage1(example("ur2"))     # v = 0, n = 2, f = 1: 1 + 4 − 0.5 = 4.5
    {'format': 1.0, 'retrieval': 4.0, 'fallback': -0.5}
    """
    may_search = trajectory.question.may_search
    v = len(ur2_violations(trajectory, may_search, format_check))
    n = may_search * count_valid_searches(trajectory, without_fallbacks=fallback_is_invalid)
    return {
        "format": -float(v) if v else 1.0,
        "retrieval": float(UR2_RETRIEVAL[variant][min(n, 2)]),
        "fallback": _ur2_fallback(trajectory, fallback_penalty),
    }


def ur2_stage2(
    trajectory: Trajectory,
    grade: Judge | None = None,
    answer_metric: str = "f1",
    fallback_penalty: float = 0.5,
    format_check: str = "strict",
    partly: float = 0.0,
) -> RewardTerms:
    """R = 2 · score(answer) + [v = 0] − 0.5 f. It rewards right answers (UR² eq. 2, section 3.4).

    The score is 1 for the right letter (multiple choice) or an equal value (math). In open QA it is
    `answer_metric`: the paper names no metric, and its code uses F1, with HotpotQA's rule: "yes it
    is" for "yes" earns 0. If there is a judge, a math
    answer that equals no gold gets its `grade` (2, 1 or 0) instead of 2 · score. But the grade 1,
    partly right, earns `partly`, which is 0 in eq. 2 and 1 in the released code.
    >>> ur2_stage2(example("ur2", answer="Kelmouth, Norland"))     # F1 = 2/3, v = 0, f = 1
    {'answer': 1.3333333333333333, 'format': 1.0, 'fallback': -0.5}
    """
    q, answer = trajectory.question, trajectory.answer
    scores = score_answer(answer, q.answers, q.task, q.options, "hotpotqa")
    points = 2.0 * scores[answer_metric]
    if grade and answer and q.task == "math" and not scores["em"]:
        given = grade(q, answer)
        points = partly if given == 1 else float(given)
    return {
        "answer": points,
        "format": float(not ur2_violations(trajectory, format_check=format_check)),
        "fallback": _ur2_fallback(trajectory, fallback_penalty),
    }


def _ur2_fallback(trajectory: Trajectory, penalty: float) -> float:
    return 0.0 - penalty * sum(search.fallback for search in trajectory.searches)


def ur2_choice(
    trajectory: Trajectory,
    step: int,
    grade: Judge | None = None,
    variant: str = "qwen_7b",
    fallback_is_invalid: bool = False,
    **of_stage2,
) -> RewardTerms:
    """R = stage 2 + a search bonus in steps 0 to 9 (3B: 0 to 14): 0.5 for n = 1, 1 for n ≥ 2.

    This is the "weak" stage 1 for multiple choice, where the model mostly knows the answer (UR²
    appendix C.7). The reward ur2_weak is this formula, but allowed for every task. In the steps
    with a bonus, the 3B model's format term is −1 if no search had a word in its query, however
    many other violations there are. The paper calls this "non-accumulative". On a question
    that may not search there is neither a bonus nor this −1. `fallback_is_invalid`: as in stage 1.
    >>> ur2_choice(example("ur2"), step=0)     # right, v = 0, f = 1, n = 2: 2 + 1 − 0.5 + 1 = 3.5
    {'answer': 2.0, 'format': 1.0, 'fallback': -0.5, 'retrieval': 1.0}
    """
    terms = ur2_stage2(trajectory, grade, **of_stage2)
    if step >= UR2_CHOICE_STEPS[variant] or not trajectory.question.may_search:
        return terms | {"retrieval": 0.0}
    searched = [search for search in trajectory.searches if has_word(search.query)]
    if variant == "qwen_3b" and not searched:
        terms = terms | {"format": -1.0}
    n = count_valid_searches(trajectory, without_fallbacks=fallback_is_invalid)
    return terms | {"retrieval": (0.0, 0.5, 1.0)[min(n, 2)]}


# -------------------------------------------------------------------------------------- R1-Searcher
def r1_searcher_format(trajectory: Trajectory) -> list[str]:
    """Returns the names of format faults: none if the format is right, else at least one
    (R1-Searcher section 2.2.1). The format is: thinking and searches, one </think>, <answer> a
    short answer </answer>.
    The opening <think> is in the prompt. A short answer has at most 10 words (our choice), or no
    more words than the longest gold answer.
    >>> r1_searcher_format(example("r1_searcher", answer="Norland </answer> <answer> Norland"))
    ['several_answers']
    """
    text = trajectory.model_text
    answers = trajectory.answers
    begin, end = tags = trajectory.protocol.section_tags("answer")
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
    """R = 0.5 [n ≥ 1] + 0.5 [format]. The answer does not count (R1-Searcher eq. 1, 2).
    answer_metric="cem", as in the released code, adds +1 or −1 by cover-EM; a long answer gets −1.
    >>> r1_searcher_stage1(example("r1_searcher", answer="Sudria"), answer_metric="cem")
    {'retrieval': 0.5, 'format': 0.5, 'answer': -1.0}
    """
    searched = count_valid_searches(trajectory, np.inf) >= 1
    terms = {"retrieval": 0.5 * searched, "format": 0.5 * (not r1_searcher_format(trajectory))}
    if answer_metric != "none":
        too_long = is_long(trajectory.question, trajectory.answer or "")
        terms["answer"] = -1.0 if too_long else _r1_answer(trajectory, answer_metric)
    return terms


def r1_searcher_stage2(
    trajectory: Trajectory, answer_metric: str = "f1", format_penalty: float = 2.0
) -> RewardTerms:
    """R = F1(answer, gold) + (0 if format else −2). Right answers pay (R1-Searcher eq. 3, 4).
    answer_metric="em" or "cem" pays +1 or −1 instead of F1 (eq. 5, table 5). format_penalty=1 is
    used in the released code for Llama.
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
GAMMA_EVIDENCE = 0.2  # γ_e
GAMMA_ANSWER = 0.2  # γ_α


def r_search(
    trajectory: Trajectory, reader_answer: str = "", evidence_reward: bool = True
) -> RewardTerms:
    """R = F1(answer) + F1(the reader's answer) + r_f (R-Search eq. 3 to 8).

        A          1 if there is exactly one answer box, not empty, and no other answer tag; else 0
        E          the same for the evidence box
        format     r_f = 0.2 + 0.2 A without a search,   r_f = 0.2 E + 0.2 A with a search
        evidence   F1 of the answer that a reader, a frozen model of another family, gives from the
                   question and the evidence alone; 0 without a search, without evidence, or with
                   evidence_reward=False
    With evidence_reward=False and a protocol that has no evidence box, r_f = 0.2 A (section 5.2,
    table 3).
    >>> r_search(example("r_search", answer="Kelmouth, Norland"), "Norland")     # 2/3 + 1 + 0.4
    {'answer': 0.6666666666666666, 'evidence': 1.0, 'format': 0.4}
    """
    golds = trajectory.question.answers
    searched = trajectory.executed
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
    """Returns whether the model wrote one `name` box, not empty, and no further `name` tag."""
    text = trajectory.model_text
    tags = trajectory.protocol.section_tags(name)
    filled = [bool(box.content) for box in find_blocks(text, *tags)]
    return filled == [True] and not stray_tags(text, tags)


def r_search_format(trajectory: Trajectory) -> bool:
    """Returns whether r_f has its maximum. In the letters of r_search: A = 1 and, if the model
    searched under a protocol that has an evidence box, also E = 1.
    """
    boxed = trajectory.executed and trajectory.protocol.evidence_tags
    return has_one_box(trajectory, "answer") and (not boxed or has_one_box(trajectory, "evidence"))


def search_r1(trajectory: Trajectory) -> RewardTerms:
    """R = EM(answer, gold). Format and searches do not count (Search-R1, arXiv 2503.09516, eq. 4).
    >>> search_r1(example("search_r1", answer="Kelmouth, Norland"))
    {'answer': 0.0}
    """
    return {"answer": exact_match(trajectory.answer, trajectory.question.answers, "delete")}


# ----------------------------------------------------------------------------------- When to Search
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


def when_to_search(
    trajectory: Trajectory,
    correct: bool | None = None,
    embed: Embedder | None = None,
    beta: float = 0.3,
    similarity: float = 1.0,
    softened: bool = True,
    priced: bool = True,
) -> RewardTerms:
    """R = r_f + r_s + r_a (When to Search eq. 6 to 12).

        RC          number of executed searches, whether or not their queries are concise
        format      r_f = +1 if `when_to_search_format`, else −1
        retrieval   r_s, RC ≤ 1: −1 if there is a query that is not concise, else 0
                    r_s, RC > 1: −avg_sim; avg_sim is `similarity` times the mean cosine over all
                    pairs of queries: 1, as eq. 8 is worded, or 0.5, as it is printed
        answer      r_a of stage 1: 1 if right, −1 + β RC if wrong: searches soften the penalty
                    r_a of stage 2: 1 − β RC if right, −1 if wrong: each search costs a right answer
                    β, so the model learns when not to search
                    unified: 1 − β RC if right, −1 + β RC if wrong. This is our reading of Table 2.
                    With β = 0.3 and RC ≥ 4, a wrong answer earns more than a right one with as many
                    searches
    `correct` is a judge's verdict; if it is None, `matches` decides. RC is 2 in these examples:
    >>> when_to_search_stage1(example("when_to_search", answer="Sudria"))     # −1 + 0.6
    {'format': 1.0, 'retrieval': 0.0, 'answer': -0.4}
    >>> when_to_search_stage2(example("when_to_search"))     # right: 1 − 0.6
    {'format': 1.0, 'retrieval': 0.0, 'answer': 0.4}
    """
    queries = [search.query for search in trajectory.executed]
    retrieval = 0.0 if all(map(is_concise, queries)) else -1.0
    if len(queries) > 1:
        retrieval = 0.0 - similarity * mean_similarity(queries, embed or tfidf_embedder())
    price = beta * len(queries)
    right = is_right(trajectory, correct)
    return {
        "format": 1.0 if when_to_search_format(trajectory) else -1.0,
        "retrieval": retrieval,
        "answer": 1.0 - price * priced if right else -1.0 + price * softened,
    }


when_to_search_stage1 = partial(when_to_search, priced=False)
when_to_search_stage2 = partial(when_to_search, softened=False)


def when_to_search_format(trajectory: Trajectory) -> bool:
    """Returns whether the order of the sections is "think, reflect, answer" or "think, searches,
    answer". Each search is "search, information, reflect", and there may be a think between two
    searches (section 3.3, Table 9). The information must be written by the environment. No section
    of the model may be empty, and it may write no text outside of its sections.
    """
    tags_of = trajectory.protocol.section_tags
    order = ""
    opened = trajectory.opened
    tags = {
        "T": tags_of("think"),
        "S": tags_of("query"),
        "R": tags_of("reflect"),
        "A": tags_of("answer"),
        "x": tags_of("documents"),  # documents written by the model: never legal
    }
    for segment in trajectory.segments:
        if segment.writer == "documents":
            order += "I"
        elif segment.writer == "model":
            order += section_letters(opened + without_eos(segment.text), tags)
            opened = ""
    return bool(re.fullmatch("T(R|SIR(T?SIR)*)A", order))


def is_right(trajectory: Trajectory, correct: bool | None) -> bool:
    """Returns the judge's verdict `correct`, or `matches` if it is None; False if no answer."""
    if not trajectory.answer:
        return False
    return matches(trajectory.question, trajectory.answer) if correct is None else correct


def matches(question: Question, answer: str | None) -> bool:
    """Returns whether an answer is right, by math equality, by its letter or by exact match, as the
    task requires (a summary: by a mean ROUGE of 1). Cover-EM is not used, because it would accept
    "yes no".
    """
    scores = score_answer(answer, question.answers, question.task, question.options, "delete")
    return scores["em"] == 1.0


def is_concise(query: str) -> bool:
    """Returns whether a query consists of key words, such as "Ana Bell birthplace". It must have at
    most 12 words and no "?". At most 40 % of its words may be stopwords, question words or
    auxiliary verbs, and it must not begin with a word of the last two kinds. The rule is ours,
    because the paper gives none. (It takes "Will Smith birthplace" for a question.)
    """
    words = re.findall(r"\w+", query)
    if not words or len(query.split()) > 12 or re.search("[?？]", query):
        return False
    if words[0].lower() in _OPENERS:
        return False
    stopwords = [word for word in words if word.lower() in _STOPWORDS + _OPENERS]
    return len(stopwords) <= 0.4 * len(words)


def mean_similarity(queries: list[str], embed: Embedder) -> float:
    """Returns the mean cosine over the unordered pairs of queries.

    The cosine of two zero vectors counts as 1. `tfidf_embedder` gives a zero vector to a misspelled
    query, whose words are in no document; with a cosine of 0 it could be repeated without a
    penalty. The cosine of a zero vector and any other vector is 0. For N queries eq. 8 as printed
    divides by N(N−1) instead of N(N−1)/2, which gives half of this mean (`similarity` 0.5).
    Worked: the queries ana bell, ana bell, ana town have the cosines 1, 1/2, 1/2 -> 2/3.
    """
    vectors = embed(queries)  # [n, d]
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)  # [n, 1]
    zero = norms == 0  # [n, 1]
    unit = vectors / np.where(zero, 1, norms)  # [n, d]
    cosines = unit @ unit.T + zero * zero.T  # [n, n]
    pairs = cosines[np.triu_indices(len(queries), k=1)].tolist()
    return sum(pairs) / len(pairs)


def tfidf_embedder(documents: Sequence[Document] = ()) -> Embedder:
    """Returns an embedder. The weight of a word is w(t) = count of t in the text · idf(t), where
    idf(t) = ln((1 + N)/(1 + n_t)) + 1.

    There are N documents, of which n_t contain t. Without documents every idf is 1. Otherwise a
    word that is in no document has the weight 0; if it had a weight, a query could be repeated
    with a smaller penalty by adding an invented word each time.
    >>> embed = tfidf_embedder([Document("1", "Ana", "town"), Document("2", "Bo", "town")])
    >>> embed(["Ana town"]).round(4).tolist()     # idf(ana) = ln(3/2) + 1, idf(town) = ln(3/3) + 1
    [[1.4055, 1.0]]
    """
    document_counts = Counter()  # t -> n_t
    for document in documents:
        document_counts.update(set(tokenize(f"{document.title} {document.text}")))

    def idf(word: str) -> float:
        n_t = document_counts[word]
        return np.log((1 + len(documents)) / (1 + n_t)) + 1 if n_t or not documents else 0.0

    def embed(texts: list[str]) -> np.ndarray:
        counts = [Counter(tokenize(text)) for text in texts]
        words = sorted(set().union(*counts))  # only words of the texts affect their cosines
        return np.array([[count[word] * idf(word) for word in words] for count in counts])  # [n, d]

    return embed


# -------------------------------------------------------------------------------------------- ARENA
# For the bonus, a summary counts as right if its mean ROUGE is at least this: about the score of
# ARENA's own model (table 9: 19.6 of 100). Appendix H.2 names no answer term and no bonus for
# summaries, so both are our reading.
GOOD_SUMMARY = 0.2


def arena(
    trajectory: Trajectory,
    correct: bool | None = None,
    answer_metric: str = "em",
    bonus: float = 10.0,
    relevance_reward: bool = True,
    punctuation: str = "underscore",
) -> RewardTerms:
    """R = format + answer + relevance, and a bonus of 10 if all three are 1 (ARENA section 3.3).

        format      1 if the text is <relevance> <analysis> <answer> (or <summary>), each once and
                    not empty; under protocol arena_thinking the model's own <think> may come first
        answer      exact match, whether or not the format is right; in ablations (5.3) F1 or a
                    judge's verdict `correct`; for a summary its mean ROUGE, where 0.2 is enough for
                    the bonus
        relevance   1 if the cited references are exactly the gold ones, 0.5 if at least one cited
                    reference is gold, else 0
    So with exact match R is 0, 0.5, ..., 2.5 or 13. Without `relevance_reward` the bonus needs only
    format and answer.
    >>> arena(example("arena", searches=1))     # cites 1 of the gold numbers 1 and 3: 1 + 1 + 0.5
    {'format': 1.0, 'answer': 1.0, 'relevance': 0.5, 'bonus': 0.0}
    """
    q = trajectory.question
    scores = score_answer(trajectory.answer, q.answers, q.task, q.options, punctuation)
    terms = {
        "format": float(arena_format(trajectory)),
        "answer": scores[answer_metric] if correct is None else float(correct),
    }
    if relevance_reward:
        terms["relevance"] = relevance_of(cited(trajectory), set(q.supporting))
    enough = {"answer": GOOD_SUMMARY} if q.task == "summary" else {}
    perfect = all(value >= enough.get(name, 1.0) for name, value in terms.items())
    return terms | {"bonus": bonus if perfect else 0.0}


def relevance_of(numbers: set[int], gold: set[int]) -> float:
    if not numbers & gold:
        return 0.0
    return 1.0 if numbers == gold else 0.5


def arena_format(trajectory: Trajectory) -> bool:
    """Returns whether the text is one relevance, one analysis and one answer section, in order. A
    <think> part may come first if the chat template opens it, or under protocol arena_thinking.
    Under arena_naive (4.3) the text is one think and one answer section.
    """
    protocol = trajectory.protocol
    tags_of = protocol.section_tags
    text = without_eos(trajectory.model_text)
    if tag_pair("think") in protocol.other_tags:
        tags = {"1": tags_of("think"), "2": tags_of("answer")}
        return section_letters(trajectory.opened + text, tags) == "12"
    tags = {"1": tags_of("relevance"), "2": tags_of("analysis"), "3": tags_of("answer")}
    thinks = protocol.thinking_apart and text.lstrip().startswith("<think>")
    if trajectory.opened or thinks:  # <think> was opened by the chat template, or by the model
        text = text.partition("</think>")[2]
    return section_letters(text, tags) == "123"


def cited(trajectory: Trajectory) -> set[int]:
    """Returns the numbers in the last <relevance> section; none if it is no list such as [1, 4], or
    if there is no such section, as in Naive-GRPO.
    """
    boxes = find_blocks(trajectory.model_text, *tag_pair("relevance"))
    content = boxes[-1].content if boxes else ""
    # [0-9]{1,6}: a model can write a number of 5000 digits, on which int() raises an error.
    if not re.fullmatch(r"\[\s*[0-9]{1,6}(?:\s*,\s*[0-9]{1,6})*\s*\]", content):
        return set()
    return {int(number) for number in re.findall("[0-9]+", content)}


# ------------------------------------------------------------------------------------------ by name
# The beginning of a protocol name -> whether a trajectory has the format of its paper. Under other
# protocols each trajectory with an answer counts.
FORMATS: dict[str, Callable[[Trajectory], bool]] = {
    "ur2": lambda trajectory: not ur2_violations(trajectory),
    "r1_searcher": lambda trajectory: not r1_searcher_format(trajectory),
    "r_search": r_search_format,
    "search_r1": r_search_format,  # here it only checks for one answer box
    "when_to_search": when_to_search_format,
    "arena": arena_format,
}


def good_format(trajectory: Trajectory) -> bool:
    """Tells whether a trajectory has its paper's format; evaluations report how many have."""
    for prefix, check in FORMATS.items():
        if trajectory.protocol.name.startswith(prefix):
            return check(trajectory)
    return trajectory.answer is not None


# What a reward gets, besides --reward_args, if it has a parameter of this name:
#   step           number of the training step
#   correct        a judge's verdict on the answer; None: the metrics decide
#   grade          (question, answer) -> a judge's grade of a math answer that equals no gold (UR²)
#   reader_answer  the answer of a frozen model, from the evidence alone (R-Search)
#   embed          queries -> vectors (When to Search)
OUTSIDE = ("step", "correct", "grade", "reader_answer", "embed")
# name -> the reward: (trajectory, what it needs of OUTSIDE, --reward_args) -> RewardTerms
REWARDS: dict[str, Callable] = {
    "ur2_stage1": ur2_stage1,
    "ur2_stage2": ur2_stage2,
    "ur2_choice": ur2_choice,
    "ur2_weak": ur2_choice,  # allowed for any task, not only multiple choice
    "r1_searcher_stage1": r1_searcher_stage1,
    "r1_searcher_stage2": r1_searcher_stage2,
    "r1_searcher_stage1_code": partial(r1_searcher_stage1, answer_metric="cem"),
    "r1_searcher_stage2_llama": partial(r1_searcher_stage2, format_penalty=1.0),
    "r_search": r_search,
    "search_r1": search_r1,
    "when_to_search_stage1": when_to_search_stage1,
    "when_to_search_stage2": when_to_search_stage2,
    "when_to_search_unified": when_to_search,
    "arena": arena,
    "arena_code": partial(arena, punctuation="plain"),  # blanks; "True" is not "yes"
}


@dataclass
class OtherModels:
    """The other models that a reward asks. Each function of `ask` gets all trajectories that were
    sampled together in one call, so that a model gets one batch, and returns a value for each.
    """

    ask: dict[str, Callable] = field(default_factory=dict)  # name of OUTSIDE -> function
    # name in the log -> function that returns the value to log
    stats: dict[str, Callable] = field(default_factory=dict)


def needs(settings) -> set[str]:
    """Returns which names of OUTSIDE the reward needs under these settings. An own reward that was
    not loaded, as in an evaluation, needs none.
    """
    wanted = {*signature(REWARDS.get(settings.reward, lambda: {})).parameters} & {*OUTSIDE}
    if not settings.reward_args.get("evidence_reward", True):
        wanted.discard("reader_answer")
    # A term that is left out (When to Search, table 4) needs no other model.
    return wanted - {"answer": {"correct"}, "retrieval": {"embed"}}.get(settings.left_out, set())


def reward_terms(name: str, trajectory: Trajectory, outside: dict, **reward_args) -> RewardTerms:
    """Calls the reward `name`, with those of `outside` (OUTSIDE -> value) that it takes."""
    known = signature(REWARDS[name]).parameters.keys() & outside.keys()
    return REWARDS[name](trajectory, **{key: outside[key] for key in known}, **reward_args)


def compute_rewards(
    trajectories: list[Trajectory], settings, step: int, others: OtherModels
) -> tuple[list[RewardTerms], list[bool]]:
    """Returns the terms of each trajectory's reward, and whether each answer is right."""
    given = {name: ask(trajectories) for name, ask in others.ask.items()}
    rewards, correct = [], []
    for row, t in enumerate(trajectories):
        outside = dict.fromkeys(OUTSIDE) | {name: values[row] for name, values in given.items()}
        outside["step"] = step
        terms = reward_terms(settings.reward, t, outside, **settings.reward_args)
        terms.pop(settings.left_out, None)
        rewards.append(terms)
        correct.append(is_right(t, outside["correct"]))
    names = {tuple(sorted(terms)) for terms in rewards}
    if len(names) > 1:  # an own reward; the log has a column for each name
        raise InputError(f"--reward {settings.reward}: its terms differ in their names: {names}")
    return rewards, correct


def check_reward(settings) -> None:
    """Checks that the reward knows its arguments and fits the protocol. In stages 1 and 2 of When
    to Search, checks also that the answer term of a wrong answer is always below that of a right
    one.
    """
    if ":" in settings.reward:
        REWARDS[settings.reward] = own_reward(settings.reward)
    check_value("reward", settings.reward, {"one_of": REWARDS})
    try:
        ((terms,), _) = compute_rewards([example(settings.protocol)], settings, 0, OtherModels())
    except (TypeError, KeyError) as error:
        if ":" in settings.reward:
            raise  # an error of the user's own function
        raise InputError(f"--reward_args {settings.reward_args}: {error}") from None
    if settings.algorithm == "dapo" and settings.filter_by == "answer" and "answer" not in terms:
        raise InputError(f"--reward {settings.reward}: the recipe compares its term `answer`")
    staged = settings.reward in ("when_to_search_stage1", "when_to_search_stage2")
    # Searches change the answer term by at most the price. In stage 1 a wrong answer gets up to
    # −1 + price and a right one 1; in stage 2 a right answer at least 1 − price and a wrong one −1.
    price = settings.reward_args.get("beta", 0.3) * settings.max_searches
    if staged and settings.left_out != "answer" and price >= 2:
        raise InputError(
            f"--reward_args: beta times --max_searches {settings.max_searches} is {price:g}: it "
            "must stay below 2, or a wrong answer can earn as much as a right one"
        )


def own_reward(name: str) -> Callable:
    """Loads FILE.py:FUNCTION. The function gets a Trajectory, what it names of OUTSIDE, and
    --reward_args. It returns named numbers, with the same names for all trajectories; their sum is
    the reward.
    """
    file, _, function = name.rpartition(":")
    try:
        reward = runpy.run_path(file)[function]
    except (FileNotFoundError, KeyError) as error:
        raise InputError(f"--reward {name}: not found: {error}") from None

    @wraps(reward)  # with its signature, which `needs` reads
    def compute(trajectory: Trajectory, **given) -> RewardTerms:
        # The function gets a copy, so that it cannot change the tokens and the mask, which are
        # trained on. For 4,000 tokens this takes 0.4 ms; copy.deepcopy takes 1.7 ms.
        terms = reward(pickle.loads(pickle.dumps(trajectory)), **given)
        numbers = terms.values() if isinstance(terms, dict) else [None]
        if not all(isinstance(x, Real) and math.isfinite(x) for x in numbers):
            raise InputError(
                f"--reward {name}, question {trajectory.question.id}: {terms!r:.300} is not a "
                "reward: return named finite numbers, such as {'answer': 1.0}"
            )
        return {term: float(number) for term, number in terms.items()}

    return compute


def check_questions(questions: list[Question], settings) -> list[Question]:
    """Returns the questions unchanged. Raises an InputError if the reward cannot score one of them,
    or rewards searches although no question may search.
    """
    if settings.reward == "ur2_stage1" and not any(q.may_search for q in questions):
        raise InputError(
            "--reward ur2_stage1 rewards searches, but no question is allowed to search: change"
            " --recipe or --data, or take stage 2"
        )
    name = "" if ":" in settings.reward else settings.reward  # an own reward may read anything
    cites = name.startswith("arena") and settings.reward_args.get("relevance_reward", True)
    texts_only = name.startswith(("r_search", "search_r1", "r1_searcher"))
    for q in questions:
        lacks = ""
        if cites and not q.supporting:
            lacks = (
                "names no supporting reference: add `supporting`, or give --variant no_relevance"
            )
        elif name == "ur2_choice" and not q.options:
            lacks = "has no options, and the --reward is for multiple choice: use --reward ur2_weak"
        elif texts_only and q.task == "choice":
            lacks = "is multiple choice, and the --reward compares texts"
        if lacks:
            raise InputError(f"question {q.id} {lacks}")
    return questions


# -------------------------------------------------------------------------------------- an example
_QUESTION = Question("demo", "In which country was Ana Bell born?", ["Norland"], supporting=(1, 3))
_BORN = "Ana Bell was born in Kelmouth."
_TOWN = "Kelmouth is a town in Norland."


def example(protocol: Protocol | str, answer: str = "Norland", searches: int = 2) -> Trajectory:
    """Returns a trajectory with up to 2 searches; the fallback answers the second. Under ARENA's
    protocols, which have no searches, the trajectory cites up to 2 references instead.
    """
    protocol = as_protocol(protocol)
    thought = "Her birthplace decides."
    pieces = [("relevance", [1, 3][:searches]), ("analysis", thought), ("think", thought)]
    turns = [("Ana Bell birthplace", _BORN), ("Kelmouth country", _TOWN)]
    for query, document in turns[:searches]:
        pieces += [("query", query), ("documents", document), ("reflect", "It helps.")]
    if not searches:
        pieces.append(("reflect", "It is known."))
    pieces.append(("evidence", f"{_BORN} {_TOWN}"))
    text = ""
    for name, content in pieces:
        begin, end = getattr(protocol, f"{name}_tags", None) or tag_pair(name)
        if begin in protocol.tags:
            text += f"{begin} {content} {end}"
    if protocol.prompt_suffix:  # it opens <think>, which must be closed before the answer
        text = text.replace("<think>", "").replace("</think>", "") + "</think>"
    begin, end = protocol.answer_tags or ("The answer is \\boxed{", "}.")
    text += f"{begin} {answer} {end}"
    return trajectory_from_text(_QUESTION, text, protocol, fallbacks=[1])


def main() -> None:
    print(f"{_QUESTION.question} Gold: Norland, from references 1 and 3.")
    print("Rewards of Norland after 0, 1 and 2 searches (ARENA: citations), then of Sudria.\n")
    for name, protocol in product(REWARDS, PROTOCOLS):
        if name.startswith(protocol):
            print(f"{name:24}", end="")
            for answer, searches in product(("Norland", "Sudria"), range(3)):
                trajectory = example(protocol, answer, searches)
                terms = reward_terms(name, trajectory, {"step": 0, "reader_answer": "Norland"})
                print(f"{sum(terms.values()):>+8.2f}", end="")
            print()


if __name__ == "__main__":
    run_main(main)
