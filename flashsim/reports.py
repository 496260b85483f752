"""What each command says: the table's cells, the lines above and below it, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from . import __version__
from .cost.bounds import BOUNDS
from .cost.devices import Device
from .cost.io import DTYPES
from .cost.sweep import (
    BASE,
    FITTED,
    GRIDS,
    PUBLISHED_DENSE_MS,
    SPARSE,
    TOLERANCE,
    Line,
    Series,
)
from .inputs import Inputs
from .tables import BAD, Report, count, kb, seconds
from .verify import Budget, Record, errors, label, name_of

Cells = dict[str, str]


def run_report(
    inputs: Inputs,
    records: list[Record],
    budget: Budget,
    gpu: Device,
    what: dict[str, Any],
    layout: str | None = None,
) -> Report:
    """The report of `flashsim run`; layout is the name of that in `what`."""
    shapes = {name: list(getattr(inputs, name).shape) for name in "qkv"}
    expected = [
        r["expected_output_error"] for r in records if r.get("expected_output_error") is not None
    ]
    backward = any(r["pass"] == "backward" for r in records)
    coarse = any(r.get("approximation_error") is not None for r in records)
    verdict = (
        f"Every check held: {'output, lse and gradients' if backward else 'output and lse'} within "
        "the float64 bound, every count as in the closed form"
    )
    if expected:
        verdict += f", expected output within {max(expected):.1e}"
    options = {**what, "layout": layout}
    options.pop("block_mask", None)
    heading = [*_input_lines(inputs, shapes), _chip_line(budget, inputs.q.itemsize)]
    if layout is not None:
        blocks = records[0]["Br"], records[0]["Bc"]
        heading.append(_layout_line(layout, what["block_mask"], blocks))
    return Report(
        about={
            **_about("run", budget, gpu),
            "input": {"origin": inputs.origin, **shapes, "dtype": inputs.q.dtype.name},
            "options": options,
        },
        heading=heading,
        tables=_pass_tables(records, lambda record: _run_cells(record, budget, gpu, coarse)),
        records=records,
        remarks=[
            "error / bound: largest error of the output, and of the lse, against float64, in units "
            "of the bound computed for it" + ("; backward, of dq, dk and dv." if backward else "."),
            *([OFF_EXACT] if coarse else []),
            *_parts(records),
            *(
                f"{label(r)}: {r['rescales']} rescalings, of a row after its first tile."
                for r in records
                if r.get("rescales") is not None
            ),
            *_remarks(records, gpu),
        ],
        failures=[f"{pass_label(r)}: {failure}" for r in records for failure in r["failures"]],
        verdict=verdict + ".",
    )


def _parts(records: list[Record]) -> list[str]:
    """Into how many parts split-KV decoding cuts the keys, by a rule where no number is given."""
    return [
        f"{label(r)}: the keys in {r['splits']} part{'s' * (r['splits'] > 1)}."
        for r in records
        if r["algorithm"] == "split_kv" and r["pass"] == "forward"
    ]


OFF_EXACT = (
    "off exact: |output - exact| / |exact| of an approximation, over real tokens, beside attention "
    "over all keys; its error / bound is that against its own definition."
)


def _pass_tables(records: list[Record], cells: Callable[[Record], Cells]) -> list[list[Cells]]:
    """A table of the forward passes and one of the backward ones, named in their first heading."""
    found: dict[str, list[Cells]] = {}
    for record in records:
        found.setdefault(record["pass"], []).append(cells(record))
    if len(found) == 1:
        return list(found.values())
    return [
        [{name if key == "algorithm" else key: cell for key, cell in row.items()} for row in rows]
        for name, rows in found.items()
    ]


def pass_label(record: Record) -> str:
    return label(record) + (", backward" if record["pass"] == "backward" else "")


def _layout_line(name: str, keep: Any, blocks: tuple[int, int]) -> str:
    return (
        f"Layout: {name}, {keep.sum()} of {keep.size} blocks of {blocks[0]} x {blocks[1]} scores "
        f"({keep.mean():.1%})"
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


def _run_cells(record: Record, budget: Budget, gpu: Device, approximations: bool) -> Cells:
    ratios = list(errors(record).values())
    shown = ratios if record["pass"] == "forward" else [max(ratios)]
    off = record.get("approximation_error")
    approximation = {"off\nexact": "-" if off is None else f"{off:.1%}"} if approximations else {}
    return {
        "algorithm": label(record),
        "tiles\nBr x Bc": f"{record['Br']} x {record['Bc']}",
        "error\n/ bound": ("" if max(ratios) <= 1 else BAD + " ")
        + ", ".join(f"{ratio:.2f}" for ratio in shown),
        **approximation,
        **_moved_cells(record),
        "SRAM\npeak": _sram(record, budget),
        **_hbm_cells(record),
        f"time on\n{gpu.key}": seconds(record["memory_seconds"]),
        "count =\nformula": BAD if record["differs_from_formula"] else "yes",
    }


def _hbm_cells(record: Record) -> Cells:
    if "kept_elements" in record:
        return {"kept": count(record["kept_elements"])}
    return {"extra\nHBM": count(record["extra_hbm_elements"])}


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3g}"


def _need(record: Record, budget: Budget) -> tuple[int, float, str]:
    """SRAM that is needed at once, the budget, and the unit of both."""
    if "sram" in budget:
        return record["sram_elements"], budget["sram"], "elements"
    return record["sram_bytes"], budget["sram_bytes"], "bytes"


def _share(record: Record, budget: Budget) -> str:
    need, limit, _ = _need(record, budget)
    return f"{BAD + ', ' if need > limit else ''}{need / limit:.0%}"


def _sram(record: Record, budget: Budget) -> str:
    need, limit, unit = _need(record, budget)
    if need > limit:
        return _share(record, budget)
    return f"{kb(need) if unit == 'bytes' else count(need)} {_share(record, budget)}"


def _remarks(records: list[Record], gpu: Device) -> list[str]:
    remarks = [
        "Reads, writes and extra HBM are in elements; SRAM: most at once, and its share of the "
        "budget. Time: those bytes at the "
        f"{gpu.hbm_bytes_per_second / 1e9:g} GB/s of an {gpu.name}, nothing else, and no L2."
    ]
    if any("kept_elements" in r for r in records):
        remarks.append(
            "kept: elements that the forward pass leaves in HBM for the backward one, beyond Q, K, "
            "V and O."
        )
    worse = [
        f"{pass_label(r)} moves {r['ratio_to_standard']:.3g} times as much"
        for r in records
        if (r["ratio_to_standard"] or 0) > 1
    ]
    if worse:
        remarks.append(f"Standard attention wins here: {'; '.join(worse)}.")
    return remarks


def io_report(
    problem: dict[str, Any],
    records: list[Record],
    budget: Budget,
    gpu: Device,
    rule: str | None,
    layout: str | None = None,
    block_mask: Any = None,
) -> Report:
    """The report of `flashsim io`; rule is None where the tiles were given."""
    remarks = [*_parts(records), *_remarks(records, gpu), *_bound_remarks(records)]
    over = []
    for record in records:
        need, limit, unit = _need(record, budget)
        if need > limit:
            over.append(
                f"{pass_label(record)} needs {need} {unit}, {need - limit:g} more than there are"
            )
    if over:
        remarks.append(f"Does not fit with every tile resident: {'; '.join(over)}.")
    heading = [_problem_line(problem), _chip_line(budget, DTYPES[problem["dtype"]].itemsize)]
    if layout is not None:
        heading.append(_layout_line(layout, block_mask, (records[0]["Br"], records[0]["Bc"])))
    return Report(
        about={
            **_about("io", budget, gpu),
            "problem": {**problem, "layout": layout},
            "rule": rule,
        },
        heading=heading,
        tables=_pass_tables(records, lambda record: _io_cells(record, budget, gpu)),
        records=records,
        remarks=remarks,
    )


def _bound_remarks(records: list[Record]) -> list[str]:
    """Which bounds the traffic of each pass is divided by; tiles that do not fit have their own."""
    used: dict[tuple[str, str], set[int]] = {}
    for r in records:
        used.setdefault((r["pass"], r["bound"]), set()).add(r["bound_elements"])
    formulas = {(b.name, b.backward): b.formula for b in BOUNDS}
    lines = [
        f"over bound, {which}: over what nothing moves less than on this chip, "
        f"{' to '.join(count(x) for x in sorted({min(least), max(least)}))} elements. {name}: "
        f"{formulas[name, which == 'backward']}."
        for (which, name), least in used.items()
    ]
    return [*lines, "Where the bounds come from, and hold: docs/cost.md."] if lines else []


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
        "over\nbound": _ratio(record["ratio_to_bound"]),
        "FLOPs": count(record["flops"]),
        "exps": count(record["exps"]),
        "FLOPs\n/ byte": "-" if intensity is None else f"{intensity:.3g}",
        "SRAM\nneed": _share(record, budget),
        **_hbm_cells(record),
        f"time on\n{gpu.key}": seconds(record["memory_seconds"]),
    }


def sweep_report(all_series: Sequence[Series], lines: Sequence[Line]) -> Report:
    """The report of `flashsim sweep`: a table for each of N, d and M, by pass; then of layouts."""
    tables, heading, remarks, verdict = [], [], [], []
    if all_series:
        heading += [
            "HBM traffic in elements (one head), with the tiles of the FlashAttention paper: "
            "Bc = M/4d, Br = min(Bc, d), roles swapped for flash2's forward pass.",
            f"Base: {', '.join(f'{name} = {size}' for name, size in BASE.items())}, M in elements; "
            "one of the three varies in each table.",
        ]
        tables += [
            _sweep_rows(axis, mine)
            for part in ("forward", "backward")
            for axis in GRIDS
            if (mine := [s for s in all_series if s.axis == axis and s.part == part])
        ]
        share = max(p.compulsory_share for s in all_series for p in s.points)
        remarks += [
            "* was also run, on a chip without a limit, as the paper's tiles do not fit in M once "
            "S, l and m are counted; it moved what the closed form says, array by array.",
            "Compulsory traffic (inputs and results once) is at most "
            f"{share:.1%} of any total here. "
            f"Exponents: least squares in log-log over the last {FITTED - 1} doublings.",
        ]
        verdict.append(
            "traffic grows as N^2 d^2 / M, standard attention's as N^2, each exponent within "
            f"{TOLERANCE:.0%}"
        )
    if lines:
        tables += [_density_rows(lines), _line_rows(lines)]
        remarks += _density_remarks(lines)
        verdict.append("block-sparse traffic is linear in the share of blocks kept")
    runs = {
        (s.part, s.algorithm, s.convention, p)
        for s in all_series
        for p in s.points
        if p.executed_elements is not None
    }
    ran = len(runs) + sum(len(line.values) for line in lines if line.what == "forward")
    return Report(
        about={"command": "sweep", "flashsim": __version__},
        heading=heading,
        tables=tables,
        records=[*_series_records(all_series), *_line_records(lines)],
        remarks=remarks,
        failures=[
            f"{name_of(s.algorithm, s.convention, s.part == 'backward')}"
            f"{', backward,' if s.part == 'backward' else ''} over {s.axis}: {failure}"
            for s in all_series
            for failure in s.failures
        ]
        + [f"block-sparse, {line.what}: {failure}" for line in lines for failure in line.failures],
        verdict=f"Verified: {'; '.join(verdict)}; {ran} runs moved what the closed form says.",
    )


def _series_records(all_series: Sequence[Series]) -> list[Record]:
    return [
        {
            "part": s.part, "algorithm": s.algorithm, "convention": s.convention, "axis": s.axis,
            **asdict(p), "compulsory_share": p.compulsory_share, "constant": p.constant,
            "exponent": s.exponent, "expected_exponent": s.expected,
        }
        for s in all_series
        for p in s.points
    ]  # fmt: skip


def _sweep_rows(axis: str, all_series: Sequence[Series]) -> list[Cells]:
    """Traffic at each grid point, an algorithm a column; then the fitted and expected exponents."""
    part = all_series[0].part
    names = [
        name_of(s.algorithm, s.convention, part == "backward")
        .replace(":", ":\n")
        .replace("two-", "\ntwo-")
        for s in all_series
    ]
    rows = [
        {part: f"{axis} = {GRIDS[axis][n]}"}
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
    return [*rows, {part: "exponent", **fitted}, {part: "expected", **expected}]


def _line_records(lines: Sequence[Line]) -> list[Record]:
    records = []
    for line in lines:
        fit = {"slope": line.fit[0], "intercept": line.fit[1], "r_squared": line.r_squared}
        for name, x in zip(("slope", "intercept"), line.expected or (), strict=False):
            fit[f"expected_{name}"] = x
        records += [
            {"part": "sparse", "line": line.what, "density": density, line.unit: value, **fit}
            for density, value in zip(line.densities, line.values, strict=True)
        ]
    return records


def _density_rows(lines: Sequence[Line]) -> list[Cells]:
    """Traffic and published time at each density, and both as shares of the dense."""
    forward, both, published = lines
    whole = {line.what: sum(line.expected or ()) for line in (forward, both)}

    def cells(name: str, one: float, two: float, ms: float) -> Cells:
        return {
            "sparse": name,
            "forward": count(one),
            "forward +\nbackward": count(two),
            "moved /\ndense": f"{two / whole[both.what]:.2f}",
            "published\nms": f"{ms}",
            "time /\ndense": f"{ms / PUBLISHED_DENSE_MS:.2f}",
        }

    each = zip(both.densities, forward.values, both.values, published.values, strict=True)
    return [
        *(cells(f"s = {density:g}", one, two, ms) for density, one, two, ms in each),
        cells("dense", whole[forward.what], whole[both.what], PUBLISHED_DENSE_MS),
    ]


def _line_rows(lines: Sequence[Line]) -> list[Cells]:
    """The fitted lines, and what the closed form says of each."""
    return [
        {
            "line over s": line.what,
            "slope": (BAD + " " if line.failures else "") + _measured(line.fit[0], line.unit),
            "intercept": _measured(line.fit[1], line.unit),
            "R^2": f"{line.r_squared:.6f}",
        }
        | {
            f"{name}\nformula": _measured(x, line.unit) if line.expected else "-"
            for name, x in zip(("slope", "intercept"), line.expected or (0, 0), strict=True)
        }
        for line in lines
    ]


def _measured(x: float, unit: str) -> str:
    return count(round(x)) if unit == "elements" else f"{x:.4g} {unit}"


def _density_remarks(lines: Sequence[Line]) -> list[str]:
    forward, both, published = lines
    sizes = ", ".join(f"{name} = {size}" for name, size in SPARSE.items())
    return [
        f"sparse: block-sparse FlashAttention without the initial writes, {sizes} (blocks and "
        "tiles B x B), random blocks, but the diagonal always; s: the share that is kept. Every "
        "point was run. "
        f"Forward: {forward.formula}; forward and backward: {both.formula}; Tc = N/B. With the "
        "paper's Tc = 4Nd/M the forward's is N d + 12 s N^2 d^2 / M.",
        "published: forward and backward at N = 4096, Dao et al. 2022 (arXiv:2205.14135), Fig. 2 "
        f"right. Its own line gives {published.at(1):.1f} ms at s = 1; dense FlashAttention takes "
        f"{PUBLISHED_DENSE_MS} ms.",
    ]


def layouts_report(
    inputs: Inputs, records: list[Record], missing: list[str], what: dict[str, Any]
) -> Report:
    """The report of `flashsim layouts`; missing says why there is no record of some layout."""
    shapes = {name: list(getattr(inputs, name).shape) for name in "qkv"}
    heading = _input_lines(inputs, shapes)
    if records:
        first = records[0]
        heading.append(
            f"Blocks: {first['Br']} x {first['Bc']} scores, {first['block_rows']} x "
            f"{first['block_columns']} of them. Dense FlashAttention with these tiles moves "
            f"{count(first['dense_elements'])} elements"
        )
    return Report(
        about={
            "command": "layouts",
            "flashsim": __version__,
            "input": {"origin": inputs.origin, **shapes, "dtype": inputs.q.dtype.name},
            "options": what,
        },
        heading=heading,
        tables=[[_layout_cells(record) for record in records]] if records else [],
        records=records,
        remarks=[
            *(f"Left out: {why}" for why in missing),
            "weight dropped: share of a query's dense attention weight that lies in blocks that "
            "are not kept, over all heads and real queries. moved: elements that the forward pass "
            "reads and writes, counted in a run. Random blocks (but the diagonal always) show what "
            "a pattern must beat at the same share of blocks.",
        ],
        failures=[f"{r['layout']}: {failure}" for r in records for failure in r["failures"]],
        verdict="Every run moved what its closed form says." if records else "",
    )


def _layout_cells(record: Record) -> Cells:
    ratio = record["ratio_to_dense"]
    return {
        "layout": record["layout"],
        "blocks\nkept": f"{record['density']:.1%}",
        "weight dropped,\nmean": f"{record['dropped_weight_mean']:.2%}",
        "weight dropped,\nworst row": f"{record['dropped_weight_worst']:.2%}",
        "moved": count(record["total_elements"]),
        "moved /\ndense": "-" if ratio is None else f"{ratio:.3f}",
    }


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
    "sram_bytes_per_clock": "SRAM\nB/clock/SM",
    "register_bytes_per_sm": "registers\nKB/SM",
    "l2_bytes": "L2\nMB",
}
UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12, "T/s": 1e12, "GHz": 1e9, "MB": 2**20}
BRIEF = (
    "compute_capability", "boost_clock_hz", "sram_bytes_per_sm", "sram_bytes_per_clock",
    "register_bytes_per_sm",
)  # fmt: skip


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
