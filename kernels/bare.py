"""Bare loops: one thing that kernels do, and no other, so that its time says how fast it can be.

`flashsim.measure.ceilings` runs them with the blocks, threads and shared memory of a kernel. Sums
that could not come out are written, so that no load or product can be left out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import tiles
from .gpu import (
    cuda,
    device,
    float32,
    int32,
    kernel,
    load,
    load_four,
    store_four,
    syncwarp,
    uint32,
)

ROW_BYTES = 4096  # of the arrays that are read and written


@cache
def reads(loads: int, item: int, threads: int) -> Any:
    """A loop of reads of A: `loads` of `item` bytes a thread under way, then a barrier.

    The blocks fall into `groups`, as large as each other: all blocks of a group read the same.
    """
    four = item == 16

    def fetch_four(A, r, c, x, u):
        x[4 * u], x[4 * u + 1], x[4 * u + 2], x[4 * u + 3] = load_four(A, r, uint32(4 * c))

    def fetch_one(A, r, c, x, u):
        x[u] = float32(load(A, r, c))

    fetch, room = device(fetch_four if four else fetch_one), loads * (4 if four else 1)
    row = ROW_BYTES // item  # loads

    @kernel(threads)
    def read_only(A, turns, groups, out):
        sm = cuda.shared.array(0, float32)
        tid = uint32(cuda.threadIdx.x)
        if tid == 0:
            sm[0] = float32(0)
        cuda.syncthreads()
        rows = uint32(A.shape[0] - 1)
        group = cuda.blockIdx.x * groups // cuda.gridDim.x
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

    return read_only


@cache
def staged(turn: Any, threads: int) -> Any:
    """A loop over tiles: as `turn` says, one of A and one of B come on chip, and B's may go back.

    turn: a launch.Turn; the blocks fall into groups as in `reads`.
    """
    rows, d, dtypes, back = turn
    load_A, load_B = (tiles.stage(rows, d, threads, dtype) for dtype in dtypes)
    store_B = tiles.unstage(rows, d, threads, dtypes[1])
    LD = tiles.padded(d)
    sB = rows * LD

    @kernel(threads)
    def stage_only(A, B, turns, groups, out):
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        group = cuda.blockIdx.x * groups // cuda.gridDim.x
        N, Tr = int32(A.shape[0]), uint32(A.shape[0] // rows)
        total = float32(0)
        for n in range(turns):
            first = int32(uint32(n * groups + group) % Tr) * rows
            load_A(A, first, N, sm, 0, tid)
            load_B(B, first, N, sm, sB, tid)
            cuda.syncthreads()
            total += sm[tid % rows * LD] + sm[sB + tid % rows * LD]
            if back:
                store_B(B, first, N, sm, sB, tid)
            cuda.syncthreads()
        if total == float32(12345.678):
            out[0] = total

    return stage_only


@cache
def writes(stores: int, threads: int) -> Any:
    """A loop of writes into A: `stores` of 16 bytes a thread, then a barrier."""
    row = ROW_BYTES // 16  # stores

    @kernel(threads)
    def write_only(A, turns):
        tid, rows, x = uint32(cuda.threadIdx.x), uint32(A.shape[0] - 1), float32(cuda.threadIdx.x)
        for turn in range(turns):
            block = uint32(turn * cuda.gridDim.x + cuda.blockIdx.x)
            for u in range(stores):
                e = uint32(block * uint32(stores * threads) + tid + uint32(u * threads))
                r, c = uint32((e // uint32(row)) & rows), uint32(4 * (e % uint32(row)))
                store_four(A, r, c, (x, x, x, x))
            cuda.syncthreads()

    return write_only


@cache
def multiply_adds(threads: int) -> Any:
    """A loop of multiply-adds: 128 a turn, into 16 sums that a thread has in registers."""

    @kernel(threads)
    def multiply_add(turns, factor, out):
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

    return multiply_add


@cache
def nothing(threads: int) -> Any:
    """A kernel that does nothing."""

    @kernel(threads)
    def do_nothing(out):
        if out.size > 1:
            out[0] = float32(0)

    return do_nothing
