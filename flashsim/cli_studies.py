"""The commands that run algorithms to answer a question: small-sram, standard, approximations."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_options import Csv, Json, Plot, check_output, finish, progress

WIDTHS = (64, 128, 256)


def small_sram(
    N: Annotated[int, typer.Option("--N", "-N", help="Length of what is run.")] = 192,
    d: Annotated[int, typer.Option("--d", "-d", help="Width of what is run.")] = 32,
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:
    """Who moves the fewest elements when SRAM holds less than d x d of them.

    FlashAttention-2 and the two strategies that keep a tile of scores are run within each budget.
    """
    from .checks import integer
    from .cost import small_sram as study
    from .cost.study_reports import FAR, small_sram_report

    check_output(json, csv, plot)
    N, d = integer("N", N, 1), integer("d", d, 4)
    with progress(len(study.RATIOS) + len(WIDTHS)) as on_step:
        rows = study.compare(N, d, on_step=on_step)
        crossovers = {}
        for width in WIDTHS:
            on_step(f"crossover, d = {width}")
            crossovers[width] = study.crossover(FAR, width)
    if plot is not None:
        from .cost.study_plots import small_sram_lines

        ratios = [2 ** (n / 8) for n in range(-32, 25)]
        far = study.compare(FAR, WIDTHS[0], ratios, execute=False)
        small_sram_lines(plot, rows, far, crossovers[WIDTHS[0]])
    finish(small_sram_report(N, d, rows, crossovers), json, csv)


def standard(json: Json = False, csv: Csv = False) -> None:
    """What "standard attention" moves, by how it is cut into kernels: 25.2 to 40.3 GB.

    Each way is run small, and its closed form is that of Fig. 2 of the FlashAttention paper.
    """
    from .cost import standard_kernels as study
    from .cost.study_reports import standard_report

    check_output(json, csv, None)
    with progress(len(study.WAYS)) as on_step:
        found = list(study.ways(on_step))
    finish(standard_report(found), json, csv)


def approximations(
    device: Annotated[
        str, typer.Option(metavar="NAME", help="GPU whose peak rates give the time.")
    ] = "a100-40",
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:
    """Fewer operations, slower anyway: local attention and Linformer beside exact attention.

    FLOPs, bytes and time over the length, where they cross, and the error on the built-in sample.
    """
    from .cost import approximations as study
    from .cost.devices import device as preset
    from .cost.study_reports import approximations_report
    from .papers import tables

    check_output(json, csv, plot)
    gpu = preset(device)
    with progress(2 + len(study.SAMPLE_WINDOWS) + len(study.SAMPLE_MIXED)) as on_step:
        on_step("closed forms")
        points = study.points(gpu)
        on_step("small runs")
        held = study.executed()
        errors = list(study.sample_errors(on_step))
    if plot is not None:
        from .cost.study_plots import approximation_lines

        approximation_lines(plot, gpu, points, tables()[18])
    finish(approximations_report(gpu, points, held, errors, tables()), json, csv)
