"""Type a question, and watch it search: one live trajectory, search by search.

    python ask.py "which country was jana dorn born in ?"    the built-in world, its last checkpoint
    python ask.py                                            a held-out question of that world
    python ask.py "who draws maps?" --model DIR --corpus my_documents/
    python ask.py "who draws maps?" --model DIR --retriever http --retriever_url http://host:8000

It takes every flag of a rollout: the checkpoint's own settings, then what the command line says.
"""

from __future__ import annotations

import dataclasses
import sys

from data import Question, load_questions
from errors import FlagParser, InputError, run_main
from eval import settings_of
from plumbing.build import (
    as_asked,
    build_environment,
    build_search,
    built_in_world,
    load_model,
    passages,
    play_of,
)
from policy import best_device
from prompts import build_prompt
from rollout import rollout
from settings import ASKING, RENAMED, Settings, add_flags, check_settings, named_in
from trajectory import Trajectory, show


def parse(arguments: list[str]) -> tuple[Settings, str]:
    parser = FlagParser("ask.py", description="One live trajectory.")
    parser.renamed = RENAMED
    parser.add_argument("question", nargs="?", default="", help="without one: a held-out question")
    add_flags(parser, ASKING, named_in(arguments), "eval")
    given = vars(parser.parse_args(arguments))
    text = given.pop("question")
    settings = dataclasses.replace(settings_of(given), group_size=1)
    return check_settings(settings, training=False), text


def question_for(settings: Settings, text: str) -> tuple[Question, list[Question]]:
    """(the question with this text, whose answers are then known, or a new one; all there are)."""
    if settings.data:
        questions = load_questions(settings.data, skip_bad=settings.skip_bad)
    elif settings.model and settings.corpus:
        questions = []
    else:
        world = built_in_world(settings)
        questions = [q for kind in ("two_hop", "one_hop") for q in world.questions("test", kind)]
    if not text and not questions:
        raise InputError('ask.py: what shall be asked? python ask.py "a question"')
    chosen = questions[0] if not text else Question("asked", text, [])
    chosen = next((q for q in questions if q.question == text), chosen)
    return as_asked([chosen], settings)[0], questions


def ask(settings: Settings, text: str) -> tuple[Trajectory, str]:
    """(the trajectory, what was searched)."""
    question, questions = question_for(settings, text)
    documents, device = passages(settings, questions), best_device()
    search = build_search(settings, documents, device)
    policy, tokenizer = load_model(settings, settings.model, device, frozen=True)
    environment = build_environment(settings, tokenizer, search)
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in build_prompt(environment.protocol, question, tokenizer):
        hint = f"; try: {questions[0].question}" if questions else ""
        raise InputError(
            f"the model has no tokens for this question: it knows only its own world's words{hint}"
        )
    (row,) = rollout(policy, environment, [question], settings.seed, play_of(settings))
    searched = settings.retriever_url or settings.corpus or "the built-in world"
    return row, f"{searched} ({settings.retriever}, {len(documents)} passages)"


def main(arguments: list[str] | None = None) -> None:
    settings, text = parse(sys.argv[1:] if arguments is None else arguments)
    trajectory, searched = ask(settings, text)
    print(f"model: {settings.model or 'the built-in one, before RL'}\nsearches: {searched}")
    for number, search in enumerate(trajectory.searches, 1):
        found = "(no fact asked for: fallback)" if search.fallback else search.text
        print(f"search {number}: {search.query}\n    -> {search.error or found}")
    print(show(trajectory))


if __name__ == "__main__":
    run_main(main)
