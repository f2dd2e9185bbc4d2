"""Evaluates a checkpoint, or a predictions file: em, F1, cover-EM, and how the model searches.

    python eval.py                                  the last checkpoint, on held-out questions
    python eval.py --model DIR --data FILE --corpus from-data
    python eval.py --stage 0                        the model before RL
    python eval.py --retriever empty                does the model answer from memory?
    python eval.py --retriever given --data FILE    a search finds all references of the question
    python eval.py --judge URL#MODEL                a judge accepts right answers in other words
    python eval.py --recipe r_search --reader SPEC  another model answers from the evidence
    python eval.py --data A,B,C --model DIR         several data sets in one table
    python eval.py ... --against FILE               compares two runs question by question
    python eval.py --predictions FILE               scores a file, also FlashRAG's or R1-Searcher's

By default decoding is greedy, and protocol and limits are those of training. Predictions are
written batch by batch, so an interrupted evaluation leaves its finished part. An earlier file is
renamed and not overwritten.
--thinking N is for a baseline that thinks in <think> ... </think> although its protocol does not
ask for it: each turn may have N more tokens, and the thoughts are not scored.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from errors import FlagParser, InputError, check_output, prepare_command, run_main
from plumbing.predictions import (
    PUNCTUATION,
    ask_others,
    check_alone,
    score_command,
    score_files,
    scored,
)
from plumbing.report import report
from settings import setting

if __name__ == "__main__":
    prepare_command()
    run_main(check_alone)
    if any(word.split("=")[0] == "--predictions" for word in sys.argv):
        run_main(score_command)  # scoring alone needs none of the slow imports below
        sys.exit()

from flags import MORE_HELP, MOST_USED, add_flags, named_in
from prompts import JUDGE_SEES
from settings import Settings


@dataclass(frozen=True)
class Options:
    """Holds the options of an evaluation that are not settings of a run."""

    # lab.baselines sets this to "/x", because its --out is a folder: check_options then tests
    # whether a file can be written into that folder.
    inside = ""
    split: str = setting("test", "split of the built-in world", one_of=("train", "dev", "test"))
    questions: int = setting(
        100,
        "number of questions: per kind of the built-in world, or per file of --data; 0 = all",
        least=0,
    )
    samples: int = setting(1, "trajectories per question", least=1)
    references: str = setting(
        "given", "where ARENA's references come from", one_of=("given", "retrieved")
    )
    fact_seed: int | None = setting(None, "seed that redraws all facts of the built-in world")
    decoding: str = setting(
        "greedy",
        "paper: as in the paper's evaluations; both: evaluate at temperature 1, then greedily",
        one_of=("greedy", "paper", "both"),
    )
    thinking: int = setting(
        0, "tokens added to each turn's limit, for thoughts, which are not scored", least=0
    )
    judge_sees: str = setting(
        "", "what the judge of open answers reads; default: by protocol", one_of=("", *JUDGE_SEES)
    )
    out: str = setting(
        "",
        "predictions file (lab.baselines: folder); default: in predictions/ under --output_dir",
    )
    against: str = setting(
        "",
        "compare with another run, question by question: the files of its predictions, "
        "comma-separated",
    )
    punctuation: str = setting(
        "", "how metrics treat punctuation; default: as in the paper", one_of=("", *PUNCTUATION)
    )
    all: bool = setting(False, "print every metric; by default the most important ones")
    markdown: bool = setting(False, "print tables as Markdown")
    json: str = setting("", "file to write the numbers to, as JSON")


def read_flags(
    arguments: list[str], kind: type[Options] = Options, command: str = "eval.py"
) -> tuple[dict, Options]:
    """Parses the command line into (the settings that were given, the options)."""
    parser = FlagParser(command, description=kind.__doc__)
    if kind is Options:
        parser.description = "Evaluates a checkpoint; --predictions FILE scores a file." + MORE_HELP
        parser.epilog = "example: python eval.py --stage 1 --questions 20 --decoding both"
        parser.most_used = [*MOST_USED, *"questions decoding against judge all".split()]
    add_flags(parser, Settings, named_in(arguments), "eval")
    add_flags(parser, kind, kind(), "eval")
    given = vars(parser.parse_args(arguments))
    names = given.keys() & {f.name for f in fields(kind)}
    return given, replace(kind(), **{name: given.pop(name) for name in names})


if __name__ == "__main__":
    run_main(lambda: read_flags(sys.argv[1:]))  # a wrong flag is reported before torch is loaded
# isort: split
from tqdm import tqdm

from data import Question, harmless
from flags import check_settings, last_stage, resolve, saved_settings, stage_folder
from formats.records import append_jsonl, keep_old, write_records
from papers import PROTOCOLS, record_of
from plumbing.alarms import hint_at_cold_start
from plumbing.build import (
    build_environment,
    build_judge,
    build_reader,
    build_search,
    choose_generate,
    load_model,
)
from plumbing.exam import prediction_record
from plumbing.files import (
    EVALUATION_HOLDS_IT,
    checkpoints,
    locked,
    prompt_sections,
)
from plumbing.questions import evaluation_questions
from policy import best_device, check_model_path
from prompts import tag_pair
from rewards import needs
from rollout import check_prompts, rollout
from settings import check_limits
from trajectory import Trajectory
from trajectory_metrics import token_metrics, without_thinking

QUESTIONS_AT_ONCE = 64
# With `--retriever given`, document tokens per search: ARENA's 20 paragraphs of 200 tokens fit.
GIVEN_TOKENS = 4096


# ------------------------------------------------------------------------------------ all questions
class Evaluation:
    """Runs a model on questions and writes its predictions to the file `out`."""

    def __init__(self, settings: Settings, options: Options):
        self.settings = replace(settings, group_size=options.samples)
        self.options = options
        self.out = Path(options.out or default_out(settings, options))
        self.datasets, self.documents = evaluation_questions(settings, options)
        self.questions = [q for questions in self.datasets.values() for q in questions]
        self.dataset_of = {q.id: name for name, chosen in self.datasets.items() for q in chosen}
        self.tokenizer = None  # until the policy is loaded

    def load(self) -> Callable:
        """Loads the model. Returns a function (questions, seed, progress) -> trajectories."""
        settings = self.settings
        device = best_device()
        search = build_search(settings, self.documents, device)
        policy, self.tokenizer = load_model(settings, settings.model, device, frozen=True)
        environment = build_environment(settings, self.tokenizer, search, policy)
        self.questions = check_prompts(self.questions, environment, policy, settings.skip_bad)

        def generate(questions: list[Question], seed: int, progress=None) -> list[Trajectory]:
            way = choose_generate(settings)
            return rollout(policy, environment, questions, seed, way, progress)

        return generate

    def run(self) -> list[dict]:
        """Returns prediction records of the model's rollouts. Those of a batch are appended to the
        file `out` as soon as the batch is finished.
        """
        options = self.options
        # The lock is held as long as this Evaluation exists.
        self.lock = locked(self.out, holder=EVALUATION_HOLDS_IT)
        generate = self.load()
        self.announce()
        keep_old(self.out)
        records = []
        with tqdm(total=len(self.questions) * options.samples, desc="evaluation") as bar:
            for start in range(0, len(self.questions), QUESTIONS_AT_ONCE):
                questions = self.questions[start : start + QUESTIONS_AT_ONCE]
                rows = generate(questions, self.settings.seed + start, bar.update)
                rows = map(without_thinking, rows) if options.thinking else rows
                batch = [self.record(row, i) for i, row in enumerate(rows)]
                append_jsonl(self.out, batch)
                records += batch
        if missing := bar.total - len(records):
            print(f"{missing} of {bar.total} predictions are missing: the model gave no reply")
        searches = [search for record in records for search in record["searches"]]
        if faults := [search["error"] for search in searches if search["error"]]:
            print(
                f"warning: {len(faults)} searches failed (the first: {harmless(faults[0])}): the "
                "scores are not the model's true ones; repair the retriever and repeat the command",
                file=sys.stderr,
            )
        return records

    def record(self, trajectory: Trajectory, row: int) -> dict:
        record = prediction_record(trajectory, row % self.options.samples)
        if self.tokenizer:
            record["metrics"] |= token_metrics(trajectory, self.tokenizer)
        if len(self.datasets) > 1:
            record["dataset"] = self.dataset_of[record["id"]]
        return record

    def announce(self) -> None:
        """Prints the model, the questions and how they are answered."""
        settings = self.settings
        training = saved_settings(settings.model)
        if training and settings.data and settings.data == training.data:
            print("warning: the model was trained on these questions: give others with --data")
        print(
            f"{settings.model or 'the built-in model, before RL'}: {len(self.questions)} questions "
            f"of {', '.join(self.datasets)}, {self.options.samples} sample(s) each, temperature "
            f"{settings.temperature:g}, retriever {settings.retriever}"
        )


# ------------------------------------------------------------------------------------- the settings
def settings_of(given: dict) -> Settings:
    """Returns the settings that the checkpoint saved, changed to greedy decoding and then by the
    given flags. If it saved none, or --recipe names another recipe, the settings of --recipe
    (default ur2) are used. Of the models that the training reward asks, evaluation keeps only a
    judge, and only if the reward needs its verdicts (When to Search section 4.1: as in training).
    """
    given, model = dict(given), given.get("model", "")
    if given.get("stage") == 0:
        del given["stage"]
    elif not model:
        model = last_checkpoint(given)
    if model and "://" not in model:  # in lab.baselines it may be a server's address
        check_model_path(model)
    settings = saved_settings(model)
    if settings is None or given.get("recipe", settings.recipe) != settings.recipe:
        variant = {"variant": given.get("variant", "")}
        settings = resolve(given.get("recipe", "ur2"), last_stage(given), not model, variant)
    changes = {"temperature": 0.0, "top_p": 1.0, "reader": ""}
    if "correct" not in needs(settings):
        changes["judge"] = ""
    if "data" in given and settings.corpus != "from-data":
        changes["corpus"] = ""  # the saved corpus is that of the training data
    # The training run's vLLM servers have its newest weights, not those of this checkpoint.
    if settings.engine != "hf":
        changes["engine"] = "slots"
    if "max_turn_tokens" in given:
        changes["turn_tokens"] = {}  # the flag applies to every task
    if "max_searches" in given:
        changes["task_searches"] = {}
    if given.get("retriever") == "given":
        changes["document_tokens"] = GIVEN_TOKENS
    return replace(settings, **(changes | given | {"model": model}))


def room_to_think(settings: Settings, tokens: int) -> Settings:
    """Adds `tokens` to every limit of a turn: with 100, 512 becomes 612, and math=3072 becomes
    math=3172.
    """
    by_task = {task: limit + tokens for task, limit in settings.turn_tokens.items()}
    limit = settings.max_turn_tokens + tokens
    return replace(settings, max_turn_tokens=limit, turn_tokens=by_task)


def last_checkpoint(given: dict) -> str:
    """Returns the last checkpoint of the run that the flags name: of --stage, or of the last stage
    that has one. Without a checkpoint, returns "", or raises an InputError if --run_name or --stage
    was given.
    """
    name = given.get("recipe", "ur2")
    others = {key: value for key, value in given.items() if key not in ("recipe", "stage")}
    run = resolve(name, given.get("stage", 1), True, others)
    known = record_of(name, run.variant).stages
    stages = [given["stage"]] if "stage" in given else sorted(known, reverse=True)
    for stage in stages:
        if saved := checkpoints(stage_folder(run, stage)):
            return str(saved[-1])
    if "run_name" in given or "stage" in given:
        folder = stage_folder(run, stages[0]).parent
        raise InputError(f"no checkpoint for these flags in {folder}: train first, or give --model")
    return ""


# -------------------------------------------------------------------------------- the command line
def parse(
    arguments: list[str], kind: type[Options] = Options, command: str = "eval.py"
) -> tuple[Settings, Options]:
    given, options = read_flags(arguments, kind, command)
    check_options(options, given)
    settings = settings_of(given)
    if options.decoding == "paper":  # greedy, if the paper does not say how it samples
        settings = settings_of(record_of(settings.recipe, settings.variant).decoding | given)
    check_settings(settings, training=False)
    prompt_sections(settings)
    if options.thinking and tag_pair("think")[0] in PROTOCOLS[settings.protocol].tags:
        raise InputError(
            f"--thinking: protocol {settings.protocol} has a <think> section, which is scored: "
            "leave --thinking out"
        )
    return room_to_think(settings, options.thinking), options


def check_options(options: Options, given: dict) -> None:
    check_limits(options)
    for name in ("out", "json"):
        if path := getattr(options, name):
            check_output(path + options.inside, f"--{name}")
            if options.decoding == "both":
                raise InputError(f"--decoding both evaluates twice: leave --{name} out")
    if options.decoding == "both" and "temperature" in given:
        raise InputError("--decoding both sets the temperature: leave --temperature out")


def default_out(settings: Settings, options: Options) -> Path:
    """Returns the default path of the predictions. It is under --output_dir and not in the model's
    folder: that may be read-only, and a hub model has none.
    """
    model = "-".join(Path(settings.model).parts[-3:]) or f"warm-{settings.protocol}"
    files = "+".join(Path(name).stem for name in settings.data.split(","))
    questions = files[:100] or f"world{settings.world_seed}-{options.split}"
    name = f"{model}-{settings.recipe}-{settings.variant}-{questions}-t{settings.temperature:g}"
    name = re.sub(r"[^\w.+-]+|-(?=-)", "", f"{name}-{settings.retriever}.jsonl").lstrip("-.")
    return Path(settings.output_dir) / "predictions" / name


def run(settings: Settings, options: Options) -> None:
    """Evaluates a model, compares it with the predictions of --against, and prints the tables."""
    # --against may name files of other programs. If they lack gold answers, --data provides them.
    others = score_files(
        options.against, settings.data, settings.skip_bad, options.punctuation, seed=settings.seed
    )
    # Reader and judge are built first, so that a wrong address fails before the long rollouts.
    reader = build_reader(settings, best_device()) if settings.reader else None
    judge = build_judge(settings, best_device(), options.judge_sees)
    # With the paper's decoding the reader samples too (R-Search appendix A.3).
    paper = options.decoding == "paper"
    sampling = (settings.temperature, settings.top_p) if paper else ()
    evaluation = Evaluation(settings, options)
    records = evaluate(evaluation, reader, judge, sampling)
    report(records, others, options.markdown, options.json, brief=not options.all)
    hint_at_cold_start(records, evaluation.settings)
    print(f"predictions: {evaluation.out}")


def evaluate(evaluation: Evaluation, reader, judge, sampling: tuple = ()) -> list[dict]:
    """Returns prediction records with the reader's answers and the judge's verdicts. The reader
    samples with `sampling` = (temperature, top_p); with () it is greedy.
    """
    out = evaluation.out
    punctuation = evaluation.options.punctuation
    try:
        records = evaluation.run()
        if punctuation:
            records = [scored(record, punctuation) for record in records]
        if reader or judge:
            print(
                "the predictions are written; if reader or judge fails, `python eval.py "
                f"--predictions {out}`, with the same --reader and --judge, asks only them again"
            )
            records = ask_others(records, reader, judge, sampling)
            write_records(out, records)
    except KeyboardInterrupt:
        finished = f"finished predictions are in {out}"
        print(f"\ninterrupted; {finished if out.is_file() else 'nothing was finished yet'}")
        sys.exit(130)
    return records


def main(arguments: list[str] | None = None) -> None:
    settings, options = parse(sys.argv[1:] if arguments is None else arguments)
    temperatures = (1.0, 0.0) if options.decoding == "both" else (settings.temperature,)
    for temperature in temperatures:
        run(replace(settings, temperature=temperature), options)


if __name__ == "__main__":
    run_main(main)
