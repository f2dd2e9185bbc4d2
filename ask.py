"""Type a question, and watch the model search.

    python ask.py                                            reads questions until Ctrl-D
    python ask.py "which country was jana dorn born in ?"    one question of the built-in world
    python ask.py --stage 1                                  the same with the model after stage 1
    python ask.py "who draws maps?" --model DIR --corpus my_documents/
    python ask.py --model DIR --retriever http --retriever_url http://host:8000

The model's text is printed while it is sampled, and text of the environment appears in ⟦ ⟧. A
flag that is not given has the value saved with the checkpoint, as in eval.py; decoding is greedy
unless --temperature is given. A model that searches and is neither the built-in model nor trained
from it needs a corpus, or a retriever without one (such as http), from a flag or from its training.
Left out: dialogues; the model answers each question without seeing the questions before it.
"""

from errors import FlagParser, InputError, prepare_command, run_main

if __name__ == "__main__":
    prepare_command()
# isort: split
import sys

from data import clean
from flags import EngineSettings
from settings import (
    ASKING,
    MORE_HELP,
    MOST_USED,
    add_flags,
    check_settings,
    in_built_in_world,
    named_in,
)


def read_flags(arguments: list[str] | None = None) -> tuple[dict, str]:
    """Returns (the flags that were given, the question)."""
    parser = FlagParser(
        "ask.py",
        description=f"Asks a model one question, or one for each line that is typed.{MORE_HELP}",
        epilog='example: python ask.py "who draws maps?" --model DIR --corpus my_documents/',
    )
    used = "question retriever retriever_url max_searches temperature run_name".split()
    parser.most_used = [*MOST_USED, *used]
    parser.add_argument("question", nargs="*", help="the question (default: read lines)")
    # There are no flags of engines, because answers are sampled with HF generate.
    records = [record for record in ASKING if record is not EngineSettings]
    add_flags(parser, records, named_in(sys.argv[1:] if arguments is None else arguments), "eval")
    given = vars(parser.parse_args(arguments))
    text = clean(" ".join(given.pop("question"))).strip()  # argv may contain invalid UTF-8
    if unused := {"judge", "reader"} & given.keys():
        raise InputError(f"ask.py: --{min(unused)} has no meaning here; eval.py uses it")
    return given, text


if __name__ == "__main__":
    run_main(read_flags)  # reports a wrong flag before torch is loaded
# isort: split
import contextlib
import dataclasses
from functools import partial

from transformers import TextStreamer

from data import Question, harmless
from eval import settings_of
from metrics import tokenize
from plumbing import build
from plumbing.alarms import hint_at_cold_start
from plumbing.questions import as_asked, known_questions, load_documents
from policy import best_device
from prompts import PROTOCOLS
from rollout import Environment, check_prompts, rollout
from trajectory import Trajectory, describe_end, describe_question
from trajectory_metrics import prediction_record


class Streamer(TextStreamer):
    """Prints the tokens that `generate` samples."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(harmless(text), end="", flush=True)


class PrintingEnvironment(Environment):
    """An environment that prints the documents and notices that it appends."""

    def run_searches(self, rows: list[Trajectory]) -> None:
        before = [len(row.segments) for row in rows]
        super().run_searches(rows)
        for row, first in zip(rows, before, strict=True):
            for segment in row.segments[first:]:
                print(f"⟦{harmless(segment.text.strip())}⟧\n| ", end="", flush=True)


class Session:
    """Holds a model and the documents that it searches, loaded once for all questions."""

    def __init__(self, given: dict):
        """Loads the documents, prints the names of model and documents, and loads the model."""
        self.settings = settings = dataclasses.replace(settings_of(given), group_size=1)
        check_settings(settings, False, given)
        built_in = in_built_in_world(settings)
        searches = PROTOCOLS[settings.protocol].query_tags is not None
        corpus = searches and settings.retriever not in ("http", "empty", "oracle", "given")
        if corpus and not (settings.corpus or built_in):
            raise InputError(
                f"{settings.model} was not trained from the built-in model, so it needs something"
                " to search: give --corpus FILE_OR_FOLDER or --retriever http --retriever_url URL"
            )
        self.questions = known_questions(settings)
        device = best_device()
        self.words = {word for q in self.questions * built_in for word in tokenize(q.question)}
        documents = load_documents(settings, self.questions) if corpus else []
        search = build.build_search(settings, documents, device)
        place = settings.retriever_url or settings.retriever
        if corpus:
            place = settings.corpus or "the built-in world"
            place += f" ({settings.retriever}, {len(documents)} documents)"
        elif not searches:
            place = "nothing: the documents come with the question"
        print(f"model: {settings.model or 'the built-in one, before RL'}\nsearches: {place}")
        self.policy, self.tokenizer = build.load_model(
            settings, settings.model, device, frozen=True
        )
        self.generate = self.policy.generate
        self.environment = build.build_environment(
            settings, self.tokenizer, search, self.policy, PrintingEnvironment
        )


def answer(session: Session, text: str) -> None:
    """Answers a question and prints the trajectory while it is sampled."""
    questions = session.questions
    policy = session.policy
    known = next((q for q in questions if q.question == text), Question("asked", text, []))
    (question,) = as_asked([known], session.settings)
    check_prompts([question], session.environment, policy)
    unknown = [word for word in tokenize(text) if session.words and word not in session.words]
    if unknown:  # it would be read as <unk>, or as known pieces, such as 112 as 11 and 2
        raise InputError(
            f"the model does not know {harmless(unknown[0])!r}: it knows only its own world's"
            f" words; try: {questions[0].question}"
        )
    print(describe_question(question))
    streamer = Streamer(session.tokenizer, skip_prompt=True, clean_up_tokenization_spaces=False)
    policy.generate = partial(session.generate, streamer=streamer)
    # Another progress than the bar of `rollout`, which would be drawn into the text.
    (row,) = rollout(policy, session.environment, [question], session.settings.seed, progress=int)
    print(f"\n{describe_end(row)}")
    if row.answer is None:
        hint_at_cold_start([prediction_record(row, 0)], session)


def print_examples(session: Session) -> None:
    if in_built_in_world(session.settings):
        print("the model knows only its world of people, cities and companies; ask, for example:")
        # The first question of each kind.
        for text in reversed({q.kind: q.question for q in session.questions[::-1]}.values()):
            print(f"    {text}")
    print("type a question; Ctrl-D ends")


def main(arguments: list[str] | None = None) -> None:
    given, text = read_flags(arguments)
    session = Session(given)
    if text:
        return answer(session, text)
    print_examples(session)
    with contextlib.suppress(EOFError):
        while True:
            try:
                if text := clean(input("\n> ")).strip():
                    answer(session, text)
            except InputError as error:
                print(f"error: {error}")


if __name__ == "__main__":
    run_main(main)
