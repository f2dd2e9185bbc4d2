"""R-Search's frozen reader: another model that answers the question from the evidence alone.

    reader's answer = reader(question, evidence)

R-Search eq. 4 rewards the F1 of the reader's answer: evidence is good if a model other than its
writer can answer from it. The reader is frozen and reads only the question and the evidence box; in
the paper it belongs to another model family than the policy. It decodes greedily, except in
eval.py with --decoding paper: there it samples at the policy's temperature (appendix A.3).
The reader's answer is "" if there is no evidence (then it is not asked) or if it does not reply.
"""

import re
from itertools import compress

from data import Question
from errors import InputError
from metrics import exact_match, f1_score, last_boxed
from prompts import fill, find_blocks, message_parts, question_values, without_thinking
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
    """Returns the last <answer> box, else the last \\boxed{...}, else the first line, without a
    label such as "Answer:". With `whole`, as in R-Search's eq. 4, the whole reply is the answer. If
    "Rome" is accepted, a reply of "Rome" and nine other words then has F1 2 / (10 + 1) = 0.18.

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
    text = _LABEL.sub("", reply.rpartition("<answer>")[2])  # </answer> may have been cut off
    return text.strip().partition("\n")[0].strip()


def reader_answers(
    llm, pairs: list[tuple[Question, str | None]], whole=False, sampling=()
) -> list[str]:
    """Returns the reader's answer for each pair (question, evidence). A pair without evidence is
    not sent, and its answer is "". `whole`: see `read_answer`; `sampling`: see `add_reader`.
    """
    read = [bool((evidence or "").strip()) for _, evidence in pairs]
    instruction, layout = message_parts(llm.instruction, INSTRUCTION, LAYOUT)
    texts = [reader_text(*pair, layout) for pair in compress(pairs, read)]
    replies = iter(llm.ask([(instruction, text, *sampling) for text in texts]))
    return [read_answer(next(replies), whole) if given else "" for given in read]


def readings_of(trajectories: list[Trajectory], reader, whole: bool) -> list[str]:
    """Returns the reader's answers. Without a search that succeeded, the policy has invented its
    evidence, which is then not read.
    """
    pairs = [(t.question, t.evidence if t.executed else None) for t in trajectories]
    return reader_answers(reader, pairs, whole)


def add_reader(records: list[dict], llm, sampling=(), whole=False) -> list[dict]:
    """Adds to each record the reader's answer from the evidence alone, and the answer's EM and F1.
    R-Search evaluates the policy as a search tool in this way (section 5.1).

    sampling   (temperature, top_p) of the reader; () decodes greedily
    whole      see `read_answer`
    """
    for number, record in enumerate(records, 1):
        if "evidence" not in record:
            raise InputError(
                f"record {number} has no 'evidence': give predictions of a protocol with an "
                "evidence box"
            )
    pairs = [(Question("", r["question"], r["golds"]), r["evidence"]) for r in records]
    read = []
    for record, answer in zip(records, reader_answers(llm, pairs, whole, sampling), strict=True):
        scores = {"reader_em": exact_match(answer, record["golds"], "delete")}  # as R-Search scores
        scores["reader_f1"] = f1_score(answer, record["golds"], "delete")
        read.append(record | {"metrics": record["metrics"] | scores, "reader_prediction": answer})
    return read
