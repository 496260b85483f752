"""The laws of traffic: Theta(N^2 d^2 / M) of both passes, linear in the density of a layout."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashsim import cli
from flashsim.cost import sweep as cost
from flashsim.cost.sweep import (
    BASE,
    COMPULSORY,
    DENSITIES,
    EXECUTED,
    EXPECTED,
    FITTED,
    GRIDS,
    PUBLISHED_DENSE_MS,
    SPARSE,
    THETA,
    Line,
    Series,
    densities,
    sweep,
)


@pytest.fixture(scope="module")
def all_series() -> list[Series]:
    return [series for part in EXPECTED for series in sweep(part)]


@pytest.fixture(scope="module")
def all_lines() -> list[Line]:
    return densities()


@pytest.fixture
def swept(
    all_series: list[Series], all_lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> list[Series]:
    """The command line gets these, so that it does not sweep once more."""
    series = list(all_series)
    monkeypatch.setattr(
        cost, "sweep", lambda part, on_step: [one for one in series if one.part == part]
    )
    monkeypatch.setattr(cost, "densities", lambda on_step: all_lines)
    return series


def test_traffic_grows_as_the_theorem_says(all_series: list[Series]) -> None:
    """Dao et al. 2022, Theorems 2 and 5: standard Theta(N d + N^2), flash Theta(N^2 d^2 / M)."""
    assert len(all_series) == cost.steps(EXPECTED)
    for series in all_series:
        assert series.failures == []
        wanted = 2.0 if series.algorithm == "standard" else THETA[series.axis]
        assert series.expected == wanted
        assert series.exponent == pytest.approx(wanted, rel=0.05)
        assert all(point.compulsory_share < COMPULSORY for point in series.points)


def test_every_backward_pass_is_swept(all_series: list[Series]) -> None:
    found = {(s.algorithm, s.convention, s.axis) for s in all_series if s.part == "backward"}
    flash = [("flash1", "literal"), ("flash1", "elided"), ("flash2", "literal")]
    flash += [("flash2", "elided"), ("flash2-two-kernel", "literal")]
    wanted = {(*variant, axis) for variant in flash for axis in "NdM"}
    assert found == wanted | {("standard", "literal", "N")}


def test_the_small_end_is_executed_and_moves_what_the_closed_form_says(
    all_series: list[Series],
) -> None:
    for series in all_series:
        ran = [point.executed_elements is not None for point in series.points]
        assert ran == [n < EXECUTED for n in range(len(ran))]
        assert all(p.executed_elements == p.total_elements for p in series.points[:EXECUTED])


def test_the_constants_are_12_and_8_forward(all_series: list[Series]) -> None:
    """FA1 moves 3 N d a column tile of M/4d keys, FA2 2 N d a row tile; l and m add d/2 or less."""
    for series in all_series:
        constant = series.points[-1].constant
        if series.part == "forward" and series.algorithm == "flash1":
            assert constant == pytest.approx(12 + 16 / series.points[-1].d, rel=0.01)
        if series.part == "forward" and series.algorithm == "flash2":
            assert constant == pytest.approx(8, rel=0.01)


def test_the_constants_are_20_and_16_backward(all_series: list[Series]) -> None:
    """FA1 as printed moves 5 N d a column tile; without re-reading O, 4 N d, as FA2 does; the
    two-kernel form 2 N d a column tile and 2 N d a row tile. Statistics add 3 N or less to each.
    """
    for series in all_series:
        if series.part == "backward" and series.algorithm != "standard":
            printed = (series.algorithm, series.convention) == ("flash1", "literal")
            least, d = (20 if printed else 16), series.points[-1].d
            assert least < series.points[-1].constant < 1.01 * (least + 12 / d)


def test_grids_double_towards_more_traffic() -> None:
    for axis, grid in GRIDS.items():
        factor = 2 if THETA[axis] > 0 else 0.5
        assert [y / x for x, y in pairwise(grid)] == [factor] * (len(grid) - 1)
        assert BASE[axis] in grid
        assert len(grid) >= FITTED


def test_what_does_not_hold_is_named(all_series: list[Series]) -> None:
    series = all_series[0]
    assert "exponent 1.800" in replace(series, exponent=1.8).failures[0]
    moved = replace(series, points=(replace(series.points[0], held=False), *series.points[1:]))
    assert "executed" in moved.failures[0]
    small = replace(series, points=(replace(series.points[0], total_elements=1),))
    assert "compulsory" in small.failures[0]


def test_sparse_traffic_is_linear_in_the_share_of_blocks(all_lines: list[Line]) -> None:
    """Dao et al. 2022, Proposition 4: Theta(N d + N^2 d^2 s / M)."""
    N, d, B = SPARSE.values()
    Tc = N // B
    forward, both, _ = all_lines
    for line in (forward, both):
        assert line.failures == []
        assert line.held
        assert line.densities == DENSITIES
        assert line.r_squared > 0.9999
    assert forward.fit == pytest.approx((3 * Tc * N * d + 4 * Tc * N, N * d - 2 * N))
    assert both.fit == pytest.approx((7 * Tc * N * d + 7 * Tc * N, 5 * N * d - 2 * N))


def test_the_published_runtime_is_linear_too(all_lines: list[Line]) -> None:
    """Dao et al. 2022 (arXiv:2205.14135), Fig. 2 right: about 18.6 ms for each 10 % of blocks."""
    published = all_lines[-1]
    assert published.r_squared == pytest.approx(0.9993, abs=1e-4)
    assert published.fit == pytest.approx((186.1, 6.4), abs=0.05)
    assert published.at(1) == pytest.approx(PUBLISHED_DENSE_MS, rel=0.03)


def test_a_line_that_does_not_hold_is_named(all_lines: list[Line]) -> None:
    forward = all_lines[0]
    bent = replace(forward, values=(*forward.values[:-1], 2 * forward.values[-1]))
    assert [failure.split()[0] for failure in bent.failures] == ["slope", "intercept", "R^2"]
    assert "executed" in replace(forward, held=False).failures[0]


def test_the_command_verifies(swept: list[Series], tmp_path: Path) -> None:
    picture = tmp_path / "sweep.png"
    result = CliRunner().invoke(cli.app, ["sweep", "--plot", str(picture)])
    assert result.exit_code == 0
    assert "Verified" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("parts", [["forward"], ["backward"], ["sparse"], ["sparse", "forward"]])
def test_parts_can_be_picked(parts: list[str], swept: list[Series], tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    result = CliRunner().invoke(cli.app, ["sweep", *parts, "--plot", str(picture), "--json"])
    assert result.exit_code == 0
    assert {record["part"] for record in json.loads(result.stdout)["records"]} == set(parts)
    assert picture.exists()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_number_is_cut_at_any_width(columns: int, swept: list[Series]) -> None:
    shown, wide = (
        CliRunner(env={"COLUMNS": str(n)}).invoke(cli.app, ["sweep"]).stdout for n in (columns, 400)
    )
    assert max(map(len, shown.splitlines())) <= columns
    assert {word for word in wide.split() if word[0].isdigit()} <= set(shown.split())


def test_the_command_fails_if_an_exponent_is_off(swept: list[Series]) -> None:
    swept[0] = replace(swept[0], exponent=1.8)
    swept[-1] = replace(swept[-1], exponent=-0.8)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["sweep"])
    assert result.exit_code == 1
    assert "FAILED: standard over N: exponent 1.800" in result.stdout
    assert "FAILED: flash2-two-kernel, backward, over M: exponent -0.800" in result.stdout
    assert "NO 1.800" in result.stdout
    assert "Verified" not in result.stdout


def test_json_and_csv_hold_every_point(swept: list[Series], all_lines: list[Line]) -> None:
    points = [point.total_elements for series in swept for point in series.points]
    lines = [value for line in all_lines for value in line.values]
    records = json.loads(CliRunner().invoke(cli.app, ["sweep", "--json"]).stdout)["records"]
    found = [r.get("total_elements", r.get("elements", r.get("ms"))) for r in records]
    assert found == [*points, *lines]
    rows = csv.DictReader(CliRunner().invoke(cli.app, ["sweep", "--csv"]).stdout.splitlines())
    texts = [row["total_elements"] or row["elements"] or row["ms"] for row in rows]
    assert [float(text) for text in texts] == [*points, *lines]
