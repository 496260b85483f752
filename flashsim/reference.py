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

from .exp2 import LARGEST_ERROR
from .fp8 import FLOOR, ROUNDING
from .memory import blocks, paged, widened
from .problem import Problem, checked

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
        enable_gqa, block_mask (with `tiles`, the size of its blocks), local_window, projection,
        cu_seqlens_q, cu_seqlens_k, block_tables, seq_lens: what is to be computed. With
        `projection` it is attention over Linformer's mixed keys, which are mixed in float64 here.
        With `splits` above 1 the bound is that of a run that merges parts: rounding a part's
        logsumexp to one number loses |lse| units in the last place of its weight. With `fp8` it is
        attention over Q, K and V in e4m3, and the bound is that of weights that are rounded to
        e4m3. With `exp_emulation` every weight may be off by the polynomial's largest error as
        well, and with `rescale_threshold` by the rounding of an argument that is so far above 0.

    Notes
    -----
    For float64 inputs the bound is that of two such runs, as the reference is one itself.
    """
    problem = checked(q, k, v, **what)
    shape, head = problem.q.shape[:-1], problem.head
    outputs, lses = np.empty((2, *shape, head.dv)), np.empty((2, *shape))
    chunk = max(1, 2**21 // max(1, head.Nk))
    with np.errstate(all="ignore"):
        for at in np.ndindex(*problem.lead):
            mine = (slice(None), *problem.rows_at(at))
            for i in blocks(problem.mask(at).Nq, chunk):
                rows = _Rows(problem, at, i)
                outputs[mine][:, i], lses[mine][:, i] = rows.output(), rows.lse()
    given = problem.as_given
    return Exact(given(outputs[0]), given(lses[0]), given(outputs[1]), given(lses[1]))


class _Rows:
    """Some query rows of one head in float64: weights, output, lse, and how far each may be off."""

    def __init__(self, problem: Problem, at: tuple[int, ...], i: slice) -> None:
        inputs = {name: x.astype(np.float64) for name, x in problem.inputs(at).items()}
        for name, scale in zip("QKV", problem.scales(at).values(), strict=False):
            inputs[name] *= scale[:, None]
        if problem.tables is not None:
            keys = slice(0, problem.mask(at).Nk)
            how = {**problem.paging(at), "length": keys.stop}
            inputs |= {name: paged(inputs[name], **how)[keys] for name in "KV"}
        Q, self.K, self.V = inputs["Q"], inputs["K"], inputs["V"]
        sizes, mixed = (np.abs(self.K), np.abs(self.V)), 0  # of sums that K and V may be, and terms
        if problem.projection is not None:
            E, F, mixed = inputs["E"], inputs["F"], len(self.K) + 1
            sizes = np.abs(E) @ sizes[0], np.abs(F) @ sizes[1]
            self.K, self.V = E @ self.K, F @ self.V
        if problem.fp8 is not None:
            mixed = 4  # each product is scaled by two numbers more
        self.problem, self.Q, (Nk, d) = problem, Q[i], self.K.shape
        self.type = widened(problem.q.dtype)
        self.u = float(np.finfo(self.type).eps) / 2
        tile = problem.mask(at).tile(i, slice(0, Nk))
        self.live = np.broadcast_to(tile.keep(), (len(self.Q), Nk))
        S = self.Q @ self.K.T * problem.scale
        if tile.loaded is not None and tile.loaded.dtype != bool:
            S = S + tile.loaded
        self.S = np.where(self.live, S, -np.inf)
        m = self.S.max(axis=1, initial=-np.inf)
        self.m = np.where(m == -np.inf, 0, m)[:, None]
        P = np.exp(self.S - self.m)
        self.l = P.sum(axis=1)
        self.w = P / np.where(self.l == 0, 1, self.l)[:, None]
        keep = problem.dropout(at).keep(i, slice(0, Nk)) if problem.p else np.float64(1)
        self.z = keep / (1 - problem.p)
        self.finite = np.asarray(np.isfinite(self.V).all(axis=1))
        self.V0 = np.where(self.finite[:, None], self.V, 0)
        self.O = (self.w * self.z) @ self.V0
        for k in np.flatnonzero(~self.finite):
            wz = (self.w * self.z)[:, k, None]
            self.O += np.where(self.live[:, k, None], wz * self.V[k], 0)

        # Relative error of a weight, in units of u: of its score, and the rest.
        A = np.where(self.live, np.abs(self.Q) @ sizes[0].T, 0) * abs(problem.scale)
        self.worst = (d + 1 + mixed) * A
        self.dot = LAMBDA * np.sqrt(d + 1 + mixed) * A
        summed = np.where(self.finite[:, None], sizes[1], 0)
        self.mixing = LAMBDA * np.sqrt(mixed) * summed  # error of V itself, in units of u
        self.fall = np.where(self.live, self.m - self.S, 0)
        self.common = EXP_ULPS + 2 * np.where(self.live, np.abs(self.S), 0) + self.fall
        records = (self.S[:, 1:] > np.maximum.accumulate(self.S, axis=1)[:, :-1]).sum(axis=1)
        if problem.splits > 1:  # a part is known by its logsumexp, at most |lse| + fall + log(l)
            sizes_of_row = np.abs(self.m) + np.log(np.maximum(self.l, 1))[:, None]
            self.common += np.where(self.live, EXP_ULPS + 4 * sizes_of_row + 3 * self.fall, 0)
            records += problem.splits
        if problem.emulation is not None:  # a polynomial, of an argument scaled by log2(e)
            self.common += LARGEST_ERROR[problem.emulation[1]] / self.u + 3 * (self.fall + EXP_ULPS)
        if problem.threshold is not None:  # an exponential's argument may be so much above 0
            self.common += problem.threshold * np.log(2)
        self.rescales = LAMBDA * EXP_ULPS * np.sqrt(records)
        self.rescales += self.fall.max(axis=1, initial=0)

        # l up to each block's end, in units of l, and the root of its squares over all keys.
        mass = [self.w[:, b].sum(axis=1) for b in _blocks(Nk)]
        self.mass = np.cumsum(mass, axis=0).reshape(len(mass), len(self.w))
        self.sums = np.sqrt(-(-Nk // max(1, len(mass))) * (self.mass**2).sum(axis=0))

    def output(self) -> tuple[Array, Array]:
        """The output and its bound, (rows, dv)."""
        w, z, V, O = self.w, self.z, self.V0, self.O

        def spread(weight: Array) -> Array:
            """sum_j weight_j (z_j v_j - O)^2, at least 0."""
            mixed = (weight * z * z) @ V**2 - 2 * O * ((weight * z) @ V)
            return np.asarray(np.maximum(mixed + O**2 * weight.sum(axis=1)[:, None], 0))

        # by Cauchy-Schwarz, sum_j w_j e_j |z_j v_j - O| <= sqrt(sum w e^2) sqrt(sum w (z v - O)^2)
        around = np.sqrt(spread(w))
        linear = np.sqrt((w * self.common**2).sum(axis=1))[:, None] * around
        dots = np.minimum(
            np.sqrt(spread((w * self.dot) ** 2)),
            np.sqrt((w * self.worst**2).sum(axis=1))[:, None] * around,
        )
        before, inside, size = _prefixes(w * z, V)
        mass = self.mass
        moved = np.abs(before - O * mass[..., None])
        apart = moved.max(axis=0, initial=0) + inside.max(axis=0, initial=0)
        bound = self.u * (
            linear
            + dots
            + self.rescales[:, None] * apart
            + LAMBDA * (3 * _steps(before, inside, size) + 2 * self.sums[:, None] * np.abs(O))
            + 4 * np.abs(O)
            + (w * z) @ self.mixing
        ) + self.tiny() * (1 + np.abs(V).max(initial=0))
        if self.problem.fp8 is not None:  # equal weights have equal errors: no independence here
            floor = np.where(self.live, FLOOR / np.where(self.l == 0, 1, self.l)[:, None], 0)
            bound = bound + (np.maximum(ROUNDING * w, floor) * z) @ np.abs(V)
        return O, _stored(self.problem, self.problem.q.dtype, O, bound)

    def lse(self) -> tuple[Array, Array]:
        """The lse and its bound, (rows,)."""
        lse = np.log(self.l) + self.m[:, 0]
        w = self.w
        dots = np.minimum(np.sqrt(((w * self.dot) ** 2).sum(axis=1)), (w * self.worst).sum(axis=1))
        bound = self.u * (
            (w * self.common).sum(axis=1)
            + dots
            + self.rescales
            + LAMBDA * 2 * self.sums
            + 2 * (np.abs(lse) + np.abs(self.m[:, 0]) + np.abs(np.log(self.l)))
        )
        return lse, 2 * bound if self.type == np.float64 else bound

    def tiny(self) -> float:
        """What underflow may take from a sum over the keys."""
        return len(self.V) * float(np.finfo(self.type).tiny)


def _stored(problem: Problem, dtype: np.dtype[Any], x: Array, bound: Array) -> Array:
    """The bound of x once stored in dtype; of two runs if q is float64, as the reference is."""
    wide = widened(problem.q.dtype)
    if wide == np.float64:
        bound = 2 * bound
    if dtype == wide:
        return bound
    limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    half = float(limits.eps) / 2 * (np.abs(x) + bound)
    return np.asarray(bound + half + float(limits.smallest_subnormal))


def _blocks(n: int) -> list[slice]:
    """At most PREFIXES blocks that cover n."""
    edges = np.unique(np.linspace(0, n, PREFIXES + 1).round().astype(int))
    return [slice(a, b) for a, b in pairwise(edges)]


def _prefixes(w: Array, V: Array) -> tuple[Array, Array, int]:
    """Sums of w v over the keys up to each block's end, of |w v| in it alone, and keys a block."""
    blocks = _blocks(len(V))
    shape = (len(blocks), len(w), V.shape[1])
    before = np.cumsum([w[:, b] @ V[b] for b in blocks], axis=0).reshape(shape)
    inside = np.array([np.abs(w[:, b]) @ np.abs(V[b]) for b in blocks]).reshape(shape)
    return before, inside, -(-len(V) // max(1, len(blocks)))


def _steps(before: Array, inside: Array, size: int) -> Array:
    """Square root of the summed squares of all partial sums."""
    return np.asarray(np.sqrt(size * ((np.abs(before) + inside) ** 2).sum(axis=0)))


@dataclass(frozen=True)
class ExactGradients:
    """float64 gradients of sum(output * do), and the error that a run may have in each.

    values, bounds: by name, "dq", "dk", "dv" and, with a float attn_mask, "dmask".
    """

    values: dict[str, Array]
    bounds: dict[str, Array]

    def ratios(self, gradients: Any) -> dict[str, float]:
        """The largest error / bound of each gradient, given in the order of `values`."""
        names = list(self.values)[: len(gradients)]
        return {
            name: _ratio(x, self.values[name], self.bounds[name])
            for name, x in zip(names, gradients, strict=True)
        }


def exact_gradients(q: Any, k: Any, v: Any, do: Any, **what: Any) -> ExactGradients:
    """float64 gradients and their error bounds; arguments as in `exact`, and do (..., Nq, dv).

    The gradient through the softmax is dS = P (dP - D), with dP = do v^T and D = rowsum(do O). What
    is off in P, dP and D comes from `exact`; a backward pass that knows only the lse recomputes
    P = exp(s - lse) and so has, besides, the lse's own error and rounding in a whole row: for large
    logits that is |lse| units in the last place. What a row has in common moves dq by e dq and
    adds up over independent rows in dk, dv.
    """
    problem = checked(q, k, v, **what)
    dO = problem.output_gradient(do).astype(np.float64)
    shapes = {"dq": problem.q.shape, "dk": problem.k.shape, "dv": problem.v.shape}
    if problem.array is not None and problem.array.dtype != bool:
        shapes["dmask"] = problem.gradient_shape
    sums = {name: np.zeros((2, *shape)) for name, shape in shapes.items()}
    with np.errstate(all="ignore"):
        for at in np.ndindex(*problem.lead):
            mine, shared = problem.rows_at(at), problem.keys_at(at)
            for name, (x, bound) in _gradients(problem, at, dO[mine]).items():
                for total, part in zip(sums.get(name, ()), (x, bound), strict=False):
                    if name == "dmask":
                        own = problem.own_part(total, at)
                        wide = tuple(n for n in (0, 1) if own.shape[n] != part.shape[n])
                        own += part.sum(axis=wide, keepdims=True)
                    else:
                        total[mine if name == "dq" else shared] += part
    values, bounds = {}, {}
    for name, (x, bound) in sums.items():
        kept = problem.q.dtype
        if name == "dmask" and problem.array is not None:
            kept = problem.array.dtype
        bound = _stored(problem, kept, x, bound)
        values[name], bounds[name] = (
            (x.reshape(problem.array_shape), bound.reshape(problem.array_shape))
            if name == "dmask"
            else (problem.as_given(x), problem.as_given(bound))
        )
    return ExactGradients(values, bounds)


def _gradients(problem: Problem, at: tuple[int, ...], dO: Array) -> dict[str, tuple[Array, Array]]:
    """Each gradient of one head, and its bound before it is stored."""
    head = _Rows(problem, at, slice(0, len(dO)))
    w, z, u, dv = head.w, head.z, head.u, head.V.shape[1]
    O_bound, (lse, lse_bound) = head.output()[1], head.lse()
    finite = np.asarray(np.isfinite(head.K).all(axis=1))
    K = np.where(finite[:, None], head.K, 0)
    dP = np.where(head.live, z * (dO @ head.V.T), 0)
    D = (dO * head.O).sum(axis=1)
    G = dP - D[:, None]
    dS = np.where(head.live, w * G, 0)

    # Errors: independent ones (in squares), their worst case, and what a row has in common.
    P_free = u * w * (head.dot / LAMBDA + head.common)
    P_worst = u * w * (head.worst + head.common)
    P_row = np.where(np.isfinite(lse), lse_bound + 2 * u * np.abs(lse), 0)
    products = u * z * (np.abs(dO) @ np.abs(head.V0).T)
    dS_free = P_free * np.abs(G) + w * np.sqrt(dv + 1) * products + 3 * u * np.abs(dS)
    dS_worst = P_worst * np.abs(G) + w * (dv + 1) * products + 3 * u * np.abs(dS)
    D_row = (np.abs(dO) * O_bound).sum(axis=1) + u * (dv + 1) * (np.abs(dO * head.O)).sum(axis=1)
    dS_row = np.abs(dS) * P_row[:, None] + w * D_row[:, None]

    def product(E: Array, X: Array, free: Array, worst: Array) -> tuple[Array, Array]:
        """E X and its bound, where E is off by `free` independently, at worst by `worst`."""
        off = np.minimum(worst @ np.abs(X), LAMBDA * np.sqrt(free**2 @ X**2))
        before, inside, size = _prefixes(E, X)
        result = E @ X
        return result, off + u * (3 * LAMBDA * _steps(before, inside, size) + 4 * np.abs(result))

    dV, dV_off = product(
        (w * z).T,
        dO,
        (z * (P_free + w * P_row[:, None])).T,
        (z * (P_worst + w * P_row[:, None])).T,
    )
    dQ, dQ_off = product(dS, K, dS_free, dS_worst)
    dQ_off = dQ_off + P_row[:, None] * np.abs(dQ) + D_row[:, None] * np.abs(w @ K)
    dK, dK_off = product(dS.T, head.Q, (dS_free + dS_row).T, (dS_worst + dS_row).T)
    tiny = head.tiny() * (1 + np.abs(dO).max(initial=0) * (1 + np.abs(head.V0).max(initial=0)))
    scale = abs(problem.scale)
    return {
        "dq": (problem.scale * dQ, scale * (dQ_off + u * np.abs(dQ)) + tiny),
        "dk": (problem.scale * dK, scale * (dK_off + u * np.abs(dK)) + tiny),
        "dv": (dV, dV_off + tiny),
        "dmask": (dS, np.minimum(dS_worst, LAMBDA * dS_free) + dS_row + tiny),
    }
