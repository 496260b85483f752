"""Pictures: where the traffic goes, and how it grows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checks
from .tables import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

    from .cost.sweep import Line, Series

FORMATS = (".png", ".svg", ".pdf")

# Okabe & Ito's palette, told apart with every common colour blindness; a gradient has a tint of the
# colour of its array. What is kept for each row (l, m, their sum L, D) is one group.
COLOURS = {
    "Q": "#0072B2",
    "K": "#56B4E9",
    "V": "#009E73",
    "O": "#E69F00",
    "S": "#D55E00",
    "P": "#CC79A7",
    "l, m, L, D": "#000000",
    "mask": "#F0E442",
    "dQ": "#80B9D9",
    "dK": "#BBE1F6",
    "dV": "#80CFB9",
    "dO": "#F3CF80",
    "dS": "#EAAF80",
    "dP": "#E6BCD3",
    "other": "#999999",
}
GROUP = (
    {name: name for name in COLOURS}
    | dict.fromkeys(("l", "m", "L", "D"), "l, m, L, D")
    | {"dK_group": "dK", "dV_group": "dV"}
)
SERIES = ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7")
MARKS = "osD^vPX*<>hp"


def checked_path(path: Path) -> Path:
    """The path, if its suffix says in which of FORMATS to write; else a ValueError."""
    if path.suffix.lower() not in FORMATS:
        raise checks.bad("plot", str(path), "a file name that ends in " + ", ".join(FORMATS))
    return path


def traffic_bars(
    path: Path, title: str, labels: Sequence[str], records: Sequence[dict[str, Any]]
) -> None:
    """A bar of HBM reads and one of writes for each record, split by array; writes are hatched."""
    figure = _figure(7 + 0.08 * max(map(len, labels)), 1.5 + 0.75 * len(records))
    axes = figure.subplots()
    shown: dict[str, Any] = {}
    for y, record in enumerate(records):
        for offset, kind, hatch in ((-0.19, "reads", ""), (0.19, "writes", "////")):
            left = 0
            for group, elements in _grouped(record[kind]).items():
                bar = axes.barh(
                    y + offset, elements, 0.34, left=left, color=COLOURS[group], hatch=hatch,
                    edgecolor="white", linewidth=0.6,
                )  # fmt: skip
                left += elements
                if not hatch:
                    shown[group] = bar
                shown.setdefault(group, bar)
            axes.annotate(
                f"{kind} {count(left)}", (left, y + offset), (4, 0), textcoords="offset points",
                va="center", fontsize=8, color="#555555",
            )  # fmt: skip
    axes.set_yticks(range(len(records)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("HBM traffic (elements)")
    axes.xaxis.set_major_formatter(_engineering())
    axes.locator_params(axis="x", nbins=6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(textwrap.fill(title, 60), fontsize=10, loc="left")
    groups = [group for group in COLOURS if group in shown]
    figure.legend(
        [shown[group] for group in groups], groups, loc="outside right upper", frameon=False
    )
    figure.savefig(path, dpi=150)


def growth_lines(
    path: Path, all_series: Sequence[Series], fitted: int, lines: Sequence[Line]
) -> None:
    """Traffic over N, d and M in log-log axes, a row a pass; and over the density of a layout.

    Executed points are filled; the lines are fits.
    """
    parts = list(dict.fromkeys(series.part for series in all_series))
    figure = _figure(11, 4.4 * (len(parts) + bool(lines)))
    rows = figure.subfigures(len(parts) + bool(lines), 1, squeeze=False)[:, 0]
    for part, row in zip(parts, rows, strict=False):
        _growth(row, [series for series in all_series if series.part == part], fitted)
        row.suptitle(
            f"HBM traffic of the {part} pass with the paper's tiles. Filled: executed and equal to "
            "the closed form; hollow: closed form; line: fit",
            fontsize=10,
        )
    if lines:
        _density(rows[-1], lines)
    figure.savefig(path, dpi=150)


def _growth(figure: SubFigure, all_series: Sequence[Series], fitted: int) -> None:
    axes = dict(zip("NdM", figure.subplots(1, 3, sharey=True), strict=True))
    names = list(dict.fromkeys((s.algorithm, s.convention) for s in all_series))
    for series in all_series:
        n = names.index((series.algorithm, series.convention))
        style: dict[str, Any] = {"color": SERIES[n], "marker": MARKS[n], "markersize": 8 - n}
        at, x = axes[series.axis], [getattr(p, series.axis) for p in series.points]
        y = [p.total_elements for p in series.points]
        ran = sum(p.executed_elements is not None for p in series.points)
        at.plot(x[:ran], y[:ran], linestyle="", **style)
        at.plot(x[ran:], y[ran:], linestyle="", fillstyle="none", **style)
        at.plot(
            x[-fitted:],
            [y[-1] * (xi / x[-1]) ** series.exponent for xi in x[-fitted:]],
            linewidth=3 - n / 2,
            label=f"{_name(series, names)}: {series.exponent:.3f}",
            **{**style, "marker": ""},
        )
    for axis, at in axes.items():
        at.set_xscale("log", base=2)
        at.set_yscale("log")
        grid = sorted({getattr(p, axis) for s in all_series if s.axis == axis for p in s.points})
        at.set_xticks(grid, [str(x) for x in grid])
        at.set_xlabel({"N": "N (tokens)", "d": "d (elements)", "M": "M (elements of SRAM)"}[axis])
        at.grid(alpha=0.25)
        at.spines[["top", "right"]].set_visible(False)
        at.legend(title="fitted exponent", fontsize=8, title_fontsize=8)
    axes["N"].set_ylabel("HBM traffic (elements)")


def _density(figure: SubFigure, lines: Sequence[Line]) -> None:
    """Executed traffic and published time side by side, each with its line."""
    measured = [line for line in lines if line.expected is not None]
    published = [line for line in lines if line.expected is None]
    for at, shown, ylabel in zip(
        figure.subplots(1, 2),
        (measured, published),
        ("HBM traffic (elements)", "published time (ms)"),
        strict=True,
    ):
        for n, line in enumerate(shown):
            slope, intercept = line.fit
            at.plot(line.densities, line.values, MARKS[n], color=SERIES[n])
            at.plot(
                (0, 1), (intercept, slope + intercept), color=SERIES[n],
                label=f"{line.what}: R² = {line.r_squared:.4f}",
            )  # fmt: skip
        at.set_xlim(0, 1)
        at.set_ylim(0)
        at.set_xlabel("share of blocks that are kept")
        at.set_ylabel(ylabel)
        at.grid(alpha=0.25)
        at.spines[["top", "right"]].set_visible(False)
        at.legend(fontsize=8)
        if shown is measured:
            at.yaxis.set_major_formatter(_engineering())
    figure.suptitle(
        "Block-sparse FlashAttention: executed traffic, and the published runtime (N = 4096, "
        "forward and backward)",
        fontsize=10,
    )


def _name(series: Series, names: Sequence[tuple[str, str]]) -> str:
    several = sum(algorithm == series.algorithm for algorithm, _ in names) > 1
    return f"{series.algorithm}:{series.convention}" if several else series.algorithm


def _grouped(counts: dict[str, int]) -> dict[str, int]:
    sums = dict.fromkeys(COLOURS, 0)
    for name, elements in counts.items():
        sums[GROUP.get(name, "other")] += elements
    return {group: elements for group, elements in sums.items() if elements}


def _figure(width: float, height: float) -> Figure:
    """A figure that belongs to no window."""
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def _engineering() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter()
