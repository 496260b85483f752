"""The kernels for tensor cores on a real GPU: `pytest tests/gpu`. Elsewhere all skip and say why.

Errors are held against those of PyTorch's fused attention on the same inputs, both against float64:
at most twice as large.
"""

import numpy as np
import pytest

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "Nq, Nk, d, heads, key_heads",
    [
        (1024, 1024, 64, 2, 2), (1000, 1333, 64, 4, 2), (777, 777, 128, 2, 1), (1, 4097, 128, 8, 1),
        (127, 129, 64, 1, 1), (4096, 4096, 128, 1, 1),
    ],
)  # fmt: skip
def test_error_is_at_most_twice_that_of_pytorch(
    algorithm, dtype, is_causal, Nq, Nk, d, heads, key_heads
):
    """Lengths that no tile divides, grouped heads."""
    shapes = (2, heads, Nq, d), (2, key_heads, Nk, d), (2, key_heads, Nk, d)
    q, k, v = normal(1, dtype, *shapes)
    out = kernels.attention(q, k, v, algorithm=algorithm, is_causal=is_causal, enable_gqa=True)
    right, lse = definition(q, k, v, is_causal)
    assert out.algorithm == algorithm
    at_most_twice_as_far(out.output, peer(q, k, v, is_causal), right)
    assert (out.lse.double() - lse).abs().max() <= 1e-5 * lse.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, 10])
def test_real_activations_and_large_logits(algorithm, dtype, scale):
    q, k, v = sample(dtype)
    q = q * scale
    out = kernels.attention(q, k, v, algorithm=algorithm)
    assert out.algorithm == algorithm
    at_most_twice_as_far(out.output, peer(q, k, v, False), definition(q, k, v, False)[0])


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
@pytest.mark.parametrize(
    "N, d, heads, key_heads",
    [(1024, 64, 2, 2), (1000, 64, 4, 2), (777, 128, 2, 1), (130, 128, 1, 1)],
)
def test_gradients_are_at_most_twice_as_far_off_as_those_of_pytorch(
    dtype, is_causal, N, d, heads, key_heads
):
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
