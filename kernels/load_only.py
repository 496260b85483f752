"""The flash kernels without their arithmetic: same loads and stores, same tiles and threads.

What they take is what the traffic alone takes, so their time is held against bytes; what the full
kernels take beyond that is arithmetic. Each thread adds up one element of each tile, which goes out
with the statistics, so that no load can be left out. Their results mean nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from .. import checks
from . import flash1, flash2, launch, masks, tiles
from .gpu import cuda, float32, int32, kernel, load, uint32
from .masks import Features
from .tiles import Tile


def plan(q: Any, k: Any, v: Any, *, algorithm: str = "flash2", **what: Any) -> launch.Plan:
    """One launch that moves what `algorithm` ("flash1" or "flash2") would; else as `launch.plan`.

    flash1's last step, which makes the logsumexp of l and m and is no part of Algorithm 1, is left
    out.
    """
    make = LOAD_ONLY[checks.choice("algorithm", algorithm, LOAD_ONLY)]
    if what.get("attn_mask") is not None:
        raise checks.bad("attn_mask", "an array", "None: these kernels load no mask")
    made = launch.plan(q, k, v, algorithm=algorithm, **what)
    rules = {name: x for name, x in what.items() if name != "threads"}
    function = make(made.tile, launch.checked(q, k, v, **rules).features)
    step = replace(made.steps[0], name=f"load-only {algorithm}", function=function)
    return replace(made, steps=[step])


@cache
def load_only_1(tile: Tile, f: Features) -> Any:
    """The traffic of flash1.flash_attention_1, same arguments."""
    Br, Bc, d, LD, threads = tile.Br, tile.Bc, tile.d, tile.LD, tile.threads
    RS = -(-Br // threads)
    at = flash1.arrangement(tile)
    sQ, sK, sV, sO, sl, sm_ = (at[name] for name in ("Qi", "Kj", "Vj", "Oi", "li", "mi"))
    load_Q = tiles.stage(Br, d, threads, f.dtype)
    load_KV = tiles.stage(Bc, d, threads, f.dtype)
    load_O = tiles.stage(Br, d, threads, "float32")
    store_O = tiles.unstage(Br, d, threads, "float32")
    visited = masks.visited(Br, Bc, f)

    @kernel(threads)
    def load_only_flash1(
        Q, K, V, O, l, m, keys, mask, layout, lo, hi, scale, group, seed, threshold, factor
    ):  # fmt: skip
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        H, Nq, Nk = Q.shape[1], Q.shape[2], K.shape[2]
        h, b = cuda.blockIdx.x % H, cuda.blockIdx.x // H
        Qh, Kh, Vh = Q[b, h], K[b, h // group], V[b, h // group]
        Oh, lh, mh = O[b, h], l[b, h], m[b, h]
        l_i = cuda.local.array(RS, float32)
        m_i = cuda.local.array(RS, float32)
        seen = float32(0)

        for e in range(tid, Nq * d, threads):
            Oh[e // d, e % d] = float32(0)
        for i in range(tid, Nq, threads):
            lh[i] = float32(0)
            mh[i] = float32(0)
        cuda.syncthreads()

        for j0 in range(0, Nk, Bc):
            i_any = 0
            while i_any < Nq and not visited(i_any, j0, Nq, Nk, lo, hi, b, keys, layout):
                i_any += Br
            if i_any < Nq:
                load_KV(Kh, j0, Nk, sm, sK, tid)
                load_KV(Vh, j0, Nk, sm, sV, tid)
            for i0 in range(i_any, Nq, Br):
                if visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
                    for n in range(RS):
                        r = tid + n * threads
                        if r < Br and i0 + r < Nq:
                            l_i[n] = load(l[b], uint32(h), uint32(i0 + r))
                            m_i[n] = load(m[b], uint32(h), uint32(i0 + r))
                    load_Q(Qh, i0, Nq, sm, sQ, tid)
                    load_O(Oh, i0, Nq, sm, sO, tid)
                    for n in range(RS):
                        r = tid + n * threads
                        if r < Br:
                            sm[sl + r] = l_i[n]
                            sm[sm_ + r] = m_i[n]
                    cuda.syncthreads()
                    seen += sm[sK + tid % Bc * LD] + sm[sV + tid % Bc * LD]
                    seen += sm[sQ + tid % Br * LD]
                    store_O(Oh, i0, Nq, sm, sO, tid)
                    for r in range(tid, min(Br, Nq - i0), threads):
                        lh[i0 + r] = sm[sl + r] + seen
                        mh[i0 + r] = sm[sm_ + r]
                    cuda.syncthreads()

    return load_only_flash1


@cache
def load_only_2(tile: Tile, f: Features) -> Any:
    """The traffic of flash2.flash_attention_2, same arguments."""
    Br, Bc, LD, threads, banded = tile.Br, tile.Bc, tile.LD, tile.threads, f.band
    at = flash2.arrangement(tile)
    sQ, sK, sV = at["Qi"], at["Kj"], at["Vj"]
    load_Q = tiles.stage(Br, tile.d, threads, f.dtype)
    load_KV = tiles.stage(Bc, tile.d, threads, f.dtype)
    store_O = tiles.unstage(Br, tile.d, threads, f.stored)
    visited = masks.visited(Br, Bc, f)

    @kernel(threads)
    def load_only_flash2(
        Q, K, V, O, L, span, keys, mask, layout, lo, hi, scale, group, seed, threshold, factor
    ):  # fmt: skip
        sm = cuda.shared.array(0, float32)
        tid = int32(cuda.threadIdx.x)
        H, Nq, Nk = Q.shape[1], Q.shape[2], K.shape[2]
        Tr = (Nq + Br - 1) // Br
        i0 = (Tr - 1 - cuda.blockIdx.x % Tr) * Br
        h, b = cuda.blockIdx.x // Tr % H, cuda.blockIdx.x // Tr // H
        Kh, Vh = K[b, h // group], V[b, h // group]
        seen = float32(0)

        load_Q(Q[b, h], i0, Nq, sm, sQ, tid)
        j_first, j_stop = 0, Nk
        if banded:
            j_first = max(j_first, (i0 + lo) // Bc * Bc)
            j_stop = min(j_stop, min(i0 + Br, Nq) + hi)
        for j0 in range(j_first, j_stop, Bc):
            if visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
                load_KV(Kh, j0, Nk, sm, sK, tid)
                load_KV(Vh, j0, Nk, sm, sV, tid)
                cuda.syncthreads()
                seen += sm[sK + tid % Bc * LD] + sm[sV + tid % Bc * LD]
                cuda.syncthreads()
        for r in range(tid, min(Br, Nq - i0), threads):
            L[b, h, i0 + r] = seen
        cuda.syncthreads()
        store_O(O[b, h], i0, Nq, sm, sQ, tid)

    return load_only_flash2


LOAD_ONLY = {"flash1": load_only_1, "flash2": load_only_2}
