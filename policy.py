"""π_θ: load and save a causal LM, compute log-probs, collate trajectories, make the optimizer.

    log π_θ(y_t | y_<t) = z_t[y_t] / τ − logsumexp(z_t / τ),   z_t = W h_t,   τ: the temperature

The output head is the expensive part: logits [B, T, V] in fp32 take 9.9 GB at B = 8, T = 2048,
V = 151k. So log-probs are computed only for tokens that the loss uses (by default those that the
policy sampled), and in chunks: the logits of a chunk are discarded after use and recomputed in the
backward pass.

Trained weights are stored in fp32; on GPUs most arithmetic is in bf16, and on a CPU too after
`accelerate launch --mixed_precision bf16` or with ACCELERATE_MIXED_PRECISION=bf16. If the weights
were bf16, rounding would undo steps of 1e-6: after 20 AdamW steps, 98 % of the weights would not
have changed. Frozen weights may be bf16 or int8, and Adam's moments may have 8 bits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers import PreTrainedTokenizerFast as PlainTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.logging import disable_progress_bar

from errors import InputError
from formats.records import written_whole
from scale.lora import add_lora, save_merged
from scale.packing import hidden_states, lengths_of, obstacle
from settings import Settings
from templates import chat_text, variables_of

disable_progress_bar()  # a bar for each loaded model would break up the run's own progress bar
# Trap: on an H100 PyTorch prefers cuDNN's attention, which needs 20 ms to plan each new shape.
torch.backends.cuda.enable_cudnn_sdp(False)
# bf16 products are summed in fp32, also where a GPU splits one sum into several blocks.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
# Number of logits in one chunk: in fp32 512 MB on a CUDA GPU, otherwise 64 MB. Small chunks would
# be slow, because each chunk reads the whole head: so a chunk has at least CHUNK_ROWS rows.
CHUNK_LOGITS = {"cuda": 2**27}
CHUNK_ROWS = 256
# What `accelerate launch --mixed_precision` sets. GPUs compute in bf16 whatever it is.
PRECISION = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
if PRECISION == "bf16":  # the factors of the logits are in bf16, so a CPU may multiply them as such
    torch.set_float32_matmul_precision("medium")
PROCESSOR = Path("/proc/cpuinfo")
DEFAULTS = Settings()


# -------------------------------------------------------------------------------------- log-probs
def token_logprobs(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float = 1.0
) -> Tensor:
    """Returns log softmax(head(hidden) / τ) at `targets`: hidden [N, H], targets [N] -> [N].

    Worked: logits (0, ln 3), target 1, τ = 1 -> ln 3 − ln 4 = −0.2877.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return ChunkedLogprobs.apply(hidden, head.weight, targets, temperature, dtype)


def head_logits(head: nn.Module, hidden: Tensor) -> Tensor:
    """Maps hidden states [N, H] to fp32 logits [N, V]. They are not rounded to bf16, whatever the
    weights or autocast are.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        exact = hidden.dtype == head.weight.dtype == torch.float32
        return head(hidden) if exact else fp32_product(hidden, head.weight.T)


class ChunkedLogprobs(torch.autograd.Function):
    """Computes log p_y = z_y − ln Σ_v exp z_v with z = W h / τ, and its gradient, chunk by chunk.

        ∂ log p_y / ∂z_v = 1[v = y] − p_v
        G = gradient · (onehot − p) / τ  [n, V],   ∂h = G W  [n, H],   ∂W = Σ_chunks Gᵀ h  [V, H]

    A chunk has n tokens. Without this class, autograd would keep four tensors [n, V] of each chunk.
    Under autocast it would also sum ∂W over the chunks in bf16, which is 1 % off after 64 chunks;
    here this sum is in fp32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, dtype):
        """Maps hidden [N, H], weight [V, H] and targets [N] to log-probs [N]. The factors of
        matrix products are rounded to `dtype`.
        """
        ctx.temperature = temperature
        ctx.dtype = dtype
        chosen = hidden.new_empty(len(targets), dtype=torch.float32)  # [N]  z_y
        sums = torch.empty_like(chosen)  # [N]  ln Σ exp z
        for cut, logits in chunks_of_logits(hidden.to(dtype), weight.to(dtype), temperature):
            chosen[cut] = logits.gather(1, targets[cut, None])[:, 0]
            sums[cut] = logits.logsumexp(1)
        ctx.save_for_backward(hidden, weight, targets, sums)
        return chosen - sums

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, targets, sums = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)  # [N, H]
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # [V, H]
        scale = gradient.float() / ctx.temperature  # [N]
        hidden, weight = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        for cut, logits in chunks_of_logits(hidden, weight, ctx.temperature):
            part, chosen = scale[cut, None], targets[cut, None]  # [n, 1]
            p = logits.sub_(sums[cut, None]).exp_()  # [n, V]
            g = p.mul_(-part).scatter_add_(1, chosen, part).to(ctx.dtype)  # [n, V]
            hidden_gradient[cut] = g @ weight
            if weight_gradient is not None and g.dtype == weight_gradient.dtype:
                weight_gradient.addmm_(g.T, hidden[cut])
            elif weight_gradient is not None:  # a bf16 product is added to an fp32 total
                weight_gradient.add_(g.T @ hidden[cut])
        return hidden_gradient, weight_gradient, None, None, None


def chunk_rows(vocab: int, device: str) -> int:
    return max(CHUNK_ROWS, CHUNK_LOGITS.get(device, 2**24) // vocab)


def chunks_of_logits(hidden: Tensor, weight: Tensor, temperature: float):
    """Yields (slice of the N rows of `hidden`, their fp32 logits / τ [n, V]) for each chunk."""
    rows = chunk_rows(len(weight), hidden.device.type)
    weight = weight if weight.is_cuda else weight.float()  # once, not for each chunk
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), rows):
            cut = slice(start, start + rows)
            yield cut, fp32_product(hidden[cut], weight.T).div_(temperature)


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the matrix product a b in fp32. A GPU sums bf16 products in fp32 anyway; rounding
    the logits to bf16 afterwards would change a log-prob by 0.025 on average.
    """
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


# -------------------------------------------------------------------------------------- the network
@contextlib.contextmanager
def evaluating(module: nn.Module):
    """Sets evaluation mode inside the context, and the previous mode after it."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


class Policy(nn.Module):
    """Wraps a causal LM so that its forward pass returns log-probs. Trap: log-probs for training
    must come from forward(), which DDP wraps: any other method would silently skip the
    synchronisation of gradients.
    """

    def __init__(self, language_model: nn.Module):
        super().__init__()
        self.language_model = language_model
        check_head(language_model)
        if not obstacle(language_model):
            self.config._attn_implementation = "packed"  # stays set in `generate`, see `attention`
        self.train()  # gradient checkpointing needs it; dropout is 0, see `without_dropout`

    @property
    def device(self) -> torch.device:
        return self.language_model.device

    @property
    def config(self):
        return self.language_model.config

    def autocast(self, keep: bool = True):
        """Returns a context in which most arithmetic is in bf16 (if `in_bf16`) although weights are
        fp32; keep=True caches the bf16 copies of trained weights until the context ends.
        """
        mixed = in_bf16(self.device) and any(p.dtype == torch.float32 for p in self.parameters())
        return torch.autocast(self.device.type, torch.bfloat16, enabled=mixed, cache_enabled=keep)

    def forward(self, tokens: Tensor, temperature=1.0, mask=None) -> Tensor:
        """Maps right-padded tokens [B, L] to fp32 log-probs [B, T] of tokens[:, 1:], 0 where mask
        is 0.
        """
        # The model reads tokens with mask 0, such as documents, and later tokens attend to them.
        # But for a token with mask 0 no log-prob is computed: its output is the constant 0, without
        # a gradient.
        targets = tokens[:, 1:]  # [B, T]
        wanted = torch.ones_like(targets).bool() if mask is None else mask.bool()  # [B, T]
        with self.autocast(keep=False):
            hidden = hidden_states(self.language_model.base_model, tokens, wanted)  # [N, H]
            head = self.language_model.get_output_embeddings()
            sampled = token_logprobs(hidden, head, targets[wanted], temperature)  # [N]
        logprobs = torch.zeros(targets.shape, device=tokens.device)  # [B, T]
        return logprobs.masked_scatter(wanted, sampled)

    @torch.no_grad()
    def generate(self, **arguments):
        """Runs HF `generate`. It need not wait for other processes (synced_gpus=False), because
        `to_sample_with` (engines/sampling.py) has gathered sharded weights before.
        """
        with evaluating(self.language_model), self.autocast():
            return self.language_model.generate(**arguments, synced_gpus=False)


def in_bf16(device: torch.device | str) -> bool:
    """Tells whether most arithmetic on this device is in bf16: on a GPU, or if it was asked for."""
    return torch.device(device).type != "cpu" or PRECISION == "bf16"


def has_bf16() -> bool:
    """Tells whether this processor multiplies in bf16. Without the instructions it is slower than
    in fp32.
    """
    return PROCESSOR.exists() and "avx512_bf16" in PROCESSOR.read_text()


def check_precision(device: torch.device | str) -> None:
    """Raises an InputError if a number format was asked for that is not supported here."""
    on_cpu = torch.device(device).type == "cpu"
    if PRECISION not in ("no", "bf16") or (PRECISION == "bf16" and on_cpu and not has_bf16()):
        raise InputError(
            f"ACCELERATE_MIXED_PRECISION={PRECISION} (or accelerate's --mixed_precision): possible "
            "are no (fp32 on a CPU) and bf16 (on a CPU with avx512_bf16 in /proc/cpuinfo)"
        )


def check_head(model: nn.Module) -> None:
    """Raises an InputError if a model's head is not a matrix, or if the model scales or caps its
    logits, because this file computes log-probs from matrix · hidden state.
    """
    head = model.get_output_embeddings()
    with torch.no_grad(), evaluating(model):
        ids = torch.arange(3, device=model.device)[None]
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model(input_ids=ids, use_cache=False).logits
    changed = (head(hidden) - logits).abs().max() > 1e-2 * logits.abs().max()
    # The config is checked too: a cap hardly changes the small logits of an untrained model.
    capped = getattr(model.config, "final_logit_softcapping", None)
    if changed or capped or type(head) is not nn.Linear or head.bias is not None:
        raise InputError(
            f"{type(model).__name__} changes its logits after the output matrix (bias, cap or "
            "scale): use a model without that, such as Qwen2, Qwen3 or Llama"
        )


def attention(*inputs, attend=sdpa_attention_forward, **options):
    """Computes attention by `attend`, a function of scale/packing.py or engines/slots.py, if it is
    given to the model's forward pass. Otherwise, for example in `generate`, it computes
    transformers' own SDPA attention.
    """
    return attend(*inputs, **options)


AttentionInterface.register("packed", attention)
AttentionMaskInterface.register("packed", sdpa_mask)


# ------------------------------------------------------------------------------- loading and saving
def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def load_policy(
    path: str, device="cpu", settings=DEFAULTS, frozen=False, in_8bit=False, seed=0
) -> tuple[Policy, object]:
    """Loads (policy, tokenizer) from a folder or a hub name; trained weights become fp32.

    frozen    trains nothing and adds no LoRA, whatever settings.lora_rank is
    in_8bit   loads int8 weights: for a frozen model, or as LoRA's base
    seed      initialises the LoRA matrices
    """
    check_precision(device)
    tokenizer = load_tokenizer(path, settings.chat_template)
    lora_rank = 0 if frozen else settings.lora_rank
    trained = not (frozen or in_8bit or lora_rank)
    options = frozen_options(device, in_8bit)
    # On a CPU a frozen policy is computed as the trained one is: from fp32 weights, cast to bf16.
    if trained or torch.device(device).type == "cpu":
        options["dtype"] = torch.float32
    with loading("causal LM", path):
        config = without_dropout(AutoConfig.from_pretrained(path, trust_remote_code=False))
        model = load_whole(path, options | {"config": config})
    if settings.gradient_checkpointing:
        checkpoint_activations(model)
    policy = Policy(model).requires_grad_(trained)
    if lora_rank:
        add_lora(policy.language_model, lora_rank, seed)
    return policy, tokenizer


def load_whole(path: str, options: dict) -> nn.Module:
    """Loads a causal LM; raises an InputError if weights are missing, or if weights in a local
    folder are integers although the model is not quantized. transformers accepts such integers, and
    initialises missing weights at random with only a warning. Buffers and a tied head may be
    missing.
    """
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    wrong = {*report["missing_keys"]}
    quantized = hasattr(model.config, "quantization_config")
    for file in [] if quantized else Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            stored = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
        wrong |= {name for name, dtype in stored.items() if dtype[0] in "IU"}
    if wrong := sorted(dict(model.named_parameters()).keys() & wrong):
        first = ", ".join(wrong[:3])
        raise InputError(f"{len(wrong)} weights are missing, or not floating point: {first}")
    return model


def checkpoint_activations(model: nn.Module) -> None:
    """Makes the model recompute its activations in the backward pass, to save memory."""
    # transformers 5.17 has only `gradient_checkpointing_enable`, which 5.23 deprecates.
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})


def frozen_options(device: torch.device | str, in_8bit: bool) -> dict:
    """Returns loading options for frozen weights: bf16 (if `in_bf16`), else fp32, or int8."""
    options = {
        "dtype": torch.bfloat16 if in_bf16(device) else torch.float32,
        # Neither code nor pickles that come with a model are run.
        "trust_remote_code": False,
        "use_safetensors": True,
        "device_map": {"": device},  # processes load straight to their GPUs, not into RAM
    }
    if in_8bit:
        # bitsandbytes would log a line for every matrix product.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    return options


def without_dropout(config):
    """Switches dropout off. With dropout, log-probs would differ from those of sampling, and the
    ratio π / π_old of the first update would not be 1.
    """
    for name, value in list(vars(config).items()):
        # attention_dropout (Llama), resid_pdrop (GPT-2), layerdrop (OPT)
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def check_model_path(path: str) -> None:
    """Raises an InputError if `path` is local but not a saved model. A path is local if it exists,
    or if it cannot be a hub name.
    """
    local = Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1
    if local and not Path(path, "config.json").exists():
        wrong = "no such directory, or no config.json in it"
        raise InputError(f"--model {path}: {wrong}; give a saved HF model or a hub name")


def load_tokenizer(path: str, chat_template: str = ""):
    """Loads the tokenizer of a folder or a hub name, with its template as --chat_template says."""
    check_model_path(path)
    with loading("tokenizer", path):
        # Trap: AutoTokenizer may choose the class of the model's family (such as Qwen2's), which
        # splits text differently from the plain class that the tokenizer's files declare.
        declared = get_tokenizer_config(path).get("tokenizer_class")
        plain = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
        kind = PlainTokenizer if plain else AutoTokenizer
        tokenizer = kind.from_pretrained(path, trust_remote_code=False)
    with loading("chat template that works (chat_template.jinja, tokenizer_config.json)", path):
        if chat_template == "none":
            tokenizer.chat_template = None
        render = partial(tokenizer.apply_chat_template, **variables_of(chat_template))
        tokenizer.apply_chat_template = render
        chat_text(tokenizer, "Answer.", "Who?")
    return tokenizer


@contextlib.contextmanager
def loading(what: str, path: str):
    """Turns any error that is raised inside the context into an InputError of one line."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"--model {path}: no {what} could be loaded from there: {reason}"
        raise InputError(message) from None


def save_policy(policy, tokenizer, path: Path | str, trainer=None, settings="", weights=None):
    """Saves a folder that `from_pretrained` can load. If the policy is sharded, `weights` are the
    gathered weights.
    """
    with written_whole(Path(path)) as folder:
        save_merged(policy.language_model, folder, weights)
        tokenizer.save_pretrained(folder)
        if trainer is not None:  # the state that a run resumes from
            torch.save(trainer, folder / "trainer.pt")
        if settings:
            (folder / "settings.json").write_text(settings, encoding="utf-8")


# ---------------------------------------------------------------------------------------- the batch
@dataclass
class Batch:
    """Holds trajectories as tensors, one per row; T = L − 1. The batch of a whole step has
    `group_size` rows per question, question by question.

    Column t of a [B, T] tensor belongs to tokens[:, t + 1]. response_mask is 1 where the policy
    sampled that token, and 0 on the prompt, on the environment's text (unless `mask_documents` is
    False), and on padding. A row with a failed search has the reward NaN and, after
    `train.prepare`, a mask of zeros; it only keeps its group complete.
    """

    tokens: Tensor  # [B, L]
    response_mask: Tensor  # [B, T]
    old_logprobs: Tensor  # [B, T]
    rewards: Tensor  # [B]
    group_size: int
    ref_logprobs: Tensor | None = None  # [B, T]
    advantages: Tensor | None = None  # [B, T]
    token_weights: Tensor | None = None  # [B, T]
    questions: Tensor | None = None  # [B]  the number of the row's question in the step's batch
    overlong: Tensor | None = None  # [B] bool: truncated without an answer
    values: Tensor | None = None  # [B, T]  of the state before tokens[:, t + 1]
    returns: Tensor | None = None  # [B, T]  the critic's targets
    sampled_logprobs: Tensor | None = None  # [B, T]  None if documents are trained on
    mismatch_weights: Tensor | None = None  # [B, T]  0 removes a token from the policy loss
    logprobs: Tensor | None = None  # [B, T]  the policy's during the update, only for logging

    def __len__(self) -> int:
        return len(self.tokens)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns a batch with `change` applied to every tensor."""
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        return replace(self, **{name: change(x) for name, x in tensors.items()})

    def to(self, device) -> Batch:
        return self.map(lambda value: value.to(device))

    def rows(self, index: Tensor) -> Batch:
        """Returns the rows `index` [n] as a batch, cut after the last column in which one of them
        has mask 1. An empty index gives one row of zeros, which adds nothing to a loss.
        """
        part = self.map(lambda value: value[index] if len(index) else torch.zeros_like(value[:1]))
        width = last_column(part.response_mask)  # without packing, padding costs as much as text
        cut = part.map(lambda value: value[:, :width] if value.ndim == 2 else value)
        return replace(cut, tokens=part.tokens[:, : width + 1])


def last_column(mask: Tensor) -> int:
    """Returns the number of columns up to the last 1 in any row of a mask [n, T], at least 1."""
    return max(lengths_of(mask.bool()), default=1)


def padded(rows: Sequence[list], dtype: str) -> Tensor:
    """Returns lists of numbers as the rows of a tensor [B, L], right-padded with 0."""
    # numpy reads a list four times as fast as torch does.
    rows = [torch.from_numpy(np.array(row, dtype)) for row in rows]
    return pad_sequence(rows, batch_first=True)


def collate(trajectories: Sequence, rewards: Sequence[float], group_size: int) -> Batch:
    """Right-pads trajectories into a Batch, with the masks and log-probs recorded while sampling.
    The id of the padding, 0, has no influence, because padding has mask 0 and no earlier token
    attends to it. It may be the EOS id: a sampled EOS has mask 1 and is trained on.
    """
    tokens = padded([t.ids for t in trajectories], "int64")  # [B, L]
    # The first token of a prompt has no column: nothing predicts it.
    rows = [([0.0] * (len(t.prompt_ids) - 1), t) for t in trajectories]
    mask = padded([prompt + t.response_mask for prompt, t in rows], "float32")  # [B, T]
    logprobs = padded([prompt + t.logprobs for prompt, t in rows], "float32")  # [B, T]
    rewards = torch.tensor(rewards, dtype=torch.float)
    questions = torch.arange(len(rewards)) // group_size  # [B]
    sampled = logprobs.clone()
    return Batch(
        tokens, mask, logprobs, rewards, group_size, questions=questions, sampled_logprobs=sampled
    )


# ------------------------------------------------------------------------------------ the optimizer
def make_optimizer(module: nn.Module, name: str, lr: float):
    """Makes torch's AdamW, or the AdamW of bitsandbytes with 8-bit moments (32 bits for a tensor
    with fewer than 4096 weights).
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if name == "adamw":
        # fused: on a GPU the default needs a second copy of all weights during the step
        return torch.optim.AdamW(parameters, lr, weight_decay=0.0, fused=True)
    from bitsandbytes import optim  # slow to import, and only needed here

    kind = {"adamw8bit": optim.AdamW8bit, "paged_adamw8bit": optim.PagedAdamW8bit}[name]
    return kind(parameters, lr, weight_decay=0.0)


def lr_factor(
    step: int, steps: int, warmup_ratio: float, schedule: str, decay_from: float = 0.0
) -> float:
    """Returns the factor of the learning rate in optimizer step number `step` (from 0) of `steps`:
    it rises linearly in the warm-up, is 1 until the share `decay_from` of the steps is done, and
    then follows `schedule`.

    Worked: lr_factor(0, 10, 0.2, "linear"): the warm-up has 0.2 · 10 = 2 steps, so 1/2.
    lr_factor(6, 10, 0.2, "linear"): 4 of the other 8 steps are done, so 1 − 4/8 = 0.5.
    lr_factor(18, 40, 0.95, "constant"): the warm-up has 0.95 · 40 = 38 steps, so 19/38.
    10 steps, warmup_ratio 0.2, "linear" from 0.6 on: 1/2 1 1 1 1 1, then 1 3/4 1/2 1/4.
    """
    warmup = round(warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    start = max(warmup, int(decay_from * steps))
    progress = max(0, step - start) / max(1, steps - start)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[schedule]
