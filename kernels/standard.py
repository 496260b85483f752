"""Standard attention: three kernels, between which S and P (N x N) go through HBM.

The products are tiled through shared memory and registers as in the flash kernels, so what differs
is where the N x N matrices go, not how well the arithmetic is done.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import masks, tiles
from .dropout import kept
from .gpu import (
    cuda,
    exp2,
    float32,
    in_fours,
    int32,
    kernel,
    load,
    load_four,
    log,
    store_four,
    uint32,
)
from .masks import LOG2E, Features
from .tiles import Layout, Tile

MOST_LOADS = 32  # with which a thread of the second kernel fills its registers


def scores_arrangement(tile: Tile) -> dict[str, int]:
    """Where in shared memory the tiles of the first kernel lie."""
    place = Layout(tile.TX)
    return {
        "Qi": place.place(tile.Br, tile.LD),
        "Kj": place.place(tile.Bc, tile.LD),
        "mask": place.place(tile.Br, tile.LP),
        "bytes": place.bytes,
    }


def values_arrangement(tile: Tile) -> dict[str, int]:
    """Where in shared memory the tiles of the third kernel lie."""
    place = Layout(tile.TX)
    return {
        "Oi": place.place(tile.Br, tile.LD),
        "Vj": place.place(tile.Bc, tile.LD),
        "Pij": place.place(tile.Br, tile.LP),
        "bytes": place.bytes,
    }


@cache
def scores(tile: Tile, f: Features) -> Any:
    """S = QKᵀ, scaled and masked, a block for each row tile.

    Line 1 of Algorithm 0 of Dao et al. 2022 (arXiv:2205.14135). S (batch, heads, Nq, Nk) is float32
    and in base 2, log2(e) times the scores. No tile is skipped.
    """
    Br, Bc, d, RM, RN, TY, TX = tile.Br, tile.Bc, tile.d, tile.RM, tile.RN, tile.TY, tile.TX
    LP, threads, RM4, RMN = tile.LP, tile.threads, 4 * tile.RM, tile.RM * tile.RN
    at = scores_arrangement(tile)
    sQ, sK, sMask = at["Qi"], at["Kj"], at["mask"]
    has_mask, tall, broad = bool(f.mask), f.tall, f.broad
    load_Q, load_K = tiles.stage(Br, d, threads, f.dtype), tiles.stage(Bc, d, threads, f.dtype)
    load_mask, QKt = masks.stage_mask(Br, Bc, threads, f), tiles.rows_by_rows(tile)
    full, counts = masks.full(Br, Bc, f), masks.counts(f)

    @kernel(threads)
    def standard_scores(
        Q, K, S, keys, mask, layout, lo, hi, scale, group, seed, threshold, factor
    ):  # fmt: skip
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        ty, tx = int32(uint32(tid) // uint32(TX)), int32(uint32(tid) % uint32(TX))
        H, Nq, Nk = Q.shape[1], Q.shape[2], K.shape[2]
        Tr = (Nq + Br - 1) // Br
        i0 = cuda.blockIdx.x % Tr * Br
        h, b = cuda.blockIdx.x // Tr % H, cuda.blockIdx.x // Tr // H
        Kh, Sh = K[b, h // group], S[b, h]
        x = cuda.local.array(RM4, float32)
        Sij = cuda.local.array(RMN, float32)
        load_Q(Q[b, h], i0, Nq, sm, sQ, tid)
        for j0 in range(0, Nk, Bc):
            load_K(Kh, j0, Nk, sm, sK, tid)
            if has_mask:
                load_mask(mask[b, h], i0, j0, Nq, Nk, sm, sMask, LP, 1, tid)
            cuda.syncthreads()
            for n in range(RMN):
                Sij[n] = float32(0)
            QKt(sm, sQ, sK, x, Sij, ty, tx)
            partial = not full(i0, j0, Nk, lo, hi)
            for m in range(RM):
                row = ty + m * TY
                for n in range(RN):
                    col = tx + n * TX
                    s = Sij[m * RN + n] * scale
                    if partial:
                        bias = float32(0)
                        if has_mask:
                            bias = sm[sMask + (row if tall else 0) * LP + (col if broad else 0)]
                        s = s + bias
                        if bias == -float32(float("inf")) or not counts(
                            i0 + row, j0 + col, Nk, lo, hi, b, keys
                        ):
                            s = -float32(float("inf"))
                    if i0 + row < Nq and j0 + col < Nk:
                        Sh[i0 + row, j0 + col] = s
            cuda.syncthreads()

    return standard_scores


@cache
def softmax(threads: int, loads: int) -> Any:
    """P = softmax(S), a block for each row, and the logsumexp L, which is not part of Algorithm 0.

    loads: of four numbers each, with which a thread takes its share of a row into registers, so
    that S is read once. 0: a row does not fit, and the statistics are taken online in a first pass
    (Algorithm 3 of Milakov & Gimelshein 2018, arXiv:1805.02867).
    """
    ln2, held, room = 1 / LOG2E, 4 * loads, max(1, 4 * loads)

    @kernel(threads)
    def standard_softmax(S, P, L):
        sm = cuda.shared.array(0, float32)  # a maximum and a sum of each thread
        tid = int32(cuda.threadIdx.x)
        H, Nq, Nk = S.shape[1], S.shape[2], S.shape[3]
        i, bh = cuda.blockIdx.x % Nq, cuda.blockIdx.x // Nq
        h, b = bh % H, bh // H
        Sh, Ph = S[b, h], P[b, h]
        x = cuda.local.array(room, float32)
        m = -float32(float("inf"))
        l = float32(0)
        fours = in_fours(Sh)  # then Nk is a multiple of 4, too
        for n in range(held):
            x[n] = m
        if fours:
            for u in range(loads):
                c = 4 * (tid + u * threads)
                if c < Nk:
                    x[4 * u], x[4 * u + 1], x[4 * u + 2], x[4 * u + 3] = load_four(
                        Sh, uint32(i), uint32(c)
                    )
        else:
            for n in range(held):
                if tid + n * threads < Nk:
                    x[n] = load(Sh, uint32(i), uint32(tid + n * threads))
        for n in range(held):
            m = max(m, x[n])
        for c in range(tid, 0 if held else Nk, threads):
            s = load(Sh, uint32(i), uint32(c))
            m_new = max(m, s)
            shift = m_new if m_new != -float32(float("inf")) else float32(0)
            l = l * exp2(m - shift) + exp2(s - shift)
            m = m_new
        own = m
        sm[tid] = m
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if tid < half:
                sm[tid] = max(sm[tid], sm[tid + half])
            cuda.syncthreads()
            half //= 2
        m = sm[0]
        shift = m if m != -float32(float("inf")) else float32(0)
        for n in range(held):
            x[n] = exp2(x[n] - shift)
            l += x[n]
        if not held:
            l *= exp2(own - shift)
        sm[threads + tid] = l
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if tid < half:
                sm[threads + tid] += sm[threads + tid + half]
            cuda.syncthreads()
            half //= 2
        l = sm[threads]
        over = float32(1) / l if l != float32(0) else float32(0)
        if fours:
            for u in range(loads):
                c = 4 * (tid + u * threads)
                if c < Nk:
                    p0, p1, p2, p3 = x[4 * u], x[4 * u + 1], x[4 * u + 2], x[4 * u + 3]
                    four = p0 * over, p1 * over, p2 * over, p3 * over
                    store_four(Ph, uint32(i), uint32(c), four)
        else:
            for n in range(held):
                if tid + n * threads < Nk:
                    Ph[i, tid + n * threads] = x[n] * over
        for c in range(tid, 0 if held else Nk, threads):
            Ph[i, c] = exp2(load(Sh, uint32(i), uint32(c)) - shift) * over
        if tid == 0:
            L[b, h, i] = shift * float32(ln2) + log(l)

    return standard_softmax


@cache
def values(tile: Tile, f: Features) -> Any:
    """O = PV, a block for each row tile; dropout acts on P as it is read. Line 3 of Algorithm 0.

    A weight that is 0 takes nothing from V: P does not say whether it was masked or underflowed.
    """
    Br, Bc, d, TX = tile.Br, tile.Bc, tile.d, tile.TX
    LP, threads, RM4, RMD = tile.LP, tile.threads, 4 * tile.RM, tile.RM * tile.RD
    at = values_arrangement(tile)
    sO, sV, sP = at["Oi"], at["Vj"], at["Pij"]
    dropout = f.dropout
    load_V, store_O = tiles.stage(Bc, d, threads, f.dtype), tiles.unstage(Br, d, threads, f.dtype)
    load_P = tiles.stage_block(Br, Bc, threads, "float32")
    PV, weigh, put = tiles.rows_by_columns(tile), tiles.weigh(tile, zeros=False), tiles.put(tile)

    @kernel(threads)
    def standard_values(
        P, V, O, keys, mask, layout, lo, hi, scale, group, seed, threshold, factor
    ):  # fmt: skip
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        ty, tx = int32(uint32(tid) // uint32(TX)), int32(uint32(tid) % uint32(TX))
        H, Nq, Nk = O.shape[1], O.shape[2], V.shape[2]
        Tr = (Nq + Br - 1) // Br
        i0 = cuda.blockIdx.x % Tr * Br
        h, b = cuda.blockIdx.x // Tr % H, cuda.blockIdx.x // Tr // H
        Vh, Ph = V[b, h // group], P[b, h]
        x = cuda.local.array(RM4, float32)
        Oi = cuda.local.array(RMD, float32)
        for n in range(RMD):
            Oi[n] = float32(0)
        for j0 in range(0, Nk, Bc):
            load_P(Ph, i0, Nq, j0, Nk, sm, sP, tid)
            bad = load_V(Vh, j0, Nk, sm, sV, tid)
            if dropout:
                cuda.syncthreads()
                for e in range(tid, Br * Bc, threads):
                    at_e = sP + e // Bc * LP + e % Bc
                    row, col = i0 + e // Bc, j0 + e % Bc
                    sm[at_e] = kept(sm[at_e], seed, threshold, factor, b, h, row, col)
            if cuda.syncthreads_or(1 if bad else 0) != 0:
                weigh(sm, sP, sV, Oi, ty, tx)
            else:
                PV(sm, sP, sV, x, Oi, ty, tx)
            cuda.syncthreads()
        put(sm, sO, Oi, ty, tx)
        cuda.syncthreads()
        store_O(O[b, h], i0, Nq, sm, sO, tid)

    return standard_values
