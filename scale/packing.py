"""Texts of unequal length in one forward pass, one behind the other and not padded to the longest.
A prompt of several of them is computed once.

    padded   p p p p a a a a a    packed   p p p p | a a a a a | b b b | c c c c | d d
             p p p p b b b . .
             c c c c . . . . .             a and b attend to p and to themselves, from position 4 on
             d d . . . . . . .

All of a transformer but attention treats each token by itself, given its position in its own text.
Attention goes group by group: the rows of a group stand behind the same prompt, or none, and are
equally long to within SLACK tokens, so that a group is a view of the packed tensor.

A prompt is what a row has up to its first wanted place. It is shared by the rows that have the very
same ids there, LEAST at least, whatever group they are of; its last token, where each row chooses
its first, stays with the row. An update of 8 rows to a prompt of 100 to 200 tokens was 1.3 times as
fast as of whole rows, of 16 rows to 300 tokens 1.5 times (`python -m lab.bench update`, 4M, CPU).

Also not computed: what stands behind the last wanted token of a text, and the last layer's
feed-forward part of tokens that are not wanted. Left out: other families and layers with a sliding
window, whose texts are whole and padded; what responses have in common.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

SLACK = 4  # tokens of padding per row: fewer groups, each of which costs a call per layer
LEAST = 64  # tokens of a prompt that is shared: a shorter one saves little, and costs a call more
FAMILIES = ("llama", "qwen2", "qwen3")


def hidden_states(backbone, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """tokens [B, L], right-padded; n wanted [B, T] bool -> their last hidden states [n, H]."""
    columns = torch.arange(wanted.shape[1], device=tokens.device)  # [T]
    if backbone.config._attn_implementation != "packed":  # padded
        hidden = backbone(input_ids=tokens, use_cache=False).last_hidden_state  # [B, L, H]
        return hidden[:, : len(columns)][wanted]
    ids, positions, groups, starts = pack(tokens, lengths_of(wanted), prompts_of(tokens, wanted))
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


def prompts_of(tokens: torch.Tensor, wanted: torch.Tensor) -> list[tuple[int, ...]]:
    """tokens [B, L], wanted [B, T] -> of each row the ids in front of its first wanted place, or ()
    if no other row has them, or they are no prompt of LEAST tokens with the one at that place.
    """
    fronts = wanted.int().argmax(1).tolist()  # 0 of a row that wants none
    rows = zip(tokens.tolist(), fronts, strict=True)
    texts = [tuple(ids[:front]) if front + 1 >= LEAST else () for ids, front in rows]
    count = Counter(texts)
    return [text if count[text] > 1 else () for text in texts]


def pack(tokens: torch.Tensor, lengths: list[int], prompts: list[tuple], slack=SLACK) -> tuple:
    """The first lengths[b] tokens of each row of `tokens` [B, L], and up to `slack` more, a prompt
    (`prompts_of`) once: (ids [1, N], their positions [1, N], groups, where each text begins [B], or
    would if it had its prompt). A group: (rows, length, the number of their prompt's group or None)
    """
    pieces, positions, groups, starts, count = [], [], [], [0] * len(lengths), 0
    own: dict[tuple, int] = {}  # prompt -> the number of its group

    def add(rows: list[int], begin: int, end: int, prompt: int | None) -> None:
        pieces.append(tokens[rows, begin:end].flatten())  # [rows · (end − begin)]
        positions.append(torch.arange(begin, end, device=tokens.device).repeat(len(rows)))
        groups.append((len(rows), end - begin, prompt))

    def fits(group: list[int], row: int) -> bool:
        same = prompts[group[0]] == prompts[row]
        return same and lengths[group[0]] - lengths[row] <= slack

    for rows in grouped(lengths, fits, prompts):
        prompt, end = prompts[rows[0]], lengths[rows[0]]
        begin = len(prompt)
        if prompt and prompt not in own:
            own[prompt], count = len(groups), count + begin
            add(rows[:1], 0, begin, None)
        add(rows, begin, end, own.get(prompt))
        for row in rows:
            starts[row], count = count - begin, count + end - begin
    ids, positions = torch.cat(pieces)[None], torch.cat(positions)[None]  # [1, N]
    return ids, positions, groups, torch.tensor(starts, device=tokens.device)


def grouped(
    lengths: list[int], fits: Callable[[list[int], int], bool], prompts: Sequence = ()
) -> list[list[int]]:
    """Row numbers, the longest first, prompt by prompt if there are any, in groups: a row joins the
    last group or begins another.

    >>> grouped([8, 3, 4, 2], lambda group, row: len(group) < 2)
    [[0, 2], [1, 3]]
    """
    groups: list[list[int]] = []
    prompts = prompts or [()] * len(lengths)
    for row in sorted(range(len(lengths)), key=lambda row: (prompts[row], -lengths[row])):
        if groups and fits(groups[-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def micro_batches(
    mask: torch.Tensor, budget: int, processes=1, rank=0, tokens: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Process `rank`'s rows of mask [B, T] in micro-batches of at most `budget` padded tokens, rows
    of like length together. Row b belongs to process b % processes. With tokens [B, L] rows of one
    prompt stand together instead: padded as before, a micro-batch holds fewer tokens to compute.

    All processes have the same number of them: they wait for each other's passes. Whoever has fewer
    halves its largest; half of a single row is no row (`Batch.rows`).
    Worked: 5 rows, each a micro-batch, 2 processes: [0], [2], [4] and [1], [], [3].
    """
    dealt = []
    for process in range(processes):
        own = mask[process::processes].cpu().bool()
        lengths = lengths_of(own)
        prompts = [] if tokens is None else prompts_of(tokens[process::processes], own)

        def fits(group: list[int], row: int, lengths=lengths) -> bool:
            return (len(group) + 1) * max(lengths[i] for i in [*group, row]) <= budget

        groups = grouped(lengths, fits, prompts)
        dealt.append([process + processes * torch.tensor(group) for group in groups])
    mine = dealt[rank] or [torch.zeros(0, dtype=torch.long)]
    for _ in range(max(map(len, dealt)) - len(mine)):
        largest = max(range(len(mine)), key=lambda i: len(mine[i]))
        mine[largest : largest + 1] = mine[largest].tensor_split(2)
    return mine


def packed_attention(query, key, value, groups: list[tuple], scaling: float | None = None):
    """query [1, heads, N, D], key and value [1, kv, N, D] -> [1, N, heads, D], text by text."""
    how = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    sizes, parts = [rows * length for rows, length, _ in groups], []
    # One split of each: its gradient is put together once, and not once for each of its slices.
    # As autocast would cast them; the kernel behind a mask aligned at the end is not asked by it.
    texts = [x[0].to(value.dtype).split(sizes, 1) for x in (query, key, value)]
    for number, (rows, length, prompt) in enumerate(groups):
        # [heads, rows · length, D] -> [rows, heads, length, D], a view
        q, k, v = (x[number].unflatten(1, (rows, length)).transpose(0, 1) for x in texts)
        if prompt is None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, **how)
        else:
            # Here, since it loads torch._dynamo: a second of each start, of which few need it.
            from torch.nn.attention.bias import causal_lower_right

            # Trap: is_causal lets query i see keys 0 to i, whatever number of keys there is.
            front = groups[prompt][1]
            shared = (x[prompt].expand(rows, -1, -1, -1) for x in texts[1:])  # [rows, kv, P, D]
            # [rows, kv, P + length, D]
            k, v = (torch.cat(pair, 2) for pair in zip(shared, (k, v), strict=True))
            seen = causal_lower_right(length, front + length)
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, **how)
        parts.append(out.transpose(1, 2).flatten(0, 1))  # [rows · length, heads, D]
    return torch.cat(parts)[None]


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
