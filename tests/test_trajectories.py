"""Tests trajectories.jsonl.gz, the page of view.py and its output in the terminal."""

import gzip
import json
import shutil
import subprocess

import pytest
import torch
from conftest import message, rows_of, settings_for

import train
import view
from data import Document, Question
from formats.trajectories import (
    NAME,
    append_trajectories,
    cut_trajectories,
    read_trajectories,
)
from papers import PROTOCOLS
from plumbing.page import VIEWER, line_on, of_step
from plumbing.record import kept_groups, row_numbers, to_record, token_numbers
from policy import collate
from trajectory import Search, Trajectory

CLIP = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "kl_estimator": "k2"}


def one(**changes) -> dict:
    """Returns a record with two sampled tokens and one token of the environment between them."""
    record = {
        "step": 0, "group": 0, "row": 0, "id": "q", "question": "who ?", "golds": ["Ana"],
        "kind": "one_hop", "may_search": True, "prompt_ids": [7], "prompt": ["who ?"],
        "ids": [1, 2, 3], "tokens": [" a", " b", " c"], "mask": [1, 0, 1], "writers": ["documents"],
        "searches": [], "rejected_queries": [],
        "answer": "Ana", "stop_reason": "eos", "correct": True,
        "rewards": {"answer": 1.0, "format": 0.5}, "sampled": [-0.6, 0.0, -1.0],
        "old": [-0.6, 0.0, -1.0], "new": [-0.5, 0.0, -1.3], "advantages": 2.0, "weights": 0.01,
    }  # fmt: skip
    return record | changes


# ---------------------------------------------------------------------------------------- the file
def test_steps_are_appended_and_a_killed_run_leaves_the_complete_steps(tmp_path):
    append_trajectories(tmp_path, [one(), one(row=1)])
    append_trajectories(tmp_path, [one(step=1)])
    append_trajectories(tmp_path, [])
    rows = [(r["step"], r["row"]) for r in read_trajectories(tmp_path)]
    assert rows == [(0, 0), (0, 1), (1, 0)]
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-60])
    records = read_trajectories(tmp_path, pytest.fail)  # the cut line is not reported
    assert [(r["step"], r["row"]) for r in records] == rows[:2]
    cut_trajectories(tmp_path, 1)
    append_trajectories(tmp_path, [one(step=1)])  # a resumed run repeats it
    assert [r["step"] for r in read_trajectories(tmp_path)] == [0, 0, 1]
    assert [*tmp_path.iterdir()] == [path]


def test_a_missing_file_is_an_error_and_a_broken_line_is_reported(tmp_path):
    error_line, warnings = message(lambda: list(read_trajectories(tmp_path))), []
    assert f"no {NAME} there: name a stage's folder, or train with" in error_line
    with gzip.open(tmp_path / NAME, "wt") as file:
        file.write('{"step": 0}\n{"step": \n{"step": 2}\n')
    assert [r["step"] for r in read_trajectories(tmp_path, warnings.append)] == [0, 2]
    assert [line.rpartition(": ")[2] for line in warnings] == ["1"]


def test_half_a_character_and_line_separators_do_not_break_a_line(tmp_path):
    append_trajectories(tmp_path, [one(question="a\ud83d b\u2028c\nd")])
    (record,) = read_trajectories(tmp_path)
    assert record["question"] == "a? b\u2028c\nd"


@pytest.mark.parametrize(
    "count, keep, step, groups",
    [(6, 2, 0, [0, 3]), (6, 2, 1, [1, 4]), (6, 2, 5, [2, 5]), (3, 4, 0, [0, 1, 2]), (6, 0, 0, [])],
)
def test_the_kept_groups_are_spread_and_differ_from_step_to_step(count, keep, step, groups):
    assert kept_groups(count, keep, step) == groups
    assert kept_groups(count, -1, step) == list(range(count))


# -------------------------------------------------------------------- the numbers of a row's tokens
def test_the_numbers_of_a_row_are_those_of_its_tokens():
    t = Trajectory(Question("q", "?", ["!"]), None, prompt_ids=[5, 6, 7])
    t.append_model([1, 2], [-0.1, -0.2], "a")
    t.append_environment([3], "b", "documents")
    t.append_model([4], [-0.4], "c")
    other = Trajectory(t.question, None, prompt_ids=[5])
    other.append_model([1] * 9, [-1.0] * 9, "d")
    batch = collate([other, t], [0.0, 1.0], 2)  # 9 columns; the tokens of t begin at column 2
    batch.advantages = torch.arange(18.0).reshape(2, 9)
    batch.token_weights = torch.full((2, 9), 0.25)
    numbers = row_numbers(token_numbers(batch), 1, t)
    assert numbers["sampled"] == numbers["old"] == pytest.approx([-0.1, -0.2, 0.0, -0.4])
    assert numbers["advantages"] == [11.0, 12.0, 13.0, 14.0]  # row 1 begins at 9; 9 + 2 = 11
    assert numbers["weights"] == 0.25  # one number for all sampled tokens
    assert "ref" not in numbers and "new" not in numbers


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """Runs two steps of GRPO with a KL, two updates each, and keeps all groups."""
    flags = "--steps 2 --groups_kept -1 --algorithm grpo --kl_coef 0.1 --kl_estimator k2 --lr 1e-2"
    flags += " --trajectories_per_update 2"
    return train.train(settings_for(model, tmp_path_factory.mktemp("t"), flags))


def settings_of(folder) -> dict:
    return json.loads((folder / "settings.json").read_text())


def test_the_losses_of_all_tokens_add_up_to_the_logged_loss(trained):
    records, settings, updates = list(read_trajectories(trained)), settings_of(trained), 2
    for row in rows_of(trained):
        step = [r for r in records if r["step"] == row["step"]]
        losses = [view.loss_of(r, n, settings) for r in step for n in range(len(r["ids"]))]
        masks = [mask for r in step for mask in r["mask"]]
        assert [bool(mask) for mask in masks] == [loss is not None for loss in losses]
        sampled = [loss for loss in losses if loss]
        assert sum(x["weight"] for x in sampled) == pytest.approx(updates, rel=1e-4)
        # The metrics contain the mean over the updates.
        mean = sum(x["loss"] for x in sampled) / updates
        assert mean == pytest.approx(row["loss"], abs=2e-4)
        rewards = [sum(r["rewards"].values()) for r in step]
        assert sum(rewards) / len(rewards) == pytest.approx(row["reward"], abs=1e-4)
    assert any(r["new"] != pytest.approx(r["ref"], abs=1e-4) for r in records if r["step"] == 1)


def test_groups_that_are_not_trained_on_are_kept_without_token_numbers(model, tmp_path):
    flags = "--steps 1 --algorithm dapo --groups_kept 1"  # all wrong: not trained on
    records = list(read_trajectories(train.train(settings_for(model, tmp_path, flags))))
    assert {r["group"] for r in records} == {0}
    assert not any("advantages" in r or r["correct"] for r in records)
    assert all(view.loss_of(r, 0, CLIP) is None for r in records)


# --------------------------------------------------------------------------- output in the terminal
def test_the_loss_of_a_token_by_hand():
    # With r = e^0.1 = 1.10517 (within 1 ± 0.2), A = 2 and w = 0.01, the loss is −w · r · A.
    assert view.loss_of(one(), 0, CLIP)["loss"] == pytest.approx(-0.0221034, rel=1e-5)
    # r = e^-0.3 = 0.74082 is below 0.8. For A > 0, min(1.48, 1.6) is not clipped; for A < 0 it is.
    assert view.loss_of(one(), 2, CLIP)["loss"] == pytest.approx(-0.0148164, rel=1e-5)
    assert view.loss_of(one(advantages=-2.0), 2, CLIP)["loss"] == pytest.approx(0.016)
    assert view.loss_of(one(), 1, CLIP) is None  # a token of the environment
    # The log-probs are −0.5 and, of the reference, −0.3. r · k2 = 1.10517 · 0.2² / 2 = 0.0221, and
    # k3 = e^0.2 − 0.2 − 1 = 0.0214; kl_coef 0.5 halves both.
    with_k2 = CLIP | {"kl_coef": 0.5}
    record = one(ref=[-0.3, 0.0, -1.0])
    assert view.loss_of(record, 0, with_k2)["loss"] == pytest.approx(
        0.01 * (0.0110517 - 2.21034), rel=1e-6
    )
    with_k3 = with_k2 | {"kl_estimator": "k3"}
    assert view.loss_of(record, 0, with_k3)["loss"] == pytest.approx(
        0.01 * (0.0107 - 2.21034), rel=1e-4
    )
    for not_in_the_loss in ("k1", "log"):
        settings = with_k2 | {"kl_estimator": not_in_the_loss}
        assert view.loss_of(record, 0, settings) == view.loss_of(one(), 0, CLIP)


def test_a_group_in_the_terminal(trained, capsys):
    view.main([str(trained.parent), "--text", "--step", "1", "--group", "1"])
    out = capsys.readouterr().out
    assert out.startswith("stage1, step 1, group 1: ") and out.count("\nsample ") == 2


@pytest.mark.parametrize(
    "arguments, fragment",
    [
        ("{run} --text --group 9", "saved groups, which --group counts from 0: no --group 9"),
        ("{run} --text --step 7", "no step 7 is saved there"),
        ("{empty}", "no metrics.jsonl in it or in a stage"),
        ("{run} {run} --text", "show one run"),
        ("{run} --out {run}/metrics.jsonl/x", "cannot be written there"),
    ],
)
def test_a_wrong_command_is_an_error_of_one_line(arguments, fragment, trained, tmp_path):
    assert fragment in message(view.main, arguments.format(run=trained, empty=tmp_path).split())


# ----------------------------------------------------------------------------------------- the page
def test_the_page_has_its_runs_and_a_script_per_step(trained, tmp_path):
    view.main([str(trained.parent), str(trained), "--out", str(tmp_path)])
    assert {f.name for f in VIEWER.iterdir()} <= {f.name for f in tmp_path.iterdir()}

    def arguments_of(name: str, call: str) -> list:
        """Returns the arguments with which the script calls this function of the page."""
        text = (tmp_path / "data" / name).read_text().strip()
        return json.loads(f"[{text.removeprefix(f'{call}(').removesuffix(');')}]")

    runs, _ = arguments_of("index.js", "runs")
    assert [run["name"] for run in runs] == [trained.parent.name, "stage1"]
    stage = runs[0]["stages"][0]
    assert stage["steps"] == [0, 1] and len(stage["metrics"]) == 2
    settings = settings_of(trained)
    assert {*CLIP, "recipe", "questions_per_step"} < {*stage["settings"]} < {*settings}
    assert settings | stage["settings"] == settings
    key, rows, groups = arguments_of(f"{stage['key']}-1.js", "step")
    records = [record for group in groups for record in json.loads(group)]
    assert key == f"{stage['key']}-1" and len(rows) == len(records) == 4
    saved = [r for r in read_trajectories(trained) if r["step"] == 1]
    for record, expected in zip(records, saved, strict=True):
        assert expected.pop("prompt_ids")
        assert record == expected | {"prompt": "".join(expected["prompt"])}


def test_text_cannot_end_the_script_that_contains_it():
    rows, groups = of_step([one(question="</script><b>\u2028", tokens=["<!--", "]]>", "\u2029"])])
    assert rows[0]["question"].startswith("</script>")
    assert "<" not in groups[0] and "\u2029" not in groups[0]


def test_the_fields_that_the_pages_filters_use():
    search = {"query": "Ana  Bell", "fallback": True, "documents": []}
    repeated = search | {"query": "ana bell", "fallback": False}
    names = ("searches", "fallback", "repeated", "fault")
    line = line_on(one(searches=[search, repeated], rewards={"format": -1.0}, correct=False))
    assert [line[name] for name in names] == [2, True, True, True]
    line = line_on(one())
    assert [line[name] for name in names] == [0, False, False, False]
    assert line["reward"] == 1.5 and line["trained"]


def run_page(code: str):
    """Returns the value of an expression of page.js, computed by node."""
    page = (VIEWER / "page.js").read_text().replace('"use strict";', "")
    text = f"globalThis.document = {{getElementById: () => ({{}})}};{page}"
    command = ["node", "-e", f"{text}console.log(JSON.stringify({code}));"]
    options = {"capture_output": True, "text": True, "check": True, "timeout": 60}
    return json.loads(subprocess.run(command, **options).stdout)


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's code")


@needs_node
def test_the_page_computes_the_same_losses_as_the_terminal(trained):
    records, settings = list(read_trajectories(trained))[:6], settings_of(trained)
    losses = f"r.ids.map((_, n) => lossOf(r, n, {json.dumps(settings)}))"
    from_page = run_page(f"{json.dumps(records)}.map((r) => {losses})")
    for record, page_losses in zip(records, from_page, strict=True):
        for n, actual in enumerate(page_losses):
            expected = view.loss_of(record, n, settings)
            assert (expected is None) == (actual is None)
            if expected:
                assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-9)
                assert actual["ratio"] == pytest.approx(expected["ratio"], rel=1e-9)


def test_a_record_has_the_searches_of_its_trajectory(toy_tokenizer):
    t = Trajectory(Question("q", "who ?", ["Ana"]), PROTOCOLS["r_search"], prompt_ids=[1])
    t.append_model([2], [-0.5], "x")
    t.searches.append(Search("who", [Document("1", "Ana", "Ana is")], "Ana is", seconds=0.25))
    record = to_record(t, toy_tokenizer)
    (search,) = record["searches"]
    assert search["documents"] == [["Ana", "Ana is"]] and search["seconds"] == 0.25
    assert len(record["tokens"]) == 1
