"""Labels and numbers: the bytes of a label field to a class number, flags or a float.

Sets of shards may number their classes differently. They are joined by class name: the numbers of
each set are translated to the numbers of the joined label.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from wdstrain.decode.fields import Example, Field, field_names
from wdstrain.decode.transforms import Draws
from wdstrain.errors import SampleError, UsageError
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Ints
from wdstrain.shards.values import Array, scalar

# the labels of one set that differ from those of other sets: ((field, column), label) each
OwnLabels = tuple[tuple[tuple[str, str | None], ColumnInfo | None], ...]
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Label:
    """Field that reads a class number.

    column: entry of a JSON field. classes: names, in the order of their numbers in the shards.
    numbers: the delivered number of each class; empty: its position in `classes`.
    parts: for joined sets that number their classes differently, (id of the first sample, field
    that reads the set) each; `classes` are then the delivered ones. by_name: a text that is the
    name of a class means that class, even if it could be the number of another.
    """

    names: tuple[str, ...]
    column: str | None
    classes: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    parts: tuple[tuple[int, Label], ...] = ()
    by_name: bool = False

    @property
    def example(self) -> Example:
        """Shape and dtype of a row."""
        return Example((), "int64")

    def readers(self, ids: Ints) -> list[Label]:
        """Return the field that reads the label of each sample."""
        if not self.parts:
            return [self] * len(ids)
        firsts = np.array([first for first, _ in self.parts], np.int64)
        sets = np.searchsorted(firsts, ids, side="right") - 1
        return [self.parts[number][1] for number in sets.tolist()]

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> None:
        """Write the class number to `out`. Raises SampleError for any other value."""
        assert out is not None
        number = self._number(data)
        out[()] = self.numbers[number] if self.numbers else number

    @property
    def is_ambiguous(self) -> bool:
        """Whether a text can be the name of a class and the number of another class."""
        return self.column is None and any(
            name.isdecimal() and int(name) != position and int(name) < len(self.classes)
            for position, name in enumerate(self.classes)
        )

    def _number(self, data: memoryview) -> int:
        """Return the number of the class in the shards."""
        if self.by_name:
            number = self._positions.get(str(scalar(data, self.column)))
            if number is not None:
                return number
        if (
            self.column is None
            and (digits := bytes(data)).isdigit()
            and (not self.classes or int(digits) < len(self.classes))
        ):
            return int(digits)  # the usual case
        value = scalar(data, self.column)
        # A field without columns holds the class number, even if classes have numbers for names. An
        # entry of a JSON field holds the value of a table, so there the name comes first.
        is_number = isinstance(value, int) or (
            isinstance(value, str) and value.isdecimal() and int(value) < len(self.classes)
        )
        if self.column is not None or not is_number:
            number = self._positions.get(str(value))
            if number is not None:
                return number
        return _whole(value, self.classes)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return _positions(self.classes)


@dataclass(frozen=True)
class Labels:
    """Field that reads a list of classes as flags. column: entry of a JSON field."""

    names: tuple[str, ...]
    column: str | None
    classes: tuple[str, ...]

    @property
    def example(self) -> Example:
        """Shape and dtype of a row."""
        return Example((len(self.classes),), "float32")

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> None:
        """Write 1 for each class of the list and 0 for the others. Raises SampleError."""
        value = scalar(data, self.column)
        if not isinstance(value, list):
            raise SampleError(f"{str(value)[:80]!r} is not a list of classes")
        assert out is not None
        out[()] = 0
        for name in value:
            position = self._positions.get(str(name))
            if position is None:
                raise SampleError(f"{str(name)[:80]!r} is none of the {len(self.classes)} classes")
            out[position] = 1

    @cached_property
    def _positions(self) -> dict[str, int]:
        return _positions(self.classes)


def _positions(classes: tuple[str, ...]) -> dict[str, int]:
    """Return the position of each class by name; the first position if a name occurs twice."""
    return {name: number for number, name in reversed(list(enumerate(classes)))}


@dataclass(frozen=True)
class Number:
    """Field that reads a number.

    column: entry of a JSON field. is_finite: an infinite or NaN value makes a sample bad.
    """

    names: tuple[str, ...]
    column: str | None
    is_finite: bool = False
    dtype: str = "float32"

    @property
    def example(self) -> Example:
        """Shape and dtype of a row."""
        return Example((), self.dtype)

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> None:
        """Write the number to `out`. Raises SampleError for a value that float32 cannot hold."""
        value = scalar(data, self.column)
        assert out is not None
        try:
            number = float(_without_underscores(value))
        except (TypeError, ValueError, OverflowError):
            raise SampleError(f"{str(value)[:80]!r} is not a number") from None
        if self.is_finite and not math.isfinite(number):
            raise SampleError(f"{str(value)[:80]!r} is not finite, so no model can learn it")
        if _LARGEST < abs(number) < math.inf or (
            math.isinf(number) and not _is_infinity(data, self.column)
        ):
            raise SampleError(f"{str(value)[:80]} is more than a float32 holds")
        out[()] = number


def label(
    names: str = "cls",
    *,
    column: str | None = None,
    classes: tuple[str, ...] | list[str] = (),
    multi: bool = False,
) -> Label | Labels:
    """Return a field that reads a class number as an int64 tensor [b].

    A text that is one of `classes` counts as its position there. If the index of the shards knows
    the label, a number counts as the number of its class.

    classes: default: the classes that the index names, of all sets together. If the index names
    classes too, each class counts by its name, whatever its number in the shards.
    column: entry of a JSON field. multi: read a list of classes, as a float32 tensor [b, classes]
    of ones and zeros.
    """
    if multi and column is None:
        raise UsageError(
            "multi=True reads a list from a JSON field. Give column=, the name of its entry."
        )
    return (Labels if multi else Label)(field_names(names), column, tuple(classes))


def with_classes(field: Field, index: Index | None) -> Field:
    """Return a label with a single numbering of classes for all samples of an index.

    Any other field is returned unchanged. A label without classes gets those of the index. A class
    that the index names is looked up by name in the classes of the field, whatever its number in
    the shards. Raises UsageError if the sets of the index cannot be joined in this way, and for
    a label of several classes whose names are not known.
    """
    if not isinstance(field, (Label, Labels)):
        return field
    if index is None and isinstance(field, Label) and field.is_ambiguous:
        raise UsageError(
            f"classes={list(field.classes)[:10]}: a text may be the name of one class and the number "
            f"of another. Use wt.label() without classes, which delivers the number, or wt.Loader, "
            f"which knows the index."
        )
    own = (
        [_label_of(field, labels) for labels in (index.shard_labels or (index.labels,))]
        if index is not None
        else []
    )
    if index is not None and not field.classes:
        joined = _label_of(field, index.labels)
        if joined is None and any(own):
            why = next(
                filter(None, (index.disagreement(name, field.column) for name in field.names)), ""
            )
            raise UsageError(
                f"{why}. Pack them together, or give wt.label(classes=[...]) with all names and "
                f"numbers that count."
            )
        field = replace(field, classes=joined.classes) if joined is not None else field
    if isinstance(field, Labels):
        if not field.classes:
            raise UsageError(
                f"the index names no classes for {field.names[0]}, column {field.column!r}. "
                f"Give classes=[...]."
            )
        return field
    if not any(own):
        return _unknown(field)
    read = [_numbered(field, label, is_alone=len(set(own)) == 1) for label in own]
    if all(part == field for part in read):
        return field
    firsts = index.first.tolist() if index is not None and index.shard_labels else [0]
    return replace(field, parts=tuple(zip(firsts, read, strict=False)))


def _numbered(field: Label, label: ColumnInfo | None, *, is_alone: bool) -> Label:
    """Return the field that reads a label from shards whose index has it as `label`.

    is_alone: no other shards number their classes differently.
    """
    if label is None:
        return _unknown(field)
    if not label.has_names or label.classes == field.classes:
        return field
    numbers = {name: number for number, name in enumerate(field.classes)}
    missing = [name for name in label.classes if name not in numbers]
    if is_alone and len(missing) == len(label.classes):  # new names for the same numbers
        return field
    if missing:
        raise UsageError(
            f"classes={list(field.classes)[:10]} lacks {missing[0]!r}, which the index of these "
            f"shards names: {label.numbering}. Name all of its classes, in any order."
        )
    return replace(
        field, classes=label.classes, numbers=tuple(numbers[name] for name in label.classes)
    )


def differing_labels(index: Index) -> list[OwnLabels]:
    """Return for each shard its labels that differ between joined sets; [] if none differ."""
    own = [{label.place: label for label in labels} for labels in index.shard_labels]
    places = [
        place
        for place in dict.fromkeys(place for labels in own for place in labels)
        if len({labels.get(place) for labels in own}) > 1
    ]
    if not places:
        return []
    return [tuple((place, labels.get(place)) for place in places) for labels in own]


@lru_cache(maxsize=256)
def label_of_set(field: Label, labels: OwnLabels) -> Label:
    """Return the field that reads a label from samples of a set with these labels.

    Raises UsageError if the field needs classes for that and has none.
    """
    for (name, column), label in labels:
        if name in field.names and column == field.column:
            if not field.classes:
                raise UsageError(
                    f"{name} has different labels in the joined sets "
                    f"({label.numbering if label else 'no label'} in this one). "
                    f"Give wt.label(classes=[...]) with all names, in the order of their numbers."
                )
            return _numbered(field, label, is_alone=False)
    return field


def _unknown(field: Label) -> Label:
    """Return the field that reads a label whose texts may be names or numbers: no index says."""
    return replace(field, by_name=True) if field.is_ambiguous else field


def _label_of(field: Label | Labels, labels: Sequence[ColumnInfo]) -> ColumnInfo | None:
    """Return the label among these that a field reads, if any."""
    for label in labels:
        if (
            label.field in field.names
            and label.entry == field.column
            and (label.kind == "multi") == isinstance(field, Labels)
        ):
            return label
    return None


def field_of(label: ColumnInfo) -> Label | Labels | Number:
    """Return the field that reads a label of an index."""
    if label.kind == "number":
        return Number((label.field,), label.entry)
    return (Labels if label.kind == "multi" else Label)((label.field,), label.entry, label.classes)


def reader_of(label: ColumnInfo) -> str:
    """Return the call that makes the field of a label, as a user types it."""
    where = f'"{label.field}"' + (f', column="{label.entry}"' if label.entry is not None else "")
    if label.kind == "number":
        return f"wt.number({where})"
    return (
        "wt.label()"
        if where == '"cls"'
        else f"wt.label({where}{', multi=True' if label.kind == 'multi' else ''})"
    )


def number(names: str, *, column: str | None = None) -> Number:
    """Return a field that reads a number as a float32 tensor [b]. column: entry of a JSON field."""
    return Number(field_names(names), column)


def _is_infinity(data: memoryview, column: str | None) -> bool:
    """Return whether an infinite value is written so, and not as a large number such as 1e400."""
    value = scalar(data, column, parse_float=str)
    return not isinstance(value, str) or "inf" in value.lower()


def _without_underscores(value: Any) -> Any:
    """Return the value. Raises ValueError for a text such as "1_0", which Python reads as 10."""
    if isinstance(value, str) and "_" in value:
        raise ValueError
    return value


def _whole(value: Any, classes: tuple[str, ...]) -> int:
    """Return a value as a class number. Raises SampleError if it is not one."""
    try:
        number = int(_without_underscores(value))
        if isinstance(value, float) and number != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        known = f" and none of the {len(classes)} classes" if classes else ""
        raise SampleError(f"{str(value)[:80]!r} is not a whole number{known}") from None
    if number < 0 or (classes and number >= len(classes)):
        raise SampleError(
            f"{number} is not a class: they are 0 to {len(classes) - 1 if classes else 'n'}"
        )
    return number
