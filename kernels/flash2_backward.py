"""FlashAttention-2's backward pass without atomics: three kernels, the same bits every time.

D = rowsum(dO ∘ O); then dK and dV with a block for each key tile; then dQ with a block for each
query tile. The scores are computed twice, which is the price for adding up dQ in one place.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import masks, tiles
from .dropout import kept
from .gpu import cuda, exp2, float32, int32, kernel, load, uint32, widen
from .masks import LOG2E, Features
from .tiles import Layout, Tile


def arrangement(tile: Tile) -> dict[str, int]:
    """Where in shared memory the tiles of dK, dV or dQ lie: two that stay (Br rows), two that pass.

    `stats` holds L and D of the queries.
    """
    place = Layout()
    return {
        "stay0": place.place(tile.Br, tile.LD),
        "stay1": place.place(tile.Br, tile.LD),
        "pass0": place.place(tile.Bc, tile.LD),
        "pass1": place.place(tile.Bc, tile.LD),
        "scores": place.place(tile.Br, tile.LP),
        "stats": place.place(2, max(tile.Br, tile.Bc)),
        "bytes": place.bytes,
    }


@cache
def row_dots(rows: int, d: int, threads: int, dtype: str) -> Any:
    """D = rowsum(dO ∘ O), a block for each group of rows. Line 2 of Algorithm 2 of Dao 2023.

    dO, O (batch, heads, Nq, d); writes D (batch, heads, Nq).
    """
    stride = tiles.padded(d)
    to_float = widen(dtype)

    @kernel
    def backward_D(dO, O, D):
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        H, Nq = O.shape[1], O.shape[2]
        Tr = (Nq + rows - 1) // rows
        i0 = cuda.blockIdx.x % Tr * rows
        h, b = cuda.blockIdx.x // Tr % H, cuda.blockIdx.x // Tr // H
        Oh, dOh = O[b, h], dO[b, h]
        for e in range(tid, rows * d, threads):
            r, c = e // d, e % d
            if i0 + r < Nq:
                o = to_float(load(Oh, uint32(i0 + r), uint32(c)))
                do = to_float(load(dOh, uint32(i0 + r), uint32(c)))
                sm[r * stride + c] = o * do
        cuda.syncthreads()
        for r in range(tid, min(rows, Nq - i0), threads):
            total = float32(0)
            for c in range(d):
                total += sm[r * stride + c]
            D[b, h, i0 + r] = total

    return backward_D


@cache
def keys_and_values(tile: Tile, f: Features) -> Any:
    """dK and dV, a block for each key tile and key head. Lines 3 to 19 of Algorithm 2, without dQ.

    `tile` has keys as rows: Br is the paper's Bc. Everything is transposed: Sᵀ = K Qᵀ,
    dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dSᵀ Q. The query heads that share a key head come one after the
    other, while K_j and V_j stay.
    """
    Bk, Bq, d, RM, RN, RD = tile.Br, tile.Bc, tile.d, tile.RM, tile.RN, tile.RD
    TY, TX, LP, threads = tile.TY, tile.TX, tile.LP, tile.threads
    RM4, RMN, RMD = 4 * RM, RM * RN, RM * RD
    at = arrangement(tile)
    sK, sV, sQ, sdO = at["stay0"], at["stay1"], at["pass0"], at["pass1"]
    sP, sL = at["scores"], at["stats"]
    sD = sL + Bq
    masked, has_mask, tall, broad, dropout = f.masked, bool(f.mask), f.tall, f.broad, f.dropout
    log2e, ln2 = LOG2E, 1 / LOG2E
    load_KV = tiles.stage(Bk, d, threads, f.dtype)
    load_Q = tiles.stage(Bq, d, threads, f.dtype)
    load_mask = masks.stage_mask(Bq, Bk, threads, f)
    store = tiles.unstage(Bk, d, threads, f.dtype)
    product, accumulate = tiles.rows_by_rows(tile), tiles.rows_by_columns(tile)
    weigh, put = tiles.weigh(tile), tiles.put(tile)
    visited, full, counts = masks.visited(Bq, Bk, f), masks.full(Bq, Bk, f), masks.counts(f)

    @kernel
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
        Sji = cuda.local.array(RMN, float32)
        dSji = cuda.local.array(RMN, float32)
        dKj = cuda.local.array(RMD, float32)
        dVj = cuda.local.array(RMD, float32)
        for n in range(RMD):
            dKj[n] = float32(0)
            dVj[n] = float32(0)
        load_KV(K[b, kh], j0, Nk, sm, sK, tid)
        load_KV(V[b, kh], j0, Nk, sm, sV, tid)

        for h in range(kh * group, (kh + 1) * group):
            Qh, dOh = Q[b, h], dO[b, h]
            for i0 in range(0, Nq, Bq):
                if visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
                    bad = load_Q(Qh, i0, Nq, sm, sQ, tid)
                    bad = load_Q(dOh, i0, Nq, sm, sdO, tid) or bad
                    for r in range(tid, min(Bq, Nq - i0), threads):
                        sm[sL + r] = load(L[b], uint32(h), uint32(i0 + r)) * float32(log2e)
                        sm[sD + r] = load(D[b], uint32(h), uint32(i0 + r))
                    if has_mask:
                        load_mask(mask[b, h], i0, j0, Nq, Nk, sm, sP, 1, LP, tid)
                    if masked:
                        bad = cuda.syncthreads_or(1 if bad else 0) != 0
                    else:
                        cuda.syncthreads()

                    for n in range(RMN):
                        Sji[n] = float32(0)
                        dSji[n] = float32(0)
                    product(sm, sK, sQ, x, Sji, ty, tx)  # S = QKᵀ
                    product(sm, sV, sdO, x, dSji, ty, tx)  # dP = dO Vᵀ
                    partial = not full(i0, j0, Nk, lo, hi) or i0 + Bq > Nq
                    for m in range(RM):
                        key = ty + m * TY
                        for n in range(RN):
                            query = tx + n * TX
                            s = Sji[m * RN + n] * scale
                            live = True
                            if partial:
                                live = i0 + query < Nq and counts(
                                    i0 + query, j0 + key, Nk, lo, hi, b, keys
                                )
                                if has_mask and live:
                                    bias = sm[
                                        sP + (query if tall else 0) + (key if broad else 0) * LP
                                    ]
                                    s = s + bias
                                    live = bias != -float32(float("inf"))
                            p = -float32(0.0)  # takes nothing, see tiles.weigh
                            ds = -float32(0.0)
                            if live:
                                lse = sm[sL + query]
                                dp = dSji[m * RN + n]
                                p = exp2(s - lse) if lse != -float32(float("inf")) else float32(0)
                                z = p
                                if dropout:
                                    row, col = i0 + query, j0 + key
                                    z = kept(float32(1), seed, threshold, factor, b, h, row, col)
                                    dp = dp * z
                                    z = p * z
                                ds = p * (dp - sm[sD + query]) + float32(0)  # dS
                                p = z
                            Sji[m * RN + n] = p
                            dSji[m * RN + n] = ds
                    cuda.syncthreads()
                    for m in range(RM):
                        for n in range(RN):
                            sm[sP + (ty + m * TY) * LP + tx + n * TX] = Sji[m * RN + n]
                    cuda.syncthreads()
                    if masked and bad:
                        weigh(sm, sP, sdO, dVj, ty, tx)
                    else:
                        accumulate(sm, sP, sdO, x, dVj, ty, tx)  # dV += Pᵀ dO
                    cuda.syncthreads()
                    for m in range(RM):
                        for n in range(RN):
                            sm[sP + (ty + m * TY) * LP + tx + n * TX] = dSji[m * RN + n]
                    cuda.syncthreads()
                    if masked and bad:
                        weigh(sm, sP, sQ, dKj, ty, tx)
                    else:
                        accumulate(sm, sP, sQ, x, dKj, ty, tx)  # dK += dSᵀ Q
                    cuda.syncthreads()

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
    at = arrangement(tile)
    sQ, sdO, sK, sV = at["stay0"], at["stay1"], at["pass0"], at["pass1"]
    sP, sL = at["scores"], at["stats"]
    sD = sL + Br
    masked, banded, has_mask, tall, broad = f.masked, f.band, bool(f.mask), f.tall, f.broad
    dropout, log2e, ln2 = f.dropout, LOG2E, 1 / LOG2E
    load_Q = tiles.stage(Br, d, threads, f.dtype)
    load_KV = tiles.stage(Bc, d, threads, f.dtype)
    load_mask = masks.stage_mask(Br, Bc, threads, f)
    store = tiles.unstage(Br, d, threads, f.dtype)
    product, accumulate = tiles.rows_by_rows(tile), tiles.rows_by_columns(tile)
    weigh, put = tiles.weigh(tile), tiles.put(tile)
    visited, full, counts = masks.visited(Br, Bc, f), masks.full(Br, Bc, f), masks.counts(f)

    @kernel
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
