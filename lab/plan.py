"""Estimates the memory of a training step on a GPU before anything is downloaded.

    python -m lab.plan --model 7B --gpus 1 --gpu_memory 80 [any setting of the run]

    peak = standing + max(rollout, update)

P is the number of weights, K the width of one token's keys in a layer. Trained weights, their
gradients and moments are fp32 (8-bit optimizers: int8 moments); matrix products are in bf16. The
formulas give bytes; the numbers are GiB for 7B:

    standing   weights 4 P = 28.4, moments 8 P = 56.7; with a KL the reference 2 P = 14.2; with ppo
               a critic with moments 12 P. LoRA of rank 16: weights 14.3, moments 0.3, no
               reference
    rollout    bf16 copy of the weights 2 P = 14.2; keys and values 4 K per layer and token; logits
               16 bytes per slot (the cache of one row) and vocabulary entry; with ddp on several
               GPUs also gradients 4 P = 28.4, because they are views of DDP's buckets, which stay
               allocated
    update     gradients 4 P = 28.4, bf16 weights 13.2, head 4.3 and 42 KiB per token; activations
               262 KiB per layer and token

On several GPUs ddp keeps everything on each GPU; fsdp2 shards weights, moments and gradients, and
gathers the weights of the layers that it computes. LoRA and 8-bit moments cannot be sharded. The
plan uses ddp if that fits, otherwise fsdp2. tests/test_ghost.py compares these formulas with
simulated steps.
Left out: zero2, summarisers, judges and readers (2 bytes per weight), dense retrieval, the extra
memory of --engine hf. CUDA's own memory and fragmentation get the share 1 − USABLE of a GPU.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from engines.sampling import wants_copy
from engines.slots import SHARE
from errors import InputError, run_main
from flags import check_settings, resolve
from lab import parse_flags
from policy import chunk_rows
from settings import Settings, setting

GIB = 2**30
USABLE = 0.92  # usable share of a GPU's memory
PROMPT = 1024  # assumed tokens of a prompt
FEW = 8  # slots that must fit (fewer if there are fewer rows), or a rollout is very slow
Bytes = dict[str, float]  # part -> bytes
MOMENTS = {"adamw": 8, "adamw8bit": 2.03125, "paged_adamw8bit": 0}  # GPU bytes per trained weight
FIELDS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
    " vocab_size max_position_embeddings tie_word_embeddings"
).split()
SHAPES = {  # Qwen2 models
    "4M": (256, 4, 8, 2, 688, 4096, 4096, True),  # the model of lab.bench
    "0.5B": (896, 24, 14, 2, 4864, 151936, 32768, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, 32768, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, 32768, False),
}


def config_of(model: str):
    """Returns the config of a size ("7B"), of a hub name that contains "Qwen2.5-" directly before a
    size, of a directory, or of a hub model that is already on this disk.
    """
    if not Path(model).exists():
        for size, shape in SHAPES.items():
            if model.upper() == size or f"qwen2.5-{size}".lower() in model.lower():
                return Qwen2Config(**dict(zip(FIELDS, shape, strict=True)))
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        raise InputError(
            f"--model {model}: neither a size ({', '.join(SHAPES)}) nor a model on this disk that"
            " transformers knows: give the most similar size, or a directory with the model's"
            " config.json"
        ) from None


class Shape:
    """Holds the sizes of a Llama-like model that the formulas need."""

    def __init__(self, config):
        try:
            sizes = attrgetter(*FIELDS)(config)
        except AttributeError:
            raise InputError(
                f"--model: {config.model_type} is not built as Llama is: its memory is unknown"
            ) from None
        self.hidden, self.layers, self.heads, kv_heads, self.wide, *others = sizes
        self.vocab, self.positions, tied = others
        width = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.q, self.kv = width * self.heads, width * kv_heads
        with torch.device("meta"):  # takes no memory
            model = AutoModelForCausalLM.from_config(config)
        self.weights = sum(p.numel() for p in model.parameters())
        self.matrices = [  # seven per layer
            (m.in_features, m.out_features)
            for m in model.base_model.modules()
            if isinstance(m, nn.Linear)
        ]
        self.in_layers = sum(a * b for a, b in self.matrices)
        self.embedding = self.vocab * self.hidden
        self.ends = self.embedding * (2 - tied)


class Case:
    """A run on `gpus` GPUs. If `share` is above 1, weights, gradients and moments are sharded over
    so many GPUs (fsdp2); if it is 1, each GPU holds all of them (ddp). With LoRA or 8-bit moments
    it is set to 1.
    """

    def __init__(self, shape: Shape, s: Settings, gpus: int = 1, share: int = 1):
        self.shape, self.settings, self.gpus = shape, s, gpus
        thin = s.lora_rank * sum(map(sum, shape.matrices))  # LoRA: r (in + out) per matrix
        self.trained = thin or shape.weights
        self.share = 1 if thin or s.optimizer != "adamw" else share
        self.buckets = 4 * self.trained * (gpus > self.share)  # DDP's, which hold the gradients
        # Autocast's bf16 copy of the matrices of the layers and the head.
        self.copy = 0 if thin else 2 * (shape.in_layers + shape.embedding)
        rows = -(-s.questions_per_step * s.group_size // gpus)
        self.rows = min(rows, s.max_num_seqs or rows)  # most rows that a GPU samples at once
        turn = max([s.max_turn_tokens, *s.turn_tokens.values()])
        longest = PROMPT + turn + s.max_searches * (turn + s.document_tokens)
        # Tokens of the longest row. A micro-batch holds at least one row, so it may be that long.
        self.row_tokens = min(s.max_context or shape.positions, longest)
        self.tokens = max(s.tokens_per_micro_batch, self.row_tokens)


def frozen_bytes(shape: Shape, in_8bit: bool) -> int:
    """Returns the bytes of a frozen model in bf16. `in_8bit` makes the layers' matrices int8, with
    a scale of 4 bytes per row of a matrix.
    """
    scales = 4 * sum(out for _, out in shape.matrices)
    return 2 * shape.weights - in_8bit * (shape.in_layers - scales)


def activation_bytes(shape: Shape, lora_rank: int = 0) -> int:
    """Returns the bytes of a token's activations per layer. Worked for 7B (hidden = q = 3584, kv =
    512, wide = 18944, heads = 28): 32 · 3584 + 4 · (512 + 2 · 18944) + 8 + 4 · 28 = 268,408.
    """
    full = 26 * shape.hidden + 6 * shape.q + 4 * (shape.kv + 2 * shape.wide) + 8 + 4 * shape.heads
    # With LoRA, activations are bf16 and norms are frozen; A x is stored for each of the layer's
    # seven matrices.
    return full + 14 * (lora_rank - shape.hidden) if lora_rank else full


def standing(case: Case) -> Bytes:
    """Returns the parts that are in memory all the time."""
    s = case.settings
    weights = 4 * case.trained
    if s.lora_rank:
        weights += frozen_bytes(case.shape, s.load_in_8bit)
    moments = MOMENTS[s.optimizer] * case.trained
    parts = {"weights": weights / case.share, "moments": moments / case.share}
    if s.kl_coef and not s.lora_rank:
        parts["reference"] = frozen_bytes(case.shape, s.load_in_8bit)
    if s.algorithm == "ppo":
        parts["critic, its moments"] = (weights + moments) / case.share + case.buckets
    return parts


def rollout_parts(case: Case, slots: int) -> Bytes:
    shape = case.shape
    s = case.settings
    copy = 4 * shape.weights if case.share > 1 else case.copy  # if sharded, all gathered in fp32
    if wants_copy(s.sampling_copy, torch.device("cuda"), s.load_in_8bit):
        copy = 2 * shape.weights
    return {
        "rollout: gradients, in DDP's buckets": case.buckets,
        "rollout: copy of the weights": copy,
        "rollout: keys and values": 4 * shape.layers * shape.kv * slots * case.row_tokens,
        "rollout: logits of a step": 16 * slots * shape.vocab,
    }


def update_parts(case: Case) -> Bytes:
    """Returns the bytes that an update needs beyond `standing`: what is held at the end of the
    forward pass, and the largest piece of the backward pass.
    """
    shape, tokens, lora = case.shape, case.tokens, case.settings.lora_rank
    act = activation_bytes(shape, lora)
    # Embedding, head, the weights of two layers and the gradient of one layer.
    gathered = 4 * (shape.ends + 3 * shape.in_layers / shape.layers) * (case.share > 1)
    # Bytes of each number that a layer passes on, and how many weights of the head are trained.
    width, trained = (2, 0) if lora else (4, shape.embedding)
    logits = 10 * min(tokens, chunk_rows(shape.vocab, "cuda")) * shape.vocab  # logits of one chunk
    last = 12 * shape.hidden * tokens + logits + 6 * trained  # with the head's weight gradient
    saved, copy = act * shape.layers, case.copy
    if case.settings.gradient_checkpointing:  # layers are computed again, one at a time
        saved, copy = width * shape.hidden * shape.layers, 0
        again = act + 4 * shape.wide + width * shape.hidden
        last = max(last, again * tokens + 4 * trained)
    return {
        "update: weights, gathered": gathered,
        "update: gradients": 4 * case.trained / case.share,
        "update: bf16 copy of the weights": copy,
        "update: activations": saved * tokens,
        "update: head, or one layer again": last,
    }


def plan(case: Case, memory: float) -> tuple:
    """Returns ({part or "peak": bytes}, slots). There are at least FEW slots, even if they do not
    fit, but no more than rows.
    """
    always = standing(case)
    update = update_parts(case)
    none, one = (sum(rollout_parts(case, slots).values()) for slots in (0, 1))
    held = sum(always.values())
    slots = int(min(case.rows, max(FEW, SHARE * (memory - held - none) // (one - none))))
    rollout = rollout_parts(case, slots)
    peak = held + max(sum(update.values()), sum(rollout.values()))
    return always | rollout | update | {"peak": peak}, slots


ADVICE = [  # changes that cost the least come first
    ({"gradient_checkpointing": True}, "Computes activations twice: steps take a third longer."),
    ({"tokens_per_micro_batch": 4096}, "More and smaller micro-batches of at least one row."),
    ({"optimizer": "adamw8bit"}, "8-bit moments cannot be sharded: each GPU holds all (no FSDP2)."),
    ({"optimizer": "paged_adamw8bit"}, "The moments move to the CPU, so steps are slow."),
    (
        {"optimizer": "adamw", "lora_rank": 16, "lr": 2e-5},
        "LoRA: only thin matrices are trained, at ten times UR²'s learning rate.",
    ),
    ({"load_in_8bit": True}, "The frozen weights are rounded to 8 bits."),
]
FILES = {"data": "q.jsonl", "corpus": "p.jsonl"}  # placeholders in the printed command


def in_flags(settings: dict) -> str:
    return "".join(f" --{name} {value}" for name, value in settings.items())


def report(case: Case, memory: float, given: dict) -> Iterator[str]:
    """Yields the lines to print: GiB of each part, whether all fits, if not the changes that save
    memory, and at the end the command, or a larger number of GPUs to try.
    """
    for share in (1, case.gpus):  # ddp if that fits, otherwise fsdp2
        case = Case(case.shape, case.settings, case.gpus, share)
        parts, slots = plan(case, memory)
        if fits := parts["peak"] <= memory:
            break
    yield (
        f"GiB on each of {case.gpus} GPUs, weights in {case.share} parts,"
        f" for {case.rows} rows of up to {case.row_tokens} tokens:"
    )
    if tasks := case.settings.turn_tokens:
        yield f"  (tokens of a turn: {tasks}; if the data has no such tasks: --max_turn_tokens N)"
    parts["host: a save, in process 0"] = case.shape.weights * (12 if case.share > 1 else 4)
    yield from (f"  {name:42}{size / GIB:8.1f}" for name, size in parts.items() if size)
    yield f"{'fits' if fits else 'does not fit'} in {memory / GIB:.1f} GiB; {slots} rows at once"
    for changes, sentence in ADVICE * (not fits):
        given |= changes
        case = Case(case.shape, replace(case.settings, **changes), case.gpus, case.gpus)
        least = plan(case, 0)[0]["peak"]
        yield f" {in_flags(changes):43}{least / GIB:8.1f}  {sentence}"
        if fits := least <= memory:
            break
    if given["model"].upper() in SHAPES:
        given["model"] = "DIR"
    config = "fsdp2" if case.share > 1 else "ddp"
    several = f" --config_file configs/{config}.yaml --num_processes {case.gpus}" * (case.gpus > 1)
    launch = f"accelerate launch{several} train.py{in_flags(FILES | given)}"
    yield launch if fits else f"more GPUs: --gpus {2 * case.gpus}"


@dataclass(frozen=True)
class PlanSettings:
    """Estimate the memory of a run."""

    gpus: int = setting(1, "number of GPUs", least=1)
    gpu_memory: float = setting(80.0, "GiB of each GPU", above=0)


def main(arguments: list[str] | None = None) -> None:
    arguments = ["--model", "7B", *(sys.argv[1:] if arguments is None else arguments)]
    options, given = parse_flags("lab.plan", PlanSettings, arguments, True, only="train")
    chosen = given | {"data": ""}  # without --data the checks demand no --corpus
    settings = resolve(given.get("recipe", "ur2"), given.get("stage", 1), False, chosen)
    case = Case(Shape(config_of(settings.model)), check_settings(settings), options.gpus)
    print(*report(case, USABLE * options.gpu_memory * GIB, given), sep="\n")


if __name__ == "__main__":
    run_main(main)
