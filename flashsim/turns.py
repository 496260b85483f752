"""The turns of a recorded run's loops over tiles, and what each made of the state of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .record import Recording, Step

# The columns of the followed row, and the names that the algorithms have for them.
FOLLOWED = {
    "m_old": (),  # m before m_new is bound
    "m_new": ("m_new", "mi", "m"),
    "factor": ("alpha", "old"),
    "tile's factor": ("new",),
    "l": ("l_new", "li", "l"),
    "O so far": ("Oi",),  # which FlashAttention-2 divides by l at the end alone
    "O": ("O",),
    "lse": ("Li", "L"),
    "D": ("Di", "D"),
    "dQ so far": ("dQi", "dQ"),
}
COLUMN = {name: column for column, names in FOLLOWED.items() for name in names}
FINAL_WHEN_LOADED = ("Li", "Di")  # anything else that a header loads is the state before the turn


def rises_most(run: Recording) -> int:
    """The query row whose running maximum rises most often; the first of several.

    From -inf to its first maximum a row rises once, as any other that sees a key.
    """
    rises: Counter[int] = Counter()
    for step in run:
        i, m_old, m_new = (step.locals.get(name) for name in ("i", "mi", "m_new"))
        if "m_new" in step.changed and isinstance(i, slice) and m_old is not None:
            rises.update(i.start + int(n) for n in np.flatnonzero(m_new > m_old))
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
            helper = step.function if step.function != next(iter(run.source)) else ""
            turn = _turn(scope, helper or ("end" if ended else "start"))
            current[step.function] = turn
            turns += [turn] * (turn is not None)
        turn = current.get(step.function)
        if turn is not None:
            turn.cells += _cells(step, turn.rows, header)
    return [turn for turn in turns if turn is not None and turn.cells]


def scopes(run: Recording) -> Iterator[tuple[Step, dict[str, slice]]]:
    """Each step, with the tiles of the loops that it is in: {"i": rows, "j": keys}.

    A loop's variable outlives it as a local; here it ends with the header that ends the loop.
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
        yield step, {name: x for _, tiles in around for name, x in tiles.items()}


def _turn(scope: dict[str, slice], otherwise: str) -> Turn | None:
    rows, keys = scope.get("i"), scope.get("j", scope.get("_"))
    if rows is None:
        return None
    if keys is not None:
        return Turn(rows, f"keys {keys.start}:{keys.stop}", [])
    return Turn(rows, otherwise, [])


def _cells(step: Step, rows: slice, header: bool) -> Iterator[Cell]:
    for name, x in step.changed.items():
        column = COLUMN.get(name.partition("[")[0])
        fits = isinstance(x, np.ndarray) and x.ndim and len(x) == rows.stop - rows.start
        if column is None or not fits or (header and name not in FINAL_WHEN_LOADED):
            continue
        if name == "m_new" and "mi" in step.locals:
            yield Cell("m_old", step, "mi")
        yield Cell(column, step, name)
