"""Executed = closed form, array by array; the formulas; the extremes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import flashsim as fs
from flashsim import memory, online_softmax
from flashsim.algorithms import (
    ALGORITHMS,
    flash1,
    flash2,
    flash3,
    flash4,
    rabe_staats,
    resident_scores,
    split_kv,
    square_tiles,
    standard,
)
from flashsim.cost.io import expected_cost
from flashsim.problem import checked
from strategies import BACKWARDS, DTYPES, VARIANTS, Call, calls, tilings, variants

# The modules that take exponentials.
EXPONENTIALS = (
    flash1, flash2, flash3, flash4, standard, square_tiles, resident_scores, rabe_staats, split_kv,
    online_softmax,
)  # fmt: skip


def run(call, variant, **how):
    algorithm, convention = variant
    return fs.attention(*call, algorithm=algorithm, convention=convention, **call.what, **how)


def formula(call, out, variant, **how):
    return expected_cost(out, *call, convention=variant[1], **call.what, **how)


def counted(traffic):
    """Per array, without the arrays that moved nothing."""
    return [{n: x for n, x in c.items() if x} for c in (traffic.reads, traffic.writes)]


def normal(N, d, heads=1):
    return Call(*np.random.default_rng(0).standard_normal((3, heads, N, d), dtype=np.float32))


@given(calls(dtypes=DTYPES), variants, tilings)
def test_executed_is_the_closed_form_for_each_array(call, variant, tiles):
    out = run(call, variant, tiles=tiles)
    cost = formula(call, out, variant)
    assert counted(out.traffic) == counted(cost)
    assert out.sram_peak_elements == cost.sram_elements
    assert out.sram_peak_bytes == cost.sram_bytes
    assert out.extra_hbm_elements == cost.extra_hbm_elements
    assert out.traffic.total_bytes == cost.total_bytes


@given(calls(dtypes=DTYPES), variants, tilings, st.integers(1, 2500), st.booleans())
def test_it_overflows_exactly_when_the_closed_form_does_not_fit(
    call, variant, tiles, room, in_bytes
):
    """Standard attention's softmax takes what rows fit, so its need depends on the budget."""
    budget = {"sram_bytes": 4 * room} if in_bytes else {"sram": room}
    fits = expected_cost(
        run(call, variant, tiles=tiles), *call, convention=variant[1], **call.what, **budget
    )
    need = fits.sram_bytes if in_bytes else fits.sram_elements
    if need > next(iter(budget.values())):
        with pytest.raises(fs.SramOverflow, match="does not fit on the chip"):
            run(call, variant, tiles=tiles, **budget)
    else:
        out = run(call, variant, tiles=tiles, **budget)
        assert counted(out.traffic) == counted(fits)
        assert (out.sram_peak_bytes if in_bytes else out.sram_peak_elements) == need


@given(calls(dtypes=DTYPES), variants, st.integers(1, 4000), st.booleans())
def test_the_strict_rule_fits_whatever_is_asked(call, variant, room, in_bytes):
    budget = {"sram_bytes": 4 * room} if in_bytes else {"sram": room}
    smallest = ALGORITHMS[variant[0]].needs(checked(*call, **call.what).head, 1, 1)[in_bytes]
    (name, value), refused = next(iter(budget.items())), None
    try:
        out = run(call, variant, **budget)
    except fs.SramOverflow:
        pytest.fail("tiles that the strict rule chose do not fit")
    except ValueError as error:
        refused = str(error)
    if refused:
        assert f"{name}={value}" in refused
        assert smallest > value
    else:
        assert (out.sram_peak_bytes if in_bytes else out.sram_peak_elements) <= value


@given(calls(max_n=20, dropout=False), st.sampled_from([*VARIANTS, *BACKWARDS]), tilings)
def test_flops_and_exponentials_are_those_that_ran(call, variant, tiles):
    ran = {"flops": 0, "exps": 0}

    class Tile(np.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
            if ufunc is np.matmul:
                ran["flops"] += 2 * inputs[0].shape[0] * inputs[0].shape[1] * inputs[1].shape[1]
            inputs, out = (
                tuple(x.view(np.ndarray) if isinstance(x, Tile) else x for x in group)
                for group in (inputs, out)
            )
            return getattr(ufunc, method)(*inputs, **({"out": out} if out else {}), **kwargs)

    exp, load = flash2.exp, memory.on_chip_copy

    def counting_exp(s, m, out=None):
        ran["exps"] += s.size
        return exp(s, m, out=out)

    with pytest.MonkeyPatch.context() as patch:
        for module in EXPONENTIALS:
            patch.setattr(module, "exp", counting_exp)
        patch.setattr(memory, "on_chip_copy", lambda view: load(view).view(Tile))
        out = run(call, variant, tiles=tiles)
        forward, cost = dict(ran), formula(call, out, variant)
        assert forward == {"flops": cost.flops, "exps": cost.exps}
        if not ALGORITHMS[variant[0]].backward:
            return
        out.backward(np.ones_like(out.output))
    back = formula(call, out, variant, backward=True)
    assert ran == {"flops": cost.flops + back.flops, "exps": cost.exps + back.exps}


sizes = st.integers(1, 200)


@given(sizes, st.integers(1, 40), st.integers(1, 64), st.integers(1, 64))
def test_dense_square_counts_are_the_formulas_of_the_papers(N, d, Br, Bc):
    Tr, Tc = -(-N // min(Br, N)), -(-N // min(Bc, N))

    def total(algorithm, convention="literal"):
        return fs.io_cost(algorithm, N=N, d=d, Br=Br, Bc=Bc, convention=convention).total_elements

    assert total("standard") == 4 * N * N + (2 * Tr + 2) * N * d
    assert total("flash1") == 3 * N * d + 2 * N + Tc * (3 * N * d + 4 * N)
    assert total("flash1", "elided") == (3 * Tc + 1) * N * d + (4 * Tc - 2) * N
    assert total("flash2") == (2 + 2 * Tr) * N * d + N
    assert total("flash3") == total("flash4") == total("flash2")
    assert total("online_softmax") == 2 * N * N * d + 2 * N * d + N
    Td = -(-d // min(Bc, N))
    assert total("standard-unfused") == 9 * N * N + (2 * Tr + 2) * N * d
    assert total("square-tiles") == (2 * Tr + Tc + 1) * N * d + (Td + 1) * N * N + 4 * N
    assert total("resident-scores") == (2 * Tr + 3 * Tc + 1) * N * d + N
    assert total("resident-scores", "elided") == (2 * Tr + 3 * Tc - 1) * N * d + N


@given(st.integers(1, 20), st.integers(1, 16), st.integers(1, 16))
def test_causal_counts_with_square_tiles_are_half_and_the_diagonal(T, B, d):
    N = T * B
    cost = fs.io_cost("flash2", N=N, d=d, Br=B, Bc=B, is_causal=True)
    assert cost.total_elements == (T + 3) * N * d + N
    cost = fs.io_cost("flash1", N=N, d=d, Br=B, Bc=B, is_causal=True, convention="elided")
    assert 2 * cost.total_elements == (3 * T + 5) * N * d + 4 * T * N


@given(st.integers(1, 40), st.integers(1, 12))
def test_a_row_of_scores_longer_than_the_chip_is_read_twice(N, d):
    short = fs.io_cost("standard", N=N, d=d, Br=4, Bc=4, sram=N + 2)
    long = fs.io_cost("standard", N=N, d=d, Br=4, Bc=4, sram=N + 1)
    assert long.total_elements - short.total_elements == N * N


def test_at_one_row_tile_flash2_moves_each_input_once():
    """Executed: 4 N d + N; published-kernel FlashAttention with one column tile: 4 N d + 2 N."""
    N, d = 96, 16
    call = normal(N, d)
    assert run(call, ("flash2", "literal"), tiles=(N, 8)).traffic.total_elements == 4 * N * d + N
    elided = run(call, ("flash1", "elided"), tiles=(8, N)).traffic.total_elements
    assert elided == 4 * N * d + 2 * N


@pytest.mark.parametrize(
    "variant", [("flash1", "literal"), ("flash1", "elided"), ("flash2", "literal")]
)
def test_at_the_smallest_chip_standard_attention_moves_less(variant):
    """4 d + 3 elements hold one row of each; below, nothing runs."""
    N, d = 64, 8
    call, smallest = normal(N, d), 4 * d + 3
    out = run(call, variant, sram=smallest)
    assert out.tiles == (1, 1)
    assert out.traffic.total_elements > 4 * N * N + 4 * N * d
    assert fs.attention(*call, algorithm="standard").traffic.total_elements == 4 * N * N + 4 * N * d
    with pytest.raises(ValueError, match=f"sram={smallest - 1}.*at least {smallest} elements"):
        run(call, variant, sram=smallest - 1)


def test_extra_memory_is_quadratic_for_standard_and_linear_for_flash():
    call = normal(50, 8, heads=3)
    names = ("standard", "flash1", "flash2")
    extra = {name: fs.attention(*call, algorithm=name).extra_hbm_elements for name in names}
    assert extra == {"standard": 3 * 2 * 50 * 50, "flash1": 3 * 2 * 50, "flash2": 3 * 50}


@given(
    st.sampled_from(["flash1", "flash2", "standard"]),
    st.integers(1, 24),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(8, 400),
)
def test_the_optimal_rule_is_the_best_of_all_tiles(algorithm, N, d, dv, M):
    best = None
    for Br in range(1, N + 1):
        for Bc in range(1, N + 1):
            cost = fs.io_cost(algorithm, N=N, d=d, dv=dv, Br=Br, Bc=Bc)
            fits = ALGORITHMS[algorithm].needs(_head(N, d, dv), Br, Bc)[0] <= M
            if fits and (best is None or cost.total_elements < best):
                best = cost.total_elements
    if best is None:
        with pytest.raises(ValueError, match="at least"):
            fs.tile_sizes(M, d, "optimal", algorithm, N=N, dv=dv)
        return
    Br, Bc = fs.tile_sizes(M, d, "optimal", algorithm, N=N, dv=dv)
    assert ALGORITHMS[algorithm].needs(_head(N, d, dv), Br, Bc)[0] <= M
    assert fs.io_cost(algorithm, N=N, d=d, dv=dv, Br=Br, Bc=Bc).total_elements == best


def _head(N, d, dv):
    from flashsim.cost.counts import Head
    from flashsim.masks import Mask

    return Head(Mask(N, N), d, dv)


@given(st.sampled_from(["flash1", "flash2", "standard"]), st.integers(1, 64), st.integers(8, 10**6))
def test_the_strict_rule_gives_the_largest_tiles_of_its_shape(algorithm, d, M):
    assume(4 * d + 3 <= M)
    Br, Bc = fs.tile_sizes(M, d, "strict", algorithm)
    long = max(Br, Bc)
    need = ALGORITHMS[algorithm].needs
    head = _head(10**9, d, d)

    def at(n):
        return (n, min(n, d)) if ALGORITHMS[algorithm].outer == "Q" else (min(n, d), n)

    assert (Br, Bc) == at(long)
    assert need(head, *at(long))[0] <= M < need(head, *at(long + 1))[0]


@pytest.mark.parametrize("d", [16, 32, 64])
def test_the_papers_tiles_fit_in_the_chip_only_above_8_d_d_plus_1(d):
    """For 4d | M up to 4d^2 they overflow by x^2 + 2x, x = M / 4d; they fit from 8 d (d + 1) on."""
    need = ALGORITHMS["flash1"].needs
    head = _head(10**6, d, d)
    for x in range(1, 4 * d):
        M = 4 * d * x
        Br, Bc = fs.tile_sizes(M, d, "paper", "flash1")
        over = need(head, Br, Bc)[0] - M
        assert (Br, Bc) == (min(x, d), x)
        if x <= d:
            assert over == x * x + 2 * x
        assert (over <= 0) == (8 * d * (d + 1) <= M)


def test_the_bytes_of_half_precision_are_two_but_for_accumulators():
    call = Call(*np.ones((3, 8, 4), np.float16))
    for algorithm, O_bytes in (("flash1", 4), ("flash2", 2)):
        traffic = fs.attention(*call, algorithm=algorithm, tiles=(4, 4)).traffic
        sizes = traffic.item_bytes
        assert (sizes["Q"], sizes["K"], sizes["V"], sizes["O"]) == (2, 2, 2, O_bytes)
        assert {sizes[n] for n in ("l", "m", "L") if n in sizes} == {4}


def test_a_million_keys_take_no_time():
    cost = fs.io_cost("flash2", N=2**20, d=64, sram=41984, is_causal=True, window=(4096, None))
    assert cost.total_elements > 0


@given(
    st.integers(1, 60), st.integers(1, 60), st.integers(1, 4),
    st.lists(st.integers(0, 60), max_size=4), tilings, st.booleans(),
    st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)), variants,
)  # fmt: skip
def test_io_cost_of_sizes_is_the_cost_of_the_call(
    N, Nk, d, lengths, tiles, causal, window, variant
):
    lengths = [min(n, Nk) for n in lengths]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((len(lengths), 2, n, d), dtype=np.float32) for n in (N, Nk, Nk))
    padding = np.arange(Nk) < np.reshape(lengths, (-1, 1))
    what = {"is_causal": causal, "window": window}
    out = run(Call(q, k, v, {**what, "key_padding_mask": padding}), variant, tiles=tiles)
    cost = fs.io_cost(
        variant[0], N=N, Nk=Nk, d=d, heads=2, batch=len(lengths), key_lengths=lengths,
        Br=tiles[0], Bc=tiles[1], convention=variant[1], **what,
    )  # fmt: skip
    assert counted(cost) == counted(out.traffic)
    assert cost.sram_elements == out.sram_peak_elements


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_queries_nothing_is_read(variant):
    none, keys = np.zeros((0, 4), np.float32), np.zeros((9, 4), np.float32)
    out = run(Call(none, keys, keys), variant, tiles=(2, 2))
    assert out.traffic.total_elements == out.sram_peak_elements == 0


@given(calls(max_n=20, dropout=False), tilings)
def test_a_softmax_in_two_passes_takes_every_exponential_twice_and_one_for_each_rescaling(
    call, tiles
):
    ran, exp = [], standard.exp

    def counting_exp(s, m, out=None):
        ran.append(s.size)
        return exp(s, m, out=out)

    row = replace(ALGORITHMS["standard"], more=lambda *_: {"Bs": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "standard", row)
        patch.setattr(standard, "exp", counting_exp)
        out = run(call, ("standard", "literal"), tiles=tiles)
        cost = formula(call, out, ("standard", "literal"))
    assert sum(ran) == cost.exps


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("d, dv", [(3, 5), (5, 3)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_without_keys_the_rows_are_still_held(variant, d, dv, dtype):
    call = Call(*(np.zeros(shape, dtype) for shape in ((9, d), (0, d), (0, dv))))
    out = run(call, variant, tiles=(4, 2))
    cost = formula(call, out, variant)
    assert counted(out.traffic) == counted(cost)
    assert out.sram_peak_elements == cost.sram_elements
    assert out.sram_peak_bytes == cost.sram_bytes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_array_has_the_item_size_of_the_closed_form(variant, dtype):
    call = Call(*np.ones((3, 8, 4), dtype), {"attn_mask": np.zeros((8, 8), np.float16)})
    out = run(call, variant, tiles=(4, 4))
    cost = formula(call, out, variant)
    moved = {*cost.reads, *cost.writes}
    assert {n: cost.item_bytes[n] for n in moved} == {n: out.traffic.item_bytes[n] for n in moved}
    assert cost.item_bytes["mask"] == 2


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "standard"])
def test_a_budget_in_bytes_gives_the_tiles_of_as_many_elements(algorithm):
    """In float32, at every budget from the smallest, so also where the tiles fill it."""
    call = normal(8, 3)
    for room in range(15, 80):
        elements = fs.attention(*call, algorithm=algorithm, sram=room)
        in_bytes = fs.attention(*call, algorithm=algorithm, sram_bytes=4 * room)
        assert elements.tiles == in_bytes.tiles
        assert elements.traffic == in_bytes.traffic


def test_the_papers_tile_is_rounded_up_and_its_short_side_is_at_most_d():
    """FA1 (arXiv:2205.14135), Algorithm 1, line 1: Bc = ceil(M / 4d), Br = min(Bc, d)."""
    for M, tiles in ((1, (1, 1)), (16, (1, 1)), (17, (2, 2)), (65, (4, 5)), (96, (4, 6))):
        assert fs.tile_sizes(M, 4, "paper", "flash1") == tiles
        assert fs.tile_sizes(M, 4, "paper", "flash2") == tiles[::-1]


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "standard"])
@pytest.mark.parametrize("N, M", [(10, 40), (10, 60), (13, 50), (13, 90), (7, 200)])
def test_of_equally_good_tiles_the_optimal_rule_takes_even_ones_that_fill_the_chip(algorithm, N, M):
    """The shortest long side that needs no more turns, then the longest short one that fits."""
    row, head = ALGORITHMS[algorithm], _head(N, 2, 2)
    fitting = [
        (Br, Bc)
        for Br in range(1, N + 1)
        for Bc in range(1, N + 1)
        if row.needs(head, Br, Bc)[0] <= M
    ]

    def order(tiles):
        long, short = tiles if row.outer == "Q" else tiles[::-1]
        moved = fs.io_cost(algorithm, N=N, d=2, Br=tiles[0], Bc=tiles[1]).total_elements
        return moved, long, -short

    assert fs.tile_sizes(M, 2, "optimal", algorithm, N=N) == min(fitting, key=order)
