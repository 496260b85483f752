"""Time over peak rates: relations, published arguments and times, FlashAttention-4's cycles."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.cost.devices import DEVICES, device
from flashsim.cost.roofline import Roofline, tile_cycles

amounts = st.integers(0, 10**15)
gpus = st.sampled_from(list(DEVICES.values()))
rooflines = st.builds(
    Roofline, gpus, st.sampled_from(["float16", "float32"]), amounts, amounts, amounts
)


def timed(gpu, cost, dtype="float16", **what):
    return replace(Roofline(gpu, dtype, cost.total_bytes, cost.flops, cost.exps), **what)


@given(rooflines)
def test_the_serial_time_is_between_the_lower_time_and_three_times_it(time):
    """Three resources: their sum is at most three times the longest."""
    assert time.lower_seconds <= time.serial_seconds <= 3 * time.lower_seconds * (1 + 1e-15)
    assert time.seconds[time.binds] == time.lower_seconds
    assert sum(time.seconds.values()) == time.serial_seconds


@given(rooflines)
def test_each_resource_takes_what_it_is_given_over_its_own_rate(time):
    gpu = time.gpu
    rate = gpu.half_flops_per_second if time.dtype == "float16" else gpu.fp32_flops_per_second
    assert time.seconds["memory"] == time.hbm_bytes / gpu.hbm_bytes_per_second
    assert time.seconds["matmul"] == time.flops / rate
    assert time.seconds["exp"] == time.exps / gpu.exp_per_second


@given(rooflines)
def test_twice_the_bandwidth_halves_the_memory_time_and_no_other(time):
    wider = replace(time.gpu, hbm_bytes_per_second=2 * time.gpu.hbm_bytes_per_second)
    fast = replace(time, gpu=wider)
    assert fast.seconds == {**time.seconds, "memory": time.seconds["memory"] / 2}
    assert fast.lower_seconds <= time.lower_seconds


@given(rooflines)
def test_what_binds_is_memory_left_of_the_ridge(time):
    """Without exponentials: the ridge is where FLOPs a byte are the rates' quotient."""
    time = replace(time, exps=0)
    if time.flops_per_byte is None:
        assert time.hbm_bytes == 0
        return
    ridge = time.gpu.flops_per_second(time.dtype) / time.gpu.hbm_bytes_per_second
    if time.flops_per_byte < ridge * (1 - 1e-12):
        assert time.binds == "memory"
    elif time.flops_per_byte > ridge * (1 + 1e-12):
        assert time.binds == "matmul"


@pytest.mark.parametrize("key", [key for key in DEVICES if key != "t4"])
def test_standard_attention_is_memory_bound_and_flash_attention_with_large_tiles_is_not(key):
    """d = 64, a whole head on chip: 4 N^2 elements against 4 N d."""
    gpu, N, d = DEVICES[key], 4096, 64
    standard = fs.io_cost("standard", N=N, d=d, Br=N, Bc=N, dtype="float16")
    flash = fs.io_cost("flash2", N=N, d=d, Br=N, Bc=N, dtype="float16")
    assert timed(gpu, standard).binds == "memory"
    assert timed(gpu, flash).binds in ("matmul", "exp")
    assert timed(gpu, flash).lower_seconds < timed(gpu, standard).lower_seconds


def test_exponentials_take_half_of_the_matmul_cycles_on_an_h100():
    """FA3 (arXiv:2407.08608), section 3.1: 989 TFLOP/s against 3.9 T exponentials/s.

    For d = 128 there are 512 FLOPs an exponential and 256 times the throughput, so exponentials
    can take half as long as the products. Halving d makes them take as long.
    """
    h100 = device("h100")
    cost = fs.io_cost("flash2", N=8192, d=128, Br=128, Bc=128, dtype="float16")
    time = timed(h100, cost, exps=8192 * 8192)
    assert cost.flops == 512 * time.exps
    assert h100.half_flops_per_second / h100.exp_per_second == pytest.approx(256, rel=0.01)
    assert time.seconds["exp"] / time.seconds["matmul"] == pytest.approx(0.5, abs=0.005)
    cycles = tile_cycles(h100)
    assert (cycles.matmul, cycles.exp) == (2048, 1024)
    narrow = tile_cycles(h100, d=64)
    assert narrow.exp == narrow.matmul


def test_flash_attention_3_beats_the_serial_time_only_with_both_overlaps():
    """FA3, Table 2: batch 4, N = 8448, 16 heads, d = 128 on an H100.

    3.538 ms with softmax under the products within and between warpgroups; 4.021 ms without the
    one, 4.105 ms without the other. With an L2 that serves all re-reads, no overlap at all would
    take 3.7 ms, and the products alone 2.36 ms.
    """
    N, d, heads = 8448, 128, 64
    cost = fs.io_cost("flash2", N=N, d=d, heads=heads, Br=128, Bc=128, dtype="float16")
    time = timed(device("h100"), cost, hbm_bytes=2 * 4 * N * d * heads)
    assert time.binds == "matmul"
    assert time.lower_seconds == pytest.approx(2.36e-3, abs=5e-6)
    assert time.lower_seconds < 3.538e-3 < time.serial_seconds < 4.021e-3 < 4.105e-3


def test_what_binds_figure_2_middle_turns_from_memory_to_matmul_beyond_bc_256():
    """FA1 (arXiv:2205.14135), Fig. 2 middle, forward, A100-40: 8.60, 4.70, 3.30, 3.20 ms.

    For Bc = 64, 128, 256, 512. The paper: beyond 256 the runtime is bottlenecked by other factors.
    Q, K, V and O in float16, as its GB are; no time is below the lower one.
    """
    N, d, heads, measured_ms = 1024, 64, 1024, {64: 8.60, 128: 4.70, 256: 3.30, 512: 3.20}
    for Bc, ms in measured_ms.items():
        cost = fs.io_cost(
            "flash1", N=N, d=d, heads=heads, Br=64, Bc=Bc, convention="elided", dtype="float16"
        )
        time = timed(device("a100-40"), cost, hbm_bytes=2 * (3 * N // Bc + 1) * N * d * heads)
        assert time.binds == ("memory" if Bc <= 256 else "matmul")
        assert time.lower_seconds < ms / 1e3


@pytest.mark.parametrize(
    "algorithm, tiles, published_ms, lower_ms",
    [("standard", (1024, 1024), 41.7, 16.23), ("flash1", (64, 256), 7.3, 3.34)],
)
def test_no_published_time_of_figure_2_left_is_below_the_lower_one(
    algorithm, tiles, published_ms, lower_ms
):
    """FA1, Fig. 2 left: GPT-2 medium, 64 x 16 heads, forward and backward on an A100-40.

    Accumulators and scores count as float16, as in its GB; without the kernels that mask and drop,
    standard attention has 25.2 of the 40.3 GB to move. Memory binds it in both passes;
    FlashAttention's backward pass is bound by its products.
    """
    Br, Bc = tiles
    times = []
    for backward in (False, True):
        cost = fs.io_cost(
            algorithm, N=1024, d=64, heads=1024, Br=Br, Bc=Bc, dtype="float16", backward=backward,
            convention="elided",
        )  # fmt: skip
        times.append(timed(device("a100-40"), cost, hbm_bytes=2 * cost.total_elements))
    lower = 1e3 * sum(time.lower_seconds for time in times)
    assert lower == pytest.approx(lower_ms, rel=0.005)
    assert lower < published_ms
    assert [time.binds for time in times] == (
        ["memory", "matmul"] if algorithm == "flash1" else ["memory", "memory"]
    )


@pytest.mark.parametrize(
    "what, cycles",
    [
        ({}, (1024, 1024, 768)),
        ({"Br": 256}, (2048, 2048, 1536)),
        ({"backward": True}, (2560, 1024, 3328)),
        ({"backward": True, "ctas": 2}, (2560, 1024, 2688)),
    ],
)
def test_the_cycles_of_a_tile_are_flash_attention_4s(what, cycles):
    """FA4 (arXiv:2603.05451), Tables 1 and 3: B200, 128 x 128 scores, d = 128; matmul, exp, SMEM.

    8192 bf16 FLOPs, 16 exponentials and 128 bytes of shared memory a clock. Two query tiles double
    everything; two thread blocks that share an MMA read half of each right operand.
    """
    b200 = device("b200")
    assert (b200.half_flops_per_clock, b200.exp_per_clock, b200.sram_bytes_per_clock) == (
        8192, 16, 128,
    )  # fmt: skip
    found = tile_cycles(b200, **what)
    assert (found.matmul, found.exp, found.sram) == cycles


def test_shared_memory_cycles_count_the_operands_one_by_one():
    """In tiles of 128 x 128 bf16, 256 cycles each.

    Forward: Q and K of S, V of O. Backward: K, Q; V, dO; dO of dV; Q of dK; dS, K of dQ; dS
    written; dQ in float32, which counts double, in and out.
    """
    unit = 128 * 128 * 2 / 128
    assert tile_cycles(device("b200")).sram == 3 * unit
    assert tile_cycles(device("b200"), backward=True).sram == (8 + 1 + 2 * 2) * unit


@given(st.sampled_from([16, 64, 128, 256]), st.sampled_from([64, 128]), st.booleans())
def test_cycles_of_tiles_are_the_flops_and_exponentials_of_the_closed_form(B, d, backward):
    gpu = device("a100")
    cost = fs.io_cost("flash2", N=B, d=d, Br=B, Bc=B, backward=backward)
    cycles = tile_cycles(gpu, B, B, d, backward=backward)
    assert cycles.matmul * gpu.half_flops_per_clock == cost.flops
    assert cycles.exp * gpu.exp_per_clock == cost.exps - (0 if backward else B)  # the rescaling
    assert cycles.sram is None


@pytest.mark.parametrize("key", DEVICES)
def test_rates_by_dtype_are_those_of_the_preset(key):
    gpu = DEVICES[key]
    assert gpu.flops_per_second("float16") == gpu.half_flops_per_second
    assert gpu.flops_per_second("float32") == gpu.fp32_flops_per_second
    if gpu.compute_capability in ("7.0", "7.5"):
        with pytest.raises(ValueError, match=f"dtype='bfloat16': expected .* {key}: float16, floa"):
            gpu.flops_per_second("bfloat16")
    else:
        assert gpu.flops_per_second("bfloat16") == gpu.half_flops_per_second
    with pytest.raises(ValueError, match="dtype='float64': expected one with a rate"):
        gpu.flops_per_second("float64")


def invoke(*arguments, columns=120):
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return runner.invoke(cli.app, ["roofline", *map(str, arguments)])


def test_the_command_shows_the_times_of_the_closed_form():
    found = json.loads(invoke("-N", 1000, "-d", 32, "--backward", "--causal", "--json").stdout)
    h200 = device("h200")
    for r in found["records"]:
        cost = fs.io_cost(
            r["algorithm"], N=1000, d=32, heads=16, batch=4, Br=r["Br"], Bc=r["Bc"],
            is_causal=True, dtype="float16", convention=r["convention"],
            backward=r["pass"] == "backward", sram_bytes=h200.sram_bytes_per_block,
        )  # fmt: skip
        time = timed(h200, cost)
        assert {name: r[f"{name}_seconds"] for name in time.seconds} == time.seconds
        assert (r["lower_seconds"], r["serial_seconds"], r["binds"]) == (
            time.lower_seconds, time.serial_seconds, time.binds,
        )  # fmt: skip
        matrices = 7 if r["pass"] == "backward" else 4
        assert r["compulsory_bytes"] == 2 * matrices * 1000 * 32 * 64
        ideal = replace(time, hbm_bytes=r["compulsory_bytes"])
        assert r["perfect_l2_seconds"] == ideal.lower_seconds <= time.lower_seconds
    assert {r["pass"] for r in found["records"]} == {"forward", "backward"}


def test_the_command_shows_flash_attention_4s_cycles():
    shown = invoke("--device", "b200", "-d", 128)
    assert "forward              1024   1024    768           100%" in shown.stdout
    assert "backward             2560   1024   3328            40%" in shown.stdout
    found = json.loads(invoke("--device", "b200", "-d", 128, "--json").stdout)
    assert found["tile_cycles"]["backward"] == asdict(tile_cycles(device("b200"), backward=True))


def test_the_command_draws_a_roofline(tmp_path):
    for name in ("roofline.png", "roofline.svg"):
        assert invoke("--backward", "--plot", tmp_path / name).exit_code == 0
        assert (tmp_path / name).stat().st_size > 10_000


def test_no_two_algorithms_share_a_mark(tmp_path, monkeypatch):
    drawn = {}

    def plot(axes, x, *rest, **style):
        if "marker" in style:
            name = style["label"].removesuffix(", backward")
            drawn.setdefault(style["marker"], set()).add(name)
        return own(axes, x, *rest, **style)

    own = Axes.plot
    monkeypatch.setattr(Axes, "plot", plot)
    assert invoke("--backward", "--plot", tmp_path / "roofline.svg").exit_code == 0
    assert all(len(names) == 1 for names in drawn.values()), drawn
    assert {"flash1:literal"} in drawn.values()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_number_is_cut_at_any_width(columns):
    shown = invoke("-N", 2**20, "--backward", columns=columns).stdout
    assert "…" not in shown
    assert all(len(line) <= columns for line in shown.splitlines())


def test_a_dtype_without_a_rate_is_refused():
    result = invoke("--dtype", "float64")
    assert result.exit_code == 2
