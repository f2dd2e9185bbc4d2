"""π_θ: load a causal LM, score tokens, gather trajectories into a batch, make the optimizer.

    log π_θ(y_t | y_<t) = z_t[y_t] / τ − logsumexp(z_t / τ),   z_t = W h_t   (τ = the sampling
    temperature)

The head is the expensive part: [B, T, V] in fp32 is 9.9 GB at B = 8, T = 2048, V = 151k. So
log-probs are computed from the last hidden states, only where the policy itself sampled (documents
and padding need none), and in chunks whose logits are thrown away and computed again in the
backward pass.

Trainable weights are fp32 and the arithmetic on GPUs is bf16 autocast. With bf16 weights a step of
1e-6 rounds away: after 20 AdamW steps 98 % of the weights have not moved. 8 bits are for Adam's
moments (`optimizer="adamw8bit"`) and for models that nobody trains: frozen weights are bf16 on a
GPU, or int8 (`in_8bit`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.logging import disable_progress_bar

from errors import InputError, run_main
from scale.lora import has_lora, merged_state
from scale.packing import allow_packing, hidden_states

disable_progress_bar()  # a bar for every checkpoint would tear the run's own bar apart
# Trap: on an H100 PyTorch prefers cuDNN's attention, which plans for every new shape, 20 ms and
# more; ours are nearly all new.
torch.backends.cuda.enable_cudnn_sdp(False)
# bf16 products are summed in fp32, also across the blocks that a GPU cuts a matrix into
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
CHUNK_LOGITS = {
    "cpu": 2**24,
    "cuda": 2**27,
}  # held at once, in fp32: 64 MB, 512 MB (each chunk reads the whole head)
OPTIMIZERS = ("adamw", "adamw8bit", "paged_adamw8bit")


# -------------------------------------------------------------------------------------- the network


def chunk_rows(vocab: int, device: str) -> int:
    return max(1, CHUNK_LOGITS.get(device, 2**24) // vocab)


def token_logprobs(
    hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """log softmax(head(hidden) / τ) at `targets`: hidden [N, H], targets [N] -> [N]. Of a plain
    head without bias, as all families named here have it, there is never more than a chunk of
    logits; of another kind they are computed whole.

    Worked number: logits (0, ln 3), target 1, τ = 1 -> ln 3 − ln 4 = −0.2877.
    """
    dtype = (
        torch.get_autocast_dtype(hidden.device.type)
        if torch.is_autocast_enabled(hidden.device.type)
        else hidden.dtype
    )
    if type(head) is nn.Linear and head.bias is None:
        return ChunkedLogprobs.apply(hidden, head.weight, targets, temperature, dtype)
    logits = head(hidden).float() / temperature  # [N, V]  a head of another kind, whole
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)  # [N]


class ChunkedLogprobs(torch.autograd.Function):
    """log p_y = z_y − ln Σ_v exp z_v, z = W h / τ, with its gradient written out; one buffer of
    logits serves all chunks.

        ∂ log p_y / ∂z_v = 1[v = y] − p_v          G = weight · (onehot − p) / τ  [n, V]   ->   ∂h =
        G W,  ∂W = Σ_chunks Gᵀ h

    The backward pass computes each chunk's logits again. Trap: autograd would keep four tensors of
    [n, V] where this has one in fp32, and under autocast add up the chunks' ∂W in bf16, 1 % off
    after 64 chunks; here the sum is fp32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, dtype):
        """hidden [N, H], weight [V, H], targets [N] -> [N]; products are computed in `dtype`."""
        ctx.temperature, ctx.dtype = temperature, dtype
        sums, chosen = (
            hidden.new_empty(len(targets), dtype=torch.float32),
            hidden.new_empty(len(targets), dtype=torch.float32),
        )
        for cut, logits in chunks_of_logits(hidden.to(dtype), weight.to(dtype), temperature):
            chosen[cut] = logits.gather(1, targets[cut, None])[:, 0]
            largest = logits.amax(1, keepdim=True)  # [n, 1]
            sums[cut] = (logits.sub_(largest).exp_().sum(1, keepdim=True).log_() + largest)[:, 0]
        ctx.save_for_backward(hidden, weight, targets, sums)
        return chosen - sums

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, targets, sums = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight)
        scale = gradient.float() / ctx.temperature  # [N]
        hidden, weight = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        for cut, logits in chunks_of_logits(hidden, weight, ctx.temperature):
            p = logits.sub_(sums[cut, None]).exp_()  # [n, V]
            g = (
                p.mul_(-scale[cut, None])
                .scatter_add_(1, targets[cut, None], scale[cut, None])
                .to(ctx.dtype)
            )
            of_hidden[cut] = g @ weight
            if of_weight is not None:
                add_product(of_weight, g.T, hidden[cut])
        return of_hidden, of_weight, None, None, None


def chunks_of_logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float):
    """(slice, logits / τ [n, V] in fp32) chunk by chunk; the next one overwrites the one before."""
    rows = chunk_rows(len(weight), hidden.device.type)
    buffer = hidden.new_empty(min(rows, len(hidden)), len(weight), dtype=torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), rows):
            cut = slice(start, min(start + rows, len(hidden)))
            logits = buffer[: cut.stop - start].zero_()
            add_product(logits, hidden[cut], weight.T)
            yield cut, logits.div_(temperature)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b, in place where all are of one kind; bf16 products are rounded one by one and
    summed in fp32.
    """
    total.addmm_(a, b) if total.dtype == a.dtype == b.dtype else total.add_(a @ b)


class Policy(nn.Module):
    """A causal LM whose forward pass is log-probs, so that wrappers (DDP) see every gradient.

    Trap: calling the backbone and the head by hand on a wrapped model goes round the wrapper's
    forward, and the gradients of several processes are then not averaged, silently.
    """

    def __init__(self, language_model: nn.Module):
        super().__init__()
        self.language_model = language_model
        _check_head(language_model)
        allow_packing(language_model)
        # as `evaluating` puts it back; only gradient checkpointing asks, `load_policy` takes
        # dropout out
        self.train()

    @property
    def device(self) -> torch.device:
        return self.language_model.device

    @property
    def config(self):
        return self.language_model.config

    def autocast(self, keep: bool = True):
        """bf16 arithmetic on GPUs where weights are fp32, and stay so. On CPUs everything is
        computed as the weights are.

        keep: hold the weights' bf16 copies until the block ends. That pays where they are used
        again, as in a rollout.
        """
        mixed = self.device.type != "cpu" and any(
            p.dtype == torch.float32 for p in self.parameters()
        )
        return torch.autocast(self.device.type, torch.bfloat16, enabled=mixed, cache_enabled=keep)

    def forward(
        self, tokens: torch.Tensor, temperature: float = 1.0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """tokens [B, L], right-padded -> logprobs [B, L − 1] in fp32; column t predicts tokens[:, t
        + 1].

        mask [B, L − 1]: compute only where it is not 0; the rest is 0. The padding is not computed
        either (packing.py).
        """
        # Are inserted tokens really masked? They are read, so they shape the hidden states of what
        # follows, but here no head is computed for them: their log-prob is the constant 0, which
        # has no gradient.
        with self.autocast(keep=False):
            targets = tokens[:, 1:]  # [B, T]
            wanted = (
                torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
            )  # [B, T]
            hidden = hidden_states(self.language_model.base_model, tokens, wanted)  # [N, H]
            head = self.language_model.get_output_embeddings()
            scored = token_logprobs(hidden, head, targets[wanted], temperature)  # [N]
        logprobs = torch.zeros(targets.shape, device=tokens.device)  # [B, T]
        return logprobs.masked_scatter(wanted, scored.float())

    @torch.no_grad()
    def generate(self, **arguments):
        """HF `generate` in evaluation mode (dropout would make samples and scores disagree).

        Trap: of weights in parts (shards.py) it would wait at each token for the other processes,
        and for ever for one that is done. All weights are together here, so nobody waits:
        synced_gpus=False.
        """
        training = self.language_model.training
        self.language_model.eval()
        try:
            with self.autocast():
                return self.language_model.generate(**arguments, synced_gpus=False)
        finally:
            self.language_model.train(training)


def _check_head(model: nn.Module) -> None:
    """The log-probs above are head(last hidden state). Some models scale or cap their logits after
    it: refuse those.

    A cap hardly touches small logits, such as an untrained model's: the config's word counts too.
    """
    with torch.no_grad(), evaluating(model):  # dropout would make any two passes differ
        ids = torch.arange(3, device=model.device)[None]
        ours = model.get_output_embeddings()(
            model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        )
        theirs = model(input_ids=ids, use_cache=False).logits
    differs = (ours - theirs).abs().max() > 1e-2 * theirs.abs().max()
    if differs or getattr(model.config, "final_logit_softcapping", None):
        raise InputError(
            f"{type(model).__name__} changes its logits after the output head (soft cap or scale):"
            " its log-probs cannot be computed in chunks here. Use a model without that, such as"
            " Qwen2, Qwen3 or Llama"
        )


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_policy(
    path: str,
    device: torch.device | str = "cpu",
    gradient_checkpointing: bool = False,
    frozen: bool = False,
    in_8bit: bool = False,
) -> tuple[Policy, object]:
    """(policy, tokenizer) from a directory or a hub name. Trainable weights are fp32 whatever the
    file holds.
    """
    tokenizer = load_tokenizer(path)
    options = frozen_options(device, in_8bit) if frozen or in_8bit else {"dtype": torch.float32}
    if (
        torch.device(device).type != "cpu"
    ):  # straight there: eight processes would put eight copies into the host's memory
        options["device_map"] = {"": device}
    try:
        config = without_dropout(AutoConfig.from_pretrained(path))
        model = AutoModelForCausalLM.from_pretrained(path, config=config, **options)
    except Exception as error:  # a broken weight file raises whatever its format's reader does
        raise InputError(
            f"--model {path}: no causal LM could be loaded from there: {first_line(error)}"
        ) from None
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise InputError(
            f"--model {path}: the tokenizer has {len(tokenizer)} tokens, the model only {rows}: not"
            " of one model"
        )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model if in_8bit else model.to(device))
    return (policy.requires_grad_(False) if frozen or in_8bit else policy), tokenizer


def frozen_options(device: torch.device | str, in_8bit: bool) -> dict:
    """How `from_pretrained` loads weights that nobody trains: bf16 on a GPU, fp32 on a CPU, or int8
    with a scale per row.
    """
    options = {"dtype": torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16}
    if not in_8bit:
        return options
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            "8-bit weights need bitsandbytes: pip install bitsandbytes, or leave the flag out"
        )
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(
        logging.ERROR
    )  # a line per product, for ever
    return options | {
        "quantization_config": BitsAndBytesConfig(load_in_8bit=True),
        "device_map": {"": device},
    }


def without_dropout(config):
    """RL without dropout: what is sampled and what is scored must be one distribution, or the first
    ratio is not 1.
    """
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(
            value, float
        ):  # attention_dropout (Llama), resid_pdrop (GPT-2), layerdrop (OPT)
            setattr(config, name, 0.0)
    return config


def check_model_path(path: str) -> None:
    """A directory must hold a model; a name that only a path can have must exist. Hub names
    pass.
    """
    if Path(path).exists() and not Path(path, "config.json").exists():
        raise InputError(
            f"--model {path}: there is no config.json in this directory; give a saved HF model or a"
            " hub name"
        )
    if not Path(path).exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise InputError(
            f"--model {path}: no such directory; give a saved HF model or a hub name (owner/model)"
        )


def load_tokenizer(path: str):
    check_model_path(path)
    try:
        # Trap: for some model types (qwen2 among them) AutoTokenizer puts the family's own class in
        # place of the plain one that the files declare, and with it another splitting of the text,
        # without a word.
        declared = get_tokenizer_config(path).get("tokenizer_class")
        plain = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
        return (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(path)
    except Exception as error:
        raise InputError(
            f"--model {path}: no tokenizer could be loaded from there: {first_line(error)}"
        ) from None


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def save_policy(
    policy: Policy,
    tokenizer,
    path: Path | str,
    trainer: dict | None = None,
    settings: str = "",
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """A directory that `AutoModelForCausalLM.from_pretrained` loads; with `trainer` (optimizer
    state) and `settings` where a run wants to go on from it; `weights` in place of the policy's
    own, where those are in parts. Written aside and renamed: an interrupt never leaves half a
    checkpoint.
    """
    path = Path(path)
    aside = path.with_name(path.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)  # what an interrupt may have left
    save_weights(policy.language_model, aside, weights)
    tokenizer.save_pretrained(aside)
    if trainer is not None:
        torch.save(trainer, aside / "trainer.pt")
    if settings:
        (aside / "settings.json").write_text(settings, encoding="utf-8")
    aside.rename(path)


def save_weights(
    model: nn.Module, path: Path, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Of a model with LoRA the merged weights, as if there had been none: int8 weights become fp32
    again.
    """
    if weights is None and not has_lora(model):
        model.save_pretrained(path)
        return
    with torch.device("meta"):
        plain = type(model)(plain_config(model))  # no memory: it lends its class and its config
    plain.config.dtype, plain.generation_config = torch.float32, model.generation_config
    weights = merged_state(model) if weights is None else weights
    once = {name for name, _ in plain.named_parameters()}  # of two that are tied, the first
    twice = {name for name, _ in plain.named_parameters(remove_duplicate=False)} - once
    plain.save_pretrained(
        path, state_dict={name: w for name, w in weights.items() if name not in twice}
    )


def plain_config(model: nn.Module):
    """A copy of its config that says nothing of 8 bits."""
    settings = {
        name: value
        for name, value in model.config.to_dict().items()
        if name != "quantization_config"
    }
    config = type(model.config).from_dict(settings)
    config._attn_implementation = model.config._attn_implementation  # not among the settings
    return config


# ---------------------------------------------------------------------------------------- the batch


@dataclass
class Batch:
    """Trajectories as tensors. B rows, question by question, `group_size` rows each; T = L − 1.

    Column t of a [B, T] tensor is about the token tokens[:, t + 1]. response_mask is 1 where the
    policy sampled that token and 0 on the prompt, on everything the environment wrote, and on
    padding.
    """

    tokens: torch.Tensor  # [B, L]
    response_mask: torch.Tensor  # [B, T]
    old_logprobs: torch.Tensor  # [B, T]
    rewards: torch.Tensor  # [B]
    group_size: int
    ref_logprobs: torch.Tensor | None = None  # [B, T]
    advantages: torch.Tensor | None = None  # [B, T]
    token_weights: torch.Tensor | None = None  # [B, T]
    correct: torch.Tensor | None = None  # [B] bool: the final answer is right
    overlong: torch.Tensor | None = None  # [B] bool: cut off by length without an answer
    values: torch.Tensor | None = (
        None  # [B, T]  the critic's, at the rollout: of the state before tokens[:, t + 1]
    )
    returns: torch.Tensor | None = None  # [B, T]  what the critic shall learn
    sampled_logprobs: torch.Tensor | None = (
        None  # [B, T]  that the tokens were sampled with, by weights still in place
    )

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: torch.Tensor) -> Batch:
        """The rows `index` [n], cut to the longest of them: padding costs as much as text."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        taken = {
            name: v[index.to(v.device)] if torch.is_tensor(v) else v for name, v in values.items()
        }
        width = last_column(taken["response_mask"])
        for name, value in taken.items():
            if torch.is_tensor(value) and value.ndim == 2:
                taken[name] = value[:, : width + 1] if name == "tokens" else value[:, :width]
        return Batch(**taken)

    def to(self, device) -> Batch:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Batch(
            **{name: v.to(device) if torch.is_tensor(v) else v for name, v in values.items()}
        )


def last_column(mask: torch.Tensor) -> int:
    """Columns needed of [n, T]: up to the last sampled token of any row. What stands behind it
    cannot influence it.
    """
    used = mask.bool().any(0).nonzero()  # [k, 1]
    return int(used.max()) + 1 if len(used) else 1


def collate(
    trajectories: Sequence, rewards: Sequence[float], group_size: int, pad_id: int = 0
) -> Batch:
    """Trajectories -> Batch, right-padded. The masks and log-probs are the ones born with the
    tokens.

    The pad id never decides anything: pad may be EOS, and a sampled EOS is trained on.
    """
    if not all(t.prompt_ids for t in trajectories):
        raise InputError(
            "a trajectory without token ids, such as a written transcript, can be scored but not"
            " trained on"
        )
    width = max(len(t.ids) for t in trajectories)
    tokens = torch.full((len(trajectories), width), pad_id, dtype=torch.long)  # [B, L]
    mask = torch.zeros(len(trajectories), width - 1)  # [B, T]
    old_logprobs = torch.zeros(len(trajectories), width - 1)  # [B, T]
    for row, t in enumerate(trajectories):
        start = len(t.prompt_ids) - 1  # column of the first response token
        tokens[row, : len(t.ids)] = torch.tensor(t.ids)
        mask[row, start : start + len(t.response_mask)] = torch.tensor(
            t.response_mask, dtype=torch.float
        )
        old_logprobs[row, start : start + len(t.logprobs)] = torch.tensor(
            t.logprobs, dtype=torch.float
        )
    rewards = torch.tensor(rewards, dtype=torch.float)  # [B]
    return Batch(
        tokens, mask, old_logprobs, rewards, group_size, sampled_logprobs=old_logprobs.clone()
    )


def micro_batches(mask: torch.Tensor, tokens_per_micro_batch: int) -> list[torch.Tensor]:
    """Row numbers cut into micro-batches of at most so many padded tokens, rows of like length
    together.

    mask [B, T]. How the batch is cut changes no gradient: the weights of the loss are fixed before.
    """
    columns = torch.arange(1, mask.shape[1] + 1)  # [T]
    lengths = (mask.cpu().bool() * columns).amax(1).clamp(min=1)  # [B]
    groups: list[list[int]] = []
    for row in lengths.argsort(descending=True, stable=True).tolist():
        # sorted: the first row of a micro-batch is its longest
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= tokens_per_micro_batch:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [torch.tensor(group) for group in groups]


# ------------------------------------------------------------------------------------ the optimizer


def make_optimizer(
    policy: nn.Module, name: str, lr: float, betas=(0.9, 0.999), weight_decay: float = 0.0
):
    """AdamW, or bitsandbytes' AdamW with 8-bit moments (blocks of under 4096 values keep 32 bits);
    paged: moments that move to the CPU's memory while the GPU's is short, and back (on a CPU
    bitsandbytes warns and does not page).
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if name == "adamw":
        # fused: what PyTorch takes on a GPU otherwise holds a second copy of all weights during the
        # step
        return torch.optim.AdamW(
            parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True
        )
    if name not in OPTIMIZERS:
        raise InputError(f"unknown optimizer {name!r}: {', '.join(OPTIMIZERS)}")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"--optimizer {name} needs bitsandbytes: pip install bitsandbytes, or --optimizer adamw"
        )
    import bitsandbytes

    kind = (
        bitsandbytes.optim.PagedAdamW8bit
        if name == "paged_adamw8bit"
        else bitsandbytes.optim.AdamW8bit
    )
    return kind(parameters, lr=lr, betas=betas, weight_decay=weight_decay)


def lr_factor(step: int, steps: int, warmup: int, schedule: str) -> float:
    """Factor of the learning rate in step 0, 1, ...: linear warm-up, then constant, linear to 0, or
    cosine to 0.

    lr_factor(0, 10, 2, "linear") = 0.5; lr_factor(6, 10, 2, "linear") = 0.5.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[schedule]


@contextlib.contextmanager
def evaluating(module: nn.Module):
    """Evaluation mode inside (no dropout), the former mode after."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def main() -> None:
    hidden, head = torch.ones(1, 1), nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [math.log(3)]]))
    logprob = token_logprobs(hidden, head, torch.tensor([1]))
    logprob.sum().backward()
    print("logits (0, ln 3), target 1: log-prob", round(logprob.item(), 4))
    print(
        "its gradient by the logits, onehot − p:",
        [round(g, 4) for g in head.weight.grad[:, 0].tolist()],
    )


if __name__ == "__main__":
    run_main(main)
