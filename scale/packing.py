"""Packs texts of unequal length into one forward pass, end to end instead of padded to the longest.
What several texts begin with, such as a prompt, is computed once.

    padded   p p p p a a a x x    packed   p p p p | a a a | x x | y y y | c c c c | d d
             p p p p a a a y y y
             p p p p c c c c . .           a begins at position 4 and attends to p and itself,
             d d . . . . . . . .           x at 7, and attends to p, a and itself
                                           (drawn without SLACK and LEAST)

Only attention mixes tokens; the rest of a transformer treats each token separately, given its
position in its text. The packed tokens are cut into segments, which form a tree: a segment attends
to itself and to the segments above it (p is above a, and a above x and y). Rows (a row is a text)
share a segment if they agree on everything before it and on at least LEAST tokens of it: a prompt,
an instruction, or also a first query and its documents, which trajectories of one prompt often have
in common. All other tokens of a row are a segment of its own. Own segments below the same segment,
whose lengths differ by at most SLACK tokens, form a group, and attention is computed by groups. The
shorter are padded to the longest, so that a group is a view of the packed tensor.

A token that rows share has one hidden state, and its gradient is the sum of theirs. With 8 rows per
prompt of 100 to 200 tokens, an update was 1.3 times as fast as without sharing; with 16 rows per
prompt of 300 tokens, 1.5 times (4M, CPU; docs/results.md).

A place is wanted if the caller needs its last hidden state, for a log-prob or a value. Tokens after
the last wanted token of a text are skipped (up to SLACK of them may be computed).
Left out: models that `obstacle` rejects (their texts are padded and computed whole); leaving
unwanted tokens out of the last layer's feed-forward part.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby, takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

# Maximum of padding tokens per row. Padding gives fewer groups; each group costs a call per layer.
SLACK = 4
LEAST = 64  # tokens of the shortest shared segment; a shorter one saves little for its extra call
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def hidden_states(backbone, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Returns the last hidden states [n, H] at the n places where wanted [B, T] is True. The tokens
    [B, L] are right-padded.
    """
    if backbone.config._attn_implementation != "packed":  # the rows stay padded
        hidden = backbone(input_ids=tokens, use_cache=False).last_hidden_state  # [B, L, H]
        return hidden[:, :-1][wanted]
    width = tokens.shape[1]
    rows = zip(tokens.tolist(), lengths_of(wanted), strict=True)
    groups = segments([tuple(ids[:length]) for ids, length in rows])
    places, index = pack(groups, len(tokens), width)
    places = places.to(tokens.device)  # [N]
    # Trap: without a mask the model builds one of N x N. A mask of 4 dimensions is passed on
    # unchanged; this one is never read.
    options = {"attention_mask": tokens.new_zeros(1, 1, 1, 1), "use_cache": False}
    ids, positions = tokens.flatten()[places][None], (places % width)[None]  # [1, N]
    options["attend"] = partial(packed_attention, groups)
    output = backbone(input_ids=ids, position_ids=positions, **options)
    chosen = index.to(tokens.device)[:, :-1][wanted]  # [n]
    # `embedding`, because it adds up the gradients of a shared token in a fixed order; indexing
    # does not on a CPU.
    return embedding(chosen, output.last_hidden_state[0])


def lengths_of(wanted: Tensor) -> list[int]:
    """Returns for each row of `wanted` [B, T] the number of tokens up to the last wanted one, at
    least 1.
    """
    columns = torch.arange(1, wanted.shape[1] + 1, device=wanted.device)  # [T]
    return (wanted * columns).amax(1).clamp(min=1).tolist()


def beginning(texts: list) -> list[int]:
    """Returns what all these texts (sequences of ids) begin with; [] if there are none.

    >>> beginning([[1, 2, 3], [1, 2], [1, 2, 4]])
    [1, 2]
    """
    pairs = zip(min(texts, default=()), max(texts, default=()), strict=False)
    return [id for id, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


class Group(NamedTuple):
    """Segments of equal length below the same segment: one that all `rows` share, or one of each.
    The tokens of a segment are the columns from `begin` to `end` of its row.
    """

    rows: list[int]
    begin: int
    end: int
    above: tuple[int, ...]  # numbers of the groups that hold what is before `begin`, in order
    shared: bool

    @property
    def count(self) -> int:
        return 1 if self.shared else len(self.rows)

    @property
    def length(self) -> int:
        return self.end - self.begin


def segments(texts: list[tuple]) -> list[Group]:
    """Cuts texts into segments. Own segments of a group are all as long as its longest, so a text
    may get up to SLACK tokens more.

    >>> segments([(7, 8, 9), (7, 8)])  # fewer than LEAST tokens are equal
    [Group(rows=[0, 1], begin=0, end=3, above=(), shared=False)]
    """
    groups: list[Group] = []

    def fits(group: list[int], row: int) -> bool:
        return len(texts[group[0]]) - len(texts[row]) <= SLACK

    def branch(rows: list[int], begin: int, above: tuple[int, ...]) -> None:
        """Cuts what these rows, which are sorted and equal up to `begin`, have from there on."""
        own = []
        for _, alike in groupby(rows, lambda row: texts[row][begin : begin + LEAST]):
            part = list(alike)
            end = len(beginning([texts[row] for row in part]))
            if len(part) > 1 and end - begin >= LEAST:
                groups.append(Group(part, begin, end, above, True))
                branch(part, end, (*above, len(groups) - 1))
            else:
                own += [row for row in part if len(texts[row]) > begin]
        for part in grouped(sorted(own, key=lambda row: -len(texts[row])), fits):
            groups.append(Group(part, begin, len(texts[part[0]]), above, False))

    branch(sorted(range(len(texts)), key=texts.__getitem__), 0, ())
    return groups


def pack(groups: list[Group], rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns the places [N] of the packed tokens, where column t of row b is place b · width + t,
    and an index [rows, width]: which of the N tokens belongs to each column.

    >>> pack(segments([(7, 8, 9), (7, 8)]), 2, 10)[0].tolist()
    [0, 1, 2, 10, 11, 12]
    """
    places: list[Tensor] = []
    index = torch.zeros(rows, width, dtype=torch.long)
    for group in groups:
        first = sum(map(len, places))
        columns = torch.arange(group.begin, group.end)
        places += [width * row + columns for row in group.rows[: group.count]]
        numbers = torch.arange(first, first + group.count * group.length)
        index[group.rows, group.begin : group.end] = numbers.view(group.count, group.length)
    return torch.cat(places), index


def grouped(rows: list[int], fits: Callable) -> list[list[int]]:
    """Splits row numbers into groups: a row with fits(last group, row) == False begins a new one.

    >>> grouped([0, 2, 1, 3], lambda group, row: len(group) < 2)
    [[0, 2], [1, 3]]
    """
    groups: list[list[int]] = []
    for row in rows:
        if groups and fits(groups[-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def micro_batches(tokens: Tensor, mask: Tensor, budget: int, processes=1, rank=0) -> list[Tensor]:
    """Returns the micro-batches of process `rank`, each a tensor of row indices of tokens [B, L]
    and mask [B, T]. Row b belongs to process b % processes. Rows that share a prompt of at
    least LEAST tokens are put together; apart from that, rows are sorted by length. A micro-batch
    takes at most `budget` tokens, which are counted as its number of rows times its longest row; a
    row of more tokens than `budget` is a micro-batch of its own. What rows share is computed only
    once, but counts in each of them.

    All processes get the same number of micro-batches, because they wait for each other's passes:
    if a process has fewer, the rest are empty (`Batch.rows` handles this).
    Worked: 5 rows, each a micro-batch, 2 processes: [0], [2], [4] and [1], [3], [].
    """
    by_process = []
    for process in range(processes):
        wanted = mask[process::processes].bool()
        lengths = lengths_of(wanted)
        fronts = wanted.int().argmax(1).tolist()  # the tokens of each prompt but its last
        pairs = zip(tokens[process::processes].tolist(), fronts, strict=True)
        prompts = [tuple(row[:front]) if front + 1 >= LEAST else () for row, front in pairs]
        count = Counter(prompts)
        keys = [(p if count[p] > 1 else (), -n) for p, n in zip(prompts, lengths, strict=True)]

        def fits(group: list[int], row: int, lengths=lengths) -> bool:
            return (len(group) + 1) * max(lengths[i] for i in [*group, row]) <= budget

        groups = grouped(sorted(range(len(keys)), key=keys.__getitem__), fits)
        by_process.append([process + processes * torch.tensor(group) for group in groups])
    mine, none = by_process[rank], torch.zeros(0, dtype=torch.long)
    return mine + [none] * (max(map(len, by_process)) - len(mine))


def packed_attention(groups: list[Group], module, query, key, value, mask, scaling=None, **_):
    """Maps query [1, heads, N, D], key and value [1, kv, N, D] to [1, N, heads, D], by groups."""
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    sizes = [group.count * group.length for group in groups]
    parts = []
    # Each tensor is split once, because a slice per group would build a gradient of the full size
    # for every group. The cast is needed, because autocast does not act on attention with a
    # `causal_lower_right` mask.
    texts = [x[0].to(value.dtype).split(sizes, 1) for x in (query, key, value)]
    for number, group in enumerate(groups):
        # [heads, count · length, D] -> [count, heads, length, D], a view
        shape = (group.count, group.length)
        q, k, v = (x[number].unflatten(1, shape).transpose(0, 1) for x in texts)
        if not group.above:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        else:
            # Imported here because it loads torch._dynamo, which takes a second.
            from torch.nn.attention.bias import causal_lower_right

            # The keys above [kv, P, D] are put before the own ones [count, kv, length, D].
            k, v = (
                torch.cat([*(x[i].expand(group.count, -1, -1, -1) for i in group.above), own], 2)
                for x, own in zip(texts[1:], (k, v), strict=True)
            )
            # Trap: is_causal lets query i see keys 0 to i, but query i is token `begin` + i.
            seen = causal_lower_right(group.length, group.end)
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, **options)
        parts.append(out.transpose(1, 2).flatten(0, 1))  # [count · length, heads, D]
    return torch.cat(parts)[None], None


def obstacle(model) -> str:
    """Returns the reason why this model's rows can be neither packed nor sampled in slots
    (engines/slots.py), or "" if they can. The model must pass the extra argument `attend` on to its
    attention function (`policy.attention`), each token must attend to all earlier tokens of its
    text, and its rotary position must not depend on other rows.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not one of {', '.join(FAMILIES)}"
    if getattr(config, "sliding_window", None):
        return f"{config.model_type} has layers with a sliding window"
    if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        return "its rotary positions depend on the rest of the batch"
    return ""
