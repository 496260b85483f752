"""Faults reported of attention kernels elsewhere, each as the smallest input that shows it.

Notation: d = 1, scale = 1, not causal unless said; q, k, v are columns. Every test runs every
algorithm; the kinds are also drawn at random in test_exact.py and test_relations.py.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashsim as fs
from flashsim.dropout import Dropout
from flashsim.online_softmax import State, finish, identity, merge
from flashsim.reference import exact, exact_gradients
from strategies import BACKWARDS, VARIANTS

NAN, INF = np.nan, np.inf
every = pytest.mark.parametrize("variant", VARIANTS)


def column(x):
    return np.array(x, np.float32).reshape(-1, 1)


def attend(variant, q, k, v, tiles=(1, 1), scale=1.0, **what):
    """(output, lse) of columns, as lists."""
    out = fs.attention(
        column(q), column(k), column(v), algorithm=variant[0], convention=variant[1], tiles=tiles,
        scale=scale, **what,
    )  # fmt: skip
    return out.output[:, 0].tolist(), out.lse.tolist()


def keep(*bits):
    return np.array([bits], bool)


@every
def test_a_row_with_every_key_masked_is_zero(variant):
    """pytorch #103963, #103749, #41508, #160064; burn #4694; mlx #2395."""
    assert attend(variant, [1], [1], [1], attn_mask=keep(0)) == ([0], [-INF])
    assert attend(variant, [1], [1], [1], key_padding_mask=keep(0)) == ([0], [-INF])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_comparison_with_nan_does_not_pass(value):
    """tracel-ai/cubecl PR #1070: `not (a - b > tolerance)` is true of NaN."""
    ref = exact(column([1]), column([1]), column([1]))
    assert not ref.output_ratio(np.full((1, 1), value)) <= 1
    assert not ref.lse_ratio(np.full(1, value)) <= 1


@every
@pytest.mark.parametrize("how", ["attn_mask", "key_padding_mask"])
def test_a_first_key_tile_that_is_fully_masked_leaves_no_nan(variant, how):
    """vllm #48364; ik_llama.cpp #2344: exp(-inf + inf)."""
    assert attend(variant, [1], [1, 1], [5, 7], **{how: keep(0, 1)}) == ([7], [1])


@every
def test_the_running_maximum_starts_at_minus_infinity(variant):
    """flashinfer #4267, #4450: a finite sentinel of -5e4 lies above these scores."""
    output, lse = attend(variant, [-300], [300, 300], [1, 3])
    assert output == [2]
    assert lse == pytest.approx([-90000 + np.log(2)], abs=0.01)


@every
def test_a_fully_masked_row_is_not_the_mean_of_v(variant):
    """A mask filled with -1e10 instead of -inf gives 2 here."""
    assert attend(variant, [0], [0, 0], [1, 3], attn_mask=keep(0, 0)) == ([0], [-INF])
    bias = np.full((1, 2), -INF, np.float32)
    assert attend(variant, [0], [0, 0], [1, 3], attn_mask=bias) == ([0], [-INF])


@every
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("how", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("tiles", [(1, 1), (1, 2)])
def test_garbage_in_a_masked_slot_does_not_leak(variant, garbage, how, tiles):
    """pytorch #101967; Dao #1745, #1395; aiter PR #5401: 0 * NaN."""
    answer = attend(variant, [1], [garbage, 1], [garbage, 7], tiles, **{how: keep(0, 1)})
    assert answer == ([7], [1])


@every
def test_garbage_in_the_causal_future_does_not_leak(variant):
    """The same, behind a rule that cuts a tile in two."""
    v = [1, NAN, INF]
    output, _ = attend(variant, [0, 0, 0], [1, NAN, NAN], v, (3, 3), is_causal=True)
    assert output[0] == 1
    assert np.isnan(output[1:]).all()


@every
def test_no_keys_give_zero_and_an_lse_of_minus_infinity(variant):
    """Dao PR #978; FlashMLA PR #77; flashinfer PR #3943: +inf."""
    assert attend(variant, [1], [], []) == ([0], [-INF])


@every
def test_a_whole_tile_of_minus_infinity_in_a_stream(variant):
    """Dao #1930: row [-inf, -inf, 0, 0], tiles of 2; lse = ln 2."""
    bias = np.array([[-INF, -INF, 0, 0]], np.float32)
    output, lse = attend(variant, [0], [0] * 4, [9, 9, 1, 3], (1, 2), attn_mask=bias)
    assert output == [2]
    assert lse == [np.float32(np.log(2))]


@every
def test_causal_with_fewer_queries_than_keys_is_aligned_bottom_right(variant):
    """Dao #282, #351, #402, #517; nanochat PR #456; pytorch #144858."""
    what = {"is_causal": True}
    assert attend(variant, [0, 0], [0] * 5, range(5), (1, 2), **what)[0] == [1.5, 2]
    what["causal_align"] = "top-left"
    assert attend(variant, [0, 0], [0] * 5, range(5), (1, 2), **what)[0] == [0, 0.5]


@every
def test_causal_with_more_queries_than_keys_leaves_the_first_rows_empty(variant):
    """Dao #1778, README v2.1."""
    what = {"is_causal": True}
    output, lse = attend(variant, [0] * 5, [0, 0], [1, 3], (2, 1), **what)
    assert output == [0, 0, 0, 1, 2]
    assert lse[:3] == [-INF] * 3
    what["causal_align"] = "top-left"
    assert attend(variant, [0] * 5, [0, 0], [1, 3], (2, 1), **what)[0] == [1, 2, 2, 2, 2]


@every
def test_the_tail_of_keys_is_not_dropped(variant):
    """66RING #12; jax #27224; pytorch #159247: N // B tiles."""
    assert attend(variant, [0], [0] * 5, [0, 0, 0, 0, 5], (1, 4))[0] == [1]


@every
def test_a_short_tile_is_not_padded_with_zeros(variant):
    """cuDNN in pytorch #196678; TensorRT-LLM PR #18174: a pad scores 0, not -inf."""
    assert attend(variant, [1], [-10] * 3, [1] * 3, (1, 2))[0] == [1]


@every
@given(s=st.floats(-50, 50, width=32), v=st.floats(-50, 50, width=32))
def test_one_key_gives_its_value_bit_for_bit_and_its_score_as_lse(variant, s, v):
    """triton-lang/kernels #6; fla #88; tspeterkim PR #2: N smaller than a block."""
    assert attend(variant, [1], [s], [v], (32, 32)) == ([v], [s])


@every
@pytest.mark.parametrize("N", [7, 31, 33, 63, 65])
def test_lengths_just_off_a_block_are_right(variant, N):
    """triton #2626; jax #23819; jvp_flash #13; attention-gym #50; pytorch/xla PR #8671."""
    q, k, v = np.random.default_rng(N).standard_normal((3, N, 4), dtype=np.float32)
    out = fs.attention(q, k, v, algorithm=variant[0], convention=variant[1], tiles=(32, 32))
    assert exact(q, k, v).output_ratio(out.output) <= 1


@every
def test_a_window_of_w_to_the_left_sees_w_plus_1_keys(variant):
    """transformers #39408, #29623; zml PR #763."""
    what = {"is_causal": True, "window": (1, None)}
    output, _ = attend(variant, [0] * 5, [0] * 5, range(5), (2, 2), **what)
    assert output == [0, 0.5, 1.5, 2.5, 3.5]


@every
def test_a_batch_with_empty_sequences(variant):
    """Dao #1537, #1713, #2562, PR #2470, as padding: lengths 0, 1, 0, 1."""
    q = k = np.zeros((4, 1, 1, 1), np.float32)
    v = np.full((4, 1, 1, 1), 3, np.float32)
    out = fs.attention(
        q, k, v, algorithm=variant[0], convention=variant[1],
        key_padding_mask=np.array([[0], [1], [0], [1]], bool),
    )  # fmt: skip
    assert out.output.ravel().tolist() == [0, 3, 0, 3]
    assert out.lse.ravel().tolist() == [-INF, 0, -INF, 0]


@every
def test_queries_and_keys_of_different_lengths(variant):
    """SageAttention #26."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 3), dtype=np.float32) for n in (2, 3, 3))
    out = fs.attention(q, k, v, algorithm=variant[0], convention=variant[1], tiles=(2, 2))
    assert exact(q, k, v).output_ratio(out.output) <= 1


@every
def test_the_maximum_is_subtracted(variant):
    """cs149gpt: exp(100) overflows float32."""
    output, lse = attend(variant, [1], [0, 100], [1, 2])
    assert output == [2]
    assert lse == [100]


@every
def test_the_output_is_rescaled_by_exp_of_old_minus_new_and_not_its_inverse(variant):
    """Dao #991, #333: FlashAttention-2's line 10 as printed has an inverse too many."""
    output, _ = attend(variant, [1], [0, 1], [1, 0])
    assert output == pytest.approx([1 / (1 + np.e)], rel=1e-6)


@every
def test_lse_is_a_natural_logarithm_taken_once(variant):
    """tokenspeed PR #571; flashinfer #4485; FlashMLA PR #106: base 2. pytorch #181645: twice."""
    assert attend(variant, [0], [0, 0], [1, 1])[1] == [np.float32(np.log(2))]


@every
def test_a_bias_is_in_units_of_the_scores(variant):
    """segment-anything-fast PR #71: with exp2 a bias needs log2(e) too."""
    bias = np.array([[1, 0]], np.float32)
    output, _ = attend(variant, [0], [0, 0], [1, 0], attn_mask=bias)
    assert output == pytest.approx([np.e / (1 + np.e)], rel=1e-6)


def test_merging_two_empty_splits_is_empty():
    """vllm PR #39148, PR #28181; flashinfer #4051, #4054."""
    output, lse = finish(merge(identity(1, 1), identity(1, 1)))
    assert output.tolist() == [[0]]
    assert lse.tolist() == [-INF]


def test_splits_merge_by_their_lse():
    """ring-flash-attention PR #34: (1, 0), (4, ln 2) give (3, ln 3); an empty split is nothing."""

    def split(O, lse):
        return State(np.array([lse]), np.array([0.0 if lse == -INF else 1.0]), np.array([[O]]))

    output, lse = finish(merge(split(1.0, 0.0), split(4.0, np.log(2))))
    assert output[0, 0] == pytest.approx(3)
    assert lse[0] == pytest.approx(np.log(3))
    output, lse = finish(merge(split(4.0, np.log(2)), split(0.0, -INF)))
    assert (output[0, 0], lse[0]) == (4, np.log(2))


def test_every_algorithm_uses_the_scale():
    """prime-rl PR #3007: softmax_scale ignored in one path."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 9, 4), dtype=np.float32)
    ref = exact(q, k, v, scale=0.5)
    for algorithm, convention in VARIANTS:
        out = fs.attention(q, k, v, algorithm=algorithm, convention=convention, scale=0.5)
        assert ref.output_ratio(out.output) <= 1
    assert ref.output_ratio(fs.attention(q, k, v, scale=0.51).output) > 1


@every
def test_products_are_as_good_as_their_dtype(variant):
    """triton_docs_tutorials #6: TF32 products fail a bar that is relative to the precision."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 128, 32), dtype=np.float32)
    ref = exact(q, k, v)
    out = fs.attention(q, k, v, algorithm=variant[0], convention=variant[1], tiles=(64, 64))
    assert ref.output_ratio(out.output) <= 1
    low = [(x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (q, k)]  # TF32
    out = fs.attention(*low, v, algorithm=variant[0], convention=variant[1], tiles=(64, 64))
    assert ref.output_ratio(out.output) > 1


@every
def test_consecutive_query_heads_share_a_key_head(variant):
    """onnx PR #7274; axlearn PR #842; jax-js PR #180: 4 heads on 2 are [1, 1, 2, 2]."""
    q, k = np.zeros((4, 1, 1), np.float32), np.zeros((2, 1, 1), np.float32)
    v = np.array([1, 2], np.float32).reshape(2, 1, 1)
    out = fs.attention(q, k, v, algorithm=variant[0], convention=variant[1], enable_gqa=True)
    assert out.output.ravel().tolist() == [1, 1, 2, 2]


@every
@pytest.mark.parametrize("d", [1, 3, 59, 111, 129, 257])
def test_any_width_is_right(variant, d):
    """Dao #2591, #1347; 66RING #12: a head dimension that is not supported."""
    q, k, v = np.random.default_rng(d).standard_normal((3, 6, d), dtype=np.float32)
    out = fs.attention(q, k, v, algorithm=variant[0], convention=variant[1], tiles=(4, 4))
    assert exact(q, k, v).output_ratio(out.output) <= 1


@every
def test_items_of_a_batch_with_different_statistics_are_right(variant):
    """TransformerEngine #3216: right on random data, wrong on real activations in batches."""
    q, k, v = np.random.default_rng(1).standard_normal((3, 2, 1, 20, 4), dtype=np.float32)
    q[1] *= 20
    v[1] += 100
    out = fs.attention(q, k, v, algorithm=variant[0], convention=variant[1], tiles=(8, 8))
    ref = exact(q, k, v)
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1


def test_counts_beyond_32_bits_are_exact():
    """flashattention2-custom-mask #2; Dao #2611, #767, #1311; NATTEN #347: beyond 2^31."""
    cost = fs.io_cost("standard", N=4096, d=64, heads=28, batch=8)
    assert cost.writes["S"] == 8 * 28 * 4096**2 == 3_758_096_384
    assert fs.io_cost("flash2", N=2**18, d=128, Br=1, Bc=1).reads["K"] == 2**18 * 2**18 * 128


@every
def test_a_later_tile_with_lower_scores_does_not_lower_the_maximum(variant):
    """A maximum taken of the tile alone is right until exp(old - new) overflows, as here."""
    assert attend(variant, [1], [100, 0], [1, 2]) == ([1], [100])


@every
def test_a_bias_is_not_scaled(variant):
    """A mask that is added before the scaling gives sqrt(e) for e."""
    bias = np.array([[1, 0]], np.float32)
    output, _ = attend(variant, [0], [0, 0], [1, 0], attn_mask=bias, scale=0.5)
    assert output == pytest.approx([np.e / (1 + np.e)], rel=1e-6)


@every
@pytest.mark.parametrize("garbage", [NAN, INF])
def test_garbage_behind_minus_infinity_in_a_float_mask_does_not_leak(variant, garbage):
    """The same as behind a bool mask, in K and V, and where the row sees another key."""
    bias = np.array([[-INF, 0]], np.float32)
    for tiles in ((1, 1), (1, 2)):
        answer = attend(variant, [1], [garbage, 1], [garbage, 7], tiles, attn_mask=bias)
        assert answer == ([7], [1])


# Standard attention's last step has P alone, and a stored 0 does not say where it comes from.
STORES_P = ("standard", "standard-unfused")


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v[0] not in STORES_P])
def test_a_nan_behind_a_visible_weight_that_underflows_shows(variant):
    """It is behind the mask that a value does not count, not where exp rounds to 0."""
    for tiles in ((1, 1), (1, 2)):
        output, lse = attend(variant, [1], [200, 0], [1, NAN], tiles)
        assert np.isnan(output).all()
        assert lse == [200]


@every
def test_causal_holds_beside_a_window_that_looks_ahead(variant):
    """The nearer of the two limits counts, whichever it is."""
    for right in (0, 1, 4, None):
        what = {"is_causal": True, "window": (None, right)}
        output, _ = attend(variant, [0] * 4, [0] * 4, range(4), (3, 3), **what)
        assert output == [0, 0.5, 1, 1.5]


# Group D: backward, dropout, heads

every_backward = pytest.mark.parametrize("variant", BACKWARDS)


def gradients(variant, q, k, v, do, tiles=(2, 2), **what):
    out = fs.attention(q, k, v, algorithm=variant[0], convention=variant[1], tiles=tiles, **what)
    return out.backward(do)


@every_backward
def test_the_backward_pass_has_the_scale(variant):
    """oleksost: without 1 / sqrt(d) the finite difference is off by 0.118 here."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 3, 2))
    dq, _, _ = gradients(variant, q, k, v, do)
    step = 1e-6 * np.eye(1, 6).reshape(3, 2)
    up, down = (exact(q + s * step, k, v).output for s in (1, -1))
    assert dq[0, 0] == pytest.approx(((up - down) * do).sum() / 2e-6, abs=1e-8)


@every_backward
def test_the_backward_pass_heeds_whether_it_is_causal(variant):
    """triton #5660, #4541: dV = [1, 1] without a mask, [1.5, 0.5] with one."""
    zero, one = np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)
    assert gradients(variant, zero, zero, one, one)[2].tolist() == [[1], [1]]
    causal = gradients(variant, zero, zero, one, one, is_causal=True)
    assert causal[2].tolist() == [[1.5], [0.5]]


@every_backward
@pytest.mark.parametrize("Nq, Nk", [(5, 3), (129, 7), (7, 130)])
def test_large_inputs_do_not_overflow_in_the_tail(variant, Nq, Nk):
    """Dao's test_flash_attn_bwd_overflow; cuDNN in pytorch #196678 (lse < -88.7)."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 8), dtype=np.float32) for n in (Nq, Nk, Nk))
    q, k, v = 5 * q, 3 * k, 3 * v
    do = rng.standard_normal((Nq, 8), dtype=np.float32)
    got = gradients(variant, q, k, v, do, (128, 128), is_causal=True)
    assert max(exact_gradients(q, k, v, do, is_causal=True).ratios(got).values()) <= 1
    low = np.full((Nk, 8), -40, np.float32)
    got = gradients(variant, np.full((Nq, 8), 5, np.float32), low, v, do, (128, 128))
    assert all(np.isfinite(x).all() for x in got)


@every_backward
def test_keys_and_values_of_mixed_strides_have_the_gradients_of_their_copies(variant):
    """FlagAttention #45; FlagGems #5896; pytorch PR #187506: K a transpose, V in C order."""
    rng = np.random.default_rng(0)
    q, v, do = rng.standard_normal((3, 6, 4), dtype=np.float32)
    k = rng.standard_normal((4, 6), dtype=np.float32).T
    mixed, copies = (gradients(variant, q, x, v, do) for x in (k, k.copy()))
    assert all(np.array_equal(a, b) for a, b in zip(mixed, copies, strict=True))


@every_backward
def test_a_bias_row_of_minus_infinity_has_gradient_zero(variant):
    """jax #32242: NaN."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 3, 2), dtype=np.float32)
    bias = np.zeros((3, 3), np.float32)
    bias[1] = -INF
    out = fs.attention(
        q, k, v, algorithm=variant[0], convention=variant[1], tiles=(2, 2), attn_mask=bias
    )
    dq, dk, dv, d_bias = out.backward(do, wrt_mask=True)
    assert (d_bias[1] == 0).all()
    assert (dq[1] == 0).all()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv, d_bias))


@every_backward
@pytest.mark.parametrize("tiles", [(1, 1), (2, 2), (4, 4)])
def test_forward_and_backward_drop_the_same_weights_in_any_tiling(variant, tiles):
    """Dao #612, PR #2439: dV is 0 exactly where the output does not see V."""
    zero = np.zeros((1, 1, 8, 8), np.float32)
    eye = np.eye(8, dtype=np.float32)[None, None]
    what = {"dropout_p": 0.5, "seed": 4}
    out = fs.attention(
        zero, zero, eye, algorithm=variant[0], convention=variant[1], tiles=tiles, **what
    )
    seen = out.output[0, 0] != 0
    assert np.array_equal(seen, Dropout(0.5, 4, 0, 0).keep(slice(0, 8), slice(0, 8)))
    for row in range(8):
        do = np.zeros_like(out.output)
        do[0, 0, row] = 1
        dv = out.backward(do, tiles=(3, 5))[2][0, 0]
        assert np.array_equal(dv[:, 0] != 0, seen[row])


@every_backward
def test_gradients_of_grouped_heads_add_up(variant):
    """levanter PR #449; native-sparse-attention-triton #27: dO = [1], [2], one key: dV = 3."""
    q, kv = np.zeros((2, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
    do = np.array([1, 2], np.float32).reshape(2, 1, 1)
    dv = gradients(variant, q, kv, kv, do, enable_gqa=True)[2]
    assert dv.ravel().tolist() == [3]


@every_backward
def test_the_backward_pass_is_deterministic(variant):
    """Dao #414, #384: dQ by atomics; here two runs are equal bit for bit."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 40, 4), dtype=np.float32)
    one, two = (gradients(variant, q, k, v, do, (7, 5)) for _ in range(2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one, two, strict=True))


@every_backward
@pytest.mark.parametrize("d", [1, 3, 59, 129])
def test_any_width_has_gradients(variant, d):
    """Dao #2591, #1347; 66RING #12."""
    q, k, v, do = np.random.default_rng(d).standard_normal((4, 6, d), dtype=np.float32)
    got = gradients(variant, q, k, v, do, (4, 4))
    assert max(exact_gradients(q, k, v, do).ratios(got).values()) <= 1


@every
def test_a_window_of_w_to_the_right_sees_w_plus_1_keys(variant):
    """And the keys before it all: query 1 of 5 with w = 1 sees keys 0, 1 and 2."""
    output, _ = attend(variant, [0] * 5, [0] * 5, range(5), (2, 2), window=(None, 1))
    assert output == [0.5, 1, 1.5, 2, 2]
    output, _ = attend(variant, [0] * 5, [0] * 5, range(5), (2, 2), window=(1, 1))
    assert output == [0.5, 1, 2, 3, 3.5]
