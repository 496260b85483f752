"""Dropout bits that depend on where a weight is, and on nothing else.

The bits of a weight are a pure function of (seed, batch, head, row, column): never of tile sizes,
visiting order or how a batch is laid out, so every algorithm, pass and kernel drops the same ones.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):

- key = (seed mod 2^32, seed div 2^32)
- counter = (column div 4, row, head, batch)
- the weight takes word `column mod 4` of the four 32-bit words that come out
- it is dropped if word < floor(p 2^32), and divided by 1 - p otherwise.

`batch` is the position of the item in the flattened leading dimensions, `head` the query head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # key increments (golden ratio, sqrt(3) - 1)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Array, Array, Array, Array]:
    """Ten rounds of Philox4x32; counter words below 2^32, scalars or arrays that broadcast.

    Words stay unbroadcast as long as they can: with the column in one and the row in another, the
    first two rounds work on vectors.
    """
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = c0 * _M0, c2 * _M1
        c0, c1 = (b >> _32) ^ c1 ^ np.uint64(k0), b & _LOW
        c2, c3 = (a >> _32) ^ c3 ^ np.uint64(k1), a & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Dropout:
    """Drops weights of one head with probability p in [0, 1); `seed` is below 2^64.

    row, column: where row 0 and column 0 are in the head, if this is a part of it.
    """

    p: float
    seed: int
    batch: int
    head: int
    row: int = 0
    column: int = 0

    def part(self, i: slice, j: slice) -> Dropout:
        """The dropout of rows i and columns j, which it counts from 0."""
        return replace(self, row=self.row + i.start, column=self.column + j.start)

    def keep(self, i: slice, j: slice) -> Array:
        """Bool (rows of i, columns of j): False where the weight is dropped."""
        i = slice(i.start + self.row, i.stop + self.row)
        j = slice(j.start + self.column, j.stop + self.column)
        first, last = j.start // 4, -(-j.stop // 4)
        rows = np.arange(i.start, i.stop, dtype=np.uint64)[:, None]
        quads = np.arange(first, last, dtype=np.uint64)
        words = philox4x32((quads, rows, self.head, self.batch), self.seed)
        bits = np.stack(words, axis=-1).reshape(len(rows), -1)
        mine = bits[:, j.start - 4 * first : j.stop - 4 * first]
        return np.asarray(mine >= np.uint64(int(self.p * 2**32)))

    def __call__(self, P: Array, i: slice, j: slice) -> Array:
        """Weights P of rows i and columns j, after dropout; in place unless P is read-only."""
        return P if self.p == 0 else self.kept(P, self.keep(i, j))

    def kept(self, P: Array, keep: Array) -> Array:
        """Weights P with 0 where not `keep`, the others over 1 - p; in place unless read-only."""
        factor = keep * P.dtype.type(1 / (1 - self.p))
        return np.asarray(np.multiply(P, factor, out=P if P.flags.writeable else None))
