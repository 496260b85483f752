"""Block-sparse FlashAttention: Algorithm 5 of Dao et al. 2022 (arXiv:2205.14135).

It is Algorithm 1 with one condition more, that the block's mask is not zero. That condition already
stands in the loop header: `where=mask.column(j)` asks the mask, and a mask with a block layout
leaves out the zero blocks, forward and backward (Algorithm 4 changes in the same way). So the text
is that of `flash1.py`.

What is skipped is missing from the softmax: an approximation of dense attention, and exact for its
own mask. `flashsim.layouts.weight_outside` says how much weight a layout drops.
"""

from .flash1 import flash_attention_1 as block_sparse_attention
from .flash1 import flash_attention_1_backward as block_sparse_attention_backward
from .flash1 import (
    flash_attention_1_backward_published as block_sparse_attention_backward_published,
)

__all__ = [
    "block_sparse_attention",
    "block_sparse_attention_backward",
    "block_sparse_attention_backward_published",
]
