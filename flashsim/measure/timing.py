"""Time on a GPU: CUDA events around one call, after warm-up, inputs in turn; the median and spread.

Clocks are left as they are. The L2 keeps what the last call left there unless it is flushed, by a
copy of more than it holds before each call. Python takes longer to launch a kernel than a small one
runs, so one warp spins on registers until the timed call is in the queue: launching is in no time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from .cases import Case, Shape

Call = Callable[[], Any]
SETS = 3  # of inputs, which take turns
FLUSH_BYTES = 256 * 1024**2
SPINS_PER_SECOND = 1e8
LONG_MS = 100  # of timed calls in all, from which five are enough


@lru_cache(maxsize=1)
def inputs(shape: Shape, Nq: int, dtype: str, sets: int = SETS) -> list[tuple[Any, ...]]:
    """Sets of q, k, v and the gradient of the output, normal numbers on the GPU; Nq: queries."""
    from ..kernels.gpu import cuda

    batch, heads, N, d = shape
    rng = np.random.default_rng(0)
    return [
        tuple(
            cuda.to_device(rng.standard_normal((batch, heads, rows, d), np.float32).astype(dtype))
            for rows in (Nq, N, N, Nq)
        )
        for _ in range(sets)
    ]


def kinds(cases: Sequence[Case]) -> list[Case]:
    """The cases that are compiled apart: a kernel does not depend on how many heads there are."""
    one_head = [replace(case, shape=(1, 1, *case.shape[2:])) for case in cases]
    return list(dict.fromkeys(one_head))


def compile_ahead(case: Case) -> None:
    """Compile a case's kernels, and those that measure what bounds them."""
    from . import ceilings

    batch, heads, N, d = case.shape
    q, k = (np.zeros((batch, heads, rows, d), case.dtype) for rows in (case.Nq, N))
    steps = case.plan(q, k, k, q).steps
    compile_steps(steps)
    for step in steps:
        for function, args in ceilings.kernels(step):
            function.compile(tuple(function.typeof_pyval(a) for a in args))


def compile_steps(steps: Sequence[Any]) -> None:
    """Compile the kernels of a plan's steps for their arguments."""
    for step in steps:
        step.function.compile(tuple(step.function.typeof_pyval(a) for a in step.args))


def compilers() -> int:
    """How many processes compile at a time."""
    return max(1, min(16, (os.cpu_count() or 2) - 2))


def compile_all(cases: Sequence[Case], on_step: Callable[[str], None]) -> None:
    """Compile every case's kernels, in processes beside each other, which keep them on disk."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(compilers(), get_context("spawn")) as pool:
        for case, done in [(case, pool.submit(compile_ahead, case)) for case in kinds(cases)]:
            on_step(f"compiling {case.label}")
            done.result()


class Flush:
    """Called, it pushes everything out of the L2."""

    def __init__(self) -> None:
        from ..kernels.gpu import cuda

        self.a = cuda.device_array(FLUSH_BYTES, np.uint8)
        self.b = cuda.device_array(FLUSH_BYTES, np.uint8)

    def __call__(self) -> None:
        self.b.copy_to_device(self.a)


@cache
def _spinning() -> Any:
    from ..kernels.gpu import float32, kernel

    def spin(turns: Any, out: Any) -> None:
        x = float32(1)
        for _ in range(turns):  # each needs the last one: about 10 ns
            x = x * float32(0.999) + float32(0.5)
        if x == float32(12345.678):
            out[0] = x

    return kernel(32)(spin)


def milliseconds(
    calls: Sequence[Call], before: Call | None = None, seconds: float = 0.2
) -> dict[str, Any]:
    """Median, quartiles and number of timed calls; `before` runs before each, untimed.

    Without `before` the previous call runs there once more, and leaves in the L2 what it touched.
    """
    from ..kernels import gpu

    for call in calls:
        call()
    gpu.cuda.synchronize()
    launching = -time.perf_counter()
    for call in calls:
        call()
    launching += time.perf_counter()
    out = gpu.cuda.device_array(1, np.float32)
    turns = np.int64(SPINS_PER_SECOND * 2 * launching / len(calls))
    start, stop = gpu.cuda.event(), gpu.cuda.event()
    times: list[float] = []
    while len(times) < (9 if sum(times) < LONG_MS else 5) or (
        sum(times) < 1e3 * seconds and len(times) < 200
    ):
        (before or calls[len(times) % len(calls) - 1])()
        gpu.launch(_spinning(), 1, 32, 0, 0, (turns, out))
        start.record()
        calls[len(times) % len(calls)]()
        stop.record()
        stop.synchronize()
        times.append(float(gpu.cuda.event_elapsed_time(start, stop)))
    low, median, high = statistics.quantiles(times, n=4)
    return {"ms": median, "ms_low": low, "ms_high": high, "timed": len(times)}
