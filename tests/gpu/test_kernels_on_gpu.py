"""The kernels on a real GPU: `pytest tests/gpu`. Elsewhere, as in CI, all skip and say why."""

import ml_dtypes
import numpy as np
import pytest

import flashsim as fs
from flashsim.reference import exact
from flashsim.sample import load_sample

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")
from flashsim import kernels
from flashsim.kernels import gpu

pytestmark = pytest.mark.skipif(
    gpu.SIMULATED or bool(gpu.available()),
    reason=gpu.available() or "runs on a GPU, not in Numba's simulator",
)

ALGORITHMS = ("standard", "flash1", "flash2", "split_kv")
BACKWARD = ("flash1", "flash2", "flash2-two-kernel")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def made(shape, Nk=None, kv_heads=None, dtype="float32", seed=0):
    """q, k, v of normal numbers, NumPy."""
    rng = np.random.default_rng(seed)
    *batch, H, N, d = shape
    key_shape = (*batch, kv_heads or H, Nk or N, d)
    return [rng.standard_normal(s).astype(DTYPES[dtype]) for s in (shape, key_shape, key_shape)]


def sample():
    """q, k, v of real activations: the first text of the built-in sample, without padding."""
    inputs = load_sample()
    return inputs.q[:1], inputs.k[:1], inputs.v[:1]


def standard(q, k, v, dtype):
    """The same-precision standard computation: scores, softmax, values, each rounded to dtype."""
    type_ = DTYPES[dtype]
    wide = np.float32
    S = (q.astype(wide) @ np.swapaxes(k.astype(wide), -1, -2)).astype(type_).astype(wide)
    S *= wide(q.shape[-1] ** -0.5)
    P = np.exp(S - S.max(-1, keepdims=True))
    P = (P / P.sum(-1, keepdims=True)).astype(type_).astype(wide)
    return (P @ v.astype(wide)).astype(type_)


def close(out, q, k, v, **what):
    """Within the bound that flashsim.reference computes from the inputs."""
    right = exact(q, k, v, **what)
    assert right.output_ratio(out.output) <= 1
    assert right.lse_ratio(out.lse) <= 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_twice_that_of_standard_attention(algorithm, dtype):
    q, k, v = made((1, 2, 1024, 64), dtype=dtype)
    right = exact(q, k, v).output
    out = kernels.attention(q, k, v, algorithm=algorithm)
    error = np.abs(out.output.astype(float) - right).max()
    assert error <= 2 * np.abs(standard(q, k, v, dtype).astype(float) - right).max()
    close(out, q, k, v)


@pytest.mark.parametrize("d", [1, 8, 40, 96, 128, 200, 256])
def test_every_width_up_to_256(d):
    q, k, v = made((1, 1, 150, d), Nk=333)
    close(kernels.attention(q, k, v), q, k, v)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "case", ["causal", "top-left", "window", "padding", "bool", "float", "dropout"]
)
def test_masks_and_dropout(algorithm, case):
    Nq, Nk = 200, 333
    rng = np.random.default_rng(1)
    what = {
        "causal": {"is_causal": True},
        "top-left": {"is_causal": True, "causal_align": "top-left"},
        "window": {"window": (40, 7)},
        "padding": {"key_padding_mask": np.arange(Nk) < np.array([[90], [0]])},
        "bool": {"attn_mask": rng.random((4, Nq, Nk)) < 0.5},
        "float": {"attn_mask": rng.standard_normal((2, 1, 1, Nk)).astype(np.float32)},
        "dropout": {"dropout_p": 0.3, "seed": 2**40 + 5, "is_causal": True},
    }[case]
    q, k, v = made((2, 4, Nq, 64), Nk=Nk, kv_heads=2)
    out = kernels.attention(q, k, v, algorithm=algorithm, enable_gqa=True, **what)
    close(out, q, k, v, enable_gqa=True, **what)


def test_garbage_behind_a_mask_does_not_leak():
    q, k, v = made((1, 1, 130, 64), Nk=200)
    real = np.arange(200)[None] < 100
    clean = kernels.attention(q, k, v, key_padding_mask=real)
    k[..., 100:, :], v[..., 100:, :] = np.nan, np.inf
    dirty = kernels.attention(q, k, v, key_padding_mask=real)
    assert np.array_equal(clean.output, dirty.output)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_input_gives_the_same_bits(algorithm):
    q, k, v = made((2, 4, 700, 64))
    first = kernels.attention(q, k, v, algorithm=algorithm, is_causal=True)
    for _ in range(20):
        again = kernels.attention(q, k, v, algorithm=algorithm, is_causal=True)
        assert first.output.tobytes() == again.output.tobytes()
        assert first.lse.tobytes() == again.lse.tobytes()


def gradients(q, k, v, do, dtype=float, is_causal=False, keep=1.0):
    """dq, dk, dv by the definition, computed in `dtype`; keep: dropout's factors of the weights."""

    def at(x):
        return x.astype(dtype).astype(float if dtype is float else np.float32)

    q, k, v, do = (at(x) for x in (q, k, v, do))
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    S = at(q @ np.swapaxes(k, -1, -2)) * scale
    if is_causal:
        ahead = np.arange(S.shape[-1]) - np.arange(S.shape[-2])[:, None]
        S = np.where(ahead <= S.shape[-1] - S.shape[-2], S, -np.inf)
    P = np.exp(S - S.max(-1, keepdims=True))
    P = at(P / P.sum(-1, keepdims=True))
    dP = at(do @ np.swapaxes(v, -1, -2)) * keep
    dS = at(P * (dP - (P * dP).sum(-1, keepdims=True)))
    dV = np.swapaxes(at(P * keep), -1, -2) @ do
    return [at(x) for x in (dS @ k * scale, np.swapaxes(dS, -1, -2) @ q * scale, dV)]


def farthest(found, right):
    """The largest error."""
    return np.abs(found.astype(float) - right).max()


@pytest.mark.parametrize("algorithm", BACKWARD)
@pytest.mark.parametrize(
    "dtype, d",
    [("float32", 40), ("float32", 64), ("float32", 256), ("float16", 64), ("bfloat16", 128)],
)
def test_gradients(algorithm, dtype, d):
    """Causal and ragged; the same bits twice, but where atomics add up dQ."""
    q, k, v = made((1, 2, 200, d), Nk=333, dtype=dtype)
    do = np.random.default_rng(3).standard_normal(q.shape).astype(q.dtype)
    out = kernels.attention(q, k, v, is_causal=True)
    found = [
        kernels.attention_backward(
            q, k, v, out.output, out.lse, do, is_causal=True, algorithm=algorithm
        )
        for _ in range(2)
    ]
    tolerance = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    for name, a, b, right in zip(
        "qkv", *found, gradients(q, k, v, do, is_causal=True), strict=True
    ):
        if algorithm != "flash2" or name != "q":
            assert a.tobytes() == b.tobytes(), f"d{name} differs between two runs"
        assert farthest(a, right) <= tolerance * np.abs(right).max(), f"d{name}"


@pytest.mark.parametrize("algorithm", BACKWARD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_at_most_twice_as_far_off_as_those_of_standard_attention(algorithm, dtype):
    """On real activations."""
    type_ = DTYPES[dtype]
    q, k, v = (x.astype(type_) for x in sample())
    do = np.random.default_rng(3).standard_normal(q.shape).astype(type_)
    out = kernels.attention(q, k, v)
    found = kernels.attention_backward(q, k, v, out.output, out.lse, do, algorithm=algorithm)
    standard_ = gradients(q, k, v, do, type_)
    for name, a, b, right in zip("qkv", found, standard_, gradients(q, k, v, do), strict=True):
        assert farthest(a, right) <= 2 * farthest(b, right), f"d{name}"


@pytest.mark.parametrize("algorithm", BACKWARD)
def test_gradients_with_every_feature(algorithm):
    """Masks, window, padding, dropout and grouped heads agree with the two-kernel pass on NumPy."""
    rng = np.random.default_rng(4)
    q, k, v = made((2, 4, 150, 64), Nk=170, kv_heads=2)
    do = rng.standard_normal(q.shape).astype(np.float32)
    what = {
        "enable_gqa": True, "window": (60, 20), "key_padding_mask": np.arange(170) < [[150], [90]],
        "attn_mask": rng.random((4, 150, 170)) < 0.7, "dropout_p": 0.2, "seed": 2**35 + 1,
    }  # fmt: skip
    right = fs.attention(q, k, v, **what)
    out = kernels.attention(q, k, v, **what)
    found = kernels.attention_backward(
        q, k, v, out.output, out.lse, do, algorithm=algorithm, **what
    )
    for name, a, b in zip("qkv", found, right.backward(do), strict=True):
        assert farthest(a, b.astype(float)) <= 1e-5 * (1 + np.abs(b).max()), f"d{name}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_activations_are_at_most_twice_as_far_off_as_standard_attention(algorithm, dtype):
    q, k, v = (x.astype(DTYPES[dtype]) for x in sample())
    right = exact(q, k, v).output
    out = kernels.attention(q, k, v, algorithm=algorithm)
    assert farthest(out.output, right) <= 2 * farthest(standard(q, k, v, dtype), right)
    close(out, q, k, v)


def with_layout():
    """q, k, v, do; the arguments that leave out blocks; the same as a mask of scores."""
    q, k, v = made((1, 2, 300, 64))
    blocks = np.random.default_rng(2).random((5, 5)) < 0.5
    blocks[1] = False
    dense = np.repeat(np.repeat(blocks, 64, 0), 64, 1)[:300, :300]
    do = np.random.default_rng(3).standard_normal(q.shape).astype(q.dtype)
    return q, k, v, do, {"block_mask": blocks, "tiles": (64, 64)}, dense


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "split_kv", "block_sparse"])
def test_blocks_that_a_layout_leaves_out(algorithm):
    q, k, v, _, what, dense = with_layout()
    close(kernels.attention(q, k, v, algorithm=algorithm, **what), q, k, v, attn_mask=dense)


@pytest.mark.parametrize("algorithm", [*BACKWARD, "block_sparse"])
def test_gradients_of_blocks_that_a_layout_leaves_out(algorithm):
    q, k, v, do, what, dense = with_layout()
    out = fs.attention(q, k, v, attn_mask=dense)
    found = kernels.attention_backward(
        q, k, v, out.output, out.lse, do, algorithm=algorithm, **what
    )
    for a, b in zip(found, out.backward(do), strict=True):
        assert farthest(a, b.astype(float)) <= 1e-5 * (1 + np.abs(b).max())


def test_no_keys_at_all():
    q, k, v = made((1, 1, 9, 16))
    out = kernels.attention(q, k[..., :0, :], v[..., :0, :])
    assert not out.output.any()
    assert (out.lse == -np.inf).all()


def test_one_head_of_131072():
    torch = pytest.importorskip("torch")
    x = torch.randn(1, 1, 131072, 64, device="cuda")
    out = kernels.attention(x, x, x)
    rows = [0, 77777, 131071]
    right = torch.softmax(x[0, 0, rows].double() @ x[0, 0].double().T / 8, -1) @ x[0, 0].double()
    assert (out.output[0, 0, rows].double() - right).abs().max() < 1e-4


def test_torch_tensors_are_used_where_they_are_on_the_current_stream():
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
        q = k = v = x.transpose(1, 2)  # strided: heads are behind rows in memory
        torch.cuda._sleep(10**8)  # the inputs change late; only the same stream sees it
        x.mul_(0.5)
        out = kernels.attention(q, k, v)
        assert out.output.dtype == torch.bfloat16
        right = torch.nn.functional.scaled_dot_product_attention(*(y.double() for y in (q, k, v)))
    stream.synchronize()
    assert (out.output.double() - right).abs().max() < 2e-2
    assert (out.output[0, 0, 0] != 0).any()


def test_cupy_and_numba_arrays():
    cupy = pytest.importorskip("cupy")
    from numba import cuda

    q, k, v = made((1, 2, 100, 64))
    right = exact(q, k, v)
    out = kernels.attention(*(cupy.asarray(x) for x in (q, k, v)))
    assert right.output_ratio(cupy.asnumpy(out.output)) <= 1
    out = kernels.attention(*(cuda.to_device(x) for x in (q, k, v)))
    assert right.output_ratio(out.output.copy_to_host()) <= 1


def test_refusals_name_what_is_wrong():
    torch = pytest.importorskip("torch")
    q, k, v = made((1, 1, 64, 64))
    with pytest.raises(gpu.SharedMemoryError, match="these fit"):
        kernels.attention(q, k, v, tiles=(256, 256))
    with pytest.raises(TypeError, match="on the GPU"):
        kernels.attention(torch.zeros(64, 64, device="cuda"), k[0, 0], v[0, 0])
    with pytest.raises(TypeError, match=r"q\.device"):
        kernels.attention(torch.zeros(64, 64), k[0, 0], v[0, 0])
    with pytest.raises(TypeError, match=r"k\.dtype"):
        kernels.attention(q, k.astype(np.float16), v)


def last_of_shared_memory(at, out):
    sm = gpu.cuda.shared.array(0, gpu.float32)
    sm[at] = out[0] + gpu.float32(1)
    out[0] = sm[at]


def test_a_kernel_may_have_less_shared_memory_than_before_and_then_as_much_again():
    run, out = gpu.kernel(1)(last_of_shared_memory), gpu.cuda.to_device(np.zeros(1, np.float32))
    sizes = [200, 1, 100, 60, 200]  # KB; the first time more than it would get unasked
    for size in sizes:
        gpu.launch(run, 1, 1, 1024 * size, 0, (np.int64(256 * size - 1), out))
    assert out.copy_to_host() == [len(sizes)]
