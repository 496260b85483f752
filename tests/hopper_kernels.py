"""Small kernels in the instructions of compute capability 9.0, to be simulated: see kernel_process.

Each makes the case for one instruction, and a host function runs it.
"""

import importlib.util
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from flashsim.fp8 import signs as fp8_signs
from flashsim.kernels import arrays, fp8, gpu, hopper, launch, padding
from flashsim.kernels.gpu import cuda, kernel, types, uint32
from flashsim.kernels.ptx import mbarrier, shared, tma, warp, warpgroup, wgmma
from flashsim.kernels.warpgroup_tiles import (
    WarpgroupTile,
    columns_by_columns,
    load,
    load_transposed,
    rounded_four,
    rows_by_columns,
    rows_by_rows,
    rows_by_transposed,
)
from kernel_process import launch_counted

THREADS = 128


class Crowded(WarpgroupTile):
    """A tile with one place for Q, which O leaves from before the next is loaded."""

    places = 1


def attention(q, k, v, tile, algorithm="hopper", **what):
    """(algorithm, output, lse, traffic) of a kernel, with the tile (Br, Bc, stages, ping_pong).

    Then, it may say "crowded": as if shared memory had no room for a second Q.
    """
    Br, Bc, stages, ping_pong, *crowded = tile
    d = -(-q.shape[-1] // 64) * 64
    chosen = (Crowded if crowded else WarpgroupTile)(Br, Bc, d, stages, ping_pong)
    plan = launch.plan(q, k, v, algorithm=algorithm, tile=chosen, **what)
    traffic = launch_counted(plan)
    return plan.algorithm, plan.result("O"), plan.result("L"), traffic


def in_fp8(q, k, v, stages, ping_pong, Br=64, **what):
    """The same of the kernel in FP8, with the elements that are loaded in pairs."""
    tile = WarpgroupTile(Br, 128, 128, stages, ping_pong, fp8=True)
    plan = launch.plan(q, k, v, algorithm="hopper_fp8", tile=tile, **what)
    traffic = launch_counted(plan)
    return plan.algorithm, plan.result("O"), plan.result("L"), traffic


def quantised(x, rotated, transposed):
    """(e4m3 bits, scales) of x (batch, heads, N, d): of rows, or of columns as they are stored."""
    (batch, heads, N, d), T = x.shape, -(-x.shape[2] // 128)
    shape = (batch, heads, d, 64 * T) if transposed else (batch, heads, N, d // 2)
    X8, scales = np.zeros(shape, np.uint16), np.zeros((batch, heads, T), np.float32)
    signs, stored = fp8_signs(d).astype(np.float32), x.view(np.uint16)
    function = fp8.quantised(d, x.dtype.name, rotated, transposed)
    shared_bytes = fp8.shared_bytes(d, transposed)
    grid, args = batch * heads * T, (stored, X8, scales, signs)
    gpu.launch(function, grid, fp8.THREADS, shared_bytes, 0, args)
    return X8.view(np.uint8), scales


def slowly_looked_at(late, *args, **what):
    """As `attention`, but the warps that look through V are long at a barrier, the `late`-th."""

    def bar_sync(barrier, threads):
        if threads == THREADS - 32:
            mine = threading.current_thread().__dict__
            mine["met"] = mine.get("met", 0) + 1
            if mine["met"] == late:
                time.sleep(1.5)
        warpgroup.bar_sync(barrier, threads)

    with mock.patch.object(hopper, "bar_sync", bar_sync):
        return attention(*args, **what)


def again(q, k, v, tile):
    """O of the second launch of a plan."""
    plan = launch.plan(q, k, v, algorithm="hopper", tile=WarpgroupTile(*tile))
    plan.launch()
    plan.made["O"][0][:] = 0
    plan.launch()
    return plan.result("O")


def ran(q, k, v, **what):
    """Which kernel a call would launch."""
    return launch.plan(q, k, v, **what).algorithm


def tiles_of(q, k, v, **what):
    """Which (Br, Bc) it would have."""
    tile = launch.plan(q, k, v, **what).tile
    return tile.Br, tile.Bc


def repeats(x, strides):
    """Whether an operand (3, 3, 1) of such strides is taken to repeat."""
    return replace(arrays.operand("x", x), shape=(3, 3, 1), strides=strides).repeats


def backward_ran(x, lse, **what):
    """Which kernel a call for gradients would launch, of one array for all."""
    return launch.plan_backward(x, x, x, x, lse, x, algorithm="hopper", **what).algorithm


def late(which, *arrays, **what):
    """dQ, dK and dV if one warpgroup lags behind at its products, and after each named barrier."""
    plan = launch.plan_backward(*arrays, **what)
    together, wait = wgmma.together, warpgroup._Named.wait

    def lag():
        if threading.current_thread().thread_id // THREADS == which:
            time.sleep(0.02)

    def late_together(*group):
        lag()
        return together(*group)

    def late_wait(*barrier):
        outcome = wait(*barrier)
        lag()
        return outcome

    wgmma.together, warpgroup._Named.wait = late_together, late_wait
    try:
        plan.launch()
    finally:
        wgmma.together, warpgroup._Named.wait = together, wait
    return [plan.result(name) for name in ("dQ", "dK", "dV")]


def backward_default(d):
    """The default (Br, Bc) of a backward pass, and the bytes of shared memory it takes."""
    row = launch.BACKWARD["hopper"]
    tiles = launch.default_tiles(row, d, 227 * 1024)
    return tiles, row.shared_bytes(*tiles, d)


def turns(Tr, heads, section):
    """(query tile, head) of every block."""
    numbers = (np.uint32(n) for n in (Tr, heads, section))
    Tr, heads, section = numbers
    return [
        tuple(map(int, hopper.in_order(np.uint32(n), Tr, heads, section)))
        for n in range(Tr * heads)
    ]


def descriptor(address, panel_bytes):
    """The bits of a descriptor."""
    return int(wgmma.descriptor(address, panel_bytes))


def odd(word, total, dtype):
    """What is left when 0 times the two elements of a register are added to a total."""
    return int(warp.add_nothing(dtype)(np.uint32(word), np.uint32(total)))


def _aligned(sm):
    return uint32((1024 - shared.shared_address(sm, 0) % 1024) % 1024 // 2)


def copied(x, box_rows, column, row, head, batch, *, fence=True):
    """A box of x as it lies in shared memory: before the wait, after it, and from which address."""

    @kernel(1)
    def copy(X, before, after, address):
        sm = cuda.shared.array(0, types.uint16)
        at = _aligned(sm)
        to = shared.shared_address(sm, at)
        bar = uint32(to + box_rows * 128)
        mbarrier.mbarrier_init(bar, 1)
        mbarrier.fence_mbarrier_init()
        mbarrier.mbarrier_expect_tx(bar, box_rows * 128)
        if fence:
            tma.fence_tensor_map(X)
        tma.tma_load(to, X, column, row, head, batch, bar)
        for n in range(box_rows * 64):
            before[n] = sm[at + n]
        mbarrier.mbarrier_wait(bar, 0)
        for n in range(box_rows * 64):
            after[n] = sm[at + n]
        address[0] = to

    before, after = np.zeros((2, box_rows * 64), np.uint16)
    address = np.zeros(1, np.uint32)
    (boxes,) = tma.tensor_maps({"x": (x, box_rows)}, "float16")
    copy[1, 1, 0, 1024 + box_rows * 128 + 8](boxes, before, after, address)
    return before, after, int(address[0])


def copied_back(x, box_rows, column, row, head, batch, *, wait=True, fence=True):
    """Store a box whose element (r, c) is 64 r + c, into x in place; x."""

    @kernel(1)
    def copy(X):
        sm = cuda.shared.array(0, types.uint16)
        at = _aligned(sm)
        for r in range(box_rows):
            for c in range(64):
                sm[at + r * 64 + (c // 8 ^ r % 8) * 8 + c % 8] = 64 * r + c
        if fence:
            shared.fence_proxy_async()
        tma.fence_tensor_map(X)
        tma.tma_store(shared.shared_address(sm, at), X, column, row, head, batch)
        tma.tma_commit_group()
        if wait:
            tma.tma_wait_group()

    copy[1, 1, 0, 1024 + box_rows * 128](*tma.tensor_maps({"x": (x, box_rows)}, "float16"))
    return x


def product(a, b, dtype, *, early=False, fence=True, skew=0):
    """A Bᵀ for 16-bit bits a (rows, d), b (columns, d), rows at most 64: (64, columns) by `wgmma`.

    early: read before the wait. skew: added to the descriptor of B.
    """
    columns, d = -(-len(b) // 8) * 8, a.shape[1]
    count, start = columns // 2, rows_by_rows(64, columns, d, dtype)
    load_A, load_B, wait = load(64, d), load(columns, d), wgmma.wgmma_wait_group(0)
    rows, places = wgmma.accumulator(columns)
    multiply = wgmma.wgmma_shared(columns, dtype)

    @kernel(THREADS)
    def run(A, B, out):
        sm = cuda.shared.array(0, types.uint16)
        sA = shared.shared_address(sm, _aligned(sm))
        sB = uint32(sA + 128 * d)
        bar = uint32(sB + 2 * columns * d)
        tid = cuda.threadIdx.x
        if tid == 0:
            mbarrier.mbarrier_init(bar, 2)
        cuda.syncthreads()
        if tid == 0:
            tma.fence_tensor_map(A)
            tma.fence_tensor_map(B)
            load_A(sA, A, 0, 0, 0, bar)
            load_B(sB, B, 0, 0, 0, bar)
        mbarrier.mbarrier_wait(bar, 0)
        D = cuda.local.array(count, np.float32)
        if fence:
            start(D, wgmma.descriptor(sA, 0), wgmma.descriptor(sB, 0) + np.uint64(skew))
        else:
            multiply(D, 0, wgmma.descriptor(sA, 0), wgmma.descriptor(sB, 0), 0)
        if not early:
            wait()
        for n in range(count):
            out[rows[tid, n], places[tid, n]] = D[n]

    out = np.zeros((64, columns), np.float32)
    boxes = {"a": (a[None, None], 64), "b": (b[None, None], columns)}
    maps = tma.tensor_maps(boxes, dtype)
    run[1, THREADS, 0, 2048 + 2 * (64 + columns) * d + 8](*maps, out)
    return out


def product_from_registers(p, b, dtype, held, *, touch=False):
    """held + P B for 16-bit bits p (64, keys), b (keys, d): by `wgmma` with P in registers.

    touch: overwrite P before the wait.
    """
    keys, d = b.shape
    start, load_B, wait = rows_by_columns(keys, d, dtype), load(keys, d), wgmma.wgmma_wait_group(0)
    count, registers = d // 2, keys // 4
    rows, columns = wgmma.accumulator(d)

    @kernel(THREADS)
    def run(P, B, out):
        sm = cuda.shared.array(0, types.uint16)
        sB = shared.shared_address(sm, _aligned(sm))
        bar = uint32(sB + 2 * keys * d)
        tid = cuda.threadIdx.x
        if tid == 0:
            mbarrier.mbarrier_init(bar, 1)
        cuda.syncthreads()
        if tid == 0:
            tma.fence_tensor_map(B)
            load_B(sB, B, 0, 0, 0, bar)
        mbarrier.mbarrier_wait(bar, 0)
        A = cuda.local.array(registers, np.uint32)
        g, t, w = tid % 32 // 4, tid % 4, tid // 32
        for n in range(registers):
            r, c = 16 * w + g + 8 * (n % 2), 8 * (n // 2) + 2 * t
            A[n] = np.uint32(P[r, c]) | np.uint32(P[r, c + 1]) << np.uint32(16)
        D = cuda.local.array(count, np.float32)
        for n in range(count):
            D[n] = out[rows[tid, n], columns[tid, n]]
        start(D, A, wgmma.descriptor(sB, 128 * keys))
        if touch:
            A[:] = 0
        wait()
        for n in range(count):
            out[rows[tid, n], columns[tid, n]] = D[n]

    out = held.astype(np.float32)
    maps = tma.tensor_maps({"b": (b[None, None], keys)}, dtype)
    run[1, THREADS, 0, 1024 + 2 * keys * d + 8](p, *maps, out)
    return out


def product_of_weights(S, vt, held):
    """held + P V for float32 S (64, 128), rounded to P, and Vᵀ (d, 256), of which 128 columns.

    They are the last, in the order that P is rounded in; e4m3, whose bits come in pairs.
    """
    d = len(vt)
    start, load_V = rows_by_transposed(128, d), load_transposed(d)
    round_S, wait, count = rounded_four(128), wgmma.wgmma_wait_group(0), d // 2
    (S_rows, S_columns), (rows, columns) = wgmma.accumulator(128), wgmma.accumulator(d)

    @kernel(THREADS)
    def run(S, V, out):
        sm = cuda.shared.array(0, types.uint16)
        sV = shared.shared_address(sm, _aligned(sm))
        bar = uint32(sV + 128 * d)
        tid = cuda.threadIdx.x
        if tid == 0:
            mbarrier.mbarrier_init(bar, 1)
        cuda.syncthreads()
        if tid == 0:
            tma.fence_tensor_map(V)
            load_V(sV, V, 128, 0, 0, bar)
        mbarrier.mbarrier_wait(bar, 0)
        mine = cuda.local.array(64, np.float32)
        P = cuda.local.array(32, np.uint32)
        D = cuda.local.array(count, np.float32)
        for n in range(64):
            mine[n] = S[S_rows[tid, n], S_columns[tid, n]]
        for n in range(count):
            D[n] = out[rows[tid, n], columns[tid, n]]
        round_S(mine, P)
        start(D, P, wgmma.descriptor(sV, 0))
        wait()
        for n in range(count):
            out[rows[tid, n], columns[tid, n]] = D[n]

    out = held.astype(np.float32)
    maps = tma.tensor_maps({"v": (vt.view(np.uint16)[None, None], d)}, "float16")
    run[1, THREADS, 0, 1024 + 128 * d + 8](S, *maps, out)
    return out


def phases(count, arrivals, size):
    """What thread 0 sees, who waits for each of some phases of a barrier.

    In phase n the other `count` threads each write n + 1 and arrive, the first of them expecting
    `size` bytes of a copy. Seen: the least that they wrote, and the last element of the copy.
    """
    x = np.arange(64, dtype=np.uint16).reshape(1, 1, 1, 64)

    @kernel(count + 1)
    def run(X, seen, done):
        sm = cuda.shared.array(0, types.uint16)
        at = _aligned(sm)
        to = shared.shared_address(sm, at)
        bar, empty = uint32(to + 1024), uint32(to + 1032)
        tid = cuda.threadIdx.x
        if tid == 0:
            mbarrier.mbarrier_init(bar, count)
            mbarrier.mbarrier_init(empty, 1)
        cuda.syncthreads()
        for n in range(arrivals):
            if tid == 0:
                mbarrier.mbarrier_wait(bar, n % 2)
                seen[n] = min(done[1:]), sm[at + 63]
                mbarrier.mbarrier_arrive(empty)
            else:
                mbarrier.mbarrier_wait(empty, (n + 1) % 2)
                done[tid] = n + 1
                if tid == 1:
                    if size:
                        mbarrier.mbarrier_expect_tx(bar, size)
                        tma.fence_tensor_map(X)
                        tma.tma_load(to, X, 0, 0, 0, 0, bar)
                    else:
                        mbarrier.mbarrier_arrive(bar)
                else:
                    mbarrier.mbarrier_arrive(bar)

    seen, done = np.zeros((arrivals, 2), np.int64), np.zeros(count + 1, np.int64)
    run[1, count + 1, 0, 4096](*tma.tensor_maps({"x": (x, 1)}, "float16"), seen, done)
    return seen


def waits_forever(pretend_seconds):
    """What an emulated thread says that waits for bytes which nobody sends."""

    @kernel(1)
    def run():
        sm = cuda.shared.array(0, types.uint16)
        bar = shared.shared_address(sm, _aligned(sm))
        mbarrier.mbarrier_init(bar, 1)
        mbarrier.mbarrier_expect_tx(bar, 64)
        mbarrier.mbarrier_wait(bar, 0)

    real, mbarrier.DEADLOCK_SECONDS = mbarrier.DEADLOCK_SECONDS, pretend_seconds
    try:
        run[1, 1, 0, 2048]()
    except RuntimeError as error:
        return str(error)
    finally:
        mbarrier.DEADLOCK_SECONDS = real
    return ""


def in_turns(rounds):
    """The order in which two warps write, of which each lets the other on by a named barrier."""
    order = []

    @kernel(64)
    def run(out):
        tid = cuda.threadIdx.x
        w = tid // 32
        if w == 1:
            warpgroup.bar_arrive(1, 64)
        for n in range(rounds):
            warpgroup.bar_sync(1 + w, 64)
            if tid % 32 == 0:
                order.append(int(w))
            if w == 0:
                warpgroup.bar_arrive(2, 64)
            elif n + 1 < rounds:
                warpgroup.bar_arrive(1, 64)

    run[1, 64](np.zeros(1))
    return order


def _tune():
    """benchmarks/tune.py."""
    file = Path(__file__).parent.parent / "benchmarks" / "tune.py"
    spec = importlib.util.spec_from_file_location("tune", file)
    tune = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tune)
    return tune


def tuned_tiles(d):
    """The candidates of a width, and the default; in text."""
    row = launch.KERNELS["hopper"]
    default = row.tile(*launch.default_tiles(row, d, 227 * 1024), d)
    return [str(t) for t in _tune().candidates("hopper", d)], str(default)


def tuning_refused():
    """With what message the tuning ends where there is no GPU."""
    real, sys.argv = sys.argv, ["tune.py"]
    try:
        _tune().main()
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = real
    return ""


def product_of_columns(a, b, dtype, first=0, *, touch=False):
    """Aᵀ B for 16-bit bits a (keys, 64), b (keys, n), of B the columns from `first` on.

    touch: overwrite the first element of A before the wait.
    """
    keys, n = b.shape[0], b.shape[1] - first
    start, load_A = columns_by_columns(keys, n, dtype), load(keys, 64)
    width, wait = -(-b.shape[1] // 64) * 64, wgmma.wgmma_wait_group(0)
    load_B, count, (rows, columns) = load(keys, width), n // 2, wgmma.accumulator(n)
    panel = 128 * keys

    @kernel(THREADS)
    def run(A, B, out):
        sm = cuda.shared.array(0, types.uint16)
        sA = shared.shared_address(sm, _aligned(sm))
        sB = uint32(sA + panel)
        bar = uint32(sB + 2 * keys * width)
        tid = cuda.threadIdx.x
        if tid == 0:
            mbarrier.mbarrier_init(bar, 2)
        cuda.syncthreads()
        if tid == 0:
            tma.fence_tensor_map(A)
            tma.fence_tensor_map(B)
            load_A(sA, A, 0, 0, 0, bar)
            load_B(sB, B, 0, 0, 0, bar)
        mbarrier.mbarrier_wait(bar, 0)
        D = cuda.local.array(count, np.float32)
        there = uint32(sB + first // 64 * panel + first % 64 * 2)
        start(D, wgmma.descriptor(sA, 0), wgmma.descriptor(there, panel))
        if touch and tid == 0:
            sm[_aligned(sm)] = 0
            shared.fence_proxy_async()
        wait()
        for e in range(count):
            out[rows[tid, e], columns[tid, e]] = D[e]

    out = np.zeros((64, n), np.float32)
    boxes = {"a": (a[None, None], keys), "b": (b[None, None], keys)}
    run[1, THREADS, 0, 2048 + panel + 2 * keys * width + 8](*tma.tensor_maps(boxes, dtype), out)
    return out


def added(x, total, row, column, *, touch_after="", wait=True):
    """total, once x (a row of floats) was copied on chip and added to it from (row, column) on.

    Besides, what was on chip before the copy was waited for. touch_after: when to overwrite x on
    chip, "commit" or "read". wait: whether to wait for the addition.
    """
    count, all_read = x.shape[1], tma.tma_wait_group_read(0)

    @kernel(1)
    def run(x, total, before):
        sm = cuda.shared.array(0, types.uint16)
        floats = cuda.shared.array(0, types.float32)
        at = _aligned(sm)
        to = shared.shared_address(sm, at)
        bar = uint32(to + 4 * count)
        mbarrier.mbarrier_init(bar, 1)
        mbarrier.mbarrier_expect_tx(bar, 4 * count)
        tma.bulk_load(to, x, 0, 0, 4 * count, bar)
        for n in range(count):
            before[n] = floats[at // 2 + n]
        mbarrier.mbarrier_wait(bar, 0)
        tma.bulk_add(total, row, column, to, 4 * count)
        tma.tma_commit_group()
        for moment in ("commit", "read"):
            if moment == touch_after:
                for n in range(count):
                    floats[at // 2 + n] = 1000
                shared.fence_proxy_async()
            all_read()
        if wait:
            tma.tma_wait_group()

    before = np.zeros(count, np.float32)
    run[1, 1, 0, 2048 + 4 * count](x, total, before)
    return total, before


def key_tiles(keys, Bc, first, stop):
    """What `padding.walked_tiles` writes; and of each item, the tiles from one key to another."""
    threads, Tc = 4, -(-keys.shape[1] // Bc)
    rank = np.full((len(keys), Tc + 1), -7, np.int32)
    walked = np.full((len(keys), Tc, padding.entry(Bc)), -7, np.int32)
    padding.walked_tiles(Bc, threads)[len(keys), threads, 0, 4 * threads](
        keys.view(np.uint8), rank, walked
    )
    between = padding.tiles_between(Bc, True)
    return rank, walked, [between((rank, walked), b, first, stop) for b in range(len(keys))]
