"""FP8 as FlashAttention-3 uses it: e4m3 with a scale for each block of rows, and rotated Q and K.

e4m3 has 3 bits of fraction and ends at 448, so each block of rows is divided by a scale that puts
its largest entry there. An outlier then costs its whole block. Incoherent processing multiplies Q
and K by one orthogonal matrix, random signs times Hadamard: scores stay as they are, and an
outlier is spread over the row.

Source: Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), section 3.3.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
ROUNDING = 2.0**-4  # largest relative error of rounding to e4m3
FLOOR = 2.0**-10  # and largest error where it has no full precision left, below 2^-6


def quantised(x: Array, rows: int) -> tuple[Array, Array]:
    """x (N, width) in e4m3 and the scale (N,) of each row, the same for each `rows` of them.

    x is about the first times the second. What is not finite becomes NaN, and counts for no scale.
    """
    N = len(x)
    largest = np.where(np.isfinite(x), np.abs(x), 0).max(axis=1, initial=0)
    scales = [largest[a : a + rows].max() / x.dtype.type(LARGEST) for a in range(0, N, rows)]
    scale = np.repeat(np.array(scales, x.dtype), min(rows, max(1, N)))[:N]
    least = np.finfo(x.dtype).tiny  # a smaller scale has lost its own digits
    scale = np.where(scale == 0, 1, np.maximum(scale, least)).astype(x.dtype)
    return (x / scale[:, None]).astype(E4M3), scale


def rounded(x: Array) -> Array:
    """x rounded to e4m3, in its own dtype."""
    return x.astype(E4M3).astype(x.dtype)


def signs(width: int, seed: int = 0) -> Array:
    """The random signs of `rotation`, 1 and -1, (width,)."""
    return np.random.default_rng(seed).choice([-1.0, 1.0], width)


@cache
def rotation(width: int, seed: int = 0) -> Array:
    """Random signs times Hadamard, orthogonal, (width, width) in float64; x is rotated by x @ it.

    A width that is no power of two is cut into such, largest first, and each rotates by itself.
    """
    R, start = np.zeros((width, width)), 0
    for bit in reversed(range(width.bit_length())):
        if width >> bit & 1:
            R[start : start + 2**bit, start : start + 2**bit] = _hadamard(2**bit)
            start += 2**bit
    return np.asarray(signs(width, seed)[:, None] * R)


def _hadamard(n: int) -> Array:
    """Orthogonal, (n, n), all entries of one size; n is a power of two."""
    H = np.ones((1, 1))
    while len(H) < n:
        H = np.block([[H, H], [H, -H]])
    return np.asarray(H / np.sqrt(n))
