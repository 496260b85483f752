"""FlashAttention-3's backward pass: FlashAttention-2's, by warpgroups of compute capability 9.0.

One warpgroup of a block, the producer, asks for tiles of queries; the others, the consumers, have
64 keys each. Scores have keys as rows: Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, so that P and dS are in registers
where `wgmma` wants them on the left in dV += Pᵀ dO and dK += dSᵀ Q. For dQ = dS K, which sums over
the keys of all consumers, they put dS in shared memory, and each computes a part of dQᵀ = Kᵀ dSᵀ.
The copy engine adds the parts up in global memory, in float32 and in the order in which registers
hold them; another kernel puts them in rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from . import padding, warp_tiles, warpgroup_tiles
from .gpu import cuda, device, float32, int32, kernel, types, uint32, widen
from .hopper import rule_types
from .masks import LOG2E, Features
from .ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from .ptx.shared import fence_proxy_async, shared_address
from .ptx.tma import (
    bulk_add,
    bulk_load,
    fence_tensor_map,
    tensor_maps,
    tma_commit_group,
    tma_store,
    tma_wait_group,
    tma_wait_group_read,
)
from .ptx.warp import fetch_two, load_eight, opaque, pack, shuffle_xor, store_eight
from .ptx.warpgroup import bar_red_or, bar_sync, setmaxnreg_dec, setmaxnreg_inc
from .ptx.wgmma import PANEL, ROW_BYTES, descriptor, pin, wgmma_wait_group
from .warpgroup_tiles import ALIGNED, ROWS, WARPGROUP

WARP_ROWS = 8  # of a warp in row_statistics: what it writes are whole sectors of 32 bytes
STAGES = 2  # places for a tile of Q, one of dO, and one of dS, which another consumer still reads


@dataclass(frozen=True)
class BackwardTile:
    """The sizes of a block: Bc keys, 64 for each consumer; query tiles of Br; all of d columns.

    Attributes
    ----------
    Br, Bc, d : int
        Bc is 64 or 128, and d 64 or as many; Br a multiple of 16, at most 128.
    """

    Br: int
    Bc: int
    d: int

    def __post_init__(self) -> None:
        fits = self.Bc in (64, 128) and self.Bc % self.d == 0 and 16 <= self.Br <= 128
        if not fits or self.Br % 16 or (PANEL % self.dQ_queries and self.Bc != self.d):
            raise ValueError(
                f"tiles={(self.Br, self.Bc)!r}: expected 64 or 128 keys, not fewer than "
                f"d={self.d}, and a multiple of 16 queries, at most 128"
            )

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.Bc // ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: one warpgroup more, the producer."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the producer, and of a consumer: they share out what they begin with.

        A kernel of three warpgroups begins with 168 for each, 504 in all: to wait for more would be
        for ever. One consumer alone has as many as a thread can have.
        """
        return {1: (256, 256), 2: (24, 240)}[self.consumers]

    @property
    def early(self) -> bool:
        """Whether there are registers enough to start dV += Pᵀ dO before dS is computed."""
        return self.Br + self.Br // 4 + self.d <= 208  # S, dP and P; dK and dV

    @property
    def panels(self) -> int:
        """Panels of 64 columns of Q, K, V and dO."""
        return self.d // PANEL

    @property
    def dQ_queries(self) -> int:
        """Queries of a consumer's part of dQᵀ, which has 64 of the d rows."""
        return self.Br * self.panels // self.consumers

    @property
    def dQ_floats(self) -> int:
        """Floats of such a part."""
        return PANEL * self.dQ_queries

    @property
    def QdO_bytes(self) -> int:
        """Bytes of a tile of Q or of dO."""
        return 2 * self.Br * self.d

    @property
    def KV_bytes(self) -> int:
        """Bytes of a tile of keys or of values."""
        return 2 * self.Bc * self.d

    @property
    def dS_bytes(self) -> int:
        """Bytes of dS, in panels of 64 queries."""
        return ROW_BYTES * self.Bc * -(-self.Br // PANEL)

    @property
    def mbarriers(self) -> int:
        """K and V there; K there again; and of each stage, Q and dO there, Q and dO free."""
        return 2 + 4 * STAGES

    @property
    def at(self) -> dict[str, int]:
        """Where in shared memory each tile begins, in bytes; then mbarriers, and bits of keys."""
        places, place = {}, 0
        for name, size in (
            ("K", self.KV_bytes), ("V", self.KV_bytes), ("Q", STAGES * self.QdO_bytes),
            ("dO", STAGES * self.QdO_bytes), ("dS", STAGES * self.dS_bytes),
            ("dQ", 4 * self.dQ_floats * self.consumers), ("L", STAGES * 4 * self.Br),
            ("D", STAGES * 4 * self.Br), ("mbarriers", 8 * self.mbarriers),
            ("real", 4 * self.real_words),
        ):  # fmt: skip
            places[name], place = place, place + size
        return places

    @property
    def real_words(self) -> int:
        """32-bit words that say which keys are real."""
        return self.Bc // 32

    @property
    def bytes(self) -> int:
        """Bytes of shared memory: all of that, and what it takes to begin where a tile may."""
        return ALIGNED + self.at["real"] + 4 * self.real_words


def tile_for(
    Br: int, Bc: int, d: int, threads: tuple[int, int] | None = None, results: int = 1
) -> BackwardTile:
    """The tile of a width that is rounded up to whole panels; `threads` and `results` are given."""
    return BackwardTile(Br, Bc, -(-d // PANEL) * PANEL)


def signature(f: Features) -> tuple[Any, ...]:
    """Numba types of the kernel's arguments."""
    tensor_map, A = types.Array(types.uint8, 1, "C"), types.Array(types.float32, 2, "C")
    i, u = types.int32, types.uint32
    rules = types.BaseTuple.from_types(rule_types(f))
    return (*[tensor_map] * 6, A, A, A, i, i, i, i, types.float32, u, u, rules)


def arguments(
    p: Any, tile: BackwardTile, dO: Any, L: Any, D: Any, dQ: Any, dK: Any, dV: Any,
    tables: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """The kernel's arguments for a checked `launch.Problem`; L, D and dQ as matrices.

    tables: as in hopper.arguments.
    """
    lo, hi, scale = p.rules[3:6]
    boxes = {"q": (p.Q, tile.Br), "k": (p.K, tile.Bc), "v": (p.V, tile.Bc), "do": (dO, tile.Br)}
    boxes |= {"dk": (dK, ROWS), "dv": (dV, ROWS)}
    maps = tensor_maps(boxes, p.features.dtype)
    sizes = np.array([p.Nq, p.Nk, lo, hi], np.int32)
    rules = (*tables, *(p.rules[7:10] if p.features.dropout else ()))
    return (*maps, L, D, dQ, *sizes, scale, np.uint32(p.heads), np.uint32(p.group), rules)


def lanes(d: int) -> int:
    """How many lanes of a warp share a row in `row_statistics`."""
    return 8 if d <= 64 else 16


def loads_under_way(d: int) -> int:
    """Of 16 bytes, that a thread of `row_statistics` waits for at once: of dO and of O."""
    return 2 * WARP_ROWS * lanes(d) // 32


@cache
def row_statistics(d: int, threads: int, dtype: str) -> Any:
    """L2 = L log2(e) and D = rowsum(dO ∘ O), a warp for eight rows. Line 4 of Algorithm 2.

    dO, O (batch, heads, Nq, d), L (batch, heads, Nq); writes L2, D (batch heads, Nq or more). A row
    beyond the queries, or one that sees no keys, has D = 0 and L2 = inf, so that its weights are 0.
    """
    together = lanes(d)
    at_once, halvings = 32 // together, tuple(n for n in (1, 2, 4, 8) if n < together)
    passes, rows = WARP_ROWS // at_once, WARP_ROWS * threads // 32  # of a warp, and of a block
    room, to_float, log2e = 4 * passes, widen(dtype), LOG2E

    @kernel(threads)
    def backward_statistics(dO, O, L, L2, D):
        tid = uint32(cuda.threadIdx.x)
        H, Nq, N = uint32(L.shape[1]), int32(L.shape[2]), int32(L2.shape[1])
        Tr = uint32((N + (rows - 1)) // rows)
        block, lane = uint32(cuda.blockIdx.x), uint32(tid % uint32(together))
        bh, first = uint32(block // Tr), uint32(block % Tr * rows + tid // uint32(32) * WARP_ROWS)
        b, h = uint32(bh // H), uint32(bh % H)
        i0 = int32(first + tid % uint32(32) // uint32(together))  # of the thread's, in each pass
        x = cuda.local.array(room, uint32)
        y = cuda.local.array(room, uint32)
        for n in range(passes):
            i = int32(i0 + n * at_once)
            if i < Nq and 8 * lane < d:
                load_eight(x, 4 * n, dO[b, h], i, 8 * lane)
                load_eight(y, 4 * n, O[b, h], i, 8 * lane)
            else:
                for e in range(4):
                    x[4 * n + e] = uint32(0)
                    y[4 * n + e] = uint32(0)
        mine = float32(0)
        for n in range(passes):
            total = float32(0)
            for e in range(4 * n, 4 * n + 4):
                low, high = uint32(0xFFFF), uint32(16)
                total += to_float(np.uint16(x[e] & low)) * to_float(np.uint16(y[e] & low))
                total += to_float(np.uint16(x[e] >> high)) * to_float(np.uint16(y[e] >> high))
            for apart in halvings:
                total += shuffle_xor(total, uint32(apart))
            if lane == n:
                mine = total
        i = int32(i0 + lane * at_once)
        if lane < passes and i < N:
            lse = L[b, h, i] if i < Nq else -float32(float("inf"))
            nothing = lse == -float32(float("inf"))
            L2[bh, i] = float32(float("inf")) if nothing else lse * float32(log2e)
            D[bh, i] = float32(0) if nothing else mine

    return backward_statistics


@cache
def finish(tile: BackwardTile, dtype: str) -> Any:
    """dQ = scale times the sum of what the blocks added up, in rows and in 16 bits.

    parts (batch heads Tr consumers, 64 dQ_queries): what the threads' registers held, a block for
    each tile of queries; writes dQ (batch, heads, Nq, d). scale has a factor of log2(e). Two
    threads have a sector of dQ, 32 bytes, and write half of it each, in one instruction.
    """
    Br, consumers, panels, queries = tile.Br, tile.consumers, tile.panels, tile.dQ_queries
    jobs, eights, two, ln2 = consumers * queries // 8 * 32, queries // 8, pack(dtype), 1 / LOG2E

    @kernel(WARPGROUP)
    def backward_dQ(parts, dQ, scale):
        H, Nq, d = uint32(dQ.shape[1]), int32(dQ.shape[2]), int32(dQ.shape[3])
        Tr, block = uint32(uint32(Nq + (Br - 1)) // uint32(Br)), uint32(cuda.blockIdx.x)
        i0, bh = int32(block % Tr * Br), uint32(block // Tr)
        b, h = uint32(bh // H), uint32(bh % H)
        x = cuda.local.array(16, float32)
        W = cuda.local.array(4, uint32)
        by = scale * float32(ln2)
        for job in range(uint32(cuda.threadIdx.x), jobs, WARPGROUP):
            half, t, warp = uint32(job % 2), uint32(job // 2 % 4), uint32(job // 8 % 4)
            n, w = uint32(job // 32 % eights), uint32(job // 32 // eights)
            for g in range(8):
                at = uint32(4 * (WARPGROUP * n + 32 * warp + 4 * g + t) + 2 * half)
                fetch_two(x, 2 * g, parts, uint32(block * consumers + w), at)
            i = int32(i0 + w // panels * queries + 8 * n + 2 * t)
            column = int32(PANEL * (w % panels) + 16 * warp + 8 * half)
            for u in range(2):
                for e in range(4):
                    W[e] = two(x[4 * e + 2 + u] * by, x[4 * e + u] * by)
                if i + u < Nq and column < d:
                    store_eight(dQ[b, h], int32(i + u), column, W, 0)

    return backward_dQ


@cache
def flash_attention_3_backward(tile: BackwardTile, f: Features) -> Any:
    """The backward pass of Shah et al. 2024 (arXiv:2407.08608), a block for each tile of keys.

    Q, dO (batch, heads, Nq, d), K, V (batch, key heads, Nk, d), and what is written, dK and dV, are
    tensor maps, of boxes of Br rows, of Bc, and of 64; the kernel's d is a multiple of 64, and
    columns beyond the tensor's are 0. L, D (batch heads, Tr Br) are as `row_statistics` leaves
    them. Adds to dQ, of which `finish` says how it lies, in an order that is left open. The query
    heads that share a key head come one after the other, while K_j and V_j stay. rules: as for
    `hopper.flash_attention_3`; K_j and V_j have 0 at padded keys, and so have dK_j and dV_j.
    """
    Br, Bc, d, consumers, panels = tile.Br, tile.Bc, tile.d, tile.consumers, tile.panels
    at, QdO_bytes, dS_bytes = tile.at, tile.QdO_bytes, tile.dS_bytes
    at_K, at_V, at_Q, at_dO, at_dS = (at[name] for name in ("K", "V", "Q", "dO", "dS"))
    at_dQ, at_L, at_D, at_bars = (at[name] for name in ("dQ", "L", "D", "mbarriers"))
    at_real, real_words, padded, dropout = at["real"], tile.real_words, f.keys, f.dropout
    Q_panel, KV_panel, box = ROW_BYTES * Br, ROW_BYTES * Bc, ROW_BYTES * ROWS  # bytes
    queries, dQ_bytes, row_bytes = tile.dQ_queries, 4 * tile.dQ_floats, 4 * Br
    RS, RP, RK, RQ = Br // 2, Br // 4, d // 2, queries // 2  # registers of S, P, dK and dQ
    ln2, banded, shares, early = 1 / LOG2E, f.band, consumers > 1, tile.early
    again, full_Q, full_dO, empty_Q, empty_dO = 8, *(8 * (2 + n * STAGES) for n in range(4))
    everyone, mine = 1, 2  # named barriers: of all consumers, and of the first of them
    computing = consumers * WARPGROUP  # threads

    give_up, take = setmaxnreg_dec(tile.registers[0]), setmaxnreg_inc(tile.registers[1])
    load_KV, load_QdO = warpgroup_tiles.load(Bc, d), warpgroup_tiles.load(Br, d)
    start_S = warpgroup_tiles.rows_by_rows(Bc, Br, d, f.dtype)
    start_dKV = warpgroup_tiles.rows_by_columns(Br, d, f.dtype)
    start_dQ = warpgroup_tiles.columns_by_columns(Bc, queries, f.dtype)
    all_but_one, all_products = wgmma_wait_group(1), wgmma_wait_group(0)
    have_left = tma_wait_group_read(0)
    stage, bar_of, wait_until_full, wait_until_empty = warpgroup_tiles.ring(STAGES)
    have_S, have_dKV, have_dQ = pin(RS), pin(RK), pin(RQ)
    partial = warpgroup_tiles.partial_transposed(Br, banded)
    clear_masked = warpgroup_tiles.clear_masked(Br, banded)
    weights, gradient = warpgroup_tiles.weights(Br), warpgroup_tiles.weights_gradient(Br)
    rounded, put_dS = warpgroup_tiles.rounded(Br, f.dtype), warpgroup_tiles.put_rounded(Bc, Br)
    put_dQ, put = warpgroup_tiles.put_wide(queries), warpgroup_tiles.put(Bc, d, f.dtype)

    not_finite_K = warpgroup_tiles.not_finite(Bc, d, computing, f.dtype)
    not_finite = warpgroup_tiles.not_finite(Br, d, computing, f.dtype)
    add_not_finite = warpgroup_tiles.add_not_finite(Br, d, f.dtype)
    clear_K = warpgroup_tiles.clear_not_finite(Bc, d, computing, f.dtype)
    clear = warpgroup_tiles.clear_not_finite(Br, d, computing, f.dtype)
    clear_padding = warpgroup_tiles.clear_padding(Bc, d, computing)
    clear_rows_dS, clear_rows = warpgroup_tiles.clear_rows(Br), warpgroup_tiles.clear_rows(d)
    kept_words, kept = warp_tiles.kept_words(Br), warp_tiles.kept_transposed(Br)
    drop, weigh = warp_tiles.drop(Br), warpgroup_tiles.weigh(Br, f.dtype, dropout)

    some_real = padding.real_in(Bc)

    @device
    def following_that_sees(rules, b, j0, i, i_stop, Nq, lo, hi):
        """The next tile of queries with one that sees a real key of the block, or i_stop."""
        c, i = rules[0][b, j0 // Bc], uint32(i + uint32(1))
        while i < i_stop and not some_real(
            rules[1], b, c, int32(i * Br + lo), int32(min(int32((i + 1) * Br), Nq) + hi)
        ):
            i = uint32(i + uint32(1))
        return i

    @device
    def visited_that_see(rules, b, j0, i_first, i_stop, Nq, lo, hi):
        """The first tile of queries with one that sees a real key of the block; how many."""
        before, turns = uint32(i_first - uint32(1)), uint32(0)
        if i_first < i_stop:
            i_first = following_that_sees(rules, b, j0, before, i_stop, Nq, lo, hi)
        i = i_first
        while i < i_stop:
            turns = uint32(turns + uint32(1))
            i = following_that_sees(rules, b, j0, i, i_stop, Nq, lo, hi)
        return i_first, turns

    @device
    def following_of_all(rules, b, j0, i, i_stop, Nq, lo, hi):
        return uint32(i + 1)

    @device
    def visited_of_all(rules, b, j0, i_first, i_stop, Nq, lo, hi):
        return i_first, i_stop - i_first

    following = following_that_sees if banded and padded else following_of_all
    visited = visited_that_see if banded and padded else visited_of_all

    @device
    def place(base, at, size, n):
        return uint32(base + uint32(at) + uint32(stage(n) * size))

    @device
    def produce(
        Q, K, V, dO, L, D, base, bars, j0, key_head, b, heads, group, i_first, i_stop, turns,
        rules, Nq, lo, hi,
    ):  # fmt: skip
        fence_tensor_map(Q)
        fence_tensor_map(K)
        fence_tensor_map(V)
        fence_tensor_map(dO)
        load_KV(uint32(base + uint32(at_K)), K, j0, key_head, b, bars)  # load K_j, V_j
        load_KV(uint32(base + uint32(at_V)), V, j0, key_head, b, bars)
        h, i = uint32(key_head * group), i_first
        for n in range(uint32(group * turns)):  # load dO_i, D_i, Q_i, L_i
            here, i0 = opaque(base), uint32(i * Br)  # addresses are not kept: registers are scarce
            row = uint32(b * heads + h)
            bars = uint32(here + uint32(at_bars))
            wait_until_empty(bars, empty_dO, n)  # first: it is done with before Q is
            full = bar_of(bars, full_dO, n)
            load_QdO(place(here, at_dO, QdO_bytes, n), dO, i0, h, b, full)
            mbarrier_expect_tx(full, row_bytes)
            bulk_load(place(here, at_D, row_bytes, n), D, row, i0, row_bytes, full)
            wait_until_empty(bars, empty_Q, n)
            full = bar_of(bars, full_Q, n)
            load_QdO(place(here, at_Q, QdO_bytes, n), Q, i0, h, b, full)
            mbarrier_expect_tx(full, row_bytes)
            bulk_load(place(here, at_L, row_bytes, n), L, row, i0, row_bytes, full)
            i = following(rules, b, j0, i, i_stop, Nq, lo, hi)
            if i == i_stop:
                h, i = uint32(h + 1), i_first

    @device
    def row_of(tid):
        """The first row of a thread, of its warpgroup's 64."""
        return uint32(tid % uint32(WARPGROUP) // uint32(32) * 16 + tid % uint32(32) // uint32(4))

    @device
    def border(j0, i0, lo, hi):
        """Whether the band masks a score of the block's keys and a query tile."""
        return banded and (j0 < i0 + Br - 1 + lo or j0 + Bc - 1 > i0 + hi)

    @device
    def set_aside(sm, Q, dO, dV, j, lo, hi, tid):
        """Of a Q_i and dO_i with inf or NaN: dO's go to dV where they are seen, and 0 is left.

        Where Q's are seen, dS is NaN by itself. j: the thread's first key, counted from the tile's
        first query. By all consumers together, once no product reads the tiles.
        """
        bad = not_finite(sm, Q, tid) | not_finite(sm, dO, tid)
        if bar_red_or(everyone, computing, bad) != 0:
            add_not_finite(sm, dO, dV, int32(j - hi), int32(j - lo))
            bar_sync(everyone, computing)
            clear(sm, Q, tid)
            clear(sm, dO, tid)
            fence_proxy_async()
            bar_sync(everyone, computing)

    @device
    def start_dV(sm, dVj, P, base, begin, n, j0, i0, key, lo, hi, tid):
        """dV += Pᵀ dO."""
        if banded and border(j0, i0, lo, hi):
            all_products()
            Q = uint32(place(begin, at_Q, QdO_bytes, n) >> uint32(1))
            dO = uint32(place(begin, at_dO, QdO_bytes, n) >> uint32(1))
            set_aside(sm, Q, dO, dVj, int32(key - i0), lo, hi, tid)
        start_dKV(dVj, P, descriptor(place(base, at_dO, QdO_bytes, n), Q_panel))

    @device
    def find_real_keys(rules, words, begin, b, j, tid):
        """How many of the block's keys are real: 0, some (1), or all (2). Once all threads meet."""
        rank, walked = rules[0], rules[1]
        c = rank[b, j]
        if rank[b, j + 1] == c:
            cuda.syncthreads()
            return int32(0)
        if tid < real_words:
            words[uint32(begin + uint32(at_real)) // uint32(4) + tid] = walked[
                b, c, padding.BITS + tid
            ]
        cuda.syncthreads()
        return int32(2) - walked[b, c, padding.NUMBER] % 2

    @device
    def all_real(rules, words, begin, b, j, tid):
        cuda.syncthreads()
        return int32(2)

    real_keys = find_real_keys if padded else all_real

    @device
    def clear_padded(words, begin, at, tid):
        """0 for what a tile of keys or values has at padded keys. By all consumers together."""
        real, tile_at = uint32(begin + uint32(at_real)), uint32(begin + uint32(at))
        clear_padding(words, tile_at // uint32(4), real // uint32(4), tid)
        fence_proxy_async()
        bar_sync(everyone, computing)

    @device
    def real_rows(words, begin, tid):
        """Bit 0: whether the thread's first key is real; bit 8: the second."""
        warp = uint32(tid // uint32(32))
        at = uint32(uint32(begin + uint32(at_real)) // uint32(4) + warp // uint32(2))
        row = uint32(warp % uint32(2) * 16 + tid % uint32(32) // uint32(4))
        return uint32(uint32(words[at]) >> row)

    @device
    def draw(keep, rules, b, h, key, i0):
        kept(keep, rules[-3], rules[-2], b, h, key, i0)

    @device
    def draw_nothing(keep, rules, b, h, key, i0):
        pass

    @device
    def drop_some(dP, keep, rules):
        drop(dP, keep, rules[-1])

    @device
    def drop_nothing(dP, keep, rules):
        pass

    choose, take_out = (draw, drop_some) if dropout else (draw_nothing, drop_nothing)

    @device
    def set_K_aside(sm, begin, tid):
        """0 for inf and NaN of K_j: dS is 0 where it is masked, and 0 times these is not."""
        clear_K(sm, uint32(begin + uint32(at_K)) >> uint32(1), tid)
        fence_proxy_async()
        bar_sync(everyone, computing)

    @device
    def bring_K_back(K, base, bars, j0, key_head, b, times, tid):
        """K_j as it was, for the scores of the next tile; `times`: how often before."""
        bar_sync(everyone, computing)  # no product reads K_j
        full = uint32(bars + uint32(again))
        if tid == 0:
            fence_tensor_map(K)
            load_KV(uint32(base + uint32(at_K)), K, j0, key_head, b, full)
        mbarrier_wait(full, times % uint32(2))

    @kernel(tile.threads, 1)
    def hopper_backward(Q, K, V, dO, dK, dV, L, D, dQ, Nq, Nk, lo, hi, scale, heads, group, rules):
        sm = cuda.shared.array(0, types.uint16)
        floats = cuda.shared.array(0, float32)  # the same memory
        words = cuda.shared.array(0, int32)
        tid = uint32(cuda.threadIdx.x)
        warpgroup, leader = uint32(tid // uint32(WARPGROUP)), tid % uint32(WARPGROUP) == 0
        begin = uint32((ALIGNED - shared_address(sm, 0) % ALIGNED) % ALIGNED)
        base = uint32(shared_address(sm, 0) + begin)
        bars = uint32(base + uint32(at_bars))

        Tc, block = uint32(uint32(Nk + (Bc - 1)) // uint32(Bc)), uint32(cuda.blockIdx.x)
        j0 = int32(block % Tc * Bc)  # causal: of a head, the longest columns first
        key_heads = uint32(heads // group)
        key_head, b = uint32(block // Tc % key_heads), uint32(block // Tc // key_heads)
        first, stop = int32(0), int32(Nq)  # queries that see one of the keys
        if banded:
            first = max(first, int32(j0 - hi))
            stop = min(stop, int32(min(j0 + Bc, Nk) - lo))
        i_first, i_stop = uint32(0), uint32(0)
        if first < stop:
            i_first = uint32(uint32(first) // uint32(Br))
            i_stop = uint32(uint32(stop + (Br - 1)) // uint32(Br))

        if tid == 0:
            mbarrier_init(bars, 2)
            mbarrier_init(uint32(bars + uint32(again)), 1)
            for n in range(2 * STAGES):
                mbarrier_init(uint32(bars + uint32(full_Q + 8 * n)), 2)
                mbarrier_init(uint32(bars + uint32(empty_Q + 8 * n)), computing)
            fence_mbarrier_init()
        real = real_keys(rules, words, begin, b, block % Tc, tid)
        if real == 0:
            i_stop = i_first
        i_first, turns = visited(rules, b, j0, i_first, i_stop, Nq, lo, hi)

        if warpgroup == consumers:
            if shares:
                give_up()
            if leader:
                produce(
                    Q, K, V, dO, L, D, base, bars, j0, key_head, b, heads, group, i_first, i_stop,
                    turns, rules, Nq, lo, hi,
                )  # fmt: skip
        else:
            if shares:
                take()
            S = cuda.local.array(RS, float32)
            dP = cuda.local.array(RS, float32)
            P = cuda.local.array(RP, uint32)
            dS = cuda.local.array(RP, uint32)
            dKj = cuda.local.array(RK, float32)
            dVj = cuda.local.array(RK, float32)
            dQi = cuda.local.array(RQ, float32)
            keep = cuda.local.array(kept_words, uint32)
            for n in range(RK):
                dKj[n] = float32(0)
                dVj[n] = float32(0)
            mbarrier_wait(bars, 0)
            if real == 1:
                clear_padded(words, begin, at_K, tid)
                clear_padded(words, begin, at_V, tid)
            bad_K, reloads = False, uint32(0)
            if banded:
                odd = not_finite_K(sm, uint32(begin + uint32(at_K)) >> uint32(1), tid)
                bad_K = bar_red_or(everyone, computing, odd) != 0
            h, i = uint32(key_head * group), i_first
            for n in range(uint32(group * turns)):
                tid = opaque(tid)  # what follows from it is not kept: registers are scarce
                warpgroup, leader = uint32(tid // uint32(WARPGROUP)), tid % uint32(WARPGROUP) == 0
                within, t = row_of(tid), uint32(tid % uint32(4))
                every = tid < uint32(computing)  # always true; without it the assembler spills
                mine_in = uint32(warpgroup * uint32(box))  # bytes: where its keys begin in a tile
                i0, r0 = int32(i * Br), int32(j0 + warpgroup * ROWS)  # its first key
                key = int32(r0 + within)  # the thread's, which has key + 8 besides
                whole = not partial(r0, i0, Nq, Nk, lo, hi)
                Q_at, dS_at = place(base, at_Q, QdO_bytes, n), place(base, at_dS, dS_bytes, n)
                wait_until_full(bars, full_Q, n)
                k = uint32(base + uint32(at_K) + mine_in)
                start_S(S, descriptor(k, 0), descriptor(Q_at, 0))  # Sᵀ = K Qᵀ
                wait_until_full(bars, full_dO, n)
                dO_at = place(base, at_dO, QdO_bytes, n)
                v = uint32(base + uint32(at_V) + mine_in)
                start_S(dP, descriptor(v, 0), descriptor(dO_at, 0))  # dPᵀ = V dOᵀ
                choose(keep, rules, b, h, key, i0)
                all_but_one()
                have_S(S, 0)
                weights(S, floats, place(begin, at_L, row_bytes, n) >> uint32(2), scale)
                if not whole:
                    clear_masked(S, key, i0 + 2 * t, Nq, Nk, lo, hi)
                if early:
                    weigh(S, P, keep, rules)
                    start_dV(sm, dVj, P, base, begin, n, j0, i0, key, lo, hi, tid)
                    all_but_one()
                else:
                    all_products()
                have_S(dP, 0)
                take_out(dP, keep, rules)
                gradient(dP, S, floats, place(begin, at_D, row_bytes, n) >> uint32(2))
                if not early:
                    weigh(S, P, keep, rules)
                if not whole:
                    clear_masked(dP, key, i0 + 2 * t, Nq, Nk, lo, hi)
                if real == 1:
                    clear_rows_dS(dP, real_rows(words, begin, tid))
                rounded(dP, dS)
                if not early:
                    start_dV(sm, dVj, P, base, begin, n, j0, i0, key, lo, hi, tid)
                put_dS(sm, (place(begin, at_dS, dS_bytes, n) + mine_in) >> uint32(1), dS, within)
                fence_proxy_async()
                if leader:
                    have_left()
                bar_sync(everyone, computing)  # dS is there, and the place for dQ is free
                hidden = border(j0, i0, lo, hi)
                if banded and hidden and bad_K:
                    set_K_aside(sm, begin, tid)
                panel, chunk = uint32(warpgroup % panels), uint32(warpgroup // panels * queries)
                K_columns = uint32(base + uint32(at_K) + panel * uint32(KV_panel))
                dS_part = uint32(dS_at + chunk // PANEL * KV_panel + chunk % PANEL * 2)
                start_dQ(dQi, descriptor(K_columns, 0), descriptor(dS_part, KV_panel))
                start_dKV(dKj, dS, descriptor(Q_at, Q_panel))  # dK += dSᵀ Q
                all_but_one()
                have_dKV(dVj, 0)
                have_dQ(dQi, 0)
                if every:  # each thread says that it has read D_i
                    mbarrier_arrive(bar_of(bars, empty_dO, n))
                dQ_in = uint32(at_dQ + warpgroup * uint32(dQ_bytes))
                put_dQ(floats, uint32(begin + dQ_in) >> uint32(2), dQi)
                fence_proxy_async()
                bar_sync(mine + warpgroup, WARPGROUP)
                if leader:  # dQᵀ += Kᵀ dSᵀ
                    Tr = uint32(uint32(Nq + (Br - 1)) // uint32(Br))
                    part = ((b * heads + h) * Tr + i) * consumers + warpgroup
                    bulk_add(dQ, part, 0, uint32(base + dQ_in), dQ_bytes)
                    tma_commit_group()
                all_products()
                have_dKV(dKj, 0)
                if every:  # and L_i
                    mbarrier_arrive(bar_of(bars, empty_Q, n))
                if banded and hidden and bad_K:
                    bring_K_back(K, base, bars, j0, key_head, b, reloads, tid)
                    reloads = uint32(reloads + 1)
                    if real == 1:
                        clear_padded(words, begin, at_K, tid)
                i = following(rules, b, j0, i, i_stop, Nq, lo, hi)
                if i == i_stop:
                    h, i = uint32(h + 1), i_first

            for n in range(RK):
                dKj[n] *= scale * float32(ln2)
            if real == 1:
                clear_rows(dKj, real_rows(words, begin, tid))
                clear_rows(dVj, real_rows(words, begin, tid))
            within, mine_in = row_of(tid), uint32(warpgroup * uint32(box))
            bar_sync(everyone, computing)  # nobody needs K_j or V_j any more
            put(sm, uint32(begin + uint32(at_K) + mine_in) >> uint32(1), dKj, within)
            put(sm, uint32(begin + uint32(at_V) + mine_in) >> uint32(1), dVj, within)
            fence_proxy_async()
            bar_sync(mine + warpgroup, WARPGROUP)
            if leader:  # write dK_j, dV_j
                r0 = int32(j0 + warpgroup * ROWS)
                fence_tensor_map(dK)
                fence_tensor_map(dV)
                for c in range(panels):
                    tile_at = uint32(base + mine_in + uint32(c * KV_panel))
                    tma_store(uint32(tile_at + uint32(at_K)), dK, PANEL * c, r0, key_head, b)
                    tma_store(uint32(tile_at + uint32(at_V)), dV, PANEL * c, r0, key_head, b)
                tma_commit_group()
                tma_wait_group()

    return hopper_backward
