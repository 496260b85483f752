"""The command about published numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_options import Csv, Json, Plot, check_output, finish, progress


def paper(
    row: Annotated[
        list[str] | None,
        typer.Argument(
            help="Rows by key, or all of a paper (fa1, fa3, ...).", show_default="every row"
        ),
    ] = None,
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:
    """Recompute published numbers, and say which come out.

    A row is what a paper printed, what the closed forms and algorithms here give, and a verdict:
    exact, within rounding, band, does not reproduce. The exit code is 0 if each is as expected.
    """
    from . import papers
    from .papers.report import paper_report

    check_output(json, csv, plot)
    chosen = papers.chosen(row or [])
    with progress(len(chosen)) as on_step:
        found = papers.rows(chosen, on_step)
    if plot is not None:
        from .papers.plots import beside

        beside(plot, found)
    finish(paper_report(found, detailed=bool(row)), json, csv)
