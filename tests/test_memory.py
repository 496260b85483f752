"""The chip and its budget: nothing gets around it, nothing outlives its turn."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flashsim as fs
from flashsim import algorithms
from flashsim.algorithms import ALGORITHMS
from flashsim.memory import (
    Event,
    Hbm,
    Machine,
    SramOverflow,
    blocks,
    chip_of,
    column,
    row,
    tiles,
    turns,
    widened,
)
from flashsim.reference import exact, exact_gradients
from strategies import BACKWARDS, VARIANTS

attention_module = sys.modules["flashsim.attention"]  # the package has a function of that name


def matrix(rows=6, columns=2, dtype=np.float32):
    return np.arange(rows * columns).astype(dtype).reshape(rows, columns)


def hbm(A, **how):
    machine = Machine(**how)
    return machine, machine.hbm(A=A)["A"]


def test_a_load_is_a_counted_read_only_copy():
    machine, A = hbm(matrix())
    tile = A[1:4]
    assert tile.tolist() == matrix()[1:4].tolist()
    assert not np.shares_memory(tile, A.data)
    assert machine.traffic.reads == {"A": 6}
    assert machine.used_elements == machine.peak_elements == 6
    with pytest.raises(ValueError, match="read-only"):
        tile[0] = 1


def test_a_store_is_counted_and_must_fit_its_place():
    machine, A = hbm(matrix())
    A[0:2] = np.ones((2, 2), np.float32)
    assert A.data[:2].tolist() == [[1, 1], [1, 1]]
    assert machine.traffic.writes == {"A": 4}
    with pytest.raises(
        ValueError, match=r"A\[0:2\] has shape \(2, 2\), the tile to store has shape \(2,\)"
    ):
        A[0:2] = np.ones(2)


USES = {
    "A + 1": lambda A: A + 1,
    "1 + A": lambda A: 1 + A,
    "A @ A": lambda A: A @ A,
    "ones @ A": lambda A: np.ones((2, 2)) @ A,
    "-A": lambda A: -A,
    "A < 0": lambda A: A < 0,
    "exp(A)": lambda A: np.exp(A),
    "sum(A)": lambda A: np.add.reduce(A),
    "ones - A": lambda A: np.ones(2) - A,
    "asarray(A)": np.asarray,
}


@pytest.mark.parametrize("use", USES)
def test_arithmetic_on_an_array_in_hbm_is_refused(use):
    machine, A = hbm(matrix())
    with pytest.raises(TypeError, match="A lives in HBM: load a tile first"):
        USES[use](A)
    assert machine.traffic.total_elements == 0


@pytest.mark.parametrize(
    "dtype, wide", [("float16", "float32"), ("float64", "float64"), ("bool", "bool")]
)
def test_tiles_are_widened_and_counted_at_their_size_in_hbm(dtype, wide):
    machine, A = hbm(matrix(dtype=dtype))
    assert A[0:2].dtype == widened(np.dtype(dtype)) == wide
    assert machine.used_bytes == 4 * np.dtype(dtype).itemsize
    assert machine.traffic.read_bytes == 4 * np.dtype(dtype).itemsize


def test_tiles_leave_when_their_turn_ends_also_by_break_and_exception():
    machine, A = hbm(matrix())
    for _ in tiles(4, A):
        assert machine.used_elements in (8, 4)
    assert machine.used_elements == 0
    for _ in tiles(2, A):
        machine("S", np.ones(3))
        break
    assert machine.resident == []

    def fails():
        for _ in tiles(2, A):
            for _ in turns(1, A):
                machine("S", np.ones(3))
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert machine.resident == []
    assert machine.used_elements == machine.used_bytes == 0


def test_an_evicted_tile_is_poisoned():
    machine, A = hbm(matrix(), poison=True)
    for _, Ai in tiles(2, A):
        kept, born = Ai, machine("born", np.ones(2))
        assert np.isfinite(kept).all()
    assert np.isnan(kept).all()
    assert np.isnan(born).all()
    assert np.isfinite(A.data).all()


def test_a_budget_is_enforced_before_the_tile_is_resident():
    machine, A = hbm(matrix(), sram=7)
    machine("S", np.ones((2, 2), np.float32))
    expected = r"A does not fit on the chip: 4 \+ 4 = 8 elements \(S 2x2, A 2x2\), but SRAM holds 7"
    with pytest.raises(SramOverflow, match=expected):
        A[0:2]
    assert machine.used_elements == machine.peak_elements == 4
    assert machine.traffic.reads == {}
    with pytest.raises(SramOverflow, match="SRAM holds 30 bytes"):
        Machine(sram_bytes=30)("S", np.ones(8, np.float32))
    assert issubclass(SramOverflow, MemoryError)
    assert issubclass(SramOverflow, ValueError)


def test_a_name_that_is_resident_is_replaced():
    machine = Machine(sram=6)
    machine("S", np.ones(4))
    machine("S", np.ones(6))
    assert machine.used_elements == 6
    with pytest.raises(SramOverflow):
        machine("S", np.ones(7))
    assert [(r.name, r.elements) for r in machine.resident] == [("S", 6)]


def test_only_one_budget_may_be_given():
    with pytest.raises(ValueError, match="sram_bytes=64"):
        Machine(sram=16, sram_bytes=64)


def test_a_literal_machine_charges_a_fill_and_an_eliding_one_reads_untouched_rows_for_nothing():
    for elide, fill, first in ((False, 12, 4), (True, 0, 0)):
        machine, A = hbm(matrix(), elide=elide)
        A.fill(0)
        assert machine.traffic.writes == {"A": fill}
        A[0:2]
        assert machine.traffic.reads == {"A": first}
        A[0:2] = np.ones((2, 2))
        A[0:4]
        assert machine.traffic.reads == {"A": first + (4 if elide else 8)}


def test_allocated_memory_is_counted_and_starts_as_nan():
    machine = Machine()
    A = machine.allocate("A", (3, 2), np.dtype("float32"))
    machine.allocate("B", (4,), np.dtype("float32"))
    assert np.isnan(A.data).all()
    assert machine.allocated == {"A": 6, "B": 4}
    assert machine.allocated_elements == 10


def test_a_log_holds_what_happened_in_order():
    machine, A = hbm(matrix(4), log=[])
    for i, Ai in tiles(2, A):
        machine("S", Ai + 1)
        A[i] = Ai
        break
    assert machine.log == [
        Event("read", "A", "0:2", 4),
        Event("place", "S", "", 4),
        Event("write", "A", "0:2", 4),
        Event("evict", "A", "", 4),
        Event("evict", "S", "", 4),
    ]


def test_panels_tile_a_matrix_along_its_other_axis():
    A = matrix(4, 6)
    machine, in_hbm = hbm(A)
    for X in (A, in_hbm):
        assert [t.tolist() for _, t in tiles(4, row(X, slice(1, 3)))] == [
            A[1:3, :4].tolist(),
            A[1:3, 4:].tolist(),
        ]
        assert [t.tolist() for _, t in tiles(3, column(X, slice(2, 5)))] == [
            A[:3, 2:5].tolist(),
            A[3:, 2:5].tolist(),
        ]
    assert machine.traffic.reads == {"A": 12 + 12}


def test_blocks_cover_every_row_once():
    for N in range(12):
        for B in range(1, 14):
            assert [r for b in blocks(N, B) for r in range(b.start, b.stop)] == list(range(N))


def test_a_plain_array_has_a_chip_that_does_nothing():
    S = np.ones(3)
    assert chip_of(S)("S", S) is S
    assert "Hbm(A" in repr(hbm(matrix())[1])
    assert len(hbm(matrix())[1]) == 6


PRIMES = {"Nq": 46, "Nk": 57, "d": 7, "dv": 11, "Br": 13, "Bc": 17}


# standard attention once more, with rows of S that do not fit on chip
ROWS_DO_NOT_FIT = [(name, "literal", False) for name in ("standard", "standard-unfused")]


def no_row_fits(head, sram, sram_bytes):
    return {"Bs": 0}


@pytest.fixture
def audit(monkeypatch):
    """Call it with a function: it runs under a tracer that looks at every local at every line.

    Each matrix that a frame of an algorithm holds must lie in memory that the machine has
    registered under some name; what a poisoning machine has evicted is all NaN, and dead. Gives
    back what is not so, and how many lines it looked at.
    """
    machines, bits, found, looked = [], [], [], []

    class Poisoning(Machine):
        def __init__(self, **how):
            super().__init__(poison=True, **how)
            machines.append(self)

        def _admit(self, new, replacing=None):
            super()._admit(new, replacing)
            if new.tile.dtype == bool:  # which cannot be NaN, so it looks alive for ever
                bits.append(new.tile)

    monkeypatch.setattr(attention_module, "Machine", Poisoning)
    folder = str(Path(algorithms.__file__).parent)

    def look(frame, event, arg):
        if not machines or not frame.f_code.co_filename.startswith(folder):
            return None
        looked.append(frame.f_lineno)
        resident = [r.tile for r in machines[-1].resident] + bits
        for name, x in frame.f_locals.items():
            matrix = isinstance(x, np.ndarray) and x.ndim == 2 and min(x.shape) > 1
            if not matrix or np.isnan(x).all():
                continue
            if not any(np.shares_memory(x, tile) for tile in resident):
                found.append((frame.f_code.co_name, frame.f_lineno, name, x.shape))
        return look

    def run(function):
        old = sys.gettrace()
        sys.settrace(look)
        try:
            result = function()
        finally:
            sys.settrace(old)
        return result, found, len(looked)

    return run


@pytest.mark.parametrize(
    "algorithm, convention, rows_fit",
    [(*variant, True) for variant in dict.fromkeys([*VARIANTS, *BACKWARDS])] + ROWS_DO_NOT_FIT,
)
@pytest.mark.parametrize("masked", [False, True])
def test_every_tile_sized_array_that_lives_during_a_turn_is_registered(
    audit, monkeypatch, algorithm, convention, rows_fit, masked
):
    """Forward and any backward, dropout, grouped heads; and the poisoned result is right."""
    size, entry = PRIMES, ALGORITHMS[algorithm]
    if not rows_fit:
        backward = {n: replace(b, more=no_row_fits) for n, b in entry.backward.items()}
        changed = replace(entry, more=no_row_fits, backward=backward)
        monkeypatch.setitem(ALGORITHMS, algorithm, changed)
    rng = np.random.default_rng(0)
    heads = {"q": 2, "k": 1, "v": 1}
    q, k, v = (
        rng.standard_normal((heads[name], size[n], size[w]))
        for name, n, w in (("q", "Nq", "d"), ("k", "Nk", "d"), ("v", "Nk", "dv"))
    )
    do = rng.standard_normal((2, size["Nq"], size["dv"]))
    what = {"is_causal": True, "dropout_p": 0.5, "seed": 1, "enable_gqa": True}
    if masked:
        what["attn_mask"] = rng.standard_normal((size["Nq"], size["Nk"]))
    if "splits" in entry.options:
        what["splits"] = 3

    def both_passes():
        out = fs.attention(
            q, k, v, algorithm=algorithm, convention=convention,
            tiles=(size["Br"], size["Bc"]), **what,
        )  # fmt: skip
        return out.output, *(out.backward(do, wrt_mask=masked) if entry.backward else ())

    (output, *got), found, looked = audit(both_passes)
    assert looked > 100
    assert found == []
    assert exact(q, k, v, **what).output_ratio(output) <= 1
    assert max(exact_gradients(q, k, v, do, **what).ratios(got).values(), default=0) <= 1


def test_the_audit_finds_an_unregistered_tile(audit, monkeypatch):
    """The audit itself: a chip that forgets to register must be noticed."""
    monkeypatch.setattr(Machine, "__call__", lambda self, name, tile: tile)
    q = np.random.default_rng(0).standard_normal((20, 4))
    _, found, _ = audit(lambda: fs.attention(q, q, q, tiles=(8, 8)))
    assert {name for _, _, name, _ in found} >= {"Oi", "Sij"}


def test_hbm_arrays_do_not_take_new_attributes():
    with pytest.raises(AttributeError):
        Hbm(Machine(), "A", matrix()).note = 1


CASES = [(*variant, True) for variant in VARIANTS] + ROWS_DO_NOT_FIT

BORN = {
    ("standard", True): {"Sij", "mi", "S", "li", "Oi", "P"},
    ("standard", False): {"Sij", "mi", "li", "Oi", "P"},
    ("standard-unfused", True): {"Sij", "mi", "S", "li", "Oi", "Zij"},
    ("standard-unfused", False): {"Sij", "mi", "S", "li", "Oi", "Zij"},
    ("flash1", True): {"Sij"},
    ("flash2", True): {"Oi", "li", "mi", "Sij"},
    ("split_kv", True): {"Oi", "li", "mi", "Sij"},
    ("flash3", True): {"Oi", "li", "mi", "Sij", "Pij"},
    ("flash4", True): {"Oi", "li", "mi", "Sij"},
    ("rabe_staats", True): {"Sij", "mi", "Sc", "li", "Oi", "Pc"},
    ("online_softmax", True): {"Oi", "li", "mi", "Sij"},
    ("square-tiles", True): {"Sij", "li", "mi", "Oic"},
    ("resident-scores", True): {"Sij", "li", "mi"},
}


@pytest.mark.parametrize("algorithm, convention, rows_fit", CASES)
@pytest.mark.parametrize("dtype, wide", [("float16", "float32"), ("float64", "float64")])
def test_tiles_born_on_chip_have_the_names_of_the_papers_and_the_type_of_the_scores(
    monkeypatch, algorithm, convention, rows_fit, dtype, wide
):
    """Names are what SramOverflow, the log and a recording show; types are what bytes count."""
    place, born = Machine.__call__, set()

    def watched(self, name, tile):
        born.add((name, str(tile.dtype)))
        return place(self, name, tile)

    monkeypatch.setattr(Machine, "__call__", watched)
    if not rows_fit:
        changed = replace(ALGORITHMS[algorithm], more=no_row_fits)
        monkeypatch.setitem(ALGORITHMS, algorithm, changed)
    q, k, v = np.random.default_rng(0).standard_normal((3, 9, 4)).astype(dtype)
    fs.attention(q, k, v, algorithm=algorithm, convention=convention, tiles=(4, 4))
    names = BORN[algorithm, rows_fit]
    assert born == {(name, "bool" if name == "Zij" else wide) for name in names}


def test_a_tile_is_contiguous_whatever_the_order_of_its_array():
    """Another order takes BLAS down another path, and changes last bits."""
    for A in (np.asfortranarray(matrix()), matrix()[:, ::-1], matrix(2, 6).T):
        _, in_hbm = hbm(A)
        for X in (A, in_hbm):
            for rows, tile in tiles(4, X):
                assert tile.flags.c_contiguous
                assert tile.tolist() == A[rows].tolist()


BORN_BACKWARD = {
    ("standard", True): {"dVj", "P", "dPij", "dP", "dQi", "dKj"},
    ("standard", False): {"dVj", "P", "dPij", "Di", "dP", "dQi", "dKj"},
    ("standard-unfused", True): {"dVj", "dPij", "dP", "dQi", "dKj"},
    ("standard-unfused", False): {"dVj", "dPij", "Di", "dP", "dQi", "dKj"},
    ("flash1", True): {"dKj", "dVj", "Sij", "dPij"},
    ("flash2", True): {"dKj", "dVj", "Sij", "dPij"},
    ("split_kv", True): {"dKj", "dVj", "Sij", "dPij"},
    ("flash2-two-kernel", True): {"dKj", "dVj", "Sij", "dPij", "dQi"},
    ("flash3", True): {"dKj", "dVj", "Sij", "dPij"},
}


@pytest.mark.parametrize(
    "algorithm, convention, rows_fit",
    [(*variant, True) for variant in BACKWARDS] + ROWS_DO_NOT_FIT,
)
@pytest.mark.parametrize("dtype, wide", [("float16", "float32"), ("float64", "float64")])
def test_tiles_born_in_the_backward_pass_have_names_of_their_own_and_the_type_of_the_scores(
    monkeypatch, algorithm, convention, rows_fit, dtype, wide
):
    """With grouped heads, whose gradients are summed at the end."""
    entry = ALGORITHMS[algorithm]
    if not rows_fit:
        backward = {n: replace(b, more=no_row_fits) for n, b in entry.backward.items()}
        monkeypatch.setitem(ALGORITHMS, algorithm, replace(entry, backward=backward))
    q, do = np.random.default_rng(0).standard_normal((2, 2, 9, 4)).astype(dtype)
    out = fs.attention(
        q, q[:1], q[:1], algorithm=algorithm, convention=convention, tiles=(4, 4), enable_gqa=True
    )
    place, born = Machine.__call__, set()

    def watched(self, name, tile):
        born.add((name, str(tile.dtype)))
        return place(self, name, tile)

    monkeypatch.setattr(Machine, "__call__", watched)
    out.backward(do)
    assert born == {(name, wide) for name in {"sum_j", *BORN_BACKWARD[algorithm, rows_fit]}}


@pytest.mark.parametrize("budget", [{"sram": 8}, {"sram_bytes": 32}])
def test_a_chip_may_be_filled_to_the_last_element_and_byte(budget):
    machine, A = hbm(matrix(), **budget)
    A[0:2]
    machine("S", np.ones(4, np.float32))
    assert (machine.used_elements, machine.used_bytes) == (8, 32)
    with pytest.raises(SramOverflow):
        machine("mi", np.ones(1, np.float32))
    machine("S", np.ones(4, np.float32))
    with pytest.raises(SramOverflow):
        machine("S", np.ones(5, np.float32))
