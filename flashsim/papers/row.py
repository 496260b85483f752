"""A published number, what comes out here, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ..checks import bad, instance
from . import fa1, fa3, fa4, others
from .published import document, published

EXACT = "exact"
ROUNDING = "within rounding"
BAND = "band"
FAILS = "does not reproduce"
WAITS = "not recomputed"
VERDICTS = (EXACT, ROUNDING, BAND, FAILS, WAITS)  # from the best to none

RECOMPUTE: dict[str, Callable[..., Sequence[float]]] = {
    "fa1-fig2-tiles-gb": fa1.traffic_over_tiles,
    "fa1-fig2-tiles-ms": fa1.time_over_tiles,
    "fa1-fig2-flash": fa1.traffic_of_flash,
    "fa1-fig2-standard": fa1.traffic_of_standard,
    "fa1-fig2-unfused": fa1.traffic_of_standard,
    "fa1-fig2-gflops": fa1.gflops,
    "fa1-fig2-ms": fa1.times,
    "fa1-fig2-sparse-ms": fa1.time_over_density,
    "fa1-memory-pytorch": fa1.memory_of_standard,
    "fa1-memory-flash": fa1.memory_of_flash,
    "fa1-crossover": fa1.crossover,
    "fa3-table2": fa3.rates,
    "fa3-table3-fp16": fa3.fp16_errors,
    "fa3-table3-fp8": fa3.fp8_errors,
    "fa4-forward-cycles": fa4.cycles,
    "fa4-back-cycles": fa4.cycles,
    "fa4-exp2": fa4.exp2_errors,
    "fa4-lazy-rescale": fa4.change_by_lazy_rescaling,
    "ring-block": others.ring_tokens,
    "ring-sequence": others.ring_tokens,
    "softmax-accesses": others.softmax_accesses,
    "paged-waste": others.most_wasted_slots,
    "decoding-time": others.decoding_times,
}


@dataclass(frozen=True)
class Row:
    """One or more numbers of one figure or table.

    Attributes
    ----------
    key : str
        The paper, then what.
    source, where : str
        The paper, and the table, figure or section.
    what, unit : str
        What the numbers are.
    labels : tuple of str
        What each number is for; empty for a single one.
    published : tuple of Decimal
        As printed, digits included; low and high if `between`.
    recomputed : tuple of float
        As many, or, if `between`, one or more that should lie there; empty if nothing does it.
    expected : str
        The verdict that should come out.
    model, remark : str
        How it is recomputed, and what to know about it.
    x : tuple of float
        The number that varies from one to the next, if one does.
    band : tuple of float, optional
        Accepted recomputed / published, low and high.
    between : bool
        Whether `published` is a range.
    fit : bool
        Whether a part of the model was chosen to meet the numbers.
    """

    key: str
    source: str
    where: str
    what: str
    unit: str
    labels: tuple[str, ...]
    published: tuple[Decimal, ...]
    recomputed: tuple[float, ...]
    expected: str
    model: str = ""
    remark: str = ""
    x: tuple[float, ...] = ()
    band: tuple[float, float] | None = None
    between: bool = False
    fit: bool = False

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Of each number."""
        if self.between:
            low, high = map(float, self.published)
            return tuple(BAND if low <= x <= high else FAILS for x in self.recomputed)
        return tuple(
            _verdict(published, x, self.band)
            for published, x in zip(self.published, self.recomputed, strict=bool(self.recomputed))
        )

    @property
    def verdict(self) -> str:
        """The worst of its numbers."""
        return max(self.verdicts, key=VERDICTS.index, default=WAITS)

    @property
    def held(self) -> bool:
        """Whether the verdict is the expected one."""
        return self.verdict == self.expected

    @property
    def numbers(self) -> list[tuple[str, str, float | None, str]]:
        """(label, published, recomputed, verdict) of each, the published one as text."""
        if self.between:
            text = " to ".join(map(str, self.published))
            printed = [text] * max(1, len(self.recomputed))
        else:
            printed = [str(x) for x in self.published]
        n = len(printed)
        labels, values = self.labels or ("",) * n, self.recomputed or (None,) * n
        verdicts = self.verdicts or (WAITS,) * n
        return list(zip(labels, printed, values, verdicts, strict=True))


def _verdict(published: Decimal, recomputed: float, band: tuple[float, float] | None) -> str:
    if recomputed == published:
        return EXACT
    if Decimal(recomputed).quantize(published) == published:
        return ROUNDING
    if band and band[0] <= recomputed / float(published) <= band[1]:
        return BAND
    return FAILS


def chosen(names: Iterable[str]) -> list[str]:
    """The keys of rows that are named, by their key or its beginning; all if none is.

    Raises
    ------
    ValueError
        If a name is empty, or the beginning of no key.
    """
    keys = [row["key"] for row in document()["rows"]]
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        instance("row", name, str, "a key, or a beginning such as fa1")
        if not name or not any(key.startswith(name) for key in keys):
            raise bad("row", name, f"one of {', '.join(keys)}, or a beginning such as fa1")
    return [key for key in keys if not wanted or any(key.startswith(name) for name in wanted)]


def rows(names: Iterable[str] = (), on_step: Callable[[str], None] = lambda key: None) -> list[Row]:
    """The rows with these keys, or beginnings of keys, recomputed now; all if none is named.

    `on_step` is told the key that comes next. Raises ValueError for a name that no key begins with.
    """
    keys, found = chosen(names), []
    for data in document()["rows"]:
        if data["key"] in keys:
            on_step(data["key"])
            found.append(_row(data))
    return found


def _row(data: Mapping[str, Any]) -> Row:
    key, along = data["key"], data.get("along")
    setting = _floats(data.get("setting", {}))
    again = RECOMPUTE.get(key)
    x = tuple(setting[along]) if along else ()
    return Row(
        key=key,
        source=document()["papers"][key.partition("-")[0]],
        where=data["where"],
        what=data["what"],
        unit=data["unit"],
        labels=tuple(data.get("labels", [f"{along} = {value}" for value in x])),
        published=published(key),
        recomputed=tuple(again(**setting)) if again else (),
        expected=data["expected"],
        model=data.get("model", ""),
        remark=data.get("remark", ""),
        x=x,
        band=tuple(map(float, data["band"])) if "band" in data else None,  # type: ignore[arg-type]
        between=data.get("between", False),
        fit=data.get("fit", False),
    )


def _floats(value: Any) -> Any:
    """Settings with numbers of Python instead of decimals."""
    if isinstance(value, dict):
        return {name: _floats(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_floats(x) for x in value]
    return float(value) if isinstance(value, Decimal) else value
