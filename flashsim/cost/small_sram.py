"""Who moves the fewest elements when SRAM is small: M beside d x d.

FlashAttention-2 keeps row tiles of Q and O, so with little room they become few rows and K and V
are read over and over: about 4 N^2 d^2 / M elements. Two strategies keep a tile of scores instead
and stream everything else by, a column at a time, so that M buys a tile of sqrt(M) x sqrt(M):

- "square-tiles" writes S once and reads it back, about 4 N^2 d / sqrt(M) + N^2;
- "resident-scores" writes no N x N matrix but O after each key tile: with Br = sqrt(2M/3) about
  2 sqrt(6) N^2 d / sqrt(M).

Saha & Ye 2024 (arXiv:2402.07443) show that the two regimes meet at M of the order of d^2, and that
neither can be beaten by more than a constant. Each strategy has its optimal tiles here, and the
published kernel's convention (an initial O costs nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS
from ..attention import attention
from ..checks import amount, choice, flag, integer
from ..masks import Mask
from .counts import Head
from .io import expected_cost, io_cost
from .tiles import tile_sizes

STRATEGIES = ("flash2", "square-tiles", "resident-scores")
CONVENTION = "elided"
RATIOS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 2.0, 4.0)  # M / d^2
STEPS = 64  # crossovers are looked for at M = d^2 n / STEPS, from d^2 / 2 to 3 d^2 / 2


@dataclass(frozen=True)
class Point:
    """One strategy at one M, for one head.

    Br, Bc and total_elements are None where not even the smallest tiles fit in M elements.
    executed_elements is what a run moved within that budget, None where none was made; held says
    whether it moved, array by array, what the closed form says.
    """

    algorithm: str
    N: int
    d: int
    M: int
    Br: int | None = None
    Bc: int | None = None
    total_elements: int | None = None
    executed_elements: int | None = None
    held: bool = True


def point(algorithm: str, *, N: int, d: int, M: int, execute: bool = False) -> Point:
    """A strategy with its optimal tiles for M; also run, if `execute`.

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable.
    """
    choice("algorithm", algorithm, STRATEGIES)
    N, d, M = integer("N", N, 1), integer("d", d, 1), integer("M", M, 0)
    if ALGORITHMS[algorithm].needs(Head(Mask(N, N), d, d), 1, 1)[0] > M:
        return Point(algorithm, N, d, M)
    Br, Bc = tile_sizes(M, d, "optimal", algorithm, N=N)
    cost = io_cost(algorithm, N=N, d=d, Br=Br, Bc=Bc, convention=CONVENTION)
    executed, held = None, True
    if flag("execute", execute):
        q, k, v = np.random.default_rng(0).standard_normal((3, N, d), np.float32)
        how: dict[str, Any] = {"sram": M, "convention": CONVENTION}
        out = attention(q, k, v, algorithm=algorithm, tiles=(Br, Bc), **how)
        same = expected_cost(out, q, k, v, **how)
        executed = out.traffic.total_elements
        held = (out.traffic.reads, out.traffic.writes) == (same.reads, same.writes)
        held = held and executed == cost.total_elements
    return Point(algorithm, N, d, M, Br, Bc, cost.total_elements, executed, held)


def compare(
    N: int,
    d: int,
    ratios: Iterable[float] = RATIOS,
    *,
    execute: bool = True,
    on_step: Callable[[str], None] = lambda what: None,
) -> list[list[Point]]:
    """The strategies, in their order, at M = ratio d^2 for each ratio."""
    d, found = integer("d", d, 1), []
    for ratio in ratios:
        M = round(amount("ratios", ratio) * d * d)
        on_step(f"M = {M}")
        found.append([point(name, N=N, d=d, M=M, execute=execute) for name in STRATEGIES])
    return found


def winner(points: Iterable[Point]) -> str | None:
    """The strategy that moves the fewest elements; None where none fits."""
    fitting = [p for p in points if p.total_elements is not None]
    return min(fitting, key=lambda p: p.total_elements or 0).algorithm if fitting else None


def crossover(N: int, d: int) -> float:
    """M / d^2 from which on FlashAttention-2 moves the fewest elements, by the closed forms."""
    d = integer("d", d, 1)
    for n in range(3 * STEPS // 2, STEPS // 2, -1):
        M = d * d * n // STEPS
        if winner(point(name, N=N, d=d, M=M) for name in STRATEGIES) != "flash2":
            return (n + 1) / STEPS
    return 0.5
