"""What warpgroups of compute capability 9.0 do with 16-bit tiles: load, multiply, softmax, store.

A tile in shared memory is made of panels, 64 columns each: a row of a panel is 128 bytes, swizzled,
as `tma_load` leaves it and as `wgmma` takes it. A warpgroup has 64 rows of a product, in the layout
of `ptx.wgmma.accumulator`: with lane = 4 g + t, a thread of warp w has columns 8 n + 2 t and the
next of row 16 w + g in registers 4 n and 4 n + 1, and of row 16 w + g + 8 in the two after these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

from .gpu import cuda, device, float32, int32, store4, uint32, uint64, widen
from .padding import BITS, entry
from .ptx.mbarrier import mbarrier_expect_tx, mbarrier_wait
from .ptx.tma import tma_load
from .ptx.warp import (
    add_nothing,
    exp2,
    load_two,
    load_words,
    pack,
    pack_four,
    stmatrix,
    store_two,
)
from .ptx.wgmma import (
    PANEL,
    ROW_BYTES,
    pin,
    wgmma_columns,
    wgmma_commit_group,
    wgmma_fence,
    wgmma_registers,
    wgmma_registers_rows,
    wgmma_shared,
)
from .warp_tiles import EXPONENT, row_max, survives

WARPGROUP = 128  # threads
ROWS = 64  # of queries, that a warpgroup has
ALIGNED = 1024  # bytes: where a tile may begin
FP8_ROWS = 128  # that share a scale, of Q, K and V; and e4m3 columns of a panel
ROOM = 227 * 1024  # bytes of shared memory of a block
WORDS = 7  # that say what is to be done: first query, head, part and batch, key tiles, head of keys
TURNS = 4  # of which that is kept: those with a place for Q, and the one after


@dataclass(frozen=True)
class WarpgroupTile:
    """The sizes of a block: Br queries, 64 for each consumer; key tiles of Bc; all of d columns.

    Attributes
    ----------
    Br, Bc, d : int
        Br is 64, 128 or 192; Bc a multiple of 16, d of 64, both at most 256.
    stages : int
        Places for a tile of K, and as many for one of V.
    ping_pong : bool
        Whether the consumers take turns to ask for products.
    fp8 : bool
        Whether Q, K and V are e4m3: d is 128 then, and so is Bc. V is transposed.
    """

    Br: int
    Bc: int
    d: int
    stages: int = 2
    ping_pong: bool = False
    fp8: bool = False

    def __post_init__(self) -> None:
        if self.fp8 and (self.Br not in (64, 128) or self.Bc != FP8_ROWS or self.d != FP8_ROWS):
            raise ValueError(
                f"tiles={(self.Br, self.Bc)!r}: expected (64, 128) or (128, 128) in FP8"
            )
        if self.Br not in (64, 128, 192) or self.Bc % 16 or not 16 <= self.Bc <= 256:
            raise ValueError(
                f"tiles={(self.Br, self.Bc)!r}: expected 64, 128 or 192 queries, and a multiple of "
                "16 keys, at most 256"
            )

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.Br // ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: one warpgroup more, the producer."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the producer, and of a consumer: 512 in all, a multiprocessor has no more.

        They begin with equal shares. One consumer alone has as many as a thread can have.
        """
        return {1: (256, 256), 2: (40, 232), 3: (32, 160)}[self.consumers]

    @property
    def registers_with_padding(self) -> tuple[int, int]:
        """The same with a padding mask: the producer looks up keys, which takes some more."""
        return (88, 208) if self.consumers == 2 else self.registers

    @property
    def held(self) -> int:
        """Registers that a consumer's thread needs: for S, P and O, and what goes with them."""
        return self.Bc // 2 + self.Bc // 4 + self.d // 2 + 32

    @property
    def Q_bytes(self) -> int:
        """Bytes of a place for a tile of queries, which in FP8 does not fill it: O leaves there."""
        return 2 * self.Br * self.d

    @property
    def loaded_columns(self) -> int:
        """16-bit columns of Q and of K that are loaded, in FP8 for two each."""
        return self.d // 2 if self.fp8 else self.d

    @property
    def V_rows(self) -> int:
        """Rows of a box of V."""
        return self.d if self.fp8 else self.Bc

    @property
    def KV_bytes(self) -> int:
        """Bytes of a place for a tile of keys or of values."""
        return 2 * self.Bc * self.loaded_columns

    @property
    def places(self) -> int:
        """For a tile of Q, which O leaves from too, as many as fit.

        Two, to load one ahead, or three, so that Q need not wait until O has left.
        """
        return next((n for n in (3, 2) if self._bytes(n) <= ROOM), 1)

    @property
    def bars_at(self) -> int:
        """Where the mbarriers begin, in bytes from the first place of Q."""
        return self.places * self.Q_bytes + 2 * self.stages * self.KV_bytes

    @property
    def mbarriers(self) -> int:
        """Full and empty ones of each place of Q, K and V; one of what a V was seen to be."""
        return 2 * self.places + 5 * self.stages

    @property
    def key_words(self) -> int:
        """32-bit words that say which tile is in a stage, and which of its keys are real."""
        return 1 + entry(self.Bc) - BITS

    @property
    def bytes(self) -> int:
        """Bytes of shared memory: tiles, mbarriers, words, and what it takes to begin aligned."""
        return self._bytes(self.places)

    def _bytes(self, places: int) -> int:
        """With words: what to do, what was seen, the keys of each tile."""
        tiles = places * self.Q_bytes + 2 * self.stages * self.KV_bytes
        words = TURNS * WORDS + self.stages + 2 * self.stages * self.key_words
        return ALIGNED + tiles + 8 * (2 * places + 5 * self.stages) + 4 * words


def warpgroup_tile_for(
    Br: int, Bc: int, d: int, threads: tuple[int, int] | None = None, results: int = 1
) -> WarpgroupTile:
    """The tile of a width that is rounded up to whole panels; `threads` and `results` are given.

    Taking turns, and with two stages, it was fastest on an H200.
    """
    return WarpgroupTile(Br, Bc, -(-d // PANEL) * PANEL, ping_pong=True)


def fp8_tile_for(
    Br: int, Bc: int, d: int, threads: tuple[int, int] | None = None, results: int = 1
) -> WarpgroupTile:
    """The same in FP8, where tiles are half as large and four stages were fastest."""
    return WarpgroupTile(Br, Bc, d, stages=4, ping_pong=True, fp8=True)


@cache
def ring(places: int) -> Any:
    """(place, bar, wait_until_full, wait_until_empty) of so many places on chip for tiles.

    The n-th tile has place(n), whose mbarrier is at bar(base, first, n) if those of the places lie
    from base + first on. A consumer waits until the place is full of it; a producer, with mbarriers
    of their own, until it is empty: the tile before has left.
    """

    @device
    def place(n):
        return uint32(uint32(n) % uint32(places))

    @device
    def parity(n):
        return uint32(uint32(n) // uint32(places) % uint32(2))

    @device
    def bar(base, first, n):
        return uint32(base + uint32(uint32(first) + uint32(8 * place(n))))

    @device
    def wait_until_full(base, first, n):
        mbarrier_wait(bar(base, first, n), parity(n))

    @device
    def wait_until_empty(base, first, n):
        mbarrier_wait(bar(base, first, n), uint32(1 - parity(n)))

    return place, bar, wait_until_full, wait_until_empty


@cache
def load(rows: int, d: int) -> Any:
    """load(to, A, row, head, batch, barrier): start to copy a tile of A on chip.

    A (batch, heads, N, d) is a tensor map of boxes of `rows` x 64. The mbarrier gets an arrival,
    and waits for the bytes.
    """
    panel, size = ROW_BYTES * rows, 2 * rows * d

    @device
    def load_tile(to, A, row, head, batch, barrier):
        mbarrier_expect_tx(barrier, uint32(size))
        for n in range(d // PANEL):
            tma_load(uint32(to + uint32(n * panel)), A, PANEL * n, row, head, batch, barrier)

    return load_tile


@cache
def load_transposed(rows: int) -> Any:
    """load_transposed(to, A, column, head, batch, barrier): `load`, of 128 columns of e4m3.

    A (batch, heads, rows, N) in pairs of columns.
    """

    @device
    def load_tile(to, A, column, head, batch, barrier):
        mbarrier_expect_tx(barrier, uint32(ROW_BYTES * rows))
        tma_load(to, A, uint32(column // 2), uint32(0), head, batch, barrier)

    return load_tile


@cache
def rows_by_rows(rows: int, columns: int, d: int, dtype: str) -> Any:
    """rows_by_rows(S, a, b): start S = A Bᵀ for A (64, d) and B (columns, d) on chip, a group.

    a, b: descriptors; A's rows are of a tile with so many `rows`. S (64, columns) is in registers.
    Of e4m3, d counts pairs.
    """
    A_panel, B_panel = ROW_BYTES * rows // 16, ROW_BYTES * columns // 16  # as descriptors count
    wgmma, hold = wgmma_shared(columns, dtype), pin(columns // 2)

    @device
    def start_product(S, a, b):
        hold(S, 0)
        wgmma_fence()
        for n in range(d // 16):
            panel, inside = n // 4, n % 4 * 2
            at_A, at_B = uint64(panel * A_panel + inside), uint64(panel * B_panel + inside)
            wgmma(S, 0, a + at_A, b + at_B, 0 if n == 0 else 1)
        wgmma_commit_group()

    return start_product


@cache
def rows_by_columns(columns: int, d: int, dtype: str) -> Any:
    """rows_by_columns(O, P, b): start O += P B for P (64, columns) and B (columns, d), a group.

    O (64, d) and P are in registers; b is the descriptor of B, with the bytes of a panel.
    """
    wgmma, hold, sixteen_rows = wgmma_registers(d, dtype), pin(d // 2), 16 * ROW_BYTES // 16

    @device
    def start_product(O, P, b):
        hold(O, 0)
        wgmma_fence()
        for n in range(columns // 16):
            wgmma(O, 0, P, 4 * n, b + uint64(sixteen_rows * n), 1)
        wgmma_commit_group()

    return start_product


@cache
def rows_by_transposed(columns: int, d: int) -> Any:
    """rows_by_transposed(O, P, b): `rows_by_columns` of e4m3, for Bᵀ (d, columns) on chip."""
    wgmma, hold = wgmma_registers_rows(d), pin(d // 2)

    @device
    def start_product(O, P, b):
        hold(O, 0)
        wgmma_fence()
        for n in range(columns // 32):
            wgmma(O, 0, P, 4 * n, b + uint64(2 * n), 1)
        wgmma_commit_group()

    return start_product


@cache
def columns_by_columns(rows: int, columns: int, dtype: str) -> Any:
    """columns_by_columns(O, a, b): start O = Aᵀ B for A (rows, 64) and B (rows, columns), a group.

    a, b: descriptors; b with the bytes of a panel. O (64, columns) is in registers.
    """
    wgmma, hold, sixteen_rows = wgmma_columns(columns, dtype), pin(columns // 2), 16 * ROW_BYTES

    @device
    def start_product(O, a, b):
        hold(O, 0)
        wgmma_fence()
        for n in range(rows // 16):
            further = uint64(sixteen_rows // 16 * n)
            wgmma(O, 0, a + further, b + further, 0 if n == 0 else 1)
        wgmma_commit_group()

    return start_product


@cache
def mask_after(columns: int) -> Any:
    """mask_after(S, last): scores of columns after last[r], of the thread's row r, become -inf.

    Columns count from the thread's first score on.
    """

    @device
    def mask_columns(S, last):
        for r in range(2):
            for n in range(columns // 8):
                for u in range(2):
                    if int32(8 * n + u) > last[r]:
                        S[4 * n + 2 * r + u] = -float32(float("inf"))

    return mask_columns


@cache
def mask_before(columns: int) -> Any:
    """mask_before(S, first): `mask_after`, of columns before first[r]."""

    @device
    def mask_columns(S, first):
        for r in range(2):
            for n in range(columns // 8):
                for u in range(2):
                    if int32(8 * n + u) < first[r]:
                        S[4 * n + 2 * r + u] = -float32(float("inf"))

    return mask_columns


@cache
def mask_padding(columns: int) -> Any:
    """mask_padding(S, words, at): scores of columns whose bit is 0 become -inf.

    words[at]: the first of the tile's columns, 32 bits each.
    """

    @device
    def mask_columns(S, words, at):
        t = uint32(uint32(cuda.threadIdx.x) % uint32(4))
        for n in range(columns // 8):
            mine = uint32(uint32(words[at + n // 4]) >> uint32(2 * t))
            for r in range(2):
                for u in range(2):
                    if uint32(mine >> uint32(8 * (n % 4) + u)) & uint32(1) == uint32(0):
                        S[4 * n + 2 * r + u] = -float32(float("inf"))

    return mask_columns


@cache
def clear_padding(rows: int, d: int, threads: int) -> Any:
    """clear_padding(words, tile, bits, thread): a thread's share of the rows whose bit is 0 is 0.

    words[tile]: the first of a tile of 16-bit elements; words[bits]: of its rows, 32 bits each.
    """

    @device
    def clear(words, tile, bits, thread):
        for e in range(thread, rows * d // 2, threads):
            row = uint32(uint32(e) // uint32(PANEL // 2) % uint32(rows))
            if uint32(uint32(words[bits + row // uint32(32)]) >> row % uint32(32)) & uint32(
                1
            ) == uint32(0):
                words[tile + e] = 0

    return clear


@cache
def partial_transposed(columns: int, banded: bool) -> Any:
    """partial_transposed(j0, i0, Nq, Nk, lo, hi): whether some score may not count.

    Of 64 keys from j0 on as rows, and queries from i0 on as columns.
    """

    @device
    def partial_tile(j0, i0, Nq, Nk, lo, hi):
        some = j0 + ROWS > Nk or i0 + columns > Nq
        if banded:
            some = some or j0 < i0 + columns - 1 + lo or j0 + ROWS - 1 > i0 + hi
        return some

    return partial_tile


@cache
def clear_masked(columns: int, banded: bool) -> Any:
    """clear_masked(S, key, query, Nq, Nk, lo, hi): what is of scores that do not count becomes 0.

    Keys are rows, queries columns; key and query are those of the thread's first score.
    """

    @device
    def clear(S, key, query, Nq, Nk, lo, hi):
        for r in range(2):
            j = int32(key + 8 * r - query)
            first, last = int32(0), int32(Nq - 1 - query)
            if key + 8 * r >= Nk:
                last = int32(-1)
            if banded:
                first, last = int32(j - hi), min(last, int32(j - lo))
            for n in range(columns // 8):
                for u in range(2):
                    c = int32(8 * n + u)
                    if c > last or (banded and c < first):
                        S[4 * n + 2 * r + u] = float32(0)

    return clear


TOGETHER = 4  # loads of 16 bytes that a thread has under way


@cache
def clear_rows(columns: int) -> Any:
    """clear_rows(S, real): of a thread's two rows of S, those whose bit, 0 or 8, is 0 become 0."""

    @device
    def clear(S, real):
        for r in range(2):
            if uint32(real >> uint32(8 * r)) & uint32(1) == uint32(0):
                for n in range(columns // 8):
                    for u in range(2):
                        S[4 * n + 2 * r + u] = float32(0)

    return clear


@cache
def not_finite(rows: int, d: int, threads: int, dtype: str) -> Any:
    """not_finite(sm, at, thread): 1 if there is inf or NaN in a thread's share of a tile, else 0.

    0 times it is added up, of two elements at a time: that takes one instruction, and is NaN.
    """
    chunks, add = rows * d // 8, add_nothing(dtype)
    turns, room = -(-chunks // threads), 4 * TOGETHER

    @device
    def look(sm, at, thread):
        words = cuda.local.array(room, uint32)
        total = uint32(0)
        for n in range(0, turns, TOGETHER):
            for u in range(TOGETHER):  # under way before the first is waited for
                chunk = min(uint32(thread + (n + u) * threads), uint32(chunks - 1))
                load_words(words, 4 * u, sm, uint32(at + 8 * chunk))
            for u in range(0, room, 4):
                part = uint32(0)  # of this load: it need not wait for the others
                for w in range(4):
                    part = add(words[u + w], part)
                total = add(part, total)
        return uint32(total != 0)

    return look


@cache
def add_not_finite(rows: int, d: int, dtype: str) -> Any:
    """add_not_finite(sm, at, O, first, last): O += inf and NaN of a tile, where they are seen.

    Of the thread's two rows of O (64, d) the second sees eight keys further; the first sees rows
    first to last of the tile. A product with a weight above 0 would add the same, but a product of
    tiles also adds 0 times what is masked. Slow: only for a tile that holds such numbers.
    """
    exponent, to_float = EXPONENT[dtype], widen(dtype)

    def panel(c: int) -> Any:
        begin = c * ROW_BYTES * rows // 2

        @device
        def add_panel(sm, at, O, first, last):
            t = uint32(uint32(cuda.threadIdx.x) % uint32(4))
            k = uint32(0)
            while k < rows:
                for n in range(8):
                    for u in range(2):
                        chunk = begin + 64 * k + 8 * uint32(n ^ uint32(k % 8))
                        x = sm[uint32(at + chunk + 2 * t + u)]
                        if x & exponent == exponent:
                            for r in range(2):
                                seen = int32(k) - 8 * r
                                if seen >= first and seen <= last:
                                    O[4 * (8 * c + n) + 2 * r + u] += to_float(x)
                k = uint32(k + 1)

        return add_panel

    def both(one: Any, other: Any) -> Any:
        @device
        def add_both(sm, at, O, first, last):
            one(sm, at, O, first, last)
            other(sm, at, O, first, last)

        return add_both

    return reduce(both, map(panel, range(d // PANEL)))  # one long loop would not be unrolled


@cache
def clear_not_finite(rows: int, d: int, threads: int, dtype: str) -> Any:
    """clear_not_finite(sm, at, thread): inf and NaN in a thread's share of a tile become 0."""
    exponent = EXPONENT[dtype]

    @device
    def clear(sm, at, thread):
        for e in range(thread, rows * d, threads):
            if sm[at + e] & exponent == exponent:
                sm[at + e] = 0

    return clear


@cache
def softmax(columns: int, above: int = 0) -> Any:
    """softmax(S, m, l, alpha, scale): S becomes exp(S - m_new), and alpha exp(m - m_new).

    S, and with it l, is 2**above times that.

    m (of scores before they are scaled), l and alpha are of the thread's two rows; l sums what the
    thread has of a row, and the four threads that share one add up in the end. scale > 0 has a
    factor of log2(e), so that exp2 will do.
    """

    @device
    def softmax_scores(S, m, l, alpha, scale):
        for r in range(2):
            m_new = m[r]
            for n in range(columns // 8):
                m_new = max(m_new, max(S[4 * n + 2 * r], S[4 * n + 2 * r + 1]))
            m_new = row_max(m_new)
            shift = m_new * scale if m_new != -float32(float("inf")) else float32(0)
            alpha[r] = exp2(cuda.fma(m[r], scale, -shift))
            m[r] = m_new
            if above:
                shift = shift - float32(above)
            total = float32(0)
            for n in range(columns // 8):
                e = 4 * n + 2 * r
                S[e] = exp2(cuda.fma(S[e], scale, -shift))
                S[e + 1] = exp2(cuda.fma(S[e + 1], scale, -shift))
                total += S[e] + S[e + 1]
            l[r] = l[r] * alpha[r] + total

    return softmax_scores


@cache
def rounded(columns: int, dtype: str) -> Any:
    """rounded(S, P): P = S in 16 bits. What a product leaves is laid out as what the next takes."""
    two, count = pack(dtype), columns // 4

    @device
    def round_scores(S, P):
        for n in range(count):
            P[n] = two(S[2 * n + 1], S[2 * n])

    return round_scores


@cache
def rounded_four(columns: int) -> Any:
    """rounded_four(S, P): P = S in e4m3, as the next product takes it.

    It takes four neighbours where S has two, so the sum runs over columns in another order: of
    each 16 of them, 8 u + 2 t + n is at 4 t + 2 u + n, for u and n of 0 and 1, t of 0 to 3.
    """

    @device
    def round_scores(S, P):
        for n in range(columns // 16):
            for r in range(2):
                e = 8 * n + 2 * r
                P[2 * n + r] = pack_four(S[e], S[e + 1], S[e + 4], S[e + 5])

    return round_scores


@cache
def rounded_kept(columns: int, dtype: str) -> Any:
    """rounded_kept(S, P, keep, factor): as `rounded`, of what `drop` would make of S."""
    two = pack(dtype)

    @device
    def round_scores(S, P, keep, factor):
        for n in range(columns // 8):
            for r in range(2):
                e = 4 * n + 2 * r
                low = S[e] * survives(keep, n, r, 0, factor)
                high = S[e + 1] * survives(keep, n, r, 1, factor)
                P[2 * n + r] = two(high, low)

    return round_scores


@cache
def weigh(columns: int, dtype: str, dropout: bool, fp8: bool = False) -> Any:
    """weigh(S, P, keep, rules): `rounded`, or in FP8 `rounded_four`.

    With dropout `rounded_kept`, with rules[-1] as the factor.
    """
    some = rounded_kept(columns, dtype)
    all_of_them = rounded_four(columns) if fp8 else rounded(columns, dtype)

    @device
    def round_some(S, P, keep, rules):
        some(S, P, keep, rules[-1])

    @device
    def round_all(S, P, keep, rules):
        all_of_them(S, P)

    return round_some if dropout else round_all


@cache
def weights(columns: int) -> Any:
    """weights(S, floats, at, scale): S becomes exp2(scale S - L), for L of the columns.

    floats[at] is the first of L on chip, in base 2; scale > 0 has a factor of log2(e).
    """

    @device
    def make_weights(S, floats, at, scale):
        t = uint32(uint32(cuda.threadIdx.x) % uint32(4))
        L = cuda.local.array(2, float32)
        for n in range(columns // 8):
            load_two(L, 0, floats, uint32(at + 8 * n + 2 * t))
            for r in range(2):
                for u in range(2):
                    e = 4 * n + 2 * r + u
                    S[e] = exp2(cuda.fma(S[e], scale, -L[u]))

    return make_weights


@cache
def weights_gradient(columns: int) -> Any:
    """weights_gradient(dP, P, floats, at): dP becomes dS = P ∘ (dP - D), for D of the columns.

    floats[at] is the first of D on chip.
    """

    @device
    def make_gradient(dP, P, floats, at):
        t = uint32(uint32(cuda.threadIdx.x) % uint32(4))
        D = cuda.local.array(2, float32)
        for n in range(columns // 8):
            load_two(D, 0, floats, uint32(at + 8 * n + 2 * t))
            for r in range(2):
                for u in range(2):
                    e = 4 * n + 2 * r + u
                    dP[e] = P[e] * (dP[e] - D[u])

    return make_gradient


@cache
def rescale(d: int) -> Any:
    """rescale(O, by): the thread's two rows of O (64, d) are multiplied by by[0] and by[1]."""
    count = d // 2

    @device
    def rescale_rows(O, by):
        for n in range(0, count, 4):
            O[n] *= by[0]
            O[n + 1] *= by[0]
            O[n + 2] *= by[1]
            O[n + 3] *= by[1]

    return rescale_rows


@cache
def row_of_matrix(rows: int) -> Any:
    """row_of_matrix(at, within, n): where a thread's row of column blocks n and n + 1 begins.

    For `stmatrix`: of four matrices, the upper and the lower eight of the warp's rows, in either
    block of eight columns; n is even. at: the first element of 64 rows, of a tile with so many
    `rows`; `within`: a row of the warp. The eight rows of a matrix are in all banks.
    """
    panel = ROW_BYTES * rows // 2

    @device
    def row_at(at, within, n):
        lane = uint32(uint32(cuda.threadIdx.x) % uint32(32))
        row = uint32(uint32(within) // uint32(16) * uint32(16) + lane % uint32(16))
        chunk = uint32(uint32(n % 8 + lane // uint32(16)) ^ uint32(row % uint32(8)))
        return uint32(at + n // 8 * panel + row * uint32(PANEL) + chunk * uint32(8))

    return row_at


@cache
def put(rows: int, d: int, dtype: str) -> Any:
    """put(sm, at, O, within): O (64, d) goes to a tile with so many `rows` on chip, in 16 bits.

    sm[at] is the first element of the 64 rows; `within` is the thread's first row.
    """
    two, row_at = pack(dtype), row_of_matrix(rows)

    @device
    def put_rows(sm, at, O, within):
        W = cuda.local.array(4, uint32)
        for n in range(0, d // 8, 2):
            for w in range(4):
                W[w] = two(O[4 * n + 2 * w + 1], O[4 * n + 2 * w])
            stmatrix(sm, row_at(at, within, n), W, 0)

    return put_rows


@cache
def put_rounded(rows: int, columns: int) -> Any:
    """put_rounded(sm, at, P, within): as `put`, of what `rounded` has made of (64, columns)."""
    row_at = row_of_matrix(rows)

    @device
    def put_rows(sm, at, P, within):
        for n in range(0, columns // 8, 2):
            stmatrix(sm, row_at(at, within, n), P, 2 * n)

    return put_rows


@cache
def put_wide(columns: int) -> Any:
    """put_wide(floats, at, O): the registers of O (64, columns) go on chip as they are, in fours.

    Four registers of a thread lie together, beside those of the next thread: no two threads of a
    warp meet in a bank. floats[at], the first, is at a multiple of 16 bytes.
    """

    @device
    def put_registers(floats, at, O):
        thread = uint32(uint32(cuda.threadIdx.x) % uint32(WARPGROUP))
        for n in range(columns // 8):
            e = 4 * n
            there = uint32(at + 4 * WARPGROUP * n + 4 * thread)
            store4(floats, there, O[e], O[e + 1], O[e + 2], O[e + 3])

    return put_registers


@cache
def store_wide(d: int) -> Any:
    """store_wide(A, O, row, N): O (64, d) becomes rows of A (N, at most d) in float32.

    row: the thread's first. The four threads that share a row write whole sectors of 32 bytes.
    """

    @device
    def store_rows(A, O, row, N):
        t = uint32(uint32(cuda.threadIdx.x) % uint32(4))
        for n in range(d // 8):
            for r in range(2):
                e = 4 * n + 2 * r
                if row + 8 * r < N and 8 * n < A.shape[1]:
                    store_two(A, row + 8 * r, 8 * n + 2 * t, O[e], O[e + 1])

    return store_rows
