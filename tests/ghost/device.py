"""A simulated GPU: tensors on "cuda" have a shape, a type and a device, but mostly no numbers.

They are fake tensors of PyTorch. A tensor whose numbers are known (token ids, masks, copies from
the CPU, and results computed from these) carries them, so that code which branches on them runs.
Tensors on the CPU are real. Bytes are counted per storage, in blocks of 512 like those of CUDA's
allocator.

The simulation does not show what a kernel computes, or whether it runs; whether NCCL's processes
meet or wait for ever; memory lost between blocks, memory of CUDA itself, or the workspace of a
kernel; how long anything takes.
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
# Operations that only ask something about a tensor: they take no memory.
ASKING = {*fake_tensor._DISPATCH_META_HANDLERS, *fake_tensor._DISPATCH_HANDLE_DIRECTLY}


def tensors_in(values, kind=Tensor) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, kind)]


def numbers(x: Tensor) -> Tensor | None:
    """Returns the numbers of a tensor, or None if they are unknown. They are an attribute of it: a
    weak table would keep torch from swapping one tensor for another.
    """
    return vars(x).get("numbers") if isinstance(x, FakeTensor) else x


def invented(x: Tensor) -> Tensor:
    """Returns the numbers of a tensor; if they are unknown, 1/8 for floats and 0 for integers."""
    known = numbers(x)
    return torch.full(x.shape, x.is_floating_point() / 8, dtype=x.dtype) if known is None else known


class Device(FakeTensorMode):
    """A mode in which all tensors made on "cuda" are ghosts; it counts their bytes and the peak."""

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
            return NotImplemented  # this class first splits the operation into plain ones
        if self.inside or func in ASKING:  # inside: a part of one kernel
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
            stays = isinstance(real, Tensor) and to is None  # the numbers only decide the shape
            return self.ghost(real, args[0].device) if stays else real
        if func in INDEXING:
            args = (args[0], self.places(args[0], args[1]), *args[2:])
        args = tree_map_only(Tensor, lambda x: self.ghost(x, x.device), args)
        result = super().dispatch(func, types, args, kwargs)
        outputs = tensors_in(result, FakeTensor)
        for x, real in zip(outputs, learned(func, args, kwargs, outputs), strict=True):
            self.see(x, real)
        return result

    def see(self, x: FakeTensor, real: Tensor | None) -> FakeTensor:
        x.numbers = real
        if x.fake_device.type == "cuda":
            self.count(x.untyped_storage(), x.untyped_storage().nbytes())
        return x

    def ghost(self, x: Tensor, device) -> FakeTensor:
        """Returns a ghost on `device` that carries the numbers of a real tensor."""
        if isinstance(x, FakeTensor):
            return x
        return self.see(FakeTensor(self, x.to("meta"), torch.device(device)), x)

    def places(self, indexed: Tensor, index: list) -> list:
        """Replaces each mask in an index by the positions of its true elements, as a GPU does."""
        places = []
        for x in index:
            if x is not None and x.device.type == "cuda" != indexed.device.type:
                raise RuntimeError("indices should be on the device of the indexed tensor (cpu)")
            if x is not None and x.dtype == torch.bool:
                places += [self.ghost(i, x.device) for i in invented(x).nonzero(as_tuple=True)]
            else:
                places.append(x)
        return places


def learned(func, args, kwargs, outputs: list[FakeTensor]) -> list[Tensor | None]:
    """Returns the results of the operation on the numbers, if all are known and few; else Nones."""
    known = all(numbers(x) is not None for x in tensors_in(args))
    few = all(x.numel() <= KNOWN for x in outputs)
    if outputs and known and few and torch.Tag.nondeterministic_seeded not in func.tags:
        kwargs = kwargs | ({"device": "cpu"} if "device" in kwargs else {})
        with contextlib.suppress(RuntimeError):
            return tensors_in(func(*tree_map_only(Tensor, numbers, args), **kwargs))
    return [None] * len(outputs)


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
    """Creates a causal mask, which is a tensor in name only, as a real object, not as a ghost."""
    with no_dispatch():
        return Tensor.__new__(kind)


def install(device: Device) -> None:
    """Makes torch use this device for the rest of this process."""
    for name in IDLE.split():
        setattr(torch.cuda, name, MagicMock())
    for name, value in ANSWERS.items():
        setattr(torch.cuda, name, MagicMock(return_value=value))
    torch.cuda.mem_get_info = lambda *_: (int(device.total - device.now), int(device.total))
    FakeTensorMode.avoid_device_init = True  # torch.tensor(...) is made on the CPU, then moved
    # Without a kernel torch would split the gradient of silu into operations with several tensors.
    LIBRARY.impl("silu_backward", MagicMock(), "CUDA")
    bias.CausalBias.__new__ = real_bias
    bias.can_use_flash_attention = lambda params, *_: params.query.dtype == torch.bfloat16
    FakeTensor.tolist = lambda x: invented(x).tolist()
    # DTensor infers shapes with whole fake tensors, which no GPU holds: they get a separate mode.
    _sharding_prop.detect_fake_mode = lambda: None
    resize = torch.UntypedStorage.resize_

    def counted(storage, size):  # FSDP frees and allocates whole weights with it
        result = resize(storage, size)
        if storage._cdata in device.held:
            device.count(storage, size)
        return result

    torch.UntypedStorage.resize_ = counted
