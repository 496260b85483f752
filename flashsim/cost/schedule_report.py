"""The report and the picture of the pipeline schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import __version__
from ..plots import COLOURS, _figure
from ..tables import Report, count
from .devices import Device
from .schedule import STAGES, UNITS, TileTimes, Timeline, tile_times

TERA = 1e12
COLOUR_OF = {"K": "K", "V": "V", "S": "S", "softmax": "P", "PV": "O"}
# FlashAttention-3, Table 2, TFLOP/s: where it was measured, and with which pipelines. The paper
# does not give the tiles.
MEASURED_ON = "h100"
MEASURED_AT = {"N": 8448, "d": 128, "Br": 128, "Bc": 128, "dtype": "float16"}
TABLE_2 = {"unspecialised": 570, "ping-pong": 582, "both": 661}
HATCHES = ("", "////")  # of the warpgroups


def schedule_report(
    found: Sequence[Timeline], gpu: Device, problem: dict[str, Any], operations: bool
) -> Report:
    """The report of `flashsim schedule`.

    problem: N, d, Br, Bc and dtype. operations: a record an operation instead of a pipeline.
    """
    times, N, Bc = found[0].times, problem["N"], problem["Bc"]
    flops = 4 * problem["Br"] * N * problem["d"] * gpu.sm_count
    rates = [flops * gpu.boost_clock_hz / line.total_cycles for line in found]
    measured = gpu.key == MEASURED_ON and problem == MEASURED_AT and times == tile_times(gpu)
    table = [
        {
            "pipeline": line.pipeline.key,
            "cycles\na tile": _short(line.total_cycles / line.tiles),
            **{unit: f"{line.busy_cycles(unit) / line.total_cycles:.1%}" for unit in UNITS},
            "TFLOP/s": _short(rate / TERA),
            **({"Table 2": str(TABLE_2.get(line.pipeline.key, "-"))} if measured else {}),
        }
        for line, rate in zip(found, rates, strict=True)
    ]
    records: list[dict[str, Any]] = [
        {
            "pipeline": line.pipeline.key,
            "total_cycles": line.total_cycles,
            "utilisation": line.utilisation,
            **{f"{unit}_busy_cycles": line.busy_cycles(unit) for unit in UNITS},
            "flops_per_second": rate,
        }
        for line, rate in zip(found, rates, strict=True)
    ]
    if operations:
        records = [
            {"pipeline": line.pipeline.key, **asdict(op)}
            for line in found
            for op in line.operations
        ]
    return Report(
        about={
            "command": "schedule", "flashsim": __version__, **problem, "tile": asdict(times),
            "device": {"key": gpu.key, "name": gpu.name},
        },
        heading=[
            f"{gpu.name}, one SM at its peak rates: {_key_tiles(found[0].tiles)} of "
            f"{problem['Br']} x {Bc} scores, d = {problem['d']}, {problem['dtype']}",
            _times_line(times),
        ],
        tables=[table],
        records=records,
        remarks=[
            "; ".join(f"{line.pipeline.key}: {line.pipeline.title}" for line in found) + ".",
            "Busy shares of the units over the whole time. TFLOP/s: 4 Br N d FLOPs on each of "
            f"{gpu.sm_count} SMs, over that time at {gpu.boost_clock_hz / 1e6:.0f} MHz. "
            f"Places for a tile: {STAGES}, or 1 without specialisation.",
            *([f"The last tile takes as long as the others, and counts {N % Bc} of its {Bc} keys."]
              if N % Bc else []),
            "A limit of what a pipeline allows, not a forecast: only exponentials of a softmax, "
            "no registers, no throttled clock; the wait is an assumption.",
            *(["Table 2: TFLOP/s that FlashAttention-3 measures. How its kernel without "
               "specialisation loads is not said there; here only when a turn begins."]
              if measured else []),
        ],
    )  # fmt: skip


def _times_line(times: TileTimes) -> str:
    named = {name: _short(getattr(times, name)) for name in ("matmul", "exp", "copy", "wait")}
    wait = named.pop("wait")
    each = ", ".join(f"{name} {cycles}" for name, cycles in named.items())
    return f"Cycles of a tile, each unit alone: {each}; wait {wait}"


def _short(x: float) -> str:
    return count(x if x < 100 else round(x))


def _key_tiles(n: int) -> str:
    return f"{n} key tile" + "s" * (n > 1)


def timelines(path: Path, found: Sequence[Timeline], gpu: Device, tiles: int = 4) -> None:
    """Who is busy when, over the first key tiles; the second warpgroup is hatched."""
    from matplotlib.patches import Patch

    figure = _figure(11, 1.2 + 1.55 * len(found))
    rows = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    ends = [op.end_cycles for line in found for op in line.operations if op.tile < tiles]
    for at, line in zip(rows, found, strict=True):
        for op in line.operations:
            if op.start_cycles >= max(ends):
                continue
            at.broken_barh(
                [(op.start_cycles, op.end_cycles - op.start_cycles)],
                (UNITS.index(op.unit) - 0.4, 0.8), facecolor=COLOURS[COLOUR_OF[op.what]],
                hatch=HATCHES[op.warpgroup or 0], edgecolor="white", linewidth=0.8,
            )  # fmt: skip
            if op.end_cycles - op.start_cycles > max(ends) / 60:
                at.text(
                    (op.start_cycles + op.end_cycles) / 2, UNITS.index(op.unit), str(op.tile),
                    ha="center", va="center", fontsize=7, clip_on=True,
                    bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "linewidth": 0},
                )  # fmt: skip
        at.set_title(
            f"{line.pipeline.title}: matrix units busy {line.utilisation:.1%} of the time of "
            f"{_key_tiles(line.tiles)}", fontsize=9, loc="left",
        )  # fmt: skip
        at.set_yticks(range(len(UNITS)), UNITS, fontsize=8)
        at.set_ylabel("unit", fontsize=8)
        at.set_ylim(len(UNITS) - 0.5, -0.5)
        at.set_xlim(0, max(ends))
        at.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel(f"time (clock cycles of an SM of {gpu.name}); numbers are key tiles")
    handles = [
        Patch(facecolor=COLOURS[colour], label=f"load {what}" if what in "KV" else what)
        for what, colour in COLOUR_OF.items()
    ]
    handles.append(Patch(facecolor="#BBBBBB", hatch=HATCHES[1], edgecolor="white",
                         label="second warpgroup"))  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
