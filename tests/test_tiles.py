"""Tile rules: the searching ones against every tile there is; where the paper's does not fit."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.algorithms import ALGORITHMS
from flashsim.cost.counts import Head
from flashsim.cost.devices import DEVICES
from flashsim.cost.tiles import RULES, choices, optimal, papers_overflow
from flashsim.masks import Mask
from flashsim.problem import local_layout

# What the traffic does not depend on, or not without a layout.
TOLD = ("", "block_mask", "fp8", "block_tables")
DENSE = {name: row for name, row in ALGORITHMS.items() if row.requires in TOLD}
PASSES = [(name, False) for name in DENSE] + [(n, True) for n, row in DENSE.items() if row.backward]
each_pass = pytest.mark.parametrize("which", PASSES, ids=lambda p: f"{p[0]}, {p[1]}")


def row_of(which):
    name, backward = which
    return ALGORITHMS[name].backward["literal"] if backward else ALGORITHMS[name]


def moved(row, head, tiles, room=math.inf, room_bytes=math.inf):
    more = row.more(head, room, room_bytes)
    return row.count(head, Br=tiles[0], Bc=tiles[1], elide=False, **more).total_elements


def best_of_all(row, head, step, room, room_bytes):
    """The fewest elements moved by any tiles of multiples of step that fit; None without any."""
    sides = [range(step, -(-max(1, N) // step) * step + 1, step) for N in (head.Nq, head.Nk)]
    found = None
    for Br in sides[0]:
        for Bc in sides[1]:
            elements, size = row.needs(head, Br, Bc)
            if elements <= room and size <= room_bytes:
                here = moved(row, head, (Br, Bc), room, room_bytes)
                found = here if found is None else min(found, here)
    return found


@st.composite
def heads(draw, algorithm, step):
    """Nq other than Nk, V of another width; of an approximation also how coarse it is."""
    lengths = st.integers(1, 12 * step)
    Nq, Nk, d, dv, coarse = (draw(lengths) for _ in range(5))
    sizes = {"d": d, "dv": dv, "stored": 2, "wide": 4}
    if ALGORITHMS[algorithm].requires == "projection":
        return Head(Mask(Nq, coarse), unmixed=Nk, **sizes)
    if ALGORITHMS[algorithm].requires == "local_window":
        return Head(Mask(Nq, Nq, layout=local_layout(coarse, Nq, Nq, None)), **sizes)
    return Head(Mask(Nq, Nk), **sizes)


@pytest.mark.parametrize(
    "which", [*PASSES, *((name, False) for name in ALGORITHMS if name not in DENSE)], ids=str
)
@given(data=st.data(), step=st.sampled_from([1, 1, 16]), in_bytes=st.booleans())
def test_the_searching_rules_find_the_best_of_all_tiles(which, data, step, in_bytes):
    """Ragged tails included, and bytes, of which float32 counts double."""
    row, head = row_of(which), data.draw(heads(which[0], step))
    M = data.draw(st.integers(1, row.needs(head, 12 * step, 12 * step)[0]))
    budget = (math.inf, 3 * M) if in_bytes else (M, math.inf)
    best = best_of_all(row, head, step, *budget)
    if best is None:
        with pytest.raises(ValueError, match=r"expected at least \d+ (elements|bytes), the small"):
            optimal(row, head, *budget, step=step)
        return
    Br, Bc = optimal(row, head, *budget, step=step)
    elements, size = row.needs(head, Br, Bc)
    assert elements <= budget[0]
    assert size <= budget[1]
    assert Br == row.rows or Br % step == 0
    assert Bc % step == 0
    assert Br < head.Nq + step
    assert Bc < head.Nk + step
    assert moved(row, head, (Br, Bc), *budget) == best


@pytest.mark.parametrize(
    "algorithm, head, M, tiles",
    [
        # 29 keys take 5 turns of 6 as of 7, but V's 7 columns take 1 of 7 and 2 of 6.
        ("square-tiles", Head(Mask(20, 29), 5, 7), 210, (20, 7)),
        # 24 queries take 2 turns of 12 as of 17, but the 14 mixed keys take 1 of 17 and 2 of 12.
        ("linformer", Head(Mask(24, 14), 2, 26, unmixed=15), 506, (17, 1)),
    ],
)
def test_a_side_is_not_evened_out_where_that_costs_turns_over_something_else(
    algorithm, head, M, tiles
):
    row = ALGORITHMS[algorithm]
    assert optimal(row, head, M) == tiles
    assert moved(row, head, tiles, M) == best_of_all(row, head, 1, M, math.inf)


@each_pass
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("N, d, M", [(1000, 32, 20000), (65536, 64, 83456), (100, 128, 116224)])
def test_tile_sizes_gives_the_tiles_of_every_rule_for_every_pass(which, rule, N, d, M):
    name, backward = which
    Br, Bc = fs.tile_sizes(M, d, rule, name, N, backward=backward)
    row, head = row_of(which), Head(Mask(N, N), d, d)
    fits = row.needs(head, Br, Bc)[0] <= M
    assert fits or rule == "paper"
    assert rule != "hardware" or Br == row.rows or Br % 16 == 0
    assert rule != "hardware" or Bc % 16 == 0
    if fits:
        best = fs.tile_sizes(M, d, "optimal", name, N, backward=backward)
        assert moved(row, head, best, M) <= moved(row, head, (Br, Bc), M)


def test_hardware_tiles_may_be_longer_than_the_sequence_by_less_than_16():
    assert fs.tile_sizes(10**6, 8, "hardware", "flash2", N=100) == (112, 112)
    assert fs.tile_sizes(10**6, 8, "optimal", "flash2", N=100) == (100, 100)


@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 20000))
def test_choices_are_the_tiles_of_each_rule_with_what_they_need_and_move(N, d, M):
    found = list(choices(N, d, M))
    for choice in found:
        name = choice.algorithms[0]
        tiles = fs.tile_sizes(M, d, choice.rule, name, N, backward=choice.backward)
        row, head = row_of((name, choice.backward)), Head(Mask(N, N), d, d)
        assert (choice.Br, choice.Bc) == tiles
        assert choice.need_elements == row.needs(head, *tiles)[0]
        assert choice.moved_elements == moved(row, head, tiles, M)
        assert choice.rule == "paper" or choice.need_elements <= M
    papers = [(name, c.backward) for c in found if c.rule == "paper" for name in c.algorithms]
    assert sorted(papers) == sorted(PASSES)


# Elements by which the paper's tiles are over what a block may use, in float16: d = 64, d = 128.
# By hand for a T4 at d = 64: Bc = 128, Br = 64 need 2 * 128 * 64 + 2 * 64 * 64 + 64 * 128 + 128.
OVER = {
    "t4": (128, 4224), "v100": (-3968, 9408), "a100-40": (-12544, 12160),
    "a100-80": (-12544, 12160), "rtx3090": (-4352, 9999), "rtx4090": (-4352, 9999),
    "l4": (-4352, 9999), "h100": (-20736, 3968), "h100-pcie": (-20736, 3968),
    "h200": (-20736, 3968), "b200": (-20736, 3968), "mi300x": (128, 4224),
}  # fmt: skip


@pytest.mark.parametrize("key", DEVICES)
def test_the_papers_tiles_fit_a_gpu_for_d_64_but_not_for_d_128(key):
    """In float16. At d = 64 they do not on 64 KB, which 128 elements more would cure."""
    M = DEVICES[key].sram_bytes_per_block // 2
    assert (papers_overflow(M, 64), papers_overflow(M, 128)) == OVER[key]


def need_by_hand(M, d):
    """K, V; Q, O; S; l, m of the tiles of FA1 (arXiv:2205.14135), Algorithm 1, line 1."""
    Bc = -(-M // (4 * d))
    Br = min(Bc, d)
    return 2 * Bc * d + 2 * Br * d + Br * Bc + 2 * Br


@given(st.integers(1, 256), st.integers(1, 10**6))
def test_the_papers_overflow_is_that_of_the_tiles_worked_out_by_hand(d, M):
    assert papers_overflow(M, d) == need_by_hand(M, d) - M


@pytest.mark.parametrize("d, last", [(64, 33_855), (128, 133_247)])
def test_the_last_chip_that_the_papers_tiles_overflow(d, last):
    """The ceiling moves it beyond 8 d (d + 1), from where multiples of 4 d fit."""
    assert papers_overflow(last, d) > 0
    assert all(papers_overflow(M, d) <= 0 for M in range(last + 1, last + 8 * d))
    assert papers_overflow(8 * d * (d + 1), d) == 0


@pytest.mark.parametrize("rule", ["optimal", "hardware"])
def test_a_rule_that_searches_needs_the_length(rule):
    with pytest.raises(ValueError, match=f'N=None: expected the sequence length: rule="{rule}"'):
        fs.tile_sizes(8192, 64, rule)


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - set(DENSE)))
def test_where_n_d_and_m_do_not_tell_the_traffic_nothing_is_searched(algorithm):
    with pytest.raises(ValueError, match=f"rule='optimal': expected .* for '{algorithm}'"):
        fs.tile_sizes(8192, 64, "optimal", algorithm, N=512)


def test_the_smallest_hardware_tiles_are_named_when_they_do_not_fit():
    """16 x 16 tiles at d = 64: 64 * 64 of Q, K, V, O, 256 of S, 32 of l and m."""
    need = 4 * 16 * 64 + 16 * 16 + 2 * 16
    says = f"M={need - 1}: expected at least {need} elements, the smallest tiles of multiples of 16"
    with pytest.raises(ValueError, match=says):
        fs.tile_sizes(need - 1, 64, "hardware", N=512)
    assert fs.tile_sizes(need, 64, "hardware", N=512) == (16, 16)


def invoke(*arguments, columns=80):
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return runner.invoke(cli.app, ["tiles", *map(str, arguments)])


def test_the_command_shows_every_pass_with_every_rule_that_fits():
    found = json.loads(invoke("-N", 2000, "-d", 32, "--sram", 9000, "--json").stdout)
    records = found["records"]
    assert [
        {name: r[name] for name in ("rule", "Br", "Bc", "need_elements", "moved_elements")}
        for r in records
    ] == [
        {
            "rule": c.rule, "Br": c.Br, "Bc": c.Bc,
            "need_elements": c.need_elements, "moved_elements": c.moved_elements,
        }
        for c in choices(2000, 32, 9000)
    ]  # fmt: skip
    for r in records:
        assert r["over_elements"] == r["need_elements"] - 9000
        assert r["fits"] == (r["over_elements"] <= 0)
        assert (r["ratio_to_optimal"] >= 1) or not r["fits"]
        assert r["rule"] != "optimal" or r["ratio_to_optimal"] == 1
    assert found["papers_overflow_elements"]["t4"] == {"32": -6080, "64": 128, "128": 4224}
    assert found["held"] is True


def test_the_command_says_by_how_much_the_papers_tiles_are_over_and_what_does_not_fit_at_all():
    shown = invoke("--sram", 8192, "-N", 2000).stdout
    assert "flash1 paper 32 x 32 9280 NO, +1088" in " ".join(shown.split())
    assert "No tile fits: flash1, backward: hardware." in shown
    assert "t4                 NO, +128    NO, +4224" in shown


def test_m_is_the_shared_memory_of_a_block_in_elements():
    found = json.loads(invoke("--device", "a100", "--dtype", "float32", "--json").stdout)
    assert found["M"] == 163 * 1024 // 4


def test_a_chip_too_small_for_any_tile_still_gets_its_page():
    assert invoke("--sram", 1).exit_code == 0
    records = json.loads(invoke("--sram", 1, "--json").stdout)["records"]
    assert {(r["rule"], r["fits"], r["ratio_to_optimal"]) for r in records} == {
        ("paper", False, None)
    }


@pytest.mark.parametrize("option", ["-N", "-d", "--dv", "--sram"])
def test_a_size_that_no_cell_holds_is_refused_by_name(option):
    for size in (10**9 + 1, 10**400):
        result = invoke(option, size)
        assert (result.exit_code, result.stdout) == (2, "")
        said = " ".join(result.stderr.split())
        assert f"{option.strip('-')}={size}: expected an integer of at least 1 and below" in said


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_number_is_cut_at_any_width(columns):
    shown = invoke("-N", 2**20, "-d", 256, "--device", "v100", columns=columns).stdout
    assert "…" not in shown
    assert all(len(line) <= columns for line in shown.splitlines())
