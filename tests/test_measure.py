"""Measuring without a GPU: what ncu prints, the comparison on the recorded data, plain refusals."""

import csv
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flashsim import cli
from flashsim.measure import bench, ceilings, compare, parse_csv, rank_correlation, recorded
from flashsim.measure.bench import write
from flashsim.measure.cases import STEPS, Case, from_dict, usual
from flashsim.measure.compare import Series, dram_traffic
from flashsim.measure.counters import METRICS, by_case, count

L2_BYTES = 60 * 1024**2  # of an H200, which has 132 multiprocessors


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


@pytest.mark.parametrize("algorithm, backward", STEPS)
def test_steps_of_a_case_add_up_to_the_closed_form(algorithm, backward):
    """But for what enters no multiprocessor: the L2 adds up FlashAttention-2's dQ."""
    case = Case(algorithm, (2, 3, 96, 16), (16, 8), backward)
    if algorithm == "split_kv":
        case = Case(algorithm, (2, 3, 96, 16), (4, 8), queries=5)
    whole = case.whole_cost(parts=3)
    steps = [case.cost(step, parts=3) for step in case.steps]
    at_l2 = whole.reads["dQ"] * 4 if (algorithm, backward) == ("flash2", True) else 0
    assert sum(step.read_bytes for step in steps) == whole.read_bytes - at_l2
    assert sum(step.written_bytes for step in steps) == whole.written_bytes
    assert sum(step.flops for step in steps) == whole.flops
    assert sum(step.exps for step in steps) == whole.exps


def test_the_parts_of_split_kv_read_the_keys_once_between_them():
    case = Case("split_kv", (2, 3, 96, 16), (4, 8), queries=5)
    one, three = case.whole_cost(), case.whole_cost(parts=3)
    assert three.reads["K"] == one.reads["K"] == 2 * 2 * 3 * 96 * 16
    assert three.reads["Q"] == 3 * one.reads["Q"] == 3 * 2 * 3 * 5 * 16
    assert three.reads["O_parts"] == three.writes["O_parts"] == 3 * one.writes["O"]


def test_usual_cases_cover_every_kernel_and_come_back_from_json():
    cases = usual()
    assert {(case.algorithm, case.backward) for case in cases} == set(STEPS)
    assert all(from_dict(json.loads(json.dumps(c.as_dict()))) == c for c in cases)
    assert usual(((1, 1, 64, 8),))[0].shape == (1, 1, 64, 8)


def test_dram_sees_each_array_once_if_the_l2_holds_what_is_read_again():
    case = Case("flash2", (4, 16, 4096, 64), (128, 64))
    assert dram_traffic(case, "flash2", 264, L2_BYTES).read_bytes == 3 * 4 * 16 * 4096 * 64 * 4


def test_dram_sees_keys_once_a_wave_if_the_l2_does_not_hold_them():
    """132 blocks a wave, 1024 a head: 8 waves meet the first head, 9 the second, one both."""
    case = Case("flash2", (1, 2, 131072, 128), (128, 64), dtype="float16")
    found = dram_traffic(case, "flash2", 132, L2_BYTES).read_bytes
    assert found == 131072 * 128 * 2 * (2 + 17 * 2)
    assert found == pytest.approx(1.21e9, rel=0.01)  # measured in another kernel


def test_recorded_bytes_are_those_of_the_closed_form():
    found = compare()
    assert not found.failures
    assert {(r["algorithm"], r["backward"]) for r in found.records} == set(STEPS)
    for r in found.records:
        if r["step"] != "zeros":  # it reads nothing
            assert r["sm_read_ratio"] == pytest.approx(1, abs=0.01), r["label"]
            assert r["dram_read_ratio"] == pytest.approx(1, abs=0.10), r["label"]
        assert r["sm_written_ratio"] == pytest.approx(1, abs=0.03), r["label"]


def test_a_launch_takes_as_long_as_an_empty_one_like_it_and_its_bytes_or_multiply_adds():
    data = recorded()
    before = [r["model_ms"] for r in compare(data).records]
    data["rows"][0]["launch_seconds"] += 1e-3
    after = [r["model_ms"] for r in compare(data).records]
    assert after[0] == pytest.approx(before[0] + 1)
    assert after[1:] == before[1:]


@given(blocks=st.integers(1, 5000), sharing=st.integers(1, 600))
def test_groups_are_as_large_as_each_other_and_about_as_large_as_in_the_launch(blocks, sharing):
    groups = ceilings.groups_of(blocks, sharing)
    sizes = np.bincount(np.arange(blocks) * groups // blocks)  # as the bare loops do
    assert len(sizes) == groups
    assert sizes.max() - sizes.min() <= 1
    assert sharing >= blocks or sharing / 2 < sizes.mean() <= 2 * sharing
    assert sharing > 1 or groups == blocks


def test_no_group_is_left_over():
    """Of 264 blocks of which 64 share tiles, none of eight that walk alone."""
    assert [ceilings.groups_of(*x) for x in ((264, 64), (132, 64), (528, 256), (132, 256))] == [
        4, 2, 2, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("sharing", [1, 3])
def test_what_walks_tiles_is_held_against_a_loop_that_stages_them(monkeypatch, back, sharing):
    """From the DRAM where blocks share them; at one rate where a tile goes back."""
    asked = []

    def measured(name):
        return lambda *what: asked.append((name, *what)) or len(asked)

    for name in ("staged", "bare_reads", "bare_writes", "bare_multiply_adds"):
        monkeypatch.setattr(ceilings, name, measured(name))
    turn = SimpleNamespace(back=back)
    step = SimpleNamespace(
        threads=64, shared_bytes=1000, under_way=(4, 16), sharing=sharing, turn=turn
    )
    L2, DRAM, place = ceilings.L2_BYTES, ceilings.DRAM_BYTES, (12, 64, 1000)
    found = ceilings.rates(12, step)
    assert asked[:2] == [
        ("staged", *place, L2 if sharing == 1 else DRAM, turn, 12 // sharing),
        ("staged", *place, DRAM, turn, 12),
    ]
    written = found["l2_written_bytes_per_second"], found["dram_written_bytes_per_second"]
    read = found["l2_bytes_per_second"], found["dram_bytes_per_second"]
    assert read == (1, 2)
    assert (written == read) == back
    writes = [("bare_writes", *place, size, 4) for size in (L2, DRAM)]
    assert asked[2:] == ([] if back else writes) + [("bare_multiply_adds", 12, 64)]
    step.turn = None
    del asked[:]
    ceilings.rates(12, step)
    assert [name for name, *_ in asked[:2]] == ["bare_reads"] * 2


def test_recorded_time_of_launches_that_bytes_bind_is_within_15_percent_of_the_model():
    bound = [r for r in compare().records if r["bytes_bind"]]
    assert sum(r["loads_only"] for r in bound) == 17  # all of them
    assert len(bound) == 33
    for r in bound:
        assert r["ms_ratio"] == pytest.approx(1, abs=0.15), r["label"]


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


NOTHING = '{"header": {}, "ceilings": {}, "rows": []}'
NO_ROW = '{"header": {}, "ceilings": {}, "rows": [1]}'


@pytest.mark.parametrize("text", ["{}", "[]", "3", "not JSON", NOTHING, NO_ROW])
def test_compare_refuses_another_file_in_one_line(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    refused("expected a data set", "compare", file)


@pytest.mark.parametrize(
    "name, value, said",
    [
        (
            "blocks_per_sm",
            None,
            "rows[1] of the data set is not as `flashsim bench",
        ),
        ("ms", float("nan"), "ms=nan: expected a positive number"),
        ("shape", [4, 16], "rows[1]"),
        ("step", "bogus", "bogus"),
    ],
)
def test_compare_refuses_a_row_that_lacks_something_or_is_wrong(tmp_path, name, value, said):
    data = recorded()
    del data["rows"][1][name]
    if value is not None:
        data["rows"][1][name] = value
    file = tmp_path / "short.json"
    write(data, file)
    refused(said, "compare", file)


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

    def counted(cases, on_step):
        return [[{k: row[k] for k in kept if k in row} for row in rows_of(c)] for c in cases]

    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(bench, "compile_all", lambda cases, on_step: None)
    monkeypatch.setattr(bench, "case_rows", timed)
    monkeypatch.setattr(bench.counters, "count", counted)
    monkeypatch.setattr(bench, "peer_rows", lambda *what: [])
    monkeypatch.setattr(bench, "header", lambda flush, commit: data["header"])
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
from dataclasses import replace
import numpy as np
from flashsim.measure.cases import LOAD_ONLY, STEPS, Case
from kernel_process import launch_counted
cases = [
    Case(algorithm, (1, 1, 20, 8), (8, 8), backward) for algorithm, backward in STEPS
]
cases += [replace(case, loads_only=True) for case in cases if case.algorithm in LOAD_ONLY]
cases.append(Case("split_kv", (2, 1, 17, 6), (4, 8), queries=3))
rng = np.random.default_rng(0)
for case in cases:
    if case.loads_only and case.backward:
        continue
    batch, heads, N, d = case.shape
    rows = (case.Nq, N, N, case.Nq)
    plan = case.plan(*(rng.standard_normal((batch, heads, n, d)).astype(np.float32) for n in rows))
    moved = launch_counted(plan)
    assert [name.removeprefix("load-only ") for name in moved] == list(case.steps), moved
    for (name, (reads, writes)), step in zip(moved.items(), case.steps, strict=True):
        cost = case.cost(step, plan.parts)
        if step == "flash2_backward":
            del reads["dQ"]  # by the L2, which adds up
        if step == "softmax":
            del writes["L"]  # no part of Algorithm 0
        assert sum(reads.values()) == cost.read_elements, (case, step, reads, cost.reads)
        assert sum(writes.values()) == cost.written_elements, (case, step, writes, cost.writes)
"""


def simulated(program):
    pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")
    done = subprocess.run(
        [sys.executable, "-c", program.format(tests=os.path.dirname(__file__))],
        capture_output=True, text=True, check=False,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_launches_move_what_the_closed_form_of_their_step_says():
    """Every kernel that is measured, with and without its arithmetic."""
    simulated(SIMULATED)


BARE = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
from flashsim.kernels import bare, gpu
from flashsim.kernels.launch import Turn
from flashsim.measure import ceilings
from flashsim.measure.cases import LOAD_ONLY, STEPS, Case
from kernel_process import launch_counted

# A turn is what its kernel walks: the two arrays that are read most.
ran = []
ceilings.milliseconds = lambda calls, **more: ran.append(calls[0].args[0]) or dict(ms=1.0)
array, few = ceilings._array, lambda *what: array(4, *what[1:])
turns = 0
for algorithm, backward in STEPS:
    for loads_only in (False, True)[: 2 if algorithm in LOAD_ONLY and not backward else 1]:
        case = Case(algorithm, (1, 1, 16, 8), (4, 8), backward, loads_only)
        x = np.ones((1, 1, 16, 8), np.float32)
        plan = case.plan(x, x, x, x)
        moved = launch_counted(plan)
        for step in plan.steps:
            reads, writes = moved[step.name]
            if step.name == "flash2_backward":
                del reads["dQ"]  # by the L2, which adds up
            if step.turn:
                turns += 1
                most = max(reads.values())
                first, second = (name for name, n in reads.items() if n == most)
                side = 0 if first == "Q" else 1
                assert step.turn == (case.tiles[side], 8, ("float32", "float32"), second == "O")
                assert step.turn.back == (writes.get(second, 0) >= most), (step.name, writes)
            # What is compiled ahead is what runs.
            ahead = dict(ceilings.kernels(step))
            del ran[:]
            ceilings._array = few
            ceilings.empty_launch(step.grid, step.threads, step.shared_bytes)
            ceilings.rates(step.grid, step)
            ceilings._array = array
            assert not set(ran) - set(ahead), step.name
assert turns == 9, turns


class Noting:
    def __init__(self, rows, columns):
        self.shape, self.read, self.written = (rows, columns), [], []

    def __getitem__(self, where):
        self.read.append(tuple(map(int, where)))
        return np.float32(1 + where[0])

    def __setitem__(self, where, value):
        assert value == 1 + where[0]
        self.written.append(tuple(map(int, where)))


# Five blocks in two groups, three turns: six tiles, of which a group of three and one of two.
for back in (False, True):
    A, B, out = Noting(64, 8), Noting(64, 8), np.zeros(1, np.float32)
    loop = bare.staged(Turn(4, 8, ("float32", "float32"), back), 4)
    gpu.launch(loop, 5, 4, 4 * 2 * 4 * 12, 0, (A, B, np.int64(3), np.int64(2), out))
    assert len(A.read) == len(B.read) == 5 * 3 * 4 * 8
    assert len(B.written) == (len(B.read) if back else 0)
    assert not A.written
    often = np.zeros((64, 8), int)
    for where in A.read:
        often[where] += 1
    assert (often[:24].reshape(6, 4, 8).transpose(1, 2, 0) == [3, 2, 3, 2, 3, 2]).all()
    assert not often[24:].any()
"""


def test_bare_loops_walk_what_the_launch_walks():
    """So much a turn, together in groups; and what runs is what was compiled ahead."""
    simulated(BARE)
