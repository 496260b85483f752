"""What no algorithm can move less than: lower bounds on HBM traffic, in elements.

Each bound says where it comes from and where it holds. Two kinds have a number: what a pass must
read and write at least once, and what follows from a chip of M elements. The literature's bounds
for a chip smaller than d^2, and for the backward pass, are orders of growth without a constant:
they say how traffic must grow, not how much there must be.

The bound of a chip of M elements, after Saha and Ye, who print it without the constant. Cut a run
into phases of M reads and writes each. What a phase can use lies on the chip when it starts or is
read in it: 2 M elements at most. What it leaves to others lies on the chip when it ends or is
written in it: 2 M elements at most. A score is a sum of d products, so in one phase at most 4 M
scores are begun in an earlier or finished in a later one. Each of the others needs all d elements
of its row of Q and of its row of K. Of 2 M elements at most 2 M / d are whole rows, a of Q and b of
K, and a b <= (M / d)^2. So a phase works on at most (M / d)^2 + 4 M scores, and all of them take

    traffic >= M (scores / ((M / d)^2 + 4 M) - 1) = scores d^2 / (M + 4 d^2) - M.

M is all that is on the chip. The counts of this package leave out row vectors that live within one
line (registers): less than 1 % of M for tiles of the paper's shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..checks import budget, flag, instance, integer
from ..masks import Mask


@dataclass(frozen=True)
class Work:
    """What a pass must touch, whatever its tiles; summed over the heads of a call.

    Attributes
    ----------
    scores : int
        Scores that count, of all query heads.
    queries : int
        Rows of Q that see at least one key, of all query heads.
    keys : int
        Rows of K that at least one query sees, of all key heads: heads that share K and V could
        read them once.
    d, dv : int
        Width of Q and K, and of V.
    """

    scores: int
    queries: int
    keys: int
    d: int
    dv: int

    def __post_init__(self) -> None:
        for name in ("scores", "queries", "keys"):
            integer(name, getattr(self, name), 0)
        for name in ("d", "dv"):
            integer(name, getattr(self, name), 1)

    @classmethod
    def of(
        cls, mask: Mask, d: int, dv: int, query_heads: int = 1, key_heads: int | None = None
    ) -> Work:
        """The work of heads that have one mask; an array in it is data, and hides nothing here."""
        instance("mask", mask, Mask, "a flashsim.masks.Mask")
        query_heads = integer("query_heads", query_heads, 1)
        shared = query_heads if key_heads is None else integer("key_heads", key_heads, 1)
        scores, queries, keys = _counted(mask)
        return cls(query_heads * scores, query_heads * queries, shared * keys, d, dv)


def _counted(mask: Mask) -> tuple[int, int, int]:
    """Scores that the rules of a mask leave, queries with at least one, and keys with one."""
    if not mask.banded and mask.keys is None and mask.layout is None:
        return mask.Nq * mask.Nk, mask.Nq if mask.Nk else 0, mask.Nk if mask.Nq else 0
    layout, scores, queries = mask.layout, 0, 0
    seen = np.zeros(mask.Nk, bool)
    for n in range(1 if layout is None else len(layout.keep)):
        live = np.ones(mask.Nk, bool) if mask.keys is None else mask.keys
        i = np.arange(mask.Nq)
        if layout is not None:
            i = i[n * layout.Br : (n + 1) * layout.Br]
            live = live & np.repeat(layout.keep[n], layout.Bc)[: mask.Nk]
        before = np.append(0, np.cumsum(live))
        first, stop = np.clip(i + mask.lo, 0, mask.Nk), np.clip(i + mask.hi + 1, 0, mask.Nk)
        each = before[stop] - before[first]
        scores += int(each.sum())
        queries += int((each > 0).sum())
        # Neighbouring rows see overlapping or adjacent spans, so these rows' spans have no gap.
        span = slice(first.min(initial=mask.Nk), stop.max(initial=0))
        seen[span] |= live[span]
    return scores, queries, int(seen.sum())


@dataclass(frozen=True)
class Bound:
    """A lower bound on the HBM traffic of one pass.

    Attributes
    ----------
    name, formula, source, validity : str
        What it is, in elements, from where, and where it holds.
    backward : bool
        Of which pass.
    exact_only : bool
        Whether it needs every score that counts to be computed.
    order : bool
        Whether it is an order of growth: no constant is known, so it bounds no number.
    value : callable
        (Work, M) to elements; for an order, the expression without its constant; None out of range.
    """

    name: str
    formula: str
    source: str
    validity: str
    backward: bool
    exact_only: bool
    order: bool
    value: Callable[[Work, float], float | None]

    def elements(self, work: Work, M: float) -> int | None:
        """The least that a chip of M elements moves; None where the bound says nothing.

        That is out of its range, where it is not above 0, and always for an order of growth.
        """
        value = None if self.order else self.value(work, M)
        return math.ceil(value) if value is not None and value > 0 else None


def _compulsory(work: Work, M: float) -> float:
    return (work.queries + work.keys) * (work.d + work.dv)


def _compulsory_backward(work: Work, M: float) -> float:
    return work.queries * (2 * work.d + work.dv) + 2 * work.keys * (work.d + work.dv)


def _products(scores: int, d: int, M: float) -> float:
    """The bound of the module docstring for scores that are sums of d products."""
    return scores * d**2 / (M + 4 * d**2) - M if math.isfinite(M) else -math.inf


def _small_chip(work: Work, M: float) -> float | None:
    return work.scores * work.d / math.sqrt(M) if work.d**2 > M else None


def _backward_order(work: Work, M: float) -> float | None:
    scores, n, d = work.scores, work.queries, work.d
    return min((scores * d**2 + n * d**3) / M, (scores * d + n * d**2) / math.sqrt(M))


_SAHA_YE = "Saha and Ye 2024 (arXiv:2402.07443)"
_ANY_MASK = "Any M. Rows that a mask hides altogether are left out; heads that share K and V count"

COMPULSORY = Bound(
    name="compulsory",
    formula="queries (d + dv) + keys (d + dv); 4 N d for dense, square attention",
    source="Q, K and V are read once, O is written once",
    validity=_ANY_MASK + " them once. Any algorithm.",
    backward=False,
    exact_only=False,
    order=False,
    value=_compulsory,
)
COMPULSORY_BACKWARD = Bound(
    name="compulsory",
    formula="queries (2 d + dv) + 2 keys (d + dv); 7 N d for dense, square attention",
    source="Q, K, V and dO are read once, dQ, dK and dV are written once",
    validity=_ANY_MASK + " them once. Any algorithm: O and the statistics could be recomputed.",
    backward=True,
    exact_only=False,
    order=False,
    value=_compulsory_backward,
)
BOUNDS = (
    COMPULSORY,
    Bound(
        name="Saha-Ye",
        formula="scores d^2 / (M + 4 d^2) - M; N^2 d^2 / (M + 4 d^2) - M for dense attention",
        source=_SAHA_YE + ", with the constant that follows from their proof",
        validity="Any M, one chip that works through all heads; tight up to a constant for "
        "M >= d^2 and far from M = N d. Algorithms that compute each score that counts as a sum "
        "of d products, whatever their order; fast matrix products are covered by the paper's own "
        "bound, which has no constant.",
        backward=False,
        exact_only=True,
        order=False,
        value=lambda work, M: _products(work.scores, work.d, M),
    ),
    Bound(
        name="Saha-Ye, small chip",
        formula="N^2 d / sqrt(M), order of growth",
        source=_SAHA_YE,
        validity="M < d^2. No constant is known.",
        backward=False,
        exact_only=True,
        order=True,
        value=_small_chip,
    ),
    COMPULSORY_BACKWARD,
    Bound(
        name="Saha-Ye, of dP",
        formula="scores dv^2 / (M + 4 dv^2) - M",
        source="the argument of " + _SAHA_YE + " for dP = dO V^T instead of S = Q K^T",
        validity="As Saha-Ye; a corollary of this project: every backward pass here computes dP, "
        "while S may be recomputed or P read.",
        backward=True,
        exact_only=True,
        order=False,
        value=lambda work, M: _products(work.scores, work.dv, M),
    ),
    Bound(
        name="Li et al.",
        formula="min((N^2 d^2 + N d^3) / M, (N^2 d + N d^2) / sqrt(M)), order of growth",
        source="Li et al. 2024 (arXiv:2410.09397)",
        validity="Dense, square attention; the first for M >= d^2, the second below. For others "
        "the value takes scores for N^2 and queries for N. No constant is known.",
        backward=True,
        exact_only=True,
        order=True,
        value=_backward_order,
    ),
)


def best(
    work: Work, M: float | None, *, backward: bool = False, exact: bool = True
) -> tuple[int, Bound]:
    """The largest bound that has a number, in elements, and which one it is.

    Parameters
    ----------
    work : Work
    M : float, optional
        Elements on the chip; None or inf for no limit. For an algorithm that needs more than its
        chip has, what it needs.
    backward : bool
        Of the backward pass.
    exact : bool
        For exact attention; an approximation need not compute every score.

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable.
    """
    instance("work", work, Work, "a Work, as Work.of makes of a mask")
    room, backward, exact = budget("M", M), flag("backward", backward), flag("exact", exact)
    fitting = [b for b in BOUNDS if b.backward == backward and (exact or not b.exact_only)]
    values = {n: x for n, b in enumerate(fitting) if (x := b.elements(work, room)) is not None}
    if not values:  # nothing counts, so nothing need be moved
        return 0, fitting[0]
    largest = max(values, key=lambda n: values[n])
    return values[largest], fitting[largest]
