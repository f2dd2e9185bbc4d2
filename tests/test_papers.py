"""Tests the papers' own numbers in papers/. tests/test_docs.py compares those of the variants with
docs/papers.md, and test_extend.py tests adding a paper.
"""

import pytest

import papers.__main__
from flags import resolve
from metrics import PUNCTUATION
from papers import PAPERS, PROTOCOLS, paper_of
from world.world import KINDS

EVERYWHERE = [(name, stage) for name, paper in PAPERS.items() for stage in paper.stages]

# -------------------------------------------------------------------------------------- the numbers

# The papers' tables of hyper-parameters at 7B, copied by hand. Settings that a paper does not
# mention are left out.
NUMBERS = {
    ("ur2", 1): """
        algorithm reinforce_pp_baseline   clip_low 0.2   clip_high 0.2   group_size 16
        questions_per_step 64   trajectories_per_update 256   lr 2e-6   kl_coef 0   temperature 1
        max_searches 4   max_turn_tokens 512
        documents_per_search 10   document_tokens 1536   steps 10""",
    # one epoch: ceil(350 / 64) steps
    ("r1_searcher", 1): """
        algorithm reinforce_pp   group_size 16   questions_per_step 64   trajectories_per_update 256
        lr 2e-6   kl_coef 0   kl_estimator k1   temperature 1   max_searches 8   max_turn_tokens 512
        documents_per_search 5   steps 6""",
    # 5 · 256 trajectories
    ("r_search", 1): """
        algorithm grpo   group_size 5   questions_per_step 256   trajectories_per_update 1280
        lr 1e-6   warmup_ratio 0.95  kl_coef 1e-3   temperature 1   max_searches 4
        max_turn_tokens 500   documents_per_search 3   steps 195""",
    # arXiv 2503.09516, appendix B: batches of 512, split in two
    ("search_r1", 1): """
        algorithm ppo   group_size 1   questions_per_step 512   trajectories_per_update 256
        lr 1e-6   critic_lr 1e-5   warmup_ratio 0.285   critic_warmup_ratio 0.015   kl_coef 1e-3
        clip_low 0.2   clip_high 0.2   gae_lambda 1   temperature 1   max_searches 4
        max_turn_tokens 500   document_tokens 500   documents_per_search 3   steps 500""",
    # 32 · 32 trajectories; the two clips of DAPO; 2048 + 16384 tokens
    ("when_to_search", 1): """
        algorithm dapo   group_size 32   questions_per_step 32   trajectories_per_update 1024
        lr 1e-6   kl_coef 0   temperature 1   top_p 1   max_searches 5   max_turn_tokens 8192
        documents_per_search 5   document_tokens 4096   max_context 18432
        clip_low 0.2   clip_high 0.28   loss_aggregation token""",
    # 7 · 256 trajectories
    ("arena", 1): """
        algorithm grpo   kl_estimator k2   group_size 7   questions_per_step 256
        trajectories_per_update 1792   lr 3e-6   kl_coef 0.04   temperature 0.9   max_searches 0
        max_turn_tokens 256   steps 95   clip_low 0.2
        clip_high 0.2""",
}
# The numbers of steps are those of the checkpoints in table 15.
NUMBERS["ur2", 2] = NUMBERS["ur2", 1].replace("steps 10", "steps 40")
NUMBERS["ur2_choice", 1] = NUMBERS["ur2", 2].replace("steps 40", "steps 100 reward ur2_choice")
NUMBERS["vanilla_rl", 1] = NUMBERS["ur2", 2].replace("steps 40", "steps 25 reward ur2_stage2")
NUMBERS["vanilla_rl", 1] += " direct_tasks math,choice"
# one epoch: ceil(8148 / 64) steps
NUMBERS["r1_searcher", 2] = NUMBERS["r1_searcher", 1].replace("steps 6", "steps 128")
NUMBERS["when_to_search", 2] = NUMBERS["when_to_search", 1]


@pytest.mark.parametrize("name, stage", EVERYWHERE)
def test_the_papers_numbers(name, stage):
    settings = resolve(name, stage, tiny=False)
    words = NUMBERS[name, stage].split()
    for setting, number in zip(words[::2], words[1::2], strict=True):
        value = getattr(settings, setting)
        assert value == (number if isinstance(value, str) else float(number)), setting


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_s_record_is_complete(name):
    paper = PAPERS[name]
    assert set(paper.tiny) == set(paper.stages) and paper.punctuation in PUNCTUATION
    kinds = {kind for stage in paper.stages for kind in resolve(name, stage, tiny=True).mix}
    assert kinds <= {*paper.world.kinds, "direct"} <= {*KINDS, "direct"}


def test_every_protocol_belongs_to_a_paper():
    assert {paper_of(name).source for name in PROTOCOLS} <= {p.source for p in PAPERS.values()}
    assert paper_of("when_to_search") is PAPERS["when_to_search"]  # not the record of the ablation


def test_python_papers_prints_the_settings_of_every_stage_and_what_a_variant_changes(capsys):
    papers.__main__.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(EVERYWHERE) + sum(len(p.variants) for p in PAPERS.values())
    assert "arena:k3 |  | kl_estimator k3 | ARENA section 4.4, app. F" in lines
