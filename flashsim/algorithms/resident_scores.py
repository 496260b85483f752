"""A tile of scores stays on chip, everything else streams by: for SRAM below d x d."""

from typing import Any

import numpy as np

from ..memory import chip_of, row, tiles, turns
from ..online_softmax import exp, log, over, shift, weigh


def resident_scores_attention(
    Q: Any, K: Any, V: Any, O: Any, L: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """FlashAttention without room for a row tile of Q or O: they come in one column at a time.

    Q (Nq, d), K (Nk, d), V (Nk, dv); writes O (Nq, dv) and L (Nq,), the logsumexp. On chip are
    S_ij (Br, Bc), l_i and m_i, and of Q, K, V and O one column. O goes back to HBM after every key
    tile, normalised, as in Algorithm 1 of Dao et al. 2022; no N x N matrix does. On a machine that
    elides, the initial O is neither written nor read.
    """
    on_chip = chip_of(Q)
    O.fill(0)
    for i in turns(Br, Q):
        li = on_chip("li", np.zeros(i.stop - i.start, L.dtype))
        mi = on_chip("mi", np.full_like(li, -np.inf))
        for j in turns(Bc, K, where=mask.row(i)):
            Sij = on_chip("Sij", np.zeros((len(li), j.stop - j.start), L.dtype))
            for _, Qic, Kjc in tiles(1, row(Q, i), row(K, j)):  # S = QKᵀ, a column of each
                Sij += Qic @ Kjc.T
            Sij *= scale
            Mij = mask.tile(i, j)
            m_new = np.maximum(mi, Mij(Sij).max(axis=1))
            Pij = exp(Sij, m_new, out=Sij)
            old = exp(mi, m_new) * li
            l_new = old + Pij.sum(axis=1)
            Pij = drop(Pij, i, j)
            for c, Oic, Vjc in tiles(1, row(O, i), row(V, j)):  # O = PV, a column of each
                O[i, c] = over(old[:, None] * Oic + weigh(Pij, Vjc, Mij.keep), l_new)
            li[:], mi[:] = l_new, m_new
        L[i] = shift(mi) + log(li)
