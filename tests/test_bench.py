"""Tests lab.bench: the ratios are those of the medians. No test asserts a time."""

import re

import pytest
from conftest import flags

from lab import bench


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
    bench.main([part, *flags(model, tmp_path)])
    output = capsys.readouterr().out
    first = {"update": "ours", "step": "rollout", "retrieval": "ours"}[part]
    assert re.search(rf"(?m)^{first} +\S+ s +1.00 x\n.+ x$", output)
