"""Pictures of the studies: who wins where SRAM is small, and approximations over the length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plots import MARKS, SERIES, _figure
from . import approximations, small_sram
from .devices import Device


def small_sram_lines(
    path: Path,
    rows: Sequence[Sequence[small_sram.Point]],
    far: Sequence[Sequence[small_sram.Point]],
    crossover: float,
) -> None:
    """Traffic over M / d^2 in log-log axes: what was run, and the closed forms far out."""
    figure = _figure(11, 4.4)
    near_axes, far_axes = figure.subplots(1, 2)
    for at, points, line in ((near_axes, rows, ""), (far_axes, far, "-")):
        for n, name in enumerate(small_sram.STRATEGIES):
            mine = [p for row in points for p in row if p.algorithm == name and p.total_elements]
            at.plot(
                [p.M / p.d**2 for p in mine], [(p.total_elements or 0) / p.N**2 for p in mine],
                marker=MARKS[n] if not line else "", linestyle=line or ":", color=SERIES[n + 1],
                linewidth=1.2 if not line else 2, label=name,
            )  # fmt: skip
        first = points[0][0]
        at.set_title(f"N = {first.N}, d = {first.d}: {'closed form' if line else 'executed'}",
                     fontsize=10, loc="left")  # fmt: skip
        at.set_xscale("log", base=2)
        at.set_yscale("log", base=2)
        at.set_xlabel("M / d² (SRAM in elements over d²)")
        at.grid(alpha=0.25)
        at.spines[["top", "right"]].set_visible(False)
    far_axes.axvline(crossover, color="#555555", linewidth=1, linestyle="--")
    far_axes.annotate(
        f"M = {crossover:.2f} d²", (crossover, 1), (5, 3), xycoords=("data", "axes fraction"),
        textcoords="offset points", fontsize=8, va="bottom", color="#555555",
    )  # fmt: skip
    near_axes.set_ylabel("HBM traffic (elements / N²)")
    near_axes.legend(fontsize=8)
    for at in (near_axes, far_axes):
        _plain_ticks(at)
    figure.savefig(path, dpi=150)


def _plain_ticks(at: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    for axis in (at.xaxis, at.yaxis):
        axis.set_major_formatter(
            FuncFormatter(lambda x, _: f"1/{1 / x:.0f}" if x < 1 else f"{x:g}")
        )


def approximation_lines(
    path: Path, gpu: Device, points: Sequence[approximations.Point], published: Any
) -> None:
    """Lower time of each method over N in log-log axes, beside what was published."""
    figure = _figure(11, 4.8)
    model, printed = figure.subplots(1, 2, sharey=True)
    for n, name in enumerate(approximations.METHODS):
        style: dict[str, Any] = {"color": SERIES[n], "marker": MARKS[n], "markersize": 5}
        mine = [p for p in points if p.method == name]
        model.plot(
            [p.N for p in mine], [p.time.lower_seconds * 1e3 for p in mine], label=name, **style
        )
        if name in approximations.PUBLISHED_NAMES:
            there = published.points(approximations.PUBLISHED_NAMES[name])
            printed.plot(*zip(*there, strict=True), label=name, **style)
    for at, title in (
        (model, f"model, {gpu.key}: the busiest resource at its peak"),
        (printed, f"published, Table {published.number}: {published.what} on an A100"),
    ):
        at.set_title(title, fontsize=10, loc="left")
        at.set_xscale("log", base=2)
        at.set_yscale("log")
        at.set_xticks(approximations.LENGTHS, [str(N) for N in approximations.LENGTHS], fontsize=8)
        at.minorticks_off()
        at.set_xlabel("N (tokens)")
        at.grid(alpha=0.25)
        at.spines[["top", "right"]].set_visible(False)
        at.legend(fontsize=8)
    model.set_ylabel("time of a forward pass (ms)")
    figure.savefig(path, dpi=150)
