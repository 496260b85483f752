"""The kernels' front door: checks what comes in, picks tiles, allocates, launches.

from flashsim import kernels
out = kernels.attention(q, k, v, is_causal=True)   # torch, CuPy, Numba or NumPy arrays
out.output, out.lse
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..checks import bad, bad_type
from ..fp8 import signs
from ..masks import band
from . import (
    ampere,
    ampere_backward,
    arrays,
    flash1,
    flash1_backward,
    flash2,
    flash2_backward,
    flash2_two_kernels,
    fp8,
    gpu,
    gradients,
    hopper,
    hopper_backward,
    padding,
    split_kv,
    standard,
)
from .arrays import Operand
from .hopper_backward import BackwardTile
from .masks import LOG2E, Features
from .tiles import Tile, loads_under_way, tile_for
from .warp_tiles import WarpTile, warp_tile_for
from .warpgroup_tiles import (
    FP8_ROWS,
    WARPGROUP,
    WarpgroupTile,
    fp8_tile_for,
    warpgroup_tile_for,
)

WIDEST = 256
ROWS = 8 if gpu.SIMULATED else 64  # that a block has of what is done row by row


class Turn(NamedTuple):
    """What a turn of a kernel's inner loop moves: two tiles of (rows, d) come on chip.

    dtypes: as what each is stored; back: whether the second goes back to HBM.
    """

    rows: int
    d: int
    dtypes: tuple[str, str]
    back: bool = False


@dataclass(frozen=True)
class Step:
    """One kernel launch: the kernel, the blocks, their threads and shared memory, the arguments.

    under_way: how many loads a thread has under way before it waits, and the bytes of each.
    sharing: how many blocks, one after the other in the grid, walk the same tiles.
    turn: of the loop over those, where it brings two tiles through registers.
    """

    name: str
    function: Any
    grid: int
    threads: int
    shared_bytes: int
    args: tuple[Any, ...]
    under_way: tuple[int, int]
    sharing: int
    turn: Turn | None = None


@dataclass
class Plan:
    """A call that is checked, allocated and compiled for, and may be launched again and again.

    Attributes
    ----------
    algorithm : str
    tile : Tile or WarpTile
    steps : list of Step
        What `launch` does, in order, on `stream` (its address).
    parts : int
        In how many parts split_kv walks the keys.
    inputs : tuple
        What the steps read: it must live as long, and a tensor map holds no more than its address.
    """

    algorithm: str
    tile: Any
    stream: int
    parts: int = 1
    steps: list[Step] = field(default_factory=list)
    made: dict[str, tuple[Any, Operand, str]] = field(default_factory=dict)
    inputs: tuple[Any, ...] = ()

    def add(
        self, name: str, function: Any, grid: int, threads: int, shared: int, args: tuple[Any, ...],
        under_way: tuple[int, int] = (1, 4), sharing: int = 1, turn: Turn | None = None,
    ) -> None:  # fmt: skip
        """Append a step."""
        step = Step(name, function, grid, threads, shared, args, under_way, sharing, turn)
        self.steps.append(step)

    def launch(self) -> None:
        """Launch every step; returns before they have run."""
        for step in self.steps:
            gpu.launch(
                step.function, step.grid, step.threads, step.shared_bytes, self.stream, step.args
            )

    def result(self, name: str) -> Any:
        """An array that the steps write, in the library of the inputs; for NumPy, a copy."""
        return arrays.handed_back(*self.made[name])


@dataclass(frozen=True)
class KernelAttention:
    """What `attention` returns: output like q, lse (..., Nq) in float32, and how it ran."""

    output: Any
    lse: Any
    algorithm: str
    tiles: tuple[int, int]


@dataclass
class Problem:
    """Checked inputs as kernels take them: (batch, heads, N, d)."""

    q: Operand
    k: Operand
    v: Operand
    Q: Any
    K: Any
    V: Any
    lead: tuple[int, ...]
    batch: int
    heads: int
    group: int
    Nq: int
    Nk: int
    d: int
    features: Features
    rules: tuple[Any, ...]  # the arguments that all kernels share
    scale: float
    stream: int
    incoherent: bool

    def make(self, plan: Plan, name: str, rest: tuple[int, ...], dtype: str, parts: int = 1) -> Any:
        """A new array (*lead, *rest) of the plan, seen as (parts batch, heads, *rest)."""
        shape = (parts * self.batch, self.heads, *rest)
        array, x = arrays.new(self.q, (*self.lead, *rest) if parts == 1 else shape, dtype)
        plan.made[name] = array, self.q, dtype
        return x.seen_as(shape, arrays.contiguous(shape, arrays.STORED[dtype].itemsize))


def attention(q: Any, k: Any, v: Any, **what: Any) -> KernelAttention:
    """Exact attention on the GPU, by the tiling of `algorithm`.

    Parameters
    ----------
    q, k, v : array (..., Nq, d), (..., Nk, d), (..., Nk, d)
        float32, float16 or bfloat16, all three the same, d at most 256: anything on one GPU with
        `__cuda_array_interface__` (torch, CuPy, Numba), used where it is and on the library's
        current stream, or NumPy, copied there and back. V is as wide as K.
    algorithm : str
        A name in `KERNELS`. One that does not cover the call leaves it to "flash2", and the result
        says so. "hopper_fp8" is not exact: it rounds Q, K, V and the weights to e4m3. It takes
        d = 128, causal masks and windows; inf and NaN that a mask hides in V reach the output.
    is_causal, causal_align, window, attn_mask, key_padding_mask, scale, dropout_p, seed, enable_gqa
        As in `flashsim.attention`; the masks may be arrays of the same libraries.
    block_mask : bool array (Tr, Tc), optional
        Which tiles count; needs `tiles`.
    tiles : (Br, Bc), optional
        Rows of a query and of a key tile; Bc is a multiple of 4.
    threads : (TY, TX), optional
        Threads of a block along Br and Bc; see `flashsim.kernels.tiles`.
    stream : int, optional
        Address of the CUDA stream to run on, instead of the library's current one.
    incoherent : bool
        Whether "hopper_fp8" rotates Q and K before it rounds them, as in `flashsim.attention`.

    Returns
    -------
    KernelAttention
        In the library of q. It does not wait for the GPU, but for NumPy.

    Raises
    ------
    RuntimeError
        No usable GPU.
    SharedMemoryError
        A ValueError: the tiles do not fit; the message says which would.
    ValueError, TypeError
        An argument is unusable; the message names it.
    """
    planned = plan(q, k, v, **what)
    planned.launch()
    return KernelAttention(
        planned.result("O"),
        planned.result("L"),
        planned.algorithm,
        (planned.tile.Br, planned.tile.Bc),
    )


def attention_backward(
    q: Any, k: Any, v: Any, output: Any, lse: Any, do: Any, **what: Any
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of `attention`, whichever algorithm it ran.

    But "hopper_fp8", whose lse is that of rounded Q and K.

    Parameters
    ----------
    q, k, v, **what
        As they were given to `attention`; `tiles` and `threads` are the backward pass's own, and so
        is `algorithm`, a name in `BACKWARD`. The default gives the same bits every time, and so
        does "flash1"; "flash2" adds up dq by atomics, in an order that is left open.
    output, lse
        What `attention` returned.
    do : array like output
        The gradient of the output.
    """
    planned = plan_backward(q, k, v, output, lse, do, **what)
    planned.launch()
    return planned.result("dQ"), planned.result("dK"), planned.result("dV")


def plan_backward(
    q: Any,
    k: Any,
    v: Any,
    output: Any,
    lse: Any,
    do: Any,
    *,
    algorithm: str = "flash2-two-kernel",
    tiles: tuple[int, int] | None = None,
    threads: tuple[int, int] | None = None,
    **what: Any,
) -> Plan:
    """The launches that `attention_backward` would do; arguments as there."""
    row = BACKWARD[checks.choice("algorithm", algorithm, BACKWARD)]
    _check_layout(algorithm, what.get("block_mask"), tiles)
    p = checked(q, k, v, tiles=tiles, **what)
    seen, others = [], []
    for name, array in (("output", output), ("lse", lse), ("do", do)):
        x = arrays.operand(name, array)
        _same_place(x, p.q)
        wanted = p.q.shape[:-1] if name == "lse" else p.q.shape
        if x.shape != wanted:
            raise bad(f"{name}.shape", x.shape, f"{wanted}, to go with q.shape={p.q.shape}")
        stored = "float32" if name == "lse" else p.q.dtype
        if x.dtype != stored:
            raise bad_type(f"{name}.dtype", x.dtype, stored)
        x = x.on_gpu()
        if name == "lse":  # as a matrix of width 1, for its batch dimensions
            item = arrays.STORED[stored].itemsize
            x = replace(x, shape=(*x.shape, 1), strides=(*x.strides, item))
        else:
            others.append(x)
        shape, strides = arrays.flattened(x)
        seen.append(x.seen_as(*((shape[:3], strides[:3]) if name == "lse" else (shape, strides))))
    if not row.covers(p, *others):
        algorithm, row, threads = "flash2", BACKWARD["flash2"], None
        tiles = tiles if p.features.layout else None
    default = default_tiles(row, p.d, gpu.shared_memory_bytes(), f=p.features)
    Br, Bc = checks.pair_of_tiles(tiles or default)
    made = Plan(algorithm, row.tile(Br, Bc, p.d, threads, row.results), p.stream)
    made.inputs = (p, *seen)
    row.build(p, made, *seen)
    for step in made.steps:
        _fits(step, made, row)
    return made


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    algorithm: str = "flash2",
    tiles: tuple[int, int] | None = None,
    threads: tuple[int, int] | None = None,
    tile: Any = None,
    **what: Any,
) -> Plan:
    """The launches that `attention` would do, to be timed or counted; arguments as there.

    tile: what `tiles` and `threads` say, and what they cannot, as the kernel takes it.
    """
    row = KERNELS[checks.choice("algorithm", algorithm, KERNELS)]
    _check_layout(algorithm, what.get("block_mask"), tiles)
    problem = checked(q, k, v, tiles=tiles, **what)
    if not problem.incoherent and algorithm != "hopper_fp8":
        raise bad("incoherent", False, "True, as algorithm is not 'hopper_fp8'")
    if not row.covers(problem):
        algorithm, row, threads = "flash2", KERNELS["flash2"], None
        tiles = tiles if problem.features.layout else None
    limit = gpu.shared_memory_bytes()
    default = default_tiles(row, problem.d, limit, problem.Nq, problem.features)
    Br, Bc = checks.pair_of_tiles(tiles or default)
    tile = tile or row.tile(Br, Bc, problem.d, threads)
    made = Plan(algorithm, tile, problem.stream)
    made.inputs = (problem,)
    row.build(problem, made)
    for step in made.steps:
        _fits(step, made, row)
    return made


def _check_layout(algorithm: str, block_mask: Any, tiles: Any) -> None:
    if block_mask is None and algorithm == "block_sparse":
        raise bad("block_mask", None, f"a block layout, for algorithm={algorithm!r}")
    if block_mask is not None and tiles is None:
        raise bad("tiles", None, "(Br, Bc), the tiles that block_mask speaks of")


def default_tiles(
    row: Row, d: int, limit: int, Nq: int | None = None, f: Features | None = None
) -> tuple[int, int]:
    """The first (Br, Bc) of the row that fit in `limit` bytes of shared memory, or the last.

    Where queries are few, no more rows than there are: each takes time in shared memory. f: what
    the kernel is to be compiled for, if that matters.
    """
    some = row.others(d, f or Features()) or row.tiles
    fitting = (tiles for tiles in some if row.shared_bytes(*tiles, d) <= limit)
    Br, Bc = next(fitting, some[-1])
    return (max(1, min(Br, Nq)) if row.few and Nq is not None else Br), Bc


def _fits(step: Step, made: Plan, row: Row) -> None:
    limit = gpu.shared_memory_bytes()
    if step.shared_bytes <= limit:
        return
    d = made.tile.d
    fitting = [
        (Br, Bc)
        for Br in (128, 64, 32, 16)
        for Bc in (128, 64, 32, 16)
        if row.shared_bytes(Br, Bc, d) <= limit
    ]
    raise gpu.SharedMemoryError(
        f"tiles={(made.tile.Br, made.tile.Bc)!r}: {step.name} needs {step.shared_bytes} bytes of "
        f"shared memory at d={d}, a block of this GPU has {limit}; of the tiles with powers of two "
        f"these fit: {fitting[:6]}"
    )


def under_way(rows: int, tile: Tile, p: Problem) -> tuple[int, int]:
    """Of the loads of a tile with so many rows."""
    return loads_under_way(rows, tile.d, tile.threads, p.q.dtype)


def turn_of(rows: int, p: Problem) -> Turn:
    """With two tiles of so many rows of the inputs."""
    return Turn(rows, p.d, (p.q.dtype, p.q.dtype))


def _flash2(p: Problem, made: Plan) -> None:
    tile = made.tile
    O = p.make(made, "O", (p.Nq, p.d), p.q.dtype)
    L = p.make(made, "L", (p.Nq,), "float32")
    grid = -(-p.Nq // tile.Br) * p.heads * p.batch
    args = (p.Q, p.K, p.V, O, L, np.int64(p.Nk), *p.rules)
    function = flash2.flash_attention_2(tile, p.features)
    shared, waits = flash2.arrangement(tile)["bytes"], under_way(tile.Bc, tile, p)
    Tr, turn = -(-p.Nq // tile.Br), turn_of(tile.Bc, p)
    made.add("flash2", function, grid, tile.threads, shared, args, waits, Tr, turn)


def _flash1(p: Problem, made: Plan) -> None:
    tile, wide = made.tile, p.q.dtype == "float32"
    O = p.make(made, "O" if wide else "O in HBM", (p.Nq, p.d), "float32")
    l = p.make(made, "l", (p.Nq,), "float32")
    m = p.make(made, "m", (p.Nq,), "float32")
    L = p.make(made, "L", (p.Nq,), "float32")
    rounded = O if wide else p.make(made, "O", (p.Nq, p.d), p.q.dtype)
    args = (p.Q, p.K, p.V, O, l, m, *p.rules)
    function = flash1.flash_attention_1(tile, p.features)
    shared = flash1.arrangement(tile)["bytes"]
    waits, turn = under_way(tile.Br, tile, p), Turn(tile.Br, p.d, (p.q.dtype, "float32"), back=True)
    made.add("flash1", function, p.heads * p.batch, tile.threads, shared, args, waits, turn=turn)
    rows = p.Nq * p.heads * p.batch
    function = flash1.finish(p.q.dtype, gpu.ROW_THREADS)
    made.add("finish", function, rows, gpu.ROW_THREADS, 0, (O, l, m, L, rounded))


def _standard(p: Problem, made: Plan) -> None:
    tile = made.tile
    O = p.make(made, "O", (p.Nq, p.d), p.q.dtype)
    L = p.make(made, "L", (p.Nq,), "float32")
    S = p.make(made, "S", (p.Nq, p.Nk), "float32")
    P = p.make(made, "P", (p.Nq, p.Nk), "float32")
    heads = p.heads * p.batch
    grid = -(-p.Nq // tile.Br) * heads
    function = standard.scores(tile, p.features)
    shared = standard.scores_arrangement(tile)["bytes"]
    waits, args = under_way(tile.Bc, tile, p), (p.Q, p.K, S, *p.rules)
    made.add("scores", function, grid, tile.threads, shared, args, waits, -(-p.Nq // tile.Br))
    threads = gpu.ROW_THREADS
    loads = 1 << max(0, -(-p.Nk // (4 * threads)) - 1).bit_length()
    loads = loads if loads <= standard.MOST_LOADS else 0
    function = standard.softmax(threads, loads)
    waits = (4 * loads, 4) if p.Nk % 4 else (loads, 16)
    waits = waits if loads else (1, 4)
    made.add("softmax", function, p.Nq * heads, threads, 8 * threads, (S, P, L), waits)
    function = standard.values(tile, p.features)
    shared = standard.values_arrangement(tile)["bytes"]
    waits, args = under_way(tile.Bc, tile, p), (P, p.V, O, *p.rules)
    made.add("values", function, grid, tile.threads, shared, args, waits)


def _split_kv(p: Problem, made: Plan) -> None:
    tile = made.tile
    rows = -(-p.Nq // tile.Br) * p.heads * p.batch
    made.parts, span = _parts(p.Nk, tile.Bc, _at_a_time(tile) // max(1, rows))
    O = p.make(made, "O", (p.Nq, p.d), p.q.dtype)
    L = p.make(made, "L", (p.Nq,), "float32")
    O_parts = p.make(made, "O_parts", (p.Nq, p.d), "float32", made.parts)
    L_parts = p.make(made, "L_parts", (p.Nq,), "float32", made.parts)
    function = flash2.flash_attention_2(tile, replace(p.features, output="float32"))
    args = (p.Q, p.K, p.V, O_parts, L_parts, np.int64(span), *p.rules)
    shared, waits = flash2.arrangement(tile)["bytes"], under_way(tile.Bc, tile, p)
    grid, turn = rows * made.parts, turn_of(tile.Bc, p)
    made.add("split", function, grid, tile.threads, shared, args, waits, turn=turn)
    _merge(p, made, O_parts, L_parts, O, L)


def _ampere(p: Problem, made: Plan) -> None:
    tile = made.tile
    O = p.make(made, "O", (p.Nq, p.d), p.q.dtype)
    L = p.make(made, "L", (p.Nq,), "float32")
    grid = -(-p.Nq // tile.Br) * p.heads * p.batch
    function = ampere.flash_attention_2(tile, p.features)
    shared = ampere.arrangement(tile)["bytes"]
    args, waits = (p.Q, p.K, p.V, O, L, *p.rules), (tile.Bc * tile.d // 8 // tile.threads, 16)
    made.add("ampere", function, grid, tile.threads, shared, args, waits, -(-p.Nq // tile.Br))


def _hopper(p: Problem, made: Plan, scales: Sequence[Any] = ()) -> None:
    tile = made.tile
    if tile.held > tile.registers[1]:
        accepted = f"tiles whose scores and output take at most {tile.registers[1]} registers"
        raise bad("tiles", (tile.Br, tile.Bc), f"{accepted} of a thread, not {tile.held}")
    O = p.make(made, "O", (p.Nq, p.d), p.q.dtype)
    L = p.make(made, "L", (p.Nq,), "float32")
    tables = (*_key_tiles(p, made), *scales)
    args = hopper.arguments(p, tile, p.features, p.Q, O, L, p.group, p.Nk, tables)
    function = hopper.flash_attention_3(tile, p.features)
    Tr, waits = -(-p.Nq // tile.Br), (2 * tile.stages * tile.KV_bytes // tile.threads // 16, 16)
    grid = min(Tr * p.heads * p.batch, gpu.multiprocessors())
    made.add("hopper", function, grid, tile.threads, tile.bytes, args, waits, Tr)


def _hopper_fp8(p: Problem, made: Plan) -> None:
    """The same, of Q, K and V in e4m3, which steps before make of them."""
    turned, scales, found = gpu.cuda.to_device(signs(p.d).astype(np.float32)), [], []
    blocks = -(-p.Nk // FP8_ROWS)
    columns = (p.d, blocks * FP8_ROWS // 2)
    for name, x, rest in (("Q", p.Q, None), ("K", p.K, None), ("V", p.V, columns)):
        batch, heads, N, _ = x.shape
        shapes = (batch, heads, *(rest or (N, p.d // 2))), (batch, heads, -(-N // FP8_ROWS))
        X8, scale = (
            arrays.new(p.q, shape, dtype)[1].seen_as(shape, arrays.contiguous(shape, size))
            for shape, dtype, size in zip(shapes, ("float16", "float32"), (2, 4), strict=True)
        )
        transposed, rotated = name == "V", name != "V" and p.incoherent
        function = fp8.quantised(p.d, p.q.dtype, rotated, transposed)
        grid, shared = batch * heads * -(-N // FP8_ROWS), fp8.shared_bytes(p.d, transposed)
        args, waits = (x, X8, scale, turned), fp8.loads_under_way(p.d)
        made.add(f"{name} in FP8", function, grid, fp8.THREADS, shared, args, waits)
        found.append(X8)
        scales.append(scale)
    Q8, K8, V8 = found
    made.inputs = (*made.inputs, *found)
    _hopper(replace(p, Q=Q8, K=K8, V=V8, features=replace(p.features, fp8=True)), made, scales)


def _hopper_split(p: Problem, made: Plan) -> None:
    """One query a head: the heads of a group are the rows of a tile, so K and V are read once."""
    tile, key_heads, f = made.tile, p.heads // p.group, replace(p.features, output="float32")
    O = p.make(made, "O", (1, p.d), p.q.dtype)
    L = p.make(made, "L", (1,), "float32")
    loading = 2 * gpu.multiprocessors()  # blocks
    made.parts, span = _parts(p.Nk, tile.Bc, loading // max(1, p.batch * key_heads))
    O_parts = p.make(made, "O_parts", (1, p.d), "float32", made.parts)
    L_parts = p.make(made, "L_parts", (1,), "float32", made.parts)
    by_batch, by_head, _, item = arrays.flattened(p.q)[1]
    rows = (key_heads, p.group, p.d)
    Q = p.q.seen_as((p.batch, *rows), (by_batch, p.group * by_head, by_head, item))
    each = made.parts * p.batch
    partial = O_parts.reshape(each, *rows), L_parts.reshape(each, *rows[:2])
    args = hopper.arguments(p, tile, f, Q, *partial, 1, span, _key_tiles(p, made))
    items = -(-p.group // tile.Br) * key_heads * p.batch * made.parts
    grid = min(items, gpu.multiprocessors())
    waits = 2 * tile.stages * tile.KV_bytes // tile.threads // 16, 16
    function = hopper.flash_attention_3(tile, f)
    made.add("split", function, grid, tile.threads, tile.bytes, args, waits)
    _merge(p, made, O_parts, L_parts, O, L)


def _key_tiles(p: Problem, made: Plan) -> tuple[Any, ...]:
    """What a step before the others finds of key tiles with a real key; nothing without padding."""
    if not p.features.keys:
        return ()
    Bc, threads = made.tile.Bc, gpu.ROW_THREADS
    tables, Tc = [], -(-p.Nk // Bc)
    for shape in ((p.batch, Tc + 1), (p.batch, Tc, padding.entry(Bc))):
        table = arrays.new(p.q, shape, "int32")[1]
        tables.append(table.seen_as(shape, arrays.contiguous(shape, 4)))
    function, args = padding.walked_tiles(Bc, threads), (p.rules[0], *tables)
    made.add("keys", function, p.batch, threads, 4 * threads, args)
    return tuple(tables)


def _at_a_time(tile: Tile) -> int:
    """Blocks that the GPU runs at a time, as one wave of them leaves no tail.

    On Hopper: a multiprocessor has 228 KB of shared memory, of which a block takes 1 KB more than
    it asks for, and registers for 512 threads that use 128.
    """
    by_room = 228 * 1024 // (flash2.arrangement(tile)["bytes"] + 1024)
    return gpu.multiprocessors() * max(1, min(by_room, 512 // tile.threads))


def _parts(Nk: int, Bc: int, wanted: int) -> tuple[int, int]:
    """In how many parts the keys are walked, of whole tiles, and the keys of a part."""
    span = -(-Nk // (Bc * max(1, min(-(-Nk // Bc), wanted)))) * Bc
    return max(1, -(-Nk // span) if span else 1), span


def _merge(p: Problem, made: Plan, O_parts: Any, L_parts: Any, O: Any, L: Any) -> None:
    threads = gpu.ROW_THREADS
    function = split_kv.merge(made.parts, p.d, threads, p.q.dtype)
    args, rows = (O_parts, L_parts, O, L), p.Nq * p.heads * p.batch
    waits = min(split_kv.LOADS, made.parts), 4
    made.add("merge", function, rows, threads, 4 * (made.parts + threads), args, waits)


def _tensor_cores(p: Problem, *others: Operand) -> bool:
    """Whether the kernels for tensor cores cover a problem, and the GPU has what they need.

    others: what a backward pass loads besides q, k and v: the output and its gradient.
    """
    return gpu.compute_capability() >= (8, 0) and p.d in (64, 128) and _sixteen_bits(p, *others)


def _warpgroups(p: Problem) -> bool:
    """The same of the kernel for warpgroups, which takes any width that the copy engine does.

    A tensor map is of something, and its rows, heads and batches lie apart.
    """
    something = min(p.batch, p.heads, p.Nq, p.Nk) > 0
    apart = all(not x.repeats for x in (p.q, p.k, p.v))
    return (
        gpu.compute_capability() == (9, 0)
        and p.d % 8 == 0
        and something
        and apart
        and _sixteen_bits(p)
    )


def _warpgroups_backward(p: Problem, *others: Operand) -> bool:
    """The same of the backward kernel, which holds all columns of dK and dV in registers."""
    apart = all(not x.repeats for x in others)
    return _warpgroups(p) and p.d <= 128 and apart and _sixteen_bits(p, *others)


def _eight_bits(p: Problem) -> bool:
    """The same of the kernel in FP8."""
    return _warpgroups(p) and p.d == FP8_ROWS and not (p.features.keys or p.features.dropout)


def _one_query(p: Problem) -> bool:
    f = p.features
    return _warpgroups(p) and p.Nq == 1 and not (f.band or f.dropout)


def _sixteen_bits(p: Problem, *others: Operand) -> bool:
    f = p.features
    return (
        f.dtype in ("float16", "bfloat16")
        and not (f.layout or f.mask)
        and float(p.scale) > 0
        and all(x.rows_aligned(16) for x in (p.q, p.k, p.v, *others))
    )


def _gradients(p: Problem, made: Plan, wide: str = "") -> tuple[Any, Any, Any]:
    """New dQ, dK and dV of the plan; `wide`: a dQ that is added up in HBM, in float32, is that."""
    key_lead = (*p.lead[:-1], p.heads // p.group) if p.lead else ()
    keys = replace(p, lead=key_lead, heads=p.heads // p.group)
    dQ = p.make(made, wide or "dQ", (p.Nq, p.d), "float32" if wide else p.q.dtype)
    return dQ, *(keys.make(made, name, (p.Nk, p.d), p.q.dtype) for name in ("dK", "dV"))


def _row_blocks(p: Problem) -> int:
    return -(-p.Nq // ROWS) * p.heads * p.batch


def _wide(p: Problem) -> str:
    return "dQ" if p.q.dtype == "float32" else "dQ in HBM"


def _round_dQ(p: Problem, made: Plan, dQ: Any) -> None:
    if p.q.dtype != "float32":
        rounded = p.make(made, "dQ", (p.Nq, p.d), p.q.dtype)
        function = gradients.rounded(ROWS, p.d, p.q.dtype, gpu.ROW_THREADS)
        made.add("round", function, _row_blocks(p), gpu.ROW_THREADS, 0, (dQ, rounded))


def _row_dots(p: Problem, made: Plan, O: Any, dO: Any) -> Any:
    D = p.make(made, "D", (p.Nq,), "float32")
    threads = max(32, gpu.ROW_THREADS)  # whole warps
    function = flash2_backward.row_dots(ROWS, p.d, threads, p.q.dtype)
    waits = flash2_backward.loads_under_way(p.d, p.q.dtype)
    made.add("D", function, _row_blocks(p), threads, 4 * ROWS, (dO, O, D), waits)
    return D


def _flash1_backward(p: Problem, made: Plan, O: Any, L: Any, dO: Any) -> None:
    tile = made.tile.swapped
    dQ, dK, dV = _gradients(p, made, _wide(p))
    l, m = (p.make(made, name, (p.Nq,), "float32") for name in "lm")
    threads = gpu.ROW_THREADS
    grid = -(-p.Nq * p.heads * p.batch // threads)
    made.add("statistics", flash1_backward.statistics(threads), grid, threads, 0, (L, l, m))
    function = flash1_backward.flash_attention_1_backward(tile, p.features)
    shared = gradients.arrangement(tile, output=True)["bytes"]
    args = (p.Q, p.K, p.V, O, l, m, dO, dQ, dK, dV, *p.rules)
    grid = p.heads // p.group * p.batch
    waits = under_way(tile.Bc, tile, p)
    made.add("flash1_backward", function, grid, tile.threads, shared, args, waits)
    _round_dQ(p, made, dQ)


def _flash2_backward(p: Problem, made: Plan, O: Any, L: Any, dO: Any) -> None:
    tile, threads = made.tile.swapped, gpu.ROW_THREADS
    dQ, dK, dV = _gradients(p, made, _wide(p))
    made.add("zeros", gradients.zeros(ROWS, p.d, threads), _row_blocks(p), threads, 0, (dQ,))
    D = _row_dots(p, made, O, dO)
    function = flash2_backward.flash_attention_2_backward(tile, p.features)
    shared = gradients.arrangement(tile)["bytes"]
    args = (p.Q, p.K, p.V, dO, L, D, dQ, dK, dV, *p.rules)
    Tc = -(-p.Nk // tile.Br)
    grid, waits = Tc * (p.heads // p.group) * p.batch, under_way(tile.Bc, tile, p)
    turn = turn_of(tile.Bc, p)
    made.add("flash2_backward", function, grid, tile.threads, shared, args, waits, Tc, turn)
    _round_dQ(p, made, dQ)


def _ampere_backward(p: Problem, made: Plan, O: Any, L: Any, dO: Any) -> None:
    tile, threads = made.tile, gpu.ROW_THREADS
    dQ, dK, dV = _gradients(p, made, _wide(p))
    made.add("zeros", gradients.zeros(ROWS, p.d, threads), _row_blocks(p), threads, 0, (dQ,))
    D = _row_dots(p, made, O, dO)
    function = ampere_backward.flash_attention_2_backward(tile, p.features)
    shared = ampere_backward.arrangement(tile)["bytes"]
    args = (p.Q, p.K, p.V, dO, L, D, dQ, dK, dV, *p.rules)
    Tc, waits = -(-p.Nk // tile.Br), (2 * tile.Bc * tile.d // 8 // tile.threads, 16)
    grid = Tc * (p.heads // p.group) * p.batch
    made.add("ampere_backward", function, grid, tile.threads, shared, args, waits, Tc)
    _round_dQ(p, made, dQ)


def _hopper_backward(p: Problem, made: Plan, O: Any, L: Any, dO: Any) -> None:
    tile, threads = made.tile, gpu.ROW_THREADS
    dQ, dK, dV = _gradients(p, made)
    Tr, Tc, heads = -(-p.Nq // tile.Br), -(-p.Nk // tile.Bc), p.heads * p.batch
    parts = p.make(made, "dQ in parts", (Tr * tile.Br, tile.d), "float32")
    grid = -(-Tr * tile.Br // ROWS) * heads
    made.add("zeros", gradients.zeros(ROWS, tile.d, threads), grid, threads, 0, (parts,))
    L2, D = (p.make(made, name, (Tr * tile.Br,), "float32") for name in ("L2", "D"))
    L2, D = (x.reshape(heads, Tr * tile.Br) for x in (L2, D))
    threads = max(32, threads)  # whole warps
    function = hopper_backward.row_statistics(p.d, threads, p.q.dtype)
    grid = -(-Tr * tile.Br // (hopper_backward.WARP_ROWS * threads // 32)) * heads
    waits = hopper_backward.loads_under_way(p.d), 16
    made.add("D", function, grid, threads, 0, (dO, O, L, L2, D), waits)
    parts = parts.reshape(heads * Tr * tile.consumers, tile.dQ_floats)
    args = hopper_backward.arguments(p, tile, dO, L2, D, parts, dK, dV, _key_tiles(p, made))
    function = hopper_backward.flash_attention_3_backward(tile, p.features)
    grid, waits = Tc * heads // p.group, (4 * tile.QdO_bytes // tile.threads // 16, 16)
    made.add("hopper_backward", function, grid, tile.threads, tile.bytes, args, waits, Tc)
    function = hopper_backward.finish(tile, p.q.dtype)
    made.add("finish", function, Tr * heads, WARPGROUP, 0, (parts, dQ, p.rules[5]), (8, 16))


def _two_kernels(p: Problem, made: Plan, O: Any, L: Any, dO: Any) -> None:
    tile = made.tile
    dQ, dK, dV = _gradients(p, made)
    D = _row_dots(p, made, O, dO)
    args = (p.Q, p.K, p.V, dO, L, D)
    function = flash2_two_kernels.keys_and_values(tile.swapped, p.features)
    shared = gradients.arrangement(tile.swapped)["bytes"]
    grid = -(-p.Nk // tile.Bc) * (p.heads // p.group) * p.batch
    wide, waits = (*args, dK, dV, *p.rules), under_way(tile.Br, tile, p)
    Tc, turn = -(-p.Nk // tile.Bc), turn_of(tile.Br, p)
    made.add("dKdV", function, grid, tile.threads, shared, wide, waits, Tc, turn)
    function = flash2_two_kernels.queries(tile, p.features)
    shared = flash2_two_kernels.queries_arrangement(tile)["bytes"]
    grid = -(-p.Nq // tile.Br) * p.heads * p.batch
    wide, waits = (*args, dQ, *p.rules), under_way(tile.Bc, tile, p)
    Tr, turn = -(-p.Nq // tile.Br), turn_of(tile.Bc, p)
    made.add("dQ", function, grid, tile.threads, shared, wide, waits, Tr, turn)


@dataclass(frozen=True)
class Row:
    """A row of a registry: what launches a kernel, its default tiles, largest first, and its room.

    room(tile): bytes of shared memory; results: as in tile_for; few: it is for few queries; tile:
    makes a tile of its sizes; covers(problem, do): whether it can; do: in a backward pass.
    others(d, features): default tiles where they are not `tiles`, as features take registers.
    """

    title: str
    build: Callable[..., None]
    tiles: tuple[tuple[int, int], ...]
    room: Callable[[Any], int]
    results: int = 1
    few: bool = False
    tile: Callable[..., Any] = tile_for
    covers: Callable[..., bool] = lambda *problem: True
    others: Callable[[int, Features], tuple[tuple[int, int], ...]] = lambda d, f: ()

    def shared_bytes(self, Br: int, Bc: int, d: int) -> int:
        """Bytes of shared memory that a block takes; too many if it takes no such tiles."""
        try:
            return self.room(self.tile(Br, Bc, d, results=self.results))
        except ValueError:
            return sys.maxsize


def _standard_room(tile: Tile) -> int:
    return max(
        standard.scores_arrangement(tile)["bytes"], standard.values_arrangement(tile)["bytes"]
    )


def _flash1_room(tile: Tile) -> int:
    return flash1.arrangement(tile)["bytes"]


def _flash2_room(tile: Tile) -> int:
    return flash2.arrangement(tile)["bytes"]


def _flash1_backward_room(tile: Tile) -> int:
    return gradients.arrangement(tile.swapped, output=True)["bytes"]


def _flash2_backward_room(tile: Tile) -> int:
    return gradients.arrangement(tile.swapped)["bytes"]


def _two_kernels_room(tile: Tile) -> int:
    return max(
        gradients.arrangement(tile.swapped)["bytes"],
        flash2_two_kernels.queries_arrangement(tile)["bytes"],
    )


def _ampere_room(tile: WarpTile) -> int:
    return ampere.arrangement(tile)["bytes"]


def _ampere_tiles(d: int, f: Features) -> tuple[tuple[int, int], ...]:
    """At d = 128 with any rule there are registers for 16 rows a warp, without one for 32."""
    if d == 64:
        return ()
    return ((64, 64),) if f.band or f.keys or f.dropout else ((128, 32),)


def _ampere_backward_room(tile: WarpTile) -> int:
    return ampere_backward.arrangement(tile)["bytes"]


def _hopper_room(tile: WarpgroupTile) -> int:
    """Of a tile that needs more registers than there are, more than any GPU has."""
    return tile.bytes if tile.held <= tile.registers[1] else sys.maxsize


def _hopper_tiles(d: int, f: Features) -> tuple[tuple[int, int], ...]:
    if not (f.keys or f.dropout):
        return ()
    both = 80 if f.keys and f.dropout else 96
    return ((128, 128 if d <= 64 else both if d <= 128 else 96 if d <= 192 else 64),)


def _hopper_backward_room(tile: BackwardTile) -> int:
    return tile.bytes


def _hopper_backward_tiles(d: int, f: Features) -> tuple[tuple[int, int], ...]:
    return ((64 if d <= 64 else 32, 128),) if f.dropout else ()


_SQUARES = ((64, 64), (32, 32), (16, 16))
KERNELS = {
    "standard": Row(
        "standard attention, three kernels", _standard, ((128, 64), *_SQUARES), _standard_room
    ),
    "flash1": Row("FlashAttention, K and V outer", _flash1, ((128, 128), *_SQUARES), _flash1_room),
    "flash2": Row("FlashAttention-2, Q outer", _flash2, ((128, 64), *_SQUARES), _flash2_room),
    "block_sparse": Row(
        "FlashAttention of the blocks in block_mask", _flash1, ((128, 128), *_SQUARES), _flash1_room
    ),
    "split_kv": Row(
        "FlashAttention-2 with the keys shared out",
        _split_kv,
        ((4, 64), (4, 32), (4, 16)),
        _flash2_room,
        few=True,
    ),
    "ampere": Row(
        "FlashAttention-2 on tensor cores",
        _ampere,
        ((128, 64), (64, 64)),
        _ampere_room,
        tile=warp_tile_for,
        covers=_tensor_cores,
        others=_ampere_tiles,
    ),
    "hopper": Row(
        "FlashAttention-3 by warpgroups",
        _hopper,
        ((192, 128), (128, 128), (128, 112), (128, 80)),
        _hopper_room,
        tile=warpgroup_tile_for,
        covers=_warpgroups,
        others=_hopper_tiles,
    ),
    "hopper_fp8": Row(
        "FlashAttention-3 in FP8",
        _hopper_fp8,
        ((128, 128),),
        _hopper_room,
        tile=fp8_tile_for,
        covers=_eight_bits,
    ),
    "hopper_split_kv": Row(
        "the same with the keys shared out, for one query a head",
        _hopper_split,
        ((64, 128), (64, 64)),
        _hopper_room,
        tile=warpgroup_tile_for,
        covers=_one_query,
    ),
}
BACKWARD = {
    "flash1": Row("FlashAttention's", _flash1_backward, _SQUARES, _flash1_backward_room, 3),
    "flash2": Row(
        "FlashAttention-2's, dQ by atomics", _flash2_backward, _SQUARES, _flash2_backward_room, 3
    ),
    "block_sparse": Row(
        "FlashAttention's, of the blocks in block_mask",
        _flash1_backward,
        _SQUARES,
        _flash1_backward_room,
        3,
    ),
    "flash2-two-kernel": Row(
        "FlashAttention-2's, dK and dV, then dQ", _two_kernels, _SQUARES, _two_kernels_room, 2
    ),
    "ampere": Row(
        "FlashAttention-2's on tensor cores, dQ by atomics",
        _ampere_backward,
        ((64, 128), (64, 64)),
        _ampere_backward_room,
        tile=ampere_backward.tile_for,
        covers=_tensor_cores,
    ),
    "hopper": Row(
        "FlashAttention-3's by warpgroups, dQ by bulk additions",
        _hopper_backward,
        ((128, 128), (64, 128)),
        _hopper_backward_room,
        tile=hopper_backward.tile_for,
        covers=_warpgroups_backward,
        others=_hopper_backward_tiles,
    ),
}


def checked(
    q: Any, k: Any, v: Any, *, is_causal: bool = False, causal_align: str = "bottom-right",
    window: Any = None, attn_mask: Any = None, key_padding_mask: Any = None, block_mask: Any = None,
    scale: float | None = None, dropout_p: float = 0.0, seed: int = 0, enable_gqa: bool = False,
    tiles: Any = None, stream: int | None = None, incoherent: Any = True,
) -> Problem:  # fmt: skip
    """Check everything that says what is to be computed, and bring it into one form."""
    reason = gpu.available()
    if reason:
        raise RuntimeError(reason)
    given = [arrays.operand(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    first = given[0]
    for x in given:
        if x.dtype == "bool":
            raise bad_type(f"{x.name}.dtype", x.dtype, "float32, float16 or bfloat16")
        if x.dtype != first.dtype:
            raise bad_type(f"{x.name}.dtype", x.dtype, f"{first.dtype}, the dtype of q")
        if len(x.shape) < 2 or len(x.shape) != len(first.shape):
            accepted = "two dimensions or more, (..., N, d), as many as q has"
            raise bad(f"{x.name}.shape", x.shape, accepted)
        _same_place(x, first)
    given = [x.on_gpu() for x in given]
    (Qs, Qt), (Ks, Kt), (Vs, Vt) = (arrays.flattened(x) for x in given)
    (batch, heads, Nq, d), (_, shared, Nk, _) = Qs, Ks
    lead = first.shape[:-2]
    if not 1 <= d <= WIDEST:
        raise bad("q.shape", first.shape, f"a width of 1 to {WIDEST} in the last dimension")
    if Ks != (batch, shared, Nk, d) or given[1].shape[:-3] != first.shape[:-3]:
        raise bad("k.shape", given[1].shape, f"what goes with q.shape={first.shape}")
    if given[2].shape != given[1].shape:
        raise bad("v.shape", given[2].shape, f"{given[1].shape}, as k: these kernels take dv = d")
    if shared != heads and not checks.flag("enable_gqa", enable_gqa):
        raise bad("k.shape", given[1].shape, f"{heads} heads, as q has; fewer with enable_gqa=True")
    if shared != heads and (shared == 0 or heads % shared):
        raise bad("k.shape", given[1].shape, f"a number of heads that divides the {heads} of q")

    checks.choice("causal_align", causal_align, checks.ALIGNMENTS)
    lo, hi = band(
        Nq, Nk, is_causal=checks.flag("is_causal", is_causal), causal_align=causal_align,
        window=checks.window_sides(window),
    )  # fmt: skip
    lo, hi = max(lo, -(Nq + Nk)), min(hi, Nq + Nk)  # farther no pair is apart
    p = checks.number("dropout_p", dropout_p, "a probability in [0, 1)")
    if not 0 <= p < 1:
        raise bad("dropout_p", dropout_p, "a probability in [0, 1)")
    seed = checks.integer("seed", seed, 0, 2**64)
    incoherent = checks.flag("incoherent", incoherent)
    scale = checks.number(
        "scale", d**-0.5 if scale is None else scale, "a finite number, or None for 1/sqrt(d)"
    )
    shape = (*lead[:-1], heads, Nq, Nk) if lead else (Nq, Nk)
    mask, mask_kind = _mask(attn_mask, first, shape, (batch, heads, Nq, Nk))
    per_item = (batch, Nk), (*lead[:-1], Nk)
    keys = _table("key_padding_mask", key_padding_mask, first, *per_item)
    blocks = _table("block_mask", block_mask, first, tiles and tuple(
        -(-n // b) for n, b in zip((Nq, Nk), checks.pair_of_tiles(tiles), strict=True)
    ))  # fmt: skip
    features = Features(
        dtype=first.dtype,
        band=bool(lo > 1 - Nq or hi < Nk - 1),
        keys=keys is not None,
        layout=blocks is not None,
        mask=mask_kind,
        tall=mask is None or mask.shape[2] == Nq,
        broad=mask is None or mask.shape[3] == Nk,
        dropout=p > 0,
    )
    rules = (
        _nothing(2, "bool") if keys is None else keys,
        _nothing(4, "float32") if mask is None else mask,
        _nothing(2, "bool") if blocks is None else blocks,
        np.int64(lo),
        np.int64(hi),
        np.float32(scale * LOG2E),
        np.int64(heads // shared if shared else 1),
        np.uint64(seed),
        np.uint64(int(p * 2**32)),
        np.float32(1 / (1 - p)),
    )
    return Problem(
        *given,
        given[0].seen_as(Qs, Qt),
        given[1].seen_as(Ks, Kt),
        given[2].seen_as(Vs, Vt),
        lead, batch, heads, heads // shared if shared else 1, Nq, Nk, d, features, rules, scale,
        arrays.current_stream(first) if stream is None else stream, bool(incoherent),
    )  # fmt: skip


def _same_place(x: Operand, first: Operand) -> None:
    if (x.library == "numpy") != (first.library == "numpy"):
        here, there = ("the host" if y.library == "numpy" else "the GPU" for y in (x, first))
        raise bad_type(x.name, f"an array on {here}", f"one on {there}, as q")
    if x.device != first.device:
        raise bad(f"{x.name}.device", x.device, f"{first.device}, the GPU that holds q")
    if first.device is not None and not gpu.SIMULATED:
        current = gpu.cuda.get_current_device().id
        if first.device != current:
            accepted = f"{current}, the current GPU; numba.cuda.select_device changes it"
            raise bad(f"{x.name}.device", first.device, accepted)


def _nothing(ndim: int, dtype: str) -> Any:
    """An array to hand to a kernel that was compiled to ignore it."""
    x = arrays.operand("nothing", np.zeros((1,) * ndim, dtype)).on_gpu()
    return x.seen_as(x.shape, x.strides)


def _mask(
    attn_mask: Any, first: Operand, shape: tuple[int, ...], full: tuple[int, ...]
) -> tuple[Any, str]:
    """attn_mask as (batch, heads, Nq or 1, Nk or 1), without a copy, and its dtype."""
    if attn_mask is None:
        return None, ""
    x = arrays.operand("attn_mask", attn_mask)
    _same_place(x, first)
    x = x.on_gpu()
    try:
        fits = np.broadcast_shapes(x.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise bad("attn_mask.shape", x.shape, f"what broadcasts to {shape}")
    missing = len(shape) - len(x.shape)
    sizes = (1,) * missing + x.shape
    strides = (0,) * missing + tuple(
        0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)
    )
    spread = (*shape[:-2], *sizes[-2:])
    whole = Operand(x.name, x.dtype, spread, strides, x.address, x.device, x.owner, x.library)
    return whole.seen_as(*arrays.flattened(whole)), x.dtype


def _table(name: str, table: Any, first: Operand, *shapes: Any) -> Any:
    """A bool array of the first shape, as bytes; None if there is none.

    shapes: those that are accepted, of two dimensions, or of another number before the last.
    """
    if table is None:
        return None
    x = arrays.operand(name, table, "bool")
    if x.dtype != "bool":
        raise bad_type(f"{name}.dtype", x.dtype, "bool")
    if x.shape not in shapes:
        raise bad(f"{name}.shape", x.shape, " or ".join(map(str, dict.fromkeys(shapes))))
    if x.address is not None:
        _same_place(x, first)
    x = x.on_gpu()
    if len(x.shape) == 2:
        return x.seen_as(shapes[0], x.strides)
    (*batch, last), (*apart, item) = x.shape, x.strides
    rows = replace(x, shape=(*batch, 1, 1, last), strides=(*apart, 0, 0, item))
    by_batch, *_, item = arrays.flattened(rows)[1]
    return x.seen_as(shapes[0], (by_batch, item))
