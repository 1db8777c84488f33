"""Results that print as names and values. The names are those of their JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

_MOST = 20  # items of a list that are printed
_LONG = 40  # characters of an item that gets a line of its own


class Result:
    """Base of dataclasses that print as names and values, and are JSON-able.

    findings: what is wrong. A verb prints them and ends with status 1. notes: sentences on the rest.
    """

    findings: Sequence[object] = ()
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values as text."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    def __repr__(self) -> str:
        lines = [f"{name}: {text}" for name, text in self.rows()]
        return "\n".join([*lines, *map(str, self.findings[:_MOST])])


def rows_of(named: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as text, without empty ones."""
    filled = {name: value for name, value in named.items() if value not in (None, "", (), {}, [])}
    return [(name.replace("_", " "), text_of(value)) for name, value in filled.items()]


def text_of(value: object) -> str:
    """Return a value as text: numbers with five digits, the first 20 items of a list.

    Items that are long or have parts get lines of their own.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        value = [f"{name or 'none'} {text_of(item)}" for name, item in value.items()]
    if not isinstance(value, (list, tuple)):
        return str(value)
    texts = [text_of(item) for item in value[:_MOST]]
    if len(value) > _MOST:
        texts.append(f"and {len(value) - _MOST} more")
    has_lines = any(len(text) > _LONG or "," in text or ": " in text for text in texts)
    return ("\n" if has_lines else ", ").join(texts)
