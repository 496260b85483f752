"""A data set held against the model: bytes, time, and what explains the difference."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import bad
from ..cost.cache import DramCost, dram_cost
from ..memory import Traffic
from .cases import LOAD_ONLY, Case, from_dict

RECORDED = Path(__file__).parent / "data" / "h200.json"
READ_TOLERANCE, WRITE_TOLERANCE, DRAM_TOLERANCE, TIME_TOLERANCE = 0.01, 0.03, 0.10, 0.15
RANK = 0.9
# What a launch reads from the DRAM besides arrays, its code and arguments: about as much as was
# counted of one that only writes, FlashAttention-2's zeros.
CODE_BYTES = 16 * 1024
BUSY = 60  # percent of its peak from which a unit is taken to bind
UNITS = {
    "issue_percent": "issue",
    "fma_percent": "FMA",
    "shared_percent": "shared",
    "l2_percent": "L2",
    "dram_percent": "DRAM",
}


@dataclass
class Series:
    """A kernel over its tiles, smallest block first: the traffic falls."""

    algorithm: str
    shape: tuple[int, ...]
    sizes: list[int]  # of the block side that the traffic depends on
    bytes: list[float]
    loads_ms: list[float]
    full_ms: list[float | None]

    @property
    def side(self) -> str:
        """The block side that the traffic depends on."""
        return "Bc" if self.algorithm == "flash1" else "Br"

    @property
    def rank_correlation(self) -> float:
        """Of the time of the loads alone with the bytes of the model."""
        return rank_correlation(self.bytes, self.loads_ms)

    @property
    def arithmetic_from(self) -> int | None:
        """The smallest block from which on the arithmetic takes longer than the loads."""
        found = None
        for size, loads, full in zip(
            reversed(self.sizes), reversed(self.loads_ms), reversed(self.full_ms), strict=True
        ):
            if full is None or full <= 2 * loads:
                break
            found = size
        return found


@dataclass
class Comparison:
    """What `compare` returns.

    Attributes
    ----------
    data : dict
        The data set.
    records : list of dict
        A launch each, its row of the data set with what the model says (`model_...`) beside it.
    series : list of Series
    peers : list of dict
        The rows of other libraries' kernels.
    failures : list of str
        Where measured and model are further apart than they may be.
    """

    data: dict[str, Any]
    records: list[dict[str, Any]]
    series: list[Series]
    peers: list[dict[str, Any]]
    failures: list[str] = field(default_factory=list)


def recorded(file: Path | str | None = None) -> dict[str, Any]:
    """The data set in a file that `flashsim bench --json` wrote; default: the one of an H200.

    Raises
    ------
    ValueError
        If the file holds no such data set.
    """
    path = RECORDED if file is None else Path(file)
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        whole = all(isinstance(data[name], dict) for name in ("header", "ceilings"))
        whole = whole and bool(data["rows"]) and all(isinstance(row, dict) for row in data["rows"])
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: expected a data set that `flashsim bench --json` wrote")
    return data


def compare(data: dict[str, Any] | None = None) -> Comparison:
    """Hold a data set (default: the recorded one) against the model.

    Raises
    ------
    ValueError
        If a row of the data set lacks what it must have.
    """
    data = recorded() if data is None else data
    peers = [row for row in data["rows"] if row.get("step") == "peer"]
    records = []
    for n, row in enumerate(data["rows"]):
        if row.get("step") == "peer":
            continue
        try:
            records.append(_record(row, from_dict(row), data))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            wrong = f"no {error}" if isinstance(error, KeyError) else str(error)
            written = "as `flashsim bench --json` of this version writes it"
            raise ValueError(f"rows[{n}] of the data set is not {written}: {wrong}") from None
    loads_ms = {_twin(r): r["ms"] for r in records if r["loads_only"]}
    for r in records:  # without a twin, as the model says
        at_least_half = 2 * loads_ms.get(_twin(r), r["ms"]) >= r["ms"]
        r["bytes_bind"] = r["model_binds"] in ("L2", "DRAM") and at_least_half
    found = Comparison(data, records, _series(records), peers)
    for r in records:
        found.failures += _failures(r)
    for s in found.series:
        if s.rank_correlation < RANK:
            found.failures.append(
                f"{s.algorithm} {_shape(s.shape)}: rank correlation {s.rank_correlation:.2f} of "
                f"time and bytes, expected {RANK}"
            )
    return found


def _twin(r: dict[str, Any]) -> Any:
    """What a launch and its loads alone have in common."""
    return r["algorithm"], tuple(r["shape"]), tuple(r["tiles"]), r["backward"], r["queries"]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing theirs; NaN for under two.

    Examples
    --------
    >>> rank_correlation([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    if len(x) < 2:
        return float("nan")
    a, b = (_ranks(np.asarray(values, float)) for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    spread = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / spread if spread else float("nan")


def _ranks(values: Any) -> Any:
    below = (values[:, None] > values).sum(axis=1)
    equal = (values[:, None] == values).sum(axis=1)
    return below + (equal - 1) / 2


def _record(row: dict[str, Any], case: Case, data: dict[str, Any]) -> dict[str, Any]:
    if not 0 < row["ms"] < float("inf"):
        raise bad("ms", row["ms"], "a positive number")
    cost = case.cost(row["step"], row["parts"])
    slots = row["blocks_per_sm"] * data["header"]["multiprocessors"]
    dram: Traffic = cost  # split_kv reads each element once, and more than the L2 holds
    if case.algorithm != "split_kv":
        dram = dram_traffic(case, row["step"], slots, data["header"]["l2_bytes"])
    rates = {**data["ceilings"], **row, "copy": data["ceilings"]["copy_bytes_per_second"]}
    launch = row["launch_seconds"]
    times = {
        "L2": cost.read_bytes / rates["l2_bytes_per_second"]
        + cost.written_bytes / rates["l2_written_bytes_per_second"],
        "DRAM": dram.read_bytes / min(rates["copy"], rates["dram_bytes_per_second"])
        + dram.written_bytes / min(rates["copy"], rates["dram_written_bytes_per_second"]),
        "FMA": cost.flops / rates["float32_flops_per_second"],
    }
    longest = max(times, key=lambda name: times[name])
    model_ms = 1e3 * (launch + times[longest])
    read, written = case.sector_bytes(row["step"], row["parts"])
    record = {
        **row,
        "label": case.label if len(case.steps) == 1 else f"{case.label}, {row['step']}",
        "model_sm_read_bytes": read,
        "model_sm_written_bytes": written,
        "model_dram_read_bytes": dram.read_bytes + CODE_BYTES if dram.read_bytes else 0,
        "model_ms": model_ms,
        "model_binds": longest if times[longest] > launch else "launch",
        "ms_ratio": row["ms"] / model_ms,
    }
    for name in ("sm_read", "sm_written", "dram_read"):
        if f"{name}_bytes" in row and (model := record[f"model_{name}_bytes"]):
            record[f"{name}_ratio"] = row[f"{name}_bytes"] / model
    record["busiest"], record["because"] = _explained(record)
    return record


def dram_traffic(case: Case, step: str, slots: int, l2_bytes: int) -> DramCost:
    """What a launch moves to and from the DRAM, with so many blocks in flight before such an L2.

    The caches are empty before it, as under Nsight Compute; see `flashsim.cost.cache`.
    """
    return _dram_traffic(replace(case, loads_only=False), step, slots, l2_bytes)


@cache
def _dram_traffic(case: Case, step: str, slots: int, l2_bytes: int) -> DramCost:
    batch, heads, N, d = case.shape
    return dram_cost(
        case.algorithm, N=case.Nq, Nk=N, d=d, Br=case.tiles[0], Bc=case.tiles[1], heads=heads,
        batch=batch, dtype=case.dtype, backward=case.backward, launch=step, slots=slots,
        l2_bytes=l2_bytes, **case.rules,
    )  # fmt: skip


def _explained(record: dict[str, Any]) -> tuple[str, str]:
    """The busiest unit by the counters, and in words why the time is not the model's."""
    busy = {UNITS[name]: record[name] for name in UNITS if record.get(name) is not None}
    if not busy:
        return "-", "not counted"
    unit = max(busy, key=lambda name: busy[name])
    shown = f"{unit} {busy[unit]:.0f} %"
    if abs(record["ms_ratio"] - 1) <= TIME_TOLERANCE:
        return shown, "as in the model"
    if busy[unit] < BUSY:
        return shown, "waits"
    words = {
        "issue": "instructions",
        "FMA": "multiply-adds",
        "shared": "shared memory",
        "L2": "L2",
        "DRAM": "DRAM",
    }
    return shown, words[unit]


def _series(records: Iterable[dict[str, Any]]) -> list[Series]:
    found: dict[tuple[str, tuple[int, ...]], dict[tuple[int, int], dict[bool, Any]]] = {}
    for r in records:
        if r["algorithm"] in LOAD_ONLY and not r["backward"]:
            tiles = found.setdefault((r["algorithm"], tuple(r["shape"])), {})
            tiles.setdefault(tuple(r["tiles"]), {})[r["loads_only"]] = r
    series = []
    for (algorithm, shape), by_tiles in found.items():
        side = 1 if algorithm == "flash1" else 0
        rows = [by_tiles[t] for t in sorted(by_tiles, key=lambda t: t[side]) if True in by_tiles[t]]
        if len(rows) < 2:
            continue
        loads = [row[True] for row in rows]
        series.append(
            Series(
                algorithm,
                shape,
                [r["tiles"][side] for r in loads],
                [r["model_sm_read_bytes"] + r["model_sm_written_bytes"] for r in loads],
                [r["ms"] for r in loads],
                [row[False]["ms"] if False in row else None for row in rows],
            )
        )
    return series


def _failures(r: dict[str, Any]) -> list[str]:
    what = f"{r['label']} {_shape(r['shape'])}"
    limits = (
        ("sm_read", "bytes read", READ_TOLERANCE),
        ("sm_written", "bytes written", WRITE_TOLERANCE),
        ("dram_read", "bytes read from the DRAM", DRAM_TOLERANCE),
    )
    return [
        f"{what}: {words}, measured / model {r[f'{name}_ratio']:.3f}"
        for name, words, limit in limits
        if f"{name}_ratio" in r and abs(r[f"{name}_ratio"] - 1) > limit
    ]


def _shape(shape: Iterable[int]) -> str:
    return ",".join(map(str, shape))
