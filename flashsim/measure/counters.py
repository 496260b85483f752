"""Hardware counters, by Nsight Compute (`ncu`), which replays each launch with cold caches.

ncu ... python -m flashsim.measure.counters CASES.json     # what runs under it
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .cases import Case, from_dict
from .timing import inputs

# What enters and leaves the multiprocessors, and the GPU's memory. A sector of 32 bytes of which a
# part is written counts whole.
METRICS = {
    "l1tex__m_xbar2l1tex_read_bytes.sum": "sm_read_bytes",
    "l1tex__m_l1tex2xbar_write_bytes.sum": "sm_written_bytes",
    "lts__t_sectors.sum": "l2_sectors",
    "dram__bytes_read.sum": "dram_read_bytes",
    "dram__bytes_write.sum": "dram_written_bytes",
    "launch__registers_per_thread": "registers",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_percent",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active": "fma_percent",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed": "shared_percent",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "l2_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
}
COUNTING = "counting"


def parse_csv(text: str) -> list[dict[str, Any]]:
    """Of each launch, in order, the kernel's name and what `METRICS` calls its counters.

    What the profiled program and ncu print around the CSV is skipped.

    Raises
    ------
    ValueError
        If there is no launch in the text, or a value is no number.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[int, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        name, value = METRICS.get(row.get("Metric Name") or ""), row.get("Metric Value") or ""
        if name is None or value == "n/a":
            continue
        try:
            number = float(value.replace(",", ""))
        except ValueError:
            raise ValueError(
                f"{row['Metric Name']} of {row['Kernel Name']}: expected a number, ncu says {value}"
            ) from None
        launch = launches.setdefault(int(row["ID"]), {"kernel": row["Kernel Name"]})
        launch[name] = number if name.endswith("_percent") else int(number)
    if not launches:
        said = [line for line in text.splitlines() if line.strip()]
        raise ValueError(f"ncu counted no launch; it said: {' '.join(said[-3:]) or 'nothing'}")
    return [launches[n] for n in sorted(launches)]


def command(python: Sequence[str]) -> list[str]:
    """How ncu is called around a Python program, which says from where to where it counts."""
    return [
        "ncu", "--csv", "--print-units", "base", "--clock-control", "none",
        "--profile-from-start", "off", "--metrics", ",".join(METRICS), *python,
    ]  # fmt: skip


def count(
    cases: Sequence[Case], on_step: Callable[[str], None] = lambda what: None
) -> list[list[dict[str, Any]]]:
    """Of each case, the counters of each of its steps; `on_step` is told each case as it starts."""
    if shutil.which("ncu") is None:
        raise OSError("--counters: expected Nsight Compute's `ncu` on the path, there is none")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps([case.as_dict() for case in cases]))
        program = [sys.executable, "-u", "-c", f"from {__name__} import main; main()", str(file)]
        said = []
        with subprocess.Popen(
            command(program), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running:
            for line in running.stdout or ():
                said.append(line)
                if line.startswith(COUNTING):
                    on_step(line.strip())
    return by_case(cases, parse_csv("".join(said)))


def by_case(cases: Sequence[Case], found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The launches shared out over the cases that made them."""
    wanted = sum(len(case.steps) for case in cases)
    if len(found) != wanted:
        raise ValueError(f"ncu counted {len(found)} launches: expected {wanted}")
    left = iter(found)
    return [[next(left) for _ in case.steps] for case in cases]


def launch_all(cases: Sequence[Case]) -> None:
    """Launch each case once, in order; only that is counted, not what prepares it."""
    from ..kernels.gpu import cuda

    for case in cases:
        plan = case.plan(*inputs(case.shape, case.Nq, case.dtype, 1)[0])
        cuda.synchronize()
        print(COUNTING, case.label)
        with cuda.profiling():
            plan.launch()
            cuda.synchronize()


def main() -> None:
    """What runs under ncu: launch the cases in the file that the first argument names."""
    launch_all([from_dict(x) for x in json.loads(Path(sys.argv[1]).read_text())])
