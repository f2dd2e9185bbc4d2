"""Retrievers for control experiments. They find random documents, nothing, the gold references of
the question's record, or all of its references (as in ARENA section 4.3).
"""

import random

from data import Document, Question
from errors import InputError


def make_control(name: str, documents: list[Document], seed: int):
    if name == "random":
        return RandomRetriever(documents, seed)
    return {"oracle": OracleRetriever, "given": GivenRetriever, "empty": EmptyRetriever}[name]()


class RandomRetriever:
    """Finds random documents, to measure how much searching helps if it finds only noise."""

    def __init__(self, documents: list[Document], seed: int = 0):
        if not documents:
            raise InputError("the corpus is empty: there is nothing to draw from")
        self.documents, self.seed = documents, seed

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        k = min(k, len(self.documents))
        # The seed contains the query's text, because hash(query) differs between processes.
        draws = [random.Random(f"{self.seed}\n{query}") for query in queries]
        return [draw.sample(self.documents, k) for draw in draws]


class EmptyRetriever:
    """Finds nothing, to measure how much the policy knows without documents."""

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        return [[] for _ in queries]


class OracleRetriever:
    """Finds the first k gold references of the question's record for any query, to measure how much
    a perfect search helps. Finds nothing if the record names none.
    """

    needs_questions = True

    def search(self, queries: list[str], k: int, questions: list[Question]) -> list[list[Document]]:
        return [gold_passages(question)[:k] for question in questions]


class GivenRetriever:
    """Finds all references of the question's record in their order, for any query and any k."""

    needs_questions = True

    def search(self, queries: list[str], k: int, questions: list[Question]) -> list[list[Document]]:
        for question in questions:
            if not question.references:
                raise InputError(
                    f"--retriever given: question {question.id} has no references: give its record "
                    "a `references` list, or choose a retriever that searches"
                )
        return [list(question.references) for question in questions]


def gold_passages(question: Question) -> list[Document]:
    return [question.references[number - 1] for number in question.supporting]  # counted from 1
