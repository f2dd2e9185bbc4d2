"""A GPU made of nothing: tensors on "cuda" that have a shape, a type and a device, but no numbers.

They are torch's fake tensors. Those whose numbers are known (token ids, masks, what was copied from
the CPU, and what was computed of such) carry them, so that code which decides by them runs. Tensors
on the CPU are real. Bytes are counted by storage, in blocks of 512 as CUDA's allocator hands out.

What this cannot see: what a kernel computes, or whether it runs; whether NCCL's processes meet or
wait for ever; memory lost between blocks, and CUDA's own; how long anything takes; a kernel's own
work space.
"""

import contextlib
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    _DISPATCH_HANDLE_DIRECTLY,
    _DISPATCH_META_HANDLERS,
    FakeTensor,
    FakeTensorMode,
)
from torch.backends.cuda import SDPAParams
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional
from torch.nn.attention import bias
from torch.utils._mode_utils import no_dispatch

aten = torch.ops.aten
KNOWN = 2**24  # no tensor of more elements carries its numbers
GPU = torch.device("cuda", 0)


class Memory:
    """The bytes on the GPU: of all, now, and at most."""

    total, now, peak, paused = 0.0, 0, 0, False

    def __init__(self):
        self.held: dict[int, int] = {}  # storage -> bytes

    def count(self, storage: torch.UntypedStorage, size: int) -> None:
        key, size = storage._cdata, -(-size // 512) * 512
        if self.paused:
            return
        if key not in self.held:
            weakref.finalize(storage, self.free, key)
        self.now += size - self.held.get(key, 0)
        self.held[key] = size
        self.peak = max(self.peak, self.now)

    def free(self, key: int) -> None:
        self.now -= self.held.pop(key)


def on_gpu(x) -> bool:
    return isinstance(x, FakeTensor) and x.fake_device.type == "cuda"


def changed(values, change: Callable) -> list:
    """Arguments of an operation, with other tensors."""

    def one(x):
        if isinstance(x, (list, tuple)):
            return changed(x, change)
        return change(x) if isinstance(x, Tensor) else x

    return [one(x) for x in values]


def tensors_in(values) -> list[Tensor]:
    found: list[Tensor] = []
    changed(values, found.append)
    return found


def numbers(x: Tensor) -> Tensor | None:
    """What is known of a tensor. It is an attribute: a weak table would keep torch from swapping
    one tensor for another.
    """
    return vars(x).get("numbers") if isinstance(x, FakeTensor) else x


def invented(x: Tensor) -> Tensor:
    """The numbers of a tensor that carries none: 1/8 for fractions, else 0."""
    if (known := numbers(x)) is not None:
        return known
    with no_dispatch():
        return torch.full(x.shape, 0.125 if x.is_floating_point() else 0, dtype=x.dtype)


READING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Device(FakeTensorMode):
    """Inside, whatever is made on "cuda" is a ghost."""

    avoid_device_init = True  # torch.tensor(..., device="cuda") is made on the CPU, and then moved

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.memory, self.inside = Memory(), False

    def dispatch(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it takes itself apart first
        asks = func in _DISPATCH_META_HANDLERS or func in _DISPATCH_HANDLE_DIRECTLY
        if asks or self.inside:  # a question about a tensor, or a part of what is one kernel
            return super().dispatch(func, types, args, kwargs or {})
        self.inside = True
        try:
            return self.run(func, types, args, kwargs or {})
        finally:
            self.inside = False

    def run(self, func, types, args, kwargs):
        target = torch.device(kwargs.get("device") or "cpu").type
        leaves_gpu = func is aten._to_copy.default and "device" in kwargs and target == "cpu"
        if target != "cuda" and not any(isinstance(x, FakeTensor) for x in tensors_in(args)):
            with no_dispatch():
                return func(*args, **kwargs)
        if func in READING or leaves_gpu:
            return self.read(func, args, kwargs)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            with no_dispatch():
                return args[0].copy_(invented(args[1]))
        if func in INDEXING:
            args = (args[0], self.places(args[0], args[1]), *args[2:])
        args = changed(args, lambda x: self.ghost(x, x.device))
        result = super().dispatch(func, types, args, kwargs)
        made = [x for x in tensors_in((result,)) if isinstance(x, FakeTensor)]
        for x in filter(on_gpu, made):
            self.memory.count(x.untyped_storage(), x.untyped_storage().nbytes())
        self.learn(func, args, kwargs, made)
        return result

    def read(self, func, args, kwargs):
        """The numbers decide: an element for Python, a tensor for the CPU, a shape."""
        with no_dispatch():
            real = func(*changed(args, invented), **kwargs)
        on_cpu = not isinstance(real, Tensor) or "device" in kwargs
        return real if on_cpu else self.ghost(real, args[0].device)

    def places(self, indexed: Tensor, index: list) -> list:
        """Masks become the numbers of their places, as a GPU does it."""
        if not on_gpu(indexed) and any(map(on_gpu, index)):
            raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
        places = []
        for x in index:
            if isinstance(x, Tensor) and x.dtype == torch.bool:
                with no_dispatch():
                    found = invented(x).nonzero(as_tuple=True)
                places += [self.ghost(place, x.device) for place in found]
            else:
                places.append(x)
        return places

    def ghost(self, real: Tensor, device) -> FakeTensor:
        """A real tensor as a ghost on `device` that carries its numbers."""
        if isinstance(real, FakeTensor):
            return real
        with no_dispatch():
            how = {"dtype": real.dtype, "device": "meta"}
            empty = torch.empty_strided(real.shape, real.stride(), **how)
        made = FakeTensor(self, empty, torch.device(device))
        made.numbers = real
        if on_gpu(made):
            self.memory.count(made.untyped_storage(), made.untyped_storage().nbytes())
        return made

    def learn(self, func, args, kwargs, made: list[FakeTensor]) -> None:
        """The same operation on the numbers, if all are known and few; else they are unknown."""
        known = all(numbers(x) is not None for x in tensors_in(args))
        few = all(x.numel() <= KNOWN for x in made)
        if made and known and few and torch.Tag.nondeterministic_seeded not in func.tags:
            kwargs = kwargs | ({"device": "cpu"} if "device" in kwargs else {})
            with contextlib.suppress(RuntimeError), no_dispatch(), torch.no_grad():
                done = func(*changed(args, numbers), **kwargs)
                for x, real in zip(made, tensors_in((done,)), strict=True):
                    x.numbers = real
                return
        for x, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info and argument.alias_info.is_write
            if written and isinstance(x, FakeTensor) and x.is_floating_point():
                vars(x).pop("numbers", None)


HALF = (torch.bfloat16, torch.float16)


def can_flash(p: SDPAParams, debug=False) -> bool:
    """flash_attention's conditions in sdp_utils.cpp, on sm80 or later."""
    half = all(x.dtype in HALF for x in (p.query, p.key, p.value))
    aligned = not p.is_causal or p.query.shape[2] == p.key.shape[2]
    return half and p.attn_mask is None and aligned


def can_efficient(p: SDPAParams, debug=False) -> bool:
    return p.query.dtype == p.key.dtype == p.value.dtype and p.query.shape[1] == p.key.shape[1]


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """CUDA's choice of the kernel for an attention (cuDNN's is off): a build without CUDA would
    always take the slow one. As torch.nn.functional.scaled_dot_product_attention.
    """
    if isinstance(attn_mask, bias.CausalBias):  # it asks `can_flash` and `can_efficient` itself
        return bias.CausalBias._dispatch(query, key, value, attn_mask, **options)
    given = [query, key, value, attn_mask]
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        fractions = [x is not None and x.is_floating_point() for x in given]
        given = [x.to(half) if f else x for x, f in zip(given, fractions, strict=True)]
    query, key, value, mask = given
    bias._validate_sdpa_input(*given, dropout_p, is_causal, options.get("scale"))
    p = SDPAParams(*given, dropout_p, is_causal, options.pop("enable_gqa", False))
    if can_flash(p):
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, **options)[0]
    assert can_efficient(p), "only the slow kernel can do this"
    if mask is not None:
        if mask.dtype not in (query.dtype, torch.bool):
            raise RuntimeError("invalid dtype for bias - should match query's dtype")
        mask = mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    kept = (query.requires_grad, dropout_p, is_causal)
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, mask, *kept, **options)[0]


functional.scaled_dot_product_attention = attend  # before the files that import it


class Nothing:
    """A stream, an event, or a call that does nothing."""

    def __getattr__(self, name: str):
        return self

    def __call__(self, *_, **__):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


NOTHING = Nothing()
IDLE = (
    "set_device synchronize empty_cache _lazy_init current_stream stream Stream Event set_rng_state"
)
ANSWERS = {
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "device_count": 8,
    "current_device": 0,
    "get_device_capability": (9, 0),
}


LIBRARY = torch.library.Library("aten", "IMPL")


def install(device: Device) -> None:
    """Puts the device into torch, for the rest of this process."""
    memory = device.memory
    for name, value in (ANSWERS | dict.fromkeys(IDLE.split(), NOTHING)).items():
        setattr(torch.cuda, name, value if value is NOTHING else lambda *_, value=value: value)
    torch.cuda.mem_get_info = lambda *_: (int(memory.total - memory.now), int(memory.total))
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
        # Without a kernel its gradient would be taken apart into several tensors.
        LIBRARY.impl("silu_backward", lambda *_: None, "CUDA")
    bias.CausalBias.__new__ = real_bias
    bias.can_use_flash_attention, bias.can_use_efficient_attention = can_flash, can_efficient
    FakeTensor.tolist = lambda x: invented(x).tolist()
    patch_storage(memory)
    patch_sharding(memory)


def real_bias(kind: type, *_) -> bias.CausalBias:
    """It is no tensor but in name."""
    with no_dispatch():
        return Tensor.__new__(kind)


def patch_storage(memory: Memory) -> None:
    """FSDP frees and takes the memory of whole weights by resizing their storage."""
    resize = torch.UntypedStorage.resize_

    def counted(storage, size):
        result = resize(storage, size)
        if storage._cdata in memory.held:
            memory.count(storage, size)
        return result

    torch.UntypedStorage.resize_ = counted


def patch_sharding(memory: Memory) -> None:
    """DTensor learns shapes from whole fake tensors, which no GPU holds."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(*args, **kwargs):
        memory.paused = True
        try:
            return propagate(*args, **kwargs)
        finally:
            memory.paused = False

    ShardingPropagator._propagate_tensor_meta_non_cached = uncounted
