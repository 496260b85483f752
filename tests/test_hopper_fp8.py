"""FlashAttention-3 in FP8 without a GPU: in the simulator, and assembled. See test_hopper.py.

What the kernel has to give is what `flashsim.fp8` and `flashsim.reference.exact` say of e4m3.
"""

import ml_dtypes
import numpy as np
import pytest

from flashsim import fp8
from flashsim.reference import exact
from test_hopper import BF16, F16, drawn
from test_kernels import expected

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")

E4M3 = ml_dtypes.float8_e4m3fn


def eighths(rng, shape):
    """(bits in pairs, float64) of random e4m3."""
    x = (4 * rng.standard_normal(shape)).astype(E4M3)
    return x.view(np.uint16), x.astype(np.float64)


def in_order(columns):
    """Which column is where, of so many, as `rounded_four` leaves them: its docstring, inverted."""
    at = np.empty(columns, int)
    for c in range(columns):
        u, t, n = c % 16 // 8, c % 8 // 2, c % 2
        at[c // 16 * 16 + 4 * t + 2 * u + n] = c
    return at


@pytest.mark.parametrize("columns, d", [(8, 128), (40, 256), (128, 128)])
def test_wgmma_multiplies_tiles_of_e4m3(hopper, columns, d):
    rng = np.random.default_rng(columns)
    (a, A), (b, B) = (eighths(rng, (n, d)) for n in (64, columns))
    found = hopper("product", a, b, "e4m3")
    np.testing.assert_allclose(found, A @ B.T, rtol=0, atol=1e-3)


def test_wgmma_adds_the_product_of_rounded_weights_with_columns_of_v(hopper):
    """A product of 8-bit registers takes neighbours that accumulators do not have."""
    rng = np.random.default_rng(0)
    S, held = (rng.standard_normal((64, n)).astype(np.float32) for n in (128, 64))
    V = (4 * rng.standard_normal((128, 64))).astype(E4M3)
    vt = np.zeros((64, 256), E4M3)
    vt[:, 128:] = V.T[:, in_order(128)]
    found = hopper("product_of_weights", S, vt.view(np.uint8), held)
    wanted = held + S.astype(E4M3).astype(np.float64) @ V.astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_rows_are_quantised_as_in_numpy(hopper, dtype, d):
    """Bit for bit: scales of 128 rows, NaN for what is not finite, 1 for nothing."""
    x = np.random.default_rng(d).standard_normal((1, 2, 300, d)).astype(dtype)
    x[0, 0, 5, 7], x[0, 0, 130, 3], x[0, 1, :128] = np.nan, -np.inf, 0
    bits, scales = hopper("quantised", x, False, False)
    for h in range(2):
        wanted, scale = fp8.quantised(x[0, h].astype(np.float32), 128)
        np.testing.assert_array_equal(bits.view(E4M3)[0, h].astype(float), wanted.astype(float))
        np.testing.assert_array_equal(scales[0, h], scale[::128])


def test_values_are_quantised_into_columns_in_the_order_of_the_weights(hopper):
    x = np.random.default_rng(1).standard_normal((2, 1, 150, 128)).astype(F16)
    bits, scales = hopper("quantised", x, False, True)
    for b in range(2):
        wanted, scale = fp8.quantised(x[b, 0].astype(np.float32), 128)
        columns = np.zeros((128, 256), E4M3)
        columns[:, :150] = wanted.T
        np.testing.assert_array_equal(
            bits.view(E4M3)[b, 0].astype(float), columns[:, in_order(256)].astype(float)
        )
        np.testing.assert_array_equal(scales[b, 0], scale[::128])


@pytest.mark.parametrize("d", [64, 128])
def test_rotated_rows_are_those_of_numpy_but_for_float32_rounding(hopper, d):
    """Sums of a row in another order: a number beside a tie may be rounded the other way."""
    x = np.random.default_rng(2).standard_normal((1, 1, 200, d)).astype(F16)
    x[0, 0, 17, 5] = 300  # an outlier
    bits, scales = hopper("quantised", x, True, False)
    right = x[0, 0].astype(np.float64) @ fp8.rotation(d)
    scale = np.repeat(scales[0, 0], 128)[:200, None]
    found = bits.view(E4M3)[0, 0].astype(float) * scale
    largest = np.abs(right[:128]).max(), np.abs(right[128:]).max()
    np.testing.assert_allclose(scales[0, 0], np.array(largest) / 448, rtol=1e-6)
    bound = np.maximum(np.abs(right) * fp8.ROUNDING, scale * fp8.FLOOR)
    assert (np.abs(found - right) <= bound + 1e-6 * np.abs(right).max()).all()


def test_a_scale_is_not_so_small_that_products_of_two_vanish(hopper):
    x = np.full((1, 1, 1, 128), 1e-30, BF16)
    bits, scales = hopper("quantised", x, False, False)
    assert scales.item() == 2.0**-48
    assert not bits.any()


CASES = {
    "one tile": (F16, (1, 1, 1, 64, 128, 128), (1, False), {}),
    "tails, grouped heads": (F16, (1, 2, 1, 70, 300, 128), (2, False), {}),
    "batches, bfloat16": (BF16, (2, 1, 1, 20, 140, 128), (2, True), {}),
    "rotated": (F16, (1, 1, 1, 60, 200, 128), (2, False), {"incoherent": True}),
    "causal, taking turns, rows that see nothing": (
        F16,
        (1, 1, 1, 330, 256, 128),
        (4, True, 128),
        {"is_causal": True},
    ),
    "window, more work than blocks": (
        F16,
        (1, 5, 1, 64, 256, 128),
        (2, True),
        {"window": (90, 10)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_attention_of_e4m3_and_moves_half_the_bytes(hopper, case):
    """Scales differ from tile to tile, by 50 and more; loads and stores of each array counted.

    An element of rotated Q or K that is rounded the other way moves a score by a hundredth or so.
    """
    dtype, sizes, tile, what = CASES[case]
    q, k, v = drawn(len(case), dtype, *sizes)
    k[..., 128:256, :] *= 4
    v[..., :128, :] *= dtype.type(50)
    what = {"enable_gqa": True, "incoherent": False, **what}
    algorithm, output, lse, traffic = hopper("in_fp8", q, k, v, *tile, **what)
    assert algorithm == "hopper_fp8"
    assert output.dtype == dtype
    right = exact(q, k, v, fp8=128, **what)
    assert right.output_ratio(output) <= 1
    if what["incoherent"]:
        np.testing.assert_allclose(lse, right.lse, atol=0.05)
    else:
        assert right.lse_ratio(lse) <= 1
    Br, rest = (*tile, 64)[2], {n: x for n, x in what.items() if n != "incoherent"}
    reads, writes = expected("flash2", q, k, v, (Br, 128), **rest)
    Nk = k.shape[2]
    padded = -(-Nk // 128) * 128  # columns of V end with a whole tile: in cases with tails, no mask
    halves = {"Q": reads["Q"] // 2, "K": reads["K"] // 2, "V": reads["V"] // 2 * padded // Nk}
    assert traffic["hopper"] == (halves, writes)
    for x, name, size in (q, "Q", q.size // 2), (k, "K", k.size // 2), (v, "V", None):
        read, written = traffic[f"{name} in FP8"]
        assert read["x"] == x.size
        assert written["X8"] == (size or v.size // 2 * padded // Nk)


def test_a_head_is_none_of_the_next_ones_business(hopper):
    """Which a block takes after it: products of scales as far apart as these are not numbers."""
    q, k, v = drawn(4, BF16, 1, 8, 8, 20, 40, 128)
    for x in q, k:
        x[:, :4] *= BF16.type(1e-14)
        x[:, 4:] *= BF16.type(1e12)
    output = hopper("in_fp8", q, k, v, 2, False)[1]
    for heads in slice(0, 4), slice(4, 8):
        alone = hopper("in_fp8", q[:, heads], k[:, heads], v[:, heads], 2, False)[1]
        assert output[:, heads].tobytes() == alone.tobytes()
        assert np.isfinite(alone.astype(np.float32)).all()


def test_inf_behind_a_mask_reaches_the_output_in_fp8(hopper):
    """As the front door says: e4m3 is not looked through. NaN of a masked key does not."""
    q, k, v = drawn(5, F16, 1, 1, 1, 20, 20, 128)
    k[..., -1, :] = np.nan
    what = {"is_causal": True}
    assert np.isfinite(hopper("in_fp8", q, k, v, 2, False, **what)[1][..., :-1, :]).all()
    v[..., -1, 5] = np.inf
    found = np.isfinite(hopper("in_fp8", q, k, v, 2, False, **what)[1])
    assert not found[..., 5].any()
    assert found[..., :-1, :5].all()


def test_what_the_kernel_in_fp8_does_not_cover_is_left_to_the_plain_one(hopper):
    padding = {"key_padding_mask": np.ones((1, 4), bool)}
    for d, what in (64, {}), (128, padding), (128, {"dropout_p": 0.5}), (128, {"scale": -1.0}):
        x = drawn(0, F16, 1, 1, 1, 4, 4, d)
        assert hopper("ran", *x, algorithm="hopper_fp8", **what) == "flash2"


def test_other_tiles_and_a_rotation_of_what_is_not_in_fp8_are_refused(hopper):
    x = drawn(0, F16, 1, 1, 1, 4, 4, 128)
    with pytest.raises(
        ValueError, match=r"tiles=\(128, 64\): expected \(64, 128\) or \(128, 128\) in FP8"
    ):
        hopper("ran", *x, algorithm="hopper_fp8", tiles=(128, 64))
    with pytest.raises(ValueError, match="incoherent=False: expected True, as algorithm is not"):
        hopper("ran", *x, algorithm="hopper", incoherent=np.False_)
    with pytest.raises(TypeError, match="incoherent"):
        hopper("ran", *x, algorithm="hopper_fp8", incoherent="no")


@pytest.mark.parametrize("band", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_kernel_stays_in_registers_and_its_products_run_by_themselves(compiler, dtype, band):
    features = {"dtype": dtype, "fp8": True, "band": band}
    said = compiler.call("hopper_assembled", 128, 128, 128, True, **features)
    assert 0 < said.pop("registers") * said.pop("threads") <= 65536
    assert not any(said.values()), said


@pytest.mark.parametrize("rotated, transposed", [(True, False), (False, False), (False, True)])
def test_what_quantises_stays_in_registers(compiler, rotated, transposed):
    said = compiler.call("fp8_assembled", rotated, transposed, dtype="bfloat16")
    assert 0 < said.pop("registers") <= 128
    assert said.pop("threads") == 256
    assert not any(said.values()), said
