"""FlashAttention-2: one block per query tile; O, l and m stay in registers until they are final."""

from __future__ import annotations

from functools import cache
from typing import Any

from . import masks, tiles
from .dropout import kept
from .gpu import cuda, exp2, float32, int32, kernel, load4, log, uint32
from .masks import LOG2E, Features
from .tiles import Layout, Tile


def arrangement(tile: Tile) -> dict[str, int]:
    """Where in shared memory the tiles lie, and how many bytes that takes."""
    place = Layout(tile.TX)
    return {
        "Qi": place.place(tile.Br, tile.LD),
        "Kj": place.place(tile.Bc, tile.LD),
        "Vj": place.place(tile.Bc, tile.LD),
        "Pij": place.place(tile.Br, tile.LP),
        "rows": place.place(tile.Br, tile.TX),
        "bytes": place.bytes,
    }


@cache
def flash_attention_2(tile: Tile, f: Features) -> Any:
    """Algorithm 1 of Dao 2023 (arXiv:2307.08691), a block for each turn of its outer loop.

    Q (batch, heads, Nq, d), K and V (batch, key heads, Nk, d); writes O like Q, and the logsumexp L
    (batch, heads, Nq). Scores are kept in base 2: exp(s) = exp2(s log2(e)). A block walks at most
    `span` keys: all of them here, some in split_kv, where O and L have a batch for each part.
    """
    Br, Bc, RM, RN, RD = tile.Br, tile.Bc, tile.RM, tile.RN, tile.RD
    TY, TX, LP, threads = tile.TY, tile.TX, tile.LP, tile.threads
    RM4, RMN, RMD = 4 * RM, RM * RN, RM * RD
    at = arrangement(tile)
    sQ, sK, sV, sP, sR = at["Qi"], at["Kj"], at["Vj"], at["Pij"], at["rows"]
    masked, banded, has_mask, tall, broad = f.masked, f.band, bool(f.mask), f.tall, f.broad
    dropout, ln2 = f.dropout, 1 / LOG2E

    load_Q = tiles.stage(Br, tile.d, threads, f.dtype)
    load_KV = tiles.stage(Bc, tile.d, threads, f.dtype)
    load_mask = masks.stage_mask(Br, Bc, threads, f)
    store_O = tiles.unstage(Br, tile.d, threads, f.stored)
    QKt, PV, weigh, put = (
        tiles.rows_by_rows(tile),
        tiles.rows_by_columns(tile),
        tiles.weigh(tile),
        tiles.put(tile),
    )
    visited, full, counts = masks.visited(Br, Bc, f), masks.full(Br, Bc, f), masks.counts(f)

    @kernel(threads)
    def flash2(
        Q, K, V, O, L, span, keys, mask, layout, lo, hi, scale, group, seed, threshold, factor
    ):  # fmt: skip
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        ty, tx = int32(uint32(tid) // uint32(TX)), int32(uint32(tid) % uint32(TX))
        H, Nq, Nk = Q.shape[1], Q.shape[2], K.shape[2]
        Tr = (Nq + Br - 1) // Br
        i0 = (Tr - 1 - cuda.blockIdx.x % Tr) * Br  # causal: the longest rows first
        h, part_b = cuda.blockIdx.x // Tr % H, cuda.blockIdx.x // Tr // H
        part, b = part_b // Q.shape[0], part_b % Q.shape[0]
        Kh, Vh = K[b, h // group], V[b, h // group]
        x = cuda.local.array(RM4, float32)
        Sij = cuda.local.array(RMN, float32)
        Oi = cuda.local.array(RMD, float32)
        li = cuda.local.array(RM, float32)  # of this thread's columns; added up at the end
        mi = cuda.local.array(RM, float32)

        load_Q(Q[b, h], i0, Nq, sm, sQ, tid)  # load Q_i
        for n in range(RMD):
            Oi[n] = float32(0)
        for m in range(RM):
            li[m] = float32(0)
            mi[m] = -float32(float("inf"))

        j_first, j_stop = part * span, min((part + 1) * span, Nk)
        if banded:
            j_first = max(j_first, (i0 + lo) // Bc * Bc)
            j_stop = min(j_stop, min(i0 + Br, Nq) + hi)
        for j0 in range(j_first, j_stop, Bc):
            if visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
                load_KV(Kh, j0, Nk, sm, sK, tid)  # load K_j, V_j
                bad = load_KV(Vh, j0, Nk, sm, sV, tid)
                if has_mask:
                    load_mask(mask[b, h], i0, j0, Nq, Nk, sm, sP, LP, 1, tid)
                if masked:
                    bad = cuda.syncthreads_or(1 if bad else 0) != 0
                else:
                    cuda.syncthreads()

                for n in range(RMN):
                    Sij[n] = float32(0)
                QKt(sm, sQ, sK, x, Sij, ty, tx)
                partial = not full(i0, j0, Nk, lo, hi)
                for m in range(RM):
                    row = ty + m * TY
                    highest = -float32(float("inf"))
                    for n in range(RN):
                        col = tx + n * TX
                        s = Sij[m * RN + n] * scale
                        if partial:
                            bias = float32(0)
                            if has_mask:
                                bias = sm[sP + (row if tall else 0) * LP + (col if broad else 0)]
                            s = s + bias
                            if bias == -float32(float("inf")) or not counts(
                                i0 + row, j0 + col, Nk, lo, hi, b, keys
                            ):
                                s = -float32(float("inf"))
                        Sij[m * RN + n] = s
                        highest = max(highest, s)
                    sm[sR + row * TX + tx] = highest
                cuda.syncthreads()

                for m in range(RM):
                    row = ty + m * TY
                    m_new = mi[m]
                    for n in range(0, TX, 4):
                        s0, s1, s2, s3 = load4(sm, sR + row * TX + n)
                        m_new = max(m_new, max(max(s0, s1), max(s2, s3)))
                    shift = m_new if m_new != -float32(float("inf")) else float32(0)
                    alpha = exp2(mi[m] - shift)
                    mi[m] = m_new
                    li[m] *= alpha
                    for n in range(RN):
                        s = Sij[m * RN + n]
                        p = exp2(s - shift)
                        li[m] += p
                        if dropout:
                            col = j0 + tx + n * TX
                            p = kept(p, seed, threshold, factor, b, h, i0 + row, col)
                        if masked and s == -float32(float("inf")):
                            p = -float32(0.0)  # takes nothing from V, see tiles.weigh
                        sm[sP + row * LP + tx + n * TX] = p
                    for n in range(RD):
                        Oi[m * RD + n] *= alpha
                cuda.syncthreads()

                if masked and bad:
                    weigh(sm, sP, sV, Oi, ty, tx)
                else:
                    PV(sm, sP, sV, x, Oi, ty, tx)
                cuda.syncthreads()

        for m in range(RM):
            sm[sR + (ty + m * TY) * TX + tx] = li[m]
        cuda.syncthreads()
        for m in range(RM):
            row = ty + m * TY
            l = float32(0)
            for n in range(TX):
                l += sm[sR + row * TX + n]
            over = float32(1) / l if l != float32(0) else float32(0)
            for n in range(RD):
                Oi[m * RD + n] = Oi[m * RD + n] * over if over != float32(0) else float32(0)
            if tx == 0:
                shift = mi[m] if mi[m] != -float32(float("inf")) else float32(0)
                sm[sP + row] = shift * float32(ln2) + log(l)
        put(sm, sQ, Oi, ty, tx)
        cuda.syncthreads()
        for r in range(tid, min(Br, Nq - i0), threads):
            L[part_b, h, i0 + r] = sm[sP + r]  # write L_i
        store_O(O[part_b, h], i0, Nq, sm, sQ, tid)  # write O_i

    return flash2
