"""Pictures: published numbers beside recomputed ones."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..plots import MARKS, SERIES, _figure
from .fa1_tables import FLASH, Table, tables
from .row import Row

PUBLISHED, RECOMPUTED = SERIES[0], SERIES[3]
MAIN = ("PyTorch Attention", FLASH, "Block-Sparse FlashAttention", "Linformer", "Local Attention")
CROSSING = MAIN[3:]  # approximations, whose crossovers with FLASH are shown
WIDE = 8  # x that range so far have a logarithmic axis


def beside(path: Path, rows: Sequence[Row]) -> None:
    """A panel for each row; rows from a table of FlashAttention share one of the whole table.

    Crossovers have a panel for each table: the four of the row or, if it is alone, all twelve.
    """
    panels: list[Callable[[Any], None]] = []
    memory = [row for row in rows if row.key.startswith("fa1-memory")]
    for row in rows:
        if row.key == "fa1-crossover":
            panels += [partial(_table, table=table) for table in _with_crossovers(row, rows)]
        elif row in memory:
            if row is memory[0]:
                panels.append(partial(_table, table=tables()[21], rows=memory))
        else:
            panels.append(partial(_row, row=row))
    columns = min(4, max(1, round(len(panels) ** 0.5)))
    lines = -(-len(panels) // columns)
    figure = _figure(4.6 * columns, 3.5 * lines + 0.2)
    cells = figure.subplots(lines, columns, squeeze=False).flat
    for panel in panels:
        panel(next(cells))
    for at in cells:
        at.set_axis_off()
    figure.savefig(path, dpi=150)


def _with_crossovers(row: Row, rows: Sequence[Row]) -> list[Table]:
    """The tables that a row reads; all that have times, if there is no other row."""
    return [
        t for t in tables().values() if t.unit == "ms" and (len(rows) == 1 or t.number in row.x)
    ]


def _row(at: Any, row: Row) -> None:
    title = f"{row.key}: {row.what}"
    at.set_title("\n".join(textwrap.wrap(title, 46)), fontsize=9, loc="left")
    if not row.recomputed:
        at.text(0.5, 0.5, f"{row.numbers[0][1]} {row.unit}\n{row.verdict}", ha="center")
        at.set_axis_off()
        return
    if row.between:
        _range(at, row)
    elif len(row.x) > 2:
        _lines(at, row)
    else:
        _bars(at, row)
    at.set_ylabel(row.unit or "no unit")
    at.grid(alpha=0.25, axis="y")
    at.spines[["top", "right"]].set_visible(False)
    at.legend(fontsize=8, frameon=row.between, title=row.verdict, title_fontsize=8)


def _lines(at: Any, row: Row) -> None:
    published = [float(x) for x in row.published]
    at.plot(row.x, row.recomputed, "-", color=RECOMPUTED, linewidth=3, alpha=0.5)
    at.plot(
        row.x, row.recomputed, "s", color=RECOMPUTED, markersize=8, alpha=0.5, label="recomputed"
    )
    at.plot(row.x, published, "o", color=PUBLISHED, markersize=4, label="published")
    at.set_xlabel(row.labels[0].partition(" = ")[0])
    at.set_ylim(0)
    if min(row.x) >= 1 and max(row.x) >= WIDE * min(row.x):
        at.set_xscale("log", base=2)
        at.set_xticks(row.x, [f"{x:g}" for x in row.x])
        at.minorticks_off()


def _bars(at: Any, row: Row) -> None:
    for offset, numbers, color, hatch, label in (
        (-0.2, [float(x) for x in row.published], PUBLISHED, "", "published"),
        (0.2, list(row.recomputed), RECOMPUTED, "//", "recomputed"),
    ):
        x = [n + offset for n in range(len(numbers))]
        bars = at.bar(x, numbers, 0.38, color=color, hatch=hatch, edgecolor="white", label=label)
        at.bar_label(bars, [f"{y:.4g}" for y in numbers], fontsize=7)
    width = 15 if len(row.labels) < 4 else 12
    names = ["\n".join(textwrap.wrap(x, width, break_long_words=False)) for x in row.labels]
    names = names or [""]
    at.set_xticks(range(len(names)), names, fontsize=7)
    at.set_xlim(-0.9, len(names) - 0.1)
    at.margins(y=0.45)


def _range(at: Any, row: Row) -> None:
    low, high = map(float, row.published)
    at.axhspan(low, high, facecolor="#DDDDDD", edgecolor="#555555", label="published")
    at.set_ylim(top=low + 1.6 * (high - low))  # the legend stands above what it explains
    at.plot(range(len(row.recomputed)), row.recomputed, "s", color=RECOMPUTED, label="recomputed")
    at.set_xticks(range(len(row.recomputed)), row.labels or [""])


def _table(at: Any, table: Table, rows: Sequence[Row] = ()) -> None:
    """Every method over N; where some become faster than FLASH; what rows recompute."""
    what = [name for name, on in (("dropout", table.dropout), ("masking", table.masking)) if on]
    title = f"fa1, Table {table.number}: {table.what}" + (f", {' and '.join(what)}" if what else "")
    at.set_title(title, fontsize=9, loc="left")
    for method in table.rows:
        if method not in MAIN:
            at.plot(*zip(*table.points(method), strict=True), color="#BBBBBB", linewidth=1)
    for n, method in enumerate(MAIN):
        at.plot(
            *zip(*table.points(method), strict=True), color=SERIES[n], marker=MARKS[n],
            markersize=4, label=method,
        )  # fmt: skip
    others = len(table.rows) - len(MAIN)
    at.plot([], [], color="#BBBBBB", linewidth=1, label=f"{others} others")
    for row, mark in zip(rows, "sh", strict=False):
        at.plot(
            row.x, row.recomputed, mark, color=RECOMPUTED, markersize=9, fillstyle="none",
            label=f"{row.where.partition(', ')[2]}, recomputed",
        )  # fmt: skip
    for method in CROSSING if table.unit == "ms" else ():
        for N in table.crossovers(method):
            at.axvline(N, color=SERIES[MAIN.index(method)], linestyle=":")
            at.annotate(
                f"{N:.0f}", (N, 0.02), (2, 0), xycoords=at.get_xaxis_transform(), fontsize=7,
                textcoords="offset points", color=SERIES[MAIN.index(method)],
            )  # fmt: skip
    at.set_xscale("log", base=2)
    at.set_yscale("log")
    at.set_xticks(table.N, [str(n) for n in table.N], rotation=45)
    at.minorticks_off()
    at.yaxis.set_major_formatter("{x:g}")
    at.set_xlabel("N (tokens)")
    at.set_ylabel(f"{'memory' if table.unit == 'MB' else 'time'} ({table.unit})")
    at.grid(alpha=0.25)
    at.spines[["top", "right"]].set_visible(False)
    opaque = table.unit == "ms"  # over the lines of the crossovers
    at.legend(fontsize=7, framealpha=float(opaque), edgecolor="none")
