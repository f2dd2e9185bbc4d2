"""What each paper chose: one flat table of settings per paper and stage.

`Recipe` holds every setting with its plain default; `RECIPES[paper][stage]` lists only what the
paper sets otherwise, each number with its source; `BUILT_IN` lists what the tiny model on the
built-in world needs instead of the 7B numbers.

    defaults  <  the paper's stage  <  the built-in world (only without --model)  <  the command
              line

argparse is made from the dataclass: every field is a --flag, and a typo is an error that names the
nearest flag. `check_recipe` refuses what no run can mean, before a model is loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import rewards
from data import Document, Question, corpus_from_questions, load_corpus, load_questions
from errors import FlagParser, InputError, nearest, run_main
from metrics import score_answer
from other_models.judge import Judge, math_grader, right
from other_models.llm import LLM, LocalLLM, load_llm
from other_models.reader import cross_answers
from policy import OPTIMIZERS, Policy, load_policy
from prompts import PROTOCOLS, Protocol, as_protocol
from retriever import RETRIEVERS, make_retriever
from retrievers.embed import Embedder, make_embedder
from rollout import SearchFunction
from summarizer import SUMMARIZERS, make_search, make_summarizer
from trajectory import Trajectory
from world.toy import LAYOUTS, load_reader, load_toy, world_for
from world.world import KINDS


@dataclass(frozen=True)
class Extras:
    """What a reward takes from outside its trajectory."""

    correct: bool | None = None  # is the answer right? None: the metrics decide
    cross_model_answer: str = ""  # R-Search: what another model answers from the evidence
    embed: Embedder | None = None  # When to Search: query -> vector
    grade: Callable[[Question, str], float] | None = (
        None  # UR²: a judge's 2, 1 or 0 for a math answer
    )


NO_EXTRAS = Extras()

# name -> (trajectory, recipe, step, extras) -> components
REWARDS = {
    "ur2_stage1": lambda t, r, step, e: rewards.ur2_stage1(
        t, r.reward_variant, fallback_penalty=r.fallback_penalty, format_check=r.format_check
    ),
    "ur2_stage2": lambda t, r, step, e: rewards.ur2_stage2(
        t,
        r.answer_metric,
        e.grade,
        fallback_penalty=r.fallback_penalty,
        format_check=r.format_check,
    ),
    "ur2_choice": lambda t, r, step, e: rewards.ur2_choice(
        t, step, r.reward_variant, r.answer_metric, e.grade, fallback_penalty=r.fallback_penalty
    ),
    "r1_searcher_stage1": lambda t, r, step, e: rewards.r1_searcher_stage1(t),
    "r1_searcher_stage2": lambda t, r, step, e: rewards.r1_searcher_stage2(t, r.answer_metric),
    # the released code's variants, by name
    "r1_searcher_stage1_code": lambda t, r, step, e: rewards.r1_searcher_stage1(t, "cem"),
    "r1_searcher_stage2_llama": lambda t, r, step, e: rewards.r1_searcher_stage2(
        t, r.answer_metric, format_penalty=1.0
    ),
    "r_search": lambda t, r, step, e: rewards.r_search(t, e.cross_model_answer, r.evidence_reward),
    "when_to_search_stage1": lambda t, r, step, e: rewards.when_to_search_stage1(
        t, e.correct, e.embed, r.beta, r.similarity
    ),
    "when_to_search_stage2": lambda t, r, step, e: rewards.when_to_search_stage2(
        t, e.correct, e.embed, r.beta, r.similarity
    ),
    "arena": lambda t, r, step, e: rewards.arena(t, r.bonus, r.relevance_reward),
}

ALGORITHMS = ("reinforce_pp", "reinforce_pp_baseline", "grpo", "dapo", "ppo")


def setting(default, help: str, **limits):
    """A field with its help text and its limits: least and above, most and below are bounds, one_of
    is names.
    """
    return field(default=default, metadata={"help": help, **limits})


@dataclass
class Recipe:
    # what to train on
    recipe: str = setting("ur2", "the paper")
    stage: int = setting(
        1, "1: learn to search; 2: learn to answer (starts from stage 1's last checkpoint)"
    )
    model: str = setting(
        "", 'HF causal LM, a directory or a hub name; "" = the tiny built-in model'
    )
    start_from: str = setting(
        "", "checkpoint to start from; default: stage 2 from its run's stage 1, else --model"
    )
    data: str = setting("", 'question files, comma-separated; "" = the built-in world')
    corpus: str = setting(
        "", 'passages: a file, a folder of texts, or "from-data": the records\' own'
    )
    skip_bad: bool = setting(False, "count malformed records and go on")
    mix: str = setting(
        "", 'shares of the kinds of question in every step, as "kind=weight,..."; "" = as they come'
    )
    prompt_file: str = setting("", "a text file whose content replaces the protocol's instruction")
    # where it goes
    name: str = setting("", "name of the run; its files are under runs/NAME/stageN")
    runs: str = setting("runs", "folder of all runs and of the built-in model")
    resume: bool = setting(False, "go on from this run's last checkpoint")
    save_every: int = setting(10, "steps between checkpoints (the last step always saves)", least=1)
    keep_checkpoints: int = setting(2, "older ones are deleted; 0 keeps all", least=0)
    show_every: int = setting(5, "steps between decoded trajectories on the console", least=1)
    seed: int = setting(0, "seed of questions and sampling", least=0, most=2**31 - 1)
    world_seed: int = setting(0, "seed of the built-in world and its model")
    threads: int = setting(
        0,
        "CPU threads of a process; 0 = all cores, shared by the processes of this machine",
        least=0,
    )
    # the rollout
    protocol: str = setting("ur2", "tags and prompt", one_of=PROTOCOLS)
    retrieval: bool = setting(True, "False: UR²'s prompt without retrieval")
    temperature: float = setting(1.0, "of sampling, and of scoring", least=0)
    top_p: float = setting(
        1.0, "below 1 the samples are not from the distribution that is scored", above=0, most=1
    )
    max_searches: int = setting(4, "per trajectory", least=0)
    max_turn_tokens: int = setting(512, "new tokens per turn", least=1)
    max_context: int = setting(0, "prompt and response in tokens; 0 = the model's limit", least=0)
    rollout_batch_size: int = setting(0, "trajectories sampled at once; 0 = all", least=0)
    engine: str = setting(
        "slots", "what samples: engine.py's slots, or plain generate", one_of=("slots", "hf")
    )
    sampling_copy: str = setting(
        "auto",
        "of the weights, for a rollout: bf16, none; auto: bf16 on a GPU, not of int8",
        one_of=("auto", "bf16", "none"),
    )
    cuda_graphs: bool = setting(
        False, "record the slots' decoding step on a GPU and replay it (docs/gpu.md)"
    )
    notices: bool = setting(True, "tell the model why a query was not run")
    retriever: str = setting(
        "bm25",
        "of the corpus: bm25, dense; elsewhere: http, web; the others are controls",
        one_of=RETRIEVERS,
    )
    retriever_url: str = setting(
        "", "http: a server's address; web: a search API's, with {query} in it"
    )
    encoder: str = setting(
        "", "dense: a HF encoder such as intfloat/e5-base-v2, a directory or a hub name"
    )
    pooling: str = setting(
        "auto", "dense: how the encoder's states become one vector", one_of=("auto", "mean", "cls")
    )
    vectors: str = setting("", "dense: folder where vectors are kept; default: runs/vectors")
    index_file: str = setting(
        "", "dense: a FAISS index of the corpus, row i for passage i, in place of our vectors"
    )
    allow_private: bool = setting(False, "web: pages may come from this machine and its network")
    web_rate: float = setting(
        5.0, "web: requests per second to the search API; 0 = no limit", least=0
    )
    title_boost: int = setting(1, "how often BM25 counts a passage's title", least=0)
    documents_per_search: int = setting(5, "passages per query", least=1)
    document_tokens: int = setting(1024, "tokens of documents per search at most", least=1)
    summarizer: str = setting(
        "none", "the passages as they are; or the best one, or the fallback", one_of=SUMMARIZERS
    )
    search_timeout: float = setting(60.0, "seconds until a search counts as failed", above=0)
    search_retries: int = setting(2, "after a failed search", least=0)
    summary_log: str = setting(
        "", "JSONL to which every LLM summary is appended: what sft.py distils"
    )
    summarizer_model: str = setting(
        "", "--summarizer llm: an OpenAI-compatible URL (http://host:port/v1#model), or a HF model"
    )
    # the curriculum
    difficulty: str = setting(
        "", 'JSONL of `python curriculum.py difficulty`, or "level": the records\' own levels'
    )
    buckets: str = setting(
        "", 'with --difficulty: shares of its buckets, as "hard=7,medium=2,easy=1"'
    )
    task_mixing: bool = setting(
        False, "UR²: math may search only if hard, multiple choice by half (needs --difficulty)"
    )
    # other models
    judge: str = setting("", 'of "right" in When to Search: URL#model or a HF model; "" = cover-EM')
    cross_model: str = setting(
        "", "R-Search's frozen reader of the evidence: URL#model or a HF model of another family"
    )
    load_in_8bit: bool = setting(False, "frozen models (judge, cross model, summariser) in 8 bits")
    llm_timeout: float = setting(60.0, "seconds per request to another model", above=0)
    llm_retries: int = setting(2, "after a failed request", least=0)
    llm_cache: str = setting(
        "", "folder where answers of other models are kept; default: runs/llm_cache"
    )
    embedder: str = setting(
        "tfidf", "of queries, for When to Search's similarity: tfidf, or a HF encoder"
    )
    # the reward
    reward: str = setting(
        "ur2_stage1", "function of rewards.py; _code and _llama: as released", one_of=REWARDS
    )
    reward_variant: str = setting(
        "qwen_7b", "of UR²'s reward: the backbone", one_of=rewards.UR2_RETRIEVAL
    )
    answer_metric: str = setting("f1", "of the answer reward", one_of=rewards.ANSWER_METRICS)
    fallback_penalty: float = setting(
        0.5, "UR²: per search that came back as the fallback", least=0
    )
    format_check: str = setting(
        "strict",
        "loose looks at the answer's box only (ablation: it gets hacked)",
        one_of=("strict", "loose"),
    )
    evidence_reward: bool = setting(
        True, "R-Search: False pays for the answer and the format only (ablation)"
    )
    beta: float = setting(0.3, "When to Search: price of a search", least=0)
    similarity: str = setting(
        "mean",
        "When to Search: over query pairs; literal is eq. 8 as printed, half of it",
        one_of=("mean", "literal"),
    )
    relevance_reward: bool = setting(True, "ARENA: False leaves the relevance term out (ablation)")
    bonus: float = setting(10.0, "ARENA: for a trajectory that is right in all three", least=0)
    # the algorithm
    algorithm: str = setting(
        "reinforce_pp_baseline", "where the advantage comes from", one_of=ALGORITHMS
    )
    group_size: int = setting(16, "trajectories per question, G", least=1)
    questions_per_step: int = setting(64, "questions per rollout", least=1)
    trajectories_per_update: int = setting(
        256, "trajectories per optimizer update; 0 = all of a step", least=0
    )
    steps: int = setting(100, "rollouts; each is followed by its updates", least=1)
    clip_low: float = setting(0.2, "the ratio is clipped below 1 − this", least=0, most=1)
    clip_high: float = setting(0.2, "and above 1 + this", least=0)
    dual_clip: float = setting(0.0, "bound of the loss at negative advantage; 0 = off", least=0)
    loss_aggregation: str = setting(
        "sequence", "mean per trajectory first, or over all tokens", one_of=("sequence", "token")
    )
    group_std: bool = setting(
        True, "UR² eq. 5 divides by the group's std; its released code does not"
    )
    gamma: float = setting(1.0, "discount of token rewards (REINFORCE++)", least=0, most=1)
    kl_coef: float = setting(
        0.0,
        "weight of the KL to the model at the start of the stage; 0 loads no reference",
        least=0,
    )
    kl_estimator: str = setting(
        "k2", "k1 in the reward, k2 or k3 in the loss", one_of=("k1", "k2", "k3")
    )
    kl_place: str = setting("loss", "none: only logged", one_of=("loss", "reward", "none"))
    mask_documents: bool = setting(True, "False trains on the documents too (ablation)")
    max_resample: int = setting(3, "DAPO: extra draws of questions per step, at most", least=0)
    filter_by: str = setting(
        "correct",
        "DAPO: what must differ in a group: right and wrong, or the reward's answer term",
        one_of=("correct", "answer"),
    )
    gae_lambda: float = setting(1.0, "PPO: GAE's λ", least=0, most=1)
    value_clip: float = setting(
        0.2, "PPO: the value moves at most this far from its old one; 0 = off", least=0
    )
    critic_lr: float = setting(1e-5, "PPO: learning rate of the critic", above=0)
    # the optimizer
    optimizer: str = setting(
        "adamw", "8 bits are for Adam's moments; paged: on the CPU when need be", one_of=OPTIMIZERS
    )
    lr: float = setting(2e-6, "learning rate", above=0)
    lr_warmup: int = setting(0, "updates of linear warm-up", least=0)
    lr_schedule: str = setting(
        "constant", "after the warm-up; two end at 0", one_of=("constant", "linear", "cosine")
    )
    beta1: float = setting(0.9, "AdamW", least=0, below=1)
    beta2: float = setting(0.999, "AdamW", least=0, below=1)
    weight_decay: float = setting(0.0, "AdamW", least=0)
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm", above=0)
    tokens_per_micro_batch: int = setting(
        16384, "padded tokens per forward pass of the update", least=1
    )
    gradient_checkpointing: bool = setting(False, "compute activations again in the backward pass")
    lora_rank: int = setting(
        0, "train two thin matrices beside each frozen one (needs peft); 0: all weights", least=0
    )
    lora_alpha: float = setting(16.0, "LoRA: what is learned is scaled by this / rank", above=0)
    lora_targets: str = setting(
        "all-linear", 'LoRA: beside which matrices; or names, as "q_proj,v_proj"'
    )
    base_in_8bit: bool = setting(False, "LoRA: the frozen weights in 8 bits")
    reference_in_8bit: bool = setting(
        False, "the frozen reference of --kl_coef in 8 bits (under LoRA there is none to load)"
    )
    old_logprobs: str = setting(
        "auto",
        "as sampled, or by one more scoring pass; auto: recompute under bf16",
        one_of=("auto", "rollout", "recompute"),
    )


# Each paper's own numbers, at 7B. What a column does not name has the dataclass' default.
_UR2 = {  # appendix C.2, C.3 and the table of hyper-parameters
    "protocol": "ur2",
    "algorithm": "reinforce_pp_baseline",
    "group_size": 16,
    "questions_per_step": 64,
    "trajectories_per_update": 256,
    "lr": 2e-6,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    "temperature": 1.0,
    "max_searches": 4,
    "max_turn_tokens": 512,
    "documents_per_search": 10,
}
_R1_SEARCHER = {  # section 4.1 and its training script
    "protocol": "r1_searcher",
    "algorithm": "reinforce_pp",
    "group_size": 16,
    "questions_per_step": 64,
    "trajectories_per_update": 256,
    "lr": 2e-6,
    "kl_coef": 0.0,  # Qwen base; Llama: 1e-4 in the reward
    "kl_place": "reward",
    "kl_estimator": "k1",
    "temperature": 1.0,
    "max_searches": 8,
    "max_turn_tokens": 512,
    "documents_per_search": 5,  # 3 in its code
}
_R_SEARCH = {  # section 4.1 and its table of hyper-parameters
    "protocol": "r_search",
    "algorithm": "grpo",
    "group_size": 5,
    "questions_per_step": 256,
    "trajectories_per_update": 1280,
    "lr": 1e-6,
    "lr_warmup": 185,  # 0.95 of 195 updates, as printed
    "kl_coef": 1e-3,
    "kl_estimator": "k3",
    "temperature": 1.0,
    "max_searches": 4,
    "max_turn_tokens": 500,
    "documents_per_search": 3,  # 5 in evaluation
    "reward": "r_search",
    "steps": 195,
}
_WHEN_TO_SEARCH = {  # section 4 and its table; 500 steps in all, halved between the stages by us
    "protocol": "when_to_search",
    "algorithm": "dapo",
    "group_size": 32,
    "questions_per_step": 32,
    "trajectories_per_update": 1024,
    "lr": 1e-6,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "loss_aggregation": "token",
    "kl_coef": 0.0,  # its text; its table: 1e-4
    "temperature": 1.0,
    "max_searches": 5,
    "max_turn_tokens": 8192,
    "documents_per_search": 5,
    "beta": 0.3,
    "steps": 250,
}
_ARENA = {  # section 4.1
    "protocol": "arena",
    "algorithm": "grpo",
    "group_size": 7,
    "questions_per_step": 256,
    "trajectories_per_update": 1792,
    "lr": 3e-6,
    "kl_coef": 0.04,
    "kl_estimator": "k2",  # its library's default: the paper's number is lost
    "temperature": 0.9,
    "max_searches": 0,
    "max_turn_tokens": 256,
    "reward": "arena",
    "steps": 95,
}
RECIPES: dict[str, dict[int, dict]] = {
    "ur2": {
        1: {**_UR2, "reward": "ur2_stage1", "steps": 10},  # 15 for the 3B model
        2: {**_UR2, "reward": "ur2_stage2", "steps": 100},  # at most two epochs
    },
    # UR²'s baseline: the answer reward from the start, the passages as they are, 5 of them
    "vanilla_rl": {1: {**_UR2, "reward": "ur2_stage2", "steps": 110, "documents_per_search": 5}},
    "r1_searcher": {
        1: {
            **_R1_SEARCHER,
            "reward": "r1_searcher_stage1",
            "steps": 6,
        },  # one epoch of 350 questions
        2: {
            **_R1_SEARCHER,
            "reward": "r1_searcher_stage2",
            "steps": 128,
        },  # one epoch of 8,148 questions
    },
    "r_search": {1: _R_SEARCH},
    "when_to_search": {
        1: {**_WHEN_TO_SEARCH, "reward": "when_to_search_stage1"},
        # by correctness, the groups that stage 2 is about (all right, with and without a search)
        # would be dropped
        2: {**_WHEN_TO_SEARCH, "reward": "when_to_search_stage2", "filter_by": "answer"},
    },
    # its ablation: stage 2's reward alone, from the start
    "when_to_search_unified": {
        1: {
            **_WHEN_TO_SEARCH,
            "reward": "when_to_search_stage2",
            "filter_by": "answer",
            "steps": 500,
        },
    },
    "arena": {1: _ARENA},
}
SOURCES = {
    "ur2": "UR² app. C.2, C.3, C.7",
    "vanilla_rl": "UR² section 4, baselines",
    "r1_searcher": "R1-Searcher section 4.1, script",
    "r_search": "R-Search section 4.1, table",
    "when_to_search": "When to Search section 4, table",
    "when_to_search_unified": "When to Search, ablation",
    "arena": "ARENA section 4.1",
}

# The tiny model has 0.48M random-born weights: it needs a learning rate 150 times larger, and short
# texts.
_TINY = {
    "lr": 3e-4,
    "group_size": 8,
    "questions_per_step": 16,
    "trajectories_per_update": 64,
    "max_turn_tokens": 24,
    "max_searches": 4,
    "documents_per_search": 1,
    "document_tokens": 48,
    "title_boost": 4,
    "save_every": 10,
}
_LOOKUPS = {"steps": 12, "mix": "one_hop=3,two_hop=4,unit=1"}
_EVERYTHING = {
    "steps": 60,
    "mix": "one_hop=4,two_hop=4,unit=1,arithmetic=2,known=2",
    "trajectories_per_update": 32,
    "lr": 5e-4,
    "lr_schedule": "linear",
}
# both stages of When to Search see what needs no search
_KNOWN_TOO = "one_hop=4,two_hop=4,unit=1,arithmetic=2,known=3"
_TWO_FACTS = {
    "mix": "one_hop=1,two_hop=1",
    "documents_per_search": 2,
    "document_tokens": 64,
    "max_turn_tokens": 40,
}
BUILT_IN: dict[str, dict[int, dict]] = {
    "ur2": {
        1: {**_TINY, **_LOOKUPS, "summarizer": "extractive"},
        2: {**_TINY, **_EVERYTHING, "summarizer": "extractive"},
    },
    "vanilla_rl": {1: {**_TINY, **_EVERYTHING, "steps": 72}},
    "r1_searcher": {1: {**_TINY, **_LOOKUPS}, 2: {**_TINY, **_EVERYTHING}},
    "r_search": {
        1: {**_TINY, **_EVERYTHING, **_TWO_FACTS, "lr_warmup": 0, "kl_coef": 0.0, "steps": 40}
    },
    "when_to_search": {
        1: {**_TINY, "mix": _KNOWN_TOO, "max_resample": 1, "steps": 5},
        2: {**_TINY, **_EVERYTHING, "mix": _KNOWN_TOO, "max_resample": 1, "steps": 40},
    },
    "when_to_search_unified": {
        1: {**_TINY, **_EVERYTHING, "mix": _KNOWN_TOO, "max_resample": 1, "steps": 45}
    },
    "arena": {1: {**_TINY, **_EVERYTHING, **_TWO_FACTS, "max_searches": 0, "steps": 40}},
}


def resolve(recipe: str, stage: int, built_in: bool, given: dict | None = None) -> Recipe:
    """The settings of one run: defaults, the paper's stage, the built-in world's where it is used,
    then `given`.
    """
    if recipe not in RECIPES:
        raise InputError(
            f"--recipe {recipe}: unknown; one of {', '.join(RECIPES)}{nearest(recipe, RECIPES)}"
        )
    if stage not in RECIPES[recipe]:
        raise InputError(
            f"--stage {stage}: {recipe} has stages {', '.join(map(str, RECIPES[recipe]))}"
        )
    small = BUILT_IN[recipe][stage] if built_in else {}
    return Recipe(
        **{"recipe": recipe, "stage": stage, **RECIPES[recipe][stage], **small, **(given or {})}
    )


def check_recipe(recipe: Recipe, training: bool = True) -> Recipe:
    """The recipe itself, or an InputError for a value no run can mean. `training=False` asks only
    what evaluation needs.
    """
    for f in dataclasses.fields(Recipe):
        check_value(f.name, getattr(recipe, f.name), f.metadata)
    if recipe.data and not recipe.model:
        raise InputError(
            "--data needs --model: the built-in tiny model can read only its own world"
        )
    searches = PROTOCOLS[recipe.protocol].query_tags is not None
    if recipe.data and searches and recipe.retriever in NEEDS_CORPUS and not recipe.corpus:
        raise InputError(
            "--data needs --corpus FILE, or --corpus from-data to search the records' own"
            " paragraphs"
        )
    if searches and recipe.retriever in NEEDS and not getattr(recipe, NEEDS[recipe.retriever]):
        raise InputError(f"--retriever {recipe.retriever} needs --{NEEDS[recipe.retriever]}")
    if recipe.summarizer == "llm" and not recipe.summarizer_model:
        raise InputError(
            "--summarizer llm needs --summarizer_model http://host:port/v1#model, or a HF model"
        )
    if training:
        check_training(recipe)
    return recipe


NEEDS_CORPUS = ("bm25", "dense", "random")
NEEDS = {"dense": "encoder", "http": "retriever_url", "web": "retriever_url"}


def check_value(name: str, value, limits) -> None:
    """One setting against the limits that stand beside it in `Recipe`."""
    if "one_of" in limits and value not in limits["one_of"]:
        raise InputError(
            f"--{name} {value}: unknown; one of"
            f" {', '.join(limits['one_of'])}{nearest(value, limits['one_of'])}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"--{name} {value}: must be a finite number")
    if "least" in limits and value < limits["least"]:
        raise InputError(f"--{name} {value}: must be at least {limits['least']}")
    if "above" in limits and value <= limits["above"]:
        raise InputError(f"--{name} {value}: must be above {limits['above']}")
    if "most" in limits and value > limits["most"]:
        raise InputError(f"--{name} {value}: must be at most {limits['most']}")
    if "below" in limits and value >= limits["below"]:
        raise InputError(f"--{name} {value}: must be below {limits['below']}")


def check_training(recipe: Recipe) -> None:
    """Settings that are fine one by one and mean nothing together."""
    if recipe.temperature == 0:
        raise InputError(
            "--temperature 0 is greedy: all trajectories of a group would be the same; training"
            " needs sampling"
        )
    if recipe.group_size == 1 and recipe.algorithm not in ("reinforce_pp", "ppo"):
        raise InputError(
            f"--group_size 1: {recipe.algorithm} compares the trajectories of one question; it"
            " needs at least 2"
        )
    if recipe.kl_coef and recipe.kl_place == "loss" and recipe.kl_estimator == "k1":
        raise InputError(
            "--kl_estimator k1 in the loss has no expected gradient: use k2, or --kl_place reward"
        )
    if recipe.kl_coef and recipe.kl_place == "reward" and recipe.kl_estimator != "k1":
        raise InputError(
            f"--kl_estimator {recipe.kl_estimator} in the reward has another gradient than the KL:"
            " use k1"
        )
    check_8bit(recipe)
    if 0 < recipe.dual_clip <= 1:
        raise InputError(
            f"--dual_clip {recipe.dual_clip}: must be above 1 (3 is usual), or 0 for none"
        )
    check_reward(recipe)


def check_8bit(recipe: Recipe) -> None:
    """int8 weights are for models that nobody trains."""
    if recipe.sampling_copy == "bf16" and recipe.base_in_8bit:
        raise InputError(
            "--sampling_copy bf16 with --base_in_8bit: the copy would take the memory that 8 bits"
            " saved; use none"
        )
    if recipe.cuda_graphs and recipe.engine == "hf":
        raise InputError(
            "--cuda_graphs records the slots' decoding step: use --engine slots, or leave it out"
        )
    if recipe.base_in_8bit and not recipe.lora_rank:
        raise InputError(
            "--base_in_8bit: int8 weights cannot be trained, a step of 1e-6 rounds away: add"
            " --lora_rank 16, or leave it out (--optimizer adamw8bit has Adam's moments in 8 bits)"
        )
    if recipe.reference_in_8bit and recipe.lora_rank:
        raise InputError(
            "--reference_in_8bit: with --lora_rank the reference is the frozen base itself:"
            " --base_in_8bit"
        )
    if recipe.reference_in_8bit and not recipe.kl_coef:
        raise InputError(
            "--reference_in_8bit: with --kl_coef 0 no reference is loaded; leave it out"
        )


def check_reward(recipe: Recipe) -> None:
    """Does the reward find in the protocol what it reads, and can its terms keep their order?"""
    protocol = PROTOCOLS[recipe.protocol]
    if recipe.reward.startswith("when_to_search"):
        rewards.check_beta(recipe.beta, recipe.max_searches)
    for name in ("r_search", "when_to_search", "arena"):
        if recipe.reward.startswith(name) and recipe.protocol != name:
            raise InputError(
                f"--reward {recipe.reward} reads the sections of --protocol {name}, not of"
                f" {recipe.protocol}"
            )
    if recipe.reward.startswith("r1_searcher") and not protocol.answer_tags:
        raise InputError(
            f"--reward {recipe.reward} reads <answer> tags, which --protocol {recipe.protocol} does"
            " not have"
        )


def score(
    trajectory: Trajectory, recipe: Recipe, step: int, extras: Extras = NO_EXTRAS
) -> dict[str, float]:
    """The named components of one trajectory's reward under the recipe; the reward is their sum."""
    return REWARDS[recipe.reward](trajectory, recipe, step, extras)


class Scorer:
    """Rewards of all of a step's trajectories at once: another model is asked in one batch, not
    once per trajectory.

    The models are loaded, and a server is asked whether it is there, before the first rollout.
    """

    def __init__(self, recipe: Recipe, documents: list[Document], device="cpu"):
        self.recipe = recipe
        self.judge = Judge(build_llm(recipe, recipe.judge, device)) if recipe.judge else None
        needs_reader = recipe.reward == "r_search" and recipe.evidence_reward
        self.cross_model = build_cross_model(recipe, device) if needs_reader else None
        self.embed = (
            make_embedder(recipe.embedder, documents)
            if recipe.reward.startswith("when_to_search")
            else None
        )

    def __call__(
        self, trajectories: list[Trajectory], step: int
    ) -> tuple[list[dict[str, float]], list[bool]]:
        """(components of each reward, whether each answer is right)."""
        asked = (
            self.recipe.reward.startswith("when_to_search") or self.recipe.algorithm == "dapo"
        )  # these ask for "right"
        correct = right(trajectories, self.judge if asked else None)
        pairs = [(t.question, t.evidence if t.searches else None) for t in trajectories]
        read = (
            cross_answers(self.cross_model, pairs) if self.cross_model else [""] * len(trajectories)
        )
        grade = (
            math_grader(trajectories, self.judge)
            if self.judge and self.recipe.reward.startswith("ur2")
            else None
        )
        components = [
            score(t, self.recipe, step, Extras(is_right, answer, self.embed, grade))
            for t, is_right, answer in zip(trajectories, correct, read, strict=True)
        ]
        return components, correct

    def stats(self) -> dict[str, float]:
        """For the log: the share of verdicts that could not be read, and the requests that the
        reader left open, so far.
        """
        stats = (
            {"judge_unreadable": self.judge.unreadable / max(1, self.judge.asked)}
            if self.judge
            else {}
        )
        return stats | ({"reader_failures": self.cross_model.failures} if self.cross_model else {})


# How each paper decodes when it evaluates, where it is not greedy.
PAPER_DECODING: dict[str, dict] = {
    "ur2": {"temperature": 0.3, "top_p": 0.5},  # appendix C.3
    "vanilla_rl": {"temperature": 0.3, "top_p": 0.5},
    "r_search": {"temperature": 0.1, "documents_per_search": 5},  # section 4.1
}


# ------------------------------------------------------------------------- what a recipe stands for
# Training and evaluation build everything from here, so that prompt, documents and limits are the
# same in both.


def stage_folder(recipe: Recipe, stage: int | None = None) -> Path:
    """Where a stage keeps its files: runs/NAME/stageN; the default name says paper, data and
    seed.
    """
    data = Path(recipe.data.split(",")[0]).stem if recipe.data else f"world{recipe.world_seed}"
    return (
        Path(recipe.runs)
        / (recipe.name or f"{recipe.recipe}-{data}-seed{recipe.seed}")
        / f"stage{stage or recipe.stage}"
    )


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first. Half-written ones end in .partial."""
    return sorted(folder.glob("checkpoint-*[0-9]"))


def training_questions(recipe: Recipe) -> list[Question]:
    if recipe.data:
        return load_questions(recipe.data, skip_bad=recipe.skip_bad)
    world = world_for(recipe.protocol, recipe.world_seed)
    return [
        question for kind in built_in_kinds(recipe) for question in world.questions("train", kind)
    ]


def built_in_kinds(recipe: Recipe) -> tuple[str, ...]:
    """The kinds of question that the tiny model of this protocol was warmed up for."""
    return ("one_hop", "two_hop") if recipe.protocol in LAYOUTS else KINDS


def passages(recipe: Recipe, questions: list[Question]) -> list[Document]:
    """The corpus: a file, the records' own paragraphs, or the built-in world's passages."""
    if recipe.corpus == "from-data":
        return corpus_from_questions(questions)
    if recipe.corpus:
        return load_corpus(recipe.corpus, recipe.skip_bad)
    return [] if recipe.data else world_for(recipe.protocol, recipe.world_seed).documents


def build_search(recipe: Recipe, documents: list[Document], device="cpu") -> SearchFunction:
    """Retriever and summariser. A server gets one more try here: the rollout tries again only when
    all of a call failed.
    """
    if (
        PROTOCOLS[recipe.protocol].query_tags is None
    ):  # ARENA: the references come with the question
        return make_search(make_retriever("empty", []))
    retriever = make_retriever(
        recipe.retriever,
        documents,
        recipe.seed,
        recipe.title_boost,
        url=recipe.retriever_url,
        encoder=recipe.encoder,
        folder=recipe.vectors or str(Path(recipe.runs) / "vectors"),
        index_file=recipe.index_file,
        device=device,
        timeout=recipe.search_timeout,
        retries=min(1, recipe.search_retries),
        allow_private=recipe.allow_private,
        pooling=recipe.pooling,
        rate=recipe.web_rate,
    )
    llm = (
        build_llm(recipe, recipe.summarizer_model, device)
        if recipe.summarizer == "llm" and recipe.summarizer_model
        else None
    )
    return make_search(
        retriever,
        make_summarizer(recipe.summarizer, llm, recipe.summary_log),
        recipe.documents_per_search,
    )


def build_llm(recipe: Recipe, spec: str, device="cpu") -> LLM:
    """Another model: a server or a frozen HF model, with the recipe's limits and its cache."""
    cache = recipe.llm_cache or str(Path(recipe.runs) / "llm_cache")
    return load_llm(
        spec,
        cache=cache,
        timeout=recipe.llm_timeout,
        retries=recipe.llm_retries,
        load_in_8bit=recipe.load_in_8bit,
        device=device,
    )


def build_cross_model(recipe: Recipe, device="cpu") -> LLM:
    """R-Search's frozen reader: --cross_model, or in the built-in world a second tiny model with
    its own seed and shape.
    """
    if recipe.cross_model:
        return build_llm(recipe, recipe.cross_model, device)
    if recipe.data:
        raise InputError(
            "--reward r_search asks a frozen model of another family to answer from the evidence:"
            " give --cross_model http://host:port/v1#model or a HF model, or --evidence_reward"
            " false"
        )
    policy, tokenizer = load_reader(recipe.world_seed, recipe.runs)
    return LocalLLM(
        policy.to(device),
        tokenizer,
        max_tokens=8,
        batch_size=256,
        name=f"reader-world{recipe.world_seed}",
    )


def load_model(
    recipe: Recipe, path: str, device="cpu", frozen: bool = False, in_8bit: bool = False
) -> tuple[Policy, object]:
    """(policy, tokenizer) from `path`, or the built-in ones where it is ""."""
    if path:
        return load_policy(path, device, recipe.gradient_checkpointing, frozen, in_8bit)
    if in_8bit:
        raise InputError(
            "8 bits are for models from --model: the built-in one is made here, in fp32"
        )
    policy, tokenizer, _ = load_toy(recipe.world_seed, recipe.protocol, recipe.runs)
    return policy.to(device), tokenizer


def check_questions(questions: list[Question], recipe: Recipe) -> list[Question]:
    """The questions, or an InputError that names the first one without a field that the recipe
    reads.
    """
    if PROTOCOLS[recipe.protocol].references_in_prompt:
        for question in questions:
            if not question.references:
                raise InputError(
                    f"question {question.id} has no references, and --protocol {recipe.protocol}"
                    " shows them in the prompt: use data with paragraphs (HotpotQA, 2Wiki,"
                    " MuSiQue)"
                )
        if recipe.reward == "arena" and recipe.relevance_reward:
            rewards.check_supporting(questions)
    if recipe.reward == "ur2_choice":
        for question in questions:
            if question.task != "choice" or not question.options:
                raise InputError(
                    f"question {question.id} has no options, and --reward ur2_choice is for"
                    " multiple choice: use --reward ur2_stage2, or data with options"
                )
    if recipe.reward == "r_search" or recipe.reward.startswith("when_to_search"):
        for question in questions:
            if question.task == "choice":
                raise InputError(
                    f"question {question.id} is multiple choice, and --reward {recipe.reward}"
                    " compares texts"
                )
    return questions


def build_protocol(recipe: Recipe) -> Protocol:
    protocol = as_protocol(recipe.protocol)
    if not recipe.prompt_file:
        return protocol
    try:
        instruction = Path(recipe.prompt_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompt_file {recipe.prompt_file}: {error}") from None
    return dataclasses.replace(protocol, instruction=instruction)


def answer_scores(trajectory: Trajectory) -> dict[str, float]:
    """em, f1 and cem of the final answer. Punctuation becomes a blank or nothing, as each paper's
    own scorer has it.
    """
    question, punctuation = trajectory.question, punctuation_of(trajectory.protocol.name)
    return score_answer(
        trajectory.answer, question.answers, question.task, question.options, punctuation
    )


def punctuation_of(protocol: str) -> str:
    return "delete" if protocol in ("r_search", "when_to_search") else "space"


def rollout_settings(recipe: Recipe) -> dict:
    """What `rollout` takes from a recipe."""
    return {
        "temperature": recipe.temperature,
        "top_p": recipe.top_p,
        "max_searches": recipe.max_searches,
        "max_turn_tokens": recipe.max_turn_tokens,
        "max_context": recipe.max_context or None,
        "document_tokens": recipe.document_tokens,
        "notices": recipe.notices,
        "retrieval": recipe.retrieval,
        "batch_size": recipe.rollout_batch_size,
        "engine": recipe.engine,
        "cuda_graphs": recipe.cuda_graphs,
        "retries": recipe.search_retries,
        "timeout": search_seconds(recipe),
    }


def search_seconds(recipe: Recipe) -> float:
    """How long one search may take: its own limit, and with an LLM as summariser the tries that its
    model is allowed. What asks over the network says itself how long that may take for so many
    queries (`rollout.call_search` adds it).
    """
    asked = (recipe.llm_retries + 1) * recipe.llm_timeout if recipe.summarizer == "llm" else 0.0
    return recipe.search_timeout + asked


# --------------------------------------------------------------------------------- the command line


def boolean(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def add_flags(parser: argparse.ArgumentParser, names: list[str] | None = None) -> None:
    """A --flag for every field of Recipe (or for `names`), without a default: only what was given
    overrides.
    """
    for f in dataclasses.fields(Recipe):
        if names is None or f.name in names:
            kind = {"int": int, "float": float, "bool": boolean}.get(f.type, str)
            once = {"nargs": "?", "const": True} if kind is boolean else {}
            names_of = (
                f"one of {', '.join(f.metadata['one_of'])}; " if "one_of" in f.metadata else ""
            )
            text = f"{f.metadata['help']} ({names_of}default {f.default!r})"
            parser.add_argument(
                f"--{f.name}",
                type=kind,
                default=argparse.SUPPRESS,
                help=text,
                metavar=f.type.upper(),
                **once,
            )


def parse_recipe(arguments: list[str] | None = None) -> Recipe:
    """The command line as a Recipe."""
    parser = FlagParser(
        "train.py", description="Train one stage of one paper; --plan: what of it fits."
    )
    add_flags(parser)
    given = vars(parser.parse_args(arguments))
    return check_recipe(
        resolve(given.get("recipe", "ur2"), given.get("stage", 1), not given.get("model"), given)
    )


def shown_settings(recipe: Recipe) -> str:
    """What this run sets otherwise than the defaults, for the console; a run's settings.json holds
    every setting.
    """
    settings, defaults = dataclasses.asdict(recipe), dataclasses.asdict(Recipe())
    changed = [
        f"{k}={v}" for k, v in settings.items() if v != defaults[k] or k in ("recipe", "stage")
    ]
    text = "settings: " + " ".join(changed)
    return textwrap.fill(
        text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def table() -> list[list[str]]:
    """The papers' hyper-parameters: a header, a row per setting that any paper sets, and the
    sources. "·" is the default.
    """
    columns = [(name, stage) for name in RECIPES for stage in RECIPES[name]]
    used = {key for name, stage in columns for key in RECIPES[name][stage]}
    rows = [
        [
            "setting",
            "default",
            *[f"{name} {stage}" if len(RECIPES[name]) > 1 else name for name, stage in columns],
        ]
    ]
    for f in dataclasses.fields(Recipe):
        if f.name in used:
            rows.append(
                [
                    f.name,
                    _cell(f.default),
                    *[_cell(RECIPES[n][s].get(f.name, "·")) for n, s in columns],
                ]
            )
    return [*rows, ["source", "", *[SOURCES[name] for name, _ in columns]]]


def _cell(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown_table() -> str:
    header, *rows = table()
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]
    )


def main() -> None:
    """The papers' settings, a row per paper and stage here, so that they fit a screen; --markdown:
    docs/papers.md's table.
    """
    parser = FlagParser("recipes.py", description="Print the hyper-parameters of the five papers.")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/papers.md")
    if parser.parse_args().markdown:
        print(markdown_table())
        return
    columns = list(zip(*table(), strict=True))  # one line for each column of the table
    for block in range(1, len(columns[0]) - 1, 7):
        cells = [
            [column[0], *column[block : min(block + 7, len(columns[0]) - 1)]] for column in columns
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        for row in cells:
            print(
                "  ".join(
                    f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)
                ).rstrip()
            )
        print()
    for name, source in SOURCES.items():
        print(f"{name:23} {source}")


if __name__ == "__main__":
    run_main(main)
