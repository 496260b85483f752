"""What `flashsim bench` and `flashsim compare` say."""

from __future__ import annotations

from typing import Any

from .. import __version__
from ..tables import Report, count, seconds
from .compare import (
    BUSY,
    DRAM_TOLERANCE,
    READ_TOLERANCE,
    TIME_TOLERANCE,
    WRITE_TOLERANCE,
    Comparison,
)

Cells = dict[str, str]


def _header_lines(data: dict[str, Any]) -> list[str]:
    h, c = data["header"], data["ceilings"]
    return [
        f"GPU:      {h['gpu']}, driver {h['driver']}, numba {h['numba']}, numba-cuda "
        f"{h['numba-cuda']}, {h['date']}",
        f"Ceilings: copy {c['copy_bytes_per_second'] / 1e12:.2f} TB/s read and written, float32 "
        f"{c['float32_flops_per_second'] / 1e12:.1f} TFLOP/s",
        f"Times:    the L2 {h['l2']}",
    ]


def bench_report(data: dict[str, Any]) -> Report:
    """The report of `flashsim bench`."""
    rows: list[Cells] = []
    for r in data["rows"]:
        alone = r["step"] in ("peer", r["algorithm"])
        cells = {"kernel": r["algorithm"] if alone else f"{r['algorithm']},\n{r['step']}"}
        cells["shape"] = ",".join(map(str, r["shape"]))
        tiles = r.get("tiles")
        cells["tiles"] = f"{tiles[0]} x {tiles[1]}" if tiles else "-"
        cells["loads\nonly"] = "yes" if r.get("loads_only") else "-"
        cells["median"] = seconds(r["ms"] / 1e3)
        cells["middle half"] = f"{seconds(r['ms_low'] / 1e3)} to {seconds(r['ms_high'] / 1e3)}"
        for name, key in (
            ("into\nSMs (B)", "sm_read_bytes"),
            ("out of\nSMs (B)", "sm_written_bytes"),
            ("DRAM\nread (B)", "dram_read_bytes"),
        ):
            if any(key in row for row in data["rows"]):
                cells[name] = count(r.get(key))
        rows.append(cells)
    return Report(
        about={"command": "bench", "flashsim": __version__, **_without_rows(data)},
        heading=_header_lines(data),
        tables=[rows],
        records=[_flat(r) for r in data["rows"]],
    )


def _flat(r: dict[str, Any]) -> dict[str, Any]:
    """A row without lists."""
    batch, heads, N, d = r["shape"]
    lists = ("algorithm", "shape", "tiles", "under_way")
    rest = {name: x for name, x in r.items() if name not in lists}
    sizes = {"batch": batch, "heads": heads, "N": N, "d": d}
    if "tiles" in r:
        sizes |= {"Br": r["tiles"][0], "Bc": r["tiles"][1]}
        rest |= {"loads_under_way": r["under_way"][0], "load_bytes": r["under_way"][1]}
    return {"algorithm": r["algorithm"], **sizes, **rest}


def _without_rows(data: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in data.items() if name != "rows"}


def compare_report(found: Comparison, source: str) -> Report:
    """The report of `flashsim compare`."""
    tables: list[list[Cells]] = []
    for shape in dict.fromkeys(tuple(r["shape"]) for r in found.records):
        records = [r for r in found.records if tuple(r["shape"]) == shape]
        name = ",".join(map(str, shape))
        tables.append([_bytes_cells(f"{name}: bytes", r) for r in records])
        peers = [r for r in found.peers if tuple(r["shape"]) == shape]
        tables.append(
            [_time_cells(f"{name}: time", r) for r in records]
            + [_peer_cells(f"{name}: time", r) for r in peers]
        )
    if found.series:
        tables.append([_series_cells(s) for s in found.series])
    bound = [r for r in found.records if r["bytes_bind"]]
    near = sum(abs(r["ms_ratio"] - 1) <= TIME_TOLERANCE for r in bound)
    remarks = [
        "m/m: measured / model. Bytes read into the multiprocessors, written by them, and read "
        "from the DRAM; the model is io_cost, for the DRAM behind an L2 (`flashsim l2`).",
        "Model of the time: an empty launch, and the longest of bytes at the rates of bare loops "
        "with as many blocks and threads, which move what the kernel does in a turn (L2; DRAM), "
        "and multiply-adds at the measured peak of as many threads (FMA).",
        "busiest: the unit nearest its peak, by the counters. because: what takes the time that "
        "the model lacks; 'instructions' that address, and read shared memory, fill the issue "
        f"slots; 'waits': no unit is {BUSY} % busy, so latency and barriers bind.",
        f"Bytes bind {len(bound)} launches: in the model, and the loads alone, where they were "
        f"timed, take at least half the time. {near} of them take the model's time within "
        f"{TIME_TOLERANCE:.0%}.",
    ]
    counted = [r for r in found.records if "dram_read_ratio" in r]
    if counted:
        worst = max(counted, key=lambda r: abs(r["dram_read_ratio"] - 1))
        near = sum(abs(r["dram_read_ratio"] - 1) <= DRAM_TOLERANCE for r in counted)
        remarks.append(
            f"DRAM reads are within {DRAM_TOLERANCE:.0%} of the model for {near} of {len(counted)} "
            f"launches; furthest: {worst['label']}, {','.join(map(str, worst['shape']))}, "
            f"{worst['dram_read_ratio']:.3f}."
        )
    for s in found.series:
        start = s.arithmetic_from
        says = f"from {s.side} = {start} on" if start is not None else "at none of these tiles"
        remarks.append(
            f"{s.algorithm} {','.join(map(str, s.shape))}: arithmetic takes longer than the loads "
            f"{says}."
        )
    if note := found.data["header"].get("note"):
        remarks.append(f"Note: {note}")
    return Report(
        about={
            "command": "compare", "flashsim": __version__, "source": source,
            **_without_rows(found.data),
            "series": [
                {
                    "algorithm": s.algorithm, "shape": list(s.shape), "side": s.side,
                    "sizes": s.sizes, "rank_correlation": s.rank_correlation,
                    "arithmetic_from": s.arithmetic_from,
                }
                for s in found.series
            ],
        },
        heading=[f"Data set: {source}", *_header_lines(found.data)],
        tables=tables,
        records=[_flat(r) for r in found.records + found.peers],
        remarks=remarks,
        failures=found.failures,
        verdict=f"Every check held: bytes read within {READ_TOLERANCE:.0%} of the model, written "
        f"within {WRITE_TOLERANCE:.0%}, read from the DRAM within {DRAM_TOLERANCE:.0%}, time of "
        "the loads alone in the order of the bytes.",
    )  # fmt: skip


def _bytes_cells(name: str, r: dict[str, Any]) -> Cells:
    cells = {name: r["label"]}
    for what, key in (("read", "sm_read"), ("written", "sm_written"), ("DRAM", "dram_read")):
        cells[f"{what}\nmodel"] = count(r[f"model_{key}_bytes"])
        cells[f"{what}\nm/m"] = _ratio(r.get(f"{key}_ratio"), 4)
    return cells


def _time_cells(name: str, r: dict[str, Any]) -> Cells:
    return {
        name: r["label"],
        "model": seconds(r["model_ms"] / 1e3),
        "binds in\nthe model": r["model_binds"],
        "measured": seconds(r["ms"] / 1e3),
        "m/m": _ratio(r["ms_ratio"], 2),
        "busiest": r["busiest"],
        "because": r["because"],
    }


def _peer_cells(name: str, r: dict[str, Any]) -> Cells:
    dashes = dict.fromkeys(("model", "binds in\nthe model"), "-")
    time = {"measured": seconds(r["ms"] / 1e3)}
    return {name: r["algorithm"], **dashes, **time, "m/m": "-", "busiest": "-", "because": "-"}


def _series_cells(s: Any) -> Cells:
    ranked = s.rank_correlation
    return {
        "loads only, over tiles": f"{s.algorithm} {','.join(map(str, s.shape))}",
        "tiles": f"{s.side} {', '.join(map(str, s.sizes))}",
        "bytes span": f"{max(s.bytes) / min(s.bytes):.1f} x",
        "time spans": f"{max(s.loads_ms) / min(s.loads_ms):.1f} x",
        "rank\ncorrelation": f"{ranked:.2f}",
        "full / loads, smallest\nto largest tile": ", ".join(
            f"{full / loads:.2f}" if full is not None else "-"
            for full, loads in zip(s.full_ms, s.loads_ms, strict=True)
        ),
    }


def _ratio(x: float | None, digits: int) -> str:
    return "-" if x is None else f"{x:.{digits}f}"
