"""What "standard attention" moves depends on how it is cut into kernels, and published figures mix.

Four ways to run the algorithm, in the order of what they move. Elements of one head, forward and
backward; T = N / Br row tiles in all of them:

- one row tile: the chip holds K and V, so each matrix is read once a step, the paper's count:
  4 N^2 + 4 N d and 7 N^2 + 8 N d;
- T row tiles: K and V are read again for each;
- a row of S longer than the chip: S, and backward P and dP, are read twice for the softmax;
- masking and dropout as kernels of their own: each reads and writes a matrix of N^2, and dropout
  stores its bits, one byte each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..algorithms import BITS, SHAPES
from ..attention import attention
from .counts import Cost
from .io import expected_cost, io_cost

# GPT-2 medium in Fig. 2 left of Dao et al. 2022 (arXiv:2205.14135): float16, forward and backward.
PUBLISHED = {"N": 1024, "d": 64, "heads": 16, "batch": 64}
PUBLISHED_GB = 40.3
EXECUTED = {"N": 128, "d": 8}  # where each way is run: small, and not square
ROW_TILES = 8


@dataclass(frozen=True)
class Way:
    """A way to run standard attention: the algorithm, its row tiles, whether a row of S fits."""

    name: str
    algorithm: str
    row_tiles: int = 1
    row_fits: bool = True


WAYS = (
    Way("one row tile", "standard"),
    Way("row tiles", "standard", row_tiles=ROW_TILES),
    Way("a row of S too long for the chip", "standard", row_tiles=ROW_TILES, row_fits=False),
    Way("mask and dropout kernels", "standard-unfused"),
)


@dataclass(frozen=True)
class Moved:
    """What a way moves in both passes, for all heads.

    forward, backward: scores, how many N x N matrices, and rest, how many N x d ones. gigabytes:
    2 bytes for each number, as in a float16 run, and 1 for a dropout bit. held: whether a small run
    moved, array by array, what the closed form says.
    """

    way: Way
    forward: tuple[float, float]
    backward: tuple[float, float]
    gigabytes: float
    held: bool


def ways(on_step: Callable[[str], None] = lambda what: None) -> Iterator[Moved]:
    """Each of WAYS: a small run, and the closed form at the published size."""
    for way in WAYS:
        on_step(way.name)
        passes = [_cost(way, PUBLISHED, backward) for backward in (False, True)]
        forward, backward = (_matrices(cost) for cost in passes)
        size = sum(_half_bytes(cost) for cost in passes)
        yield Moved(way, forward, backward, size / 1e9, _held(way))


def _budget(way: Way, N: int) -> dict[str, Any]:
    """No limit, or a chip that is short of a row of S by one."""
    return {} if way.row_fits else {"sram": N + 1}


def _cost(way: Way, size: dict[str, int], backward: bool) -> Cost:
    Br = -(-size["N"] // way.row_tiles)
    what: dict[str, Any] = {**size, **_budget(way, size["N"])}
    return io_cost(way.algorithm, Br=Br, Bc=Br, backward=backward, **what)


def _counts(cost: Cost) -> dict[str, int]:
    """Elements read and written, by array."""
    names = {*cost.reads, *cost.writes}
    return {name: cost.reads.get(name, 0) + cost.writes.get(name, 0) for name in names}


def _is_scores(name: str) -> bool:
    return SHAPES[name] == ("Nq", "Nk")


def _matrices(cost: Cost) -> tuple[float, float]:
    """How many N x N and N x d matrices a head reads and writes; a dropout bit is half a number."""
    N, d, heads, batch = PUBLISHED.values()
    weight = {name: 0.5 if name in BITS else 1.0 for name in SHAPES}
    scores = sum(weight[name] * n for name, n in _counts(cost).items() if _is_scores(name))
    rest = sum(n for name, n in _counts(cost).items() if not _is_scores(name))
    return scores / (N * N * heads * batch), rest / (N * d * heads * batch)


def _half_bytes(cost: Cost) -> int:
    return sum((1 if name in BITS else 2) * n for name, n in _counts(cost).items())


def _held(way: Way) -> bool:
    """Run both passes with a mask and dropout; whether every array moved as in the closed form."""
    N, d = EXECUTED.values()
    Br = -(-N // way.row_tiles)
    q, k, v, do = np.random.default_rng(0).standard_normal((4, N, d), np.float32)
    what: dict[str, Any] = {"is_causal": True, "dropout_p": 0.1, **_budget(way, N)}
    tiles = (Br, Br) if way.row_fits else (d // 2, d // 2)  # that fit where a row of S does not
    out = attention(q, k, v, algorithm=way.algorithm, tiles=tiles, **what)
    out.backward(do)
    return all(
        run is not None and (run.reads, run.writes) == (cost.reads, cost.writes)
        for run, cost in (
            (run, expected_cost(out, q, k, v, backward=backward, **what))
            for run, backward in ((out.traffic, False), (out.traffic_backward, True))
        )
    )
