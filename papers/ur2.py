"""UR²: Unify RAG and Reasoning through Reinforcement Learning (arXiv 2508.06165): its tags and
instruction, its stages and numbers, its baseline Vanilla RL, and its variants. Left out: how the
paper evaluates models behind an API (C.4).
"""

from dataclasses import replace

from papers.paper import EVERYTHING, LOOK_UPS, Paper
from prompts import Protocol, tag_pair
from world.tiny import Tiny

# UR² appendix C.6, word for word. The paper's prompts tell the summariser to reply with these two
# sentences if it rejects a query.
_NO_FACT_TO_FIND = (
    "This query requires design, computation, or complex reasoning, which exceeds the capabilities"
    " of a search engine. Please input another query or proceed with direct reasoning."
)
_BOX = " Finish with one short final answer inside \\boxed{}."
PROTOCOLS = {}
PROTOCOLS["ur2"] = Protocol(
    "ur2",
    ("<|begin_of_query|>", "<|end_of_query|>"),
    ("<|begin_of_documents|>", "<|end_of_documents|>"),
    None,
    "Solve the problem step by step. Whenever a fact is missing, look it up: write a short search"
    " query as <|begin_of_query|> your query <|end_of_query|> and stop. What is found is given back"
    " between <|begin_of_documents|> and <|end_of_documents|>; read it and go on. Ask for one plain"
    " fact at a time, in at most 20 words, and write at most {max_searches} queries in all. Never"
    " ask the search engine to calculate or to reason." + _BOX,
    "Solve the problem step by step." + _BOX,
    finish={"": _BOX, "choice": " Finish with: the correct answer is: LETTER."},
    fallback_text=_NO_FACT_TO_FIND,
)
_SEARCH = (
    "Solve the problem step by step. Whenever a fact is missing, look it up: write a short search"
    " query as <search> your query </search> and stop. What is found is given back between"
    " <information> and </information>; read it and go on. Ask for one plain fact at a time, in at"
    " most 20 words, and write at most {max_searches} queries in all. Never ask the search engine"
    " to calculate or to reason."
)
PROTOCOLS["ur2_search"] = replace(  # UR²'s run without stage 1 uses these tags (appendix C.2)
    PROTOCOLS["ur2"],
    name="ur2_search",
    query_tags=tag_pair("search"),
    documents_tags=tag_pair("information"),
    instruction=_SEARCH + _BOX,
)

# -------------------------------------------------------------------------------------------------
# Section 4.4, appendix C.2 and C.4
_ur2 = {
    "protocol": "ur2",
    "algorithm": "reinforce_pp_baseline",
    "group_size": 16,
    "questions_per_step": 64,
    "trajectories_per_update": 256,
    "lr": 2e-6,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    # top_p is 1, not the paper's 0.9, because log-probs are computed under the full distribution.
    "temperature": 1.0,
    "max_searches": 4,
    "max_turn_tokens": 512,
    "turn_tokens": {"math": 3072, "choice": 1536},
    # Summaries for math are sampled as in C.4's evaluations (our reading), others greedily (ours).
    # For training the paper gives only Qwen-3-8B's sampling (C.2).
    "summary_sampling": {"math": [0.3, 0.7, 8192]},
    # Ten documents have 1,291 tokens on average (B.6).
    "documents_per_search": 10,
    "document_tokens": 1536,
    # Used only with --difficulty. The ratio hard : medium : easy is 1 : 1 : 1 for math (C.5) and
    # 7 : 2 : 1 for other tasks (3.3).
    "buckets": {
        "math:hard": 1,
        "math:medium": 1,
        "math:easy": 1,
        "hard": 7,
        "medium": 2,
        "easy": 1,
    },
    "keep_checkpoints": 0,  # all: the paper chooses the best checkpoint afterwards (C.2)
}
_summarised = {"summarizer": "extractive", "task_mixing": False}
_tiny = EVERYTHING | _summarised

# Table 15 gives the steps of each run, up to the checkpoint that was best on the test set (C.2).
_small = {"questions_per_step": 128, "trajectories_per_update": 512, "save_every": 5}  # 4.4, C.2
# How eq. 1 pays for searches depends on the backbone (C.7).
_qwen_7b, _qwen_3b, _llama_8b = (
    {"reward_args": {"variant": name}} for name in ("qwen_7b", "qwen_3b", "llama_8b")
)
_llama_stage2 = {
    "steps": 30,
    # Easy math questions replace the hard ones (C.5), so two thirds of the math questions are easy.
    # Half of the easy ones, as many as replace hard ones, may search (our reading).
    "buckets": {"math:medium": 1, "math:easy": 2, "hard": 7, "medium": 2, "easy": 1},
    "math_searches": {"easy": 0.5},
}
_invalid = {"reward_args": {"fallback_is_invalid": True}}
# Instead of a separate stage 1, the first steps pay a search bonus for multiple choice (C.7). No
# question of the built-in world has options, so there the bonus is paid for any task.
_choice = {
    "stages": {1: _ur2 | {"reward": "ur2_choice", "steps": 100, "task_mixing": True}},
    "tiny": {1: _tiny | {"reward": "ur2_weak"}},
}
UR2 = Paper(
    source="UR² section 4.4, app. C",
    protocols=PROTOCOLS,
    stages={  # stage 1 trains on math of the bucket "dropped": a mean score below 0.2 (C.7)
        1: _ur2 | {"reward": "ur2_stage1", "steps": 10, "buckets": {"math:dropped": 1}},
        2: _ur2 | {"reward": "ur2_stage2", "steps": 40, "task_mixing": True},
    },
    # In stage 2, 6 of the 24 questions of a step forbid searching. Otherwise the model would forget
    # to obey the prompt token that forbids it.
    tiny={
        1: LOOK_UPS | _summarised,
        2: _tiny
        | {
            "questions_per_step": 24,
            "steps": 72,
            "mix": {
                "one_hop": 3,
                "two_hop": 4,
                "unit": 2,
                "arithmetic": 6,
                "known": 3,
                "direct": 6,
            },
        },
    },
    # In the warm-up's traces a search shows a summary, or "None" if it finds nothing or the query
    # asks for no fact. A trace ends with \boxed{...}.
    world=Tiny(
        "{asked} \\boxed{{ {answer}}}<eos>",
        read=" \\boxed{{ {answer}}}",
        summarised=True,
        stop_after_first_hop=0.1,  # with 0.2 and --world_seed 44 stage 2 unlearned the 2nd hop
        width=80,
        steps=480,
        muon_lr=0.01,
        warmup_steps=20,
        decay_from=0.4,
    ),
    punctuation="hotpotqa",  # as its released scorer and reward
    best_by="f1",  # 4.2: F1, EM of letters or a judge; of letters and of math all metrics are equal
    # Appendix C.4. The summariser's sampling is written as temperature/top_p/tokens.
    decoding={
        "temperature": 0.3,
        "top_p": 0.5,
        "summary_sampling": {"math": [0.3, 0.7, 8192], "other": [0.3, 0.5, 2048]},
    },
    # After this warm-up the model hardly ever searches before RL. It has bad habits that the reward
    # must break: it gives two answers and invents passages; if it searches, it does so even for
    # sums and known facts, and several times in a row. It has learned to read summaries and raw
    # passages.
    warm_ups={
        "weak": {
            "kinds": {
                "one_hop": 0.22,
                "two_hop": 0.26,
                "unit": 0.14,
                "arithmetic": 0.28,
                "known": 0.10,
            },
            "choice_without_loss": 0.995,
            "bad_query": 0.25,
            "stop_after_first_hop": 0.2,
            "ignore_document": 0.3,
            "needless_search": 0.6,
            "raw": 0.3,
            "stray": 0.3,
            "twice": 0.3,
            "sloppy": 0.25,
            "prior": 0.04,
            "width": 128,
            "context": 512,
            "steps": 550,
            "muon_lr": 0.0,
            "warmup_steps": 50,
            "decay_from": 0.5,
        }
    },
    variants={
        "qwen_7b": {1: _qwen_7b},
        # C.7's last paragraph extends the 3B model's stage 1 to 15 steps: for multiple choice, and
        # in our reading also for math.
        "qwen_3b": _small | {1: _qwen_3b | {"steps": 15}, 2: {"steps": 47}},
        "llama_8b": {1: _llama_8b, 2: _llama_stage2},
        # Only stage 2 forbids searching in math, because stage 1 learns to search on math questions
        "llama_8b_direct": {1: _llama_8b, 2: _llama_stage2 | {"direct_tasks": "math"}},
        "weak_stage1": _choice | {"reward": "ur2_weak", "steps": 80},  # Table 6
        "fallback_is_invalid": {1: _invalid},
        "judge_partly": {2: {"reward_args": {"partly": 1.0}}},  # as in UR²'s released code
        "five_queries": {"task_searches": {"qa": 5}},  # as UR²'s prompt says
        "unmasked": {2: {"mask_documents": False}},  # ours: what the paper does not ablate
        # ours: a small summariser that repeats itself would write the paper's 8,192 tokens
        "short_notes": {2: {"summary_sampling": {"other": [0.0, 1.0, 96]}}},
    },
)
UR2_CHOICE = replace(
    UR2,
    **_choice,
    variants={
        "qwen_7b": _qwen_7b,
        "qwen_3b": _qwen_3b | _small | {"steps": 85},
        "llama_8b": _llama_8b | {"steps": 30},
        "fallback_is_invalid": _invalid,
        # Table 3. `without_stage1` pays no search bonus and uses other tags (C.2).
        "without_stage1": {
            "reward": "ur2_stage2",
            "protocol": "ur2_search",
            "steps": 110,
            "tiny": {1: _tiny},
        },
        "without_penalty": {"reward_args": {"fallback_penalty": 0.0}, "steps": 110},
        "without_task_mixing": {"task_mixing": False, "steps": 120},
        "gpt_4o_mini_summaries": {
            "steps": 50,
            "summarizer": "https://api.openai.com/v1#gpt-4o-mini",
        },
        "qwen3_8b_summaries": {
            "steps": 50,
            "summarizer": "Qwen/Qwen3-8B",
            # C.2: how Qwen-3-8B samples
            "summary_sampling": {"math": [0.3, 0.7, 2048], "other": [0.3, 0.7, 2048]},
        },
    },
)
# Tables 6 and 7. In `without_summary` and `raw_qa` a search returns five passages, as in Table 10's
# evaluations without summaries (our reading). `raw_qa` and `raw_math` train on questions of any
# difficulty, except that --difficulty still leaves out the bucket "dropped".
_passages = {"documents_per_search": 5, "tiny": {1: EVERYTHING | {"steps": 72}}}
# UR²'s baseline Vanilla RL: in the paper a run trains on math, on open questions or on multiple
# choice. The reward is eq. 2 (our reading), and only open questions may search (C.3).
VANILLA_RL = replace(
    UR2,
    source="UR² section 4.3, app. C.3",
    stages={
        1: _ur2
        | {
            "reward": "ur2_stage2",
            "steps": 25,
            "direct_tasks": "math,choice",
            "save_every": 5,  # for single tasks and for 3B models; otherwise 10 (C.2)
        }
    },
    tiny={1: _tiny | {"steps": 72}},
    variants={
        "qwen_7b_math": {"steps": 40},
        "qwen_7b_qa": {},
        "qwen_7b_mmlu_pro": {"steps": 94},
        "qwen_7b_medqa": {"steps": 47},
        "qwen_7b_choice": {"steps": 60, "save_every": 10},  # two data sets are no single task
        "qwen_3b_math": _small | {"steps": 15},
        "qwen_3b_qa": _small | {"steps": 40},
        "qwen_3b_mmlu_pro": _small | {"steps": 47},
        "qwen_3b_medqa": _small | {"steps": 40},
        "qwen_3b_choice": _small | {"steps": 40},
        "llama_8b_math": {"steps": 30},
        "llama_8b_qa": {"steps": 47},
        "llama_8b_mmlu_pro": {"steps": 60},
        "llama_8b_medqa": {"steps": 30},
        "without_summary": _passages | {"steps": 60},
        "raw_qa": _passages | {"steps": 70, "buckets": {}},
        "raw_math": {"steps": 10, "buckets": {}},
    },
)
