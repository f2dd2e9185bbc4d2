"""Every setting of a run, in one record: plain data that imports nothing else of this project.

    defaults  <  the paper's stage  <  its values for the tiny model  <  the command line

papers/ has the papers' values, and flags.py reads the command line. A field is a flag of train.py
and lab.plan (`train_only`), of all commands but train.py (`eval_only`), or of all commands
(`setting`). A field that has only a comment is no flag: papers/ and lab/claims.py set it. Left out:
settings files, because a shell script with the flags does the same.
"""

import ast
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial

from errors import InputError, nearest

# Names that flags accept. Tests compare them with the tables of the files that use them.
RETRIEVERS = ("bm25", "dense", "http", "random", "empty", "oracle", "given")  # retriever.py
ALGORITHMS = ("reinforce_pp", "reinforce_pp_baseline", "grpo", "dapo", "ppo")  # update.py


def setting(default, help: str, **limits):
    """Declares a flag. `limits` may have the bounds least and most; `one_of`, the names that are
    allowed; `shares`, True if a dict has weights; `only`, as above; and `needed`, True if the flag
    must be given.
    """
    metadata = {"help": help, **limits}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


train_only = partial(setting, only="train")
eval_only = partial(setting, only="eval")


@dataclass(frozen=True)
class Settings:
    # ---------------------------------------------------------------------------- what is trained
    recipe: str = setting("ur2", "the paper to reproduce; `python -m papers` lists them")
    variant: str = setting(
        "", "name of a variant of the recipe: another backbone, other data or an ablation"
    )
    stage: int = setting(
        1, "1: learn to search, or the only stage; 2: learn to answer, from stage 1's model"
    )
    model: str = setting(
        "",
        'HF causal LM (folder or hub name); "": in stage 2 the last checkpoint of stage 1, in '
        "evaluations the last of the run, else the built-in model",
    )
    toy_init: str = ""  # built-in model: name of a weaker supervised warm-up (Paper.warm_ups)
    run_name: str = setting("", "the run's files are written to OUTPUT_DIR/NAME/stageN")
    output_dir: str = setting("runs", "folder for all runs and the built-in models")
    resume: bool = train_only(
        False, "continue from this run's last checkpoint; settings that are not given are its own"
    )
    dry_run: bool = train_only(False, "try a small step, report problems, save no run")
    save_every: int = train_only(
        10, "steps between checkpoints; the last step is always saved", least=1
    )
    keep_checkpoints: int = train_only(
        2, "last checkpoints to keep, besides the best evaluated; 0: all", least=0
    )
    eval_every: int = train_only(0, "steps between greedy evaluations; 0: never", least=0)
    # questions in an evaluation of --eval_every; below 1: this share of --data; in the built-in
    # world: per kind of question
    eval_questions: float = 100
    groups_kept: int = 4  # groups of trajectories saved per step for view.py; -1: all
    report_to: str = train_only(
        "",
        "tracker that also receives the metrics; each needs its own package",
        one_of=("", "tensorboard", "wandb", "trackio"),
    )
    seed: int = setting(0, "random seed of questions and sampling", least=0, most=2**31 - 1)
    world_seed: int = setting(0, "random seed of the built-in world and its models")

    # ---------------------------------------------------------------------- questions, documents
    data: str = setting(
        "", 'question files, comma-separated; FILE:N draws N questions; "" = the built-in world'
    )
    corpus: str = setting(
        "", 'file or folder of documents; "from-data" = the references of the questions in --data'
    )
    skip_bad: bool = setting(False, "skip malformed records and count them")
    # built-in world: share of look-up training questions whose gold answers get an extra word
    reworded: float = 0.0
    questions_per_step: int = train_only(
        64, "questions per step, and per extra draw of DAPO", least=1
    )
    mix: dict = train_only(
        {},
        'share of each kind in every step: kind=weight,...; "hotpotqa" means all kinds that begin'
        ' with "hotpotqa_"; with --difficulty also kind:bucket=weight, in place of the recipe\'s '
        "shares; without it, as in the data",
        shares=True,
    )
    difficulty: str = train_only(
        "",
        'file of lab.difficulty that sorts questions into buckets; "level" = the level in --data',
    )
    # without `mix`, the share of each bucket: {"hard": 7, "easy": 1}; for one task or kind:
    # {"math:hard": 1, ...}
    buckets: dict = field(default_factory=dict)
    task_mixing: bool = train_only(
        False,
        "let only half of the multiple-choice questions search, and of the math questions only "
        "some buckets of --difficulty (in most recipes: hard and dropped)",
    )
    # task mixing: what share of the math questions in each bucket may search
    math_searches: dict = field(default_factory=lambda: {"hard": 1, "dropped": 1})

    # ------------------------------------------------------------------------------------ prompts
    protocol: str = eval_only("ur2", "the paper's tags and prompt")
    prompt_file: str = setting(
        "",
        "your own prompts: a file with a line such as [policy:math] above each prompt (without "
        "such a line, the whole file is the prompt [policy]); see docs/extend.md",
    )
    retrieval: bool = eval_only(
        True, "False: no question may search, and each gets the prompt without retrieval"
    )
    chat_template: str = setting(
        "",
        "for every model that is loaded here, so not for servers: none, a plain layout instead of "
        "the chat template (for base models that have one); or variables of the template, as JSON: "
        '{"enable_thinking": false}',
    )
    # tasks whose questions may not search (prompt without retrieval), such as "math,choice"
    direct_tasks: str = ""

    # ------------------------------------------------------------------------------------ rollout
    engine: str = setting(
        "slots",
        "how rollouts are sampled: slots (continuous batching in this process), hf (generate), or "
        "the addresses of vLLM servers: http://host:port[,http://...]",
    )
    served: str = train_only("/dev/shm", "folder through which vLLM servers receive the weights")
    group_size: int = train_only(16, "trajectories per question, G", least=1)
    temperature: float = setting(
        1.0, "divides the logits when sampling and when computing log-probs; 0: greedy", least=0
    )
    top_p: float = eval_only(
        1.0,
        "sample from the smallest set of likeliest tokens with at least this total probability",
        least=0.01,
        most=1,
    )
    max_searches: int = setting(4, "maximum searches per trajectory", least=0)
    task_searches: dict = field(default_factory=dict)  # max_searches of single tasks
    max_turn_tokens: int = setting(512, "maximum number of new tokens per turn", least=1)
    turn_tokens: dict = field(default_factory=dict)  # max_turn_tokens of single tasks
    max_context: int = setting(
        0, "maximum tokens of prompt and response; 0: the model's limit", least=0
    )
    document_tokens: int = setting(1024, "maximum number of document tokens per search", least=1)
    max_num_seqs: int = setting(
        0, "maximum trajectories that a process samples at once; 0: the engine chooses", least=0
    )
    retriever: str = setting(
        "bm25",
        "bm25 and dense search the corpus, http asks a server, the others are controls",
        one_of=RETRIEVERS,
    )
    retriever_url: str = setting("", "http: the server's address, http://host:port")
    encoder: str = setting(
        "", "dense: an encoder's hub name, such as intfloat/e5-base-v2, or its directory"
    )
    title_boost: int = setting(1, "how often BM25 counts a document's title", least=0)
    documents_per_search: int = setting(5, "documents per query", least=1)
    summarizer: str = setting(
        "none",
        "what the policy reads: none = the documents; extractive = the best document if a query"
        " (of at most 12 words, none an arithmetic sign) contains its title, else the fallback"
        ' or "None"; a model = its notes on the'
        " documents (http://host:port/v1#model, a HF directory or hub name);"
        " math=MODEL,other=MODEL = a model per task",
    )
    fallback: bool = eval_only(
        False, "let the model that writes notes reject queries, as in training"
    )
    # sampling of the notes: task -> [temperature, top_p, tokens]
    summary_sampling: dict = field(default_factory=dict)
    timeout: float = setting(
        60.0,
        "time limit in seconds of one try of a request to a server; vLLM servers have other limits "
        "for sampling and for loading weights",
        least=0.01,
    )

    # ------------------------------------------------------------------------------------- reward
    reward: str = train_only(
        "ur2_stage1",
        "name of the reward (python rewards.py lists them), or FILE.py:FUNCTION for your own; those"
        " ending in _code or _llama follow a paper's released code",
    )
    reward_args: dict = train_only(
        {},
        "arguments of the reward, such as fallback_penalty=0.0,format_check=loose; its function in "
        "rewards.py explains them",
    )
    left_out: str = ""  # reward term to leave out, as in When to Search's Table 4
    whole_reply: bool = False  # R-Search: score the reader's whole reply (eq. 4), not its answer
    judge: str = setting(
        "", "model that judges answers: URL#model or a HF model; without it, a metric decides"
    )
    reader: str = setting(
        "", "R-Search's frozen model that answers from the evidence: URL#model or a HF model"
    )
    embedder: str = train_only(
        "tfidf", "what embeds the queries (When to Search): tfidf or a HF encoder"
    )

    # ------------------------------------------------------------------------------------- update
    algorithm: str = train_only("reinforce_pp_baseline", "the RL algorithm", one_of=ALGORITHMS)
    steps: int = train_only(100, "training steps; each is a rollout and the updates on it", least=1)
    trajectories_per_update: int = train_only(
        256,
        "maximum trajectories in an update; 0: all trajectories of a step",
        least=0,
    )
    tokens_per_micro_batch: int = train_only(
        16384,
        "maximum tokens per micro-batch, padding included; a longer trajectory gets its own",
        least=1,
    )
    # train on the policy's own tokens only; False (an ablation): on inserted text too
    mask_documents: bool = True
    clip_low: float = 0.2  # the ratio is clipped below at 1 − clip_low: 0.8 in all recipes
    clip_high: float = train_only(0.2, "the ratio is clipped above at 1 + clip_high", least=0)
    loss_aggregation: str = train_only(
        "sequence",
        "how the token losses are averaged: sequence = within each trajectory, then over all "
        "trajectories; token = over all tokens; question = within each question's group, then over "
        "all questions",
        one_of=("sequence", "token", "question"),
    )
    mismatch: str = train_only(
        "auto",
        "corrects for a sampler whose log-probs differ from the policy's; ρ of a token is the "
        "policy's probability divided by the sampler's. token: multiply its loss by min(ρ, 2); "
        "sequence_mask: by Π, the product of ρ over the trajectory, but drop trajectories with Π "
        "above 3; auto: token on a GPU or with vLLM servers; otherwise none",
        one_of=("auto", "none", "token", "sequence_mask"),
    )
    kl_coef: float = train_only(
        0.0,
        "weight of the KL to the model that the stage started from; 0: no reference is loaded",
        least=0,
    )
    kl_estimator: str = train_only(
        "k2",
        "k1 is subtracted from the reward, k2 and k3 are added to the loss; log: only measured",
        one_of=("k1", "k2", "k3", "log"),
    )
    group_std: bool = True  # reinforce_pp_baseline: divide by the group's std (UR² eq. 5)
    whiten_tokens: bool = False  # reinforce_pp_baseline: whiten over tokens, not trajectories
    gae_lambda: float = 1.0  # PPO: GAE's λ
    critic_lr: float = train_only(1e-5, "PPO: learning rate of the critic", least=1e-9)
    critic_warmup_ratio: float = 0.0  # PPO: like --warmup_ratio, for critic_lr
    # DAPO: maximum extra draws per step, each of --questions_per_step questions
    max_resample: int = 3
    # DAPO: keep groups whose trajectories differ in: correct (right or wrong), answer (the reward
    # term of this name), total (the reward)
    filter_by: str = "correct"

    # ----------------------------------------------------------------------- optimizer and memory
    optimizer: str = train_only(
        "adamw",
        "8bit: Adam's moments in 8 bits; paged: they move to the CPU when the GPU is full",
        one_of=("adamw", "adamw8bit", "paged_adamw8bit"),
    )
    lr: float = train_only(2e-6, "learning rate", least=1e-9)
    warmup_ratio: float = train_only(
        0.0, "share of all updates with linear warm-up", least=0, most=0.99
    )
    # learning rate after the warm-up: "constant"; "linear" and "cosine" fall towards 0
    lr_schedule: str = "constant"
    gradient_checkpointing: bool = train_only(
        False, "recompute activations in the backward pass: slower, with less memory"
    )
    lora_rank: int = train_only(
        0, "rank of LoRA adapters (needs peft); 0: train all weights", least=0
    )
    load_in_8bit: bool = setting(
        False, "load frozen models (LoRA's base, the reference, judge, reader, ...) in int8"
    )


WITHOUT_MODEL = ("none", "extractive")  # values of --summarizer that write no notes


def by_task(text: str) -> dict[str, str]:
    """Parses --summarizer into {task: summariser}. Task "other" is every task that is not named.

    >>> by_task("math=http://a/v1#m,other=none"), by_task("extractive")
    ({'math': 'http://a/v1#m', 'other': 'none'}, {'other': 'extractive'})
    """
    named = dict(re.findall(r"(?:^|,)\s*(\w+)=([^,]+)", text))
    known = {"qa", "math", "choice", "summary", "other"} >= {*named}
    if named and not ("other" in named and known and len(named) == len(text.split(","))):
        raise InputError(f"--summarizer {text}: give MODEL, or math=MODEL,other=MODEL")
    return named or {"other": text}


def pairs(text: str) -> dict:
    """Parses the value of a flag.

    >>> pairs("one_hop=3, format_check=loose")
    {'one_hop': 3, 'format_check': 'loose'}
    """
    values = {}
    for part in filter(None, text.split(",")):
        name, value = map(str.strip, part.split("=", 1))  # argparse reports a ValueError
        if name in values:
            raise ValueError(f"{name} is given twice")
        with suppress(ValueError, SyntaxError):  # it is a word
            value = ast.literal_eval(value)
        values[name] = value
    return values


def check_value(name: str, value, limits) -> None:
    """Raises an InputError if a setting breaks one of its limits, or is infinite or NaN."""
    fault = ""
    names = limits.get("one_of", [value])
    if value not in names:
        fault = f"unknown; one of {', '.join(names)}{nearest(value, names)}"
    if "least" in limits and value < limits["least"]:
        fault = f"must be at least {limits['least']}"
    if "most" in limits and value > limits["most"]:
        fault = f"must be at most {limits['most']}"
    if isinstance(value, float) and not math.isfinite(value):
        fault = "must be a finite number"
    if limits.get("shares") and value:
        numbers = [x for x in value.values() if isinstance(x, int | float) and x >= 0]
        if len(numbers) < len(value) or not 0 < sum(numbers) < math.inf:
            fault = "weights are numbers of at least 0, one of them above 0"
    if fault:
        raise InputError(f"--{name} {value}: {fault}")


def check_limits(record) -> None:
    """Checks every field of a record against the limits in the field's metadata."""
    for f in fields(record):
        check_value(f.name, getattr(record, f.name), f.metadata)
