"""Thread blocks: the tiles of a launch, which blocks have them, and a call that is checked.

The grid says which tiles of scores a loop visits; `blocks` shares its outer loop out over thread
blocks, in the order in which they start; `call` makes both from the arguments of `io_cost`.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS, SHAPES, backward_of
from ..checks import ALIGNMENTS, bad, bad_type, choice, clamped, flag, integer, window_sides
from ..masks import Mask, band
from ..memory import widened
from ..problem import block_layout
from .counts import Cost, Head
from .io import DTYPES
from .launches import BACKWARD_LAUNCHES, LAUNCHES, Launch, Loop

Array = np.ndarray[Any, Any]

SHARED = ("K", "V")  # that query heads may share
ORDERS = ("forward", "reversed", "longest", "paired")


@dataclass(frozen=True)
class Grid:
    """The Tr x Tc tiles of scores of one head, and which of them a loop visits.

    The blocks of the mask's layout, if it has one, are the tiles; it has no padding and no array.
    """

    mask: Mask
    Br: int
    Bc: int

    @property
    def rows(self) -> Array:
        """Queries of each query tile, (Tr,)."""
        return _sizes(self.mask.Nq, self.Br)

    @property
    def columns(self) -> Array:
        """Keys of each key tile, (Tc,)."""
        return _sizes(self.mask.Nk, self.Bc)

    def tiles(self, side: str) -> int:
        """Tr for "Q", Tc for "K"."""
        return -(-self.mask.Nq // self.Br) if side == "Q" else -(-self.mask.Nk // self.Bc)

    @property
    def keep(self) -> Array:
        """The layout, bool (Tr, Tc); without one (0, 0)."""
        layout = self.mask.layout
        return np.zeros((0, 0), bool) if layout is None else np.ascontiguousarray(layout.keep)

    def spans(self, loop: Loop) -> tuple[Array, Array]:
        """(first, stop): of each outer tile the inner tiles that the band leaves, a layout aside.

        None for a loop that does nothing inside.
        """
        mask, by_query = self.mask, loop.outer == "Q"
        outer = self.tiles(loop.outer)
        if not loop.inside:
            return np.zeros(outer, np.int64), np.zeros(outer, np.int64)
        if not loop.masked:
            inner = self.tiles("K" if by_query else "Q")
            return np.zeros(outer, np.int64), np.full(outer, inner)
        size, other, N = (self.Br, self.Bc, mask.Nk) if by_query else (self.Bc, self.Br, mask.Nq)
        start = np.arange(outer) * size
        end = start + (self.rows if by_query else self.columns)
        low, high = (mask.lo, mask.hi) if by_query else (-mask.hi, -mask.lo)
        first, stop = np.clip(start + low, 0, N), np.clip(end + high, 0, N)
        some = first < stop
        return np.where(some, first // other, 0), np.where(some, -(-stop // other), 0)

    def visits(self, loop: Loop) -> Array:
        """The inner tiles that each outer tile visits, a layout included."""
        first, stop = self.spans(loop)
        if not self.keep.size or not loop.masked:
            return stop - first
        keep = self.keep if loop.outer == "Q" else self.keep.T
        before = np.pad(np.cumsum(keep, axis=1), ((0, 0), (1, 0)))
        each = np.arange(len(first))
        return np.asarray(before[each, stop] - before[each, first])


def _sizes(N: int, B: int) -> Array:
    return np.minimum(B, N - np.arange(0, N, B))


@dataclass(frozen=True)
class Blocks:
    """The thread blocks of a launch, in the order in which they start.

    Attributes
    ----------
    head : (blocks,)
        The head of each.
    members : (blocks, n)
        The tiles of its outer loop, -1 for none; n = 0 where a block has the whole head.
    work : (blocks,)
        The tiles of scores that it visits.
    """

    head: Array
    members: Array
    work: Array


def blocks(launch: Launch, grid: Grid, heads: int, order: str = "forward") -> Blocks:
    """The thread blocks of a launch over so many heads.

    Parameters
    ----------
    order : {"forward", "reversed", "longest", "paired"}
        Head after head, and in each head the tiles from the first to the last, or from the last to
        the first. "longest": of all heads those with the most to do first. "paired": a block has
        two tiles, the first and the last, the second and the last but one, and so on inward. Where
        a block has a whole head all are alike, and all orders the same.
    """
    choice("order", order, ORDERS)
    visits = [grid.visits(loop) for loop in launch.loops]
    if launch.whole_head:
        work = np.full(heads, sum(int(n.sum()) for n in visits))
        return Blocks(np.arange(heads), np.zeros((heads, 0), np.int64), work)
    each = np.sum(visits, axis=0)
    tile = np.arange(len(each))
    members = tile[:, None]
    if order == "reversed":
        members = members[::-1]
    elif order == "paired":
        half = -(-len(tile) // 2)
        last = tile[::-1][:half]
        members = np.stack([tile[:half], np.where(last > tile[:half], last, -1)], axis=1)
    work = np.where(members >= 0, each[members], 0).sum(axis=1)
    found = Blocks(
        np.repeat(np.arange(heads), len(members)),
        np.tile(members, (heads, 1)),
        np.tile(work, heads),
    )
    if order == "longest":
        by_work = np.argsort(-found.work, kind="stable")
        found = Blocks(*(x[by_work] for x in (found.head, found.members, found.work)))
    return found


@dataclass(frozen=True)
class Call:
    """A call, checked: its launches and its tiles, and the closed form of what it moves."""

    algorithm: str
    launches: tuple[Launch, ...]
    head: Head
    heads: int  # of all items
    grid: Grid
    cost: Cost  # of one head
    tile_bytes: int  # of a thread block, if all that it holds at a time lies in shared memory

    @property
    def compulsory_read_bytes(self) -> int:
        """Each array once that is read before it is written, all of it: an infinite cache's."""
        touched = [a for one in self.launches for loop in one.loops for a in loop.accesses]
        first = {a.array: a.write for a in reversed(touched)}
        return sum(
            self.elements(name) * self.cost.item_bytes[name]
            for name, written in first.items()
            if not written
        )

    def heads_of(self, array: str) -> int:
        """The heads that an array has: of K and V those that query heads share."""
        return self.heads // self.head.group if array in SHARED else self.heads

    def elements(self, array: str) -> int:
        """Of one array, over all heads; query heads may share those of K and V."""
        sizes = {
            "Nq": self.head.Nq, "Nk": self.head.Nk, "d": self.head.d, "dv": self.head.dv
        }  # fmt: skip
        return self.heads_of(array) * math.prod(sizes[side] for side in SHAPES[array])


def asked_of(algorithm: str, problem: dict[str, Any]) -> Call:
    """`call` with keywords that another function was given.

    Raises
    ------
    ValueError, TypeError
        As `call`, and if a keyword is missing or there is no such.
    """
    takes = inspect.signature(call).parameters
    for name in problem:
        if name not in takes:
            raise bad_type(name, problem[name], "no such argument; " + ", ".join(takes))
    for name, parameter in takes.items():
        if name not in ("algorithm", *problem) and parameter.default is parameter.empty:
            raise TypeError(f"{name} is missing: expected an integer of at least 1")
    return call(algorithm, **problem)


def call(
    algorithm: str,
    *,
    N: int,
    d: int,
    Br: int,
    Bc: int,
    Nk: int | None = None,
    dv: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    batch: int = 1,
    is_causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    block_mask: Any = None,
    backward: bool = False,
    dtype: str = "float32",
) -> Call:
    """Check a call whose launches are known: the arguments of `io_cost`, with given tiles.

    In the literal convention. Tiles larger than the problem are cut to it, but a block then still
    takes the room of a whole one.

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable; the message names it, its value and what is accepted.
    """
    choice("algorithm", algorithm, LAUNCHES)
    N, d = integer("N", N, 1), integer("d", d, 1)
    Nk = N if Nk is None else integer("Nk", Nk, 1)
    dv = d if dv is None else integer("dv", dv, 1)
    heads, batch = integer("heads", heads, 1), integer("batch", batch, 1)
    backward = flag("backward", backward)
    shared = heads if kv_heads is None else integer("kv_heads", kv_heads, 1)
    if heads % shared or (backward and shared != heads):
        accepted = f"heads={heads}" if backward else f"a divisor of heads={heads}"
        raise bad("kv_heads", kv_heads, accepted)
    stored = DTYPES[choice("dtype", dtype, DTYPES)]
    Br, Bc = integer("Br", Br, 1), integer("Bc", Bc, 1)
    row = ALGORITHMS[algorithm]
    if row.requires and block_mask is None:
        raise bad("block_mask", None, f"a block layout, for algorithm={algorithm!r}")
    choice("causal_align", causal_align, ALIGNMENTS)
    lo, hi = band(
        N, Nk, is_causal=flag("is_causal", is_causal), causal_align=causal_align,
        window=window_sides(window),
    )  # fmt: skip
    mask = Mask(N, Nk, lo=lo, hi=hi, layout=block_layout(block_mask, (Br, Bc), N, Nk))
    head = Head(mask, d, dv, stored.itemsize, widened(stored).itemsize, heads // shared)
    run = backward_of(algorithm) if backward else row
    grid = Grid(mask, *clamped((Br, Bc), N, Nk))
    more = run.more(head, math.inf, math.inf)
    return Call(
        algorithm,
        (BACKWARD_LAUNCHES if backward else LAUNCHES)[algorithm],
        head,
        heads * batch,
        grid,
        run.count(head, Br=grid.Br, Bc=grid.Bc, elide=False, **more),
        run.needs(head, Br, Bc)[1],
    )
