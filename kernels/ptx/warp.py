"""What a warp of compute capability 8.0 does with tiles: copy them on chip, load, multiply.

A warp has 32 threads, or lanes; lane = 4 g + t with g = lane // 4, t = lane % 4. A register of 32
bits holds two neighbouring 16-bit elements, the first in its low half. The PTX ISA manual has a
section by the name of each instruction; the layouts of `mma` are in its "Matrix Fragments for
mma.m16n8k16 with floating point type".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...fp8 import E4M3, LARGEST
from .. import gpu
from .base import Global, Reads, Result, Shared, Updates, Writes, f32, instruction, u32
from .emulation import GARBAGE, element_bits, elements, thread, together

__all__ = [
    "add_nothing", "ballot", "clear_eight", "copy_out", "cp_async", "cp_async_commit",
    "cp_async_wait", "cp_async_word", "exp2", "fetch_two", "ldmatrix", "ldmatrix_trans",
    "load_eight", "load_two", "load_words", "mma", "opaque", "pack", "pack_four", "reciprocal",
    "red_add", "shuffle_bits", "shuffle_xor", "shuffle_xor_bits", "stmatrix", "store_eight",
    "store_pair", "store_two",
]  # fmt: skip

G, T = np.divmod(np.arange(32), 4)
# Row and column of each element that a lane holds in mma.m16n8k16: (lane, register, half).
A_ROWS = np.broadcast_to(G[:, None, None] + np.array([0, 8, 0, 8])[:, None], (32, 4, 2))
A_COLUMNS = 2 * T[:, None, None] + np.array([0, 0, 8, 8])[:, None] + np.arange(2)
B_ROWS = 2 * T[:, None, None] + np.array([0, 8])[:, None] + np.arange(2)
B_COLUMNS = np.broadcast_to(G[:, None, None], (32, 2, 2))
D_ROWS = G[:, None] + np.array([0, 0, 8, 8])  # (lane, register): these are float32
D_COLUMNS = 2 * T[:, None] + np.array([0, 1, 0, 1])


def _ldmatrix(D: Any, d: Any, sm: Any, at: Any, transposed: bool) -> None:
    def load(given: list[Any]) -> list[Any]:
        rows = np.array([shared[first : first + 8] for shared, first in given], np.uint16)
        matrices = rows.reshape(4, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        lanes = zip(G, T, strict=True)
        return [np.ascontiguousarray(matrices[:, g, 2 * t : 2 * t + 2]) for g, t in lanes]

    D[d : d + 4] = together(32, "ldmatrix", (sm, int(at)), load).view(np.uint32)[:, 0]


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {D}, [{source}];", D=Writes(u32, 4), source=Shared()
)
def ldmatrix(D: Any, d: Any, sm: Any, at: Any) -> None:
    """D[d : d + 4] = four 8 x 8 matrices of 16-bit elements in shared memory.

    Lane l says where row l % 8 of matrix l // 8 begins: sm[at], 16 bytes from there. Register n
    gets elements 2 t and 2 t + 1 of row g of matrix n.
    """
    _ldmatrix(D, d, sm, at, False)


@instruction(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {D}, [{source}];",
    D=Writes(u32, 4), source=Shared(),
)  # fmt: skip
def ldmatrix_trans(D: Any, d: Any, sm: Any, at: Any) -> None:
    """As `ldmatrix`, each matrix transposed: elements 2 t and 2 t + 1 of its column g."""
    _ldmatrix(D, d, sm, at, True)


@instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{target}], {S};", target=Shared(), S=Reads(u32, 4)
)
def stmatrix(sm: Any, at: Any, S: Any, s: Any) -> None:
    """Four 8 x 8 matrices in S[s : s + 4] go to shared memory, as `ldmatrix` would load them.

    Of compute capability 9.0.
    """

    def store(given: list[Any]) -> list[Any]:
        halves = np.array([registers for _, _, registers in given]).view(np.uint16)
        matrices = halves.reshape(8, 4, 4, 2).transpose(2, 0, 1, 3).reshape(32, 8)
        for (shared, first, _), row in zip(given, matrices, strict=True):
            shared[first : first + 8] = row
        return [None] * 32

    together(32, "stmatrix", (sm, int(at), S[s : s + 4].copy()), store)


@cache
def mma(dtype: str) -> Any:
    """mma(D, d, A, a, B, b): D += A B for A (16, 16), B (16, 8), D (16, 8) of a warp.

    A, B of `dtype`, D float32. A lane holds of
    A: rows g and g + 8, columns 2 t, 2 t + 1 of the left half, then of the right: four registers;
    B: rows 2 t, 2 t + 1 of the upper half, then of the lower, column g: two registers;
    D: row g, columns 2 t and 2 t + 1, then row g + 8: four floats.
    """
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]

    def emulated(D: Any, d: Any, A: Any, a: Any, B: Any, b: Any) -> None:
        def multiply(given: list[Any]) -> list[Any]:
            wide_A, wide_B = np.empty((16, 16), np.float32), np.empty((16, 8), np.float32)
            for wide, rows, columns, words in (
                (wide_A, A_ROWS, A_COLUMNS, [x[0] for x in given]),
                (wide_B, B_ROWS, B_COLUMNS, [x[1] for x in given]),
            ):
                wide[rows, columns] = elements(words, dtype).reshape(rows.shape)
            return list((wide_A @ wide_B)[D_ROWS, D_COLUMNS])

        given = A[a : a + 4].copy(), B[b : b + 2].copy()
        D[d : d + 4] += together(32, "mma", given, multiply)

    emulated.__name__ = f"mma_{kind}"
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{D}}, {{A}}, {{B}}, {{D}};"
    return instruction(text, D=Updates(f32, 4), A=Reads(u32, 4), B=Reads(u32, 2), pure=True)(
        emulated
    )


def _start_copy(sm: Any, at: Any, A: Any, i: Any, j: Any, real: int, count: int) -> None:
    found = np.array([A[int(i), int(j) + n] if n < real else 0 for n in range(count)], sm.dtype)
    sm[at : at + count] = GARBAGE if sm.dtype == np.uint16 else np.nan
    thread().__dict__.setdefault("copying", []).append((sm, int(at), found))


@instruction(
    "cp.async.cg.shared.global.L2::128B [{target}], [{source}], 16, {size};",
    target=Shared(), source=Global(), size=u32,
)  # fmt: skip
def cp_async(sm: Any, at: Any, A: Any, i: Any, j: Any, size: Any) -> None:
    """Start to copy 16 bytes from A[i, j] on to sm[at] on.

    Past L1, so that it costs what the model says. `size` 0 reads nothing, and zeros arrive; else it
    is 16. Both addresses are multiples of 16 bytes. Until `cp_async_wait` sm may hold anything, and
    only for the thread that waits it is there then: a barrier must follow.
    """
    _start_copy(sm, at, A, i, j, 8 if size else 0, 8)


@instruction(
    "cp.async.ca.shared.global [{target}], [{source}], 4, {size};",
    target=Shared(), source=Global(), size=u32,
)  # fmt: skip
def cp_async_word(sm: Any, at: Any, A: Any, i: Any, j: Any, size: Any) -> None:
    """As `cp_async`, but 4 bytes, one float32, and through L1; `size` is 0 or 4."""
    _start_copy(sm, at, A, i, j, 1 if size else 0, 1)


@instruction("cp.async.commit_group;")
def cp_async_commit() -> None:
    """Make a group of the copies that this thread has started since the last."""
    mine = thread().__dict__
    mine.setdefault("copy_groups", []).append(mine.pop("copying", []))


@cache
def cp_async_wait(pending: int) -> Any:
    """cp_async_wait(): until at most `pending` groups of this thread are left."""

    def emulated() -> None:
        groups = thread().__dict__.setdefault("copy_groups", [])
        while len(groups) > pending:
            for sm, at, found in groups.pop(0):
                sm[at : at + len(found)] = found

    emulated.__name__ = f"cp_async_wait_{pending}"
    return instruction(f"cp.async.wait_group {pending};")(emulated)


@instruction("ex2.approx.ftz.f32 {y}, {x};", y=Result(f32), x=f32, pure=True)
def exp2(x: Any) -> Any:
    """2 to the power of x, to 2 units in the last place; exact at -inf: 0."""
    return np.exp2(np.float32(x))


@instruction("rcp.approx.ftz.f32 {y}, {x};", y=Result(f32), x=f32, pure=True)
def reciprocal(x: Any) -> Any:
    """1 / x, to 1 unit in the last place: an exact division is a subroutine."""
    return np.float32(1) / np.float32(x)


@cache
def pack(dtype: str) -> Any:
    """pack(high, low): two float32, rounded to nearest even, as one register."""
    kind = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]

    def emulated(high: Any, low: Any) -> Any:
        return np.uint32(element_bits(high, dtype)) << np.uint32(16) | element_bits(low, dtype)

    emulated.__name__ = f"pack_{kind}"
    text = f"cvt.rn.{kind}.f32 {{y}}, {{high}}, {{low}};"
    return instruction(text, y=Result(u32), high=f32, low=f32, pure=True)(emulated)


@instruction(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {second}, {first}; "
    "cvt.rn.satfinite.e4m3x2.f32 high, {fourth}, {third}; mov.b32 {y}, {low, high}; }",
    y=Result(u32), first=f32, second=f32, third=f32, fourth=f32, pure=True,
)  # fmt: skip
def pack_four(first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Four float32, rounded to the nearest e4m3, as one register; what is too large becomes 448."""
    four = np.clip(np.array([first, second, third, fourth], np.float32), -LARGEST, LARGEST)
    return four.astype(E4M3).view(np.uint32)[0]


def _exchange(x: Any, lanes: Any) -> Any:
    def exchange(given: list[Any]) -> list[Any]:
        return [given[lane ^ int(lanes)] for lane in range(32)]

    return together(32, "shfl", x, exchange)


@instruction(
    "shfl.sync.bfly.b32 {y}, {x}, {lanes}, 0x1f, 0xffffffff;", y=Result(f32), x=f32, lanes=u32
)
def shuffle_xor(x: Any, lanes: Any) -> Any:
    """The x of the lane whose number is this one's xor `lanes`."""
    return _exchange(x, lanes)


@instruction(
    "shfl.sync.bfly.b32 {y}, {x}, {lanes}, 0x1f, 0xffffffff;", y=Result(u32), x=u32, lanes=u32
)
def shuffle_xor_bits(x: Any, lanes: Any) -> Any:
    """As `shuffle_xor`, of a register that holds bits."""
    return _exchange(x, lanes)


@instruction(
    "shfl.sync.idx.b32 {y}, {x}, {lane}, 0x1f, 0xffffffff;", y=Result(u32), x=u32, lane=u32
)
def shuffle_bits(x: Any, lane: Any) -> Any:
    """The x of another lane, whose number each lane gives."""

    def look_up(given: list[Any]) -> list[Any]:
        return [given[other][0] for _, other in given]

    return together(32, "shfl.idx", (x, int(lane)), look_up)


@instruction(
    "{ .reg .pred yes; setp.ne.b32 yes, {x}, 0; vote.sync.ballot.b32 {y}, yes, 0xffffffff; }",
    y=Result(u32), x=u32,
)  # fmt: skip
def ballot(x: Any) -> Any:
    """Bit l says whether lane l's x is other than 0."""

    def count(given: list[Any]) -> list[Any]:
        return [np.uint32(sum(1 << lane for lane, x in enumerate(given) if x))] * 32

    return together(32, "vote", x, count)


@instruction("red.global.add.f32 [{target}], {x};", target=Global(), x=f32)
def red_add(A: Any, i: Any, j: Any, x: Any) -> None:
    """A[i, j] += x in float32, whoever else adds to it, in an order left open."""
    gpu.add(A, int(i), int(j), x)


@instruction("st.shared.b32 [{target}], {pair};", target=Shared(), pair=u32)
def store_pair(sm: Any, at: Any, pair: Any) -> None:
    """sm[at], sm[at + 1] = the two 16-bit elements of a register; at is even."""
    sm[at], sm[at + 1] = pair & np.uint32(0xFFFF), pair >> np.uint32(16)


@instruction(
    "{ .reg .b32 w<4>; ld.shared.v4.b32 {w0, w1, w2, w3}, [{source}]; "
    "st.global.v4.b32 [{target}], {w0, w1, w2, w3}; }",
    target=Global(), source=Shared(),
)  # fmt: skip
def copy_out(A: Any, i: Any, j: Any, sm: Any, at: Any) -> None:
    """A[i, j : j + 8] = sm[at : at + 8]: 16 bytes, half a sector, in one instruction each way."""
    for n in range(8):
        A[int(i), int(j) + n] = sm[at + n]


@instruction("st.global.v2.f32 [{target}], {{x}, {y}};", target=Global(), x=f32, y=f32)
def store_two(A: Any, i: Any, j: Any, x: Any, y: Any) -> None:
    """A[i, j], A[i, j + 1] = x, y of float32 in one instruction; j is even."""
    A[int(i), int(j)], A[int(i), int(j) + 1] = x, y


@instruction("ld.shared.v4.b32 {W}, [{source}];", W=Writes(u32, 4), source=Shared())
def load_words(W: Any, w: Any, sm: Any, at: Any) -> None:
    """W[w : w + 4] = the eight 16-bit elements from sm[at] on, 16 bytes, in one instruction."""
    W[w : w + 4] = np.ascontiguousarray(sm[at : at + 8]).view(np.uint32)


@instruction(
    "{ .reg .b32 zero; mov.b32 zero, 0; st.shared.v4.b32 [{target}], {zero, zero, zero, zero}; }",
    target=Shared(),
)  # fmt: skip
def clear_eight(sm: Any, at: Any) -> None:
    """The eight 16-bit elements from sm[at] on, 16 bytes, become 0, in one instruction."""
    sm[at : at + 8] = 0


@instruction("mov.b32 {y}, {x};", y=Result(u32), x=u32)
def opaque(x: Any) -> Any:
    """x, but the compiler cannot tell: what follows from it in a loop is computed turn by turn.

    Otherwise it would be computed once, before the loop, and stay in registers.
    """
    return x


@instruction("ld.shared.v2.f32 {X}, [{source}];", X=Writes(f32, 2), source=Shared())
def load_two(X: Any, x: Any, floats: Any, at: Any) -> None:
    """X[x : x + 2] = floats[at : at + 2] of shared memory, in one instruction; at is even."""
    X[x : x + 2] = floats[at : at + 2]


@instruction("ld.global.cg.v2.f32 {X}, [{source}];", X=Writes(f32, 2), source=Global())
def fetch_two(X: Any, x: Any, A: Any, i: Any, j: Any) -> None:
    """X[x : x + 2] = A[i, j : j + 2] of float32, past L1, in one instruction; j is even."""
    X[x], X[x + 1] = A[int(i), int(j)], A[int(i), int(j) + 1]


@instruction("ld.global.cg.v4.b32 {W}, [{source}];", W=Writes(u32, 4), source=Global())
def load_eight(W: Any, w: Any, A: Any, i: Any, j: Any) -> None:
    """W[w : w + 4] = the eight 16-bit elements A[i, j : j + 8], past L1, in one instruction."""
    found = np.array([A[int(i), int(j) + n] for n in range(8)], np.uint16)
    W[w : w + 4] = found.view(np.uint32)


@instruction("st.global.v4.b32 [{target}], {W};", target=Global(), W=Reads(u32, 4))
def store_eight(A: Any, i: Any, j: Any, W: Any, w: Any) -> None:
    """A[i, j : j + 8] = the eight 16-bit elements in W[w : w + 4], in one instruction."""
    for n, x in enumerate(np.ascontiguousarray(W[w : w + 4]).view(np.uint16)):
        A[int(i), int(j) + n] = x


@cache
def add_nothing(dtype: str) -> Any:
    """add_nothing(x, total): 0 x + total for the two 16-bit elements of a register each.

    It stays 0 unless there is inf or NaN: then it is NaN for good.
    """
    kind = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]

    def emulated(x: Any, total: Any) -> Any:
        exponent = {"float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
        odd = any(int(x) >> n & exponent == exponent for n in (0, 16))
        return np.uint32(0x7FFF7FFF) if odd else total

    emulated.__name__ = f"add_nothing_{kind}"
    text = f"{{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.{kind} {{y}}, {{x}}, zero, {{total}}; }}"
    return instruction(text, y=Result(u32), x=u32, total=u32, pure=True)(emulated)
