"""Packs texts of unequal length into one forward pass, end to end instead of padded to the longest.
A prompt that several texts share is computed once.

    padded   p p p p a a a a a    packed   p p p p | a a a a a | b b b | c c c c | d d
             p p p p b b b . .
             c c c c . . . . .             a and b begin at position 4, attend to p and themselves
             d d . . . . . . .             (drawn without SLACK and LEAST)

Only attention mixes tokens; the rest of a transformer treats each token separately, given its
position in its text. Attention is computed by groups of rows (a row is a text). All rows of a group
have the same shared prompt, or all have none, and their lengths differ by at most SLACK tokens. The
shorter rows are padded to the longest, so that a group is a view of the packed tensor.

A place is wanted if the caller needs its last hidden state, for a log-prob or a value. A row's
prompt ends at its first wanted place. All tokens of a prompt but the last are shared if the prompt
has at least LEAST tokens, and if another row (of any group) has exactly the same ids before this
place. Prompts that are not repeated share their common beginning, such as the instruction. The last
token predicts the first token of the response, so every row keeps its own. With 8 rows per prompt
of 100 to 200 tokens, an update was 1.3 times as fast as without sharing; with 16 rows per prompt of
300 tokens, 1.5 times (4M, CPU; docs/results.md).

Tokens after the last wanted token of a text are skipped too (up to SLACK of them may be computed).
Left out: models that `obstacle` rejects (their texts are padded and computed whole); sharing equal
text in responses; leaving unwanted tokens out of the last layer's feed-forward part.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import takewhile

import torch
from torch.nn.functional import scaled_dot_product_attention

# Maximum of padding tokens per row. Padding gives fewer groups; each group costs a call per layer.
SLACK = 4
LEAST = 64  # tokens of the shortest shared prompt; a shorter one saves little for its extra call
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def hidden_states(backbone, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns the last hidden states [n, H] at the n places where wanted [B, T] is True. The tokens
    [B, L] are right-padded.
    """
    if backbone.config._attn_implementation != "packed":  # the rows stay padded
        hidden = backbone(input_ids=tokens, use_cache=False).last_hidden_state  # [B, L, H]
        return hidden[:, :-1][wanted]
    width = tokens.shape[1]
    places, groups = pack(width, lengths_of(wanted), prompts_of(tokens, wanted))
    places = places.to(tokens.device)  # [N]
    # Trap: without a mask the model builds one of N x N. A mask of 4 dimensions is passed on
    # unchanged; this one is never read.
    options = {"attention_mask": tokens.new_zeros(1, 1, 1, 1), "use_cache": False}
    ids, positions = tokens.flatten()[places][None], (places % width)[None]  # [1, N]
    options["attend"] = partial(packed_attention, groups)
    output = backbone(input_ids=ids, position_ids=positions, **options)
    packed = torch.zeros_like(tokens.flatten())  # [B · L]  place in the rows -> place among the N
    packed[places] = torch.arange(len(places), device=tokens.device)
    return output.last_hidden_state[0, packed.view_as(tokens)[:, :-1][wanted]]


def lengths_of(wanted: torch.Tensor) -> list[int]:
    """Returns for each row of `wanted` [B, T] the number of tokens up to the last wanted one, at
    least 1.
    """
    columns = torch.arange(1, wanted.shape[1] + 1, device=wanted.device)  # [T]
    return (wanted * columns).amax(1).clamp(min=1).tolist()


def prompts_of(tokens: torch.Tensor, wanted: torch.Tensor) -> list[tuple[int, ...]]:
    """Returns for each row of tokens [B, L] the part of its prompt that it shares with other rows:
    all ids of the prompt but the last. Rows whose prompt no other row has share what all these
    prompts begin with (the instruction). A part of fewer than LEAST tokens is not shared: it is ().
    A prompt ends at the first True of its row in `wanted` [B, T]. Its last token is not shared,
    because each row needs its hidden state there.
    """
    fronts = wanted.int().argmax(1).tolist()  # 0 for a row without wanted places
    rows = zip(tokens.tolist(), fronts, strict=True)
    texts = [tuple(ids[:front]) if front + 1 >= LEAST else () for ids, front in rows]
    count = Counter(texts)
    alone = [text for text in texts if text and count[text] == 1]
    begin = tuple(beginning(alone))
    begin = begin if len(alone) > 1 and len(begin) >= LEAST else ()
    return [text if not text or count[text] > 1 else begin for text in texts]


def beginning(texts: list) -> list[int]:
    """Returns what all these texts (sequences of ids) begin with; [] if there are none.

    >>> beginning([[1, 2, 3], [1, 2], [1, 2, 4]])
    [1, 2]
    """
    pairs = zip(min(texts, default=()), max(texts, default=()), strict=False)
    return [id for id, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def pack(width: int, lengths: list[int], prompts: list[tuple]) -> tuple:
    """Packs the first lengths[b] tokens of each row b, but each shared prompt (`prompts_of`) only
    once. Returns the places [N] of the packed tokens, where column t of row b is place
    b · width + t, and the groups. A group is (number of rows, tokens that each row has in this
    group, number of the group that holds their shared prompt, or None). The rows of a group are all
    as long as its longest, so a row may get up to SLACK tokens more. A shared prompt is a group of
    one row.

    >>> places, groups = pack(10, [3, 2], [(), ()])
    >>> places.tolist(), groups  # two rows of three tokens, the last of which is padding
    ([0, 1, 2, 10, 11, 12], [(2, 3, None)])
    """
    places, groups = [], []
    group_of: dict[tuple, int] = {}  # prompt -> the number of its group

    def add(rows: list[int], begin: int, end: int, prompt: int | None) -> None:
        columns = torch.arange(begin, end)
        places.extend(width * row + columns for row in rows)
        groups.append((len(rows), end - begin, prompt))

    def fits(group: list[int], row: int) -> bool:
        same = prompts[group[0]] == prompts[row]
        return same and lengths[group[0]] - lengths[row] <= SLACK

    for rows in grouped(lengths, prompts, fits):
        prompt = prompts[rows[0]]
        if prompt and prompt not in group_of:
            group_of[prompt] = len(groups)
            add(rows[:1], 0, len(prompt), None)
        add(rows, len(prompt), lengths[rows[0]], group_of.get(prompt))
    return torch.cat(places), groups


def grouped(lengths: list[int], prompts: list[tuple], fits: Callable) -> list[list[int]]:
    """Sorts row numbers by prompt, then from long to short, and splits them into groups: a row with
    fits(last group, row) == False begins a new one.

    >>> grouped([8, 3, 4, 2], [()] * 4, lambda group, row: len(group) < 2)
    [[0, 2], [1, 3]]
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (prompts[row], -lengths[row])):
        if groups and fits(groups[-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def micro_batches(
    tokens: torch.Tensor, mask: torch.Tensor, budget: int, processes=1, rank=0
) -> list[torch.Tensor]:
    """Returns the micro-batches of process `rank`, each a tensor of row indices of tokens [B, L]
    and mask [B, T]. Row b belongs to process b % processes. Rows are sorted by their shared prompt,
    then by length. A micro-batch takes at most `budget` tokens, which are counted as its number of
    rows times its longest row; a row of more tokens than `budget` is a micro-batch of its own. A
    prompt that rows share is computed only once, but it still counts in each of its rows.

    All processes get the same number of micro-batches, because they wait for each other's passes:
    if a process has fewer, the rest are empty (`Batch.rows` handles this).
    Worked: 5 rows, each a micro-batch, 2 processes: [0], [2], [4] and [1], [3], [].
    """
    by_process = []
    for process in range(processes):
        wanted = mask[process::processes].bool()
        lengths = lengths_of(wanted)

        def fits(group: list[int], row: int, lengths=lengths) -> bool:
            return (len(group) + 1) * max(lengths[i] for i in [*group, row]) <= budget

        groups = grouped(lengths, prompts_of(tokens[process::processes], wanted), fits)
        by_process.append([process + processes * torch.tensor(group) for group in groups])
    mine, none = by_process[rank], torch.zeros(0, dtype=torch.long)
    return mine + [none] * (max(map(len, by_process)) - len(mine))


def packed_attention(groups: list[tuple], module, query, key, value, mask, scaling=None, **_):
    """Maps query [1, heads, N, D], key and value [1, kv, N, D] to [1, N, heads, D], by groups."""
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    sizes = [rows * length for rows, length, _ in groups]
    parts = []
    # Each tensor is split once, because a slice per group would build a gradient of the full size
    # for every group. The cast is needed, because autocast does not act on attention with a
    # `causal_lower_right` mask.
    texts = [x[0].to(value.dtype).split(sizes, 1) for x in (query, key, value)]
    for number, (rows, length, prompt) in enumerate(groups):
        # [heads, rows · length, D] -> [rows, heads, length, D], a view
        q, k, v = (x[number].unflatten(1, (rows, length)).transpose(0, 1) for x in texts)
        if prompt is None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        else:
            # Imported here because it loads torch._dynamo, which takes a second.
            from torch.nn.attention.bias import causal_lower_right

            # Trap: is_causal lets query i see keys 0 to i, but query i is token P + i of its text
            # (P: the length of the shared prompt).
            front = groups[prompt][1]
            shared = (x[prompt].expand(rows, -1, -1, -1) for x in texts[1:])  # [rows, kv, P, D]
            # [rows, kv, P + length, D]
            k, v = (torch.cat(pair, 2) for pair in zip(shared, (k, v), strict=True))
            seen = causal_lower_right(length, front + length)
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, **options)
        parts.append(out.transpose(1, 2).flatten(0, 1))  # [rows · length, heads, D]
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
