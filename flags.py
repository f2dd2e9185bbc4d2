"""The flags whose files load torch: a record per file, as every other file of the path opens with
its own. They stand here so that a typo, --help and `python papers.py` are answered in a second.

    rollout.py  scale/engine.py  other_models/  update.py  ppo.py  kl.py  reinforce_pp.py  dapo.py
    policy.py

`settings.Settings` inherits all records. Left out: what a paper chooses (papers.py), and what may
not be combined (settings.py).
"""

from dataclasses import dataclass

from errors import InputError, setting

# The names alone; a test holds them against the tables of the files that know what they mean.
ALGORITHMS = ("reinforce_pp", "reinforce_pp_baseline", "grpo", "dapo", "ppo")  # update.py
ESTIMATORS = ("k1", "k2", "k3", "log")  # kl.py
MISMATCHES = ("auto", "none", "token", "sequence", "mask", "sequence_mask", "row")  # ppo.py
OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw8bit")
SCHEDULES = ("constant", "linear", "cosine")
LOCAL = ("slots", "hf")  # engines of this process
PARTS = ("base", "reference", "others")  # of --in_8bit
# What --algorithm dapo brings to another paper's recipe: the numbers of the DAPO paper.
DAPO = {"clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token", "kl_coef": 0.0}


@dataclass(frozen=True)
class RolloutSettings:
    """rollout.py"""

    group_size: int = setting(16, "trajectories per question, G", least=1, only="train")
    temperature: float = setting(1.0, "of sampling, and of scoring; 0 is greedy", least=0)
    top_p: float = setting(1.0, "below 1 it is not what is scored", above=0, most=1, only="eval")
    max_searches: int = setting(4, "per trajectory", least=0, most=10_000)
    task_searches: str = setting("", "of tasks with another number: task=N,...", only="papers")
    max_turn_tokens: int = setting(512, "new tokens per turn", least=1)
    turn_tokens: str = setting("", "of tasks with another limit: task=tokens,...", only="papers")
    max_context: int = setting(0, "prompt and response in tokens; 0 = the model's limit", least=0)
    document_tokens: int = setting(1024, "tokens of documents per search at most", least=1)
    max_num_seqs: int = setting(0, "trajectories sampled at once; 0 = all", least=0)
    timeout: float = setting(
        60.0, "seconds until a search or a request has failed", above=0, most=86_400
    )


@dataclass(frozen=True)
class EngineSettings:
    """scale/engine.py"""

    engine: str = setting(
        "slots",
        "samples a rollout: slots (rows of different lengths together), hf (plain generate), or "
        "vLLM servers (scale/server.py): http://host:port[,http://...]",
    )
    served: str = setting(
        "/dev/shm", "folder through which vLLM servers get the weights", only="train"
    )
    sampling_copy: str = setting(
        "auto",
        "of the weights, for a rollout: bf16, none; auto: bf16 on a GPU, not of int8",
        only="papers",
    )


@dataclass(frozen=True)
class ModelSettings:
    """other_models/llm.py"""

    judge: str = setting("", "of right and wrong: URL#model or a HF model; by itself a metric")
    reader: str = setting("", "R-Search's reader of evidence: URL#model or a HF model")
    embedder: str = setting("tfidf", "of queries: tfidf, or a HF encoder", only="train")
    in_8bit: str = setting("", "frozen weights in 8 bits: some of base (LoRA's),reference,others")


@dataclass(frozen=True)
class UpdateSettings:
    """update.py"""

    algorithm: str = setting("reinforce_pp_baseline", "whose advantage it is", one_of=ALGORITHMS)
    steps: int = setting(100, "rollouts; each is followed by its updates", least=1)
    trajectories_per_update: int = setting(256, "0 = all of a step in one update", least=0)
    tokens_per_micro_batch: int = setting(16384, "padded tokens per forward pass", least=1)
    mask_documents: bool = setting(True, "False trains on the documents too (ablation)")


@dataclass(frozen=True)
class PPOSettings:
    """ppo.py"""

    clip_low: float = setting(0.2, "the ratio is clipped below 1 − this", least=0, most=1)
    clip_high: float = setting(0.2, "and above 1 + this", least=0)
    loss_aggregation: str = setting(
        "sequence",
        "mean per trajectory first, over all tokens, or per question first",
        one_of=("sequence", "token", "question"),
    )
    mismatch: str = setting(
        "auto",
        "how the policy's loss is weighted where it was sampled with other log-probs, ρ the ratio: "
        "token and sequence hold ρ, a token's or a row's product, at 2; mask drops tokens beyond "
        "1/2 and 2, sequence_mask rows above 3, row those whose mean is 0.1 % off; auto is token "
        "where another precision or engine samples, and none elsewhere",
        one_of=MISMATCHES,
    )
    gae_lambda: float = setting(1.0, "PPO: GAE's λ", only="papers", least=0, most=1)
    critic_lr: float = setting(1e-5, "PPO: learning rate of the critic", above=0)
    critic_warmup_ratio: float = setting(
        0.0, "PPO: as --warmup_ratio, of critic_lr", only="papers", least=0, below=1
    )


@dataclass(frozen=True)
class KLSettings:
    """kl.py"""

    kl_coef: float = setting(
        0.0, "weight of the KL to the model at the stage's start; 0 loads no reference", least=0
    )
    kl_estimator: str = setting(
        "k2", "k1 stands in the reward, k2 and k3 in the loss; log only measures", one_of=ESTIMATORS
    )


@dataclass(frozen=True)
class ReinforceSettings:
    """reinforce_pp.py"""

    group_std: bool = setting(True, "divide by the group's std (UR² eq. 5)", only="papers")
    whiten_tokens: bool = setting(
        False, "baseline: batch statistics over tokens, not trajectories", only="papers"
    )


@dataclass(frozen=True)
class DapoSettings:
    """dapo.py"""

    max_resample: int = setting(3, "extra draws of a step, at most", only="papers", least=0)
    filter_by: str = setting(
        "correct", "groups that differ in this are kept: correct, answer, total", only="papers"
    )


@dataclass(frozen=True)
class PolicySettings:
    """policy.py"""

    optimizer: str = setting(
        "adamw", "8 bits are for Adam's moments; paged: on the CPU when need be", one_of=OPTIMIZERS
    )
    lr: float = setting(2e-6, "learning rate", above=0)
    warmup_ratio: float = setting(0.0, "linear warm-up: a share of all updates", least=0, below=1)
    lr_schedule: str = setting("constant", "after the warm-up; two end at 0", one_of=SCHEDULES)
    gradient_checkpointing: bool = setting(False, "compute activations again in the backward pass")
    lora_rank: int = setting(
        0, "train two thin matrices beside each frozen one (needs peft); 0: all weights", least=0
    )


def on_servers(settings: EngineSettings) -> bool:
    return settings.engine not in LOCAL


def frozen_in_8bit(settings: ModelSettings) -> set[str]:
    """What --in_8bit names: "others, base" -> {"base", "others"}."""
    parts = {part.strip() for part in settings.in_8bit.split(",")} - {""}
    if unknown := sorted(parts - set(PARTS)):
        raise InputError(f"--in_8bit {unknown[0]}: unknown; a comma list of {', '.join(PARTS)}")
    return parts
