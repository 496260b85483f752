"""Theta(N^2 d^2 / M), verified: how traffic grows with N, d and M under the paper's tile rule.

Three grids cross in one base point; along each, one of N, d, M goes by factors of two towards more
traffic. The first points of a grid, where a run is cheap, are executed and must move exactly what
the closed form says; the rest is the closed form alone. The exponent is the least-squares slope of
log(traffic) over the last two doublings.

The theorem is about N d >> M: at every grid point the compulsory traffic, reading Q, K, V and
writing O once, is under 5 % of the total. The chip is unbounded: the paper's tiles do not fit in M
elements once S, l and m are counted, and the tiles are given.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..algorithms import ALGORITHMS
from ..attention import attention
from .io import io_cost
from .tiles import tile_sizes

BASE = {"N": 1536, "d": 32, "M": 2048}
GRIDS = {
    "N": (768, 1536, 3072, 6144, 12288, 24576, 49152),
    "d": (16, 32, 64, 128, 256),
    "M": (4096, 2048, 1024, 512, 256),
}
EXECUTED = 2  # so many points at the start of each grid are executed
FITTED = 3  # two doublings
COMPULSORY = 0.05  # at most this share of the traffic
TOLERANCE = 0.05  # of the exponent, relative

THETA = {"N": 2.0, "d": 2.0, "M": -1.0}
EXPECTED = {"standard": {"N": 2.0}, "flash1": THETA, "flash2": THETA}
COUNT = sum(len(ALGORITHMS[name].conventions) * len(axes) for name, axes in EXPECTED.items())


@dataclass(frozen=True)
class Point:
    """Traffic at one (N, d, M), in elements, for one head.

    executed_elements is what a run moved, None where none was made; held says whether that run
    moved, array by array, what the closed form says.
    """

    N: int
    d: int
    M: int
    Br: int
    Bc: int
    total_elements: int
    executed_elements: int | None
    held: bool

    @property
    def compulsory_share(self) -> float:
        """Share of the total that any algorithm must move: Q, K, V and O once."""
        return 4 * self.N * self.d / self.total_elements

    @property
    def constant(self) -> float:
        """Total traffic in units of N^2 d^2 / M."""
        return self.total_elements * self.M / (self.N * self.d) ** 2


@dataclass(frozen=True)
class Series:
    """One algorithm along one grid.

    `axis` ("N", "d" or "M") is what varies; `exponent` is fitted over the last FITTED points.
    """

    algorithm: str
    convention: str
    axis: str
    points: tuple[Point, ...]
    exponent: float
    expected: float

    @property
    def failures(self) -> list[str]:
        """What does not hold; empty if all does."""
        found = []
        if any(not p.held for p in self.points):
            found.append("an executed run moved other than its closed form")
        if max(p.compulsory_share for p in self.points) >= COMPULSORY:
            found.append(f"compulsory traffic is {COMPULSORY:.0%} of the total or more")
        if abs(self.exponent - self.expected) > TOLERANCE * abs(self.expected):
            found.append(
                f"exponent {self.exponent:.3f} is not within {TOLERANCE:.0%} of {self.expected:g}"
            )
        return found


def sweep(on_series: Callable[[str], None] = lambda what: None) -> Iterator[Series]:
    """Verify the exponents of every algorithm; `on_series` is told what comes next.

    Yields
    ------
    Series
        Standard attention over N; the others over N, d and M, in each of their conventions.
    """
    for algorithm, expected in EXPECTED.items():
        for convention in ALGORITHMS[algorithm].conventions:
            at = functools.cache(functools.partial(_point, algorithm, convention))
            for axis, exponent in expected.items():
                on_series(f"{algorithm}, {convention}, over {axis}")
                points = tuple(
                    at(**{**BASE, axis: x}, execute=n < EXECUTED) for n, x in enumerate(GRIDS[axis])
                )
                fitted = _slope(axis, points[-FITTED:])
                yield Series(algorithm, convention, axis, points, fitted, exponent)


def _point(algorithm: str, convention: str, *, N: int, d: int, M: int, execute: bool) -> Point:
    Br, Bc = tile_sizes(M, d, "paper", algorithm, N)
    cost = io_cost(algorithm, N=N, d=d, Br=Br, Bc=Bc, convention=convention)
    if not execute:
        return Point(N, d, M, Br, Bc, cost.total_elements, None, True)
    q, k, v = np.random.default_rng(0).standard_normal((3, N, d), np.float32)
    run = attention(q, k, v, algorithm=algorithm, tiles=(Br, Bc), convention=convention).traffic
    return Point(
        N, d, M, Br, Bc,
        total_elements=cost.total_elements,
        executed_elements=run.total_elements,
        held=run.reads == cost.reads and run.writes == cost.writes,
    )  # fmt: skip


def _slope(axis: str, points: tuple[Point, ...]) -> float:
    x = [math.log(getattr(p, axis)) for p in points]
    y = [math.log(p.total_elements) for p in points]
    return float(np.polyfit(x, y, 1)[0])
