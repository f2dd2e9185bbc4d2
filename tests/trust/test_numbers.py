"""A number that is not finite stops the run before the update is applied; odd finite numbers do not
stop it, and most of them raise an alarm.
"""

import math
import re

import pytest
from conftest import message, of_fault, rows_of, same, settings_for
from test_train import marks, pay, weights_of

import train
from plumbing.alarms import ADVICE
from plumbing.build import build_state
from plumbing.files import checkpoints, stage_folder

NAN = float("nan")
EQUAL = (1, 1, 1, 1)  # two groups of two
GRPO = "--algorithm grpo"
PPO = "--algorithm ppo"


@pytest.fixture
def injected(model, tmp_path, monkeypatch, pay):
    """Returns a function: injected(change, flags) builds a state, applies `change` to it and
    returns it; train.train then uses this state.
    """

    def inject(change, more: str):
        state = build_state(settings_for(model, tmp_path, more, max_resample=1))
        monkeypatch.setattr(train, "build_state", lambda settings: state)
        if change:  # otherwise the model gets the real rewards
            pay([1, 0, 0, 1])
            change(state, monkeypatch)
        return state

    return inject


def paid(*amounts):
    """Returns a change: the rows get these rewards."""
    rewards = [{"answer": amount} for amount in amounts], [amount > 0 for amount in amounts]
    return lambda state, patch: patch.setattr(train, "compute_rewards", lambda *_: rewards)


def batch_of(function: str, spoil):
    """Returns a change: `spoil` alters each batch that this function of train.py returns."""

    def change(state, patch):
        make = getattr(train, function)

        def spoilt(*arguments):
            batch = make(*arguments)
            spoil(batch)
            return batch

        patch.setattr(train, function, spoilt)

    return change


def old(value: float):
    """Returns a change: all old log-probs are this value."""
    return batch_of("prepare", lambda b: b.old_logprobs.masked_fill_(b.response_mask > 0, value))


def masked(rows: slice):
    """Returns a change: according to their masks the policy wrote no token of these rows."""
    return batch_of("collate", lambda b: b.response_mask[rows].zero_())


def gradient(state, patch):
    """Makes the gradient of one parameter NaN."""
    next(state.policy.parameters()).register_hook(lambda gradient: gradient * NAN)


def critic(state, patch):
    """Makes the values of the critic huge."""
    state.critic.head.bias.data.fill_(1e30)  # squared: inf; the whitened advantages stay finite


STOPS = [
    of_fault(110, paid(NAN, 1, 0, 1), ""),
    of_fault(115, old(NAN), ""),
    of_fault(119, gradient, ""),
    of_fault(121, paid(1, 0, 0, 1), "--lr 1e9"),
    (critic, PPO),
]


@pytest.mark.parametrize("change, more", STOPS)
def test_a_number_that_is_not_finite_stops_the_run_with_a_one_line_error(change, more, injected):
    state = injected(change, f"{more} --steps 4")
    watched = state.critic if change is critic else state.policy
    before = weights_of(watched)
    output = message(train.train, state.settings)
    whose = "critic" if change is critic else "policy"
    assert re.match(rf"{whose}: .*(nan|inf).*this gradient was not applied", output), output
    saved = [path.name for path in checkpoints(stage_folder(state.settings))]
    assert saved == ["checkpoint-000001"] * ("--lr" in more)  # with it, the first step is finite
    if not saved:
        assert same(*([w.nan_to_num() for w in ws] for ws in (before, weights_of(watched))))


def test_no_checkpoint_is_saved_of_a_step_that_is_half_made(injected):
    def later(state, patch):
        """From step 1 on, the critic's values are huge, which shows after the policy's step."""

        def spoilt(state, step):
            if step:
                critic(state, patch)
            return collect(state, step)

        collect = train.collect
        patch.setattr(train, "collect", spoilt)

    state = injected(later, f"{PPO} --steps 4")
    assert message(train.train, state.settings).startswith("critic: ")
    assert not checkpoints(stage_folder(state.settings))


# (fault, change, flags, the alarm that is raised or "", whether the weights stay the same)
GOES_ON = [
    of_fault(122, paid(1e38, 0, 0, 1), "", "", False),
    of_fault(124, paid(*EQUAL), GRPO, "equal_groups", True),
    of_fault(128, masked(slice(None)), "", "", True),
    of_fault(133, None, "--max_context 60", "truncated", False),
]


@pytest.mark.parametrize("change, more, alarm, stays", GOES_ON)
def test_a_run_with_finite_numbers_goes_on_and_raises_the_right_alarm(
    change, more, alarm, stays, injected, capsys
):
    state = injected(change, f"{more} --steps 3")
    before = weights_of(state.policy)
    rows = rows_of(train.train(state.settings))
    numbers = [v for row in rows for v in row.values() if isinstance(v, int | float)]
    assert len(rows) == 3 and all(map(math.isfinite, numbers))
    assert all(p.isfinite().all() for p in state.policy.parameters())
    assert same(before, weights_of(state.policy)) == stays
    raised = {name for row in rows for name in row.get("alarms", ())}
    assert not alarm or (alarm in raised and ADVICE[alarm] in capsys.readouterr().out)
