"""Tests reader.py: the frozen reader sees only the evidence and the question, and the answer is
parsed from its reply.
"""

import pytest
from conftest import ScriptedModel, message

from data import Question
from other_models.reader import INSTRUCTION, add_reader, read_answer, reader_answers

WHERE = Question("q", "In which country was Ana Bell born?", ["Norland"])
EVIDENCE = "Ana Bell was born in Kelmouth. Kelmouth lies in Norland."


CHOICE = Question("c", "Which?", ["B"], task="choice", options=("Norland", "East"))


@pytest.mark.parametrize(
    "own, expected",
    [
        ("", (INSTRUCTION, "one\nWhich?\nA. Norland\nB. East")),
        ("Be brief.", ("Be brief.", "one\nWhich?\nA. Norland\nB. East")),
        ("Read {evidence}: {question}", ("", "Read one: Which?\nA. Norland\nB. East")),
    ],
)
def test_the_reader_gets_the_evidence_then_the_question_and_nothing_else(own, expected):
    """An instruction from --prompt_file replaces ours; a layout is the whole message."""
    llm = ScriptedModel(lambda _: "B")
    llm.instruction = own
    assert reader_answers(llm, [(CHOICE, "  one\n")]) == ["B"] and llm.batches == [[expected]]


def test_no_evidence_or_no_reply_is_an_empty_answer():
    llm = ScriptedModel(lambda text: "a" if text.startswith("one") else None)
    pairs = [(WHERE, None), (WHERE, "one"), (WHERE, ""), (WHERE, " \n"), (WHERE, "two")]
    assert reader_answers(llm, pairs) == ["", "a", "", "", ""]
    assert [text.split("\n")[0] for _, text in llm.batches[0]] == ["one", "two"]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("\n Norland \nbecause Kelmouth lies there", "Norland"),
        (None, ""),
        ("I read:\n<answer> Norland </answer>", "Norland"),
        ("<answer>A</answer> no: <answer>B</answer>", "B"),
        ("<answer> Norland", "Norland"),
        ("Answer: Norland", "Norland"),
        ("The final answer is:\n\nNorland", "Norland"),
        ("**Answer:**\nNorland\nIt lies there.", "Norland"),
        ("I read it.\n<answer>Answer: Norland", "Norland"),
        ("Final answer:", ""),
        ("<think>Kelmouth?\n</think>\nNorland", "Norland"),
        ("so \\boxed{Norland}.", "Norland"),
        ("no answer: none", "no answer: none"),
    ],
)
def test_a_reply_is_cut_to_its_answer(reply, answer):
    assert read_answer(reply) == answer


def test_in_evaluation_a_reply_is_trimmed_unless_the_whole_reply_is_the_answer():
    record = {"question": WHERE.question, "golds": ["Norland"], "metrics": {}, "evidence": EVIDENCE}
    reply = "<think>Hm.</think>Norland\nas told"
    for whole, answer in ((False, "Norland"), (True, "Norland\nas told")):
        (read,) = add_reader([record], ScriptedModel(lambda _: reply), whole=whole)
        # F1 of the three words is 2 · 1 / (3 + 1) = 0.5.
        assert read["reader_prediction"] == answer
        assert read["metrics"] == {"reader_em": 1.0 - whole, "reader_f1": 1.0 - whole / 2}


def test_predictions_of_a_protocol_without_evidence_are_an_error():
    error_line = message(add_reader, [{"evidence": EVIDENCE}, {}], ScriptedModel(None))
    assert "record 2 has no 'evidence'" in error_line
