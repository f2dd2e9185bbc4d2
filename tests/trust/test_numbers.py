"""Numbers that are not finite, or far too large, wherever they come from: no such step is taken."""

import math
import re

import pytest
import torch
from conftest import command_line, flags, message, rows_of, same, settings_for
from test_train import pay, quick, weights_of

import train
from plumbing.alarms import SAID
from plumbing.build import build_parts

NAN, INF = float("nan"), float("inf")
DIFFER, EQUAL = (1.0, 0.0, 0.0, 1.0), (1.0,) * 4  # two groups of two


def fault(number: int, *values, fast=False):
    marks = [pytest.mark.fault(number)] + [pytest.mark.trust] * (not fast)
    return pytest.param(*values, marks=marks)


@pytest.fixture
def built(model, tmp_path, monkeypatch):
    """built("--flag value ...") -> the parts of the run that train.train then takes."""

    def build(more=""):
        parts = build_parts(settings_for(model, tmp_path, more))
        monkeypatch.setattr(train, "build_parts", lambda settings: parts)
        return parts

    return build


def paid(*amounts):
    return lambda parts, patch: pay(parts, amounts)


def old(value: float):
    def inject(parts, patch):
        prepare = train.prepare

        def prepared(*arguments):
            batch = prepare(*arguments)
            batch.old_logprobs = batch.old_logprobs.masked_fill(batch.response_mask > 0, value)
            return batch

        patch.setattr(train, "prepare", prepared)

    return inject


def spoilt_gradient(parts, patch):
    next(parts.policy.parameters()).register_hook(lambda gradient: gradient * NAN)


def spoilt_weight(parts, patch):
    next(parts.policy.parameters()).data[0] = NAN


def masked(rows: slice):
    """Nothing of these rows was written by the policy."""

    def inject(parts, patch):
        pay(parts, DIFFER)
        collate = train.collate

        def collated(*arguments):
            batch = collate(*arguments)
            batch.response_mask[rows] = 0.0
            return batch

        patch.setattr(train, "collate", collated)

    return inject


def as_it_is(parts, patch):
    pass


STOPS = [
    fault(110, paid(NAN, 1, 0, 1), "", fast=True),
    fault(111, paid(INF, 1, 0, 1), ""),
    fault(112, paid(NAN, 1, 0, 1), "--algorithm grpo"),
    fault(113, paid(NAN, 1, 0, 1), "--algorithm dapo"),
    fault(114, paid(NAN, 1, 0, 1), "--algorithm ppo"),
    fault(115, old(NAN), "", fast=True),
    fault(116, old(-INF), ""),
    fault(117, old(-1000.0), ""),
    fault(118, old(-1000.0), "--kl_coef 0.1 --kl_estimator k3"),
    fault(119, spoilt_gradient, "", fast=True),
    fault(120, spoilt_weight, "", fast=True),
    fault(121, as_it_is, "--lr 1e9", fast=True),
]


@pytest.mark.parametrize("inject, more", STOPS)
def test_what_is_not_finite_stops_the_run_in_one_line(inject, more, built, monkeypatch):
    parts = built(f"{more} --steps 4")
    pay(parts, DIFFER)
    inject(parts, monkeypatch)
    before, update = [], train.update

    def watched(*arguments):
        before.append(weights_of(parts.policy))
        return update(*arguments)

    monkeypatch.setattr(train, "update", watched)
    said = message(train.train, parts.settings)
    assert re.match(r"step [0-3]: .*(nan|inf).*; stopped; this update was not applied", said), said
    step = int(said[5])
    finite = [
        [w.nan_to_num() for w in weights] for weights in (before[-1], weights_of(parts.policy))
    ]
    assert same(*finite)
    assert all(question.id in said for question in parts.stream.take(step))
    kept = torch.load(re.search(r"The batch is in (\S+\.pt)", said)[1])
    assert len(kept["tokens"]) == 4


NOTHING = masked(slice(None))
GOES_ON = [  # injected, flags, the alarm that is raised, do the weights stay?
    fault(122, paid(1e38, 0, 0, 1), "", "reward_size", False, fast=True),
    fault(122, paid(1e38, 0, 0, 1), "--algorithm grpo", "reward_size", False),
    fault(123, paid(*EQUAL), "", "equal_groups", True, fast=True),
    fault(124, paid(*EQUAL), "--algorithm grpo", "equal_groups", True),
    fault(125, paid(*EQUAL), "--algorithm dapo --max_resample 1", "equal_groups", True),
    fault(126, paid(*EQUAL), "--algorithm ppo", "", False),
    fault(127, paid(*EQUAL), "--algorithm reinforce_pp", "", True),
    fault(128, NOTHING, "", "", True, fast=True),
    fault(129, NOTHING, "--algorithm ppo", "", True),
    fault(130, masked(slice(1)), "", "", False),
    fault(131, as_it_is, "--max_turn_tokens 1", "cut_off", False),
    fault(132, as_it_is, "--max_context 75", "", False),
    fault(133, as_it_is, "--max_context 60", "cut_off", False),
    fault(134, as_it_is, "--temperature 1e-30", "equal_groups", True),
]


@pytest.mark.parametrize("inject, more, alarm, stays", GOES_ON)
def test_what_is_finite_goes_on_and_what_teaches_nothing_is_told(
    inject, more, alarm, stays, built, monkeypatch, capsys
):
    parts = built(f"{more} --steps 3")
    inject(parts, monkeypatch)
    before = weights_of(parts.policy)
    folder = train.train(parts.settings)
    rows = rows_of(folder)
    numbers = [v for row in rows for v in row.values() if isinstance(v, int | float)]
    assert len(rows) == 3 and all(map(math.isfinite, numbers))
    assert all(p.isfinite().all() for p in parts.policy.parameters())
    raised = {name for row in rows for name in row.get("alarms", ())}
    said = capsys.readouterr().out
    assert not alarm or (alarm in raised and SAID[alarm] in said)
    assert same(before, weights_of(parts.policy)) == stays


FLAGS = [
    fault(135, "--document_tokens 0", "--document_tokens 0: must be at least 1", fast=True),
    fault(136, "--lr inf", "--lr inf: must be a finite number", fast=True),
    fault(137, "--lr nan", "--lr nan: must be a finite number", fast=True),
    fault(138, "--clip_low nan", "--clip_low nan: must be a finite number", fast=True),
    fault(139, "--temperature 0", "--temperature 0", fast=True),
    fault(140, "--group_size 1 --algorithm grpo", "--group_size 1", fast=True),
]


@pytest.mark.parametrize("wrong, why", FLAGS)
def test_a_number_that_cannot_be_is_one_line_before_anything_is_loaded(
    wrong, why, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(train, "build_parts", lambda *_: pytest.fail("something was loaded"))
    assert why in command_line(train.main, flags("nowhere", tmp_path, wrong), capsys)
    assert not list(tmp_path.iterdir())
