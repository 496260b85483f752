"""What a block does with tiles: bring one on chip, multiply two, hand one back.

A block of TY x TX threads works on tiles in shared memory; every tile is float32 there. In a
product with Br x Bc results, thread (ty, tx) keeps RM x RN of them in registers: rows ty, ty + TY,
... and columns tx, tx + TX, .... In a product with Br x d results it keeps RM x RD: the same rows,
and columns in groups of four, 4 tx, 4 tx + 4 TX, .... So each float that it reads from shared
memory enters several multiply-adds, and it reads four at once.

Rows in shared memory are LD (or LP) floats apart, an odd number of fours: then eight threads that
read four floats of eight consecutive rows touch all 32 banks once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from .gpu import (
    add,
    cuda,
    device,
    float32,
    in_fours,
    int32,
    load,
    load4,
    load_four,
    narrow,
    store4,
    store_four,
    syncwarp,
    uint32,
    widen,
)

MOST_THREADS = 1024  # of a block


def padded(n: int) -> int:
    """The smallest odd number of fours that holds n floats, in floats."""
    fours = -(-n // 4)
    return 4 * (fours + 1 - fours % 2)


@dataclass(frozen=True)
class Tile:
    """The sizes of a kernel: Br x Bc scores of width d, computed by TY x TX threads."""

    Br: int
    Bc: int
    d: int
    TY: int
    TX: int

    def __post_init__(self) -> None:
        if self.Br % self.TY or self.Bc % self.TX or self.TX % 4 or self.threads > MOST_THREADS:
            raise ValueError(
                f"threads={(self.TY, self.TX)!r}: expected (TY, TX) with TX a multiple of 4 that "
                f"divides Bc={self.Bc}, TY a divisor of Br={self.Br}, and {MOST_THREADS} in all at "
                "most"
            )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.TY * self.TX

    @property
    def RM(self) -> int:
        """Rows a thread has of a result."""
        return self.Br // self.TY

    @property
    def RN(self) -> int:
        """Columns a thread has of an Br x Bc result."""
        return self.Bc // self.TX

    @property
    def RD(self) -> int:
        """Columns a thread has of an Br x d result; the last may lie beyond d."""
        return 4 * -(-self.d // (4 * self.TX))

    @property
    def LD(self) -> int:
        """Floats from row to row of a tile of width d."""
        return padded(self.d)

    @property
    def LP(self) -> int:
        """Floats from row to row of an Br x Bc tile."""
        return padded(self.Bc)

    @property
    def swapped(self) -> Tile:
        """The same tile with keys as rows: the scores transposed."""
        return Tile(self.Bc, self.Br, self.d, self.TY, self.TX)


def tile_for(
    Br: int, Bc: int, d: int, threads: tuple[int, int] | None = None, results: int = 1
) -> Tile:
    """The tile with the given (TY, TX), or with those that give each thread the most to do.

    A thread holds at most 8 x 8 scores and 128 numbers in all, as it has 255 registers, and a block
    has 128 to 256 threads, or as many as its tiles allow: of one row, 64. The backward passes hold
    two matrices of scores and two or three of width d (results), and take tiles either way up.
    """
    if threads is not None:
        return Tile(Br, Bc, d, *threads)
    best = None
    for TX in (4, 8, 16, 32) if Br > 1 else (4, 8, 16, 32, 64):
        for TY in (1, 2, 4, 8, 16, 32):
            if Br % TY or Bc % TX or TX * TY > 256:
                continue
            if results > 1 and (Bc % TY or Br % TX):
                continue
            tile = Tile(Br, Bc, d, TY, TX)
            held = results * tile.RM * (tile.RN + tile.RD)
            reads = (tile.RM + tile.RN) / (tile.RM * tile.RN) + (tile.RM + tile.RD) / (
                tile.RM * tile.RD
            )
            fits = held <= 128 and tile.RM <= 8 and tile.RN <= 8
            few = max(0, 128 - tile.threads)
            key = (not fits, held if not fits else 0, few, reads, tile.threads)
            if best is None or key < best[0]:
                best = key, tile
    if best is None:
        sides = "Bc" if results == 1 else "Br and Bc each"
        raise ValueError(f"tiles={(Br, Bc)!r}: expected {sides} a multiple of 4")
    return best[1]


@dataclass
class Layout:
    """Offsets, in floats, of the tiles that a block keeps in shared memory.

    TX: of the block's threads; the columns of a product are a multiple of 4 TX.
    """

    TX: int = 32
    floats: int = 0

    def place(self, rows: int, stride: int) -> int:
        """The offset of a new tile."""
        at = self.floats
        self.floats += -(-rows * stride // 4) * 4
        return at

    @property
    def bytes(self) -> int:
        """Bytes of shared memory, with what a read past the end of a short row may touch."""
        return 4 * (self.floats + 4 * max(32, self.TX))


@cache
def shared_out(row: int, threads: int) -> Any:
    """shared_out(tid, n): row and column of the n-th element of a thread, in rows of `row`."""
    apart = threads // row

    @device
    def whole_rows(tid, n):
        r = uint32(tid) // uint32(row)
        return int32(r) + n * apart, int32(uint32(tid) - r * uint32(row))

    @device
    def anywhere(tid, n):
        e = uint32(tid + n * threads)
        r = e // uint32(row)
        return int32(r), int32(e - r * uint32(row))

    return anywhere if threads % row else whole_rows


BATCH = 8  # loads that a thread begins before it stores what the first of them brought


def loads_under_way(rows: int, columns: int, threads: int, dtype: str) -> tuple[int, int]:
    """How many loads of a tile a thread has under way before it waits, and the bytes of each.

    Two batches, where there are as many: the second begins before the first is stored.
    """
    many, item = (4, 4) if dtype == "float32" else (1, 2)
    loads = rows * columns // many
    if columns % 4 or loads % threads:
        return 1, item
    turns = loads // threads
    return batch_of(turns) * (2 if turns > BATCH else 1), many * item


def batch_of(turns: int) -> int:
    """Loads of a batch, for so many loads of a thread."""
    return math.gcd(turns, BATCH)


@cache
def stage_block(rows: int, columns: int, threads: int, dtype: str) -> Any:
    """stage_block(A, first, N, left, C, sm, at, tid): a block of a matrix A (N, C) comes on chip.

    Its corner is A[first, left]. Each element is loaded once. What lies beyond A is 0, and so are
    the columns up to the next four. Returns whether this thread saw a number that is not finite.
    """
    stride, width, to_float = padded(columns), -(-columns // 4) * 4, widen(dtype)
    fours = dtype == "float32"  # are loaded four at a time
    many = 4 if fours else 1
    row = width // many  # loads
    even = width == columns and rows * row % threads == 0  # every thread loads as many
    turns = rows * row // threads
    batch = batch_of(turns)
    room, mine = batch * many, shared_out(row, threads)

    @device
    def stage_tile(A, first, N, left, C, sm, at, tid):
        bad = False
        if even and first + rows <= N and left + columns <= C and (not fours or in_fours(A)):
            x = cuda.local.array(room, float32)
            for turn in range(0, turns, batch):
                for u in range(batch):  # several loads under way before the first is waited for
                    r, c = mine(tid, turn + u)
                    if fours:
                        x[4 * u], x[4 * u + 1], x[4 * u + 2], x[4 * u + 3] = load_four(
                            A, uint32(first + r), uint32(left + 4 * c)
                        )
                    else:
                        x[u] = to_float(load(A, uint32(first + r), uint32(left + c)))
                syncwarp()  # or the assembler puts a store, which waits, between two loads
                for u in range(batch):
                    r, c = mine(tid, turn + u)
                    e = at + r * stride + many * c
                    if fours:
                        store4(sm, e, x[4 * u], x[4 * u + 1], x[4 * u + 2], x[4 * u + 3])
                    else:
                        sm[e] = x[u]
                for u in range(room):
                    bad = bad or x[u] - x[u] != float32(0)
        else:
            for e in range(tid, rows * width, threads):
                r = e // width
                c = e % width
                y = float32(0)
                if first + r < N and c < columns and left + c < C:
                    y = to_float(load(A, uint32(first + r), uint32(left + c)))
                sm[at + r * stride + c] = y
                bad = bad or y - y != float32(0)
        return bad

    return stage_tile


@cache
def stage(rows: int, d: int, threads: int, dtype: str) -> Any:
    """stage(A, first, N, sm, at, tid): rows first, first + 1, ... of A (N, d), see stage_block."""
    block = stage_block(rows, d, threads, dtype)

    @device
    def stage_rows(A, first, N, sm, at, tid):
        return block(A, first, N, 0, d, sm, at, tid)

    return stage_rows


@cache
def unstage(rows: int, d: int, threads: int, dtype: str) -> Any:
    """unstage(A, first, N, sm, at, tid): a tile on chip becomes rows first, ... of A (N, d).

    Neighbouring threads write neighbouring elements, so whole sectors of 32 bytes leave the chip.
    """
    stride, row, to_stored = padded(d), max(1, d // 4), narrow(dtype)
    fours, mine = dtype == "float32" and d % 4 == 0, shared_out(row, threads)

    @device
    def unstage_tile(A, first, N, sm, at, tid):
        if fours and in_fours(A):
            turns = (min(rows, N - first) * row - tid + threads - 1) // threads
            for n in range(turns):
                r, c = mine(tid, n)
                store_four(A, uint32(first + r), uint32(4 * c), load4(sm, at + r * stride + 4 * c))
        else:
            for e in range(tid, rows * d, threads):
                r = e // d
                if first + r < N:
                    A[first + r, e % d] = to_stored(sm[at + r * stride + e % d])

    return unstage_tile


@cache
def add_to(rows: int, d: int, threads: int) -> Any:
    """add_to(A, first, N, sm, at, tid): a tile on chip is added to rows first, ... of A (N, d).

    A is float32, and other blocks may add to it at the same time.
    """
    stride, mine = padded(d), shared_out(d, threads)

    @device
    def add_tile(A, first, N, sm, at, tid):
        turns = (min(rows, N - first) * d - tid + threads - 1) // threads
        for n in range(turns):
            r, c = mine(tid, n)
            add(A, first + r, c, sm[at + r * stride + c])

    return add_tile


@cache
def row_dots(rows: int, d: int, threads: int) -> Any:
    """row_dots(sm, a, b, out, tid): out = rowsum(A ∘ B) for A, B (rows, d) on chip."""
    stride = padded(d)
    width = -(-d // 4) * 4

    @device
    def dots(sm, a, b, out, tid):
        for r in range(tid, rows, threads):
            total = float32(0)
            for c in range(0, width, 4):
                x0, x1, x2, x3 = load4(sm, a + r * stride + c)
                y0, y1, y2, y3 = load4(sm, b + r * stride + c)
                total += (x0 * y0 + x1 * y1) + (x2 * y2 + x3 * y3)
            sm[out + r] = total

    return dots


@cache
def rows_by_rows(tile: Tile) -> Any:
    """rows_by_rows(sm, a, b, x, S, ty, tx): S += A Bᵀ for A (Br, d) and B (Bc, d) on chip.

    x is scratch in registers, 4 RM floats.
    """
    RM, RN, TY, TX, LD = tile.RM, tile.RN, tile.TY, tile.TX, tile.LD
    width = -(-tile.d // 4) * 4

    @device
    def product(sm, a, b, x, S, ty, tx):
        for k in range(0, width, 4):
            for m in range(RM):
                x[4 * m], x[4 * m + 1], x[4 * m + 2], x[4 * m + 3] = load4(
                    sm, a + ty * LD + m * (TY * LD) + k
                )
            for n in range(RN):
                y0, y1, y2, y3 = load4(sm, b + tx * LD + n * (TX * LD) + k)
                for m in range(RM):
                    S[m * RN + n] += x[4 * m] * y0
                    S[m * RN + n] += x[4 * m + 1] * y1
                    S[m * RN + n] += x[4 * m + 2] * y2
                    S[m * RN + n] += x[4 * m + 3] * y3

    return product


@cache
def rows_by_columns(tile: Tile) -> Any:
    """rows_by_columns(sm, p, b, x, O, ty, tx): O += P B for P (Br, Bc) and B (Bc, d) on chip."""
    RM, RD, TY, TX, LD, LP, Bc = tile.RM, tile.RD, tile.TY, tile.TX, tile.LD, tile.LP, tile.Bc

    @device
    def product(sm, p, b, x, O, ty, tx):
        for k in range(0, Bc, 4):
            for m in range(RM):
                x[4 * m], x[4 * m + 1], x[4 * m + 2], x[4 * m + 3] = load4(
                    sm, p + ty * LP + m * (TY * LP) + k
                )
            for u in range(4):
                for n in range(0, RD, 4):
                    y0, y1, y2, y3 = load4(sm, b + (k + u) * LD + n * TX + 4 * tx)
                    for m in range(RM):
                        O[m * RD + n] += x[4 * m + u] * y0
                        O[m * RD + n + 1] += x[4 * m + u] * y1
                        O[m * RD + n + 2] += x[4 * m + u] * y2
                        O[m * RD + n + 3] += x[4 * m + u] * y3

    return product


@cache
def weigh(tile: Tile, zeros: bool = True) -> Any:
    """weigh(sm, p, b, O, ty, tx): O += P B, in which a masked weight takes nothing from B.

    Not even NaN or inf, as in flashsim.online_softmax.weigh. A masked weight is -0.0, and nothing
    else is; without `zeros`, no weight that is 0 takes anything. Slower than rows_by_columns: only
    for a B that holds such values.
    """
    RM, RD, TY, TX, LD, LP, Bc = tile.RM, tile.RD, tile.TY, tile.TX, tile.LD, tile.LP, tile.Bc

    @device
    def product(sm, p, b, O, ty, tx):
        for k in range(Bc):
            for m in range(RM):
                w = sm[p + ty * LP + m * (TY * LP) + k]
                if w != float32(0) or (zeros and float32(1) / w > float32(0)):
                    for n in range(RD):
                        O[m * RD + n] += w * sm[b + k * LD + n // 4 * 4 * TX + 4 * tx + n % 4]

    return product


@cache
def put(tile: Tile, add: bool = False) -> Any:
    """put(sm, at, O, ty, tx): a thread's part of an Br x d result goes to, or adds to, a tile."""
    RM, RD, TY, TX, LD, d = tile.RM, tile.RD, tile.TY, tile.TX, tile.LD, tile.d

    @device
    def put_result(sm, at, O, ty, tx):
        for m in range(RM):
            for n in range(RD):
                c = n // 4 * 4 * TX + 4 * tx + n % 4
                if c < d:
                    e = at + ty * LD + m * (TY * LD) + c
                    sm[e] = sm[e] + O[m * RD + n] if add else O[m * RD + n]

    return put_result
