"""What the cost models cannot use is refused: the message names argument, value, and accepted."""

import math

import numpy as np
import pytest

from flashsim import papers
from flashsim.cost import approximations, small_sram
from flashsim.cost.bounds import Work, best
from flashsim.cost.cache import Cache, dram_cost, sizes_around
from flashsim.cost.devices import device
from flashsim.cost.grid import grid
from flashsim.cost.roofline import Roofline, tile_cycles
from flashsim.cost.schedule import tile_times
from flashsim.cost.splits import best_splits, usual_splits
from flashsim.cost.tiles import choices, papers_overflow
from flashsim.cost.waves import blocks_per_sm, schedule, waves
from flashsim.masks import Mask

MASK = Mask(8, 8)
WORK = Work.of(MASK, 4, 4)
H200, B200 = device("h200"), device("b200")
DRAM = {"N": 64, "d": 16, "Br": 16, "Bc": 16}

REFUSED = {
    "best: work": (lambda x: best(x, 16), "work", ["W", None]),
    "best: M": (lambda x: best(WORK, x), "M", [0, -5, math.nan, "a", True]),
    "best: backward": (lambda x: best(WORK, 16, backward=x), "backward", ["yes", 1]),
    "best: exact": (lambda x: best(WORK, 16, exact=x), "exact", ["yes", None]),
    "Work.of: mask": (lambda x: Work.of(x, 4, 4), "mask", [None, (8, 8)]),
    "Work.of: d": (lambda x: Work.of(MASK, x, 4), "d", [-3, 0, 1.5, "4"]),
    "Work.of: dv": (lambda x: Work.of(MASK, 4, x), "dv", [-3, 0, None]),
    "Work.of: heads": (lambda x: Work.of(MASK, 4, 4, x), "query_heads", [0, -1, 2.0]),
    "Work.of: key heads": (lambda x: Work.of(MASK, 4, 4, 2, x), "key_heads", [0, "2"]),
    "Work": (lambda x: Work(x, 1, 1, 1, 1), "scores", [-1, math.nan]),
    "choices: N": (lambda x: choices(x, 16, 1000), "N", [0, -1, 8.0]),
    "choices: d": (lambda x: choices(8, x, 1000), "d", [0, None]),
    "choices: M": (lambda x: choices(8, 16, x), "M", [-1, 0, math.inf]),
    "choices: dv": (lambda x: choices(8, 16, 1000, x), "dv", [0, "4"]),
    "papers_overflow: M": (lambda x: papers_overflow(x, 4), "M", [0, 1.5]),
    "papers_overflow: d": (lambda x: papers_overflow(1000, x), "d", [0, -1]),
    "tile_cycles: gpu": (tile_cycles, "gpu", ["b200", None]),
    "tile_cycles: Br": (lambda x: tile_cycles(B200, Br=x), "Br", [-128, math.nan, 1.5]),
    "tile_cycles: Bc": (lambda x: tile_cycles(B200, Bc=x), "Bc", [0]),
    "tile_cycles: d": (lambda x: tile_cycles(B200, d=x), "d", [0]),
    "tile_cycles: backward": (lambda x: tile_cycles(B200, backward=x), "backward", ["no"]),
    "tile_cycles: ctas": (lambda x: tile_cycles(B200, ctas=x), "ctas", [3, 0, 1.0]),
    "Roofline: gpu": (lambda x: Roofline(x, "float16", 1, 1, 1), "gpu", ["h100", None]),
    "Roofline: dtype": (lambda x: Roofline(H200, x, 1, 1, 1), "dtype", ["int3"]),
    "Roofline: bytes": (
        lambda x: Roofline(H200, "float16", x, 1, 1), "hbm_bytes", [-1, math.nan, math.inf, "1"],
    ),
    "Roofline: flops": (lambda x: Roofline(H200, "float16", 1, x, 1), "flops", [-1, None]),
    "Roofline: exps": (lambda x: Roofline(H200, "float16", 1, 1, x), "exps", [-1]),
    "blocks_per_sm: gpu": (lambda x: blocks_per_sm(x, 5), "gpu", ["h200"]),
    "blocks_per_sm: bytes": (lambda x: blocks_per_sm(H200, x), "shared_bytes", [-5, 0.5]),
    "blocks_per_sm: threads": (lambda x: blocks_per_sm(H200, 5, threads=x), "threads", [0, -1]),
    "blocks_per_sm: registers": (
        lambda x: blocks_per_sm(H200, 5, threads=32, registers=x), "registers", [0, "8"],
    ),
    "schedule: work": (
        lambda x: schedule(x, 4), "work", [[-1, 2], [1.7, 2.9], ["a"], [[1]], 3, [True]],
    ),
    "schedule: slots": (lambda x: schedule([1], x), "slots", [0, 1.5]),
    "waves: algorithm": (lambda x: waves(x, **DRAM), "algorithm", ["nope"]),
    "best_splits: blocks": (lambda x: best_splits(x, 108, 4), "row_blocks", [0, -1, 4.5]),
    "best_splits: slots": (lambda x: best_splits(4, x, 4), "slots", [0, None]),
    "best_splits: tiles": (lambda x: best_splits(4, 108, x), "key_tiles", [0, -1]),
    "usual_splits: heads": (lambda x: usual_splits(x, 1, 64, 64), "heads", [-1, 1.5]),
    "usual_splits: d": (lambda x: usual_splits(1, 1, 64, x), "d", [0]),
    "Cache: sizes": (lambda x: Cache(x, 10), "sizes", [[-1, 2], [1.5], [math.nan]]),
    "Cache: capacity": (
        lambda x: Cache([1, 2], x), "capacity_bytes", [-5, math.nan, 2**63],
    ),
    "Cache: owners": (lambda x: Cache([1, 2], 9, owners=x), "owners", [[0, 256], [0], [-1, 0]]),
    "dram_cost: l2": (
        lambda x: dram_cost("flash2", l2_bytes=x, **DRAM), "l2_bytes", [-1, 10**30, 1.5],
    ),
    "sizes_around": (sizes_around, "l2_bytes", [-1, math.nan]),
    "grid: algorithms": (lambda x: grid(x, N=64, d=64), "algorithms", [5, None, [], [5]]),
    "grid: devices": (lambda x: grid(N=64, d=64, devices=x), "devices", [5]),
    "grid: backward": (lambda x: grid(N=64, d=64, backward=x), "backward", ["x", 1]),
    "where": (lambda x: grid("flash2", N=64, d=64).where(**{x: 1}), "axis", ["foo"]),
    "crossovers": (lambda x: papers.tables()[18].crossovers(x), "method", ["Nope", 5]),
    "points": (lambda x: papers.tables()[18].points(x), "method", ["Nope"]),
    "point: algorithm": (
        lambda x: small_sram.point(x, N=8, d=4, M=99), "algorithm", ["nope", None],
    ),
    "point: N": (lambda x: small_sram.point("flash2", N=x, d=4, M=99), "N", [0, 1.5]),
    "point: M": (lambda x: small_sram.point("flash2", N=8, d=4, M=x), "M", [-1, math.nan]),
    "compare": (lambda x: small_sram.compare(8, 4, [x]), "ratios", [-1, math.nan, "1"]),
    "crossover": (lambda x: small_sram.crossover(8, x), "d", [0, "4"]),
    "tile_times": (lambda x: tile_times(H200, fp8=x), "fp8", [1, "no"]),
    "approximations": (approximations.points, "gpu", ["h200", None]),
    "lengths": (lambda x: approximations.points(H200, [x]), "lengths", [0, 1.5]),
    "memory_seconds": (H200.memory_seconds, "bytes_", [-1, math.nan]),
    "rows": (papers.rows, "row", [[5], ["nope"], "nope"]),
}  # fmt: skip


CASES = {
    f"{what}, {x!r}": (call, name, x) for what, (call, name, xs) in REFUSED.items() for x in xs
}


@pytest.mark.parametrize("case", CASES)
def test_an_unusable_argument_is_named_with_its_value_and_what_is_accepted(case):
    call, name, value = CASES[case]
    with pytest.raises((ValueError, TypeError)) as caught:
        call(value)
    said = str(caught.value)
    assert said.startswith(f"{name}=")
    shown = (
        value[0] if isinstance(value, list) and value and name in ("row", "algorithms") else value
    )
    assert repr(shown) in said
    assert "expected " in said


@pytest.mark.parametrize("take", [waves, dram_cost])
@pytest.mark.parametrize("missing", ["N", "d", "Br", "Bc"])
def test_a_missing_size_is_named(take, missing):
    with pytest.raises(TypeError, match=f"^{missing} is missing: expected an integer"):
        take("flash2", **{name: x for name, x in DRAM.items() if name != missing})


@pytest.mark.parametrize("take", [waves, dram_cost])
def test_a_size_that_there_is_none_of_is_named(take):
    with pytest.raises(TypeError, match=r"^foo=1: expected .*N, d"):
        take("flash2", **DRAM, foo=1)


def test_no_limit_may_be_none_or_infinite_and_one_name_is_one_row():
    assert best(WORK, None) == best(WORK, math.inf)
    assert [row.key for row in papers.rows("fa1-memory-flash")] == ["fa1-memory-flash"]
    assert schedule(np.array([1, 2], np.uint8), 1).span == schedule([1, 2], 1).span == 3
    assert schedule([], 2).span == 0
