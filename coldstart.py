"""Cold start: before RL, a small model learns to write a query, read the result, close its answer.

    question with hops -> trace by rule -> masked supervised training (sft.py) -> a --model for RL

RL reinforces what a model already does now and then. A small model never searches under a paper's
protocol (SmolLM2-135M: 0 of 72 questions), so there is nothing to reinforce. A trace shows it the
protocol once:

    for each hop   a thought, the hop's query in its tags, the documents that the retriever returns
    at the end     the hop's fact, and the answer in the protocol's form

The environment of the rollout writes the trace's documents and masks, so a trace is a trajectory as
RL will see it. It is kept only if every hop's answer is visible in what was found, and if it passes
the format check of its paper. A question without hops gets one search for its key words, or one for
each gold title; an answer must be visible. Each thought has several wordings, so that samples
differ and RL has something to choose from. `--guesses` adds traces that answer at once with another
question's answer, in other words; RL can unlearn them.

    python coldstart.py --model DIR --data FILE --corpus FILE --out DIR     trains and saves
    python coldstart.py ... --show 3                                        only prints traces

R1-Searcher compares its RL with supervised training on such traces; UR² and R-Search start from
instruct models of 3B and more, which follow the protocol without it. Left out: a teacher model
(lab/distil.py imitates one), mathematics, several processes.
"""

from errors import FlagParser, InputError, check_output, prepare_command, run_main, setting

if __name__ == "__main__":
    prepare_command()
# isort: split
import random
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from papers import record_of
from settings import (
    ASKING,
    MORE_HELP,
    Settings,
    add_flags,
    check_limits,
    check_settings,
    named_in,
    resolve,
)


@dataclass(frozen=True)
class ColdStart:
    """Trains a model on traces that show how to search; then it can be trained by RL."""

    out: str = setting("", "folder to save the model in", needed=True)
    traces: int = setting(200, "traces to train on", least=1)
    hops: str = setting(
        "", "share of traces by number of hops: 1:0.9,2:0.1; default: as the questions have them"
    )
    guesses: float = setting(0.0, "share of traces that guess without a search", least=0, most=1)
    epochs: float = setting(1.5, "passes over the traces; at least 20 updates are made", above=0)
    batch_size: int = setting(8, "traces per update", least=1)
    lr: float = setting(4e-4, "learning rate, for 135M weights; larger models need less", above=0)
    held_out: float = setting(0.1, "share of questions kept aside to compare on", least=0, below=1)
    exam: int = setting(30, "how many of them are asked before and after; 0: none", least=0)
    show: int = setting(0, "print this many traces and train nothing", least=0)


def read_flags(arguments: list[str]) -> tuple[Settings, ColdStart, dict]:
    """Returns (the recipe's settings, the options, the settings that were given)."""
    parser = FlagParser("coldstart.py", description=ColdStart.__doc__ + MORE_HELP)
    parser.most_used = "help recipe model data corpus documents_per_search".split()
    parser.most_used += [f.name for f in fields(ColdStart)]
    add_flags(parser, ASKING, named_in(arguments), "eval")
    add_flags(parser, (ColdStart,), ColdStart(), "eval")
    given = vars(parser.parse_args(arguments))
    options = ColdStart(**{f.name: given.pop(f.name, f.default) for f in fields(ColdStart)})
    check_limits(options)
    for name in ("model", "data"):
        if not given.get(name):
            parser.error(f"--{name} is missing")
    if not (options.out or options.show):
        parser.error("--out is missing: the folder to save the model in")
    if Path(options.out).exists() and options.out:
        raise InputError(f"--out {options.out} already exists: name another, or remove it")
    check_output(f"{options.out}/x", "--out")
    recipe = given.get("recipe", "ur2")
    variant = given.get("variant", "")
    stage = given.get("stage", max(record_of(recipe, variant).stages))
    settings = replace(resolve(recipe, stage, False, given), group_size=1)
    return check_settings(settings, False, given), options, given


if __name__ == "__main__":
    run_main(lambda: read_flags(sys.argv[1:]))  # a wrong flag is reported before torch is loaded
# isort: split
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from types import SimpleNamespace

from tqdm import tqdm
from transformers import AutoConfig

from curriculum import exact_counts, parse_shares
from data import Hop, Question, SearchRequest, draw_some, load_questions
from metrics import normalize_answer, score_answer
from papers import paper_of
from plumbing.build import (
    build_environment,
    build_search,
    choose_generate,
    set_threads,
)
from plumbing.files import settings_text
from plumbing.questions import as_asked, load_documents
from policy import best_device, load_policy, load_tokenizer, save_policy
from prompts import Protocol, build_prompt, number_documents, tag_pair, without_control
from rollout import Environment, check_prompts, encode, rollout
from sft import Example, SFTSettings, train_sft
from trajectory import Trajectory, show
from trajectory_metrics import mean, paper_metrics, trajectory_metrics

LEAST_UPDATES = 20
# Wordings. {query} and {answer} are those of the hop that was just read.
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
    "It is {answer}.",
)
NEXT = (
    "Next I search for it.",
    "Now I look up the next fact.",
    "Now I need one more fact.",
    "Then:",
)
CLOSE = ("So the answer is", "The answer:", "That answers the question:", "Answer:")
# Apart from the wordings above: with the same words, a model that has read a document would go on
# as if it guessed.
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
    question names first; without titles, one search for its key words.
    """
    titles = [question.references[number - 1].title for number in question.supporting]
    named = sorted(filter(None, titles), key=lambda title: title not in question.question)
    searches = map(Hop, named or [key_words(question.question)])
    return question.hops or tuple(searches)


def visible(found: str, answers: Sequence[str]) -> str:
    """Returns the first of these answers that stands in the text as whole words, or ""."""
    text = f" {normalize_answer(found)} "
    return next((a for a in answers if f" {normalize_answer(a)} " in text), "")


def accepted(question: Question) -> list[str]:
    """Returns the texts that answer a question; for multiple choice those of the gold options."""
    if question.task != "choice":
        return question.answers
    return [question.options[ord(letter) - 65] for letter in question.answers]


def wrapped(protocol: Protocol, thought: str, first: bool) -> str:
    """Puts a thought into the section that the protocol has for it: <think> at the beginning,
    <reflect> after documents (When to Search); other protocols have one of the two, or none.
    """
    for name in ("think",) if first else ("reflect", "think"):
        if tag_pair(name)[0] in protocol.tags and not protocol.prompt_suffix:
            return f"<{name}> {thought} </{name}>\n"
    return f"{thought} "


def final_answer(protocol: Protocol, answer: str, task: str = "qa") -> str:
    """Returns the answer in the protocol's tags, after </think> if `prompt_suffix` is <think>; or
    in \\boxed{} if the protocol has no answer tags (multiple choice: UR²'s sentence).
    """
    if protocol.answer_tags is None:
        return f"the correct answer is: {answer}" if task == "choice" else f"\\boxed{{{answer}}}"
    begin, end = protocol.answer_tags
    return f"{'</think>' if protocol.prompt_suffix == '<think>' else ''}{begin} {answer} {end}"


def script(question: Question, protocol: Protocol, rng, tokenizer, guess: str = "") -> Script:
    """Yields each turn that ends in a query and receives what was found. Returns the last turn,
    which is the only one if the protocol does not search, the question may not, or `guess` is an
    answer to give at once.
    """
    if protocol.query_tags is None:
        return citing(question, protocol, tokenizer)
    if guess or not question.may_search:
        return without_search(question, protocol, rng, guess or question.answers[0])
    begin, end = protocol.query_tags
    thought, everything, seen = rng.choice(FIRST), "", []
    for number, hop in enumerate(hops_of(question)):
        thought = f"{thought} {rng.choice(NEXT)}" if number else thought
        found = yield f"{wrapped(protocol, thought, not number)}{begin} {hop.query} {end}"
        everything += f"{found}\n"
        if hop.answer and not visible(found, [hop.answer]):
            raise Dropped("a hop's answer is not in what its query finds")
        seen.append(hop.answer or visible(everything, accepted(question)))
        of_relation = " of " in hop.query and "?" not in hop.query
        wordings = RELATION if of_relation and hop.answer else FOUND if seen[-1] else FIRST
        thought = rng.choice(wordings).format(query=hop.query, answer=seen[-1])
    if not question.hops and not seen[-1]:
        raise Dropped("no document with an answer is found")
    answer = question.answers[0] if question.hops or question.task == "choice" else seen[-1]
    box = final_answer(protocol, answer, question.task)
    if protocol.answer_tags is None:
        return f"{thought} {rng.choice(CLOSE)} {box}"
    evidence = ""
    if protocol.evidence_tags:
        begin, end = protocol.evidence_tags
        evidence = f"{begin} {sentences_with(everything, seen)} {end}\n"
    return f"{wrapped(protocol, thought, False).rstrip()}\n{evidence}{box}"


def sentences_with(text: str, facts: Sequence[str]) -> str:
    """Returns the sentences of a text in which one of these facts stands, word for word."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    return " ".join(s for s in sentences if visible(s, [*filter(None, facts)])) or sentences[0]


def without_search(question: Question, protocol: Protocol, rng, answer: str) -> str:
    """Returns a response that answers at once, in words of their own."""
    thought = rng.choice(GUESS)
    if protocol.answer_tags is None:
        return f"{thought} {final_answer(protocol, answer, question.task)}"
    parts = [wrapped(protocol, thought, first) for first in (True, False)]
    kept = parts[: 1 + (parts[0] != parts[1] and parts[1] != f"{thought} ")]
    return f"{''.join(kept).rstrip()}\n{final_answer(protocol, answer)}"


def citing(question: Question, protocol: Protocol, tokenizer) -> str:
    """Returns ARENA's response: <relevance>[1, 3]</relevance> <analysis>...</analysis>, then the
    first gold answer in the protocol's tags.
    """
    protocol.section_tags("relevance")  # raises an error if the protocol has no such section
    analysis = without_control(analysis_of(question), tokenizer, protocol.tags).strip()
    return (
        f"<relevance>{list(question.supporting)}</relevance>\n<analysis> {analysis} </analysis>\n"
        + final_answer(protocol, question.answers[0])
    )


def analysis_of(question: Question) -> str:
    """Quotes one sentence of each gold reference (the first that contains an answer, else its
    first), then states the first gold answer.
    """

    def answers(sentence: str) -> bool:
        return any(answer.lower() in sentence.lower() for answer in question.answers)

    def quote(text: str) -> str:
        return max(re.split(r"(?<=[.!?])\s+", text.strip()), key=answers)  # in a tie the first

    quotes = number_documents([replace(r, text=quote(r.text)) for r in question.references])
    quoted = [quotes[number - 1] for number in question.supporting]
    return " ".join([*quoted, f"So the answer is {question.answers[0]}."])


# --------------------------------------------------------------------------------------- all traces
def write_traces(questions, environment: Environment, seed: int, guesses: dict) -> tuple:
    """Returns (the traces that are kept, a list of pairs of a question and the reason why it has
    none). All traces are written in lockstep: each round runs one search of each. `guesses` maps
    the ids of questions to the answers to give at once.
    """
    running, kept, dropped = [], [], []
    for q in questions:
        row = start_row(environment, q)
        rng = random.Random(f"{seed} {q.id}")
        text = guesses.get(q.id, "")
        running.append((row, script(q, row.protocol, rng, environment.tokenizer, text)))
    while running:
        waiting = []
        for row, writer in running:
            try:
                if next_turn(row, writer, environment):
                    waiting.append((row, writer))
                else:
                    kept.append(row)
            except Dropped as reason:
                dropped.append((row.question, str(reason)))
        environment.run_searches([row for row, _ in waiting])
        running = waiting
    return kept, dropped


def start_row(environment: Environment, question: Question) -> Trajectory:
    prompt = build_prompt(environment.protocol, question, environment.tokenizer)
    return Trajectory(question, environment.protocol, prompt)


def next_turn(row: Trajectory, writer: Script, environment: Environment) -> bool:
    """Appends the trace's next turn. Returns whether it ends in a query. Raises Dropped if the
    trace cannot be kept.
    """
    turns = sum(segment.writer == "model" for segment in row.segments)
    if row.failed or row.stop_reason or len(row.searches) < turns:
        raise Dropped("a search failed, or the limits on searches and tokens allow no more")
    ends = [environment.tokenizer.eos_token_id] * ("answer" not in row.protocol.stop_tags.values())
    try:
        text = writer.send(row.searches[-1].text if turns else None)
        ids, reason = encode(environment.tokenizer, text), "query"
    except StopIteration as last:
        ids, reason = encode(environment.tokenizer, last.value) + ends, "answer"
    if len(ids) > environment.turn_tokens_left(row):
        raise Dropped("a turn is longer than --max_turn_tokens, or the context is full")
    environment.end_turn(row, ids, [0.0] * len(ids), reason)
    if reason == "answer" and not paper_of(row.protocol.name).good_format(row):
        raise Dropped("the paper's format check finds a fault")
    return reason == "query"


def draw_traces(questions, environment: Environment, options: ColdStart, seed: int) -> list:
    """Draws questions evenly from all kinds until there are enough traces, by the shares of
    --hops. Prints how many questions gave none, and why.
    """
    groups = defaultdict(list)
    for question in evenly(questions, seed):
        groups[str(len(hops_of(question)))].append(question)
    shares = parse_shares(options.hops.replace(":", "="), "--hops")
    shares = {n: shares.get(n, 0.0) if shares else len(groups[n]) for n in sorted(groups)}
    kept, dropped = [], []
    with tqdm(total=options.traces, desc="traces", leave=False, delay=3) as bar:
        for number, count in exact_counts(options.traces, shares).items():
            queue = groups[number]
            while count and queue:
                batch, queue = queue[:count], queue[count:]
                guesses = draw_guesses(batch, questions, options.guesses, seed)
                rows, lost = write_traces(batch, environment, seed, guesses)
                count -= len(rows)
                kept += rows
                dropped += lost
                bar.update(len(rows))
    report_traces(kept, dropped, options)
    return kept


def evenly(questions: Sequence[Question], seed: int) -> list[Question]:
    """Shuffles the questions, then takes them in turns: one of each kind, another of each, ...

    Worked: kinds a a a b -> a b a a.
    """
    rng, turns = random.Random(f"{seed} order"), Counter()
    order = []
    for question in rng.sample(questions, len(questions)):
        turns[question.kind] += 1
        order.append((turns[question.kind], len(order), question))
    return [question for *_, question in sorted(order)]


def draw_guesses(batch, questions, share: float, seed: int) -> dict[str, str]:
    """Returns {id: an answer of another question of the same kind} for a share of the batch."""
    by_kind = defaultdict(list)
    for question in questions:
        by_kind[question.kind] += question.answers
    guesses = {}
    for question in batch:
        rng = random.Random(f"{seed} guess {question.id}")
        if rng.random() < share:
            guesses[question.id] = rng.choice(by_kind[question.kind])
    return guesses


def report_traces(kept: list[Trajectory], dropped: list, options: ColdStart) -> None:
    reasons = defaultdict(list)
    for question, reason in dropped:
        reasons[reason].append(question.id)
    lines = [f"{len(kept)} of {len(kept) + len(dropped)} questions gave a trace"]
    for reason, ids in reasons.items():
        lines.append(f"{len(ids)} did not: {reason} ({', '.join([*ids[:5], '...'][: len(ids)])})")
    if not kept:
        raise InputError(f"--data: no trace can be written: {'; '.join(lines)}: is --corpus right?")
    if len(kept) < options.traces:
        lines[0] += f"; --traces asks for {options.traces}"
    print("\n  ".join(lines))


# -------------------------------------------------------------------------------- train and compare
def train(policy, rows: list[Trajectory], options: ColdStart, seed: int) -> None:
    """Trains on the model's part of the traces. Few traces are shown several times."""
    examples = [
        Example(row.ids, [0] * len(row.prompt_ids) + row.response_mask)
        for row in random.Random(f"{seed} traces").sample(rows, len(rows))
    ]
    size = min(options.batch_size, len(examples))
    steps = max(LEAST_UPDATES, math.ceil(options.epochs * len(examples) / size))
    endless = itertools.cycle(examples)
    settings = SFTSettings(
        steps, options.lr, 3, decay_from=0.3, betas=(0.9, 0.99), tokens_per_micro_batch=4096
    )
    losses = train_sft(policy, lambda _: [*itertools.islice(endless, size)], settings, "cold start")
    print(f"{steps} updates, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if not math.isfinite(sum(losses)):
        raise InputError(f"the loss was not finite: nothing was saved; lower --lr {options.lr:g}")


def examine(policy, environment: Environment, questions, seed: int, generate) -> dict[str, float]:
    """Asks held-out questions as in a rollout and returns mean metrics. `entropy` is the mean
    −log π of the sampled tokens: near 0, the trajectories of a group would all be the same.
    """
    rows = rollout(policy, environment, questions, seed, generate)
    numbers = defaultdict(list)
    for row in rows:
        metrics = trajectory_metrics(row)
        for name, number in (metrics | paper_metrics(row, metrics["em"])).items():
            numbers[name].append(number)
    written = sum(sum(row.response_mask) for row in rows)
    means = {name: mean(values) for name, values in numbers.items()}
    return means | {"entropy": -sum(sum(row.logprobs) for row in rows) / max(1, written)}


RAG = Protocol(
    "baseline_ur2",
    None,
    None,
    tag_pair("answer"),
    "Read the passages and answer the question in a few words: a name, a date, a number, yes or no."
    " Write nothing but <answer> your answer </answer>.",
    "",
)


def plain_rag(policy, environment: Environment, questions, seed: int, generate) -> dict[str, float]:
    """Returns the metrics of a model that reads what one search for the question finds, and
    answers (greedily). Without tags, its first line is the answer.
    """
    requests = [SearchRequest(question, question.question) for question in questions]
    shown = []
    for question, result in zip(questions, environment.search(requests), strict=True):
        passages = "\n".join(number_documents(result.documents))
        shown.append(replace(question, question=f"{passages}\n\nQuestion: {question.question}"))
    reader = Environment(
        environment.tokenizer,
        RAG,
        environment.search,
        replace(environment.settings, temperature=0.0, max_turn_tokens=32, turn_tokens=""),
        environment.max_context,
    )
    scores = defaultdict(list)
    for row in rollout(policy, reader, shown, seed, generate):
        q = row.question
        answer = row.answer or row.model_text.strip().partition("\n")[0]
        for name, number in score_answer(answer, q.answers, q.task, q.options).items():
            scores[name].append(number)
    return {name: mean(values) for name, values in scores.items()}


def print_table(rows: dict[str, dict[str, float]]) -> None:
    names = ("em", "f1", "cem", "searches", "format", "entropy")
    print(f"{'':12}" + "".join(f"{name:>10}" for name in names))
    for title, numbers in rows.items():
        cells = (f"{numbers[name]:10.2f}" if name in numbers else f"{'-':>10}" for name in names)
        print(f"{title:12}{''.join(cells)}")


def next_commands(settings: Settings, options: ColdStart, given: dict) -> str:
    """Returns the commands that ask the model, train it by RL, and show the run."""
    out, name = options.out, Path(options.out).name
    flags = {"recipe": settings.recipe} | given | {"model": out, "run_name": f"rl-{name}"}
    flags |= {"stage": 1, "questions_per_step": 4, "group_size": 8, "trajectories_per_update": 32}
    flags |= {"steps": 20, "lr": 1e-5, "task_mixing": False}
    shown = " ".join(f"--{flag} {value}" for flag, value in flags.items())
    folder = Path(settings.output_dir, flags["run_name"])
    return f'python ask.py "..." --model {out}\npython train.py {shown}\npython view.py {folder}'


def main(arguments: list[str] | None = None) -> None:
    settings, options, given = read_flags(sys.argv[1:] if arguments is None else arguments)
    set_threads()
    seed, device = settings.seed, best_device()
    tokenizer = load_tokenizer(settings.model)
    questions = load_questions(settings.data, settings.skip_bad, seed)
    search = build_search(settings, load_documents(settings, questions), device)
    shape = SimpleNamespace(config=AutoConfig.from_pretrained(settings.model))
    environment = build_environment(settings, tokenizer, search, shape)
    questions = as_asked(questions, settings)
    check_prompts(questions, environment, shape)
    aside = draw_some(questions, round(options.held_out * len(questions)), f"{seed} aside")
    aside = aside if len(aside) < len(questions) else []
    ids = {question.id for question in aside}
    rest = [question for question in questions if question.id not in ids]
    rows = draw_traces(rest, environment, options, seed)
    for row in rows[: options.show]:
        print(f"\n{show(row)}")
    if options.show:
        return
    policy, tokenizer = load_policy(settings.model, device, settings=settings)
    asked = draw_some(aside, options.exam, f"{seed} exam") if options.exam else []
    generate = choose_generate(settings)
    table = {}
    if asked:
        print(f"{len(asked)} held-out questions at temperature {settings.temperature:g} ...")
        table["before"] = examine(policy, environment, asked, seed, generate)
        table["plain RAG"] = plain_rag(policy, environment, asked, seed, generate)
    train(policy, rows, options, seed)
    save_policy(policy, tokenizer, options.out, settings=settings_text(settings))
    print(f"saved: {options.out}")
    if asked:
        table["cold start"] = examine(policy, environment, asked, seed, generate)
        print_table(table)
    print(f"go on with:\n{next_commands(settings, options, given)}")


if __name__ == "__main__":
    run_main(main)
