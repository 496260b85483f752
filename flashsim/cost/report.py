"""What the cost models found, as reports: for each command the table, the records, the remarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..tables import BAD, Report, count, kb, seconds
from ..verify import label
from .devices import Device
from .grid import Grid
from .io import DTYPES
from .roofline import Cycles, Roofline
from .tiles import RULES, Choice

if TYPE_CHECKING:
    from .cache import DramCost
    from .waves import Schedule

SHOWN = 40  # points of a grid in the table


def grid_report(points: Grid, given: dict[str, Any]) -> Report:
    """The report of `flashsim sweep` over a grid; given is what was asked."""
    records = points.records()
    fixed = [
        f"{name} = {taken[0]}"
        for name, taken in points.axes.items()
        if len(taken) == 1 and name not in ("algorithm", "Br", "Bc")
    ]
    if "M" not in points.axes:
        fixed.append("SRAM as a block of the GPU may use")
    shown = ["algorithm", *(name for name in points.varying if name in ("N", "d", "M", "device"))]
    remarks = [
        "Elements of one head, read and written. / bound: over what any algorithm must move with "
        "as much on chip. Time: of the busiest of memory, matrix units and exponentials; a lower "
        "bound.",
    ]
    if len(records) > SHOWN:
        remarks.insert(
            0, f"The first {SHOWN} of {len(records)} points: --csv, --json, --parquet have all."
        )
    unfit = sum(not record["fits"] for record in records)
    if unfit:
        remarks.append(
            f"{BAD}: does not fit on the chip with every tile resident; {unfit} of {len(records)}."
        )
    return Report(
        about={"command": "sweep", "flashsim": __version__, "grid": given},
        heading=[
            f"Closed forms of {len(records)} points, "
            f"{'backward' if given.get('backward') else 'forward'}; {', '.join(fixed)}"
        ],
        tables=[[_grid_cells(record, shown) for record in records[:SHOWN]]],
        records=records,
        remarks=remarks,
    )


def _grid_cells(record: dict[str, Any], shown: list[str]) -> dict[str, str]:
    cells = {name: str(record[name]) for name in shown}
    if record["Br"] is None:
        return {**cells, "Br x Bc": BAD, "moved": "-", "/ bound": "-", "time": "-"}
    return {
        **cells,
        "Br x Bc": ("" if record["fits"] else BAD + " ") + f"{record['Br']} x {record['Bc']}",
        "moved": count(record["total_elements"]),
        "/ bound": f"{record['total_elements'] / record['lower_bound_elements']:.3g}",
        "time": seconds(record["lower_seconds"]),
    }


def tiles_report(
    found: Sequence[Choice], overflows: dict[str, dict[int, int]], given: dict[str, Any]
) -> Report:
    """The report of `flashsim tiles`: rules by algorithm and pass, and where the paper's is over.

    overflows: of each device, by width d, the elements by which the paper's tiles exceed M; given:
    N, d, dv, M, and what M is.
    """
    M = given["M"]
    fewest = {(c.algorithms, c.backward): c.moved_elements for c in found if c.rule == "optimal"}
    records = [
        {
            **asdict(choice),
            "algorithms": list(choice.algorithms),
            "fits": choice.need_elements <= M,
            "over_elements": choice.need_elements - M,
            "ratio_to_optimal": _over(
                choice.moved_elements, fewest.get((choice.algorithms, choice.backward))
            ),
        }
        for choice in found
    ]
    sizes = ", ".join(f"{name} = {given[name]}" for name in ("N", "d", "dv"))
    alike, unfit = [], []
    for names, back in dict.fromkeys((c.algorithms, c.backward) for c in found):
        which = "backward" if back else "forward"
        have = {c.rule for c in found if (c.algorithms, c.backward) == (names, back)}
        if len(names) > 1:
            alike.append(f"{', '.join(names[1:])} as {names[0]}, {which}")
        if missing := [rule for rule in RULES if rule not in have]:
            unfit.append(f"{names[0]}, {which}: {', '.join(missing)}")
    return Report(
        about={
            "command": "tiles", "flashsim": __version__, **given,
            "papers_overflow_elements": overflows,
        },
        heading=[
            f"Tiles of each rule, dense attention of one head: {sizes}",
            f"M = {M} elements, each number counting one: {given['chip']}",
        ],
        tables=[
            *(
                [_choice_cells(record, name) for record in records if record["backward"] == back]
                for name, back in (("forward", False), ("backward", True))
            ),
            [_overflow_cells(device, mine) for device, mine in overflows.items()],
        ],
        records=records,
        remarks=[
            "paper: Bc = M/4d, Br = min(Bc, d), roles swapped where the outer loop holds queries; "
            "strict: the largest of that shape that fit; optimal: fewest elements moved; hardware: "
            "fewest among multiples of 16.",
            "need: the fewest elements on chip that the tiles run with; fits: in M, or by how many "
            "it is over. moved: reads and writes of the optimal tiles, as printed; others: times "
            "as much. The softmax of standard attention takes as many rows as fit in M; need has "
            "one row or, where that is less, a tile.",
            f"The same tiles and counts: {'; '.join(alike)}.",
            *([f"No tile fits: {'; '.join(unfit)}."] if unfit else []),
            "paper's tiles on: by how many elements FlashAttention's exceed M, what a block of the "
            f"GPU may use, as {given['dtype']}; - where they fit. GPUs keep accumulators in "
            "float32: flashsim io counts bytes, and needs more.",
            "Left out: local attention and Linformer, whose traffic depends on more than N, d, M.",
        ],
    )  # fmt: skip


def _over(moved: int, fewest: int | None) -> float | None:
    return None if fewest is None else moved / fewest


def _choice_cells(record: dict[str, Any], which: str) -> dict[str, str]:
    over, ratio = record["over_elements"], record["ratio_to_optimal"]
    absolute = ratio is None or record["rule"] == "optimal"
    return {
        which: record["algorithms"][0],
        "rule": record["rule"],
        "Br x Bc": f"{record['Br']} x {record['Bc']}",
        "need": count(record["need_elements"]),
        "fits": "yes" if over <= 0 else f"{BAD}, +{over}",
        "moved": count(record["moved_elements"]) if absolute else f"{ratio:.3f} x",
    }


def _overflow_cells(device: str, overflows: dict[int, int]) -> dict[str, str]:
    return {"paper's tiles on": device} | {
        f"d = {d}": f"{BAD}, +{over}" if over > 0 else "-" for d, over in overflows.items()
    }


def timed(records: list[dict[str, Any]], gpu: Device, dtype: str) -> list[dict[str, Any]]:
    """Records of `flashsim io` with the times of `Roofline`: their own, and with a perfect L2."""
    found = []
    for record in records:
        own = Roofline(gpu, dtype, record["total_bytes"], record["flops"], record["exps"])
        least = record["compulsory_elements"] * DTYPES[dtype].itemsize
        found.append(
            {
                **record,
                "label": label(record),
                **{f"{name}_seconds": t for name, t in own.seconds.items()},
                "lower_seconds": own.lower_seconds,
                "binds": own.binds,
                "serial_seconds": own.serial_seconds,
                "compulsory_bytes": least,
                "perfect_l2_seconds": replace(own, hbm_bytes=least).lower_seconds,
            }
        )
    return found


def roofline_report(
    records: list[dict[str, Any]], cycles: dict[str, Cycles], gpu: Device, given: dict[str, Any]
) -> Report:
    """The report of `flashsim roofline`; cycles: by pass, of one tile of 128 x 128 scores."""
    sizes = ", ".join(f"{name} = {given[name]}" for name in ("batch", "heads", "N", "d"))
    rates = [
        f"memory {gpu.hbm_bytes_per_second / 1e9:g} GB/s",
        f"matmul {gpu.flops_per_second(given['dtype']) / 1e12:g} TFLOP/s",
        f"exp {gpu.exp_per_second / 1e12:.3g} T/s",
    ]
    return Report(
        about={
            "command": "roofline", "flashsim": __version__, "problem": given,
            "device": {"key": gpu.key, "name": gpu.name},
            "tile_cycles": {name: asdict(c) for name, c in cycles.items()},
        },
        heading=[
            f"Closed form, nothing is run: {sizes}, {given['dtype']}"
            + (", causal" if given["is_causal"] else ""),
            f"{gpu.name}: {', '.join(rates)}; tiles for {kb(gpu.sram_bytes_per_block)} a block",
        ],
        tables=[
            *(
                [_time_cells(r, name) for r in records if r["pass"] == name]
                for name in dict.fromkeys(r["pass"] for r in records)
            ),
            [_cycle_cells(name, c) for name, c in cycles.items()],
        ],
        records=records,
        remarks=[
            "memory, matmul, exp: each alone at its peak rate. lower: the longest of them, which "
            "binds; serial: their sum, no overlap.",
            "The memory time is without an L2. perfect L2: the lower time if HBM gave each input "
            "once and took the results; no run is faster.",
            "Cycles: one tile of 128 x 128 scores on one SM, 16-bit floats, each unit alone; SMEM: "
            "shared memory, modelled for Blackwell (FlashAttention-4, arXiv:2603.05451).",
            "Sources of the rates: flashsim devices " + gpu.key,
        ],
    )  # fmt: skip


def _time_cells(record: dict[str, Any], which: str) -> dict[str, str]:
    intensity = record["flops_per_byte"]
    return {
        which: record["label"],
        "Br x Bc": f"{record['Br']} x {record['Bc']}",
        "FLOPs\n/ byte": "-" if intensity is None else f"{intensity:.3g}",
        **{name: seconds(record[f"{name}_seconds"]) for name in ("memory", "matmul", "exp")},
        "lower": seconds(record["lower_seconds"]),
        "binds": record["binds"],
        "serial": seconds(record["serial_seconds"]),
        "perfect\nL2": seconds(record["perfect_l2_seconds"]),
    }


def _cycle_cells(which: str, cycles: Cycles) -> dict[str, str]:
    return {
        "cycles of a tile": which,
        "matmul": f"{cycles.matmul:g}",
        "exp": f"{cycles.exp:g}",
        "SMEM": "-" if cycles.sram is None else f"{cycles.sram:g}",
        "exp / matmul": f"{cycles.exp / cycles.matmul:.0%}",
    }


def waves_report(
    found: Mapping[str, Schedule],
    gpu: Device,
    blocks_an_sm: int,
    problem: dict[str, Any],
    need: int | None,
) -> Report:
    """The report of `flashsim waves`: schedules by name.

    need: bytes of a block's tiles, if the blocks an SM follow from them.
    """
    records: list[dict[str, Any]] = [
        {
            "launch": name,
            "blocks": len(one.work),
            "blocks_an_sm": blocks_an_sm,
            "waves": one.waves,
            "busy_sms": min(len(one.work), gpu.sm_count),
            "utilisation": one.utilisation,
            "tail": one.tail,
            "span_tiles": one.span,
            "work_tiles": int(one.work.sum()),
        }
        for name, one in found.items()
    ]
    return Report(
        about={
            "command": "waves", "flashsim": __version__, "problem": problem,
            "device": {"key": gpu.key, "name": gpu.name, "sm_count": gpu.sm_count},
        },
        heading=[
            f"{gpu.name}: {gpu.sm_count} multiprocessors, {_of(blocks_an_sm, 'block')} each",
            _problem_line(problem),
        ],
        tables=[
            [
                {
                    "launch": r["launch"],
                    "blocks": count(r["blocks"]),
                    "waves": f"{r['waves']:.2f}",
                    "SMs with\na block": str(r["busy_sms"]),
                    "utilisation": f"{r['utilisation']:.1%}",
                    "tail": f"{r['tail']:.0%}",
                    "span\n(tiles)": count(r["span_tiles"]),
                    "work\n(tiles)": count(r["work_tiles"]),
                }
                for r in records
            ]
        ],
        records=records,
        remarks=[
            "A block takes as long as the tiles of scores that it visits; the next one starts "
            "where one ends first. Utilisation: work over span times blocks in flight. Tail: the "
            "share of the span in which some block's place is empty. What binds a block, and the "
            "merging of split keys, are left out.",
            *([] if need is None else _too_large({"flash2": need}, gpu)),
        ],
    )  # fmt: skip


def l2_report(
    found: Mapping[str, DramCost],
    once: Mapping[str, int],
    gpu: Device,
    what: dict[str, Any],
    needs: Mapping[str, int],
) -> Report:
    """The report of `flashsim l2`: traffic by name, and of each the compulsory reads in bytes.

    what: the L2, its policy, and the problem; needs: of each algorithm the bytes of a block's
    tiles, if the blocks an SM follow from them.
    """
    records: list[dict[str, Any]] = [
        {
            "run": name,
            "sm_read_bytes": one.sm.read_bytes,
            "sm_written_bytes": one.sm.written_bytes,
            "dram_read_bytes": one.read_bytes,
            "dram_written_bytes": one.written_bytes,
            "dirty_bytes": one.dirty_bytes,
            "compulsory_read_bytes": once[name],
            "dram_seconds": gpu.memory_seconds(one.total_bytes),
            "tile_accesses": one.accesses,
            "dram_read_bytes_of": {x: n * one.item_bytes[x] for x, n in one.reads.items()},
        }
        for name, one in found.items()
    ]
    return Report(
        about={
            "command": "l2", "flashsim": __version__, **what,
            "device": {"key": gpu.key, "name": gpu.name},
        },
        heading=[
            f"{gpu.name}: L2 {what['l2_bytes'] / 2**20:.4g} MB, {what['policy']}",
            _problem_line(what["problem"])
            + (f", layout {what['layout']}" if what["layout"] else ""),
        ],
        tables=[
            [
                {
                    "run": r["run"],
                    "into\nthe SMs": _bytes(r["sm_read_bytes"]),
                    "read from\nthe DRAM": _bytes(r["dram_read_bytes"]),
                    "/ once": f"{r['dram_read_bytes'] / r['compulsory_read_bytes']:.2f}",
                    "out of\nthe SMs": _bytes(r["sm_written_bytes"]),
                    "written to\nthe DRAM": _bytes(r["dram_written_bytes"]),
                    "left in\nthe L2": _bytes(r["dirty_bytes"]),
                    "time of\nthe DRAM": seconds(r["dram_seconds"]),
                }
                for r in records
            ]
        ],
        records=records,
        remarks=[
            "/ once: over reading each array that is not made here once. What is written reaches "
            "the DRAM when it makes room. Time: bytes at the peak rate of the memory. GB are 1e9 "
            "bytes.",
            *_too_large(needs, gpu),
        ],
    )  # fmt: skip


def _too_large(needs: Mapping[str, int], gpu: Device) -> Iterator[str]:
    """Which blocks' tiles, by algorithm in bytes, do not fit in shared memory."""
    over = [f"{x}, {kb(n)}" for x, n in needs.items() if n > gpu.sram_bytes_per_block]
    if over:
        yield (
            f"The tiles of a block do not fit in its {kb(gpu.sram_bytes_per_block)} of shared "
            f"memory: {'; '.join(over)}. One block an SM is taken all the same, as if the rest lay "
            "in registers."
        )


def _problem_line(problem: dict[str, Any]) -> str:
    sizes = ", ".join(f"{name} = {problem[name]}" for name in ("N", "d", "heads", "batch"))
    line = f"{sizes}, {problem['dtype']}, tiles {problem['Br']} x {problem['Bc']}"
    return line + (", causal" if problem["is_causal"] else "")


def _of(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _bytes(n: float) -> str:
    return count(n) + "B"
