"""The flags: one record, made of the records that stand in the files that read them.

    defaults  <  the paper's stage  <  the built-in world (without --model)  <  the command line

A function takes the record it reads: `rollout` a RolloutSettings, `make_retriever` a
RetrieverSettings. `Settings` inherits them all, so flags stay flat. What no run can mean is refused
here, before a model is loaded. Left out: files of settings; a shell script of flags is one.
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
TRACKERS = ("tensorboard", "wandb", "trackio")  # accelerate's, each a package of its own


@dataclass(frozen=True)
class RunSettings:
    recipe: str = setting("ur2", "the paper", one_of=PAPERS)
    variant: str = setting("", "of the recipe: another backbone, or an ablation")
    stage: int = setting(1, "1: learn to search; 2: learn to answer (goes on from stage 1)")
    model: str = setting(
        "", 'HF causal LM: folder or hub name; "" = stage 1\'s last, or the built-in one'
    )
    toy_init: str = setting("", 'of the built-in model: "" = the usual one, or a worse one by name')
    run_name: str = setting("", "its files are under runs/NAME/stageN")
    output_dir: str = setting("runs", "folder of all runs and of the built-in models")
    resume: bool = setting(False, "go on from this run's last checkpoint", only="train")
    dry_run: bool = setting(False, "try one step, keep nothing, say what would fail", only="train")
    evaluate: bool = setting(
        False, "afterwards in the built-in world, as eval.py --decoding both", only="train"
    )
    save_every: int = setting(10, "steps; the last one always saves", least=1, only="train")
    keep_checkpoints: int = setting(2, "older ones are deleted; 0 keeps all", least=0, only="train")
    eval_every: int = setting(0, "steps between greedy evaluations; 0: none", least=0, only="train")
    eval_questions: int = setting(100, "held out of --data, or per kind", least=1, only="papers")
    groups_kept: int = setting(
        4, "per step in trajectories.jsonl.gz, for view.py; -1: all", least=-1, only="train"
    )
    report_to: str = setting(
        "", "a tracker beside metrics.jsonl", one_of=("", *TRACKERS), only="train"
    )
    deterministic: bool = setting(
        False, "on a GPU: the same numbers again, slower; a CPU has them anyway", only="train"
    )
    seed: int = setting(0, "of questions and sampling", least=0, most=2**31 - 1)
    world_seed: int = setting(0, "of the built-in world and its models")


ASKING = (  # what a model needs to be asked: all that an evaluation reads
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
    """Every setting of a run. A name stands in one record only."""


def resolve(recipe: str, stage: int, tiny: bool, given: dict | None = None) -> Settings:
    """The settings of one run: defaults, the paper's stage, the tiny world's, then `given`."""
    given = given or {}
    paper = record_of(recipe, given.get("variant", ""), stage)
    built_in = paper.tiny[stage] if tiny else {}
    chosen = paper.stages[stage] | built_in
    # The built-in world has too few questions of a task, and none of a data set, to share out.
    shares = [x for x in chosen.get("buckets", "").split(",") if not (tiny and ":" in x)]
    chosen = chosen | {"buckets": ",".join(shares)}
    if not given.get("difficulty"):  # the paper's shares are of questions that were measured
        chosen = chosen | {"buckets": "", "mix": built_in.get("mix", "")}
    if given.get("buckets", tiny and chosen["buckets"]):  # they share out a step, not the kinds
        chosen = chosen | {"mix": ""}
    if "max_turn_tokens" in given:  # for every task
        given = {"turn_tokens": ""} | given
    if "max_searches" in given:
        given = {"task_searches": ""} | given
    if given.get("algorithm") == "dapo" != chosen["algorithm"]:
        chosen = chosen | DAPO
    return Settings(**{"recipe": recipe, "stage": stage} | chosen | given)


NEEDS = {"dense": "encoder", "http": "retriever_url"}  # retriever -> the flag that it alone reads
READ_BY = NEEDS | {"bm25": "index"}
SEARCHING = """
retriever retriever_url index encoder documents_per_search document_tokens max_searches summarizer
corpus retrieval task_mixing mask_documents
""".split()  # what has no meaning where nothing is searched
MODELS = {"verdict": "judge", "grade": "judge", "reader": "reader", "embedder": "embedder"}


def unread(settings: Settings, training: bool) -> dict[str, str]:
    """Flag -> why this run would not read it. A recipe's own values may stand there unread."""
    others = {needed: its for its, needed in READ_BY.items() if its != settings.retriever}
    found = {flag: f"only --retriever {its} reads it" for flag, its in others.items()}
    if PROTOCOLS[settings.protocol].query_tags is None:
        found |= dict.fromkeys(SEARCHING, f"protocol {settings.protocol} searches nothing")
    if settings.model:
        found["toy_init"] = "--model has no warm-up"
    if not training:
        return found
    if not on_servers(settings):
        found["served"] = "only --engine http://... reads it"
    if settings.algorithm != "ppo":
        found["critic_lr"] = "only --algorithm ppo reads it"
    if settings.algorithm == "dapo" and settings.loss_aggregation == "sequence":
        found["loss_aggregation"] = "dapo has a mean per token, or per question"
    if not settings.mask_documents:
        found["mismatch"] = "documents were not sampled, so with --mask_documents false none does"
    if not settings.kl_coef:
        found["kl_estimator"] = "with --kl_coef 0 there is no KL"
    asked = asked_of_others(settings)
    read = {MODELS[need] for need in asked & MODELS.keys()}
    read |= {*READS.get(settings.reward, "").split()}
    if settings.left_out == "answer":
        read.discard("beta")
    names = {*MODELS.values(), *(f.name for f in fields(RewardSettings))} - {"reward"}
    reward = f"{settings.reward} without {settings.left_out}".removesuffix(" without ")
    return found | dict.fromkeys(names - read, f"--reward {reward} does not read it")


def asked_of_others(settings: Settings) -> set[str]:
    """Returns what the reward needs, and the verdict where DAPO's filter asks who is right."""
    sorts = settings.algorithm == "dapo" and settings.filter_by == "correct"
    return needs(settings) | ({"verdict"} if sorts else set())


def check_limits(record) -> None:
    """Every field against the limits that stand beside it."""
    for f in fields(record):
        value = getattr(record, f.name)
        if f.name != "reward" or ":" not in value:  # FILE.py:FUNCTION is loaded where it pays
            check_value(f.name, value, f.metadata)


def check_settings(settings: Settings, training=True, given: Iterable[str] = ()) -> Settings:
    """The settings, or an InputError for what no run (not `training`: no evaluation) can mean, or
    for a flag `given` that this one does not read.
    """
    if settings.retriever == "web":
        how = "serve it (python retriever.py serve --retriever web), and give --retriever http"
        raise InputError(f"--retriever web: {how} --retriever_url http://host:port")
    check_limits(settings)
    if settings.run_name in (".", "..") or not RUN_NAME.fullmatch(settings.run_name):
        how = "a name without a slash, of at most 200 characters"
        raise InputError(f"--run_name {settings.run_name}: a folder inside --output_dir: {how}")
    if on_servers(settings):
        for url in settings.engine.split(","):
            host_of(url, f"--engine {', '.join(LOCAL)}, or http://host:8000")
        if not training:
            raise InputError("--engine http: an evaluation samples by itself: leave it out, or hf")
    frozen_in_8bit(settings)
    _check_summarizer(settings)
    if settings.data and not settings.model:
        raise InputError("--data needs --model: the built-in model can read only its own world")
    known = paper_of(settings.protocol).warm_ups
    if settings.toy_init and settings.toy_init not in known:
        names = ", ".join(known) or "none"
        raise InputError(
            f"--toy_init {settings.toy_init}: of {settings.protocol} there is: {names}"
        )
    searches = PROTOCOLS[settings.protocol].query_tags is not None
    local = settings.retriever in ("bm25", "dense", "random")
    if searches and settings.data and local and not settings.corpus:
        own = "--corpus from-data to search the records' own paragraphs"
        raise InputError(f"--data needs --corpus FILE, or {own}")
    needed = NEEDS.get(settings.retriever)
    if needed and searches and not getattr(settings, needed):
        raise InputError(f"--retriever {settings.retriever} needs --{needed}")
    if training:
        _check_training(settings)
    else:
        _check_asking(settings, given)
    why = unread(settings, training)
    for flag in [name for name in given if name in why]:
        raise InputError(f"--{flag}: {why[flag]}: leave it out")
    return settings


def _check_asking(settings: Settings, given: Iterable[str]) -> None:
    if "in_8bit" in given and settings.in_8bit not in ("", "others"):
        raise InputError("--in_8bit: nothing is trained here: others is all that it can name")
    if settings.reader and not PROTOCOLS[settings.protocol].evidence_tags:
        why = f"which protocol {settings.protocol} does not have: leave it out"
        raise InputError(f"--reader answers from evidence boxes, {why}")


def _check_summarizer(settings: Settings) -> None:
    notes, own = settings.summarizer, by_task(settings.summarizer)
    if not {"other"} <= own.keys() <= SUMMARIZED:
        how = "one for all tasks, or TASK=NAME,...,other=NAME of qa, math and choice"
        raise InputError(f"--summarizer {notes}: {how}")
    for name in sorted(models_in(notes)):
        like = nearest(name, WITHOUT_MODEL)
        if like or name == "llm":  # else a hub is asked, for minutes
            raise InputError(f"--summarizer {name}: none, extractive, or the model itself{like}")
    has = PROTOCOLS[settings.protocol].fallback_text
    if settings.fallback and not (has and models_in(notes)):
        why = "a model of --summarizer and a protocol with a fallback"
        raise InputError(f"--fallback needs {why}; {notes} and {settings.protocol} are not both")


def _check_training(settings: Settings) -> None:
    """Settings that are fine one by one and mean nothing together."""
    if settings.questions_per_step * settings.group_size > LARGEST_STEP:
        most = f"a step holds at most {LARGEST_STEP:,} trajectories: give fewer"
        raise InputError(f"--questions_per_step times --group_size: {most}")
    if settings.temperature == 0:
        raise InputError("--temperature 0 is greedy: a group's trajectories would all be the same")
    if settings.top_p < 1:
        why = "the log-probs would not be those of the distribution that is sampled"
        raise InputError(f"--top_p {settings.top_p}: {why}: train with 1")
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
    """int8 weights are for models that nobody trains."""
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
    """A --flag for every field of the records; --help has a section for each record's file, and
    names the values of `shown`. No flag has a default, so that only what is given overrides.
    """
    for record in records:
        section = parser.add_argument_group(file_of(record, parser.prog))
        kinds = typing.get_type_hints(record)
        for f in fields(record):
            if f.metadata.get("only", command) == command:
                _add_flag(section, f, kinds[f.name], getattr(shown, f.name))


def file_of(record: type, command: str = "") -> str:
    """The file that reads a record. Those that stand in flags.py name theirs."""
    if record.__module__ == "flags":
        return record.__doc__
    name = record.__module__.replace("__main__", command.removesuffix(".py"))
    return name.replace(".", "/") + ".py"


def _add_flag(section, f: dataclasses.Field, kind, value) -> None:
    kind = (*typing.get_args(kind), kind)[0]  # int | None -> int
    names = f.metadata.get("one_of")
    text = f.metadata["help"] + (f"; one of {', '.join(names)}" if names else "")
    text += f" ({value!r})" if value == f.default else f" ({value!r}; by itself {f.default!r})"
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
    """The settings of the recipe and stage that a command line names: what --help shows."""
    known = FlagParser(add_help=False, allow_abbrev=False)
    for name in ("recipe", "stage", "model", "variant"):
        default = getattr(RunSettings, name)
        known.add_argument(f"--{name}", type=type(default), default=default)
    found, _ = known.parse_known_args(arguments)
    stage, variant = found.stage or 1, {"variant": found.variant}
    return resolve(found.recipe, stage, not found.model, variant)


def stage_folder(settings: Settings, stage: int | None = None) -> Path:
    """runs/NAME/stageN; the default name says paper, data and seed."""
    data = Path(settings.data.split(",")[0]).stem or f"world{settings.world_seed}"
    recipe = "-".join(filter(None, [settings.recipe, settings.variant]))
    name = settings.run_name or f"{recipe}-{data}-seed{settings.seed}"
    return Path(settings.output_dir) / name / f"stage{stage or settings.stage}"


def saved_settings(model: str) -> Settings | None:
    """The settings beside a checkpoint of ours, or in its stage's folder; None: another model."""
    path = Path(model, "settings.json")
    if not model or not path.exists():
        return None
    try:
        return Settings(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputError(f"{path}: not a settings file of train.py ({error})") from None


def in_built_in_world(settings: Settings) -> bool:
    """The tiny models, and what was trained from them, are asked about the world they know."""
    if settings.data or not settings.model:
        return not settings.data
    before = saved_settings(settings.model)
    return bool(before and before != settings and in_built_in_world(before))


def parse(arguments: list[str] | None = None, before: Settings | None = None) -> Settings:
    """train.py's command line. `before`: the stage that the same command trains first; else a stage
    2 without --model goes on from the stage 1 that is there, with the settings of its model.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    said = "Train one stage of one paper. In brackets: the value of --recipe and --stage."
    parser = FlagParser("train.py", description=said)
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
    """The same of --stage 1,2: a run of each, one after the other."""
    found = FlagParser("train.py", add_help=False, allow_abbrev=False)
    found.add_argument("--stage", default="1")
    known, rest = found.parse_known_args(arguments)
    runs = []
    for stage in known.stage.split(","):
        runs.append(parse([*rest, "--stage", stage], *runs[-1:]))
    if len(runs) > 1 and (runs[0].resume or runs[0].dry_run):
        raise InputError(f"--stage {known.stage} begins both anew: give one stage")
    return runs


def shown_settings(settings: Settings) -> str:
    """What a run sets otherwise than the defaults, for the console."""
    text = "settings:"
    for f in fields(Settings):
        value = getattr(settings, f.name)
        if value != f.default or f.name in ("recipe", "stage"):
            text += f" {f.name}={value}"
    unbroken = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 100, subsequent_indent="  ", **unbroken)
