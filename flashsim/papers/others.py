"""Ring Attention, online softmax, PagedAttention and Flash-Decoding, recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..algorithms.standard import softmax_in_two_passes
from ..cost.devices import device
from ..cost.io import io_cost
from ..memory import Machine, row, tiles


def ring_tokens(
    tflops: Sequence[float], gb_per_second: Sequence[float], blocks: int
) -> list[float]:
    """Liu et al. 2023 (arXiv:2310.01889), Table 2, in 1000 tokens.

    A block of c queries takes 4 d c^2 FLOP against a block of c keys, and passing on the keys and
    values takes 4 c d bytes: the transfer is hidden from c = FLOP/s over bytes/s on.
    """
    return [blocks * flops / rate for flops, rate in zip(tflops, gb_per_second, strict=True)]


def softmax_accesses(length: int, tile: int) -> list[float]:
    """Milakov & Gimelshein 2018 (arXiv:1805.02867): accesses an element, counted in runs."""
    return [_accesses(softmax, length, tile) for softmax in (_safe_softmax, _online_softmax)]


def _safe_softmax(x: Any, y: Any, *, tile: int) -> None:
    """y = softmax(x), (1, V): one pass for the maximum, one for the sum, one to normalise."""
    m, l = -np.inf, 0.0
    for _, xj in tiles(tile, row(x, slice(0, 1))):
        m = max(m, xj.max())
    for _, xj in tiles(tile, row(x, slice(0, 1))):
        l += np.exp(xj - m).sum()
    for j, xj in tiles(tile, row(x, slice(0, 1))):
        y[slice(0, 1), j] = np.exp(xj - m) / l


def _online_softmax(x: Any, y: Any, *, tile: int) -> None:
    softmax_in_two_passes(x, y, np.empty(1), Br=1, Bc=tile)


def _accesses(softmax: Callable[..., None], length: int, tile: int) -> float:
    x = np.random.default_rng(0).standard_normal((1, length))
    machine = Machine()
    softmax(*machine.hbm(x=x, y=np.empty_like(x)).values(), tile=tile)
    return machine.traffic.total_elements / length


def most_wasted_slots(block: int) -> list[float]:
    """Kwon et al. 2023 (arXiv:2309.06180): empty slots in the last block of a sequence."""
    return [float(max(-length % block for length in range(1, 2 * block)))]


def decoding_times(
    d: int, heads: int, kv_heads: int, gpu: str, length: Sequence[int]
) -> list[float]:
    """Flash-Decoding, batch 1, µs at the peak rate of the memory.

    The query heads that share a key head are the rows of one tile, so K and V are read once.
    """
    group = heads // kv_heads
    costs = [
        io_cost("flash2", N=group, Nk=n, d=d, heads=kv_heads, Br=group, Bc=128, dtype="float16")
        for n in length
    ]
    return [1e6 * device(gpu).memory_seconds(cost.total_bytes) for cost in costs]
