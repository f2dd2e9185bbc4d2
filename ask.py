"""Type a question, and see how the model searches.

    python ask.py                                            a question per line, until Ctrl-D
    python ask.py "which country was jana dorn born in ?"    one question of the built-in world
    python ask.py --stage 1                                  the same with the model after stage 1
    python ask.py "who draws maps?" --model DIR --corpus my_documents/
    python ask.py --model DIR --retriever http --retriever_url http://host:8000

Text of the environment appears in ⟦ ⟧. A flag that is not given has the value saved with the
checkpoint, as in eval.py; decoding is greedy unless --temperature is given. A model that searches
and is neither the built-in model nor trained from it needs a corpus, or a retriever without one
(such as http), from a flag or from its training. Left out: dialogues; the model answers each
question without seeing the questions before it.
"""

from errors import FlagParser, InputError, run_main  # before torch

# isort: split
import sys

from data import clean
from flags import add_flags, check_settings, in_built_in_world
from settings import Settings


def read_flags(arguments: list[str] | None = None) -> tuple[dict, str]:
    """Returns (the flags that were given, the question)."""
    parser = FlagParser(
        "ask.py",
        description="Asks a model one question, or one for each line that is typed.",
        epilog='example: python ask.py "who draws maps?" --model DIR --corpus my_documents/',
    )
    parser.add_argument("question", nargs="*", help="the question (default: read lines)")
    add_flags(parser, Settings, "eval")
    given = vars(parser.parse_args(arguments))
    return given, clean(" ".join(given.pop("question")))  # argv may contain invalid UTF-8


if __name__ == "__main__":
    run_main(read_flags)  # reports a wrong flag before torch is loaded
# isort: split
from collections.abc import Callable
from dataclasses import replace

from data import Documents, Question, Questions, harmless
from eval import load, settings_of
from metrics import tokenize
from papers import PROTOCOLS
from plumbing.alarms import hint_at_cold_start
from plumbing.questions import as_asked, known_questions, load_documents
from trajectory import show


def documents_to_search(settings: Settings, questions: Questions) -> Documents:
    """Returns the documents, which `questions` may bring; none if the model needs none here."""
    needs_none = settings.retriever in ("http", "empty", "oracle", "given")
    if needs_none or not PROTOCOLS[settings.protocol].query_tags:
        return []
    if not (settings.corpus or in_built_in_world(settings)):
        raise InputError(
            f"{settings.model} was not trained from the built-in model, so it needs something"
            " to search: give --corpus FILE_OR_FOLDER or --retriever http --retriever_url URL"
        )
    documents = load_documents(settings, questions)
    print(
        f"searches: {settings.corpus or 'the built-in world'} "
        f"({settings.retriever}, {len(documents)} documents)"
    )
    return documents


def answer(question: Question, generate: Callable, settings: Settings) -> None:
    """Answers a question and prints the trajectory."""
    (row,) = generate(as_asked([question], settings), settings.seed)
    print(show(row))
    if row.answer is None:
        hint_at_cold_start([], settings)


def main(arguments: list[str] | None = None) -> None:
    given, text = read_flags(arguments)
    settings = replace(settings_of(given), group_size=1)
    check_settings(settings, training=False)
    known = {question.question: question for question in known_questions(settings)}
    print(f"model: {settings.model or 'the built-in one, before RL'}")
    documents = documents_to_search(settings, [*known.values()])
    _, generate, _ = load(settings, {"asked": []}, documents)
    words = {*tokenize(" ".join(known))}
    if not text:
        examples = {question.kind: question.question for question in known.values()}
        print("type a question, such as these; Ctrl-D ends", *examples.values(), sep="\n    ")
    for line in [text] if text else sys.stdin:
        text = clean(line).strip()
        unknown = [word for word in tokenize(text) if word not in words]
        if unknown and in_built_in_world(settings):  # the model would read other words
            print(
                f"the model does not know {harmless(unknown[0])!r}: "
                f"it knows only its own world's words; try: {next(iter(known))}"
            )
        elif text:
            answer(known.get(text) or Question("asked", text, []), generate, settings)


if __name__ == "__main__":
    run_main(main)
