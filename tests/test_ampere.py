"""The kernels for tensor cores of compute capability 8.0, simulated instruction by instruction.

What the instructions do is tests/test_ptx.py's business. See tests/kernel_process.py for how.
"""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import flashsim as fs
from flashsim.cost.io import expected_cost
from flashsim.dropout import Dropout
from flashsim.reference import exact
from kernel_process import KernelProcess
from test_kernels import expected_backward, summed
from test_kernels import gradients as exact_gradients

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")

DTYPES = (np.float16, ml_dtypes.bfloat16)
SMALL = {"algorithm": "ampere", "tiles": (32, 16), "threads": (2, 32), "enable_gqa": True}


@pytest.fixture(scope="module")
def simulator():
    process = KernelProcess(simulated=True)
    yield process
    process.close()


def normal(seed, dtype, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def bound(right, q, k, v, **what):
    """The bound of float32 arithmetic, and what rounding the weights for the product with V adds.

    A weight is off by half a unit in its last place, or, where float16 is subnormal, by 2^-25 of
    the largest weight.
    """
    precision, floor = (2.0**-11, 2.0**-25) if q.dtype == np.float16 else (2.0**-8, 0)
    size = np.abs(v.astype(np.float64))
    with np.errstate(invalid="ignore"):
        moved = exact(q, k, np.abs(v), **what).output * precision
    floor /= 1 - what.get("dropout_p", 0)
    return right.output_bound + moved * (1 + 2**-7) + v.shape[-2] * floor * size.max(initial=0)


def problem(seed):
    """(q, k, v, what, d) of a small call, all of it drawn from the seed."""
    rng = np.random.default_rng(seed)

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    d, (heads, key_heads) = pick(64, 64, 128), pick((1, 1), (2, 2), (2, 1))
    Nq, Nk = rng.integers(1, 70), rng.integers(1, 70)
    what = {"enable_gqa": True}
    if pick(True, False):
        what |= {"is_causal": True, "causal_align": pick("bottom-right", "top-left")}
    if pick(True, False, False):
        what["window"] = (pick(None, 0, 20), pick(None, 1, 20))
    if pick(True, False):
        what["scale"] = pick(0.02, 3.0)  # large logits, too
    if pick(True, False):  # stretches of padding, and single keys
        keys = rng.random((1, Nk)) < pick(0.05, 0.5, 0.95)
        keys[:, rng.integers(Nk) :][:, : pick(0, 30, 70)] = False
        what["key_padding_mask"] = keys
    if pick(True, False, False):
        what |= {"dropout_p": pick(0.1, 0.5), "seed": int(rng.integers(2**63))}
    shapes = (heads, Nq, d), (key_heads, Nk, d), (key_heads, Nk, d)
    return *normal(seed, pick(*DTYPES), *shapes), what, d


def expected(q, k, v, tiles, **what):
    """({array: reads}, {array: writes}) by the closed form of FlashAttention-2."""
    tiles = min(tiles[0], q.shape[-2]), min(tiles[1], k.shape[-2])
    case = SimpleNamespace(algorithm="flash2", tiles=tiles, splits=None)
    cost = expected_cost(case, q, k, v, **what)
    return tuple({n: x for n, x in side.items() if x} for side in (cost.reads, cost.writes))


@pytest.mark.parametrize("seed", range(12))
def test_attention_is_right_and_moves_what_the_closed_form_says(simulator, seed):
    """Ragged sizes, causal, windows, padding, dropout, grouped heads, both types and widths."""
    q, k, v, what, d = problem(seed)
    tiles, threads = ((32, 16), (2, 32)) if d == 64 else ((64, 32), (4, 32))
    output, lse, traffic = simulator.call(
        "attention", q, k, v, algorithm="ampere", tiles=tiles, threads=threads, **what
    )
    right = exact(q, k, v, **what)
    assert output.dtype == q.dtype
    assert (np.abs(output - right.output) <= bound(right, q, k, v, **what)).all()
    assert right.lse_ratio(lse) <= 1
    assert traffic == {"ampere": expected(q, k, v, tiles, **what)}


def gradients(
    q, k, v, do, *, is_causal=False, window=(np.inf, np.inf), key_padding_mask=True, dropout_p=0.0,
    seed=0,
):  # fmt: skip
    """float64 (dq, dk, dv) by the definition, and how far rounding to 16 bits may move each.

    Of what enters a product only P, dS and O are rounded, and each gradient is once it is stored.
    """
    u = 2.0**-11 if q.dtype == np.float16 else 2.0**-8
    group, scale = len(q) // len(k), q.shape[-1] ** -0.5
    left, right = window[0], 0 if is_causal else window[1]
    sums = [np.zeros((2, *x.shape)) for x in (q, k, v)]
    for h in range(len(q)):
        Q, K, V, dO = (x.astype(float) for x in (q[h], k[h // group], v[h // group], do[h]))
        apart = np.arange(len(K)) - np.arange(len(Q))[:, None] - (len(K) - len(Q))
        seen = (apart >= -left) & (apart <= right) & key_padding_mask
        Z = Dropout(dropout_p, seed, 0, h).keep(slice(0, len(Q)), slice(0, len(K)))
        Z = Z / (1 - dropout_p)
        S = np.where(seen, Q @ K.T * scale, -np.inf)
        P = np.where(seen, np.exp(S - S.max(axis=1, keepdims=True, initial=-1e9)), 0)
        P /= np.maximum(P.sum(axis=1, keepdims=True), 1e-300)
        dP, O = Z * (dO @ V.T), (Z * P) @ V
        dS = P * (dP - (dO * O).sum(axis=1, keepdims=True))
        off = u * np.abs(dS) + P * (u * (np.abs(dO) * np.abs(O)).sum(axis=1, keepdims=True) + 1e-5)
        at = (h, h // group, h // group)
        kept = (Z * P).T
        terms = (dS, K, off), (dS.T, Q, off.T), (kept, dO, u * kept)
        for total, n, (W, X, E), factor in zip(sums, at, terms, (scale, scale, 1), strict=True):
            total[:, n] += factor * (W @ X), factor * (E @ np.abs(X))
    return [(x, off + u * np.abs(x) + 1e-5 * np.abs(x).max() + 2.0**-24) for x, off in sums]


@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_right_and_move_what_the_closed_form_says(simulator, seed):
    """Ragged sizes, causal and windows, grouped heads, both types and widths."""
    rng, d = np.random.default_rng(50 + seed), 128 if seed == 4 else 64
    heads, key_heads = ((1, 1), (2, 1), (1, 1), (2, 2), (1, 1))[seed]
    Nq, Nk = rng.integers(20, 80), rng.integers(20, 60)
    q, do, k, v = normal(seed, DTYPES[seed % 2], *[(heads, Nq, d)] * 2, *[(key_heads, Nk, d)] * 2)
    what = ({"is_causal": True}, {"window": (9, 20)}, {}, {"is_causal": True}, {})[seed]
    hold(simulator, q, k, v, do, **what)


def hold(simulator, q, k, v, do, tile=None, **what):
    """The gradients, within their limits; the loads and stores, as the closed form has them."""
    out, d = fs.attention(q, k, v, enable_gqa=True, **what), q.shape[-1]
    tiles, threads = tile or (((64, 32), (2, 32)) if d == 64 else ((64, 64), (4, 32)))
    *found, traffic = simulator.call(
        "backward", q, k, v, out.output, out.lse, do,
        algorithm="ampere", tiles=tiles, threads=threads, enable_gqa=True, **what,
    )  # fmt: skip
    for got, (right, limit) in zip(found, gradients(q, k, v, do, **what), strict=True):
        assert got.dtype == q.dtype
        assert (np.abs(got - right) <= limit).all()
    assert traffic.pop("round") == ({"A": q.size}, {"B": q.size})
    traffic["zeros"] = ({}, {"dQ": q.size})
    wanted = expected_backward("flash2", q, k, v, tiles, enable_gqa=True, **what)
    assert summed(traffic, *traffic) == wanted


def real(share, Nk, *none):
    """A key padding mask: such a share of the keys is real, and of some stretches none is."""
    keys = np.random.default_rng(Nk).random((1, Nk)) < share
    for first, stop in none:
        keys[:, first:stop] = False
    return {"key_padding_mask": keys}


APART = {"key_padding_mask": np.isin(np.arange(70), [3, 28, 60])[None]}  # also within a tile
DROPPED = {"dropout_p": 0.3, "seed": 2**40 + 5}
RULES = {  # dtype; heads, key heads, Nq, Nk, d; rules
    "padding": (np.float16, (2, 1, 40, 100, 64), real(0.4, 100, (0, 20), (64, 100))),
    "padding, a window": (np.float16, (1, 1, 140, 70, 64), {"window": (3, 2), **APART}),
    "dropout": (DTYPES[1], (2, 1, 70, 40, 64), DROPPED),
    "dropout, a width of 128": (np.float16, (1, 1, 20, 70, 128), {"is_causal": True, **DROPPED}),
    "padding and dropout": (
        np.float16,
        (1, 1, 40, 70, 128),
        {"is_causal": True, **real(0.5, 70), **DROPPED},
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_gradients_with_padding_and_dropout_are_right_and_move_what_they_must(simulator, case):
    """Neither keys of which none is real are visited, nor queries that see none of a tile."""
    dtype, (heads, key_heads, Nq, Nk, d), what = RULES[case]
    q, do, k, v = normal(7, dtype, *[(heads, Nq, d)] * 2, *[(key_heads, Nk, d)] * 2)
    hold(simulator, q, k, v, do, **what)


def test_queries_between_real_keys_are_passed_over(simulator):
    """The second of three tiles of queries sees padding alone, of a tile of 128 keys."""
    q, do, k, v = normal(9, np.float16, *[(1, 159, 64)] * 2, *[(1, 128, 64)] * 2)
    what = {"window": (3, 2), "key_padding_mask": np.isin(np.arange(128), [3, 120])[None]}
    hold(simulator, q, k, v, do, ((64, 128), (4, 32)), **what)


def test_dropout_drops_by_batch_too(simulator):
    """Also of a seed that takes 64 bits, and where a warp has 32 rows, as by default for d = 64."""
    q, do, k, v = normal(9, np.float16, *[(2, 2, 20, 64)] * 2, *[(2, 1, 40, 64)] * 2)
    what = SMALL | {"tiles": (64, 64), "dropout_p": 0.5, "seed": 2**64 - 3}
    rules = {name: what[name] for name in ("dropout_p", "seed", "enable_gqa")}
    output, lse, _ = simulator.call("attention", q, k, v, **what)
    right = exact(q, k, v, **rules)
    assert (np.abs(output - right.output) <= bound(right, q, k, v, **rules)).all()
    *found, _ = simulator.call("backward", q, k, v, output, lse, do, **what)
    for got, wanted in zip(found, exact_gradients(q, k, v, do, **rules), strict=True):
        assert np.abs(got - wanted).max() <= 2e-3 * np.abs(wanted).max()


def test_gradients_take_nothing_from_behind_a_mask(simulator):
    """NaN and inf in queries that do not see all keys, and in keys that not all queries see."""
    q, do, k, v = normal(3, ml_dtypes.bfloat16, *[(1, 20, 64)] * 2, *[(1, 40, 64)] * 2)

    def run():
        with np.errstate(all="ignore"):
            out = fs.attention(q, k, v, is_causal=True)
        what = SMALL | {"tiles": (64, 32), "is_causal": True}
        return simulator.call("backward", q, k, v, out.output, out.lse, do, **what)[:3]

    clean = run()
    real = q[:, 3].copy(), do[:, 5, 7].copy()
    q[:, 3], do[:, 5, 7] = np.nan, np.inf
    dQ, dK, dV = run()
    assert np.isnan(dQ[:, 3]).all()
    assert not np.isfinite(dV[:, :26, 7]).any()
    assert dK[:, 26:].tobytes() == clean[1][:, 26:].tobytes()
    assert dV[:, 26:].tobytes() == clean[2][:, 26:].tobytes()
    q[:, 3], do[:, 5, 7] = real
    k[:, 33], v[:, 36, 5] = np.nan, np.inf
    dQ, *_ = run()
    assert np.isnan(dQ[:, 13:]).all()
    assert dQ[:, :13].tobytes() == clean[0][:, :13].tobytes()


@pytest.mark.parametrize("rules", [{}, {"window": (25, 20), **DROPPED}], ids=str)
def test_what_is_padding_does_not_leak(simulator, rules):
    """NaN and inf in its keys and values, forward and backward, and in a query: it has no gradient.

    All scores are far below 0, so that a weight without a maximum would be inf.
    """
    q, do, k, v = normal(8, np.float16, *[(1, 40, 64)] * 2, *[(1, 60, 64)] * 2)
    q, k = q / 4 + np.float16(3), k / 4 - np.float16(3)
    what = rules | real(0.6, 60, (16, 32))
    keys = what["key_padding_mask"][0]

    def run():
        output, lse, _ = simulator.call("attention", q, k, v, **SMALL | what)
        tiles = {"tiles": (64, 32)}
        *found, _ = simulator.call("backward", q, k, v, output, lse, do, **SMALL | tiles | what)
        return output, lse, *found

    clean = run()
    assert all(np.isfinite(x).all() for x in clean)
    k[:, ~keys], v[:, ~keys] = np.nan, np.inf
    for before, after in zip(clean, run(), strict=True):
        assert before.tobytes() == after.tobytes()
    q[:, 30], do[:, 31, 7] = np.nan, np.inf
    _, _, dQ, dK, dV = run()
    assert np.isnan(dQ[:, 30]).all()
    assert not np.isfinite(dV[:, keys][:, :, 7]).all()
    assert not dK[:, ~keys].any()
    assert not dV[:, ~keys].any()


def test_inf_is_seen_where_its_weight_is_not_masked(simulator):
    """Beside padding; by a weight that dropout left out it is NaN. In values, and in dO."""
    q, do, k, v = normal(2, np.float16, *[(1, 40, 64)] * 2, *[(1, 60, 64)] * 2)
    what = {"is_causal": True, **real(0.6, 60), **DROPPED}
    what["key_padding_mask"][0, [7, 41]] = True
    v[:, 7, 3], v[:, 41, 9] = np.inf, -np.inf
    output, *_ = simulator.call("attention", q, k, v, **SMALL | what)
    right = exact(q, k, v, **what).output
    odd = ~np.isfinite(right)
    assert 0 < np.isnan(right).sum() < odd.sum() < right.size
    np.testing.assert_array_equal(output[odd].astype(float), right[odd])
    assert np.isfinite(output[~odd]).all()
    v[:, [7, 41]] = 1
    out = fs.attention(q, k, v, **what)
    do[:, 20, 5] = np.inf
    *_, dV, _ = simulator.call(
        "backward", q, k, v, out.output, out.lse, do, **SMALL | what | {"tiles": (64, 32)}
    )
    keep = Dropout(DROPPED["dropout_p"], DROPPED["seed"], 0, 0).keep(slice(20, 21), slice(0, 60))[0]
    seen = (np.arange(60) <= 20 + 20) & what["key_padding_mask"][0]
    assert (dV[0, seen & keep, 5] == np.inf).all()
    assert np.isnan(dV[0, seen & ~keep, 5]).all()
    assert np.isfinite(dV[0, ~seen]).all()


def test_neighbouring_query_heads_share_a_key_head(simulator):
    """Two and two, forward and backward; source: faults D58, D59."""
    q, do, k, v = normal(6, np.float16, *[(4, 5, 64)] * 2, *[(2, 9, 64)] * 2)
    output, lse, _ = simulator.call("attention", q, k, v, **SMALL)
    right = exact(q, k, v, enable_gqa=True)
    assert (np.abs(output - right.output) <= bound(right, q, k, v, enable_gqa=True)).all()
    what = SMALL | {"tiles": (64, 32)}
    *found, _ = simulator.call("backward", q, k, v, output, lse, do, **what)
    for got, (wanted, limit) in zip(found, gradients(q, k, v, do), strict=True):
        assert (np.abs(got - wanted) <= limit).all()


def test_scores_far_below_0_leave_no_trace_in_what_a_tile_has_beyond_the_keys(simulator):
    """exp(0 - lse) is inf there, and inf * 0 would be NaN; source: fault D51."""
    q, do, k, v = normal(5, np.float16, *[(1, 10, 64)] * 2, *[(1, 20, 64)] * 2)
    q, k = q / 4 + np.float16(5), k / 4 - np.float16(5)
    out = fs.attention(q, k, v)
    assert (out.lse < -100).all()
    what = SMALL | {"tiles": (64, 32)}
    *found, _ = simulator.call("backward", q, k, v, out.output, out.lse, do, **what)
    for got, (right, limit) in zip(found, gradients(q, k, v, do), strict=True):
        assert (np.abs(got - right) <= limit + 1e-4 * np.abs(right).max()).all()


def test_keys_that_no_query_sees_have_no_gradient(simulator):
    """A window that leaves whole tiles out, and no queries at all."""
    q, do, k, v = normal(4, np.float16, *[(1, 9, 64)] * 2, *[(1, 70, 64)] * 2)
    for rows in (9, 0):
        mine, given = q[:, :rows], do[:, :rows]
        out = fs.attention(mine, k, v, window=(3, 0))
        _, dK, dV, _ = simulator.call(
            "backward", mine, k, v, out.output, out.lse, given, window=(3, 0),
            **SMALL | {"tiles": (64, 32)},
        )  # fmt: skip
        first = 70 - rows - 3 if rows else 70
        assert not dK[:, :first].any()
        assert not dV[:, :first].any()
        assert np.any(dV[:, first:]) == bool(rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_behind_a_mask_does_not_leak(simulator, dtype):
    """NaN and inf in keys and values that only later queries see; source: fault A8."""
    q, k, v = normal(1, dtype, (1, 20, 64), (1, 40, 64), (1, 40, 64))
    clean = simulator.call("attention", q, k, v, is_causal=True, **SMALL)
    k[:, 33], v[:, 30], v[:, 36, 5] = np.nan, np.inf, np.nan
    dirty = simulator.call("attention", q, k, v, is_causal=True, **SMALL)
    right = exact(q, k, v, is_causal=True)
    for a, b, wanted in zip(clean, dirty, (right.output, right.lse), strict=False):
        assert a[:, :10].tobytes() == b[:, :10].tobytes()
        assert np.array_equal(np.isfinite(b), np.isfinite(wanted))
    assert (dirty[0][:, 10:13] == np.inf).all()


def test_a_row_that_sees_nothing_is_0_with_lse_minus_infinity(simulator):
    """Also with no keys at all, or none that is real; source: faults A1, A13."""
    q, k, v = normal(7, np.float16, (1, 40, 64), (1, 3, 64), (1, 3, 64))
    output, lse, traffic = simulator.call("attention", q, k, v, is_causal=True, **SMALL)
    assert not output[:, :37].any()
    assert (lse[:, :37] == -np.inf).all()
    assert np.isfinite(lse[:, 37:]).all()
    assert traffic["ampere"][0] == {"Q": q.size, "K": k.size, "V": v.size}
    for keys, what in ((0, {}), (3, real(0, 3))):
        none = k[:, :keys], v[:, :keys]
        output, lse, traffic = simulator.call("attention", q, *none, **SMALL | what)
        assert not output.any()
        assert (lse == -np.inf).all()
        assert traffic["ampere"][0] == {"Q": q.size}


@pytest.mark.parametrize(
    "what", [{"attn_mask": np.tri(9, dtype=bool)}, {"scale": -1.0}, {}], ids=str
)
def test_what_is_not_covered_is_left_to_the_readable_kernel_which_says_so(simulator, what):
    dtype = np.float16 if what else np.float32
    q, k, v = normal(8, dtype, *[(1, 9, 64)] * 3)
    output, _, traffic = simulator.call("attention", q, k, v, algorithm="ampere", **what)
    assert list(traffic) == ["flash2"]
    assert exact(q, k, v, **what).output_ratio(output) <= 1


def test_tiles_that_warps_cannot_share_are_refused(simulator):
    x = np.zeros((1, 8, 64), np.float16)
    for what, text in [
        ({"tiles": (32, 16), "threads": (4, 32)}, "threads=(4, 32): expected Br a multiple of 16"),
        ({"tiles": (32, 24), "threads": (2, 32)}, "tiles=(32, 24)"),
        ({"tiles": (32, 16), "threads": (4, 4)}, "expected (warps, 32)"),
    ]:
        found, message = simulator.call("refused", x, x, x, algorithm="ampere", **what)
        assert found == "ValueError"
        assert text in message
