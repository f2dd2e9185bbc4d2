"""Tests lab.bench: the variants do the same work, and the figures are those of the runs. No test
asserts a time.
"""

import pickle
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import message, random_policy, small
from processes import start_server
from transformers import Qwen2Config

from errors import InputError
from lab import bench
from lab.bench import AXES, PARTS, Bench, Scripted
from policy import Policy
from scale import packing

VOCAB = 60
TINY = Bench(vocab=VOCAB, questions_per_step=2, group_size=4, shorter=10, seed=1, algorithm="grpo")


@pytest.fixture
def policy() -> Policy:
    return random_policy(Qwen2Config(vocab_size=VOCAB, **small()), seed=3)


def masks_of(work, policy, o=TINY) -> list:
    """Runs `work`; returns the masks of eight short rows of two questions, with 0 to 3 searches."""
    environment = Scripted(o)
    work(policy, environment, environment.rows)
    return [row.response_mask for row in environment.rows]


def test_a_group_shares_its_prompt_and_documents_follow_every_turn_but_the_last():
    o = replace(TINY, shorter=1)
    rows, same_seed = (Scripted(o).rows for _ in range(2))
    assert [row.left for row in rows] == [row.left for row in same_seed]
    prompts = [row.prompt_ids for row in rows]
    assert prompts[0] == prompts[3] != prompts[4] == prompts[7] and len(rows) == 8
    for row in rows:
        document_sizes = [len(ids) for _, ids in row.left]
        assert (
            document_sizes.pop() == 0
            and len(document_sizes) <= 3
            and all(100 <= n <= 200 for n in document_sizes)
        )


def test_half_of_a_row_is_its_prompt_if_the_context_is_given():
    for context, half in ((640, 32), (16, 1)):
        environment = Scripted(replace(TINY, context=context))
        sizes = {
            (len(row.prompt_ids), environment.max_trajectory_tokens(row))
            for row in environment.rows
        }
        assert sizes == {(half, 2 * half)}


# -------------------------------------------------------------------- all variants do the same work


@pytest.mark.parametrize("name", [*PARTS["rollout"], "step"])
def test_every_variant_samples_at_the_scripted_positions(name, policy):
    work = PARTS["rollout"].get(name, bench.step)
    with torch.no_grad():
        assert masks_of(work, policy) == masks_of(bench.backward, policy)


def test_a_step_changes_the_weights_and_returns_the_seconds_of_each_part(policy):
    weight = policy.language_model.lm_head.weight
    environment, before = Scripted(TINY), weight.detach().clone()
    with torch.no_grad():
        seconds = bench.step(policy, environment, environment.rows)
    assert list(seconds) == ["rollout", "update"] and min(seconds.values()) > 0
    moved = (weight - before).abs().max().item()
    # AdamW moves a weight by about the learning rate in each update.
    assert moved == pytest.approx(TINY.lr, rel=0.1)


def test_all_variants_of_an_update_give_the_same_gradient(monkeypatch):
    monkeypatch.setattr(packing, "LEAST", packing.LEAST)  # restores it after the test
    o = replace(TINY, prompt=700, equal_groups=1)
    ours, *others = [
        bench.run_scripted(PARTS["update"][name], name, o)[1] for name in PARTS["update"]
    ]
    assert len(others) == 3
    distances = [np.linalg.norm(other - ours) / np.linalg.norm(ours) for other in others]
    assert max(distances) <= 1e-5
    assert min(distances[1:]) > 0  # sums in another order show that the computation differs


def test_variants_with_different_results_are_an_error(monkeypatch):
    monkeypatch.setattr(bench, "alone", lambda work: ({}, np.array([3.0, work])))
    o, runs = replace(TINY, repeats=1), {}
    bench.in_turns({"a": 4.0, "b": 4.0 + 2e-5}, o, runs)  # 2e-5 / 5 = 4e-6
    assert runs["a"] == [{"apart": 0}] and runs["b"][0]["apart"] == pytest.approx(4e-6, rel=1e-3)
    with pytest.raises(InputError, match=r"b: result differs from the first run's: .* 4.0e-05"):
        bench.in_turns({"a": 4.0, "b": 4.0 + 2e-4}, o, {})
    bench.in_turns({"a 1": 4.0, "a 2": 5.0}, o, {})  # sizes of one axis are not compared


def test_a_model_of_a_directory_does_the_scripted_work_with_the_given_vocabulary(tmp_path, policy):
    # The config names an EOS token, which would end turns early.
    Qwen2Config(vocab_size=40, **small(eos_token_id=3)).save_pretrained(tmp_path)
    o, sampled = replace(TINY, model=str(tmp_path)), sum(map(sum, masks_of(bench.backward, policy)))
    assert bench.run_scripted(bench.generate_in_slots, "slots", o)[1] == [sampled]


def test_a_line_has_medians_and_the_time_relative_to_ours(capsys):
    seconds = {"ours": [2.0], "slow": [8.0, 10.0, 90.0]}
    bench.show({name: [{"seconds": s} for s in runs] for name, runs in seconds.items()}, "")
    ours, slow = capsys.readouterr().out.splitlines()
    assert ours.split() == "ours seconds 2 x 1".split() and slow.endswith("  seconds 10  x 5")


def test_the_variants_take_turns_and_after_ctrl_c_the_finished_runs_are_printed(
    monkeypatch, capsys
):
    order = []

    def run_three(work):
        if len(order) == 3:
            raise KeyboardInterrupt
        order.append(work.args[1])
        return {"seconds": 1.0, "mib": 0.0}, np.ones(1)

    monkeypatch.setattr(bench, "alone", run_three)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["rollout"])
    assert order == ["slots", "by_turns", "whole_batch"]
    assert re.search(r"\nby_turns +seconds 1  mib 0", capsys.readouterr().out)


# ------------------------------------------------------------------------------------------- growth


def test_the_fitted_exponents_are_those_of_the_costs(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    runs = {f"a {n}": [{"seconds": 3.0 * n**2, "mib": n**0.5, "apart": 0.0}] for n in (1, 10, 100)}
    bench.show(runs, str(tmp_path / "g.png"))
    assert capsys.readouterr().out.splitlines()[3:] == ["mib ~ a ^ 0.50", "seconds ~ a ^ 2.00"]
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_is_a_setting_and_its_sizes_differ_only_in_that_setting(axis, monkeypatch):
    arguments, (work, sizes) = [], AXES[axis]
    result = {"seconds": 1.0}, np.ones(1)
    monkeypatch.setattr(bench, "alone", lambda work: arguments.append(work.args) or result)
    bench.main(["growth", "--only", axis, "--repeats", "1", "--sizes", "2"])
    (a, _, first), (b, _, second) = arguments
    assert a is b is work and sizes[:2] == (getattr(first, axis), getattr(second, axis))
    assert replace(first, **{axis: sizes[1]}) == second


# ----------------------------------------------------------------------------- the process of a run


def test_the_measured_functions_can_be_pickled():
    assert pickle.dumps(PARTS)  # `alone` sends them to another process


@pytest.fixture(autouse=True, scope="module")
def one_server():
    """Starts the server from which both the benchmark and the tests fork."""
    start_server()


def fill() -> dict:
    """Allocates 64 MiB that are freed before the end but belong to the peak."""
    return bench.measured(lambda: torch.ones(64 * 2**18).sum().item(), "cpu")[0]


def refuse(message: str):
    raise InputError(message)


def test_a_run_has_its_own_process_and_its_peak_is_counted():
    result = bench.alone(fill)
    # The memory that a forked process shares, hundreds of MiB, is not counted.
    assert 60 < result["mib"] < 128 and result["seconds"] > 0


def test_an_error_in_a_run_is_one_line():
    with pytest.raises(InputError, match=r"^no such thing: give another$"):
        bench.alone(partial(refuse, "no such thing: give another"))
    with pytest.raises(InputError, match="was killed: most often memory ran out"):
        bench.alone(partial(bench.sys.modules["os"]._exit, 9))


def test_bm25_agrees_with_rank_bm25_and_larger_sizes_run(capsys):
    options = ["--shorter", "20", "--repeats", "1", "--sizes", "2"]
    bench.main(["retrieval", *options])
    header, ours, rank_bm25 = capsys.readouterr().out.splitlines()
    assert header.startswith("retrieval: 4M") and "apart 0 " in ours and "build " in rank_bm25
    bench.main(["growth", "--only", "passages,vocab", *options])
    lines = capsys.readouterr().out.splitlines()
    costs = {"build": ["passages"], "mib": ["passages", "vocab"], "seconds": ["passages", "vocab"]}
    titles = [line.split(" ^ ")[0] for line in lines[5:]]
    assert titles == [f"{cost} ~ {axis}" for cost, axes in costs.items() for axis in axes]


# -------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("rollout --only slot", r"--only slot: unknown; one of .* \(did you mean slots\?\)"),
        ("rolout", "invalid choice"),
        ("rollout --engine hf", "unknown flag --engine"),
        ("rollout --model 9B", "--model 9B: neither"),
        ("rollout --vocab 1", "--vocab 1: must be at least 2"),
        ("growth --png .", "--png .: that is a folder"),
        ("rollout --device cuda", "torch sees no GPU here"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(words, error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.search(error, message(bench.main, words.split()))
