"""SRAM below d x d: the two strategies that keep a tile of scores, and who moves the fewest."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.algorithms import ALGORITHMS, resident_scores, square_tiles
from flashsim.cost import small_sram
from flashsim.cost.counts import Head
from flashsim.cost.io import expected_cost
from flashsim.cost.study_reports import small_sram_report
from flashsim.masks import Mask
from flashsim.reference import exact
from strategies import calls, printed, shown_in, tilings

NAMES = ("square-tiles", "resident-scores")
names = st.sampled_from(NAMES)


def normal(N, d):
    return np.random.default_rng(0).standard_normal((3, N, d), dtype=np.float32)


def needed(name, N, d, Br, Bc, dv=None):
    return ALGORITHMS[name].needs(Head(Mask(N, N), d, dv or d), Br, Bc)[0]


@given(names, st.integers(1, 300), st.integers(1, 40), st.integers(1, 40))
def test_what_a_tile_needs_does_not_depend_on_the_width(name, d, Br, Bc):
    """A tile of scores, l and m, and one column of Q and K (or of O and V)."""
    assert needed(name, 1000, d, Br, Bc) == Br * Bc + 2 * Br + (Br + Bc)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("d", [2, 64])
def test_five_elements_are_enough_for_any_width_where_flash2_needs_4_d_plus_3(name, d):
    q, k, v = normal(6, d)
    out = fs.attention(q, k, v, algorithm=name, sram=5)
    assert out.tiles == (1, 1)
    assert out.sram_peak_elements == 5
    assert exact(q, k, v).output_ratio(out.output) <= 1
    with pytest.raises(ValueError, match=r"sram=4.*at least 5 elements"):
        fs.attention(q, k, v, algorithm=name, sram=4)
    with pytest.raises(ValueError, match=f"at least {4 * d + 3} elements"):
        fs.attention(q, k, v, algorithm="flash2", sram=4 * d + 2)


@settings(max_examples=30)
@given(calls(max_n=16, max_d=16), names, st.integers(5, 60))
def test_they_run_within_any_budget_below_d_squared(call, name, M):
    """Whatever the masks: with the array mask's own tile, six elements and more."""
    extra = 0 if call.what.get("attn_mask") is None else 1
    out = fs.attention(*call, algorithm=name, sram=M + extra, **call.what)
    assert out.sram_peak_elements <= M + extra
    assert exact(*call, **call.what).output_ratio(out.output) <= 1
    cost = expected_cost(out, *call, sram=M + extra, **call.what)
    for run, formula in ((out.traffic.reads, cost.reads), (out.traffic.writes, cost.writes)):
        assert {n: x for n, x in run.items() if x} == {n: x for n, x in formula.items() if x}


@given(names, st.integers(1, 24), st.integers(1, 9), st.integers(1, 9), st.integers(5, 200))
def test_the_optimal_tiles_are_the_best_of_all(name, N, d, dv, M):
    row, head = ALGORITHMS[name], Head(Mask(N, N), d, dv)
    moved = {
        (Br, Bc): row.count(head, Br=Br, Bc=Bc, elide=False).total_elements
        for Br in range(1, N + 1)
        for Bc in range(1, N + 1)
        if row.needs(head, Br, Bc)[0] <= M
    }
    assert moved[fs.tile_sizes(M, d, "optimal", name, N=N, dv=dv)] == min(moved.values())


@pytest.mark.parametrize(
    "name, expected", [("square-tiles", 4.0), ("resident-scores", 2 * math.sqrt(6))]
)
def test_for_large_n_and_m_traffic_is_that_many_n_n_d_over_the_root_of_m(name, expected):
    """Square tiles 4 N^2 d / sqrt(M), beside the N^2 of S once; scores resident 4.90, no N^2."""
    N, d, M = 2**22, 2**15, 2**24
    Br, Bc = fs.tile_sizes(M, d, "optimal", name, N=N)
    cost = fs.io_cost(name, N=N, d=d, Br=Br, Bc=Bc, convention="elided")
    leading = cost.total_elements - (N * N if name == "square-tiles" else 0)
    assert leading / (N * N * d / math.sqrt(M)) == pytest.approx(expected, rel=0.01)
    assert Br / Bc == pytest.approx(1 if name == "square-tiles" else 2 / 3, rel=0.15)
    assert needed(name, N, d, Br, Bc) <= M


def test_where_nothing_fits_nothing_wins():
    """d = 4: d^2 / 8 is two elements, and the least that any strategy needs is five."""
    assert small_sram.winner(small_sram.compare(1, 4, [1 / 8])[0]) is None
    result = CliRunner(env={"COLUMNS": "120"}).invoke(
        cli.app, ["small-sram", "--N", "1", "--d", "4"]
    )
    assert result.exit_code == 0, result.output
    (line,) = (x for x in result.stdout.splitlines() if x.startswith(" 0.125"))
    assert line.split() == ["0.125", "2", *["does", "not", "fit"] * 3, "-"]


def test_the_scores_are_written_once_or_not_at_all():
    N, d = 40, 12
    q, k, v = normal(N, d)
    square = fs.attention(q, k, v, algorithm="square-tiles", tiles=(5, 6))
    assert square.traffic.writes["S"] == N * N
    assert square.traffic.reads["S"] == 2 * N * N  # once for each 6 columns of O
    assert square.extra_hbm_elements == N * N + 2 * N
    resident = fs.attention(q, k, v, algorithm="resident-scores", tiles=(5, 6))
    assert set(resident.traffic.writes) == {"O", "L"}
    assert resident.extra_hbm_elements == N


def test_tiles_that_the_mask_empties_are_neither_written_nor_read():
    N, B = 24, 4
    q, k, v = normal(N, 4)
    out = fs.attention(q, k, v, algorithm="square-tiles", tiles=(B, B), is_causal=True)
    T = N // B
    visited = T * (T + 1) // 2 * B * B
    assert out.traffic.writes["S"] == out.traffic.reads["S"] == visited


@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_backward_pass_and_it_says_so(name):
    q, k, v = normal(6, 4)
    out = fs.attention(q, k, v, algorithm=name)
    accepted = f"algorithm='{name}': expected one that has a backward pass: 'standard', "
    for call in (
        lambda: out.backward(np.ones_like(q)),
        lambda: fs.io_cost(name, N=6, d=4, backward=True),
        lambda: fs.tile_sizes(100, 4, algorithm=name, backward=True),
    ):
        with pytest.raises(ValueError, match=accepted):
            call()


def test_flash2_moves_the_fewest_from_about_0_7_d_squared_on():
    """Executed, within each budget: neither far below nor from d^2 on is the winner the same.

    The closed form, which is what runs, puts the crossover at 0.78, 0.72 and 0.70 d^2 for d = 64,
    128 and 256: an M at which tiles are whole numbers, so it comes down to 0.68 as d grows.
    """
    below, above = small_sram.compare(192, 32, (0.5, 1.0))
    for points in (below, above):
        assert all(p.held and p.executed_elements == p.total_elements for p in points)
    assert small_sram.winner(below) == "resident-scores"
    assert small_sram.winner(above) == "flash2"
    assert small_sram.crossover(16384, 128) == pytest.approx(0.72, abs=0.005)


def test_where_flash2_cannot_run_the_others_do():
    (points,) = small_sram.compare(48, 32, (1 / 9,))
    assert points[0].M == 114 < 4 * 32 + 3
    assert [p.total_elements is None for p in points] == [True, False, False]
    assert all(p.held for p in points)
    assert small_sram.winner(points) == "square-tiles"


@pytest.mark.parametrize("module", [square_tiles, resident_scores])
@pytest.mark.parametrize("N, d", [(40, 9), (180, 32)])
def test_the_bound_rejects_weights_in_float16(monkeypatch, module, N, d):
    q, k, v = normal(N, d)
    name = module.__name__.rpartition(".")[2].replace("_", "-")
    ref = exact(q, k, v)
    right = fs.attention(q, k, v, algorithm=name, tiles=(30, 30))
    assert max(ref.output_ratio(right.output), ref.lse_ratio(right.lse)) <= 1
    exp = module.exp

    def rounded(s, m, out=None):
        P = exp(s, m, out=out)
        P[...] = P.astype(np.float16)
        return P

    monkeypatch.setattr(module, "exp", rounded)
    wrong = fs.attention(q, k, v, algorithm=name, tiles=(30, 30))
    assert max(ref.output_ratio(wrong.output), ref.lse_ratio(wrong.lse)) > 1


@settings(max_examples=30)
@given(calls(max_n=20), tilings)
def test_square_tiles_and_resident_scores_agree_with_each_other(call, tiles):
    """The one normalises O at the end, the other in every turn."""
    ref = exact(*call, **call.what)
    a, b = (fs.attention(*call, algorithm=n, tiles=tiles, **call.what) for n in NAMES)
    assert (np.abs(a.output.astype(float) - b.output) <= 2 * ref.output_bound).all()


def test_the_page_shows_what_the_command_prints(monkeypatch, capsys):
    """But for the run that it makes, and the crossovers, of which another test computes one."""
    rows = small_sram.compare(192, 32, execute=False)
    report = small_sram_report(192, 32, rows, {64: 0.78125, 128: 0.71875, 256: 0.703125})
    assert printed(report, monkeypatch, capsys) == shown_in("small_sram.md")


@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_half_precision_fit_at_every_budget_in_bytes(name):
    """What is born on chip takes four bytes there, and what is loaded two."""
    q, k, v = (x.astype(np.float16) for x in normal(9, 8))
    for size in range(20, 260, 3):
        try:
            out = fs.attention(q, k, v, algorithm=name, sram_bytes=size)
        except fs.SramOverflow:
            pytest.fail(f"tiles that were chosen for {size} bytes do not fit")
        except ValueError:
            assert size < ALGORITHMS[name].needs(Head(Mask(9, 9), 8, 8, stored=2), 1, 1)[1]
        else:
            assert out.sram_peak_bytes <= size


def test_the_command_runs_each_strategy_and_draws_who_wins(monkeypatch, tmp_path):
    monkeypatch.setattr(small_sram, "crossover", lambda N, d: 0.75)
    picture = tmp_path / "small.png"
    result = CliRunner().invoke(
        cli.app, ["small-sram", "-N", "24", "-d", "8", "--plot", str(picture), "--csv"]
    )
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + len(small_sram.RATIOS) * len(small_sram.STRATEGIES)
    assert picture.read_bytes().startswith(b"\x89PNG")
