"""A recorded run as the viewer's page reads it: tables, and each step as numbers of their rows.

flashsim/page/page.js is the reader, and says of each table what it is for. flashsim/page/page.html
unpacks the text first.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from .algorithms import SHAPES
from .memory import Event
from .plots import COLOURS, GROUP
from .record import Recording, Step, index_of
from .turns import FOLLOWED, rises_most, scopes, turns_of

if TYPE_CHECKING:
    from .viewer import View

Array = np.ndarray[Any, Any]

COLUMNS = (16, 8, 4, 2, 1)  # of an array are kept: the most with which the page stays small
SMALL_BYTES = 250_000  # of packed text; the page around it takes some 45 kB
CLOSE = 1e-5  # relative; what differs more from a right run is marked as wrong

KINDS = ("read", "write", "place", "replace", "evict")


def packed(view: View) -> str:
    """The recording as JSON, deflated, in base64; with as many columns as keep the page small."""
    for columns in COLUMNS:
        data = json.dumps(page_data(view, columns), separators=(",", ":"), ensure_ascii=False)
        text = base64.b64encode(zlib.compress(data.encode(), 9)).decode()
        if len(text) <= SMALL_BYTES:
            break
    return text


def page_data(view: View, most_columns: int) -> dict[str, Any]:
    """The tables of a recording, and for each step what it added."""
    run = view.recording
    names, places, events, held, chips = (_Table() for _ in range(5))
    arrays = _Arrays(most_columns)
    twins = _twins(run, view.right)
    in_bytes = run.sram_bytes < math.inf
    budget = run.sram_bytes if in_bytes else run.sram
    functions = list(run.source)

    def value(step: Step, name: str) -> list[int]:
        """The number of an array, and of the right one if that differs."""
        x, right = _value(step, name), _value(twins.get(step.number), name)
        wrong = isinstance(right, np.ndarray) and not _close(x, right)
        return [arrays(x), *([arrays(right)] if wrong else [])]

    steps = []
    for step in run:
        changed = []
        for name, x in step.changed.items():
            shown = value(step, name) if _is_table(x) else [_text(x)]
            changed.append([places((names(name), *_place(step, name, x))), *shown])
        on_chip = (
            held((names(h.name), h.bytes if in_bytes else h.elements)) for h in step.resident
        )
        steps.append(
            [
                functions.index(step.function),
                step.line,
                [events(_event(event, names, run)) for event in step.events],
                changed,
                chips(tuple(on_chip)),
            ]
        )
    turns = turns_of(run)
    columns = [
        c for c in FOLLOWED if any(c == cell.column for turn in turns for cell in turn.cells)
    ]
    standard = view.standard
    return {
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
        "turns": [
            [
                turn.rows.start,
                turn.rows.stop,
                turn.label,
                [
                    [columns.index(cell.column), cell.step.number, *value(cell.step, cell.name)]
                    for cell in turn.cells
                ],
            ]
            for turn in turns
        ],
        "steps": steps,
        "places": places.rows,
        "events": events.rows,
        "chips": chips.rows,
        "held": held.rows,
        "names": names.rows,
        "colours": [COLOURS[GROUP.get(_array_of(name), "other")] for name in names.rows],
        "shapes": arrays.shapes,
        "values": arrays.text(),
        "mostColumns": most_columns,
        "close": CLOSE,
    }


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
    """Distinct arrays, as float32, one after the other; of a matrix its first columns."""

    def __init__(self, most_columns: int) -> None:
        self.table, self.most_columns = _Table(), most_columns

    def __call__(self, x: Array) -> int:
        with np.errstate(over="ignore"):
            kept = x[:, : self.most_columns] if x.ndim == 2 else x
            kept = np.asarray(kept, np.dtype("<f4"))
        return self.table((x.shape, kept.tobytes()))

    @property
    def shapes(self) -> list[list[int]]:
        """[rows, columns], of a vector [rows]."""
        return [list(shape) for shape, _ in self.table.rows]

    def text(self) -> str:
        return base64.b64encode(b"".join(values for _, values in self.table.rows)).decode()


def _is_table(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.ndim in (1, 2)


def _text(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return " x ".join(map(str, x.shape)) + f" {x.dtype}"
    return f"{x.start}:{x.stop}" if isinstance(x, slice) else str(x)


def _event(event: Event, names: _Table, run: Recording) -> tuple[int, ...]:
    """Kind, name, elements; of a read or write also first and last row, first and last column."""
    region: list[int] = []
    index = index_of(event.where) if event.where else None
    if event.name in run.hbm and index is not None:
        for length, part in zip_longest((*run.hbm[event.name], 1)[:2], index[:2]):
            part = slice(None) if part is None else part
            ends = part.indices(length)[:2] if isinstance(part, slice) else (part, part + 1)
            region += ends
    return KINDS.index(event.kind), names(event.name), event.elements, *region


def _place(step: Step, name: str, x: Any) -> tuple[int, ...]:
    """Where x lies in its whole array: first row, first column, -1 for none or unknown; and
    whether its rows are queries."""
    if not _is_table(x):
        return -1, -1, 0
    array, bracket, where = name.partition("[")
    if bracket:
        index = index_of(where.rstrip("]")) or ()
        starts = [part.start if isinstance(part, slice) else part for part in index]
        return *(*(start or 0 for start in starts), -1, -1)[:2], int(_of_queries(array))
    of_keys = name.endswith("j") and not name.endswith("ij")
    sides = [step.locals.get("j" if of_keys else "i"), step.locals.get("j")]
    if x.ndim == 1 or not name.endswith("ij"):
        sides[1] = None
    starts = [
        side.start if isinstance(side, slice) and side.stop - side.start == n else -1
        for side, n in zip(sides, (*x.shape, 0), strict=False)
    ]
    return *starts, int(not of_keys and starts[0] >= 0)


def _of_queries(array: str) -> bool:
    """Whether the rows of an HBM array are those of queries."""
    return SHAPES.get(array, ("",))[0] == "Nq" or array in ("mask", "dmask")


def _array_of(name: str) -> str:
    """The array that a tile is part of: "S" of "Sij", "dK" of "dKj", "O" of "O[0:4]"."""
    name = name.partition("[")[0].partition("_")[0]
    return name[:-2] if name.endswith("ij") else name[:-1] if name[-1:] in "ij" else name


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
