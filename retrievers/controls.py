"""Controls for experiments: what is a search worth that finds noise, nothing, the gold passages, or
all references of the question's own record (ARENA section 4.3)?
"""

import random

from data import Document, Question
from errors import InputError


def make_control(name: str, documents: list[Document], seed: int):
    if name == "random":
        return RandomRetriever(documents, seed)
    return {"oracle": OracleRetriever, "given": GivenRetriever, "empty": EmptyRetriever}[name]()


class RandomRetriever:
    """Documents that have nothing to do with the query: what is a search worth that finds noise?"""

    def __init__(self, documents: list[Document], seed: int = 0):
        if not documents:
            raise InputError("the corpus is empty: there is nothing to draw from")
        self.documents, self.seed = documents, seed

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        return [self.draw(query, min(k, len(self.documents))) for query in queries]

    def draw(self, query: str, k: int) -> list[Document]:
        # Seeded by the text, not by hash(), which differs between processes.
        return random.Random(f"{self.seed}\n{query}").sample(self.documents, k)


class EmptyRetriever:
    """Finds nothing: what does the policy know by heart?"""

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        return [[] for _ in queries]


class OracleRetriever:
    """The question's gold passages, if it names any: what would a perfect search be worth?"""

    needs_questions = True

    def search(self, queries: list[str], k: int, questions: list[Question]) -> list[list[Document]]:
        assert len(queries) == len(questions)
        return [gold_passages(question)[:k] for question in questions]


class GivenRetriever:
    """Finds all references of a question's record in their order, whatever the query and k are."""

    needs_questions = True

    def search(self, queries: list[str], k: int, questions: list[Question]) -> list[list[Document]]:
        for question in questions:
            if not question.references:
                how = "give its record a `references` list, or choose a retriever that searches"
                raise InputError(f"--retriever given: question {question.id} has none: {how}")
        return [list(question.references) for question in questions]


def gold_passages(question: Question) -> list[Document]:
    return [question.references[number - 1] for number in question.supporting]  # they count from 1
