"""Pictures of a grid: what its axes ask for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from ..algorithms import ALGORITHMS
from ..checks import bad
from ..plots import MARKS, SERIES, _figure
from .grid import Grid

MOST_PANELS = 8
MOST_LABELS = 12  # ticks, and columns of cells with numbers
HATCHES = ("", "//", "..", "\\\\", "xx", "oo")
AXIS_NAMES = {
    "N": "N (tokens)",
    "d": "d (elements)",
    "M": "M (elements of SRAM)",
    "Br": "Br (rows of a query tile)",
    "Bc": "Bc (rows of a key tile)",
}


def grid_panels(path: Path, points: Grid) -> None:
    """IO and time over the tiles, if they vary; else who wins over N and d; else IO over M, N or d.

    Raises
    ------
    ValueError
        If nothing that has a picture varies, or there would be more than MOST_PANELS.
    """
    varying = set(points.varying)
    panels: list[tuple[Any, Grid, tuple[str, ...]]] = []
    if varying & {"Br", "Bc"}:
        split = _split(points, "N", "d", "M", "device", "algorithm")
        panels = [(_tiles, part, ()) for part in split]
    elif {"N", "d"} <= varying:
        panels = [(_winners, part, ()) for part in _split(points, "M", "device")]
    elif along := next((name for name in ("M", "N", "d") if name in varying), ""):
        others = {"N", "d", "device"} - {along}
        panels = [(_traffic, part, (along,)) for part in _split(points, *others)]
    if not 1 <= len(panels) <= MOST_PANELS:
        raise bad("plot", str(path), f"ranges for 1 to {MOST_PANELS} panels, not {len(panels)}")
    columns = min(len(panels), 2 if len(panels) == 4 else 3)
    rows = -(-len(panels) // columns)
    figure = _figure(1 + 4.6 * columns, 0.4 + 3.8 * rows)
    cells = figure.subplots(rows, columns, squeeze=False).flat
    for draw, part, axis in panels:
        at = next(cells)
        more = draw(at, part, *axis)
        title = ", ".join(filter(None, (_title(points, part), more)))
        at.set_title(title, fontsize=9, loc="left")
    for at in cells:
        at.set_axis_off()
    figure.savefig(path, dpi=150)


def _split(points: Grid, *names: str) -> Iterator[Grid]:
    """The parts of a grid in which each of the named axes has one value."""
    several = [name for name in names if name in points.varying]
    for taken in product(*(points.axes[name] for name in several)):
        yield points.where(**dict(zip(several, taken, strict=True)))


def _title(points: Grid, part: Grid) -> str:
    """What a part has fixed."""
    return ", ".join(
        str(taken[0]) if name in ("algorithm", "device") else f"{name} = {taken[0]}"
        for name, taken in part.axes.items()
        if len(taken) == 1 and (name != "device" or name in points.varying)
    )


def _traffic(at: Any, points: Grid, axis: str) -> None:
    """Traffic over N, d or M, a line an algorithm; and what no algorithm moves less than."""
    bound: dict[int, int] = {}
    for n, algorithm in enumerate(points.axes["algorithm"]):
        here = [r for r in points.where(algorithm=algorithm).records() if r["fits"]]
        bound |= {r[axis]: r["lower_bound_elements"] for r in here}
        at.plot(
            [r[axis] for r in here], [r["total_elements"] for r in here], label=algorithm,
            color=SERIES[n % len(SERIES)], marker=MARKS[n % len(MARKS)], markersize=4,
        )  # fmt: skip
    x = sorted(bound)
    at.plot(x, [bound[n] for n in x], "--", color="#777777", label="lower bound")
    at.set_xscale("log", base=2)
    at.set_yscale("log")
    _ticks(at, points.axes[axis])
    at.set_xlabel(AXIS_NAMES[axis])
    at.set_ylabel("HBM traffic of one head (elements)")
    at.grid(alpha=0.25)
    at.spines[["top", "right"]].set_visible(False)
    at.legend(fontsize=8, frameon=False)


def _tiles(at: Any, points: Grid) -> str:
    """Bytes, and the time with full and without any overlap, over the side of the tiles.

    If both sides vary, over the one that the outer loop holds, beside the best of the other; which
    that is, for the title, is returned.
    """
    outer = ALGORITHMS[points.axes["algorithm"][0].partition(":")[0]].outer
    side = "Bc" if "Br" not in points.varying or (outer == "K" and "Bc" in points.varying) else "Br"
    best: dict[int, dict[str, Any]] = {}
    for r in sorted(points.records(), key=lambda r: (r["fits"], -r["total_bytes"])):
        best[r[side]] = r
    x = sorted(best)
    fitting = [n for n in x if best[n]["fits"]]
    other = at.twinx()
    lines = []
    for axes, figure, scale, style, color, label in (
        (at, "total_bytes", 1e6, "s-", SERIES[3], "traffic"),
        (other, "lower_seconds", 1e-6, "o--", SERIES[1], "time, full overlap"),
        (other, "serial_seconds", 1e-6, "^:", SERIES[1], "time, no overlap"),
    ):
        lines += axes.plot(
            x, [best[n][figure] / scale for n in x], style, color=color, fillstyle="none",
            markersize=5, label=label,
        )  # fmt: skip
        axes.plot(
            fitting, [best[n][figure] / scale for n in fitting], style[0], color=color, markersize=5
        )
    at.set_ylim(0)
    other.set_ylim(0)
    at.set_ylabel("HBM traffic of one head (MB)")
    other.set_ylabel("time of one head (µs)")
    at.set_xscale("log", base=2)
    _ticks(at, x)
    at.set_xlabel(AXIS_NAMES[side] + ("" if len(fitting) == len(x) else "; hollow: does not fit"))
    at.legend(lines, [line.get_label() for line in lines], fontsize=8, frameon=False)
    if not {"Br", "Bc"} <= set(points.varying):
        return ""
    beside = "Br" if side == "Bc" else "Bc"
    taken = sorted({r[beside] for r in best.values()})
    if len(taken) == 1:
        return f"{beside} = {taken[0]}"
    return f"{beside} the best at each {side}: {taken[0]} to {taken[-1]}"


def _winners(at: Any, points: Grid) -> None:
    """Who moves the fewest bytes at each N and d; in the cells, what the next one moves over it."""
    names, N, d = (points.axes[name] for name in ("algorithm", "N", "d"))
    moved: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for r in points.records():
        if r["fits"]:
            here = moved.setdefault((r["N"], r["d"]), [])
            here.append((r["total_bytes"], names.index(r["algorithm"])))
    shown = {}
    for (x, length), (y, width) in product(enumerate(N), enumerate(d)):
        order = sorted(moved.get((length, width), []))
        n = order[0][1] if order else -1
        color, hatch = (SERIES[1 + n % 5], HATCHES[n % 6]) if order else ("#DDDDDD", "")
        shown[n] = at.bar(x, 1, 1, y - 0.5, color=color, hatch=hatch, edgecolor="white", alpha=0.8)
        if len(order) > 1 and len(N) <= MOST_LABELS:
            ratio = f"{order[1][0] / order[0][0]:.2f}"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            at.text(x, y, ratio, ha="center", va="center", fontsize=7, bbox=box)
    for axis, taken in ((at.xaxis, N), (at.yaxis, d)):
        every = -(-len(taken) // MOST_LABELS)
        axis.set_ticks(range(0, len(taken), every), [str(n) for n in taken[::every]])
    at.tick_params(axis="x", rotation=45)
    at.set_xlabel(AXIS_NAMES["N"])
    at.set_ylabel(AXIS_NAMES["d"])
    at.set_xlim(-0.5, len(N) - 0.5)
    at.set_ylim(-0.5, len(d) - 0.5)
    labels = ["none fits" if n < 0 else names[n] for n in sorted(shown)]
    at.legend(
        [shown[n] for n in sorted(shown)], labels, title="fewest bytes (next / it)", fontsize=8,
        title_fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False,
    )  # fmt: skip


def _ticks(at: Any, taken: list[int]) -> None:
    """Ticks at the values themselves, or at some of them."""
    shown = sorted(taken)[:: -(-len(taken) // MOST_LABELS)]
    at.set_xticks(shown, [str(n) for n in shown], rotation=45 if len(shown) > 5 else 0)
    at.minorticks_off()
