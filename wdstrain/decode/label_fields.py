"""Labels and numbers: bytes of a label field to a class number, flags, or a float.

Sets that number their classes differently are joined by class name: each set's numbers are translated to those of the joined
label.
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
from wdstrain.shards.index import Index, Ints
from wdstrain.shards.index import Label as IndexLabel
from wdstrain.shards.values import Array, scalar

OwnLabels = tuple[
    tuple[tuple[str, str | None], IndexLabel | None], ...
]  # (place, label) where a set has another than others
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Label:
    """numbers: what is delivered for each of `classes`; empty: its place among them.

    parts: (id of the first sample, how the label is read from there on), where sets that were joined number their classes
    differently; `classes` are then those that are delivered. by_name: a text that is the name of a class is that class, also
    where it could be the number of another.
    """

    names: tuple[str, ...]
    column: str | None
    classes: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    parts: tuple[tuple[int, Label], ...] = ()
    by_name: bool = False

    @property
    def example(self) -> Example:
        return Example((), "int64")

    def readers(self, ids: Ints) -> list[Label]:
        """How the label of each of these samples is read."""
        if not self.parts:
            return [self] * len(ids)
        firsts = np.array([first for first, _ in self.parts], np.int64)
        return [
            self.parts[number][1]
            for number in (np.searchsorted(firsts, ids, side="right") - 1).tolist()
        ]

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> None:
        assert out is not None
        number = self._number(data)
        out[()] = self.numbers[number] if self.numbers else number

    @property
    def is_ambiguous(self) -> bool:
        """Whether a text may be the name of one class and the number of another."""
        return self.column is None and any(
            name.isdecimal() and int(name) != place and int(name) < len(self.classes)
            for place, name in enumerate(self.classes)
        )

    def _number(self, data: memoryview) -> int:
        if self.by_name and (place := self._places.get(str(scalar(data, self.column)))) is not None:
            return place
        if (
            self.column is None
            and (digits := bytes(data)).isdigit()
            and (not self.classes or int(digits) < len(self.classes))
        ):
            return int(digits)  # as nearly always
        value = scalar(data, self.column)
        # a text of its own is the class's number, also where classes have numbers for names; an entry of a table is what
        # the table said, so there the name comes first
        number = isinstance(value, int) or (
            isinstance(value, str) and value.isdecimal() and int(value) < len(self.classes)
        )
        place = self._places.get(str(value)) if self.column is not None or not number else None
        return _whole(value, self.classes) if place is None else place

    @cached_property
    def _places(self) -> dict[str, int]:
        return _places(self.classes)


@dataclass(frozen=True)
class Labels:
    names: tuple[str, ...]
    column: str | None
    classes: tuple[str, ...]

    @property
    def example(self) -> Example:
        return Example((len(self.classes),), "float32")

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> None:
        value = scalar(data, self.column)
        if not isinstance(value, list):
            raise SampleError(f"{str(value)[:80]!r} is no list of classes")
        assert out is not None
        out[()] = 0
        for one in value:
            place = self._places.get(str(one))
            if place is None:
                raise SampleError(f"{str(one)[:80]!r} is none of the {len(self.classes)} classes")
            out[place] = 1

    @cached_property
    def _places(self) -> dict[str, int]:
        return _places(self.classes)


def _places(classes: tuple[str, ...]) -> dict[str, int]:
    """The number of each class by its name; of a name that comes twice, the first."""
    return {name: number for number, name in reversed(list(enumerate(classes)))}


@dataclass(frozen=True)
class Number:
    names: tuple[str, ...]
    column: str | None
    is_finite: bool = False  # what is infinite or NaN is a bad sample
    dtype: str = "float32"

    @property
    def example(self) -> Example:
        return Example((), self.dtype)

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> None:
        value = scalar(data, self.column)
        assert out is not None
        try:
            found = float(_plain(value))
        except (TypeError, ValueError, OverflowError):
            raise SampleError(f"{str(value)[:80]!r} is not a number") from None
        if self.is_finite and not math.isfinite(found):
            raise SampleError(f"{str(value)[:80]!r} is no number that can be learnt")
        if _LARGEST < abs(found) < math.inf or (
            math.isinf(found) and not _says_infinity(data, self.column)
        ):
            raise SampleError(f"{str(value)[:80]} is more than a float32 holds")
        out[()] = found


def label(
    names: str = "cls",
    *,
    column: str | None = None,
    classes: tuple[str, ...] | list[str] = (),
    multi: bool = False,
) -> Label | Labels:
    """A class number as an int64 tensor [b]. A text that is one of `classes` counts as its place there, and of shards whose
    index knows the label a number as the number of its class.

    classes: default those that the index of the shards names, of several sets together. Where the index names classes too, each
    counts by its name, whatever its number in the shards. column: for a JSON field, the entry to read. multi: a list of classes, as a float32 tensor [b, classes] of ones and zeros.
    """
    if multi and column is None:
        raise UsageError("a label of several classes is an entry of a JSON field: give column=.")
    return (Labels if multi else Label)(field_names(names), column, tuple(classes))


def with_classes(field: Field, index: Index | None) -> Field:
    """A label that delivers one numbering of classes for all samples of an index; any other field as it is.

    Without classes of its own it has those of the index. A class that the index names is found by its name among the classes
    of the field, whatever its number in the shards. Raises UsageError where the sets of the index cannot be joined so, and for
    a label of several classes that nobody names.
    """
    if not isinstance(field, (Label, Labels)):
        return field
    if index is None and isinstance(field, Label) and field.is_ambiguous:
        raise UsageError(
            f"classes={list(field.classes)[:10]} has numbers for names, so a text may be the name of one class and the number of "
            f"another. Use wt.label() without classes, which delivers the number, or wt.Loader, which knows the index."
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
                f"{why}. Pack them together, or give wt.label(classes=[...]) with all names and numbers that count."
            )
        field = replace(field, classes=joined.classes) if joined is not None else field
    if isinstance(field, Labels):
        if not field.classes:
            raise UsageError(
                f"the index names no classes for {field.names[0]}, column {field.column!r}. Give classes=[...]."
            )
        return field
    if not any(own):
        return _unknown(field)
    read = [_numbered(field, label, is_alone=len(set(own)) == 1) for label in own]
    if all(one == field for one in read):
        return field
    firsts = index.first.tolist() if index is not None and index.shard_labels else [0]
    return replace(field, parts=tuple(zip(firsts, read, strict=False)))


def _numbered(field: Label, label: IndexLabel | None, *, is_alone: bool) -> Label:
    """How a label is read from shards whose index has it as `label`. is_alone: no other shards number their classes otherwise."""
    if label is None:
        return _unknown(field)
    if not label.has_names or label.classes == field.classes:
        return field
    numbers = {name: number for number, name in enumerate(field.classes)}
    missing = [name for name in label.classes if name not in numbers]
    if is_alone and len(missing) == len(label.classes):  # other names for the same numbers
        return field
    if missing:
        raise UsageError(
            f"classes={list(field.classes)[:10]} lacks {missing[0]!r}, which the index of these shards names: {label.numbering}. "
            f"Name all of its classes, in any order."
        )
    return replace(
        field, classes=label.classes, numbers=tuple(numbers[name] for name in label.classes)
    )


def differing_labels(index: Index) -> list[OwnLabels]:
    """For each shard its own labels at the places where joined sets differ in theirs; nothing if none do."""
    own = [{label.place: label for label in labels} for labels in index.shard_labels]
    places = [
        place
        for place in dict.fromkeys(place for one in own for place in one)
        if len({one.get(place) for one in own}) > 1
    ]
    return [tuple((place, one.get(place)) for place in places) for one in own] if places else []


@lru_cache(maxsize=256)
def label_of_set(field: Label, labels: OwnLabels) -> Label:
    """How a label is read from samples of a set with these labels of its own. Raises UsageError where that takes its classes."""
    for (name, column), label in labels:
        if name in field.names and column == field.column:
            if not field.classes:
                raise UsageError(
                    f"{name} has another label in each of the joined sets ({label.numbering if label else 'no label'} in one). "
                    f"Give wt.label(classes=[...]) with all names, whose places are then the numbers."
                )
            return _numbered(field, label, is_alone=False)
    return field


def _unknown(field: Label) -> Label:
    """How a label is read of which no index tells that its texts are numbers."""
    return replace(field, by_name=True) if field.is_ambiguous else field


def _label_of(field: Label | Labels, labels: Sequence[IndexLabel]) -> IndexLabel | None:
    """The label among these that a field reads."""
    for one in labels:
        if (
            one.field in field.names
            and one.column == field.column
            and (one.kind == "multi") == isinstance(field, Labels)
        ):
            return one
    return None


def field_of(label: IndexLabel) -> Label | Labels | Number:
    """The field that reads a label of an index."""
    if label.kind == "number":
        return Number((label.field,), label.column)
    return (Labels if label.kind == "multi" else Label)((label.field,), label.column, label.classes)


def reader_of(label: IndexLabel) -> str:
    """How a label of an index is read, as people type it."""
    where = f'"{label.field}"' + (f', column="{label.column}"' if label.column is not None else "")
    if label.kind == "number":
        return f"wt.number({where})"
    return (
        "wt.label()"
        if where == '"cls"'
        else f"wt.label({where}{', multi=True' if label.kind == 'multi' else ''})"
    )


def number(names: str, *, column: str | None = None) -> Number:
    """A number as a float32 tensor [b]. column: for a JSON field, the entry to read."""
    return Number(field_names(names), column)


def _says_infinity(data: memoryview, column: str | None) -> bool:
    """Whether a value that is infinite to Python is so itself, not a number beyond the largest such as 1e400."""
    value = scalar(data, column, parse_float=str)
    return not isinstance(value, str) or "inf" in value.lower()


def _plain(value: Any) -> Any:
    """The value itself. Raises ValueError for "1_0", a name to people and 10 to Python."""
    if isinstance(value, str) and "_" in value:
        raise ValueError
    return value


def _whole(value: Any, classes: tuple[str, ...]) -> int:
    try:
        number = int(_plain(value))
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


def is_light(field: Field) -> bool:
    """Whether reading it takes less than sending it to another process."""
    return isinstance(field, (Label, Number))
