"""Tile rules: how many rows and columns a tile has when the chip holds M elements.

- "paper": Bc = ceil(M / 4d), Br = min(Bc, d), as Dao et al. 2022 print it; for algorithms whose
  outer loop holds queries the roles are swapped. Theta(N^2 d^2 / M) is stated under this rule.
  With S, l and m counted it does not fit in M for most M < 8 d (d + 1).
- "strict": the largest tiles of that shape (one side long, the other at most d) that do fit. A
  backward pass has its own; where both sides are outer loops in turn, its tiles are square.
- "optimal": the tiles that move the fewest elements of all that fit; it needs N.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ..algorithms import ALGORITHMS, Algorithm, Backward
from ..checks import bad, choice, clamped, flag, integer
from ..masks import Mask
from .counts import Head

RULES = ("paper", "strict", "optimal")


def tile_sizes(
    M: int,
    d: int,
    rule: str = "strict",
    algorithm: str = "flash2",
    N: int | None = None,
    dv: int | None = None,
    backward: bool = False,
) -> tuple[int, int]:
    """(Br, Bc), the rows of a query tile and of a key tile, for a chip of M elements.

    Parameters
    ----------
    M : int
        SRAM in elements.
    d, dv : int
        Width of Q and K, and of V (default: d).
    rule : {"strict", "paper", "optimal"}
        See the module. "paper" may give tiles that do not fit in M.
    algorithm : str
        A name in `flashsim.ALGORITHMS`.
    N : int, optional
        Sequence length: tiles are not longer. "optimal" needs it.
    backward : bool
        For the backward pass, whose tiles are more.

    Raises
    ------
    ValueError
        If no tile fits, or an argument is out of range.
    """
    M, d = integer("M", M, 1), integer("d", d, 1)
    dv = d if dv is None else integer("dv", dv, 1)
    N = None if N is None else integer("N", N, 1)
    forward = ALGORITHMS[choice("algorithm", algorithm, ALGORITHMS)]
    row = forward.backward["literal"] if flag("backward", backward) else forward
    choice("rule", rule, RULES)
    length = M if N is None else N
    head = Head(Mask(length, length), d, dv)
    if rule == "paper":
        long = -(-M // (4 * d))
        return _oriented(row, min(long, length), min(long, d, length))
    if rule == "strict":
        return strict(row, head, M, name="M")
    if N is None:
        raise bad("N", N, 'the sequence length: rule="optimal" minimises over it')
    return optimal(row, head, M)


def strict(
    row: Algorithm | Backward,
    head: Head,
    sram: float = math.inf,
    sram_bytes: float = math.inf,
    name: str = "sram",
) -> tuple[int, int]:
    """The largest tiles of the paper's shape with everything resident; see `tile_sizes`."""
    longest = max(1, head.Nq, head.Nk)
    fits = _fits(row, head, sram, sram_bytes, name)
    most = longest if row.outer == "both" else head.d
    long = _largest(lambda n: fits(n, min(n, most)), longest)
    return _oriented(row, long, min(long, most))


def optimal(
    row: Algorithm | Backward, head: Head, sram: float = math.inf, sram_bytes: float = math.inf
) -> tuple[int, int]:
    """The fewest elements moved, then the largest tiles that move as few.

    Where traffic depends only on how many tiles the long side has, the short side is first 1, to
    make the long one as long as it can be; then the long side shrinks to the shortest that needs no
    more tiles, and the short one takes the room. Where it depends on both sides, every number of
    turns of the one is tried with the fewest of the other that fit.
    """
    N = max(1, head.Nq, head.Nk)
    fits = _fits(row, head, sram, sram_bytes, "M")

    def shortest(n: int) -> int:
        return -(-N // -(-N // n))

    longest = shortest(_largest(lambda n: fits(n, 1), N))
    if row.outer != "both":
        return _oriented(row, longest, _largest(lambda n: fits(longest, n), N))
    more = row.more(head, sram, sram_bytes)

    def moved(tiles: tuple[int, int]) -> int:
        return row.count(head, Br=tiles[0], Bc=tiles[1], elide=False, **more).total_elements

    candidates, long = [], longest
    while long:
        short = shortest(_largest(partial(fits, long), N))
        candidates.append(_oriented(row, long, short))
        long = shortest(long - 1) if long > 1 else 0
    return min(candidates, key=moved)


def _oriented(row: Algorithm | Backward, long: int, short: int) -> tuple[int, int]:
    return (long, short) if row.outer == "Q" else (short, long)


def _fits(
    row: Algorithm | Backward, head: Head, sram: float, sram_bytes: float, name: str
) -> Callable[[int, int], bool]:
    def fits(long: int, short: int) -> bool:
        elements, size = row.needs(head, *_oriented(row, long, short))
        return elements <= sram and size <= sram_bytes

    if not fits(1, 1):
        elements, size = row.needs(head, 1, 1)
        smallest = f", the smallest tiles at d={head.d}"
        if sram < math.inf:
            raise bad(name, sram, f"at least {elements} elements{smallest}")
        raise bad("sram_bytes", sram_bytes, f"at least {size} bytes{smallest}")
    return fits


def _largest(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest n <= at_most with fits(n); fits is true at 1 and monotone."""
    low, high = 1, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def default_tiles(
    row: Algorithm | Backward, head: Head, sram: float = math.inf, sram_bytes: float = math.inf
) -> tuple[int, int]:
    """What `attention` takes: "strict" on a bounded chip, else what is fast in NumPy."""
    if sram < math.inf or sram_bytes < math.inf:
        return clamped(strict(row, head, sram, sram_bytes), head.Nq, head.Nk)
    fast = zip(row.fast_tiles, (head.Nq, head.Nk), strict=True)
    return clamped(
        tuple(everything if n is None else n for n, everything in fast), head.Nq, head.Nk
    )
