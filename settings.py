"""The flags: one record, made of the records that stand in the files that read them.

    defaults  <  the paper's stage  <  the built-in world (without --model)  <  the command line

A function takes the record it reads: `rollout` a RolloutSettings, `make_retriever` a
RetrieverSettings. `Settings` inherits them all, so flags stay flat. What no run can mean is refused
here, before a model is loaded. Left out: files of settings; a shell script of flags is one.
"""

import argparse
import dataclasses
import sys
import textwrap
import typing
from collections.abc import Iterable
from dataclasses import dataclass, fields

from curriculum import CurriculumSettings
from dapo import DapoSettings
from data import DataSettings
from errors import FlagParser, InputError, boolean, check_value, nearest, setting
from kl import KLSettings
from other_models.llm import ModelSettings, frozen_in_8bit
from papers import PAPERS, record_of
from policy import PolicySettings
from ppo import PPOSettings
from prompts import PROTOCOLS, PromptSettings
from reinforce_pp import ReinforceSettings
from retriever import RetrieverSettings
from rewards import RewardSettings, check_reward
from rollout import RolloutSettings
from scale.engine import EngineSettings
from summarizer import WITHOUT_MODEL, SummarizerSettings
from update import UpdateSettings


@dataclass(frozen=True)
class RunSettings:
    recipe: str = setting("ur2", "the paper", one_of=PAPERS)
    variant: str = setting("", "of the recipe: another backbone, or an ablation")
    stage: int = setting(1, "1: learn to search; 2: learn to answer (goes on from stage 1)")
    model: str = setting("", 'HF causal LM, a directory or a hub name; "" = the tiny built-in one')
    start_from: str = setting("", "checkpoint; else stage 1's last, else --model", only="train")
    name: str = setting("", "of the run; its files are under runs/NAME/stageN")
    runs: str = setting("runs", "folder of all runs and of the built-in models")
    resume: bool = setting(False, "go on from this run's last checkpoint", only="train")
    save_every: int = setting(10, "steps; the last one always saves", least=1, only="train")
    keep_checkpoints: int = setting(2, "older ones are deleted; 0 keeps all", least=0, only="train")
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


def _check_names() -> None:
    seen: dict[str, type] = {}
    for record in RECORDS:
        for f in fields(record):
            if f.name in seen:
                raise TypeError(f"{f.name} stands in {seen[f.name].__name__} and {record.__name__}")
            seen[f.name] = record


_check_names()


def resolve(recipe: str, stage: int, tiny: bool, given: dict | None = None) -> Settings:
    """The settings of one run: defaults, the paper's stage, the tiny world's, then `given`."""
    given = given or {}
    paper = record_of(recipe, given.get("variant", ""), stage)
    small = paper.tiny[stage] if tiny else {}
    if "max_turn_tokens" in given:  # for every task
        given = {"turn_tokens": ""} | given
    if given.get("buckets"):  # they share out a step, in place of the tiny world's kinds
        given = {"mix": ""} | given
    return Settings(**{"recipe": recipe, "stage": stage} | paper.stages[stage] | small | given)


NEEDS = {"dense": "encoder", "http": "retriever_url"}  # retriever -> the flag that it alone reads


def check_limits(record) -> None:
    """Every field against the limits that stand beside it."""
    for f in fields(record):
        check_value(f.name, getattr(record, f.name), f.metadata)


def check_settings(settings: Settings, training: bool = True) -> Settings:
    """The settings, or an InputError for what no run (not `training`: no evaluation) can mean."""
    if settings.retriever == "web":
        how = "serve it (python retriever.py serve --retriever web), and give --retriever http"
        raise InputError(f"--retriever web: {how} --retriever_url http://host:port")
    check_limits(settings)
    frozen_in_8bit(settings)
    notes, like = settings.summarizer, nearest(settings.summarizer, WITHOUT_MODEL)
    if notes not in WITHOUT_MODEL and (like or notes == "llm"):  # else a hub is asked, for minutes
        raise InputError(f"--summarizer {notes}: none, extractive, or the model itself{like}")
    if settings.data and not settings.model:
        raise InputError("--data needs --model: the built-in model can read only its own world")
    searches = PROTOCOLS[settings.protocol].query_tags is not None
    local = settings.retriever in ("bm25", "dense", "random")
    if searches and settings.data and local and not settings.corpus:
        own = "--corpus from-data to search the records' own paragraphs"
        raise InputError(f"--data needs --corpus FILE, or {own}")
    for retriever, flag in NEEDS.items():
        given, chosen = bool(getattr(settings, flag)), settings.retriever == retriever
        if chosen and searches and not given:
            raise InputError(f"--retriever {retriever} needs --{flag}")
        if given and not chosen:
            raise InputError(f"--{flag}: only --retriever {retriever} reads it: give both, or none")
    if training:
        _check_training(settings)
    return settings


def _check_training(settings: Settings) -> None:
    """Settings that are fine one by one and mean nothing together."""
    if settings.temperature == 0:
        raise InputError("--temperature 0 is greedy: a group's trajectories would all be the same")
    if settings.group_size == 1 and settings.algorithm not in ("reinforce_pp", "ppo"):
        why = "compares the trajectories of one question; it needs at least 2"
        raise InputError(f"--group_size 1: {settings.algorithm} {why}")
    _check_8bit(settings)
    check_reward(settings)


def _check_8bit(settings: Settings) -> None:
    """int8 weights are for models that nobody trains."""
    in_8bit = frozen_in_8bit(settings)
    if "base" in in_8bit and settings.sampling_copy == "bf16":
        why = "the copy would take the memory that 8 bits saved; use none"
        raise InputError(f"--sampling_copy bf16 with --in_8bit base: {why}")
    if "base" in in_8bit and not settings.lora_rank:
        why = "int8 weights cannot be trained, a step of 1e-6 rounds away: add --lora_rank 16"
        raise InputError(f"--in_8bit base: {why}, or leave it out")
    if "reference" in in_8bit and settings.lora_rank:
        why = "with --lora_rank the reference is the frozen base itself"
        raise InputError(f"--in_8bit reference: {why}: --in_8bit base")
    if "reference" in in_8bit and not settings.kl_coef:
        raise InputError("--in_8bit reference: with --kl_coef 0 no reference is loaded")
    if in_8bit - {"others"} and not (settings.model or settings.start_from):
        raise InputError("--in_8bit is for models from --model: the built-in one stays in fp32")


RENAMED = {  # flags of earlier versions -> what to write now
    "allow_private": "a flag of `python retriever.py serve --retriever web` now",
    "base_in_8bit": "write --in_8bit base",
    "beta1": "a constant of policy.py now",
    "beta2": "a constant of policy.py now",
    "cross_model": "write --reader",
    "cuda_graphs": "write --engine graphs",
    "dual_clip": "a keyword of ppo.clipped_surrogate now",
    "gamma": "a keyword of reinforce_pp.returns_to_go now",
    "group_std": "a number of papers.py now",
    "index_file": "a flag of `python retriever.py serve` now",
    "kl_place": "part of --kl_estimator now: k1 in the reward, k2 and k3 in the loss, or log",
    "llm_cache": "always runs/llm_cache now",
    "llm_retries": "a constant of other_models/llm.py now",
    "llm_timeout": "write --timeout",
    "load_in_8bit": "write --in_8bit others",
    "lora_alpha": "a constant of scale/lora.py now",
    "lora_targets": "a constant of scale/lora.py now",
    "max_grad_norm": "a constant of update.py now",
    "notices": "always on now",
    "old_logprobs": "always automatic now",
    "plan": "write `python -m lab.plan`",
    "pooling": "what the encoder itself says now",
    "reference_in_8bit": "write --in_8bit reference",
    "reward_variant": "write --variant",
    "search_retries": "what asks over the network tries again by itself",
    "search_timeout": "write --timeout",
    "show_every": "a constant of train.py now",
    "similarity": "a keyword of rewards.when_to_search_stage1 now",
    "summarizer_model": "write --summarizer http://host:port/v1#model, or a HF model",
    "summary_log": "always runs/summaries.jsonl now",
    "threads": "all cores are used; `taskset -c 0` gives a run one",
    "title_boost": "a number of papers.py now",
    "top_p": "a flag of eval.py only: below 1 the samples are not what is scored",
    "value_clip": "a constant of ppo.py now",
    "vectors": "always runs/vectors now",
    "web_rate": "a constant of retrievers/web.py now",
    "weight_decay": "a constant of policy.py now",
}


def add_flags(
    parser: argparse.ArgumentParser, records: Iterable[type], shown: Settings, command: str
) -> None:
    """A --flag for every field of the records; --help has a section for each record's file, and
    names the values of `shown`. No flag has a default, so that only what is given overrides.
    """
    for record in records:
        file = record.__module__.replace("__main__", parser.prog.removesuffix(".py"))
        section = parser.add_argument_group(file.replace(".", "/") + ".py")
        kinds = typing.get_type_hints(record)
        for f in fields(record):
            if f.metadata.get("only", command) == command:
                _add_flag(section, f, kinds[f.name], getattr(shown, f.name))


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
    known.add_argument("--recipe", default="ur2")
    known.add_argument("--stage", type=int, default=1)
    known.add_argument("--model", default="")
    known.add_argument("--variant", default="")
    found, _ = known.parse_known_args(arguments)
    stage, variant = found.stage or 1, {"variant": found.variant}
    return resolve(found.recipe, stage, not found.model, variant)


def parse(arguments: list[str] | None = None) -> Settings:
    """train.py's command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    said = "Train one stage of one paper. In brackets: the value of --recipe and --stage."
    parser = FlagParser("train.py", description=said)
    parser.renamed = RENAMED
    add_flags(parser, RECORDS, named_in(arguments), "train")
    given = vars(parser.parse_args(arguments))
    recipe, stage = given.get("recipe", "ur2"), given.get("stage", 1)
    return check_settings(resolve(recipe, stage, not given.get("model"), given))


def shown_settings(settings: Settings) -> str:
    """What a run sets otherwise than the defaults, for the console."""
    text = "settings:"
    for f in fields(Settings):
        value = getattr(settings, f.name)
        if value != f.default or f.name in ("recipe", "stage"):
            text += f" {f.name}={value}"
    unbroken = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 100, subsequent_indent="  ", **unbroken)
