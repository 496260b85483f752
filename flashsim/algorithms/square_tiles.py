"""Blocked products in square tiles, with S in HBM between them: for SRAM below d x d."""

from functools import partial
from typing import Any

import numpy as np

from ..memory import chip_of, column, row, tiles, turns
from ..online_softmax import exp, over, weigh


def square_tiles_attention(
    Q: Any, K: Any, V: Any, S: Any, O: Any, l: Any, m: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Two blocked matrix products, the small-cache strategy of Saha & Ye 2024 (arXiv:2402.07443).

    Q (Nq, d), K (Nk, d), V (Nk, dv); writes S (Nq, Nk) where the mask leaves anything, O (Nq, dv)
    and the statistics l, m (Nq,). S and O are made in tiles of Br x Bc that stay on chip, while Q,
    K, S and V come in one column (of V: row) at a time. They store exp(S) and its row sums; here S
    is stored and shifted by its row's maximum when it is read, so that exp cannot overflow.
    """
    on_chip = chip_of(Q)
    for i in turns(Br, Q):  # S = QKᵀ, and the statistics of its rows
        li = on_chip("li", np.zeros(i.stop - i.start, l.dtype))
        mi = on_chip("mi", np.full_like(li, -np.inf))
        for j in turns(Bc, K, where=mask.row(i)):
            Sij = on_chip("Sij", np.zeros((len(li), j.stop - j.start), l.dtype))
            for _, Qic, Kjc in tiles(1, row(Q, i), row(K, j)):  # a column of each
                Sij += Qic @ Kjc.T
            Sij *= scale
            S[i, j] = mask.tile(i, j)(Sij)
            m_new = np.maximum(mi, Sij.max(axis=1))
            li[:] = exp(mi, m_new) * li + exp(Sij, m_new, out=Sij).sum(axis=1)
            mi[:] = m_new
        l[i], m[i] = li, mi
    for i, li, mi in tiles(Br, l, m):  # O = softmax(S) V
        for c in turns(Bc, row(O, i)):
            Oic = on_chip("Oic", np.zeros((len(li), c.stop - c.start), l.dtype))
            for j, Sij, Vjc in tiles(1, row(S, i), column(V, c), where=mask.row(i)):
                live = partial(np.not_equal, Sij, -np.inf)
                Oic += weigh(drop(exp(Sij, mi), i, j), Vjc, live)
            O[i, c] = over(Oic, li)
