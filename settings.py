"""Collects the flags of a run: a record (dataclass) has those of one file; `Settings` inherits all.

    defaults  <  the paper's stage  <  its values for the tiny model  <  the command line

If several of these sources give a value, the one furthest to the right wins; `resolve` has a few
exceptions. A class or function takes the record it reads: `Environment` takes a RolloutSettings,
`make_retriever` a RetrieverSettings. A setting is a flag of each command that reads its record. But
`only` can limit it to train.py and lab.plan ("train"), to the other commands ("eval") or to none
("papers": only papers.py and lab/claims.py set it). `check_settings` rejects flags that contradict
each other, before a model is loaded. Left out: settings files, because a shell script with the
flags does the same.
"""

import argparse
import dataclasses
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from curriculum import CurriculumSettings
from data import DataSettings
from errors import FlagParser, InputError, check_value, nearest, setting
from flags import (
    DAPO,
    LOCAL,
    DapoSettings,
    EngineSettings,
    KLSettings,
    ModelSettings,
    PolicySettings,
    PPOSettings,
    ReinforceSettings,
    RolloutSettings,
    UpdateSettings,
    frozen_in_8bit,
    on_servers,
)
from papers import PAPERS, paper_of, record_of
from prompts import PROTOCOLS, PromptSettings
from retriever import RetrieverSettings
from retrievers.net import host_of
from rewards import READS, RewardSettings, check_reward, needs
from summarizer import SUMMARIZED, WITHOUT_MODEL, SummarizerSettings, by_task, models_in
from templates import variables_of

RUN_NAME = re.compile(r"[^/\\]{,200}")
# Limit of --questions_per_step times --group_size, the trajectories of one draw: eight times as
# many as in the DAPO paper. The ids, masks and log-probs of 65,536 trajectories of 4,000 tokens
# take 21 GB as Python lists on every process, before they are put into a batch.
LARGEST_STEP = 65_536
TRACKERS = (
    "tensorboard",
    "wandb",
    "trackio",
)  # supported by accelerate; each needs its own package


@dataclass(frozen=True)
class RunSettings:
    recipe: str = setting("ur2", "the paper to reproduce", one_of=PAPERS)
    variant: str = setting(
        "", "name of a variant of the recipe: another backbone, other data or an ablation"
    )
    stage: int = setting(
        1, "1: learn to search, or the only stage; 2: learn to answer, from stage 1's model"
    )
    model: str = setting(
        "",
        'HF causal LM (folder or hub name); "": in stage 2 the last checkpoint of stage 1, in '
        "evaluations the last of the run, else the built-in model",
    )
    toy_init: str = setting(
        "", "built-in model only: name of a weaker supervised warm-up (default: the standard one)"
    )
    run_name: str = setting("", "the run's files are written to OUTPUT_DIR/NAME/stageN")
    output_dir: str = setting("runs", "folder for all runs and the built-in models")
    resume: bool = setting(False, "continue from this run's last checkpoint", only="train")
    dry_run: bool = setting(False, "try a small step, report problems, save no run", only="train")
    evaluate: bool = setting(
        False,
        "after training, evaluate in the built-in world, at temperature 1 and greedily",
        only="train",
    )
    save_every: int = setting(
        10, "steps between checkpoints; the last step is always saved", least=1, only="train"
    )
    keep_checkpoints: int = setting(
        2, "last checkpoints to keep, besides the best evaluated; 0: all", least=0, only="train"
    )
    eval_every: int = setting(
        0, "steps between greedy evaluations; 0: never", least=0, only="train"
    )
    eval_questions: int = setting(
        100,
        "questions in an evaluation of --eval_every; in the built-in world: per kind of question",
        least=1,
        only="papers",
    )
    groups_kept: int = setting(
        4, "groups of trajectories saved per step for view.py; -1: all", least=-1, only="train"
    )
    report_to: str = setting(
        "", "tracker that also receives the metrics", one_of=("", *TRACKERS), only="train"
    )
    deterministic: bool = setting(
        False, "make a GPU's results reproducible, at lower speed; a CPU's always are", only="train"
    )
    seed: int = setting(0, "random seed of questions and sampling", least=0, most=2**31 - 1)
    world_seed: int = setting(0, "random seed of the built-in world and its models")


ASKING = (  # the records that an evaluation reads
    RunSettings,
    DataSettings,
    PromptSettings,
    RolloutSettings,
    EngineSettings,
    RetrieverSettings,
    SummarizerSettings,
    ModelSettings,
)
RECORDS = (
    *ASKING,
    CurriculumSettings,
    RewardSettings,
    UpdateSettings,
    PPOSettings,
    KLSettings,
    ReinforceSettings,
    DapoSettings,
    PolicySettings,
)


@dataclass(frozen=True)
class Settings(*reversed(RECORDS)):  # dataclass lists the fields of the last base first
    """Holds every setting of a run. Each name is defined in one record only."""


def last_stage(given: dict) -> int:
    """Returns the stage that the flags name, or the last one of their recipe."""
    recipe = record_of(given.get("recipe", "ur2"), given.get("variant", ""))
    return given.get("stage", max(recipe.stages))


def resolve(recipe: str, stage: int, tiny: bool, given: dict | None = None) -> Settings:
    """Returns a run's settings. A later source overrides the earlier ones: defaults, the paper's
    stage, the values for the tiny model (if `tiny`), `given`.
    """
    given = given or {}
    paper = record_of(recipe, given.get("variant", ""), stage)
    built_in = paper.tiny[stage] if tiny else {}
    chosen = paper.stages[stage] | built_in
    # For the tiny model, `buckets` loses the shares of a single task or data set (such as
    # "math:hard"), because the built-in world has too few questions of each.
    shares = [x for x in chosen.get("buckets", "").split(",") if not (tiny and ":" in x)]
    chosen = chosen | {"buckets": ",".join(shares)}
    # Without --difficulty the recipe's `buckets` and the paper's `mix` are not used; the tiny
    # model's `mix` is.
    if not given.get("difficulty"):
        chosen = chosen | {"buckets": "", "mix": built_in.get("mix", "")}
    # Buckets in `given`, or any left for the tiny model, replace the recipe's `mix`.
    if given.get("buckets", tiny and chosen["buckets"]):
        chosen = chosen | {"mix": ""}
    # These two flags, if given, apply to every task: the recipe's limits for single tasks are
    # dropped.
    if "max_turn_tokens" in given:
        given = {"turn_tokens": ""} | given
    if "max_searches" in given:
        given = {"task_searches": ""} | given
    if given.get("algorithm") == "dapo" != chosen["algorithm"]:
        chosen = chosen | DAPO
    return Settings(**{"recipe": recipe, "stage": stage} | chosen | given)


# Retriever -> the flag that it needs, and that no other retriever reads.
NEEDS = {"dense": "encoder", "http": "retriever_url"}
# Not read if the protocol has no searches; eval.py --references retrieved reads some of them even
# then.
SEARCHING = """
retriever retriever_url encoder documents_per_search document_tokens max_searches summarizer
corpus retrieval task_mixing mask_documents
""".split()
MODELS = {"verdict": "judge", "grade": "judge", "reader": "reader", "embedder": "embedder"}


def unread(settings: Settings, training: bool) -> dict[str, str]:
    """Returns {flag: the reason why this run does not read it}. A recipe may set such a flag, but
    `check_settings` rejects it on the command line.
    """
    reasons = {
        flag: f"only --retriever {retriever} reads it"
        for retriever, flag in NEEDS.items()
        if retriever != settings.retriever
    }
    if PROTOCOLS[settings.protocol].query_tags is None:
        reasons |= dict.fromkeys(SEARCHING, f"protocol {settings.protocol} does not search")
    if settings.model:
        reasons["toy_init"] = "it is for the built-in model, and --model is given"
    if not training:
        return reasons
    if not on_servers(settings):
        reasons["served"] = "only --engine http://... reads it"
    if settings.algorithm != "ppo":
        reasons["critic_lr"] = "only --algorithm ppo reads it"
    if settings.algorithm == "dapo" and settings.loss_aggregation == "sequence":
        reasons["loss_aggregation"] = "dapo takes the mean over tokens or questions"
    if not settings.mask_documents:
        reasons["mismatch"] = "--mask_documents false trains on documents, which were not sampled"
    if not settings.kl_coef:
        reasons["kl_estimator"] = "with --kl_coef 0 there is no KL"
    read = {MODELS[need] for need in asked_of_others(settings) & MODELS.keys()}
    read |= {*READS.get(settings.reward, "").split()}
    if settings.left_out == "answer":
        read.discard("beta")
    names = {*MODELS.values(), *(f.name for f in fields(RewardSettings))} - {"reward"}
    reward = f"{settings.reward} without {settings.left_out}".removesuffix(" without ")
    return reasons | dict.fromkeys(names - read, f"--reward {reward} does not read it")


def asked_of_others(settings: Settings) -> set[str]:
    """Returns the needs of the reward (rewards.NEEDS), and "verdict" if DAPO filters the groups by
    `correct`.
    """
    filters = settings.algorithm == "dapo" and settings.filter_by == "correct"
    return needs(settings) | ({"verdict"} if filters else set())


def check_limits(record) -> None:
    """Checks every field of a record against the limits in the field's metadata."""
    for f in fields(record):
        value = getattr(record, f.name)
        if f.name != "reward" or ":" not in value:  # FILE.py:FUNCTION is checked when it is loaded
            check_value(f.name, value, f.metadata)


def check_settings(settings: Settings, training=True, given: Iterable[str] = ()) -> Settings:
    """Returns the settings unchanged. Raises an InputError if one of them breaks its limits, if
    they contradict each other, or if this run does not read a flag in `given`. With `training`
    False, the settings are for a command that asks a model and does not train it.
    """
    if settings.retriever == "web":
        raise InputError(
            "--retriever web: serve it (python retriever.py serve --retriever web), then use "
            "--retriever http --retriever_url http://host:port"
        )
    check_limits(settings)
    if settings.run_name in (".", "..") or not RUN_NAME.fullmatch(settings.run_name):
        raise InputError(
            f"--run_name {settings.run_name}: must name a folder inside --output_dir, without a "
            "slash, in at most 200 characters"
        )
    if on_servers(settings):
        for url in settings.engine.split(","):
            host_of(url, f"--engine {', '.join(LOCAL)}, or http://host:8000")
        if not training:
            raise InputError(
                "--engine http: an evaluation samples in its own process: use slots or hf"
            )
    frozen_in_8bit(settings)
    variables_of(settings.chat_template)
    _check_summarizer(settings)
    if settings.data and not settings.model:
        raise InputError("--data needs --model: the built-in model knows only its own world")
    known = paper_of(settings.protocol).warm_ups
    if settings.toy_init and settings.toy_init not in known:
        raise InputError(
            f"--toy_init {settings.toy_init}: the weaker warm-ups of protocol "
            f"{settings.protocol} are: {', '.join(known) or 'none'}"
        )
    searches = PROTOCOLS[settings.protocol].query_tags is not None
    local = settings.retriever in ("bm25", "dense", "random")
    if searches and settings.data and local and not settings.corpus:
        raise InputError(
            "--data needs --corpus FILE, or --corpus from-data to search the records' own "
            "paragraphs"
        )
    flag = NEEDS.get(settings.retriever)
    if flag and searches and not getattr(settings, flag):
        raise InputError(f"--retriever {settings.retriever} needs --{flag}")
    if training:
        _check_training(settings)
    else:
        _check_asking(settings, given)
    reasons = unread(settings, training)
    for flag in [name for name in given if name in reasons]:
        raise InputError(f"--{flag}: {reasons[flag]}: leave it out")
    return settings


def _check_asking(settings: Settings, given: Iterable[str]) -> None:
    if "in_8bit" in given and settings.in_8bit not in ("", "others"):
        raise InputError(
            "--in_8bit: only training uses base and reference: give `others`, or leave it out"
        )
    if settings.reader and not PROTOCOLS[settings.protocol].evidence_tags:
        raise InputError(
            f"--reader answers from evidence boxes, and protocol {settings.protocol} has none: "
            "leave it out"
        )


def _check_summarizer(settings: Settings) -> None:
    value, tasks = settings.summarizer, by_task(settings.summarizer)
    if not {"other"} <= tasks.keys() <= SUMMARIZED:
        raise InputError(
            f"--summarizer {value}: give one for all tasks, or TASK=NAME,...,other=NAME, where TASK"
            " is qa, math or choice"
        )
    for name in sorted(models_in(value)):
        like = nearest(name, WITHOUT_MODEL)
        if like or name == "llm":  # a typo would be looked up on the hub, for minutes
            raise InputError(
                f"--summarizer {name}: must be none, extractive, or a model's name{like}"
            )
    if settings.fallback and not (models_in(value) and PROTOCOLS[settings.protocol].fallback_text):
        raise InputError(
            "--fallback needs a protocol with a fallback and a model as summariser, not "
            f"--summarizer {value} and protocol {settings.protocol}"
        )


def _check_training(settings: Settings) -> None:
    """Raises an InputError for values or combinations of settings that training does not allow."""
    if settings.questions_per_step * settings.group_size > LARGEST_STEP:
        raise InputError(
            f"--questions_per_step times --group_size: must be at most {LARGEST_STEP:,} "
            "trajectories"
        )
    if settings.temperature == 0:
        raise InputError("--temperature 0 is greedy: a group's trajectories would all be the same")
    if settings.top_p < 1:
        raise InputError(
            f"--top_p {settings.top_p}: log-probs would not be those of the sampled "
            "distribution: train with 1"
        )
    if settings.group_size == 1 and settings.algorithm not in ("reinforce_pp", "ppo"):
        raise InputError(
            f"--group_size 1: {settings.algorithm} compares the trajectories of one question; it "
            "needs at least 2"
        )
    if (every := settings.eval_every) > settings.steps:
        raise InputError(f"--eval_every {every}: must be at most {settings.steps}, the run's steps")
    if settings.evaluate and settings.data:
        raise InputError(
            "--evaluate asks about the built-in world, not --data; instead: python eval.py "
            "--model ... --data HELD_OUT_FILE"
        )
    _check_8bit(settings)
    terms = check_reward(settings)
    if settings.reward.startswith("arena") and settings.judge and settings.answer_metric != "em":
        raise InputError(
            f"--answer_metric {settings.answer_metric} with --judge: ARENA's answer term is the "
            "metric or the verdict: give one of the two"
        )
    if (settings.algorithm, settings.filter_by) == ("dapo", "answer") and "answer" not in terms:
        raise InputError(
            f"--reward {settings.reward}: the recipe filters groups by the reward term `answer`, "
            "which this reward lacks: give a reward with this term, or --algorithm grpo"
        )


def _check_8bit(settings: Settings) -> None:
    """Raises an InputError if --in_8bit names base or reference, and these weights are trained, do
    not exist, or belong to the built-in model.
    """
    in_8bit = frozen_in_8bit(settings)
    if "base" in in_8bit and not settings.lora_rank:
        raise InputError(
            "--in_8bit base: int8 weights cannot be trained, because a step of 1e-6 is rounded "
            "away: add --lora_rank 16, or leave it out"
        )
    if "reference" in in_8bit and settings.lora_rank:
        raise InputError(
            "--in_8bit reference: with --lora_rank the reference is the frozen base itself: use "
            "--in_8bit base"
        )
    if "reference" in in_8bit and not settings.kl_coef:
        raise InputError("--in_8bit reference: with --kl_coef 0 no reference is loaded")
    if in_8bit - {"others"} and not settings.model:
        raise InputError(
            "--in_8bit base and reference need --model: the built-in model stays in fp32"
        )


def boolean(text: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]


def add_flags(
    parser: argparse.ArgumentParser, records: Iterable[type], shown: Settings, command: str
) -> None:
    """Adds a --flag for every field of the records, if the field's `only` is not set or is
    `command` ("train" or "eval"). --help has a section for each record's file and shows the values
    of `shown`. argparse gets no defaults, so it returns only the flags that the user gave.
    """
    for record in records:
        section = parser.add_argument_group(file_of(record, parser.prog))
        kinds = typing.get_type_hints(record)
        for f in fields(record):
            if f.metadata.get("only", command) == command:
                _add_flag(section, f, kinds[f.name], getattr(shown, f.name))


def file_of(record: type, command: str = "") -> str:
    """Returns the name of the file (or folder) that reads a record. A record in flags.py has this
    name as its docstring; any other record is defined in the file that reads it.
    """
    if record.__module__ == "flags":
        return record.__doc__
    name = record.__module__.replace("__main__", command.removesuffix(".py"))
    return name.replace(".", "/") + ".py"


def _add_flag(section, f: dataclasses.Field, kind, value) -> None:
    kind = (*typing.get_args(kind), kind)[0]  # int | None -> int
    names = f.metadata.get("one_of")
    text = f.metadata["help"] + (f"; one of {', '.join(names)}" if names else "")
    text += f" ({value!r})" if value == f.default else f" ({value!r}; default {f.default!r})"
    switch = {"nargs": "?", "const": True} if kind is bool else {}
    section.add_argument(
        f"--{f.name}",
        type=boolean if kind is bool else kind,
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),
        metavar=kind.__name__.upper(),
        **switch,
    )


MOST_USED = ("help", "recipe", "stage", "model", "data", "corpus")
MORE_HELP = " These are the most used flags; --help all lists every flag, by topic."


def named_in(arguments: list[str]) -> Settings:
    """Returns the settings of the recipe, variant and stage that a command line names. --help shows
    these values.
    """
    parser = FlagParser(add_help=False, allow_abbrev=False)
    for name in ("recipe", "stage", "model", "variant"):
        default = getattr(RunSettings, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args, _ = parser.parse_known_args(arguments)
    return resolve(args.recipe, args.stage or 1, not args.model, {"variant": args.variant})


def stage_folder(settings: Settings, stage: int | None = None) -> Path:
    """Returns OUTPUT_DIR/NAME/stageN. The default NAME is made of the recipe, its variant, the data
    (or the seed of the built-in world) and the seed.
    """
    data = Path(settings.data.split(",")[0]).stem or f"world{settings.world_seed}"
    recipe = "-".join(filter(None, [settings.recipe, settings.variant]))
    name = settings.run_name or f"{recipe}-{data}-seed{settings.seed}"
    return Path(settings.output_dir) / name / f"stage{stage or settings.stage}"


def saved_settings(model: str) -> Settings | None:
    """Returns the settings saved in a checkpoint's or a stage's folder; None for other models."""
    path = Path(model, "settings.json")
    if not model or not path.exists():
        return None
    try:
        saved, known = json.loads(path.read_text(encoding="utf-8")), Settings.__dataclass_fields__
        # A run of an older version may have saved settings that no longer exist.
        return Settings(**{name: value for name, value in saved.items() if name in known})
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputError(f"{path}: not a settings file of train.py ({error})") from None


def in_built_in_world(settings: Settings) -> bool:
    """Returns True if there is no --data and the model knows the built-in world: it is the built-in
    one, or was trained from it without --data.
    """
    if settings.data or not settings.model:
        return not settings.data
    saved = saved_settings(settings.model)
    return bool(saved and saved != settings and in_built_in_world(saved))


def parse(arguments: list[str] | None = None, before: Settings | None = None) -> Settings:
    """Parses train.py's command line. `before` has the settings of the stage that the same command
    trains just before this one. If it is None, stage 2 without --model continues from the stage 1
    that was saved earlier.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    description = "Trains stages of a paper. In brackets: the value for --recipe and --stage."
    example = "example: python train.py --recipe r_search --steps 20 --run_name mine"
    parser = FlagParser("train.py", description=description + MORE_HELP, epilog=example)
    parser.most_used = [*MOST_USED, "steps", "reward", "evaluate", "resume", "dry_run"]
    add_flags(parser, RECORDS, named_in(arguments), "train")
    given = vars(parser.parse_args(arguments))
    recipe, stage = given.get("recipe", "ur2"), given.get("stage", 1)
    settings = resolve(recipe, stage, True, given)
    if stage > 1 and not (before or settings.model):
        before = stage_before(settings)
    if before and before.model:
        # The last checkpoint in this folder is loaded.
        given["model"] = str(stage_folder(settings, stage - 1))
    tiny = in_built_in_world(before or settings)
    return check_settings(resolve(recipe, stage, tiny, given), True, given)


def stage_before(settings: Settings) -> Settings | None:
    """Returns the settings of the stage before, whose last checkpoint this stage starts from, or
    None if they are gone. Without --resume, that checkpoint must exist.
    """
    folder = stage_folder(settings, settings.stage - 1)
    if not (settings.resume or any(folder.glob("checkpoint-*"))):
        raise InputError(
            f"--stage {settings.stage}: there is no checkpoint of the stage before in {folder}: "
            "train both with --stage 1,2, or give --model"
        )
    return saved_settings(str(folder))


def parse_stages(arguments: list[str] | None = None) -> list[Settings]:
    """Parses train.py's command line, where --stage may list several stages. Returns the settings
    of each stage, in order.
    """
    parser = FlagParser("train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--stage", default="1")
    args, rest = parser.parse_known_args(arguments)
    runs = []
    for stage in args.stage.split(","):
        runs.append(parse([*rest, "--stage", stage], *runs[-1:]))
    if len(runs) > 1 and (runs[0].resume or runs[0].dry_run):
        raise InputError(f"--stage {args.stage}: --resume and --dry_run take one stage: give one")
    return runs


def shown_settings(settings: Settings) -> str:
    """Returns a text for the console: recipe, stage, and settings that differ from the defaults."""
    text = "settings:"
    for f in fields(Settings):
        value = getattr(settings, f.name)
        if value != f.default or f.name in ("recipe", "stage"):
            text += f" {f.name}={value}"
    unbroken = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 100, subsequent_indent="  ", **unbroken)
