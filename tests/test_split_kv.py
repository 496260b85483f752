"""Split-KV decoding: exact for any number of parts, counted, and step by step over a cache."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.algorithms import SHAPES, flash2, split_kv
from flashsim.algorithms.split_kv import merge_parts, parts, split_kv_attention
from flashsim.cost.devices import device
from flashsim.cost.io import expected_cost
from flashsim.cost.splits import MOST_SPLITS, best_splits, usual_splits
from flashsim.cost.waves import waves
from flashsim.decode import KVCache
from flashsim.memory import Machine, widened
from flashsim.online_softmax import State, finish, identity, merge
from flashsim.problem import checked
from flashsim.reference import exact, exact_gradients
from strategies import DTYPES, calls, same_bits, tilings

splits_ = st.sampled_from([1, 2, 3, 5, 17])


def attend(call, splits, **how):
    return fs.attention(*call, algorithm="split_kv", splits=splits, **call.what, **how)


def counted(traffic):
    return [{n: x for n, x in c.items() if x} for c in (traffic.reads, traffic.writes)]


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@given(calls(dtypes=DTYPES), splits_, tilings)
def test_any_number_of_parts_is_within_the_bound_of_float64(call, splits, tiles):
    out, ref = attend(call, splits, tiles=tiles), exact(*call, **call.what, splits=splits)
    event(str(call.q.dtype))
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1


@given(calls(dtypes=DTYPES), splits_, tilings)
def test_executed_is_the_closed_form_for_each_array(call, splits, tiles):
    out = attend(call, splits, tiles=tiles)
    cost = expected_cost(out, *call, **call.what)
    assert counted(out.traffic) == counted(cost)
    assert out.sram_peak_elements == cost.sram_elements
    assert out.sram_peak_bytes == cost.sram_bytes
    assert out.extra_hbm_elements == cost.extra_hbm_elements
    assert out.traffic.total_bytes == cost.total_bytes


@settings(max_examples=30)
@given(calls(dtypes=DTYPES), splits_, tilings)
def test_the_keys_are_read_as_often_as_without_parts(call, splits, tiles):
    """K and V once a row tile, as flash2; Q and a partial result once a part."""
    whole = fs.attention(*call, algorithm="flash2", tiles=tiles, **call.what).traffic.reads
    reads = attend(call, splits, tiles=tiles).traffic.reads
    rows, dv = call.q[..., 0].size, call.v.shape[-1]
    partial = rows * splits if splits > 1 else 0
    assert {n: reads.get(n, 0) for n in ("K", "V", "mask")} == {
        n: whole.get(n, 0) for n in ("K", "V", "mask")
    }
    assert reads["Q"] == splits * whole["Q"]
    assert (reads.get("Op", 0), reads.get("Lp", 0)) == (partial * dv, partial)


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 64), st.integers(1, 64), splits_)
def test_dense_square_counts_are_the_formula(N, d, Br, Bc, splits):
    Tr = -(-N // min(Br, N))
    cost = fs.io_cost("split_kv", N=N, d=d, Br=Br, Bc=Bc, splits=splits)
    partial = 2 * splits * N * (d + 1) if splits > 1 else 0
    assert cost.total_elements == (2 * Tr + splits + 1) * N * d + N + partial


@settings(max_examples=30)
@given(calls(dropout=False, max_n=20), splits_, tilings)
def test_flops_and_exponentials_are_those_that_ran(call, splits, tiles):
    ran = {"exps": 0}
    original = flash2.exp

    def counting_exp(s, m, out=None):
        ran["exps"] += s.size
        return original(s, m, out=out)

    with pytest.MonkeyPatch.context() as patch:
        for module in (flash2, split_kv):
            patch.setattr(module, "exp", counting_exp)
        out = attend(call, splits, tiles=tiles)
    cost = expected_cost(out, *call, **call.what)
    assert ran["exps"] == cost.exps
    whole = fs.attention(*call, algorithm="flash2", tiles=tiles, **call.what)
    assert cost.flops == expected_cost(whole, *call, **call.what).flops


@settings(max_examples=30)
@given(calls(dtypes=DTYPES), splits_, tilings)
def test_the_simulated_run_is_bit_identical_to_the_plain_one(call, splits, tiles):
    problem = checked(*call, **call.what, splits=splits)
    head, wide, at = problem.head, widened(call.q.dtype), (0,) * (problem.q.ndim - 2)
    names = fs.ALGORITHMS["split_kv"].arrays

    def arrays():
        shapes = {name: tuple(head.sizes[s] for s in SHAPES[name]) for name in names}
        return {name: np.full(shape, np.nan, wide) for name, shape in shapes.items()}

    machine, plain, simulated = Machine(poison=True), arrays(), arrays()
    how = {"Br": tiles[0], "Bc": tiles[1], "splits": splits, "scale": problem.scale}
    how["drop"] = problem.dropout(at)
    with np.errstate(all="ignore"):
        split_kv_attention(
            *problem.inputs(at).values(), *plain.values(), mask=problem.mask(at), **how
        )
        split_kv_attention(
            *machine.hbm(**problem.inputs(at)).values(), *machine.hbm(**simulated).values(),
            mask=problem.mask(at, machine), **how,
        )  # fmt: skip
    assert all(same_bits(plain[name], simulated[name]) for name in plain)
    assert not any(np.isnan(x).any() for x in plain.values())
    assert machine.resident == []


@settings(max_examples=30)
@given(calls(dtypes=DTYPES), splits_, tilings, st.integers(1, 2500))
def test_it_overflows_exactly_when_the_closed_form_does_not_fit(call, splits, tiles, sram):
    out = attend(call, splits, tiles=tiles)
    if out.sram_peak_elements > sram:
        with pytest.raises(fs.SramOverflow):
            attend(call, splits, tiles=tiles, sram=sram)
    else:
        assert same_bits(attend(call, splits, tiles=tiles, sram=sram).output, out.output)


@given(calls(), splits_, st.integers(1, 2500))
def test_the_strict_rule_leaves_room_for_the_merge(call, splits, sram):
    head = checked(*call, **call.what, splits=splits).head
    if fs.ALGORITHMS["split_kv"].needs(head, 1, 1)[0] > sram:
        with pytest.raises(ValueError, match=f"sram={sram}"):
            attend(call, splits, sram=sram)
    else:
        assert attend(call, splits, sram=sram).sram_peak_elements <= sram


@settings(max_examples=30)
@given(calls(dtypes=DTYPES), tilings)
def test_one_part_is_flash2_bit_for_bit_and_in_every_count(call, tiles):
    one = attend(call, 1, tiles=tiles)
    whole = fs.attention(*call, algorithm="flash2", tiles=tiles, **call.what)
    assert same_bits(one.output, whole.output)
    assert same_bits(one.lse, whole.lse)
    assert counted(one.traffic) == counted(whole.traffic)
    assert one.extra_hbm_elements == whole.extra_hbm_elements


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, MOST_SPLITS))
def test_parts_are_whole_tiles_in_order_and_cover_every_key_once(Nk, Bc, splits):
    spans = parts(Nk, Bc, splits)
    assert len(spans) == splits
    assert spans[0].start == 0
    assert spans[-1].stop == Nk
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert all(span.start % Bc == 0 or span.start == Nk for span in spans)
    assert max(s.stop - s.start for s in spans) <= -(-Nk // (Bc * splits)) * Bc


def test_more_parts_than_keys_leave_empty_ones_that_weigh_nothing():
    q, k, v = normal(2, 4), normal(3, 4, seed=1), normal(3, 5, seed=2)
    out = fs.attention(q, k, v, algorithm="split_kv", splits=MOST_SPLITS, tiles=(2, 1))
    assert exact(q, k, v, splits=MOST_SPLITS).output_ratio(out.output) <= 1
    none = fs.attention(q, k[:0], v[:0], algorithm="split_kv", splits=4)
    assert (none.output == 0).all()
    assert (none.lse == -np.inf).all()


@st.composite
def partial_results(draw):
    """O (parts, rows, 3) and L (parts, rows) of parts, some of them empty, in float64."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, rows = draw(st.integers(2, 9)), draw(st.integers(1, 5))
    O, L = rng.standard_normal((n, rows, 3)), 30 * rng.standard_normal((n, rows))
    empty = rng.random((n, rows)) < draw(st.sampled_from([0, 0.3, 0.9]))
    O[empty], L[empty] = 0, -np.inf
    return O, L


def merged(O, L, Br=2):
    rows = L.shape[1]
    output, lse = np.full((rows, 3), np.nan), np.full(rows, np.nan)
    merge_parts(O.reshape(-1, 3), L.reshape(-1), output, lse, Br=Br)
    return output, lse


@given(partial_results(), st.randoms(use_true_random=False))
def test_any_order_and_bracketing_of_the_merge_gives_the_same(partial, random):
    """In float64, beside the monoid: a part is the state (L, 1, O)."""
    O, L = partial
    output, lse = merged(O, L)
    states = [State(m, (m > -np.inf).astype(float), o) for o, m in zip(O, L, strict=True)]
    while len(states) > 1:
        a, b = (states.pop(random.randrange(len(states))) for _ in range(2))
        states.append(merge(a, b))
    expected, expected_lse = finish(states[0])
    np.testing.assert_allclose(output, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)
    order = random.sample(range(len(O)), len(O))
    again, lse_again = merged(O[order], L[order], Br=1)
    np.testing.assert_allclose(again, output, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse_again, lse, rtol=1e-12, atol=1e-12)


def test_two_empty_parts_merge_to_an_empty_one():
    """vllm PR #39148, PR #28181; flashinfer #4051, #4054: (0, -inf) + (0, -inf)."""
    output, lse = merged(np.zeros((2, 1, 3)), np.full((2, 1), -np.inf))
    assert (output == 0).all()
    assert lse.tolist() == [-np.inf]


def test_parts_merge_by_their_logsumexp_and_an_empty_one_changes_nothing():
    """zhuzilin/ring-flash-attention PR #34: (1, 0) and (4, ln 2) are (3, ln 3)."""
    O, L = np.array([1.0, 4.0])[:, None, None] * np.ones(3), np.array([[0], [np.log(2)]])
    output, lse = merged(O, L)
    np.testing.assert_allclose(output, np.full((1, 3), 3), rtol=1e-15)
    np.testing.assert_allclose(lse, [np.log(3)], rtol=1e-15)
    for n in (0, 1):
        with_empty = [O[n : n + 1], np.zeros((1, 1, 3))], [L[n : n + 1], np.full((1, 1), -np.inf)]
        for order in (slice(None), slice(None, None, -1)):
            output, lse = merged(*(np.concatenate(x[order]) for x in with_empty))
            assert output.tolist() == O[n].tolist()
            assert lse.tolist() == L[n].tolist()


@settings(max_examples=30)
@given(calls(max_n=24, dropout=False), splits_, tilings)
def test_the_backward_pass_is_flash2s_from_the_merged_lse(call, splits, tiles):
    out = attend(call, splits, tiles=tiles)
    do = normal(*out.output.shape, seed=3)
    gradients = out.backward(do)
    ratios = exact_gradients(*call, do, **call.what, splits=splits).ratios(gradients)
    assert max(ratios.values()) <= 1
    whole = fs.attention(*call, algorithm="flash2", tiles=tiles, **call.what)
    whole.backward(do)
    assert out.traffic_backward == whole.traffic_backward
    assert out.kept_elements == whole.kept_elements


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_bound_rejects_partial_results_rounded_to_float16(scale):
    q, k, v = normal(8, 16), normal(4096, 16, seed=1), normal(4096, 16, seed=2)
    ref = exact(scale * q, k, v, splits=8)
    out = fs.attention(scale * q, k, v, algorithm="split_kv", splits=8)
    assert ref.output_ratio(out.output) <= 1
    partial = [fs.attention(scale * q, k[a : a + 512], v[a : a + 512]) for a in range(0, 4096, 512)]
    state = identity(8, 16)
    for part in partial:
        L = part.lse.astype(np.float16).astype(np.float32)
        state = merge(state, State(L, np.ones_like(L), part.output))
    assert ref.output_ratio(finish(state)[0]) > 1


def test_the_default_is_the_published_rule_on_an_h200():
    """Its tiles are 64 queries, and 256, 128 or 64 keys by the width; two blocks an SM."""
    slots = 2 * device("h200").sm_count
    for heads, Nq, Nk, d in [(8, 1, 8192, 64), (16, 1, 65536, 128), (3, 100, 777, 256)]:
        keys = {64: 256, 128: 128, 256: 64}[d]
        expected = best_splits(heads * -(-Nq // 64), slots, -(-Nk // keys))
        assert usual_splits(heads, Nq, Nk, d) == expected
        assert fs.io_cost("split_kv", N=Nq, Nk=Nk, d=d, heads=heads) == fs.io_cost(
            "split_kv", N=Nq, Nk=Nk, d=d, heads=heads, splits=expected
        )
    assert usual_splits(1000, 1, 8192, 64) == 1
    assert usual_splits(0, 1, 8192, 64) == usual_splits(8, 0, 9, 4) == usual_splits(8, 9, 0, 4) == 1
    q, k = normal(1, 1, 8), normal(1, 4096, 8)
    out = fs.attention(q, k, k, algorithm="split_kv")
    assert out.splits == usual_splits(1, 1, 4096, 8) > 1
    assert counted(out.traffic) == counted(expected_cost(out, q, k, k))


@pytest.mark.parametrize("d, splits", [(1, 4), (64, 4), (65, 8), (128, 8), (129, 16), (256, 16)])
def test_a_lone_head_of_1024_keys_has_a_part_for_each_tile_of_the_published_kernel(d, splits):
    """One block in 264 places is fuller the more it is split; tiles of 256, 128 or 64 keys."""
    assert usual_splits(1, 1, 1024, d) == splits


@pytest.mark.parametrize("Nq, splits", [(1, 8), (64, 8), (65, 4), (128, 4), (129, 8)])
def test_a_block_of_the_published_kernel_holds_64_queries(Nq, splits):
    """32 heads, eight tiles of keys, 264 places; 1, 2, 3, 4 and 8 parts make parts shorter.

    Up to 64 queries are 32 blocks, 256 in eight parts: 0.97 full, and four parts half of that. Up
    to 128 are 64 blocks, as full in four parts as in eight. 129 are 96 blocks: 0.97 full only in
    eight parts and three waves, and at most 0.73 in fewer.
    """
    assert usual_splits(32, Nq, 1024, 128) == splits


@pytest.mark.parametrize("splits", [0, -1, MOST_SPLITS + 1, 2.0, True, "2"])
def test_a_number_of_parts_that_is_none_is_refused(splits):
    q = normal(4, 3)
    for refused in (
        lambda: fs.attention(q, q, q, algorithm="split_kv", splits=splits),
        lambda: fs.io_cost("split_kv", N=4, d=3, splits=splits),
    ):
        with pytest.raises((ValueError, TypeError), match=r"splits=.*an integer of at least 1"):
            refused()


def test_other_algorithms_refuse_parts():
    q = normal(4, 3)
    with pytest.raises(ValueError, match=r"splits=2: .*None, for algorithm='flash2'"):
        fs.attention(q, q, q, splits=2)
    with pytest.raises(ValueError, match=r"splits=2: .*None, for algorithm='standard'"):
        fs.io_cost("standard", N=4, d=3, splits=2)


@settings(max_examples=30)
@given(
    st.integers(0, 12), st.lists(st.integers(1, 3), max_size=6), splits_, st.sampled_from(DTYPES),
    st.sampled_from([1, 2]), st.integers(0, 9),
)  # fmt: skip
def test_decoding_step_by_step_is_causal_attention_over_the_whole_sequence(
    prompt, steps, splits, dtype, group, seed
):
    """A prompt, then a few tokens at a time, each attended to over the cache."""
    N = prompt + sum(steps)
    q = normal(2, 2 * group, N, 5, seed=seed, dtype=dtype)
    k, v = (normal(2, 2, N, n, seed=seed + n, dtype=dtype) for n in (5, 3))
    cache = KVCache(k[:, :, :prompt], v[:, :, :prompt], capacity=max(1, N))
    how = {"enable_gqa": True, "splits": splits, "tiles": (2, 3)}
    outs, keys_read = [], 0
    for n in ([prompt] if prompt else []) + steps:
        start = sum(m for m, _ in outs)
        if start >= prompt:
            cache.append(k[:, :, start : start + n], v[:, :, start : start + n])
        out = cache.attend(q[:, :, start : start + n], **how)
        keys_read += out.traffic.reads["K"] if n == 1 else 0
        outs.append((n, out))
    assert cache.length == N
    assert same_bits(cache.k, k)
    assert same_bits(cache.v, v)
    if not outs:
        return
    ref = exact(q, k, v, is_causal=True, enable_gqa=True, splits=splits)
    assert ref.output_ratio(np.concatenate([out.output for _, out in outs], axis=-2)) <= 1
    assert ref.lse_ratio(np.concatenate([out.lse for _, out in outs], axis=-1)) <= 1
    ends = np.cumsum([n for n, _ in outs])
    alone = sum(int(end) for end, (n, _) in zip(ends, outs, strict=True) if n == 1)
    assert keys_read == 2 * 2 * group * 5 * alone


def test_a_cache_refuses_what_does_not_fit():
    k, v = normal(2, 3, 4), normal(2, 3, 5)
    cache = KVCache(k, v, capacity=4)
    with pytest.raises(ValueError, match=r"k\.shape=\(2, 2, 4\): .*at most 1 tokens"):
        cache.append(k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match=r"k\.shape=\(1, 1, 4\): .*\(2, 'n', 4\)"):
        cache.append(k[:1, :1], v[:1, :1])
    with pytest.raises(ValueError, match=r"v\.shape=\(2, 1, 4\): .*\(2, 'n', 5\)"):
        cache.append(k[:, :1], k[:, :1])
    with pytest.raises(ValueError, match=r"v\.shape=\(2, 2, 5\)"):
        cache.append(k[:, :1], v[:, :2])
    with pytest.raises(TypeError, match=r"k\.dtype=.*float64.*float32"):
        cache.append(k[:, :1].astype(float), v[:, :1])
    with pytest.raises(ValueError, match=r"k\.shape=\(3,\)"):
        KVCache(k[0, :, 0], v, capacity=4)
    with pytest.raises(ValueError, match="capacity=2"):
        KVCache(k, v, capacity=2)
    with pytest.raises(TypeError, match=r"v\.dtype='float64': expected float32"):
        KVCache(k, v.astype(float), capacity=4)
    with pytest.raises(TypeError, match=r"k\.dtype='int64'"):
        KVCache(k.astype(int), v.astype(int), capacity=4)
    with pytest.raises(ValueError, match=r"q\.shape=\(2, 4, 4\): expected at most 3 queries"):
        cache.attend(normal(2, 4, 4))
    assert cache.length == 3
    cache.append(k[:, :1], v[:, :1])
    assert cache.length == cache.capacity == 4


def test_flash_decodings_times_read_the_keys_once_at_what_an_a100_can():
    """Flash-Decoding: 64.4 and 106.6 µs at 65,536 and 131,072 keys are 1.04 and 1.26 TB/s.

    16 query heads, two key heads, d = 128: a tile holds the eight queries of a key head.
    """
    peak = device("a100").hbm_bytes_per_second
    for Nk, microseconds, published in ((65536, 64.4, 1.04), (131072, 106.6, 1.26)):
        cost = fs.io_cost(
            "split_kv", N=8, Nk=Nk, d=128, heads=2, Br=8, Bc=128, dtype="float16", splits=54
        )
        rate = cost.total_bytes / (microseconds * 1e-6)
        assert rate / 1e12 == pytest.approx(published, abs=0.02)
        assert rate < peak


def test_the_table_of_parts_in_the_documentation_is_what_the_model_says():
    size = {"N": 1, "Nk": 65536, "d": 128, "heads": 16, "Br": 1, "Bc": 128, "dtype": "float16"}
    page = (Path(__file__).parents[1] / "docs" / "decoding.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line[:3].strip("| ").isdecimal()]
    one = fs.io_cost("split_kv", **size, splits=1).total_bytes
    assert len(rows) == 5
    for row in rows:
        n = int(row.split("|")[1])
        run = waves("flash2", **size, device="h200", blocks_an_sm=2, splits=n)
        moved = fs.io_cost("split_kv", **size, splits=n).total_bytes
        more = f"{100 * (moved / one - 1):.3f} %" if n > 1 else "0"
        assert row == (
            f"| {n} | {16 * n} | {100 * run.utilisation:.1f} % | {run.span} | "
            f"{moved / 1e6:.1f} | {more} |"
        )
    assert f"published kernel, {usual_splits(16, 1, 65536, 128)} here" in page


def test_the_command_runs_any_number_of_parts_and_says_which_are_refused():
    runner = CliRunner()
    shape = ["--shape", "1,2,64,8", "--tiles", "16,8", "--json", "-a", "split_kv"]
    for parts_ in (1, 3, 9):
        result = runner.invoke(cli.app, ["run", *shape, "--splits", str(parts_), "--backward"])
        assert result.exit_code == 0, result.output
        forward, *backward = json.loads(result.stdout)["records"]
        assert forward["reads"]["K"] == 4 * 2 * 64 * 8
        assert forward["reads"].get("Lp", 0) == (parts_ * 2 * 64 if parts_ > 1 else 0)
        assert all(record["pass"] == "backward" for record in backward)
    alone = runner.invoke(cli.app, ["run", "--splits", "2"])
    assert "--splits: expected only with --algorithm split_kv" in " ".join(alone.output.split())
    io = ["io", "-N", "1", "--Nk", "4096", "--heads", "4", "-a", "split_kv", "--json"]
    for option, expected in ((["--splits", "5"], 5), ([], usual_splits(4, 1, 4096, 64))):
        (record,) = json.loads(runner.invoke(cli.app, [*io, *option]).stdout)["records"]
        assert record["reads"]["Lp"] == 4 * expected
