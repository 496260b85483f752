"""The published numbers as data: `data/published.toml`, and FlashAttention's tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any

from .fa1_tables import tables


@cache
def document() -> dict[str, Any]:
    """The file: `papers`, how each is cited, and `rows`; decimals keep their digits."""
    text = (resources.files(__package__) / "data" / "published.toml").read_text("utf-8")
    return tomllib.loads(text, parse_float=Decimal)


def published(key: str) -> tuple[Decimal, ...]:
    """The printed numbers of a row."""
    given = next(row for row in document()["rows"] if row["key"] == key)["published"]
    if isinstance(given, Mapping):
        numbers = tables()[given["table"]].rows[given["method"]]
        return tuple(x for x in numbers if x is not None)
    return tuple(Decimal(x) for x in given)
