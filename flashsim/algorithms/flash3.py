"""FlashAttention-3: the softmax of a tile runs under the matrix products of its neighbours."""

from typing import Any

import numpy as np

from ..fp8 import rounded
from ..memory import chip_of, load, tiles
from ..online_softmax import exp, log, marked_exp, over, shift, times_V, weigh


def flash_attention_3(
    Q: Any, K: Any, V: Any, O: Any, L: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithm 2 of Shah et al. 2024 (arXiv:2407.08608): two stages in flight.

    The product S of tile j is asked for before the product P V of tile j - 1, and the softmax of
    tile j needs only the former: on the GPU it runs while the latter does. Here one statement
    follows the other, in that order, and the result is FlashAttention-2's, bit for bit; what the
    pipeline costs is room for a second tile of scores. Writes O (Nq, dv) and L (Nq,), the logsumexp
    of the scaled, masked scores.
    """
    on_chip = chip_of(Q)
    for i, Qi in tiles(Br, Q):
        Oi = on_chip("Oi", np.zeros((len(Qi), V.shape[1]), Qi.dtype))
        li = on_chip("li", np.zeros(len(Qi), Qi.dtype))
        mi = on_chip("mi", np.full_like(li, -np.inf))
        Pij, before = on_chip("Pij", np.zeros((len(Qi), 0), Qi.dtype)), None  # nothing in flight
        for j, Kj in tiles(Bc, K, where=mask.row(i)):  # load K_j
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))  # S of tile j: asked for, not waited for
            if before is not None:  # P V of tile j - 1 behind it: load V_{j-1}
                Oi += times_V(drop(Pij, i, before), load(V, before))
            m_new = np.maximum(mi, Sij.max(axis=1))  # S is there: the softmax, under P V
            Pij = on_chip("Pij", marked_exp(Sij, m_new))
            alpha = exp(mi, m_new)
            li[:] = alpha * li + Pij.sum(axis=1)
            Oi *= alpha[:, None]  # P V is there: rescale
            before, mi[:] = j, m_new
        if before is not None:
            Oi += times_V(drop(Pij, i, before), load(V, before))  # P V of the last tile
        O[i] = over(Oi, li)
        L[i] = shift(mi) + log(li)


def flash_attention_3_fp8(
    Q: Any, K: Any, V: Any, qs: Any, ks: Any, vs: Any, O: Any, L: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """The FP8 forward pass of Shah et al. 2024, section 3.3: Q, K, V and P are e4m3.

    qs (Nq,), ks and vs (Nk,): the scale of each row, the same for the rows of a block; a small
    table, not charged. Products of e4m3 are summed in float32, and so are weights before they are
    rounded. The other arguments are those of `flash_attention_3`; the pipeline is left out here.
    """
    on_chip = chip_of(Q)
    for i, Qi in tiles(Br, Q):
        Oi = on_chip("Oi", np.zeros((len(Qi), V.shape[1]), Qi.dtype))
        li = on_chip("li", np.zeros(len(Qi), Qi.dtype))
        mi = on_chip("mi", np.full_like(li, -np.inf))
        for j, Kj, Vj in tiles(Bc, K, V, where=mask.row(i)):
            Mij = mask.tile(i, j)
            Sij = on_chip("Sij", Mij(Qi @ Kj.T * (scale * qs[i, None] * ks[j])))
            m_new = np.maximum(mi, Sij.max(axis=1))
            Pij = exp(Sij, m_new, out=Sij)
            alpha = exp(mi, m_new)
            li[:] = alpha * li + Pij.sum(axis=1)
            Pij[:] = rounded(Pij)  # in [0, 1], so it needs no scale
            Oi[:] = alpha[:, None] * Oi + weigh(drop(Pij, i, j), Vj * vs[j, None], Mij.keep)
            mi[:] = m_new
        O[i] = over(Oi, li)
        L[i] = shift(mi) + log(li)
