"""What a checkpoint, or a predictions file, is worth: em, F1, cover-EM, and how it searches.

    python eval.py                                  the last checkpoint, held-out names
    python eval.py --model DIR --data FILE --corpus from-data
    python eval.py --stage 0                        before RL
    python eval.py --retriever empty                does it read, or recall?
    python eval.py --judge URL#MODEL                is the answer right in other words?
    python eval.py --recipe r_search --reader SPEC  another model answers from the evidence
    python eval.py --data A,B,C --model DIR         several data sets, one table
    python eval.py ... --against FILE               two runs compared question by question
    python eval.py --predictions FILE               score a file, in any layout, without a model

Greedy unless told otherwise, with the protocol, documents and limits of training. Predictions are
written as they come; the same command goes on where it was interrupted.
"""

import dataclasses
import hashlib
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from errors import FlagParser, InputError, check_output, prepare_command, run_main, setting
from plumbing.predictions import (
    PUNCTUATION,
    check_alone,
    score_command,
    score_files,
    scored,
)
from plumbing.report import report

if __name__ == "__main__":
    prepare_command()
    run_main(check_alone)
    if any(word.split("=")[0] == "--predictions" for word in sys.argv):
        run_main(score_command)  # without a model: what follows would load torch for seconds
        sys.exit()

from tqdm import tqdm

from data import Question, draw_some, harmless, load_datasets
from formats.records import append_jsonl, write_records
from metrics import summary_scores
from papers import paper_of, record_of
from plumbing import score
from plumbing.build import (
    as_asked,
    build_environment,
    build_protocol,
    build_search,
    built_in_world,
    load_model,
    passages,
    play_of,
    with_retrieved,
    world_questions,
)
from plumbing.files import (
    WRITES,
    checkpoints,
    go_on,
    instructions,
    locked,
    saved_settings,
    stage_folder,
)
from policy import best_device, check_model_path, weights_version
from prompts import PROTOCOLS
from rewards import arena_scores, evidence_support, needs
from rollout import check_prompts, rollout
from settings import (
    ASKING,
    SEARCHING,
    Settings,
    add_flags,
    check_limits,
    check_settings,
    named_in,
    resolve,
)
from summarizer import SEARCH_FAILED
from trajectory import Trajectory

QUESTIONS_AT_ONCE = 64


@dataclass(frozen=True)
class Options:
    """What an evaluation is asked beside the settings of a run."""

    split: str = setting("test", "of the built-in world", one_of=("train", "dev", "test"))
    questions: int = setting(100, "per kind, or drawn with the seed from a file; 0 = all", least=0)
    samples: int = setting(1, "trajectories per question", least=1)
    first: bool = setting(False, "of a file the first --questions, not drawn ones")
    references: str = setting("given", "where ARENA's come from", one_of=("given", "retrieved"))
    fact_seed: int | None = setting(None, "redraw every fact of the built-in world")
    decoding: str = setting(
        "greedy",
        "paper: as the paper evaluates; both: at temperature 1, and greedily",
        one_of=("greedy", "paper", "both"),
    )
    fresh: bool = setting(False, "do not go on with predictions that are there already")
    out: str = setting("", "predictions file; default: under runs/predictions")
    against: str = setting("", "predictions of another run (FILE,FILE), compared in pairs")
    punctuation: str = setting("", "becomes a blank, or nothing", one_of=("", *PUNCTUATION))
    markdown: bool = setting(False, "print Markdown tables")
    json: str = setting("", "write the numbers to this file too")


# ----------------------------------------------------------------------------------- one trajectory
def grade(trajectory: Trajectory) -> dict[str, float]:
    """The numbers of one trajectory. What does not apply to it has no entry, not a 0."""
    protocol, question, searches = trajectory.protocol, trajectory.question, trajectory.searches
    if question.task == "summary":
        numbers = summary_scores(trajectory.answer, question.answers)
    else:
        numbers = score.answer_scores(trajectory)
    if protocol.query_tags:
        numbers |= score.search_numbers(trajectory)
        numbers["fallbacks"] = float(sum(search.fallback for search in searches))
    numbers["format"] = float(paper_of(protocol.name).good_format(trajectory))
    if protocol.evidence_tags:
        numbers["evidence"] = float(bool(trajectory.evidence))
        if trajectory.evidence:
            numbers["support"] = evidence_support(trajectory)
    if protocol.references_in_prompt and question.supporting:
        numbers |= arena_scores(trajectory)
        if "em" in numbers:  # ARENA Table 13
            numbers["all_correct"] = numbers["em"] * numbers["exact_set"]
    return numbers


def prediction_record(trajectory: Trajectory, sample: int) -> dict:
    """A line of a predictions file."""
    question, protocol = trajectory.question, trajectory.protocol
    searches = [
        {"query": s.query, "fallback": s.fallback, "error": s.error} for s in trajectory.searches
    ]
    record = {
        "id": question.id,
        "sample": sample,
        "kind": question.kind,
        "task": question.task,
        "question": question.question,
        "golds": question.answers,
        "prediction": trajectory.answer,
        "punctuation": paper_of(protocol.name).punctuation,
        "transcript": trajectory.text,
        "stop_reason": trajectory.stop_reason,
        "searches": searches,
    }
    record["metrics"] = grade(trajectory)
    if question.options:
        record["options"] = list(question.options)
    if question.supporting:
        record["hops"] = len(question.supporting)
    if protocol.evidence_tags:
        record["evidence"] = trajectory.evidence
    return record


# ------------------------------------------------------------------------------------ many of them
class Evaluation:
    """Questions, passages, a model and where the predictions go."""

    def __init__(self, settings: Settings, options: Options):
        self.settings = dataclasses.replace(settings, group_size=options.samples)
        self.options, self.out = options, Path(options.out or default_out(settings, options))
        self.datasets, self.documents = material(settings, options)
        self.questions = [q for questions in self.datasets.values() for q in questions]
        self.dataset_of = {q.id: name for name, some in self.datasets.items() for q in some}
        self.tokenizer = None  # until the policy is loaded

    def load(self) -> tuple[Callable, str]:
        """((questions, seed, progress) -> the model's trajectories, the version of its weights)."""
        settings, device = self.settings, best_device()
        search = build_search(settings, self.documents, device)
        policy, self.tokenizer = load_model(settings, settings.model, device, frozen=True)
        environment = build_environment(settings, self.tokenizer, search)
        check_prompts(self.questions, environment, policy)

        def play(some: list[Question], seed: int, progress=None) -> list[Trajectory]:
            return rollout(policy, environment, some, seed, play_of(settings), progress)

        return play, weights_version(settings.model, policy) if settings.model else "built-in"

    def run(self) -> list[dict]:
        """Prediction records of the model's rollouts."""
        self.lock = locked(self.out, saying=WRITES)  # as long as this evaluation is used
        play, version = self.load()
        self.say_what()

        def rows_of(some: list[Question], start: int, progress) -> list[Trajectory]:
            return play(some, self.settings.seed + start, progress)

        return self.collect(self.out, version, rows_of)

    def collect(self, out: Path, version: str, rows_of, what: str = "evaluation") -> list[dict]:
        """Prediction records; each batch is written as it comes.

        rows_of   (questions, the number of the first, progress) -> their trajectories; one that is
                  left out is made with its batch by the next run
        """
        options, batch = self.options, QUESTIONS_AT_ONCE * self.options.samples
        expected = [(q.id, sample) for q in self.questions for sample in range(options.samples)]
        made_with = self.made_with(version)
        records = go_on(out, made_with, expected, key_of, batch, options.fresh)
        if records:
            print(f"{len(records)} of {len(expected)} predictions are there: it goes on")
        begin = len(records) // options.samples
        with tqdm(total=len(expected), initial=len(records), desc=what) as bar:
            for start in range(begin, len(self.questions), QUESTIONS_AT_ONCE):
                some = self.questions[start : start + QUESTIONS_AT_ONCE]
                rows = rows_of(some, start, bar.update)
                made = [self.record(row, i) for i, row in enumerate(rows)]
                append_jsonl(out, made)
                records += made
        if faults := search_faults(records):
            said = f"warning: {len(faults)} searches failed (the first: {harmless(faults[0])})"
            why = "these scores are not the model's; the same command makes those batches anew"
            print(f"{said}: {why}", file=sys.stderr)
        return records

    def record(self, trajectory: Trajectory, row: int) -> dict:
        record = prediction_record(trajectory, row % self.options.samples)
        if self.tokenizer:
            record["metrics"] |= score.token_numbers(trajectory, self.tokenizer)
        if len(self.datasets) > 1:
            record["dataset"] = self.dataset_of[record["id"]]
        return record

    def say_what(self) -> None:
        settings, options = self.settings, self.options
        model = settings.model or "the built-in model, before RL"
        if before := saved_settings(settings.model):
            day = time.ctime(Path(settings.model, "settings.json").stat().st_mtime)
            model += f" (of {day})"
            if settings.data and settings.data == before.data:
                print("warning: it was trained on these questions: name others with --data")
        names, some, searching = ", ".join(self.datasets), "", ""
        if settings.data and options.questions:
            some = "the first" if options.first else f"drawn with seed {settings.seed},"
            some = f" ({some} {options.questions} of each: --questions 0 takes all)"
        if PROTOCOLS[settings.protocol].query_tags:
            searching = f", retriever {settings.retriever}"
        how = f"{options.samples} sample(s) each, temperature {settings.temperature:g}"
        print(f"{model}: {len(self.questions)} questions of {names}{some}, {how}{searching}")

    def made_with(self, version: str) -> dict:
        """What the predictions hang on: settings, weights, questions and passages."""
        made = dataclasses.asdict(self.settings)
        for name in ("name", "runs", "served", "judge", "reader", "timeout"):  # not of a prediction
            del made[name]
        # --prompt_file names a file, not its words.
        told = [build_protocol(self.settings).instruction]
        told.append(instructions(self.settings).get("summarizer", ""))
        content = hashlib.sha256()
        for item in [*told, *self.questions, *self.documents]:
            content.update(repr(item).encode())
        return made | {"weights": version, "material": content.hexdigest()[:16]}


def key_of(record: dict) -> tuple | None:
    """(question, sample); None where the retriever was out: that is made again."""
    if set(search_faults([record])) - {SEARCH_FAILED}:  # a query that it does not take fails again
        return None
    return record.get("id"), record.get("sample")


def search_faults(records: list[dict]) -> list[str]:
    """What failed searches said."""
    faults = []
    for record in records:
        faults += [s["error"] for s in record.get("searches", []) if s["error"]]
    return faults


def material(settings: Settings, options: Options) -> tuple[dict[str, list[Question]], list]:
    """(questions by data set, passages)."""
    count = options.questions
    if settings.data:
        datasets = load_datasets(settings.data, settings.skip_bad, settings.seed)
        documents = passages(settings, [q for some in datasets.values() for q in some])
        lot = f"{count} questions {settings.seed}"
        for name, some in datasets.items():
            datasets[name] = some[:count] if options.first else draw_some(some, count, lot)
    else:
        some = world_questions(settings, options.split, count or None, options.fact_seed)
        world = built_in_world(settings, options.fact_seed)
        documents = passages(settings, some) if settings.corpus else world.documents
        datasets = {"the built-in world": some}
    for name, some in datasets.items():
        if options.references == "retrieved":
            some = with_retrieved(some, documents, settings)
        datasets[name] = as_asked(some, settings)
    return datasets, documents


# ---------------------------------------------------------------------------------- whose settings?
def settings_of(given: dict) -> Settings:
    """The checkpoint's own settings, made greedy; the command line comes last. Of the models that
    its reward asks only the judge of "right" is kept (When to Search section 4.1: as in training).
    """
    given, model = dict(given), given.get("model", "")
    if given.get("stage") == 0:
        del given["stage"]
    elif not model:
        model = last_checkpoint(given)
    if model:
        check_model_path(model)
    settings = saved_settings(model)
    if settings is None or given.get("recipe", settings.recipe) != settings.recipe:
        name, variant = given.get("recipe", "ur2"), given.get("variant", "")
        stage = given.get("stage", max(record_of(name, variant).stages))
        settings = resolve(name, stage, not model, {"variant": variant})
    own = {"temperature": 0.0, "top_p": 1.0, "reader": ""}
    if "verdict" not in needs(settings):
        own["judge"] = ""
    if "data" in given and settings.corpus != "from-data":
        own["corpus"] = ""  # the old file's
    if settings.engine != "hf":  # the servers of a run hold what it trains
        own["engine"] = "slots"
    return dataclasses.replace(settings, **(own | given | {"model": model}))


def last_checkpoint(given: dict) -> str:
    """Of the latest stage of the run that the flags name; "" where there is none."""
    name = given.get("recipe", "ur2")
    rest = {key: value for key, value in given.items() if key not in ("recipe", "stage")}
    run = resolve(name, given.get("stage", 1), True, rest)
    known = record_of(name, run.variant).stages
    stages = [given["stage"]] if "stage" in given else sorted(known, reverse=True)
    for stage in stages:
        if found := checkpoints(stage_folder(run, stage)):
            return str(found[-1])
    if "name" in given or "stage" in given:
        folder = stage_folder(run, stages[0]).parent
        raise InputError(f"no checkpoint of that run in {folder}: train first, or give --model")
    return ""


# -------------------------------------------------------------------------------- the command line
def parse(arguments: list[str]) -> tuple[Settings, Options]:
    said = "Score a checkpoint. Of a file, without a model: see --predictions FILE --help."
    parser = FlagParser("eval.py", description=said)
    add_flags(parser, ASKING, named_in(arguments), "eval")
    add_flags(parser, (Options,), Options(), "eval")
    given = vars(parser.parse_args(arguments))
    chosen = {f.name: given.pop(f.name, f.default) for f in dataclasses.fields(Options)}
    options = Options(**chosen)
    check_options(options, given)
    settings = settings_of(given)
    if options.decoding == "paper":  # of the checkpoint's recipe
        settings = settings_of(record_of(settings.recipe, settings.variant).decoding | given)
    read = SEARCHING if options.references == "retrieved" else ()
    check_settings(settings, False, given.keys() - read)
    if "prompt_file" in given:  # a checkpoint's may name what only training asks
        instructions(settings, strict=True)
    if settings.reader and not PROTOCOLS[settings.protocol].evidence_tags:
        why = f"which protocol {settings.protocol} does not have: leave it out"
        raise InputError(f"--reader answers from evidence boxes, {why}")
    if options.first and not (settings.data and options.questions):
        raise InputError("--first takes the first --questions of --data: leave it out")
    return settings, options


def check_options(options: Options, given: dict) -> None:
    check_limits(options)
    for name in ("out", "json"):
        if path := getattr(options, name):
            check_output(path, f"--{name}")
            if options.decoding == "both":
                why = f"evaluates twice, and --{name} is for one: leave one out"
                raise InputError(f"--decoding both {why}")
    if options.decoding == "both" and "temperature" in given:
        raise InputError("--decoding both has temperatures of its own: leave --temperature out")
    if given.get("in_8bit") not in (None, "", "others"):
        raise InputError("--in_8bit: nothing is trained here: others is all that it can name")


def default_out(settings: Settings, options: Options) -> Path:
    """Never into the model's own folder: it may be a hub name, or read-only."""
    who = "-".join(Path(settings.model).parts[-3:]) or f"warm-{settings.protocol}"
    files = "+".join(Path(name).stem for name in settings.data.split(","))
    asked = files[:100] or f"world{settings.world_seed}-{options.split}"
    name = f"{who}-{asked}-t{settings.temperature:g}-{settings.retriever}.jsonl"
    return Path(settings.runs) / "predictions" / re.sub(r"[^\w.+-]+", "", name).lstrip("-.")


def run(settings: Settings, options: Options) -> None:
    # Files of others may have their gold answers in --data.
    how = (settings.data, settings.skip_bad, options.punctuation)
    others = score_files(options.against, *how, seed=settings.seed)
    # Before the work: are they there at all?
    reader = score.build_reader(settings, best_device()) if settings.reader else None
    judge = score.build_judge(settings, best_device())
    evaluation = Evaluation(settings, options)
    out = evaluation.out
    try:
        records = evaluation.run()
        if options.punctuation:
            records = [scored(record, options.punctuation) for record in records]
        if reader or judge:
            print(f"all predictions are there: --predictions {out} asks again about them")
            records = score.ask_others(records, reader, judge)
            write_records(out, records)
    except KeyboardInterrupt:
        kept = f"what was finished is in {out}; the same command goes on"
        print(f"\ninterrupted; {kept if out.is_file() else 'nothing was finished yet'}")
        sys.exit(130)
    report(records, others, options.markdown, options.json)
    print(f"predictions: {out}")


def main(arguments: list[str] | None = None) -> None:
    settings, options = parse(sys.argv[1:] if arguments is None else arguments)
    temperatures = (1.0, 0.0) if options.decoding == "both" else (settings.temperature,)
    for temperature in temperatures:
        run(dataclasses.replace(settings, temperature=temperature), options)


if __name__ == "__main__":
    run_main(main)
