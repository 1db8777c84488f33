"""The kind of a label column, decided from all its cells: classes, a number, or several classes at once.

The user names it with `name:class`, `name:number` or `name:multi`. Otherwise the type of nearly all
cells decides: text and booleans are classes, whole numbers from 0 to 999 are classes, other numbers
are numbers, lists are several classes. Cells that do not fit are bad and never change the kind. A
column that can mean two things is refused, with both spellings to choose from.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wdstrain.conversion.classes import RANGE, look_alikes, shown
from wdstrain.errors import SourceError, UsageError
from wdstrain.shards.label import Label

KINDS = ("class", "number", "multi")
_FEW = 0.05  # cells of another type that do not make a column ambiguous

_LARGEST = 3.4028234663852886e38  # of a float32, which training reads a number as
_SHOWN = 8  # classes that are named

# no leading zeros: 00123 is a name; and no more digits than a float keeps apart
WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,14})")
NUMBER = re.compile(r"[+-]?((0|[1-9]\d{0,14})(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_ANY_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")

# what tables write where a number is missing; as text among text these may be classes
_MISSING = frozenset(("na", "n/a", "#n/a", "<na>", "null", "none", "nil", "?", "-", "--"))
_NO_NUMBER = frozenset(("nan", "inf", "infinity"))


@dataclass(frozen=True)
class Decision:
    """A label column as it is packed.

    values: one per row. bad: {row: why its cell cannot be used}. lines: what was decided, for people.
    """

    label: Label
    values: list[Any]
    bad: dict[int, str]
    lines: list[str]


@dataclass
class _Cells:
    """The cells of a column that becomes a label. notes: lines about what was changed."""

    place: str
    name: str
    values: list[Any]
    bad: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def good(self) -> list[tuple[int, Any]]:
        return [(row, value) for row, value in enumerate(self.values) if row not in self.bad]

    def refuse(self, row: int, why: str) -> None:
        self.bad.setdefault(
            row, f"the label column '{self.name}' holds {shown(self.values[row])}, {why}"
        )

    def ask(self, holds: str, *kinds: str) -> UsageError:
        choices = " or ".join(f'label="{self.name}:{kind}"' for kind in kinds)
        return UsageError(
            f"{self.place}: the column '{self.name}' holds {holds}. State the kind: {choices}."
        )


def decide(
    place: str,
    name: str,
    kind: str | None,
    cells: Sequence[Any],
    names: tuple[str, ...] = (),
    classes: tuple[str, ...] = (),
) -> Decision:
    """Return the label of a column of plain values.

    kind: as the user named it. names: of the column's class numbers, as the table has them.
    classes: those that the label must have, in the order of their numbers. Raises UsageError for a
    column that may be of two kinds or is of none, SourceError for a column without a value.
    """
    column = _Cells(place, name, list(cells))
    for row, value in enumerate(column.values):
        if value is None or (isinstance(value, str) and not value.strip()):
            column.bad[row] = f"the label column '{name}' is empty"
        elif (
            isinstance(value, (str, float))
            and str(value).strip().lower().lstrip("+-") in _NO_NUMBER
        ):
            column.refuse(row, "which is no value")
    if len(column.bad) == len(column.values):
        raise SourceError(f"{place}: no row has a value in the label column '{name}'.")
    kind = kind or ("class" if names and not _has_lists(column) else _guess(column))
    label = {"class": _classes, "number": _number, "multi": _multi}[kind](column, names)
    if classes and kind != "number":
        label = _with_classes(column, label, classes)
    if len(column.bad) == len(column.values):
        raise UsageError(
            f"{place}: no value fits {name}:{kind}: {next(iter(column.bad.values()))}. Name another column, or another kind."
        )
    return Decision(label, column.values, column.bad, [*_lines(label, column), *column.notes])


# --- the kind --------------------------------------------------------------------------------------------------------


def _has_lists(column: _Cells) -> bool:
    return any(isinstance(value, list) for _, value in column.good())


def _guess(column: _Cells) -> str:
    """Return the kind of nearly all cells. Cells that do not fit become bad."""
    types: dict[str, list[int]] = {"list": [], "number": [], "truth": [], "text": [], "other": []}
    missing = []
    for row, value in column.good():
        if isinstance(value, str) and value.strip().lower() in _MISSING:
            missing.append(row)
        else:
            types[_type(value)].append(row)
    total = sum(map(len, types.values()))
    few = max(1 if total > 2 else 0, int(_FEW * total))
    if len(types["other"]) > few:
        holds = shown(column.values[types["other"][0]])
        raise UsageError(
            f"{column.place}: the column '{column.name}' holds {holds}, which is no class and no number. "
            f"Leave it out of the labels: it is kept beside the image."
        )
    if len(types["list"]) > few:
        return _guess_lists(column, types["list"])
    for row in [*types["list"], *types["other"]]:
        column.refuse(row, "unlike the other rows")
    texts = len(types["text"]) + len(types["truth"])
    if types["number"] and texts <= few and len(types["number"]) > texts:
        for row in [*types["text"], *types["truth"], *missing]:
            column.refuse(
                row, f"which is no number; {column.name}:class takes every value as a class"
            )
        return _guess_numbers(column, types["number"])
    if types["truth"] and len(types["text"]) + len(types["number"]) <= few and not missing:
        for row in [*types["text"], *types["number"]]:
            column.refuse(
                row, f"which is not true or false; {column.name}:class takes every value as a class"
            )
        for row in types["truth"]:
            column.values[row] = str(column.values[row]).strip().lower() == "true"
        return "class"
    padded = sum(
        isinstance(value := column.values[row], str) and value.strip().isdigit()
        for row in types["text"]
    )
    if (
        len(types["number"]) > few and padded <= few
    ):  # 007 is a name, and what stands beside it is one too
        texts_in = next(column.values[row] for row in [*types["text"], *types["truth"]])
        raise column.ask(
            f"{len(types['number'])} numbers and {texts} texts, such as {shown(texts_in)}",
            "class",
            "number",
        )
    return "class"


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        text = value.strip()
        if _number_in(text) is not None:
            return "number"
        return "truth" if text.lower() in ("true", "false") else "text"
    return "list" if isinstance(value, list) else "other"


def _guess_numbers(column: _Cells, rows: list[int]) -> str:
    """Return whether numbers are classes or quantities. Text that is a number becomes one."""
    for row in rows:
        if isinstance(column.values[row], str):
            column.values[row] = _number_in(column.values[row].strip())
    values = [column.values[row] for row in rows]
    whole = [value for value in values if isinstance(value, int)]
    fractions = len(values) - len(whole)
    if fractions:
        if all(value == int(value) and 0 <= value < RANGE for value in values) and len(rows) < len(
            column.values
        ):
            raise column.ask(
                "whole numbers as floats beside empty cells, as class numbers become in some programs",
                *KINDS[:2],
            )
        if fractions <= _FEW * len(values) and all(0 <= value < RANGE for value in whole):
            odd = next(value for value in values if isinstance(value, float))
            raise column.ask(
                f"{len(whole)} whole numbers and {fractions} others, such as {odd!r}",
                "class",
                "number",
            )
        return "number"
    negative = {value for value in whole if value < 0}
    if negative == {-1} and 0 not in whole:
        raise column.ask(
            f"-1 and whole numbers from {min(v for v in whole if v >= 0) if max(whole) >= 0 else -1}",
            *KINDS[:2],
        )
    if negative - {-1}:
        return "number"
    if max(whole) >= RANGE:
        holds = f"{len(set(whole))} different whole numbers up to {max(whole)}, which may be classes or a quantity"
        raise column.ask(holds, "class", "number")
    for row in rows:
        if column.values[row] == -1:  # as Hugging Face data sets say that there is none
            column.refuse(
                row,
                f"which means that there is no label; {column.name}:class makes it a class, {column.name}:number a number",
            )
    return "class"


def _guess_lists(column: _Cells, rows: list[int]) -> str:
    members = [one for row in rows for one in column.values[row]]
    wrong = [one for one in members if isinstance(one, bool) or not isinstance(one, (str, int))]
    if len(wrong) > max(1, int(_FEW * len(members))):
        raise UsageError(
            f"{column.place}: the column '{column.name}' holds lists of {shown(wrong[0])} and the like, and a list of "
            f"classes holds names or class numbers. Leave it out of the labels: it is kept beside the image."
        )
    lengths = {len(column.values[row]) for row in rows}
    if (
        len(rows) > 1
        and len(lengths) == 1
        and min(lengths) > 1
        and not any(isinstance(one, str) for one in members)
    ):
        raise column.ask(
            f"lists of {min(lengths)} numbers each, which may be vectors rather than classes",
            "multi",
        )
    for row, value in column.good():
        column.values[row] = value if isinstance(value, list) else [value]
    return "multi"


# --- the label -------------------------------------------------------------------------------------------------------


def _number(column: _Cells, names: tuple[str, ...]) -> Label:
    for row, value in column.good():
        found: Any = value
        if isinstance(value, str):
            text = value.strip()
            found = _number_in(text)
            found = float(text) if found is None and _ANY_NUMBER.fullmatch(text) else found
        elif isinstance(value, bool):
            found = int(value)
        if not isinstance(found, (int, float)):
            column.refuse(row, "which is no number")
        elif abs(found) > _LARGEST:
            column.refuse(row, "which is more than a float32 holds")
        else:
            column.values[row] = found
    return Label(column.name, "number", "json", column.name)


def _classes(column: _Cells, names: tuple[str, ...]) -> Label:
    if names:
        for row, value in column.good():
            if isinstance(value, str) and value in names:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
                column.values[row] = names[value]
            else:
                column.refuse(
                    row,
                    "which means that there is no label"
                    if value == -1
                    else f"none of the {len(names)} classes",
                )
        return Label(column.name, "class", "json", column.name, names)
    for row, value in column.good():
        if isinstance(value, (list, dict, bytes)):
            column.refuse(row, "which is no class")
    _strip(column)
    good = column.good()
    numbers = [_whole_in(value) for _, value in good]
    if good and all(number is not None for number in numbers):
        whole = [number for number in numbers if number is not None]
        for (row, _), number in zip(good, whole, strict=True):
            column.values[row] = number
        distinct = sorted(set(whole))
        if distinct[0] >= 0 and distinct[-1] < max(RANGE, 2 * len(distinct)):
            distinct = list(range(distinct[-1] + 1))  # numbers are kept as they are
        return Label(column.name, "class", "json", column.name, tuple(map(str, distinct)))
    return Label(
        column.name, "class", "json", column.name, tuple(sorted({str(value) for _, value in good}))
    )


def _strip(column: _Cells) -> None:
    """Remove the blanks around names, and note names that differ in them only."""
    spellings: dict[str, dict[str, None]] = {}
    for row, value in column.good():
        if isinstance(value, str):
            column.values[row] = value.strip()
            spellings.setdefault(value.strip(), {})[value] = None
    for several in [list(some) for some in spellings.values() if len(some) > 1][:_SHOWN]:
        column.notes.append(
            f"label {column.name}: {' and '.join(map(shown, several))} are one class: blanks around names are removed"
        )


def _with_classes(column: _Cells, label: Label, classes: tuple[str, ...]) -> Label:
    """Return the label with the given classes.

    Its values are names of them. If none of them is and all are numbers below the number of classes,
    they count the classes from 0.
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


def _multi(column: _Cells, names: tuple[str, ...]) -> Label:
    members: dict[str, None] = {}
    for row, value in column.good():
        parts = (
            value
            if isinstance(value, list)
            else value.split("|")
            if isinstance(value, str)
            else [value]
        )
        found = [
            _member(one, names) for one in parts if not (isinstance(one, str) and not one.strip())
        ]
        if None in found:
            column.refuse(row, "which is no list of classes")
        else:
            column.values[row] = found
            members.update(dict.fromkeys(map(str, found)))
    order = sorted(members, key=int) if all(map(WHOLE.fullmatch, members)) else sorted(members)
    return Label(column.name, "multi", "json", column.name, names or tuple(order))


def _member(value: Any, names: tuple[str, ...]) -> str | int | None:
    """Return a class of a list; None for a value that is not a class."""
    if isinstance(value, str):
        return value.strip() if not names or value.strip() in names else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if names:
        return names[value] if 0 <= value < len(names) else None
    return value


# --- lines for people -----------------------------------------------------------------------------------------------------------


def _lines(label: Label, column: _Cells) -> list[str]:
    """Return what was decided and how many values fit."""
    good = [value for _, value in column.good()]
    counts = f"{len(good)} of {len(column.values)} values fit"
    if label.kind == "number":
        return [f"label {label.name}: a number from {min(good):g} to {max(good):g}, {counts}"]
    used = len(
        {
            one
            for value in good
            for one in (map(str, value) if isinstance(value, list) else (str(value),))
        }
    )
    some = ", ".join(one[:40] for one in label.classes[:_SHOWN]) + (
        ", ..." if len(label.classes) > _SHOWN else ""
    )
    what = "several of " if label.kind == "multi" else ""
    several = "class" if len(label.classes) == 1 else "classes"
    seen = f", {used} of them in this table" if used < len(label.classes) else ""
    lines = [f"label {label.name}: {what}{len(label.classes)} {several} ({some}){seen}, {counts}"]
    lines += [
        f"label {label.name}: the classes {names} look alike"
        for names in look_alikes(label.classes)
    ]
    barred = Counter("|" in name for name in label.classes)[True]
    if label.kind == "class" and barred:
        lines.append(
            f"label {label.name}: {barred} classes hold '|'; {label.name}:multi takes a|b as two classes"
        )
    return lines


def _number_in(text: str) -> int | float | None:
    """Return the number that a text is; None for other text, also for names such as 007."""
    if WHOLE.fullmatch(text):
        return int(text)
    found = float(text) if NUMBER.fullmatch(text) else math.inf
    return found if math.isfinite(found) else None


def _whole_in(value: Any) -> int | None:
    found = _number_in(value) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, (int, float)) or found != int(found):
        return None
    return None if isinstance(value, str) and not isinstance(found, int) else int(found)
