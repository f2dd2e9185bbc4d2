"""Tests rewards.py: every formula with numbers worked out by hand, the orderings that the papers
rely on, and hacks that must earn nothing.

A transcript is a template: $search, $right, $evidence and so on stand for these parts in the
protocol's own tags (`written`).
"""

import json
import re
from dataclasses import replace
from string import Template

import pytest
from test_metrics import shared

import rewards
import trajectory_metrics
from data import Document, Question
from errors import InputError
from flags import resolve
from papers import PROTOCOLS
from rewards import (
    REWARDS,
    check_reward,
    count_valid_searches,
    example,
    reward_terms,
    tfidf_embedder,
    ur2_violations,
)
from settings import Settings
from trajectory import RejectedQuery, Segment, trajectory_from_text

QA = Question("1", "In which country was Ana Bell born?", ["Norland"], supporting=(1, 4))
MATH = Question("2", "Half of one?", ["0.5"], task="math")
CHOICE = Question("3", "Which tree?", ["B"], task="choice", options=("elm", "oak", "ash"))
DIRECT = replace(QA, may_search=False)
LONG = " ".join(["word"] * 21)
BORN = "Ana Bell was born in Kelmouth, Norland."
PARTS = {
    "think": "<think> Where was she born? </think>\n",
    "reflect": "<reflect> It helps. </reflect>\n",
    "evidence": f"<original_evidence> {BORN} </original_evidence>",
    "cites": "<relevance>[1, 4]</relevance><analysis>Reference 4 says so.</analysis>",
    "long": LONG,
}


def search(protocol, query="Ana Bell birthplace", document=BORN) -> str:
    """Returns a query and the documents that it found, in the protocol's tags."""
    (ask, asked), (begin, end) = protocol.query_tags, protocol.documents_tags
    return f"{ask} {query} {asked}\n\n{begin}\n{document}\n{end}\n\n"


def written(text, protocol="ur2", question=QA, fallbacks=()):
    """Returns the trajectory of a template under this protocol."""
    protocol = PROTOCOLS[protocol]
    box, end = protocol.answer_tags or ("So \\boxed{", "}")
    parts = PARTS | {"right": f"{box}Norland{end}", "wrong": f"{box}Sudria{end}"}
    if protocol.query_tags:
        parts["search"] = search(protocol)
        parts["faked"] = search(protocol).partition(protocol.query_tags[1])[2].lstrip()
    text = Template(text).substitute(parts)
    return trajectory_from_text(question, text, protocol, fallbacks)


def protocol_of(reward: str) -> str:
    """Returns the first protocol that has this reward."""
    return next(name for name in PROTOCOLS if reward.startswith(name))


def terms(reward, text, question=QA, fallbacks=(), outside=None, **args) -> dict:
    """Returns the reward terms of a template. `outside`: values of OUTSIDE; args: --reward_args."""
    trajectory = written(text, protocol_of(reward), question, fallbacks)
    return reward_terms(reward, trajectory, {"step": 0} | (outside or {}), **args)


def paid(*what, **named):
    """Returns the sum of the terms."""
    return pytest.approx(sum(terms(*what, **named).values()))


def asking(*golds: str) -> Question:
    return replace(QA, answers=list(golds))


# -------------------------------------------------------------------------------------- UR² by hand


@pytest.mark.parametrize(
    ("variant", "by_searches"),
    [("qwen_7b", (-1, 4, 5, 5)), ("qwen_3b", (-1, 6, 8, 8)), ("llama_8b", (-1, 4, 4, 4))],
)
def test_ur2_stage1_pays_format_and_searches_whatever_the_answer(variant, by_searches):
    # n = 0: format −1, since the retrieval is missing. n = 1: format 1 + retrieval 3 (3B: 5;
    # Llama: 3). n >= 2: 1 + 4 (3B: 7; Llama: 3).
    for n, reward in enumerate(by_searches):
        for answer in ("$right", "$wrong"):
            assert reward == paid("ur2_stage1", "$search" * n + answer, variant=variant)


def test_ur2_stage1_counts_each_violation():
    # Eq. 1 gives −1 per violation, also for several of one kind. Here two answers are too many,
    # two query tags have no partner, the model wrote two blocks of documents (one is not closed),
    # and one token is illegal: −7. The single search earns 3.
    stray = "<|begin_of_query|> a <|begin_of_query|> b$faked<|begin_of_documents|> c"
    faulty = f"$search{stray}$right$right$right<|im_start|>"
    assert terms("ur2_stage1", faulty) == {"format": -7.0, "retrieval": 3.0, "fallback": 0.0}


@pytest.mark.parametrize(
    "reward, text, expected",
    [
        # Eq. 1: not searching is not a violation here. Each of two queries is one: −2. A missing
        # answer and an illegal token are two: −2. Eq. 2: 2 for the answer; a query costs the 1 for
        # the format, and earns no bonus.
        ("ur2_stage1", "$right", 1),
        ("ur2_stage1", "$search$search$right", -2),
        ("ur2_stage1", "no box <|im_start|>", -2),
        ("ur2_stage2", "$search$right", 2),
        ("ur2_choice", "$search$search$right", 2),
    ],
)
def test_a_prompt_without_retrieval_pays_the_format_only(reward, text, expected):
    assert paid(reward, text, DIRECT) == expected


@pytest.mark.parametrize(
    "question, searches, rejected, faults",
    [
        (DIRECT, 0, [("direct", "Ana")] * 2, ["searched_directly"] * 2),
        (DIRECT, 0, [("direct", LONG)], ["long_query", "searched_directly"]),
        # A malformed query is not counted; if it leaves tags without a partner, those are.
        (DIRECT, 0, [("malformed", "")], []),
        # A query beyond the limit of four.
        (QA, 4, [("limit", "one more")], ["too_many_queries"]),
    ],
)
def test_each_rejected_query_is_a_violation(question, searches, rejected, faults):
    trajectory = written("$search " * searches + "$right", question=question)
    trajectory.rejected_queries = [RejectedQuery(*query) for query in rejected]
    assert ur2_violations(trajectory) == faults
    assert count_valid_searches(trajectory) == searches


@pytest.mark.parametrize(
    "text, question, metric, expected",
    [
        ("$right", QA, "f1", 3),  # 2 · 1 + 1
        # P = 1/2, R = 1, F1 = 2/3; the reward is 4/3 + 1.
        ("\\boxed{Kelmouth, Norland}", QA, "f1", 7 / 3),
        ("\\boxed{Kelmouth, Norland}", QA, "em", 1),
        ("\\boxed{\\frac{1}{2}}", MATH, "f1", 3),
        ("The correct answer is: B", CHOICE, "f1", 3),
        ("$wrong $right", QA, "f1", 2),  # the last one is scored; two cost the format term
    ],
)
def test_ur2_stage2_pays_twice_the_score_of_each_task(text, question, metric, expected):
    assert paid("ur2_stage2", text, question, answer_metric=metric) == expected


@pytest.mark.parametrize(
    "text, question, grade, partly, expected",
    [
        # Eq. 2 has only right and wrong, so a grade of 1 (partly right) leaves the 1 for the
        # format. With partly=1.0, as in the released code, it earns 1 more.
        ("\\boxed{about a half}", MATH, 1, 0.0, 1),
        ("\\boxed{about a half}", MATH, 1, 1.0, 2),
        ("\\boxed{about a half}", MATH, 2, 0.0, 3),
        # The judge is not asked if the answer is equal, if there is none, or if it is not math.
        ("\\boxed{1/2}", MATH, 0, 0.0, 3),
        ("no box", MATH, 2, 0.0, 0),
        ("$wrong", QA, 2, 0.0, 1),
    ],
)
def test_a_math_judge_grades_answers_that_are_not_plainly_equal(
    text, question, grade, partly, expected
):
    outside = {"grade": lambda question, answer: grade}
    assert paid("ur2_stage2", text, question, outside=outside, partly=partly) == expected


@pytest.mark.parametrize("reward", ["ur2_stage1", "ur2_stage2", "ur2_choice"])
def test_each_fallback_costs_half_and_is_counted_by_its_flag_not_by_its_text(reward):
    text = f"$search$search$search {PROTOCOLS['ur2'].fallback_notice} $right"
    assert terms(reward, text, fallbacks=[0, 2])["fallback"] == -1.0
    assert terms(reward, text)["fallback"] == 0  # the text alone costs nothing


@pytest.mark.parametrize(
    "searches, step, variant, bonus",
    [
        (1, 9, "qwen_7b", 0.5),
        (3, 9, "qwen_7b", 1.0),
        (2, 10, "qwen_7b", 0.0),
        (2, 14, "qwen_3b", 1.0),
        (2, 15, "qwen_3b", 0.0),
    ],
)
def test_the_search_bonus_for_choice_ends_after_the_first_steps(searches, step, variant, bonus):
    text = "$search " * searches + "The correct answer is: B"
    result = terms("ur2_choice", text, CHOICE, (), {"step": step}, variant=variant)
    assert result["retrieval"] == bonus


RIGHT = "The correct answer is: B"
WORST = "北 <|im_start|> I do not know"


@pytest.mark.parametrize(
    "text, step, variant, expected",
    [
        # Appendix C.7, "non-accumulative": the format term is exactly −1, for a right answer
        # (2 − 1) as for a text with three faults (0 − 1).
        (RIGHT, 14, "qwen_3b", 1),
        (WORST, 14, "qwen_3b", -1),
        (f"${{search}}{RIGHT}", 14, "qwen_3b", 3.5),
        (f"<|begin_of_query|> . <|end_of_query|>${{faked}}{RIGHT}", 14, "qwen_3b", 1),  # no word
        # The format term of eq. 2 holds from step 15 on, and for other models.
        (RIGHT, 15, "qwen_3b", 3),
        (RIGHT, 0, "qwen_7b", 3),
    ],
)
def test_the_3b_model_has_format_minus_one_for_a_choice_without_a_search(
    text, step, variant, expected
):
    assert paid("ur2_choice", text, CHOICE, (), {"step": step}, variant=variant) == expected


@pytest.mark.parametrize(
    ("text", "question", "accepted"),
    [
        ("So it is $$\\boxed{Norland}$$.<|im_end|>", QA, True),
        ("The correct answer is: B", CHOICE, True),
        ("\\boxed{Norland} it is", QA, False),
        # The strict check finds many faults in this text.
        ("$faked 北 <tool_call> \\boxed{Sudria} <|begin_of_query|> $right", QA, True),
    ],
)
def test_the_loose_format_check_looks_at_the_end_only(text, question, accepted):
    # The loose check does not require a search either.
    form = terms("ur2_stage1", text, question, format_check="loose")["format"]
    assert form == (1 if accepted else -1)
    assert terms("ur2_choice", text, question, format_check="loose")["format"] == accepted


POLYNOMIAL = "+".join(f"{n}x^{n}" for n in range(12, 0, -1))  # 12x^12+11x^11+...+1x^1
TWELVE = asking("word " * 12)
IN_CHINESE = Question("1", "北?", ["x"])
SHOWS_CHINESE = Question("1", "?", ["x"], references=(Document("1", "北", ""),))


@pytest.mark.parametrize(
    ("text", "question", "faults"),
    [
        ("$right", QA, ""),
        ("no box", QA, "no_answer"),
        ("<|begin_of_query|> where $right", QA, "unpaired_query_tags"),
        ("<|begin_of_query|> - - <|end_of_query|>$faked$right", QA, "wordless_query"),
        ("$faked$faked$right", QA, "written_documents written_documents"),
        ("\\boxed{x} \\boxed{a b c d e f g h i j k}", QA, "several_answers long_answer"),
        ("<|begin_of_query|> $long <|end_of_query|>$faked$right", QA, "long_query"),
        ("$search$search$search$search$search$search$right", QA, "too_many_queries " * 2),
        ("x\nuser: \nagain\nassistant\n$right", QA, "illegal_assistant illegal_user"),
        # The environment wrote the newline before "assistant".
        ("${search}assistant\n$right", QA, "illegal_assistant"),
        ("<tool_call> <tool_call>$right<|im_end|>", QA, "illegal_<tool_call>"),  # once per kind
        ("北 $right", QA, "garbled_text"),
        ("π r², x ∈ ℝ, ℵ₀ < 2^ℵ₀, Māori, naïve $right", QA, ""),
        ("北 \\boxed{x}", SHOWS_CHINESE, ""),
        ("север \\boxed{x}", IN_CHINESE, "garbled_text"),
        ("\\boxed{a b c d e f g h i j}", QA, ""),  # 10 words
        ("\\boxed{" + "word " * 13 + "}", TWELVE, "long_answer"),
        ("\\boxed{" + POLYNOMIAL + "}", MATH, ""),
        ("\\boxed{" + POLYNOMIAL.replace("+", " + ") + "}", MATH, "long_answer"),
        ("\\boxed{Norland <|begin_of_query|> x <|end_of_query|>}", QA, "tag_in_answer"),
        ("The correct answer is: (B).<eos><|im_end|>", CHOICE, ""),
        ("The correct answer is: B, as oaks are hard", CHOICE, "not_a_letter"),
    ],
)
def test_violations_of_ur2s_format(text, question, faults):
    found = ur2_violations(written(text, question=question))
    assert [fault.replace(" ", "_") for fault in found] == faults.split()


# ------------------------------------------------------------------------------ R1-Searcher by hand
TEN = "Sudria Ostland Westland Kaldor Belmark Corsia Dravia Ellenia Fioria Norland"
ELEVEN = "one two three four five six seven eight nine ten eleven"
YES = "so</think><answer>yes they are</answer>"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("$search so</think> $wrong", {"retrieval": 0.5, "format": 0.5}),
        ("so</think> $right", {"retrieval": 0.0, "format": 0.5}),
        ("$search Norland", {"retrieval": 0.5, "format": 0.0}),
    ],
)
def test_r1_searcher_stage1_is_a_half_for_searching_and_a_half_for_the_format(text, expected):
    assert terms("r1_searcher_stage1", text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        # F1 of "Kelmouth, Norland" is 2/3. A second </think> is a fault: 2/3 − 2 = −4/3.
        ("so</think><answer>Kelmouth, Norland</answer>", 2 / 3),
        ("</think>so</think><answer>Kelmouth, Norland</answer>", -4 / 3),
        ("so</think> Norland", -2),  # no answer tags: F1 = 0
    ],
)
def test_r1_searcher_stage2_is_f1_minus_two_for_a_fault(text, expected):
    assert paid("r1_searcher_stage2", text) == expected


@pytest.mark.parametrize(
    "text, gold, args, expected",
    [
        # Eq. 3 and 4 have no rule for yes and no: IN = 1, PN = 3, RN = 1 give 2 / (3 + 1) = 0.5.
        (YES, "yes", {}, 0.5),
        (YES, "yes", {"answer_metric": "em"}, -1),  # eq. 5: the answer fails exact match
        # "true" and "yes" have no word in common: IN = 0. The released code treats them as equal,
        # as UR²'s does (row 30 of the released rewards).
        ("so</think><answer>True</answer>", "yes", {}, 0),
        # An answer may not be longer than the gold: F1 = 2 · 11 / (12 + 11), less 2.
        (f"so</think><answer>{ELEVEN} twelve</answer>", ELEVEN, {}, 22 / 23 - 2),
        # Eq. 5 rewards a list of ten guesses, which covers the gold (section 4.2 reports such
        # answers); a longer list loses 2.
        (f"so</think><answer>{TEN}</answer>", "Norland", {"answer_metric": "cem"}, 1),
    ],
)
def test_r1_searchers_equations_with_numbers(text, gold, args, expected):
    assert paid("r1_searcher_stage2", text, asking(gold), **args) == expected


def test_r1_searcher_counts_a_search_with_any_number_of_words():
    # Eq. 1 asks for n ≥ 1 retrievals, and one with 21 words counts; UR² (C.7, D.2) limits queries
    # to 20 words. A query without a word does not count.
    for query, earned in (("$long", 0.5), (".", 0.0)):
        text = f"<|begin_of_query|> {query} <|end_of_query|>$faked so</think>$right"
        assert terms("r1_searcher_stage1", text)["retrieval"] == earned


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("$search so</think>$right<|im_end|>", ""),
        ("so $right", "thinking_not_closed_once"),
        ("<think>so</think>$right", "thinking_not_closed_once"),
        ("$right so</think>", "answer_in_thinking"),
        ("so</think>$right$right", "several_answers"),
        ("so</think> It is $right", "text_beside_answer"),
        ("so</think><answer>$long</answer>", "long_answer"),
        ("</think><answer><|begin_of_documents|></answer>", "written_documents tag_in_answer"),
        ("北</think>$right", "garbled_text"),
        ("<|begin_of_query|> where</think>$right", "unpaired_query_tags"),
    ],
)
def test_r1_searcher_names_each_format_fault(text, faults):
    assert rewards.r1_searcher_format(written(text, "r1_searcher")) == faults.split()


@pytest.mark.parametrize(
    "gold, answer, faults",
    [
        ("北京", "北京", []),
        ("北京", "Москва 北京", ["garbled_text"]),
    ],
)
def test_an_answer_in_the_script_of_a_gold_answer_is_not_garbled(gold, answer, faults):
    text = f"so</think><answer>{answer}</answer>"
    row = written(text, "r1_searcher", asking("Ostland", gold))
    assert rewards.r1_searcher_format(row) == faults


# --------------------------------------------------------------------------------- R-Search by hand


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("$right", 0.4),  # no search: γ_e is paid anyway, and γ_α for the answer
        ("$search Norland", 0.0),
        # An empty box does not count.
        ("$search<original_evidence> </original_evidence>$right", 0.2),
        # There are two answer boxes, though one is empty.
        ("$search$evidence<answer> </answer>$right", 0.2),
        ("$search$evidence$right", 0.4),
        # A pair of tags and a stray tag are not exactly one box.
        ("<answer> so $right", 0.2),
        ("$search</original_evidence>$evidence$right", 0.2),
    ],
)
def test_r_searchs_format_by_hand(text, reward):
    assert terms("r_search", text)["format"] == pytest.approx(reward)
    assert rewards.r_search_format(written(text, "r_search")) == (reward == 0.4)  # the whole r_f


def test_r_search_without_evidence_pays_only_the_answer_and_the_answer_box():
    """Without the evidence reward and the evidence box (section 5.2) the reward is r_α + γ_α · A,
    whether or not the model searched.
    """
    for text in ("$search<answer>Kelmouth, Norland</answer>", "<answer>Kelmouth, Norland</answer>"):
        plain = written(text, "r_search_plain")
        result = rewards.r_search(plain, "Norland", evidence_reward=False)
        assert result == pytest.approx({"answer": 2 / 3, "evidence": 0.0, "format": 0.2})
        assert rewards.r_search_format(plain)
    # If the protocol keeps the evidence box and only the reader is off, γ_e · E is still paid.
    assert paid("r_search", "$search$evidence$right", evidence_reward=False) == 1.4


@pytest.mark.parametrize(
    "text, gold, reader, expected",
    [
        # Eq. 3, "Ana Maria Bell" for "Ana Bell": 2 · 2 / (3 + 2) = 0.8. Eq. 4, the reader answers
        # "Bell": 2 · 1 / (1 + 2) = 2/3. Eq. 5, after a search with E = 1 and A = 1: 0.4. Eq. 6 adds
        # these up.
        ("$search$evidence<answer>Ana Maria Bell</answer>", "Ana Bell", "Bell", 0.8 + 2 / 3 + 0.4),
        # The last of two evidence boxes is read, but E = 0: answer 1 + evidence 1 + format 0.2.
        ("$search$evidence$evidence$right", "Norland", "Norland", 2.2),
        # Eq. 3 has no rule for yes and no: "yes they are" for "yes" is 2 · 1 / (3 + 1).
        ("<answer> yes they are </answer>", "yes", "", 0.5 + 0.4),
        ("$wrong$right", "Norland", "", 1.2),  # the last of two answers is scored, and A = 0
    ],
)
def test_r_searchs_equations_with_numbers(text, gold, reader, expected):
    assert paid("r_search", text, asking(gold), (), {"reader_answer": reader}) == expected


def test_search_r1_pays_exact_match_and_nothing_else():
    for answer, reward in (
        ("Nor-land.", 1),  # punctuation is deleted
        ("Norland </answer><answer> Sudria", 0),  # the last of two answers counts
    ):
        assert terms("search_r1", f"<answer>{answer}</answer>") == {"answer": reward}


@pytest.mark.parametrize(
    "reward, answers",
    [
        # "Spider-Man" becomes "spiderman" if the hyphen is removed, "spider man" if it becomes a
        # blank.
        ("r_search", (0, 1, 1)),
        ("when_to_search_stage1", (-1, 1, 1)),
        ("arena", (0, 1, 0)),
        ("arena_code", (1, 0, 1)),
    ],
)
def test_r_search_and_when_to_search_remove_punctuation_and_arena_all_but_underscores(
    reward, answers
):
    for answer, expected in zip(("spider man", "spiderman", "Spider_Man"), answers, strict=True):
        text = f"<answer>{answer}</answer>"
        assert terms(reward, text, asking("Spider-Man"))["answer"] == expected


def test_evidence_support_is_the_share_of_evidence_words_in_the_documents():
    def support(text):
        return trajectory_metrics.evidence_support(written(text, "r_search"))

    # All 7 words of "ana bell was born in kelmouth norland" are in the document. Of "bell was
    # queen", the words "bell" and "was" are.
    assert support("$search$evidence") == 1.0
    made_up = "<original_evidence> The Bell was queen </original_evidence>"
    assert support(f"$search{made_up}") == pytest.approx(2 / 3)
    # Without a document or without evidence it is 0; R-Search's reward does not look at it.
    assert support(made_up) == support("$search$right") == 0.0
    read = {"reader_answer": "Norland"}
    assert terms("r_search", f"$search{made_up}$right", QA, (), read)["evidence"] == 1.0


# --------------------------------------------------------------------------- When to Search by hand


SECTIONS_IN_ORDER = """
$think$reflect$right
$think$search$reflect$search$reflect$right<|im_end|>
$think$search$reflect$think$search$reflect$right
$think<reflect> 1 < 2 </reflect>$right
"""
# Without a search a reflect is required, and no other text; the parser's letters are not sections.
OUT_OF_ORDER = """
$think$right
$think$search$reflect$reflect$right
$reflect$right
$think$search$right
$think$reflect$search$reflect$right
$think$reflect$right I am sure.
Well. $think$reflect$right
TRA
<think> </information> </think>$reflect$right
$think<search> nobody ran it </search>$reflect$right
$think$faked$reflect$right
"""


@pytest.mark.parametrize("good, texts", [(1.0, SECTIONS_IN_ORDER), (-1.0, OUT_OF_ORDER)])
def test_when_to_searchs_order_of_sections(good, texts):
    for text in texts.strip().splitlines():
        assert terms("when_to_search_stage1", text)["format"] == good, text


def test_a_notice_is_not_a_section_and_a_rejected_search_costs_nothing():
    trajectory = written("$think$search$reflect$right", "when_to_search")
    trajectory.segments.insert(2, Segment("notice", "Ask for a fact."))
    trajectory.rejected_queries.append(RejectedQuery("limit", "one more"))
    result = rewards.when_to_search_stage2(trajectory)
    assert (result["format"], result["answer"]) == (1.0, pytest.approx(1 - 0.3))


WHEN = PROTOCOLS["when_to_search"]
# No two of these queries have a word in common.
QUERIES = ["Ana Bell birthplace", "Kelmouth mayor", "Norland seat", "Sudria king"]


def searching(*queries: str) -> str:
    """Returns a thought and these searches, with their reflections."""
    return "$think" + "".join(f"{search(WHEN, query)}$reflect" for query in queries)


@pytest.mark.parametrize(
    "stage, per_right, per_wrong", [("stage1", 0, 0.3), ("stage2", -0.3, 0), ("unified", -0.3, 0.3)]
)
def test_each_search_softens_a_wrong_answer_and_costs_a_right_one(stage, per_right, per_wrong):
    # With β = 0.3, stage 1 pays 1 if right and −1 + 0.3 n if wrong; stage 2 pays 1 − 0.3 n if right
    # and −1 if wrong. Table 2's unified reward uses both signs: at RC = 4 a right answer earns −0.2
    # and a wrong one 0.2.
    for n in range(5):
        text = searching(*QUERIES[:n]) + "$reflect" * (n == 0)
        right, wrong = (terms(f"when_to_search_{stage}", text + a) for a in ("$right", "$wrong"))
        same = {"format": 1.0, "retrieval": 0.0}
        assert right == pytest.approx(same | {"answer": 1 + n * per_right})
        assert wrong == pytest.approx(same | {"answer": -1 + n * per_wrong})


def test_eq_12_is_the_sum_of_three_terms():
    # Two queries have one of three words in common: cosine 1/3. Stage 1, wrong answer:
    # 1 − 1/3 − 1 + 0.6. Stage 2, right answer: 1 − 1/3 + 1 − 0.6.
    text = searching("ana bell birthplace", "ana town seat")
    assert paid("when_to_search_stage1", f"{text}$wrong") == 1 - 1 / 3 - 1 + 0.6
    assert paid("when_to_search_stage2", f"{text}$right") == 1 - 1 / 3 + 1 - 0.6
    # With sections out of order only the format term changes, from 1 to −1 (eq. 6).
    assert paid("when_to_search_stage2", f"$think{text}$right") == -1 - 1 / 3 + 1 - 0.6


@pytest.mark.parametrize("protocol, rest", [("when_to_search", "$reflect"), ("arena", "$cites")])
def test_thinking_that_the_chat_template_opened_is_a_section(protocol, rest):
    def good(text, opened="<think>"):
        trajectory = written(f"{text}{rest}$right", protocol)
        trajectory.opened = opened
        return rewards.good_format(trajectory)

    assert good("Where? </think>\n") and not good("Where? </think>\n", opened="")
    assert not good("Where?")  # never closed
    assert good("<think>Where? </think>") is (protocol == "arena")  # ARENA skips the thinking


def test_eq_8_as_printed_charges_half_of_the_mean_similarity():
    # The cosine of the two queries is 1/3; N(N − 1) = 2 counts their one pair as a half.
    row = written(searching("ana bell birthplace", "ana town seat"), "when_to_search")
    half = rewards.when_to_search(row, similarity=0.5)
    assert half["retrieval"] == pytest.approx(-1 / 6)


def retrieval(*queries, embed=None):
    text = f"{searching(*queries)}$right"
    return terms("when_to_search_stage1", text, outside={"embed": embed})["retrieval"]


def test_one_search_must_be_concise_and_several_must_differ():
    assert retrieval() == retrieval("Ana Bell birthplace") == 0.0
    assert retrieval("where was Ana Bell born") == retrieval(LONG) == -1.0
    # The pairs have cosines 1, 1/2 and 1/2 (two words each, one in common): mean 2/3.
    assert retrieval("ana bell", "ana bell", "ana town") == pytest.approx(-2 / 3)
    # If there are several searches, none needs to be concise.
    assert retrieval("where was Ana Bell born", "Kelmouth mayor") == 0.0
    # Another embedder gives two vectors with cosine 3/5.
    assert retrieval("a", "b", embed=lambda texts: [[3, 4], [1, 0]]) == pytest.approx(-0.6)


@pytest.mark.parametrize(
    ("query", "concise"),
    [
        ("king of the Norland", False),  # 2 of 4 words are stopwords
        ("Norland？", False),
        ("Which country Ana Bell", False),
        (" ".join(["word"] * 12), True),
        (" ".join(["word"] * 13), False),
        ("", False),
    ],
)
def test_concise_queries(query, concise):
    assert rewards.is_concise(query) is concise


@pytest.mark.parametrize(
    "text, correct",
    [
        ("<answer> The Norland! </answer>", False),
        ("$think", True),  # a missing answer is wrong, even if the judge's verdict is "correct"
        ("<answer>Norland or Sudria</answer>", None),  # it merely contains the gold
    ],
)
def test_the_judges_verdict_decides_or_exact_match_if_there_is_none(text, correct):
    result = terms("when_to_search_stage1", text, outside={"correct": correct})
    assert result["answer"] == -1


# ----------------------------------------------------------------------------------- TF-IDF by hand


def similarity(embed, *texts):
    return rewards.mean_similarity(list(texts), embed)


def test_without_a_corpus_every_word_weighs_the_same():
    # The counts are (1, 1, 0) and (1, 0, 1): 1 / (√2 · √2).
    assert similarity(tfidf_embedder(), "ana birthplace", "Ana: employer") == pytest.approx(1 / 2)
    # The counts are (2, 1) and (1, 1): 3 / (√5 · √2).
    assert similarity(tfidf_embedder(), "ana ana town", "ana town") == pytest.approx(3 / 10**0.5)


def test_queries_of_invented_words_have_zero_vectors_and_count_as_equal():
    embed = tfidf_embedder([Document("1", "Ana", "born in town")])
    assert similarity(embed, "qqq", "zzz") == similarity(embed, "??", "??") == 1.0
    assert similarity(embed, "qqq", "ana") == 0.0


# ------------------------------------------------------------------------------------ ARENA by hand


def sections(ids="[1, 4]", answer="June 16, 1874"):
    return f"<relevance>{ids}</relevance><analysis>It says so.</analysis><answer>{answer}</answer>"


@pytest.mark.parametrize(
    "ids, answer, args, expected",
    [
        # R = R_format + R_accuracy + R_relevance + R_bonus (3.3); the bonus only if all three are
        # 1. Relevance: the gold numbers are 1 and 4; exactly these earn 1, some in common 0.5.
        ("[4, 1]", "June 16, 1874", {}, 1 + 1 + 1 + 10),
        ("[1, 2, 3, 4]", "June 16, 1874", {}, 1 + 1 + 0.5),
        ("[4, 1]", "June 16", {}, 1 + 0 + 1),
        ("[4, 1]", "June 16, 1874 </answer> done", {}, 0 + 1 + 1),
        # F1 of "June 16": P = 1 and R = 2/3, so 0.8.
        ("[4, 1]", "June 16", {"answer_metric": "f1"}, 1 + 0.8 + 1),
        ("[4, 1]", "June 16", {"outside": {"correct": True}}, 1 + 1 + 1 + 10),  # a judge's verdict
        # Without relevance the bonus needs the other two.
        ("[2]", "June 16, 1874", {"relevance_reward": False}, 1 + 1 + 10),
    ],
)
def test_every_sum_of_arenas_terms_by_hand(ids, answer, args, expected):
    assert paid("arena", sections(ids, answer), asking("June 16, 1874"), **args) == expected


@pytest.mark.parametrize(
    "ids, relevance",
    [
        ("[4,1,4]", 1.0),
        ("[1]", 0.5),
        ("[1, 4]</relevance> <relevance>[2]", 0.0),  # the last section counts
        ("[true, 4]", 0.0),
        ("[" + "9" * 5000 + "]", 0.0),  # Python cannot parse a number this long
    ],
)
def test_cited_numbers_are_a_set_in_brackets(ids, relevance):
    assert terms("arena", sections(ids))["relevance"] == relevance


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("\n $cites$right \n<|im_end|>", True),
        ("<relevance>1,4</relevance><analysis>1 < 2, a <b></analysis>$right", True),  # no list
        ("$cites$right done", False),
        ("<think>hm</think>$cites$right", False),
        ("$cites<analysis>y</analysis>$right", False),
        ("<relevance>[1]</relevance><analysis><answer>x</analysis>$right", False),
        ("<relevance>[1]</relevance><analysis> </analysis>$right", False),
        # The three sections are complete, but there is an empty one more.
        ("<relevance></relevance>$cites$right", False),
    ],
)
def test_arenas_format_is_three_sections_and_white_space(text, good):
    assert terms("arena", text)["format"] == float(good)
    # Under arena_thinking the model may think before the sections.
    apart = written(text, "arena_thinking")
    assert rewards.arena_format(apart) == (good or text.startswith("<think>"))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("\n <think>hm</think>$right \n<|im_end|>", True),
        ("$right", False),
        ("<think> </think>$right", False),
        ("<think>hm</think><think>hm</think>$right", False),
    ],
)
def test_naive_grpo_earns_one_for_think_and_answer_and_one_for_the_answer(text, good):
    """ARENA 4.3: rewards for format and accuracy alone."""
    settings = resolve("arena", 1, False, {"variant": "naive_grpo"})
    trajectory = written(text, settings.protocol)
    paid = rewards.arena(trajectory, **settings.reward_args)
    assert paid == {"format": float(good), "answer": 1.0, "bonus": 0.0}
    assert rewards.good_format(trajectory) == good


def test_for_arenas_released_scorer_true_is_not_yes():
    for reward in ("arena", "arena_code"):
        assert terms(reward, "<answer>True</answer>", asking("yes"))["answer"] == 0.0
        assert terms(reward, "<answer>Yes!</answer>", asking("yes"))["answer"] == 1.0


def test_a_summary_earns_its_mean_rouge_and_from_one_fifth_also_the_bonus():
    pytest.importorskip("rouge_score", reason="the extra rouge is not installed")
    question = replace(QA, answers=["the cat lay down"], task="summary")

    def terms_of(text):
        summary = written(f"$cites<summary>{text}</summary>", "arena_summary", question)
        return list(rewards.arena(summary).values())

    # Words 3/4, pairs 1/3, longest common subsequence 3/4: (0.75 + 0.3333 + 0.75) / 3 = 0.6111.
    assert terms_of("The cat sat down.") == pytest.approx([1, 11 / 18, 1, 10])
    # One common word of 5 and 4: words 2/9, pairs 0, subsequence 2/9: mean 0.1481, below one fifth.
    assert terms_of("A fox ran the mile.") == pytest.approx([1, 4 / 27, 1, 0])


# ------------------------------------------------------------------------------------------ by name


def settings_for(reward, protocol="", max_searches=4, left_out="", **reward_args):
    """Returns the settings of a run with this reward."""
    settings = {"reward": reward, "protocol": protocol or protocol_of(reward)}
    settings |= {"max_searches": max_searches, "left_out": left_out, "reward_args": reward_args}
    return Settings(**settings)


@pytest.mark.parametrize("reward", REWARDS)
def test_every_reward_by_name_scores_a_trajectory_of_its_protocol(reward):
    numbers = reward_terms(reward, example(protocol_of(reward)), {"step": 0})
    assert numbers and all(isinstance(number, float) for number in numbers.values())
    check_reward(settings_for(reward))


@pytest.mark.parametrize(
    "reward, text, term",
    [
        ("r1_searcher_stage2_llama", "Norland", "format"),
        ("r1_searcher_stage1_code", "so</think>$wrong", "answer"),
    ],
)
def test_the_released_code_charges_llama_one_for_the_format_and_adds_cover_em(reward, text, term):
    assert terms(reward, text)[term] == -1


@pytest.mark.parametrize(
    "settings, message",
    [
        (settings_for("arena", "ur2"), "protocol ur2 has no <.*> section, which --reward, "),
        (settings_for("ur2_stage1", fallback=0.0), "unexpected keyword argument 'fallback'"),
        (settings_for("ur2_stage1", variant="qwen_9b"), "--reward_args .*qwen_9b"),
        # A search price that lets a wrong answer win.
        (settings_for("when_to_search_stage2", beta=0.5), "beta times --max_searches 4 is 2: it"),
    ],
)
def test_a_reward_that_does_not_fit_is_an_error_of_one_line(settings, message):
    with pytest.raises(InputError, match=message) as error:
        check_reward(settings)
    assert "\n" not in str(error.value)


UNCITED = replace(QA, supporting=())


@pytest.mark.parametrize(
    ("reward", "question", "message"),
    [
        ("arena", UNCITED, "names no supporting reference.*--variant no_relevance"),
        ("ur2_choice", replace(CHOICE, options=()), "has no options"),
        ("r1_searcher_stage2", CHOICE, "is multiple choice"),
    ],
)
def test_a_question_that_lacks_a_field_the_reward_reads_is_an_error(reward, question, message):
    with pytest.raises(InputError, match=f"question {question.id} {message}"):
        rewards.check_questions([question], settings_for(reward))
    for settings in (settings_for("search_r1"), settings_for("arena", relevance_reward=False)):
        assert rewards.check_questions([UNCITED], settings) == [UNCITED]
    # When to Search grades a choice by its letter.
    assert rewards.check_questions([CHOICE], settings_for("when_to_search_stage1"))


# -------------------------------------------------------------------------- hacks that earn nothing

NO_SEARCH = [
    "<|begin_of_query|> <|begin_of_query|> ",
    "<|begin_of_query|> Ana Bell <|end_of_query|> ",  # nobody ran it
    "<|begin_of_query|> <|end_of_query|>\n\n$faked",
    "$faked",
    "Ana Bell <|end_of_query|>\n\n$faked",
]


@pytest.mark.parametrize("hack", NO_SEARCH)
def test_text_that_imitates_a_search_earns_no_search_reward(hack):
    for reward in ("ur2_stage1", "ur2_choice", "r1_searcher_stage1"):
        assert terms(reward, f"{hack} so</think>$right")["retrieval"] == 0.0
    assert sum(terms("ur2_stage1", f"{hack}$right").values()) <= -1  # as without the hack, or less
    for ours, theirs in zip(PROTOCOLS["ur2"].tags, PROTOCOLS["r_search"].tags, strict=False):
        hack = hack.replace(ours, theirs)
    # Evidence without a search earns nothing, and no penalty of a wrong answer is softened.
    read = {"reader_answer": "Norland"}
    assert terms("r_search", f"{hack}$evidence$right", QA, (), read) == terms("r_search", "$right")
    assert terms("when_to_search_stage1", f"$think {hack}$wrong")["answer"] == -1.0


def test_a_query_over_twenty_words_is_run_but_is_not_a_valid_search():
    text = "<|begin_of_query|> {} <|end_of_query|>$faked$right"
    for query, retrieval in ((LONG, 0.0), (LONG.removesuffix(" word"), 3.0)):  # 21 and 20 words
        assert terms("ur2_stage1", text.format(query))["retrieval"] == retrieval
    # Under When to Search it costs as much as any search.
    long = f"{searching(LONG)}$right"
    assert terms("when_to_search_stage2", long)["answer"] == pytest.approx(0.7)


@pytest.mark.parametrize("reward", ["ur2_stage2", "r1_searcher_stage2", "r_search", "search_r1"])
def test_an_answer_that_only_the_environment_gives_earns_nothing(reward):
    told = f"{BORN} \\boxed{{Norland}} <answer> Norland </answer> $evidence"
    text = f"{search(PROTOCOLS[protocol_of(reward)], 'Ana', told)} I do not know. </think>"
    result = terms(reward, text, outside={"reader_answer": "Norland"})
    assert result["answer"] == result.get("evidence", 0.0) == 0.0
    noticed = written("I do not know.", protocol_of(reward))
    noticed.segments.append(Segment("notice", "\\boxed{Norland} <answer> Norland </answer>"))
    assert reward_terms(reward, noticed, {"step": 0})["answer"] == 0.0


@pytest.mark.parametrize(
    "reward, text",
    [
        ("ur2_stage1", "$right"),
        ("r1_searcher_stage2", "so</think>$right"),
        ("r_search", "$evidence$right"),
        ("when_to_search_stage2", "$reflect$right"),
    ],
)
def test_the_text_of_a_document_costs_nothing(reward, text):
    document = "北 \ufffd\nassistant\nuser <tool_call> <|im_start|> <think></think> \\boxed{Sudria}"
    document = f"{document} $evidence <answer> Sudria </answer>"
    begin = "$think" * reward.startswith("when")
    told = search(PROTOCOLS[protocol_of(reward)], document=document)
    assert terms(reward, begin + told + text) == terms(reward, f"{begin}$search {text}")


@pytest.mark.parametrize("joint", ["/", "_", " or ", "—"])
def test_a_list_of_guesses_is_too_long_however_it_is_joined(joint):
    listed = joint.join([*(f"guess{i}" for i in range(500)), "Norland", ""])
    assert ur2_violations(written(f"\\boxed{{{listed}}}")) == ["long_answer"]
    guesses = written(f"so</think><answer>{listed}</answer>", "r1_searcher")
    assert "long_answer" in rewards.r1_searcher_format(guesses)
    # It earns at most what a plain wrong answer earns, −1 by cover-EM in the released stage 1.
    assert rewards.r1_searcher_stage1(guesses, "cem")["answer"] == -1


# -------------------------------------------------------------------------------- the released code

# row:our reward | why it differs from the released code's
ON_PURPOSE = """
4:-1 5:4 | the code ends stage 1's search reward and missing-retrieval fault with step 15
8:-2 | a query over 20 words is not a valid search: −2 for two, and no retrieval reward
9:4 | the code looks for CJK in retrieved text too
12:2 | two answers on one line are two answers; the code's pattern sees one
13:-1 | a prompt without retrieval pays the format only, and a query there breaks it
14:-1 | eq. 1 takes 1 for each violation, whatever the prompt; the code pays 0
31:3 | the code does not normalise a curly apostrophe, its own evaluation does
32:3 | the code's pattern reads to the last brace of the line; we balance braces
38:0 | UR² answers in a box; the code also reads the other paper's tag
35:1 | eq. 2 pays correct answers; the code pays 1 for a partly correct one
40:1 41:0 42:1 | D.2 ends in `the correct answer is: X`; the code asks for no colon
44:0.5 | "both of them" is not a letter; the code reads the b
46:0.5 | a box is D.2's answer to mathematics and open questions; the code reads it here too
47:3.5 | "user said" is not a header of a chat turn; the code forbids lines that begin so
49:2 | eq. 2 with a query on a prompt without retrieval: no format, no bonus
57:1 | no search was run; the code pays a half for the document tags or for the format
58:2 71:1 84:1 | the code wants a passage in each block, which is the environment's to write
59:1.5 | garbled text breaks the format in every stage; the code tests it in stage 2
62:-0.5 75:-0.6923 | an answer over 10 words breaks the format, and a list covers nothing
87:1 | the word "assistant" is in a document, not in the model's text
96:13 | a "<" that opens no section is allowed; the code's pattern refuses any
97:13 98:13 | white space around the sections is not a fault; the code's pattern refuses it
99:2 | text after the answer breaks the format: 0 + 1 + 1; the code matches a beginning
103:2 | [true, 4] is not a list of numbers; the code takes true for 1
109:1.4 | without a search 0.2 + 0.2; the code asks for no evidence then and finds some
114:1.4 | faked documents are not a search; the code looks for the tag
115:1.4 | the box is there, though "and" is wrong; the code takes "and" for its prompt's
117:1.4 | without a reader's answer F1 is 0: 1 + 0 + 0.4; the code crashes
"""
FALLBACKS = {6: 1, 7: 2, 26: 1, 27: 2}  # row: number of searches, all answered by the fallback
TASKS = {"rag": "qa", "math": "math", "history": "choice", "medicine": "choice"}
GRADES = {"Judgment: Correct": lambda *_: 2, "Judgment: Partially correct": lambda *_: 1}
VARIANTS = {"llama": "llama_8b", "qwen_3b": "qwen_3b"}
RELEASED = {  # (paper, stage of the released code) -> our reward
    ("ur2", 1): "ur2_stage1",
    ("ur2", 2): "ur2_stage2",
    ("ur2", "mcq"): "ur2_choice",
    ("r1_searcher", "llama1"): "r1_searcher_stage1_code",
    ("r1_searcher", "llama2"): "r1_searcher_stage2_llama",
    ("r1_searcher", "qwen_zero"): "r1_searcher_stage2",
    ("r_search", None): "r_search",
    ("arena", None): "arena_code",
}


def golden(index, row):
    """Returns our reward of a transcript, with the settings of the released code."""
    settings = row["settings"]
    reward = RELEASED[row["system"], settings.get("stage")]
    question = Question(
        str(index),
        settings.get("question", "?"),
        [row["gold"]] if isinstance(row["gold"], str) else row["gold"],
        TASKS.get(settings.get("kind"), "qa"),
        supporting=tuple(settings.get("supporting", ())),
        may_search=settings.get("retrieve_prompt", True),
    )
    fallbacks = range(FALLBACKS.get(index, 0))
    trajectory = trajectory_from_text(question, row["response"], protocol_of(reward), fallbacks)
    outside = {
        "step": settings.get("step", 0),
        "reader_answer": settings.get("cross_model_answer", ""),
        "grade": GRADES.get(settings.get("judge_says")),
    }
    variant = {"variant": VARIANTS[settings["variant"]]} if "variant" in settings else {}
    return reward_terms(reward, trajectory, outside, **variant)


def test_every_golden_row_is_equal_or_differs_for_a_named_reason():
    rows = json.loads(shared("golden/released_code_rewards.json"))
    assert len(rows) == 119
    on_purpose = dict(re.findall(r"(\d+):(\S+)", ON_PURPOSE))
    for index, row in enumerate(rows):
        ours = sum(golden(index, row).values())
        released = row["released_code_reward"]  # a string if the code raises an error
        expected = float(on_purpose.get(str(index), released))
        assert ours == pytest.approx(expected, abs=1e-4), index
        differs = isinstance(released, str) or abs(ours - released) > 1e-3
        assert differs == (str(index) in on_purpose), f"row {index}: is it in the table?"


def test_a_fallback_is_paid_as_a_valid_search_unless_the_variant_calls_it_invalid():
    """UR² eq. 1, C.6: two searches of which one is a fallback: 1 + 4 − 0.5, else 1 + 3 − 0.5."""
    row = example("ur2")
    for invalid, stage1, choice in ((False, 4.0, 1.0), (True, 3.0, 0.5)):
        assert rewards.ur2_stage1(row, fallback_is_invalid=invalid)["retrieval"] == stage1
        assert rewards.ur2_choice(row, 0, fallback_is_invalid=invalid)["retrieval"] == choice


@pytest.mark.parametrize("answer, gold", [("yes it is", "yes"), ("no", "no it is not")])
def test_ur2_pays_nothing_for_a_text_around_yes_or_no(answer, gold):
    assert terms("ur2_stage2", f"\\boxed{{{answer}}}", asking(gold))["answer"] == 0
