"""What each command says: the table's cells, the lines above and below it, the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from . import __version__
from .cost.devices import Device
from .cost.io import DTYPES
from .cost.sweep import BASE, FITTED, GRIDS, TOLERANCE, Series
from .inputs import Inputs
from .tables import BAD, Report, count, kb, seconds
from .verify import Budget, Record, label

Cells = dict[str, str]


def run_report(
    inputs: Inputs, records: list[Record], budget: Budget, gpu: Device, what: dict[str, Any]
) -> Report:
    """The report of `flashsim run`."""
    shapes = {name: list(getattr(inputs, name).shape) for name in "qkv"}
    expected = [
        r["expected_output_error"] for r in records if r["expected_output_error"] is not None
    ]
    verdict = (
        "Every check held: output and lse within the float64 bound, every count as in the closed "
        "form"
    )
    if expected:
        verdict += f", expected output within {max(expected):.1e}"
    return Report(
        about={
            **_about("run", budget, gpu),
            "input": {"origin": inputs.origin, **shapes, "dtype": inputs.q.dtype.name},
            "options": what,
        },
        heading=[*_input_lines(inputs, shapes), _chip_line(budget, inputs.q.itemsize)],
        tables=[[_run_cells(record, budget, gpu) for record in records]],
        records=records,
        remarks=[
            "error / bound: largest error of the output, and of the lse, against float64, in units "
            "of the bound computed for it.",
            *_remarks(records, gpu),
        ],
        failures=[f"{label(r)}: {failure}" for r in records for failure in r["failures"]],
        verdict=verdict + ".",
    )


def _about(command: str, budget: Budget, gpu: Device) -> dict[str, Any]:
    bandwidth = gpu.hbm_bytes_per_second
    return {
        "command": command,
        "flashsim": __version__,
        **budget,
        "device": {"key": gpu.key, "name": gpu.name, "hbm_bytes_per_second": bandwidth},
    }


def _input_lines(inputs: Inputs, shapes: dict[str, list[int]]) -> list[str]:
    if shapes["q"] == shapes["k"] == shapes["v"]:
        line = f"q, k, v {_shape(shapes['q'])}"
    else:
        line = ", ".join(f"{name} {_shape(shape)}" for name, shape in shapes.items())
    line += f", {inputs.q.dtype.name}"
    if inputs.attn_mask is not None:
        line += f"; mask {_shape(inputs.attn_mask.shape)}, {inputs.attn_mask.dtype.name}"
    if inputs.key_padding_mask is not None:
        real = inputs.key_padding_mask.sum(axis=-1).ravel().tolist()
        several = len(real) > 4
        real = f"{sum(real)}" if several else " and ".join(map(str, real))
        line += (
            f"; real keys: {real} of {inputs.key_padding_mask.size if several else shapes['k'][-2]}"
        )
    return [f"Input: {inputs.origin}", f"       {line}"]


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def _chip_line(budget: Budget, itemsize: int) -> str:
    if "sram" in budget:
        size = budget["sram"] * itemsize
        return f"SRAM:  {budget['sram']} elements, each number counting one ({kb(size)} as stored)"
    size = budget["sram_bytes"]
    return f"SRAM:  {kb(size)} = {size / itemsize:g} elements of {itemsize} bytes"


def _moved_cells(record: Record) -> Cells:
    return {
        "reads": count(record["read_elements"]),
        "writes": count(record["written_elements"]),
        "ratio to\nstandard": _ratio(record["ratio_to_standard"]),
    }


def _run_cells(record: Record, budget: Budget, gpu: Device) -> Cells:
    errors = (record["output_error_over_bound"], record["lse_error_over_bound"])
    return {
        "algorithm": label(record),
        "tiles\nBr x Bc": f"{record['Br']} x {record['Bc']}",
        "error\n/ bound": ("" if max(errors) <= 1 else BAD + " ")
        + ", ".join(f"{error:.2f}" for error in errors),
        **_moved_cells(record),
        "SRAM\npeak": _sram(record, budget),
        "extra\nHBM": count(record["extra_hbm_elements"]),
        f"time on\n{gpu.key}": seconds(record["memory_seconds"]),
        "count =\nformula": BAD if record["differs_from_formula"] else "yes",
    }


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3g}"


def _need(record: Record, budget: Budget) -> tuple[int, float, str]:
    """SRAM that is needed at once, the budget, and the unit of both."""
    if "sram" in budget:
        return record["sram_elements"], budget["sram"], "elements"
    return record["sram_bytes"], budget["sram_bytes"], "bytes"


def _sram(record: Record, budget: Budget) -> str:
    need, limit, unit = _need(record, budget)
    if need > limit:
        return f"{BAD}, {need / limit:.0%}"
    return f"{kb(need) if unit == 'bytes' else count(need)} {need / limit:.0%}"


def _remarks(records: list[Record], gpu: Device) -> list[str]:
    remarks = [
        "Reads, writes and extra HBM are in elements; SRAM: most at once, and its share of the "
        "budget. Time: those bytes at the "
        f"{gpu.hbm_bytes_per_second / 1e9:g} GB/s of an {gpu.name}, nothing else: a lower bound."
    ]
    worse = [
        f"{label(r)} moves {r['ratio_to_standard']:.3g} times as much"
        for r in records
        if (r["ratio_to_standard"] or 0) > 1
    ]
    if worse:
        remarks.append(f"Standard attention wins here: {', '.join(worse)}.")
    return remarks


def io_report(
    problem: dict[str, Any], records: list[Record], budget: Budget, gpu: Device, rule: str | None
) -> Report:
    """The report of `flashsim io`; rule is None where the tiles were given."""
    remarks = _remarks(records, gpu)
    over = []
    for record in records:
        need, limit, unit = _need(record, budget)
        if need > limit:
            over.append(
                f"{label(record)} needs {need} {unit}, {need - limit:g} more than there are"
            )
    if over:
        remarks.append(f"Does not fit with every tile resident: {'; '.join(over)}.")
    return Report(
        about={**_about("io", budget, gpu), "problem": problem, "rule": rule},
        heading=[_problem_line(problem), _chip_line(budget, DTYPES[problem["dtype"]].itemsize)],
        tables=[[_io_cells(record, budget, gpu) for record in records]],
        records=records,
        remarks=remarks,
    )


def _problem_line(problem: dict[str, Any]) -> str:
    sizes = {"N": problem["N"], "d": problem["d"]}
    sizes |= {"Nk": problem["Nk"]} if problem["Nk"] != problem["N"] else {}
    sizes |= {"dv": problem["dv"]} if problem["dv"] != problem["d"] else {}
    sizes |= {name: problem[name] for name in ("batch", "heads") if problem[name] != 1}
    line = ", ".join(f"{name} = {size}" for name, size in sizes.items()) + f", {problem['dtype']}"
    line += ", causal" if problem["is_causal"] else ""
    if problem["window"]:
        left, right = ("any" if side is None else side for side in problem["window"])
        line += f", window {left} left, {right} right"
    return f"Closed form, nothing is run: {line}"


def _io_cells(record: Record, budget: Budget, gpu: Device) -> Cells:
    intensity = record["flops_per_byte"]
    return {
        "algorithm": label(record),
        "tiles\nBr x Bc": f"{record['Br']} x {record['Bc']}",
        **_moved_cells(record),
        "FLOPs": count(record["flops"]),
        "exps": count(record["exps"]),
        "FLOPs\n/ byte": "-" if intensity is None else f"{intensity:.3g}",
        "SRAM\nneed": _sram(record, budget),
        "extra\nHBM": count(record["extra_hbm_elements"]),
        f"time on\n{gpu.key}": seconds(record["memory_seconds"]),
    }


def sweep_report(all_series: Sequence[Series]) -> Report:
    """The report of `flashsim sweep`: a table for each of N, d and M."""
    records = [
        {
            "algorithm": s.algorithm, "convention": s.convention, "axis": s.axis, **asdict(p),
            "compulsory_share": p.compulsory_share, "constant": p.constant,
            "exponent": s.exponent, "expected_exponent": s.expected,
        }
        for s in all_series
        for p in s.points
    ]  # fmt: skip
    share = max(record["compulsory_share"] for record in records)
    runs = {
        (s.algorithm, s.convention, p)
        for s in all_series
        for p in s.points
        if p.executed_elements is not None
    }
    return Report(
        about={"command": "sweep", "flashsim": __version__},
        heading=[
            "HBM traffic in elements (one head), with the tiles of the FlashAttention paper: "
            "Bc = M/4d, Br = min(Bc, d), roles swapped for flash2.",
            f"Base: {', '.join(f'{name} = {size}' for name, size in BASE.items())}, M in elements; "
            "one of the three varies in each table.",
        ],
        tables=[_sweep_rows(axis, [s for s in all_series if s.axis == axis]) for axis in GRIDS],
        records=records,
        remarks=[
            "* was also run, on a chip without a limit, as the paper's tiles do not fit in M once "
            "S, l and m are counted; it moved what the closed form says, array by array.",
            f"Compulsory traffic (Q, K, V, O once) is at most {share:.1%} of any total here. "
            f"Exponents: least squares in log-log over the last {FITTED - 1} doublings.",
        ],
        failures=[
            f"{label(asdict(s))} over {s.axis}: {failure}"
            for s in all_series
            for failure in s.failures
        ],
        verdict=(
            f"Verified: traffic grows as N^2 d^2 / M, standard attention's as N^2, each exponent "
            f"within {TOLERANCE:.0%}; {len(runs)} runs moved what the closed form says."
        ),
    )


def _sweep_rows(axis: str, all_series: Sequence[Series]) -> list[Cells]:
    """Traffic at each grid point, an algorithm a column; then the fitted and expected exponents."""
    names = [label(asdict(s)).replace(":", ":\n") for s in all_series]
    rows = [
        {"": f"{axis} = {GRIDS[axis][n]}"}
        | {
            name: count(p.total_elements) + ("  " if p.executed_elements is None else " *")
            for name, p in zip(names, points, strict=True)
        }
        for n, points in enumerate(zip(*(s.points for s in all_series), strict=True))
    ]
    fitted = {
        name: f"{BAD + ' ' if s.failures else ''}{s.exponent:.3f}  "
        for name, s in zip(names, all_series, strict=True)
    }
    expected = {name: f"{s.expected:g}  " for name, s in zip(names, all_series, strict=True)}
    return [*rows, {"": "exponent", **fitted}, {"": "expected", **expected}]


FIGURES = {
    "compute_capability": "compute\ncapability",
    "hbm_bytes_per_second": "HBM\nGB/s",
    "half_flops_per_second": "fp16\nTFLOP/s",
    "fp8_flops_per_second": "fp8\nTFLOP/s",
    "fp32_flops_per_second": "fp32\nTFLOP/s",
    "exp_per_second": "exp\nT/s",
    "sm_count": "SMs",
    "boost_clock_hz": "boost\nGHz",
    "sram_bytes_per_block": "SRAM\nKB/block",
    "sram_bytes_per_sm": "SRAM\nKB/SM",
    "register_bytes_per_sm": "registers\nKB/SM",
    "l2_bytes": "L2\nMB",
}
UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12, "T/s": 1e12, "GHz": 1e9, "MB": 2**20}
BRIEF = ("compute_capability", "boost_clock_hz", "sram_bytes_per_sm", "register_bytes_per_sm")


def _figure(gpu: Device, name: str) -> str:
    value, unit = getattr(gpu, name), FIGURES[name].split("\n")[-1]
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value / UNITS.get(unit, 1024 if unit.startswith('KB') else 1):.4g}"


def devices_report(gpus: Sequence[Device]) -> Report:
    """The report of `flashsim devices`: a line a GPU, sources by number."""
    numbers = _numbered(source for gpu in gpus for source in gpu.sources.values())
    return Report(
        about={"command": "devices", "flashsim": __version__},
        heading=["Peak rates without sparsity; GB = 1e9 bytes, KB and MB on chip 1024 and 1024^2."],
        tables=[
            [
                {"device": gpu.key}
                | {
                    title: _figure(gpu, name)
                    for name, title in FIGURES.items()
                    if name not in BRIEF
                }
                | {"sources": _cited(numbers[source] for source in gpu.sources.values())}
                for gpu in gpus
            ]
        ],
        records=[_device_record(gpu) for gpu in gpus],
        remarks=[
            *(f"[{number}] {source}" for source, number in numbers.items()),
            "The source of each figure, and what is often copied wrong: flashsim devices NAME",
        ],
    )


def device_report(gpu: Device) -> Report:
    """The report of `flashsim devices NAME`: a line a figure, with its source."""
    numbers = _numbered(gpu.sources.values())
    return Report(
        about={"command": "devices", "flashsim": __version__},
        heading=[f"{gpu.name} ({gpu.key})"],
        tables=[
            [
                {
                    "figure": title.replace("\n", ", "),
                    "value": _figure(gpu, name),
                    "source": f"[{numbers[_sources(gpu)[name]]}]",
                }
                for name, title in FIGURES.items()
            ]
        ],
        records=[_device_record(gpu)],
        remarks=[
            *(f"[{number}] {source}" for source, number in numbers.items()),
            *([gpu.notes] if gpu.notes else []),
        ],
    )


def _sources(gpu: Device) -> dict[str, str]:
    """The source of each figure."""
    return {name: source for names, source in gpu.sources.items() for name in names.split(", ")}


def _device_record(gpu: Device) -> Record:
    return {**asdict(gpu), "sources": _sources(gpu)}


def _numbered(sources: Iterable[str]) -> dict[str, int]:
    return {source: n for n, source in enumerate(dict.fromkeys(sources), 1)}


def _cited(numbers: Iterable[int]) -> str:
    return " ".join(map(str, sorted(set(numbers))))
