"""Tests trajectories.jsonl.gz, and the data and the formula of view.py's page."""

import json
import math
import shutil
import subprocess

import pytest
import torch
from conftest import rows_of, settings_for

import train
import view
from data import Question
from formats.trajectories import (
    NAME,
    append_trajectories,
    cut_trajectories,
    read_trajectories,
)
from plumbing.record import kept_groups, token_numbers
from policy import collate
from trajectory import Trajectory

CLIP = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "kl_estimator": "k2"}


def one(**changes) -> dict:
    """Returns a record with two sampled tokens and one token of the environment between them."""
    record = {
        "step": 0, "group": 0, "row": 0, "id": "q", "question": "who ?", "golds": ["Ana"],
        "kind": "one_hop", "may_search": True, "prompt": "who ?",
        "ids": [1, 2, 3], "tokens": [" a", " b", " c"], "mask": [1, 0, 1], "writers": ["documents"],
        "searches": [], "rejected_queries": [],
        "answer": "Ana", "stop_reason": "eos", "correct": True,
        "rewards": {"answer": 1.0, "format": 0.5}, "sampled": [-0.6, 0.0, -1.0],
        "old": [-0.6, 0.0, -1.0], "new": [-0.5, 0.0, -1.3], "advantages": 2.0, "weights": 0.01,
    }  # fmt: skip
    return record | changes


# ---------------------------------------------------------------------------------------- the file
@pytest.mark.fault(11)
def test_steps_are_appended_and_a_killed_run_leaves_the_complete_steps(tmp_path):
    append_trajectories(tmp_path, [one(), one(row=1)])
    append_trajectories(tmp_path, [one(step=1)])
    rows = [(r["step"], r["row"]) for r in read_trajectories(tmp_path)]
    assert rows == [(0, 0), (0, 1), (1, 0)]
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-60])
    assert [(r["step"], r["row"]) for r in read_trajectories(tmp_path)] == rows[:2]
    cut_trajectories(tmp_path, 1)
    append_trajectories(tmp_path, [one(step=1)])  # a resumed run repeats it
    assert [r["step"] for r in read_trajectories(tmp_path)] == [0, 0, 1]
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    "count, keep, step, groups",
    [(6, 2, 0, [0, 3]), (6, 2, 5, [2, 5]), (3, 4, 0, [0, 1, 2])],
)
def test_the_kept_groups_are_spread_and_differ_from_step_to_step(count, keep, step, groups):
    assert kept_groups(count, keep, step) == groups
    assert kept_groups(count, -1, step) == list(range(count))


# -------------------------------------------------------------------- the numbers of a row's tokens
def test_the_numbers_of_a_row_are_those_of_its_tokens():
    t = Trajectory(Question("q", "?", ["!"]), None, prompt_ids=[5, 6, 7])
    t.append_model([1], [-0.1], "a")
    t.append_environment([3], "b", "documents")
    t.append_model([4], [-0.4], "c")
    batch = collate([t, t], [0.0, 1.0], 2)  # 5 columns; the tokens of t begin at column 2
    batch.advantages = torch.arange(10.0).reshape(2, 5)
    batch.token_weights = torch.full((2, 5), 0.25)
    numbers = token_numbers(batch, 1, t)
    assert numbers["sampled"] == numbers["old"] == pytest.approx([-0.1, 0.0, -0.4])
    assert numbers["advantages"] == [7.0, 8.0, 9.0]  # row 1 begins at 5; 5 + 2 = 7
    assert numbers["weights"] == 0.25  # one number for all sampled tokens
    assert "ref" not in numbers and "new" not in numbers


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """Runs two steps of GRPO with a KL, two updates each, and keeps all groups."""
    flags = "--steps 2 --algorithm grpo --kl_coef 0.1 --kl_estimator k2 --lr 1e-2"
    flags += " --trajectories_per_update 2"
    return train.train(settings_for(model, tmp_path_factory.mktemp("t"), flags))


def settings_of(folder) -> dict:
    return json.loads((folder / "settings.json").read_text())


def run_page(code: str):
    """Returns the value of an expression of page.js, computed by node."""
    page = (view.VIEWER / "page.js").read_text().replace('"use strict";', "")
    text = f"globalThis.document = {{getElementById: () => ({{}})}};{page}"
    command = ["node", "-e", f"{text}console.log(JSON.stringify({code}));"]
    options = {"capture_output": True, "text": True, "check": True, "timeout": 60}
    return json.loads(subprocess.run(command, **options).stdout)


def losses_of(records: list[dict], settings: dict) -> list:
    """Returns what the page computes for each token of each record; None if it has no loss."""
    losses = f"r.ids.map((_, n) => lossOf(r, n, {json.dumps(settings)}))"
    return [x for row in run_page(f"{json.dumps(records)}.map((r) => {losses})") for x in row]


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's code")


@needs_node
def test_the_losses_of_all_tokens_add_up_to_the_logged_loss(trained):
    records, settings, updates = list(read_trajectories(trained)), settings_of(trained), 2
    for row in rows_of(trained):
        step = [r for r in records if r["step"] == row["step"]]
        losses = losses_of(step, settings)
        masks = [mask for r in step for mask in r["mask"]]
        assert [bool(mask) for mask in masks] == [loss is not None for loss in losses]
        sampled = [loss for loss in losses if loss]
        assert sum(x["weight"] for x in sampled) == pytest.approx(updates, rel=1e-4)
        # The metrics contain the mean over the updates.
        mean = sum(x["loss"] for x in sampled) / updates
        assert mean == pytest.approx(row["loss"], abs=2e-4)


@needs_node
@pytest.mark.parametrize(
    "changes, settings, loss",
    [
        # Token 0: with r = e^0.1 = 1.10517 (within 1 ± 0.2), A = −2 and w = 0.01, −w · r · A. Token
        # 2: r = e^-0.3 = 0.74082 is below 0.8; for A < 0 it is clipped.
        ({"advantages": -2.0}, {}, [0.0221034, 0.016]),
        # The reference has −0.3 for token 0, which has −0.5: k3 = e^0.2 − 0.2 − 1 = 0.0214, which
        # kl_coef 0.5 halves. For token 2 both are equal. k2 is in test_page.py.
        (
            {"ref": [-0.3, 0, -1.3]},
            {"kl_coef": 0.5, "kl_estimator": "k3"},
            [0.01 * (0.0107014 - 2.21034), -0.0148164],
        ),
        # k1 is in the reward.
        ({"ref": -0.3}, {"kl_coef": 0.5, "kl_estimator": "k1"}, [-0.0221034, -0.0148164]),
    ],
)
def test_the_loss_of_a_token_by_hand(changes, settings, loss):
    first, of_environment, last = losses_of([one(**changes)], CLIP | settings)
    assert of_environment is None
    assert [first["loss"], last["loss"]] == pytest.approx(loss, rel=1e-5)


def test_groups_that_are_not_trained_on_are_kept_without_token_numbers(model, tmp_path):
    flags = "--steps 1 --algorithm dapo"  # all wrong: not trained on
    settings = settings_for(model, tmp_path, flags, groups_kept=1)
    records = list(read_trajectories(train.train(settings)))
    assert {r["group"] for r in records} == {0}
    assert not any("advantages" in r or r["correct"] for r in records)
    assert {r["format"] for r in records} <= {True, False}


# ----------------------------------------------------------------------------------------- the page
def test_the_page_has_its_run_and_a_script_per_step(trained, tmp_path):
    view.write_page(trained.parent, tmp_path)
    assert {f.name for f in view.VIEWER.iterdir()} <= {f.name for f in tmp_path.iterdir()}

    def arguments_of(name: str) -> list:
        """Returns the arguments with which the script calls a function of the page."""
        text = (tmp_path / "data" / name).read_text()
        return json.loads(f"[{text.partition('(')[2].rpartition(')')[0]}]")

    (run,) = arguments_of("index.js")
    assert run["name"] == trained.parent.name
    (stage,) = run["stages"]
    assert stage["steps"] == [0, 1] and len(stage["metrics"]) == 2
    assert settings_of(trained).items() >= {k: stage["settings"][k] for k in CLIP}.items()
    key, records = arguments_of("stage1-1.js")
    assert key == "stage1-1" and len(records) == 4
    assert records == [r for r in read_trajectories(trained) if r["step"] == 1]


@needs_node
def test_a_script_may_hold_any_text_and_numbers_that_json_lacks(tmp_path):
    (tmp_path / "data").mkdir()
    values = ["</script>\u2028", math.nan, -math.inf]
    view.write_script(tmp_path, "x", "((...values) => values.map(String))", *values)
    call = (tmp_path / "data" / "x.js").read_text("ascii").strip().removesuffix(";")
    assert run_page(call) == ["</script>\u2028", "NaN", "-Infinity"]
