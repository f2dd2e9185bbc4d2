"""Tests which of the papers' claims hold in the built-in world; lab/claims.py lists the runs.

    python -m lab.ablate               two worlds, all claims: an hour or two on two cores
    python -m lab.ablate --only mask,penalty --worlds 5

An arm is one training run (lab/claims.py). It is evaluated on all questions of the split test:
about held-out entities and units, and about sums and known facts; the last two are asked in
training too. Each question is answered twice, at the temperature of training. Each arm writes its
result and its settings to a result.json in each world; an arm that has one is not run again, so a
repeated command goes on. After changing a warm-up give another --output_dir. Left out: several
arms at a time.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from errors import InputError, run_main
from eval import Options, predict
from flags import check_settings, resolve, stage_folder
from formats.records import finished_records
from lab import names_in, parse_flags
from lab.claims import ARMS, CLAIMS, NUMBERS, Claim, interval, measure, verdict
from papers import paper_of
from plumbing.files import checkpoints
from plumbing.report import format_table
from settings import Settings, setting
from train import train

SAMPLES = 2  # answers to each question of the evaluation
HEAD = "claim; place; with; without; number; with; without; effect; worlds; verdict"


@dataclass(frozen=True)
class AblateSettings:
    """Test the papers' claims in the built-in world."""

    worlds: int = setting(2, "worlds per claim", least=1)
    first_world: int = setting(50, "number of the first world; settings were not tuned on 50 to 57")
    only: str = setting("", f"claims to test, comma-separated; default: all of {', '.join(CLAIMS)}")
    output_dir: str = setting("runs/ablate", "folder for the runs")


def settings_of(name: str, world: int, runs: str) -> Settings:
    """Returns an arm's settings in a world, whose number also seeds questions and sampling."""
    arm = ARMS[name]
    given = {
        "output_dir": runs,
        "run_name": f"{name}-world{world}",
        "seed": world,
        "world_seed": world,
        "save_every": 10_000,  # no checkpoint is due before the last step
        "keep_checkpoints": 1,
    }
    return check_settings(resolve(arm.recipe, arm.stage, True, given | arm.changes))


def result_of(name: str, world: int, runs: str) -> dict:
    """Returns {settings, eval, curve} of an arm; trains and evaluates it if that was not done. The
    curve has the records of its steps.
    """
    settings = settings_of(name, world, runs)
    path = stage_folder(settings).with_name("result.json")
    if path.exists():
        result = json.loads(path.read_text())
        if result["settings"] != vars(settings):
            raise InputError(f"{path} has other settings: remove it, or give another --output_dir")
        return result
    model = ""
    if start := ARMS[name].start:
        result_of(start, world, runs)
        model = last_checkpoint(settings_of(start, world, runs))
    else:
        check_before_rl(settings)
    folder = train(replace(settings, model=model))
    curve = finished_records(folder / "metrics.jsonl")
    for step in curve:
        if not step.get("searches"):  # without a search there is no rate of fallbacks
            step.pop("fallbacks", None)
    trained = evaluate(replace(settings, model=last_checkpoint(settings)))
    result = {"settings": vars(settings), "curve": curve, "eval": trained}
    path.write_text(json.dumps(result))
    return result


def last_checkpoint(settings: Settings) -> str:
    return str(checkpoints(stage_folder(settings))[-1])


def check_before_rl(settings: Settings) -> None:
    """Raises an InputError if the warmed-up model searches so often that RL has nothing to teach:
    more than `prior` of its warm-up (world/tiny.py).
    """
    prior = paper_of(settings.protocol).warmed_up(settings.toy_init).prior
    if prior == 1:
        return
    searches = measure(NUMBERS["MORE"], {"eval": evaluate(settings)})
    if searches > prior:
        raise InputError(
            f"toy_init {settings.toy_init}: {searches:.3f} searches per look-up question before"
            f" RL, more than {prior}: leave world {settings.world_seed} out"
        )


def evaluate(settings: Settings) -> dict:
    """Returns {metric or "metric/kind of question": mean} over all questions of the split test."""
    columns = defaultdict(list)
    for record in predict(settings, Options(questions=0, samples=SAMPLES)):
        metrics = record["metrics"] | {"words": len((record["prediction"] or "").split())}
        for name, value in metrics.items():
            if value is not None:
                columns[name].append(value)
                columns[f"{name}/{record['kind']}"].append(value)
    return {name: float(np.mean(values)) for name, values in columns.items()}


def row_of(claim: Claim, worlds: range, runs: str) -> list[str]:
    """Returns the claim's row of the table, with means over worlds."""
    number, arms = claim.number, (claim.better, claim.worse)
    pairs = [[measure(number, result_of(arm, w, runs)) for arm in arms] for w in worlds]
    differences = [one - other for one, other in pairs]
    sure = 90 if claim.margin else 95
    effect = "{:+.2f} [{:+.2f}, {:+.2f}] ({} %)".format(*interval(differences, sure), sure)
    means = [f"{mean:.2f}" for mean in np.mean(pairs, axis=0)]
    end = [effect, str(len(pairs)), verdict(claim, differences)]
    return [claim.says, claim.place, *arms, number.name, *means, *end]


def main(arguments: list[str] | None = None) -> None:
    options, _ = parse_flags("lab.ablate", AblateSettings, arguments)
    worlds = range(options.first_world, options.first_world + options.worlds)
    names = names_in("only", options.only, CLAIMS)
    rows = [row_of(CLAIMS[name], worlds, options.output_dir) for name in names]
    print(format_table([HEAD.split("; "), *rows]))


if __name__ == "__main__":
    run_main(main)
