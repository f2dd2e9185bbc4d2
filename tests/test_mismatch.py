"""Tests of ppo.mismatch_weights, for a sampler μ that differs from π_old: by hand, in an update,
and in a run.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import settings_for
from test_dapo import CHOSEN, make_batch
from test_update import GRPO, gradient_of, unequal_batch

import dapo
import grpo
import ppo
from plumbing import build
from settings import Settings

# A line has the mode, log ρ of the five tokens of a row (nan: a masked token) and their weights.
# They were computed by hand from the definitions: exp(0.3) = 1.3498588, and the products of rows
# are exp(−1.5) and exp(1.2) = 3.32. tests/test_peers.py compares the same modes
# with the code of verl and TRL.
ROWS = """
token          0.3 -0.9 0 nan -0.9  1.3498588 0.4065697 1 1 0.4065697
token          0.3 0.9 nan -400 0   1.3498588 2 1 2.0611537e-9 1
sequence_mask  0.3 -0.9 0 nan -0.9  0.2231302 0.2231302 0.2231302 1 0.2231302
sequence_mask  0.3 0.5 0.2 0.2 nan  0 0 0 0 1
sequence_mask  nan nan nan nan nan  1 1 1 1 1
"""


@pytest.mark.parametrize("line", ROWS.strip().splitlines())
def test_weights_equal_those_computed_by_hand(line):
    mode, *numbers = line.split()
    old, expected = torch.tensor([float(n) for n in numbers]).view(2, 1, 5)
    batch = SimpleNamespace(old_logprobs=old.requires_grad_(), response_mask=~old.isnan())
    batch.sampled_logprobs = torch.zeros(1, 5)
    weights = ppo.mismatch_weights(batch, mode)
    torch.testing.assert_close(weights, expected, atol=1e-12, rtol=1e-6)
    assert not weights.requires_grad


# ------------------------------------------------------------------------------------- in an update


def test_denominators_leave_out_rejected_tokens_and_rows_unlike_in_trl():
    # The rows have 2, 2, 4 and 1 model tokens. One token of the third row is rejected, and the
    # whole last row.
    batch = make_batch()
    batch.mismatch_weights = torch.full((4, 4), 0.5)
    batch.mismatch_weights[[2, 3], [1, 0]] = 0.0
    rows = grpo.compute_token_weights(batch, Settings(loss_aggregation="sequence"))
    assert rows[:, 0].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 9, 0])  # TRL: 1/8, 1/8, 1/16
    assert rows[2, 1] == 0
    tokens = dapo.compute_token_weights(batch, CHOSEN)
    assert tokens[:, 0].tolist() == pytest.approx([1 / 7, 1 / 7, 1 / 7, 0])


def test_the_weight_multiplies_the_policy_loss_but_not_the_kl():
    # The loss is KL + w · policy loss. So twice the loss with w = 1/2 minus the loss with w = 1 is
    # the KL.
    batch = unequal_batch(GRPO)
    settings = replace(GRPO, kl_estimator="k3")
    batch.mismatch_weights = torch.full_like(batch.response_mask, 0.5)
    half = gradient_of(batch, settings)[1]
    batch.mismatch_weights += 0.5
    kl = 2 * half["loss"] - gradient_of(batch, settings)[1]["loss"]
    assert kl == pytest.approx(0.1 * half["k3"], abs=1e-6) and kl > 1e-3


def test_the_effective_share_of_the_tokens_by_hand():
    # w [2, 1, 0.5]: 3.5² / (3 · 5.25). All rejected: 0, not NaN.
    for weights, share in (([2, 1, 0.5], 0.7778), ([0] * 3, 0)):
        weights = torch.tensor([[*map(float, weights), 9]])
        batch = SimpleNamespace(
            response_mask=torch.tensor([[1, 1, 1, 0]]), mismatch_weights=weights
        )
        assert ppo.effective_share(batch) == pytest.approx(share, abs=1e-4)


# -------------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize(
    "masked, copies, rounded, mode",
    [
        (True, False, False, "none"),
        (True, True, False, "token"),
        (True, False, True, "token"),  # slots and packed rows round differently to bf16
        (False, True, False, "none"),
    ],
)
def test_a_run_corrects_only_if_another_distribution_samples(
    masked, copies, rounded, mode, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "wants_copy", lambda *_: copies)
    monkeypatch.setattr(build, "in_bf16", lambda _: rounded)
    settings = settings_for(model, tmp_path, "", mask_documents=masked)
    assert build.build_state(settings).mismatch == mode
