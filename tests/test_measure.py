"""Measuring without a GPU: what ncu prints, the comparison on the recorded data, plain refusals."""

import csv
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.measure import bench, compare, parse_csv, rank_correlation, recorded
from flashsim.measure.bench import write
from flashsim.measure.cases import Case, from_dict, usual
from flashsim.measure.compare import Series, dram_read_bytes
from flashsim.measure.counters import METRICS, by_case, count

H200 = {"multiprocessors": 132, "l2_bytes": 60 * 1024**2}


def invoke(*arguments, columns=120):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli.app, [str(a) for a in arguments])


def counted(*rows):
    """What ncu prints for (id, kernel, metric, value), with its usual noise around it."""
    out = io.StringIO()
    print("==PROF== Connected to process 667 (/usr/bin/python3.12)", file=out)
    print('==PROF== Profiling "load_only_flash2" - 0: 0%....100% - 4 passes', file=out)
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(
        ("ID", "Process ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
    )
    for n, kernel, metric, value in rows:
        writer.writerow((n, 667, kernel, metric, "byte", value))
    print("==PROF== Disconnected from process 667", file=out)
    return out.getvalue()


FLASH2 = "load_only::load_only_flash2[v1,cw51c](Array<float, 4, C, mutable, aligned>, long long)"


def test_launches_are_read_from_the_csv_of_ncu():
    text = counted(
        (0, FLASH2, "l1tex__m_xbar2l1tex_read_bytes.sum", "34,426,847,232"),
        (0, FLASH2, "dram__bytes_read.sum", "201,655,808"),
        (0, FLASH2, "smsp__issue_active.avg.pct_of_peak_sustained_active", "45.98"),
        (0, FLASH2, "dram__throughput.avg.pct_of_peak_sustained_elapsed", "n/a"),
        (0, FLASH2, "gpu__time_duration.sum", "9,331,056"),
        (10, "finish", "dram__bytes_read.sum", "3"),
        (2, "standard", "dram__bytes_read.sum", "2"),
    )
    first, second, third = parse_csv(text)
    assert first == {
        "kernel": FLASH2, "sm_read_bytes": 34426847232, "dram_read_bytes": 201655808,
        "issue_percent": 45.98,
    }  # fmt: skip
    assert (second["dram_read_bytes"], third["dram_read_bytes"]) == (2, 3)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "nothing"),
        ("==ERROR== ERR_NVGPUCTRPERM: no permission\n", "ERR_NVGPUCTRPERM"),
        (counted((0, "flash2", next(iter(METRICS)), "many")), "many"),
    ],
)
def test_output_without_counters_is_refused_with_what_ncu_said(text, said):
    with pytest.raises(ValueError, match=said):
        parse_csv(text)


def test_launches_are_shared_out_over_their_cases():
    cases = [Case("standard", (1, 1, 64, 8), (8, 8)), Case("flash2", (1, 1, 64, 8), (8, 8))]
    found = [{"kernel": n} for n in range(4)]
    assert by_case(cases, found) == [found[:3], found[3:]]
    with pytest.raises(ValueError, match="counted 3 launches: expected 4"):
        by_case(cases, found[:3])


@pytest.mark.parametrize(
    "x, y, expected",
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1),
        ([1, 2, 3, 4], [9, 3, 2, 1], -1),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),
        ([1, 1, 2, 3], [1, 2, 3, 4], 0.9486832980505138),
    ],
)
def test_rank_correlation_is_spearmans(x, y, expected):
    assert rank_correlation(x, y) == pytest.approx(expected)
    assert rank_correlation(np.exp(x), y) == pytest.approx(expected)


def test_rank_correlation_of_nothing_that_varies_is_nan():
    assert np.isnan(rank_correlation([1], [1]))
    assert np.isnan(rank_correlation([1, 1], [1, 2]))


def test_steps_of_a_case_add_up_to_the_closed_form():
    for algorithm in ("standard", "flash1", "flash2"):
        case = Case(algorithm, (2, 3, 100, 16), (16, 8))
        whole = fs.io_cost(algorithm, N=100, d=16, Br=16, Bc=8, heads=3, batch=2)
        steps = [case.cost(step) for step in case.steps]
        assert sum(step.read_bytes for step in steps) == whole.read_bytes
        assert sum(step.written_bytes for step in steps) == whole.written_bytes
        assert sum(step.flops for step in steps) == whole.flops
        assert sum(step.exps for step in steps) == whole.exps
    assert all(from_dict(json.loads(json.dumps(c.as_dict()))) == c for c in usual())


def test_dram_sees_each_array_once_if_the_l2_holds_what_is_read_again():
    case = Case("flash2", (4, 16, 4096, 64), (128, 64))
    assert dram_read_bytes(case, "flash2", 2048, 2, **H200) == 3 * 4 * 16 * 4096 * 64 * 4


def test_dram_sees_keys_once_a_wave_if_the_l2_does_not_hold_them():
    case = Case("flash2", (1, 2, 131072, 128), (128, 64), dtype="float16")
    found = dram_read_bytes(case, "flash2", 2048, 1, **H200)
    assert found == pytest.approx(2 * 131072 * 128 * 2 * (1 + 2 * 1024 / 132))
    assert found == pytest.approx(1.21e9, rel=0.1)  # measured in another kernel


def test_recorded_bytes_are_those_of_the_closed_form():
    found = compare()
    assert not found.failures
    assert {r["algorithm"] for r in found.records} == {"standard", "flash1", "flash2"}
    for r in found.records:
        assert r["sm_read_ratio"] == pytest.approx(1, abs=0.01), r["label"]
        assert r["sm_written_ratio"] == pytest.approx(1, abs=0.03), r["label"]
        assert r["dram_read_ratio"] == pytest.approx(1, abs=0.12), r["label"]


def test_recorded_time_of_the_loads_follows_the_bytes():
    found = compare()
    assert len(found.series) == 4
    for series in found.series:
        assert len(series.sizes) >= 4
        assert max(series.bytes) >= 4 * min(series.bytes)
        assert series.rank_correlation >= 0.9


def test_arithmetic_binds_from_the_size_on_from_which_all_larger_ones_are_bound():
    series = Series("flash2", (1,), [16, 32, 64], [4, 2, 1], [4, 2, 1], [9, 3, 3])
    assert series.arithmetic_from == 64
    series.full_ms = [9, 5, 3]
    assert series.arithmetic_from == 16
    series.full_ms = [9, 5, 1]
    assert series.arithmetic_from is None


@pytest.mark.parametrize("columns", [80, 120, 300])
def test_compare_shows_the_recorded_data(columns):
    result = invoke("compare", columns=columns)
    assert result.exit_code == 0, result.output
    assert "NVIDIA H200" in result.stdout
    assert "Every check held" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_compare_writes_json_and_csv():
    document = json.loads(invoke("compare", "--json").stdout)
    assert document["held"]
    assert document["header"]["gpu"] == "NVIDIA H200"
    assert document["predictions"]["rank_correlation"]
    assert all(s["rank_correlation"] >= 0.9 for s in document["series"])
    rows = list(csv.DictReader(io.StringIO(invoke("compare", "--csv").stdout)))
    assert len(rows) == len(document["records"])
    assert {"label", "model_sm_read_bytes", "sm_read_bytes", "model_ms", "ms"} <= set(rows[0])


def test_compare_draws(tmp_path):
    file = tmp_path / "h200.png"
    assert invoke("compare", "--plot", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_compare_takes_a_data_set_without_counters(tmp_path):
    data = recorded()
    kept = {**METRICS, "registers": "registers"}.values()
    data["rows"] = [{k: x for k, x in row.items() if k not in kept} for row in data["rows"]]
    file, picture = tmp_path / "times.json", tmp_path / "times.png"
    write(data, file)
    assert recorded(file) == data
    result = invoke("compare", file, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "not counted" in result.stdout


def test_compare_fails_where_bytes_are_not_those_of_the_model(tmp_path):
    data = recorded()
    row = next(row for row in data["rows"] if row["algorithm"] == "flash2")
    row["sm_read_bytes"] = int(1.02 * row["sm_read_bytes"])
    file = tmp_path / "off.json"
    write(data, file)
    result = invoke("compare", file)
    assert result.exit_code == 1
    assert "FAILED: flash2" in result.stdout
    assert "1.020" in result.stdout


@pytest.mark.parametrize("text", ["{}", "[]", "3", "not JSON", '{"header": {}, "rows": []}'])
def test_compare_refuses_another_file_in_one_line(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    refused("expected a data set", "compare", file)


def test_compare_refuses_a_row_that_lacks_something(tmp_path):
    data = recorded()
    del data["rows"][0]["grid"]
    file = tmp_path / "short.json"
    write(data, file)
    refused("grid", "compare", file)


def refused(said, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "flashsim", *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("flashsim: error:")
    assert said in line


def test_bench_without_a_gpu_is_one_line():
    refused("GPU", "bench", CUDA_VISIBLE_DEVICES="")
    refused("GPU", "bench", "--counters", NUMBA_ENABLE_CUDASIM="1")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--shape", "1,2"], "--shape 1,2"),
        (["--shape", "1,2,0,4"], "shape: N"),
        (["-a", "flash9"], "flash9"),
        (["--json", "/no/such/folder/x.json"], "folder"),
    ],
)
def test_bench_refuses_bad_arguments_in_one_line(arguments, said):
    refused(said, "bench", *arguments, CUDA_VISIBLE_DEVICES="")


def test_bench_writes_what_compare_reads(tmp_path, monkeypatch):
    data = recorded()
    shape = (2, 16, 4096, 128)
    kept = {*METRICS.values()}

    def rows_of(case):
        return [row for row in data["rows"] if row["step"] != "peer" and from_dict(row) == case]

    def timed(case, before):
        return [{k: x for k, x in row.items() if k not in kept} for row in rows_of(case)]

    def counted(cases):
        return [[{k: row[k] for k in kept if k in row} for row in rows_of(c)] for c in cases]

    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(bench, "compile_ahead", lambda case: None)
    monkeypatch.setattr(bench, "case_rows", timed)
    monkeypatch.setattr(bench.counters, "count", counted)
    monkeypatch.setattr(bench, "peer_rows", lambda *what: [])
    monkeypatch.setattr(bench, "header", lambda flush: data["header"])
    monkeypatch.setattr(bench.ceilings, "general", lambda: data["ceilings"])
    file = tmp_path / "bench.json"
    result = invoke("bench", "--shape", "2,16,4096,128", "--counters", "--json", file)
    assert result.exit_code == 0, result.output
    assert "into" in result.stdout
    wanted = [r for r in data["rows"] if tuple(r["shape"]) == shape and r["step"] != "peer"]
    written = recorded(file)["rows"]
    assert sorted(map(str, map(sorted, (r.items() for r in written)))) == sorted(
        map(str, map(sorted, (r.items() for r in wanted)))
    )
    assert invoke("compare", file).exit_code == 0


def test_counters_come_from_the_ncu_on_the_path(tmp_path, monkeypatch):
    cases = [Case("flash2", (1, 1, 64, 8), (8, 8))]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="ncu"):
        count(cases)
    ncu = tmp_path / "ncu"
    text = counted((0, FLASH2, next(iter(METRICS)), "12,345"))
    ncu.write_text(f"#!{sys.executable}\nprint({text!r})\n")
    ncu.chmod(0o755)
    assert count(cases) == [[{"kernel": FLASH2, "sm_read_bytes": 12345}]]


SIMULATED = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
import flashsim as fs
from flashsim.kernels import load_only
from kernel_process import launch_counted
for algorithm in ("flash1", "flash2"):
    for (batch, heads, N, d), tiles, what in (
        ((1, 2, 20, 6), (8, 8), {{}}), ((2, 1, 17, 8), (4, 8), {{"is_causal": True}}),
    ):
        q = np.ones((batch, heads, N, d), np.float32)
        plan = load_only.plan(q, q, q, algorithm=algorithm, tiles=tiles, **what)
        (moved,) = launch_counted(plan).values()
        cost = fs.io_cost(
            algorithm, N=N, d=d, heads=heads, batch=batch, Br=tiles[0], Bc=tiles[1], **what
        )
        for found, right in zip(moved, (cost.reads, cost.writes), strict=True):
            assert found == {{name: n for name, n in right.items() if n}}, (algorithm, found, right)
"""


def test_loads_alone_move_what_the_closed_form_says():
    pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")
    program = SIMULATED.format(tests=os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
