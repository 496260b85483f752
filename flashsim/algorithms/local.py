"""Local attention: a window of queries sees the keys of its own window and of those beside it."""

from typing import Any

from ..memory import blocks, part
from .standard import standard_attention


def local_attention(
    Q: Any, K: Any, V: Any, S: Any, P: Any, O: Any, L: Any,
    *, w: int, Br: int, Bc: int, Bs: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Standard attention, a window of w queries at a time, over at most 3 w keys.

    Query i sees key j if |i div w - j div w| <= 1 and the mask leaves it: the local attention of
    Rae & Razavi 2020 (ACL 2020), as public code has it; with a causal mask, the window before and
    its own. S and P (Nq, min(3w, Nk)) hold a row's scores from the first key that its window sees.
    The other arguments are those of `standard_attention`.
    """
    for i in blocks(len(Q), w):
        j = slice(max(0, i.start - w), min(i.stop + w, len(K)))
        here = slice(0, j.stop - j.start)
        standard_attention(
            part(Q, i), part(K, j), part(V, j), part(S, i, here), part(P, i, here),
            part(O, i), part(L, i),
            Br=Br, Bc=Bc, Bs=Bs, scale=scale, mask=mask.part(i, j), drop=drop.part(i, j),
        )  # fmt: skip
