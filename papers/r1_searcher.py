"""R1-Searcher (arXiv 2503.05592): its tags and instruction, stages and numbers, variants."""

from dataclasses import replace

from papers.paper import EVERYTHING, LOOK_UPS, Paper
from prompts import Protocol, tag_pair
from world.tiny import Tiny

PROTOCOLS = {}
PROTOCOLS["r1_searcher"] = Protocol(
    "r1_searcher",
    ("<|begin_of_query|>", "<|end_of_query|>"),
    ("<|begin_of_documents|>", "<|end_of_documents|>"),
    tag_pair("answer"),
    "Answer the question. First think between <think> and </think>. While thinking, whenever a fact"
    " is missing or uncertain, write a query as <|begin_of_query|> your key words <|end_of_query|>"
    " and stop; what is found is given back between <|begin_of_documents|> and"
    " <|end_of_documents|>. A query is a list of key words and no sentence, and asks for a single"
    " triple: one relation of one subject. After </think> give the final answer, a few words at"
    " most, as <answer> your answer </answer>.",
    "Answer the question. First think between <think> and </think>, then give the final answer, a"
    " few words at most, as <answer> your answer </answer>.",
    prompt_suffix="<think>",
    other_tags=(tag_pair("think"),),
)
# In section 2.2.2 only the end tag of a query pauses the model: it goes on after its answer.
PROTOCOLS["r1_searcher_eos"] = replace(
    PROTOCOLS["r1_searcher"], name="r1_searcher_eos", stop_at_answer=False
)

# -------------------------------------------------------------------------------------------------
# Section 3.3. The paper's retriever is --retriever dense --encoder BAAI/bge-large-en-v1.5, and
# GPT-4o-mini judges its evaluations (3.1).
_r1_searcher = {
    "protocol": "r1_searcher",
    "algorithm": "reinforce_pp",
    "group_size": 16,
    "questions_per_step": 64,
    "trajectories_per_update": 256,
    "lr": 2e-6,
    "kl_coef": 0.0,
    "kl_estimator": "k1",  # for the variant llama_8b
    "temperature": 1.0,
    "max_searches": 8,
    "max_turn_tokens": 512,
    "documents_per_search": 5,  # ours; the paper gives no number, its code has 3
}
R1_SEARCHER = Paper(
    source="R1-Searcher section 3.3",
    protocols=PROTOCOLS,
    # One epoch over Table 1's 350 questions in stage 1 and over its 8,148 in stage 2. Its numbers
    # (`mix`) are used only with --difficulty.
    stages={
        1: _r1_searcher
        | {
            "reward": "r1_searcher_stage1",
            "steps": 6,
            "mix": {"hotpotqa:medium": 200, "2wiki:medium": 150},
        },
        2: _r1_searcher
        | {
            "reward": "r1_searcher_stage2",
            "steps": 128,
            "mix": {
                "hotpotqa:medium": 2561,
                "hotpotqa:hard": 2000,
                "2wiki:medium": 1087,
                "2wiki:hard": 2500,
            },
        },
    },
    tiny={1: LOOK_UPS, 2: EVERYTHING},
    world=Tiny(end="{thought}</think>\n\n<answer> {answer}</answer>"),
    punctuation="plain",  # eq. 4; the released code: --punctuation space
    warm_ups={"verbose": {"verbose": 0.9, "prior": 0.3}},
    variants={
        "llama_8b": {"kl_coef": 1e-4},  # section 3.3
        # Table 3. The KL weight is the one that the paper gives for Llama.
        "grpo": {"algorithm": "grpo", "kl_coef": 1e-4, "kl_estimator": "k3"},
        "em": {2: {"reward_args": {"answer_metric": "em"}}},  # eq. 5, table 5
        "cem": {2: {"reward_args": {"answer_metric": "cem"}}},
        "as_its_code": {  # its scripts' advantage: R minus the group's mean, whitened over tokens
            "algorithm": "reinforce_pp_baseline",
            "group_std": False,
            "whiten_tokens": True,
        },
        "to_the_end": {"protocol": "r1_searcher_eos"},  # 2.2.2
        # Section 4.3, table 7: one of the two data sets, with its numbers of Table 1 and, as our
        # reading, one epoch over them: 200 / 64 and 4,561 / 64 steps, or 150 / 64 and 3,587 / 64,
        # rounded up.
        "hotpotqa_only": {
            1: {"steps": 4, "mix": {"hotpotqa:medium": 200}},
            2: {"steps": 72, "mix": {"hotpotqa:medium": 2561, "hotpotqa:hard": 2000}},
        },
        "2wiki_only": {
            1: {"steps": 3, "mix": {"2wiki:medium": 150}},
            2: {"steps": 57, "mix": {"2wiki:medium": 1087, "2wiki:hard": 2500}},
        },
        # Section 4.3, table 6: medium questions replace the difficult ones.
        "without_difficult": {2: {"mix": {"hotpotqa:medium": 4561, "2wiki:medium": 3587}}},
    },
)
