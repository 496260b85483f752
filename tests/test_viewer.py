"""The viewer's page says what the recording says, for every algorithm; it is small, and alone."""

from __future__ import annotations

import base64
import html
import inspect
import json
import math
import re
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashsim as fs
from flashsim import failures, problem
from flashsim.online_softmax import merge, of_tile
from flashsim.page_data import KINDS
from flashsim.record import record, record_attention, recording
from flashsim.turns import rises_most, turns_of
from flashsim.viewer import View, random_head, view
from test_cli import invoke

ALGORITHMS = fs.ALGORITHMS
PASSES = [(name, False) for name in ALGORITHMS]
PASSES += [(name, True) for name, row in ALGORITHMS.items() if row.backward]
LADDER = [(name, backward) for name, backward in PASSES if ALGORITHMS[name].usual]

each_pass = pytest.mark.parametrize("algorithm, backward", PASSES)


DATA = re.compile(r'<script id="data" type="text/plain">(.*?)</script>', re.S)


def whole(rows, kind):
    """Rows of which each was written less the last one with the same first `kind` numbers."""
    last, found = {}, []
    for row in rows:
        head, rest = tuple(row[:kind]), row[kind:]
        before = [*last.get(head, ()), *[0] * len(rest)]
        last[head] = [n + m for n, m in zip(rest, before, strict=False)]
        found.append([*head, *last[head]])
    return found


def shown(numbers, size, texts):
    """Groups of (..., value, right): a value below 0 stands for a text, a right one for none."""
    groups = [numbers[n : n + size] for n in range(0, len(numbers), size)]
    return [
        (*others, texts[~x] if x < 0 else x, *([right] if right >= 0 else []))
        for *others, x, right in groups
    ]


class Page:
    """A page, read back from its HTML by the rules that page.js goes by."""

    def __init__(self, text):
        packed = zlib.decompress(base64.b64decode(DATA.search(text)[1]))
        tables, _, planes = packed.partition(b"\0")
        self.data = data = json.loads(tables)
        planes = np.frombuffer(planes, np.uint8).reshape(4, -1)
        floats, self.arrays = np.ascontiguousarray(planes.T).view("<f4").ravel(), []
        for rows, *columns in data["shapes"]:
            kept = min(columns[0], data["mostColumns"]) if columns else 1
            x, floats = floats[: rows * kept], floats[rows * kept :]
            self.arrays.append(x.reshape(rows, kept) if columns else x)
        assert floats.size == 0
        texts = data["texts"]
        for name, kind in {"places": 0, "events": 2}.items():
            data[name] = whole(data[name], kind)
        data["turns"] = [
            (first, stop, texts[label], shown(cells, 4, texts))
            for first, stop, label, *cells in whole(data["turns"], 0)
        ]
        data["steps"] = [
            (function, line, rest[:many], shown(rest[many:], 3, texts), chip)
            for function, line, chip, many, *rest in whole(data["steps"], 2)
        ]

    def names(self, name):
        return self.data["names"][name]

    def events(self, step):
        for n in self.data["steps"][step][2]:
            kind, name, elements, *region = self.data["events"][n]
            yield KINDS[kind], self.names(name), elements, region

    def changed(self, step):
        """{name: (value, first row, first column)}."""
        found = {}
        for place, value, *_ in self.data["steps"][step][3]:
            name, row, column, _ = self.data["places"][place]
            x = value if isinstance(value, str) else self.arrays[value]
            found[self.names(name)] = x, row, column
        return found

    def on_chip(self, step):
        chip = self.data["chips"][self.data["steps"][step][4]]
        return [(self.names(name), size) for name, size in (self.data["held"][n] for n in chip)]


# --- the page says what the recording says --------------------------------------------------------


@each_pass
def test_steps_events_tiles_and_values_are_those_of_the_recording(algorithm, backward):
    shown = view(algorithm, N=10, d=3, tiles=(4, 3), backward=backward)
    run, page = shown.recording, Page(shown.html())
    assert len(page.data["steps"]) == len(run)
    reads = writes = 0
    for step, (function, line, *_) in zip(run, page.data["steps"], strict=True):
        name, first, texts = page.data["source"][function]
        assert (name, line) == (step.function, step.line)
        assert texts[line - first].strip().startswith(step.code.split("(")[0])
        events = list(page.events(step.number))
        assert [e[:3] for e in events] == [(e.kind, e.name, e.elements) for e in step.events]
        reads += sum(e[2] for e in events if e[0] == "read")
        writes += sum(e[2] for e in events if e[0] == "write")
        assert (reads, writes) == (step.traffic.read_elements, step.traffic.written_elements)
        assert page.on_chip(step.number) == [(h.name, h.elements) for h in step.resident]
        changed = page.changed(step.number)
        assert list(changed) == list(step.changed)
        for name, x in step.changed.items():
            if isinstance(x, np.ndarray):
                assert np.float32(x).tobytes() == changed[name][0].tobytes()
            elif isinstance(x, slice):
                assert changed[name][0] == f"{x.start}:{x.stop}"
    assert page.data["closedForm"] == reads + writes
    assert page.data["budget"] >= max(step.used_elements for step in run)


@each_pass
def test_regions_of_reads_and_writes_add_up_to_what_they_cost(algorithm, backward):
    page = Page(view(algorithm, N=10, d=3, tiles=(4, 3), backward=backward).html())
    shapes = {page.names(name): shape for name, *shape, _ in page.data["hbm"]}
    touched = {}
    for step in range(len(page.data["steps"])):
        for kind, name, elements, region in page.events(step):
            if kind in ("read", "write"):
                r0, r1, c0, c1 = region
                assert elements == (r1 - r0) * (c1 - c0)
                assert 0 <= r0 < r1 <= shapes[name][0]
                assert 0 <= c0 < c1 <= shapes[name][1]
                touched.setdefault(name, set()).update(range(r0, r1))
            else:
                assert region == []
    assert all(len(touched[name]) == 10 for name in ("Q", "K", "V", "dQ" if backward else "O"))


@each_pass
@pytest.mark.parametrize("tiles", [(4, 3), (5, 5)], ids=["ragged", "even"])
def test_a_tile_stands_at_its_place_in_the_whole_array(algorithm, backward, tiles):
    """Also one of a part, and of a loop whose variable has no name."""
    shown = view(algorithm, N=10, d=3, tiles=tiles, backward=backward)
    page = Page(shown.html())
    stored = {"fp8": max(tiles)} if algorithm == "flash3-fp8" else {}  # as the view's example
    inputs = problem.checked(*random_head(10, 3), **stored).inputs((0,))
    whole = {name: x.astype(np.float32) for name, x in inputs.items()}
    checked = 0
    for step in range(len(page.data["steps"])):
        for name, (x, row, _) in page.changed(step).items():
            if algorithm == "linformer" and name in ("Kj", "Vj"):
                continue  # tiles of Kp and Vp
            if name[:-1] in whole and name[-1] in "ijrc":
                assert row >= 0
                assert np.array_equal(x, whole[name[:-1]][row : row + len(x)])
                checked += 1
    assert checked or algorithm in ("square-tiles", "resident-scores")  # a column at a time


def test_bytes_are_shown_where_the_budget_is_in_bytes():
    shown = view("flash2", *random_head(8, 2), sram_bytes=400)
    page = Page(shown.html())
    assert (page.data["unit"], page.data["budget"]) == ("bytes", 400)
    for step in shown.recording:
        assert page.on_chip(step.number) == [(h.name, h.bytes) for h in step.resident]


def test_a_wide_array_is_cut_and_its_shape_told():
    q, k, v = random_head(64, 64)
    shown = view("flash2", q, k, v, tiles=(8, 8), backward=True)
    page = Page(shown.html())
    assert 1 < page.data["mostColumns"] < 64
    shapes = [shape for shape in page.data["shapes"] if len(shape) == 2]
    assert max(columns for _, columns in shapes) == 64
    for step in shown.recording[:40]:
        for name, x in step.changed.items():
            if isinstance(x, np.ndarray) and x.ndim == 2:
                kept = x[:, : page.data["mostColumns"]]
                assert np.array_equal(page.changed(step.number)[name][0], kept)


def test_the_totals_to_compare_with_are_those_of_the_closed_forms():
    shown = view("flash2", N=24, d=4, tiles=(8, 6), sram=400, is_causal=True)
    what = {"N": 24, "d": 4, "is_causal": True, "sram": 400}
    own = fs.io_cost("flash2", Br=8, Bc=6, **what)
    assert shown.closed_form_elements == own.total_elements
    assert shown.standard.total_elements == fs.io_cost("standard", **what).total_elements
    back = view("flash2", N=24, d=4, tiles=(8, 6), sram=400, backward=True)
    what = {"N": 24, "d": 4, "backward": True, "sram": 400}
    assert back.standard.total_elements == fs.io_cost("standard", **what).total_elements
    assert view("standard").standard is None  # it would be the same


def test_the_tiles_told_are_those_of_the_pass_that_is_shown():
    told = {}
    for backward in False, True:
        shown = view("flash2", N=32, d=4, sram=150, backward=backward)
        loops = [step.locals for step in shown.recording]
        Br, Bc = (max(x[i].stop - x[i].start for x in loops if i in x) for i in "ij")
        assert f"tiles {Br} × {Bc}" in shown.subtitle
        told[backward] = Br, Bc
    assert told[False] != told[True]


@each_pass
def test_without_a_budget_the_chip_holds_the_tiles_and_no_more(algorithm, backward):
    shown = view(algorithm, backward=backward)
    used = max(step.used_elements for step in shown.recording)
    assert used <= shown.recording.sram
    assert backward or used == shown.recording.result.sram_peak_elements  # no step is left out
    if algorithm.startswith("flash"):
        assert shown.recording.sram == used


# --- the followed row -----------------------------------------------------------------------------


@given(st.integers(0, 999), st.integers(1, 20), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=25)
def test_the_row_to_follow_is_the_one_whose_maximum_rises_most_often(seed, N, Br, Bc):
    q, k, v = random_head(N, 3, seed)
    S = q.astype(np.float64) @ k.T
    maxima = [S[:, j : j + Bc].max(axis=1) for j in range(0, N, Bc)]
    rises = (np.diff(np.maximum.accumulate(maxima), axis=0) > 0).sum(axis=0)
    for algorithm in "flash1", "flash2":
        run = record_attention(q, k, v, algorithm=algorithm, tiles=(Br, Bc))
        assert rises_most(run) == rises.argmax()


def test_no_row_is_followed_where_no_maximum_runs():
    assert rises_most(record(plain, np.zeros(3))) == 0


def plain(x):
    x += 1
    return x


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "block_sparse"])
def test_a_followed_row_has_the_states_of_online_softmax(algorithm):
    q, k, v = random_head(10, 3)
    options = {"block_mask": np.ones((3, 3), bool)} if algorithm == "block_sparse" else {}
    shown = view(algorithm, q, k, v, tiles=(4, 4), **options)
    page = Page(shown.html())
    columns = page.data["columns"]
    for row in range(10):
        state = None
        for first, stop, label, cells in page.data["turns"]:
            if not first <= row < stop or not label.startswith("keys"):
                continue
            found = {columns[c]: page.arrays[x][row - first] for c, _, x, *_ in cells}
            j = slice(*map(int, label.removeprefix("keys ").split(":")))
            new = of_tile(q[row : row + 1] @ k[j].T / math.sqrt(3), v[j])
            before, state = state, new if state is None else merge(state, new)
            assert found["m_new"] == pytest.approx(state.m[0], rel=1e-5)
            assert found["l"] == pytest.approx(state.l[0], rel=1e-5)
            # FlashAttention divides by l every turn, and writes that
            column, l = ("O so far", 1) if algorithm == "flash2" else ("O", state.l[0])
            assert found[column] == pytest.approx(state.O[0] / l, rel=1e-4, abs=1e-6)
            m_old = -np.inf if before is None else before.m[0]
            assert found["m_old"] == pytest.approx(m_old, rel=1e-5)
            assert found["factor"] == pytest.approx(np.exp(m_old - state.m[0]), rel=1e-5)
        assert state is not None


def test_a_followed_row_of_the_backward_pass_gathers_its_gradient():
    shown = view("flash2", N=10, d=3, tiles=(4, 4), backward=True)
    page, (dq, _, _) = Page(shown.html()), shown.recording.result
    column = page.data["columns"].index("dQ so far")
    for row in range(10):
        rows = [
            page.arrays[x][row - first]
            for first, stop, _, cells in page.data["turns"]
            if first <= row < stop
            for c, _, x, *_ in cells
            if c == column
        ]
        assert len(rows) == 3
        assert np.array_equal(rows[-1], dq[row])


@each_pass
def test_a_followed_row_ends_with_its_output_or_gradient(algorithm, backward):
    shown = view(algorithm, N=10, d=3, tiles=(4, 3), backward=backward)
    page, result = Page(shown.html()), shown.recording.result
    whole = result[0] if backward else result.output
    column, last = page.data["columns"].index("dQ so far" if backward else "O"), {}
    for first, stop, _, cells in page.data["turns"]:
        for c, _, x, *_ in cells:
            if c == column and page.arrays[x].shape[1:] == (3,):
                last |= {row: page.arrays[x][row - first] for row in range(first, stop)}
    assert sorted(last) == [*range(10)] or algorithm == "resident-scores"  # a column at a time
    for row, x in last.items():
        assert np.array_equal(x, np.float32(whole[row]))


def test_a_row_of_split_keys_is_followed_in_its_parts_and_through_their_merge():
    q, k, v = random_head(8, 3)
    page = Page(view("split_kv", q, k, v, tiles=(4, 2)).html())
    columns = page.data["columns"]
    turns = [turn for turn in page.data["turns"] if turn[0] <= 5 < turn[1]]
    assert [label for _, _, label, _ in turns] == [
        *("start", "keys 0:2", "keys 2:4", "start", "keys 4:6", "keys 6:8"),
        *("merge_parts", "part 0", "part 1", "merge_parts"),
    ]
    maxima = {
        label: page.arrays[x][5 - first]
        for first, _, label, cells in turns
        for c, _, x, *_ in cells
        if columns[c] == "m_new"
    }
    S = q[5] @ k.T / math.sqrt(3)
    assert maxima["keys 2:4"] == pytest.approx(S[:4].max(), rel=1e-5)
    assert maxima["keys 6:8"] == pytest.approx(S[4:].max(), rel=1e-5)


@pytest.mark.parametrize("tiles", [(1, 2), (3, 3)])
def test_vectors_of_a_part_have_the_places_of_their_rows(tiles):
    """Of local attention: L is a part of the whole one, and m and l are those of its softmax."""
    shown = view("local", N=12, d=3, tiles=tiles)
    page, out = Page(shown.html()), shown.recording.result
    placed = set()
    for step in range(len(page.data["steps"])):
        for name, (x, row, _) in page.changed(step).items():
            if name == "L" and shown.recording[step].function == "softmax":
                done = np.isfinite(x)
                assert np.array_equal(x[done], out.lse[row : row + len(x)][done])
                placed.add(row)
    assert placed == {0, 3, 6, 9}


def test_turns_name_the_keys_that_they_visit_and_what_comes_before_and_after():
    run = view("flash2", N=8, d=2, tiles=(4, 4)).recording
    assert [(turn.rows, turn.label) for turn in turns_of(run)] == [
        (slice(first, first + 4), label)
        for first in (0, 4)
        for label in ("start", "keys 0:4", "keys 4:8", "end")
    ]
    run = view("flash2", N=8, d=2, tiles=(4, 4), backward=True).recording
    assert [turn.label for turn in turns_of(run)][:3] == ["row_dots", "row_dots", "keys 0:4"]


# --- the page is small, and alone -----------------------------------------------------------------


@each_pass
@pytest.mark.parametrize("d", [8, 64])
def test_a_page_of_64_rows_takes_less_than_300_kb_also_in_a_notebook(algorithm, backward, d):
    assert len(view(algorithm, N=64, d=d, backward=backward)._repr_html_().encode()) < 300_000


@pytest.mark.parametrize("algorithm, backward", LADDER)
def test_so_does_one_of_small_tiles(algorithm, backward):
    page = view(algorithm, N=64, d=16, tiles=(8, 8), backward=backward).html()
    assert len(page.encode()) < 300_000


def test_a_page_of_too_many_steps_is_refused_before_it_is_made(monkeypatch):
    shown = view("flash2")
    monkeypatch.setattr("flashsim.viewer.MOST_STEPS", len(shown.recording))
    shown.html()
    monkeypatch.setattr("flashsim.viewer.MOST_STEPS", len(shown.recording) - 1)
    with pytest.raises(ValueError, match="recording='174 steps': expected at most 173: larger t"):
        shown.html()


def counts_to_a_thousand(x):
    while x < 1000:
        x += 1


def test_a_run_of_too_many_steps_is_stopped_at_the_limit():
    x = np.zeros(1)
    with (
        pytest.raises(ValueError, match="recording='more than 50 steps': expected at most 50: "),
        recording(counts_to_a_thousand, 50),
    ):
        counts_to_a_thousand(x)
    assert x < 50
    with recording(counts_to_a_thousand, 50) as run:
        counts_to_a_thousand(x := np.array([990.0]))
    assert (x, len(run)) == (1000, 21)


@pytest.mark.parametrize(
    "shown, most",
    [
        (lambda: view("flash2"), 173),
        (lambda: view("flash2", backward=True), 180),
        (lambda: failures.show("drop-tail", *random_head(16), tiles=(4, 4)).view(), 173),
    ],
    ids=["forward", "backward", "fault"],
)
def test_no_view_runs_longer_than_a_page_may_be(shown, most, monkeypatch):
    assert len(shown().recording) == most + 1
    monkeypatch.setattr("flashsim.viewer.MOST_STEPS", most)
    with pytest.raises(ValueError, match=f"recording='more than {most} steps'"):
        shown()


@each_pass
def test_a_page_names_no_address(algorithm, backward):
    page = view(algorithm, backward=backward).html()
    assert "default-src 'none'" in page
    data = json.dumps(Page(page).data)
    page = page.replace(DATA.search(page)[1], data)  # base64 may hold anything
    assert not re.search(r"https?:|//[\w.]+/|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttp", page)


def test_text_of_any_kind_stays_text():
    name = '</script><script>alert("{data}")</script>& /* script */'
    run = view("flash2", N=4, d=2).recording
    page = View(run, title=name, subtitle=name, note=name).html()
    assert page.count("</script>") == 3
    assert "<script>alert" not in page
    assert [Page(page).data[x] for x in ("title", "subtitle", "note")] == [name] * 3


def test_a_notebook_shows_each_page_in_a_frame_of_its_own():
    shown = view("flash2", N=4, d=2)
    frame = shown._repr_html_()
    found = re.fullmatch(r'<iframe title="([^"]*)" style="[^"]*" srcdoc="([^"]*)"></iframe>', frame)
    assert html.unescape(found[1]) == "FlashAttention-2, forward, step by step"
    assert html.unescape(found[2]) == shown.html()


def test_the_same_run_gives_the_same_page(tmp_path):
    first, second = (view("flash1", N=6, d=2, backward=True) for _ in range(2))
    assert first.html() == second.html()
    assert first.save(tmp_path / "page.html").read_text("utf-8") == second.html()


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", failures.FAILURES)
def test_a_fault_is_marked_from_where_it_acts(name):
    shown = failures.show(name).view()
    page = Page(shown.html())
    (function, line, right), *others = page.data["rightLines"]
    assert (function, others) == ("flash_attention_2", [])
    assert right.strip().startswith(failures.FAILURES[name].old.partition(" ")[0]) or (
        failures.FAILURES[name].old in right
    )
    marked = [n for n, step in enumerate(page.data["steps"]) if any(len(c) == 3 for c in step[3])]
    assert marked
    reached = next(step.number for step in shown.recording if step.line == line)
    assert reached <= marked[0]


@pytest.mark.parametrize("name", failures.FAILURES)
def test_the_traffic_of_a_fault_is_held_against_standard_attention_on_the_same_chip(name):
    shown = failures.show(name, *random_head(12, 4), tiles=(4, 3), is_causal=True).view()
    what = {"N": 12, "d": 4, "is_causal": True, "sram": shown.recording.sram}
    standard = fs.io_cost("standard", **what)
    assert shown.closed_form_elements == fs.io_cost("flash2", Br=4, Bc=3, **what).total_elements
    assert shown.standard.total_elements == standard.total_elements
    assert Page(shown.html()).data["standard"] == [
        standard.read_elements,
        standard.written_elements,
    ]


@pytest.mark.parametrize("name", failures.FAILURES)
def test_what_is_marked_differs_from_the_right_value_beside_it(name):
    shown = failures.show(name).view()
    page = Page(shown.html())
    last = {}
    for _, _, _, changed, _ in page.data["steps"]:
        for place, value, *right in changed:
            name_, row, *_ = page.data["places"][place]
            last[page.names(name_), row] = page.arrays[right[0]] if right else None
            if right:
                assert not np.array_equal(page.arrays[value], page.arrays[right[0]])
    result = "O" if failures.FAILURES[name].shows == "output" else "L"
    comparison = failures.show(name)
    for (written, row), right in last.items():
        if written.startswith(f"{result}[") and right is not None:
            assert np.array_equal(right, np.float32(comparison.right[row : row + len(right)]))
            break
    else:
        pytest.fail("the result is not marked")


def test_a_dropped_tail_spoils_what_is_written_and_no_turn_before_it():
    page = Page(failures.show("drop-tail", *random_head(10, 4), tiles=(4, 4)).view().html())
    marked = [
        page.names(page.data["places"][place][0])
        for step in page.data["steps"]
        for place, _, *right in step[3]
        if right
    ]
    assert marked == [f"{name}[{rows}]" for rows in ("0:4", "4:8", "8:10") for name in "OL"]


def test_a_run_without_a_fault_has_no_marks():
    page = Page(view("flash2").html())
    assert page.data["rightLines"] == []
    assert all(len(c) == 2 for step in page.data["steps"] for c in step[3])


# --- what it takes and refuses --------------------------------------------------------------------


def test_any_recording_can_be_shown_with_or_without_memory():
    page = Page(View(record(plain, np.zeros(3))).html())
    assert [step[1] for step in page.data["steps"]] == [
        inspect.getsourcelines(plain)[1] + n for n in (1, 2)
    ]
    assert (page.data["hbm"], page.data["turns"], page.data["budget"]) == ([], [], None)


def test_a_part_of_a_recording_is_refused():
    run = view("flash2", N=4, d=2).recording
    for part in run[3:], run[:0]:
        with pytest.raises(ValueError, match="from its first step"):
            View(part).html()


def test_what_cannot_be_shown_is_refused_by_name():
    with pytest.raises(ValueError, match="algorithm='flash9': expected one of"):
        view("flash9")
    with pytest.raises(ValueError, match="row=16: expected an integer of at least 0 and below 16"):
        view(row=16)
    with pytest.raises(TypeError, match="backward=1"):
        view(backward=1)
    two = np.zeros((2, 4, 2), np.float32)
    with pytest.raises(ValueError, match="one head"):
        view("flash2", two, two, two)
    with pytest.raises(ValueError, match="sram=10"):
        view(sram=10)


HEAD = random_head(4, 2)
LONG = random_head(6, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {"do": HEAD[0]}, "backward=False: expected True, as do is given"),
        (HEAD[:1], {}, "k and v=None: expected q, k, v together, as q is given"),
        ((), {"k": HEAD[0]}, "q and v=None: expected q, k, v together, as k is given"),
        (HEAD, {"N": 99}, "N=99: expected None, as q, k and v are given"),
        (HEAD, {"d": 3}, "d=3: expected None"),
        (HEAD, {"seed": 3}, "seed=3: expected None"),
        (HEAD, {"seed": 3, "backward": True, "do": HEAD[0]}, "seed=3: expected None"),
        ((np.zeros(3), *HEAD[1:]), {}, r"q\.shape=\(3,\): expected two dimensions"),
        ((HEAD[0], 3.0, HEAD[2]), {}, r"k\.shape=\(\): expected two dimensions"),
        ((), {"foo": 3}, "foo=3: expected no such argument; there are attn_mask, "),
        ((), {"N": 0}, "N=0: expected an integer of at least 1 and below 1025"),
        ((), {"N": 99_999_999}, "N=99999999: expected an integer of at least 1 and below 1025"),
        ((), {"d": 1025}, "d=1025: expected an integer of at least 1 and below 1025"),
        ((np.zeros((1025, 2)),) * 3, {}, r"q\.shape=.* expected at most 1024 rows of at most 1024"),
        ((), {"seed": -1, "backward": True}, "seed=-1"),
    ],
)
def test_an_argument_that_is_wrong_or_without_effect_is_refused_by_name(
    arguments, options, message
):
    with pytest.raises((ValueError, TypeError), match=message):
        view("flash2", *arguments, **options)


def test_a_made_up_window_is_not_held_against_the_caller():
    with pytest.raises(ValueError, match=r"k\.shape=\(6, 2\): expected 4 rows, as q has"):
        view("local", HEAD[0], *LONG[1:])


OTHERS = {
    "is_causal": True, "window": (1, None), "attn_mask": np.ones((16, 16), bool),
    "key_padding_mask": np.ones(16, bool), "block_mask": np.ones((4, 4), bool), "local_window": 4,
    "projection": 4, "cu_seqlens_q": [0, 16], "cu_seqlens_k": [0, 16], "dropout_p": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("algorithm", [name for name, row in ALGORITHMS.items() if row.requires])
def test_no_argument_is_refused_for_one_that_was_made_up(algorithm):
    """Nor is what was made up refused: no one gave it."""
    said = {}
    for name in OTHERS.keys() - {ALGORITHMS[algorithm].requires}:
        both = ("cu_seqlens_q", "cu_seqlens_k") if name.startswith("cu") else (name,)
        try:
            view(algorithm, **{name: OTHERS[name] for name in both})
        except ValueError as error:
            said[name] = str(error)
    assert "dropout_p" not in said
    for name, message in said.items():
        assert re.match(f"{name[:10]}.*=.* for algorithm='{algorithm}'", message)


def test_only_a_recording_can_be_shown():
    with pytest.raises(TypeError, match=r"recording=None: expected one of flashsim\.record"):
        View(None)


def test_a_head_without_rows_can_be_shown():
    empty = np.zeros((0, 2), np.float32)
    for algorithm in ALGORITHMS:
        keys = (empty, empty) if algorithm == "local" else HEAD[1:]
        assert Page(view(algorithm, empty, *keys).html()).data["rows"] == 0


@pytest.mark.parametrize("algorithm", [name for name, row in ALGORITHMS.items() if row.requires])
@pytest.mark.parametrize("budget", [{"sram": 400}, {"sram_bytes": 1600}])
def test_what_an_algorithm_needs_is_made_up_with_a_budget_too(algorithm, budget):
    run = view(algorithm, **budget).recording
    assert (run.sram, run.sram_bytes) == (
        budget.get("sram", np.inf),
        budget.get("sram_bytes", np.inf),
    )


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_the_page_that_python_makes(tmp_path):
    out = tmp_path / "page.html"
    arguments = (
        "-a",
        "flash1:elided",
        "--backward",
        "--N",
        8,
        "--d",
        2,
        "--tiles",
        "4,2",
        "--row",
        3,
    )
    result = invoke("view", *arguments, "--out", out, columns=200)
    assert result.exit_code == 0
    assert str(out) in result.stdout
    expected = view("flash1", N=8, d=2, tiles=(4, 2), row=3, backward=True, convention="elided")
    assert out.read_text("utf-8") == expected.html()


def test_the_command_shows_a_fault_on_its_own_input_or_on_a_drawn_one(tmp_path):
    out = tmp_path / "page.html"
    assert invoke("view", "--failure", "drop-tail", "--out", out).exit_code == 0
    assert out.read_text("utf-8") == failures.show("drop-tail").view().html()
    drawn = "--N", 10, "--seed", 3, "--tiles", "4,4", "--causal"
    assert invoke("view", "--failure", "drop-tail", *drawn, "--out", out).exit_code == 0
    comparison = failures.show("drop-tail", *random_head(10, 4, 3), tiles=(4, 4), is_causal=True)
    assert out.read_text("utf-8") == comparison.view().html()


def test_the_command_opens_the_page_when_asked(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    assert invoke("view", "--N", 4, "--open").exit_code == 0
    assert opened == [(tmp_path / "flash2.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--failure", "none"], "--failure none: expected one of skip-rescale, drop-tail"),
        (["--algorithm", ""], "algorithm='': expected one of"),
        (["--out", "missing/page.html"], "--out missing/page.html: expected a file to write"),
        (["--out", "."], "--out .: expected a file to write, in a folder that exists"),
        (["--out", ""], "--out .: expected a file to write"),
        (["--N", "99999999"], "N=99999999: expected an integer of at least 1 and below 1025"),
        (["--N", "64", "--tiles", "1,1"], "steps': expected at most 20000"),
        (["--failure", "zero-pad", "--backward"], "--backward: expected none, as --failure"),
        (["--failure", "zero-pad", "-a", "flash2"], "--algorithm: expected none"),
        (["-a", "flash2:strange"], "convention='strange'"),
        (["-a", "flash2:elided"], "convention='elided': expected one of 'literal'"),
        (["-a", "flash9:elided"], "algorithm='flash9': expected one of 'standard'"),
        (["--layout", "butterfly:9", "--tiles", "4,4"], "layout='butterfly:9'"),
        (["--tiles", "4"], "--tiles 4: expected Br,Bc"),
        (["-a", "linformer", "--causal"], "--causal: expected none, for algorithm='linformer'"),
        (["-a", "local", "--layout", "causal"], "--layout causal: expected none, for algorithm="),
    ],
)
def test_the_command_refuses_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("view", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
