"""Tests rewards.py: every formula with numbers worked out by hand, the orderings that the papers
rely on, and hacks that must earn nothing.
"""

import dataclasses
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
from test_metrics import SHARED, shared

import rewards
import trajectory_metrics
from data import Document, Question
from errors import InputError
from metrics import f1_score
from papers import PROTOCOLS
from prompts import Protocol, tag_pair
from rewards import (
    REWARDS,
    OtherModels,
    arena,
    check_reward,
    compute_rewards,
    count_valid_searches,
    example,
    needs,
    r1_searcher_stage1,
    r1_searcher_stage2,
    r_search,
    reward_terms,
    search_r1,
    tfidf_embedder,
    ur2_choice,
    ur2_stage1,
    ur2_stage2,
    ur2_violations,
    when_to_search_stage1,
    when_to_search_stage2,
    when_to_search_unified,
)
from settings import Settings
from trajectory import RejectedQuery, Search, Segment, trajectory_from_text

QA = Question("1", "In which country was Ana Bell born?", ["Norland"])
MATH = Question("2", "Half of one?", ["0.5"], task="math")
CHOICE = Question("3", "Which tree?", ["B"], task="choice", options=("elm", "oak", "ash"))
LONG = " ".join(["word"] * 21)


def trajectory_of(text, question=QA, protocol="r1_searcher"):
    return trajectory_from_text(question, text, protocol)


r1 = trajectory_of
rs = partial(trajectory_of, protocol="r_search")
when = partial(trajectory_of, protocol="when_to_search")


def ur2(text, question=QA, fallbacks=(), may_search=True):
    question = dataclasses.replace(question, may_search=may_search)
    return trajectory_from_text(question, text, "ur2", fallbacks)


def ar(text, supporting=(1, 4), gold="June 16, 1874", **fields):
    question = Question("1", "When?", [gold], supporting=supporting, **fields)
    protocol = "arena_summary" if question.task == "summary" else "arena"
    return trajectory_from_text(question, text, protocol)


def search(query="Ana Bell birthplace", document="Ana Bell was born in Kelmouth, Norland."):
    query = f"<|begin_of_query|> {query} <|end_of_query|>\n\n"
    return f"{query}<|begin_of_documents|>\n{document}\n<|end_of_documents|>\n\n"


def rs_search(query="Ana Bell birthplace", document="Ana Bell was born in Kelmouth, Norland."):
    return f"<search> {query} </search>\n\n<observation>\n{document}\n</observation>\n\n"


def when_search(
    query="Ana Bell birthplace", document="Ana Bell was born in Norland.", reflect=True
):
    reflection = "<reflect> It helps. </reflect>\n" if reflect else ""
    return (
        f"<search> {query} </search>\n\n<information>\n{document}\n</information>\n\n{reflection}"
    )


def sections(ids="[1, 4]", analysis="Reference 4 says so.", answer="June 16, 1874"):
    cited = f"<relevance>{ids}</relevance>\n<analysis>{analysis}</analysis>"
    return f"{cited}\n<answer>{answer}</answer>"


def value(reward_terms):
    return sum(reward_terms.values())


def total(reward_terms):
    return pytest.approx(value(reward_terms))


BOX = "So \\boxed{Norland}"
ANSWER = "<answer> Norland </answer>"
WRONG = "<answer> Sudria </answer>"
CLOSE = f"so</think>\n\n{ANSWER}"
WRONG_CLOSE = f"so</think>\n\n{WRONG}"
EVIDENCE = "<original_evidence> Ana Bell was born in Kelmouth, Norland. </original_evidence>"
THINK = "<think> Where was she born? </think>\n"
REFLECT = "<reflect> I know it. </reflect>\n"
# No two of these queries have a word in common.
QUERIES = ["Ana Bell birthplace", "Kelmouth mayor", "Norland seat", "Sudria king"]
FAKED = "<|begin_of_documents|>\nAna Bell was born in Norland.\n<|end_of_documents|>\n"


# -------------------------------------------------------------------------------------- UR² by hand


@pytest.mark.parametrize(
    ("variant", "by_searches"),
    [("qwen_7b", (-1, 4, 5, 5)), ("qwen_3b", (-1, 6, 8, 8)), ("llama_8b", (-1, 4, 4, 4))],
)
def test_ur2_stage1_pays_format_and_searches_whatever_the_answer(variant, by_searches):
    # n = 0: format −1, since the retrieval is missing. n = 1: format 1 + retrieval 3 (3B: 5;
    # Llama: 3). n >= 2: 1 + 4 (3B: 7; Llama: 3).
    for n, reward in enumerate(by_searches):
        for answer in (BOX, "So \\boxed{Sudria}"):
            assert reward == total(ur2_stage1(ur2(search() * n + answer), variant)), n


def test_ur2_stage1_counts_each_violation():
    # Eq. 1 gives −1 per violation, also for several of one kind. Here two answers are too many,
    # two query tags have no partner, the model wrote two blocks of documents (one is not closed),
    # and one token is illegal: −7. The single search earns 3.
    faulty = "<|begin_of_query|> a <|begin_of_query|> b" + FAKED + "<|begin_of_documents|> c"
    trajectory = ur2(search() + faulty + BOX * 3 + "<|im_start|>")
    kinds = [*["several_answers"] * 2, *["unpaired_query_tags"] * 2, *["written_documents"] * 2]
    assert ur2_violations(trajectory) == [*kinds, "illegal <|im_start|>"]
    assert ur2_stage1(trajectory) == {"format": -7.0, "retrieval": 3.0, "fallback": 0.0}


def test_a_prompt_without_retrieval_pays_the_format_only():
    # Eq. 1 gives −1 per violation, and not searching is not a violation here: 1. Each of two
    # queries is a violation: −2. A missing answer and an illegal token are two violations: −2.
    for text, reward in ((BOX, 1), (search() * 2 + BOX, -2), ("no box <|im_start|>", -2)):
        assert reward == total(ur2_stage1(ur2(text, may_search=False)))
    # Eq. 2: 2 for the answer; the query costs the 1 for the format.
    assert total(ur2_stage2(ur2(search() + BOX, may_search=False))) == 2
    assert ur2_choice(ur2(search() * 2 + BOX, may_search=False), 0)["retrieval"] == 0


def test_each_rejected_query_on_a_question_without_search_is_a_violation():
    trajectory = ur2(BOX, may_search=False)
    queries = ("Ana Bell birthplace", LONG)
    trajectory.rejected_queries = [RejectedQuery("direct", query) for query in queries]
    assert ur2_violations(trajectory) == ["long_query"] + ["searched_directly"] * 2
    assert total(ur2_stage1(trajectory)) == -3 and total(ur2_stage2(trajectory)) == 2
    # A malformed query is not counted; if it leaves tags without a partner, those are.
    trajectory.rejected_queries = [RejectedQuery("malformed", "")]
    assert ur2_violations(trajectory) == []


@pytest.mark.parametrize("junk", [".", "…", "- -"])
def test_a_query_without_a_word_earns_nothing_and_is_a_violation(junk):
    # Two such queries are two violations: −2. They must not earn 1 + 4, as two searches do.
    trajectory = ur2(BOX)
    trajectory.searches += [Search(junk, [], "None")] * 2
    assert ur2_violations(trajectory, True) == ["wordless_query"] * 2
    assert total(ur2_stage1(trajectory)) == -2 and count_valid_searches(trajectory) == 0
    assert total(ur2_choice(trajectory, 0)) == 2  # 2 for the right answer, no format, no bonus
    assert r1_searcher_stage1(r1(search(junk) + CLOSE))["retrieval"] == 0


def test_ur2_stage2_pays_twice_the_score_of_each_task():
    assert total(ur2_stage2(ur2(BOX))) == 3  # 2 · 1 + 1
    # "Kelmouth, Norland" for "Norland": P = 1/2, R = 1, F1 = 2/3; the reward is 4/3 + 1.
    partly = ur2("\\boxed{Kelmouth, Norland}")
    assert total(ur2_stage2(partly)) == 7 / 3
    assert (
        total(ur2_stage2(partly, answer_metric="em")) == 1
        and total(ur2_stage2(partly, answer_metric="cem")) == 3
    )
    assert total(ur2_stage2(ur2("\\boxed{\\frac{1}{2}}", MATH))) == 3
    assert total(ur2_stage2(ur2("The correct answer is: B", CHOICE))) == 3


def test_a_math_judge_grades_answers_that_are_not_plainly_equal():
    graded = []

    def judge(question, answer):
        graded.append(answer)
        return 1

    # Eq. 2 has only right and wrong, so a grade of 1 (partly right) leaves the 1 for the format.
    # With partly=1.0, as in the released code, it earns 1 more.
    approximate = ur2("\\boxed{about a half}", MATH)
    assert total(ur2_stage2(approximate, grade=judge)) == 1
    assert total(ur2_stage2(approximate, grade=judge, partly=1.0)) == 2
    assert total(ur2_stage2(approximate, grade=lambda question, answer: 2)) == 3
    # The judge is not asked if the answer is equal, if there is none, or if it is not math.
    assert total(ur2_stage2(ur2("\\boxed{1/2}", MATH), grade=judge)) == 3
    assert total(ur2_stage2(ur2("no box", MATH), grade=judge)) == 0
    assert total(ur2_stage2(ur2("\\boxed{Sudria}"), grade=judge)) == 1
    assert graded == ["about a half"] * 2


def test_each_fallback_costs_half_and_is_counted_by_its_flag_not_by_its_text():
    trajectory = ur2(search() * 3 + BOX, fallbacks=[0, 2])
    for reward in ("ur2_stage1", "ur2_stage2", "ur2_choice", "ur2_weak"):
        assert reward_terms(reward, trajectory, {"step": 0})["fallback"] == -1.0
    quoted = search(document=PROTOCOLS["ur2"].fallback_notice) + PROTOCOLS["ur2"].fallback_notice
    assert ur2_stage1(ur2(quoted + BOX))["fallback"] == 0  # the text alone costs nothing


def test_the_search_bonus_for_choice_ends_after_the_first_steps():
    def choice(n, step, *variant):
        return ur2_choice(
            ur2(search() * n + "The correct answer is: B", CHOICE), step, None, *variant
        )

    assert [choice(n, 9)["retrieval"] for n in range(4)] == [0.0, 0.5, 1.0, 1.0]
    for variant, steps in {"qwen_7b": 10, "qwen_3b": 15, "llama_8b": 10}.items():
        assert total(choice(2, steps - 1, variant)) == 4  # 2 + 1, and a bonus of 1
        assert total(choice(2, steps, variant)) == 3


def test_the_3b_model_has_format_minus_one_for_a_choice_without_a_search():
    # Appendix C.7, "non-accumulative": the format term is exactly −1, for a right answer (2 − 1) as
    # for a text with three faults (0 − 1).
    right = "The correct answer is: B"
    worst = "北 <|im_start|> I do not know"
    for text, reward in (
        (right, 1),
        (worst, -1),
        (search() + right, 3.5),
        (search() + worst, 0.5),
        (search(LONG) + right, 2),  # it is a search, but not a valid one
        (search(".") + right, 1),  # a query without a word is not a search
    ):
        assert total(ur2_choice(ur2(text, CHOICE), 14, variant="qwen_3b")) == reward
    # The format term of eq. 2 holds from step 15 on, for other models, and on a prompt without
    # retrieval.
    assert total(ur2_choice(ur2(right, CHOICE), 15, variant="qwen_3b")) == 3
    assert total(ur2_choice(ur2(right, CHOICE), 0, variant="qwen_7b")) == 3
    assert total(ur2_choice(ur2(right, CHOICE, may_search=False), 0, variant="qwen_3b")) == 3


def test_the_weak_first_stage_scores_any_task():
    # One search earns 0.5. The judge grades math; open questions get F1, which is 2/3 for
    # "Kelmouth, Norland".
    judged = {"step": 0, "grade": lambda question, answer: 2.0}
    half = reward_terms("ur2_weak", ur2(search() + "\\boxed{about a half}", MATH), judged)
    assert half == {"answer": 2.0, "format": 1.0, "fallback": 0.0, "retrieval": 0.5}
    partly = ur2(search() * 2 + "\\boxed{Kelmouth, Norland}")
    assert total(ur2_choice(partly, 0)) == 4 / 3 + 1 + 1
    assert total(ur2_choice(partly, 10)) == 4 / 3 + 1


LOOSE = {"format_check": "loose"}


@pytest.mark.parametrize(
    ("text", "question", "accepted"),
    [
        ("So it is $\\boxed{Norland}$.<|im_end|>", QA, True),
        ("\\boxed{Norland}\n<eos>", QA, True),
        ("The correct answer is: B", CHOICE, True),
        ("\\boxed{Norland} it is", QA, False),
        # The strict check finds many faults in this text.
        (
            FAKED + "北 <tool_call> \\boxed{Sudria} <|begin_of_query|> " + search(LONG) + BOX,
            QA,
            True,
        ),
    ],
)
def test_the_loose_format_check_looks_at_the_end_only(text, question, accepted):
    trajectory = ur2(text, question)
    assert ur2_violations(trajectory, **LOOSE) == ["no_answer_at_end"] * (not accepted)
    # The loose check does not require a search either.
    assert ur2_stage1(trajectory, **LOOSE)["format"] == (1 if accepted else -1)
    for reward in ("ur2_stage2", "ur2_choice"):
        assert reward_terms(reward, trajectory, {"step": 0}, **LOOSE)["format"] == accepted


POLYNOMIAL = "+".join(f"{n}x^{n}" for n in range(12, 0, -1))  # 12x^12+11x^11+...+1x^1
TWELVE = Question("1", "Which words?", ["word " * 12])
IN_CHINESE = Question("1", "北?", ["x"])
SHOWS_CHINESE = Question("1", "?", ["x"], references=(Document("1", "北", ""),))


@pytest.mark.parametrize(
    ("text", "question", "faults"),
    [
        (BOX, QA, []),
        ("no box", QA, ["no_answer"]),
        ("\\boxed{}", QA, ["no_answer"]),
        ("<|begin_of_query|> where " + BOX, QA, ["unpaired_query_tags"]),
        ("<|begin_of_query|> " * 2 + "<|end_of_query|> " + BOX, QA, ["unpaired_query_tags"]),
        ("x <|end_of_query|> " * 2 + BOX, QA, ["unpaired_query_tags"] * 2),
        (FAKED + FAKED + BOX, QA, ["written_documents"] * 2),
        ("\\boxed{x} \\boxed{a b c d e f g h i j k}", QA, ["several_answers", "long_answer"]),
        (search(LONG) + search(LONG) + BOX, QA, ["long_query", "long_query"]),
        (search() * 4 + BOX, QA, []),
        (search() * 6 + BOX, QA, ["too_many_queries"] * 2),
        ("x\nuser: \nagain\nassistant" + "\n" + BOX, QA, ["illegal assistant", "illegal user"]),
        ("x\nuser accounts\nassistant: he helps " + BOX, QA, []),  # more follows the word
        # The environment wrote the newline before "assistant".
        (search() + "assistant\n" + BOX, QA, ["illegal assistant"]),
        ("<tool_call>" * 100 + BOX + "<|im_end|>", QA, ["illegal <tool_call>"]),  # once per kind
        ("北 " + BOX, QA, ["garbled_text"]),
        ("\ufffd " + BOX, QA, ["garbled_text"]),
        ("<information> Norland " + BOX, QA, []),  # a tag of another protocol
        ("π r², x ∈ ℝ, ℵ₀ < 2^ℵ₀, Māori, naïve " + BOX, QA, []),
        (search(document="北 is north") + "北 " + BOX, QA, []),
        ("北 \\boxed{x}", IN_CHINESE, []),
        ("北 \\boxed{x}", SHOWS_CHINESE, []),
        ("север \\boxed{x}", IN_CHINESE, ["garbled_text"]),
        ("\\boxed{a b c d e f g h i j}", QA, []),  # 10 words
        ("\\boxed{" + "word " * 12 + "}", TWELVE, []),  # as many words as the gold
        ("\\boxed{" + "word " * 13 + "}", TWELVE, ["long_answer"]),
        ("\\boxed{" + POLYNOMIAL + "}", MATH, []),
        ("\\boxed{" + POLYNOMIAL.replace("+", " + ") + "}", MATH, ["long_answer"]),
        ("\\boxed{" + "+".join(map(str, range(1900, 1911))) + "}", QA, ["long_answer"]),  # guesses
        ("\\boxed{Norland <|begin_of_query|> x <|end_of_query|>}", QA, ["tag_in_answer"]),
        ("The correct answer is: (B).<eos><|im_end|>", CHOICE, []),
        ("The correct answer is not A, but the correct answer is: **B**", CHOICE, []),
        ("The correct answer is: B, as oaks are hard", CHOICE, ["not_a_letter"]),
        ("The correct answer is: both of them", CHOICE, ["no_answer"]),
    ],
)
def test_violations_of_ur2s_format(text, question, faults):
    assert ur2_violations(ur2(text, question)) == faults


def test_queries_rejected_beyond_the_limit_count_as_too_many_queries():
    trajectory = ur2(search() * 4 + BOX)
    trajectory.rejected_queries.append(RejectedQuery("limit", "one more"))
    assert ur2_violations(trajectory) == ["too_many_queries"]
    assert count_valid_searches(trajectory) == 4


# ------------------------------------------------------------------------------ R1-Searcher by hand


def test_r1_searcher_stage1_is_a_half_for_searching_and_a_half_for_the_format():
    assert total(r1_searcher_stage1(r1(search() + WRONG_CLOSE))) == 1.0
    assert total(r1_searcher_stage1(r1(CLOSE))) == 0.5
    assert total(r1_searcher_stage1(r1(search() + "Norland"))) == 0.5


def test_r1_searcher_stage2_is_f1_minus_two_for_a_fault():
    # F1 of "Kelmouth, Norland" is 2/3. A second </think> is a fault: 2/3 − 2 = −4/3.
    partly = CLOSE.replace("Norland", "Kelmouth, Norland")
    assert total(r1_searcher_stage2(r1(partly))) == 2 / 3
    assert total(r1_searcher_stage2(r1("</think>" + partly))) == -4 / 3
    assert total(r1_searcher_stage2(r1("so</think> Norland"))) == -2.0  # no answer tags: F1 = 0


def test_an_r1_searcher_answer_may_be_as_long_as_the_gold_but_not_longer():
    words = "one two three four five six seven eight nine ten eleven twelve".split()
    gold = Question("1", "?", [" ".join(words[:11])])
    exact, longer = (r1(CLOSE.replace("Norland", " ".join(words[:n])), gold) for n in (11, 12))
    assert total(r1_searcher_stage2(exact)) == 1.0
    assert total(r1_searcher_stage2(longer)) == 22 / 23 - 2  # F1 = 2 · 11 / (12 + 11)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (CLOSE, []),
        (search() + CLOSE + "<|im_end|>", []),
        ("so <answer> Norland </answer>", ["thinking_not_closed_once"]),
        ("<think>" + CLOSE, ["thinking_not_closed_once"]),
        ("<answer> Norland </answer> so</think>", ["answer_in_thinking"]),
        ("so</think> Norland", ["no_answer"]),
        (CLOSE + ANSWER, ["several_answers"]),
        ("so</think> It is <answer> Norland </answer>", ["text_beside_answer"]),
        (CLOSE + " I am sure.", ["text_beside_answer"]),
        (f"so</think><answer>{LONG}</answer>", ["long_answer"]),
        (
            "so</think><answer><|begin_of_documents|></answer>",
            ["written_documents", "tag_in_answer"],
        ),
        ("user\nℵ₀" + CLOSE, []),
        ("北" + CLOSE, ["garbled_text"]),
        ("<|begin_of_query|> where" + CLOSE, ["unpaired_query_tags"]),
    ],
)
def test_r1_searcher_names_each_format_fault(text, faults):
    assert rewards.r1_searcher_format(r1(text)) == faults


# --------------------------------------------------------------------------------- R-Search by hand


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (ANSWER, 0.4),  # no search: γ_e is paid anyway, and γ_α for the answer
        ("Norland", 0.2),
        (rs_search() + "Norland", 0.0),
        # An empty box does not count.
        (rs_search() + "<original_evidence> </original_evidence>" + ANSWER, 0.2),
        # There are two answer boxes, though one is empty.
        (rs_search() + EVIDENCE + "<answer> </answer>" + ANSWER, 0.2),
        (rs_search() + EVIDENCE + ANSWER, 0.4),
        # A pair of tags and a stray tag are not exactly one box.
        ("<answer> so " + ANSWER, 0.2),
        (rs_search() + "</original_evidence>" + EVIDENCE + ANSWER, 0.2),
    ],
)
def test_r_searchs_format_by_hand(text, reward):
    assert r_search(rs(text))["format"] == pytest.approx(reward)
    assert rewards.r_search_format(rs(text)) == (reward == 0.4)  # 0.4 is the whole r_f


def test_r_search_without_evidence_pays_only_the_answer_and_the_answer_box():
    """Without the evidence reward and the evidence box (section 5.2) the reward is r_α + γ_α · A,
    whether or not the model searched.
    """
    plain = partial(trajectory_of, protocol="r_search_plain")
    partly = ANSWER.replace("Norland", "Kelmouth, Norland")  # F1 = 2/3
    for text in (rs_search() + partly, partly):
        result = r_search(plain(text), "Norland", evidence_reward=False)
        assert result == pytest.approx({"answer": 2 / 3, "evidence": 0.0, "format": 0.2})
        assert rewards.r_search_format(plain(text))
    assert total(r_search(plain("Norland"), evidence_reward=False)) == 0.0  # γ_e is not paid
    # If the protocol keeps the evidence box and only the reader is off, γ_e · E is still paid.
    with_box = r_search(rs(rs_search() + EVIDENCE + ANSWER), evidence_reward=False)
    assert with_box == pytest.approx({"answer": 1.0, "evidence": 0.0, "format": 0.4})


def test_r_searchs_equations_with_numbers():
    # Eq. 3, "Ana Maria Bell" for "Ana Bell": 2 · 2 / (3 + 2) = 0.8. Eq. 4, the reader answers
    # "Bell": 2 · 1 / (1 + 2) = 2/3. Eq. 5, after a search with E = 1 and A = 1: 0.4. Eq. 6 adds
    # these up.
    who = Question("1", "Who?", ["Ana Bell"])
    answer = "<answer> Ana Maria Bell </answer>"
    result = r_search(rs(rs_search() + EVIDENCE + answer, who), "Bell")
    assert result == pytest.approx({"answer": 0.8, "evidence": 2 / 3, "format": 0.4})
    # The answer is wrong and so is the reader's: only the format is paid.
    assert total(r_search(rs(rs_search() + EVIDENCE + WRONG), "y")) == 0.4
    # The last of two evidence boxes is read, but E = 0: answer 1 + evidence 1 + format 0.2.
    assert total(r_search(rs(rs_search() + EVIDENCE * 2 + ANSWER), "Norland")) == 2.2
    # Eq. 3 has no rule for yes and no: "yes they are" for "yes" is 2 · 1 / (3 + 1).
    yes = rs("<answer> yes they are </answer>", Question("1", "?", ["yes"]))
    assert r_search(yes)["answer"] == 0.5


def test_r1_searchers_equations_with_numbers():
    # Eq. 3 and 4 have no rule for yes and no: IN = 1, PN = 3, RN = 1 give 2 · 1 / (3 + 1) = 0.5.
    yes = Question("1", "?", ["yes"])
    text = CLOSE.replace("Norland", "yes they are")
    assert total(r1_searcher_stage2(r1(text, yes))) == 0.5
    assert total(r1_searcher_stage2(r1(text + " Sure.", yes))) == 0.5 - 2
    # Eq. 5: the answer fails exact match (−1) and passes cover-EM (+1).
    assert total(r1_searcher_stage2(r1(text, yes), "em")) == -1
    assert total(r1_searcher_stage2(r1(text, yes), "cem")) == 1
    # "true" and "yes" have no word in common: IN = 0. The released code treats them as equal, as
    # UR²'s does (row 30 of the released rewards).
    assert total(r1_searcher_stage2(r1(CLOSE.replace("Norland", "True"), yes))) == 0
    assert total(ur2_stage2(ur2("\\boxed{True}", yes))) == 3


def test_r1_searcher_counts_a_search_with_any_number_of_words():
    # Eq. 1 asks for n ≥ 1 retrievals, and one with 21 words counts; UR² (C.7, D.2) limits queries
    # to 20 words.
    assert r1_searcher_stage1(r1(search(LONG) + CLOSE)) == {"retrieval": 0.5, "format": 0.5}


def test_search_r1_pays_exact_match_and_nothing_else():
    for answer, reward in (
        ("Nor-land.", 1),  # punctuation is deleted
        ("Kelmouth, Norland", 0),
        ("Norland </answer><answer> Sudria", 0),  # the last of two answers counts
    ):
        assert search_r1(example("search_r1", answer)) == {"answer": reward}
    assert search_r1(example("search_r1", searches=0)) == {"answer": 1}


def test_r_search_and_when_to_search_remove_punctuation_and_arena_all_but_underscores():
    # "Spider-Man" becomes "spiderman" if the hyphen is removed, "spider man" if it becomes a blank.
    spider = Question("1", "?", ["Spider-Man"])
    answer = "<answer> spiderman </answer>"
    result = r_search(rs(rs_search() + EVIDENCE + answer, spider), "SpiderMan")
    assert (result["answer"], result["evidence"]) == (1.0, 1.0)
    assert when_to_search_stage1(when(THINK + answer, spider))["answer"] == 1.0
    for answer, paper, code in (("spider man", 0, 1), ("spiderman", 1, 0), ("Spider_Man", 0, 1)):
        trajectory = ar(sections(answer=answer), gold="Spider-Man")
        result = [REWARDS[name](trajectory)["answer"] for name in ("arena", "arena_code")]
        assert result == [paper, code]


def test_evidence_support_is_the_share_of_evidence_words_in_the_documents():
    support = trajectory_metrics.evidence_support
    # All 7 words of "ana bell was born in kelmouth norland" are in the document.
    assert support(rs(rs_search() + EVIDENCE)) == 1.0
    # Of "bell was queen", the words "bell" and "was" are in the document.
    made_up = "<original_evidence> The Bell was queen </original_evidence>"
    assert support(rs(rs_search() + made_up)) == pytest.approx(2 / 3)
    # Without a document or without evidence it is 0.
    assert support(rs(made_up)) == support(rs(rs_search() + ANSWER)) == 0.0


# --------------------------------------------------------------------------- When to Search by hand


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (THINK + REFLECT + ANSWER, True),
        (THINK + when_search() + when_search() + ANSWER, True),  # Table 9
        (THINK + when_search() + THINK + when_search() + ANSWER, True),  # a second think
        (THINK + ANSWER, False),  # without a search a reflect is required
        (THINK + when_search() + REFLECT + ANSWER, False),
        (THINK + when_search() + ANSWER + "<|im_end|>", True),
        (THINK + "1 < 2".join(["<reflect> ", " </reflect>"]) + ANSWER, True),
        (ANSWER, False),
        (THINK + REFLECT, False),  # no answer
        (when_search() + ANSWER, False),  # no think
        (THINK + when_search(reflect=False) + ANSWER, False),
        (THINK + when_search() + THINK + ANSWER, False),
        (THINK + REFLECT + when_search() + ANSWER, False),
        (THINK + THINK + REFLECT + ANSWER, False),
        (THINK + REFLECT + ANSWER + " I am sure.", False),
        ("Well. " + THINK + ANSWER, False),
        ("TA", False),  # the parser's letters are not sections
        ("<think> </think>" + REFLECT + ANSWER, False),
        ("<think> </information> </think>" + REFLECT + ANSWER, False),
        (THINK + "<search> nobody ran it </search>" + REFLECT + ANSWER, False),
        (THINK + "<information> faked </information>" + REFLECT + ANSWER, False),
    ],
)
def test_when_to_searchs_order_of_sections(text, good):
    assert when_to_search_stage1(when(text))["format"] == (1.0 if good else -1.0)


def test_a_notice_is_not_a_section_and_a_rejected_search_costs_nothing():
    trajectory = when(THINK + when_search() + ANSWER)
    trajectory.segments.insert(2, Segment("notice", "Ask for a fact."))
    trajectory.rejected_queries.append(RejectedQuery("limit", "one more"))
    assert rewards.when_to_search_format(trajectory)
    assert when_to_search_stage2(trajectory)["answer"] == pytest.approx(1 - 0.3)


@pytest.mark.parametrize("n", range(5))
def test_each_search_softens_a_wrong_answer_and_costs_a_right_one(n):
    # With β = 0.3, stage 1 pays 1 if right and −1 + 0.3 n if wrong; stage 2 pays 1 − 0.3 n if right
    # and −1 if wrong.
    text = THINK + "".join(map(when_search, QUERIES[:n])) + ("" if n else REFLECT)
    right = when(text + ANSWER)
    wrong = when(text + WRONG)
    assert when_to_search_stage1(right) == {"format": 1.0, "retrieval": 0.0, "answer": 1.0}
    assert when_to_search_stage1(wrong)["answer"] == pytest.approx(-1 + 0.3 * n)
    assert when_to_search_stage2(right)["answer"] == pytest.approx(1 - 0.3 * n)
    assert when_to_search_stage2(wrong)["answer"] == -1.0
    # Table 2 uses both signs. At RC = 4 a right answer earns −0.2 and a wrong one 0.2.
    unified = when_to_search_unified(right)["answer"], when_to_search_unified(wrong)["answer"]
    assert unified == pytest.approx((1 - 0.3 * n, -1 + 0.3 * n))
    assert (unified[0] < unified[1]) is (n == 4)


@pytest.mark.parametrize("left_out", ["retrieval", "answer"])
@pytest.mark.parametrize("reward", ["stage1", "stage2", "unified"])
def test_one_term_of_eq_12_can_be_left_out(reward, left_out):  # Table 4: w/o r_s, w/o r_a
    settings = settings_for(f"when_to_search_{reward}", left_out=left_out)
    ((terms,), _) = compute_rewards([example("when_to_search")], settings, 0, OtherModels())
    assert terms.keys() == {"format", "retrieval", "answer"} - {left_out}


def test_eq_12_is_the_sum_of_three_terms():
    # Two queries have one of three words in common: cosine 1/3. Stage 1, wrong answer:
    # 1 − 1/3 − 1 + 0.6. Stage 2, right answer: 1 − 1/3 + 1 − 0.6.
    text = THINK + when_search("ana bell birthplace") + when_search("ana town seat")
    assert total(when_to_search_stage1(when(text + WRONG))) == 1 - 1 / 3 - 1 + 0.6
    assert total(when_to_search_stage2(when(text + ANSWER))) == 1 - 1 / 3 + 1 - 0.6
    # With sections out of order only the format term changes, from 1 to −1 (eq. 6).
    assert total(when_to_search_stage2(when(THINK + text + ANSWER))) == -1 - 1 / 3 + 1 - 0.6


@pytest.mark.parametrize("tags", [when, ar])
def test_thinking_that_the_chat_template_opened_is_a_section(tags):
    text = "Where was she born? </think>\n" + (REFLECT + ANSWER if tags is when else sections())
    good = rewards.when_to_search_format if tags is when else rewards.arena_format
    trajectory = tags(text)
    assert not good(trajectory)
    trajectory.opened = "<think>"
    assert good(trajectory)
    again = tags("<think>" + text)
    endless = tags(text.replace("</think>", ""))
    again.opened = endless.opened = "<think>"
    assert not good(endless) and good(again) is (tags is ar)  # ARENA skips the thinking


def retrieval(*queries, embed=None):
    text = THINK + "".join(map(when_search, queries)) + ANSWER
    return when_to_search_stage1(when(text), embed=embed)["retrieval"]


def test_one_search_must_be_concise_and_several_must_differ():
    assert retrieval() == retrieval("Ana Bell birthplace") == 0.0
    assert retrieval("where was Ana Bell born") == -1.0
    assert retrieval("Ana Bell", "Ana Bell") == pytest.approx(-1.0)  # equal queries: cosine 1
    # The pairs have cosines 1, 1/2 and 1/2 (two words each, one in common): mean 2/3.
    assert retrieval("ana bell", "ana bell", "ana town") == pytest.approx(-2 / 3)
    # If there are several searches, none needs to be concise.
    assert retrieval("where was Ana Bell born", "Kelmouth mayor") == 0.0
    # Another embedder gives two vectors with cosine 3/5.
    assert retrieval("a", "b", embed=lambda texts: [[3, 4], [1, 0]]) == pytest.approx(-0.6)


@pytest.mark.parametrize(
    ("query", "concise"),
    [
        ("Ana Bell birthplace", True),
        ("king of the Norland", False),  # 2 of 4 words are stopwords
        ("Norland？", False),
        ("Which country Ana Bell", False),
        ("Will Smith birthplace", True),  # a name
        ("when did Ana Bell's father die", False),  # as in the paper's Table 7
        (" ".join(["word"] * 12), True),
        (" ".join(["word"] * 13), False),
        ("", False),
    ],
)
def test_concise_queries(query, concise):
    assert rewards.is_concise(query) is concise


def test_the_judges_verdict_decides_or_exact_match_if_there_is_none():
    exact = when(THINK + REFLECT + "<answer> The Norland! </answer>")
    assert when_to_search_stage1(exact)["answer"] == 1.0
    assert when_to_search_stage1(exact, correct=False)["answer"] == -1.0
    # A missing answer is wrong, even if the judge's verdict is "correct".
    assert when_to_search_stage1(when(THINK), correct=True)["answer"] == -1.0


@pytest.mark.parametrize(
    ("golds", "hack"),
    [
        (["yes"], "yes no"),
        (["Ana Bell"], "Ana Bell and Bo Cole"),  # it names two people
        (["Norland"], "Sudria/Ostland/Norland"),
    ],
)
def test_answers_that_merely_contain_the_gold_earn_nothing(golds, hack):
    trajectory = when(THINK + f"<answer> {hack} </answer>", Question("1", "?", golds))
    assert when_to_search_stage1(trajectory)["answer"] == -1.0
    assert not rewards.is_right(trajectory, None)  # DAPO filters groups by this


# ----------------------------------------------------------------------------------- TF-IDF by hand

CORPUS = [Document("1", "Ana", "born in town"), Document("2", "Bo", "born in city")]


def similarity(embed, *texts):
    return rewards.mean_similarity(list(texts), embed)


def test_without_a_corpus_every_word_weighs_the_same():
    # The counts are (1, 1, 0) and (1, 0, 1): 1 / (√2 · √2).
    assert similarity(tfidf_embedder(), "ana birthplace", "Ana: employer") == pytest.approx(1 / 2)
    assert similarity(tfidf_embedder(), "ana", "bo") == 0.0
    # The counts are (2, 1) and (1, 1): 3 / (√5 · √2).
    twice = similarity(tfidf_embedder(), "ana ana town", "ana town")
    assert twice == pytest.approx(3 / math.sqrt(10))


def test_a_rare_word_weighs_more_than_a_common_one():
    embed = tfidf_embedder(CORPUS)
    # N = 2: idf(ana) = ln(3/2) + 1 (one document), idf(born) = ln(3/3) + 1 = 1 (both)
    rare = math.log(1.5) + 1
    assert similarity(embed, "ana born", "born") == pytest.approx(1 / math.sqrt(rare**2 + 1))
    # The same through the reward: two rare names and one common word.
    assert retrieval("ana born", "bo born", embed=embed) == pytest.approx(-1 / (1 + rare**2))


def test_invented_words_do_not_make_a_repeated_query_a_new_one():
    embed = tfidf_embedder(CORPUS)
    assert similarity(embed, "ana town qqq", "ana town zzz") == pytest.approx(1.0)
    # Queries that consist of invented words have zero vectors, and still count as equal.
    assert similarity(embed, "qqq", "zzz") == similarity(embed, "??", "??") == 1.0
    assert similarity(embed, "qqq", "ana") == 0.0


# ------------------------------------------------------------------------------------ ARENA by hand


def test_arena_without_relevance_pays_the_bonus_for_the_other_two_terms():
    terms = {"format": 1.0, "answer": 1.0, "bonus": 10.0}
    assert arena(ar(sections("[2]")), relevance_reward=False) == terms
    # The baseline Naive-GRPO (4.3) has format and accuracy, and no bonus.
    assert total(arena(ar(sections("[2]")), bonus=0.0, relevance_reward=False)) == 2


# Relevance: the gold numbers are 1 and 4; exactly these earn 1, some in common 0.5, none 0.
CITATIONS = {"[2]": 0, "[1, 2, 3, 4]": 0.5, "[4, 1]": 1}
# EM, F1 and cover-EM. "June 16" has 2 of 3 words: P = 1 and R = 2/3, so F1 = 0.8; cover-EM needs
# all three words.
ANSWERS = {"June 16": (0, 0.8, 0), "June 16, 1874": (1, 1, 1), "on June 16, 1874": (0, 6 / 7, 1)}


@pytest.mark.parametrize("number, metric", enumerate(("em", "f1", "cem")))
@pytest.mark.parametrize("in_format", [True, False])
@pytest.mark.parametrize("cited", CITATIONS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_every_sum_of_arenas_terms_by_hand(answer, cited, in_format, number, metric):
    # R = R_format + R_accuracy + R_relevance + R_bonus (3.3); 13 only if all three terms are 1.
    trajectory = ar(sections(cited, answer=answer) + ("" if in_format else " done"))
    terms = [in_format, ANSWERS[answer][number], CITATIONS[cited]]
    expected = sum(terms) + 10 * (terms == [1, 1, 1])
    assert total(arena(trajectory, answer_metric=metric)) == expected
    for verdict in (True, False):  # a judge's verdict replaces the metric
        terms[1] = verdict
        expected = sum(terms) + 10 * (terms == [1, 1, 1])
        assert total(arena(trajectory, verdict)) == expected


@pytest.mark.parametrize(
    ("ids", "numbers", "relevance"),
    [
        ("[1, 4]", {1, 4}, 1.0),
        ("[4,1,4]", {1, 4}, 1.0),
        ("[1]", {1}, 0.5),
        ("[]", set(), 0.0),
        ("1,4", set(), 0.0),
        ("[true, 4]", set(), 0.0),
        ("[-1, 4]", set(), 0.0),
        ("[" + "9" * 5000 + "]", set(), 0.0),  # Python cannot parse a number this long
    ],
)
def test_cited_numbers_are_a_set_in_brackets(ids, numbers, relevance):
    trajectory = ar(sections(ids))
    assert rewards.cited(trajectory) == numbers and arena(trajectory)["relevance"] == relevance


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("\n " + sections() + " \n<|im_end|>", True),
        (sections(analysis="1803 < 1833 and a <b>"), True),
        (sections(ids="1,4"), True),  # not a list, but a section
        (sections() + " done", False),
        ("<think>hm</think>" + sections(), False),
        (sections(analysis="x</analysis> <analysis>y"), False),
        (sections(analysis="<answer>x"), False),
        (sections(analysis=" "), False),
        # The three sections are complete, but there is an empty one more.
        ("<relevance></relevance>" + sections(), False),
        ("<analysis>x</analysis><relevance>[1]</relevance><answer>June 16, 1874</answer>", False),
    ],
)
def test_arenas_format_is_three_sections_and_white_space(text, good):
    assert arena(ar(text))["format"] == float(good)
    # Under arena_thinking the model may think before the sections.
    apart = trajectory_of(text, protocol="arena_thinking")
    assert rewards.arena_format(apart) == (good or text.startswith("<think>"))


def test_arena_scores_show_how_exact_the_cited_set_is():
    for cited, scores in (
        ("[1, 4]", (1, 1)),
        ("[1, 2, 3, 4, 5]", (0.5, 0)),
        ("none", (0, 0)),
    ):
        row = ar(sections(cited))
        assert tuple(trajectory_metrics.arena_scores(row).values()) == pytest.approx(scores)
    assert set(trajectory_metrics.arena_scores(ar(sections("none"), supporting=())).values()) == {
        0.0
    }


def test_a_summary_earns_its_mean_rouge_and_from_one_fifth_also_the_bonus():
    pytest.importorskip("rouge_score", reason="the extra rouge is not installed")

    def terms_of(text, **cited):
        summary = sections(**cited, answer=text).replace("answer>", "summary>")
        return list(arena(ar(summary, gold="the cat lay down", task="summary")).values())

    # Words 3/4, pairs 1/3, longest common subsequence 3/4: (0.75 + 0.3333 + 0.75) / 3 = 0.6111.
    assert terms_of("The cat sat down.") == pytest.approx([1, 11 / 18, 1, 10])
    # One common word of 5 and 4: words 2/9, pairs 0, subsequence 2/9: mean 0.1481, below one fifth.
    assert terms_of("A fox ran the mile.") == pytest.approx([1, 4 / 27, 1, 0])
    assert terms_of("The cat sat down.", ids="[1]") == pytest.approx([1, 11 / 18, 0.5, 0])
    assert value(arena(ar(sections(), task="summary"))) == 1  # a summary needs the tag <summary>


# ------------------------------------------------------------------------------------------ by name


def settings_for(reward, protocol="", max_searches=4, left_out="", **reward_args):
    """Returns the settings of a run with this reward."""
    settings = {"reward": reward, "protocol": protocol or protocol_of(reward)}
    settings |= {"max_searches": max_searches, "left_out": left_out, "reward_args": reward_args}
    return Settings(**settings)


def protocol_of(reward):
    names = ("r1_searcher", "r_search", "search_r1", "when_to_search", "arena", "ur2")
    return next(name for name in names if reward.startswith(name))


@pytest.mark.parametrize("reward", REWARDS)
def test_every_reward_by_name_scores_a_trajectory_of_its_protocol(reward):
    terms = reward_terms(reward, example(protocol_of(reward)), {"step": 0})
    assert terms and all(isinstance(value, float) for value in terms.values())
    check_reward(settings_for(reward))


JUDGED = {"correct": False, "embed": lambda texts: [[3, 4], [1, 0]]}


@pytest.mark.parametrize(
    ("reward", "answer", "term", "expected", "given"),
    [
        # "Kelmouth, Norland" for "Norland" has cover-EM 1, and eq. 2 doubles it.
        ("ur2_stage2", "Kelmouth, Norland", "answer", 2, {"answer_metric": "cem"}),
        ("ur2_stage1", "Norland", "retrieval", 7, {"variant": "qwen_3b"}),
        ("ur2_stage1", "Norland", "fallback", -0.25, {"fallback_penalty": 0.25}),
        # The released Llama code subtracts 1 for the format, not 2; the released stage 1 adds ±1 by
        # cover-EM.
        ("r1_searcher_stage2_llama", "<think> Norland", "format", -1, {}),
        ("r1_searcher_stage1_code", "Norland", "answer", 1, {}),
        ("r1_searcher_stage1_code", "Sudria", "answer", -1, {}),
        ("when_to_search_stage2", "Norland", "answer", 0.8, {"beta": 0.1}),
        ("arena", "Norland", "bonus", 3, {"bonus": 3.0}),
    ],
)
def test_the_arguments_reach_the_reward(reward, answer, term, expected, given):
    terms = reward_terms(reward, example(protocol_of(reward), answer), {"step": 0}, **given)
    assert terms[term] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reward", "answer", "term", "expected", "outside"),
    [
        ("r_search", "Sudria", "evidence", 1, {"reader_answer": "Norland"}),
        ("when_to_search_stage1", "Norland", "answer", -0.4, JUDGED),
        ("when_to_search_stage1", "Norland", "retrieval", -0.6, JUDGED),
    ],
)
def test_what_other_models_say_reaches_the_reward(reward, answer, term, expected, outside):
    terms = reward_terms(reward, example(protocol_of(reward), answer), outside)
    assert terms[term] == pytest.approx(expected)


def test_an_argument_can_switch_off_a_need_of_a_reward():
    assert needs(settings_for("r_search")) == {"reader_answer"}
    assert needs(settings_for("r_search", evidence_reward=False)) == set()
    assert needs(settings_for("arena")) == {"correct"}
    assert needs(settings_for("when_to_search_stage1")) == {"correct", "embed"}
    assert needs(settings_for("when_to_search_stage1", left_out="answer")) == {"embed"}
    assert needs(settings_for("when_to_search_stage1", left_out="retrieval")) == {"correct"}


@pytest.mark.parametrize(
    ("reward", "protocol"),
    [
        ("r1_searcher_stage1", "ur2"),
        ("r_search", "r_search_plain"),
        ("when_to_search_stage1", "r_search"),
        ("arena", "ur2"),
    ],
)
def test_a_reward_that_does_not_fit_the_protocol_is_an_error_of_one_line(reward, protocol):
    pattern = f"protocol {protocol} has no <.*> section, which --reward, "
    with pytest.raises(InputError, match=pattern) as error:
        check_reward(settings_for(reward, protocol))
    assert "\n" not in str(error.value)


def test_a_search_price_that_lets_a_wrong_answer_win_is_an_error():
    check_reward(settings_for("ur2_stage2", max_searches=9))  # UR² has no price per search
    check_reward(settings_for("when_to_search_stage2", max_searches=6, beta=0.3))  # 0.3 · 6 = 1.8
    pattern = "beta times --max_searches 4 is 2: it must stay below 2"
    with pytest.raises(InputError, match=pattern):
        check_reward(settings_for("when_to_search_stage2", beta=0.5))


@pytest.mark.parametrize("given", [{"fallback": 0.0}, {"variant": "qwen_9b"}])
def test_a_wrong_argument_of_a_reward_is_an_error(given):
    pattern = "arguments of --reward ur2_stage1 are fallback_penalty"
    with pytest.raises(InputError, match=pattern):
        check_reward(settings_for("ur2_stage1", **given))


def test_the_example_can_be_written_in_the_protocol_of_a_sixth_paper(monkeypatch):
    tags = map(tag_pair, ("ask", "page", "end"))
    sixth = Protocol("sixth", *tags, "Ask.", "Answer.", other_tags=(tag_pair("plan"),))
    monkeypatch.setitem(PROTOCOLS, "sixth", sixth)
    for protocol in PROTOCOLS:
        assert example(protocol).answer == "Norland"
    assert [search.fallback for search in example("sixth").searches] == [False, True]
    check_reward(settings_for("ur2_stage1", "sixth"))


REFERENCES = (Document("1", "Ana", "born in Kelmouth"),)
LETTERED = {"task": "choice", "options": ("elm", "oak")}


@pytest.mark.parametrize(
    ("reward", "question", "message"),
    [
        ("arena", {"references": REFERENCES}, "names no supporting reference.*`supporting`"),
        ("arena_code", {}, "names no supporting reference.*--variant no_relevance"),
        ("ur2_choice", {"task": "choice"}, "has no options"),
        ("when_to_search_stage1", LETTERED, "is multiple choice"),
    ],
)
def test_a_question_that_lacks_a_field_the_reward_reads_is_an_error(reward, question, message):
    settings = settings_for(reward)
    complete = LETTERED if reward == "ur2_choice" else {}
    complete = Question("q6", "?", ["a"], references=REFERENCES, supporting=(1,), **complete)
    with pytest.raises(InputError, match=f"question q7 {message}"):
        rewards.check_questions([complete, Question("q7", "?", ["a"], **question)], settings)
    assert rewards.check_questions([complete], settings) == [complete]
    no_relevance = settings_for("arena", relevance_reward=False)
    assert rewards.check_questions([dataclasses.replace(complete, supporting=())], no_relevance)


# -------------------------------------------------------------------------- hacks that earn nothing

NO_SEARCH = {
    "bare begin tags": "<|begin_of_query|> <|begin_of_query|> ",
    "a query that nobody ran": "<|begin_of_query|> Ana Bell <|end_of_query|> ",
    "an empty query": "<|begin_of_query|> <|end_of_query|>\n\n" + FAKED,
    "documents without a query": FAKED,
    "a malformed query": "Ana Bell <|end_of_query|>\n\n" + FAKED,
}


@pytest.mark.parametrize("hack", NO_SEARCH.values(), ids=NO_SEARCH.keys())
def test_text_that_imitates_a_search_earns_no_search_reward(hack):
    assert ur2_stage1(ur2(hack + BOX))["retrieval"] == 0.0
    assert value(ur2_stage1(ur2(hack + BOX))) <= value(ur2_stage1(ur2(BOX)))
    assert ur2_choice(ur2(hack + BOX), 0)["retrieval"] == 0.0
    assert r1_searcher_stage1(r1(hack + CLOSE))["retrieval"] == 0.0


@pytest.mark.parametrize("hack", NO_SEARCH.values(), ids=NO_SEARCH.keys())
def test_evidence_without_a_search_earns_nothing(hack):
    for ours, tag in zip(PROTOCOLS["ur2"].tags, PROTOCOLS["r_search"].tags, strict=False):
        hack = hack.replace(ours, tag)
    assert r_search(rs(hack + EVIDENCE + ANSWER), "Norland") == r_search(rs(ANSWER))
    informed = THINK + hack.replace("observation", "information")
    # An imitated search does not soften the penalty of a wrong answer.
    assert when_to_search_stage1(when(informed + WRONG))["answer"] == -1.0


def test_a_query_over_twenty_words_is_run_but_is_not_a_valid_search():
    trajectory = ur2(search(LONG) + BOX)
    assert len(trajectory.searches) == 1 and count_valid_searches(trajectory) == 0
    assert ur2_stage1(trajectory) == {"format": -1.0, "retrieval": 0.0, "fallback": 0.0}
    assert ur2_choice(trajectory, 0)["retrieval"] == 0.0
    assert count_valid_searches(ur2(search(LONG.removesuffix(" word")) + BOX)) == 1  # 20 words
    # Under When to Search it is not concise, and it costs as much as any search.
    expected = {"format": 1.0, "retrieval": -1.0, "answer": 0.7}
    assert when_to_search_stage2(when(THINK + when_search(LONG) + ANSWER)) == pytest.approx(
        expected
    )


def test_an_answer_that_only_the_environment_gives_earns_nothing():
    in_document = search(document="\\boxed{Norland} <answer> Norland </answer>")
    assert ur2_stage2(ur2(in_document + "I do not know."))["answer"] == 0.0
    assert r1_searcher_stage2(r1(in_document + "so</think>"))["answer"] == 0.0
    noticed = ur2("I do not know.")
    noticed.segments.append(Segment("notice", BOX))
    assert ur2_stage2(noticed)["answer"] == 0.0
    in_document = rs(rs_search(document=EVIDENCE + ANSWER) + "I do not know.")
    assert set(r_search(in_document, "Norland").values()) == {0.0}


def test_an_answer_that_only_the_prompt_gives_earns_nothing():
    prompt = f"Write {BOX} or {EVIDENCE} {sections()} {ANSWER}."
    question = Question("1", prompt, ["Norland"], supporting=(1, 4))
    assert value(ur2_stage2(ur2("I do not know.", question))) == 0
    assert r1_searcher_stage2(r1("so</think>", question)) == {"answer": 0.0, "format": -2.0}
    assert total(r_search(rs("I do not know.", question), "Norland")) == 0.2  # γ_e: no search
    assert when_to_search_stage1(when("I do not know.", question))["answer"] == -1.0
    assert total(arena(trajectory_of("I do not know.", question, "arena"))) == 0.0


def test_the_text_of_a_document_costs_nothing():
    document = "北 \ufffd\nassistant\nuser <tool_call> <|im_start|> <think></think> \\boxed{Sudria}"
    document = f"{document} {EVIDENCE} <answer> Sudria </answer>"
    for reward, make, begin, make_search, end in (
        (ur2_stage1, ur2, "", search, BOX),
        (r1_searcher_stage2, r1, "", search, CLOSE),
        (r_search, rs, "", rs_search, EVIDENCE + ANSWER),
        (when_to_search_stage2, when, THINK, when_search, ANSWER),
    ):
        disturbed = make(begin + make_search(document=document) + end)
        assert reward(disturbed) == reward(make(begin + make_search() + end))


@pytest.mark.parametrize("joint", ["/", "_", " or ", "—"])
def test_a_list_of_guesses_is_too_long_however_it_is_joined(joint):
    listed = joint.join([*(f"guess{i}" for i in range(500)), "Norland", ""])
    guesses = CLOSE.replace("Norland", listed)
    assert "long_answer" in rewards.r1_searcher_format(r1(guesses))
    # It earns at most what a plain wrong answer earns: by F1, by cover-EM, in the released stage 1.
    for metric in ("f1", "cem"):
        wrong = value(r1_searcher_stage2(r1(WRONG_CLOSE), metric))
        assert value(r1_searcher_stage2(r1(guesses), metric)) <= wrong
    wrong = value(r1_searcher_stage1(r1(search() + WRONG_CLOSE), "cem"))
    assert value(r1_searcher_stage1(r1(search() + guesses), "cem")) < wrong
    assert ur2_violations(ur2(f"\\boxed{{{listed}}}")) == ["long_answer"]


def test_hacks_that_the_papers_formulas_reward():
    # R1-Searcher eq. 5: a list of ten guesses covers the gold and earns 1. A longer list loses 2;
    # section 4.2 reports such answers.
    ten = "Sudria Ostland Westland Kaldor Belmark Corsia Dravia Ellenia Fioria Norland"
    assert value(r1_searcher_stage2(r1(CLOSE.replace("Norland", ten)), "cem")) == 1
    # R-Search eq. 4 rewards the reader's answer even if the evidence is in no document; only the
    # metric evidence_support shows that.
    made_up = "<original_evidence> Zed lies in Norland. </original_evidence>"
    row = rs(rs_search(document="nothing") + made_up + ANSWER)
    assert (
        r_search(row, "Norland")["evidence"] == 1.0
        and trajectory_metrics.evidence_support(row) == 0.0
    )


def test_writing_several_answers_earns_less_than_writing_the_right_one():
    # The last answer is scored and the format term is lost: 0 or 2 instead of 3.
    assert total(ur2_stage2(ur2("\\boxed{Norland} \\boxed{Sudria}"))) == 0
    assert total(ur2_stage2(ur2("\\boxed{Sudria} \\boxed{Norland}"))) == 2
    both = ANSWER + WRONG
    assert total(r1_searcher_stage2(r1("so</think>" + both))) == -2
    assert total(r_search(rs(both))) == 0.2 and total(r_search(rs(WRONG + ANSWER))) == 1.2
    assert total(when_to_search_stage1(when(THINK + both))) == -2
    tried = sections().replace("</answer>", "</answer><answer>1873</answer>")
    assert total(arena(ar(tried))) == 1  # the relevance term only
    twice = "<relevance>[1, 4]</relevance>" + sections("[2]")
    assert arena(ar(twice)) == {"format": 0.0, "answer": 1.0, "relevance": 0.0, "bonus": 0.0}


# -------------------------------------------------------------------------------- the released code

# row: (our reward, why it differs from the released code's)
COLON = "D.2 ends in `the correct answer is: X`; the code asks for no colon"
SCHEDULE = "the code ends stage 1's search reward and missing-retrieval fault with step 15"
WHITE_SPACE = "white space around the sections is not a fault; the code's pattern refuses it"
LATIN_ONLY = "the code looks for CJK in retrieved text too"
DOCUMENTS = "the code wants a passage in each block, which is the environment's to write"
LONG_ANSWER = "an answer over 10 words breaks the format in every stage and for every model"
ON_PURPOSE = {
    4: (-1.0, SCHEDULE),
    5: (4.0, SCHEDULE),
    8: (-2.0, "a query over 20 words is not a valid search: −2 for two, and no retrieval reward"),
    9: (4.0, LATIN_ONLY),
    12: (2.0, "two answers on one line are two answers; the code's pattern sees one"),
    13: (-1.0, "a prompt without retrieval pays the format only, and a query there breaks it"),
    14: (-1.0, "eq. 1 takes 1 for each violation, whatever the prompt; the code pays 0"),
    31: (3.0, "the code does not normalise a curly apostrophe, its own evaluation does"),
    32: (3.0, "the code's pattern reads to the last brace of the line; we balance braces"),
    38: (0.0, "UR² answers in a box; the code also reads the other paper's tag"),
    35: (1.0, "eq. 2 pays correct answers; the code pays 1 for a partly correct one"),
    40: (1.0, COLON),
    41: (0.0, COLON),
    42: (1.0, COLON),
    44: (0.5, '"both of them" is not a letter; the code reads the b'),
    46: (
        0.5,
        "a box is D.2's answer to mathematics and open questions; the code reads it here too",
    ),
    47: (3.5, '"user said" is not a header of a chat turn; the code forbids lines that begin so'),
    49: (2.0, "eq. 2 with a query on a prompt without retrieval: no format, no bonus"),
    57: (1.0, "no search was run; the code pays a half for the document tags or for the format"),
    58: (2.0, DOCUMENTS),
    59: (1.5, "garbled text breaks the format in every stage; the code tests it in stage 2"),
    62: (-0.5, f"{LONG_ANSWER}, and a list covers nothing: 0.5 + 0 − 1"),
    71: (1.0, DOCUMENTS),
    75: (4 / 13 - 1, LONG_ANSWER),
    84: (1.0, DOCUMENTS),
    87: (1.0, 'the word "assistant" is in a document, not in the model\'s text'),
    96: (13.0, 'a "<" that opens no section is allowed; the code\'s pattern refuses any'),
    97: (13.0, WHITE_SPACE),
    98: (13.0, WHITE_SPACE),
    99: (2.0, "text after the answer breaks the format: 0 + 1 + 1; the code matches a beginning"),
    103: (2.0, "[true, 4] is not a list of numbers; the code takes true for 1"),
    109: (1.4, "without a search 0.2 + 0.2; the code asks for no evidence then and finds some"),
    114: (1.4, "faked documents are not a search; the code looks for the tag"),
    115: (1.4, 'the box is there, though "and" is wrong; the code takes "and" for its prompt\'s'),
    117: (1.4, "without a reader's answer F1 is 0: 1 + 0 + 0.4; the code crashes"),
}
FALLBACKS = {6: 1, 7: 2, 26: 1, 27: 2}  # row: number of searches, all answered by the fallback
TASKS = {"rag": "qa", "math": "math", "history": "choice", "medicine": "choice"}
VERDICTS = {"Judgment: Correct": 2, "Judgment: Partially correct": 1}


def golden_ur2(index, row):
    settings = row["settings"]
    fallbacks = range(FALLBACKS.get(index, 0))
    question = Question(str(index), "?", [row["gold"]], task=TASKS[settings["kind"]])
    may_search = settings.get("retrieve_prompt", True)
    trajectory = ur2(row["response"], question, list(fallbacks), may_search=may_search)
    variant = settings.get("variant", "qwen_7b").replace("llama", "llama_8b")
    if settings["stage"] == 1:
        return ur2_stage1(trajectory, variant)
    if settings["stage"] == "mcq":
        return ur2_choice(trajectory, settings.get("step", 0), variant=variant)
    verdict = settings.get("judge_says")
    return ur2_stage2(
        trajectory, grade=(lambda question, answer: VERDICTS[verdict]) if verdict else None
    )


def golden(index, row):
    text = row["response"]
    golds = row["gold"]
    settings = row["settings"]
    if row["system"] == "ur2":
        return golden_ur2(index, row)
    if row["system"] == "r_search":
        question = Question(str(index), settings["question"], golds)
        return r_search(rs(text, question), settings["cross_model_answer"])
    if row["system"] == "arena":
        return arena(ar(text, tuple(settings["supporting"]), golds[0]), punctuation="space")
    trajectory = r1(text, Question(str(index), "?", [golds]))
    if settings["stage"] == "llama1":
        return r1_searcher_stage1(trajectory, answer_metric="cem")
    penalty = {"llama2": 1.0, "qwen_zero": 2.0}[settings["stage"]]
    return r1_searcher_stage2(trajectory, format_penalty=penalty)


def test_every_golden_row_is_equal_or_differs_for_a_named_reason():
    rows = json.loads(shared("golden/released_code_rewards.json"))
    assert len(rows) == 119
    for index, row in enumerate(rows):
        ours = value(golden(index, row))
        released = row["released_code_reward"]  # a string if the code raises an error
        expected, reason = ON_PURPOSE.get(index, (released, "equal"))
        assert ours == pytest.approx(expected, abs=1e-4), (index, reason)
        differs = isinstance(released, str) or abs(ours - released) > 1e-3
        assert index not in ON_PURPOSE or differs, f"row {index} is equal: drop it from the table"


@pytest.mark.parametrize(
    "name", ["r1_searcher_bamboogle_qwen_full_20", "r1_searcher_2wiki_qwen_full_15"]
)
def test_published_transcripts_of_the_trained_model_have_no_format_fault(name):
    for record in map(json.loads, shared(f"data/predictions/{name}.jsonl").splitlines()):
        response = record["gen_text_store"].split("<think>")[-1]  # the prompt ends in it
        trajectory = r1(response, Question("1", record["question"], [record["answer"]]))
        assert rewards.r1_searcher_format(trajectory) == []
        # F1 ignores the order of words: one date is published in another order.
        assert f1_score(trajectory.answer, record["pred_ans"]) == 1.0


@pytest.mark.parametrize(
    "name, long", [("train/r1_searcher_stage2_100", 2), ("qa_eval/musique_500", 5)]
)
def test_every_gold_of_r1_searchers_data_earns_the_full_reward_as_an_answer(name, long):
    records = map(json.loads, shared(f"data/{name}.jsonl").splitlines())
    questions = [Question(str(r["idx"]), r["question"], [r["answer"]]) for r in records]
    golds = [(question, answer) for question in questions for answer in question.answers]
    assert sum(len(answer.split()) > rewards.MAX_ANSWER_WORDS for _, answer in golds) == long
    for question, answer in golds:  # F1 = 1 and no format fault
        assert total(r1_searcher_stage2(r1(CLOSE.replace("Norland", answer), question))) == 1.0


def test_a_published_transcript_of_search_r1_is_parsed_and_rewarded():
    text = shared("data/predictions/search_r1_case.txt").rpartition("<|im_start|>assistant\n")[2]
    row = trajectory_of(text, Question("1", "?", ["SA node", "Sinoatrial SA Node"]), "search_r1")
    assert [search.query for search in row.searches] == ["origin of heart's electrical impulses"]
    assert search_r1(row) == {"answer": 1.0}  # "sinoatrial (SA) node" without brackets
