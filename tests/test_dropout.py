"""Dropout bits: Philox's published vectors, and a function of position alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashsim as fs
from flashsim.dropout import Dropout, philox4x32
from strategies import VARIANTS, tilings

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    """Known-answer vectors of philox4x32-10 in Random123 (Salmon et al. 2011)."""
    assert tuple(int(w) for w in philox4x32(counter, key[0] | key[1] << 32)) == words


def test_one_bit_by_its_definition():
    """Key, counter, word and threshold as the module's docstring says, for one weight."""
    seed, batch, head, row, column, p = 2**40 + 5, 3, 2, 70, 1234, 0.3
    words = philox4x32((column // 4, row, head, batch), seed)
    kept = int(words[column % 4]) >= int(p * 2**32)
    drop = Dropout(p, seed, batch, head)
    assert drop.keep(slice(row, row + 1), slice(column, column + 1)).tolist() == [[kept]]


@given(tilings, st.integers(0, 2**64 - 1), st.integers(0, 5), st.integers(0, 5))
def test_bits_do_not_depend_on_tiles(tiling, seed, batch, head):
    drop = Dropout(0.5, seed, batch, head)
    whole = drop.keep(slice(0, 40), slice(0, 50))
    Br, Bc = tiling
    for a in range(0, 40, Br):
        for b in range(0, 50, Bc):
            i, j = slice(a, min(a + Br, 40)), slice(b, min(b + Bc, 50))
            assert np.array_equal(drop.keep(i, j), whole[i, j])


def test_bits_differ_by_seed_batch_head_row_and_column():
    def bits(seed=0, batch=0, head=0, row=0, column=0):
        place = slice(row, row + 64), slice(column, column + 64)
        return Dropout(0.5, seed, batch, head).keep(*place)

    base = bits()
    others = [
        bits(seed=1), bits(seed=2**32), bits(batch=1), bits(head=1), bits(row=64), bits(column=64),
    ]  # fmt: skip
    for other in others:
        assert 0.4 < (base != other).mean() < 0.6


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_p(p):
    """4e6 bits: five standard deviations of a binomial share."""
    n = 2000
    dropped = 1 - Dropout(p, 1, 0, 0).keep(slice(0, n), slice(0, n)).mean()
    assert abs(dropped - p) < 5 * np.sqrt(p * (1 - p)) / n


@pytest.mark.parametrize("algorithm, convention", VARIANTS)
def test_every_algorithm_and_tiling_drops_the_same_weights(algorithm, convention):
    """With V the identity the output shows each weight: 0 where dropped, else p_j / (1 - p)."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2, 3, 12, 4), dtype=np.float32)
    v = np.broadcast_to(np.eye(12, dtype=np.float32), (2, 3, 12, 12))
    what = {"dropout_p": 0.5, "seed": 9}
    weights = fs.attention(q, k, v).output
    for tiles in ((1, 1), (2, 2), (4, 4), (5, 7), (12, 12)):
        out = fs.attention(q, k, v, algorithm=algorithm, convention=convention, tiles=tiles, **what)
        for b, h in np.ndindex(2, 3):
            keep = Dropout(0.5, 9, b, h).keep(slice(0, 12), slice(0, 12))
            assert np.array_equal(out.output[b, h] == 0, ~keep)
            np.testing.assert_allclose(out.output[b, h], keep * weights[b, h] * 2, rtol=1e-5)
        assert np.array_equal(out.lse, fs.attention(q, k, v, algorithm=algorithm, tiles=tiles).lse)


def test_dropping_is_in_place_unless_the_tile_is_read_only():
    drop, i, j = Dropout(0.5, 0, 0, 0), slice(0, 4), slice(0, 4)
    P = np.ones((4, 4), np.float32)
    assert drop(P, i, j) is P
    assert set(np.unique(P)) == {0, 2}
    P = np.ones((4, 4), np.float32)
    P.flags.writeable = False
    assert drop(P, i, j) is not P
    assert (P == 1).all()
    assert Dropout(0.0, 0, 0, 0)(P, i, j) is P


def test_the_threshold_is_p_2_to_the_32_rounded_down_and_reaching_it_is_to_be_kept():
    word = int(philox4x32((0, 0, 0, 0), 7)[0])
    for p, kept in ((word, True), (word + 0.5, True), (word + 1, False), (word - 1, True)):
        keep = Dropout(p / 2**32, 7, 0, 0).keep(slice(0, 1), slice(0, 1))
        assert keep.tolist() == [[kept]]


@pytest.mark.parametrize("algorithm, convention", VARIANTS)
def test_items_are_numbered_through_all_leading_dimensions_and_heads_are_those_of_q(
    algorithm, convention
):
    """(2, 3) items of 4 heads, in pairs on 2 key heads: item (1, 2) is number 5, head 3 is 3."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 4, 8, 4), dtype=np.float32)
    k = rng.standard_normal((2, 3, 2, 8, 4), dtype=np.float32)
    v = np.broadcast_to(np.eye(8, dtype=np.float32), (2, 3, 2, 8, 8))
    out = fs.attention(
        q, k, v, algorithm=algorithm, convention=convention, enable_gqa=True, tiles=(3, 5),
        dropout_p=0.5, seed=4,
    )  # fmt: skip
    for a, b, h in np.ndindex(2, 3, 4):
        keep = Dropout(0.5, 4, 3 * a + b, h).keep(slice(0, 8), slice(0, 8))
        assert np.array_equal(out.output[a, b, h] == 0, ~keep)
