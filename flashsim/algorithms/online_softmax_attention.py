"""Online softmax without tiles of Q: a row never leaves the chip, and every row reads all of K."""

from typing import Any

from .flash2 import flash_attention_2


def online_softmax_attention(
    Q: Any, K: Any, V: Any, O: Any, L: Any,
    *, Br: int, Bc: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """Algorithm 3 of Milakov & Gimelshein 2018 (arXiv:1805.02867), carried on to O.

    One query at a time keeps its m, l and O on chip while all keys stream by: no N x N matrix, no
    second pass, and 2 N^2 d elements of K and V. What FlashAttention-2 adds is that Br queries
    share what is read, so this is its text with tiles of one query, whatever Br is.
    """
    flash_attention_2(Q, K, V, O, L, Br=1, Bc=Bc, scale=scale, mask=mask, drop=drop)
