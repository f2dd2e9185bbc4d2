"""Compares the functions that training calls, with its settings, with those of verl and TRL.

tests/peers.json records the numbers of verl 0.9.1 and TRL 1.16.0 on one batch. If these packages
are installed (pip install --no-deps verl trl), the numbers are computed again and must equal the
recorded ones; RECORD=1 records them. Only verl's files with its formulas are loaded, and only one
statement of TRL is run.
"""

import ast
import importlib.util
import json
import math
import os
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import kl
import ppo
from flags import resolve
from policy import Batch
from update import ALGORITHMS

VERL, TRL = (importlib.util.find_spec(name) for name in ("verl", "trl"))
PATH = Path(__file__).with_name("peers.json")
RECORDED = json.loads(PATH.read_text())  # case -> rows of numbers
# imports of verl's files that their formulas do not call
STUBS = "omegaconf tensordict verl verl.trainer verl.trainer.config verl.trainer.config.algorithm"
STUBS += " verl.workers verl.workers.config verl.workers.config.actor verl.protocol verl.utils"
STUBS += " verl.utils.device verl.utils.import_utils verl.utils.torch_functional"
MEANS = {"sequence": "seq-mean-token-mean", "token": "token-mean"}  # our name -> verl's


@pytest.fixture
def verl(monkeypatch):
    """Loads verl's core_algos; None without verl."""
    if VERL is None:
        return None
    stub = MagicMock(deprecated=lambda *_, **__: lambda function: function)
    stub.AlgoConfig = SimpleNamespace  # a type that no argument has
    stub.utils = stub  # `import verl.utils.torch_functional as ...` looks it up in `verl.utils`
    for name in STUBS.split():
        monkeypatch.setitem(sys.modules, name, stub)
    folder = Path(VERL.submodule_search_locations[0])
    for name in ("utils/torch_functional", "trainer/ppo/core_algos"):
        loaded = SimpleNamespace(**runpy.run_path(str(folder / f"{name}.py")))
        setattr(stub, Path(name).name, loaded)
    return stub.core_algos


def make_batch() -> Batch:
    """Returns a batch [12, 6] of three groups, one with equal rewards; some tokens are masked."""
    rng = random.Random(0)  # torch's numbers may change between versions

    def table(low, high):
        return torch.tensor(
            [[rng.uniform(low, high) for _ in range(6)] for _ in range(12)]
        ).double()

    mask = (table(0, 1) < 0.6).double()
    mask[:, 0] = 1
    rewards = torch.tensor([rng.randrange(4) for _ in range(12)]).double()
    rewards[4:8] = 1
    old = table(-2, 0)
    batch = Batch(torch.zeros(12, 7).long(), mask, old, rewards, 4, ref_logprobs=table(-2, 0))
    batch.overlong = rewards < 0  # none
    batch.values = table(-1, 1) * mask
    batch.new = old + table(-0.6, 0.6)  # the policy's log-probs after some updates
    batch.logits = table(-1, 1)  # used as advantages, returns or log-ratios
    batch.paid = torch.zeros(12, 6).double()  # the rewards on the last model tokens
    batch.paid[ppo.last_model_token(mask)] = rewards
    return batch


def module_and_settings(recipe: str, **changes):
    """Returns the module that trains this recipe, and the recipe's settings."""
    settings = resolve(recipe, 1, False, changes)
    return ALGORITHMS[settings.algorithm], settings


# -------------------------------------------------------------------------------------- advantages
def rewards_minus_kl(verl, batch, settings):
    return batch.paid - settings.kl_coef * verl.kl_penalty(
        batch.old_logprobs, batch.ref_logprobs, "kl"
    )


def advantages(recipe, theirs, **changes):
    algorithm, settings = module_and_settings(recipe, **changes)
    return (
        lambda batch: algorithm.compute_advantages(batch, settings),
        lambda verl, batch: theirs(verl, batch, settings),
    )


def of_outcomes(name):
    index = np.repeat(np.arange(3), 4)
    return lambda verl, batch, _: getattr(verl, f"compute_{name}_outcome_advantage")(
        batch.paid.clone(), batch.response_mask, index
    )[0]


def reinforce_pp(verl, batch, settings):
    rewards, gamma = rewards_minus_kl(verl, batch, settings), SimpleNamespace(gamma=1.0)
    return verl.compute_reinforce_plus_plus_outcome_advantage(rewards, batch.response_mask, gamma)[
        0
    ]


def gae(verl, batch, settings):
    rewards, mask = rewards_minus_kl(verl, batch, settings), batch.response_mask
    find = verl.compute_gae_advantage_return
    return mask * find(rewards, batch.values, mask, 1.0, settings.gae_lambda)[0]


# ------------------------------------------------------------------------------------------ losses
def loss_and_gradient(at, loss_of):
    """Returns one row: the loss, then its gradient over log-probs or values [12, 6]."""
    at = at.clone().requires_grad_()
    loss = loss_of(at)
    loss.backward()
    return torch.cat([loss.detach().view(1), at.grad.flatten()])[None]


def first_update(batch, settings):
    """Returns the log-probs to differentiate at. ARENA's k2 is multiplied by the ratio and
    verl's is not, so k2 is compared in a first update, where the ratio is 1.
    """
    return batch.old_logprobs if settings.kl_estimator == "k2" else batch.new


def losses(recipe, **changes):
    algorithm, settings = module_and_settings(recipe, **changes)

    def ours(batch):
        batch.advantages = batch.logits
        weights = algorithm.compute_token_weights(batch, settings)
        return loss_and_gradient(
            first_update(batch, settings),
            lambda now: (weights * algorithm.compute_loss(now, batch, settings)[0]).sum(),
        )

    class Settings(dict):
        __getattr__ = dict.__getitem__

    clips = Settings(clip_ratio_low=settings.clip_low, clip_ratio_high=settings.clip_high)
    clips |= {"clip_ratio": 0.2, "clip_ratio_c": 1e9}  # no dual clip, as in the papers
    clips["global_batch_info"] = {}

    def theirs(verl, batch):
        mean, old, mask = MEANS[settings.loss_aggregation], batch.old_logprobs, batch.response_mask

        def loss_of(now):
            find = verl.compute_policy_loss_vanilla
            loss, _ = find(old, now, batch.logits, mask, mean, clips)
            if settings.kl_coef and settings.kl_estimator != "k1":
                penalty = verl.kl_penalty(now, batch.ref_logprobs, settings.kl_estimator)
                loss = loss + settings.kl_coef * verl.agg_loss(penalty, mask, mean)
            return loss

        return loss_and_gradient(first_update(batch, settings), loss_of)

    return ours, theirs


def our_value_loss(batch):
    weights, old = ppo.token_weights(batch.response_mask), batch.values
    return loss_and_gradient(
        batch.new, lambda now: (weights * ppo.value_loss(now, old, batch.logits)[0]).sum()
    )


def value_loss(verl, batch):
    return loss_and_gradient(
        batch.new,
        lambda now: verl.compute_value_loss(
            now, batch.logits, batch.values, batch.response_mask, 0.2, "token-mean"
        )[0],
    )


def estimator(name):
    return (
        lambda batch: kl.ESTIMATORS[name](batch.new, batch.ref_logprobs),
        lambda verl, batch: verl.kl_penalty(batch.new, batch.ref_logprobs, name.removeprefix("k_")),
    )


# -------------------------------------------------------------------------- weights for the sampler
def log_ratio(batch):
    """Returns log-ratios to the sampler, whose rows are in turn large, small and almost zero."""
    return batch.logits * torch.tensor([1, 0.03, 0.001] * 4).double()[:, None]


def our_weights(batch, mode):
    batch.old_logprobs, batch.sampled_logprobs = log_ratio(batch), torch.zeros(12, 6)
    return ppo.mismatch_weights(batch, mode) * batch.response_mask


def of_trl(mode, name, clip_max):
    """Compares the weights with TRL's; one statement of a method of 500 lines is run."""

    def theirs(_, batch):
        prefix, mask = "vllm_importance_sampling_", batch.response_mask
        options = {"mode": name, "clip_min": None, "clip_max": clip_max, "correction": True}
        trainer = SimpleNamespace(use_vllm=True, **{prefix + key: options[key] for key in options})
        names = {"self": trainer, "completion_mask": mask, "tool_mask": None, "torch": torch}
        names |= {"old_per_token_logps": log_ratio(batch), "math": math}
        names["sampling_per_token_logps"] = 0.0
        path = Path(TRL.submodule_search_locations[0], "trainer", "grpo_trainer.py")
        whole = [
            statement
            for statement in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(statement, ast.If)
            and ast.unparse(statement.test).endswith("_correction")
            and f"{prefix}ratio = " in ast.unparse(statement)
        ]
        exec(compile(ast.Module(whole[-1:], []), "trl", "exec"), names)
        return names[f"{prefix}ratio"] * mask

    return lambda batch: our_weights(batch, mode), theirs


CASES = {  # name -> (our function of a batch, their function of verl and a batch)
    "GRPO, R-Search": advantages("r_search", of_outcomes("grpo")),
    "REINFORCE++, R1-Searcher": advantages("r1_searcher", reinforce_pp),
    "REINFORCE++ and KL": advantages("r1_searcher", reinforce_pp, variant="llama_8b", kl_coef=0.1),
    "its baseline form": advantages(
        "r1_searcher", of_outcomes("reinforce_plus_plus_baseline"), variant="as_its_code"
    ),
    "GAE, Search-R1": advantages("search_r1", gae),
    "GAE, λ 0.95": advantages("r_search", gae, variant="ppo", gae_lambda=0.95),
    "loss, UR²": losses("ur2"),
    "loss, R-Search": losses("r_search"),
    "loss, When to Search": losses("when_to_search"),
    "loss, ARENA": losses("arena"),
    "value loss": (our_value_loss, value_loss),
    "k1": estimator("k1"),
    "k2": estimator("k2"),
    "k3": estimator("k3"),
    "abs": estimator("k_abs"),
    "TRL token": of_trl("token", "token_truncate", 2.0),
    "TRL sequence_mask": of_trl("sequence_mask", "sequence_mask", 3.0),
}


@pytest.mark.parametrize("name", CASES)
def test_training_computes_the_same_as_verl_and_trl(name, verl):
    ours, theirs = CASES[name]
    if TRL if name.startswith("TRL") else verl:
        rows = theirs(verl, make_batch()).tolist()
        if "RECORD" in os.environ:
            RECORDED[name] = [[round(number, 9) for number in row] for row in rows]
            PATH.write_text(json.dumps(RECORDED).replace("]], ", "]],\n"), encoding="utf-8")
        assert np.allclose(rows, RECORDED[name], atol=1e-8)
    # verl divides by √(variance + 1e-8) when it whitens, we by the standard deviation + 1e-6.
    tolerance = 1e-5 if name.startswith(("REINFORCE", "GAE", "its baseline")) else 1e-7
    expected = torch.tensor(RECORDED[name], dtype=torch.double)
    assert (ours(make_batch()) - expected).abs().max() <= tolerance
    assert expected.abs().max() > 0.02  # the case does not compare zeros only
