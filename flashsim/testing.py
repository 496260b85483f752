"""Test your own attention kernel: `check_kernel(fn)` runs a battery and returns a `Report`.

Every answer is held against float64 (`flashsim.reference`), element by element, and against a bar:

- float64, float32: the bound that is computed from the inputs. It has room for any tiling and any
  order of summing, and none for weights rounded to float16, or products in TF32.
- float16, bfloat16: the same bound is that of float32 scores and weights, and one rounding of the
  result. Kernels that hold scores or weights in half precision need more, so the bar is the largest
  of three: the bound; twice the largest error, in that head, of standard attention that rounds
  scores, weights and output to that precision (the rule of FlashAttention's own tests); and one
  rounding of every term of the sum, as standard attention is at times right by luck.

The inputs are small, and the same for the same seed. Each knows what it asks of a kernel; a case
runs with those of its inputs that ask for nothing but declared features.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from importlib import import_module
from itertools import cycle, groupby, pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import checks
from .checks import bad
from .cost.io import DTYPES
from .problem import Problem, checked
from .reference import exact, exact_gradients
from .sample import load_sample

__all__ = [
    "FEATURES", "Call", "Case", "Report", "activations", "check_kernel", "columns", "error_bound",
    "normal", "output_gradient", "random_mask", "real_tokens", "strided",
]  # fmt: skip

Array = np.ndarray[Any, Any]

FEATURES = {
    "causal": "takes is_causal",
    "causal_align": "takes causal_align, beside is_causal or window",
    "window": "takes window=(left, right)",
    "scale": "takes scale",
    "bool_mask": "takes attn_mask, bool (Nq, Nk) or (batch, heads, Nq, Nk), True may attend",
    "float_mask": "the same, numbers to add, in the dtype of q",
    "broadcast_mask": "takes an attn_mask that broadcasts to (batch, heads, Nq, Nk)",
    "key_padding_mask": "takes key_padding_mask, bool (batch, Nk), True is a real key",
    "combined_masks": "takes several of causal, window, attn_mask and key_padding_mask at once",
    "gqa": "takes enable_gqa, and then k and v of fewer heads",
    "different_lengths": "Nq may differ from Nk",
    "value_width": "v may have another width than q and k",
    "dropout": "takes dropout_p and seed, and drops the weights that flashsim.dropout says",
    "lse": "returns (output, lse), with lse (batch, heads, Nq) a natural logarithm",
    "empty_rows": "a row that sees no key is 0, its lse -inf; there may be no keys at all",
    "masked_nan": "NaN and inf behind a mask count for nothing",
}
_SHORT_FOR = {"attn_mask": ("bool_mask", "float_mask", "broadcast_mask")}
_MASKS = ("is_causal", "window", "attn_mask", "key_padding_mask")
WIDTHS = (1, 3, 8, 16, 32, 59, 64, 111, 129, 257)
_HALVES = ("float16", "bfloat16")
_SEVERAL = (tuple, list)
_NAN, _INF = math.nan, math.inf
_TOLD = 6  # cases that a report describes


def error_bound(q: Any, k: Any, v: Any, **what: Any) -> tuple[Array, Array]:
    """How far from float64 a result in the precision of the inputs may be, element by element.

    Parameters
    ----------
    q, k, v : array (..., Nq, d), (..., Nk, d), (..., Nk, dv)
        Of NumPy, PyTorch or CuPy.
    **what
        Masks, scale and so on, as in `flashsim.attention`.

    Returns
    -------
    output_bound, lse_bound : float64 ndarray (..., Nq, dv), (..., Nq)
        For float16 and bfloat16 inputs: of float32 arithmetic whose output is rounded once.

    Examples
    --------
    >>> x = np.ones((4, 8), np.float32)
    >>> output_bound, lse_bound = error_bound(x, x, x, is_causal=True)
    >>> output_bound.shape, bool(output_bound.max() < 1e-5)
    ((4, 8), True)
    """
    q, k, v = (_host(x) for x in (q, k, v))
    right = exact(q, k, v, **{n: _host(x) if hasattr(x, "dtype") else x for n, x in what.items()})
    return right.output_bound, right.lse_bound


def check_kernel(
    fn: Callable[..., Any],
    *,
    arrays: str = "numpy",
    device: str | None = None,
    dtypes: Sequence[str] = ("float32",),
    features: Iterable[str] = (),
    causal_align: str = "bottom-right",
    widths: Sequence[int] = WIDTHS,
    gradients: Callable[..., Any] | bool | None = None,
    refusals: tuple[type[Exception], ...] = (),
    deterministic: bool = False,
    only: str = "",
    seed: int = 0,
) -> Report:
    """Run the battery on an attention kernel.

    Parameters
    ----------
    fn : callable
        `fn(q, k, v, **what)` takes arrays (batch, heads, N, d) and returns the output, or (output,
        lse, ...). `what` are keyword arguments of `flashsim.attention`, those that an input needs.
    arrays : {"numpy", "torch", "cupy"}
        What fn takes and returns. float masks have the dtype of q.
    device : str, optional
        Of torch's tensors, such as "cuda". Default: "cpu".
    dtypes : sequence of {"float16", "bfloat16", "float32", "float64"}
        Each runs the battery.
    features : iterable of str
        What fn can do, of `FEATURES`; "attn_mask" is short for the three of its kinds.
    causal_align : {"bottom-right", "top-left"}
        How fn aligns causal and window where Nq and Nk differ; "top-left" is PyTorch's rule.
    widths : sequence of int
        The head widths that fn takes.
    gradients : callable, or False, optional
        `gradients(q, k, v, do, **what)` returns (dq, dk, dv). Default: autograd, if fn takes
        torch's tensors and its output has a graph. False: none.
    refusals : tuple of exception types
        What fn raises to refuse an input clearly: reported, but no failure.
    deterministic : bool
        Whether different bits from the same input are a failure; they are reported anyway.
    only : str
        Run the cases with this in their names.
    seed : int
        Of the inputs.

    Returns
    -------
    Report

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable. What fn raises is a failed case.
    """
    checks.choice("arrays", arrays, ("numpy", "torch", "cupy"))
    for dtype in dtypes:
        checks.choice("dtypes", dtype, checks.FLOATS)
    if arrays == "cupy" and "bfloat16" in dtypes:
        raise bad("dtypes", dtypes, "no bfloat16 with CuPy")
    if device is not None and arrays != "torch":
        raise bad("device", device, "None, as only torch's tensors are put on a device by name")
    for feature in (features := set(features)):
        checks.choice("features", feature, [*FEATURES, *_SHORT_FOR])
    can = frozenset(n for feature in features for n in _SHORT_FOR.get(feature, (feature,)))
    checks.choice("causal_align", causal_align, checks.ALIGNMENTS)
    if not widths:
        raise bad("widths", widths, "at least one head width")
    sizes = tuple(sorted({checks.integer("widths", d, 1) for d in widths}))
    checks.integer("seed", seed, 0)
    kernel = _Kernel(fn, arrays, device, can)
    cases, missing = [], dict[str, int]()
    for dtype in dtypes:
        given = dtype, seed, sizes, causal_align
        battery = [*_battery(*given), *_together(_Inputs(*given), sorted(can))]
        plain: list[
            Case
        ] = []  # if the plainest case fails, so may any: what that is about says little
        kernel.derive_by(gradients, battery[0].inputs[0])
        for spec in (spec for spec in battery if only in spec.name):
            if lacking := spec.lacking(kernel.features):
                missing |= {n: missing.get(n, 0) + (dtype == dtypes[0]) for n in lacking}
            else:
                telling = spec.group == "Public faults" or not any(c.failed_inputs for c in plain)
                guess = spec.likely if telling else plain[0].likely
                case = spec.run(kernel, dtype, refusals, guess)
                if case.status == "noted" and deterministic:
                    case = replace(case, status="failed")
                cases.append(case)
                plain = plain or [case]
    where = arrays + (f" on {device or 'cpu'}" if arrays == "torch" else "")
    return Report(getattr(fn, "__name__", repr(fn)), where, seed, tuple(cases), missing)


@dataclass(frozen=True)
class Case:
    """What became of one claim in one dtype.

    Attributes
    ----------
    group, name, dtype : str
    status : {"passed", "failed", "refused", "noted"}
        "noted" is what does not hold and is no failure; "refused" if fn refused every input.
    inputs, failed_inputs, refused_inputs : int
    ratio : float
        The largest error / bar over all inputs; inf for a misplaced NaN or inf, or an exception.
    found, likely : str
        What is off on the smallest failing input, and the likely cause.
    source : str
        Where the fault was reported.
    call : Call, optional
        The smallest failing input: its arrays, and as `str(call)` the Python that makes them.
    """

    group: str
    name: str
    dtype: str
    status: str
    inputs: int
    failed_inputs: int = 0
    refused_inputs: int = 0
    ratio: float = 0.0
    found: str = ""
    likely: str = ""
    source: str = ""
    call: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Report:
    """What `check_kernel` found. `str(report)` is a readable report, 80 columns wide.

    Attributes
    ----------
    kernel, arrays : str
    seed : int
    cases : tuple of Case
    missing : dict
        How many cases did not run for want of a feature, by feature.
    """

    kernel: str
    arrays: str
    seed: int
    cases: tuple[Case, ...]
    missing: dict[str, int]

    @property
    def failures(self) -> list[Case]:
        """The cases that failed."""
        return [case for case in self.cases if case.status == "failed"]

    @property
    def passed(self) -> bool:
        """Whether no case failed, and some passed."""
        return not self.failures and any(case.status == "passed" for case in self.cases)

    def raise_if_failed(self) -> None:
        """Raise an AssertionError with the report unless `passed`."""
        if not self.passed:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        count, failed = len(self.cases), len(self.failures)
        fine = sum(case.status == "passed" for case in self.cases)
        verdict = (
            f"{failed} of {count} cases FAILED" if failed else f"{fine} of {count} cases passed"
        )
        lines = [f"{self.kernel}: {verdict}", f"{self.arrays}, seed {self.seed}", ""]
        lines += self._table()
        told: dict[tuple[str, str], list[Case]] = {}
        for case in sorted(self.cases, key=lambda case: case.group != "Public faults"):
            if case.call is not None:
                told.setdefault((case.status, case.likely or case.name), []).append(case)
        for same in list(told.values())[:_TOLD]:
            lines += ["", *_described(same)]
        if len(told) > _TOLD:
            lines += ["", f"And {len(told) - _TOLD} more: they are in `report.cases`."]
        if told:
            lines += ["", "The names in these inputs:  from numpy import array, inf, nan, ones"]
            lines += ["                            from flashsim.testing import *"]
        if self.missing:
            ran = ", ".join(f"{name} ({n})" for name, n in self.missing.items())
            lines += ["", *_wrapped("Cases not run, as these are not declared: ", ran)]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """A row for each case; for each dtype the largest error / bar, or what became of it."""
        dtypes = list(dict.fromkeys(case.dtype for case in self.cases))
        rows: dict[tuple[str, str], dict[str, Case]] = {}
        for case in self.cases:
            rows.setdefault((case.group, case.name), {})[case.dtype] = case
        lines = [f" {'largest error / bar':35} {'inputs':>7}" + "".join(f"{d:>9}" for d in dtypes)]
        lines.append("─" * len(lines[0]))
        shown = ""
        for (group, name), cells in rows.items():
            if group != shown:
                lines.append(f" {group}")
            shown = group
            inputs = max(case.inputs for case in cells.values())
            texts = (_cell(cells[d]) if d in cells else "" for d in dtypes)
            lines.append(f"   {name:36} {inputs:>4}" + "".join(f"{t:>9}" for t in texts))
        return lines


def _cell(case: Case) -> str:
    if case.status == "passed":
        return f"{case.ratio:.2g}"
    return case.status.upper() if case.status == "failed" else case.status


def _described(same: list[Case]) -> list[str]:
    """Cases with one likely cause: the first in one dtype, the others by name."""
    case = same[0]
    dtypes = ", ".join(other.dtype for other in same if other.name == case.name)
    names = list(dict.fromkeys(other.name for other in same if other.name != case.name))
    status = "refused" if case.status == "passed" else case.status
    count = f"{case.failed_inputs or case.refused_inputs} of {case.inputs}"
    texts = {
        "found": case.found,
        "error": f"{case.ratio:.2g} times the bar, at worst" * (1 < case.ratio < _INF),
        "likely": case.likely,
        "source": case.source,
        "also": "; ".join(names[:4]) + f"; and {len(names) - 4} more" * (len(names) > 4),
    }
    lines = _wrapped(f"{status.upper()}: ", f"{case.name} ({dtypes}; {count} inputs)")
    for label, text in texts.items():
        lines += _wrapped(f"  {label:8}", text) if text else []
    for n, line in enumerate(str(case.call).split("\n")):
        lines += _wrapped("          " if n else "  input   ", line)
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=label, subsequent_indent=" " * min(len(label), 10),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


# Inputs. A failing case prints its input as calls of these functions, so that anyone can make it.


def normal(
    seed: int,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...] | None = None,
    v_shape: tuple[int, ...] | None = None,
    *,
    dtype: str = "float32",
    loud: float = 1.0,
) -> tuple[Array, Array, Array]:
    """Standard normal q, k, v, with q and k times `loud`; k has the shape of q, v that of k."""
    rng, k_shape = np.random.default_rng(seed), k_shape or q_shape
    q, k, v = (rng.standard_normal(shape) for shape in (q_shape, k_shape, v_shape or k_shape))
    stored = DTYPES[dtype]
    return (q * loud).astype(stored), (k * loud).astype(stored), v.astype(stored)


def columns(
    q: Any, k: Any, v: Any, *, width: int = 1, dtype: str = "float32"
) -> tuple[Array, Array, Array]:
    """q, k, v (batch, heads, N, width): columns of numbers, the other columns 0.

    Each is a list of N numbers, of heads of them, or of batch items of those. q is multiplied by
    sqrt(width), which the default scale takes back: the scores are q k^T.
    """
    arrays = []
    for x, factor in ((q, math.sqrt(width)), (k, 1), (v, 1)):
        numbers = np.asarray(x, np.float64)
        numbers = numbers.reshape((1,) * (3 - numbers.ndim) + numbers.shape)
        wide = np.zeros((*numbers.shape, width))
        wide[..., 0] = numbers * factor
        arrays.append(wide.astype(DTYPES[dtype]))
    return arrays[0], arrays[1], arrays[2]


def activations(
    text: int | None = None, *, width: int = 32, dtype: str = "float32"
) -> tuple[Array, Array, Array]:
    """q, k, v of the built-in sample, 4 heads: text 0 (180 tokens) or 1 (24), or both, padded.

    A width other than 32 cuts columns off, or adds zeros.
    """
    inputs, arrays = load_sample(), []
    for x in (inputs.q, inputs.k, inputs.v):
        if text is not None:
            x = x[text : text + 1, :, : real_tokens()[text].sum()]
        x = np.pad(x[..., :width], [(0, 0)] * 3 + [(0, max(0, width - x.shape[-1]))])
        arrays.append(x.astype(DTYPES[dtype]))
    return arrays[0], arrays[1], arrays[2]


def real_tokens() -> Array:
    """The key_padding_mask (2, 180) of both texts of `activations`."""
    return np.asarray(load_sample().key_padding_mask)


def random_mask(seed: int, shape: tuple[int, ...], dtype: str = "bool", empty: bool = False) -> Any:
    """A mask (..., Nq, Nk) that keeps 60 % of the scores: bool, or normal numbers and -inf.

    Row i keeps at least key i modulo Nk; or, with `empty`, every other row keeps none.
    """
    rng = np.random.default_rng(seed)
    keep, (rows, keys) = rng.random(shape) < 0.6, shape[-2:]
    if empty:
        keep[..., ::2, :] = False
    else:
        keep |= np.arange(keys) == np.arange(rows)[:, None] % keys
    if dtype == "bool":
        return keep
    return np.where(keep, rng.standard_normal(shape), -np.inf).astype(DTYPES[dtype])


def output_gradient(seed: int, q: Array, v: Array) -> Array:
    """A standard normal gradient with respect to the output, in the dtype of q."""
    shape = (*q.shape[:-1], v.shape[-1])
    return np.random.default_rng(seed).standard_normal(shape).astype(q.dtype)


def strided(x: Array, how: str, put: Callable[[Array], Any] = np.asarray) -> Any:
    """x (batch, heads, N, d) with other strides, on memory that `put` makes of an array.

    how: "heads inside" (memory in the order batch, N, heads, d), "transposed" (batch, heads, d, N),
    "wider" (rows of an array 8 wider), "one number" (all strides 0), or "plain".
    """
    if how == "heads inside":
        return put(np.array(x.swapaxes(1, 2), order="C")).swapaxes(1, 2)
    if how == "wider":
        return put(np.pad(x, [(0, 0)] * 3 + [(0, 8)], constant_values=3))[..., : x.shape[-1]]
    if how == "transposed":
        return put(np.array(x.swapaxes(2, 3), order="C")).swapaxes(2, 3)
    if how == "one number":
        one = put(np.array(x[:1, :1, :1, :1]))
        return sys.modules[type(one).__module__.partition(".")[0]].broadcast_to(one, x.shape)
    return put(np.array(x, order="C"))


class _Made(NamedTuple):
    """A value, and the Python that makes it."""

    value: Any
    text: str


def _made(function: Callable[..., Any], *args: Any, **kwargs: Any) -> _Made:
    parts = [_text(x) for x in args] + [f"{n}={_text(x)}" for n, x in kwargs.items()]
    return _Made(function(*args, **kwargs), f"{function.__name__}({', '.join(parts)})")


def _text(x: Any) -> str:
    """A literal, with long runs in lists as [x] * n."""
    if not isinstance(x, list):
        return repr(x)
    parts, short = list[str](), list[str]()
    for text, same in groupby(map(_text, x)):
        run = list(same)
        if len(run) < 4:
            short += run
            continue
        if short:
            parts.append(f"[{', '.join(short)}]")
            short = []
        parts.append(f"[{text}] * {len(run)}")
    if short or not parts:
        parts.append(f"[{', '.join(short)}]")
    return " + ".join(parts)


@dataclass(frozen=True, eq=False)
class Call:
    """One input of the battery; `str(call)` is the Python that makes it and calls the kernel.

    Attributes
    ----------
    q, k, v : ndarray (batch, heads, N, d)
    what : dict
        The keyword arguments of the kernel's call.
    align : str
        How causal and window are aligned, unless `what` says it.
    code : tuple of str
        Lines that make q, k and v.
    spelled : dict
        Python that makes the values of `what`.
    do : ndarray (batch, heads, Nq, dv), optional
        Gradient with respect to the output, if the case is about gradients.
    strides : dict
        How q, k, v and do lie in memory, where that matters; see `strided`.
    """

    q: Array
    k: Array
    v: Array
    what: dict[str, Any]
    align: str
    code: tuple[str, ...] = ()
    spelled: dict[str, str] = field(default_factory=dict)
    do: Array | None = None
    strides: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [*self.code, *(f"{n} = strided({n}, {how!r})" for n, how in self.strides.items())]
        arguments = ["q", "k", "v"] + ["do"] * (self.do is not None)
        arguments += [f"{name}={text}" for name, text in self.spelled.items()]
        function = "fn" if self.do is None else "gradients"
        return "\n".join([*lines, f"{function}({', '.join(arguments)})"])

    def then(self, line: str, **changes: Any) -> Call:
        """This call with changed arrays, and the line of Python that changes them."""
        return replace(self, code=(*self.code, line), **changes)

    def but(self, **changes: Any) -> Call:
        """This call with other arrays or arguments; None takes an argument away."""
        arrays = {n: changes.pop(n) for n in ("q", "k", "v") if n in changes}
        what = {n: x for n, x in (self.what | changes).items() if x is not None}
        spelled = {n: self.spelled.get(n, repr(x)) for n, x in what.items()}
        return replace(self, what=what, spelled=spelled, **arrays)

    @property
    def dtype(self) -> str:
        """Of q, k and v."""
        return str(self.q.dtype.name)

    @property
    def meant(self) -> dict[str, Any]:
        """What is to be computed, for the reference."""
        return {"causal_align": self.align} | self.what

    @cached_property
    def problem(self) -> Problem:
        """The same, checked."""
        return checked(self.q, self.k, self.v, **self.meant)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the arrays in `answers`."""
        lead = self.q.shape[:-1]
        shapes = {"output": (*lead, self.v.shape[-1]), "lse": lead}
        return shapes | {"dq": self.q.shape, "dk": self.k.shape, "dv": self.v.shape}

    @cached_property
    def answers(self) -> dict[str, tuple[Array, Array]]:
        """By name, what a kernel should give, in float64, and its bar; see the module."""
        if self.do is None:
            right = exact(self.q, self.k, self.v, **self.meant)
            answers = {"output": (right.output, right.output_bound)}
            answers["lse"] = (right.lse, right.lse_bound)
        else:
            of_do = exact_gradients(self.q, self.k, self.v, self.do, **self.meant)
            answers = {n: (of_do.values[n], of_do.bounds[n]) for n in ("dq", "dk", "dv")}
        if self.dtype in _HALVES:
            rounded = _standard(self, self.dtype)
            answers = {n: (x, _half_bar(x, bar, *rounded[n])) for n, (x, bar) in answers.items()}
        return answers

    @cached_property
    def needs(self) -> set[str]:
        """The features that it asks of a kernel."""
        what, mask, (Nq, d) = self.what, self.what.get("attn_mask"), self.q.shape[-2:]
        scores = (*self.q.shape[:-1], self.k.shape[-2])
        asked = {name: name in what for name in FEATURES} | {
            "causal": "is_causal" in what,
            "bool_mask": mask is not None and mask.dtype == bool,
            "float_mask": mask is not None and mask.dtype != bool,
            "broadcast_mask": mask is not None and mask.shape not in (scores, scores[-2:]),
            "combined_masks": sum(name in what for name in _MASKS) > 1,
            "gqa": self.q.shape[1] != self.k.shape[1],
            "different_lengths": Nq != self.k.shape[-2],
            "value_width": self.v.shape[-1] != d,
            "dropout": "dropout_p" in what,
            "masked_nan": not (np.isfinite(self.k).all() and np.isfinite(self.v).all()),
            "empty_rows": not all(tile.keep().any(axis=1).all() for tile in self.masks()),
        }
        return {name for name, yes in asked.items() if yes}

    def masks(self) -> Iterator[Any]:
        """The mask of each head, whole."""
        Nq, Nk = self.problem.lengths
        for at in np.ndindex(*self.q.shape[:2]):
            yield self.problem.mask(at).tile(slice(0, Nq), slice(0, Nk))


@dataclass(frozen=True)
class _Pair:
    """Two calls, and what of their answers must agree: all of them, unless a function selects."""

    first: Call
    second: Call
    of_first: Callable[[Array], Any] = lambda x: x
    of_second: Callable[[Array], Any] = lambda x: x

    @property
    def needs(self) -> set[str]:
        return self.first.needs | self.second.needs

    def __str__(self) -> str:
        return f"{self.first}\n# and, which must agree:\n{self.second}"


class _Inputs:
    """Makes calls in one dtype, of the widths that a kernel takes, each with a seed of its own."""

    def __init__(self, dtype: str, seed: int, widths: tuple[int, ...], align: str) -> None:
        self.dtype, self.widths, self.align = dtype, widths, align
        self.seeds = iter(range(10_000 * seed, 10_000 * (seed + 1)))
        self.usual = cycle([d for d in widths if d <= 64] or widths[:1])

    def _call(self, arrays: _Made, what: dict[str, Any]) -> Call:
        made = {n: x if isinstance(x, _Made) else _Made(x, _text(x)) for n, x in what.items()}
        values, spelled = ({n: x[side] for n, x in made.items()} for side in (0, 1))
        q, k, v = arrays.value
        return Call(q, k, v, values, self.align, (f"q, k, v = {arrays.text}",), spelled)

    def normal(
        self, Nq: int, Nk: int | None = None, *, batch: int = 1, heads: int = 2,
        kv_heads: int | None = None, width: int | None = None, dv: int | None = None,
        loud: float = 1.0, **what: Any,
    ) -> Call:  # fmt: skip
        """Normal numbers; a width that the kernel takes, unless one is given."""
        d, Nk, shared = width or next(self.usual), Nq if Nk is None else Nk, kv_heads or heads
        shapes = [(batch, heads, Nq, d), (batch, shared, Nk, d), (batch, shared, Nk, dv or d)]
        while len(shapes) > 1 and shapes[-1] == shapes[-2]:
            shapes.pop()
        more = {} if loud == 1 else {"loud": loud}
        if shared != heads:
            what["enable_gqa"] = True
        return self._call(_made(normal, next(self.seeds), *shapes, dtype=self.dtype, **more), what)

    def columns(self, q: Any, k: Any, v: Any, **what: Any) -> Call:
        """Given numbers, in the smallest width that the kernel takes."""
        made = _made(columns, q, k, v, width=self.widths[0], dtype=self.dtype)
        return self._call(made, what)

    def activations(self, text: int | None, **what: Any) -> Call:
        """Real tensors, in the width that is nearest to theirs."""
        width = next((d for d in self.widths if d >= 32), self.widths[-1])
        return self._call(_made(activations, text, width=width, dtype=self.dtype), what)

    def mask(self, *shape: int, kind: str = "bool", empty: bool = False) -> _Made:
        """A random mask; kind "float" has the dtype of q."""
        more = {"empty": True} if empty else {}
        dtype = self.dtype if kind == "float" else kind
        return _made(random_mask, next(self.seeds), shape, dtype, **more)

    def given(self, mask: list[Any]) -> _Made:
        """A mask of given numbers or bools, in the dtype of q if they are numbers."""
        made = _made(np.array, mask)
        if made.value.dtype == bool:
            return made
        value = made.value.astype(DTYPES[self.dtype])
        return _Made(value, f"{made.text}.astype(q.dtype)")

    def lengths(self, Nk: int, *lengths: int) -> _Made:
        """A key_padding_mask of items with so many real keys each."""
        return self.given([[True] * n + [False] * (Nk - n) for n in lengths])

    def gradient(self, call: Call, how: str = "plain") -> Call:
        """The call with a gradient of its output: normal, or ones if how is "one number"."""
        strides = call.strides | ({} if how == "plain" else {"do": how})
        if how == "one number":
            do = np.ones((*call.q.shape[:-1], call.v.shape[-1]), call.q.dtype)
            line = f"do = ones({do.shape}, q.dtype)"
        else:
            seed = next(self.seeds)
            do, line = output_gradient(seed, call.q, call.v), f"do = output_gradient({seed}, q, v)"
        return call.then(line, do=do, strides=strides)


# The bars in half precision, see the first lines of the module.


def _half_bar(right: Array, bound: Array, rounded: Array, terms: Array) -> Array:
    with np.errstate(invalid="ignore"):
        error = np.abs(rounded - right)
    by_head = tuple(range(2, error.ndim))
    head = np.where(np.isfinite(error), error, 0).max(axis=by_head, keepdims=True, initial=0)
    return np.asarray(np.fmax(2 * head, bound + np.nan_to_num(terms, posinf=0)))


def _standard(call: Call, dtype: str) -> dict[str, tuple[Array, Array]]:
    """Standard attention that rounds what it stores to dtype: S, P, O; in the backward dP, dS too.

    By name, "output", "lse" and, with `call.do`, "dq", "dk", "dv": the result, with exact sums, and
    what one rounding of each score and weight adds up to.
    """
    p, stored, (Nq, Nk) = call.problem, DTYPES[dtype], call.problem.lengths
    u = float(ml_dtypes.finfo(stored).eps) / 2  # type: ignore[no-untyped-call]
    lead, i, j = p.q.shape[:-2], slice(0, Nq), slice(0, Nk)
    shapes: dict[str, tuple[int, ...]] = {"output": (*lead, Nq, p.v.shape[-1]), "lse": (*lead, Nq)}
    if call.do is not None:
        shapes |= {"dq": p.q.shape, "dk": p.k.shape, "dv": p.v.shape}
    found = {name: (np.zeros(shape), np.zeros(shape)) for name, shape in shapes.items()}

    def r(x: Array) -> Array:
        return np.asarray(x.astype(stored).astype(np.float64))

    def add(name: str, at: tuple[int, ...], weights: Array, X: Array, size: Array) -> None:
        found[name][0][at] += r(weights @ X)
        found[name][1][at] += u * (size @ np.abs(X))

    with np.errstate(all="ignore"):
        for at in np.ndindex(*lead):
            Q, K, V = (x.astype(np.float64) for x in p.inputs(at).values())
            K, V = (np.where(np.isfinite(x), x, 0) for x in (K, V))  # what is not is masked
            tile = p.mask(at).tile(i, j)
            S = r(r(Q @ K.T) * p.scale)
            if tile.loaded is not None and tile.loaded.dtype != bool:
                S = r(S + tile.loaded)
            live = tile.keep()
            m = np.where(live, S, -np.inf).max(axis=1, initial=-np.inf, keepdims=True)
            P = np.where(live, np.exp(S - np.where(m == -np.inf, 0, m)), 0)
            l = P.sum(axis=1, keepdims=True)
            P = r(P / np.where(l == 0, 1, l))
            z = p.dropout(at).keep(i, j) / (1 - p.p) if p.p else np.float64(1)
            size = P * (1 + np.where(live, np.abs(S), 0))
            add("output", at, P * z, V, size * z)
            found["lse"][0][at] = (m + np.log(l))[:, 0]
            found["lse"][1][at] = u * size.sum(axis=1)
            if call.do is None:
                continue
            shared, dO = (*at[:-1], at[-1] // p.group), call.do[at].astype(np.float64)
            dP = r(dO @ V.T) * z
            D = (P * dP).sum(axis=1, keepdims=True)
            dS = r(P * (dP - D)) * p.scale
            dS_size = (P + size) * (np.abs(dP) + np.abs(D)) * abs(p.scale)
            add("dq", at, dS, K, dS_size)
            add("dk", shared, dS.T, Q, dS_size.T)
            add("dv", shared, (P * z).T, dO, (size * z).T)
    return found


# The kernel under test, and what is checked of it.


def _host(x: Any) -> Array:
    """An array of any library as NumPy's."""
    if type(x).__module__.partition(".")[0] == "torch":
        x = x.detach().cpu()
        if "bfloat16" in str(x.dtype):
            return np.asarray(x.float().numpy().astype(ml_dtypes.bfloat16))
        return np.asarray(x.numpy())
    return np.asarray(x.get() if hasattr(x, "get") else x)


class _Raised(Exception):
    """The kernel raised; the cause is what."""


class _Wrong(Exception):
    """The kernel returned something that is no answer; the message says what."""


class _Kernel:
    """The callable under test, with arrays of its library on one side and NumPy's on the other."""

    def __init__(
        self, fn: Callable[..., Any], arrays: str, device: str | None, features: Set[str]
    ) -> None:
        self.fn, self.device, self.features = fn, device or "cpu", features
        self.library: Any = None if arrays == "numpy" else import_module(arrays)
        self.is_torch = arrays == "torch"
        self.derive: Callable[..., Any] | None = None

    def put(self, x: Array) -> Any:
        """A contiguous array in the kernel's library."""
        if not self.is_torch:
            return x if self.library is None else self.library.asarray(x)
        if x.dtype == ml_dtypes.bfloat16:
            return self.put(x.astype(np.float32)).bfloat16()
        return self.library.tensor(x, device=self.device)

    def arguments(self, call: Call) -> tuple[list[Any], dict[str, Any]]:
        """[q, k, v] or [q, k, v, do], and keyword arguments."""
        arrays = {n: getattr(call, n) for n in ("q", "k", "v", "do")}
        given = [
            strided(x, call.strides.get(n, "plain"), self.put)
            for n, x in arrays.items()
            if x is not None
        ]
        what = call.what.items()
        return given, {n: self.put(x.copy()) if isinstance(x, np.ndarray) else x for n, x in what}

    def run(self, function: Any, given: list[Any], what: dict[str, Any]) -> Any:
        """What a function of the user's returns."""
        try:
            return function(*given, **what)
        except Exception as error:
            raise _Raised from error

    def results(self, call: Call) -> dict[str, Array]:
        """What the kernel gives, by the names of `Call.answers`."""
        names: tuple[str, ...] = ("output", "lse") if call.do is None else ("dq", "dk", "dv")
        function = self.fn if call.do is None else self.derive
        result = self.run(function, *self.arguments(call))
        if call.do is None and "lse" not in self.features:
            names, result = names[:1], result if isinstance(result, _SEVERAL) else [result]
        if not isinstance(result, _SEVERAL) or len(result) < len(names):
            raise _Wrong(f"returned {type(result).__name__}, expected ({', '.join(names)})")
        found = {name: _host(x) for name, x in zip(names, result, strict=False)}
        for name, x in found.items():
            if x.shape != (shape := call.shapes[name]):
                raise _Wrong(f"{name} has shape {x.shape}, expected {shape}")
        return found

    def derive_by(self, gradients: Callable[..., Any] | bool | None, call: Call) -> None:
        """Take gradients from a callable, or from torch if the output of this call has a graph."""
        self.derive = gradients if callable(gradients) else None
        if self.is_torch and gradients is None:
            given, _ = self.arguments(call)
            with suppress(Exception):  # the cases will tell
                result = self.fn(*(x.requires_grad_() for x in given))
                output = result[0] if isinstance(result, _SEVERAL) else result
                self.derive = self._autograd if output.requires_grad else None
        self.features = self.features - {"gradients"} | ({"gradients"} if self.derive else set())

    def _autograd(self, q: Any, k: Any, v: Any, do: Any, **what: Any) -> Any:
        inputs: Any = [x.detach().requires_grad_() for x in (q, k, v)]
        result = self.fn(*inputs, **what)
        output = result[0] if isinstance(result, _SEVERAL) else result
        return self.library.autograd.grad(output, inputs, do, materialize_grads=True)


@dataclass(frozen=True)
class _Finding:
    """The largest error / bar of a run, where that is, and how to look for its cause."""

    ratio: float
    says: str = ""
    cause: Callable[[], str] = lambda: ""


def _ratios(x: Array, right: Array, bar: Array) -> Array:
    """error / bar of each element: inf where a NaN or inf is misplaced."""
    with np.errstate(all="ignore"):
        error = np.abs(x - right)
        ratio = np.where(np.isfinite(error), error / bar, np.inf)
    same = (x == right) | (np.isnan(x) & np.isnan(right))
    return np.asarray(np.where(same, 0, np.where(np.isnan(ratio), np.inf, ratio)))


def _compared(name: str, x: Array, right: Array, bar: Array, expected: str) -> _Finding:
    if not x.size:
        return _Finding(0.0)
    x = x.astype(np.float64)
    ratio = _ratios(x, right, bar)
    at = np.unravel_index(ratio.argmax(), ratio.shape)
    place = ", ".join(map(str, at))
    says = f"{name}[{place}] is {x[at]:.7g}, {expected} {right[at]:.7g} ± {bar[at]:.2g}"
    if ratio.size > 1:
        says += f"; {np.count_nonzero(ratio > 1)} of {ratio.size} are off"
    return _Finding(float(ratio[at]), says)


def _worst(findings: Iterable[_Finding]) -> _Finding:
    return max(findings, key=lambda finding: finding.ratio)


def _answer(kernel: _Kernel, call: Call) -> _Finding:
    """The output and lse, or the gradients, are those of float64."""
    found = kernel.results(call)
    worst = _worst(_compared(n, x, *call.answers[n], "expected") for n, x in found.items())
    return replace(worst, cause=lambda: _cause(call, found))


def _agreement(kernel: _Kernel, pair: _Pair, exactly: bool = False) -> _Finding:
    """Two runs differ by no more than both may be off."""
    first, second = kernel.results(pair.first), kernel.results(pair.second)
    findings = []
    for name in first if not exactly else ("output",):
        a, b = pair.of_first(first[name].astype(np.float64)), pair.of_second(second[name])
        bar = pair.of_first(pair.first.answers[name][1]) + pair.of_second(
            pair.second.answers[name][1]
        )
        if exactly:  # but for what may underflow
            tiny = ml_dtypes.finfo(DTYPES[pair.first.dtype]).smallest_normal  # type: ignore[no-untyped-call]
            bar = np.where(np.abs(a) < 2.0**10 * float(tiny), bar, 0)
        findings.append(_compared(f"the second {name}", b, a, bar, "the first has"))
    return _worst(findings)


def _exact_agreement(kernel: _Kernel, pair: _Pair) -> _Finding:
    """Two runs agree to the last bit; to what both may be off, if one input has different bits."""
    return _agreement(kernel, pair, exactly=_repeats(kernel, pair.first).ratio <= 1)


def _repeats(kernel: _Kernel, call: Call) -> _Finding:
    """Five runs give the same bits."""
    first = kernel.results(call)
    for turn in range(2, 6):
        for name, x in kernel.results(call).items():
            if x.tobytes() != first[name].tobytes():
                return _Finding(_INF, f"run {turn} has other bits in {name} than run 1")
    return _Finding(0.0)


def _untouched(kernel: _Kernel, call: Call) -> _Finding:
    """The inputs are what they were."""
    given, what = kernel.arguments(call)
    arrays = dict(zip(("q", "k", "v"), given, strict=True))
    arrays |= {n: x for n, x in what.items() if isinstance(call.what[n], np.ndarray)}
    before = {name: _host(x).tobytes() for name, x in arrays.items()}
    kernel.run(kernel.fn, given, what)
    for name, x in arrays.items():
        if _host(x).tobytes() != before[name]:
            return _Finding(_INF, f"{name} was written to")
    return _Finding(0.0)


# What a wrong answer would be right for.


def _suspects(call: Call) -> Iterator[tuple[str, Call]]:
    """Common mistakes, each with the call that a kernel which makes it answers."""
    what, (Nq, Nk) = call.what, call.problem.lengths
    mask, scale, window = what.get("attn_mask"), what.get("scale"), what.get("window")
    if scale is None:
        yield "scores are not divided by sqrt(d)", call.but(scale=1.0)
    else:
        yield "scale is ignored", call.but(scale=None)
    if mask is not None:
        yield "attn_mask is ignored", call.but(attn_mask=None)
        if mask.dtype == bool:
            yield "attn_mask is inverted: True may attend", call.but(attn_mask=~mask)
        else:
            factor = call.problem.scale
            yield "attn_mask is added before scaling", call.but(attn_mask=_times(mask, factor))
            bias = _times(mask, math.log(2))
            yield "attn_mask is not multiplied by log2(e) for exp2", call.but(attn_mask=bias)
    if (keys := what.get("key_padding_mask")) is not None:
        yield "key_padding_mask is ignored", call.but(key_padding_mask=None)
        yield "key_padding_mask is inverted: True is a real key", call.but(key_padding_mask=~keys)
    if what.get("is_causal"):
        yield "is_causal is ignored", call.but(is_causal=None)
        offset = Nk - Nq if call.meant["causal_align"] == "bottom-right" else 0
        for apart, says in ((-1, "a row does not see its own key"), (1, "a row sees one key more")):
            if mask is None:
                keep = np.tri(Nq, Nk, offset + apart, dtype=bool)
                wrong = call.but(is_causal=None, attn_mask=keep)
                yield f"causal is off by one: {says}", wrong
    elif mask is None and window is None:
        yield "it is causal, unasked", call.but(is_causal=True)
    if what.get("is_causal") or window is not None:
        other = {"bottom-right": "top-left", "top-left": "bottom-right"}[call.meant["causal_align"]]
        yield f"aligned {other}, not {call.meant['causal_align']}", call.but(causal_align=other)
    if window is not None:
        yield "window is ignored", call.but(window=None)
        for side, name in enumerate(("left", "right")):
            if window[side]:
                less = tuple(x - (n == side) if x else x for n, x in enumerate(window))
                yield f"window is off by one: a key short on the {name}", call.but(window=less)
    if (group := call.problem.group) > 1:
        k, v = (np.tile(x, (1, group, 1, 1)) for x in (call.k, call.v))
        wrong = call.but(k=k, v=v, enable_gqa=None)
        yield "query head h takes key head h modulo their number, not h // group", wrong
    rests = {B: Nk % B for B in (2**n for n in range(1, 9)) if Nk % B}
    for rest in sorted({rest for rest in rests.values() if rest < Nk}):
        keep = np.arange(Nk)[None] < Nk - rest
        if mask is not None:
            keep = mask & keep if mask.dtype == bool else np.where(keep, mask, -np.inf)
        wrong = call.but(attn_mask=keep if mask is None else keep.astype(mask.dtype))
        yield "keys after the last full tile are left out", wrong
    if not any(name in what for name in (*_MASKS, "dropout_p")):
        for more in sorted({B - rest for B, rest in rests.items()}):
            k, v = (np.pad(x, [(0, 0), (0, 0), (0, more), (0, 0)]) for x in (call.k, call.v))
            yield "a short last tile is padded with keys of score 0", call.but(k=k, v=v)


def _times(mask: Array, factor: float) -> Array:
    return np.asarray((mask.astype(np.float64) * factor).astype(mask.dtype))


def _cause(call: Call, found: dict[str, Array]) -> str:
    """The mistakes that explain a wrong answer, at most two; empty if none does."""
    if "masked_nan" in call.needs:
        return ""

    def explains(answers: dict[str, tuple[Array, Array]], found: dict[str, Array]) -> bool:
        return all(
            x.shape == answers[n][0].shape and (_ratios(x, *answers[n]) <= 1).all()
            for n, x in found.items()
        )

    found = {n: x.astype(np.float64) for n, x in found.items()}
    if "lse" in found and explains(call.answers, {"output": found["output"]}):
        for says, factor in (("in base 2", math.log(2)), ("converted twice", 1 / math.log(2))):
            if explains(call.answers, {"lse": found["lse"] * factor}):
                return f"lse is {says}, not a natural logarithm"
        return ""
    texts = dict.fromkeys(text for text, other in _suspects(call) if explains(other.answers, found))
    if texts or call.do is not None:
        return ", or ".join(list(texts)[:2])
    if (_ratios(found["output"], *call.answers["output"]) > 1).mean() < 0.2:  # rounding is all over
        return ""
    for dtype in {"float64": ("float32", "float16"), "float32": _HALVES}.get(call.dtype, ()):
        right, rounded = call.answers, _standard(call, dtype)
        bars = {n: _half_bar(right[n][0], np.zeros(x.shape), *rounded[n]) for n, x in found.items()}
        if explains({n: (right[n][0], bar) for n, bar in bars.items()}, found):
            also = " or TF32" if dtype == "float16" else ""
            return f"scores or weights in {dtype}{also}: the error is of that size"
    return ""


# The battery: cases by group, each with its inputs from small to large.


@dataclass(frozen=True)
class _Spec:
    """A claim: its inputs, what a failure is likely to mean, its source, and how it is checked.

    optional: a failure is only noted, unless it is asked for.
    """

    name: str
    inputs: Sequence[Any]
    likely: str = ""
    source: str = ""
    check: Callable[[_Kernel, Any], _Finding] = _answer
    needs: frozenset[str] = frozenset()
    optional: bool = False
    group: str = ""

    def lacking(self, features: Set[str]) -> set[str]:
        """What a kernel lacks to run any of the inputs."""
        return min((set(self.needs | item.needs) - features for item in self.inputs), key=len)

    def run(
        self, kernel: _Kernel, dtype: str, refusals: tuple[type[Exception], ...], guess: str
    ) -> Case:
        """Run the inputs that ask for nothing but the kernel's features.

        guess: the likely cause, if the answer does not tell.
        """
        inputs = [item for item in self.inputs if item.needs <= kernel.features]
        failed, refused, ratio = 0, 0, 0.0
        shown: dict[str, Any] = {}
        for item in inputs:
            try:
                finding = self.check(kernel, item)
            except _Wrong as error:
                finding = _Finding(_INF, str(error))
            except _Raised as error:
                cause = error.__cause__
                says = textwrap.shorten(f"{type(cause).__name__}: {cause}", 300)
                finding = _Finding(_INF, says, lambda: "fn lacks what is declared, or is wrong")
                if isinstance(cause, refusals):
                    refused += 1
                    shown = shown or {"found": says, "call": item}
                    continue
            ratio = max(ratio, finding.ratio)
            if finding.ratio > 1:
                failed += 1
                if failed == 1:
                    likely = finding.cause() or guess
                    shown = {"found": finding.says, "likely": likely, "call": item}
        status = "refused" if refused == len(inputs) else "passed"
        if failed:
            status = "noted" if self.optional else "failed"
        counts = len(inputs), failed, refused
        about = self.group, self.name, dtype, status
        return Case(*about, *counts, ratio, source=self.source, **shown)


_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257)
_DIFFERENT = ((1, 2), (2, 3), (2, 5), (5, 2), (1, 7), (7, 1), (33, 100), (130, 64), (1, 257))
_SHAPES = ((3, 3), (17, 17), (65, 65), (130, 130), (5, 33), (33, 5))
_SPANS = (2, 5, 17, 33, 65, 129, 257)  # a tile of any usual size, and one key more
_LSE, _DERIVED = frozenset({"lse"}), frozenset({"gradients"})
_NAN_SOURCE = "pytorch #101967; Dao #1745, #1395; aiter PR #5401"
_HEAD_SOURCE = "onnx PR #7274; axlearn PR #842; jax-js PR #180"

# fmt: off


def _against_float64(make: _Inputs) -> Iterator[_Spec]:
    normal, mask, lengths, d = make.normal, make.mask, make.lengths, make.widths
    yield _Spec(
        "lengths around powers of two", [normal(N) for N in _LENGTHS],
        "what happens from one tile to the next, or in a short last tile",
        "triton #2626; jax #23819; jvp_flash #13; attention-gym #50; pytorch/xla PR #8671; "
        "triton-lang/kernels #6; fla #88; tspeterkim PR #2",
    )
    yield _Spec(
        "head widths", [normal(20, width=width) for width in d],
        "a width that is not supported", "Dao #2591, #1347; 66RING #12",
    )
    yield _Spec(
        "different lengths of q and k", [normal(*N) for N in _DIFFERENT],
        "one length used for both", "SageAttention #26",
    )
    yield _Spec("causal", [normal(*N, is_causal=True) for N in ((1, 1), (2, 2), *_SHAPES)])
    yield _Spec(
        "causal and windows, both alignments",
        [normal(*N, causal_align=align, **rule)
         for N in ((2, 5), (5, 2), (33, 100), (130, 64))
         for align in checks.ALIGNMENTS
         for rule in ({"is_causal": True}, {"window": (3, 1)})],
        source="Dao #282, #351, #402, #517, #1778; nanochat PR #456; pytorch #144858",
    )
    yield _Spec(
        "windows",
        [normal(*N, window=window)
         for N in _SHAPES for window in ((1, 0), (3, 2), (None, 1), (20, None))],
        "(left, right) sees left + 1 + right keys", "transformers #39408, #29623; zml PR #763",
    )
    yield _Spec(
        "scale", [normal(N, scale=scale) for N in (3, 17, 65) for scale in (0.5, 2.0)],
        "scale is ignored in one path", "prime-rl PR #3007",
    )
    for kind in ("bool", "float"):
        yield _Spec(
            f"{kind} mask",
            [normal(*N, batch=2, attn_mask=mask(*lead, *N, kind=kind, empty=empty))
             for N in _SHAPES for lead, empty in (((), False), ((2, 2), False), ((), True))],
        )
    yield _Spec(
        "masks that broadcast",
        [normal(N, batch=2, attn_mask=mask(*shape, kind=kind))
         for N in (5, 40) for kind in ("bool", "float")
         for shape in ((1, N), (N, 1), (1, 1, N, N), (2, 1, 1, N), (1, 2, N, N), (2, 1, N, N))],
        "the strides of a side of attn_mask that broadcasts",
    )
    yield _Spec(
        "key padding",
        [normal(N, batch=2, key_padding_mask=keys)
         for N in (3, 17, 65, 130)
         for keys in (lengths(N, N, 1), lengths(N, N // 2 + 1, N), lengths(N, 0, N), mask(2, N))],
    )
    yield _Spec(
        "grouped heads",
        [normal(N, batch=2, heads=heads, kv_heads=shared)
         for N in (3, 33, 70) for heads, shared in ((2, 1), (4, 2), (6, 2))],
        source=_HEAD_SOURCE,
    )
    if len(d) > 1:
        pairs = pairwise((*d, *d[:1]))
        yield _Spec("values of another width", [normal(33, width=a, dv=b) for a, b in pairs])
    yield _Spec(
        "dropout, the bits of flashsim",
        [normal(N, batch=2, dropout_p=p, seed=seed)
         for N in (3, 17, 65, 130) for p, seed in ((0.1, 0), (0.5, 3), (0.9, 2**40 + 1))],
    )
    yield _Spec(
        "large scores", [normal(N, loud=loud) for N in (7, 65, 130) for loud in (2.0, 5.0)],
        "scores, or their maximum, in too low a precision",
    )
    yield _Spec(
        "batch items with other statistics",
        [call.then("q[1] *= 8; v[1] += 100", q=_second(call.q, 8, 0), v=_second(call.v, 1, 100))
         for call in (normal(20, batch=2), normal(150, batch=2))],
        "something kept from one item or head for the next", "TransformerEngine #3216",
    )
    yield _Spec(
        "products as good as their dtype",
        [make.normal(128, heads=1, width=min(make.widths, key=lambda d: abs(d - 32)))],
        "TF32 or half precision products", "triton_docs_tutorials #6",
    )
    keys = _made(real_tokens)
    rows = _Made(keys.value[:, None, None], "real_tokens()[:, None, None]")
    yield _Spec(
        "real activations",
        [make.activations(1), make.activations(1, is_causal=True), make.activations(0),
         make.activations(None, key_padding_mask=keys), make.activations(None, attn_mask=rows)],
        "a precision that random numbers do not ask for",
    )


def _public_faults(make: _Inputs) -> Iterator[_Spec]:
    """Faults reported of attention kernels, as the smallest inputs that show them."""
    column, given = make.columns, make.given
    yield _Spec(
        "a row that sees no key",
        [column([1], [1], [1], attn_mask=given([[False]])),
         column([1], [1], [1], attn_mask=given([[-_INF]])),
         column([1], [1], [1], key_padding_mask=given([[False]])),
         column([0] * 2, [0] * 2, [1, 3], attn_mask=given([[False] * 2, [False, True]])),
         column([0] * 5, [0] * 2, [1, 3], is_causal=True, causal_align="bottom-right")],
        "0 / 0; or a finite number for -inf, which gives the mean of V",
        "pytorch #103963, #103749, #41508, #160064; burn #4694; mlx #2395",
    )
    yield _Spec(
        "no keys at all", [column([1], [], [])], "log(0), or an output never written",
        "Dao PR #978; FlashMLA PR #77; flashinfer PR #3943",
    )
    four = [[[0]]] * 4
    yield _Spec(
        "a batch with empty sequences",
        [column(four, four, [[[3]]] * 4, key_padding_mask=make.lengths(1, 0, 1, 0, 1)),
         column([[[0] * 33]] * 4, [[[0] * 33]] * 4, [[[3] * 33]] * 4,
                key_padding_mask=make.lengths(33, 0, 33, 0, 1))],
        "a loop over no tiles leaves the output unwritten", "Dao #1537, #1713, #2562, PR #2470",
    )
    yield _Spec(
        "first key tiles all masked",
        [column([1] * n, [1] * n, [5] * (n - 1) + [7], attn_mask=given([row] * n))
         for n in _SPANS for row in ([False] * (n - 1) + [True], [-_INF] * (n - 1) + [0.0])],
        "exp(-inf + inf): subtract 0 while the maximum is -inf",
        "vllm #48364; ik_llama.cpp #2344; Dao #1930",
    )
    wide = [column([-2e4] * 2, [2e4] * 2, [1, 3])]
    yield _Spec(
        "a running maximum that starts finite",
        [column([-240] * 2, [240] * 2, [1, 3])] + wide * (make.dtype != "float16"),
        "all scores lie below the finite number that stands for -inf", "flashinfer #4267, #4450",
    )
    behind = [[False, True]] * 2
    yield _Spec(
        "NaN and inf behind a mask",
        [column([1] * 2, [x, 1], [x, 7], **{name: mask})
         for x in (_NAN, _INF)
         for name, mask in (("attn_mask", given(behind)), ("attn_mask", given([[-_INF, 0.0]] * 2)),
                            ("key_padding_mask", given(behind[:1])))]
        + [column([0] * 3, [1] * 3, [1, _NAN, _NAN], is_causal=True)],
        "0 * NaN is NaN: what is masked must not be multiplied", _NAN_SOURCE,
    )
    yield _Spec(
        "causal, fewer queries than keys",
        [column([0] * 2, [0] * 5, [0, 1, 2, 3, 4], is_causal=True)],
        source="Dao #282, #351, #402, #517; nanochat PR #456; pytorch #144858",
    )
    yield _Spec(
        "causal, more queries than keys",
        [column([0] * 5, [0] * 2, [1, 3], is_causal=True)], source="Dao #1778",
    )
    yield _Spec(
        "a window of w to the left sees w + 1",
        [column([0] * 5, [0] * 5, [0, 1, 2, 3, 4], window=(1, 0))],
        source="transformers #39408, #29623; zml PR #763",
    )
    yield _Spec(
        "a last key in a tile of its own",
        [column([0] * n, [0] * n, [0] * (n - 1) + [n]) for n in _SPANS],
        "N // B tiles: the tail is dropped", "66RING #12; jax #27224; pytorch #159247",
    )
    yield _Spec(
        "low scores beside a short tile",
        [column([1] * n, [-10] * n, [1] * n) for n in (3, *_SPANS)],
        "padding of the tile scores 0, not -inf",
        "cuDNN in pytorch #196678; TensorRT-LLM PR #18174",
    )
    yield _Spec(
        "scores that overflow exp", [column([1] * 2, [0, x], [1, 2]) for x in (100, 1000)],
        "no maximum is subtracted", "cs149gpt",
    )
    yield _Spec(
        "a maximum that rises in a later tile",
        [column([1] * n, [0] * (n - 1) + [1], [1] * (n - 1) + [0]) for n in _SPANS],
        "O or l is not rescaled by exp(m_old - m_new), or by its inverse", "Dao #991, #333",
    )
    yield _Spec(
        "a maximum that does not fall",
        [column([1] * n, [100] + [0] * (n - 1), [1] + [2] * (n - 1)) for n in _SPANS],
        "the maximum is that of the last tile alone",
    )
    yield _Spec(
        "lse is a natural logarithm", [column([0] * 2, [0] * 2, [1] * 2)],
        "base 2, or converted twice",
        "tokenspeed PR #571; flashinfer #4485, PR #2114; FlashMLA PR #106; pytorch #181645",
        needs=_LSE,
    )
    bias = given([[1.0, 0.0]] * 2)
    yield _Spec(
        "a bias is in units of the scores", [column([0] * 2, [0] * 2, [1, 0], attn_mask=bias)],
        "exp2 without log2(e) for the bias", "segment-anything-fast PR #71",
    )
    yield _Spec(
        "a bias is not scaled", [column([0] * 2, [0] * 2, [1, 0], attn_mask=bias, scale=0.5)],
        "the mask is added before scaling",
    )
    alibi = given([[0.5 * (j - i) if j <= i else -_INF for j in range(3)] for i in range(3)])
    yield _Spec(
        "lse of a bias that shifts whole rows",
        [column([0] * 3, [0] * 3, [1, 2, 4], attn_mask=alibi)],
        "a bias of j instead of j - i: the right output, a wrong lse",
        "vllm PR #945; Dao #907, PR #540", needs=_LSE,
    )
    yield _Spec(
        "query heads 0 and 1 share key head 0",
        [column([[0]] * 4, [[0]] * 2, [[1], [2]], enable_gqa=True)],
        "heads are repeated as a whole, not each in turn", _HEAD_SOURCE,
    )


def _relations(make: _Inputs) -> Iterator[_Spec]:
    """What must hold between two runs."""
    few = [make.normal(N, batch=2, heads=1) for N in (3, 40, 150)]
    yield _Spec(
        "reversing the keys changes nothing",
        [_Pair(a, a.then("k, v = k[:, :, ::-1], v[:, :, ::-1]",
                         k=a.k[:, :, ::-1], v=a.v[:, :, ::-1])) for a in few],
        "an answer that depends on the order of the keys", check=_agreement,
    )
    yield _Spec(
        "8 V gives 8 O exactly",
        [_Pair(a, a.then("v = v * q.dtype.type(8)", v=a.v * a.q.dtype.type(8)), lambda x: 8 * x)
         for a in few],
        "V enters otherwise than linearly", check=_exact_agreement,
    )
    yield _Spec(
        "causal rows do not know the future",
        [_Pair(a, _filled(a, n, 30.0, 1000.0), partial(_rows, n), partial(_rows, n))
         for N, n in ((2, 1), (17, 16), (33, 20), (150, 64))
         for a in [make.normal(N, is_causal=True)]],
        "a key ahead has weight, or moves the maximum", check=_agreement,
    )
    masked = [
        (make.normal(20, batch=2, key_padding_mask=make.lengths(20, 12, 12)), 12),
        (make.normal(150, heads=1, key_padding_mask=make.lengths(150, 66)), 66),
        (make.normal(20, attn_mask=make.given([[True] * 12 + [False] * 8] * 20)), 12),
        (make.normal(20, attn_mask=make.given([[0.5] * 12 + [-_INF] * 8] * 20)), 12),
    ]
    yield _Spec(
        "behind a mask, NaN is as good as 0",
        [_Pair(_filled(a, n, 0.0, 0.0), _filled(a, n, _NAN, _INF)) for a, n in masked],
        "0 * NaN is NaN: what is masked must not be multiplied", _NAN_SOURCE, _agreement,
    )
    yield _Spec(
        "grouped heads are repeated heads",
        [_Pair(a, a.then("k, v = k.repeat(3, 1), v.repeat(3, 1)")
                   .but(k=a.k.repeat(3, 1), v=a.v.repeat(3, 1), enable_gqa=None))
         for a in (make.normal(N, heads=6, kv_heads=2) for N in (3, 70))],
        "the map from query heads to key heads", check=_agreement,
    )
    yield _Spec(
        "a batch is its items",
        [_Pair(a, a.then("q, k, v = q[1:], k[1:], v[1:]", q=a.q[1:], k=a.k[1:], v=a.v[1:]),
               lambda x: x[1:]) for a in few],
        "the offset of an item", check=_agreement,
    )


def _gradient_cases(make: _Inputs) -> Iterator[_Spec]:
    def case(name: str, calls: Iterable[Call], likely: str = "", source: str = "") -> _Spec:
        inputs = [call if call.do is not None else make.gradient(call) for call in calls]
        return _Spec(f"dq, dk, dv: {name}", inputs, likely, source, needs=_DERIVED)

    normal, lengths = make.normal, make.lengths
    zero = make.gradient(make.columns([0] * 2, [0] * 2, [0] * 2), "one number")
    yield case(
        "any length", [zero, *(normal(N) for N in (2, 3, 5, 17, 33, 65, 129))],
        "scale left out of dq or dk; a short last tile; causal unasked",
        "oleksost README; triton #5660, #4541",
    )
    yield case("head widths", [normal(20, width=d) for d in make.widths], "", "Dao #2591, #1347")
    yield case("different lengths", [normal(*N) for N in _DIFFERENT])
    yield case("causal", [normal(*N, is_causal=True) for N in ((2, 2), *_SHAPES)])
    yield case("scale", [normal(N, scale=0.5) for N in (3, 33)], "scale left out of dq or dk")
    for kind in ("bool", "float"):
        yield case(
            f"{kind} mask",
            [normal(N, attn_mask=make.mask(N, N, kind=kind, empty=empty))
             for N in (3, 33, 130) for empty in (False, True)],
            "NaN from a row that sees no key", "jax #32242",
        )
    padded = [normal(20, batch=2, key_padding_mask=lengths(20, 12, n)) for n in (20, 12)]
    yield case("key padding", [*padded, _filled(padded[1], 12, _NAN, _NAN)])
    group = make.gradient(make.columns([[0]] * 2, [[0]], [[0]], enable_gqa=True), "one number")
    yield case(
        "grouped heads", [group, *(normal(N, batch=2, heads=6, kv_heads=2) for N in (3, 33, 130))],
        "dk and dv are not summed over the heads that share a key head",
        "levanter PR #449; native-sparse-attention-triton #27",
    )
    yield case("dropout", [normal(N, dropout_p=0.4, seed=N) for N in (3, 33, 130)])
    yield case(
        "large inputs",
        [normal(N, loud=loud) for N in (5, 129) for loud in (2.0, 4.0)]
        + [make.columns([5] * n, [-40] * n, [1, 2] * (n // 2)) for n in (4, 130)],
        "P recomputed beyond the end of a tile, or from a rounded lse",
        "Dao test_flash_attn_bwd_overflow; cuDNN in pytorch #196678",
    )
    yield case(
        "strided do",
        [make.gradient(normal(33), how) for how in ("one number", "heads inside", "transposed")],
        "do read as if it were contiguous", "Dao #355, test bwd_transpose; oleksost",
    )
    yield _Spec(
        "dq, dk, dv: the same bits five times", [make.gradient(normal(N)) for N in (40, 257)],
        "atomic additions", "Dao #414, #384", _repeats, _DERIVED, optional=True,
    )


def _conduct(make: _Inputs) -> Iterator[_Spec]:
    """How it treats its inputs."""
    hows = [dict.fromkeys("qkv", how) for how in ("heads inside", "wider", "transposed")]
    yield _Spec(
        "strided inputs",
        [replace(make.normal(N, batch=2), strides=strides)
         for N in (5, 40) for strides in (*hows, {"k": "transposed", "v": "wider"})],
        "inputs read as if they were contiguous",
        "FlagAttention #45; FlagGems #5896; pytorch PR #187506",
    )
    masks = [make.mask(40, 40, kind=kind) for kind in ("bool", "float")]
    yield _Spec(
        "inputs are not written to",
        [make.normal(40), make.normal(40, scale=0.5),
         *(make.normal(40, attn_mask=m) for m in masks)],
        "an operation in place, such as q *= scale", check=_untouched,
    )
    yield _Spec(
        "the same bits five times", [make.normal(N) for N in (7, 40, 257)],
        "a race, or atomic additions", "llama.cpp PR #13438, #27678", _repeats, optional=True,
    )


# fmt: on


def _together(make: _Inputs, features: Sequence[str]) -> Iterator[_Spec]:
    """Several of the declared features at once, drawn at random."""
    rng, calls = np.random.default_rng(0), []
    for N in (5, 12, 33, 70, 130) * 3:
        use = {name for name in features if rng.random() < 0.6}
        masks = {"causal", "window", "key_padding_mask", "bool_mask", "float_mask"} & use
        if "combined_masks" not in use and masks:
            masks = {sorted(masks)[rng.integers(len(masks))]}
        Nk = int(rng.integers(1, 2 * N)) if "different_lengths" in use else N
        what: dict[str, Any] = {}
        if "causal" in masks:
            what["is_causal"] = True
        if "window" in masks:
            what["window"] = (int(rng.integers(N)), int(rng.integers(N)))
        if "causal_align" in use and what:
            what["causal_align"] = checks.ALIGNMENTS[rng.integers(2)]
        if "key_padding_mask" in masks:
            what["key_padding_mask"] = make.lengths(Nk, Nk, int(rng.integers(1, Nk + 1)))
        for kind in ("bool", "float"):
            if f"{kind}_mask" in masks:
                what["attn_mask"] = make.mask(2, 4, N, Nk, kind=kind)
        if "scale" in use:
            what["scale"] = 0.3
        if "dropout" in use:
            what |= {"dropout_p": 0.25, "seed": N}
        kv_heads = 2 if "gqa" in use else 4
        calls.append(make.normal(N, Nk, batch=2, heads=4, kv_heads=kv_heads, **what))
    yield _Spec("several at once", calls, "two features in one run", group="Declared features")


def _second(x: Array, factor: float, shift: float) -> Array:
    """x, with its second item times a factor and shifted."""
    return np.stack([x[0], (x[1] * x.dtype.type(factor) + x.dtype.type(shift))])


def _filled(call: Call, start: int, of_k: float, of_v: float) -> Call:
    """The call with numbers in place of the keys and values from `start` on."""
    k, v = call.k.copy(), call.v.copy()
    k[:, :, start:], v[:, :, start:] = of_k, of_v
    return call.then(f"k[:, :, {start}:], v[:, :, {start}:] = {of_k}, {of_v}", k=k, v=v)


def _rows(n: int, x: Array) -> Array:
    return np.asarray(x[:, :, :n])


_GROUPS = {
    "Against float64": _against_float64,
    "Public faults": _public_faults,
    "Relations": _relations,
    "Gradients": _gradient_cases,
    "Conduct": _conduct,
}


@lru_cache(maxsize=8)
def _battery(dtype: str, seed: int, widths: tuple[int, ...], align: str) -> tuple[_Spec, ...]:
    """All cases in one dtype. The next kernel gets the same, whose inputs know their answers."""
    make = _Inputs(dtype, seed, widths, align)
    cases = ((group, spec) for group, specs in _GROUPS.items() for spec in specs(make))
    return tuple(replace(spec, group=group) for group, spec in cases)
