"""The instructions of compute capability 9.0 and the forward kernel made of them, without a GPU.

In the simulator, against NumPy and float64, with loads and stores counted; and assembled. A copy
or a product of the simulator arrives as late as it may, and what it is to fill is NaN until then,
so a missing wait shows. See tests/hopper_kernels.py for the small kernels.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim.reference import exact
from kernel_process import KernelProcess
from test_kernels import expected

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
NAN = 0xFFFF


def swizzled(tile, address):
    """The elements of a tile with rows of 64, in the order in which they lie from an address on."""
    place = address + 128 * np.arange(len(tile))[:, None] + 2 * np.arange(64)
    row_of_eight = place // 128 % 8
    place = place // 128 * 128 + (place % 128 // 16 ^ row_of_eight) * 16 + place % 16
    flat = np.empty(tile.size, tile.dtype)
    flat[(place - address) // 2] = tile
    return flat


@settings(max_examples=12)
@given(st.data())
def test_a_box_is_copied_with_zeros_beyond_the_head_it_is_of(hopper, data):
    """Never the next head's rows; and nothing is there before the wait."""
    batch, heads, N = (data.draw(st.integers(1, n)) for n in (2, 3, 40))
    d, rows = 8 * data.draw(st.integers(1, 20)), data.draw(st.sampled_from([8, 16, 24]))
    x = np.arange(1, batch * heads * N * d + 1).astype(np.uint16).reshape(batch, heads, N, d)
    at = (64 * data.draw(st.integers(0, d // 64)), data.draw(st.integers(0, N + 8)))
    b, h = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(0, heads - 1))
    before, after, address = hopper("copied", x, rows, *at, h, b)
    box = np.zeros((rows, 64), np.uint16)
    real = x[b, h, at[1] : at[1] + rows, at[0] : at[0] + 64]
    box[: real.shape[0], : real.shape[1]] = real
    assert (before == NAN).all()
    assert address % 1024 == 0
    np.testing.assert_array_equal(after, swizzled(box, address))


@settings(max_examples=8)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 34))
def test_a_box_is_stored_as_far_as_the_head_goes(hopper, N, eighths, row):
    x = np.full((2, 2, N, 8 * eighths), NAN, np.uint16)
    stored = hopper("copied_back", x, 16, 0, row, 1, 0)
    box = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)[: max(0, N - row), : 8 * eighths]
    x[0, 1, row : row + 16, :64] = box
    np.testing.assert_array_equal(stored, x)


def test_a_map_that_is_not_fenced_is_refused(hopper):
    """A GPU would take what lay at its address before."""
    with pytest.raises(RuntimeError, match="a tensor map is used that this thread has not fenced"):
        hopper("copied", np.zeros((1, 1, 8, 64), np.uint16), 8, 0, 0, 0, 0, fence=False)


@pytest.mark.parametrize("missing", ["wait", "fence"])
def test_a_store_that_nobody_waits_for_or_of_what_is_not_fenced_does_not_happen(hopper, missing):
    x = np.full((1, 1, 4, 64), NAN, np.uint16)
    assert (hopper("copied_back", x, 8, 0, 0, 0, 0, **{missing: False}) == NAN).all()


def test_what_cannot_be_copied_in_boxes_is_refused_by_name(hopper):
    for x, rows, text in [
        (np.zeros((1, 1, 4, 60), np.uint16), 8, "x.strides="),
        (np.zeros((1, 1, 64, 64), np.uint16).transpose(0, 1, 3, 2), 8, "2 bytes in the last"),
        (np.zeros((1, 1, 4, 64), np.uint16), 257, "rows=257: expected 1 to 256"),
    ]:
        with pytest.raises(ValueError, match="expected") as error:
            hopper("copied", x, rows, 0, 0, 0, 0)
        assert text in str(error.value)


@given(st.integers(0, 227 * 64), st.integers(0, 2**13))
def test_a_descriptor_has_its_fields_where_the_manual_says(hopper, sixteens, panel_sixteens):
    """PTX ISA, "Matrix Descriptor Format"."""
    word = hopper("descriptor", np.uint32(16 * sixteens), 16 * panel_sixteens)
    assert word & 0x3FFF == sixteens
    assert word >> 16 & 0x3FFF == panel_sixteens
    assert word >> 32 & 0x3FFF == 8 * 128 // 16
    assert word >> 62 == 1
    assert word >> 46 & 0xFFFF == 0  # no base offset


def numbers(rng, shape, dtype):
    """(bits, float64) of random numbers of a 16-bit type."""
    x = rng.standard_normal(shape).astype(dtype)
    return x.view(np.uint16), x.astype(np.float64)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("columns, d", [(8, 64), (40, 192), (256, 64)])
def test_wgmma_multiplies_tiles_in_shared_memory(hopper, dtype, columns, d):
    rng = np.random.default_rng(columns)
    (a, A), (b, B) = (numbers(rng, (n, d), dtype) for n in (64, columns))
    found = hopper("product", a, b, dtype.name)
    np.testing.assert_allclose(found, A @ B.T, rtol=0, atol=2e-5 * np.sqrt(d))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("keys, d", [(16, 64), (48, 128), (80, 256)])
def test_wgmma_adds_the_product_of_registers_with_rows_of_a_tile(hopper, dtype, keys, d):
    rng = np.random.default_rng(keys)
    (p, P), (b, B) = numbers(rng, (64, keys), dtype), numbers(rng, (keys, d), dtype)
    held = rng.standard_normal((64, d)).astype(np.float32)
    found = hopper("product_from_registers", p, b, dtype.name, held)
    np.testing.assert_allclose(found, held + P @ B, rtol=0, atol=2e-5 * np.sqrt(keys))


def test_wgmma_shows_what_is_used_too_early_and_too_late(hopper):
    """Accumulators before the wait, operands until then, a missing fence, a wrong descriptor."""
    rng = np.random.default_rng(0)
    (a, A), (b, B) = (numbers(rng, (64, 64), F16) for _ in range(2))
    assert np.isnan(hopper("product", a, b, "float16", early=True)).all()
    with pytest.raises(RuntimeError, match="wgmma_fence"):
        hopper("product", a, b, "float16", fence=False)
    for skew in (1, 1 << 32):  # a row's chunk; sixteen bytes more from eight rows to the next
        wrong = hopper("product", a, b, "float16", skew=skew)
        assert not np.allclose(wrong, A @ B.T, atol=1)
    with pytest.raises(RuntimeError, match="128-byte swizzling"):
        hopper("product", a, b, "float16", skew=1 << 62)
    overwritten = hopper("product_from_registers", a, b, "float16", np.ones((64, 64)), touch=True)
    np.testing.assert_array_equal(overwritten, 1)


@pytest.mark.parametrize("count, size", [(1, 0), (3, 0), (1, 128), (4, 128)])
def test_a_phase_of_an_mbarrier_ends_with_its_last_arrival_and_byte(hopper, count, size):
    seen = hopper("phases", count, 5, size)
    assert seen[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert not size or (seen[:, 1] == 63).all()


def test_a_thread_that_would_wait_for_ever_says_for_what(hopper):
    assert "0 arrivals and 64 bytes are missing" in hopper("waits_forever", 0.2)


def test_named_barriers_let_two_warps_take_turns(hopper):
    assert hopper("in_turns", 6) == [0, 1] * 6


@given(st.integers(0, 2**32 - 1), st.sampled_from([F16, BF16]))
def test_nothing_is_left_of_finite_numbers(hopper, word, dtype):
    finite = np.isfinite(np.array([word], np.uint32).view(dtype).astype(np.float32)).all()
    assert (hopper("odd", word, 0, dtype.name) == 0) == finite
    assert hopper("odd", word, 0x7FFF7FFF, dtype.name) == 0x7FFF7FFF  # NaN for good


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12))
def test_every_tile_of_every_head_has_one_block(hopper, Tr, heads, section):
    """And of the heads of a section no block has an earlier tile than one after it."""
    turns = hopper("turns", Tr, heads, section)
    assert sorted(turns) == [(i, h) for i in range(Tr) for h in range(heads)]
    for first in range(0, heads, section):
        mine = [i for i, h in turns if first <= h < first + section]
        assert mine == sorted(mine, reverse=True)


def drawn(seed, dtype, batch, heads, kv_heads, Nq, Nk, d):
    """q, k, v."""
    rng = np.random.default_rng(seed)
    shapes = (batch, heads, Nq, d), *[(batch, kv_heads, Nk, d)] * 2
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def ratio(output, q, k, v, **what):
    """The largest error over its bound, where weights are rounded to the inputs' type.

    That is an error of half a unit in the last place of each weight, or, of one that is subnormal,
    of half the smallest: sum_j w_j |v_j| and sum_j |v_j| say what it does to the output.
    """
    right, size = exact(q, k, v, **what), exact(q, k, np.abs(v), **what).output
    limits = ml_dtypes.finfo(q.dtype)
    unit, floor = float(limits.eps) / 2, float(limits.smallest_subnormal) / 2
    largest = np.abs(v.astype(np.float64)).max(initial=0)
    bound = right.output_bound + unit * size + floor * v.shape[-2] * largest
    assert (np.isfinite(output.astype(np.float32)) == np.isfinite(right.output)).all()
    return float((np.abs(output.astype(np.float64) - right.output) / bound).max(initial=0))


def real(share, batch, Nk, *none):
    """A key padding mask: such a share of the keys is real, and of some stretches none is."""
    keys = np.random.default_rng(Nk).random((batch, Nk)) < share
    for b, first, stop in none:
        keys[b, first:stop] = False
    return {"key_padding_mask": keys}


APART = {"key_padding_mask": np.isin(np.arange(130), [3, 40, 90])[None]}  # also within a tile
DROPPED = {"dropout_p": 0.3, "seed": 2**40 + 5}
CASES = {
    "one tile": (F16, (1, 1, 1, 64, 64, 64), (64, 64, 2, False), {}),
    "tails, GQA": (F16, (1, 2, 1, 70, 75, 64), (64, 32, 2, False), {}),
    "more tiles than stages, bfloat16": (BF16, (2, 1, 1, 3, 90, 128), (64, 16, 2, False), {}),
    "causal": (F16, (1, 1, 1, 100, 130, 64), (64, 48, 2, False), {"is_causal": True}),
    "rows that see nothing": (
        BF16,
        (1, 1, 1, 100, 30, 64),
        (64, 16, 3, False),
        {"is_causal": True},
    ),
    "taking turns": (F16, (1, 1, 1, 130, 100, 64), (128, 32, 2, True), {"is_causal": True}),
    "causal, top-left": (
        F16,
        (1, 1, 1, 70, 110, 64),
        (64, 16, 2, False),
        {"is_causal": True, "causal_align": "top-left"},
    ),
    "window": (F16, (1, 1, 1, 70, 120, 64), (64, 16, 2, False), {"window": (20, 4)}),
    "a window whose right side is beyond the last key": (
        F16,
        (1, 1, 1, 70, 119, 64),
        (64, 16, 2, False),
        {"window": (60, 200)},
    ),
    "a width between panels": (F16, (1, 1, 1, 20, 40, 72), (64, 16, 2, False), {}),
    "four panels": (BF16, (1, 1, 1, 65, 20, 256), (64, 16, 1, False), {}),
    "three consumers": (F16, (1, 1, 1, 150, 40, 64), (192, 16, 2, True), {}),
    "more work than blocks": (F16, (1, 4, 2, 90, 40, 64), (64, 16, 2, False), {"is_causal": True}),
    "the same, taking turns": (
        BF16,
        (1, 7, 1, 70, 70, 64),
        (128, 16, 2, True),
        {"window": (30, 10)},
    ),
    "no room for O": (F16, (1, 6, 3, 40, 33, 64), (64, 16, 2, False, "crowded"), {}),
    "padding": (
        F16,
        (2, 2, 1, 20, 75, 64),
        (64, 16, 2, False),
        real(0.4, 2, 75, (0, 16, 48), (0, 60, 75), (1, 0, 75)),
    ),
    "padding, causal, taking turns": (
        BF16,
        (1, 1, 1, 130, 110, 64),
        (128, 16, 1, True),
        {"is_causal": True, **real(0.05, 1, 110)},
    ),
    "padding, a window": (
        F16,
        (1, 1, 1, 70, 130, 64),
        (64, 48, 2, False),
        {"window": (3, 2), **real(0.08, 1, 130)},
    ),
    "padding, nothing real in the window": (
        F16,
        (1, 1, 1, 64, 130, 64),
        (64, 128, 1, False),
        {"window": (10, 2), **APART},
    ),
    "dropout": (F16, (2, 2, 1, 20, 40, 64), (64, 32, 2, False), DROPPED),
    "dropout, more than 64 keys": (BF16, (1, 1, 1, 20, 90, 64), (64, 80, 2, False), DROPPED),
    "padding and dropout": (
        F16,
        (1, 2, 1, 70, 40, 64),
        (128, 16, 2, True),
        {"is_causal": True, **real(0.5, 1, 40), **DROPPED},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_attention_and_moves_what_the_closed_form_says(hopper, case):
    """Error within the bound; loads and stores of each array, by the copy engine too, counted."""
    dtype, sizes, tile, what = CASES[case]
    q, k, v = drawn(len(case), dtype, *sizes)
    what = {"enable_gqa": True, **what}
    algorithm, output, lse, traffic = hopper("attention", q, k, v, tile, **what)
    assert algorithm == "hopper"
    assert output.dtype == dtype
    assert ratio(output, q, k, v, **what) <= 1
    assert exact(q, k, v, **what).lse_ratio(lse) <= 1
    assert traffic["hopper"] == expected("flash2", q, k, v, tile[:2], **what)


def test_a_plan_may_be_launched_again(hopper):
    """The blocks' counter is where it was."""
    q, k, v = drawn(5, F16, 1, 6, 6, 20, 20, 64)
    assert ratio(hopper("again", q, k, v, (64, 16, 64)), q, k, v) <= 1


@pytest.mark.parametrize(
    "dtype, batch, heads, kv_heads, Nk, d", [(F16, 2, 6, 2, 75, 64), (BF16, 1, 1, 1, 9, 72)]
)
def test_decoding_reads_keys_and_values_once_for_a_group_of_heads(
    hopper, dtype, batch, heads, kv_heads, Nk, d
):
    q, k, v = drawn(7, dtype, batch, heads, kv_heads, 1, Nk, d)
    what = {"enable_gqa": True, "is_causal": True}  # one query sees every key
    algorithm, output, lse, traffic = hopper(
        "attention", q, k, v, (64, 16, 2, False), "hopper_split_kv", **what
    )
    assert algorithm == "hopper_split_kv"
    assert ratio(output, q, k, v, **what) <= 1
    assert exact(q, k, v, splits=5, **what).lse_ratio(lse) <= 1
    (reads, writes), parts = traffic["split"], traffic["merge"][0]["L_parts"] // lse.size
    assert parts == min(8 // (batch * kv_heads), -(-Nk // 16))
    assert reads == {"Q": parts * q.size, "K": k.size, "V": v.size}
    assert writes == {"O": parts * output.size, "L": parts * lse.size}
    assert traffic["merge"][1] == {"O": output.size, "L": lse.size}


@pytest.mark.parametrize(
    "dtype, heads, Br, key, what",
    [
        (F16, 1, 128, 85, {"is_causal": True}),
        (F16, 5, 64, 85, {"is_causal": True}),
        (BF16, 1, 128, 85, {"window": (20, 14)}),
        (F16, 1, 128, 3, {"window": (20, None)}),
    ],
    ids=["causal", "more work than blocks", "window", "left of a window"],
)
def test_what_is_behind_a_mask_does_not_leak(hopper, dtype, heads, Br, key, what):
    """NaN and inf in keys and values, on either side of a window; source: fault A8."""
    q, k, v = drawn(1, dtype, 1, heads, heads, 90, 100, 64)
    tile = (Br, 32, 2, False)
    _, *clean, _ = hopper("attention", q, k, v, tile, **what)
    k[..., key, :], v[..., 73, 5] = np.nan, np.nan
    v[..., 20, :32], v[..., 60, 32:] = np.inf, np.inf
    _, *dirty, _ = hopper("attention", q, k, v, tile, **what)
    right = exact(q, k, v, **what)
    for before, found, wanted in zip(clean, dirty, (right.output, right.lse), strict=True):
        seen = ~np.isfinite(wanted)
        assert 0 < seen.sum() < wanted.size
        np.testing.assert_array_equal(found[seen].astype(np.float64), wanted[seen])
        np.testing.assert_array_equal(found[~seen], before[~seen])


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_values_are_looked_at_before_they_count(hopper, stages, kind):
    """Tile 4 is the first whose values must have been looked at, and NaN is in it.

    Until then nobody need wait for that, so it may be as late as its place on chip lets it: in the
    tile that was there before. The warps that look meet once before the first tile, and in each.
    """
    q, k, v = drawn(1, F16, 1, 1, 1, 192, 192 if kind == "causal" else 160, 64)
    v[..., 137, 5] = np.nan
    what, room = {"is_causal": True}, ()
    if kind == "padding":  # the last tile is looked at by itself if Q_i's place is O_i's
        what, room = {"key_padding_mask": np.arange(160)[None] != 137}, ("crowded",)
    tile = (64, 32, stages, False, *room)
    _, output, *_ = hopper("slowly_looked_at", 6 - stages, q, k, v, tile, **what)
    right = exact(q, k, v, **what).output
    np.testing.assert_array_equal(np.isnan(output.astype(np.float32)), np.isnan(right))


@pytest.mark.parametrize(
    "what", [{}, {"is_causal": True}, {"window": (50, 40), **DROPPED}], ids=str
)
def test_what_is_padding_does_not_leak(hopper, what):
    """NaN and inf in keys and values: no bit changes, in tiles that a band cuts as well."""
    q, k, v = drawn(1, F16, 1, 1, 1, 70, 60, 64)
    keys = real(0.6, 1, 60, (0, 32, 48))["key_padding_mask"]
    tile, what = (128, 16, 2, True), {"key_padding_mask": keys, **what}
    _, *clean, _ = hopper("attention", q, k, v, tile, **what)
    for x, odd in ((k, np.nan), (v, np.inf)):
        x[~keys[:, None]] = odd
    v[..., 40, :], v[..., np.argmin(keys), :5] = np.nan, np.nan
    _, *dirty, _ = hopper("attention", q, k, v, tile, **what)
    assert all(np.isfinite(x.astype(np.float32)).any() for x in clean)
    for before, after in zip(clean, dirty, strict=True):
        assert before.tobytes() == after.tobytes()


def test_inf_in_a_value_is_seen_where_its_key_is_real(hopper):
    """Beside padding, and by a weight that dropout left out, it is NaN."""
    q, k, v = drawn(2, F16, 1, 1, 1, 20, 40, 64)
    what = {"key_padding_mask": real(0.6, 1, 40)["key_padding_mask"], **DROPPED}
    what["key_padding_mask"][0, [7, 30]] = True
    v[..., 7, 3], v[..., 30, 9] = np.inf, -np.inf
    _, output, *_ = hopper("attention", q, k, v, (64, 16, 2, False), **what)
    right = exact(q, k, v, **what).output
    odd = ~np.isfinite(right)
    assert 0 < np.isnan(right).sum() < odd.sum() < right.size
    np.testing.assert_array_equal(output[odd].astype(np.float64), right[odd])
    assert np.isfinite(output[~odd]).all()


def test_decoding_leaves_out_what_is_padding(hopper):
    """Parts of the keys in which nothing is real, too."""
    q, k, v = drawn(8, F16, 1, 2, 1, 1, 90, 64)
    what = {"enable_gqa": True, **real(0.5, 1, 90, (0, 32, 64))}
    tile = (64, 16, 2, False)
    algorithm, output, _, traffic = hopper("attention", q, k, v, tile, "hopper_split_kv", **what)
    assert algorithm == "hopper_split_kv"
    assert ratio(output, q, k, v, **what) <= 1
    assert traffic["split"][0]["K"] == traffic["split"][0]["V"] == (90 - 32) * 64


@settings(max_examples=150)
@given(st.data())
def test_key_tiles_that_are_walked_are_those_with_a_real_key(hopper, data):
    """And those between two keys, with a real key between them."""
    Bc, Nk = 16 * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 150))
    keys = np.random.default_rng(Nk).random((2, Nk)) < data.draw(st.sampled_from([0, 0.03, 0.5, 1]))
    first, stop = (data.draw(st.integers(-10, Nk + 70)) for _ in range(2))
    rank, walked, between = hopper("key_tiles", keys, Bc, first, stop)
    for b, mine in enumerate(keys):
        tiles = np.pad(mine, (0, -Nk % Bc)).reshape(-1, Bc)
        some = np.flatnonzero(tiles.any(axis=1))
        np.testing.assert_array_equal(rank[b], np.searchsorted(some, np.arange(len(tiles) + 1)))
        for (number, lowest, highest, *bits), j in zip(walked[b], some, strict=False):
            assert number == 2 * j + (not tiles[j].all())
            assert [lowest, highest] == (j * Bc + np.flatnonzero(tiles[j])[[0, -1]]).tolist()
            packed = np.packbits(np.pad(tiles[j], (0, -Bc % 32)), bitorder="little")
            np.testing.assert_array_equal(np.array(bits, np.int32).view(np.uint8), packed)
        seen = np.flatnonzero(mine & (np.arange(Nk) >= first) & (np.arange(Nk) < stop))
        wanted = [rank[b, seen[0] // Bc], rank[b, seen[-1] // Bc] + 1] if len(seen) else None
        assert between[b][0] >= between[b][1] if wanted is None else list(between[b]) == wanted


def test_what_a_kernel_does_not_cover_is_left_to_the_plain_one(hopper):
    """And the answer says which ran."""
    for dtype, d, algorithm, what in [
        (np.float32, 64, "hopper", {}),
        (F16, 60, "hopper", {}),
        (F16, 64, "hopper", {"attn_mask": np.ones((4, 4), bool)}),
        (F16, 64, "hopper_split_kv", {"dropout_p": 0.5}),
        (F16, 64, "hopper", {"scale": -1.0}),
        (F16, 64, "hopper_split_kv", {}),
    ]:
        x = drawn(0, np.dtype(dtype), 1, 1, 1, 4, 4, d)
        assert hopper("ran", *x, algorithm=algorithm, **what) == "flash2"


def test_nothing_and_what_stands_for_several_is_left_to_the_plain_one(hopper):
    """No map can be made of it."""
    x = drawn(0, F16, 1, 2, 2, 4, 4, 64)[0]
    for q, k in [(x, x[..., :0, :]), (x[..., :0, :], x), (x[:0], x[:0])]:
        assert hopper("ran", q, k, k, algorithm="hopper") == "flash2"
    assert [hopper("repeats", x, strides) for strides in ((8, 0, 2), (8, 2, 0))] == [True, False]


def test_a_window_beyond_all_keys_is_none(hopper):
    q, k, v = drawn(2, F16, 1, 1, 1, 20, 30, 64)
    wide = hopper("attention", q, k, v, (64, 16, 2, False), window=(10**12, 10**12))
    none = hopper("attention", q, k, v, (64, 16, 2, False))
    np.testing.assert_array_equal(wide[1], none[1])


def test_tiles_that_registers_do_not_hold_are_refused(hopper):
    x = drawn(0, F16, 1, 1, 1, 4, 4, 64)
    with pytest.raises(ValueError, match=r"tiles=\(192, 256\): .* 160 registers of a thread, not"):
        hopper("ran", *x, algorithm="hopper", tiles=(192, 256))


def test_large_logits_stay_within_the_bound(hopper):
    """Weights from 1 down to subnormal ones."""
    q, k, v = drawn(3, F16, 1, 1, 1, 20, 40, 64)
    what = {"scale": 3.0}
    _, output, lse, _ = hopper("attention", q, k, v, (64, 16, 2, False), **what)
    assert ratio(output, q, k, v, **what) <= 1
    assert exact(q, k, v, **what).lse_ratio(lse) <= 1


@pytest.mark.parametrize(
    "d, Br, Bc, stages",
    [(64, 192, 128, 2), (128, 128, 128, 2), (192, 128, 112, 2), (256, 128, 80, 2)],
)
def test_the_default_tiles_are_among_those_that_the_tuning_tries(hopper, d, Br, Bc, stages):
    candidates, default = hopper("tuned_tiles", d)
    assert default in candidates
    assert f"Br={Br}, Bc={Bc}, d={d}, stages={stages}, ping_pong=True" in default


PADDED = {"key_padding_mask": np.ones((1, 4), bool)}


@pytest.mark.parametrize("what", [PADDED, DROPPED, PADDED | DROPPED], ids=str)
@pytest.mark.parametrize("d, Bc", [(64, 128), (128, 96)])
def test_padding_and_dropout_take_tiles_that_leave_registers(hopper, what, d, Bc):
    x = drawn(0, F16, 1, 1, 1, 4, 4, d)
    fewer = 16 if d == 128 and len(what) > len(DROPPED) else 0  # with both
    assert hopper("tiles_of", *x, algorithm="hopper", **what) == (128, Bc - fewer)


def test_the_tuning_says_what_is_missing(hopper):
    assert hopper("tuning_refused").startswith("tune: expected a GPU, and NUMBA_ENABLE_CUDASIM")


def test_a_kernel_on_disk_is_found_by_other_processes(compiler):
    """What names it is the same there: no address is in it."""
    found = compiler.call("cache_keys")
    other = KernelProcess(simulated=False)
    try:
        assert other.call("cache_keys") == found
    finally:
        other.close()


@pytest.mark.parametrize(
    "tile, features",
    [  # Br, Bc, d, ping_pong: the default tiles
        ((192, 128, 64, True), {"dtype": "float16", "band": True}),
        ((192, 128, 64, True), {"dtype": "bfloat16", "band": False}),
        ((128, 128, 128, True), {"dtype": "bfloat16", "band": True}),
        ((128, 112, 192, True), {"dtype": "float16", "band": True}),
        ((128, 80, 256, True), {"dtype": "bfloat16", "band": True}),
        ((128, 80, 256, True), {"dtype": "float16"}),
        ((64, 128, 128), {"dtype": "float16", "output": "float32"}),  # of split-KV
        ((128, 128, 64, True), {"dtype": "bfloat16", "band": True, "keys": True, "dropout": True}),
        ((128, 96, 128, True), {"dtype": "float16", "keys": True}),
        ((128, 96, 128, True), {"dtype": "bfloat16", "band": True, "dropout": True}),
        ((128, 80, 128, True), {"dtype": "bfloat16", "band": True, "keys": True, "dropout": True}),
        ((64, 128, 128), {"dtype": "float16", "output": "float32", "keys": True}),
        ((128, 96, 192, True), {"dtype": "float16", "band": True, "dropout": True}),
        ((128, 64, 256, True), {"dtype": "float16", "band": True, "keys": True}),
    ],
    ids=str,
)
def test_the_kernel_stays_in_registers_and_its_products_run_by_themselves(compiler, tile, features):
    """No spills, no local memory, no float64; `setmaxnreg` followed, no `wgmma` made to wait."""
    said = compiler.call("hopper_assembled", *tile, **features)
    assert 0 < said.pop("registers") * said.pop("threads") <= 65536
    assert not any(said.values()), said
