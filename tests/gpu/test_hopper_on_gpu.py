"""The kernels for warpgroups on a GPU of compute capability 9.0; elsewhere all skip and say why.

Compiling takes nearly all the time, so what one kernel is tried on is in one test: processes beside
each other then do not compile the same.
"""

from itertools import product
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flashsim.reference import exact
from flashsim.sample import load_sample

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")
from flashsim import kernels
from flashsim.kernels import gpu
from flashsim.kernels.warpgroup_tiles import WarpgroupTile


def _missing():
    reason = "runs on a GPU, not in Numba's simulator" if gpu.SIMULATED else gpu.available()
    if not reason and gpu.compute_capability() != (9, 0):
        reason = "needs compute capability 9.0"
    return reason


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing())

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def made(batch, heads, kv_heads, Nq, Nk, d, dtype, size=1.0):
    """q, k, v of normal numbers, NumPy."""
    rng = np.random.default_rng(Nq + Nk + d)
    shapes = (batch, heads, Nq, d), *[(batch, kv_heads, Nk, d)] * 2
    return [(size * rng.standard_normal(s)).astype(DTYPES[dtype]) for s in shapes]


def right(out, algorithm, q, k, v, **what):
    """Within the bound of weights that are rounded to 16 bits, as tests/test_hopper.py has it."""
    assert out.algorithm == algorithm
    wanted, size = exact(q, k, v, **what), exact(q, k, np.abs(v), **what).output
    limits = ml_dtypes.finfo(q.dtype)
    floor = float(limits.smallest_subnormal) / 2 * k.shape[-2] * np.abs(v.astype(float)).max()
    bound = wanted.output_bound + float(limits.eps) / 2 * size + floor
    assert (np.abs(out.output.astype(float) - wanted.output) <= bound).all()
    np.testing.assert_allclose(out.lse, wanted.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d", [64, 72, 128, 192, 256])
def test_attention_is_within_its_bound(dtype, is_causal, d):
    for Nq, Nk in (1000, 1100), (77, 2000), (300, 100), (1, 1):
        q, k, v = made(2, 4, 2, Nq, Nk, d, dtype)
        what = {"is_causal": is_causal, "enable_gqa": True}
        right(kernels.attention(q, k, v, algorithm="hopper", **what), "hopper", q, k, v, **what)


def test_windows():
    q, k, v = made(1, 2, 2, 500, 700, 64, "float16")
    for window in (100, 0), (0, 300), (50, 50):
        out = kernels.attention(q, k, v, algorithm="hopper", window=window)
        right(out, "hopper", q, k, v, window=window)


def ruled(Nk, padding, dropout):
    """A padding mask of two batches, with whole tiles that are padding, and dropout."""
    keys = np.random.default_rng(Nk).random((2, Nk)) < 0.8
    keys[0, Nk // 2 :], keys[1, 128:400] = False, False
    what = {"enable_gqa": True} | ({"key_padding_mask": keys} if padding else {})
    return what | ({"dropout_p": 0.2, "seed": 2**40 + 3} if dropout else {})


RULED = [(True, False), (False, True), (True, True)]
BANDS = [({},), ({"is_causal": True}, {"window": (100, 30)})]  # a kernel each


@pytest.mark.parametrize("padding, dropout", RULED)
@pytest.mark.parametrize("dtype, d", [("float16", 64), ("bfloat16", 128), ("float16", 192)])
@pytest.mark.parametrize("rules", BANDS, ids=["all", "band"])
def test_padding_and_dropout(padding, dropout, dtype, d, rules):
    q, k, v = made(2, 4, 2, 500, 700, d, dtype)
    for band in rules:
        what = ruled(700, padding, dropout) | band
        right(kernels.attention(q, k, v, algorithm="hopper", **what), "hopper", q, k, v, **what)


@pytest.mark.parametrize("padding, dropout", RULED)
@pytest.mark.parametrize("dtype, d", [("float16", 64), ("bfloat16", 128)])
@pytest.mark.parametrize("rules", BANDS, ids=["all", "band"])
def test_gradients_with_padding_and_dropout(padding, dropout, dtype, d, rules):
    """Within a few roundings of those that the readable kernels compute in float32."""
    q, k, v = made(2, 4, 2, 500, 700, d, dtype)
    do, unit = made(2, 4, 2, 500, 1, d, dtype)[0], float(ml_dtypes.finfo(q.dtype).eps)
    for band in rules:
        what = ruled(700, padding, dropout) | band
        out = kernels.attention(q, k, v, algorithm="hopper", **what)
        found, wanted = (
            kernels.attention_backward(q, k, v, out.output, out.lse, do, algorithm=name, **what)
            for name in ("hopper", "flash2-two-kernel")
        )
        for ours, theirs in zip(found, wanted, strict=True):
            ours, theirs = ours.astype(float), theirs.astype(float)
            assert np.isfinite(ours).all()
            assert np.abs(ours - theirs).max() <= 4 * unit * np.abs(theirs).max()


def test_decoding_with_padding():
    q, k, v = made(2, 8, 1, 1, 5000, 128, "float16")
    what = ruled(5000, True, False)
    out = kernels.attention(q, k, v, algorithm="hopper_split_kv", **what)
    right(out, "hopper_split_kv", q, k, v, **what)


def test_what_is_padding_does_not_leak():
    q, k, v = made(2, 4, 2, 300, 600, 64, "float16")
    what = ruled(600, True, False) | {"is_causal": True}
    clean = kernels.attention(q, k, v, algorithm="hopper", **what)
    padded = ~np.broadcast_to(what["key_padding_mask"][:, None], k.shape[:3])
    k[padded], v[padded] = np.nan, np.inf
    dirty = kernels.attention(q, k, v, algorithm="hopper", **what)
    assert dirty.output.tobytes() == clean.output.tobytes()


@pytest.mark.parametrize("Br, Bc, d", [(64, 64, 64), (128, 128, 128), (192, 128, 64)])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("ping_pong", [False, True])
def test_every_pipeline_gives_the_same_bits_every_time(Br, Bc, d, stages, ping_pong):
    """A race would show; so would a barrier that is passed too early."""
    tile = WarpgroupTile(Br, Bc, d, stages, ping_pong)
    if tile.bytes > gpu.shared_memory_bytes():
        pytest.skip("does not fit in shared memory")
    q, k, v = made(2, 8, 8, 1500, 1500, d, "float16")
    plan = kernels.plan(q, k, v, algorithm="hopper", tile=tile, is_causal=True)
    found = set()
    for _ in range(20):
        plan.launch()
        found.add(plan.result("O").tobytes())
    assert len(found) == 1
    out = SimpleNamespace(output=plan.result("O"), lse=plan.result("L"), algorithm=plan.algorithm)
    right(out, "hopper", q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding(dtype):
    for heads, kv_heads, Nk in (8, 1, 5000), (16, 16, 333), (128, 1, 4096):
        q, k, v = made(2, heads, kv_heads, 1, Nk, 128, dtype)
        out = kernels.attention(q, k, v, algorithm="hopper_split_kv", enable_gqa=True)
        right(out, "hopper_split_kv", q, k, v, enable_gqa=True)


def test_large_logits_and_real_activations():
    q, k, v = made(1, 2, 2, 700, 700, 64, "float16", size=6.0)
    right(kernels.attention(q, k, v, algorithm="hopper"), "hopper", q, k, v)
    inputs = load_sample()
    q, k, v = (x[:1].astype(np.float16) for x in (inputs.q, inputs.k, inputs.v))
    right(kernels.attention(q, k, v, algorithm="hopper"), "hopper", q, k, v)


def test_what_is_behind_a_mask_does_not_leak():
    q, k, v = made(1, 1, 1, 400, 400, 128, "float16")
    clean = kernels.attention(q, k, v, algorithm="hopper", is_causal=True)
    k[..., 333, :], v[..., 200, :] = np.nan, np.inf
    dirty = kernels.attention(q, k, v, algorithm="hopper", is_causal=True)
    assert dirty.output[..., :200, :].tobytes() == clean.output[..., :200, :].tobytes()
    assert (dirty.output[..., 200:333, :] == np.inf).all()
    assert np.isnan(dirty.output[..., 333:, :].astype(float)).all()


def test_strided_arrays_are_taken_where_they_are():
    """(batch, N, heads, d) in memory, as models have it; source: fault D53."""
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (y.transpose(1, 2) for y in x)
    strided = kernels.attention(q, k, v, algorithm="hopper", is_causal=True)
    copied = kernels.attention(
        *(y.contiguous() for y in (q, k, v)), algorithm="hopper", is_causal=True
    )
    assert strided.algorithm == copied.algorithm == "hopper"
    assert torch.equal(strided.output, copied.output)


def seen(Nq, Nk, is_causal=False, window=(None, None)):
    """Bool (Nq, Nk), aligned bottom-right, on the GPU."""
    torch = pytest.importorskip("torch")
    apart = torch.arange(Nk)[None] - torch.arange(Nq)[:, None] - (Nk - Nq)
    left, right = window
    keep = torch.ones(Nq, Nk, dtype=torch.bool)
    if is_causal:
        keep &= apart <= 0
    if left is not None:
        keep &= apart >= -left
    if right is not None:
        keep &= apart <= right
    return keep.cuda()


def gradients_hold(q, k, v, do, **what):
    """Each at most twice as far from float64 as those of PyTorch's fused attention."""
    torch = pytest.importorskip("torch")
    out = kernels.attention(q, k, v, algorithm="hopper", enable_gqa=True, **what)
    plan = kernels.plan_backward(
        q, k, v, out.output, out.lse, do, algorithm="hopper", enable_gqa=True, **what
    )
    assert plan.algorithm == "hopper"
    plan.launch()
    mask, found = seen(q.shape[-2], k.shape[-2], **what), []
    for x in ([y.double() for y in (q, k, v)], (q, k, v)):
        x = [y.clone().requires_grad_() for y in x]
        o = torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=mask, enable_gqa=True)
        found.append(torch.autograd.grad(o, x, do.to(o.dtype)))
    for name, right, theirs in zip(("dQ", "dK", "dV"), *found, strict=True):
        ours = plan.result(name)
        assert torch.isfinite(ours).all()
        assert (ours.double() - right).abs().max() <= 2 * (theirs.double() - right).abs().max()


def drawn(batch, heads, kv_heads, Nq, Nk, d, dtype):
    """q, k, v, do on the GPU."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(Nq + Nk + d)
    shapes = [(batch, n, N, d) for n, N in ((heads, Nq), (kv_heads, Nk), (kv_heads, Nk))]
    kind = getattr(torch, dtype)
    return [torch.randn(s, device="cuda", dtype=kind) for s in (*shapes, shapes[0])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d", [64, 72, 128])
def test_gradients_are_at_most_twice_as_far_off_as_those_of_pytorch(dtype, is_causal, d):
    for Nq, Nk in (1024, 1024), (1000, 1100), (77, 2000), (1, 700):
        q, k, v, do = drawn(2, 4, 2, Nq, Nk, d, dtype)
        gradients_hold(q, k, v, do, is_causal=is_causal)


def test_gradients_with_windows():
    q, k, v, do = drawn(1, 2, 2, 500, 500, 64, "float16")
    for window in (100, 0), (50, 50):
        gradients_hold(q, k, v, do, window=window)


@pytest.mark.parametrize("Br, d", [(64, 64), (128, 64), (64, 128)])
def test_gradients_of_keys_and_values_have_the_same_bits_every_time(Br, d):
    """A race would show. dQ is added up in an open order, so it may differ in its last bits."""
    torch = pytest.importorskip("torch")
    q, k, v, do = drawn(2, 8, 8, 1500, 1500, d, "float16")
    out = kernels.attention(q, k, v, algorithm="hopper", is_causal=True)
    what = {"algorithm": "hopper", "tiles": (Br, 128), "is_causal": True}
    plan = kernels.plan_backward(q, k, v, out.output, out.lse, do, **what)
    plan.launch()
    first = [plan.result(x).clone() for x in ("dQ", "dK", "dV")]
    for _ in range(20):
        plan.launch()
        dQ, *rest = (plan.result(x) for x in ("dQ", "dK", "dV"))
        assert all(map(torch.equal, rest, first[1:]))
        assert (dQ - first[0]).abs().max() <= 2e-3 * first[0].abs().max()


def test_gradients_take_nothing_from_behind_a_mask():
    torch = pytest.importorskip("torch")
    q, k, v, do = drawn(1, 1, 1, 400, 400, 128, "float16")

    def run():
        out = kernels.attention(q, k, v, algorithm="hopper", is_causal=True)
        what = {"algorithm": "hopper", "is_causal": True}
        return kernels.attention_backward(q, k, v, out.output, out.lse, do, **what)

    clean = run()
    real = q[:, :, 30].clone(), do[:, :, 50, 7].clone()
    q[:, :, 30], do[:, :, 50, 7] = torch.nan, torch.inf
    dQ, dK, dV = run()
    assert dQ[:, :, 30].isnan().all()
    assert not dV[:, :, :51, 7].isfinite().any()
    assert torch.equal(dK[:, :, 51:], clean[1][:, :, 51:])
    assert torch.equal(dV[:, :, 51:], clean[2][:, :, 51:])
    q[:, :, 30], do[:, :, 50, 7] = real
    k[:, :, 330], v[:, :, 360, 5] = torch.nan, torch.inf
    dQ, *_ = run()
    assert dQ[:, :, 330:].isnan().all()
    assert (dQ[:, :, :330] - clean[0][:, :, :330]).abs().max() <= 2e-3 * clean[0].abs().max()


def sizes_of_sums(q, k):
    """The largest of sum |q| |k| over the keys, for each query, scaled as scores are."""
    q, k = (np.abs(x.astype(np.float32)) for x in (q, np.repeat(k, q.shape[1] // k.shape[1], 1)))
    return (q @ k.swapaxes(-1, -2)).max(axis=-1) * q.shape[-1] ** -0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rules", BANDS, ids=["all", "band"])
def test_fp8_is_within_the_bound_of_its_rounded_inputs(dtype, rules):
    """The tensor cores keep about 14 bits of a sum of e4m3 (DeepSeek-V3, arXiv:2412.19437, 3.3.2).

    So does a score, and with it the logsumexp.
    """
    for (Nq, Nk), band in product(((300, 700), (77, 1500), (1, 1), (900, 129)), rules):
        q, k, v = made(2, 4, 2, Nq, Nk, 128, dtype)
        k[..., 128:256, :] *= 4
        v[..., :128, :] *= DTYPES[dtype](50)
        for incoherent in (False, True):
            what = {"enable_gqa": True, "incoherent": incoherent} | band
            out = kernels.attention(q, k, v, algorithm="hopper_fp8", **what)
            wanted = exact(q, k, v, fp8=128, **what)
            assert out.algorithm == "hopper_fp8"
            assert wanted.output_ratio(out.output) <= 1
            sees = np.isfinite(wanted.lse)
            assert (out.lse[~sees] == wanted.lse[~sees]).all()
            off = np.abs(np.where(sees, out.lse, 0) - np.where(sees, wanted.lse, 0))
            other = 0.05 if incoherent else 0  # a number beside a tie, rounded the other way
            assert (off <= 2.0**-12 * sizes_of_sums(q, k) + other).all()


def test_fp8_gives_the_same_bits_every_time_and_rotation_helps_with_outliers():
    q, k, v = made(1, 8, 8, 1500, 1500, 128, "float16")
    rng = np.random.default_rng(3)
    for x in q, k, v:
        x[rng.random(x.shape) < 0.001] *= 10
    far, right_output = {}, exact(q, k, v).output
    for incoherent in (False, True):
        plan = kernels.plan(q, k, v, algorithm="hopper_fp8", incoherent=incoherent)
        found = set()
        for _ in range(20):
            plan.launch()
            found.add(plan.result("O").tobytes())
        assert len(found) == 1
        difference = plan.result("O").astype(float) - right_output
        far[incoherent] = np.sqrt(np.mean(difference**2))
    assert far[True] < 0.8 * far[False]
