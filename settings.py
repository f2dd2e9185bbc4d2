"""All settings of a run: one record, made from the records of the files that read them.

    defaults  <  the paper's stage  <  the built-in world (without --model)  <  the command line

A function takes the record that it reads: `rollout` takes RolloutSettings, `make_retriever` takes
RetrieverSettings. `Settings` inherits all of them, so every setting is a flag. Combinations that
mean nothing are rejected here, before a model is loaded. Left out: configuration files; use a shell
script.
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

RUN_NAME = re.compile(r"[^/\\]{,200}")
# Eight times the step of the DAPO paper. As Python lists, the ids, masks and log-probs of 65,536
# trajectories of 4,000 tokens take 21 GB on every process, before a batch is made of them.
LARGEST_STEP = 65_536
TRACKERS = ("tensorboard", "wandb", "trackio")  # supported by accelerate; each is a package


@dataclass(frozen=True)
class RunSettings:
    recipe: str = setting("ur2", "paper to train", one_of=PAPERS)
    variant: str = setting("", "variant of the recipe: another backbone, or an ablation")
    stage: int = setting(1, "1: learn to search; 2: learn to answer, from stage 1's model")
    model: str = setting(
        "",
        "HF causal LM: folder or hub name; default: stage 1's last model, or the built-in one",
    )
    toy_init: str = setting("", "built-in model only: name of a weaker supervised warm-up")
    run_name: str = setting("", "name of the run; its files are in runs/NAME/stageN")
    output_dir: str = setting("runs", "folder of all runs and of the built-in models")
    resume: bool = setting(False, "continue from this run's last checkpoint", only="train")
    dry_run: bool = setting(
        False, "try one step, keep nothing, report what would fail", only="train"
    )
    evaluate: bool = setting(
        False,
        "evaluate in the built-in world after training, as eval.py --decoding both",
        only="train",
    )
    save_every: int = setting(
        10, "steps between checkpoints; the last step always saves one", least=1, only="train"
    )
    keep_checkpoints: int = setting(
        2, "number of checkpoints to keep; 0 keeps all", least=0, only="train"
    )
    eval_every: int = setting(0, "steps between greedy evaluations; 0: none", least=0, only="train")
    eval_questions: int = setting(
        100,
        "questions held out of --data, or per kind of the built-in world",
        least=1,
        only="papers",
    )
    groups_kept: int = setting(
        4,
        "groups per step kept in trajectories.jsonl.gz for view.py; -1: all",
        least=-1,
        only="train",
    )
    report_to: str = setting(
        "", "tracker that also gets the metrics", one_of=("", *TRACKERS), only="train"
    )
    deterministic: bool = setting(
        False,
        "on a GPU: make runs repeatable, at some speed; CPU runs are repeatable anyway",
        only="train",
    )
    seed: int = setting(0, "seed of questions and sampling", least=0, most=2**31 - 1)
    world_seed: int = setting(0, "seed of the built-in world and its models")


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
    """Every setting of a run. Each name is in one record only."""


def resolve(recipe: str, stage: int, tiny: bool, given: dict | None = None) -> Settings:
    """Returns the settings of one run: defaults, the paper's stage, the tiny world's, `given`."""
    given = given or {}
    paper = record_of(recipe, given.get("variant", ""), stage)
    built_in = paper.tiny[stage] if tiny else {}
    chosen = paper.stages[stage] | built_in
    # The built-in world has too few questions of one task for the shares of buckets per task.
    shares = [x for x in chosen.get("buckets", "").split(",") if not (tiny and ":" in x)]
    chosen = chosen | {"buckets": ",".join(shares)}
    if not given.get("difficulty"):  # the paper's shares need measured questions
        chosen = chosen | {"buckets": "", "mix": built_in.get("mix", "")}
    if given.get(
        "buckets", tiny and chosen["buckets"]
    ):  # buckets share out a step, not kinds of questions
        chosen = chosen | {"mix": ""}
    if "max_turn_tokens" in given:  # one limit for every task
        given = {"turn_tokens": ""} | given
    if "max_searches" in given:
        given = {"task_searches": ""} | given
    if given.get("algorithm") == "dapo" != chosen["algorithm"]:
        chosen = chosen | DAPO
    return Settings(**{"recipe": recipe, "stage": stage} | chosen | given)


NEEDS = {"dense": "encoder", "http": "retriever_url"}  # retriever -> a flag that only it reads
READ_BY = NEEDS | {"bm25": "index"}
SEARCHING = """
retriever retriever_url index encoder documents_per_search document_tokens max_searches summarizer
corpus retrieval task_mixing mask_documents
""".split()  # flags that mean nothing if the protocol does not search
MODELS = {"verdict": "judge", "grade": "judge", "reader": "reader", "embedder": "embedder"}


def unread(settings: Settings, training: bool) -> dict[str, str]:
    """Maps each flag that this run would not read to the reason. A recipe may set such values."""
    reasons = {
        flag: f"only --retriever {name} reads it"
        for name, flag in READ_BY.items()
        if name != settings.retriever
    }
    if PROTOCOLS[settings.protocol].query_tags is None:
        reasons |= dict.fromkeys(SEARCHING, f"protocol {settings.protocol} searches nothing")
    if settings.model:
        reasons["toy_init"] = "--model has no warm-up"
    if not training:
        return reasons
    if not on_servers(settings):
        reasons["served"] = "only --engine http://... reads it"
    if settings.algorithm != "ppo":
        reasons["critic_lr"] = "only --algorithm ppo reads it"
    if settings.algorithm == "dapo" and settings.loss_aggregation == "sequence":
        reasons["loss_aggregation"] = "dapo has a mean per token, or per question"
    if not settings.mask_documents:
        reasons["mismatch"] = "documents were not sampled, so with --mask_documents false none does"
    if not settings.kl_coef:
        reasons["kl_estimator"] = "with --kl_coef 0 there is no KL"
    asked = asked_of_others(settings)
    read = {MODELS[need] for need in asked & MODELS.keys()}
    read |= {*READS.get(settings.reward, "").split()}
    if settings.left_out == "answer":
        read.discard("beta")
    names = {*MODELS.values(), *(f.name for f in fields(RewardSettings))} - {"reward"}
    reward = f"{settings.reward} without {settings.left_out}".removesuffix(" without ")
    return reasons | dict.fromkeys(names - read, f"--reward {reward} does not read it")


def asked_of_others(settings: Settings) -> set[str]:
    """Returns what the reward needs, and the verdict if DAPO filters by correctness."""
    sorts = settings.algorithm == "dapo" and settings.filter_by == "correct"
    return needs(settings) | ({"verdict"} if sorts else set())


def check_limits(record) -> None:
    """Checks every field against the limits in its metadata."""
    for f in fields(record):
        value = getattr(record, f.name)
        if f.name != "reward" or ":" not in value:  # FILE.py:FUNCTION is loaded later
            check_value(f.name, value, f.metadata)


def check_settings(settings: Settings, training=True, given: Iterable[str] = ()) -> Settings:
    """Returns the settings. Raises an InputError for a combination that means nothing in a training
    run (or, without `training`, in an evaluation), and for a `given` flag that is not read.
    """
    if settings.retriever == "web":
        advice = "serve it (python retriever.py serve --retriever web), and give --retriever http"
        raise InputError(f"--retriever web: {advice} --retriever_url http://host:port")
    check_limits(settings)
    if settings.run_name in (".", "..") or not RUN_NAME.fullmatch(settings.run_name):
        needed = "it needs a name without a slash, of at most 200 characters"
        raise InputError(f"--run_name {settings.run_name} names a folder in --output_dir: {needed}")
    if on_servers(settings):
        for url in settings.engine.split(","):
            host_of(url, f"--engine {', '.join(LOCAL)}, or http://host:8000")
        if not training:
            raise InputError(
                "--engine http: an evaluation samples in this process: leave it out, or give hf"
            )
    frozen_in_8bit(settings)
    _check_summarizer(settings)
    if settings.data and not settings.model:
        raise InputError("--data needs --model: the built-in model can read only its own world")
    known = paper_of(settings.protocol).warm_ups
    if settings.toy_init and settings.toy_init not in known:
        names = ", ".join(known) or "none"
        raise InputError(f"--toy_init {settings.toy_init}: {settings.protocol} has these: {names}")
    searches = PROTOCOLS[settings.protocol].query_tags is not None
    local = settings.retriever in ("bm25", "dense", "random")
    if searches and settings.data and local and not settings.corpus:
        other = "--corpus from-data to search the records' own paragraphs"
        raise InputError(f"--data needs --corpus FILE, or {other}")
    needed = NEEDS.get(settings.retriever)
    if needed and searches and not getattr(settings, needed):
        raise InputError(f"--retriever {settings.retriever} needs --{needed}")
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
        raise InputError("--in_8bit: an evaluation trains nothing, so only others can be named")
    if settings.reader and not PROTOCOLS[settings.protocol].evidence_tags:
        problem = f"which protocol {settings.protocol} does not have: leave it out"
        raise InputError(f"--reader answers from evidence boxes, {problem}")


def _check_summarizer(settings: Settings) -> None:
    summarizer = settings.summarizer
    if not {"other"} <= by_task(summarizer).keys() <= SUMMARIZED:
        advice = "give one for all tasks, or TASK=NAME,...,other=NAME with qa, math and choice"
        raise InputError(f"--summarizer {summarizer}: {advice}")
    for name in sorted(models_in(summarizer)):
        like = nearest(name, WITHOUT_MODEL)
        if like or name == "llm":  # otherwise the hub would be asked, for minutes
            raise InputError(f"--summarizer {name}: give none, extractive, or a model's name{like}")
    has_fallback = PROTOCOLS[settings.protocol].fallback_text
    if settings.fallback and not (has_fallback and models_in(summarizer)):
        given = f"--summarizer is {summarizer}, and the protocol {settings.protocol}"
        raise InputError(f"--fallback needs a summarising model and a protocol with one: {given}")


def _check_training(settings: Settings) -> None:
    """Rejects combinations of settings that mean nothing together."""
    if settings.questions_per_step * settings.group_size > LARGEST_STEP:
        most = f"a step holds at most {LARGEST_STEP:,} trajectories: give fewer"
        raise InputError(f"--questions_per_step times --group_size: {most}")
    if settings.temperature == 0:
        raise InputError("--temperature 0 is greedy: a group's trajectories would all be the same")
    if settings.top_p < 1:
        problem = "log-probs would be of another distribution than the sampled one"
        raise InputError(f"--top_p {settings.top_p}: {problem}: train with 1")
    if settings.group_size == 1 and settings.algorithm not in ("reinforce_pp", "ppo"):
        why = "compares the trajectories of one question; it needs at least 2"
        raise InputError(f"--group_size 1: {settings.algorithm} {why}")
    if (every := settings.eval_every) > settings.steps:
        raise InputError(f"--eval_every {every}: the run has {settings.steps} steps: give fewer")
    if settings.evaluate and settings.data:
        how = "python eval.py --model ... --data HELD_OUT_FILE"
        raise InputError(f"--evaluate asks about the built-in world, and this is --data: {how}")
    _check_8bit(settings)
    terms = check_reward(settings)
    if settings.reward.startswith("arena") and settings.judge and settings.answer_metric != "em":
        why = "ARENA's accuracy is the metric or the verdict: give one of the two"
        raise InputError(f"--answer_metric {settings.answer_metric} with --judge: {why}")
    asks = settings.algorithm == "dapo" and settings.filter_by == "answer"
    if asks and "answer" not in terms:
        why = "the recipe keeps groups by the term `answer`: name one so, or give --algorithm grpo"
        raise InputError(f"--reward {settings.reward}: {why}")


def _check_8bit(settings: Settings) -> None:
    """Rejects int8 weights for models that are trained."""
    in_8bit = frozen_in_8bit(settings)
    if "base" in in_8bit and not settings.lora_rank:
        why = "int8 weights cannot be trained, a step of 1e-6 rounds away: add --lora_rank 16"
        raise InputError(f"--in_8bit base: {why}, or leave it out")
    if "reference" in in_8bit and settings.lora_rank:
        why = "with --lora_rank the reference is the frozen base itself"
        raise InputError(f"--in_8bit reference: {why}: --in_8bit base")
    if "reference" in in_8bit and not settings.kl_coef:
        raise InputError("--in_8bit reference: with --kl_coef 0 no reference is loaded")
    if in_8bit - {"others"} and not settings.model:
        raise InputError("--in_8bit is for models from --model: the built-in one stays in fp32")


def boolean(text: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]


def add_flags(
    parser: argparse.ArgumentParser, records: Iterable[type], shown: Settings, command: str
) -> None:
    """Adds a --flag for every field of the records. --help has a section for each record's file and
    shows the values of `shown`. No flag has a default, so that only given flags override.
    """
    for record in records:
        section = parser.add_argument_group(file_of(record, parser.prog))
        kinds = typing.get_type_hints(record)
        for f in fields(record):
            if f.metadata.get("only", command) == command:
                _add_flag(section, f, kinds[f.name], getattr(shown, f.name))


def file_of(record: type, command: str = "") -> str:
    """Returns the file that reads a record; the records in flags.py name it in their docstring."""
    if record.__module__ == "flags":
        return record.__doc__
    name = record.__module__.replace("__main__", command.removesuffix(".py"))
    return name.replace(".", "/") + ".py"


def _add_flag(section, f: dataclasses.Field, kind, value) -> None:
    kind = (*typing.get_args(kind), kind)[0]  # int | None -> int
    names = f.metadata.get("one_of")
    text = f.metadata["help"] + (f"; one of {', '.join(names)}" if names else "")
    text += f" ({value!r})" if value == f.default else f" ({value!r}; default {f.default!r})"
    once = {"nargs": "?", "const": True} if kind is bool else {}
    section.add_argument(
        f"--{f.name}",
        type=boolean if kind is bool else kind,
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),
        metavar=kind.__name__.upper(),
        **once,
    )


def named_in(arguments: list[str]) -> Settings:
    """Returns the settings of the recipe and stage of a command line, which --help shows."""
    known = FlagParser(add_help=False, allow_abbrev=False)
    for name in ("recipe", "stage", "model", "variant"):
        default = getattr(RunSettings, name)
        known.add_argument(f"--{name}", type=type(default), default=default)
    found, _ = known.parse_known_args(arguments)
    stage, variant = found.stage or 1, {"variant": found.variant}
    return resolve(found.recipe, stage, not found.model, variant)


def stage_folder(settings: Settings, stage: int | None = None) -> Path:
    """Returns runs/NAME/stageN; the default name is made from paper, data and seed."""
    data = Path(settings.data.split(",")[0]).stem or f"world{settings.world_seed}"
    recipe = "-".join(filter(None, [settings.recipe, settings.variant]))
    name = settings.run_name or f"{recipe}-{data}-seed{settings.seed}"
    return Path(settings.output_dir) / name / f"stage{stage or settings.stage}"


def saved_settings(model: str) -> Settings | None:
    """Returns the settings in the folder of a checkpoint or stage of ours; None for another model."""
    path = Path(model, "settings.json")
    if not model or not path.exists():
        return None
    try:
        return Settings(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputError(f"{path}: not a settings file of train.py ({error})") from None


def in_built_in_world(settings: Settings) -> bool:
    """Returns whether the built-in world is asked: tiny models, and models trained from them, know
    only that world.
    """
    if settings.data or not settings.model:
        return not settings.data
    before = saved_settings(settings.model)
    return bool(before and before != settings and in_built_in_world(before))


def parse(arguments: list[str] | None = None, before: Settings | None = None) -> Settings:
    """Reads train.py's command line. `before` is the stage that the same command trains first.
    Without it, a stage 2 without --model continues from the stage 1 on disk, with the settings of
    its model.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    text = "Trains one stage of one paper. In brackets: the value for this --recipe and --stage."
    parser = FlagParser("train.py", description=text)
    add_flags(parser, RECORDS, named_in(arguments), "train")
    given = vars(parser.parse_args(arguments))
    recipe, stage = given.get("recipe", "ur2"), given.get("stage", 1)
    settings = resolve(recipe, stage, True, given)
    if stage > 1 and not (before or settings.model):
        before = saved_settings(str(stage_folder(settings, stage - 1)))
    if before and before.model:
        given["model"] = str(stage_folder(settings, stage - 1))  # its last checkpoint
    tiny = in_built_in_world(before or settings)
    return check_settings(resolve(recipe, stage, tiny, given), True, given)


def parse_stages(arguments: list[str] | None = None) -> list[Settings]:
    """Reads the command line of several stages, --stage 1,2, into the settings of each."""
    found = FlagParser("train.py", add_help=False, allow_abbrev=False)
    found.add_argument("--stage", default="1")
    known, rest = found.parse_known_args(arguments)
    runs = []
    for stage in known.stage.split(","):
        runs.append(parse([*rest, "--stage", stage], *runs[-1:]))
    if len(runs) > 1 and (runs[0].resume or runs[0].dry_run):
        raise InputError(
            f"--stage {known.stage} starts both stages from the beginning: give one stage"
        )
    return runs


def shown_settings(settings: Settings) -> str:
    """Returns the settings that differ from the defaults, for the console."""
    text = "settings:"
    for f in fields(Settings):
        value = getattr(settings, f.name)
        if value != f.default or f.name in ("recipe", "stage"):
            text += f" {f.name}={value}"
    unbroken = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 100, subsequent_indent="  ", **unbroken)
