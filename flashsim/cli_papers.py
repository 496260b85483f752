"""The command about published numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def paper(
    row: Annotated[
        list[str] | None,
        typer.Argument(
            help="Rows by key, or all of a paper (fa1, fa3, ...).", show_default="every row"
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of the table.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV instead of the table.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw published beside recomputed too: .png, .svg or .pdf."
        ),
    ] = None,
) -> None:
    """Recompute published numbers, and say which come out.

    A row is what a paper printed, what the closed forms and algorithms here give, and a verdict:
    exact, within rounding, band, does not reproduce. The exit code is 0 if each is as expected.
    """
    from . import cli, papers
    from .papers.report import paper_report

    cli._check_output(json, csv, plot)
    chosen = papers.chosen(row or [])
    with cli._progress(len(chosen)) as on_step:
        found = papers.rows(chosen, on_step)
    if plot is not None:
        from .papers.plots import beside

        beside(plot, found)
    cli._finish(paper_report(found, detailed=bool(row)), json, csv)
