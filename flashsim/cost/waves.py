"""Thread blocks over the multiprocessors: waves, the tail, imbalance, and splits that fill them.

A GPU runs a launch's blocks a few to a multiprocessor; one that is done makes room for the next. A
block here takes as long as the tiles of scores it visits, whatever its neighbours do. Why
FlashAttention-2 also shares out the rows of Q, and Flash-Decoding the keys, is then a number: the
share of the GPU that has something to do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checks import bad, integer, integers
from .blocks import ORDERS, Blocks, Call, asked_of, blocks
from .devices import Device, checked
from .devices import device as preset
from .splits import best_splits as best_splits

Array = np.ndarray[Any, Any]

# Thread blocks and threads that one multiprocessor holds at most, by compute capability: CUDA
# Programming Guide, appendix Compute Capabilities, technical specifications.
MOST = {
    "7.0": (32, 2048),
    "7.5": (16, 1024),
    "8.0": (32, 2048),
    "8.6": (16, 1536),
    "8.9": (24, 1536),
    "9.0": (32, 2048),
    "10.0": (32, 2048),
}
WARP = 32
REGISTER_BYTES = 4
REGISTERS_OF_WARP = 256  # a warp gets registers by so many


def blocks_per_sm(
    gpu: Device, shared_bytes: int, threads: int | None = None, registers: int | None = None
) -> int:
    """How many thread blocks one multiprocessor holds at a time; 0 if not even one fits.

    Parameters
    ----------
    gpu : Device
    shared_bytes : int
        Shared memory of a block. The system takes some more for each (1 KB since compute capability
        8.0): the difference between what an SM has and what a block may use.
    threads, registers : int, optional
        Threads of a block, and registers of a thread. Without them they are no limit.

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable.

    Examples
    --------
    >>> from flashsim.cost.devices import device
    >>> blocks_per_sm(device("h200"), 54784, threads=128, registers=154)
    3
    """
    checked(gpu)
    threads = None if threads is None else integer("threads", threads, 1)
    registers = None if registers is None else integer("registers", registers, 1)
    if integer("shared_bytes", shared_bytes, 0) > gpu.sram_bytes_per_block:
        return 0
    taken = gpu.sram_bytes_per_sm - gpu.sram_bytes_per_block
    most, most_threads = MOST.get(gpu.compute_capability, (None, None))
    limits = [gpu.sram_bytes_per_sm // max(1, shared_bytes + taken)]
    if most is not None:
        limits.append(most)
    if threads is not None:
        warps = -(-threads // WARP)
        if most_threads is not None:
            limits.append(most_threads // (warps * WARP))
        if registers is not None:
            of_warp = -(-registers * WARP // REGISTERS_OF_WARP) * REGISTERS_OF_WARP
            limits.append(gpu.register_bytes_per_sm // (REGISTER_BYTES * of_warp * warps))
    return min(limits)


@dataclass(frozen=True)
class Schedule:
    """Which block runs when, in units of one tile of scores.

    Attributes
    ----------
    slots : int
        Blocks in flight at most.
    work : (blocks,)
        What each takes.
    start : (blocks,)
    slot : (blocks,)
        The place in which it runs, from 0 on.
    """

    slots: int
    work: Array
    start: Array
    slot: Array

    @property
    def span(self) -> int:
        """From the first start to the last end."""
        return int((self.start + self.work).max(initial=0))

    @property
    def waves(self) -> float:
        """Blocks over slots."""
        return len(self.work) / self.slots

    @property
    def utilisation(self) -> float:
        """The share of the slots' time that has a block; 1 if there is nothing to do."""
        return float(self.work.sum()) / (self.slots * self.span) if self.span else 1.0

    @property
    def tail(self) -> float:
        """The share of the span in which at least one slot has run dry."""
        if not self.span:
            return 0.0
        done = np.zeros(self.slots, np.int64)
        np.maximum.at(done, self.slot, self.start + self.work)
        return float(1 - done.min() / self.span)


def schedule(work: Array, slots: int) -> Schedule:
    """Each block in its turn takes the slot that is free first.

    In closed form where all blocks are alike: block b starts in wave b // slots.

    Raises
    ------
    ValueError, TypeError
        If the work of a block is no integer of at least 0, or there is no slot.
    """
    work, slots = integers("work", work, 0), integer("slots", slots, 1)
    order = np.arange(len(work))
    if len(work) and (work == work[0]).all():
        return Schedule(slots, work, order // slots * work[0], order % slots)
    start, slot = np.empty_like(work), np.empty_like(work)
    free = [(0, s) for s in range(slots)]
    for b, length in enumerate(work.tolist()):
        start[b], slot[b] = at, s = free[0]
        heapq.heapreplace(free, (at + length, s))
    return Schedule(slots, work, start, slot)


def waves(
    algorithm: str,
    *,
    device: str = "h200",
    blocks_an_sm: int | None = None,
    order: str = "forward",
    splits: int = 1,
    **problem: Any,
) -> Schedule:
    """The forward pass of an algorithm over a device's multiprocessors.

    Parameters
    ----------
    algorithm : str
        One whose forward pass is one launch: "flash1", "flash2", "block_sparse".
    device : str
        A key of `flashsim.cost.devices.DEVICES`.
    blocks_an_sm : int, optional
        Thread blocks that an SM holds (default: see `usual_blocks_per_sm`).
    order : {"forward", "reversed", "longest", "paired"}
        In which order blocks start; see `flashsim.cost.blocks.blocks`.
    splits : int
        Blocks that share the keys of a row tile: flash2 as Flash-Decoding. The kernel that merges
        their results is not counted.
    **problem
        N, d, Br, Bc and the other sizes and masks; see `flashsim.cost.blocks.call`.

    Examples
    --------
    One item with eight heads on the 108 multiprocessors of an A100: FlashAttention has a block for
    each head, FlashAttention-2 one for each row tile of each head.

    >>> sizes = dict(N=4096, d=64, heads=8, Br=128, Bc=64, dtype="float16", device="a100")
    >>> one, two = waves("flash1", **sizes), waves("flash2", **sizes)
    >>> f"{one.utilisation:.1%} {two.utilisation:.1%} {one.span / two.span:.1f}"
    '7.4% 79.0% 10.7'
    """
    asked = asked_of(algorithm, problem)
    if len(asked.launches) > 1:
        raise bad("algorithm", algorithm, "one whose forward pass is one kernel launch")
    gpu = preset(device)
    if blocks_an_sm is None:
        blocks_an_sm = usual_blocks_per_sm(gpu, asked)
    slots = gpu.sm_count * integer("blocks_an_sm", blocks_an_sm, 1)
    made = blocks(asked.launches[0], asked.grid, asked.heads, order)
    work = made.work if integer("splits", splits, 1) == 1 else _split(asked, made, splits)
    return schedule(work, slots)


def usual_blocks_per_sm(gpu: Device, asked: Call) -> int:
    """Blocks an SM if a block's tiles all lie in shared memory; at least one.

    Kernels that keep some in registers, or several key tiles in flight, have others.
    """
    return max(1, blocks_per_sm(gpu, asked.tile_bytes))


def _split(asked: Call, made: Blocks, splits: int) -> Array:
    """The work of the blocks, each cut at the same keys into `splits`, one after the other."""
    if asked.algorithm != "flash2" or made.members.shape[1] != 1 or asked.grid.keep.size:
        raise bad("splits", splits, "1, but for flash2 without a block layout or pairs")
    tile = made.members[:, 0]
    first, stop = (side[tile] for side in asked.grid.spans(asked.launches[0].loops[0]))
    part = -(-asked.grid.tiles("K") // splits)
    at = part * np.arange(splits)
    work = np.minimum(stop[:, None], at + part) - np.maximum(first[:, None], at)
    return np.asarray(np.maximum(0, work).ravel())


def usual(problem: dict[str, Any], device: str, blocks_an_sm: int) -> dict[str, Schedule]:
    """What `flashsim waves` shows, by name: both loop orders, every block order, and decoding.

    problem: the sizes that `waves` takes. Where it is causal, FlashAttention-2's blocks are shown
    in every order. Decoding has one query and the same keys, all of which it sees.
    """
    given: dict[str, Any] = {**problem, "device": device, "blocks_an_sm": blocks_an_sm}
    found = {"flash1": waves("flash1", **given), "flash2": waves("flash2", **given)}
    if problem["is_causal"]:
        for order in ORDERS[1:]:
            found[f"flash2, {order}"] = waves("flash2", **given, order=order)
    decode = {**given, "N": 1, "Nk": problem["N"], "is_causal": False}
    found["one query"] = whole = waves("flash2", **decode)
    splits = best_splits(len(whole.work), whole.slots, int(whole.work[0]))
    if splits > 1:
        found[f"one query, {splits} splits"] = waves("flash2", **decode, splits=splits)
    return found
