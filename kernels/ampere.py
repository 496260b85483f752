"""FlashAttention-2 on tensor cores: a warp multiplies tiles while the next ones are copied.

The tiling is that of flash2; what is new is how a block does its part. Q, K and V stay 16-bit, and
P is rounded to 16 bits for its product with V; sums are float32. For compute capability 8.0 and
newer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import padding, warp_tiles
from .gpu import cuda, float32, int32, kernel, log, types, uint32
from .masks import LOG2E, Features
from .ptx import warp
from .warp_tiles import WarpTile, afresh, edges, row_max, row_sum


def arrangement(tile: WarpTile) -> dict[str, int]:
    """Where in shared memory the tiles lie, in 16-bit elements, and how many bytes that takes.

    K and V have room for two tiles each: one is multiplied while the next arrives.
    """
    rows, columns = tile.Br * tile.d, tile.Bc * tile.d
    return {
        "Qi": 0,
        "Kj": rows,
        "Vj": rows + 2 * columns,
        "bytes": 2 * (rows + 4 * columns),
    }


@cache
def flash_attention_2(tile: WarpTile, f: Features) -> Any:
    """Algorithm 1 of Dao 2023 (arXiv:2307.08691), a block for each turn of its outer loop.

    Q (batch, heads, Nq, d), K and V (batch, key heads, Nk, d), 16-bit; writes O like Q, and the
    logsumexp L (batch, heads, Nq). m is the largest score before it is scaled, so scale > 0;
    weights are kept in base 2: exp(s) = exp2(s log2(e)). A tile without a real key is passed over.
    """
    Br, Bc, d, threads, rows = tile.Br, tile.Bc, tile.d, tile.threads, tile.rows
    at = arrangement(tile)
    sQ, sK, sV, stage_size = at["Qi"], at["Kj"], at["Vj"], Bc * d
    C, D, R2 = Bc // 8, d // 8, rows // 8  # columns of 8 of S and of O, and rows of a lane
    resident = d == 64 and not f.dropout  # Q_i stays in registers; for more there is no room
    K16, words, kept_words = d // 16, -(-Bc // 32), warp_tiles.kept_words(Bc, rows)
    banded, padded, dropout, ln2 = f.band, f.keys, f.dropout, 1 / LOG2E
    NQ, NS, NO = (d if resident else 16) * rows // 64, rows * Bc // 32, rows * d // 32
    load_Q, load_KV = warp_tiles.stage(Br, d, threads), warp_tiles.stage(Bc, d, threads)
    load_rows = warp_tiles.load_rows(rows, d)
    QKt = warp_tiles.rows_by_rows(rows, Bc, d, f.dtype, resident)
    PV = warp_tiles.rows_by_columns(rows, Bc, d, f.dtype)
    not_finite = warp_tiles.not_finite(Bc, d, threads, f.dtype)
    clear = warp_tiles.clear_not_finite(Bc, d, threads, f.dtype)
    add_not_finite = warp_tiles.add_not_finite(rows, Bc, d, f.dtype, dropout)
    find_next, all_real = padding.next_real(Bc), padding.all_real(Bc)
    clear_padding = warp_tiles.clear_padding(Bc, d, threads)
    draw, drop = warp_tiles.kept(Bc, rows), warp_tiles.drop(Bc, rows)
    put, store_O = warp_tiles.put(rows, d, d, f.dtype), warp_tiles.unstage(Br, d, threads)
    commit, wait_all_but_one = warp.cp_async_commit, warp.cp_async_wait(1)
    exp2, reciprocal = warp.exp2, warp.reciprocal

    @kernel(threads)
    def ampere(
        Q, K, V, O, L, keys, mask, layout, lo, hi, scale, group, seed, threshold, factor
    ):  # fmt: skip
        sm = cuda.shared.array(0, types.uint16)
        tid = uint32(cuda.threadIdx.x)
        lane, first = uint32(tid & 31), uint32(rows * (tid >> 5))  # first: of the warp's rows
        g, t = uint32(lane >> 2), uint32(lane & 3)
        H, Nq, Nk = Q.shape[1], Q.shape[2], K.shape[2]
        Tr, block = uint32((Nq + Br - 1) // Br), uint32(cuda.blockIdx.x)
        i0 = int32((Tr - 1 - block % Tr) * Br)  # causal: the longest rows first
        h, b = int32(block // Tr % uint32(H)), int32(block // Tr // uint32(H))
        Kh, Vh = K[b, h // group], V[b, h // group]
        Qi = cuda.local.array(NQ, uint32)
        Sij = cuda.local.array(NS, float32)
        Oi = cuda.local.array(NO, float32)
        li = cuda.local.array(R2, float32)  # of this lane's columns; added up at the end
        mi = cuda.local.array(R2, float32)
        kept = cuda.local.array(kept_words, uint32)
        real = cuda.local.array(words, uint32)  # a bit for each key of K_j
        next_real = cuda.local.array(words, uint32)
        for n in range(NO):
            Oi[n] = float32(0)
        for r in range(R2):
            li[r] = float32(0)
            mi[r] = -float32(float("inf"))
        j_first, j_stop = 0, Nk
        if banded:
            j_stop = min(Nk, min(i0 + Br, Nq) + hi)
            j_first = max(0, i0 + lo) // Bc * Bc if i0 + lo < j_stop else j_stop
        if padded:
            j_first = find_next(keys, b, j_first, i0 + lo, j_stop, next_real, lane)

        load_Q(Q[b, h], i0, Nq, sm, sQ, tid)  # load Q_i, K_j
        if j_first < j_stop:
            load_KV(Kh, j_first, Nk, sm, sK, tid)
        commit()
        if j_first < j_stop:
            load_KV(Vh, j_first, Nk, sm, sV, tid)
        commit()
        wait_all_but_one()
        cuda.syncthreads()
        if resident:
            for k in range(K16):
                load_rows(sm, sQ, first, k, Qi, k * (rows // 4), lane)

        stage, j_next = uint32(0), j_first
        for j0 in range(j_first, j_stop, Bc):
            if padded and j0 < j_next:
                continue  # no key is real
            now, later = uint32(stage * stage_size), uint32(uint32(stage ^ 1) * stage_size)
            j_next = j0 + Bc
            if padded:
                for w in range(words):
                    real[w] = next_real[w]
                j_next = find_next(keys, b, j_next, i0 + lo, j_stop, next_real, lane)
            if j_next < j_stop:
                load_KV(Kh, j_next, Nk, sm, uint32(sK + later), tid)  # load K_(j+1), under S and P
            commit()
            if dropout:
                draw(kept, afresh(seed), threshold, b, h, i0 + int32(first + g), int32(j0))
            for n in range(NS):
                Sij[n] = float32(0)
            QKt(sm, sQ, first, uint32(sK + now), Qi, Sij, lane)  # S = QKᵀ

            low, high, end = edges(i0, j0, Nk, lo, hi)
            whole = end >= Bc and (not banded or (low <= 1 - Br and high >= Bc - 1))
            if padded:
                whole = whole and all_real(real)
            if not whole:
                for r in range(R2):
                    for n in range(C):
                        for u in range(2):
                            col = int32(8 * n + 2 * t + u)
                            apart = col - int32(first + 8 * r + g)
                            if (
                                col >= end
                                or (banded and (apart < low or apart > high))
                                or (padded and real[n // 4] >> uint32(col % 32) & 1 == 0)
                            ):
                                e = 4 * (r // 2 * C + n) + 2 * (r % 2) + u
                                Sij[e] = -float32(float("inf"))

            for r in range(R2):
                m_new = mi[r]
                for n in range(C):
                    e = 4 * (r // 2 * C + n) + 2 * (r % 2)
                    m_new = max(m_new, max(Sij[e], Sij[e + 1]))
                m_new = row_max(m_new)
                shift = m_new * scale if m_new != -float32(float("inf")) else float32(0)
                alpha = exp2(mi[r] * scale - shift)
                mi[r] = m_new
                l = float32(0)
                for n in range(C):
                    e = 4 * (r // 2 * C + n) + 2 * (r % 2)
                    Sij[e] = exp2(Sij[e] * scale - shift)  # P overwrites S
                    Sij[e + 1] = exp2(Sij[e + 1] * scale - shift)
                    l += Sij[e] + Sij[e + 1]
                li[r] = li[r] * alpha + l
                for n in range(D):
                    e = 4 * (r // 2 * D + n) + 2 * (r % 2)
                    Oi[e] *= alpha
                    Oi[e + 1] *= alpha
            if dropout:
                drop(Sij, kept, float32(1))

            wait_all_but_one()  # V_j is there
            if padded and not whole:
                clear_padding(sm, uint32(sV + now), keys, b, j0, tid)
            if banded and not whole:
                found = not_finite(sm, uint32(sV + now), tid)
                if cuda.syncthreads_or(1 if found else 0):  # a masked weight takes nothing from V
                    add_not_finite(sm, uint32(sV + now), Oi, lane, first, low, high, kept)
                    cuda.syncthreads()
                    clear(sm, uint32(sV + now), tid)
                    cuda.syncthreads()
            else:
                cuda.syncthreads()
            if j_next < j_stop:
                load_KV(Vh, j_next, Nk, sm, uint32(sV + later), tid)  # load V_(j+1), under O
            commit()
            PV(sm, Sij, uint32(sV + now), Oi, lane)  # O += PV
            wait_all_but_one()  # K_(j+1) is there
            cuda.syncthreads()
            stage = uint32(stage ^ 1)

        for r in range(R2):
            l = row_sum(li[r])
            over = reciprocal(l) if l != float32(0) else float32(0)
            if dropout:
                over *= factor  # not P, which may be too large for float16 then
            for n in range(D):
                e = 4 * (r // 2 * D + n) + 2 * (r % 2)
                Oi[e] *= over
                Oi[e + 1] *= over
            row = i0 + first + 8 * r + g
            if t == 0 and row < Nq:
                shift = mi[r] * scale if mi[r] != -float32(float("inf")) else float32(0)
                L[b, h, row] = shift * float32(ln2) + log(l)  # write L_i
        put(sm, sQ, first, 0, Oi, lane)
        cuda.syncthreads()
        store_O(O[b, h], i0, Nq, sm, sQ, tid)  # write O_i

    return ampere
