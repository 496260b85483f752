"""Every algorithm against float64, within a bound computed from the inputs over visible keys."""

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import event, given, target
from hypothesis import strategies as st

import flashsim as fs
from flashsim.algorithms import ALGORITHMS, flash1, flash2, standard
from flashsim.cost.io import expected_cost
from flashsim.online_softmax import exp
from flashsim.reference import exact
from strategies import DTYPES, VARIANTS, Call, calls, tilings, variants, visible


def run(call, variant, **how):
    algorithm, convention = variant
    return fs.attention(*call, algorithm=algorithm, convention=convention, **call.what, **how)


@given(calls(dtypes=DTYPES), variants, tilings)
def test_every_algorithm_is_within_the_bound_of_float64(call, variant, tiles):
    out, ref = run(call, variant, tiles=tiles), exact(*call, **call.what)
    ratio, lse_ratio = ref.output_ratio(out.output), ref.lse_ratio(out.lse)
    target(ratio, label="output error / bound")
    event(str(call.q.dtype))
    assert out.output.dtype == call.q.dtype
    assert ratio <= 1
    assert lse_ratio <= 1


@given(calls(), variants, tilings, st.integers(40, 4000))
def test_the_budget_changes_nothing_but_whether_it_fits(call, variant, tiles, sram):
    ref = exact(*call, **call.what)
    try:
        out = run(call, variant, tiles=tiles, sram=sram)
    except fs.SramOverflow:
        return
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1


@given(calls(masked=False, dropout=False, max_n=12), st.data())
def test_the_reference_is_the_definition_one_score_at_a_time(call, data):
    """The oracle itself, held against loops over rows and keys."""
    q, k, v = (x.astype(float) for x in call)
    what = data.draw(
        st.fixed_dictionaries(
            {
                "is_causal": st.booleans(),
                "causal_align": st.sampled_from(["bottom-right", "top-left"]),
            }
        )
    )
    scale = call.what.get("scale", q.shape[-1] ** -0.5)
    ref = exact(*call, **call.what, **what)
    group = q.shape[-3] // k.shape[-3]
    for at in np.ndindex(*q.shape[:-2]):
        shared = (*at[:-1], at[-1] // group)
        keep = visible(q.shape[-2], k.shape[-2], what)
        for i in range(q.shape[-2]):
            scores = {
                j: float(q[(*at, i)] @ k[(*shared, j)]) * scale for j in np.flatnonzero(keep[i])
            }
            most = max(scores.values(), default=0)
            weights = {j: np.exp(s - most) for j, s in scores.items()}
            total = sum(weights.values())
            row = sum(
                (w / total * v[(*shared, j)] for j, w in weights.items()), np.zeros(v.shape[-1])
            )
            np.testing.assert_allclose(ref.output[(*at, i)], row, rtol=1e-9, atol=1e-12)
            lse = most + np.log(total) if weights else -np.inf
            np.testing.assert_allclose(ref.lse[(*at, i)], lse, rtol=1e-9, atol=1e-12)


def rounded_to_float16(s, m, out=None):
    P = exp(s, m, out=out)
    if P.ndim == 2:
        P[...] = P.astype(np.float16)
    return P


def off_by_1e_4(s, m, out=None):
    P = exp(s, m, out=out)
    P *= P.dtype.type(1 + 1e-4)
    return P


def base_2(s, m, out=None):
    P = exp(s, m, out=out)
    np.log(P, out=P, where=P > 0)
    np.exp2(P, out=P, where=P > 0)
    return P


@cache
def normal_call(N, d):
    call = Call(*np.random.default_rng(N).standard_normal((3, N, d), dtype=np.float32))
    return call, exact(*call)


SIZES = [(3, 2), (7, 3), (16, 8), (40, 9), (64, 16), (180, 32), (512, 64), (1024, 128), (2048, 64)]


@pytest.mark.parametrize("N, d", SIZES)
@pytest.mark.parametrize("wrong", [rounded_to_float16, off_by_1e_4, base_2])
@pytest.mark.parametrize(
    "algorithm, module", [("flash1", flash1), ("flash2", flash2), ("standard", standard)]
)
def test_the_bound_rejects_a_slightly_wrong_exponential_at_every_size(
    monkeypatch, N, d, wrong, algorithm, module
):
    """Weights in float16 and an exp off by 1e-4 are what a bound of this kind must tell apart."""
    call, ref = normal_call(N, d)
    tiles = (min(N, 256), min(N, 256))
    right = fs.attention(*call, algorithm=algorithm, tiles=tiles)
    assert max(ref.output_ratio(right.output), ref.lse_ratio(right.lse)) <= 1
    monkeypatch.setattr(module, "exp", wrong)
    out = fs.attention(*call, algorithm=algorithm, tiles=tiles)
    assert max(ref.output_ratio(out.output), ref.lse_ratio(out.lse)) > 1


def test_the_bound_rejects_nan_and_infinity():
    call = Call(*np.ones((3, 4, 2), np.float32))
    ref = exact(*call)
    for wrong in (np.nan, np.inf, -np.inf):
        output = ref.output.copy()
        output[2, 1] = wrong
        assert ref.output_ratio(output) == np.inf


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [100.0, -100.0, 1e4])
def test_large_logits_are_finite_and_within_the_bound(variant, size):
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 33, 4), dtype=np.float32)
    q[:, 0], k[:, 0] = (
        np.float32(np.sqrt(abs(size))),
        np.float32(np.copysign(np.sqrt(abs(size)), size)),
    )
    call = Call(q, k, v, {"scale": 1.0})
    out, ref = run(call, variant, tiles=(8, 5)), exact(*call, scale=1.0)
    assert np.isfinite(out.output).all()
    assert np.isfinite(out.lse).all()
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1


@given(calls(dtypes=(np.float64,)), variants, tilings)
def test_float64_stays_float64(call, variant, tiles):
    out = run(call, variant, tiles=tiles)
    assert out.output.dtype == out.lse.dtype == np.float64
    ref = exact(*call, **call.what)
    assert ref.output_ratio(out.output) <= 1


@given(calls(dtypes=DTYPES), tilings)
def test_a_softmax_in_two_passes_is_as_exact_and_as_counted(call, tiles):
    """Standard attention where not even one row of S fits on chip, whatever the budget."""
    in_two_passes = dataclasses.replace(ALGORITHMS["standard"], more=lambda *_: {"Bs": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "standard", in_two_passes)
        out = run(call, ("standard", "literal"), tiles=tiles)
        cost = expected_cost(out, *call, **call.what)
    ref = exact(*call, **call.what)
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1
    assert out.traffic.reads.get("S", 0) == cost.reads["S"] == 2 * cost.writes["S"]
    assert out.sram_peak_elements == cost.sram_elements
    assert out.sram_peak_bytes == cost.sram_bytes
