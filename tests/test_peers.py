"""Against the functions that others use, where they are installed: pip install --no-deps verl trl,
and pip install rouge-score. Nothing of verl is loaded but the files with its formulas, and of TRL
one statement is run.
"""

import ast
import importlib.util
import math
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import grpo
import kl
import ppo
import reinforce_pp
from metrics import summary_scores

FOUND = importlib.util.find_spec("verl")
TRL = importlib.util.find_spec("trl")
needs_verl = pytest.mark.skipif(FOUND is None, reason="needs verl (pip install --no-deps verl)")
STUBS = {  # what that file imports, and its formulas do not call
    "omegaconf": ["DictConfig"],
    "tensordict": ["TensorDict"],
    "verl": [],
    "verl.trainer": [],
    "verl.workers": [],
    "verl.utils": ["as_torch_index", "group_mean_std"],
    "verl.utils.device": ["get_device_name", "get_torch_device"],
    "verl.trainer.config": ["AlgoConfig"],
    "verl.workers.config": ["ActorConfig"],
    "verl.utils.import_utils": ["deprecated"],
    "verl.protocol": ["DataProto"],
    "verl.trainer.config.algorithm": ["RolloutCorrectionConfig"],
    "verl.workers.config.actor": ["PolicyLossConfig"],
}
FILES = "utils.torch_functional", "trainer.ppo.core_algos", "trainer.ppo.rollout_corr_helper"
EPSILON = 1e-5  # verl divides by the root of (variance + 1e-8), we by (deviation + 1e-6)


@pytest.fixture
def verl(monkeypatch):
    """Its core_algos and, as `rollout`, its rollout_corr_helper."""
    for name, attributes in STUBS.items():
        module = ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["verl.utils.import_utils"].deprecated = lambda *_, **__: lambda function: function
    folder = Path(FOUND.submodule_search_locations[0])
    loaded = {}
    for name in FILES:
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(f"verl.{name}", path)
        loaded[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, loaded[name])
        sys.modules["verl.utils"].torch_functional = loaded["utils.torch_functional"]
        spec.loader.exec_module(loaded[name])
    loaded[FILES[1]].rollout = loaded[FILES[2]]
    return loaded[FILES[1]]


@pytest.fixture(params=range(5))
def batch(request):
    """[64, 50] of groups of 8, with masked tokens in between."""
    torch.manual_seed(request.param)
    mask = (torch.rand(64, 50) < 0.6).double()
    mask[:, 0] = 1
    rewards = torch.randint(0, 4, (64,)).double()
    tokens = torch.zeros(64, 50).double()
    tokens[ppo.last_model_token(mask)] = rewards
    old = -2 * torch.rand(64, 50).double()
    new, ref = (old + noise * torch.randn(64, 50).double() for noise in (0.4, 0.3))
    values, advantages = torch.randn(2, 64, 50).double()
    return SimpleNamespace(**locals())


def close(ours, theirs, mask=1.0, within: float = 1e-7):
    assert ((ours - theirs) * mask).abs().max() <= within


@needs_verl
def test_advantages_are_verls(verl, batch):
    mask, rewards, index = batch.mask, batch.rewards, np.repeat(np.arange(8), 8)
    for by_std, ours in ((True, grpo.group_normalize), (False, grpo.group_center)):
        theirs, _ = verl.compute_grpo_outcome_advantage(
            batch.tokens.clone(), mask, index, norm_adv_by_std_in_grpo=by_std
        )
        close(ours(rewards, 8)[:, None], theirs, mask)
    settings = SimpleNamespace(gamma=1.0)
    theirs, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        batch.tokens.clone(), mask, settings
    )
    ours = reinforce_pp.returns_to_go(batch.tokens, mask)
    close(ours, returns, mask)
    close(ppo.whiten(ours, mask), theirs, mask, EPSILON)
    values = batch.values * mask
    theirs, returns = verl.compute_gae_advantage_return(batch.tokens, values, mask, 1.0, 0.95)
    ours, our_returns = ppo.gae(batch.tokens, values, mask, 1.0, 0.95)
    close(our_returns, returns, mask)
    close(ppo.whiten(ours, mask), theirs, mask, EPSILON)


@needs_verl
@pytest.mark.parametrize(
    "mode, weights",
    [("token-mean", ppo.token_weights), ("seq-mean-token-mean", ppo.sequence_weights)],
)
def test_losses_are_verls(verl, batch, mode, weights):
    class Settings(SimpleNamespace):
        def get(self, name, default):
            return getattr(self, name, default)

    clips = Settings(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    clips.global_batch_info = {}
    theirs, _ = verl.compute_policy_loss_vanilla(
        batch.old, batch.new, batch.advantages, batch.mask, mode, clips
    )
    ours, _ = ppo.clipped_surrogate(batch.new, batch.old, batch.advantages, 0.2, 0.28, 3.0)
    close((ours * weights(batch.mask)).sum(), theirs)
    theirs, _ = verl.compute_value_loss(
        batch.new, batch.advantages, batch.old, batch.mask, 0.2, mode
    )
    ours, _ = ppo.value_loss(batch.new, batch.old, batch.advantages, 0.2)
    close((ours * weights(batch.mask)).sum(), theirs, within=1e-6)


@needs_verl
def test_kls_are_verls(verl, batch):
    for name, ours in (("k1", kl.k1), ("k2", kl.k2), ("k3", kl.k3), ("abs", kl.k_abs)):
        close(ours(batch.new, batch.ref), verl.kl_penalty(batch.new, batch.ref, name))


def our_weights(batch, mode: str, scale: float) -> torch.Tensor:
    """[64, 50], 0 on masked tokens; the sampler is at this distance from batch.old."""
    batch.log_ratio = scale * (batch.old - batch.new)
    batch.old_logprobs, batch.sampled_logprobs = batch.log_ratio, torch.zeros(64, 50)
    batch.response_mask = batch.mask
    return ppo.mismatch_weights(batch, mode) * batch.mask


@needs_verl
@pytest.mark.parametrize("scale", [1.0, 0.03])
def test_weights_for_the_sampler_are_verls(verl, batch, scale):
    for mode in ("token", "sequence"):
        ours = our_weights(batch, mode, scale)
        of_verl = verl.rollout.compute_rollout_correction_weights
        theirs, _ = of_verl(batch.log_ratio, batch.mask, mode, 2.0)
        close(ours, theirs, within=1e-6)
    # Its bounds are on 1 / ρ; what it rejects leaves its mask, and so its denominators.
    for mode, kind, bounds in (
        ("mask", "token_k1", "0.5_2.0"),
        ("row", "seq_mean_k1", f"{1 / 1.001}_{1 / 0.999}"),
    ):
        batch.mismatch_weights = our_weights(batch, mode, scale)
        of_verl = verl.rollout.compute_rollout_rejection_mask
        kept, _ = of_verl(batch.log_ratio, batch.mask, kind, bounds)
        assert torch.equal(ppo.trained_tokens(batch), kept)


@pytest.mark.skipif(TRL is None, reason="needs trl (pip install --no-deps trl)")
@pytest.mark.parametrize("scale", [1.0, 0.03])
@pytest.mark.parametrize(
    "mode, name, clip_min, clip_max",
    [
        ("token", "token_truncate", None, 2.0),
        ("sequence", "sequence_truncate", None, 2.0),
        ("mask", "token_mask", 0.5, 2.0),
        ("sequence_mask", "sequence_mask", None, 3.0),
    ],
)
def test_weights_for_the_sampler_are_those_of_trl(batch, mode, name, clip_min, clip_max, scale):
    """TRL computes them in a method of 500 lines, of which only this statement is run."""
    ours, prefix = our_weights(batch, mode, scale), "vllm_importance_sampling_"
    own = {"mode": name, "clip_min": clip_min, "clip_max": clip_max, "correction": True}
    trainer = SimpleNamespace(use_vllm=True, **{prefix + key: own[key] for key in own})
    names = {"self": trainer, "completion_mask": batch.mask, "tool_mask": None, "torch": torch}
    names |= {"old_per_token_logps": batch.log_ratio, "sampling_per_token_logps": 0.0, "math": math}
    folder = Path(TRL.submodule_search_locations[0], "trainer")
    tree, ratio = ast.parse((folder / "grpo_trainer.py").read_text("utf-8")), f"{prefix}ratio"
    ifs = [n for n in ast.walk(tree) if isinstance(n, ast.If) and f"{ratio} = " in ast.unparse(n)]
    whole = [n for n in ifs if ast.unparse(n.test).endswith("_correction")]
    exec(compile(ast.Module(whole[-1:], []), "trl", "exec"), names)
    close(ours, names[ratio] * batch.mask, within=1e-6)


def test_rouge_is_that_of_the_package():
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="needs rouge-score")
    scorer = scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    words, rng = "the a cat sat on mat dog ran in park Small U.S. it's".split(), random.Random(0)
    for _ in range(500):
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 30))) for _ in range(2)]
        ours = summary_scores(texts[0], [texts[1]])
        for name, score in scorer.score(texts[1], texts[0]).items():
            assert ours[name] == pytest.approx(score.fmeasure, abs=1e-12)
