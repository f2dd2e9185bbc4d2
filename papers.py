"""The settings of each paper: one record per paper, with the sources of its numbers.

    protocols    names of protocols in prompts.py: the paper's own, then those of its variants
    stages       {stage: the paper's settings}; all other settings have their defaults
    tiny         {stage: settings that replace these for the tiny model on the built-in world}
    world        the tiny model's supervised warm-up: the form and flaws of its traces, its steps
    warm_ups     weaker warm-ups by name (--toy_init), on which the paper's claims can be tested
    good_format  tells whether a trajectory has the paper's format; evaluations report how many do
    punctuation  how the paper's scorer treats punctuation in answers, a key of metrics.PUNCTUATION
    decoding     settings of the paper's evaluations (--decoding paper); {} means greedy
    variants     other backbones, data and ablations by name (--variant), each a record of its own

A paper is described in three files: tags and instructions in prompts.py, rewards in rewards.py, and
settings here. To add a paper, extend these three files; every command then knows it.
Left out: how the papers evaluate models behind an API (UR² C.4), and the papers' hardware.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import rewards
from errors import InputError, check_value, run_main
from trajectory import Trajectory
from world.tiny import Tiny


@dataclass(frozen=True)
class Paper:
    source: str
    protocols: tuple[str, ...]
    stages: dict[int, dict]
    tiny: dict[int, dict]
    good_format: Callable[[Trajectory], bool]
    world: Tiny
    punctuation: str = "space"
    decoding: dict = field(default_factory=dict)
    warm_ups: dict[str, Tiny] = field(default_factory=dict)
    # init=False: a copy that `replace` makes starts without variants.
    variants: dict[str, "Paper"] = field(default_factory=dict, init=False)

    def warmed_up(self, name: str) -> Tiny:
        return self.warm_ups[name] if name else self.world


def varied(paper: Paper, **changes) -> Paper:
    """Returns a copy of the paper with these settings changed in each of its stages."""
    return replace(paper, stages={n: stage | changes for n, stage in paper.stages.items()})


# The tiny model has only 0.48M weights (0.20M in `make train`) and no training but its warm-up, so
# its learning rate is at least 150 times UR²'s 2e-6. Its texts are short, hence the low limits.
TINY = (
    {"lr": 3e-4, "group_size": 8, "questions_per_step": 16, "trajectories_per_update": 64}
    | {"max_turn_tokens": 24, "turn_tokens": "", "max_searches": 4}
    | {"save_every": 10, "keep_checkpoints": 2}
    | {"documents_per_search": 1, "document_tokens": 48, "title_boost": 4, "groups_kept": -1}
)
LOOK_UPS = TINY | {"steps": 12, "mix": "one_hop=3,two_hop=4,unit=1"}
EVERYTHING = (
    TINY
    | {"steps": 60, "trajectories_per_update": 32, "lr": 5e-4, "lr_schedule": "linear"}
    | {"mix": "one_hop=4,two_hop=4,unit=1,arithmetic=2,known=2"}
)
TWO_FACTS = {"mix": "one_hop=1,two_hop=1", "max_turn_tokens": 40}
TWO_FACTS |= {"documents_per_search": 2, "document_tokens": 64}
HALVES = {"one_hop": 0.5, "two_hop": 0.5}

_ur2 = (  # section 4.4, appendix C.2 and C.4
    {"protocol": "ur2", "algorithm": "reinforce_pp_baseline"}
    | {"group_size": 16, "questions_per_step": 64, "trajectories_per_update": 256}
    | {"lr": 2e-6, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0}
    # top_p is 1, not the paper's 0.9, because log-probs are computed under the full distribution.
    | {"temperature": 1.0, "max_searches": 4}
    | {"max_turn_tokens": 512, "turn_tokens": "math=3072,choice=1536"}
    # Summaries for math are sampled as in C.4's evaluations (our reading), others greedily (ours).
    # For training the paper gives only Qwen-3-8B's sampling (C.2).
    | {"summary_sampling": "math=0.3/0.7/8192"}
    # Ten documents have 1,291 tokens on average (B.6).
    | {"documents_per_search": 10, "document_tokens": 1536}
    # Used only with --difficulty. The ratio hard : medium : easy is 1 : 1 : 1 for math (C.5) and
    # 7 : 2 : 1 for other tasks (3.3).
    | {"buckets": "math:hard=1,math:medium=1,math:easy=1,hard=7,medium=2,easy=1"}
    | {"keep_checkpoints": 0}  # all: the paper chooses the best checkpoint afterwards (C.2)
)
_summarised = {"summarizer": "extractive", "task_mixing": False}
UR2 = Paper(
    source="UR² section 4.4, app. C",
    protocols=("ur2", "ur2_search"),
    stages={  # stage 1 trains on math of the bucket "dropped": a mean score below 0.2 (C.7)
        1: _ur2 | {"reward": "ur2_stage1", "steps": 10, "buckets": "math:dropped=1"},
        2: _ur2 | {"reward": "ur2_stage2", "steps": 40, "task_mixing": True},
    },
    # In stage 2, 6 of the 24 questions of a step forbid searching. Otherwise the model would forget
    # to obey the prompt token that forbids it.
    tiny={
        1: LOOK_UPS | _summarised,
        2: EVERYTHING
        | _summarised
        | {"questions_per_step": 24, "steps": 72}
        | {"mix": "one_hop=3,two_hop=4,unit=2,arithmetic=6,known=3,direct=6"},
    },
    good_format=lambda trajectory: not rewards.ur2_violations(trajectory),
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
    # Appendix C.4. The summariser's sampling is written as temperature/top_p/tokens.
    decoding={"temperature": 0.3, "top_p": 0.5}
    | {"summary_sampling": "math=0.3/0.7/8192,other=0.3/0.5/2048"},
)
# After this warm-up the model hardly ever searches before RL. It has bad habits that the reward
# must break: it gives two answers and invents passages; if it searches, it does so even for sums
# and known facts, and several times in a row. It has learned to read summaries and raw passages.
UR2.warm_ups["weak"] = replace(
    UR2.world,
    kinds={"one_hop": 0.22, "two_hop": 0.26, "unit": 0.14, "arithmetic": 0.28, "known": 0.10},
    choice_without_loss=0.995,
    bad_query=0.25,
    stop_after_first_hop=0.2,
    ignore_document=0.3,
    needless_search=0.6,
    raw=0.3,
    stray=0.3,
    twice=0.3,
    sloppy=0.25,
    prior=0.04,
    width=128,
    context=512,
    steps=550,
    muon_lr=0.0,
    warmup_steps=50,
    decay_from=0.5,
)
# Instead of a separate stage 1, the first steps pay a search bonus for multiple choice (C.7). No
# question of the built-in world has options, so there the bonus is paid for any task.
UR2_CHOICE = replace(
    UR2,
    stages={1: _ur2 | {"reward": "ur2_choice", "steps": 100, "task_mixing": True}},
    tiny={1: EVERYTHING | _summarised | {"reward": "ur2_weak"}},
)
# UR²'s baseline Vanilla RL: in the paper a run trains on math, on open questions or on multiple
# choice. The reward is eq. 2 (our reading), and only open questions may search (C.3).
VANILLA_RL = replace(
    UR2,
    source="UR² section 4.3, app. C.3",
    stages={
        1: _ur2
        | {"reward": "ur2_stage2", "steps": 25, "direct_tasks": "math,choice"}
        | {"save_every": 5}  # for single tasks and for 3B models; otherwise 10 (C.2)
    },
    tiny={1: EVERYTHING | _summarised | {"steps": 72}},
)

# Table 15: the steps of each run, up to the checkpoint that was best on the test set (C.2).
_runs, *_rows = """
           ur2  ur2_choice  math  qa  mmlu_pro  medqa  choice
qwen_7b    40   100         40    25  94        47     60
qwen_3b    47   85          15    40  47        40     40
llama_8b   30   30          30    47  60        30
""".strip().splitlines()
_small = {"questions_per_step": 128, "trajectories_per_update": 512, "save_every": 5}  # 4.4, C.2
for _name, *_numbers in map(str.split, _rows):
    for _run, _steps in zip(_runs.split(), _numbers, strict=False):
        _paper = {"ur2": UR2, "ur2_choice": UR2_CHOICE}.get(_run, VANILLA_RL)
        # The run `choice` trains on two data sets, so it does not count as a single task (C.2).
        _own = {"save_every": 10} if _run == "choice" else {}
        _own |= {"reward_variant": _name} | (_small if _name == "qwen_3b" else {})
        _variant = varied(_paper, **_own)
        _variant.stages[max(_variant.stages)]["steps"] = int(_steps)
        _paper.variants[f"{_name}_{_run}" if _paper is VANILLA_RL else _name] = _variant
# C.7's last paragraph extends the 3B model's stage 1 to 15 steps: for multiple choice, and in our
# reading also for math.
UR2.variants["qwen_3b"].stages[1]["steps"] = 15
# Easy math questions replace the hard ones (C.5), so two thirds of the math questions are easy.
# Half of the easy ones, as many as replace hard ones, may search (our reading).
_easier = {"buckets": "math:medium=1,math:easy=2,hard=7,medium=2,easy=1"}
UR2.variants["llama_8b"].stages[2].update(_easier, math_searches="easy=0.5")
_llama = UR2.variants["llama_8b"]
# Only stage 2 forbids searching in math, because stage 1 learns to search on math questions.
_direct = _llama.stages[2] | {"direct_tasks": "math"}
UR2.variants["llama_8b_direct"] = replace(_llama, stages=_llama.stages | {2: _direct})
UR2.variants.update(
    weak_stage1=varied(UR2_CHOICE, reward="ur2_weak", steps=80),  # Table 6
    judge_partly=varied(UR2, partly=1.0),  # as in UR²'s released code
    five_queries=varied(UR2, task_searches="qa=5"),  # as UR²'s prompt says
)
# Table 3. `without_stage1` pays no search bonus and uses other tags (C.2).
_no_bonus = replace(UR2_CHOICE, tiny={1: EVERYTHING | _summarised})
UR2_CHOICE.variants.update(
    without_stage1=varied(_no_bonus, reward="ur2_stage2", protocol="ur2_search", steps=110),
    without_penalty=varied(UR2_CHOICE, fallback_penalty=0.0, steps=110),
    without_task_mixing=varied(UR2_CHOICE, task_mixing=False, steps=120),
)
_mini = varied(UR2_CHOICE, steps=50, summarizer="https://api.openai.com/v1#gpt-4o-mini")
_sampled = "math=0.3/0.7/2048,other=0.3/0.7/2048"  # C.2: how Qwen-3-8B samples
_qwen3 = varied(_mini, summarizer="Qwen/Qwen3-8B", summary_sampling=_sampled)
UR2_CHOICE.variants.update(gpt_4o_mini_summaries=_mini, qwen3_8b_summaries=_qwen3)
# Tables 6 and 7. In `without_summary` and `raw_qa` a search returns five passages, as in Table 10's
# evaluations without summaries (our reading). `raw_qa` and `raw_math` train on questions of any
# difficulty, except that --difficulty still leaves out the bucket "dropped".
_passages = replace(
    varied(VANILLA_RL, documents_per_search=5), tiny={1: EVERYTHING | {"steps": 72}}
)
VANILLA_RL.variants.update(
    without_summary=varied(_passages, steps=60),
    raw_qa=varied(_passages, steps=70, buckets=""),
    raw_math=varied(VANILLA_RL, steps=10, buckets=""),
)

# Section 3.3. The paper's retriever is --retriever dense --encoder BAAI/bge-large-en-v1.5, and
# GPT-4o-mini judges its evaluations (3.1).
_r1_searcher = (
    {"protocol": "r1_searcher", "algorithm": "reinforce_pp"}
    | {"group_size": 16, "questions_per_step": 64, "trajectories_per_update": 256}
    | {"lr": 2e-6, "kl_coef": 0.0, "kl_estimator": "k1"}  # k1: for the variant llama_8b
    | {"temperature": 1.0, "max_searches": 8, "max_turn_tokens": 512}
    | {"documents_per_search": 5}  # ours; the paper gives no number, its code has 3
)
R1_SEARCHER = Paper(
    source="R1-Searcher section 3.3",
    protocols=("r1_searcher",),
    # One epoch over Table 1's 350 questions in stage 1 and over its 8,148 in stage 2. The numbers
    # per data set (`mix`) and per difficulty (`buckets`) are used only with --difficulty.
    stages={
        1: _r1_searcher
        | {"reward": "r1_searcher_stage1", "steps": 6, "mix": "hotpotqa=200,2wiki=150"}
        | {"buckets": "medium=1"},
        2: _r1_searcher
        | {"reward": "r1_searcher_stage2", "steps": 128, "mix": "hotpotqa=4561,2wiki=3587"}
        | {"buckets": "hotpotqa:medium=2561,hotpotqa:hard=2000,2wiki:medium=1087,2wiki:hard=2500"},
    },
    # The built-in world is one data set, so its buckets have the sums of the numbers above.
    tiny={1: LOOK_UPS, 2: EVERYTHING | {"buckets": "medium=3648,hard=4500"}},
    good_format=lambda trajectory: not rewards.r1_searcher_format(trajectory),
    world=Tiny(end="{thought}</think>\n\n<answer> {answer}</answer>"),
    punctuation="plain",  # eq. 4; the released code: --punctuation space
)
R1_SEARCHER.warm_ups["verbose"] = replace(R1_SEARCHER.world, verbose=0.9, prior=0.3)
R1_SEARCHER.variants.update(
    llama_8b=varied(R1_SEARCHER, kl_coef=1e-4),  # section 3.3
    # Table 3. The KL weight is the one that the paper gives for Llama.
    grpo=varied(R1_SEARCHER, algorithm="grpo", kl_coef=1e-4, kl_estimator="k3"),
    em=varied(R1_SEARCHER, answer_metric="em"),  # eq. 5, table 5
    cem=varied(R1_SEARCHER, answer_metric="cem"),
    as_its_code=varied(  # its scripts' advantage: R minus the group's mean, whitened over tokens
        R1_SEARCHER, algorithm="reinforce_pp_baseline", group_std=False, whiten_tokens=True
    ),
)

# Section 4.3, table 6: medium questions replace the difficult ones.
_medium = replace(R1_SEARCHER, tiny={1: LOOK_UPS, 2: EVERYTHING})
R1_SEARCHER.variants["without_difficult"] = varied(_medium, buckets="medium=1")

_r_search = (  # section 4.3
    {"protocol": "r_search", "algorithm": "grpo", "reward": "r_search", "steps": 195}
    | {"group_size": 5, "questions_per_step": 256, "trajectories_per_update": 1280}
    | {"lr": 1e-6, "warmup_ratio": 0.95}
    | {"kl_coef": 1e-3, "kl_estimator": "k3", "temperature": 1.0}  # the temperature is ours
    | {"max_searches": 4, "max_turn_tokens": 500}  # not in the paper; as in Search-R1's code
    | {"documents_per_search": 3}  # 5 with --decoding paper
)
R_SEARCH = Paper(
    source="R-Search section 4.3",
    protocols=("r_search", "r_search_plain"),
    stages={1: _r_search},
    tiny={1: EVERYTHING | TWO_FACTS | {"warmup_ratio": 0.0, "kl_coef": 0.0, "steps": 40}},
    good_format=rewards.r_search_format,
    # A search shows two passages. A trace may copy the relevant one as evidence and answer from it.
    world=Tiny("{evidence}<answer> {answer}</answer>", layout="facts", kinds=HALVES, steps=350),
    punctuation="delete",
    decoding={"temperature": 0.1, "documents_per_search": 5},  # appendix A.3, section 4.3
)
# PPO (5.3) has the settings of 4.3 too. The paper does not say whether PPO's KL is in the reward
# (as k1 is) or in the loss, nor the critic's learning rate and warm-up; these come from the paper's
# script.
_with_critic = {"algorithm": "ppo", "kl_estimator": "k1", "critic_lr": 1e-5}
_with_critic["critic_warmup_ratio"] = 0.05
_tiny_critic = {
    stage: settings | {"critic_lr": 1e-3, "critic_warmup_ratio": 0.0}
    for stage, settings in R_SEARCH.tiny.items()
}
_r_search_ppo = varied(replace(R_SEARCH, tiny=_tiny_critic), **_with_critic)
R_SEARCH.variants.update(
    without_evidence=varied(R_SEARCH, protocol="r_search_plain", evidence_reward=False),  # table 3
    whole_reply=varied(R_SEARCH, whole_reply=True),  # eq. 4
    ppo=_r_search_ppo,
    # one response per question, as in the paper's script
    ppo_code=varied(_r_search_ppo, group_size=1, trajectories_per_update=256),
)

_when_to_search = (  # Table 5; each stage has half of its 500 steps (our choice)
    {"protocol": "when_to_search", "algorithm": "dapo", "beta": 0.3, "steps": 250}
    | {"group_size": 32, "questions_per_step": 32, "trajectories_per_update": 1024}
    # The paper gives no clip range; this one is the DAPO paper's.
    | {"lr": 1e-6, "clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token"}
    | {"kl_coef": 0.0}  # as section 3.2 says; Table 5 has 1e-4
    | {"temperature": 1.0, "documents_per_search": 5, "document_tokens": 4096}
    | {"max_searches": 5, "max_turn_tokens": 8192}  # we read Table 5's five turns as searches
    | {"max_context": 18432}  # prompt 2048 + response 16384
    # The filter `correct` would drop groups that are all wrong or all right. But the rewards in
    # such a group may differ by the number of searches: in stage 1 those of wrong answers (eq. 10),
    # in stage 2 those of right answers (eq. 11).
    | {"filter_by": "answer"}
    | {"save_every": 30}  # appendix B.3
)
_when_stage1 = _when_to_search | {"reward": "when_to_search_stage1"}
_when_stage2 = _when_to_search | {"reward": "when_to_search_stage2"}
WHEN_TINY = {"mix": "one_hop=4,two_hop=4,unit=1,arithmetic=2,known=3"}
WHEN_TINY |= {"max_resample": 1, "max_context": 0}
WHEN_TO_SEARCH = Paper(
    source="When to Search section 4, Table 5",
    protocols=("when_to_search", "when_to_search_eos"),
    stages={1: _when_stage1, 2: _when_stage2},
    tiny={1: TINY | WHEN_TINY | {"steps": 5}, 2: EVERYTHING | WHEN_TINY | {"steps": 40}},
    good_format=rewards.when_to_search_format,
    # Each trace but those of `practice` has the sections think, then search and reflect for each
    # query (only reflect if there is no query), then answer.
    world=Tiny(
        opening="<think>{asked}</think>",
        between="<reflect>{note}</reflect>",
        no_note=" none",
        end="<reflect>{asked} {answer}</reflect><answer> {answer}</answer>",
    ),
    punctuation="delete",
)
# After these warm-ups the model hardly ever searches before RL. Of the traces with searches, only
# one in 100 (`_weak`) or in 200 (`_rare`) has a loss on the token that decides to search.
_weak = replace(WHEN_TO_SEARCH.world, choice_without_loss=0.99, prior=0.05)
_rare = replace(_weak, choice_without_loss=0.995, prior=0.02)
WHEN_TO_SEARCH.warm_ups.update(weak=_weak, rare=_rare)
_one_stage = replace(  # one reward throughout
    WHEN_TO_SEARCH,
    stages={1: _when_to_search | {"steps": 500}},
    tiny={1: EVERYTHING | WHEN_TINY | {"steps": 45}},
)
# With β = 0 the answer term of stage one is 1 if right and −1 if wrong, whatever the searches.
_plain_stages = {1: _when_stage1 | {"beta": 0.0}, 2: _when_stage2}
WHEN_TO_SEARCH.variants.update(
    # All checkpoints of this run are kept, because Table 2 compares them.
    unified=varied(_one_stage, reward="when_to_search_unified", keep_checkpoints=0),
    # The variants from here on, except `to_the_end`, are those of Table 4. Its row "w/o stage one"
    # has two readings: the reward of stage two throughout, or, as in section 4.5, an answer term of
    # ±1 in stage one (`plain_stage_one`).
    without_stage_one=varied(_one_stage, reward="when_to_search_stage2"),
    plain_stage_one=replace(WHEN_TO_SEARCH, stages=_plain_stages),
    without_stage_two=varied(_one_stage, reward="when_to_search_stage1"),
    without_r_s=varied(WHEN_TO_SEARCH, left_out="retrieval"),
)
# With β = 0 in stage two, its answer term is 1 if right and −1 if wrong (4.5).
_plain_stages = {1: _when_stage1, 2: _when_stage2 | {"beta": 0.0}}
WHEN_TO_SEARCH.variants.update(
    to_the_end=varied(WHEN_TO_SEARCH, protocol="when_to_search_eos"),  # 3.2
    plain_stage_two=replace(WHEN_TO_SEARCH, stages=_plain_stages),
    without_r_a=varied(WHEN_TO_SEARCH, left_out="answer", filter_by="total"),
)

# Section 4.4 and appendix F. In our copy of the paper the KL weight, the updates per batch and the
# clip range are missing from appendix F, so we use the defaults of ARENA's training library. The
# names of the two KL estimators are missing from 3.2. They must be k3 (GRPO's own) and k2, because
# 3.2 and appendix B prove properties that these two have.
_arena = (
    {"protocol": "arena", "algorithm": "grpo", "reward": "arena", "answer_metric": "em"}
    | {"group_size": 7, "questions_per_step": 256, "trajectories_per_update": 1792}
    | {"lr": 3e-6, "kl_estimator": "k2", "kl_coef": 0.04, "clip_low": 0.2, "clip_high": 0.2}
    | {"temperature": 0.9, "max_searches": 0}
    | {"max_turn_tokens": 256}  # default of ARENA's library
    | {"steps": 95}  # table 10; 95 · 256 is about one epoch over the 25,000 questions
)
ARENA = Paper(
    source="ARENA section 4.4, app. F",
    protocols=("arena", "arena_summary", "arena_thinking"),
    stages={1: _arena},
    tiny={1: EVERYTHING | TWO_FACTS | {"max_searches": 0, "steps": 40}},
    good_format=rewards.arena_format,
    # The prompt has four numbered references. A trace of `practice` only reads or only cites. The
    # others cite references, mostly analyse them, and answer.
    world=Tiny(
        citation="<relevance>[{numbers}]",
        analysis="<analysis>{note}{thought}</analysis>",
        end="{citation}</relevance>{analysis}<answer> {answer}</answer>",
        layout="facts",
        kinds=HALVES,
        practice=0.65,
        steps=900,
        decay_from=0.75,
    ),
    punctuation="underscore",  # D.1; released code: --punctuation space, --reward arena_code
)
ARENA.variants.update(  # section 5.3, figure 3
    naive_grpo=varied(ARENA, relevance_reward=False, bonus=0.0, kl_estimator="k3"),  # also in 4.3
    k3=varied(ARENA, kl_estimator="k3"),  # appendix G
    no_bonus=varied(ARENA, bonus=0.0),  # appendix I
    f1=varied(ARENA, answer_metric="f1"),
    judge=varied(ARENA, judge="https://api.openai.com/v1#gpt-4o-2024-11-20"),  # appendix D.3
)
ARENA.variants["no_relevance"] = varied(ARENA, relevance_reward=False)  # not in the paper
ARENA.variants["thinking"] = varied(ARENA, protocol="arena_thinking")  # 4.3, note 2
# Appendix H.2, table 9: 5,000 training examples; one epoch over them (20 steps) is our reading.
_naive = ARENA.variants["naive_grpo"]
ARENA.variants["summaries"] = varied(ARENA, protocol="arena_summary", steps=20)
ARENA.variants["naive_summaries"] = varied(_naive, protocol="arena_summary", steps=20)

_search_r1 = (  # appendix B of arXiv 2503.09516
    {"protocol": "search_r1", "algorithm": "ppo", "reward": "search_r1", "steps": 500}
    | {"group_size": 1, "questions_per_step": 512, "trajectories_per_update": 256}
    | {"lr": 1e-6, "warmup_ratio": 0.285, "critic_lr": 1e-5, "critic_warmup_ratio": 0.015}
    | {"kl_coef": 1e-3, "kl_estimator": "k1", "temperature": 1.0}
    | {"max_searches": 4, "max_turn_tokens": 500, "documents_per_search": 3, "document_tokens": 500}
)
SEARCH_R1 = Paper(
    source="Search-R1 app. B",
    protocols=("search_r1",),
    stages={1: _search_r1},
    tiny={
        1: EVERYTHING
        | {"warmup_ratio": 0.0, "critic_lr": 1e-3, "critic_warmup_ratio": 0.0}
        | {"kl_coef": 0.0, "steps": 40}
    },
    good_format=rewards.r_search_format,  # here it only checks for one answer box
    world=Tiny(
        "<think>{thought}</think><answer> {answer}</answer>", between="<think>{note}</think>"
    ),
    punctuation="delete",
)
SEARCH_R1.variants.update(
    grpo=varied(SEARCH_R1, algorithm="grpo", group_size=5, kl_estimator="k3"),
    aligned=replace(  # R-Search section 4.2: trained with R-Search's parameters
        SEARCH_R1,
        stages={1: _r_search | {"protocol": "search_r1", "reward": "search_r1"}},
        decoding=R_SEARCH.decoding,
    ),
)

PAPERS: dict[str, Paper] = {
    "ur2": UR2,
    "ur2_choice": UR2_CHOICE,
    "vanilla_rl": VANILLA_RL,
    "r1_searcher": R1_SEARCHER,
    "r_search": R_SEARCH,
    "search_r1": SEARCH_R1,
    "when_to_search": WHEN_TO_SEARCH,
    "arena": ARENA,
}
RECIPES: dict[str, dict[int, dict]] = {name: paper.stages for name, paper in PAPERS.items()}


# Trajectories of lab/baselines.py follow no paper's format, so the metric `format` is 1 for each
# one with an answer. em, f1 and cem treat punctuation as in the paper that --recipe names.
BASELINES = [
    replace(
        paper,
        source="lab/baselines.py",
        protocols=(f"baseline_{paper.protocols[0]}",),
        good_format=lambda trajectory: trajectory.answer is not None,
    )
    for paper in PAPERS.values()
]


def paper_of(protocol: str) -> Paper:
    """Returns the first paper that uses this protocol."""
    for paper in (*PAPERS.values(), *BASELINES):
        if protocol in paper.protocols:
            return paper
    raise InputError(f"protocol {protocol}: no record of papers.py names it: add it there")


def record_of(recipe: str, variant: str = "", stage: int | None = None) -> Paper:
    """Returns the record of a recipe or of its variant. Raises an InputError if the recipe, the
    variant or the stage does not exist.
    """
    check_value("recipe", recipe, {"one_of": PAPERS})
    paper = PAPERS[recipe]
    if variant:
        check_value("variant", variant, {"one_of": paper.variants})
        paper = paper.variants[variant]
    if stage is not None and stage not in paper.stages:
        named = f"{recipe} {variant}".strip()
        raise InputError(f"--stage {stage}: {named} has stages {', '.join(map(str, paper.stages))}")
    return paper


def main() -> None:
    """Prints a Markdown table of the settings of each paper and stage. A variant shows only the
    settings that differ from its paper's. Stages that show the same settings share a row.
    """
    print("paper | stage | settings | source\n--- | --- | --- | ---")
    for name, paper in PAPERS.items():
        for variant, own in {"": paper, **paper.variants}.items():
            stages = defaultdict(list)  # the settings, as text -> the stages that have them
            for stage, settings in own.stages.items():
                usual = paper.stages.get(stage, {}) if variant else {}
                changed = [key for key in usual | settings if settings.get(key) != usual.get(key)]
                shown = ", ".join(f"{key} {settings.get(key, 'by default')}" for key in changed)
                if shown:
                    stages[shown].append(str(stage))
            for shown, numbers in stages.items():
                named = f"{name}:{variant}".strip(":")
                print(named, ", ".join(numbers), shown, own.source, sep=" | ")


if __name__ == "__main__":
    run_main(main)
