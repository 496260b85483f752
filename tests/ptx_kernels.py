"""Small kernels that try one instruction of kernels/ptx each, for tests/test_ptx.py.

They run in a process of their own, see tests/kernel_process.py.
"""

import numpy as np

from flashsim.kernels import gpu, warp_tiles
from flashsim.kernels.gpu import cuda, float32, kernel, types, uint32
from flashsim.kernels.ptx import warp


def run(function, *arrays, threads=32, shared_bytes=4096):
    gpu.launch(function, 1, threads, shared_bytes, 0, arrays)


def load_matrices(tile, transposed):
    """(32, 4) registers that `ldmatrix` makes of a 16 x 16 tile: its four parts, by columns."""
    load = warp.ldmatrix_trans if transposed else warp.ldmatrix

    @kernel(32)
    def loads(A, out):
        sm = cuda.shared.array(0, types.uint16)
        lane = uint32(cuda.threadIdx.x)
        for n in range(8):
            sm[8 * lane + n] = A[lane // 2, 8 * (lane % 2) + n]
        cuda.syncthreads()
        D = cuda.local.array(4, uint32)
        load(D, 0, sm, 16 * (lane % 16) + 8 * (lane // 16))
        for n in range(4):
            out[lane, n] = D[n]

    out = np.zeros((32, 4), np.uint32)
    run(loads, tile, out)
    return out


def store_matrices(registers):
    """A 16 x 16 tile that `stmatrix` makes of (32, 4) registers: its four parts, by columns."""

    @kernel(32)
    def stores(registers, out):
        sm = cuda.shared.array(0, types.uint16)
        lane = uint32(cuda.threadIdx.x)
        S = cuda.local.array(6, uint32)
        for n in range(4):
            S[n + 2] = registers[lane, n]
        warp.stmatrix(sm, 16 * (lane % 16) + 8 * (lane // 16), S, 2)
        cuda.syncthreads()
        for n in range(8):
            out[lane // 2, 8 * (lane % 2) + n] = sm[8 * lane + n]

    out = np.zeros((16, 16), np.uint16)
    run(stores, registers, out)
    return out


def multiply(A, B, C, dtype):
    """(32, 4) registers of D = A B + C, from those of A (32, 4), B (32, 2) and C (32, 4)."""
    mma = warp.mma(dtype)

    @kernel(32)
    def multiplies(A, B, D):
        lane = cuda.threadIdx.x
        a, b = cuda.local.array(8, uint32), cuda.local.array(6, uint32)
        d = cuda.local.array(8, float32)
        for n in range(4):
            a[n + 4], d[n + 4] = A[lane, n], D[lane, n]
        for n in range(2):
            b[n + 4] = B[lane, n]
        mma(d, 4, a, 4, b, 4)
        for n in range(4):
            D[lane, n] = d[n + 4]

    D = C.copy()
    run(multiplies, A, B, D)
    return D


def copies(A, pending):
    """What each lane's row holds: before a wait, after one for all but `pending`, and at last.

    Two groups: the first half of the row, then the second; odd rows are not to be read.
    """
    some, all_of_them = warp.cp_async_wait(pending), warp.cp_async_wait(0)

    @kernel(32)
    def copying(A, out):
        sm = cuda.shared.array(0, types.uint16)
        lane = uint32(cuda.threadIdx.x)
        for half in range(2):
            size = 16 if lane % 2 == 0 else 0
            warp.cp_async(sm, 16 * lane + 8 * half, A, lane, 8 * half, size)
            warp.cp_async_commit()
        for turn in range(3):
            if turn == 1:
                some()
            if turn == 2:
                all_of_them()
            for n in range(16):
                out[turn, lane, n] = sm[16 * lane + n]

    out = np.zeros((3, 32, 16), np.uint16)
    run(copying, A, out)
    return out


def alone(x, y, dtype):
    """exp2(x), the bits of x and y packed, and x of the lane whose number differs in bit 1.

    And the packed bits of lane 3 n % 32, and whether x is above 0, of all lanes.
    """
    pack = warp.pack(dtype)

    @kernel(32)
    def calls(x, y, power, packed, other, third, above):
        lane = cuda.threadIdx.x
        power[lane] = warp.exp2(x[lane])
        packed[lane] = pack(y[lane], x[lane])
        other[lane] = warp.shuffle_xor(x[lane], uint32(2))
        third[lane] = warp.shuffle_bits(packed[lane], uint32(3 * lane % 32))
        above[lane] = warp.ballot(uint32(1 if x[lane] > 0 else 0))

    power, other = np.zeros(32, np.float32), np.zeros_like(x)
    packed, third, above = np.zeros((3, 32), np.uint32)
    run(calls, x, y, power, packed, other, third, above)
    return power, packed, other, third, above


def four_packed(x):
    """The bits (32,) of four columns of x (32, 4), packed."""

    @kernel(32)
    def packs(x, out):
        n = cuda.threadIdx.x
        out[n] = warp.pack_four(x[n, 0], x[n, 1], x[n, 2], x[n, 3])

    out = np.zeros(32, np.uint32)
    run(packs, x, out)
    return out


def turned_round(A):
    """A (32, 4) of float32 whose pairs of columns were loaded at once, and stored the other way."""

    @kernel(32)
    def copies(A, out):
        lane = uint32(cuda.threadIdx.x)
        X = cuda.local.array(6, float32)
        warp.fetch_two(X, 1, A, lane, uint32(0))
        warp.fetch_two(X, 3, A, lane, uint32(2))
        warp.store_two(out, lane, uint32(0), X[4], X[3])
        warp.store_two(out, lane, uint32(2), X[2], X[1])

    out = np.zeros_like(A)
    run(copies, A, out)
    return out


def round_trip(pairs):
    """A matrix (32, 8) of 16-bit elements that went on chip in pairs and came back in one piece.

    But for every third row, which was made 0 there.
    """

    @kernel(32)
    def stores(pairs, out):
        sm = cuda.shared.array(0, types.uint16)
        lane = uint32(cuda.threadIdx.x)
        for n in range(4):
            warp.store_pair(sm, 8 * lane + 2 * n, pairs[lane, n])
        if lane % 3 == 0:
            warp.clear_eight(sm, 8 * lane)
        warp.copy_out(out, lane, 0, sm, 8 * lane)

    out = np.zeros((32, 8), np.uint16)
    run(stores, pairs, out)
    return out


def diverge():
    """A warp whose first lane shuffles while the others load."""

    @kernel(32)
    def diverging(out):
        sm = cuda.shared.array(0, types.uint16)
        D = cuda.local.array(4, uint32)
        if cuda.threadIdx.x == 0:
            out[0] = warp.shuffle_xor(float32(0), uint32(1))
        else:
            warp.ldmatrix(D, 0, sm, uint32(0))

    run(diverging, np.zeros(1, np.float32))


def places(rows, d):
    """(rows, d / 8): where each chunk of a tile lies, and the same reached from the row's first."""
    place = warp_tiles.place(d)
    grid = np.ndindex(rows, d // 8)
    at = [(place(r, c), warp_tiles.further(place(r, 0), c)) for r, c in grid]
    return np.array(at).reshape(rows, d // 8, 2)
