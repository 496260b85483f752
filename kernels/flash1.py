"""FlashAttention: one block per head, K and V in the outer loop; O, l and m go back to HBM."""

from __future__ import annotations

from functools import cache
from typing import Any

from . import masks, tiles
from .dropout import kept
from .gpu import cuda, exp2, float32, int32, kernel, load, load4, log, narrow, uint32
from .masks import LOG2E, Features
from .tiles import Layout, Tile


def arrangement(tile: Tile) -> dict[str, int]:
    """Where in shared memory the tiles lie, and how many bytes that takes.

    Columns beyond d are read past the end of V_j and thrown away, so what follows it, P_ij and Q_i,
    may not change while others still multiply; O_i does.
    """
    place = Layout(tile.TX)
    return {
        "Kj": place.place(tile.Bc, tile.LD),
        "Vj": place.place(tile.Bc, tile.LD),
        "Pij": place.place(tile.Br, tile.LP),
        "Qi": place.place(tile.Br, tile.LD),
        "Oi": place.place(tile.Br, tile.LD),
        "maxima": place.place(tile.Br, tile.TX),
        "sums": place.place(tile.Br, tile.TX),
        "li": place.place(tile.Br, 1),
        "mi": place.place(tile.Br, 1),
        "bytes": place.bytes,
    }


@cache
def flash_attention_1(tile: Tile, f: Features) -> Any:
    """Algorithms 1 and 2 of Dao et al. 2022 (arXiv:2205.14135), a block for each head.

    Q (batch, heads, Nq, d), K and V (batch, key heads, Nk, d); writes O (batch, heads, Nq, d), l
    and m (batch, heads, Nq), all float32: the accumulators live in HBM. The initial O, l, m are
    written and read, as printed. m is the maximum of base-2 scores, log2(e) times the paper's.
    """
    Br, Bc, d, RM, RN, RD = tile.Br, tile.Bc, tile.d, tile.RM, tile.RN, tile.RD
    TY, TX, LD, LP, threads = tile.TY, tile.TX, tile.LD, tile.LP, tile.threads
    RM4, RMN, RMD, RS = 4 * RM, RM * RN, RM * RD, -(-Br // threads)
    at = arrangement(tile)
    sQ, sK, sV, sO, sP = at["Qi"], at["Kj"], at["Vj"], at["Oi"], at["Pij"]
    sMax, sSum, sl, sm_ = at["maxima"], at["sums"], at["li"], at["mi"]
    masked, has_mask, tall, broad, dropout = f.masked, bool(f.mask), f.tall, f.broad, f.dropout

    load_Q = tiles.stage(Br, d, threads, f.dtype)
    load_KV = tiles.stage(Bc, d, threads, f.dtype)
    load_O = tiles.stage(Br, d, threads, "float32")
    store_O = tiles.unstage(Br, d, threads, "float32")
    load_mask = masks.stage_mask(Br, Bc, threads, f)
    QKt, PV, weigh = tiles.rows_by_rows(tile), tiles.rows_by_columns(tile), tiles.weigh(tile)
    visited, full, counts = masks.visited(Br, Bc, f), masks.full(Br, Bc, f), masks.counts(f)

    @kernel(threads)
    def flash1(Q, K, V, O, l, m, keys, mask, layout, lo, hi, scale, group, seed, threshold, factor):
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        ty, tx = int32(uint32(tid) // uint32(TX)), int32(uint32(tid) % uint32(TX))
        H, Nq, Nk = Q.shape[1], Q.shape[2], K.shape[2]
        h, b = cuda.blockIdx.x % H, cuda.blockIdx.x // H
        Qh, Kh, Vh = Q[b, h], K[b, h // group], V[b, h // group]
        Oh, lh, mh = O[b, h], l[b], m[b]
        x = cuda.local.array(RM4, float32)
        Sij = cuda.local.array(RMN, float32)
        PVij = cuda.local.array(RMD, float32)
        m_ij = cuda.local.array(RM, float32)
        l_i = cuda.local.array(RS, float32)
        m_i = cuda.local.array(RS, float32)

        for e in range(tid, Nq * d, threads):  # line 2
            Oh[e // d, e % d] = float32(0)
        for i in range(tid, Nq, threads):
            lh[h, i] = float32(0)
            mh[h, i] = -float32(float("inf"))
        cuda.syncthreads()

        for j0 in range(0, Nk, Bc):  # line 5
            i_any = 0
            while i_any < Nq and not visited(i_any, j0, Nq, Nk, lo, hi, b, keys, layout):
                i_any += Br
            bad = False
            if i_any < Nq:
                load_KV(Kh, j0, Nk, sm, sK, tid)  # line 6
                bad = load_KV(Vh, j0, Nk, sm, sV, tid)
                if masked:
                    bad = cuda.syncthreads_or(1 if bad else 0) != 0
            for i0 in range(i_any, Nq, Br):  # line 7
                if visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
                    for n in range(RS):  # line 8; l and m are under way with what follows
                        r = tid + n * threads
                        l_i[n] = float32(0)
                        m_i[n] = -float32(float("inf"))
                        if r < Br and i0 + r < Nq:
                            l_i[n] = load(lh, uint32(h), uint32(i0 + r))
                            m_i[n] = load(mh, uint32(h), uint32(i0 + r))
                    load_Q(Qh, i0, Nq, sm, sQ, tid)
                    load_O(Oh, i0, Nq, sm, sO, tid)
                    for n in range(RS):
                        r = tid + n * threads
                        if r < Br:
                            sm[sl + r] = l_i[n]
                            sm[sm_ + r] = m_i[n]
                    if has_mask:
                        load_mask(mask[b, h], i0, j0, Nq, Nk, sm, sP, LP, 1, tid)
                    cuda.syncthreads()

                    for n in range(RMN):
                        Sij[n] = float32(0)
                    QKt(sm, sQ, sK, x, Sij, ty, tx)  # line 9
                    partial = not full(i0, j0, Nk, lo, hi)
                    for r in range(RM):
                        row = ty + r * TY
                        highest = -float32(float("inf"))
                        for n in range(RN):
                            col = tx + n * TX
                            s = Sij[r * RN + n] * scale
                            if partial:  # lines 10, 11
                                bias = float32(0)
                                if has_mask:
                                    bias = sm[
                                        sP + (row if tall else 0) * LP + (col if broad else 0)
                                    ]
                                s = s + bias
                                if bias == -float32(float("inf")) or not counts(
                                    i0 + row, j0 + col, Nk, lo, hi, b, keys
                                ):
                                    s = -float32(float("inf"))
                            Sij[r * RN + n] = s
                            highest = max(highest, s)
                        sm[sMax + row * TX + tx] = highest
                    cuda.syncthreads()

                    for r in range(RM):  # line 12
                        row = ty + r * TY
                        highest = -float32(float("inf"))
                        for n in range(0, TX, 4):
                            s0, s1, s2, s3 = load4(sm, sMax + row * TX + n)
                            highest = max(highest, max(max(s0, s1), max(s2, s3)))
                        m_ij[r] = highest
                        shift = highest if highest != -float32(float("inf")) else float32(0)
                        part = float32(0)
                        for n in range(RN):
                            s = Sij[r * RN + n]
                            p = exp2(s - shift)
                            part += p
                            if dropout:
                                col = j0 + tx + n * TX
                                p = kept(p, seed, threshold, factor, b, h, i0 + row, col)
                            if masked and s == -float32(float("inf")):
                                p = -float32(0.0)  # takes nothing from V, see tiles.weigh
                            sm[sP + row * LP + tx + n * TX] = p
                        sm[sSum + row * TX + tx] = part
                    cuda.syncthreads()

                    for n in range(RMD):
                        PVij[n] = float32(0)
                    if masked and bad:
                        weigh(sm, sP, sV, PVij, ty, tx)
                    else:
                        PV(sm, sP, sV, x, PVij, ty, tx)
                    for r in range(RM):
                        row = ty + r * TY
                        l_ij = float32(0)
                        for n in range(0, TX, 4):
                            s0, s1, s2, s3 = load4(sm, sSum + row * TX + n)
                            l_ij += (s0 + s1) + (s2 + s3)
                        li, mi = sm[sl + row], sm[sm_ + row]
                        m_new = max(mi, m_ij[r])  # line 13
                        shift = m_new if m_new != -float32(float("inf")) else float32(0)
                        old = exp2(mi - shift) * li
                        new = exp2(m_ij[r] - shift)
                        l_new = old + new * l_ij
                        over = float32(1) / l_new if l_new != float32(0) else float32(0)
                        old, new = old * over, new * over
                        for n in range(RD):  # lines 14, 15
                            c = n // 4 * 4 * TX + 4 * tx + n % 4
                            if c < d:
                                e = sO + row * LD + c
                                sm[e] = old * sm[e] + new * PVij[r * RD + n]
                        if tx == 0:
                            sm[sMax + row] = l_new
                            sm[sMax + Br + row] = m_new
                    cuda.syncthreads()
                    store_O(Oh, i0, Nq, sm, sO, tid)
                    for r in range(tid, min(Br, Nq - i0), threads):  # line 16
                        lh[h, i0 + r] = sm[sMax + r]
                        mh[h, i0 + r] = sm[sMax + Br + r]
                    cuda.syncthreads()

    return flash1


@cache
def finish(dtype: str, threads: int) -> Any:
    """L = m + log(l), and O in the dtype of Q if that is not float32; no part of Algorithm 1.

    A block for each row of O (batch, heads, Nq, d).
    """
    cast, ln2, to_stored = dtype != "float32", 1 / LOG2E, narrow(dtype)

    @kernel(threads)
    def finish1(O, l, m, L, rounded):
        Nq = O.shape[2]
        i, bh = cuda.blockIdx.x % Nq, cuda.blockIdx.x // Nq
        h, b = bh % O.shape[1], bh // O.shape[1]
        if cuda.threadIdx.x == 0:
            m_i = m[b, h, i]
            shift = m_i if m_i != -float32(float("inf")) else float32(0)
            L[b, h, i] = shift * float32(ln2) + log(l[b, h, i])
        if cast:
            for c in range(cuda.threadIdx.x, O.shape[3], threads):
                rounded[b, h, i, c] = to_stored(O[b, h, i, c])

    return finish1
