"""Kinds of labels and columns: one row says everything that differs between them.

A column of the index holds one value per sample, made from a field of the samples (`cls`) or from an
entry of a JSON field (`json`, entry `kind`). Conversion, index, conditions, fields of a batch, `info`
and `verify` ask `KINDS` instead of testing names.

kind      Arrow type                     made from
class     dictionary<int32, string>      names or numbers of classes; codes are class numbers
flag      bool                           true and false; as a label the classes False and True
integer   int64                          whole numbers
number    float64                        numbers
multi     list<string>                   lists of names
text      string                         texts of at most 256 characters
mask      no column                      images of class numbers
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

Place = tuple[str, str | None]  # (field, entry of its JSON document or None)

NOT_A_COLUMN = "other"  # kind of an entry with values that no column can hold
LONGEST_TEXT = 256  # characters; longer texts stay in their field
FLAG_CLASSES = ("False", "True")  # of a label of true and false
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True)
class ColumnInfo:
    """One column or label: its name, its kind, and where its values are stored.

    field: of the samples. entry: of its JSON document, or None. classes: names in the order of their
    numbers. is_label: a training target. A label may lack a column, as a mask does.
    """

    name: str
    kind: str
    field: str
    entry: str | None = None
    classes: tuple[str, ...] = ()
    is_label: bool = True

    @property
    def place(self) -> Place:
        """(field, entry) of its value."""
        return self.field, self.entry

    @property
    def stored_as(self) -> str:
        """Where its value is stored, as conditions and `index --columns` name it: `json.kind`."""
        return self.field if self.entry is None else f"{self.field}.{self.entry}"

    @property
    def is_class(self) -> bool:
        """Whether its value is one of the classes, as true and false are."""
        return KINDS[self.kind].is_class

    @property
    def task(self) -> str:
        """The kind of what a model learns: "class" also for true and false."""
        return "class" if self.is_class else self.kind

    @property
    def has_names(self) -> bool:
        """Whether the classes have names other than their numbers."""
        return self.classes != tuple(map(str, range(len(self.classes))))

    @property
    def summary(self) -> str:
        """The kind of its values and the first classes, for people."""
        if not self.classes:
            return KINDS[self.kind].described
        names = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
        some_of = "any of " if self.kind == "multi" else ""
        return f"{some_of}{len(self.classes)} class{'es' * (len(self.classes) != 1)}: {names}"

    @property
    def numbering(self) -> str:
        """The first classes with their numbers, for error messages."""
        if not self.classes:
            return f"{KINDS[self.kind].described}, no classes"
        if not self.has_names:
            return f"{len(self.classes)} classes without names"
        shown = ", ".join(f"{number} {name}" for number, name in enumerate(self.classes[:6]))
        return shown + (f", ... ({len(self.classes)} classes)" if len(self.classes) > 6 else "")

    @property
    def row(self) -> dict[str, Any]:
        """A label as index.json and checkpoints list it."""
        row = {"name": self.name, "kind": self.kind, "field": self.field, "column": self.entry}
        return {**row, "classes": list(self.classes)}

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> ColumnInfo:
        """Return the label in such a row. Raises LookupError or TypeError for another form."""
        if set(row) != {"name", "kind", "field", "column", "classes"}:
            raise ValueError(f"its label has the entries {', '.join(map(str, row))}")
        return cls(
            row["name"], row["kind"], row["field"], row["column"], tuple(map(_word, row["classes"]))
        )


@dataclass(frozen=True)
class Kind:
    """What differs between the kinds of labels and columns.

    described: for people. arrow: type of its column; None: it has none. dtype: in a batch; "": as
    the field says, or a list. is_class: a sample has one of `classes`. can_be_label: an index may
    declare it. reader: of a label, the function from a value in the shards to a class number or a
    number, which raises ValueError for other values; None: only columns of this kind fit.
    """

    described: str
    arrow: pa.DataType | None
    dtype: str = ""
    is_class: bool = False
    can_be_label: bool = False
    reader: Callable[[ColumnInfo], Callable[[Any], float]] | None = None


def kind_of(arrow: pa.DataType) -> str:
    """Return the kind of a column by which values of an Arrow type are compared."""
    types = pa.types
    if types.is_integer(arrow) or types.is_floating(arrow):
        return "number"
    tests = {"flag": types.is_boolean, "class": types.is_dictionary, "multi": types.is_list}
    tests |= {"null": types.is_null}
    return next((kind for kind, holds in tests.items() if holds(arrow)), "text")


def json_place(name: str) -> Place:
    """Return (field, entry) of `json.kind` or `meta.json.kind`; (name, None) of other names."""
    parts = name.split(".")
    at = parts.index("json", 0, -1) + 1 if "json" in parts[:-1] else len(parts)
    return ".".join(parts[:at]), ".".join(parts[at:]) or None


class Classes:
    """Numbers of classes by the values that stand for them: names, or numbers."""

    def __init__(self, names: Sequence[str], *, by_name: bool) -> None:
        """by_name: a text that is a name and a number is the name, as in the values of a table."""
        self._by_name, self._count = by_name, len(names)
        self._numbers = {name: number for number, name in reversed(list(enumerate(names)))}

    def number(self, value: Any) -> int:
        """Return the number of a class. Raises ValueError for a value that is none."""
        named = self._numbers.get(spelled(value)) if isinstance(value, _SCALARS) else None
        if named is None and isinstance(value, bool):  # True is 1, also where that is a name
            named = self._numbers.get(str(int(value)))
        number = _whole(value)
        is_number = number is not None and 0 <= number < (self._count or math.inf)
        if named is not None and (self._by_name or not is_number):
            return named
        if number is None:
            known = f" and none of the {self._count} classes" if self._count else ""
            raise ValueError(f"{str(value)[:80]!r} is not a whole number{known}")
        if is_number:
            return number
        raise ValueError(
            f"{number} is not a class: they are 0 to {self._count - 1 if self._count else 'n'}"
        )


def number_of(value: Any) -> float:
    """Return a number, or a text that is one. Raises ValueError for other values."""
    try:
        # Python reads 1_0 as 10, and refuses a lone _.
        number = float("_" if isinstance(value, str) and "_" in value else value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{str(value)[:80]!r} is not a number") from None
    if math.isinf(number) and isinstance(value, str) and "inf" not in value.lower():
        raise ValueError(f"{value[:80]} is more than a float32 holds")
    return number


def spelled(value: Any) -> Any:
    """Return a value as text, None as None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return json.dumps(value)
    return str(value)  # nan and inf as a conversion writes them into JSON


def _whole(value: Any) -> int | None:
    """Return a whole number, or a text that is one; None for other values."""
    if isinstance(value, str) and "_" in value:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(value, float) and number != value else number


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be a string")
    return value


def _reader_of_classes(info: ColumnInfo) -> Callable[[Any], int]:
    return Classes(info.classes, by_name=info.entry is not None or info.kind == "flag").number


_CLASSES = pa.dictionary(pa.int32(), pa.string())
KINDS = {
    "class": Kind("a class", _CLASSES, "int64", True, True, _reader_of_classes),
    "flag": Kind("true or false", pa.bool_(), "int64", True, True, _reader_of_classes),
    "integer": Kind("a number", pa.int64()),
    "number": Kind("a number", pa.float64(), "", False, True, lambda info: number_of),
    "multi": Kind("a list", pa.list_(pa.string()), "float32", False, True),
    "text": Kind("a text", pa.string()),
    "mask": Kind("masks", None, "int64"),
    NOT_A_COLUMN: Kind("of several types", pa.null()),
}
