"""The tile accesses of a launch in the order in which the blocks in flight make them.

A trace is a vector of integers, twice the number of a tile and one more if it is written. It is
made in pieces, since a whole one may have 1e9 entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..algorithms import SHAPES
from ..checks import bad
from .blocks import SHARED, Blocks, Call, Grid
from .jit import compiled
from .launches import Launch

Array = np.ndarray[Any, Any]

PIECE = 1 << 16  # accesses: half a megabyte, which stays in a core's own cache
LARGEST_TILES = 2**28  # what is kept for each tile is about 20 bytes


class Tiles(NamedTuple):
    """Where the tiles of an array have their numbers, one head after the other.

    A tile has base + head * per_head + i * strides["Q"] + j * strides["K"]; where query heads share
    key heads, `shared` says that head is the key head.
    """

    base: int
    per_head: int
    shared: bool
    strides: dict[str, int]


def numbered(asked: Call, arrays: list[str]) -> tuple[dict[str, Tiles], Array, Array]:
    """The numbers of all tiles, the elements of each, and which array it belongs to.

    Raises
    ------
    ValueError
        If there are more than LARGEST_TILES.
    """
    grid = asked.grid
    rows, columns = grid.rows, grid.columns
    tiles: dict[str, Tiles] = {}
    base = 0
    for name in arrays:
        by_query, by_key = "Nq" in SHAPES[name], "Nk" in SHAPES[name]
        per_head = (len(rows) if by_query else 1) * (len(columns) if by_key else 1)
        strides = {"Q": len(columns) if by_query and by_key else int(by_query), "K": int(by_key)}
        tiles[name] = Tiles(base, per_head, name in SHARED, strides)
        base += per_head * asked.heads_of(name)
    if base > LARGEST_TILES:
        accepted = f"larger tiles, so that there are {LARGEST_TILES} of them at most"
        raise bad("Br, Bc", (grid.Br, grid.Bc), accepted)
    sides: dict[str, Any] = {
        "Nq": rows[:, None], "Nk": columns, "d": asked.head.d, "dv": asked.head.dv
    }  # fmt: skip
    elements = []
    for name in arrays:
        each = np.ravel(math.prod(sides[side] for side in SHAPES[name]))
        elements.append(np.tile(each, asked.heads_of(name)))
    owners = np.repeat(np.arange(len(arrays), dtype=np.uint8), [len(x) for x in elements])
    return tiles, np.concatenate(elements), owners


class Program(NamedTuple):
    """A launch as the compiled walk wants it.

    Attributes
    ----------
    loops : (loops, 7)
        Tiles of the outer loop, whether an outer tile must meet an inner one, whether the layout
        counts (1 for the columns of `keep`, 2 for its rows), and where what is before, inside and
        after starts, and ends, among the accesses.
    spans : (loops, outer tiles, 2)
        The inner tiles of an outer one: first, stop.
    keep : bool (Tr, Tc) or (0, 0)
        The layout.
    accesses : (accesses, 5)
        For a trace's entry: base, whether the key head counts, and how far on a head, an outer and
        an inner tile lead.
    head : (blocks, 2)
        Of each block the query head and the key head.
    members : (blocks, n)
        As in `Blocks`.
    """

    loops: Array
    spans: Array
    keep: Array
    accesses: Array
    head: Array
    members: Array


def program(
    launch: Launch, grid: Grid, made: Blocks, tiles: dict[str, Tiles], group: int
) -> Program:
    """The launch over these blocks, its tiles numbered so; `group` query heads share a key head."""
    loops: list[list[int]] = []
    accesses: list[list[int]] = []
    spans = np.zeros((len(launch.loops), max(grid.tiles("Q"), grid.tiles("K")), 2), np.int64)
    for n, loop in enumerate(launch.loops):
        for column, values in enumerate(grid.spans(loop)):
            spans[n, : len(values), column] = values
        layout = grid.keep.size and loop.masked
        phases = [len(accesses)]
        for part in (loop.before, loop.inside, loop.after):
            for name, write in part:
                at = tiles[name]
                along = [at.strides[side] for side in ("QK" if loop.outer == "Q" else "KQ")]
                steps = [2 * step for step in (at.per_head, *along)]
                accesses.append([2 * at.base + write, at.shared, *steps])
            phases.append(len(accesses))
        by = 1 if loop.outer == "Q" else 2
        loops.append([grid.tiles(loop.outer), loop.needed, by if layout else 0, *phases])
    heads = np.stack([made.head, made.head // group], axis=1)
    return Program(np.array(loops), spans, grid.keep, np.array(accesses), heads, made.members)


def trace(
    run: Program, slots: int, *, alternating: bool, jitter: float, seed: int
) -> Iterator[Array]:
    """The accesses of a launch, in pieces of at most PIECE: views of one buffer.

    Each of `slots` blocks in flight takes one turn of its inner loop, then the next block one, and
    so on; with jitter, a block sits a turn out with that probability. One that is done gives its
    slot to the next that has not started. `alternating`: every other turn of a slot's outer loops
    scans the inner one backward, one block after the other.
    """
    slots = min(slots, len(run.head))
    at = np.zeros((slots, 5), np.int64)
    at[:, 0] = np.arange(slots)
    now = np.array([slots, 0, 2 * seed + 1])
    buffer = np.empty(PIECE, np.int64)
    while n := _walk(*run, at, now, alternating, jitter, buffer):
        yield buffer[:n]


@compiled
def _walk(
    loops: Array, spans: Array, keep: Array, accesses: Array, head: Array, members: Array,
    at: Array, now: Array, alternating: bool, jitter: float, out: Array,
) -> int:  # fmt: skip
    """Fill `out` with the next accesses; returns how many, 0 at the end.

    at (slots, 5): the block of each slot (-1: none is left), its loop, its place in the outer and
    the inner loop, and the turns of outer loops it has done. now: the next block, the slot whose
    turn it is, the state of the random numbers.
    """
    n = idle = 0
    whole = members.shape[1] == 0
    while idle < len(at) and n + len(accesses) <= len(out):
        slot = now[1]
        now[1] = slot + 1 if slot + 1 < len(at) else 0
        block, loop, place, inner = at[slot, 0], at[slot, 1], at[slot, 2], at[slot, 3]
        if block < 0:
            idle += 1
            continue
        idle = 0
        if jitter > 0 and _uniform(now) < jitter:
            continue
        outer = place if whole else members[block, place]
        first, stop = spans[loop, outer, 0], spans[loop, outer, 1]
        backward = alternating and at[slot, 4] % 2 == 1
        layout = loops[loop, 2]
        starts, needed = inner == 0, loops[loop, 1] == 1
        inner = _kept(keep, layout, outer, first, stop, inner, backward)
        if starts and not (needed and first + inner == stop):
            n = _touch(accesses, loops[loop, 3], loops[loop, 4], head, block, outer, 0, out, n)
        if first + inner < stop:
            b = stop - 1 - inner if backward else first + inner
            n = _touch(accesses, loops[loop, 4], loops[loop, 5], head, block, outer, b, out, n)
            inner = _kept(keep, layout, outer, first, stop, inner + 1, backward)
            starts = False
        if first + inner < stop:
            at[slot, 3] = inner
            continue
        if not (starts and needed):
            n = _touch(accesses, loops[loop, 5], loops[loop, 6], head, block, outer, 0, out, n)
        at[slot, 3] = 0
        at[slot, 4] += 1
        at[slot, 2] = place + 1
        last = loops[loop, 0] if whole else members.shape[1]
        if place + 1 < last and (whole or members[block, place + 1] >= 0):
            continue
        at[slot, 2] = 0
        at[slot, 1] = loop + 1
        if loop + 1 < len(loops):
            continue
        at[slot, 1] = 0
        at[slot, 0] = now[0] if now[0] < len(head) else -1
        now[0] += 1
    return n


@compiled
def _kept(
    keep: Array, layout: int, outer: int, first: int, stop: int, place: int, backward: bool
) -> int:
    """The first place from `place` on whose inner tile the layout keeps, or stop - first."""
    while layout and first + place < stop:
        b = stop - 1 - place if backward else first + place
        if keep[outer, b] if layout == 1 else keep[b, outer]:
            break
        place += 1
    return place


@compiled
def _touch(
    accesses: Array, start: int, stop: int, head: Array, block: int, outer: int, inner: int,
    out: Array, n: int,
) -> int:  # fmt: skip
    """The accesses from start to stop, with the tiles of that head and place, put into out[n:]."""
    for a in range(start, stop):
        tile = accesses[a, 0] + head[block, accesses[a, 1]] * accesses[a, 2]
        out[n] = tile + outer * accesses[a, 3] + inner * accesses[a, 4]
        n += 1
    return n


@compiled
def _uniform(state: Array) -> float:
    """A random number in [0, 1): Marsaglia's xorshift (2003), 64 bits, shifts 13, 7, 17."""
    x = np.uint64(state[2])
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[2] = np.int64(x)
    return (x >> np.uint64(11)) / 9007199254740992.0
