"""Labels, numbers and texts by name: from a column of the index, else from the bytes of a field.

`label`, `number` and `text` make fields. `with_classes` finds the column or field that a name means in
an index. `label_columns` gives the values of complete columns, for which no byte is read. Sets that
number their classes differently are joined by class name in the columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.decode.boxes import Boxes
from wdstrain.decode.fields import Example, Field, NumpyArray, field_names
from wdstrain.decode.transforms import Draws
from wdstrain.errors import SampleError, UsageError, logger
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.columns import Column
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import (
    KINDS,
    LARGEST,
    Array,
    Classes,
    ColumnInfo,
    names_of,
    number_of,
    place_of_entry,
    scalar,
    text_of,
)
from wdstrain.shards.offsets import Ints, as_numpy
from wdstrain.shards.where import column_named


@dataclass(frozen=True)
class LabelField:
    """Field that reads a label, a number or a text.

    names: columns or fields to look for; with an index, the fields that hold the value, or "" for a
    joined column. entry: of their JSON, or the joined column. kind: "class", "multi", "number",
    "text" or "vector". classes: names, in the order of the delivered numbers. stored: names in the
    order of the numbers in the shards, if it differs.
    by_name: a text that is the name of a class and the number of another means the name, as it does
    in JSON.
    is_finite: an infinite or NaN number makes a sample bad. is_bound: names are fields.
    is_joined: only a column joins the numberings of its sets.
    """

    names: tuple[str, ...]
    kind: str
    entry: str | None = None
    classes: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    by_name: bool = True
    dtype: str = "float32"
    is_finite: bool = False
    is_bound: bool = False
    is_joined: bool = False

    @property
    def example(self) -> Example | None:
        """Shape and dtype of a row; None for texts."""
        shape = (len(self.classes),) if self.kind == "multi" else ()
        dtype = KINDS[self.kind].dtype or self.dtype
        return None if self.kind in ("text", "vector") else Example(shape, dtype)

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> str | None:
        """Write the value to `out`, or return a text. Raises SampleError for another value."""
        if self.kind == "text" and self.entry is None:
            return bytes(data).decode("utf-8-sig")
        if self.is_joined:
            raise SampleError(
                "the joined sets number its classes differently, and it has no column"
            )
        value = scalar(data, self.entry, number_of if self.kind == "number" else None)
        if out is None:
            return text_of(value)
        out[()] = self.delivered(value)
        return None

    def delivered(self, value: Any) -> Any:
        """Return a class, number or list in the shards as the batch has it. Raises SampleError."""
        if self.kind == "number":
            return self._checked(value)
        if self.kind == "class":
            number = self._stored.number(value)
            return self._positions[self.stored[number]] if self.stored else number
        places = [self._positions.get(name, -1) for name in names_of(value)]
        if -1 in places:
            name = str(value[places.index(-1)])[:80]
            raise SampleError(f"{name!r} is none of the {len(self.classes)} classes")
        flags = np.zeros(len(self.classes), np.float32)
        flags[places] = 1
        return flags

    def _checked(self, value: Any) -> float:
        number = number_of(value)
        if self.is_finite and not math.isfinite(number):
            raise SampleError(f"{str(value)[:80]!r} is not finite, so no model can learn it")
        if LARGEST < abs(number) < math.inf:
            raise SampleError(f"{str(value)[:80]} is more than a float32 holds")
        exact = value if type(value) is int else number
        if abs(number) > 1 << 24 and not is_exact(exact, self.dtype):
            self._warned  # noqa: B018
        return number

    @cached_property
    def _warned(self) -> bool:
        """True; logs when it is first read, so once for each field."""
        _warn_of_digits(self.names[0], self.dtype)
        return True

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: number for number, name in reversed(list(enumerate(self.classes)))}

    @cached_property
    def _stored(self) -> Classes:
        """Numbers of the classes in the shards."""
        by_name = self.by_name or self.entry is not None
        return Classes(self.stored or self.classes, by_name=by_name)


def label(
    names: str = "cls", *, classes: tuple[str, ...] | list[str] = (), multi: bool = False
) -> Field:
    """Return a field that reads a class number as an int64 tensor [b].

    names: a column of the index, such as "kind", else a field of the samples; "json.kind" is an
    entry of a JSON field. Several are separated by ";". A text that is one of `classes` counts as its
    position there. If the index knows the label, a number counts as the number of its class.

    classes: default: the classes that the index names, of all sets together. If the index names
    classes too, a class is found by its name; its number in the shards does not matter.
    multi: read a list of classes, as a float32 tensor [b, classes] of ones and zeros. A column of
    lists is always read so.
    """
    return _field(names, "multi" if multi else "class", classes=tuple(classes))


def number(names: str, *, dtype: str = "float32") -> Field:
    """Return a field that reads a number as a tensor [b].

    names: see `label`. dtype: "float32", or "float64" for times and other numbers of many digits.
    """
    if dtype not in ("float32", "float64"):
        raise UsageError(
            "must be float32 or float64.",
            option="dtype",
            value=dtype,
        )
    return _field(names, "number", dtype=dtype)


def text(names: str = "txt") -> Field:
    """Return a field of UTF-8 text. The batch holds a list of b strings. names: see `label`."""
    return _field(names, "text")


def field_of(info: ColumnInfo, **options: Any) -> LabelField:
    """Return the field that reads a label of an index."""
    place = (info.field,), info.task, info.entry
    return LabelField(*place, info.classes, by_name=False, is_bound=True, **options)


def reader_of(info: ColumnInfo) -> str:
    """Return the call that makes the field of a label, as a user types it."""
    name = "" if info.stored_as == "cls" else f'"{info.name}"'
    return f'wt.number("{info.name}")' if info.kind == "number" else f"wt.label({name})"


def with_classes(field: Field, index: Index | None) -> Field:
    """Return a label, number or text as it is read from an index; any other field unchanged.

    Its names become fields of the samples, and its classes those of all sets together. An array that
    is a joined column becomes a field of the kind "vector". Raises UsageError for classes that differ
    between sets without a common column, and for a label of several classes whose names are unknown.
    """
    if isinstance(field, Boxes) and index is not None:
        return field.of_index(index)
    if type(field) is NumpyArray and index is not None:
        named = (column for column in index.columns if column.name.lower() in field.names)
        vectors = [column.name for column in named if column.kind == "vector"]
        return LabelField(("",), "vector", vectors[0], is_bound=True) if vectors else field
    if not isinstance(field, LabelField):
        return field
    if index is None:
        _check_texts(field)
        return replace(field, names=tuple(map(str.lower, field.names)))
    infos = [info for name in field.names if (info := _info(index, field, name)) is not None]
    for info in infos:
        if info.kind in ("mask", "boxes"):
            held = "masks" if info.kind == "mask" else "boxes"
            raise UsageError(
                f"{field.names[0]} holds {held}.", f"Read them with wt.{info.kind}({info.field!r})."
            )
    places = [info.place for info in infos] or [(field.names[0].lower(), field.entry)]
    names = tuple(name for name, entry in dict.fromkeys(places) if entry == places[0][1])
    field = replace(field, names=names, entry=places[0][1], is_bound=True)
    if field.kind == "class" and any(info.kind == "multi" and info.classes for info in infos):
        field = replace(field, kind="multi")
    if field.kind not in ("class", "multi"):
        return field
    label = next((label for label in index.labels if label.place in places), None)
    if why := next((why for one, why in index.differing.items() if one.place in places), ""):
        field = _joined(field, index, label, why)
    elif label is not None and label.is_class == (field.kind == "class"):
        field = numbered(field, label)
    if field.kind == "multi" and not field.classes:
        raise UsageError(
            f"the index names no classes for {field.names[0]}.",
            "Give {classes}.",
            {"classes": ...},
        )
    return field


def numbered(field: LabelField, info: ColumnInfo, *, is_alone: bool = True) -> LabelField:
    """Return the field that reads a label from shards whose index has it as `info`.

    is_alone: no other shards number their classes differently. Raises UsageError if the field lacks
    a class.
    """
    field = replace(field, by_name=False, classes=field.classes or info.classes)
    if field.kind != "class" or not info.has_names or info.classes == field.classes:
        return field
    missing = [name for name in info.classes if name not in field.classes]
    if is_alone and len(missing) == len(info.classes):  # new names for the same numbers
        return field
    if missing:
        raise UsageError(
            f"{{classes}} lacks {missing[0]!r}, which the index of these shards names: "
            f"{info.numbering}.",
            "Name all of its classes, in any order.",
            {"classes": list(field.classes)[:10]},
        )
    return replace(field, stored=info.classes)


def _field(names: str, kind: str, **options: Any) -> LabelField:
    parts = field_names(names, lower=False)
    name, entry = place_of_entry(parts[0])
    if len(parts) == 1 and entry is not None:  # also without an index
        return LabelField((name,), kind, entry, is_bound=True, **options)
    return LabelField(parts, kind, **options)


def _info(index: Index, field: LabelField, name: str) -> ColumnInfo | None:
    """Return the column, label or field of samples that a name means; None if there is none."""
    known: tuple[ColumnInfo, ...] = (*index.labels, *index.differing, *index.columns)
    place = (name, field.entry) if field.is_bound else place_of_entry(name)
    meant = [info for info in known if info.place == place]
    if not meant and not field.is_bound:
        column = column_named(index, name)
        own = None if column is None else column.place
        meant = [info for info in known if own == info.place or (own is None and info.name == name)]
    if not meant and place[0].lower() in index.fields:
        return ColumnInfo(name, "text", place[0].lower(), place[1])
    return next(iter(meant), None)


def _joined(field: LabelField, index: Index, label: ColumnInfo | None, why: str) -> LabelField:
    """Return a label of sets that number their classes differently, which only a column joins.

    why: how they do.
    """
    found = (column for column in index.columns if label and column.place == label.place)
    column = next(found, None)
    if label is None or column is None:
        raise UsageError(
            f"{why}.",
            "Pack them together, or make a column of each set: wdstrain index SET --label "
            f"{field.names[0]} --classes A,B,... (wdstrain index --columns shows how).",
        )
    numbered(field, label, is_alone=False)  # all of its classes are named
    if column.stored.null_count:
        raise UsageError(
            f"{column.stored.null_count} samples have no value in the column {column.name}, "
            "whose sets number their classes differently.",
            "Leave them out: {where}.",
            {"where": f"`{column.name}` is not None"},
        )
    return replace(field, classes=field.classes or label.classes, is_joined=True)


def _check_texts(field: LabelField) -> None:
    """Raise UsageError if a text can be the name of a class and the number of another class."""
    is_ambiguous = field.entry is None and any(
        name.isdecimal() and int(name) != position and int(name) < len(field.classes)
        for position, name in enumerate(field.classes)
    )
    if is_ambiguous:
        raise UsageError(
            "a text may be the name of one class and the number of another.",
            "Use wt.label() without classes, which delivers the number, or wt.Loader, which "
            "knows the index.",
            option="classes",
            value=list(field.classes)[:10],
        )


# --- columns --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelColumn:
    """The values of a field of all samples: an array of numbers, or lists, or texts.

    values: an array of numpy, or anything whose `take` returns values of Arrow. numbers: delivered
    instead of the values, int64. count: classes of lists.
    """

    values: Any
    dtype: str = "int64"
    numbers: Ints | None = None
    count: int = 0

    def rows(self, ids: Ints) -> Array | list[Any]:
        """Return the values of these samples, in memory of their own. ids: int64[b]"""
        if isinstance(self.values, np.ndarray):
            values: Array = self.values[ids]
            return (values if self.numbers is None else self.numbers[values]).astype(self.dtype)
        rows = self.values.take(pa.array(ids))
        if pa.types.is_large_list(rows.type):
            return [as_numpy(row.values).copy() for row in rows]
        if not self.count:
            return list(rows.to_pylist())
        flags = np.zeros((len(ids), self.count), np.float32)
        flags[np.asarray(pc.list_parent_indices(rows)), np.asarray(rows.flatten())] = 1
        return flags


def label_columns(fields: Mapping[str, Field], index: Index) -> dict[str, LabelColumn]:
    """Return the columns that take the place of fields, by the fields' names.

    A column is used only if it gives every sample the value that its bytes would give. Otherwise (a
    missing value, a class that the field does not know) the field reads bytes, which gives the reason.
    Raises UsageError for such a joined column: there are no bytes.
    """
    columns = {name: _label_column(field, index) for name, field in fields.items()}
    joined = {column.name: column for column in index.columns if column.is_joined}
    for name, field in fields.items():
        if isinstance(field, LabelField) and field.names == ("",) and columns[name] is None:
            raise _incomplete(joined[str(field.entry)], field.kind)
        if isinstance(field, Boxes) and field.column and joined[field.column].stored.null_count:
            raise _incomplete(joined[field.column], "list of boxes")
    return {name: column for name, column in columns.items() if column is not None}


def _incomplete(column: Column, kind: str) -> UsageError:
    """Return the error for a field that a joined column does not give for every sample."""
    return UsageError(
        f"the column {column.name}, {column.summary}, does not give every sample a {kind}: "
        f"{column.stored.null_count} of {len(column)} samples have no value.",
        "Leave them out: {where}, or declare what the values of a label mean: wdstrain index SET "
        f"--label {column.name}",
        {"where": f"`{column.name}` is not None"},
    )


def _label_column(field: Field, index: Index) -> LabelColumn | None:
    if type(field) is not LabelField:  # a user's class may read other values
        return None
    place = (field.names[0], field.entry) if len(field.names) == 1 else None
    column = next((column for column in index.columns if column.place == place), None)
    if column is None or not len(column) or column.stored.null_count:
        return None
    if field.kind in ("text", "vector"):
        kinds = ("vector",) if field.kind == "vector" else ("text", "class")
        return LabelColumn(column) if column.kind in kinds and field.entry is not None else None
    if field.kind == "number":
        return _numbers(field, column)
    return (_lists if field.kind == "multi" else _classes)(field, column)


def _numbers(field: LabelField, column: Column) -> LabelColumn | None:
    """Return the numbers of a column; None if some value is no finite float32."""
    if column.kind not in ("flag", "integer", "number"):
        return None
    values = column.values.cast(pa.int8()) if column.kind == "flag" else column.values
    numbers = as_numpy(values)
    if not np.isfinite(numbers).all() or np.abs(numbers.astype(np.float64)).max() > LARGEST:
        return None
    if not is_exact(numbers, field.dtype):
        _warn_of_digits(column.name, field.dtype)
    return LabelColumn(numbers, field.dtype)


def _lists(field: LabelField, column: Column) -> LabelColumn | None:
    """Return the lists of a column; None if some name is not a class of the field."""
    if column.kind != "multi":
        return None
    numbers = pc.index_in(column.values.flatten(), pa.array(field.classes, pa.string()))
    if numbers.null_count:
        return None
    first = column.values.offsets.to_numpy()
    lists = pa.ListArray.from_arrays(pa.array(first - first[0]), numbers)
    return LabelColumn(lists, count=len(field.classes))


def _classes(field: LabelField, column: Column) -> LabelColumn | None:
    """Return the class numbers of a column; None if the field needs the bytes."""
    if column.kind not in ("class", "flag", "integer", "text"):
        return None
    coded = column.values if column.kind == "class" else column.values.dictionary_encode()
    values: Sequence[Any] = coded.dictionary.to_pylist()
    if column.kind == "class" and column.entry is None:  # the bytes hold numbers
        field, values = numbered(field, column), range(len(values))
    try:
        numbers = np.array([field.delivered(value) for value in values], np.int64)
    except SampleError:
        return None
    return LabelColumn(as_numpy(coded.indices), numbers=numbers)


def is_exact(values: Any, dtype: str) -> bool:
    """Return whether no neighboring whole numbers become one number of a dtype."""
    numbers = np.asarray(values)
    size = np.abs(numbers.astype(np.float64))
    large = numbers[(size > (1 << (24 if dtype == "float32" else 53))) & (size < 1 << 63)]
    return bool((large.astype(dtype).astype(numbers.dtype) == large).all())


def _warn_of_digits(name: str, dtype: str) -> None:
    logger.warning(
        "the numbers of %s have more digits than %s holds: some become equal. Give "
        'wt.number(..., dtype="float64"), or subtract a constant when the set is made.',
        name,
        dtype,
    )
