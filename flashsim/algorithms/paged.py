"""Paged attention: keys and values in pages anywhere in memory, found through a table."""

from typing import Any

from ..memory import paged
from .flash2 import flash_attention_2


def paged_attention(
    Q: Any, K: Any, V: Any, O: Any, L: Any,
    *, Br: int, Bc: int, table: Any, page: int, scale: float, mask: Any, drop: Any,
) -> None:  # fmt: skip
    """PagedAttention (Kwon et al. 2023, arXiv:2309.06180): FlashAttention-2 through a block table.

    K (pages page, d) and V (pages page, dv) hold the pages of all sequences, `page` rows each. Key
    n of this one is row n mod page of page table[n div page]; the mask says how many keys there
    are. The other arguments are those of `flash_attention_2`, which never sees a page.
    """
    K, V = (paged(A, table, page, mask.Nk) for A in (K, V))
    flash_attention_2(Q, K, V, O, L, Br=Br, Bc=Bc, scale=scale, mask=mask, drop=drop)
