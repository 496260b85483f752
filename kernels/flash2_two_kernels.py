"""FlashAttention-2's backward pass without atomics: dK and dV, then dQ; the same bits every time.

D = rowsum(dO ∘ O) as in flash2_backward; then dK and dV with a block for each key tile, and dQ with
a block for each query tile. S and dP are computed twice, which is the price for adding up dQ in one
place. The form of Triton's fused-attention tutorial.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import gradients, masks, tiles
from .dropout import kept
from .gpu import cuda, exp2, float32, int32, kernel, load, uint32
from .masks import LOG2E, Features
from .tiles import Layout, Tile


def queries_arrangement(tile: Tile) -> dict[str, int]:
    """Where in shared memory the tiles of `queries` lie: Q and dO stay, K and V pass."""
    place = Layout(tile.TX)
    return {
        "Qi": place.place(tile.Br, tile.LD),
        "dOi": place.place(tile.Br, tile.LD),
        "Kj": place.place(tile.Bc, tile.LD),
        "Vj": place.place(tile.Bc, tile.LD),
        "scores": place.place(tile.Br, tile.LP),
        "Li": place.place(tile.Br, 1),
        "Di": place.place(tile.Br, 1),
        "bytes": place.bytes,
    }


@cache
def keys_and_values(tile: Tile, f: Features) -> Any:
    """dK and dV, a block for each key tile and key head.

    Algorithm 2 of Dao 2023 (arXiv:2307.08691) without dQ, see flash2_backward.
    """
    Bk, Bq, d, threads, masked = tile.Br, tile.Bc, tile.d, tile.threads, f.masked
    TX, LP, RM4, RMN, RMD = tile.TX, tile.LP, 4 * tile.RM, tile.RM * tile.RN, tile.RM * tile.RD
    at = gradients.arrangement(tile)
    sK, sV, sQ, sdO, sP, sL, sD = (
        at[name] for name in ("Kj", "Vj", "Qi", "dOi", "scores", "Li", "Di")
    )
    has_mask, log2e, ln2 = bool(f.mask), LOG2E, 1 / LOG2E
    load_KV, load_Q = tiles.stage(Bk, d, threads, f.dtype), tiles.stage(Bq, d, threads, f.dtype)
    load_mask, store = masks.stage_mask(Bq, Bk, threads, f), tiles.unstage(Bk, d, threads, f.dtype)
    weights, times, put = gradients.weights(tile, f), gradients.times(tile, f), tiles.put(tile)
    visited = masks.visited(Bq, Bk, f)

    @kernel(threads)
    def backward_dKdV(
        Q, K, V, dO, L, D, dK, dV,
        keys, mask, layout, lo, hi, scale, group, seed, threshold, factor,
    ):  # fmt: skip
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        ty, tx = int32(uint32(tid) // uint32(TX)), int32(uint32(tid) % uint32(TX))
        H, Nq, Nk = K.shape[1], Q.shape[2], K.shape[2]
        Tc = (Nk + Bk - 1) // Bk
        j0 = cuda.blockIdx.x % Tc * Bk
        kh, b = cuda.blockIdx.x // Tc % H, cuda.blockIdx.x // Tc // H
        x = cuda.local.array(RM4, float32)
        Pji = cuda.local.array(RMN, float32)
        dSji = cuda.local.array(RMN, float32)
        dKj = cuda.local.array(RMD, float32)
        dVj = cuda.local.array(RMD, float32)
        for n in range(RMD):
            dKj[n] = float32(0)
            dVj[n] = float32(0)
        load_KV(K[b, kh], j0, Nk, sm, sK, tid)
        load_KV(V[b, kh], j0, Nk, sm, sV, tid)

        for h in range(kh * group, (kh + 1) * group):
            for i0 in range(0, Nq, Bq):
                if visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
                    bad = load_Q(Q[b, h], i0, Nq, sm, sQ, tid)
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

                    weights(
                        sm, i0, j0, Nq, Nk, lo, hi, b, h, keys, scale, seed, threshold, factor,
                        x, Pji, dSji, ty, tx,
                    )  # fmt: skip
                    cuda.syncthreads()
                    times(sm, Pji, sdO, bad, x, dVj, ty, tx)  # dV += Pᵀ dO
                    times(sm, dSji, sQ, bad, x, dKj, ty, tx)  # dK += dSᵀ Q

        for n in range(RMD):
            dKj[n] *= scale * float32(ln2)
        cuda.syncthreads()  # no tile may have been visited since K_j came on chip
        put(sm, sK, dKj, ty, tx)
        put(sm, sV, dVj, ty, tx)
        cuda.syncthreads()
        store(dK[b, kh], j0, Nk, sm, sK, tid)
        store(dV[b, kh], j0, Nk, sm, sV, tid)

    return backward_dKdV


@cache
def queries(tile: Tile, f: Features) -> Any:
    """dQ, a block for each query tile: dQ += dS K over the key tiles. Line 15 of Algorithm 2."""
    Br, Bc, d, RM, RN, RD = tile.Br, tile.Bc, tile.d, tile.RM, tile.RN, tile.RD
    TY, TX, LP, threads = tile.TY, tile.TX, tile.LP, tile.threads
    RM4, RMN, RMD = 4 * RM, RM * RN, RM * RD
    at = queries_arrangement(tile)
    sQ, sdO, sK, sV, sP, sL, sD = (
        at[name] for name in ("Qi", "dOi", "Kj", "Vj", "scores", "Li", "Di")
    )
    masked, banded, has_mask, tall, broad = f.masked, f.band, bool(f.mask), f.tall, f.broad
    dropout, log2e, ln2 = f.dropout, LOG2E, 1 / LOG2E
    load_Q = tiles.stage(Br, d, threads, f.dtype)
    load_KV = tiles.stage(Bc, d, threads, f.dtype)
    load_mask = masks.stage_mask(Br, Bc, threads, f)
    store = tiles.unstage(Br, d, threads, f.dtype)
    product, accumulate = tiles.rows_by_rows(tile), tiles.rows_by_columns(tile)
    weigh, put = tiles.weigh(tile), tiles.put(tile)
    visited, full, counts = masks.visited(Br, Bc, f), masks.full(Br, Bc, f), masks.counts(f)

    @kernel(threads)
    def backward_dQ(
        Q, K, V, dO, L, D, dQ,
        keys, mask, layout, lo, hi, scale, group, seed, threshold, factor,
    ):  # fmt: skip
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        ty, tx = int32(uint32(tid) // uint32(TX)), int32(uint32(tid) % uint32(TX))
        H, Nq, Nk = Q.shape[1], Q.shape[2], K.shape[2]
        Tr = (Nq + Br - 1) // Br
        i0 = (Tr - 1 - cuda.blockIdx.x % Tr) * Br
        h, b = cuda.blockIdx.x // Tr % H, cuda.blockIdx.x // Tr // H
        Kh, Vh = K[b, h // group], V[b, h // group]
        x = cuda.local.array(RM4, float32)
        Sij = cuda.local.array(RMN, float32)
        dSij = cuda.local.array(RMN, float32)
        dQi = cuda.local.array(RMD, float32)
        for n in range(RMD):
            dQi[n] = float32(0)
        load_Q(Q[b, h], i0, Nq, sm, sQ, tid)
        load_Q(dO[b, h], i0, Nq, sm, sdO, tid)
        for r in range(tid, Br, threads):
            sm[sL + r] = -float32(float("inf"))
            sm[sD + r] = float32(0)
            if i0 + r < Nq:
                sm[sL + r] = load(L[b], uint32(h), uint32(i0 + r)) * float32(log2e)
                sm[sD + r] = load(D[b], uint32(h), uint32(i0 + r))

        j_first, j_stop = 0, Nk
        if banded:
            j_first = max(0, (i0 + lo) // Bc * Bc)
            j_stop = min(Nk, min(i0 + Br, Nq) + hi)
        for j0 in range(j_first, j_stop, Bc):
            if visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
                bad = load_KV(Kh, j0, Nk, sm, sK, tid)
                load_KV(Vh, j0, Nk, sm, sV, tid)
                if has_mask:
                    load_mask(mask[b, h], i0, j0, Nq, Nk, sm, sP, LP, 1, tid)
                if masked:
                    bad = cuda.syncthreads_or(1 if bad else 0) != 0
                else:
                    cuda.syncthreads()

                for n in range(RMN):
                    Sij[n] = float32(0)
                    dSij[n] = float32(0)
                product(sm, sQ, sK, x, Sij, ty, tx)  # S = QKᵀ
                product(sm, sdO, sV, x, dSij, ty, tx)  # dP = dO Vᵀ
                partial = not full(i0, j0, Nk, lo, hi)
                for m in range(RM):
                    row = ty + m * TY
                    lse, D_i = sm[sL + row], sm[sD + row]
                    for n in range(RN):
                        col = tx + n * TX
                        s = Sij[m * RN + n] * scale
                        live = True
                        if partial:
                            live = counts(i0 + row, j0 + col, Nk, lo, hi, b, keys)
                            if has_mask and live:
                                bias = sm[sP + (row if tall else 0) * LP + (col if broad else 0)]
                                s = s + bias
                                live = bias != -float32(float("inf"))
                        ds = -float32(0.0)  # takes nothing from K, see tiles.weigh
                        if live:
                            dp = dSij[m * RN + n]
                            p = exp2(s - lse) if lse != -float32(float("inf")) else float32(0)
                            if dropout:
                                dp = kept(dp, seed, threshold, factor, b, h, i0 + row, j0 + col)
                            ds = p * (dp - D_i) + float32(0)
                        dSij[m * RN + n] = ds
                cuda.syncthreads()
                for m in range(RM):
                    for n in range(RN):
                        sm[sP + (ty + m * TY) * LP + tx + n * TX] = dSij[m * RN + n]
                cuda.syncthreads()
                if masked and bad:
                    weigh(sm, sP, sK, dQi, ty, tx)
                else:
                    accumulate(sm, sP, sK, x, dQi, ty, tx)  # dQ += dS K
                cuda.syncthreads()

        for n in range(RMD):
            dQi[n] *= scale * float32(ln2)
        cuda.syncthreads()  # no tile may have been visited since Q_i came on chip
        put(sm, sQ, dQi, ty, tx)
        cuda.syncthreads()
        store(dQ[b, h], i0, Nq, sm, sQ, tid)

    return backward_dQ
