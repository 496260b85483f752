"""A recorded run as the viewer's page reads it: tables, and each step as numbers of their rows.

flashsim/page/page.js is the reader, and says of each table what it is for. flashsim/page/page.html
unpacks the text first. Long tables keep of a row what differs from the last row of its kind: the
turns of a loop are alike, and of thousands of steps little is left to deflate.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain, repeat, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from .algorithms import SHAPES
from .memory import Event
from .plots import COLOURS, GROUP
from .record import Recording, Step, index_of
from .turns import FOLLOWED, LOOPS, first, rises_most, scopes, turns_of

if TYPE_CHECKING:
    from .viewer import View

Array = np.ndarray[Any, Any]

COLUMNS = (16, 8, 4, 2, 1)  # of an array are kept: the most with which the page stays small
SMALL_BYTES = 255_000  # of packed text; the page around it takes some 40 kB
CLOSE = 1e-5  # relative; what differs more from a right run is marked as wrong

FLOAT = np.dtype("<f4")
NONE = -1  # no right value: what is shown is right
KINDS = ("read", "write", "place", "replace", "evict")
TILE = re.compile(r"d?[A-Za-z]_?([ir][jc]?|jc?|c)")  # a letter or two, and the loops it is cut by


def packed(view: View) -> str:
    """The recording, deflated, in base64; with as many columns as keep the page small.

    It is the tables as JSON, a byte 0, and the values: the first bytes of all, then the second.
    """
    tables, arrays = page_data(view)
    for columns in COLUMNS:
        tables["mostColumns"] = columns
        data = json.dumps(tables, separators=(",", ":"), ensure_ascii=False).encode()
        planes = np.frombuffer(arrays.values(columns), np.uint8).reshape(-1, 4).T.tobytes()
        text = base64.b64encode(zlib.compress(data + b"\0" + planes, 9)).decode()
        if len(text) <= SMALL_BYTES:
            break
    return text


def page_data(view: View) -> tuple[dict[str, Any], _Arrays]:
    """The tables of a recording, with what each step added, and the arrays that they number."""
    run = view.recording
    names, texts, places, events, held, chips = (_Table() for _ in range(6))
    arrays = _Arrays()
    twins = _twins(run, view.right)
    in_bytes = run.sram_bytes < math.inf
    budget = run.sram_bytes if in_bytes else run.sram
    functions = list(run.source)

    def value(step: Step, name: str) -> tuple[int, int]:
        """The number of an array, and of the right one if that differs, else NONE; of a text
        what `~` makes of its number."""
        x, right = _value(step, name), _value(twins.get(step.number), name)
        if not _is_table(x):
            return ~texts(_text(x)), NONE
        wrong = isinstance(right, np.ndarray) and not _close(x, right)
        return arrays(x), arrays(right) if wrong else NONE

    steps = []
    for step, tiles in scopes(run):
        happened = [events(_event(event, names, run)) for event in step.events]
        changed = [
            (places((names(name), *_place(step, name, x, tiles, run))), *value(step, name))
            for name, x in step.changed.items()
        ]
        on_chip = (
            held((names(h.name), h.bytes if in_bytes else h.elements)) for h in step.resident
        )
        about = functions.index(step.function), step.line, chips(tuple(on_chip))
        steps.append((*about, len(happened), *happened, *chain(*changed)))
    turns = turns_of(run)
    columns = [
        c for c in FOLLOWED if any(c == cell.column for turn in turns for cell in turn.cells)
    ]
    rows = []
    for turn in turns:
        cells = (
            (columns.index(cell.column), cell.step.number, *value(cell.step, cell.name))
            for cell in turn.cells
        )
        rows.append((turn.rows.start, turn.rows.stop, texts(turn.label), *chain(*cells)))
    standard = view.standard
    tables = {
        "title": view.title,
        "subtitle": view.subtitle,
        "note": view.note,
        "source": [[name, min(lines), list(lines.values())] for name, lines in run.source.items()],
        "rightLines": _other_lines(run, view.right),
        "unit": "bytes" if in_bytes else "elements",
        "budget": None if budget == math.inf else budget,
        "closedForm": view.closed_form_elements,
        "standard": standard and [standard.read_elements, standard.written_elements],
        "hbm": [
            [names(name), *(*shape, 1)[:2], int(_of_queries(name))]
            for name, shape in run.hbm.items()
        ],
        "row": rises_most(run) if view.row is None else view.row,
        "rows": max((turn.rows.stop for turn in turns), default=0),
        "columns": columns,
        "turns": _differences(rows, 0),
        "steps": _differences(steps, 2),
        "places": _differences(places.rows, 0),
        "events": _differences(events.rows, 2),
        "chips": chips.rows,
        "held": held.rows,
        "names": names.rows,
        "texts": texts.rows,
        "colours": [COLOURS[GROUP.get(_array_of(name), "other")] for name in names.rows],
        "shapes": arrays.shapes,
        "close": CLOSE,
    }
    return tables, arrays


def _differences(rows: list[tuple[int, ...]], kind: int) -> list[tuple[int, ...]]:
    """Each row, less the last one whose first `kind` numbers are the same, which stay."""
    last: dict[tuple[int, ...], tuple[int, ...]] = {}
    differences = []
    for row in rows:
        head, rest = row[:kind], row[kind:]
        before = chain(last.get(head, ()), repeat(0))
        differences.append((*head, *(n - m for n, m in zip(rest, before, strict=False))))
        last[head] = rest
    return differences


class _Table:
    """Distinct rows, in the order in which they came; called on a row, it gives its number."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, row: Any) -> int:
        return self.numbers.setdefault(row, len(self.numbers))

    @property
    def rows(self) -> list[Any]:
        return list(self.numbers)


class _Arrays:
    """Distinct arrays, as float32; of a matrix its first columns."""

    def __init__(self) -> None:
        self.table = _Table()

    def __call__(self, x: Array) -> int:
        with np.errstate(over="ignore"):
            kept = np.asarray(x[:, : COLUMNS[0]] if x.ndim == 2 else x, FLOAT)
        return self.table((x.shape, kept.tobytes()))

    @property
    def shapes(self) -> list[list[int]]:
        """[rows, columns], of a vector [rows]."""
        return [list(shape) for shape, _ in self.table.rows]

    def values(self, columns: int) -> bytes:
        """One after the other, of a matrix no more than so many columns."""
        return b"".join(
            np.frombuffer(x, FLOAT).reshape(rows, -1)[:, :columns].tobytes() if side and rows else x
            for (rows, *side), x in self.table.rows
        )


def _is_table(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim in (1, 2)


def _text(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return " x ".join(map(str, x.shape)) + f" {x.dtype}"
    return f"{x.start}:{x.stop}" if isinstance(x, slice) else str(x)


def _event(event: Event, names: _Table, run: Recording) -> tuple[int, ...]:
    """Kind, name, elements; of a read or write also first and last row, first and last column."""
    return KINDS.index(event.kind), names(event.name), event.elements, *_region(event, run)


def _region(event: Event, run: Recording) -> list[int]:
    """First and last row, first and last column; empty if it has none, or more than one."""
    region: list[int] = []
    index = index_of(event.where) if event.where else None
    if event.name in run.hbm and index is not None:
        for length, part in zip_longest((*run.hbm[event.name], 1)[:2], index[:2]):
            part = slice(None) if part is None else part
            ends = part.indices(length)[:2] if isinstance(part, slice) else (part, part + 1)
            region += ends
    return region


def _place(
    step: Step, name: str, x: Any, tiles: dict[str, slice], run: Recording
) -> tuple[int, ...]:
    """Where x lies in its whole array: first row, first column, -1 for none or unknown; and
    whether its rows are queries."""
    if not _is_table(x):
        return -1, -1, 0
    array, bracket, where = name.partition("[")
    if bracket:
        index = index_of(where.rstrip("]")) or ()
        starts = [part.start if isinstance(part, slice) else part for part in index]
        return *(*(start or 0 for start in starts), -1, -1)[:2], int(_of_queries(array))
    if _of_queries(name) and x.ndim == 1:  # whole, but for the part that the function was given
        return first(step, "Nq"), -1, 1
    loops = _subscripts(name) or next((i for i in LOOPS if i in tiles), "")
    sides = map(tiles.get, loops[: x.ndim])
    starts = [
        side.start if side is not None and side.stop - side.start == n else start
        for side, n, start in zip_longest(sides, x.shape, _loaded_from(step, name, run)[: x.ndim])
    ]
    return *(*starts, -1)[:2], int(loops[:1] in LOOPS and starts[0] >= 0)


def _loaded_from(step: Step, name: str, run: Recording) -> tuple[int, int]:
    """First row and column of what a loop header loaded as `name`, -1 if it loaded no such tile.

    That is all there is to know of a loop whose variable is not used: for _, Qi, dSij in tiles(...)
    """
    if step.code.startswith("for "):
        targets = step.code.removeprefix("for ").partition(" in ")[0].split(", ")[1:]
        reads = [event for event in step.events if event.kind == "read"]
        for target, event in zip(targets, reads, strict=False):
            region = _region(event, run)
            if target == name and region:
                return region[0], region[2]
    return -1, -1


def _of_queries(array: str) -> bool:
    """Whether the rows of an HBM array are those of queries."""
    return SHAPES.get(array, ("",))[0] == "Nq" or array in ("mask", "dmask")


def _array_of(name: str) -> str:
    """The array that a tile is part of: "S" of "Sij", "dK" of "dKj", "O" of "O[0:4]"."""
    name = name.partition("[")[0].partition("_")[0]
    return name.removesuffix(_subscripts(name))


def _subscripts(name: str) -> str:
    """Those of a tile's name: "ij" of "Sij", "j" of "dKj", "r" of "Or", none of "alpha"."""
    found = TILE.fullmatch(name)
    return found[1] if found else ""


def _value(step: Step | None, name: str) -> Any:
    return None if step is None else step.changed.get(name, step.locals.get(name))


def _close(x: Array, right: Array) -> bool:
    return x.shape == right.shape and bool(np.allclose(x, right, CLOSE, 0, equal_nan=True))


def _twins(run: Recording, right: Recording | None) -> dict[int, Step]:
    """For each step of `run`, the step of `right` on the same line in the same turn."""

    def keyed(recording: Recording) -> Iterator[tuple[tuple[Any, ...], Step]]:
        seen: Counter[tuple[Any, ...]] = Counter()
        for step, tiles in scopes(recording):
            key = step.function, step.line, *(x.start for x in tiles.values())
            yield (*key, seen[key]), step
            seen[key] += 1

    if right is None:
        return {}
    theirs = dict(keyed(right))
    return {step.number: theirs[key] for key, step in keyed(run) if key in theirs}


def _other_lines(run: Recording, right: Recording | None) -> list[tuple[str, int, str]]:
    """(function, line, text in `right`) of the lines of the source that differ."""
    return [
        (name, number, right.source[name][number])
        for name, lines in run.source.items()
        for number, text in lines.items()
        if right is not None and right.source[name][number] != text
    ]
