"""Standard attention as it is, and as frameworks cut it into kernels: what each moves."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.cost import standard_kernels
from flashsim.cost.io import expected_cost
from flashsim.cost.study_reports import standard_report
from strategies import calls, printed, shown_in, tilings

ways = cache(lambda: list(standard_kernels.ways()))


def found(name):
    return next(moved for moved in ways() if moved.way.name == name)


def test_one_row_tile_is_the_papers_count_25_2_gb():
    """FA1 (arXiv:2205.14135): 4 N^2 + 4 N d forward, 7 N^2 + 8 N d backward, for Fig. 2's size."""
    moved = found("one row tile")
    assert (moved.forward, moved.backward) == ((4, 4), (7, 8))
    assert moved.gigabytes == pytest.approx(25.233, abs=5e-4)
    assert moved.held


def test_mask_and_dropout_kernels_make_the_published_40_3_gb():
    """FA1, Fig. 2 left: 40.3 GB; 18 N^2 + 12 N d in float16 is 40.265. A fit, not unique."""
    moved = found("mask and dropout kernels")
    assert moved.forward[0] + moved.backward[0] == 18
    assert moved.forward[1] + moved.backward[1] == 12
    assert moved.gigabytes == pytest.approx(40.265, abs=5e-4)
    assert round(moved.gigabytes, 1) == standard_kernels.PUBLISHED_GB
    assert moved.held


def test_each_way_moves_more_than_the_one_before():
    sizes = [moved.gigabytes for moved in ways()]
    assert all(moved.held for moved in ways())
    assert sizes == sorted(set(sizes))
    assert len(sizes) == len(standard_kernels.WAYS)


@given(st.integers(1, 60), st.integers(1, 9), tilings)
def test_kernels_of_their_own_move_five_more_score_matrices_forward_and_three_backward(N, d, tiles):
    """In elements; of these one forward and one backward is a matrix of bits."""
    how = {"N": N, "d": d, "Br": tiles[0], "Bc": tiles[1]}
    for backward, more in ((False, 5), (True, 3)):
        fused, unfused = (
            fs.io_cost(name, backward=backward, **how).total_elements
            for name in ("standard", "standard-unfused")
        )
        assert unfused - fused == more * N * N


@settings(max_examples=30)
@given(calls(max_n=20), tilings)
def test_it_gives_the_answer_and_the_gradients_of_standard_attention(call, tiles):
    """Bit for bit: dropping the same weights, from stored bits or from their place."""
    one, other = (
        fs.attention(*call, algorithm=name, tiles=tiles, **call.what)
        for name in ("standard", "standard-unfused")
    )
    assert one.output.tobytes() == other.output.tobytes()
    assert one.lse.tobytes() == other.lse.tobytes()
    do = np.random.default_rng(1).standard_normal(one.output.shape).astype(call.q.dtype)
    for a, b in zip(one.backward(do), other.backward(do), strict=True):
        assert np.array_equal(a, b, equal_nan=True)


def test_dropout_bits_take_one_byte_each_and_the_forward_pass_keeps_them():
    q, k, v = np.random.default_rng(0).standard_normal((3, 12, 4), dtype=np.float32)
    out = fs.attention(q, k, v, algorithm="standard-unfused", dropout_p=0.5)
    assert out.traffic.item_bytes["Z"] == 1
    assert out.traffic.writes["Z"] == 144
    assert out.kept_elements == 3 * 144  # P, Z and Pdrop
    out.backward(np.ones_like(q))
    assert out.traffic_backward.reads["Z"] == 144
    cost = expected_cost(out, q, k, v, dropout_p=0.5, backward=True)
    assert out.traffic_backward.total_bytes == cost.total_bytes


def test_the_dropout_kernel_may_be_the_fullest():
    """Backward: dPdrop and the bits, 3 x 6 each, where the softmax holds one row of P and dP."""
    q, k, v, do = (np.ones((n, 1), np.float32) for n in (5, 10, 10, 5))
    out = fs.attention(q, k, v, algorithm="standard-unfused", tiles=(3, 6), sram=39)
    out.backward(do)
    assert out.sram_peak_backward_elements == 2 * 3 * 6
    cost = expected_cost(out, q, k, v, sram=39, backward=True)
    assert cost.sram_elements == 2 * 3 * 6


def test_counts_do_not_depend_on_whether_anything_is_masked_or_dropped():
    q, k, v = np.random.default_rng(0).standard_normal((3, 12, 4), dtype=np.float32)
    runs = [
        fs.attention(q, k, v, algorithm="standard-unfused", **what).traffic
        for what in ({}, {"dropout_p": 0.5}, {"is_causal": True})
    ]
    assert runs[0] == runs[1] == runs[2]


def test_the_page_shows_what_the_command_prints(monkeypatch, capsys):
    assert printed(standard_report(ways()), monkeypatch, capsys) == shown_in("standard.md")


def test_the_command_fails_if_a_run_moved_otherwise(monkeypatch):
    for wrong in (False, True):
        shown = [replace(moved, held=not wrong) for moved in ways()]
        monkeypatch.setattr(standard_kernels, "ways", lambda on_step, shown=shown: shown)
        result = CliRunner().invoke(cli.app, ["standard", "--json"])
        assert result.exit_code == wrong
        document = json.loads(result.stdout)
        assert document["held"] != wrong
        assert [round(r["total_bytes"] / 1e9, 1) for r in document["records"]] == [
            25.2, 30.9, 37.3, 40.3,
        ]  # fmt: skip
