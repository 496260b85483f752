"""Split-KV decoding: few queries, many keys; blocks share out the keys, and a merge adds up."""

from typing import Any

import numpy as np

from ..memory import blocks, chip_of, part, tiles, turns
from ..online_softmax import exp, log, over, shift
from .flash2 import flash_attention_2


def split_kv_attention(
    Q: Any, K: Any, V: Any, Op: Any, Lp: Any, O: Any, L: Any,
    *, Br: int, Bc: int, splits: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Flash-Decoding (Dao, Haziza, Massa and Sizov 2023): FlashAttention-2 of each part, merged.

    The keys are cut at tiles into `splits` parts; without a tile left, a part is empty. Part s
    leaves its output and logsumexp in rows s Nq to (s + 1) Nq of Op (splits Nq, dv) and Lp
    (splits Nq,). One part is FlashAttention-2 itself, and writes no partial result. The other
    arguments are those of `flash_attention_2`.
    """
    how = {"Br": Br, "Bc": Bc, "scale": scale, "drop": drop}
    if splits == 1:
        flash_attention_2(Q, K, V, O, L, mask=mask, **how)
        return
    for s, keys in enumerate(parts(len(K), Bc, splits)):  # thread blocks of their own
        mine = slice(s * len(Q), (s + 1) * len(Q))
        flash_attention_2(Q, K, V, part(Op, mine), part(Lp, mine), mask=mask.among(keys), **how)
    merge_parts(Op, Lp, O, L, Br=Br)


def parts(Nk: int, Bc: int, splits: int) -> list[slice]:
    """The keys of each part: as many whole tiles of Bc in each, the last ones shorter or empty."""
    most = -(-Nk // (Bc * splits)) * Bc
    return [slice(min(s * most, Nk), min((s + 1) * most, Nk)) for s in range(splits)]


def merge_parts(Op: Any, Lp: Any, O: Any, L: Any, *, Br: int) -> None:
    """Write O (Nq, dv) and L (Nq,) of all keys from those of the parts, Br queries at a time.

    A part is a state with m = L, l = 1 and O; one that saw nothing has L = -inf and weighs nothing.
    """
    on_chip = chip_of(O)
    Nq = len(O)
    for i in turns(Br, O):
        Oi = on_chip("Oi", np.zeros((i.stop - i.start, O.shape[1]), Op.dtype))
        li = on_chip("li", np.zeros(len(Oi), Op.dtype))
        mi = on_chip("mi", np.full_like(li, -np.inf))
        for s in blocks(len(Op), Nq):
            mine = slice(s.start + i.start, s.start + i.stop)
            for _, Os, Ls in tiles(Br, part(Op, mine), part(Lp, mine)):  # one turn
                m_new = np.maximum(mi, Ls)
                alpha, beta = exp(mi, m_new), exp(Ls, m_new)
                li[:] = alpha * li + beta
                Oi[:] = alpha[:, None] * Oi + beta[:, None] * Os
                mi[:] = m_new
        O[i] = over(Oi, li)
        L[i] = shift(mi) + log(li)
