"""Time on a GPU: CUDA events around one call, after warm-up, inputs in turn; the median and spread.

Clocks are left as they are. The L2 keeps what the last call left there unless it is flushed, by a
copy of more than it holds before each call.
"""

from __future__ import annotations

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
def inputs(shape: Shape, dtype: str, sets: int = SETS) -> list[tuple[Any, Any, Any]]:
    """Sets of q, k, v of normal numbers on the GPU."""
    from ..kernels.gpu import cuda

    rng = np.random.default_rng(0)
    found = []
    for _ in range(sets):
        q, k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3))
        found.append((cuda.to_device(q), cuda.to_device(k), cuda.to_device(v)))
    return found


def compile_ahead(case: Case) -> None:
    """Compile a case's kernels without a launch: what they are compiled for is not its size."""
    q = np.zeros((1, 1, 256, case.shape[3]), case.dtype)
    for step in replace(case, shape=q.shape).plan(q, q, q).steps:
        step.function.compile(tuple(step.function.typeof_pyval(a) for a in step.args))


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
