"""Approximations beside exact attention: operations, bytes, time, and the error that they make.

Local attention and Linformer need O(N) operations where attention needs O(N^2). Both are run here
as public code runs them, out of the steps of standard attention: their scores, N x 3w (less 2 w^2
at the ends) or N x k, go through HBM. So at short lengths FlashAttention, with more operations and
fewer bytes, is faster.

Time is that of `Roofline`, of peak rates; the setting that of Tables 9 to 20 of Dao et al. 2022
(arXiv:2205.14135). Scores, weights and mixed keys are taken as float16, as a framework keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS
from ..attention import attention
from ..checks import integer
from ..reference import exact
from ..sample import load_sample
from ..verify import relative_error
from .counts import Cost
from .devices import Device, checked
from .io import expected_cost, io_cost
from .roofline import Roofline

LENGTHS = tuple(128 << n for n in range(10))  # of those tables
PUBLISHED = {"d": 64, "heads": 8, "batch": 16, "dtype": "float16"}
IN_HALF = ("S", "P", "Kp", "Vp")
WINDOW = 256  # queries of a window of local attention; the paper does not give its own
MIXED = 256  # Linformer's k: with it the paper's Table 21 is 4 N k + 10 N d numbers, within 1 %
EXECUTED = 320  # length of the runs that the closed forms are held against
SAMPLE_WINDOWS = (8, 16, 32, 64)
SAMPLE_MIXED = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Method:
    """How a name in the tables is run; tiles of None are whole matrices, each read once a step."""

    algorithm: str
    tiles: tuple[int, int] | None = None
    convention: str = "literal"
    coarse: tuple[tuple[str, int], ...] = ()

    def cost(self, N: int, **size: Any) -> Cost:
        """The closed form."""
        Br, Bc = self.tiles or (N, N)
        what: dict[str, Any] = {**dict(self.coarse), **size}
        if "projection" in what:
            what["projection"] = min(what["projection"], N)  # no more are mixed than there are
        return io_cost(self.algorithm, N=N, Br=Br, Bc=Bc, convention=self.convention, **what)


# Of the published kernel Bc = 256 is the fastest in Fig. 2, and its tiles there are 64 high.
METHODS: Mapping[str, Method] = {
    "standard": Method("standard"),
    "flash1": Method("flash1", (64, 256), "elided"),
    "flash2": Method("flash2", (128, 128)),
    "flash2, local": Method("flash2", (128, 128), coarse=(("local_window", WINDOW),)),
    "local": Method("local", coarse=(("local_window", WINDOW),)),
    "linformer": Method("linformer", coarse=(("projection", MIXED),)),
}
PUBLISHED_NAMES = {
    "standard": "PyTorch Attention",
    "flash1": "FlashAttention",
    "local": "Local Attention",
    "linformer": "Linformer",
}


@dataclass(frozen=True)
class Point:
    """A method's forward pass at one length, all heads, and its time on a device."""

    method: str
    N: int
    time: Roofline


def points(gpu: Device, lengths: Sequence[int] = LENGTHS) -> list[Point]:
    """Every method at every length."""
    lengths, found = [integer("lengths", N, 1) for N in lengths], []
    checked(gpu)
    for name, method in METHODS.items():
        for N in lengths:
            cost = method.cost(N, **PUBLISHED)
            time = Roofline(gpu, "float16", _bytes(cost), cost.flops, cost.exps)
            found.append(Point(name, N, time))
    return found


def _bytes(cost: Cost) -> int:
    sizes = cost.item_bytes | dict.fromkeys(IN_HALF, 2)
    return sum(n * sizes[name] for part in (cost.reads, cost.writes) for name, n in part.items())


def crossover(found: Sequence[Point], method: str, other: str, seconds: str) -> float | None:
    """The N from which on `method` takes less time than `other`; None if it never does.

    seconds: "lower_seconds" or "serial_seconds". Between two lengths the ratio of the times is
    taken as a power of N.
    """
    times = {(p.method, p.N): float(getattr(p.time, seconds)) for p in found}
    lengths = sorted({p.N for p in found})
    gaps = [(N, math.log(times[method, N] / times[other, N])) for N in lengths]
    for (N, gap), (after, gap_after) in reversed(list(pairwise(gaps))):
        if gap >= 0 > gap_after:
            return float(N * (after / N) ** (gap / (gap - gap_after)))
    return None


def executed() -> dict[str, bool]:
    """Of each method, whether one head's run moved and computed what its closed form says."""
    q, k, v = np.random.default_rng(0).standard_normal((3, EXECUTED, 16), np.float32)
    found = {}
    for name, method in METHODS.items():
        Br, Bc = method.tiles or (EXECUTED, EXECUTED)
        how: dict[str, Any] = {"convention": method.convention, **dict(method.coarse)}
        out = attention(q, k, v, algorithm=method.algorithm, tiles=(Br, Bc), **how)
        cost = method.cost(EXECUTED, d=16)
        found[name] = (out.traffic.reads, out.traffic.writes) == (cost.reads, cost.writes)
    return found


@dataclass(frozen=True)
class Error:
    """An approximation on the built-in sample, all heads and both texts.

    size: queries of a window, or keys that all are mixed into. flops_share: of those of attention
    over all keys. relative_error: |O - exact| / |exact|, over the real tokens' rows. over_bound:
    largest error against the approximation's own definition in float64, in units of its bound.
    held: whether it moved what the closed form says.
    """

    method: str
    size: int
    flops_share: float
    relative_error: float
    over_bound: float
    held: bool


def sample_errors(on_step: Callable[[str], None] = lambda what: None) -> Iterator[Error]:
    """The approximations at several sizes, on the built-in sample."""
    sample = load_sample()
    qkv, padding = (sample.q, sample.k, sample.v), {"key_padding_mask": sample.key_padding_mask}
    attended = exact(*qkv, **padding)
    assert sample.key_padding_mask is not None
    real = sample.key_padding_mask[:, None, :, None]
    N, d = sample.q.shape[-2:]
    dense = io_cost("standard", N=N, d=d, heads=4, batch=2).flops
    for name, sizes in (("local", SAMPLE_WINDOWS), ("linformer", SAMPLE_MIXED)):
        requires = ALGORITHMS[name].requires
        for size in sizes:
            on_step(f"{name}, {size}")
            what: dict[str, Any] = {**padding, requires: size}
            out = attention(*qkv, algorithm=name, **what)
            cost, own = expected_cost(out, *qkv, **what), exact(*qkv, **what)
            yield Error(
                name,
                size,
                cost.flops / dense,
                relative_error(out.output, attended.output, real),
                max(own.output_ratio(out.output), own.lse_ratio(out.lse)),
                (out.traffic.reads, out.traffic.writes) == (cost.reads, cost.writes),
            )
