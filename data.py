"""A question, a document, and the layouts they come in on disk.

    Question   what is asked, the answers that count, and, where the record has them, options and numbered references
    Document   one passage of a corpus: id, title, text
    SearchRequest -> SearchResult   what the rollout hands to a search function, and what it gets back
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field


class InputError(ValueError):
    """Something the user gave is wrong. The message is one line: what, where, and what to do."""


def run_main(main: Callable[[], None]) -> None:
    """Run a file's `main`; an InputError becomes one line on stderr and exit code 2, never a traceback."""
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `python data.py FILE | head` is not an error
        sys.stderr.close()


@dataclass(frozen=True)
class Document:
    """One passage. `id` is a string even where the file has a number."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """One question with every answer that counts as right.

    task         "qa" (open answer), "math" (graded by math equality) or "choice" (a letter into `options`)
    references   passages that come with the record; `supporting` holds the 1-based numbers of the gold ones,
                 as a prompt shows them
    source       the kind that evaluation tables group by ("one_hop", "hotpotqa", ...)
    """

    id: str
    question: str
    answers: list[str]
    task: str = "qa"
    options: tuple[str, ...] = ()
    references: tuple[Document, ...] = ()
    supporting: tuple[int, ...] = ()
    source: str = ""
    level: str = ""

    @property
    def kind(self) -> str:
        return self.source or self.task


@dataclass(frozen=True)
class SearchRequest:
    """One query of one row. The question rides along for the oracle control and for summarisers."""

    question: Question
    query: str


@dataclass(frozen=True)
class SearchResult:
    """What a search function gives back for one request.

    text       the one passage that the policy reads (a summary); "" shows `documents` themselves, numbered
    fallback   the summariser found that the query asks for no fact (UR²)
    """

    documents: list[Document] = field(default_factory=list)
    text: str = ""
    fallback: bool = False
    error: str | None = None
