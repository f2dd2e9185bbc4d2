"""R-Search (arXiv 2506.04185): its tags and instruction, its numbers, its variants."""

from dataclasses import replace

from papers.paper import EVERYTHING, HALVES, TWO_FACTS, Paper
from prompts import Protocol, tag_pair
from world.tiny import Tiny

PROTOCOLS = {}
PROTOCOLS["r_search"] = Protocol(
    "r_search",
    *map(tag_pair, ("search", "observation", "answer")),
    "Answer the question step by step, and begin each step with what you think. Whenever a fact is"
    " missing, write a specific search query as <search> your query </search> and stop; what is"
    " found is given back between <observation> and </observation>. Search as often as you need."
    " If you searched, then collect, once you know the answer, everything in the observations that"
    " may bear on the question, as <original_evidence> what they say </original_evidence>: all of"
    " it, in their own words, with nothing changed. If you did not search, leave that section out."
    " End with the answer as <answer> your answer </answer>.",
    "Answer the question, reasoning step by step. End with the answer in a few words as <answer>"
    " your answer </answer>.",
    evidence_tags=tag_pair("original_evidence"),
    document_layouts=('(Title: "{title}") {text}', "{text}"),  # tables 8, 9
)
_PLAIN = (
    "Answer the question step by step, and begin each step with what you think. Whenever a fact is"
    " missing, write a specific search query as <search> your query </search> and stop; what is"
    " found is given back between <observation> and </observation>. Search as often as you need."
    " End with the answer as <answer> your answer </answer>."
)
# R-Search's ablation without the evidence section.
PROTOCOLS["r_search_plain"] = replace(
    PROTOCOLS["r_search"], name="r_search_plain", instruction=_PLAIN, evidence_tags=None
)

# -------------------------------------------------------------------------------------------------
# Section 4.3
_r_search = {
    "protocol": "r_search",
    "algorithm": "grpo",
    "reward": "r_search",
    "steps": 195,
    "group_size": 5,
    "questions_per_step": 256,
    "trajectories_per_update": 1280,
    "lr": 1e-6,
    "warmup_ratio": 0.95,
    "kl_coef": 1e-3,
    "kl_estimator": "k3",
    "temperature": 1.0,  # ours
    # Not in the paper; as in Search-R1's code
    "max_searches": 4,
    "max_turn_tokens": 500,
    "documents_per_search": 3,  # 5 with --decoding paper
}
# PPO (5.3) has the settings of 4.3 too. The paper does not say whether PPO's KL is in the reward
# (as k1 is) or in the loss, nor the critic's learning rate and warm-up; these come from the paper's
# script.
WITH_CRITIC = {
    "algorithm": "ppo",
    "kl_estimator": "k1",
    "critic_lr": 1e-5,
    "critic_warmup_ratio": 0.05,
}
_tiny = EVERYTHING | TWO_FACTS | {"warmup_ratio": 0.0, "kl_coef": 0.0, "steps": 40}
_ppo = WITH_CRITIC | {"tiny": {1: _tiny | {"critic_lr": 1e-3, "critic_warmup_ratio": 0.0}}}
R_SEARCH = Paper(
    source="R-Search section 4.3",
    protocols=PROTOCOLS,
    stages={1: _r_search},
    tiny={1: _tiny},
    # A search shows two passages. A trace may copy the relevant one as evidence and answer from it.
    world=Tiny("{evidence}<answer> {answer}</answer>", layout="facts", kinds=HALVES, steps=350),
    punctuation="delete",
    decoding={"temperature": 0.1, "documents_per_search": 5},  # appendix A.3, section 4.3
    variants={
        "without_evidence": {  # table 3
            "protocol": "r_search_plain",
            "reward_args": {"evidence_reward": False},
        },
        "whole_reply": {"whole_reply": True},  # eq. 4
        "ppo": _ppo,
        # one response per question, as in the paper's script
        "ppo_code": _ppo | {"group_size": 1, "trajectories_per_update": 256},
    },
)
