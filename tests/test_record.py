"""The recorder: it changes nothing, misses nothing, and leaves nothing behind."""

from __future__ import annotations

import pickle
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings

import flashsim as fs
from flashsim.algorithms import ALGORITHMS
from flashsim.algorithms.flash2 import flash_attention_2
from flashsim.dropout import Dropout
from flashsim.masks import Mask
from flashsim.memory import Machine, blocks, part, tiles
from flashsim.record import record, record_attention, record_backward, recording
from flashsim.viewer import view
from strategies import VARIANTS, calls, tilings, variants

each_algorithm = pytest.mark.parametrize("algorithm", dict.fromkeys(n for n, _ in VARIANTS))


def head(N=8, d=2, seed=0):
    return np.random.default_rng(seed).standard_normal((3, N, d), dtype=np.float32)


def machine_run(machine, N=8, d=2, Br=4, Bc=2):
    """Arguments of flash_attention_2 on a machine's HBM."""
    q, k, v = head(N, d)
    out = {"O": np.full((N, d), np.nan, np.float32), "L": np.full(N, np.nan, np.float32)}
    arrays = machine.hbm(Q=q, K=k, V=v, **out)
    rest = {"scale": d**-0.5, "mask": Mask(N, N), "drop": Dropout(0.0, 0, 0, 0)}
    return list(arrays.values()), {"Br": Br, "Bc": Bc, **rest}


def codes(run, function=None):
    return [step.code for step in run if function in (None, step.function)]


# --- nothing is changed ---------------------------------------------------------------------------


@settings(max_examples=30)
@given(calls(max_n=12, max_d=4), variants, tilings)
def test_a_recorded_run_has_the_bits_and_the_counts_of_an_ordinary_one(call, variant, Br_Bc):
    algorithm, convention = variant
    options = dict(call.what, algorithm=algorithm, convention=convention, tiles=Br_Bc)
    plain = fs.attention(*call, **options)
    with recording(ALGORITHMS[algorithm].forward) as run:
        watched = fs.attention(*call, **options)
    assert watched.output.tobytes() == plain.output.tobytes()
    assert watched.lse.tobytes() == plain.lse.tobytes()
    assert watched.traffic == plain.traffic
    assert watched.sram_peak_elements == plain.sram_peak_elements
    assert watched.sram_peak_bytes == plain.sram_peak_bytes
    if len(run):
        assert run[-1].traffic == plain.traffic
        fullest = max(step.used_elements for step in run), max(step.used_bytes for step in run)
        peak = plain.sram_peak_elements, plain.sram_peak_bytes
        assert fullest == peak


@each_algorithm
def test_the_events_of_the_steps_are_those_of_an_ordinary_run(algorithm, monkeypatch):
    log = []
    with_log = {**Machine.__init__.__kwdefaults__, "log": log}
    monkeypatch.setattr(Machine.__init__, "__kwdefaults__", with_log)
    fs.attention(*head(), algorithm=algorithm, tiles=(3, 2), is_causal=True)
    monkeypatch.undo()
    run = record_attention(*head(), algorithm=algorithm, tiles=(3, 2), is_causal=True)
    assert log
    assert [event for step in run for event in step.events] == log


def test_plain_arrays_are_recorded_without_memory():
    q, k, v = head()
    O, L = np.empty((8, 2), np.float32), np.empty(8, np.float32)
    _, options = machine_run(Machine())
    run = record(flash_attention_2, q, k, v, O, L, **options)
    plain = fs.attention(q, k, v, tiles=(4, 2))
    assert O.tobytes() == plain.output.tobytes()
    assert L.tobytes() == plain.lse.tobytes()
    assert not run.hbm
    assert not any(step.events or step.resident for step in run)
    assert codes(run) == codes(record_attention(q, k, v, tiles=(4, 2)))
    writes = [step for step in run if step.code.startswith("O[i]")]
    assert [list(step.changed) for step in writes] == [["O"], ["O"]]
    assert writes[-1].changed["O"].tobytes() == O.tobytes()


def test_a_machine_that_keeps_a_log_keeps_it_and_one_that_keeps_none_gets_none():
    for log in None, []:
        machine = Machine(log=log)
        list(tiles(4, *machine.hbm(x=np.zeros(8)).values()))  # traffic before the recording
        args, options = machine_run(machine)
        run = record(flash_attention_2, *args, **options)
        assert machine.log is log
        assert run[0].traffic.reads == {"x": 8}
        if log is not None:
            assert [event for step in run for event in step.events] == log[4:]


# --- nothing is missed ----------------------------------------------------------------------------


def test_every_statement_that_runs_is_a_step_in_its_order():
    run = record_attention(*head(N=2), tiles=(2, 1))
    turn = [
        "for j, Kj, Vj in tiles(Bc, K, V, where=mask.row(i)):",
        "Mij = mask.tile(i, j)",
        'Sij = on_chip("Sij", Mij(Qi @ Kj.T * scale))',
        "m_new = np.maximum(mi, Sij.max(axis=1))",
        "Pij = exp(Sij, m_new, out=Sij)",
        "alpha = exp(mi, m_new)",
        "li[:] = alpha * li + Pij.sum(axis=1)",
        "Oi[:] = alpha[:, None] * Oi + weigh(drop(Pij, i, j), Vj, Mij.keep)",
        "mi[:] = m_new",
    ]
    assert codes(run) == [
        "on_chip = chip_of(Q)",
        "for i, Qi in tiles(Br, Q):",
        'Oi = on_chip("Oi", np.zeros((len(Qi), V.shape[1]), Qi.dtype))',
        'li = on_chip("li", np.zeros(len(Qi), Qi.dtype))',
        'mi = on_chip("mi", np.full_like(li, -np.inf))',
        *turn,
        *turn,
        turn[0],
        "O[i] = over(Oi, li)",
        "L[i] = shift(mi) + log(li)",
        "for i, Qi in tiles(Br, Q):",
    ]
    assert [step.number for step in run] == list(range(len(run)))
    source = run.source["flash_attention_2"]
    assert all(source[step.line].strip().startswith(step.code) for step in run)


def test_a_loop_header_loads_and_evicts_the_turn_before():
    run = record_attention(*head(), tiles=(8, 4))
    headers = [s for s in run if s.code.startswith("for j")]
    assert [[f"{e.kind} {e.name}" for e in step.events] for step in headers] == [
        ["read K", "read V"],
        ["evict K", "evict V", "evict Sij", "read K", "read V"],
        ["evict K", "evict V", "evict Sij"],
    ]
    assert [[h.name for h in step.resident] for step in headers] == [
        ["Q", "Oi", "li", "mi", "K", "V"],
        ["Q", "Oi", "li", "mi", "K", "V"],
        ["Q", "Oi", "li", "mi"],
    ]
    assert run[-1].resident == ()
    assert [event.kind for event in run[-1].events] == ["evict"] * 4


def stops_early(x):
    for _, xi in tiles(2, x):
        if xi.sum() > 0:
            break
    return len(x)


def test_a_turn_that_ends_by_break_evicts_on_that_line():
    run = record(stops_early, Machine().hbm(x=np.ones(4))["x"])
    evicting = [s.code for s in run if any(e.kind == "evict" for e in s.events)]
    assert evicting == ["break"]
    assert codes(run)[-1] == "return len(x)"
    assert run.result == 4


def changes_in_place(x):
    y = x * 2
    z = y[1:]
    z += 1
    np.exp(y, out=y)
    n = 0
    n += 1
    n = int(n)
    y = y.copy()
    del z
    return y


def test_changes_in_place_are_seen_through_every_name():
    run = record(changes_in_place, np.zeros(2))
    changed = [(s.code, sorted(s.changed)) for s in run]
    assert changed == [
        ("y = x * 2", ["y"]),
        ("z = y[1:]", ["z"]),
        ("z += 1", ["y", "z"]),
        ("np.exp(y, out=y)", ["y", "z"]),
        ("n = 0", ["n"]),
        ("n += 1", ["n"]),
        ("n = int(n)", []),  # the same object
        ("y = y.copy()", ["y"]),  # another object of equal value
        ("del z", []),
        ("return y", []),
    ]
    assert "z" not in run[-1].locals
    assert run[2].locals["y"].tolist() == [0, 1]


def test_values_are_copies_that_later_lines_and_readers_cannot_change():
    run = record_attention(*head(), tiles=(4, 2))
    li = [step.locals["li"] for step in run if "li" in step.changed]
    assert li[0].tolist() == [0, 0, 0, 0]
    assert len({x.tobytes() for x in li}) == len(li) - 1  # both query tiles start from zeros
    with pytest.raises(ValueError, match="read-only"):
        li[0][0] = 1


def test_what_is_written_to_hbm_is_kept_with_its_place():
    run = record_attention(*head(), tiles=(4, 2))
    written = {name: x for step in run for name, x in step.changed.items() if "[" in name}
    assert set(written) == {"O[0:4]", "O[4:8]", "L[0:4]", "L[4:8]"}
    both = np.concatenate([written["O[0:4]"], written["O[4:8]"]])
    assert both.tobytes() == run.result.output.tobytes()
    run = record_attention(*head(), algorithm="standard", tiles=(4, 4))
    written = {name: x for step in run for name, x in step.changed.items() if "[" in name}
    assert written["S[4:8, 0:4]"].shape == (4, 4)
    assert run.hbm["S"] == (8, 8)


def stores_in_other_ways(x, where):
    x[where] = np.zeros(x.data[where].shape)


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        (1, ["x[1]"]),
        (slice(None), ["x[None:None]"]),
        ((slice(0, 2), slice(-1, None)), ["x[0:2, -1:None]"]),
        ((2, slice(0, 2)), ["x[2, 0:2]"]),
        (..., []),
    ],
)
def test_any_way_to_index_a_store_is_recorded_or_left_to_its_event(where, kept):
    run = record(stores_in_other_ways, Machine().hbm(x=np.ones((3, 3)))["x"], where)
    assert [name for name in run[0].changed if name != "where"] == kept
    assert all(not run[0].changed[name].any() for name in kept)
    assert [event.kind for event in run[0].events] == ["write"]


def test_a_function_without_source_is_refused_and_as_a_neighbour_left_out():
    space = {}
    exec(compile("def unknown(x):\n    return x", "<nowhere>", "exec"), space)
    with pytest.raises(OSError, match="source"):
        record(space["unknown"], 1)
    globals()["unknown"] = space["unknown"]
    try:
        assert len(record(adds_one, np.zeros(1))) == 2
    finally:
        del globals()["unknown"]


def test_a_mask_in_hbm_is_recorded_like_any_array():
    mask = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    run = record_attention(*head(), attn_mask=mask, tiles=(4, 4))
    assert run.hbm["mask"] == (8, 8)
    assert run[-1].traffic.reads["mask"] == 64


def test_called_functions_of_the_same_module_are_recorded_between_the_callers_lines():
    run = record_attention(*head(N=4), algorithm="standard", tiles=(2, 2), sram=40)
    assert set(run.source) == {"standard_attention", "softmax"}
    functions = [step.function for step in run]
    first = functions.index("softmax")
    last = len(functions) - functions[::-1].index("softmax")
    assert run[first - 1].code == "softmax(S, P, L, Bs=Bs)"
    assert set(functions[first:last]) == {"softmax"}
    assert run[last].code.startswith("for i in turns(Br, O)")  # the call is there once
    assert run[first].locals.keys() < run[last - 1].locals.keys()


@pytest.mark.parametrize(
    ("algorithm", "functions"),
    [
        ("online_softmax", ["online_softmax_attention", "flash_attention_2"]),
        ("paged", ["paged_attention", "flash_attention_2"]),
        ("linformer", ["linformer_attention", "project", "standard_attention", "softmax"]),
        ("local", ["local_attention", "standard_attention", "softmax"]),
        ("split_kv", ["split_kv_attention", "parts", "flash_attention_2", "merge_parts"]),
    ],
)
def test_an_algorithm_that_another_calls_on_whole_arrays_or_parts_is_recorded_too(
    algorithm, functions
):
    run = view(algorithm, N=8, d=2).recording
    assert list(run.source) == functions
    for step in run:
        assert step.code.partition(" ")[0] in run.source[step.function][step.line]


def sums_windows(x, w):
    return [sums(part(part(x, slice(2, 8)), rows), 2) for rows in blocks(6, w)]


def sums(x, B):
    return sum(float(xi.sum()) for _, xi in tiles(B, x))


def test_a_step_says_of_which_part_its_loops_count_the_rows_also_of_a_part_of_a_part():
    x = np.arange(10.0)
    run = record(sums_windows, Machine().hbm(x=x)["x"], 3)
    assert run.result == [x[2:5].sum(), x[5:8].sum()]
    inside = [step for step in run if step.function == "sums"]
    assert [step.parts["x"] for step in inside] == [(slice(2, 5),), (slice(5, 8),)]
    reads = [[e.where for e in step.events if e.kind == "read"] for step in inside]
    assert reads == [["2:4", "4:5"], ["5:7", "7:8"]]
    assert all(step.parts == {} for step in run if step.function == "sums_windows")


def test_what_is_called_on_a_part_has_the_rows_of_the_whole_array():
    run = view("local", N=12, d=2, tiles=(2, 2)).recording  # windows of 3
    windows = [step.parts["Q"] for step in run if step.function == "softmax"]
    assert dict.fromkeys(rows.start for (rows,) in windows) == dict.fromkeys((0, 3, 6, 9))
    assert {step.parts["K"][0].start for step in run if step.function == "softmax"} == {0, 3, 6}
    assert run.hbm == {
        "Q": (12, 2),
        "K": (12, 2),
        "V": (12, 2),
        "S": (12, 9),
        "P": (12, 9),
        "O": (12, 2),
    }
    output = np.concatenate([x for s in run for name, x in s.changed.items() if name[:2] == "O["])
    assert output.tobytes() == run.result.output.tobytes()


def adds_one(x):
    x += 1
    return x


def loops(x):
    for n in range(2):
        # a comment
        if n > x:  # another
            x += n
        else:
            x -= n
    return x


def test_the_code_of_a_loop_or_condition_is_its_header():
    assert codes(record(loops, 0.0)) == [
        "for n in range(2):",
        "if n > x:",
        "x -= n",
        "for n in range(2):",
        "if n > x:",
        "x += n",
        "for n in range(2):",
        "return x",
    ]


def calls_another(x):
    y = adds_one(
        x,
    )
    squares = [n * n for n in range(2)]
    return (
        y,
        squares,
    )


def test_a_statement_over_several_lines_is_one_step_and_a_comprehension_none_of_its_own():
    run = record(calls_another, np.zeros(1))
    assert [(s.function, s.code, sorted(s.changed)) for s in run] == [
        ("calls_another", "y = adds_one( x, )", []),
        ("adds_one", "x += 1", ["x"]),
        ("adds_one", "return x", []),
        ("calls_another", "y = adds_one( x, )", ["y"]),
        ("calls_another", "squares = [n * n for n in range(2)]", []),
        ("calls_another", "return ( y, squares, )", []),
    ]


# --- nothing is left behind -----------------------------------------------------------------------


def monitoring_tools():
    if sys.version_info < (3, 12):
        return None
    return [sys.monitoring.get_tool(tool) for tool in range(6)]


def test_an_exception_passes_through_and_the_recording_ends_where_it_arose():
    before = sys.gettrace(), monitoring_tools()
    machine = Machine(sram=36)
    args, options = machine_run(machine)
    with pytest.raises(fs.SramOverflow, match="Sij does not fit"):
        record(flash_attention_2, *args, **options)
    assert (sys.gettrace(), monitoring_tools()) == before
    assert machine.log is None
    assert machine.resident == []

    args, options = machine_run(Machine(sram=36))
    with pytest.raises(fs.SramOverflow), recording(flash_attention_2) as run:
        flash_attention_2(*args, **options)
    assert run.sram == 36
    assert run[-1].code.startswith("Sij =")
    assert run[-1].resident == ()  # the turns it was in are over
    assert max(step.used_elements for step in run) <= 36
    count = len(run)
    fs.attention(*head())
    assert len(run) == count


def fails(x):
    x += 1
    raise KeyError(x)


def survives(x):
    try:
        fails(x)
    except KeyError:
        x *= 2
    y = x + 1
    del x
    return y


def test_a_caught_exception_ends_the_call_it_left():
    run = record(survives, np.zeros(1))
    assert [(s.function, s.code) for s in run] == [
        ("survives", "try:"),
        ("survives", "fails(x)"),
        ("fails", "x += 1"),
        ("fails", "raise KeyError(x)"),
        ("survives", "except KeyError:"),
        ("survives", "x *= 2"),
        ("survives", "y = x + 1"),
        ("survives", "del x"),
        ("survives", "return y"),
    ]
    with recording(survives) as run:
        for _ in range(2):
            with pytest.raises(TypeError):
                survives("no array")
        survives(np.zeros(1))
    assert codes(run, "survives")[-1] == "return y"


def test_whatever_traced_before_traces_afterwards_and_sees_returns_only_of_calls_it_saw():
    before, called = sys.gettrace(), []

    def tracer(frame, what, arg):
        if what == "call":
            called.append(frame)
        elif what == "return":
            called.remove(frame)
        return tracer

    sys.settrace(tracer)
    try:
        run = record(changes_in_place, np.zeros(2))
        assert sys.gettrace() == tracer
    finally:
        sys.settrace(before)
    assert len(run) == 10
    assert called == []


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
def test_a_tool_id_is_found_beside_those_of_others_and_without_one_it_says_so():
    free = [tool for tool in range(6) if sys.monitoring.get_tool(tool) is None]
    taken = []
    try:
        for tool in sorted(free, key=lambda tool: tool != 4):  # 4 is the first it tries
            sys.monitoring.use_tool_id(tool, "another")
            taken.append(tool)
            if len(taken) < len(free):
                assert len(record(changes_in_place, np.zeros(2))) == 10
        with pytest.raises(RuntimeError, match="every tool id"):
            record(changes_in_place, np.zeros(2))
    finally:
        for tool in taken:
            sys.monitoring.free_tool_id(tool)


@pytest.mark.parametrize("algorithm", [n for n, row in ALGORITHMS.items() if row.backward])
@pytest.mark.parametrize("convention", ["literal", "elided"])
def test_a_recorded_backward_pass_has_the_bits_and_the_counts_of_an_ordinary_one(
    algorithm, convention
):
    q, k, v = head()
    options = {"algorithm": algorithm, "convention": convention, "tiles": (4, 2)}
    if ALGORITHMS[algorithm].requires:
        options["block_mask"] = np.eye(2, 4, dtype=bool)
    out, plain = (fs.attention(q, k, v, **options) for _ in range(2))
    run, gradients = record_backward(out, v, (2, 4)), plain.backward(v, (2, 4))
    for a, b in zip(run.result, gradients, strict=True):
        assert a.tobytes() == b.tobytes()
    assert run[-1].traffic == out.traffic_backward == plain.traffic_backward
    assert max(step.used_elements for step in run) == plain.sram_peak_backward_elements


def test_a_backward_pass_of_several_heads_is_refused():
    two = np.zeros((2, 4, 2), np.float32)
    with pytest.raises(ValueError, match=r"out\.output\.shape=\(2, 4, 2\): expected one head"):
        record_backward(fs.attention(two, two, two), two)


def test_other_threads_are_not_recorded():
    with recording(changes_in_place) as run:
        thread = threading.Thread(target=changes_in_place, args=(np.zeros(2),))
        thread.start()
        thread.join()
    assert len(run) == 0


def test_recordings_nest():
    with recording(changes_in_place) as outer:
        inner = record(adds_one, np.zeros(1))
        changes_in_place(np.zeros(2))
    assert codes(inner) == ["x += 1", "return x"]
    assert codes(outer, "changes_in_place") == codes(record(changes_in_place, np.zeros(2)))


def test_a_recording_stays_small():
    run = record_attention(*head(N=64, d=64), tiles=(16, 16))
    assert len(pickle.dumps(run.steps)) < 1_000_000


# --- what it refuses, and how it reads ------------------------------------------------------------


def test_what_cannot_be_recorded_is_refused_by_name():
    two = np.zeros((2, 4, 2), np.float32)
    with pytest.raises(ValueError, match=r"q\.shape=\(2, 4, 2\): expected one head"):
        record_attention(two, two, two)
    with pytest.raises(ValueError, match="algorithm='flash9': expected one of 'standard'"):
        record_attention(*head(), algorithm="flash9")
    for no_function in np.exp, lambda: None, tiles, "flash2":
        with pytest.raises(TypeError, match=r"fn=.*expected a Python function that is written"):
            record(no_function)
    one = head()[:, None, None]
    assert record_attention(*one).result.output.shape == (1, 1, 8, 2)


def test_steps_and_tables_read_well():
    run = record_attention(*head(), tiles=(4, 2), sram=48)
    step = next(step for step in run if step.code.startswith("O[i]"))
    lines = str(step).splitlines()
    assert lines[0] == f"step {step.number}, line {step.line}: O[i] = over(Oi, li)"
    assert lines[1].startswith("  changed  O[0:4] = [[")
    assert lines[2].startswith(" " * len("  changed  O[0:4] = [") + "[")
    assert lines[5:] == [
        "  memory   write O[0:4] 8",
        "  on chip  24 elements: Q 8, Oi 8, li 4, mi 4",
        "  so far   40 elements read, 8 written",
    ]
    part = run[2:5]
    assert len(part) == 3
    assert part[0] is run[2]
    rows = str(part).splitlines()
    assert len(rows) == 4
    assert len({len(row) for row in rows}) == 1
    assert "flash_attention_2(" in run.listing()
    page = run._repr_html_()
    assert page.count("<tr>") == len(run) + 1
    assert "elements on chip, of 48" in page
    assert "bytes on chip, of 500" in record_attention(*head(), sram_bytes=500)._repr_html_()
    assert "elements on chip;" in record_attention(*head())._repr_html_()


def escapes(x):
    return x < "<b>"


def test_a_table_shows_code_and_values_as_they_are():
    page = record(escapes, "a")._repr_html_()
    assert "x &lt; &quot;&lt;b&gt;&quot;" in page
    assert record(escapes, "a")[:0]._repr_html_().count("<tr>") == 1
