"""FlashAttention-2: Q in the outer loop; O, l and m stay on chip until they are final."""

from typing import Any

import numpy as np

from ..memory import chip_of, tiles
from ..online_softmax import exp, log, over, shift, weigh


def flash_attention_2(
    Q: Any, K: Any, V: Any, O: Any, L: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithm 1 of Dao 2023 (arXiv:2307.08691).

    Q (Nq, d), K (Nk, d), V (Nk, dv); writes O (Nq, dv) and L (Nq,), the logsumexp of the scaled,
    masked scores.
    """
    on_chip = chip_of(Q)
    for i, Qi in tiles(Br, Q):  # load Q_i
        Oi = on_chip("Oi", np.zeros((len(Qi), V.shape[1]), Qi.dtype))
        li = on_chip("li", np.zeros(len(Qi), Qi.dtype))
        mi = on_chip("mi", np.full_like(li, -np.inf))
        for j, Kj, Vj in tiles(Bc, K, V, where=mask.row(i)):  # load K_j, V_j
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))
            m_new = np.maximum(mi, Sij.max(axis=1))
            Pij = exp(Sij, m_new, out=Sij)
            alpha = exp(mi, m_new)
            li[:] = alpha * li + Pij.sum(axis=1)
            Oi[:] = alpha[:, None] * Oi + weigh(drop(Pij, i, j), Vj, Mij.keep)
            mi[:] = m_new
        O[i] = over(Oi, li)  # write O_i
        L[i] = shift(mi) + log(li)  # write L_i
