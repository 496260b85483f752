"""Tiles copied between global and shared memory by the copy engine, of tensors that a map tells of.

One thread asks for a whole tile. What lies beyond the tensor arrives as zeros and is never written,
and since rows, heads and batches are dimensions of their own, the row after the last of a head is
beyond it, not the next head's. In the simulator a load is done only when its barrier is waited for,
a store when it is waited for, and until then the target is garbage. Stretches of global memory that
no map tells of are copied or added to as they lie.

PTX ISA, "Data Movement and Conversion Instructions: Tensor copy"; CUDA driver API, "Tensor Map
Object Management".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...checks import bad
from .. import gpu
from ..gpu import SIMULATED, cuda
from . import mbarrier
from .base import Global, Start, instruction, u32
from .emulation import GARBAGE, thread
from .shared import START, memory, put, swizzled
from .wgmma import PANEL, ROW_BYTES

__all__ = [
    "TensorMap", "bulk_add", "bulk_load", "tensor_maps", "tma_commit_group", "tma_load",
    "tma_store", "tma_wait_group", "tma_wait_group_read",
]  # fmt: skip

ITEM_BYTES = 2
MAX_BOX_ROWS = 256


@dataclass(frozen=True)
class TensorMap:
    """A tensor (batch, heads, N, d) of 16-bit elements, in boxes of `rows` x 64; emulation only."""

    array: Any
    rows: int

    def inside(self, column: Any, row: Any) -> tuple[range, range]:
        """Rows and columns of a box that lie in the tensor."""
        _, _, N, d = self.array.shape
        return (
            range(int(row), min(int(row) + self.rows, N)),
            range(int(column), min(int(column) + PANEL, d)),
        )


def tensor_maps(boxes: dict[str, tuple[Any, int]], dtype: str) -> list[Any]:
    """What a kernel takes to copy boxes of `rows` x 64 elements of each x (batch, heads, N, d).

    Parameters
    ----------
    boxes : dict
        (x, rows) by what messages call x: arrays of 16-bit elements, on the GPU from a multiple of
        16 bytes on. The last dimension has no gaps; in the others elements are a multiple of 16
        bytes apart. At most 256 rows.
    dtype : str
        "float16" or "bfloat16": what the elements are.

    Returns
    -------
    list of device arrays of 128 bytes
        Swizzled by 128 bytes. In the simulator, of `TensorMap`.

    Raises
    ------
    ValueError
        If an x does not lie as it must.
    """
    for name, (x, rows) in boxes.items():
        if not 1 <= rows <= MAX_BOX_ROWS:
            raise bad("rows", rows, f"1 to {MAX_BOX_ROWS}")
        apart = [s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
        if x.strides[-1] != ITEM_BYTES or any(s % 16 or not 0 < s < 2**40 for s in apart):
            accepted = f"{ITEM_BYTES} bytes in the last dimension, a multiple of 16 in the others"
            raise bad(f"{name}.strides", x.strides, accepted)
    if SIMULATED:
        return [TensorMap(x, rows) for x, rows in boxes.values()]
    made = cuda.to_device(np.stack([_encoded(name, *box, dtype) for name, box in boxes.items()]))
    return [made[n] for n in range(len(boxes))]


def _encoded(name: str, x: Any, rows: int, dtype: str) -> Any:
    """The 128 bytes of a tensor map."""
    from cuda.bindings import driver

    address = x.__cuda_array_interface__["data"][0]
    if address % 16:
        raise bad(f"{name}'s address", address, "a multiple of 16 bytes")
    sizes = [max(1, n) for n in reversed(x.shape)]  # no size may be 0; nothing is copied of it then
    strides = [s if n > 1 else 16 for n, s in zip(sizes[1:], reversed(x.strides[:-1]), strict=True)]
    kinds = driver.CUtensorMapDataType
    error, encoded = driver.cuTensorMapEncodeTiled(
        {
            "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            "bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        }[dtype],
        len(sizes),
        address,
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in (PANEL, rows, 1, 1)],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    if int(error):
        raise RuntimeError(f"{name}: shape {x.shape}, strides {x.strides}: {error.name}")
    return np.array([int(word) for word in encoded.opaque], np.uint64).view(np.uint8)


def _box(target: int, rows: int) -> Any:
    """Where each element of a box (rows, 64) lies in the simulator's memory, in elements."""
    if target % ROW_BYTES:
        raise RuntimeError(f"a box at address {target}: expected a multiple of 128")
    r, c = np.arange(rows)[:, None], np.arange(PANEL)
    return (swizzled(target + r * ROW_BYTES + c * ITEM_BYTES) - START) // ITEM_BYTES


@instruction("fence.proxy.tensormap::generic.acquire.sys [{tensor_map}], 128;", tensor_map=Start())
def fence_tensor_map(tensor_map: Any) -> None:
    """Before this thread copies by a map that lies in global memory; "membar, fence".

    A multiprocessor keeps the maps it has seen, by their address, also from one launch to the next;
    what the host has since written there it would not see.
    """
    thread().__dict__.setdefault("tensor maps", []).append(tensor_map)


def _fenced(tensor_map: Any) -> None:
    if not any(tensor_map is known for known in thread().__dict__.get("tensor maps", ())):
        raise RuntimeError("a tensor map is used that this thread has not fenced")


@instruction(
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[{target}], [{source}, {{column}, {row}, {head}, {batch}}], [{barrier}];",
    target=u32, source=Start(), column=u32, row=u32, head=u32, batch=u32, barrier=u32,
)  # fmt: skip
def tma_load(
    target: Any, source: Any, column: Any, row: Any, head: Any, batch: Any, barrier: Any
) -> None:
    """Start to copy the box at (row, column) of a head to shared memory; "cp.async.bulk.tensor".

    The rows of the box follow each other, 128 bytes each, swizzled. All its bytes, those beyond the
    tensor as well, count for the phase of the mbarrier that runs. By one thread.
    """
    _fenced(source)
    box = _box(int(target), source.rows)
    put(box, GARBAGE)
    rows, columns = source.inside(column, row)

    def copy() -> None:
        arrived = np.zeros(box.shape, np.uint16)
        for r in rows:
            for c in columns:
                x = source.array[int(batch), int(head), r, c]
                arrived[r - int(row), c - int(column)] = x
        put(box, arrived)

    waiting = mbarrier.at(barrier)
    with waiting.changed:
        waiting.copies.append((box.size * ITEM_BYTES, copy))
        waiting.changed.notify_all()


@instruction(
    "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
    "[{target}, {{column}, {row}, {head}, {batch}}], [{source}];",
    source=u32, target=Start(), column=u32, row=u32, head=u32, batch=u32,
)  # fmt: skip
def tma_store(source: Any, target: Any, column: Any, row: Any, head: Any, batch: Any) -> None:
    """Start to copy a box from shared memory to (row, column) of a head; "cp.async.bulk.tensor".

    What threads wrote to the box they must have fenced by `fence_proxy_async` before they
    synchronise with the one thread that calls this.
    """
    _fenced(target)
    box = _box(int(source), target.rows)
    rows, columns = target.inside(column, row)

    def write(found: Any) -> None:
        for r in rows:
            for c in columns:
                x = found[r - int(row), c - int(column)]
                target.array[int(batch), int(head), r, c] = x

    _leave(_Leaving(box, write))


class _Leaving:
    """A store in the simulator: it reads shared memory and writes as late as it may.

    It may also read at once. So what changes there in between is garbage.
    """

    def __init__(self, where: Any, write: Callable[[Any], None]) -> None:
        self.where, self.write, self.found = where, write, None
        self.asked_for = memory()[where].copy()

    def take(self) -> None:
        """Read, unless it has read."""
        if self.found is None:
            self.found = memory()[self.where].copy()
            words = self.found.view(np.uint32)  # of a float, not one half alone
            words[words != self.asked_for.view(np.uint32)] = 0xFFFFFFFF

    def finish(self) -> None:
        """Write."""
        self.take()
        self.write(self.found)


def _leave(store: _Leaving) -> None:
    thread().__dict__.setdefault("stores", []).append(store)


@instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[{target}], [{source}], {size}, [{barrier}];",
    target=u32, source=Global(), size=u32, barrier=u32,
)  # fmt: skip
def bulk_load(target: Any, A: Any, i: Any, j: Any, size: Any, barrier: Any) -> None:
    """Start to copy `size` bytes from A[i, j] of float32 on to shared memory; "cp.async.bulk".

    As they lie. Addresses and size are multiples of 16 bytes. They count for the phase of the
    mbarrier that runs. By one thread.
    """
    _sixteens(target, size, 4 * int(j))
    there = slice((int(target) - START) // 2, (int(target) - START + int(size)) // 2)
    put(there, GARBAGE)

    def copy() -> None:
        found = [A[int(i), int(j) + n] for n in range(int(size) // 4)]
        put(there, np.array(found, np.float32).view(np.uint16))

    waiting = mbarrier.at(barrier)
    with waiting.changed:
        waiting.copies.append((int(size), copy))
        waiting.changed.notify_all()


@instruction(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{target}], [{source}], {size};",
    target=Global(), source=u32, size=u32,
)  # fmt: skip
def bulk_add(A: Any, i: Any, j: Any, source: Any, size: Any) -> None:
    """Start to add `size` bytes of float32 in shared memory to A from A[i, j] on.

    Element by element, whoever else adds there, in an order left open; "cp.reduce.async.bulk". It
    belongs to the groups of `tma_commit_group`; addresses, size and fences as in `bulk_load` and
    `tma_store`.
    """
    _sixteens(source, size, 4 * int(j))
    here = slice((int(source) - START) // 2, (int(source) - START + int(size)) // 2)

    def write(found: Any) -> None:
        for n, x in enumerate(found.view(np.float32)):
            gpu.add(A, int(i), int(j) + n, x)

    _leave(_Leaving(here, write))


def _sixteens(*numbers: Any) -> None:
    if any(int(x) % 16 for x in numbers):
        raise RuntimeError(f"a bulk copy with {numbers}: expected multiples of 16 bytes")


@instruction("cp.async.bulk.commit_group;")
def tma_commit_group() -> None:
    """Make a group of the stores this thread has started; "cp.async.bulk.commit_group"."""
    mine = thread().__dict__
    mine.setdefault("store_groups", []).append(mine.pop("stores", []))


@instruction("cp.async.bulk.wait_group 0;")
def tma_wait_group() -> None:
    """Until all groups of stores of this thread are done; "cp.async.bulk.wait_group"."""
    for group in thread().__dict__.pop("store_groups", []):
        for store in group:
            store.finish()


@cache
def tma_wait_group_read(pending: int) -> Any:
    """tma_wait_group_read(): until all but the last `pending` groups of stores have been read.

    Of this thread, and from shared memory, which may be overwritten then;
    "cp.async.bulk.wait_group".
    """

    def emulated() -> None:
        groups = thread().__dict__.get("store_groups", [])
        for group in groups[: len(groups) - pending]:
            for store in group:
                store.take()

    emulated.__name__ = f"tma_wait_group_read_{pending}"
    return instruction(f"cp.async.bulk.wait_group.read {pending};")(emulated)
