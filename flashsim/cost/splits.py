"""Into how many parts decoding cuts the keys: the published rule, and its usual answer."""

from __future__ import annotations

import numpy as np

from ..checks import integer
from .devices import device

MOST_SPLITS = 128  # of the published kernel
BLOCKS_AN_SM = 2  # thread blocks of 128 threads that the published rule counts on
ROWS = 64  # queries that one of its blocks holds
GPU = "h200"


def best_splits(row_blocks: int, slots: int, key_tiles: int) -> int:
    """Into how many parts Flash-Decoding cuts the keys of each of `row_blocks` blocks.

    The rule of the published kernel: one if the blocks fill four fifths of the slots; else, of the
    numbers that make the parts shorter, up to 128 and to the slots, the smallest whose waves are at
    least 0.85 times as full as the fullest. More parts would cost more traffic.

    Raises
    ------
    ValueError, TypeError
        If an argument is no positive integer.

    Examples
    --------
    The example in its source: 48 heads on 108 multiprocessors.

    >>> best_splits(48, 108, 64)
    2
    """
    row_blocks = integer("row_blocks", row_blocks, 1)
    slots, key_tiles = integer("slots", slots, 1), integer("key_tiles", key_tiles, 1)
    if row_blocks >= 0.8 * slots:
        return 1
    most = min(MOST_SPLITS, slots, key_tiles)
    fullness = {}
    for splits in range(1, most + 1):
        if splits == 1 or -(-key_tiles // splits) < -(-key_tiles // (splits - 1)):
            filled = row_blocks * splits / slots
            fullness[splits] = filled / np.ceil(filled)
    best = max(fullness.values())
    return next(splits for splits, full in fullness.items() if full >= 0.85 * best)


def usual_splits(heads: int, Nq: int, Nk: int, d: int) -> int:
    """`best_splits` for `heads` heads of Nq queries and Nk keys of width d, on an H200.

    The tiles are the published kernel's: 64 queries, and 256, 128 or 64 keys for a width up to 64,
    128 and above. So the answer depends on the problem, not on the tiles of a simulated run.

    Examples
    --------
    One sequence of 16 heads has 16 blocks, and there are 264 places for a block: 14 parts fill 224.

    >>> usual_splits(16, 1, 65536, 128)
    14
    """
    heads, Nq, Nk = integer("heads", heads, 0), integer("Nq", Nq, 0), integer("Nk", Nk, 0)
    d = integer("d", d, 1)
    if not (heads and Nq and Nk):
        return 1
    keys = 256 if d <= 64 else 128 if d <= 128 else 64
    slots = BLOCKS_AN_SM * device(GPU).sm_count
    return best_splits(heads * -(-Nq // ROWS), slots, -(-Nk // keys))
