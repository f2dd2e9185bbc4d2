"""Many rows at different places in one key-value cache: the fast twin of the loop's `generate`.

    slot 0  [prompt | sampled | documents | sampl>   ]  decodes
         1  [prompt | sam>                           ]  decodes: a step computes the first n slots
         2  [prompt | sampled, a query>              ]  waits for its documents
         3  [prompt | ...                            ]  free: its prompt serves others of its group

    catch up   the keys of all tokens of a row but the last: copied from a slot that holds them, or
               computed by one forward of what is missing
    decode     last tokens [n, 1] -> logits [n, V] -> a token for each row, until a turn may be over

HF `generate` has all rows at one place: it pads, waits for the slowest, and computes every row
again at each turn. Here a row has a length of its own. A causal LM needs no change for that: its
forward takes position ids, a 4D mask, and a `Cache` that says where keys go and which are read.

    token i of a row stands at place i of its slot, has position i, and sees the places j <= i

So nothing is ever erased: what an earlier row left behind a row's end is not seen, and is
overwritten when the row gets there. The engine knows no tags: `rollout.StopRule` ends turns.

Left out: paging (a slot is as long as the longest row may become) and layers with a sliding window.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import psutil
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, Cache, TopPLogitsWarper

from errors import setting
from policy import Policy, evaluating
from rollout import Environment, StopRule, end_ids, play_by_turns
from scale.packing import FAMILIES, windowed
from trajectory import Trajectory

# Keys are read up to the longest live row, rounded up to so many places.
BLOCK = {"cpu": 16, "cuda": 64}
RECORDED = 512  # the same of a recorded step: one recording for each width
CHUNK = {"cpu": 256, "cuda": 4096}  # padded tokens of one catching-up forward: bounds its memory
SHARE = 0.8  # of the free memory that slots may take


@dataclass(frozen=True)
class EngineSettings:
    engine: str = setting(
        "slots",
        "what samples: slots; graphs: slots with recorded decoding on a GPU; hf: plain generate",
        one_of=("slots", "graphs", "hf"),
    )
    sampling_copy: str = setting(
        "auto",
        "of the weights, for a rollout: bf16, none; auto: bf16 on a GPU, not of int8",
        one_of=("auto", "bf16", "none"),
        only="train",
    )


# ---------------------------------------------------------------------------------------- the cache


class SlotCache(Cache):
    """Keys and values of fixed slots. Before each forward the engine sets what it is about:

    write   (slots [n, 1], positions [n, C]): where its keys go
    read    the same slots; a slice gives a view where an index would copy
    width   how many places of them it reads
    """

    def __init__(self, slots: int, size: int):
        super().__init__(layers=[])  # of the base class only its type is used
        self.slots, self.size = slots, size
        # Per layer [slots, size + 1, heads, D]; the last place is for padding.
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_, **__):
        """Each layer gives [n, heads, C, D] and attends to what it gets, [n, heads, width, D]."""
        if layer_idx == len(self.keys):
            self.keys.append(self._allocate(keys))
            self.values.append(self._allocate(values))
        return self._put(self.keys[layer_idx], keys), self._put(self.values[layer_idx], values)

    def _put(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        held[self.write] = new.transpose(1, 2).to(held.dtype)
        return held[self.read, : self.width].transpose(1, 2)  # [n, heads, width, D]

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        # Under autocast the keys come out of the rotation in fp32, and attention would round all of
        # them at every step.
        device, dtype = like.device.type, like.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        shape = (self.slots, self.size + 1, like.shape[1], like.shape[3])
        if device == "cpu":
            return untouched(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=like.device)

    def copy(self, source: int, target: int, length: int) -> None:
        for held in self.keys + self.values:
            held[target, :length] = held[source, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        for held in self.keys + self.values:
            kept = held[a, :length].clone()
            held[a, :length] = held[b, :length]
            held[b, :length] = kept


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on a CPU that take memory only where they are written: slots are longer than most rows.

    Zeros, because places not yet written are masked, but weight 0 times NaN is NaN.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)  # fresh pages are zero
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A page of 2 MB would span several slots and take all of them at once.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def grouped_attention(module, query, keys, values, mask, scaling=None, **_):
    """query [n, heads, C, D], keys and values [n, kv, width, D], mask [n, 1, C, width].

    The heads / kv queries that share a key head become rows of one query matrix, so no key is
    repeated in memory.
    """
    n, heads, chunk, size = query.shape  # size: D
    group = heads // keys.shape[1]
    stacked = query.reshape(n, heads // group, group * chunk, size)
    mask = mask if chunk == 1 else mask.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(stacked, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(n, heads, chunk, size).transpose(1, 2).contiguous(), None  # [n, C, heads, D]


AttentionInterface.register("slots", grouped_attention)


@contextlib.contextmanager
def attending_to_slots(model):
    """The model's own forward, with the attention above."""
    kept = model.config._attn_implementation
    model.config._attn_implementation = "slots"
    try:
        yield
    finally:
        model.config._attn_implementation = kept


# ----------------------------------------------------------------------------------------- the rows


@dataclass(eq=False)
class Row:
    """A text that grows in a slot. Of its `ids`, the first `cached` have keys in the slot.

    turn, logprobs   what it has sampled since it was added or resumed; at most `room` tokens
    state            "live" (decodes), "waiting" (its turn is over, for `reason`), "free"
    """

    owner: object
    ids: list[int]
    room: int
    cached: int = 0
    turn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    state: str = "live"

    @property
    def missing(self) -> int:
        """Tokens to compute before it can decode: the next step takes the last one itself."""
        return len(self.ids) - 1 - self.cached


class Engine:
    """Add rows while there are free slots, `decode`, resume or release each row whose turn is over.

    rule     ends turns: `watched` token ids may, and `reason(turn, room)` says whether one did
    graphs   decoding steps are recorded as CUDA graphs
    """

    def __init__(
        self, model, slots: int, size: int, rule, temperature: float = 1.0, top_p: float = 1.0
    ):
        self.model, self.device, self.rule, self.graphs = model, model.device, rule, False
        self.temperature, self.top_p = temperature, top_p
        self.block = BLOCK.get(self.device.type, 64)
        size = -(-size // self.block) * self.block  # GPU kernels want a mask of an even width
        self.cache = SlotCache(slots, size)
        self.rows: list[Row | None] = [None] * slots  # row i is in slot i
        self.slot_ids = torch.arange(slots, device=self.device)
        self.places = torch.arange(size, device=self.device)
        vocab = model.get_output_embeddings().weight.shape[0]
        self.alarm = torch.zeros(vocab, dtype=torch.bool)  # [V]
        self.alarm[[i for i in rule.watched if i < vocab]] = True
        self.alarm = self.alarm.to(self.device)
        self.recordings: dict[tuple[int, int], Recording] = {}  # by (slots, width)

    def in_state(self, state: str) -> list[Row]:
        return [row for row in self.rows if row and row.state == state]

    @property
    def vacant(self) -> list[int]:
        return [slot for slot, row in enumerate(self.rows) if not row or row.state == "free"]

    @property
    def taken(self) -> int:
        return len(self.rows) - len(self.vacant)

    def add(self, owner, ids: list[int], room: int) -> None:
        """Give a free slot to a row; best the one that a sample of the same prompt has left."""
        row, slots = Row(owner, list(ids), room), self.vacant
        donor = self.donor(row)
        slot = donor if donor in slots else slots[0]
        if donor is not None:
            self.share(donor, slot, row)
        self.rows[slot] = row

    def resume(self, row: Row, ids: list[int], room: int) -> None:
        """Another turn for a row that waited; `ids` are all its tokens, with what was appended."""
        row.ids, row.room, row.state, row.reason = list(ids), room, "live", None
        row.turn, row.logprobs = [], []

    def release(self, row: Row) -> None:
        row.state = "free"

    # ---------------------------------------------------------------------------------- catching up

    def donor(self, row: Row) -> int | None:
        """A slot, free or not, that holds all that `row` is missing: a sample of its prompt."""
        need = len(row.ids) - 1
        for slot, held in enumerate(self.rows):
            other = held and held is not row and held.cached >= need
            if other and held.ids[:need] == row.ids[:need]:
                return slot
        return None

    def share(self, donor: int, slot: int, row: Row) -> None:
        row.cached = len(row.ids) - 1
        if donor != slot:
            self.cache.copy(donor, slot, row.cached)

    def catch_up(self) -> None:
        """Live rows' tokens but the last get their keys. Equal texts are computed once."""
        behind = [row for row in self.in_state("live") if row.missing]
        self.prefill(list({tuple(row.ids): row for row in behind}.values()))
        for row in behind:
            if row.missing:
                self.share(self.donor(row), self.rows.index(row), row)

    def prefill(self, rows: list[Row]) -> None:
        """Forwards of at most CHUNK padded tokens, without the head. Rows that miss about as much
        go together, a row that misses more goes in pieces.
        """
        most = CHUNK.get(self.device.type, 2048)
        while rows := sorted((row for row in rows if row.missing), key=lambda row: row.missing):
            longest = min(rows[-1].missing, most)
            batch = rows[-max(1, most // longest) :]
            chunks = [row.ids[row.cached : row.cached + min(row.missing, longest)] for row in batch]
            padded = [chunk + [0] * (longest - len(chunk)) for chunk in chunks]
            tokens = torch.tensor(padded, device=self.device)  # [n, C]
            # Padding stands behind its row's end, not seen and overwritten later; at the slot's end
            # in the last place.
            starts = torch.tensor([[row.cached] for row in batch], device=self.device)  # [n, 1]
            positions = (starts + self.places[:longest]).clamp(max=self.cache.size)  # [n, C]
            slots = torch.tensor([self.rows.index(row) for row in batch], device=self.device)
            self.aim(slots, slots, positions, max(row.cached for row in batch) + longest)
            self.model.base_model(**self.inputs(tokens, positions))
            for row, chunk in zip(batch, chunks, strict=True):
                row.cached += len(chunk)

    # ------------------------------------------------------------------------------------- decoding

    def decode(self) -> list[Row]:
        """Live rows sample until at least one's turn is over; such rows wait then."""
        over: list[Row] = []
        while not over and (live := self.in_state("live")):
            self.arrange(len(live))
            with attending_to_slots(self.model):
                self.catch_up()
                over = self.sample(self.rows[: len(live)])
        return over

    def arrange(self, count: int) -> None:
        """Live rows move into the first `count` slots: a step then reads a view of the cache."""
        live = [bool(row) and row.state == "live" for row in self.rows]
        places = [slot for slot in range(count) if not live[slot]]
        strays = [slot for slot in range(count, len(live)) if live[slot]]
        for a, b in zip(places, strays, strict=True):
            out, row = self.rows[a], self.rows[b]
            if out and out.state == "waiting":
                self.cache.swap(a, b, max(out.cached, row.cached))
            else:
                self.cache.copy(b, a, row.cached)
                out = None
            self.rows[a], self.rows[b] = row, out

    def sample(self, rows: list[Row]) -> list[Row]:
        """Steps up to the first watched token or the first full turn. On a GPU the look at `alarm`
        is the only wait.
        """
        tokens = torch.tensor([[row.ids[-1]] for row in rows], device=self.device)  # [n, 1]
        positions = torch.tensor([[row.cached] for row in rows], device=self.device)  # [n, 1]
        deepest, drawn = max(row.cached for row in rows), []
        for step in range(min(row.room - len(row.turn) for row in rows)):
            tokens, logprobs = self.draw(self.logits(tokens, positions, deepest + step + 1))
            drawn.append((tokens, logprobs))
            positions = positions + 1
            if self.alarm[tokens].any():
                break
        ids, logprobs = (torch.cat(columns, 1).tolist() for columns in zip(*drawn, strict=True))
        return [row for row, i, p in zip(rows, ids, logprobs, strict=True) if self.take(row, i, p)]

    def take(self, row: Row, ids: list[int], logprobs: list[float]) -> bool:
        """Append what a row has sampled. Is its turn over?"""
        row.ids += ids
        row.turn += ids
        row.logprobs += logprobs
        row.cached += len(ids)
        if ids[-1] in self.rule.watched or len(row.turn) >= row.room:
            row.reason = self.rule.reason(row.turn, row.room)
        row.state = "waiting" if row.reason else "live"
        return bool(row.reason)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """[n, 1] tokens at [n, 1] positions of the first n slots -> logits [n, V]."""
        if self.graphs:
            return self.replay(tokens, positions, width)
        self.aim(self.slot_ids[: len(tokens)], slice(len(tokens)), positions, width)
        return self.forward(tokens, positions)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(**self.inputs(tokens, positions)).logits[:, -1]

    def replay(self, tokens: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """The same from a recording, which is of one shape: slots are rounded up to a power of two,
        the width to RECORDED. The slots too many compute at their last place, where nobody looks.
        """
        count = len(tokens)
        slots = min(1 << (count - 1).bit_length(), self.cache.slots)
        tokens = pad(tokens, (0, 0, 0, slots - count))  # [slots, 1]
        positions = pad(positions, (0, 0, 0, slots - count), value=self.cache.size)
        width = self.rounded(width, RECORDED)
        if (slots, width) not in self.recordings:
            self.aim(self.slot_ids[:slots], slice(slots), positions, width)
            self.recordings[slots, width] = Recording(self, tokens, positions)
        return self.recordings[slots, width](tokens, positions)[:count]

    def aim(self, slots, read: slice | torch.Tensor, positions, width: int) -> None:
        self.cache.write, self.cache.read = (slots[:, None], positions), read
        self.cache.width = self.rounded(width, self.block)

    def rounded(self, width: int, block: int) -> int:
        return min(-(-width // block) * block, self.cache.size)

    def inputs(self, tokens: torch.Tensor, positions: torch.Tensor) -> dict:
        """Place j is seen from i where j <= i."""
        hidden = self.places[: self.cache.width] > positions[..., None]  # [n, C, width]
        # Added to the scores: a mask of bools would be made into this one anew in every layer.
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device)
        return {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": mask.masked_fill_(hidden, float("-inf"))[:, None],
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, V] -> a token for each row and its log-prob in the full distribution, [n, 1] each."""
        scores = logits.float() / (self.temperature or 1.0)
        if not self.temperature:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            kept = TopPLogitsWarper(self.top_p)(None, scores) if self.top_p < 1 else scores
            tokens = pick(kept.softmax(-1))
        return tokens, scores.gather(1, tokens) - scores.logsumexp(-1, keepdim=True)


def pick(probabilities: torch.Tensor) -> torch.Tensor:
    """[n, V] -> one index of each row, [n, 1]: where the running sum passes a uniform number.

    On CPUs that is 2 to 10 times faster than multinomial, which draws V numbers per row. In fp64:
    fp32 rounds away the small probabilities at the end of a long sum. (On GPUs a running sum may
    differ from run to run: not for seeds.)
    """
    if probabilities.is_cuda:
        return torch.multinomial(probabilities, 1)
    sums = probabilities.cumsum(-1, dtype=torch.float64)  # [n, V]
    points = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]
    found = torch.searchsorted(sums, points, right=True)  # right: never one of probability 0
    return found.clamp(max=sums.shape[1] - 1)


class Recording:
    """A decoding step of one shape as a CUDA graph: a few hundred kernels that a GPU then starts by
    itself. Without it, Python takes longer to ask for them than the GPU to run them.

    Addresses are recorded: inputs are copied into the recorded ones, and outputs are read where
    they were written.
    """

    def __init__(self, engine: Engine, tokens: torch.Tensor, positions: torch.Tensor):
        self.tokens, self.positions = tokens.clone(), positions.clone()
        cache = engine.cache
        cache.write = (cache.write[0], self.positions)  # where keys go is an input too
        # All share the memory of the first: they never run at once.
        pool = next((other.graph.pool() for other in engine.recordings.values()), None)
        step = functools.partial(engine.forward, self.tokens, self.positions)
        self.graph, self.logits = record(step, pool)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.graph.replay()
        return self.logits


def record(step: Callable[[], torch.Tensor], pool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """(the graph, where each replay leaves its result).

    Trap: libraries take memory at their first call on a stream, which a recording must not see. So
    the step runs twice before it on the same stream; it writes the same keys to the same places. A
    search that runs late in its thread may take memory meanwhile: "thread_local".
    """
    aside = recording_stream(torch.cuda.current_device())
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
        result = step()
    return graph, result


@functools.cache
def recording_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # one: cuBLAS keeps 32 MB for each stream it has seen


# -------------------------------------------------------------------------------------- the rollout


def play_in_slots(
    policy: Policy,
    environment: Environment,
    trajectories: list[Trajectory],
    progress: Callable[[int], None] | None = None,
) -> None:
    """`rollout.play_by_turns` in slots, where no row waits for the slowest. A model that cannot be
    driven so is sampled from by plain `generate`, with a warning.
    """
    model, settings = policy.language_model, environment.settings
    # One autocast around all of it: on a GPU the weights' bf16 copy is made once.
    with evaluating(model), policy.autocast():
        size = max((environment.longest(len(t.prompt_ids)) for t in trajectories), default=0)
        wanted = min(settings.rollout_batch_size or len(trajectories), len(trajectories))
        slots = min(wanted, affordable(model, size))
        problem = obstacle(model)
        if wanted and not slots:
            problem = problem or f"no memory for one row of {size} tokens"
        if not problem:
            ends = end_ids(policy, environment.tokenizer)
            rule = StopRule(environment.tokenizer, environment.protocol.stop_tags, ends)
            engine = Engine(model, slots, size, rule, settings.temperature, settings.top_p)
            engine.graphs = settings.engine == "graphs" and can_record(model.device)
            play_queue(engine, environment, deque(trajectories), progress)
            return
    warn_once(f'engine "{settings.engine}": {problem}; plain generate takes its place')
    play_by_turns(policy, environment, trajectories, progress)


def play_queue(
    engine: Engine,
    environment: Environment,
    queue: deque[Trajectory],
    progress: Callable[[int], None] | None,
) -> None:
    """Each row that ends gives its slot to the next of the queue. Searches are batched: wait until
    at least half of the running rows want one.
    """
    while queue or engine.taken:
        while queue and engine.vacant:
            trajectory = queue.popleft()
            engine.add(trajectory, trajectory.ids, environment.turn_room(trajectory))
        before = engine.taken
        for row in engine.decode():
            environment.end_turn(row.owner, row.turn, row.logprobs, row.reason)
            if row.owner.stop_reason:
                engine.release(row)
        asking = engine.in_state("waiting")
        if len(asking) >= len(engine.in_state("live")):
            environment.answer([row.owner for row in asking])
            for row in asking:
                if row.owner.stop_reason:
                    engine.release(row)
                else:
                    engine.resume(row, row.owner.ids, environment.turn_room(row.owner))
        if progress and before > engine.taken:
            progress(before - engine.taken)


def can_record(device: torch.device) -> bool:
    # Not under autocast: its copies of the weights are dropped with it, and a recording would go on
    # reading them.
    if device.type == "cuda" and not torch.is_autocast_enabled("cuda"):
        return True
    warn_once(
        "--engine graphs: nothing is recorded on a CPU, nor where autocast computes (no bf16 copy)"
    )
    return False


@functools.cache
def warn_once(message: str) -> None:
    """A training run says it at its first step, not at every one."""
    print(f"warning: {message}", file=sys.stderr)


# -------------------------------------------------------------------------- what it can be used for


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
    """Six tokens at once, and two rows of them in slots, one of them in two pieces: are the last
    logits the same?
    """
    ids = list(range(6))
    try:
        whole = model(input_ids=torch.tensor([ids], device=model.device)).logits[:, -1]  # [1, V]
        engine = Engine(model, 2, 8, SimpleNamespace(watched=set()))
        engine.add(None, ids[:3], 1)
        engine.add(None, ids, 1)
        with attending_to_slots(model):
            engine.catch_up()
            engine.rows[0].ids = ids
            engine.catch_up()
            last = torch.tensor([[5], [5]], device=model.device)
            logits = engine.logits(last, last, 6)  # [2, V]
        return bool((logits - whole).abs().max() <= 2e-2 * whole.abs().max())
    except Exception:  # whatever a forward that was not made for this raises
        return False


def affordable(model, size: int) -> int:
    """Slots of `size` places that fit in the free memory, each with its row's logits (16 bytes for
    one of V). A container's own limit is not known on a CPU: --rollout_batch_size bounds it.
    """
    free, each = free_memory(model.device), model.dtype.itemsize
    if torch.is_autocast_enabled(model.device.type):
        each = torch.get_autocast_dtype(model.device.type).itemsize
        # the copy that autocast is about to make of weights in fp32
        free -= each * sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
    per_slot = place_bytes(model.config, each) * (size + 64) + 16 * model.config.vocab_size
    return max(0, int(SHARE * free / per_slot))


def place_bytes(config, bytes_each: int) -> int:
    """Keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * bytes_each


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch holds unused
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
