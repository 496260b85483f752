"""The ladder: one file per algorithm, and the registry that the front door looks them up in.

A new variant is a file here, a closed form in `flashsim.cost.counts`, and a row in `ALGORITHMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..checks import bad
from ..cost import counts, counts_backward
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
from .flash3 import flash_attention_3, flash_attention_3_fp8
from .flash4 import flash_attention_4
from .linformer import linformer_attention
from .local import local_attention
from .online_softmax_attention import online_softmax_attention
from .paged import paged_attention
from .rabe_staats import rabe_staats_attention
from .resident_scores import resident_scores_attention
from .split_kv import split_kv_attention
from .square_tiles import square_tiles_attention
from .standard import standard_attention, standard_attention_backward
from .standard_unfused import standard_attention_unfused, standard_attention_unfused_backward


def _nothing_more(head: Head, sram: float, sram_bytes: float) -> dict[str, int]:
    return {}


def _whole(head: Head) -> tuple[int, int]:
    return head.Nq, head.Nk


@dataclass(frozen=True)
class Backward:
    """The backward pass of a row of the registry.

    run is called as run(*reads, *writes, Br=, Bc=, scale=, mask=, drop=, **more); count, needs,
    more, outer and longest as in `Algorithm`.
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
    rows: int | None = None
    longest: Callable[[Head], tuple[int, int]] = _whole


@dataclass(frozen=True)
class Algorithm:
    """A row of the registry.

    forward is called as forward(Q, K, V, *arrays, Br=, Bc=, scale=, mask=, drop=, **more) and count
    as count(head, Br=, Bc=, elide=, **more), with more = more(head, sram, sram_bytes). With
    Linformer's projections, E and F follow V.
    """

    title: str
    source: str
    forward: Callable[..., None]
    count: Callable[..., Cost]
    arrays: tuple[str, ...]  # what it writes, in the order of its signature; shapes in SHAPES
    needs: Callable[[Head, int, int], tuple[int, int]]  # the least budgets its r x c tiles run in
    outer: str  # "Q" or "K": whose tiles its outer loop holds, the long side; "both": neither is
    backward: Mapping[str, Backward]  # by the conventions under which it differs
    more: Callable[[Head, float, float], dict[str, int]] = _nothing_more
    conventions: tuple[str, ...] = ("literal",)  # under which its forward counts differ
    forward_of: str = ""  # another row with the same forward pass
    requires: str = ""  # the argument without which it does not run
    options: tuple[str, ...] = ()  # arguments that are its own, and may be left out
    exact: bool = True  # False: an approximation of attention over the keys that the masks leave
    usual: bool = True  # False: shown only where it is named
    wide_output: bool = False  # O is an accumulator in HBM: float32 there also for float16
    uncharged: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # where not as in SHAPES
    fast_tiles: tuple[int | None, int | None] = (512, 1024)  # on an unbounded chip; None: all
    rows: int | None = None  # of a query tile, where it is no choice
    longest: Callable[[Head], tuple[int, int]] = _whole  # queries and keys that tiles cut


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
    "Pdrop": ("Nq", "Nk"),
    "Z": ("Nq", "Nk"),
    "Kp": ("Nk", "d"),
    "Vp": ("Nk", "dv"),
    "dO": ("Nq", "dv"),
    "dQ": ("Nq", "d"),
    "dK": ("Nk", "d"),
    "dV": ("Nk", "dv"),
    "dPdrop": ("Nq", "Nk"),
    "dP": ("Nq", "Nk"),
    "dS": ("Nq", "Nk"),
    "D": ("Nq",),
    "R": ("Nq",),
    "Sc": ("query_chunk", "key_chunk"),
    "Pc": ("query_chunk", "key_chunk"),
    "Oc": ("chunks", "dv"),
    "lc": ("chunks",),
    "mc": ("chunks",),
    "Op": ("partial", "dv"),
    "Lp": ("partial",),
}

BITS = ("Z",)  # one byte an element, whatever the scores are

GRADIENTS = ("dQ", "dK", "dV")

_FLASH1 = Backward(
    run=flash_attention_1_backward,
    count=counts_backward.flash1_backward,
    reads=("Q", "K", "V", "O", "l", "m", "dO"),
    writes=GRADIENTS,
    needs=counts_backward.flash1_backward_tiles,
    outer="K",
    wide=("dQ",),
)
_FLASH2 = Backward(
    run=flash_attention_2_backward,
    count=counts_backward.flash2_backward,
    reads=("Q", "K", "V", "O", "L", "dO"),
    writes=(*GRADIENTS, "D"),
    needs=counts_backward.flash2_backward_tiles,
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
                count=counts_backward.standard_backward,
                reads=("Q", "K", "V", "P", "dO"),
                writes=("dP", "dS", *GRADIENTS),
                needs=counts_backward.standard_backward_tiles,
                outer="both",
                more=counts_backward.gradient_rows,
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
                count=counts_backward.two_kernel_backward,
                needs=counts_backward.two_kernel_backward_tiles,
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
        requires="block_mask",
        wide_output=True,
    ),
    "standard-unfused": Algorithm(
        title="standard attention, masking and dropout in kernels of their own",
        source="Dao et al. 2022, Algorithms 0 and 3; the kernels as frameworks have them",
        forward=standard_attention_unfused,
        count=counts.standard_unfused,
        arrays=("S", "P", "Z", "Pdrop", "O", "L"),
        needs=counts.standard_unfused_tiles,
        outer="Q",
        backward={
            "literal": Backward(
                run=standard_attention_unfused_backward,
                count=counts_backward.standard_unfused_backward,
                reads=("Q", "K", "V", "P", "Z", "Pdrop", "dO"),
                writes=("dPdrop", "dP", "dS", *GRADIENTS),
                needs=counts_backward.standard_unfused_backward_tiles,
                outer="both",
                more=counts_backward.gradient_rows,
                fast_tiles=(None, None),
            )
        },
        more=counts.softmax_rows,
        usual=False,
        uncharged=("L",),
        fast_tiles=(None, None),
    ),
    "split_kv": Algorithm(
        title="split-KV decoding",
        source="Flash-Decoding, Dao et al. 2023; a part by Dao 2023, Algorithm 1",
        forward=split_kv_attention,
        count=counts.split_kv,
        arrays=("Op", "Lp", "O", "L"),
        needs=counts.split_kv_tiles,
        outer="Q",
        backward={"literal": _FLASH2, "elided": _FLASH2},
        more=counts.parts,
        options=("splits",),
        usual=False,
    ),
    "paged": Algorithm(
        title="paged attention",
        source="Kwon et al. 2023; the loops of Dao 2023, Algorithm 1",
        forward=paged_attention,
        count=counts.flash2,
        arrays=("O", "L"),
        needs=counts.flash2_tiles,
        outer="Q",
        backward={},
        requires="block_tables",
        options=("seq_lens",),
        usual=False,
    ),
    "flash3": Algorithm(
        title="FlashAttention-3",
        source="Shah et al. 2024, Algorithm 2",
        forward=flash_attention_3,
        count=counts.flash3,
        arrays=("O", "L"),
        needs=counts.flash3_tiles,
        outer="Q",
        backward={"literal": _FLASH2, "elided": _FLASH2},
        usual=False,
    ),
    "flash3-fp8": Algorithm(
        title="FlashAttention-3 in FP8",
        source="Shah et al. 2024, section 3.3",
        forward=flash_attention_3_fp8,
        count=counts.flash3_fp8,
        arrays=("O", "L"),
        needs=counts.flash3_fp8_tiles,
        outer="Q",
        backward={},
        requires="fp8",
        options=("incoherent",),
        exact=False,
        usual=False,
    ),
    "flash4": Algorithm(
        title="FlashAttention-4",
        source="Zadouri et al. 2026, section 3.1",
        forward=flash_attention_4,
        count=counts.flash4,
        arrays=("O", "L", "R"),
        needs=counts.flash2_tiles,
        outer="Q",
        backward={},
        more=counts.exponentials,
        options=("exp_emulation", "rescale_threshold"),
        usual=False,
        uncharged=("R",),
    ),
    "rabe_staats": Algorithm(
        title="chunked attention",
        source="Rabe & Staats 2021, Figure 1",
        forward=rabe_staats_attention,
        count=counts.rabe_staats,
        arrays=("Sc", "Pc", "Oc", "lc", "mc", "O", "L"),
        needs=counts.rabe_staats_tiles,
        longest=counts.longest_chunk,
        outer="Q",
        backward={},
        more=counts.chunks,
        usual=False,
        uncharged=("L",),
        fast_tiles=(None, None),
    ),
    "online_softmax": Algorithm(
        title="online softmax, a query at a time",
        source="Milakov & Gimelshein 2018, Algorithm 3, with O",
        forward=online_softmax_attention,
        count=counts.online_softmax,
        arrays=("O", "L"),
        needs=counts.online_softmax_tiles,
        outer="K",
        backward={},
        usual=False,
        rows=1,
    ),
    "square-tiles": Algorithm(
        title="square tiles, for SRAM below d x d",
        source="Saha & Ye 2024, for a small cache",
        forward=square_tiles_attention,
        count=counts.square_tiles,
        arrays=("S", "O", "l", "m"),
        needs=counts.square_tiles_need,
        outer="both",
        backward={},
        usual=False,
    ),
    "resident-scores": Algorithm(
        title="a tile of scores resident, for SRAM below d x d",
        source="Dao et al. 2022, Algorithm 1, with Q, K, V and O a column at a time",
        forward=resident_scores_attention,
        count=counts.resident_scores,
        arrays=("O", "L"),
        needs=counts.resident_scores_need,
        outer="both",
        backward={},
        conventions=("literal", "elided"),
        usual=False,
        wide_output=True,
    ),
    "local": Algorithm(
        title="local attention",
        source="Rae & Razavi 2020; each window on its own, by standard attention",
        forward=local_attention,
        count=counts.local,
        arrays=("S", "P", "O", "L"),
        needs=counts.local_tiles,
        longest=counts.longest_window,
        outer="Q",
        backward={},
        more=counts.local_rows,
        requires="local_window",
        exact=False,
        usual=False,
        uncharged=("L",),
        shapes={"S": ("Nq", "near"), "P": ("Nq", "near")},
        fast_tiles=(None, None),
    ),
    "linformer": Algorithm(
        title="Linformer",
        source="Wang et al. 2020, equation 7",
        forward=linformer_attention,
        count=counts.linformer,
        arrays=("Kp", "Vp", "S", "P", "O", "L"),
        needs=counts.linformer_tiles,
        outer="Q",
        backward={},
        more=counts.softmax_rows,
        requires="projection",
        exact=False,
        usual=False,
        uncharged=("L",),
        fast_tiles=(None, None),
    ),
}


def check_required(algorithm: str, **given: Any) -> None:
    """Refuse a call without the argument that its algorithm cannot do without, or with another's.

    Raises
    ------
    ValueError
        If what it requires is missing, or what is another's own is given.
    """
    row = ALGORITHMS[algorithm]
    accepted = {
        "block_mask": "a block layout",
        "local_window": "the queries of a window",
        "projection": "k or (E, F)",
        "fp8": "the rows that share a scale",
        "block_tables": "the pages of each sequence",
    }
    if row.requires and given[row.requires] is None:
        raise bad(row.requires, None, f"{accepted[row.requires]}, for algorithm={algorithm!r}")
    for name, value in given.items():
        masks_for_all = name in ("block_mask", "local_window")
        if value is not None and not masks_for_all and name not in (row.requires, *row.options):
            shown = "given" if name in ("projection", "block_tables") else value
            raise bad(name, shown, f"None, for algorithm={algorithm!r}")


def backward_of(algorithm: str, convention: str = "literal") -> Backward:
    """The backward pass of a row of the registry.

    Raises
    ------
    ValueError
        If it has none.
    """
    rows = ALGORITHMS[algorithm].backward
    if not rows:
        some = ", ".join(repr(name) for name, row in ALGORITHMS.items() if row.backward)
        raise bad("algorithm", algorithm, f"one that has a backward pass: {some}")
    return rows.get(convention, rows["literal"])
