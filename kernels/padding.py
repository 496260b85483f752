"""Padding: which key tiles hold a real key, and which of a tile's keys are real.

Warps look at the keys of a tile when they come to it. Warpgroups must agree, and so a small kernel
beforehand lists the tiles for them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from .gpu import cuda, device, int32, kernel, uint32
from .ptx.warp import ballot

NUMBER, FIRST, LAST, BITS = 0, 1, 2, 3  # of an entry of `walked`


def entry(Bc: int) -> int:
    """Words that `walked` has of a tile."""
    return BITS + -(-Bc // 32)


@device
def _real_keys(keys, b, first, stop):
    count = int32(0)
    for k in range(first, stop):
        if keys[b, k] != 0:
            count += int32(1)
    return count


@cache
def walked_tiles(Bc: int, threads: int) -> Any:
    """Which tiles of Bc keys are walked, a block for each item of the batch.

    keys (batch, Nk) has 0 where a key is padding. Writes rank (batch, Tc + 1): how many tiles with
    a real key there are before a tile; and, of these alone and in order, walked (batch, Tc, entry):
    twice the tile's number, and 1 if not all of its keys are real; its first real key and its last;
    and a bit for each key, of which those beyond Nk are not real.
    """
    words = entry(Bc) - BITS

    @kernel(threads)
    def key_tiles(keys, rank, walked):
        counts = cuda.shared.array(0, int32)
        tid, b = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        Nk, Tc = int32(keys.shape[1]), int32(walked.shape[1])
        each = int32(Tc + (threads - 1)) // threads  # tiles of a thread
        begin, end = int32(tid * each), min(Tc, int32((tid + 1) * each))
        found = int32(0)
        for j in range(begin, end):
            if _real_keys(keys, b, int32(j * Bc), min(Nk, int32((j + 1) * Bc))) > 0:
                found += int32(1)
        counts[tid] = found
        cuda.syncthreads()
        c = int32(0)
        for t in range(tid):
            c += counts[t]
        for j in range(begin, end):
            rank[b, j] = c
            first, stop = int32(j * Bc), min(Nk, int32((j + 1) * Bc))
            real = _real_keys(keys, b, first, stop)
            if real > 0:
                walked[b, c, NUMBER] = int32(2 * j) + (int32(0) if real == Bc else int32(1))
                lowest, highest = stop, first
                for w in range(words):
                    bits = uint32(0)
                    for n in range(32):
                        k = int32(first + 32 * w + n)
                        if k < stop and keys[b, k] != 0:
                            bits |= uint32(uint32(1) << uint32(n))
                            lowest, highest = min(lowest, k), k
                    walked[b, c, BITS + w] = int32(bits)
                walked[b, c, FIRST], walked[b, c, LAST] = lowest, highest
                c += int32(1)
        if tid == threads - 1:
            rank[b, Tc] = c

    return key_tiles


@device
def _from_bit(n):
    """Bits n and higher of 32."""
    bits = uint32(0xFFFFFFFF)
    if n > 0:
        bits = uint32(bits << uint32(n)) if n < 32 else uint32(0)
    return bits


@cache
def real_in(Bc: int) -> Any:
    """real_in(walked, b, c, first, stop): whether a tile has a real key from first on before stop.

    The c-th of `walked`.
    """
    words = entry(Bc) - BITS

    @device
    def some_real(walked, b, c, first, stop):
        lowest, highest = walked[b, c, FIRST], walked[b, c, LAST]
        some = highest >= first and lowest < stop
        if some and lowest < first and highest >= stop:
            bits = uint32(0)
            for w in range(words):
                k = int32(walked[b, c, NUMBER] // 2 * Bc + 32 * w)
                between = _from_bit(int32(first - k)) & ~_from_bit(int32(stop - k))
                bits |= uint32(walked[b, c, BITS + w]) & between
            some = bits != uint32(0)
        return some

    return some_real


@cache
def tiles_between(Bc: int, padded: bool) -> Any:
    """tiles_between(rules, b, first, stop): (first, stop) of the tiles that hold such keys.

    Of all tiles; if padded, among those of `walked`, and of real keys; rules begins with rank and
    walked then.
    """

    some_real = real_in(Bc)

    @device
    def between(rules, b, first, stop):
        j_stop = int32(int32(stop + (Bc - 1)) // Bc)
        return int32(first) // Bc, j_stop

    @device
    def real_between(rules, b, first, stop):
        rank, walked = rules[0], rules[1]
        Tc, first, stop = int32(walked.shape[1]), max(int32(0), first), max(int32(0), stop)
        j_first = rank[b, min(Tc, int32(first) // Bc)]
        if j_first < rank[b, Tc] and walked[b, j_first, LAST] < first:
            j_first += 1
        j_stop = rank[b, min(Tc, int32(stop + (Bc - 1)) // Bc)]
        if j_stop > 0 and walked[b, j_stop - 1, FIRST] >= stop:
            j_stop -= 1
        if j_first + 1 == j_stop and not some_real(rules[1], b, j_first, first, stop):
            j_stop = j_first
        return int32(j_first), int32(j_stop)

    return real_between if padded else between


@cache
def next_real(columns: int) -> Any:
    """next_real(keys, b, j0, first, stop, real, lane): where the next tile with a real key begins.

    From the tile at j0 on; only keys from `first` on before `stop` count. Bit c % 32 of
    real[c // 32] says whether key c of that tile is real. It may begin at `stop` or later: then
    there is none. For a whole warp.
    """

    @device
    def find(keys, b, j0, first, stop, real, lane):
        some = uint32(0)
        while some == 0 and j0 < stop:
            for c in range(0, columns, 32):
                key, bit = j0 + c + int32(lane), uint32(0)
                if c + lane < columns and key >= first and key < stop:
                    bit = uint32(keys[b, key])
                real[c // 32] = ballot(bit)
                some |= real[c // 32]
            if some == 0:
                j0 += columns
        return j0

    return find


@cache
def all_real(columns: int) -> Any:
    """all_real(real): whether all keys of a tile are, by the bits of `next_real`."""
    words, last = -(-columns // 32), (1 << (columns - 1) % 32 + 1) - 1

    @device
    def every_one(real):
        bits = uint32(real[words - 1] | uint32(~last & 0xFFFFFFFF))
        for w in range(words - 1):
            bits &= real[w]
        return bits == uint32(0xFFFFFFFF)

    return every_one


@cache
def find_real(columns: int, threads: int) -> Any:
    """find_real(keys, b, j0, sm, at, tid): sm[at + c] = the first real key from key c of a tile on.

    Counted from the tile's first, at j0; `columns` if there is none. Returns whether all keys that
    this thread looked for are real.
    """

    @device
    def find(keys, b, j0, sm, at, tid):
        stop, mine = min(keys.shape[1] - j0, columns), True
        for c in range(tid, columns, threads):
            key = c
            while key < stop and keys[b, j0 + key] == 0:
                key += 1
            sm[at + c] = key if key < stop else columns
            mine = mine and key == c and key < stop
        return mine

    return find


@cache
def next_seeing(rows: int, columns: int) -> Any:
    """next_seeing(sm, at, i0, i_stop, Nq, lo, hi, j0): the first query of a tile that sees a key.

    A real one of the tile at j0, by what `find_real` left; query i sees keys i + lo to i + hi. From
    i0 on in steps of `rows`; i_stop or more if there is none.
    """

    @device
    def find(sm, at, i0, i_stop, Nq, lo, hi, j0):
        low, high = int32(lo) - int32(j0), int32(hi) - int32(j0)
        while i0 < i_stop and int32(sm[at + max(int32(0), int32(i0 + low))]) >= min(
            int32(columns), int32(min(int32(i0 + rows), int32(Nq)) + high)
        ):
            i0 = int32(i0 + rows)
        return i0

    return find
