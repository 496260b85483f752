"""Chunks of queries and keys: memory for the square root of N keys, and S through HBM as ever."""

from typing import Any

import numpy as np

from ..memory import blocks, chip_of, part, row, tiles, turns
from ..online_softmax import exp, log, marked_exp, over, shift, times_V


def rabe_staats_attention(
    Q: Any, K: Any, V: Any, Sc: Any, Pc: Any, Oc: Any, lc: Any, mc: Any, O: Any, L: Any,
    *, Cr: int, Cc: int, Br: int, Bc: int, Bs: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Figure 1 of Rabe & Staats 2021 (arXiv:2112.05682), each operation a kernel of its own.

    A chunk of Cr queries meets Cc keys at a time: Sc and Pc (Cr, Cc) are their scores and weights,
    and each chunk of keys leaves a partial result, Oc (chunks Cr, dv) with lc and mc (chunks Cr,),
    which are added up at the end. So HBM holds O(sqrt(N)) beside inputs and outputs if Cc is, but
    every score is written and read twice, as in standard attention. As there, nothing is skipped,
    and Bs rows of Sc are on chip at a time. Writes O (Nq, dv); L (Nq,), the logsumexp, is handed
    back but is no part of the algorithm, and not charged.
    """
    for i in blocks(len(Q), Cr):  # map over chunks of queries
        n = i.stop - i.start
        for c, j in enumerate(blocks(len(K), Cc)):  # map over chunks of keys
            here, width = slice(c * n, (c + 1) * n), slice(0, j.stop - j.start)
            summarize_chunk(
                part(Q, i), part(K, j), part(V, j), part(Sc, slice(0, n), width),
                part(Pc, slice(0, n), width), part(Oc, here), part(lc, here), part(mc, here),
                i=i, j=j, Br=Br, Bc=Bc, Bs=Bs, scale=scale, mask=mask, drop=drop,
            )  # fmt: skip
        done = slice(0, n * -(-len(K) // Cc))
        partials = part(Oc, done), part(lc, done), part(mc, done)
        combine(*partials, part(O, i), part(L, i), Br=Br)


def summarize_chunk(
    Q: Any, K: Any, V: Any, S: Any, P: Any, O: Any, l: Any, m: Any,
    *, i: slice, j: slice, Br: int, Bc: int, Bs: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """O, l and m of queries i over keys j alone: three kernels, S and P in HBM between them."""
    on_chip = chip_of(Q)
    for r, Qr in tiles(Br, Q):  # S = QKᵀ
        for c, Kc in tiles(Bc, K):
            Mrc = mask.tile(moved(r, i), moved(c, j))
            S[r, c] = on_chip("Sij", Mrc(Qr @ Kc.T * scale))
    for r, Sr in tiles(Bs, S):  # P = exp(S - m)
        mr = on_chip("mi", Sr.max(axis=1))
        Sr = on_chip("Sc", marked_exp(Sr, mr))  # P_r overwrites S_r
        P[r], l[r], m[r] = Sr, on_chip("li", Sr.sum(axis=1)), mr
    for r in turns(Br, O):  # O = PV
        Or = on_chip("Oi", np.zeros((r.stop - r.start, V.shape[1]), P.dtype))
        for c, Vc, Prc in tiles(Bc, V, row(P, r)):
            Prc = on_chip("Pc", drop(Prc, moved(r, i), moved(c, j)))
            Or += times_V(Prc, Vc)
        O[r] = Or


def combine(Oc: Any, lc: Any, mc: Any, O: Any, L: Any, *, Br: int) -> None:
    """O and L of some queries from the partial results: the largest m first, then the sums."""
    on_chip = chip_of(O)
    for r in turns(Br, O):
        mr = on_chip("mi", np.full(r.stop - r.start, -np.inf, Oc.dtype))
        lr = on_chip("li", np.zeros_like(mr))
        Or = on_chip("Oi", np.zeros((len(mr), O.shape[1]), Oc.dtype))
        for chunk in blocks(len(mc), len(O)):
            for _, mp in tiles(Br, part(mc, moved(r, chunk))):  # one turn
                np.maximum(mr, mp, out=mr)
        for chunk in blocks(len(mc), len(O)):
            mine = moved(r, chunk)
            for _, Op, lp, mp in tiles(Br, part(Oc, mine), part(lc, mine), part(mc, mine)):
                factor = exp(mp, mr)
                lr += factor * lp
                Or += factor[:, None] * Op
        O[r] = over(Or, lr)
        L[r] = shift(mr) + log(lr)


def moved(rows: slice, start: slice) -> slice:
    """Rows of a part, as the whole counts them."""
    return slice(start.start + rows.start, start.start + rows.stop)
