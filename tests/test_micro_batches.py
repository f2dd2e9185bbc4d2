"""Tests of update.accumulate_and_step by hand: one weight w, and a loss that is linear in w."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import message

from policy import Batch
from update import accumulate_and_step


def step(losses, budget):
    """Makes a step from w = 0; returns w, the logged metrics, and the gradient of w after the step.

    Row b of three rows, of 3, 1 and 2 tokens, has the loss losses[b] · (w + 1) on each token. The
    weight of a token is 1/6.
    """
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0]])
    batch = Batch(torch.zeros(3, 4, dtype=torch.long), mask, mask, torch.zeros(3), 1)
    batch.advantages, batch.token_weights = mask * torch.tensor(losses)[:, None], mask / 6
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    def loss_of(micro, rows):
        loss = (micro.token_weights * micro.advantages * (model.weight + 1)).sum()
        return loss, {"tokens": micro.response_mask.sum().item(), "row_max": max(rows.tolist())}

    state = SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        settings=SimpleNamespace(tokens_per_micro_batch=budget),
        critic_model=None,
    )
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    total = accumulate_and_step(state, model, optimizer, batch, loss_of)
    return model.weight.item(), total, model.weight.grad


@pytest.mark.parametrize("budget", [1, 4, 99])  # three micro-batches, two, and all in one
def test_the_step_and_the_metrics_do_not_depend_on_the_micro_batches(budget):
    # (3 · 0.1 + 0.5 + 2 · 0.2) / 6 = 0.2; a mean of row means would be (0.1 + 0.5 + 0.2) / 3 = 0.27
    weight, total, gradient = step([0.1, 0.5, 0.2], budget)
    assert weight == pytest.approx(-0.2)
    expected = {"tokens": 6.0, "row_max": 2, "loss": 0.2, "grad_norm": 0.2}
    assert total == pytest.approx(expected)
    assert gradient is None


def test_the_summed_gradient_is_clipped_and_the_norm_before_clipping_is_logged():
    weight, total, _ = step([1.0, 5.0, 2.0], 1)  # the gradient is ten times as large
    assert weight == pytest.approx(-1.0, abs=1e-4) and total["grad_norm"] == pytest.approx(2.0)


def test_a_micro_batch_whose_loss_is_not_finite_ends_the_run_before_the_step():
    error = message(step, [0.1, float("inf"), 0.2], 1)
    assert error.startswith("policy: loss inf") and error.endswith("was not applied")
