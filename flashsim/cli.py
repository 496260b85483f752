"""The command line: run, io, tiles, roofline, sweep, paper, layouts, devices, bench, compare,
view.

Exit codes: 0 if every check held, 1 if one did not, 2 for input that cannot be used, with one line
on stderr that says which and why. What takes long to import is imported where it is used.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from . import __version__, cli_cost, cli_gpu, cli_papers, cli_studies, cli_view
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
    from .inputs import Inputs
    from .verify import Budget, Record

DEFAULT_SRAM_KB = 32
LARGEST_SRAM = 2**60  # no memory is larger, and its bytes are still a number
DEFAULT_DEVICE = "h200"
LAYOUT_NAMES = (
    "butterfly[:FACTORS], local-global[:LOCAL[,GLOBAL]], strided[:STRIDE], random:DENSITY[,SEED] "
    "or causal"
)

# The base of every complaint about arguments: click's, or that of the copy which newer Typers hold.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class OneLineErrors(TyperGroup):
    """Commands whose errors are one line on stderr and exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command that the arguments name, and exit."""
        kwargs["standalone_mode"] = False  # errors come here instead of being printed at length
        try:
            code = super().main(*args, **kwargs)
        except UsageError as error:
            message = error.format_message()  # type: ignore[attr-defined]
        except (ValueError, TypeError, ArithmeticError, OSError, MemoryError) as error:
            message = str(error) or type(error).__name__
        except typer.Abort:
            sys.exit(130)
        else:
            sys.exit(code or 0)
        print("flashsim: error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `flashsim` command."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="flashsim")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"flashsim {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def flashsim(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What FlashAttention does, exactly, and what it costs, counted.

    Start with [bold]flashsim run[/bold]: it needs no input.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


Algorithms = Annotated[
    list[str] | None,
    typer.Option(
        "--algorithm", "-a", metavar="NAME", show_default="all that differ",
        help="standard, flash1, flash2, flash2-two-kernel, block_sparse; by name only "
        "flash3, flash4, split_kv, paged, rabe_staats, online_softmax, standard-unfused, "
        "square-tiles, resident-scores, and the approximations local, linformer, flash3-fp8. "
        "flash1:literal is the printed algorithm, flash1:elided the published kernel (initial O, "
        "l, m cost nothing). May be repeated.",
    ),
]  # fmt: skip
Sram = Annotated[int | None, typer.Option(help="SRAM in elements, each number counting one.")]
SramKb = Annotated[
    float | None,
    typer.Option(
        help="SRAM in KB of 1024 bytes.", show_default=f"{DEFAULT_SRAM_KB} without --sram"
    ),
]
Tiles = Annotated[
    str | None,
    typer.Option(metavar="Br,Bc", help="Rows of a query and of a key tile.", show_default="fitted"),
]
Layout = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Keep only some blocks of the scores: {LAYOUT_NAMES}. The tiles are the blocks.",
    ),
]
LocalWindow = Annotated[
    int | None,
    typer.Option(help="Queries of a window of local attention; for the approximation local."),
]
Projection = Annotated[
    int | None,
    typer.Option(help="Keys that all are mixed into; for the approximation linformer."),
]
Splits = Annotated[
    int | None,
    typer.Option(help="Parts of the keys, merged; for split_kv.", show_default="a rule's"),
]
Fp8 = Annotated[
    int | None,
    typer.Option(metavar="ROWS", help="Rows that share a scale in FP8; for flash3-fp8."),
]
Backward = Annotated[bool, typer.Option("--backward", help="Add the backward passes.")]
DeviceName = Annotated[
    str, typer.Option(metavar="NAME", help="GPU whose memory bandwidth gives the time.")
]
CausalAlign = Annotated[
    str, typer.Option(help="Where the lengths differ: bottom-right or top-left (PyTorch's).")
]
Window = Annotated[
    str | None,
    typer.Option(
        metavar="L,R", help="Query i sees keys i-L to i+R; leave a side empty for no limit."
    ),
]


@app.command()
def run(
    file: Annotated[
        Path | None,
        typer.Argument(
            help=".npz or .safetensors with q, k, v and, if you like, key_padding_mask, attn_mask, "
            "expected_output, do (gradient of the output).",
            show_default="a built-in sample from a real model",
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="B,H,N,d", help="Random normal inputs instead of a file.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of what is random: inputs, and do.", show_default="0")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the random inputs: float16, bfloat16, float32 or float64.",
            show_default="float32",
        ),
    ] = None,
    algorithm: Algorithms = None,
    backward: Backward = False,
    sram: Sram = None,
    sram_kb: SramKb = None,
    tiles: Tiles = None,
    layout: Layout = None,
    local_window: LocalWindow = None,
    projection: Projection = None,
    splits: Splits = None,
    fp8: Fp8 = None,
    page_size: Annotated[
        int | None, typer.Option(metavar="ROWS", help="Put keys and values in pages; for paged.")
    ] = None,
    exp_emulation: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE,DEGREE",
            help="Share of the exponentials that are polynomials of a degree; for flash4.",
        ),
    ] = None,
    rescale_threshold: Annotated[
        float | None,
        typer.Option(
            metavar="POWERS",
            help="Powers of two by which a row's maximum must rise for a rescaling; for flash4.",
            show_default="8",
        ),
    ] = None,
    incoherent: Annotated[
        bool, typer.Option(help="Rotate Q and K before FP8 rounds them; for flash3-fp8.")
    ] = True,
    packed: Annotated[
        bool, typer.Option("--packed", help="Put the real tokens in a row, without padding.")
    ] = False,
    causal: Causal = False,
    causal_align: CausalAlign = "bottom-right",
    window: Window = None,
    scale: Annotated[float | None, typer.Option(show_default="1/sqrt(d)")] = None,
    dropout: Annotated[float, typer.Option(help="Probability that a weight is dropped.")] = 0.0,
    dropout_seed: Annotated[int, typer.Option(help="Of the dropout.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest error of the file's expected output.",
            show_default="2e-6; float16 2e-3, bfloat16 2e-2",
        ),
    ] = None,
    device: DeviceName = DEFAULT_DEVICE,
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:
    """Run attention algorithms, check each, and show what they move.

    Each must agree with float64 within a computed bound, and move what its closed form says.

    With --backward so must the gradients of sum(output * do): a second table.
    """
    check_output(json, csv, plot)
    from . import reports, verify
    from .cost.devices import device as preset
    from .inputs import packed as pack

    gpu = preset(device)
    budget = _budget(sram, sram_kb, DEFAULT_SRAM_KB * 1024)
    inputs = _inputs(file, shape, seed, dtype, backward)
    what: dict[str, Any] = {
        "is_causal": causal, "causal_align": causal_align, "window": _window(window),
        "scale": scale, "dropout_p": dropout, "seed": dropout_seed,
        "local_window": local_window, "projection": projection, "splits": splits,
        "fp8": fp8, "incoherent": incoherent, "page": page_size,
        "exp_emulation": _emulation(exp_emulation), "rescale_threshold": rescale_threshold,
    }  # fmt: skip
    if file is None and (causal or window or scale is not None or dropout or layout):
        inputs = replace(inputs, expected_output=None)  # it is that of the model's own settings
    if packed:
        inputs, what["cu_seqlens_q"] = pack(inputs)
    do = verify.output_gradient(inputs, seed) if backward else None
    given = _given(
        block_mask=layout, local_window=local_window, projection=projection, splits=splits,
        fp8=fp8, exp_emulation=exp_emulation, block_tables=page_size,
        rescale_threshold=rescale_threshold, incoherent=None if incoherent else False,
    )  # fmt: skip
    chosen = verify.variants(algorithm or [], backward, given)
    size = tile_rows(tiles)
    if layout is not None:
        lengths = inputs.q.shape[-2], inputs.k.shape[-2]
        size, what["block_mask"] = blocks_kept(layout, size, *lengths)
    with progress(len(chosen) + 1 + backward) as on_step:
        records = verify.run_records(
            inputs, chosen, budget=budget, tiles=size, device=gpu,
            tolerance=tolerance, on_step=on_step, do=do, **what,
        )  # fmt: skip
    if plot is not None:
        _plot_traffic(plot, inputs.origin, records)
    finish(reports.run_report(inputs, records, budget, gpu, what, layout), json, csv)


@app.command()
def io(
    N: Annotated[int, typer.Option("--N", "-N", help="Queries.")] = 4096,
    d: Annotated[int, typer.Option("--d", "-d", help="Width of Q and K.")] = 64,
    Nk: Annotated[int | None, typer.Option("--Nk", help="Keys.", show_default="N")] = None,
    dv: Annotated[int | None, typer.Option("--dv", help="Width of V.", show_default="d")] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 1,
    batch: Annotated[int, typer.Option(help="Items.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="float16, bfloat16, float32 or float64; only bytes depend on it.")
    ] = "float16",
    algorithm: Algorithms = None,
    backward: Backward = False,
    sram: Sram = None,
    sram_kb: Annotated[
        float | None,
        typer.Option(
            help="SRAM in KB of 1024 bytes.", show_default="what a block of the GPU may use"
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Tiles: paper (Bc = M/4d, may not fit), strict (the largest of that shape that "
            "fit), optimal (fewest elements moved) or hardware (fewest among multiples of 16).",
            show_default="strict",
        ),
    ] = None,
    tiles: Tiles = None,
    layout: Layout = None,
    local_window: LocalWindow = None,
    projection: Projection = None,
    splits: Splits = None,
    fp8: Fp8 = None,
    causal: Causal = False,
    causal_align: CausalAlign = "bottom-right",
    window: Window = None,
    device: DeviceName = DEFAULT_DEVICE,
    json: Json = False,
    csv: Csv = False,
    plot: Plot = None,
) -> None:
    """What attention costs at any size, in closed form: nothing is run."""
    check_output(json, csv, plot)
    from . import reports, verify
    from .cost.devices import device as preset

    check_rule(rule, tiles)
    gpu = preset(device)
    budget = _budget(sram, sram_kb, gpu.sram_bytes_per_block)
    problem: dict[str, Any] = {
        "N": N, "Nk": N if Nk is None else Nk, "d": d, "dv": d if dv is None else dv,
        "heads": heads, "batch": batch, "dtype": dtype, "is_causal": causal,
        "causal_align": causal_align, "window": _window(window),
        "local_window": local_window, "projection": projection, "splits": splits,
        "fp8": fp8,
    }  # fmt: skip
    if rule is not None and layout is not None:
        raise ValueError(f"--rule {rule}: expected none, as the tiles are the blocks of --layout")
    size, keep = tile_rows(tiles), None
    if layout is not None:
        size, keep = blocks_kept(layout, size, problem["N"], problem["Nk"])
    elif size is None and rule is None:
        rule = "strict"
    given = _given(
        block_mask=layout, local_window=local_window, projection=projection, splits=splits,
        fp8=fp8,
    )  # fmt: skip
    records = verify.io_records(
        verify.variants(algorithm or [], backward, given, run=False),
        budget=budget, rule=rule,
        tiles=size, device=gpu, backward=backward, block_mask=keep, **problem,
    )  # fmt: skip
    if plot is not None:
        _plot_traffic(plot, f"N = {N}, d = {d}", records)
    finish(reports.io_report(problem, records, budget, gpu, rule, layout, keep), json, csv)


@app.command()
def layouts(
    file: Annotated[
        Path | None,
        typer.Argument(
            help=".npz or .safetensors as for run.",
            show_default="a built-in sample from a real model",
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"{LAYOUT_NAMES}. May be repeated.",
            show_default="each, random at four densities",
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(
            help="Rows and columns of a block.",
            show_default="about 32, for a power of two of blocks",
        ),
    ] = None,
    causal: Causal = False,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """What block layouts drop on an input, and what they save: the price of the approximation."""
    check_output(json, csv, None)
    from . import reports, verify
    from .checks import integer

    inputs = _inputs(file, None, None, None)
    lengths = inputs.q.shape[-2], inputs.k.shape[-2]
    blocks = verify.block_sizes(*lengths)
    if block is not None:
        blocks = (integer("block", block, 1),) * 2
    names = layout or verify.USUAL_LAYOUTS
    what = {"is_causal": causal}
    with progress(len(names) + 1) as on_step:
        records, missing = verify.layout_records(
            inputs, names, blocks=blocks, on_step=on_step, **what
        )
    if layout and missing:
        raise ValueError(missing[0])
    finish(reports.layouts_report(inputs, records, missing, what), json, csv)


@app.command()
def devices(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One GPU, with a source for each figure.")
    ] = None,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """GPUs that the other commands know, with the sources of their figures."""
    check_output(json, csv, None)
    from . import reports
    from .cost.devices import DEVICES
    from .cost.devices import device as preset

    if name is None:
        finish(reports.devices_report(list(DEVICES.values())), json, csv)
    finish(reports.device_report(preset(name)), json, csv)


app.command()(cli_cost.sweep)
app.command()(cli_cost.waves)
app.command()(cli_cost.l2)
app.command()(cli_cost.tiles)
app.command()(cli_cost.roofline)
app.command()(cli_cost.schedule)
app.command()(cli_papers.paper)
app.command()(cli_studies.small_sram)
app.command()(cli_studies.standard)
app.command()(cli_studies.approximations)
app.command()(cli_gpu.bench)
app.command()(cli_gpu.compare)
app.command()(cli_view.view)


def _plot_traffic(path: Path, title: str, records: list[Record]) -> None:
    from .plots import traffic_bars
    from .reports import pass_label

    traffic_bars(path, title, [pass_label(record) for record in records], records)


def _inputs(
    file: Path | None,
    shape: str | None,
    seed: int | None,
    dtype: str | None,
    backward: bool = False,
) -> Inputs:
    from .inputs import random_inputs, read_inputs

    if shape is None and ((seed is not None and not backward) or dtype is not None):
        raise ValueError(
            "--seed, --dtype: expected only with --shape, for random inputs (--seed also with "
            "--backward, for do)"
        )
    if file is not None and shape is not None:
        raise ValueError(f"--shape {shape}: expected none, as {file} gives the inputs")
    if file is not None:
        return read_inputs(file)
    if shape is not None:
        batch, heads, N, d = integers("shape", shape, "B,H,N,d")
        return random_inputs((batch, heads, N, d), seed or 0, dtype or "float32")
    from .sample import load_sample

    return load_sample()


def _given(**own: Any) -> list[str]:
    """Of the arguments that are some algorithm's own, those that are given."""
    return [name for name, value in own.items() if value is not None]


def _emulation(text: str | None) -> tuple[float, int] | None:
    if text is None:
        return None
    try:
        share, degree = text.split(",")
        return float(share), int(degree)
    except ValueError:
        raise ValueError(f"--exp-emulation {text}: expected SHARE,DEGREE, such as 0.25,3") from None


def _window(text: str | None) -> tuple[int | None, int | None] | None:
    if text is None:
        return None
    sides = text.split(",")
    if len(sides) != 2 or not all(side.strip().isdecimal() or not side.strip() for side in sides):
        raise ValueError(
            f"--window {text}: expected L,R, integers of at least 0 or nothing for no limit"
        )
    left, right = (int(side) if side.strip() else None for side in sides)
    return left, right


def _budget(sram: int | None, sram_kb: float | None, default_bytes: int) -> Budget:
    """The chip's budget as `attention` takes it."""
    if sram is not None and sram_kb is not None:
        raise ValueError(f"--sram-kb {sram_kb:g}: expected none, as --sram {sram} gives the SRAM")
    for option, value in (("sram", sram), ("sram-kb", sram_kb)):
        if value is not None and not 0 < value <= LARGEST_SRAM:
            raise ValueError(f"--{option} {value}: expected a positive number, 2^60 at most")
    if sram is not None:
        return {"sram": sram}
    return {"sram_bytes": default_bytes if sram_kb is None else int(sram_kb * 1024)}
