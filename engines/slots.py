"""A decoding engine for one process: rows of different lengths share one key-value cache.

    slot 0  [prompt | sampled | documents | sampl>   ]  decodes
         1  [prompt | sam>                           ]  decodes; live rows fill the first n slots
         2  [prompt | sampled, a query>              ]  waits for its documents
         3  [prompt | ...                            ]  free

    add        a new row copies the keys of what it has in common with the row added before it
    prefill    computes the missing keys of all tokens of a row except the last, in forward passes
               over many tokens
    decode     last tokens [n, 1] -> logits [n, V] -> one token per row, until some turn is over

In this file "keys" are keys and values, except where both are named.
HF `generate` pads, waits for the slowest row, and computes every row again at each turn. Here each
row has its own length: token i has position i, is stored at place i of its slot and attends to the
places j <= i. Nothing has to be erased when a slot gets a new row: keys of the old row beyond the
new row's end are masked, and are overwritten as the new row grows. A causal LM needs no change,
because its forward takes position ids, a 4D mask and a `Cache`. Left out: paging (each slot is as
long as the longest row may become), models that `obstacle` (scale/packing.py) rejects.
"""

import contextlib
import math
import mmap
from collections import deque
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, TopPLogitsWarper

from errors import rank_of, say_once
from policy import evaluating, head_logits, in_bf16
from rollout import Environment, Progress, StopRule, Turn, generate_by_turns
from scale.packing import beginning, obstacle
from trajectory import Trajectory

# (block, chunk): a pass reads a multiple of `block` places per slot. To limit memory, a prefill
# pass computes at most `chunk` tokens.
ON_CPU = (16, 2048)
ON_GPU = (64, 4096)
LARGE, THIN = 2**16, 256  # `thin_products`: weights of the smallest matrix, rows at most
SHARE = 0.8  # share of the free memory that the slots may take


# ---------------------------------------------------------------------------------------- the cache
class SlotCache(Cache):
    """Keys and values, [2, slots, kv, size, D] per layer. Keys and values share a tensor, so that a
    copy of a slot is one operation per layer. One tensor for all layers would take still fewer. But
    on a GPU torch reuses that tensor's memory between rollouts, and a single small tensor placed
    there, such as an Adam moment, would keep all of it from being freed.
    """

    write: tuple  # (slots [n, 1], positions [n, C]) of new keys; set before each forward pass
    read: slice | Tensor  # the same slots; a slice reads a view, an index tensor a copy
    width: int  # number of places that are read of each slot

    def __init__(self, slots: int, size: int):
        super().__init__(layers=[])  # HF's layers would store the keys; here `update` does
        self.slots = slots
        self.size = size
        self.stored: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_, **__):
        """Stores a layer's new keys and values [n, kv, C, D] and returns all that the layer attends
        to, [n, kv, width, D].
        """
        if layer_idx == len(self.stored):
            self.stored.append(self.allocate(values))
        stored_keys, stored_values = self.stored[layer_idx]
        return self.put(stored_keys, keys), self.put(stored_values, values)

    def put(self, stored: Tensor, new: Tensor) -> Tensor:
        slots, positions = self.write
        stored[slots, :, positions] = new.transpose(1, 2).to(stored.dtype)
        return stored[self.read, :, : self.width]  # [n, kv, width, D]

    def allocate(self, like: Tensor) -> Tensor:
        """Returns zeros. Uninitialised memory may hold NaN, and a masked place with NaN would spoil
        the attention, because weight 0 times NaN is NaN.
        """
        # Under autocast values are in bf16, but rotary keys in fp32. If they were stored in fp32,
        # attention would round all of them at every step.
        dtype = like.dtype
        shape = (2, self.slots, like.shape[1], self.size, like.shape[3])
        if like.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=like.device)
        # New pages hold zeros and take no memory until they are written. Because most rows end
        # early, a large part of the memory is never taken. MAP_PRIVATE: a page of a shared mapping
        # would take memory even if it were only read.
        return torch.frombuffer(
            mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE), dtype=dtype
        ).view(shape)

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the first `length` places of slots, each to its own target. copy([a, b], [b, a],
        length) swaps two slots, because both are read before either is written.
        """
        if length:  # else each layer would build index tensors for nothing
            for stored in self.stored:
                stored[:, targets, :, :length] = stored[:, sources, :, :length]


def attend_to_slots(module, query, keys, values, mask, scaling=None, **_):
    """query [n, heads, C, D], keys and values [n, kv, width, D], mask [n, 1, C, width] ->
    [n, C, heads, D]. Keys are not repeated for grouped-query attention. In decoding (C = 1), the
    queries that share a key head become rows of one matrix, for which one mask row is enough. In a
    prefill pass they are computed one after the other, because a mask for all of them (7 in
    Qwen2.5-7B) would be 7 times as large.
    """
    by_key = query.unflatten(1, (keys.shape[1], -1))  # [n, kv, group, C, D]
    parts = by_key.unbind(2) if query.shape[2] > 1 else [by_key.flatten(2, 3)]
    out = [scaled_dot_product_attention(x, keys, values, mask, scale=scaling) for x in parts]
    return torch.stack(out, 2).reshape(query.shape).transpose(1, 2).contiguous(), None


# --------------------------------------------------------------------------------- matrix products
@contextlib.contextmanager
def thin_products(model):
    """Makes the linear layers of an fp32 model compute W xᵀ instead of x Wᵀ in the `with` block.
    For a few rows x, MKL is up to twice as fast then: 37 ms instead of 80 for all layers of a model
    of 135M and 4 rows, 80 instead of 107 for 32. Above THIN rows there is no difference.
    """
    modules = [] if in_bf16(model.device) else model.modules()
    layers = [m for m in modules if type(m) is nn.Linear and m.weight.numel() >= LARGE]
    for layer in layers:
        layer.forward = partial(thin_product, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's method is seen again


def thin_product(layer: nn.Linear, x: Tensor) -> Tensor:
    if x.shape[:-1].numel() > THIN:
        return nn.Linear.forward(layer, x)
    product = torch.mm(layer.weight, x.flatten(0, -2).t()).t().contiguous()  # [rows, out]
    if layer.bias is not None:
        product += layer.bias
    return product.view(*x.shape[:-1], -1)


# --------------------------------------------------------------------------------------- the engine
@dataclass(eq=False)
class Row:
    """A text that grows in a slot. The keys of its first `cached` tokens are in the cache."""

    owner: object
    ids: list[int]
    turn: Turn
    cached: int = 0
    state: str = "live"  # "live": decodes; "waiting": its turn is over; "free": may be replaced


class Engine:
    """Decodes rows in slots: the caller adds rows while slots are free, calls `decode`, and resumes
    or frees each row whose turn is over.
    """

    def __init__(self, model, slots: int, size: int, rule: StopRule, temperature=1.0, top_p=1.0):
        self.model = model
        self.device = model.device
        self.rule = rule
        self.temperature = temperature
        self.top_p = top_p
        self.block, self.chunk = ON_CPU if self.device.type == "cpu" else ON_GPU
        size = -(-size // self.block) * self.block  # GPU kernels need an aligned mask width
        self.cache = SlotCache(slots, size)
        self.rows = [Row(None, [], Turn(0), state="free") for _ in range(slots)]  # row i: slot i
        self.last = self.rows[0]  # the row that was added last
        self.slot_ids = torch.arange(slots, device=self.device)
        self.places = torch.arange(size, device=self.device)

    def in_state(self, state: str) -> list[Row]:
        return [row for row in self.rows if row.state == state]

    def add(self, owner, ids: list[int], max_new_tokens: int) -> None:
        """Puts a new row into a free slot and fills in the keys of its prompt. Those of its
        beginning are copied from the row that was added before it, which usually has the same
        prompt, or at least the same instruction. That row still has its keys, because only adding a
        row overwrites another.
        """
        row = Row(owner, list(ids), Turn(max_new_tokens))
        donor, self.last = self.last, row
        row.cached = len(beginning([donor.ids[: donor.cached], row.ids[:-1]]))
        slot = next(slot for slot, old in enumerate(self.rows) if old.state == "free")
        self.cache.copy([self.rows.index(donor)], [slot], row.cached)
        self.rows[slot] = row
        self.prefill()

    def resume(self, row: Row, ids: list[int], max_new_tokens: int) -> None:
        """Begins the next turn of a waiting row. `ids` are all tokens of the row, which now end in
        documents or a notice.
        """
        row.ids = list(ids)
        row.turn = Turn(max_new_tokens)
        row.state = "live"

    def prefill(self) -> None:
        """Computes, for each live row, the keys of all its tokens but the last; that one's keys are
        computed by the decoding step that reads it. A pass skips the output head. It takes as many
        tokens of each row as the row that lacks the fewest, so that none is padded.
        """
        while rows := [row for row in self.in_state("live") if row.cached < len(row.ids) - 1]:
            rows = rows[: self.chunk]
            least = min(len(row.ids) - 1 - row.cached for row in rows)
            slots = torch.tensor([self.rows.index(row) for row in rows], device=self.device)  # [n]
            self.hidden(rows, min(least, self.chunk // len(rows)), slots)

    def decode(self) -> list[Row]:
        """Samples for all live rows until at least one turn is over. Returns the rows whose turn is
        over; their state is now "waiting".
        """
        self.prefill()  # of documents
        count = len(self.in_state("live"))
        self.arrange(count)
        finished = []
        while count and not finished:
            finished = self.step(self.rows[:count])
        return finished

    def arrange(self, count: int) -> None:
        """Moves the live rows into the first `count` slots, so that a decoding step can read them
        as one slice of the cache, without a copy.
        """
        live = [row.state == "live" for row in self.rows]
        places = [slot for slot in range(count) if not live[slot]]
        strays = [slot for slot in range(count, len(live)) if live[slot]]
        sources, targets = strays + places, places + strays
        rows = [self.rows[slot] for slot in sources]
        self.cache.copy(sources, targets, max((row.cached for row in rows), default=0))
        for slot, row in zip(targets, rows, strict=True):
            self.rows[slot] = row

    def step(self, rows: list[Row]) -> list[Row]:
        """Samples a token for each of these rows, which fill the first slots. Returns the rows
        whose turn is over.
        """
        tokens, logprobs = self.draw(self.logits(rows))  # [n, 1] each
        for row, ids, values in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            turn = row.turn
            row.ids += ids
            turn.ids += ids
            turn.logprobs += values
            turn.reason = self.rule.reason(turn.ids, turn.max_new_tokens)
            row.state = "waiting" if turn.reason else "live"
        return [row for row in rows if row.state == "waiting"]

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Samples from logits [n, V]: returns a token for each row and its log-prob, [n, 1] each.
        The log-prob is taken after the temperature and before top_p.
        """
        scores = logits.float() / (self.temperature or 1.0)
        if not self.temperature:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            nucleus = TopPLogitsWarper(self.top_p)(None, scores) if self.top_p < 1 else scores
            tokens = pick(nucleus.softmax(-1))
        return tokens, scores.gather(1, tokens) - scores.logsumexp(-1, keepdim=True)

    def logits(self, rows: list[Row]) -> Tensor:
        """Returns the logits [n, V] after the last token of each of the rows in the first slots."""
        hidden = self.hidden(rows, 1, slice(len(rows)))  # [n, 1, H]
        return head_logits(self.model.get_output_embeddings(), hidden[:, -1])

    def hidden(self, rows: list[Row], count: int, slots: slice | Tensor) -> Tensor:
        """Computes the keys of the next `count` = C tokens of the rows in `slots`. Returns their
        last hidden states [n, C, H].
        """
        chunks = [row.ids[row.cached : row.cached + count] for row in rows]
        starts = torch.tensor([[row.cached] for row in rows], device=self.device)  # [n, 1]
        positions = starts + self.places[:count]  # [n, C]
        for row in rows:
            row.cached += count
        width = max(row.cached for row in rows)
        cache = self.cache
        cache.write = (self.slot_ids[slots][:, None], positions)
        cache.read = slots
        cache.width = -(-width // self.block) * self.block
        future = self.places[: cache.width] > positions[..., None]  # [n, C, width]
        # A float mask, added to the scores: a boolean mask would be converted in every layer.
        mask = torch.where(future, -torch.inf, 0.0).to(self.model.dtype)[
            :, None
        ]  # [n, 1, C, width]
        output = self.model.base_model(
            input_ids=torch.tensor(chunks, device=self.device),  # [n, C]
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            attend=attend_to_slots,
        )
        return output.last_hidden_state


def pick(probabilities: Tensor) -> Tensor:
    """Draws an index for each row of `probabilities` [n, V]; returns the indices [n, 1]. On a CPU,
    a row's index is the first whose cumulative probability exceeds a uniform random number.
    """
    if probabilities.device.type != "cpu":  # CUDA's cumsum is not deterministic; MPS has no float64
        return torch.multinomial(probabilities, 1)
    # On a CPU these lines are 2 to 10 times faster than multinomial. In fp32, small probabilities
    # would be lost when they are added to a large sum.
    sums = probabilities.cumsum(-1, dtype=torch.float64)  # [n, V]
    points = torch.rand(len(sums), 1, dtype=torch.float64) * sums[:, -1:]
    indices = torch.searchsorted(sums, points, right=True)  # right=True: no index with p = 0
    return indices.clamp(max=sums.shape[1] - 1)


# -------------------------------------------------------------------------------------- the rollout
def generate_in_slots(
    policy, environment: Environment, live: list[Trajectory], progress: Progress
) -> None:
    """Samples the trajectories in slots. If the model cannot be run in slots, warns once and calls
    `rollout.generate_by_turns`, which does the same more slowly.
    """
    model = policy.language_model
    settings = environment.settings
    if problem := obstacle(model):
        say_once(f'warning: engine "{settings.engine}": {problem}; plain generate is used instead')
        generate_by_turns(policy, environment, live, progress)
    elif live:
        size = max(environment.max_trajectory_tokens(t) for t in live)
        slots = min(settings.max_num_seqs or len(live), len(live), affordable(model, size))
        rule = environment.stop_rule(policy)
        # For all steps: weights are cast once.
        with evaluating(model), policy.autocast(), thin_products(model):
            engine = Engine(model, slots, size, rule, settings.temperature, settings.top_p)
            generate_queue(engine, environment, deque(live), progress)


def generate_queue(
    engine: Engine, environment: Environment, queue: deque, progress: Progress
) -> None:
    """Runs all queued trajectories; when one ends, the next gets its slot. Searches are delayed
    until at least half of the unfinished rows wait for one, so that they run in large batches.
    """
    while queue or len(engine.in_state("free")) < len(engine.rows):
        for _ in engine.in_state("free")[: len(queue)]:
            trajectory = queue.popleft()
            engine.add(trajectory, trajectory.ids, environment.turn_tokens_left(trajectory))
        for row in engine.decode():
            turn = row.turn
            environment.end_turn(row.owner, turn.ids, turn.logprobs, turn.reason)
        asking = [row for row in engine.in_state("waiting") if not row.owner.stop_reason]
        if len(asking) >= len(engine.in_state("live")):
            environment.run_searches([row.owner for row in asking])
            for row in asking:
                if not row.owner.stop_reason:
                    engine.resume(row, row.owner.ids, environment.turn_tokens_left(row.owner))
        ended = [row for row in engine.in_state("waiting") if row.owner.stop_reason]
        for row in ended:
            row.state = "free"
        progress(len(ended))


def affordable(model, size: int) -> int:
    """Returns how many slots of `size` places, each with its row's logits, fit in the share SHARE
    of the free memory; at least 1.
    """
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # frees memory that torch has cached
        free = torch.cuda.mem_get_info(model.device)[0]
    else:  # a container may allow less memory; then set --max_num_seqs
        free = psutil.virtual_memory().available / rank_of("LOCAL_WORLD_SIZE", 1)
    config = model.config
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Bytes of the keys and values of one token in all layers. Each logit of a row counts 16 bytes,
    # copies that sampling makes included.
    place = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    return max(1, int(SHARE * free / (place * (size + 64) + 16 * config.vocab_size)))
