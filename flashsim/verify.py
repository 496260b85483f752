"""What `flashsim run` and `flashsim io` find out, one record an algorithm, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import checks
from .algorithms import ALGORITHMS
from .attention import attention, checked
from .cost.counts import Cost, Head
from .cost.devices import Device
from .cost.io import DTYPES, expected_cost, io_cost
from .cost.tiles import RULES, clamped, default_tiles, optimal, tile_sizes
from .inputs import Inputs
from .masks import Mask
from .memory import SramOverflow, Traffic, widened
from .reference import exact

Record = dict[str, Any]
Budget = dict[str, Any]  # {"sram": elements} or {"sram_bytes": bytes}, as `attention` takes it

LARGEST_SCORES = 2**28  # standard attention keeps two matrices of so many scores: 2 GiB in float32

# Largest error of a file's expected output, in the precision that it was stored in.
TOLERANCES = {"float64": 2e-6, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def variants(names: Iterable[str]) -> list[tuple[str, str]]:
    """(algorithm, convention) for names such as "flash2" or "flash1:elided".

    A name without a convention stands for all that the algorithm has; no names, for all algorithms.

    Raises
    ------
    ValueError
        If there is no such algorithm or convention.
    """
    found = []
    for name in names or ALGORITHMS:
        algorithm, colon, convention = name.partition(":")
        row = ALGORITHMS[checks.choice("algorithm", algorithm, ALGORITHMS)]
        known = row.conventions
        found += [
            (algorithm, c)
            for c in ([checks.choice("convention", convention, known)] if colon else known)
        ]
    return list(dict.fromkeys(found))


def label(record: Record) -> str:
    """The name of a record's variant, as `variants` takes it."""
    algorithm, convention = record["algorithm"], record["convention"]
    several = len(ALGORITHMS[algorithm].conventions) > 1
    return f"{algorithm}:{convention}" if several else str(algorithm)


def run_records(
    inputs: Inputs,
    chosen: list[tuple[str, str]],
    *,
    budget: Budget,
    tiles: tuple[int, int] | None,
    device: Device,
    tolerance: float | None,
    on_step: Callable[[str], None],
    **what: Any,
) -> list[Record]:
    """Run each variant on the inputs and hold it against float64 and against its closed form.

    Parameters
    ----------
    inputs : Inputs
    chosen : list of (algorithm, convention)
    budget, tiles, **what
        Arguments of `attention`.
    device : Device
        Whose memory bandwidth turns bytes into time.
    tolerance : float, optional
        Largest error of an expected output; None for that of its dtype, in TOLERANCES.
    on_step : callable
        Told what comes next.

    Returns
    -------
    list of Record
        `failures` lists what does not hold.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    what = {
        "attn_mask": inputs.attn_mask, "key_padding_mask": inputs.key_padding_mask,
        "enable_gqa": True, **what,
    }  # fmt: skip
    head = checked(q, k, v, **what).head
    if head.Nq * head.Nk > LARGEST_SCORES and any(name == "standard" for name, _ in chosen):
        raise ValueError(
            f"N={head.Nq}, Nk={head.Nk}: expected N * Nk of at most {LARGEST_SCORES} where "
            "standard attention runs; choose other algorithms, or use `flashsim io`"
        )
    on_step("float64 reference")
    reference = exact(q, k, v, **what)
    real = _real_rows(inputs)
    records = []
    for algorithm, convention in chosen:
        on_step(f"{algorithm}, {convention}")
        how = {"convention": convention, **budget, **what}
        try:
            out = attention(q, k, v, algorithm=algorithm, tiles=tiles, **how)
        except SramOverflow as error:
            raise SramOverflow(f"{algorithm}: {error}") from error
        cost = expected_cost(out, q, k, v, **how)
        record = {
            **_moved(algorithm, convention, out.tiles, out.traffic, device),
            "output_error_over_bound": reference.output_ratio(out.output),
            "lse_error_over_bound": reference.lse_ratio(out.lse),
            "sram_elements": out.sram_peak_elements,
            "sram_bytes": out.sram_peak_bytes,
            "extra_hbm_elements": out.extra_hbm_elements,
        }
        record["differs_from_formula"] = _differences(record, cost)
        record["expected_output_error"] = None
        if inputs.expected_output is not None:
            limit = (
                TOLERANCES[inputs.expected_output.dtype.name] if tolerance is None else tolerance
            )
            record |= {
                "expected_output_error": _largest_error(out.output, inputs.expected_output, real),
                "expected_output_tolerance": limit,
            }
        record["failures"] = _failures(record)
        records.append(record)
    return _with_ratio(records)


def _moved(
    algorithm: str, convention: str, tiles: tuple[int, int], traffic: Traffic, device: Device
) -> Record:
    return {
        "algorithm": algorithm,
        "convention": convention,
        "Br": tiles[0],
        "Bc": tiles[1],
        "reads": _nonzero(traffic.reads),
        "writes": _nonzero(traffic.writes),
        "read_elements": traffic.read_elements,
        "written_elements": traffic.written_elements,
        "total_elements": traffic.total_elements,
        "total_bytes": traffic.total_bytes,
        "memory_seconds": device.memory_seconds(traffic.total_bytes),
    }


def _nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in counts.items() if n}


def _real_rows(inputs: Inputs) -> Any:
    """Which rows an expected output is compared in: in padded self-attention, the real tokens'."""
    keys, lead = inputs.key_padding_mask, inputs.q.shape[:-3]
    if keys is None or inputs.q.shape[-2] != inputs.k.shape[-2]:
        return True
    return keys.reshape(*lead, 1, -1, 1)


def _largest_error(output: Any, expected: Any, real: Any) -> float:
    error = np.abs(output.astype(np.float64) - expected.astype(np.float64))
    return float(np.where(real, error, 0).max(initial=0))


def _differences(record: Record, cost: Cost) -> list[str]:
    """Which of the executed counts are not those of the closed form."""
    formula = {"reads": _nonzero(cost.reads), "writes": _nonzero(cost.writes)} | {
        name: getattr(cost, name) for name in ("sram_elements", "sram_bytes", "extra_hbm_elements")
    }
    return [name for name, value in formula.items() if record[name] != value]


def _failures(record: Record) -> list[str]:
    found = [
        f"{what} is off by {record[key]:.3g} times its bound"
        for what, key in (("output", "output_error_over_bound"), ("lse", "lse_error_over_bound"))
        if not record[key] <= 1
    ]
    if record["differs_from_formula"]:
        found.append(f"{', '.join(record['differs_from_formula'])} not as in the closed form")
    error = record["expected_output_error"]
    if error is not None and not error <= record["expected_output_tolerance"]:
        found.append(
            f"output is off by {error:.2g} from the expected one, more than "
            f"{record['expected_output_tolerance']:g}"
        )
    return found


def _with_ratio(records: list[Record]) -> list[Record]:
    """Add `ratio_to_standard`, of elements moved; None where standard attention is not there."""
    standard = next((r["total_elements"] for r in records if r["algorithm"] == "standard"), None)
    for record in records:
        record["ratio_to_standard"] = record["total_elements"] / standard if standard else None
    return records


def io_records(
    chosen: list[tuple[str, str]],
    *,
    N: int,
    Nk: int,
    d: int,
    dv: int,
    dtype: str,
    budget: Budget,
    rule: str | None,
    tiles: tuple[int, int] | None,
    device: Device,
    **what: Any,
) -> list[Record]:
    """The closed form of each variant, with the tiles given or, if none are, those of a rule.

    Parameters as of `io_cost`; rule as of `tile_sizes`, with M the budget in elements as stored.
    """
    for name, size, least in (("N", N, 0), ("Nk", Nk, 0), ("d", d, 1), ("dv", dv, 1)):
        checks.integer(name, size, least)
    records = []
    for algorithm, convention in chosen:
        Br, Bc = tiles or _tiles(algorithm, N, Nk, d, dv, dtype, budget, rule)
        Br, Bc = clamped((Br, Bc), N, Nk)
        cost = io_cost(
            algorithm, N=N, Nk=Nk, d=d, dv=dv, Br=Br, Bc=Bc, dtype=dtype, convention=convention,
            **budget, **what,
        )  # fmt: skip
        need = {"sram": cost.sram_elements, "sram_bytes": cost.sram_bytes}
        over = max(need[unit] - limit for unit, limit in budget.items())
        records.append(
            {
                **_moved(algorithm, convention, (Br, Bc), cost, device),
                "flops": cost.flops,
                "exps": cost.exps,
                "flops_per_byte": cost.flops / cost.total_bytes if cost.total_bytes else None,
                "sram_elements": cost.sram_elements,
                "sram_bytes": cost.sram_bytes,
                "fits": over <= 0,
                "extra_hbm_elements": cost.extra_hbm_elements,
            }
        )
    return _with_ratio(records)


def _tiles(
    algorithm: str, N: int, Nk: int, d: int, dv: int, dtype: str, budget: Budget, rule: str | None
) -> tuple[int, int]:
    row, stored = ALGORITHMS[algorithm], DTYPES[checks.choice("dtype", dtype, DTYPES)]
    head = Head(Mask(N, Nk), d, dv, stored.itemsize, widened(stored).itemsize)
    if checks.choice("rule", rule, RULES) == "strict":
        return default_tiles(row, head, **budget)
    if rule == "optimal":
        return optimal(row, head, **budget)
    M = budget.get("sram", budget.get("sram_bytes", 0) // head.stored)
    return tile_sizes(max(1, M), d, "paper", algorithm)
