"""Type a question, and watch it search.

    python ask.py                                            a session; /help lists its commands
    python ask.py "which country was jana dorn born in ?"    one question of the built-in world
    python ask.py --stage 1                                  a session with the model after stage 1
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
import sys

from data import clean
from flags import EngineSettings
from settings import ASKING, Settings, add_flags, check_settings, in_built_in_world, named_in


def read_flags(arguments: list[str] | None = None) -> tuple[dict, str]:
    """(the flags that were given, the question)."""
    parser = FlagParser("ask.py", description="A session, or one question.")
    parser.add_argument("question", nargs="*", help="without one: a session")
    records = [record for record in ASKING if record is not EngineSettings]  # always by turns
    add_flags(parser, records, named_in(sys.argv[1:] if arguments is None else arguments), "eval")
    given = vars(parser.parse_args(arguments))
    text = clean(" ".join(given.pop("question"))).strip()  # arguments may be no UTF-8
    if unused := {"judge", "reader"} & given.keys():
        raise InputError(f"ask.py: --{min(unused)} has no meaning here: eval.py asks other models")
    return given, text


if __name__ == "__main__":
    run_main(read_flags)  # a flag that is wrong is told before torch is loaded
# isort: split
import dataclasses
import io
import os
from functools import partial
from pathlib import Path

import torch

from data import Question, harmless
from eval import settings_of
from metrics import exact_match
from plumbing import build
from plumbing.page import save_page
from plumbing.questions import as_asked, known_questions, load_documents
from plumbing.record import to_record
from policy import best_device
from prompts import PROTOCOLS, build_prompt
from rollout import Environment, check_prompts, decode, rollout
from trajectory import Trajectory, ending, heading

HELP = """
/try             a held-out question, another each time
/save page.html  what was asked so far, as a page that opens from disk
/quit            as Ctrl-D; Ctrl-C stops an answer"""


# ------------------------------------------------------------------------------- a session's parts
class Session:
    """One model and what it searches, loaded once for all questions."""

    def __init__(self, given: dict):
        self.settings = settings = dataclasses.replace(settings_of(given), group_size=1)
        check_settings(settings, False, given)
        check_corpus(settings)
        self.questions, device = known_questions(settings), best_device()
        reads = reads_a_corpus(settings)
        self.documents = load_documents(settings, self.questions) if reads else []
        self.search = build.build_search(settings, self.documents, device)
        self.asked: list[Trajectory] = []
        self.tried = 0

    def load(self) -> None:
        """Loads the policy, which says each token as it samples it."""
        settings = self.settings
        loaded = build.load_model(settings, settings.model, best_device(), frozen=True)
        self.policy, self.tokenizer = loaded
        self.policy.generate = partial(self.policy.generate, streamer=Voice(self.tokenizer))
        self.environment = build.build_environment(
            settings, self.tokenizer, self.search, self.policy, AloudEnvironment
        )


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

    def run_searches(self, asking: list[Trajectory]) -> None:
        before = [len(row.segments) for row in asking]
        super().run_searches(asking)
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
    return searches and settings.retriever not in ("http", "empty", "oracle", "given")


def check_corpus(settings: Settings) -> None:
    if reads_a_corpus(settings) and not (settings.corpus or in_built_in_world(settings)):
        why = f"{settings.model} did not begin as the built-in model: say what it shall search"
        raise InputError(f"{why}, --corpus FILE_OR_FOLDER or --retriever http --retriever_url URL")


def answer(session: Session, text: str) -> None:
    """Answers aloud."""
    questions, settings, environment = session.questions, session.settings, session.environment
    asked = next((q for q in questions if q.question == text), Question("asked", text, []))
    (asked,) = as_asked([asked], settings)
    check_prompts([asked], environment, session.policy)
    ids = build_prompt(environment.protocol, asked, session.tokenizer)
    if session.tokenizer.unk_token_id in ids:
        hint = f"; try: {harmless(questions[0].question)}" if questions else ""
        why = "the model has no tokens for this question: it knows only its own world's words"
        raise InputError(f"{why}{hint}")
    print(heading(asked))
    (row,) = rollout(session.policy, environment, [asked], settings.seed)  # by turns: it is heard
    print(f"\n{ending(row)}")
    session.asked.append(row)


def greet(session: Session) -> None:
    """Prints what is loaded."""
    settings, documents = session.settings, session.documents
    searched = settings.retriever_url or settings.retriever
    if PROTOCOLS[settings.protocol].query_tags is None:
        searched = "nothing: its passages come with the question"
    elif documents:
        place = settings.corpus or "the built-in world"
        searched = f"{place} ({settings.retriever}, {len(documents)} passages)"
    model = settings.model or "the built-in one, before RL"
    print(f"model: {model}\nsearches: {searched}")


def examples(session: Session) -> str:
    """Returns what a tiny model can be asked."""
    kinds = {q.kind: q.question for q in reversed(session.questions)}
    if not in_built_in_world(session.settings):
        return "type a question; /help lists the commands"
    some = "\n".join(
        f"    {kinds[kind]}" for kind in ("one_hop", "two_hop", "arithmetic") if kind in kinds
    )
    known = "it knows its own world's people, cities, companies, and sums of 1 to 9; try"
    return f"{known}\n{some}\nor /try; /help lists the commands"


# ---------------------------------------------------------------------------------- its commands
def try_one(session: Session, _: str) -> None:
    if not (questions := session.questions):
        raise InputError("/try: no questions are known here: start with --data FILE")
    # The kind with two searches shows most.
    some = [q for q in questions if q.kind == "two_hop"] or questions
    session.tried += 1
    answer(session, some[(session.tried - 1) % len(some)].question)


def save(session: Session, value: str) -> None:
    if not session.asked:
        raise InputError("/save: nothing was asked yet")
    if "\0" in value:
        raise InputError("/save: a file name has no NUL character in it: name another file")
    records = []
    for group, t in enumerate(session.asked):
        right = bool(exact_match(t.answer, t.question.answers))
        place = {"step": 0, "group": group, "row": 0, "rewards": {}, "correct": right}
        records.append(place | to_record(t, session.tokenizer) | {"sampled": t.logprobs})
    save_page(records, Path(value))
    print(f"written: {value}")


COMMANDS = {"/try": try_one, "/save": save, "/help": lambda *_: print(HELP.strip())}


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
    given, text = read_flags(arguments)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a piped line may be no UTF-8
    session = Session(given)
    greet(session)
    session.load()
    if text:
        return answer(session, text)
    print(examples(session))
    converse(session)


if __name__ == "__main__":
    run_main(main)
