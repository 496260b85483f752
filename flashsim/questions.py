"""Predict, then check: a notebook asks, the learner answers, the package computes."""

from __future__ import annotations

import html
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

_NOISE = 1e-12  # rounding of what is 0 in exact arithmetic


@dataclass(frozen=True)
class Verdict:
    """What `check` found. True in a condition if the prediction was right.

    A notebook shows a wrong prediction with a hint, and the answer only on request; as text,
    everything is there. Without a usable prediction the answer stays hidden.
    """

    right: bool
    said: str  # right or wrong, with the hint
    answer: str = ""  # what is revealed

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        return f"{self.said}\n{self.answer}".rstrip()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        said, answer = (html.escape(x).replace("\n", "<br>") for x in (self.said, self.answer))
        if answer and not self.right:
            answer = f"<details><summary>Show the answer</summary>{answer}</details>"
        colour = "#0072B2" if self.right else "#D55E00"
        return (
            f'<div style="border-left:4px solid {colour};padding-left:0.7em">'
            f"<div>{said}</div><div>{answer}</div></div>"
        )


def check(
    predicted: Any, actual: Any, *, because: str = "", hint: str = "", tolerance: float = 0.005
) -> Verdict:
    """Compare a prediction with what the package computed.

    Parameters
    ----------
    predicted : Any
        The learner's answer; None or ... is no prediction yet.
    actual : number, bool, str, or an array or sequence of numbers or bools
        The computed answer. It is never typed in.
    because : str
        Why; shown with the answer.
    hint : str
        Shown with a wrong prediction, beside what can be said of any: too large, too small, how
        many entries are right.
    tolerance : float
        Relative error that a float may have; integers, bools and text must be equal.

    Returns
    -------
    Verdict
        Never an exception, whatever the prediction: a wrong kind or shape is said in words.

    Examples
    --------
    >>> check(0.4, np.exp(-1.0), hint="How far did the maximum rise?", because="it is exp(2 - 3).")
    Not what comes out: you predicted 0.4. Too large. How far did the maximum rise?
    The answer is 0.3679: it is exp(2 - 3).
    """
    if predicted is None or predicted is ...:
        return Verdict(False, "No prediction yet: put yours in place of it and run the cell again.")
    answer = f"The answer is {_show(actual)}" + (f": {because}" if because else ".")
    if isinstance(actual, str):
        if not isinstance(predicted, str):
            return _unusable(predicted, "text")
        right = predicted.strip().casefold() == actual.strip().casefold()
        clue = ""
    else:
        a = np.asarray(actual)
        p = _numbers(predicted, bools=a.dtype == bool)
        if p is None or p.shape != a.shape:
            return _unusable(predicted, _wanted(a))
        right_ones = _equal(p, a, tolerance)
        right, clue = bool(right_ones.all()), _clue(p, a, right_ones)
    if right:
        return Verdict(True, "Right.", answer)
    said = [f"Not what comes out: you predicted {_show(predicted)}.", clue, hint]
    return Verdict(False, " ".join(filter(None, said)), answer)


def _numbers(x: Any, bools: bool) -> np.ndarray[Any, Any] | None:
    """A prediction as an array of numbers, or of bools; None if it is something else."""
    try:
        array = np.asarray(x)
        if array.dtype == object and all(isinstance(n, Real) for n in array.flat):
            array = array.astype(np.float64)  # fractions, and integers of any length
    except (ValueError, OverflowError):  # rows of unequal length; no float is so large
        return None
    return array if array.dtype.kind in ("b" if bools else "iuf") else None


def _equal(p: Any, a: Any, tolerance: float) -> Any:
    if a.dtype.kind == "f":
        return np.isclose(p, a, rtol=tolerance, atol=_NOISE, equal_nan=True)
    return p == a


def _clue(p: Any, a: Any, right: Any) -> str:
    if a.ndim:
        return f"{int(right.sum())} of {a.size} are right."
    if a.dtype == bool or p == a:
        return ""
    return "Too large." if p > a else "Too small." if p < a else ""


def _wanted(a: Any) -> str:
    kind = "True or False" if a.dtype == bool else "a number"
    if a.ndim == 0:
        return kind
    shape = " x ".join(map(str, a.shape))
    return f"a list of {shape}, each {kind}" if a.ndim == 1 else f"{shape} values, each {kind}"


def _unusable(predicted: Any, wanted: str) -> Verdict:
    kind = type(predicted).__name__
    return Verdict(False, f"Expected {wanted}, not {predicted!r} ({kind}): please try again.")


def _show(x: Any) -> str:
    """A value for reading: four digits, no types."""
    if isinstance(x, str):
        return x
    x = np.asarray(x)
    if x.ndim:
        return "[" + ", ".join(_show(entry) for entry in x) + "]"
    return f"{x.item():.4g}" if x.dtype.kind == "f" else str(x.item())
