"""Shared memory by its address, as descriptors, barriers and bulk copies name it.

An address is 32 bits wide, of the window that is shared memory. Under Numba's simulator the window
begins where no tile may, 16 bytes past a multiple of 1024, and is full of garbage. There are two of
it: what threads write is in their own, and `wgmma` and bulk copies read another, the async proxy's;
what bulk copies write is in both.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from .base import Result, Shared, instruction, u32
from .emulation import block

__all__ = ["START", "fence_proxy_async", "memory", "put", "shared_address", "swizzled"]

START = 1024 + 16  # of the window, in the simulator
_first = threading.Lock()


@instruction("mov.b32 {address}, {source};", address=Result(u32), source=Shared(), pure=True)
def shared_address(sm: Any, at: Any) -> Any:
    """The address of sm[at], for sm the whole dynamic shared memory of the block."""
    with _first:
        if "shared memory" not in block():
            window = sm.view(np.uint8)
            window[:] = 0xFF  # NaN
            block()["shared memory"] = window.view(np.uint16), window.view(np.uint16).copy()
    return np.uint32(START + int(at) * sm.itemsize)


@instruction("fence.proxy.async.shared::cta;")
def fence_proxy_async() -> None:
    """What this thread wrote to shared memory is seen by `wgmma` and bulk copies issued after it.

    They reach memory by another way than threads do, the async proxy; PTX ISA, "Proxies".
    """
    threads, engines = block()["shared memory"]
    engines[:] = threads


def memory() -> Any:
    """Shared memory as the async proxy has it, in 16-bit elements from START on; emulation only."""
    return block()["shared memory"][1]


def put(where: Any, what: Any) -> None:
    """What the async proxy writes, by indices of 16-bit elements; emulation only."""
    for window in block()["shared memory"]:
        window[where] = what


def swizzled(address: Any) -> Any:
    """Where 128-byte swizzling puts what would lie at an address; emulation only.

    The 16-byte chunks of a row of 128 bytes change places, by the number of the row among eight: a
    column of a tile is then spread over all banks. PTX ISA, "Swizzling Modes": bits 4 to 6 of an
    address are xored with bits 7 to 9.
    """
    return address ^ (address >> 3 & 0x70)
