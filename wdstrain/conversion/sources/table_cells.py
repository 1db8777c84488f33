"""Tables as batches of plain values: what every kind of table gives.

A cell is None, a bool, an int, a float, a text, bytes, or a list or dict of these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any, Protocol
from uuid import UUID

import numpy as np

from wdstrain.errors import SourceError, UsageError

Changes = dict[str, Counter[str]]  # column -> what numbers that JSON lacks became -> how many

BATCH_ROWS = 8192  # rows of a batch
_WRITTEN = (Decimal, Fraction, PurePath, UUID, date, time, timedelta)  # their text says all


@dataclass(frozen=True)
class Batch:
    """Some rows of a file. rows: the line or number of each in it, from 1; cells: by column."""

    file: str
    rows: Sequence[int]
    cells: dict[str, list[Any]]


class Table(Protocol):
    """A table that can be read again and again.

    classes: names of class numbers by column, where the table has them. binary: columns that may
    hold images, which are read only if they are named.
    """

    name: str
    columns: list[str]
    classes: dict[str, tuple[str, ...]]
    binary: frozenset[str]

    def batches(
        self, columns: Sequence[str], *, raw: Collection[str] = (), changes: Changes | None = None
    ) -> Iterator[Batch]:
        """Yield all rows that can be read. raw: columns that stay text, if the file has no types.

        changes: counts the numbers that JSON cannot hold.
        """


def check_names(name: str, columns: Sequence[str]) -> None:
    """Raise SourceError if two columns have one name."""
    if len(set(columns)) < len(columns):
        raise SourceError(
            f"{name} names a column twice: {', '.join(columns)}. Give each its own name."
        )


def joined_column(name: str, columns: Iterable[str]) -> str:
    """Return a hint if the table has another delimiter, so that its columns are not separated."""
    for column in columns:
        for delimiter in "\t;|,: ":
            if delimiter in column and name in [part.strip() for part in column.split(delimiter)]:
                return (
                    f" The header has {delimiter!r} between its columns. Separate cells by commas, "
                    "by semicolons if the header has no comma, or by tabs in a .tsv file."
                )
    return ""


def check_same_columns(first: Sequence[str], file: str, columns: Sequence[str], other: str) -> None:
    missing = [name for name in first if name not in columns]
    more = [name for name in columns if name not in first]
    if missing or more:
        differing = f"has no column '{missing[0]}'" if missing else f"has a column '{more[0]}' more"
        raise SourceError(
            f"{other} {differing}, unlike {file}. Files of one table must have the same columns. "
            f"Convert each by itself, or write them again."
        )


def plain_list(cells: Iterable[Any], column: str, changes: Changes | None) -> list[Any]:
    counts = Counter[str]() if changes is None else changes.setdefault(column, Counter())
    return [_plain(cell, counts) for cell in cells]


def _plain(value: Any, changed: Counter[str]) -> Any:
    """Return a cell as the plain values that JSON knows, or bytes."""
    if value is None or (
        isinstance(value, (bool, int, str, bytes)) and type(value).__module__ == "builtins"
    ):
        return value
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return None if np.isnat(value) else str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        became = "NaN became null" if math.isnan(value) else f"{value} became the text '{value}'"
        changed[became] += 1
        return None if math.isnan(value) else str(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item, changed) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item, changed) for name, item in value.items()}
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    is_pandas = type(value).__module__.startswith("pandas.")
    if isinstance(value, _WRITTEN) or hasattr(value, "isoformat") or is_pandas:
        return str(value)
    raise UsageError(
        f"a cell of the table is {type(value).__name__}, which cannot be stored. Give text, "
        "numbers, bytes, lists or dicts."
    )
