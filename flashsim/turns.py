"""The turns of a recorded run's loops over tiles, and what each made of the state of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .algorithms import ALGORITHMS, SHAPES
from .record import Recording, Step

# The columns of the followed row, and the names that the algorithms have for them.
FOLLOWED = {
    "m_old": (),  # m before m_new is bound
    "m_new": ("m_new", "mi", "mr", "m"),
    "factor": ("alpha", "old"),
    "tile's factor": ("new", "beta", "factor"),
    "l": ("l_new", "li", "lr", "l"),
    "O so far": ("Oi", "Or"),  # which FlashAttention-2 divides by l at the end alone
    "O": ("O",),
    "lse": ("Li", "L"),
    "D": ("Di", "D"),
    "dQ so far": ("dQi", "dQ"),
}
COLUMN = {name: column for column, names in FOLLOWED.items() for name in names}
FINAL_WHEN_LOADED = ("Li", "Di")  # anything else that a header loads is the state before the turn

LOOPS = {"i": "j", "r": "c"}  # over query tiles, and over key tiles inside
PARTIAL = {"s": "part", "chunk": "chunk"}  # loops over the partial results of the same rows
FORWARD = {row.forward.__name__ for row in ALGORITHMS.values()}


def rises_most(run: Recording) -> int:
    """The query row whose running maximum rises most often; the first of several.

    From -inf to its first maximum a row rises once, as any other that sees a key.
    """
    rises: Counter[int] = Counter()
    for step, tiles in scopes(run):
        m_old, m_new = (step.locals.get(name) for name in ("mi", "m_new"))
        if "m_new" in step.changed and "i" in tiles and m_old is not None:
            rises.update(tiles["i"].start + int(n) for n in np.flatnonzero(m_new > m_old))
    return min(rises, key=lambda row: (-rises[row], row), default=0)


class Cell(NamedTuple):
    """A value of the query rows of a turn: of `name`, as `step` left it, under `column`."""

    column: str
    step: Step
    name: str


@dataclass
class Turn:
    """One turn of a loop over tiles, and what it made of the state of its query rows."""

    rows: slice
    label: str
    cells: list[Cell]


def turns_of(run: Recording) -> list[Turn]:
    """The turns that change the state of query rows, in order.

    Query rows are a loop's `i`. A turn is one of the innermost loop; what comes before its first
    and after its last is a turn of the loop outside.
    """
    current: dict[str, Turn | None] = {}  # by function
    turns = []
    for step, scope in scopes(run):
        header = step.code.startswith("for ")
        if header:
            ended = not any(isinstance(x, slice) for x in step.changed.values())
            outside = "end" if ended else "start"
            if step.function not in {next(iter(run.source)), *FORWARD}:  # a helper
                outside = _keys(*step.parts["K"][:1]) if "K" in step.parts else step.function
            turn = _turn(scope, outside)
            current[step.function] = turn
            turns += [turn] * (turn is not None)
        turn = current.get(step.function)
        if turn is not None:
            turn.cells += _cells(step, turn.rows, header)
    return [turn for turn in turns if turn is not None and turn.cells]


def scopes(run: Recording) -> Iterator[tuple[Step, dict[str, slice]]]:
    """Each step, with the tiles of the loops that it is in: {"i": rows, "j": keys}.

    Rows and keys count from those of the whole arrays. A loop's variable outlives it as a local;
    here it ends with the header that ends the loop.
    """
    loops: dict[str, list[tuple[int, dict[str, slice]]]] = {}  # by function: (indent, tiles)
    for step in run:
        around = loops.setdefault(step.function, [])
        if step.code.startswith("for "):
            text = run.source[step.function][step.line]
            indent = len(text) - len(text.lstrip())
            around[:] = [loop for loop in around if loop[0] < indent]
            around.append(
                (indent, {name: x for name, x in step.changed.items() if isinstance(x, slice)})
            )
        tiles = {name: x for _, tiles in around for name, x in tiles.items()}
        yield step, {name: _moved(x, first(step, _side(name, tiles))) for name, x in tiles.items()}


def first(step: Step, side: str) -> int:
    """The query ("Nq") or key ("Nk") from which the step's function counts: 0 if given them all."""
    starts = (rows[0].start for A, rows in step.parts.items() if SHAPES.get(A, ("",))[0] == side)
    return next(starts, 0)


def _side(name: str, tiles: dict[str, slice]) -> str:
    """What a loop goes over; c is over keys beside r, and over columns beside i."""
    if name in LOOPS:
        return "Nq"
    return "Nk" if name in ("j", "_") or (name == "c" and "r" in tiles) else ""


def _moved(rows: slice, start: int) -> slice:
    return slice(start + rows.start, start + rows.stop)


def _turn(scope: dict[str, slice], otherwise: str) -> Turn | None:
    """The turn of the loops around a header; `otherwise` is its label outside those over keys."""
    i = next((name for name in LOOPS if name in scope), None)
    if i is None:
        return None
    for name, noun in PARTIAL.items():
        if name in scope:
            x = scope[name]
            return Turn(scope[i], f"{noun} {x.start // (x.stop - x.start)}", [])
    keys = scope.get(LOOPS[i], scope.get("_"))
    return Turn(scope[i], otherwise if keys is None else _keys(keys), [])


def _keys(rows: slice) -> str:
    return f"keys {rows.start}:{rows.stop}"


def _cells(step: Step, rows: slice, header: bool) -> Iterator[Cell]:
    for name, x in step.changed.items():
        column = COLUMN.get(name.partition("[")[0])
        fits = isinstance(x, np.ndarray) and x.ndim and len(x) == rows.stop - rows.start
        if column is None or not fits or (header and name not in FINAL_WHEN_LOADED):
            continue
        if name == "m_new" and "mi" in step.locals:
            yield Cell("m_old", step, "mi")
        yield Cell(column, step, name)
