"""Tests lab.bench: the variants do the same work, and the ratios are those of the medians. No test
asserts a time.
"""

import re

import pytest
import torch
from conftest import flags, message, settings_for

from lab import bench
from plumbing.build import build_state


@pytest.fixture
def state(model, tmp_path):
    return build_state(settings_for(model, tmp_path, "--algorithm grpo"))


def test_every_way_to_sample_gives_the_same_tokens_greedily(state):
    variants = bench.rollouts(state)
    slots, by_turns = ([row.ids for row in work()] for work in variants.values())
    assert by_turns == slots
    assert len({len(ids) for ids in slots}) > 1  # so that finished rows wait for others


def test_a_padded_row_has_the_same_log_probs(state):
    batch = bench.prepare(state, bench.collect(state, 0))
    ours, padded = state.policy, bench.Padded(state.policy)
    with torch.no_grad():
        expected = ours(batch.tokens, 1.0, batch.response_mask)  # [B, T]
        result = padded(batch.tokens, 1.0, batch.response_mask) * batch.response_mask
    torch.testing.assert_close(result, expected * batch.response_mask, rtol=1e-4, atol=1e-5)


def test_the_ratio_is_that_of_the_medians(monkeypatch, capsys):
    seconds = iter([2.0, 8.0, 2.0, 10.0, 2.0, 90.0])
    monkeypatch.setattr(bench, "REPEATS", 3)
    monkeypatch.setattr(bench, "seconds_of", lambda work: next(seconds))
    bench.compare({"ours": None, "slow": None})
    ours, slow = capsys.readouterr().out.splitlines()
    assert ours.split() == "ours 2 s 1.00 x".split() and slow.split()[1:] == "10 s 5.00 x".split()


@pytest.mark.parametrize("part", ["update", "step", "retrieval"])
def test_a_command_prints_a_line_for_each_variant(part, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "PASSAGES", 30)
    given = flags(model, tmp_path)
    if part == "retrieval":
        assert "retrieval takes no flags: --model" in message(bench.main, [part, *given])
        given = []
    bench.main([part, *given])
    output = capsys.readouterr().out
    first = {"update": "ours", "step": "rollout", "retrieval": "ours"}[part]
    assert re.search(rf"(?m)^{first} +\S+ s +1.00 x\n.+ x$", output)
