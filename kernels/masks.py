"""Masks on the GPU: which tiles a block visits, and which of a tile's scores count.

The rules are those of flashsim.masks. A tile that the rules empty is not loaded; an array mask is
loaded tile by tile, each element once, and skips nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from .gpu import device, float32, load, types, uint32, widen

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Features:
    """What a kernel is compiled for.

    output: the dtype of what is written, if another. mask: "" or the dtype of an array mask; tall,
    broad: whether it has a row for each query and a column for each key, or one for all. fp8:
    whether Q, K and V are e4m3.
    """

    dtype: str = "float32"
    output: str = ""
    band: bool = False
    keys: bool = False
    layout: bool = False
    mask: str = ""
    tall: bool = True
    broad: bool = True
    dropout: bool = False
    fp8: bool = False

    @property
    def stored(self) -> str:
        """The dtype of what is written."""
        return self.output or self.dtype

    @property
    def masked(self) -> bool:
        """Whether a score of a visited tile may be masked, by more than the end of the keys."""
        return self.band or self.keys or bool(self.mask)


@device
def _any_real(keys, b, first, stop):
    k = first
    while k < stop and keys[b, k] == 0:
        k += 1
    return k < stop


@cache
def visited(Br: int, Bc: int, f: Features) -> Any:
    """visited(i0, j0, Nq, Nk, lo, hi, b, keys, layout): whether the rules leave anything."""
    band, padding, blocks = f.band, f.keys, f.layout

    @device
    def visited_tile(i0, j0, Nq, Nk, lo, hi, b, keys, layout):
        first = j0
        stop = min(j0 + Bc, Nk)
        if band:
            first = max(first, i0 + lo)
            stop = min(stop, min(i0 + Br, Nq) + hi)
        some = first < stop
        if padding and some:
            some = _any_real(keys, b, first, stop)
        if blocks and some:
            some = layout[i0 // Br, j0 // Bc] != 0
        return some

    return visited_tile


@cache
def full(Br: int, Bc: int, f: Features) -> Any:
    """full(i0, j0, Nk, lo, hi): whether all scores count, so that there is nothing to mask."""
    band, other = f.band, f.keys or bool(f.mask)

    @device
    def full_tile(i0, j0, Nk, lo, hi):
        whole = j0 + Bc <= Nk and not other
        if band:
            whole = whole and j0 >= i0 + Br - 1 + lo and j0 + Bc - 1 <= i0 + hi
        return whole

    return full_tile


@cache
def counts(f: Features) -> Any:
    """counts(row, col, Nk, lo, hi, b, keys): whether the rules let a score count."""
    band, padding = f.band, f.keys

    @device
    def score_counts(row, col, Nk, lo, hi, b, keys):
        keep = col < Nk
        if band:
            keep = keep and col - row >= lo and col - row <= hi
        if padding and keep:
            keep = keys[b, col] != 0
        return keep

    return score_counts


@device
def _bool(x):
    return float32(0) if x != 0 else -float32(float("inf"))


@cache
def stage_mask(Br: int, Bc: int, threads: int, f: Features) -> Any:
    """stage_mask(A, i0, j0, Nq, Nk, sm, at, row, column, tid): the array's tile, for base-2 scores.

    Element (r, c) goes to sm[at + r row + c column]; what is True or False becomes 0 or -inf.
    """
    rows, columns = Br if f.tall else 1, Bc if f.broad else 1
    tall, broad, log2e = f.tall, f.broad, LOG2E
    to_float = _bool if f.mask == "bool" else widen(f.mask or "float32")

    @device
    def stage_mask_tile(A, i0, j0, Nq, Nk, sm, at, row, column, tid):
        for e in range(tid, rows * columns, threads):
            i = e // columns
            j = e % columns
            if tall:
                i += i0
            if broad:
                j += j0
            if (i < Nq or not tall) and (j < Nk or not broad):
                x = to_float(load(A, uint32(i), uint32(j)))
                sm[at + e // columns * row + e % columns * column] = x * float32(log2e)

    return stage_mask_tile


def rule_types(f: Features) -> tuple[Any, ...]:
    """Numba types of the arguments that all kernels share, in `RULES`' order."""
    byte, four = types.uint8, types.Array
    mask = {"": types.float32, "bool": byte, "float32": types.float32}.get(f.mask, types.uint16)
    return (
        four(byte, 2, "C"),
        four(mask, 4, "A"),
        four(byte, 2, "C"),
        types.int64,
        types.int64,
        types.float32,
        types.int64,
        types.uint64,
        types.uint64,
        types.float32,
    )
