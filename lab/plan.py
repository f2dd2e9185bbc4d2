"""What fits: the bytes of a training step on one GPU, counted before anything is downloaded.

    python -m lab.plan --model 7B --gpus 1 --gpu_memory 80 [any setting of the run]

P weights, X of them trained; H hidden size, F of the feed-forward layer; Q, K widths of queries and
keys; b bytes for what is computed, 2 on a GPU (bf16), 4 on a CPU. Worked: 7B on a GPU, in GiB.

    weights       4 P, trained in fp32                                                28.4
                  LoRA: b P frozen (in 8 bits 1 per weight of a matrix), and 4 X      14.3 or 8.3
    moments       8 X; in 8 bits 2 X and two scales per 256; paged: not on the GPU    56.7, 14.4, 0
    gradients     4 X                                                                 28.4
    reference     b P with --kl_coef, or in 8 bits; under LoRA none                   14.2, 8.1, 0
    bf16 copy     2 P while a rollout samples from it                                 14.2
                  2 per weight of a matrix in an update; with checkpointing none      13.2
    keys, values  2 K b per layer and token of a slot                             56 KiB per token
    activations   per layer and token: fp32 residuals and norms 16 H; the inputs      255 KiB
                  of five matrices 5 b H; b (2 Q + 2 K + 4 F); norms and heads
                  with --gradient_checkpointing 4 H, and one layer whole              14 KiB
    head          10 per logit of a chunk, 6 per weight for its gradient              4.3

    peak = weights + moments + reference
           + max(rollout: copy + keys and values of as many slots as fit + logits of a step,
                 update:  gradients + copy + activations + head)

Several GPUs: under ddp everything stands on each, gradients all the time; zero2 and fsdp2 cut them,
weights and moments in parts, and zero2 puts all weights together for an update, fsdp2 one layer's.
tests/test_plan.py holds the figures against what small models take on a CPU.
Left out: judges and readers (2 per weight), dense retrieval, what plain `generate` takes beyond
slots, CUDA's own memory and fragments: USABLE is the share that is counted on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from errors import FlagParser, InputError, run_main
from other_models.llm import frozen_in_8bit
from policy import chunk_rows
from scale.sampling import wants_copy
from settings import RECORDS, Settings, add_flags, check_settings, named_in, resolve

GIB = 2**30
USABLE = 0.92  # of a GPU's memory
PROMPT = 1024  # tokens that a prompt is taken to have
FEW = 8  # slots
SHARDINGS = ("ddp", "zero2", "fsdp2")
MOMENTS = {"adamw": 8, "adamw8bit": 2 + 8 / 256, "paged_adamw8bit": 0}  # bytes per trained weight

# ---------------------------------------------------------------------------------------- the model

FIELDS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
    " vocab_size max_position_embeddings tie_word_embeddings"
).split()
SHAPES = {
    "Qwen2-4M": (256, 4, 8, 2, 688, 4096, 4096, True),  # lab.bench's
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, 32768, True),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, 32768, True),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, 32768, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, 32768, False),
    "Llama-3-8B": (4096, 32, 32, 8, 14336, 128256, 8192, False),
}


def config_of(model: str):
    """Of a size in the table ("7B"), of a hub name that contains one of its names, of a directory,
    or of a hub name that is in the cache: nothing is downloaded.
    """
    for name, shape in SHAPES.items():
        named = name.lower() in model.lower() and not Path(model).exists()
        if named or model.upper() == name.split("-")[-1]:
            kind = Qwen2Config if name.startswith("Qwen") else LlamaConfig
            return kind(**dict(zip(FIELDS, shape, strict=True)))
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):
        raise InputError(
            f"--model {model}: neither {', '.join(SHAPES)} nor a model on this disk: give the one"
            " most like it, or a directory with its config.json"
        ) from None


class Shape:
    """What the formulas need of a Llama-like model."""

    def __init__(self, config):
        try:
            sizes = [getattr(config, name) for name in FIELDS]
        except AttributeError:
            said = f"{config.model_type} is not built as Llama is: its bytes are not known"
            raise InputError(f"--model: {said}") from None
        self.hidden, self.layers, self.heads, kv_heads, self.wide, self.vocab = sizes[:6]
        self.positions, self.tied = sizes[6:]
        width = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.q, self.kv = width * self.heads, width * kv_heads
        with torch.device("meta"):  # takes no memory
            model = AutoModelForCausalLM.from_config(config)
        self.weights = sum(p.numel() for p in model.parameters())
        linear = [m for m in model.base_model.modules() if isinstance(m, nn.Linear)]
        self.matrices = [(m.in_features, m.out_features) for m in linear]  # seven per layer
        self.in_layers = sum(a * b for a, b in self.matrices)
        self.embedding = self.vocab * self.hidden
        self.ends = self.embedding * (1 if self.tied else 2)


# ---------------------------------------------------------------------------------------- its bytes


class Case:
    """A run on so many GPUs; b: bytes of what is computed."""

    def __init__(self, shape: Shape, s: Settings, gpus: int = 1, sharding: str = "ddp", b: int = 2):
        self.shape, self.settings, self.gpus, self.sharding, self.b = shape, s, gpus, sharding, b
        thin = s.lora_rank * sum(map(sum, shape.matrices))  # A and B: r (in + out) each
        self.trained = thin or shape.weights
        self.share = 1 if sharding == "ddp" else gpus
        rows = -(-s.questions_per_step * s.group_size // gpus)
        self.rows = min(rows, s.rollout_batch_size or rows)  # that a GPU samples at once
        sampled = (s.max_searches + 1) * s.max_turn_tokens
        found = s.max_searches * s.document_tokens
        # The longest that a row may become; a micro-batch holds one at least.
        self.row_tokens = min(s.max_context or shape.positions, PROMPT + sampled + found)
        self.tokens = max(s.tokens_per_micro_batch, self.row_tokens)


def frozen_bytes(shape: Shape, in_8bit: bool, b: int = 2) -> int:
    """Of a model that nobody trains. int8: the layers' matrices, with a scale of 4 per row."""
    if not in_8bit:
        return b * shape.weights
    scales = 4 * sum(out for _, out in shape.matrices)
    return shape.in_layers + scales + b * (shape.weights - shape.in_layers)


def activation_bytes(shape: Shape, lora_rank: int = 0, b: int = 2) -> int:
    """What one layer keeps of a token for the backward pass. 7B on a GPU: 26 · 3584 + 2 · (2 · 3584
    + 2 · 512 + 4 · 18944) + 8 + 4 · 28 = 261,240.
    """
    h, inputs = shape.hidden, 5 if b == 2 else 4  # a bf16 copy for each matrix, or two shared
    kept = 16 * h + 2 * inputs * h + b * (2 * shape.q + 2 * shape.kv + 4 * shape.wide)
    if lora_rank:  # frozen norms keep less; a copy of attention's output, A x of seven matrices
        kept += 2 * shape.q * (b == 2) + 7 * lora_rank * b - 8 * h
    return kept + 8 + 4 * shape.heads


def kv_bytes(shape: Shape, b: int = 2) -> int:
    """Keys and values of one token in all layers. 7B: 2 · 28 · 512 · 2 = 57,344."""
    return 2 * shape.layers * shape.kv * b


def head_bytes(shape: Shape, positions: int, trained: bool, b: int = 2) -> int:
    """In the backward pass: a chunk's logits, and the gradient of the head."""
    rows = min(positions, chunk_rows(shape.vocab, "cuda" if b == 2 else "cpu"))
    per_logit, per_weight = (10, 6) if b == 2 else (4, 4)
    return per_logit * rows * shape.vocab + per_weight * shape.embedding * trained


def standing(case: Case) -> dict[str, float]:
    """What is there all the time."""
    s, in_8bit = case.settings, frozen_in_8bit(case.settings)
    weights = 4 * case.trained
    if s.lora_rank:
        weights += frozen_bytes(case.shape, "base" in in_8bit, case.b)
    moments = MOMENTS[s.optimizer] * case.trained
    parts = {"weights": weights / case.share, "moments": moments / case.share}
    if case.gpus > 1 and case.sharding == "ddp":
        parts["gradients, in buckets"] = 4 * case.trained
    if s.kl_coef and not s.lora_rank:
        parts["reference"] = frozen_bytes(case.shape, "reference" in in_8bit, case.b)
    if s.algorithm == "ppo":
        parts["critic, its moments"] = (weights + moments) / case.share
    return parts


def rollout_parts(case: Case, slots: int) -> dict[str, float]:
    shape, s = case.shape, case.settings
    device = torch.device("cuda" if case.b == 2 else "cpu")
    if wants_copy(s.sampling_copy, device, "base" in frozen_in_8bit(s)):
        copy = 2 * shape.weights
    elif case.sharding != "ddp":
        copy = 4 * shape.weights  # all of them, gathered
    else:  # autocast's
        copy = 2 * (shape.in_layers + shape.embedding) * (case.b == 2 and not s.lora_rank)
    return {
        "rollout: copy of the weights": copy,
        "rollout: keys and values": kv_bytes(shape, case.b) * slots * case.row_tokens,
        "rollout: logits of a step": 16 * slots * shape.vocab,
    }


def update_parts(case: Case) -> dict[str, float]:
    """At the end of the forward pass, and with what the first part of the backward pass adds."""
    shape, b, tokens, lora = case.shape, case.b, case.tokens, case.settings.lora_rank
    layer = shape.in_layers / shape.layers
    gathered = {"ddp": 0, "zero2": shape.weights, "fsdp2": shape.ends + 2 * layer}
    gradients = 4 * case.trained / case.share
    if case.sharding != "ddp":
        gradients += 4 * max(shape.ends, layer)  # whole for a moment
    elif case.gpus > 1:
        gradients = 0  # they stand there always
    act, copies = activation_bytes(shape, lora, b), 2 * (b == 2 and not lora)
    head = head_bytes(shape, tokens, not lora, b)
    passing = (8 if lora else 4) * shape.wide * tokens  # gradients in a feed-forward layer
    # A tied head's gradient waits until the embedding has its own.
    waiting = 4 * shape.embedding * (shape.tied and not lora)
    if case.settings.gradient_checkpointing:
        kept, copied = (b if lora else 4) * shape.hidden * shape.layers, 0
        again = act * tokens + passing * b / 4 + waiting + copies * layer  # one layer
        extra = max(head + copies * shape.embedding, again)
    else:
        kept, copied = act * shape.layers, copies * (shape.in_layers + shape.embedding)
        extra = max(head, passing + waiting)
    return {
        "update: weights, gathered": 4 * gathered[case.sharding],
        "update: gradients": gradients,
        "update: bf16 copy of the weights": copied,
        "update: activations": (kept + 12 * shape.hidden) * tokens,
        "update: head, or a layer's backward pass": extra,
    }


# -------------------------------------------------------------------------------------- does it fit


def plan(case: Case, memory: float) -> dict[str, float]:
    """Each part's bytes; the peak; and the slots, as many as fit, but at least FEW (or all rows):
    with fewer a rollout would crawl.
    """
    always, update = standing(case), update_parts(case)
    none, one = (sum(rollout_parts(case, slots).values()) for slots in (0, 1))
    room = (memory - sum(always.values()) - none) // (one - none)
    slots = min(case.rows, max(FEW, room))
    rollout = rollout_parts(case, slots)
    a, r, u = (sum(parts.values()) for parts in (always, rollout, update))
    return always | rollout | update | {"peak": a + max(r, u), "slots": slots}


ADVICE: list[tuple[dict, str]] = [  # by what it costs
    ({"gradient_checkpointing": True}, "a third more time per update"),
    ({"tokens_per_micro_batch": 4096}, "more, smaller passes; a row is the least"),
    ({"optimizer": "adamw8bit"}, "moments rounded to 8 bits"),
    ({"optimizer": "paged_adamw8bit"}, "moments on the CPU: slow steps"),
    ({"lora_rank": 16}, "not all weights are trained; ten times the learning rate"),
    ({"in_8bit": "base"}, "the frozen weights rounded to 8 bits"),
]


def advice(case: Case) -> Iterator[str]:
    yield f"the least peak, with {FEW} slots, with each of these and all above it:"
    settings = case.settings
    for change, cost in ADVICE:
        settings = replace(settings, **change)
        least = plan(Case(case.shape, settings, case.gpus), 0)["peak"]
        flag = " ".join(f"--{name} {value}" for name, value in change.items())
        yield f"  {flag:42}{least / GIB:8.1f}  {cost}"
    yield "or more GPUs: --gpus 8, with weights in parts (configs/fsdp2.yaml)"


def report(shape: Shape, s: Settings, gpus: int, memory: float) -> Iterator[str]:
    """A line per part, a column per sharding, and whether it fits."""
    spread = gpus > 1 and not s.lora_rank and s.optimizer == "adamw"  # else no parts
    cases = [Case(shape, s, gpus, name) for name in (SHARDINGS if spread else SHARDINGS[:1])]
    columns, case = [plan(one, memory) for one in cases], cases[0]
    yield (
        f"{s.model}: {shape.weights / 1e9:.2f}e9 weights, {case.trained / 1e9:.3g}e9 trained;"
        f" {s.recipe} stage {s.stage}; per GPU {case.rows} rows of up to {case.row_tokens} tokens,"
        f" {case.tokens} in a micro-batch"
    )
    yield f"{f'GiB on each of {gpus}':44}" + "".join(f"{one.sharding:>8}" for one in cases)
    for name in dict.fromkeys(name for column in columns for name in column if name != "slots"):
        values = [column.get(name, 0.0) / GIB for column in columns]
        yield f"{name:44}" + "".join(f"{value:8.1f}" for value in values)
    for one, column in zip(cases, columns, strict=True):
        fits = "fits" if column["peak"] <= memory else "does not fit"
        slots = f"{column['slots']:.0f} of {case.rows} rows sampled at once"
        yield f"{one.sharding}: {fits} in {memory / GIB:.1f} GiB ({USABLE:.0%} of a GPU); {slots}"
    if all(column["peak"] > memory for column in columns):
        yield from advice(case)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    said = "What of a run fits, before anything is downloaded."
    parser = FlagParser("python -m lab.plan", description=said)
    parser.add_argument("--gpus", type=int, default=1, help="how many")
    parser.add_argument("--gpu_memory", type=float, default=80.0, help="GiB of each")
    add_flags(parser, RECORDS, named_in(["--model", "7B", *arguments]), "train")
    given = vars(parser.parse_args(arguments))
    gpus, memory = given.pop("gpus"), given.pop("gpu_memory")
    if gpus < 1 or not memory > 0:
        raise InputError(f"--gpus {gpus} --gpu_memory {memory:g}: give at least one, with memory")
    chosen = {"model": "7B"} | given | {"data": ""}  # which questions takes no memory
    settings = resolve(given.get("recipe", "ur2"), given.get("stage", 1), False, chosen)
    shape = Shape(config_of(settings.model))
    print(*report(shape, check_settings(settings), gpus, USABLE * memory * GIB), sep="\n")


if __name__ == "__main__":
    run_main(main)
