"""Closed forms: what an algorithm reads, writes, holds and computes, in O(N / Br + N / Bc).

Each function here is the formula of one algorithm for one head; tests hold them, array by array,
against executed runs. For dense square attention they reduce to (elements, Tr = N/Br, Tc = N/Bc):

========================================  ==============================
standard, row tiles                       4 N^2 + (2 Tr + 2) N d
standard, a row of S too long for SRAM    + N^2
FlashAttention, as printed                3 N d + 2 N + Tc (3 N d + 4 N)
FlashAttention, published kernel          (3 Tc + 1) N d + (4 Tc - 2) N
FlashAttention-2                          (2 + 2 Tr) N d + N
========================================  ==============================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..masks import Mask
from ..memory import Traffic

Array = np.ndarray[Any, Any]


@dataclass
class Cost(Traffic):
    """The closed form of a run: traffic per array, and what it computes and holds.

    flops: of the matrix products over visited tiles, two a multiply-add, masked scores included.
    exps: exponentials, those of the rescale factors included. sram_elements, sram_bytes: the most
    that is on chip at once. extra_hbm_elements: HBM beyond Q, K, V, O and a mask.
    """

    flops: int = 0
    exps: int = 0
    sram_elements: int = 0
    sram_bytes: int = 0
    extra_hbm_elements: int = 0

    def plus(self, other: Cost) -> Cost:
        """The cost of doing both, one after the other."""
        return Cost(
            reads=_add(self.reads, other.reads),
            writes=_add(self.writes, other.writes),
            item_bytes={**self.item_bytes, **other.item_bytes},
            flops=self.flops + other.flops,
            exps=self.exps + other.exps,
            sram_elements=max(self.sram_elements, other.sram_elements),
            sram_bytes=max(self.sram_bytes, other.sram_bytes),
            extra_hbm_elements=self.extra_hbm_elements + other.extra_hbm_elements,
        )

    def times(self, n: int) -> Cost:
        """The cost of n such heads, one after the other."""
        return Cost(
            reads={name: n * x for name, x in self.reads.items()},
            writes={name: n * x for name, x in self.writes.items()},
            item_bytes=dict(self.item_bytes),
            flops=n * self.flops,
            exps=n * self.exps,
            sram_elements=self.sram_elements if n else 0,
            sram_bytes=self.sram_bytes if n else 0,
            extra_hbm_elements=n * self.extra_hbm_elements,
        )


def _add(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in [*a, *(n for n in b if n not in a)]}


@dataclass(frozen=True)
class Head:
    """One head: the sizes, the mask, and the bytes of a stored and of a wide (on-chip) element."""

    mask: Mask
    d: int
    dv: int
    stored: int = 4
    wide: int = 4

    @property
    def Nq(self) -> int:
        """Queries."""
        return self.mask.Nq

    @property
    def Nk(self) -> int:
        """Keys."""
        return self.mask.Nk

    def item_bytes(self, *wide: str) -> dict[str, int]:
        """Item sizes in HBM: Q, K, V, O as stored, the named arrays wide, the mask's own."""
        sizes = dict.fromkeys(("Q", "K", "V", "O"), self.stored) | dict.fromkeys(wide, self.wide)
        if self.mask.array is not None:
            sizes["mask"] = self.mask.array.dtype.itemsize
        return sizes

    def mask_tile(self, r: Any, c: Any) -> Any:
        """Elements of the array mask behind an r x c tile of scores; 0 without one."""
        if self.mask.array is None:
            return 0
        tall, broad = self.mask.own_sides
        return (r if tall else 1) * (c if broad else 1)


@dataclass(frozen=True)
class Visits:
    """Which tiles of the Tr x Tc grid the rules leave, summed as the formulas need it."""

    rows: Array  # (Tr,) rows of each query tile
    tiles: Array  # (Tr,) key tiles that it visits
    keys: Array  # (Tr,) keys in those tiles
    keys_of_any: int  # keys in tiles that at least one query tile visits
    shapes: tuple[tuple[int, int], ...] = field(default=())  # the (rows, keys) that occur

    @property
    def row_visits(self) -> int:
        """Rows loaded by an inner loop over query tiles."""
        return int(self.rows @ self.tiles)

    @property
    def area(self) -> int:
        """Scores computed."""
        return int(self.rows @ self.keys)

    @property
    def rows_of_any(self) -> int:
        """Rows in query tiles that visit at least one key tile."""
        return int(self.rows @ (self.tiles > 0))


def _sizes(N: int, B: int) -> Array:
    return np.diff(np.append(np.arange(0, N, B), N)) if N else np.zeros(0, np.int64)


def visits(mask: Mask, Br: int, Bc: int) -> Visits:
    """The visited tiles of a banded, padded mask, without walking the grid."""
    rows, cols = _sizes(mask.Nq, Br), _sizes(mask.Nk, Bc)
    Tr, Tc = len(rows), len(cols)
    if Tr == 0 or Tc == 0:
        none = np.zeros(Tr, np.int64)
        return Visits(rows, none, none, 0)
    start = np.arange(Tr) * Br
    first = np.clip(start + mask.lo, 0, mask.Nk)  # keys [first, stop) meet the band
    stop = np.clip(start + rows + mask.hi, 0, mask.Nk)
    some = first < stop
    left, right = np.where(some, first // Bc, 0), np.where(some, (stop - 1) // Bc, 0)

    # Only the two outermost tiles are cut by the band; of those between, padding alone decides.
    alive = mask.live_before if mask.live_before is not None else np.arange(mask.Nk + 1)
    edges = np.append(np.arange(Tc) * Bc, mask.Nk)
    whole = np.diff(alive[edges]) > 0
    at_left = some & (alive[np.minimum(edges[left + 1], stop)] > alive[np.minimum(first, stop)])
    at_right = some & (left < right) & (alive[stop] > alive[np.maximum(edges[right], first)])
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
    shapes = set()
    for here in (slice(0, Tr - 1), slice(Tr - 1, Tr)):
        if at_last[here].any():
            shapes.add((int(rows[here][0]), int(cols[-1])))
        if (tiles[here] > at_last[here]).any():
            shapes.add((int(rows[here][0]), int(cols[0])))
    return Visits(rows, tiles, keys, int(cols @ touched), tuple(sorted(shapes)))


def _mask_reads(head: Head, v: Visits) -> dict[str, int]:
    """Elements of an array mask read with each visited tile."""
    if head.mask.array is None:
        return {}
    tall, broad = head.mask.own_sides
    per_row = v.keys if broad else v.tiles
    return {"mask": int((v.rows if tall else np.ones_like(v.rows)) @ per_row)}


def _peak(*moments: tuple[int, int]) -> dict[str, int]:
    """sram_elements and sram_bytes of the fullest of some moments, given as (elements, bytes)."""
    elements, size = _fullest((0, 0), *moments)
    return {"sram_elements": elements, "sram_bytes": size}


def _mask_bytes(head: Head, elements: int) -> int:
    return 0 if head.mask.array is None else elements * head.mask.array.dtype.itemsize


def flash2_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) on chip in the inner loop: Q_i, K_j, V_j, O_i, S_ij, l_i, m_i.

    P overwrites S; row vectors that do not outlive the turn (m_new, alpha) are registers.
    """
    loaded = r * head.d + c * (head.d + head.dv)
    born = r * head.dv + r * c + 2 * r
    mask = head.mask_tile(r, c)
    elements = loaded + born + mask
    return elements, loaded * head.stored + born * head.wide + _mask_bytes(head, mask)


# The same tiles, and the same sizes: FlashAttention loads O, l, m where its successor makes them.
flash1_tiles = flash2_tiles


def standard_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest of its steps: Q, K, S; S, l, m (online); V, P, O."""
    return _fullest(_scores(head, r, c), _statistics(head, r, c), _values(head, r, c))


def _scores(head: Head, r: int, c: int) -> tuple[int, int]:
    loaded, mask = (r + c) * head.d, head.mask_tile(r, c)
    size = loaded * head.stored + r * c * head.wide + _mask_bytes(head, mask)
    return loaded + r * c + mask, size


def _statistics(head: Head, r: int, c: int) -> tuple[int, int]:
    return r * (c + 2), r * (c + 2) * head.wide


def _values(head: Head, r: int, c: int) -> tuple[int, int]:
    wide = r * head.dv + r * c
    return wide + c * head.dv, wide * head.wide + c * head.dv * head.stored


def softmax_rows(head: Head, sram: float, sram_bytes: float) -> dict[str, int]:
    """Bs: the rows of S, with their m and l, that standard attention's softmax holds on chip."""
    row = head.Nk + 2
    return {"Bs": int(min(head.Nq, sram / row, sram_bytes / (row * head.wide)))}


def _fullest(*moments: tuple[int, int]) -> tuple[int, int]:
    elements, size = zip(*moments, strict=True)
    return max(elements), max(size)


def flash1(head: Head, *, Br: int, Bc: int, elide: bool) -> Cost:
    """Algorithms 1 and 2 of Dao et al. 2022; `elide`: the initial O, l, m cost nothing."""
    v = visits(head.mask, Br, Bc)
    again = v.row_visits - (v.rows_of_any if elide else 0)
    written = v.row_visits + (0 if elide else head.Nq)
    return Cost(
        reads={
            "Q": v.row_visits * head.d,
            "K": v.keys_of_any * head.d,
            "V": v.keys_of_any * head.dv,
            "O": again * head.dv,
            "l": again,
            "m": again,
            **_mask_reads(head, v),
        },
        writes={"O": written * head.dv, "l": written, "m": written},
        item_bytes=head.item_bytes("O", "l", "m"),
        flops=2 * v.area * (head.d + head.dv),
        exps=v.area + 2 * v.row_visits,
        **_peak(*(flash1_tiles(head, r, c) for r, c in v.shapes)),
        extra_hbm_elements=2 * head.Nq,
    )


def flash2(head: Head, *, Br: int, Bc: int, elide: bool = False) -> Cost:
    """Algorithm 1 of Dao 2023; it has no initial write to elide."""
    v = visits(head.mask, Br, Bc)
    r0 = int(v.rows.max(initial=0))
    accumulators = r0 * (head.dv + 2)
    alone = (r0 * head.d + accumulators, r0 * head.d * head.stored + accumulators * head.wide)
    return Cost(
        reads={
            "Q": head.Nq * head.d,
            "K": int(v.keys.sum()) * head.d,
            "V": int(v.keys.sum()) * head.dv,
            **_mask_reads(head, v),
        },
        writes={"O": head.Nq * head.dv, "L": head.Nq},
        item_bytes=head.item_bytes("L"),
        flops=2 * v.area * (head.d + head.dv),
        exps=v.area + v.row_visits,
        **_peak(alone, *(flash2_tiles(head, r, c) for r, c in v.shapes)),
        extra_hbm_elements=head.Nq,
    )


def standard(head: Head, *, Br: int, Bc: int, Bs: int, elide: bool = False) -> Cost:
    """Algorithm 0 of Dao et al. 2022; Bs = 0: a row of S does not fit on chip and is read twice.

    Standard attention skips nothing, so the rules do not matter, and it has no initial write.
    """
    v = visits(Mask(head.Nq, head.Nk, array=head.mask.array), Br, Bc)
    r0 = int(v.rows.max(initial=0))
    alone = [(r0 * head.d, r0 * head.d * head.stored), (r0 * head.dv, r0 * head.dv * head.wide)]
    steps = [step(head, r, c) for step in (_scores, _values) for r, c in v.shapes]
    if Bs:
        steps.append(_statistics(head, Bs, head.Nk))
    else:
        steps += [_statistics(head, r, c) for r, c in (*v.shapes, (r0, 0))]
    scores, Tr = head.Nq * head.Nk, len(v.rows)
    return Cost(
        reads={
            "Q": head.Nq * head.d,
            "K": Tr * head.Nk * head.d,
            **_mask_reads(head, v),
            "S": scores if Bs else 2 * scores,
            "V": Tr * head.Nk * head.dv,
            "P": scores,
        },
        writes={"S": scores, "P": scores, "O": head.Nq * head.dv},
        item_bytes=head.item_bytes("S", "P"),
        flops=2 * scores * (head.d + head.dv),
        exps=scores if Bs else 2 * scores + v.row_visits,
        **_peak(*alone, *steps),
        extra_hbm_elements=2 * scores,
    )
