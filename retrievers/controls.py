"""Retrievers for control experiments. They find random documents, nothing, the gold references of
the question's record, or all of its references (as in ARENA section 4.3). Each is a function
find(request, k) -> documents.
"""

import random
from collections.abc import Callable
from functools import partial

from data import Document, SearchRequest
from errors import InputError

Found = list[Document]


def make_control(name: str, documents: Found, seed: int) -> Callable[[SearchRequest, int], Found]:
    """Returns the control "random" (measures how much searching helps if it finds only noise),
    "empty" (how much the policy knows without documents), "oracle" or "given".
    """
    noise = partial(random_documents, documents, seed)
    return {
        "random": noise,
        "empty": lambda request, k: [],
        "oracle": gold_passages,
        "given": references,
    }[name]


def random_documents(documents: Found, seed: int, request: SearchRequest, k: int) -> Found:
    # The seed contains the query's text, because hash(query) differs between processes.
    draw = random.Random(f"{seed}\n{request.query}")
    return draw.sample(documents, min(k, len(documents)))


def gold_passages(request: SearchRequest, k: int) -> Found:
    """Returns the first k gold references of the question's record, to measure how much a perfect
    search helps; none if the record names none.
    """
    question = request.question
    return [question.references[number - 1] for number in question.supporting][:k]  # from 1


def references(request: SearchRequest, k: int) -> Found:
    """Returns all references of the question's record in their order, whatever k is."""
    question = request.question
    if not question.references:
        raise InputError(
            f"--retriever given: question {question.id} has no references: give its record "
            "a `references` list, or choose a retriever that searches"
        )
    return list(question.references)
