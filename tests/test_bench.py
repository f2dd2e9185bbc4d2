"""lab.bench: what is compared is the same work, and the figures are what the runs say. No time is
asserted.
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


def played(work, policy, o=TINY) -> list:
    """The masks of eight short rows of two questions, with 0 to 3 searches."""
    environment = Scripted(o)
    work(policy, environment, environment.rows)
    return [row.response_mask for row in environment.rows]


def test_a_group_shares_its_prompt_and_documents_stand_behind_every_turn_but_the_last():
    o = replace(TINY, shorter=1)
    rows, again = (Scripted(o).rows for _ in range(2))
    assert [row.left for row in rows] == [row.left for row in again]  # the seed's alone
    prompts = [row.prompt_ids for row in rows]
    assert prompts[0] == prompts[3] != prompts[4] == prompts[7] and len(rows) == 8
    for row in rows:
        found = [len(ids) for _, ids in row.left]
        assert found.pop() == 0 and len(found) <= 3 and all(100 <= n <= 200 for n in found)


def test_rows_of_a_context_are_half_a_prompt():
    environment = Scripted(replace(TINY, context=640))
    sizes = {
        (len(row.prompt_ids), environment.max_trajectory_tokens(row)) for row in environment.rows
    }
    assert sizes == {(32, 64)}


# --------------------------------------------------------------------- the twins do the same work


@pytest.mark.parametrize("name", [*PARTS["rollout"], "step"])
def test_every_loop_samples_at_the_places_that_are_written_down(name, policy):
    work = PARTS["rollout"].get(name, bench.step)
    with torch.no_grad():
        assert played(work, policy) == played(bench.backward, policy)


def test_a_step_learns_and_says_how_long_each_part_took(policy):
    weight = policy.language_model.lm_head.weight
    environment, before = Scripted(TINY), weight.detach().clone()
    with torch.no_grad():
        seconds = bench.step(policy, environment, environment.rows)
    assert list(seconds) == ["rollout", "update"] and min(seconds.values()) > 0
    moved = (weight - before).abs().max().item()
    assert moved == pytest.approx(TINY.lr, rel=0.1)  # AdamW: about the learning rate per update


def test_all_rows_padded_rows_and_whole_prompts_give_one_gradient(monkeypatch):
    monkeypatch.setattr(packing, "LEAST", packing.LEAST)  # put back when this ends
    o = replace(TINY, prompt=700, equal_groups=1)
    ours, *others = [
        bench.run_scripted(PARTS["update"][name], name, o)[1] for name in PARTS["update"]
    ]
    assert len(others) == 3
    apart = [np.linalg.norm(other - ours) / np.linalg.norm(ours) for other in others]
    assert max(apart) <= 1e-5
    assert min(apart[1:]) > 0  # another order of sums: it was computed in another way


def test_what_is_not_the_same_work_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "alone", lambda work: ({}, np.array([3.0, work])))
    o, runs = replace(TINY, repeats=1), {}
    bench.in_turns({"a": 4.0, "b": 4.0 + 2e-5}, o, runs)  # 2e-5 / 5 = 4e-6
    assert runs["a"] == [{"apart": 0}] and runs["b"][0]["apart"] == pytest.approx(4e-6, rel=1e-3)
    with pytest.raises(InputError, match=r"b: 4\.0e-05 from the first variant: not the same work"):
        bench.in_turns({"a": 4.0, "b": 4.0 + 2e-4}, o, {})
    bench.in_turns({"a 1": 4.0, "a 2": 5.0}, o, {})  # two sizes


def test_a_model_directory_does_the_scripted_work_with_the_vocabulary_asked_for(tmp_path, policy):
    # Its config names an EOS, which would end turns early.
    Qwen2Config(vocab_size=40, **small(eos_token_id=3)).save_pretrained(tmp_path)
    o, sampled = replace(TINY, model=str(tmp_path)), sum(map(sum, played(bench.backward, policy)))
    assert bench.run_scripted(bench.generate_in_slots, "slots", o)[1] == [sampled]


def test_a_line_has_medians_and_how_many_times_as_long_it_takes_as_ours(capsys):
    seconds = {"ours": [2.0], "slow": [8.0, 10.0, 90.0]}
    bench.show({name: [{"seconds": s} for s in found] for name, found in seconds.items()}, "")
    ours, slow = capsys.readouterr().out.splitlines()
    assert ours.split() == "ours seconds 2 x 1".split() and slow.endswith("  seconds 10  x 5")


def test_the_variants_take_turns_and_ctrl_c_keeps_what_was_measured(monkeypatch, capsys):
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


def test_the_exponents_are_those_that_the_costs_were_made_with(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    runs = {f"a {n}": [{"seconds": 3.0 * n**2, "mib": n**0.5, "apart": 0.0}] for n in (1, 10, 100)}
    bench.show(runs, str(tmp_path / "g.png"))
    assert capsys.readouterr().out.splitlines()[3:] == ["mib ~ a ^ 0.50", "seconds ~ a ^ 2.00"]
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_is_a_setting_and_its_sizes_differ_in_it_alone(axis, monkeypatch):
    seen, (work, sizes) = [], AXES[axis]
    found = {"seconds": 1.0}, np.ones(1)
    monkeypatch.setattr(bench, "alone", lambda work: seen.append(work.args) or found)
    bench.main(["growth", "--only", axis, "--repeats", "1", "--sizes", "2"])
    (a, _, first), (b, _, second) = seen
    assert a is b is work and sizes[:2] == (getattr(first, axis), getattr(second, axis))
    assert replace(first, **{axis: sizes[1]}) == second


# ----------------------------------------------------------------------------- a process of its own


def test_what_is_measured_can_go_there():
    assert pickle.dumps(PARTS)


@pytest.fixture(autouse=True, scope="module")
def one_server():
    """Both the benchmark and the tests fork from it."""
    start_server()


def fill() -> dict:
    """64 MiB that are given back before the end are in the peak."""
    return bench.measured(lambda: torch.ones(64 * 2**18).sum().item(), "cpu")[0]


def refuse(message: str):
    raise InputError(message)


def test_a_run_has_its_own_process_and_its_peak_is_counted():
    found = bench.alone(fill)
    # not the hundreds that a forked process shares
    assert 60 < found["mib"] < 128 and found["seconds"] > 0


def test_what_is_wrong_in_a_run_comes_back_as_one_line():
    with pytest.raises(InputError, match=r"^no such thing: give another$"):
        bench.alone(partial(refuse, "no such thing: give another"))
    with pytest.raises(InputError, match="was killed: most often memory ran out"):
        bench.alone(partial(bench.sys.modules["os"]._exit, 9))


def test_bm25_finds_what_rank_bm25_finds_and_larger_sizes_run(capsys):
    words = ["--shorter", "20", "--repeats", "1", "--sizes", "2"]
    bench.main(["retrieval", *words])
    what, ours, twin = capsys.readouterr().out.splitlines()
    assert what.startswith("retrieval: 4M") and "apart 0 " in ours and "build " in twin
    bench.main(["growth", "--only", "passages,vocab", *words])
    printed = capsys.readouterr().out.splitlines()
    costs = {"build": ["passages"], "mib": ["passages", "vocab"], "seconds": ["passages", "vocab"]}
    found = [line.split(" ^ ")[0] for line in printed[5:]]
    assert found == [f"{cost} ~ {axis}" for cost, axes in costs.items() for axis in axes]


# -------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("words", "told"),
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
def test_what_has_no_meaning_is_one_line(words, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.search(told, message(bench.main, words.split()))
