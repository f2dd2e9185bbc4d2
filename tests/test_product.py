"""Tests all combinations of recipes, variants, stages and algorithms: each takes two steps with a
tiny model, on the built-in world and on real records, or is a one-line error with the reason.
"""

import math
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from conftest import model_of, random_policy, rows_of, small, traces, train_bpe
from transformers import Qwen2Config

import train
from convert import convert
from errors import InputError
from flags import given_flags, resolve, stage_settings
from formats.records import write_records
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


def settings_of(case: tuple, tiny: bool) -> Settings:
    recipe, variant, stage = case
    return resolve(recipe, stage, tiny, {"variant": variant})


def two_steps(case: tuple, more: str, capsys) -> list[dict] | str:
    """Returns the metrics of a run of two steps, or the one-line error, which must name a flag."""
    recipe, variant, stage = case
    arguments = f"--recipe {recipe} --stage {stage} --run_name t {FEW} {more}".split()
    # A stage 2 of the built-in world gets its settings as in `--stage 1,2` and starts from the
    # warm-up's model.
    before = None if stage == 1 or "--model" in more else settings_of((recipe, variant, 1), True)
    try:
        variants = ["--variant", variant] if variant else []
        _, given = given_flags([*arguments, *variants])
        folder = train.train(stage_settings(stage, given, before))
    except InputError as error:
        message = str(error)
        assert "--" in message and "\n" not in message and len(message) < 400, message
        return message
    rows = rows_of(folder)
    capsys.readouterr()
    assert [row["step"] for row in rows] == [0, 1]
    numbers = [value for row in rows for value in row.values() if isinstance(value, (int, float))]
    assert all(map(math.isfinite, numbers))
    return rows


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
    record = vars(settings_of(case, True)) | dict.fromkeys(("recipe", "variant", "stage", "steps"))
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
    recipe, variant, stage, algorithm, world, tmp_path, capsys
):
    (tmp_path / "toy").symlink_to(world / "toy")
    settings = settings_of((recipe, variant, stage), True)
    more = f"--algorithm {algorithm} --max_turn_tokens 12 --mix= --output_dir {tmp_path}"
    if settings.judge:  # a small model instead of the paper's server
        more += f" --judge {world}/toy/reader-world0"
    result = two_steps((recipe, variant, stage), more, capsys)
    if isinstance(result, str):  # with its own algorithm only if the world's questions lack a field
        assert algorithm != settings.algorithm or result.startswith("question "), result
    elif settings.max_searches and settings.retrieval:
        assert sum(row["searches"] for row in result)


# ---------------------------------------------------------------------- two steps on real records
DATA = Path(__file__).parents[2] / "shared" / "data"
PAGES = "corpus/hipporag_2wiki_1200.jsonl"
REAL = {  # recipe -> kind=questions, corpus and flags; other recipes use the first entry
    "": "hotpotqa=hotpotqa/official_train_distractor_20.json from-data",
    "ur2": f"ur2=train/ur2_stage1_150.jsonl,ur2=train/ur2_stage2_150.jsonl {PAGES} --difficulty"
    " level --questions_per_step 24 --trajectories_per_update 48",  # one question of each bucket
    "ur2_choice": f"medqa=mcq/medqa_5options_50.jsonl,mmlu_pro=mcq/mmlupro_80.jsonl {PAGES}",
    "vanilla_rl": f"math=math/math500_60.jsonl,ur2=qa_eval/2wiki_500.jsonl {PAGES}",
    "r1_searcher": f"r1_searcher=train/r1_searcher_stage1_80.jsonl {PAGES}",
    "r_search": f"ur2=qa_eval/2wiki_500.jsonl {PAGES}",
    "search_r1": "=qa_eval/flashrag_nq_16.jsonl corpus/flashrag_wiki_sample_500.jsonl",
}


@pytest.fixture(scope="module")
def real_model(tmp_path_factory) -> str:
    """Returns a random Qwen2 of two layers whose context holds ten paragraphs of real text."""
    first = DATA / REAL[""].split()[0].partition("=")[2]
    if not first.exists():
        pytest.skip(f"the real slices are not in {DATA}")
    path = tmp_path_factory.mktemp("real") / "model"
    tokenizer = train_bpe([first.read_text()], 8000)
    sizes = small(max_position_embeddings=32768, vocab_size=len(tokenizer))
    save_policy(random_policy(Qwen2Config(**sizes), seed=0), tokenizer, path)
    return str(path)


@pytest.mark.parametrize("recipe, variant, stage", FIRST_STAGES)
def test_the_first_stage_of_each_recipe_takes_two_steps_on_real_records(
    recipe, variant, stage, real_model, tmp_path, capsys
):
    questions, corpus, *rest = REAL.get(recipe, REAL[""]).split()
    files = []
    for kind, name in (item.split("=") for item in questions.split(",")):
        files.append(DATA / name)
        if kind:
            files[-1] = tmp_path / f"{Path(name).stem}.jsonl"
            write_records(files[-1], convert(kind, DATA / name))
    more = f"--model {real_model} --max_turn_tokens 6 --output_dir {tmp_path} {' '.join(rest)}"
    more += f" --data {','.join(map(str, files))}"
    if recipe != "arena":
        more += f" --corpus {corpus if corpus == 'from-data' else DATA / corpus}"
    if recipe == "r_search":
        more += f" --reader {real_model}"
    result = two_steps((recipe, variant, stage), more, capsys)
    assert not isinstance(result, str), result
