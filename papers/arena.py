"""ARENA (arXiv 2505.13258): its tags and instruction, its numbers, its variants."""

from dataclasses import replace

from papers.paper import EVERYTHING, HALVES, TWO_FACTS, Paper
from prompts import Protocol, tag_pair
from world.tiny import Tiny

PROTOCOLS = {}
_ARENA = (
    "You get a question between <question> and </question> and numbered references between"
    " <references> and </references>. Answer from the references. Write"
    " exactly three sections and nothing else: <relevance> the numbers of the references that help,"
    " and no others, as a list in square brackets </relevance>, then <analysis> how the answer"
    " follows from these references together; say for each claim which references support it"
    " </analysis>, then <answer> the answer, as short as the question allows, unexplained"
    " </answer>. References 2 and 5, say, are written as <relevance>[2, 5]</relevance>."
)
PROTOCOLS["arena"] = Protocol(
    "arena",
    None,
    None,
    tag_pair("answer"),
    _ARENA,
    _ARENA,
    other_tags=(tag_pair("relevance"), tag_pair("analysis")),
    layout="<question>{question}</question>\n<references>\n{references}\n</references>",
    judge_sees="answers",  # appendix D.3
    document_layouts=("({number}) {text}",) * 2,  # released code: no titles
)
_NAIVE = (
    "You get a question between <question> and </question> and numbered references between"
    " <references> and </references>. Answer from the references. Write exactly two sections and"
    " nothing else: <think> how the answer follows from the references </think>, then <answer>"
    " the answer, as short as the question allows, unexplained </answer>."
)
PROTOCOLS["arena_naive"] = replace(  # section 4.3: neither relevance nor analysis
    PROTOCOLS["arena"],
    name="arena_naive",
    instruction=_NAIVE,
    direct_instruction=_NAIVE,
    other_tags=(tag_pair("think"),),
)
PROTOCOLS["arena_thinking"] = replace(
    PROTOCOLS["arena"], name="arena_thinking", thinking_apart=True
)
_SUMMARY = (
    "You get what to summarise between <question> and </question> and numbered references between"
    " <references> and </references>. Write the summary that is asked for from them. Write"
    " exactly three sections and nothing else: <relevance> the numbers of the references that"
    " help, and no others, as a list in square brackets </relevance>, then <analysis> how the"
    " summary follows from these references together; say for each claim which references support"
    " it </analysis>, then <summary> the summary, in whole sentences </summary>. References 2 and"
    " 5, say, are written as <relevance>[2, 5]</relevance>."
)
PROTOCOLS["arena_summary"] = replace(  # appendix H.2
    PROTOCOLS["arena"],
    name="arena_summary",
    answer_tags=tag_pair("summary"),
    instruction=_SUMMARY,
    direct_instruction=_SUMMARY,
)

# -------------------------------------------------------------------------------------------------
# Section 4.4 and appendix F. In our copy of the paper the KL weight, the updates per batch and the
# clip range are missing from appendix F; arXiv 2505.13258v1 prints them: 0.04, 1 and 0.2. The
# names of the two KL estimators are missing from 3.2. They must be k3 (GRPO's own) and k2, because
# 3.2 and appendix B prove properties that these two have.
_arena = {
    "protocol": "arena",
    "algorithm": "grpo",
    "reward": "arena",
    "group_size": 7,
    "questions_per_step": 256,
    "trajectories_per_update": 1792,
    "lr": 3e-6,
    "kl_estimator": "k2",
    "kl_coef": 0.04,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "temperature": 0.9,
    "max_searches": 0,
    "max_turn_tokens": 256,  # its public configuration
    "steps": 95,  # table 10; 95 · 256 is about one epoch over the 25,000 questions
}
# The reward is format and answer only.
_two_terms = {"reward_args": {"relevance_reward": False, "bonus": 0.0}, "kl_estimator": "k3"}
_summaries = {"protocol": "arena_summary", "steps": 20}
ARENA = Paper(
    source="ARENA section 4.4, app. F",
    protocols=PROTOCOLS,
    stages={1: _arena},
    tiny={1: EVERYTHING | TWO_FACTS | {"max_searches": 0, "steps": 40}},
    # The prompt has four numbered references. A trace of `practice` only reads or only cites. The
    # others cite references, mostly analyse them, and answer.
    world=Tiny(
        citation="<relevance>[{numbers}]",
        analysis="<analysis>{note}{thought}</analysis>",
        end="{citation}</relevance>{analysis}<answer> {answer}</answer>",
        uncited="<think>{note}{thought}</think><answer> {answer}</answer>",
        layout="facts",
        kinds=HALVES,
        practice=0.65,
        steps=900,
        decay_from=0.75,
    ),
    punctuation="underscore",  # D.1; released code: --punctuation plain, --reward arena_code
    variants={
        "naive_grpo": _two_terms | {"protocol": "arena_naive"},  # section 5.3, figure 3; 4.3
        "no_relevance_no_bonus": _two_terms,  # not in the paper: Naive-GRPO's reward, ARENA's form
        "as_its_code": {  # its public configuration
            "reward": "arena_code",
            "lr_schedule": "cosine",
            "warmup_ratio": 0.1,
            "loss_aggregation": "token",
        },
        "k3": {"kl_estimator": "k3"},  # appendix G
        "no_bonus": {"reward_args": {"bonus": 0.0}},  # appendix I
        "f1": {"reward_args": {"answer_metric": "f1"}},
        "judge": {"judge": "https://api.openai.com/v1#gpt-4o-2024-11-20"},  # appendix D.3
        "no_relevance": {"reward_args": {"relevance_reward": False}},  # not in the paper
        "thinking": {"protocol": "arena_thinking"},  # 4.3, note 2
        # Appendix H.2, table 9: 5,000 training examples; one epoch (20 steps) is our reading.
        "summaries": _summaries,
        "naive_summaries": _two_terms | _summaries,
    },
)
