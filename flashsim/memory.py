"""Two levels of memory: HBM arrays that are touched a tile at a time, and a chip with a budget.

An algorithm in `flashsim.algorithms` is an ordinary function. Given plain NumPy arrays it computes;
given `Hbm` arrays of a `Machine` the same lines also count what they read and write, and fail when
their tiles do not fit on the chip. The loop header is the load::

    for i, Qi in tiles(Br, Q):           # Q_i comes on chip, and leaves when the turn ends
        for j, Kj, Vj in tiles(Bc, K, V):
            Sij = on_chip("Sij", Qi @ Kj.T)

Both paths copy a tile and widen it alike: a view would take BLAS down another path and change
last bits, so the counted run is bit-identical to the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Array = np.ndarray[Any, Any]


class SramOverflow(MemoryError, ValueError):
    """The tiles of one moment do not fit on the chip; the message lists each with its size."""


class Event(NamedTuple):
    """One thing that happened to memory; kept only while a `Machine` has a log."""

    kind: str  # "read", "write", "place" (born on chip), "replace" or "evict"
    name: str
    where: str  # the rows (and columns) touched, as text; "" for what lives on chip only
    elements: int  # charged elements: an eliding machine reads untouched rows for 0


class Resident(NamedTuple):
    """A tile on chip. `bytes` counts a loaded tile at the item size it has in HBM."""

    name: str
    elements: int
    bytes: int
    tile: Array


@dataclass
class Traffic:
    """HBM reads and writes in elements, per array, and the item size each array has in HBM."""

    reads: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    item_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def read_elements(self) -> int:
        """Elements read from HBM, over all arrays."""
        return sum(self.reads.values())

    @property
    def written_elements(self) -> int:
        """Elements written to HBM, over all arrays."""
        return sum(self.writes.values())

    @property
    def total_elements(self) -> int:
        """Elements read and written."""
        return self.read_elements + self.written_elements

    @property
    def read_bytes(self) -> int:
        """Bytes read: elements times the item size of each array in HBM."""
        return sum(n * self.item_bytes[name] for name, n in self.reads.items())

    @property
    def written_bytes(self) -> int:
        """Bytes written: elements times the item size of each array in HBM."""
        return sum(n * self.item_bytes[name] for name, n in self.writes.items())

    @property
    def total_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


class Machine:
    """A chip with a budget, beside an HBM whose traffic is counted.

    Parameters
    ----------
    sram : int, optional
        Budget in elements, each number counting one (the papers' M).
    sram_bytes : int, optional
        Budget in bytes, each tile counted at its item size. At most one of the two; with none the
        chip is unbounded.
    elide : bool
        First-touch policy. False (literal): `Hbm.fill` is a write like any other. True (elided, as
        the published kernels do): the initial fill costs nothing and rows not yet written are read
        for nothing.
    poison : bool
        Overwrite a tile with NaN when it leaves the chip, so that a later use of it shows.
    log : list, optional
        Collects an `Event` for everything that happens; leave it out and only counters are kept.

    Calling the machine, `machine("Sij", tile)`, registers a tile that is born on chip and returns
    it; a resident of the same name is replaced.
    """

    def __init__(
        self,
        *,
        sram: float = math.inf,
        sram_bytes: float = math.inf,
        elide: bool = False,
        poison: bool = False,
        log: list[Event] | None = None,
    ) -> None:
        if sram < math.inf and sram_bytes < math.inf:
            raise ValueError(
                f"sram_bytes={sram_bytes!r}: expected no second budget, as sram={sram!r}"
            )
        self.sram, self.sram_bytes = sram, sram_bytes
        self.elide, self.poison, self.log = elide, poison, log
        self.traffic = Traffic()
        self.allocated: dict[str, int] = {}
        self.resident: list[Resident] = []
        self.used_elements = self.used_bytes = 0
        self.peak_elements = self.peak_bytes = 0

    def hbm(self, **arrays: Array) -> dict[str, Hbm]:
        """Arrays that live in HBM already (inputs and outputs), by name."""
        return {name: Hbm(self, name, a) for name, a in arrays.items()}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Hbm:
        """New HBM memory, counted in `allocated`; it starts as NaN, so an unwritten row shows."""
        self.allocated[name] = self.allocated.get(name, 0) + math.prod(shape)
        return Hbm(self, name, np.full(shape, np.nan, dtype))

    @property
    def allocated_elements(self) -> int:
        """Elements of HBM that the run allocated for itself."""
        return sum(self.allocated.values())

    def __call__(self, name: str, tile: Array) -> Array:
        for k, old in enumerate(self.resident):
            if old.name == name:
                self._admit(Resident(name, tile.size, tile.nbytes, tile), replacing=old)
                self.resident[k] = self.resident.pop()
                self._note("replace", name, "", tile.size)
                return tile
        self._admit(Resident(name, tile.size, tile.nbytes, tile))
        self._note("place", name, "", tile.size)
        return tile

    def _admit(self, new: Resident, replacing: Resident | None = None) -> None:
        elements, size = self.used_elements + new.elements, self.used_bytes + new.bytes
        if replacing is not None:
            elements, size = elements - replacing.elements, size - replacing.bytes
        if elements > self.sram or size > self.sram_bytes:
            self._overflow(new, replacing)
        self.resident.append(new)
        self.used_elements, self.used_bytes = elements, size
        if elements > self.peak_elements:
            self.peak_elements = elements
        if size > self.peak_bytes:
            self.peak_bytes = size

    def _overflow(self, new: Resident, replacing: Resident | None) -> None:
        live = [r for r in self.resident if r is not replacing] + [new]
        shapes = ", ".join(f"{r.name} {'x'.join(map(str, r.tile.shape))}" for r in live)
        if self.sram < math.inf:
            sizes, budget, unit = [r.elements for r in live], self.sram, "elements"
        else:
            sizes, budget, unit = [r.bytes for r in live], self.sram_bytes, "bytes"
        summed = f"{' + '.join(map(str, sizes))} = " if len(sizes) > 1 else ""
        raise SramOverflow(
            f"{new.name} does not fit on the chip: {summed}{sum(sizes)} "
            f"{unit} ({shapes}), but SRAM holds {budget:g} {unit}; use smaller tiles or more SRAM"
        )

    def _evict_to(self, mark: int) -> None:
        """Drop the tiles that came on chip after `mark`: their turn has ended."""
        for gone in self.resident[mark:]:
            self.used_elements -= gone.elements
            self.used_bytes -= gone.bytes
            if self.poison and gone.tile.dtype != bool:
                gone.tile.flags.writeable = True
                gone.tile.fill(np.nan)
            self._note("evict", gone.name, "", gone.elements)
        del self.resident[mark:]

    def _note(self, kind: str, name: str, where: str, elements: int) -> None:
        if self.log is not None:
            self.log.append(Event(kind, name, where, elements))


class Hbm(NDArrayOperatorsMixin):
    """An array in HBM. `A[rows]` loads a tile on chip, `A[rows] = x` stores one; no arithmetic."""

    __slots__ = ("data", "machine", "name", "untouched", "within")

    def __init__(
        self, machine: Machine, name: str, data: Array, within: tuple[slice, ...] = ()
    ) -> None:
        self.machine, self.name, self.data = machine, name, data
        self.within = within  # the rows (and columns) that it is of a larger array
        self.untouched: Array | None = None  # where an elided fill left elements to be free
        machine.traffic.item_bytes[name] = data.dtype.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type it is stored in; tiles are widened on chip."""
        return np.dtype(self.data.dtype)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"Hbm({self.name}, shape={self.shape}, dtype={self.dtype})"

    def _refuse(self) -> TypeError:
        return TypeError(f"{self.name} lives in HBM: load a tile first, as in {self.name}[rows]")

    @property
    def T(self) -> Array:
        """Refused, as all arithmetic is."""
        raise self._refuse()

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        raise self._refuse()

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refuse()

    def __getitem__(self, where: Any) -> Array:
        view = self.data[where]
        tile = on_chip_copy(view)
        machine, cost = self.machine, view.size
        machine._admit(Resident(self.name, view.size, view.nbytes, tile))
        if self.untouched is not None:
            cost -= int(np.count_nonzero(self.untouched[where]))
        reads = machine.traffic.reads
        reads[self.name] = reads.get(self.name, 0) + cost
        if machine.log is not None:
            machine._note("read", self.name, _text(where, self.within), cost)
        return tile

    def __setitem__(self, where: Any, value: Array) -> None:
        view = self.data[where]
        if np.shape(value) != view.shape:
            raise ValueError(
                f"{self.name}[{_text(where)}] has shape {view.shape}, the tile to store has shape "
                f"{np.shape(value)}"
            )
        self.data[where] = value
        if self.untouched is not None:
            self.untouched[where] = False
        self._wrote(where, view.size)

    def fill(self, value: float) -> None:
        """Set every element; a write of the whole array, or nothing on an eliding machine."""
        self.data.fill(value)
        if self.machine.elide:
            self.untouched = np.ones(self.data.shape, bool)
            self._wrote(slice(0, len(self.data)), 0)
        else:
            self._wrote(slice(0, len(self.data)), self.data.size)

    def _wrote(self, where: Any, elements: int) -> None:
        writes = self.machine.traffic.writes
        writes[self.name] = writes.get(self.name, 0) + elements
        if self.machine.log is not None:
            self.machine._note("write", self.name, _text(where, self.within), elements)


def _text(where: Any, within: tuple[slice, ...] = ()) -> str:
    if isinstance(where, np.ndarray):  # rows through a table, each run of them
        runs = np.split(where, np.flatnonzero(np.diff(where) != 1) + 1)
        return " and ".join(f"{run[0]}:{run[-1] + 1}" for run in runs if len(run))
    parts = _moved(where if isinstance(where, tuple) else (where,), within)
    return ", ".join(f"{p.start}:{p.stop}" if isinstance(p, slice) else str(p) for p in parts)


def _moved(parts: tuple[Any, ...], within: tuple[slice, ...]) -> tuple[Any, ...]:
    """Rows (and columns) of a part of an array, as the larger array counts them."""
    parts += tuple(slice(0, side.stop - side.start) for side in within[len(parts) :])
    moved = (
        slice(side.start + p.start, side.start + p.stop)
        for side, p in zip(within, parts, strict=False)
    )
    return (*moved, *parts[len(within) :])


class Panel:
    """A band of rows (or columns) of a two-dimensional array, tiled along its other axis."""

    def __init__(self, A: Array | Hbm, rows: slice | None, columns: slice | None) -> None:
        self.A, self.rows, self.columns = A, rows, columns

    def __len__(self) -> int:
        return self.A.shape[0 if self.rows is None else 1]

    def __getitem__(self, part: slice) -> Array:
        where = (part, self.columns) if self.rows is None else (self.rows, part)
        return load(self.A, where)


class Paged(Panel):
    """The rows of a sequence whose pages lie anywhere in an array, in any order."""

    def __init__(self, A: Array | Hbm, table: Array, page: int, length: int) -> None:
        self.A, self.table, self.page, self.length = A, table, page, length

    def __len__(self) -> int:
        return self.length

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the sequence, and their width."""
        return self.length, self.A.shape[1]

    def __getitem__(self, part: slice) -> Array:
        n = np.arange(part.start, part.stop)
        return load(self.A, self.table[n // self.page] * self.page + n % self.page)


def paged(A: Array | Hbm, table: Array, page: int, length: int) -> Paged:
    """A sequence's rows of A (pages page, width): row n is n mod page of page table[n div page]."""
    return Paged(A, table, page, length)


def row(A: Array | Hbm, i: slice) -> Panel:
    """Rows i of A; its tiles are blocks of columns: `tiles(Bc, V, row(P, i))`."""
    return Panel(A, i, None)


def column(A: Array | Hbm, j: slice) -> Panel:
    """Columns j of A; its tiles are blocks of rows: `tiles(Br, dO, column(P, j))`."""
    return Panel(A, None, j)


def part(A: Array | Hbm, rows: slice, columns: slice | None = None) -> Array | Hbm:
    """Some rows (and columns) of A as an array of its own: the same memory, nothing is moved."""
    where = (rows,) if columns is None else (rows, columns)
    if not isinstance(A, Hbm):
        return A[where]
    return Hbm(A.machine, A.name, A.data[where], _moved(where, A.within))


def widened(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type a tile has on chip: at least float32; bool stays bool."""
    return dtype if dtype == bool else np.promote_types(dtype, np.float32)


def on_chip_copy(view: Array) -> Array:
    """A C-contiguous, widened, read-only copy: what a load yields on both paths."""
    tile = np.array(view, dtype=widened(view.dtype), order="C")
    tile.flags.writeable = False
    return tile


def load(A: Array | Hbm, where: Any) -> Array:
    """A tile of either kind of array: `A[where]`, counted if A lives in HBM."""
    return A[where] if isinstance(A, Hbm) else on_chip_copy(A[where])


def machine_of(A: Array | Hbm | Panel) -> Machine | None:
    """The machine whose HBM holds A; None for a plain array."""
    if isinstance(A, Panel):
        return machine_of(A.A)
    return A.machine if isinstance(A, Hbm) else None


def chip_of(A: Array | Hbm) -> Callable[[str, Array], Array]:
    """`on_chip` for the memory A lives in: registers a tile there, or just returns it."""
    return machine_of(A) or _no_chip


def _no_chip(name: str, tile: Array) -> Array:
    return tile


def blocks(N: int, B: int) -> Iterator[slice]:
    """Slices of B rows that cover N rows; the last may be shorter."""
    return (slice(start, min(start + B, N)) for start in range(0, N, B))


def tiles(
    B: int, *arrays: Array | Hbm | Panel, where: Callable[[slice], bool] | None = None
) -> Iterator[Any]:
    """Load the arrays block by block: `for i, Qi, Oi in tiles(Br, Q, O)`.

    Parameters
    ----------
    B : int
        Rows of a block.
    *arrays : Hbm, ndarray or Panel
        Equally long; each turn loads the block's rows of every one.
    where : callable, optional
        `where(rows)` False: the block is neither loaded nor visited.

    Yields
    ------
    rows, *tiles
        A slice, and read-only copies. On a machine they are evicted when the turn ends, also by
        `break` or an exception.
    """
    machine = machine_of(arrays[0])
    for rows in blocks(len(arrays[0]), B):
        if where is not None and not where(rows):
            continue
        if machine is None:
            yield rows, *(A[rows] if isinstance(A, Panel) else load(A, rows) for A in arrays)
            continue
        mark = len(machine.resident)
        try:
            yield rows, *(A[rows] for A in arrays)
        finally:
            machine._evict_to(mark)


def turns(
    B: int, A: Array | Hbm | Panel, where: Callable[[slice], bool] | None = None
) -> Iterator[slice]:
    """The blocks of A without loading it: the loop of an accumulator that is only written."""
    machine = machine_of(A)
    for rows in blocks(len(A), B):
        if where is not None and not where(rows):
            continue
        if machine is None:
            yield rows
            continue
        mark = len(machine.resident)
        try:
            yield rows
        finally:
            machine._evict_to(mark)
