"""Pipeline schedules: nothing overlaps that cannot, and the published ordering comes out."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flashsim import cli
from flashsim.cost.devices import device
from flashsim.cost.schedule import (
    PIPELINES,
    STAGES,
    UNITS,
    TileTimes,
    tile_times,
    timeline,
)

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
    assert found["plain"] < found["ping-pong"] < found["both"]
    assert found["plain"] < found["pipelined"] < found["both"]
    published = 582 / 661  # how much of the full pipeline is left without the overlap
    assert found["ping-pong"] / found["both"] == pytest.approx(published, abs=0.05)


@given(st.integers(1, 400).map(float))
def test_the_order_does_not_hang_on_the_assumed_wait(wait):
    found = utilisation(tile_times(device("h100"), wait=wait))
    assert found["plain"] < found["ping-pong"]
    if wait >= 10:  # below, filling and draining the pipelines weighs as much
        assert found["ping-pong"] < found["both"]


def test_the_cycles_of_an_h100_tile_are_those_of_its_rates():
    """128 x 128, d = 128: 4096 FLOP and 16 exponentials a clock, 5120 / 132 bytes from the L2."""
    found = tile_times(device("h100"))
    assert (found.matmul, found.exp) == (2048, 1024)
    assert found.copy == pytest.approx(2 * 128 * 128 * 2 * 132 / 5120)
    fp8 = tile_times(device("h100"), fp8=True)
    assert fp8.matmul == pytest.approx(1024, rel=1e-3)
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
            if tile and not pipeline.specialised:
                done = ops["PV", tile - 1, w].end_cycles
                assert ops["K", tile, None].start_cycles >= done + wait
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
    for name, value in (("matmul", 0), ("exp", -1), ("copy", float("nan")), ("wait", "1")):
        given_ = {"matmul": 1.0, "exp": 1.0, "copy": 1.0, "wait": 1.0, name: value}
        with pytest.raises((ValueError, TypeError), match=f"{name}=.*expected a number of cycles"):
            TileTimes(**given_)
    with pytest.raises(ValueError, match="pipeline='fast': expected one of 'plain'"):
        timeline("fast", TileTimes(1, 1, 1), 1)
    with pytest.raises(ValueError, match="tiles=0: expected an integer of at least 1"):
        timeline("both", TileTimes(1, 1, 1), 0)
    with pytest.raises(ValueError, match="fp8=True: expected False, as a100-40 has no FP8"):
        tile_times(device("a100-40"), fp8=True)


def invoke(*arguments):
    runner = CliRunner(env={"COLUMNS": "80"})
    return runner.invoke(cli.app, ["schedule", *map(str, arguments)])


def test_the_command_shows_every_pipeline_and_what_was_measured_there():
    shown = invoke().stdout
    assert " ping-pong     2264   74.6%    90.5%   45.2%       895" in shown
    assert "570 TFLOP/s without specialisation" in " ".join(shown.split())
    assert "570" not in invoke("--device", "h200").stdout
    assert max(map(len, shown.splitlines())) <= 80
    page = (Path(__file__).parent.parent / "docs" / "cost.md").read_text("utf-8")
    assert all(line.rstrip() in page for line in shown.splitlines() if "%" in line)


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
