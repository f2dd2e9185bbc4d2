"""rewards.py: the worked number of every formula, the orderings the papers rely on, and the hacks
that must earn nothing.
"""

import dataclasses
import doctest
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import rewards
from data import Document, Question
from errors import InputError
from metrics import f1_score
from prompts import PROTOCOLS, Protocol
from rewards import (
    REWARDS,
    STORIES,
    Extras,
    RewardSettings,
    arena,
    arena_scores,
    check_beta,
    check_questions,
    check_reward,
    cited,
    cosine,
    count_fallbacks,
    count_valid_searches,
    evidence_support,
    example,
    is_concise,
    needs,
    r1_searcher_format,
    r1_searcher_stage1,
    r1_searcher_stage2,
    r_search,
    r_search_format,
    section_order,
    tell,
    tfidf_embedder,
    ur2_choice,
    ur2_stage1,
    ur2_stage2,
    ur2_violations,
    when_to_search_stage1,
    when_to_search_stage2,
)
from trajectory import Refusal, Segment, trajectory_from_text

SHARED = Path(__file__).parents[2] / "shared"
QA = Question("1", "In which country was Ana Bell born?", ["Norland"])
MATH = Question("2", "Half of one?", ["0.5"], task="math")
CHOICE = Question("3", "Which tree?", ["B"], task="choice", options=("elm", "oak", "ash"))
NOTHING = Extras()
LONG = " ".join(["word"] * 21)
BEI = Document("1", "北", "")


def search(query="Ana Bell birthplace", found="Ana Bell was born in Kelmouth, Norland."):
    query = f"<|begin_of_query|> {query} <|end_of_query|>\n\n"
    return f"{query}<|begin_of_documents|>\n{found}\n<|end_of_documents|>\n\n"


def ur2(text, question=QA, fallbacks=(), may_search=True):
    question = dataclasses.replace(question, may_search=may_search)
    return trajectory_from_text(question, text, "ur2", fallbacks)


def r1(text, question=QA):
    return trajectory_from_text(question, text, "r1_searcher")


def rs(text, question=QA):
    return trajectory_from_text(question, text, "r_search")


def when(text, question=QA):
    return trajectory_from_text(question, text, "when_to_search")


def ar(text, supporting=(1, 4), gold="June 16, 1874", **fields):
    question = Question("1", "When?", [gold], supporting=supporting, **fields)
    return trajectory_from_text(question, text, "arena")


def total(components):
    return pytest.approx(sum(components.values()))


BOX = "So \\boxed{Norland}"
CLOSE = "so</think>\n\n<answer> Norland </answer>"
WRONG_CLOSE = CLOSE.replace("Norland", "Sudria")


def test_the_docstring_examples_are_true():
    assert doctest.testmod(rewards).failed == 0


def test_the_file_shows_ten_stories_under_every_reward(capsys):
    rewards.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 128  # one screen
    start = next(i for i, line in enumerate(lines) if line.startswith("transcript"))
    rows = [(line[:32].strip(), line[32:].split()) for line in lines[start + 1 : start + 11]]
    table = {name: list(map(float, cells)) for name, cells in rows}
    assert list(table) == [story.name for story in STORIES] and len(table) == 10
    # UR²: 1 + 4 and 2 + 1; R1-Searcher: 0.5 + 0.5 and F1; R-Search: 1 + 1 + 0.4; When to Search: 1
    # + 0 + 1 and 1 + 0 + 1 − 0.6; ARENA: 3 + 10
    assert table["good"] == [5, 3, 1, 1, 2.4, 2, 1.4, 13]
    # UR²: −1 (missing retrieval) and 2 + 1; R-Search at most 1.4; no search costs nothing in When
    # to Search; ARENA cites none
    assert table["no search"] == table["evidence without a search"] == [-1, 3, 0.5, 1, 1.4, 2, 2, 2]
    # ARENA: format 1, answer 0, relevance 1; UR² does not look at the answer in stage 1
    assert table["wrong answer"] == [5, 1, 1, 0, 1.4, 0.6, 0, 2]
    # no row that a hack stands in beats the good one anywhere but where not searching is right
    # (stage 2 of When to Search)
    for hack in (
        "documents of its own",
        "text after the answer",
        "two answers",
        "cites everything",
    ):
        assert all(cell <= good for cell, good in zip(table[hack], table["good"], strict=True))


def test_rewards_are_read_without_torch():
    code = "import sys, rewards; sys.exit('torch' in sys.modules)"
    folder = Path(rewards.__file__).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=folder).returncode == 0


# -------------------------------------------------------------------------------------- UR² by hand


@pytest.mark.parametrize(
    ("variant", "by_searches"),
    [("qwen_7b", (-1, 4, 5, 5)), ("qwen_3b", (-1, 6, 8, 8)), ("llama_8b", (-1, 4, 4, 4))],
)
def test_ur2_stage1_pays_format_and_searches(variant, by_searches):
    # n = 0: format −1 (missing retrieval). n = 1: 1 + 3 (5, 3). n >= 2: 1 + 4 (7, 3)
    for n, reward in enumerate(by_searches):
        assert reward == total(ur2_stage1(ur2(search() * n + BOX), variant)), n


def test_ur2_stage1_does_not_look_at_the_answer():
    assert ur2_stage1(ur2(search() + BOX)) == ur2_stage1(ur2(search() + "So \\boxed{Sudria}"))


def test_ur2_stage1_counts_each_violation():
    # two answers, one illegal token: v = 2; n = 1: −2 + 3
    trajectory = ur2(search() + "\\boxed{a1} \\boxed{b2} <|im_start|>")
    assert ur2_violations(trajectory) == ["several_answers", "illegal_im_start"]
    assert ur2_stage1(trajectory) == {"format": -2.0, "retrieval": 3.0, "fallback": 0.0}


@pytest.mark.parametrize("how", ["argument", "question"])
def test_a_prompt_without_retrieval_pays_the_format_only(how):
    argument, own = how != "argument", how != "question"
    # no missing retrieval there, no −v, and a search earns nothing: 1, 1 and 0
    for text, reward in ((BOX, 1), (search() * 2 + BOX, 1), ("no box <|im_start|>", 0)):
        assert reward == total(ur2_stage1(ur2(text, may_search=own), retrieval=argument))


def test_ur2_stage2_pays_twice_the_score_of_each_task():
    assert total(ur2_stage2(ur2(BOX))) == 3  # 2 · 1 + 1
    # "Kelmouth, Norland" against "Norland": P = 1/2, R = 1, F1 = 2/3: 4/3 + 1
    partly = ur2("\\boxed{Kelmouth, Norland}")
    assert total(ur2_stage2(partly)) == 7 / 3
    assert total(ur2_stage2(partly, "em")) == 1 and total(ur2_stage2(partly, "cem")) == 3
    assert total(ur2_stage2(ur2("\\boxed{\\frac{1}{2}}", MATH))) == 3
    assert total(ur2_stage2(ur2("The correct answer is: B", CHOICE))) == 3
    assert total(ur2_stage2(ur2("The correct answer is: A", CHOICE))) == 1


def test_a_math_judge_grades_what_is_not_plainly_equal():
    asked = []

    def judge(question, answer):
        asked.append(answer)
        return 1

    # partly 1 + format 1
    assert total(ur2_stage2(ur2("\\boxed{about a half}", MATH), judge=judge)) == 2
    assert total(ur2_stage2(ur2("\\boxed{1/2}", MATH), judge=judge)) == 3  # equal: nobody is asked
    assert total(ur2_stage2(ur2("no box", MATH), judge=judge)) == 0  # no answer: nobody is asked
    assert asked == ["about a half"]


def test_missing_retrieval_is_a_fault_in_stage_1_only():
    assert ur2_violations(ur2(BOX)) == []
    assert ur2_violations(ur2(BOX), search_required=True) == ["missing_retrieval"]
    assert ur2_stage2(ur2(BOX))["format"] == 1.0


def test_each_fallback_costs_half_in_every_stage():
    trajectory = ur2(search() * 3 + BOX, fallbacks=[0, 2])
    for reward in (ur2_stage1, ur2_stage2, lambda t, **given: ur2_choice(t, 0, **given)):
        assert reward(trajectory)["fallback"] == -1.0
        assert reward(trajectory, fallback_penalty=0.25)["fallback"] == -0.5


def test_the_choice_bonus_ends_with_its_steps():
    def choice(n, step, *variant):
        return ur2_choice(ur2(search() * n + "The correct answer is: B", CHOICE), step, *variant)

    assert [choice(n, 9)["retrieval"] for n in range(4)] == [0.0, 0.5, 1.0, 1.0]
    assert total(choice(2, 9)) == 4 and total(choice(2, 10)) == 3  # 2 + 1 + 1, and without the 1
    assert total(choice(2, 14, "qwen_3b")) == 4 and total(choice(2, 15, "qwen_3b")) == 3


LOOSE = {"format_check": "loose"}


@pytest.mark.parametrize(
    ("text", "question", "kept"),
    [
        ("So it is \\boxed{Norland}.", QA, True),
        ("So it is $\\boxed{Norland}$<|im_end|>", QA, True),
        ("\\boxed{Norland}\n<eos>", QA, True),
        ("The correct answer is: B", CHOICE, True),
        ("\\boxed{Norland} it is", QA, False),
        ("Norland", QA, False),
        ("\\boxed{Norland", QA, False),
    ],
)
def test_the_loose_format_check_looks_at_the_end_only(text, question, kept):
    trajectory, faults = ur2(text, question), [] if kept else ["no_answer_at_end"]
    assert ur2_violations(trajectory, **LOOSE) == faults
    assert ur2_stage1(trajectory, **LOOSE)["format"] == 1 - 2 * len(faults)  # without a search too
    assert ur2_stage2(trajectory, **LOOSE)["format"] == kept
    assert ur2_choice(trajectory, 0, **LOOSE)["format"] == kept


def test_what_the_strict_check_refuses_pays_under_the_loose_one():
    box = "\\boxed{Sudria} "
    for hack in (FAKED, "北 ", "<tool_call> ", box, "<|begin_of_query|> ", search(LONG)):
        assert ur2_stage2(ur2(hack + BOX))["format"] == 0.0
        assert ur2_stage2(ur2(hack + BOX), **LOOSE)["format"] == 1.0


def test_unknown_names_are_one_line_errors():
    with pytest.raises(InputError, match="unknown format check 'lose': one of strict, loose"):
        ur2_stage1(ur2(BOX), format_check="lose")
    with pytest.raises(InputError, match="unknown similarity 'max': one of mean, literal"):
        when_to_search_stage1(when(""), similarity="max")
    with pytest.raises(InputError, match="qwen_9b"):
        ur2_stage1(ur2(BOX), "qwen_9b")
    with pytest.raises(InputError, match="rouge"):
        r1_searcher_stage2(r1(CLOSE), "rouge")


# ---------------------------------------------------------------------------------- UR²: violations


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (BOX, []),
        ("no box", ["no_answer"]),
        ("\\boxed{}", ["no_answer"]),
        ("\\boxed{Norland", ["no_answer"]),
        ("\\boxed{Norland} or \\boxed{Norland}", ["several_answers"]),
        ("<|begin_of_query|> where " + BOX, ["unpaired_query_tags"]),
        ("where <|end_of_query|> " + BOX, ["unpaired_query_tags"]),
        (
            "<|begin_of_query|> a <|begin_of_query|> b <|end_of_query|> " + BOX,
            ["unpaired_query_tags"],
        ),
        ("<|end_of_documents|> " + BOX, ["written_documents"]),
        (search(LONG) + search(LONG) + BOX, ["long_query", "long_query"]),
        (search() * 4 + BOX, []),
        (search() * 5 + BOX, ["too_many_queries"]),
        ("x\nuser\nagain " + BOX, ["illegal_user_turn"]),
        ("x\nusers like it " + BOX, []),
        ("the user asks " + BOX, []),
        # the newline before it is the environment's
        (search() + "assistant\n" + BOX, ["illegal_assistant_turn"]),
        ("<tool_call> <|start_header_id|> " + BOX, ["illegal_tool_call", "illegal_start_header"]),
        ("<|end_header_id|> " + BOX, ["illegal_end_header"]),
        (BOX + "<|im_end|>", []),  # the EOS token
        ("北 " + BOX, ["garbled_text"]),
        ("\ufffd " + BOX, ["garbled_text"]),
        ("\ue000 " + BOX, ["garbled_text"]),
        ("π r², x ∈ ℝ, Māori, naïve " + BOX, []),
        ("\\boxed{" + " ".join("abcdefghijk") + "}", ["long_answer"]),  # 11 words
        ("\\boxed{" + " ".join("abcdefghij") + "}", []),  # 10 words
        ("\\boxed{Norland <|begin_of_query|> x <|end_of_query|>}", ["tag_in_answer"]),
    ],
)
def test_what_counts_as_a_violation(text, faults):
    assert ur2_violations(ur2(text)) == faults


def test_an_answer_may_be_as_long_as_the_gold():
    gold = Question("1", "Which words?", [" ".join(["word"] * 12)])
    assert ur2_violations(ur2("\\boxed{" + " ".join(["word"] * 12) + "}", gold)) == []
    assert ur2_violations(ur2("\\boxed{" + " ".join(["word"] * 13) + "}", gold)) == ["long_answer"]


@pytest.mark.parametrize(
    ("answer", "good"),
    [("B", True), ("(B).<|im_end|>", True), ("both of them", False), ("oak", False)],
)
def test_a_choice_is_answered_by_one_letter(answer, good):
    assert (ur2_violations(ur2(f"The correct answer is: {answer}", CHOICE)) == []) is good


def test_a_script_that_the_question_or_a_document_uses_is_not_garbled():
    assert ur2_violations(ur2(search(found="北 is north") + "北 " + BOX)) == []
    plain = Question("1", "?", ["x"])
    for place in ({"question": "北?"}, {"options": ("北",)}, {"references": (BEI,)}):
        question = dataclasses.replace(plain, **place)
        assert ur2_violations(ur2("北 \\boxed{x}", question)) == []
        assert ur2_violations(ur2("север \\boxed{x}", question)) == ["garbled_text"]


def test_queries_refused_for_the_limit_count_as_queries():
    trajectory = ur2(search() * 4 + BOX)
    trajectory.refusals.append(Refusal("limit", "one more"))
    assert ur2_violations(trajectory) == ["too_many_queries"]
    assert count_valid_searches(trajectory) == 4


def test_a_loop_of_illegal_tokens_is_one_violation():
    assert ur2_violations(ur2("<tool_call>" * 100 + BOX)) == ["illegal_tool_call"]


# ------------------------------------------------------------------------------ R1-Searcher by hand


def test_r1_searcher_stage1_is_a_half_for_searching_and_a_half_for_the_format():
    assert total(r1_searcher_stage1(r1(search() + CLOSE))) == 1.0
    assert total(r1_searcher_stage1(r1(CLOSE))) == 0.5
    assert total(r1_searcher_stage1(r1(search() + "Norland"))) == 0.5
    assert total(r1_searcher_stage1(r1("Norland"))) == 0.0


def test_r1_searcher_stage1_pays_a_wrong_answer_the_same():
    right, wrong = r1(search() + CLOSE), r1(search() + WRONG_CLOSE)
    assert r1_searcher_stage1(right) == r1_searcher_stage1(wrong)


def test_r1_searcher_stage2_is_f1_less_two_for_a_fault():
    assert total(r1_searcher_stage2(r1(search() + CLOSE))) == 1.0
    # "Kelmouth, Norland": F1 = 2/3; a second </think> is a fault: 2/3 − 2 = −4/3
    partly = CLOSE.replace("Norland", "Kelmouth, Norland")
    assert total(r1_searcher_stage2(r1(partly))) == 2 / 3
    assert total(r1_searcher_stage2(r1("</think>" + partly))) == -4 / 3
    assert total(r1_searcher_stage2(r1("so</think> Norland"))) == -2.0  # no tags: F1 = 0


def test_r1_searcher_variants_are_named_switches():
    right, wrong = r1(search() + CLOSE), r1(search() + WRONG_CLOSE)
    # released stage 1: 0.5 + 0.5 ± 1
    assert total(r1_searcher_stage1(right, "cem")) == 2.0
    assert total(r1_searcher_stage1(wrong, "cem")) == 0.0
    # table 5: +1 / −1
    cover = r1(CLOSE.replace("Norland", "Kelmouth, Norland"))
    assert total(r1_searcher_stage2(right, "em")) == 1.0
    assert total(r1_searcher_stage2(wrong, "em")) == -1.0
    assert total(r1_searcher_stage2(cover, "em")) == -1.0
    assert total(r1_searcher_stage2(cover, "cem")) == 1.0
    # released Llama code: −1
    assert total(r1_searcher_stage2(r1("so Norland"), format_penalty=1.0)) == -1.0


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (CLOSE, []),
        (search() + CLOSE + "<|im_end|>", []),
        ("so <answer> Norland </answer>", ["thinking_not_closed_once"]),
        ("<think>" + CLOSE, ["thinking_not_closed_once"]),
        ("</think>" + CLOSE, ["thinking_not_closed_once", "text_beside_answer"]),
        ("<answer> Norland </answer> so</think>", ["answer_in_thinking"]),
        ("so</think> Norland", ["no_answer"]),
        ("so</think> <answer> </answer>", ["no_answer"]),
        ("so</think> <answer> Norland", ["no_answer"]),
        (CLOSE + "<answer> Norland </answer>", ["several_answers"]),
        ("so</think> It is <answer> Norland </answer>", ["text_beside_answer"]),
        (CLOSE + " I am sure.", ["text_beside_answer"]),
        ("so</think>" + search() + "<answer> Norland </answer>", ["text_beside_answer"]),
        (CLOSE.replace("Norland", " ".join("abcdefghijk")), ["long_answer"]),
        (
            CLOSE.replace("Norland", "<|begin_of_documents|>"),
            ["written_documents", "tag_in_answer"],
        ),
        ("北" + CLOSE, ["garbled_text"]),
        ("<|begin_of_query|> where" + CLOSE, ["unpaired_query_tags"]),
    ],
)
def test_r1_searcher_names_what_is_wrong_with_a_format(text, faults):
    assert r1_searcher_format(r1(text)) == faults


# --------------------------------------------------------------------------------- R-Search by hand


def observed(query="Ana Bell birthplace", found="Ana Bell was born in Kelmouth, Norland."):
    return f"<search> {query} </search>\n\n<observation>\n{found}\n</observation>\n\n"


EVIDENCE = "<original_evidence> Ana Bell was born in Kelmouth, Norland. </original_evidence>"
ANSWER = "<answer> Norland </answer>"


def test_r_search_pays_answer_evidence_and_format():
    told = observed() + EVIDENCE + ANSWER
    best = {"answer": 1.0, "evidence": 1.0, "format": 0.4}  # 1 + 1 + 0.2 + 0.2
    assert r_search(rs(told), "Norland") == pytest.approx(best)
    # "Kelmouth, Norland" against "Norland": F1 = 2/3, for the answer and for the other model's
    partly = r_search(rs(told.replace("> Norland", "> Kelmouth, Norland")), "Kelmouth Norland")
    assert partly == pytest.approx({"answer": 2 / 3, "evidence": 2 / 3, "format": 0.4})
    # wrong, and the evidence says nothing: the format alone
    assert total(r_search(rs(observed() + EVIDENCE + "<answer> x </answer>"), "y")) == 0.4


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (ANSWER, 0.4),  # no search: γ_e is a gift, γ_α for the one answer
        ("Norland", 0.2),
        (observed() + ANSWER, 0.2),  # searched: E = 0, A = 1
        (observed() + EVIDENCE, 0.2),
        (observed() + "Norland", 0.0),
        # an empty box is none
        (observed() + "<original_evidence> </original_evidence>" + ANSWER, 0.2),
        (observed() + EVIDENCE * 2 + ANSWER, 0.2),
        (observed() + EVIDENCE + ANSWER * 2, 0.2),
        # two boxes, though one is empty
        (observed() + EVIDENCE + "<answer> </answer>" + ANSWER, 0.2),
        (observed() + EVIDENCE + ANSWER, 0.4),
    ],
)
def test_r_searchs_format_by_hand(text, reward):
    assert r_search(rs(text))["format"] == pytest.approx(reward)
    assert r_search_format(rs(text)) == (reward == 0.4)  # all that there is


def test_r_search_and_when_to_search_remove_punctuation_and_arena_makes_it_a_blank():
    # "Spider-Man" is "spiderman" where it is removed and "spider man" where it becomes a blank
    spider, answer = Question("1", "?", ["Spider-Man"]), "<answer> spiderman </answer>"
    assert r_search(rs(observed() + EVIDENCE + answer, spider), "SpiderMan")["answer"] == 1.0
    assert r_search(rs(observed() + EVIDENCE + answer, spider), "SpiderMan")["evidence"] == 1.0
    assert r_search(rs("<answer> spider man </answer>", spider))["answer"] == 0.0
    assert when_to_search_stage1(when(THINK + answer, spider))["answer"] == 1.0
    assert arena(ar(sections(answer="spider man"), gold="Spider-Man"))["answer"] == 1.0
    assert arena(ar(sections(answer="spiderman"), gold="Spider-Man"))["answer"] == 0.0


def test_the_last_of_two_evidence_boxes_is_read_and_the_format_lost():
    # 1 + 1 + 0 + 0.2
    assert total(r_search(rs(observed() + EVIDENCE * 2 + ANSWER), "Norland")) == 2.2


def test_r_search_without_the_evidence_reward_is_answer_and_format():
    told = rs(observed() + EVIDENCE + ANSWER)
    assert total(r_search(told, "Norland", evidence_reward=False)) == 1.4


def test_evidence_support_is_the_share_of_its_words_that_were_read():
    # "ana bell was born in kelmouth norland": all 7 stand in the document
    assert evidence_support(rs(observed() + EVIDENCE)) == 1.0
    # "bell was queen" : bell and was of 3
    made_up = "<original_evidence> The Bell was queen </original_evidence>"
    assert evidence_support(rs(observed() + made_up)) == pytest.approx(2 / 3)
    assert evidence_support(rs(made_up)) == 0.0  # nothing was read
    assert evidence_support(rs(observed() + ANSWER)) == evidence_support(ur2(search() + BOX)) == 0.0
    # it is no part of the reward
    told = rs(observed() + made_up + ANSWER), rs(observed() + EVIDENCE + ANSWER)
    assert r_search(told[0], "Norland") == r_search(told[1], "Norland")


# --------------------------------------------------------------------------- When to Search by hand


def asked(query="Ana Bell birthplace", found="Ana Bell was born in Norland.", reflect=True):
    reflection = "<reflect> It helps. </reflect>\n" if reflect else ""
    return f"<search> {query} </search>\n\n<information>\n{found}\n</information>\n\n{reflection}"


THINK, REFLECT = "<think> Where was she born? </think>\n", "<reflect> I know it. </reflect>\n"
# no word in common
# No word in common:
QUERIES = ["Ana Bell birthplace", "Kelmouth mayor", "Norland seat", "Sudria king"]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (THINK + REFLECT + ANSWER, True),
        (THINK + ANSWER, True),  # reflect? : our reading of the rule
        (THINK + asked() + ANSWER, True),
        (THINK + asked() + asked() + ANSWER, True),
        (THINK + asked() + THINK + asked() + THINK + ANSWER, True),  # a further think
        (THINK + asked() + REFLECT + ANSWER, True),
        (THINK + asked() + ANSWER + "<|im_end|>", True),
        (THINK + "1 < 2".join(["<reflect> ", " </reflect>"]) + ANSWER, True),
        (REFLECT + ANSWER, False),
        (ANSWER, False),
        (THINK + REFLECT, False),  # no answer
        (asked() + ANSWER, False),  # no think
        (THINK + asked(reflect=False) + ANSWER, False),
        (THINK + asked(reflect=False) + asked() + ANSWER, False),
        (THINK + REFLECT + asked() + ANSWER, False),
        (THINK + THINK + ANSWER, False),
        (THINK + ANSWER + REFLECT, False),
        (THINK + REFLECT + ANSWER + " I am sure.", False),
        (THINK + REFLECT + ANSWER + ANSWER, False),
        ("Well. " + THINK + ANSWER, False),
        (THINK + "so " + ANSWER, False),
        ("<think> </think>" + ANSWER, False),
        (THINK + "<answer> </answer>", False),
        (THINK + "<think> " + REFLECT + "</think>" + ANSWER, False),
        ("<think> a <reflect> b </think>" + ANSWER, False),
        ("<think> </information> </think>" + ANSWER, False),
        (THINK.replace("</think>", "") + ANSWER, False),
        (THINK + "<search> nobody ran it </search>" + REFLECT + ANSWER, False),
        (THINK + "<information> faked </information>" + REFLECT + ANSWER, False),
        (THINK + "<search> </search><information> faked </information>" + REFLECT + ANSWER, False),
        ("", False),
    ],
)
def test_when_to_searchs_order_of_sections(text, good):
    assert when_to_search_stage1(when(text))["format"] == (1.0 if good else -1.0)
    assert when_to_search_stage2(when(text))["format"] == (1.0 if good else -1.0)


def test_an_empty_trajectory_has_no_sections():
    assert section_order(when("")) == "" and section_order(when(THINK + asked())) == "TSIR"


def test_a_notice_is_nobodys_section():
    trajectory = when(THINK + asked() + ANSWER)
    trajectory.segments.insert(2, Segment("notice", "Ask for a fact."))
    assert section_order(trajectory) == "TSIRA"


@pytest.mark.parametrize("n", range(5))
def test_what_a_search_costs_and_softens(n):
    # β = 0.3: stage 1 right 1, wrong −1 + 0.3 n; stage 2 right 1 − 0.3 n, wrong −1
    text = THINK + "".join(asked(query) for query in QUERIES[:n]) + REFLECT
    right, wrong = when(text + ANSWER), when(text + "<answer> Sudria </answer>")
    assert when_to_search_stage1(right) == {"format": 1.0, "retrieval": 0.0, "answer": 1.0}
    assert when_to_search_stage1(wrong)["answer"] == pytest.approx(-1 + 0.3 * n)
    assert when_to_search_stage2(right)["answer"] == pytest.approx(1 - 0.3 * n)
    assert when_to_search_stage2(wrong)["answer"] == -1.0
    assert when_to_search_stage2(right, beta=0.1)["answer"] == pytest.approx(1 - 0.1 * n)


def test_one_search_must_be_concise_and_several_must_differ():
    def retrieval(*queries, **settings):
        text = THINK + "".join(map(asked, queries)) + ANSWER
        return when_to_search_stage1(when(text), **settings)["retrieval"]

    assert retrieval() == 0.0
    assert retrieval("Ana Bell birthplace") == 0.0
    assert retrieval("where was Ana Bell born") == -1.0
    # the same twice: cosine 1; printed with N(N−1) below the line it is half of that
    assert retrieval("Ana Bell", "Ana Bell") == pytest.approx(-1.0)
    assert retrieval("Ana Bell", "Ana Bell", similarity="literal") == pytest.approx(-0.5)
    # pairs 1, 1/2, 1/2 (two words each, one in common): mean 2/3
    assert retrieval("ana bell", "ana bell", "ana town") == pytest.approx(-2 / 3)
    # with more than one search nobody asks for conciseness
    assert retrieval("where was Ana Bell born", "Kelmouth mayor") == 0.0
    # another embedder: two vectors of cosine 3/5
    assert retrieval("a", "b", embed=lambda texts: [[3, 4], [1, 0]]) == pytest.approx(-0.6)


def test_a_query_of_any_length_is_a_search_that_was_executed():
    # 21 words: no valid search for UR², and not concise, but it cost one
    trajectory = when(THINK + asked(LONG) + ANSWER)
    assert count_valid_searches(trajectory) == 0
    expected = {"format": 1.0, "retrieval": -1.0, "answer": 0.7}
    assert when_to_search_stage2(trajectory) == pytest.approx(expected)
    wrong = when(THINK + asked(LONG) + "<answer> x </answer>")
    assert when_to_search_stage1(wrong)["answer"] == pytest.approx(-0.7)


def test_a_corpus_says_which_common_word_makes_queries_alike():
    documents = [Document(name, name, "born") for name in ("Ana", "Bo", "Cy")]
    trajectory = when(THINK + asked("ana born") + asked("bo born") + ANSWER)
    # without statistics 1/2
    assert when_to_search_stage1(trajectory)["retrieval"] == pytest.approx(-0.5)
    # "born" is in every document (idf 1), the names are in one (idf ln 2 + 1 = 1.693)
    weighted = when_to_search_stage1(trajectory, embed=tfidf_embedder(documents))
    assert weighted["retrieval"] == pytest.approx(-1 / (1 + 1.693147**2))


@pytest.mark.parametrize(
    ("query", "concise"),
    [
        ("Ana Bell birthplace", True),
        ("mayor of Kelmouth", True),  # 1 stopword of 3
        ("king of the Norland people", True),  # 2 of 5 is 40 %
        ("king of the Norland", False),  # 2 of 4
        ("Norland?", False),
        ("Norland？", False),
        ("Which country Ana Bell", False),
        ("what's Norland", False),
        ("Did Ana Bell move", False),
        ("Will Smith birthplace", True),  # a name
        ("will Norland win", False),
        (" ".join(["word"] * 12), True),
        (" ".join(["word"] * 13), False),
        ("...", False),
        ("", False),
    ],
)
def test_what_a_concise_query_is(query, concise):
    assert is_concise(query) is concise


def test_right_is_the_judges_verdict_and_without_one_cover_em():
    covered = when(THINK + REFLECT + "<answer> in Norland, I think </answer>")
    assert when_to_search_stage1(covered)["answer"] == 1.0
    assert when_to_search_stage1(covered, correct=False)["answer"] == -1.0
    wrong = when(THINK + "<answer> Sudria </answer>")
    assert when_to_search_stage2(wrong, correct=True)["answer"] == 1.0
    # no answer is right by no verdict
    assert when_to_search_stage1(when(THINK), correct=True)["answer"] == -1.0


def test_an_answer_that_lists_everything_is_not_right():
    ten = "Sudria Ostland Westland Kaldor Belmark Corsia Dravia Ellenia Fioria Norland"
    all_ten = when(THINK + f"<answer> {ten} </answer>")
    eleven = when(THINK + f"<answer> Gradia {ten} </answer>")
    assert when_to_search_stage1(all_ten)["answer"] == 1.0
    assert when_to_search_stage1(eleven)["answer"] == -1.0
    eleven.question = Question(
        "1", "?", [f"Gradia {ten}"]
    )  # but a gold of that length may be given
    assert when_to_search_stage1(eleven)["answer"] == 1.0


def test_beta_may_not_let_a_wrong_answer_outrank_a_right_one():
    check_beta(0.3, 6)  # 1.8
    for beta, searches in ((0.5, 4), (0.3, 7), (2.0, 1), (float("nan"), 1)):
        with pytest.raises(InputError, match=r"must stay below 2"):
            check_beta(beta, searches)
    text = THINK + "".join(map(asked, QUERIES[:2])) + ANSWER
    with pytest.raises(InputError, match=r"--beta 1.0 times --max_searches 2 is 2"):
        when_to_search_stage1(when(text), beta=1.0)


# ------------------------------------------------------------------------------------ ARENA by hand


def sections(ids="[1, 4]", analysis="Reference 4 says so.", answer="June 16, 1874"):
    cited = f"<relevance>{ids}</relevance>\n<analysis>{analysis}</analysis>"
    return f"{cited}\n<answer>{answer}</answer>"


def test_arena_pays_three_terms_and_a_bonus_for_all():
    assert arena(ar(sections())) == {"format": 1.0, "answer": 1.0, "relevance": 1.0, "bonus": 10.0}
    assert total(arena(ar(sections()), bonus=0.0)) == 3
    assert total(arena(ar(sections("[4]")))) == 2.5
    assert total(arena(ar(sections("[4]", answer="1873")))) == 1.5
    assert total(arena(ar(sections("[2]", answer="1873")))) == 1
    assert total(arena(ar("June 16, 1874"))) == 0
    # without the relevance term the bonus asks for the other two
    rest = {"format": 1.0, "answer": 1.0, "bonus": 10.0}
    assert arena(ar(sections("[2]")), relevance_reward=False) == rest
    assert total(arena(ar(sections("[1, 4]", answer="1873")), relevance_reward=False)) == 1


@pytest.mark.parametrize(
    ("ids", "numbers", "relevance"),
    [
        ("[1, 4]", {1, 4}, 1.0),
        ("[4,1,4]", {1, 4}, 1.0),
        (" [ 1 , 4 ] ", {1, 4}, 1.0),
        ("[1]", {1}, 0.5),
        ("[1, 4, 9]", {1, 4, 9}, 0.5),
        ("[2, 3]", {2, 3}, 0.0),
        ("[]", set(), 0.0),
        ("1,4", set(), 0.0),
        ("[1 4]", set(), 0.0),
        ("[1, 4], [2]", set(), 0.0),
        ('["1", "4"]', set(), 0.0),
        ("[true, 4]", set(), 0.0),
        ("[1.0, 4]", set(), 0.0),
        ("[-1, 4]", set(), 0.0),
        ("[1, 4,]", set(), 0.0),
        ("references [1, 4]", set(), 0.0),
        ("[" + "9" * 5000 + "]", set(), 0.0),  # Python refuses to read such a number
    ],
)
def test_cited_numbers_are_a_set_in_brackets(ids, numbers, relevance):
    trajectory = ar(sections(ids))
    assert cited(trajectory) == numbers and arena(trajectory)["relevance"] == relevance


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (sections(), True),
        ("\n " + sections() + " \n<|im_end|>", True),
        (sections(analysis="1803 < 1833 and a <b>"), True),
        (sections(ids="1,4"), True),  # unreadable, and yet a section
        (sections() + " done", False),
        ("<think>hm</think>" + sections(), False),
        (sections().replace("\n", " so "), False),
        (sections(analysis="x</analysis> <analysis>y"), False),
        (sections(analysis="<answer>x"), False),
        (sections(analysis="</relevance>"), False),
        (sections(analysis=" "), False),
        # three with something in them, and one more
        ("<relevance></relevance>" + sections(), False),
        (sections(answer=""), False),
        (sections() + sections(), False),
        (
            "<analysis>x</analysis><relevance>[1, 4]</relevance><answer>June 16, 1874</answer>",
            False,
        ),
        ("<relevance>[1, 4]</relevance><answer>June 16, 1874</answer>", False),
        ("", False),
    ],
)
def test_arenas_format_is_three_sections_and_white_space(text, good):
    assert arena(ar(text))["format"] == float(good)
    # the answer counts whether or not the format holds
    if "1874" in text and not good and text.count("<answer>") == 1:
        assert arena(ar(text))["answer"] == 1.0


def test_arena_scores_show_how_exact_the_cited_set_is():
    def scores(ids, **question):
        return list(arena_scores(ar(sections(ids), **question)).values())

    # {1, 4} of {1, 4}; {1, ..., 10}: 2 · 2 / (10 + 2); {4}: 2 · 1 / (1 + 2); none
    assert scores("[1, 4]") == [1.0, 1.0, 1.0, 1.0]
    assert scores(str(list(range(1, 11)))) == [1.0, 0.5, 0.0, pytest.approx(1 / 3)]
    assert scores("[4]") == [1.0, 0.5, 0.0, pytest.approx(2 / 3)]
    assert scores("none") == scores("none", supporting=()) == [1.0, 0.0, 0.0, 0.0]


def test_a_summary_earns_its_mean_rouge():
    summary = sections(answer="The cat sat down.")
    # words 3/4, pairs 1/3, subsequence 3/4: (0.75 + 0.3333 + 0.75) / 3 = 0.6111; no bonus below 1
    trajectory = ar(summary, gold="the cat lay down", task="summary")
    expected = {"format": 1.0, "answer": 11 / 18, "relevance": 1.0, "bonus": 0.0}
    assert arena(trajectory) == pytest.approx(expected)
    assert total(arena(ar(summary, gold="The cat sat down", task="summary"))) == 13


@pytest.mark.parametrize("reward", [r_search, when_to_search_stage1, when_to_search_stage2, arena])
def test_a_reward_under_another_papers_protocol_is_one_clear_line(reward):
    with pytest.raises(InputError, match="protocol ur2"):
        reward(ur2(BOX))


def test_the_older_rewards_bear_a_protocol_without_queries():
    trajectory = ar(sections())
    assert total(r1_searcher_stage1(trajectory)) == 0.0
    assert "unpaired_query_tags" not in ur2_violations(trajectory)


# ----------------------------------------------------------------------------------- TF-IDF by hand

CORPUS = [Document("1", "Ana", "born in town"), Document("2", "Bo", "born in city")]


def similarity(embed, *texts):
    return cosine(embed(list(texts)))[0, 1]


def test_without_a_corpus_every_word_weighs_the_same():
    # (1, 1, 0) and (1, 0, 1): 1 / (√2 · √2)
    assert similarity(tfidf_embedder(), "ana birthplace", "Ana: employer") == pytest.approx(1 / 2)
    assert similarity(tfidf_embedder(), "ana", "bo") == 0.0
    # counts (2, 1) and (1, 1): 3 / (√5 · √2)
    twice = similarity(tfidf_embedder(), "ana ana town", "ana town")
    assert twice == pytest.approx(3 / math.sqrt(10))


def test_a_rare_word_weighs_more_than_a_common_one():
    embed = tfidf_embedder(CORPUS)
    # N = 2: idf(ana) = ln(3/2) + 1 (one document), idf(born) = ln(3/3) + 1 = 1 (both)
    rare = math.log(1.5) + 1
    assert similarity(embed, "ana born", "born") == pytest.approx(1 / math.sqrt(rare**2 + 1))
    assert similarity(embed, "ana born", "ana") == pytest.approx(rare / math.sqrt(rare**2 + 1))


def test_invented_words_do_not_make_a_repeated_query_another_one():
    embed = tfidf_embedder(CORPUS)
    assert similarity(embed, "ana town qqq", "ana town zzz") == pytest.approx(1.0)
    # nothing but invented words: no vector, and yet not free
    assert similarity(embed, "qqq", "zzz") == similarity(embed, "??", "??") == 1.0
    assert similarity(embed, "qqq", "ana") == 0.0
    assert similarity(tfidf_embedder(), "??", "??") == 1.0


# ------------------------------------------------------------------------------------------ by name


def given(**changes):
    """Settings as the command line makes them: of several records."""
    settings = {**vars(RewardSettings()), "protocol": "ur2", "max_searches": 4, **changes}
    return SimpleNamespace(**settings)


def protocol_of(reward):
    names = ("r1_searcher", "r_search", "when_to_search", "arena", "ur2")
    return next(name for name in names if reward.startswith(name))


def score(trajectory, reward, step=0, extras=NOTHING, **changes):
    return REWARDS[reward](trajectory, given(**changes), step, extras)


@pytest.mark.parametrize("reward", REWARDS)
def test_every_reward_by_name_scores_a_trajectory_of_its_protocol(reward):
    components = score(example(protocol_of(reward)), reward)
    assert components and all(isinstance(value, float) for value in components.values())
    check_reward(given(reward=reward, protocol=protocol_of(reward)))


def test_the_settings_and_the_extras_reach_the_reward():
    # "Kelmouth, Norland" for "Norland": F1 2/3 -> 1.3333, EM 0, CEM 1 -> 2; a fallback of 0.25
    trajectory = example("ur2", "Kelmouth, Norland")
    for reward in ("ur2_stage2", "ur2_choice"):
        for metric, expected in (("f1", 4 / 3), ("em", 0.0), ("cem", 2.0)):
            got = score(trajectory, reward, 99, answer_metric=metric, fallback_penalty=0.25)
            assert (got["answer"], got["fallback"]) == (pytest.approx(expected), -0.25)
    # n = 2 searches: 4 for Qwen 7B, 7 for 3B; the choice bonus ends at step 10
    assert score(trajectory, "ur2_stage1")["retrieval"] == 4
    assert score(trajectory, "ur2_stage1", reward_variant="qwen_3b")["retrieval"] == 7
    assert score(trajectory, "ur2_choice", 9)["retrieval"] == 1
    assert score(trajectory, "ur2_choice", 10)["retrieval"] == 0
    halves = Extras(grade=lambda question, answer: 1.0)
    assert score(ur2("\\boxed{about a half}", MATH), "ur2_stage2", extras=halves)["answer"] == 1
    loose = {"format_check": "loose"}
    for reward in ("ur2_stage1", "ur2_stage2", "ur2_choice"):
        assert score(ur2("北 " + BOX), reward, **loose)["format"] == 1
    # the released Llama code takes 1 instead of 2; the released stage 1 adds cover-EM, here +1
    broken = example("r1_searcher", "<think> Norland")
    assert score(broken, "r1_searcher_stage2")["format"] == -2
    assert score(broken, "r1_searcher_stage2_llama")["format"] == -1
    assert score(example("r1_searcher"), "r1_searcher_stage1_code")["answer"] == 1
    assert "answer" not in score(example("r1_searcher"), "r1_searcher_stage1")
    told = example("r_search")
    assert score(told, "r_search", extras=Extras(reader_answer="Norland"))["evidence"] == 1
    assert score(told, "r_search", extras=Extras(reader_answer="Sudria"))["evidence"] == 0
    looked = example("when_to_search")
    assert score(looked, "when_to_search_stage2", beta=0.1)["answer"] == pytest.approx(0.8)
    wrong, alike = Extras(correct=False), Extras(embed=lambda texts: [[3, 4], [1, 0]])
    assert score(looked, "when_to_search_stage1", extras=wrong)["answer"] == pytest.approx(-0.4)
    alike = score(looked, "when_to_search_stage1", extras=alike)
    assert alike["retrieval"] == pytest.approx(-0.6)
    assert score(tell(STORIES[0], "arena"), "arena", bonus=3.0)["bonus"] == 3
    assert "relevance" not in score(example("arena"), "arena", relevance_reward=False)


def test_what_a_reward_needs_can_be_switched_off():
    assert needs(given(reward="ur2_stage1")) == set()
    assert "grade" in needs(given(reward="ur2_stage2"))
    assert {"verdict", "embedder"} <= needs(given(reward="when_to_search_stage1"))
    assert "reader" in needs(given(reward="r_search"))
    assert "reader" not in needs(given(reward="r_search", evidence_reward=False))
    assert needs(given(reward="arena", relevance_reward=False)) == set()


@pytest.mark.parametrize(
    ("reward", "protocol"),
    [
        ("r1_searcher_stage1", "ur2"),
        ("r1_searcher_stage2", "ur2_search"),
        ("r_search", "ur2"),
        ("r_search", "when_to_search"),
        ("when_to_search_stage1", "r_search"),
        ("when_to_search_stage2", "r1_searcher"),
        ("when_to_search_stage1", "arena"),
        ("arena", "ur2"),
        ("arena", "r_search"),
    ],
)
def test_a_reward_that_its_protocol_cannot_be_paid_is_one_line_with_both_flags(reward, protocol):
    said = f"--reward {reward} and --protocol {protocol} do not go together: .*{protocol}"
    with pytest.raises(InputError, match=said) as error:
        check_reward(given(reward=reward, protocol=protocol))
    assert "\n" not in str(error.value)


def test_a_price_that_lets_a_wrong_answer_win_is_refused_where_it_is_paid():
    check_reward(given(beta=1.0, max_searches=9))  # no other reward has the price
    searching = {"reward": "when_to_search_stage2", "protocol": "when_to_search"}
    check_reward(given(**searching, beta=0.4))  # 0.4 · 4 = 1.6
    with pytest.raises(InputError, match=r"--beta 0.3 times --max_searches 7 is 2.1"):
        check_reward(given(**searching, beta=0.3, max_searches=7))


def test_a_sixth_papers_protocol_can_tell_the_example(monkeypatch):
    tags = ("<ask>", "</ask>"), ("<page>", "</page>"), ("<end>", "</end>")
    sixth = Protocol("sixth", *tags, "Ask.", "Answer.", other_tags=(("<plan>", "</plan>"),))
    monkeypatch.setitem(PROTOCOLS, "sixth", sixth)
    for protocol in PROTOCOLS:
        assert example(protocol).answer == "Norland"
    assert [search.fallback for search in example("sixth").searches] == [False, True]
    check_reward(given(protocol="sixth"))


REFERENCES = (Document("1", "Ana", "born in Kelmouth"),)
LETTERED = {"task": "choice", "options": ("elm", "oak")}


@pytest.mark.parametrize(
    ("reward", "question", "said"),
    [
        ("arena", {}, "has no references"),
        ("arena", {"references": REFERENCES}, "names no supporting reference.*`supporting`"),
        ("ur2_choice", {}, "has no options"),
        ("ur2_choice", {"task": "choice"}, "has no options"),
        ("r_search", LETTERED, "is multiple choice"),
        ("when_to_search_stage1", LETTERED, "is multiple choice"),
        ("when_to_search_stage2", LETTERED, "is multiple choice"),
    ],
)
def test_a_question_without_what_the_reward_reads_is_one_line(reward, question, said):
    settings = given(reward=reward, protocol=protocol_of(reward))
    fine = LETTERED if reward == "ur2_choice" else {}
    fine = Question("q6", "?", ["a"], references=REFERENCES, supporting=(1,), **fine)
    with pytest.raises(InputError, match=f"question q7 {said}") as error:
        check_questions([fine, Question("q7", "?", ["a"], **question)], settings)
    assert "\n" not in str(error.value)
    assert check_questions([fine], settings) == [fine]


def test_arena_without_its_relevance_reward_needs_no_supporting_numbers():
    settings = given(reward="arena", protocol="arena", relevance_reward=False)
    check_questions([Question("q", "?", ["a"], references=REFERENCES)], settings)
    assert arena(ar(sections(), supporting=()))["relevance"] == 0.0  # and is not refused one by one


# --------------------------------------------------------------------- orderings the papers rely on


@pytest.mark.parametrize("variant", ["qwen_7b", "qwen_3b", "llama_8b"])
def test_one_valid_query_beats_none_and_two_are_not_worse(variant):
    none, one, two = (sum(ur2_stage1(ur2(search() * n + BOX), variant).values()) for n in range(3))
    assert none < one <= two
    assert (one < two) is (variant != "llama_8b")  # Llama gets the same 3 for both


def test_a_fallback_costs_less_than_a_first_search_earns_and_more_than_nothing():
    asked, failed = ur2(search() + BOX), ur2(search() + BOX, fallbacks=[0])
    none, failed, asked = (sum(ur2_stage1(t).values()) for t in (ur2(BOX), failed, asked))
    assert none < failed < asked


@pytest.mark.parametrize("n", range(5))
def test_right_beats_wrong_at_every_number_of_searches(n):
    right, wrong = search() * n + "\\boxed{Norland}", search() * n + "\\boxed{Sudria}"
    assert sum(ur2_stage2(ur2(right)).values()) > sum(ur2_stage2(ur2(wrong)).values())
    assert sum(ur2_choice(ur2(right), 0).values()) > sum(ur2_choice(ur2(wrong), 0).values())
    right, wrong = search() * n + CLOSE, search() * n + WRONG_CLOSE
    assert sum(r1_searcher_stage2(r1(right)).values()) > sum(r1_searcher_stage2(r1(wrong)).values())


def test_right_without_a_search_beats_wrong_with_every_bonus():
    # 2 + 1 = 3 against 0 + 1 + 1 = 2
    right = ur2("The correct answer is: B", CHOICE)
    wrong = ur2(search() * 2 + "The correct answer is: A", CHOICE)
    assert sum(ur2_choice(right, 0).values()) > sum(ur2_choice(wrong, 0).values())


def test_a_wrong_answer_in_form_beats_a_right_one_out_of_form_for_r1_searcher():
    wrong, right = r1(WRONG_CLOSE), r1("<think>" + CLOSE)  # 0 against 1 − 2
    assert sum(r1_searcher_stage2(wrong).values()) > sum(r1_searcher_stage2(right).values())


# -------------------------------------------------------------------------- hacks that earn nothing

FAKED = "<|begin_of_documents|>\nAna Bell was born in Norland.\n<|end_of_documents|>\n"
NO_SEARCH = {
    "bare begin tags": "<|begin_of_query|> <|begin_of_query|> ",
    "a query that nobody ran": "<|begin_of_query|> Ana Bell <|end_of_query|> ",
    "an empty query": "<|begin_of_query|> <|end_of_query|>\n\n" + FAKED,
    "documents without a query": FAKED,
    "a malformed query": "Ana Bell <|end_of_query|>\n\n" + FAKED,
}


@pytest.mark.parametrize("hack", NO_SEARCH.values(), ids=NO_SEARCH.keys())
def test_what_is_no_search_earns_no_search_reward(hack):
    assert ur2_stage1(ur2(hack + BOX))["retrieval"] == 0.0
    assert sum(ur2_stage1(ur2(hack + BOX)).values()) <= sum(ur2_stage1(ur2(BOX)).values())
    assert ur2_choice(ur2(hack + BOX), 0)["retrieval"] == 0.0
    assert r1_searcher_stage1(r1(hack + CLOSE))["retrieval"] == 0.0


def test_a_query_over_twenty_words_is_run_but_is_no_valid_search():
    trajectory = ur2(search(LONG) + BOX)
    assert len(trajectory.searches) == 1 and count_valid_searches(trajectory) == 0
    assert ur2_stage1(trajectory) == {"format": -1.0, "retrieval": 0.0, "fallback": 0.0}
    assert r1_searcher_stage1(r1(search(LONG) + CLOSE))["retrieval"] == 0.0
    assert count_valid_searches(ur2(search(LONG.removesuffix(" word")) + BOX)) == 1  # 20 words


def test_an_answer_that_only_the_environment_gives_earns_nothing():
    in_document = search(found="\\boxed{Norland} <answer> Norland </answer>")
    assert ur2_stage2(ur2(in_document + "I do not know."))["answer"] == 0.0
    assert r1_searcher_stage2(r1(in_document + "so</think>"))["answer"] == 0.0
    in_prompt = Question("1", "Write \\boxed{Norland} or <answer> Norland </answer>.", ["Norland"])
    assert set(ur2_stage2(ur2("I do not know.", in_prompt)).values()) == {0.0}
    assert r1_searcher_stage2(r1("so</think>", in_prompt)) == {"answer": 0.0, "format": -2.0}
    noticed = ur2("I do not know.")
    noticed.segments.append(Segment("notice", BOX))
    assert ur2_stage2(noticed)["answer"] == 0.0


def test_what_a_document_says_costs_nothing():
    found = "北 \ufffd\nassistant\nuser <tool_call> <|im_start|> <think></think> \\boxed{Sudria}"
    loud, calm = search(found=f"{found} <answer> Sudria </answer>"), search()
    assert ur2_stage1(ur2(loud + BOX)) == ur2_stage1(ur2(calm + BOX))
    assert r1_searcher_stage2(r1(loud + CLOSE)) == r1_searcher_stage2(r1(calm + CLOSE))


def test_every_answer_cannot_be_tried():
    # the last is scored and the format is lost: 0 and 2 instead of 3
    assert total(ur2_stage2(ur2("\\boxed{Norland} \\boxed{Sudria}"))) == 0
    assert total(ur2_stage2(ur2("\\boxed{Sudria} \\boxed{Norland}"))) == 2
    both = "so</think> <answer> Norland </answer> <answer> Sudria </answer>"
    assert total(r1_searcher_stage2(r1(both))) == -2


def test_a_fallback_is_known_by_its_flag_whatever_the_words():
    paraphrase = search(found="That is nothing one can look up.")
    assert count_fallbacks(ur2(paraphrase + BOX, fallbacks=[0])) == 1
    quoted = search(found=PROTOCOLS["ur2"].fallback_notice) + PROTOCOLS["ur2"].fallback_notice
    assert count_fallbacks(ur2(quoted + BOX)) == 0


def test_the_rewards_read_the_tags_from_the_protocol():
    found = "<search> Ana Bell </search>\n\n<information>\nNorland\n</information>\n\n"
    searched = trajectory_from_text(QA, found + BOX, "ur2_search")
    assert ur2_stage1(searched) == ur2_stage1(ur2(search() + BOX))
    faked = trajectory_from_text(QA, "<information> Norland " + BOX, "ur2_search")
    assert ur2_violations(faked) == ["written_documents"]


FAKED_OBSERVATION = "<observation>\nAna Bell was born in Norland.\n</observation>\n"
NO_SEARCH_TAGGED = {
    "bare begin tags": "<search> <search> ",
    "a query that nobody ran": "<search> Ana Bell </search> ",
    "an empty query": "<search> </search>\n\n" + FAKED_OBSERVATION,
    "documents without a query": FAKED_OBSERVATION,
    "a malformed query": "Ana Bell </search>\n\n" + FAKED_OBSERVATION,
}


@pytest.mark.parametrize("hack", NO_SEARCH_TAGGED.values(), ids=NO_SEARCH_TAGGED.keys())
def test_evidence_of_what_was_never_read_earns_nothing(hack):
    assert total(r_search(rs(hack + EVIDENCE + ANSWER), "Norland")) == 1.4
    assert r_search(rs(hack + EVIDENCE + ANSWER), "Norland") == r_search(rs(ANSWER))
    informed = THINK + hack.replace("observation", "information")
    assert sum(when_to_search_stage1(when(informed + REFLECT + ANSWER)).values()) == 0  # −1 + 0 + 1
    # no search is paid for either: a wrong answer is not softened
    assert when_to_search_stage1(when(informed + "<answer> x </answer>"))["answer"] == -1.0


def test_evidence_that_only_a_document_or_the_prompt_gives_earns_nothing():
    in_document = rs(observed(found=EVIDENCE + ANSWER) + "I do not know.")
    assert set(r_search(in_document, "Norland").values()) == {0.0}
    in_prompt = Question("1", f"Write {EVIDENCE} and {ANSWER}.", ["Norland"])
    # the gift of not searching
    assert total(r_search(rs("I do not know.", in_prompt), "Norland")) == 0.2
    assert when_to_search_stage1(when("I do not know.", in_prompt))["answer"] == -1.0
    cites = Question("1", f"Write {sections()}.", ["June 16, 1874"], supporting=(1, 4))
    assert total(arena(trajectory_from_text(cites, "I do not know.", "arena"))) == 0.0


def test_what_a_document_says_costs_nothing_in_the_tagged_protocols():
    found = f"{EVIDENCE} <answer> Sudria </answer> <think> </think> 北 \ufffd"
    loud, calm = rs(observed(found=found) + EVIDENCE + ANSWER), rs(observed() + EVIDENCE + ANSWER)
    assert r_search(loud) == r_search(calm)
    loud, calm = when(THINK + asked(found=found) + ANSWER), when(THINK + asked() + ANSWER)
    assert when_to_search_stage2(loud) == when_to_search_stage2(calm)


def test_every_answer_cannot_be_tried_in_the_tagged_protocols():
    both, other = ANSWER + "<answer> Sudria </answer>", "<answer> Sudria </answer>" + ANSWER
    assert total(r_search(rs(both))) == 0.2 and total(r_search(rs(other))) == 1.2  # instead of 1.4
    # the last is wrong, and the format is lost
    assert total(when_to_search_stage1(when(THINK + both))) == -2
    assert total(when_to_search_stage1(when(THINK + other))) == 0
    tried = sections().replace("</answer>", "</answer><answer>1873</answer>")
    assert total(arena(ar(tried))) == 1  # the relevance alone


def test_text_behind_the_answer_costs_the_format_in_the_tagged_protocols():
    # −1 + 0 + 1 instead of 2
    assert total(when_to_search_stage1(when(THINK + ANSWER + " Sudria"))) == 0
    assert total(arena(ar(sections() + " and 1000 words"))) == 2  # instead of 13


def test_citing_everything_earns_half_of_the_relevance_and_no_bonus():
    assert total(arena(ar(sections(str(list(range(1, 11))))))) == 2.5
    # and every relevance section but the last is nobody's choice
    twice = "<relevance>[1, 4]</relevance>" + sections("[2]")
    assert arena(ar(twice)) == {"format": 0.0, "answer": 1.0, "relevance": 0.0, "bonus": 0.0}


def test_a_repeated_query_costs_what_its_similarity_is():
    text = THINK + asked("Ana Bell birthplace") * 2
    wrong = "<answer> Sudria </answer>"
    # a second, same search softens a wrong answer by 0.3 and costs 1
    assert total(when_to_search_stage1(when(text + wrong))) == 1 - 1 - 1 + 0.6
    assert total(when_to_search_stage1(when(THINK + asked() + wrong))) == 1 + 0 - 1 + 0.3


def test_a_refused_search_counts_for_nothing():
    trajectory = when(THINK + asked() + ANSWER)
    trajectory.refusals.append(Refusal("limit", "one more"))
    assert when_to_search_stage2(trajectory)["answer"] == pytest.approx(1 - 0.3)


def test_a_fallback_hidden_in_a_paraphrase_is_no_evidence():
    # a search like any other to these three: the flag, not the wording, is what a reward looks at
    paraphrase = rs(observed(found="That is nothing one can look up.") + EVIDENCE + ANSWER)
    assert r_search(paraphrase) == r_search(rs(observed() + EVIDENCE + ANSWER))


@pytest.mark.parametrize("n", range(5))
def test_right_beats_wrong_at_every_number_of_searches_and_of_any_other_number(n):
    queries = "".join(map(asked, QUERIES[:n]))
    stages = when_to_search_stage1, when_to_search_stage2
    right = {stage: sum(stage(when(THINK + queries + ANSWER)).values()) for stage in stages}
    for m in range(5):
        wrong = when(THINK + "".join(map(asked, QUERIES[:m])) + "<answer> Sudria </answer>")
        assert all(right[stage] > sum(stage(wrong).values()) for stage in right)
    looked = "".join(observed(query) for query in QUERIES[:n]) + (EVIDENCE if n else "")
    right, wrong = rs(looked + ANSWER), rs(looked + "<answer> Sudria </answer>")
    assert sum(r_search(right).values()) > sum(r_search(wrong).values())


def test_stage_2_prefers_the_fewer_searches_and_stage_1_does_not_mind():
    texts = [when(THINK + "".join(map(asked, QUERIES[:n])) + ANSWER) for n in range(5)]
    costs = [sum(when_to_search_stage2(t).values()) for t in texts]
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 5
    assert len({sum(when_to_search_stage1(t).values()) for t in texts}) == 1


def test_evidence_that_another_model_can_use_beats_no_search():
    searched, known = r_search(rs(observed() + EVIDENCE + ANSWER), "Norland"), r_search(rs(ANSWER))
    assert sum(searched.values()) - sum(known.values()) == pytest.approx(1.0)  # 2.4 − 1.4


# -------------------------------------------------------------------------------- the released code

# row: (our reward, why it is not the code's)
SCHEDULE = "the code ends stage 1's search reward and missing-retrieval fault with step 15"
WHITE_SPACE = "white space around the sections is no fault; the code's pattern refuses it"
LATIN_ONLY = "the code looks for CJK in retrieved text too"
DOCUMENTS = "the code wants a passage in each block, which is the environment's to write"
LONG_ANSWER = "an answer over 10 words breaks the format in every stage and for every model"
ON_PURPOSE = {
    4: (-1.0, SCHEDULE),
    5: (4.0, SCHEDULE),
    8: (-2.0, "a query over 20 words is no valid search: −2 for two, and no retrieval reward"),
    9: (4.0, LATIN_ONLY),
    12: (2.0, "two answers on one line are two answers; the code's pattern sees one"),
    13: (1.0, "a prompt without retrieval pays the format only"),
    31: (3.0, "the code does not normalise a curly apostrophe, its own evaluation does"),
    32: (3.0, "the code's pattern reads to the last brace of the line; we balance braces"),
    38: (0.0, "UR² answers in a box; the code also reads the other paper's tag"),
    44: (0.5, '"both of them" is no letter; the code reads the b'),
    57: (1.0, "no search was run; the code pays a half for the document tags or for the format"),
    58: (2.0, DOCUMENTS),
    59: (1.5, "garbled text breaks the format in every stage; the code tests it in stage 2"),
    62: (1.5, LONG_ANSWER),
    71: (1.0, DOCUMENTS),
    75: (4 / 13 - 1, LONG_ANSWER),
    84: (1.0, DOCUMENTS),
    87: (1.0, 'the word "assistant" stands in a document, not in the model\'s text'),
    96: (13.0, 'a "<" that opens no section is allowed; the code\'s pattern refuses any'),
    97: (13.0, WHITE_SPACE),
    98: (13.0, WHITE_SPACE),
    99: (2.0, "text after the answer breaks the format: 0 + 1 + 1; the code matches a beginning"),
    103: (2.0, "[true, 4] is no list of numbers; the code takes true for 1"),
    109: (1.4, "without a search 0.2 + 0.2; the code asks for no evidence then and finds some"),
    114: (1.4, "faked documents are no search; the code looks for the tag"),
    115: (1.4, 'the box is there, though "and" is wrong; the code takes "and" for its prompt\'s'),
    117: (1.4, "no reader's answer is F1 = 0: 1 + 0 + 0.4; the code crashes"),
}
FALLBACKS = {6: 1, 7: 2, 26: 1, 27: 2}  # rows whose searches all came back as the fallback
TASKS = {"rag": "qa", "math": "math", "history": "choice", "medicine": "choice"}
VERDICTS = {"Judgment: Correct": 2, "Judgment: Partially correct": 1}


def golden_ur2(index, row):
    settings, flags = row["settings"], range(FALLBACKS.get(index, 0))
    question = Question(str(index), "?", [row["gold"]], task=TASKS[settings["kind"]])
    searches = settings.get("retrieve_prompt", True)
    trajectory = ur2(row["response"], question, list(flags), may_search=searches)
    variant = settings.get("variant", "qwen_7b").replace("llama", "llama_8b")
    if settings["stage"] == 1:
        return ur2_stage1(trajectory, variant)
    if settings["stage"] == "mcq":
        return ur2_choice(trajectory, settings.get("step", 0), variant)
    said = settings.get("judge_says")
    return ur2_stage2(trajectory, judge=(lambda question, answer: VERDICTS[said]) if said else None)


def golden_r1(index, row):
    trajectory = r1(row["response"], Question(str(index), "?", [row["gold"]]))
    stage = row["settings"]["stage"]
    if stage == "llama1":
        return r1_searcher_stage1(trajectory, answer_metric="cem")
    penalty = {"llama2": 1.0, "qwen_zero": 2.0}[stage]
    return r1_searcher_stage2(trajectory, format_penalty=penalty)


def golden_r_search(index, row):
    question = Question(str(index), row["settings"]["question"], row["gold"])
    return r_search(rs(row["response"], question), row["settings"]["cross_model_answer"])


def golden_arena(index, row):
    return arena(ar(row["response"], tuple(row["settings"]["supporting"]), row["gold"][0]))


GOLDEN = {
    "ur2": golden_ur2,
    "r1_searcher": golden_r1,
    "r_search": golden_r_search,
    "arena": golden_arena,
}


def test_every_golden_row_is_equal_or_differs_for_a_named_reason():
    path = SHARED / "golden/released_code_rewards.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert len(rows) == 119
    for index, row in enumerate(rows):
        ours = sum(GOLDEN[row["system"]](index, row).values())
        released = row["released_code_reward"]  # or a string: the error that the code ends in
        wanted, reason = ON_PURPOSE.get(index, (released, "equal"))
        assert ours == pytest.approx(wanted, abs=1e-4), (index, reason)
        differs = isinstance(released, str) or abs(ours - released) > 1e-3
        assert index not in ON_PURPOSE or differs, f"row {index} is equal: drop it from the table"


@pytest.mark.parametrize(
    "name", ["r1_searcher_bamboogle_qwen_full_20", "r1_searcher_2wiki_qwen_full_15"]
)
def test_published_transcripts_of_the_trained_model_hold_its_format(name):
    path = SHARED / f"data/predictions/{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}")
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        response = record["gen_text_store"].split("<think>")[-1]  # the prompt ends there
        trajectory = r1(response, Question("1", record["question"], [record["answer"]]))
        assert r1_searcher_format(trajectory) == []
        # a bag: one date is published in another order
        assert f1_score(trajectory.answer, record["pred_ans"]) == 1.0
