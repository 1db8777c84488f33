"""Results that print as names and values. The names are those of their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from wdstrain.runtime.options import format_size

_MOST = 20  # items of a list that are printed
_LONG = 40  # characters of an item that gets a line of its own


class Size(int):
    """A number of bytes, which prints as short text."""

    def __str__(self) -> str:
        return format_size(self)


@dataclass(frozen=True, repr=False)
class Result:
    """Base of dataclasses that print all their fields, but those with repr=False and empty ones."""

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values as text."""
        return rows_of({f.name: getattr(self, f.name) for f in fields(self) if f.repr})

    def __str__(self) -> str:
        return "; ".join(" ".join(row) for row in self.rows())

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in self.rows())

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        return asdict(self)


def rows_of(named: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as text: a row for each part of a result, by its first field."""
    rows = list[tuple[str, str]]()
    for name, value in named.items():
        title = name.replace("_", " ")
        if isinstance(value, tuple) and value and isinstance(value[0], Result):
            rows += [(f"{title} {next(iter(vars(part).values()))}", str(part)) for part in value]
        elif value not in (None, "", (), {}, []):
            rows.append((title, text_of(value)))
    return rows


def text_of(value: object) -> str:
    """Return a value as text: numbers with five digits, the first 20 items of a list."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        value = [f"{name or 'none'} {text_of(item)}" for name, item in value.items()]
    if not isinstance(value, (list, tuple)):
        return str(value)
    texts = [text_of(item) for item in value[:_MOST]]
    more = [f"and {len(value) - _MOST} more"] * (len(value) > _MOST)
    return ("\n" if max(map(len, texts), default=0) > _LONG else ", ").join(texts + more)
