"""Deliberate faults in FlashAttention-2, one at a time: the wrong number beside the right one.

    print(show("skip-rescale"))     # on an input so small that it can be checked by hand
    show("drop-tail", q, k, v, tiles=(64, 48))
    show("skip-rescale").view()     # step through it, wrong values marked

A fault is a piece of the algorithm's text and what stands there instead, as a bug is. The text must
occur exactly once in `flash_attention_2`; the changed copy is compiled beside it, and the algorithm
and the registry stay as they are. Switches in the algorithm would spoil the page that is to be
read, and a faulty mask or dropout object could bring in only some of these faults.
"""

from __future__ import annotations

import ast
import html
import inspect
import linecache
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from . import checks
from .algorithms import ALGORITHMS, flash2
from .checks import bad, clamped
from .memory import Hbm, Machine, widened
from .problem import Problem, checked
from .record import Recording, recording
from .reference import Exact, exact

if TYPE_CHECKING:
    from .viewer import View

Array = np.ndarray[Any, Any]
Column = tuple[float, ...]

FLASH2 = ALGORITHMS["flash2"]


@dataclass(frozen=True)
class Failure:
    """A fault, and an input that shows it.

    Attributes
    ----------
    title : str
        What is done wrong.
    old, new : str
        A piece of the source of `flash_attention_2`, and what stands there instead.
    why : str
        Why the number is wrong.
    seen : str
        Where this was a real fault.
    underflow : str
        Why instead, where the weights are too small and not too large.
    shows : str
        What it spoils: "output" or "lse".
    q, k, v : tuple of float
        The input, columns of width 1, scale 1.
    tiles : (int, int)
        (Br, Bc).
    dropout_p : float
        Probability that a weight is dropped.
    """

    title: str
    old: str
    new: str
    why: str
    seen: str
    q: Column
    k: Column
    v: Column
    tiles: tuple[int, int]
    shows: str = "output"
    dropout_p: float = 0.0
    underflow: str = ""


FAILURES = {
    "skip-rescale": Failure(
        title="the output so far is not rescaled when the maximum rises",
        old="Oi[:] = alpha[:, None] * Oi + ",
        new="Oi[:] = Oi + ",
        why="O was summed with weights relative to the old maximum; l is relative to the new one.",
        seen="as another fault of the same line, the inverse factor in place of the factor: "
        "FlashAttention-2, Algorithm 1, line 10, in print (Dao-AILab/flash-attention issue 991)",
        q=(1,),
        k=(2, 1, 3, 0),
        v=(10, 20, 30, 40),
        tiles=(1, 2),
    ),
    "drop-tail": Failure(
        title="keys beyond the last whole tile are dropped",
        old="where=mask.row(i)",
        new="where=lambda j: j.stop <= len(K) // Bc * Bc",
        why="Nk // Bc counts whole tiles; the last, short one needs a turn too.",
        seen="in 66RING/tiny-flash-attention issue 12, jax issue 27224",
        q=(0,),
        k=(0, 0, 0, 0, 0),
        v=(0, 0, 0, 0, 5),
        tiles=(1, 4),
    ),
    "zero-pad": Failure(
        title="a short key tile is filled up with zeros",
        old="tiles(Bc, K, V, where=mask.row(i))",
        new="zero_padded(tiles(Bc, K, V, where=mask.row(i)), Bc)",
        why="A key of zeros scores 0, not -inf, so the padding takes its share of the softmax.",
        seen="in pytorch issue 196678, TensorRT-LLM pull request 18174",
        q=(1,),
        k=(-10, -10, -10),
        v=(1, 1, 1),
        tiles=(1, 2),
    ),
    "forget-max": Failure(
        title="the maximum is not subtracted",
        old="m_new = np.maximum(mi, Sij.max(axis=1))",
        new="m_new = np.zeros_like(mi)",
        why="exp of such scores is beyond the largest number of its type: l or O is infinite, and "
        "O / l says nothing.",
        underflow="exp of such scores is below the smallest number of its type: the weights lose "
        "their digits or are all 0, as if the row saw no key.",
        seen="in first versions of a kernel that are tried on small scores only",
        q=(1,),
        k=(0, 100),
        v=(1, 3),
        tiles=(1, 1),
    ),
    "base-2-lse": Failure(
        title="the logsumexp is left in base 2",
        old="L[i] = shift(mi) + log(li)",
        new="L[i] = (shift(mi) + log(li)) / np.log(2)",
        why="GPUs have exp2. The output is right; what takes L for a natural logarithm "
        "goes wrong: in the backward pass rows of P = exp(S - L) no longer sum to 1, and a merge "
        "of splits weighs its parts wrongly.",
        seen="in flashinfer issue 4485, FlashMLA pull request 106",
        q=(0,),
        k=(0, 0),
        v=(1, 3),
        tiles=(1, 2),
        shows="lse",
    ),
    "dropout-by-tile": Failure(
        title="dropout bits are drawn by the place in the tile",
        old="drop(Pij, i, j)",
        new="drop(Pij, slice(0, len(Qi)), slice(0, len(Kj)))",
        why="Each tile drops the same places, so the answer depends on the tile sizes, and a "
        "backward pass with other tiles drops other weights.",
        seen="in Dao-AILab/flash-attention issue 612",
        q=(0, 0, 0, 0),
        k=(0, 0, 0, 0),
        v=(1, 2, 4, 8),
        tiles=(2, 2),
        dropout_p=0.5,
    ),
}


@dataclass(repr=False)
class Comparison:
    """What a fault makes of an input, beside what is right.

    Attributes
    ----------
    name : str
        A name in `FAILURES`.
    right, wrong : ndarray
        Output (N, dv) or lse (N,), whichever the fault spoils, by the algorithm and by the faulty
        copy.
    reference : Exact
        float64, and how far a run may be off.
    max_error : float
        The largest error of `wrong` against float64; inf if a value is no number.
    where : tuple of int
        Its place.
    """

    name: str
    right: Array
    wrong: Array
    reference: Exact
    max_error: float
    where: tuple[int, ...]
    call: _Call = field(repr=False)

    @property
    def failure(self) -> Failure:
        """What is done wrong, and why that matters."""
        return FAILURES[self.name]

    @property
    def ratio(self) -> float:
        """The largest error of `wrong` over the bound of its rounding; inf if a value is no number.

        At most 1, the fault does not show on this input.
        """
        reference = self.reference
        of = reference.output_ratio if self.failure.shows == "output" else reference.lse_ratio
        return of(self.wrong)

    def view(self) -> View:
        """The faulty run as a page to step through; values that differ from the right are marked.

        See `flashsim.viewer.View`.
        """
        from .viewer import MOST_STEPS, View, standard_traffic

        call = self.call
        (Nq, Nk), (Br, Bc) = call.problem.lengths, call.tiles
        return View(
            call.record(faulty(self.name), MOST_STEPS),
            title="FlashAttention-2 with a fault",
            subtitle=f"{self.name}; N = {Nq}; Nk = {Nk}; tiles {Br} × {Bc}",
            closed_form_elements=call.closed_form_elements,
            standard=standard_traffic(*call.head, sram=call.sram, **call.what),
            row=self.where[0],
            right=call.record(flash2.flash_attention_2, MOST_STEPS),
            note=f"A deliberate fault: {self.failure.title}. {self._sentence()}",
        )

    @property
    def why(self) -> str:
        """Why the number is wrong on this input."""
        small = self.reference.lse[self.where[0]] < 0 and np.isfinite(self.wrong[self.where])
        return self.failure.underflow if small and self.failure.underflow else self.failure.why

    def _sentence(self) -> str:
        place = ", ".join(map(str, self.where))
        right, wrong = self.right[self.where], self.wrong[self.where]
        if self.ratio <= 1:
            return "Here it makes no difference beyond rounding."
        value = f"{self.failure.shows}[{place}]"
        return f"Here {value} is {wrong:.6g}, where {right:.6g} is right. {self.why}"

    def _said(self) -> str:
        return f"{self._sentence()} Seen {self.failure.seen}."

    def _lines(self) -> dict[str, str]:
        return {
            "the line": _line(flash2.flash_attention_2, self.failure.old),
            "becomes": _line(faulty(self.name), self.failure.new),
            f"right {self.failure.shows}": _numbers(self.right),
            "wrong": _numbers(self.wrong),
        }

    def __str__(self) -> str:
        rows = [f"{self.name}: {self.failure.title}"]
        rows += [f"  {name:<13} {text}" for name, text in self._lines().items()]
        return "\n".join((*rows, f"  {self._said()}"))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        cells = "".join(
            f'<tr><th scope="row" style="text-align:left">{name}</th>'
            f'<td style="text-align:left"><code>{html.escape(text)}</code></td></tr>'
            for name, text in self._lines().items()
        )
        return (
            '<div style="border-left:4px solid #D55E00;padding-left:0.7em;overflow-x:auto">'
            f"<div><b>{self.name}</b>: {html.escape(self.failure.title)}</div>"
            f"<table>{cells}</table><div>{html.escape(self._said())}</div></div>"
        )


def show(
    name: str,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    tiles: tuple[int, int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float | None = None,
    seed: int = 0,
) -> Comparison:
    """Run FlashAttention-2 with a fault and without.

    Parameters
    ----------
    name : str
        A name in `FAILURES`.
    q, k, v : array (N, d), (Nk, d), (Nk, dv), optional
        One head. Default: the failure's own input, on which it shows, with scale 1.
    tiles : (Br, Bc), optional
        Default: the failure's own.
    is_causal, scale, seed
        As in `flashsim.attention`.
    dropout_p : float, optional
        As there. Default: the failure's own, 0 for all but dropout-by-tile.

    Returns
    -------
    Comparison
        Printed, or shown by a notebook, it has the wrong numbers beside the right ones.

    Raises
    ------
    ValueError, TypeError
        As `flashsim.attention`, and if there is no such failure, more than one head, or no row.
    """
    failure = FAILURES[checks.choice("name", name, FAILURES)]
    if not checks.given_together(q=q, k=k, v=v):
        q, k, v = (np.array(x, np.float32)[:, None] for x in (failure.q, failure.k, failure.v))
        scale = 1.0 if scale is None else scale
    if np.ndim(q) != 2 or len(q) == 0:
        raise bad("q.shape", np.shape(q), "one head of at least one row, (N, d)")
    what = {
        "is_causal": is_causal,
        "scale": scale,
        "dropout_p": failure.dropout_p if dropout_p is None else dropout_p,
        "seed": seed,
    }
    lengths = checked(q, k, v, **what).lengths
    given = failure.tiles if tiles is None else checks.pair_of_tiles(tiles)
    call = _Call((q, k, v), what, clamped(given, *lengths))
    right, wrong = (call.run(fn)[failure.shows] for fn in (flash2.flash_attention_2, faulty(name)))
    reference = exact(q, k, v, **what)
    truth = reference.output if failure.shows == "output" else reference.lse
    with np.errstate(invalid="ignore"):  # inf - inf
        error = np.where(wrong == truth, 0, np.abs(wrong - truth))
    error = np.where(np.isnan(error), np.inf, error)
    where = np.unravel_index(error.argmax(), error.shape)
    return Comparison(
        name=name,
        right=right,
        wrong=wrong,
        reference=reference,
        max_error=float(error.max()),
        where=tuple(int(n) for n in where),
        call=call,
    )


@dataclass(frozen=True)
class _Call:
    """One head, q, k and v, what to compute of it, and the tiles to run it with."""

    head: tuple[Any, Any, Any]
    what: dict[str, Any]
    tiles: tuple[int, int]

    @property
    def problem(self) -> Problem:
        return checked(*self.head, **self.what)

    @property
    def sram(self) -> int:
        """Elements of a chip that the tiles just fill."""
        return FLASH2.needs(self.problem.head, *self.tiles)[0]

    def arguments(self) -> tuple[list[Hbm], dict[str, Any]]:
        """Those of `flash_attention_2`, on such a chip."""
        problem, (Br, Bc), machine = self.problem, self.tiles, Machine(sram=self.sram)
        head = problem.head
        O = np.full((head.Nq, head.dv), np.nan, problem.q.dtype)
        L = np.full(head.Nq, np.nan, widened(problem.q.dtype))
        arrays = machine.hbm(**problem.inputs((0,)), O=O, L=L)
        mask, drop = problem.mask((0,), machine), problem.dropout((0,))
        options = {"Br": Br, "Bc": Bc, "scale": problem.scale, "mask": mask, "drop": drop}
        return list(arrays.values()), options

    def run(self, fn: Callable[..., None]) -> dict[str, Array]:
        """The output (N, dv) and lse (N,) that `fn` computes."""
        arrays, options = self.arguments()
        with np.errstate(all="ignore"):  # what goes wrong shows in the result
            fn(*arrays, **options)
        return {"output": arrays[-2].data, "lse": arrays[-1].data}

    def record(self, fn: Callable[..., None], most_steps: int) -> Recording:
        """The same, recorded."""
        arrays, options = self.arguments()
        with np.errstate(all="ignore"), recording(fn, most_steps) as run:
            fn(*arrays, **options)
        return run

    @property
    def closed_form_elements(self) -> int:
        """What the right algorithm reads and writes."""
        problem, (Br, Bc) = self.problem, self.tiles
        head = replace(problem.head, mask=problem.mask((0,)))
        return FLASH2.count(head, Br=Br, Bc=Bc, elide=False).total_elements


@cache
def faulty(name: str) -> Callable[..., None]:
    """A copy of `flash_attention_2` with the fault of that name.

    Its lines have the numbers of the original, and its source can be read, so it can be recorded.

    Raises
    ------
    RuntimeError
        If the algorithm's text no longer has the piece that the fault replaces, exactly once.
    """
    failure, right = FAILURES[name], flash2.flash_attention_2
    text, module = inspect.getsource(right), inspect.getsource(flash2)
    if text.count(failure.old) != 1:
        raise RuntimeError(
            f"{failure.old!r} occurs {text.count(failure.old)} times in {right.__name__}: "
            f"expected once, for the fault {name!r} to replace it"
        )
    source = module.replace(text, text.replace(failure.old, failure.new))
    filename = f"<{right.__name__}, {name}>"
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    tree = ast.parse(source)
    tree.body = [x for x in tree.body if getattr(x, "name", "") == right.__name__]
    space = {**vars(flash2), "zero_padded": zero_padded}
    exec(compile(tree, filename, "exec"), space)
    return space[right.__name__]  # type: ignore[no-any-return]


def zero_padded(tiles: Iterable[tuple[slice, Array, Array]], B: int) -> Iterator[Any]:
    """Tiles (rows, K_j, V_j), all B rows long: what a short one lacks is 0."""
    for j, *arrays in tiles:
        lacking = B - (j.stop - j.start)
        padded = (np.pad(x, ((0, lacking), (0, 0))) for x in arrays)
        yield slice(j.start, j.start + B), *padded


def _line(fn: Callable[..., None], text: str) -> str:
    """The line of a function's source that has the text, without its comment."""
    lines = inspect.getsource(fn).splitlines()
    return next(x for x in lines if text.rstrip() in x).partition("  #")[0].strip()


def _numbers(x: Array) -> str:
    """Up to eight numbers of an array."""
    text = ", ".join(f"{value:.6g}" for value in x.flat[:8])
    return text + (f", … ({' × '.join(map(str, x.shape))})" if x.size > 8 else "")
