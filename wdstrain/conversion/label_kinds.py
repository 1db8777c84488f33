"""Kind of a label column: a class, a number, or several classes at once.

The user states it with `name:class`, `name:number` or `name:multi`. Otherwise the type of nearly
all cells decides: text, booleans and whole numbers from 0 to 999 are classes, other numbers are
numbers, lists are several classes. Cells that do not fit are bad and never change the kind. A
column that may be of two kinds is refused, and the error names both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wdstrain.conversion.classes import RANGE, look_alikes, shown
from wdstrain.conversion.label_values import (
    LabelCells,
    class_label,
    flag_label,
    multi_label,
    number_in,
    number_label,
    with_classes,
)
from wdstrain.errors import SourceError, UsageError
from wdstrain.shards.kinds import FLAG_CLASSES, ColumnInfo

KINDS = ("class", "number", "multi", "flag")
_FEW = 0.05  # cells of another type that do not make a column ambiguous

_SHOWN = 8  # classes that are named in messages

# Texts for a missing number. In a column of text they may be classes.
_MISSING = frozenset(("na", "n/a", "#n/a", "<na>", "null", "none", "nil", "?", "-", "--"))
_NO_NUMBER = frozenset(("nan", "inf", "infinity"))


@dataclass(frozen=True)
class Decision:
    """A label column as it is packed.

    values: one per row. bad: {row: why its cell cannot be used}. lines: the decision, for people.
    """

    label: ColumnInfo
    values: list[Any]
    bad: dict[int, str]
    lines: list[str]


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
    column = LabelCells(place, name, list(cells))
    for row, value in enumerate(column.values):
        if value is None or (isinstance(value, str) and not value.strip()):
            column.bad[row] = f"the label column '{name}' is empty"
        elif (
            isinstance(value, (str, float))
            and str(value).strip().lower().lstrip("+-") in _NO_NUMBER
        ):
            column.refuse(row, "which is no value")
    if len(column.bad) == len(column.values):
        raise SourceError(
            f"{place}: no row has a value in the label column '{name}'. Name another column."
        )
    kind = kind or ("class" if names and not _has_lists(column) else _guess(column))
    if kind == "flag" and classes and classes != FLAG_CLASSES:
        kind = "class"
    makers = {"class": class_label, "flag": flag_label, "number": number_label}
    label = makers.get(kind, multi_label)(column, names)
    if classes and kind != "number":
        label = with_classes(column, label, classes)
    if len(column.bad) == len(column.values):
        raise UsageError(
            f"{place}: no value fits {name}:{kind}: {next(iter(column.bad.values()))}. Name "
            "another column, or another kind."
        )
    return Decision(label, column.values, column.bad, [*_lines(label, column), *column.notes])


# --- the kind -------------------------------------------------------------------------------------


def _has_lists(column: LabelCells) -> bool:
    return any(isinstance(value, list) for _, value in column.good())


def _guess(column: LabelCells) -> str:
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
            f"{column.place}: the column '{column.name}' holds {holds}, which is neither a class "
            "nor a number. Leave it out of the labels: it is kept in the json field."
        )
    if len(types["list"]) > few:
        return _guess_lists(column, types["list"])
    for row in [*types["list"], *types["other"]]:
        column.refuse(row, "unlike the other rows")
    texts = len(types["text"]) + len(types["truth"])
    if types["number"] and texts <= few and len(types["number"]) > texts:
        for row in [*types["text"], *types["truth"], *missing]:
            column.refuse(
                row, f"which is not a number; {column.name}:class takes every value as a class"
            )
        return _guess_numbers(column, types["number"])
    if types["truth"] and len(types["text"]) + len(types["number"]) <= few and not missing:
        for row in [*types["text"], *types["number"]]:
            column.refuse(
                row, f"which is not true or false; {column.name}:class takes every value as a class"
            )
        for row in types["truth"]:
            column.values[row] = str(column.values[row]).strip().lower() == "true"
        return "flag"
    padded = sum(
        isinstance(value := column.values[row], str) and value.strip().isdigit()
        for row in types["text"]
    )
    # 007 is a name, so numbers beside such names are names too.
    if len(types["number"]) > few and padded <= few:
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
        if number_in(text) is not None:
            return "number"
        return "truth" if text.lower() in ("true", "false") else "text"
    return "list" if isinstance(value, list) else "other"


def _guess_numbers(column: LabelCells, rows: list[int]) -> str:
    """Return whether numbers are classes or quantities. Text that is a number becomes one."""
    for row in rows:
        if isinstance(column.values[row], str):
            column.values[row] = number_in(column.values[row].strip())
    values = [column.values[row] for row in rows]
    whole = [value for value in values if isinstance(value, int)]
    fractions = len(values) - len(whole)
    if fractions:
        if all(value == int(value) and 0 <= value < RANGE for value in values) and len(rows) < len(
            column.values
        ):
            raise column.ask(
                "whole numbers as floats beside empty cells, which may have been class numbers",
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
            "-1 and whole numbers from "
            f"{min(v for v in whole if v >= 0) if max(whole) >= 0 else -1}",
            *KINDS[:2],
        )
    if negative - {-1}:
        return "number"
    if max(whole) >= RANGE:
        holds = (
            f"{len(set(whole))} different whole numbers up to {max(whole)}, which may be classes "
            "or numbers"
        )
        raise column.ask(holds, "class", "number")
    for row in rows:
        if column.values[row] == -1:  # Hugging Face data sets: no label
            column.refuse(
                row,
                f"which means no label; {column.name}:class makes it a class, {column.name}:number "
                f"a number",
            )
    return "class"


def _guess_lists(column: LabelCells, rows: list[int]) -> str:
    members = [member for row in rows for member in column.values[row]]
    wrong = [
        value for value in members if isinstance(value, bool) or not isinstance(value, (str, int))
    ]
    if len(wrong) > max(1, int(_FEW * len(members))):
        raise UsageError(
            f"{column.place}: the column '{column.name}' holds lists of {shown(wrong[0])} and the "
            "like, but a list of classes must hold names or class numbers. Leave it out of the "
            "labels: it is kept in the json field."
        )
    lengths = {len(column.values[row]) for row in rows}
    if (
        len(rows) > 1
        and len(lengths) == 1
        and min(lengths) > 1
        and not any(isinstance(member, str) for member in members)
    ):
        raise column.ask(
            f"lists of {min(lengths)} numbers each, which may be vectors rather than classes",
            "multi",
        )
    for row, value in column.good():
        column.values[row] = value if isinstance(value, list) else [value]
    return "multi"


# --- lines for people -----------------------------------------------------------------------------


def _lines(label: ColumnInfo, column: LabelCells) -> list[str]:
    """Return lines about the decision and the number of values that fit."""
    good = [value for _, value in column.good()]
    counts = f"{len(good)} of {len(column.values)} values fit"
    if label.kind == "number":
        return [f"label {label.name}: a number from {min(good):g} to {max(good):g}, {counts}"]
    lists = (value if isinstance(value, list) else [value] for value in good)
    used = len({str(member) for members in lists for member in members})
    some = ", ".join(name[:40] for name in label.classes[:_SHOWN])
    some += ", ..." if len(label.classes) > _SHOWN else ""
    several_of = "several of " if label.kind == "multi" else ""
    several = "class" if len(label.classes) == 1 else "classes"
    seen = f", {used} of them in this table" if used < len(label.classes) else ""
    lines = [
        f"label {label.name}: {several_of}{len(label.classes)} {several} ({some}){seen}, {counts}"
    ]
    lines += [
        f"label {label.name}: the classes {names} look alike"
        for names in look_alikes(label.classes)
    ]
    barred = Counter("|" in name for name in label.classes)[True]
    if label.kind == "class" and barred:
        lines.append(
            f"label {label.name}: {barred} classes hold '|'; {label.name}:multi takes a|b as two "
            "classes"
        )
    return lines
