"""What a predictions file says about a trajectory, and an exam of a model in this process.

An exam asks a model the same questions before and after training. Beside it stands plain RAG: the
same model reads what one search for the whole question finds, and answers at once.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from data import Question, SearchRequest, draw_some
from papers import paper_of
from plumbing.build import choose_generate
from plumbing.report import COLUMNS, summarise, table
from prompts import Protocol, number_documents, tag_pair
from rollout import Environment, rollout
from trajectory import Segment, Trajectory
from trajectory_metrics import paper_metrics, trajectory_metrics


def prediction_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Returns those of `trajectory_metrics` and `paper_metrics` that tables can show. In task
    "summary" ROUGE replaces em, f1 and cem.
    """
    numbers = trajectory_metrics(trajectory)
    numbers |= paper_metrics(trajectory, numbers["em"])
    left_out = ("em", "f1", "cem") if trajectory.question.task == "summary" else ()
    return {name: numbers[name] for name in COLUMNS if name in numbers and name not in left_out}


def prediction_record(trajectory: Trajectory, sample: int) -> dict:
    """Returns the record of a trajectory in a predictions file."""
    question = trajectory.question
    protocol = trajectory.protocol
    record = {
        "id": question.id,
        "sample": sample,
        "kind": question.kind,
        "task": question.task,
        "question": question.question,
        "golds": question.answers,
        "prediction": trajectory.answer,
        "judge_sees": protocol.judge_sees,
        "transcript": trajectory.text,
        "stop_reason": trajectory.stop_reason,
    }
    record["punctuation"] = paper_of(protocol.name).punctuation
    record["metrics"] = prediction_metrics(trajectory)
    kept = ("query", "fallback", "error")
    record["searches"] = [{name: getattr(s, name) for name in kept} for s in trajectory.searches]
    if question.options:
        record["options"] = list(question.options)
    if question.supporting:
        record["hops"] = len(question.supporting)
    if protocol.evidence_tags:
        record["evidence"] = trajectory.evidence
    return record


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
        limits = replace(place.settings, temperature=0.0, max_turn_tokens=32, turn_tokens="")
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
