"""A report as people read it (a table that fits the terminal) and as machines do (JSON, CSV)."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 120
BAD = "NO"  # a cell that starts with this is shown in red


@dataclass
class Report:
    """What a command found out.

    Attributes
    ----------
    about : dict
        What was asked, for JSON.
    heading : list of str
        Lines above the table.
    tables : list of list of dict
        Of each table, a dict of heading to cell for each row; the first names the row.
    records : list of dict
        The same in full, for JSON and CSV.
    remarks : list of str
        Lines below the table.
    failures : list of str
        What does not hold.
    verdict : str
        The closing line when nothing fails; empty where nothing is checked.
    """

    about: dict[str, Any]
    heading: list[str]
    tables: list[list[dict[str, str]]]
    records: list[dict[str, Any]]
    remarks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    verdict: str = ""


def write_json(report: Report) -> None:
    """One JSON document on stdout; what is not finite becomes null."""
    document = {
        **report.about, "records": report.records, "remarks": report.remarks,
        "held": not report.failures, "failures": report.failures,
    }  # fmt: skip
    print(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def write_csv(report: Report) -> None:
    """One line a record on stdout; nested counts become columns such as `reads.Q`."""
    rows = [dict(_flat(record)) for record in report.records]
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(sys.stdout, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, "; ".join(value) if isinstance(value, list) else value


def write_table(report: Report) -> None:
    """Heading, table, remarks and verdict on stdout, as wide as the terminal."""
    console = stdout_console()
    for line in report.heading:
        console.print(line)
    for rows in report.tables:
        for table in _layout(console, rows):
            console.print(table)
    for line in report.remarks:
        console.print(line)
    for line in report.failures:
        console.print(f"FAILED: {line}", style="red")
    if report.failures:
        console.print("Not every check held.", style="bold red")
    elif report.verdict:
        console.print(report.verdict, style="bold green")


def stdout_console() -> Console:
    """A console on stdout that takes text as it is; wide if stdout is not a terminal."""
    fixed = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=fixed)


def _layout(console: Console, rows: list[dict[str, str]]) -> Iterator[Table]:
    """A line for each row if that fits; else a column for each, as many side by side as fit."""
    names = list(rows[0])
    lines = [[row[name] for name in names] for row in rows]
    wide = _table(names, lines)
    if _fits(console, wide):
        yield wide
        return
    while lines:
        together = len(lines)
        while together > 1 and not _fits(console, _turned(names, lines[:together])):
            together -= 1
        yield _turned(names, lines[:together])
        lines = lines[together:]


def _turned(names: list[str], lines: list[list[str]]) -> Table:
    first, *rest = zip((_one_line(name) for name in names), *lines, strict=True)
    return _table(list(first), [list(line) for line in rest])


def _one_line(name: str) -> str:
    """A heading without its line breaks; those after a colon or hyphen stand within a word."""
    return name.replace(":\n", ":").replace("-\n", "-").replace("\n", " ")


def _table(names: list[str], lines: list[list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for n, name in enumerate(names):
        table.add_column(name, justify="right" if n else "left", vertical="bottom", overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell, "red" if cell.startswith(BAD) else "") for cell in line))
    return table


def _fits(console: Console, table: Table) -> bool:
    unlimited = console.options.update(max_width=10_000)
    return console.measure(table, options=unlimited).maximum <= console.width


def count(n: float | None) -> str:
    """A number of things in at most eight characters: 9216, 73.7 k, 1.25 M."""
    if n is None:
        return "-"
    if n < 10_000:
        return f"{n:.3g}" if n != int(n) else f"{int(n)}"
    return _scaled(n, ((1e3, " k"), (1e6, " M"), (1e9, " G"), (1e12, " T"), (1e15, " P")))


def seconds(t: float) -> str:
    """A time in at most eight characters: 38.4 ns, 1.25 ms."""
    return _scaled(t, ((1e-9, " ns"), (1e-6, " µs"), (1e-3, " ms"), (1.0, " s")))


def kb(size: float) -> str:
    """Bytes of SRAM in KB of 1024 bytes."""
    return f"{size / 1024:.3g} KB" if size < 1e5 else f"{size / 1024:.0f} KB"


def _scaled(x: float, units: tuple[tuple[float, str], ...]) -> str:
    """x in the largest unit in which it is at least 1, with three digits."""
    size, unit = units[0]
    for next_size, next_unit in units[1:]:
        if float(f"{x:.3g}") >= next_size:
            size, unit = next_size, next_unit
    value = float(f"{x / size:.3g}")
    return f"{value:.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"
