"""An exercise: write an attention kernel over tiles, and have it scored.

    def my_attention(Q, K, V, O, *, Br, Bc, scale):
        on_chip = chip_of(Q)
        for i, Qi in tiles(Br, Q):
            ...
            O[i] = ...

    score(my_attention, tiles=(16, 16))

Q, K, V and O live in the HBM of a `Machine` of `M` elements; all else is `flashsim.memory`. What is
scored is whether the answer is exact, what is read and written, and what is on chip at once. The
levels are the package's own algorithms on the same problem, by their closed forms. A kernel that is
wrong gets the smallest input on which it is, and what such a mistake usually is.

A tile that is loaded counts by itself. What the kernel makes on chip counts if it is registered,
`Oi = on_chip("Oi", ...)`: the score takes its word that all of it is, vectors within a line aside.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from . import checks
from .cost.bounds import Work, best
from .cost.io import io_cost
from .cost.tiles import tile_sizes
from .inputs import random_inputs
from .masks import Mask
from .memory import Machine, SramOverflow, Traffic
from .reference import Exact, exact

Array = np.ndarray[Any, Any]
Kernel = Callable[..., Any]

N, D, M = 256, 16, 2048  # keys and queries, width, and elements on chip of the problem that counts
SEED = 0
A_FEW = 4  # numbers a row in HBM, such as l and m, are no N x N matrix
THE_PROBLEM = f"on the problem that counts, {N} random queries and keys"

NAMES = {
    "standard": "standard attention",
    "flash1": "FlashAttention",
    "flash2": "FlashAttention-2",
    "best": "FlashAttention-2, best tiles",
    "bound": "no exact kernel can move less",
}


class Probe(NamedTuple):
    """A small input, columns of width 1 in tiles of 2 x 2, and what is wrong if it comes out so."""

    mistake: str
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]
    scale: float = 1.0


# In order: each but for one thing like those before it, so the first that fails names the thing.
PROBES = (
    Probe(
        "one key has all the weight, and O is not its value; a NaN may be exp(m_new - m_old), "
        "where exp(m_old - m_new) is meant, as m_old is -inf at first",
        q=(1, 2), k=(0, 30), v=(1, 3),
    ),
    Probe(
        "all scores are equal, and O is not the mean of V: divide it by l, the sum of a row's "
        "exponentials",
        q=(1, 2), k=(0, 0), v=(1, 3),
    ),
    Probe(
        "one tile is all there is, and it is weighed wrongly: softmax(Q Kᵀ · scale) V, exp to the "
        "base e, and the sum over the keys of a row",
        q=(1, 2), k=(0, 1), v=(1, 3),
    ),
    Probe("the scores are not multiplied by scale", q=(1, 2), k=(0, 1), v=(1, 3), scale=0.5),
    Probe(
        "a second query tile comes out wrong: each starts from an O, l and m of its own, and is "
        "written",
        q=(1, 2, 3, 4), k=(0, 1), v=(1, 3),
    ),
    Probe(
        "key tiles are not added up, though all scores are equal: sum O and l over them, and "
        "divide O by l after the last",
        q=(0, 0), k=(0, 0, 0, 0), v=(1, 3, 1, 3),
    ),
    Probe(
        "what was summed over earlier key tiles is lost: O, l and m stay from tile to tile; if m "
        "is never set to m_new it stays -inf, and exp(m_old - m_new) is 0",
        q=(0, 0), k=(0, 0, 0, 0), v=(1, 2, 4, 8),
    ),
    Probe(
        "a tile whose maximum is lower is weighed wrongly: shift its scores by the largest so "
        "far, not by its own",
        q=(1, 1), k=(3, 2, 1, 0), v=(10, 20, 30, 40),
    ),
    Probe(
        "the maximum rises, and what was summed before is not rescaled: multiply both O and l "
        "by exp(m_old - m_new)",
        q=(1, 1), k=(2, 1, 3, 0), v=(10, 20, 30, 40),
    ),
    Probe(
        "the last key tile is short: N // Bc leaves it out, and zeros in its place score 0, not "
        "-inf",
        q=(1, 1), k=(-3, -2, -1), v=(10, 20, 30),
    ),
    Probe("the last query tile is short: it has its rows too", q=(1, 2, 3), k=(0, 1), v=(1, 3)),
    Probe(
        "large scores overflow: exp(100) is beyond float32, so subtract the row's maximum first",
        q=(1, 1), k=(0, 1, 100, 99), v=(10, 20, 30, 40),
    ),
    Probe(
        "all scores of a row are far below 0, and their exponentials vanish: m starts at -inf, not "
        "at 0, so that it is the maximum of the scores alone",
        q=(1, 1), k=(-200, -201), v=(1, 3),
    ),
    Probe(
        "the maximum falls from one tile to the next, and the factor overflows: the largest so "
        "far never falls",
        q=(1, 1), k=(200, 199, 0, 1), v=(10, 20, 30, 40),
    ),
    Probe(
        "the rows of a tile have scores far apart: each row has a maximum of its own",
        q=(1, 200), k=(0, 1), v=(1, 3),
    ),
)  # fmt: skip


class Level(NamedTuple):
    """What a kernel reaches, and how to get there."""

    title: str
    reached: Callable[[Score], bool]
    hint: str


LEVELS = (
    Level("exact, within the chip", lambda s: not s.mistake, ""),
    Level(
        "no N x N matrix in HBM",
        lambda s: s.extra_hbm_elements <= A_FEW * N,
        "A row's state m, l and O is enough, and its scores can be made again: loop over the keys "
        "inside the loop over the queries.",
    ),
    Level(
        "as few elements as FlashAttention",
        lambda s: s.moved("flash1"),
        "With its state on chip a query tile reads K and V once: fewer, longer query tiles read "
        "them less often.",
    ),
    Level(
        "as few as FlashAttention-2",
        lambda s: s.moved("flash2"),
        "Let the tiles fill the chip; and one pass over the keys is enough, if O_i, l_i and m_i "
        "stay on chip and are rescaled.",
    ),
    Level(
        "as few as FlashAttention-2 with the best tiles",
        lambda s: s.moved("best"),
        "Which side of the tiles is worth its room?",
    ),
)


@dataclass(frozen=True)
class Score:
    """What `score` found.

    Attributes
    ----------
    mistake : str
        What is wrong, and where it shows; empty for a kernel that is right and fits.
    error_ratio : float
        The largest error over what rounding may do, on the problem that counts; at most 1 if exact.
    traffic : Traffic
        What it read and wrote there, in elements per array.
    sram_peak_elements : int
        The most that was on chip at once, of `M`.
    extra_hbm_elements : int
        What it allocated in HBM.
    """

    mistake: str
    error_ratio: float
    traffic: Traffic
    sram_peak_elements: int
    extra_hbm_elements: int

    @property
    def level(self) -> int:
        """How many of `LEVELS` are reached, from the first on."""
        for n, level in enumerate(LEVELS):
            if not level.reached(self):
                return n
        return len(LEVELS)

    def moved(self, mark: str) -> bool:
        """Whether it moves no more elements than one of `marks`."""
        return self.traffic.total_elements <= marks()[mark]

    def _said(self) -> tuple[str, str]:
        """The level, and what comes next."""
        n = self.level
        if self.mistake:
            return f"Level 0 of {len(LEVELS)}.", self.mistake
        reached = f"Level {n} of {len(LEVELS)}: {LEVELS[n - 1].title}."
        if n == len(LEVELS):
            return reached, ""
        return reached, f"Next: {LEVELS[n].title}. {LEVELS[n].hint}"

    def _numbers(self) -> list[tuple[str, str]]:
        traffic = self.traffic
        return [
            ("largest error", f"{self.error_ratio:.3g} times what rounding may do"),
            ("read", f"{traffic.read_elements:,} elements{_by_array(traffic.reads)}"),
            ("written", f"{traffic.written_elements:,} elements{_by_array(traffic.writes)}"),
            ("SRAM peak", f"{self.sram_peak_elements:,} of {M:,} elements"),
            ("HBM allocated", f"{self.extra_hbm_elements:,} elements"),
        ]

    def _bars(self) -> list[tuple[str, int]]:
        """Elements moved: the kernel's among the marks, most first."""
        mine = ("your kernel", self.traffic.total_elements)
        rows = [mine, *((NAMES[name], elements) for name, elements in marks().items())]
        return sorted(rows, key=lambda row: -row[1])

    def __str__(self) -> str:
        level, more = self._said()
        lines = [level, *([more] if self.mistake else [])]
        if self.traffic.total_elements:
            lines += ["", f"  {THE_PROBLEM}"]
            lines += [f"  {name:<32}{text}" for name, text in self._numbers()]
            lines += ["", "  elements moved, in all"]
            lines += [f"  {name:<32}{elements:>9,}" for name, elements in self._bars()]
        return "\n".join(lines if self.mistake or not more else [*lines, "", more])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        level, more = (html.escape(text) for text in self._said())
        colour = "#D55E00" if self.mistake else "#0072B2"
        body = ""
        if self.traffic.total_elements:
            bars = self._bars()
            rows = [_row(f"<b>{THE_PROBLEM}</b>", "")]
            rows += [_row(name, html.escape(text)) for name, text in self._numbers()]
            rows.append(_row("<b>elements moved, in all</b>", ""))
            rows += [_row(name, _bar(n, bars[0][1], name == "your kernel")) for name, n in bars]
            body = f"<table>{''.join(rows)}</table>"
        before, after = (more, "") if self.mistake else ("", more)
        return (
            f'<div style="border-left:4px solid {colour};padding-left:0.7em;overflow-x:auto">'
            f"<div><b>{level}</b> {before}</div>{body}<div>{after}</div></div>"
        )


@cache
def marks() -> dict[str, int]:
    """Elements that the problem moves: by each algorithm with the tiles of a rule, and at least."""
    tilings = {
        "standard": ("standard", "strict"),
        "flash1": ("flash1", "strict"),
        "flash2": ("flash2", "strict"),
        "best": ("flash2", "optimal"),
    }
    found = {}
    for name, (algorithm, rule) in tilings.items():
        Br, Bc = tile_sizes(M, D, rule, algorithm, N=N)
        cost = io_cost(algorithm, N=N, d=D, Br=Br, Bc=Bc, sram=M)
        found[name] = cost.total_elements
    return found | {"bound": best(Work.of(Mask(N, N), D, D), M)[0]}


def score(kernel: Kernel, tiles: tuple[int, int] = (16, 16)) -> Score:
    """Run a kernel on small inputs and on the problem that counts.

    Parameters
    ----------
    kernel : callable
        `kernel(Q, K, V, O, *, Br, Bc, scale)` with Q (Nq, d), K (Nk, d), V (Nk, d) and O (Nq, d) in
        HBM, float32; it writes softmax(Q K^T scale) V to O. `chip_of(Q)` registers what is made on
        chip, and `chip_of(Q).allocate(name, shape, dtype)` is more HBM.
    tiles : (Br, Bc)
        What it is called with on the problem that counts; the small inputs have tiles of 2 x 2.

    Returns
    -------
    Score

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable; and whatever the kernel raises, but for an `SramOverflow` on the
        problem that counts, which is a verdict.
    """
    if not callable(kernel):
        raise checks.bad_type("kernel", kernel, "a function")
    Br, Bc = checks.pair_of_tiles(tiles)
    mistake = next(filter(None, (_missed(kernel, probe) for probe in PROBES)), "")
    qkv, right = _problem()
    machine = Machine(sram=M, poison=True)
    try:
        output = _run(kernel, machine, *qkv, Br=Br, Bc=Bc, scale=D**-0.5)
    except SramOverflow as error:
        too_much = f"With tiles of {Br} x {Bc}: {error}."
        return Score(mistake or too_much, np.inf, Traffic(), machine.peak_elements, 0)
    ratio = right.output_ratio(output)
    return Score(
        mistake or _wrong_in_full(kernel, ratio, Br, Bc) or _uncounted(machine),
        ratio,
        machine.traffic,
        machine.peak_elements,
        machine.allocated_elements,
    )


@cache
def _problem() -> tuple[tuple[Array, Array, Array], Exact]:
    """Q, K, V of the problem that counts, and what is right."""
    drawn = random_inputs((1, 1, N, D), SEED)
    qkv = drawn.q[0, 0], drawn.k[0, 0], drawn.v[0, 0]
    return qkv, exact(*qkv)


def _run(kernel: Kernel, machine: Machine, q: Array, k: Array, v: Array, **what: Any) -> Array:
    """What the kernel writes to O; NaN where it writes nothing."""
    O = np.full((len(q), v.shape[1]), np.nan, q.dtype)
    arrays = machine.hbm(Q=q, K=k, V=v, O=O)
    with np.errstate(all="ignore"):  # what goes wrong shows in the result
        kernel(*arrays.values(), **what)
    return O


def _missed(kernel: Kernel, probe: Probe) -> str:
    """What is wrong, if the kernel fails the probe."""
    q, k, v = (np.array(x, np.float32)[:, None] for x in (probe.q, probe.k, probe.v))
    machine = Machine()
    output = _run(kernel, machine, q, k, v, Br=2, Bc=2, scale=probe.scale)
    right = exact(q, k, v, scale=probe.scale)
    if right.output_ratio(output) <= 1:
        return ""
    if np.isnan(output).all() and not machine.traffic.writes.get("O"):
        return "Nothing is written to O: a tile is stored by O[i] = x."
    found, expected = (_listed(x) for x in (output, right.output))
    given = f"q = {_listed(q)}, k = {_listed(k)}, v = {_listed(v)}, scale = {probe.scale:g}"
    sentence = probe.mistake[0].upper() + probe.mistake[1:]
    return f"{sentence}. With {given} and tiles of 2 x 2, O is {found}; right is {expected}."


def _wrong_in_full(kernel: Kernel, ratio: float, Br: int, Bc: int) -> str:
    """What is wrong, if only the problem that counts is: probes have width 1, and no poison."""
    if ratio <= 1:
        return ""
    qkv, right = _problem()
    kept = _run(kernel, Machine(), *qkv, Br=Br, Bc=Bc, scale=D**-0.5)
    if right.output_ratio(kept) <= 1:
        return (
            "A tile is used after the end of its turn, when it has left the chip: what is to stay "
            "is registered outside of the loop."
        )
    return (
        f"Small inputs come out right, but not N = {N}, d = {D} in tiles of {Br} x {Bc}: is a size "
        "written down where the length of an array should stand?"
    )


def _uncounted(machine: Machine) -> str:
    """What is wrong, if an array has been read or written past the machine."""
    for name in ("Q", "K", "V"):
        read = machine.traffic.reads.get(name, 0)
        if read < N * D:
            return (
                f"Of {name} only {read:,} of {N * D:,} elements were read through the machine: "
                f"load tiles, {name}[rows], not {name}.data."
            )
    written = machine.traffic.writes.get("O", 0)
    if written < N * D:
        return (
            f"Of O only {written:,} of {N * D:,} elements were written through the machine: store "
            "tiles, O[rows] = x, not O.data."
        )
    return ""


def _by_array(counts: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {n:,}" for name, n in counts.items())
    return f" ({parts})" if parts else ""


def _listed(x: Array) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in x.flat) + "]"


def _row(name: str, cell: str) -> str:
    style = 'style="text-align:left;padding:0.1em 0.8em 0.1em 0;background:none"'
    return f'<tr><th scope="row" {style}>{name}</th><td {style}>{cell}</td></tr>'


def _bar(elements: int, most: int, mine: bool) -> str:
    colour = "#D55E00" if mine else "#56B4E9"
    return (
        f'<span style="display:inline-block;height:0.8em;background:{colour};'
        f'width:{16 * elements / most:.2f}em"></span> {elements:,}'
    )
