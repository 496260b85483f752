"""Tables 9 to 21 of FlashAttention: time and memory of twelve methods over the sequence length.

Dao et al. 2022 (arXiv:2205.14135), appendix: an A100 with 40 GB, batch 16, 8 heads, d = 64,
float16. They run slower for each head than the paper's Fig. 2, so no one model of time fits both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from itertools import pairwise

from ..checks import choice

FLASH = "FlashAttention"


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes
    ----------
    number : int
    what : str
        "forward", "backward", "forward and backward" or "memory".
    unit : str
        "ms" or "MB".
    N : tuple of int
        Sequence lengths.
    rows : Mapping of str to tuple
        For each method a number for each length, as printed; None where it did not run.
    dropout, masking : bool
        With which the times were taken.
    """

    number: int
    what: str
    unit: str
    N: tuple[int, ...]
    rows: Mapping[str, tuple[Decimal | None, ...]]
    dropout: bool = False
    masking: bool = False

    def points(self, method: str) -> list[tuple[int, float]]:
        """(N, number) where the method ran.

        Raises
        ------
        ValueError
            If the table has no such method.
        """
        choice("method", method, self.rows)
        return [(N, float(x)) for N, x in zip(self.N, self.rows[method], strict=True) if x]

    def crossovers(self, method: str, other: str = FLASH) -> list[float]:
        """The N at which `method` becomes less than `other`, by log-linear interpolation.

        Raises
        ------
        ValueError
            If the table has no such method.
        """
        mine, others = dict(self.points(method)), dict(self.points(other))
        gaps = [(N, math.log(mine[N] / others[N])) for N in self.N if N in mine and N in others]
        return [
            N * (after / N) ** (gap / (gap - gap_after))
            for (N, gap), (after, gap_after) in pairwise(gaps)
            if gap >= 0 > gap_after
        ]


@cache
def tables() -> dict[int, Table]:
    """The tables by their numbers."""
    text = (resources.files(__package__) / "data" / "fa1_tables.json").read_text("utf-8")
    document = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    N = tuple(int(n) for n in document["N"])
    return {
        int(table["number"]): Table(
            **{**table, "number": int(table["number"])},
            N=N,
        )
        for table in document["tables"]
    }


def copies() -> dict[str, list[tuple[int, ...]]]:
    """Of each method, the tables in which it has the same numbers."""
    found: dict[str, dict[tuple[Decimal | None, ...], list[int]]] = {}
    for table in tables().values():
        for method, row in table.rows.items():
            found.setdefault(method, {}).setdefault(tuple(row), []).append(table.number)
    return {
        method: same
        for method, by_row in found.items()
        if (same := [tuple(numbers) for numbers in by_row.values() if len(numbers) > 1])
    }
