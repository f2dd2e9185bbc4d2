"""R-Search's frozen reader: what does another model answer from the evidence alone?

    reader's answer = reader(question, evidence)

R-Search eq. 4 pays its F1: evidence is good if a model that did not write it can answer from it.
The reader is of another family, frozen and greedy, and reads the evidence box alone. Without
evidence nobody is asked; then, and without a reply, the answer is "".
"""

import re

from data import Question
from errors import InputError
from metrics import exact_match, f1_score, last_boxed
from other_models.judge import ask_given
from prompts import find_blocks, question_text, without_thinking

INSTRUCTION = (
    "You get a passage and, below it, a question. Answer the question from the passage alone, in a"
    " few words: a name, a date, a number, or yes or no. Reply with the answer only, without an"
    " explanation."
)
_LABEL = re.compile(r"^[\s*]*(?:the )?(?:final )?answer(?: is)?[\s*]*:[\s*]*", re.IGNORECASE)


def reader_text(question: Question, evidence: str) -> str:
    """Evidence first: the tiny models expect their question last."""
    return f"{evidence.strip()}\n{question_text(question)}"


def read_answer(reply: str | None) -> str:
    """The last <answer> box, the last \\boxed{...}, or the first line behind a label; else "".

    >>> read_answer("**Answer:**\\nNorland\\nas told"), read_answer("<answer> Norland </answer>!")
    ('Norland', 'Norland')
    """
    reply = without_thinking(reply or "")
    if boxes := find_blocks(reply, "<answer>", "</answer>"):
        return boxes[-1].content
    if (boxed := last_boxed(reply)) is not None:
        return boxed
    reply = _LABEL.sub("", reply.rpartition("<answer>")[2])  # which the token limit left open
    return reply.strip().partition("\n")[0].strip()


def reader_answers(llm, pairs: list[tuple[Question, str | None]]) -> list[str]:
    texts = [reader_text(*pair) if (pair[1] or "").strip() else None for pair in pairs]
    return [read_answer(reply) for reply in ask_given(llm, INSTRUCTION, texts)]


def add_reader(records: list[dict], llm) -> list[dict]:
    """R-Search as a search tool: the reader's answer from the evidence alone, its em and f1."""
    for number, record in enumerate(records, 1):
        if missing := {"question", "golds", "evidence"} - set(record):
            advice = "give predictions of a protocol with an evidence box"
            raise InputError(f"record {number} has no {min(missing)!r}: {advice}")
    pairs = [(Question("", r["question"], r["golds"]), r["evidence"]) for r in records]
    told = []
    for record, answer in zip(records, reader_answers(llm, pairs), strict=True):
        scores = {"reader_em": exact_match(answer, record["golds"], "delete")}  # as R-Search scores
        scores["reader_f1"] = f1_score(answer, record["golds"], "delete")
        told.append(record | {"metrics": record["metrics"] | scores, "reader_prediction": answer})
    return told
