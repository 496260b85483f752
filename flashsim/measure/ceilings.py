"""What the GPU can do at most, measured: a copy, multiply-adds, bare loops of traffic, a launch.

A kernel with few threads, or that waits for its loads, cannot keep enough under way to reach the
rate of a copy: by Little's law its rate is at most what is under way over the latency. Instead of
computing that, a bare loop runs with as many blocks, threads and bytes of shared memory as a launch
has on the GPU at a time. Where the launch walks tiles, so does the loop: two come through registers
into shared memory, all wait for the slowest, and the second goes back to HBM where the launch takes
one back. Otherwise it reads, each thread with as many loads of the same width under way as there
before all wait; and a loop of writes does the same without waiting. Once over 16 MB, which the L2
holds, and once over 512 MB, which it does not. Where several blocks walk the same tiles they do so
side by side: the first to ask for a line waits for the DRAM, and the others with it. So there as
many blocks read the same, and it lies in the DRAM, though the L2 spares that all requests but one.

Those are the rates that the bytes of a launch are held against, besides the time of an empty launch
of as many blocks, threads and bytes of shared memory.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from .timing import milliseconds

L2_BYTES = 16 * 1024**2
DRAM_BYTES = 512 * 1024**2
MOVED_BYTES = 2e9


def general() -> dict[str, float]:
    """Bytes a second of a copy (read and written), and float32 operations a second."""
    from ..kernels import gpu

    size = 1 << 30
    a, b = (gpu.cuda.device_array(size, np.uint8) for _ in range(2))
    copy = milliseconds([lambda: b.copy_to_device(a)])
    return {
        "copy_bytes_per_second": 2e3 * size / copy["ms"],
        "float32_flops_per_second": bare_multiply_adds(8 * gpu.multiprocessors(), 256),
    }


def resident_blocks(step: Any) -> int:
    """How many blocks of a launch one multiprocessor holds at a time."""
    from ..kernels.gpu import cuda

    function, device = step.function, cuda.get_current_device()
    signature = tuple(function.typeof_pyval(a) for a in step.args)
    registers = -(-function.overloads[signature].regs_per_thread // 8) * 8
    return int(
        min(
            device.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR // (step.shared_bytes + 1024),
            device.MAX_REGISTERS_PER_MULTIPROCESSOR // (registers * step.threads),
            device.MAX_THREADS_PER_MULTIPROCESSOR // step.threads,
            32,
        )
    )


def groups_of(blocks: int, sharing: int) -> int:
    """Into how many groups, as large as each other, blocks fall of which so many share tiles."""
    return max(1, round(blocks / sharing))


def rates(blocks: int, step: Any) -> dict[str, float]:
    """Bytes a second of bare loops like those of a launch with so many blocks at a time.

    From and into an array that the L2 holds (l2), and one that it does not (dram). A loop that
    takes tiles back reads and writes at one rate, that of all its bytes. And float32 operations a
    second, of as many threads.
    """
    place, turn = (blocks, step.threads, step.shared_bytes), step.turn
    loads, item = step.under_way

    def read(size: int, groups: int) -> float:
        if turn:
            return staged(*place, size, turn, groups)
        return bare_reads(*place, size, loads, item, groups)

    walked = L2_BYTES if step.sharing == 1 else DRAM_BYTES
    l2, dram = read(walked, groups_of(blocks, step.sharing)), read(DRAM_BYTES, blocks)
    back = turn and turn.back
    return {
        "l2_bytes_per_second": l2,
        "dram_bytes_per_second": dram,
        "l2_written_bytes_per_second": l2 if back else bare_writes(*place, L2_BYTES, loads),
        "dram_written_bytes_per_second": dram if back else bare_writes(*place, DRAM_BYTES, loads),
        "float32_flops_per_second": bare_multiply_adds(blocks, step.threads),
    }


def kernels(step: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """The kernels that measure what a launch is held against, with arguments of their types."""
    from ..kernels import bare, gpu

    loads, item = step.under_way
    n, out = np.int64(1), gpu.cuda.device_array(1, np.float32)
    made = [
        (bare.nothing(step.threads), (out,)),
        (bare.multiply_adds(step.threads), (n, np.float32(1), out)),
    ]
    if step.turn:
        A, B = (_array(1, 1, dtype) for dtype in step.turn.dtypes)
        made.append((bare.staged(step.turn, step.threads), (A, B, n, n, out)))
    else:
        A = _array(1, 1, "float16" if item == 2 else "float32")
        made.append((bare.reads(loads, item, step.threads), (A, n, n, out)))
    if not (step.turn and step.turn.back):
        made.append((bare.writes(loads, step.threads), (_array(1, 1, "float32"), n)))
    return made


@cache
def empty_launch(grid: int, threads: int, shared_bytes: int) -> float:
    """Seconds of a launch of a kernel that does nothing."""
    from ..kernels import bare, gpu

    args = (gpu.cuda.device_array(1, np.float32),)
    call = partial(gpu.launch, bare.nothing(threads), grid, threads, shared_bytes, 0, args)
    return float(milliseconds([call], seconds=0.02)["ms"]) / 1e3


@cache
def bare_multiply_adds(blocks: int, threads: int) -> float:
    """Float32 operations a second of so many blocks, each thread with 16 sums of its own."""
    from ..kernels import bare, gpu

    turns, out = 4096, gpu.cuda.device_array(1, np.float32)
    args = (np.int64(turns), np.float32(0.5), out)
    call = partial(gpu.launch, bare.multiply_adds(threads), blocks, threads, 0, 0, args)
    ms = float(milliseconds([call], seconds=0.02)["ms"])
    return 2e3 * blocks * threads * turns * 8 * 16 / ms


@cache
def bare_reads(
    blocks: int, threads: int, shared_bytes: int, size: int, loads: int, item: int, groups: int
) -> float:
    """Bytes a second that the loop of reads gets from an array of `size` bytes.

    groups: into which the blocks fall; those of one read the same.
    """
    from ..kernels import bare, gpu

    A, out = _rows(size, item), gpu.cuda.device_array(1, np.float32)
    turns = max(1, round(MOVED_BYTES / (blocks * threads * loads * item)))
    args = (A, np.int64(turns), np.int64(groups), out)
    function, room = bare.reads(loads, item, threads), max(4, shared_bytes)
    call = partial(gpu.launch, function, blocks, threads, room, 0, args)
    ms = float(milliseconds([call], seconds=0.02)["ms"])
    return 1e3 * blocks * threads * turns * loads * item / ms


@cache
def staged(
    blocks: int, threads: int, shared_bytes: int, size: int, turn: Any, groups: int
) -> float:
    """Bytes a second that the loop over tiles gets from, and into, two arrays of `size` in all."""
    from ..kernels import arrays, bare, gpu

    items = [arrays.STORED[dtype].itemsize for dtype in turn.dtypes]
    N = size // (turn.d * sum(items)) // turn.rows * turn.rows
    A, B = (_array(N, turn.d, dtype, n) for n, dtype in enumerate(turn.dtypes))
    moved = turn.rows * turn.d * (sum(items) + turn.back * items[1])
    turns = max(1, round(MOVED_BYTES / (blocks * moved)))
    args = (A, B, np.int64(turns), np.int64(groups), gpu.cuda.device_array(1, np.float32))
    function = bare.staged(turn, threads)
    call = partial(gpu.launch, function, blocks, threads, shared_bytes, 0, args)
    ms = float(milliseconds([call], seconds=0.02)["ms"])
    return float(1e3 * blocks * turns * moved / ms)


@cache
def bare_writes(blocks: int, threads: int, shared_bytes: int, size: int, stores: int) -> float:
    """Bytes a second that the loop of writes gets into an array of `size` bytes."""
    from ..kernels import bare, gpu

    turns = max(1, round(MOVED_BYTES / (blocks * threads * stores * 16)))
    args = (_rows(size, 4), np.int64(turns))
    call = partial(gpu.launch, bare.writes(stores, threads), blocks, threads, shared_bytes, 0, args)
    ms = float(milliseconds([call], seconds=0.02)["ms"])
    return 1e3 * blocks * threads * turns * stores * 16 / ms


def _rows(size: int, item: int) -> Any:
    """What bare reads and writes walk, `size` bytes in rows of as many as they take."""
    from ..kernels.bare import ROW_BYTES

    dtype, size_of_one = ("float16", 2) if item == 2 else ("float32", 4)
    return _array(size // ROW_BYTES, ROW_BYTES // size_of_one, dtype)


@cache
def _array(rows: int, columns: int, dtype: str, which: int = 0) -> Any:
    """Zeros on the GPU; `which`: of several alike."""
    from ..kernels import arrays
    from ..kernels.gpu import cuda

    return cuda.to_device(np.zeros((rows, columns), arrays.STORED[dtype]))
