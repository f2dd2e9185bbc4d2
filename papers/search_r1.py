"""Search-R1 (arXiv 2503.09516), the usual baseline: its tags and instruction, its numbers."""

from papers.paper import EVERYTHING, Paper
from papers.r_search import R_SEARCH, WITH_CRITIC
from prompts import Protocol, tag_pair
from world.tiny import Tiny

PROTOCOLS = {}
PROTOCOLS["search_r1"] = Protocol(
    "search_r1",
    *map(tag_pair, ("search", "information", "answer")),
    "Reason between <think> and </think> first, and anew whenever something was found. If a fact is"
    " missing, write <search> your query </search> and stop; what is found is given back between"
    " <information> and </information>. Once nothing is missing, answer the question with a few"
    " words as <answer> your answer </answer>.",
    "Reason between <think> and </think> first. Then answer the question with a few words as"
    " <answer> your answer </answer>.",
    other_tags=(tag_pair("think"),),
)

# -------------------------------------------------------------------------------------------------
# Appendix B of arXiv 2503.09516
_search_r1 = {
    "protocol": "search_r1",
    "algorithm": "ppo",
    "reward": "search_r1",
    "steps": 500,
    "group_size": 1,
    "questions_per_step": 512,
    "trajectories_per_update": 256,
    "lr": 1e-6,
    "warmup_ratio": 0.285,
    "critic_lr": 1e-5,
    "critic_warmup_ratio": 0.015,
    "kl_coef": 1e-3,
    "kl_estimator": "k1",
    "temperature": 1.0,
    "max_searches": 4,
    "max_turn_tokens": 500,
    "documents_per_search": 3,
    "document_tokens": 500,
}
# R-Search section 4.2: trained with R-Search's parameters
_aligned = {
    "stages": {1: R_SEARCH.stages[1] | {"protocol": "search_r1", "reward": "search_r1"}},
    "decoding": R_SEARCH.decoding,
}
SEARCH_R1 = Paper(
    source="Search-R1 app. B",
    protocols=PROTOCOLS,
    stages={1: _search_r1},
    tiny={
        1: EVERYTHING
        | {
            "warmup_ratio": 0.0,
            "critic_lr": 1e-3,
            "critic_warmup_ratio": 0.0,
            "kl_coef": 0.0,
            "steps": 40,
        }
    },
    world=Tiny(
        "<think>{thought}</think><answer> {answer}</answer>", between="<think>{note}</think>"
    ),
    punctuation="delete",
    variants={
        "grpo": {"algorithm": "grpo", "group_size": 5, "kl_estimator": "k3"},
        "aligned": _aligned,
        "aligned_ppo": _aligned | WITH_CRITIC,
    },
)
