"""reader.py: the frozen reader sees evidence and question alone, and its reply is cut to the
answer.
"""

import pytest
from conftest import message

from data import Question
from metrics import f1_score
from other_models.reader import INSTRUCTION, add_reader, read_answer, reader_answers

WHERE = Question("q", "In which country was Ana Bell born?", ["Norland"])
EVIDENCE = "Ana Bell was born in Kelmouth. Kelmouth lies in Norland."


class Says:
    """The same reply to every request, or one each; keeps the requests."""

    instruction = ""

    def __init__(self, *replies):
        self.replies, self.asked = replies, []

    def ask(self, requests):
        self.asked += requests
        return list(self.replies) if len(self.replies) > 1 else list(self.replies) * len(requests)


CHOICE = Question("c", "Which?", ["B"], task="choice", options=("Norland", "East"))


@pytest.mark.parametrize(
    "own, asked",
    [
        ("", (INSTRUCTION, "one\nWhich?\nA. Norland\nB. East")),
        ("Be brief.", ("Be brief.", "one\nWhich?\nA. Norland\nB. East")),
        ("Read {evidence}: {question}", ("", "Read one: Which?\nA. Norland\nB. East")),
    ],
)
def test_the_reader_gets_the_evidence_then_the_question_and_nothing_else(own, asked):
    """An instruction of --prompt_file replaces ours; a layout is the whole message."""
    llm = Says("B")
    llm.instruction = own
    assert reader_answers(llm, [(CHOICE, "  one\n")]) == ["B"] and llm.asked == [asked]


def test_no_evidence_or_no_reply_is_an_empty_answer():
    llm = Says("a", None)
    pairs = [(WHERE, None), (WHERE, "one"), (WHERE, ""), (WHERE, " \n"), (WHERE, "two")]
    assert reader_answers(llm, pairs) == ["", "a", "", "", ""]
    assert [text.split("\n")[0] for _, text in llm.asked] == ["one", "two"]


def test_where_all_models_sample_alike_the_reader_does_too():
    """R-Search A.3."""
    llm, asked = Says("B"), {"question": WHERE.question, "golds": ["Norland"], "metrics": {}}
    add_reader([asked | {"evidence": EVIDENCE}], llm, (0.1, 1.0))
    assert llm.asked[0][2:] == (0.1, 1.0)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Norland", "Norland"),
        ("\n Norland \nbecause Kelmouth lies there", "Norland"),
        ("", ""),
        (None, ""),
        ("I read:\n<answer> Norland </answer>", "Norland"),
        ("<answer>A</answer> no: <answer>B</answer>", "B"),
        ("<answer> Norland", "Norland"),
        ("Answer: Norland", "Norland"),
        ("The answer is: Norland", "Norland"),
        ("Answer:\nNorland", "Norland"),
        ("The final answer is:\n\nNorland", "Norland"),
        ("**Answer:**\nNorland\nIt lies there.", "Norland"),
        ("**Answer**: Norland", "Norland"),
        ("<answer>\nNorland", "Norland"),
        ("I read it.\n<answer>Answer: Norland", "Norland"),
        ("Final answer:", ""),
        ("<think>Kelmouth?\n</think>\nNorland", "Norland"),
        ("so \\boxed{Norland}.", "Norland"),
        ("no answer: none", "no answer: none"),
    ],
)
def test_a_reply_is_cut_to_its_answer(reply, answer):
    assert read_answer(reply) == answer


def test_eq_4_reads_the_whole_reply_where_the_variant_says_so():
    # ten words ("the" does not count), of which one is the gold: 2 · 1 / (10 + 1) = 0.18; the
    # first line alone has 1
    reply = "<think>Hm.</think>Rome\nbecause the passage says that it is where she ruled"
    for whole, f1 in ((False, 1.0), (True, 2 / 11)):
        (answer,) = reader_answers(Says(reply), [(WHERE, EVIDENCE)], whole)
        assert f1_score(answer, "Rome", "delete") == pytest.approx(f1)


def test_predictions_of_a_protocol_without_evidence_are_one_line():
    bad = {"id": "q", "question": WHERE.question, "golds": ["Norland"], "prediction": "Ostland"}
    complaint = message(add_reader, [bad | {"evidence": EVIDENCE}, bad], Says("x"))
    assert "record 2 has no 'evidence'" in complaint
