"""What several commands share: options, and what is made of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from .tables import Report

Causal = Annotated[bool, typer.Option("--causal", help="Mask the future.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")]
Csv = Annotated[bool, typer.Option("--csv", help="CSV instead of the table.")]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a picture too: .png, .svg or .pdf."),
]


def check_output(json: bool, csv: bool, plot: Path | None) -> None:
    """Refuse an output that cannot be written before anything is computed."""
    if json and csv:
        raise ValueError("--csv: expected no second format, as --json is given")
    if plot is not None:
        from .plots import checked_path

        checked_path(plot)
        # Where its cache cannot be written, Matplotlib says so in lines that are not ours.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)


def finish(report: Report, json: bool, csv: bool) -> NoReturn:
    """Write a report and exit: 0 if every check in it held, else 1."""
    from . import tables

    write = tables.write_json if json else tables.write_csv if csv else tables.write_table
    write(report)
    raise typer.Exit(1 if report.failures else 0)


def integers(name: str, text: str, form: str) -> list[int]:
    """The integers of an option, as many as its form has names."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(form.split(",")):
        raise ValueError(f"--{name} {text}: expected {form}, integers")
    return numbers


def tile_rows(text: str | None) -> tuple[int, int] | None:
    """Br and Bc of an option --tiles."""
    if text is None:
        return None
    Br, Bc = integers("tiles", text, "Br,Bc")
    return Br, Bc


def check_rule(rule: str | None, tiles: str | None) -> None:
    """Refuse a rule that would be ignored."""
    if rule is not None and tiles is not None:
        raise ValueError(f"--rule {rule}: expected none, as --tiles {tiles} gives the tiles")


def blocks_kept(
    name: str, blocks: tuple[int, int] | None, Nq: int, Nk: int
) -> tuple[tuple[int, int], Any]:
    """The blocks of a layout, and which of them it keeps."""
    from . import checks, verify

    if blocks is None:
        blocks = verify.block_sizes(Nq, Nk)
    blocks = checks.clamped(checks.pair_of_tiles(blocks), Nq, Nk)
    return blocks, verify.named_layout(name, blocks, Nq, Nk)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A function to be told each step as it starts; after a second a terminal shows a bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), BarColumn(30), MofNCompleteColumn(), TextColumn("{task.description}")
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=steps, completed=-1)
    timer = Timer(1.0, bar.start)
    if console.is_terminal:
        timer.start()
    try:
        yield lambda what: bar.update(task, advance=1, description=what)
    finally:
        timer.cancel()
        if console.is_terminal:
            timer.join()
        if bar.live.is_started:
            bar.stop()
