"""Against the functions that others use, where they are installed: pip install --no-deps verl, and
pip install rouge-score. Nothing of verl is loaded but the file with its formulas.
"""

import importlib.util
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
}
EPSILON = 1e-5  # verl divides by the root of (variance + 1e-8), we by (deviation + 1e-6)


@pytest.fixture
def verl(monkeypatch):
    """Its core_algos."""
    for name, attributes in STUBS.items():
        module = ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["verl.utils.import_utils"].deprecated = lambda *_, **__: lambda function: function
    folder = Path(FOUND.submodule_search_locations[0])
    loaded = {}
    for name in ("utils.torch_functional", "trainer.ppo.core_algos"):
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(f"verl.{name}", path)
        loaded[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, loaded[name])
        sys.modules["verl.utils"].torch_functional = loaded["utils.torch_functional"]
        spec.loader.exec_module(loaded[name])
    return loaded["trainer.ppo.core_algos"]


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


def test_rouge_is_that_of_the_package():
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="needs rouge-score")
    scorer = scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    words, rng = "the a cat sat on mat dog ran in park Small U.S. it's".split(), random.Random(0)
    for _ in range(500):
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 30))) for _ in range(2)]
        ours = summary_scores(texts[0], [texts[1]])
        for name, score in scorer.score(texts[1], texts[0]).items():
            assert ours[name] == pytest.approx(score.fmeasure, abs=1e-12)
