"""Arrays of any library as a kernel wants them: four dimensions, no copy if they are on the GPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checks import bad, bad_type
from .gpu import SIMULATED, cuda

STORED = {"float32": np.dtype(np.float32), "float16": np.dtype(np.uint16)}
STORED |= {"bfloat16": np.dtype(np.uint16), "bool": np.dtype(np.uint8)}
STORED |= {"int32": np.dtype(np.int32)}
_NAMES = {"f4": "float32", "f2": "float16", "V2": "bfloat16", "b1": "bool"}


@dataclass(frozen=True)
class Operand:
    """An array that came in: what it is, where it lies, and whose it is.

    dtype is a name; strides are in bytes; address is None for an array that is on the host.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int | None
    device: int | None
    owner: Any
    library: str

    def seen_as(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """The array for a kernel, in another shape over the same memory; 16-bit floats as bits."""
        stored = STORED[self.dtype]
        if SIMULATED:
            bits = self.owner.view(stored)
            return np.lib.stride_tricks.as_strided(bits, shape, strides)
        interface = {
            "shape": shape,
            "strides": strides,
            "typestr": stored.str,
            "data": (self.address, False),
            "version": 3,
        }
        return cuda.from_cuda_array_interface(interface, owner=self.owner, sync=False)

    def rows_aligned(self, size: int) -> bool:
        """Whether rows have no gaps, and every row starts at a multiple of `size` bytes."""
        *apart, item = self.strides
        starts = (self.address or 0, *apart)
        whole = item == STORED[self.dtype].itemsize and all(x % size == 0 for x in starts)
        return whole or 0 in self.shape

    @property
    def repeats(self) -> bool:
        """Whether an element stands for several, as after broadcasting."""
        return any(x == 0 for n, x in zip(self.shape, self.strides, strict=True) if n > 1)

    def on_gpu(self) -> Operand:
        """This operand, copied to the GPU if it is on the host."""
        if SIMULATED or self.address is not None:
            return self
        there = cuda.to_device(self.owner.view(STORED[self.dtype]))
        address = there.__cuda_array_interface__["data"][0]
        return Operand(
            self.name, self.dtype, self.shape, self.strides, address, None, there, self.library
        )


def operand(
    name: str, x: Any, accepted: str = "float32, float16 or bfloat16 (a mask: or bool)"
) -> Operand:
    """Describe an array: NumPy's, or any with `__cuda_array_interface__`.

    accepted: which dtypes to name where it has another.

    Raises
    ------
    TypeError
        For a dtype that kernels do not take, or a tensor of another library that is on the CPU.
    """
    library = type(x).__module__.partition(".")[0]
    if library == "torch":
        x = x.detach()
        if x.device.type != "cuda":
            raise bad_type(f"{name}.device", str(x.device), "a tensor on a CUDA device, or NumPy")
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is None:
        x = np.asarray(x)
        kind = _NAMES.get(x.dtype.str[1:])
        if kind is None or (kind == "bfloat16" and x.dtype.name != "bfloat16"):
            raise bad_type(f"{name}.dtype", x.dtype.name, accepted)
        x = np.ascontiguousarray(x).reshape(x.shape)
        return Operand(name, kind, x.shape, x.strides, None, None, x, "numpy")
    kind = _NAMES.get(interface["typestr"][1:])
    if kind is None:
        raise bad_type(f"{name}.dtype", interface["typestr"], accepted)
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or contiguous(shape, int(interface["typestr"][2:]))
    address = interface["data"][0]
    return Operand(name, kind, shape, tuple(strides), address, _device(x, address), x, library)


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of an array without gaps."""
    return tuple(int(np.prod(shape[n + 1 :], dtype=np.int64)) * itemsize for n in range(len(shape)))


def _device(x: Any, address: int) -> int | None:
    """The number of the GPU that holds an array."""
    where = getattr(getattr(x, "device", None), "index", None)
    if where is None:
        where = getattr(getattr(x, "device", None), "id", None)
    return where


def flattened(x: Operand) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of (..., heads, N, d) as (batch, heads, N, d).

    Raises
    ------
    ValueError
        If several batch dimensions do not lie behind each other in memory, so that it takes a copy.
    """
    shape, strides = x.shape, x.strides
    if len(shape) == 2:
        return (1, 1, *shape), (0, 0, *strides)
    batch, spans = shape[:-3], strides[:-3]
    if not batch:
        return (1, *shape[-3:]), (0, *strides[-3:])
    for n in range(len(batch) - 1):
        if batch[n] != 1 and spans[n] != spans[n + 1] * batch[n + 1]:
            raise bad(f"{x.name}.strides", strides, "batch dimensions that can be one; copy it")
    return (int(np.prod(batch)), *shape[-3:]), (spans[-1], *strides[-3:])


def new(like: Operand, shape: tuple[int, ...], dtype: str) -> tuple[Any, Operand]:
    """A new array of the caller's library, and the operand that a kernel writes.

    Numba has no bfloat16 arrays: there it is an array of uint16, the bits.
    """
    if like.library == "torch":
        array = like.owner.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    elif like.library == "cupy":
        array = sys.modules["cupy"].empty(shape, STORED[dtype] if dtype == "bfloat16" else dtype)
    elif SIMULATED:
        array = np.empty(shape, STORED[dtype])
    else:
        array = cuda.device_array(shape, STORED[dtype])
    if SIMULATED:
        return array, Operand("new", dtype, shape, array.strides, None, None, array, "numpy")
    address = array.__cuda_array_interface__["data"][0]
    strides = contiguous(shape, STORED[dtype].itemsize)
    return array, Operand("new", dtype, shape, strides, address, like.device, array, like.library)


def handed_back(array: Any, like: Operand, dtype: str) -> Any:
    """What the caller gets of a new array: for NumPy, a copy on the host."""
    if like.library != "numpy":
        return array
    host = array if SIMULATED else array.copy_to_host()
    if dtype == "bfloat16":
        import ml_dtypes

        return host.view(ml_dtypes.bfloat16)
    return host.view(dtype)


def current_stream(x: Operand) -> int:
    """The address of the stream that the caller's library works on; 0: the default stream."""
    if x.library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)
    if x.library == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0
