"""Time on a GPU: CUDA events around one call, after warm-up, inputs in turn; the median and spread.

Clocks are left as they are. The L2 keeps what the last call left there unless it is flushed, by a
copy of more than it holds before each call.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from .cases import Case, Shape

Call = Callable[[], Any]
SETS = 3  # of inputs, which take turns
FLUSH_BYTES = 256 * 1024**2


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
    """The cases that are compiled apart: what a kernel is compiled for is not its size."""
    small = [replace(case, shape=(1, 1, 256, case.shape[3]), queries=None) for case in cases]
    return list(dict.fromkeys(small))


def compile_ahead(case: Case) -> None:
    """Compile a case's kernels."""
    x = np.zeros(case.shape, case.dtype)
    for step in case.plan(x, x, x, x).steps:
        step.function.compile(tuple(step.function.typeof_pyval(a) for a in step.args))


def compile_all(cases: Sequence[Case], on_step: Callable[[str], None]) -> None:
    """Compile every case's kernels, in processes beside each other, which keep them on disk."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
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


def milliseconds(
    calls: Sequence[Call], before: Call | None = None, seconds: float = 0.2
) -> dict[str, Any]:
    """Median, quartiles and number of timed calls; `before` runs before each, untimed.

    Without `before` the previous call runs there once more: the GPU is busy while Python launches
    the timed call, so that launching is in no time.
    """
    from ..kernels.gpu import cuda

    for call in calls:
        call()
    cuda.synchronize()
    start, stop = cuda.event(), cuda.event()
    times: list[float] = []
    while len(times) < 9 or (sum(times) < 1e3 * seconds and len(times) < 200):
        (before or calls[len(times) % len(calls) - 1])()
        start.record()
        calls[len(times) % len(calls)]()
        stop.record()
        stop.synchronize()
        times.append(float(cuda.event_elapsed_time(start, stop)))
    low, median, high = statistics.quantiles(times, n=4)
    return {"ms": median, "ms_low": low, "ms_high": high, "timed": len(times)}
