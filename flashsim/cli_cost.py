"""The commands about what a run must cost: bounds and tiles, time, thread blocks, L2, grids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from .cli_options import (
    Causal,
    Csv,
    Json,
    Plot,
    blocks_kept,
    check_output,
    check_rule,
    finish,
    integers,
    progress,
    tile_rows,
)

if TYPE_CHECKING:
    from .cost.cache import DramCost

LARGEST_L2_MB = 1e9
LARGEST_SIZE = 10**9  # of tiles: what a cell of its table still holds
MOST_BLOCKS = 2**22  # of waves, which follows each of them


def sweep(
    part: Annotated[
        list[str] | None,
        typer.Argument(help="forward, backward, sparse; several may be named.", show_default="all"),
    ] = None,
    N: Annotated[
        str | None, typer.Option("--N", "-N", metavar="RANGE", help="Sequence lengths.")
    ] = None,
    d: Annotated[
        str | None,
        typer.Option("--d", "-d", metavar="RANGE", help="Widths.", show_default="64"),
    ] = None,
    M: Annotated[
        str | None,
        typer.Option(
            "--M", "-M", metavar="RANGE", help="SRAM in elements.",
            show_default="what a block of the GPU may use",
        ),
    ] = None,
    Br: Annotated[
        str | None,
        typer.Option("--Br", metavar="RANGE", help="Rows of a query tile; with --Bc."),
    ] = None,
    Bc: Annotated[
        str | None, typer.Option("--Bc", metavar="RANGE", help="Rows of a key tile; with --Br.")
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm", "-a", metavar="NAME", show_default="standard, flash1, flash2",
            help="As of io; flash1:elided is the published kernel. May be repeated.",
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="GPU. May be repeated.", show_default="h200"),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Tiles without --Br: strict, paper, optimal or hardware.", show_default="strict"
        ),
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="The backward pass instead.")
    ] = False,
    json: Json = False,
    csv: Csv = False,
    parquet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write all points of a grid as Parquet too; needs pyarrow."
        ),
    ] = None,
    plot: Plot = None,
) -> None:  # fmt: skip
    """Verify how traffic grows or, given ranges, tabulate the closed forms over a grid.

    Without ranges, the small sizes are run and exponents fitted. forward, backward: each pass, as
    N^2 d^2 / M. sparse: linearly in the share of blocks that are kept, beside published times.

    With ranges, as in --N 1024:65536:x2 --d 64,128 -M 8192:131072:x2, every combination is a point
    and nothing is run. A range is START:STOP:STEP or START:STOP:xFACTOR; commas separate integers
    and ranges. What does not fit on the chip is a point too. --plot draws what the ranges ask: IO
    over M, IO and time over the tiles, or who wins over N and d.
    """
    check_output(json, csv, plot)
    if parquet is not None and parquet.suffix.lower() != ".parquet":
        raise ValueError(f"--parquet {parquet}: expected a file name that ends in .parquet")
    given: dict[str, Any] = {
        "d": d, "M": M, "Br": Br, "Bc": Bc,
        "algorithms": algorithm, "devices": device, "rule": rule,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value}
    if N is None and not (given or backward or parquet):
        _verify(part or [], json, csv, plot)
    if N is None:
        raise ValueError("--N: expected sequence lengths for a grid, such as 1024:65536:x2")
    if part:
        raise ValueError(f"{part[0]}: expected no part, as --N {N} asks for a grid")
    from .cost import grid as cost
    from .cost.report import grid_report

    given = {"d": "64", **given, "N": N, "backward": backward}
    with progress(cost.steps(**given)) as on_step:
        points = cost.grid(**given, on_step=on_step)
    if parquet is not None:
        points.to_parquet(parquet)
    if plot is not None:
        from .cost.grid_plots import grid_panels

        grid_panels(plot, points)
    finish(grid_report(points, given), json, csv)


def _verify(parts: list[str], json: bool, csv: bool, plot: Path | None) -> NoReturn:
    from . import reports
    from .cost import sweep as cost

    chosen = cost.chosen_parts(parts)
    with progress(cost.steps(chosen)) as on_step:
        series = [s for name in chosen if name != "sparse" for s in cost.sweep(name, on_step)]
        lines = cost.densities(on_step) if "sparse" in chosen else []
    if plot is not None:
        from .plots import growth_lines

        growth_lines(plot, series, cost.FITTED, lines)
    finish(reports.sweep_report(series, lines), json, csv)


def tiles(
    N: Annotated[int, typer.Option("--N", "-N", help="Queries and keys.")] = 4096,
    d: Annotated[int, typer.Option("--d", "-d", help="Width of Q and K.")] = 64,
    dv: Annotated[int | None, typer.Option("--dv", help="Width of V.", show_default="d")] = None,
    sram: Annotated[
        int | None,
        typer.Option(help="M, in elements.", show_default="what a block of the GPU may use"),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="GPU whose shared memory is M.")] = (
        "h200"
    ),
    dtype: Annotated[
        str, typer.Option(help="Of what the shared memory of a GPU holds.")
    ] = "float16",
    json: Json = False,
    csv: Csv = False,
) -> None:
    """The tiles of each rule, what they need and move, and where the paper's do not fit in M.

    For every algorithm and pass: paper (as printed), strict (the largest of that shape that fit),
    optimal (fewest elements moved) and hardware (fewest among multiples of 16).
    """
    from . import checks
    from .cost import tiles as rules
    from .cost.devices import DEVICES
    from .cost.devices import device as preset
    from .cost.io import DTYPES
    from .cost.report import tiles_report

    check_output(json, csv, None)
    gpu = preset(device)
    itemsize = DTYPES[checks.choice("dtype", dtype, DTYPES)].itemsize
    M = gpu.sram_bytes_per_block // itemsize if sram is None else sram
    for name, size in (("sram", M), ("N", N), ("d", d), ("dv", d if dv is None else dv)):
        checks.integer(name, size, 1, LARGEST_SIZE + 1)
    chip = f"a block of {gpu.key}, as {dtype}" if sram is None else "as given"
    given: dict[str, Any] = {
        "N": N, "d": d, "dv": d if dv is None else dv, "M": M, "dtype": dtype, "chip": chip,
    }  # fmt: skip
    overflows = {
        key: {
            width: rules.papers_overflow(each.sram_bytes_per_block // itemsize, width)
            for width in sorted({64, 128, d})
        }
        for key, each in DEVICES.items()
    }
    finish(tiles_report(list(rules.choices(N, d, M, dv)), overflows, given), json, csv)


def roofline(
    N: Annotated[int, typer.Option("--N", "-N", help="Queries and keys.")] = 4096,
    d: Annotated[int, typer.Option("--d", "-d", help="Width of Q, K and V.")] = 64,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    batch: Annotated[int, typer.Option(help="Items.")] = 4,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm", "-a", metavar="NAME", help="As of io. May be repeated.",
            show_default="all that differ",
        ),
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Add the backward passes.")] = False,
    rule: Annotated[
        str | None,
        typer.Option(help="Tiles: strict, paper, optimal or hardware.", show_default="strict"),
    ] = None,
    tiles: Annotated[
        str | None,
        typer.Option(
            metavar="Br,Bc", help="Rows of a query and of a key tile.", show_default="by the rule"
        ),
    ] = None,
    causal: Causal = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="GPU.")] = "h200",
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:  # fmt: skip
    """How long memory, matrix units and exponentials take, and which of them binds.

    Closed forms over peak rates: the longest is a lower time, the sum one without any overlap.
    """
    from . import checks, verify
    from .cost.devices import device as preset
    from .cost.report import roofline_report, timed
    from .cost.roofline import tile_cycles

    check_output(json, csv, plot)
    check_rule(rule, tiles)
    for name, size in (("N", N), ("heads", heads), ("batch", batch)):
        checks.integer(name, size, 1)  # where nothing is done, nothing binds
    gpu = preset(device)
    gpu.flops_per_second(dtype)  # refuses a dtype without a rate
    given: dict[str, Any] = {
        "N": N, "d": d, "heads": heads, "batch": batch, "dtype": dtype, "is_causal": causal,
    }  # fmt: skip
    records = verify.io_records(
        verify.variants(algorithm or [], backward, run=False), Nk=N, dv=d, rule=rule or "strict",
        tiles=tile_rows(tiles), budget={"sram_bytes": gpu.sram_bytes_per_block}, device=gpu,
        backward=backward, **given,
    )  # fmt: skip
    records = timed(records, gpu, dtype)
    passes = {"forward": False, "backward": True}
    cycles = {name: tile_cycles(gpu, d=d, backward=back) for name, back in passes.items()}
    if plot is not None:
        from .cost.plots import roofline as draw

        title = f"{gpu.name}: batch {batch}, heads {heads}, N = {N}, d = {d}"
        draw(plot, title + (", causal" if causal else ""), records, gpu, dtype, d)
    finish(roofline_report(records, cycles, gpu, given), json, csv)


Length = Annotated[int, typer.Option("--N", "-N", help="Queries, and keys.")]
Width = Annotated[int, typer.Option("--d", "-d", help="Width of Q, K and V.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
Batch = Annotated[int, typer.Option(help="Items.")]
HalfPrecision = Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")]
GivenTiles = Annotated[
    str, typer.Option(metavar="Br,Bc", help="Rows of a query and of a key tile.")
]
BlocksAnSm = Annotated[
    int | None,
    typer.Option(
        help="Thread blocks that an SM holds.", show_default="by the shared memory of the tiles"
    ),
]


def waves(
    N: Length = 4096,
    d: Width = 64,
    heads: Heads = 8,
    batch: Batch = 1,
    dtype: HalfPrecision = "float16",
    tiles: GivenTiles = "128,64",
    causal: Causal = False,
    blocks: BlocksAnSm = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="GPU.")] = "a100",
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:
    """Thread blocks over the multiprocessors: how much of the GPU has something to do.

    FlashAttention has a block for each head, FlashAttention-2 for each row tile, Flash-Decoding for
    each part of the keys of one query. --causal adds the orders that mend the imbalance.
    """
    check_output(json, csv, plot)
    from .cost import waves as cost
    from .cost.blocks import call
    from .cost.devices import device as preset
    from .cost.report import waves_report

    gpu = preset(device)
    problem: dict[str, Any] = {
        "N": N, "d": d, "heads": heads, "batch": batch, "dtype": dtype, "is_causal": causal,
        **_given_tiles(tiles),
    }  # fmt: skip
    asked, need = call("flash2", **problem), None
    if (most := asked.heads * -(-N // asked.grid.Br)) > MOST_BLOCKS:
        sizes = f"N={N}, heads={heads}, batch={batch}"
        raise ValueError(f"{sizes}: expected at most {MOST_BLOCKS} thread blocks, not {most}")
    if blocks is None:
        blocks, need = cost.usual_blocks_per_sm(gpu, asked), asked.tile_bytes
    found = cost.usual(problem, gpu.key, blocks)
    if plot is not None:
        from .cost.plots import utilisation_and_schedules

        utilisation_and_schedules(plot, problem, gpu, blocks)
    finish(waves_report(found, gpu, blocks, problem, need), json, csv)


def l2(
    N: Length = 131072,
    d: Width = 128,
    heads: Heads = 2,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Key heads.", show_default="as many")
    ] = None,
    batch: Batch = 1,
    dtype: HalfPrecision = "float16",
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm", "-a", metavar="NAME", show_default="standard, flash1, flash2",
            help="Or flash2-two-kernel; block_sparse, which needs --layout. May be repeated.",
        ),
    ] = None,
    tiles: GivenTiles = "128,64",
    causal: Causal = False,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Keep only some blocks of the scores, those of a layout that run knows; the tiles "
            "are the blocks.",
        ),
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="The backward pass instead.")
    ] = False,
    blocks: BlocksAnSm = None,
    jitter: Annotated[
        float, typer.Option(help="Probability that a block sits out a turn; 0: all in step.")
    ] = 0.0,
    policy: Annotated[str, typer.Option(help="Who makes room: lru or random.")] = "lru",
    l2_mb: Annotated[
        float | None,
        typer.Option(help="L2 in MB of 2^20 bytes.", show_default="that of the GPU"),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="GPU.")] = "h200",
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:  # fmt: skip
    """What the DRAM sees behind the L2, of all that enters and leaves the multiprocessors.

    Each algorithm as it is, and the last once more with blocks that scan their inner loop by turns
    forward and backward.
    """
    check_output(json, csv, plot)
    from .cost import cache as cost
    from .cost.blocks import call
    from .cost.devices import device as preset
    from .cost.report import l2_report

    gpu = preset(device)
    problem: dict[str, Any] = {
        "N": N, "d": d, "heads": heads, "kv_heads": kv_heads, "batch": batch, "dtype": dtype,
        "is_causal": causal, "backward": backward, **_given_tiles(tiles),
    }  # fmt: skip
    what = {"problem": dict(problem), "layout": layout, "policy": policy, "jitter": jitter}
    if layout is not None:
        _, problem["block_mask"] = blocks_kept(layout, (problem["Br"], problem["Bc"]), N, N)
    names = list(dict.fromkeys(algorithm or ["standard", "flash1", "flash2"]))
    asked = {name: call(name, **problem) for name in names}
    once = {name: one.compulsory_read_bytes for name, one in asked.items()}
    runs = {name: (name, "forward") for name in names}
    turning = f"{names[-1]}, alternating"
    runs[turning], once[turning] = (names[-1], "alternating"), once[names[-1]]
    size = gpu.l2_bytes
    if l2_mb is not None:
        size = round(2**20 * l2_mb) if 0 < l2_mb <= LARGEST_L2_MB else 0
        if size <= 0:
            raise ValueError(f"--l2-mb {l2_mb:g}: expected MB, from a byte to {LARGEST_L2_MB:g}")
    sizes = [size] if plot is None else cost.sizes_around(size)
    slots = None if blocks is None else blocks * gpu.sm_count
    found: dict[str, list[DramCost]] = {run: [] for run in runs}
    with progress(len(runs) * len(sizes)) as on_step:
        for run, (name, scan) in runs.items():
            for l2_bytes in sizes:
                on_step(f"{run}, L2 of {l2_bytes / 2**20:.3g} MB")
                one = cost.dram_cost(
                    name, device=gpu.key, l2_bytes=l2_bytes, slots=slots, policy=policy, scan=scan,
                    jitter=jitter, **problem,
                )  # fmt: skip
                found[run].append(one)
    if plot is not None:
        from .cost.plots import dram_reads_over_l2

        title = f"{gpu.name}: N = {N}, d = {d}, {batch} x {heads} heads, {dtype}, {policy}"
        reads = {run: [one.read_bytes for one in all_sizes] for run, all_sizes in found.items()}
        dram_reads_over_l2(plot, title, size, sizes, reads, max(once.values()))
    what["l2_bytes"] = size
    own = {run: all_sizes[sizes.index(size)] for run, all_sizes in found.items()}
    needs = {name: one.tile_bytes for name, one in asked.items()} if blocks is None else {}
    finish(l2_report(own, once, gpu, what, needs), json, csv)


def _given_tiles(text: str) -> dict[str, int]:
    Br, Bc = integers("tiles", text, "Br,Bc")
    return {"Br": Br, "Bc": Bc}


def schedule(
    N: Annotated[int, typer.Option("--N", "-N", help="Keys.")] = 8448,
    d: Annotated[int, typer.Option("--d", "-d", help="Width of Q, K and V.")] = 128,
    Br: Annotated[int, typer.Option("--Br", help="Queries of both warpgroups.")] = 128,
    Bc: Annotated[int, typer.Option("--Bc", help="Keys of a tile.")] = 128,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="GPU whose peak rates give the cycles.")
    ] = "h100",
    fp8: Annotated[bool, typer.Option("--fp8", help="FP8 products, K and V of a byte.")] = False,
    matmul: Annotated[
        float | None, typer.Option(help="Cycles of both products of a tile.", show_default="device")
    ] = None,
    exp: Annotated[
        float | None, typer.Option(help="Cycles of a tile's softmax.", show_default="device")
    ] = None,
    copy: Annotated[
        float | None, typer.Option(help="Cycles to load K and V of a tile.", show_default="device")
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Cycles from an operation's end to who must see it elsewhere.")
    ] = 100,
    operations: Annotated[
        bool, typer.Option("--operations", help="In JSON and CSV, every operation: the timeline.")
    ] = False,
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:
    """FlashAttention-3's pipelines: what overlaps, and how busy that leaves the matrix units.

    No specialisation, without and with the softmax under the next product; with specialisation,
    ping-pong between two warpgroups, the softmax under the next product, and both.
    """
    from dataclasses import replace

    from .checks import bad, integer
    from .cost.devices import device as preset
    from .cost.schedule import MOST_TILES, PIPELINES, tile_times, timeline
    from .cost.schedule_report import schedule_report, timelines

    check_output(json, csv, plot)
    if operations and not (json or csv):
        raise ValueError("--operations: expected --json or --csv with it; the table shows none")
    gpu = preset(device)
    given = {"matmul": matmul, "exp": exp, "copy": copy}
    times = replace(
        tile_times(gpu, Br, Bc, d, fp8=fp8, wait=wait),
        **{name: value for name, value in given.items() if value is not None},
    )
    if integer("N", N, 1) > MOST_TILES * Bc:
        raise bad("N", N, f"at most {MOST_TILES * Bc}, {MOST_TILES} key tiles of Bc={Bc}")
    tiles = -(-N // Bc)
    found = [timeline(name, times, tiles) for name in PIPELINES]
    if plot is not None:
        timelines(plot, found, gpu)
    problem = {"N": N, "d": d, "Br": Br, "Bc": Bc, "dtype": "fp8" if fp8 else "float16"}
    finish(schedule_report(found, gpu, problem, operations), json, csv)
