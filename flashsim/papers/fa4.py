"""FlashAttention-4 (Zadouri et al. 2026, arXiv:2603.05451): cycles, exp2, lazy rescaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..attention import attention
from ..cost.devices import device
from ..cost.roofline import tile_cycles
from ..exp2 import on_unit_interval

Array = np.ndarray[Any, Any]


def cycles(gpu: str, backward: bool) -> list[float]:
    """Matrix products, exponentials and shared memory of a 128 x 128 tile, each alone."""
    found = tile_cycles(device(gpu), backward=backward)
    return [x for x in (found.matmul, found.exp, found.sram) if x is not None]


def exp2_errors(coefficients: Sequence[float]) -> list[float]:
    """Largest relative error of 2^x on [0, 1), in ‰: of a polynomial, of it and of 2^x rounded.

    The integer part of x only goes into the exponent, so [0, 1) is all that counts.
    """
    x = np.linspace(0, 1, 2_000_000, endpoint=False, dtype=np.float32)
    exact = np.exp2(x, dtype=np.float64)
    y = on_unit_interval(x, tuple(coefficients))
    shown = y, _rounded(y), _rounded(np.exp2(x))
    return [1e3 * float(np.abs(approximate / exact - 1).max()) for approximate in shown]


def _rounded(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def change_by_lazy_rescaling(
    queries: int, keys: int, d: int, tile: int, threshold: float, seed: int
) -> list[float]:
    """Largest change of O, over its largest entry, by rescaling only beyond the threshold."""
    q, k, v = _unit_scale(queries, keys, d, seed)
    eager, _ = lazily_rescaled(q, k, v, tile, 0)
    lazy, _ = lazily_rescaled(q, k, v, tile, threshold)
    return [float(np.abs(lazy - eager).max() / np.abs(eager).max())]


def rescaled_share(
    queries: int, keys: int, d: int, tile: int, threshold: float, seed: int
) -> float:
    """Of rows at the tiles after the first, the share whose O and l are rescaled."""
    _, rescaled = lazily_rescaled(*_unit_scale(queries, keys, d, seed), tile, threshold)
    return rescaled / (queries * (-(-keys // tile) - 1))


def _unit_scale(queries: int, keys: int, d: int, seed: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, d)) for n in (queries, keys, keys))
    return q, k, v


def lazily_rescaled(Q: Array, K: Array, V: Array, Bc: int, threshold: float) -> tuple[Array, int]:
    """O (Nq, dv) of FlashAttention-4, and how often a row was rescaled after its first tile."""
    out = attention(Q, K, V, algorithm="flash4", rescale_threshold=threshold, tiles=(len(Q), Bc))
    assert out.rescales is not None
    return out.output, int(out.rescales.sum())
