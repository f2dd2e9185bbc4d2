"""Learning When to Search (openreview XVtORJ0AXN): its tags and instruction, its stages and
numbers, its variants.
"""

from dataclasses import replace

from papers.paper import EVERYTHING, TINY, Paper
from prompts import Protocol, tag_pair
from world.tiny import Tiny

PROTOCOLS = {}
PROTOCOLS["when_to_search"] = Protocol(
    "when_to_search",
    *map(tag_pair, ("search", "information", "answer")),
    "Answer the question in sections. Always begin with <think> a short sketch of your reasoning,"
    " from what you know yourself </think>. If you know enough, sum your reasoning up in <reflect>"
    " your summary </reflect>, answer, and do not search. Only if a fact is truly missing, write a"
    " query as <search> your query </search> and stop. A query is no question: it is a few key"
    " words, as short as can be, and yet with the clues that are needed, such as names, dates,"
    " places and the main concepts. What is found is given back between <information> and"
    " </information>. If it is reliable and enough, join it to your reasoning in <reflect> your"
    " conclusion </reflect> and answer; if it is not enough, or contradicts what you know, say so"
    " in <reflect> what is wrong </reflect> and, if need be, write a better query. End with the"
    " answer, short and clear, as <answer> your answer </answer>. Your own reasoning always comes"
    " first: searching is the last resort, and no habit. Write nothing outside the sections.",
    "Answer the question in sections: <think> what is asked and what you know of it </think>, then"
    " <reflect> your check </reflect>, then the answer in a few words as <answer> your answer"
    " </answer>. Write nothing outside the sections.",
    other_tags=(tag_pair("think"), tag_pair("reflect")),
    judge_sees="normalized",  # appendix B.4
    document_layouts=(  # Tables 7 and 9
        'Doc {number} (Title: "{title}") {text}',
        "Doc {number} {text}",
    ),
)
# In section 3.2 of When to Search, the model generates until EOS, also after its answer.
PROTOCOLS["when_to_search_eos"] = replace(
    PROTOCOLS["when_to_search"], name="when_to_search_eos", stop_at_answer=False
)

# -------------------------------------------------------------------------------------------------
# Table 5; each stage has half of its 500 steps (our choice)
_when_to_search = {
    "protocol": "when_to_search",
    "algorithm": "dapo",
    "steps": 250,
    "group_size": 32,
    "questions_per_step": 32,
    "trajectories_per_update": 1024,
    "lr": 1e-6,
    # The paper gives no clip range; this one is the DAPO paper's.
    "clip_low": 0.2,
    "clip_high": 0.28,
    "loss_aggregation": "token",
    "kl_coef": 0.0,  # as section 3.2 says; Table 5 has 1e-4 (variant `kl`)
    "temperature": 1.0,
    "documents_per_search": 5,
    "document_tokens": 4096,
    "max_searches": 5,  # we read Table 5's five turns as searches
    "max_turn_tokens": 8192,
    "max_context": 18432,  # prompt 2048 + response 16384
    # The filter `correct` would drop groups that are all wrong or all right. But the rewards in
    # such a group may differ by the number of searches: in stage 1 those of wrong answers (eq. 10),
    # in stage 2 those of right answers (eq. 11).
    "filter_by": "answer",
    "save_every": 30,  # appendix B.3
    "eval_questions": 0.2,  # B.3, with --eval_every: a share of --data is held out
}
WHEN_TINY = {
    "mix": {"one_hop": 4, "two_hop": 4, "unit": 1, "arithmetic": 2, "known": 3},
    "max_resample": 1,
    "max_context": 0,
    "eval_questions": 100,
}
# One reward throughout, and its settings for the tiny model
_one_stage = {
    "stages": {1: _when_to_search | {"steps": 500}},
    "tiny": {1: EVERYTHING | WHEN_TINY | {"steps": 45}},
}
_plain = {"reward_args": {"beta": 0.0}}  # answer term: 1 if right and −1 if wrong
WHEN_TO_SEARCH = Paper(
    source="When to Search section 4, Table 5",
    protocols=PROTOCOLS,
    stages={
        1: _when_to_search | {"reward": "when_to_search_stage1"},
        2: _when_to_search | {"reward": "when_to_search_stage2"},
    },
    tiny={1: TINY | WHEN_TINY | {"steps": 5}, 2: EVERYTHING | WHEN_TINY | {"steps": 40}},
    # Each trace but those of `practice` has the sections think, then search and reflect for each
    # query (only reflect if there is no query), then answer.
    world=Tiny(
        opening="<think>{asked}</think>",
        between="<reflect>{note}</reflect>",
        no_note=" none",
        end="<reflect>{asked} {answer}</reflect><answer> {answer}</answer>",
    ),
    punctuation="delete",
    # After these warm-ups the model hardly ever searches before RL. Of the traces with searches,
    # only one in 100 or in 200 has a loss on the token that decides to search.
    warm_ups={
        "weak": {"choice_without_loss": 0.99, "prior": 0.05},
        "rare": {"choice_without_loss": 0.995, "prior": 0.02},
    },
    variants={
        # Table 2. With --data all checkpoints are kept, because Table 2 compares them.
        "unified": _one_stage | {"reward": "when_to_search_unified", "keep_checkpoints": 0},
        # Table 4. Its row "w/o stage one" has two readings: the reward of stage two throughout, or,
        # as in section 4.5, an answer term of ±1 in stage one, whatever the searches.
        "without_stage_one": _one_stage | {"reward": "when_to_search_stage2"},
        "plain_stage_one": {1: _plain},
        "without_stage_two": _one_stage | {"reward": "when_to_search_stage1"},
        "plain_stage_two": {2: _plain},  # 4.5
        "without_r_s": {"left_out": "retrieval"},
        "without_r_a": {"left_out": "answer", "filter_by": "total"},
        "to_the_end": {"protocol": "when_to_search_eos"},  # 3.2
        "kl": {"kl_coef": 1e-4, "kl_estimator": "k3"},  # Table 5; GRPO's estimator
        "half_similarity": {"reward_args": {"similarity": 0.5}},  # eq. 8 as printed
    },
)
