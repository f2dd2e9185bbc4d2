"""What fits: the bytes of a training step on one GPU, counted from the model's shape before
anything is downloaded.

    python train.py --plan --model 7B --gpus 1 --gpu_memory 80 [any setting of the run]

P weights, of which X are trained; T tokens in a micro-batch; H hidden size, F of the feed-forward
layer, Q and K widths of queries and keys, V vocabulary; b = 2 bytes for what a GPU computes (bf16),
4 on a CPU. Worked: 7B on a GPU, P = 7.616e9.

    weights        4 P, trained in fp32
                   28.4 GiB LoRA: b P frozen, or in 8 bits 1 byte per matrix weight; and 4 X, at r =
                   16 40.4e6    14.3 or 8.3
    moments        8 X; in 8 bits 2 X and a scale per 256; paged: they leave the GPU
                   56.7, 14.4, 0
    gradients      4 X
                   28.4
    reference      b P, where --kl_coef asks for one; or in 8 bits; under LoRA nothing
                   14.2, 8.1, 0
    bf16 copy      2 P while a rollout samples from it; of int8 weights none
                   14.2 2 per weight of a matrix, kept for the backward pass; not with checkpointing
                   13.2
    keys, values   2 K b per layer and token of a slot; as many slots as fit
                   56 KiB per token
    activations    per token and layer: in fp32 the residual stream, twice, and what the two norms
                   make of it, 16 H; in b bytes the matrices' inputs (on a GPU a copy for each of 5,
                   on a CPU 2 shared ones), queries, keys, values and attention's output, 2 Q + 2 K,
                   and 4 F; 8 for the norms, 4 per head        255 KiB with --gradient_checkpointing
                   4 H per layer, and one layer whole                      14 KiB
    head           10 bytes per logit of a chunk and 6 per weight for its gradient, on a CPU 4 and 4
                   4.3 GiB

    peak = weights + moments + reference + max(rollout: bf16 copy + keys and values + logits of a
    step,
                                               update:  gradients + bf16 copy + activations + head)

Several GPUs: under `ddp` everything stands on each of them, and gradients all the time, in its
buckets; under `zero2` weights, gradients and moments are cut in parts; for an update the weights
are put together, under `fsdp2` layer by layer. A rollout has its copy.

tests/test_plan.py holds the update's peak, weights, moments and keys and values against what small
models take, on a CPU and under bf16 autocast. The rollout is that of --engine slots: plain
`generate` reads whole prompts at once, which takes more. Left out: frozen judges and readers (2
bytes per weight), dense retrieval, CUDA's own memory and fragments: USABLE is the share that is
counted on.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

import policy
from errors import FlagParser, InputError, run_main
from recipes import Recipe, add_flags, check_recipe, resolve

GIB = 2**30
USABLE = 0.92  # of a GPU's memory
PROMPT = 1024  # tokens that a prompt is taken to have
SHARDINGS = ("ddp", "zero2", "fsdp2")


# ---------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Shape:
    """Of a Llama-like model, as its config.json has it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool = False  # the output head is the embedding
    bias: bool = True  # of queries, keys and values
    positions: int = 32768
    head_dim: int = 0

    @property
    def q(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv(self) -> int:
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's seven: queries, keys, values, output, gate, up, down."""
        h, f = self.hidden, self.intermediate
        return [(h, self.q), (h, self.kv), (h, self.kv), (self.q, h), (h, f), (h, f), (f, h)]

    @property
    def layer(self) -> int:
        """Weights in the matrices of one layer."""
        return sum(a * b for a, b in self.matrices)

    @property
    def vectors(self) -> int:
        """Weights of the norms and biases."""
        return self.layers * (2 * self.hidden + self.bias * (self.q + 2 * self.kv)) + self.hidden

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        return self.layers * self.layer + self.vectors + self.embedding * (1 if self.tied else 2)

    def lora(self, rank: int) -> int:
        """Weights of A and B beside all matrices: r (in + out) each."""
        return self.layers * sum(rank * (a + b) for a, b in self.matrices)


SHAPES = {
    "Qwen2.5-0.5B": Shape(896, 24, 14, 2, 4864, 151936, tied=True),
    "Qwen2.5-1.5B": Shape(1536, 28, 12, 2, 8960, 151936, tied=True),
    "Qwen2.5-3B": Shape(2048, 36, 16, 2, 11008, 151936, tied=True),
    "Qwen2.5-7B": Shape(3584, 28, 28, 4, 18944, 152064),
    "Llama-3-8B": Shape(4096, 32, 32, 8, 14336, 128256, bias=False, positions=8192),
}


def shape_of(model: str) -> Shape:
    """From the table ("7B" is Qwen2.5's; a hub name that contains one of its names), a directory,
    or a hub name that is in the cache: nothing is downloaded.
    """
    for name, shape in SHAPES.items():
        short = name.split("-")[-1] if name.startswith("Qwen") else "8B"
        if model.upper() == short or (name.lower() in model.lower() and not Path(model).exists()):
            return shape
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        return shape_from(config)
    except AttributeError:
        raise InputError(
            f"--model {model}: {config.model_type} is not built as Llama is: its bytes are not"
            " known"
        ) from None
    except (OSError, ValueError):
        close = difflib.get_close_matches(model, SHAPES, 1, 0)[0]
        raise InputError(
            f"--model {model}: neither {', '.join(SHAPES)} nor a model on this disk: give the one"
            f" most like it, such as {close}, or a directory with its config.json"
        ) from None


def shape_from(config) -> Shape:
    return Shape(
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
        config.tie_word_embeddings,
        config.model_type == "qwen2",
        config.max_position_embeddings,
        getattr(config, "head_dim", None) or 0,
    )


# ---------------------------------------------------------------------------------------- its bytes


def frozen_bytes(shape: Shape, in_8bit: bool, b: int = 2) -> float:
    """Of a model that nobody trains. int8: the layers' matrices, with a scale of 4 bytes per row.
    7B: 14.2 and 8.1 GiB.
    """
    if not in_8bit:
        return b * shape.weights
    rows = shape.layers * sum(out for _, out in shape.matrices)
    return shape.layers * shape.layer + 4 * rows + b * (shape.weights - shape.layers * shape.layer)


def moment_bytes(trained: int, optimizer: str) -> float:
    """7.616e9 weights: adamw 56.7 GiB; in 8 bits 2 bytes and two scales of 4 per 256 weights, 14.4
    GiB; paged 0.
    """
    return {"adamw": 8.0, "adamw8bit": 2 + 8 / 256, "paged_adamw8bit": 0.0}[optimizer] * trained


def activation_bytes(shape: Shape, lora_rank: int = 0, b: int = 2) -> int:
    """What one layer keeps of a token for the backward pass. 7B on a GPU: 26 · 3584 + 2 · (2 · 3584
    + 2 · 512 + 4 · 18944) + 8 + 4 · 28 = 261,240. LoRA: frozen norms keep 8 H less; a copy of
    attention's output, and A x of seven matrices.
    """
    inputs = (
        5 * 2 * shape.hidden if b == 2 else 2 * 4 * shape.hidden
    )  # a bf16 copy for each of five matrices, or two shared
    kept = (
        16 * shape.hidden
        + inputs
        + b * (2 * shape.q + 2 * shape.kv + 4 * shape.intermediate)
        + 8
        + 4 * shape.heads
    )
    return (
        kept - 8 * shape.hidden + 2 * shape.q * (b == 2) + 7 * lora_rank * b if lora_rank else kept
    )


def kv_bytes(shape: Shape, b: int = 2) -> int:
    """Keys and values of one token in all layers. 7B: 2 · 28 · 512 · 2 = 57,344."""
    return 2 * shape.layers * shape.kv * b


def head_bytes(shape: Shape, positions: int, trained: bool, b: int = 2) -> int:
    """In the backward pass a chunk's logits in fp32, and in bf16 what they become, with an fp32
    product on the way as a CPU makes it; the sum of the head's gradient in fp32, and in bf16 the
    chunk's part of it. 7B on a GPU: 882 rows at once, 10 · 882 · V + 6 V H = 4.3 GiB.
    """
    rows = min(positions, policy.chunk_rows(shape.vocab, "cuda" if b == 2 else "cpu"))
    return (10 if b == 2 else 4) * rows * shape.vocab + (
        6 if b == 2 else 4
    ) * shape.embedding * trained


@dataclass(frozen=True)
class Setting:
    """Of a recipe, what takes memory."""

    optimizer: str
    gradient_checkpointing: bool
    tokens: int  # of a micro-batch, padding counted
    lora_rank: int
    base_in_8bit: bool
    reference: bool
    reference_in_8bit: bool
    critic: bool  # PPO's
    rows: int  # that a GPU samples
    row_tokens: int  # the longest that a row may become
    copied: bool = True  # a rollout samples from a bf16 copy
    b: int = 2  # bytes of what is computed: bf16 on a GPU

    def trained(self, shape: Shape) -> int:
        return shape.lora(self.lora_rank) if self.lora_rank else shape.weights


def setting_of(recipe: Recipe, shape: Shape, gpus: int = 1, b: int = 2) -> Setting:
    """A micro-batch holds one row at least; a row is at most a prompt, its turns and its
    documents.
    """
    turns = (
        recipe.max_searches + 1
    ) * recipe.max_turn_tokens + recipe.max_searches * recipe.document_tokens
    longest = min(recipe.max_context or shape.positions, PROMPT + turns)
    rows = -(-recipe.questions_per_step * recipe.group_size // gpus)
    return Setting(
        recipe.optimizer,
        recipe.gradient_checkpointing,
        max(recipe.tokens_per_micro_batch, longest),
        recipe.lora_rank,
        recipe.base_in_8bit,
        bool(recipe.kl_coef) and not recipe.lora_rank,
        recipe.reference_in_8bit,
        recipe.algorithm == "ppo",
        min(rows, recipe.rollout_batch_size or rows),
        longest,
        b == 2
        and (
            recipe.sampling_copy == "bf16"
            or (recipe.sampling_copy == "auto" and not recipe.base_in_8bit)
        ),
        b,
    )


def standing(shape: Shape, s: Setting, gpus: int = 1, sharding: str = "ddp") -> dict[str, float]:
    """What is there all the time."""
    trained, share = s.trained(shape), 1 if sharding == "ddp" else gpus
    weights = (
        frozen_bytes(shape, s.base_in_8bit, s.b) + 4 * trained if s.lora_rank else 4 * shape.weights
    )
    parts = {"weights": weights / share, "moments": moment_bytes(trained, s.optimizer) / share}
    if gpus > 1 and sharding == "ddp":
        parts["gradients, in buckets"] = 4 * trained
    if s.reference:
        parts["reference"] = frozen_bytes(shape, s.reference_in_8bit, s.b)
    if s.critic:
        parts["critic, its moments"] = (weights + moment_bytes(trained, s.optimizer)) / share
    return parts


def multiplied(shape: Shape) -> int:
    """Weights of the matrices that are multiplied with: of them autocast holds a bf16 copy. 7B:
    13.2 GiB.
    """
    return shape.layers * shape.layer + shape.embedding


def rollout_parts(shape: Shape, s: Setting, slots: int, sharding: str = "ddp") -> dict[str, float]:
    return {
        "all weights, gathered": 4 * shape.weights * (sharding != "ddp" and not s.copied),
        "bf16 copy to sample with": 2 * shape.weights * s.copied,
        "bf16 copy, autocast's": (
            2 * multiplied(shape) * (s.b == 2 and not s.copied and not s.lora_rank)
        ),
        "keys and values": kv_bytes(shape, s.b) * slots * s.row_tokens,
        "logits of a step": 16 * slots * shape.vocab,
    }


def update_parts(
    shape: Shape, s: Setting, gpus: int = 1, sharding: str = "ddp"
) -> dict[str, float]:
    """At the end of the forward pass, when most is there, and with what the first part of the
    backward pass adds.
    """
    trained, whole, one = s.trained(shape), sharding == "zero2", sharding == "fsdp2"
    layer, ends = 4 * shape.layer, 4 * shape.embedding * (1 if shape.tied else 2)
    gradients = (
        0 if sharding == "ddp" and gpus > 1 else 4 * trained / (1 if sharding == "ddp" else gpus)
    )
    act, copies = activation_bytes(shape, s.lora_rank, s.b), 2 * (s.b == 2 and not s.lora_rank)
    head = head_bytes(shape, s.tokens, not s.lora_rank, s.b)
    passing = (
        (8 if s.lora_rank else 4) * shape.intermediate * s.tokens
    )  # gradients inside one feed-forward layer
    waiting = (
        4 * shape.embedding * (shape.tied and not s.lora_rank)
    )  # the head's gradient, until the embedding has its own
    if s.gradient_checkpointing:
        kept, copied = (s.b if s.lora_rank else 4) * shape.hidden * shape.layers, 0
        # two moments: the head's gradient, one layer again with its gradient
        extra = max(
            head + copies * shape.embedding,
            act * s.tokens + passing * s.b / 4 + waiting + copies * shape.layer,
        )
    else:
        kept, copied = act * shape.layers, copies * multiplied(shape)
        extra = max(head, passing + waiting)
    return {
        "weights gathered": 4 * shape.weights * whole + (ends + 2 * layer) * one,
        "gradients": gradients + (max(ends, layer) if sharding != "ddp" else 0),
        "bf16 copy of the weights": copied,
        "activations": (kept + 12 * shape.hidden) * s.tokens,
        "head, or a layer's backward pass": extra,
    }


# -------------------------------------------------------------------------------------- does it fit


@dataclass(frozen=True)
class Plan:
    """Bytes on each GPU, part by part, and whether they fit in `memory` bytes."""

    standing: dict[str, float]
    rollout: dict[str, float]
    update: dict[str, float]
    slots: int
    memory: float

    @property
    def peak(self) -> float:
        return sum(self.standing.values()) + max(
            sum(self.rollout.values()), sum(self.update.values())
        )

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory


def make_plan(
    shape: Shape, s: Setting, memory: float, gpus: int = 1, sharding: str = "ddp"
) -> Plan:
    """The rollout takes as many slots as fit beside the rest, up to one for every row; with fewer
    than 8 (or all rows) it would crawl, so that is what must fit.
    """
    always, update = standing(shape, s, gpus, sharding), update_parts(shape, s, gpus, sharding)
    none, one = (sum(rollout_parts(shape, s, slots, sharding).values()) for slots in (0, 1))
    room = (memory - sum(always.values()) - none) // (one - none)
    slots = int(min(s.rows, max(8, room)))
    return Plan(always, rollout_parts(shape, s, slots, sharding), update, slots, memory)


# In the order in which they are tried: what each costs is said.
REMEDIES: list[tuple[str, str, dict]] = [
    ("--gradient_checkpointing", "a third more time per update", {"gradient_checkpointing": True}),
    ("--tokens_per_micro_batch {}", "more, smaller passes", {"tokens": 0}),
    ("--reference_in_8bit", "a KL that is off by what int8 rounds", {"reference_in_8bit": True}),
    ("--optimizer adamw8bit", "moments rounded to 8 bits", {"optimizer": "adamw8bit"}),
    (
        "--optimizer paged_adamw8bit",
        "moments on the CPU: slow steps",
        {"optimizer": "paged_adamw8bit"},
    ),
    (
        "--lora_rank 16",
        "not all weights are trained; ten times the learning rate",
        {"lora_rank": 16, "reference": False},
    ),
    (
        "--sampling_copy none",
        "with LoRA: slower sampling, through the thin matrices",
        {"copied": False},
    ),
    (
        "--base_in_8bit",
        "with LoRA: frozen weights rounded to 8 bits",
        {"base_in_8bit": True, "copied": False},
    ),
]


def remedies(
    shape: Shape, s: Setting, memory: float, gpus: int = 1, sharding: str = "ddp"
) -> list[int]:
    """Numbers of the REMEDIES that make it fit, none of them to spare; [] where nothing does."""

    def fits(chosen: list[int]) -> bool:
        return make_plan(shape, changed(s, chosen), memory, gpus, sharding).fits

    possible = [
        i
        for i, (flag, _, change) in enumerate(REMEDIES)
        if changed(s, [i]) != s
        and (
            sharding == "ddp"
            or not flag.startswith(("--optimizer", "--lora", "--base", "--sampling"))
        )
    ]
    counts = [n for n in range(1, len(possible) + 1) if fits(possible[:n])]
    if not counts:
        return []
    chosen = possible[: counts[0]]
    for i in list(chosen):
        if fits(without := [j for j in chosen if j != i]):
            chosen = without
    return chosen


def changed(s: Setting, chosen: list[int]) -> Setting:
    for i in chosen:
        change = REMEDIES[i][2]
        if "tokens" in change:
            change = {"tokens": min(s.tokens, s.row_tokens)}
        if ("reference_in_8bit" in change and not s.reference) or (
            "copied" in change and not s.lora_rank
        ):
            change = {}
        s = dataclasses.replace(s, **change)
    return s


def rows_of(plans: list[Plan]) -> Iterator[tuple[str, list[float]]]:
    """The lines of the table: (what, its bytes in each plan)."""
    for name in ("standing", "rollout", "update"):
        parts = [getattr(plan, name) for plan in plans]
        label = "" if name == "standing" else f"{name}: "
        for part in dict.fromkeys(key for p in parts for key in p):
            values = [p.get(part, 0.0) for p in parts]
            if any(v > GIB / 1000 for v in values):
                yield label + part, values
        yield (
            f"= {'always there' if name == 'standing' else name}",
            [sum(p.values()) for p in parts],
        )
    yield "peak: always there + the larger of both", [plan.peak for plan in plans]


def report(shape: Shape, recipe: Recipe, gpus: int, gpu_memory: float) -> str:
    s, memory = setting_of(recipe, shape, gpus), USABLE * gpu_memory * GIB
    names = (
        SHARDINGS if gpus > 1 and not s.lora_rank and s.optimizer == "adamw" else ("ddp",)
    )  # the others are for plain AdamW
    plans = [make_plan(shape, s, memory, gpus, name) for name in names]
    lines = [
        (
            f"{recipe.model}: {shape.weights / 1e9:.2f}e9 weights, {s.trained(shape) / 1e9:.3g}e9"
            f" trained; {recipe.recipe} stage {recipe.stage}; per GPU {s.rows} rows of up to"
            f" {s.row_tokens} tokens, {s.tokens} in a micro-batch"
        ),
        f"{f'GiB on each of {gpus} GPUs' if gpus > 1 else 'GiB':44}"
        + "".join(f"{name:>8}" for name in names if gpus > 1),
    ]
    lines += [
        f"{label:44}" + "".join(f"{v / GIB:8.1f}" for v in values)
        for label, values in rows_of(plans)
    ]
    for name, plan in zip(names, plans, strict=True):
        lines += verdict(shape, s, plan, gpus, name)
    return "\n".join(lines)


def verdict(shape: Shape, s: Setting, plan: Plan, gpus: int, sharding: str) -> list[str]:
    where, usable = (
        f"{sharding}: " if gpus > 1 else "",
        f"{plan.memory / GIB:.1f} GiB ({USABLE:.0%} of a GPU)",
    )
    if plan.fits:
        few = (
            f" (--engine slots sees to that; plain generate needs --rollout_batch_size {plan.slots}"
            " or less)"
        )
        return [
            f"{where}fits in {usable}, with {plan.slots} of {s.rows} rows sampled at"
            f" once{few * (plan.slots < s.rows)}"
        ]
    chosen = remedies(shape, s, plan.memory, gpus, sharding)
    lines = [
        f"{where}does not fit in {usable}; "
        + ("it would with" if chosen else "no flag makes it fit")
    ]
    return lines + [
        f"    {REMEDIES[i][0].format(min(s.tokens, s.row_tokens)):34} {REMEDIES[i][1]}"
        for i in chosen
    ]


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = FlagParser(
        "train.py --plan", description="What of a run fits, before anything is downloaded."
    )
    add_flags(parser)
    parser.add_argument("--plan", action="store_true", help="print what takes memory, and stop")
    parser.add_argument("--gpus", type=int, default=1, help="how many")
    parser.add_argument("--gpu_memory", type=float, default=80.0, help="GiB of each")
    given = vars(parser.parse_args(arguments))
    gpus, memory = given.pop("gpus"), given.pop("gpu_memory")
    given.pop("plan")
    if gpus < 1 or not memory > 0:
        raise InputError(
            f"--gpus {gpus} --gpu_memory {memory:g}: give at least one GPU, with some memory"
        )
    model = given.setdefault("model", "7B")
    recipe = resolve(
        given.get("recipe", "ur2"), given.get("stage", 1), False, {**given, "data": ""}
    )
    print(report(shape_of(model), check_recipe(recipe), gpus, memory))


if __name__ == "__main__":
    run_main(main)
