"""FlashAttention-3 in FP8: Q, K and V are brought into e4m3, and what their scales do in `hopper`.

As in `flashsim.fp8`, with 128 rows that share a scale, a block's. Q and K keep their rows, V
becomes columns: a product of 8-bit tiles sums over what lies in a row of either, and of P V that is
the keys. They lie there in the order in which `warpgroup_tiles.rounded_four` has P. Pairs of e4m3
are written as 16 bits.

Source: Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), section 3.3.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import numpy as np

from ..fp8 import LARGEST
from .gpu import cuda, device, float32, int32, kernel, uint32, widen
from .ptx.warp import load_eight, pack_four, reciprocal, shuffle_xor, store_eight
from .warpgroup_tiles import FP8_ROWS

COLUMNS = 16  # of a thread: as many bytes in e4m3 as it writes at once
THREADS = 256
ABOVE = 8  # powers of two that P is too large: it fills e4m3, whose numbers go from 2^-9 to 448
APART = 1  # floats between rows on chip: no two threads of a column's rows meet in a bank
LEAST = 2.0**-48  # scale: the product of two is a float32 number


def shared_bytes(d: int, transposed: bool) -> int:
    """Bytes of shared memory: the largest number of each warp, and rows to become columns."""
    return 4 * (THREADS // 32 + (FP8_ROWS * (d + APART) if transposed else 0))


def loads_under_way(d: int) -> tuple[int, int]:
    """How many loads a thread waits for at once, and the bytes of each."""
    return FP8_ROWS * d // THREADS // 8, 16


@cache
def each(count: int, make: Any) -> Any:
    """A function that calls make(0), make(1), ... in turn: a loop as long would not be unrolled."""

    def then(one: Any, other: Any) -> Any:
        @device
        def both(*args):
            one(*args)
            other(*args)

        return both

    return reduce(then, map(make, range(count)))


@cache
def quantised(d: int, dtype: str, rotated: bool, transposed: bool) -> Any:
    """X8 = x / scale in e4m3, a block for 128 rows of a head, and the scale of each block.

    x (batch, heads, N, d), d is 64 or 128; signs (d,) of 1 and -1; writes scales (batch, heads, T)
    for T = ceil(N / 128), and X8: (batch, heads, N, d / 2), or transposed (batch, heads, d, 64 T),
    with 0 for rows beyond N. rotated: x diag(signs) H instead of x, for the Hadamard matrix H over
    sqrt(d); scores of rotated Q and K are the same, and an outlier is spread over its row. What is
    not finite becomes NaN and counts for no scale. A scale is at least 2^-48, so that
    numbers of 2^-58 and less become 0; above 2^50 the output may overflow.
    """
    lanes, LD, to_float = d // COLUMNS, d + APART, widen(dtype)
    at_once, warps = THREADS // lanes, THREADS // 32  # rows at a time
    passes = FP8_ROWS // at_once
    words, floats = 8 * passes, COLUMNS * passes  # of a thread
    jobs = d * FP8_ROWS // COLUMNS  # of 16 bytes to write in columns
    by = float(np.float32(d**-0.5))
    across = tuple(n for n in (1, 2, 4) if n < lanes)

    def fetch_pass(n: int) -> Any:
        first = 8 * n

        @device
        def fetch(W, x, i0, N, lane):
            i = int32(i0 + n * at_once)
            if i < N:
                load_eight(W, first, x, i, COLUMNS * lane)
                load_eight(W, first + 4, x, i, COLUMNS * lane + 8)
            else:
                for w in range(8):
                    W[first + w] = uint32(0)

        return fetch

    def widen_pass(n: int) -> Any:
        first = 8 * n

        @device
        def make_floats(W, y):
            for w in range(first, first + 8):
                y[2 * w] = to_float(np.uint16(W[w] & uint32(0xFFFF)))
                y[2 * w + 1] = to_float(np.uint16(W[w] >> uint32(16)))

        return make_floats

    def butterfly(n: int) -> Any:
        """The sum and the difference of each two of a row's columns 2**k apart, for n = 4 p + k."""
        first, apart = COLUMNS * (n // 4), 1 << n % 4

        @device
        def add_and_subtract(y):
            for e in range(COLUMNS):
                if e & apart == 0:
                    a, b = y[first + e], y[first + e + apart]
                    y[first + e], y[first + e + apart] = a + b, a - b

        return add_and_subtract

    def rotate_pass(n: int) -> Any:
        first = COLUMNS * n

        @device
        def rotate(y, lane):
            for apart in across:
                for e in range(first, first + COLUMNS):
                    other = shuffle_xor(y[e], uint32(apart))
                    y[e] = other - y[e] if lane & uint32(apart) else y[e] + other
            for e in range(first, first + COLUMNS):
                y[e] *= float32(by)

        return rotate

    fetch_all, widen_all = each(passes, fetch_pass), each(passes, widen_pass)
    butterflies, rotate_across = each(4 * passes, butterfly), each(passes, rotate_pass)

    @device
    def rotate_rows(y, signs, lane):
        for e in range(COLUMNS):
            sign = signs[COLUMNS * lane + e]
            for n in range(passes):
                y[COLUMNS * n + e] *= sign
        butterflies(y)
        rotate_across(y, lane)

    @device
    def as_they_are(y, signs, lane):
        pass

    turn = rotate_rows if rotated else as_they_are

    @device
    def divided(x, scale, over):
        """x / scale, for over = 1 / scale: NaN for inf, which would become the largest number."""
        q = x * over
        return cuda.fma(cuda.fma(-q, scale, x), over, q)

    def write_pass(n: int) -> Any:
        first = COLUMNS * n

        @device
        def write_row(y, X8, i0, N, scale, over, lane):
            W = cuda.local.array(4, uint32)
            for w in range(4):
                e = first + 4 * w
                W[w] = pack_four(
                    divided(y[e], scale, over), divided(y[e + 1], scale, over),
                    divided(y[e + 2], scale, over), divided(y[e + 3], scale, over),
                )  # fmt: skip
            i = int32(i0 + n * at_once)
            if i < N:
                store_eight(X8, i, COLUMNS // 2 * lane, W, 0)

        return write_row

    write_all = each(passes, write_pass)

    @device
    def write_rows(y, X8, sm, i0, row, N, scale, over, tid):
        write_all(y, X8, i0 + row, N, scale, over, uint32(tid % uint32(lanes)))

    @device
    def write_columns(y, X8, sm, i0, row, N, scale, over, tid):
        """The rows go on chip, in float32."""
        W = cuda.local.array(4, uint32)
        for n in range(passes):
            for e in range(COLUMNS):
                at = uint32((row + n * at_once) * LD + COLUMNS * (tid % uint32(lanes)) + e)
                sm[at] = y[COLUMNS * n + e]
        cuda.syncthreads()
        for job in range(tid, jobs, THREADS):
            half, column = uint32(job % 2), uint32(job // 2 % d)  # two threads write 32 bytes
            first = uint32(2 * (job // (2 * d)) + half) * uint32(COLUMNS)
            for t in range(4):
                at = uint32((first + 2 * t) * LD + column)
                W[t] = pack_four(
                    divided(sm[at], scale, over), divided(sm[at + LD], scale, over),
                    divided(sm[at + 8 * LD], scale, over), divided(sm[at + 9 * LD], scale, over),
                )  # fmt: skip
            store_eight(X8, column, uint32(uint32(i0) + first) // uint32(2), W, 0)

    write = write_columns if transposed else write_rows
    largest_at = FP8_ROWS * LD if transposed else 0

    @kernel(THREADS)
    def fp8_quantised(x, X8, scales, signs):
        sm = cuda.shared.array(0, float32)
        tid, H, N = uint32(cuda.threadIdx.x), uint32(x.shape[1]), int32(x.shape[2])
        T, block = uint32(scales.shape[2]), uint32(cuda.blockIdx.x)
        n, bh = uint32(block % T), uint32(block // T)
        b, h, i0 = uint32(bh // H), uint32(bh % H), int32(n * FP8_ROWS)
        W = cuda.local.array(words, uint32)
        y = cuda.local.array(floats, float32)
        lane, row, largest = uint32(tid % uint32(lanes)), int32(tid // uint32(lanes)), float32(0)
        fetch_all(W, x[b, h], i0 + row, N, lane)
        widen_all(W, y)
        turn(y, signs, lane)
        for e in range(floats):
            if abs(y[e]) < float32(float("inf")):
                largest = max(largest, abs(y[e]))
        for apart in (1, 2, 4, 8, 16):
            largest = max(largest, shuffle_xor(largest, uint32(apart)))
        sm[largest_at + tid // uint32(32)] = largest
        cuda.syncthreads()
        for w in range(warps):
            largest = max(largest, sm[largest_at + w])
        scale = max(largest / float32(LARGEST), float32(LEAST))
        if largest == float32(0):
            scale = float32(1)
        if tid == 0:
            scales[b, h, n] = scale
        write(y, X8[b, h], sm, i0, row, N, scale, float32(1) / scale, tid)

    return fp8_quantised


@cache
def units(fp8: bool) -> Any:
    """What scales do to m and O in `hopper`: six functions, in the order in which they are below.

    There m is of scores that are divided by the scale of their tile, and O of values divided by
    theirs; `units` has both scales, as they were at the last tile, and m and O follow from tile to
    tile. words[told] is where a turn's work is said, rules has the scales of Q, K and V. Without
    FP8 there is one scale for all scores, and none for values.

    of_rows(rules, words, told, r0, scale): times the scale of queries from r0 on.
    of_tile(rules, words, told, j0, scale): the scales of a tile's scores and values.
    first_units(units, S_scale, V_scale): those of a turn's first tile.
    in_units(m, units, S_scale), O_in_units(alpha, units, V_scale): from the last tile to the next.
    kept_units(units, scale): the scales of the last tile.
    """
    least = 2.0**-77  # times that of keys it is still a normal number

    @device
    def scale_of_rows(rules, words, told, r0, scale):
        b, h = uint32(words[told + 2]), uint32(words[told + 1])
        q_scale = rules[0][b, h, uint32(uint32(r0) // uint32(FP8_ROWS))]
        return max(scale * q_scale, float32(least))

    @device
    def scales_of_tile(rules, words, told, j0, scale):
        b, h = uint32(words[told + 6]), uint32(words[told + 5])
        j = uint32(uint32(j0) // uint32(FP8_ROWS))
        return scale * rules[1][b, h, j], rules[2][b, h, j]

    @device
    def begin_with(units, S_scale, V_scale):
        units[0], units[1] = S_scale, V_scale

    def change(which: int) -> Any:
        @device
        def change_units(x, units, scale):
            by = units[which] * reciprocal(scale)
            for r in range(2):
                x[r] *= by
            units[which] = scale

        return change_units

    @device
    def units_of(units, scale):
        return units[0], units[1]

    if fp8:
        return scale_of_rows, scales_of_tile, begin_with, change(0), change(1), units_of

    @device
    def one_scale_of_rows(rules, words, told, r0, scale):
        return scale

    @device
    def one_scale_of_tile(rules, words, told, j0, scale):
        return scale, float32(1)

    @device
    def no_units(units, S_scale, V_scale):
        pass

    @device
    def same_units(x, units, scale):
        pass

    @device
    def one_unit(units, scale):
        return scale, float32(1)

    return one_scale_of_rows, one_scale_of_tile, no_units, same_units, same_units, one_unit
