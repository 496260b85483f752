"""FlashAttention-2: Q in the outer loop; O, l and m stay on chip until they are final."""

from typing import Any

import numpy as np

from ..memory import chip_of, tiles
from ..online_softmax import exp, log, over, shift, softmax_gradient, weigh


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


def flash_attention_2_backward(
    Q: Any, K: Any, V: Any, O: Any, L: Any, dO: Any, dQ: Any, dK: Any, dV: Any, D: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithm 2 of Dao 2023: K and V in the outer loop, dQ goes back to HBM after every tile.

    dO (Nq, dv); writes dQ (Nq, d), dK (Nk, d), dV (Nk, dv), and D (Nq,) = rowsum(dO ∘ O).
    """
    on_chip = chip_of(Q)
    row_dots(O, dO, D, Br=Br)  # line 4
    dQ.fill(0)  # line 3
    for j, Kj, Vj in tiles(Bc, K, V):  # lines 5, 6
        dKj = on_chip("dKj", np.zeros_like(Kj))  # line 7
        dVj = on_chip("dVj", np.zeros_like(Vj))
        where = mask.column(j)
        for i, Qi, dOi, dQi, Li, Di in tiles(Br, Q, dO, dQ, L, D, where=where):  # lines 8, 9
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))  # line 10
            Pij = exp(Sij, Li, out=Sij)  # line 11
            dPij = on_chip("dPij", drop(dOi @ Vj.T, i, j))  # line 13
            dSij = Mij.gradient(softmax_gradient(Pij, dPij, Di))  # line 14; dS overwrites dP
            dVj += weigh(drop(Pij, i, j).T, dOi, Mij.keep_transposed)  # line 12
            dQ[i] = dQi + scale * weigh(dSij, Kj, Mij.keep)  # line 15
            dKj += scale * weigh(dSij.T, Qi, Mij.keep_transposed)  # line 16
        dK[j], dV[j] = dKj, dVj  # line 18


def flash_attention_2_backward_two_kernels(
    Q: Any, K: Any, V: Any, O: Any, L: Any, dO: Any, dQ: Any, dK: Any, dV: Any, D: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """The same gradients without a read-modify-write: one loop for dK and dV, one for dQ.

    S and dP are computed twice, seven matrix products instead of five; every output tile is written
    once, by whom it belongs to, so thread blocks need no atomics and the result no order. This is
    the form of Triton's fused-attention tutorial. Arguments as in `flash_attention_2_backward`.
    """
    on_chip = chip_of(Q)
    row_dots(O, dO, D, Br=Br)
    for j, Kj, Vj in tiles(Bc, K, V):
        dKj = on_chip("dKj", np.zeros_like(Kj))
        dVj = on_chip("dVj", np.zeros_like(Vj))
        for i, Qi, dOi, Li, Di in tiles(Br, Q, dO, L, D, where=mask.column(j)):
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))
            Pij = exp(Sij, Li, out=Sij)
            dPij = on_chip("dPij", drop(dOi @ Vj.T, i, j))
            dSij = Mij.gradient(softmax_gradient(Pij, dPij, Di))
            dVj += weigh(drop(Pij, i, j).T, dOi, Mij.keep_transposed)
            dKj += scale * weigh(dSij.T, Qi, Mij.keep_transposed)
        dK[j], dV[j] = dKj, dVj
    for i, Qi, dOi, Li, Di in tiles(Br, Q, dO, L, D):
        dQi = on_chip("dQi", np.zeros_like(Qi))
        for j, Kj, Vj in tiles(Bc, K, V, where=mask.row(i)):
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))
            Pij = exp(Sij, Li, out=Sij)
            dPij = on_chip("dPij", drop(dOi @ Vj.T, i, j))
            dSij = Mij.cleared(softmax_gradient(Pij, dPij, Di))
            dQi += scale * weigh(dSij, Kj, Mij.keep)
        dQ[i] = dQi


def row_dots(O: Any, dO: Any, D: Any, *, Br: int) -> None:
    """D (Nq,) = rowsum(dO ∘ O), a pass of its own over O and dO (Nq, dv)."""
    for i, Oi, dOi in tiles(Br, O, dO):
        D[i] = (dOi * Oi).sum(axis=1)
