"""Cold start: before RL, a small model learns to write a query, read the result, close its answer.

    question with hops -> trace by rule -> masked supervised training (sft.py) -> a --model for RL

RL reinforces what a model already does now and then. A small model never searches under a paper's
protocol (SmolLM2-135M: 0 of 72 questions), so there is nothing to reinforce. A trace shows it how:

    for each hop   a thought, the hop's query in its tags, the documents that the retriever returns
    at the end     the fact that was found, and the answer in the protocol's form

The environment of the rollout writes the trace's documents and masks, so a trace is a trajectory as
RL will see it. It is kept only if every hop's answer is visible in what its query found, and if it
passes the format check of its paper. A question without hops gets a search for each gold title, or
one for its key words; an answer must be visible. Each thought has several wordings, so that samples
differ and RL has something to choose from. With `--guesses` some traces answer at once with the
answer of another question, in wordings of their own: a habit that RL can unlearn. A question of
task "math" without hops is answered at once too, but rightly.

    python coldstart.py                                                     prints five traces
    python coldstart.py --model DIR --data FILE --corpus FILE --out DIR     trains and saves
    python coldstart.py ... --show 3                                        only prints traces

The papers start from models that follow their protocol already: UR² and R-Search from instruct
models of 3B and more. R-Search's and R1-Searcher's supervised baselines imitate a larger model
(lab/distil.py). Left out: derivations, several processes, going on after an interruption.
"""

from errors import InputError, check_output, run_main  # before torch
from settings import setting

# isort: split
import itertools
import math
import random
import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from transformers import ByT5Tokenizer

from curriculum import exact_counts
from data import Hop, Question, draw_some, load_questions
from flags import check_settings, parse_flags, resolve
from metrics import normalize_answer
from papers import PROTOCOLS
from plumbing.build import build_environment, build_search, choose_generate, set_threads
from plumbing.files import settings_text
from plumbing.questions import as_asked, load_documents
from plumbing.report import summarise, table
from policy import best_device, load_policy, save_policy
from prompts import Protocol, build_prompt, tag_pair
from retriever import BM25, INVENTED, make_search
from rewards import good_format, needs
from rollout import Environment, check_prompts, encode, rollout
from settings import Settings
from sft import Example, SFTSettings, citing, sentences, train_sft
from trajectory import Trajectory, show
from trajectory_metrics import prediction_record


@dataclass(frozen=True)
class ColdStart:
    """Teaches a small model to search by supervised training, so that RL can reward it."""

    out: str = setting("", "folder to save the model in")
    traces: int = setting(200, "traces to train on", least=1)
    hops: dict = setting(  # noqa: RUF009, it returns a field
        {},
        "share of traces by number of hops: 1=0.9,2=0.1; default: as the questions have them",
        shares=True,
    )
    guesses: float = setting(0.0, "share of traces that guess without a search", least=0, most=1)
    epochs: float = setting(1.5, "passes over the traces; at least 20 updates are made", least=0.01)
    batch_size: int = setting(8, "traces per update", least=1)
    lr: float = setting(4e-4, "learning rate, tried with 135M weights; larger models need less")
    held_out: float = setting(0.1, "share of the questions that is kept aside", least=0, most=0.99)
    exam: int = setting(30, "kept-aside questions to ask before and after; 0: none", least=0)
    show: int = setting(0, "print this many traces and train nothing", least=0)


LEAST_UPDATES = 20
# For a first try of RL after the cold start.
SMALL = "--questions_per_step 4 --group_size 8 --trajectories_per_update 32 --steps 20 --lr 1e-5"
COPIES = 4  # a question gives at most this many traces, in different wordings
# The wordings of thoughts. {query} and {answer} are those of the hop that was just read.
FIRST = (
    "I need to look this up.",
    "First I look it up.",
    "I do not know this, so I search.",
    "Let me find that.",
    "Let me search for it.",
)
RELATION = (  # for a query such as "director of Heat"
    "The {query} is {answer}.",
    "It says that the {query} is {answer}.",
    "According to the document, the {query} is {answer}.",
    "So the {query} is {answer}.",
)
FOUND = (
    "I found {answer}.",
    "It says {answer}.",
    "The document names {answer}.",
    "Here it is: {answer}.",
)
NEXT = (
    "Next I search for it.",
    "Now I look up the next fact.",
    "Now I need one more fact.",
    "Then:",
)
# Apart from all others: with the same words, a model that has read a document would guess on.
GUESS = ("From memory alone I say", "I think I know this:", "No need to search:", "My guess:")
STOP_WORDS = set(
    "a an and are as at be been by can did do does for from had has have how in into is it its me"
    " of on or that the their there these this those to was were what when where which who whom"
    " whose why will with would".split()
)
Script = Generator[str, str, str]  # yields turns with a query, receives what was found


class Dropped(Exception):
    """Raised while a trace is written if it cannot be kept; its argument is the reason."""


# ---------------------------------------------------------------------------------------- one trace
def key_words(text: str) -> str:
    """Returns a question's words without stop words.

    >>> key_words("Who draws maps of the coast?")
    'draws maps coast'
    """
    words = re.findall(r"[\w'’-]+", text)
    return " ".join(word for word in words if word.lower() not in STOP_WORDS) or text


def hops_of(question: Question) -> tuple[Hop, ...]:
    """Returns the question's own hops. Without any: a search for each gold title, those that the
    question names first; without titles, one search for its key words, but none for a sum.
    """
    if question.task == "math":
        return question.hops
    titles = [question.references[number - 1].title for number in question.supporting]
    named = sorted(filter(None, titles), key=lambda title: title not in question.question)
    return question.hops or tuple(map(Hop, named or [key_words(question.question)]))


def visible(text: str, answers: Sequence[str]) -> str:
    """Returns the first of these answers that is in the text as whole words, or ""."""
    words = f" {normalize_answer(text)} "
    return next((a for a in answers if f" {normalize_answer(a)} " in words), "")


def wrapped(protocol: Protocol, thought: str, first: bool) -> str:
    """Puts a thought into the section that the protocol has for it: <think> at the beginning,
    <reflect> after documents (When to Search); other protocols have one of the two, or none.
    """
    for name in ("think",) if first else ("reflect", "think"):
        if tag_pair(name)[0] in protocol.tags and not protocol.prompt_suffix:
            return f"<{name}> {thought} </{name}>\n"
    return f"{thought} "


def final_answer(protocol: Protocol, answer: str, task: str = "qa") -> str:
    """Returns the answer in the protocol's tags, after </think> if `prompt_suffix` is <think>. If
    the protocol has no answer tags, returns it in \\boxed{}, or for multiple choice in a sentence.
    Between blanks an answer has the same tokens as in a passage.
    """
    if protocol.answer_tags is None:
        return f"the correct answer is: {answer}" if task == "choice" else f"\\boxed{{ {answer} }}"
    begin, end = protocol.answer_tags
    return f"{'</think>' if protocol.prompt_suffix == '<think>' else ''}{begin} {answer} {end}"


def script(question: Question, environment: Environment, rng, guess: str = "") -> Script:
    """Yields each turn that ends in a query, and receives what was found. Returns the last turn. It
    is the only one if the protocol does not search, the question need not, or `guess` is given.
    """
    protocol, golds = environment.protocol, question.answers
    if question.task == "choice":
        golds = [question.options[ord(letter) - 65] for letter in golds]
    if protocol.query_tags is None:
        if not question.supporting:
            raise Dropped("the record names no gold reference")
        texts = [question.references[number - 1].text for number in question.supporting]
        cited = " ".join([*texts, "yes no"])  # no text need show these two answers
        facts = [[hop.answer] for hop in question.hops if hop.answer] or [golds]
        if not all(visible(cited, answers) for answers in facts):
            raise Dropped("the gold references do not show the answer")
        return citing(question, protocol, environment.tokenizer)
    if guess or not question.may_search or not hops_of(question):
        thought = rng.choice(GUESS)
        sections = dict.fromkeys(wrapped(protocol, thought, first) for first in (True, False))
        return "".join(sections) + final_answer(protocol, guess or question.answers[0])
    thought, found, facts = rng.choice(FIRST), "", []
    for number, hop in enumerate(hops_of(question)):
        thought += f" {rng.choice(NEXT)}" * bool(number)
        begin, end = protocol.query_tags
        read = yield f"{wrapped(protocol, thought, not number)}{begin} {hop.query} {end}"
        found += f"{read}\n"
        facts.append(visible(read, [hop.answer]) if hop.answer else visible(found, golds))
        if hop.answer and not facts[-1]:
            raise Dropped("the answer of a hop is not in what its query finds")
        relation = hop.answer and " of " in hop.query and "?" not in hop.query
        wordings = (RELATION if relation else FOUND) if facts[-1] else FIRST
        thought = rng.choice(wordings).format(query=hop.query, answer=facts[-1])
    if not facts[-1]:
        raise Dropped("no document with an answer is found")
    answer = question.answers[0] if question.hops or question.task == "choice" else facts[-1]
    box = final_answer(protocol, answer, question.task)
    if protocol.evidence_tags:
        begin, end = protocol.evidence_tags
        evidence = [s for s in sentences(found) if visible(s, facts)]
        box = f"{begin} {' '.join(evidence)} {end}\n{box}"
    return f"{wrapped(protocol, thought, False).rstrip()}\n{box}"


# --------------------------------------------------------------------------------------- all traces
def write_traces(scripts: list[tuple], environment: Environment) -> tuple[list, dict]:
    """Plays scripts in lockstep, given as pairs with their question: each round runs one search of
    each. Returns (the traces that are kept, {id of a question without a trace: the reason}).
    """
    protocol, kept, dropped, playing = environment.protocol, [], {}, []
    for question, turns in scripts:
        prompt = build_prompt(protocol, question, environment.tokenizer)
        playing.append((Trajectory(question, protocol, prompt), turns))
    while playing:
        waiting = []
        for row, turns in playing:
            try:
                if append_turn(row, turns, environment):
                    waiting.append((row, turns))
                else:
                    kept.append(row)
            except Dropped as reason:
                dropped[row.question.id] = str(reason)
        environment.run_searches([row for row, _ in waiting])
        playing = waiting
    return kept, dropped


def append_turn(row: Trajectory, turns: Script, environment: Environment) -> bool:
    """Appends the trace's next turn, and returns whether it ends in a query. Raises Dropped if the
    trace cannot be kept.
    """
    if row.failed or row.stop_reason or row.rejected_queries:
        raise Dropped("a search failed, or the limits allow no more of them")
    try:
        text, reason = turns.send(row.searches[-1].text if row.searches else None), "query"
    except StopIteration as last:
        text, reason = last.value, "answer"
    ids = encode(environment.tokenizer, text)
    if reason == "answer" and reason not in row.protocol.stop_tags.values():
        ids.append(environment.tokenizer.eos_token_id)
    if len(ids) > environment.turn_tokens_left(row):
        raise Dropped("a turn is longer than --max_turn_tokens, or the context is full")
    environment.end_turn(row, ids, [0.0] * len(ids), reason)
    if reason == "answer" and not good_format(row):
        raise Dropped("the paper's format check finds a fault")
    return reason == "query"


def draw_traces(questions, environment: Environment, options: ColdStart, seed: int) -> list:
    """Draws questions, evenly from all kinds, until there are enough traces of each number of hops.
    If there are too few questions, each gives up to COPIES traces. Prints how many gave none, and
    why.
    """
    answers, groups = defaultdict(list), defaultdict(list)
    for question in evenly(questions, seed):
        answers[question.kind] += question.answers
        groups[str(len(hops_of(question)))].append(question)
    sizes = options.hops or {hops: len(groups[hops]) for hops in sorted(groups)}
    kept, lost = [], {}  # the id of a question without a trace -> the reason
    for hops, count in exact_counts(options.traces, sizes).items():
        pairs = itertools.product(range(COPIES), groups[hops])
        left = (pair for pair in pairs if pair[1].id not in lost)
        while batch := [*itertools.islice(left, count)]:
            scripts = []
            for copy, question in batch:
                rng = random.Random(f"{seed} {copy} {question.id}")
                guess = rng.choice(answers[question.kind]) if rng.random() < options.guesses else ""
                scripts.append((question, script(question, environment, rng, guess)))
            rows, dropped = write_traces(scripts, environment)
            lost |= dropped
            count -= len(rows)
            kept += rows
    report_traces(kept, lost, options.traces)
    return kept


def evenly(questions: Sequence[Question], seed: int, weights: Counter = ()) -> list[Question]:
    """Shuffles the questions, then takes them in turns: one of each kind, another of each, ... A
    kind of weight 2 comes twice as often as one of weight 1, as long as it has questions.

    Worked: kinds a a a b -> a b a a; with the weights a: 2, b: 1 -> a a b a.
    """
    turns = Counter()

    def turn(question: Question) -> float:
        turns[question.kind] += 1
        return turns[question.kind] / (weights[question.kind] if weights else 1)

    return sorted(random.Random(f"{seed} order").sample(questions, len(questions)), key=turn)


def report_traces(kept: list[Trajectory], lost: dict[str, str], wanted: int) -> None:
    used = {row.question.id for row in kept}
    total = f"{len(kept)} traces of {len(used)} of {len(used | lost.keys())} questions"
    print(f"{total}; --traces asks for {wanted}")
    for reason, count in Counter(lost.values()).items():
        first = next(name for name in lost if lost[name] == reason)
        print(f"{count} questions gave none, because {reason} (the first: {first})")
    if not kept:
        raise InputError("--data: no question gives a trace, for these reasons; is --corpus right?")


# -------------------------------------------------------------------------------- train and compare
def set_aside(questions: list[Question], share: float, seed: int) -> tuple[list, list]:
    """Returns the questions to train on, and a random share of them that is kept for the exam."""
    count = int(share * len(questions))
    aside = draw_some(questions, count, f"{seed} aside")[:count]
    kept = {question.id for question in aside}
    return [question for question in questions if question.id not in kept], aside


def take_exam(policy, environment: Environment, questions: list[Question], name: str) -> list[dict]:
    """Answers questions as a rollout does, and returns the records. Prints the mean −log π of the
    sampled tokens: near 0, all trajectories of a group would be the same.
    """
    settings = environment.settings
    rows = rollout(policy, environment, questions, settings.seed, choose_generate(settings))
    surprise = -sum(sum(row.logprobs) for row in rows)
    if rows:
        tokens = sum(sum(row.response_mask) for row in rows)
        print(f"{name}: entropy {surprise / tokens:.2f} per token")
    return [
        prediction_record(row, 0) | {"kind": name, "id": f"{name} {row.question.id}"}
        for row in rows
    ]


def train(policy, rows: list[Trajectory], options: ColdStart, seed: int) -> None:
    """Trains on the model's part of the traces. Few traces are shown several times."""
    examples = [Example(row.ids, [0] * len(row.prompt_ids) + row.response_mask) for row in rows]
    order = itertools.cycle(random.Random(f"{seed} traces").sample(examples, len(rows)))
    size = min(options.batch_size, len(rows))
    steps = max(LEAST_UPDATES, math.ceil(options.epochs * len(rows) / size))
    losses = train_sft(
        policy,
        lambda _: [*itertools.islice(order, size)],
        SFTSettings(
            steps, options.lr, 3, decay_from=0.3, betas=(0.9, 0.99), tokens_per_micro_batch=4096
        ),
        "cold start",
    )
    print(f"{steps} updates, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def next_commands(stage: int, out: str, given: dict) -> str:
    """Returns the commands that ask the model, train it by RL and show the run. The model searches
    already, so the recipe's last stage, which rewards answers, is the one to go on with.
    """
    name = f"rl-{Path(out).name}"
    run = Path(given.get("output_dir", "runs"), name)
    flags = given | {"stage": stage, "model": out, "run_name": name}
    known = {field.name: field.metadata.get("only") for field in fields(Settings)}
    shown = " ".join(
        f"--{flag} {shlex.quote(str(value))}"
        for flag, value in flags.items()
        if known[flag] != "eval"  # train.py has no such flag
    )
    return (
        f'python ask.py "..." --model {shlex.quote(out)}\npython train.py {shown} {SMALL}\n'
        f"python view.py {shlex.quote(str(run))}"
    )


def parse(arguments: list[str]) -> tuple[Settings, ColdStart, dict]:
    """Returns (the recipe's settings, the options, the settings that were given)."""
    options, given = parse_flags("coldstart.py", ColdStart, arguments, with_settings=True)
    values = given | {"out": options.out or options.show}
    for name in ("model", "data", "out"):
        if not values.get(name):
            raise InputError(f"coldstart.py: --{name} is missing; --help lists the flags")
    if options.out and Path(options.out).exists():
        raise InputError(f"--out {options.out} already exists: name another, or remove it")
    check_output(Path(options.out, "config.json"), "--out")
    settings = resolve(given.get("recipe", "ur2"), given.get("stage"), False, given)
    return check_settings(replace(settings, group_size=1), training=False), options, given


def print_examples() -> None:
    """Prints the trace of an invented question under each protocol that searches."""
    hops = (Hop("birthplace of Ana Bell", "Kelmouth"), Hop("country of Kelmouth", "Norland"))
    question = Question("", "In which country was Ana Bell born?", ["Norland"], hops=hops)
    for name in ("ur2", "r1_searcher", "r_search", "search_r1", "when_to_search"):
        settings, search = Settings(max_context=4096), make_search(BM25(INVENTED), k=1)
        environment = Environment(ByT5Tokenizer(), PROTOCOLS[name], search, settings)
        turns = script(question, environment, random.Random(0))
        (row,), _ = write_traces([(question, turns)], environment)
        print(f"== {name}\n{show(row)}\n")


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        return print_examples()
    settings, options, given = parse(arguments)
    set_threads()
    seed, device = settings.seed, best_device()
    policy, tokenizer = load_policy(settings.model, device, settings)
    questions = as_asked(load_questions(settings.data, settings.skip_bad, seed), settings)
    search = build_search(settings, load_documents(settings, questions), device)
    environment = build_environment(settings, tokenizer, search, policy, training=True)
    questions = check_prompts(questions, environment, policy, settings.skip_bad)
    trained_on, aside = set_aside(questions, options.held_out, seed)
    rows = draw_traces(trained_on, environment, options, seed)
    if options.show:
        return print("\n\n".join(map(show, rows[: options.show])))
    asked = draw_some(aside, options.exam, f"{seed} exam")[: options.exam]
    records = take_exam(policy, environment, asked, "before")
    train(policy, rows, options, seed)
    save_policy(policy, tokenizer, options.out, settings=settings_text(settings))
    print(f"saved: {options.out}")
    records += take_exam(policy, environment, asked, "cold start")
    if records:
        columns = ("em", "f1", "cem", "searches", "format")
        print(table(summarise(records), head="model", columns=columns))
    if "reader_answer" in needs(settings):
        given = {"reader": settings.model} | given
    print(f"go on with:\n{next_commands(settings.stage, options.out, given)}")


if __name__ == "__main__":
    run_main(main)
