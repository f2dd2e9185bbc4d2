"""Type a question, and watch the model search.

    python ask.py                                            a question per line, until Ctrl-D
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
import dataclasses
from functools import partial

from transformers import TextStreamer

from data import Question, harmless
from eval import settings_of
from metrics import tokenize
from papers import PROTOCOLS
from plumbing import build
from plumbing.alarms import hint_at_cold_start
from plumbing.questions import as_asked, known_questions, load_documents
from policy import best_device
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
        for row in rows:  # at most the one that is shown
            before = len(row.segments)
            super().run_searches([row])
            for segment in row.segments[before:]:
                print(f"⟦{harmless(segment.text.strip())}⟧\n| ", end="", flush=True)


def load(settings: Settings, questions: list[Question]) -> tuple:
    """Returns the policy and its environment. `questions` may bring the documents to search."""
    local = settings.retriever not in ("http", "empty", "oracle", "given")
    needs_corpus = local and PROTOCOLS[settings.protocol].query_tags
    if needs_corpus and not (settings.corpus or in_built_in_world(settings)):
        raise InputError(
            f"{settings.model} was not trained from the built-in model, so it needs something"
            " to search: give --corpus FILE_OR_FOLDER or --retriever http --retriever_url URL"
        )
    documents = load_documents(settings, questions) if needs_corpus else []
    device = best_device()
    search = build.build_search(settings, documents, device)
    print(f"model: {settings.model or 'the built-in one, before RL'}")
    if documents:
        place = settings.corpus or "the built-in world"
        print(f"searches: {place} ({settings.retriever}, {len(documents)} documents)")
    policy, tokenizer = build.load_model(settings, settings.model, device, frozen=True)
    environment = build.build_environment(settings, tokenizer, search, policy, PrintingEnvironment)
    streamer = Streamer(tokenizer, skip_prompt=True, clean_up_tokenization_spaces=False)
    policy.generate = partial(policy.generate, streamer=streamer)
    return policy, environment


def answer(policy, environment: Environment, question: Question) -> None:
    """Answers a question and prints the trajectory while it is sampled."""
    settings = environment.settings
    questions = check_prompts(as_asked([question], settings), environment, policy)
    print(describe_question(question))
    # Another progress than the bar of `rollout`, which would be drawn into the text.
    (row,) = rollout(policy, environment, questions, settings.seed, progress=int)
    print(f"\n{describe_end(row)}")
    if row.answer is None:
        hint_at_cold_start([prediction_record(row, 0)], settings)


def main(arguments: list[str] | None = None) -> None:
    given, text = read_flags(arguments)
    settings = dataclasses.replace(settings_of(given), group_size=1)
    check_settings(settings, training=False)
    known = {question.question: question for question in known_questions(settings)}
    policy, environment = load(settings, [*known.values()])
    words = {*tokenize(" ".join(known))}
    if not text:
        examples = {question.kind: question.question for question in known.values()}
        print("type a question, such as these; Ctrl-D ends", *examples.values(), sep="\n    ")
    for line in [text] if text else sys.stdin:
        text = clean(line).strip()
        unknown = [word for word in tokenize(text) if word not in words]
        if unknown and in_built_in_world(settings):  # the model would read it as <unk>
            print(
                f"the model does not know {harmless(unknown[0])!r}: "
                f"it knows only its own world's words; try: {next(iter(known))}"
            )
        elif text:
            answer(policy, environment, known.get(text) or Question("asked", text, []))


if __name__ == "__main__":
    run_main(main)
