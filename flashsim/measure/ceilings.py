"""What the GPU can do at most, measured: a copy, multiply-adds, bare reads and writes, a launch.

A kernel with few threads, or that waits for its loads, cannot keep enough under way to reach the
rate of a copy: by Little's law its rate is at most what is under way over the latency. Instead of
computing that, a bare loop of reads runs with as many blocks, threads and bytes of shared memory as
a launch has on the GPU at a time. Each thread has as many loads of the same width under way as
there, and all wait for the slowest before the next. Once over 16 MB, which the L2 holds, and once
over 512 MB, which it does not. Where several blocks walk the same tiles they do so side by side:
the first to ask for a line waits for the DRAM, and the others with it. So there as many blocks read
the same, and it lies in the DRAM, though the L2 spares that all requests but one. A bare loop of
writes does the same without waiting. Those are the rates that the bytes of a launch are held
against, besides the time of an empty launch.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from .timing import milliseconds

L2_BYTES = 16 * 1024**2
DRAM_BYTES = 512 * 1024**2
ROW_BYTES = 4096
MOVED_BYTES = 2e9


@cache
def _reads(loads: int, item: int, threads: int) -> Any:
    """A loop of reads: `loads` of `item` bytes a thread under way, then a barrier."""
    from ..kernels.gpu import cuda, device, float32, kernel, load, load_four, syncwarp, uint32

    def fetch_four(A: Any, r: Any, c: Any, x: Any, u: Any) -> None:
        x[4 * u], x[4 * u + 1], x[4 * u + 2], x[4 * u + 3] = load_four(A, r, uint32(4 * c))

    def fetch_one(A: Any, r: Any, c: Any, x: Any, u: Any) -> None:
        x[u] = float32(load(A, r, c))

    fetch, room = device(fetch_four if item == 16 else fetch_one), loads * (4 if item == 16 else 1)
    row = ROW_BYTES // item

    def read_only(A: Any, turns: Any, sharing: Any, out: Any) -> None:
        sm = cuda.shared.array(0, float32)
        tid = uint32(cuda.threadIdx.x)
        if tid == 0:
            sm[0] = float32(0)
        cuda.syncthreads()
        rows = uint32(A.shape[0] - 1)
        group, groups = cuda.blockIdx.x // sharing, (cuda.gridDim.x + sharing - 1) // sharing
        x = cuda.local.array(room, float32)
        total = float32(0)
        for turn in range(turns):
            start = uint32(turn * groups + group) * uint32(loads * threads) + tid
            for u in range(loads):
                e = uint32(start + uint32(u * threads))
                fetch(A, uint32((e // uint32(row)) & rows), uint32(e % uint32(row)), x, u)
            syncwarp()
            w = sm[0]  # read after it: or the assembler adds up the first before the last is asked
            for u in range(room):
                total += x[u] * w
            cuda.syncthreads()
        if total == float32(12345.678):
            out[0] = total

    return kernel(threads)(read_only)


@cache
def _writes(stores: int, threads: int) -> Any:
    """A loop of writes: `stores` of 16 bytes a thread, then a barrier."""
    from ..kernels.gpu import cuda, float32, kernel, store_four, uint32

    row = ROW_BYTES // 16

    def write_only(A: Any, turns: Any) -> None:
        tid, rows, x = uint32(cuda.threadIdx.x), uint32(A.shape[0] - 1), float32(cuda.threadIdx.x)
        for turn in range(turns):
            block = uint32(turn * cuda.gridDim.x + cuda.blockIdx.x)
            for u in range(stores):
                e = uint32(block * uint32(stores * threads) + tid + uint32(u * threads))
                r, c = uint32((e // uint32(row)) & rows), uint32(4 * (e % uint32(row)))
                store_four(A, r, c, (x, x, x, x))
            cuda.syncthreads()

    return kernel(threads)(write_only)


@cache
def _multiply_adds(threads: int) -> Any:
    from ..kernels.gpu import cuda, float32, kernel

    def multiply_add(turns: Any, factor: Any, out: Any) -> None:
        x = cuda.local.array(16, float32)
        for u in range(16):
            x[u] = float32(cuda.threadIdx.x + u)
        for _ in range(turns):
            for _again in range(8):
                for u in range(16):
                    x[u] = x[u] * factor + factor
        total = float32(0)
        for u in range(16):
            total += x[u]
        if total == float32(12345.678):
            out[0] = total

    return kernel(threads)(multiply_add)


@cache
def _nothing() -> Any:
    from ..kernels.gpu import float32, kernel

    def nothing(out: Any) -> None:
        if out.size > 1:
            out[0] = float32(0)

    return kernel(256)(nothing)


def general() -> dict[str, float]:
    """Bytes a second of a copy (read and written), float32 operations a second, and a launch.

    The launch is of a kernel that does nothing, a block on each multiprocessor.
    """
    from ..kernels import gpu

    size = 1 << 30
    a, b = (gpu.cuda.device_array(size, np.uint8) for _ in range(2))
    copy = milliseconds([lambda: b.copy_to_device(a)])
    out = gpu.cuda.device_array(1, np.float32)
    empty = partial(gpu.launch, _nothing(), gpu.multiprocessors(), 256, 0, 0, (out,))
    return {
        "copy_bytes_per_second": 2e3 * size / copy["ms"],
        "float32_flops_per_second": bare_multiply_adds(8 * gpu.multiprocessors(), 256),
        "launch_seconds": milliseconds([empty])["ms"] / 1e3,
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


def rates(blocks: int, step: Any) -> dict[str, float]:
    """Bytes a second of bare reads and writes like those of a launch with so many blocks at a time.

    From and into an array that the L2 holds (l2), and one that it does not (dram). And float32
    operations a second, of as many threads.
    """
    place = blocks, step.threads, step.shared_bytes
    walked = L2_BYTES if step.sharing == 1 else DRAM_BYTES
    return {
        "l2_bytes_per_second": bare_reads(*place, walked, *step.under_way, step.sharing),
        "dram_bytes_per_second": bare_reads(*place, DRAM_BYTES, *step.under_way),
        "l2_written_bytes_per_second": bare_writes(*place, L2_BYTES, step.under_way[0]),
        "dram_written_bytes_per_second": bare_writes(*place, DRAM_BYTES, step.under_way[0]),
        "float32_flops_per_second": bare_multiply_adds(blocks, step.threads),
    }


def kernels(step: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """The kernels that `rates` runs for a launch, each with arguments of the types it takes."""
    from ..kernels import gpu

    loads, item = step.under_way
    A, B = (gpu.cuda.device_array((1, 1), np.uint16 if n == 2 else np.float32) for n in (item, 4))
    n, out = np.int64(1), gpu.cuda.device_array(1, np.float32)
    return [
        (_reads(loads, item, step.threads), (A, n, n, out)),
        (_writes(loads, step.threads), (B, n)),
        (_multiply_adds(step.threads), (n, np.float32(1), out)),
    ]


@cache
def bare_multiply_adds(blocks: int, threads: int) -> float:
    """Float32 operations a second of so many blocks, each thread with 16 sums of its own."""
    from ..kernels import gpu

    turns, out = 4096, gpu.cuda.device_array(1, np.float32)
    args = (np.int64(turns), np.float32(0.5), out)
    call = partial(gpu.launch, _multiply_adds(threads), blocks, threads, 0, 0, args)
    ms = float(milliseconds([call], seconds=0.02)["ms"])
    return 2e3 * blocks * threads * turns * 8 * 16 / ms


@cache
def bare_reads(
    blocks: int, threads: int, shared_bytes: int, size: int, loads: int, item: int, sharing: int = 1
) -> float:
    """Bytes a second that the loop of reads gets from an array of `size` bytes."""
    from ..kernels import gpu

    A, out = _array(size, 2 if item == 2 else 4), gpu.cuda.device_array(1, np.float32)
    turns = max(1, round(MOVED_BYTES / (blocks * threads * loads * item)))
    args = (A, np.int64(turns), np.int64(sharing), out)
    function, room = _reads(loads, item, threads), max(4, shared_bytes)
    call = partial(gpu.launch, function, blocks, threads, room, 0, args)
    ms = float(milliseconds([call], seconds=0.02)["ms"])
    return 1e3 * blocks * threads * turns * loads * item / ms


@cache
def bare_writes(blocks: int, threads: int, shared_bytes: int, size: int, stores: int) -> float:
    """Bytes a second that the loop of writes gets into an array of `size` bytes."""
    from ..kernels import gpu

    turns = max(1, round(MOVED_BYTES / (blocks * threads * stores * 16)))
    args = (_array(size, 4), np.int64(turns))
    call = partial(gpu.launch, _writes(stores, threads), blocks, threads, shared_bytes, 0, args)
    ms = float(milliseconds([call], seconds=0.02)["ms"])
    return 1e3 * blocks * threads * turns * stores * 16 / ms


@cache
def _array(size: int, item: int) -> Any:
    from ..kernels.gpu import cuda

    dtype = np.uint16 if item == 2 else np.float32
    return cuda.to_device(np.zeros((size // ROW_BYTES, ROW_BYTES // item), dtype))
