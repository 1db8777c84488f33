"""Values of a label column, as its label stores them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from wdstrain.conversion.classes import RANGE, shown
from wdstrain.errors import SampleError, UsageError
from wdstrain.shards.kinds import FLAG_CLASSES, Classes, ColumnInfo

_LARGEST = 3.4028234663852886e38  # of a float32, the type of numbers in training
_SHOWN = 8  # notes about names with blanks

# No leading zeros: 00123 is a name. At most 15 digits: a float keeps those apart.
WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,14})")
NUMBER = re.compile(r"[+-]?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_ANY_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


@dataclass
class LabelCells:
    """The cells of a column that becomes a label. notes: lines about changed values, for people."""

    place: str
    name: str
    values: list[Any]
    bad: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def good(self) -> list[tuple[int, Any]]:
        """Return (row, value) of the cells that are not bad."""
        return [(row, value) for row, value in enumerate(self.values) if row not in self.bad]

    def refuse(self, row: int, why: str) -> None:
        """Mark the cell of a row as bad."""
        self.bad.setdefault(
            row, f"the label column '{self.name}' holds {shown(self.values[row])}, {why}"
        )

    def ask(self, holds: str, *kinds: str) -> UsageError:
        """Return the error for a column that may be of several kinds."""
        choices = " or ".join(f'label="{self.name}:{kind}"' for kind in kinds)
        return UsageError(
            f"{self.place}: the column '{self.name}' holds {holds}. State the kind: {choices}."
        )


def number_label(column: LabelCells, names: tuple[str, ...]) -> ColumnInfo:
    """Return a label of numbers; the values become int or float."""
    for row, value in column.good():
        number: Any = value
        if isinstance(value, str):
            text = value.strip()
            number = number_in(text)
            number = float(text) if number is None and _ANY_NUMBER.fullmatch(text) else number
        elif isinstance(value, bool):
            number = int(value)
        if not isinstance(number, (int, float)):
            column.refuse(row, "which is not a number")
        elif abs(number) > _LARGEST:
            column.refuse(row, "which is too large for a float32")
        else:
            column.values[row] = number
    return ColumnInfo(column.name, "number", "json", column.name)


def flag_label(column: LabelCells, names: tuple[str, ...]) -> ColumnInfo:
    """Return a label of true and false; the values become bool."""
    flags = Classes(FLAG_CLASSES, by_name=True)
    for row, value in column.good():
        try:
            text = value.strip().capitalize() if isinstance(value, str) else value
            column.values[row] = flags.number(text) == 1
        except SampleError:
            column.refuse(row, "which is not true or false")
    return ColumnInfo(column.name, "flag", "json", column.name, FLAG_CLASSES)


def class_label(column: LabelCells, names: tuple[str, ...]) -> ColumnInfo:
    """Return a label of classes; the values become names or class numbers.

    names: of the column's class numbers, as the table has them.
    """
    if names:
        for row, value in column.good():
            if isinstance(value, str) and value in names:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
                column.values[row] = names[value]
            else:
                column.refuse(
                    row,
                    "which means no label" if value == -1 else f"none of the {len(names)} classes",
                )
        return ColumnInfo(column.name, "class", "json", column.name, names)
    for row, value in column.good():
        if isinstance(value, (list, dict, bytes)):
            column.refuse(row, "which is not a class")
    _strip(column)
    good = column.good()
    numbers = [_whole_in(value) for _, value in good]
    if good and all(number is not None for number in numbers):
        whole = [number for number in numbers if number is not None]
        for (row, _), number in zip(good, whole, strict=True):
            column.values[row] = number
        distinct = sorted(set(whole))
        if distinct[0] >= 0 and distinct[-1] < max(RANGE, 2 * len(distinct)):
            distinct = list(range(distinct[-1] + 1))  # the numbers stay the class numbers
        return ColumnInfo(column.name, "class", "json", column.name, tuple(map(str, distinct)))
    return ColumnInfo(
        column.name, "class", "json", column.name, tuple(sorted({str(value) for _, value in good}))
    )


def _strip(column: LabelCells) -> None:
    """Remove the blanks around names, and note names that differ in them only."""
    spellings: dict[str, dict[str, None]] = {}
    for row, value in column.good():
        if isinstance(value, str):
            column.values[row] = value.strip()
            spellings.setdefault(value.strip(), {})[value] = None
    for several in [list(some) for some in spellings.values() if len(some) > 1][:_SHOWN]:
        column.notes.append(
            f"label {column.name}: {' and '.join(map(shown, several))} are one class: blanks "
            "around names are removed"
        )


def with_classes(column: LabelCells, label: ColumnInfo, classes: tuple[str, ...]) -> ColumnInfo:
    """Return the label with the given classes, whose names its values must be.

    If no value is a name, and all are numbers below the number of classes, they are class numbers.
    """
    used = {
        str(name)
        for _, value in column.good()
        for name in (value if isinstance(value, list) else [value])
    }
    known = set(classes)
    counts = known.isdisjoint(used) and all(
        WHOLE.fullmatch(name) and 0 <= int(name) < len(classes) for name in used
    )
    if counts:
        named = {str(number): name for number, name in enumerate(classes)}
        column.notes.append(
            f"label {label.name}: its numbers count the given classes: 0 is {shown(classes[0])}"
        )
    for row, value in column.good():
        several = value if isinstance(value, list) else [value]
        if counts:
            names: list[Any] = [named[str(name)] for name in several]
            column.values[row] = names if isinstance(value, list) else names[0]
        elif not known.issuperset(map(str, several)):
            column.refuse(row, f"none of the {len(classes)} given classes")
    return replace(label, classes=classes)


def multi_label(column: LabelCells, names: tuple[str, ...]) -> ColumnInfo:
    """Return a label of several classes at once; the values become lists.

    names: as in `class_label`.
    """
    members: dict[str, None] = {}
    for row, value in column.good():
        texts = value.split("|") if isinstance(value, str) else [value]
        parts = value if isinstance(value, list) else texts
        classes = [
            _member(part, names) for part in parts if not isinstance(part, str) or part.strip()
        ]
        if None in classes:
            column.refuse(row, "which is not a list of classes")
        else:
            column.values[row] = classes
            members.update(dict.fromkeys(map(str, classes)))
    order = sorted(members, key=int) if all(map(WHOLE.fullmatch, members)) else sorted(members)
    return ColumnInfo(column.name, "multi", "json", column.name, names or tuple(order))


def _member(value: Any, names: tuple[str, ...]) -> str | int | None:
    """Return a class of a list; None for a value that is not a class."""
    if isinstance(value, str):
        return value.strip() if not names or value.strip() in names else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if names:
        return names[value] if 0 <= value < len(names) else None
    return value


def number_in(text: str) -> int | float | None:
    """Return the number that a text is; None for other text, also for names such as 007."""
    if WHOLE.fullmatch(text):
        return int(text)
    number = float(text) if NUMBER.fullmatch(text) else math.inf
    return number if math.isfinite(number) else None


def _whole_in(value: Any) -> int | None:
    number = number_in(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number != int(number):
        return None
    return None if isinstance(value, str) and not isinstance(number, int) else int(number)
