"""The kernels for tensor cores of compute capability 8.0, simulated instruction by instruction.

What the instructions do is tests/test_ptx.py's business. See tests/kernel_process.py for how.
"""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import flashsim as fs
from flashsim.cost.io import expected_cost
from flashsim.reference import exact
from kernel_process import KernelProcess
from test_kernels import expected_backward, summed

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")

DTYPES = (np.float16, ml_dtypes.bfloat16)
SMALL = {"algorithm": "ampere", "tiles": (32, 16), "threads": (2, 32), "enable_gqa": True}


@pytest.fixture(scope="module")
def simulator():
    process = KernelProcess(simulated=True)
    yield process
    process.close()


@pytest.fixture(scope="module")
def compiler():
    process = KernelProcess(simulated=False)
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
    shapes = (heads, Nq, d), (key_heads, Nk, d), (key_heads, Nk, d)
    return *normal(seed, pick(*DTYPES), *shapes), what, d


def expected(q, k, v, tiles, **what):
    """({array: reads}, {array: writes}) by the closed form of FlashAttention-2."""
    tiles = min(tiles[0], q.shape[-2]), min(tiles[1], k.shape[-2])
    case = SimpleNamespace(algorithm="flash2", tiles=tiles, splits=None)
    cost = expected_cost(case, q, k, v, **what)
    return tuple({n: x for n, x in side.items() if x} for side in (cost.reads, cost.writes))


@pytest.mark.parametrize("seed", range(8))
def test_attention_is_right_and_moves_what_the_closed_form_says(simulator, seed):
    """Ragged sizes, causal, windows, grouped heads, both types and widths."""
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


def gradients(q, k, v, do, *, is_causal=False, window=(np.inf, np.inf)):
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
        seen = (apart >= -left) & (apart <= right)
        S = np.where(seen, Q @ K.T * scale, -np.inf)
        P = np.where(seen, np.exp(S - S.max(axis=1, keepdims=True, initial=-1e9)), 0)
        P /= np.maximum(P.sum(axis=1, keepdims=True), 1e-300)
        dP, O = dO @ V.T, P @ V
        dS = P * (dP - (dO * O).sum(axis=1, keepdims=True))
        off = u * np.abs(dS) + P * (u * (np.abs(dO) * np.abs(O)).sum(axis=1, keepdims=True) + 1e-5)
        at = (h, h // group, h // group)
        terms = (dS, K, off), (dS.T, Q, off.T), (P.T, dO, u * P.T)
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
    out = fs.attention(q, k, v, enable_gqa=True, **what)
    tiles, threads = ((64, 32), (2, 32)) if d == 64 else ((64, 64), (4, 32))
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
    """Also with no keys at all; source: faults A1, A13."""
    q, k, v = normal(7, np.float16, (1, 40, 64), (1, 3, 64), (1, 3, 64))
    output, lse, traffic = simulator.call("attention", q, k, v, is_causal=True, **SMALL)
    assert not output[:, :37].any()
    assert (lse[:, :37] == -np.inf).all()
    assert np.isfinite(lse[:, 37:]).all()
    assert traffic["ampere"][0] == {"Q": q.size, "K": k.size, "V": v.size}
    output, lse, _ = simulator.call("attention", q, k[:, :0], v[:, :0], **SMALL)
    assert not output.any()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize(
    "what", [{"dropout_p": 0.5}, {"key_padding_mask": np.ones((1, 9), bool)}, {"scale": -1.0}, {}]
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


@pytest.mark.parametrize(
    "name, d, dtype, band",
    [
        ("ampere", 64, "float16", True),
        ("ampere", 128, "bfloat16", False),
        ("ampere_backward", 128, "float16", True),
    ],
)
def test_default_tiles_stay_in_registers(compiler, name, d, dtype, band):
    """No spills, no local memory, no float64, and a block's registers fit a multiprocessor."""
    pytest.importorskip("cuda.core", reason="the assembler comes with numba-cuda[cu13]")
    reports = compiler.call("assembled", name, d, ("sm_80", "sm_90a"), dtype=dtype, band=band)
    for said in reports.values():
        assert said["spill_bytes"] == said["stack_bytes"] == said["wide_floats"] == 0
        assert 0 < said["registers"] * said["threads"] <= 65536
