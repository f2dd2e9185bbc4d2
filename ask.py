"""Type a question, and watch it search.

    python ask.py "which country was jana dorn born in ?"    the built-in world, its last checkpoint
    python ask.py                                            a held-out question of that world
    python ask.py "who draws maps?" --model DIR --corpus my_documents/
    python ask.py "who draws maps?" --model DIR --retriever http --retriever_url http://host:8000

Flags: those of a rollout; what is not given is the checkpoint's own. A model that did not learn in
the built-in world needs passages of its own.
"""

import dataclasses
import sys

from data import Question, load_questions
from errors import FlagParser, InputError, run_main
from eval import settings_of
from plumbing import build
from plumbing.files import saved_settings
from policy import best_device
from prompts import PROTOCOLS, build_prompt
from rollout import check_prompts, rollout
from settings import ASKING, RENAMED, Settings, add_flags, check_settings, named_in
from trajectory import Trajectory, show


def parse(arguments: list[str]) -> tuple[Settings, str]:
    parser = FlagParser("ask.py", description="One live trajectory.")
    parser.renamed = RENAMED
    parser.add_argument("question", nargs="*", help="without one: a held-out question")
    add_flags(parser, ASKING, named_in(arguments), "eval")
    given = vars(parser.parse_args(arguments))
    text = " ".join(given.pop("question")).strip()
    if unused := {"judge", "reader"} & given.keys():
        raise InputError(f"ask.py: --{min(unused)} has no meaning here: eval.py asks other models")
    settings = dataclasses.replace(settings_of(given), group_size=1)
    check_settings(settings, False, given)
    if reads_a_corpus(settings) and not (settings.corpus or in_built_in_world(settings)):
        why = f"{settings.model} did not begin as the built-in model: say what it shall search"
        raise InputError(f"{why}, --corpus FILE_OR_FOLDER or --retriever http --retriever_url URL")
    return settings, text


def reads_a_corpus(settings: Settings) -> bool:
    searches = PROTOCOLS[settings.protocol].query_tags is not None
    return searches and settings.retriever not in ("http", "empty", "oracle")


def in_built_in_world(settings: Settings) -> bool:
    """The tiny models, and what was trained from them, are asked about the world they know."""
    before = saved_settings(settings.model)
    ours = before and not before.model and not before.data
    return not settings.data and bool(not settings.model or ours)


def question_for(settings: Settings, text: str) -> tuple[Question, list[Question]]:
    """(the question with this text, whose answers are then known, or a new one; all there are)."""
    questions = []
    if settings.data:
        questions = load_questions(settings.data, settings.skip_bad, settings.seed)
    elif in_built_in_world(settings):
        questions = build.world_questions(settings, "test")
    if text:
        chosen = next((q for q in questions if q.question == text), Question("asked", text, []))
    elif questions:  # the kind with two searches shows most
        chosen = next((q for q in questions if q.kind == "two_hop"), questions[0])
    else:
        raise InputError('ask.py: what shall be asked? python ask.py "a question"')
    return build.as_asked([chosen], settings)[0], questions


def ask(settings: Settings, text: str) -> tuple[Trajectory, str]:
    """(the trajectory, what was searched)."""
    question, questions = question_for(settings, text)
    device = best_device()
    documents = build.passages(settings, questions) if reads_a_corpus(settings) else []
    search = build.build_search(settings, documents, device)
    policy, tokenizer = build.load_model(settings, settings.model, device, frozen=True)
    environment = build.build_environment(settings, tokenizer, search)
    check_prompts([question], environment, policy)
    if tokenizer.unk_token_id in build_prompt(environment.protocol, question, tokenizer):
        hint = f"; try: {questions[0].question}" if questions else ""
        why = "the model has no tokens for this question: it knows only its own world's words"
        raise InputError(f"{why}{hint}")
    (row,) = rollout(policy, environment, [question], settings.seed, build.play_of(settings))
    searched = settings.retriever_url or settings.retriever
    if PROTOCOLS[settings.protocol].query_tags is None:
        searched = "nothing: its passages come with the question"
    elif documents:
        place = settings.corpus or "the built-in world"
        searched = f"{place} ({settings.retriever}, {len(documents)} passages)"
    return row, searched


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
