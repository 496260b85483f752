"""Bounds hold for every algorithm, pass, tiling and mask; the figures published with them."""

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.algorithms import ALGORITHMS
from flashsim.cli_options import blocks_kept
from flashsim.cost.bounds import BOUNDS, COMPULSORY, COMPULSORY_BACKWARD, Work, best
from flashsim.masks import Layout, Mask, band
from flashsim.problem import checked
from strategies import backwards, calls, tilings, variants, visible

PASSES = [
    (name, convention, backward)
    for name, row in ALGORITHMS.items()
    if row.exact
    for backward in (False, True)
    for convention in (tuple(row.backward) if backward else row.conventions)
]
sizes = st.integers(1, 3000)
widths = st.integers(1, 160)


def by_name(name, backward=False):
    (found,) = [b for b in BOUNDS if (b.name, b.backward) == (name, backward)]
    return found


def dense(N, d, dv=None):
    return Work.of(Mask(N, N), d, d if dv is None else dv)


def all_kept(name, N, Nk, Br, Bc):
    """A layout that keeps every block, for the algorithms that need one."""
    if ALGORITHMS[name].requires != "block_mask":
        return None
    return np.ones((-(-N // min(Br, N)), -(-Nk // min(Bc, Nk))), bool)


@given(
    st.sampled_from(PASSES), sizes, sizes, widths, widths, st.integers(1, 3000),
    st.integers(1, 3000), st.booleans(), st.none() | st.tuples(st.integers(0, 99), st.none()),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)]),
)  # fmt: skip
def test_no_closed_form_moves_less_than_a_bound_of_the_chip_that_it_needs(
    which, N, Nk, d, dv, Br, Bc, causal, window, heads
):
    """Heads that share K and V included: the bounds count those once."""
    name, convention, backward = which
    what = {"is_causal": causal, "window": window}
    cost = fs.io_cost(
        name, N=N, Nk=Nk, d=d, dv=dv, Br=Br, Bc=Bc, heads=heads[0], kv_heads=heads[1],
        convention=convention, backward=backward, block_mask=all_kept(name, N, Nk, Br, Bc), **what,
    )  # fmt: skip
    lo, hi = band(N, Nk, causal_align="bottom-right", **what)
    work = Work.of(Mask(N, Nk, lo=lo, hi=hi), d, dv, *heads)
    for bound in BOUNDS:
        if bound.backward == backward:
            least = bound.elements(work, cost.sram_elements)
            assert least is None or least <= cost.total_elements


@given(
    st.sampled_from(PASSES), st.integers(1, 2**20), st.integers(1, 256), st.integers(1, 10**6),
    st.sampled_from(["optimal", "strict"]),
)  # fmt: skip
def test_the_best_tiles_of_a_chip_move_no_less_than_its_bounds(which, N, d, M, rule):
    name, convention, backward = which
    try:
        Br, Bc = fs.tile_sizes(M, d, rule, name, N, backward=backward)
    except ValueError:
        assume(False)
    row = ALGORITHMS[name].backward[convention] if backward else ALGORITHMS[name]
    head = checked(*np.zeros((3, 1, d), np.float32)).head
    more = row.more(head, M, math.inf)
    cost = row.count(
        type(head)(Mask(N, N), d, d), Br=Br, Bc=Bc, elide=convention == "elided", **more
    )
    least, _ = best(dense(N, d), M, backward=backward)
    assert least <= cost.total_elements


@given(calls(max_n=24, dropout=False), variants, tilings)
def test_no_run_moves_less_than_its_bounds(call, variant, tiles):
    name, convention = variant
    out = fs.attention(*call, algorithm=name, tiles=tiles, convention=convention, **call.what)
    one = checked(*call, **call.what)
    assume(one.array is None)  # an array hides scores by data; rows it hides are moved all the same
    work = total(one)
    for bound in BOUNDS:
        least = None if bound.backward else bound.elements(work, max(1, out.sram_peak_elements))
        assert least is None or least <= out.traffic.total_elements


@given(calls(max_n=24, dropout=False), backwards, tilings)
def test_no_backward_run_moves_less_than_its_bounds(call, variant, tiles):
    name, convention = variant
    out = fs.attention(*call, algorithm=name, tiles=tiles, convention=convention, **call.what)
    one = checked(*call, **call.what)
    assume(one.array is None)
    out.backward(np.ones_like(out.output).astype(call.q.dtype))
    for bound in BOUNDS:
        least = bound.elements(total(one), max(1, out.sram_peak_backward_elements))
        assert least is None or not bound.backward or least <= out.traffic_backward.total_elements


def total(problem):
    """The work of all items, each with its own padding."""
    *batch, heads = problem.q.shape[:-2]
    parts = [
        Work.of(problem.mask((*item, 0)), problem.head.d, problem.head.dv, heads,
                heads // problem.group)
        for item in np.ndindex(*batch)
    ]  # fmt: skip
    return Work(
        *(sum(getattr(p, name) for p in parts) for name in ("scores", "queries", "keys")),
        problem.head.d,
        problem.head.dv,
    )


@given(calls(max_n=20, max_d=2, dropout=False), tilings, st.integers(0, 2**32 - 1))
def test_scores_queries_and_keys_are_those_of_the_definition(call, blocks, seed):
    """Band, padding with holes and a block layout, one score at a time."""
    problem = checked(*call, **call.what)
    Nq, Nk = problem.lengths
    Br, Bc = max(1, min(blocks[0], Nq)), max(1, min(blocks[1], Nk))
    keep = np.random.default_rng(seed).random((-(-Nq // Br), -(-Nk // Bc))) < 0.6
    for item in np.ndindex(*problem.q.shape[:-3]):
        one = problem.mask((*item, 0))
        see = visible(Nq, Nk, call.what, item)
        for layout in (None, Layout(keep, Br, Bc)):
            mask = Mask(Nq, Nk, lo=one.lo, hi=one.hi, keys=one.keys, layout=layout)
            if layout is not None:
                see &= layout.scores(slice(0, Nq), slice(0, Nk))
            work = Work.of(mask, 3, 5, 4, 2)
            assert work.scores == 4 * see.sum()
            assert work.queries == 4 * see.any(axis=1).sum()
            assert work.keys == 2 * see.any(axis=0).sum()


def test_dense_square_attention_must_move_4_n_d_and_7_n_d():
    work = dense(1000, 64)
    assert COMPULSORY.elements(work, 1) == 4 * 1000 * 64
    assert COMPULSORY_BACKWARD.elements(work, 1) == 7 * 1000 * 64


def test_one_tile_of_everything_moves_the_compulsory_traffic_and_the_statistics():
    """FlashAttention-2 on a chip that holds all: 4 N d and L; the bound cannot be raised."""
    N, d = 96, 16
    cost = fs.io_cost("flash2", N=N, d=d, Br=N, Bc=N)
    assert cost.total_elements - N == COMPULSORY.elements(dense(N, d), math.inf)


def test_keys_that_a_window_hides_need_not_be_read():
    """Two queries, bottom-right aligned, that see three keys each: four of a thousand keys."""
    lo, hi = band(2, 1000, is_causal=True, causal_align="bottom-right", window=(2, None))
    work = Work.of(Mask(2, 1000, lo=lo, hi=hi), 8, 8)
    assert (work.scores, work.queries, work.keys) == (6, 2, 4)


def test_the_bound_of_a_chip_is_saha_and_yes_with_its_constant():
    """N = 65,536, d = 64, 164 KB of float16: 41.8 N d; the best FlashAttention-2 moves 5 times it.

    The formula is worked out by hand here: M = 83,968, 4 d^2 = 16,384.
    """
    N, d, M = 65536, 64, 82 * 1024
    least = by_name("Saha-Ye").elements(dense(N, d), M)
    assert least == math.ceil(N * N * 4096 / 100352 - 83968)
    assert least / (N * d) == pytest.approx(41.8, abs=0.05)
    Br, Bc = fs.tile_sizes(M, d, "optimal", "flash2", N)
    moved = fs.io_cost("flash2", N=N, d=d, Br=Br, Bc=Bc).total_elements
    assert moved / (N * d) == pytest.approx(208, abs=0.5)
    assert best(dense(N, d), M) == (least, by_name("Saha-Ye"))


def test_the_bound_of_dp_takes_the_width_of_v_and_that_of_the_scores_the_width_of_q():
    """By hand: 2^24 scores, M = 2048; M + 4 d^2 = 3072 and M + 4 dv^2 = 18,432."""
    work = dense(4096, 16, dv=64)
    assert by_name("Saha-Ye").elements(work, 2048) == math.ceil(2**24 * 256 / 3072 - 2048)
    of_dP = by_name("Saha-Ye, of dP", backward=True)
    assert of_dP.elements(work, 2048) == math.ceil(2**24 * 4096 / 18432 - 2048)


@given(st.integers(1, 10**6), widths, st.integers(1, 10**7))
def test_a_bound_out_of_its_range_is_none(N, d, M):
    work = dense(N, d)
    assert (by_name("Saha-Ye").elements(work, M) is None) == (N * N * d * d <= M * (M + 4 * d * d))
    assert (by_name("Saha-Ye, small chip").value(work, M) is None) == (d * d <= M)
    for bound in BOUNDS:
        assert not bound.order or bound.elements(work, M) is None


def test_a_chip_without_a_limit_leaves_the_compulsory_traffic():
    for backward, bound in ((False, COMPULSORY), (True, COMPULSORY_BACKWARD)):
        assert best(dense(4096, 64), math.inf, backward=backward)[1] is bound


def test_an_approximation_is_held_against_the_compulsory_traffic_alone():
    assert best(dense(65536, 64), 4096, exact=False)[1] is COMPULSORY
    assert best(dense(65536, 64), 4096)[1] is not COMPULSORY


@given(
    st.sampled_from([name for name, row in ALGORITHMS.items() if not row.exact]),
    st.integers(1, 500), st.integers(1, 64), st.integers(1, 100), st.integers(1, 99),
)  # fmt: skip
def test_no_approximation_moves_less_than_the_compulsory_traffic(name, N, d, B, coarse):
    what = {ALGORITHMS[name].requires: min(coarse, N)}
    cost = fs.io_cost(name, N=N, d=d, Br=B, Bc=B, **what)
    least, bound = best(dense(N, d), cost.sram_elements, exact=False)
    assert bound is COMPULSORY
    assert least <= cost.total_elements


def test_nothing_is_the_bound_of_nothing():
    for backward in (False, True):
        assert best(Work.of(Mask(0, 9), 4, 4), 100, backward=backward)[0] == 0


@pytest.mark.parametrize("d", [16, 64, 128])
def test_the_orders_cross_where_the_chip_holds_d_squared(d):
    """Saha and Ye: N^2 d^2 / M meets N^2 d / sqrt(M) at M = d^2; Li et al.'s two terms also do."""
    N = 4096
    at = dense(N, d)
    just_below = by_name("Saha-Ye, small chip").value(at, d * d - 1)
    assert just_below == pytest.approx(N * N * d * d / (d * d - 1), rel=0.01)
    li = by_name("Li et al.", backward=True).value
    assert li(at, d * d) == pytest.approx(N * N + N * d)
    assert li(at, 4 * d * d) == pytest.approx(li(at, d * d) / 4)
    assert li(at, d * d / 4) == pytest.approx(li(at, d * d) * 2)


@pytest.mark.parametrize("algorithm, times", [("flash1", 6), ("flash2", 4)])
def test_the_best_tiles_of_a_large_chip_are_a_constant_from_the_bound(algorithm, times):
    """N >> M >> d^2: about 6 N^2 d^2 / M for FlashAttention, 4 for its successor, 1 at least."""
    N, d, M = 2**26, 128, 256 * 128**2
    Br, Bc = fs.tile_sizes(M, d, "optimal", algorithm, N)
    moved = fs.io_cost(algorithm, N=N, d=d, Br=Br, Bc=Bc).total_elements
    assert moved / by_name("Saha-Ye").elements(dense(N, d), M) == pytest.approx(times, rel=0.04)


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda b: f"{b.name}, {b.backward}")
def test_every_bound_says_where_it_is_from_and_where_it_holds(bound):
    assert bound.formula
    assert bound.source
    assert bound.validity.endswith(".")
    assert bound.order == ("order of growth" in bound.formula)


def io(*arguments):
    result = CliRunner(env={"COLUMNS": "120"}).invoke(cli.app, ["io", *map(str, arguments)])
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize(
    "options, mask, heads",
    [
        ((), {}, 1),
        (("--causal", "--heads", 3, "--batch", 2), {"is_causal": True, "window": None}, 6),
        (("--window", "99,0"), {"is_causal": False, "window": (99, 0)}, 1),
    ],
)
def test_io_shows_the_distance_to_the_best_bound(options, mask, heads):
    """M is what the chip holds in float16, or what tiles need that do not fit."""
    found = json.loads(
        io("-N", 5000, "-d", 32, "--sram-kb", 16, "--rule", "paper", "--backward", "--json",
           *options)
    )  # fmt: skip
    lo, hi = band(5000, 5000, causal_align="bottom-right", **mask) if mask else (None, None)
    work = Work.of(Mask(5000, 5000, lo=lo, hi=hi), 32, 32, heads)
    assert len(found["records"]) > 8
    for record in found["records"]:
        backward, M = record["pass"] == "backward", max(8192, record["sram_elements"])
        least, bound = best(work, M, backward=backward)
        assert (record["bound_elements"], record["bound"]) == (least, bound.name)
        assert record["ratio_to_bound"] == record["total_elements"] / least > 1
        compulsory = COMPULSORY_BACKWARD if backward else COMPULSORY
        assert record["compulsory_elements"] == compulsory.elements(work, M)


def test_io_says_which_bound_it_divides_by():
    shown = io("-N", 65536, "--sram", 82 * 1024)
    assert "over bound, forward: over what nothing moves less than on this chip, 175 M" in shown
    assert "Saha-Ye: scores d^2" in shown


def test_io_of_a_layout_bounds_what_its_blocks_keep():
    found = json.loads(
        io("-N", 4096, "--layout", "random:0.25", "--sram", 8192, "--tiles", "64,64", "--json")
    )
    (record, *_) = found["records"]
    keep = blocks_kept("random:0.25", (64, 64), 4096, 4096)[1]
    work = Work.of(Mask(4096, 4096, layout=Layout(keep, 64, 64)), 64, 64)
    assert work.scores == keep.sum() * 64 * 64
    assert record["bound_elements"] == best(work, max(8192, record["sram_elements"]))[0]
