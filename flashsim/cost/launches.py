"""The loops of each algorithm as thread blocks run them: which tile is read or written when.

An algorithm is one kernel launch or several. A thread block of a launch has one tile of its outer
loop, or a whole head; what it does there is a `Loop`, the same loop that stands in
`flashsim.algorithms`. One block after the other, the accesses are those that a `Machine` logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..algorithms import SHAPES


class Access(NamedTuple):
    """A tile of one array is read or written."""

    array: str
    write: bool


def reads(*arrays: str) -> tuple[Access, ...]:
    """A tile of each is read."""
    return tuple(Access(name, False) for name in arrays)


def writes(*arrays: str) -> tuple[Access, ...]:
    """A tile of each is written."""
    return tuple(Access(name, True) for name in arrays)


@dataclass(frozen=True)
class Loop:
    """A loop over tiles of queries or keys, around one over the tiles of the other kind.

    Attributes
    ----------
    outer : str
        "Q" or "K": of what the outer loop takes tiles.
    before, inside, after : tuple of Access
        In each turn of the outer loop: first, for each tile of the inner loop, at last.
    needed : bool
        An outer tile that meets no inner one is left out.
    masked : bool
        The mask's rules leave out inner tiles.
    """

    outer: str
    before: tuple[Access, ...] = ()
    inside: tuple[Access, ...] = ()
    after: tuple[Access, ...] = ()
    needed: bool = False
    masked: bool = True

    @property
    def accesses(self) -> tuple[Access, ...]:
        """All that one turn with one inner tile touches."""
        return self.before + self.inside + self.after


@dataclass(frozen=True)
class Launch:
    """A kernel: the loops of a thread block, one after the other; a block has a tile or a head."""

    name: str
    loops: tuple[Loop, ...]
    whole_head: bool = False

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that it touches."""
        return tuple(dict.fromkeys(a.array for loop in self.loops for a in loop.accesses))


def _fills(*arrays: str) -> tuple[Loop, ...]:
    """Each array written by tiles, as `A.fill(0)` does."""
    return tuple(
        Loop("Q" if SHAPES[name][0] == "Nq" else "K", after=writes(name)) for name in arrays
    )


_FLASH1 = Launch(
    "flash1",
    (
        *_fills("O", "l", "m"),
        Loop("K", reads("K", "V"), reads("Q", "O", "l", "m") + writes("O", "l", "m"), needed=True),
    ),
    whole_head=True,
)
_FLASH1_BACKWARD = Launch(
    "flash1_backward",
    (
        *_fills("dQ", "dK", "dV"),
        Loop(
            "K",
            reads("K", "V"),
            reads("Q", "O", "dO", "dQ", "l", "m") + writes("dQ"),
            writes("dK", "dV"),
            needed=True,
        ),
    ),
    whole_head=True,
)
_FLASH2 = Launch("flash2", (Loop("Q", reads("Q"), reads("K", "V"), writes("O", "L")),))
_ROW_DOTS = Launch("D", (Loop("Q", before=reads("O", "dO"), after=writes("D")),))
_dense = partial(Loop, masked=False)  # standard attention skips nothing

LAUNCHES: dict[str, tuple[Launch, ...]] = {
    "standard": (
        Launch("scores", (_dense("Q", reads("Q"), reads("K") + writes("S")),)),
        Launch("softmax", (_dense("Q", (), reads("S")), _dense("Q", (), writes("P")))),
        Launch("values", (_dense("Q", (), reads("V", "P"), writes("O")),)),
    ),
    "flash1": (_FLASH1,),
    "block_sparse": (_FLASH1,),
    "flash2": (_FLASH2,),
    "flash2-two-kernel": (_FLASH2,),
}
"""The forward pass of each algorithm, in the literal convention; a row of S fits on the chip."""

BACKWARD_LAUNCHES: dict[str, tuple[Launch, ...]] = {
    "standard": (
        Launch("dV", (_dense("K", (), reads("dO", "P"), writes("dV")),)),
        Launch("dP", (_dense("Q", reads("dO"), reads("V") + writes("dP")),)),
        Launch(
            "dS",
            tuple(_dense("Q", (), part) for part in (reads("P"), reads("dP"), writes("dS"))),
        ),
        Launch("dQ", (_dense("Q", (), reads("K", "dS"), writes("dQ")),)),
        Launch("dK", (_dense("K", (), reads("Q", "dS"), writes("dK")),)),
    ),
    "flash1": (_FLASH1_BACKWARD,),
    "block_sparse": (_FLASH1_BACKWARD,),
    "flash2": (
        _ROW_DOTS,
        Launch("zeros", _fills("dQ")),
        Launch(
            "flash2_backward",
            (
                Loop(
                    "K",
                    reads("K", "V"),
                    reads("Q", "dO", "dQ", "L", "D") + writes("dQ"),
                    writes("dK", "dV"),
                ),
            ),
        ),
    ),
    "flash2-two-kernel": (
        _ROW_DOTS,
        Launch(
            "dKdV",
            (Loop("K", reads("K", "V"), reads("Q", "dO", "L", "D"), writes("dK", "dV")),),
        ),
        Launch("dQ", (Loop("Q", reads("Q", "dO", "L", "D"), reads("K", "V"), writes("dQ")),)),
    ),
}
"""The backward pass of each algorithm, in the literal convention."""
