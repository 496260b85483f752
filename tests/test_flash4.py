"""FlashAttention-4: lazy rescaling is exact and counted; polynomial exponentials are bounded."""

# ruff: noqa: E501 (a table: one refusal a line)

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.exp2 import COEFFICIENTS, LARGEST_ERROR, emulated, exp2, on_unit_interval
from flashsim.papers.fa4 import lazily_rescaled
from flashsim.reference import exact
from strategies import DTYPES, calls, same_bits, tilings

degrees = st.integers(1, 5)
shares = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]) | st.floats(0, 1)


@given(calls(dtypes=DTYPES), tilings)
def test_a_threshold_of_nothing_is_flash_attention_2_bit_for_bit(call, tiles):
    how = {"algorithm": "flash4", "rescale_threshold": 0}
    out = fs.attention(*call, tiles=tiles, **how, **call.what)
    same = fs.attention(*call, algorithm="flash2", tiles=tiles, **call.what)
    assert same_bits(out.output, same.output)
    assert same_bits(out.lse, same.lse)


@given(calls(dtypes=DTYPES), tilings, st.floats(0, 32))
def test_any_threshold_is_within_the_bound_and_higher_ones_rescale_no_more(call, tiles, threshold):
    what = {**call.what, "rescale_threshold": threshold}
    out = fs.attention(*call, algorithm="flash4", tiles=tiles, **what)
    ref = exact(*call, tiles=tiles, **what)
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1
    never = fs.attention(
        *call, algorithm="flash4", tiles=tiles, **{**what, "rescale_threshold": 32}
    )
    assert never.rescales.sum() <= out.rescales.sum()


@pytest.mark.parametrize("growth, rescaled", [(7.9, 0), (8.1, 1)])
def test_the_threshold_is_in_powers_of_two(growth, rescaled):
    """Zadouri et al. 2026 (arXiv:2603.05451), section 3.1.3: 8 = log2 256."""
    q, k, v = np.ones((1, 1)), np.array([[0.0], [growth * np.log(2)]]), np.ones((2, 1))
    assert lazily_rescaled(q, k, v, 1, threshold=8)[1] == rescaled


@given(calls(dtypes=(np.float64,), masked=False, dropout=False), tilings)
def test_rescales_are_those_of_a_maximum_that_stands_still_as_long_as_it_can(call, tiles):
    out = fs.attention(*call, algorithm="flash4", tiles=tiles, **call.what)
    q, k, _ = call
    scale, (Br, Bc) = call.what.get("scale", q.shape[-1] ** -0.5), out.tiles
    wanted = np.zeros(q.shape[:-1], int)
    group = q.shape[-3] // k.shape[-3]
    for at in np.ndindex(*q.shape[:-2]):
        for start in range(0, q.shape[-2], Br):  # as it is tiled, so that last bits agree
            rows = slice(start, start + Br)
            m = np.full(len(q[(*at, rows)]), -np.inf)
            for j in range(0, k.shape[-2], Bc):
                Q = np.ascontiguousarray(q[(*at, rows)])
                K = np.ascontiguousarray(k[(*at[:-1], at[-1] // group, slice(j, j + Bc))])
                largest = (Q @ K.T * scale).max(axis=1)
                for r, (old, new) in enumerate(zip(m, largest, strict=True)):
                    if new > old + 8 * np.log(2):
                        wanted[(*at, start + r)] += j > 0
                        m[r] = new
    assert out.rescales.tolist() == wanted.tolist()


@pytest.mark.parametrize("growth, rescaled", [(7.9, 0), (8.1, 1)])
def test_the_default_is_the_published_threshold(growth, rescaled):
    q, k = np.ones((1, 1)), np.array([[0.0], [growth * np.log(2)]])
    assert fs.attention(q, k, k, algorithm="flash4", tiles=(1, 1)).rescales.tolist() == [rescaled]


@given(shares, degrees, st.integers(1, 9), st.integers(0, 60))
def test_the_weights_that_are_polynomials_are_the_share_asked_for_whatever_the_tiles(
    share, degree, tile, N
):
    """One value is 1 and the others 0, so that an output is a weight, and l all but 1."""
    k = np.zeros((N + 1, 1))
    k[0] = 60  # its own weight is 1, also as a polynomial at 0, and m is its score from the start
    how = {"algorithm": "flash4", "exp_emulation": (share, degree), "tiles": (1, tile)}
    out = fs.attention(np.ones((N + 1, 1)), k - 30.3, np.eye(N + 1), scale=1.0, **how)
    off = np.abs(out.output[0, 1:] / np.exp(-60.0) - 1) > 1e-9
    assert off.tolist() == emulated(slice(1, N + 1), share).tolist()


def test_the_command_says_how_often_rows_were_rescaled():
    run = ["run", "-a", "flash4", "--shape", "1,1,64,4", "--scale", "9", "--tiles", "8,8", "--json"]
    counts = []
    for powers in ("0", "8", "32"):
        result = CliRunner().invoke(cli.app, [*run, "--rescale-threshold", powers])
        assert result.exit_code == 0, result.output
        (record,) = json.loads(result.stdout)["records"]
        counts.append(record["rescales"])
    assert counts[0] > counts[1] > counts[2] >= 0
    shown = CliRunner().invoke(cli.app, run[:-1]).stdout
    assert f"flash4: {counts[1]} rescalings, of a row after its first tile." in shown


def test_a_row_that_every_tile_overtakes_is_rescaled_at_every_tile_but_the_first():
    q, k = np.ones((1, 1)), 9 * np.log(2) * np.arange(5.0)[:, None]
    out = fs.attention(q, k, k, algorithm="flash4", scale=1.0, tiles=(1, 1))
    assert out.rescales.tolist() == [4]
    assert fs.attention(q, k, k, algorithm="flash2").rescales is None


def test_rows_that_see_nothing_are_empty_and_never_rescaled():
    """Faults 1 and 3 of attention kernels: pytorch #103963, vllm #48364."""
    q = np.ones((3, 2), np.float32)
    keep = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]], bool)
    k = np.array([[50.0, 0], [0, 0], [1, 1], [30, 30]], np.float32)
    out = fs.attention(q, k, k, algorithm="flash4", attn_mask=keep, tiles=(3, 1))
    assert out.output[0].tolist() == [0, 0]
    assert out.lse[0] == -np.inf
    assert exact(q, k, k, attn_mask=keep).output_ratio(out.output) <= 1
    assert out.rescales.tolist() == [0, 1, 1]


# Polynomials


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_the_largest_error_of_each_degree_is_the_one_that_is_promised(degree):
    x = np.linspace(0, 1, 100_001)
    off = np.abs(on_unit_interval(x, COEFFICIENTS[degree]) / np.exp2(x) - 1).max()
    assert 0.97 * LARGEST_ERROR[degree] < off <= LARGEST_ERROR[degree]


@pytest.mark.parametrize("degree", [1, 2, 4, 5])
def test_no_small_change_of_a_coefficient_makes_the_largest_error_smaller(degree):
    """Minimax: the error alternates between its extremes at degree + 1 points."""
    x = np.linspace(0, 1, 20_001)
    error = on_unit_interval(x, COEFFICIENTS[degree]) / np.exp2(x) - 1
    near = np.abs(error) > 0.94 * np.abs(error).max()
    signs = np.sign(error[near])
    assert 1 + np.count_nonzero(np.diff(signs)) == degree + 1


@given(
    degrees,
    st.lists(st.floats(-120, 120, width=32), min_size=1, max_size=20),
    st.sampled_from([np.float32, np.float64]),
)
def test_the_integer_part_goes_into_the_exponent(degree, powers, dtype):
    x = np.array(powers, dtype)
    ratio = exp2(x, degree).astype(float) / np.exp2(x.astype(float))
    assert np.abs(ratio - 1).max() <= LARGEST_ERROR[degree] + 1e-6
    whole = np.floor(x)
    assert exp2(whole, degree).tolist() == np.exp2(whole).tolist()


def test_what_is_masked_weighs_nothing_and_nan_stays_nan():
    x = np.array([-np.inf, -1e9, np.nan, 0], np.float32)
    y = exp2(x, 3)
    assert y[:2].tolist() == [0, 0]
    assert np.isnan(y[2])
    assert y[3] == 1


@given(st.integers(0, 500), st.integers(0, 200), st.integers(0, 200), shares)
def test_the_emulated_columns_are_a_share_of_any_span_whatever_the_tiles(start, a, b, share):
    whole = emulated(slice(start, start + a + b), share)
    parts = (
        emulated(slice(start, start + a), share),
        emulated(slice(start + a, start + a + b), share),
    )
    assert whole.tolist() == np.concatenate(parts).tolist()
    assert abs(whole.sum() - share * (a + b)) <= 1 + 1e-9


@given(calls(dtypes=DTYPES), tilings, shares, degrees)
def test_an_emulated_run_is_within_the_bound_that_knows_of_the_polynomial(
    call, tiles, share, degree
):
    what = {**call.what, "exp_emulation": (share, degree)}
    out = fs.attention(*call, algorithm="flash4", tiles=tiles, **what)
    ref = exact(*call, **what)
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_that_bound_rejects_a_polynomial_of_a_lower_degree(degree):
    q, k, v = np.random.default_rng(0).standard_normal((3, 8, 4), dtype=np.float32)
    out = fs.attention(q, k, v, algorithm="flash4", exp_emulation=(1.0, degree - 1))
    ref = exact(q, k, v, exp_emulation=(1.0, degree))
    assert max(ref.output_ratio(out.output), ref.lse_ratio(out.lse)) > 1
    none = fs.attention(q, k, v, algorithm="flash4", exp_emulation=(0.0, 1))
    assert same_bits(none.output, fs.attention(q, k, v, algorithm="flash4").output)


REFUSED = {
    "elsewhere": ({"algorithm": "flash2", "exp_emulation": (0.5, 3)}, "exp_emulation=.*expected None"),
    "a number": ({"exp_emulation": 3}, r"exp_emulation=3: expected \(share, degree\)"),
    "share": ({"exp_emulation": (1.5, 3)}, r"exp_emulation\[0\]=1.5: expected a share in \[0, 1\]"),
    "nan": ({"exp_emulation": (np.nan, 3)}, r"exp_emulation\[0\]=nan: expected a share"),
    "threshold": ({"rescale_threshold": -1}, "rescale_threshold=-1: expected powers of two from 0 to 32"),
    "no limit": ({"rescale_threshold": np.inf}, "rescale_threshold=inf: expected powers of two"),
    "elsewhere, lazy": ({"algorithm": "flash2", "rescale_threshold": 8}, "rescale_threshold=8: expected None"),
    "degree": ({"exp_emulation": (0.5, 6)}, r"exp_emulation\[1\]=6: expected an integer of at least 1 and below 6"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_option_is_named_with_what_is_accepted(case):
    what, says = REFUSED[case]
    q = np.ones((4, 2), np.float32)
    with pytest.raises(ValueError, match=says):
        fs.attention(q, q, q, **{"algorithm": "flash4", **what})
