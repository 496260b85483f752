"""Standard attention as a framework runs it: masking and dropout are kernels of their own."""

from functools import partial
from typing import Any

import numpy as np

from ..memory import chip_of, column, row, tiles, turns
from ..online_softmax import weigh
from .standard import (
    gradient_of_softmax,
    gradient_of_softmax_in_two_passes,
    softmax,
    softmax_in_two_passes,
)


def standard_attention_unfused(
    Q: Any, K: Any, V: Any, S: Any, P: Any, Z: Any, Pdrop: Any, O: Any, L: Any,
    *, Br: int, Bc: int, Bs: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithm 0 of Dao et al. 2022 (arXiv:2205.14135) in five kernels instead of three.

    S, P and Pdrop (Nq, Nk) and the bits Z (Nq, Nk), one byte each, go through HBM, with a mask and
    dropout or without. The other arguments are those of `standard_attention`.
    """
    on_chip = chip_of(Q)
    for i, Qi in tiles(Br, Q):  # S = QKᵀ
        for j, Kj in tiles(Bc, K):
            S[i, j] = on_chip("Sij", Qi @ Kj.T * scale)
    for i in turns(Br, S):  # S = MASK(S)
        for j, Sij in tiles(Bc, row(S, i)):
            Sij = on_chip("S", Sij.copy())
            S[i, j] = mask.tile(i, j)(Sij)
    if Bs:  # P = softmax(S)
        softmax(S, P, L, Bs=Bs)
    else:
        softmax_in_two_passes(S, P, L, Br=Br, Bc=Bc)
    for i in turns(Br, P):  # Pdrop = P ∘ Z / (1 - p)
        for j, Pij in tiles(Bc, row(P, i)):
            Zij = on_chip("Zij", drop.keep(i, j))
            Pdrop[i, j], Z[i, j] = drop.kept(Pij, Zij), Zij
    for i in turns(Br, O):  # O = Pdrop V
        Oi = on_chip("Oi", np.zeros((i.stop - i.start, V.shape[1]), P.dtype))
        for _, Vj, Pij in tiles(Bc, V, row(Pdrop, i)):
            Oi += weigh(Pij, Vj, partial(np.not_equal, Pij, 0))
        O[i] = Oi


def standard_attention_unfused_backward(
    Q: Any, K: Any, V: Any, P: Any, Z: Any, Pdrop: Any, dO: Any,
    dPdrop: Any, dP: Any, dS: Any, dQ: Any, dK: Any, dV: Any,
    *, Br: int, Bc: int, Bs: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithm 3 of Dao et al. 2022 with dropout's gradient as a kernel of its own.

    dPdrop (Nq, Nk) goes through HBM as well. Masking, a number added to each score, has no kernel
    here: its gradient is that of the scores.
    """
    on_chip = chip_of(Q)
    for j in turns(Bc, V):  # dV = Pdropᵀ dO
        dVj = on_chip("dVj", np.zeros((j.stop - j.start, V.shape[1]), P.dtype))
        for _, dOi, Pij in tiles(Br, dO, column(Pdrop, j)):
            dVj += weigh(Pij.T, dOi, partial(np.not_equal, Pij.T, 0))
        dV[j] = dVj
    for i, dOi in tiles(Br, dO):  # dPdrop = dO Vᵀ
        for j, Vj in tiles(Bc, V):
            dPdrop[i, j] = on_chip("dPij", dOi @ Vj.T)
    for i in turns(Br, dP):  # dP = dPdrop ∘ Z / (1 - p)
        for j, dPij, Zij in tiles(Bc, row(dPdrop, i), row(Z, i)):
            dP[i, j] = drop.kept(dPij, Zij)
    if Bs:  # dS = P ∘ (dP - rowsum(P ∘ dP))
        gradient_of_softmax(P, dP, dS, Bs=Bs, mask=mask)
    else:
        gradient_of_softmax_in_two_passes(P, dP, dS, Br=Br, Bc=Bc, mask=mask)
    for i in turns(Br, Q):  # dQ = dS K
        dQi = on_chip("dQi", np.zeros((i.stop - i.start, Q.shape[1]), P.dtype))
        for _, Kj, dSij in tiles(Bc, K, row(dS, i)):
            dQi += scale * weigh(dSij, Kj, partial(np.not_equal, dSij, 0))
        dQ[i] = dQi
    for j in turns(Bc, K):  # dK = dSᵀQ
        dKj = on_chip("dKj", np.zeros((j.stop - j.start, K.shape[1]), P.dtype))
        for _, Qi, dSij in tiles(Br, Q, column(dS, j)):
            dKj += scale * weigh(dSij.T, Qi, partial(np.not_equal, dSij.T, 0))
        dK[j] = dKj
