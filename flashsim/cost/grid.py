"""A grid of closed forms: every combination of sizes, SRAM, tiles, algorithm and GPU is a point.

Nothing is run, and what does not fit on the chip is a point too (`fits` is False), so that a table
has the shape that was asked for. Each point is the closed form of `flashsim.cost.counts` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from .. import checks
from ..algorithms import ALGORITHMS, Algorithm, Backward, backward_of
from ..checks import bad, bad_type, clamped
from ..masks import Mask
from ..memory import widened
from ..problem import parts_of_keys
from .bounds import Work, best
from .counts import Cost, Head
from .devices import Device, device
from .io import DTYPES
from .roofline import Roofline
from .tiles import RULES, STEPS, optimal, paper, strict

Axis = int | str | Iterable[int]
Tiles = tuple[int, int]

AXES = ("algorithm", "N", "d", "M", "device", "Br", "Bc")
MOST_POINTS = 2_000_000  # 1.5 GB
USUAL = ("standard", "flash1", "flash2")
LEAST_FACTOR = 1.01  # of a range
_COLUMNS = (
    "algorithm", "N", "d", "M", "device", "Br", "Bc", "fits", "sram_elements", "sram_bytes",
    "read_elements", "written_elements", "total_elements", "flops", "exps", "total_bytes",
    "lower_bound_elements", "lower_seconds", "serial_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """Points, each an entry of every column. All figures but those of the SRAM are of one head.

    Attributes
    ----------
    columns : dict of str to list
        AXES, then fits, sram_elements and sram_bytes (needed at once), read_elements,
        written_elements, total_elements, flops, exps, total_bytes, lower_bound_elements (what any
        algorithm must move with as much on chip: `flashsim.cost.bounds`), lower_seconds and
        serial_seconds (`flashsim.cost.roofline`). None where there is no value.
    axes : dict of str to list
        The values of each axis that was given; M, Br and Bc are left out if they were not.
    """

    columns: dict[str, list[Any]]
    axes: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.columns["N"])

    @property
    def varying(self) -> list[str]:
        """The axes that take several values."""
        return [name for name, taken in self.axes.items() if len(taken) > 1]

    def records(self) -> list[dict[str, Any]]:
        """A dict for each point."""
        rows = zip(*self.columns.values(), strict=True)
        return [dict(zip(self.columns, row, strict=True)) for row in rows]

    def where(self, **fixed: Any) -> Grid:
        """The points at which some axes have given values.

        Raises
        ------
        ValueError
            If there is no such axis.
        """
        for name in fixed:
            checks.choice("axis", name, self.columns)
        wanted = [(self.columns[name], value) for name, value in fixed.items()]
        keep = [n for n in range(len(self)) if all(column[n] == x for column, x in wanted)]
        return Grid(
            {name: [column[n] for n in keep] for name, column in self.columns.items()},
            {**self.axes, **{name: [value] for name, value in fixed.items()}},
        )

    def to_parquet(self, path: Path | str) -> None:
        """Write an Apache Parquet file, a row for each point.

        Raises
        ------
        OSError
            If pyarrow is not installed, or the file cannot be written.
        ValueError
            If a column has a number that its 64-bit integers cannot hold.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise OSError(
                "parquet: expected pyarrow to be installed, as by pip install 'flashsim[parquet]'"
            ) from None
        try:
            table = pyarrow.table(self.columns)
        except OverflowError:
            name, x = next(
                (name, x)
                for name, column in self.columns.items()
                for x in column
                if isinstance(x, int) and x >= 2**63
            )
            raise bad(name, x, "integers below 2^63, which Parquet holds") from None
        pyarrow.parquet.write_table(table, path)


def values(name: str, given: Axis) -> list[int]:
    """The values of an axis: an integer, several, or a text of integers and ranges.

    A range is start:stop:STEP or start:stop:xFACTOR, the end included if it is met; commas separate
    integers and ranges.

    Examples
    --------
    >>> values("N", "64,1024:8192:x2")
    [64, 1024, 2048, 4096, 8192]
    >>> values("M", "1000:2000:500")
    [1000, 1500, 2000]

    Raises
    ------
    ValueError, TypeError
        If nothing is given, or it is not positive integers.
    """
    if isinstance(given, str):
        found = [x for part in given.split(",") for x in _range(name, part)]
    elif isinstance(given, Iterable):
        found = list(given)
    else:
        found = [given]
    if not found:
        raise bad(name, given, "at least one integer")
    return list(dict.fromkeys(checks.integer(name, x, 1) for x in found))


def _range(name: str, text: str) -> list[int]:
    """One part of a text; see `values`."""
    form = "integers and ranges such as 64,1024:65536:x2 or 1000:9000:500"
    start, *rest = text.split(":")
    try:
        if not rest:
            return [int(start)]
        stop, step = rest
        first, last = int(start), int(stop)
        factor, by = (Fraction(step[1:]), 0) if step.startswith("x") else (Fraction(1), int(step))
    except (ValueError, ZeroDivisionError):
        raise bad(name, text, form) from None
    if by and (last - first) // by >= MOST_POINTS:
        raise bad(name, text, f"at most {MOST_POINTS} integers")
    if not 1 <= first <= last or not (factor >= LEAST_FACTOR or by > 0):
        raise bad(name, text, f"{form}, upwards from 1 or more, a factor of {LEAST_FACTOR} or more")
    found, x = [], Fraction(first)
    while x <= last:
        found.append(round(x))
        x = x * factor + by
    return found


@dataclass(frozen=True)
class _Chip:
    """A budget, in elements (M) or in the bytes of one GPU, and the GPUs that share its counts."""

    M: int | None
    sram: float
    sram_bytes: float
    gpus: tuple[Device, ...]


def grid(
    algorithms: str | Sequence[str] = USUAL,
    *,
    N: Axis,
    d: Axis,
    M: Axis | None = None,
    Br: Axis | None = None,
    Bc: Axis | None = None,
    devices: str | Sequence[str] = "h200",
    rule: str | None = None,
    backward: bool = False,
    dtype: str = "float16",
    on_step: Callable[[str], None] = lambda what: None,
) -> Grid:
    """The closed form at every combination of what is given.

    Parameters
    ----------
    algorithms : str or sequence of str
        Names in `flashsim.ALGORITHMS` of those that run on Q, K and V alone; "flash1:elided" is the
        published kernel's convention, "flash1" the literal one.
    N, d : axis
        Sequence lengths and widths: an integer, several, or a text as of `values`.
    M : axis, optional
        SRAM in elements, each number counting one. Default: what a thread block of each GPU may use
        in bytes.
    Br, Bc : axis, optional
        Rows of a query and of a key tile, both or neither; those longer than N count as N.
    devices : str or sequence of str
        GPU presets; they give the time, and the SRAM if M does not.
    rule : {"strict", "paper", "optimal", "hardware"}
        As of `tile_sizes`, where Br and Bc are not given (default: "strict").
    backward : bool
        The backward pass instead of the forward one.
    dtype : str
        Of Q, K, V, as of `io_cost`.
    on_step : callable, optional
        Told of each (algorithm, N, d) as its points come up.

    Returns
    -------
    Grid
        Points in the order of AXES. Where no tiles fit in M, all but the axes is None.

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable, or there are more than two million points.

    Examples
    --------
    >>> points = grid("flash2", N="1024:4096:x2", d=64, M=40000)
    >>> points.columns["total_elements"]
    [1049600, 3672064, 14159872]
    """
    checks.flag("backward", backward)
    rows = [_row(name, backward) for name in _names("algorithms", algorithms)]
    lengths, widths = values("N", N), values("d", d)
    gpus = tuple(device(name) for name in _names("devices", devices))
    if (Br is None) != (Bc is None):
        name, given = ("Br", Br) if Bc is None else ("Bc", Bc)
        raise bad(name, given, "both Br and Bc, or neither")
    sides = {} if Br is None or Bc is None else {"Br": values("Br", Br), "Bc": values("Bc", Bc)}
    tilings: list[Tiles | None] = list(product(sides["Br"], sides["Bc"])) if sides else []
    if M is None:
        chips = [_Chip(None, math.inf, gpu.sram_bytes_per_block, (gpu,)) for gpu in gpus]
    else:
        chips = [_Chip(m, m, math.inf, gpus) for m in values("M", M)]
    if rule is not None and sides:
        raise bad("rule", rule, "None, as Br and Bc give the tiles")
    rule = checks.choice("rule", "strict" if rule is None else rule, RULES)
    stored = DTYPES[checks.choice("dtype", dtype, DTYPES)]
    points = len(rows) * len(lengths) * len(widths) * max(1, len(tilings))
    points *= len(chips) * len(chips[0].gpus)
    if points > MOST_POINTS:
        raise ValueError(f"the grid has {points} points: expected at most {MOST_POINTS}")

    @cache
    def bound(work: Work, room: int) -> int:
        return best(work, room, backward=backward)[0]

    table: list[tuple[Any, ...]] = []
    for label, row, elide in rows:
        chosen = _rule(rule, row)
        for length, width in product(lengths, widths):
            on_step(f"{label}, N = {length}, d = {width}")
            head = Head(
                Mask(length, length), width, width, stored.itemsize, widened(stored).itemsize,
                splits=parts_of_keys(None, 1, length, length, width),
            )  # fmt: skip
            work = Work.of(head.mask, width, width)
            for chip in chips:
                here = tilings or [chosen(head, chip)]
                costs = _costs(row, elide, head, chip, here)
                figures = [_figures(cost, chip, head, partial(bound, work)) for cost in costs]
                for gpu in chip.gpus:
                    at = label, length, width, chip.M, gpu.key
                    table += [
                        (*at, *(tiles or (None, None)), *these, *_seconds(cost, gpu, dtype))
                        for tiles, cost, these in zip(here, costs, figures, strict=True)
                    ]
    axes: dict[str, list[Any]] = {
        "algorithm": [label for label, *_ in rows],
        "N": lengths,
        "d": widths,
    }
    axes |= {} if M is None else {"M": [chip.M for chip in chips]}
    axes |= {"device": [gpu.key for gpu in gpus], **sides}
    return Grid(dict(zip(_COLUMNS, map(list, zip(*table, strict=True)), strict=True)), axes)


def steps(algorithms: str | Sequence[str] = USUAL, *, N: Axis, d: Axis, **_: Any) -> int:
    """How many steps `grid` tells of, given its arguments."""
    return len(_names("algorithms", algorithms)) * len(values("N", N)) * len(values("d", d))


def _names(what: str, given: str | Sequence[str]) -> list[str]:
    if not isinstance(given, Iterable):
        raise bad_type(what, given, "a name, or several")
    names = [given] if isinstance(given, str) else list(given)
    if not names:
        raise bad(what, given, "at least one name")
    return list(dict.fromkeys(names))


def _row(name: str, backward: bool) -> tuple[str, Algorithm | Backward, bool]:
    """Label, registry row of the pass, and whether initial accumulators are free."""
    algorithm, _, convention = str(name).partition(":")
    forward = ALGORITHMS[checks.choice("algorithms", algorithm, ALGORITHMS)]
    if forward.requires:
        others = ", ".join(other for other, row in ALGORITHMS.items() if not row.requires)
        raise bad("algorithms", name, f"one that runs without {forward.requires}: {others}")
    checks.choice("convention", convention or "literal", checks.CONVENTIONS)
    row = backward_of(algorithm, convention or "literal") if backward else forward
    return name, row, convention == "elided"


def _rule(rule: str, row: Algorithm | Backward) -> Callable[[Head, _Chip], Tiles | None]:
    """The tiles of a rule on a chip; None where none fit."""
    found: dict[tuple[int, float, float], int] = {}  # the longer side at the N before

    def search(head: Head, chip: _Chip) -> Tiles | None:
        try:
            if rule in STEPS:
                return optimal(row, head, chip.sram, chip.sram_bytes, STEPS[rule])
            if rule == "paper":
                return paper(row, head, chip.M or int(chip.sram_bytes) // head.stored)
            key = head.d, chip.sram, chip.sram_bytes
            tiles = strict(row, head, chip.sram, chip.sram_bytes, near=found.get(key, 0))
        except ValueError:
            return None
        found[key] = max(tiles)
        return tiles

    return search


def _costs(
    row: Algorithm | Backward, elide: bool, head: Head, chip: _Chip, tilings: list[Tiles | None]
) -> list[Cost | None]:
    """The closed form for each tiling; None where there is none."""
    more = row.more(head, chip.sram, chip.sram_bytes)
    found: list[Cost | None] = []
    for tiles in tilings:
        if tiles is None:
            found.append(None)
            continue
        Br, Bc = clamped(tiles, head.Nq, head.Nk)
        found.append(row.count(head, Br=Br, Bc=Bc, elide=elide, **more))
    return found


def _figures(
    cost: Cost | None, chip: _Chip, head: Head, bound: Callable[[int], int]
) -> tuple[Any, ...]:
    """The columns from fits to lower_bound_elements."""
    if cost is None:
        return (False, *(None,) * 9)
    fits = cost.sram_elements <= chip.sram and cost.sram_bytes <= chip.sram_bytes
    room = chip.M or int(chip.sram_bytes) // head.stored
    reads, writes = cost.read_elements, cost.written_elements
    return (
        fits, cost.sram_elements, cost.sram_bytes, reads, writes, reads + writes,
        cost.flops, cost.exps, cost.total_bytes,
        bound(room if fits else max(room, cost.sram_elements)),
    )  # fmt: skip


def _seconds(cost: Cost | None, gpu: Device, dtype: str) -> tuple[float | None, float | None]:
    if cost is None:
        return None, None
    each = Roofline(gpu, dtype, cost.total_bytes, cost.flops, cost.exps).seconds.values()
    return max(each), sum(each)
