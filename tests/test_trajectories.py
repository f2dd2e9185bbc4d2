"""trajectories.jsonl.gz, the page of view.py and a group in the terminal."""

import gzip
import json
import shutil
import subprocess
from types import SimpleNamespace

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
from plumbing.page import VIEWER, line_on, of_step
from plumbing.record import kept_groups, row_numbers, step_records, token_numbers
from policy import collate
from prompts import PROTOCOLS
from trajectory import Search, Trajectory

CLIP = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "kl_estimator": "k2"}


def one(**more) -> dict:
    """A record of two sampled tokens with one of the environment between them."""
    record = {
        "step": 0, "group": 0, "row": 0, "id": "q", "question": "who ?", "golds": ["Ana"],
        "kind": "one_hop", "may_search": True, "prompt_ids": [7], "prompt": ["who ?"],
        "ids": [1, 2, 3], "tokens": [" a", " b", " c"], "mask": [1, 0, 1], "writers": ["documents"],
        "searches": [], "rejected_queries": [],
        "answer": "Ana", "stop_reason": "eos", "correct": True,
        "rewards": {"answer": 1.0, "format": 0.5}, "sampled": [-0.6, 0.0, -1.0],
        "old": [-0.6, 0.0, -1.0], "new": [-0.5, 0.0, -1.3], "advantages": 2.0, "weights": 0.01,
    }  # fmt: skip
    return record | more


# ---------------------------------------------------------------------------------------- the file
def test_steps_are_appended_and_a_killed_run_leaves_what_was_whole(tmp_path):
    append_trajectories(tmp_path, [one(), one(row=1)])
    append_trajectories(tmp_path, [one(step=1)])
    append_trajectories(tmp_path, [])
    whole = [(r["step"], r["row"]) for r in read_trajectories(tmp_path)]
    assert whole == [(0, 0), (0, 1), (1, 0)]
    path = tmp_path / NAME
    data = path.read_bytes()
    for lost in (1, 9, 30, 60):
        path.write_bytes(data[:-lost])
        some = read_trajectories(tmp_path, pytest.fail)  # nothing is said of it
        assert [(r["step"], r["row"]) for r in some] == whole[:2]
    cut_trajectories(tmp_path, 1)
    assert {r["step"] for r in read_trajectories(tmp_path)} == {0}
    assert [*tmp_path.iterdir()] == [path]
    append_trajectories(tmp_path, [one(step=1)])  # a resumed run makes it again
    assert [r["step"] for r in read_trajectories(tmp_path)] == [0, 0, 1]


def test_no_file_and_a_broken_line_are_one_line_each(tmp_path):
    said, lost = message(lambda: list(read_trajectories(tmp_path))), []
    assert f"no {NAME} there: --groups_kept keeps some" in said
    with gzip.open(tmp_path / NAME, "wt") as file:
        file.write('{"step": 0}\n{"step": \n{"step": 2}\n')
    assert [r["step"] for r in read_trajectories(tmp_path, lost.append)] == [0, 2]
    assert lost == [f"{tmp_path / NAME}: damaged steps or lines that are left out: 1"]


def test_half_a_character_and_line_separators_do_not_break_a_line(tmp_path):
    append_trajectories(tmp_path, [one(question="a\ud83d b\u2028c\nd")])
    (record,) = read_trajectories(tmp_path)
    assert record["question"] == "a? b\u2028c\nd"


@pytest.mark.parametrize(
    "count, keep, step, groups",
    [(6, 2, 0, [0, 3]), (6, 2, 1, [1, 4]), (6, 2, 5, [2, 5]), (3, 4, 0, [0, 1, 2]), (6, 0, 0, [])],
)
def test_groups_are_spread_and_others_in_every_step(count, keep, step, groups):
    assert kept_groups(count, keep, step) == groups
    assert kept_groups(count, -1, step) == list(range(count))


# ------------------------------------------------------------------------------------- its numbers
def test_the_numbers_of_a_row_are_those_of_its_tokens():
    t = Trajectory(Question("q", "?", ["!"]), None, prompt_ids=[5, 6, 7])
    t.append_model([1, 2], [-0.1, -0.2], "a")
    t.append_environment([3], "b", "documents")
    t.append_model([4], [-0.4], "c")
    other = Trajectory(t.question, None, prompt_ids=[5])
    other.append_model([1] * 9, [-1.0] * 9, "d")
    batch = collate([other, t], [0.0, 1.0], 2)  # [2, 9 columns]: of t they begin at 2
    batch.advantages = torch.arange(18.0).reshape(2, 9)
    batch.token_weights = torch.full((2, 9), 0.25)
    found = row_numbers(token_numbers(batch), 1, t)
    assert found["sampled"] == found["old"] == pytest.approx([-0.1, -0.2, 0.0, -0.4])
    assert found["advantages"] == [11.0, 12.0, 13.0, 14.0]  # row 1 begins at 9; 9 + 2 = 11
    assert found["weights"] == 0.25  # one number for all that were sampled
    assert "ref" not in found and "new" not in found


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """Two steps of GRPO with a KL, two updates each, of which everything is kept."""
    more = "--steps 2 --groups_kept -1 --algorithm grpo --kl_coef 0.1 --kl_estimator k2 --lr 1e-2"
    more += " --trajectories_per_update 2"
    settings = settings_for(model, tmp_path_factory.mktemp("t"), more)
    return train.train(settings)


def settings_of(folder) -> dict:
    return json.loads((folder / "settings.json").read_text())


def test_the_losses_of_all_tokens_are_the_loss_that_was_logged(trained):
    records, settings = list(read_trajectories(trained)), settings_of(trained)
    updates = settings["questions_per_step"] * settings["group_size"]
    updates = -(-updates // (settings["trajectories_per_update"] or updates))
    for row in rows_of(trained):
        some = [r for r in records if r["step"] == row["step"]]
        tokens = [(r, n) for r in some for n, mask in enumerate(r["mask"]) if mask]
        its = [view.loss_of(r, n, settings) for r, n in tokens]
        assert sum(x["weight"] for x in its) == pytest.approx(updates, rel=1e-4)
        # metrics have the mean over updates
        assert sum(x["loss"] for x in its) / updates == pytest.approx(row["loss"], abs=2e-4)
        assert sum(sum(r["rewards"].values()) for r in some) / len(some) == pytest.approx(
            row["reward"], abs=1e-4
        )
        assert all(view.loss_of(r, n, settings) is None for r in some
                   for n, mask in enumerate(r["mask"]) if not mask)  # fmt: skip
    later = [r for r in records if r["step"] == 1]
    assert any(abs(a - b) > 1e-4 for r in later for a, b in zip(r["new"], r["ref"], strict=True))


def test_groups_that_teach_nothing_are_kept_without_numbers(model, tmp_path):
    more = "--steps 1 --algorithm dapo --groups_kept 1"  # all wrong: nothing is trained on
    records = list(read_trajectories(train.train(settings_for(model, tmp_path, more))))
    assert {r["group"] for r in records} == {0}
    assert not any("advantages" in r or r["correct"] for r in records)
    assert all(view.loss_of(r, 0, CLIP) is None for r in records)


# ---------------------------------------------------------------------------------- in the terminal
def test_the_loss_of_a_token_by_hand():
    # r = e^0.1 = 1.10517, within 1 ± 0.2; A = 2, w = 0.01
    assert view.loss_of(one(), 0, CLIP)["loss"] == pytest.approx(-0.0221034, rel=1e-5)
    # r = e^-0.3 = 0.74082 < 0.8: min(1.48, 1.6) is not clipped for A > 0, and is for A < 0
    assert view.loss_of(one(), 2, CLIP)["loss"] == pytest.approx(-0.0148164, rel=1e-5)
    assert view.loss_of(one(advantages=-2.0), 2, CLIP)["loss"] == pytest.approx(0.016)
    assert view.loss_of(one(), 1, CLIP) is None  # the environment's
    # r · k2 = 1.10517 gap² / 2 = 0.0221 of gap 0.2; k3 = e^0.2 − 0.2 − 1 = 0.0214
    held = CLIP | {"kl_coef": 0.5}
    record = one(ref=[-0.3, 0.0, -1.0])
    assert view.loss_of(record, 0, held)["loss"] == pytest.approx(
        0.01 * (0.0110517 - 2.21034), rel=1e-6
    )
    third = held | {"kl_estimator": "k3"}
    assert view.loss_of(record, 0, third)["loss"] == pytest.approx(
        0.01 * (0.0107 - 2.21034), rel=1e-4
    )


def test_a_group_in_the_terminal(trained, capsys):
    view.main([str(trained.parent), "--text", "--step", "1", "--group", "1"])
    out = capsys.readouterr().out
    assert out.startswith("stage1, step 1, group 1: ") and out.count("\nsample ") == 2
    assert "that the environment wrote" in out or "mask" in out
    for flags, said in (
        (["--group", "9"], "groups are kept there, and not --group 9"),
        (["--step", "7"], "no step 7 is kept there"),
    ):
        assert said in message(view.main, [str(trained), "--text", *flags])


def test_what_cannot_be_shown_is_one_line(trained, tmp_path):
    assert "no metrics.jsonl there" in message(view.main, [str(tmp_path)])
    both = [str(trained), str(trained), "--text"]
    assert "show one run" in message(view.main, both)
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "x")
    assert "cannot be written there" in message(view.main, [str(trained), "--out", out])


# ----------------------------------------------------------------------------------------- the page
def test_the_page_has_its_runs_and_a_script_per_step(trained, tmp_path):
    view.main([str(trained.parent), str(trained), "--out", str(tmp_path)])
    assert {f.name for f in VIEWER.iterdir()} <= {f.name for f in tmp_path.iterdir()}

    def given(name: str, call: str) -> list:
        """What the script of this name gives to this function of the page."""
        text = (tmp_path / "data" / name).read_text().removeprefix(f"{call}(")
        return json.loads(f"[{text.removesuffix(chr(10)).removesuffix(');')}]")

    runs, _ = given("index.js", "runs")
    assert [run["name"] for run in runs] == [trained.parent.name, "stage1"]
    stage = runs[0]["stages"][0]
    assert stage["steps"] == [0, 1] and len(stage["metrics"]) == 2
    # no trajectory: a large run opens at once
    names = "key name settings about metrics steps missing asked"
    assert stage.keys() == set(names.split())
    settings = settings_of(trained)
    assert stage["settings"] == {name: settings[name] for name in CLIP}
    key, rows, groups = given(f"{stage['key']}-1.js", "step")
    records = [record for group in groups for record in json.loads(group)]
    assert key == f"{stage['key']}-1" and len(rows) == len(records) == 4
    kept = [r for r in read_trajectories(trained) if r["step"] == 1]
    for record, its in zip(records, kept, strict=True):
        left_out = {"prompt_ids", *(["old"] if its["old"] == its["sampled"] else [])}
        assert its.keys() - record.keys() == left_out
        assert record["prompt"] == "".join(its["prompt"])
        assert all(record[name] == its[name] for name in record if name != "prompt")


def test_text_cannot_end_the_script_that_it_stands_in():
    rows, groups = of_step([one(question="</script><b>\u2028", tokens=["<!--", "]]>", "\u2029"])])
    assert rows[0]["question"].startswith("</script>")
    assert "<" not in groups[0] and "\u2029" not in groups[0]


def test_what_the_filters_ask_of_a_trajectory():
    search, names = (
        {"query": "Ana  Bell", "fallback": True, "documents": []},
        "fallback repeated fault",
    )
    again = search | {"query": "ana bell", "fallback": False}
    line = line_on(one(searches=[search, again], rewards={"format": -1.0}, correct=False))
    assert [line[name] for name in ("searches", *names.split())] == [2, True, True, True]
    line = line_on(one())
    assert [line[name] for name in ("searches", *names.split())] == [0, False, False, False]
    assert line["reward"] == 1.5 and line["trained"]


def run_page(code: str):
    """Returns what an expression of page.js is worth, computed by node."""
    page = (VIEWER / "page.js").read_text().replace('"use strict";', "")
    text = f"globalThis.document = {{getElementById: () => ({{}})}};{page}"
    words = ["node", "-e", f"{text}console.log(JSON.stringify({code}));"]
    how = {"capture_output": True, "text": True, "check": True, "timeout": 60}
    return json.loads(subprocess.run(words, **how).stdout)


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's code")


@needs_node
def test_the_page_computes_the_numbers_of_the_terminal(trained):
    records, settings = list(read_trajectories(trained))[:6], settings_of(trained)
    losses = f"r.ids.map((_, n) => lossOf(r, n, {json.dumps(settings)}))"
    told = run_page(f"{json.dumps(records)}.map((r) => {losses})")
    for record, its in zip(records, told, strict=True):
        for n, other in enumerate(its):
            ours = view.loss_of(record, n, settings)
            assert (ours is None) == (other is None)
            if ours:
                assert other["loss"] == pytest.approx(ours["loss"], rel=1e-9)
                assert other["ratio"] == pytest.approx(ours["ratio"], rel=1e-9)


def test_a_trajectory_is_told_with_its_searches(toy_tokenizer):
    t = Trajectory(Question("q", "who ?", ["Ana"]), PROTOCOLS["r_search"], prompt_ids=[1])
    t.append_model([2], [-0.5], "x")
    t.searches.append(Search("who", [Document("1", "Ana", "Ana is")], "Ana is", seconds=0.25))
    rollouts = SimpleNamespace(trajectories=[t], reward_terms=[{"a": 1.0}], correct=[True], kept=[])
    settings = SimpleNamespace(group_size=1, groups_kept=4)
    (record,) = step_records(3, rollouts, None, toy_tokenizer, settings)
    (search,) = record["searches"]
    assert search["documents"] == [["Ana", "Ana is"]] and search["seconds"] == 0.25
    assert record["step"] == 3 and "advantages" not in record and len(record["tokens"]) == 1
