"""FlashAttention-3's forward pass for compute capability 9.0: tensor cores, fed by the copy engine.

One warpgroup of a block, the producer, asks for tiles; the others, the consumers, have 64 queries
each and compute. Between them are mbarriers: a place for a tile is full once its bytes are there,
and empty again once every consumer is done with it. A consumer asks for S of tile j and for O of
tile j - 1 in one go, and computes the softmax of tile j while O is still under way: exponentials
and matrix products overlap within a warpgroup, not only across warpgroups.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from . import warpgroup_tiles
from .gpu import cuda, device, float32, int32, kernel, log, types, uint32
from .masks import LOG2E, Features
from .ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from .ptx.shared import fence_proxy_async, shared_address
from .ptx.tma import tensor_maps, tma_commit_group, tma_load, tma_store, tma_wait_group
from .ptx.warp import reciprocal
from .ptx.warpgroup import (
    bar_arrive,
    bar_red_or,
    bar_sync,
    setmaxnreg_dec,
    setmaxnreg_inc,
)
from .ptx.wgmma import PANEL, ROW_BYTES, descriptor, pin, wgmma_wait_group
from .warp_tiles import row_sum
from .warpgroup_tiles import ALIGNED, ROWS, WARPGROUP, WarpgroupTile

L2_BYTES = 32 << 20  # for the K and V of a section: an H100 has 50 MB, and Q and O pass through too


def signature(f: Features) -> tuple[Any, ...]:
    """Numba types of the kernel's arguments."""
    tensor_map, L = types.Array(types.uint8, 1, "C"), types.Array(types.float32, 3, "C")
    O = types.Array(types.float32, 4, "C") if f.output else tensor_map
    i, u = types.int32, types.uint32
    return (*[tensor_map] * 3, O, L, i, i, i, types.float32, u, u, u, i)


def arguments(
    p: Any, tile: WarpgroupTile, f: Features, Q: Any, O: Any, L: Any, group: int, span: int
) -> tuple[Any, ...]:
    """The kernel's arguments for a checked `launch.Problem`; Q as the kernel is to see it."""
    lo, hi, scale = p.rules[3:6]
    boxes = {"q": (Q, ROWS), "k": (p.K, tile.Bc), "v": (p.V, tile.Bc)}
    boxes |= {} if f.output else {"output": (O, ROWS)}
    maps = tensor_maps(boxes, f.dtype)
    of_a_head = 4 * max(1, p.Nk * p.d)  # bytes of K and V
    section = min(max(1, L2_BYTES // of_a_head) * group, L.shape[0] * L.shape[1])
    Nk, lo, hi, span = np.array([p.Nk, lo, hi, span], np.int32)
    counts = np.array([group, max(1, section), p.batch], np.uint32)
    return (*maps, *([O] if f.output else []), L, Nk, lo, hi, scale, *counts, span)


@device
def turn(block, Tr, heads, section):
    """(query tile, head) of a block: the heads of a section together, the last tiles first.

    With a causal mask the last tiles are the longest, and a GPU is done soonest if it begins with
    them. The heads of a section are so few that their keys and values stay in the L2.
    """
    begin = uint32(block // uint32(section * Tr) * section)
    together = uint32(min(section, uint32(heads - begin)))
    rest = uint32(block - begin * Tr)
    return uint32(Tr - 1 - rest // together), uint32(begin + rest % together)


@cache
def flash_attention_3(tile: WarpgroupTile, f: Features) -> Any:
    """Algorithm 2 of Shah et al. 2024 (arXiv:2407.08608), a block for each tile of queries.

    Q, O (batch, heads, Nq, d) and K, V (batch, key heads, Nk, d) are tensor maps, of boxes of 64
    and of Bc rows; the kernel's d is a multiple of 64, and columns beyond the tensor's are 0. L
    (batch, heads, Nq) is the logsumexp. scale > 0 has a factor of log2(e). P is rounded to the type
    of V. A block walks at most `span` keys: all of them, or a part; then O, a float32 array, and L
    have a batch for each part.
    """
    Br, Bc, d, stages, consumers = tile.Br, tile.Bc, tile.d, tile.stages, tile.consumers
    Q_bytes, KV_bytes, ping_pong = tile.Q_bytes, tile.KV_bytes, tile.ping_pong and consumers > 1
    Q_panel, KV_panel, box = ROW_BYTES * Br, ROW_BYTES * Bc, ROW_BYTES * ROWS  # bytes
    RS, RP, RO = Bc // 2, Bc // 4, d // 2  # registers of S, P and O
    ln2, banded, wide, shares = 1 / LOG2E, f.band, bool(f.output), consumers > 1
    full_K, full_V, empty_K, empty_V = (8 * (1 + n * stages) for n in range(4))  # after Q's
    turns, written, looked = 1, 1 + consumers, 1 + 2 * consumers  # named barriers
    pair, computing = 2 * WARPGROUP, consumers * WARPGROUP  # threads

    give_up, take = setmaxnreg_dec(tile.registers[0]), setmaxnreg_inc(tile.registers[1])
    load_KV = warpgroup_tiles.load(Bc, d)
    start_S = warpgroup_tiles.rows_by_rows(Br, Bc, d, f.dtype)
    start_O = warpgroup_tiles.rows_by_columns(Bc, d, f.dtype)
    all_but_one, all_products = wgmma_wait_group(1), wgmma_wait_group(0)
    have_S, have_O = pin(RS), pin(RO)
    partial, mask = warpgroup_tiles.partial(Bc, banded), warpgroup_tiles.mask(Bc, banded)
    softmax, rounded = warpgroup_tiles.softmax(Bc), warpgroup_tiles.rounded(Bc, f.dtype)
    not_finite = warpgroup_tiles.not_finite(Bc, d, computing, f.dtype)
    add_not_finite = warpgroup_tiles.add_not_finite(Bc, d, f.dtype)
    clear_not_finite = warpgroup_tiles.clear_not_finite(Bc, d, computing, f.dtype)
    rescale, put = warpgroup_tiles.rescale(d), warpgroup_tiles.put(Br, d, f.dtype)
    store_wide = warpgroup_tiles.store_wide(d)

    @device
    def stage(n):
        return uint32(uint32(n) % uint32(stages))

    @device
    def parity(n):
        """Of the phase in which the n-th tile of keys, or of values, is in its stage."""
        return uint32(uint32(n) // uint32(stages) % uint32(2))

    @device
    def bar_of(bars, which, n):
        return uint32(bars + uint32(which) + uint32(8 * stage(n)))

    @device
    def tile_at(first, n):
        return uint32(first + uint32(stage(n) * KV_bytes))

    @device
    def wait_until_full(bars, which, n):
        mbarrier_wait(bar_of(bars, which, n), parity(n))

    @device
    def wait_until_empty(bars, which, n):
        mbarrier_wait(bar_of(bars, which, n), uint32(1 - parity(n)))  # by then the tile before left

    @device
    def produce(Q, K, V, sQ, sK, sV, bars, i0, h, key_head, b, j_first, Tc):
        mbarrier_expect_tx(bars, Q_bytes)  # load Q_i
        for c in range(d // PANEL):
            for w in range(consumers):
                to = uint32(sQ + uint32(c * Q_panel + w * box))
                tma_load(to, Q, PANEL * c, i0 + ROWS * w, h, b, bars)
        for n in range(Tc):
            j0 = uint32((j_first + n) * Bc)
            wait_until_empty(bars, empty_K, n)  # load K_j, V_j
            load_KV(tile_at(sK, n), K, j0, key_head, b, bar_of(bars, full_K, n))
            wait_until_empty(bars, empty_V, n)
            load_KV(tile_at(sV, n), V, j0, key_head, b, bar_of(bars, full_V, n))

    @device
    def border(i0, j0, lo, hi):
        """Whether the band masks a score of the block's rows and a key tile."""
        return banded and (j0 < i0 + Br - 1 + lo or j0 + Bc - 1 > i0 + hi)

    @device
    def set_aside(sm, at, O, i, lo, hi, tid):
        """Of a V_j with inf or NaN, these go to O where they are seen, and 0 is left of them.

        i: the thread's first row, from the tile's first key on. By all consumers together.
        """
        if bar_red_or(looked, computing, not_finite(sm, at, tid)) != 0:
            add_not_finite(sm, at, O, int32(i + lo), int32(i + hi))
            bar_sync(looked, computing)
            clear_not_finite(sm, at, tid)
            fence_proxy_async()
            bar_sync(looked, computing)

    @device
    def write(O, Oi, sm, at, sO, within, warpgroup, leader, r0, h, b):
        """O_i leaves by way of this warpgroup's place in Q_i, in whole rows."""
        bar_sync(written + warpgroup, WARPGROUP)
        put(sm, uint32(at + warpgroup * (box // 2)), Oi, within)
        fence_proxy_async()
        bar_sync(written + warpgroup, WARPGROUP)
        if leader:
            for c in range(d // PANEL):
                tma_store(uint32(sO + uint32(c * Q_panel)), O, PANEL * c, r0, h, b)
            tma_commit_group()
            tma_wait_group()

    @kernel(tile.threads)
    def hopper(Q, K, V, O, L, Nk, lo, hi, scale, group, section, batch, span):
        sm = cuda.shared.array(0, types.uint16)
        tid = uint32(cuda.threadIdx.x)
        warpgroup, leader = uint32(tid // uint32(WARPGROUP)), tid % uint32(WARPGROUP) == 0
        at = uint32((ALIGNED - shared_address(sm, 0) % ALIGNED) % ALIGNED // 2)
        sQ = shared_address(sm, at)
        sK = uint32(sQ + uint32(Q_bytes))
        sV = uint32(sK + uint32(stages * KV_bytes))
        bars = uint32(sV + uint32(stages * KV_bytes))

        H, Nq = uint32(L.shape[1]), uint32(L.shape[2])
        Tr = uint32(uint32(Nq + uint32(Br - 1)) // uint32(Br))
        i, bh = turn(uint32(cuda.blockIdx.x), Tr, uint32(L.shape[0] * H), section)
        i0, h, part_b = int32(i * Br), uint32(bh % H), uint32(bh // H)
        part, b = uint32(part_b // uint32(batch)), uint32(part_b % uint32(batch))
        first = int32(part * span)  # keys of which one counts for a query of the tile
        stop = min(Nk, int32(first + span))
        if banded:
            first = max(first, int32(i0 + lo))
            stop = min(stop, int32(min(i0 + Br, int32(Nq)) + hi))
        j_first, Tc = uint32(uint32(first) // uint32(Bc)), uint32(0)
        if first < stop:
            Tc = uint32(uint32(stop + (Bc - 1)) // uint32(Bc) - j_first)

        if tid == 0:
            mbarrier_init(bars, 1)
            for n in range(2 * stages):
                mbarrier_init(uint32(bars + uint32(full_K + 8 * n)), 1)
                mbarrier_init(uint32(bars + uint32(empty_K + 8 * n)), consumers)
            fence_mbarrier_init()
        cuda.syncthreads()

        if warpgroup == consumers:
            if shares:
                give_up()
            if leader:
                key_head = uint32(h // uint32(group))
                produce(Q, K, V, sQ, sK, sV, bars, i0, h, key_head, b, j_first, Tc)
        else:
            if shares:
                take()
            S = cuda.local.array(RS, float32)
            P = cuda.local.array(RP, uint32)
            Oi = cuda.local.array(RO, float32)
            m = cuda.local.array(2, float32)
            l = cuda.local.array(2, float32)
            alpha = cuda.local.array(2, float32)
            for n in range(RO):
                Oi[n] = float32(0)
            for r in range(2):
                m[r] = -float32(float("inf"))
                l[r] = float32(0)
            g, t = uint32(tid % uint32(32) // uint32(4)), uint32(tid % uint32(4))
            within = uint32(tid % uint32(WARPGROUP) // uint32(32) * 16 + g)
            r0 = int32(i0 + warpgroup * ROWS)  # the warpgroup's first row
            row = int32(r0 + within)  # the thread's, which has row + 8 besides
            sQ = uint32(sQ + warpgroup * uint32(box))
            q, at_V = descriptor(sQ, 0), uint32(at + (sV - shared_address(sm, at)) // uint32(2))

            mbarrier_wait(bars, 0)
            if Tc > 0:
                if ping_pong and warpgroup == consumers - 1 and Tc > 1:
                    bar_arrive(turns, pair)  # the first consumer has the first turn
                wait_until_full(bars, full_K, 0)
                start_S(S, q, descriptor(sK, 0))  # S = QKᵀ
                all_products()
                have_S(S, 0)
                if leader:
                    mbarrier_arrive(bar_of(bars, empty_K, 0))
                j0 = int32(j_first * Bc)
                if partial(r0, j0, Nk, lo, hi):
                    mask(S, row, j0 + 2 * t, Nk, lo, hi)
                softmax(S, m, l, alpha, scale)
                rounded(S, P)

                for n in range(int32(1), int32(Tc)):
                    if border(i0, j0, lo, hi):
                        wait_until_full(bars, full_V, n - 1)
                        V_before = uint32(at_V + stage(n - 1) * (KV_bytes // 2))
                        set_aside(sm, V_before, Oi, row - j0, lo, hi, tid)
                    wait_until_full(bars, full_K, n)
                    if ping_pong:
                        bar_sync(turns + warpgroup, pair)
                    start_S(S, q, descriptor(tile_at(sK, n), 0))
                    wait_until_full(bars, full_V, n - 1)
                    start_O(Oi, P, descriptor(tile_at(sV, n - 1), KV_panel))  # O += PV, one behind
                    if ping_pong:
                        if warpgroup < consumers - 1:
                            bar_arrive(turns + 1 + warpgroup, pair)
                        elif n + 1 < Tc:
                            bar_arrive(turns, pair)
                    all_but_one()
                    have_S(S, 0)
                    if leader:
                        mbarrier_arrive(bar_of(bars, empty_K, n))
                    j0 = int32((j_first + n) * Bc)
                    if partial(r0, j0, Nk, lo, hi):
                        mask(S, row, j0 + 2 * t, Nk, lo, hi)
                    softmax(S, m, l, alpha, scale)  # while O is under way
                    all_products()
                    have_O(Oi, 0)
                    if leader:
                        mbarrier_arrive(bar_of(bars, empty_V, n - 1))
                    rounded(S, P)
                    rescale(Oi, alpha)

                wait_until_full(bars, full_V, Tc - 1)
                if border(i0, j0, lo, hi):
                    V_last = uint32(at_V + stage(Tc - 1) * (KV_bytes // 2))
                    set_aside(sm, V_last, Oi, row - j0, lo, hi, tid)
                start_O(Oi, P, descriptor(tile_at(sV, Tc - 1), KV_panel))
                all_products()
                have_O(Oi, 0)

            for r in range(2):
                l[r] = row_sum(l[r])
                alpha[r] = reciprocal(l[r]) if l[r] != float32(0) else float32(0)
                if t == 0 and row + 8 * r < Nq:
                    shift = m[r] * scale if m[r] != -float32(float("inf")) else float32(0)
                    L[part_b, h, row + 8 * r] = shift * float32(ln2) + log(l[r])  # write L_i
            rescale(Oi, alpha)
            if wide:
                store_wide(O[part_b, h], Oi, row, Nq)  # write O_i
            else:
                write(O, Oi, sm, at, sQ, within, warpgroup, leader, r0, h, b)

    return hopper
