"""Standard attention: three passes over N x N matrices that live in HBM."""

from functools import partial
from typing import Any

import numpy as np

from ..memory import chip_of, column, row, tiles, turns
from ..online_softmax import exp, log, over, shift, softmax_gradient, weigh


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


def standard_attention_backward(
    Q: Any, K: Any, V: Any, P: Any, dO: Any, dP: Any, dS: Any, dQ: Any, dK: Any, dV: Any,
    *, Br: int, Bc: int, Bs: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithm 3 of Dao et al. 2022: reads the stored P, and dP and dS (Nq, Nk) go through HBM.

    dO (Nq, dv); writes dQ (Nq, d), dK (Nk, d), dV (Nk, dv). Bs: rows of P and dP that the softmax's
    gradient holds on chip at a time; 0 if not even one fits, then both are read twice.
    """
    on_chip = chip_of(Q)
    for j in turns(Bc, V):  # line 1: dV = PᵀdO
        dVj = on_chip("dVj", np.zeros((j.stop - j.start, V.shape[1]), P.dtype))
        for i, dOi, Pij in tiles(Br, dO, column(P, j)):
            Pij = on_chip("P", drop(Pij, i, j))
            dVj += weigh(Pij.T, dOi, partial(np.not_equal, Pij.T, 0))
        dV[j] = dVj
    for i, dOi in tiles(Br, dO):  # line 2: dP = dO Vᵀ
        for j, Vj in tiles(Bc, V):
            dP[i, j] = on_chip("dPij", drop(dOi @ Vj.T, i, j))
    if Bs:  # line 3: dS = P ∘ (dP - rowsum(P ∘ dP))
        gradient_of_softmax(P, dP, dS, Bs=Bs, mask=mask)
    else:
        gradient_of_softmax_in_two_passes(P, dP, dS, Br=Br, Bc=Bc, mask=mask)
    for i in turns(Br, Q):  # line 4: dQ = dS K
        dQi = on_chip("dQi", np.zeros((i.stop - i.start, Q.shape[1]), P.dtype))
        for _, Kj, dSij in tiles(Bc, K, row(dS, i)):
            dQi += scale * weigh(dSij, Kj, partial(np.not_equal, dSij, 0))
        dQ[i] = dQi
    for j in turns(Bc, K):  # line 5: dK = dSᵀQ
        dKj = on_chip("dKj", np.zeros((j.stop - j.start, K.shape[1]), P.dtype))
        for _, Qi, dSij in tiles(Br, Q, column(dS, j)):
            dKj += scale * weigh(dSij.T, Qi, partial(np.not_equal, dSij.T, 0))
        dK[j] = dKj


def gradient_of_softmax(P: Any, dP: Any, dS: Any, *, Bs: int, mask: Any) -> None:
    """dS from P and dP by Bs whole rows; where P is 0 a dP that is NaN counts for nothing."""
    on_chip = chip_of(P)
    everything = slice(0, P.shape[1])
    for i, Pi, dPi in tiles(Bs, P, dP):
        dPi = on_chip("dP", np.where(Pi != 0, dPi, 0))  # dS_i will overwrite it
        Di = (Pi * dPi).sum(axis=1)
        dSi = softmax_gradient(Pi, dPi, Di)
        np.copyto(dSi, 0, where=Pi == 0)  # also where D_i is NaN
        dS[i] = mask.add_gradient(dSi, i, everything)


def gradient_of_softmax_in_two_passes(
    P: Any, dP: Any, dS: Any, *, Br: int, Bc: int, mask: Any
) -> None:
    """dS from P and dP for rows longer than the chip: rowsum(P ∘ dP) first, then dS."""
    on_chip = chip_of(P)
    for i in turns(Br, P):
        Di = on_chip("Di", np.zeros(i.stop - i.start, P.dtype))
        for _, Pij, dPij in tiles(Bc, row(P, i), row(dP, i)):
            Di += (Pij * np.where(Pij != 0, dPij, 0)).sum(axis=1)
        for j, Pij, dPij in tiles(Bc, row(P, i), row(dP, i)):
            dPij = on_chip("dP", np.where(Pij != 0, dPij, 0))
            dSij = softmax_gradient(Pij, dPij, Di)
            np.copyto(dSij, 0, where=Pij == 0)
            dS[i, j] = mask.add_gradient(dSij, i, j)
