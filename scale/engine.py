"""Rows at different places of one key-value cache: the fast twin of the loop's `generate`.

    slot 0  [prompt | sampled | documents | sampl>   ]  decodes
         1  [prompt | sam>                           ]  decodes: live rows fill the first n slots
         2  [prompt | sampled, a query>              ]  waits for its documents
         3  [prompt | ...                            ]  free: its prompt still serves its group

    catch up   the keys of all tokens of a row but the last: copied from a slot that holds them, or
               computed in one forward pass
    decode     last tokens [n, 1] -> logits [n, V] -> one token per row, until a turn may be over

HF `generate` pads, waits for the slowest row, and computes every row again at each turn. Here each
row has its own length: token i has position i, stands at place i of its slot and sees the places
j <= i. So nothing is erased: what an earlier row left behind a row's end is masked, and overwritten
when the row gets there. A causal LM needs no change: its forward takes position ids, a 4D mask and
a `Cache`. Left out: paging (a slot is as long as the longest row may become), sliding windows.
"""

import contextlib
import functools
import math
import mmap
import sys
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import psutil
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, TopPLogitsWarper

from policy import evaluating, unrounded_logits
from rollout import Environment, StopRule, Turn, end_ids, generate_by_turns
from scale.packing import FAMILIES, windowed
from trajectory import Trajectory

BLOCK = {"cpu": 16, "cuda": 64}  # the width that a step reads is a multiple of this
CHUNK = {"cpu": 256, "cuda": 4096}  # padded tokens of one catching-up forward: bounds its memory
SHARE = 0.8  # of the free memory may go to slots


# ---------------------------------------------------------------------------------------- the cache
class SlotCache(Cache):
    """Keys and values, [slots, size + 1, heads, D] per layer; the last place takes padding."""

    write: tuple  # (slots [n, 1], positions [n, C]) of new keys; set before each forward pass
    read: slice | torch.Tensor  # the same slots; a slice gives a view where an index would copy
    width: int  # how many of their places are read

    def __init__(self, slots: int, size: int):
        super().__init__(layers=[])  # only the type of the base class is used
        self.slots, self.size = slots, size
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_, **__):
        """A layer's new keys and values [n, heads, C, D] -> what it reads, [n, heads, width, D]."""
        if layer_idx == len(self.keys):
            self.keys.append(self.allocate(keys))
            self.values.append(self.allocate(values))
        return self.put(self.keys[layer_idx], keys), self.put(self.values[layer_idx], values)

    def put(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        held[self.write] = new.transpose(1, 2).to(held.dtype)
        return held[self.read, : self.width].transpose(1, 2)  # [n, heads, width, D]

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros: weight 0 of a masked place times NaN is NaN."""
        kind, dtype = like.device.type, like.dtype
        if torch.is_autocast_enabled(kind):
            # Rotated keys are fp32 here, and attention would round all of them at every step.
            dtype = torch.get_autocast_dtype(kind)
        shape = (self.slots, self.size + 1, like.shape[1], like.shape[3])
        if kind != "cpu":
            return torch.zeros(shape, dtype=dtype, device=like.device)
        # Fresh pages are zero and take no memory until they are written: most rows end early.
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        with contextlib.suppress(AttributeError, OSError):  # not every system knows it
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # a page of 2 MB would span several slots
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def copy(self, source: int | list[int], target: int | list[int], length: int) -> None:
        """([a, b], [b, a], length) swaps two slots: what lists name is read whole, then written."""
        for held in self.keys + self.values:
            held[target, :length] = held[source, :length]


def grouped_attention(module, query, keys, values, mask, scaling=None, **_):
    """query [n, heads, C, D], keys and values [n, kv, width, D], mask [n, 1, C, width] ->
    [n, C, heads, D]. No key is repeated: queries that share a key head become rows of one matrix,
    or, where they are many, they take turns and share the mask, too.
    """
    n, _, chunk, _ = query.shape
    by_key = query.unflatten(1, (keys.shape[1], -1))  # [n, kv, group, C, D]
    if chunk > 1 and n * chunk > CHUNK["cpu"]:  # on a GPU: at 7B seven masks would be 1.1 GiB
        parts = by_key.unbind(2)
    else:
        parts = [by_key.flatten(2, 3)]  # [n, kv, group · C, D]
        mask = mask if chunk == 1 else mask.repeat(1, 1, by_key.shape[2], 1)
    out = [scaled_dot_product_attention(x, keys, values, mask, scale=scaling) for x in parts]
    return torch.stack(out, 2).reshape(query.shape).transpose(1, 2).contiguous(), None


AttentionInterface.register("slots", grouped_attention)


@contextlib.contextmanager
def attending_to_slots(model):
    kept = model.config._attn_implementation
    model.config._attn_implementation = "slots"
    try:
        yield
    finally:
        model.config._attn_implementation = kept


# --------------------------------------------------------------------------------------- the engine
@dataclass(eq=False)
class Row:
    """A text that grows in a slot, where the first `cached` of its `ids` have keys."""

    owner: object
    ids: list[int]
    turn: Turn
    cached: int = 0
    state: str = "live"  # it decodes; "waiting": its turn is over; "free"

    @property
    def missing(self) -> int:
        """Tokens to catch up. The last one has its keys computed by the step that reads it."""
        return len(self.ids) - 1 - self.cached


class Engine:
    """Add rows while slots are vacant; `decode`; resume or free each row whose turn is over."""

    def __init__(self, model, slots: int, size: int, rule: StopRule, temperature=1.0, top_p=1.0):
        self.model, self.device, self.rule = model, model.device, rule
        self.temperature, self.top_p = temperature, top_p
        self.block = BLOCK.get(self.device.type, 64)
        size = -(-size // self.block) * self.block  # GPU kernels want a mask of an even width
        self.cache = SlotCache(slots, size)
        self.rows = [Row(None, [], Turn(0), state="free") for _ in range(slots)]  # row i: slot i
        self.slot_ids = torch.arange(slots, device=self.device)
        self.places = torch.arange(size, device=self.device)
        vocab = model.get_output_embeddings().weight.shape[0]
        alarm = [token in rule.watched for token in range(vocab)]
        self.alarm = torch.tensor(alarm, device=self.device)  # [V]

    def in_state(self, state: str) -> list[Row]:
        return [row for row in self.rows if row.state == state]

    def add(self, owner, ids: list[int], max_new_tokens: int) -> None:
        """Give a vacant slot to a row; best the one that a sample of the same prompt has left."""
        row = Row(owner, list(ids), Turn(max_new_tokens))
        slots = [slot for slot, held in enumerate(self.rows) if held.state == "free"]
        donor = self.donor(row)
        slot = donor if donor in slots else slots[0]
        if donor is not None:
            self.share(donor, slot, row)
        self.rows[slot] = row

    def resume(self, row: Row, ids: list[int], max_new_tokens: int) -> None:
        """Another turn for a row that waited; `ids` are all its tokens, with what was appended."""
        row.ids, row.turn, row.state = list(ids), Turn(max_new_tokens), "live"

    def donor(self, row: Row) -> int | None:
        """A slot, free or not, that holds all that `row` must catch up: a sample of its prompt."""
        need = len(row.ids) - 1
        for slot, held in enumerate(self.rows):
            if held is not row and held.cached >= need and held.ids[:need] == row.ids[:need]:
                return slot
        return None

    def share(self, donor: int, slot: int, row: Row) -> None:
        row.cached = len(row.ids) - 1
        if donor != slot:
            self.cache.copy(donor, slot, row.cached)

    def catch_up(self) -> None:
        """Bring all live rows to their last token. Equal texts are computed once."""
        behind = [row for row in self.in_state("live") if row.missing]
        self.prefill(list({tuple(row.ids): row for row in behind}.values()))
        for row in behind:
            if row.missing:
                self.share(self.donor(row), self.rows.index(row), row)

    def prefill(self, rows: list[Row]) -> None:
        """Passes of at most CHUNK padded tokens, of rows that miss about as much; no head."""
        most = CHUNK.get(self.device.type, 2048)
        while rows := sorted((row for row in rows if row.missing), key=lambda row: row.missing):
            longest = min(rows[-1].missing, most)
            batch = rows[-max(1, most // longest) :]
            chunks = [row.ids[row.cached : -1][:longest] for row in batch]
            padded = [chunk + [0] * (longest - len(chunk)) for chunk in chunks]
            tokens = torch.tensor(padded, device=self.device)  # [n, C]
            # Padding goes behind the row's end; beyond the slot's, to the last place.
            starts = torch.tensor([[row.cached] for row in batch], device=self.device)  # [n, 1]
            positions = (starts + self.places[:longest]).clamp(max=self.cache.size)  # [n, C]
            slots = torch.tensor([self.rows.index(row) for row in batch], device=self.device)
            width = max(row.cached for row in batch) + longest
            self.model.base_model(**self.inputs(tokens, positions, width, slots, slots))
            for row, chunk in zip(batch, chunks, strict=True):
                row.cached += len(chunk)

    def decode(self) -> list[Row]:
        """Live rows sample until at least one turn is over. Returns those rows: they wait now."""
        over = []
        while not over and (live := self.in_state("live")):
            self.arrange(len(live))
            with attending_to_slots(self.model), unrounded_logits(self.model):
                self.catch_up()
                over = self.sample(self.rows[: len(live)])
        return over

    def arrange(self, count: int) -> None:
        """Live rows move into the first `count` slots: a step then reads a view of the cache."""
        live = [row.state == "live" for row in self.rows]
        places = [slot for slot in range(count) if not live[slot]]
        strays = [slot for slot in range(count, len(live)) if live[slot]]
        for a, b in zip(places, strays, strict=True):
            out, row = self.rows[a], self.rows[b]
            if out.state == "waiting":  # it will need its keys
                self.cache.copy([b, a], [a, b], max(out.cached, row.cached))
            else:
                self.cache.copy(b, a, row.cached)
                out.cached = 0
            self.rows[a], self.rows[b] = row, out

    def sample(self, rows: list[Row]) -> list[Row]:
        """Steps up to the first watched token or full turn. Returns the rows whose turn is over."""
        tokens = torch.tensor([[row.ids[-1]] for row in rows], device=self.device)  # [n, 1]
        positions = torch.tensor([[row.cached] for row in rows], device=self.device)  # [n, 1]
        deepest, drawn = max(row.cached for row in rows), []
        for step in range(min(row.turn.max_new_tokens - len(row.turn.ids) for row in rows)):
            tokens, logprobs = self.draw(self.logits(tokens, positions, deepest + step + 1))
            drawn.append((tokens, logprobs))
            positions = positions + 1
            if self.alarm[tokens].any():  # on a GPU the only wait
                break
        ids, logprobs = (torch.cat(columns, 1).tolist() for columns in zip(*drawn, strict=True))
        return [row for row, i, p in zip(rows, ids, logprobs, strict=True) if self.take(row, i, p)]

    def take(self, row: Row, ids: list[int], logprobs: list[float]) -> bool:
        """Append what a row has sampled. Is its turn over?"""
        turn = row.turn
        row.ids += ids
        turn.ids += ids
        turn.logprobs += logprobs
        row.cached += len(ids)
        turn.reason = self.rule.reason(turn.ids, turn.max_new_tokens)
        row.state = "waiting" if turn.reason else "live"
        return row.state == "waiting"

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, V] -> a token for each row and its log-prob in the full distribution, [n, 1] each."""
        scores = logits.float() / (self.temperature or 1.0)
        if not self.temperature:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            kept = TopPLogitsWarper(self.top_p)(None, scores) if self.top_p < 1 else scores
            tokens = pick(kept.softmax(-1))
        return tokens, scores.gather(1, tokens) - scores.logsumexp(-1, keepdim=True)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """[n, 1] tokens at [n, 1] positions of the first n slots -> logits [n, V]."""
        n = len(tokens)
        inputs = self.inputs(tokens, positions, width, self.slot_ids[:n], slice(n))
        return self.model(**inputs).logits[:, -1]

    def inputs(self, tokens, positions, width: int, slots, read: slice | torch.Tensor) -> dict:
        """The arguments of a forward pass over tokens [n, C] in `slots` [n]; aims the cache."""
        cache = self.cache
        cache.write, cache.read = (slots[:, None], positions), read
        cache.width = min(-(-width // self.block) * self.block, cache.size)
        hidden = self.places[: cache.width] > positions[..., None]  # [n, C, width]
        # Added to the scores: a mask of bools would be made into this one anew in every layer.
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None]  # [n, 1, C, width]
        texts = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
        return texts | {"past_key_values": cache, "use_cache": True}


def pick(probabilities: torch.Tensor) -> torch.Tensor:
    """[n, V] -> one index per row, [n, 1]: the first whose running sum exceeds a uniform number."""
    if probabilities.device.type != "cpu":  # cuda would not repeat the sums, mps has no float64
        return torch.multinomial(probabilities, 1)  # on a CPU 2 to 10 times slower
    sums = probabilities.cumsum(-1, dtype=torch.float64)  # [n, V]; fp32 would round small ones away
    points = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]
    found = torch.searchsorted(sums, points, right=True)  # right: never one of probability 0
    return found.clamp(max=sums.shape[1] - 1)


# -------------------------------------------------------------------------------------- the rollout
def generate_in_slots(
    policy, environment: Environment, live: list[Trajectory], progress=None
) -> None:
    """`rollout.generate_by_turns` in slots; itself, with a warning, where slots cannot be used."""
    if not live:
        return
    model, settings = policy.language_model, environment.settings
    with evaluating(model), policy.autocast():  # around all: the bf16 copy is made once
        size = max(environment.max_trajectory_tokens(t) for t in live)
        slots = min(settings.max_num_seqs or len(live), len(live), affordable(model, size))
        problem = obstacle(model) or ("" if slots else f"no memory for one row of {size} tokens")
        if not problem:
            ends = end_ids(policy, environment.tokenizer)
            rule = StopRule(environment.tokenizer, environment.protocol.stop_tags, ends)
            engine = Engine(model, slots, size, rule, settings.temperature, settings.top_p)
            play_queue(engine, environment, deque(live), progress)
            return
    warn_once(f'engine "{settings.engine}": {problem}; plain generate takes its place')
    generate_by_turns(policy, environment, live, progress)


def play_queue(engine: Engine, environment: Environment, queue: deque, progress=None) -> None:
    """A row that ends gives its slot on. Searches wait until half of the running rows want one."""
    while queue or len(engine.in_state("free")) < len(engine.rows):
        while queue and engine.in_state("free"):
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
        if progress and ended:
            progress(len(ended))


@functools.cache
def warn_once(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


# ------------------------------------------------------------------------ what the engine can drive
def obstacle(model) -> str:
    """Why this model cannot be driven in slots; "" if it can."""
    config = model.config
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return f"{config.model_type} has no rotary positions"
    if window := windowed(config):
        return f"{config.model_type} has layers with {window}"
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"rotary positions of type {rope['rope_type']} depend on what else is in the batch"
    known = config.model_type in FAMILIES or agrees(model)
    return "" if known else f"{config.model_type} gives other logits in slots than whole"


@torch.no_grad()
def agrees(model) -> bool:
    """Has the last of six tokens the same logits in a slot as in the whole text?"""
    ids = torch.arange(6, device=model.device)[None]  # [1, 6]
    try:
        whole = model(input_ids=ids).logits[:, -1]  # [1, V]
        engine = Engine(model, 1, 8, SimpleNamespace(watched=set()))
        engine.add(None, ids[0].tolist(), 1)
        with attending_to_slots(model):
            engine.catch_up()
            logits = engine.logits(ids[:, -1:], ids[:, -1:], 6)  # [1, V]
        return bool((logits - whole).abs().max() <= 2e-2 * whole.abs().max())
    except Exception:  # whatever a forward that was not made for this raises
        return False


def affordable(model, size: int) -> int:
    """Slots of `size` places that fit in the free memory, each with its row's logits."""
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # what torch holds unused
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available  # a container: see --max_num_seqs
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Keys and values of one token in all layers; 16 bytes for one of V logits.
    place = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    return max(0, int(SHARE * free / (place * (size + 64) + 16 * config.vocab_size)))
