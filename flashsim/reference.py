"""Attention in float64, and how far a float32 run of any tiling may be from it.

`exact` is the oracle: softmax attention over whole rows, no tiles, nothing shared with the
algorithms but the meaning of the masks and the dropout bits. Beside each value it gives a bound
that is computed from the inputs, over visible keys only:

- A weight p_j with relative error delta_j moves the output by sum_j p_j delta_j (v_j - O) and the
  lse by sum_j p_j delta_j: numerator and denominator share what is common to a row.
- delta_j is an error of the score (a dot product of length d and its scaling), of s_j - m, and of
  exp. Roundings of different keys are taken as independent, so their contributions add in squares:
  the probabilistic model of Higham & Mary 2019 (SIAM J. Sci. Comput. 41, A2815), with a factor
  lambda = 7, exceeded with probability below 2 exp(-49/2) = 5e-11 an element. Where a plain sum of
  absolute values is smaller, it is taken.
- Rescaling multiplies all that was accumulated, and summing rounds every partial sum. Both act on
  partial sums over a prefix of the keys, of p_j (v_j - O) and of p_j v_j, which are computed.

So the bound does not depend on tile sizes, and grows like the square root of N where a worst-case
bound grows like N: at every size it still rejects weights rounded to float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from .attention import Problem, checked
from .memory import widened

Array = np.ndarray[Any, Any]

LAMBDA = 7.0  # standard deviations; 2 exp(-LAMBDA^2 / 2) = 5e-11
EXP_ULPS = 4.0  # of NumPy's float32 exp (2.5), with the rounding of its argument's last bit
PREFIXES = 32  # at most so many prefixes of the keys are looked at


@dataclass(frozen=True)
class Exact:
    """float64 output (..., Nq, dv) and lse (..., Nq), and the error that a run may have in each."""

    output: Array
    lse: Array
    output_bound: Array
    lse_bound: Array

    def output_ratio(self, output: Any) -> float:
        """The largest error / bound; at most 1 if all is well, inf if a NaN or inf is misplaced."""
        return _ratio(output, self.output, self.output_bound)

    def lse_ratio(self, lse: Any) -> float:
        """The same for the lse."""
        return _ratio(lse, self.lse, self.lse_bound)


def _ratio(x: Any, exact: Array, bound: Array) -> float:
    x = np.asarray(x, np.float64)
    if x.shape != exact.shape:
        raise ValueError(f"shape {x.shape}: expected {exact.shape}, as the reference has")
    finite = np.isfinite(exact)
    same = np.where(np.isnan(exact), np.isnan(x), x == exact)
    if not same[~finite].all() or not np.isfinite(x[finite]).all():
        return np.inf
    error, bound = np.abs(x[finite] - exact[finite]), bound[finite]
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(error > 0, error / bound, 0).max(initial=0))


def exact(q: Any, k: Any, v: Any, **what: Any) -> Exact:
    """float64 attention and its error bounds; arguments as in `flashsim.attention`.

    Parameters
    ----------
    q, k, v : array (..., Nq, d), (..., Nk, d), (..., Nk, dv)
    **what
        is_causal, causal_align, window, attn_mask, key_padding_mask, scale, dropout_p, seed,
        enable_gqa: what is to be computed.

    Notes
    -----
    For float64 inputs the bound is that of two such runs, as the reference is one itself.
    """
    problem = checked(q, k, v, **what)
    lead, head = problem.q.shape[:-2], problem.head
    outputs = np.empty((2, *lead, head.Nq, head.dv))
    lses = np.empty((2, *lead, head.Nq))
    rows = max(1, 2**21 // max(1, head.Nk))
    with np.errstate(all="ignore"):
        for at in np.ndindex(*lead):
            for start in range(0, head.Nq, rows):
                i = slice(start, min(start + rows, head.Nq))
                here = (slice(None), *at, i)
                outputs[here], lses[here] = _rows(problem, at, i)
    given = problem.as_given
    return Exact(given(outputs[0]), given(lses[0]), given(outputs[1]), given(lses[1]))


def _rows(problem: Problem, at: tuple[int, ...], i: slice) -> tuple[Array, Array]:
    """(output, its bound) and (lse, its bound) of rows i of one head."""
    Q, K, V = (x.astype(np.float64) for x in problem.inputs(at).values())
    Q, (Nk, d) = Q[i], K.shape
    tile = problem.mask(at).tile(i, slice(0, Nk))
    live = np.broadcast_to(tile.keep(), (len(Q), Nk))
    S = Q @ K.T * problem.scale
    if tile.loaded is not None and tile.loaded.dtype != bool:
        S = S + tile.loaded
    S = np.where(live, S, -np.inf)
    m = S.max(axis=1, initial=-np.inf)[:, None]
    m = np.where(m == -np.inf, 0, m)
    P = np.exp(S - m)
    l = P.sum(axis=1)
    w = P / np.where(l == 0, 1, l)[:, None]
    z = problem.dropout(at).keep(i, slice(0, Nk)) / (1 - problem.p) if problem.p else 1.0
    finite = np.asarray(np.isfinite(V).all(axis=1))
    V0 = np.where(finite[:, None], V, 0)
    O = (w * z) @ V0
    for k in np.flatnonzero(~finite):
        O += np.where(live[:, k, None], (w * z)[:, k, None] * V[k], 0)
    lse = np.log(l) + m[:, 0]

    type_ = widened(problem.q.dtype)
    u = float(np.finfo(type_).eps) / 2
    A = np.where(live, np.abs(Q) @ np.abs(K).T, 0) * abs(problem.scale)
    s, fall = np.where(live, np.abs(S), 0), np.where(live, m - S, 0)
    dot = LAMBDA * np.sqrt(d + 1) * A  # of a score, in units of u
    common = EXP_ULPS + 2 * s + fall  # of a weight besides, in units of u

    def spread(weight: Array) -> Array:
        """sum_j weight_j (z_j v_j - O)^2, at least 0."""
        mixed = (weight * z * z) @ V0**2 - 2 * O * ((weight * z) @ V0)
        return np.asarray(np.maximum(mixed + O**2 * weight.sum(axis=1)[:, None], 0))

    # by Cauchy-Schwarz, sum_j w_j e_j |z_j v_j - O| <= sqrt(sum w e^2) sqrt(sum w (z v - O)^2)
    around = np.sqrt(spread(w))
    linear = np.sqrt((w * common**2).sum(axis=1))[:, None] * around
    dots = np.minimum(
        np.sqrt(spread((w * dot) ** 2)),
        np.sqrt((w * ((d + 1) * A) ** 2).sum(axis=1))[:, None] * around,
    )
    dots_lse = np.minimum(np.sqrt(((w * dot) ** 2).sum(axis=1)), (w * (d + 1) * A).sum(axis=1))

    before, inside, mass = _prefixes(w * z, w, V0, O)
    steps = -(-Nk // max(1, len(mass)))  # keys a block
    records = (S[:, 1:] > np.maximum.accumulate(S, axis=1)[:, :-1]).sum(axis=1)
    rescales = LAMBDA * EXP_ULPS * np.sqrt(records) + fall.max(axis=1, initial=0)
    moved = np.abs(before - O * mass[..., None])
    apart = moved.max(axis=0, initial=0) + inside.max(axis=0, initial=0)
    partial = np.sqrt(steps * ((np.abs(before) + inside) ** 2).sum(axis=0))
    sums = np.sqrt(steps * (mass**2).sum(axis=0))

    tiny = Nk * float(np.finfo(type_).tiny)
    O_bound = u * (
        linear
        + dots
        + rescales[:, None] * apart
        + LAMBDA * (3 * partial + 2 * sums[:, None] * np.abs(O))
        + 4 * np.abs(O)
    ) + tiny * (1 + np.abs(V0).max(initial=0))
    lse_bound = u * (
        (w * common).sum(axis=1)
        + dots_lse
        + rescales
        + LAMBDA * 2 * sums
        + 2 * (np.abs(lse) + np.abs(m[:, 0]) + np.abs(np.log(l)))
    )
    if type_ == np.float64:
        O_bound, lse_bound = 2 * O_bound, 2 * lse_bound
    stored: Any = ml_dtypes.finfo(problem.q.dtype)  # type: ignore[no-untyped-call]
    if problem.q.dtype != type_:
        O_bound += float(stored.eps) / 2 * (np.abs(O) + O_bound)
        O_bound += float(stored.smallest_subnormal)
    return np.stack([O, O_bound]), np.stack([lse, lse_bound])


def _prefixes(wz: Array, w: Array, V: Array, O: Array) -> tuple[Array, Array, Array]:
    """Sums over the keys up to each of at most PREFIXES ends.

    Of w z v (blocks, rows, dv); of |w z v| inside the last block alone; of w (blocks, rows).
    """
    edges = np.unique(np.linspace(0, len(V), PREFIXES + 1).round().astype(int))
    blocks = [slice(a, b) for a, b in pairwise(edges)]
    if not blocks:
        return np.zeros((0, *O.shape)), np.zeros((0, *O.shape)), np.zeros((0, len(O)))
    before = np.cumsum([wz[:, b] @ V[b] for b in blocks], axis=0)
    inside = np.stack([wz[:, b] @ np.abs(V[b]) for b in blocks])
    mass = np.cumsum([w[:, b].sum(axis=1) for b in blocks], axis=0)
    return before, inside, mass
