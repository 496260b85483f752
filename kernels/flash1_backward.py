"""FlashAttention's backward pass: one block per key head, K and V outer; dQ goes back to HBM."""

from __future__ import annotations

from functools import cache
from typing import Any

from . import gradients, masks, tiles
from .gpu import cuda, float32, int32, kernel, load, log, uint32
from .masks import LOG2E, Features
from .tiles import Tile


@cache
def statistics(threads: int) -> Any:
    """l and m of Algorithm 4 from the logsumexp L (batch, heads, Nq), `threads` rows a block.

    l = 1 and m = L say of a row what the l and m of the forward pass do, whichever kernel it was.
    m is in base 2.
    """
    log2e = LOG2E

    @kernel(threads)
    def backward_statistics(L, l, m):
        H, Nq = L.shape[1], L.shape[2]
        row = cuda.blockIdx.x * threads + cuda.threadIdx.x
        i, h, b = row % Nq, row // Nq % H, row // Nq // H
        if b < L.shape[0]:
            lse = load(L[b], uint32(h), uint32(i))
            l[b, h, i] = float32(1) if lse != -float32(float("inf")) else float32(0)
            m[b, h, i] = lse * float32(log2e)

    return backward_statistics


@cache
def flash_attention_1_backward(tile: Tile, f: Features) -> Any:
    """Algorithm 4 of Dao et al. 2022 (arXiv:2205.14135), a block for each key head.

    Q, O, dO (batch, heads, Nq, d), K, V (batch, key heads, Nk, d), l, m (batch, heads, Nq), m in
    base 2; writes dK, dV like K, and dQ (batch, heads, Nq, d) in float32: it lives in HBM, and is
    read and written in every turn. `tile` has keys as rows, see gradients. The query heads that
    share a key head come one after the other, while K_j and V_j stay.
    """
    Bk, Bq, d, threads, masked = tile.Br, tile.Bc, tile.d, tile.threads, f.masked
    TX, RM4 = tile.TX, 4 * max(tile.RM, tile.swapped.RM)
    LP, RMN, RMD, RMQ = tile.LP, tile.RM * tile.RN, tile.RM * tile.RD, tile.swapped.RM * tile.RD
    at = gradients.arrangement(tile, output=True)
    sK, sV, sQ, sO, sdO, sP, sL, sD = (
        at[name] for name in ("Kj", "Vj", "Qi", "Oi", "dOi", "scores", "Li", "Di")
    )
    has_mask, log2e, ln2 = bool(f.mask), LOG2E, 1 / LOG2E
    load_KV, load_Q = tiles.stage(Bk, d, threads, f.dtype), tiles.stage(Bq, d, threads, f.dtype)
    load_dQ = tiles.stage(Bq, d, threads, "float32")
    load_mask, dots = masks.stage_mask(Bq, Bk, threads, f), tiles.row_dots(Bq, d, threads)
    store, store_dQ = (
        tiles.unstage(rows, d, threads, kind) for rows, kind in ((Bk, f.dtype), (Bq, "float32"))
    )
    put, add_put = tiles.put(tile), tiles.put(tile.swapped, add=True)
    weights, times = gradients.weights(tile, f, True), gradients.times(tile, f, True)
    transposed_times, visited = gradients.transposed_times(tile, f, True), masks.visited(Bq, Bk, f)

    @kernel(threads)
    def flash1_backward(
        Q, K, V, O, l, m, dO, dQ, dK, dV,
        keys, mask, layout, lo, hi, scale, group, seed, threshold, factor,
    ):  # fmt: skip
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        ty, tx = int32(uint32(tid) // uint32(TX)), int32(uint32(tid) % uint32(TX))
        H, Nq, Nk = K.shape[1], Q.shape[2], K.shape[2]
        kh, b = cuda.blockIdx.x % H, cuda.blockIdx.x // H
        x = cuda.local.array(RM4, float32)
        Pji = cuda.local.array(RMN, float32)
        dSji = cuda.local.array(RMN, float32)
        dKj = cuda.local.array(RMD, float32)
        dVj = cuda.local.array(RMD, float32)
        dQi = cuda.local.array(RMQ, float32)

        for e in range(tid, group * Nq * d, threads):  # line 5
            dQ[b, kh * group + e // d // Nq, e // d % Nq, e % d] = float32(0)
        for e in range(tid, Nk * d, threads):
            dK[b, kh, e // d, e % d] = 0
            dV[b, kh, e // d, e % d] = 0
        cuda.syncthreads()

        for j0 in range(0, Nk, Bk):  # line 6
            i_any = 0
            while i_any < Nq and not visited(i_any, j0, Nq, Nk, lo, hi, b, keys, layout):
                i_any += Bq
            if i_any < Nq:
                bad_K = load_KV(K[b, kh], j0, Nk, sm, sK, tid)  # line 7
                load_KV(V[b, kh], j0, Nk, sm, sV, tid)
                for n in range(RMD):  # line 8
                    dKj[n] = float32(0)
                    dVj[n] = float32(0)
                for h in range(kh * group, (kh + 1) * group):
                    for i0 in range(i_any, Nq, Bq):  # line 9
                        if visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
                            bad = load_Q(Q[b, h], i0, Nq, sm, sQ, tid) or bad_K  # line 10
                            load_Q(O[b, h], i0, Nq, sm, sO, tid)
                            bad = load_Q(dO[b, h], i0, Nq, sm, sdO, tid) or bad
                            for r in range(tid, min(Bq, Nq - i0), threads):
                                li = load(l[b], uint32(h), uint32(i0 + r))
                                mi = load(m[b], uint32(h), uint32(i0 + r))
                                sm[sL + r] = mi + log(li) * float32(log2e)
                            if has_mask:
                                load_mask(mask[b, h], i0, j0, Nq, Nk, sm, sP, 1, LP, tid)
                            if masked:
                                bad = cuda.syncthreads_or(1 if bad else 0) != 0
                            else:
                                cuda.syncthreads()
                            dots(sm, sdO, sO, sD, tid)  # line 19
                            cuda.syncthreads()

                            load_dQ(dQ[b, h], i0, Nq, sm, sO, tid)
                            weights(  # lines 11 to 15, 17, 18, 20
                                sm, i0, j0, Nq, Nk, lo, hi, b, h, keys, scale, seed, threshold,
                                factor, x, Pji, dSji, ty, tx,
                            )  # fmt: skip
                            cuda.syncthreads()
                            times(sm, Pji, sdO, bad, x, dVj, ty, tx)  # line 16: dV += Pᵀ dO
                            times(sm, dSji, sQ, bad, x, dKj, ty, tx)  # line 22: dK += dSᵀ Q
                            for n in range(RMQ):
                                dQi[n] = float32(0)
                            transposed_times(sm, dSji, sK, bad, x, dQi, ty, tx)
                            for n in range(RMQ):
                                dQi[n] *= scale * float32(ln2)
                            add_put(sm, sO, dQi, ty, tx)  # line 21: dQ += dS K
                            cuda.syncthreads()
                            store_dQ(dQ[b, h], i0, Nq, sm, sO, tid)
                            cuda.syncthreads()
                for n in range(RMD):
                    dKj[n] *= scale * float32(ln2)
                put(sm, sK, dKj, ty, tx)
                put(sm, sV, dVj, ty, tx)
                cuda.syncthreads()
                store(dK[b, kh], j0, Nk, sm, sK, tid)  # line 24
                store(dV[b, kh], j0, Nk, sm, sV, tid)
                cuda.syncthreads()

    return flash1_backward
