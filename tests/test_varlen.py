"""Packed sequences of variable length: each as if it had run alone, in every bit and count."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli, inputs
from flashsim.cost.io import expected_cost
from flashsim.dropout import Dropout
from flashsim.inputs import Inputs
from flashsim.reference import exact, exact_gradients
from strategies import DTYPES, TRAINABLE, same_bits, tilings, variants


@st.composite
def packs(draw, dtypes=(np.float32,), align=True):
    """(q, k, v), cumulative lengths and what is to be computed; some sequences empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(0, 5))
    lengths = st.lists(st.integers(0, 17), min_size=n, max_size=n)
    q_lengths = draw(lengths)
    k_lengths = draw(st.none() | lengths)
    cu_q = np.cumsum([0, *q_lengths])
    cu_k = cu_q if k_lengths is None else np.cumsum([0, *k_lengths])
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    dtype, d, dv = draw(st.sampled_from(dtypes)), draw(st.integers(1, 7)), draw(st.integers(1, 7))
    q, k, v = (
        rng.standard_normal((heads, total, width)).astype(dtype)
        for heads, total, width in (
            (kv_heads * group, cu_q[-1], d), (kv_heads, cu_k[-1], d), (kv_heads, cu_k[-1], dv),
        )
    )  # fmt: skip
    what = {"enable_gqa": group > 1, "is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        what["window"] = draw(st.tuples(*[st.none() | st.integers(0, 9)] * 2))
    what["causal_align"] = draw(st.sampled_from(["bottom-right", "top-left"]))
    how = {"cu_seqlens_q": cu_q.astype(draw(st.sampled_from([np.int32, np.int64])))}
    if k_lengths is not None:
        how["cu_seqlens_k"] = cu_k
    return (q, k, v), (cu_q, cu_k), what, how


def alone(qkv, ends, what, run, *more):
    """What `run` gives for each sequence: of its rows of q (and more), k and v."""
    q, k, v = qkv
    rows, keys = (list(pairwise(x.tolist())) for x in ends)
    for (a, b), (c, e) in zip(rows, keys, strict=True):
        yield (
            slice(a, b),
            slice(c, e),
            run(q[:, a:b], k[:, c:e], v[:, c:e], *(x[:, a:b] for x in more), **what),
        )


def added(costs, name):
    """The counts of several runs, array by array."""
    total = {}
    for cost in costs:
        for array, x in getattr(cost, name).items():
            total[array] = total.get(array, 0) + x
    return {array: x for array, x in total.items() if x}


def counted(traffic):
    return {n: x for n, x in traffic.reads.items() if x}, {
        n: x for n, x in traffic.writes.items() if x
    }


@given(packs(dtypes=DTYPES), variants, tilings)
def test_packed_is_each_sequence_alone_bit_for_bit_and_in_the_sum_of_counts(pack, variant, tiles):
    qkv, ends, what, how = pack
    run = {"algorithm": variant[0], "convention": variant[1], "tiles": tiles}
    out = fs.attention(*qkv, **what, **how, **run)
    assert out.output.shape == (*qkv[0].shape[:-1], qkv[2].shape[-1])
    traffic, most, extra = [], 0, 0
    for rows, _, one in alone(qkv, ends, {**what, **run}, fs.attention):
        assert same_bits(out.output[:, rows], one.output)
        assert same_bits(out.lse[:, rows], one.lse)
        traffic.append(one.traffic)
        most, extra = max(most, one.sram_peak_elements), extra + one.extra_hbm_elements
    assert counted(out.traffic) == (added(traffic, "reads"), added(traffic, "writes"))
    assert (out.sram_peak_elements, out.extra_hbm_elements) == (most, extra)
    cost = expected_cost(out, *qkv, **what, **how, convention=variant[1])
    assert counted(out.traffic) == counted(cost)
    assert (most, extra) == (cost.sram_elements, cost.extra_hbm_elements)


@settings(max_examples=30)
@given(packs(), st.sampled_from(TRAINABLE), tilings)
def test_packed_gradients_are_those_of_each_sequence_alone(pack, variant, tiles):
    qkv, ends, what, how = pack
    run = {"algorithm": variant[0], "convention": variant[1], "tiles": tiles}
    do = np.random.default_rng(5).standard_normal(qkv[0].shape[:-1] + qkv[2].shape[-1:])
    do = do.astype(np.float32)
    out = fs.attention(*qkv, **what, **how, **run)
    dq, dk, dv = out.backward(do)
    traffic = []

    def both(q, k, v, do, **what):
        one = fs.attention(q, k, v, **what)
        return one, one.backward(do)

    for rows, keys, (one, gradients) in alone(qkv, ends, {**what, **run}, both, do):
        parts = (dq[:, rows], dk[:, keys], dv[:, keys])
        assert all(same_bits(a, b) for a, b in zip(parts, gradients, strict=True))
        traffic.append(one.traffic_backward)
    assert counted(out.traffic_backward) == (added(traffic, "reads"), added(traffic, "writes"))
    cost = expected_cost(out, *qkv, **what, **how, convention=variant[1], backward=True)
    assert counted(out.traffic_backward) == counted(cost)
    ratios = exact_gradients(*qkv, do, **what, **how).ratios((dq, dk, dv))
    assert max(ratios.values()) <= 1


@given(packs(dtypes=DTYPES), st.sampled_from([0.0, 0.5]), tilings)
def test_the_reference_packs_too(pack, dropout_p, tiles):
    qkv, ends, what, how = pack
    what["dropout_p"] = dropout_p
    ref = exact(*qkv, **what, **how)
    out = fs.attention(*qkv, **what, **how, tiles=tiles)
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1
    if dropout_p:
        return
    for rows, _, one in alone(qkv, ends, what, exact):
        assert same_bits(ref.output[:, rows], one.output)
        assert same_bits(ref.output_bound[:, rows], one.output_bound)
        assert same_bits(ref.lse[:, rows], one.lse)


@given(st.integers(1, 4), st.integers(1, 9), tilings, st.sampled_from([False, True]))
def test_sequences_of_one_length_are_a_batch_with_its_dropout(n, N, tiles, causal):
    """Dropout is a function of (seed, item, head, row, column), packed or not."""
    q, k, v = np.random.default_rng(n).standard_normal((3, n, 2, N, 4), dtype=np.float32)
    how = {"dropout_p": 0.5, "seed": 7, "tiles": tiles, "is_causal": causal}
    batch = fs.attention(q, k, v, **how)

    def pack(x):
        return np.moveaxis(x, 0, 1).reshape(2, n * N, 4)

    packed = fs.attention(*map(pack, (q, k, v)), **how, cu_seqlens_q=N * np.arange(n + 1))
    assert same_bits(packed.output, pack(batch.output))
    assert packed.traffic == batch.traffic


def test_each_sequence_drops_by_its_own_bits():
    """Equal weights and V the identity: what is dropped is where the output is 0."""
    N, lengths = 12, [12, 0, 12]
    q = np.zeros((2, sum(lengths), 3), np.float32)
    v = np.broadcast_to(np.tile(np.eye(N, dtype=np.float32), (2, 1)), (2, 2 * N, N))
    out = fs.attention(
        q, q, v, dropout_p=0.5, seed=7, tiles=(5, 4), cu_seqlens_q=np.cumsum([0, *lengths])
    )
    for item, rows in ((0, slice(0, N)), (2, slice(N, 2 * N))):
        for head in (0, 1):
            keep = Dropout(0.5, 7, item, head).keep(slice(0, N), slice(0, N))
            assert ((out.output[head, rows] != 0) == keep).all()


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flash2", "split_kv"])
def test_an_empty_sequence_of_keys_gives_zero_rows(algorithm):
    """Dao #1537, #1713, #2562, PR #2470: lengths of keys 0, 1, 0, 1."""
    q, v = np.ones((4, 1), np.float32), np.array([[5], [7]], np.float32)
    out = fs.attention(
        q, v, v, algorithm=algorithm, cu_seqlens_q=[0, 1, 2, 3, 4], cu_seqlens_k=[0, 0, 1, 1, 2]
    )
    assert out.output[:, 0].tolist() == [0, 5, 0, 7]
    assert out.lse.tolist() == [-np.inf, 5, -np.inf, 7]
    dq, dk, dv = out.backward(np.ones((4, 1), np.float32))
    assert (dq == 0).all()
    assert (dk == 0).all()
    assert (dv == 1).all()


def test_few_keys_for_many_queries_overflow_nothing():
    """Dao's test_flash_attn_bwd_varlen_overflow: 256 queries in three sequences, a key for each."""
    rng = np.random.default_rng(0)
    q, k, v = (5 * rng.standard_normal((2, n, 64)).astype(np.float16) for n in (256, 3, 3))
    ends = {"cu_seqlens_q": [0, 76, 110, 256], "cu_seqlens_k": [0, 1, 2, 3]}
    out = fs.attention(q, k, v, **ends)
    do = rng.standard_normal((2, 256, 64)).astype(np.float16)
    gradients = out.backward(do)
    assert all(np.isfinite(x).all() for x in (out.output, out.lse, *gradients))
    ratios = exact_gradients(q, k, v, do, **ends).ratios(gradients)
    assert max(ratios.values()) <= 1
    for n, (a, b) in enumerate(pairwise(ends["cu_seqlens_q"])):
        assert same_bits(out.output[:, a:b], np.repeat(v[:, n : n + 1], b - a, axis=1))


@pytest.mark.parametrize(
    "q, k, error",
    [
        ([0, 2, 5], None, r"cu_seqlens_q=\[0, 2, 5\]: .*from 0 to 6, the rows of q"),
        ([1, 6], None, r"cu_seqlens_q=\[1, 6\]: .*from 0 to 6"),
        ([0, 4, 3, 6], None, r"cu_seqlens_q\[2\]=3: .*at least 4"),
        ([0, -1, 6], None, r"cu_seqlens_q\[1\]=-1: .*at least 0"),
        ([0, 3, 6], [0, 6], r"cu_seqlens_k=\[0, 6\]: .*3 numbers"),
        ([0, 3, 6], [0, 7, 6], r"cu_seqlens_k\[2\]=6: .*at least 7"),
        (None, [0, 6], "cu_seqlens_q=None"),
        ([], None, r"cu_seqlens_q.shape=\(0,\): .*\(sequences \+ 1,\)"),
        ([[0, 6]], None, r"cu_seqlens_q.shape=\(1, 2\)"),
        ([0.0, 6.0], None, "cu_seqlens_q.dtype=.*float64.*an integer type"),
        ([False, True], None, "cu_seqlens_q.dtype=.*bool"),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(q, k, error):
    x = np.ones((2, 6, 3), np.float32)
    for call in (fs.attention, exact):
        with pytest.raises((ValueError, TypeError), match=error):
            call(x, x, x, cu_seqlens_q=q, cu_seqlens_k=k)


def test_what_has_no_meaning_for_packed_sequences_is_refused():
    x = np.ones((2, 6, 3), np.float32)
    ends = [0, 2, 6]
    for name, value in {
        "attn_mask": np.ones((6, 6), bool),
        "key_padding_mask": np.ones((1, 6), bool),
        "local_window": 2,
    }.items():
        with pytest.raises(ValueError, match=f"{name}=.*None, as cu_seqlens_q is given"):
            fs.attention(x, x, x, cu_seqlens_q=ends, **{name: value})
    with pytest.raises(ValueError, match=r"q\.shape=\(1, 2, 6, 3\).*with cu_seqlens_q"):
        fs.attention(x[None], x[None], x[None], cu_seqlens_q=ends)
    with pytest.raises(ValueError, match=r"cu_seqlens_k=None.*as k has 5 rows and q 6"):
        fs.attention(x, x[:, :5], x[:, :5], cu_seqlens_q=ends)


def test_the_command_packs_the_real_tokens_and_gets_what_they_get_with_padding():
    runner, run = CliRunner(), ["run", "--causal", "--backward", "--tiles", "16,16", "--json"]
    padded, packed = (
        json.loads(runner.invoke(cli.app, [*run, *option]).stdout) for option in ([], ["--packed"])
    )
    assert packed["options"]["cu_seqlens_q"] == [0, 180, 204]
    assert packed["input"]["q"] == [4, 204, 32]
    for with_padding, without in zip(padded["records"], packed["records"], strict=True):
        assert without["failures"] == []
        assert without["total_elements"] < with_padding["total_elements"]


def test_what_cannot_be_packed_is_refused():
    x, mask = np.ones((2, 1, 4, 3)), np.ones((4, 4), bool)
    with pytest.raises(ValueError, match=r"q\.shape, k\.shape=.*as many keys, to pack"):
        inputs.packed(Inputs("here", x, x[:, :, :3], x[:, :, :3]))
    with pytest.raises(ValueError, match=r"q\.shape, k\.shape=.*heads, N, d"):
        inputs.packed(Inputs("here", x[0, 0], x[0, 0], x[0, 0]))
    with pytest.raises(ValueError, match="attn_mask='given': expected None, to pack"):
        inputs.packed(Inputs("here", x, x, x, attn_mask=mask))


def test_a_pack_is_the_real_rows_of_every_item():
    rng = np.random.default_rng(0)
    x, real = rng.standard_normal((2, 2, 3, 5, 2)), rng.random((2, 2, 5)) < 0.6
    given = Inputs("here", x, x, x, key_padding_mask=real.reshape(4, 5), expected_output=x)
    found, ends = inputs.packed(given)
    assert ends == [0, *np.cumsum(real.reshape(4, 5).sum(axis=1))]
    for n, (item, keep) in enumerate(zip(x.reshape(4, 3, 5, 2), real.reshape(4, 5), strict=True)):
        rows = slice(ends[n], ends[n + 1])
        assert (found.q[:, rows] == item[:, keep]).all()
        assert (found.expected_output[:, rows] == item[:, keep]).all()
    assert (found.key_padding_mask, found.do, found.origin) == (None, None, "here, packed")
