"""Which scores count. Rules are free and skip tiles; an array lives in HBM and is counted.

A `Mask` covers one head. Its rules (a diagonal band for causal and window, key padding, a block
layout) say of a tile whether it is empty (not visited, not loaded), full (no mask work) or partial.
An array mask is data: its tiles are read, and it never skips one, or counts would depend on values.

A masked score is -inf and contributes exactly nothing; no finite number stands in for -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .memory import Hbm, load, part

Array = np.ndarray[Any, Any]


def band(
    Nq: int,
    Nk: int,
    *,
    is_causal: bool,
    causal_align: str,
    window: tuple[int | None, int | None] | None,
) -> tuple[int, int]:
    """(lo, hi): query i may attend to keys i + lo to i + hi.

    With causal_align="bottom-right" the last query is aligned with the last key, otherwise the
    first with the first. A side without a limit gets one that no pair of indices reaches.
    """
    offset = Nk - Nq if causal_align == "bottom-right" else 0
    left, right = window or (None, None)
    lo = -(Nq + Nk) if left is None else offset - left
    hi = Nq + Nk if right is None else offset + right
    return lo, min(hi, offset) if is_causal else hi


@dataclass(frozen=True)
class Layout:
    """A block layout: keep (block rows, block columns), bool, over blocks of Br x Bc scores."""

    keep: Array
    Br: int
    Bc: int

    def over(self, i: slice, j: slice) -> Array:
        """The blocks that rows i and columns j overlap."""
        rows = slice(i.start // self.Br, -(-i.stop // self.Br))
        return np.asarray(self.keep[rows, j.start // self.Bc : -(-j.stop // self.Bc)])

    def scores(self, i: slice, j: slice) -> Array:
        """Bool (rows, columns): True where the score's block is kept."""
        rows = np.arange(i.start, i.stop) // self.Br
        return np.asarray(self.keep[rows[:, None], np.arange(j.start, j.stop) // self.Bc])


class Mask:
    """The scores of one head, (Nq, Nk), that count.

    Parameters
    ----------
    Nq, Nk : int
        Queries and keys.
    lo, hi : int, optional
        Query i sees keys i + lo .. i + hi (see `band`).
    keys : bool (Nk,), optional
        True for a real key, False for padding.
    layout : Layout, optional
        Blocks of scores that are kept; the others are masked.
    array : bool or float (Nq or 1, Nk or 1), ndarray or Hbm, optional
        True may attend; a float is added to the scores, -inf masks.
    d_array : float, the shape of `array`, ndarray or Hbm, optional
        Where a backward pass adds up the gradient with respect to a float array.
    d_shared : bool
        Other heads add to the same `d_array`.
    """

    def __init__(
        self,
        Nq: int,
        Nk: int,
        *,
        lo: int | None = None,
        hi: int | None = None,
        keys: Array | None = None,
        layout: Layout | None = None,
        array: Array | Hbm | None = None,
        d_array: Array | Hbm | None = None,
        d_shared: bool = False,
    ) -> None:
        self.Nq, self.Nk, self.layout, self.array = Nq, Nk, layout, array
        self.d_array, self.d_shared = d_array, d_shared
        self.lo = -(Nq + Nk) if lo is None else lo
        self.hi = Nq + Nk if hi is None else hi
        self.keys = None if keys is None or keys.all() else keys
        # live_before[k]: real keys before key k, so that any span is counted in O(1)
        self.live_before = None if self.keys is None else np.append(0, np.cumsum(self.keys))

    @property
    def banded(self) -> bool:
        """Whether lo and hi exclude anything."""
        return bool(self.lo > 1 - self.Nq or self.hi < self.Nk - 1)

    def empty(self, i: slice, j: slice) -> bool:
        """True if the rules mask every score of rows i and columns j."""
        if self.layout is None:
            return self._empty(i, j)
        return all(self._empty(a, b) for a, b in self._kept_parts(self.layout, i, j))

    def _empty(self, i: slice, j: slice) -> bool:
        """`empty` by band and padding alone."""
        first, stop = max(j.start, i.start + self.lo), min(j.stop, i.stop + self.hi)
        return first >= stop or self._live(first, stop) == 0

    def _kept_parts(self, layout: Layout, i: slice, j: slice) -> Iterator[tuple[slice, slice]]:
        """The parts of rows i and columns j that lie in one kept block each."""
        kept = layout.over(i, j)
        for a, b in zip(*np.nonzero(kept), strict=True):
            row, column = a + i.start // layout.Br, b + j.start // layout.Bc
            yield (
                slice(max(i.start, row * layout.Br), min(i.stop, (row + 1) * layout.Br)),
                slice(max(j.start, column * layout.Bc), min(j.stop, (column + 1) * layout.Bc)),
            )

    def full(self, i: slice, j: slice) -> bool:
        """True if the rules mask no score of rows i and columns j."""
        inside = j.start >= i.stop - 1 + self.lo and j.stop - 1 <= i.start + self.hi
        if not inside or self._live(j.start, j.stop) != j.stop - j.start:
            return False
        return self.layout is None or bool(self.layout.over(i, j).all())

    def _live(self, first: int, stop: int) -> int:
        if self.live_before is None:
            return stop - first
        return int(self.live_before[stop] - self.live_before[first])

    def row(self, i: slice) -> Callable[[slice], bool]:
        """`where` of a loop over key tiles: those that the query tile i needs."""
        return lambda j: not self.empty(i, j)

    def column(self, j: slice) -> Callable[[slice], bool]:
        """`where` of a loop over query tiles: those that need the key tile j."""
        return lambda i: not self.empty(i, j)

    def any_row(self, j: slice) -> bool:
        """`where` of an outer loop over key tiles: whether any query needs tile j."""
        return self.Nq > 0 and not self.empty(slice(0, self.Nq), j)

    def first(self, i: slice, j: slice) -> bool:
        """Whether the query tile i visits no key tile before j."""
        return self.empty(i, slice(0, j.start))

    def tile(self, i: slice, j: slice) -> MaskTile:
        """The mask of rows i and columns j; loads the array's tile, if there is an array."""
        return MaskTile(
            self, i, j, None if self.array is None else load(self.array, self.place(i, j))
        )

    def place(self, i: slice, j: slice) -> tuple[slice, slice]:
        """Where the array has rows i and columns j: a broadcast side is its only row or column."""
        tall, broad = self.own_sides
        return i if tall else slice(0, 1), j if broad else slice(0, 1)

    def part(self, i: slice, j: slice) -> Mask:
        """The mask of rows i and columns j, which it counts from 0; the layout must keep them all.

        It knows of no gradient of the array.
        """
        array = None if self.array is None else part(self.array, *self.place(i, j))
        return Mask(
            i.stop - i.start,
            j.stop - j.start,
            lo=self.lo + i.start - j.start,
            hi=self.hi + i.start - j.start,
            keys=None if self.keys is None else self.keys[j],
            array=array,
        )

    def among(self, span: slice) -> Mask:
        """The mask that leaves no key outside a span, all else alike; it knows of no gradient."""
        inside = np.zeros(self.Nk, bool)
        inside[span] = True
        if self.keys is not None:
            inside &= self.keys
        return Mask(
            self.Nq,
            self.Nk,
            lo=self.lo,
            hi=self.hi,
            keys=inside,
            layout=self.layout,
            array=self.array,
        )

    def add_gradient(self, dS: Array, i: slice, j: slice) -> Array:
        """Add dS (rows i, columns j) to the array's gradient, if asked for; returns dS.

        A tile that is nobody else's is written once, one that is broadcast adds up in HBM.
        """
        if self.d_array is not None:
            place, own = self.place(i, j), self.own_sides
            if all(own) and not self.d_shared:
                self.d_array[place] = dS
            else:
                spread = tuple(axis for axis in (0, 1) if not own[axis])
                self.d_array[place] = load(self.d_array, place) + dS.sum(axis=spread, keepdims=True)
        return dS

    @property
    def own_sides(self) -> tuple[bool, bool]:
        """Whether the array has a row for each query, and a column for each key."""
        if self.array is None:
            return False, False
        return self.array.shape[0] == self.Nq, self.array.shape[1] == self.Nk


class MaskTile:
    """Which scores of one tile count; called on the tile's scores, it masks them in place."""

    def __init__(self, mask: Mask, i: slice, j: slice, loaded: Array | None) -> None:
        self.mask, self.i, self.j, self.loaded = mask, i, j, loaded

    def keep(self) -> Array:
        """Bool (rows, columns), or what broadcasts to it: True where the score counts."""
        i, j, mask = self.i, self.j, self.mask
        keep = np.ones((i.stop - i.start, j.stop - j.start), bool)
        if mask.banded:
            ahead = np.arange(j.start, j.stop) - np.arange(i.start, i.stop)[:, None]
            keep &= (ahead >= mask.lo) & (ahead <= mask.hi)
        if mask.keys is not None:
            keep &= mask.keys[j]
        if mask.layout is not None:
            keep &= mask.layout.scores(i, j)
        if self.loaded is not None:
            keep &= self.loaded if self.loaded.dtype == bool else self.loaded != -np.inf
        return keep

    def __call__(self, S: Array) -> Array:
        """Scores S (rows, columns) plus the float mask, -inf where masked; overwrites S."""
        if self.loaded is None and self.mask.full(self.i, self.j):
            return S
        if self.loaded is not None and self.loaded.dtype != bool:
            S += self.loaded
        np.copyto(S, -np.inf, where=~self.keep())
        return S

    def keep_transposed(self) -> Array:
        """`keep` of the transposed tile (columns, rows)."""
        return self.keep().T

    def cleared(self, dS: Array) -> Array:
        """dS (rows, columns) with 0 where masked, in place: a masked score takes no gradient."""
        if self.loaded is not None or not self.mask.full(self.i, self.j):
            np.copyto(dS, 0, where=~self.keep())
        return dS

    def gradient(self, dS: Array) -> Array:
        """`cleared`, and added to the gradient of the mask's array, where that is asked for."""
        return self.mask.add_gradient(self.cleared(dS), self.i, self.j)
