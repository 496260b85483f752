"""The kernels for tensor cores on a real GPU: `pytest tests/gpu`. Elsewhere all skip and say why.

Errors are held against those of PyTorch's fused attention on the same inputs, both against float64:
at most twice as large.
"""

import ml_dtypes
import numpy as np
import pytest

import flashsim as fs
from flashsim.reference import exact
from flashsim.sample import load_sample

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")
pytest.importorskip("torch", reason="the peer is PyTorch's fused attention")
import torch

from flashsim import kernels
from flashsim.kernels import gpu

pytestmark = pytest.mark.skipif(
    gpu.SIMULATED or bool(gpu.available()),
    reason=gpu.available() or "runs on a GPU, not in Numba's simulator",
)

DTYPES = ["float16", "bfloat16"]


@pytest.fixture(params=["ampere", "hopper"])
def algorithm(request):
    """A forward kernel that this GPU can run."""
    if request.param == "hopper" and gpu.compute_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return request.param


def normal(seed, dtype, *shapes, scale=1.0):
    """Normal numbers on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    return [(scale * x).to(getattr(torch, dtype)) for x in draw]


def sample(dtype):
    """q, k, v of real activations: the first text of the built-in sample, without padding.

    Filled up with zeros to a width of 64, and q scaled so that the logits stay what they were.
    """
    inputs = load_sample()
    d = inputs.q.shape[-1]
    heads = (x[:1].astype(np.float32) for x in (inputs.q * (64 / d) ** 0.5, inputs.k, inputs.v))
    wide = (np.pad(x, [(0, 0)] * 3 + [(0, 64 - d)]) for x in heads)
    return [torch.from_numpy(x).cuda().to(getattr(torch, dtype)) for x in wide]


def seen(q, k, is_causal):
    """Bool (Nq, Nk): aligned bottom-right."""
    Nq, Nk = q.shape[-2], k.shape[-2]
    all_of_them = torch.ones(Nq, Nk, dtype=torch.bool, device="cuda")
    return all_of_them.tril(Nk - Nq) if is_causal else all_of_them


def definition(q, k, v, is_causal):
    """(output, lse) in float64; grouped heads repeated."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen(q, k, is_causal), -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[..., None]) @ v, lse


def peer(q, k, v, is_causal):
    """PyTorch's fused attention; with a mask where its causal rule is another."""
    mask = seen(q, k, True) if is_causal and q.shape[-2] != k.shape[-2] else None
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal and mask is None, enable_gqa=True
    )


def at_most_twice_as_far(ours, theirs, right):
    """Both from float64, by the largest error."""
    assert torch.isfinite(ours).all()
    assert (ours.double() - right).abs().max() <= 2 * (theirs.double() - right).abs().max()


SHAPES = {
    64: [(1024, 1024, 2, 2), (1000, 1333, 4, 2), (127, 129, 1, 1)],
    128: [(777, 777, 2, 1), (1, 4097, 8, 1), (4096, 4096, 1, 1)],
}  # Nq, Nk, heads, key heads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d", SHAPES)
def test_error_is_at_most_twice_that_of_pytorch(algorithm, dtype, is_causal, d):
    """Lengths that no tile divides, grouped heads."""
    for Nq, Nk, heads, key_heads in SHAPES[d]:
        shapes = (2, heads, Nq, d), (2, key_heads, Nk, d), (2, key_heads, Nk, d)
        q, k, v = normal(1, dtype, *shapes)
        out = kernels.attention(q, k, v, algorithm=algorithm, is_causal=is_causal, enable_gqa=True)
        right, lse = definition(q, k, v, is_causal)
        assert out.algorithm == algorithm
        at_most_twice_as_far(out.output, peer(q, k, v, is_causal), right)
        assert (out.lse.double() - lse).abs().max() <= 1e-5 * lse.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_activations_and_large_logits(algorithm, dtype):
    q, k, v = sample(dtype)
    for scale in 1, 10:
        larger = scale * q
        out = kernels.attention(larger, k, v, algorithm=algorithm)
        assert out.algorithm == algorithm
        right = definition(larger, k, v, False)[0]
        at_most_twice_as_far(out.output, peer(larger, k, v, False), right)


def test_the_same_input_gives_the_same_bits(algorithm):
    """A missing barrier would show; source: fault E67."""
    q, k, v = normal(2, "float16", *[(4, 8, 1111, 64)] * 3)
    first = kernels.attention(q, k, v, algorithm=algorithm, is_causal=True)
    for _ in range(50):
        again = kernels.attention(q, k, v, algorithm=algorithm, is_causal=True)
        assert torch.equal(first.output, again.output)
        assert torch.equal(first.lse, again.lse)


def test_strided_heads_and_what_lies_behind_a_mask(algorithm):
    """(batch, N, heads, d) in memory; NaN in keys that the first queries do not see."""
    x = normal(3, "bfloat16", (2, 300, 4, 64))[0]
    q = k = x.transpose(1, 2)
    v = q.clone()
    clean = kernels.attention(q, k, v, algorithm=algorithm, is_causal=True)
    v[:, :, 200:] = torch.nan
    dirty = kernels.attention(q, k, v, algorithm=algorithm, is_causal=True)
    assert clean.algorithm == algorithm
    assert torch.equal(clean.output[:, :, :200], dirty.output[:, :, :200])
    assert dirty.output[:, :, 200:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_are_at_most_twice_as_far_off_as_those_of_pytorch(dtype, is_causal, d):
    lengths_and_heads = {64: [(1024, 2, 2), (1000, 4, 2)], 128: [(777, 2, 1), (130, 1, 1)]}
    for N, heads, key_heads in lengths_and_heads[d]:
        shapes = [(2, heads, N, d)] * 2 + [(2, key_heads, N, d)] * 2
        q, do, k, v = normal(4, dtype, *shapes)
        _gradients_hold(q, k, v, do, is_causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_on_real_activations(dtype):
    q, k, v = sample(dtype)
    _gradients_hold(q, k, v, normal(5, dtype, q.shape)[0], False)


def _gradients_hold(q, k, v, do, is_causal):
    what = {"algorithm": "ampere", "is_causal": is_causal, "enable_gqa": True}
    out = kernels.attention(q, k, v, **what)
    plan = kernels.plan_backward(q, k, v, out.output, out.lse, do, **what)
    assert plan.algorithm == "ampere"
    plan.launch()
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    rights = torch.autograd.grad(definition(*wide, is_causal)[0], wide, do.double())
    same = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = torch.autograd.grad(peer(*same, is_causal), same, do)
    for name, other, right in zip(("dQ", "dK", "dV"), theirs, rights, strict=True):
        at_most_twice_as_far(plan.result(name), other, right)


def ruled(Nk, padding, dropout):
    """A padding mask of two batches, with whole tiles that are padding, and dropout."""
    keys = np.random.default_rng(Nk).random((2, Nk)) < 0.8
    keys[0, Nk // 2 :], keys[1, Nk // 8 : Nk // 2] = False, False
    what = {"enable_gqa": True} | ({"key_padding_mask": keys} if padding else {})
    return what | ({"dropout_p": 0.2, "seed": 2**40 + 3} if dropout else {})


@pytest.mark.parametrize(
    "d, dtype, padding, dropout, rules",
    [
        (64, np.float16, True, False, {"is_causal": True}),
        (128, ml_dtypes.bfloat16, True, False, {}),
        (64, ml_dtypes.bfloat16, False, True, {}),
        (128, np.float16, False, True, {"window": (100, 30)}),
        (64, np.float16, True, True, {}),
        (128, ml_dtypes.bfloat16, True, True, {"is_causal": True}),
    ],
    ids=str,
)
def test_padding_and_dropout_on_warps(d, dtype, padding, dropout, rules):
    """Within what rounding to 16 bits may do, of NumPy's weights; and padding does not leak.

    All lengths and both passes in one test, since it is compiling two kernels that takes time.
    """
    unit = float(ml_dtypes.finfo(dtype).eps)
    for Nq, Nk in ((500, 700), (700, 500), (77, 130), (1, 64)):
        rng = np.random.default_rng(Nq + d)
        shapes = [(2, 4, Nq, d)] * 2 + [(2, 2, Nk, d)] * 2
        q, do, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        what = ruled(Nk, padding, dropout) | rules

        def run(k, v, q=q, do=do, what=what):
            out = kernels.attention(q, k, v, algorithm="ampere", **what)
            plan = kernels.plan_backward(
                q, k, v, out.output, out.lse, do, algorithm="ampere", **what
            )
            assert out.algorithm == plan.algorithm == "ampere"
            plan.launch()
            return out.output, out.lse, *(plan.result(name) for name in ("dV", "dK", "dQ"))

        output, lse, *found = clean = run(k, v)
        right, size = exact(q, k, v, **what), exact(q, k, np.abs(v), **what).output
        smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        floor = smallest * Nk * np.abs(v.astype(float)).max()
        off = np.abs(output.astype(float) - right.output)
        assert (off <= right.output_bound + unit / 2 * size + floor).all()
        assert right.lse_ratio(lse) <= 1
        wide = [x.astype(np.float32) for x in (q, k, v)]
        dq, dk, dv = fs.attention(*wide, **what).backward(do.astype(np.float32))
        for ours, wanted in zip(found, (dv, dk, dq), strict=True):
            assert np.abs(ours.astype(float) - wanted).max() <= 4 * unit * np.abs(wanted).max()

        if padding:
            hidden = ~np.broadcast_to(what["key_padding_mask"][:, None], k.shape[:3])
            k[hidden], v[hidden] = np.nan, np.inf
            *dirty, dQ = run(k, v)
            for before, after in zip(clean, dirty, strict=False):
                assert before.tobytes() == after.tobytes()
            assert np.abs(dQ.astype(float) - dq).max() <= 4 * unit * np.abs(dq).max()
