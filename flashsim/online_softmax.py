"""Online softmax: the partial state (m, l, O) of a row as a monoid, and the -inf-safe operations.

A row's state over some of its keys is the maximum score m, the sum l of exp(s - m), and the
unnormalised output O, the sum of exp(s - m) v. States of disjoint sets of keys merge in any order
and any bracketing; `identity` is the state of no keys; `finish` gives softmax(s) v and the
logsumexp.

The algorithms write their update out, as their papers do; tests hold them against this module.

Source: Milakov & Gimelshein 2018, arXiv:1805.02867, extended to O as in Dao et al. 2022,
arXiv:2205.14135, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class State(NamedTuple):
    """m (rows,), l (rows,), O (rows, dv) of some keys; O is not yet divided by l."""

    m: Array
    l: Array
    O: Array


def identity(rows: int, dv: int, dtype: Any = np.float32) -> State:
    """The state of no keys: m = -inf, l = 0, O = 0."""
    return State(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((rows, dv), dtype))


def of_tile(S: Array, V: Array) -> State:
    """The state of one tile: scores S (rows, keys), a masked one -inf, and values V (keys, dv)."""
    m = S.max(axis=1, initial=-np.inf)
    P = exp(S, m)
    return State(m, P.sum(axis=1), P @ V)


def merge(a: State, b: State) -> State:
    """The state of both sets of keys. Commutative bit for bit (a zero's sign aside),
    associative up to rounding."""
    m = np.maximum(a.m, b.m)
    ea, eb = exp(a.m, m), exp(b.m, m)
    return State(m, ea * a.l + eb * b.l, ea[:, None] * a.O + eb[:, None] * b.O)


def finish(state: State) -> tuple[Array, Array]:
    """(output (rows, dv), lse (rows,)): softmax-weighted values and the natural logsumexp."""
    return over(state.O, state.l), shift(state.m) + log(state.l)


def shift(m: Array) -> Array:
    """The finite number to subtract: m, or 0 for a row that has seen nothing (m = -inf)."""
    return np.where(m == -np.inf, m.dtype.type(0), m)


def exp(s: Array, m: Array, out: Array | None = None) -> Array:
    """exp(s - m) row by row, 0 where s is -inf, also if m is -inf too; `out` may be s itself."""
    a = shift(m)
    return np.exp(np.subtract(s, a[:, None] if s.ndim == 2 else a, out=out), out=out)


def log(l: Array) -> Array:
    """log(l), and -inf, without a warning, where l is 0."""
    return np.log(l, out=np.full_like(l, -np.inf), where=l != 0)


def over(x: Array, l: Array, out: Array | None = None) -> Array:
    """x (rows, n) / l row by row, 0 where l is 0: it may attend to nothing; `out` may be x."""
    a = l[:, None]
    quotient = np.divide(x, np.where(a == 0, l.dtype.type(1), a), out=out)
    np.copyto(quotient, 0, where=a == 0)
    return quotient


def weigh(P: Array, V: Array, live: Callable[[], Array]) -> Array:
    """P (rows, keys) @ V (keys, dv), in which a masked weight takes nothing from V.

    Not even NaN or inf: 0 * NaN is NaN, so a padded slot that holds garbage would leak. `live()` is
    bool (rows, keys), True where a weight counts; it is only asked if V holds such values.
    """
    if np.isfinite(V).all():
        return P @ V
    finite = np.asarray(np.isfinite(V).all(axis=1))
    keep = live()
    out = P @ np.where(finite[:, None], V, V.dtype.type(0))
    for k in np.flatnonzero(~finite):
        rows = keep[:, k]
        out[rows] += P[rows, k, None] * V[k]
    return out


def marked_exp(S: Array, m: Array, out: Array | None = None) -> Array:
    """As `exp`, but -0 where S is masked, for a product with V that the mask does not reach."""
    masked = np.isneginf(S)
    P = exp(S, m, out=out)
    np.copyto(P, -0.0, where=masked)
    return P


def times_V(P: Array, V: Array) -> Array:
    """P V, in which a weight of -0 takes nothing from V; one of 0 has underflowed, and counts."""
    return weigh(P, V, lambda: (P != 0) | ~np.signbit(P))


def softmax_gradient(P: Array, dP: Array, D: Array) -> Array:
    """dS = P ∘ (dP - D) row by row, with D (rows,) = rowsum(P ∘ dP); overwrites dP."""
    dP -= D[:, None]
    return np.multiply(P, dP, out=dP)
