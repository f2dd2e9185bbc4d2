"""Type a question, and watch it search.

    python ask.py                                            a session; /help lists its commands
    python ask.py "which country was jana dorn born in ?"    one question of the built-in world
    python ask.py "who draws maps?" --model DIR --corpus my_documents/
    python ask.py --model DIR --retriever http --retriever_url http://host:8000

What the model writes appears as it is sampled; what the environment wrote is pale, or in ⟦ ⟧ where
there is no terminal. Flags: those of a rollout; what is not given is the checkpoint's own. A model
that did not learn in the built-in world needs passages of its own. Left out: a dialogue; each
question stands alone.
"""

from errors import FlagParser, InputError, nearest, prepare_command, run_main

if __name__ == "__main__":
    prepare_command()
# isort: split
import dataclasses
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch

from data import Question, clean, harmless, load_questions
from eval import settings_of
from metrics import exact_match
from plumbing import build
from plumbing.files import saved_settings
from plumbing.page import save_page
from plumbing.record import told
from policy import best_device
from prompts import PROTOCOLS, build_prompt
from retriever import RetrieverSettings
from rollout import Environment, check_prompts, decode, rollout
from scale.engine import EngineSettings
from settings import ASKING, Settings, add_flags, check_settings, named_in
from summarizer import SummarizerSettings
from trajectory import Trajectory, ending, heading

HELP = """
/try             a held-out question, another each time
/k 3             passages per search
/retriever NAME  bm25, random, empty, or the address of a server
/step N          who answers: 0 before RL, 1 or 2 after that stage; all: one after the other
/save page.html  what was asked so far, as a page that opens from disk
/quit            as Ctrl-D; Ctrl-C stops an answer"""


def parse(arguments: list[str]) -> tuple[dict, str]:
    """(the flags that were given, the question)."""
    parser = FlagParser("ask.py", description="A session, or one question.")
    parser.add_argument("question", nargs="*", help="without one: a session")
    records = [record for record in ASKING if record is not EngineSettings]  # always by turns
    add_flags(parser, records, named_in(arguments), "eval")
    given = vars(parser.parse_args(arguments))
    text = clean(" ".join(given.pop("question"))).strip()  # arguments may be no UTF-8
    if unused := {"judge", "reader"} & given.keys():
        raise InputError(f"ask.py: --{min(unused)} has no meaning here: eval.py asks other models")
    check_settings(settings_of(given), False, given)
    return given, text


# ------------------------------------------------------------------------------- a session's parts
@dataclass
class Session:
    """Nothing is loaded twice: models by where they come from, searches by their settings."""

    given: dict  # flags of the command line
    changes: dict = field(default_factory=dict)  # of /k and /retriever
    stages: list[int] = field(default_factory=list)  # of /step; none: what the flags name
    models: dict[str, tuple] = field(default_factory=dict)
    searches: dict[tuple, tuple] = field(default_factory=dict)
    asked: list[list[Trajectory]] = field(default_factory=list)  # per question who answered it
    tried: int = 0

    def settings(self) -> Iterator[Settings]:
        """Of each model that answers."""
        for stage in self.stages or [None]:
            given = self.given if stage is None else self.given | {"stage": stage}
            settings = dataclasses.replace(settings_of(given), group_size=1, **self.changes)
            check_settings(settings, False, [name for name, its in self.changes.items() if its])
            check_corpus(settings)
            yield settings

    def model(self, settings: Settings) -> tuple:
        """(policy, tokenizer); it says each token as it samples it."""
        if settings.model not in self.models:
            device = best_device()
            policy, tokenizer = build.load_model(settings, settings.model, device, frozen=True)
            policy.generate = partial(policy.generate, streamer=Voice(tokenizer))
            self.models[settings.model] = policy, tokenizer
        return self.models[settings.model]

    def search(self, settings: Settings) -> tuple:
        """(search function, passages)."""
        names = [
            f.name for record in (RetrieverSettings, SummarizerSettings) for f in fields(record)
        ]
        key = tuple(getattr(settings, name) for name in names)
        if key not in self.searches:
            reads = reads_a_corpus(settings)
            known = next((its for _, its in self.searches.values() if its), None)
            documents = (
                (known or build.passages(settings, known_questions(settings))) if reads else []
            )
            found = build.build_search(settings, documents, best_device())
            self.searches[key] = found, documents
        return self.searches[key]


class Voice:
    """What `generate` hands its tokens to: prints their text."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.said = tokenizer, [], 0

    def put(self, ids: torch.Tensor) -> None:
        if ids.dim() > 1:  # the text so far, at the begin of a turn
            self.ids, self.said = [], 0
            return
        self.ids += ids.tolist()
        text = decode(self.tokenizer, self.ids)
        if not text.endswith("\ufffd"):  # half a character
            self.say(text)

    def say(self, text: str) -> None:
        print(harmless(text[self.said :]), end="", flush=True)
        self.said = len(text)

    def end(self) -> None:
        self.say(decode(self.tokenizer, self.ids))


class AloudEnvironment(Environment):
    """Prints what it writes."""

    def answer(self, asking: list[Trajectory]) -> None:
        before = [len(row.segments) for row in asking]
        super().answer(asking)
        for row, first in zip(asking, before, strict=True):
            for segment in row.segments[first:]:
                print(pale(harmless(segment.text)), end="", flush=True)


def pale(text: str) -> str:
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"\033[2m{text}\033[0m"
    return f"⟦{text}⟧"


# -------------------------------------------------------------------------- what is asked and where
def reads_a_corpus(settings: Settings) -> bool:
    searches = PROTOCOLS[settings.protocol].query_tags is not None
    return searches and settings.retriever not in ("http", "empty", "oracle")


def in_built_in_world(settings: Settings) -> bool:
    """The tiny models, and what was trained from them, are asked about the world they know."""
    before = saved_settings(settings.model)
    ours = before and not before.model and not before.data
    return not settings.data and bool(not settings.model or ours)


def check_corpus(settings: Settings) -> None:
    if reads_a_corpus(settings) and not (settings.corpus or in_built_in_world(settings)):
        why = f"{settings.model} did not begin as the built-in model: say what it shall search"
        raise InputError(f"{why}, --corpus FILE_OR_FOLDER or --retriever http --retriever_url URL")


def known_questions(settings: Settings) -> list[Question]:
    """Whose answers are known: those of --data, or the held-out ones of the built-in world."""
    if settings.data:
        return load_questions(settings.data, settings.skip_bad, settings.seed)
    return build.world_questions(settings, "test") if in_built_in_world(settings) else []


def answer(session: Session, text: str) -> None:
    """Every model of the session answers, aloud."""
    rows = []
    for settings in session.settings():
        questions = known_questions(settings)
        asked = next((q for q in questions if q.question == text), Question("asked", text, []))
        (asked,) = build.as_asked([asked], settings)
        search, _ = session.search(settings)
        policy, tokenizer = session.model(settings)
        environment = AloudEnvironment(tokenizer, build.build_protocol(settings), search, settings)
        check_prompts([asked], environment, policy)
        if tokenizer.unk_token_id in build_prompt(environment.protocol, asked, tokenizer):
            hint = f"; try: {harmless(questions[0].question)}" if questions else ""
            why = "the model has no tokens for this question: it knows only its own world's words"
            raise InputError(f"{why}{hint}")
        if len(session.stages) > 1:
            print(f"-- {name_of(settings)}")
        print(heading(asked))
        rows += rollout(policy, environment, [asked], settings.seed)  # by turns: it can be heard
        print(f"\n{ending(rows[-1])}")
    session.asked.append(rows)


def name_of(settings: Settings) -> str:
    return settings.model or "the built-in one, before RL"


def greet(session: Session, settings: Settings) -> None:
    """What is loaded, and what it can be asked."""
    _, documents = session.search(settings)
    searched = settings.retriever_url or settings.retriever
    if PROTOCOLS[settings.protocol].query_tags is None:
        searched = "nothing: its passages come with the question"
    elif documents:
        place = settings.corpus or "the built-in world"
        searched = f"{place} ({settings.retriever}, {len(documents)} passages)"
    print(f"model: {name_of(settings)}\nsearches: {searched}")


def examples(settings: Settings) -> str:
    """What a tiny model knows."""
    kinds = {q.kind: q.question for q in reversed(known_questions(settings))}
    if not in_built_in_world(settings):
        return "type a question; /help lists the commands"
    some = "\n".join(
        f"    {kinds[kind]}" for kind in ("one_hop", "two_hop", "arithmetic") if kind in kinds
    )
    known = "it knows its own world's people, cities, companies, and sums of 1 to 9; try"
    return f"{known}\n{some}\nor /try; /help lists the commands"


# ---------------------------------------------------------------------------------- its commands
def try_one(session: Session, _: str) -> None:
    settings = next(session.settings())
    if not (questions := known_questions(settings)):
        raise InputError("/try: no questions are known here: start with --data FILE")
    # The kind with two searches shows most.
    some = [q for q in questions if q.kind == "two_hop"] or questions
    session.tried += 1
    answer(session, some[(session.tried - 1) % len(some)].question)


def change(session: Session, **new) -> None:
    """Fields of the session; they stay as they were where the new ones cannot be."""
    kept = {name: getattr(session, name) for name in new}
    vars(session).update(new)
    try:
        for settings in session.settings():
            session.search(settings)
    except InputError:
        vars(session).update(kept)
        raise


def set_passages(session: Session, value: str) -> None:
    if not value.isdecimal():
        raise InputError(f"/k {value}: how many passages per search? A number")
    change(session, changes=session.changes | {"documents_per_search": int(value)})


def set_retriever(session: Session, value: str) -> None:
    new = {"retriever": value, "retriever_url": ""}
    if "://" in value:
        new = {"retriever": "http", "retriever_url": value}
    change(session, changes=session.changes | new)


def set_stages(session: Session, value: str) -> None:
    if "model" in session.given:
        raise InputError("/step: --model names one model: leave it out, and --name a run")
    if value not in ("0", "1", "2", "all"):
        raise InputError(f"/step {value}: one of 0, 1, 2, all")
    change(session, stages=[0, 1, 2] if value == "all" else [int(value)])


def save(session: Session, value: str) -> None:
    if not session.asked:
        raise InputError("/save: nothing was asked yet")
    if "\0" in value:
        raise InputError("/save: a file name has no NUL character in it: name another file")
    records = []
    for group, rows in enumerate(session.asked):
        for row, t in enumerate(rows):
            (_, tokenizer), *_ = session.models.values()
            right = bool(exact_match(t.answer, t.question.answers))
            place = {"step": 0, "group": group, "row": row, "rewards": {}, "correct": right}
            records.append(place | told(t, tokenizer) | {"sampled": t.logprobs})
    save_page(records, Path(value))
    print(f"written: {value}")


COMMANDS = {"/try": try_one, "/k": set_passages, "/retriever": set_retriever}
COMMANDS |= {"/step": set_stages, "/save": save, "/help": lambda *_: print(HELP.strip())}


def converse(session: Session) -> None:
    """Line by line. Whatever is wrong is told, and the session goes on."""
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        name, _, value = line.partition(" ")
        if name == "/quit":
            return
        try:
            if name in COMMANDS:
                COMMANDS[name](session, value.strip())
            elif name.startswith("/"):
                raise InputError(f"{name}: unknown{nearest(name, COMMANDS)}; /help lists them")
            elif line:
                answer(session, line)
        except InputError as error:
            print(f"\nerror: {error}")
        except Exception as error:  # a model that breaks; what was asked before is still here
            print(f"\nerror: {type(error).__name__}: {error}")
        except KeyboardInterrupt:
            print("\nstopped")


def main(arguments: list[str] | None = None) -> None:
    given, text = parse(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a piped line may be no UTF-8
    session = Session(given)
    (settings,) = session.settings()
    greet(session, settings)
    session.model(settings)
    if text:
        return answer(session, text)
    print(examples(settings))
    converse(session)


if __name__ == "__main__":
    run_main(main)
