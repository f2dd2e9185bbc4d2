"""Many rows at different places in one key-value cache: the fast twin of the loop's `generate`.

    slot 0  [prompt | sampled | documents | sampl>              ]  decodes
         1  [prompt | sam>                                      ]  decodes: the first n slots are
            what a step computes
         2  [prompt | sampled, a query>                         ]  waits for its documents
         3  [prompt | ...                                       ]  free; its prompt still serves the
            next sample of the group

    to catch up   all tokens of a row but the last: copied from a slot that holds them, else one
    forward of what is missing
    to decode     last tokens [n, 1] -> logits [n, V] -> a token for each row, until one of them may
                  have ended its turn

HF `generate` has all rows at one place: it pads, waits for the slowest row, and computes every row
again at each turn. Here a row has a length of its own. That needs three things from a causal LM and
no change to its code: its forward takes position ids, a 4D attention mask, and a `Cache` whose
`update` says where keys go and which are read. One rule does the rest:

    token i of a row stands at place i of its slot, has position i, and sees the places j <= i.

So nothing is ever erased: what an earlier row left behind a row's end is not seen, and is
overwritten when the row gets there. The prompt of a group is computed once; documents are appended
in one chunk while other rows wait their turn in place; a finished row's slot goes to the next one.
The engine knows no tags: it is told which tokens to stop at and who decides.

Left out: paging (a slot is as long as the longest row may become; on CPUs memory is only taken as
it is filled) and layers with a sliding window. Not run: anything on a GPU; of the recording all but
the CUDA calls themselves is tested.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, TopPLogitsWarper

from errors import run_main
from scale.packing import FAMILIES, windowed

BLOCK = {
    "cpu": 16,
    "cuda": 64,
}  # keys are read up to the longest live row, rounded up to so many places
RECORDED = 512  # the same of a recorded step: one recording for each width
CHUNK = {"cpu": 256, "cuda": 4096}  # padded tokens of one catching-up forward: bounds its memory
SHARE = 0.8  # of the free memory that slots may take


# ---------------------------------------------------------------------------------------- the cache


class SlotCache(Cache):
    """Keys and values of fixed slots. Before each forward `aim` says which slots it is about, and
    where in them.
    """

    def __init__(self, slots: int, size: int):
        super().__init__(layers=[])  # of the base class only its type is used
        self.slots, self.size = slots, size
        self.keys: list[
            torch.Tensor
        ] = []  # per layer [slots, size + 1, heads, D]; the last place is for padding
        self.values: list[torch.Tensor] = []

    def aim(
        self, slots: torch.Tensor, read: slice | torch.Tensor, positions: torch.Tensor, width: int
    ) -> None:
        """Write to `positions` [n, C] of `slots` [n]; read the first `width` places of `read`, the
        same slots (a slice is a view where an index would copy).
        """
        self.write, self.read, self.width = (slots[:, None], positions), read, width

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_, **__
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by every attention layer with [n, heads, C, D] -> keys and values to attend to,
        [n, heads, width, D].
        """
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
        device = like.device.type
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
        )
        shape = (self.slots, self.size + 1, like.shape[1], like.shape[3])
        return (
            untouched(shape, dtype)
            if device == "cpu"
            else torch.zeros(shape, dtype=dtype, device=like.device)
        )

    def copy(self, source: int, target: int, length: int) -> None:
        for held in self.keys + self.values:
            held[target, :length] = held[source, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        for held in self.keys + self.values:
            kept = held[a, :length].clone()
            held[a, :length] = held[b, :length]
            held[b, :length] = kept


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on a CPU that take memory where they are written, and not before: a slot is longer than
    most of its rows.

    Zeros, because places not yet written are masked, but 0 weight times what an empty tensor may
    hold (NaN) is NaN.
    """
    memory = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize
    )  # fresh pages, zero by the kernel's word
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(
                mmap.MADV_NOHUGEPAGE
            )  # a page of 2 MB would span several slots and take all of them at once
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def grouped_attention(
    module, query, keys, values, mask, scaling=None, **_
) -> tuple[torch.Tensor, None]:
    """Attention over the slots: query [n, heads, C, D], keys and values [n, kv, width, D], mask [n,
    1, C, width].

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
    """A text that grows in a slot. `ids` are all its tokens, of which the first `cached` have keys
    in the slot.

    turn, logprobs   what it has sampled since it was added or resumed, and with which log-probs; at
                     most `room` tokens
    state            "live" (decodes), "waiting" (its turn is over, for `reason`), "free" (its slot
                     may be taken)
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
        """Tokens to compute before it can decode: all but the last, which the next decoding step
        takes.
        """
        return len(self.ids) - 1 - self.cached


class Engine:
    """Add rows while there are free slots, `decode`, and resume or release each row whose turn is
    over.

    watched   token ids that may end a turn; `reason(turn, room)` says whether one did (None: it
              goes on)
    """

    def __init__(
        self,
        model,
        slots: int,
        size: int,
        watched: set[int],
        reason: Callable[[list[int], int], str | None],
        temperature: float = 1.0,
        top_p: float = 1.0,
        graphs: bool = False,
    ):
        self.model, self.device, self.reason, self.watched = model, model.device, reason, watched
        self.temperature, self.top_p, self.graphs = temperature, top_p, graphs
        self.block = BLOCK.get(self.device.type, 64)
        size = (
            -(-size // self.block) * self.block
        )  # an attention mask of an even width is what GPU kernels want
        self.cache = SlotCache(slots, size)
        self.rows: list[Row | None] = [None] * slots  # row i is in slot i
        self.slot_ids = torch.arange(slots, device=self.device)
        self.places = torch.arange(size, device=self.device)
        self.alarm = torch.zeros(
            model.get_output_embeddings().weight.shape[0], dtype=torch.bool
        )  # [V]
        self.alarm[[i for i in watched if i < len(self.alarm)]] = True
        self.alarm = self.alarm.to(self.device)
        self.recordings: dict[
            tuple[int, int], Recording
        ] = {}  # of a decoding step, by (slots, width)

    def in_state(self, state: str) -> list[Row]:
        return [row for row in self.rows if row and row.state == state]

    @property
    def vacant(self) -> list[int]:
        return [slot for slot, row in enumerate(self.rows) if row is None or row.state == "free"]

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
        row.ids, row.room, row.turn, row.logprobs, row.reason, row.state = (
            list(ids),
            room,
            [],
            [],
            None,
            "live",
        )

    def release(self, row: Row) -> None:
        row.state = "free"

    # ---------------------------------------------------------------------------------- catching up

    def donor(self, row: Row) -> int | None:
        """A slot that holds all that `row` is missing: of another sample of its prompt, free or
        not.
        """
        need = len(row.ids) - 1
        for slot, held in enumerate(self.rows):
            if (
                held
                and held is not row
                and held.cached >= need
                and held.ids[:need] == row.ids[:need]
            ):
                return slot
        return None

    def share(self, donor: int, slot: int, row: Row) -> None:
        row.cached = len(row.ids) - 1
        if donor != slot:
            self.cache.copy(donor, slot, row.cached)

    def catch_up(self) -> None:
        """Every live row's tokens but its last one get their keys. Equal texts, as of one prompt,
        are computed once.
        """
        behind = [row for row in self.in_state("live") if row.missing]
        self.prefill(list({tuple(row.ids): row for row in behind}.values()))
        for row in behind:
            if row.missing:
                self.share(self.donor(row), self.rows.index(row), row)

    def prefill(self, rows: list[Row]) -> None:
        """Forwards of at most CHUNK padded tokens, rows that miss about as much together, a row
        that misses more in pieces. No head: nothing is sampled.
        """
        most = CHUNK.get(self.device.type, 2048)
        while rows := sorted((row for row in rows if row.missing), key=lambda row: row.missing):
            longest = min(rows[-1].missing, most)
            batch = rows[-max(1, most // longest) :]
            chunks = [row.ids[row.cached : row.cached + min(row.missing, longest)] for row in batch]
            tokens = torch.tensor(
                [chunk + [0] * (longest - len(chunk)) for chunk in chunks], device=self.device
            )  # [n, C]
            # Padding gets places behind the row's end too: not seen, and overwritten later; at the
            # slot's end, its last place.
            starts = torch.tensor([[row.cached] for row in batch], device=self.device)
            positions = (starts + self.places[:longest]).clamp(max=self.cache.size)  # [n, C]
            slots = torch.tensor([self.rows.index(row) for row in batch], device=self.device)
            self.aim(slots, slots, positions, max(row.cached for row in batch) + longest)
            self.model.base_model(**self.inputs(tokens, positions))
            for row, chunk in zip(batch, chunks, strict=True):
                row.cached += len(chunk)

    # ------------------------------------------------------------------------------------- decoding

    def decode(self) -> list[Row]:
        """The live rows sample until at least one's turn is over. Those rows wait then, with the
        reason.
        """
        over: list[Row] = []
        while not over and (live := self.in_state("live")):
            self.arrange(len(live))
            with attending_to_slots(self.model):
                self.catch_up()
                over = self.sample(self.rows[: len(live)])
        return over

    def arrange(self, count: int) -> None:
        """Bring the live rows into the first `count` slots: a step then reads a view of the cache,
        not a copy.
        """
        places = [
            slot
            for slot in range(count)
            if not (self.rows[slot] and self.rows[slot].state == "live")
        ]
        strays = [
            slot
            for slot in range(count, len(self.rows))
            if self.rows[slot] and self.rows[slot].state == "live"
        ]
        for a, b in zip(places, strays, strict=True):
            out, row = self.rows[a], self.rows[b]
            if out and out.state == "waiting":
                self.cache.swap(a, b, max(out.cached, row.cached))
                self.rows[a], self.rows[b] = row, out
            else:
                self.cache.copy(b, a, row.cached)
                self.rows[a], self.rows[b] = row, None

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
        if ids[-1] in self.watched or len(row.turn) >= row.room:
            row.reason = self.reason(row.turn, row.room)
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
        the width to RECORDED. The slots too many are computed at their last place, where nobody
        looks.
        """
        count, width = len(tokens), self.rounded(width, RECORDED)
        slots = min(1 << (count - 1).bit_length(), self.cache.slots)
        tokens = torch.nn.functional.pad(tokens, (0, 0, 0, slots - count))  # [slots, 1]
        positions = torch.nn.functional.pad(
            positions, (0, 0, 0, slots - count), value=self.cache.size
        )
        if (slots, width) not in self.recordings:
            self.cache.aim(self.slot_ids[:slots], slice(slots), positions, width)
            pool = next((recording.graph.pool() for recording in self.recordings.values()), None)
            self.recordings[slots, width] = Recording(
                self.forward, tokens, positions, self.cache, pool
            )
        return self.recordings[slots, width](tokens, positions)[:count]

    def rounded(self, width: int, block: int) -> int:
        return min(-(-width // block) * block, self.cache.size)

    def aim(self, slots, read, positions, width: int) -> None:
        self.cache.aim(slots, read, positions, self.rounded(width, self.block))

    def inputs(self, tokens: torch.Tensor, positions: torch.Tensor) -> dict:
        hidden = (
            self.places[: self.cache.width] > positions[..., None]
        )  # [n, C, width]: place j is seen from i where j <= i
        # added to the attention's scores; a mask of bools would be made into this one anew in every
        # layer
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device).masked_fill_(
            hidden, float("-inf")
        )
        return {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": mask[:, None],
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, V] -> a token for each row and its log-prob under the full distribution, [n, 1]
        each.
        """
        scores = logits.float() / (self.temperature or 1.0)
        if not self.temperature:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            kept = TopPLogitsWarper(self.top_p)(None, scores) if self.top_p < 1 else scores
            tokens = pick(kept.softmax(-1))
        return tokens, scores.gather(1, tokens) - scores.logsumexp(-1, keepdim=True)


class Recording:
    """A decoding step of one shape as a CUDA graph: a few hundred kernels that a GPU then starts by
    itself. Without it, Python takes longer to ask for them than the GPU to run them.

    What is recorded are addresses: inputs are copied into the recorded ones, and outputs are read
    where they were written.
    """

    def __init__(
        self, step: Callable, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache, pool
    ):
        self.tokens, self.positions = tokens.clone(), positions.clone()
        cache.write = (cache.write[0], self.positions)  # where keys go is an input too
        self.graph, self.logits = record(lambda: step(self.tokens, self.positions), pool)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.graph.replay()
        return self.logits


def record(step: Callable[[], torch.Tensor], pool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """(the graph, where each replay leaves its result). pool: the memory of the other recordings,
    which never run at once.

    Trap: libraries take memory at their first call on a stream, which a recording must not see, so
    the step runs twice before it on the same stream; it writes the same keys to the same places
    each time. A search that runs late in its thread may take memory meanwhile: "thread_local".
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


def pick(probabilities: torch.Tensor) -> torch.Tensor:
    """[n, V] -> one index of each row, [n, 1]: where the running sum passes a uniform number.

    On CPUs that is 2 to 10 times faster than multinomial, which draws V numbers per row; in fp64,
    because in fp32 the small probabilities at the end of a long sum are rounded away. (On GPUs a
    running sum may differ from run to run: not for seeds.)
    """
    if probabilities.is_cuda:
        return torch.multinomial(probabilities, 1)
    sums = probabilities.cumsum(-1, dtype=torch.float64)  # [n, V]
    points = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True).clamp(
        max=sums.shape[1] - 1
    )  # right: never one of probability 0


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
        engine = Engine(model, 2, 8, set(), lambda turn, room: "full")
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
    one of V). On a CPU a container's own limit is not known here: --rollout_batch_size bounds
    it.
    """
    free, bytes_each = free_memory(model.device), model.dtype.itemsize
    if torch.is_autocast_enabled(model.device.type):
        bytes_each = torch.get_autocast_dtype(model.device.type).itemsize
        # the copy that autocast is about to make of weights in fp32
        free -= bytes_each * sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
    per_slot = place_bytes(model.config, bytes_each) * (size + 64) + 16 * model.config.vocab_size
    return max(0, int(SHARE * free / per_slot))


def place_bytes(config, bytes_each: int) -> int:
    """Keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * bytes_each


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        # what torch holds unused; what it cannot give back are fragments, too small for slots
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):  # not Linux: half of what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def main() -> None:
    """Three rows of two prompts in two slots, greedy: what each step computes, and what is the same
    as row by row.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=0.6,
    )
    model = Qwen2ForCausalLM(config).eval()
    prompts, rooms, queue = [[1, 2, 3, 4], [1, 2, 3, 4], [7, 8]], [3, 6, 4], [0, 1, 2]
    engine = Engine(
        model,
        2,
        64,
        set(),
        lambda turn, room: "full" if len(turn) >= room else None,
        temperature=0.0,
    )
    with torch.no_grad():
        while queue or engine.in_state("live"):
            while queue and engine.vacant:
                number = queue.pop(0)
                engine.add(number, prompts[number], rooms[number])
            for row in engine.decode():
                whole = list(prompts[row.owner])
                for _ in row.turn:
                    whole.append(int(model(input_ids=torch.tensor([whole])).logits[0, -1].argmax()))
                print(
                    f"row {row.owner} in slot {engine.rows.index(row)}: {row.turn}   row by row:"
                    f" {whole[-len(row.turn) :]}"
                )
                engine.release(row)


if __name__ == "__main__":
    run_main(main)
