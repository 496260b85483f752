"""Paged attention: flash2 through a table, bit for bit, counted row by row; and its cache."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.algorithms.paged import paged_attention
from flashsim.cost.io import expected_cost
from flashsim.decode import KVCache
from flashsim.memory import Machine, widened
from flashsim.paging import PagedKVCache, paginate
from flashsim.problem import checked
from flashsim.reference import exact
from strategies import DTYPES, same_bits, tilings


@st.composite
def pools(draw, dtypes=DTYPES, dropout=True):
    """(q, k pages, v pages), tables and lengths, and what is to be computed.

    Pages in any order, some of them shared, the last one partly filled; NaN in every other row.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    page, batch = draw(st.integers(1, 6)), draw(st.integers(0, 4))
    lengths = [draw(st.integers(0, 20)) for _ in range(batch)]
    Nq, d, dv = draw(st.integers(0, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    dtype = draw(st.sampled_from(dtypes))
    most = max((-(-n // page) for n in lengths), default=0) + draw(st.integers(0, 1))
    pages = most * batch + 1 if draw(st.booleans()) else most + 1  # with fewer, some are shared
    q = rng.standard_normal((batch, kv_heads * group, Nq, d)).astype(dtype)
    k, v = (rng.standard_normal((pages, kv_heads, page, n)).astype(dtype) for n in (d, dv))
    tables = np.full((batch, most), draw(st.sampled_from([-1, 10**6])))
    free, seen = rng.permutation(pages), np.zeros((pages, page), bool)
    for b, n in enumerate(lengths):
        own = -(-n // page)
        fresh = pages > most + 1
        tables[b, :own] = (
            free[b * own : (b + 1) * own]
            if fresh and own == most
            else (rng.permutation(pages)[:own])
        )
        for slot in range(n):
            seen[tables[b, slot // page], slot % page] = True
    for x in (k, v):
        np.moveaxis(x, 2, 1)[~seen] = np.nan
    what = {"enable_gqa": group > 1, "is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        what["window"] = draw(st.tuples(*[st.none() | st.integers(0, 9)] * 2))
    if dropout and draw(st.booleans()):
        what |= {"dropout_p": 0.5, "seed": 3}
    return (q, k, v), {"block_tables": tables, "seq_lens": np.array(lengths, int)}, what


def in_order(pool, table, length):
    """A sequence's rows of k or v, (1, heads, length, width)."""
    rows = [pool[table[n // pool.shape[2]], :, n % pool.shape[2]] for n in range(length)]
    if not rows:
        return np.zeros((1, pool.shape[1], 0, pool.shape[3]), pool.dtype)
    return np.stack(rows, axis=1)[None]


def attend(pool, tables, what, **how):
    return fs.attention(*pool, algorithm="paged", **tables, **what, **how)


def counted(traffic):
    return [{n: x for n, x in c.items() if x} for c in (traffic.reads, traffic.writes)]


@given(pools(dropout=False), tilings)
def test_each_sequence_is_flash2_on_its_keys_in_order_bit_for_bit(pool, tiles):
    """Counted through the table: rows that hold no token, and the table, are not read."""
    (q, k, v), tables, what = pool
    out = attend(*pool, tiles=tiles)
    total = [{}, {}]
    for b, (table, n) in enumerate(zip(*tables.values(), strict=True)):
        one = fs.attention(q[b : b + 1], in_order(k, table, n), in_order(v, table, n), **what,
                           tiles=tiles)  # fmt: skip
        assert same_bits(out.output[b], one.output[0])
        assert same_bits(out.lse[b], one.lse[0])
        for mine, counts in zip(total, counted(one.traffic), strict=True):
            for name, x in counts.items():
                mine[name] = mine.get(name, 0) + x
    assert counted(out.traffic) == total


@given(pools(), tilings)
def test_executed_is_the_closed_form_and_within_the_bound(pool, tiles):
    qkv, tables, what = pool
    out = attend(*pool, tiles=tiles)
    cost = expected_cost(out, *qkv, **tables, **what)
    assert counted(out.traffic) == counted(cost)
    assert out.sram_peak_elements == cost.sram_elements
    assert out.sram_peak_bytes == cost.sram_bytes
    assert out.extra_hbm_elements == cost.extra_hbm_elements
    assert out.traffic.total_bytes == cost.total_bytes
    ref = exact(*qkv, **tables, **what)
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1
    q, k, v = qkv
    sizes = {"N": q.shape[2], "Nk": max(tables["seq_lens"], default=0), "d": q.shape[3]}
    sizes |= {"dv": v.shape[3], "heads": q.shape[1], "kv_heads": k.shape[1], "batch": len(q)}
    what = {name: x for name, x in what.items() if name in ("is_causal", "window")}
    if sizes["N"] and sizes["Nk"]:
        whole = fs.io_cost(
            "paged", **sizes, **what, Br=tiles[0], Bc=tiles[1],
            key_lengths=tables["seq_lens"].tolist(), dtype=q.dtype.name,
        )  # fmt: skip
        assert counted(whole) == counted(cost)


@given(pools(), tilings, st.randoms(use_true_random=False))
def test_where_pages_lie_changes_nothing_bit_for_bit(pool, tiles, random):
    (q, k, v), tables, what = pool
    out, order = attend(*pool, tiles=tiles), list(range(len(k)))
    random.shuffle(order)
    place = np.argsort(order)
    known = (tables["block_tables"] >= 0) & (tables["block_tables"] < len(k))
    moved = np.where(known, place[np.where(known, tables["block_tables"], 0)], -7)
    again = attend((q, k[order], v[order]), {**tables, "block_tables": moved}, what, tiles=tiles)
    assert same_bits(out.output, again.output)
    assert same_bits(out.lse, again.lse)
    assert out.traffic == again.traffic


@given(pools(), tilings)
def test_the_simulated_run_is_bit_identical_to_the_plain_one(pool, tiles):
    qkv, tables, what = pool
    problem = checked(*qkv, **tables, **what)
    if not qkv[0].size or not len(qkv[0]):
        return
    at, wide = (len(qkv[0]) - 1, 0), widened(qkv[0].dtype)
    Nq, dv = qkv[0].shape[2], qkv[2].shape[3]
    machine = Machine(poison=True)
    plain, simulated = (
        {"O": np.full((Nq, dv), np.nan, wide), "L": np.full(Nq, np.nan, wide)} for _ in range(2)
    )
    how = {"Br": tiles[0], "Bc": tiles[1], "scale": problem.scale, "mask": problem.mask(at)}
    how |= {"drop": problem.dropout(at), **problem.paging(at)}
    inputs = problem.inputs(at)
    with np.errstate(all="ignore"):
        paged_attention(*inputs.values(), *plain.values(), **how)
        paged_attention(*machine.hbm(**inputs).values(), *machine.hbm(**simulated).values(), **how)
    assert all(same_bits(plain[name], simulated[name]) for name in plain)
    assert machine.resident == []


def test_a_shared_prefix_is_read_by_every_sequence_that_has_it():
    """Two sequences of 6 and 5 tokens in pages of 4, the first page the same: 11 rows of K."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 1, 4, 8)).astype(np.float32)
    q = rng.standard_normal((2, 1, 1, 8)).astype(np.float32)
    out = fs.attention(
        q, k, v, algorithm="paged", block_tables=[[2, 0], [2, 1]], seq_lens=[6, 5], tiles=(1, 4)
    )
    assert out.traffic.reads == {"Q": 16, "K": 11 * 8, "V": 11 * 8}
    log = []
    machine = Machine(log=log)
    how = {"Br": 1, "Bc": 4, "table": np.array([2, 0]), "page": 4, "scale": 1.0}
    how |= {"mask": checked(q[0], k[0, :, :1].repeat(6, 1), k[0, :, :1].repeat(6, 1)).mask((0,))}
    how["drop"] = lambda P, i, j: P
    flat = {"Q": q[0, 0], "K": k.reshape(12, 8), "V": v.reshape(12, 8)}
    flat |= {"O": np.empty((1, 8), np.float32), "L": np.empty(1, np.float32)}
    paged_attention(*machine.hbm(**flat).values(), **how)
    assert [e.where for e in log if e.name == "K" and e.kind == "read"] == ["8:12", "0:2"]
    log.clear()
    paged_attention(*machine.hbm(**flat).values(), **{**how, "Bc": 6})
    assert [e.where for e in log if e.name == "K" and e.kind == "read"] == ["8:12 and 0:2"]


def test_one_head_and_one_sequence_need_no_axes_for_them():
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 3, 4, 8)).astype(np.float32)
    q = rng.standard_normal((2, 8)).astype(np.float32)
    how = {"algorithm": "paged", "block_tables": [[1, 2]], "seq_lens": [7]}
    plain = fs.attention(q, k[1:].reshape(8, 8)[:7], v[1:].reshape(8, 8)[:7])
    assert same_bits(fs.attention(q, k, v, **how).output, plain.output)
    with_heads = fs.attention(q[None], k[:, None], v[:, None], **how)
    assert same_bits(with_heads.output, plain.output[None])


X = np.ones((3, 2, 4, 5), np.float32)  # three pages of four rows, two heads
GOOD = {"block_tables": [[0, 1], [2, -1]], "seq_lens": [7, 4]}


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"block_tables": [[0, 3], [2, -1]]}, r"block_tables\[0, 1\]=3: .*a page from 0 to 2"),
        ({"block_tables": [[0, -1], [2, -1]]}, r"block_tables\[0, 1\]=-1: .*a page from 0 to 2"),
        ({"block_tables": [[1, 1], [2, -1]]}, r"block_tables\[0\]=\[1, 1\]: .*each page once"),
        ({"block_tables": [[0, 1]]}, r"block_tables.shape=\(1, 2\): .*\(2, pages of a sequence\)"),
        ({"block_tables": [0, 1]}, r"block_tables.shape=\(2,\)"),
        ({"block_tables": [[0.0, 1.0], [2.0, 0.0]]}, r"block_tables.dtype=.*an integer type"),
        ({"seq_lens": [9, 4]}, r"seq_lens\[0\]=9: .*from 0 to 8: 2 pages of 4 rows"),
        ({"seq_lens": [-1, 4]}, r"seq_lens\[0\]=-1: .*from 0"),
        ({"seq_lens": [7]}, r"seq_lens.shape=\(1,\): .*\(2,\)"),
        ({"seq_lens": [7.0, 4.0]}, "seq_lens.dtype="),
        ({"seq_lens": None}, r"seq_lens=None: .*the keys of each sequence"),
        ({"block_tables": None}, r"block_tables=None: .*the pages of each sequence"),
    ],
)
def test_bad_tables_and_lengths_are_refused(wrong, error):
    q = np.ones((2, 2, 1, 5), np.float32)
    fs.attention(q, X, X, algorithm="paged", **GOOD)
    with pytest.raises((ValueError, TypeError), match=error):
        fs.attention(q, X, X, algorithm="paged", **{**GOOD, **wrong})


def test_pages_of_another_shape_and_what_has_no_meaning_beside_them_are_refused():
    q = np.ones((2, 2, 1, 5), np.float32)
    with pytest.raises(ValueError, match=r"k\.shape=\(2, 4, 5\): .*\(pages, heads, page, d\)"):
        fs.attention(q, X[0], X[0], algorithm="paged", **GOOD)
    with pytest.raises(ValueError, match=r"k\.shape"):
        fs.attention(q, X[:, :1], X[:, :1], algorithm="paged", **GOOD)
    with pytest.raises(ValueError, match=r"k\.shape=\(3, 1, 4, 5\): .*2 heads"):
        fs.attention(q, X[:, :1], X[:, :1], algorithm="paged", **GOOD)
    with pytest.raises(ValueError, match=r"v\.shape"):
        fs.attention(q, X, X[:2], algorithm="paged", **GOOD)
    other_pages = X.reshape(6, 2, 2, 5)  # as many rows, in pages of two
    with pytest.raises(ValueError, match=r"v\.shape=\(6, 2, 2, 5\): .*\(3, 2, 4\) and a width"):
        fs.attention(q, X, other_pages, algorithm="paged", **GOOD)
    nobody = fs.attention(q[:, :0], X[:, :0], X[:, :0], algorithm="paged", **GOOD)
    assert nobody.output.shape == (2, 0, 1, 5)
    with pytest.raises(ValueError, match=r"block_tables='given': .*for algorithm='flash2'"):
        fs.attention(q, X, X, **GOOD)
    with pytest.raises(ValueError, match=r"attn_mask='given': .*as block_tables is given"):
        fs.attention(q, X, X, algorithm="paged", **GOOD, attn_mask=np.ones((1, 1), bool))
    with pytest.raises(ValueError, match=r"cu_seqlens_q='given': .*as block_tables is given"):
        fs.attention(q, X, X, algorithm="paged", **GOOD, cu_seqlens_q=[0, 1])
    out = fs.attention(q, X, X, algorithm="paged", **GOOD)
    with pytest.raises(ValueError, match=r"algorithm='paged': .*one that has a backward pass"):
        out.backward(out.output)


def test_a_page_of_16_wastes_at_most_15_slots_a_sequence():
    """Kwon et al. 2023 (arXiv:2309.06180): waste is in the last page alone; 15 at N = 1 mod 16."""
    k = np.zeros((40, 1, 16, 1), np.float32)
    for n in range(1, 50):
        cache = PagedKVCache(k.copy(), k.copy())
        for length in (n, 2 * n):
            cache.add(*np.zeros((2, 1, length, 1), np.float32))
        assert cache.wasted_slots == -n % 16 + -2 * n % 16 <= 2 * 15
    assert max(-n % 16 for n in range(1, 50)) == 15


@given(st.integers(1, 5), st.integers(0, 9), st.lists(st.sampled_from("abf"), max_size=12))
def test_decoding_in_pages_is_decoding_in_a_row_whatever_is_forked(page, prompt, actions):
    """Two sequences that append and fork in turns, beside a plain cache for each."""
    rng = np.random.default_rng(prompt)
    pool = PagedKVCache(*np.full((2, 200, 2, page, 4), np.nan, np.float32))

    def tokens(n):
        return rng.standard_normal((2, 2, n, 4)).astype(np.float32)

    first = tokens(prompt)
    plain = {pool.add(*first): KVCache(*first, capacity=60)}
    for action in actions:
        numbers = sorted(plain)
        which = numbers[-1] if action == "b" else numbers[0]
        if action == "f":
            fork = pool.fork(which)
            plain[fork] = KVCache(plain[which].k, plain[which].v, capacity=60)
            continue
        new = tokens(1)
        pool.append(which, *new)
        plain[which].append(*new)
    held = [p for table in pool.tables for p in table]
    assert pool.free_pages == 200 - len(set(held))
    assert all(len(set(table)) == len(table) for table in pool.tables)
    numbers = sorted(plain)
    n = min(3, *pool.lengths)  # the last tokens, each over itself and all before it
    q = rng.standard_normal((len(numbers), 2, n, 4)).astype(np.float32)
    out = pool.attend(numbers, q, tiles=(1, 3))
    for n, (number, cache) in enumerate(plain.items()):
        one = cache.attend(q[n], algorithm="flash2", tiles=(1, 3))
        assert pool.lengths[number] == cache.length
        assert same_bits(out.output[n], one.output)
        assert same_bits(out.lse[n], one.lse)


def test_a_pool_refuses_what_does_not_fit_and_stays_as_it_was():
    cache = PagedKVCache(*np.zeros((2, 2, 1, 4, 3), np.float32))
    a = cache.add(*np.ones((2, 1, 5, 3), np.float32))
    with pytest.raises(ValueError, match=r"pages=2: .*1 more"):
        cache.append(a, *np.ones((2, 1, 4, 3), np.float32))
    with pytest.raises(ValueError, match=r"pages=2: .*1 more"):
        cache.fork(a)
    with pytest.raises(ValueError, match=r"pages=2: .*1 more"):
        cache.add(*np.ones((2, 1, 1, 3), np.float32))
    with pytest.raises(ValueError, match=r"k\.shape=\(2, 1, 3\): .*\(1, n, 3\)"):
        cache.append(a, *np.ones((2, 2, 1, 3), np.float32))
    with pytest.raises(TypeError, match=r"k\.dtype"):
        cache.append(a, *np.ones((2, 1, 1, 3)))
    with pytest.raises(ValueError, match=r"sequence=1"):
        cache.append(1, *np.ones((2, 1, 1, 3), np.float32))
    with pytest.raises(ValueError, match=r"k\.shape"):
        PagedKVCache(*np.zeros((2, 2, 1, 4), np.float32))
    fresh = np.zeros((2, 1, 4, 3), np.float32)
    with pytest.raises(TypeError, match=r"k=.*a NumPy array"):
        PagedKVCache(fresh.tolist(), fresh)
    with pytest.raises(TypeError, match=r"v\.dtype='float64': expected float32"):
        PagedKVCache(fresh, fresh.astype(float))
    with pytest.raises(TypeError, match=r"k\.dtype='int64'"):
        PagedKVCache(fresh.astype(int), fresh.astype(int))
    with pytest.raises(ValueError, match="v='a read-only array'"):
        PagedKVCache(fresh, np.broadcast_to(fresh[0], fresh.shape))
    with pytest.raises(ValueError, match=r"q\.shape=.*at most 5 queries"):
        cache.attend([a], np.ones((1, 1, 6, 3), np.float32))
    assert (cache.tables, cache.lengths, cache.free_pages) == ([[0, 1]], [5], 0)


def test_a_cleared_sequence_frees_the_pages_that_no_other_shares():
    cache = PagedKVCache(*np.zeros((2, 5, 1, 4, 3), np.float32))
    a = cache.add(*np.ones((2, 1, 10, 3), np.float32))
    b = cache.fork(a)
    assert (cache.tables, cache.free_pages) == ([[0, 1, 2], [0, 1, 3]], 1)
    cache.clear(a)
    assert (cache.tables[a], cache.lengths[a], cache.free_pages) == ([], 0, 2)
    cache.append(a, *np.ones((2, 1, 5, 3), np.float32))
    assert cache.tables == [[2, 4], [0, 1, 3]]
    cache.clear(b)
    assert cache.free_pages == 3


def test_the_command_puts_the_real_keys_in_pages():
    runner = CliRunner()
    run = ["run", "-a", "paged", "-a", "flash2", "--tiles", "32,32", "--json"]
    result = runner.invoke(cli.app, [*run, "--page-size", "16", "--causal"])
    assert result.exit_code == 0, result.output
    paged, plain = json.loads(result.stdout)["records"]
    assert paged["reads"]["K"] < plain["reads"]["K"]  # the second text has 24 tokens of 180
    assert paged["writes"] == plain["writes"]
    alone = runner.invoke(cli.app, run)
    assert "--algorithm paged: expected --page-size too" in " ".join(alone.output.split())
    other = runner.invoke(cli.app, ["run", "-a", "flash2", "--page-size", "16"])
    assert "--page-size: expected only with --algorithm paged" in " ".join(other.output.split())


@pytest.mark.parametrize(
    "lengths, error",
    [
        ([11, 3], "lengths=.*at least 0 and below 11"),
        ([-1, 3], "lengths=.*at least 0"),
        ([1.5, 2], "lengths="),
        ("a", "lengths="),
        ([10], "lengths=.*2 numbers"),
    ],
)
def test_lengths_that_do_not_fit_what_goes_into_pages_are_refused(lengths, error):
    k = np.zeros((2, 3, 10, 4))
    with pytest.raises((ValueError, TypeError), match=error):
        paginate(k, k, 4, lengths)
    with pytest.raises(ValueError, match=r"k\.shape=\(3, 10, 4\): expected \(N, d\) or"):
        paginate(k[0], k[0], 4)
    with pytest.raises(ValueError, match=r"v\.shape"):
        paginate(k, k[:, :, 1:], 4)


def test_what_pages_cost_needs_no_pages():
    result = CliRunner().invoke(cli.app, ["io", "-a", "paged", "-a", "flash2", "--json"])
    assert result.exit_code == 0, result.output
    paged, plain = json.loads(result.stdout)["records"]
    assert (paged["reads"], paged["writes"]) == (plain["reads"], plain["writes"])


def test_keys_in_pages_are_those_given_whatever_the_order():
    k, v = np.random.default_rng(0).standard_normal((2, 2, 3, 10, 4))
    pool = paginate(k, v, 4, [10, 3])
    for b, n in enumerate([10, 3]):
        for x, pages in zip((k, v), pool, strict=False):
            rows = in_order(pages, pool[2]["block_tables"][b], n)
            assert same_bits(rows[0], np.ascontiguousarray(x[b, :, :n]))
    assert pool[2]["block_tables"].tolist() != [[0, 1, 2], [3, -1, -1]]
    assert pool[2]["block_tables"][1, 1:].tolist() == [-1, -1]
    k_pages, v_pages, how = paginate(k[0, 0], v[0, 0], 3)
    assert k_pages.shape == (4, 3, 4)
    out = fs.attention(k[0, 0], k_pages, v_pages, algorithm="paged", **how)
    assert same_bits(out.output, fs.attention(k[0, 0], k[0, 0], v[0, 0]).output)
