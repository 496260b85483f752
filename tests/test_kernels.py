"""The GPU kernels without a GPU: simulated thread by thread, against NumPy and the closed forms.

See tests/kernel_process.py for how, and tests/test_kernels_assembled.py for what the simulator
cannot show.
"""

from collections import Counter
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import flashsim as fs
from flashsim.cost.io import expected_cost
from flashsim.problem import checked
from flashsim.reference import exact
from kernel_process import KernelProcess

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")

ALGORITHMS = ("standard", "flash1", "flash2", "split_kv")


@pytest.fixture(scope="module")
def simulator():
    process = KernelProcess(simulated=True)
    yield process
    process.close()


def problem(seed, **fixed):
    """(q, k, v, what, tiles, threads) of a small call, all of it drawn from the seed."""
    rng = np.random.default_rng(seed)

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    Nq, Nk, d = rng.integers(1, 20), rng.integers(1, 20), rng.integers(1, 10)
    batch, kv_heads, group = pick((), (2,), (1, 2)), pick(1, 1, 2), pick(1, 1, 2)
    dtype = pick(np.float32, np.float32, np.float16, ml_dtypes.bfloat16)
    shapes = [(kv_heads * group, Nq, d), (kv_heads, Nk, d), (kv_heads, Nk, d)]
    q, k, v = (rng.standard_normal((*batch, *s)).astype(dtype) for s in shapes)
    what = {"enable_gqa": True}
    if pick(True, False):
        what |= {"is_causal": True, "causal_align": pick("bottom-right", "top-left")}
    if pick(True, False, False):
        what["window"] = (pick(None, 0, 3), pick(None, 1, 5))
    if pick(True, False, False):
        what["key_padding_mask"] = rng.random((*batch, Nk)) < pick(0.2, 0.8)
    if pick(True, False):
        shape = (pick(1, kv_heads * group), pick(1, Nq), pick(1, Nk))
        keep, bias = rng.random(shape) < 0.7, rng.standard_normal(shape).astype(np.float32)
        what["attn_mask"] = pick(keep, np.where(keep, bias, np.float32(-np.inf)))
    if pick(True, False, False):
        what |= {"dropout_p": 0.4, "seed": int(rng.integers(2**40))}
    tiles, threads = pick(((8, 8), (4, 4)), ((4, 8), (2, 4)), ((6, 12), (2, 4)), ((16, 4), (2, 4)))
    return q, k, v, what | fixed, tiles, threads


def expected(algorithm, q, k, v, tiles, **what):
    """({array: reads}, {array: writes}) by the closed form of the simulator."""
    Br, Bc = min(tiles[0], q.shape[-2]), min(tiles[1], k.shape[-2])
    cost = expected_cost(
        SimpleNamespace(algorithm=algorithm, tiles=(Br, Bc), splits=None), q, k, v, **what
    )
    return tuple({n: x for n, x in side.items() if x} for side in (cost.reads, cost.writes))


def summed(traffic, *steps):
    """Reads and writes of some steps together."""
    return tuple(dict(sum((Counter(traffic[s][n]) for s in steps), Counter())) for n in range(2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(8))
def test_kernels_compute_attention_and_move_what_the_closed_form_says(simulator, algorithm, seed):
    """Error within the bound, and loads and stores of each array equal to the simulator's count."""
    q, k, v, what, tiles, threads = problem(100 * ALGORITHMS.index(algorithm) + seed)
    output, lse, traffic = simulator.call(
        "attention", q, k, v, algorithm=algorithm, tiles=tiles, threads=threads, **what
    )
    right = exact(q, k, v, **what)
    assert output.dtype == q.dtype
    assert right.output_ratio(output) <= 1
    assert right.lse_ratio(lse) <= 1
    if algorithm == "standard":
        reads, writes = summed(traffic, "scores", "softmax", "values")
        assert writes.pop("L") == lse.size  # the lse is not part of Algorithm 0
        assert (reads, writes) == expected("standard", q, k, v, tiles, **what)
    elif algorithm != "split_kv":
        assert traffic[algorithm] == expected(algorithm, q, k, v, tiles, **what)
    else:
        (reads, writes), parts = traffic["split"], traffic["merge"][0]["L_parts"] // lse.size
        once, _ = expected("flash2", q, k, v, tiles, **what)
        assert reads == once | {"Q": parts * q.size}
        assert writes == {"O": parts * output.size, "L": parts * lse.size}
        assert traffic["merge"][1] == {"O": output.size, "L": lse.size}


def gradients(q, k, v, do, **what):
    """float64 dq, dk, dv by the definition, and how large the terms are that they sum."""
    p = checked(q, k, v, **what)
    found = [np.zeros(x.shape) for x in (p.q, p.k, p.v)]
    do = do.reshape(p.q.shape)
    for at in np.ndindex(*p.q.shape[:-2]):
        Q, K, V = (x.astype(float) for x in p.inputs(at).values())
        tile = p.mask(at).tile(slice(0, len(Q)), slice(0, len(K)))
        S = Q @ K.T * p.scale
        if tile.loaded is not None and tile.loaded.dtype != bool:
            S = S + tile.loaded
        S = np.where(tile.keep(), S, -np.inf)
        m = S.max(axis=1, keepdims=True)
        P = np.exp(S - np.where(m == -np.inf, 0, m))
        P /= np.maximum(P.sum(axis=1, keepdims=True), 1e-300)
        Z = p.dropout(at).keep(slice(0, len(Q)), slice(0, len(K))) / (1 - p.p) if p.p else 1.0
        dO, shared = do[at].astype(float), (*at[:-1], at[-1] // p.group)
        dP = (dO @ V.T) * Z
        dS = P * (dP - (P * dP).sum(axis=1, keepdims=True)) * p.scale
        found[0][at] += dS @ K
        found[1][shared] += dS.T @ Q
        found[2][shared] += (P * Z).T @ dO
    return [x.reshape(y.shape) for x, y in zip(found, (q, k, v), strict=True)]


def expected_backward(algorithm, q, k, v, tiles, **what):
    """({array: reads}, {array: writes}) by the closed form, less what the kernels need not do.

    A key head's blocks take its query heads one after the other: K and V are read once for all of
    them, and dK and dV need no sum over the group. In dQ's kernel each query head reads them.
    """
    Br, Bc = min(tiles[0], q.shape[-2]), min(tiles[1], k.shape[-2])
    out = SimpleNamespace(algorithm=algorithm, tiles=(Br, Bc), tiles_backward=None, splits=None)
    cost = expected_cost(out, q, k, v, backward=True, **what)
    reads, writes = Counter(cost.reads), Counter(cost.writes)
    for name in ("dK_group", "dV_group"):
        writes.pop(name, None)
    group = q.shape[-3] // k.shape[-3]
    for x, name in ((k, "K"), (v, "V")):
        reads.pop(f"d{name}", None)
        once = group * x.size if algorithm == "flash2-two-kernel" else reads[name]
        reads[name] -= once - once // group
        writes[f"d{name}"] //= group
    return tuple({n: x for n, x in side.items() if x} for side in (reads, writes))


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "flash2-two-kernel"])
@pytest.mark.parametrize("seed", range(7))
def test_backward_kernels_give_the_gradients_and_move_what_the_closed_form_says(
    simulator, algorithm, seed
):
    q, k, v, what, _, _ = problem(1000 + seed)
    tiles, threads = ((8, 8), (4, 4)) if seed % 2 else ((4, 12), (1, 4))
    rng = np.random.default_rng(seed)
    do = rng.standard_normal(q.shape).astype(q.dtype)
    out = fs.attention(q, k, v, **what)
    tolerance = {"float32": 4e-6, "float16": 4e-3, "bfloat16": 4e-2}[q.dtype.name]
    *found, traffic = simulator.call(
        "backward", q, k, v, out.output, out.lse, do,
        algorithm=algorithm, tiles=tiles, threads=threads, **what,
    )  # fmt: skip
    for got, right in zip(found, gradients(q, k, v, do, **what), strict=True):
        assert got.dtype == q.dtype
        assert got.shape == right.shape
        assert np.abs(got.astype(float) - right).max() <= tolerance * (1 + np.abs(right).max())
    if "round" in traffic:
        assert traffic.pop("round") == ({"A": q.size}, {"B": q.size})
    if algorithm == "flash1":
        lse = out.lse.size
        assert traffic.pop("statistics") == ({"L": lse}, {"l": lse, "m": lse})
    if algorithm == "flash2":
        assert traffic["zeros"] == ({}, {"A": q.size})
        traffic["zeros"] = ({}, {"dQ": q.size})
    assert summed(traffic, *traffic) == expected_backward(algorithm, q, k, v, tiles, **what)


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "flash2-two-kernel"])
def test_gradients_take_nothing_from_behind_a_mask(simulator, algorithm):
    """NaN in the padding, and a query that sees nothing; source: faults A3, A8."""
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((1, 1, n, 4)).astype(np.float32) for n in (7, 20, 20))
    do = rng.standard_normal(q.shape).astype(np.float32)
    what = {"key_padding_mask": np.arange(20)[None] < 9, "window": (10, 0)}
    out = fs.attention(q, k, v, **what)  # the last query sees keys 9 to 19
    assert np.isinf(out.lse[0, 0]).tolist() == [False] * 6 + [True]
    what |= {"algorithm": algorithm, "tiles": (8, 8), "threads": (2, 4)}
    *clean, _ = simulator.call("backward", q, k, v, out.output, out.lse, do, **what)
    k[..., 9:, :], v[..., 9:, :] = np.nan, np.inf
    *dirty, _ = simulator.call("backward", q, k, v, out.output, out.lse, do, **what)
    for a, b in zip(clean, dirty, strict=True):
        assert np.isfinite(a).all()
        assert a.tobytes() == b.tobytes()
    assert not clean[0][0, 0, 6].any()
    assert not clean[1][0, 0, 9:].any()


@pytest.mark.parametrize(
    ("parts", "d", "threads"),
    [(1, 20, 64), (2, 20, 64), (5, 20, 64), (40, 20, 64), (5, 70, 64), (9, 40, 192), (9, 40, 160)],
    ids=["one", "two", "five", "two rounds", "wide", "three groups", "two and a half groups"],
)
def test_groups_of_threads_merge_parts_by_their_logsumexp(simulator, parts, d, threads):
    """Where a part has no key, and where none has; in groups of 64 or of as many as columns."""
    rng = np.random.default_rng(parts)
    O_parts = rng.standard_normal((parts, 2, 2, d)).astype(np.float32)
    L_parts = (30 * rng.standard_normal((parts, 2, 2))).astype(np.float32)
    empty = rng.random(L_parts.shape) < 0.3
    empty[0], empty[:, 1, 1] = False, True
    L_parts[empty], O_parts[empty] = -np.inf, 0
    O, L = simulator.call("merged", O_parts, L_parts, threads)
    with np.errstate(invalid="ignore"):
        wanted = np.logaddexp.reduce(L_parts.astype(np.float64), axis=0)
        weights = np.where(empty, 0, np.exp(L_parts - wanted))
    assert np.allclose(L, wanted, rtol=1e-6, atol=1e-6)
    assert np.allclose(O, np.einsum("phi,phic->hic", weights, O_parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "split_kv", "block_sparse"])
def test_a_block_layout_is_attention_with_the_expanded_mask(simulator, algorithm):
    """Ragged sizes, and a row of blocks that is empty; source: faults A10, A11."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, n, 4)).astype(np.float32) for n in (19, 21, 21))
    blocks = rng.random((3, 3)) < 0.5
    blocks[1] = False
    dense = np.repeat(np.repeat(blocks, 8, 0), 8, 1)[:19, :21]
    output, lse, traffic = simulator.call(
        "attention", q, k, v, algorithm=algorithm, tiles=(8, 8), threads=(2, 4), block_mask=blocks
    )
    right = exact(q, k, v, attn_mask=dense)
    assert right.output_ratio(output) <= 1
    assert right.lse_ratio(lse) <= 1
    assert not output[:, 8:16].any()
    widths = np.array([8, 8, 5])
    if algorithm == "flash2":
        assert traffic["flash2"][0]["K"] == 2 * 4 * int((blocks @ widths).sum())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_behind_a_mask_does_not_leak(simulator, algorithm):
    """NaN in padding, and a first tile that is masked whole; source: faults A3, A8."""
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((1, 1, n, 4)).astype(np.float32) for n in (7, 20, 20))
    real = np.zeros((1, 20), bool)
    real[0, [9, 13, 14]] = True
    what = {"key_padding_mask": real, "algorithm": algorithm, "tiles": (8, 8), "threads": (2, 4)}
    clean = simulator.call("attention", q, k, v, **what)
    k[..., ~real[0], :], v[..., ~real[0], :] = np.nan, np.inf
    dirty = simulator.call("attention", q, k, v, **what)
    assert np.isfinite(clean[0]).all()
    assert clean[0].tobytes() == dirty[0].tobytes()
    assert clean[1].tobytes() == dirty[1].tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_row_that_sees_nothing_is_0_with_lse_minus_infinity(simulator, algorithm):
    """Also with no keys at all; source: faults A1, A13."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, n, 4)).astype(np.float32) for n in (9, 3, 3))
    what = {"algorithm": algorithm, "tiles": (4, 4), "threads": (2, 4)}
    output, lse, _ = simulator.call("attention", q, k, v, is_causal=True, **what)
    assert not output[:, :6].any()
    assert (lse[:, :6] == -np.inf).all()
    output, lse, _ = simulator.call("attention", q, k[:, :0], v[:, :0], **what)
    assert not output.any()
    assert (lse == -np.inf).all()


def test_softmax_rows_that_are_loaded_in_batches(simulator):
    """A row longer than eight loads of each thread takes another path."""
    q, k, v = (
        np.random.default_rng(9).standard_normal((n, 2)).astype(np.float32) for n in (2, 150, 150)
    )
    output, _, traffic = simulator.call(
        "attention", q, k, v, algorithm="standard", tiles=(4, 32), threads=(2, 8)
    )
    assert exact(q, k, v).output_ratio(output) <= 1
    assert traffic["softmax"] == ({"S": 300}, {"P": 300, "L": 2})


def test_a_softmax_row_that_does_not_fit_in_registers_is_read_twice(simulator):
    """Eight simulated threads of 128 numbers each hold 1024."""
    q, k, v = (
        np.random.default_rng(9).standard_normal((n, 1)).astype(np.float32) for n in (1, 1030, 1030)
    )
    output, lse, traffic = simulator.call(
        "attention", q, k, v, algorithm="standard", tiles=(1, 64), threads=(1, 8)
    )
    right = exact(q, k, v)
    assert right.output_ratio(output) <= 1
    assert right.lse_ratio(lse) <= 1
    assert traffic["softmax"] == ({"S": 2060}, {"P": 1030, "L": 1})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_columns_of_threads_far_beyond_d_stay_in_shared_memory(simulator, algorithm):
    """A product's columns are a multiple of 4 TX, however few of them there are."""
    q, k, v = (
        np.random.default_rng(3).standard_normal((n, 4)).astype(np.float32) for n in (1, 200, 200)
    )
    output, _, _ = simulator.call(
        "attention", q, k, v, algorithm=algorithm, tiles=(1, 128), threads=(1, 128)
    )
    assert exact(q, k, v).output_ratio(output) <= 1


def test_one_query_is_a_tile_of_one_row_where_keys_are_shared_out(simulator):
    """With as many threads as that allows."""
    for Nq, Br, threads in ((1, 1, 64), (3, 3, 32), (9, 4, 128)):
        x = np.zeros((1, 1, 9, 64), np.float32)
        found = simulator.call("threads_of", x[..., :Nq, :], x, x, algorithm="split_kv")
        assert found == (Br, threads)


def test_another_tile_after_the_first_is_another_kernel(simulator):
    """A constant frozen at the first compile would show; source: fault E71."""
    q, k, v = np.random.default_rng(8).standard_normal((3, 1, 24, 5)).astype(np.float32)
    right = exact(q, k, v)
    for tiles, threads in (((8, 8), (2, 4)), ((12, 4), (4, 4)), ((8, 16), (8, 4))):
        output, _, _ = simulator.call("attention", q, k, v, tiles=tiles, threads=threads)
        assert right.output_ratio(output) <= 1


def test_refusals_name_the_argument_its_value_and_what_is_accepted(simulator):
    f32, f16 = np.zeros((1, 2, 8, 4), np.float32), np.zeros((1, 2, 8, 4), np.float16)
    wide = np.zeros((1, 8, 257), np.float32)
    for arrays, what, kind, text in [
        ((f32, f16, f32), {}, "TypeError", "k.dtype='float16': expected float32"),
        ((f32.astype(float),) * 3, {}, "TypeError", "q.dtype='float64': expected float32"),
        ((f32, f32, f32[..., :3]), {}, "ValueError", "v.shape="),
        ((f32, f32[:, :1], f32[:, :1]), {}, "ValueError", "enable_gqa"),
        ((wide, wide, wide), {}, "ValueError", "width of 1 to 256"),
        ((f32,) * 3, {"algorithm": "flash9"}, "ValueError", "one of 'standard', 'flash1'"),
        ((f32,) * 3, {"tiles": (8, 6)}, "ValueError", "multiple of 4"),
        ((f32,) * 3, {"tiles": (32, 256), "threads": (8, 256)}, "ValueError", "1024 in all"),
        ((f32,) * 3, {"tiles": (512, 512)}, "SharedMemoryError", "bytes of shared memory"),
        ((f32,) * 3, {"block_mask": np.ones((1, 1), bool)}, "ValueError", "tiles=None"),
        ((f32,) * 3, {"attn_mask": np.zeros((3, 3))}, "TypeError", "attn_mask.dtype"),
        ((f32,) * 3, {"key_padding_mask": np.ones((1, 8))}, "TypeError", "expected bool"),
        ((f32,) * 3, {"key_padding_mask": np.ones((8, 1), bool)}, "ValueError", "expected (1, 8)"),
        (
            (f32,) * 3,
            {"block_mask": np.ones((4, 1), bool), "tiles": (4, 4)},
            "ValueError",
            "block_mask.shape=(4, 1): expected (2, 2)",
        ),
        ((f32,) * 3, {"pretend": "no usable NVIDIA GPU"}, "RuntimeError", "no usable NVIDIA GPU"),
    ]:
        found, message = simulator.call("refused", *arrays, **what)
        assert found == kind
        assert text in message
    more = (f32, f32[..., 0], f32)
    for what, text in [
        ({"algorithm": "flash3"}, "one of 'flash1', 'flash2'"),
        ({"tiles": (6, 8)}, "Br and Bc each a multiple of 4"),
        ({"algorithm": "block_sparse", "tiles": (8, 8)}, "block_mask=None"),
    ]:
        found, message = simulator.call(
            "refused", *(f32,) * 3, *more, front="attention_backward", **what
        )
        assert found == "ValueError"
        assert text in message


def test_too_little_shared_memory_says_which_tiles_fit(simulator):
    """Source: fault E72."""
    x = np.zeros((1, 8, 256), np.float32)
    _, message = simulator.call("refused", x, x, x, tiles=(256, 256))
    assert "these fit: [(" in message
