"""The state (m, l, O) is a monoid, and every algorithm carries it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import flashsim as fs
from flashsim.algorithms.standard import softmax, softmax_in_two_passes
from flashsim.memory import Machine, tiles
from flashsim.online_softmax import (
    State,
    exp,
    finish,
    identity,
    log,
    merge,
    of_tile,
    over,
    shift,
    weigh,
)
from strategies import VARIANTS, same_bits

scores = st.floats(-30, 30, width=32).map(lambda x: x + 0.0) | st.just(-np.inf)  # no -0.0


@st.composite
def splits(draw, parts):
    """Scores (rows, keys) and values (keys, dv), cut into consecutive parts, some empty."""
    rows, keys, dv = draw(st.integers(1, 4)), draw(st.integers(0, 12)), draw(st.integers(1, 3))
    S = draw(npst.arrays(np.float32, (rows, keys), elements=scores)).astype(float)
    V = draw(npst.arrays(np.float32, (keys, dv), elements=st.floats(-8, 8, width=32))).astype(float)
    cuts = sorted(draw(st.lists(st.integers(0, keys), min_size=parts - 1, max_size=parts - 1)))
    edges = [0, *cuts, keys]
    return S, V, [of_tile(S[:, a:b], V[a:b]) for a, b in pairwise(edges)]


def close(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(
            x, y, rtol=1e-13, atol=1e-13 * (1 + np.abs(y[np.isfinite(y)]).max(initial=0))
        )


def test_the_worked_example():
    """[2, 1, 3, 0] in two blocks: m = 3, l = 1.5530, weights 0.2369, 0.0871, 0.6439, 0.0321."""
    s, V = np.array([[2.0, 1, 3, 0]]), np.eye(4)
    first, second = of_tile(s[:, :2], V[:2]), of_tile(s[:, 2:], V[2:])
    assert (first.m, second.m) == (2, 3)
    assert first.l == 1 + np.exp(-1)
    m, l, _ = both = merge(first, second)
    assert m == 3
    assert round(float(l[0]), 4) == 1.5530
    weights, lse = finish(both)
    assert [round(float(w), 4) for w in weights[0]] == [0.2369, 0.0871, 0.6439, 0.0321]
    assert lse == 3 + np.log(l)


@given(splits(2))
def test_merging_commutes_bit_for_bit(split):
    _, _, (a, b) = split
    assert all(same_bits(x, y) for x, y in zip(merge(a, b), merge(b, a), strict=True))


@given(splits(2))
def test_no_keys_are_the_identity(split):
    _, V, (a, _) = split
    e = identity(len(a.m), V.shape[1], float)
    assert all(np.array_equal(x, y) for x, y in zip(merge(a, e), a, strict=True))
    assert all(np.array_equal(x, y) for x, y in zip(merge(e, a), a, strict=True))
    assert all(np.array_equal(x, y) for x, y in zip(merge(e, e), e, strict=True))


@given(splits(4))
def test_any_bracketing_gives_the_same_state(split):
    S, V, (a, b, c, d) = split
    whole = of_tile(S, V)
    for state in (
        merge(merge(merge(a, b), c), d),
        merge(a, merge(b, merge(c, d))),
        merge(merge(a, b), merge(c, d)),
        merge(merge(d, b), merge(a, c)),
    ):
        assert same_bits(state.m, whole.m)
        close(state, whole)
        close(finish(state), finish(whole))


@given(splits(1))
def test_the_state_of_all_keys_finishes_as_softmax(split):
    S, V, (state,) = split
    output, lse = finish(state)
    for i, s in enumerate(S):
        if np.isfinite(s).any():
            w = np.exp(s - s.max())
            np.testing.assert_allclose(output[i], w @ V / w.sum(), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(lse[i], s.max() + np.log(w.sum()), rtol=1e-12, atol=1e-12)
        else:
            assert (output[i] == 0).all()
            assert lse[i] == -np.inf


@pytest.mark.parametrize("variant", VARIANTS)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.integers(1, 12))
def test_every_algorithm_carries_the_state_of_its_tiles(variant, Nq, Nk, Br, Bc):
    """The update that each writes out, against identity, of_tile, merge and finish."""
    rng = np.random.default_rng(Nq * 31 + Nk)
    q, k, v = (rng.standard_normal((n, 5)) for n in (Nq, Nk, Nk))
    out = fs.attention(
        q, k, v, algorithm=variant[0], convention=variant[1], tiles=(Br, Bc), scale=1.0
    )
    state = identity(Nq, 5, float)
    for _, Kj, Vj in tiles(Bc, k, v):
        state = merge(state, of_tile(q @ Kj.T, Vj))
    output, lse = finish(state)
    np.testing.assert_allclose(out.output, output, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(out.lse, lse, rtol=1e-12, atol=1e-12)


def test_online_softmax_takes_three_accesses_an_element_and_safe_softmax_four():
    """Milakov & Gimelshein 2018 (arXiv:1805.02867), section 3: counted on one row of 1000."""
    row = np.random.default_rng(0).standard_normal((1, 1000)).astype(np.float32)

    def accesses(algorithm):
        machine, P = Machine(), np.empty_like(row)
        algorithm(*machine.hbm(S=row, P=P).values())
        expected = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        np.testing.assert_allclose(P, expected, rtol=1e-5)
        return machine.traffic.total_elements / row.size

    def safe(S, P):
        """Their Algorithm 2: maximum, then sum, then normalise, a block at a time."""
        parts = [slice(a, a + 100) for a in range(0, 1000, 100)]
        m = np.max([S[0:1, j].max() for j in parts], keepdims=True)
        l = np.sum([exp(S[0:1, j], m).sum() for j in parts], keepdims=True)
        for j in parts:
            P[0:1, j] = over(exp(S[0:1, j], m), l)

    def online(S, P):
        softmax_in_two_passes(S, P, np.empty(1), Br=1, Bc=100)

    def on_chip(S, P):
        softmax(S, P, np.empty(1), Bs=1)

    assert accesses(safe) == 4
    assert accesses(online) == 3
    assert accesses(on_chip) == 2


def test_the_operations_are_safe_where_nothing_was_seen():
    """exp, log and over at -inf and 0, without a warning (warnings are errors here)."""
    inf, zero = np.array([np.inf]), np.zeros(1)
    assert exp(-inf, -inf) == 0
    assert exp(-inf, zero) == 0
    assert exp(np.array([[-np.inf, 1.0]]), np.ones(1)).tolist() == [[0, 1]]
    assert log(zero) == -np.inf
    assert over(np.ones((1, 2)), zero).tolist() == [[0, 0]]
    assert np.isnan(log(np.array([np.nan])))
    assert np.isnan(over(np.ones((1, 1)), np.array([np.nan])))


def test_weigh_takes_nothing_from_a_masked_slot_and_everything_from_a_live_one():
    P = np.array([[0.5, 0.0, 0.5], [0.5, 0.5, 0.0]])
    V = np.array([[2.0, 1.0], [np.nan, 1.0], [np.inf, 1.0]])
    keep = np.array([[True, False, True], [True, False, False]])
    out = weigh(P, V, lambda: keep)
    assert out.tolist() == [[np.inf, 1.0], [1.0, 0.5]]
    underflowed = weigh(np.zeros((1, 3)), V, lambda: np.array([[True, True, False]]))
    assert np.isnan(underflowed[0, 0])


def test_a_state_is_a_plain_triple():
    m, l, O = identity(3, 2)
    assert (m.shape, l.shape, O.shape) == ((3,), (3,), (3, 2))
    assert m.dtype == l.dtype == O.dtype == np.float32
    assert isinstance(merge(identity(3, 2), identity(3, 2)), State)


@pytest.mark.parametrize("in_two_passes", [False, True])
@pytest.mark.parametrize("s", [-9e4, -1.0, 9e4])
def test_both_softmaxes_of_standard_attention_hold_far_from_zero(in_two_passes, s):
    """Rows of their own size, the first masked: P and L as defined, one key at a time on chip."""
    S = np.array([[-np.inf] * 3, [s, s, -np.inf], [0, -200, -200]], np.float32)
    P, L = np.empty_like(S), np.empty(3, np.float32)
    if in_two_passes:
        softmax_in_two_passes(S, P, L, Br=3, Bc=1)
    else:
        softmax(S, P, L, Bs=3)
    assert P.tolist() == [[0, 0, 0], [0.5, 0.5, 0], [1, 0, 0]]
    assert L.tolist() == [-np.inf, np.float32(s) + np.log(np.float32(2)), 0]


def test_weigh_looks_at_every_column_of_the_values():
    V = np.array([[1.0, 2.0, np.nan], [3.0, 4.0, 5.0]])
    out = weigh(np.array([[0.0, 1.0]]), V, lambda: np.array([[False, True]]))
    assert out.tolist() == [[3, 4, 5]]


def test_the_shift_is_the_maximum_or_0_for_a_row_that_has_seen_nothing():
    shifted = shift(np.array([-np.inf, -2.0, 3.0], np.float32))
    assert shifted.tolist() == [0, -2, 3]
    assert shifted.dtype == np.float32
