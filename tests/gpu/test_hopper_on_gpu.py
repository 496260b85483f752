"""The kernels for warpgroups on a GPU of compute capability 9.0; elsewhere all skip and say why."""

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
@pytest.mark.parametrize("Nq, Nk", [(1000, 1100), (77, 2000), (300, 100), (1, 1)])
def test_attention_is_within_its_bound(dtype, is_causal, d, Nq, Nk):
    q, k, v = made(2, 4, 2, Nq, Nk, d, dtype)
    what = {"is_causal": is_causal, "enable_gqa": True}
    right(kernels.attention(q, k, v, algorithm="hopper", **what), "hopper", q, k, v, **what)


@pytest.mark.parametrize("window", [(100, 0), (0, 300), (50, 50)])
def test_windows(window):
    q, k, v = made(1, 2, 2, 500, 700, 64, "float16")
    out = kernels.attention(q, k, v, algorithm="hopper", window=window)
    right(out, "hopper", q, k, v, window=window)


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
@pytest.mark.parametrize("heads, kv_heads, Nk", [(8, 1, 5000), (16, 16, 333), (128, 1, 4096)])
def test_decoding(dtype, heads, kv_heads, Nk):
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
