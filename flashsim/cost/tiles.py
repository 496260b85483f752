"""Tile rules: how many rows and columns a tile has when the chip holds M elements.

- "paper": Bc = ceil(M / 4d), Br = min(Bc, d), as Dao et al. 2022 print it; for algorithms whose
  outer loop holds queries the roles are swapped. Theta(N^2 d^2 / M) is stated under this rule.
  With S, l and m counted it does not fit in M for most M < 8 d (d + 1).
- "strict": the largest tiles of that shape (one side long, the other at most d) that do fit. A
  backward pass has its own; where both sides are outer loops in turn, its tiles are square.
- "optimal": the tiles that move the fewest elements of all that fit; it needs N.
- "hardware": the same among tiles whose sides are multiples of 16, as matrix units take them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ..algorithms import ALGORITHMS, Algorithm, Backward, backward_of
from ..checks import bad, choice, clamped, flag, integer
from ..masks import Mask
from .counts import Head

RULES = ("paper", "strict", "optimal", "hardware")
STEPS = {"optimal": 1, "hardware": 16}  # rules that search: sides are multiples of this


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
    rule : {"strict", "paper", "optimal", "hardware"}
        See the module. "paper" may give tiles that do not fit in M.
    algorithm : str
        A name in `flashsim.ALGORITHMS`.
    N : int, optional
        Sequence length: tiles are not longer; those of "hardware" by less than 16. "optimal" and
        "hardware" need it.
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
    row = backward_of(algorithm) if flag("backward", backward) else forward
    choice("rule", rule, RULES)
    length = M if N is None else N
    head = Head(Mask(length, length), d, dv)
    if rule in STEPS and N is None:
        raise bad("N", N, f'the sequence length: rule="{rule}" minimises over it')
    if rule in STEPS and not _told_by_sizes(forward):
        accepted = (
            f"'paper' or 'strict' for {algorithm!r}, whose traffic its {forward.requires} says"
        )
        raise bad("rule", rule, accepted)
    return _by_rule(row, head, M, rule)


def paper(row: Algorithm | Backward, head: Head, M: int) -> tuple[int, int]:
    """Line 1 of Algorithm 1 of Dao et al. 2022, not longer than the head; see `tile_sizes`."""
    length = max(1, head.Nq, head.Nk)
    long = -(-M // (4 * head.d))
    return _oriented(row, min(long, length), min(long, head.d, length))


def strict(
    row: Algorithm | Backward,
    head: Head,
    sram: float = math.inf,
    sram_bytes: float = math.inf,
    name: str = "sram",
    near: int = 0,
) -> tuple[int, int]:
    """The largest tiles of the paper's shape with everything resident; see `tile_sizes`.

    near: a guess at the longer side, such as that of another N, from which the search starts.
    """
    longest = max(1, *row.longest(head))
    fits = _fits(row, head, sram, sram_bytes, name)
    most = longest if row.outer == "both" else head.d
    long = _largest(lambda n: fits(n, min(n, most)), longest, near)
    return _oriented(row, long, min(long, most))


def optimal(
    row: Algorithm | Backward,
    head: Head,
    sram: float = math.inf,
    sram_bytes: float = math.inf,
    step: int = 1,
) -> tuple[int, int]:
    """The fewest elements moved, then the largest tiles that move as few; sides are n * step.

    A longer side never moves more. Where traffic depends on the long side alone, the other is as
    short as it can be, to make it as long as it can be. Where it depends on both, no long side of
    low to high moves less than the longest of them would beside the short side that only the
    shortest leaves room for. Such spans are halved, the most promising first, until one's shortest
    moves as little as that: what is left cannot move less.

    Then the long side shrinks as far as it needs no more turns, and the short one takes the room.
    """
    fits = _fits(row, head, sram, sram_bytes, "M", step)
    Nq, Nk = row.longest(head)
    sides = (Nq, Nk) if row.outer == "Q" else (Nk, Nq)
    Nlong, Nshort = (max(1, -(-N // step)) for N in sides)  # lengths, as tiles below, in steps
    longest = _largest(lambda n: fits(n, 1), Nlong)
    broadest = _largest(partial(fits, 1), Nshort)
    more = row.more(head, sram, sram_bytes)

    def tiles(long: int, short: int) -> tuple[int, int]:
        return _oriented(row, step * long, step * short)

    @cache
    def moved(long: int, short: int) -> int:
        Br, Bc = tiles(long, short)
        return row.count(head, Br=Br, Bc=Bc, elide=False, **more).total_elements

    @cache
    def beside(long: int) -> int:
        return _largest(partial(fits, long), broadest)

    def span(low: int, high: int) -> tuple[int, int, int, int]:
        return moved(high, beside(low)), -high, low, high

    spans = [span(longest, longest) if row.outer != "both" else span(1, longest)]
    while True:
        fewest, _, low, high = heapq.heappop(spans)
        if moved(low, beside(low)) == fewest:
            break
        middle = (low + high) // 2
        for part in (span(low, middle), span(middle + 1, high)):
            heapq.heappush(spans, part)

    even = _even(Nlong, low)
    long = even if moved(even, beside(even)) == fewest else low
    short = beside(long)
    if row.outer == "both" and moved(long, _even(Nshort, short)) == fewest:
        short = _even(Nshort, short)
    return tiles(long, short)


def _even(N: int, n: int) -> int:
    """The shortest tiles that take no more turns over N than those of n."""
    return -(-N // -(-N // n))


@dataclass(frozen=True)
class Choice:
    """The tiles of one rule for one pass, and what they cost one head.

    Attributes
    ----------
    algorithms : tuple of str
        Those whose tiles, needs and counts these are.
    backward : bool
        Of which pass.
    rule : str
        Of RULES.
    Br, Bc : int
        Rows of a query and of a key tile.
    need_elements : int
        The fewest on chip that the tiles run with; where rows of S fit, a run takes more of them.
    moved_elements : int
        Read and written, as printed ("literal"), where M elements of a row of S fit on chip.
    """

    algorithms: tuple[str, ...]
    backward: bool
    rule: str
    Br: int
    Bc: int
    need_elements: int
    moved_elements: int


def choices(N: int, d: int, M: int, dv: int | None = None) -> Iterator[Choice]:
    """The tiles of every rule for every pass in the registry, dense attention of one head.

    Passes with the same tiles and counts come once. Rules under which no tile fits in M are left
    out, and algorithms whose traffic N, d and M do not tell (local attention, Linformer).

    Raises
    ------
    ValueError, TypeError
        If an argument is no positive integer.
    """
    N, d, M = integer("N", N, 1), integer("d", d, 1), integer("M", M, 1)
    return _choices(Head(Mask(N, N), d, d if dv is None else integer("dv", dv, 1)), M)


def _choices(head: Head, M: int) -> Iterator[Choice]:
    rows: dict[Any, tuple[Algorithm | Backward, bool, list[str]]] = {}
    for backward in (False, True):
        for name, forward in ALGORITHMS.items():
            if not _told_by_sizes(forward) or (backward and not forward.backward):
                continue
            row = backward_of(name) if backward else forward
            key = row.count, row.needs, row.outer
            rows.setdefault(key, (row, backward, []))[2].append(name)
    for row, backward, names in rows.values():
        more = row.more(head, M, math.inf)
        for rule in RULES:
            try:
                Br, Bc = _by_rule(row, head, M, rule)
            except ValueError:
                continue
            cost = row.count(head, Br=Br, Bc=Bc, elide=False, **more)
            need = row.needs(head, Br, Bc)[0]
            yield Choice(tuple(names), backward, rule, Br, Bc, need, cost.total_elements)


def papers_overflow(M: int, d: int) -> int:
    """Elements by which the paper's tiles exceed M, at any N; below 0 where they leave room.

    FlashAttention's; with the roles of the sides swapped its successor's are as large.
    """
    M, d = integer("M", M, 1), integer("d", d, 1)
    row, head = ALGORITHMS["flash1"], Head(Mask(M, M), d, d)
    return row.needs(head, *paper(row, head, M))[0] - M


def _told_by_sizes(forward: Algorithm) -> bool:
    """Whether N, d and M say what it moves; a block layout is left to the call."""
    return forward.requires in ("", "block_mask", "fp8", "block_tables")


def _by_rule(row: Algorithm | Backward, head: Head, M: int, rule: str) -> tuple[int, int]:
    if rule == "paper":
        return paper(row, head, M)
    if rule == "strict":
        return strict(row, head, M, name="M")
    return optimal(row, head, M, step=STEPS[rule])


def _oriented(row: Algorithm | Backward, long: int, short: int) -> tuple[int, int]:
    Br, Bc = (long, short) if row.outer == "Q" else (short, long)
    return row.rows or Br, Bc


def usable(row: Algorithm | Backward, tiles: tuple[int, int], head: Head) -> tuple[int, int]:
    """Tiles no longer than the head, and as tall as they must be where that is no choice."""
    Br, Bc = clamped(tiles, head.Nq, head.Nk)
    return row.rows or Br, Bc


def _fits(
    row: Algorithm | Backward,
    head: Head,
    sram: float,
    sram_bytes: float,
    name: str,
    step: int = 1,
) -> Callable[[int, int], bool]:
    """Whether tiles of (long, short) steps fit.

    Raises
    ------
    ValueError
        If the smallest do not.
    """

    def fits(long: int, short: int) -> bool:
        elements, size = row.needs(head, *_oriented(row, step * long, step * short))
        return elements <= sram and size <= sram_bytes

    if not fits(1, 1):
        elements, size = row.needs(head, step, step)
        smallest = f", the smallest tiles at d={head.d}"
        if step > 1:
            smallest = f", the smallest tiles of multiples of {step} at d={head.d}"
        if sram < math.inf:
            raise bad(name, sram, f"at least {elements} elements{smallest}")
        raise bad("sram_bytes", sram_bytes, f"at least {size} bytes{smallest}")
    return fits


def _largest(fits: Callable[[int], bool], at_most: int, near: int = 0) -> int:
    """The largest n <= at_most with fits(n); fits is true at 1 and monotone."""
    low, high = 1, at_most
    if 1 < near <= at_most and fits(near):
        low = near
        if near < at_most and not fits(near + 1):
            high = near
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def default_tiles(
    row: Algorithm | Backward, head: Head, sram: float = math.inf, sram_bytes: float = math.inf
) -> tuple[int, int]:
    """What `attention` takes: "strict" on a bounded chip, else what is fast in NumPy."""
    if sram < math.inf or sram_bytes < math.inf:
        return usable(row, strict(row, head, sram, sram_bytes), head)
    fast = zip(row.fast_tiles, (head.Nq, head.Nk), strict=True)
    Br, Bc = (everything if n is None else n for n, everything in fast)
    return usable(row, (Br, Bc), head)
