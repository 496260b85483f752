"""Pictures of a comparison: measured against simulated bytes, time against bytes, block sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..plots import MARKS, SERIES, _figure
from .compare import Comparison, Series

GIGA = 1e9
SMALL = 0.01  # GB: what moves less is left out


def comparison(path: Path, found: Comparison) -> None:
    """Bytes with the diagonal, time over bytes, and each kernel's block size against both."""
    drawn = [s for s in found.series if len(s.sizes) > 2]
    columns = max(2, (len(drawn) + 1) // 2)
    figure = _figure(5.5 * columns, 4.2 * (1 + (len(drawn) > 0) + (len(drawn) > columns)))
    top, *rest = figure.subfigures(1 + (len(drawn) > 0) + (len(drawn) > columns), 1, squeeze=False)[
        :, 0
    ]
    left, right = top.subplots(1, 2)
    _bytes(left, found.records)
    _times(right, found.records)
    for n, row in enumerate(rest):
        here = drawn[n * columns : (n + 1) * columns]
        for at, series in zip(row.subplots(1, columns, squeeze=False)[0], here, strict=False):
            _blocks(at, series)
    h = found.data["header"]
    figure.suptitle(f"{h['gpu']}, {h['date']}", fontsize=10)
    figure.savefig(path, dpi=150)


def _bytes(at: Any, records: list[dict[str, Any]]) -> None:
    shown: list[float] = []
    kinds = (
        ("into the multiprocessors", "sm_read", 0),
        ("out of them", "sm_written", 1),
        ("read from the DRAM", "dram_read", 3),
    )
    for label, key, n in kinds:
        pairs = [
            (r[f"model_{key}_bytes"] / GIGA, r[f"{key}_bytes"] / GIGA)
            for r in records
            if f"{key}_bytes" in r and r[f"model_{key}_bytes"] > SMALL * GIGA
        ]
        if pairs:
            x, y = zip(*pairs, strict=True)
            shown += [*x, *y]
            at.plot(
                x, y, MARKS[n], color=SERIES[n], label=label, fillstyle="none", markersize=9 - n
            )
    if not shown:
        at.text(0.5, 0.5, "no counters in this data set", ha="center", transform=at.transAxes)
        return
    ends = min(shown) / 1.5, max(shown) * 1.5
    at.plot(ends, ends, color="#999999", linewidth=1, zorder=0, label="equal")
    _finish(at, "bytes of the model (GB)", "measured bytes (GB)")


def _times(at: Any, records: list[dict[str, Any]]) -> None:
    groups: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for r in records:
        moved = (r["model_sm_read_bytes"] + r["model_sm_written_bytes"]) / GIGA
        if moved < SMALL:
            continue
        name = "backward passes" if r["backward"] else r["algorithm"]
        groups.setdefault((name, r["loads_only"]), []).append((moved, r["ms"]))
    names = list(dict.fromkeys(name for name, _ in groups))
    for (name, loads_only), pairs in groups.items():
        n = names.index(name)
        x, y = zip(*pairs, strict=True)
        at.plot(
            x, y, MARKS[n % len(MARKS)], color=SERIES[n % len(SERIES)],
            fillstyle="none" if loads_only else "full",
            label=f"{name}, loads only" if loads_only else name,
        )  # fmt: skip
    _finish(at, "bytes of the model, read and written (GB)", "time (ms)")


def _blocks(at: Any, s: Series) -> None:
    """The GPU version of Fig. 2, middle, of Dao et al. 2022."""
    at.plot(s.sizes, [b / GIGA for b in s.bytes], "s--", color=SERIES[3], label="bytes (GB)")
    other = at.twinx()
    other.plot(
        s.sizes, s.loads_ms, "o-", color=SERIES[1], fillstyle="none", label="loads only (ms)"
    )
    if None not in s.full_ms:
        other.plot(s.sizes, s.full_ms, "o-", color=SERIES[1], label="with arithmetic (ms)")
    at.set_xscale("log", base=2)
    at.set_xticks(s.sizes, [str(n) for n in s.sizes])
    at.set_ylim(0)
    other.set_ylim(0)
    at.set_xlabel(f"{s.side} (rows of a {'key' if s.side == 'Bc' else 'query'} tile)")
    at.set_ylabel("bytes of the model (GB)")
    other.set_ylabel("time (ms)")
    at.set_title(f"{s.algorithm} {','.join(map(str, s.shape))}", fontsize=10, loc="left")
    lines = [*at.get_lines(), *other.get_lines()]
    at.legend(lines, [line.get_label() for line in lines], fontsize=8, frameon=False)


def _finish(at: Any, x: str, y: str) -> None:
    at.set_xscale("log")
    at.set_yscale("log")
    at.xaxis.set_major_formatter("{x:g}")
    at.yaxis.set_major_formatter("{x:g}")
    at.set_xlabel(x)
    at.set_ylabel(y)
    at.grid(alpha=0.25)
    at.spines[["top", "right"]].set_visible(False)
    at.legend(fontsize=8, frameon=False)
