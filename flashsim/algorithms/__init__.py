"""The ladder: one file per algorithm, and the registry that the front door looks them up in.

A new variant is a file here, a closed form in `flashsim.cost.counts`, and a row in `ALGORITHMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..cost import counts
from ..cost.counts import Cost, Head
from .block_sparse import (
    block_sparse_attention,
    block_sparse_attention_backward,
    block_sparse_attention_backward_published,
)
from .flash1 import (
    flash_attention_1,
    flash_attention_1_backward,
    flash_attention_1_backward_published,
)
from .flash2 import (
    flash_attention_2,
    flash_attention_2_backward,
    flash_attention_2_backward_two_kernels,
)
from .standard import standard_attention, standard_attention_backward


def _nothing_more(head: Head, sram: float, sram_bytes: float) -> dict[str, int]:
    return {}


@dataclass(frozen=True)
class Backward:
    """The backward pass of a row of the registry.

    run is called as run(*reads, *writes, Br=, Bc=, scale=, mask=, drop=, **more); count, needs and
    more as in `Algorithm`; outer may also be "both".
    """

    run: Callable[..., None]
    count: Callable[..., Cost]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    needs: Callable[[Head, int, int], tuple[int, int]]
    outer: str
    more: Callable[[Head, float, float], dict[str, int]] = _nothing_more
    wide: tuple[str, ...] = ()  # gradients that are accumulators in HBM
    fast_tiles: tuple[int | None, int | None] = (256, 512)


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
    backward: Mapping[str, Backward]  # by the conventions under which it differs
    more: Callable[[Head, float, float], dict[str, int]] = _nothing_more
    conventions: tuple[str, ...] = ("literal",)  # under which its forward counts differ
    forward_of: str = ""  # another row with the same forward pass
    needs_layout: bool = False  # runs only with a block layout
    wide_output: bool = False  # O is an accumulator in HBM: float32 there also for float16
    uncharged: tuple[str, ...] = ()
    fast_tiles: tuple[int | None, int | None] = (512, 1024)  # on an unbounded chip; None: all


SHAPES = {
    "Q": ("Nq", "d"),
    "K": ("Nk", "d"),
    "V": ("Nk", "dv"),
    "O": ("Nq", "dv"),
    "L": ("Nq",),
    "l": ("Nq",),
    "m": ("Nq",),
    "S": ("Nq", "Nk"),
    "P": ("Nq", "Nk"),
    "dO": ("Nq", "dv"),
    "dQ": ("Nq", "d"),
    "dK": ("Nk", "d"),
    "dV": ("Nk", "dv"),
    "dP": ("Nq", "Nk"),
    "dS": ("Nq", "Nk"),
    "D": ("Nq",),
}

GRADIENTS = ("dQ", "dK", "dV")

_FLASH1 = Backward(
    run=flash_attention_1_backward,
    count=counts.flash1_backward,
    reads=("Q", "K", "V", "O", "l", "m", "dO"),
    writes=GRADIENTS,
    needs=counts.flash1_backward_tiles,
    outer="K",
    wide=("dQ",),
)
_FLASH2 = Backward(
    run=flash_attention_2_backward,
    count=counts.flash2_backward,
    reads=("Q", "K", "V", "O", "L", "dO"),
    writes=(*GRADIENTS, "D"),
    needs=counts.flash2_backward_tiles,
    outer="K",
    wide=("dQ",),
)

ALGORITHMS = {
    "standard": Algorithm(
        title="standard attention",
        source="Dao et al. 2022, Algorithm 0",
        forward=standard_attention,
        count=counts.standard,
        arrays=("S", "P", "O", "L"),
        needs=counts.standard_tiles,
        outer="Q",
        backward={
            "literal": Backward(
                run=standard_attention_backward,
                count=counts.standard_backward,
                reads=("Q", "K", "V", "P", "dO"),
                writes=("dP", "dS", *GRADIENTS),
                needs=counts.standard_backward_tiles,
                outer="both",
                more=counts.gradient_rows,
                fast_tiles=(None, None),
            )
        },
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
        backward={
            "literal": _FLASH1,
            "elided": replace(
                _FLASH1, run=flash_attention_1_backward_published, writes=(*GRADIENTS, "D")
            ),
        },
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
        backward={"literal": _FLASH2, "elided": _FLASH2},
    ),
    "flash2-two-kernel": Algorithm(
        title="FlashAttention-2, two-kernel backward",
        source="Dao 2023, Algorithm 1; the backward's loops as in Triton's tutorial",
        forward_of="flash2",
        forward=flash_attention_2,
        count=counts.flash2,
        arrays=("O", "L"),
        needs=counts.flash2_tiles,
        outer="Q",
        backward={
            "literal": replace(
                _FLASH2,
                run=flash_attention_2_backward_two_kernels,
                count=counts.two_kernel_backward,
                needs=counts.two_kernel_backward_tiles,
                outer="both",
                wide=(),
            )
        },
    ),
    "block_sparse": Algorithm(
        title="block-sparse FlashAttention",
        source="Dao et al. 2022, Algorithm 5",
        forward=block_sparse_attention,
        count=counts.flash1,
        arrays=("O", "l", "m"),
        needs=counts.flash1_tiles,
        outer="K",
        backward={
            "literal": replace(_FLASH1, run=block_sparse_attention_backward),
            "elided": replace(
                _FLASH1,
                run=block_sparse_attention_backward_published,
                writes=(*GRADIENTS, "D"),
            ),
        },
        conventions=("literal", "elided"),
        needs_layout=True,
        wide_output=True,
    ),
}
