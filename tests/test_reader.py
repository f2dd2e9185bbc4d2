"""reader.py: the frozen reader sees evidence and question alone, and its reply is cut to the
answer.
"""

import pytest

from data import Question
from errors import InputError
from metrics import f1_score
from other_models.llm import LocalLLM
from other_models.reader import INSTRUCTION, add_reader, read_answer, reader_answers

WHERE = Question("q", "In which country was Ana Bell born?", ["Norland"])
EVIDENCE = "Ana Bell was born in Kelmouth. Kelmouth lies in Norland."


class Says:
    """The same reply to every request, or one each; keeps the batches."""

    def __init__(self, *replies):
        self.replies, self.batches = replies, []

    def ask(self, requests, readable=None):
        self.batches.append(requests)
        return list(self.replies) if len(self.replies) > 1 else list(self.replies) * len(requests)


def test_the_reader_gets_the_evidence_then_the_question_and_nothing_else():
    llm, choice = (
        Says("B"),
        Question("c", "Which?", ["B"], task="choice", options=("Norland", "East")),
    )
    assert reader_answers(llm, [(WHERE, f"  {EVIDENCE}\n"), (choice, "one")]) == ["B", "B"]
    texts = (f"{EVIDENCE}\nIn which country was Ana Bell born?", "one\nWhich?\nA. Norland\nB. East")
    assert llm.batches == [[(INSTRUCTION, text) for text in texts]]


def test_all_pairs_are_one_batch_and_no_evidence_or_no_reply_is_an_empty_answer():
    llm = Says("a", None)
    pairs = [(WHERE, None), (WHERE, "one"), (WHERE, ""), (WHERE, " \n"), (WHERE, "two")]
    assert reader_answers(llm, pairs) == ["", "a", "", "", ""]
    (batch,) = llm.batches
    assert [text.split("\n")[0] for _, text in batch] == ["one", "two"]
    assert reader_answers(llm, [(WHERE, None)]) == [""] and reader_answers(llm, []) == []
    assert len(llm.batches) == 1  # nobody else was asked


def test_where_all_models_sample_alike_the_reader_does_too():
    """R-Search A.3."""
    llm, asked = Says("B"), {"question": WHERE.question, "golds": ["Norland"], "metrics": {}}
    add_reader([asked | {"evidence": EVIDENCE}], llm, (0.1, 1.0))
    assert llm.batches[0][0][2:] == (0.1, 1.0)


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


def test_the_built_in_world_s_tiny_model_reads_evidence_and_question(toy_policy, toy_tokenizer):
    llm = LocalLLM(toy_policy, toy_tokenizer, max_tokens=6)
    answers = reader_answers(llm, [(WHERE, "kelmouth lies in norland ."), (WHERE, None)])
    assert isinstance(answers[0], str) and answers[1] == "" and llm.asked == 1


def test_predictions_of_a_protocol_without_evidence_are_one_line():
    bad = {"id": "q", "question": WHERE.question, "golds": ["Norland"], "prediction": "Ostland"}
    with pytest.raises(InputError, match="record 2 has no 'evidence'"):
        add_reader([bad | {"evidence": EVIDENCE}, bad], Says("x"))
