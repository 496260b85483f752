"""Tiles copied between global and shared memory by the copy engine, of tensors that a map tells of.

One thread asks for a whole tile. What lies beyond the tensor arrives as zeros and is never written,
and since rows, heads and batches are dimensions of their own, the row after the last of a head is
beyond it, not the next head's. In the simulator a load is done only when its barrier is waited for,
a store when it is waited for, and until then the target is garbage.

PTX ISA, "Data Movement and Conversion Instructions: Tensor copy"; CUDA driver API, "Tensor Map
Object Management".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...checks import bad
from ..gpu import SIMULATED, cuda
from . import mbarrier
from .base import Start, instruction, u32
from .emulation import GARBAGE, thread
from .shared import START, memory, put, swizzled
from .wgmma import PANEL, ROW_BYTES

__all__ = [
    "TensorMap", "tensor_maps", "tma_commit_group", "tma_load", "tma_store", "tma_wait_group",
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
    shared, box = memory(), _box(int(source), target.rows)
    rows, columns = target.inside(column, row)

    def copy() -> None:
        for r in rows:
            for c in columns:
                x = shared[box[r - int(row), c - int(column)]]
                target.array[int(batch), int(head), r, c] = x

    thread().__dict__.setdefault("stores", []).append(copy)


@instruction("cp.async.bulk.commit_group;")
def tma_commit_group() -> None:
    """Make a group of the stores this thread has started; "cp.async.bulk.commit_group"."""
    mine = thread().__dict__
    mine.setdefault("store_groups", []).append(mine.pop("stores", []))


@instruction("cp.async.bulk.wait_group 0;")
def tma_wait_group() -> None:
    """Until all groups of stores of this thread are done; "cp.async.bulk.wait_group"."""
    for group in thread().__dict__.pop("store_groups", []):
        for copy in group:
            copy()
