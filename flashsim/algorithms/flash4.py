"""FlashAttention-4: m moves only when it must, and some exponentials are polynomials."""

import math
from typing import Any

import numpy as np

from ..exp2 import emulated, exp2
from ..memory import chip_of, tiles
from ..online_softmax import exp, log, over, shift, weigh


def flash_attention_4(
    Q: Any, K: Any, V: Any, O: Any, L: Any, R: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
    emulation: tuple[float, int] | None = None, threshold: float,
) -> None:  # fmt: skip
    """The forward pass of Zadouri et al. 2026 (arXiv:2603.05451), section 3.1.

    FlashAttention-2's loop. A row's m stands still until a tile exceeds it by more than `threshold`
    powers of two, and only then are O and l rescaled: what both lack in scale they lack alike, so
    the output is that of eager rescaling. `emulation` (share, degree): such a share of the
    exponentials is a polynomial. Writes O (Nq, dv), L (Nq,), the logsumexp, and in R (Nq,) how
    often a row was rescaled after its first tile: a tally beside the algorithm, not charged.
    """
    on_chip = chip_of(Q)
    for i, Qi in tiles(Br, Q):  # load Q_i
        Oi = on_chip("Oi", np.zeros((len(Qi), V.shape[1]), Qi.dtype))
        li = on_chip("li", np.zeros(len(Qi), Qi.dtype))
        mi = on_chip("mi", np.full_like(li, -np.inf))
        R[i] = 0
        for j, Kj, Vj in tiles(Bc, K, V, where=mask.row(i)):  # load K_j, V_j
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))
            m_tile = Sij.max(axis=1)
            grows = m_tile > mi + Sij.dtype.type(threshold * math.log(2))
            R[i] += grows & (mi > -np.inf)
            m_new = np.where(grows, m_tile, mi)
            alpha = exp(mi, m_new)  # 1 for a row that is not rescaled
            Pij = partly_emulated(Sij, m_new, j, emulation)
            li[:] = alpha * li + Pij.sum(axis=1)
            Oi[:] = alpha[:, None] * Oi + weigh(drop(Pij, i, j), Vj, Mij.keep)
            mi[:] = m_new
        O[i] = over(Oi, li)  # write O_i
        L[i] = shift(mi) + log(li)  # write L_i


def partly_emulated(S: Any, m: Any, j: slice, emulation: tuple[float, int] | None) -> Any:
    """exp(S - m) row by row, over S; in some of the columns j as 2^((S - m) log2 e)."""
    if emulation is None:
        return exp(S, m, out=S)
    share, degree = emulation
    some = emulated(j, share)
    powers = (S[:, some] - shift(m)[:, None]) * S.dtype.type(math.log2(math.e))
    P = exp(S, m, out=S)
    P[:, some] = exp2(powers, degree)
    return P
