"""Texts of unequal length in one forward pass, one behind the other and not padded to the longest.

    padded     a a a a a a a a        packed     a a a a a a a a | b b b . | c c c c | d d
               b b b . . . . .
               c c c c . . . .        groups     1 row of 8 | 2 rows of 4 | 1 row of 2
               d d . . . . . .

All of a transformer but attention treats each token by itself, given its position in its own text.
Attention goes group by group: the rows of a group are equally long to within SLACK tokens, so that
a group is a view of the packed tensor. Also not computed: what stands behind the last wanted token
of a text, and the last layer's feed-forward part of tokens that are not wanted. Left out: computing
a common prompt once; other families and layers with a sliding window, whose texts are padded.
"""

import contextlib
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SLACK = 4  # tokens of padding per row: fewer groups, each of which costs a call per layer
FAMILIES = ("llama", "qwen2", "qwen3")


def hidden_states(backbone, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """tokens [B, L], right-padded; n wanted [B, T] bool -> their last hidden states [n, H]."""
    columns = torch.arange(wanted.shape[1], device=tokens.device)  # [T]
    if backbone.config._attn_implementation != "packed":  # padded
        hidden = backbone(input_ids=tokens, use_cache=False).last_hidden_state  # [B, L, H]
        return hidden[:, : len(columns)][wanted]
    ids, positions, groups, starts = pack(tokens, lengths_of(wanted))
    places = (starts[:, None] + columns)[wanted]  # [n]
    # Trap: without a mask the model builds one of N x N. One of 4 dimensions is handed on
    # untouched; this one is not read.
    how = {"attention_mask": tokens.new_zeros(1, 1, 1, 1), "use_cache": False}
    with last_layer_at(backbone, places):
        output = backbone(input_ids=ids, position_ids=positions, groups=groups, **how)
    return output.last_hidden_state[0, places]


@contextlib.contextmanager
def last_layer_at(backbone, places: torch.Tensor):
    """The last layer's feed-forward part at `places` [n] only: behind it no token reads another."""
    layer = backbone.layers[-1]
    own, whole = vars(layer.mlp), layer.mlp.forward
    kept = dict(own)  # it may have a forward of its own already

    def at_places(hidden: torch.Tensor) -> torch.Tensor:
        asked = whole(hidden.index_select(1, places))  # [1, n, H]
        return torch.zeros_like(hidden).index_copy(1, places, asked)  # [1, N, H]

    if not getattr(layer, "gradient_checkpointing", False):  # that computes the layer again later
        layer.mlp.forward = at_places
    try:
        yield
    finally:
        own.pop("forward", None)
        own.update(kept)


def lengths_of(wanted: torch.Tensor) -> list[int]:
    """[B, T] bool -> how many tokens of each row are read: to the last wanted one, at least 1."""
    columns = torch.arange(1, wanted.shape[1] + 1, device=wanted.device)  # [T]
    return (wanted * columns).amax(1).clamp(min=1).tolist()


def pack(tokens: torch.Tensor, lengths: list[int], slack: int = SLACK) -> tuple:
    """The first lengths[b] tokens of each row of `tokens` [B, L], and up to `slack` more: (ids
    [1, N], their positions [1, N], (rows, length) of each group, where each text begins [B]).
    """
    pieces, positions, groups, starts, count = [], [], [], [0] * len(lengths), 0
    for rows in grouped(lengths, lambda group, row: lengths[group[0]] - lengths[row] <= slack):
        length = lengths[rows[0]]
        pieces.append(tokens[rows, :length].flatten())  # [rows · length]
        positions.append(torch.arange(length, device=tokens.device).repeat(len(rows)))
        groups.append((len(rows), length))
        for row in rows:
            starts[row], count = count, count + length
    ids, positions = torch.cat(pieces)[None], torch.cat(positions)[None]  # [1, N]
    return ids, positions, groups, torch.tensor(starts, device=tokens.device)


def grouped(lengths: list[int], fits: Callable[[list[int], int], bool]) -> list[list[int]]:
    """Row numbers, the longest first, in groups: a row joins the last group or begins another.

    >>> grouped([8, 3, 4, 2], lambda group, row: len(group) < 2)
    [[0, 2], [1, 3]]
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if groups and fits(groups[-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def micro_batches(mask: torch.Tensor, budget: int, processes=1, rank=0) -> list[torch.Tensor]:
    """Process `rank`'s rows of mask [B, T] in micro-batches of at most `budget` padded tokens, rows
    of like length together. Row b belongs to process b % processes.

    All processes have the same number of them: they wait for each other's passes. Whoever has fewer
    halves its largest; half of a single row is no row (`Batch.rows`).
    Worked: 5 rows, each a micro-batch, 2 processes: [0], [2], [4] and [1], [], [3].
    """
    dealt = []
    for process in range(processes):
        lengths = lengths_of(mask[process::processes].cpu().bool())
        most = [budget // length for length in lengths]  # rows as long as this one
        groups = grouped(lengths, lambda group, _, most=most: len(group) < most[group[0]])
        dealt.append([process + processes * torch.tensor(group) for group in groups])
    mine = dealt[rank] or [torch.zeros(0, dtype=torch.long)]
    for _ in range(max(map(len, dealt)) - len(mine)):
        largest = max(range(len(mine)), key=lambda i: len(mine[i]))
        mine[largest : largest + 1] = mine[largest].tensor_split(2)
    return mine


def packed_attention(module, query, key, value, mask, groups=None, **options):
    """query [1, heads, N, D], key and value [1, kv, N, D] -> [1, N, heads, D], text by text."""
    if groups is None:  # `generate` knows of none
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    how = {"scale": options.get("scaling"), "enable_gqa": query.shape[1] != key.shape[1]}
    texts, parts, begin = (query, key, value), [], 0
    for rows, length in groups:
        cut = slice(begin, begin + rows * length)
        # [1, heads, rows · length, D] -> [rows, heads, length, D], a view
        views = (x[0, :, cut].unflatten(1, (rows, length)).transpose(0, 1) for x in texts)
        out = scaled_dot_product_attention(*views, is_causal=True, **how)
        parts.append(out.transpose(1, 2).flatten(0, 1))  # [rows · length, heads, D]
        begin = cut.stop
    return torch.cat(parts)[None], None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", sdpa_mask)


def allow_packing(model) -> None:
    """Give a model this attention, if its family hands `groups` on. For good, not for a call."""
    config = model.config
    plain = config.model_type in FAMILIES and config._attn_implementation == "sdpa"
    if plain and not windowed(config):
        config._attn_implementation = "packed"


def windowed(config) -> str:
    """The kinds of layers that do not see all tokens before; "" if all do."""
    others = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    window = "a sliding window" if getattr(config, "sliding_window", None) else ""
    return ", ".join(sorted(others)) or window
