"""flashsim: what FlashAttention does, exactly, and what it costs, counted.

>>> import numpy as np, flashsim as fs
>>> rng = np.random.default_rng(0)
>>> q, k, v = rng.standard_normal((3, 128, 16), dtype=np.float32)
>>> out = fs.attention(q, k, v, algorithm="flash2", sram=4096)
>>> out.output.shape, out.tiles
((128, 16), (71, 16))
>>> out.traffic.total_elements == fs.io_cost("flash2", N=128, d=16, Br=71, Bc=16).total_elements
True
"""

from .algorithms import ALGORITHMS
from .attention import Attention, attention, scaled_dot_product_attention
from .cost.io import io_cost
from .cost.tiles import tile_sizes
from .memory import SramOverflow

__all__ = [
    "ALGORITHMS",
    "Attention",
    "SramOverflow",
    "attention",
    "io_cost",
    "scaled_dot_product_attention",
    "tile_sizes",
]
__version__ = "0.1.0"
