"""What a warp does with 16-bit tiles: bring one on chip, multiply two, hand one back.

A tile lies in shared memory as it does in global memory, row by row, but with the chunks of eight
elements (16 bytes) of a row r in another order: chunk c is where chunk c xor r % 8 would be. Then
the same chunk of eight consecutive rows, which is what `ldmatrix` reads at once, touches all banks
once; so does a row, which is what `cp_async` writes.

Registers hold tiles in the layout of `mma` (see ptx.warp). Lane 4 g + t has of a product with R
rows and C columns, for each 16 x 8 part (m, n) of it, four floats from index 4 (m C / 8 + n) on:
row 16 m + g, columns 8 n + 2 t and the next, then the same of row 16 m + g + 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

from .dropout import kept_four
from .gpu import cuda, device, float32, int32, uint32, uint64, widen
from .ptx import warp

EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}  # all ones: inf or NaN


@dataclass(frozen=True)
class WarpTile:
    """The sizes of a kernel: Br x Bc scores of width d; each warp has Br / warps of the rows."""

    Br: int
    Bc: int
    d: int
    warps: int

    def __post_init__(self) -> None:
        copied = self.threads * 8 // self.d  # rows, by all threads at a time
        if self.Br % (16 * self.warps) or self.Bc % 16 or copied % 8 or self.Bc % copied:
            raise ValueError(
                f"tiles={(self.Br, self.Bc)!r}, threads={(self.warps, 32)!r}: expected Br a "
                f"multiple of 16 for each warp, and Bc one of 16 and of 256 warps / d, which is "
                f"one of 8, for d={self.d}"
            )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Rows of a warp."""
        return self.Br // self.warps


def warp_tile_for(
    Br: int, Bc: int, d: int, threads: tuple[int, int] | None = None, results: int = 1
) -> WarpTile:
    """The tile with the given threads, (warps, 32), or as many as leave a warp room for its part.

    That is 32 rows, or at d = 128 with more than 32 keys 16. `results` is as in tiles.tile_for.
    """
    if threads is not None and threads[1] != 32:
        raise ValueError(f"threads={threads!r}: expected (warps, 32)")
    rows = 32 if d == 64 or Bc <= 32 else 16
    return WarpTile(Br, Bc, d, threads[0] if threads else max(4, Br // rows))


@cache
def place(d: int) -> Any:
    """place(row, chunk): the index of a chunk of eight elements in a tile of width d on chip.

    Eight rows on, the same chunk is 8 d elements on.
    """

    @device
    def index(row, chunk):
        return uint32(uint32(row * d) + uint32(8 * uint32(chunk ^ uint32(row & 7))))

    return index


@device
def further(index, chunks):
    """The index of the chunk that many chunks further on in a row, from that of chunk 0 or 1.

    From chunk 1 on, chunks is even. A tile begins at a multiple of 64 elements. The xor is of what
    changes from turn to turn, so that the compiler keeps one index, not one for each chunk.
    """
    return uint32(uint32(index ^ uint32(8 * (chunks % 8))) + uint32(64 * (chunks // 8)))


@cache
def stage(rows: int, d: int, threads: int) -> Any:
    """stage(A, first, N, sm, at, tid): start to copy rows first, ... of A (N, d) on chip.

    Each element is loaded once; rows beyond N become 0. A group of copies is to be made of it.
    """
    chunks = d // 8
    together, at_chunk = threads // chunks, place(d)  # rows that the threads copy at a time

    @device
    def start_copies(A, first, N, sm, at, tid):
        r, c = uint32(tid // uint32(chunks)), uint32(tid % uint32(chunks))
        chunk, real = uint32(at + at_chunk(r, c)), int32(min(N - first, rows)) - int32(r)
        for n in range(0, rows, together):
            size = 16 if n < real else 0
            warp.cp_async(sm, uint32(chunk + n * d), A, first + r + n, 8 * c, size)

    return start_copies


@cache
def unstage(rows: int, d: int, threads: int) -> Any:
    """unstage(A, first, N, sm, at, tid): a tile on chip becomes rows first, ... of A (N, d).

    Neighbouring threads write neighbouring chunks, so whole sectors of 32 bytes leave the chip.
    """
    chunks = d // 8
    together, at_chunk = threads // chunks, place(d)

    @device
    def copy_out(A, first, N, sm, at, tid):
        r, c = uint32(tid // uint32(chunks)), uint32(tid % uint32(chunks))
        chunk, real = uint32(at + at_chunk(r, c)), int32(min(N - first, rows)) - int32(r)
        for n in range(0, rows, together):
            if n < real:
                warp.copy_out(A, first + r + n, 8 * c, sm, uint32(chunk + n * d))

    return copy_out


@cache
def load_rows(rows: int, d: int) -> Any:
    """load_rows(sm, at, first, k, A, a, lane): columns 16 k, ... of some rows of a tile, for `mma`.

    A[a : a + rows / 4] becomes the left operand of rows first, ..., first + rows - 1.
    """
    at_chunk = place(d)

    @device
    def load(sm, at, first, k, A, a, lane):
        row = uint32(first + uint32(lane & 15))
        chunk = further(uint32(at + at_chunk(row, uint32(lane >> 4))), 2 * k)
        for m in range(rows // 16):
            warp.ldmatrix(A, a + 4 * m, sm, uint32(chunk + 16 * m * d))

    return load


@cache
def rows_by_rows(rows: int, columns: int, d: int, dtype: str, resident: bool = False) -> Any:
    """rows_by_rows(sm, a, first, b, A, S, lane): S += A Bᵀ for tiles A and B (columns, d) on chip.

    A's rows are first, ..., first + rows - 1. Registers A hold 16 columns of them at a time; or all
    (resident), put there by load_rows beforehand.
    """
    R, C, at_chunk, load, mma = (
        rows // 16, columns // 8, place(d), load_rows(rows, d), warp.mma(dtype),
    )  # fmt: skip

    @device
    def product(sm, a, first, b, A, S, lane):
        B = cuda.local.array(4, uint32)
        row, half = uint32((lane & 7) + 8 * (lane >> 4)), uint32((lane >> 3) & 1)
        for part in range(d // 64):  # four steps at a time: so many the compiler unrolls
            for step in range(4):
                k = 4 * part + step
                if not resident:
                    load(sm, a, first, k, A, 0, lane)
                chunk = further(uint32(b + at_chunk(row, half)), 2 * k)
                for n in range(0, C, 2):
                    warp.ldmatrix(B, 0, sm, uint32(chunk + 8 * n * d))
                    for m in range(R):
                        at_A = 4 * (k * R + m) if resident else 4 * m
                        mma(S, 4 * (m * C + n), A, at_A, B, 0)
                        mma(S, 4 * (m * C + n + 1), A, at_A, B, 2)

    return product


@cache
def rows_by_columns(rows: int, columns: int, d: int, dtype: str) -> Any:
    """rows_by_columns(sm, P, b, O, lane): O += P B for P (rows, columns) in registers, B on chip.

    P is rounded to `dtype` on the way: what `mma` returns is laid out as what it takes on the left.
    """
    R, C, D, at_chunk = rows // 16, columns // 8, d // 8, place(d)
    mma, pack = warp.mma(dtype), warp.pack(dtype)
    R4 = 4 * R

    @device
    def product(sm, P, b, O, lane):
        A = cuda.local.array(R4, uint32)
        B = cuda.local.array(4, uint32)
        for k in range(columns // 16):
            for m in range(R):
                for u in range(4):
                    e = 4 * (m * C + 2 * k) + 2 * u
                    A[4 * m + u] = pack(P[e + 1], P[e])
            for n in range(0, D, 2):
                chunk = further(uint32(b + at_chunk(uint32(lane & 15), uint32(lane >> 4))), n)
                warp.ldmatrix_trans(B, 0, sm, uint32(chunk + 16 * k * d))
                for m in range(R):
                    mma(O, 4 * (m * D + n), A, 4 * m, B, 0)
                    mma(O, 4 * (m * D + n + 1), A, 4 * m, B, 2)

    return product


@device
def edges(i0, j0, Nk, lo, hi):
    """(low, high, end) of a tile: its row r sees column c if low <= c - r <= high and c < end.

    What lies further from the tile than any tile is wide is cut off, so that 32 bits hold it.
    """
    far = 1 << 20
    low, high = max(lo + i0 - j0, -far), min(hi + i0 - j0, far)
    return int32(low), int32(high), int32(min(Nk - j0, far))


@cache
def columns_by_columns(rows: int, columns: int, inner: int, a_d: int, b_d: int, dtype: str) -> Any:
    """columns_by_columns(sm, a, b, row, column, O, lane): O += Aᵀ B, for A and B on chip.

    A (inner, a_d), B (inner, b_d); O is rows row, ... and columns column, ... of the product.
    """
    R, C, at_A, at_B, mma = rows // 16, columns // 8, place(a_d), place(b_d), warp.mma(dtype)

    @device
    def product(sm, a, b, row, column, O, lane):
        A = cuda.local.array(4, uint32)
        B = cuda.local.array(4, uint32)
        top, low = uint32((lane & 7) + 8 * (lane >> 4)), uint32(lane & 15)
        for m in range(R):
            first_A = uint32(a + at_A(top, uint32(row // 8 + 2 * m + ((lane >> 3) & 1))))
            first_B = uint32(b + at_B(low, uint32(column // 8 + (lane >> 4))))
            for k in range(inner // 16):
                warp.ldmatrix_trans(A, 0, sm, uint32(first_A + 16 * k * a_d))
                for n in range(0, C, 2):
                    chunk = further(first_B, n)
                    warp.ldmatrix_trans(B, 0, sm, uint32(chunk + 16 * k * b_d))
                    mma(O, 4 * (m * C + n), A, 0, B, 0)
                    mma(O, 4 * (m * C + n + 1), A, 0, B, 2)

    return product


@cache
def columns_by_finite(rows: int, columns: int, inner: int, a_d: int, b_d: int, dtype: str) -> Any:
    """columns_by_finite(...): as columns_by_columns, but inf and NaN of B count as 0.

    Element by element, and so slow: only for a B that holds such numbers.
    """
    R2, C, at_A, at_B = rows // 8, columns // 8, place(a_d), place(b_d)
    to_float, exponent = widen(dtype), EXPONENT[dtype]

    @device
    def product(sm, a, b, row, column, O, lane):
        k = uint32(0)
        while k < inner:
            for r in range(R2):
                x = to_float(sm[a + at_A(k, uint32(row // 8 + r)) + (lane >> 2)])
                for n in range(C):
                    chunk = uint32(b + at_B(k, uint32(column // 8 + n)) + 2 * (lane & 3))
                    for u in range(2):
                        y = sm[chunk + u]
                        if y & exponent != exponent:
                            O[4 * (r // 2 * C + n) + 2 * (r % 2) + u] += x * to_float(y)
            k = uint32(k + 1)

    return product


@cache
def not_finite(rows: int, d: int, threads: int, dtype: str) -> Any:
    """not_finite(sm, at, tid): whether a thread has copied inf or NaN on chip, see `stage`."""
    chunks = d // 8
    together, at_chunk, add_nothing = threads // chunks, place(d), warp.add_nothing(dtype)

    @device
    def look(sm, at, tid):
        words, total = cuda.local.array(4, uint32), uint32(0)
        chunk = uint32(at + at_chunk(uint32(tid // uint32(chunks)), uint32(tid % uint32(chunks))))
        for n in range(0, rows, together):
            warp.load_words(words, 0, sm, uint32(chunk + n * d))
            for w in range(4):
                total = add_nothing(words[w], total)
        return total != 0

    return look


@cache
def clear_not_finite(rows: int, d: int, threads: int, dtype: str) -> Any:
    """clear_not_finite(sm, at, tid): inf and NaN in a tile become 0, each thread's part of them."""
    exponent = EXPONENT[dtype]

    @device
    def clear(sm, at, tid):
        for e in range(tid, rows * d, threads):
            if sm[at + e] & exponent == exponent:
                sm[at + e] = 0

    return clear


@cache
def add_not_finite(rows: int, columns: int, d: int, dtype: str, dropout: bool = False) -> Any:
    """add_not_finite(sm, b, O, lane, first, low, high, keep): O += inf and NaN of B that are seen.

    Row r of the tile, from `first` on, sees row k of B if low <= k - r <= high. A product with a
    weight above 0 would add the same, but a product of tiles also adds 0 times what is masked. Such
    a weight, if dropout makes it 0, adds NaN; keep as of `kept`. Slow: only for a B that holds such
    numbers.
    """
    R2, D, at_chunk, to_float, exponent = rows // 8, d // 8, place(d), widen(dtype), EXPONENT[dtype]
    M, words = rows // 16, kept_words(columns)
    looked_up = M if dropout else 0

    @device
    def add(sm, b, O, lane, first, low, high, keep):
        mine = cuda.local.array(M, uint32)  # bits 0 and 2: of this lane's rows, and of row k of B
        k = uint32(0)
        while k < columns:
            chunk = uint32(b + at_chunk(k, uint32(0)) + 2 * (lane & 3))
            for m in range(looked_up):
                word = keep[m * words + (k // 64 if words > 1 else 0)]
                word = warp.shuffle_bits(word, uint32((lane & 28) + k % 8 // 2))
                mine[m] = uint32(word >> uint32(4 * (k // 8 % 8) + k % 2))
            for n in range(D):
                for u in range(2):
                    x = sm[further(chunk, n) + u]
                    if x & exponent == exponent:
                        for r in range(R2):
                            apart = int32(k) - int32(first + (lane >> 2) + 8 * r)
                            if apart >= low and apart <= high:
                                y = to_float(x)
                                if dropout and mine[r // 2] >> uint32(2 * (r % 2)) & 1 == 0:
                                    y *= float32(0)
                                O[4 * (r // 2 * D + n) + 2 * (r % 2) + u] += y
            k = uint32(k + 1)

    return add


@device
def afresh(seed):
    """seed, but the compiler cannot tell: the keys of Philox's rounds would stay in registers."""
    low, high = uint64(0xFFFFFFFF), uint64(32)
    k0, k1 = warp.opaque(uint32(seed & low)), warp.opaque(uint32(seed >> high))
    return uint64(uint64(k0) | uint64(uint64(k1) << high))


def kept_words(columns: int, rows: int = 16) -> int:
    """Registers with a bit for each weight that a thread has of a warp's product."""
    return rows // 16 * -(-columns // 64)


def _word_by_word(rows: int, columns: int, word: Any) -> Any:
    """fill(keep, ...) of functions word(to, m, n, count), each for keep[to].

    That is for `count` parts, 16 x 8 each, of the product: from the n-th of those in rows 16 m on.
    """

    def both(one: Any, other: Any) -> Any:
        @device
        def fill_both(keep, seed, threshold, b, h, row, column):
            one(keep, seed, threshold, b, h, row, column)
            other(keep, seed, threshold, b, h, row, column)

        return fill_both

    C, words = columns // 8, kept_words(columns)
    each = (divmod(to, words) for to in range(kept_words(columns, rows)))
    return reduce(both, (word(m * words + w, m, 8 * w, min(8, C - 8 * w)) for m, w in each))


@cache
def kept(columns: int, rows: int = 16) -> Any:
    """kept(keep, seed, threshold, b, h, row, column): which weights dropout keeps, in bits.

    Rows are queries, columns keys; row is the thread's first, column the tile's first. In the
    layout of `mma`, bit 4 (n % 8) + 2 r + u of keep[n // 8] is that of column 8 n + 2 t + u of row
    8 r + g. The next 16 rows have as many words again. Of two lanes that share four columns, each
    draws for one of the rows.
    """

    def word(to: int, m: int, begin: int, count: int) -> Any:
        @device
        def fill(keep, seed, threshold, b, h, row, column):
            t = uint32(uint32(cuda.threadIdx.x) % uint32(4))
            odd = uint32(t % uint32(2))
            i = uint32(row + 16 * m + 8 * odd)
            quad = uint32(column // 4 + 2 * begin + t // uint32(2))
            mine = uint32(0)
            for n in range(count):
                four = kept_four(seed, threshold, b, h, i, uint32(quad + 2 * n))
                mine |= uint32(four << uint32(4 * n))
            other = warp.shuffle_xor_bits(mine, uint32(1))
            first, second = (mine, other) if odd == 0 else (other, mine)
            low = uint32(uint32(first >> uint32(2 * odd)) & uint32(0x33333333))
            high = uint32(uint32(second >> uint32(2 * odd)) & uint32(0x33333333))
            keep[to] = uint32(low | uint32(high << uint32(2)))

        return fill

    return _word_by_word(rows, columns, word)


@cache
def kept_transposed(columns: int, rows: int = 16) -> Any:
    """As `kept`, where rows are keys and columns queries: row, again, is the thread's first.

    Four lanes share four keys of two rows, for two queries: each draws for one row and query.
    """

    def word(to: int, m: int, begin: int, count: int) -> Any:
        @device
        def fill(keep, seed, threshold, b, h, row, column):
            lane = uint32(uint32(cuda.threadIdx.x) % uint32(32))
            t, q = uint32(lane % uint32(4)), uint32(lane // uint32(4) % uint32(4))
            quad = uint32(row // 4 + 4 * m + 2 * (q // uint32(2)))
            i = uint32(column + 8 * begin + 2 * t + q % uint32(2))
            mine = uint32(0)
            for n in range(count):
                four = kept_four(seed, threshold, b, h, uint32(i + 8 * n), quad)
                mine |= uint32(four << uint32(4 * n))
            bits = uint32(uint32(uint32(mine >> q) & uint32(0x11111111)) << q)
            for n in range(1, 4):
                theirs = uint32(warp.shuffle_xor_bits(mine, uint32(4 * n)) >> q)
                bits |= uint32(uint32(theirs & uint32(0x11111111)) << uint32(q ^ uint32(n)))
            keep[to] = bits

        return fill

    return _word_by_word(rows, columns, word)


@device
def survives(keep, n, r, u, factor):
    """`factor` if dropout keeps the weight of column 8 n + 2 t + u and row 8 r + g, else 0."""
    bit = uint32(keep[n // 8] >> uint32(4 * (n % 8) + 2 * r + u)) & uint32(1)
    return factor if bit != uint32(0) else float32(0)


@cache
def drop(columns: int, rows: int = 16) -> Any:
    """drop(P, keep, factor): P becomes 0, or P times factor where it is kept; keep as of `kept`."""
    C, M, eights = columns // 8, rows // 16, 8 * kept_words(columns)

    @device
    def drop_weights(P, keep, factor):
        for m in range(M):
            for n in range(C):
                for r in range(2):
                    for u in range(2):
                        z = survives(keep, m * eights + n, r, u, factor)
                        P[4 * (m * C + n) + 2 * r + u] *= z

    return drop_weights


@cache
def clear_padding(rows: int, d: int, threads: int) -> Any:
    """clear_padding(sm, at, keys, b, first, tid): rows of a tile whose keys are padding become 0.

    Of those that a thread has copied on chip, see `stage`. Then 0 times them is 0, not NaN.
    """
    chunks = d // 8
    together, at_chunk = threads // chunks, place(d)

    @device
    def clear(sm, at, keys, b, first, tid):
        r, N = uint32(tid // uint32(chunks)), keys.shape[1]
        chunk = uint32(at + at_chunk(r, uint32(tid % uint32(chunks))))
        for n in range(0, rows, together):
            key = int32(first + n) + int32(r)
            if key < N and keys[b, key] == 0:
                warp.clear_eight(sm, uint32(chunk + n * d))

    return clear


@cache
def put(rows: int, columns: int, d: int, dtype: str) -> Any:
    """put(sm, at, first, column, O, lane): O (rows, columns) in registers goes into a tile.

    To its rows first, ... and columns column, ..., a multiple of 8; d is the tile's width.
    """
    C, at_chunk, pack = columns // 8, place(d), warp.pack(dtype)

    @device
    def put_part(sm, at, first, column, O, lane):
        row, chunk = uint32(first + (lane >> 2)), uint32(column // 8)
        for n in range(C):
            to = uint32(at + at_chunk(row, uint32(chunk + n)) + 2 * (lane & 3))
            for r in range(rows // 8):
                e = 4 * (r // 2 * C + n) + 2 * (r % 2)
                warp.store_pair(sm, uint32(to + 8 * r * d), pack(O[e + 1], O[e]))

    return put_part


@device
def row_max(x):
    """The largest of the four lanes that share a row."""
    x = max(x, warp.shuffle_xor(x, uint32(1)))
    return max(x, warp.shuffle_xor(x, uint32(2)))


@device
def row_sum(x):
    """The sum over the four lanes that share a row, in float32."""
    x = float32(x + warp.shuffle_xor(x, uint32(1)))
    return float32(x + warp.shuffle_xor(x, uint32(2)))
