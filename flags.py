"""From the command line to the settings of a run: recipe, flags, checks, folders of runs.

    resolve          defaults < the paper's stage < its values for the tiny model < given flags
    check_settings   refuses what would fail only after a long time, or train wrongly in silence
    parse_stages     train.py's command line -> the settings of each stage

Left out: whatever the code that reads a setting reports by itself.
"""

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path

from errors import FlagParser, InputError
from papers import PROTOCOLS, record_of
from rewards import check_reward
from settings import Settings, check_limits, check_value, pairs
from templates import variables_of

# --algorithm dapo sets these values of the DAPO paper in a recipe that has another algorithm.
DAPO = {"clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token", "kl_coef": 0.0}
# Another --algorithm in a recipe that has DAPO sets these: GRPO's one clip range, mean and KL (k3),
# with the KL weight of When to Search's Table 5.
NO_DAPO = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "loss_aggregation": "sequence",
    "kl_coef": 1e-4,
    "kl_estimator": "k3",
}
DEFAULTS = Settings()


def on_servers(settings: Settings) -> bool:
    return settings.engine not in ("slots", "hf")


# -------------------------------------------------------------------------------------- the recipe
def resolve(recipe: str, stage: int | None, tiny: bool, given: dict | None = None) -> Settings:
    """Returns the settings of a run; the stage None is the recipe's last one. A later source
    overrides the earlier ones: defaults, the paper's stage, the values for the tiny model (if
    `tiny`), `given`.
    """
    given = given or {}
    paper = record_of(recipe, given.get("variant", ""), stage)
    stage = stage or max(paper.stages)
    built_in = paper.tiny[stage] if tiny else {}
    chosen = {"recipe": recipe, "stage": stage} | paper.stages[stage] | built_in
    if not given.get("difficulty"):  # without it, only the tiny model's `mix` is used
        chosen |= {"buckets": {}, "mix": built_in.get("mix", {})}
    # These two flags apply to every task: the recipe's limits for single tasks are dropped.
    if "max_turn_tokens" in given:
        chosen["turn_tokens"] = {}
    if "max_searches" in given:
        chosen["task_searches"] = {}
    usual = chosen["algorithm"]
    algorithm = given.get("algorithm", usual)
    if algorithm != usual and "dapo" in (algorithm, usual):
        chosen |= DAPO if algorithm == "dapo" else NO_DAPO
    rest = chosen.pop("reward_args", {})
    if given.get("reward", chosen.get("reward")) == chosen.get("reward"):
        # Arguments that the variant has and the command line does not name stay.
        given = given | {"reward_args": rest | given.get("reward_args", {})}
    return Settings(**chosen | given)


# ------------------------------------------------------------------------------------------ checks
def check_settings(settings: Settings, training=True) -> Settings:
    """Returns the settings unchanged. Raises an InputError if one of them breaks its limits, or if
    they contradict each other. With `training` False, the settings are for a command that asks a
    model and does not train it.
    """
    check_limits(settings)
    check_value("protocol", settings.protocol, {"one_of": PROTOCOLS})
    variables_of(settings.chat_template)
    if settings.data and not settings.model:
        raise InputError("--data needs --model: the built-in model knows only its own world")
    if PROTOCOLS[settings.protocol].query_tags:
        check_retriever(settings)
    if training:
        check_training(settings)
    return settings


def check_retriever(settings: Settings) -> None:
    if settings.data and not settings.corpus and settings.retriever in ("bm25", "dense", "random"):
        raise InputError(
            "--data needs --corpus FILE, or --corpus from-data to search the records' own "
            "paragraphs"
        )
    flag = {"dense": "encoder", "http": "retriever_url"}.get(settings.retriever)
    if flag and not getattr(settings, flag):
        raise InputError(f"--retriever {settings.retriever} needs --{flag}")


def check_training(settings: Settings) -> None:
    if settings.retriever_url and settings.retriever != "http":
        raise InputError("--retriever_url needs --retriever http")
    if settings.temperature == 0:
        raise InputError("--temperature 0 is greedy: a group's trajectories would all be the same")
    if settings.mismatch in ("token", "sequence_mask") and not settings.mask_documents:
        raise InputError(
            f"--mismatch {settings.mismatch}: documents are in the loss, but were not sampled: "
            "use auto"
        )
    if settings.group_size == 1 and settings.algorithm not in ("reinforce_pp", "ppo"):
        raise InputError(
            f"--group_size 1: {settings.algorithm} compares the trajectories of one question; it "
            "needs at least 2"
        )
    check_reward(settings)


# ------------------------------------------------------------------------------- the command line
def boolean(text: str) -> bool:
    return bool(("false", "true").index(text.lower()))  # a ValueError is argparse's one-line error


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def add_flags(parser: argparse.ArgumentParser, record: type, command: str) -> None:
    """Adds a --flag for every field of a record with a help text, if the field's `only` is not set
    or is `command` ("train" or "eval"). --help shows the default, which a recipe may change.
    argparse gets none, so it returns only the flags that the user gave.
    """
    for f in fields(record):
        if "help" not in f.metadata or f.metadata.get("only", command) != command:
            continue
        default = getattr(record(), f.name)
        names = f.metadata.get("one_of")
        kind = type(default)
        text = f.metadata["help"] + (f"; one of {', '.join(names)}" if names else "")
        flag = parser.add_argument(
            f"--{f.name}",
            type={bool: boolean, dict: pairs}.get(kind, kind),
            metavar=kind.__name__.upper(),
            default=argparse.SUPPRESS,
            help=f"{text} ({default!r})".replace("%", "%%"),
        )
        if kind is bool:  # --resume is --resume true
            flag.nargs = "?"
            flag.const = True


def parse_flags(
    command: str, record: type, arguments: list | None, with_settings=False, methods=(), only="eval"
) -> tuple:
    """Returns (an instance of `record`, a dict of the other arguments that were given). The flags
    are the fields of `record` and, `with_settings`, those of Settings that `only` ("eval" or
    "train") names. If there are `methods`, the positional argument `method` must be one of them.
    """
    parser = FlagParser(command, description=record.__doc__)
    if methods:
        parser.add_argument("method", choices=methods)
    add_flags(parser, record, only)
    if with_settings:
        add_flags(parser, Settings, only)
    given = vars(parser.parse_args(arguments))
    names = given.keys() & {f.name for f in fields(record)}
    options = record(**{name: given.pop(name) for name in names})
    for f in fields(record):
        if f.metadata.get("needed") and not getattr(options, f.name):
            parser.error(f"--{f.name} is missing")
    check_limits(options)
    return options, given


def given_flags(arguments: list[str] | None) -> dict:
    """Parses train.py's command line. Returns the flags that were given; `stage` is a list."""
    parser = FlagParser(
        "train.py",
        description="Trains stages of a paper; --stage may list several.",
        epilog="example: python train.py --recipe r_search --steps 20 --run_name mine",
        conflict_handler="resolve",
    )
    add_flags(parser, Settings, "train")
    parser.add_argument("--stage", type=numbers, default=[1], help="stages to train, as 1,2")
    return vars(parser.parse_args(arguments))


def parse_stages(arguments: list[str] | None = None) -> list[Settings]:
    """Returns the settings of each stage that train.py's command line names, in order."""
    given = given_flags(arguments)
    runs = []
    for stage in given.pop("stage"):
        runs.append(stage_settings(stage, given, *runs[-1:]))
    if len(runs) > 1 and (runs[0].resume or runs[0].dry_run):
        raise InputError("--stage: --resume and --dry_run take one stage: give one")
    return runs


def parse(arguments: list[str] | None = None) -> Settings:
    """Returns the settings of the last stage that train.py's command line names."""
    return parse_stages(arguments)[-1]


def stage_settings(stage: int, given: dict, before: Settings | None = None) -> Settings:
    """Returns the settings of a stage. `before` has the settings of the stage before, if the same
    command trains it; without it, stage 2 continues from --model, or else from the last checkpoint
    of a stage 1 that was trained earlier. With --resume a setting that is not given is the run's.
    """
    recipe = given.get("recipe", "ur2")
    settings = resolve(recipe, stage, True, given)
    if settings.resume and (saved := saved_settings(str(stage_folder(settings)))):
        return check_settings(resumed_settings(saved, settings, given))
    folder = stage_folder(settings, stage - 1)
    if stage > 1 and not (before or settings.model):
        if not (settings.resume or checkpoints(folder)):
            raise InputError(
                f"--stage {stage}: there is no checkpoint of the stage before in {folder}: train "
                "both with --stage 1,2, or give --model"
            )
        before = saved_settings(str(folder))
    if before and before.model:
        given = given | {"model": str(folder)}  # its last checkpoint is loaded
    return check_settings(resolve(recipe, stage, in_built_in_world(before or settings), given))


def resumed_settings(saved: Settings, settings: Settings, given: dict) -> Settings:
    """Returns a run's saved settings with what is given now, and with what a given flag implies:
    --algorithm dapo, for example, another clip_high. The run's folder may have moved.
    """
    known, world = {"recipe": saved.recipe, "variant": saved.variant}, in_built_in_world(saved)
    usual = vars(resolve(saved.recipe, saved.stage, world, known))
    chosen = vars(resolve(saved.recipe, saved.stage, world, known | given))
    changes = {name: value for name, value in chosen.items() if value != usual[name]} | given
    changes |= {"output_dir": settings.output_dir, "run_name": settings.run_name}
    if given.get("reward", saved.reward) == saved.reward:
        changes["reward_args"] = saved.reward_args | given.get("reward_args", {})
    else:
        changes["reward_args"] = chosen["reward_args"]
    return replace(saved, **changes)


# ---------------------------------------------------------------------------------- saved settings
def stage_folder(settings: Settings, stage: int | None = None) -> Path:
    """Returns OUTPUT_DIR/NAME/stageN. The default NAME is made of the recipe, its variant, the data
    (or the seed of the built-in world) and the seed.
    """
    data = Path(settings.data.split(",")[0]).stem or f"world{settings.world_seed}"
    recipe = "-".join(filter(None, [settings.recipe, settings.variant]))
    name = settings.run_name or f"{recipe}-{data}-seed{settings.seed}"
    return Path(settings.output_dir) / name / f"stage{stage or settings.stage}"


def checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints, oldest first. Names of incomplete ones end in .partial."""
    return sorted(path for path in folder.glob("checkpoint-" + 6 * "[0-9]") if path.is_dir())


def saved_settings(model: str) -> Settings | None:
    """Returns the settings saved in a checkpoint's or a stage's folder; None for other models."""
    path = Path(model, "settings.json")
    if not model or not path.exists():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    # A run of an older version may have saved settings that no longer exist.
    return Settings(**{name: saved[name] for name in saved.keys() & vars(DEFAULTS).keys()})


def in_built_in_world(settings: Settings) -> bool:
    """Returns True if there is no --data and the model knows the built-in world: it is the built-in
    one, or was trained from it without --data.
    """
    if settings.data:
        return False
    if not settings.model:
        return True
    saved = saved_settings(settings.model)
    return bool(saved and saved != settings and in_built_in_world(saved))


def shown_settings(settings: Settings) -> str:
    """Returns a line for the console: recipe, stage, and settings that differ from the defaults."""
    usual = vars(DEFAULTS) | {"recipe": None, "stage": None}
    shown = [f"{name}={value}" for name, value in vars(settings).items() if value != usual[name]]
    return " ".join(["settings:", *shown])
