"""Block layouts for block-sparse attention, and what they drop.

A layout is a bool array (block rows, block columns), True for a block of scores that is kept. Each
builder takes the shape of the grid of blocks, (rows, columns) or one number for a square one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import checks
from .checks import bad, bad_type
from .problem import checked
from .reference import exact

Array = np.ndarray[Any, Any]


def _grid(blocks: Any) -> tuple[int, int]:
    if isinstance(blocks, tuple):
        if len(blocks) != 2:
            raise bad("blocks", blocks, "(rows, columns), or one number for both")
        rows, columns = blocks
    else:
        rows = columns = blocks
    return checks.integer("blocks", rows, 0), checks.integer("blocks", columns, 0)


def butterfly(blocks: int, factors: int | None = None) -> Array:
    """Block (i, j) is kept if j = i or j = i xor 2^f for f < factors (default: all).

    blocks must be a power of two, 2^k; the density is (factors + 1) / 2^k. Source: Pixelated
    Butterfly (Dao et al. 2021, arXiv:2112.00029), the layout of FlashAttention's experiments.
    """
    n = checks.integer("blocks", blocks, 1)
    if n & (n - 1):
        raise bad("blocks", blocks, "a power of two")
    most = n.bit_length() - 1
    factors = most if factors is None else checks.integer("factors", factors, 0, most + 1)
    apart = np.arange(n)[:, None] ^ np.arange(n)
    return np.isin(apart, [0, *(1 << f for f in range(factors))])


def local_global(blocks: int | tuple[int, int], local: int = 1, global_: int = 1) -> Array:
    """`local` blocks on each side of the diagonal, and the first `global_` rows and columns.

    Source: the pattern of Longformer (Beltagy et al. 2020, arXiv:2004.05150).
    """
    rows, columns = _grid(blocks)
    local, global_ = checks.integer("local", local, 0), checks.integer("global_", global_, 0)
    i, j = np.arange(rows)[:, None], np.arange(columns)
    return np.asarray((abs(i - j) <= local) | (i < global_) | (j < global_))


def strided(blocks: int | tuple[int, int], stride: int) -> Array:
    """The last `stride` blocks up to the diagonal, and every `stride`-th column.

    Source: the strided pattern of Sparse Transformers (Child et al. 2019, arXiv:1904.10509),
    without its causality: combine it with is_causal.
    """
    rows, columns = _grid(blocks)
    stride = checks.integer("stride", stride, 1)
    behind = np.arange(rows)[:, None] - np.arange(columns)
    return np.asarray(((behind >= 0) & (behind < stride)) | (behind % stride == 0))


def causal(blocks: int | tuple[int, int]) -> Array:
    """The blocks on and below the diagonal of the grid."""
    return np.tri(*_grid(blocks), dtype=bool)


def at_random(blocks: int | tuple[int, int], density: float, seed: int = 0) -> Array:
    """round(density * rows * columns) blocks at random, but those on the diagonal first."""
    rows, columns = _grid(blocks)
    share = checks.number("density", density, "a share from 0 to 1")
    if not 0 <= share <= 1:
        raise bad("density", density, "a share from 0 to 1")
    rng = np.random.default_rng(checks.integer("seed", seed, 0))
    order = rng.random((rows, columns)) - np.eye(rows, columns)
    keep = np.zeros(rows * columns, bool)
    keep[np.argsort(order, axis=None)[: round(share * rows * columns)]] = True
    return keep.reshape(rows, columns)


def density(block_mask: Any) -> float:
    """The share of blocks that are kept."""
    keep = np.asarray(block_mask)
    if keep.dtype != bool:
        raise bad_type("block_mask.dtype", str(keep.dtype), "bool")
    return float(keep.mean()) if keep.size else 0.0


def weight_outside(q: Any, k: Any, block_mask: Any, tiles: tuple[int, int], **what: Any) -> Array:
    """How much of each query's dense attention weight a layout drops, (..., Nq), from 0 to 1.

    The price of the approximation on a given input: 1 - exp(lse inside - lse dense), in float64.

    Parameters
    ----------
    q, k : array (..., Nq, d), (..., Nk, d)
    block_mask : bool array
        The layout, over blocks of the size of `tiles`.
    **what
        Masks and scale as in `attention`; a row that sees nothing drops nothing.
    """
    v = np.zeros_like(np.asarray(k)[..., :1])
    if block_mask is None:
        raise bad("block_mask", block_mask, "a block layout")
    checked(q, k, v, **what, block_mask=block_mask, tiles=tiles)
    dense = exact(q, k, v, **what).lse
    inside = exact(q, k, v, **what, block_mask=block_mask, tiles=tiles).lse
    seen = np.where(np.isfinite(dense), dense, 0)
    return np.asarray(np.where(np.isfinite(dense), -np.expm1(inside - seen), 0).clip(0, 1))
