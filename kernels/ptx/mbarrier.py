"""Barriers in shared memory, which wait for threads and for the bytes of copies.

An mbarrier goes through phases, which are numbered 0, 1, 0, 1, ... (their parity). A phase is
complete when as many arrivals as it was made for have come, and all bytes that were expected. Of
the PTX ISA manual: "Parallel Synchronization and Communication Instructions: mbarrier".
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .base import instruction, u32
from .emulation import block

__all__ = [
    "DEADLOCK_SECONDS", "Barrier", "at", "fence_mbarrier_init", "mbarrier_arrive",
    "mbarrier_expect_tx", "mbarrier_init", "mbarrier_wait",
]  # fmt: skip

DEADLOCK_SECONDS = 60  # that an emulated thread waits before it says for what


class Barrier:
    """An mbarrier in the simulator; copies complete only when somebody waits for their bytes."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.parity = 0
        self.copies: list[tuple[int, Callable[[], None]]] = []
        self.changed = threading.Condition()

    def settle(self) -> None:
        """End the phase if nothing is missing; the caller holds `changed`."""
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.parity ^= 1
            self.changed.notify_all()

    def arrive(self, expected_bytes: int) -> None:
        """One arrival, after so many bytes more are expected."""
        with self.changed:
            if self.pending == 0:
                raise RuntimeError(f"more than {self.count} arrivals in a phase of an mbarrier")
            self.bytes += expected_bytes
            self.pending -= 1
            self.settle()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity is complete; copies that hold it up complete now."""
        with self.changed:
            while self.parity == parity:
                if self.copies:
                    for size, copy in self.copies:
                        copy()
                        self.bytes -= size
                    self.copies.clear()
                    self.settle()
                elif not self.changed.wait(DEADLOCK_SECONDS):
                    raise RuntimeError(
                        f"phase {parity} of an mbarrier does not end: {self.pending} arrivals and "
                        f"{self.bytes} bytes are missing"
                    )


def at(address: Any) -> Barrier:
    """The barrier at an address; emulation only."""
    found: Barrier = block()["mbarriers"][int(address)]
    return found


@instruction("mbarrier.init.shared::cta.b64 [{barrier}], {count};", barrier=u32, count=u32)
def mbarrier_init(barrier: Any, count: Any) -> None:
    """Make a barrier of the 8 bytes at an address, for `count` arrivals a phase; by one thread."""
    block().setdefault("mbarriers", {})[int(barrier)] = Barrier(int(count))


@instruction("fence.mbarrier_init.release.cluster; fence.proxy.async;")
def fence_mbarrier_init() -> None:
    """After `mbarrier_init`, before threads synchronise: bulk copies see the new barriers too."""


@instruction("mbarrier.arrive.shared::cta.b64 _, [{barrier}];", barrier=u32)
def mbarrier_arrive(barrier: Any) -> None:
    """One arrival at the phase that runs."""
    at(barrier).arrive(0)


@instruction(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {size};", barrier=u32, size=u32
)
def mbarrier_expect_tx(barrier: Any, size: Any) -> None:
    """One arrival, and the phase waits for `size` bytes more of copies that name the barrier."""
    at(barrier).arrive(int(size))


@instruction(
    "{ .reg .pred done; again: "
    "mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity}; "
    "@done bra end; bra again; end: }",
    barrier=u32, parity=u32,
)  # fmt: skip
def mbarrier_wait(barrier: Any, parity: Any) -> None:
    """Until the phase of this parity is complete, that is, until one of the other parity runs.

    On a new barrier, parity 1 does not wait: as if a phase before the first were complete. What was
    written before the arrivals, and by the copies, is there then.
    """
    at(barrier).wait(int(parity))
