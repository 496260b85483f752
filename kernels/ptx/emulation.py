"""What emulated instructions need: threads that meet, and copies that arrive late.

In Numba's simulator each CUDA thread is a Python thread. An instruction of a whole warp is computed
once, by the last of its threads to arrive. A copy that runs by itself writes garbage when it is
issued and the numbers only when somebody waits for it: both what comes too early and what is read
too early shows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...fp8 import E4M3
from ..gpu import SIMULATED

__all__ = ["GARBAGE", "block", "element_bits", "elements", "thread", "together"]

GARBAGE = 0xFFFF  # NaN, in float16 and in bfloat16, and twice in e4m3


def thread() -> Any:
    """The CUDA thread that runs: thread_id is its number in the block; take attributes freely."""
    return threading.current_thread()


def block() -> dict[str, Any]:
    """What the threads of the running block have in common, by name."""
    found: dict[str, Any] = thread()._manager.__dict__.setdefault("in_common", {})
    return found


def _raise_what_stopped(threads: list[Any]) -> None:
    for stopped in (t for t in threads if t.exception):
        for t in threads:  # those in a barrier stop as well
            t.abort, t.syncthreads_blocked = True, False
            t.syncthreads_event.set()
        raise stopped.exception[0].with_traceback(stopped.exception[1])


if SIMULATED:
    from numba.cuda.simulator import kernel as simulator

    class _PatientBlock(simulator.BlockManager):
        """The simulator's block, but it sleeps between two looks at its threads.

        The simulator's own looks all the time, and so takes the interpreter from the threads.
        """

        def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
            threads = [
                simulator.BlockThread(lambda: self._f(*args), self, grid_point, point, self._debug)
                for point in np.ndindex(*self._block_dim)
            ]
            for t in threads:
                t.start()
            while alive := [t for t in threads if t.is_alive()]:
                time.sleep(2e-4)
                _raise_what_stopped(threads)
                if all(t.syncthreads_blocked for t in alive):
                    for t in alive:
                        t.syncthreads_blocked = False
                        t.syncthreads_event.set()
            _raise_what_stopped(threads)

    simulator.BlockManager = _PatientBlock


class _Group:
    """Threads that execute an instruction together."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.asleep = [threading.Lock() for _ in range(size)]
        for asleep in self.asleep:
            asleep.acquire()
        self.instructions: list[str] = []
        self.given: list[Any] = [None] * size
        self.found: list[Any] = [None] * size


def together(
    size: int, instruction: str, given: Any, compute: Callable[[list[Any]], list[Any]]
) -> Any:
    """What an instruction of `size` neighbouring threads (a warp: 32) gives to this one of them.

    Each hands in its operands; compute(operands by lane) gives the results by lane.

    Raises
    ------
    RuntimeError
        If the threads arrive at different instructions: on a GPU that is undefined.
    """
    me = thread()
    lane = me.thread_id % size
    name = f"group {size} {me.thread_id // size}"
    group = block().get(name) or block().setdefault(name, _Group(size))
    with group.lock:
        group.given[lane] = given
        group.instructions.append(instruction)
        last = len(group.instructions) == size
    if last:
        if len(set(group.instructions)) > 1:
            raise RuntimeError(f"one warp, several instructions: {set(group.instructions)}")
        group.instructions.clear()
        group.found = list(compute(group.given))
        for n in range(size):
            if n != lane:
                group.asleep[n].release()
    else:
        group.asleep[lane].acquire()
    return group.found[lane]


def elements(words: Any, dtype: str) -> Any:
    """The floats of 16 or 8 bits in an array of 32-bit words, lowest first, as float32."""
    bits = np.ascontiguousarray(words, np.uint32).view(np.uint16)
    if dtype == "e4m3":
        return bits.view(E4M3).astype(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def element_bits(x: Any, dtype: str) -> Any:
    """The bits of a float32 rounded to nearest even, as 16 bits."""
    if dtype == "float16":
        return np.float32(x).astype(np.float16).view(np.uint16)
    if np.isnan(x):
        return np.uint16(0x7FFF)
    bits = int(np.float32(x).view(np.uint32))
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
