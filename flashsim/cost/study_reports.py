"""What the studies found, as reports: small SRAM, standard attention's kernels, approximations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from .. import __version__
from ..papers.fa1_tables import Table
from ..tables import BAD, Report, count, seconds
from . import approximations, small_sram, standard_kernels
from .devices import Device

NOT_HELD = "an executed run moved other than its closed form"


def small_sram_report(
    N: int, d: int, rows: Sequence[Sequence[small_sram.Point]], crossovers: Mapping[int, float]
) -> Report:
    """The report of `flashsim small-sram`; crossovers by their d."""
    table = []
    for points in rows:
        M, best = points[0].M, small_sram.winner(points) or "-"
        moved = {p.algorithm: _in_scores(p) for p in points}
        table.append({"M / d^2": f"{M / d**2:.3g}", "M": count(M), **moved, "fewest": best})
    far = [
        {"d": str(width), "FlashAttention-2 moves the fewest from": f"M = {ratio:.2f} d^2"}
        for width, ratio in crossovers.items()
    ]
    smallest = 4 * d + 3
    return Report(
        about={"command": "small-sram", "flashsim": __version__, "N": N, "d": d},
        heading=[
            f"Elements that a head moves, in N^2, with optimal tiles for M elements of SRAM: N = "
            f"{N}, d = {d}. Every entry was run within that M.",
        ],
        tables=[table, far],
        records=[{**asdict(p), "ratio": p.M / d**2} for points in rows for p in points],
        remarks=[
            f"flash2 needs 4 d + 3 = {smallest} elements, the others 5 whatever d is. For large N "
            "and M: flash2 4 d^2 / M, square-tiles 4 d / sqrt(M) + 1, resident-scores "
            "4.90 d / sqrt(M), in N^2.",
            f"Crossovers: closed forms at N = {FAR}, where reading the inputs once is little.",
        ],
        failures=[
            f"{p.algorithm} at M = {p.M}: {NOT_HELD}"
            for points in rows
            for p in points
            if not p.held
        ],
        verdict="Every run moved, array by array, what its closed form says.",
    )


FAR = 16384  # length of the crossovers


def _in_scores(p: small_sram.Point) -> str:
    if p.total_elements is None:
        return "does not fit"
    return f"{'' if p.held else BAD + ' '}{p.total_elements / p.N**2:.2f}"


def standard_report(found: Sequence[standard_kernels.Moved]) -> Report:
    """The report of `flashsim standard`."""
    N, d, heads, batch = standard_kernels.PUBLISHED.values()
    table = [
        {
            "standard attention with": moved.way.name,
            "forward": _formula(moved.forward),
            "backward": _formula(moved.backward),
            "GB": f"{moved.gigabytes:.2f}",
            "count =\nformula": "yes" if moved.held else BAD,
        }
        for moved in found
    ]
    lowest, highest = found[0].gigabytes, found[-1].gigabytes
    failures = [f"{m.way.name}: {NOT_HELD}" for m in found if not m.held]
    if round(highest, 1) != standard_kernels.PUBLISHED_GB:
        failures.append(f"{highest:.2f} GB is not the published {standard_kernels.PUBLISHED_GB}")
    return Report(
        about={"command": "standard", "flashsim": __version__, **standard_kernels.PUBLISHED},
        heading=[
            f"Forward and backward of {heads} heads x {batch} items, N = {N}, d = {d}, 2 bytes a "
            "number and 1 a dropout bit.",
            f"Row tiles, where there are several: {standard_kernels.ROW_TILES}.",
        ],
        tables=[table],
        records=[
            {
                "way": m.way.name, "algorithm": m.way.algorithm, "row_tiles": m.way.row_tiles,
                "row_fits": m.way.row_fits, "forward_score_matrices": m.forward[0],
                "forward_matrices": m.forward[1], "backward_score_matrices": m.backward[0],
                "backward_matrices": m.backward[1], "total_bytes": round(m.gigabytes * 1e9),
                "held": m.held,
            }
            for m in found
        ],
        remarks=[
            f"The FlashAttention paper's own formulas are the first row, {lowest:.1f} GB; its "
            f"Fig. 2 publishes {standard_kernels.PUBLISHED_GB} GB for this size, the last row.",
            "The last row is a fit: 11 N^2 of the algorithm and 7 N^2 of more passes. Here those "
            "are a mask kernel forward (2), dropout forward and backward (2 each) and its bits "
            "written and read as bytes (1). The paper does not say; a mask kernel in both passes "
            "(4), and dropout forward with bits of 2 bytes (3), make 7 as well.",
        ],
        failures=failures,
        verdict="Every run moved, array by array, what its closed form says; the last row is the "
        "published figure.",
    )  # fmt: skip


def _formula(matrices: tuple[float, float]) -> str:
    return "{:g} N^2 + {:g} N d".format(*matrices)


SHOWN = (512, 1024, 2048, 4096, 8192)


def approximations_report(
    gpu: Device,
    points: Sequence[approximations.Point],
    held: Mapping[str, bool],
    errors: Sequence[approximations.Error],
    published: Mapping[int, Table],
) -> Report:
    """The report of `flashsim approximations`; published are FlashAttention's tables."""
    names, forward = approximations.PUBLISHED_NAMES, published[18]
    printed = {(name, N): ms / 1e3 for name, row in names.items() for N, ms in forward.points(row)}
    return Report(
        about={
            "command": "approximations", "flashsim": __version__, **approximations.PUBLISHED,
            "device": gpu.key, "local_window": approximations.WINDOW,
            "projection": approximations.MIXED,
        },
        heading=[
            "Local attention (windows of "
            f"{approximations.WINDOW}) and Linformer (k = {approximations.MIXED}) beside exact "
            "attention: 16 items x 8 heads, d = 64, float16.",
            f"Times on the {gpu.name} at peak rates; published: Table 18 of FlashAttention, A100.",
        ],
        tables=[*_costs(points, printed), _crossovers(points, published), _errors(errors)],
        records=[
            *(
                {
                    "method": p.method, "N": p.N, "flops": p.time.flops, "exps": p.time.exps,
                    "hbm_bytes": p.time.hbm_bytes, "lower_seconds": p.time.lower_seconds,
                    "serial_seconds": p.time.serial_seconds,
                    "published_seconds": printed.get((p.method, p.N)),
                }
                for p in points
            ),
            *(asdict(error) for error in errors),
        ],
        remarks=[*_slower(points), _gap(gpu, points, printed), *REMARKS],
        failures=[
            *(f"{name}: {NOT_HELD}" for name, same in held.items() if not same),
            *(f"{e.method}, {e.size}, on the sample: {NOT_HELD}" for e in errors if not e.held),
            *(
                f"{e.method}, {e.size}, on the sample: {e.over_bound:.3g} times the bound of its "
                "own definition"
                for e in errors
                if not e.over_bound <= 1
            ),
        ],
        verdict="Every run moved what its closed form says, and each approximation is its own "
        "definition within the float64 bound.",
    )  # fmt: skip


REMARKS = [
    "flash2, local: the same windows in FlashAttention-2, which skips the tiles that they leave "
    "out and keeps scores on chip. It is local attention's answer at a fraction of its bytes.",
    "Errors: |O - exact| / |exact| over the real tokens of the built-in sample, whose model was "
    "trained with neither. Linformer takes means over k runs of keys here; its own are learned.",
]


def _slower(points: Sequence[approximations.Point]) -> Iterator[str]:
    """Where an approximation has fewer operations than flash2, and takes longer."""
    at = {(p.method, p.N): p.time for p in points}
    for name in ("linformer", "local"):
        for N in SHOWN:
            mine, other = at[name, N], at["flash2", N]
            if mine.flops < other.flops and mine.lower_seconds > other.lower_seconds:
                yield (
                    f"At N = {N} {name} has {mine.flops / other.flops:.0%} of flash2's FLOPs, "
                    f"moves {mine.hbm_bytes / other.hbm_bytes:.1f} times its bytes, and takes "
                    f"{mine.lower_seconds / other.lower_seconds:.1f} times its lower time."
                )


def _gap(
    gpu: Device,
    points: Sequence[approximations.Point],
    printed: Mapping[tuple[str, int], float],
) -> str:
    """Why the crossovers are not the published ones, measured on an A100."""
    over = [
        printed[p.method, p.N] / p.time.lower_seconds
        for p in points
        if p.method == "flash1" and p.N in SHOWN
    ]
    starts = [1e3 * printed["linformer", N] for N in approximations.LENGTHS if N <= 1024]
    same_gpu = (
        f": the published FlashAttention takes {min(over):.1f} to {max(over):.1f} "
        f"times its lower time here, and Linformer {min(starts):g} to {max(starts):g} ms whatever "
        "N is up to 1024"
    )
    return (
        "Crossover: N from which on the approximation takes less time. The model knows peak rates "
        f"and no start{same_gpu if gpu.key.startswith('a100') else ''}. "
        "The window and the code of the published local attention are not known; "
        "public code also copies the keys and values of each window."
    )


def _costs(
    points: Sequence[approximations.Point], printed: Mapping[tuple[str, int], float]
) -> list[list[dict[str, str]]]:
    """A table for each quantity: a row a length, a column a method."""

    def published(p: approximations.Point) -> str:
        return seconds(printed[p.method, p.N]) if (p.method, p.N) in printed else "-"

    quantities: dict[str, Callable[[approximations.Point], str]] = {
        "FLOPs": lambda p: count(p.time.flops),
        "HBM bytes": lambda p: count(p.time.hbm_bytes),
        "lower time": lambda p: seconds(p.time.lower_seconds),
        "serial time": lambda p: seconds(p.time.serial_seconds),
        "published": published,
    }
    return [
        [
            {name: f"N = {N}", **{p.method.replace(" ", "\n"): cell(p) for p in points if p.N == N}}
            for N in SHOWN
        ]
        for name, cell in quantities.items()
    ]


def _crossovers(
    points: Sequence[approximations.Point], published: Mapping[int, Table]
) -> list[dict[str, str]]:
    rows = []
    for method in ("linformer", "local"):
        for exact in ("flash1", "flash2"):
            row = {"crossover of": f"{method}, {exact}"}
            for kind in ("lower", "serial"):
                N = approximations.crossover(points, method, exact, f"{kind}_seconds")
                row[f"{kind}\ntime"] = "-" if N is None else f"{N:.0f}"
            for number, what in ((18, "forward"), (9, "and mask,\ndropout"), (11, "and\nbackward")):
                last = published[number].crossovers(approximations.PUBLISHED_NAMES[method])[-1]
                row[f"published\n{what}"] = f"{last:.0f}" if exact == "flash1" else "-"
            rows.append(row)
    return rows


def _errors(errors: Sequence[approximations.Error]) -> list[dict[str, str]]:
    return [
        {
            "sample": e.method,
            "size": str(e.size),
            "FLOPs of all": f"{e.flops_share:.0%}",
            "error": f"{e.relative_error:.1%}",
            "own error / bound": f"{'' if e.over_bound <= 1 else BAD + ' '}{e.over_bound:.2f}",
            "count =\nformula": "yes" if e.held else BAD,
        }
        for e in errors
    ]
