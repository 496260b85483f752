"""The backward kernel for warpgroups of compute capability 9.0 and its instructions, without GPU.

As tests/test_hopper.py: simulated, with loads and stores counted, and assembled.
"""

import numpy as np
import pytest

import flashsim as fs
from kernel_process import KernelProcess
from test_ampere import gradients, normal
from test_hopper import APART, BF16, DROPPED, F16, numbers, real
from test_kernels import expected_backward
from test_kernels import gradients as exact_gradients

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")


@pytest.fixture(scope="module")
def simulator():
    process = KernelProcess(simulated=True)
    yield process
    process.close()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("keys, n, first", [(16, 8, 0), (48, 32, 32), (64, 64, 64), (128, 80, 0)])
def test_wgmma_sums_over_the_rows_of_two_tiles(simulator, dtype, keys, n, first):
    """Also from within a panel on, and over more than one."""
    rng = np.random.default_rng(keys)
    (a, A), (b, B) = numbers(rng, (keys, 64), dtype), numbers(rng, (keys, first + n), dtype)
    found = simulator.call(
        "elsewhere", "hopper_kernels", "product_of_columns", a, b, dtype.name, first
    )
    np.testing.assert_allclose(found, A.T @ B[:, first:], rtol=0, atol=2e-5 * np.sqrt(keys))


def test_what_wgmma_may_have_read_before_it_changed_shows(simulator):
    (a, A), (b, B) = (numbers(np.random.default_rng(n), (16, 64), F16) for n in range(2))
    found = simulator.call(
        "elsewhere", "hopper_kernels", "product_of_columns", a, b, "float16", touch=True
    )
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1:], A.T[1:] @ B, rtol=0, atol=1e-4)


def added(simulator, **what):
    x, total = np.arange(8, dtype=np.float32)[None], np.ones((3, 16), np.float32)
    found, before = simulator.call("elsewhere", "hopper_kernels", "added", x, total, 1, 4, **what)
    return x, total, found, before


def test_a_stretch_of_floats_is_copied_on_chip_and_added_from_there(simulator):
    """Not before it is waited for; and what is overwritten once it was read does no harm."""
    for what in ({}, {"touch_after": "read"}):
        x, total, found, before = added(simulator, **what)
        total[1, 4:12] += x[0]
        np.testing.assert_array_equal(found, total)
        assert np.isnan(before).all()


def test_an_addition_that_nobody_waits_for_or_from_what_is_overwritten_shows(simulator):
    _, total, found, _ = added(simulator, wait=False)
    np.testing.assert_array_equal(found, total)
    _, _, found, _ = added(simulator, touch_after="commit")
    assert np.isnan(found[1, 4:12]).all()


def bottom_right(Nq, Nk, *, is_causal=False, window=(None, None), causal_align="bottom-right"):
    """{"is_causal", "window"} of the same scores, counted from the last query and the last key."""
    left, right = (np.inf if n is None else n for n in window)
    apart = Nk - Nq if causal_align == "top-left" else 0
    return {"is_causal": is_causal, "window": (left + apart, right - apart)}


def visits(Nq, Nk, Br, Bc, is_causal=False, window=(np.inf, np.inf)):
    """How many tiles hold a score that counts."""
    apart = np.arange(Nk) - np.arange(Nq)[:, None] - (Nk - Nq)
    seen = (apart >= -window[0]) & (apart <= (0 if is_causal else window[1]))
    tiles = np.pad(seen, ((0, -Nq % Br), (0, -Nk % Bc)))
    return tiles.reshape(-(-Nq // Br), Br, -(-Nk // Bc), Bc).any(axis=(1, 3)).sum()


ASSEMBLED = [  # Br, Bc, d; dtype, band
    ((128, 128, 64), BF16, {"band": True}), ((64, 128, 128), F16, {"band": True}),
    ((64, 128, 128), F16, {}), ((128, 128, 64), F16, {"band": True, "keys": True}),
    ((64, 128, 128), F16, {"band": True, "keys": True}),
    ((32, 128, 128), F16, {"band": True, "keys": True, "dropout": True}),
]  # fmt: skip
TOP_LEFT = {"window": (3, None), "causal_align": "top-left"}
CASES = {  # dtype; batch, heads, key heads, Nq, Nk, d; Br, Bc; rules
    "batches of grouped heads": (BF16, (2, 4, 2, 17, 20, 64), (16, 64), {}),
    "causal": (F16, (1, 1, 1, 40, 150, 128), (32, 128), {"is_causal": True}),
    "rows that see nothing": (F16, (1, 2, 1, 60, 30, 64), (16, 64), {"is_causal": True}),
    "window, a width between panels": (BF16, (1, 1, 1, 70, 140, 72), (16, 128), {"window": (5, 9)}),
    "rows beyond the window": (F16, (1, 2, 1, 60, 20, 64), (16, 64), TOP_LEFT),
    "parts of the queries in a panel": (F16, (1, 1, 1, 40, 70, 64), (32, 128), {}),
    "parts of them in two panels": (F16, (1, 1, 1, 130, 90, 64), (128, 128), {"is_causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_right_and_move_what_the_closed_form_says(simulator, case):
    """Of dQ, L and D tiles are whole, also where they reach beyond the queries."""
    dtype, (batch, heads, key_heads, Nq, Nk, d), (Br, Bc), what = CASES[case]
    shapes = [(batch, heads, Nq, d)] * 2 + [(batch, key_heads, Nk, d)] * 2
    q, do, k, v = normal(len(case), dtype, *shapes)
    out = fs.attention(q, k, v, enable_gqa=True, **what)
    *found, traffic = simulator.call(
        "backward", q, k, v, out.output, out.lse, do,
        algorithm="hopper", tiles=(Br, Bc), enable_gqa=True, **what,
    )  # fmt: skip
    flat, rules = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, do)], bottom_right(Nq, Nk, **what)
    for got, (right, limit) in zip(found, gradients(*flat, **rules), strict=True):
        assert got.dtype == dtype
        assert (np.abs(got.reshape(right.shape) - right) <= limit).all()
    assert list(traffic) == ["zeros", "D", "hopper_backward", "finish"]
    wanted_reads, wanted_writes = expected_backward(
        "flash2", q, k, v, (Br, Bc), enable_gqa=True, **what
    )
    heads *= batch
    rows = heads * Br * visits(Nq, Nk, Br, Bc, **rules)
    padded, width = heads * -(-Nq // Br) * Br, -(-d // 64) * 64
    reads, writes = traffic["hopper_backward"]
    assert reads.pop("L") == reads.pop("D") == rows
    assert reads.pop("dQ") == writes.pop("dQ") == rows * width
    wanted_reads["dO"] -= q.size  # for D
    assert reads == {name: wanted_reads[name] for name in ("Q", "K", "V", "dO")}
    assert writes == {name: wanted_writes[name] for name in ("dK", "dV")}
    assert traffic["zeros"] == ({}, {"A": padded * width})
    statistics = {"dO": q.size, "O": q.size, "L": heads * Nq}
    assert traffic["D"] == (statistics, {"L2": padded, "D": padded})
    assert traffic["finish"] == ({"parts": padded * width}, {"dQ": q.size})


RULES = {  # dtype; batch, heads, key heads, Nq, Nk, d; Br, Bc; rules
    "padding": (F16, (2, 2, 1, 20, 150, 64), (16, 64), real(0.4, 2, 150, (0, 0, 64), (1, 64, 150))),
    "padding, a window": (
        F16,
        (1, 1, 1, 60, 130, 64),
        (16, 64),
        {"window": (3, 2), "key_padding_mask": APART["key_padding_mask"] | (np.arange(130) == 125)},
    ),
    "dropout": (BF16, (2, 2, 1, 20, 70, 64), (16, 64), DROPPED),
    "padding and dropout, causal": (
        F16,
        (1, 2, 1, 40, 130, 128),
        (32, 128),
        {"is_causal": True, **real(0.5, 1, 130), **DROPPED},
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_gradients_with_padding_and_dropout_are_right_and_move_what_they_must(simulator, case):
    """Tiles of keys without a real one are not visited, nor are queries that see none of a tile."""
    dtype, (batch, heads, key_heads, Nq, Nk, d), tiles, what = RULES[case]
    shapes = [(batch, heads, Nq, d)] * 2 + [(batch, key_heads, Nk, d)] * 2
    q, do, k, v = normal(len(case), dtype, *shapes)
    what = {"enable_gqa": True, **what}
    out = fs.attention(q, k, v, **what)
    *found, traffic = simulator.call(
        "backward", q, k, v, out.output, out.lse, do, algorithm="hopper", tiles=tiles, **what
    )
    unit = 2.0**-10 if dtype == F16 else 2.0**-7
    rights = exact_gradients(q, k, v, do, **what)
    largest = max(np.abs(right).max() for right in rights)
    for got, right in zip(found, rights, strict=True):
        assert (np.abs(got.astype(float) - right) <= 2 * unit * largest).all()
    wanted_reads, wanted_writes = expected_backward("flash2", q, k, v, tiles, **what)
    wanted_reads["dO"] -= q.size  # for D
    reads, writes = traffic["hopper_backward"]
    for name in ("Q", "K", "V", "dO"):
        assert reads[name] == wanted_reads[name]
    assert {name: writes[name] for name in ("dK", "dV")} == {
        name: wanted_writes[name] for name in ("dK", "dV")
    }


def test_gradients_take_nothing_from_padding(simulator):
    """NaN and inf in its keys and values, also where a key that is real has NaN; it has none."""
    q, do, k, v = normal(8, F16, *[(1, 40, 64)] * 2, *[(1, 60, 64)] * 2)
    what = {"is_causal": True, **real(0.6, 1, 60)}
    keys = what["key_padding_mask"][0]
    keys[58] = True
    out = fs.attention(q, k, v, **what)

    def run():
        given = q, k, v, out.output, out.lse, do
        return simulator.call("backward", *given, algorithm="hopper", tiles=(16, 64), **what)[:3]

    clean = run()
    assert not clean[1][:, ~keys].any()
    assert not clean[2][:, ~keys].any()
    k[:, ~keys], v[:, ~keys] = np.nan, np.inf
    for before, after in zip(clean, run(), strict=True):
        assert before.tobytes() == after.tobytes()
    k[:, 58, 3], q[:, 30], do[:, 31, 7] = np.nan, np.nan, np.inf
    dQ, dK, dV = run()
    assert dQ[:, :30].tobytes() == clean[0][:, :30].tobytes()
    assert np.isnan(dQ[:, 38:]).all()
    assert not dK[:, ~keys].any()
    assert not dV[:, ~keys].any()


def with_a_late_consumer(simulator, late, q, do, k, v, out):
    """dQ, dK and dV, causal, of two consumers, where one lags behind at each wait and barrier."""
    what = {"algorithm": "hopper", "tiles": (16, 128), "is_causal": True}
    given = q, k, v, out.output, out.lse, do
    return simulator.call("elsewhere", "hopper_kernels", "late", late, *given, **what)


def test_consumers_need_not_keep_step(simulator):
    q, do, k, v = normal(6, F16, *[(1, 40, 64)] * 2, *[(1, 128, 64)] * 2)
    out = fs.attention(q, k, v, is_causal=True)
    found = with_a_late_consumer(simulator, 0, q, do, k, v, out)
    for got, (right, limit) in zip(found, gradients(q, k, v, do, is_causal=True), strict=True):
        assert (np.abs(got - right) <= limit).all()


def test_gradients_take_nothing_from_behind_a_mask(simulator):
    """NaN and inf in queries that do not see all keys, and in keys that not all queries see.

    Key 94 is -inf: nobody gives it weight, in the first tile of queries or after it. The consumer
    that is late is the one that has such a number to clear, which the other must not read.
    """
    q, do, k, v = normal(3, BF16, *[(1, 40, 64)] * 2, *[(1, 100, 64)] * 2)
    q[..., 9], k[:, 94, 9] = 1, -np.inf

    def run(late):
        with np.errstate(all="ignore"):
            out = fs.attention(q, k, v, is_causal=True)
        return with_a_late_consumer(simulator, late, q, do, k, v, out)

    clean = run(1)
    assert not clean[1][:, 94].any()
    assert not clean[2][:, 94].any()
    assert all(np.isfinite(clean[n]).all() for n in (1, 2))
    real = q[:, 1].copy(), do[:, 21, 7].copy()
    q[:, 1], do[:, 21, 7] = np.nan, np.inf
    dQ, dK, dV = run(0)
    assert np.isnan(dQ[:, 1]).all()
    assert not np.isfinite(dQ[:, 21]).any()
    assert not np.isfinite(dV[:, :82, 7]).any()
    assert dK[:, 82:].tobytes() == clean[1][:, 82:].tobytes()
    assert dV[:, 82:].tobytes() == clean[2][:, 82:].tobytes()
    q[:, 1], do[:, 21, 7] = real
    k[:, 90], v[:, 93, 5] = np.nan, np.inf
    dQ, *_ = run(1)
    assert np.isnan(dQ[:, 30:]).all()
    assert dQ[:, :30].tobytes() == clean[0][:, :30].tobytes()


def test_gradients_take_nothing_from_before_a_window(simulator):
    q, do, k, v = normal(7, F16, *[(1, 20, 64)] * 2, *[(1, 64, 64)] * 2)
    what = {"window": (5, None)}
    dV = []
    for x in (do[0, 15, 7], np.inf):
        out, do[:, 15, 7] = fs.attention(q, k, v, **what), x
        given = q, k, v, out.output, out.lse, do
        dV += [simulator.call("backward", *given, algorithm="hopper", tiles=(16, 64), **what)[2]]
    assert dV[0][:, :54].tobytes() == dV[1][:, :54].tobytes()
    assert not np.isfinite(dV[1][:, 54:, 7]).any()


def test_scores_far_below_0_leave_no_trace_in_what_a_tile_has_beyond_the_keys(simulator):
    """exp(0 - lse) is inf there, and inf * 0 would be NaN; source: fault D51."""
    q, do, k, v = normal(5, np.float16, *[(1, 70, 64)] * 2, *[(1, 20, 64)] * 2)
    q, k = q / 4 + np.float16(5), k / 4 - np.float16(5)
    out = fs.attention(q, k, v)
    assert (out.lse < -100).all()
    what = {"algorithm": "hopper", "tiles": (128, 64)}
    *found, _ = simulator.call("backward", q, k, v, out.output, out.lse, do, **what)
    for got, (right, limit) in zip(found, gradients(q, k, v, do), strict=True):
        assert (np.abs(got - right) <= limit + 1e-4 * np.abs(right).max()).all()


def test_scores_far_below_0_leave_no_trace_at_padded_keys(simulator):
    """Nor does NaN in a query, without a band."""
    q, do, k, v = normal(5, F16, *[(1, 20, 64)] * 2, *[(1, 20, 64)] * 2)
    q, k = q / 4 + np.float16(5), k / 4 - np.float16(5)
    what = real(0.6, 1, 20)
    out = fs.attention(q, k, v, **what)
    assert (out.lse < -100).all()
    given = q, k, v, out.output, out.lse, do
    *found, _ = simulator.call("backward", *given, algorithm="hopper", tiles=(32, 64), **what)
    for got, right in zip(found, exact_gradients(q, k, v, do, **what), strict=True):
        assert (np.abs(got.astype(float) - right) <= 1e-2 * np.abs(right).max()).all()
    q[:, 3] = np.nan
    _, dK, dV, _ = simulator.call("backward", *given, algorithm="hopper", tiles=(32, 64), **what)
    keys = what["key_padding_mask"][0]
    assert np.isnan(dK[:, keys]).all()
    assert not dK[:, ~keys].any()
    assert not dV[:, ~keys].any()


def test_keys_that_no_query_sees_have_no_gradient(simulator):
    """A window that leaves whole tiles out, and no queries, or no keys, at all."""
    q, do, k, v = normal(4, np.float16, *[(1, 9, 64)] * 2, *[(1, 140, 64)] * 2)
    what = {"algorithm": "hopper", "tiles": (16, 64), "window": (3, 0)}
    for rows, keys in ((9, 140), (0, 70), (9, 0)):
        mine, given, K, V = q[:, :rows], do[:, :rows], k[:, :keys], v[:, :keys]
        out = fs.attention(mine, K, V, window=(3, 0))
        dQ, dK, dV, _ = simulator.call("backward", mine, K, V, out.output, out.lse, given, **what)
        first = keys - rows - 3 if rows else keys
        assert not dK[:, : max(0, first)].any()
        assert not dV[:, : max(0, first)].any()
        assert np.any(dV) == np.any(dQ) == bool(rows and keys)


def test_what_is_not_covered_is_left_to_the_readable_kernel(simulator):
    """Another type, a width that panels do not hold, an array mask, a negative scale."""
    for dtype, d, what in [
        (np.float32, 64, {}), (F16, 60, {}), (F16, 136, {}), (F16, 64, {"attn_mask": True}),
        (F16, 64, {"scale": -1.0}), (F16, 128, {}),
    ]:  # fmt: skip
        x, lse = np.zeros((1, 4, d), dtype), np.zeros((1, 4), np.float32)
        what = {"attn_mask": np.ones((4, 4), bool)} if "attn_mask" in what else what
        ran = simulator.call("elsewhere", "hopper_kernels", "backward_ran", x, lse, **what)
        assert ran == ("hopper" if (dtype, d, what) == (F16, 128, {}) else "flash2")


@pytest.mark.parametrize("d", [64, 72, 128])
def test_the_default_tiles_fit_on_chip_and_are_those_that_are_assembled(simulator, d):
    """In the 227 KiB that a block of compute capability 9.0 may have."""
    tiles, size = simulator.call("elsewhere", "hopper_kernels", "backward_default", d)
    assert (*tiles, -(-d // 64) * 64) in [tile for tile, *_ in ASSEMBLED]
    assert size <= 227 * 1024


def test_tiles_that_warpgroups_cannot_share_are_refused(simulator):
    x, lse = np.zeros((1, 8, 128), np.float16), np.zeros((1, 8), np.float32)
    for tiles in ((64, 64), (40, 128), (144, 128), (64, 192)):
        found, message = simulator.call(
            "refused", x, x, x, x, lse, x, front="plan_backward", algorithm="hopper", tiles=tiles
        )
        assert found == "ValueError"
        assert f"tiles={tiles}: expected 64 or 128 keys" in message


@pytest.mark.parametrize("tile, dtype, features", ASSEMBLED, ids=str)
def test_the_kernel_stays_in_registers_and_its_products_run_by_themselves(
    compiler, tile, dtype, features
):
    """No spills, no local memory, no float64; `setmaxnreg` followed, no `wgmma` made to wait.

    And of the registers with which the warpgroups begin there are enough to be shared out anew.
    """
    said = compiler.call("hopper_backward_assembled", *tile, dtype=dtype.name, **features)
    assert said["registers"] * said["threads"] <= 65536
    assert said.pop("shared_out") <= said.pop("registers") * said.pop("threads") // 128
    assert not any(said.values()), said
