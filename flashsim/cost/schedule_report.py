"""The report and the picture of the pipeline schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import __version__
from ..plots import COLOURS, _figure
from ..tables import Report
from .devices import Device
from .schedule import STAGES, UNITS, TileTimes, Timeline

TERA = 1e12
COLOUR_OF = {"K": "K", "V": "V", "S": "S", "softmax": "P", "PV": "O"}
MEASURED = ("h100", "float16", 128)
TABLE_2 = (
    "Measured there (FlashAttention-3, Table 2): 570 TFLOP/s without specialisation, 582 without a "
    "softmax under the products, 661 with all. The first of these has the softmax under the "
    "products; here it has neither."
)
HATCHES = ("", "////")  # of the warpgroups


def schedule_report(
    found: Sequence[Timeline], gpu: Device, peak: float, problem: dict[str, Any], operations: bool
) -> Report:
    """The report of `flashsim schedule`.

    peak: FLOP/s of the matrix units. operations: a record an operation instead of a pipeline.
    """
    times = found[0].times
    table = [
        {
            "pipeline": line.pipeline.key,
            "cycles\na tile": f"{line.total_cycles / line.tiles:.0f}",
            **{unit: f"{line.busy_cycles(unit) / line.total_cycles:.1%}" for unit in UNITS},
            "TFLOP/s": f"{line.utilisation * peak / TERA:.0f}",
        }
        for line in found
    ]
    records: list[dict[str, Any]] = [
        {
            "pipeline": line.pipeline.key,
            "total_cycles": line.total_cycles,
            "utilisation": line.utilisation,
            **{f"{unit}_busy_cycles": line.busy_cycles(unit) for unit in UNITS},
            "flops_per_second": line.utilisation * peak,
        }
        for line in found
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
            f"{gpu.name}, one SM at its peak rates: {found[0].tiles} key tiles of "
            f"{problem['Br']} x {problem['Bc']} scores, d = {problem['d']}, {problem['dtype']}",
            _times_line(times),
        ],
        tables=[table],
        records=records,
        remarks=[
            "; ".join(f"{line.pipeline.key}: {line.pipeline.title}" for line in found) + ".",
            "Busy shares of the units over the whole time. TFLOP/s: the matrix units' share of "
            f"{peak / TERA:.4g}. Places for a tile: {STAGES}, or 1 without specialisation.",
            "A limit of what a pipeline allows, not a forecast: only exponentials of a softmax, "
            "no registers, no throttled clock; the wait is an assumption.",
            *([TABLE_2] if (gpu.key, problem["dtype"], problem["d"]) == MEASURED else ()),
        ],
    )  # fmt: skip


def _times_line(times: TileTimes) -> str:
    named = ", ".join(f"{name} {getattr(times, name):.4g}" for name in ("matmul", "exp", "copy"))
    return f"Cycles of a tile, each unit alone: {named}; wait {times.wait:g}"


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
            f"{line.pipeline.title}: matrix units busy {line.utilisation:.1%} of all "
            f"{line.tiles} tiles", fontsize=9, loc="left",
        )  # fmt: skip
        at.set_yticks(range(len(UNITS)), UNITS, fontsize=8)
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
