"""A grid is the closed form at every point, whatever fits; ranges, files and pictures of it."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.algorithms import ALGORITHMS
from flashsim.cost.bounds import Work, best
from flashsim.cost.devices import DEVICES, device
from flashsim.cost.grid import AXES, grid, steps, values
from flashsim.cost.io import DTYPES
from flashsim.cost.roofline import Roofline
from flashsim.cost.tiles import RULES, default_tiles
from flashsim.masks import Mask
from strategies import BACKWARDS, VARIANTS

VARIANT_NAMES = {
    False: [f"{name}:{convention}" for name, convention in VARIANTS],
    True: [f"{name}:{convention}" for name, convention in BACKWARDS],
}
sizes = st.lists(st.integers(1, 300), min_size=1, max_size=2, unique=True)
budgets = st.lists(st.integers(1, 20_000), min_size=1, max_size=2, unique=True)
halves = st.sampled_from(["float16", "bfloat16", "float32"])


def at(record: dict[str, Any], backward: bool, dtype: str, **more: Any) -> Any:
    """The closed form of a point, by its own way."""
    name, _, convention = record["algorithm"].partition(":")
    return fs.io_cost(
        name, N=record["N"], d=record["d"], Br=record["Br"], Bc=record["Bc"], dtype=dtype,
        convention=convention or "literal", backward=backward, **more,
    )  # fmt: skip


def assert_is(record: dict[str, Any], cost: Any) -> None:
    figures = (
        "sram_elements", "sram_bytes", "read_elements", "written_elements", "total_elements",
        "flops", "exps", "total_bytes",
    )  # fmt: skip
    assert {name: record[name] for name in figures} == {
        name: getattr(cost, name) for name in figures
    }


@given(st.booleans(), st.data(), sizes, sizes, budgets, sizes, sizes, halves)
def test_every_point_is_io_cost(
    backward: bool, data: Any, N: Any, d: Any, M: Any, Br: Any, Bc: Any, dtype: str
) -> None:
    name = data.draw(st.sampled_from(VARIANT_NAMES[backward]))
    gpus = ["h200", "a100-80"]
    points = grid(name, N=N, d=d, M=M, Br=Br, Bc=Bc, devices=gpus, backward=backward, dtype=dtype)
    records = points.records()
    expected = list(product([name], N, d, M, gpus, Br, Bc))
    assert [tuple(r[axis] for axis in AXES) for r in records] == expected
    for record in records:
        cost = at(record, backward, dtype, sram=record["M"])
        assert_is(record, cost)
        assert record["fits"] == (cost.sram_elements <= record["M"])
        room = max(record["M"], cost.sram_elements)
        work = Work.of(Mask(record["N"], record["N"]), record["d"], record["d"])
        assert record["lower_bound_elements"] == best(work, room, backward=backward)[0]
        time = Roofline(device(record["device"]), dtype, cost.total_bytes, cost.flops, cost.exps)
        assert record["lower_seconds"] == time.lower_seconds
        assert record["serial_seconds"] == time.serial_seconds


@given(st.booleans(), st.data(), sizes, sizes, budgets, st.sampled_from(RULES))
def test_the_tiles_are_those_of_the_rule_for_each_length(
    backward: bool, data: Any, N: Any, d: Any, M: Any, rule: str
) -> None:
    name = data.draw(st.sampled_from(VARIANT_NAMES[backward]))
    for record in grid(name, N=N, d=d, M=M, rule=rule, backward=backward).records():
        what: dict[str, Any] = {"algorithm": name.partition(":")[0], "backward": backward}
        try:
            tiles = fs.tile_sizes(record["M"], record["d"], rule, N=record["N"], **what)
        except ValueError:
            assert (record["Br"], record["Bc"], record["fits"]) == (None, None, False)
            assert record["total_elements"] is record["lower_seconds"] is None
            continue
        assert (record["Br"], record["Bc"]) == tiles
        assert_is(record, at(record, backward, "float16", sram=record["M"]))
        assert record["fits"] or rule == "paper"


@given(st.sampled_from(VARIANT_NAMES[False]), sizes, sizes, st.sampled_from(list(DEVICES)), halves)
def test_without_m_the_budget_is_what_a_block_of_the_gpu_may_use(
    name: str, N: Any, d: Any, gpu: str, dtype: str
) -> None:
    from flashsim.cost.counts import Head
    from flashsim.memory import widened

    if dtype == "bfloat16" and DEVICES[gpu].compute_capability.startswith("7"):
        dtype = "float16"
    stored = DTYPES[dtype]
    room = DEVICES[gpu].sram_bytes_per_block
    for record in grid(name, N=N, d=d, devices=gpu, dtype=dtype).records():
        head = Head(
            Mask(record["N"], record["N"]), record["d"], record["d"], stored.itemsize,
            widened(stored).itemsize,
        )  # fmt: skip
        row = ALGORITHMS[name.partition(":")[0]]
        assert (record["Br"], record["Bc"]) == default_tiles(row, head, sram_bytes=room)
        assert record["M"] is None
        assert record["fits"]
        assert record["sram_bytes"] <= room
        assert_is(record, at(record, False, dtype, sram_bytes=room))


@given(st.sampled_from(VARIANT_NAMES[False]), sizes, sizes, st.sampled_from(list(DEVICES)))
def test_given_tiles_fit_if_their_bytes_do(name: str, Br: Any, Bc: Any, gpu: str) -> None:
    room = DEVICES[gpu].sram_bytes_per_block
    for record in grid(name, N=300, d=64, Br=Br, Bc=Bc, devices=gpu).records():
        cost = at(record, False, "float16", sram_bytes=room)
        assert_is(record, cost)
        assert record["fits"] == (cost.sram_bytes <= room)


def test_gpus_share_counts_and_differ_in_time() -> None:
    points = grid("flash2", N=1024, d=64, M=20_000, devices=["t4", "h200", "A100"])
    assert points.axes["device"] == ["t4", "h200", "a100-80"]
    assert len(set(points.columns["total_elements"])) == 1
    assert len(set(points.columns["lower_seconds"])) == 3


def test_more_sram_never_moves_more() -> None:
    points = grid(N=2048, d=64, M="512:262144:x2", rule="optimal")
    for algorithm in points.axes["algorithm"]:
        moved = points.where(algorithm=algorithm).columns["total_elements"]
        assert moved == sorted(moved, reverse=True)
        bound = points.where(algorithm=algorithm).columns["lower_bound_elements"]
        assert all(x >= least for x, least in zip(moved, bound, strict=True))


def test_points_are_in_the_order_of_the_axes_without_m_too() -> None:
    gpus, sides = ["t4", "h200"], [8, 16]
    records = grid("flash2", N=[32, 16], d=4, devices=gpus, Br=sides, Bc=sides).records()
    expected = list(product(["flash2"], [32, 16], [4], [None], gpus, sides, sides))
    assert [tuple(r[axis] for axis in AXES) for r in records] == expected


def test_columns_are_as_long_as_the_product_of_the_axes() -> None:
    points = grid(["standard", "flash1:elided"], N=[8, 9], d=4, M=[100, 200, 300])
    assert {len(column) for column in points.columns.values()} == {len(points)} == {12}
    assert points.varying == ["algorithm", "N", "M"]
    some = points.where(N=9, algorithm="flash1:elided")
    assert (len(some), some.varying) == (3, ["M"])
    assert some.records() == [
        r for r in points.records() if r["N"] == 9 and r["algorithm"] == "flash1:elided"
    ]


def test_every_algorithm_and_length_is_told_of() -> None:
    told: list[str] = []
    what: dict[str, Any] = {"N": "8:32:x2", "d": [4, 8], "M": "50:100:10"}
    grid(["flash1", "flash2"], **what, on_step=told.append)
    assert len(told) == len(set(told)) == steps(["flash1", "flash2"], **what) == 12


@pytest.mark.parametrize(
    "given, expected",
    [
        ("64", [64]),
        (64, [64]),
        ([3, 2, 3], [3, 2]),
        ("1024:8192:x2", [1024, 2048, 4096, 8192]),
        ("1024:8191:x2", [1024, 2048, 4096]),
        ("8:32:8", [8, 16, 24, 32]),
        ("8:31:8", [8, 16, 24]),
        ("5:5:1", [5]),
        ("1:10:x1.5", [1, 2, 3, 5, 8]),
        ("3,1:4:x2,3", [3, 1, 2, 4]),
        ("1:1000000:x10", [10**n for n in range(7)]),
    ],
)
def test_a_range_has_its_ends(given: Any, expected: list[int]) -> None:
    assert values("N", given) == expected


@given(st.integers(1, 10**6), st.integers(1, 20), st.integers(2, 10))
def test_a_range_by_a_factor_meets_every_power(start: int, times: int, factor: int) -> None:
    wanted = [start * factor**n for n in range(times + 1)]
    assert values("N", f"{start}:{wanted[-1]}:x{factor}") == wanted
    assert values("N", f"{start}:{wanted[-1] - 1}:x{factor}") == wanted[:-1]


@pytest.mark.parametrize(
    "given",
    ["", "x", "1:2", "1:2:3:4", "2:1:1", "1:8:0", "1:8:-1", "1:8:x1", "1:8:xinf", "1:8:xnan", "0",
     "-4", "0:8:2", "1.5", "64,", "1:8:x1.0001", "1:8:x1/0", "1:1000000000000:1",
     0, -1, 1.5, True, [], ["64"]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_range_is_refused(given: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="N="):
        values("N", given)


@pytest.mark.parametrize(
    "what, needle",
    [
        ({"algorithms": "waffle"}, "algorithms='waffle'"),
        ({"algorithms": "block_sparse"}, "without block_mask"),
        ({"algorithms": "linformer"}, "without projection"),
        ({"algorithms": "square-tiles", "backward": True}, "one that has a backward pass"),
        ({"algorithms": "flash1:loose"}, "convention='loose'"),
        ({"algorithms": []}, "algorithms=[]"),
        ({"Br": 8}, "Br=8"),
        ({"Bc": 8}, "Bc=8"),
        ({"M": 0}, "M=0"),
        ({"rule": "thumb"}, "rule='thumb'"),
        ({"devices": "abacus"}, "abacus"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"N": "1:3000:1", "M": "1:1000:1"}, "9000000 points"),
    ],
)
def test_bad_arguments_are_named(what: dict[str, Any], needle: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        grid(**{"N": 64, "d": 8, **what})
    assert needle in str(error.value)


# The command


def invoke(*arguments: object, columns: int = 120) -> Any:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return runner.invoke(cli.app, ["sweep", *map(str, arguments)])


def test_ranges_make_the_command_a_grid() -> None:
    result = invoke("--N", "64:256:x2", "-d", "8,16", "-M", "20,400", columns=80)
    assert result.exit_code == 0
    assert "Closed forms of 36 points, forward; device = h200" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert (
        sum(line.startswith((" standard", " flash")) for line in result.stdout.splitlines()) == 36
    )
    # 20 elements hold the 2 d + 1 of standard attention at d = 8, but no 4 d + 3, and 400 hold all.
    assert "with every tile resident; 15 of 36." in " ".join(result.stdout.split())


def test_json_and_csv_hold_every_point() -> None:
    what = ["--N", "64:65:1", "-M", "300:900:300", "-a", "flash2", "--device", "t4", "--backward"]
    points = grid("flash2", N=[64, 65], d=64, M=[300, 600, 900], devices="t4", backward=True)
    assert json.loads(invoke(*what, "--json").stdout)["records"] == points.records()
    rows = list(csv.DictReader(invoke(*what, "--csv").stdout.splitlines()))
    assert [row["total_elements"] for row in rows] == [
        "" if x is None else str(x) for x in points.columns["total_elements"]
    ]


def test_a_long_table_says_where_the_rest_is() -> None:
    result = invoke("--N", "1:100:1", "-a", "flash2", "-d", "4")
    assert "The first 40 of 100 points" in result.stdout
    assert sum(line.startswith(" flash2") for line in result.stdout.splitlines()) == 40


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is an optional dependency")
def test_parquet_holds_every_point(tmp_path: Path) -> None:
    import pyarrow.parquet

    path = tmp_path / "grid.parquet"
    assert invoke("--N", "64:256:x2", "-M", "100,9000", "--parquet", path).exit_code == 0
    points = grid(N="64:256:x2", d=64, M=[100, 9000])
    assert pyarrow.parquet.read_table(path).to_pylist() == points.records()


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is an optional dependency")
def test_what_parquet_cannot_hold_is_named(tmp_path: Path) -> None:
    file = tmp_path / "grid.parquet"
    result = invoke("--N", 10**19, "--parquet", file)
    assert result.exit_code == 2
    assert result.stderr == (
        "flashsim: error: N=10000000000000000000: expected integers below 2^63, "
        "which Parquet holds\n"
    )
    assert "read_elements=" in invoke("--N", 2**40, "--parquet", file).stderr
    assert not file.exists()


def test_the_title_says_what_the_other_side_of_the_tiles_is(tmp_path: Path) -> None:
    file = tmp_path / "grid.svg"
    asked = ["--N", 64, "-a", "flash2", "--Br", "8,16", "-M", 8300, "--plot", file]
    fixed = "flash2, N = 64, d = 64, M = 8300"
    for Bc, said in (
        ("8", "Bc = 8"),
        ("8,16", "Bc = 16"),
        ("8,48", "Bc the best at each Br: 8 to 48"),
    ):
        assert invoke(*asked, "--Bc", Bc).exit_code == 0
        assert f"<!-- {fixed}, {said} -->" in file.read_text()


def test_without_pyarrow_parquet_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    result = invoke("--N", 64, "--parquet", tmp_path / "grid.parquet")
    assert result.exit_code == 2
    assert "flashsim[parquet]" in result.stderr


@pytest.mark.parametrize(
    "arguments, needle",
    [
        (["--d", 64], "--N: expected sequence lengths"),
        (["forward", "--N", 64], "forward: expected no part"),
        (["--N", "64:32:x2"], "N='64:32:x2'"),
        (["--N", 64, "--Br", 8], "both Br and Bc"),
        (["--N", 64, "--plot", "grid.png"], "ranges for 1 to 8 panels, not 0"),
        (["--N", 64, "-M", "8,9", "-d", "1:9:1", "--plot", "grid.png"], "not 9"),
    ],
)
def test_what_makes_no_grid_is_one_line(arguments: list[object], needle: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert needle in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, shown",
    [
        (["-M", "200:20000:x4"], ["M (elements of SRAM)", "lower bound", "flash1"]),
        (["--Bc", "8:64:x2", "--Br", 8, "-a", "flash1"], ["time, full overlap", "flash1, N = 64"]),
        (["-N", "32:128:x2", "-d", "8,16"], ["fewest bytes (next / it)", "flash2"]),
        (["-N", "32:128:x2"], ["N (tokens)", "HBM traffic of one head (elements)"]),
    ],
)
def test_the_picture_is_that_of_the_axes(
    arguments: list[object], shown: list[str], tmp_path: Path
) -> None:
    picture = tmp_path / "grid.svg"
    asked = arguments if "-N" in arguments else ["-N", 64, *arguments]
    result = invoke(*asked, "--plot", picture)
    assert result.exit_code == 0, result.stderr
    text = picture.read_text()
    assert all(words in text for words in shown), shown
