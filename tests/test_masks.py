"""What the rules say of a tile is what they say of its scores, one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim.cost.counts import visits
from flashsim.masks import Mask, band
from flashsim.memory import Machine, blocks
from strategies import by_tile, tilings, visible


@st.composite
def rules(draw):
    """A Mask without an array, and its bool matrix by definition."""
    Nq, Nk = draw(st.integers(1, 25)), draw(st.integers(0, 25))
    side = st.none() | st.integers(0, 26)
    what = {
        "is_causal": draw(st.booleans()),
        "causal_align": draw(st.sampled_from(["bottom-right", "top-left"])),
        "window": draw(st.none() | st.tuples(side, side)),
    }
    keys = draw(st.none() | st.lists(st.booleans(), min_size=Nk, max_size=Nk))
    keep = visible(Nq, Nk, what | ({} if keys is None else {"key_padding_mask": np.array(keys)}))
    lo, hi = band(Nq, Nk, **what)
    return Mask(Nq, Nk, lo=lo, hi=hi, keys=None if keys is None else np.array(keys, bool)), keep


@given(rules(), tilings)
def test_a_tile_is_empty_full_or_partial_as_its_scores_are(rule, tiling):
    mask, keep = rule
    Br, Bc = tiling
    for i in blocks(mask.Nq, Br):
        for j in blocks(mask.Nk, Bc):
            scores = keep[i, j]
            assert mask.empty(i, j) == (not scores.any())
            assert mask.full(i, j) == scores.all()
            assert mask.row(i)(j) == mask.column(j)(i) == scores.any()
            assert np.array_equal(np.broadcast_to(mask.tile(i, j).keep(), scores.shape), scores)
            S = mask.tile(i, j)(np.zeros(scores.shape))
            assert np.array_equal(S == 0, scores)
            assert (S[~scores] == -np.inf).all()


@given(rules(), tilings)
def test_an_outer_key_tile_is_visited_if_any_query_needs_it(rule, tiling):
    mask, keep = rule
    for j in blocks(mask.Nk, tiling[1]):
        assert mask.any_row(j) == keep[:, j].any()


@given(rules(), tilings)
def test_the_sums_over_visited_tiles_are_those_of_the_grid(rule, tiling):
    """`visits` in O(Tr + Tc) against a walk over all tiles."""
    mask, keep = rule
    Br, Bc = tiling
    I, J = list(blocks(mask.Nq, Br)), list(blocks(mask.Nk, Bc))
    hit = np.array([[keep[i, j].any() for j in J] for i in I], bool).reshape(len(I), len(J))
    cols = np.array([j.stop - j.start for j in J], int)
    v = visits(mask, Br, Bc)
    assert by_tile(v, "rows") == [i.stop - i.start for i in I]
    assert by_tile(v, "tiles") == hit.sum(axis=1).tolist()
    assert by_tile(v, "keys") == (hit @ cols).tolist()
    assert v.keys_of_any == cols @ hit.any(axis=0)
    rows = np.array(by_tile(v, "rows"), int)
    assert (v.turns, v.tallest) == (len(I), max(rows, default=0))
    assert (v.row_visits, v.key_visits) == (rows @ hit.sum(axis=1), (hit @ cols).sum())
    assert (v.area, v.rows_of_any) == (rows @ (hit @ cols), rows @ hit.any(axis=1))
    places = [(rows[a], cols[b], hit[a, :b].any()) for a, b in zip(*np.nonzero(hit), strict=True)]
    assert v.first == {(r, c) for r, c, again in places if not again}
    assert v.later == {(r, c) for r, c, again in places if again}
    assert v.shapes == v.first | v.later


def test_a_partial_tile_costs_mask_work_and_a_full_one_none():
    mask = Mask(8, 8, hi=0)
    S = np.zeros((4, 4))
    assert mask.full(slice(4, 8), slice(0, 4))
    assert mask.tile(slice(4, 8), slice(0, 4))(S) is S
    assert not mask.full(slice(4, 8), slice(4, 8))
    assert mask.empty(slice(0, 4), slice(4, 8))


@pytest.mark.parametrize(
    "array", [np.zeros((6, 8)), np.zeros((1, 8)), np.zeros((6, 1)), np.zeros((1, 1))]
)
def test_an_array_is_loaded_as_it_is_stored_and_never_skips_a_tile(array):
    """A broadcast mask moves its own elements, not the scores it stands for."""
    machine = Machine()
    mask = Mask(6, 8, array=machine.hbm(mask=np.full_like(array, -np.inf))["mask"])
    i, j = slice(2, 5), slice(4, 8)
    assert not mask.empty(i, j)
    tile = mask.tile(i, j)
    assert machine.traffic.reads["mask"] == min(array.shape[0], 3) * min(array.shape[1], 4)
    assert not np.broadcast_to(tile.keep(), (3, 4)).any()


def test_a_float_mask_adds_and_masks_and_a_bool_mask_only_masks():
    bias = np.array([[0.5, -np.inf], [2.0, 0.0]], np.float32)
    S = np.ones((2, 2), np.float32)
    whole = slice(0, 2), slice(0, 2)
    assert Mask(2, 2, array=bias).tile(*whole)(S.copy()).tolist() == [[1.5, -np.inf], [3, 1]]
    keep = bias > -np.inf
    assert Mask(2, 2, array=keep).tile(*whole)(S.copy()).tolist() == [[1, -np.inf], [1, 1]]


def test_a_score_that_is_nan_behind_the_mask_becomes_minus_infinity():
    S = np.array([[np.nan, 1.0]])
    assert Mask(1, 2, lo=1).tile(slice(0, 1), slice(0, 2))(S).tolist() == [[-np.inf, 1.0]]


def test_a_tile_that_fills_the_band_to_its_edges_is_full():
    mask, rows = Mask(8, 8, lo=-3, hi=3), slice(2, 4)  # both rows see keys 0 to 5
    assert mask.full(rows, slice(0, 6))
    assert not mask.full(rows, slice(0, 7))
    assert not mask.full(slice(2, 5), slice(0, 6))
    assert not mask.full(slice(1, 4), slice(0, 6))
    assert not mask.empty(slice(0, 1), slice(3, 8))
    assert mask.empty(slice(0, 1), slice(4, 8))
    assert not mask.empty(slice(7, 8), slice(0, 5))
    assert mask.empty(slice(7, 8), slice(0, 4))


def test_a_broadcast_side_of_an_array_is_its_only_row_or_column():
    for rows, columns, where in (
        (6, 8, "2:5, 4:8"), (1, 8, "0:1, 4:8"), (6, 1, "2:5, 0:1"), (1, 1, "0:1, 0:1"),
    ):  # fmt: skip
        machine = Machine(log=[])
        Mask(6, 8, array=machine.hbm(mask=np.zeros((rows, columns)))["mask"]).tile(
            slice(2, 5), slice(4, 8)
        )
        assert [event.where for event in machine.log] == [where]


@pytest.mark.parametrize("Bc", [1, 2, 3, 4])
def test_rows_whose_band_lies_beyond_the_keys_visit_nothing(Bc):
    """Either side: queries 0 and 1 look before key 0, queries 6 to 8 behind key 3."""
    v = visits(Mask(9, 4, lo=-2, hi=-2), 1, Bc)
    assert by_tile(v, "tiles") == [0, 0, 1, 1, 1, 1, 0, 0, 0]
    assert v.keys_of_any == 4


def test_the_gradient_of_a_mask_is_written_where_it_is_one_heads_own_and_added_up_elsewhere():
    dS, i, j = np.array([[1.0, 2.0], [3.0, 4.0]]), slice(0, 2), slice(0, 2)
    own = np.full((2, 2), np.nan)
    assert Mask(2, 2, array=np.zeros((2, 2)), d_array=own).add_gradient(dS, i, j) is dS
    assert own.tolist() == dS.tolist()
    for shared, shape, total in (
        (True, (2, 2), [[11, 12], [13, 14]]), (False, (1, 2), [[14, 16]]),
        (False, (2, 1), [[13], [17]]), (False, (1, 1), [[20]]),
    ):  # fmt: skip
        added = np.full(shape, 10.0)
        mask = Mask(2, 2, array=np.zeros(shape), d_array=added, d_shared=shared)
        mask.add_gradient(dS, i, j)
        assert added.tolist() == total
