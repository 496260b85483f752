"""A data set: the header, the measured ceilings, and a row for each launch and each peer."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import __version__
from . import ceilings, counters
from .cases import LONG, Case
from .timing import Flush, compile_all, inputs, kinds, milliseconds

Row = dict[str, Any]


def require_gpu() -> None:
    """Raise an OSError that says what is missing for a kernel to be measured here."""
    try:
        from ..kernels import gpu
    except ImportError as error:
        raise OSError(f"bench: expected a GPU and flashsim[gpu] installed: {error}") from None
    if gpu.SIMULATED:
        raise OSError("bench: expected a GPU, and NUMBA_ENABLE_CUDASIM is set: nothing to measure")
    if gpu.available():
        raise OSError(f"bench: {gpu.available()}")


def bench(
    cases: Sequence[Case],
    *,
    count: bool = False,
    flush: bool = False,
    peers: bool = True,
    commit: str | None = None,
    on_step: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Time the cases on the current GPU; with `count`, read hardware counters too.

    Parameters
    ----------
    cases : sequence of Case
    count : bool
        Run them once more under Nsight Compute.
    flush : bool
        Push everything out of the L2 before each timed call.
    peers : bool
        Time PyTorch's attention on the same inputs, if it is installed.
    commit : str, optional
        What is measured, where git cannot say it.
    on_step : callable
        Told each of `stages` as it starts.

    Returns
    -------
    dict
        header, ceilings, and rows: one dict for each launch.
    """
    require_gpu()
    compile_all(cases, on_step)
    rows: list[Row] = []
    before = Flush() if flush else None
    for case in cases:
        on_step(f"timing {case.label}")
        rows += case_rows(case, before)
    counted = counters.count(cases, on_step) if count else []
    for row, found in zip(rows, (x for case in counted for x in case), strict=False):
        row |= {name: value for name, value in found.items() if name != "kernel"}
    if peers:
        square = [case for case in cases if case.queries is None and case.shape != LONG]
        for shape, dtype in dict.fromkeys((case.shape, case.dtype) for case in square):
            rows += peer_rows(shape, dtype, before)
    return {"header": header(flush, commit), "ceilings": ceilings.general(), "rows": rows}


def stages(cases: Sequence[Case], count: bool) -> int:
    """How often `bench` tells `on_step` something."""
    return len(kinds(cases)) + len(cases) * (2 if count else 1)


def case_rows(case: Case, before: Callable[[], None] | None = None) -> list[Row]:
    """A row for each launch of a case: its time, and the rates its bytes are held against."""
    from ..kernels import gpu

    plans = [case.plan(*x) for x in inputs(case.shape, case.Nq, case.dtype)]
    for plan in plans:
        plan.launch()  # all steps, as each reads what those before it left
    rows = []
    for n, step in enumerate(plans[0].steps):
        alone = [replace(plan, steps=[plan.steps[n]]).launch for plan in plans]
        row = {**case.as_dict(), "step": step.name.removeprefix("load-only ")}
        row |= milliseconds(alone, before)
        resident = ceilings.resident_blocks(step)
        blocks = min(step.grid, resident * gpu.multiprocessors())
        row |= {"grid": step.grid, "threads": step.threads, "shared_bytes": step.shared_bytes}
        row |= {"blocks_per_sm": resident, "parts": plans[0].parts}
        row |= {"under_way": step.under_way, "sharing": step.sharing}
        place = step.grid, step.threads, step.shared_bytes
        row |= {"launch_seconds": ceilings.empty_launch(*place), **ceilings.rates(blocks, step)}
        rows.append(row)
    return rows


def peer_rows(shape: Any, dtype: str, before: Callable[[], None] | None = None) -> list[Row]:
    """PyTorch's attention, unfused and fused; nothing where it is not installed."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return []
    torch.backends.cuda.matmul.allow_tf32 = False
    sets = [
        tuple(torch.as_tensor(x, device="cuda") for x in qkv[:3])
        for qkv in inputs(shape, shape[2], dtype)
    ]

    def unfused(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v

    fused = torch.nn.functional.scaled_dot_product_attention
    rows = []
    for name, peer in (("torch, three operations", unfused), ("torch SDPA", fused)):
        calls = [lambda x=x, peer=peer: peer(*x) for x in sets]
        row = {"algorithm": name, "shape": list(shape), "dtype": dtype, "step": "peer"}
        rows.append(row | milliseconds(calls, before))
    return rows


def header(flush: bool, commit: str | None = None) -> dict[str, Any]:
    """On what this ran, and how it was measured."""
    from ..kernels import gpu

    device, here = gpu.cuda.get_current_device(), str(Path(__file__).parent)
    name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
    found = {
        "gpu": name,
        "multiprocessors": gpu.multiprocessors(),
        "l2_bytes": int(device.L2_CACHE_SIZE),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "flashsim": __version__,
        "commit": commit or _said("git", "-C", here, "describe", "--always", "--dirty"),
        "python": platform.python_version(),
    }
    for package in ("numba", "numba-cuda", "numpy", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found | {
        "date": datetime.date.today().isoformat(),
        "time": "CUDA events around one launch, after warm-up; median and quartiles; clocks as "
        "they come; three sets of inputs in turn",
        "l2": "flushed before each timed launch" if flush else "not flushed between launches",
        "counters": "Nsight Compute, caches flushed before each launch",
    }


def write(data: dict[str, Any], file: Path) -> None:
    """Write a data set as JSON, a row a line."""
    parts = [f" {json.dumps(name)}: {json.dumps(x)}" for name, x in data.items() if name != "rows"]
    rows = ",\n".join("  " + json.dumps(row) for row in data["rows"])
    parts.append(f' "rows": [\n{rows}\n ]')
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _said(*command: str) -> str | None:
    """The first line of what a program prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    lines = done.stdout.splitlines()
    return lines[0] if lines and done.returncode == 0 else None
