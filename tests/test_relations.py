"""What must hold between two runs, whatever the numbers are."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import flashsim as fs
from flashsim.algorithms import ALGORITHMS, BITS, SHAPES
from flashsim.memory import Machine, widened
from flashsim.problem import checked
from flashsim.reference import exact
from strategies import DTYPES, Call, calls, same_bits, tilings, variants, visible


def run(call, variant, **how):
    algorithm, convention = variant
    return fs.attention(*call, algorithm=algorithm, convention=convention, **call.what, **how)


def agree(call, a, b):
    """Two runs of one call differ by no more than both may be off."""
    ref = exact(*call, **call.what)
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.output.astype(float) - b.output.astype(float))
        apart_lse = np.abs(np.where(a.lse == b.lse, 0, a.lse.astype(float) - b.lse))
    return (apart <= 2 * ref.output_bound).all() and (apart_lse <= 2 * ref.lse_bound).all()


@given(calls(dtypes=DTYPES), variants, tilings, variants, tilings)
def test_neither_the_algorithm_nor_block_sizes_change_the_answer(call, one, tiles, other, others):
    assert agree(call, run(call, one, tiles=tiles), run(call, other, tiles=others))


@given(calls(dtypes=DTYPES), variants, tilings)
def test_the_simulated_run_is_bit_identical_to_the_plain_one(call, variant, tiles):
    """The algorithm itself, on NumPy arrays and on HBM arrays of a poisoning, counting machine."""
    problem, row = checked(*call, **call.what), ALGORITHMS[variant[0]]
    head, wide = problem.head, widened(call.q.dtype)
    at = (0,) * (problem.q.ndim - 2)
    more = row.more(head, np.inf, np.inf)

    def arrays():
        shapes = {name: tuple(head.sizes[s] for s in SHAPES[name]) for name in row.arrays}
        return {
            name: np.full(shape, np.nan, bool if name in BITS else wide)
            for name, shape in shapes.items()
        }

    machine = Machine(elide=variant[1] == "elided", poison=True)
    plain, simulated = arrays(), arrays()
    on_hbm = {
        n: a if n in row.uncharged else machine.hbm(**{n: a})[n] for n, a in simulated.items()
    }
    how = {
        "Br": tiles[0],
        "Bc": tiles[1],
        "scale": problem.scale,
        "drop": problem.dropout(at),
        **more,
    }
    with np.errstate(all="ignore"):
        row.forward(*problem.inputs(at).values(), *plain.values(), mask=problem.mask(at), **how)
        row.forward(
            *machine.hbm(**problem.inputs(at)).values(),
            *on_hbm.values(),
            mask=problem.mask(at, machine),
            **how,
        )
    assert all(same_bits(plain[name], simulated[name]) for name in plain)
    assert machine.resident == []
    out = run(call, variant, tiles=tiles)
    assert same_bits(out.output[at], plain["O"].astype(call.q.dtype))


@given(calls(), variants, tilings)
def test_permuting_keys_changes_nothing(call, variant, tiles):
    what = {n: x for n, x in call.what.items() if n in ("scale", "enable_gqa")}
    call = dataclasses.replace(call, what=what)
    order = np.random.default_rng(0).permutation(call.k.shape[-2])
    permuted = Call(call.q, call.k[..., order, :], call.v[..., order, :], what)
    assert agree(call, run(call, variant, tiles=tiles), run(permuted, variant, tiles=tiles))


@given(calls(dropout=False), variants, tilings, st.integers(-8, 8))
def test_scaling_values_by_a_power_of_two_scales_the_output_exactly(call, variant, tiles, power):
    scaled = dataclasses.replace(call, v=np.ldexp(call.v, power))
    a, b = run(call, variant, tiles=tiles), run(scaled, variant, tiles=tiles)
    normal = np.abs(a.output) > 2.0**-90
    assert np.array_equal(np.ldexp(a.output, power)[normal], b.output[normal])
    assert same_bits(a.lse, b.lse)


@given(calls(), variants, tilings)
def test_shifting_every_key_by_one_vector_changes_only_the_lse(call, variant, tiles):
    """q . (k + c) adds q . c to a whole row: the weights stay, the lse moves by scale q . c."""
    k = np.round(call.k)
    call = dataclasses.replace(call, k=k)
    c = np.arange(1, k.shape[-1] + 1, dtype=k.dtype)
    shifted = dataclasses.replace(call, k=k + c)
    a, b = run(call, variant, tiles=tiles), run(shifted, variant, tiles=tiles)
    one, two = exact(*call, **call.what), exact(*shifted, **call.what)
    assert (np.abs(a.output.astype(float) - b.output) <= one.output_bound + two.output_bound).all()
    scale = call.what.get("scale", k.shape[-1] ** -0.5)
    moved = call.q.astype(float) @ c * scale
    seen = np.isfinite(a.lse)
    off = np.abs(b.lse.astype(float)[seen] - a.lse[seen] - moved[seen])
    assert (off <= (one.lse_bound + two.lse_bound)[seen] + 1e-12).all()


@given(calls(masked=False, dropout=False), variants, tilings, st.data())
def test_causal_rows_are_a_prefix_bit_for_bit(call, variant, tiles, data):
    """With aligned queries, the first n rows do not know of the rows and keys that follow."""
    N = min(call.q.shape[-2], call.k.shape[-2])
    assume(N >= 1)
    n = data.draw(st.integers(1, N))
    causal = {**call.what, "is_causal": True, "causal_align": "top-left"}
    whole = Call(call.q[..., :N, :], call.k[..., :N, :], call.v[..., :N, :], causal)
    later = Call(*(x.copy() for x in whole), causal)
    for x in (later.k, later.v):
        x[..., n:, :] = np.nan
    a, b = run(whole, variant, tiles=tiles), run(later, variant, tiles=tiles)
    assert same_bits(a.output[..., :n, :], b.output[..., :n, :])
    assert same_bits(a.lse[..., :n], b.lse[..., :n])


@given(calls(), variants, tilings)
def test_what_lies_behind_the_mask_does_not_matter(call, variant, tiles):
    """NaN and inf in every padded slot of K and V give the same bits as zeros there."""
    padding = np.random.default_rng(5).random((*call.q.shape[:-3], call.k.shape[-2])) < 0.5
    what = {**call.what, "key_padding_mask": padding}
    clean = Call(*(x.copy() for x in call), what)
    dirty = Call(*(x.copy() for x in call), what)
    for n, (a, b) in enumerate(zip((clean.k, clean.v), (dirty.k, dirty.v), strict=True)):
        for item in np.ndindex(*padding.shape[:-1]):
            a[item][:, ~padding[item]] = 0
            b[item][:, ~padding[item]] = [np.nan, np.inf][n]
    a, b = run(clean, variant, tiles=tiles), run(dirty, variant, tiles=tiles)
    assert same_bits(np.nan_to_num(a.output), np.nan_to_num(b.output))
    assert np.isfinite(b.output).all()
    assert same_bits(a.lse, b.lse)
    assert a.traffic == b.traffic


@given(calls(masked=False), variants, tilings)
def test_a_nan_in_a_visible_value_shows_in_every_tiling(call, variant, tiles):
    assume(call.k.shape[-2] > 0 and "dropout_p" not in call.what)
    call.v[..., -1, 0] = np.nan
    last = np.zeros_like(call.v)
    last[..., -1, :] = 1
    weight = run(dataclasses.replace(call, v=last), variant, tiles=tiles).output[..., 0]
    out = run(call, variant, tiles=tiles)
    # standard attention cannot tell a stored weight that underflowed to 0 from a masked one
    hidden = (weight == 0) & variant[0].startswith("standard")
    assert np.array_equal(np.isnan(out.output[..., 0]), ~hidden)
    assert np.isfinite(out.output[..., 1:]).all()
    assert np.isfinite(out.lse).all()


@given(calls(masked=False, dropout=False), tilings)
def test_a_window_without_a_future_is_causal(call, tiles):
    N = max(call.q.shape[-2], call.k.shape[-2])
    window = dataclasses.replace(call, what={**call.what, "window": (N, 0)})
    causal = dataclasses.replace(call, what={**call.what, "is_causal": True})
    a, b = (run(c, ("flash2", "literal"), tiles=tiles) for c in (window, causal))
    assert same_bits(a.output, b.output)
    assert a.traffic == b.traffic


@given(calls(dropout=False), variants, tilings)
def test_rules_written_out_as_an_array_give_the_same_answer(call, variant, tiles):
    """The rules' own definition, one score at a time, handed over as a bool mask."""
    rules = ("is_causal", "causal_align", "window", "key_padding_mask")
    what = {n: x for n, x in call.what.items() if n != "attn_mask"}
    call = dataclasses.replace(call, what=what)
    Nq, Nk = call.q.shape[-2], call.k.shape[-2]
    batch = call.q.shape[:-3]
    keep = np.stack([visible(Nq, Nk, what, item) for item in np.ndindex(*batch)])
    array = keep.reshape(*batch, 1, Nq, Nk)
    spelled = {n: x for n, x in what.items() if n not in rules} | {"attn_mask": array}
    a = run(call, variant, tiles=tiles)
    b = run(dataclasses.replace(call, what=spelled), variant, tiles=tiles)
    assert agree(call, a, b)
    assert ((a.lse == -np.inf) == (~array.any(axis=-1) & np.ones_like(a.lse, bool))).all()


@given(calls(dropout=False), variants, tilings)
def test_grouped_heads_are_repeated_heads(call, variant, tiles):
    group = call.q.shape[-3] // call.k.shape[-3]
    k, v = (np.repeat(x, group, axis=-3) for x in (call.k, call.v))
    repeated = dataclasses.replace(call, k=k, v=v)
    a, b = run(call, variant, tiles=tiles), run(repeated, variant, tiles=tiles)
    assert same_bits(a.output, b.output)
    assert a.traffic == b.traffic


@given(calls(), variants, tilings)
def test_a_batch_is_its_items_one_by_one(call, variant, tiles):
    """Bit for bit, and the traffic adds up; dropout aside, which knows the item's number."""
    what = {n: x for n, x in call.what.items() if n not in ("dropout_p", "seed")}
    call = dataclasses.replace(call, what=what)
    whole, batch = run(call, variant, tiles=tiles), call.q.shape[:-3]
    total = 0
    for item in np.ndindex(*batch):
        mine = dict(what)
        if "key_padding_mask" in what:
            mine["key_padding_mask"] = what["key_padding_mask"][item][None]
        if "attn_mask" in what:
            full = np.broadcast_to(what["attn_mask"], (*call.q.shape[:-1], call.k.shape[-2]))[item]
            shape = what["attn_mask"].shape[-2:]
            mine["attn_mask"] = full[:, : shape[0], : shape[1]] if len(shape) == 2 else full
        one = run(Call(*(x[item] for x in call), mine), variant, tiles=tiles)
        assert same_bits(one.output, whole.output[item])
        total += one.traffic.total_elements - one.traffic.reads.get("mask", 0)
    assert total == whole.traffic.total_elements - whole.traffic.reads.get("mask", 0)


@given(calls(dtypes=DTYPES), variants, tilings)
def test_strides_and_aliases_do_not_change_a_bit_and_inputs_are_not_written_to(
    call, variant, tiles
):
    """Transposed, reversed, strided and read-only inputs give the bits of their copies."""

    def awkward(x, n):
        transposed = np.ascontiguousarray(np.swapaxes(x, -1, -2))
        spread = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        spread[..., ::2] = x
        reverse = np.ascontiguousarray(x[..., ::-1, :])
        return [np.swapaxes(transposed, -1, -2), spread[..., ::2], reverse[..., ::-1, :]][n % 3]

    shaped = [awkward(x, n) for n, x in enumerate(call)]
    for x in shaped:
        x.flags.writeable = False
    before = [x.copy() for x in shaped]
    a = run(call, variant, tiles=tiles)
    b = run(Call(*shaped, call.what), variant, tiles=tiles)
    assert same_bits(a.output, b.output)
    assert same_bits(a.lse, b.lse)
    assert all(same_bits(x, y) for x, y in zip(before, shaped, strict=True))


@given(tilings, variants)
def test_one_array_as_q_k_and_v_and_broadcast_inputs(tiles, variant):
    x = np.random.default_rng(0).standard_normal((9, 4), dtype=np.float32)
    same, copies = Call(x, x, x), Call(x.copy(), x.copy(), x.copy())
    assert same_bits(
        run(same, variant, tiles=tiles).output, run(copies, variant, tiles=tiles).output
    )
    wide = np.broadcast_to(x[:1], x.shape)
    spread, copied = Call(x, wide, wide), Call(x, wide.copy(), wide.copy())
    assert same_bits(
        run(spread, variant, tiles=tiles).output, run(copied, variant, tiles=tiles).output
    )


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (3, 5, 7), (2, 1, 1, 7), (3, 1, 1), (2, 3, 5, 1)])
@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_each_head_of_each_item_has_its_own_mask_and_padding(shape, dtype):
    """Held against calls of one head alone: the reference takes its masks from where we do."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, 4), dtype=np.float32) for n in (5, 7, 7))
    numbers = rng.standard_normal(shape, dtype=np.float32)
    mask = numbers > -0.3 if dtype is bool else numbers
    padding = rng.random((2, 7)) < 0.7
    whole = fs.attention(q, k, v, attn_mask=mask, key_padding_mask=padding, tiles=(2, 3))
    spread = np.broadcast_to(mask, (2, 3, 5, 7))
    for b, h in np.ndindex(2, 3):
        alone = fs.attention(
            q[b, h], k[b, h], v[b, h], attn_mask=spread[b, h], key_padding_mask=padding[b : b + 1],
            tiles=(2, 3),
        )  # fmt: skip
        assert same_bits(alone.output, whole.output[b, h])
        assert same_bits(alone.lse, whole.lse[b, h])
