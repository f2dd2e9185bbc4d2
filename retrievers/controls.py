"""Retrievers for control experiments. They find random documents, nothing, the gold references of
the question's record, or all of its references (as in ARENA section 4.3).
"""

import random
from collections.abc import Callable

from data import Document, Question
from errors import InputError

Found = list[Document]


class Control:
    """A retriever that finds `find(query, k, question)`."""

    needs_questions = True

    def __init__(self, find: Callable[[str, int, Question], Found]):
        self.find = find

    def search(self, queries: list[str], k: int, questions: list[Question]) -> list[Found]:
        pairs = zip(queries, questions, strict=True)
        return [self.find(query, k, question) for query, question in pairs]


def make_control(name: str, documents: Found, seed: int) -> Control:
    """Returns the control "random" (measures how much searching helps if it finds only noise),
    "empty" (how much the policy knows without documents), "oracle" or "given".
    """
    if name == "random" and not documents:
        raise InputError("the corpus is empty: there is nothing to draw from")

    def noise(query: str, k: int, _) -> Found:
        # The seed contains the query's text, because hash(query) differs between processes.
        draw = random.Random(f"{seed}\n{query}")
        return draw.sample(documents, min(k, len(documents)))

    finds = {"random": noise, "empty": lambda *_: [], "oracle": gold_passages, "given": references}
    return Control(finds[name])


def gold_passages(query: str, k: int, question: Question) -> Found:
    """Returns the first k gold references of the question's record, to measure how much a perfect
    search helps; none if the record names none.
    """
    return [question.references[number - 1] for number in question.supporting][:k]  # from 1


def references(query: str, k: int, question: Question) -> Found:
    """Returns all references of the question's record in their order, whatever k is."""
    if not question.references:
        raise InputError(
            f"--retriever given: question {question.id} has no references: give its record "
            "a `references` list, or choose a retriever that searches"
        )
    return list(question.references)
