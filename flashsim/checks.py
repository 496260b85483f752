"""Argument checks: every refusal names the argument, its value, and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
ALIGNMENTS = ("bottom-right", "top-left")
CONVENTIONS = ("literal", "elided")


def bad(name: str, value: Any, accepted: str) -> ValueError:
    """The error for a value out of range."""
    return ValueError(f"{name}={value!r}: expected {accepted}")


def bad_type(name: str, value: Any, accepted: str) -> TypeError:
    """The error for a value of the wrong type."""
    return TypeError(f"{name}={value!r}: expected {accepted}")


def choice(name: str, value: Any, accepted: Iterable[str]) -> str:
    """One of some names."""
    if not isinstance(value, str) or value not in accepted:
        raise bad(name, value, "one of " + ", ".join(map(repr, accepted)))
    return value


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise bad_type(name, value, "True or False")
    return bool(value)


def integer(name: str, value: Any, at_least: int, below: int | None = None) -> int:
    """An integer in range; a bool is none."""
    limits = f"an integer of at least {at_least}" + ("" if below is None else f" and below {below}")
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise bad_type(name, value, limits)
    if value < at_least or (below is not None and value >= below):
        raise bad(name, value, limits)
    return int(value)


def number(name: str, value: Any, accepted: str) -> float:
    """A finite real number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise bad_type(name, value, accepted)
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise bad(name, value, accepted)
    return result


def amount(name: str, value: Any) -> float:
    """A finite number of at least 0."""
    accepted = "a number of at least 0"
    if number(name, value, accepted) < 0:
        raise bad(name, value, accepted)
    return float(value)


def integers(name: str, value: Any, at_least: int, below: int = 2**63) -> np.ndarray[Any, Any]:
    """(n,) integers in range, as int64."""
    accepted = f"integers of at least {at_least} and below {below}, (n,)"
    found = np.asarray(value)
    if found.ndim != 1:
        raise bad(name, value, accepted)
    if found.size and found.dtype.kind not in "iu":
        raise bad_type(name, value, accepted)
    if found.size and (found.min() < at_least or found.max() >= below):
        raise bad(name, value, accepted)
    return found.astype(np.int64)


def instance(name: str, value: Any, kind: type, accepted: str) -> None:
    """An object of some class."""
    if not isinstance(value, kind):
        raise bad_type(name, value, accepted)


def given_together(**arrays: Any) -> bool:
    """Whether all of some arguments are given, or none."""
    missing = [name for name, x in arrays.items() if x is None]
    if 0 < len(missing) < len(arrays):
        there = ", ".join(name for name in arrays if name not in missing)
        raise bad(" and ".join(missing), None, f"{', '.join(arrays)} together, as {there} is given")
    return not missing


def budget(name: str, value: Any) -> float:
    """An SRAM budget: a positive number, or None for an unbounded chip."""
    if value is None or (isinstance(value, float) and value == math.inf):
        return math.inf
    if number(name, value, "a positive number, or None for an unbounded chip") <= 0:
        raise bad(name, value, "a positive number, or None for an unbounded chip")
    return float(value)


def budgets(sram: Any, sram_bytes: Any) -> tuple[float, float]:
    """The two ways to give a budget, of which one may be used."""
    if sram is not None and sram_bytes is not None:
        raise bad("sram_bytes", sram_bytes, f"None, as sram={sram!r} gives the budget in elements")
    return budget("sram", sram), budget("sram_bytes", sram_bytes)


def pair_of_tiles(value: Any) -> tuple[int, int]:
    """(Br, Bc)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise bad("tiles", value, "(Br, Bc), two positive integers")
    return integer("tiles[0]", value[0], 1), integer("tiles[1]", value[1], 1)


def window_sides(value: Any) -> tuple[int | None, int | None] | None:
    """(left, right), each None or at least 0."""
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise bad("window", value, "(left, right), each None or an integer of at least 0")
    left, right = (
        None if side is None else integer(f"window[{n}]", side, 0) for n, side in enumerate(value)
    )
    return left, right


def clamped(tiles: tuple[int, ...], Nq: int, Nk: int) -> tuple[int, int]:
    """Tiles no longer than what they tile (and at least 1, when there is nothing to tile)."""
    Br, Bc = tiles
    return max(1, min(Br, Nq)), max(1, min(Bc, Nk))
