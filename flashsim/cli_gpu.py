"""The commands about real GPUs: bench, which needs one, and compare, which does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import Csv, Json, Plot, check_output, finish, integers, progress


def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,H,N,d",
            help="May be repeated.",
            show_default="4,16,4096,64 2,16,4096,128, and decoding",
        ),
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm",
            "-a",
            metavar="NAME",
            show_default="all",
            help="standard, flash1, flash2, flash2-two-kernel (a backward pass), block_sparse or "
            "split_kv. May be repeated.",
        ),
    ] = None,
    counters: Annotated[
        bool, typer.Option("--counters", help="Read hardware counters too, by Nsight Compute.")
    ] = False,
    flush: Annotated[
        bool, typer.Option("--flush", help="Flush the L2 before each timed launch.")
    ] = False,
    peers: Annotated[
        bool, typer.Option(help="Time PyTorch's attention too, if it is installed.")
    ] = True,
    commit: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What is measured, where git cannot say it."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the data set, for compare.")
    ] = None,
) -> None:
    """Time the kernels on this GPU over their tiles, with and without their arithmetic."""
    from . import checks, tables
    from .measure import bench as bench_module
    from .measure.cases import STEPS, Shape, usual
    from .measure.report import bench_report

    shapes: list[Shape] = []
    for text in shape or []:
        batch, heads, N, d = integers("shape", text, "B,H,N,d")
        for name, value in zip("BHNd", (batch, heads, N, d), strict=True):
            checks.integer(f"shape: {name}", value, 1)
        shapes.append((batch, heads, N, d))
    for name in algorithm or []:
        checks.choice("algorithm", name, dict.fromkeys(name for name, _ in STEPS))
    if json is not None and not json.absolute().parent.is_dir():
        raise ValueError(f"--json {json}: expected a file in a folder that exists")
    cases = [
        case
        for case in usual(tuple(shapes) or None)
        if not algorithm or case.algorithm in algorithm
    ]
    bench_module.require_gpu()
    with progress(bench_module.stages(cases, counters)) as on_step:
        data = bench_module.bench(
            cases, count=counters, flush=flush, peers=peers, commit=commit, on_step=on_step
        )
    if json is not None:
        bench_module.write(data, json)
    tables.write_table(bench_report(data))


def compare(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A data set that bench wrote with --json.",
            show_default="the recorded one of an H200",
        ),
    ] = None,
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:
    """Hold measured bytes and times of the kernels against the model."""
    from .measure.compare import compare as compared
    from .measure.compare import recorded
    from .measure.report import compare_report

    check_output(json, csv, plot)
    found = compared(recorded(file))
    if plot is not None:
        from .measure.plots import comparison

        comparison(plot, found)
    source = str(file) if file is not None else "recorded, in the package"
    finish(compare_report(found, source), json, csv)
