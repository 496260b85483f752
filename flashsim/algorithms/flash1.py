"""FlashAttention: K and V in the outer loop; O, l and m go back to HBM after every tile."""

from typing import Any

import numpy as np

from ..memory import chip_of, tiles
from ..online_softmax import exp, over, weigh


def flash_attention_1(
    Q: Any, K: Any, V: Any, O: Any, l: Any, m: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithms 1 and 2 of Dao et al. 2022 (arXiv:2205.14135).

    Q (Nq, d), K (Nk, d), V (Nk, dv); writes O (Nq, dv) and the statistics l, m (Nq,). On a machine
    that elides, the initial O, l, m are neither written nor read: the published kernel.
    """
    on_chip = chip_of(Q)
    O.fill(0), l.fill(0), m.fill(-np.inf)  # line 2
    for j, Kj, Vj in tiles(Bc, K, V, where=mask.any_row):  # lines 5, 6
        for i, Qi, Oi, li, mi in tiles(Br, Q, O, l, m, where=mask.column(j)):  # lines 7, 8
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))  # lines 9 to 11
            m_ij = Sij.max(axis=1)
            Pij = exp(Sij, m_ij, out=Sij)
            l_ij = Pij.sum(axis=1)  # line 12
            m_new = np.maximum(mi, m_ij)
            old, new = exp(mi, m_new), exp(m_ij, m_new)
            l_new = old * li + new * l_ij  # line 13
            O[i] = over(  # lines 14, 15
                (old * li)[:, None] * Oi + new[:, None] * weigh(drop(Pij, i, j), Vj, Mij.keep),
                l_new,
            )
            l[i], m[i] = l_new, m_new  # line 16
