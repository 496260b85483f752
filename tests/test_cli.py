"""The command line: every check shows in table, JSON and exit code; bad input is one line and 2."""

from __future__ import annotations

import csv
import json
import os
import pickle
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli, layouts, tables, verify
from flashsim.attention import Attention
from flashsim.cost.devices import DEVICES
from flashsim.inputs import random_inputs, read_inputs
from flashsim.reference import exact
from flashsim.sample import load_sample

SMALL = ["run", "--shape", "1,2,40,8"]
VARIANTS = ["standard", "flash1:literal", "flash1:elided", "flash2"]
BACKWARD = [*VARIANTS[:3], "flash2:literal", "flash2:elided", "flash2-two-kernel"]
COMMANDS = ["run", "io", "sweep", "layouts", "devices"]
SPARSE = ["block_sparse:literal", "block_sparse:elided"]


def invoke(*arguments: object, columns: int = 120) -> Any:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return runner.invoke(cli.app, [str(a) for a in arguments])


def document(*arguments: object) -> dict[str, Any]:
    """What a command prints with --json, as strict JSON."""
    result = invoke(*arguments, "--json")
    return dict(json.loads(result.stdout, parse_constant=lambda x: pytest.fail(f"{x} in JSON")))


def subprocess_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashsim", *arguments],
        capture_output=True, text=True, encoding="utf-8", env={**os.environ, **environment},
        check=False,
    )  # fmt: skip


def arrays(**more: Any) -> dict[str, Any]:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 20, 8), np.float32)
    return {"q": q, "k": k, "v": v, **more}


# run


def test_every_check_holds_on_the_built_in_sample() -> None:
    result = subprocess_run("run")
    assert result.returncode == 0
    assert "Every check held" in result.stdout
    assert all(name in result.stdout for name in VARIANTS)
    assert result.stderr == ""
    assert "\x1b" not in result.stdout


def test_json_has_what_the_run_counted() -> None:
    found = document(*SMALL, "--sram", 700, "--causal")
    assert found["held"] is True
    assert [verify.label(record) for record in found["records"]] == VARIANTS
    for record in found["records"]:
        tiles = {"Br": record["Br"], "Bc": record["Bc"]}
        cost = fs.io_cost(
            record["algorithm"], N=40, d=8, heads=2, is_causal=True, sram=700,
            convention=record["convention"], **tiles,
        )  # fmt: skip
        assert record["total_elements"] == cost.total_elements
        assert record["total_bytes"] == 4 * cost.total_elements
        assert record["sram_elements"] == cost.sram_elements <= 700
        assert record["extra_hbm_elements"] == cost.extra_hbm_elements
        assert record["memory_seconds"] == cost.total_bytes / 4.8e12
        assert 0 < record["output_error_over_bound"] <= 1
        assert 0 < record["lse_error_over_bound"] <= 1


def test_csv_has_the_same_numbers_as_json() -> None:
    lines = invoke(*SMALL, "--csv").stdout.splitlines()
    records = document(*SMALL)["records"]
    for row, record in zip(csv.DictReader(lines), records, strict=True):
        assert int(row["total_elements"]) == record["total_elements"]
        assert int(row["reads.K"]) == record["reads"]["K"]
        assert row["failures"] == ""


def test_the_ratio_is_to_standard_attention_or_missing() -> None:
    records = document(*SMALL)["records"]
    for record in records:
        wanted = record["total_elements"] / records[0]["total_elements"]
        assert record["ratio_to_standard"] == wanted
    assert document(*SMALL, "-a", "flash2")["records"][0]["ratio_to_standard"] is None


def test_the_table_says_where_standard_attention_wins() -> None:
    """With tiles of one row, FlashAttention reads O, l and m again for each key."""
    assert "Standard attention wins here: flash1:literal" in invoke(*SMALL, "--tiles", "1,1").stdout
    assert "wins" not in invoke(*SMALL).stdout


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_random_inputs_of_every_dtype_pass(dtype: str) -> None:
    result = invoke(*SMALL, "--seed", 3, "--dtype", dtype, "--dropout", 0.1, "--window", "5,")
    assert result.exit_code == 0, result.output
    assert dtype in result.stdout


def test_the_same_seed_gives_the_same_inputs() -> None:
    assert (
        invoke(*SMALL, "--seed", 1, "--json").stdout == invoke(*SMALL, "--seed", 1, "--json").stdout
    )
    assert (
        invoke(*SMALL, "--seed", 1, "--json").stdout != invoke(*SMALL, "--seed", 2, "--json").stdout
    )


def test_a_picture_is_written(tmp_path: Path) -> None:
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        assert invoke(*SMALL, "--plot", tmp_path / name).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(start)


# backward


def test_gradients_and_counts_of_every_backward_pass_hold_on_the_sample() -> None:
    result = subprocess_run("run", "--backward")
    assert result.returncode == 0
    assert "Every check held: output, lse and gradients" in result.stdout
    assert all(name in result.stdout for name in BACKWARD)


def test_backward_adds_a_record_for_each_pass_that_differs() -> None:
    """FlashAttention-2's forward pass is shown once, its backward passes are three."""
    records = document(*SMALL, "--backward", "--causal", "--sram", 900)["records"]
    forward = document(*SMALL, "--causal", "--sram", 900)["records"]
    assert records[: len(forward)] == forward
    backward = records[len(forward) :]
    assert [verify.label(record) for record in backward] == BACKWARD
    for record in backward:
        assert record["pass"] == "backward"
        cost = fs.io_cost(
            record["algorithm"], N=40, d=8, heads=2, is_causal=True, sram=900, backward=True,
            Br=record["Br"], Bc=record["Bc"], convention=record["convention"],
        )  # fmt: skip
        assert record["total_elements"] == cost.total_elements
        assert record["sram_elements"] == cost.sram_elements <= 900
        assert record["memory_seconds"] == cost.total_bytes / 4.8e12
        assert all(0 < record[f"{x}_error_over_bound"] <= 1 for x in ("dq", "dk", "dv"))
        standard = backward[0]["total_elements"]
        assert record["ratio_to_standard"] == record["total_elements"] / standard


def test_standard_keeps_its_weights_for_the_backward_pass_and_flash_its_statistics() -> None:
    """N^2 for standard attention, l and m for FlashAttention, their sum for its successor."""
    wanted = {"standard": 2 * 40 * 40, "flash1": 2 * 2 * 40, "flash2": 2 * 40}
    wanted["flash2-two-kernel"] = wanted["flash2"]
    for command in ([*SMALL], ["io", "-N", 40, "-d", 8, "--heads", 2]):
        for record in document(*command, "--backward")["records"]:
            if record["pass"] == "backward":
                assert record["kept_elements"] == wanted[record["algorithm"]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_backward_passes_hold_for_every_dtype_with_dropout_and_a_window(dtype: str) -> None:
    result = invoke(
        *SMALL, "--backward", "--seed", 3, "--dtype", dtype, "--dropout", 0.2, "--window", "9,3"
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_the_gradient_of_the_output_may_be_in_the_file(name: str, tmp_path: Path) -> None:
    given = arrays()
    do = np.zeros_like(given["q"])
    write_inputs(tmp_path / name, do=do, **given)
    records = document("run", tmp_path / name, "--backward")["records"]
    backward = [record for record in records if record["pass"] == "backward"]
    assert [record["dv_error_over_bound"] for record in backward] == [0] * len(BACKWARD)
    refused = invoke("run", tmp_path / name, "--backward", "--seed", 1)
    assert_one_line(refused.stdout, refused.stderr, refused.exit_code, "--seed 1", "gives do")


def write_inputs(path: Path, **given: Any) -> None:
    if path.suffix == ".npz":
        np.savez(path, **given)
    else:
        save_file({name: np.ascontiguousarray(a) for name, a in given.items()}, path)


def test_a_drawn_gradient_is_the_seeds_and_not_one_of_the_inputs() -> None:
    inputs = random_inputs((1, 2, 40, 8), seed=5)
    do = verify.output_gradient(inputs, 5)
    assert (do == verify.output_gradient(inputs, 5)).all()
    assert (do != verify.output_gradient(inputs, 6)).any()
    assert all((do != x).any() for x in (inputs.q, inputs.k, inputs.v))


def test_a_seed_may_be_given_for_the_gradient_alone() -> None:
    found = [document("run", "-a", "flash2", "--backward", "--seed", seed) for seed in (0, 1)]
    assert all(one["held"] for one in found)
    errors = [one["records"][1]["dq_error_over_bound"] for one in found]
    assert errors[0] != errors[1]


def test_padding_and_shared_key_heads_pass_backward(tmp_path: Path) -> None:
    given = arrays(key_padding_mask=np.arange(40).reshape(2, 20) % 3 > 0)
    given |= {"k": given["k"][:, :1], "v": given["v"][:, :1]}
    given["attn_mask"] = np.random.default_rng(1).standard_normal((20, 20)).astype(np.float32)
    np.savez(tmp_path / "a.npz", **given)
    result = invoke("run", tmp_path / "a.npz", "--backward")
    assert result.exit_code == 0, result.output


def test_a_gradient_outside_its_bound_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(self: Any, *given: Any, **how: Any) -> Any:
        dq, dk, dv = right(self, *given, **how)
        return dq, dk * np.float32(1 + 1e-4), dv

    right = Attention.backward
    monkeypatch.setattr(Attention, "backward", off)
    result = invoke(*SMALL, "--backward")
    assert result.exit_code == 1
    assert "FAILED: flash2-two-kernel, backward: dk is off by" in result.stdout
    assert "NO" in result.stdout


def test_a_backward_count_that_is_not_the_formulas_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_write_more(out: Any, *inputs: Any, backward: bool, **how: Any) -> Any:
        cost = right(out, *inputs, backward=backward, **how)
        cost.writes["dQ"] = cost.writes.get("dQ", 0) + backward
        return cost

    right = verify.expected_cost
    monkeypatch.setattr(verify, "expected_cost", one_write_more)
    result = invoke(*SMALL, "--backward")
    assert result.exit_code == 1
    assert "FAILED: flash1:elided, backward: writes not as in the closed form" in result.stdout
    assert "FAILED: flash2: " not in result.stdout


def test_one_variant_is_run_in_both_passes() -> None:
    for name in ("flash2-two-kernel", "flash2:elided", "flash1:elided"):
        records = document(*SMALL, "--backward", "-a", name)["records"]
        assert [record["pass"] for record in records] == ["forward", "backward"]
        assert records[1]["algorithm"] == name.partition(":")[0]


# layouts


@pytest.mark.parametrize(
    "layout",
    ["butterfly", "butterfly:1", "local-global:0,1", "strided:3", "random:0.4,7", "causal"],
)
def test_every_algorithm_runs_with_every_layout(layout: str) -> None:
    found = document("run", "--shape", "1,2,70,8", "--backward", "--layout", layout)
    assert found["held"] is True
    assert found["options"]["layout"] == layout
    forward = [r for r in found["records"] if r["pass"] == "forward"]
    assert [verify.label(r) for r in forward] == [*VARIANTS, *SPARSE]
    assert {(r["Br"], r["Bc"]) for r in forward} == {(9, 9)}  # 8 x 8 blocks
    reads = {r["algorithm"]: r["reads"]["Q"] for r in forward if r["convention"] == "literal"}
    assert reads["block_sparse"] == reads["flash1"] < 8 * reads["standard"]


def test_a_layouts_backward_tiles_are_parts_of_its_blocks() -> None:
    """Blocks that the forward pass can hold may be too large for the backward one."""
    what = ["--layout", "causal", "--tiles", "16,16", "--backward", "--sram", 900]
    found = document(*SMALL, *what, "-a", "block_sparse", "-a", "flash2")
    assert found["held"] is True
    for record in found["records"]:
        size = 16 if record["pass"] == "forward" else 8
        assert (record["Br"], record["Bc"]) == (size, size)


def test_io_says_of_a_layout_what_a_run_of_it_counts() -> None:
    """Ragged, and with blocks that the backward passes must cut."""
    what = ["--layout", "strided:2", "--tiles", "16,8", "--sram", 700, "--backward"]
    ran = document("run", "--shape", "1,2,45,8", *what)["records"]
    said = document("io", "-N", 45, "-d", 8, "--heads", 2, "--dtype", "float32", *what)["records"]
    assert len(ran) == len(said) > 8
    for one, other in zip(ran, said, strict=True):
        same = set(one) & set(other) - {"failures"}
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    assert any(record["Br"] < 16 for record in said)


def test_io_takes_a_layout() -> None:
    keep = layouts.butterfly(16)
    records = document("io", "-N", 512, "--layout", "butterfly", "--tiles", "32,32", "--backward")
    for record in records["records"]:
        cost = fs.io_cost(
            record["algorithm"], N=512, d=64, Br=32, Bc=32, block_mask=keep, dtype="float16",
            convention=record["convention"], backward=record["pass"] == "backward",
            sram_bytes=227 * 1024,
        )  # fmt: skip
        assert record["total_elements"] == cost.total_elements


def test_layouts_tells_what_each_drops_and_saves_on_the_sample() -> None:
    found = document("layouts")
    assert found["held"] is True
    sample = load_sample()
    q, k, real = sample.q, sample.k, sample.key_padding_mask
    records = {record["layout"]: record for record in found["records"]}
    assert list(records) == list(verify.USUAL_LAYOUTS)
    for name, record in records.items():
        assert (record["Br"], record["Bc"]) == (23, 23)
        keep = verify.named_layout(name, (23, 23), 180, 180)
        assert record["density"] == layouts.density(keep)
        dropped = layouts.weight_outside(q, k, keep, (23, 23), key_padding_mask=real)
        mine = np.concatenate([dropped[0].ravel(), dropped[1, :, :24].ravel()])
        assert record["dropped_weight_mean"] == pytest.approx(mine.mean())
        assert record["dropped_weight_worst"] == pytest.approx(mine.max())
        assert 0 < record["ratio_to_dense"] < 1
    densities = [0.125, 0.25, 0.5, 0.75]
    random = [records[f"random:{density}"] for density in densities]
    assert [record["density"] for record in random] == densities
    for less, more in pairwise(random):
        assert less["total_elements"] < more["total_elements"]
        assert less["dropped_weight_mean"] > more["dropped_weight_mean"]


def test_a_layout_of_all_blocks_drops_nothing_and_saves_nothing(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{name: a[0, 0] for name, a in arrays().items()})
    records = document("layouts", tmp_path / "a.npz", "--layout", "random:1", "--block", 6)
    (record,) = records["records"]
    assert (record["block_rows"], record["blocks_kept"]) == (4, 16)
    assert record["dropped_weight_worst"] == 0
    assert record["ratio_to_dense"] == 1


def test_layouts_says_why_butterfly_is_left_out_and_which_blocks_would_do() -> None:
    result = invoke("layouts", "--block", 32, columns=400)
    assert result.exit_code == 0
    assert "there are 6 x 6 of 32 x 32 scores, and those of 23 x 23 would do" in result.stdout
    assert "local-global" in result.stdout
    asked = invoke("layouts", "--block", 32, "--layout", "butterfly")
    assert_one_line(asked.stdout, asked.stderr, asked.exit_code, "layout='butterfly'", "23 x 23")


@pytest.mark.parametrize("lengths", [(180, 180), (4096, 4096), (1100, 1100), (40, 40), (64, 96)])
def test_default_blocks_make_a_power_of_two(lengths: tuple[int, int]) -> None:
    Br, Bc = verify.block_sizes(*lengths)
    assert max(Br, Bc) <= 48
    rows, columns = -(-lengths[0] // Br), -(-lengths[1] // Bc)
    assert rows == columns >= 8
    assert rows & (rows - 1) == 0


def test_blocks_are_32_where_no_power_of_two_fits() -> None:
    """No block of about 32 rows cuts 2200 into 64 or 128, nor both 1 and 64 into as many."""
    assert verify.block_sizes(2200, 2200) == verify.block_sizes(1, 64) == (32, 32)
    with pytest.raises(ValueError, match="those of 69 x 69 would do"):
        verify.named_layout("butterfly", (32, 32), 2200, 2200)


# files


def test_npz_and_safetensors_give_the_same_report(tmp_path: Path) -> None:
    real = np.arange(20) < np.array([[20], [7]])
    given = arrays(key_padding_mask=real, attn_mask=np.tri(20, dtype=bool))
    given["expected_output"] = exact(**given).output.astype(np.float32)
    np.savez(tmp_path / "a.npz", **given)
    save_file(
        {name: np.ascontiguousarray(a) for name, a in given.items()}, tmp_path / "a.safetensors"
    )
    found = [document("run", tmp_path / name) for name in ("a.npz", "a.safetensors")]
    assert found[0]["held"]
    assert found[0]["records"] == found[1]["records"]
    assert all(record["reads"]["mask"] for record in found[0]["records"])
    assert all(0 < record["expected_output_error"] < 2e-6 for record in found[0]["records"])


def test_padding_with_holes_and_shared_key_heads_pass(tmp_path: Path) -> None:
    given = arrays(key_padding_mask=np.arange(40).reshape(2, 20) % 3 > 0)
    given |= {"k": given["k"][:, :1], "v": given["v"][:, :1]}
    np.savez(tmp_path / "a.npz", **given)
    assert invoke("run", tmp_path / "a.npz", "--tiles", "5,2").exit_code == 0


def test_bfloat16_is_read_from_safetensors(tmp_path: Path) -> None:
    given = {name: a.astype(ml_dtypes.bfloat16) for name, a in arrays().items()}
    write_safetensors(tmp_path / "a.safetensors", "bfloat16", given)
    inputs = read_inputs(tmp_path / "a.safetensors")
    assert inputs.q.dtype == ml_dtypes.bfloat16
    assert (inputs.q == given["q"]).all()
    assert invoke("run", tmp_path / "a.safetensors").exit_code == 0


def write_safetensors(path: Path, dtype: str, given: dict[str, Any]) -> None:
    header, data = {}, b""
    codes = {"bfloat16": "BF16", "int64": "I64"}
    for name, a in given.items():
        ends = [len(data), len(data) + a.nbytes]
        header[name] = {"dtype": codes[dtype], "shape": list(a.shape), "data_offsets": ends}
        data += a.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    safetensors.deserialize(path.read_bytes())  # a valid file


def test_an_expected_output_that_is_not_met_fails(tmp_path: Path) -> None:
    given = arrays()
    expected = exact(**given).output.astype(np.float32)
    expected[0, 0, 0, 0] += 1e-4
    np.savez(tmp_path / "a.npz", **given, expected_output=expected)
    result = invoke("run", tmp_path / "a.npz")
    assert result.exit_code == 1
    assert "FAILED: flash2: output is off by 0.0001 from the expected one" in result.stdout
    assert "Not every check held" in result.stdout
    assert document("run", tmp_path / "a.npz")["held"] is False
    assert invoke("run", tmp_path / "a.npz", "--tolerance", 1e-3).exit_code == 0


def test_padded_rows_of_an_expected_output_do_not_count(tmp_path: Path) -> None:
    given = arrays(key_padding_mask=np.arange(20) < np.array([[20], [7]]))
    expected = exact(**given).output.astype(np.float32)
    expected[1, :, 7:] = np.nan
    np.savez(tmp_path / "a.npz", **given, expected_output=expected)
    assert invoke("run", tmp_path / "a.npz").exit_code == 0


def test_the_samples_expected_output_is_that_of_its_own_settings() -> None:
    """A causal run of the sample is checked, but not held to what the model computed."""
    found = document("run", "-a", "flash2", "--causal")
    assert found["held"] is True
    assert found["records"][0]["expected_output_error"] is None


# failing checks


def test_a_count_that_is_not_the_formulas_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_read_more(out: Any, *inputs: Any, **how: Any) -> Any:
        cost = right(out, *inputs, **how)
        cost.reads["Q"] += 1
        return cost

    right = verify.expected_cost
    monkeypatch.setattr(verify, "expected_cost", one_read_more)
    result = invoke(*SMALL)
    assert result.exit_code == 1
    assert "FAILED: flash2: reads not as in the closed form" in result.stdout
    assert "Every check held" not in result.stdout


@pytest.mark.parametrize("factor", [0.0, 1 + 1e-4, np.nan])
def test_an_output_outside_its_bound_fails(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*inputs: Any, **how: Any) -> Any:
        out = right(*inputs, **how)
        out.output[...] *= factor
        return out

    right = verify.attention
    monkeypatch.setattr(verify, "attention", off)
    result = invoke(*SMALL)
    assert result.exit_code == 1
    assert "FAILED: flash2: output is off by" in result.stdout
    assert document(*SMALL)["held"] is False


# io


def test_io_is_the_closed_form() -> None:
    found = document("io", "-N", 1000, "-d", 32, "--heads", 3, "--sram", 5000, "--causal")
    for record in found["records"]:
        cost = fs.io_cost(
            record["algorithm"], N=1000, d=32, heads=3, is_causal=True, dtype="float16",
            sram=5000, convention=record["convention"],
        )  # fmt: skip
        assert record["reads"] == {name: n for name, n in cost.reads.items() if n}
        assert record["total_bytes"] == cost.total_bytes
        assert record["flops"] == cost.flops
        assert record["exps"] == cost.exps
        assert record["flops_per_byte"] == cost.flops / cost.total_bytes
        assert record["fits"] is True


@pytest.mark.parametrize("rule", ["paper", "strict", "optimal"])
def test_io_takes_the_tiles_of_the_rule(rule: str) -> None:
    for budget in (["--sram", 4096], ["--sram-kb", 16, "--dtype", "float32"]):
        for record in document("io", "-N", 500, "-d", 16, "--rule", rule, *budget)["records"]:
            tiles = fs.tile_sizes(4096, 16, rule, record["algorithm"], N=500)
            assert (record["Br"], record["Bc"]) == tiles
            assert record["fits"] or rule == "paper"


def test_io_says_by_how_much_the_papers_tiles_do_not_fit() -> None:
    """For M < 8 d (d + 1) they mostly do not, once S, l and m are counted."""
    result = invoke("io", "--rule", "paper", "--sram", 8192)
    assert "flash2 needs 9280 elements, 1088 more than there are" in result.stdout
    assert "NO, 113%" in result.stdout
    assert result.exit_code == 0


def test_io_takes_the_shared_memory_of_a_block_for_budget() -> None:
    assert document("io", "--device", "a100")["sram_bytes"] == 163 * 1024
    assert document("io", "--device", "a100", "--sram-kb", 32)["sram_bytes"] == 32 * 1024


def test_io_says_where_standard_attention_wins() -> None:
    """At N = 16 the whole of S is smaller than what FlashAttention keeps re-reading."""
    assert "Standard attention wins" in invoke("io", "-N", 16, "--tiles", "16,1").stdout
    assert "wins" not in invoke("io").stdout


@pytest.mark.parametrize("rule", ["paper", "strict", "optimal"])
def test_io_takes_the_backward_passes_own_tiles(rule: str) -> None:
    found = document("io", "-N", 500, "-d", 16, "--rule", rule, "--sram", 4096, "--backward")
    records = [record for record in found["records"] if record["pass"] == "backward"]
    assert [verify.label(record) for record in records] == BACKWARD
    for record in records:
        tiles = fs.tile_sizes(4096, 16, rule, record["algorithm"], N=500, backward=True)
        assert (record["Br"], record["Bc"]) == tiles
        assert record["fits"] or rule == "paper"


# devices


def test_devices_lists_every_preset_with_its_sources() -> None:
    shown = invoke("devices")
    assert shown.exit_code == 0
    assert all(key in shown.stdout for key in DEVICES)
    for record in document("devices")["records"]:
        preset = DEVICES[record["key"]]
        assert record["hbm_bytes_per_second"] == preset.hbm_bytes_per_second
        assert record["sources"]["hbm_bytes_per_second"]


def test_one_device_is_shown_with_its_notes() -> None:
    shown = invoke("devices", "H200", columns=400).stdout
    assert DEVICES["h200"].notes in shown
    assert all(source in shown for source in DEVICES["h200"].sources.values())


# tables


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    "command",
    [
        [*SMALL],
        [*SMALL, "--backward"],
        ["io", "--rule", "paper", "--sram-kb", 16],
        ["io", "--backward"],
        ["layouts"],
        ["devices"],
    ],
)
def test_no_number_is_cut_at_any_width(columns: int, command: list[object]) -> None:
    shown = invoke(*command, columns=columns).stdout
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    wide = invoke(*command, columns=400).stdout
    numbers = {word for word in wide.split() if word[0].isdigit()}
    assert numbers <= {word for line in shown.splitlines() for word in line.split()}


def test_a_pipe_gets_no_control_codes() -> None:
    result = subprocess_run("io", COLUMNS="80")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout


def test_text_that_an_encoding_lacks_is_no_error() -> None:
    result = subprocess_run("io", PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0"), (9999, "9999"), (10_000, "10 k"), (99_949, "99.9 k"), (999_499, "999 k"),
     (999_500, "1 M"), (1_234_567, "1.23 M"), (2.5e12, "2.5 T"), (None, "-")],
)  # fmt: skip
def test_counts_have_three_digits_and_a_unit(n: float | None, text: str) -> None:
    assert tables.count(n) == text


@pytest.mark.parametrize(
    ("t", "text"), [(5.5e-9, "5.5 ns"), (9.996e-7, "1 µs"), (1.25e-3, "1.25 ms"), (12.0, "12 s")]
)
def test_times_have_three_digits_and_a_unit(t: float, text: str) -> None:
    assert tables.seconds(t) == text


# bad input

BAD_ARGUMENTS = {
    "unknown command": (["fly"], "fly"),
    "unknown option": (["run", "--fly"], "--fly"),
    "not a number": (["io", "--N", "many"], "--N"),
    "algorithm": (["run", "-a", "flash9"], "algorithm='flash9'"),
    "convention": (["run", "-a", "flash1:x"], "convention='x'"),
    "shape": (["run", "--shape", "1,2,3"], "--shape 1,2,3"),
    "empty shape": (["run", "--shape", "1,1,0,8"], "N=0"),
    "seed alone": (["run", "--seed", "1"], "--seed"),
    "shape and file": (["run", "a.npz", "--shape", "1,1,8,8"], "--shape"),
    "dtype": ([*SMALL, "--dtype", "int8"], "dtype='int8'"),
    "tiles": (["run", "--tiles", "64"], "--tiles 64"),
    "zero tiles": (["run", "--tiles", "0,8"], "tiles[0]=0"),
    "tiles that do not fit": (["run", "--tiles", "180,180"], "does not fit on the chip"),
    "SRAM too small": (["run", "--sram", "9"], "sram=9"),
    "two budgets": (["run", "--sram", "900", "--sram-kb", "3"], "--sram-kb 3"),
    "no SRAM": (["run", "--sram-kb", "0"], "--sram-kb 0"),
    "NaN SRAM": (["io", "--sram-kb", "nan"], "--sram-kb nan"),
    "endless SRAM": (["io", "--sram-kb", "1e306"], "--sram-kb 1e+306"),
    "endless SRAM of a run": ([*SMALL, "--sram-kb", "1e306"], "--sram-kb 1e+306"),
    "endless L2": (["l2", "-N", "64", "--l2-mb", "1e30"], "--l2-mb 1e+30"),
    "L2 beyond all floats": (["l2", "-N", "64", "--l2-mb", "1e308"], "--l2-mb 1e+308"),
    "NaN L2": (["l2", "-N", "64", "--l2-mb", "nan"], "--l2-mb nan"),
    "L2 below a byte": (["l2", "-N", "64", "--l2-mb", "1e-9"], "--l2-mb 1e-09"),
    "window": (["run", "--window", "-1,2"], "--window -1,2"),
    "alignment": (["run", "--causal-align", "left"], "causal_align='left'"),
    "scale": (["run", "--scale", "nan"], "scale=nan"),
    "dropout": (["run", "--dropout", "1"], "dropout_p=1"),
    "dropout seed": (["run", "--dropout-seed", "-1"], "seed=-1"),
    "device": (["run", "--device", "abacus"], "device='abacus'"),
    "too long": (["run", "--shape", "1,1,20000,1"], "N=20000"),
    "too large": (["run", "--shape", "99999,99999,99999,99999"], "shape=(99999,"),
    "two formats": (["run", "--json", "--csv"], "--csv"),
    "plot suffix": (["run", "--plot", "a.bmp"], "a.bmp"),
    "plot folder": ([*SMALL, "--plot", "nowhere/a.png"], "nowhere"),
    "width": (["io", "-d", "0"], "d=0"),
    "length": (["io", "-N", "-1"], "N=-1"),
    "heads": (["io", "--heads", "-1"], "heads=-1"),
    "rule": (["io", "--rule", "thumb"], "rule='thumb'"),
    "rule and tiles": (["io", "--rule", "paper", "--tiles", "8,8"], "--rule paper"),
    "rule and tiles of a roofline": (
        ["roofline", "--rule", "paper", "--tiles", "8,8"], "--rule paper"
    ),
    "rule and tiles of a grid": (
        ["sweep", "-N", "64", "--rule", "paper", "--Br", "4", "--Bc", "4"], "rule='paper'"
    ),
    "roofline of no length": (["roofline", "-N", "0"], "N=0"),
    "roofline of no heads": (["roofline", "--heads", "0"], "heads=0"),
    "roofline of no items": (["roofline", "--batch", "0"], "batch=0"),
    "more mixed keys than keys": (
        ["io", "-N", "64", "-a", "linformer", "--projection", "65"], "projection=65"
    ),
    "parquet suffix": (["sweep", "-N", "64", "--parquet", "a.csv"], "--parquet a.csv"),
    "grid of an approximation": (["sweep", "-N", "64", "-a", "local"], "standard, flash1, flash2"),
    "no row": (["paper", ""], "row=''"),
    "no layout": (["run", "-a", "block_sparse"], "--layout"),
    "unknown layout": ([*SMALL, "--layout", "waffle"], "layout='waffle'"),
    "layout's number": ([*SMALL, "--layout", "strided:x"], "strided[:STRIDE]"),
    "layout's numbers": ([*SMALL, "--layout", "butterfly:1,2"], "butterfly[:FACTORS]"),
    "layout's range": ([*SMALL, "--layout", "random:2"], "density=2"),
    "layout without density": (["layouts", "--layout", "random"], "random:DENSITY"),
    "butterfly": ([*SMALL, "--layout", "butterfly", "--tiles", "16,16"], "power of two"),
    "huge layout": (["io", "-N", "1000000", "--layout", "causal"], "blocks"),
    "layout and rule": (["io", "--layout", "causal", "--rule", "paper"], "--rule paper"),
    "block": (["layouts", "--block", "0"], "block=0"),
    "backward too long": (["run", "--shape", "1,1,5000,1", "--backward"], "--backward"),
    "backward tiles": (["run", "--backward", "--tiles", "32,63"], "flash1, backward: "),
    "part": (["sweep", "sideways"], "part='sideways'"),
    "zero key tiles": (["io", "--tiles", "1,0"], "tiles[1]=0"),
    "negative tiles": (["io", "--tiles", "5,-3"], "tiles[1]=-3"),
    "negative tolerance": (["run", "--tolerance", "-1"], "tolerance=-1.0"),
    "tolerance that is no number": (["run", "--tolerance", "nan"], "tolerance=nan"),
    "unknown device": (["devices", "abacus"], "device='abacus'"),
}  # fmt: skip


def assert_one_line(stdout: str, stderr: str, code: int, *needles: str) -> None:
    assert code == 2, stdout + stderr
    assert stdout == ""
    assert stderr.startswith("flashsim: error: ")
    assert stderr.count("\n") == 1
    assert stderr.endswith("\n")
    assert "Traceback" not in stderr
    assert all(needle in stderr for needle in needles), stderr


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_one_line_that_names_them(case: str) -> None:
    arguments, needle = BAD_ARGUMENTS[case]
    result = invoke(*arguments)
    assert_one_line(result.stdout, result.stderr, result.exit_code, needle)


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """A file of each unusable kind, and what its error must say."""
    q = arrays()["q"]
    cases: dict[str, tuple[Path, str]] = {
        "missing": (folder / "missing.npz", "No such file"),
        "folder": (folder / "folder.npz", "directory"),
    }
    (folder / "folder.npz").mkdir()

    def case(name: str, suffix: str, why: str) -> Path:
        path = folder / f"{name.replace(' ', '_')}{suffix}"
        cases[name] = (path, why)
        return path

    case("wrong suffix", ".npy", ".npz or .safetensors").write_bytes(b"")
    for suffix in (".npz", ".safetensors"):
        case(f"empty {suffix[1:]}", suffix, f"{suffix} file").write_bytes(b"")
        case(f"foreign {suffix[1:]}", suffix, f"{suffix} file").write_text("q, k, v\n" * 99)
    np.savez(folder / "whole.npz", **arrays())
    whole = (folder / "whole.npz").read_bytes()
    case("truncated npz", ".npz", "truncated").write_bytes(whole[:-999])
    flipped = bytearray(whole)
    flipped[300] ^= 255
    case("damaged npz", ".npz", "not a readable .npz file").write_bytes(flipped)
    save_file(arrays(), folder / "whole.safetensors")
    whole = (folder / "whole.safetensors").read_bytes()
    case("truncated safetensors", ".safetensors", "truncated").write_bytes(whole[:-9])
    np.savez(case("lacking npz", ".npz", "no array named v"), q=q, k=q)
    save_file({"query": q}, case("lacking safetensors", ".safetensors", "no array named q or k"))
    np.savez(case("integers npz", ".npz", "q.dtype='int64'"), **arrays(q=q.astype(np.int64)))
    integers = {name: a.astype(np.int64) for name, a in arrays().items()}
    write_safetensors(case("integers safetensors", ".safetensors", "q is I64"), "int64", integers)
    np.savez(case("complex", ".npz", "v.dtype='complex64'"), **arrays(v=q.astype(np.complex64)))
    real = np.ones((2, 20), np.uint8)
    np.savez(
        case("padding dtype", ".npz", "key_padding_mask.dtype='uint8'"),
        **arrays(key_padding_mask=real),
    )
    np.savez(case("mixed dtypes", ".npz", "k.dtype"), **arrays(k=q.astype(np.float64)))
    np.savez(case("one dimension", ".npz", "q.shape=(8,)"), **arrays(q=q[0, 0, 0]))
    np.savez(case("shapes", ".npz", "k.shape"), **arrays(k=q[..., :4]))
    np.savez(
        case("expected shape", ".npz", "expected_output.shape"), **arrays(expected_output=q[:1])
    )
    for name, do, why in (
        ("do dtype", q.astype(np.float64), "do.dtype='float64'"),
        ("do shape", q[:1], "do.shape"),
        ("do objects", np.array([None]), "not a readable .npz file"),
    ):
        np.savez(case(name, ".npz", why), **arrays(do=do))
    whole = arrays(do=q.astype(np.int8))
    save_file(whole, case("do safetensors", ".safetensors", "do is "))
    with zipfile.ZipFile(case("no arrays", ".npz", "q is not an array"), "w") as archive:
        for name in "qkv":
            archive.writestr(f"{name}.npy", "hello")
    return cases


def test_a_bad_file_is_one_line_that_says_which_and_why(tmp_path: Path) -> None:
    for path, why in bad_files(tmp_path).values():
        result = invoke("run", path, "--backward")
        assert_one_line(result.stdout, result.stderr, result.exit_code, why, str(path))


class Bomb:
    """Unpickling one makes the file that it names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """An object array in a .npz, a pickle in place of one, and a bare pickle named .npz."""
    trace = tmp_path / "unpickled"
    bomb = np.array([Bomb(trace)], dtype=object)
    np.savez(tmp_path / "object.npz", **arrays(q=bomb))
    with zipfile.ZipFile(tmp_path / "member.npz", "w") as archive:
        archive.writestr("q.npy", pickle.dumps(bomb))
    for suffix in (".npz", ".safetensors"):
        (tmp_path / f"bare{suffix}").write_bytes(pickle.dumps(bomb))
    for name in ("object.npz", "member.npz", "bare.npz", "bare.safetensors"):
        result = invoke("run", tmp_path / name)
        assert_one_line(result.stdout, result.stderr, result.exit_code, name)
    assert not trace.exists()
    pickle.loads(pickle.dumps(bomb))
    assert trace.exists()  # the bomb does go off where it is unpickled


@pytest.mark.parametrize("arguments", [["run", "nothing.npz"], ["run", "--fly"], ["io", "-d", "0"]])
def test_the_process_exits_with_2_and_one_line(arguments: list[str]) -> None:
    result = subprocess_run(*arguments)
    assert_one_line(result.stdout, result.stderr, result.returncode)


def test_a_folder_that_matplotlib_cannot_write_adds_no_lines(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = subprocess_run(
        *SMALL, "--plot", str(tmp_path / "nowhere" / "a.png"),
        MPLCONFIGDIR=str(tmp_path / "file" / "none"),
    )  # fmt: skip
    assert_one_line(result.stdout, result.stderr, result.returncode, "nowhere")


# start


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"flashsim {fs.__version__}\n"
    for arguments in ([], ["--help"], ["-h"]):
        shown = invoke(*arguments)
        assert shown.exit_code == 0
        assert all(name in shown.stdout for name in COMMANDS)
    for name in COMMANDS:
        assert invoke(name, "--help").exit_code == 0


def test_a_start_imports_nothing_heavy() -> None:
    """matplotlib and safetensors are imported only by what draws or reads files."""
    code = (
        "import sys; from flashsim import cli\n"
        "try: cli.app(['io'])\nexcept SystemExit: pass\n"
        "print([m for m in ('matplotlib', 'safetensors') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
