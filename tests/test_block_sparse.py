"""Block layouts: exact for their own mask, counted, linear in the density; and their price."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashsim as fs
from flashsim import layouts
from flashsim.cost.counts import visits
from flashsim.cost.io import expected_cost
from flashsim.masks import Layout, Mask
from flashsim.memory import blocks
from flashsim.reference import exact, exact_gradients
from strategies import by_tile, calls, tilings, visible

ROWS = [("block_sparse", "literal"), ("block_sparse", "elided"), ("flash2", "literal")]
rows = st.sampled_from(ROWS)


@st.composite
def sparse_calls(draw, **how):
    """A call with a random block layout over its tiles, and those tiles."""
    call, tiles = draw(calls(max_n=24, **how)), draw(tilings)
    Nq, Nk = call.q.shape[-2], call.k.shape[-2]
    grid = -(-Nq // min(tiles[0], Nq)), -(-Nk // max(1, min(tiles[1], Nk)))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    keep = rng.random(grid) < draw(st.sampled_from([0.0, 0.2, 0.5, 0.9]))
    return dataclasses.replace(call, what={**call.what, "block_mask": keep}), tiles


def expanded(call, tiles):
    """The layout as a bool mask, one score at a time, and with it the bool array of the call."""
    Nq, Nk = call.q.shape[-2], call.k.shape[-2]
    Br, Bc = min(tiles[0], Nq), max(1, min(tiles[1], Nk))
    keep = call.what["block_mask"]
    return np.array([[keep[i // Br, j // Bc] for j in range(Nk)] for i in range(Nq)], bool).reshape(
        Nq, Nk
    )


def gradient_of_output(call):
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    return np.random.default_rng(3).standard_normal(shape).astype(call.q.dtype)


@given(sparse_calls(), rows, tilings)
def test_a_layout_is_dense_attention_under_the_expanded_mask(drawn, row, others):
    """Forward and backward, ragged edges and other tiles in the backward pass included."""
    call, tiles = drawn
    what = {n: x for n, x in call.what.items() if n not in ("attn_mask", "block_mask")}
    mask = expanded(call, tiles)
    ref = exact(*call, **what, attn_mask=mask)
    out = fs.attention(
        *call, algorithm=row[0], convention=row[1], tiles=tiles, **what,
        block_mask=call.what["block_mask"],
    )  # fmt: skip
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1
    do = gradient_of_output(call)
    got = out.backward(do, tiles=others)
    assert max(exact_gradients(*call, do, **what, attn_mask=mask).ratios(got).values()) <= 1


@given(sparse_calls(), rows, tilings)
def test_executed_is_the_closed_form_for_each_array(drawn, row, others):
    call, tiles = drawn
    out = fs.attention(*call, algorithm=row[0], convention=row[1], tiles=tiles, **call.what)
    out.backward(gradient_of_output(call), tiles=others)
    for backward, traffic, peak in (
        (False, out.traffic, out.sram_peak_elements),
        (True, out.traffic_backward, out.sram_peak_backward_elements),
    ):
        cost = expected_cost(out, *call, convention=row[1], backward=backward, **call.what)
        for ran, formula in ((traffic.reads, cost.reads), (traffic.writes, cost.writes)):
            assert {n: x for n, x in ran.items() if x} == {n: x for n, x in formula.items() if x}
        assert peak == cost.sram_elements


@settings(max_examples=300)
@given(
    st.integers(1, 20), st.integers(1, 20), tilings, tilings, st.floats(0, 1), st.integers(0, 99),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_tile_is_empty_full_or_partial_as_its_scores_are(
    Nq, Nk, block, tiling, density, seed, causal, padded
):
    """With tiles that are not the layout's blocks, a band and padding in any combination."""
    rng = np.random.default_rng(seed)
    (br, bc), (Br, Bc) = block, tiling
    keep = rng.random((-(-Nq // br), -(-Nk // bc))) < density
    keys = rng.random(Nk) < 0.6 if padded else None
    what = {"is_causal": causal} | ({"key_padding_mask": keys} if padded else {})
    hi = Nk - Nq if causal else None
    mask = Mask(Nq, Nk, hi=hi, keys=keys, layout=Layout(keep, br, bc))
    scores = visible(Nq, Nk, what) & np.kron(keep, np.ones((br, bc), bool))[:Nq, :Nk]
    I, J = list(blocks(Nq, Br)), list(blocks(Nk, Bc))
    hit = np.array([[scores[i, j].any() for j in J] for i in I])
    for a, i in enumerate(I):
        for b, j in enumerate(J):
            assert mask.empty(i, j) == (not hit[a, b])
            assert mask.full(i, j) == scores[i, j].all()
            assert np.array_equal(
                np.broadcast_to(mask.tile(i, j).keep(), scores[i, j].shape), scores[i, j]
            )
            assert mask.first(i, j) == (not hit[a, :b].any())
    v = visits(mask, Br, Bc)
    cols = np.array([j.stop - j.start for j in J])
    assert by_tile(v, "tiles") == hit.sum(axis=1).tolist()
    assert by_tile(v, "keys") == (hit @ cols).tolist()
    assert v.keys_of_any == cols @ hit.any(axis=0)
    order = np.cumsum(hit, axis=1)
    places = [
        (by_tile(v, "rows")[a], int(cols[b]), order[a, b])
        for a, b in zip(*np.nonzero(hit), strict=True)
    ]
    assert v.first == {(r, c) for r, c, n in places if n == 1}
    assert v.later == {(r, c) for r, c, n in places if n > 1}


@pytest.mark.parametrize("row", ROWS)
def test_an_empty_block_row_is_zero_with_zero_gradients(row):
    """tilelang #1330; LMCache PR #3092; vllm PR #49054: layout [[0, 0], [1, 1]], uninitialised output."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 8, 3), dtype=np.float32)
    keep = np.array([[0, 0], [1, 1]], bool)
    out = fs.attention(q, k, v, algorithm=row[0], convention=row[1], tiles=(4, 4), block_mask=keep)
    dq, dk, dv = out.backward(do)
    assert (out.output[:4] == 0).all()
    assert (out.lse[:4] == -np.inf).all()
    assert (dq[:4] == 0).all()
    alone = fs.attention(q[4:], k, v)
    np.testing.assert_allclose(out.output[4:], alone.output, rtol=1e-5, atol=1e-6)
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("row", ROWS)
def test_ragged_sizes_with_a_random_layout_are_right(row):
    """pytorch #141126, PR #143534: 101 x 129, blocks of 64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 8), dtype=np.float32) for n in (101, 129, 129))
    keep = rng.random((2, 3)) < 0.6
    keep[0, 2] = True
    out = fs.attention(
        q, k, v, algorithm=row[0], convention=row[1], tiles=(64, 64), block_mask=keep
    )
    mask = np.kron(keep, np.ones((64, 64), bool))[:101, :129]
    ref = exact(q, k, v, attn_mask=mask)
    assert ref.output_ratio(out.output) <= 1


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 6), st.floats(0, 1))
def test_block_sparse_traffic_is_the_papers_formula(n, B, d, share):
    """(1 + 3 s Tc) N d + (4 s Tc - 2) N when every row of blocks is hit: linear in s."""
    keep = layouts.at_random(n, max(share, 1 / n))
    N, s = n * B, layouts.density(keep)
    cost = fs.io_cost("block_sparse", N=N, d=d, Br=B, Bc=B, block_mask=keep, convention="elided")
    visited = round(s * n * n)  # blocks; s Tc = visited / n
    assert keep.any(axis=0).all()
    assert cost.total_elements == (n + 3 * visited) * B * d + (4 * visited - 2 * n) * B


@pytest.mark.parametrize(
    "k, density", [(2, 0.75), (3, 0.5), (4, 0.3125), (5, 0.1875), (6, 0.109375)]
)
def test_butterfly_has_the_published_density(k, density):
    """Pixelated Butterfly: (k + 1) / 2^k with all factors, symmetric, the diagonal kept."""
    keep = layouts.butterfly(2**k)
    assert layouts.density(keep) == density
    assert (keep == keep.T).all()
    assert keep.diagonal().all()
    assert layouts.density(layouts.butterfly(2**k, 1)) == 2 / 2**k


def test_layout_builders_by_hand():
    assert layouts.causal(3).tolist() == np.tril(np.ones((3, 3), bool)).tolist()
    assert layouts.local_global(4, 0, 1).astype(int).tolist() == [
        [1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1],
    ]  # fmt: skip
    assert layouts.strided(4, 2).astype(int).tolist() == [
        [1, 0, 1, 0], [1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1],
    ]  # fmt: skip
    assert layouts.at_random((4, 6), 0.5).sum() == 12
    assert layouts.at_random(5, 0.2).diagonal().all()
    assert layouts.local_global((2, 3)).shape == (2, 3)


BAD = {
    "no layout": (lambda q: fs.attention(q, q, q, algorithm="block_sparse", tiles=(4, 4)), ValueError, "block_mask=None: expected a block layout"),
    "no tiles": (lambda q: fs.attention(q, q, q, block_mask=np.ones((2, 2), bool)), ValueError, "tiles=None: expected"),
    "layout of another shape": (lambda q: fs.attention(q, q, q, tiles=(4, 4), block_mask=np.ones((2, 3), bool)), ValueError, r"block_mask.shape=\(2, 3\): expected \(2, 2\)"),
    "layout of numbers": (lambda q: fs.attention(q, q, q, tiles=(4, 4), block_mask=np.ones((2, 2))), TypeError, "block_mask.dtype='float64'"),
    "butterfly of 6": (lambda q: layouts.butterfly(6), ValueError, "blocks=6: expected a power of two"),
    "density 2": (lambda q: layouts.at_random(4, 2), ValueError, "density=2: expected a share"),
    "stride 0": (lambda q: layouts.strided(4, 0), ValueError, "stride=0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_unusable_layout_is_named(case):
    call, error, says = BAD[case]
    with pytest.raises(error, match=says):
        call(np.ones((8, 2), np.float32))


def test_the_weight_that_a_layout_drops_is_what_its_softmax_misses():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2, 12, 4))
    keep = layouts.local_global(3, 0, 0)
    dropped = layouts.weight_outside(q, k, keep, (4, 4), is_causal=True)
    weights = fs.attention(q, k, np.broadcast_to(np.eye(12), (2, 12, 12)), is_causal=True).output
    outside = ~np.kron(keep, np.ones((4, 4), bool))
    np.testing.assert_allclose(dropped, (weights * outside).sum(axis=-1), atol=1e-12)
    assert (layouts.weight_outside(q, k, np.ones((3, 3), bool), (4, 4)) == 0).all()
    assert (layouts.weight_outside(q, k, np.zeros((3, 3), bool), (4, 4)) == 1).all()


def test_a_tile_that_cuts_blocks_is_empty_if_all_it_has_of_the_kept_ones_is_masked():
    """Every tile of 6 x 6 scores, over blocks of 2 x 3, under a few bands and paddings."""
    spans = [slice(a, b) for a in range(6) for b in range(a + 1, 7)]
    rng = np.random.default_rng(0)
    for lo, hi, real in ((-9, 9, 6), (-9, 0, 6), (-9, -2, 6), (1, 9, 6), (-1, 1, 5), (-9, 9, 2)):
        for _ in range(3):
            layout = Layout(rng.random((3, 2)) < 0.4, 2, 3)
            mask = Mask(6, 6, lo=lo, hi=hi, keys=np.arange(6) < real, layout=layout)
            whole = mask.tile(slice(0, 6), slice(0, 6)).keep()
            for i in spans:
                for j in spans:
                    assert mask.empty(i, j) == (not whole[i, j].any())
                    assert mask.full(i, j) == whole[i, j].all()
