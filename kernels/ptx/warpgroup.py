"""What four warps of compute capability 9.0 do as one: share out registers, take turns.

A warpgroup is 128 consecutive threads; the first warp's number is a multiple of 4.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np

from .base import Result, instruction, u32
from .emulation import block, together
from .mbarrier import DEADLOCK_SECONDS

__all__ = ["bar_arrive", "bar_red_or", "bar_sync", "setmaxnreg_dec", "setmaxnreg_inc"]


def _setmaxnreg(step: str, registers: int) -> Any:
    if not 24 <= registers <= 256 or registers % 8:
        raise ValueError(f"registers={registers!r}: expected a multiple of 8 from 24 to 256")

    def emulated() -> None:
        together(128, f"setmaxnreg.{step} {registers}", None, list)

    emulated.__name__ = f"setmaxnreg_{step}_{registers}"
    return instruction(f"setmaxnreg.{step}.sync.aligned.u32 {registers};")(emulated)


@cache
def setmaxnreg_dec(registers: int) -> Any:
    """setmaxnreg_dec(): this warpgroup's threads keep so many registers and give up the others.

    PTX ISA, "setmaxnreg". They start with what the kernel was compiled to have.
    """
    return _setmaxnreg("dec", registers)


@cache
def setmaxnreg_inc(registers: int) -> Any:
    """setmaxnreg_inc(): this warpgroup's threads get so many registers, once others gave them."""
    return _setmaxnreg("inc", registers)


class _Named:
    """A numbered barrier in the simulator."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived = self.round = 0
        self.vote = self.outcome = False

    def arrive(self, threads: int, vote: bool = False) -> int:
        """The round that this arrival was of; the caller holds `changed`."""
        mine = self.round
        self.arrived += 1
        self.vote |= vote
        if self.arrived == threads:
            self.outcome, self.vote = self.vote, False
            self.arrived = 0
            self.round += 1
            self.changed.notify_all()
        return mine

    def wait(self, number: int, threads: int, vote: bool = False) -> bool:
        """Arrive, and wait for the others; whether one of them voted for it."""
        with self.changed:
            mine = self.arrive(threads, vote)
            if not self.changed.wait_for(lambda: self.round > mine, DEADLOCK_SECONDS):
                raise RuntimeError(
                    f"named barrier {number}: {self.arrived} of {threads} threads arrived"
                )
            return self.outcome


def _named(number: Any) -> _Named:
    found: _Named = block().setdefault(f"named barrier {int(number)}", _Named())
    return found


@instruction("bar.sync {number}, {threads};", number=u32, threads=u32)
def bar_sync(number: Any, threads: Any) -> None:
    """Arrive at a named barrier, and wait there until `threads` have; PTX ISA, "bar, barrier".

    Numbers are 0 to 15, of which 0 is that of `cuda.syncthreads`. All threads of a warp call it.
    """
    _named(number).wait(int(number), int(threads))


@instruction(
    "{ .reg .pred mine, any; setp.ne.u32 mine, {x}, 0; "
    "bar.red.or.pred any, {number}, {threads}, mine; selp.u32 {y}, 1, 0, any; }",
    y=Result(u32), number=u32, threads=u32, x=u32,
)  # fmt: skip
def bar_red_or(number: Any, threads: Any, x: Any) -> Any:
    """As `bar_sync`; 1 if the x of one of the threads is not 0, otherwise 0."""
    return np.uint32(_named(number).wait(int(number), int(threads), bool(x)))


@instruction("bar.arrive {number}, {threads};", number=u32, threads=u32)
def bar_arrive(number: Any, threads: Any) -> None:
    """Arrive at a named barrier without waiting: `threads` counts those that wait there as well."""
    barrier = _named(number)
    with barrier.changed:
        barrier.arrive(int(threads))
