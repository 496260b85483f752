"""What the GPU can do at most, measured: a copy, multiply-adds, and bare reads.

A kernel with few threads cannot keep enough reads under way to reach the rate of a copy. So for
each launch a bare loop of reads runs with as many blocks, threads and bytes of shared memory as the
kernel has on the GPU at a time, eight reads a thread under way, once over 16 MB, which the L2
holds, and once over 512 MB, which it does not. Those are the rates that its bytes are held against.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .timing import milliseconds

L2_ROWS = 4 * 1024  # of 1024 floats
DRAM_ROWS = 128 * 1024
READ_BYTES = 2e9


@cache
def _reads() -> Any:
    from ..kernels.gpu import cuda, float32, kernel, load, uint32

    def read_only(A: Any, turns: Any, out: Any) -> None:
        tid, threads = uint32(cuda.threadIdx.x), uint32(cuda.blockDim.x)
        rows = uint32(A.shape[0] - 1)
        x = cuda.local.array(8, float32)
        total = float32(0)
        for turn in range(turns):
            start = uint32(turn * cuda.gridDim.x + cuda.blockIdx.x) * uint32(8) * threads + tid
            for u in range(8):
                e = uint32(start + uint32(u) * threads)
                x[u] = load(A, uint32((e >> uint32(10)) & rows), uint32(e & uint32(1023)))
            for u in range(8):
                total += x[u]
        if total == float32(12345.678):
            out[0] = total

    return kernel(read_only)


@cache
def _multiply_adds() -> Any:
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

    return kernel(multiply_add)


def general() -> dict[str, float]:
    """Bytes a second of a copy (read and written), and float32 operations a second."""
    from ..kernels import gpu

    size = 1 << 30
    a, b = (gpu.cuda.device_array(size, np.uint8) for _ in range(2))
    copy = milliseconds([lambda: b.copy_to_device(a)])
    out = gpu.cuda.device_array(1, np.float32)
    blocks, threads, turns = 8 * gpu.multiprocessors(), 256, 4096
    args = (np.int64(turns), np.float32(0.5), out)
    fma = milliseconds([lambda: gpu.launch(_multiply_adds(), blocks, threads, 0, 0, args)])
    return {
        "copy_bytes_per_second": 2e3 * size / copy["ms"],
        "float32_flops_per_second": 2e3 * blocks * threads * turns * 8 * 16 / fma["ms"],
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


@cache
def bare_reads(blocks: int, threads: int, shared_bytes: int, rows: int) -> float:
    """Bytes a second that a loop of reads gets from an array of `rows` x 1024 floats."""
    from ..kernels import gpu

    A, out = _array(rows), _array(1)[0]
    turns = max(1, round(READ_BYTES / (blocks * threads * 32)))
    args = (A, np.int64(turns), out)
    found = milliseconds(
        [lambda: gpu.launch(_reads(), blocks, threads, shared_bytes, 0, args)], seconds=0.02
    )
    return 1e3 * blocks * threads * turns * 32 / float(found["ms"])


@cache
def _array(rows: int) -> Any:
    from ..kernels.gpu import cuda

    return cuda.to_device(np.zeros((rows, 1024), np.float32))
