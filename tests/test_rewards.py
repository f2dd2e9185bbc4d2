"""rewards.py: the worked number of every formula, the orderings the papers rely on, and the hacks that must earn nothing."""

import doctest
import json
from pathlib import Path

import pytest

import rewards
from data import Document, InputError, Question
from metrics import f1_score
from prompts import PROTOCOLS
from rewards import (
    count_fallbacks,
    count_valid_searches,
    r1_searcher_format,
    r1_searcher_stage1,
    r1_searcher_stage2,
    ur2_choice,
    ur2_stage1,
    ur2_stage2,
    ur2_violations,
)
from rollout import Refusal, Segment, trajectory_from_text

SHARED = Path(__file__).parents[2] / "shared"
QA = Question("1", "In which country was Ana Bell born?", ["Norland"])
MATH = Question("2", "Half of one?", ["0.5"], task="math")
CHOICE = Question("3", "Which tree?", ["B"], task="choice", options=("elm", "oak", "ash"))
LONG = " ".join(["word"] * 21)


def search(query="Ana Bell birthplace", found="Ana Bell was born in Kelmouth, Norland."):
    return f"<|begin_of_query|> {query} <|end_of_query|>\n\n<|begin_of_documents|>\n{found}\n<|end_of_documents|>\n\n"


def ur2(text, question=QA, fallbacks=(), retrieval=True):
    return trajectory_from_text(question, text, "ur2", fallbacks, retrieval)


def r1(text, question=QA):
    return trajectory_from_text(question, text, "r1_searcher")


def total(components):
    return pytest.approx(sum(components.values()))


BOX = "So \\boxed{Norland}"
CLOSE = "so</think>\n\n<answer> Norland </answer>"


def test_the_docstring_examples_are_true():
    assert doctest.testmod(rewards).failed == 0


def test_the_file_shows_one_story_under_every_reward(capsys):
    rewards.main()
    lines = capsys.readouterr().out.splitlines()
    # stage 1: 1 + 4 − 0.5; stage 2: F1 2/3, so 4/3 + 1 − 0.5; choice: one more; R1-Searcher: 1 and F1
    assert lines[-1].split() == ["reward", "+4.500", "+1.833", "+2.833", "+1.000", "+0.667"]
    assert len(lines) <= 24 and max(map(len, lines)) <= 100  # one screen


# ------------------------------------------------------------------------------------------------- UR² by hand

@pytest.mark.parametrize(
    ("variant", "by_searches"), [("qwen_7b", (-1, 4, 5, 5)), ("qwen_3b", (-1, 6, 8, 8)), ("llama_8b", (-1, 4, 4, 4))]
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


@pytest.mark.parametrize("how", ["argument", "trajectory"])
def test_a_prompt_without_retrieval_pays_the_format_only(how):
    argument, own = how != "argument", how != "trajectory"
    # no missing retrieval there, no −v, and a search earns nothing: 1, 1 and 0
    for text, reward in ((BOX, 1), (search() * 2 + BOX, 1), ("no box <|im_start|>", 0)):
        assert reward == total(ur2_stage1(ur2(text, retrieval=own), retrieval=argument))


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

    assert total(ur2_stage2(ur2("\\boxed{about a half}", MATH), judge=judge)) == 2  # partly 1 + format 1
    assert total(ur2_stage2(ur2("\\boxed{1/2}", MATH), judge=judge)) == 3  # equal: nobody is asked
    assert total(ur2_stage2(ur2("no box", MATH), judge=judge)) == 0  # no answer: nobody is asked
    assert asked == ["about a half"]


def test_missing_retrieval_is_a_fault_in_stage_1_only():
    assert ur2_violations(ur2(BOX)) == [] and ur2_violations(ur2(BOX), search_required=True) == ["missing_retrieval"]
    assert ur2_stage2(ur2(BOX))["format"] == 1.0


def test_each_fallback_costs_half_in_every_stage():
    trajectory = ur2(search() * 3 + BOX, fallbacks=[0, 2])
    for components in (ur2_stage1(trajectory), ur2_stage2(trajectory), ur2_choice(trajectory, 0)):
        assert components["fallback"] == -1.0
    for components in (ur2_stage1(trajectory, fallback_penalty=0.25), ur2_stage2(trajectory, fallback_penalty=0.25)):
        assert components["fallback"] == -0.5


def test_the_choice_bonus_ends_with_its_steps():
    for n, bonus in enumerate((0.0, 0.5, 1.0, 1.0)):
        assert ur2_choice(ur2(search() * n + "The correct answer is: B", CHOICE), 9)["retrieval"] == bonus
    two = ur2(search() * 2 + "The correct answer is: B", CHOICE)
    assert total(ur2_choice(two, 9)) == 4  # 2 + 1 + 1
    assert total(ur2_choice(two, 10)) == 3
    assert total(ur2_choice(two, 14, "qwen_3b")) == 4 and total(ur2_choice(two, 15, "qwen_3b")) == 3


def test_unknown_names_are_one_line_errors():
    with pytest.raises(InputError, match="qwen_9b"):
        ur2_stage1(ur2(BOX), "qwen_9b")
    with pytest.raises(InputError, match="rouge"):
        r1_searcher_stage2(r1(CLOSE), "rouge")


# ------------------------------------------------------------------------------------------------ UR²: violations

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
        ("<|begin_of_query|> a <|begin_of_query|> b <|end_of_query|> " + BOX, ["unpaired_query_tags"]),
        ("<|end_of_documents|> " + BOX, ["written_documents"]),
        (search(LONG) + search(LONG) + BOX, ["long_query", "long_query"]),
        (search() * 4 + BOX, []),
        (search() * 5 + BOX, ["too_many_queries"]),
        ("x\nuser\nagain " + BOX, ["illegal_user_turn"]),
        ("x\nusers like it " + BOX, []),
        ("the user asks " + BOX, []),
        (search() + "assistant\n" + BOX, ["illegal_assistant_turn"]),  # the newline before it is the environment's
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


@pytest.mark.parametrize(("answer", "good"), [("B", True), ("(B).<|im_end|>", True), ("both of them", False), ("oak", False)])
def test_a_choice_is_answered_by_one_letter(answer, good):
    assert (ur2_violations(ur2(f"The correct answer is: {answer}", CHOICE)) == []) is good


def test_a_script_that_the_question_or_a_document_uses_is_not_garbled():
    assert ur2_violations(ur2(search(found="北 is north") + "北 " + BOX)) == []
    shown = {"question": "北?"}, {"options": ("北",)}, {"references": (Document("1", "北", ""),)}
    for question in (Question(**{"id": "1", "question": "?", "answers": ["x"], **place}) for place in shown):
        assert ur2_violations(ur2("北 \\boxed{x}", question)) == []
        assert ur2_violations(ur2("север \\boxed{x}", question)) == ["garbled_text"]


def test_queries_refused_for_the_limit_count_as_queries():
    trajectory = ur2(search() * 4 + BOX)
    trajectory.refusals.append(Refusal("limit", "one more"))
    assert ur2_violations(trajectory) == ["too_many_queries"]
    assert count_valid_searches(trajectory) == 4


def test_a_loop_of_illegal_tokens_is_one_violation():
    assert ur2_violations(ur2("<tool_call>" * 100 + BOX)) == ["illegal_tool_call"]


# ------------------------------------------------------------------------------------------ R1-Searcher by hand

def test_r1_searcher_stage1_is_a_half_for_searching_and_a_half_for_the_format():
    assert total(r1_searcher_stage1(r1(search() + CLOSE))) == 1.0
    assert total(r1_searcher_stage1(r1(CLOSE))) == 0.5
    assert total(r1_searcher_stage1(r1(search() + "Norland"))) == 0.5
    assert total(r1_searcher_stage1(r1("Norland"))) == 0.0


def test_r1_searcher_stage1_pays_a_wrong_answer_the_same():
    assert r1_searcher_stage1(r1(search() + CLOSE)) == r1_searcher_stage1(r1(search() + CLOSE.replace("Norland", "Sudria")))


def test_r1_searcher_stage2_is_f1_less_two_for_a_fault():
    assert total(r1_searcher_stage2(r1(search() + CLOSE))) == 1.0
    # "Kelmouth, Norland": F1 = 2/3; a second </think> is a fault: 2/3 − 2 = −4/3
    partly = CLOSE.replace("Norland", "Kelmouth, Norland")
    assert total(r1_searcher_stage2(r1(partly))) == 2 / 3
    assert total(r1_searcher_stage2(r1("</think>" + partly))) == -4 / 3
    assert total(r1_searcher_stage2(r1("so</think> Norland"))) == -2.0  # no tags: F1 = 0


def test_r1_searcher_variants_are_named_switches():
    right, wrong = r1(search() + CLOSE), r1(search() + CLOSE.replace("Norland", "Sudria"))
    # released stage 1: 0.5 + 0.5 ± 1
    assert total(r1_searcher_stage1(right, "cem")) == 2.0 and total(r1_searcher_stage1(wrong, "cem")) == 0.0
    # table 5: +1 / −1
    assert total(r1_searcher_stage2(right, "em")) == 1.0 and total(r1_searcher_stage2(wrong, "em")) == -1.0
    cover = r1(CLOSE.replace("Norland", "Kelmouth, Norland"))
    assert total(r1_searcher_stage2(cover, "em")) == -1.0 and total(r1_searcher_stage2(cover, "cem")) == 1.0
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
        (CLOSE.replace("Norland", "<|begin_of_documents|>"), ["written_documents", "tag_in_answer"]),
        ("北" + CLOSE, ["garbled_text"]),
        ("<|begin_of_query|> where" + CLOSE, ["unpaired_query_tags"]),
    ],
)
def test_r1_searcher_names_what_is_wrong_with_a_format(text, faults):
    assert r1_searcher_format(r1(text)) == faults


# ------------------------------------------------------------------------------------ orderings the papers rely on

@pytest.mark.parametrize("variant", ["qwen_7b", "qwen_3b", "llama_8b"])
def test_one_valid_query_beats_none_and_two_are_not_worse(variant):
    none, one, two = (sum(ur2_stage1(ur2(search() * n + BOX), variant).values()) for n in range(3))
    assert none < one <= two
    assert (one < two) is (variant != "llama_8b")  # Llama gets the same 3 for both


def test_a_fallback_costs_less_than_a_first_search_earns_and_more_than_nothing():
    asked, failed, none = (
        sum(ur2_stage1(t).values()) for t in (ur2(search() + BOX), ur2(search() + BOX, fallbacks=[0]), ur2(BOX))
    )
    assert none < failed < asked


@pytest.mark.parametrize("n", range(5))
def test_right_beats_wrong_at_every_number_of_searches(n):
    right, wrong = search() * n + "\\boxed{Norland}", search() * n + "\\boxed{Sudria}"
    assert sum(ur2_stage2(ur2(right)).values()) > sum(ur2_stage2(ur2(wrong)).values())
    assert sum(ur2_choice(ur2(right), 0).values()) > sum(ur2_choice(ur2(wrong), 0).values())
    right, wrong = search() * n + CLOSE, search() * n + CLOSE.replace("Norland", "Sudria")
    assert sum(r1_searcher_stage2(r1(right)).values()) > sum(r1_searcher_stage2(r1(wrong)).values())


def test_right_without_a_search_beats_wrong_with_every_bonus():
    # 2 + 1 = 3 against 0 + 1 + 1 = 2
    right, wrong = ur2("The correct answer is: B", CHOICE), ur2(search() * 2 + "The correct answer is: A", CHOICE)
    assert sum(ur2_choice(right, 0).values()) > sum(ur2_choice(wrong, 0).values())


def test_a_wrong_answer_in_form_beats_a_right_one_out_of_form_for_r1_searcher():
    wrong, right = r1(CLOSE.replace("Norland", "Sudria")), r1("<think>" + CLOSE)  # 0 against 1 − 2
    assert sum(r1_searcher_stage2(wrong).values()) > sum(r1_searcher_stage2(right).values())


# --------------------------------------------------------------------------------------- hacks that earn nothing

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
    assert ur2_stage2(ur2("I do not know.", in_prompt)) == {"answer": 0.0, "format": 0.0, "fallback": 0.0}
    assert r1_searcher_stage2(r1("so</think>", in_prompt)) == {"answer": 0.0, "format": -2.0}
    noticed = ur2("I do not know.")
    noticed.segments.append(Segment("notice", BOX))
    assert ur2_stage2(noticed)["answer"] == 0.0


def test_what_a_document_says_costs_nothing():
    found = "北 \ufffd\nassistant\nuser <tool_call> <|im_start|> <think></think> \\boxed{Sudria} <answer> Sudria </answer>"
    assert ur2_stage1(ur2(search(found=found) + BOX)) == ur2_stage1(ur2(search() + BOX))
    assert r1_searcher_stage2(r1(search(found=found) + CLOSE)) == r1_searcher_stage2(r1(search() + CLOSE))


def test_every_answer_cannot_be_tried():
    # the last is scored and the format is lost: 0 and 2 instead of 3
    assert total(ur2_stage2(ur2("\\boxed{Norland} \\boxed{Sudria}"))) == 0
    assert total(ur2_stage2(ur2("\\boxed{Sudria} \\boxed{Norland}"))) == 2
    both = "so</think> <answer> Norland </answer> <answer> Sudria </answer>"
    assert total(r1_searcher_stage2(r1(both))) == -2


def test_text_behind_the_answer_costs_the_format():
    assert total(r1_searcher_stage1(r1(CLOSE + " Norland, Sudria"))) == 0.0


def test_a_fallback_is_known_by_its_flag_whatever_the_words():
    paraphrase = search(found="That is nothing one can look up.")
    assert count_fallbacks(ur2(paraphrase + BOX, fallbacks=[0])) == 1
    quoted = search(found=PROTOCOLS["ur2"].fallback_notice) + PROTOCOLS["ur2"].fallback_notice
    assert count_fallbacks(ur2(quoted + BOX)) == 0


def test_the_rewards_read_the_tags_from_the_protocol():
    protocol = PROTOCOLS["ur2_search"]
    text = "<search> Ana Bell </search>\n\n<information>\nNorland\n</information>\n\n"
    assert ur2_stage1(trajectory_from_text(QA, text + BOX, protocol)) == ur2_stage1(ur2(search() + BOX))
    assert ur2_violations(trajectory_from_text(QA, "<information> Norland " + BOX, protocol)) == ["written_documents"]


# -------------------------------------------------------------------------------------------- the released code

SCHEDULE = "the code ends stage 1's search reward and its missing-retrieval fault with step 15; the paper gives no end"
LATIN_ONLY = "the code looks for CJK in retrieved text too"
DOCUMENTS = "the code wants a passage in each block; what the environment writes is not the model's fault"
ON_PURPOSE = {  # row: (our reward, why it is not the code's)
    4: (-1.0, SCHEDULE),
    5: (4.0, SCHEDULE),
    8: (-2.0, "a query over 20 words is no valid search: −2 for two of them, and no retrieval reward"),
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
    62: (1.5, "an answer over 10 words breaks the format in every stage and for every model"),
    71: (1.0, DOCUMENTS),
    75: (4 / 13 - 1, "an answer over 10 words breaks the format in every stage and for every model"),
    84: (1.0, DOCUMENTS),
    87: (1.0, 'the word "assistant" stands in a document, not in the model\'s text'),
}
FALLBACKS = {6: 1, 7: 2, 26: 1, 27: 2}  # rows whose searches all came back as the fallback
TASKS = {"rag": "qa", "math": "math", "history": "choice", "medicine": "choice"}
VERDICTS = {"Judgment: Correct": 2, "Judgment: Partially correct": 1}


def golden_ur2(index, row):
    settings = row["settings"]
    question = Question(str(index), "?", [row["gold"]], task=TASKS[settings["kind"]])
    flags = range(FALLBACKS.get(index, 0))
    trajectory = ur2(row["response"], question, fallbacks=list(flags), retrieval=settings.get("retrieve_prompt", True))
    variant = settings.get("variant", "qwen_7b").replace("llama", "llama_8b")
    if settings["stage"] == 1:
        return ur2_stage1(trajectory, variant)
    if settings["stage"] == "mcq":
        return ur2_choice(trajectory, settings.get("step", 0), variant)
    said = settings.get("judge_says")
    return ur2_stage2(trajectory, judge=(lambda question, answer: VERDICTS[said]) if said else None)


def golden_r1(index, row):
    trajectory = r1(row["response"], Question(str(index), "?", [row["gold"]]))
    if row["settings"]["stage"] == "llama1":
        return r1_searcher_stage1(trajectory, answer_metric="cem")
    return r1_searcher_stage2(trajectory, format_penalty={"llama2": 1.0, "qwen_zero": 2.0}[row["settings"]["stage"]])


def test_every_golden_row_is_equal_or_differs_for_a_named_reason():
    path = SHARED / "golden/released_code_rewards.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    score = {"ur2": golden_ur2, "r1_searcher": golden_r1}
    rows = [(i, row) for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))) if row["system"] in score]
    assert len(rows) == 90
    for index, row in rows:
        ours, released = sum(score[row["system"]](index, row).values()), row["released_code_reward"]
        wanted, reason = ON_PURPOSE.get(index, (released, "equal"))
        assert ours == pytest.approx(wanted, abs=1e-4), (index, reason)
        assert index not in ON_PURPOSE or abs(ours - released) > 1e-3, f"row {index} is equal now: drop it from the table"


@pytest.mark.parametrize("name", ["r1_searcher_bamboogle_qwen_full_20", "r1_searcher_2wiki_qwen_full_15"])
def test_published_transcripts_of_the_trained_model_hold_its_format(name):
    path = SHARED / f"data/predictions/{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}")
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        response = record["gen_text_store"].split("<think>")[-1]  # the prompt ends there
        trajectory = r1(response, Question("1", record["question"], [record["answer"]]))
        assert r1_searcher_format(trajectory) == []
        assert f1_score(trajectory.answer, record["pred_ans"]) == 1.0  # a bag: one date is published in another order
