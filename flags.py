"""The flags of files that import torch, one record per file; other files define their own records.
They are here so that a typo, --help and `python papers.py` are answered within a second.

    rollout.py  scale/engine.py  other_models/  update.py  ppo.py  kl.py  reinforce_pp.py  dapo.py
    policy.py

`settings.Settings` inherits all records. Left out: what a paper chooses (papers.py), and what may
not be combined (settings.py).
"""

from dataclasses import dataclass

from errors import InputError, setting

# Only the names; a test compares them with the tables of the files that implement them.
ALGORITHMS = ("reinforce_pp", "reinforce_pp_baseline", "grpo", "dapo", "ppo")  # update.py
ESTIMATORS = ("k1", "k2", "k3", "log")  # kl.py
MISMATCHES = ("auto", "none", "token", "sequence", "mask", "sequence_mask", "row")  # ppo.py
OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw8bit")
SCHEDULES = ("constant", "linear", "cosine")
LOCAL = ("slots", "hf")  # engines that run in this process
PARTS = ("base", "reference", "others")  # values of --in_8bit
# The DAPO paper's numbers, which --algorithm dapo sets in the recipe of another paper.
DAPO = {"clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token", "kl_coef": 0.0}


@dataclass(frozen=True)
class RolloutSettings:
    """rollout.py"""

    group_size: int = setting(16, "number of trajectories per question, G", least=1, only="train")
    temperature: float = setting(
        1.0, "sampling temperature, also used for log-probs; 0 decodes greedily", least=0
    )
    top_p: float = setting(
        1.0, "nucleus sampling; 1 samples the whole distribution", above=0, most=1, only="eval"
    )
    max_searches: int = setting(4, "most searches per trajectory", least=0, most=10_000)
    task_searches: str = setting("", "max_searches of single tasks: task=N,...", only="papers")
    max_turn_tokens: int = setting(512, "most new tokens per turn", least=1)
    turn_tokens: str = setting("", "max_turn_tokens of single tasks: task=N,...", only="papers")
    max_context: int = setting(
        0, "most tokens of prompt and response; 0 = the model's limit", least=0
    )
    document_tokens: int = setting(1024, "most tokens of documents per search", least=1)
    max_num_seqs: int = setting(0, "trajectories sampled at once; 0 = all", least=0)
    timeout: float = setting(
        60.0, "seconds after which a search or a request counts as failed", above=0, most=86_400
    )


@dataclass(frozen=True)
class EngineSettings:
    """scale/engine.py"""

    engine: str = setting(
        "slots",
        "what samples the rollouts: slots (our sampler), hf (plain generate), or the addresses of "
        "vLLM servers, http://host:port[,http://...] (see scale/server.py)",
    )
    served: str = setting("/dev/shm", "folder in which vLLM servers find new weights", only="train")
    sampling_copy: str = setting(
        "auto",
        "copy of the weights that samples: bf16, none; auto: bf16 on a GPU unless int8",
        only="papers",
    )


@dataclass(frozen=True)
class ModelSettings:
    """other_models/llm.py"""

    judge: str = setting(
        "", "model that judges answers: URL#model or a HF model; default: a metric decides"
    )
    reader: str = setting(
        "", "model that answers from evidence (R-Search): URL#model or a HF model"
    )
    embedder: str = setting(
        "tfidf", "vectors of queries (When to Search): tfidf, or a HF encoder", only="train"
    )
    in_8bit: str = setting(
        "", "frozen models to load in int8: base (under LoRA), reference, others"
    )


@dataclass(frozen=True)
class UpdateSettings:
    """update.py"""

    algorithm: str = setting(
        "reinforce_pp_baseline", "how advantages and losses are computed", one_of=ALGORITHMS
    )
    steps: int = setting(100, "number of rollouts; each is followed by its updates", least=1)
    trajectories_per_update: int = setting(
        256, "rows of one optimizer step; 0 = all rows of a rollout", least=0
    )
    tokens_per_micro_batch: int = setting(16384, "most padded tokens per forward pass", least=1)
    mask_documents: bool = setting(True, "leave documents out of the loss; false is an ablation")


@dataclass(frozen=True)
class PPOSettings:
    """ppo.py"""

    clip_low: float = setting(0.2, "the ratio is clipped at 1 − clip_low", least=0, most=1)
    clip_high: float = setting(0.2, "the ratio is clipped at 1 + clip_high", least=0)
    loss_aggregation: str = setting(
        "sequence",
        "the loss is averaged per trajectory first, over all tokens, or per question first",
        one_of=("sequence", "token", "question"),
    )
    mismatch: str = setting(
        "auto",
        "correction if the sampler's log-probs differ from ours, with the ratio ρ: token and "
        "sequence cap ρ of a token or of a row at 2; mask drops tokens outside 1/2 to 2, "
        "sequence_mask rows above 3, row rows whose mean ratio is 0.1 % off; auto is token if "
        "another precision or engine samples, else none",
        one_of=MISMATCHES,
    )
    gae_lambda: float = setting(1.0, "PPO: GAE's λ", only="papers", least=0, most=1)
    critic_lr: float = setting(1e-5, "PPO: learning rate of the critic", above=0)
    critic_warmup_ratio: float = setting(
        0.0, "PPO: warm-up of critic_lr, as a share of all updates", only="papers", least=0, below=1
    )


@dataclass(frozen=True)
class KLSettings:
    """kl.py"""

    kl_coef: float = setting(
        0.0, "weight of the KL to the stage's first model; 0 loads no reference model", least=0
    )
    kl_estimator: str = setting(
        "k2",
        "k1 is subtracted from the reward, k2 and k3 are in the loss; log only measures",
        one_of=ESTIMATORS,
    )


@dataclass(frozen=True)
class ReinforceSettings:
    """reinforce_pp.py"""

    group_std: bool = setting(True, "divide by the group's std (UR² eq. 5)", only="papers")
    whiten_tokens: bool = setting(
        False, "baseline form: whiten over tokens instead of trajectories", only="papers"
    )


@dataclass(frozen=True)
class DapoSettings:
    """dapo.py"""

    max_resample: int = setting(3, "most extra draws of questions per step", only="papers", least=0)
    filter_by: str = setting(
        "correct",
        "which values must differ in a group that is kept: correct, answer, total",
        only="papers",
    )


@dataclass(frozen=True)
class PolicySettings:
    """policy.py"""

    optimizer: str = setting(
        "adamw",
        "8bit: Adam's moments in 8 bits; paged: moved to the CPU when memory is short",
        one_of=OPTIMIZERS,
    )
    lr: float = setting(2e-6, "learning rate", above=0)
    warmup_ratio: float = setting(
        0.0, "share of all updates in which the learning rate rises linearly", least=0, below=1
    )
    lr_schedule: str = setting(
        "constant", "learning rate after the warm-up; linear and cosine end at 0", one_of=SCHEDULES
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass to save memory"
    )
    lora_rank: int = setting(0, "rank of LoRA adapters (needs peft); 0 trains all weights", least=0)


def on_servers(settings: EngineSettings) -> bool:
    return settings.engine not in LOCAL


def frozen_in_8bit(settings: ModelSettings) -> set[str]:
    """Returns the models that --in_8bit names: "others, base" -> {"base", "others"}."""
    names = {part.strip() for part in settings.in_8bit.split(",")} - {""}
    if unknown := sorted(names - set(PARTS)):
        raise InputError(
            f"--in_8bit {unknown[0]}: unknown; give a comma-separated list of {', '.join(PARTS)}"
        )
    return names
