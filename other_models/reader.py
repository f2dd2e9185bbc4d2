"""R-Search's frozen reader: what does another model answer from the evidence alone?

    cross-model answer = reader(question, evidence)       R-Search eq. 5 pays its F1: evidence is
    good if a model that did
                                                          not write it can answer from it

The reader is of another family, frozen and greedy, and reads nothing of the trajectory but the
evidence box: no documents, no reasoning. All trajectories of a step are one batch. Without evidence
there is nothing to read: the answer is "", and nobody is asked. A reader that gives no reply counts
as "" too, and in the model's `failures`.

The same reader turns the policy into a search tool (`answer_from_evidence`): evidence of one model,
answer of another.
"""

from __future__ import annotations

import re

from data import Question
from errors import InputError, run_main
from metrics import exact_match, f1_score, last_boxed
from prompts import find_blocks, question_text, without_thinking

INSTRUCTION = (
    "You get a passage and, below it, a question. Answer the question from the passage alone, in a"
    " few words: a name, a date, a number, or yes or no. Reply with the answer only, without an"
    " explanation."
)
_LABEL = re.compile(r"^(?:the )?(?:final )?answer(?: is)?\s*:\s*", re.IGNORECASE)


def reader_text(question: Question, evidence: str) -> str:
    """Evidence first, then the question, and nothing else: a tiny model reads its question last."""
    return f"{evidence.strip()}\n{question_text(question)}"


def read_answer(reply: str | None) -> str:
    """The last <answer> box, the last \\boxed{...}, or the first line that is not blank. No reply
    is "".

    >>> read_answer("Norland\\nbecause it lies there"), read_answer("Well, <answer> Norland </answer> it is.")
    ('Norland', 'Norland')
    """
    reply = without_thinking(reply or "")
    if boxes := find_blocks(reply, "<answer>", "</answer>"):
        return boxes[-1].content
    if (boxed := last_boxed(reply)) is not None:
        return boxed
    first = (
        reply.split("\n")[0].removeprefix("<answer>").strip()
    )  # a box that the token limit left open
    return _LABEL.sub("", first, count=1)


def cross_answers(llm, pairs: list[tuple[Question, str | None]]) -> list[str]:
    """(question, evidence) -> the reader's answer, for all pairs in one batch; "" without
    evidence.
    """
    asked = [i for i, (_, evidence) in enumerate(pairs) if evidence and evidence.strip()]
    replies = llm.ask([(INSTRUCTION, reader_text(*pairs[i])) for i in asked]) if asked else []
    answers = [""] * len(pairs)
    for i, reply in zip(asked, replies, strict=True):
        answers[i] = read_answer(reply)
    return answers


def answer_from_evidence(llm, records: list[dict]) -> list[dict]:
    """R-Search as a tool: records of predictions (question, golds, evidence), answered by `llm` and
    scored again.

    The records come back with the reader's `prediction` and its em and f1 (punctuation deleted:
    R-Search's scorer) as `metrics`; the searcher's own answer is kept as `searcher_prediction`. One
    without evidence is answered "" and scores 0.
    """
    for number, record in enumerate(records, 1):
        if missing := [field for field in ("question", "golds", "evidence") if field not in record]:
            raise InputError(
                f"record {number} has no {missing[0]!r}: give predictions of a protocol with an"
                " evidence box"
            )
    pairs = [
        (Question(str(i), r["question"], r["golds"]), r["evidence"]) for i, r in enumerate(records)
    ]
    return [
        _rescored(record, answer)
        for record, answer in zip(records, cross_answers(llm, pairs), strict=True)
    ]


def _rescored(record: dict, answer: str) -> dict:
    metrics = {
        "em": exact_match(answer, record["golds"], "delete"),
        "f1": f1_score(answer, record["golds"], "delete"),
    }
    return {
        **record,
        "searcher_prediction": record.get("prediction"),
        "prediction": answer,
        "metrics": metrics,
    }


def main() -> None:
    question = Question("demo", "In which country was Ana Bell born?", ["Norland"])

    class Reader:
        """In place of a model: it knows nothing, and finds the country if the passage names it."""

        def ask(self, requests):
            return ["Norland" if "Norland" in text else "I cannot tell" for _, text in requests]

    evidences = [
        "Ana Bell was born in Kelmouth, and Kelmouth lies in Norland.",
        "Ana Bell was born in Kelmouth.",
        None,
    ]
    answers = cross_answers(Reader(), [(question, evidence) for evidence in evidences])
    print(f"{question.question}  gold: {question.answers[0]}\n")
    for evidence, answer in zip(evidences, answers, strict=True):
        print(f"evidence   {evidence or '(none: nobody is asked)'}")
        print(f"reader     {answer!r}   F1 {f1_score(answer, question.answers, 'delete'):.2f}\n")


if __name__ == "__main__":
    run_main(main)
