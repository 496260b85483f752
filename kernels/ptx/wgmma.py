"""Matrix products of a warpgroup, on tiles in shared memory that a descriptor describes.

`wgmma` only starts a product: a group of them runs by itself until it is waited for, and meanwhile
neither its accumulators nor the registers and the shared memory that it reads may be touched. In
the simulator it reads all of that at the wait, but may have read shared memory at once: what
changed there is NaN, and until the wait so are its accumulators. The sections are those of the PTX
ISA manual: "Asynchronous Warpgroup Level Matrix Instructions".

A tile in shared memory is made of panels: 64 columns of 16-bit elements, so a row is 128 bytes,
which are swizzled as `tma` leaves them; the rows of a panel follow each other, and it begins at a
multiple of 1024 bytes. Two 8-bit elements, e4m3, lie where one of 16 bits would.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..gpu import device, uint32, uint64
from .base import Reads, Updates, f32, instruction, u32, u64
from .emulation import GARBAGE, elements, thread, together
from .shared import START, memory, swizzled

__all__ = [
    "PANEL", "ROW_BYTES", "accumulator", "descriptor", "pin",
    "wgmma_columns", "wgmma_commit_group", "wgmma_fence", "wgmma_registers",
    "wgmma_registers_rows", "wgmma_shared", "wgmma_wait_group",
]  # fmt: skip

PANEL, ROW_BYTES = 64, 128  # columns of a panel, and bytes from row to row of it
SUMMED = {"float16": 16, "bfloat16": 16, "e4m3": 32}  # columns of A and B in a product: 32 bytes
EIGHT_ROWS = 8 * ROW_BYTES  # bytes: the pattern of swizzling repeats
SWIZZLE_128_BYTES = 1

# Row of the 64, and column, of each element that a thread holds, (128, ...). "Register Fragments".
_WARP, _LANE = np.divmod(np.arange(128), 32)
_G, _T = np.divmod(_LANE, 4)
A_ROWS = (16 * _WARP + _G)[:, None, None] + np.array([0, 8, 0, 8])[:, None] + np.zeros(2, int)
A_COLUMNS = (2 * _T)[:, None, None] + np.array([0, 0, 8, 8])[:, None] + np.arange(2)
A8_ROWS = (16 * _WARP + _G)[:, None, None] + np.array([0, 8, 0, 8])[:, None] + np.zeros(4, int)
A8_COLUMNS = (4 * _T)[:, None, None] + np.array([0, 0, 16, 16])[:, None] + np.arange(4)


def accumulator(n: int) -> tuple[Any, Any]:
    """Rows and columns (128, n / 2) of D (64, n), by thread and register.

    With g = lane // 4 and t = lane % 4, a thread of warp w holds columns 8 i + 2 t and the next of
    row 16 w + g, then of row 16 w + g + 8, for i = 0, 1, ...
    """
    i = np.arange(n // 2)
    rows = (16 * _WARP + _G)[:, None] + 8 * (i // 2 % 2)
    columns = (2 * _T)[:, None] + 8 * (i // 4) + i % 2
    return rows, columns


@device
def descriptor(address, panel_bytes):
    """What tells `wgmma` where a matrix is in shared memory; "Matrix Descriptor Format".

    Lengths are in units of 16 bytes: bits 0 to 13 the address; bits 16 to 29 how far it is to the
    next 64 columns, which only a matrix whose rows are keys of the sum needs (panel_bytes, 0 for
    others); bits 32 to 45 how far it is to the next eight rows; bits 62 and 63 the swizzling.
    """
    return (
        uint64((uint32(address) & uint32(0x3FFFF)) >> uint32(4))
        | uint64(panel_bytes // 16) << uint64(16)
        | uint64(EIGHT_ROWS // 16) << uint64(32)
        | uint64(SWIZZLE_128_BYTES) << uint64(62)
    )


class Described:
    """A matrix of 16-bit elements in shared memory, as its descriptor has it; emulation only."""

    def __init__(self, word: int) -> None:
        self.start, self.leading, self.stride = ((word >> n & 0x3FFF) << 4 for n in (0, 16, 32))
        if word >> 62 != SWIZZLE_128_BYTES or word >> 49 & 7:
            raise RuntimeError(f"descriptor {word:#x}: expected 128-byte swizzling from offset 0")

    def read(self, rows: int, transposed: bool) -> Any:
        """(rows, 16) bits: of a K-major matrix, or, transposed, of an MN-major one.

        "Canonical Layouts", 128-byte swizzling: ((8,m),(T,2k)):((8T,SBO),(1,T)) and
        ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO)) with T = 8 elements.
        """
        r, c = np.arange(rows)[:, None], np.arange(16)
        if transposed:
            there = r % 64 * 2 + r // 64 * self.leading + c % 8 * 128 + c // 8 * self.stride
        else:
            there = r % 8 * 128 + r // 8 * self.stride + c * 2
        return memory()[(swizzled(self.start + there) - START) // 2]


def _start(D: Any, A: Any, b: Any, scale_d: Any, dtype: str, transposed: tuple[bool, bool]) -> None:
    """Note a product of this thread; its accumulators are out of reach until the wait.

    transposed: whether A, and whether B, has in its rows what is summed over.
    """
    mine = thread()
    if not mine.__dict__.get("fenced"):
        raise RuntimeError("wgmma: registers were touched since the last wgmma_fence")
    begun = mine.__dict__.setdefault("accumulators", {})
    if id(D) not in begun:
        begun[id(D)] = D, D.copy()
        D[:] = np.nan
    mine.__dict__.setdefault("products", []).append((id(D), A, int(b), scale_d, dtype, transposed))
    if mine.thread_id % 128 == 0:  # one for all: what it may read at once
        there = [Described(int(b)).read(2 * len(D), transposed[1])]
        if isinstance(A, int):
            there.append(Described(A).read(64, transposed[0]))
        mine.__dict__.setdefault("at once", []).append(there)


def _multiply(given: list[Any]) -> list[Any]:
    """What the accumulators of each thread become: (its products, its accumulators) of each.

    And of the first, what its products may have read at once.
    """
    D = [list(held) for _, held, _ in given]
    for at_once, *same in zip(given[0][2], *(products for products, *_ in given), strict=True):
        (which, A, b, scale_d, dtype, transposed), n = same[0], 2 * len(D[0][same[0][0]])
        in_shared = isinstance(A, int)
        if len({(p[0], p[1] if in_shared else 0, *p[2:]) for p in same}) > 1:
            raise RuntimeError("wgmma: the threads of a warpgroup have different operands")
        if in_shared:
            left = _wide(Described(A).read(64, transposed[0]), at_once[1], dtype)
        else:
            at = (A8_ROWS, A8_COLUMNS) if dtype == "e4m3" else (A_ROWS, A_COLUMNS)
            left = np.empty((64, SUMMED[dtype]), np.float32)
            words = np.stack([array[first : first + 4] for array, first in (p[1] for p in same)])
            left[at] = elements(words, dtype).reshape(at[0].shape)
        rows, columns = accumulator(n)
        total = np.zeros((64, n), np.float32)
        if scale_d:
            total[rows, columns] = np.stack([mine[which] for mine in D])
        total += left @ _wide(Described(b).read(n, transposed[1]), at_once[0], dtype).T
        for mine, new in zip(D, total[rows, columns], strict=True):
            mine[which] = new
    return D


def _wide(bits: Any, at_once: Any, dtype: str) -> Any:
    bits[bits != at_once] = GARBAGE
    return elements(bits.view(np.uint32), dtype).reshape(len(bits), -1)


def _text(n: int, dtype: str, A: str, flags: str) -> str:
    kind = {"float16": "f16", "bfloat16": "bf16"}.get(dtype, dtype)
    return (
        "{ .reg .pred add; setp.ne.b32 add, {scale_d}, 0; wgmma.mma_async.sync.aligned."
        f"m64n{n}k{SUMMED[dtype]}.f32.{kind}.{kind} {{D}}, {A}, {{b}}, add, {flags}; }}"
    )


@cache
def wgmma_shared(n: int, dtype: str) -> Any:
    """wgmma_shared(D, 0, a, b, add): start D = A Bᵀ, or D += A Bᵀ if add is 1; "wgmma.mma_async".

    A (64, 16) and B (n, 16) of `dtype` are in shared memory, a and b their descriptors; of a wider
    tile, 16 columns further is 32 bytes further. Of "e4m3" there are 32 in as many bytes. D (64, n)
    is the whole of a local array of float32, see `accumulator`.
    """
    flags = "1, 1" if dtype == "e4m3" else "1, 1, 0, 0"  # 8-bit matrices cannot be transposed

    def emulated(D: Any, d: Any, a: Any, b: Any, scale_d: Any) -> None:
        _start(D, int(a), b, int(scale_d), dtype, (False, False))

    emulated.__name__ = f"wgmma_shared_{n}_{dtype}"
    return instruction(
        _text(n, dtype, "{a}", flags), D=Updates(f32, n // 2), a=u64, b=u64, scale_d=u32
    )(emulated)


@cache
def wgmma_registers(n: int, dtype: str) -> Any:
    """wgmma_registers(D, 0, A, first, b, add): as `wgmma_shared`, but D += A B, and A in registers.

    A (64, 16) is A[first : first + 4], pairs of elements: with g, t and w as in `accumulator`, row
    16 w + g, columns 2 t and 2 t + 1; row 16 w + g + 8; then the same of columns 8 further. So
    accumulators of an earlier product, rounded in pairs, are an A. B (16, n) has its rows in shared
    memory as B of wgmma_shared has; here they are what is summed over, and its descriptor needs
    panel_bytes. Sixteen rows further is 2048 bytes further.
    """

    def emulated(D: Any, d: Any, A: Any, first: Any, b: Any, scale_d: Any) -> None:
        _start(D, (A, int(first)), b, int(scale_d), dtype, (False, True))

    emulated.__name__ = f"wgmma_registers_{n}_{dtype}"
    return instruction(
        _text(n, dtype, "{A}", "1, 1, 1"),
        D=Updates(f32, n // 2), A=Reads(u32, 4), b=u64, scale_d=u32,
    )(emulated)  # fmt: skip


@cache
def wgmma_registers_rows(n: int) -> Any:
    """wgmma_registers_rows(D, 0, A, first, b, add): D += A Bᵀ of e4m3, A in registers.

    B (n, 32) is as in `wgmma_shared`. A (64, 32) is A[first : first + 4], four elements each: row
    16 w + g, columns 4 t to 4 t + 3; row 16 w + g + 8; then the same of columns 16 further.
    """

    def emulated(D: Any, d: Any, A: Any, first: Any, b: Any, scale_d: Any) -> None:
        _start(D, (A, int(first)), b, int(scale_d), "e4m3", (False, False))

    emulated.__name__ = f"wgmma_registers_rows_{n}"
    return instruction(
        _text(n, "e4m3", "{A}", "1, 1"), D=Updates(f32, n // 2), A=Reads(u32, 4), b=u64, scale_d=u32
    )(emulated)


@cache
def wgmma_columns(n: int, dtype: str) -> Any:
    """wgmma_columns(D, 0, a, b, add): as `wgmma_shared`, but D = Aᵀ B, or D += Aᵀ B.

    A (16, 64) and B (16, n) have in their rows what is summed over, as B of wgmma_registers has;
    sixteen rows further is 2048 bytes further in both.
    """

    def emulated(D: Any, d: Any, a: Any, b: Any, scale_d: Any) -> None:
        _start(D, int(a), b, int(scale_d), dtype, (True, True))

    emulated.__name__ = f"wgmma_columns_{n}_{dtype}"
    return instruction(
        _text(n, dtype, "{a}", "1, 1, 1, 1"), D=Updates(f32, n // 2), a=u64, b=u64, scale_d=u32
    )(emulated)


@instruction("wgmma.fence.sync.aligned;")
def wgmma_fence() -> None:
    """Registers that were written before are there for the `wgmma` after; "wgmma.fence"."""
    thread().fenced = True


@instruction("wgmma.commit_group.sync.aligned;")
def wgmma_commit_group() -> None:
    """Make a group of the products started since the last; "wgmma.commit_group"."""
    mine = thread().__dict__
    mine.setdefault("groups", []).append(mine.pop("products", []))


@cache
def wgmma_wait_group(pending: int) -> Any:
    """wgmma_wait_group(): until all but the last `pending` groups are done; "wgmma.wait_group"."""

    def emulated() -> None:
        mine = thread().__dict__
        mine["fenced"] = False
        groups, begun = mine.setdefault("groups", []), mine.setdefault("accumulators", {})
        done = groups[: len(groups) - pending]
        if not done:
            return
        del groups[: len(done)]
        names = list(begun)
        products = [(names.index(D), *rest) for group in done for D, *rest in group]
        at_once = mine.get("at once", [])[: len(products)]
        mine["at once"] = mine.get("at once", [])[len(products) :]
        given = products, [x for _, x in begun.values()], at_once
        held = together(128, "wgmma", given, _multiply)
        flying = {D for group in groups for D, *_ in group}
        for D, new in zip(names, held, strict=True):
            array, _ = begun[D]
            if D in flying:
                begun[D] = array, new
            else:
                array[:] = new
                del begun[D]

    emulated.__name__ = f"wgmma_wait_group_{pending}"
    return instruction(f"wgmma.wait_group.sync.aligned {pending};")(emulated)


@cache
def pin(count: int) -> Any:
    """pin(D, 0): the compiler takes the `count` registers of D to change here.

    It knows nothing of products that run by themselves: pinned after the wait, accumulators are not
    read before; pinned before the fence, they are written by then. No instruction.
    """

    def emulated(D: Any, d: Any) -> None:
        pass

    emulated.__name__ = f"pin_{count}"
    return instruction("", D=Updates(f32, count))(emulated)
