"""2^x without an exponential unit: a polynomial on [0, 1), and the exponent's bits for the rest.

The integer part of x only goes into the exponent (Cody & Waite's range reduction), so that a
polynomial p of low degree with p(x) ~ 2^x on [0, 1) gives 2^x everywhere, by additions and
multiplications alone. FlashAttention-4 sends a share of its exponentials that way, because the
exponential units are as busy as the matrix units.

Source: Zadouri et al. 2026, FlashAttention-4 (arXiv:2603.05451), section 3.1.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import checks
from .checks import bad

Array = np.ndarray[Any, Any]

# By degree, from the constant term up. Degree 3 is the published one; the others make the largest
# relative error on [0, 1) as small as it can be with 1 as constant term (minimax).
COEFFICIENTS = {
    1: (1.0, 0.92355685),
    2: (1.0, 0.66596094, 0.3299324),
    3: (1.0, 0.69514614, 0.22756439, 0.07711909),
    4: (1.0, 0.6930448449, 0.2412802047, 0.0522424743, 0.0134266842),
    5: (1.0, 0.6931513118, 0.2401644501, 0.0557999132, 0.0090170302, 0.0018671301),
}
# Upper bounds of |p(x) / 2^x - 1| on [0, 1), without the rounding of its evaluation.
LARGEST_ERROR = {1: 3.823e-2, 2: 2.054e-3, 3: 8.77e-5, 4: 2.90e-6, 5: 8.24e-8}


def exp2(x: Array, degree: int) -> Array:
    """2^x of any shape by the polynomial of that degree, in the dtype of x; 0 for -inf."""
    known = np.where(np.isnan(x), x.dtype.type(0), np.clip(x, -2000, 2000))
    whole = np.floor(known)
    y = np.ldexp(on_unit_interval(known - whole, COEFFICIENTS[degree]), whole.astype(np.int32))
    return np.where(np.isnan(x), x, y)


def on_unit_interval(x: Array, coefficients: tuple[float, ...]) -> Array:
    """The polynomial of x in [0, 1), by Horner's scheme in the dtype of x."""
    y = np.zeros_like(x)
    for c in reversed(coefficients):
        y = y * x + x.dtype.type(c)
    return y


def emulated(columns: slice, share: float) -> Array:
    """Bool (columns,): which columns of P are exponentials by polynomial, spread evenly."""
    j = np.arange(columns.start, columns.stop)
    return np.asarray(np.floor((j + 1) * share) > np.floor(j * share))


def checked_emulation(given: Any) -> tuple[float, int] | None:
    """(share, degree), checked; None for the exponential unit alone.

    Raises
    ------
    ValueError, TypeError
        If the share is not in [0, 1], or the degree is not 1 to 5.
    """
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise bad("exp_emulation", given, "(share, degree), a share in [0, 1] and a degree 1 to 5")
    share = checks.number("exp_emulation[0]", given[0], "a share in [0, 1]")
    if not 0 <= share <= 1:
        raise bad("exp_emulation[0]", given[0], "a share in [0, 1]")
    return share, checks.integer("exp_emulation[1]", given[1], 1, 6)
