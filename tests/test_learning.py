"""The built-in world is learned: warm-up, stage 1 and stage 2 as `make train` runs them, on a world
of its own.

Bounds are those of the project's figures, held on 40 questions a kind: looser where sampling noise
needs it.
"""

import pytest

import eval as evaluation
import train
from plumbing.report import summarise
from recipes import build_search, load_model


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    """(stage, temperature) -> kind -> column -> mean, on held-out entities."""
    runs = tmp_path_factory.mktemp("runs")
    common = ["--runs", str(runs), "--name", "learned", "--world_seed", "7", "--seed", "7"]
    table = {}
    for stage in (0, 1, 2):
        if stage:
            train.main(["--stage", str(stage), *common])
        for temperature in (0.0, 1.0):
            table[stage, temperature] = measure(stage, runs, temperature)
    return table


def measure(stage, runs, temperature):
    given = {
        "stage": stage,
        "name": "learned",
        "runs": str(runs),
        "world_seed": 7,
        "seed": 7,
        "temperature": temperature,
    }
    recipe = evaluation.recipe_of(given)
    datasets, documents = evaluation.material(
        recipe, {"questions": 40, "split": "dev", "fact_seed": None}
    )
    questions = evaluation.flat(datasets)
    policy, tokenizer = load_model(recipe, recipe.model)
    records = evaluation.evaluate(
        policy, tokenizer, questions, build_search(recipe, documents), recipe, quiet=True
    )
    return {
        kind: {c: row[c][0] for c in evaluation.COLUMNS} for kind, row in summarise(records).items()
    }


@pytest.mark.slow
def test_the_warm_model_can_neither_answer_nor_does_it_search(scores):
    for kind in ("one_hop", "two_hop"):
        assert scores[0, 1.0][kind]["em"] <= 0.2
    assert (
        scores[0, 1.0]["one_hop"]["searched"] + scores[0, 1.0]["two_hop"]["searched"]
    ) / 2 <= 0.3
    assert scores[0, 0.0]["arithmetic"]["em"] >= 0.9  # but it can add


@pytest.mark.slow
def test_stage_1_teaches_to_search_and_overdoes_it(scores):
    for kind in ("one_hop", "two_hop"):
        assert scores[1, 1.0][kind]["searched"] >= 0.9
    # the over-searching that stage 2 cures; before RL it is 0.02 on average
    assert scores[1, 1.0]["arithmetic"]["searched"] >= 0.25


@pytest.mark.slow
def test_stage_2_teaches_to_answer_and_to_leave_useless_searches(scores):
    assert scores[2, 0.0]["one_hop"]["em"] >= 0.9 and scores[2, 0.0]["two_hop"]["em"] >= 0.85
    assert scores[2, 1.0]["one_hop"]["em"] > scores[1, 1.0]["one_hop"]["em"]
    assert (
        scores[2, 1.0]["arithmetic"]["searches"] <= 0.05
        and scores[2, 1.0]["arithmetic"]["em"] >= 0.75
    )
    assert (
        abs(scores[2, 0.0]["one_hop"]["searches"] - 1) < 0.2
        and abs(scores[2, 0.0]["two_hop"]["searches"] - 2) < 0.3
    )
