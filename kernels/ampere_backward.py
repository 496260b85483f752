"""FlashAttention-2's backward pass on tensor cores: a block for each key tile, dQ by atomics.

Scores have keys as rows: Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, so that P and dS are already where `mma` wants
them on the left in dV += Pᵀ dO and dK += dSᵀ Q. For dQ += dS K they go through shared memory. All
that enters a product is 16-bit; sums are float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import padding, warp_tiles
from .gpu import cuda, device, float32, int32, kernel, types, uint32
from .masks import LOG2E, Features
from .ptx import warp
from .warp_tiles import WarpTile, afresh, edges


def tile_for(
    Br: int, Bc: int, d: int, threads: tuple[int, int] | None = None, results: int = 1
) -> WarpTile:
    """The tile of Br queries and Bc keys, keys as rows; Br is a multiple of 64."""
    if Br % 64:
        raise ValueError(f"tiles={(Br, Bc)!r}: expected Br a multiple of 64")
    return warp_tiles.warp_tile_for(Bc, Br, d, threads or (Bc // 16, 32), results)


def arrangement(tile: WarpTile) -> dict[str, int]:
    """Where in shared memory the tiles lie, in 16-bit elements, and how many bytes that takes.

    Of Q, dO, L and D there are two: one is worked on while the next arrives. L and D are float32.
    Of padding `real` has what `padding.find_real` says.
    """
    keys, queries, scores = tile.Br * tile.d, tile.Bc * tile.d, tile.Br * tile.Bc
    at, place = {}, 0
    for name, size in (
        ("Kj", keys), ("Vj", keys), ("Qi", 2 * queries), ("dOi", 2 * queries), ("dS", scores),
        ("Li", 4 * tile.Bc), ("Di", 4 * tile.Bc), ("real", tile.Br),
    ):  # fmt: skip
        at[name], place = place, place + size
    return at | {"bytes": 2 * place}


@cache
def load_queries(tile: WarpTile) -> Any:
    """load_queries(Q, dO, L, D, b, h, i0, sm, floats, stage, tid): start to copy a tile of each.

    See `arrangement`; stage: to which of the two, 0 or 1. What lies beyond the queries becomes 0,
    and so do its dS, and its part of dV and dK.
    """
    Bq, at = tile.Bc, arrangement(tile)
    sQ, sdO, sL, sD, size = at["Qi"], at["dOi"], at["Li"] // 2, at["Di"] // 2, tile.Bc * tile.d
    load = warp_tiles.stage(Bq, tile.d, tile.threads)

    @device
    def start_copies(Q, dO, L, D, b, h, i0, sm, floats, stage, tid):
        Nq = Q.shape[2]
        load(Q[b, h], i0, Nq, sm, uint32(sQ + stage * size), tid)
        load(dO[b, h], i0, Nq, sm, uint32(sdO + stage * size), tid)
        if tid < Bq:
            i, at_r = i0 + tid, uint32(stage * Bq + tid)
            count = 4 if i < Nq else 0
            warp.cp_async_word(floats, uint32(sL + at_r), L[b], h, i, count)
            warp.cp_async_word(floats, uint32(sD + at_r), D[b], h, i, count)

    return start_copies


@cache
def flash_attention_2_backward(tile: WarpTile, f: Features) -> Any:
    """Algorithm 2 of Dao 2023 (arXiv:2307.08691), a block for each turn of its outer loop.

    Q, dO (batch, heads, Nq, d), K, V (batch, key heads, Nk, d), 16-bit; L, D (batch, heads, Nq);
    writes dK, dV like K, and adds to dQ (batch, heads, Nq, d) in float32, in an order that is left
    open. `tile` has keys as rows. The query heads that share a key head come one after the other,
    while K_j and V_j stay. Queries that see no real key of the tile are passed over.
    """
    Bk, Bq, d, threads, rows = tile.Br, tile.Bc, tile.d, tile.threads, tile.rows
    at = arrangement(tile)
    sK, sV, sQ, sdO, sdS = at["Kj"], at["Vj"], at["Qi"], at["dOi"], at["dS"]
    sL, sD, stage_size = at["Li"] // 2, at["Di"] // 2, Bq * d
    groups = min(tile.warps, Bq // 16)  # of warps that have other rows of dQ_i
    q_rows, q_columns = Bq // groups, d * groups // tile.warps
    # Queries at a time: for more scores there is no room in registers.
    W = 64 if d == 64 else 16 if f.keys or f.dropout else 32
    R2, C, QR2, QC = rows // 8, W // 8, q_rows // 8, q_columns // 8
    NA, NS, NG, NQ = rows // 4, rows * W // 32, rows * d // 32, q_rows * q_columns // 32
    kept_words, sR = warp_tiles.kept_words(W, rows), at["real"]
    banded, padded, dropout, log2e, ln2 = f.band, f.keys, f.dropout, LOG2E, 1 / LOG2E
    load_KV, load_QdO = warp_tiles.stage(Bk, d, threads), load_queries(tile)
    product = warp_tiles.rows_by_rows(rows, W, d, f.dtype)
    accumulate = warp_tiles.rows_by_columns(rows, W, d, f.dtype)
    dSK = warp_tiles.columns_by_columns(q_rows, q_columns, Bk, Bq, d, f.dtype)
    dS_finite_K = warp_tiles.columns_by_finite(q_rows, q_columns, Bk, Bq, d, f.dtype)
    put_dS, put = warp_tiles.put(rows, W, Bq, f.dtype), warp_tiles.put(rows, d, d, f.dtype)
    bad_keys = warp_tiles.not_finite(Bk, d, threads, f.dtype)
    bad_queries = warp_tiles.not_finite(Bq, d, threads, f.dtype)
    clear = warp_tiles.clear_not_finite(W, d, threads, f.dtype)
    add_not_finite = warp_tiles.add_not_finite(rows, W, d, f.dtype, dropout)
    find_real, next_seeing = padding.find_real(Bk, threads), padding.next_seeing(Bq, Bk)
    clear_padding = warp_tiles.clear_padding(Bk, d, threads)
    draw, drop = warp_tiles.kept_transposed(W, rows), warp_tiles.drop(W, rows)
    store = warp_tiles.unstage(Bk, d, threads)
    commit, wait_for_all = warp.cp_async_commit, warp.cp_async_wait(0)
    exp2, red_add = warp.exp2, warp.red_add

    @device
    def as_it_is(x):
        return x

    # What follows from a block's number is computed anew at d = 128, where registers are short.
    anew = warp.opaque if d == 128 else as_it_is

    @device
    def columns_of(Nk, H):
        """(key tile, key head, batch) of the block."""
        block, Tc = anew(uint32(cuda.blockIdx.x)), uint32((Nk + Bk - 1) // Bk)
        return block % Tc, int32(block // Tc % uint32(H)), int32(block // Tc // uint32(H))

    @device
    def part_of_dQ(tid):
        """(first row, first column) of a warp's part of dQ_i."""
        w = uint32(anew(tid) >> 5)
        return uint32(q_rows * (w % groups)), uint32(q_columns * (w // groups))

    @kernel(threads)
    def ampere_backward(
        Q, K, V, dO, L, D, dQ, dK, dV,
        keys, mask, layout, lo, hi, scale, group, seed, threshold, factor,
    ):  # fmt: skip
        sm = cuda.shared.array(0, types.uint16)
        floats = cuda.shared.array(0, float32)  # the same memory
        tid = uint32(cuda.threadIdx.x)
        lane, w = uint32(tid & 31), uint32(tid >> 5)
        g, t, first = uint32(lane >> 2), uint32(lane & 3), uint32(rows * w)
        H, Nq, Nk = K.shape[1], Q.shape[2], K.shape[2]
        j, kh, b = columns_of(Nk, H)
        j0 = int32(j * Bk)  # line 5; causal: the longest columns first
        A = cuda.local.array(NA, uint32)
        Pji = cuda.local.array(NS, float32)
        dSji = cuda.local.array(NS, float32)
        dKj = cuda.local.array(NG, float32)
        dVj = cuda.local.array(NG, float32)
        dQi = cuda.local.array(NQ, float32)
        kept = cuda.local.array(kept_words, uint32)
        for n in range(NG):  # line 7
            dKj[n] = float32(0)
            dVj[n] = float32(0)
        i_first, i_stop = int32(0), int32(Nq)
        if banded:
            i_stop = int32(min(Nq, min(j0 + Bk, Nk) - lo))
            i_first = int32(max(0, j0 - hi) // Bq * Bq if j0 - hi < i_stop else i_stop)
        turns = int32(group * ((i_stop - i_first + Bq - 1) // Bq) if i_first < i_stop else 0)
        full = True  # all keys of the tile are real
        if padded:
            full = cuda.syncthreads_and(1 if find_real(keys, b, j0, sm, sR, tid) else 0) != 0
            i_first = next_seeing(sm, sR, i_first, i_stop, Nq, lo, hi, j0)
            i, turns = i_first, int32(0)
            while i < i_stop:
                i = next_seeing(sm, sR, int32(i + Bq), i_stop, Nq, lo, hi, j0)
                turns += group

        load_KV(K[b, kh], j0, Nk, sm, sK, tid)  # line 6: load K_j, V_j
        load_KV(V[b, kh], j0, Nk, sm, sV, tid)
        h, i0 = int32(kh * group), i_first
        if turns > 0:
            load_QdO(Q, dO, L, D, b, h, i0, sm, floats, uint32(0), tid)
        commit()
        if padded and not full:
            wait_for_all()
            clear_padding(sm, sK, keys, b, j0, tid)
        bad_K = False
        if banded:
            wait_for_all()
            bad_K = cuda.syncthreads_or(1 if bad_keys(sm, sK, tid) else 0) != 0

        for turn in range(turns):  # line 8, head by head
            stage = uint32(turn & 1)
            Qi, dOi = uint32(sQ + stage * stage_size), uint32(sdO + stage * stage_size)
            Li, Di = uint32(sL + stage * Bq), uint32(sD + stage * Bq)
            low, high, end = edges(i0, j0, Nk, lo, hi)
            whole = end >= Bk and (not banded or (low <= 1 - Bq and high >= Bk - 1))
            if padded:
                whole = whole and full
            wait_for_all()  # Q_i, dO_i, L_i and D_i are there
            bad = False
            if banded and not whole:
                found = bad_queries(sm, Qi, tid) or bad_queries(sm, dOi, tid)
                bad = cuda.syncthreads_or(1 if found else 0) != 0
            else:
                cuda.syncthreads()
            head, top = h, i0
            i0 = int32(i0 + Bq)
            if padded:
                i0 = next_seeing(sm, sR, i0, i_stop, Nq, lo, hi, j0)
            if i0 >= i_stop:
                h, i0 = int32(h + 1), i_first
            if turn + 1 < turns:  # line 9: load the next
                load_QdO(Q, dO, L, D, b, h, i0, sm, floats, uint32(stage ^ 1), tid)
            commit()

            for q0 in range(0, Bq, W):
                Qw, dOw = uint32(Qi + q0 * d), uint32(dOi + q0 * d)
                if dropout:
                    draw(kept, afresh(seed), threshold, b, head, j0 + int32(first + g), top + q0)
                for n in range(NS):
                    Pji[n] = float32(0)
                    dSji[n] = float32(0)
                product(sm, sK, first, Qw, A, Pji, lane)  # line 10: S = QKᵀ
                product(sm, sV, first, dOw, A, dSji, lane)  # line 13: dP = dO Vᵀ
                if dropout:
                    drop(dSji, kept, factor)
                for n in range(C):
                    for u in range(2):
                        query = uint32(q0 + 8 * n + 2 * t + u)
                        lse, D_i = floats[Li + query] * float32(log2e), floats[Di + query]
                        for r in range(R2):
                            e = 4 * (r // 2 * C + n) + 2 * (r % 2) + u
                            Pji[e] = exp2(Pji[e] * scale - lse)  # line 11
                            dSji[e] = Pji[e] * (dSji[e] - D_i)  # line 14
                if not whole:  # after all of them: a branch for each would keep them apart
                    thread = warp.opaque(tid)  # what is kept would take registers
                    for r in range(R2):
                        key = int32(rows * (thread >> 5) + 8 * r + (thread & 31) // 4)
                        before = int32(key - 2 * (thread & 3))
                        since, until = int32(before - high), int32(before - low)
                        if key >= end or (padded and sm[sR + key] != key):
                            until = int32(-Bq)
                        for n in range(C):
                            for u in range(2):
                                query = int32(q0 + 8 * n + u)  # without the thread's 2 t
                                if query > until or (banded and query < since):
                                    e = 4 * (r // 2 * C + n) + 2 * (r % 2) + u
                                    Pji[e], dSji[e] = float32(0), float32(0)
                if dropout:
                    drop(Pji, kept, float32(1))
                if banded and bad:  # a masked weight takes nothing from dO and Q
                    add_not_finite(sm, dOw, dVj, lane, first, -high - q0, -low - q0, kept)
                    cuda.syncthreads()
                    clear(sm, dOw, tid)
                    clear(sm, Qw, tid)
                    cuda.syncthreads()
                accumulate(sm, Pji, dOw, dVj, lane)  # line 12: dV += Pᵀ dO
                accumulate(sm, dSji, Qw, dKj, lane)  # line 16: dK += dSᵀ Q
                put_dS(sm, sdS, first, q0, dSji, lane)
            cuda.syncthreads()
            for n in range(NQ):
                dQi[n] = float32(0)
            _, _, b = columns_of(Nk, H)
            q_first, q_column = part_of_dQ(tid)
            if banded and bad_K and not whole:  # nor from K; where it is seen, dS is NaN by itself
                dS_finite_K(sm, sdS, sK, q_first, q_column, dQi, lane)
            else:
                dSK(sm, sdS, sK, q_first, q_column, dQi, lane)  # line 15: dQ += dS K
            for r in range(QR2):
                row = top + q_first + 8 * r + g
                if row < Nq:
                    for n in range(QC):
                        for u in range(2):
                            e = 4 * (r // 2 * QC + n) + 2 * (r % 2) + u
                            column = q_column + 8 * n + 2 * t + u
                            red_add(dQ[b, head], row, column, dQi[e] * (scale * float32(ln2)))

        for n in range(NG):
            dKj[n] *= scale * float32(ln2)
            if dropout:
                dVj[n] *= factor  # not P, see ampere
        _, kh, b = columns_of(Nk, H)
        wait_for_all()  # there may have been no turn
        cuda.syncthreads()
        put(sm, sK, first, 0, dKj, lane)
        put(sm, sV, first, 0, dVj, lane)
        cuda.syncthreads()
        if padded and not full:  # not even NaN of a query is left
            clear_padding(sm, sK, keys, b, j0, tid)
            clear_padding(sm, sV, keys, b, j0, tid)
        store(dK[b, kh], j0, Nk, sm, sK, tid)  # line 18
        store(dV[b, kh], j0, Nk, sm, sV, tid)

    return ampere_backward
