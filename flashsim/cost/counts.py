"""Closed forms: what an algorithm reads, writes, holds and computes, in O(N / Br + N / Bc).

Each function here is the formula of one algorithm for one head; tests hold them, array by array,
against executed runs. For dense square attention they reduce to (elements, Tr = N/Br, Tc = N/Bc):

========================================  ==============================
standard, row tiles                       4 N^2 + (2 Tr + 2) N d
standard, a row of S too long for SRAM    + N^2
FlashAttention, as printed                3 N d + 2 N + Tc (3 N d + 4 N)
FlashAttention, published kernel          (3 Tc + 1) N d + (4 Tc - 2) N
FlashAttention-2                          (2 + 2 Tr) N d + N
split-KV, n > 1 parts                     (2 Tr + n + 1) N d + N + 2 n (N d + N)
online softmax, a query at a time         2 N^2 d + 2 N d + N
standard, mask and dropout kernels        9 N^2 + (2 Tr + 2) N d
square tiles, Td = d / Bc                 (2 Tr + Tc + 1) N d + (Td + 1) N^2 + 4 N
scores resident, as printed               (2 Tr + 3 Tc + 1) N d + N
Linformer, k mixed keys                   4 N k + 2 N d + 2 Tk N d + 2 N k + (2 Tr + 2) k d
========================================  ==============================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..checks import clamped
from ..masks import Mask
from ..memory import Traffic
from .visits import EveryTile, Visits
from .visits import visits as visits


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


THRESHOLD = 8.0  # of FlashAttention-4: log2 256, the published one
QUERY_CHUNK = 64  # so that short sequences have several; Rabe & Staats take 1024
SIZES = (
    "Nq", "Nk", "d", "dv", "near", "partial",
    "query_chunk", "key_chunk", "chunks",
)  # fmt: skip


@dataclass(frozen=True)
class Head:
    """One head: the sizes, the mask, and the bytes of a stored and of a wide (on-chip) element.

    group: query heads that share a key head. d_mask: what a backward pass does with the gradient of
    an array mask: "" nothing, "written" once a tile, or "accumulated" where several add up.
    unmixed: keys that Linformer mixes into the Nk that the mask is about. splits: parts that
    split-KV decoding cuts the keys into.
    """

    mask: Mask
    d: int
    dv: int
    stored: int = 4
    wide: int = 4
    group: int = 1
    d_mask: str = ""
    unmixed: int = 0
    splits: int = 1
    emulation: tuple[float, int] | None = None  # share and degree of the polynomial exponentials
    threshold: float = THRESHOLD  # powers of two that FlashAttention-4's m may lag behind

    @property
    def Nq(self) -> int:
        """Queries."""
        return self.mask.Nq

    @property
    def Nk(self) -> int:
        """Keys."""
        return self.mask.Nk

    @property
    def near(self) -> int:
        """Keys that a window of local attention sees, at most."""
        return min(3 * self.mask.layout.Br, self.Nk) if self.mask.layout else self.Nk

    @property
    def partial(self) -> int:
        """Rows of split-KV's partial results; one part leaves none."""
        return self.splits * self.Nq if self.splits > 1 else 0

    @property
    def query_chunk(self) -> int:
        """Queries of a chunk of Rabe & Staats' attention, whatever N is."""
        return min(QUERY_CHUNK, self.Nq)

    @property
    def key_chunk(self) -> int:
        """Keys of a chunk of Rabe & Staats' attention: the square root of Nk."""
        return math.isqrt(max(0, self.Nk - 1)) + 1

    @property
    def chunks(self) -> int:
        """Rows of the partial results that a chunk of queries has, one for each chunk of keys."""
        return -(-self.Nk // self.key_chunk) * self.query_chunk

    @property
    def sizes(self) -> dict[str, int]:
        """What the symbols in the shapes of arrays stand for."""
        return {name: getattr(self, name) for name in SIZES}

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


def mask_reads(head: Head, v: Visits | EveryTile) -> dict[str, int]:
    """Elements of an array mask read with each visited tile."""
    if head.mask.array is None:
        return {}
    tall, broad = head.mask.own_sides
    per_row = v.keys if broad else v.tiles
    return {"mask": int((v.times * v.rows if tall else v.times) @ per_row)}


def peak(*moments: tuple[int, int]) -> dict[str, int]:
    """sram_elements and sram_bytes of the fullest of some moments, given as (elements, bytes)."""
    elements, size = fullest((0, 0), *moments)
    return {"sram_elements": elements, "sram_bytes": size}


def mask_bytes(head: Head, elements: int) -> int:
    return 0 if head.mask.array is None else elements * head.mask.array.dtype.itemsize


def flash2_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) on chip in the inner loop: Q_i, K_j, V_j, O_i, S_ij, l_i, m_i.

    P overwrites S; row vectors that do not outlive the turn (m_new, alpha) are registers.
    """
    loaded = r * head.d + c * (head.d + head.dv)
    born = r * head.dv + r * c + 2 * r
    mask = head.mask_tile(r, c)
    elements = loaded + born + mask
    return elements, loaded * head.stored + born * head.wide + mask_bytes(head, mask)


# The same tiles, and the same sizes: FlashAttention loads O, l, m where its successor makes them.
flash1_tiles = flash2_tiles


def standard_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest of its steps: Q, K, S; S, l, m; V, P, O."""
    return fullest(_scores(head, r, c), _softmax(head, r, c), _values(head, r, c))


def _softmax(head: Head, r: int, c: int) -> tuple[int, int]:
    """The least that a softmax runs with: a whole row of S or, where that is less, a tile."""
    return leanest(_statistics(head, 1, head.Nk), _statistics(head, r, c))


def _scores(head: Head, r: int, c: int) -> tuple[int, int]:
    loaded, mask = (r + c) * head.d, head.mask_tile(r, c)
    size = loaded * head.stored + r * c * head.wide + mask_bytes(head, mask)
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


def fullest(*moments: tuple[int, int]) -> tuple[int, int]:
    elements, size = zip(*moments, strict=True)
    return max(elements), max(size)


def leanest(*moments: tuple[int, int]) -> tuple[int, int]:
    elements, size = zip(*moments, strict=True)
    return min(elements), min(size)


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
            **mask_reads(head, v),
        },
        writes={"O": written * head.dv, "l": written, "m": written},
        item_bytes=head.item_bytes("O", "l", "m"),
        flops=2 * v.area * (head.d + head.dv),
        exps=v.area + 2 * v.row_visits,
        **peak(*(flash1_tiles(head, r, c) for r, c in v.shapes)),
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
            **mask_reads(head, v),
        },
        writes={"O": head.Nq * head.dv, "L": head.Nq},
        item_bytes=head.item_bytes("L"),
        flops=2 * v.area * (head.d + head.dv),
        exps=v.area + v.row_visits,
        **peak(alone, *(flash2_tiles(head, r, c) for r, c in v.shapes)),
        extra_hbm_elements=head.Nq,
    )


def flash3(head: Head, *, Br: int, Bc: int, elide: bool = False) -> Cost:
    """Algorithm 2 of Shah et al. 2024: FlashAttention-2's traffic, and P of the tile before."""
    v = visits(head.mask, Br, Bc)
    r0, c0, cost = v.tallest, min(Bc, head.Nk), flash2(head, Br=Br, Bc=Bc)
    first = [_softmax_stage(head, r, c, 0, 0) for r, c in v.first]
    later = [_softmax_stage(head, r, c, c0, r * c0) for r, c in v.later]
    last = [_last_product(head, r, c) for r, c in v.first]
    alone = _held(head, r0 * head.d, r0 * (head.dv + 2))
    elements, size = fullest(alone, *first, *later, *last)
    return replace(cost, sram_elements=elements, sram_bytes=size)


def flash3_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) on chip: FlashAttention-2's tiles, and P of the tile before, if any is.

    Where V is not as wide as K, few long key tiles may need a little less than more shorter ones.
    """
    c = min(c, head.Nk)
    after = min(c, head.Nk - c)
    later = [_softmax_stage(head, r, after, c, r * c)] if after else []
    return fullest(_softmax_stage(head, r, c, 0, 0), *later, _last_product(head, r, c))


def _last_product(head: Head, r: int, c: int) -> tuple[int, int]:
    """Q_i, V_j, O_i, l_i, m_i, P_ij."""
    return _held(head, r * head.d + c * head.dv, r * (head.dv + 2) + r * c)


def _softmax_stage(head: Head, r: int, c: int, before: int, P: int) -> tuple[int, int]:
    """Q_i, K_j, V_{j-1} of `before` keys, O_i, l_i, m_i, S_ij, and P of j - 1 or, at first, j."""
    mask, P = head.mask_tile(r, c), max(P, r * c if not before else 0)
    loaded = (r + c) * head.d + before * head.dv
    elements, size = _held(head, loaded, r * (head.dv + 2) + r * c + P)
    return elements + mask, size + mask_bytes(head, mask)


def flash3_fp8(head: Head, *, Br: int, Bc: int, elide: bool = False) -> Cost:
    """FlashAttention-2's counts, with Q, K and V of one byte; the scales are a small table."""
    cost = flash2(replace(head, stored=1), Br=Br, Bc=Bc)
    return replace(cost, item_bytes=cost.item_bytes | {"O": head.stored})


def flash3_fp8_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) on chip: FlashAttention-2's tiles, those of Q, K and V in e4m3."""
    return flash2_tiles(replace(head, stored=1), r, c)


def flash4(
    head: Head,
    *,
    Br: int,
    Bc: int,
    emulation: tuple[float, int] | None,
    threshold: float,
    elide: bool = False,
) -> Cost:
    """FlashAttention-2's; exponentials by polynomial, and those of rows not rescaled, included."""
    return flash2(head, Br=Br, Bc=Bc)


def exponentials(head: Head, sram: float, sram_bytes: float) -> dict[str, Any]:
    """emulation: which exponentials are polynomials; threshold: what a row's m may lag behind."""
    return {"emulation": head.emulation, "threshold": head.threshold}


def split_kv(head: Head, *, Br: int, Bc: int, splits: int, elide: bool = False) -> Cost:
    """Flash-Decoding: each part reads Q and its own keys; the merge reads what all parts wrote."""
    whole = flash2(head, Br=Br, Bc=Bc)
    if splits == 1:
        return whole
    rows = splits * head.Nq
    partial = {"Op": rows * head.dv, "Lp": rows}
    merging = _merging(head, min(Br, head.Nq))
    return replace(
        whole,
        reads=whole.reads | {"Q": rows * head.d, **partial},
        writes=whole.writes | partial,
        item_bytes=head.item_bytes("L", "Op", "Lp"),
        exps=whole.exps + 2 * rows,
        **peak((whole.sram_elements, whole.sram_bytes), merging),
        extra_hbm_elements=head.Nq + rows * (head.dv + 1),
    )


def split_kv_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) on chip: what FlashAttention-2 holds, or the merge."""
    merging = (_merging(head, r),) if head.splits > 1 else ()
    return fullest(flash2_tiles(head, r, c), *merging)


def _merging(head: Head, r: int) -> tuple[int, int]:
    """O_i, l_i, m_i of r rows, and the O and L of one part."""
    return _held(head, 0, r * (2 * head.dv + 3))


def parts(head: Head, sram: float, sram_bytes: float) -> dict[str, int]:
    """splits: the parts that split-KV decoding cuts the keys into."""
    return {"splits": head.splits}


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
            **mask_reads(head, v),
            "S": scores if Bs else 2 * scores,
            "V": Tr * head.Nk * head.dv,
            "P": scores,
        },
        writes={"S": scores, "P": scores, "O": head.Nq * head.dv},
        item_bytes=head.item_bytes("S", "P"),
        flops=2 * scores * (head.d + head.dv),
        exps=scores if Bs else 2 * scores + v.row_visits,
        **peak(*alone, *steps),
        extra_hbm_elements=2 * scores,
    )


def rabe_staats(
    head: Head, *, Cr: int, Cc: int, Br: int, Bc: int, Bs: int, elide: bool = False
) -> Cost:
    """Standard attention of each chunk, which leaves a state; and the states read to add them up.

    The largest m of a row is looked for before anything is added, so each m is read twice.
    """
    total = Cost()
    for (rows, keys), n in _chunks(head, Cr, Cc).items():
        here = _window(head, rows, keys)
        total = total.plus(standard(here, Br=Br, Bc=Bc, Bs=min(Bs, rows)).times(n))
    states = head.Nq * -(-head.Nk // Cc)
    moved, r = {"Oc": states * head.dv, "lc": states, "mc": states}, min(Br, head.query_chunk)
    names = {"S": "Sc", "P": "Pc", "O": "Oc"}
    combining = _held(head, 0, r * (head.dv + 2) + (r * (head.dv + 2) if head.Nk else 0))
    reads = {names.get(name, name): x for name, x in total.reads.items()}
    writes = {names.get(name, name): x for name, x in total.writes.items()}
    return replace(
        total,
        reads=reads | moved | {"mc": 2 * states},
        writes=writes | moved | {"O": head.Nq * head.dv},
        item_bytes=head.item_bytes("Sc", "Pc", *moved),
        exps=total.exps + states,
        **peak((total.sram_elements, total.sram_bytes), combining),
        extra_hbm_elements=2 * head.query_chunk * Cc + head.chunks * (head.dv + 2),
    )


def _chunks(head: Head, Cr: int, Cc: int) -> Counter[tuple[int, int]]:
    """How many pairs of chunks have how many queries and keys."""
    rows, keys = (
        {length: n for length, n in ((C, N // C), (N % C, 1)) if length and n}
        for N, C in ((head.Nq, Cr), (head.Nk, Cc))
    )
    return Counter({(r, c): rows[r] * keys[c] for r in rows for c in keys})


def rabe_staats_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest kernel: standard attention's, a row's, or two states."""
    r, c = clamped((r, c), *longest_chunk(head))
    one_row = _statistics(head, 1, min(head.key_chunk, head.Nk))
    states = _held(head, 0, 2 * r * (head.dv + 2))
    return fullest(_scores(head, r, c), _values(head, r, c), one_row, states)


def longest_chunk(head: Head) -> tuple[int, int]:
    """Queries and keys of a chunk, and so of a tile at most."""
    return head.query_chunk, min(head.key_chunk, head.Nk)


def chunks(head: Head, sram: float, sram_bytes: float) -> dict[str, int]:
    """Cr and Cc, the queries and keys of a chunk, and Bs, the rows of its S that are on chip."""
    here = replace(head, mask=Mask(head.query_chunk, head.key_chunk))
    rows = max(1, softmax_rows(here, sram, sram_bytes)["Bs"])
    return {"Cr": max(1, head.query_chunk), "Cc": head.key_chunk, "Bs": rows}


def online_softmax(head: Head, *, Br: int, Bc: int, elide: bool = False) -> Cost:
    """FlashAttention-2 with tiles of one query, whatever Br is."""
    return flash2(head, Br=1, Bc=Bc)


def online_softmax_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) on chip: one query's Q, S, O, l and m, and tiles of c keys."""
    return flash2_tiles(head, 1, c)


def _held(head: Head, stored: int, wide: int, bits: int = 0) -> tuple[int, int]:
    """(elements, bytes) of so many elements as stored, wide ones, and bytes that hold a bit."""
    return stored + wide + bits, stored * head.stored + wide * head.wide + bits


def standard_unfused_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest kernel: standard attention's, S and its mask, P and Z."""
    unmasked = replace(head, mask=Mask(head.Nq, head.Nk))
    return fullest(standard_tiles(unmasked, r, c), _masking(head, r, c), _dropping(head, r, c))


def _masking(head: Head, r: int, c: int) -> tuple[int, int]:
    mask = head.mask_tile(r, c)
    return r * c + mask, r * c * head.wide + mask_bytes(head, mask)


def _dropping(head: Head, r: int, c: int) -> tuple[int, int]:
    return _held(head, 0, r * c, r * c)


def standard_unfused(head: Head, *, Br: int, Bc: int, Bs: int, elide: bool = False) -> Cost:
    """Standard attention; a kernel more reads and writes S, one reads P and writes Z and Pdrop."""
    unmasked = standard(replace(head, mask=Mask(head.Nq, head.Nk)), Br=Br, Bc=Bc, Bs=Bs)
    v = visits(Mask(head.Nq, head.Nk, array=head.mask.array), Br, Bc)
    scores = head.Nq * head.Nk
    kernels = [kernel(head, r, c) for kernel in (_masking, _dropping) for r, c in v.shapes]
    reads = {"S": unmasked.reads["S"] + scores, "Pdrop": scores, **mask_reads(head, v)}
    return replace(
        unmasked,
        reads=unmasked.reads | reads,
        writes=unmasked.writes | {"S": 2 * scores, "Pdrop": scores, "Z": scores},
        item_bytes=head.item_bytes("S", "P", "Pdrop") | {"Z": 1},
        **peak((unmasked.sram_elements, unmasked.sram_bytes), *kernels),
        extra_hbm_elements=4 * scores,
    )


def square_tiles(head: Head, *, Br: int, Bc: int, elide: bool = False) -> Cost:
    """Saha & Ye 2024: S and O in tiles of Br x Bc, their factors a column at a time."""
    v, alone = visits(head.mask, Br, Bc), visits(head.mask, Br, 1)
    Td, broad = -(-head.dv // Bc), min(Bc, head.dv)
    r0 = v.tallest
    return Cost(
        reads={
            "Q": v.row_visits * head.d,
            "K": v.key_visits * head.d,
            "V": alone.key_visits * head.dv,
            "S": Td * alone.area,
            "l": head.Nq,
            "m": head.Nq,
            **mask_reads(head, v),
        },
        writes={"S": v.area, "O": head.Nq * head.dv, "l": head.Nq, "m": head.Nq},
        item_bytes=head.item_bytes("S", "l", "m"),
        flops=2 * v.area * head.d + 2 * alone.area * head.dv,
        exps=v.area + v.row_visits + Td * alone.area,
        **peak(
            _held(head, 0, r0 * (broad + 2)),
            *(square_tiles_need(head, r, c) for r, c in v.shapes),
            *(_held(head, broad, r * (broad + 3)) for r, _ in alone.shapes),
        ),
        extra_hbm_elements=head.Nq * head.Nk + 2 * head.Nq,
    )


def square_tiles_need(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) on chip: a tile of S, l, m, and a column of Q and K or a tile of the mask.

    A tile of O, which is not broader, takes a column of S and a row of V instead.
    """
    mask, broad = head.mask_tile(r, c), min(c, head.dv)
    elements, size = _held(head, 0, r * c + 2 * r)
    return fullest(
        _held(head, r + c, r * c + 2 * r),
        (elements + mask, size + mask_bytes(head, mask)),
        _held(head, broad, r * (broad + 3)),
    )


def resident_scores(head: Head, *, Br: int, Bc: int, elide: bool) -> Cost:
    """A tile of S, and Q, K, V, O a column at a time; `elide`: the initial O costs nothing."""
    v = visits(head.mask, Br, Bc)
    again = v.row_visits - (v.rows_of_any if elide else 0)
    return Cost(
        reads={
            "Q": v.row_visits * head.d,
            "K": v.key_visits * head.d,
            "V": v.key_visits * head.dv,
            "O": again * head.dv,
            **mask_reads(head, v),
        },
        writes={"O": (v.row_visits + (0 if elide else head.Nq)) * head.dv, "L": head.Nq},
        item_bytes=head.item_bytes("O", "L"),
        flops=2 * v.area * (head.d + head.dv),
        exps=v.area + v.row_visits,
        **peak(
            _held(head, 0, 2 * v.tallest),
            *(resident_scores_need(head, r, c) for r, c in v.shapes),
        ),
        extra_hbm_elements=head.Nq,
    )


def resident_scores_need(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) on chip: a tile of S, l, m, and a column of Q and K, or of O and V."""
    mask = head.mask_tile(r, c)
    elements, size = _held(head, c, r * c + 3 * r)
    return fullest(
        _held(head, r + c, r * c + 2 * r), (elements + mask, size + mask_bytes(head, mask))
    )


def local(head: Head, *, Br: int, Bc: int, Bs: int, w: int, elide: bool = False) -> Cost:
    """Standard attention of each window of w queries with the keys near it."""
    total = Cost()
    for (rows, keys), n in _windows(head, w).items():
        here = _window(head, rows, keys)
        total = total.plus(standard(here, Br=Br, Bc=Bc, Bs=min(Bs, rows)).times(n))
    total.extra_hbm_elements = 2 * head.Nq * min(3 * w, head.Nk)
    return total


def local_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) on chip: standard attention's, in a window with the most keys near it."""
    w, near = longest_window(head)
    return standard_tiles(_window(head, w, near), *clamped((r, c), w, near))


def longest_window(head: Head) -> tuple[int, int]:
    """Queries of a window and the keys near it, and so of a tile at most."""
    assert head.mask.layout is not None
    return min(head.mask.layout.Br, head.Nq), head.near


def _windows(head: Head, w: int) -> Counter[tuple[int, int]]:
    """How many windows have how many queries, and keys near them."""
    starts = range(0, head.Nq, w)
    return Counter((min(w, head.Nq - a), min(a + 2 * w, head.Nk) - max(0, a - w)) for a in starts)


def _window(head: Head, rows: int, keys: int) -> Head:
    """A window with its own part of an array mask."""
    array = head.mask.array
    if array is not None:
        tall, broad = head.mask.own_sides
        array = np.broadcast_to(
            np.empty((), array.dtype), (rows if tall else 1, keys if broad else 1)
        )
    return replace(head, mask=Mask(rows, keys, array=array))


def local_rows(head: Head, sram: float, sram_bytes: float) -> dict[str, int]:
    """w, the queries of a window, and Bs, the rows of its S that the softmax holds on chip."""
    assert head.mask.layout is not None
    w = head.mask.layout.Br
    return {"w": w, **softmax_rows(replace(head, mask=Mask(w, head.near)), sram, sram_bytes)}


def linformer(head: Head, *, Br: int, Bc: int, Bs: int, elide: bool = False) -> Cost:
    """Kp = E K and Vp = F V, Br rows at a time; then standard attention over them."""
    k, N, d, dv = head.Nk, head.unmixed, head.d, head.dv
    mixed = standard(head, Br=Br, Bc=Bc, Bs=Bs)
    mixing, v = visits(Mask(k, N), Br, Bc), visits(Mask(head.Nq, k), Br, Bc)
    r0, i0 = v.tallest, mixing.tallest
    steps = [
        *(_mixing(head, r, c) for r, c in (*mixing.shapes, (i0, 0))),
        *(step(head, r, c) for step in (_mixed_scores, _mixed_values) for r, c in v.shapes),
        _held(head, r0 * d, 0),
        _held(head, 0, r0 * dv),
        *(_statistics(head, r, c) for r, c in ([(Bs, k)] if Bs else [*v.shapes, (r0, 0)])),
    ]
    reads, Tk = dict(mixed.reads), mixing.turns
    reads |= {"Kp": reads["K"], "Vp": reads["V"]}
    reads |= {"E": k * N, "F": k * N, "K": Tk * N * d, "V": Tk * N * dv}
    return replace(
        mixed,
        reads=reads,
        writes=mixed.writes | {"Kp": k * d, "Vp": k * dv},
        item_bytes=head.item_bytes("S", "P", "Kp", "Vp") | {"E": head.stored, "F": head.stored},
        flops=mixed.flops + 2 * k * N * (d + dv),
        **peak(*steps),
        extra_hbm_elements=mixed.extra_hbm_elements + k * (d + dv),
    )


def linformer_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest step: E, K, Kp; Q, Kp, S; S, l, m; Vp, P, O."""
    mixing = _mixing(head, min(r, head.Nk), min(c, head.unmixed))
    return fullest(mixing, *(step(head, r, c) for step in (_mixed_scores, _softmax, _mixed_values)))


def _mixing(head: Head, r: int, c: int) -> tuple[int, int]:
    width = max(head.d, head.dv)
    return _held(head, r * c + c * width, r * width)


def _mixed_scores(head: Head, r: int, c: int) -> tuple[int, int]:
    return _held(head, r * head.d, c * head.d + r * c)


def _mixed_values(head: Head, r: int, c: int) -> tuple[int, int]:
    return _held(head, 0, r * head.dv + r * c + c * head.dv)
