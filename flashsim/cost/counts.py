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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..checks import bad
from ..masks import Layout, Mask
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
    """One head: the sizes, the mask, and the bytes of a stored and of a wide (on-chip) element.

    group: query heads that share a key head. d_mask: what a backward pass does with the gradient of
    an array mask: "" nothing, "written" once a tile, or "accumulated" where several add up.
    """

    mask: Mask
    d: int
    dv: int
    stored: int = 4
    wide: int = 4
    group: int = 1
    d_mask: str = ""

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


LARGEST_GRID = 2**27  # query or key tiles that a band or padding may cut
LARGEST_LENGTH = 2**31  # so that the sums of a banded grid stay below 2^63


def _sizes(N: int, B: int) -> Array:
    return np.diff(np.append(np.arange(0, N, B), N)) if N else np.zeros(0, np.int64)


def visits(mask: Mask, Br: int, Bc: int) -> Visits:
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
        return _all_visits(mask.Nq, mask.Nk, Br, Bc)
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


def _all_visits(Nq: int, Nk: int, Br: int, Bc: int) -> Visits:
    """Every tile: along each side at most two kinds, whole and short. Exact at any size."""

    def kinds(N: int, B: int) -> dict[int, int]:
        return {size: n for size, n in ((B, N // B), (N % B, 1)) if size and n}

    rows, cols = kinds(Nq, Br), kinds(Nk, Bc)
    sizes = list(cols)

    def column(values: Iterable[int]) -> Array:
        return np.array(list(values), dtype=object)  # Python's integers know no overflow

    return Visits(
        column(rows),
        column(rows.values()),
        column([sum(cols.values())] * len(rows)),
        column([Nk] * len(rows)),
        Nk if rows else 0,
        first=frozenset((r, sizes[0]) for r in rows if sizes),
        later=frozenset((r, c) for r in rows for n, c in enumerate(sizes) if n or cols[c] > 1),
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


def _mask_reads(head: Head, v: Visits) -> dict[str, int]:
    """Elements of an array mask read with each visited tile."""
    if head.mask.array is None:
        return {}
    tall, broad = head.mask.own_sides
    per_row = v.keys if broad else v.tiles
    return {"mask": int((v.times * v.rows if tall else v.times) @ per_row)}


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
    r0 = v.tallest
    accumulators = r0 * (head.dv + 2)
    alone = (r0 * head.d + accumulators, r0 * head.d * head.stored + accumulators * head.wide)
    return Cost(
        reads={
            "Q": head.Nq * head.d,
            "K": v.key_visits * head.d,
            "V": v.key_visits * head.dv,
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
    r0 = v.tallest
    alone = [(r0 * head.d, r0 * head.d * head.stored), (r0 * head.dv, r0 * head.dv * head.wide)]
    steps = [step(head, r, c) for step in (_scores, _values) for r, c in v.shapes]
    if Bs:
        steps.append(_statistics(head, Bs, head.Nk))
    else:
        steps += [_statistics(head, r, c) for r, c in (*v.shapes, (r0, 0))]
    scores, Tr = head.Nq * head.Nk, v.turns
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


# Backward passes. A moment is the sum of what is stored narrow, what is wide, and the mask's tile.


def _moment(head: Head, stored: int, wide: int, r: int = 0, c: int = 0) -> tuple[int, int]:
    """(elements, bytes) of so many stored and wide elements; with r x c scores also the mask's."""
    mask = head.mask_tile(r, c) if r * c else 0
    wide += mask if mask and head.d_mask == "accumulated" else 0
    return stored + wide + mask, stored * head.stored + wide * head.wide + _mask_bytes(head, mask)


def _backward(head: Head, r: int, c: int, wide: int) -> tuple[int, int]:
    """Q_i, dO_i, K_j, V_j; S_ij, dP_ij, two statistics of the rows, and `wide` elements besides."""
    return _moment(head, (r + c) * (head.d + head.dv), 2 * r * c + 2 * r + wide, r, c)


def flash1_backward_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) in the inner loop: besides Q, dO, K, V, S, dP, l, m also O, dQ, dK, dV."""
    return _backward(head, r, c, r * (head.dv + head.d) + c * (head.d + head.dv))


def flash2_backward_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest loop: Q, dO, K, V, S, dP, L, D, dQ, dK, dV; or O, dO."""
    inner = _backward(head, r, c, r * head.d + c * (head.d + head.dv))
    return _fullest(inner, _moment(head, 2 * r * head.dv, 0))


def two_kernel_backward_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest loop: dK and dV, or dQ, beside Q, dO, K, V, S, dP, L, D."""
    narrow = replace(head, d_mask="")  # the second loop leaves the mask's gradient alone
    return _fullest(
        _backward(head, r, c, c * (head.d + head.dv)),
        _backward(narrow, r, c, r * head.d),
        _moment(head, 2 * r * head.dv, 0),
    )


def standard_backward_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest of its steps."""
    return _fullest(*_standard_backward_steps(head, r, c), _softmax_gradient(head, r, c, r))


def _standard_backward_steps(head: Head, r: int, c: int) -> list[tuple[int, int]]:
    d, dv, P = head.d, head.dv, r * c
    return [
        _moment(head, r * dv, c * dv + P),  # line 1: dO; dV, P
        _moment(head, (r + c) * dv, P),  # line 2: dO, V; dP
        _moment(head, c * d, r * d + P),  # line 4: K; dQ, dS
        _moment(head, r * d, c * d + P),  # line 5: Q; dK, dS
    ]


def _softmax_gradient(head: Head, r: int, c: int, statistics: int) -> tuple[int, int]:
    """P and dP, rowsum(P ∘ dP) where it outlives its turn, and the mask's gradient."""
    d_mask = head.mask_tile(r, c) if c and head.d_mask == "accumulated" else 0
    return _moment(head, 0, 2 * r * c + statistics + d_mask)


def gradient_rows(head: Head, sram: float, sram_bytes: float) -> dict[str, int]:
    """Bs: the rows of P and dP that standard attention's softmax gradient holds on chip."""

    def fits(rows: int) -> bool:
        elements, size = _softmax_gradient(head, rows, head.Nk, 0)
        return elements <= sram and size <= sram_bytes

    row = max(1, 2 * head.Nk)
    rows = int(min(head.Nq, sram / row, sram_bytes / (row * head.wide)))
    while rows and not fits(rows):
        rows -= 1
    return {"Bs": rows}


def _d_mask(head: Head, read: int, written: int) -> tuple[dict[str, int], dict[str, int]]:
    """Reads and writes of the gradient of an array mask; its initial zeros are not among them."""
    if not head.d_mask:
        return {}, {}
    return ({"dmask": read} if head.d_mask == "accumulated" else {}), {"dmask": written}


def _gradients(head: Head, *wide: str) -> dict[str, int]:
    """Item sizes in HBM of a backward pass: gradients as stored, the named ones wide."""
    stored = dict.fromkeys(("dO", "dQ", "dK", "dV"), head.stored)
    shared = ("dK", "dV") if head.group > 1 else ()
    return head.item_bytes(*wide) | stored | dict.fromkeys((*shared, *wide, "dmask"), head.wide)


def flash1_backward(head: Head, *, Br: int, Bc: int, elide: bool) -> Cost:
    """Algorithm 4 of Dao et al. 2022; `elide`: as the published kernel, D kept, O read once."""
    v, d, dv = visits(head.mask, Br, Bc), head.d, head.dv
    rows, keys = v.row_visits, v.keys_of_any
    again = rows - (v.rows_of_any if elide else 0)
    mask = _mask_reads(head, v)
    d_read, d_written = _d_mask(head, mask.get("mask", 0), mask.get("mask", 0))
    kept = {"D": v.rows_of_any} if elide else {}
    first, later = (v.first, v.later) if elide else (v.shapes, frozenset())
    return Cost(
        reads={
            "K": keys * d,
            "V": keys * dv,
            "Q": rows * d,
            "O": (v.rows_of_any if elide else rows) * dv,
            "dO": rows * dv,
            "dQ": again * d,
            "l": rows,
            "m": rows,
            **({"D": again} if elide else {}),
            **mask,
            **d_read,
        },
        writes={
            "dQ": (rows + (0 if elide else head.Nq)) * d,
            "dK": (keys + (0 if elide else head.Nk)) * d,
            "dV": (keys + (0 if elide else head.Nk)) * dv,
            **kept,
            **d_written,
        },
        item_bytes=_gradients(head, "O", "l", "m", "D", "dQ"),
        flops=2 * v.area * (3 * d + 2 * dv),
        exps=v.area,
        **_peak(
            *(flash1_backward_tiles(head, r, c) for r, c in first),
            *(_backward(head, r, c, r * (1 + d) + c * (d + dv)) for r, c in later),
        ),
        extra_hbm_elements=head.Nq if elide else 0,
    )


def flash2_backward(head: Head, *, Br: int, Bc: int, elide: bool) -> Cost:
    """Algorithm 2 of Dao 2023; `elide`: the initial dQ costs nothing."""
    v, d, dv = visits(head.mask, Br, Bc), head.d, head.dv
    rows = v.row_visits
    again = rows - (v.rows_of_any if elide else 0)
    mask = _mask_reads(head, v)
    d_read, d_written = _d_mask(head, mask.get("mask", 0), mask.get("mask", 0))
    r0, c0 = v.tallest, min(Bc, head.Nk)
    return Cost(
        reads={
            "O": head.Nq * dv,
            "dO": (head.Nq + rows) * dv,
            "K": head.Nk * d,
            "V": head.Nk * dv,
            "Q": rows * d,
            "dQ": again * d,
            "L": rows,
            "D": rows,
            **mask,
            **d_read,
        },
        writes={
            "D": head.Nq,
            "dQ": (rows + (0 if elide else head.Nq)) * d,
            "dK": head.Nk * d,
            "dV": head.Nk * dv,
            **d_written,
        },
        item_bytes=_gradients(head, "L", "D", "dQ"),
        flops=2 * v.area * (3 * d + 2 * dv),
        exps=v.area,
        **_peak(
            _moment(head, 2 * r0 * dv, 0),
            _moment(head, c0 * (d + dv), c0 * (d + dv)),
            *(flash2_backward_tiles(head, r, c) for r, c in v.shapes),
        ),
        extra_hbm_elements=head.Nq,
    )


def two_kernel_backward(head: Head, *, Br: int, Bc: int, elide: bool = False) -> Cost:
    """One loop for dK and dV, one for dQ; nothing is initialised, so there is nothing to elide."""
    v, d, dv = visits(head.mask, Br, Bc), head.d, head.dv
    rows, keys = v.row_visits, v.key_visits
    mask = _mask_reads(head, v)
    d_read, d_written = _d_mask(head, mask.get("mask", 0), mask.get("mask", 0))
    r0, c0 = v.tallest, min(Bc, head.Nk)
    return Cost(
        reads={
            "O": head.Nq * dv,
            "dO": (2 * head.Nq + rows) * dv,
            "K": (head.Nk + keys) * d,
            "V": (head.Nk + keys) * dv,
            "Q": (head.Nq + rows) * d,
            "L": head.Nq + rows,
            "D": head.Nq + rows,
            **{name: 2 * n for name, n in mask.items()},
            **d_read,
        },
        writes={
            "D": head.Nq,
            "dQ": head.Nq * d,
            "dK": head.Nk * d,
            "dV": head.Nk * dv,
            **d_written,
        },
        item_bytes=_gradients(head, "L", "D"),
        flops=2 * v.area * (4 * d + 3 * dv),
        exps=2 * v.area,
        **_peak(
            _moment(head, 2 * r0 * dv, 0),
            _moment(head, c0 * (d + dv), c0 * (d + dv)),
            _moment(head, r0 * (d + dv), r0 * (d + 2)),
            *(two_kernel_backward_tiles(head, r, c) for r, c in v.shapes),
        ),
        extra_hbm_elements=head.Nq,
    )


def standard_backward(head: Head, *, Br: int, Bc: int, Bs: int, elide: bool = False) -> Cost:
    """Algorithm 3 of Dao et al. 2022; Bs = 0: a row of P and dP does not fit and is read twice."""
    v = visits(Mask(head.Nq, head.Nk, array=head.mask.array), Br, Bc)
    d, dv, scores, Tr = head.d, head.dv, head.Nq * head.Nk, v.turns
    Tc = -(-head.Nk // Bc)
    r0, c0 = v.tallest, min(Bc, head.Nk)
    steps = [step for r, c in v.shapes for step in _standard_backward_steps(head, r, c)]
    if Bs:
        tall, broad = head.mask.own_sides
        turns = -(-head.Nq // Bs)
        d_mask = (head.Nq if tall else turns) * (head.Nk if broad else 1)
        steps.append(_softmax_gradient(head, Bs, head.Nk, 0))
    else:
        d_mask = _mask_reads(head, v).get("mask", 0)
        steps += [_softmax_gradient(head, r, c, r) for r, c in (*v.shapes, (r0, 0))]
    d_read, d_written = _d_mask(head, d_mask, d_mask)
    twice = 1 if Bs else 2
    return Cost(
        reads={
            "P": (1 + twice) * scores,
            "dO": (Tc + 1) * head.Nq * dv,
            "V": Tr * head.Nk * dv,
            "dP": twice * scores,
            "K": Tr * head.Nk * d,
            "Q": Tc * head.Nq * d,
            "dS": 2 * scores,
            **d_read,
        },
        writes={
            "dV": head.Nk * dv,
            "dP": scores,
            "dS": scores,
            "dQ": head.Nq * d,
            "dK": head.Nk * d,
            **d_written,
        },
        item_bytes=_gradients(head, "P", "dP", "dS"),
        flops=4 * scores * (d + dv),
        exps=0,
        **_peak(
            _moment(head, r0 * dv, 0),
            _moment(head, 0, r0 * d),
            _moment(head, 0, c0 * max(d, dv)),
            *steps,
        ),
        extra_hbm_elements=2 * scores,
    )


def group_sum(head: Head, *, Bc: int) -> Cost:
    """dK and dV of `head.group` query heads added up into those of the key head they share."""
    sums = head.Nk * head.d, head.Nk * head.dv
    rows = min(max(1, Bc // 2), head.Nk)
    return Cost(
        reads={"dK": head.group * sums[0], "dV": head.group * sums[1]},
        writes={"dK_group": sums[0], "dV_group": sums[1]},
        item_bytes={
            "dK": head.wide,
            "dV": head.wide,
            "dK_group": head.stored,
            "dV_group": head.stored,
        },
        **_peak(_moment(head, 0, 2 * rows * max(head.d, head.dv))),
        extra_hbm_elements=head.group * sum(sums),
    )
