"""Pictures of the cost models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..plots import MARKS, SERIES, _figure
from .devices import MB, Device

TERA = 1e12


def roofline(
    path: Path, title: str, records: Sequence[dict[str, Any]], gpu: Device, dtype: str, d: int
) -> None:
    """Attainable FLOP/s over arithmetic intensity, in log-log axes, under the roofs of a GPU.

    A mark stands at the lower time, filled for a forward pass and hollow for a backward one; the
    line below it ends at the serial time. One exponential a score limits a forward pass to its
    4 d FLOPs for each, and a backward one to 10 d.
    """
    figure = _figure(9.5, 5)
    axes = figure.subplots()
    shown = [r for r in records if r["flops_per_byte"]]
    peak = gpu.flops_per_second(dtype)
    ridge = peak / gpu.hbm_bytes_per_second
    x = [ridge, *(r["flops_per_byte"] for r in shown)]
    left, right = min(x) / 2, max(x) * 4
    axes.plot(
        (left, ridge, right),
        [y / TERA for y in (left * gpu.hbm_bytes_per_second, peak, peak)],
        color="#000000",
        linewidth=1.5,
        label=f"{dtype} {peak / TERA:g} TFLOP/s, HBM {gpu.hbm_bytes_per_second / 1e9:g} GB/s",
    )
    for name, products, style in (("forward", 4, "--"), ("backward", 10, ":")):
        if any(r["pass"] == name for r in shown):
            roof = products * d * gpu.exp_per_second / TERA
            what = f"exponentials, {name}: {products} d each, {roof:.4g} TFLOP/s"
            axes.axhline(roof, linestyle=style, color="#777777", label=what)
    labels = list(dict.fromkeys(r["label"] for r in shown))
    for record in shown:
        n = labels.index(record["label"])
        backward = record["pass"] == "backward"
        best, worst = (
            record["flops"] / record[f"{end}_seconds"] / TERA for end in ("lower", "serial")
        )
        colour, mark = SERIES[n % len(SERIES)], MARKS[(n + n // len(MARKS)) % len(MARKS)]
        axes.plot([record["flops_per_byte"]] * 2, (worst, best), color=colour, linewidth=1)
        axes.plot(
            record["flops_per_byte"], best, linestyle="", markersize=8,
            fillstyle="none" if backward else "full", color=colour, marker=mark,
            label=record["label"] + (", backward" if backward else ""),
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_xlabel("arithmetic intensity (FLOPs of matrix products / byte of HBM)")
    axes.set_ylabel("matrix products (TFLOP/s)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{title}\nmark: the lower time; the line ends at the serial time", fontsize=10, loc="left"
    )
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def utilisation_and_schedules(
    path: Path, problem: dict[str, Any], gpu: Device, blocks_an_sm: int
) -> None:
    """How much of the GPU is busy over N, and the blocks of causal attention in two orders."""
    from .waves import usual, waves

    figure = _figure(12, 4.4)
    over_n, *ganttes = figure.subplots(1, 3)
    lengths = [2**k for k in range(8, 18)]
    curves: dict[str, list[float]] = {}
    for N in lengths:
        found = usual({**problem, "N": N}, gpu.key, blocks_an_sm)
        split = next((x for name, x in found.items() if "splits" in name), found["one query"])
        shown = {
            "flash1": found["flash1"],
            "flash2": found["flash2"],
            "one query": found["one query"],
            "one query, keys split": split,
        }
        for name, schedule in shown.items():
            curves.setdefault(name, []).append(100 * schedule.utilisation)
    for n, (name, y) in enumerate(curves.items()):
        style: dict[str, Any] = {"markersize": 9 - 2 * n, "linewidth": 3 - n / 2}
        over_n.plot(lengths, y, color=SERIES[n], marker=MARKS[n], label=name, **style)
    over_n.set_xscale("log", base=2)
    over_n.set_xticks(lengths[::3], [str(N) for N in lengths[::3]])
    over_n.set_ylim(0, 103)
    over_n.set_xlabel("N (tokens)")
    over_n.set_ylabel("utilisation (%)")
    which = "causal, blocks as they come" if problem["is_causal"] else "not causal"
    over_n.set_title(which, fontsize=10)
    over_n.grid(alpha=0.25)
    over_n.legend(fontsize=8)
    over_n.spines[["top", "right"]].set_visible(False)
    causal = {**problem, "is_causal": True, "device": gpu.key, "blocks_an_sm": blocks_an_sm}
    drawn = {order: waves("flash2", **causal, order=order) for order in ("forward", "longest")}
    longest = max(schedule.span for schedule in drawn.values())
    for at, (order, schedule) in zip(ganttes, drawn.items(), strict=True):
        before = np.zeros(schedule.slots, int)  # blocks that a place has had
        turn = []
        for slot in schedule.slot:
            turn.append(before[slot] % 2)
            before[slot] += 1
        at.barh(
            schedule.slot, schedule.work, 1.0, left=schedule.start,
            color=[SERIES[1 + n] for n in turn], edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        at.set_xlim(0, 1.02 * longest)
        at.set_ylim(-0.5, schedule.slots - 0.5)
        at.set_xlabel("time (tiles of scores)")
        at.set_ylabel("place of a block on the GPU")
        at.set_title(
            f"flash2, causal, N = {problem['N']}, {order}: {schedule.utilisation:.0%}", fontsize=10
        )
        at.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{gpu.name}: {problem['batch']} x {problem['heads']} heads, d = {problem['d']}, tiles "
        f"{problem['Br']} x {problem['Bc']}, blocks on {gpu.sm_count} multiprocessors",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def dram_reads_over_l2(
    path: Path, title: str, own: int, sizes: Sequence[int],
    reads: Mapping[str, Sequence[float]], once: float,
) -> None:  # fmt: skip
    """Bytes that the DRAM gives, over the size of the L2: a line a run.

    own: the size of the GPU's own; once: bytes of the inputs.
    """
    from matplotlib.ticker import LogLocator

    figure = _figure(7.5, 4.6)
    axes = figure.subplots()
    for n, (name, values) in enumerate(reads.items()):
        axes.plot(
            [size / MB for size in sizes], [value / 1e9 for value in values], color=SERIES[n],
            marker=MARKS[n], markersize=8 - n, linewidth=3 - n / 2, label=name,
        )  # fmt: skip
    axes.axvline(own / MB, color="#999999", linewidth=1, zorder=0)
    axes.annotate(
        "L2", (own / MB, 1), (3, -10), xycoords=("data", "axes fraction"),
        textcoords="offset points", fontsize=8, color="#555555",
    )  # fmt: skip
    axes.axhline(once / 1e9, color="#999999", linewidth=1, linestyle=":", zorder=0)
    axes.annotate(
        "each input once", (0, once / 1e9), (4, 4), xycoords=("axes fraction", "data"),
        textcoords="offset points", fontsize=8, color="#555555",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    powers = [own / MB * 2**k for k in range(-4, 3)]
    axes.set_xticks(powers, [f"{x:.3g}" for x in powers])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("L2 (MB of 1,048,576 bytes)")
    axes.set_ylabel("read from the DRAM (GB)")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
