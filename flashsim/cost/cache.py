"""The L2 between the multiprocessors and the DRAM: what `io_cost` counts, behind a cache.

`io_cost` counts what enters and leaves the multiprocessors. Of that the DRAM sees what the L2 does
not hold. Here the tile accesses of the thread blocks in flight (`trace`) go through a cache of the
device's size, tile by tile, each with its bytes. It writes back: a written tile is not fetched, and
reaches the DRAM when it has to make room, or never, if the launch ends before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..checks import bad, choice, integer, integers, number
from ..memory import Traffic
from .blocks import asked_of, blocks
from .devices import device as preset
from .jit import compiled
from .trace import numbered, program, trace
from .waves import usual_blocks_per_sm

Array = np.ndarray[Any, Any]

READ, WRITTEN, FETCHED, BACK = range(4)
POLICIES = ("lru", "random")
SCANS = ("forward", "alternating")
PROBABILITY = "a probability in [0, 1)"


class Cache:
    """A write-back cache of objects of unequal size.

    Parameters
    ----------
    sizes : (objects,)
        Bytes of each.
    capacity_bytes : int
        An object that is larger goes past it.
    policy : {"lru", "random"}
        Who makes room: the least recently used, or any, each as likely as the others (and in every
        run the same).
    owners : (objects,), optional
        Up to 255 kinds of objects, which are counted apart.

    Attributes
    ----------
    bytes : (4, kinds)
        So far read and written by the accesses, and fetched from and written back to what is
        behind the cache: rows READ, WRITTEN, FETCHED, BACK.

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable.
    """

    def __init__(
        self, sizes: Array, capacity_bytes: int, policy: str = "lru", owners: Array | None = None
    ) -> None:
        self.capacity_bytes = integer("capacity_bytes", capacity_bytes, 0, 2**63)
        self.policy = choice("policy", policy, POLICIES)
        self.sizes = integers("sizes", sizes, 0)
        n = len(self.sizes)
        if owners is not None and len(integers("owners", owners, 0, 256)) != n:
            raise bad("owners", owners, f"as many as there are sizes, {n}")
        self.owners = np.zeros(n, np.uint8) if owners is None else np.asarray(owners, np.uint8)
        kinds = int(self.owners.max(initial=0)) + 1
        self.bytes = np.zeros((4, kinds), np.int64)
        self.dirty = np.zeros(n, np.bool_)
        self._held = np.array([0, 0, 1], np.int64)  # bytes, objects, state of the random numbers
        if self.policy == "lru":
            # A ring through object n, which is none: from there to the most recent, and on.
            self._next, self._previous = (np.full(n + 1, -1, np.int32) for _ in range(2))
            self._next[n] = self._previous[n] = n
        else:
            # The objects here, in any order, and where each stands among them.
            self._next, self._previous = np.empty(n + 1, np.int32), np.full(n + 1, -1, np.int32)

    @property
    def dirty_bytes(self) -> int:
        """Written, and not yet written back."""
        return int(self.sizes[self.dirty].sum())

    def replay(self, accesses: Array) -> None:
        """Let objects be read or written: 2 * object, and 1 more if it is written."""
        run = _replay_lru if self.policy == "lru" else _replay_random
        run(
            accesses, self.sizes, self.owners, self._next, self._previous, self.dirty, self._held,
            self.capacity_bytes, self.bytes,
        )  # fmt: skip


@compiled
def _replay_lru(
    accesses: Array, sizes: Array, owners: Array, next_: Array, previous: Array, dirty: Array,
    held: Array, capacity: int, bytes_: Array,
) -> None:  # fmt: skip
    """`Cache.replay`: the objects here in a ring, from the most recently used to the least."""
    end = len(sizes)
    used = held[0]
    for access in accesses:
        x, write = access >> 1, access & 1
        size = sizes[x]
        bytes_[write, owners[x]] += size
        if next_[x] >= 0:
            if next_[end] == x:  # the most recent already
                if write:
                    dirty[x] = True
                continue
            next_[previous[x]], previous[next_[x]] = next_[x], previous[x]
        else:
            if not write:
                bytes_[FETCHED, owners[x]] += size
            if size > capacity:
                if write:
                    bytes_[BACK, owners[x]] += size
                continue
            while used + size > capacity:
                oldest = previous[end]
                previous[end] = previous[oldest]
                next_[previous[oldest]] = end
                next_[oldest] = -1
                used -= sizes[oldest]
                if dirty[oldest]:
                    bytes_[BACK, owners[oldest]] += sizes[oldest]
                    dirty[oldest] = False
            used += size
        recent = next_[end]
        next_[x], previous[x] = recent, end
        next_[end] = previous[recent] = x
        if write:
            dirty[x] = True
    held[0] = used


@compiled
def _replay_random(
    accesses: Array, sizes: Array, owners: Array, here: Array, place: Array, dirty: Array,
    held: Array, capacity: int, bytes_: Array,
) -> None:  # fmt: skip
    """`Cache.replay`: here[:n] are the objects, place[x] says which of them x is, or -1."""
    used, n, state = held[0], held[1], np.uint64(held[2])
    for access in accesses:
        x, write = access >> 1, access & 1
        size = sizes[x]
        bytes_[write, owners[x]] += size
        if place[x] < 0:
            if not write:
                bytes_[FETCHED, owners[x]] += size
            if size > capacity:
                if write:
                    bytes_[BACK, owners[x]] += size
                continue
            while used + size > capacity:
                state ^= state << np.uint64(13)  # Marsaglia's xorshift (2003)
                state ^= state >> np.uint64(7)
                state ^= state << np.uint64(17)
                k = np.int64(state >> np.uint64(33)) % n
                gone = here[k]
                n -= 1
                here[k] = here[n]
                place[here[k]] = k
                place[gone] = -1
                used -= sizes[gone]
                if dirty[gone]:
                    bytes_[BACK, owners[gone]] += sizes[gone]
                    dirty[gone] = False
            here[n], place[x] = x, n
            n += 1
            used += size
        if write:
            dirty[x] = True
    held[0], held[1], held[2] = used, n, np.int64(state)


@dataclass
class DramCost(Traffic):
    """What passes between the L2 and the DRAM, in elements per array.

    Attributes
    ----------
    sm : Traffic
        What passes between the multiprocessors and the L2: the traffic of `io_cost`.
    dirty_bytes : int
        Written and still in the L2 at the end; the DRAM has not seen it.
    accesses : int
        Tile accesses.
    launches : dict of str to DramCost
        The same of each kernel launch; empty in these.
    """

    sm: Traffic = field(default_factory=Traffic)
    dirty_bytes: int = 0
    accesses: int = 0
    launches: dict[str, DramCost] = field(default_factory=dict)


def dram_cost(
    algorithm: str,
    *,
    device: str = "h200",
    l2_bytes: int | None = None,
    slots: int | None = None,
    policy: str = "lru",
    scan: str = "forward",
    order: str = "forward",
    jitter: float = 0.0,
    seed: int = 0,
    launch: str | None = None,
    **problem: Any,
) -> DramCost:
    """What the DRAM sees of a call: the tile accesses of the blocks in flight, behind the L2.

    Parameters
    ----------
    algorithm : str
        "standard", "flash1", "flash2", "flash2-two-kernel" or "block_sparse". A row of standard
        attention's S fits on the chip.
    device : str
        A key of `flashsim.cost.devices.DEVICES`.
    l2_bytes : int, optional
        Bytes of the L2 (default: the device's).
    slots : int, optional
        Thread blocks in flight (default: multiprocessors times `waves.usual_blocks_per_sm`).
    policy : {"lru", "random"}
        Of the L2; see `Cache`.
    scan : {"forward", "alternating"}
        "alternating": the blocks that one slot runs scan their inner loop by turns forward and
        backward, and so begin with what the L2 still holds.
    order : {"forward", "reversed", "longest", "paired"}
        In which order blocks start; see `flashsim.cost.blocks.blocks`.
    jitter : float
        Probability in [0, 1) that a block sits out a turn; 0: all walk in step.
    seed : int
        Of the jitter.
    launch : str, optional
        This kernel launch alone, with an empty L2 before it, as a profiler that flushes the caches
        sees it. Default: all, one after the other.
    **problem
        N, d, Br, Bc and the other sizes and masks; see `flashsim.cost.blocks.call`. Heads that
        share a key head find its tiles in the L2.

    Returns
    -------
    DramCost

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable, or there are more than 2^28 tiles.

    Examples
    --------
    As measured on an H200: 137.5 GB into the multiprocessors, 1.21 GB from the DRAM.

    >>> cost = dram_cost("flash2", N=131072, d=128, heads=2, Br=128, Bc=64, dtype="float16")
    >>> f"{cost.sm.read_bytes / 1e9:.1f} {cost.read_bytes / 1e9:.2f}"
    '137.5 1.21'
    """
    choice("scan", scan, SCANS)
    jitter = number("jitter", jitter, PROBABILITY)
    if not 0 <= jitter < 1:
        raise bad("jitter", jitter, PROBABILITY)
    asked, gpu = asked_of(algorithm, problem), preset(device)
    l2 = gpu.l2_bytes if l2_bytes is None else integer("l2_bytes", l2_bytes, 0, 2**63)
    usual = gpu.sm_count * usual_blocks_per_sm(gpu, asked)
    slots = usual if slots is None else integer("slots", slots, 1)
    seed = integer("seed", seed, 0, 2**62)
    chosen = asked.launches
    if launch is not None:
        choice("launch", launch, [one.name for one in chosen])
        chosen = tuple(one for one in chosen if one.name == launch)
    arrays = list(dict.fromkeys(name for one in chosen for name in one.arrays))
    tiles, elements, owners = numbered(asked, arrays)
    items = {name: asked.cost.item_bytes[name] for name in arrays}
    cache = Cache(elements * np.array(list(items.values()))[owners], l2, policy, owners)
    parts = {}
    for one in chosen:
        made = blocks(one, asked.grid, asked.heads, order)
        run = program(one, asked.grid, made, tiles, asked.head.group)
        before, accesses = cache.bytes.copy(), 0
        for piece in trace(run, slots, alternating=scan != "forward", jitter=jitter, seed=seed):
            cache.replay(piece)
            accesses += len(piece)
        parts[one.name] = _cost(cache.bytes - before, items, cache.dirty_bytes, accesses)
    accesses = sum(part.accesses for part in parts.values())
    return replace(_cost(cache.bytes, items, cache.dirty_bytes, accesses), launches=parts)


def _cost(moved: Array, items: dict[str, int], dirty_bytes: int, accesses: int) -> DramCost:
    """Bytes (4, arrays), as `Cache.bytes`, in elements of each array."""
    read, written, fetched, back = (
        {name: int(n) // items[name] for name, n in zip(items, row, strict=True) if n}
        for row in moved
    )
    sm = Traffic(read, written, items)
    return DramCost(fetched, back, items, sm=sm, dirty_bytes=dirty_bytes, accesses=accesses)


def sizes_around(l2_bytes: int) -> list[int]:
    """Sizes of an L2 for a picture: from a sixteenth to four times, itself among them."""
    l2_bytes = integer("l2_bytes", l2_bytes, 0)
    return [round(l2_bytes * 2**k) for k in (-4, -3, -2, -1, -0.5, 0, 0.25, 0.5, 1, 2)]
