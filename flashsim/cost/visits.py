"""Which tiles of a grid the mask's rules leave, summed as the closed forms need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checks import bad
from ..masks import Layout, Mask

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Visits:
    """Which tiles of the Tr x Tc grid the rules leave, summed as the formulas need it.

    Query tiles that are alike may stand in one entry: `times` says for how many.
    """

    rows: Array  # rows of a query tile
    times: Array  # query tiles like it
    tiles: Array  # key tiles that it visits
    keys: Array  # keys in those tiles
    keys_of_any: int  # keys in tiles that at least one query tile visits
    first: frozenset[tuple[int, int]] = frozenset()  # (rows, keys) of first visits of a query tile
    later: frozenset[tuple[int, int]] = frozenset()  # and of the others

    @property
    def shapes(self) -> frozenset[tuple[int, int]]:
        """The (rows, keys) of visited tiles that occur."""
        return self.first | self.later

    @property
    def turns(self) -> int:
        """Query tiles, Tr."""
        return int(self.times.sum())

    @property
    def tallest(self) -> int:
        """Rows of the largest query tile."""
        return int(self.rows.max(initial=0))

    @property
    def row_visits(self) -> int:
        """Rows loaded by an inner loop over query tiles."""
        return int((self.times * self.rows) @ self.tiles)

    @property
    def key_visits(self) -> int:
        """Keys loaded by an inner loop over key tiles."""
        return int(self.times @ self.keys)

    @property
    def area(self) -> int:
        """Scores computed."""
        return int((self.times * self.rows) @ self.keys)

    @property
    def rows_of_any(self) -> int:
        """Rows in query tiles that visit at least one key tile."""
        return int((self.times * self.rows) @ (self.tiles > 0))


@dataclass(frozen=True)
class EveryTile:
    """The `Visits` of a problem without rules: its sums are products, exact at any size.

    Along each side at most two kinds of tiles occur, whole ones and a short one.
    """

    Nq: int
    Nk: int
    Br: int
    Bc: int

    @property
    def turns(self) -> int:
        """Query tiles, Tr."""
        return -(-self.Nq // self.Br)

    @property
    def tallest(self) -> int:
        """Rows of the largest query tile."""
        return min(self.Br, self.Nq)

    @property
    def row_visits(self) -> int:
        """Rows loaded by an inner loop over query tiles."""
        return self.Nq * -(-self.Nk // self.Bc)

    @property
    def key_visits(self) -> int:
        """Keys loaded by an inner loop over key tiles."""
        return self.turns * self.Nk

    @property
    def area(self) -> int:
        """Scores computed."""
        return self.Nq * self.Nk

    @property
    def rows_of_any(self) -> int:
        """Rows in query tiles that visit at least one key tile."""
        return self.Nq if self.Nk else 0

    @property
    def keys_of_any(self) -> int:
        """Keys in tiles that at least one query tile visits."""
        return self.Nk if self.Nq else 0

    @property
    def first(self) -> set[tuple[int, int]]:
        """(rows, keys) of first visits of a query tile."""
        return {(r, min(self.Bc, self.Nk)) for r in _kinds(self.Nq, self.Br) if self.Nk}

    @property
    def later(self) -> set[tuple[int, int]]:
        """(rows, keys) of the other visits."""
        rest = _kinds(max(0, self.Nk - self.Bc), self.Bc)
        return {(r, c) for r in _kinds(self.Nq, self.Br) for c in rest}

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """The (rows, keys) of visited tiles that occur."""
        return {(r, c) for r in _kinds(self.Nq, self.Br) for c in _kinds(self.Nk, self.Bc)}

    @property
    def rows(self) -> Array:
        """Rows of each kind of query tile."""
        return _exact(_kinds(self.Nq, self.Br))

    @property
    def times(self) -> Array:
        """Query tiles of each kind."""
        return _exact([self.Nq // r if r == self.Br else 1 for r in _kinds(self.Nq, self.Br)])

    @property
    def tiles(self) -> Array:
        """Key tiles that each visits."""
        return _exact([-(-self.Nk // self.Bc)] * len(self.rows))

    @property
    def keys(self) -> Array:
        """Keys in those tiles."""
        return _exact([self.Nk] * len(self.rows))


def _kinds(N: int, B: int) -> list[int]:
    """The sizes of tiles of N rows that occur."""
    whole, rest = divmod(N, B)
    return [B] * (whole > 0) + [rest] * (rest > 0)


def _exact(numbers: list[int]) -> Array:
    return np.array(numbers, dtype=object)  # Python's integers know no overflow


LARGEST_GRID = 2**27  # query or key tiles that a band or padding may cut
LARGEST_LENGTH = 2**31  # so that the sums of a banded grid stay below 2^63


def _sizes(N: int, B: int) -> Array:
    return np.diff(np.append(np.arange(0, N, B), N)) if N else np.zeros(0, np.int64)


def visits(mask: Mask, Br: int, Bc: int) -> Visits | EveryTile:
    """The visited tiles: in O(1) without rules, in O(Tr + Tc) with a band or padding.

    With a block layout, in the number of its cells.

    Raises
    ------
    ValueError
        If a masked problem has more than 2^27 tiles along a side, or is longer than 2^31.
    """
    if mask.layout is not None:
        return _visits_of_layout(mask, mask.layout, Br, Bc)
    if not mask.banded and mask.keys is None:
        return EveryTile(mask.Nq, mask.Nk, Br, Bc)
    for name, N, B in (("N", mask.Nq, Br), ("Nk", mask.Nk, Bc)):
        if N > LARGEST_LENGTH or -(-N // B) > LARGEST_GRID:
            most = min(LARGEST_LENGTH, LARGEST_GRID * B)
            raise bad(name, N, f"at most {most} with a mask and tiles of {B}")
    rows, cols = _sizes(mask.Nq, Br), _sizes(mask.Nk, Bc)
    Tr, Tc = len(rows), len(cols)
    once = np.ones(Tr, np.int64)
    if Tr == 0 or Tc == 0:
        return Visits(rows, once, 0 * once, 0 * once, 0)
    start = np.arange(Tr) * Br
    first = np.clip(start + mask.lo, 0, mask.Nk)  # keys [first, stop) meet the band
    stop = np.clip(start + rows + mask.hi, 0, mask.Nk)
    some = first < stop
    left, right = np.where(some, first // Bc, 0), np.where(some, (stop - 1) // Bc, 0)

    # Only the two outermost tiles are cut by the band; of those between, padding alone decides.
    def alive(k: Array) -> Array:
        """Real keys before key k."""
        return k if mask.live_before is None else np.asarray(mask.live_before[k])

    edges = np.append(np.arange(Tc) * Bc, mask.Nk)
    whole = np.diff(alive(edges)) > 0
    at_left = some & (alive(np.minimum(edges[left + 1], stop)) > alive(np.minimum(first, stop)))
    at_right = some & (left < right) & (alive(stop) > alive(np.maximum(edges[right], first)))
    inner = np.maximum(right - left - 1, 0) * some

    def between(weight: Array) -> Array:
        before = np.append(0, np.cumsum(weight * whole))
        return np.asarray(before[left + 1 + inner] - before[left + 1])

    tiles = between(np.ones(Tc, np.int64)) + at_left + at_right
    keys = between(cols) + at_left * cols[left] + at_right * cols[right]

    covered = np.zeros(Tc + 1, np.int64)
    np.add.at(covered, (left + 1)[inner > 0], 1)
    np.add.at(covered, (left + 1 + inner)[inner > 0], -1)
    touched = (np.cumsum(covered)[:Tc] > 0) & whole
    touched[left[at_left]] = True
    touched[right[at_right]] = True

    at_last = (at_left & (left == Tc - 1)) | (at_right & (right == Tc - 1))
    return Visits(
        rows,
        once,
        tiles,
        keys,
        int(cols @ touched),
        first=_shapes(rows, cols, {0: tiles > at_last, -1: at_last & (tiles == 1)}),
        later=_shapes(rows, cols, {0: tiles - at_last > 1, -1: at_last & (tiles > 1)}),
    )


def _visits_of_layout(mask: Mask, layout: Layout, Br: int, Bc: int) -> Visits:
    """The same, from a grid so fine that each cell lies in one tile and in one block."""
    rows, cols = _sizes(mask.Nq, Br), _sizes(mask.Nk, Bc)
    if len(rows) == 0 or len(cols) == 0:
        none = np.zeros(len(rows), np.int64)
        return Visits(rows, none + 1, none, none, 0)
    top, left = (
        np.union1d(np.arange(0, N, B), np.arange(0, N, block))
        for N, B, block in ((mask.Nq, Br, layout.Br), (mask.Nk, Bc, layout.Bc))
    )
    bottom, right = np.append(top[1:], mask.Nq)[:, None], np.append(left[1:], mask.Nk)
    first = np.maximum(left, top[:, None] + mask.lo)
    stop = np.maximum(first, np.minimum(right, bottom + mask.hi))
    alive = mask.live_before if mask.live_before is not None else np.arange(mask.Nk + 1)
    last = mask.Nk
    live = alive[np.clip(stop, 0, last)] > alive[np.clip(first, 0, last)]
    cell = live & layout.keep[top[:, None] // layout.Br, left // layout.Bc]
    by_row = np.logical_or.reduceat(cell, np.searchsorted(top, np.arange(0, mask.Nq, Br)), axis=0)
    hit = np.logical_or.reduceat(by_row, np.searchsorted(left, np.arange(0, mask.Nk, Bc)), axis=1)
    leading = hit & (np.cumsum(hit, axis=1) == 1)
    return Visits(
        rows,
        np.ones(len(rows), np.int64),
        hit.sum(axis=1),
        hit @ cols,
        int(cols @ hit.any(axis=0)),
        first=_shapes(rows, cols, {0: leading[:, :-1].any(axis=1), -1: leading[:, -1]}),
        later=_shapes(
            rows,
            cols,
            {0: (hit & ~leading)[:, :-1].any(axis=1), -1: (hit & ~leading)[:, -1]},
        ),
    )


def _shapes(rows: Array, cols: Array, occurs: dict[int, Array]) -> frozenset[tuple[int, int]]:
    """(rows, keys) that occur; occurs[0]: rows that visit a full key tile, [-1]: the last one."""
    return frozenset(
        (int(rows[here][0]), int(cols[column]))
        for here in (slice(0, len(rows) - 1), slice(len(rows) - 1, None))
        for column, visited in occurs.items()
        if visited[here].any()
    )
