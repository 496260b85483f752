"""The ladder: one file per algorithm, and the registry that the front door looks them up in.

A new variant is a file here, a closed form in `flashsim.cost.counts`, and a row in `ALGORITHMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cost import counts
from ..cost.counts import Cost, Head
from .flash1 import flash_attention_1
from .flash2 import flash_attention_2
from .standard import standard_attention


def _nothing_more(head: Head, sram: float, sram_bytes: float) -> dict[str, int]:
    return {}


@dataclass(frozen=True)
class Algorithm:
    """A row of the registry.

    forward is called as forward(Q, K, V, *arrays, Br=, Bc=, scale=, mask=, drop=, **more) and count
    as count(head, Br=, Bc=, elide=, **more), with more = more(head, sram, sram_bytes).
    """

    title: str
    source: str
    forward: Callable[..., None]
    count: Callable[..., Cost]
    arrays: tuple[str, ...]  # what it writes, in the order of its signature; shapes in SHAPES
    needs: Callable[[Head, int, int], tuple[int, int]]  # (elements, bytes) its r x c tiles take
    outer: str  # "Q" or "K": whose tiles its outer loop holds; that side is the long one
    more: Callable[[Head, float, float], dict[str, int]] = _nothing_more
    conventions: tuple[str, ...] = ("literal",)
    wide_output: bool = False  # O is an accumulator in HBM: float32 there also for float16
    uncharged: tuple[str, ...] = ()
    fast_tiles: tuple[int | None, int | None] = (256, 512)  # on an unbounded chip; None: all


SHAPES = {
    "O": ("Nq", "dv"),
    "L": ("Nq",),
    "l": ("Nq",),
    "m": ("Nq",),
    "S": ("Nq", "Nk"),
    "P": ("Nq", "Nk"),
}

ALGORITHMS = {
    "standard": Algorithm(
        title="standard attention",
        source="Dao et al. 2022, Algorithm 0",
        forward=standard_attention,
        count=counts.standard,
        arrays=("S", "P", "O", "L"),
        needs=counts.standard_tiles,
        outer="Q",
        more=counts.softmax_rows,
        uncharged=("L",),
        fast_tiles=(None, None),
    ),
    "flash1": Algorithm(
        title="FlashAttention",
        source="Dao et al. 2022, Algorithms 1 and 2",
        forward=flash_attention_1,
        count=counts.flash1,
        arrays=("O", "l", "m"),
        needs=counts.flash1_tiles,
        outer="K",
        conventions=("literal", "elided"),
        wide_output=True,
    ),
    "flash2": Algorithm(
        title="FlashAttention-2",
        source="Dao 2023, Algorithm 1",
        forward=flash_attention_2,
        count=counts.flash2,
        arrays=("O", "L"),
        needs=counts.flash2_tiles,
        outer="Q",
    ),
}
