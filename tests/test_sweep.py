"""Theta(N^2 d^2 / M), with the paper's tiles: executed at the small end, in closed form beyond."""

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
from flashsim.cost.sweep import BASE, COUNT, EXECUTED, FITTED, GRIDS, THETA, Series, sweep


@pytest.fixture(scope="module")
def all_series() -> list[Series]:
    return list(sweep())


@pytest.fixture
def swept(all_series: list[Series], monkeypatch: pytest.MonkeyPatch) -> list[Series]:
    """The command line gets this list, so that it does not sweep once more."""
    series = list(all_series)
    monkeypatch.setattr(cost, "sweep", lambda on_series: series)
    return series


def test_traffic_grows_as_the_theorem_says(all_series: list[Series]) -> None:
    """Dao et al. 2022, Theorem 2: standard Theta(N d + N^2), FlashAttention Theta(N^2 d^2 / M)."""
    assert len(all_series) == COUNT
    for series in all_series:
        assert series.failures == []
        wanted = 2.0 if series.algorithm == "standard" else THETA[series.axis]
        assert series.expected == wanted
        assert series.exponent == pytest.approx(wanted, rel=0.05)
        assert all(point.compulsory_share < 0.05 for point in series.points)


def test_the_small_end_is_executed_and_moves_what_the_closed_form_says(
    all_series: list[Series],
) -> None:
    for series in all_series:
        ran = [point.executed_elements is not None for point in series.points]
        assert ran == [n < EXECUTED for n in range(len(ran))]
        assert all(p.executed_elements == p.total_elements for p in series.points[:EXECUTED])


def test_the_constants_are_12_and_8(all_series: list[Series]) -> None:
    """FA1 moves 3 N d a column tile of M/4d keys, FA2 2 N d a row tile; l and m add d/2 or less."""
    for series in all_series:
        constant = series.points[-1].constant
        if series.algorithm == "flash1":
            assert constant == pytest.approx(12 + 16 / series.points[-1].d, rel=0.01)
        if series.algorithm == "flash2":
            assert constant == pytest.approx(8, rel=0.01)


def test_grids_double_towards_more_traffic() -> None:
    for axis, grid in GRIDS.items():
        factor = 2 if THETA[axis] > 0 else 0.5
        assert [y / x for x, y in pairwise(grid)] == [factor] * (len(grid) - 1)
        assert BASE[axis] in grid[:EXECUTED]
        assert len(grid) >= FITTED


def test_what_does_not_hold_is_named(all_series: list[Series]) -> None:
    series = all_series[0]
    assert "exponent 1.800" in replace(series, exponent=1.8).failures[0]
    moved = replace(series, points=(replace(series.points[0], held=False), *series.points[1:]))
    assert "executed" in moved.failures[0]
    small = replace(series, points=(replace(series.points[0], total_elements=1),))
    assert "compulsory" in small.failures[0]


def test_the_command_verifies(swept: list[Series], tmp_path: Path) -> None:
    picture = tmp_path / "sweep.png"
    result = CliRunner().invoke(cli.app, ["sweep", "--plot", str(picture)])
    assert result.exit_code == 0
    assert "Verified" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_fails_if_an_exponent_is_off(swept: list[Series]) -> None:
    swept[0] = replace(swept[0], exponent=1.8)
    result = CliRunner().invoke(cli.app, ["sweep"])
    assert result.exit_code == 1
    assert "FAILED: standard over N: exponent 1.800" in result.stdout
    assert "NO 1.800" in result.stdout
    assert "Verified" not in result.stdout


def test_json_and_csv_hold_every_point(swept: list[Series]) -> None:
    points = [point for series in swept for point in series.points]
    records = json.loads(CliRunner().invoke(cli.app, ["sweep", "--json"]).stdout)["records"]
    assert [r["total_elements"] for r in records] == [p.total_elements for p in points]
    lines = CliRunner().invoke(cli.app, ["sweep", "--csv"]).stdout.splitlines()
    assert [int(r["total_elements"]) for r in csv.DictReader(lines)] == [
        p.total_elements for p in points
    ]
