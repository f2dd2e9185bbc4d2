"""Estimates the memory of a training step on a GPU before anything is downloaded.

    python -m lab.plan --model 7B --gpus 1 --gpu_memory 80 [any setting of the run]

    peak = always + max(rollout, update)

P is the number of weights, K the width of one token's keys in a layer. Trained weights, their
gradients and moments are fp32 (8-bit optimizers: int8 moments); matrix products are in bf16. Bytes,
and GiB for 7B:

    always     weights 4 P = 28.4, moments 8 P = 56.7; with a KL the reference 2 P = 14.2; with ppo
               a critic with moments 12 P. LoRA of rank 16: weights 14.3, moments 0.3, no
               reference
    rollout    bf16 copy of the weights 2 P = 14.2; keys and values 4 K per layer and token; logits
               16 bytes per row and vocabulary entry; with ddp on several GPUs also gradients
               4 P = 28.4, because they are views of DDP's buckets, which stay allocated
    update     gradients 4 P = 28.4, bf16 weights 13.2, head 4.3 and 42 KiB per token; activations
               262 KiB per layer and token

On several GPUs ddp keeps everything on each GPU; fsdp2 shards weights, moments and gradients, and
gathers the weights of the layers that it computes. LoRA and 8-bit moments cannot be sharded. The
plan uses ddp if that fits, otherwise fsdp2. docs/scale.md compares it with simulated steps.
What saves memory, the cheapest first: --gradient_checkpointing, --tokens_per_micro_batch 4096,
--optimizer adamw8bit, --lora_rank 16, more --gpus.
Left out: zero2, --load_in_8bit, summarisers, judges, readers and the encoders of dense retrieval
(2 bytes per weight, or none here if a server runs them), and models that are not built as Llama is.
"""

from dataclasses import dataclass
from operator import attrgetter

from transformers import AutoConfig, Qwen2Config

from errors import run_main
from flags import resolve
from lab import parse_flags
from policy import chunk_rows
from rollout import MAX_REJECTED_QUERIES, NOTE_TOKENS
from settings import Settings, setting
from summarizer import models_in

GIB = 2**30
USABLE = 0.92  # share of a GPU; the rest is for CUDA itself and fragmentation
PROMPT = 1024  # assumed tokens of a prompt
ROWS = 8  # that a rollout samples at once at least; it takes more if there is room
MOMENTS = {"adamw": 8, "adamw8bit": 2.03125, "paged_adamw8bit": 0}  # GPU bytes per trained weight
FIELDS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
    " vocab_size max_position_embeddings tie_word_embeddings"
).split()
SHAPES = {  # Qwen2 models
    "0.5B": (896, 24, 14, 2, 4864, 151936, 32768, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, 32768, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, 32768, False),
}


def config_of(model: str):
    """Returns the config of a size ("7B"), a folder, or a hub name."""
    if model in SHAPES:
        return Qwen2Config(**dict(zip(FIELDS, SHAPES[model], strict=True)))
    return AutoConfig.from_pretrained(model)


def longest_row(s: Settings, config) -> int:
    """Returns the tokens of the longest row: a prompt, a turn and documents or a summariser's notes
    for each search, a rejected query, and the last turn.
    """
    turn = max([s.max_turn_tokens, *s.turn_tokens.values()])
    notes = [NOTE_TOKENS, *(most for *_, most in s.summary_sampling.values())]
    found = max([s.document_tokens, *(notes if models_in(s.summarizer) else ())])
    row = PROMPT + (s.max_searches + MAX_REJECTED_QUERIES) * turn + s.max_searches * found
    return min(s.max_context or config.max_position_embeddings, row)


def estimate(s: Settings, config, gpus: int, parts: int) -> dict[str, dict]:
    """Returns the bytes on each GPU by name: those always in memory, those of a rollout and those
    of an update. Weights, gradients and moments are cut into `parts`: 1 under ddp.
    """
    width, layers, heads, kv_heads, wide, vocab, _, tied = attrgetter(*FIELDS)(config)
    size = getattr(config, "head_dim", None) or width // heads
    keys, queries = size * kv_heads, size * heads
    lora, thin = s.lora_rank > 0, s.gradient_checkpointing
    layer = 2 * width * (queries + keys) + 3 * width * wide  # weights of a layer
    weights = layers * layer + vocab * width * (2 - tied)
    copy = 2 * weights  # in bf16
    cast = 2 * (layers * layer + vocab * width)  # autocast casts no embedding
    # LoRA trains rank · (in + out) weights of seven matrices; the rest is frozen, in bf16.
    trained = s.lora_rank * layers * (7 * width + 2 * (queries + keys) + 3 * wide) or weights
    own, moments = 4 * trained / parts, MOMENTS[s.optimizer] * trained / parts
    buckets = 4 * trained * (gpus > parts)
    row = longest_row(s, config)
    tokens = max(s.tokens_per_micro_batch, row)
    # Bytes of a token in a layer, and of what the layer passes on
    act = 26 * width + 6 * queries + 4 * keys + 8 * wide - 14 * width * lora
    passed = (4 - 2 * lora) * width
    again = (act + 4 * wide + passed) * tokens  # a layer computed again, and its gradient
    head = 12 * width * tokens + 10 * min(tokens, chunk_rows(vocab, "cuda")) * vocab
    return {
        "always": {
            "weights": own + copy * lora,
            "moments": moments,
            "critic": (own + copy * lora + moments + buckets) * (s.algorithm == "ppo"),
            "reference": copy * (s.kl_coef > 0 and not lora),
        },
        "rollout": {
            "gradients (DDP's buckets)": buckets,
            "copy of the weights": copy,
            "keys and values": 4 * layers * keys * ROWS * row,
            "logits": 16 * ROWS * vocab,
        },
        "update": {
            "gradients": own,
            "activations": (passed if thin else act) * layers * tokens,
            "head, or a layer again": max(head, again * thin) + 6 * vocab * width * (not lora),
            "gathered weights": (8 * vocab * width + 12 * layer) * (parts > 1),
            "bf16 copy of the weights": cast * (not lora and not thin),
        },
    }


@dataclass(frozen=True)
class PlanSettings:
    """Estimate the memory of a run."""

    gpus: int = setting(1, "number of GPUs", least=1)
    gpu_memory: float = setting(80.0, "GiB of each GPU", least=1)


def main(arguments: list[str] | None = None) -> None:
    options, given = parse_flags("lab.plan", PlanSettings, arguments, True, only="train")
    s = resolve(given.get("recipe", "ur2"), given.get("stage", 1), False, given)
    config, room = config_of(s.model or "7B"), USABLE * options.gpu_memory
    sharded = options.gpus if s.optimizer == "adamw" and not s.lora_rank else 1
    for parts in (1, sharded):  # ddp if that fits, otherwise fsdp2
        kinds = estimate(s, config, options.gpus, parts)
        always, *others = (sum(sizes.values()) / GIB for sizes in kinds.values())
        peak = always + max(others)
        if peak <= room:
            break
    print(f"GiB on each of {options.gpus} GPUs, weights in {parts} parts:")
    for kind, sizes in kinds.items():
        print(f"{kind}:", *(f"{name} {size / GIB:.1f}" for name, size in sizes.items()), sep="  ")
    fits = "fits" if peak <= room else "does not fit"
    print(f"peak {peak:.1f}: {fits} in {room:.1f}, without summariser, judge, reader, encoder")


if __name__ == "__main__":
    run_main(main)
