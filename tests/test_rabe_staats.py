"""Chunked attention saves memory and no traffic; online softmax without tiles of Q neither way."""

import math
from functools import reduce

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import flashsim as fs
from flashsim.algorithms.rabe_staats import combine, rabe_staats_attention
from flashsim.cost.counts import QUERY_CHUNK, Head
from flashsim.cost.io import expected_cost
from flashsim.masks import Mask
from flashsim.memory import Machine
from flashsim.online_softmax import finish, merge, of_tile
from flashsim.problem import checked
from flashsim.reference import exact
from strategies import DTYPES, calls, same_bits, tilings

large_tiles = st.tuples(st.integers(5, 90), st.integers(5, 40))
ARRAYS = fs.ALGORITHMS["rabe_staats"].arrays


def moved(traffic):
    return [{n: x for n, x in c.items() if x} for c in (traffic.reads, traffic.writes)]


@settings(max_examples=30)
@given(
    calls(dtypes=DTYPES, max_n=2 * QUERY_CHUNK + 20), large_tiles, st.none() | st.integers(40, 4000)
)
def test_several_chunks_of_queries_are_exact_and_counted(call, tiles, sram):
    how = {**call.what, "sram": sram}
    try:
        out = fs.attention(*call, algorithm="rabe_staats", tiles=tiles, **how)
    except fs.SramOverflow:
        return
    ref, cost = exact(*call, **call.what), expected_cost(out, *call, **how)
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1
    assert moved(out.traffic) == moved(cost)
    assert out.sram_peak_elements == cost.sram_elements
    assert out.sram_peak_bytes == cost.sram_bytes
    assert out.extra_hbm_elements == cost.extra_hbm_elements
    assert out.traffic.total_bytes == cost.total_bytes


@settings(max_examples=30)
@given(calls(max_n=50), tilings, st.integers(1, 30), st.integers(1, 30))
def test_chunks_of_any_size_have_the_same_bits_on_hbm(call, tiles, Cr, Cc):
    problem = checked(*call, **call.what)
    at = (0,) * (problem.q.ndim - 2)
    head = problem.head
    rows = min(Cr, head.Nq) * -(-head.Nk // Cc)
    shapes = {
        "Sc": (Cr, Cc), "Pc": (Cr, Cc), "Oc": (rows, head.dv), "lc": (rows,), "mc": (rows,),
        "O": (head.Nq, head.dv), "L": (head.Nq,),
    }  # fmt: skip
    machine, runs = Machine(poison=True), []
    for counted in (False, True):
        arrays = {name: np.full(shapes[name], np.nan, np.float32) for name in ARRAYS}
        given_ = problem.inputs(at)
        wrapped = machine.hbm(**given_, **arrays) if counted else given_ | arrays
        with np.errstate(all="ignore"):
            rabe_staats_attention(
                *wrapped.values(), Cr=Cr, Cc=Cc, Br=tiles[0], Bc=tiles[1], Bs=3,
                scale=problem.scale, drop=problem.dropout(at),
                mask=problem.mask(at, machine if counted else None),
            )  # fmt: skip
        runs.append(arrays)
    assert all(same_bits(runs[0][name], runs[1][name]) for name in ARRAYS)
    assert machine.resident == []
    ref = exact(*call, **call.what)
    off = np.abs(runs[0]["O"] - ref.output[at])
    assert (off <= ref.output_bound[at]).all()


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_partial_results_add_up_as_the_states_of_online_softmax_do(chunks, rows, Br, seed):
    rng = np.random.default_rng(seed)
    states = []
    for _ in range(chunks):
        S = np.where(rng.random((rows, 3)) < 0.6, rng.normal(0, 9, (rows, 3)), -np.inf)
        states.append(of_tile(S, rng.standard_normal((3, 2))))
    O, L = np.full((rows, 2), np.nan), np.full(rows, np.nan)
    Oc, lc, mc = (np.concatenate([getattr(s, name) for s in states]) for name in "Olm")
    combine(Oc, lc, mc, O, L, Br=Br)
    output, lse = finish(reduce(merge, states))
    np.testing.assert_allclose(O, output, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(L, lse, rtol=1e-12, atol=1e-12)


def cost_of(name, N, d=64):
    return fs.io_cost(name, N=N, d=d, Br=64, Bc=64, sram=100_000)


def test_memory_grows_with_the_square_root_of_n_and_traffic_with_n_squared():
    """Rabe & Staats 2021 (arXiv:2112.05682): O(sqrt(N)) memory; four times N is twice as much."""
    small, large = cost_of("rabe_staats", 2**14), cost_of("rabe_staats", 2**16)
    assert large.extra_hbm_elements == 2 * small.extra_hbm_elements
    assert large.total_elements > 14 * small.total_elements > 14 * 4 * 2**28
    chunk = 2**8  # at N = 2^16
    assert large.extra_hbm_elements == QUERY_CHUNK * (2 * chunk + chunk * (64 + 2))


def test_saving_memory_is_not_saving_traffic():
    """At N = 16384: 900 times less memory than standard attention, and more traffic."""
    N = 2**14
    standard, chunked, flash = (cost_of(name, N) for name in ("standard", "rabe_staats", "flash2"))
    assert standard.extra_hbm_elements > 900 * chunked.extra_hbm_elements
    assert chunked.total_elements > standard.total_elements > 2 * flash.total_elements


@given(st.integers(1, 12), st.sampled_from([1, 2, 8, 32, 64]), st.integers(1, 9))
def test_dense_square_counts_are_the_formula(n, Br, d):
    """With whole chunks: 4 N^2 + (3 Tk + 2 Tr + 1) N d + 5 Tk N, Tk = N / sqrt(N)."""
    N = (8 * n) ** 2
    Tk, Tr = 8 * n, N // Br
    cost = fs.io_cost("rabe_staats", N=N, d=d, Br=Br, Bc=5)
    assert cost.total_elements == 4 * N * N + (3 * Tk + 2 * Tr + 1) * N * d + 5 * Tk * N


@given(st.integers(0, 10**6))
def test_a_chunk_of_keys_is_the_square_root_rounded_up(Nk):
    head = Head(Mask(3, Nk), 1, 1)
    assert (head.key_chunk - 1) ** 2 < max(1, Nk) <= head.key_chunk**2
    assert head.chunks == 3 * math.ceil(Nk / head.key_chunk)


@settings(max_examples=30)
@given(calls(dtypes=DTYPES, max_n=20), tilings)
def test_online_softmax_is_flash_attention_2_with_tiles_of_one_query(call, tiles):
    out = fs.attention(*call, algorithm="online_softmax", tiles=tiles, **call.what)
    same = fs.attention(*call, algorithm="flash2", tiles=(1, tiles[1]), **call.what)
    assert out.tiles == same.tiles
    assert same_bits(out.output, same.output)
    assert out.traffic == same.traffic


def test_without_tiles_of_q_memory_is_saved_and_traffic_is_the_most():
    N, d = 4096, 64
    cost = fs.io_cost("online_softmax", N=N, d=d, sram=100_000)
    assert cost.extra_hbm_elements == N
    assert cost.total_elements == 2 * N * N * d + 2 * N * d + N
    assert cost.total_elements > 20 * cost_of("standard", N).total_elements
    assert fs.tile_sizes(100_000, d, "optimal", "online_softmax", N)[0] == 1
