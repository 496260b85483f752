"""What tiles need is the least they run with, and "optimal" the best of what runs: by running."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashsim as fs
from flashsim.algorithms import ALGORITHMS
from flashsim.cost.counts import Head
from flashsim.cost.tiles import optimal, usable
from flashsim.masks import Mask
from flashsim.problem import checked, local_layout

LAYOUTS = ("block_mask", "block_tables", "fp8")  # the same loops as rows that run without
FORWARD = [name for name, row in ALGORITHMS.items() if row.requires not in LAYOUTS]
PASSES = [(name, False) for name in FORWARD]
PASSES += [(name, True) for name in FORWARD if ALGORITHMS[name].backward]
each_pass = pytest.mark.parametrize("which", PASSES, ids=lambda p: f"{p[0]}, {p[1]}")


@st.composite
def problems(draw, algorithm, longest=9):
    """q, k, v of one head, the keywords of the call, and its head."""
    Nq, Nk = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    d, dv = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row, coarse = ALGORITHMS[algorithm], draw(st.integers(1, longest))
    what = {}
    if row.requires == "local_window":
        Nk, what = Nq, {"local_window": min(coarse, Nq)}
    elif row.requires == "projection":
        what = {"projection": min(coarse, Nk)}
    elif "splits" in row.options:
        what = {"splits": coarse}
    return problem(Nq, Nk, d, dv, what)


def problem(Nq, Nk, d, dv, what):
    shapes = (Nq, d), (Nk, d), (Nk, dv)
    rng = np.random.default_rng(0)
    call = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    splits = {name: x for name, x in what.items() if name == "splits"}
    rest = {name: x for name, x in what.items() if name != "splits"}
    head = dataclasses.replace(checked(*call, **rest).head, **splits)
    return call, what, head


def row_of(which):
    name, backward = which
    return ALGORITHMS[name].backward["literal"] if backward else ALGORITHMS[name]


def run(which, call, what, tiles, **budget):
    """Elements that the pass moves within the budget; None where its tiles do not fit."""
    name, backward = which
    try:
        if not backward:
            return fs.attention(
                *call, algorithm=name, tiles=tiles, **what, **budget
            ).traffic.total_elements
        out = fs.attention(*call, algorithm=name, tiles=tiles, **what)
        limits = budget.get("sram", math.inf), budget.get("sram_bytes", math.inf)
        out.call = dataclasses.replace(out.call, limits=limits)
        out.backward(np.ones_like(out.output))
    except fs.SramOverflow:
        return None
    return out.traffic_backward.total_elements


@each_pass
@given(data=st.data())
@settings(max_examples=15)
def test_tiles_run_with_what_they_need_and_not_with_less(which, data):
    call, what, head = data.draw(problems(which[0]))
    row = row_of(which)
    sides = st.tuples(st.integers(1, head.Nq), st.integers(1, head.Nk))
    tiles = usable(row, data.draw(sides), head)
    for name, need in zip(("sram", "sram_bytes"), row.needs(head, *tiles), strict=True):
        assert run(which, call, what, tiles, **{name: need}) is not None
        assert run(which, call, what, tiles, **{name: need - 1}) is None


@each_pass
def test_the_closed_form_fits_in_what_tiles_need_and_not_in_less(which):
    row = row_of(which)
    for Nq, Nk, d, dv in itertools.product((1, 4, 9), (1, 4, 9), (1, 3), (1, 2)):
        for head in heads(which[0], Nq, Nk, d, dv):
            for tiles in itertools.product((1, 2, 3, 4, 9), repeat=2):
                Br, Bc = usable(row, tiles, head)
                for at, need in enumerate(row.needs(head, Br, Bc)):
                    for budget in (need, need - 1):
                        room = (budget, math.inf) if at == 0 else (math.inf, budget)
                        cost = row.count(head, Br=Br, Bc=Bc, elide=False, **row.more(head, *room))
                        takes = (cost.sram_elements, cost.sram_bytes)[at]
                        assert (takes <= budget) == (budget == need)


def heads(algorithm, Nq, Nk, d, dv):
    """Heads of these sizes; of an approximation as coarse as it comes."""
    requires, sizes = ALGORITHMS[algorithm].requires, {"d": d, "dv": dv, "stored": 2, "wide": 4}
    if requires == "projection":
        return [Head(Mask(Nq, n), unmixed=Nk, **sizes) for n in range(1, Nk + 1)]
    if requires == "local_window":
        own = (local_layout(w, Nq, Nq) for w in range(1, Nq + 1))
        return [Head(Mask(Nq, Nq, layout=layout), **sizes) for layout in own]
    return [Head(Mask(Nq, Nk), splits=splits, **sizes) for splits in (1, 2)]


@each_pass
@given(data=st.data())
@settings(max_examples=4)
def test_the_optimal_tiles_move_the_fewest_of_all_that_run(which, data):
    call, what, head = data.draw(problems(which[0], longest=4))
    row = row_of(which)
    least = row.needs(head, 1, 1)[0]
    M = data.draw(st.integers(least, max(least, row.needs(head, head.Nq, head.Nk)[0])))
    every = [(Br, Bc) for Br in range(1, head.Nq + 1) for Bc in range(1, head.Nk + 1)]
    moved = [run(which, call, what, usable(row, tiles, head), sram=M) for tiles in every]
    chosen = usable(row, optimal(row, head, M), head)
    assert run(which, call, what, chosen, sram=M) == min(x for x in moved if x is not None)


@pytest.mark.parametrize("name", ["standard", "standard-unfused"])
def test_tiles_whose_softmax_gradient_takes_rows_may_be_larger_than_if_it_took_a_tile(name):
    """4 x 4 tiles of N = 4, d = 1 hold 24 elements in a product, and would 36 in the softmax."""
    row, (call, what, head) = row_of((name, True)), problem(4, 4, 1, 1, {})
    assert run((name, True), call, what, (4, 4), sram=27 if name == "standard" else 32)
    assert row.needs(head, 4, 4)[0] <= (24 if name == "standard" else 32)


def test_the_optimal_backward_tiles_of_standard_attention_on_an_h200():
    """By hand: 232 x 342 tiles hold 64 (232 + 342) + 232 x 342 = 116,080 of 116,224 elements."""
    N, d, M = 4096, 64, 116_224
    Br, Bc = fs.tile_sizes(M, d, "optimal", "standard", N=N, backward=True)
    best = fs.io_cost("standard", N=N, d=d, Br=Br, Bc=Bc, backward=True, sram=M)
    assert best.sram_elements <= M
    assert best.total_elements <= 134_217_728
