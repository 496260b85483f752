"""Pipeline schedules: nothing overlaps that cannot, and the published ordering comes out."""

import csv
import io
import json
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flashsim import cli
from flashsim.cost.devices import device
from flashsim.cost.schedule import (
    MOST_CYCLES,
    MOST_TILES,
    PIPELINES,
    STAGES,
    UNITS,
    TileTimes,
    tile_times,
    timeline,
)
from flashsim.cost.schedule_report import MEASURED_AT, TABLE_2

ROOT = Path(__file__).parents[1]
cycles = st.integers(0, 5000).map(float)
times = st.builds(TileTimes, matmul=st.integers(1, 5000).map(float), exp=cycles, copy=cycles,
                  wait=st.integers(0, 500).map(float))  # fmt: skip
pipelines = st.sampled_from(list(PIPELINES))
tiles = st.integers(1, 12)
EPSILON = 1e-6


def utilisation(times, n=66):
    return {name: timeline(name, times, n).utilisation for name in PIPELINES}


def test_with_h100_rates_the_published_ablation_comes_out_in_order():
    """FlashAttention-3 (arXiv:2407.08608), Table 2, N = 8448, d = 128: 570 < 582 < 661 TFLOP/s."""
    found = utilisation(tile_times(device("h100")))
    assert sorted(TABLE_2, key=found.get) == sorted(TABLE_2, key=TABLE_2.get)
    assert found["plain"] < found["unspecialised"] < found["pipelined"] < found["both"]
    published = 582 / 661  # how much of the full pipeline is left without the overlap
    assert found["ping-pong"] / found["both"] == pytest.approx(published, abs=0.05)


@given(st.integers(1, 400).map(float))
def test_the_order_does_not_hang_on_the_assumed_wait(wait):
    found = utilisation(tile_times(device("h100"), wait=wait))
    assert found["unspecialised"] < found["ping-pong"]
    if wait >= 10:  # below, filling and draining the pipelines weighs as much
        assert found["ping-pong"] < found["both"]


def test_the_cycles_of_an_h100_tile_are_those_of_its_rates():
    """128 x 128, d = 128: 4096 FLOP and 16 exponentials a clock, 5120 / 132 bytes from the L2."""
    found = tile_times(device("h100"))
    assert (found.matmul, found.exp) == (2048, 1024)
    assert found.copy == pytest.approx(2 * 128 * 128 * 2 * 132 / 5120)
    fp8 = tile_times(device("h100"), fp8=True)
    assert fp8.matmul == pytest.approx(2048 * 989 / 1979, rel=1e-12)  # data-sheet rates
    assert (fp8.exp, fp8.copy) == (found.exp, found.copy / 2)


@given(pipelines, times, tiles)
def test_a_unit_does_one_thing_at_a_time_and_all_of_it(name, times, n):
    line = timeline(name, times, n)
    for unit in UNITS:
        mine = sorted((op.start_cycles, op.end_cycles) for op in line.operations if op.unit == unit)
        assert all(a[1] <= b[0] + EPSILON for a, b in pairwise(mine))
        assert line.busy_cycles(unit) == pytest.approx(n * getattr(times, unit))
    assert 0 < line.utilisation <= 1 + EPSILON


@given(pipelines, times, tiles)
def test_nothing_starts_before_what_it_needs_is_seen_to_end(name, times, n):
    pipeline, wait = PIPELINES[name], times.wait - EPSILON
    ops = {(op.what, op.tile, op.warpgroup): op for op in timeline(name, times, n).operations}
    groups = {group for _, _, group in ops if group is not None}
    assert len(groups) == (2 if pipeline.ping_pong else 1)
    assert len(ops) == n * (2 + 3 * len(groups))
    places = STAGES if pipeline.specialised else 1
    for tile in range(n):
        for w in groups:
            S, softmax, PV = (ops[what, tile, w] for what in ("S", "softmax", "PV"))
            assert S.start_cycles >= ops["K", tile, None].end_cycles + wait
            assert softmax.start_cycles >= S.end_cycles + wait
            assert PV.start_cycles >= softmax.end_cycles + wait
            assert PV.start_cycles >= ops["V", tile, None].end_cycles + wait
            if tile:  # a warpgroup asks for nothing while it computes a softmax
                assert S.start_cycles >= ops["softmax", tile - 1, w].end_cycles - EPSILON
            if tile >= places:
                before = tile - places
                assert ops["K", tile, None].start_cycles >= ops["S", before, w].end_cycles + wait
                assert ops["V", tile, None].start_cycles >= ops["PV", before, w].end_cycles + wait
            if not pipeline.specialised:  # all that was asked for before a turn has ended
                behind = int(pipeline.pipelined)  # V is loaded a turn after K, and so is P V
                for what, turn in (("K", tile), ("V", tile + behind)):
                    asked = [("softmax", turn - 1), ("PV", turn - 1 - behind)]
                    ends = [ops[x, n_, w].end_cycles + wait * (x == "PV") for x, n_ in asked
                            if n_ >= 0]  # fmt: skip
                    start = ops[what, tile, None].start_cycles
                    assert start >= max(ends, default=0) - EPSILON
            if tile and not pipeline.pipelined:
                assert S.start_cycles >= ops["PV", tile - 1, w].end_cycles - EPSILON
            elif tile:
                assert ops["PV", tile - 1, w].start_cycles >= S.end_cycles - EPSILON


@given(pipelines, times, tiles, st.sampled_from(["matmul", "exp", "copy", "wait"]))
def test_faster_units_never_take_longer(name, times, n, which):
    value = getattr(times, which) / 2
    faster = replace(times, **{which: max(value, 1.0) if which == "matmul" else value})
    slow, fast = timeline(name, times, n), timeline(name, faster, n)
    if getattr(faster, which) <= getattr(times, which):
        assert fast.total_cycles <= slow.total_cycles + EPSILON


@given(times, tiles)
def test_without_specialisation_all_but_the_load_of_v_is_one_after_the_other(times, n):
    line = timeline("plain", times, n)
    up_to_P = times.copy / 2 + times.matmul / 2 + times.exp + 3 * times.wait
    V_there = times.copy + times.wait
    a_tile = max(up_to_P, V_there) + times.matmul / 2
    assert line.total_cycles == pytest.approx(n * a_tile + (n - 1) * times.wait)


@given(times, tiles)
def test_without_specialisation_a_softmax_hides_the_product_before_it_but_no_load(times, n):
    half, product, wait = times.copy / 2, times.matmul / 2, times.wait
    first = half + wait + product + wait + times.exp
    PV_ends = max(half + wait + product, times.copy + wait) + product  # behind S, and V is there
    a_turn = max(first, PV_ends + wait)
    last = half + wait + product
    expected = first + (n - 1) * a_turn + last
    assert timeline("unspecialised", times, n).total_cycles == pytest.approx(expected)


def period(name, times):
    """Cycles of one more tile once the pipeline is full."""
    return timeline(name, times, 41).total_cycles - timeline(name, times, 40).total_cycles


@given(st.integers(400, 5000), st.floats(0, 0.5), st.floats(0, 0.1), st.floats(0, 0.3))
def test_the_period_of_a_full_pipeline_is_what_binds_it(matmul, exp, wait, copy):
    """Products that take at least twice the softmax: hand-overs bind, or the products alone."""
    times = TileTimes(matmul, exp * matmul, copy * matmul, wait * matmul)
    assert period("ping-pong", times) == pytest.approx(matmul + 2 * times.wait)
    late = max(
        0, times.wait + times.exp - matmul / 2
    )  # of the softmax, behind the product it is under
    assert period("pipelined", times) == pytest.approx(matmul + late)
    assert period("both", times) == pytest.approx(matmul)


def test_the_times_that_are_given_are_checked():
    for name, value in (
        ("matmul", 0), ("matmul", 5e-324), ("matmul", 1e308), ("exp", -1), ("exp", 1e300),
        ("copy", float("nan")), ("wait", "1"), ("wait", 1.01 * MOST_CYCLES),
    ):  # fmt: skip
        given_ = {"matmul": 1.0, "exp": 1.0, "copy": 1.0, "wait": 1.0, name: value}
        with pytest.raises((ValueError, TypeError), match=f"{name}=.*expected a number of cycles"):
            TileTimes(**given_)
    with pytest.raises(ValueError, match="pipeline='fast': expected one of 'plain'"):
        timeline("fast", TileTimes(1, 1, 1), 1)
    with pytest.raises(ValueError, match="tiles=0: expected an integer of at least 1"):
        timeline("both", TileTimes(1, 1, 1), 0)
    with pytest.raises(ValueError, match=f"tiles={MOST_TILES + 1}: .*below {MOST_TILES + 1}"):
        timeline("both", TileTimes(1, 1, 1), MOST_TILES + 1)
    with pytest.raises(ValueError, match="fp8=True: expected False, as a100-40 has no FP8"):
        tile_times(device("a100-40"), fp8=True)
    for name in ("Br", "Bc", "d"):
        with pytest.raises(ValueError, match=rf"^{name}=\d+: expected an integer .* below"):
            tile_times(device("h100"), **{name: 10**400})


def invoke(*arguments):
    runner = CliRunner(env={"COLUMNS": "80"})
    return runner.invoke(cli.app, ["schedule", *map(str, arguments)])


def refused(*arguments):
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return " ".join(result.stderr.split())


def asked(*arguments):
    return json.loads(invoke("--json", *arguments).stdout)


def test_the_command_shows_every_pipeline_and_what_was_measured_there():
    shown = invoke().stdout
    assert " ping-pong         2264   74.6%    90.5%   45.2%       895       582 " in shown
    assert max(map(len, shown.splitlines())) <= 80
    page = (ROOT / "docs" / "cost.md").read_text("utf-8")
    assert all(line.rstrip() in page for line in shown.splitlines() if "%" in line)


def test_what_was_measured_is_what_the_paper_prints():
    text = (ROOT / "flashsim" / "papers" / "data" / "published.toml").read_text("utf-8")
    row = next(row for row in tomllib.loads(text)["rows"] if row["key"] == "fa3-table2")
    assert row["published"] == [TABLE_2[key] for key in ("both", "ping-pong", "unspecialised")]
    assert all(MEASURED_AT[name] == row["setting"][name] for name in ("N", "d"))


@pytest.mark.parametrize(
    "other",
    ["--device h200", "--device h100-pcie", "--fp8", "-N 1", "-N 8449", "-d 64", "--Br 1",
     "--Bc 64", "--matmul 4096", "--exp 0", "--copy 1", "--wait 1e6"],
)  # fmt: skip
def test_what_was_measured_stands_beside_no_other_problem_device_or_times(other):
    shown = invoke(*other.split()).stdout
    assert "TFLOP/s" in shown
    assert "Table 2" not in shown
    assert "582" not in shown


@settings(max_examples=15)
@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 200), st.integers(1, 200))
def test_a_rate_is_flops_of_real_keys_over_the_time(N, d, Br, Bc):
    gpu = device("h100")
    document = asked("-N", N, "-d", d, "--Br", Br, "--Bc", Bc)
    for row in document["records"]:
        seconds = row["total_cycles"] / gpu.boost_clock_hz
        flops = gpu.sm_count * (2 * Br * N * d + 2 * Br * N * d)  # S = Q K^T, O += P V
        assert row["flops_per_second"] == pytest.approx(flops / seconds)
    said = f"counts {N % Bc} of its {Bc} keys" in " ".join(document["remarks"])
    assert said == (N % Bc > 0)


def test_products_that_take_twice_as_long_halve_the_rate_that_they_bind():
    found = asked("--matmul", 4096)["records"][-1]
    assert found["pipeline"] == "both"
    assert found["utilisation"] > 0.99
    assert found["flops_per_second"] == pytest.approx(989e12 / 2, rel=0.01)


@pytest.mark.parametrize("Bc", [1, 128])
def test_a_length_whose_timeline_would_take_long_is_refused_with_the_limit(Bc):
    limit = MOST_TILES * Bc
    for N in (limit + 1, 10**9):
        said = refused("-N", N, "--Bc", Bc)
        assert said == (
            f"flashsim: error: N={N}: expected at most {limit}, {MOST_TILES} key tiles of Bc={Bc}"
        )


@pytest.mark.parametrize("long", ["matmul", "exp", "copy", "wait"])
def test_the_longest_timeline_of_the_longest_times_loses_no_operation(long):
    """Of a few cycles beside 1e9; double precision keeps both."""
    found = timeline("both", replace(TileTimes(3, 3, 3, 3), **{long: MOST_CYCLES}), MOST_TILES)
    for unit in UNITS:
        expected = MOST_TILES * getattr(found.times, unit)
        assert found.busy_cycles(unit) == pytest.approx(expected, rel=0.01)


def test_large_numbers_fit_in_a_cell():
    shown = invoke("--exp", 1e9).stdout
    assert "exp 1 G" in shown
    assert " both               1 G " in shown
    assert "2.03 T" in invoke("--matmul", 1e-6, "--exp", 0, "--copy", 0, "--wait", 0).stdout
    for name in ("matmul", "exp", "copy", "wait"):
        assert f"{name}=1e+308: expected a number of cycles from" in refused(f"--{name}", 1e308)


def test_operations_need_a_format_that_has_them(tmp_path):
    for more in ([], ["--plot", tmp_path / "x.svg"]):
        assert "--operations: expected --json or --csv" in refused("--operations", *more)
    assert not list(tmp_path.iterdir())
    rows = list(csv.DictReader(io.StringIO(invoke("--operations", "--csv", "-N", 1).stdout)))
    assert len(rows) == sum(len(timeline(p, TileTimes(1, 1, 1), 1).operations) for p in PIPELINES)


def test_one_tile_is_no_tiles(tmp_path):
    picture = tmp_path / "x.svg"
    assert ": 1 key tile of 128" in invoke("-N", 128, "--plot", picture).stdout
    assert "of 1 key tile -->" in picture.read_text("utf-8")
    assert ": 2 key tiles of 128" in invoke("-N", 129).stdout


def test_the_timeline_is_data_and_a_picture(tmp_path):
    picture = tmp_path / "timeline.svg"
    document = json.loads(invoke("-N", 256, "--json", "--operations", "--plot", picture).stdout)
    records = [r for r in document["records"] if r["pipeline"] == "both"]
    assert [r["what"] for r in records[:3]] == ["K", "V", "S"]
    line = timeline("both", tile_times(device("h100")), 2)
    assert [r["end_cycles"] for r in records] == [op.end_cycles for op in line.operations]
    text = picture.read_text("utf-8")
    assert "<svg" in text
    lines = invoke("--csv", "--matmul", 10, "--exp", 0, "--copy", 0, "--wait", 0).stdout.split()
    assert lines[1].split(",")[:3] == ["plain", "660.0", "1.0"]
    assert invoke("--Bc", 0).exit_code == invoke("--matmul", 0).exit_code == 2
