"""Pipeline schedules of one SM: who waits for whom, and how busy that leaves the matrix units.

An SM has one copy engine, one set of matrix units and one of exponential units. Two warpgroups of
consumers, each with its own queries, take the same key tiles, one after another:

    load K and V;  S = Q K^T;  softmax of S;  O += P V

The units could all be busy at once. What keeps them from it is the order in which a warpgroup asks,
and that is what the five pipelines of `PIPELINES` differ in. A warpgroup asks for products without
waiting for them, and products that it asks for in a row follow each other without a gap; but it can
ask for nothing while it computes a softmax. What must see an operation of another unit, or of the
other warpgroup, end starts `wait` cycles after that.

Left out: the arithmetic of a softmax beside its exponentials, registers, the power that the clock
is throttled by. So this is a limit of what a schedule allows, not a forecast.

Source: Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), sections 3.1 and 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import checks
from ..checks import bad
from .devices import Device
from .roofline import HALF, tile_cycles

UNITS = ("copy", "matmul", "exp")
L2_BYTES_PER_CLOCK = 5120  # of the whole device; A100 white paper, and H100's at its clock
WARPGROUPS = 2
STAGES = 2  # places for a tile of K, and as many for one of V
WAIT_CYCLES = 100.0  # an assumption: a barrier, and the first and last latency of a matrix product
MOST_TILES = 2**13  # of a timeline, every operation of which is kept: a second or two
MOST_CYCLES = 1e9  # of a time: sums over MOST_TILES then keep hundredths of a cycle
LEAST_CYCLES = 1e-6  # of the products, so that a time is never 0


@dataclass(frozen=True)
class Pipeline:
    """Which of three things overlap.

    Attributes
    ----------
    key, title : str
    specialised : bool
        A producer warp loads tiles ahead, into STAGES places. Otherwise all warps load, into one
        place, once all that they asked for has ended: a turn's tiles when that turn begins.
    ping_pong : bool
        The warpgroups take turns at the matrix units, so that one's softmax is under the other's
        products. Otherwise they go in lockstep.
    pipelined : bool
        A warpgroup asks for S of tile j + 1 before the softmax of tile j, so that its own softmax
        is under its own products.
    """

    key: str
    title: str
    specialised: bool
    ping_pong: bool
    pipelined: bool


PIPELINES = {
    s.key: s
    for s in (
        Pipeline("plain", "no specialisation", False, False, False),
        Pipeline(
            "unspecialised", "no specialisation, softmax under the next product", False, False, True
        ),
        Pipeline("ping-pong", "ping-pong between two warpgroups", True, True, False),
        Pipeline("pipelined", "softmax under the next tile's product", True, False, True),
        Pipeline("both", "ping-pong, and softmax under the next product", True, True, True),
    )
}


@dataclass(frozen=True)
class Operation:
    """A stretch of a unit's time: "K", "V" (loads, nobody's), "S", "softmax" or "PV" of a tile.

    warpgroup: None for a load; 0 for both where they are in lockstep.
    """

    what: str
    unit: str
    tile: int
    warpgroup: int | None
    start_cycles: float
    end_cycles: float


@dataclass(frozen=True)
class TileTimes:
    """Cycles that the units take for one key tile and the queries of all warpgroups.

    Attributes
    ----------
    matmul, exp, copy : float
        Of S and P V together; of the softmax; of K and V.
    wait : float
        From the end of an operation to the start of one, elsewhere, that must see it end.
    """

    matmul: float
    exp: float
    copy: float
    wait: float = WAIT_CYCLES

    def __post_init__(self) -> None:
        for name in ("matmul", "exp", "copy", "wait"):
            least = LEAST_CYCLES if name == "matmul" else 0
            accepted = f"a number of cycles from {least:g} to {MOST_CYCLES:g}"
            value = checks.number(name, getattr(self, name), accepted)
            if not least <= value <= MOST_CYCLES:
                raise bad(name, value, accepted)


def tile_times(
    gpu: Device,
    Br: int = 128,
    Bc: int = 128,
    d: int = 128,
    *,
    fp8: bool = False,
    wait: float = WAIT_CYCLES,
) -> TileTimes:
    """The cycles of a Br x Bc tile at the peak rates of a GPU, K and V from its L2.

    Parameters
    ----------
    gpu : Device
    Br, Bc, d : int
        Queries of all warpgroups, keys, and the width of Q, K and V.
    fp8 : bool
        Matrix products at the FP8 rate, and K and V of one byte an element.
    wait : float
        As in `TileTimes`.

    Raises
    ------
    ValueError
        If the GPU has no FP8 rate, or a time is out of range.
    """
    for name, value in (("Br", Br), ("Bc", Bc), ("d", d)):
        checks.integer(name, value, 1, 2**31)  # of numbers far larger there is no float
    checks.flag("fp8", fp8)
    cycles, size = tile_cycles(gpu, Br, Bc, d), HALF
    matmul = cycles.matmul
    if fp8:
        if gpu.fp8_flops_per_second is None:
            raise bad("fp8", fp8, f"False, as {gpu.key} has no FP8 matrix units")
        matmul, size = matmul * gpu.half_flops_per_second / gpu.fp8_flops_per_second, 1
    copy = 2 * Bc * d * size / (L2_BYTES_PER_CLOCK / gpu.sm_count)
    return TileTimes(matmul, cycles.exp, copy, wait)


@dataclass(frozen=True)
class Timeline:
    """What every unit did, and when.

    Attributes
    ----------
    pipeline : Pipeline
    times : TileTimes
    tiles : int
        Key tiles.
    operations : tuple of Operation
        In the order in which they were asked for.
    """

    pipeline: Pipeline
    times: TileTimes
    tiles: int
    operations: tuple[Operation, ...] = field(repr=False)

    @property
    def total_cycles(self) -> float:
        """Until the last operation ends."""
        return max(op.end_cycles for op in self.operations)

    def busy_cycles(self, unit: str) -> float:
        """Cycles in which a unit of UNITS works."""
        return sum(op.end_cycles - op.start_cycles for op in self.operations if op.unit == unit)

    @property
    def utilisation(self) -> float:
        """Share of the time in which the matrix units work, at most 1."""
        return self.busy_cycles("matmul") / self.total_cycles


class _Units:
    """Units that take one operation at a time, in the order in which they are asked."""

    def __init__(self) -> None:
        self.free = dict.fromkeys(UNITS, 0.0)
        self.operations: list[Operation] = []

    def run(
        self, what: str, unit: str, tile: int, warpgroup: int | None, cycles: float, ready: float
    ) -> float:
        """Run it once it is ready and its unit is free; when it ends."""
        start = max(ready, self.free[unit])
        self.free[unit] = end = start + cycles
        self.operations.append(Operation(what, unit, tile, warpgroup, start, end))
        return end


def timeline(pipeline: str, times: TileTimes, tiles: int) -> Timeline:
    """Two warpgroups over so many key tiles.

    Parameters
    ----------
    pipeline : str
        A key of `PIPELINES`.
    times : TileTimes
    tiles : int
        From 1 to MOST_TILES.

    Raises
    ------
    ValueError, TypeError
        If there is no such pipeline, or tiles are out of range.

    Examples
    --------
    >>> from flashsim.cost.schedule import TileTimes, timeline
    >>> times = TileTimes(matmul=2048, exp=1024, copy=1024, wait=0)
    >>> [round(timeline(s, times, 66).utilisation, 2) for s in ("plain", "both")]
    [0.57, 1.0]
    """
    chosen = PIPELINES[checks.choice("pipeline", pipeline, PIPELINES)]
    tiles, wait, units = checks.integer("tiles", tiles, 1, MOST_TILES + 1), times.wait, _Units()
    groups = WARPGROUPS if chosen.ping_pong else 1  # in lockstep they are as one
    product, softmax = times.matmul / 2 / groups, times.exp / groups
    K, V = [0.0] * tiles, [0.0] * tiles  # when consumers see a tile in shared memory
    S, O = [0.0] * tiles, [0.0] * tiles  # when the last product with a tile ends
    P = [0.0] * groups  # when a warpgroup's last softmax ends
    turn = 0.0  # when the other warpgroup lets go of the matrix units

    def load(what: str, tile: int, ready: float) -> None:
        seen = units.run(what, "copy", tile, None, times.copy / 2, ready) + wait
        (K if what == "K" else V)[tile] = seen

    def turn_over() -> float:  # of warps without a producer: all that they asked for has ended
        last = units.free["matmul"]
        return max(P[0], last + wait) if last else 0.0

    def ask_for_S(w: int, tile: int) -> float:
        ready = max(K[tile], P[w], turn)
        S[tile] = units.run("S", "matmul", tile, w, product, ready)
        return S[tile]

    def ask_for_PV(w: int, tile: int) -> None:
        ready = max(V[tile], P[w] + wait, turn)
        O[tile] = units.run("PV", "matmul", tile, w, product, ready)

    for tile in range(tiles):
        if chosen.specialised:
            before = tile - STAGES  # whose places it takes
            load("K", tile, S[before] + wait if before >= 0 else 0.0)
            load("V", tile, O[before] + wait if before >= 0 else 0.0)
        for w in range(groups):
            if chosen.pipelined:  # S of this tile, and behind it P V of the one before
                if not chosen.specialised:
                    load("K", tile, turn_over())
                    if tile:
                        load("V", tile - 1, turn_over())
                end = ask_for_S(w, tile)
                if tile:
                    ask_for_PV(w, tile - 1)
            else:
                if tile:
                    ask_for_PV(w, tile - 1)
                if not chosen.specialised:
                    load("K", tile, turn_over())
                    load("V", tile, turn_over())
                end = ask_for_S(w, tile)
                if chosen.ping_pong:
                    turn = end + wait
            P[w] = units.run("softmax", "exp", tile, w, softmax, end + wait)
    if chosen.pipelined and not chosen.specialised:
        load("V", tiles - 1, turn_over())
    for w in range(groups):
        ask_for_PV(w, tiles - 1)
    return Timeline(chosen, times, tiles, tuple(units.operations))
