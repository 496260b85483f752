"""Each deliberate fault is wrong where it should be, right where it cannot act, and stays apart."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashsim as fs
from flashsim import failures
from flashsim.algorithms import ALGORITHMS, flash2
from flashsim.failures import FAILURES, faulty, show
from flashsim.viewer import random_head
from strategies import same_bits

each_failure = pytest.mark.parametrize("name", FAILURES)

lengths = st.integers(2, 24)
seeds = st.integers(0, 999)


def bound(comparison):
    """The bound of rounding at the place of the largest error."""
    reference = comparison.reference
    of = reference.output_bound if comparison.failure.shows == "output" else reference.lse_bound
    return float(of[comparison.where])


def right_ratio(comparison):
    reference = comparison.reference
    if comparison.failure.shows == "output":
        return reference.output_ratio(comparison.right)
    return reference.lse_ratio(comparison.right)


# --- wrong, and right -----------------------------------------------------------------------------


@each_failure
def test_a_fault_is_wrong_by_far_more_than_rounding_and_the_algorithm_is_not(name):
    comparison = show(name)
    assert comparison.max_error > 1000 * bound(comparison)
    assert comparison.ratio > 1000
    assert right_ratio(comparison) <= 1


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        # exp(2) 10 + ... of [2, 1, 3, 0], by hand; the first two keys keep the weights of their max
        (
            "skip-rescale",
            np.exp([2, 1, 3, 0]) @ [10, 20, 30, 40] / np.exp([2, 1, 3, 0]).sum(),
            (np.exp([0, -1]) @ [10, 20] + np.exp([0, -3]) @ [30, 40])
            / np.exp([-1, -2, 0, -3]).sum(),
        ),
        ("drop-tail", 1, 0),
        ("zero-pad", 1, 3 / (3 + np.exp(10))),
        ("forget-max", 3, np.nan),
        ("base-2-lse", np.log(2), 1),
        ("dropout-by-tile", [7, 1, 6, 5.5], [5, 5, 5, 5]),
    ],
)
def test_the_numbers_are_those_that_the_fault_must_give(name, right, wrong):
    comparison = show(name)
    assert comparison.right.ravel() == pytest.approx(right, rel=1e-5)
    assert comparison.wrong.ravel() == pytest.approx(wrong, rel=1e-5, nan_ok=True)


@each_failure
def test_the_right_numbers_are_those_of_the_front_door(name):
    q, k, v = random_head(10, 3)
    comparison = show(name, q, k, v, tiles=(4, 3), dropout_p=0.3, seed=5, is_causal=True)
    out = fs.attention(q, k, v, tiles=(4, 3), dropout_p=0.3, seed=5, is_causal=True)
    assert same_bits(comparison.right, getattr(out, {"output": "output"}.get(
        comparison.failure.shows, "lse")))  # fmt: skip
    assert right_ratio(comparison) <= 1


@given(seeds, lengths, st.integers(1, 24))
def test_faults_of_the_tail_show_exactly_where_there_is_one(seed, N, Bc):
    q, k, v = random_head(N, 4, seed)
    for name in "drop-tail", "zero-pad":
        comparison = show(name, q, k, v, tiles=(N, Bc))
        has_tail = N % min(Bc, N) != 0
        assert (comparison.ratio > 1) == has_tail
        assert same_bits(comparison.wrong, comparison.right) or has_tail


@given(seeds, lengths, st.integers(1, 24))
def test_a_missing_rescale_shows_only_where_a_maximum_rises(seed, N, Bc):
    q, k, v = random_head(N, 4, seed)
    comparison = show("skip-rescale", q, k, v, tiles=(N, Bc))
    S = q.astype(np.float64) @ k.T
    maxima = np.maximum.accumulate([S[:, j : j + Bc].max(axis=1) for j in range(0, N, Bc)])
    rises = np.diff(maxima, axis=0)
    same = (comparison.wrong == comparison.right).all(axis=1)
    assert same[~(rises > 0).any(axis=0)].all()
    assert comparison.ratio > 1 or not (rises > 0.1).any()


@given(seeds, lengths)
def test_a_forgotten_maximum_shows_only_beyond_the_exponentials_range(seed, N):
    q, k, v = random_head(N, 4, seed)
    assert show("forget-max", q, k, v).ratio <= 1
    large = show("forget-max", np.abs(q) * 100, np.abs(k) * 100, v)
    assert large.max_error == np.inf
    assert right_ratio(large) <= 1


@given(seeds, lengths, st.integers(1, 24))
def test_an_lse_in_base_2_is_off_by_one_factor(seed, N, Bc):
    comparison = show("base-2-lse", *random_head(N, 4, seed), tiles=(N, Bc))
    assert comparison.wrong * np.log(2) == pytest.approx(comparison.right, rel=1e-6)


@given(seeds, st.integers(1, 11))
def test_dropout_by_the_place_in_the_tile_depends_on_the_tiles(seed, B):
    q, k, v = random_head(12, 4, seed)
    whole = show("dropout-by-tile", q, k, v, tiles=(12, 12), seed=seed)
    tiled = show("dropout-by-tile", q, k, v, tiles=(B, B), seed=seed)
    assert same_bits(whole.wrong, whole.right)
    assert tiled.ratio > 1
    assert right_ratio(tiled) <= 1


# --- apart ----------------------------------------------------------------------------------------


@each_failure
def test_the_algorithm_the_registry_and_the_answers_are_unchanged(name):
    def state():
        fn = flash2.flash_attention_2
        rows = {name: (row, row.forward, dict(row.backward)) for name, row in ALGORITHMS.items()}
        return inspect.getsource(fn), fn.__code__, vars(flash2).copy(), rows

    q, k, v = random_head(10, 3)
    before, out = state(), fs.attention(q, k, v, tiles=(4, 3))
    show(name, q, k, v, tiles=(4, 3))
    show(name).view().html()
    assert state() == before
    assert faulty(name) is not flash2.flash_attention_2
    again = fs.attention(q, k, v, tiles=(4, 3))
    assert same_bits(again.output, out.output)
    assert same_bits(again.lse, out.lse)


@each_failure
def test_a_faulty_copy_differs_from_the_algorithm_in_one_line_of_the_same_number(name):
    (right, first), (wrong, at) = (
        inspect.getsourcelines(fn) for fn in (flash2.flash_attention_2, faulty(name))
    )
    assert first == at
    differing = [(a, b) for a, b in zip(right, wrong, strict=True) if a != b]
    assert len(differing) == 1
    assert FAILURES[name].old in differing[0][0]
    assert FAILURES[name].new in differing[0][1]


def test_a_fault_whose_text_the_algorithm_no_longer_has_says_so(monkeypatch):
    text = inspect.getsource(flash2.flash_attention_2)
    for old in "no such text", "on_chip":
        times, fault = text.count(old), failures.Failure("", old, "", "", "", (), (), (), (1, 1))
        assert times != 1
        monkeypatch.setitem(FAILURES, old, fault)
        with pytest.raises(RuntimeError, match=f"'{old}' occurs {times} times .*expected once"):
            faulty(old)


# --- what it says and refuses ---------------------------------------------------------------------


@each_failure
def test_text_and_table_have_the_wrong_number_beside_the_right_one(name):
    comparison = show(name)
    for said in str(comparison), comparison._repr_html_():
        assert f"{comparison.right[comparison.where]:.6g}" in said
        assert f"{comparison.wrong[comparison.where]:.6g}" in said
        assert name in said
    assert comparison.failure.why in str(comparison)
    assert "makes no difference" not in str(comparison)


@pytest.mark.parametrize(
    ("scores", "v", "wrong", "said"),
    [
        ((0, 100), (1, 3), np.nan, "largest"),
        ((88.5, 88.5), (0.01, 0.01), 0, "largest"),  # l overflows alone
        ((88.0, 0), (9, 9), np.inf, "largest"),  # O overflows alone
        ((-200, -201), (1, 3), 0, "smallest"),
        ((-103.2, -102.5), (1, 3), None, "smallest"),  # a digit is left
    ],
)
def test_the_reason_for_a_forgotten_maximum_is_the_one_that_acts(scores, v, wrong, said):
    columns = (np.array(x, np.float32)[:, None] for x in ((1,), scores, v))
    comparison = show("forget-max", *columns, scale=1.0, tiles=(1, 1))
    if wrong is not None:
        assert comparison.wrong[0, 0] == pytest.approx(wrong, nan_ok=True)
    assert comparison.ratio > 1
    assert f"the {said} number of its type" in str(comparison)
    assert ("largest" in str(comparison)) != ("smallest" in str(comparison))


def test_where_a_fault_makes_no_difference_it_says_so():
    said = str(show("drop-tail", *random_head(8, 4), tiles=(4, 4)))
    assert "Here it makes no difference beyond rounding." in said


def test_a_long_result_is_cut_and_a_table_shows_code_as_it_is():
    comparison = show("drop-tail", *random_head(10, 4), tiles=(4, 4))
    assert "… (10 × 4)" in str(comparison)
    assert "j.stop &lt;= len(K)" in comparison._repr_html_()


def test_what_cannot_be_used_is_refused_by_name():
    with pytest.raises(ValueError, match="name='skip': expected one of 'skip-rescale'"):
        show("skip")
    three = np.zeros((1, 4, 2), np.float32)
    with pytest.raises(ValueError, match="one head"):
        show("skip-rescale", three, three, three)
    one = np.zeros((4, 2), np.float32)
    for arrays, missing in (
        ({"q": one}, "k and v"),
        ({"k": one}, "q and v"),
        ({"v": one}, "q and k"),
    ):
        with pytest.raises(ValueError, match=f"{missing}=None: expected q, k, v together"):
            show("drop-tail", **arrays)
    with pytest.raises(ValueError, match=r"q\.shape=\(0, 2\): expected one head of at least one"):
        show("drop-tail", one[:0], one, one)
    with pytest.raises(ValueError, match="tiles=4"):
        show("skip-rescale", tiles=4)
    with pytest.raises(ValueError, match=r"dropout_p=1\.5"):
        show("skip-rescale", dropout_p=1.5)
