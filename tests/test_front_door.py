"""What the front door accepts, what it refuses and how it says so, and PyTorch's rules."""

import subprocess
import sys

import numpy as np
import pytest

import flashsim as fs
from flashsim.reference import exact, exact_gradients
from strategies import TRAINABLE, VARIANTS, same_bits

f32 = np.float32


def qkv(*lead, Nq=5, Nk=6, d=4, dv=3, dtype=f32):
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((*lead, n, w)).astype(dtype) for n, w in ((Nq, d), (Nk, d), (Nk, dv))
    ]


Q, K, V = qkv(2, 4)

# argument -> (call, error, what the message must say): the argument, its value, what is accepted
BAD = {
    "q is no array of numbers": (lambda: fs.attention("q", K, V), TypeError, r"q.dtype='<U1': .*float16"),
    "q integer": (lambda: fs.attention(Q.astype(int), K, V), TypeError, "q.dtype='int64': .*float32"),
    "k complex": (lambda: fs.attention(Q, K * 1j, V), TypeError, "k.dtype='complex64'"),
    "k of another dtype": (lambda: fs.attention(Q, K.astype(float), V), TypeError, "k.dtype='float64': expected float32"),
    "v object": (lambda: fs.attention(Q, K, V.astype(object)), TypeError, "v.dtype='object'"),
    "q one-dimensional": (lambda: fs.attention(Q[0, 0, 0], K, V), ValueError, r"q.shape=\(4,\): expected at least two"),
    "k of another rank": (lambda: fs.attention(Q, K[0], V[0]), ValueError, r"k.shape=\(4, 6, 4\): expected 4 dim"),
    "k of another width": (lambda: fs.attention(Q, K[..., :3], V), ValueError, r"k.shape=\(2, 4, 6, 3\): expected \(2, 4, 6, 4\)"),
    "v of another length": (lambda: fs.attention(Q, K, V[..., :5, :]), ValueError, r"v.shape=\(2, 4, 5, 3\)"),
    "k of another batch": (lambda: fs.attention(Q, K[:1], V[:1]), ValueError, r"k.shape=\(1, 4, 6, 4\)"),
    "width 0": (lambda: fs.attention(Q[..., :0], K[..., :0], V), ValueError, "q.shape=.*width of at least 1"),
    "fewer heads": (lambda: fs.attention(Q, K[:, :2], V[:, :2]), ValueError, "k.shape=.*enable_gqa=True"),
    "heads that do not divide": (lambda: fs.attention(Q, K[:, :3], V[:, :3], enable_gqa=True), ValueError, "k.shape=.*divides the 4"),
    "no heads": (lambda: fs.attention(Q, K[:, :0], V[:, :0], enable_gqa=True), ValueError, "k.shape=.*divides the 4"),
    "algorithm": (lambda: fs.attention(Q, K, V, algorithm="flash9"), ValueError, "algorithm='flash9': expected one of 'standard', 'flash1'"),
    "algorithm not a name": (lambda: fs.attention(Q, K, V, algorithm=2), ValueError, "algorithm=2"),
    "is_causal": (lambda: fs.attention(Q, K, V, is_causal="yes"), TypeError, "is_causal='yes': expected True or False"),
    "enable_gqa": (lambda: fs.attention(Q, K[:, :2], V[:, :2], enable_gqa=1), TypeError, "enable_gqa=1"),
    "causal_align": (lambda: fs.attention(Q, K, V, causal_align="left"), ValueError, "causal_align='left': .*'bottom-right', 'top-left'"),
    "window length": (lambda: fs.attention(Q, K, V, window=(1, 2, 3)), ValueError, r"window=\(1, 2, 3\): expected \(left, right\)"),
    "window negative": (lambda: fs.attention(Q, K, V, window=(-1, 0)), ValueError, r"window\[0\]=-1: expected an integer of at least 0"),
    "window not integer": (lambda: fs.attention(Q, K, V, window=(1.5, 0)), TypeError, r"window\[0\]=1.5"),
    "attn_mask shape": (lambda: fs.attention(Q, K, V, attn_mask=np.ones((5, 5), bool)), ValueError, r"attn_mask.shape=\(5, 5\): expected what broadcasts to \(2, 4, 5, 6\)"),
    "attn_mask rank": (lambda: fs.attention(Q, K, V, attn_mask=np.ones((1, 2, 4, 5, 6), bool)), ValueError, "attn_mask.shape"),
    "attn_mask dtype": (lambda: fs.attention(Q, K, V, attn_mask=np.ones((5, 6), int)), TypeError, "attn_mask.dtype='int64': expected bool"),
    "attn_mask wider than the scores": (lambda: fs.attention(Q, K, V, attn_mask=np.zeros((5, 6))), TypeError, "attn_mask.dtype='float64': .*float32"),
    "key_padding_mask shape": (lambda: fs.attention(Q, K, V, key_padding_mask=np.ones((2, 5), bool)), ValueError, r"key_padding_mask.shape=\(2, 5\): expected \(2, 6\)"),
    "key_padding_mask dtype": (lambda: fs.attention(Q, K, V, key_padding_mask=np.ones((2, 6))), TypeError, "key_padding_mask.dtype='float64': expected bool"),
    "scale nan": (lambda: fs.attention(Q, K, V, scale=float("nan")), ValueError, "scale=nan: expected a number of at most"),
    "scale infinite": (lambda: fs.attention(Q, K, V, scale=np.inf), ValueError, "scale=inf"),
    "scale text": (lambda: fs.attention(Q, K, V, scale="1"), TypeError, "scale='1'"),
    "dropout 1": (lambda: fs.attention(Q, K, V, dropout_p=1.0), ValueError, r"dropout_p=1.0: expected a probability in \[0, 1\)"),
    "dropout negative": (lambda: fs.attention(Q, K, V, dropout_p=-0.1), ValueError, "dropout_p=-0.1"),
    "dropout nan": (lambda: fs.attention(Q, K, V, dropout_p=np.nan), ValueError, "dropout_p=nan"),
    "seed negative": (lambda: fs.attention(Q, K, V, seed=-1), ValueError, "seed=-1: expected an integer of at least 0"),
    "seed too large": (lambda: fs.attention(Q, K, V, seed=2**64), ValueError, "seed=18446744073709551616"),
    "seed float": (lambda: fs.attention(Q, K, V, seed=1.0), TypeError, "seed=1.0"),
    "tiles zero": (lambda: fs.attention(Q, K, V, tiles=(0, 4)), ValueError, r"tiles\[0\]=0: expected an integer of at least 1"),
    "tiles float": (lambda: fs.attention(Q, K, V, tiles=(4, 4.0)), TypeError, r"tiles\[1\]=4.0"),
    "tiles bool": (lambda: fs.attention(Q, K, V, tiles=(True, 4)), TypeError, r"tiles\[0\]=True"),
    "tiles not a pair": (lambda: fs.attention(Q, K, V, tiles=64), ValueError, r"tiles=64: expected \(Br, Bc\)"),
    "sram zero": (lambda: fs.attention(Q, K, V, sram=0), ValueError, "sram=0: expected a positive number"),
    "sram nan": (lambda: fs.attention(Q, K, V, sram=np.nan), ValueError, "sram=nan"),
    "sram text": (lambda: fs.attention(Q, K, V, sram="64K"), TypeError, "sram='64K'"),
    "two budgets": (lambda: fs.attention(Q, K, V, sram=4000, sram_bytes=4000), ValueError, "sram_bytes=4000: .*sram=4000"),
    "sram too small": (lambda: fs.attention(Q, K, V, sram=10), ValueError, "sram=10.*at least 17 elements"),
    "sram_bytes too small": (lambda: fs.attention(Q, K, V, sram_bytes=10), ValueError, "sram_bytes=10.*at least 68 bytes"),
    "tiles that do not fit": (lambda: fs.attention(Q, K, V, tiles=(5, 6), sram=20), fs.SramOverflow, "does not fit on the chip.*SRAM holds 20 elements"),
    "convention": (lambda: fs.attention(Q, K, V, convention="real"), ValueError, "convention='real': expected one of 'literal', 'elided'"),
    "sdpa mask and causal": (lambda: fs.scaled_dot_product_attention(Q, K, V, attn_mask=np.ones((5, 6), bool), is_causal=True), ValueError, "attn_mask=.*is_causal=True"),
    "sdpa batches that do not broadcast": (lambda: fs.scaled_dot_product_attention(Q, K[:, :3], V[:, :3]), ValueError, "key.shape"),
    "io_cost N": (lambda: fs.io_cost("flash2", N=-1, d=4), ValueError, "N=-1: expected an integer of at least 0"),
    "io_cost d": (lambda: fs.io_cost("flash2", N=8, d=0), ValueError, "d=0"),
    "io_cost one tile": (lambda: fs.io_cost("flash2", N=8, d=4, Br=2), ValueError, "Br=2: expected both Br and Bc"),
    "io_cost kv_heads": (lambda: fs.io_cost("flash2", N=8, d=4, heads=4, kv_heads=3), ValueError, "kv_heads=3: expected a divisor of heads=4"),
    "io_cost dtype": (lambda: fs.io_cost("flash2", N=8, d=4, dtype="int8"), ValueError, "dtype='int8': expected one of 'float16'"),
    "io_cost lengths": (lambda: fs.io_cost("flash2", N=8, d=4, batch=2, key_lengths=[3]), ValueError, r"key_lengths=\[3\]: expected one length for each"),
    "io_cost length": (lambda: fs.io_cost("flash2", N=8, d=4, key_lengths=[9]), ValueError, r"key_lengths\[0\]=9"),
    "scale beyond the type": (lambda: fs.attention(Q, K, V, scale=1e39), ValueError, r"scale=1e\+39: expected a number of at most 3.4e\+38"),
    "scale beyond any float": (lambda: fs.attention(Q, K, V, scale=10**400), ValueError, "scale=1000"),
    "sram beyond any float": (lambda: fs.attention(Q, K, V, sram=10**400), ValueError, "sram=1000"),
    "masked k": (lambda: fs.attention(Q, np.ma.masked_array(K), V), TypeError, "k='a masked array'"),
    "masked attn_mask": (lambda: fs.attention(Q, K, V, attn_mask=np.ma.masked_array(np.ones((5, 6), bool))), TypeError, "attn_mask='a masked array'"),
    "ragged q": (lambda: fs.attention([[1.0], [1.0, 2.0]], K, V), ValueError, "q='what NumPy cannot make an array of'"),
    "padding for queries without a batch": (lambda: fs.attention(Q[0], K[0], V[0], key_padding_mask=np.ones((4, 6), bool)), ValueError, "q has no batch dimension"),
    "sdpa flag": (lambda: fs.scaled_dot_product_attention(Q, K, V, is_causal=np.ones(3, bool)), TypeError, "is_causal="),
    "sdpa names its own arguments": (lambda: fs.scaled_dot_product_attention(Q.astype(int), K, V), TypeError, "query.dtype='int64'"),
    "io_cost lengths not a sequence": (lambda: fs.io_cost("flash2", N=8, d=4, key_lengths=5), TypeError, "key_lengths=5: expected one length for each"),
    "io_cost block_sparse": (lambda: fs.io_cost("block_sparse", N=8, d=4), ValueError, "block_mask=None: expected a block layout"),
    "io_cost too long with a mask": (lambda: fs.io_cost("flash2", N=2**40, d=4, is_causal=True), ValueError, "N=1099511627776: expected at most 2147483648 with a mask"),
    "tile_sizes rule": (lambda: fs.tile_sizes(100, 4, "best"), ValueError, "rule='best': expected one of 'paper', 'strict', 'optimal'"),
    "tile_sizes optimal without N": (lambda: fs.tile_sizes(100, 4, "optimal"), ValueError, "N=None: expected the sequence length"),
    "tile_sizes M": (lambda: fs.tile_sizes(0, 4), ValueError, "M=0"),
    "tile_sizes M too small": (lambda: fs.tile_sizes(18, 4), ValueError, "M=18: expected at least 19 elements"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_unusable_argument_is_named_with_its_value_and_what_is_accepted(case):
    call, error, says = BAD[case]
    with pytest.raises(error, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3)])
def test_shapes_go_through_any_leading_dimensions(lead):
    q, k, v = qkv(*lead)
    out = fs.attention(q, k, v)
    assert out.output.shape == (*lead, 5, 3)
    assert out.lse.shape == (*lead, 5)
    for at in np.ndindex(*lead):
        alone = fs.attention(q[at], k[at], v[at])
        assert same_bits(alone.output, out.output[at])
        assert same_bits(alone.lse, out.lse[at])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "Nq, Nk, lead",
    [(0, 5, (2,)), (5, 0, (2,)), (0, 0, (1, 2)), (3, 4, (0,)), (3, 4, (0, 2)), (3, 4, (2, 0))],
)
def test_empty_inputs_give_empty_or_zero_outputs(variant, Nq, Nk, lead):
    q, k, v = qkv(*lead, Nq=Nq, Nk=Nk)
    out = fs.attention(q, k, v, algorithm=variant[0], convention=variant[1], sram=100)
    assert out.output.shape == (*lead, Nq, 3)
    assert (out.output == 0).all()
    assert Nk > 0 or (out.lse == -np.inf).all()


def test_padding_may_be_given_with_or_without_a_batch_of_one():
    q, k, v = qkv(3)
    real = np.array([True, True, False, True, False, True])
    one = fs.attention(q, k, v, key_padding_mask=real[None])
    kept = fs.attention(q, k[:, real], v[:, real])
    np.testing.assert_allclose(one.output, kept.output, rtol=1e-5, atol=1e-7)
    assert same_bits(one.output, fs.attention(q, k, v, key_padding_mask=real).output)


def test_tiles_are_the_strict_ones_for_a_budget_and_fast_ones_without():
    q, k, v = qkv(Nq=600, Nk=700)
    assert fs.attention(q, k, v).tiles == (512, 700)
    assert fs.attention(q, k, v, algorithm="standard").tiles == (600, 700)
    for algorithm in ("standard", "flash1", "flash2"):
        assert fs.attention(q, k, v, algorithm=algorithm, sram=3000).tiles == fs.tile_sizes(
            3000, 4, "strict", algorithm, dv=3
        )
    assert fs.attention(q, k, v, tiles=(10**9, 1)).tiles == (600, 1)


def test_sdpa_aligns_causal_top_left_and_takes_masks_and_groups():
    q, k, v = qkv(2, 4)
    top_left = fs.attention(q, k, v, is_causal=True, causal_align="top-left").output
    assert same_bits(fs.scaled_dot_product_attention(q, k, v, is_causal=True), top_left)
    keep = np.tril(np.ones((5, 6), bool))
    np.testing.assert_allclose(
        fs.scaled_dot_product_attention(q, k, v, attn_mask=keep), top_left, rtol=1e-5, atol=1e-6
    )
    grouped = fs.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True, scale=0.3)
    repeated = fs.attention(q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]], scale=0.3).output
    assert same_bits(grouped, repeated)


def test_sdpa_broadcasts_leading_dimensions():
    q, k, v = qkv(2, 4)
    out = fs.scaled_dot_product_attention(q, k[:1, :1], v[0])
    ref = exact(q, np.broadcast_to(k[:1, :1], k.shape), np.broadcast_to(v[0], v.shape))
    assert ref.output_ratio(out) <= 1


def test_anything_numpy_can_read_is_taken():
    q, k, v = qkv()
    lists = fs.attention(*(x.astype(float).tolist() for x in (q, k, v)))
    assert lists.output.dtype == np.float64
    big_endian = [x.astype(">f4") for x in (q, k, v)]
    np.testing.assert_array_equal(fs.attention(*big_endian).output, fs.attention(q, k, v).output)


def test_two_calls_give_the_same_bits():
    q, k, v = qkv(2, 4, Nq=50, Nk=60)
    a, b = (fs.attention(q, k, v, dropout_p=0.3, seed=4) for _ in range(2))
    assert same_bits(a.output, b.output)


def test_import_is_light_and_loads_no_command_line():
    code = (
        "import sys, flashsim; "
        "print([m for m in ('typer', 'rich', 'matplotlib', 'numba', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles_are_no_longer_than_what_they_tile(variant):
    how = {"algorithm": variant[0], "convention": variant[1]}
    rows = fs.ALGORITHMS[variant[0]].rows  # of a query tile, where it is no choice
    long = fs.attention(*qkv(), tiles=(64, 64), **how)
    assert long.tiles == (rows or 5, 6)
    assert fs.attention(*qkv(), tiles=(2, 64), **how).tiles == (rows or 2, 6)
    assert fs.attention(*qkv(Nq=0, Nk=0), tiles=(2, 2), **how).tiles == (1, 1)
    assert same_bits(long.output, fs.attention(*qkv(), tiles=(5, 6), **how).output)


def test_sdpa_broadcasts_batches_of_grouped_heads_and_takes_k_and_v_of_different_groups():
    q, k, v = qkv(2, 4)
    grouped = fs.scaled_dot_product_attention(q, k[:1, :2], v[:, :1], enable_gqa=True)
    whole = np.broadcast_to(k[:1, :2], (2, 2, 6, 4)).repeat(2, axis=1), v[:, :1].repeat(4, axis=1)
    assert same_bits(grouped, fs.attention(q, *whole).output)


def test_dense_costs_are_exact_and_instant_at_any_length():
    N, d = 10**12, 64
    cost = fs.io_cost("flash2", N=N, d=d, Br=128, Bc=64, batch=10**6)
    assert cost.total_elements == 10**6 * ((2 + 2 * (N // 128)) * N * d + N)
    assert cost.flops == 10**6 * 4 * N * N * d


@pytest.mark.parametrize("variant", TRAINABLE)
@pytest.mark.parametrize("shape", [(), (1,), (6,), (1, 1), (5, 1), (2, 1, 5, 6)])
def test_a_mask_may_have_any_shape_that_broadcasts_and_its_gradient_has_it_too(variant, shape):
    q, k, v = qkv(2, 4)
    mask = np.random.default_rng(0).standard_normal(shape).astype(f32)
    out = fs.attention(q, k, v, attn_mask=mask, algorithm=variant[0], convention=variant[1])
    assert exact(q, k, v, attn_mask=mask).output_ratio(out.output) <= 1
    got = out.backward(np.ones_like(out.output), wrt_mask=True)[3]
    assert got.shape == shape
    ref = exact_gradients(q, k, v, np.ones_like(out.output), attn_mask=mask)
    assert ref.ratios(out.backward(np.ones_like(out.output), wrt_mask=True))["dmask"] <= 1
    empty = fs.attention(
        q[:, :, :0], k, v, attn_mask=mask[..., :0, :] if shape[-2:-1] == (5,) else mask
    )
    assert empty.output.shape == (2, 4, 0, 3)


@pytest.mark.parametrize("variant", TRAINABLE)
def test_what_is_returned_may_be_changed_before_the_backward_pass(variant):
    q, k, v = qkv(2, 4)
    one, two = (
        fs.attention(q, k, v, algorithm=variant[0], convention=variant[1]) for _ in range(2)
    )
    do = np.ones_like(one.output)
    one.output *= 2
    one.lse *= 2
    assert all(same_bits(a, b) for a, b in zip(one.backward(do), two.backward(do), strict=True))
