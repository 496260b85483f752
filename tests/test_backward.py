"""Backward passes: float64 within a bound, central differences, relations, counts, replay."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import flashsim as fs
from flashsim.algorithms import ALGORITHMS
from flashsim.cost.io import expected_cost
from flashsim.problem import checked
from flashsim.reference import exact, exact_gradients
from strategies import BACKWARDS, DTYPES, Call, backwards, calls, same_bits, tilings

NAMES = ("dq", "dk", "dv")


def run(call, variant, **how):
    algorithm, convention = variant
    return fs.attention(*call, algorithm=algorithm, convention=convention, **call.what, **how)


def gradient_of_output(call, seed=0):
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    return np.random.default_rng(seed).standard_normal(shape).astype(call.q.dtype)


def has_float_mask(call):
    return "attn_mask" in call.what and call.what["attn_mask"].dtype != bool


def counted(traffic):
    return [{n: x for n, x in c.items() if x} for c in (traffic.reads, traffic.writes)]


@given(calls(dtypes=DTYPES, max_n=20), backwards, tilings, tilings)
def test_gradients_are_within_the_bound_of_float64(call, variant, tiles, others):
    """Whatever the tiles of either pass: dropout, masks and scale are replayed."""
    do = gradient_of_output(call)
    wrt_mask = has_float_mask(call)
    got = run(call, variant, tiles=tiles).backward(do, tiles=others, wrt_mask=wrt_mask)
    ref = exact_gradients(*call, do, **call.what)
    assert [x.dtype for x in got[:3]] == [call.q.dtype] * 3
    assert [x.shape for x in got[:3]] == [call.q.shape, call.k.shape, call.v.shape]
    assert len(got) == 3 + wrt_mask
    ratios = ref.ratios(got)
    assert max(ratios.values()) <= 1, ratios


@given(calls(dtypes=DTYPES, max_n=20), backwards, tilings, st.booleans())
def test_executed_is_the_closed_form_for_each_array(call, variant, tiles, wrt_mask):
    wrt_mask = wrt_mask and has_float_mask(call)
    out = run(call, variant, tiles=(3, 5))
    out.backward(gradient_of_output(call), tiles=tiles, wrt_mask=wrt_mask)
    cost = expected_cost(
        out, *call, convention=variant[1], backward=True, wrt_mask=wrt_mask, **call.what
    )
    assert counted(out.traffic_backward) == counted(cost)
    assert out.sram_peak_backward_elements == cost.sram_elements
    assert out.sram_peak_backward_bytes == cost.sram_bytes
    assert out.traffic_backward.total_bytes == cost.total_bytes
    assert out.extra_hbm_backward_elements == cost.extra_hbm_elements


@given(calls(max_n=20), backwards, st.integers(1, 4000), st.booleans())
def test_the_strict_rule_of_the_backward_pass_fits(call, variant, room, in_bytes):
    budget = {"sram_bytes": 4 * room} if in_bytes else {"sram": room}
    try:
        out = run(call, variant, **budget)
    except ValueError:
        return
    refused = None
    try:
        got = out.backward(gradient_of_output(call))
    except fs.SramOverflow:
        pytest.fail("tiles that the strict rule chose do not fit")
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "at least" in refused
        return
    peak = out.sram_peak_backward_bytes / 4 if in_bytes else out.sram_peak_backward_elements
    assert peak <= room
    cost = expected_cost(out, *call, convention=variant[1], backward=True, **budget, **call.what)
    assert counted(out.traffic_backward) == counted(cost)
    assert (
        max(exact_gradients(*call, gradient_of_output(call), **call.what).ratios(got).values()) <= 1
    )


@given(calls(dtypes=(np.float64,), max_n=12, max_d=4), backwards, tilings)
def test_gradients_are_central_differences_in_random_directions(call, variant, tiles):
    """d/dh of sum(output(x + h u) do) at 0, for a direction u in q, k, v and the float mask each."""
    if has_float_mask(call):
        call.what["attn_mask"] = call.what["attn_mask"].astype(float)
    call = dataclasses.replace(call, q=np.clip(call.q, -4, 4), k=np.clip(call.k, -4, 4))
    do = gradient_of_output(call)
    got = run(call, variant, tiles=tiles).backward(do, wrt_mask=has_float_mask(call))
    rng, h = np.random.default_rng(1), 1e-5

    def value(**moved):
        parts = {"q": call.q, "k": call.k, "v": call.v, **call.what} | moved
        return float((exact(**parts).output * do).sum())

    at = {"q": call.q, "k": call.k, "v": call.v, "attn_mask": call.what.get("attn_mask")}
    for (name, x), gradient in zip(at.items(), got, strict=False):
        u = rng.standard_normal(x.shape)
        moved = [value(**{name: np.where(np.isfinite(x), x + s * h * u, x)}) for s in (1, -1)]
        size = 1 + np.abs(np.where(np.isfinite(x), gradient * u, 0)).sum()
        assert abs((moved[0] - moved[1]) / (2 * h) - (gradient * u).sum()) <= 1e-6 * size * (
            1 + np.abs(call.v).max(initial=0)
        )


@pytest.mark.parametrize("variant", BACKWARDS)
@pytest.mark.parametrize("what", [{}, {"is_causal": True}, {"dropout_p": 0.4, "seed": 3}])
def test_gradients_are_central_differences_element_by_element(variant, what):
    rng = np.random.default_rng(0)
    parts = {n: rng.standard_normal((5, w)) for n, w in (("q", 3), ("k", 3), ("v", 2))}
    do = rng.standard_normal((5, 2))
    call = Call(*parts.values(), what)
    got = run(call, variant, tiles=(2, 3)).backward(do)
    for (name, x), gradient in zip(parts.items(), got, strict=True):
        for place in np.ndindex(x.shape):
            values = []
            for h in (1e-5, -1e-5):
                moved = x.copy()
                moved[place] += h
                values.append((exact(**parts | {name: moved}, **what).output * do).sum())
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(gradient[place], abs=1e-8)


@given(calls(max_n=20), backwards, tilings)
def test_a_row_that_sees_nothing_has_no_gradient_and_gives_none(call, variant, tiles):
    call.what["key_padding_mask"] = np.zeros((*call.q.shape[:-3], call.k.shape[-2]), bool)
    got = run(call, variant, tiles=tiles).backward(gradient_of_output(call))
    assert all((x == 0).all() for x in got)


@given(calls(max_n=20), backwards, tilings)
def test_what_lies_behind_the_mask_gets_and_gives_no_gradient(call, variant, tiles):
    padding = np.random.default_rng(5).random((*call.q.shape[:-3], call.k.shape[-2])) < 0.5
    what = {**call.what, "key_padding_mask": padding}
    clean, dirty = (Call(*(x.copy() for x in call), what) for _ in range(2))
    for n in (1, 2):
        a, b = list(clean)[n], list(dirty)[n]
        for item in np.ndindex(*padding.shape[:-1]):
            a[item][:, ~padding[item]] = 0
            b[item][:, ~padding[item]] = [np.nan, np.inf][n - 1]
    do = gradient_of_output(call)
    one, two = (run(c, variant, tiles=tiles).backward(do) for c in (clean, dirty))
    for a, b in zip(one, two, strict=True):
        assert np.isfinite(b).all()
        assert np.array_equal(a, b)
    for item in np.ndindex(*padding.shape[:-1]):
        assert (two[1][item][:, ~padding[item]] == 0).all()
        assert (two[2][item][:, ~padding[item]] == 0).all()


@pytest.mark.parametrize("variant", BACKWARDS)
@pytest.mark.parametrize("rows_fit", [True, False])
@pytest.mark.parametrize("garbage", ["q", "do"])
def test_a_broken_query_gives_nothing_to_keys_that_it_does_not_see(
    monkeypatch, variant, rows_fit, garbage
):
    """A query whose visible scores are all -inf, or whose dO is NaN: 0 * inf and 0 * NaN are NaN."""
    if not rows_fit:
        row = ALGORITHMS[variant[0]]
        changed = {
            name: dataclasses.replace(b, more=lambda *_: {"Bs": 0} if row.uncharged else {})
            for name, b in row.backward.items()
        }
        monkeypatch.setitem(ALGORITHMS, variant[0], dataclasses.replace(row, backward=changed))
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 8, 3), dtype=np.float32)
    k[:] = np.abs(k)
    q[3] = -np.inf if garbage == "q" else q[3]
    do[3] = np.nan if garbage == "do" else do[3]
    out = run(Call(q, k, v, {"is_causal": True}), variant, tiles=(3, 5))
    dq, dk, dv = out.backward(do, tiles=(4, 3))
    assert np.isfinite(dk[4:]).all()
    assert np.isfinite(dv[4:]).all()
    assert np.isfinite(np.delete(dq, 3, axis=0)).all()


@pytest.mark.parametrize("variant", BACKWARDS)
@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_what_lies_behind_an_array_mask_gets_and_gives_no_gradient(variant, dtype):
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 8, 3), dtype=np.float32)
    mask = np.arange(8) % 3 != 1
    k[~mask], v[~mask] = np.nan, np.inf
    array = mask if dtype is bool else np.where(mask, np.float32(0), np.float32(-np.inf))
    out = run(Call(q, k, v, {"attn_mask": array[None]}), variant, tiles=(3, 5))
    dq, dk, dv = out.backward(do, tiles=(4, 3))
    kept = run(Call(q, k[mask], v[mask]), variant, tiles=(3, 5)).backward(do)
    for mine, theirs in zip((dq, dk[mask], dv[mask]), kept, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert (dk[~mask] == 0).all()
    assert (dv[~mask] == 0).all()


@given(calls(dropout=False, max_n=20), backwards, tilings)
def test_gradients_of_grouped_heads_are_summed_over_the_group(call, variant, tiles):
    group = call.q.shape[-3] // call.k.shape[-3]
    k, v = (np.repeat(x, group, axis=-3) for x in (call.k, call.v))
    repeated = dataclasses.replace(call, k=k, v=v)
    do = gradient_of_output(call)
    got = run(call, variant, tiles=tiles).backward(do)
    each = run(repeated, variant, tiles=tiles).backward(do)
    assert same_bits(got[0], each[0])
    ref = exact_gradients(*call, do, **call.what)
    for name, a, b in zip(NAMES[1:], got[1:], each[1:], strict=True):
        heads = b.reshape(*b.shape[:-3], call.k.shape[-3], group, *b.shape[-2:])
        apart = np.abs(a.astype(float) - heads.sum(axis=-3, dtype=float))
        assert (apart <= 2 * ref.bounds[name]).all()


@given(calls(dtypes=DTYPES, max_n=20), backwards, tilings)
def test_backward_twice_gives_the_same_bits_and_inputs_are_not_written_to(call, variant, tiles):
    out, do = run(call, variant, tiles=tiles), gradient_of_output(call)
    before = [x.copy() for x in (*call, do, out.output, out.lse)]
    one, two = out.backward(do), out.backward(do)
    assert all(same_bits(a, b) for a, b in zip(one, two, strict=True))
    after = [*call, do, out.output, out.lse]
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("variant", BACKWARDS)
@pytest.mark.parametrize("size", [100.0, -100.0])
def test_huge_and_equal_logits_give_finite_gradients_within_the_bound(variant, size):
    """Logits of +-100, and all equal: no NaN, no inf; the lse alone loses |lse| ulps."""
    rng = np.random.default_rng(1)
    q, k, v, do = rng.standard_normal((4, 33, 4), dtype=np.float32)
    root = np.float32(np.sqrt(abs(size)))
    q[:, 0], k[:, 0] = root, np.copysign(root, np.float32(size))
    for scale in (1.0, 0.0):
        call = Call(q, k, v, {"scale": scale, "is_causal": True})
        got = run(call, variant, tiles=(8, 5)).backward(do)
        assert all(np.isfinite(x).all() for x in got)
        assert max(exact_gradients(*call, do, **call.what).ratios(got).values()) <= 1


@pytest.mark.parametrize("variant", BACKWARDS)
@pytest.mark.parametrize("Nq, Nk", [(1, 1), (1, 7), (7, 1), (0, 3), (3, 0)])
def test_the_smallest_inputs_have_gradients(variant, Nq, Nk):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 3), dtype=np.float32) for n in (Nq, Nk, Nk))
    call = Call(q, k, v)
    do = gradient_of_output(call)
    got = run(call, variant, tiles=(4, 4)).backward(do)
    assert max(exact_gradients(*call, do).ratios(got).values()) <= 1


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 64), st.integers(1, 64))
def test_dense_square_counts_are_the_formulas_of_the_papers(N, d, Br, Bc):
    Tr, Tc = -(-N // min(Br, N)), -(-N // min(Bc, N))

    def total(algorithm, convention="literal"):
        return fs.io_cost(
            algorithm, N=N, d=d, Br=Br, Bc=Bc, convention=convention, backward=True
        ).total_elements

    Nd = N * d
    assert total("flash1") == 7 * Nd + Tc * (5 * Nd + 2 * N)
    assert total("flash1", "elided") == (4 + 4 * Tc) * Nd + 3 * Tc * N
    assert total("flash2") == 7 * Nd + N + Tc * (4 * Nd + 2 * N)
    assert total("flash2", "elided") == 5 * Nd + N + Tc * (4 * Nd + 2 * N)
    assert total("flash2-two-kernel") == (9 + 2 * Tc + 2 * Tr) * Nd + (3 + 2 * Tc) * N
    once = fs.io_cost("standard", N=N, d=d, backward=True).total_elements
    assert once == 7 * N * N + 8 * Nd


def test_what_is_kept_for_backward_is_quadratic_for_standard_and_linear_for_flash():
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 50, 8), dtype=np.float32)
    kept = {
        name: fs.attention(q, k, v, algorithm=name).kept_elements
        for name in ("standard", "flash1", "flash2", "flash2-two-kernel")
    }
    assert kept == {
        "standard": 3 * 50 * 50, "flash1": 3 * 2 * 50, "flash2": 3 * 50, "flash2-two-kernel": 3 * 50,
    }  # fmt: skip


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "flash2-two-kernel", "standard"])
@pytest.mark.parametrize("N, d, dv, M", [(13, 3, 3, 90), (24, 2, 5, 120), (17, 4, 1, 200)])
def test_the_optimal_rule_of_the_backward_pass_is_the_best_of_all_tiles(algorithm, N, d, dv, M):
    row = ALGORITHMS[algorithm].backward["literal"]
    head = checked(*(np.zeros((N, w), np.float32) for w in (d, d, dv))).head

    def moved(Br, Bc):
        return fs.io_cost(
            algorithm, N=N, d=d, dv=dv, Br=Br, Bc=Bc, backward=True, sram=M
        ).total_elements

    fits = [
        (Br, Bc)
        for Br in range(1, N + 1)
        for Bc in range(1, N + 1)
        if row.needs(head, Br, Bc)[0] <= M
    ]
    chosen = fs.tile_sizes(M, d, "optimal", algorithm, N=N, dv=dv, backward=True)
    assert chosen in fits
    assert moved(*chosen) == min(moved(*tiles) for tiles in fits)


BAD = {
    "do of another shape": (lambda out, do: out.backward(do[:-1]), ValueError, r"do.shape=\(4, 3\): expected \(5, 3\)"),
    "do of another dtype": (lambda out, do: out.backward(do.astype(float)), TypeError, "do.dtype='float64': expected float32"),
    "wrt_mask without a mask": (lambda out, do: out.backward(do, wrt_mask=True), ValueError, "wrt_mask=True: expected False"),
    "wrt_mask no flag": (lambda out, do: out.backward(do, wrt_mask=1), TypeError, "wrt_mask=1"),
    "tiles": (lambda out, do: out.backward(do, tiles=(0, 1)), ValueError, r"tiles\[0\]=0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_unusable_argument_of_backward_is_named(case):
    call, error, says = BAD[case]
    q, k, v = (np.ones((5, w), np.float32) for w in (4, 4, 3))
    with pytest.raises(error, match=says):
        call(fs.attention(q, k, v), np.ones((5, 3), np.float32))


@given(calls(max_n=20), backwards)
def test_strided_and_broadcast_gradients_of_the_output_give_the_bits_of_their_copies(call, variant):
    """Dao #355, test bwd_transpose; oleksost: a dO with stride 0, or transposed."""
    assume(call.q.shape[-2] > 0)
    out = run(call, variant, tiles=(8, 8))
    ones = np.broadcast_to(np.float32(1), out.output.shape)
    transposed = np.ascontiguousarray(np.swapaxes(gradient_of_output(call), -1, -2))
    swapped = np.swapaxes(transposed, -1, -2)
    for do in (ones, swapped):
        a, b = out.backward(do), out.backward(do.copy())
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@given(calls(dtypes=DTYPES, max_n=20), tilings)
def test_the_gradient_of_a_softmax_in_two_passes_is_as_exact_and_as_counted(call, tiles):
    """Standard attention where not even one row of P and dP fits on chip, whatever the budget."""
    do, wrt_mask = gradient_of_output(call), has_float_mask(call)
    entry = ALGORITHMS["standard"]
    backward = {
        name: dataclasses.replace(row, more=lambda *_: {"Bs": 0})
        for name, row in entry.backward.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "standard", dataclasses.replace(entry, backward=backward))
        out = run(call, ("standard", "literal"), tiles=tiles)
        got = out.backward(do, tiles=tiles, wrt_mask=wrt_mask)
        cost = expected_cost(out, *call, backward=True, wrt_mask=wrt_mask, **call.what)
    ratios = exact_gradients(*call, do, **call.what).ratios(got)
    assert max(ratios.values()) <= 1, ratios
    assert counted(out.traffic_backward) == counted(cost)
    assert out.sram_peak_backward_elements == cost.sram_elements
    assert out.sram_peak_backward_bytes == cost.sram_bytes


@pytest.mark.parametrize("variant", BACKWARDS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("tiles", [(2, 3), (5, 5)])
def test_garbage_in_one_query_row_reaches_only_what_that_row_sees(variant, garbage, tiles):
    """Causal, row 1: its own dq, and of a gradient that is garbage dk and dv of keys 0 and 1."""
    for name in ("q", "do"):
        rng = np.random.default_rng(0)
        parts = {n: rng.random((5, 3)) + 1 for n in ("q", "k", "v", "do")}
        parts[name][1] = garbage
        call = Call(parts["q"], parts["k"], parts["v"], {"is_causal": True})
        dq, dk, dv = run(call, variant, tiles=tiles).backward(parts["do"], tiles=tiles)
        assert np.isfinite(dq).all(axis=1).tolist() == [True, False, True, True, True]
        if name == "do":
            seen = [False, False, True, True, True]
            assert np.isfinite(dv).all(axis=1).tolist() == seen
            assert np.isfinite(dk).all(axis=1).tolist() == seen
