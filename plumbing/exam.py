"""Asks a model the same questions before and after training, in this process.

Beside it stands plain RAG: the same model reads what one search for the whole question finds, and
answers at once.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from data import Question, SearchRequest, draw_some
from plumbing.build import choose_generate
from plumbing.report import summarise, table
from prompts import Protocol, number_documents, tag_pair
from rollout import Environment, rollout
from trajectory import Segment, Trajectory
from trajectory_metrics import prediction_record

RAG = Protocol(
    "baseline_ur2",
    None,
    None,
    tag_pair("answer"),
    "Read the passages and answer the question in a few words: a name, a date, a number, yes or no."
    " Write nothing but <answer> your answer </answer>.",
    "",
)


def set_aside(questions: list[Question], share: float, seed: int) -> tuple[list, list]:
    """Returns the questions to train on, and a random share of them that is kept for the exam."""
    count = int(share * len(questions))
    aside = draw_some(questions, count, f"{seed} aside") if count else []
    kept = {question.id for question in aside}
    return [question for question in questions if question.id not in kept], aside


class Exam:
    """Asks a model the same questions several times, and keeps the records of all answers."""

    def __init__(self, policy, environment: Environment, questions: Sequence[Question]):
        self.environment, self.questions, self.records = environment, questions, []
        way = choose_generate(environment.settings)
        self.answer = partial(rollout, policy, seed=environment.settings.seed, generate=way)

    def before(self) -> None:
        if self.questions:
            self.take("before")
            self.take_with_plain_rag()

    def after(self, name: str) -> None:
        """Repeats the exam and prints the table of all answers."""
        if self.questions:
            self.take(name)
            columns = ("em", "f1", "cem", "searches", "format")
            print(table(summarise(self.records), head="model", columns=columns))

    def take(self, name: str) -> None:
        """Answers the questions as a rollout does. Prints the mean −log π of the sampled tokens:
        near 0, all trajectories of a group would be the same.
        """
        rows = self.answer(self.environment, self.questions)
        surprise = -sum(sum(row.logprobs) for row in rows)
        print(f"{name}: entropy {surprise / sum(sum(r.response_mask) for r in rows):.2f} per token")
        self.keep(name, rows)

    def take_with_plain_rag(self) -> None:
        """Lets the model read what one search for the question finds, and answer greedily. Without
        answer tags, the first line of the reply is the answer.
        """
        place = self.environment
        limits = replace(place.settings, temperature=0.0, max_turn_tokens=32, turn_tokens={})
        reader = Environment(place.tokenizer, RAG, place.search, limits, place.max_context)
        results = place.search([SearchRequest(q, q.question) for q in self.questions])
        shown = []
        for question, result in zip(self.questions, results, strict=True):
            passages = "\n".join(number_documents(result.documents))
            shown.append(replace(question, question=f"{passages}\n\nQuestion: {question.question}"))
        rows = self.answer(reader, shown)
        for row in rows:
            answer = row.answer or row.model_text.strip().partition("\n")[0]
            row.segments = [Segment("model", f"<answer> {answer} </answer>")]
        self.keep("plain RAG", rows)

    def keep(self, name: str, rows: list[Trajectory]) -> None:
        for row in rows:
            record = prediction_record(row, 0)
            self.records.append(record | {"kind": name, "id": f"{name} {record['id']}"})
