"""The laws of traffic, verified: Theta(N^2 d^2 / M), and linear in the density of a block layout.

How traffic grows with N, d and M, under the paper's tile rule: three grids cross in one base point;
along each, one of N, d, M goes by factors of two towards more traffic. The first point of a grid,
where a run is cheap, is executed and must move exactly what the closed form says; the rest is the
closed form alone. The exponent is the least-squares slope of log(traffic) over the last two
doublings.

The theorem is about N d >> M: at every grid point the compulsory traffic, reading each input and
writing each result once, is under 5 % of the total. The chip is unbounded: the paper's tiles do not
fit in M elements once S, l and m are counted, and the tiles are given.

How traffic falls with the share s of blocks that a layout keeps: every point is executed, and a
line fitted through them. Its slope is 3 Tc N d; with the paper's Tc = 4 N d / M, 12 N^2 d^2 / M.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS
from ..attention import Attention, attention
from ..checks import choice
from ..layouts import at_random, density
from ..papers.published import published
from .io import expected_cost, io_cost
from .tiles import tile_sizes

PARTS = ("forward", "backward", "sparse")

BASE = {"N": 1536, "d": 32, "M": 2048}
GRIDS = {
    "N": (768, 1536, 3072, 6144, 12288, 24576, 49152),
    "d": (16, 32, 64, 128, 256),
    "M": (4096, 2048, 1024, 512, 256),
}
EXECUTED = 1  # points at the start of each grid that are executed
FITTED = 3  # two doublings
COMPULSORY = 0.05  # at most this share of the traffic
TOLERANCE = 0.05  # of the exponent, relative

THETA = {"N": 2.0, "d": 2.0, "M": -1.0}
EXPECTED = {
    "forward": {"standard": {"N": 2.0}, "flash1": THETA, "flash2": THETA},
    "backward": {
        "standard": {"N": 2.0}, "flash1": THETA, "flash2": THETA, "flash2-two-kernel": THETA,
    },
}  # fmt: skip

SPARSE = {"N": 640, "d": 64, "B": 32}  # 20 x 20 blocks
DENSITIES = tuple(n / 10 for n in range(1, 10))
LEAST_R_SQUARED = 0.9999
LINE_TOLERANCE = 1e-6  # of slope and intercept, relative

# Dao et al. 2022 (arXiv:2205.14135), Fig. 2 right: N = 4096, forward and backward, milliseconds at
# DENSITIES, and those of dense FlashAttention.
*PUBLISHED_MS, PUBLISHED_DENSE_MS = map(float, published("fa1-fig2-sparse-ms"))


@dataclass(frozen=True)
class Point:
    """Traffic of a pass at one (N, d, M), in elements, for one head.

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
    matrices: int  # N x d, that any algorithm must move: inputs and results of the pass

    @property
    def compulsory_share(self) -> float:
        """Share of the total that any algorithm must move."""
        return self.matrices * self.N * self.d / self.total_elements

    @property
    def constant(self) -> float:
        """Total traffic in units of N^2 d^2 / M."""
        return self.total_elements * self.M / (self.N * self.d) ** 2


@dataclass(frozen=True)
class Series:
    """A pass ("forward" or "backward") of one algorithm along one grid.

    `axis` ("N", "d" or "M") is what varies; `exponent` is fitted over the last FITTED points.
    """

    part: str
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


@dataclass(frozen=True)
class Line:
    """Something over the density of a block layout, and the line fitted through it.

    expected is the (slope, intercept) of the closed form, which every run must have moved (`held`);
    None for what was published.
    """

    what: str
    unit: str
    densities: tuple[float, ...]
    values: tuple[float, ...]
    expected: tuple[float, float] | None
    formula: str
    held: bool = True

    def at(self, density: float) -> float:
        """The fitted line."""
        slope, intercept = self.fit
        return slope * density + intercept

    @property
    def fit(self) -> tuple[float, float]:
        """Slope, for all blocks against none, and intercept of the least-squares line."""
        slope, intercept = np.polyfit(self.densities, self.values, 1)
        return float(slope), float(intercept)

    @property
    def r_squared(self) -> float:
        """Share of the variance that the line explains."""
        slope, intercept = self.fit
        y = np.array(self.values)
        rest = y - (slope * np.array(self.densities) + intercept)
        return float(1 - (rest**2).sum() / ((y - y.mean()) ** 2).sum())

    @property
    def failures(self) -> list[str]:
        """What does not hold; empty if all does, and for what was published."""
        found = []
        if not self.held:
            found.append("an executed run moved other than its closed form")
        for name, x, wanted in zip(
            ("slope", "intercept"), self.fit, self.expected or (), strict=False
        ):
            if abs(x - wanted) > LINE_TOLERANCE * abs(wanted):
                found.append(f"{name} {x:.6g} is not the {wanted:.6g} of the closed form")
        if self.expected and not self.r_squared > LEAST_R_SQUARED:
            found.append(f"R^2 {self.r_squared:.6f} is not above {LEAST_R_SQUARED}")
        return found


def chosen_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Those of PARTS that are named, in their order; all if none is."""
    wanted = {choice("part", name, PARTS) for name in names} or set(PARTS)
    return tuple(part for part in PARTS if part in wanted)


def steps(parts: Iterable[str]) -> int:
    """How many steps `sweep` and `densities` tell of."""
    return sum(
        len(DENSITIES)
        if part == "sparse"
        else sum(len(_conventions(name, part)) * len(axes) for name, axes in EXPECTED[part].items())
        for part in parts
    )


def _conventions(algorithm: str, part: str) -> tuple[str, ...]:
    row = ALGORITHMS[algorithm]
    return tuple(row.backward) if part == "backward" else row.conventions


def sweep(part: str, on_step: Callable[[str], None] = lambda what: None) -> Iterator[Series]:
    """Verify the exponents of a pass of every algorithm; `on_step` is told what comes next.

    Yields
    ------
    Series
        Standard attention over N; the others over N, d and M, in each of their conventions.
    """
    for algorithm, expected in EXPECTED[part].items():
        for convention in _conventions(algorithm, part):
            at = functools.cache(functools.partial(_point, part, algorithm, convention))
            for axis, exponent in expected.items():
                on_step(f"{part}: {algorithm}, {convention}, over {axis}")
                points = tuple(
                    at(**{**BASE, axis: x}, execute=n < EXECUTED) for n, x in enumerate(GRIDS[axis])
                )
                fitted = _slope(axis, points[-FITTED:])
                yield Series(part, algorithm, convention, axis, points, fitted, exponent)


def _point(
    part: str, algorithm: str, convention: str, *, N: int, d: int, M: int, execute: bool
) -> Point:
    backward = part == "backward"
    Br, Bc = tiles = tile_sizes(M, d, "paper", algorithm, N, backward=backward)
    cost = io_cost(algorithm, N=N, d=d, Br=Br, Bc=Bc, convention=convention, backward=backward)
    run = None
    if execute:
        q, k, v, do = np.random.default_rng(0).standard_normal((4, N, d), np.float32)
        own = None if backward else tiles
        out = attention(q, k, v, algorithm=algorithm, tiles=own, convention=convention)
        if backward:
            out.backward(do, tiles=tiles)
        run = out.traffic_backward if backward else out.traffic
    return Point(
        N, d, M, Br, Bc,
        total_elements=cost.total_elements,
        executed_elements=None if run is None else run.total_elements,
        held=run is None or (run.reads == cost.reads and run.writes == cost.writes),
        matrices=8 if backward else 4,
    )  # fmt: skip


def _slope(axis: str, points: tuple[Point, ...]) -> float:
    x = [math.log(getattr(p, axis)) for p in points]
    y = [math.log(p.total_elements) for p in points]
    return float(np.polyfit(x, y, 1)[0])


def densities(on_step: Callable[[str], None] = lambda what: None) -> list[Line]:
    """Run block-sparse FlashAttention, as the published kernel, at DENSITIES of random blocks.

    The diagonal is always kept, so every row and column of blocks is hit. `on_step` is told what
    comes next. Returns the lines of the forward pass, of both passes, and of what was published.
    """
    N, d, B = SPARSE.values()
    Tc = N // B
    kept, forward, both, held = [], [], [], True
    q, k, v, do = np.random.default_rng(0).standard_normal((4, N, d), np.float32)
    for share in DENSITIES:
        on_step(f"block-sparse, {share:.0%} of the blocks")
        layout = at_random(Tc, share)
        what: dict[str, Any] = {"block_mask": layout, "convention": "elided"}
        out = attention(q, k, v, algorithm="block_sparse", tiles=(B, B), **what)
        out.backward(do)
        held = held and _as_in_closed_form(out, q, k, v, **what)
        kept.append(density(layout))
        forward.append(out.traffic.total_elements)
        assert out.traffic_backward is not None
        both.append(forward[-1] + out.traffic_backward.total_elements)
    one, two = 3 * Tc * N * d + 4 * Tc * N, 7 * Tc * N * d + 7 * Tc * N
    return [
        Line("forward", "elements", tuple(kept), tuple(forward), (one, N * d - 2 * N),
             "(1 + 3 s Tc) N d + (4 s Tc - 2) N", held),
        Line("forward and backward", "elements", tuple(kept), tuple(both),
             (two, 5 * N * d - 2 * N), "(5 + 7 s Tc) N d + (7 s Tc - 2) N", held),
        Line("published", "ms", DENSITIES, tuple(PUBLISHED_MS), None, ""),
    ]  # fmt: skip


def _as_in_closed_form(out: Attention, q: Any, k: Any, v: Any, **what: Any) -> bool:
    """Whether both passes moved, array by array, what their closed forms say."""
    for run, backward in ((out.traffic, False), (out.traffic_backward, True)):
        cost = expected_cost(out, q, k, v, backward=backward, **what)
        if run is None or run.reads != cost.reads or run.writes != cost.writes:
            return False
    return True
