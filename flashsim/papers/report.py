"""What `flashsim paper` says: published, recomputed, verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..tables import BAD, Report
from .row import VERDICTS, Row

FAMILIAR = {"exact", "within rounding"}  # verdicts that need no comment


def paper_report(rows: Sequence[Row], detailed: bool) -> Report:
    """A line a row, with remarks on what is not sharp; detailed, a table and all that is known."""
    sources = dict.fromkeys(f"{row.key.partition('-')[0]}: {row.source}" for row in rows)
    counts = Counter(row.verdict for row in rows)
    if detailed:
        heading = [line for row in rows for line in _description(row)]
        tables = [_numbers(row) for row in rows]
        remarks = []
    else:
        heading = ["Published numbers, and what the closed forms and algorithms here give."]
        tables = [[_line(row) for row in rows]]
        remarks = [
            *sources,
            *(
                f"{row.key}: {row.remark}"
                for row in rows
                if row.remark and (row.verdict not in FAMILIAR or row.fit)
            ),
            "* A part of the model was chosen to meet the numbers.",
            "More on a row: flashsim paper ROW.",
        ]
    return Report(
        about={"command": "paper", "flashsim": __version__},
        heading=heading,
        tables=tables,
        records=[record for row in rows for record in _records(row)],
        remarks=remarks,
        failures=[
            f"{row.key}: {row.verdict}, expected {row.expected}" for row in rows if not row.held
        ],
        verdict="Every verdict is the expected one: "
        + ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
        + ".",
    )


def _description(row: Row) -> list[str]:
    lines = [f"{row.key}: {row.what}", f"    {row.source}, {row.where}"]
    return [*lines, *(f"    {text}" for text in (row.model, row.remark) if text), ""]


def _line(row: Row) -> dict[str, str]:
    numbers = row.numbers
    printed = [numbers[0][1]] if row.between else [text for _, text, _, _ in numbers]
    return {
        "row": row.key,
        "published": f"{_ends(printed)} {row.unit}".rstrip(),
        "recomputed": _ends([_number(x) for _, _, x, _ in numbers]),
        "verdict": _verdict(row),
    }


def _verdict(row: Row) -> str:
    return ("" if row.held else BAD + ", ") + row.verdict + (" *" if row.fit else "")


def _ends(texts: Sequence[str]) -> str:
    """Two texts, or the first and the last of more."""
    return ", ".join(texts) if len(texts) < 3 else f"{texts[0]} … {texts[-1]}"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.0f}" if x == round(x) and x < 1e6 else f"{x:.4g}"


def _numbers(row: Row) -> list[dict[str, str]]:
    return [
        {
            row.key: label or row.what,
            f"published\n{row.unit}": printed,
            "recomputed": _number(x),
            "verdict": verdict,
        }
        for label, printed, x, verdict in row.numbers
    ]


def _records(row: Row) -> list[dict[str, Any]]:
    return [
        {
            "row": row.key, "source": row.source, "where": row.where, "what": row.what,
            "for": label, "unit": row.unit, "published": printed, "recomputed": x,
            "verdict": verdict, "row_verdict": row.verdict, "expected_verdict": row.expected,
            "fit": row.fit, "model": row.model, "remark": row.remark,
        }
        for label, printed, x, verdict in row.numbers
    ]  # fmt: skip
