"""FlashAttention (Dao et al. 2022, arXiv:2205.14135): Fig. 2 and Tables 9 to 21, recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cost.counts import Cost
from ..cost.devices import device
from ..cost.io import io_cost
from ..cost.roofline import Roofline
from ..layouts import at_random
from .fa1_tables import tables
from .published import published

GB, HALF, SINGLE = 1e9, 2, 4  # bytes
ITEM_BYTES = {"l": 0, "m": 0, "D": 0, "Z": 1}  # what is left out, and dropout's bits
BR = 64  # FlashAttention's traffic depends on Bc alone


def _flash(N: int, d: int, heads: int, Bc: int, backward: bool = False) -> Cost:
    """The published kernel: initial O, l, m and dQ cost nothing."""
    return io_cost(
        "flash1", N=N, d=d, heads=heads, Br=BR, Bc=Bc, convention="elided", backward=backward
    )


def _flash_passes(N: int, d: int, heads: int, Bc: int) -> list[Cost]:
    return [_flash(N, d, heads, Bc, backward) for backward in (False, True)]


def _standard_passes(N: int, d: int, heads: int, algorithm: str) -> list[Cost]:
    """Each matrix once a step: one tile."""
    return [
        io_cost(algorithm, N=N, d=d, heads=heads, Br=N, Bc=N, backward=backward)
        for backward in (False, True)
    ]


def _bytes(*costs: Cost) -> int:
    """Bytes if every number has 2, and a dropout bit 1; without the statistics of rows."""
    return sum(
        n * ITEM_BYTES.get(name, HALF)
        for cost in costs
        for counts in (cost.reads, cost.writes)
        for name, n in counts.items()
    )


def _milliseconds(gpu: str, costs: Sequence[Cost]) -> float:
    """The lower time of some costs, one after the other, with those bytes."""
    flops, exps = sum(cost.flops for cost in costs), sum(cost.exps for cost in costs)
    return 1e3 * Roofline(device(gpu), "float16", _bytes(*costs), flops, exps).lower_seconds


def traffic_over_tiles(N: int, d: int, heads: int, Bc: Sequence[int]) -> list[float]:
    """Fig. 2 middle, GB."""
    return [_bytes(_flash(N, d, heads, size)) / GB for size in Bc]


def time_over_tiles(N: int, d: int, heads: int, gpu: str, Bc: Sequence[int]) -> list[float]:
    """Fig. 2 middle, ms."""
    return [_milliseconds(gpu, [_flash(N, d, heads, size)]) for size in Bc]


def traffic_of_flash(N: int, d: int, heads: int, Bc: int) -> list[float]:
    """Fig. 2 left, FlashAttention, GB."""
    return [_bytes(*_flash_passes(N, d, heads, Bc)) / GB]


def traffic_of_standard(N: int, d: int, heads: int, algorithm: str) -> list[float]:
    """Fig. 2 left, standard attention, GB."""
    return [_bytes(*_standard_passes(N, d, heads, algorithm)) / GB]


def gflops(N: int, d: int, heads: int) -> list[float]:
    """Fig. 2 left, GFLOP of standard attention and of FlashAttention."""
    passes = _standard_passes(N, d, heads, "standard"), _flash_passes(N, d, heads, N)
    return [sum(cost.flops for cost in costs) / 1e9 for costs in passes]


def times(N: int, d: int, heads: int, gpu: str, Bc: int, algorithm: str) -> list[float]:
    """Fig. 2 left, ms of standard attention and of FlashAttention."""
    passes = _standard_passes(N, d, heads, algorithm), _flash_passes(N, d, heads, Bc)
    return [_milliseconds(gpu, costs) for costs in passes]


def time_over_density(N: int, d: int, B: int, density: Sequence[float]) -> list[float]:
    """Fig. 2 right, ms: a line over the traffic, through the published times of s < 1."""
    moved = [_sparse_elements(N, d, B, share) for share in density]
    ms = [float(x) for x in published("fa1-fig2-sparse-ms")]
    sparse = slice(0, -1)
    slope, start = np.polyfit(moved[sparse], ms[sparse], 1)
    return [float(start + slope * elements) for elements in moved]


def _sparse_elements(N: int, d: int, B: int, share: float) -> int:
    """Both passes over random blocks, the diagonal always among them."""
    keep = at_random(-(-N // B), share)
    return sum(
        io_cost(
            "block_sparse",
            N=N,
            d=d,
            Br=B,
            Bc=B,
            block_mask=keep,
            convention="elided",
            backward=back,
        ).total_elements
        for back in (False, True)
    )  # fmt: skip


def memory_of_standard(N: Sequence[int], d: int, heads: int) -> list[float]:
    """Table 21, in units of 2^20 bytes: S and P, their gradients, and 10 N d."""
    scores = [io_cost("standard", N=n, d=d, heads=heads).extra_hbm_elements for n in N]
    return [(2 * s + 10 * n * d * heads) * HALF / 2**20 for n, s in zip(N, scores, strict=True)]


def memory_of_flash(N: Sequence[int], d: int, heads: int) -> list[float]:
    """Table 21, in whole units of 2^20 bytes: l and m, and 11 N d, from two key tiles on 13."""
    found = []
    for n in N:
        statistics = io_cost("flash1", N=n, d=d, heads=heads).extra_hbm_elements
        matrices = (11 + 2 * (n > 256)) * n * d * heads
        found.append(float((HALF * matrices + SINGLE * statistics) // 2**20))
    return found


def crossover(method: str, table: Sequence[int]) -> list[float]:
    """The N at which a method's printed time falls below FlashAttention's, the first one."""
    return [tables()[number].crossovers(method)[0] for number in table]
