"""Tests all combinations of recipes, variants, stages and algorithms: each takes two steps with a
tiny model on the built-in world, or is a one-line error with the reason.
"""

import math
from itertools import cycle, product

import pytest
import torch
from conftest import model_of, rows_of, traces

import train
from errors import InputError
from flags import given_flags, resolve, stage_settings
from papers import PAPERS, PROTOCOLS, paper_of, record_of
from policy import Policy, save_policy
from settings import Settings
from sft import SFTSettings, train_sft
from update import ALGORITHMS
from world.toy import NOTE, READER, make_tokenizer, shape
from world.world import World

STAGES = [  # (recipe, variant, stage) of every recipe
    (recipe, variant, stage)
    for recipe, paper in PAPERS.items()
    for variant in ("", *paper.variants)
    for stage in record_of(recipe, variant).stages
]
FIRST_STAGES = [next(case for case in STAGES if case[0] == recipe) for recipe in PAPERS]
FEW = "--steps 2 --questions_per_step 2 --group_size 2 --trajectories_per_update 4 --save_every 9"


def settings_of(recipe: str, variant: str, stage: int) -> Settings:
    return resolve(recipe, stage, True, {"variant": variant})


# --------------------------------------------------------------- two steps on the built-in world
@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Returns a folder of runs with a tiny warm-up model for each protocol and for the reader."""
    runs, tokenizer = tmp_path_factory.mktemp("product"), make_tokenizer(*PROTOCOLS.values())
    questions = World(0).questions("train", "one_hop")[:6]
    sizes = shape(len(tokenizer), 32, 4, 64) | {"max_position_embeddings": 2048}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name in ("reader", *PROTOCOLS):
            policy, protocol = Policy(model_of("qwen2", **sizes)), PROTOCOLS.get(name)
            if protocol and protocol.query_tags:
                examples = traces(tokenizer, questions, protocol)
                train_sft(policy, lambda step, batch=examples: batch, SFTSettings(30, 2e-2))
            note = paper_of(name).world if protocol else READER
            folder = runs / "toy" / f"{name}-world0"
            save_policy(policy, tokenizer, folder)
            (folder / NOTE).write_text(f"{note}\n", encoding="utf-8")
    return runs


# Every stage with every algorithm; of stages that differ only in names and steps the first one.
PRODUCT = {}
for case, algorithm in product(STAGES, ALGORITHMS):
    record = vars(settings_of(*case)) | dict.fromkeys(("recipe", "variant", "stage", "steps"))
    PRODUCT.setdefault((algorithm, str(record)), (*case, algorithm))
# `make test` takes each recipe once, with the algorithms in turn, so that every one occurs.
QUICK = [
    (*case, algorithm) for case, algorithm in zip(FIRST_STAGES, cycle(ALGORITHMS), strict=False)
]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in PRODUCT.values()
]


@pytest.mark.parametrize("recipe, variant, stage, algorithm", CASES)
def test_every_stage_runs_with_every_algorithm_or_is_a_one_line_error(
    recipe, variant, stage, algorithm, world, tmp_path
):
    (tmp_path / "toy").symlink_to(world / "toy")
    settings = settings_of(recipe, variant, stage)
    words = f"--recipe {recipe} --stage {stage} --run_name t {FEW} --algorithm {algorithm}"
    words += f" --max_turn_tokens 12 --mix= --output_dir {tmp_path}"
    words += f" --variant {variant}" * bool(variant)
    if settings.judge:  # a small model instead of the paper's server
        words += f" --judge {world}/toy/reader-world0"
    given = given_flags(words.split())
    # A stage 2 of the built-in world gets its settings as in `--stage 1,2` and starts from the
    # warm-up's model.
    before = None if stage == 1 else settings_of(recipe, variant, 1)
    try:
        folder = train.train(stage_settings(given.pop("stage")[0], given, before))
    except InputError as error:
        line = str(error)
        assert "--" in line and "\n" not in line and len(line) < 400
        # with its own algorithm only if the world's questions lack a field
        assert algorithm != settings.algorithm or line.startswith("question ")
        return
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [0, 1]
    numbers = [value for row in rows for value in row.values() if isinstance(value, (int, float))]
    assert all(map(math.isfinite, numbers))
    if settings.max_searches and settings.retrieval:
        assert sum(row["searches"] for row in rows)
