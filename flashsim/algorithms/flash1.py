"""FlashAttention: K and V in the outer loop; O, l and m go back to HBM after every tile."""

from typing import Any

import numpy as np

from ..memory import chip_of, tiles
from ..online_softmax import exp, over, softmax_gradient, weigh


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


def flash_attention_1_backward(
    Q: Any, K: Any, V: Any, O: Any, l: Any, m: Any, dO: Any, dQ: Any, dK: Any, dV: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithm 4 of Dao et al. 2022: O_i is read, and D_i computed, in every pass over i.

    dO (Nq, dv); writes dQ (Nq, d), dK (Nk, d), dV (Nk, dv). Line 16 comes last, since dropping
    overwrites P.
    """
    on_chip = chip_of(Q)
    dQ.fill(0), dK.fill(0), dV.fill(0)  # line 5
    for j, Kj, Vj in tiles(Bc, K, V, where=mask.any_row):  # lines 6, 7
        dKj = on_chip("dKj", np.zeros_like(Kj))  # line 8
        dVj = on_chip("dVj", np.zeros_like(Vj))
        where = mask.column(j)
        for i, Qi, Oi, dOi, dQi, li, mi in tiles(Br, Q, O, dO, dQ, l, m, where=where):  # 9, 10
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))  # lines 11, 12
            Pij = over(exp(Sij, mi, out=Sij), li, out=Sij)  # line 13
            dPij = on_chip("dPij", drop(dOi @ Vj.T, i, j))  # lines 17, 18
            Di = (dOi * Oi).sum(axis=1)  # line 19
            dSij = Mij.gradient(softmax_gradient(Pij, dPij, Di))  # line 20; dS overwrites dP
            dQ[i] = dQi + scale * weigh(dSij, Kj, Mij.keep)  # line 21
            dKj += scale * weigh(dSij.T, Qi, Mij.keep_transposed)  # line 22
            dVj += weigh(drop(Pij, i, j).T, dOi, Mij.keep_transposed)  # lines 14 to 16
        dK[j], dV[j] = dKj, dVj  # line 24


def flash_attention_1_backward_published(
    Q: Any, K: Any, V: Any, O: Any, l: Any, m: Any, dO: Any, dQ: Any, dK: Any, dV: Any, D: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """What the published kernel does: D_i is kept after the first pass over i, so O is read once.

    D (Nq,) is its own; the other arguments are those of `flash_attention_1_backward`.
    """
    on_chip = chip_of(Q)
    dQ.fill(0), dK.fill(0), dV.fill(0)
    for j, Kj, Vj in tiles(Bc, K, V, where=mask.any_row):
        dKj = on_chip("dKj", np.zeros_like(Kj))
        dVj = on_chip("dVj", np.zeros_like(Vj))
        for i, Qi, dOi, dQi, li, mi in tiles(Br, Q, dO, dQ, l, m, where=mask.column(j)):
            if mask.first(i, j):
                Di = (dOi * O[i]).sum(axis=1)
                D[i] = Di
            else:
                Di = D[i]
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))
            Pij = over(exp(Sij, mi, out=Sij), li, out=Sij)
            dPij = on_chip("dPij", drop(dOi @ Vj.T, i, j))
            dSij = Mij.gradient(softmax_gradient(Pij, dPij, Di))
            dQ[i] = dQi + scale * weigh(dSij, Kj, Mij.keep)
            dKj += scale * weigh(dSij.T, Qi, Mij.keep_transposed)
            dVj += weigh(drop(Pij, i, j).T, dOi, Mij.keep_transposed)
        dK[j], dV[j] = dKj, dVj
