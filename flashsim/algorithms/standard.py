"""Standard attention: three passes over N x N matrices that live in HBM."""

from functools import partial
from typing import Any

import numpy as np

from ..memory import chip_of, row, tiles, turns
from ..online_softmax import exp, log, over, shift, weigh


def standard_attention(
    Q: Any, K: Any, V: Any, S: Any, P: Any, O: Any, L: Any,
    *, Br: int, Bc: int, Bs: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithm 0 of Dao et al. 2022 (arXiv:2205.14135): S and P (Nq, Nk) go through HBM.

    Q (Nq, d), K (Nk, d), V (Nk, dv); writes O (Nq, dv). L (Nq,), the logsumexp, is handed back but
    is no part of the algorithm: it is a plain array and not charged. Bs: rows of S that the softmax
    holds on chip at a time; 0 if not even one fits, then S is read twice. A stored 0 does not say
    whether it was masked or underflowed: what takes nothing from V here is every weight that is 0.
    """
    on_chip = chip_of(Q)
    for i, Qi in tiles(Br, Q):  # line 1: S = QKᵀ
        for j, Kj in tiles(Bc, K):
            Mij = mask.tile(i, j)
            S[i, j] = on_chip("Sij", Mij(Qi @ Kj.T * scale))
    if Bs:  # line 2: P = softmax(S)
        softmax(S, P, L, Bs=Bs)
    else:
        softmax_in_two_passes(S, P, L, Br=Br, Bc=Bc)
    for i in turns(Br, O):  # line 3: O = PV
        Oi = on_chip("Oi", np.zeros((i.stop - i.start, V.shape[1]), P.dtype))
        for j, Vj, Pij in tiles(Bc, V, row(P, i)):
            Pij = on_chip("P", drop(Pij, i, j))
            Oi += weigh(Pij, Vj, partial(np.not_equal, Pij, 0))
        O[i] = Oi


def softmax(S: Any, P: Any, L: Any, *, Bs: int) -> None:
    """P = softmax(S) by Bs whole rows: one read and one write of each element."""
    on_chip = chip_of(S)
    for i, Si in tiles(Bs, S):
        mi = on_chip("mi", Si.max(axis=1, initial=-np.inf))
        Si = on_chip("S", exp(Si, mi))  # P_i, not yet normalised, overwrites S_i
        li = on_chip("li", Si.sum(axis=1))
        P[i] = over(Si, li)
        L[i] = shift(mi) + log(li)


def softmax_in_two_passes(S: Any, P: Any, L: Any, *, Br: int, Bc: int) -> None:
    """P = softmax(S) for rows longer than the chip: statistics online, then normalise.

    Algorithm 3 of Milakov & Gimelshein 2018 (arXiv:1805.02867): 3 accesses an element, where the
    softmax that first looks for the maximum and then sums takes 4.
    """
    on_chip = chip_of(S)
    for i in turns(Br, S):
        li = on_chip("li", np.zeros(i.stop - i.start, S.dtype))
        mi = on_chip("mi", np.full_like(li, -np.inf))
        for _, Sij in tiles(Bc, row(S, i)):
            m_new = np.maximum(mi, Sij.max(axis=1))
            li[:] = exp(mi, m_new) * li + exp(Sij, m_new).sum(axis=1)
            mi[:] = m_new
        for j, Sij in tiles(Bc, row(S, i)):
            P[i, j] = over(exp(Sij, mi), li)
        L[i] = shift(mi) + log(li)
