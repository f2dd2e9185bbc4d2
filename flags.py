"""Defines the flags of the files below, which import torch: one settings record for each file or
folder. They are here because importing torch takes seconds, while --help, `python papers.py` and
the message for a typo appear within a second. The settings of a run as a whole (recipe, model,
seed, ...) are in settings.py (`RunSettings`); all other records are in the files that read them.

    rollout.py  engines/  other_models/  update.py  ppo.py  kl.py  reinforce_pp.py  dapo.py
    policy.py

`settings.Settings` inherits these records and the others of a training run (settings.RECORDS).
Commands such as eval.py and those in lab/ have more records of their own. Left out: the papers'
values (papers.py) and the checks of flags that contradict each other (settings.py).
"""

from dataclasses import dataclass

from errors import InputError, setting

# Names that flags accept. A test compares the first three tuples with the tables in update.py,
# kl.py and ppo.py.
ALGORITHMS = ("reinforce_pp", "reinforce_pp_baseline", "grpo", "dapo", "ppo")  # update.py
ESTIMATORS = ("k1", "k2", "k3", "log")  # kl.py
MISMATCHES = ("auto", "none", "token", "sequence_mask")  # ppo.py
OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw8bit")
SCHEDULES = ("constant", "linear", "cosine")
LOCAL = ("slots", "hf")  # engines that sample in this process
PARTS = ("base", "reference", "others")  # the values of --in_8bit
# --algorithm dapo sets these values of the DAPO paper in a recipe that has another algorithm.
DAPO = {"clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token", "kl_coef": 0.0}


@dataclass(frozen=True)
class RolloutSettings:
    """rollout.py"""

    group_size: int = setting(16, "trajectories per question, G", least=1, only="train")
    temperature: float = setting(
        1.0, "divides the logits when sampling and when computing log-probs; 0: greedy", least=0
    )
    top_p: float = setting(
        1.0,
        "sample from the smallest set of likeliest tokens with at least this total probability",
        above=0,
        most=1,
        only="eval",
    )
    max_searches: int = setting(4, "maximum searches per trajectory", least=0, most=10_000)
    task_searches: str = setting("", "max_searches of single tasks: task=N,...", only="papers")
    max_turn_tokens: int = setting(512, "maximum number of new tokens per turn", least=1)
    turn_tokens: str = setting("", "max_turn_tokens of single tasks: task=N,...", only="papers")
    max_context: int = setting(
        0, "maximum tokens of prompt and response; 0: the model's limit", least=0
    )
    document_tokens: int = setting(1024, "maximum number of document tokens per search", least=1)
    max_num_seqs: int = setting(
        0, "maximum trajectories that a process samples at once; 0: the engine chooses", least=0
    )
    timeout: float = setting(
        60.0,
        "time limit in seconds of one try of a request to a server; vLLM servers have other limits "
        "for sampling and for loading weights",
        above=0,
        most=86_400,
    )


@dataclass(frozen=True)
class EngineSettings:
    """engines/"""

    engine: str = setting(
        "slots",
        "how rollouts are sampled: slots (continuous batching in this process), hf (generate), or "
        "the addresses of vLLM servers: http://host:port[,http://...]",
    )
    served: str = setting(
        "/dev/shm", "folder through which vLLM servers receive the weights", only="train"
    )
    sampling_copy: str = setting(
        "auto",
        "copy of the weights to sample with: bf16, none; auto: bf16 on a GPU, none on a CPU or for "
        "int8 weights",
        only="papers",
    )


@dataclass(frozen=True)
class ModelSettings:
    """other_models/llm.py"""

    judge: str = setting(
        "", "model that judges answers: URL#model or a HF model; without it, a metric decides"
    )
    reader: str = setting(
        "", "R-Search's frozen model that answers from the evidence: URL#model or a HF model"
    )
    embedder: str = setting(
        "tfidf", "what embeds the queries (When to Search): tfidf or a HF encoder", only="train"
    )
    in_8bit: str = setting(
        "",
        "frozen models to load in int8, comma-separated: base (under LoRA), reference, others "
        "(judge, reader, summariser)",
    )


@dataclass(frozen=True)
class UpdateSettings:
    """update.py"""

    algorithm: str = setting("reinforce_pp_baseline", "the RL algorithm", one_of=ALGORITHMS)
    steps: int = setting(100, "training steps; each is a rollout and the updates on it", least=1)
    trajectories_per_update: int = setting(
        256, "maximum trajectories in an update; 0: all trajectories of a step", least=0
    )
    tokens_per_micro_batch: int = setting(
        16384,
        "maximum tokens per micro-batch, padding included; a longer trajectory gets its own",
        least=1,
    )
    mask_documents: bool = setting(
        True, "train on the policy's own tokens only; False (an ablation): on inserted text too"
    )


@dataclass(frozen=True)
class PPOSettings:
    """ppo.py"""

    clip_low: float = setting(0.2, "the ratio is clipped below at 1 − clip_low", least=0, most=1)
    clip_high: float = setting(0.2, "the ratio is clipped above at 1 + clip_high", least=0)
    loss_aggregation: str = setting(
        "sequence",
        "how the token losses are averaged: sequence = within each trajectory, then over all "
        "trajectories; token = over all tokens; question = within each question's group, then over "
        "all questions",
        one_of=("sequence", "token", "question"),
    )
    mismatch: str = setting(
        "auto",
        "corrects for a sampler whose log-probs differ from the policy's; ρ of a token is the "
        "policy's probability divided by the sampler's. token: multiply its loss by min(ρ, 2); "
        "sequence_mask: by Π, the product of ρ over the trajectory, but drop trajectories with Π "
        "above 3; auto: token on a GPU, and on a CPU with vLLM servers or a bf16 copy; otherwise, "
        "and with --mask_documents false, none",
        one_of=MISMATCHES,
    )
    gae_lambda: float = setting(1.0, "PPO: GAE's λ", only="papers", least=0, most=1)
    critic_lr: float = setting(1e-5, "PPO: learning rate of the critic", above=0)
    critic_warmup_ratio: float = setting(
        0.0, "PPO: like --warmup_ratio, for critic_lr", only="papers", least=0, below=1
    )


@dataclass(frozen=True)
class KLSettings:
    """kl.py"""

    kl_coef: float = setting(
        0.0,
        "weight of the KL to the model that the stage started from; 0: no reference is loaded",
        least=0,
    )
    kl_estimator: str = setting(
        "k2",
        "k1 is subtracted from the reward, k2 and k3 are added to the loss; log: only measured",
        one_of=ESTIMATORS,
    )


@dataclass(frozen=True)
class ReinforceSettings:
    """reinforce_pp.py"""

    group_std: bool = setting(
        True,
        "reinforce_pp_baseline: divide advantages by the group's std (UR² eq. 5)",
        only="papers",
    )
    whiten_tokens: bool = setting(
        False, "reinforce_pp_baseline: whiten over tokens, not trajectories", only="papers"
    )


@dataclass(frozen=True)
class DapoSettings:
    """dapo.py"""

    max_resample: int = setting(
        3,
        "DAPO: maximum extra draws per step, each of --questions_per_step questions",
        only="papers",
        least=0,
    )
    filter_by: str = setting(
        "correct",
        "DAPO: keep groups whose trajectories differ in: correct (right or wrong), answer (the "
        "reward term of this name), total (the reward)",
        only="papers",
    )


@dataclass(frozen=True)
class PolicySettings:
    """policy.py"""

    optimizer: str = setting(
        "adamw",
        "8bit: Adam's moments in 8 bits; paged: they move to the CPU when the GPU is full",
        one_of=OPTIMIZERS,
    )
    lr: float = setting(2e-6, "learning rate", above=0)
    warmup_ratio: float = setting(0.0, "share of all updates with linear warm-up", least=0, below=1)
    lr_schedule: str = setting(
        "constant",
        "learning rate after the warm-up; linear and cosine fall towards 0",
        one_of=SCHEDULES,
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: slower, with less memory"
    )
    lora_rank: int = setting(0, "rank of LoRA adapters (needs peft); 0: train all weights", least=0)


def on_servers(settings: EngineSettings) -> bool:
    return settings.engine not in LOCAL


def frozen_in_8bit(settings: ModelSettings) -> set[str]:
    """Parses --in_8bit: "others, base" -> {"base", "others"}."""
    parts = {part.strip() for part in settings.in_8bit.split(",")} - {""}
    if unknown := sorted(parts - set(PARTS)):
        raise InputError(f"--in_8bit {unknown[0]}: unknown; give one or more of {', '.join(PARTS)}")
    return parts
