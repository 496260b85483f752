"""The command view: an algorithm, or one of its faults, as a page to step through."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import Causal, blocks_kept, tile_rows


def view(
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm", "-a", metavar="NAME", help="As for run.", show_default="flash2"
        ),
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="The backward pass instead of the forward one.")
    ] = False,
    failure: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="FlashAttention-2 with a deliberate fault: skip-rescale, drop-tail, zero-pad, "
            "forget-max, base-2-lse or dropout-by-tile, on its own input unless --N is given.",
        ),
    ] = None,
    N: Annotated[
        int | None, typer.Option("--N", "-N", help="Queries and keys.", show_default="16")
    ] = None,
    d: Annotated[
        int | None, typer.Option("--d", "-d", help="Width of Q, K and V.", show_default="4")
    ] = None,
    tiles: Annotated[
        str | None,
        typer.Option(
            metavar="Br,Bc",
            help="Rows of a query and of a key tile.",
            show_default="four tiles a side, or fitted to --sram",
        ),
    ] = None,
    sram: Annotated[
        int | None,
        typer.Option(help="SRAM in elements.", show_default="what the tiles need"),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="As for run: keep only some blocks of the scores."),
    ] = None,
    causal: Causal = False,
    row: Annotated[
        int | None,
        typer.Option(
            help="Query row to follow.", show_default="the one whose maximum rises most often"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the numbers.", show_default="7")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write.", show_default="NAME.html"),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write a page that steps through an algorithm: source, memory, traffic, values.

    The page is one file and works offline.
    """
    from . import checks, failures, verify, viewer
    from .algorithms import ALGORITHMS

    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ValueError(f"--out {out}: expected a file to write, in a folder that exists")
    size = tile_rows(tiles)
    given = {"N": N, "d": d, "seed": seed}
    numbers = {name: value for name, value in given.items() if value is not None}
    if failure is not None:
        if failure not in failures.FAILURES:
            names = ", ".join(failures.FAILURES)
            raise ValueError(f"--failure {failure}: expected one of {names}")
        others = {"algorithm": algorithm, "sram": sram, "layout": layout, "row": row}
        for option, value in (*others.items(), ("backward", backward or None)):
            if value is not None:
                raise ValueError(f"--{option}: expected none, as --failure {failure} is given")
        arrays = viewer.random_head(**numbers) if numbers else ()
        name, page = failure, failures.show(failure, *arrays, tiles=size, is_causal=causal).view()
    else:
        name, colon, convention = ("flash2" if algorithm is None else algorithm).partition(":")
        what: dict[str, Any] = {}
        checks.choice("algorithm", name, ALGORITHMS)
        if colon:
            known = verify.conventions(name) + (verify.conventions(name, True) if backward else ())
            what["convention"] = checks.choice("convention", convention, dict.fromkeys(known))
        spelled = {"is_causal": "--causal", "block_mask": f"--layout {layout}"}
        for argument in viewer.refused(name, {"is_causal": causal, "block_mask": layout}):
            raise ValueError(f"{spelled[argument]}: expected none, for algorithm={name!r}")
        if layout is not None:
            length = viewer.N if N is None else N
            size, what["block_mask"] = blocks_kept(layout, size, length, length)
        page = viewer.view(
            name, backward=backward, tiles=size, sram=sram, row=row, is_causal=causal,
            **numbers, **what,
        )  # fmt: skip
        name += "-backward" * backward
    path = page.save(f"{name}.html" if out is None else out)
    steps, kilobytes = len(page.recording), path.stat().st_size / 1000
    print(f"{path}: {page.title}, {steps} steps, {kilobytes:.0f} kB")
    if open_:
        webbrowser.open(path.absolute().as_uri())
