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
written batch by batch, so an interrupted evaluation leaves its finished part; a repeated one starts
from the beginning. An earlier file is renamed and not overwritten.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from errors import InputError, check_output, rank_of, run_main
from flags import parse_flags
from metrics import PUNCTUATION
from plumbing.predictions import ask_others, build_others, score_files, score_predictions
from plumbing.report import report
from settings import Settings, setting


@dataclass(frozen=True)
class Options:
    """Evaluates a checkpoint; --predictions FILE scores a file."""

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
    decoding: str = setting(
        "greedy",
        "paper: as in the paper's evaluations; both: twice, at temperature 1, then greedily",
        one_of=("greedy", "paper", "both"),
    )
    out: str = setting(
        "",
        "predictions file (lab.baselines: folder); default: in predictions/ under --output_dir",
    )
    predictions: str = setting(
        "", "score these predictions files, one for each data set, comma-separated; needs no model"
    )
    against: str = setting(
        "",
        "compare with another run, question by question: the files of its predictions, "
        "comma-separated",
    )
    punctuation: str = setting(
        "",
        "--predictions: how metrics treat punctuation; default: as in the paper",
        one_of=("", *PUNCTUATION),
    )
    kinds: str = setting(
        "",
        "only questions of these kinds, comma-separated, such as history,law of MMLU-Pro; "
        "--questions is then the number of each",
    )
    log_summaries: bool = setting(
        False,
        "append the summariser's prompts and notes to OUTPUT_DIR/summaries.jsonl (lab.distil)",
    )
    skip_missing: bool = setting(
        False,
        "--predictions: leave out questions of --data without a prediction; by default they count "
        "as wrong",
    )
    all: bool = setting(False, "print every metric; by default the most important ones")


def score_only(arguments: list[str] | None = None) -> None:
    """Reads the flags. With --predictions it scores the files, without torch, and exits."""
    options, given = parse_flags("eval.py", Options, arguments, with_settings=True)
    if rank_of("WORLD_SIZE", 1) > 1:  # all processes would write one file
        raise InputError("eval.py works in one process: start it as `python eval.py`")
    if options.predictions:
        score_predictions(Settings(**given), options)
        sys.exit()


if __name__ == "__main__":
    run_main(score_only)  # a wrong flag is reported, or files are scored, before torch is loaded
# isort: split
from tqdm import tqdm

from data import Datasets, harmless
from flags import check_settings, resolve, saved_settings, stage_folder
from formats.records import Records, append_jsonl, keep_old, write_records
from papers import record_of
from plumbing.alarms import hint_at_cold_start
from plumbing.build import (
    build_environment,
    build_search,
    choose_generate,
    load_model,
)
from plumbing.files import checkpoints
from plumbing.questions import evaluation_questions
from policy import best_device, check_model_path
from rewards import needs
from rollout import check_prompts, rollout
from summarizer import SUMMARY_LOG
from trajectory_metrics import prediction_record, token_metrics

QUESTIONS_AT_ONCE = 64
# With `--retriever given`, document tokens per search: ARENA's 20 paragraphs of 200 tokens fit.
GIVEN_TOKENS = 4096


# ----------------------------------------------------------------------------------- all questions
def predict(settings: Settings, options: Options, reader=None, judge=None) -> Records:
    """Returns prediction records of a model's rollouts, with the reader's answers and the judge's
    verdicts, and writes them to a file. If the reader or the judge fails, the rollouts are in the
    file, and --predictions with --reader and --judge goes on.
    """
    settings = replace(settings, group_size=options.samples)
    out = Path(options.out or default_out(settings, options))
    datasets, documents = evaluation_questions(settings, options)
    check_output(out, "--out")
    log = Path(settings.output_dir, SUMMARY_LOG) if options.log_summaries else ""
    datasets, generate, tokenizer = load(settings, datasets, documents, log)
    records = answer_all(datasets, generate, tokenizer, settings, out)
    if reader or judge:
        # With the paper's decoding the reader samples too (R-Search appendix A.3).
        sampling = (settings.temperature, settings.top_p) if options.decoding == "paper" else ()
        records = ask_others(records, reader, judge, sampling, settings.whole_reply)
        write_records(out, records)
    return records


def load(settings: Settings, datasets: Datasets, documents: list, log: Path | str = "") -> tuple:
    """Loads the model. Returns the questions whose prompts fit into the context, a function
    (questions, seed, progress) -> trajectories, and the tokenizer.
    """
    device = best_device()
    search = build_search(settings, documents, device, log)
    policy, tokenizer = load_model(settings, settings.model, device, frozen=True)
    environment = build_environment(settings, tokenizer, search, policy)
    fitting = {
        name: check_prompts(questions, environment, policy, settings.skip_bad)
        for name, questions in datasets.items()
    }
    generate = partial(rollout, policy, environment, generate=choose_generate(settings))
    return fitting, generate, tokenizer


def answer_all(
    datasets: Datasets, generate: Callable, tokenizer, settings: Settings, out: Path
) -> Records:
    """Returns a record of each trajectory: `group_size` for each question. Those of a batch are
    appended to the file `out` as soon as the batch is finished.
    """
    announce(settings, datasets, out)
    dataset_of = {q.id: name for name, questions in datasets.items() for q in questions}
    questions = [*chain.from_iterable(datasets.values())]
    size = settings.group_size
    records = []
    keep_old(out)
    with tqdm(total=len(questions) * size, desc="evaluation") as bar:
        for start in range(0, len(questions), QUESTIONS_AT_ONCE):
            asked = questions[start : start + QUESTIONS_AT_ONCE]
            first = len(records)
            for row in generate(asked, settings.seed + start, progress=bar.update):
                record = prediction_record(row, len(records) % size)
                record["metrics"] |= token_metrics(row, tokenizer)
                if len(datasets) > 1:
                    record["dataset"] = dataset_of[record["id"]]
                records.append(record)
            append_jsonl(out, records[first:])
    report_failures(records, bar.total)
    return records


def announce(settings: Settings, datasets: Datasets, out: Path) -> None:
    """Prints the model, the questions and how they are answered."""
    training = saved_settings(settings.model)
    if training and settings.data and settings.data == training.data:
        print("warning: the model was trained on these questions: give others with --data")
    print(
        f"{settings.model or 'the built-in model, before RL'}: "
        f"{sum(map(len, datasets.values()))} questions of {', '.join(datasets)}, "
        f"{settings.group_size} sample(s) each, temperature {settings.temperature:g}, retriever "
        f"{settings.retriever}; predictions: {out}"
    )


def report_failures(records: Records, expected: int) -> None:
    if len(records) < expected:
        print(f"{expected - len(records)} predictions are missing: the model gave no reply")
    faults = [s["error"] for record in records for s in record["searches"] if s["error"]]
    if faults:
        print(
            f"warning: {len(faults)} searches failed (the first: {harmless(faults[0])}): the "
            "scores are not the model's true ones; repair the retriever and repeat the command",
            file=sys.stderr,
        )


# ------------------------------------------------------------------------------------ the settings
def settings_of(given: dict) -> Settings:
    """Returns the settings that the checkpoint saved, changed to greedy decoding and then by the
    given flags. If it saved none, or --recipe names another recipe, the settings of --recipe
    (default ur2) are used. Of the models that the training reward asks, evaluation keeps only a
    judge, and only if the reward needs its verdicts (When to Search section 4.1: as in training).
    """
    model = model_of(given)
    given = given | {"model": model}
    if given.get("stage") == 0:
        del given["stage"]
    if model and "://" not in model:  # in lab.baselines it may be a server's address
        check_model_path(model)
    settings = saved_settings(model)
    if settings is None or given.get("recipe", settings.recipe) != settings.recipe:
        settings = resolve(given.get("recipe", "ur2"), given.get("stage"), not model, given)
    changes = {"temperature": 0.0, "top_p": 1.0, "reader": ""}
    if ":" not in settings.reward and "correct" not in needs(settings):
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
    return replace(settings, **(changes | given))


def model_of(given: dict) -> str:
    """Returns the path of the model: that of --model, or of the last checkpoint in it if it is a
    stage's folder; with --stage 0 the built-in model, ""; else the last checkpoint of the run that
    the flags name.
    """
    if model := given.get("model", ""):
        saved = checkpoints(Path(model))
        return str(saved[-1]) if saved else model
    return "" if given.get("stage") == 0 else last_checkpoint(given)


def last_checkpoint(given: dict) -> str:
    """Returns the last checkpoint of the run that the flags name: of --stage, or of the last stage
    that has one. Without a checkpoint, returns "", or raises an InputError if --run_name or --stage
    was given.
    """
    folder = stage_folder(Settings(**given)).parent
    stages = sorted(folder.glob(f"stage{given.get('stage', '[0-9]')}"))
    if saved := [path for stage in stages for path in checkpoints(stage)]:
        return str(saved[-1])
    if "run_name" in given or "stage" in given:
        raise InputError(f"no checkpoint for these flags in {folder}: train first, or give --model")
    return ""


# -------------------------------------------------------------------------------- the command line
def parse(
    arguments: list[str] | None, kind: type[Options] = Options, command: str = "eval.py"
) -> tuple[Settings, Options]:
    options, given = parse_flags(command, kind, arguments, with_settings=True)
    settings = settings_of(given)
    if options.decoding == "paper":  # greedy, if the paper does not say how it samples
        settings = settings_of(record_of(settings.recipe, settings.variant).decoding | given)
    return check_settings(settings, training=False), options


def default_out(settings: Settings, options: Options) -> Path:
    """Returns the default path of the predictions. It is under --output_dir and not in the model's
    folder: that may be read-only, and a hub model has none.
    """
    words = [
        settings.model or "built-in",
        settings.recipe,
        settings.variant,
        settings.data or f"world{settings.world_seed}-{options.split}",
        f"t{settings.temperature:g}",
        settings.retriever,
    ]
    name = re.sub(r"[^\w.]+", "-", " ".join(words)).strip("-.")
    return Path(settings.output_dir, "predictions", f"{name[-200:]}.jsonl")


def run(settings: Settings, options: Options) -> None:
    """Evaluates a model, compares it with the predictions of --against, and prints the tables."""
    # --against may name files of other programs. If they lack gold answers, --data provides them.
    others = score_files(options.against, settings, options.punctuation, skip_missing=True)
    # Reader and judge are built first, so that a wrong address fails before the long rollouts.
    records = predict(settings, options, *build_others(settings))
    report(records, others, options)
    hint_at_cold_start(records, settings)


def main(arguments: list[str] | None = None) -> None:
    settings, options = parse(arguments)
    temperatures = (1.0, 0.0) if options.decoding == "both" else (settings.temperature,)
    for temperature in temperatures:
        run(replace(settings, temperature=temperature), options)


if __name__ == "__main__":
    run_main(main)
