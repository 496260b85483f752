"""Linformer: the Nk keys and values are mixed into k of them before any query meets a key."""

from functools import partial
from typing import Any

import numpy as np

from ..memory import chip_of, row, tiles, turns
from ..online_softmax import weigh
from .standard import standard_attention


def linformer_attention(
    Q: Any, K: Any, V: Any, E: Any, F: Any, Kp: Any, Vp: Any, S: Any, P: Any, O: Any, L: Any,
    *, Br: int, Bc: int, Bs: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """softmax(Q (E K)ᵀ) F V, equation 7 of Wang et al. 2020 (arXiv:2006.04768).

    E, F (k, Nk); writes Kp = E K (k, d), Vp = F V (k, dv), and S, P (Nq, k). The mask is that of
    the k mixed keys. The other arguments are those of `standard_attention`.
    """
    project(E, K, Kp, Br=Br, Bc=Bc)
    project(F, V, Vp, Br=Br, Bc=Bc)
    standard_attention(
        Q, Kp, Vp, S, P, O, L, Br=Br, Bc=Bc, Bs=Bs, scale=scale, mask=mask, drop=drop
    )


def project(E: Any, X: Any, Xp: Any, *, Br: int, Bc: int) -> None:
    """Xp (k, width) = E (k, Nk) X (Nk, width), in which a weight of 0 takes nothing from X."""
    on_chip = chip_of(X)
    for i in turns(Br, Xp):
        Xi = on_chip("Xi", np.zeros((i.stop - i.start, X.shape[1]), Xp.dtype))
        for _, Xj, Eij in tiles(Bc, X, row(E, i)):
            Xi += weigh(Eij, Xj, partial(np.not_equal, Eij, 0))
        Xp[i] = Xi
