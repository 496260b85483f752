"""FlashAttention-2's backward pass: one block per key tile; dQ is added up in HBM by atomics."""

from __future__ import annotations

from functools import cache
from typing import Any

from . import gradients, masks, tiles
from .gpu import (
    cuda,
    device,
    float32,
    in_fours,
    int32,
    kernel,
    load,
    load_four,
    syncwarp,
    uint32,
    widen,
)
from .masks import LOG2E, Features
from .ptx.warp import shuffle_xor
from .tiles import Tile


def lanes(d: int) -> int:
    """How many lanes of a warp share a row in `row_dots`."""
    return next((n for n in (1, 2, 4, 8, 16) if 4 * n >= d), 32)


ROWS_AT_A_TIME = 4  # whose loads a lane of `row_dots` has under way


def loads_under_way(d: int, dtype: str) -> tuple[int, int]:
    """How many loads of O and of dO a lane of `row_dots` has, and the bytes of each."""
    wide = dtype == "float32"
    if wide and d % 4 == 0 and d <= 128:
        return 2 * ROWS_AT_A_TIME, 16
    return 2, 4 if wide else 2


@cache
def row_dots(rows: int, d: int, threads: int, dtype: str) -> Any:
    """D = rowsum(dO ∘ O), a block for each group of rows. Line 4 of Algorithm 2 of Dao 2023.

    dO, O (batch, heads, Nq, d); writes D (batch, heads, Nq). The lanes of a row add up each their
    part, and then the sums of each other. The block's sums are put side by side on chip, so that
    they leave in whole sectors: rows floats of shared memory.
    """
    together, to_float = lanes(d), widen(dtype)
    fours = dtype == "float32" and d % 4 == 0 and d <= 128  # then a lane has one load of a row
    at_once, ones, many = threads // together, -(-d // together), ROWS_AT_A_TIME
    halvings, room = tuple(n for n in (1, 2, 4, 8, 16) if n < together), 4 * many

    @device
    def fetch(A, i, last, c, x):
        for r in range(many):
            k = 4 * r
            x[k], x[k + 1], x[k + 2], x[k + 3] = float32(0), float32(0), float32(0), float32(0)
            if i + r * at_once < last and c < d:
                x[k], x[k + 1], x[k + 2], x[k + 3] = load_four(A, uint32(i + r * at_once), c)

    @device
    def put(sums, r, stop, lane, total):
        for apart in halvings:
            total += shuffle_xor(total, uint32(apart))
        if lane == 0 and r < stop:
            sums[r] = total

    @kernel(threads)
    def backward_D(dO, O, D):
        sums = cuda.shared.array(0, float32)
        tid = uint32(cuda.threadIdx.x)
        H, Nq = uint32(O.shape[1]), int32(O.shape[2])
        Tr, block = uint32(uint32(Nq + (rows - 1)) // uint32(rows)), uint32(cuda.blockIdx.x)
        i0, bh = int32(block % Tr * rows), uint32(block // Tr)
        Oh, dOh, Dh = O[bh // H, bh % H], dO[bh // H, bh % H], D[bh // H, bh % H]
        mine, lane = int32(tid // uint32(together)), uint32(tid % uint32(together))
        last = min(i0 + rows, Nq)
        if fours and in_fours(Oh) and in_fours(dOh):
            x = cuda.local.array(room, float32)
            y = cuda.local.array(room, float32)
            for first in range(i0, last, many * at_once):
                i = int32(first + mine)
                fetch(Oh, i, last, uint32(4 * lane), x)
                fetch(dOh, i, last, uint32(4 * lane), y)
                syncwarp()  # or the assembler waits for the first before it asks for the last
                for r in range(many):
                    k = 4 * r
                    total = (x[k] * y[k] + x[k + 1] * y[k + 1]) + (
                        x[k + 2] * y[k + 2] + x[k + 3] * y[k + 3]
                    )
                    put(sums, int32(i - i0 + r * at_once), last - i0, lane, total)
        else:
            for first in range(i0, last, at_once):
                i, total = int32(first + mine), float32(0)
                for n in range(ones):
                    c = uint32(lane + n * together)
                    if i < last and c < d:
                        x1 = to_float(load(Oh, uint32(i), c))
                        total += x1 * to_float(load(dOh, uint32(i), c))
                put(sums, int32(i - i0), last - i0, lane, total)
        cuda.syncthreads()
        for r in range(int32(tid), int32(last - i0), threads):
            Dh[i0 + r] = sums[r]

    return backward_D


@cache
def flash_attention_2_backward(tile: Tile, f: Features) -> Any:
    """Algorithm 2 of Dao 2023 (arXiv:2307.08691), a block for each turn of its outer loop.

    Q, dO (batch, heads, Nq, d), K, V (batch, key heads, Nk, d), L, D (batch, heads, Nq); writes dK,
    dV like K, and adds to dQ (batch, heads, Nq, d) in float32. In which order the blocks add is
    left open, and so are dQ's last bits. `tile` has keys as rows, see gradients. The query heads
    that share a key head come one after the other, while K_j and V_j stay.
    """
    Bk, Bq, d, threads, masked = tile.Br, tile.Bc, tile.d, tile.threads, f.masked
    TX, RM4 = tile.TX, 4 * max(tile.RM, tile.swapped.RM)
    LP, RMN, RMD, RMQ = tile.LP, tile.RM * tile.RN, tile.RM * tile.RD, tile.swapped.RM * tile.RD
    at = gradients.arrangement(tile)
    sK, sV, sQ, sdO, sP, sL, sD = (
        at[name] for name in ("Kj", "Vj", "Qi", "dOi", "scores", "Li", "Di")
    )
    has_mask, log2e, ln2 = bool(f.mask), LOG2E, 1 / LOG2E
    load_KV, load_Q = tiles.stage(Bk, d, threads, f.dtype), tiles.stage(Bq, d, threads, f.dtype)
    load_mask = masks.stage_mask(Bq, Bk, threads, f)
    store, add_to = tiles.unstage(Bk, d, threads, f.dtype), tiles.add_to(Bq, d, threads)
    put, put_dQ = tiles.put(tile), tiles.put(tile.swapped)
    weights, times = gradients.weights(tile, f), gradients.times(tile, f)
    transposed_times, visited = gradients.transposed_times(tile, f), masks.visited(Bq, Bk, f)

    @kernel(threads)
    def flash2_backward(
        Q, K, V, dO, L, D, dQ, dK, dV,
        keys, mask, layout, lo, hi, scale, group, seed, threshold, factor,
    ):  # fmt: skip
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        ty, tx = int32(uint32(tid) // uint32(TX)), int32(uint32(tid) % uint32(TX))
        H, Nq, Nk = K.shape[1], Q.shape[2], K.shape[2]
        Tc = (Nk + Bk - 1) // Bk
        j0 = cuda.blockIdx.x % Tc * Bk  # line 5
        kh, b = cuda.blockIdx.x // Tc % H, cuda.blockIdx.x // Tc // H
        x = cuda.local.array(RM4, float32)
        Pji = cuda.local.array(RMN, float32)
        dSji = cuda.local.array(RMN, float32)
        dKj = cuda.local.array(RMD, float32)
        dVj = cuda.local.array(RMD, float32)
        dQi = cuda.local.array(RMQ, float32)
        bad_K = load_KV(K[b, kh], j0, Nk, sm, sK, tid)  # line 6
        load_KV(V[b, kh], j0, Nk, sm, sV, tid)
        for n in range(RMD):  # line 7
            dKj[n] = float32(0)
            dVj[n] = float32(0)

        for h in range(kh * group, (kh + 1) * group):
            for i0 in range(0, Nq, Bq):  # line 8
                if visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
                    bad = load_Q(Q[b, h], i0, Nq, sm, sQ, tid) or bad_K  # line 9
                    bad = load_Q(dO[b, h], i0, Nq, sm, sdO, tid) or bad
                    for r in range(tid, min(Bq, Nq - i0), threads):
                        sm[sL + r] = load(L[b], uint32(h), uint32(i0 + r)) * float32(log2e)
                        sm[sD + r] = load(D[b], uint32(h), uint32(i0 + r))
                    if has_mask:
                        load_mask(mask[b, h], i0, j0, Nq, Nk, sm, sP, 1, LP, tid)
                    if masked:
                        bad = cuda.syncthreads_or(1 if bad else 0) != 0
                    else:
                        cuda.syncthreads()

                    weights(  # lines 10, 11, 13, 14
                        sm, i0, j0, Nq, Nk, lo, hi, b, h, keys, scale, seed, threshold, factor,
                        x, Pji, dSji, ty, tx,
                    )  # fmt: skip
                    cuda.syncthreads()
                    times(sm, Pji, sdO, bad, x, dVj, ty, tx)  # line 12: dV += Pᵀ dO
                    times(sm, dSji, sQ, bad, x, dKj, ty, tx)  # line 16: dK += dSᵀ Q
                    for n in range(RMQ):
                        dQi[n] = float32(0)
                    transposed_times(sm, dSji, sK, bad, x, dQi, ty, tx)  # line 15: dQ += dS K
                    for n in range(RMQ):
                        dQi[n] *= scale * float32(ln2)
                    put_dQ(sm, sQ, dQi, ty, tx)
                    cuda.syncthreads()
                    add_to(dQ[b, h], i0, Nq, sm, sQ, tid)
                    cuda.syncthreads()

        for n in range(RMD):
            dKj[n] *= scale * float32(ln2)
        cuda.syncthreads()  # no tile may have been visited since K_j came on chip
        put(sm, sK, dKj, ty, tx)
        put(sm, sV, dVj, ty, tx)
        cuda.syncthreads()
        store(dK[b, kh], j0, Nk, sm, sK, tid)  # line 18
        store(dV[b, kh], j0, Nk, sm, sV, tid)

    return flash2_backward
