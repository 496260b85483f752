"""The exercise: right kernels reach the level they should, wrong ones are told what is wrong."""

import inspect
import textwrap
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim import io_cost, tile_sizes
from flashsim.algorithms import ALGORITHMS
from flashsim.dropout import Dropout
from flashsim.exercise import LEVELS, PROBES, D, M, N, marks, score
from flashsim.masks import Mask
from flashsim.memory import chip_of, tiles


def tiled_attention(Q, K, V, O, *, Br, Bc, scale):
    on_chip = chip_of(Q)
    for i, Qi in tiles(Br, Q):
        Oi = on_chip("Oi", np.zeros_like(Qi))
        li = on_chip("li", np.zeros(len(Qi), np.float32))
        mi = on_chip("mi", np.full(len(Qi), -np.inf, np.float32))
        for _, Kj, Vj in tiles(Bc, K, V):
            Sij = on_chip("Sij", Qi @ Kj.T * scale)
            m_new = np.maximum(mi, Sij.max(axis=1))
            Pij = on_chip("Sij", np.exp(Sij - m_new[:, None]))
            alpha = np.exp(mi - m_new)
            li[:] = alpha * li + Pij.sum(axis=1)
            Oi[:] = alpha[:, None] * Oi + Pij @ Vj
            mi[:] = m_new
        O[i] = Oi / li[:, None]


def two_pass_attention(Q, K, V, O, *, Br, Bc, scale):
    """Without rescaling: the maximum in a pass of its own."""
    on_chip = chip_of(Q)
    for i, Qi in tiles(Br, Q):
        Oi = on_chip("Oi", np.zeros_like(Qi))
        li = on_chip("li", np.zeros(len(Qi), np.float32))
        mi = on_chip("mi", np.full(len(Qi), -np.inf, np.float32))
        for _, Kj in tiles(Bc, K):
            mi[:] = np.maximum(mi, on_chip("Sij", Qi @ Kj.T * scale).max(axis=1))
        for _, Kj, Vj in tiles(Bc, K, V):
            Pij = on_chip("Sij", np.exp(Qi @ Kj.T * scale - mi[:, None]))
            li += Pij.sum(axis=1)
            Oi += Pij @ Vj
        O[i] = Oi / li[:, None]


def the_packages(name):
    """An algorithm of the registry as a kernel of the exercise."""
    algorithm = ALGORITHMS[name]
    extra = {"Bs": 1} if name == "standard" else {}

    def kernel(Q, K, V, O, *, Br, Bc, scale):
        machine = chip_of(Q)
        matrices = {"S": (len(Q), len(K)), "P": (len(Q), len(K))}
        arrays = []
        for array in algorithm.arrays:
            if array == "O":
                arrays.append(O)
            elif array == "L":  # not asked for here
                arrays.append(np.empty(len(Q), np.float32))
            else:
                arrays.append(machine.allocate(array, matrices.get(array, (len(Q),)), Q.dtype))
        algorithm.forward(
            Q, K, V, *arrays, Br=Br, Bc=Bc, scale=scale, mask=Mask(len(Q), len(K)),
            drop=Dropout(0.0, 0, 0, 0), **extra,
        )  # fmt: skip

    return kernel


@pytest.mark.parametrize(
    ("name", "rule", "level"),
    [
        ("standard", "strict", 1),
        ("flash1", "strict", 3),
        ("flash2", "strict", 4),
        ("flash2", "optimal", 5),
    ],
)
def test_the_packages_own_algorithms_reach_the_levels_named_after_them(name, rule, level):
    found = score(the_packages(name), tiles=tile_sizes(M, D, rule, name, N=N))
    assert (found.mistake, found.level) == ("", level)
    assert f"Level {level} of {len(LEVELS)}: {LEVELS[level - 1].title}." in str(found)
    assert ("Next:" in str(found)) == (level < len(LEVELS))


def test_every_level_asks_for_fewer_elements_than_the_one_before():
    elements = list(marks().values())
    assert elements == sorted(set(elements), reverse=True)
    assert elements[-1] == 4 * N * D


@given(st.integers(8, 48), st.integers(2, 32))
@settings(max_examples=25, deadline=None)
def test_a_score_has_the_counts_of_the_closed_form(Br, Bc):
    cost = io_cost("flash2", N=N, d=D, Br=Br, Bc=Bc)
    found = score(tiled_attention, tiles=(Br, Bc))
    assert (found.level > 0) == (cost.sram_elements <= M)
    if not found.level:
        return
    del cost.writes["L"]  # which the exercise does not ask for
    assert (found.traffic.reads, found.traffic.writes) == (cost.reads, cost.writes)
    assert found.sram_peak_elements == cost.sram_elements
    assert found.error_ratio <= 1
    assert found.level >= 2
    assert found.moved("flash2") == (cost.total_elements <= marks()["flash2"])


def test_two_passes_are_right_and_no_n_by_n_matrix_but_read_k_twice():
    found = score(two_pass_attention, tiles=(30, 16))
    assert found.traffic.reads["K"] == 2 * found.traffic.reads["V"]
    assert found.level == 3


@pytest.mark.parametrize(("width", "level"), [(4, 4), (5, 1)])
def test_a_few_numbers_a_row_in_hbm_are_no_matrix(width, level):
    def kernel(Q, K, V, O, **how):
        chip_of(Q).allocate("state", (len(Q), width), Q.dtype)
        tiled_attention(Q, K, V, O, **how)

    assert score(kernel, tiles=tile_sizes(M, D, "strict", "flash2", N=N)).level == level


def test_tiles_that_do_not_fit_are_a_verdict():
    found = score(tiled_attention, tiles=(64, 64))
    assert found.level == 0
    assert "With tiles of 64 x 64: " in found.mistake
    assert f"but SRAM holds {M} elements" in found.mistake
    assert "elements moved" not in str(found)


def test_a_page_shows_the_names_that_a_kernel_gives_as_text():
    def kernel(Q, K, V, O, *, Br, Bc, scale):
        tiled_attention(Q, K, V, O, Br=Br, Bc=Bc, scale=scale)
        chip_of(Q)("<b>", np.zeros(len(Q) * len(K)))

    found = score(kernel)
    assert "<b> does not fit on the chip" in str(found)
    assert "&lt;b&gt; does not fit on the chip" in found._repr_html_()


# What is written instead, and words of the verdict: one mistake each.
MISTAKES = {
    "nothing is written": ("O[i] = Oi / li[:, None]", "pass", "Nothing is written to O"),
    "not divided by l": ("Oi / li[:, None]", "Oi", "divide it by l"),
    "powers of 2": ("np.exp(Sij", "np.exp2(Sij", "exp to the base e"),
    "no scale": ("Qi @ Kj.T * scale", "Qi @ Kj.T", "multiplied by scale"),
    "the state is carried on": (
        'mi = on_chip("mi", np.full(len(Qi), -np.inf, np.float32))',
        'mi = on_chip("mi", np.full(len(Qi), -np.inf if i.start == 0 else 1e4, np.float32))',
        "second query tile",
    ),
    "only the first query tile": ("tiles(Br, Q)", "list(tiles(Br, Q))[:1]", "second query tile"),
    "l of the last tile": ("alpha * li + Pij.sum", "Pij.sum", "Key tiles are not added up"),
    "O of the last tile": ("alpha[:, None] * Oi + Pij", "Pij", "Key tiles are not added up"),
    "m is not kept": ("mi[:] = m_new", "pass", "never set to m_new"),
    "the tile's own maximum, and no factor": (
        "np.maximum(mi, Sij.max(axis=1))",
        "Sij.max(axis=1); mi[:] = m_new",
        "shift its scores by the largest so far",
    ),
    "O is not rescaled": ("alpha[:, None] * Oi", "Oi", "both O and l"),
    "l is not rescaled": ("alpha * li", "li", "both O and l"),
    "the factor is inverted": (
        "np.exp(mi - m_new)",
        "np.exp(m_new - mi)",
        "exp(m_old - m_new) is meant",
    ),
    "the tail is dropped": (
        "tiles(Bc, K, V):",
        "whole(Bc, tiles(Bc, K, V)):",
        "last key tile is short",
    ),
    "the tail is filled up": (
        "tiles(Bc, K, V):",
        "filled(Bc, tiles(Bc, K, V)):",
        "zeros in its place",
    ),
    "the last queries are dropped": (
        "tiles(Br, Q):",
        "whole(Br, tiles(Br, Q)):",
        "last query tile is short",
    ),
    "no maximum": ("np.maximum(mi, Sij.max(axis=1))", "np.zeros_like(mi)", "exp(100)"),
    "m starts at 0": ("np.full(len(Qi), -np.inf, np.float32)", "li.copy()", "m starts at -inf"),
    "a maximum that falls": ("np.maximum(mi, Sij.max(axis=1))", "Sij.max(axis=1)", "never falls"),
    "a maximum for the whole tile": (
        "Sij.max(axis=1)",
        "Sij.max()",
        "each row has a maximum of its own",
    ),
    "a width of 1": (
        "Oi / li[:, None]",
        "np.repeat(Oi[:, :1], V.shape[1], 1) / li[:, None]",
        "is a size",
    ),
    "a tile after its turn": (
        "O[i] = Oi /",
        "O[i] = (Oi + 0 * Vj[0, 0]) /",
        "after the end of its turn",
    ),
}


def whole(B, loads):
    """Without the last tile, if it is short."""
    return (load for load in loads if len(load[1]) == B)


def filled(B, loads):
    """With zeros where the last tile is short."""
    for i, *loaded in loads:
        yield i, *(np.pad(x, ((0, B - len(x)), (0, 0))) for x in loaded)


def mistaken(old, new):
    """`tiled_attention` with some text replaced."""
    text = textwrap.dedent(inspect.getsource(tiled_attention))
    assert old in text
    space = dict(globals())
    exec(text.replace(old, new), space)
    return space["tiled_attention"]


@cache
def verdict(name):
    """What is said of a mistake."""
    old, new, _ = MISTAKES[name]
    found = score(mistaken(old, new))
    assert found.level == 0
    return found.mistake


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_by_its_name(name):
    assert MISTAKES[name][2] in verdict(name)


def test_every_probe_is_needed():
    """Each names a mistake that all probes before it let pass."""
    said = [verdict(name) for name in MISTAKES]
    for probe in PROBES:
        assert any(probe.mistake[1:] in mistake for mistake in said), probe.mistake


def test_rows_that_are_taken_past_the_machine_are_missed():
    found = score(mistaken("tiles(Bc, K, V)", "((j, K.data[j], V[j]) for j, _ in tiles(Bc, V))"))
    assert "Of K only 0 of 4,096 elements were read" in found.mistake
    one = "((j, K[j] if j.start == 0 else K.data[j], V[j]) for j, _ in tiles(Bc, V))"
    found = score(mistaken("tiles(Bc, K, V)", one), tiles=(24, 12))
    assert "Of K only 2,112 of 4,096 elements were read" in found.mistake
    found = score(mistaken("O[i] =", "O.data[i] ="))
    assert "Of O only 0 of 4,096 elements were written" in found.mistake


def test_what_is_shown_as_text_and_as_a_page_has_the_same_numbers():
    found = score(two_pass_attention, tiles=(30, 16))
    for shown in str(found), found._repr_html_():
        for number in (found.traffic.read_elements, found.sram_peak_elements, *marks().values()):
            assert f"{number:,}" in shown
    wrong = score(mistaken("Oi / li[:, None]", "Oi"))
    assert "<" not in str(wrong)
    assert wrong.mistake in str(wrong)


@pytest.mark.parametrize(
    "product", [lambda Q, K: Q @ K, lambda Q, K: Q @ K.T], ids=["Q @ K", "Q @ K.T"]
)
def test_arithmetic_in_hbm_is_told_to_load_a_tile_first(product):
    def forgetful(Q, K, V, O, **what):
        return product(Q, K)

    with pytest.raises(TypeError, match="load a tile first"):
        score(forgetful)


def test_unusable_arguments_are_raised():
    with pytest.raises(TypeError, match="kernel=3: expected a function"):
        score(3)
    with pytest.raises(ValueError, match="tiles"):
        score(tiled_attention, tiles=(0, 4))
