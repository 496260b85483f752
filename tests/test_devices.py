"""The GPU presets: figures as published, dense, sourced, and consistent with each other."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from flashsim.cost.devices import ALIASES, DEVICES, KB, MB, Device, device

each_device = pytest.mark.parametrize("preset", DEVICES.values(), ids=DEVICES)

# key, HBM GB/s, SMs, fp16, fp8 and fp32 TFLOP/s (dense), shared memory KB a block and an SM, L2 MB
PUBLISHED = [
    ("t4", 320, 40, 65, None, 8.1, 64, 64, 4),
    ("v100", 900, 80, 125, None, 15.7, 96, 96, 6),
    ("a100-40", 1555, 108, 312, None, 19.5, 163, 164, 40),
    ("a100-80", 2039, 108, 312, None, 19.5, 163, 164, 40),
    ("rtx3090", 936, 82, 71, None, 35.6, 99, 100, 6),
    ("rtx4090", 1008, 128, 165, 330, 82.6, 99, 100, 72),
    ("l4", 300, 58, 121, 242, 30.3, 99, 100, 48),
    ("h100", 3350, 132, 989, 1979, 67, 227, 228, 50),
    ("h100-pcie", 2000, 114, 756, 1513, 51, 227, 228, 50),
    ("h200", 4800, 132, 989, 1979, 67, 227, 228, 60),
    ("b200", 8000, 148, 2250, 4500, 80, 227, 228, 126),
    ("mi300x", 5300, 304, 1307, 2615, 163, 64, 64, 32),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_presets_hold_the_published_figures(row: tuple[Any, ...]) -> None:
    key, hbm, sms, half, fp8, fp32, block, sm, l2 = row
    preset = DEVICES[key]
    assert preset.hbm_bytes_per_second == pytest.approx(hbm * 1e9)
    assert preset.sm_count == sms
    assert preset.half_flops_per_second == pytest.approx(half * 1e12)
    assert preset.fp8_flops_per_second == (None if fp8 is None else pytest.approx(fp8 * 1e12))
    assert preset.fp32_flops_per_second == pytest.approx(fp32 * 1e12)
    assert preset.sram_bytes_per_block == block * KB
    assert preset.sram_bytes_per_sm == sm * KB
    assert preset.l2_bytes // MB == l2


def test_every_preset_is_checked_against_a_published_row() -> None:
    assert list(DEVICES) == [row[0] for row in PUBLISHED]


@each_device
def test_every_figure_has_exactly_one_source(preset: Device) -> None:
    cited = [name for group in preset.sources for name in group.split(", ")]
    described = {"key", "name", "sources", "notes"}
    assert sorted(cited) == sorted(f.name for f in fields(Device) if f.name not in described)
    assert all(preset.sources.values())


@each_device
def test_exponentials_run_at_sixteen_a_clock_an_sm(preset: Device) -> None:
    """FA3 (arXiv:2407.08608), footnote 5, rounds 16 * 132 * 1.83 GHz = 3.865e12 to 3.9e12."""
    rate = 16 * preset.sm_count * preset.boost_clock_hz
    assert preset.exp_per_second == pytest.approx(rate, rel=0.02)


@each_device
def test_a_matrix_unit_does_a_power_of_two_flops_a_clock(preset: Device) -> None:
    """Rate, SM count and clock often come from different documents: they must fit together."""
    per_clock = preset.half_flops_per_second / (preset.sm_count * preset.boost_clock_hz)
    assert per_clock == pytest.approx(2 ** round(math.log2(per_clock)), rel=0.01)


@each_device
def test_fp8_doubles_the_half_rate_where_it_exists(preset: Device) -> None:
    if preset.fp8_flops_per_second is not None:
        doubled = 2 * preset.half_flops_per_second
        assert preset.fp8_flops_per_second == pytest.approx(doubled, rel=0.01)


@each_device
def test_flops_per_byte_are_those_of_a_dense_gpu(preset: Device) -> None:
    """The widely copied errors (L4 at 3350 GB/s; any H100 or L4 with sparsity) fall outside."""
    ratio = preset.half_flops_per_second / preset.hbm_bytes_per_second
    assert 50 < ratio < 450


@pytest.mark.parametrize(
    ("key", "sparse_half", "sparse_fp8"),
    [
        ("a100-80", 624e12, None),
        ("rtx3090", 142e12, None),
        ("rtx4090", 330.4e12, 660.6e12),
        ("l4", 242e12, 485e12),
        ("h100", 1979e12, 3958e12),
        ("h100-pcie", 1513e12, 3026e12),
        ("h200", 1979e12, 3958e12),
        ("b200", 4500e12, 9000e12),
    ],
)
def test_rates_are_half_of_those_printed_with_sparsity(
    key: str, sparse_half: float, sparse_fp8: float | None
) -> None:
    assert DEVICES[key].half_flops_per_second == pytest.approx(sparse_half / 2, rel=0.01)
    if sparse_fp8 is not None:
        assert DEVICES[key].fp8_flops_per_second == pytest.approx(sparse_fp8 / 2, rel=0.01)


@each_device
def test_a_block_may_use_no_more_than_its_sm_has(preset: Device) -> None:
    """From compute capability 8.0 on, CUDA keeps 1 KB of shared memory a block for itself."""
    reserved = 0 if preset.compute_capability in {"7.0", "7.5", "gfx942"} else KB
    assert preset.sram_bytes_per_sm - preset.sram_bytes_per_block == reserved


@each_device
def test_registers_outweigh_shared_memory(preset: Device) -> None:
    assert preset.register_bytes_per_sm > preset.sram_bytes_per_sm


@each_device
def test_lookup_ignores_case(preset: Device) -> None:
    assert device(preset.key.upper()) is preset
    assert preset.key == preset.key.lower()


def test_aliases_name_presets_and_hide_none() -> None:
    assert device("A100") is DEVICES["a100-80"]
    assert device("h100-SXM") is DEVICES["h100"]
    assert set(ALIASES.values()) <= set(DEVICES)
    assert not set(ALIASES) & set(DEVICES)


@pytest.mark.parametrize("name", ["h1000", "", None])
def test_an_unknown_name_is_refused_with_the_alternatives(name: str) -> None:
    with pytest.raises(ValueError, match="expected one of") as error:
        device(name)
    assert str(error.value).startswith(f"device={name!r}: expected one of t4, v100, ")
    assert all(known in str(error.value) for known in [*DEVICES, *ALIASES])


@each_device
def test_memory_time_is_bytes_over_the_peak_rate(preset: Device) -> None:
    assert preset.memory_seconds(preset.hbm_bytes_per_second) == 1.0
    assert preset.memory_seconds(0) == 0.0


def test_presets_are_hashable() -> None:
    assert len(set(DEVICES.values())) == len(DEVICES)
