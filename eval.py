"""What a checkpoint, or a predictions file, is worth: em, F1, cover-EM, and how it searches.

    python eval.py                                  the last checkpoint, held-out names
    python eval.py --model DIR --data FILE --corpus from-data
    python eval.py --stage 0                        before RL
    python eval.py --retriever empty                does it read, or recall?
    python eval.py --retriever given --data FILE    every search finds all references of its record
    python eval.py --judge URL#MODEL                is the answer right in other words?
    python eval.py --recipe r_search --reader SPEC  another model answers from the evidence
    python eval.py --data A,B,C --model DIR         several data sets, one table
    python eval.py ... --against FILE               two runs compared question by question
    python eval.py --predictions FILE               score a file, in any layout, without a model

Greedy unless told otherwise, with the protocol, documents and limits of training. Predictions are
written as they come; the same command goes on where it was interrupted. A model that thinks by
itself in <think> ... </think>, and was not trained to answer under this protocol, is a baseline:
--thinking N gives its thoughts N tokens of their own and cuts them off before scoring.
"""

import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from errors import FlagParser, InputError, check_output, prepare_command, run_main, setting
from plumbing.predictions import (
    PUNCTUATION,
    ask_others,
    check_alone,
    score_command,
    score_files,
    scored,
)
from plumbing.report import COLUMNS, report

if __name__ == "__main__":
    prepare_command()
    run_main(check_alone)
    if any(word.split("=")[0] == "--predictions" for word in sys.argv):
        run_main(score_command)  # without a model: what follows would load torch for seconds
        sys.exit()

from prompts import JUDGE_SEES
from settings import ASKING, Settings, add_flags, named_in


@dataclass(frozen=True)
class Options:
    """What an evaluation is asked beside the settings of a run."""

    inside = ""  # if --out is a folder: a file in it
    split: str = setting("test", "of the built-in world", one_of=("train", "dev", "test"))
    questions: int = setting(100, "per kind, or drawn with the seed from a file; 0 = all", least=0)
    samples: int = setting(1, "trajectories per question", least=1)
    references: str = setting("given", "where ARENA's come from", one_of=("given", "retrieved"))
    fact_seed: int | None = setting(None, "redraw every fact of the built-in world")
    decoding: str = setting(
        "greedy",
        "paper: as the paper evaluates; both: at temperature 1, and greedily",
        one_of=("greedy", "paper", "both"),
    )
    thinking: int = setting(
        0, "tokens that a turn may think, beside its limit; thoughts are not scored", least=0
    )
    judge_sees: str = setting(
        "", "of open questions; by default the protocol decides", one_of=("", *JUDGE_SEES)
    )
    fresh: bool = setting(False, "do not go on with predictions that are there already")
    out: str = setting("", "predictions file; default: under runs/predictions")
    against: str = setting("", "predictions of another run (FILE,FILE), compared in pairs")
    punctuation: str = setting("", "becomes a blank, or nothing", one_of=("", *PUNCTUATION))
    markdown: bool = setting(False, "print Markdown tables")
    json: str = setting("", "write the numbers to this file too")


def read_flags(
    arguments: list[str], kind: type[Options] = Options, command: str = "eval.py"
) -> tuple[dict, Options]:
    """(the settings that were given, the options)."""
    said = "Score a checkpoint. Of a file, without a model: see --predictions FILE --help."
    parser = FlagParser(command, description=said if kind is Options else kind.__doc__)
    add_flags(parser, ASKING, named_in(arguments), "eval")
    add_flags(parser, (kind,), kind(), "eval")
    given = vars(parser.parse_args(arguments))
    chosen = {f.name: given.pop(f.name, f.default) for f in dataclasses.fields(kind)}
    return given, kind(**chosen)


if __name__ == "__main__":
    run_main(lambda: read_flags(sys.argv[1:]))  # a wrong flag is told before torch is loaded
# isort: split
from tqdm import tqdm

from data import Question, harmless
from formats.records import append_jsonl, write_records
from papers import paper_of, record_of
from plumbing.build import (
    build_environment,
    build_judge,
    build_protocol,
    build_reader,
    build_search,
    choose_generate,
    load_model,
)
from plumbing.files import (
    WRITES,
    checkpoints,
    go_on,
    locked,
    prompt_sections,
)
from plumbing.questions import evaluation_questions
from policy import best_device, check_model_path, weights_version
from prompts import PROTOCOLS, tag_pair
from retriever import SEARCH_FAILED
from rewards import needs
from rollout import check_prompts, rollout
from settings import (
    SEARCHING,
    check_limits,
    check_settings,
    resolve,
    saved_settings,
    stage_folder,
)
from trajectory import Trajectory
from trajectory_metrics import (
    paper_metrics,
    token_metrics,
    trajectory_metrics,
    without_thinking,
)

QUESTIONS_AT_ONCE = 64
GIVEN_TOKENS = 4096  # of --retriever given: 20 paragraphs (ARENA) of 200 tokens


# ----------------------------------------------------------------------------------- one trajectory
def prediction_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Returns the numbers of one trajectory that a table can show; of a summary only its ROUGE."""
    numbers = trajectory_metrics(trajectory)
    numbers |= paper_metrics(trajectory, numbers["em"])
    unlike = ("em", "f1", "cem") if trajectory.question.task == "summary" else ()
    return {name: numbers[name] for name in COLUMNS if name in numbers and name not in unlike}


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
        "judge_sees": protocol.judge_sees,
        "transcript": trajectory.text,
        "stop_reason": trajectory.stop_reason,
        "searches": searches,
    }
    record["punctuation"] = paper_of(protocol.name).punctuation
    record["metrics"] = prediction_metrics(trajectory)
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
        self.datasets, self.documents = evaluation_questions(settings, options)
        self.questions = [q for questions in self.datasets.values() for q in questions]
        self.dataset_of = {q.id: name for name, some in self.datasets.items() for q in some}
        self.tokenizer = None  # until the policy is loaded

    def load(self) -> tuple[Callable, str]:
        """((questions, seed, progress) -> the model's trajectories, the version of its weights)."""
        settings, device = self.settings, best_device()
        search = build_search(settings, self.documents, device)
        policy, self.tokenizer = load_model(settings, settings.model, device, frozen=True)
        environment = build_environment(settings, self.tokenizer, search, policy)
        check_prompts(self.questions, environment, policy)

        def generate(some: list[Question], seed: int, progress=None) -> list[Trajectory]:
            return rollout(policy, environment, some, seed, choose_generate(settings), progress)

        return generate, weights_version(settings.model, policy) if settings.model else "built-in"

    def run(self) -> list[dict]:
        """Prediction records of the model's rollouts."""
        self.lock = locked(self.out, holder=WRITES)  # as long as this evaluation is used
        generate, version = self.load()
        self.say_what()

        def rows_of(some: list[Question], start: int, progress) -> list[Trajectory]:
            rows = generate(some, self.settings.seed + start, progress)
            return list(map(without_thinking, rows)) if self.options.thinking else rows

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
        if left := len(expected) - len(records):
            print(f"{what}: {left} of {len(expected)} got no reply; the same command asks again")
        if faults := search_faults(records):
            said = f"warning: {len(faults)} searches failed (the first: {harmless(faults[0])})"
            why = "these scores are not the model's; the same command makes those batches anew"
            print(f"{said}: {why}", file=sys.stderr)
        return records

    def record(self, trajectory: Trajectory, row: int) -> dict:
        record = prediction_record(trajectory, row % self.options.samples)
        if self.tokenizer:
            record["metrics"] |= token_metrics(trajectory, self.tokenizer)
        if len(self.datasets) > 1:
            record["dataset"] = self.dataset_of[record["id"]]
        return record

    def say_what(self) -> None:
        settings, options = self.settings, self.options
        model = settings.model or "the built-in model, before RL"
        before = saved_settings(settings.model)
        if before and settings.data and settings.data == before.data:
            print("warning: it was trained on these questions: name others with --data")
        names, some, searching = ", ".join(self.datasets), "", ""
        if settings.data and options.questions:
            some = f" ({options.questions} of each, drawn with the seed: --questions 0 takes all)"
        if PROTOCOLS[settings.protocol].query_tags:
            searching = f", retriever {settings.retriever}"
        how = f"{options.samples} sample(s) each, temperature {settings.temperature:g}"
        print(f"{model}: {len(self.questions)} questions of {names}{some}, {how}{searching}")

    def made_with(self, version: str) -> dict:
        """What the predictions hang on: settings, weights, questions and passages."""
        made = dataclasses.asdict(self.settings)
        # Not of a prediction:
        for name in ("run_name", "output_dir", "served", "judge", "reader", "timeout"):
            del made[name]
        # --prompt_file names a file, not its words.
        content = hashlib.sha256()
        for item in [build_protocol(self.settings), *self.questions, *self.documents]:
            content.update(repr(item).encode())
        made |= {"weights": version, "thinking": self.options.thinking}
        return made | {"material": content.hexdigest()[:16]}


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
    if model and "://" not in model:  # as a baseline's may be
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
    if "max_turn_tokens" in given:
        own["turn_tokens"] = ""  # the flag counts for every task
    if "max_searches" in given:
        own["task_searches"] = ""
    if given.get("retriever") == "given":
        own["document_tokens"] = GIVEN_TOKENS
    return dataclasses.replace(settings, **(own | given | {"model": model}))


def paper_decoding(settings: Settings) -> dict:
    """How the paper samples when it evaluates, for --decoding paper."""
    decoding = record_of(settings.recipe, settings.variant).decoding
    if "temperature" not in decoding:
        why = f"the paper of {settings.recipe} does not say how it samples when it evaluates"
        print(f"--decoding paper: {why}: greedy")
    return decoding


def room_to_think(settings: Settings, tokens: int) -> Settings:
    """Adds so many tokens to every limit of a turn: 512 and math=3072 with 100 are 612 and 3172."""
    own = re.sub(r"\d+", lambda limit: str(int(limit[0]) + tokens), settings.turn_tokens)
    most = settings.max_turn_tokens + tokens
    return dataclasses.replace(settings, max_turn_tokens=most, turn_tokens=own)


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
    if "run_name" in given or "stage" in given:
        folder = stage_folder(run, stages[0]).parent
        raise InputError(f"no checkpoint of that run in {folder}: train first, or give --model")
    return ""


# -------------------------------------------------------------------------------- the command line
def parse(
    arguments: list[str], kind: type[Options] = Options, command: str = "eval.py"
) -> tuple[Settings, Options]:
    given, options = read_flags(arguments, kind, command)
    check_options(options, given)
    settings = settings_of(given)
    if options.decoding == "paper":  # of the checkpoint's recipe
        settings = settings_of(paper_decoding(settings) | given)
    if "max_turn_tokens" in given:
        print(f"--max_turn_tokens {settings.max_turn_tokens} counts for every task")
    read = SEARCHING if options.references == "retrieved" else ()
    check_settings(settings, False, given.keys() - read)
    # A checkpoint's may be for models that only training asks.
    prompt_sections(settings, strict="prompt_file" in given)
    if options.thinking and tag_pair("think")[0] in PROTOCOLS[settings.protocol].tags:
        why = "has a <think> section, which is scored: leave it out"
        raise InputError(f"--thinking: protocol {settings.protocol} {why}")
    return room_to_think(settings, options.thinking), options


def check_options(options: Options, given: dict) -> None:
    check_limits(options)
    for name in ("out", "json"):
        if path := getattr(options, name):
            check_output(path + options.inside, f"--{name}")
            if options.decoding == "both":
                why = f"evaluates twice, and --{name} is for one: leave one out"
                raise InputError(f"--decoding both {why}")
    if options.decoding == "both" and "temperature" in given:
        raise InputError("--decoding both has temperatures of its own: leave --temperature out")


def default_out(settings: Settings, options: Options) -> Path:
    """Never into the model's own folder: it may be a hub name, or read-only."""
    who = "-".join(Path(settings.model).parts[-3:]) or f"warm-{settings.protocol}"
    files = "+".join(Path(name).stem for name in settings.data.split(","))
    asked = files[:100] or f"world{settings.world_seed}-{options.split}"
    name = f"{who}-{asked}-t{settings.temperature:g}-{settings.retriever}.jsonl"
    return Path(settings.output_dir) / "predictions" / re.sub(r"[^\w.+-]+", "", name).lstrip("-.")


def run(settings: Settings, options: Options) -> None:
    # Files of others may have their gold answers in --data.
    how = (settings.data, settings.skip_bad, options.punctuation)
    others = score_files(options.against, *how, seed=settings.seed)
    # Before the work: are they there at all?
    reader = build_reader(settings, best_device()) if settings.reader else None
    judge = build_judge(settings, best_device(), options.judge_sees)
    paper = options.decoding == "paper"  # R-Search appendix A.3: all models sample alike
    how = (settings.temperature, settings.top_p) if paper else ()
    evaluation = Evaluation(settings, options)
    records = evaluate(evaluation, reader, judge, how)
    report(records, others, options.markdown, options.json)
    print(f"predictions: {evaluation.out}")


def evaluate(evaluation: Evaluation, reader, judge, how: tuple = ()) -> list[dict]:
    """Prediction records with what the reader, sampling by `how`, and the judge say of them."""
    out, punctuation = evaluation.out, evaluation.options.punctuation
    try:
        records = evaluation.run()
        if punctuation:
            records = [scored(record, punctuation) for record in records]
        if reader or judge:
            print(f"all predictions are there: --predictions {out} asks again about them")
            records = ask_others(records, reader, judge, how)
            write_records(out, records)
    except KeyboardInterrupt:
        kept = f"what was finished is in {out}; the same command goes on"
        print(f"\ninterrupted; {kept if out.is_file() else 'nothing was finished yet'}")
        sys.exit(130)
    return records


def main(arguments: list[str] | None = None) -> None:
    settings, options = parse(sys.argv[1:] if arguments is None else arguments)
    temperatures = (1.0, 0.0) if options.decoding == "both" else (settings.temperature,)
    for temperature in temperatures:
        run(dataclasses.replace(settings, temperature=temperature), options)


if __name__ == "__main__":
    run_main(main)
