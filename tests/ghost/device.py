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
from unittest.mock import MagicMock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.nn.attention import bias
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
KNOWN = 2**24  # no tensor of more elements carries its numbers
GPU = torch.device("cuda", 0)
READING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# Questions about a tensor, which take no memory.
ASKING = {*fake_tensor._DISPATCH_META_HANDLERS, *fake_tensor._DISPATCH_HANDLE_DIRECTLY}


def tensors_in(values, kind=Tensor) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, kind)]


def numbers(x: Tensor) -> Tensor | None:
    """What is known of a tensor. It is an attribute: a weak table would keep torch from swapping
    one tensor for another.
    """
    return vars(x).get("numbers") if isinstance(x, FakeTensor) else x


def invented(x: Tensor) -> Tensor:
    """The numbers of a tensor that carries none: 1/8 for fractions, else 0."""
    known = numbers(x)
    return torch.full(x.shape, x.is_floating_point() / 8, dtype=x.dtype) if known is None else known


class Device(FakeTensorMode):
    """Inside, whatever is made on "cuda" is a ghost. Counts the bytes now, and at most."""

    inside, total, now, peak = False, 0.0, 0, 0

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.held: dict[int, int] = {}  # storage -> bytes

    def count(self, storage: torch.UntypedStorage, size: int) -> None:
        key, size = storage._cdata, -(-size // 512) * 512
        if key not in self.held:
            weakref.finalize(storage, self.free, key)
        self.now += size - self.held.get(key, 0)
        self.held[key] = size
        self.peak = max(self.peak, self.now)

    def free(self, key: int) -> None:
        self.now -= self.held.pop(key)

    def dispatch(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it takes itself apart first
        if self.inside or func in ASKING:  # inside: a part of what is one kernel
            return super().dispatch(func, types, args, kwargs or {})
        self.inside = True
        try:
            return self.run(func, types, args, kwargs or {})
        finally:
            self.inside = False

    def run(self, func, types, args, kwargs):
        to = kwargs.get("device") and torch.device(kwargs["device"]).type
        if to != "cuda" and not tensors_in((args, kwargs), FakeTensor):
            return func(*args, **kwargs)
        if func in READING or (func is aten._to_copy.default and to == "cpu"):
            real = func(*tree_map_only(Tensor, invented, args), **kwargs)
            stays = isinstance(real, Tensor) and to is None  # numbers decide its shape only
            return self.ghost(real, args[0].device) if stays else real
        if func in INDEXING:
            args = (args[0], self.places(args[0], args[1]), *args[2:])
        args = tree_map_only(Tensor, lambda x: self.ghost(x, x.device), args)
        result = super().dispatch(func, types, args, kwargs)
        made = tensors_in(result, FakeTensor)
        for x, real in zip(made, learned(func, args, kwargs, made), strict=True):
            self.see(x, real)
        return result

    def see(self, x: FakeTensor, real: Tensor | None) -> FakeTensor:
        x.numbers = real
        if x.fake_device.type == "cuda":
            self.count(x.untyped_storage(), x.untyped_storage().nbytes())
        return x

    def ghost(self, x: Tensor, device) -> FakeTensor:
        """A real tensor as a ghost on `device` that carries its numbers."""
        if isinstance(x, FakeTensor):
            return x
        return self.see(FakeTensor(self, x.to("meta"), torch.device(device)), x)

    def places(self, indexed: Tensor, index: list) -> list:
        """Masks become the numbers of their places, as a GPU does it."""
        found = []
        for x in index:
            if x is not None and x.device.type == "cuda" != indexed.device.type:
                raise RuntimeError("indices should be on the device of the indexed tensor (cpu)")
            if x is not None and x.dtype == torch.bool:
                found += [self.ghost(i, x.device) for i in invented(x).nonzero(as_tuple=True)]
            else:
                found.append(x)
        return found


def learned(func, args, kwargs, made: list[FakeTensor]) -> list[Tensor | None]:
    """The same operation on the numbers, if all are known and few; else they are unknown."""
    known = all(numbers(x) is not None for x in tensors_in(args))
    few = all(x.numel() <= KNOWN for x in made)
    if made and known and few and torch.Tag.nondeterministic_seeded not in func.tags:
        kwargs = kwargs | ({"device": "cpu"} if "device" in kwargs else {})
        with contextlib.suppress(RuntimeError):
            return tensors_in(func(*tree_map_only(Tensor, numbers, args), **kwargs))
    return [None] * len(made)


IDLE = "set_device synchronize empty_cache _lazy_init current_stream stream Stream Event"
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


def real_bias(kind: type, *_) -> bias.CausalBias:
    """It is no tensor but in name."""
    with no_dispatch():
        return Tensor.__new__(kind)


def install(device: Device) -> None:
    """Puts the device into torch, for the rest of this process."""
    for name in IDLE.split():
        setattr(torch.cuda, name, MagicMock())
    for name, value in ANSWERS.items():
        setattr(torch.cuda, name, MagicMock(return_value=value))
    torch.cuda.mem_get_info = lambda *_: (int(device.total - device.now), int(device.total))
    FakeTensorMode.avoid_device_init = True  # torch.tensor(...) is made on the CPU, then moved
    # Without a kernel its gradient would be taken apart into several tensors.
    LIBRARY.impl("silu_backward", MagicMock(), "CUDA")
    bias.CausalBias.__new__ = real_bias
    bias.can_use_flash_attention = lambda asked, *_: asked.query.dtype == torch.bfloat16
    FakeTensor.tolist = lambda x: invented(x).tolist()
    # DTensor learns shapes from whole fake tensors, which no GPU holds: of a mode of their own.
    _sharding_prop.detect_fake_mode = lambda: None
    resize = torch.UntypedStorage.resize_

    def counted(storage, size):  # FSDP frees and takes the memory of whole weights by this
        result = resize(storage, size)
        if storage._cdata in device.held:
            device.count(storage, size)
        return result

    torch.UntypedStorage.resize_ = counted
