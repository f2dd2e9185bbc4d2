"""R-Search's frozen reader: what does another model answer from the evidence alone?

    reader's answer = reader(question, evidence)

R-Search eq. 4 rewards the F1 of the reader's answer: evidence is good if a model that did not write
it can answer from it. The reader is frozen, belongs to another family, and reads only the evidence
box. It decodes greedily, except in an evaluation with --decoding paper, where all models sample
with the same settings (appendix A.3). Without evidence the reader is not asked; then, and when
there is no reply, the answer is "".
"""

import re

from data import Question
from errors import InputError
from metrics import exact_match, f1_score, last_boxed
from prompts import fill, find_blocks, gaps_of, question_values, without_thinking
from trajectory import Trajectory

INSTRUCTION = (
    "You get a passage and, below it, a question. Answer the question from the passage alone, in a"
    " few words: a name, a date, a number, or yes or no. Reply with the answer only, without an"
    " explanation."
)
_LABEL = re.compile(r"^[\s*]*(?:the )?(?:final )?answer(?: is)?[\s*]*:[\s*]*", re.IGNORECASE)


LAYOUT = "{evidence}\n{question}"  # the tiny models expect their question last


def reader_text(question: Question, evidence: str, layout: str = LAYOUT) -> str:
    return fill(layout, question_values(question, layout) | {"evidence": evidence.strip()})


def read_answer(reply: str | None, whole: bool = False) -> str:
    """Returns the last <answer> box, the last \\boxed{...}, or the first line after a label; else
    "". A reply answers in its first line, and the text after that line is not part of the answer:
    "Rome" and a reason in nine other words have F1 2 / (10 + 1) = 0.18 for "Rome" if the reply is
    read as a `whole`, as R-Search's eq. 4 reads it.

    >>> read_answer("**Answer:**\\nNorland\\nas told"), read_answer("<answer> Norland </answer>!")
    ('Norland', 'Norland')
    """
    reply = without_thinking(reply or "")
    if whole:
        return reply
    if boxes := find_blocks(reply, "<answer>", "</answer>"):
        return boxes[-1].content
    if (boxed := last_boxed(reply)) is not None:
        return boxed
    text = _LABEL.sub("", reply.rpartition("<answer>")[2])  # the limit may have cut the end tag off
    return text.strip().partition("\n")[0].strip()


def reader_answers(
    llm, pairs: list[tuple[Question, str | None]], whole=False, sampling=()
) -> list[str]:
    """Returns what `read_answer` reads in the reply about each (question, evidence); a pair without
    evidence is not sent.
    """
    given = {i: pair for i, pair in enumerate(pairs) if (pair[1] or "").strip()}
    custom = llm.instruction  # from --prompt_file; a layout is the whole message
    layout, instruction = (custom, "") if gaps_of(custom) else (LAYOUT, custom or INSTRUCTION)
    requests = [(instruction, reader_text(*pair, layout), *sampling) for pair in given.values()]
    replies = dict(zip(given, llm.ask(requests) if requests else [], strict=True))
    return [read_answer(replies.get(i), whole) for i in range(len(pairs))]


def readings_of(trajectories: list[Trajectory], reader, whole: bool) -> list[str]:
    """Returns the reader's answers. Evidence without a search was invented, so it is not read."""
    pairs = [(t.question, t.evidence if t.executed else None) for t in trajectories]
    return reader_answers(reader, pairs, whole)


def add_reader(records: list[dict], llm, sampling=()) -> list[dict]:
    """Adds the reader's answers from the evidence alone (R-Search as a search tool) and their
    scores.

    sampling   (temperature, top_p) of the reader; () decodes greedily
    """
    for number, record in enumerate(records, 1):
        if "evidence" not in record:
            raise InputError(
                f"record {number} has no 'evidence': give predictions of a protocol with an "
                "evidence box"
            )
    pairs = [(Question("", r["question"], r["golds"]), r["evidence"]) for r in records]
    read = []
    for record, answer in zip(records, reader_answers(llm, pairs, sampling=sampling), strict=True):
        scores = {"reader_em": exact_match(answer, record["golds"], "delete")}  # as R-Search scores
        scores["reader_f1"] = f1_score(answer, record["golds"], "delete")
        read.append(record | {"metrics": record["metrics"] | scores, "reader_prediction": answer})
    return read
